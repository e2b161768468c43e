//! The load-balancing rules, sentence by sentence: each test quotes what it holds the router to. What a sentence here leaves to
//! other files: smoothness, ceilings and queues are in `capacity.rs`, benching in `retry.rs`, mixed clusters in `surface.rs`
//! (`candidates_of_several_pools_are_mixed`), the measured experiment in `experiment.rs`, every header in `headers.rs`.
//! "Cluster" and "backend" of the rules are "pool" and "server" here.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use support::prompts::*;
use support::*;

const ALGORITHMS: [&str; 4] = ["weighted-round-robin", "least-connections", "sticky-session", "kv-aware"];

fn pool_of(algorithm: &str) -> String {
    format!("algorithm = \"{algorithm}\"")
}

/// A router over `engines`, named a, b, c, …, in a pool `p` of `algorithm`.
fn router_over(engines: &[Engine], algorithm: &str, pool: &[&str], server_lines: &[&str]) -> Router {
    let line = pool_of(algorithm);
    let lines: Vec<&str> = [line.as_str()].into_iter().chain(pool.iter().copied()).collect();
    let mut setup = Setup::new().pool("p", &lines);
    for (engine, name) in engines.iter().zip('a'..) {
        setup = setup.server(&name.to_string(), engine, server_lines);
    }
    setup.start()
}

fn answering(count: usize) -> Vec<Engine> {
    (0..count).map(|_| Engine::answering()).collect()
}

fn counts(engines: &[Engine]) -> Vec<usize> {
    engines.iter().map(Engine::request_count).collect()
}

#[path = "seed_lifeboat/choosing.rs"]
mod choosing;
#[path = "seed_lifeboat/engines_cache.rs"]
mod engines_cache;
#[path = "seed_lifeboat/fair_shares.rs"]
mod fair_shares;
#[path = "seed_lifeboat/knobs.rs"]
mod knobs;
#[path = "seed_lifeboat/kv_aware.rs"]
mod kv_aware;
#[path = "seed_lifeboat/mixed.rs"]
mod mixed;
#[path = "seed_lifeboat/sticky.rs"]
mod sticky;
#[path = "seed_lifeboat/weights.rs"]
mod weights;
