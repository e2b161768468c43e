//! Outcomes as Markdown tables.
//!
//! *Invariant*: every router that ran stands in the table, losses included; a figure over several runs is their mean, with the least and
//! the greatest behind it.

use std::fmt::Write as _;

use serde::Serialize;

use super::simulation::Outcome;

/// Where a row's figures come from: one trace, one set of engines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Place {
    pub trace: String,
    pub engines: usize,
    pub cache_blocks: usize,
    pub speed: f64,
    /// Hit rate of one cache as big as all engines' together, 0 to 1.
    pub limit: f64,
}

/// Figures of one run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    pub hit_rate: f64,
    pub of_limit: f64,
    /// Hit rate that the router expected.
    pub predicted: f64,
    pub ttft_p50_s: f64,
    pub ttft_p99_s: f64,
    pub request_imbalance: f64,
    pub uncached_imbalance: f64,
    pub refused: u64,
    pub end_s: f64,
}

impl Figures {
    pub fn of(outcome: &Outcome, limit: f64) -> Figures {
        let hit_rate = outcome.hit_rate();
        let predicted =
            if outcome.blocks == 0 { 0.0 } else { outcome.predicted_blocks as f64 / outcome.blocks as f64 };
        Figures {
            hit_rate,
            of_limit: if limit > 0.0 { hit_rate / limit } else { 0.0 },
            predicted,
            ttft_p50_s: outcome.ttft_s(0.5),
            ttft_p99_s: outcome.ttft_s(0.99),
            request_imbalance: outcome.request_imbalance(),
            uncached_imbalance: outcome.uncached_imbalance(),
            refused: outcome.refused,
            end_s: outcome.end_ns as f64 / 1e9,
        }
    }
}

/// One router's runs at one place.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub router: String,
    pub runs: Vec<Figures>,
}

impl Row {
    fn mean(&self, of: impl Fn(&Figures) -> f64) -> f64 {
        self.runs.iter().map(of).sum::<f64>() / self.runs.len() as f64
    }

