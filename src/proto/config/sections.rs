//! The flat tables of the file. One line declares a key: its name, type, default and range; reading it and printing it
//! follow from that line, so the two cannot disagree.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::keys::{Keys, Value, Word, word};
use super::print::Table;
use crate::proto::backend::catalog::{KV_CAPACITY_BLOCKS_MAX, Miss};

/// Longest time that a key may name: a week.
pub(super) const MS_MAX: u64 = 7 * 24 * 60 * 60 * 1000;
const TIB: u64 = 1 << 40;
const GIB: u64 = 1 << 30;

/// `key: Type = default, rule;` for keys that work, then `key = default;` for keys whose feature is not in this
/// version: their default is accepted and printed, any other value refused.
macro_rules! section {
    (
        $(#[$doc:meta])*
        $name:ident {
            $( $(#[$key_doc:meta])* $key:ident: $kind:ty = $default:expr, $rule:expr; )*
        }
        later { $( $later:ident = $later_default:expr; )* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $( $(#[$key_doc])* pub $key: $kind, )*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $( $key: $default, )* }
            }
        }

        impl $name {
            /// Reads and ends `keys`.
            pub(super) fn read(mut keys: Keys<'_>) -> Self {
                let section = $name {
                    $( $key: keys.value(stringify!($key), $default, &$rule), )*
                };
                $( keys.later(stringify!($later), &toml::Value::from($later_default)); )*
                keys.end();
                section
            }

            pub(super) fn print(&self, table: &mut Table<'_>) {
                $( table.put(stringify!($key), &self.$key.write()); )*
                $( table.put(stringify!($later), &toml::Value::from($later_default)); )*
            }
        }
    };
}

section! {
    /// `[runtime]`: threads and their I/O.
    Runtime {
        /// One pinned shard per core.
        cores: Cores = Cores::Allowed, ();
        /// How a shard waits for I/O.
        driver: Driver = Driver::Auto, ();
        /// How long an idle shard looks for work before it sleeps, in microseconds. Leave 0 on shared cores.
        spin_us: u64 = 0, 0..=100_000;
    }
    later {}
}

section! {
    /// `[limits]`: sizes in bytes, times in milliseconds.
    Limits {
        /// Largest request body; more is 413.
        body_bytes_max: u64 = 512 << 20, 1..=TIB;
        /// Largest request head; more is 431.
        head_bytes_max: u64 = 64 << 10, 1024..=1 << 20;
        /// At most this much of a body is waited for before routing; the rest streams through.
        classify_bytes_max: u64 = 1 << 20, 0..=GIB;
        /// Bodies up to this are kept for safe resends; larger ones only stream.
        replay_bytes_max: u64 = 64 << 20, 0..=GIB;
        /// All kept bodies of the process together; beyond it bodies only stream.
        buffered_bytes_max: u64 = GIB, 0..=TIB;
        /// Prefix memory of the process, all shards together.
        kv_memory_bytes_max: u64 = GIB, 1 << 20..=TIB;
        /// Client connections of the process.
        connections_max: u64 = 100_000, 1..=10_000_000;
        /// From the first byte of a request head to its last.
        client_head_timeout_ms: u64 = 10_000, 1..=MS_MAX;
        /// Between two reads of a request body.
        client_body_idle_timeout_ms: u64 = 30_000, 1..=MS_MAX;
        /// What a client that shuts down its sending side wants.
        half_close: HalfClose = HalfClose::Abort, ();
        /// To open a connection to a server.
        connect_timeout_ms: u64 = 2_000, 1..=MS_MAX;
        /// From a request's last byte to its response head.
        response_head_timeout_ms: u64 = 1_800_000, 1..=MS_MAX;
        /// Between two reads of a response body.
        between_bytes_timeout_ms: u64 = 600_000, 1..=MS_MAX;
        /// From the head of a request to the end of its answer; 0: no limit of its own.
        total_timeout_ms: u64 = 0, 0..=MS_MAX;
        /// How long a client's idle connection is kept.
        keepalive_timeout_ms: u64 = 75_000, 1..=MS_MAX;
        /// How long running requests may take to finish on shutdown; then they are cut.
        drain_timeout_ms: u64 = 30_000, 0..=MS_MAX;
        /// How long a stopping router goes on accepting while readiness already says 503.
        drain_settle_ms: u64 = 1_000, 0..=MS_MAX;
    }
    later {}
}

section! {
    /// `[headers]`: the router's own response headers.
    Headers {
        /// What their names begin with; a field-name prefix that ends in `-`.
        prefix: String = "X-Lifeboat-".to_owned(), (header_prefix as fn(&str) -> Result<(), String>);
        /// Whose content keys the digests of client keys; `None`: they are plain SHA-256. Absolute, or relative to the
        /// process where the file's folder was not known.
        digest_secret_file: Option<PathBuf> = None, ();
    }
    later {}
}

section! {
    /// `[health]`: active checks, and benching after failed requests.
    Health {
        /// Target of the check.
        path: String = "/health".to_owned(), (health_path as fn(&str) -> Result<(), String>);
        interval_ms: u64 = 2_000, 10..=MS_MAX;
        timeout_ms: u64 = 1_000, 1..=MS_MAX;
        /// Failed checks in a row that take a server out.
        fall: u32 = 2, 1..=1_000;
        /// Good checks in a row that bring it back.
        rise: u32 = 1, 1..=1_000;
        /// Failed requests in a row that bench a server.
        bench_after: u32 = 3, 1..=1_000_000;
        /// First bench time; doubles each time, up to `bench_max_ms`.
        bench_ms: u64 = 1_000, 1..=MS_MAX;
        bench_max_ms: u64 = 30_000, 1..=MS_MAX;
    }
    later {}
}

section! {
    /// `[log]`: the process's own log, on stderr.
    Log {
        format: LogFormat = LogFormat::Text, ();
        level: LogLevel = LogLevel::Info, ();
    }
    // The access log itself comes later; until then its default is "off".
    later {
        access = "off";
    }
}

/// Longest lease of a registration.
pub const TTL_MS_MAX: u64 = 300_000;
/// Shortest lease of a registration.
pub const TTL_MS_MIN: u64 = 1_000;
/// Most retries of one request of each kind.
const RETRIES_MAX: u32 = 100;

section! {
    /// `[stargate]`: what holds on listeners of that profile.
    Stargate {
        /// What this router calls itself in `/debug/state` and in its log.
        id: String = "ringway".to_owned(), (stargate_id as fn(&str) -> Result<(), String>);
        /// The algorithms' file; `None`: power-of-n, and every algorithm for those who ask. Absolute, or relative to the
        /// process where the file's folder was not known.
        lb_config_path: Option<PathBuf> = None, ();
        /// A target whose last server left less than that ago is 503, not 404; 0: always 404.
        deregistered_model_grace_ms: u64 = 900_000, 0..=MS_MAX;
        /// Fresh connections for one request after the first failed.
        max_connect_retries: u32 = 2, 0..=RETRIES_MAX;
        /// Servers after the first that one request may be sent to because one said so.
        max_request_retries: u32 = 2, 0..=RETRIES_MAX;
        /// Bodies up to this are kept for retries; a longer one is 413 where it is declared, or where a retry needs it.
        replay_bytes_max: u64 = 64 << 20, 0..=GIB;
        /// Whether 429 and 503 without `x-stargate-retryable` are passed on rather than tried elsewhere.
        require_retry_signal: bool = true, ();
        /// The header that limits the time for retries, in milliseconds; empty: none does.
        retry_budget_header: String = "x-stargate-max-wait-ms".to_owned(), (field_name as fn(&str) -> Result<(), String>);
        /// To open a connection to a server.
        connect_timeout_ms: u64 = 2_000, 1..=MS_MAX;
        /// From the start of an attempt to its response head.
        response_head_timeout_ms: u64 = 30_000, 1..=MS_MAX;
        /// How long a registration holds that names no `ttl_ms`.
        registration_ttl_ms: u64 = 60_000, TTL_MS_MIN..=TTL_MS_MAX;
        /// Longest `ttl_ms` that a registration may name.
        registration_ttl_ms_max: u64 = TTL_MS_MAX, TTL_MS_MIN..=TTL_MS_MAX;
        /// What the names of this family's metrics begin with.
        metrics_prefix: String = "stargate_".to_owned(), (metrics_prefix as fn(&str) -> Result<(), String>);
        /// A listener that answers `GET /metrics` and nothing else; `None`: the admin listener alone does.
        metrics_address: Option<SocketAddr> = None, ();
    }
    later {}
}

section! {
    /// `[pool.kv]`: how a kv-aware pool matches prompts.
    Kv {
        /// Prompt bytes per block.
        block_bytes: u32 = 256, 64..=65_536;
        /// Fewer leading blocks than this are no useful match.
        min_match_blocks: u32 = 2, 1..=1_000_000;
        /// How far above the least load a server may be and still count as least busy: requests per unit of weight …
        affinity_slack_abs: f64 = 12.0, 0.0..=1e6;
        /// … or this part of the least load, whichever is more.
        affinity_slack_rel: f64 = 1.0, 0.0..=1e6;
        /// Blocks per server where its engine does not say; 0: the engine's, else a default.
        kv_capacity_blocks: u32 = 0, 0..=KV_CAPACITY_BLOCKS_MAX;
        /// Where requests without a match worth following go.
        miss: Miss = Miss::WeightedRoundRobin, ();
    }
    later {}
}

/// Which cores get a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cores {
    /// Each core that the process may run on. Written `all`.
    Allowed,
    /// These, one shard each, in that order; written `0-3,5`. A core named twice gets two shards.
    List(Vec<usize>),
}

/// Highest core number that a list may name.
const CORE_MAX: usize = 4_095;

impl Cores {
    /// Reads `all` or `0-3,5`. The error says what was expected.
    pub fn parse(text: &str) -> Result<Cores, String> {
        let expected = || {
            format!(
                "expected \"all\" or core numbers such as \"0-3,5\", each from 0 to {CORE_MAX}, at most {} in all",
                crate::limits::SHARDS_MAX
            )
        };
        if text.trim() == "all" {
            return Ok(Cores::Allowed);
        }
        let number = |digits: &str| -> Option<usize> {
            let digits = digits.trim();
            if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            digits.parse().ok().filter(|core| *core <= CORE_MAX)
        };
        let mut cores = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = number(first).zip(number(last)).ok_or_else(expected)?;
            if first > last {
                return Err(expected());
            }
            cores.extend(first..=last);
        }
        if cores.len() > crate::limits::SHARDS_MAX {
            return Err(expected());
        }
        Ok(Cores::List(cores))
    }
}

impl std::fmt::Display for Cores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Cores::List(cores) = self else { return f.write_str("all") };
        let runs = cores.chunk_by(|a, b| a + 1 == *b);
        for (i, run) in runs.enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            match run {
                [first, .., last] => write!(f, "{first}-{last}")?,
                [only] => write!(f, "{only}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl Value for Cores {
    type Rule = ();
    fn read(raw: &toml::Value, (): &()) -> Result<Cores, String> {
        Cores::parse(raw.as_str().unwrap_or(""))
    }
    fn write(&self) -> toml::Value {
        toml::Value::String(self.to_string())
    }
}

/// A closed set of words as a key's type.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $( $(#[$word_doc:meta])* $word:ident = $text:literal, )* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $( $(#[$word_doc])* $word, )* }

        impl $name {
            /// As the file spells it.
            pub const fn name(self) -> &'static str {
                match self { $( $name::$word => $text, )* }
            }
        }
        impl Word for $name {
            const WORDS: &'static [(&'static str, Self)] = &[ $( ($text, $name::$word), )* ];
        }
        impl Value for $name {
            type Rule = ();
            fn read(raw: &toml::Value, (): &()) -> Result<Self, String> {
                word(raw.as_str().unwrap_or(""))
            }
            fn write(&self) -> toml::Value {
                toml::Value::String(self.name().to_owned())
            }
        }
    };
}

