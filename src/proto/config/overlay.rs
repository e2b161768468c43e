//! Lays what flags and the environment set over the file's tables, so that both take the same road to settings.
//!
//! A fault in a laid value names the flag instead of a place in the file.

use std::collections::HashMap;

/// One value from outside the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// What a fault calls it, such as `--spin-us (or RINGWAY_SPIN_US)`.
    pub flag: String,
    pub place: Place,
    pub value: toml::Value,
}

/// Which keys of the file it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// `[table] key`.
    Key(&'static str, &'static str),
    /// A list of addresses: replaces all `[[listener]]`.
    Listeners,
    /// A key of every `[[listener]]`.
    EveryListener(&'static str),
    /// A list of `URL` or `NAME=URL`: replaces all pools and servers by one pool, `default`.
    Backends,
    /// A key of every `[[pool]]`; where there is none, of a first one.
    EveryPool(&'static str),
    /// A key of every server.
    EveryServer(&'static str),
}

/// Which paths came from which flag.
#[derive(Debug, Default)]
pub(super) struct Flags(HashMap<String, String>);

impl Flags {
    /// The flag that set `path` or a table around it.
    pub(super) fn name(&self, path: &str) -> Option<String> {
        if self.0.is_empty() {
            return None;
        }
        let ends = path.match_indices(['.', '[']).map(|(at, _)| at).chain([path.len()]);
        ends.filter_map(|end| self.0.get(&path[..end])).next_back().cloned()
    }
}

/// Lays `overrides` over `table`. Tables of the wrong kind are left for the reader to refuse.
pub(super) fn lay(table: &mut toml::Table, overrides: &[Override]) -> Flags {
    let mut flags = Flags::default();
    // Backends first: they make the pool and the servers that other flags are laid over.
    for backends in [true, false] {
        for one in overrides.iter().filter(|one| (one.place == Place::Backends) == backends) {
            one.lay(table, &mut flags.0);
        }
    }
    flags
}

impl Override {
    fn lay(&self, table: &mut toml::Table, flags: &mut HashMap<String, String>) {
        match self.place {
            Place::Key(section, key) => {
                let section_table = table.entry(section).or_insert_with(|| toml::Table::new().into());
                if let Some(keys) = section_table.as_table_mut() {
                    keys.insert(key.to_owned(), self.value.clone());
                    flags.insert(format!("{section}.{key}"), self.flag.clone());
                }
            }
            Place::Listeners => {
                let addresses = self.value.as_array().map_or(&[][..], Vec::as_slice);
                let listeners = addresses.iter().map(|address| one_key("address", address.clone())).collect();
                table.insert("listener".to_owned(), toml::Value::Array(listeners));
                flags.insert("listener".to_owned(), self.flag.clone());
            }
            Place::EveryListener(key) => {
                let listeners = table.get_mut("listener").and_then(toml::Value::as_array_mut);
                for (i, listener) in listeners.into_iter().flatten().enumerate() {
                    if let Some(keys) = listener.as_table_mut() {
                        keys.insert(key.to_owned(), self.value.clone());
                        flags.insert(format!("listener[{i}].{key}"), self.flag.clone());
                    }
                }
            }
            Place::Backends => {
                let backends = self.value.as_array().map_or(&[][..], Vec::as_slice);
                let servers = backends.iter().map(|backend| server(backend.as_str().unwrap_or(""))).collect();
                let mut pool = toml::Table::new();
                pool.insert("name".to_owned(), "default".into());
                pool.insert("server".to_owned(), toml::Value::Array(servers));
                table.insert("pool".to_owned(), toml::Value::Array(vec![pool.into()]));
                table.remove("server");
                flags.insert("pool[0]".to_owned(), self.flag.clone());
            }
            Place::EveryPool(key) => {
                let pools = table.entry("pool").or_insert_with(|| toml::Value::Array(Vec::new()));
                let Some(pools) = pools.as_array_mut() else { return };
                for (i, pool) in pools.iter_mut().enumerate() {
                    if let Some(keys) = pool.as_table_mut() {
                        keys.insert(key.to_owned(), self.value.clone());
                        flags.insert(format!("pool[{i}].{key}"), self.flag.clone());
                    }
                }
            }
            Place::EveryServer(key) => {
                if let Some(pools) = table.get_mut("pool").and_then(toml::Value::as_array_mut) {
                    for (i, pool) in pools.iter_mut().enumerate() {
                        if let Some(pool) = pool.as_table_mut() {
                            self.lay_servers(pool, &format!("pool[{i}]."), key, flags);
                        }
                    }
                }
                self.lay_servers(table, "", key, flags);
            }
        }
    }

    fn lay_servers(
        &self,
        table: &mut toml::Table,
        path: &str,
        key: &str,
        flags: &mut HashMap<String, String>,
    ) {
        let Some(servers) = table.get_mut("server").and_then(toml::Value::as_array_mut) else { return };
        for (i, server) in servers.iter_mut().enumerate() {
            if let Some(keys) = server.as_table_mut() {
                keys.insert(key.to_owned(), self.value.clone());
                flags.insert(format!("{path}server[{i}].{key}"), self.flag.clone());
            }
        }
    }
}

fn one_key(key: &str, value: toml::Value) -> toml::Value {
    let mut table = toml::Table::new();
    table.insert(key.to_owned(), value);
    table.into()
}

/// `NAME=URL` or `URL`. A URL's own path may hold "=", a name may not hold "/" and no scheme holds "=".
fn server(backend: &str) -> toml::Value {
    let mut table = toml::Table::new();
    match backend.split_once('=') {
        Some((name, url)) if !name.contains('/') => {
            table.insert("name".to_owned(), name.into());
            table.insert("url".to_owned(), url.into());
        }
        _ => {
            table.insert("url".to_owned(), backend.into());
        }
    }
    table.into()
}
