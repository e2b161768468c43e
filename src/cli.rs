//! The command line: what was asked, as settings ready to run.
//!
//! A flag beats its environment variable, which beats the file; all three take the same road through
//! [`crate::proto::config`], so a bad flag is reported like a bad key, and all faults at once.
//!
//! *Errors*: usage and configuration faults go to stderr and end with [`exit::WRONG`].
//! *Source*: the configuration reference, "command line".

mod engine;

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};

pub use engine::{ENGINE_HELP, EngineArgs};

use crate::proto::config::{Override, Place, Settings};

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

Exit codes:
  0  done
  1  wrong configuration or usage
  2  could not start (port in use, no permission, …)
  3  forced stop (drain limit, or a second signal)";

/// Front router for LLM inference engines: one pinned io_uring thread per core
#[derive(Debug, Parser)]
#[command(name = "ringway", version, after_help = EXAMPLES, propagate_version = true, disable_help_subcommand = true)]
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
    Engine(EngineArgs),
    /// Stargate's command line (not in this version)
    Stargate(LaterArgs),
    /// Show a running router's state (not in this version)
    Status(LaterArgs),
    /// Drain a server of a running router (not in this version)
    Drain(LaterArgs),
    /// Look at this host for what slows a router down (not in this version)
    Doctor(LaterArgs),
}

/// `ringway serve`. `None` and empty: what the file says, else the default.
#[derive(Args, Clone, Debug, Default)]
#[command(
    after_help = SERVE_HELP
)]
pub struct ServeArgs {
    /// Configuration file (TOML)
    #[arg(long, value_name = "FILE", env = "RINGWAY_CONFIG", help_heading = "Servers")]
    pub config: Option<PathBuf>,
    /// An engine, as URL or NAME=URL; repeatable. Replaces the file's pools and servers by one pool, `default`
    #[arg(
        long,
        value_name = "[NAME=]URL",
        env = "RINGWAY_BACKEND",
        value_delimiter = ',',
        help_heading = "Servers"
    )]
    pub backend: Vec<String>,
    /// How each pool picks a server: weighted-round-robin (default) or least-connections
    #[arg(long, value_name = "NAME", env = "RINGWAY_ALGORITHM", help_heading = "Servers")]
    pub algorithm: Option<String>,
    /// When all servers are full: queue (default), reject, or unlimited, which ignores ceilings
    #[arg(long, value_name = "MODE", env = "RINGWAY_ROUTING_MODE", help_heading = "Servers")]
    pub routing_mode: Option<String>,
    /// Requests that may wait in each pool [default: 1024]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "N",
        env = "RINGWAY_QUEUE_SIZE",
        help_heading = "Servers"
    )]
    pub queue_size: Option<i64>,
    /// How long a request may wait, in milliseconds [default: 30000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_QUEUE_TIMEOUT_MS",
        help_heading = "Servers"
    )]
    pub queue_timeout_ms: Option<i64>,
    /// Requests that each server may work on at once; 0: no ceiling [default: 32]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "N",
        env = "RINGWAY_MAX_CONCURRENCY",
        help_heading = "Servers"
    )]
    pub max_concurrency: Option<i64>,

    /// Where clients connect, IP:PORT; repeatable [default: 127.0.0.1:30000]
    #[arg(
        long,
        value_name = "ADDR",
        env = "RINGWAY_LISTEN",
        value_delimiter = ',',
        help_heading = "Listeners"
    )]
    pub listen: Vec<String>,
    /// Where operators connect: admin API, metrics, health [default: 127.0.0.1:29000]
    #[arg(long, value_name = "ADDR", env = "RINGWAY_ADMIN", help_heading = "Listeners")]
    pub admin: Option<String>,
    /// What the names of the router's own response headers begin with [default: X-Lifeboat-]
    #[arg(long, value_name = "PREFIX", env = "RINGWAY_HEADER_PREFIX", help_heading = "Listeners")]
    pub header_prefix: Option<String>,

    /// Cores that get a shard, such as 0-3,5, or all [default: all allowed]
    #[arg(long, value_name = "LIST", env = "RINGWAY_CORES", help_heading = "Threads")]
    pub cores: Option<String>,
    /// auto (default), io_uring or epoll
    #[arg(long, value_name = "NAME", env = "RINGWAY_DRIVER", help_heading = "Threads")]
    pub driver: Option<String>,
    /// How long an idle shard looks for work before it sleeps, in microseconds [default: 0]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "US",
        env = "RINGWAY_SPIN_US",
        help_heading = "Threads"
    )]
    pub spin_us: Option<i64>,

    /// Largest request body [default: 536870912]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "BYTES",
        env = "RINGWAY_BODY_BYTES_MAX",
        help_heading = "Limits"
    )]
    pub body_bytes_max: Option<i64>,
    /// At most this much of a body is waited for before routing [default: 1048576]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "BYTES",
        env = "RINGWAY_CLASSIFY_BYTES_MAX",
        help_heading = "Limits"
    )]
    pub classify_bytes_max: Option<i64>,
    /// Client connections of the process [default: 100000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "N",
        env = "RINGWAY_CONNECTIONS_MAX",
        help_heading = "Limits"
    )]
    pub connections_max: Option<i64>,
    /// To open a connection to a server [default: 2000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_CONNECT_TIMEOUT_MS",
        help_heading = "Limits"
    )]
    pub connect_timeout_ms: Option<i64>,
    /// From a request's last byte to its response head [default: 1800000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_RESPONSE_HEAD_TIMEOUT_MS",
        help_heading = "Limits"
    )]
    pub response_head_timeout_ms: Option<i64>,
    /// Between two reads of a response body [default: 600000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_BETWEEN_BYTES_TIMEOUT_MS",
        help_heading = "Limits"
    )]
    pub between_bytes_timeout_ms: Option<i64>,
    /// From the head of a request to the end of its answer; 0: no limit of its own [default: 0]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_TOTAL_TIMEOUT_MS",
        help_heading = "Limits"
    )]
    pub total_timeout_ms: Option<i64>,
    /// How long running requests may take to finish on shutdown [default: 30000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_DRAIN_TIMEOUT_MS",
        help_heading = "Limits"
    )]
    pub drain_timeout_ms: Option<i64>,
    /// How long a stopping router still accepts while readiness says 503 [default: 1000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_DRAIN_SETTLE_MS",
        help_heading = "Limits"
    )]
    pub drain_settle_ms: Option<i64>,
    /// What a client that shuts down its sending side wants: abort (default; it has gone) or allow (it still waits)
    #[arg(long, value_name = "WORD", env = "RINGWAY_HALF_CLOSE", help_heading = "Limits")]
    pub half_close: Option<String>,

    /// Target of the health checks [default: /health]
    #[arg(long, value_name = "PATH", env = "RINGWAY_HEALTH_PATH", help_heading = "Health checks")]
    pub health_path: Option<String>,
    /// Between two checks of a server [default: 2000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_HEALTH_INTERVAL_MS",
        help_heading = "Health checks"
    )]
    pub health_interval_ms: Option<i64>,
    /// How long one check may take [default: 1000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "RINGWAY_HEALTH_TIMEOUT_MS",
        help_heading = "Health checks"
    )]
    pub health_timeout_ms: Option<i64>,

    /// error, warn, info (default), debug or trace
    #[arg(long, value_name = "LEVEL", env = "RINGWAY_LOG_LEVEL", help_heading = "Log")]
    pub log_level: Option<String>,
    /// text (default) or json
    #[arg(long, value_name = "FORMAT", env = "RINGWAY_LOG_FORMAT", help_heading = "Log")]
    pub log_format: Option<String>,
}