words! {
    /// How a shard waits for I/O.
    Driver {
        /// io_uring where the kernel allows it, else epoll, with a warning in the log.
        Auto = "auto",
        IoUring = "io_uring",
        Epoll = "epoll",
    }
}
words! {
    /// A client that shuts down its sending side …
    HalfClose {
        /// … has gone: its request is cancelled.
        Abort = "abort",
        /// … still waits for its answer.
        Allow = "allow",
    }
}
words! {
    LogFormat { Text = "text", Json = "json", }
}
words! {
    LogLevel { Error = "error", Warn = "warn", Info = "info", Debug = "debug", Trace = "trace", }
}
words! {
    /// How an engine publishes its figures.
    #[derive(Default)]
    EngineMetrics {
        /// In whichever of the known ways.
        #[default]
        Auto = "auto",
        Vllm = "vllm",
        Sglang = "sglang",
        Trtllm = "trtllm",
        Llamacpp = "llamacpp",
        /// Not at all: it is not asked.
        None = "none",
    }
}

words! {
    /// Whose contract a listener follows.
    Profile {
        /// Callers are untrusted.
        OpenAi = "openai",
        /// Callers are a trusted gateway, which says where requests go.
        Stargate = "stargate",
    }
}

/// Fields and families of fields that an engine's answer may carry for the client. The router removes an engine's
/// headers of its own prefix, so none of these may fall under it.
const FOREIGN_FIELDS: [&str; 23] = [
    "accept-",
    "access-control-",
    "age",
    "alt-svc",
    "anthropic-",
    "cache-control",
    "connection",
    "content-",
    "date",
    "etag",
    "keep-alive",
    "link",
    "location",
    "openai-",
    "proxy-",
    "retry-after",
    "sec-",
    "server",
    "set-cookie",
    "transfer-encoding",
    "www-authenticate",
    "x-ratelimit-",
    "x-request-id",
];

