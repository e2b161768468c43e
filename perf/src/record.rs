//! The record of a comparison: setup.md (what it ran on and with), raw.json (every figure of every run), summary.md.
//!
//! *Invariant*: a record is never overwritten; losses are recorded like wins.
//! *Errors*: the file and the system's reason.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use crate::clock;
use crate::compare::{CompareArgs, Findings};
use crate::peers::{self, Kind};

/// What a comparison ran on and with.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    date: String,
    machine: String,
    commit: String,
    command: String,
    kernel: String,
    processor: String,
    cores: usize,
    hypervisor: String,
    memory: String,
    congestion_control: String,
    rt_runtime_us: String,
    load_average_before: f64,
    versions: Vec<(&'static str, String)>,
    configurations: Vec<(&'static str, String)>,
}

impl Environment {
    pub fn read(args: &CompareArgs, peers: &[Kind], configuration: &dyn Fn(Kind) -> String) -> Environment {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let cpuinfo = read("/proc/cpuinfo");
        let line = |text: &str, name: &str| {
            text.lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split_once(':'))
                .map_or_else(|| "unknown".to_owned(), |(_, value)| value.trim().to_owned())
        };
        let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
        let host = read("/proc/sys/kernel/hostname");
        let proxies: Vec<Kind> = peers.iter().copied().filter(|&kind| kind != Kind::Direct).collect();
        Environment {
            date: clock::date(clock::unix_s()),
            machine: args.machine.clone().unwrap_or_else(|| format!("{cores}core-{host}")),
            commit: commit(),
            command: command_line(std::env::args()),
            kernel: format!("{} {}", read("/proc/sys/kernel/ostype"), read("/proc/sys/kernel/osrelease")),
            processor: line(&cpuinfo, "model name"),
            cores,
            hypervisor: if line(&cpuinfo, "flags").split(' ').any(|flag| flag == "hypervisor") {
                "virtual machine".into()
            } else {
                "bare metal, or unknown".into()
            },
            memory: line(&read("/proc/meminfo"), "MemTotal"),
            congestion_control: read("/proc/sys/net/ipv4/tcp_congestion_control"),
            rt_runtime_us: read("/proc/sys/kernel/sched_rt_runtime_us"),
            load_average_before: load_average(),
            versions: proxies
                .iter()
                .map(|&kind| (kind.name(), peers::version(kind, &args.ringway)))
                .collect(),
            configurations: proxies.iter().map(|&kind| (kind.name(), configuration(kind))).collect(),
        }
    }

    fn text(&self, conditions: &Conditions<'_>) -> String {
        let mut text = format!(
            "# Setup\n\n- date: {} (UTC)\n- commit: {}\n- command: `{}`\n- machine: {}, {} cores of {}, {}, memory {}\n\
             - kernel: {}, TCP congestion control {}, loopback only\n\
             - proxy on core {}, generator and both backends on core {}; real-time priority: {}; generator polls: {}\n",
            self.date,
            self.commit,
            self.command,
            self.machine,
            self.cores,
            self.processor,
            self.hypervisor,
            self.memory,
            self.kernel,
            self.congestion_control,
            conditions.proxy_core,
            conditions.load_core,
            if conditions.fifo {
                format!("yes (sched_rt_runtime_us {})", self.rt_runtime_us)
            } else {
                "no".to_owned()
            },
            if conditions.spin { "yes" } else { "no" },
        );
        let _ = writeln!(text, "- load average before: {:.2}", self.load_average_before);
        for (name, version) in &self.versions {
            let _ = writeln!(text, "- {name}: {version}");
        }
        text.push_str("\nEach figure and its limits are explained in perf/README.md.\n");
        for (name, configuration) in &self.configurations {
            let _ = write!(text, "\n## {name}\n\n```\n{configuration}```\n");
        }
        text
    }
}

/// How the comparison was run, and where its record goes.
#[derive(Clone, Copy, Debug)]
pub struct Conditions<'a> {
    pub out: &'a Path,
    pub proxy_core: usize,
    pub load_core: usize,
    pub fifo: bool,
    pub spin: bool,
}

