use std::collections::BTreeMap;

use super::*;
use crate::backend::Counts;
use crate::process::Usage;

fn report(cpu_ns: u64) -> Report {
    Report {
        window_ns: S,
        completed: 1000,
        completed_in_all: 1100,
        events: 4000,
        event_pieces: 2000,
        latency: Some(Quantiles { count: 1000, p50_ns: 500_000, p99_ns: 900_000, ..Quantiles::default() }),
        first_event: None,
        event_delay: Some(Quantiles {
            count: 4000,
            p50_ns: cpu_ns,
            p99_ns: 2 * cpu_ns,
            ..Quantiles::default()
        }),
        event_gap: None,
        faults: BTreeMap::new(),
        examples: BTreeMap::new(),
        gave_up: false,
        reconnects: 0,
        idle_closed: 0,
        lateness: None,
        backend_lateness: None,
        generator_busy: 0.5,
        generator_wait: 0.01,
        usage: Some(Usage { cpu_ns, voluntary_switches: 10, involuntary_switches: 5, ..Usage::default() }),
        backend: Counts::default(),
    }
}

fn run(scenario: Scenario, peer: Kind, repeat: u32, cpu_ns: u64) -> Run {
    Run { scenario, body_len: scenario.bodies()[0], peer, repeat, load_average: 0.0, report: report(cpu_ns) }
}

/// Cells of the table row that starts with `name`.
fn row<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let line = text.lines().find(|line| line.starts_with(&format!("| {name} "))).expect(name);
    line.split('|').map(str::trim).collect()
}

#[test]
fn ratios_pair_the_runs_of_one_repeat() {
    // The second repeat of ringway failed; the machine slowed down in the third.
    let mut findings = Findings::default();
    for (repeat, haproxy) in [(0, 20_000_000), (1, 20_000_000), (2, 40_000_000)] {
        findings.runs.push(run(Scenario::Json, Kind::Haproxy, repeat, haproxy));
    }
    findings.runs.push(run(Scenario::Json, Kind::Ringway, 0, 10_000_000));
    findings.runs.push(run(Scenario::Json, Kind::Ringway, 2, 20_000_000));
    let text = summary(&findings, &[Scenario::Json], &[Kind::Ringway, Kind::Haproxy]);
    assert_eq!(row(&text, "ringway / haproxy")[2], "0.50", "{text}");
    assert_eq!(row(&text, "ringway")[3], "15.00 [10.00–20.00]", "CPU us per request: {text}");
    assert_eq!(row(&text, "haproxy")[3], "20.00 [20.00–40.00]");
    assert!(text.contains("Faults: none."));
}

#[test]
fn each_length_of_prompt_has_its_own_table() {
    let mut findings = Findings::default();
    for (body_len, cpu_ns) in [(2 << 10, 10_000_000), (32 << 10, 20_000_000), (128 << 10, 80_000_000)] {
        for (peer, times) in [(Kind::Ringway, 2), (Kind::RingwayKv, 3), (Kind::Haproxy, 4)] {
            let mut run = Run { body_len, ..run(Scenario::Prompts, peer, 0, cpu_ns * times) };
            run.report.backend = Counts { turns_later: 40, turns_at_home: 10 * times, ..Counts::default() };
            findings.runs.push(run);
        }
    }
    findings.runs.push(run(Scenario::Json, Kind::Ringway, 0, 1));
    let peers = [Kind::Ringway, Kind::RingwayKv, Kind::Haproxy];
    let text = summary(&findings, &[Scenario::Json, Scenario::Prompts], &peers);
    let tables: Vec<&str> = text.split("\n## ").collect();
    assert_eq!(tables.len(), 5, "{text}");
    assert!(tables[1].starts_with("json\n") && !tables[1].contains("ringway-kv"), "{text}");
    assert!(!tables[1].contains("same server"), "{text}");
    for (table, title, cpu) in [
        (tables[2], "prompts, 2 KiB\n", "30.00"),
        (tables[3], "prompts, 32 KiB\n", "60.00"),
        (tables[4], "prompts, 128 KiB\n", "240.00"),
    ] {
        assert!(table.starts_with(title), "{table}");
        let cells = row(table, "ringway-kv");
        assert_eq!((cells[3], cells[cells.len() - 3]), (cpu, "75"), "{table}");
        assert_eq!(row(table, "ringway-kv / ringway")[2], "1.50", "{table}");
        assert_eq!(row(table, "ringway-kv / haproxy")[2], "0.75", "{table}");
        assert_eq!(row(table, "ringway / haproxy")[2], "0.50", "{table}");
    }
}

