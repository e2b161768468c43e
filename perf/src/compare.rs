//! The `compare` command: the same load against each peer in turns (A B C A B C …), each proxy alone on its core, the
//! generator and both backends on another.
//!
//! *Invariant*: no figure without its check: before timing, each proxy's answers are compared byte for byte with the
//! backend's own, and every timed answer is checked as it arrives. A run with faults is shown with them and fails the
//! command.
//! *Bound and cost*: the time needed is printed beforehand.
//! *Errors*: which peer, which scenario, and what.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;

use crate::answer::Expect;
use crate::clock::{self, MS, S};
use crate::exchange::exchange;
use crate::instructions::Instructions;
use crate::load::{Arrivals, Plan, Probe, Report, Traffic};
use crate::payload::{self, Answer, Recipe};
use crate::peers::{self, Kind, Peer, Setup};
use crate::process::{self, Memory};
use crate::prompts::{self, Script};
use crate::record;
use crate::report;
use crate::rig::RigHandle;
use crate::scenario::{self, PATH, Scenario};
use crate::{run_load, sched};

/// Authority in each request.
const HOST: &str = "perf.test";
/// Starting and stopping a proxy, with the pauses around it; for the estimate.
const TURN_NS: u64 = 450 * MS;
/// Most idle connections: what ten source addresses hold.
const IDLE_CONNECTIONS_MAX: u32 = 200_000;
/// Turns of the connections scenario: memory varies less than time, and a turn is long.
const MEMORY_REPEATS_MAX: u32 = 3;
/// What the connections scenario takes per peer and turn; for the estimate.
const CONNS_NS: u64 = 12 * S;
/// After the burst, memory is read at these times.
const SETTLE_NS: [u64; 4] = [100 * MS, S, 3 * S, 5 * S];

#[derive(Args, Debug)]
pub struct CompareArgs {
    /// Scenarios, in order.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["json", "paced", "sse", "big", "prompts", "conns"])]
    pub scenarios: Vec<Scenario>,
    /// Peers, in turn order; default: direct, and each of ringway, ringway-kv (prompts alone), haproxy, nginx that is there.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub peers: Vec<Kind>,
    /// The Ringway binary.
    #[arg(long, default_value = "target/release/ringway")]
    pub ringway: PathBuf,
    /// Further argument for `ringway serve`; may be repeated.
    #[arg(long = "ringway-arg", allow_hyphen_values = true)]
    pub ringway_args: Vec<String>,
    /// Turns; figures are medians over them.
    #[arg(long, default_value_t = 5)]
    pub repeats: u32,
    /// Length of each window, in milliseconds.
    #[arg(long, default_value_t = 1500)]
    pub window_ms: u64,
    /// Warm-up before each window, in milliseconds.
    #[arg(long, default_value_t = 400)]
    pub warmup_ms: u64,
    /// Requests per second of the paced scenario. Must be below what every peer can do.
    #[arg(long, default_value_t = 10_000.0)]
    pub rate: f64,
    /// Idle connections of the conns scenario.
    #[arg(long, default_value_t = 10_000)]
    pub idle_connections: u32,
    /// Core of the proxies.
    #[arg(long, default_value_t = 0)]
    pub proxy_core: usize,
    /// Core of the generator and the backends.
    #[arg(long, default_value_t = 1)]
    pub load_core: usize,
    /// Run proxy and generator at real-time priority during each run: on a machine where others work. See the README.
    #[arg(long)]
    pub fifo: bool,
    /// Let the generator poll instead of sleep: its own wake-ups no longer cost the proxy anything, as with peers on other
    /// machines.
    #[arg(long)]
    pub spin: bool,
    /// Keep setup, raw figures and summary in OUT/DATE-MACHINE/.
    #[arg(long)]
    pub record: bool,
    /// Where records are kept.
    #[arg(long, default_value = "perf/runs")]
    pub out: PathBuf,
    /// Name of this machine in the record; default: number of cores and host name.
    #[arg(long)]
    pub machine: Option<String>,
}

/// One timed run.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    pub scenario: Scenario,
    /// Length of the requests' bodies in bytes: of all, or the mean over a conversation's turns.
    pub body_len: usize,
    pub peer: Kind,
    pub repeat: u32,
    /// The machine's 1-minute load average before it.
    pub load_average: f64,
    pub report: Report,
}

