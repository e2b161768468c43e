//! The HTTP contract of trusted listeners, case by case: the Stargate rules, section 9.1.

mod support;

use std::sync::Arc;

use serde_json::json;
use support::stargate::*;
use support::*;

const CHAT: &str = "/v1/chat/completions";
const ENDPOINTS: [&str; 3] = [CHAT, "/v1/responses", "/v1/embeddings"];

/// A router with one server for `m`.
fn one() -> (Router, Engine) {
    let engine = engine();
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    (router, engine)
}

#[track_caller]
fn send(router: &Router, bytes: &[u8]) -> Response {
    let mut client = router.client();
    client.send(bytes);
    client.response()
}

#[test]
fn c1_healthz_is_200_always() {
    let router = Gateway::new().start();
    let response = router.get("/healthz");
    assert_bare(&response, 200);
}

#[test]
fn c2_readyz_is_200_and_503_once_shutdown_began() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        held.pass(seconds(20));
        exchange.reply_ok()
    });
    let mut router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    assert_bare(&router.get("/readyz"), 200);
    let mut busy = router.client();
    busy.send(&wish("m", &[]));
    engine.wait_requests(1);
    router.signal(libc::SIGTERM);
    eventually(seconds(5), "readyz says 503", || {
        let mut client = Client::try_connect(router.http()).map_err(|e| e.to_string())?;
        client.send(&request("GET", "/readyz", &[], b""));
        match client.try_response_to("GET") {
            Ok(response) if response.status == 503 => {
                assert!(response.body.is_empty());
                Ok(())
            }
            Ok(response) => Err(response.status.to_string()),
            Err((fault, _)) => Err(fault.to_string()),
        }
    });
    gate.open();
    assert_eq!(busy.response().status, 200, "what runs when the shutdown begins is finished");
    assert_eq!(router.wait_exit(seconds(10)), Some(0));
}

/// C3, C4, C5: each required header on each endpoint.
#[test]
fn c3_c4_c5_a_missing_required_header_is_400_and_the_server_is_untouched() {
    let (router, engine) = one();
    for path in ENDPOINTS {
        for (missing, kept) in [
            ("x-model", [("x-request-id", "r"), ("x-input-tokens", "1")]),
            ("x-request-id", [("x-model", "m"), ("x-input-tokens", "1")]),
            ("x-input-tokens", [("x-model", "m"), ("x-request-id", "r")]),
        ] {
            assert_bare(&send(&router, &request("POST", path, &kept, b"{}")), 400);
            // Blank is as good as absent.
            let mut blank = kept.to_vec();
            blank.push((missing, "   "));
            assert_bare(&send(&router, &request("POST", path, &blank, b"{}")), 400);
        }
    }
    assert_eq!(engine.request_count(), 0);
}

#[test]
fn c6_input_tokens_that_are_no_count_are_400() {
    let (router, engine) = one();
    for bad in ["bad", " ", "-1", "1.5", "18446744073709551616", "0x10", "1 2"] {
        assert_bare(&ask(&router, "m", &[("x-input-tokens", bad)]), 400);
    }
    assert_eq!(engine.request_count(), 0);
    for good in ["0", "+7", "18446744073709551615", "  42  "] {
        assert_eq!(ask(&router, "m", &[("x-input-tokens", good)]).status, 200, "{good:?}");
    }
}

#[test]
fn c7_a_priority_out_of_range_is_400() {
    let (router, _engine) = one();
    for bad in ["4294967296", "-1", "", "high", "1.0"] {
        assert_bare(&ask(&router, "m", &[("x-priority", bad)]), 400);
    }
    assert_eq!(ask(&router, "m", &[("x-priority", "4294967295")]).status, 200);
}

#[test]
fn c8_a_fractional_slo_is_400() {
    let (router, _engine) = one();
    for name in ["x-request-slo-ms", "x-max-wait-ms"] {
        for bad in ["1.5", "", "-3", "soon"] {
            assert_bare(&ask(&router, "m", &[(name, bad)]), 400);
        }
        assert_eq!(ask(&router, "m", &[(name, "15")]).status, 200);
    }
}