const SERVE_HELP: &str = "\
Examples:
  ringway serve --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002
  ringway serve --backend a=http://10.0.0.10:8000 --backend b=unix:/run/engine.sock --algorithm least-connections
  ringway serve --config ringway.toml --listen 0.0.0.0:30000 --log-level debug
  RINGWAY_BACKEND=http://10.0.0.10:8000,http://10.0.0.11:8000 ringway serve --listen 127.0.0.1:0

Exit codes:
  0  done
  1  wrong configuration or usage
  2  could not start (port in use, no permission, …)
  3  forced stop (drain limit, or a second signal)";

/// `ringway check`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:\n  ringway check ringway.toml > effective.toml\n\n\
        Exit codes:\n  0  the file is good\n  1  it is not, or cannot be read")]
pub struct CheckArgs {
    /// Configuration file (TOML)
    pub file: PathBuf,
}

/// `ringway demo`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  ringway demo\n  ringway demo --requests 500 --quiet")]
pub struct DemoArgs {
    /// Which experiment to show instead of the general tour
    #[arg(long, value_name = "NAME")]
    pub experiment: Option<String>,
    /// Requests to send
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
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

impl ServeArgs {
    /// The settings to run with. The error is ready to print, one fault a line.
    pub fn settings(&self) -> Result<Settings, String> {
        match &self.config {
            Some(file) => load(file, &self.overrides()),
            None => {
                let parsed = Settings::parse("", Path::new(""), &self.overrides());
                parsed.map_err(|faults| listed("ringway serve", &faults.to_string()))
            }
        }
    }

