//! "The headers on every response": on success, on every way past the first choice, on grants from the queue, and on every
//! rejection.

mod support;

use std::sync::Arc;

use support::prompts::*;
use support::*;

/// The router's headers of an answer, without the prefix: names in lower case, values as they came.
fn own(response: &Response) -> Vec<(String, String)> {
    let mut own: Vec<(String, String)> = response
        .head
        .text()
        .lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            let name = name.to_ascii_lowercase();
            Some((name.strip_prefix("x-lifeboat-")?.to_owned(), value.trim().to_owned()))
        })
        .collect();
    own.sort();
    own
}

/// Checks that the answer has exactly these headers of the router's; `*`: any value.
#[track_caller]
fn assert_own(response: &Response, what: &str, expected: &[(&str, &str)]) {
    let have = own(response);
    let mut expected: Vec<(String, &str)> =
        expected.iter().map(|(name, value)| (name.to_ascii_lowercase(), *value)).collect();
    expected.sort();
    let names = |list: &[(String, String)]| list.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    let wanted: Vec<String> = expected.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(names(&have), wanted, "{what}:\n{}", response.head.text());
    for ((name, value), (_, wanted)) in have.iter().zip(&expected) {
        assert!(*wanted == "*" || value == wanted, "{what}: {name} is {value}, expected {wanted}");
    }
}

const SESSION: (&str, &str) = ("X-Lifeboat-Session-Id", "s");

fn pool_of(algorithm: &str) -> String {
    format!("algorithm = \"{algorithm}\"")
}

/// Which headers each algorithm adds, on its own choice and on what it falls back to.
#[test]
fn each_algorithm_has_its_headers_on_success() {
    let engine = Engine::answering();
    let base = [("Server", "a"), ("Pool", "p"), ("Weight", "1"), ("Inflight", "1/32"), ("Wait-ms", "0")];
    let with = |more: &[(&'static str, &'static str)]| [&base[..], more].concat();
    let sticky = digest("s");
    let sticky = sticky.as_str();
    for name in ["weighted-round-robin", "least-connections"] {
        let router = Setup::new().pool("p", &[&pool_of(name)]).server("a", &engine, &[]).start();
        let response = router.client().ask("POST", CHAT, &[SESSION], &prompt(1, 4000));
        assert_own(&response, name, &with(&[("Algorithm", name)]));
    }
    let router = Setup::new().pool("p", &[&pool_of("sticky-session")]).server("a", &engine, &[]).start();
    let response = router.client().ask("POST", CHAT, &[SESSION], &prompt(1, 4000));
    let sticky_headers = [&base[..], &[("Algorithm", "sticky-session"), ("Sticky-Key", sticky)]].concat();
    assert_own(&response, "sticky", &sticky_headers);
    let response = router.post(CHAT, &prompt(1, 4000));
    assert_own(&response, "no key", &with(&[("Algorithm", "least-connections")]));

    let router = Setup::new().pool("p", &[&pool_of("kv-aware")]).server("a", &engine, &[]).start();
    let miss = router.client().ask("POST", CHAT, &[SESSION], &prompt(1, 4000));
    assert_own(&miss, "miss", &with(&[("Algorithm", "weighted-round-robin"), ("Prefix-Blocks", "*")]));
    let (matched, total) = prefix_blocks(&miss);
    assert!(matched == 0 && total >= 15, "{matched}/{total}");
    let hit = router.client().ask("POST", CHAT, &[SESSION], &prompt(1, 4000));
    assert_own(&hit, "hit", &with(&[("Algorithm", "kv-aware"), ("Prefix-Blocks", "*")]));
    assert_eq!(prefix_blocks(&hit), (total, total));
    // No prompt: nothing is said of blocks.
    for (method, path, body) in
        [("POST", "/v1/unknown", &b"{}"[..]), ("GET", "/x", b""), ("POST", CHAT, b"not JSON")]
    {
        let response = router.client().ask(method, path, &[], body);
        assert_own(&response, path, &with(&[("Algorithm", "weighted-round-robin")]));
    }
}