#[test]
fn c9_a_retry_budget_that_is_no_number_is_400() {
    let (router, _engine) = one();
    assert_bare(&ask(&router, "m", &[("x-stargate-max-wait-ms", "not-a-number")]), 400);
    assert_eq!(ask(&router, "m", &[("x-stargate-max-wait-ms", "100")]).status, 200);
    // The name is configurable, and an empty one disables it.
    let engine = engine();
    let other = Gateway::new().flag("--proxy-retry-budget-header", "x-budget").start();
    register(&other, &mut [Registration::new("a", &engine, "m", idle())]);
    assert_bare(&ask(&other, "m", &[("x-budget", "not-a-number")]), 400);
    assert_eq!(ask(&other, "m", &[("x-stargate-max-wait-ms", "not-a-number")]).status, 200);
    let none = Gateway::new().flag("--proxy-retry-budget-header", "").start();
    register(&none, &mut [Registration::new("a", &engine, "m", idle())]);
    assert_eq!(ask(&none, "m", &[("x-stargate-max-wait-ms", "not-a-number")]).status, 200);
}

#[test]
fn c10_an_unknown_routing_method_is_400() {
    let router = Gateway::new().start();
    let response = ask(&router, "m", &[("x-routing-method", "sticky")]);
    assert_code(&response, 400, "unknown_method");
    assert!(response.text().contains("sticky"), "the message names the value: {}", response.text());
}

#[test]
fn c11_a_blank_routing_method_is_400() {
    let router = Gateway::new().start();
    let mut client = router.client();
    let bytes = request(
        "POST",
        CHAT,
        &[("x-request-id", "r"), ("x-input-tokens", "1"), ("x-model", "m"), ("x-routing-method", "   ")],
        b"{}",
    );
    client.send(&bytes);
    assert_code(&client.response(), 400, "unknown_method");
}

#[test]
fn c12_a_method_outside_the_file_is_unavailable() {
    let engine = engine();
    let router = Gateway::new().lb_config("{}").start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    assert_code(&ask(&router, "m", &[("x-routing-method", "round-robin")]), 400, "unavailable");
    assert_eq!(ask(&router, "m", &[("x-routing-method", "power-of-n")]).status, 200);
    assert_eq!(engine.request_count(), 1);
}

#[test]
fn c13_without_a_file_every_method_is_available_in_any_spelling() {
    let (router, _engine) = one();
    for method in [
        "Power_Of_Two",
        "groq_multiregion",
        "PULSAR",
        "powerOf2",
        "power-of-n",
        "Round_Robin",
        "random",
        "wait-and-widen",
        "pulsar_multiregion",
        " Pulsar-Wait-And-Widen ",
    ] {
        let headers = [("x-routing-method", method), ("x-cache-affinity-key", "k")];
        assert_eq!(ask(&router, "m", &headers).status, 200, "{method:?}");
    }
}

#[test]
fn c14_path_query_and_body_reach_the_server_as_they_came() {
    let (router, engine) = one();
    let body = pattern(3, 5_000);
    let response = send(&router, &wish_at("/v1/responses?trace=1", "m", &[], &body));
    assert_eq!(response.status, 200);
    let seen = engine.wait_requests(1).remove(0);
    assert_eq!(seen.target, "/v1/responses?trace=1");
    assert_bytes(&seen.body, &body, "the body at the server");
}

#[test]
fn c15_an_unusual_answer_is_preserved_and_names_its_server() {
    let engine = Engine::start(|exchange| {
        exchange.reply(
            418,
            &[("Content-Type", "text/plain"), ("X-Kettle", "on"), ("Retry-After", "7")],
            b"short and stout",
        )
    });
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    let response = ask(&router, "m", &[]);
    assert_eq!((response.status, response.text().as_str()), (418, "short and stout"));
    assert_eq!(response.header("X-Kettle").as_deref(), Some("on"));
    assert_eq!(response.header("Retry-After").as_deref(), Some("7"));
    assert_eq!(response.header("x-inference-server-id").as_deref(), Some("a"));
    assert_eq!(response.header("x-inference-server-url"), Some(engine.url()));
    assert_eq!(response.header("x-stargate-cluster-id").as_deref(), Some("a"));
}

