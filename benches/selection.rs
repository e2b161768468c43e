//! What choosing a cluster costs, in instructions, by algorithm and by number of clusters.
//!
//! `scripts/bench-instructions --bench selection` counts each case under callgrind. Run without arguments (as `cargo test`
//! does) each case goes some rounds, its result is checked and its allocations are counted: in the steady state there are none.
//! `--case NAME --rounds N` runs one. Clusters are as a busy fleet's: limits of 32 with
//! up to 20 in use, round trips under 3 ms, rates that differ by a fifth; a request has 1,000 input tokens.

#[path = "harness/allocations.rs"]
mod allocations;
mod harness;

use std::hint::black_box;

use ringway::proto::config::lb_config::{Entry, Method, MethodSettings};
use ringway::proto::stargate::balancer::{Ask, Balancer, Choice, Selection};
use ringway::proto::stargate::random::Rng;
use ringway::proto::stargate::stats::{Cluster, Stats};

const SIZES: [usize; 3] = [8, 64, 1024];

struct Bench {
    rng: Rng,
    version: u64,
    round: u64,
    clusters: Vec<Cluster>,
    entry: Entry,
    balancer: Balancer,
}

fn fleet(count: usize) -> Vec<Cluster> {
    let mut rng = Rng::new(5);
    let mut one = |i: usize| {
        let tps = 8000.0 + rng.below(1600) as f64;
        Cluster {
            id: format!("cluster-{i:04}").into(),
            rtt_ns: 1_000_000 + rng.below(2_000_000) as u64,
            stats: Stats {
                last_mean_input_tps: tps,
                max_input_tps: 2.0 * tps,
                num_running_queries: rng.below(20) as u64,
                max_engine_concurrency: 32,
                queued_input_size: 5000,
                queue_size: 5,
                queue_times: vec![(0, 200 + rng.below(100) as u64), (3, 600)],
                ..Stats::default()
            },
        }
    };
    (0..count).map(&mut one).collect()
}

impl Bench {
    fn new(clusters: usize, entry: Entry) -> Bench {
        let balancer = Balancer::new(&entry, b"fn-1", b"llama");
        Bench { rng: Rng::new(1), version: 1, round: 0, clusters: fleet(clusters), entry, balancer }
    }

    fn choose(&mut self, ask: &Ask<'_>) -> Choice {
        self.round += 1;
        let (entry, clusters, ask) = black_box((&self.entry, &self.clusters[..], ask));
        black_box(self.balancer.choose(entry, clusters, self.version, ask, &mut self.rng))
    }

    fn selected(&mut self, ask: &Ask<'_>) -> Selection {
        match self.choose(ask) {
            Choice::Selected(selection) => selection,
            other => panic!("{other:?}"),
        }
    }
}

const ASK: Ask<'static> = Ask {
    input_tokens: 1000,
    priority: 1,
    elapsed_ns: 20_000,
    slo_ms: None,
    affinity_key: b"session-0123456789abcdef",
    excluded: &[],
    shut: &[],
};

/// A case: its name, what it is made on, and a round.
type Case = (String, Box<dyn Fn() -> Bench>, Box<dyn Fn(&mut Bench)>);

fn grouped(size: u64) -> Entry {
    let mut entry = Entry::new(Method::WaitAndWiden);
    let MethodSettings::WaitAndWiden(rules) = &mut entry.method else { unreachable!() };
    rules.group = size;
    entry
}

fn banded() -> Entry {
    let mut entry = Entry::new(Method::PulsarWaitAndWiden);
    let MethodSettings::PulsarWaitAndWiden { widen, group, .. } = &mut entry.method else { unreachable!() };
    widen.max_queue_time_floor_ms = Some(100);
    widen.max_queue_time_ceil_ms = Some(1000);
    *group = 2;
    entry
}

