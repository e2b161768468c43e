//! The configuration: one road from text to settings in which nothing is left undecided.
//!
//! Text → TOML tables, what flags set laid over them → [`Settings`], checked. Unknown keys are refused and the nearest
//! known key is named; each key's default and range stand on the line that declares it (`sections.rs`, `pools.rs`).
//! What a later version brings is known here and refused with "not in this version", unless it is at its default:
//! a setting that silently did nothing would mislead.
//!
//! *Invariant*: `Settings::parse(s.to_toml())` is `s`, for every `s` that parsing gave (keys read from files aside).
//! *Bound and cost*: linear in the text; runs at start and for `ringway check` only.
//! *Errors*: [`Faults`]: every fault at once, as path, value, what was expected; faults of TOML's own syntax by line and
//! column.
//! *Source*: the configuration reference.

mod build;
pub mod expression;
mod fault;
pub mod identity;
mod keys;
pub mod lb_config;
mod live;
mod overlay;
mod pools;
mod print;
mod sections;
mod url;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

pub(crate) use fault::shorten;
pub use fault::{Fault, Faults};
pub(crate) use keys::nearest;
pub use live::ServerChange;
pub use overlay::{Override, Place};
pub use pools::{PoolSettings, Secret, ServerSettings};
pub use sections::{
    Cores, Driver, EngineMetrics, HalfClose, Headers, Health, Kv, Limits, Log, LogFormat, LogLevel, Profile,
    Runtime, Stargate, TTL_MS_MAX, TTL_MS_MIN,
};
pub use url::{Host, ServerUrl};

use crate::proto::backend::catalog::Algorithm;
use crate::proto::backend::grouping::{MIXED, TOKEN_LIMITS_MAX};
use keys::Keys;
use lb_config::LbConfig;

/// Everything that was configured, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub runtime: Runtime,
    /// At least one.
    pub listeners: Vec<Listener>,
    pub admin: Admin,
    pub limits: Limits,
    pub headers: Headers,
    pub health: Health,
    /// In the file's order.
    pub pools: Vec<PoolSettings>,
    /// Standalone servers. Together with the pools' there is at least one server.
    pub servers: Vec<ServerSettings>,
    pub stargate: Stargate,
    pub log: Log,
    /// What `[stargate] lb_config_path` holds; `None` before [`Settings::load_files`], or where there is none.
    pub lb_config: Option<Arc<LbConfig>>,
    /// What `[headers] digest_secret_file` holds; `None` before [`Settings::load_files`], or where there is none.
    pub digest_secret: Option<Secret>,
}

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Port 0: any free one.
    pub address: SocketAddr,
    pub profile: Profile,
}

/// `[admin]`: the listener for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Port 0: any free one.
    pub address: SocketAddr,
}

const LISTENER_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 30_000);
const ADMIN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 29_000);
/// Listeners of one process.
const LISTENERS_MAX: usize = 64;

impl Settings {
    /// Reads a configuration. `dir` is the folder that relative paths start from (the file's); `overrides` are what
    /// flags and the environment set, laid over the text in order.
    pub fn parse(text: &str, dir: &Path, overrides: &[Override]) -> Result<Settings, Faults> {
        Settings::parse_and(text, dir, overrides, |_, _| {})
    }

    /// The same, and the files that it names as by [`Settings::load_files`]: every fault of both at once.
    pub fn load(
        text: &str,
        dir: &Path,
        overrides: &[Override],
        read: impl Fn(&Path) -> Result<String, String>,
    ) -> Result<Settings, Faults> {
        Settings::parse_and(text, dir, overrides, |settings, faults| {
            if let Err(more) = settings.load_files(read) {
                faults.0.extend(more.0);
            }
        })
    }

    fn parse_and(
        text: &str,
        dir: &Path,
        overrides: &[Override],
        and: impl FnOnce(&mut Settings, &mut Faults),
    ) -> Result<Settings, Faults> {
        if let Some(faults) = fault::syntax(text) {
            return Err(faults);
        }
        let mut table: toml::Table = match text.parse() {
            Ok(table) => table,
            Err(error) => {
                let mut faults = Faults::default();
                faults.push("file", "(text)", error.message());
                return Err(faults);
            }
        };
        let flags = overlay::lay(&mut table, overrides);
        let mut faults = Faults::default();
        let mut settings = Settings::read(&table, dir, &mut faults);
        and(&mut settings, &mut faults);
        if faults.is_empty() {
            return Ok(settings);
        }
        for fault in &mut faults.0 {
            if let Some(flag) = flags.name(&fault.path) {
                fault.path = flag;
            }
        }
        Err(faults)
    }

