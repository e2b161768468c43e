//! Which server a request goes to, case by case: the Stargate rules, section 9.2. One shard, so that orders are exact.

mod support;

use std::collections::BTreeSet;

use serde_json::{Value, json};
use support::stargate::*;
use support::*;

/// Registers one server per `(id, cluster, stats)` for the model `m`, all by one engine.
#[track_caller]
fn servers(router: &Router, engine: &Engine, all: &[(&str, &str, Value)]) -> Vec<Registration> {
    let mut registrations: Vec<_> = all
        .iter()
        .map(|(id, cluster, stats)| Registration::new(id, engine, "m", stats.clone()).cluster(cluster))
        .collect();
    register(router, &mut registrations);
    registrations
}

/// The servers of `count` requests with these headers, one after the other.
#[track_caller]
fn sids(router: &Router, headers: &[(&str, &str)], count: usize) -> Vec<String> {
    (0..count).map(|_| sid(&ask(router, "m", headers))).collect()
}

fn with_file(model_entry: &str) -> Router {
    Gateway::new().lb_config(&format!(r#"{{"models":{{"m":{model_entry}}}}}"#)).start()
}

#[test]
fn s1_power_of_n_takes_the_idle_cluster() {
    let (engine, router) = (engine(), Gateway::new().start());
    servers(
        &router,
        &engine,
        &[("busy", "busy", but(json!({"queued_input_size": 1000}))), ("idle", "idle", idle())],
    );
    assert_eq!(sids(&router, &[], 20), vec!["idle"; 20]);
}

#[test]
fn s2_round_robin_alternates() {
    let (engine, router) = (engine(), with_file(r#""round-robin""#));
    servers(&router, &engine, &[("a", "a", idle()), ("b", "b", idle())]);
    assert_eq!(sids(&router, &[], 10), ["a", "b"].repeat(5));
}

#[test]
fn s3_random_uses_all() {
    let (engine, router) = (engine(), with_file(r#""random""#));
    servers(&router, &engine, &[("a", "a", idle()), ("b", "b", idle()), ("c", "c", idle())]);
    let used: BTreeSet<_> = sids(&router, &[], 200).into_iter().collect();
    assert_eq!(used.len(), 3);
}

fn at(t: u64, queued: u64) -> Value {
    but(json!({"last_mean_input_tps": t, "queued_input_size": queued}))
}

#[test]
fn s4_a_clusters_queue_is_that_of_all_its_servers() {
    let (engine, router) = (engine(), Gateway::new().start());
    servers(
        &router,
        &engine,
        &[("x1", "x", at(100, 130)), ("x2", "x", at(100, 130)), ("y", "y", at(100, 120))],
    );
    // 260 tokens at 200 a second against 120 at 100.
    assert_eq!(sids(&router, &[("x-input-tokens", "0")], 12), vec!["y"; 12]);
}

#[test]
fn s5_servers_of_the_chosen_cluster_take_turns() {
    let (engine, router) = (engine(), Gateway::new().start());
    servers(&router, &engine, &[("x1", "x", at(100, 0)), ("x2", "x", at(100, 0)), ("y", "y", at(100, 120))]);
    assert_eq!(sids(&router, &[("x-input-tokens", "0")], 12), ["x1", "x2"].repeat(6));
}

#[test]
fn s6_wait_and_widen_takes_the_faster() {
    let router = with_file(r#""wait-and-widen""#);
    let (near, far) = (distant_engine(5), distant_engine(50));
    let mut all =
        [Registration::new("near", &near, "m", idle()), Registration::new("far", &far, "m", idle())];
    register(&router, &mut all);
    assert_eq!(sids(&router, &[], 20), vec!["near"; 20]);
}

#[test]
fn s7_within_a_bucket_the_comparator_decides() {
    let router = with_file(
        r#"{"algorithm":"wait-and-widen","n":2,"ttft_bucket_size_ms":100,"comparator":"num-requests-queued"}"#,
    );
    let (near, far) = (distant_engine(5), distant_engine(50));
    let mut all = [
        Registration::new("near", &near, "m", but(json!({"queue_size": 10}))),
        Registration::new("far", &far, "m", but(json!({"queue_size": 1}))),
    ];
    register(&router, &mut all);
    assert_eq!(sids(&router, &[], 10), vec!["far"; 10]);
}

#[test]
fn s8_a_locked_bucket_is_never_chosen_at_arrival() {
    // The queue tells the clusters apart, not the network: 5, 20 and 50 ms behind each other.
    let (engine, router) = (engine(), with_file(r#"{"algorithm":"wait-and-widen","n":3}"#));
    let queued =
        |ms: u64| but(json!({"last_mean_input_tps": 10, "queue_time_estimate_ms_by_priority": {"0": ms}}));
    servers(&router, &engine, &[("a", "a", queued(5)), ("b", "b", queued(20)), ("c", "c", queued(150))]);
    assert!(!sids(&router, &[], 30).contains(&"c".to_owned()));
}

#[test]
fn s9_a_full_cluster_is_passed_over() {
    let router = with_file(r#""wait-and-widen""#);
    let (near, far) = (distant_engine(0), distant_engine(6));
    let full = but(json!({"max_engine_concurrency": 1, "num_running_queries": 1}));
    let free = but(json!({"max_engine_concurrency": 1}));
    let mut all = [Registration::new("near", &near, "m", full), Registration::new("far", &far, "m", free)];
    register(&router, &mut all);
    assert_eq!(sids(&router, &[], 10), vec!["far"; 10]);
}

const BOUNDED_5: &str =
    r#"{"algorithm":"wait-and-widen","max_queue_time_floor_ms":5,"max_queue_time_ceil_ms":5}"#;

#[test]
fn s10_a_queue_over_its_bound_is_not_chosen() {
    let (engine, router) = (engine(), with_file(BOUNDED_5));
    let queued = but(json!({"queue_time_estimate_ms_by_priority": {"0": 10}}));
    let mut all = servers(&router, &engine, &[("slow", "slow", queued)]);
    assert_bare(&ask(&router, "m", &[]), 503);
    all.push(Registration::new("quick", &engine, "m", idle()));
    register(&router, &mut all);
    assert_eq!(sids(&router, &[], 10), vec!["quick"; 10]);
}

#[test]
fn s11_the_bound_filters_before_buckets_are_formed() {
    let router = with_file(BOUNDED_5);
    let (near, far) = (distant_engine(1), distant_engine(40));
    let queued = but(json!({"queue_time_estimate_ms_by_priority": {"0": 10}}));
    let mut all =
        [Registration::new("near", &near, "m", queued), Registration::new("far", &far, "m", idle())];
    register(&router, &mut all);
    assert_eq!(sids(&router, &[], 10), vec!["far"; 10]);
}

#[test]
fn s12_the_requests_own_prefill_counts() {
    let router = with_file(r#""wait-and-widen""#);
    let (fast, slow) = (distant_engine(10), distant_engine(1));
    let mut all =
        [Registration::new("fast", &fast, "m", at(200, 0)), Registration::new("slow", &slow, "m", at(10, 0))];
    register(&router, &mut all);
    assert_eq!(sids(&router, &[("x-input-tokens", "100")], 10), vec!["fast"; 10]);
}

const GROUP_OF_ONE: &str = r#"{"algorithm":"wait-and-widen","cache_affinity_backend_selection_count":1}"#;

#[test]
fn s13_the_same_key_reaches_the_same_server() {
    let (engine, router) = (engine(), with_file(GROUP_OF_ONE));
    servers(&router, &engine, &[("a", "a", idle()), ("b", "b", idle()), ("c", "c", idle())]);
    let mut owners = BTreeSet::new();
    for number in 0..20 {
        let key = format!("session-{number}");
        let own = sids(&router, &[("x-cache-affinity-key", &key)], 5);
        assert!(own.iter().all(|sid| *sid == own[0]), "{key}: {own:?}");
        owners.insert(own[0].clone());
    }
    assert_eq!(owners.len(), 3, "keys spread");
}

#[test]
fn s14_without_a_key_the_time_to_first_token_decides() {
    let router = with_file(GROUP_OF_ONE);
    let (near, far, farther) = (distant_engine(1), distant_engine(60), distant_engine(90));
    let mut all = [
        Registration::new("near", &near, "m", idle()),
        Registration::new("far", &far, "m", idle()),
        Registration::new("farther", &farther, "m", idle()),
    ];
    register(&router, &mut all);
    assert_eq!(sids(&router, &[], 20), vec!["near"; 20]);
}

#[test]
fn s15_a_very_long_key_is_stable_too() {
    let (engine, router) = (engine(), with_file(GROUP_OF_ONE));
    servers(&router, &engine, &[("a", "a", idle()), ("b", "b", idle()), ("c", "c", idle())]);
    for letter in ["x", "y", "z"] {
        let key = letter.repeat(300);
        let own = sids(&router, &[("x-cache-affinity-key", &key)], 8);
        assert!(own.iter().all(|sid| *sid == own[0]), "{letter}: {own:?}");
    }
}

#[test]
fn s16_pulsar_keeps_a_key_and_spreads_keys() {
    let (engine, router) = (engine(), with_file(r#""pulsar""#));
    servers(&router, &engine, &[("a", "a", idle()), ("b", "b", idle()), ("c", "c", idle())]);
    let own = sids(&router, &[("x-cache-affinity-key", "one")], 30);
    assert!(own.iter().all(|sid| *sid == own[0]), "{own:?}");
    let owners: BTreeSet<_> = (0..20)
        .map(|number| sid(&ask(&router, "m", &[("x-cache-affinity-key", &format!("key-{number}"))])))
        .collect();
    assert!(owners.len() >= 2, "{owners:?}");
}

#[test]
fn s17_pulsar_leaves_out_servers_without_a_rate() {
    let (engine, router) = (engine(), with_file(r#""pulsar""#));
    let unknown = || but(json!({"last_mean_input_tps": 0}));
    let mut all = servers(&router, &engine, &[("none", "none", unknown())]);
    assert_bare(&ask(&router, "m", &[("x-cache-affinity-key", "k")]), 503);
    all.push(Registration::new("some", &engine, "m", idle()));
    register(&router, &mut all);
    for number in 0..20 {
        let key = format!("key-{number}");
        assert_eq!(sid(&ask(&router, "m", &[("x-cache-affinity-key", &key)])), "some");
    }
}

#[test]
fn s18_pulsar_goes_down_its_ranking_where_the_cache_is_short() {
    let (engine, router) = (engine(), Gateway::new().start());
    let roomy = || {
        but(
            json!({"kv_cache_capacity_tokens": 1024, "kv_cache_used_tokens": 24, "kv_cache_free_tokens": 1000}),
        )
    };
    let mut all = servers(&router, &engine, &[("a", "a", roomy()), ("b", "b", roomy()), ("c", "c", roomy())]);
    let ask_with = |method: &str| {
        sid(&ask(&router, "m", &[("x-cache-affinity-key", "k"), ("x-routing-method", method)]))
    };
    let primary = ask_with("pulsar;seed=s");
    assert_eq!(ask_with("pulsar;seed=s;consider_kv_free_tokens=true"), primary);
    let at = all.iter().position(|one| one.id == primary).expect("one of them");
    all[at].report(&router, "m", idle());
    let second = ask_with("pulsar;seed=s;consider_kv_free_tokens=true");
    assert_ne!(second, primary);
    assert_eq!(ask_with("pulsar;seed=s"), primary, "only who asks for it looks at the cache");
    let labels = [("model", "m"), ("algorithm", "pulsar")];
    router.wait_metric("stargate_routing_kv_free_token_fallback_selections_total", &labels, 1.0, seconds(5));
    let labels = [("model", "m"), ("algorithm", "pulsar"), ("selection", "fallback")];
    router.wait_metric("stargate_routing_selections_total", &labels, 1.0, seconds(5));
}

#[test]
fn s19_without_bounds_the_primary_is_chosen_even_if_full() {
    let (engine, router) = (engine(), Gateway::new().start());
    let mut all = servers(&router, &engine, &[("a", "a", idle()), ("b", "b", idle()), ("c", "c", idle())]);
    let ask_with = |method: &str| {
        sid(&ask(&router, "m", &[("x-cache-affinity-key", "k"), ("x-routing-method", method)]))
    };
    let primary = ask_with("pulsar;seed=s");
    let at = all.iter().position(|one| one.id == primary).expect("one of them");
    all[at].report(&router, "m", but(json!({"max_engine_concurrency": 1, "num_running_queries": 1})));
    for _ in 0..5 {
        assert_eq!(ask_with("pulsar-wait-and-widen;seed=s"), primary);
    }
}

#[test]
fn s20_over_its_bound_the_primary_gives_way_to_the_next_band() {
    let (engine, router) = (
        engine(),
        with_file(
            r#"{"algorithm":"pulsar-wait-and-widen","seed":"s","max_queue_time_floor_ms":100,
                "max_queue_time_ceil_ms":100,"band_widen_interval_ms":10000}"#,
        ),
    );
    let mut all = servers(&router, &engine, &[("a", "a", idle()), ("b", "b", idle()), ("c", "c", idle())]);
    let key = [("x-cache-affinity-key", "k"), ("x-input-tokens", "0")];
    let primary = sid(&ask(&router, "m", &key));
    let at = all.iter().position(|one| one.id == primary).expect("one of them");
    all[at].report(&router, "m", but(json!({"queued_input_size": 200})));
    assert_ne!(sid(&ask(&router, "m", &key)), primary);
    let labels = [("model", "m"), ("algorithm", "pulsar-wait-and-widen"), ("selection", "fallback")];
    router.wait_metric("stargate_routing_selections_total", &labels, 1.0, seconds(5));
    let labels = [("model", "m"), ("algorithm", "pulsar-wait-and-widen"), ("selection", "primary")];
    assert_eq!(router.metrics().sum("stargate_routing_selections_total", &labels), 1.0);
}

#[test]
fn s21_the_models_own_entry_beats_the_top_level_map() {
    let entry = |seed: &str| {
        format!(
            r#"{{"algorithm":"wait-and-widen","seed":"{seed}","cache_affinity_backend_selection_count":1}}"#
        )
    };
    let file = format!(
        r#"{{"models":{{"m":{}}},"request_algorithms":{{"wait-and-widen":{}}}}}"#,
        entry("one"),
        entry("two")
    );
    let (engine, router) = (engine(), Gateway::new().lb_config(&file).start());
    servers(
        &router,
        &engine,
        &[("a", "a", idle()), ("b", "b", idle()), ("c", "c", idle()), ("d", "d", idle())],
    );
    for number in 0..20 {
        let key = format!("key-{number}");
        let plain = sid(&ask(&router, "m", &[("x-cache-affinity-key", &key)]));
        let asked = [("x-cache-affinity-key", &key[..]), ("x-routing-method", "wait-and-widen")];
        assert_eq!(sid(&ask(&router, "m", &asked)), plain, "{key}");
    }
}

#[test]
fn s22_the_queue_of_the_requests_priority_counts() {
    let (engine, router) = (engine(), with_file(r#"{"algorithm":"power-of-n","comparator":"queue-time"}"#));
    let map = |map: Value| but(json!({"queue_time_estimate_ms_by_priority": map}));
    servers(
        &router,
        &engine,
        &[
            ("first", "first", map(json!({"0": 1000, "4": 5}))),
            ("second", "second", map(json!({"0": 0, "4": 500}))),
        ],
    );
    assert_eq!(sids(&router, &[("x-input-tokens", "0"), ("x-priority", "4")], 10), vec!["first"; 10]);
    assert_eq!(sids(&router, &[("x-input-tokens", "0")], 10), vec!["second"; 10]);
}

/// With 2 excluded of 0 to 3, turns go 0, 1, 3 (pure: the balancer's own tests). Here 2 refuses, so that it is excluded
/// from the rest of a request that came to it, and the turn that this takes counts.
#[test]
fn s23_round_robin_skips_the_excluded() {
    let (engine, refusing) =
        (engine(), Engine::start(|exchange| exchange.reply(429, &[("x-stargate-retryable", "true")], b"{}")));
    let router = with_file(r#""round-robin""#);
    let mut all: Vec<_> = (0..4)
        .map(|number: usize| {
            let engine = if number == 2 { &refusing } else { &engine };
            Registration::new(&number.to_string(), engine, "m", idle())
        })
        .collect();
    register(&router, &mut all);
    assert_eq!(sids(&router, &[], 9), ["0", "1", "0", "0", "1", "1", "0", "1", "3"]);
}

/// "Stable affinity requires the same mounted configuration, seed, and candidate view across replicas." Two router processes
/// with the same file, seed and weights make the same choice for each of 10,000 keys.
#[test]
fn two_routers_make_the_same_affinity_choices() {
    const KEYS: usize = 10_000;
    const CLIENTS: usize = 4;
    let engine = EngineSetup::new().drop_bodies().start(|exchange| exchange.reply_ok());
    let file = r#"{"models":{"m":{"algorithm":"pulsar","seed":"stable-a"}}}"#;
    let routers: Vec<Router> = (0..2)
        .map(|_| {
            let router = Gateway::new().lb_config(file).start();
            let mut all: Vec<_> = (0..7)
                .map(|number: u64| {
                    let stats = but(json!({"last_mean_input_tps": 1000 + 500 * number}));
                    Registration::new(&format!("server-{number}"), &engine, "m", stats)
                })
                .collect();
            register(&router, &mut all);
            router
        })
        .collect();
    let choices = |router: &Router| -> Vec<String> {
        let parts: Vec<Vec<String>> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|part| {
                    scope.spawn(move || {
                        let mut client = router.client();
                        (part * KEYS / CLIENTS..(part + 1) * KEYS / CLIENTS)
                            .map(|key| {
                                client
                                    .send(&wish("m", &[("x-cache-affinity-key", &format!("session-{key}"))]));
                                sid(&client.response())
                            })
                            .collect()
                    })
                })
                .collect();
            clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect()
        });
        parts.concat()
    };
    let (first, second) = (choices(&routers[0]), choices(&routers[1]));
    let differ = first.iter().zip(&second).filter(|(a, b)| a != b).count();
    assert_eq!((first.len(), differ), (KEYS, 0));
    let used: BTreeSet<_> = first.into_iter().collect();
    assert_eq!(used.len(), 7, "keys spread over all servers");
}