fn header_prefix(text: &str) -> Result<(), String> {
    let name_byte = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if text.len() < 2 || text.len() > 64 || !text.ends_with('-') || !text.bytes().all(name_byte) {
        return Err("expected 2 to 64 characters of a header name, the last one \"-\"".to_owned());
    }
    let lower = text.to_ascii_lowercase();
    match FOREIGN_FIELDS.iter().find(|field| field.starts_with(&lower) || lower.starts_with(**field)) {
        Some(field) => Err(format!("expected a prefix of the router's own; \"{field}\" headers are others'")),
        None => Ok(()),
    }
}

fn stargate_id(text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > 256 || text.chars().any(char::is_control) {
        return Err("expected a text of 1 to 256 bytes".to_owned());
    }
    Ok(())
}

fn field_name(text: &str) -> Result<(), String> {
    let name_byte = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if text.len() > 64 || !text.bytes().all(name_byte) {
        return Err("expected a header's name of at most 64 characters; empty: none".to_owned());
    }
    Ok(())
}

/// The data model of Prometheus: letters, digits, `_` and `:`, no digit first. `:` is left to recording rules.
fn metrics_prefix(text: &str) -> Result<(), String> {
    let name_byte = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    if text.len() > 64 || !text.bytes().all(name_byte) || text.starts_with(|c: char| c.is_ascii_digit()) {
        return Err("expected at most 64 letters, digits or \"_\", no digit first".to_owned());
    }
    if text.starts_with("ringway_") {
        return Err("expected another prefix: \"ringway_\" is that of the router's own metrics".to_owned());
    }
    Ok(())
}

fn health_path(text: &str) -> Result<(), String> {
    let visible = text.bytes().all(|b| (0x21..=0x7e).contains(&b) && b != b'#');
    if !text.starts_with('/') || !visible || text.len() > 1_024 {
        return Err("expected a path that starts with \"/\", without spaces or \"#\"".to_owned());
    }
    Ok(())
}
