//! "Per-server knobs."
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// Sets its flag when the thread that has it panics.
struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// "Weight 1.0, max concurrency 32, max input tokens 0 (unbounded), routing tier empty."
#[test]
fn defaults_are_as_stated() {
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &[]).start();
    let file = router.directory().join("ringway.toml");
    let checked = run_to_exit(&["check", file.to_str().expect("UTF-8")], seconds(10));
    for line in ["weight = 1.0", "max_concurrency = 32", "max_input_tokens = 0", "routing_tier = \"\""] {
        assert!(checked.stdout.lines().any(|have| have.trim() == line), "{line} in\n{}", checked.stdout);
    }
    let response = router.post(CHAT, &chat("m", "x"));
    assert_eq!(response.lifeboat("Weight").as_deref(), Some("1"));
    assert_eq!(response.lifeboat("Inflight").as_deref(), Some("1/32"));
    assert_eq!(response.lifeboat("Pool").as_deref(), Some("default"));
}

/// "Weight: share of traffic in the pool. 0 drains — the backend stops receiving traffic without being stopped."
#[test]
fn weight_0_stops_traffic_whatever_the_algorithm() {
    for name in ALGORITHMS {
        let engines = answering(2);
        let router = router_over(&engines, name, &[], &[]);
        let headers = [("X-Lifeboat-Session-Id", "s")];
        let mut client = router.client();
        let mut ask = || server(&client.ask("POST", CHAT, &headers, &prompt(1, 4000)));
        let home = ask();
        router.set_weight(&home, "0");
        for _ in 0..6 {
            assert_ne!(ask(), home, "{name}");
        }
        assert_eq!(router.server_state(&home)["weight"].as_f64(), Some(0.0), "{name}");
        let other = if home == "a" { "b" } else { "a" };
        router.set_weight(other, "0");
        let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
        response.assert_rejected(503, "no_healthy_server").assert_retry_after();
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("p"), "{name}");
        router.set_weight(other, "0.5");
        let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
        assert_eq!(
            (server(&response).as_str(), response.lifeboat("Weight").as_deref()),
            (other, Some("0.5"))
        );
    }
}

/// "Max concurrency: in-flight ceiling. 0 disables the gate." (The ceiling is in `capacity.rs`.)
#[test]
fn max_concurrency_0_disables_the_gate() {
    let gate = Gate::new();
    let engines = [holding(&gate)];
    let router = router_over(&engines, "kv-aware", &["routing_mode = \"reject\""], &["max_concurrency = 0"]);
    let mut clients: Vec<Client> = (0..60)
        .map(|_| {
            let mut client = router.client();
            client.send(&request("POST", CHAT, &[], &chat("m", "x")));
            client
        })
        .collect();
    engines[0].wait_requests(60);
    gate.open();
    let mut inflight: Vec<u32> = clients
        .iter_mut()
        .map(|client| {
            let value = client.response().lifeboat("Inflight").expect("a count");
            value.strip_suffix("/0").unwrap_or_else(|| panic!("{value}")).parse().expect("a count")
        })
        .collect();
    inflight.sort_unstable();
    assert_eq!(inflight, (1..=60).collect::<Vec<_>>());
}

/// "Max input tokens: requests estimated larger than this skip this backend."
#[test]
fn requests_estimated_larger_than_max_input_tokens_skip_the_backend() {
    for name in ALGORITHMS {
        let engines = answering(2);
        let router = Setup::new()
            .pool("p", &[&pool_of(name)])
            .server("small", &engines[0], &["max_input_tokens = 1000"])
            .server("large", &engines[1], &["max_input_tokens = 20000"])
            .start();
        let headers = |number: u64| format!("s-{number}");
        // Some 250 tokens: for both.
        let short: BTreeSet<String> = (0..16)
            .map(|number| {
                let id = headers(number);
                let body = prompt(number, 1000);
                server(&router.client().ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &body))
            })
            .collect();
        if name != "kv-aware" || short.len() == 2 {
            assert_eq!(short.len(), 2, "{name}: {short:?}");
        }
        // Some 10,000: only for one.
        for number in 0..6 {
            let id = headers(number);
            let response =
                router.client().ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &prompt(number, 40_000));
            assert_eq!(server(&response), "large", "{name}");
        }
        // Some 50,000: for none, and waiting does not help.
        let response = router.post(CHAT, &prompt(1, 200_000));
        response.assert_rejected(413, "input_too_long");
        assert_eq!(response.header("Retry-After"), None);
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("p"), "{name}");
        let message = response.json()["error"]["message"].as_str().expect("text").to_owned();
        assert!(message.contains("max_input_tokens"), "{message}");
        // A body whose text is not the prompt's: an image is not counted by its bytes.
        let image = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]}}"#,
            "A".repeat(300_000)
        );
        assert_eq!(router.post(CHAT, image.as_bytes()).status, 200, "{name}");
    }
}

