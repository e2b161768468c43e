//! The command line: what was asked, as settings ready to run.
//!
//! A flag beats its environment variable, which beats the file; all three take the same road through
//! [`crate::proto::config`], so a bad flag is reported like a bad key, and all faults at once.
//!
//! *Errors*: usage and configuration faults go to stderr and end with [`exit::WRONG`].
//! *Source*: the configuration reference, "command line".

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};

use crate::proto::config::{Override, Settings};

mod engine;
mod operator;
mod serve;
mod stargate;

pub use engine::{ENGINE_HELP, EngineArgs};
pub use operator::{AdminArgs, DrainArgs, StatusArgs};
pub use serve::ServeArgs;
pub use stargate::{Shown, StargateArgs};

/// Exit codes of the process.
pub mod exit {
    /// Done.
    pub const DONE: u8 = 0;
    /// Wrong configuration or usage.
    pub const WRONG: u8 = 1;
    /// Could not start: port in use, no permission, …
    pub const NOT_STARTED: u8 = 2;
    /// Forced stop: drain limit or second signal.
    pub const FORCED: u8 = 3;
}

const EXAMPLES: &str = "\
Examples:
  ringway demo
  ringway serve --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002
  ringway check ringway.toml
  ringway serve --config ringway.toml
  ringway status
  ringway drain gpu0

Exit codes:
  0  done
  1  wrong configuration or usage
  2  could not start (port in use, no permission, …)
  3  forced stop (drain limit, or a second signal)";

/// Front router for LLM inference engines: one pinned io_uring thread per core
#[derive(Debug, Parser)]
#[command(name = "ringway", version, after_help = EXAMPLES, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Route requests to engines
    #[command(long_about = "Route requests to engines.\n\n\
        Servers come from --config or from --backend. A flag beats its environment variable, which beats the file. \
        With port 0 a free port is bound. On stdout: one `listening …` line per listener, then `ready`.")]
    Serve(Box<ServeArgs>),
    /// Check a configuration file: print every fault, or the effective configuration
    #[command(long_about = "Check a configuration file.\n\n\
        A good file: the effective configuration on stdout, with every default filled in, in the file's own format; \
        exit 0.\n\
        A faulty one: every fault on stderr, one a line, as `path: value: what was expected`; exit 1.")]
    Check(CheckArgs),
    /// Start two simulated engines and a router, send a short load, and show what happened
    Demo(DemoArgs),
    /// Run the built-in simulated engine
    #[command(
        long_about = "Run the built-in simulated engine: it speaks the engines' HTTP APIs, keeps a prefix cache and takes \
        the time that its rates say, without a model."
    )]
    Engine(EngineArgs),
    /// Stargate's command line: a router for a trusted gateway
    #[command(
        long_about = "Stargate's command line: a router for a trusted gateway, whose headers say where requests go.\n\n\
        Flags, defaults, environment variables and exit codes are Stargate's. Servers are named by --backend, or register over HTTP \
        on the admin listener. With port 0 a free port is bound. On stdout: one `listening …` line per listener, then `ready`."
    )]
    Stargate(Box<StargateArgs>),
    /// Show a running router's state
    Status(StatusArgs),
    /// Take a server of a running router out of service, and wait until nothing runs on it
    #[command(long_about = "Take a server of a running router out of service.\n\n\
        Its weight becomes 0: it gets no new requests, and those that run on it finish. Returns when none is left. To bring it \
        back: PATCH /admin/v1/servers/NAME with {\"weight\":1}.")]
    Drain(DrainArgs),
    /// Look at this host for what slows a router down (not in this version)
    Doctor(LaterArgs),
}

/// `ringway check`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:\n  ringway check ringway.toml > effective.toml\n\n\
        Exit codes:\n  0  the file is good\n  1  it is not, or cannot be read")]
pub struct CheckArgs {
    /// Configuration file (TOML)
    pub file: PathBuf,
}

const DEMO_HELP: &str = "\
Examples:
  ringway demo
  ringway demo --requests 500 --quiet
  ringway demo --experiment kv-reuse
  ringway demo --experiment kv-reuse --backend http://127.0.0.1:8201 --backend http://127.0.0.1:8202

