//! `ringway demo`: the guided first run. Two simulated engines, a router in front of them, a short mixed load, and a
//! table that says what happened. Or an experiment by name, such as [`kv_reuse`].
//!
//! *Invariant*: nothing the demo started outlives it, however it ends; it listens on loopback only.
//! *Bound and cost*: about ten seconds with the default number of requests; [`CLIENTS`] connections.
//! *Errors*: exit code 2 with the reason when something cannot start or a request failed, 3 after Ctrl-C, 1 for wrong usage
//! and for an experiment that missed its figures.

pub mod client;
pub mod kv_reuse;
pub mod load;
pub mod report;
pub mod router;

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use client::Client;
use load::Load;
use report::{EngineFigures, Latency, Report};
use router::{Options, Router};

use crate::cli::{DemoArgs, exit};
use crate::clock::Clock;
use crate::engine::scheduler::Rates;
use crate::engine::{self, EngineHandle, EngineOptions};

/// Clients at once: more than both engines take together, so that some must wait.
const CLIENTS: usize = 12;
const ENGINES: usize = 2;
/// Requests that one engine works on at once.
const SLOTS: usize = 4;
/// Short requests each way to measure the time added, and those before that do not count.
const LATENCY_PAIRS: usize = 1000;
const WARM_UP_PAIRS: usize = 100;
const PROGRESS_STEP: Duration = Duration::from_millis(100);

#[expect(
    clippy::disallowed_methods,
    reason = "the demo's own thread has nothing else to do; no shard runs in it"
)]
fn pause(span: Duration) {
    std::thread::sleep(span);
}

/// What ends a demo early.
enum Stop {
    Interrupted,
    Failed(String),
}

/// Runs the demo and says the exit code.
pub fn run(args: &DemoArgs) -> u8 {
    if let Some(name) = &args.experiment
        && name != kv_reuse::NAME
    {
        let known = kv_reuse::NAME;
        eprintln!(
            "ringway demo: --experiment {name}: expected one of: {known}; leave the flag out for the tour"
        );
        return exit::WRONG;
    }
    if args.backend.len() == 1 {
        eprintln!("ringway demo: --backend: expected at least two, one URL each");
        return exit::WRONG;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        if let Err(error) = signal_hook::flag::register(signal, interrupted.clone()) {
            eprintln!("ringway demo: cannot listen for signals: {error}");
            return exit::NOT_STARTED;
        }
    }
    let mut progress = Progress::new(args.quiet);
    let told = match args.experiment {
        None => tour(args.requests as usize, &interrupted, &mut progress)
            .map(|report| (report.text(), if report.failed() == 0 { exit::DONE } else { exit::NOT_STARTED })),
        Some(_) => kv_reuse::run(&args.backend, &interrupted, &mut progress)
            .map(|outcome| (outcome.text(), if outcome.passes() { exit::DONE } else { exit::WRONG })),
    };
    match told {
        Ok((text, code)) => {
            progress.clear();
            // A reader that closed the pipe has seen what it wanted.
            let _ = io::stdout().write_all(text.as_bytes());
            code
        }
        Err(Stop::Interrupted) => {
            progress.clear();
            eprintln!("ringway demo: interrupted; router and engines are stopped");
            exit::FORCED
        }
        Err(Stop::Failed(text)) => {
            progress.clear();
            eprintln!("ringway demo: {text}");
            exit::NOT_STARTED
        }
    }
}