#[test]
fn streams_are_given_against_direct() {
    let findings = Findings {
        runs: vec![
            run(Scenario::Sse, Kind::Direct, 0, 10_000),
            run(Scenario::Sse, Kind::Nginx, 0, 70_000),
            run(Scenario::Sse, Kind::Direct, 1, 12_000),
            run(Scenario::Sse, Kind::Nginx, 1, 76_000),
        ],
        ..Findings::default()
    };
    let text = summary(&findings, &[Scenario::Sse], &[Kind::Direct, Kind::Nginx]);
    let added = text.split("Difference from direct").nth(1).expect("a second table");
    assert_eq!(row(added, "nginx"), ["", "nginx", "62 [60–64]", "124 [120–128]", ""], "{added}");
    assert!(!added.contains("first p50"), "a column without any value is left out");
}

#[test]
fn faults_are_in_the_table_and_in_words() {
    let mut bad = run(Scenario::Json, Kind::Nginx, 0, 1);
    bad.report.faults.insert("status", 3);
    bad.report.examples.insert("status", "status 502".into());
    bad.report.gave_up = true;
    let findings = Findings {
        runs: vec![bad],
        failed: vec!["json, haproxy, repeat 0: no".into()],
        ..Findings::default()
    };
    let text = summary(&findings, &[Scenario::Json], &[Kind::Nginx]);
    assert_eq!(row(&text, "nginx").iter().rev().nth(1), Some(&"3"));
    for part in ["3 × status, e.g. status 502", "given up early", "could not be run: json, haproxy"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("Faults: none"));
    assert!(load_text(&findings.runs[0].report).contains("FAULT       3 × status"));
}

#[test]
fn disturbed_runs_are_named() {
    let mut runs: Vec<Run> = (0..3).map(|repeat| run(Scenario::Json, Kind::Nginx, repeat, 1)).collect();
    runs[1].report.generator_wait = 0.3;
    if let Some(usage) = &mut runs[2].report.usage {
        usage.wait_ns = S / 4;
    }
    let text = summary(&Findings { runs, ..Findings::default() }, &[Scenario::Json], &[Kind::Nginx]);
    assert!(text.contains("## Disturbed") && !text.contains("- json, nginx, repeat 0"), "{text}");
    assert!(text.contains("- json, nginx, repeat 1: the generator waited for its core 30 %"), "{text}");
    assert!(
        text.contains("- json, nginx, repeat 2: the generator waited for its core 1 % and the proxy 25 %")
    );
}

#[test]
fn memory_is_per_connection() {
    let memory = |mib: u64| Memory { rss: mib << 20, pss: mib << 20, private: mib << 20, rss_peak: 99 << 20 };
    let run = MemoryRun {
        peer: Kind::Haproxy,
        connections: 1024,
        connections_at_end: 1024,
        fresh: memory(10),
        idle: memory(12),
        idle_cpu_ns_per_s: 1_500_000,
        after_burst: vec![(100, memory(30)), (1000, memory(20)), (3000, memory(15)), (5000, memory(15))],
        opening: report(1),
        burst: report(1),
    };
    let text = memory_table(&[run]);
    let cells = row(&text, "haproxy");
    assert_eq!(cells[2..7], ["10.0", "12.0", "2.00", "2.00", "2.00"], "{text}");
    assert_eq!(cells[7..15], ["1.50", "1.00", "99.0", "30.0", "20.0", "15.0", "15.0", "1.25"], "{text}");
}

#[test]
fn tables_are_aligned_and_drop_empty_columns() {
    let rows = [vec!["a".into(), "–".into(), "1".into()], vec!["bcd".into(), "–".into(), "22222".into()]];
    assert_eq!(
        table(&["x", "never", "y"], &rows),
        "| x   |     y |\n|-----|------:|\n| a   |     1 |\n| bcd | 22222 |\n"
    );
}
