//! From settings to the first catalog.

use super::Settings;
use super::pools::{PoolSettings, ServerSettings};
use crate::proto::backend::catalog::{Catalog, KV_CAPACITY_BLOCKS, KvRules, Pool, Server};
use crate::proto::backend::grouping::{built_in_pool, rebuild_groups};
use crate::proto::ids::PoolId;

impl Settings {
    /// The catalog of version 1: the configured pools, then one built-in pool per standalone server, then `mixed` if some
    /// model's servers need it; servers in [`Settings::all_servers`]'s order. Addresses are known where the URL holds one; host names stay `None`, to be
    /// resolved ([`super::ServerUrl::unresolved`]). Groups hold what the configuration says of models.
    pub fn catalog(&self) -> Catalog {
        let mut catalog = Catalog {
            version: 1,
            models_body: b"{\"object\":\"list\",\"data\":[]}".as_slice().into(),
            ..Catalog::default()
        };
        for (i, pool) in self.pools.iter().enumerate() {
            catalog.pools.push(pool.build());
            let id = PoolId(u16::try_from(i).expect("the number of pools was checked"));
            let servers = pool.servers.iter().map(|server| server.build(Some((id, &catalog.pools[i]))));
            catalog.servers.extend(servers);
        }
        for server in &self.servers {
            catalog.pools.push(built_in_pool(&server.name));
            catalog.servers.push(server.build(None));
        }
        rebuild_groups(&mut catalog);
        catalog
    }
}

impl PoolSettings {
    /// As the catalog holds it.
    pub fn build(&self) -> Pool {
        Pool {
            name: self.name.as_str().into(),
            algorithm: self.algorithm,
            routing_mode: self.routing_mode,
            queue_size: self.queue_size,
            queue_timeout_ms: self.queue_timeout_ms,
            kv: KvRules {
                block_bytes: self.kv.block_bytes,
                min_match_blocks: self.kv.min_match_blocks,
                affinity_slack_abs: self.kv.affinity_slack_abs,
                affinity_slack_rel: self.kv.affinity_slack_rel,
                kv_capacity_blocks: self.kv.kv_capacity_blocks,
                miss: self.kv.miss,
            },
            entry: self.entry.clone().map(Box::new),
        }
    }
}

impl ServerSettings {
    /// As the catalog holds it, in `pool`.
    pub fn build(&self, pool: Option<(PoolId, &Pool)>) -> Server {
        let models = self.models.iter().map(|model| model.as_str().into()).collect::<Vec<Box<str>>>();
        Server {
            name: self.name.as_str().into(),
            url: self.url.to_string().into(),
            address: self.url.address(),
            host: self.url.host_header().into(),
            base_path: self.url.base_path().into(),
            pool: pool.map(|(id, _)| id),
            weight: self.weight,
            // Rust prints a float in the shortest decimal form that reads back the same, without an exponent.
            weight_text: self.weight.to_string().into(),
            affinity_weight: if self.weight > 0.0 { self.weight } else { 1.0 },
            max_concurrency: self.max_concurrency,
            max_input_tokens: self.max_input_tokens,
            tier: self.routing_tier.as_str().into(),
            kv_capacity_blocks: pool.map_or(KV_CAPACITY_BLOCKS, |(_, pool)| pool.kv.capacity_blocks(None)),
            api_key: self.api_key.as_ref().map(|key| key.0.clone()),
            models: (!models.is_empty()).then_some(models),
            registered: false,
            cluster_id: match self.cluster_id.as_str() {
                "" => self.name.as_str().into(),
                id => id.into(),
            },
            input_tps: self.input_tps,
            removed: false,
        }
    }
}
