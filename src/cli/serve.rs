//! `ringway serve`: its flags, and the settings they make.
//!
//! Flags carry text and numbers as they were given; ranges and words are checked where the file's are, so that a flag's
//! fault reads like a key's and comes with all others.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{listed, load};
use crate::proto::config::{Override, Place, Settings};

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
    /// How each pool picks a server: weighted-round-robin (default), least-connections, sticky-session or kv-aware
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
        use Place::{Backends, EveryPool, EveryServer, Key, Listeners};
        let lists = [("backend", Backends, &self.backend), ("listen", Listeners, &self.listen)];
        let words = [
            ("algorithm", EveryPool("algorithm"), &self.algorithm),
            ("routing-mode", EveryPool("routing_mode"), &self.routing_mode),
            ("admin", Key("admin", "address"), &self.admin),
            ("header-prefix", Key("headers", "prefix"), &self.header_prefix),
            ("cores", Key("runtime", "cores"), &self.cores),
            ("driver", Key("runtime", "driver"), &self.driver),
            ("half-close", Key("limits", "half_close"), &self.half_close),
            ("health-path", Key("health", "path"), &self.health_path),
            ("log-level", Key("log", "level"), &self.log_level),
            ("log-format", Key("log", "format"), &self.log_format),
        ];
        let numbers = [
            ("queue-size", EveryPool("queue_size"), self.queue_size),
            ("queue-timeout-ms", EveryPool("queue_timeout_ms"), self.queue_timeout_ms),
            ("max-concurrency", EveryServer("max_concurrency"), self.max_concurrency),
            ("spin-us", Key("runtime", "spin_us"), self.spin_us),
            ("body-bytes-max", Key("limits", "body_bytes_max"), self.body_bytes_max),
            ("classify-bytes-max", Key("limits", "classify_bytes_max"), self.classify_bytes_max),
            ("connections-max", Key("limits", "connections_max"), self.connections_max),
            ("connect-timeout-ms", Key("limits", "connect_timeout_ms"), self.connect_timeout_ms),
            (
                "response-head-timeout-ms",
                Key("limits", "response_head_timeout_ms"),
                self.response_head_timeout_ms,
            ),
            (
                "between-bytes-timeout-ms",
                Key("limits", "between_bytes_timeout_ms"),
                self.between_bytes_timeout_ms,
            ),
            ("total-timeout-ms", Key("limits", "total_timeout_ms"), self.total_timeout_ms),
            ("drain-timeout-ms", Key("limits", "drain_timeout_ms"), self.drain_timeout_ms),
            ("drain-settle-ms", Key("limits", "drain_settle_ms"), self.drain_settle_ms),
            ("health-interval-ms", Key("health", "interval_ms"), self.health_interval_ms),
            ("health-timeout-ms", Key("health", "timeout_ms"), self.health_timeout_ms),
        ];
        let list = |values: &[String]| -> Option<toml::Value> {
            (!values.is_empty()).then(|| values.iter().map(String::as_str).collect::<Vec<_>>().into())
        };
        let lists = lists.into_iter().map(|(flag, place, values)| (flag, place, list(values)));
        let words = words
            .into_iter()
            .map(|(flag, place, word)| (flag, place, word.as_deref().map(toml::Value::from)));
        let numbers =
            numbers.into_iter().map(|(flag, place, number)| (flag, place, number.map(toml::Value::from)));
        let given = lists.chain(words).chain(numbers);
        given
            .filter_map(|(flag, place, value)| {
                let variable = flag.replace('-', "_").to_uppercase();
                value.map(|value| Override {
                    flag: format!("--{flag} (or RINGWAY_{variable})"),
                    place,
                    value,
                })
            })
            .collect()
    }
}