Experiments:
  kv-reuse   nine distinct prompts, two engines whose caches hold about five each, 45 requests: how they are split and how much
             of the prompts is found in the caches, by weighted round-robin and by kv-aware routing, in turn and shuffled

Exit codes:
  0  done
  1  wrong usage, or an experiment's figures were missed
  2  something could not start, or a request failed
  3  interrupted";

/// `ringway demo`.
#[derive(Args, Clone, Debug)]
#[command(after_help = DEMO_HELP)]
pub struct DemoArgs {
    /// An experiment to run instead of the general tour: kv-reuse
    #[arg(long, value_name = "NAME")]
    pub experiment: Option<String>,
    /// With an experiment: an engine of your own, in place of the simulated ones; repeat it for each of two or more
    #[arg(long, value_name = "URL", requires = "experiment")]
    pub backend: Vec<String>,
    /// Requests to send on the tour
    #[arg(long, value_name = "N", default_value_t = 200, conflicts_with = "experiment",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub requests: u32,
    /// Only the closing table, no progress
    #[arg(long)]
    pub quiet: bool,
}

/// A command that a later version brings; its arguments are taken as they come.
#[derive(Args, Clone, Debug)]
#[command(disable_help_flag = true)]
pub struct LaterArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    pub arguments: Vec<std::ffi::OsString>,
}

impl Cli {
    /// Reads the process's arguments and environment. On `--help`, `--version` and usage faults what is to be said has
    /// been printed, and the error is the exit code.
    pub fn from_process() -> Result<Cli, u8> {
        Cli::try_parse().map_err(|error| {
            // Nothing can be done about a closed stdout or stderr.
            let _ = error.print();
            if error.use_stderr() { exit::WRONG } else { exit::DONE }
        })
    }
}

/// Says that `command` comes with a later version.
pub fn not_in_this_version(command: &Command) -> u8 {
    let name = match command {
        Command::Serve(_) => "serve",
        Command::Check(_) => "check",
        Command::Demo(_) => "demo",
        Command::Engine(_) => "engine",
        Command::Stargate(_) => "stargate",
        Command::Status(_) => "status",
        Command::Drain(_) => "drain",
        Command::Doctor(_) => "doctor",
    };
    eprintln!("ringway: {name}: not in this version; ringway --help shows what is");
    exit::WRONG
}

/// Reads `file` and the key files it names. The error is ready to print.
fn load(file: &Path, overrides: &[Override]) -> Result<Settings, String> {
    let shown = file.display().to_string();
    let text = std::fs::read(file).map_err(|error| format!("ringway: {shown}: cannot be read: {error}"))?;
    let text = String::from_utf8(text).map_err(|error| {
        format!("ringway: {shown}: byte {}: expected UTF-8 text", error.utf8_error().valid_up_to())
    })?;
    // Made absolute, so that the effective configuration means the same from any folder.
    let folder = file.parent().unwrap_or(Path::new(""));
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let folder = folder
        .canonicalize()
        .map_err(|error| format!("ringway: {shown}: its folder cannot be found: {error}"))?;
    let read = |path: &Path| std::fs::read_to_string(path).map_err(|error| error.to_string());
    Settings::load(&text, &folder, overrides, read).map_err(|faults| listed(&shown, &faults.to_string()))
}

/// Faults under a line that says where they are.
fn listed(place: &str, faults: &str) -> String {
    let count = faults.lines().count();
    format!("{place}: {count} {}\n{faults}", if count == 1 { "fault" } else { "faults" })
}

/// `ringway check`: prints, and says the exit code.
pub fn check(args: &CheckArgs) -> u8 {
    use std::io::Write;
    match load(&args.file, &[]) {
        Err(text) => {
            eprintln!("{text}");
            exit::WRONG
        }
        Ok(settings) => {
            for warning in settings.warnings() {
                eprintln!("warning: {warning}");
            }
            // A reader that closed the pipe (`| head`) has seen what it wanted.
            let _ = std::io::stdout().write_all(settings.to_toml().as_bytes());
            exit::DONE
        }
    }
}

#[cfg(test)]
mod tests;