/// Token ids count as what they are, not by their digits.
#[test]
fn token_ids_count_as_tokens() {
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &["max_input_tokens = 1000"]).start();
    let ids = |count: usize| {
        let ids: Vec<String> = (0..count).map(|id| (100_000 + id).to_string()).collect();
        format!(r#"{{"model":"m","prompt":[{}]}}"#, ids.join(",")).into_bytes()
    };
    assert_eq!(router.post("/v1/completions", &ids(990)).status, 200);
    router.post("/v1/completions", &ids(1100)).assert_rejected(413, "input_too_long");
}

/// "Routing tier: isolates a sub-pool." Tiers never borrow from each other, not even when they are idle or full.
#[test]
fn a_routing_tier_isolates_a_sub_pool() {
    let (plain_gate, gold_gate) = (Gate::new(), Gate::new());
    let engines = [holding_some(&plain_gate), holding_some(&gold_gate), holding_some(&gold_gate)];
    let router = Setup::new()
        .pool("p", &[&pool_of("least-connections"), "routing_mode = \"reject\""])
        .server("plain", &engines[0], &["max_concurrency = 1"])
        .server("gold1", &engines[1], &["max_concurrency = 1", "routing_tier = \"gold\""])
        .server("gold2", &engines[2], &["max_concurrency = 1", "routing_tier = \"gold\""])
        .start();
    let ask = |tier: &str, tag: &str| {
        let headers = [("X-Lifeboat-Tier", tier)];
        let headers = if tier.is_empty() { &[][..] } else { &headers[..] };
        let mut client = router.client();
        client.send(&request("POST", CHAT, headers, &chat("m", tag)));
        client
    };
    for _ in 0..4 {
        let response = ask("", "x").response();
        assert_eq!((server(&response).as_str(), response.lifeboat("Pool").as_deref()), ("plain", Some("p")));
        let response = ask("gold", "x").response();
        assert!(server(&response).starts_with("gold"));
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("p/gold"));
    }
    // Gold is full, plain idle: gold is refused, and the other way round.
    let mut held = vec![ask("gold", "hold"), ask("gold", "hold")];
    for name in ["gold1", "gold2"] {
        router.wait_metric("ringway_in_flight", &[("server", name)], 1.0, seconds(5));
    }
    let response = ask("gold", "x").response();
    response.assert_rejected(503, "at_capacity");
    assert_eq!(response.lifeboat("Pool").as_deref(), Some("p/gold"));
    assert_eq!(server(&ask("", "x").response()), "plain");
    held.push(ask("", "hold"));
    router.wait_metric("ringway_in_flight", &[("server", "plain")], 1.0, seconds(5));
    gold_gate.open();
    for client in &mut held[..2] {
        server(&client.response());
    }
    router.wait_metric("ringway_in_flight", &[], 1.0, seconds(5));
    ask("", "x").response().assert_rejected(503, "at_capacity");
    server(&ask("gold", "x").response());
    plain_gate.open();
    server(&held[2].response());
    // A tier that nobody has.
    let response = ask("silver", "x").response();
    response.assert_rejected(503, "no_server_in_tier");
    // A blank tier is none.
    let response = router.client().ask("POST", CHAT, &[("X-Lifeboat-Tier", "")], &chat("m", "x"));
    assert_eq!(server(&response), "plain");
}

