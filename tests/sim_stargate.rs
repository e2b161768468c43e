//! N target routers on a fake mesh, from one seed: random delays, full rings, servers that come and go, reports, scrapes, setbacks,
//! clients that leave. The world is checked whole whenever it is made quiet.
//!
//! `RINGWAY_SIM_SEED=7 cargo test --test sim_stargate` runs one seed; `RINGWAY_SIM_SEEDS=10000` more than the usual 150.

#[path = "sim_stargate/world.rs"]
mod world;

use std::sync::Arc;

use ringway::clock::Nanos;
use ringway::proto::config::lb_config::LbConfig;
use ringway::proto::ids::{BackendId, ShardId, Ticket};
use ringway::proto::message::Update;
use ringway::proto::stargate::flight::Flight;
use ringway::proto::stargate::layout::{Layout, Slot, SlotId};
use ringway::proto::stargate::request::{Dispatched, End, Refusal, Routed, Wish};
use ringway::proto::stargate::stats::Reported;
use ringway::proto::stargate::target_router::{TargetRouter, TargetRouterOptions};

use world::World;

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

fn seeds(usual: u64) -> std::ops::Range<u64> {
    match from_env("RINGWAY_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..from_env("RINGWAY_SIM_SEEDS").unwrap_or(usual),
    }
}

/// Everything happens, on one to five shards.
#[test]
fn figures_converge_nothing_leaks_and_nobody_waits_in_vain() {
    for seed in seeds(150) {
        let result = std::panic::catch_unwind(|| World::new(seed, 1 + (seed % 5) as usize).run());
        if let Err(cause) = result {
            eprintln!("rerun with RINGWAY_SIM_SEED={seed} cargo test --test sim_stargate");
            std::panic::resume_unwind(cause);
        }
    }
}

/// The same seed gives the same run.
#[test]
fn a_run_is_its_seed() {
    for seed in 0..5 {
        let trace = |seed| {
            let mut world = World::new(seed, 3);
            world.run();
            world.trace
        };
        assert_eq!(trace(seed), trace(seed));
        assert_ne!(trace(seed), trace(seed + 1));
    }
}

fn slot(name: &str, backend: u16, max_concurrency: u64) -> Slot {
    Slot {
        backend: BackendId(backend),
        server: name.into(),
        model: "m".into(),
        cluster_id: name.into(),
        routing_keys: Vec::new(),
        advertised: true,
        active: true,
        input_tps: 1000.0,
        max_concurrency,
    }
}

fn router(file: &str, seed: u64) -> TargetRouter {
    let options = TargetRouterOptions {
        me: ShardId(0),
        shards: 1,
        max_connect_retries: 2,
        max_request_retries: 2,
        grace_ms: 0,
        seed,
    };
    let config = LbConfig::parse(file.as_bytes()).expect("the file is right");
    TargetRouter::new(options, Arc::new(config))
}

fn lay_out(router: &mut TargetRouter, now: Nanos, slots: &[Slot]) {
    router.handle_layout(now, &Layout { slots: slots.to_vec() });
    for slot in slots {
        router.handle_update(now, &Update::RoundTrip { backend: slot.backend, rtt_ns: 1_000_000 });
    }
}

const AFFINE: &str = r#"{"models":{"m":{"algorithm":"wait-and-widen",
    "cache_affinity_backend_selection_count":1,"cache_affinity_wait_ms":50000}}}"#;

/// One key's requests: one is sent, so many wait, in this order.
fn crowd(router: &mut TargetRouter, now: Nanos, count: u64) -> (Flight, Vec<(Flight, Ticket)>) {
    let mut first = None;
    let mut waiting = Vec::new();
    for n in 0..=count {
        let now = Nanos(now.0 + n * 1000);
        let wish =
            Wish { arrived: now, model: b"m", affinity_key: b"key", input_tokens: 10, ..Wish::default() };
        let mut flight = router.open(now, &wish).expect("accepted");
        match router.route(now, &mut flight) {
            Routed::Dispatch(_) if n == 0 => first = Some(flight),
            Routed::Wait(ticket) if n > 0 => waiting.push((flight, ticket)),
            other => panic!("request {n}: {other:?}"),
        }
    }
    (first.expect("the first finds its place free"), waiting)
}

fn woken(router: &mut TargetRouter) -> Vec<(Ticket, Result<Dispatched, Refusal>)> {
    std::iter::from_fn(|| router.poll_woken()).map(|woken| (woken.ticket, woken.routed)).collect()
}

/// How often requests were looked at since they began to wait.
fn looks(router: &TargetRouter, waiting: &[(Flight, Ticket)]) -> u64 {
    waiting.iter().map(|(flight, _)| u64::from(router.facts(flight).routing_retry_attempts)).sum()
}

