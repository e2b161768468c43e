//! Figures as text: the tables of a comparison, and the report of one load.
//!
//! *Invariant*: a table says median and, in brackets, lowest to highest over the repeats; faults stand in the table, not in
//! a footnote.

use std::fmt::Write as _;

use crate::clock::S;
use crate::compare::{Findings, MemoryRun, Run};
use crate::load::Report;
use crate::peers::Kind;
use crate::process::Memory;
use crate::scenario::{self, Scenario};
use crate::stats::{self, Quantiles, Spread};

/// One figure of a run.
struct Column {
    title: &'static str,
    decimals: usize,
    of: fn(&Report) -> Option<f64>,
}

const fn column(title: &'static str, decimals: usize, of: fn(&Report) -> Option<f64>) -> Column {
    Column { title, decimals, of }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn per(amount: Option<u64>, count: u64) -> Option<f64> {
    (count > 0).then_some(amount? as f64 / count as f64)
}

fn cpu_us_per_request(r: &Report) -> Option<f64> {
    per(r.usage.map(|u| u.cpu_ns), r.completed).map(|ns| ns / 1e3)
}

fn cpu_us_per_event(r: &Report) -> Option<f64> {
    per(r.usage.map(|u| u.cpu_ns), r.events).map(|ns| ns / 1e3)
}

fn switches(r: &Report) -> Option<u64> {
    r.usage.map(|u| u.voluntary_switches + u.involuntary_switches)
}

const RATE: Column = column("req/s", 0, |r| Some(r.requests_per_s()));
const CPU: Column = column("CPU us/req", 2, cpu_us_per_request);
const INSTRUCTIONS: Column =
    column("user instr/req", 0, |r| per(r.usage.and_then(|u| u.instructions), r.completed));
const P50: Column = column("p50 us", 0, |r| r.latency.map(|q| us(q.p50_ns)));
const P99: Column = column("p99 us", 0, |r| r.latency.map(|q| us(q.p99_ns)));
const P999: Column = column("p999 us", 0, |r| r.latency.map(|q| us(q.p999_ns)));
const SWITCHES: Column = column("ctx sw/req", 3, |r| per(switches(r), r.completed));
const PROXY_BUSY: Column =
    column("proxy busy %", 0, |r| per(r.usage.map(|u| u.cpu_ns), r.window_ns).map(|share| share * 100.0));
const PROXY_WAIT: Column =
    column("proxy waits %", 1, |r| per(r.usage.map(|u| u.wait_ns), r.window_ns).map(|share| share * 100.0));
const GENERATOR_BUSY: Column = column("generator busy %", 0, |r| Some(r.generator_busy * 100.0));
const LATENESS: Column = column("sent late p99 us", 0, |r| r.lateness.map(|q| us(q.p99_ns)));
const FAULTS: Column = column("faults", 0, |r| Some(r.faults_total() as f64));
const AT_HOME: Column = column("same server %", 0, |r| {
    per(Some(r.backend.turns_at_home), r.backend.turns_later).map(|share| share * 100.0)
});
const UPSTREAM: Column = column("upstream conns", 0, |r| Some(r.backend.connections as f64));

const EVENT_CPU: Column = column("CPU us/event", 2, cpu_us_per_event);
const FIRST_P50: Column = column("first p50 us", 0, |r| r.first_event.map(|q| us(q.p50_ns)));
const FIRST_P99: Column = column("first p99 us", 0, |r| r.first_event.map(|q| us(q.p99_ns)));
const DELAY_P50: Column = column("delay p50 us", 0, |r| r.event_delay.map(|q| us(q.p50_ns)));
const DELAY_P99: Column = column("delay p99 us", 0, |r| r.event_delay.map(|q| us(q.p99_ns)));
const DELAY_P999: Column = column("delay p999 us", 0, |r| r.event_delay.map(|q| us(q.p999_ns)));
const EVENTS: Column = column("events/s", 0, |r| per(Some(r.events), r.window_ns).map(|rate| rate * 1e9));
const PER_PIECE: Column = column("events/receive", 3, |r| per(Some(r.events), r.event_pieces));
const BACKEND_LATE: Column = column("backend late p99 us", 0, |r| r.backend_lateness.map(|q| us(q.p99_ns)));

fn columns(scenario: Scenario) -> &'static [Column] {
    match scenario {
        Scenario::Json | Scenario::Big | Scenario::Prompts => &[
            RATE,
            CPU,
            INSTRUCTIONS,
            P50,
            P99,
            P999,
            SWITCHES,
            PROXY_BUSY,
            PROXY_WAIT,
            GENERATOR_BUSY,
            UPSTREAM,
            AT_HOME,
            FAULTS,
        ],
        Scenario::Paced => &[
            RATE,
            CPU,
            INSTRUCTIONS,
            P50,
            P99,
            P999,
            SWITCHES,
            PROXY_BUSY,
            PROXY_WAIT,
            GENERATOR_BUSY,
            LATENESS,
            BACKEND_LATE,
            UPSTREAM,
            FAULTS,
        ],
        Scenario::Sse => &[
            EVENTS,
            EVENT_CPU,
            FIRST_P50,
            FIRST_P99,
            DELAY_P50,
            DELAY_P99,
            DELAY_P999,
            PER_PIECE,
            PROXY_BUSY,
            PROXY_WAIT,
            GENERATOR_BUSY,
            BACKEND_LATE,
            UPSTREAM,
            FAULTS,
        ],
        Scenario::Conns => &[],
    }
}