    fn read(table: &toml::Table, dir: &Path, faults: &mut Faults) -> Settings {
        let mut keys = Keys::root(table, faults);
        let runtime = keys.table("runtime").map(Runtime::read).unwrap_or_default();
        let listeners = read_listeners(&mut keys);
        let admin = keys.table("admin").map(Admin::read).unwrap_or(Admin { address: ADMIN_DEFAULT });
        let limits = keys.table("limits").map(Limits::read).unwrap_or_default();
        let mut headers = keys.table("headers").map(Headers::read).unwrap_or_default();
        headers.digest_secret_file = headers.digest_secret_file.map(|file| dir.join(file));
        let health = keys.table("health").map(Health::read).unwrap_or_default();
        let mut pools = Vec::new();
        for i in 0..keys.count("pool") {
            pools.extend(keys.table_at("pool", i).map(|pool| PoolSettings::read(pool, dir)));
        }
        let mut servers = Vec::new();
        for i in 0..keys.count("server") {
            servers.extend(keys.table_at("server", i).map(|server| ServerSettings::read(server, dir)));
        }
        keys.refuse("key", "API keys are not in this version; expected no [[key]]");
        let mut stargate = keys.table("stargate").map(Stargate::read).unwrap_or_default();
        stargate.lb_config_path = stargate.lb_config_path.map(|file| dir.join(file));
        let log = keys.table("log").map(Log::read).unwrap_or_default();
        keys.end();
        let digest_secret = None;
        let settings = Settings {
            runtime,
            listeners,
            admin,
            limits,
            headers,
            health,
            pools,
            servers,
            stargate,
            log,
            lb_config: None,
            digest_secret,
        };
        settings.check(table, faults);
        settings
    }

    /// What no single key shows.
    fn check(&self, table: &toml::Table, faults: &mut Faults) {
        if self.health.bench_ms > self.health.bench_max_ms {
            let expected = format!("expected at most bench_max_ms, {}", self.health.bench_max_ms);
            faults.push("health.bench_ms", self.health.bench_ms.to_string(), expected);
        }
        if self.stargate.registration_ttl_ms > self.stargate.registration_ttl_ms_max {
            let expected = format!(
                "expected at most registration_ttl_ms_max, {}",
                self.stargate.registration_ttl_ms_max
            );
            faults.push(
                "stargate.registration_ttl_ms",
                self.stargate.registration_ttl_ms.to_string(),
                expected,
            );
        }
        let mut bound: HashMap<SocketAddr, String> = HashMap::new();
        let listeners = self.listeners.iter().enumerate();
        let addresses = listeners.map(|(i, l)| (format!("listener[{i}].address"), l.address));
        let metrics =
            self.stargate.metrics_address.map(|address| ("stargate.metrics_address".to_owned(), address));
        let others = [("admin.address".to_owned(), self.admin.address)].into_iter().chain(metrics);
        for (path, address) in addresses.chain(others) {
            if address.port() == 0 {
                continue;
            }
            if let Some(first) = bound.insert(address, path.clone()) {
                faults.push(
                    path,
                    format!("\"{address}\""),
                    format!("expected an address other than {first}'s"),
                );
            }
        }
        self.check_names(faults);
        self.check_token_limits(faults);
        // Counted in the text: a server with a faulty URL is there all the same.
        let servers_at =
            |table: &toml::Table| table.get("server").and_then(|s| s.as_array()).map_or(0, Vec::len);
        let pools = table.get("pool").and_then(|p| p.as_array()).map_or(&[][..], Vec::as_slice);
        let count =
            servers_at(table) + pools.iter().filter_map(|p| p.as_table()).map(servers_at).sum::<usize>();
        // Those of trusted listeners may register themselves later.
        if count == 0 && !self.has_trusted_listener() {
            faults.push(
                "server",
                "(missing)",
                "expected at least one [[pool.server]] or [[server]], or --backend URL",
            );
        }
        // Each standalone server has a built-in pool, and each pool and server a number.
        let numbers_max = crate::limits::BACKENDS_MAX - 1;
        if count + pools.len() > numbers_max {
            faults.push(
                "server",
                count.to_string(),
                format!("expected at most {numbers_max} servers and pools"),
            );
        }
    }

    fn check_token_limits(&self, faults: &mut Faults) {
        let limits = self.all_servers().map(|server| server.max_input_tokens).filter(|tokens| *tokens > 0);
        let distinct = limits.collect::<std::collections::HashSet<_>>().len();
        if distinct > TOKEN_LIMITS_MAX {
            faults.push(
                "server.max_input_tokens",
                format!("{distinct} distinct values"),
                format!("expected at most {TOKEN_LIMITS_MAX} over all servers"),
            );
        }
    }