#[test]
fn c16_the_servers_retry_words_stay_behind() {
    let engine = Engine::start(|exchange| {
        let words = [
            ("x-stargate-retryable", "true"),
            ("x-stargate-retry-reason", "because"),
            ("x-stargate-retry-after-ms", "5"),
            ("x-stargate-expected-queue-ms", "6"),
            ("x-stargate-error-code", "z"),
            ("x-inference-server-id", "somebody else"),
        ];
        exchange.reply(200, &words, b"{}")
    });
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    let response = ask(&router, "m", &[]);
    assert_eq!(sid(&response), "a", "set by the router, once");
    for name in [
        "x-stargate-retryable",
        "x-stargate-retry-reason",
        "x-stargate-retry-after-ms",
        "x-stargate-expected-queue-ms",
        "x-stargate-error-code",
    ] {
        assert_eq!(response.header(name), None, "{name}");
    }
}

#[test]
fn c17_a_client_cannot_speak_for_the_router() {
    let (router, engine) = one();
    let response = ask(
        &router,
        "m",
        &[
            ("x-stargate-expected-queue-ms", "9999"),
            ("x-stargate-error-code", "z"),
            ("x-stargate-retryable", "true"),
            ("x-routing-method", "round-robin"),
            ("x-priority", "3"),
            ("x-max-wait-ms", "5"),
            ("x-cache-affinity-key", "k"),
        ],
    );
    assert_eq!(response.status, 200);
    let seen = engine.wait_requests(1).remove(0).head;
    assert_eq!(seen.one("x-stargate-expected-queue-ms").as_deref(), Some("0"));
    for name in ["x-stargate-error-code", "x-stargate-retryable", "x-routing-method"] {
        assert_eq!(seen.one(name), None, "{name}");
    }
    for (name, value) in [
        ("x-priority", "3"),
        ("x-max-wait-ms", "5"),
        ("x-cache-affinity-key", "k"),
        ("x-model", "m"),
        ("x-request-id", "r-1"),
    ] {
        assert_eq!(seen.one(name).as_deref(), Some(value), "{name} goes on");
    }
    let parent = seen.one("traceparent").expect("a trace context of the attempt");
    assert_eq!((parent.len(), &parent[..3]), (55, "00-"), "{parent}");
}

/// Section 4.3: the client's trace goes on, with the attempt as its parent.
#[test]
fn c17_the_clients_trace_is_carried_on() {
    let (router, engine) = one();
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    assert_eq!(ask(&router, "m", &[("traceparent", trace), ("tracestate", "vendor=1")]).status, 200);
    let seen = engine.wait_requests(1).remove(0).head;
    let parent = seen.one("traceparent").expect("a trace context");
    assert_eq!(&parent[..36], &trace[..36], "the same trace");
    assert_ne!(&parent[36..52], &trace[36..52], "another span");
    assert_eq!(seen.one("tracestate").as_deref(), Some("vendor=1"));
}

#[test]
fn c18_an_answer_names_server_url_and_cluster() {
    let engine = engine();
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle()).cluster("c1")]);
    let response = ask(&router, "m", &[]);
    assert_eq!(sid(&response), "a");
    assert_eq!(response.header("x-inference-server-url"), Some(engine.url()));
    assert_eq!(response.header("x-stargate-cluster-id").as_deref(), Some("c1"));
}

/// A router where `a` and `b` are served without a routing key and `k` with one.
fn three_models() -> (Router, Engine, Engine) {
    let (open, scoped) = (engine(), engine());
    let router = Gateway::new().start();
    let mut all = [
        Registration::new("open", &open, "b", idle()).model("a", "active", idle()),
        Registration::new("scoped", &scoped, "k", idle()).key("secret-key"),
    ];
    register(&router, &mut all);
    (router, open, scoped)
}