    fn cell(&self, decimals: usize, of: impl Fn(&Figures) -> f64) -> String {
        let mean = self.mean(&of);
        if self.runs.len() < 2 {
            return format!("{mean:.decimals$}");
        }
        let values = || self.runs.iter().map(&of);
        let (least, most) =
            (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        format!("{mean:.decimals$} [{least:.decimals$}–{most:.decimals$}]")
    }
}

/// Seconds with three digits or so.
fn seconds_decimals(seconds: f64) -> usize {
    match seconds {
        s if s >= 100.0 => 0,
        s if s >= 10.0 => 1,
        _ => 3,
    }
}

/// The table of one place: one row per router.
pub fn place_table(place: &Place, rows: &[Row]) -> String {
    let mut lines = vec![
        [
            "router",
            "hit rate %",
            "× limit",
            "TTFT p50 s",
            "TTFT p99 s",
            "requests, busiest ÷ mean",
            "uncached tokens, busiest ÷ mean",
            "refused",
            "expected hits %",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    lines.push(vec![
        format!("one cache, {} × as big: the limit", place.engines),
        format!("{:.1}", place.limit * 100.0),
        "1".into(),
        "–".into(),
        "–".into(),
        "–".into(),
        "–".into(),
        "–".into(),
        "–".into(),
    ]);
    for row in rows {
        let seconds = |of: fn(&Figures) -> f64| row.cell(seconds_decimals(row.mean(of)), of);
        lines.push(vec![
            row.router.clone(),
            row.cell(1, |f| f.hit_rate * 100.0),
            row.cell(3, |f| f.of_limit),
            seconds(|f| f.ttft_p50_s),
            seconds(|f| f.ttft_p99_s),
            row.cell(3, |f| f.request_imbalance),
            row.cell(3, |f| f.uncached_imbalance),
            row.cell(0, |f| f.refused as f64),
            row.cell(1, |f| f.predicted * 100.0),
        ]);
    }
    format!("{}\n\n{}", heading(place), markdown(&lines))
}

fn heading(place: &Place) -> String {
    format!(
        "### {}, {} engines of {} blocks, {} × trace speed",
        place.trace, place.engines, place.cache_blocks, place.speed
    )
}

/// One row per variant, three figures per place: × limit, imbalance of requests, imbalance of uncached tokens; then the worst of each.
pub fn matrix(places: &[Place], variants: &[(String, Vec<Row>)]) -> String {
    let mut head = vec!["variant".to_owned()];
    head.extend(places.iter().map(|place| {
        let short = place.trace.trim_start_matches("mooncake_").trim_end_matches("_trace");
        format!("{short} {}/{} at {}×", place.engines, place.cache_blocks, place.speed)
    }));
    head.push("worst".into());
    let mut lines = vec![head];
    for (variant, rows) in variants {
        let mut line = vec![variant.clone()];
        let (mut hits, mut requests, mut uncached) = (f64::INFINITY, 0.0f64, 0.0f64);
        for row in rows {
            let figures = (
                row.mean(|f| f.of_limit),
                row.mean(|f| f.request_imbalance),
                row.mean(|f| f.uncached_imbalance),
            );
            line.push(format!("{:.3} {:.3} {:.3}", figures.0, figures.1, figures.2));
            (hits, requests, uncached) =
                (hits.min(figures.0), requests.max(figures.1), uncached.max(figures.2));
        }
        line.push(format!("**{hits:.3} {requests:.3} {uncached:.3}**"));
        lines.push(line);
    }
    markdown(&lines)
}

/// Cells to a table; the first line is its head. First column to the left, the others to the right.
fn markdown(lines: &[Vec<String>]) -> String {
    let columns = lines[0].len();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (i, line) in lines.iter().enumerate() {
        for (column, cell) in line.iter().enumerate() {
            let width = widths[column];
            let _ = if column == 0 {
                write!(text, "| {cell:<width$} ")
            } else {
                write!(text, "| {cell:>width$} ")
            };
        }
        text.push_str("|\n");
        if i == 0 {
            for (column, width) in widths.iter().enumerate() {
                let dashes = "-".repeat(width + 1);
                let _ = if column == 0 { write!(text, "|{dashes}-") } else { write!(text, "|{dashes}:") };
            }
            text.push_str("|\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(of_limit: f64, requests: f64) -> Figures {
        Figures {
            hit_rate: of_limit / 2.0,
            of_limit,
            predicted: 0.5,
            ttft_p50_s: 0.25,
            ttft_p99_s: 120.4,
            request_imbalance: requests,
            uncached_imbalance: 1.25,
            refused: 3,
            end_s: 9.0,
        }
    }

    fn place() -> Place {
        Place { trace: "t".into(), engines: 4, cache_blocks: 600, speed: 20.0, limit: 0.5 }
    }

    #[test]
    fn a_row_per_router_under_the_limit() {
        let rows = [
            Row { router: "one".into(), runs: vec![figures(0.9, 1.0)] },
            Row { router: "many".into(), runs: vec![figures(0.5, 1.0), figures(0.7, 1.5)] },
        ];
        let text = place_table(&place(), &rows);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "### t, 4 engines of 600 blocks, 20 × trace speed");
        assert!(lines[4].starts_with("| one cache, 4 × as big: the limit |") && lines[4].contains(" 50.0 "));
        for part in ["45.0", "0.900", "0.250", "120", "1.250", "50.0"] {
            assert!(lines[5].contains(part), "{part}: {}", lines[5]);
        }
        for part in ["0.600 [0.500–0.700]", "1.250 [1.000–1.500]", "3 [3–3]"] {
            assert!(lines[6].contains(part), "{part}: {}", lines[6]);
        }
        assert!(lines[2..].iter().all(|line| line.chars().count() == lines[2].chars().count()));
    }

    #[test]
    fn a_matrix_ends_with_the_worst() {
        let rows = |a: f64, b: f64| {
            vec![
                Row { router: "r".into(), runs: vec![figures(a, b)] },
                Row { router: "r".into(), runs: vec![figures(b, a)] },
            ]
        };
        let text = matrix(&[place(), place()], &[("x = 1".into(), rows(0.9, 1.1))]);
        assert!(text.contains("| 0.900 1.100 1.250 "), "{text}");
        assert!(text.contains("**0.900 1.100 1.250**"), "{text}");
        assert!(text.contains("t 4/600 at 20×"), "{text}");
    }
}