fn tour(requests: usize, interrupted: &AtomicBool, progress: &mut Progress) -> Result<Report, Stop> {
    progress.stage(&format!("starting {ENGINES} simulated engines and a router"));
    let options = EngineOptions {
        rates: Rates { prefill_tps: 20_000.0, decode_tps: 200.0, slots: SLOTS, queue_max: 64 },
        kv_blocks: 4096,
        ..EngineOptions::default()
    };
    let engines = spawn_engines(ENGINES, &options)?;
    let backends: Vec<(String, String)> =
        engines.iter().enumerate().map(|(index, engine)| (engine_name(index), engine.url())).collect();
    let ended = |text: String| match interrupted.load(Ordering::Relaxed) {
        true => Stop::Interrupted,
        false => Stop::Failed(text),
    };
    let options = Options { max_concurrency: SLOTS, algorithm: None, probed: true };
    let mut router =
        Router::start(&backends, options, interrupted).map_err(|text| ended(format!("router: {text}")))?;

    let clock = Clock::new();
    let clients = CLIENTS.min(requests);
    progress.stage(&format!("sending {requests} requests from {clients} clients at once"));
    let halted = AtomicBool::new(false);
    let load = Load::new(router.address, requests, clock, &halted);
    let mut gone = None;
    let begun = clock.now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..clients).map(|_| scope.spawn(|| load.work())).collect();
        while !workers.iter().all(|worker| worker.is_finished()) {
            pause(PROGRESS_STEP);
            progress.bar("requests answered", load.done(), requests);
            if interrupted.load(Ordering::Relaxed) {
                halted.store(true, Ordering::Relaxed);
                // Ends what the clients still wait for.
                router.stop();
            } else if gone.is_none() {
                gone = router.ended();
                halted.store(gone.is_some(), Ordering::Relaxed);
            }
        }
    });
    let took_ns = clock.now().since(begun);
    if interrupted.load(Ordering::Relaxed) {
        return Err(Stop::Interrupted);
    }
    if let Some(text) = gone {
        return Err(Stop::Failed(format!("router: {text}")));
    }
    let samples = load.into_samples();
    let engines_figures = engines
        .iter()
        .enumerate()
        .map(|(index, engine)| EngineFigures { name: engine_name(index), stats: engine.stats() })
        .collect();

    progress.stage("measuring the time that the router adds");
    let latency = measure(engines[0].addr(), router.address, clock, interrupted)
        .map_err(|error| ended(format!("short requests: {error}")))?;
    if interrupted.load(Ordering::Relaxed) {
        return Err(Stop::Interrupted);
    }
    progress.stage("stopping the router and the engines");
    router.stop();
    engines.into_iter().for_each(EngineHandle::stop);
    Ok(Report {
        engines: engines_figures,
        samples,
        clients,
        took_ns,
        max_concurrency: SLOTS,
        latency,
        unoptimised: cfg!(debug_assertions),
    })
}

fn engine_name(index: usize) -> String {
    format!("engine-{}", index + 1)
}

fn spawn_engines(count: usize, options: &EngineOptions) -> Result<Vec<EngineHandle>, Stop> {
    (0..count)
        .map(|index| {
            let failed = |error| Stop::Failed(format!("{}: {error}", engine_name(index)));
            engine::spawn(options.clone()).map_err(failed)
        })
        .collect()
}

/// The same short requests straight to an engine and through the router, in turn, so that whatever else the machine does
/// falls on both alike. They count tokens, which an engine answers at once: what is measured is the way.
fn measure(
    engine: SocketAddr,
    router: SocketAddr,
    clock: Clock,
    interrupted: &AtomicBool,
) -> io::Result<Latency> {
    let body = serde_json::json!({
        "model": "simulated", "messages": [{"role": "user", "content": "How many tokens is this?"}],
    })
    .to_string();
    let mut direct = Client::connect(engine)?;
    let mut routed = Client::connect(router)?;
    let mut latency = Latency::default();
    let short = |client: &mut Client| -> io::Result<u64> {
        let begun = clock.now();
        let answer = client.post("/v1/messages/count_tokens", &body)?;
        let ns = clock.now().since(begun);
        match answer.status() {
            200 => Ok(ns),
            status => Err(io::Error::other(format!("status {status}: {}", answer.text()))),
        }
    };
    for pair in 0..WARM_UP_PAIRS + LATENCY_PAIRS {
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
        let (direct_ns, routed_ns) = (short(&mut direct)?, short(&mut routed)?);
        if pair >= WARM_UP_PAIRS {
            latency.direct_ns.push(direct_ns);
            latency.routed_ns.push(routed_ns);
        }
    }
    Ok(latency)
}

/// What goes on, on stderr: one line that changes on a terminal, a line per stage elsewhere.
struct Progress {
    quiet: bool,
    terminal: bool,
}

impl Progress {
    fn new(quiet: bool) -> Self {
        Progress { quiet, terminal: io::stderr().is_terminal() }
    }

    fn show(&self, text: &str) {
        // A closed stderr is no reason to stop.
        let _ = if self.terminal {
            write!(io::stderr(), "\r\x1b[2K{text}")
        } else {
            writeln!(io::stderr(), "{text}")
        };
        let _ = io::stderr().flush();
    }

    fn stage(&mut self, text: &str) {
        if !self.quiet {
            self.show(&format!("{text} ..."));
        }
    }

    /// A line that stays.
    fn note(&mut self, text: &str) {
        if !self.quiet {
            self.show(text);
            if self.terminal {
                let _ = writeln!(io::stderr());
            }
        }
    }

    fn bar(&mut self, what: &str, done: usize, all: usize) {
        if self.quiet || !self.terminal {
            return;
        }
        const WIDTH: usize = 30;
        let full = done * WIDTH / all.max(1);
        self.show(&format!("[{}{}] {done} of {all} {what}", "#".repeat(full), ".".repeat(WIDTH - full)));
    }

    fn clear(&mut self) {
        if self.terminal && !self.quiet {
            self.show("");
        }
    }
}