    /// What flags and the environment set.
    fn overrides(&self) -> Vec<Override> {
        let mut set = Vec::new();
        let list = |values: &[String]| -> Option<toml::Value> {
            (!values.is_empty()).then(|| values.iter().map(String::as_str).collect::<Vec<_>>().into())
        };
        let word = |value: &Option<String>| value.as_deref().map(toml::Value::from);
        let number = |value: Option<i64>| value.map(toml::Value::from);
        let mut put = |flag, place, value: Option<toml::Value>| {
            set.extend(value.map(|value| Override { flag, place, value }));
        };
        put("--backend (or RINGWAY_BACKEND)", Place::Backends, list(&self.backend));
        put("--listen (or RINGWAY_LISTEN)", Place::Listeners, list(&self.listen));
        put("--algorithm (or RINGWAY_ALGORITHM)", Place::EveryPool("algorithm"), word(&self.algorithm));
        put(
            "--routing-mode (or RINGWAY_ROUTING_MODE)",
            Place::EveryPool("routing_mode"),
            word(&self.routing_mode),
        );
        put("--queue-size (or RINGWAY_QUEUE_SIZE)", Place::EveryPool("queue_size"), number(self.queue_size));
        put(
            "--queue-timeout-ms (or RINGWAY_QUEUE_TIMEOUT_MS)",
            Place::EveryPool("queue_timeout_ms"),
            number(self.queue_timeout_ms),
        );
        put(
            "--max-concurrency (or RINGWAY_MAX_CONCURRENCY)",
            Place::EveryServer("max_concurrency"),
            number(self.max_concurrency),
        );
        put("--admin (or RINGWAY_ADMIN)", Place::Key("admin", "address"), word(&self.admin));
        put(
            "--header-prefix (or RINGWAY_HEADER_PREFIX)",
            Place::Key("headers", "prefix"),
            word(&self.header_prefix),
        );
        put("--cores (or RINGWAY_CORES)", Place::Key("runtime", "cores"), word(&self.cores));
        put("--driver (or RINGWAY_DRIVER)", Place::Key("runtime", "driver"), word(&self.driver));
        put("--spin-us (or RINGWAY_SPIN_US)", Place::Key("runtime", "spin_us"), number(self.spin_us));
        put("--log-level (or RINGWAY_LOG_LEVEL)", Place::Key("log", "level"), word(&self.log_level));
        put("--log-format (or RINGWAY_LOG_FORMAT)", Place::Key("log", "format"), word(&self.log_format));
        put(
            "--half-close (or RINGWAY_HALF_CLOSE)",
            Place::Key("limits", "half_close"),
            word(&self.half_close),
        );
        put("--health-path (or RINGWAY_HEALTH_PATH)", Place::Key("health", "path"), word(&self.health_path));
        let numbers = [
            ("--body-bytes-max (or RINGWAY_BODY_BYTES_MAX)", "limits", "body_bytes_max", self.body_bytes_max),
            (
                "--classify-bytes-max (or RINGWAY_CLASSIFY_BYTES_MAX)",
                "limits",
                "classify_bytes_max",
                self.classify_bytes_max,
            ),
            (
                "--connections-max (or RINGWAY_CONNECTIONS_MAX)",
                "limits",
                "connections_max",
                self.connections_max,
            ),
            (
                "--connect-timeout-ms (or RINGWAY_CONNECT_TIMEOUT_MS)",
                "limits",
                "connect_timeout_ms",
                self.connect_timeout_ms,
            ),
            (
                "--response-head-timeout-ms (or RINGWAY_RESPONSE_HEAD_TIMEOUT_MS)",
                "limits",
                "response_head_timeout_ms",
                self.response_head_timeout_ms,
            ),
            (
                "--between-bytes-timeout-ms (or RINGWAY_BETWEEN_BYTES_TIMEOUT_MS)",
                "limits",
                "between_bytes_timeout_ms",
                self.between_bytes_timeout_ms,
            ),
            (
                "--total-timeout-ms (or RINGWAY_TOTAL_TIMEOUT_MS)",
                "limits",
                "total_timeout_ms",
                self.total_timeout_ms,
            ),
            (
                "--drain-timeout-ms (or RINGWAY_DRAIN_TIMEOUT_MS)",
                "limits",
                "drain_timeout_ms",
                self.drain_timeout_ms,
            ),
            (
                "--drain-settle-ms (or RINGWAY_DRAIN_SETTLE_MS)",
                "limits",
                "drain_settle_ms",
                self.drain_settle_ms,
            ),
            (
                "--health-interval-ms (or RINGWAY_HEALTH_INTERVAL_MS)",
                "health",
                "interval_ms",
                self.health_interval_ms,
            ),
            (
                "--health-timeout-ms (or RINGWAY_HEALTH_TIMEOUT_MS)",
                "health",
                "timeout_ms",
                self.health_timeout_ms,
            ),
        ];
        for (flag, table, key, value) in numbers {
            put(flag, Place::Key(table, key), number(value));
        }
        set
    }
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
    let mut settings =
        Settings::parse(&text, &folder, overrides).map_err(|faults| listed(&shown, &faults.to_string()))?;
    settings
        .load_keys(|path| std::fs::read_to_string(path).map_err(|error| error.to_string()))
        .map_err(|faults| listed(&shown, &faults.to_string()))?;
    Ok(settings)
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