/// Streams and errors of the engine carry them too.
#[test]
fn streams_and_engine_errors_carry_them() {
    let engine = Engine::start(|exchange| {
        if exchange.body_has("\"stream\":true")? {
            exchange.stream_head()?;
            exchange.chunk(b"data: {}\n\n")?;
            return exchange.end();
        }
        exchange.reply(429, &[], b"{}")
    });
    let router = Setup::new().pool("p", &[&pool_of("kv-aware")]).server("a", &engine, &[]).start();
    for (body, status) in [(chat_stream("m", &words(1, 3000)), 200), (chat("m", &words(2, 3000)), 429)] {
        let response = router.post(CHAT, &body);
        assert_eq!(response.status, status);
        let expected = [
            ("Server", "a"),
            ("Pool", "p"),
            ("Weight", "1"),
            ("Inflight", "1/32"),
            ("Wait-ms", "0"),
            ("Algorithm", "weighted-round-robin"),
            ("Prefix-Blocks", "*"),
        ];
        assert_own(&response, "stream or error", &expected);
    }
}

/// kv-aware: the holder of the prefix is down or draining. Somebody else serves; the algorithm says that it was not the
/// prefix, and the blocks are those that the chosen server held before.
#[test]
fn a_holder_that_cannot_take_it_shows_in_the_headers() {
    let engines: Vec<Engine> = (0..2).map(|_| Engine::answering()).collect();
    let router = Setup::new()
        .pool("p", &[&pool_of("kv-aware")])
        .server("a", &engines[0], &[])
        .server("b", &engines[1], &[])
        .start();
    let ask = |seed: u64| router.post(CHAT, &prompt(seed, 4000));
    let elsewhere = |seed: u64, home: &str, why: &str| {
        let response = ask(seed);
        assert_ne!(server(&response), home, "{why}");
        assert_eq!(algorithm(&response), "weighted-round-robin", "{why}");
        assert_eq!(prefix_blocks(&response).0, 0, "{why}");
        // It holds the prefix now, too.
        let response = ask(seed);
        assert_eq!(
            (algorithm(&response).as_str(), prefix_blocks(&response).0 > 0),
            ("kv-aware", true),
            "{why}"
        );
    };
    // Down.
    let home = server(&ask(2));
    let engine = &engines[usize::from(home == "b")];
    engine.set_health(Probe::Reply(503, String::new()));
    router.wait_not_up(&home);
    elsewhere(2, &home, "down");
    engine.set_health(Probe::ok());
    router.wait_up(&["a", "b"]);
    // Draining.
    let home = server(&ask(3));
    router.set_weight(&home, "0");
    elsewhere(3, &home, "draining");
    router.set_weight(&home, "1");
}

/// kv-aware: a holder at its ceiling is passed over at once, whatever it holds.
#[test]
fn a_full_holder_is_passed_over() {
    let gate = Gate::new();
    let engines: Vec<Engine> = (0..2).map(|_| holding_some(&gate)).collect();
    let router = Setup::new()
        .pool("p", &[&pool_of("kv-aware")])
        .server("a", &engines[0], &["max_concurrency = 1"])
        .server("b", &engines[1], &["max_concurrency = 1"])
        .start();
    let shared = words(5, 6000);
    let mut holder = router.client();
    holder.send(&request("POST", CHAT, &[], &question(&shared, "hold")));
    router.wait_metric("ringway_in_flight", &[], 1.0, seconds(5));
    let home = if router.server_state("a")["in_flight"] == 1 { "a" } else { "b" };
    let response = router.post(CHAT, &question(&shared, "one"));
    assert_ne!(server(&response), home);
    assert_eq!((algorithm(&response).as_str(), prefix_blocks(&response).0), ("weighted-round-robin", 0));
    gate.open();
    server(&holder.response());
}

