//! Retries, state and routing expressions, case by case: the Stargate rules, section 9.3.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use support::stargate::*;
use support::*;

/// Answers everything with that status and says that another server may be tried.
fn refusing(status: u16, reason: &'static str) -> Engine {
    Engine::start(move |exchange| {
        let mut headers = vec![("x-stargate-retryable", "true"), ("Retry-After", "9")];
        if !reason.is_empty() {
            headers.push(("x-stargate-retry-reason", reason));
        }
        exchange.reply(status, &headers, b"refused")
    })
}

/// `a` is preferred by its empty queue.
fn pair(router: &Router, a: &Engine, b: &Engine) {
    let slower = but(json!({"queued_input_size": 500}));
    let mut all = [Registration::new("a", a, "m", idle()), Registration::new("b", b, "m", slower)];
    register(router, &mut all);
}

#[track_caller]
fn counted(router: &Router, name: &str, labels: &[(&str, &str)], value: f64) {
    router.wait_metric(&format!("stargate_{name}"), labels, value, seconds(5));
}

#[test]
fn r1_a_refusal_moves_on_to_another_cluster() {
    let (a, b) = (refusing(429, "upstream_admission_rejected"), engine());
    let router = Gateway::new().start();
    pair(&router, &a, &b);
    assert_eq!(sid(&ask(&router, "m", &[])), "b");
    assert_eq!((a.request_count(), b.request_count()), (1, 1));
    counted(
        &router,
        "proxy_attempts_total",
        &[("inference_server_id", "a"), ("result", "upstream_429")],
        1.0,
    );
    counted(
        &router,
        "proxy_attempts_total",
        &[("inference_server_id", "b"), ("result", "upstream_200")],
        1.0,
    );
    counted(
        &router,
        "proxy_retries_total",
        &[("model", "m"), ("reason", "upstream_admission_rejected")],
        1.0,
    );
    counted(&router, "requests_total", &[("inference_server_id", "b"), ("status", "200")], 1.0);
    assert_eq!(router.metrics().sum("stargate_requests_total", &[]), 1.0);
}

#[test]
fn r2_the_last_refusal_is_passed_through() {
    let (a, b, c) = (refusing(429, ""), refusing(429, ""), refusing(429, ""));
    let router = Gateway::new().flag("--proxy-max-request-retries", "1").start();
    let mut all = [
        Registration::new("a", &a, "m", idle()),
        Registration::new("b", &b, "m", idle()),
        Registration::new("c", &c, "m", idle()),
    ];
    register(&router, &mut all);
    let response = ask(&router, "m", &[]);
    assert_eq!((response.status, response.text().as_str()), (429, "refused"));
    assert_eq!(response.header("x-stargate-retryable"), None);
    assert_eq!(response.header("Retry-After").as_deref(), Some("9"));
    assert_eq!(a.request_count() + b.request_count() + c.request_count(), 2);
    let labels = [("model", "m"), ("reason", "retryable_upstream_response")];
    counted(&router, "proxy_retry_exhausted_total", &labels, 1.0);
    counted(&router, "proxy_retries_total", &labels, 1.0);
}

/// Section 5.6: with nobody left it ends as 503, not as the refusal.
#[test]
fn r2_a_lone_refusing_server_ends_as_503() {
    let a = refusing(429, "");
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    assert_bare(&ask(&router, "m", &[]), 503);
    counted(&router, "proxy_retry_exhausted_total", &[("reason", "no_eligible_backend")], 1.0);
}

#[test]
fn r3_without_connect_retries_a_closed_server_is_502() {
    let mut a = engine();
    let router = Gateway::new().flag("--proxy-max-connect-retries", "0").start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    a.stop();
    assert_bare(&ask(&router, "m", &[]), 502);
    counted(&router, "proxy_retry_exhausted_total", &[("reason", "connect_retries_exhausted")], 1.0);
    assert_eq!(router.metrics().sum("stargate_proxy_retries_total", &[]), 0.0);
}

#[test]
fn r4_a_server_that_closed_and_reopened_is_connected_anew() {
    let mut a = engine();
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
    a.stop();
    a.listen();
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
    counted(&router, "proxy_retries_total", &[("model", "m"), ("reason", "hot_path_reconnect")], 1.0);
}

#[test]
fn r5_a_declared_length_over_the_replay_limit_is_413_before_routing() {
    let router = Gateway::new().flag("--proxy-max-replay-body-bytes", "8").start();
    let mut client = router.client();
    client.send(&wish_at("/v1/chat/completions", "unknown", &[], b"fifteen bytes!!"));
    assert_bare(&client.response(), 413);
}

#[test]
fn r6_a_chunked_body_that_outgrew_the_replay_limit_cannot_be_retried() {
    let (a, b) = (refusing(429, ""), refusing(429, ""));
    let router = Gateway::new().flag("--proxy-max-replay-body-bytes", "8").start();
    pair(&router, &a, &b);
    let mut client = router.client();
    client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nx-request-id: r\r\nx-input-tokens: 1\r\nx-model: m\r\n\
          Transfer-Encoding: chunked\r\n\r\nf\r\nfifteen bytes!!\r\n0\r\n\r\n",
    );
    assert_bare(&client.response(), 413);
    assert_eq!(a.request_count() + b.request_count(), 1);
    counted(&router, "requests_total", &[("status", "413")], 1.0);
}