/// "Weight 0 is the graceful-drain mechanism. Set it, let in-flight requests finish, then stop the server — no failed requests, no
/// window where the pool is short." Under load, with every algorithm.
#[test]
fn a_drained_server_is_stopped_without_a_failed_request() {
    for name in ALGORITHMS {
        let mut engines: Vec<Engine> = (0..3)
            .map(|_| {
                Engine::start(|exchange| {
                    exchange.read_body()?;
                    exchange.pause(ms(15));
                    exchange.reply_ok()
                })
            })
            .collect();
        let mut setup = Setup::new().shards(2).pool("p", &[&pool_of(name)]);
        for (engine, name) in engines.iter().zip(["a", "b", "c"]) {
            setup = setup.server(name, engine, &[]);
        }
        let router = setup.start();
        let (stop, served) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for number in 0..12u64 {
                let (router, stop, served) = (&router, &stop, &served);
                scope.spawn(move || {
                    let mut client = router.client();
                    let id = format!("s-{number}");
                    let mut turn = 0;
                    // A client that fails ends the others, so that the test ends.
                    let _stop = StopOnPanic(stop);
                    while !stop.load(Ordering::Relaxed) {
                        turn += 1;
                        let body = question(&words(number % 4, 3000), &turn.to_string());
                        let response = client.ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &body);
                        assert_eq!(response.status, 200, "{name}: {}", response.text());
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let _stop = StopOnPanic(&stop);
            let more = |count: usize| {
                let from = served.load(Ordering::Relaxed);
                eventually(seconds(20), "the load goes on", || {
                    let done = served.load(Ordering::Relaxed) - from;
                    assert!(!stop.load(Ordering::Relaxed), "a client failed");
                    if done >= count { Ok(()) } else { Err(format!("{done}")) }
                });
            };
            more(100);
            router.set_weight("b", "0");
            router.wait_metric("ringway_in_flight", &[("server", "b")], 0.0, seconds(10));
            let before = engines[1].request_count();
            engines[1].stop();
            more(100);
            assert_eq!(engines[1].request_count(), before, "{name}");
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(router.metrics().sum("ringway_upstream_errors_total", &[]), 0.0, "{name}");
        assert_eq!(router.metrics().sum("ringway_rejections_total", &[]), 0.0, "{name}");
    }
}

/// The same through the drain call, which answers when the server is idle.
#[test]
fn the_drain_call_answers_when_the_server_is_idle() {
    let gate = Gate::new();
    let engines: Vec<Engine> = (0..2).map(|_| holding_some(&gate)).collect();
    let router = router_over(&engines, "weighted-round-robin", &[], &[]);
    let mut holder = router.client();
    holder.send(&request("POST", CHAT, &[], &chat("m", "hold")));
    engines[0].wait_requests(1);
    std::thread::scope(|scope| {
        let drained =
            scope.spawn(|| router.admin_ask("POST", "/admin/v1/servers/a/drain?timeout_ms=20000", ""));
        eventually(seconds(5), "its weight is 0", || match router.server_state("a")["weight"].as_f64() {
            Some(0.0) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        pause(ms(100));
        assert!(!drained.is_finished(), "a request is in flight");
        for _ in 0..3 {
            assert_eq!(server(&router.post(CHAT, &chat("m", "x"))), "b");
        }
        gate.open();
        assert_eq!(server(&holder.response()), "a");
        let response = drained.join().expect("an answer");
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(response.json()["idle"], true, "{}", response.text());
    });
    assert_eq!(router.server_state("a")["in_flight"], 0);
    // And one that does not get idle in time says so.
    let gate = Gate::new();
    let engines = [holding(&gate)];
    let router = router_over(&engines, "weighted-round-robin", &[], &[]);
    let mut holder = router.client();
    holder.send(&request("POST", CHAT, &[], &chat("m", "hold")));
    engines[0].wait_requests(1);
    let response = router.admin_ask("POST", "/admin/v1/servers/a/drain?timeout_ms=100", "");
    assert_eq!(response.json()["idle"], false, "{}", response.text());
    assert_eq!(response.json()["in_flight"], 1, "{}", response.text());
    gate.open();
    server(&holder.response());
}
