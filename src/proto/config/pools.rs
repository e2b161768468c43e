//! `[[pool]]`, `[[pool.server]]` and `[[server]]`: who serves, and by which rules.

use std::path::{Path, PathBuf};

use super::fault::shorten;
use super::identity;
use super::keys::{Keys, Value, Word, list};
use super::lb_config::{self, Entry, Method};
use super::sections::{EngineMetrics, Kv, MS_MAX};
use super::url::{ServerUrl, without_credentials};
use crate::proto::backend::catalog::{Algorithm, Miss, RoutingMode};
use crate::proto::backend::grouping::{MIXED, QUEUE_SIZE, QUEUE_TIMEOUT_MS};

/// A pool, its servers included.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Unique among pools and standalone servers.
    pub name: String,
    pub algorithm: Algorithm,
    /// Settings of one of Stargate's algorithms; `None`: it is another.
    pub entry: Option<Entry>,
    pub routing_mode: RoutingMode,
    /// Requests that may wait at once.
    pub queue_size: u32,
    /// How long one may wait.
    pub queue_timeout_ms: u64,
    pub kv: Kv,
    pub servers: Vec<ServerSettings>,
}

/// Most requests that one pool may let wait.
const QUEUE_SIZE_MAX: u32 = 1_000_000;
/// Largest weight: sums of weights over every server stay exact enough to compare.
pub(super) const WEIGHT_MAX: f64 = 1e9;
pub(super) const CONCURRENCY_MAX: u32 = 1_000_000;
/// Fastest input rate, in tokens per second: far beyond any engine.
const INPUT_TPS_MAX: f64 = 1e9;
/// Longest input that a limit may name, in tokens: far beyond any context.
pub(super) const INPUT_TOKENS_MAX: u32 = 1_000_000_000;

/// One engine endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerSettings {
    /// Unique among servers.
    pub name: String,
    pub url: ServerUrl,
    /// Names served; empty: learnt from the engine.
    pub models: Vec<String>,
    /// Share of traffic, finite and ≥ 0; 0 drains.
    pub weight: f64,
    /// In-flight ceiling; 0: none.
    pub max_concurrency: u32,
    /// Longest input in estimated tokens; 0: any.
    pub max_input_tokens: u32,
    /// The sub-pool it is isolated in; empty: the one of requests that name none.
    pub routing_tier: String,
    /// Capacity domain on trusted listeners; empty: its own.
    pub cluster_id: String,
    /// Whose requests it takes on trusted listeners; empty: those without a routing key.
    pub routing_keys: Vec<String>,
    /// Input tokens per second, fixed; 0: measured.
    pub input_tps: f64,
    /// Absolute, or relative to the process where the file's folder was not known.
    pub api_key_file: Option<PathBuf>,
    /// What that file holds; `None` before `Settings::load_files`.
    pub api_key: Option<Secret>,
    /// How its engine publishes its figures.
    pub metrics: EngineMetrics,
}

/// A secret that debug output does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub Box<str>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Word for RoutingMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("queue", RoutingMode::Queue),
        ("reject", RoutingMode::Reject),
        ("unlimited", RoutingMode::Unlimited),
    ];
}

impl Value for RoutingMode {
    type Rule = ();
    fn read(raw: &toml::Value, (): &()) -> Result<Self, String> {
        super::keys::word(raw.as_str().unwrap_or(""))
    }
    fn write(&self) -> toml::Value {
        let (name, _) = Self::WORDS.iter().find(|(_, mode)| mode == self).expect("every mode has its word");
        toml::Value::String((*name).to_owned())
    }
}