/// Columns whose ratio between two proxies means something.
fn ratio_columns(scenario: Scenario) -> &'static [Column] {
    match scenario {
        Scenario::Json | Scenario::Big | Scenario::Prompts => &[CPU, RATE, P50, P99],
        Scenario::Paced => &[CPU, P50, P99],
        Scenario::Sse => &[EVENT_CPU, DELAY_P50, DELAY_P99],
        Scenario::Conns => &[],
    }
}

/// Columns given as a difference from direct.
fn added_columns(scenario: Scenario) -> &'static [Column] {
    match scenario {
        Scenario::Sse => &[FIRST_P50, FIRST_P99, DELAY_P50, DELAY_P99],
        Scenario::Paced => &[P50, P99, P999],
        _ => &[],
    }
}

/// One load: a scenario, and the length of its bodies.
type Case = (Scenario, usize);

fn values(findings: &Findings, case: Case, kind: Kind, column: &Column) -> Vec<Option<f64>> {
    // By repeat, so that two peers' values pair up even when a run failed.
    let mut by_repeat = Vec::new();
    for run in findings.runs.iter().filter(|run| (run.scenario, run.body_len) == case && run.peer == kind) {
        let at = run.repeat as usize;
        if by_repeat.len() <= at {
            by_repeat.resize(at + 1, None);
        }
        by_repeat[at] = (column.of)(&run.report);
    }
    by_repeat
}

fn show(spread: Option<Spread>, decimals: usize) -> String {
    match spread {
        None => "–".into(),
        Some(s) if s.repeats == 1 || s.min == s.max => format!("{:.decimals$}", s.median),
        Some(s) => format!("{:.decimals$} [{:.decimals$}–{:.decimals$}]", s.median, s.min, s.max),
    }
}

/// A Markdown table, padded so that it reads as plain text too. Columns in which no row has a value are left out.
fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let kept: Vec<usize> =
        (0..head.len()).filter(|&i| i == 0 || rows.iter().any(|row| row[i] != "–")).collect();
    let width = |i: usize| {
        rows.iter().map(|row| row[i].chars().count()).chain([head[i].chars().count()]).max().unwrap_or(0)
    };
    let line = |cell: &dyn Fn(usize) -> String| {
        let cells: Vec<String> = kept
            .iter()
            .map(|&i| {
                let text = cell(i);
                let pad = " ".repeat(width(i) - text.chars().count());
                if i == 0 { format!("{text}{pad}") } else { format!("{pad}{text}") }
            })
            .collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let mut text = line(&|i| head[i].to_owned());
    let rules: Vec<String> = kept
        .iter()
        .map(|&i| if i == 0 { "-".repeat(width(i) + 2) } else { format!("{}:", "-".repeat(width(i) + 1)) })
        .collect();
    let _ = writeln!(text, "|{}|", rules.join("|"));
    for row in rows {
        text.push_str(&line(&|i| row[i].clone()));
    }
    text
}