/// One memory run.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryRun {
    pub peer: Kind,
    pub connections: u32,
    /// Connections still open at the end, after the burst.
    pub connections_at_end: u32,
    /// Just started; one request answered.
    pub fresh: Memory,
    /// With the idle connections, each of which has had one answer.
    pub idle: Memory,
    /// CPU time per second while all were idle.
    pub idle_cpu_ns_per_s: u64,
    /// After the burst: milliseconds since its end, and memory.
    pub after_burst: Vec<(u64, Memory)>,
    pub opening: Report,
    pub burst: Report,
}

/// Everything a comparison found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    pub runs: Vec<Run>,
    pub memory: Vec<MemoryRun>,
    /// Why there are no instruction counts; `None` when there are.
    pub no_instructions: Option<String>,
    /// Runs that could not be made.
    pub failed: Vec<String>,
}

/// Runs it. `false` when a run failed or had faults.
pub fn run(args: &CompareArgs) -> Result<bool, String> {
    let peers = choose_peers(args)?;
    check(args)?;
    let estimate_ns = estimate_ns(args, &peers);
    let names: Vec<&str> = peers.iter().map(|kind| kind.name()).collect();
    println!(
        "comparing {} in {} scenarios, {} repeats: about {} s",
        names.join(", "),
        args.scenarios.len(),
        args.repeats,
        estimate_ns.div_ceil(S)
    );
    if args.fifo && args.spin {
        println!(
            "warning: a generator that polls at real-time priority is stopped by the kernel for a part of each second; \
             do not use the tails (p99 and above) of this comparison"
        );
    }
    let _turn = only_one()?;
    let scratch = Scratch::new()?;
    let any = "127.0.0.1:0".parse().map_err(|e| format!("{e}"))?;
    let default = Recipe { body_len: 0, answer: Answer::Json { len: 1024, delay_ns: 0 } };
    let rig = RigHandle::start(Some(args.load_core), &[any, any], default)?;
    let bench = Bench { args, rig: &rig, scratch: &scratch };
    // For the proxies, which inherit the limit, and for the generator, which holds the other end of each connection.
    sched::raise_descriptors(bench.setup().descriptors())?;

    let started = record::Environment::read(args, &peers, &|kind| peers::configuration(kind, &bench.setup()));
    let mut findings = Findings::default();
    for &scenario in &args.scenarios {
        let peers: Vec<Kind> = taking_part(args, scenario, &peers).collect();
        for &body_len in scenario.bodies() {
            bench.compare_answers(scenario, body_len, &peers)?;
        }
        if scenario == Scenario::Conns {
            for repeat in 0..args.repeats.min(MEMORY_REPEATS_MAX) {
                for &kind in peers.iter().filter(|&&kind| kind != Kind::Direct) {
                    println!("conns {repeat} {} …", kind.name());
                    match bench.memory_run(kind) {
                        Ok(run) => findings.memory.push(run),
                        Err(why) => {
                            findings.failed.push(format!("conns, {}, repeat {repeat}: {why}", kind.name()))
                        }
                    }
                }
            }
            continue;
        }
        let turns =
            (0..args.repeats).flat_map(|repeat| scenario.bodies().iter().map(move |&len| (repeat, len)));
        for (repeat, body_len) in turns {
            for &kind in &peers {
                match bench.timed_run(scenario, body_len, kind, repeat, &mut findings) {
                    Ok(run) => {
                        println!("{}", report::run_line(&run));
                        findings.runs.push(run);
                    }
                    Err(why) => {
                        let title = scenario.title(body_len);
                        let what = format!("{title}, {}, repeat {repeat}: {why}", kind.name());
                        println!("FAILED {what}");
                        findings.failed.push(what);
                    }
                }
            }
        }
    }
    let summary = report::summary(&findings, &args.scenarios, &peers);
    println!("\n{summary}");
    if args.record {
        let conditions = record::Conditions {
            out: &args.out,
            proxy_core: args.proxy_core,
            load_core: args.load_core,
            fifo: args.fifo,
            spin: args.spin,
        };
        let place = record::record(&conditions, &started, &findings, &summary)?;
        println!("recorded in {}", place.display());
    }
    let all_clean = findings.runs.iter().all(|run| run_load::clean(&run.report))
        && findings.memory.iter().all(|run| run_load::clean(&run.opening) && run_load::clean(&run.burst));
    Ok(all_clean && findings.failed.is_empty())
}