#[test]
fn a_freed_place_wakes_one_of_a_thousand_the_longest_waiting_that_may_use_it() {
    let mut router = router(AFFINE, 1);
    let slots: Vec<Slot> = (0..8).map(|n| slot(&format!("s{n}"), n, 1)).collect();
    lay_out(&mut router, Nanos::from_ms(1), &slots);
    let now = Nanos::from_ms(10);
    let (mut holder, mut waiting) = crowd(&mut router, now, 1000);
    // Nothing changes: nobody looks.
    let quiet = Nanos::from_ms(5000);
    router.handle_timeout(quiet);
    assert!(router.poll_timeout() > quiet);
    assert_eq!((woken(&mut router).len(), looks(&router, &waiting)), (0, 0));
    // Another cluster gets busy and free again: it is none of theirs.
    let wish = Wish { arrived: quiet, model: b"m", ..Wish::default() };
    let mut other = router.open(quiet, &wish).unwrap();
    assert!(matches!(router.route(quiet, &mut other), Routed::Dispatch(_)));
    router.handle_end(quiet, &mut other, End::Other);
    assert_eq!((woken(&mut router).len(), looks(&router, &waiting)), (0, 0));
    // Each end of a request lets the next one go, and has nobody else looked at.
    for n in 0..200_u64 {
        router.handle_end(quiet, &mut holder, End::Other);
        let all = woken(&mut router);
        let (flight, ticket) = waiting.remove(0);
        assert!(matches!(&all[..], [(woken, Ok(_))] if *woken == ticket), "{n}: {all:?}");
        assert_eq!((router.facts(&flight).routing_retry_attempts, looks(&router, &waiting)), (1, 0));
        holder = flight;
    }
    router.handle_end(quiet, &mut holder, End::Other);
    for (mut flight, ticket) in waiting {
        router.give_up(quiet, ticket);
        router.handle_end(quiet, &mut flight, End::Other);
    }
    assert_eq!((router.flights(), router.poll_woken()), (0, None));
}

#[test]
fn a_change_that_helps_all_wakes_each_of_a_thousand_once_and_in_order() {
    let mut router = router(AFFINE, 1);
    let mut slots = vec![slot("only", 0, 1)];
    lay_out(&mut router, Nanos::from_ms(1), &slots);
    let (mut holder, waiting) = crowd(&mut router, Nanos::from_ms(10), 1000);
    let now = Nanos::from_ms(500);
    slots[0].max_concurrency = 0;
    router.handle_layout(now, &Layout { slots });
    // All at that instant, before anything else is asked.
    let all = woken(&mut router);
    assert!(all.iter().all(|(_, routed)| routed.is_ok()));
    let tickets: Vec<Ticket> = all.into_iter().map(|(ticket, _)| ticket).collect();
    let expected: Vec<Ticket> = waiting.iter().map(|(_, ticket)| *ticket).collect();
    assert_eq!(tickets, expected);
    assert_eq!(looks(&router, &waiting), 1000);
    assert_eq!(router.live(SlotId(0)), 1001);
    router.handle_end(now, &mut holder, End::Other);
    for (mut flight, _) in waiting {
        router.handle_end(now, &mut flight, End::Other);
    }
    assert_eq!((router.live(SlotId(0)), router.flights()), (0, 0));
}

/// Two processes with the same file, whose servers came in another order and whose chance is another.
#[test]
fn routers_with_the_same_file_and_weights_agree_on_ten_thousand_keys() {
    let algorithms = [
        r#""algorithm":"pulsar","seed":"s""#,
        r#""algorithm":"wait-and-widen","seed":"s","cache_affinity_backend_selection_count":1"#,
        r#""algorithm":"pulsar-wait-and-widen","seed":"s""#,
    ];
    for algorithm in algorithms {
        let file = format!(r#"{{"models":{{"m":{{{algorithm}}}}}}}"#);
        let mut slots: Vec<Slot> = (0..20).map(|n| slot(&format!("s{n}"), n, 0)).collect();
        for (n, slot) in slots.iter_mut().enumerate() {
            slot.input_tps = 100.0 * (1 + n % 5) as f64;
        }
        let mut one = router(&file, 1);
        lay_out(&mut one, Nanos::from_ms(1), &slots);
        let mut other = router(&file, 2);
        slots.reverse();
        for n in 0..20 {
            lay_out(&mut other, Nanos::from_ms(n), &slots[..=n as usize]);
        }
        // One of them has registrations that report what the other one has fixed.
        for (n, slot) in slots.iter_mut().enumerate() {
            let reported = Reported { last_mean_input_tps: Some(slot.input_tps), ..Reported::default() };
            other.handle_report(Nanos::from_ms(30), SlotId(n as u32), &reported);
            slot.input_tps = 0.0;
        }
        lay_out(&mut other, Nanos::from_ms(40), &slots);
        let mut reached = std::collections::BTreeSet::new();
        for n in 0..10_000_u64 {
            let now = Nanos::from_ms(100 + n);
            let key = format!("key-{n}");
            let wish = Wish { arrived: now, model: b"m", affinity_key: key.as_bytes(), ..Wish::default() };
            let [a, b] = [&mut one, &mut other].map(|router| {
                let mut flight = router.open(now, &wish).unwrap();
                assert!(matches!(router.route(now, &mut flight), Routed::Dispatch(_)));
                let cluster = router.cluster_id(&flight).to_owned();
                router.handle_end(now, &mut flight, End::Other);
                cluster
            });
            assert_eq!(a, b, "{algorithm}: {key}");
            reached.insert(a);
        }
        assert_eq!(reached.len(), 20, "{algorithm}");
    }
}