#[test]
fn c19_models_are_those_without_a_key_sorted() {
    let (router, _open, _scoped) = three_models();
    let response = router.get("/v1/models");
    assert_eq!((response.status, response.json()), (200, json!({"model_ids": ["a", "b"]})));
}

#[test]
fn c20_models_can_be_asked_for_by_name() {
    let (router, _open, _scoped) = three_models();
    let response = router.get("/v1/models?model_ids=%20b%20&model_ids=zz");
    assert_eq!((response.status, response.json()), (200, json!({"model_ids": ["b"]})));
    assert_eq!(
        router.get("/v1/models?model_ids=b&model_ids=a&model_ids=b").json(),
        json!({"model_ids": ["a", "b"]})
    );
    assert_eq!(router.get("/v1/models?model_ids=k").json(), json!({"model_ids": []}));
}

#[test]
fn c21_a_blank_model_filter_is_400() {
    let (router, _open, _scoped) = three_models();
    for query in ["model_ids=", "model_ids=a&model_ids=%20", "model_ids"] {
        assert_bare(&router.get(&format!("/v1/models?{query}")), 400);
    }
}

#[test]
fn c22_debug_state_shows_models_and_no_url_nor_secret() {
    let (router, open, scoped) = three_models();
    let response = router.get("/debug/state");
    let json = response.json();
    assert_eq!((response.status, &json["active_model_ids"]), (200, &json!(["a", "b", "k"])));
    assert_eq!(json["config"]["stargate_id"], "sg-test");
    for field in [
        "grpc_listen_addr",
        "model_discovery_listen_addr",
        "http_listen_addr",
        "metrics_listen_addr",
        "advertise_addr",
        "stargate_discovery_dns_name",
        "tunnel_protocol",
        "backend_connectivity",
        "direct_quic_connections",
    ] {
        assert!(json["config"].get(field).is_some(), "{field} in {json:#}");
    }
    for secret in [open.url(), scoped.url(), "secret-key".to_owned()] {
        assert!(!response.text().contains(&secret), "{secret} in {}", response.text());
    }
}

#[test]
fn c23_twenty_streams_at_once_are_all_complete() {
    let engine = Engine::start(|exchange| {
        exchange.stream_head()?;
        for event in 0..20 {
            exchange.chunk(format!("data: {{\"event\":{event}}}\n\n").as_bytes())?;
            exchange.pause(ms(2));
        }
        exchange.chunk(b"data: [DONE]\n\n")?;
        exchange.end()
    });
    let router = Gateway::new().shards(2).start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    let mut want = (0..20).map(|event| format!("data: {{\"event\":{event}}}\n\n")).collect::<String>();
    want.push_str("data: [DONE]\n\n");
    std::thread::scope(|scope| {
        for _ in 0..20 {
            let (router, want) = (&router, &want);
            scope.spawn(move || {
                let response = ask(router, "m", &[]);
                assert_eq!(sid(&response), "a");
                assert_eq!(&response.text(), want);
            });
        }
    });
}

#[test]
fn c24_a_required_affinity_key_that_is_missing_is_400() {
    let engine = engine();
    let router = Gateway::new()
        .lb_config(r#"{"models":{"m":{"algorithm":"pulsar","require_cache_affinity_key":true}}}"#)
        .start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
    assert_bare(&ask(&router, "m", &[]), 400);
    assert_bare(&ask(&router, "m", &[("x-cache-affinity-key", "  ")]), 400);
    assert_eq!(engine.request_count(), 0);
    assert_eq!(ask(&router, "m", &[("x-cache-affinity-key", "k")]).status, 200);
}

#[test]
fn c25_a_routing_key_reaches_only_its_own_servers() {
    let (a, b) = (engine(), engine());
    let router = Gateway::new().start();
    let mut all =
        [Registration::new("a", &a, "m", idle()).key("A"), Registration::new("b", &b, "m", idle()).key("B")];
    register(&router, &mut all);
    for _ in 0..10 {
        assert_eq!(sid(&ask(&router, "m", &[("x-routing-key", "A")])), "a");
        assert_eq!(sid(&ask(&router, "m", &[("x-routing-key", " B ")])), "b");
    }
}

#[test]
fn c26_without_its_key_a_scoped_model_is_404() {
    let engine = engine();
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &engine, "m", idle()).key("A")]);
    for headers in [&[][..], &[("x-routing-key", "B")], &[("x-routing-key", " ")]] {
        let response = ask(&router, "m", headers);
        assert_code(&response, 404, "no_eligible_candidates");
        assert_eq!(
            response.json(),
            json!({"error": "no eligible candidates", "code": "no_eligible_candidates"})
        );
    }
}