    fn check_names(&self, faults: &mut Faults) {
        let mut pools: HashMap<&str, String> = HashMap::new();
        for (i, pool) in self.pools.iter().enumerate() {
            let path = format!("pool[{i}].name");
            match pools.get(pool.name.as_str()) {
                Some(first) => {
                    faults.push(
                        path,
                        format!("\"{}\"", pool.name),
                        format!("expected a name other than {first}'s"),
                    );
                }
                None => {
                    pools.insert(&pool.name, path);
                }
            }
        }
        let mut servers: HashMap<&str, String> = HashMap::new();
        let in_pools = self.pools.iter().enumerate().flat_map(|(p, pool)| {
            pool.servers
                .iter()
                .enumerate()
                .map(move |(s, server)| (format!("pool[{p}].server[{s}]"), server, false))
        });
        let standalone =
            self.servers.iter().enumerate().map(|(s, server)| (format!("server[{s}]"), server, true));
        for (path, server, alone) in in_pools.chain(standalone) {
            let path = format!("{path}.name");
            if server.name.is_empty() {
                // It would have been called by its URL, whose fault is noted.
                continue;
            }
            let shown = format!("\"{}\"", server.name);
            if let Some(first) = servers.get(server.name.as_str()) {
                faults.push(path, shown, format!("expected a name other than {first}'s"));
                continue;
            }
            // A standalone server's requests show its name as their pool.
            if alone && server.name == MIXED {
                faults.push(
                    &path,
                    &shown,
                    format!("expected another name: \"{MIXED}\" is the built-in pool's"),
                );
            } else if alone && let Some(first) = pools.get(server.name.as_str()) {
                faults.push(&path, &shown, format!("expected a name other than {first}'s"));
            }
            servers.insert(&server.name, path);
        }
    }

    /// Some listener follows the Stargate contract.
    pub fn has_trusted_listener(&self) -> bool {
        self.listeners.iter().any(|listener| listener.profile == Profile::Stargate)
    }

    /// All servers: the pools' in order, then the standalone ones; the order of their ids.
    pub fn all_servers(&self) -> impl Iterator<Item = &ServerSettings> {
        self.pools.iter().flat_map(|pool| &pool.servers).chain(&self.servers)
    }