/// The tables of a comparison, as Markdown.
pub fn summary(findings: &Findings, scenarios: &[Scenario], peers: &[Kind]) -> String {
    let mut text = String::from(
        "Medians over the repeats, in brackets lowest–highest. CPU is that of the proxy's threads and processes together, \
         user and system.\n",
    );
    let timed = scenarios.iter().copied().filter(|&scenario| scenario != Scenario::Conns);
    let cases =
        timed.flat_map(|scenario| scenario.bodies().iter().map(move |&body_len| (scenario, body_len)));
    for case @ (scenario, body_len) in cases {
        let peers: Vec<Kind> = peers
            .iter()
            .copied()
            .filter(|&kind| findings.runs.iter().any(|run| run.scenario == scenario && run.peer == kind))
            .collect();
        let columns = columns(scenario);
        let head: Vec<&str> = std::iter::once("peer").chain(columns.iter().map(|c| c.title)).collect();
        let rows: Vec<Vec<String>> = peers
            .iter()
            .map(|&kind| {
                let cells = columns.iter().map(|column| {
                    let known: Vec<f64> =
                        values(findings, case, kind, column).into_iter().flatten().collect();
                    show(stats::spread(&known), column.decimals)
                });
                std::iter::once(kind.name().to_owned()).chain(cells).collect()
            })
            .collect();
        let _ = write!(text, "\n## {}\n\n{}", scenario.title(body_len), table(&head, &rows));
        text.push_str(&joined(findings, case, &peers));
    }
    if scenarios.contains(&Scenario::Conns) {
        text.push_str(&memory_table(&findings.memory));
    }
    if let Some(why) = &findings.no_instructions {
        let _ = writeln!(text, "\nNo instruction counts: this machine does not offer them ({why}).");
    }
    text.push_str(&disturbed(findings));
    text.push_str(&faults(findings));
    text
}

/// Runs that shared a core with something else. They stay in the tables: who leaves runs out must say why.
fn disturbed(findings: &Findings) -> String {
    let mut text = String::new();
    for run in findings.runs.iter().filter(|run| run.report.disturbed()) {
        let proxy = (PROXY_WAIT.of)(&run.report).unwrap_or(0.0);
        let _ = writeln!(
            text,
            "- {}, {}, repeat {}: the generator waited for its core {:.0} % and the proxy {proxy:.0} % of the window",
            run.scenario.title(run.body_len),
            run.peer.name(),
            run.repeat,
            run.report.generator_wait * 100.0
        );
    }
    if text.is_empty() {
        return text;
    }
    format!(
        "\n## Disturbed\n\nSomething else ran on the cores in these runs; repeat the comparison when the machine is quiet.\n\n{text}"
    )
}