fn choose_peers(args: &CompareArgs) -> Result<Vec<Kind>, String> {
    if !args.peers.is_empty() {
        let distinct: BTreeSet<Kind> = args.peers.iter().copied().collect();
        if distinct.len() != args.peers.len() {
            return Err("--peers: a peer is named twice".into());
        }
        return Ok(args.peers.clone());
    }
    let mut chosen = Vec::new();
    for kind in [Kind::Direct, Kind::Ringway, Kind::RingwayKv, Kind::Haproxy, Kind::Nginx] {
        if !args.scenarios.iter().any(|scenario| scenario.includes(kind)) {
            continue;
        }
        if peers::program(kind, &args.ringway).is_some() {
            chosen.push(kind);
        } else if kind == Kind::Ringway {
            return Err(format!(
                "--ringway {}: no such file; build it with 'cargo build --release', or leave it out with --peers",
                args.ringway.display()
            ));
        } else {
            println!(
                "{} is not installed and left out (Debian: apt-get install {})",
                kind.name(),
                kind.name()
            );
        }
    }
    Ok(chosen)
}

fn check(args: &CompareArgs) -> Result<(), String> {
    let allowed = sched::allowed_cores();
    for (name, core) in [("--proxy-core", args.proxy_core), ("--load-core", args.load_core)] {
        if !allowed.contains(&core) {
            return Err(format!("{name} {core}: expected one of the allowed cores {allowed:?}"));
        }
    }
    if args.proxy_core == args.load_core {
        return Err("--proxy-core and --load-core: expected two different cores".into());
    }
    if args.repeats == 0 || args.window_ms < 100 {
        return Err("--repeats: expected at least 1; --window-ms: expected at least 100".into());
    }
    if !(args.rate.is_finite() && args.rate >= 1.0) {
        return Err("--rate: expected at least 1 request per second".into());
    }
    if !(1..=IDLE_CONNECTIONS_MAX).contains(&args.idle_connections) {
        return Err(format!(
            "--idle-connections {}: expected 1 to {IDLE_CONNECTIONS_MAX}",
            args.idle_connections
        ));
    }
    Ok(())
}

/// Those of `peers` that take part in `scenario`: all, if they were named.
fn taking_part(args: &CompareArgs, scenario: Scenario, peers: &[Kind]) -> impl Iterator<Item = Kind> {
    let named = !args.peers.is_empty();
    peers.iter().copied().filter(move |&kind| named || scenario.includes(kind))
}

fn estimate_ns(args: &CompareArgs, peers: &[Kind]) -> u64 {
    let mut sum_ns = 0;
    for scenario in &args.scenarios {
        sum_ns += match scenario {
            Scenario::Conns => {
                let proxies = peers.iter().filter(|&&kind| kind != Kind::Direct).count() as u64;
                CONNS_NS * proxies * u64::from(args.repeats.min(MEMORY_REPEATS_MAX))
            }
            _ => {
                let runs_ns = scenario.bodies().iter().map(|&body_len| {
                    let shape = scenario.shape(body_len, args.rate, args.warmup_ms * MS);
                    let drain_ns = shape.stagger_ns;
                    shape.warm_ns + args.window_ms * MS + drain_ns + TURN_NS
                });
                let peers = taking_part(args, *scenario, peers).count() as u64;
                runs_ns.sum::<u64>() * u64::from(args.repeats) * peers
            }
        };
    }
    sum_ns
}