fn cases() -> Vec<Case> {
    fn case(
        name: &str,
        size: usize,
        fresh: impl Fn(usize) -> Bench + 'static,
        round: impl Fn(&mut Bench) + 'static,
    ) -> Case {
        (format!("{name}_{size}"), Box::new(move || fresh(size)), Box::new(round))
    }
    let plain = |method| move |size| Bench::new(size, Entry::new(method));
    let choose = |bench: &mut Bench| assert!(bench.selected(&ASK).rank_depth == 1);
    let mut cases = Vec::new();
    for size in SIZES {
        cases.push(case("round_robin", size, plain(Method::RoundRobin), choose));
        cases.push(case("random", size, plain(Method::Random), choose));
        cases.push(case("power_of_n", size, plain(Method::PowerOfN), choose));
        cases.push(case("wait_and_widen", size, plain(Method::WaitAndWiden), choose));
        // Limits unknown, and nothing queued.
        let unlimited = |size| {
            let mut bench = Bench::new(size, Entry::new(Method::WaitAndWiden));
            for Cluster { stats, .. } in &mut bench.clusters {
                stats.max_engine_concurrency = 0;
                stats.queued_input_size = 0;
                stats.queue_times.clear();
            }
            bench
        };
        cases.push(case("wait_and_widen_unlimited", size, unlimited, choose));
        // Limits unknown: the queues by priority are read.
        let queued = |size| {
            let mut bench = Bench::new(size, Entry::new(Method::WaitAndWiden));
            bench.clusters.iter_mut().for_each(|cluster| cluster.stats.max_engine_concurrency = 0);
            bench
        };
        cases.push(case("wait_and_widen_queued", size, queued, choose));
        // A request that waited for 3 s: every bucket is open.
        cases.push(case("wait_and_widen_late", size, queued, |bench| {
            bench.selected(&Ask { elapsed_ns: 3_000_000_000, ..ASK });
        }));
        let full = |size| {
            let mut bench = Bench::new(size, Entry::new(Method::WaitAndWiden));
            bench.clusters.iter_mut().for_each(|cluster| cluster.stats.num_running_queries = 32);
            bench
        };
        cases.push(case("wait_and_widen_full", size, full, |bench| {
            assert!(bench.choose(&ASK) == Choice::Unavailable);
        }));
        cases.push(case("wait_and_widen_group", size, |size| Bench::new(size, grouped(2)), choose));
        cases.push(case("pulsar", size, plain(Method::Pulsar), choose));
        // The first of the ranking failed: the whole order is asked for.
        cases.push(case("pulsar_second", size, plain(Method::Pulsar), |bench| {
            let first = bench.selected(&ASK).index;
            assert!(bench.selected(&Ask { excluded: &[first], ..ASK }).rank_depth == 2);
        }));
        // The version grew, and nothing that matters here had changed.
        cases.push(case("pulsar_other_version", size, plain(Method::Pulsar), |bench| {
            bench.version += 1;
            bench.selected(&ASK);
        }));
        cases.push(case("pulsar_weights_moved", size, plain(Method::Pulsar), |bench| {
            bench.version += 1;
            bench.clusters[bench.round as usize % 8].stats.max_input_tps += 1.0;
            bench.selected(&ASK);
        }));
        cases.push(case("pulsar_new_key", size, plain(Method::Pulsar), |bench| {
            let key = bench.round.to_le_bytes();
            bench.selected(&Ask { affinity_key: &key, ..ASK });
        }));
        cases.push(case("pulsar_wait_and_widen", size, plain(Method::PulsarWaitAndWiden), choose));
        cases.push(case(
            "pulsar_wait_and_widen_bounds",
            size,
            |size| Bench::new(size, banded()),
            |bench| {
                bench.selected(&ASK);
            },
        ));
        let limited = |size| {
            let mut entry = Entry::new(Method::WaitAndWiden);
            entry.max_input_work_seconds = Some(1.0);
            Bench::new(size, entry)
        };
        cases.push(case("admit", size, limited, |bench| {
            let (entry, clusters, ask) = black_box((&bench.entry, &bench.clusters[..], &ASK));
            assert!(bench.balancer.admit(entry, clusters, ask).is_ok());
        }));
        let alone = |size| {
            let mut entry = grouped(2);
            let MethodSettings::WaitAndWiden(rules) = &mut entry.method else { unreachable!() };
            rules.widen.cache_affinity_wait_ms = 1000;
            Bench::new(size, entry)
        };
        cases.push(case("concerns_group", size, alone, |bench| {
            black_box(bench.balancer.concerns(&bench.entry, &bench.clusters, 1, &ASK, 3));
        }));
    }
    cases
}

fn main() {
    let cases = cases();
    match harness::order(cases.iter().map(|(name, ..)| name.as_str())) {
        harness::Order::Rounds(case, rounds) => {
            let (_, fresh, round) = &cases[case];
            let mut bench = fresh();
            (0..rounds).for_each(|_| round(&mut bench));
        }
        harness::Order::Try => {
            for (name, fresh, round) in &cases {
                let mut bench = fresh();
                // Until as many keys are remembered as may be; with many clusters that takes long.
                let warm = match name.as_str() {
                    "pulsar_new_key_8" => 10_000,
                    name if name.starts_with("pulsar_new_key") => 0,
                    _ => 50,
                };
                (0..warm).for_each(|_| round(&mut bench));
                let before = allocations::count();
                (0..50).for_each(|_| round(&mut bench));
                let made = allocations::count() - before;
                assert!(made == 0 || warm == 0, "{name}: {made} allocations in 50 rounds");
            }
            println!("selection: {} cases ran; scripts/bench-instructions counts them", cases.len());
        }
    }
}