/// Ratios and differences, pair by pair within each repeat.
fn joined(findings: &Findings, case: Case, peers: &[Kind]) -> String {
    let scenario = case.0;
    let mut text = String::new();
    let proxies: Vec<Kind> = peers.iter().copied().filter(|&kind| kind != Kind::Direct).collect();
    let columns = ratio_columns(scenario);
    let head: Vec<&str> = std::iter::once("ratio").chain(columns.iter().map(|c| c.title)).collect();
    let mut rows = Vec::new();
    for &base in [Kind::Ringway, Kind::Haproxy, Kind::Nginx].iter().filter(|kind| proxies.contains(kind)) {
        for &subject in proxies.iter().filter(|&&subject| subject < base) {
            let mut row = vec![format!("{} / {}", subject.name(), base.name())];
            for column in columns {
                let a = values(findings, case, subject, column);
                let b = values(findings, case, base, column);
                row.push(show(stats::spread(&stats::ratios(&a, &b)), 2));
            }
            rows.push(row);
        }
    }
    if !rows.is_empty() {
        let _ = write!(text, "\nRatios within each repeat:\n\n{}", table(&head, &rows));
    }
    let columns = added_columns(scenario);
    if columns.is_empty() || !peers.contains(&Kind::Direct) || proxies.is_empty() {
        return text;
    }
    let head: Vec<&str> = std::iter::once("added to direct").chain(columns.iter().map(|c| c.title)).collect();
    let rows: Vec<Vec<String>> = proxies
        .iter()
        .map(|&kind| {
            let mut row = vec![kind.name().to_owned()];
            for column in columns {
                let a = values(findings, case, kind, column);
                let b = values(findings, case, Kind::Direct, column);
                row.push(show(stats::spread(&stats::differences(&a, &b)), column.decimals));
            }
            row
        })
        .collect();
    let _ = write!(text, "\nDifference from direct within each repeat:\n\n{}", table(&head, &rows));
    text
}

