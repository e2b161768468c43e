//! Prints checked settings in the file's own format, defaults filled in: reading the text again gives the same settings.

use std::fmt::Write;

use super::Settings;
use super::keys::Value;
use super::lb_config;
use super::pools::{PoolSettings, ServerSettings};

/// One table of the text being written.
pub(super) struct Table<'a> {
    text: &'a mut String,
}

impl<'a> Table<'a> {
    /// Starts a table; `header` comes with its brackets.
    fn start(text: &'a mut String, header: &str) -> Self {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(header);
        text.push('\n');
        Table { text }
    }

    pub(super) fn put(&mut self, key: &str, value: &toml::Value) {
        writeln!(self.text, "{key} = {value}").expect("writing to a string cannot fail");
    }
}

impl Settings {
    /// The effective configuration: every key of the file with its value, secrets left out.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        self.runtime.print(&mut Table::start(&mut text, "[runtime]"));
        for listener in &self.listeners {
            let mut table = Table::start(&mut text, "[[listener]]");
            table.put("address", &listener.address.to_string().into());
            table.put("profile", &listener.profile.write());
        }
        let mut admin = Table::start(&mut text, "[admin]");
        admin.put("address", &self.admin.address.to_string().into());
        admin.put("token_file", &"".into());
        self.limits.print(&mut Table::start(&mut text, "[limits]"));
        self.headers.print(&mut Table::start(&mut text, "[headers]"));
        self.health.print(&mut Table::start(&mut text, "[health]"));
        for pool in &self.pools {
            print_pool(pool, &mut text);
        }
        for server in &self.servers {
            print_server(server, &mut Table::start(&mut text, "[[server]]"));
        }
        self.stargate.print(&mut Table::start(&mut text, "[stargate]"));
        self.log.print(&mut Table::start(&mut text, "[log]"));
        text
    }
}

fn print_pool(pool: &PoolSettings, text: &mut String) {
    let mut table = Table::start(text, "[[pool]]");
    table.put("name", &pool.name.write());
    let algorithm = match &pool.entry {
        Some(entry) => lb_config::write_settings(entry),
        None => pool.algorithm.name().into(),
    };
    table.put("algorithm", &algorithm);
    table.put("routing_mode", &pool.routing_mode.write());
    table.put("queue_size", &pool.queue_size.write());
    table.put("queue_timeout_ms", &pool.queue_timeout_ms.write());
    pool.kv.print(&mut Table::start(text, "[pool.kv]"));
    for server in &pool.servers {
        print_server(server, &mut Table::start(text, "[[pool.server]]"));
    }
}

fn print_server(server: &ServerSettings, table: &mut Table<'_>) {
    let models: Vec<toml::Value> = server.models.iter().map(String::write).collect();
    table.put("name", &server.name.write());
    table.put("url", &server.url.to_string().into());
    table.put("models", &toml::Value::Array(models));
    table.put("weight", &server.weight.write());
    table.put("max_concurrency", &server.max_concurrency.write());
    table.put("max_input_tokens", &server.max_input_tokens.write());
    table.put("routing_tier", &server.routing_tier.write());
    let keys: Vec<toml::Value> = server.routing_keys.iter().map(String::write).collect();
    table.put("cluster_id", &server.cluster_id.write());
    table.put("routing_keys", &toml::Value::Array(keys));
    table.put("input_tps", &server.input_tps.write());
    table.put("api_key_file", &server.api_key_file.write());
    table.put("metrics", &server.metrics.write());
}
