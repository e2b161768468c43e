//! `ringway-perf`: load generator, measuring backend and side-by-side comparisons. See perf/README.md.

mod answer;
mod backend;
mod clock;
mod compare;
mod exchange;
mod http;
mod instructions;
mod load;
mod payload;
mod peers;
mod process;
mod prompts;
mod record;
mod replay;
mod report;
mod rig;
mod ring;
mod run_load;
mod scenario;
mod sched;
mod stats;

use std::net::SocketAddrV4;

use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
#[command(name = "ringway-perf", version, about = "Load generator and side-by-side comparisons for Ringway")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Send load to one URL and report rates, latencies and faults.
    Load(run_load::LoadArgs),
    /// Serve fixed answers until killed.
    Backend(BackendArgs),
    /// Run the same load against direct, Ringway, HAProxy and nginx in turns, and compare.
    Compare(compare::CompareArgs),
    /// Play recorded traces through routers to simulated engines, in simulated time, and compare cache hits, latency and balance.
    Replay(replay::ReplayArgs),
}

#[derive(Args)]
struct BackendArgs {
    /// Address to serve on; may be repeated. Port 0 takes a free one, printed on stdout.
    #[arg(long, default_values = ["127.0.0.1:0"])]
    listen: Vec<SocketAddrV4>,
    /// Core to run on; default: any allowed.
    #[arg(long)]
    core: Option<usize>,
    /// Answer to requests without an X-Perf header: length of the JSON body in bytes.
    #[arg(long, default_value_t = 1024)]
    answer_bytes: usize,
    /// Answer such requests after this many milliseconds.
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Answer such requests with a stream of this many events instead.
    #[arg(long, default_value_t = 0)]
    events: u32,
    /// Time between events, in milliseconds; the first comes half of it after the head.
    #[arg(long, default_value_t = 10)]
    every_ms: u64,
}

fn main() -> std::process::ExitCode {
    let done = match Cli::parse().command {
        Command::Load(args) => run_load::run(&args),
        Command::Backend(args) => serve(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Replay(args) => replay::run(&args),
    };
    match done {
        Ok(clean) if clean => std::process::ExitCode::SUCCESS,
        Ok(_) => std::process::ExitCode::from(1),
        Err(why) => {
            eprintln!("ringway-perf: {why}");
            std::process::ExitCode::from(2)
        }
    }
}

fn serve(args: &BackendArgs) -> Result<bool, String> {
    let answer = if args.events > 0 {
        if args.events > payload::EVENTS_MAX {
            return Err(format!("--events {}: expected at most {}", args.events, payload::EVENTS_MAX));
        }
        let every_ns = args.every_ms * clock::MS;
        payload::Answer::Events { count: args.events, first_ns: every_ns / 2, every_ns }
    } else {
        payload::answer_body(args.answer_bytes)?;
        payload::Answer::Json { len: args.answer_bytes, delay_ns: args.delay_ms * clock::MS }
    };
    sched::raise_descriptors(65_536).or_else(|_| sched::raise_descriptors(4_096))?;
    let rig = rig::RigHandle::start(args.core, &args.listen, payload::Recipe { body_len: 0, answer })?;
    for address in &rig.backends {
        println!("listening http {address}");
    }
    println!("ready");
    rig.join().map(|()| true)
}
