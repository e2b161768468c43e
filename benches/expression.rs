//! What `x-routing-method` costs a request, in instructions: a bare name, a cached expression, and one that is new.
//!
//! Run without arguments (as `cargo test` does) each case goes some rounds and its allocations are counted;
//! `scripts/bench-instructions --bench expression` counts instructions.

#[path = "harness/allocations.rs"]
mod allocations;
mod harness;

use std::hint::black_box;
use std::rc::Rc;

use harness::Order;
use ringway::clock::Nanos;
use ringway::limits::EXPRESSIONS_MAX;
use ringway::proto::config::expression::{Requested, parse};
use ringway::proto::config::lb_config::{Entry, LbConfig, Method};
use ringway::proto::stargate::expressions::Expressions;

/// As long as a function's version id and a model's name are.
const KEY: &[u8] = b"2f1a94b6-5a5c-4f0e-9a53-8f1f0c9d7a11";
const MODEL: &[u8] = b"meta-llama/Llama-3.1-8B-Instruct";
const PULSAR: &[u8] = b"pulsar;seed=stable-a;consider_kv_free_tokens=true";
const WIDEN: &[u8] = b"wait-and-widen;n=3;max_queue_time_floor_ms=200;max_queue_time_ceil_ms=2000";

struct Bench {
    config: LbConfig,
    cache: Expressions<Entry>,
    now: Nanos,
}

/// A case: its name, the allocations of a round at most, a round.
type Case = (&'static str, u64, fn(&mut Bench));

const CASES: &[Case] = &[
    ("hit", 0, |bench| bench.hit(KEY, WIDEN)),
    ("hit_previous", 0, |bench| bench.hit(KEY, PULSAR)),
    // By turns, so that the list of who was idle changes.
    ("hit_others_between", 0, |bench| {
        bench.hit(KEY, WIDEN);
        bench.hit(b"0", PULSAR);
    }),
    ("name", 0, |_| {
        let Ok(Requested::Name(method)) = parse(black_box(b"Pulsar_Wait_And_Widen")) else {
            panic!("a name")
        };
        assert_eq!(method, Method::PulsarWaitAndWiden);
    }),
    ("resolve", 0, |bench| {
        let id = bench.config.resolve(black_box(MODEL), black_box(Some(Method::WaitAndWiden)));
        assert!(id.is_some());
    }),
    // Names, parameters.
    ("parse", 2, |_| {
        assert!(matches!(parse(black_box(PULSAR)), Ok(Requested::Expression(_))));
    }),
    ("parse_and_compile", 4, |bench| {
        let Ok(Requested::Expression(expression)) = parse(black_box(WIDEN)) else { panic!("an expression") };
        let base = bench.config.resolve(MODEL, Some(expression.method())).expect("it is configured");
        assert!(black_box(expression.compile(bench.config.entry(base))).is_ok());
    }),
];

impl Bench {
    fn new(entries: usize) -> Bench {
        let file =
            br#"{"models":{"meta-llama/Llama-3.1-8B-Instruct":{"algorithm":"wait-and-widen","seed":"a"}}}"#;
        let config = LbConfig::parse(file).expect("a good file");
        let mut cache = Expressions::default();
        let now = Nanos::from_ms(1);
        for i in 0..entries - 1 {
            cache.insert(now, i.to_string().as_bytes(), MODEL, PULSAR, Rc::new(Entry::new(Method::Pulsar)));
        }
        cache.insert(now, KEY, MODEL, PULSAR, Rc::new(Entry::new(Method::Pulsar)));
        cache.insert(now, KEY, MODEL, WIDEN, Rc::new(Entry::new(Method::WaitAndWiden)));
        assert_eq!(cache.len(), entries);
        Bench { config, cache, now }
    }

    fn hit(&mut self, routing_key: &[u8], value: &[u8]) {
        self.now.0 += 1;
        let found = self.cache.lookup(self.now, black_box(routing_key), black_box(MODEL), black_box(value));
        assert!(black_box(found).is_some());
    }
}

fn main() {
    match harness::order(CASES.iter().map(|(name, ..)| *name)) {
        Order::Rounds(case, rounds) => {
            let mut bench = Bench::new(EXPRESSIONS_MAX);
            for _ in 0..rounds {
                CASES[case].2(&mut bench);
            }
        }
        Order::Try => {
            for (name, allocations_max, round) in CASES {
                let mut bench = Bench::new(100);
                round(&mut bench);
                let before = allocations::count();
                for _ in 0..100 {
                    round(&mut bench);
                }
                let allocations = allocations::count() - before;
                assert!(allocations <= 100 * allocations_max, "{name}: {allocations} in 100 rounds");
            }
            println!(
                "expression: {} cases ran; scripts/bench-instructions --bench expression counts them",
                CASES.len()
            );
        }
    }
}