/// A request that waited for its turn: how long, and by which algorithm it was placed in the end.
#[test]
fn grants_from_the_queue_carry_everything() {
    for name in ["weighted-round-robin", "least-connections", "sticky-session", "kv-aware"] {
        let gate = Gate::new();
        let engine = holding(&gate);
        let router = Setup::new()
            .pool("p", &[&pool_of(name)])
            .server("a", &engine, &["max_concurrency = 1", "weight = 0.5"])
            .start();
        let send = || {
            let mut client = router.client();
            client.send(&request("POST", CHAT, &[SESSION], &prompt(1, 4000)));
            client
        };
        let mut first = send();
        engine.wait_requests(1);
        let mut second = send();
        router.wait_metric("ringway_queue_depth", &[("pool", "p")], 1.0, seconds(5));
        pause(ms(60));
        gate.open();
        server(&first.response());
        let response = second.response();
        let sticky = digest("s");
        let mut expected = vec![
            ("Server", "a"),
            ("Pool", "p"),
            ("Weight", "0.5"),
            ("Inflight", "1/1"),
            ("Wait-ms", "*"),
            ("Algorithm", "*"),
        ];
        match name {
            "sticky-session" => expected.push(("Sticky-Key", sticky.as_str())),
            "kv-aware" => expected.push(("Prefix-Blocks", "*")),
            _ => {}
        }
        assert_own(&response, name, &expected);
        // Who frees a place is nobody's choice: the only server there is may count as the chosen one or as the rest.
        let fallback = if name == "sticky-session" { "least-connections" } else { "weighted-round-robin" };
        let used = algorithm(&response);
        let falls_back = matches!(name, "sticky-session" | "kv-aware") && used == fallback;
        assert!(used == name || falls_back, "{name}: {used}");
        let wait_ms: u64 = response.lifeboat("Wait-ms").expect("there").parse().expect("whole milliseconds");
        assert!((50..10_000).contains(&wait_ms), "{name}: {wait_ms}");
        if name == "kv-aware" {
            let (matched, total) = prefix_blocks(&response);
            assert_eq!(matched, total, "the first one left its prefix on the only server there is");
        }
    }
}

/// What was sent again says how often.
#[test]
fn a_resend_says_so_under_every_algorithm() {
    for name in ["weighted-round-robin", "least-connections", "sticky-session", "kv-aware"] {
        let mut engines: Vec<Engine> = (0..2).map(|_| Engine::answering()).collect();
        let router = Setup::new()
            .health("interval_ms = 60000")
            .pool("p", &[&pool_of(name)])
            .server("a", &engines[0], &[])
            .server("b", &engines[1], &[])
            .start();
        let ask = || router.client().ask("POST", CHAT, &[SESSION], &prompt(1, 4000));
        let home = server(&ask());
        let index = usize::from(home == "b");
        // The first choice refuses connects from now on: kept connections are gone, too.
        engines[index].stop();
        let mut resent = None;
        for _ in 0..4 {
            let response = ask();
            assert_ne!(server(&response), home, "{name}");
            resent = resent.or(response.lifeboat("Retries"));
        }
        assert_eq!(resent.as_deref(), Some("1"), "{name}");
    }
}

/// Pools with tiers, mixed candidates, a standalone server: the pool's name in each case.
#[test]
fn the_pool_is_named_with_its_tier() {
    let engines: Vec<_> = ["t", "t", "alone"]
        .map(|name| EngineSetup::new().models(Probe::models(&[name])).start(|e| e.reply_ok()))
        .into();
    let router = Setup::new()
        .pool("p", &[])
        .server("a", &engines[0], &["routing_tier = \"gold\""])
        .pool("q", &[])
        .server("b", &engines[1], &["routing_tier = \"gold\""])
        .standalone("c", &engines[2], &["routing_tier = \"gold\""])
        .start();
    let ask = |model: &str, tier: &str| {
        router.client().ask("POST", CHAT, &[("X-Lifeboat-Tier", tier)], &chat(model, "x"))
    };
    let response = ask("t", "gold");
    assert_eq!(response.lifeboat("Pool").as_deref(), Some("mixed/gold"), "{}", response.head.text());
    let response = ask("alone", "gold");
    assert_eq!(response.lifeboat("Pool").as_deref(), Some("c/gold"), "{}", response.head.text());
    ask("t", "none").assert_rejected(503, "no_server_in_tier");
    ask("nobody", "gold").assert_rejected(404, "model_not_found");
}

/// A tier that nothing can be called is never taken for "no tier".
#[test]
fn a_tier_that_cannot_be_is_refused() {
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &[]).start();
    let long = "x".repeat(5000);
    for value in [long.as_str(), "a\u{7f}b"] {
        let response = router.client().ask("POST", CHAT, &[("X-Lifeboat-Tier", value)], &chat("m", "x"));
        assert!(response.status == 400 || response.status == 503, "{}", response.head.text());
        assert_eq!(response.lifeboat("Server"), None);
    }
    assert_eq!(engine.request_count(), 0);
}

