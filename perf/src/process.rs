//! What a process costs, read from /proc: CPU time and context switches of all threads, memory.
//!
//! *Invariant*: a figure is the sum over a process and all its descendants, so that a master and its workers count as one.
//! *Bound and cost*: a few system calls per thread (10–20 us each). `schedstat` of a running thread lags by at most one
//! scheduler tick (4 ms or less), that is 0.3 % of a 1.5 s window.
//! *Errors*: the path and what was expected there. A thread that ends while being read is left out.
//! *Source*: proc(5); Documentation/scheduler/sched-stats.rst of the kernel.

use std::collections::HashMap;
use std::fs;

use serde::Serialize;

/// A point reading of a process tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub cpu_ns: u64,
    /// Time in which threads could have run but another task had the core.
    pub wait_ns: u64,
    pub voluntary_switches: u64,
    pub involuntary_switches: u64,
    /// User-space instructions, where the machine counts them.
    pub instructions: Option<u64>,
}

/// What was used between two snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub cpu_ns: u64,
    pub wait_ns: u64,
    pub voluntary_switches: u64,
    pub involuntary_switches: u64,
    pub instructions: Option<u64>,
}

impl Snapshot {
    pub fn since(&self, earlier: &Snapshot) -> Usage {
        Usage {
            cpu_ns: self.cpu_ns.saturating_sub(earlier.cpu_ns),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            voluntary_switches: self.voluntary_switches.saturating_sub(earlier.voluntary_switches),
            involuntary_switches: self.involuntary_switches.saturating_sub(earlier.involuntary_switches),
            instructions: self.instructions.zip(earlier.instructions).map(|(a, b)| a.saturating_sub(b)),
        }
    }
}

/// Memory of a process tree, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    pub rss: u64,
    pub pss: u64,
    /// Private to the process: what would be freed if it ended.
    pub private: u64,
    /// Highest RSS so far.
    pub rss_peak: u64,
}

/// `pid` and all its descendants, as they are now.
pub fn tree(pid: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(parent) =
            fs::read_to_string(entry.path().join("stat")).ok().as_deref().and_then(parse_parent)
        {
            children.entry(parent).or_default().push(child);
        }
    }
    let mut found = vec![pid];
    let mut next = 0;
    while next < found.len() {
        found.extend(children.get(&found[next]).into_iter().flatten());
        next += 1;
    }
    found
}

/// Threads of `pids`, as they are now.
pub fn threads(pids: &[i32]) -> Vec<(i32, i32)> {
    let mut found = Vec::new();
    for &pid in pids {
        for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            if let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                found.push((pid, tid));
            }
        }
    }
    found
}

/// Sums the counters of all threads of `pids`. Error when a process has none left, or its files cannot be read.
pub fn snapshot(pids: &[i32]) -> Result<Snapshot, String> {
    let mut sum = Snapshot::default();
    for &pid in pids {
        let own = threads(&[pid]);
        if own.is_empty() {
            return Err(format!("process {pid} has ended"));
        }
        for (pid, tid) in own {
            let base = format!("/proc/{pid}/task/{tid}");
            let (Ok(schedstat), Ok(status)) = (
                fs::read_to_string(format!("{base}/schedstat")),
                fs::read_to_string(format!("{base}/status")),
            ) else {
                continue;
            };
            let (cpu_ns, wait_ns) = parse_schedstat(&schedstat)
                .ok_or_else(|| format!("{base}/schedstat: '{}', expected three numbers", schedstat.trim()))?;
            sum.cpu_ns += cpu_ns;
            sum.wait_ns += wait_ns;
            sum.voluntary_switches += field(&status, "voluntary_ctxt_switches").unwrap_or(0);
            sum.involuntary_switches += field(&status, "nonvoluntary_ctxt_switches").unwrap_or(0);
        }
    }
    Ok(sum)
}