/// Waits until no other comparison runs on this machine: two would measure each other.
fn only_one() -> Result<File, String> {
    let path = std::env::temp_dir().join("ringway-perf.lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| format!("{}: {e}", path.display()))?;
    for (flags, waiting) in [(libc::LOCK_EX | libc::LOCK_NB, false), (libc::LOCK_EX, true)] {
        if waiting {
            println!("another comparison is running; waiting for its end");
        }
        // SAFETY: a descriptor that `file` owns. The kernel drops the lock when the file is closed, however this ends.
        if unsafe { libc::flock(file.as_raw_fd(), flags) } == 0 {
            return Ok(file);
        }
    }
    Err(format!("{}: {}", path.display(), std::io::Error::last_os_error()))
}

/// A directory of its own, removed at the end.
#[derive(Debug)]
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, String> {
        let path = std::env::temp_dir().join(format!("ringway-perf-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Bench<'a> {
    args: &'a CompareArgs,
    rig: &'a RigHandle,
    scratch: &'a Scratch,
}

impl Bench<'_> {
    fn setup(&self) -> Setup {
        Setup {
            backends: self.rig.backends.clone(),
            core: self.args.proxy_core,
            ringway: self.args.ringway.clone(),
            ringway_args: self.args.ringway_args.clone(),
            directory: self.scratch.0.clone(),
            connections: self.args.idle_connections.max(1024),
        }
    }

    fn request(&self, recipe: &Recipe) -> Result<Vec<u8>, String> {
        payload::request(HOST, PATH, recipe, &[])
    }

    /// Error unless every proxy's answer is the backend's own, byte for byte, three times over one connection.
    fn compare_answers(&self, scenario: Scenario, body_len: usize, peers: &[Kind]) -> Result<(), String> {
        let title = scenario.title(body_len);
        let mut recipe = scenario.shape(body_len, self.args.rate, 0).recipe;
        if scenario == Scenario::Conns {
            recipe.body_len = scenario::BURST_BODY_BYTES;
        }
        let request = self.request(&recipe)?;
        let reference = exchange(self.rig.backends[0], &request, 1)?.remove(0);
        let expected = match recipe.answer {
            Answer::Json { len, .. } => payload::answer_body(len)?,
            Answer::Events { .. } => reference.body.clone(),
            Answer::Chat { turn, .. } => prompts::answer_body(body_len, turn)?,
        };
        if reference.status != 200 || reference.body != expected {
            return Err(format!("{title}: the backend itself answers wrongly"));
        }
        for &kind in peers {
            let peer = Peer::start(kind, &self.setup(), &request)?;
            for (turn, answer) in exchange(peer.address, &request, 3)?.iter().enumerate() {
                if *answer != reference {
                    return Err(format!(
                        "{title}, {}: answer {turn} differs from the backend's own: status {}, type '{}', {} bytes, \
                         expected status {}, type '{}', {} bytes",
                        kind.name(),
                        answer.status,
                        answer.content_type,
                        answer.body.len(),
                        reference.status,
                        reference.content_type,
                        reference.body.len()
                    ));
                }
            }
        }
        println!("{title}: all answers are the backend's own, byte for byte");
        Ok(())
    }

    fn timed_run(
        &self,
        scenario: Scenario,
        body_len: usize,
        kind: Kind,
        repeat: u32,
        findings: &mut Findings,
    ) -> Result<Run, String> {
        let load_average = record::load_average();
        let shape = scenario.shape(body_len, self.args.rate, self.args.warmup_ms * MS);
        let request = self.request(&shape.recipe)?;
        let peer = Peer::start(kind, &self.setup(), &request)?;
        let same = |expect| Traffic::Same { request: request.into(), expect };
        let traffic = match shape.recipe.answer {
            Answer::Json { len, .. } => same(Expect::Exact(payload::answer_body(len)?.into())),
            Answer::Events { count, .. } => same(Expect::Events(count)),
            Answer::Chat { .. } => Traffic::Talks(Arc::new(Script::new(HOST, PATH, body_len)?)),
        };
        let pids = peer.pids();
        let probe = (kind != Kind::Direct).then(|| probe(&pids, findings));
        let plan = Plan {
            target: peer.address,
            connections: shape.connections,
            arrivals: shape.arrivals,
            traffic,
            warm_ns: shape.warm_ns,
            window_ns: self.args.window_ms * MS,
            grace_ns: shape.grace_ns,
            stagger_ns: shape.stagger_ns,
            requests_max: None,
            in_flight_max: None,
            hold: false,
            spin: self.args.spin,
            probe,
        };
        let report = self.at_priority(&pids, || self.rig.run(plan))?;
        Ok(Run { scenario, body_len, peer: kind, repeat, load_average, report })
    }

    /// Does `work` with the proxy and the generator at real-time priority, if so asked.
    fn at_priority<T>(&self, pids: &[i32], work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        if !self.args.fifo {
            return work();
        }
        for (_, tid) in process::threads(pids) {
            sched::fifo(tid, true)?;
        }
        // The generator comes last and is set back first, so that it never polls above a thread that must still be raised.
        sched::fifo(self.rig.thread_id, true)?;
        let done = work();
        sched::fifo(self.rig.thread_id, false)?;
        for (_, tid) in process::threads(pids) {
            sched::fifo(tid, false)?;
        }
        done
    }

    fn memory_run(&self, kind: Kind) -> Result<MemoryRun, String> {
        let shape = Scenario::Conns.shape(Scenario::Conns.bodies()[0], self.args.rate, 0);
        let Answer::Json { len, .. } = shape.recipe.answer else {
            unreachable!("the conns scenario asks for JSON")
        };
        let expect = Expect::Exact(payload::answer_body(len)?.into());
        let small = self.request(&shape.recipe)?;
        let burst_recipe = Recipe { body_len: scenario::BURST_BODY_BYTES, ..shape.recipe };
        let burst_request: Arc<[u8]> = self.request(&burst_recipe)?.into();
        let peer = Peer::start(kind, &self.setup(), &small)?;
        let pids = peer.pids();
        clock::sleep_ns(300 * MS);
        let fresh = process::memory(&pids)?;
        let connections = self.args.idle_connections;
        let plan = |request: Arc<[u8]>, connections: u32, hold: bool| Plan {
            target: peer.address,
            connections,
            arrivals: Arrivals::Closed,
            traffic: Traffic::Same { request, expect: expect.clone() },
            warm_ns: 0,
            window_ns: 30 * S,
            grace_ns: shape.grace_ns,
            stagger_ns: 0,
            requests_max: Some(u64::from(connections)),
            // Few requests at once while the idle connections are opened: what a proxy keeps from a crowd of requests
            // would count as the connections' memory.
            in_flight_max: hold.then_some(scenario::OPENING_IN_FLIGHT_MAX),
            hold,
            spin: false,
            probe: None,
        };
        let opening = self.at_priority(&pids, || self.rig.run(plan(small.into(), connections, true)))?;
        let outcome = (|| {
            clock::sleep_ns(2 * S);
            let idle = process::memory(&pids)?;
            let before = process::snapshot(&pids)?;
            clock::sleep_ns(S);
            let idle_cpu_ns_per_s = process::snapshot(&pids)?.since(&before).cpu_ns;
            let burst = plan(burst_request, scenario::BURST_BODIES, false);
            let burst = self.at_priority(&pids, || self.rig.run(burst))?;
            let ended_ns = clock::now_ns();
            let mut after_burst = Vec::new();
            for settle_ns in SETTLE_NS {
                clock::sleep_ns((ended_ns + settle_ns).saturating_sub(clock::now_ns()));
                after_burst.push((settle_ns / MS, process::memory(&pids)?));
            }
            Ok((idle, idle_cpu_ns_per_s, burst, after_burst))
        })();
        // Whatever came of it, the connections go before the proxy does.
        let connections_at_end = self.rig.release()?;
        let (idle, idle_cpu_ns_per_s, burst, after_burst) = outcome.map_err(|why: String| why)?;
        Ok(MemoryRun {
            peer: kind,
            connections,
            connections_at_end,
            fresh,
            idle,
            idle_cpu_ns_per_s,
            after_burst,
            opening,
            burst,
        })
    }
}

/// Reads the cost of `pids`, with instructions where the machine counts them.
fn probe(pids: &[i32], findings: &mut Findings) -> Probe {
    let threads: Vec<i32> = process::threads(pids).into_iter().map(|(_, tid)| tid).collect();
    let mut counters = match Instructions::open(&threads) {
        Ok(counters) => Some(counters),
        Err(why) => {
            findings.no_instructions = Some(why);
            None
        }
    };
    let pids = pids.to_vec();
    Box::new(move || {
        let mut snapshot = process::snapshot(&pids)?;
        snapshot.instructions = counters.as_mut().and_then(Instructions::read);
        Ok(snapshot)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: CompareArgs,
    }

    fn args(line: &str) -> CompareArgs {
        Only::try_parse_from(std::iter::once("x").chain(line.split_whitespace())).expect("parses").args
    }

    #[test]
    fn wrong_arguments_say_what_was_expected() {
        for (line, part) in [
            ("--proxy-core 4000", "allowed cores"),
            ("--load-core 0", "two different"),
            ("--repeats 0", "--repeats"),
            ("--rate 0", "--rate"),
            ("--rate NaN", "--rate"),
            ("--idle-connections 400000", "--idle-connections"),
        ] {
            let error = check(&args(line)).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
        }
        assert!(choose_peers(&args("--peers direct,direct")).expect_err("twice").contains("twice"));
        assert!(choose_peers(&args("--ringway /nowhere")).expect_err("missing").contains("cargo build"));
    }

    #[test]
    fn the_estimate_counts_every_run() {
        let one = estimate_ns(&args("--scenarios json --repeats 1"), &[Kind::Direct]);
        let many = estimate_ns(&args("--scenarios json --repeats 3"), &[Kind::Direct, Kind::Haproxy]);
        assert_eq!(many, one * 6);
        let prompts = "--scenarios json,prompts --repeats 1";
        let both = estimate_ns(&args(prompts), &[Kind::Ringway, Kind::RingwayKv]);
        assert_eq!(both, one + 6 * (one + S), "kv-aware in three lengths only, warmed up for a second more");
        let named = format!("{prompts} --peers ringway,ringway-kv");
        assert_eq!(estimate_ns(&args(&named), &[Kind::Ringway, Kind::RingwayKv]), both + one);
        assert_eq!(estimate_ns(&args("--scenarios conns"), &[Kind::Direct, Kind::Nginx]), CONNS_NS * 3);
    }
}