impl Word for Algorithm {
    const WORDS: &'static [(&'static str, Self)] = &[
        (Algorithm::WeightedRoundRobin.name(), Algorithm::WeightedRoundRobin),
        (Algorithm::LeastConnections.name(), Algorithm::LeastConnections),
        (Algorithm::StickySession.name(), Algorithm::StickySession),
        (Algorithm::KvAware.name(), Algorithm::KvAware),
        (Method::PowerOfN.name(), Algorithm::Stargate(Method::PowerOfN)),
        (Method::WaitAndWiden.name(), Algorithm::Stargate(Method::WaitAndWiden)),
        (Method::RoundRobin.name(), Algorithm::Stargate(Method::RoundRobin)),
        (Method::Random.name(), Algorithm::Stargate(Method::Random)),
        (Method::Pulsar.name(), Algorithm::Stargate(Method::Pulsar)),
        (Method::PulsarWaitAndWiden.name(), Algorithm::Stargate(Method::PulsarWaitAndWiden)),
    ];
}

impl Value for Algorithm {
    type Rule = ();
    fn read(raw: &toml::Value, (): &()) -> Result<Self, String> {
        super::keys::word(raw.as_str().unwrap_or(""))
    }
    fn write(&self) -> toml::Value {
        toml::Value::String(self.name().to_owned())
    }
}

impl Word for Miss {
    const WORDS: &'static [(&'static str, Self)] = &[
        (Algorithm::WeightedRoundRobin.name(), Miss::WeightedRoundRobin),
        (Algorithm::LeastBusy.name(), Miss::LeastBusy),
    ];
}

impl Value for Miss {
    type Rule = ();
    fn read(raw: &toml::Value, (): &()) -> Result<Self, String> {
        super::keys::word(raw.as_str().unwrap_or(""))
    }
    fn write(&self) -> toml::Value {
        let (name, _) = Self::WORDS.iter().find(|(_, miss)| miss == self).expect("every miss has its word");
        toml::Value::String((*name).to_owned())
    }
}

/// Bytes that names may hold: they go into headers, metric labels and admin paths.
pub(super) fn name_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"-._~:@[]".contains(&b)
}

/// Longest name, in bytes.
const NAME_BYTES_MAX: usize = 128;

/// The check of pool and server names. The error says what was expected.
pub(super) fn name_check(text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.bytes().all(name_byte) {
        return Err(format!(
            "expected a name of 1 to {NAME_BYTES_MAX} letters, digits or any of - . _ ~ : @ [ ]"
        ));
    }
    Ok(())
}

fn pool_name(text: &str) -> Result<(), String> {
    name_check(text)?;
    if text == MIXED {
        return Err(format!("expected another name: \"{MIXED}\" is the built-in pool's"));
    }
    Ok(())
}

/// The check of a tier's name, which follows the pool's in the header. The error says what was expected.
pub(super) fn tier_check(text: &str) -> Result<(), String> {
    if text.len() > NAME_BYTES_MAX || !text.bytes().all(name_byte) {
        return Err(format!(
            "expected a tier of at most {NAME_BYTES_MAX} letters, digits or any of - . _ ~ : @ [ ]; empty: none"
        ));
    }
    Ok(())
}

pub(super) type Check = fn(&str) -> Result<(), String>;

impl PoolSettings {
    pub(super) fn read(mut keys: Keys<'_>, dir: &Path) -> Self {
        let name = keys.value("name", "default".to_owned(), &(pool_name as Check));
        let (algorithm, entry) = read_algorithm(&mut keys);
        let routing_mode = keys.value("routing_mode", RoutingMode::Queue, &());
        let queue_size = keys.value("queue_size", QUEUE_SIZE, &(0..=QUEUE_SIZE_MAX));
        let queue_timeout_ms = keys.value("queue_timeout_ms", QUEUE_TIMEOUT_MS, &(1..=MS_MAX));
        let kv = keys.table("kv").map(Kv::read).unwrap_or_default();
        let mut servers = Vec::new();
        for i in 0..keys.count("server") {
            servers.extend(keys.table_at("server", i).map(|server| ServerSettings::read(server, dir)));
        }
        keys.end();
        PoolSettings { name, algorithm, entry, routing_mode, queue_size, queue_timeout_ms, kv, servers }
    }
}