#[test]
fn r7_a_sibling_in_the_same_cluster_comes_first() {
    let (mut down, sibling, other) = (engine(), engine(), engine());
    let router = Gateway::new().lb_config(r#"{"default":"round-robin"}"#).start();
    let busy = but(json!({"queued_input_size": 100000}));
    let mut all = [
        Registration::new("x1", &down, "m", busy.clone()).cluster("x"),
        Registration::new("x2", &sibling, "m", busy).cluster("x"),
        Registration::new("y", &other, "m", idle()).cluster("y"),
    ];
    register(&router, &mut all);
    down.stop();
    assert_eq!(sid(&ask(&router, "m", &[])), "x2");
    counted(&router, "proxy_retries_total", &[("reason", "connect_failover")], 1.0);
    assert_eq!(other.request_count(), 0);
}

#[test]
fn r8_a_503_without_the_retry_word_is_passed_through() {
    let a = Engine::start(|exchange| exchange.reply(503, &[], b"overloaded"));
    let b = engine();
    let router = Gateway::new().start();
    pair(&router, &a, &b);
    let response = ask(&router, "m", &[]);
    assert_eq!((response.status, response.text().as_str()), (503, "overloaded"));
    assert_eq!(response.header("x-inference-server-id").as_deref(), Some("a"));
    assert_eq!(b.request_count(), 0);
    // An absent word counts as a yes where the signal is not required; another value than true does not.
    let no = Engine::start(|exchange| exchange.reply(503, &[("x-stargate-retryable", "no")], b"no"));
    for (first, served_by) in [(&a, "b"), (&no, "a")] {
        let router = Gateway::new().flag("--proxy-require-pylon-retry-signal", "false").start();
        pair(&router, first, &b);
        assert_eq!(ask(&router, "m", &[]).header("x-inference-server-id").as_deref(), Some(served_by));
    }
}

/// Five servers, one per cluster, by one engine.
fn five(router: &Router, engine: &Engine) {
    let mut all: Vec<_> =
        ["a", "b", "c", "d", "e"].iter().map(|id| Registration::new(id, engine, "m", idle())).collect();
    register(router, &mut all);
}

#[test]
fn r9_two_expressions_keep_their_own_primaries() {
    let (engine, router) = (engine(), Gateway::new().start());
    five(&router, &engine);
    let primary = |method: &str, key: &str| {
        sid(&ask(&router, "m", &[("x-routing-method", method), ("x-cache-affinity-key", key)]))
    };
    let mut differ = 0;
    for number in 0..10 {
        let key = format!("key-{number}");
        let (a, b) = (primary("pulsar;seed=a", &key), primary("pulsar;seed=b", &key));
        for _ in 0..3 {
            assert_eq!(
                (primary("pulsar;seed=a", &key), primary("pulsar;seed=b", &key)),
                (a.clone(), b.clone())
            );
        }
        differ += usize::from(a != b);
    }
    assert!(differ > 0, "two seeds are two rankings");
    let log = router.logged("pulsar;seed=b");
    let built = log.matches("routing expression configuration built").count();
    assert_eq!(built, 2, "both stay at hand:\n{log}");
}

#[test]
fn r10_another_spelling_is_another_value_with_its_own_state() {
    let (engine, router) = (engine(), Gateway::new().start());
    five(&router, &engine);
    let turn = |method: &str| sid(&ask(&router, "m", &[("x-routing-method", method)]));
    let (lower, upper) = ("round-robin;require_input_tokens=false", "ROUND-ROBIN;require_input_tokens=false");
    assert_eq!([turn(lower), turn(lower), turn(upper), turn(lower), turn(upper)], ["a", "b", "a", "c", "b"]);
    assert_eq!([turn("round-robin"), turn("round-robin")], ["a", "b"], "nor is it the plain name's");
}

/// R11 to R15: each value and its code. The file gives every algorithm, and no queue-time pair.
#[test]
fn r11_to_r15_what_is_wrong_with_an_expression_is_told_by_its_code() {
    let (engine, router) = (engine(), Gateway::new().start());
    five(&router, &engine);
    for (value, code) in [
        ("pulsar;seed", "malformed_expression"),
        ("pulsar;seed=x;seed=y", "malformed_expression"),
        ("pulsar;seed=x,random", "malformed_expression"),
        ("wait-and-widen;n=0.0625", "malformed_expression"),
        ("wait-and-widen;n=1000000000000000", "malformed_expression"),
        ("pulsar;", "malformed_expression"),
        ("pulsar;seed=?1", "malformed_expression"),
        ("sticky;seed=x", "unknown_method"),
        ("wait-and-widen;fallback_max_queued=1", "not_applicable"),
        ("power-of-n;sample_count=0", "invalid_value"),
        ("power-of-n;sample_count=999", "invalid_value"),
        ("power-of-n;sample_count=\"1.0\"", "invalid_value"),
        ("wait-and-widen;max_queue_time_floor_ms=100", "inert_combination"),
        ("wait-and-widen;n=0", "inert_value"),
        ("pulsar;widen=2", "unknown_parameter"),
    ] {
        let response = ask(&router, "m", &[("x-routing-method", value), ("x-cache-affinity-key", "k")]);
        assert_code(&response, 400, code);
    }
    assert_eq!(engine.request_count(), 0);
    let log = router.logged("inert_combination");
    assert!(log.contains("invalid routing algorithm header") && log.contains("rejection_reason"), "{log}");
    // R12 to the letter: these two are malformed whatever the algorithm.
    for value in ["pulsar;n=0.0625", "pulsar;n=1000000000000000"] {
        assert_code(&ask(&router, "m", &[("x-routing-method", value)]), 400, "malformed_expression");
    }
}

#[test]
fn r16_a_live_id_cannot_be_taken() {
    let (engine, other) = (engine(), engine());
    let router = Gateway::new().start();
    let mut first = [Registration::new("a", &engine, "m", idle())];
    register(&router, &mut first);
    let second = Registration::new("a", &other, "m", idle());
    assert_eq!(second.put(&router).status, 409);
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
    assert_eq!((engine.request_count(), other.request_count()), (1, 0), "the first stays");
    first[0].renew(&router);
}

#[test]
fn r17_a_registration_that_ends_makes_its_model_unroutable() {
    let engine = engine();
    let router = Gateway::new().flag("--deregistered-model-grace-ms", "0").start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    assert_eq!(ask(&router, "m", &[]).status, 200);
    assert!(router.admin_ask("DELETE", "/v1/registrations/a", "").status < 300);
    wait_active(&router, "", "m", 0);
    assert_code(&ask(&router, "m", &[]), 404, "no_eligible_candidates");
    assert!(router.metrics().has("stargate_active_inference_servers"), "the gauge stays, at 0");
}

/// "The request router also returns this after a model's last pylon leaves, for example during an instance replacement,
/// for 15 minutes by default (--deregistered-model-grace-ms, 0 disables)."
#[test]
fn r17_within_the_grace_a_model_that_left_is_503() {
    let engine = engine();
    let router = Gateway::new().flag("--deregistered-model-grace-ms", "1500").start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    router.admin_ask("DELETE", "/v1/registrations/a", "");
    wait_active(&router, "", "m", 0);
    assert_bare(&ask(&router, "m", &[]), 503);
    assert_code(&ask(&router, "never-seen", &[]), 404, "no_eligible_candidates");
    ask_until(&router, "m", &[], "the grace ends", |response| response.status == 404);
    let mut back = [Registration::new("a", &engine, "m", idle())];
    register(&router, &mut back);
    assert_eq!(ask(&router, "m", &[]).status, 200);
}

#[test]
fn r18_a_free_slot_means_no_queue_until_it_is_taken() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let first = AtomicBool::new(true);
    let engine = Engine::start(move |exchange| {
        if first.swap(false, Ordering::Relaxed) {
            held.pass(seconds(20));
        }
        exchange.reply_ok()
    });
    let router = Gateway::new().start();
    let stats = json!({
        "last_mean_input_tps": 8000, "queued_input_size": 80000, "num_running_queries": 24,
        "max_engine_concurrency": 25, "queue_time_estimate_ms_by_priority": {"0": 10000}
    });
    register(&router, &mut [Registration::new("a", &engine, "m", but(stats))]);
    let mut running = router.client();
    running.send(&wish("m", &[("x-input-tokens", "8000")]));
    engine.wait_requests(1);
    let mut next = router.client();
    next.send(&wish("m", &[("x-input-tokens", "8000")]));
    assert_eq!(next.response().status, 200);
    gate.open();
    assert_eq!(running.response().status, 200);
    let told: Vec<_> = engine
        .wait_requests(2)
        .iter()
        .map(|request| request.head.one("x-stargate-expected-queue-ms").expect("known"))
        .collect();
    assert_eq!(told, ["0", "11000"]);
}

#[test]
fn r19_the_same_model_under_another_key_has_its_own_turns() {
    let engine = engine();
    let router = Gateway::new().lb_config(r#"{"default":"round-robin"}"#).start();
    let mut all = Vec::new();
    for key in ["A", "B"] {
        for number in 0..3 {
            all.push(Registration::new(&format!("{key}{number}"), &engine, "m", idle()).key(key));
        }
    }
    register(&router, &mut all);
    let turn = |key: &str| sid(&ask(&router, "m", &[("x-routing-key", key)]));
    assert_eq!(
        [turn("A"), turn("A"), turn("B"), turn("A"), turn("B"), turn("A")],
        ["A0", "A1", "B0", "A2", "B1", "A0"]
    );
}
