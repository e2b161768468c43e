//! What the demo says at its end, for somebody who sees a router for the first time.
//!
//! *Invariant*: pure text from figures.

use std::fmt::Write;

use super::load::Sample;
use crate::engine::metrics::Stats;

/// One engine's name, and what it counted itself.
#[derive(Clone, Debug)]
pub struct EngineFigures {
    pub name: String,
    pub stats: Stats,
}

/// Times of the same short requests straight and through the router, in nanoseconds, in order of sending.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    pub direct_ns: Vec<u64>,
    pub routed_ns: Vec<u64>,
}

/// All that is to be told.
#[derive(Clone, Debug)]
pub struct Report {
    pub engines: Vec<EngineFigures>,
    pub samples: Vec<Sample>,
    pub clients: usize,
    pub took_ns: u64,
    /// Requests that an engine is given at once.
    pub max_concurrency: usize,
    pub latency: Latency,
    /// Built without optimisation.
    pub unoptimised: bool,
}

/// The value that `share` (0 to 1) of `values` do not exceed; 0 of none.
pub fn quantile(values: &[u64], share: f64) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let at = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(0)
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn time(ns: u64) -> String {
    match ns {
        0..100_000 => format!("{:.1} µs", ns as f64 / 1e3),
        100_000..1_000_000 => format!("{:.0} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

/// A share as people read it; `-` of nothing.
pub fn percent(part: u64, all: u64) -> String {
    if all == 0 { "-".into() } else { format!("{:.1} %", part as f64 * 100.0 / all as f64) }
}

/// Rows of cells as lines, the first of each to the left and the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::from("  ");
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            match column {
                0 => line.extend([cell, pad.as_str()]),
                _ => line.extend(["   ", pad.as_str(), cell]),
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

impl Report {
    /// Requests that failed.
    pub fn failed(&self) -> usize {
        self.samples.iter().filter(|sample| sample.fault.is_some()).count()
    }

    /// The whole text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let requests = self.samples.len();
        let engines = self.engines.len();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "\n{} requests from {} clients at once, through one router, to {engines} simulated engines, in {}\n\n\
             Who got what",
            grouped(requests as u64),
            self.clients,
            time(self.took_ns),
        );
        out.push_str(&self.engine_table());
        out.push_str(
            "  Prompt tokens \"reused\" were still in that engine's prefix cache and were not computed again.\n",
        );
        let faults: Vec<&str> = self.samples.iter().filter_map(|sample| sample.fault.as_deref()).collect();
        if !faults.is_empty() {
            let _ = writeln!(out, "\n{} requests failed, for example:", faults.len());
            for fault in faults.iter().take(3) {
                let _ = writeln!(out, "  {fault}");
            }
        }
        let _ = writeln!(out, "\nWaiting for a free place");
        out.push_str(&self.waits());
        let _ = writeln!(out, "\nTime that the router adds");
        out.push_str(&self.latency_table());
        if self.unoptimised {
            out.push_str(
                "  This is a debug build: a release build (cargo run --release) adds a fraction of that.\n",
            );
        }
        out.push_str(
            "\nNext\n\
             \x20 ringway serve --backend http://HOST:8000 --backend http://HOST:8001   in front of your own engines\n\
             \x20 then point your client at http://127.0.0.1:30000/v1 and watch http://127.0.0.1:29000/metrics\n",
        );
        out
    }

    fn engine_table(&self) -> String {
        let header =
            ["engine", "requests", "share", "streamed", "prompt tokens", "reused", "answer tokens", "errors"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        let all = self.samples.iter().filter(|sample| !sample.server.is_empty()).count() as u64;
        let mut total = Stats::default();
        let mut row = |name: &str, got: &[&Sample], stats: &Stats| {
            let count = |test: fn(&Sample) -> bool| got.iter().filter(|sample| test(sample)).count() as u64;
            rows.push(vec![
                name.to_owned(),
                grouped(got.len() as u64),
                percent(got.len() as u64, all),
                grouped(count(|sample| sample.streamed)),
                grouped(stats.prompt_tokens),
                percent(stats.cached_tokens, stats.prompt_tokens),
                grouped(stats.output_tokens),
                grouped(count(|sample| sample.fault.is_some())),
            ]);
        };
        for engine in &self.engines {
            let got: Vec<&Sample> =
                self.samples.iter().filter(|sample| sample.server == engine.name).collect();
            row(&engine.name, &got, &engine.stats);
            total.prompt_tokens += engine.stats.prompt_tokens;
            total.cached_tokens += engine.stats.cached_tokens;
            total.output_tokens += engine.stats.output_tokens;
        }
        let answered: Vec<&Sample> = self.samples.iter().filter(|sample| !sample.server.is_empty()).collect();
        row("together", &answered, &total);
        table(&rows)
    }

    fn waits(&self) -> String {
        let waits: Vec<u64> =
            self.samples.iter().map(|sample| sample.wait_ms).filter(|wait_ms| *wait_ms > 0).collect();
        let ms = |share| quantile(&waits, share);
        let mut out = format!(
            "  Each engine works on {} requests at once; the router keeps the others in order until one ends.\n",
            self.max_concurrency
        );
        let straight = self.samples.len() - waits.len();
        let _ = writeln!(out, "  straight through   {}", grouped(straight as u64));
        if waits.is_empty() {
            out.push_str("  waited             0\n");
        } else {
            let _ = writeln!(
                out,
                "  waited             {}   (half of them up to {} ms, 99 % up to {} ms, the longest {} ms)",
                grouped(waits.len() as u64),
                ms(0.5),
                ms(0.99),
                ms(1.0)
            );
        }
        out
    }

    fn latency_table(&self) -> String {
        let Latency { direct_ns, routed_ns } = &self.latency;
        let added = |share| {
            let (direct, routed) = (quantile(direct_ns, share), quantile(routed_ns, share));
            if routed >= direct { time(routed - direct) } else { format!("-{}", time(direct - routed)) }
        };
        let row = |name: &str, values: &[u64]| {
            vec![name.to_owned(), time(quantile(values, 0.5)), time(quantile(values, 0.99))]
        };
        let heading = format!("{} short requests each way, in turn", grouped(direct_ns.len() as u64));
        table(&[
            vec![heading, "half within".into(), "99 % within".into()],
            row("straight to an engine", direct_ns),
            row("through the router", routed_ns),
            vec!["added by the router".into(), added(0.5), added(0.99)],
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_occurred() {
        let values: Vec<u64> = (1..=100).rev().collect();
        assert_eq!((quantile(&values, 0.5), quantile(&values, 0.99), quantile(&values, 1.0)), (50, 99, 100));
        assert_eq!((quantile(&[7], 0.5), quantile(&[], 0.5)), (7, 0));
    }

    #[test]
    fn figures_read_well() {
        assert_eq!((grouped(0), grouped(999), grouped(1000), grouped(1_234_567)), {
            ("0".into(), "999".into(), "1,000".into(), "1,234,567".into())
        });
        assert_eq!((time(61_440), time(250_000), time(1_500_000), time(2_345_000_000)), {
            ("61.4 µs".into(), "250 µs".into(), "1.5 ms".into(), "2.35 s".into())
        });
    }

    #[test]
    fn the_text_tells_who_got_what() {
        let sample = |server: &str, wait_ms: u64, fault: Option<&str>| Sample {
            server: server.into(),
            streamed: wait_ms > 0,
            wait_ms,
            first_byte_ns: 1,
            total_ns: 2,
            fault: fault.map(str::to_owned),
        };
        let figures = |name: &str| EngineFigures {
            name: name.into(),
            stats: Stats { prompt_tokens: 1000, cached_tokens: 250, output_tokens: 70, ..Stats::default() },
        };
        let report = Report {
            engines: vec![figures("engine-1"), figures("engine-2")],
            samples: vec![
                sample("engine-1", 0, None),
                sample("engine-1", 12, None),
                sample("engine-1", 0, None),
                sample("engine-2", 30, Some("/v1/messages: status 500")),
                sample("", 0, Some("connection refused")),
            ],
            clients: 2,
            took_ns: 3_000_000,
            max_concurrency: 4,
            latency: Latency { direct_ns: vec![50_000; 10], routed_ns: vec![80_000; 10] },
            unoptimised: false,
        };
        let text = report.text();
        let line = |start: &str| -> Vec<&str> {
            let line = text
                .lines()
                .find(|line| line.trim_start().starts_with(start))
                .unwrap_or_else(|| panic!("{text}"));
            line.split_whitespace().collect()
        };
        assert_eq!(line("engine-1"), ["engine-1", "3", "75.0", "%", "1", "1,000", "25.0", "%", "70", "0"]);
        assert_eq!(line("engine-2"), ["engine-2", "1", "25.0", "%", "1", "1,000", "25.0", "%", "70", "1"]);
        assert_eq!(line("together")[..4], ["together", "4", "100.0", "%"]);
        assert!(
            text.contains(
                "2 requests failed, for example:\n  /v1/messages: status 500\n  connection refused"
            )
        );
        assert_eq!(line("added by the router")[4..], ["30.0", "µs", "30.0", "µs"]);
        assert_eq!(line("waited")[..2], ["waited", "2"]);
        assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
        assert_eq!(report.failed(), 2);
    }
}