/// The machine's 1-minute load average; 0 when it cannot be read.
pub fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// The command, with paths cut down to their last part: where things lie on one machine is of no use elsewhere.
pub fn command_line(arguments: impl Iterator<Item = String>) -> String {
    arguments
        .map(|argument| match Path::new(&argument).file_name() {
            Some(name) if argument.starts_with('/') => name.to_string_lossy().into_owned(),
            _ => argument,
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// The commit checked out, and whether it is what was built from.
pub fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    match (git(&["rev-parse", "HEAD"]), git(&["status", "--porcelain", "--untracked-files=no"])) {
        (Some(head), Some(changes)) if changes.is_empty() => head,
        (Some(head), _) => format!("{head}, with changes that are not committed"),
        (None, _) => "unknown (not run from a git checkout)".into(),
    }
}

/// Writes the record; where it is. A second one of the same day and machine gets a number.
pub fn record(
    conditions: &Conditions<'_>,
    environment: &Environment,
    findings: &Findings,
    summary: &str,
) -> Result<PathBuf, String> {
    let name: String = format!("{}-{}", environment.date, environment.machine)
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '-' })
        .collect();
    let place = (1..)
        .map(|n| conditions.out.join(if n == 1 { name.clone() } else { format!("{name}-{n}") }))
        .find(|place| !place.exists())
        .ok_or("no free name for the record")?;
    let failed = |what: &Path, e: &dyn std::fmt::Display| format!("{}: {e}", what.display());
    fs::create_dir_all(&place).map_err(|e| failed(&place, &e))?;
    #[derive(Serialize)]
    struct Raw<'a> {
        environment: &'a Environment,
        findings: &'a Findings,
    }
    let raw = serde_json::to_string_pretty(&Raw { environment, findings }).map_err(|e| failed(&place, &e))?;
    for (file, text) in [
        ("setup.md", environment.text(conditions)),
        ("raw.json", raw + "\n"),
        ("summary.md", format!("# {}, {}\n\n{summary}", environment.date, environment.machine)),
    ] {
        let path = place.join(file);
        fs::write(&path, text).map_err(|e| failed(&path, &e))?;
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_name_no_places() {
        let line = ["/a/b/ringway-perf", "compare", "--ringway", "/c/ringway", "--out", "perf/runs"];
        assert_eq!(
            command_line(line.into_iter().map(str::to_owned)),
            "ringway-perf compare --ringway ringway --out perf/runs"
        );
    }

    #[test]
    fn a_record_is_never_overwritten() {
        let out = std::env::temp_dir().join(format!("ringway-perf-record-{}", std::process::id()));
        let environment = Environment {
            date: "2030-01-02".into(),
            machine: "a b/c".into(),
            commit: "c0ffee".into(),
            command: "ringway-perf compare".into(),
            kernel: "Linux 6".into(),
            processor: "p".into(),
            cores: 2,
            hypervisor: "virtual machine".into(),
            memory: "1 kB".into(),
            congestion_control: "cubic".into(),
            rt_runtime_us: "950000".into(),
            load_average_before: 0.5,
            versions: vec![("nginx", "nginx 1".into())],
            configurations: vec![("nginx", "daemon off;\n".into())],
        };
        let conditions = Conditions { out: &out, proxy_core: 0, load_core: 1, fifo: true, spin: false };
        let write = || record(&conditions, &environment, &Findings::default(), "table\n").expect("writable");
        let (first, second) = (write(), write());
        assert_eq!(first, out.join("2030-01-02-a-b-c"), "no path separator from a name");
        assert_eq!(second, out.join("2030-01-02-a-b-c-2"));
        let setup = fs::read_to_string(second.join("setup.md")).expect("written");
        for part in ["c0ffee", "nginx: nginx 1", "daemon off;", "real-time priority: yes", "0.50"] {
            assert!(setup.contains(part), "{part}: {setup}");
        }
        let raw = fs::read_to_string(first.join("raw.json")).expect("written");
        serde_json::from_str::<serde_json::Value>(&raw).expect("valid JSON");
        assert!(fs::read_to_string(first.join("summary.md")).expect("written").ends_with("table\n"));
        fs::remove_dir_all(&out).expect("ours");
    }
}
