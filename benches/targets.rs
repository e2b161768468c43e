//! What a request on a trusted listener costs in the brain of its shard, in instructions: opened, routed, its head, its first output,
//! its end; over 64 clusters of one server, of which some have requests already.
//!
//! `scripts/bench-instructions --bench targets` counts each case under callgrind. Run without arguments (as `cargo test` does) each case
//! goes some rounds, its result is checked and its allocations are counted: in the steady state there are none.

#[path = "harness/allocations.rs"]
mod allocations;
mod harness;

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;

use ringway::clock::Nanos;
use ringway::proto::config::lb_config::LbConfig;
use ringway::proto::ids::{BackendId, ShardId};
use ringway::proto::message::Update;
use ringway::proto::stargate::flight::Flight;
use ringway::proto::stargate::layout::{Layout, Slot, SlotId};
use ringway::proto::stargate::request::{End, Routed, Wish};
use ringway::proto::stargate::stats::Reported;
use ringway::proto::stargate::target_router::{TargetRouter, TargetRouterOptions};

const SERVERS: u16 = 64;
const AFFINE: &str = "wait-and-widen;cache_affinity_backend_selection_count=1;cache_affinity_wait_ms=60000";

struct Bench {
    router: TargetRouter,
    now: Nanos,
    method: &'static str,
    /// Requests that stay.
    held: VecDeque<Flight>,
    shards: usize,
}

impl Bench {
    fn new(method: &'static str, shards: usize) -> Bench {
        let options = TargetRouterOptions {
            me: ShardId(0),
            shards,
            max_connect_retries: 2,
            max_request_retries: 2,
            grace_ms: 0,
            seed: 1,
        };
        let mut router = TargetRouter::new(options, Arc::new(LbConfig::permissive()));
        let slots = (0..SERVERS).map(|backend| Slot {
            backend: BackendId(backend),
            server: format!("server-{backend:02}").into(),
            model: "meta-llama/Llama-3.3-70B-Instruct".into(),
            cluster_id: format!("cluster-{backend:02}").into(),
            routing_keys: vec!["function-1".into()],
            advertised: true,
            active: true,
            input_tps: 8000.0 + f64::from(backend),
            max_concurrency: if method == AFFINE { 1 } else { 32 },
        });
        router.handle_layout(Nanos(1), &Layout { slots: slots.collect() });
        for backend in 0..SERVERS {
            let rtt_ns = 1_000_000 + u64::from(backend) * 10_000;
            router.handle_update(Nanos(1), &Update::RoundTrip { backend: BackendId(backend), rtt_ns });
        }
        let mut bench = Bench { router, now: Nanos::from_ms(1), method, held: VecDeque::new(), shards };
        let held = if method == AFFINE { 1001 } else { 640 };
        for _ in 0..held {
            let flight = bench.begin();
            bench.held.push_back(flight);
        }
        bench
    }

    fn begin(&mut self) -> Flight {
        self.now.0 += 10_000;
        let wish = Wish {
            arrived: self.now,
            routing_key: b"function-1",
            model: b"meta-llama/Llama-3.3-70B-Instruct",
            method: Some(self.method.as_bytes()),
            input_tokens: 1000,
            priority: 1,
            affinity_key: b"session-0123456789abcdef",
            ..Wish::default()
        };
        let mut flight = self.router.open(self.now, black_box(&wish)).expect("available");
        let routed = self.router.route(self.now, &mut flight);
        assert!(self.method == AFFINE || matches!(routed, Routed::Dispatch(_)));
        flight
    }

    fn request(&mut self) {
        let mut flight = self.begin();
        self.now.0 += 10_000;
        self.router.handle_head(self.now, &mut flight);
        self.now.0 += 10_000;
        self.router.handle_output(self.now, &mut flight);
        self.router.count_finished(&flight, 200);
        self.router.handle_end(self.now, &mut flight, End::Completed);
        if self.shards > 1 {
            self.router.flush(self.now);
            while let Some(message) = self.router.poll_message() {
                black_box(message);
            }
        }
    }

    /// One of a thousand that wait goes on, and another one comes.
    fn freed(&mut self) {
        let mut first = self.held.pop_front().expect("so many are held");
        self.router.handle_end(self.now, &mut first, End::Other);
        assert!(self.router.poll_woken().is_some_and(|woken| woken.routed.is_ok()));
        let flight = self.begin();
        self.held.push_back(flight);
    }

    fn report(&mut self) {
        for slot in 0..u32::from(SERVERS) {
            let reported = Reported {
                last_mean_input_tps: Some(8000.0),
                num_running_queries: Some(10),
                queued_input_size: Some(2000),
                queue_times: Some(vec![(0, 100), (2, 250)]),
                max_engine_concurrency: Some(32),
                ..Reported::default()
            };
            self.router.handle_report(self.now, SlotId(slot), &reported);
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for mut flight in self.held.drain(..) {
            self.router.handle_end(self.now, &mut flight, End::Other);
        }
    }
}

/// A case: its name, what it is made on, and a round.
type Case = (&'static str, fn() -> Bench, fn(&mut Bench));

const CASES: &[Case] = &[
    ("round_robin", || Bench::new("round-robin", 1), Bench::request),
    ("round_robin_of_4_shards", || Bench::new("round-robin", 4), Bench::request),
    ("random", || Bench::new("random", 1), Bench::request),
    ("power_of_n", || Bench::new("power-of-n", 1), Bench::request),
    ("wait_and_widen", || Bench::new("wait-and-widen", 1), Bench::request),
    ("wait_and_widen_expression", || Bench::new("wait-and-widen;n=3", 1), Bench::request),
    (
        "wait_and_widen_reported",
        || {
            let mut bench = Bench::new("wait-and-widen", 1);
            bench.report();
            bench
        },
        Bench::request,
    ),
    ("pulsar", || Bench::new("pulsar", 1), Bench::request),
    ("pulsar_wait_and_widen", || Bench::new("pulsar-wait-and-widen", 1), Bench::request),
    ("freed_place_of_1000_waiting", || Bench::new(AFFINE, 1), Bench::freed),
];

fn main() {
    match harness::order(CASES.iter().map(|(name, ..)| *name)) {
        harness::Order::Rounds(case, rounds) => {
            let (_, fresh, round) = CASES[case];
            let mut bench = fresh();
            (0..rounds).for_each(|_| round(&mut bench));
        }
        harness::Order::Try => {
            for (name, fresh, round) in CASES {
                let mut bench = fresh();
                (0..2000).for_each(|_| round(&mut bench));
                let before = allocations::count();
                (0..50).for_each(|_| round(&mut bench));
                let made = allocations::count() - before;
                // Books of who waits are trees, whose nodes come and go.
                assert!(made == 0 || name.starts_with("freed"), "{name}: {made} allocations in 50 rounds");
            }
            println!("targets: {} cases ran; scripts/bench-instructions counts them", CASES.len());
        }
    }
}
