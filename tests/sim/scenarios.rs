//! Worlds with a purpose, and the comparison of ways to lease permits.

use std::collections::HashMap;

use ringway::proto::admission::ledger::LeaseRules;
use ringway::proto::backend::catalog::{Address, Algorithm, Catalog, Group, Pool, RoutingMode, Server};
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
        max_concurrency,
        api_key: None,
        models: Some(Vec::new()),
        removed: false,
    }
}

pub fn pool(algorithm: Algorithm, routing_mode: RoutingMode, queue_size: u32, queue_timeout_ms: u64) -> Pool {
    Pool { name: "pool".into(), algorithm, routing_mode, queue_size, queue_timeout_ms }
}

/// One group per pool with all its servers, `model-0` and so on; unnamed requests go to the first.
pub fn catalog(servers: Vec<Server>, pools: Vec<Pool>) -> Catalog {
    let group_of = |pool: u16| Group {
        candidates: (0..servers.len() as u16)
            .map(BackendId)
            .filter(|id| servers[id.index()].pool == Some(PoolId(pool)))
            .collect(),
        pool: PoolId(pool),
    };
    let groups: Vec<Group> = (0..pools.len() as u16).map(group_of).collect();
    let mut models = HashMap::new();
    for i in 0..groups.len() as u32 {
        models.insert(format!("model-{i}").into_bytes().into_boxed_slice(), GroupId(i));
    }
    Catalog { version: 1, servers, pools, groups, models, unnamed: Some(GroupId(0)), ..Catalog::default() }
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