/// Every reason that can be met without API keys: status, reason in header and body, what else is known, and nothing of a
/// server.
#[test]
fn every_rejection_says_what_is_known() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = EngineSetup::new().models(Probe::models(&["m", "cut", "slow"])).start(move |exchange| {
        if exchange.body_has("\"cut\"")? {
            exchange.raw(b"HTTP/1.1 2")?;
            return Ok(Next::Close);
        }
        if exchange.body_has("\"slow\"")? {
            exchange.wait_close(seconds(20));
            return Ok(Next::Close);
        }
        held.pass(seconds(30));
        exchange.reply_ok()
    });
    let small = EngineSetup::new().models(Probe::models(&["small"])).start(|exchange| exchange.reply_ok());
    let parked = EngineSetup::new().models(Probe::models(&["parked"])).start(|exchange| exchange.reply_ok());
    let router = Setup::new()
        .limit("body_bytes_max = 300000")
        .limit("response_head_timeout_ms = 300")
        .limit("client_body_idle_timeout_ms = 300")
        .health("bench_after = 1000")
        .pool("rejecting", &["algorithm = \"kv-aware\"", "routing_mode = \"reject\""])
        .server("a", &engine, &["max_concurrency = 1"])
        .pool("small-pool", &["algorithm = \"sticky-session\""])
        .server("b", &small, &["max_input_tokens = 100"])
        .pool("parked-pool", &["algorithm = \"least-connections\""])
        .server("c", &parked, &["weight = 0"])
        .start_unready();
    router.wait_up(&["a", "b"]);
    let known = |pool: &'static str, algorithm: &'static str, reason: &'static str| {
        [("Pool", pool), ("Wait-ms", "0"), ("Algorithm", algorithm), ("Reject-Reason", reason)]
    };
    let check =
        |response: &Response, status: u16, reason: &str, allowed: &[(&str, &str)], needed: &[&str]| {
            response.assert_rejected(status, reason);
            for (name, value) in own(response) {
                let expected = allowed.iter().find(|(allowed, _)| allowed.eq_ignore_ascii_case(&name));
                let Some((_, expected)) = expected else {
                    panic!("{reason}: {name}:\n{}", response.head.text())
                };
                assert!(
                    *expected == "*" || *expected == value,
                    "{reason}: {name} is {value}, expected {expected}"
                );
            }
            for name in needed {
                assert!(response.lifeboat(name).is_some(), "{reason}: no {name}:\n{}", response.head.text());
            }
        };
    let ask = |model: &str, bytes: usize| router.post(CHAT, &chat(model, &words(1, bytes)));

    check(&ask("nobody", 10), 404, "model_not_found", &[("Reject-Reason", "*"), ("Wait-ms", "0")], &[]);
    let response = router.client().ask("POST", CHAT, &[("X-Lifeboat-Tier", "t")], &chat("m", "x"));
    check(&response, 503, "no_server_in_tier", &[("Reject-Reason", "*"), ("Wait-ms", "0")], &[]);
    let response = ask("parked", 10);
    check(&response, 503, "no_healthy_server", &known("parked-pool", "least-connections", "*"), &["Pool"]);
    response.assert_retry_after();
    let response = router.client().ask("POST", CHAT, &[SESSION], &chat("small", &words(1, 20_000)));
    let mut sticky = known("small-pool", "*", "*").to_vec();
    sticky.push(("Sticky-Key", "*"));
    check(&response, 413, "input_too_long", &sticky, &["Pool"]);
    let response = router.post(CHAT, &vec![b'x'; 300_001]);
    check(&response, 413, "body_too_large", &[("Reject-Reason", "*"), ("Wait-ms", "0")], &[]);

    let kv = [
        ("Pool", "rejecting"),
        ("Wait-ms", "*"),
        ("Algorithm", "*"),
        ("Reject-Reason", "*"),
        ("Prefix-Blocks", "*"),
    ];
    check(&ask("cut", 10), 502, "upstream_error", &kv, &["Pool", "Algorithm"]);
    check(&ask("slow", 10), 504, "upstream_timeout", &kv, &["Pool", "Algorithm"]);
    let mut holder = router.client();
    holder.send(&request("POST", CHAT, &[], &chat("m", "x")));
    router.wait_metric("ringway_in_flight", &[("server", "a")], 1.0, seconds(5));
    let response = ask("m", 4000);
    check(&response, 503, "at_capacity", &kv, &["Pool", "Wait-ms"]);
    response.assert_retry_after();
    gate.open();
    server(&holder.response());

    let raw = |bytes: &[u8]| {
        let mut client = router.client();
        client.send(bytes);
        client.response()
    };
    let plain = [("Reject-Reason", "*"), ("Wait-ms", "0")];
    check(&raw(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400, "bad_request", &plain, &[]);
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(20_000));
    check(&raw(long.as_bytes()), 414, "uri_too_long", &plain, &[]);
    let large = format!("GET / HTTP/1.1\r\nHost: a\r\nX-Y: {}\r\n\r\n", "x".repeat(70_000));
    check(&raw(large.as_bytes()), 431, "head_too_large", &plain, &[]);
    let half =
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{\"model\":\"m\"";
    check(&raw(half), 408, "request_timeout", &plain, &[]);
}