    /// Reads `digest_secret_file`, each server's `api_key_file` and `lb_config_path` through `read`, which is given a path
    /// and says the content or why not. A fault inside the last is told by that file's own name.
    pub fn load_files(&mut self, read: impl Fn(&Path) -> Result<String, String>) -> Result<(), Faults> {
        let mut faults = Faults::default();
        self.load_lb_config(&read, &mut faults);
        if let Some(file) = &self.headers.digest_secret_file {
            let secret =
                read(file).map_err(|why| format!("expected a readable file: {why}")).and_then(|text| {
                    match text.trim() {
                        "" => Err("expected a file with a secret in it".to_owned()),
                        secret => Ok(Secret(secret.into())),
                    }
                });
            match secret {
                Ok(secret) => self.digest_secret = Some(secret),
                Err(expected) => {
                    let shown = format!("\"{}\"", file.display());
                    faults.push("headers.digest_secret_file", shown, expected);
                }
            }
        }
        let pools = self.pools.iter_mut().enumerate().flat_map(|(p, pool)| {
            let servers = pool.servers.iter_mut().enumerate();
            servers.map(move |(s, server)| (format!("pool[{p}].server[{s}].api_key_file"), server))
        });
        let alone = self.servers.iter_mut().enumerate();
        let alone = alone.map(|(s, server)| (format!("server[{s}].api_key_file"), server));
        for (path, server) in pools.chain(alone) {
            let Some(file) = &server.api_key_file else { continue };
            let shown = format!("\"{}\"", file.display());
            match read(file) {
                Err(why) => faults.push(path, shown, format!("expected a readable file: {why}")),
                Ok(text) => {
                    let key = text.trim();
                    if key.is_empty() || !key.bytes().all(|b| (0x21..=0x7e).contains(&b)) {
                        faults.push(path, shown, "expected a file with one key of visible ASCII characters");
                    } else {
                        server.api_key = Some(Secret(key.into()));
                    }
                }
            }
        }
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    fn load_lb_config(&mut self, read: impl Fn(&Path) -> Result<String, String>, faults: &mut Faults) {
        let Some(file) = &self.stargate.lb_config_path else { return };
        let shown = file.display().to_string();
        match read(file) {
            Err(why) => faults.push(
                "stargate.lb_config_path",
                format!("\"{shown}\""),
                format!("expected a readable file: {why}"),
            ),
            Ok(text) => match LbConfig::parse(text.as_bytes()) {
                Ok(config) => self.lb_config = Some(Arc::new(config)),
                Err(found) => faults.0.extend(found.0.into_iter().map(|fault| Fault {
                    path: if fault.path.is_empty() {
                        shown.clone()
                    } else {
                        format!("{shown}: {}", fault.path)
                    },
                    ..fault
                })),
            },
        }
    }

    /// What is allowed and yet probably not meant, for people: one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.admin.address.ip().is_loopback() {
            warnings.push(format!(
                "admin.address: {}: whoever reaches this address can administrate the router: this version has no \
                 admin token",
                self.admin.address
            ));
        }
        let mut seen: HashMap<&ServerUrl, &str> = HashMap::new();
        for server in self.all_servers() {
            if server.url.base_path().ends_with("/v1") {
                warnings.push(format!(
                    "server {}: {}: requests bring their own /v1, so this server is asked for /v1/v1/…",
                    server.name, server.url
                ));
            }
            if let Some(first) = seen.insert(&server.url, &server.name) {
                warnings.push(format!(
                    "servers {first} and {} share {}: each counts its own requests, so their ceilings add up",
                    server.name, server.url
                ));
            }
        }
        for pool in self.pools.iter().filter(|pool| pool.servers.is_empty()) {
            warnings.push(format!("pool {}: has no server", pool.name));
        }
        for pool in &self.pools {
            if pool.algorithm != Algorithm::KvAware && pool.kv != Kv::default() {
                warnings.push(format!(
                    "pool {}: [pool.kv] has no effect under {}: it is for kv-aware only",
                    pool.name,
                    pool.algorithm.name()
                ));
            }
        }
        if !self.has_trusted_listener() {
            if self.stargate != Stargate::default() {
                warnings
                    .push("[stargate] has no effect: no [[listener]] has profile = \"stargate\"".to_owned());
            }
            let pools = self.pools.iter().map(|pool| (pool.entry.is_some(), &pool.servers));
            for (measured, servers) in pools.chain([(false, &self.servers)]) {
                for server in servers {
                    let named = !server.cluster_id.is_empty() || server.input_tps > 0.0;
                    let idle = match (measured, server.routing_keys.is_empty()) {
                        (true, false) => "routing_keys has",
                        (false, keyless) if named || !keyless => {
                            "cluster_id, routing_keys and input_tps have"
                        }
                        _ => continue,
                    };
                    warnings.push(format!(
                        "server {}: {idle} no effect: no [[listener]] has profile = \"stargate\"",
                        server.name
                    ));
                }
            }
        }
        if self.all_servers().next().is_some() && self.all_servers().all(|server| server.weight == 0.0) {
            warnings.push("every server has weight 0: no request will be placed".to_owned());
        }
        warnings
    }
}

impl Admin {
    fn read(mut keys: Keys<'_>) -> Admin {
        let address = read_address(&mut keys, ADMIN_DEFAULT);
        keys.later("token_file", &"".into());
        keys.end();
        Admin { address }
    }
}

fn read_listeners(keys: &mut Keys<'_>) -> Vec<Listener> {
    let count = keys.count("listener");
    if count > LISTENERS_MAX {
        keys.fault("listener", format!("expected at most {LISTENERS_MAX} listeners"));
    }
    let mut listeners = Vec::new();
    for i in 0..count.min(LISTENERS_MAX) {
        let Some(mut listener) = keys.table_at("listener", i) else { continue };
        let address = read_address(&mut listener, LISTENER_DEFAULT);
        let profile = listener.value("profile", Profile::OpenAi, &());
        listener.refuse("tls", "TLS is not in this version; expected no \"tls\"");
        listener.end();
        listeners.push(Listener { address, profile });
    }
    if listeners.is_empty() {
        listeners.push(Listener { address: LISTENER_DEFAULT, profile: Profile::OpenAi });
    }
    listeners
}

fn read_address(keys: &mut Keys<'_>, default: SocketAddr) -> SocketAddr {
    match keys.raw("address").map(|raw| raw.as_str().unwrap_or("").parse()) {
        None => default,
        Some(Ok(address)) => address,
        Some(Err(_)) => {
            keys.fault("address", "expected IP:PORT, such as 127.0.0.1:30000 or [::]:30000");
            default
        }
    }
}

#[cfg(test)]
mod tests;