/// Time for which the calling thread has waited for a core so far, in ns; 0 when the kernel does not say.
pub fn own_wait_ns() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    parse_schedstat(&text).map_or(0, |(_, wait_ns)| wait_ns)
}

/// Memory of `pids`, summed.
pub fn memory(pids: &[i32]) -> Result<Memory, String> {
    let mut sum = Memory::default();
    for &pid in pids {
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))
        };
        let rollup = read("smaps_rollup")?;
        let kib = |name| {
            field(&rollup, name).ok_or_else(|| format!("/proc/{pid}/smaps_rollup: no '{name}' line in kB"))
        };
        sum.rss += kib("Rss")? * 1024;
        sum.pss += kib("Pss")? * 1024;
        sum.private += (kib("Private_Clean")? + kib("Private_Dirty")?) * 1024;
        sum.rss_peak += field(&read("status")?, "VmHWM").unwrap_or(0) * 1024;
    }
    Ok(sum)
}

/// CPU time and time waited for a core, in ns.
fn parse_schedstat(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    let (cpu, wait) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    numbers.next()?.ok().map(|_: u64| (cpu, wait))
}

/// The number after `name:` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

/// The parent in a `stat` line. The name before it may hold spaces and parentheses, so it is skipped from its end.
fn parse_parent(stat: &str) -> Option<i32> {
    stat[stat.rfind(')')? + 1..].split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedstat_lines() {
        assert_eq!(parse_schedstat("123456 789 10\n"), Some((123_456, 789)));
        assert_eq!(parse_schedstat("123456 789\n"), None);
        assert_eq!(parse_schedstat("x 1 2"), None);
        assert_eq!(parse_schedstat(""), None);
    }

    #[test]
    fn fields_match_whole_names() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
        assert_eq!(field(status, "VmHWM"), Some(2048));
        assert_eq!(field(status, "voluntary_ctxt_switches"), Some(150));
        assert_eq!(field(status, "nonvoluntary_ctxt_switches"), Some(545));
        let rollup = "5-7 ---p 0 00:00 0 [rollup]\nRss:    1688 kB\nPss:  297 kB\nPss_Dirty: 116 kB\n";
        assert_eq!(
            (field(rollup, "Rss"), field(rollup, "Pss"), field(rollup, "Swap")),
            (Some(1688), Some(297), None)
        );
    }

    #[test]
    fn parents_of_awkward_names() {
        assert_eq!(parse_parent("12 (a b) c) S 7 12 12 0"), Some(7));
        assert_eq!(parse_parent("12 S 7"), None);
    }

    /// A process of its own: in this one, threads of other tests end meanwhile and take their time with them.
    #[test]
    fn a_busy_process_reads_as_busy() {
        let mut child =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("sh exists");
        let pid = child.id() as i32;
        let before = snapshot(&[pid]).expect("alive");
        let begun = crate::clock::thread_cpu_ns();
        let used = loop {
            let used = snapshot(&[pid]).expect("alive").since(&before);
            // Looking is work of ours too, so that this ends.
            if used.cpu_ns >= 20_000_000 || crate::clock::thread_cpu_ns() - begun > 10_000_000_000 {
                break used;
            }
        };
        let memory = memory(&[pid]).expect("readable");
        child.kill().expect("ours");
        child.wait().expect("ours");
        assert!(used.cpu_ns >= 20_000_000, "{used:?}");
        assert!(
            memory.rss > 0 && memory.rss >= memory.pss && memory.rss_peak >= memory.rss / 2,
            "{memory:?}"
        );
    }

    #[test]
    fn descendants_are_found_and_the_dead_are_errors() {
        let mut child = std::process::Command::new("sleep").arg("5").spawn().expect("sleep exists");
        let pid = child.id() as i32;
        assert!(tree(std::process::id() as i32).contains(&pid));
        child.kill().expect("ours");
        child.wait().expect("ours");
        assert!(snapshot(&[pid]).expect_err("dead").contains("has ended"));
    }
}