#[test]
fn c27_models_are_never_crossed() {
    let (x, y) = (engine(), engine());
    let router = Gateway::new().start();
    let mut all = [Registration::new("x", &x, "m", idle()), Registration::new("y", &y, "n", idle())];
    register(&router, &mut all);
    for _ in 0..20 {
        assert_eq!(sid(&ask(&router, "m", &[])), "x");
        assert_eq!(sid(&ask(&router, "n", &[])), "y");
    }
}

/// Section 4.1: what is not an endpoint.
#[test]
fn other_paths_are_404_and_other_methods_405() {
    let (router, engine) = one();
    for (method, path, status) in [
        ("GET", "/v1/other", 404),
        ("POST", "/v1/completions", 404),
        ("GET", "/", 404),
        ("GET", CHAT, 405),
        ("PUT", "/v1/embeddings", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/healthz", 405),
        ("DELETE", "/debug/state", 405),
    ] {
        let mut client = router.client();
        client.send(&request(method, path, &[], b""));
        let response = client.response_to(method);
        assert_bare(&response, status);
    }
    assert_eq!(engine.request_count(), 0);
}

/// Section 4.2: the first failure answers, and a routing expression that fails is told before what comes after it.
#[test]
fn checks_answer_in_their_order() {
    let (router, _engine) = one();
    // Syntax of the method before the numbers; the numbers before the method's availability.
    assert_code(
        &ask(&router, "m", &[("x-routing-method", "nonsense"), ("x-priority", "x")]),
        400,
        "unknown_method",
    );
    assert_bare(&ask(&router, "m", &[("x-routing-method", "pulsar;widen=2"), ("x-priority", "x")]), 400);
    assert_code(
        &ask(&router, "m", &[("x-routing-method", "pulsar;widen=2"), ("x-stargate-max-wait-ms", "x")]),
        400,
        "unknown_parameter",
    );
    assert_bare(&ask(&router, "m", &[("x-request-id", " "), ("x-routing-method", "nonsense")]), 400);
}

/// Section 4.3: what is between two hops only, and what is not.
#[test]
fn hop_by_hop_fields_stay_behind_and_everything_else_goes_on() {
    let (router, engine) = one();
    let response = ask(
        &router,
        "m",
        &[
            ("Connection", "keep-alive, x-nominated"),
            ("x-nominated", "goes on"),
            ("Keep-Alive", "timeout=5"),
            ("Proxy-Connection", "keep-alive"),
            ("TE", "trailers"),
            ("Authorization", "Bearer of-the-client"),
            ("x-repeat", "1"),
            ("X-Repeat", "2"),
        ],
    );
    assert_eq!(response.status, 200);
    let seen = engine.wait_requests(1).remove(0).head;
    for name in ["keep-alive", "proxy-connection", "te", "trailer", "upgrade"] {
        assert!(!seen.has(name), "{name} in {}", seen.text());
    }
    assert_eq!(seen.one("x-nominated").as_deref(), Some("goes on"));
    assert_eq!(seen.one("authorization").as_deref(), Some("Bearer of-the-client"));
    assert_eq!(seen.all("x-repeat"), [b"1", b"2"]);
}
