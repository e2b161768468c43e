//! Worlds with a purpose, and the comparison of ways to lease permits.

use ringway::proto::admission::ledger::LeaseRules;
use ringway::proto::backend::catalog::{
    Address, Algorithm, Catalog, Group, KvRules, Pool, Route, RouteId, RoutingMode, Server,
};
use ringway::proto::config::lb_config::Entry;
use ringway::proto::ids::{BackendId, GroupId, PoolId};

use super::world::{Options, World};

pub fn server(weight: f64, max_concurrency: u32, pool: Option<u16>) -> Server {
    Server {
        name: "server".into(),
        url: "http://server".into(),
        address: Some(Address::Tcp("127.0.0.1:1".parse().unwrap())),
        host: "server".into(),
        base_path: "".into(),
        pool: pool.map(PoolId),
        weight,
        weight_text: weight.to_string().into(),
        affinity_weight: 1.0,
        max_concurrency,
        max_input_tokens: 0,
        tier: "".into(),
        kv_capacity_blocks: 1,
        api_key: None,
        models: Some(Vec::new()),
        registered: false,
        cluster_id: "server".into(),
        input_tps: 0.0,
        removed: false,
    }
}

pub fn pool(algorithm: Algorithm, routing_mode: RoutingMode, queue_size: u32, queue_timeout_ms: u64) -> Pool {
    let kv = KvRules::default();
    let entry = match algorithm {
        Algorithm::Stargate(method) => Some(Box::new(Entry::new(method))),
        _ => None,
    };
    Pool { name: "pool".into(), algorithm, routing_mode, queue_size, queue_timeout_ms, kv, entry }
}

pub fn group(candidates: Vec<BackendId>, pool: PoolId) -> Group {
    Group { members: candidates.clone(), candidates, pool, tier: "".into(), label: "pool".into() }
}

/// Adds a group with these candidates, and a model whose requests go there.
pub fn add_group(catalog: &mut Catalog, model: String, candidates: Vec<BackendId>, pool: PoolId) {
    let route = RouteId(catalog.routes.len() as u32);
    catalog.routes.push(Route::to(GroupId(catalog.groups.len() as u32), pool));
    catalog.groups.push(group(candidates, pool));
    catalog.models.insert(model.into_bytes().into(), vec![route]);
}

/// One group per pool with all its servers, `model-0` and so on; unnamed requests go to the first.
pub fn catalog(servers: Vec<Server>, pools: Vec<Pool>) -> Catalog {
    let mut catalog = Catalog { version: 1, servers, pools, ..Catalog::default() };
    for pool in (0..catalog.pools.len() as u16).map(PoolId) {
        let ids = (0..catalog.servers.len() as u16).map(BackendId);
        let candidates = ids.filter(|id| catalog.server(*id).pool == Some(pool)).collect();
        add_group(&mut catalog, format!("model-{}", pool.0), candidates, pool);
    }
    catalog.unnamed = vec![RouteId(0)];
    catalog
}

/// Like servers under steady load: `load` times what they can take at once, nothing else going on.
pub fn steady(seed: u64, shards: usize, servers: usize, ceiling: u32, load: f64, rules: LeaseRules) -> World {
    let servers = vec![server(1.0, ceiling, Some(0)); servers];
    let pools = vec![pool(Algorithm::LeastConnections, RoutingMode::Queue, 100_000, 30_000)];
    let slots = servers.len() as f64 * f64::from(ceiling);
    let options = Options { lease_rules: rules, ..Options::calm(6000) };
    let mut world = World::new(seed, shards, options, catalog(servers, pools));
    world.load(load, slots);
    world
}

pub fn judge() {
    println!(
        "8 shards; per request: messages about permits, wake-ups asked for, µs waited while a permit was free"
    );
    println!(
        "{:>6} {:>5} {:>5}  {:>8} {:>6} {:>9} {:>6}",
        "slots", "load", "rules", "messages", "wakes", "wasted µs", "used"
    );
    for (servers, ceiling) in [(4, 256), (4, 32), (4, 8), (2, 4), (1, 1)] {
        for load in [0.3, 0.7, 0.95, 1.3] {
            // Batches, and then how soon a recall ends: at one spare permit, at shares of the ceiling, by number of shards.
            for (batch_divisor, ease_divisor, ease_per_shard) in
                [(0, 2, 2), (1, 2, 2), (4, 2, 2), (4, u32::MAX, 0), (4, 4, 0), (4, 2, 0), (4, 1, 0)]
            {
                let rules = LeaseRules { batch_divisor, ease_divisor, ease_per_shard };
                let mut world = steady(5, 8, servers, ceiling, load, rules);
                world.run_to_end();
                let requests = f64::from(world.served());
                println!(
                    "{servers:>3}×{ceiling:<3} {load:>5} {batch_divisor:>2}/{:<3}/{ease_per_shard} {:>8.2} {:>6.2} {:>9.1} {:>6.3}",
                    if ease_divisor == u32::MAX { "one".to_string() } else { ease_divisor.to_string() },
                    world.permit_messages as f64 / requests,
                    world.wakes as f64 / requests,
                    world.wasted_ns as f64 / requests / 1000.0,
                    world.busy_share(),
                );
            }
        }
    }
}