/// The queue's two reasons, with the time that was waited.
#[test]
fn rejections_of_the_queue_say_how_long_was_waited() {
    for name in ["weighted-round-robin", "least-connections", "sticky-session", "kv-aware"] {
        let gate = Gate::new();
        let engine = holding(&gate);
        let queue = [&pool_of(name), "queue_size = 1", "queue_timeout_ms = 300"];
        let router = Setup::new().pool("p", &queue).server("a", &engine, &["max_concurrency = 1"]).start();
        let send = || {
            let mut client = router.client();
            client.send(&request("POST", CHAT, &[SESSION], &prompt(1, 4000)));
            client
        };
        let mut running = send();
        engine.wait_requests(1);
        let mut waiting = send();
        router.wait_metric("ringway_queue_depth", &[("pool", "p")], 1.0, seconds(5));
        let full = send().response();
        full.assert_rejected(503, "queue_full").assert_retry_after();
        assert_eq!(full.lifeboat("Pool").as_deref(), Some("p"));
        assert_eq!(full.lifeboat("Wait-ms").as_deref(), Some("0"));
        let late = waiting.response();
        late.assert_rejected(503, "queue_timeout").assert_retry_after();
        assert_eq!(late.lifeboat("Pool").as_deref(), Some("p"));
        let waited: u64 = late.lifeboat("Wait-ms").expect("there").parse().expect("a number");
        assert!((295..5000).contains(&waited), "{name}: {waited}");
        for response in [&full, &late] {
            assert_eq!(response.lifeboat("Algorithm").as_deref(), Some(name), "{}", response.head.text());
            let key = response.lifeboat("Sticky-Key");
            assert_eq!(key, (name == "sticky-session").then(|| digest("s")), "{name}");
        }
        gate.open();
        server(&running.response());
    }
}

/// A router that stops refuses new work on connections that it still has, and says so.
#[test]
fn a_stopping_router_says_so() {
    let gate = Gate::new();
    let engine = holding(&gate);
    let mut router = Setup::new()
        .limit("drain_settle_ms = 0")
        .pool("p", &[&pool_of("kv-aware"), "routing_mode = \"queue\""])
        .server("a", &engine, &["max_concurrency = 1"])
        .start();
    let mut running = router.client();
    running.send(&request("POST", CHAT, &[], &chat("m", "x")));
    engine.wait_requests(1);
    // Begun before the router stops, whole only afterwards.
    let mut late = router.client();
    let body = prompt(1, 4000);
    let whole = request("POST", CHAT, &[], &body);
    late.send(&whole[..whole.len() - 10]);
    pause(ms(100));
    router.signal(libc::SIGTERM);
    pause(ms(200));
    let sent = late.try_send(&whole[whole.len() - 10..]);
    gate.open();
    server(&running.response());
    // It is served, or refused with the reason; never left without an answer.
    if sent.is_ok()
        && let Ok(response) = late.try_response()
    {
        if response.status == 503 {
            response.assert_rejected(503, "shutting_down");
        } else {
            server(&response);
        }
    }
    assert_eq!(router.wait_exit(seconds(10)), Some(0));
}