/// One figure of a memory run.
type MemoryColumn = (&'static str, usize, fn(&MemoryRun) -> f64);

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// KiB per idle connection.
fn each(run: &MemoryRun, of: fn(&Memory) -> u64) -> f64 {
    (of(&run.idle) as f64 - of(&run.fresh) as f64) / f64::from(run.connections) / 1024.0
}

/// RSS in MiB at the n-th reading after the burst; not a number when there is none.
fn after(run: &MemoryRun, n: usize) -> f64 {
    run.after_burst.get(n).map_or(f64::NAN, |(_, memory)| mib(memory.rss))
}

const MEMORY_COLUMNS: &[MemoryColumn] = &[
    ("fresh RSS MiB", 1, |run| mib(run.fresh.rss)),
    ("idle RSS MiB", 1, |run| mib(run.idle.rss)),
    ("RSS KiB/conn", 2, |run| each(run, |memory| memory.rss)),
    ("PSS KiB/conn", 2, |run| each(run, |memory| memory.pss)),
    ("private KiB/conn", 2, |run| each(run, |memory| memory.private)),
    ("idle CPU ms/s", 2, |run| run.idle_cpu_ns_per_s as f64 / 1e6),
    ("burst s", 2, |run| run.burst.window_ns as f64 / S as f64),
    ("peak RSS MiB", 1, |run| run.after_burst.last().map_or(f64::NAN, |(_, memory)| mib(memory.rss_peak))),
    ("RSS after 0.1 s", 1, |run| after(run, 0)),
    ("1 s", 1, |run| after(run, 1)),
    ("3 s", 1, |run| after(run, 2)),
    ("5 s MiB", 1, |run| after(run, 3)),
    ("after / idle", 2, |run| after(run, 3) / mib(run.idle.rss)),
    ("conns kept", 0, |run| f64::from(run.connections_at_end)),
    ("faults", 0, |run| (run.opening.faults_total() + run.burst.faults_total()) as f64),
];

fn memory_table(runs: &[MemoryRun]) -> String {
    let head: Vec<&str> = std::iter::once("peer").chain(MEMORY_COLUMNS.iter().map(|c| c.0)).collect();
    let mut kinds: Vec<Kind> = runs.iter().map(|run| run.peer).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let rows: Vec<Vec<String>> = kinds
        .into_iter()
        .map(|kind| {
            let mut row = vec![kind.name().to_owned()];
            for (_, decimals, of) in MEMORY_COLUMNS {
                let values: Vec<f64> = runs.iter().filter(|run| run.peer == kind).map(of).collect();
                row.push(show(stats::spread(&values), *decimals));
            }
            row
        })
        .collect();
    let connections = runs.first().map_or(0, |run| run.connections);
    format!(
        "\n## conns\n\n{connections} keep-alive connections, each idle after one answer, opened with at most {} requests \
         under way; then {} bodies of {} MiB at once. User-space memory of the proxy (smaps_rollup).\n\n{}",
        scenario::OPENING_IN_FLIGHT_MAX,
        scenario::BURST_BODIES,
        scenario::BURST_BODY_BYTES >> 20,
        table(&head, &rows)
    )
}

fn faults(findings: &Findings) -> String {
    let mut text = String::new();
    let mut note = |what: String, report: &Report| {
        for (kind, count) in &report.faults {
            let example = report.examples.get(kind).map_or("", String::as_str);
            let _ = writeln!(text, "- {what}: {count} × {kind}, e.g. {example}");
        }
        if report.gave_up {
            let _ =
                writeln!(text, "- {what}: given up early because of its faults; its figures are of no use");
        }
        if report.idle_closed > 0 {
            let _ = writeln!(text, "- {what}: {} idle connections closed by the peer", report.idle_closed);
        }
    };
    for run in &findings.runs {
        let title = run.scenario.title(run.body_len);
        note(format!("{title}, {}, repeat {}", run.peer.name(), run.repeat), &run.report);
    }
    for run in &findings.memory {
        note(format!("conns, {}, opening", run.peer.name()), &run.opening);
        note(format!("conns, {}, burst", run.peer.name()), &run.burst);
    }
    for failed in &findings.failed {
        let _ = writeln!(text, "- could not be run: {failed}");
    }
    if text.is_empty() { "\nFaults: none.\n".into() } else { format!("\n## Faults\n\n{text}") }
}

/// One line on a run, as progress.
pub fn run_line(run: &Run) -> String {
    let mut line =
        format!("{:>5} {:>2} {:<10}", run.scenario.title(run.body_len), run.repeat, run.peer.name());
    for column in columns(run.scenario) {
        if let Some(value) = (column.of)(&run.report) {
            let _ = write!(line, "  {} {:.*}", column.title, column.decimals, value);
        }
    }
    line
}

/// The report of one `load`, as text.
pub fn load_text(r: &Report) -> String {
    let mut text = format!(
        "window      {:.3} s, {} requests whole within it: {:.0} req/s\n",
        r.window_ns as f64 / S as f64,
        r.completed,
        r.requests_per_s()
    );
    let mut times = |name: &str, q: Option<Quantiles>| {
        if let Some(q) = q {
            let _ = writeln!(
                text,
                "{name:<11} p50 {:.1}  p90 {:.1}  p99 {:.1}  p999 {:.1}  max {:.1} us  ({} times)",
                us(q.p50_ns),
                us(q.p90_ns),
                us(q.p99_ns),
                us(q.p999_ns),
                us(q.max_ns),
                q.count
            );
        }
    };
    times("latency", r.latency);
    times("first event", r.first_event);
    times("event delay", r.event_delay);
    times("event gap", r.event_gap);
    times("sent late", r.lateness);
    if r.events > 0 {
        let _ = writeln!(text, "events      {} in {} receives", r.events, r.event_pieces);
    }
    let _ = writeln!(text, "generator   busy {:.0} %", r.generator_busy * 100.0);
    if r.reconnects + r.idle_closed > 0 {
        let _ = writeln!(
            text,
            "connections {} made anew, {} closed by the server while idle",
            r.reconnects, r.idle_closed
        );
    }
    for (kind, count) in &r.faults {
        let _ = writeln!(
            text,
            "FAULT       {count} × {kind}, e.g. {}",
            r.examples.get(kind).map_or("", String::as_str)
        );
    }
    if r.faults.is_empty() {
        text.push_str("faults      none\n");
    }
    if r.gave_up {
        text.push_str("GAVE UP     because of its faults; the figures are of no use\n");
    }
    text
}

#[cfg(test)]
mod tests;