/// A name, or a table with the name and the settings of one of Stargate's algorithms.
fn read_algorithm(keys: &mut Keys<'_>) -> (Algorithm, Option<Entry>) {
    let algorithm = match keys.raw("algorithm") {
        Some(toml::Value::Table(table)) => {
            let Some(mut inside) = keys.table("algorithm") else {
                return (Algorithm::WeightedRoundRobin, None);
            };
            if !table.contains_key("name") {
                let known: Vec<&str> = Algorithm::WORDS.iter().map(|(name, _)| *name).collect();
                inside.fault("name", format!("expected {}", list(&known)));
            }
            match inside.optional("name", &()) {
                Some(Algorithm::Stargate(method)) => {
                    let path = inside.path_of("");
                    let entry = lb_config::read_settings(&path, method, table, inside.faults);
                    return (Algorithm::Stargate(method), Some(entry));
                }
                // Of an algorithm that is not known, the name is the only fault worth telling.
                None => return (Algorithm::WeightedRoundRobin, None),
                Some(algorithm) => {
                    inside.end();
                    algorithm
                }
            }
        }
        Some(toml::Value::String(_)) | None => keys.value("algorithm", Algorithm::WeightedRoundRobin, &()),
        Some(_) => {
            keys.fault("algorithm", "expected the name of an algorithm, or a table { name = … }");
            Algorithm::WeightedRoundRobin
        }
    };
    let entry = match algorithm {
        Algorithm::Stargate(method) => Some(Entry::new(method)),
        _ => None,
    };
    (algorithm, entry)
}

impl ServerSettings {
    /// Where the URL is missing or faulty, that is noted and an empty one stands in: the rest is looked at all the same.
    pub(super) fn read(mut keys: Keys<'_>, dir: &Path) -> Self {
        let url = read_url(&mut keys, dir);
        let default_name = url.as_ref().map(ServerUrl::default_name).unwrap_or_default();
        let name = keys.value("name", default_name, &(name_check as Check));
        let models = keys.strings("models", identity::model);
        let weight = keys.value("weight", 1.0, &(0.0..=WEIGHT_MAX));
        let max_concurrency = keys.value("max_concurrency", 32, &(0..=CONCURRENCY_MAX));
        let max_input_tokens = keys.value("max_input_tokens", 0, &(0..=INPUT_TOKENS_MAX));
        let routing_tier = keys.value("routing_tier", String::new(), &(tier_check as Check));
        let api_key_file: Option<PathBuf> = keys.value("api_key_file", None, &());
        let api_key_file = api_key_file.map(|file| dir.join(file));
        let cluster_id = keys.value("cluster_id", String::new(), &(identity::cluster_id as Check));
        let routing_keys = keys.strings("routing_keys", identity::some_routing_key);
        let input_tps = keys.value("input_tps", 0.0, &(0.0..=INPUT_TPS_MAX));
        let metrics = keys.value("metrics", EngineMetrics::Auto, &());
        keys.end();
        ServerSettings {
            name,
            url: url.unwrap_or_else(|| ServerUrl::Unix(PathBuf::new())),
            models,
            weight,
            max_concurrency,
            max_input_tokens,
            routing_tier,
            cluster_id,
            routing_keys,
            input_tps,
            api_key_file,
            api_key: None,
            metrics,
        }
    }
}

fn read_url(keys: &mut Keys<'_>, dir: &Path) -> Option<ServerUrl> {
    let Some(raw) = keys.raw("url") else {
        keys.fault("url", "expected http://HOST[:PORT][/BASE] or unix:/PATH");
        return None;
    };
    let Some(text) = raw.as_str() else {
        keys.fault("url", "expected a string: http://HOST[:PORT][/BASE] or unix:/PATH");
        return None;
    };
    match ServerUrl::parse(text).and_then(|url| url.under(dir)) {
        Ok(url) => Some(url),
        Err(expected) => {
            let shown = shorten(&format!("\"{}\"", without_credentials(text)));
            keys.faults.push(keys.path_of("url"), shown, expected);
            None
        }
    }
}
