//! "The four algorithms."
use super::*;

/// "The algorithm is set per cluster and decides which backend takes each request."
#[test]
fn the_algorithm_is_set_per_cluster() {
    let mut setup = Setup::new();
    let engines: Vec<Engine> = ALGORITHMS
        .iter()
        .map(|name| EngineSetup::new().models(Probe::models(&[name])).start(|e| e.reply_ok()))
        .collect();
    for (engine, name) in engines.iter().zip(ALGORITHMS) {
        setup = setup.pool(&format!("{name}-pool"), &[&pool_of(name)]).server(name, engine, &[]);
    }
    let router = setup.start();
    let mut client = router.client();
    for name in ALGORITHMS {
        let body = conversation(name, [("user", words(1, 4000).as_str())]);
        // The second time kv-aware has something to go by.
        for round in 0..2 {
            let response = client.ask("POST", CHAT, &[("X-Lifeboat-Session-Id", "s")], &body);
            assert_eq!(server(&response), name);
            assert_eq!(response.lifeboat("Pool").as_deref(), Some(format!("{name}-pool").as_str()));
            let expected = if name == "kv-aware" && round == 0 { "weighted-round-robin" } else { name };
            assert_eq!(algorithm(&response), expected);
        }
    }
}

/// "It is independent of the routing mode, which decides how much each backend will take."
#[test]
fn the_algorithm_is_independent_of_the_routing_mode() {
    for name in ALGORITHMS {
        for mode in ["reject", "queue", "unlimited"] {
            let gate = Gate::new();
            let engines: Vec<Engine> = (0..2).map(|_| holding(&gate)).collect();
            let mode_line = format!("routing_mode = \"{mode}\"");
            let router = router_over(&engines, name, &[&mode_line], &["max_concurrency = 1"]);
            let ask = || {
                let mut client = router.client();
                let headers = [("X-Lifeboat-Session-Id", "s")];
                client.send(&request("POST", CHAT, &headers, &prompt(1, 4000)));
                client
            };
            let mut held: Vec<Client> = Vec::new();
            for count in 1..=2 {
                held.push(ask());
                eventually(seconds(5), "the request is placed", || {
                    let got = engines.iter().map(Engine::request_count).sum::<usize>();
                    if got == count { Ok(()) } else { Err(format!("{name}, {mode}: {got} of {count}")) }
                });
            }
            if mode != "unlimited" {
                assert_eq!(counts(&engines), [1, 1], "{name}, {mode}: a full server is passed over");
            }
            let mut third = ask();
            match mode {
                "reject" => {
                    let response = third.response();
                    response.assert_rejected(503, "at_capacity").assert_retry_after();
                    gate.open();
                }
                "queue" => {
                    router.wait_metric("ringway_queue_depth", &[("pool", "p")], 1.0, seconds(5));
                    gate.open();
                    let response = third.response();
                    server(&response);
                    assert_ne!(response.lifeboat("Wait-ms").as_deref(), Some("0"), "{name}");
                }
                _ => {
                    eventually(seconds(5), "the third goes straight through", || {
                        let got = engines.iter().map(Engine::request_count).sum::<usize>();
                        if got == 3 { Ok(()) } else { Err(format!("{name}: {got}")) }
                    });
                    gate.open();
                    assert_eq!(third.response().lifeboat("Wait-ms").as_deref(), Some("0"), "{name}");
                }
            }
            for client in &mut held {
                server(&client.response());
            }
        }
    }
}

/// "Weighted round-robin (default): in proportion to weight, smoothly." With nothing said about an algorithm.
#[test]
fn weighted_round_robin_is_the_default_and_smooth() {
    let engines = answering(3);
    let router = Setup::new()
        .server("a", &engines[0], &["weight = 5"])
        .server("b", &engines[1], &[])
        .server("c", &engines[2], &[])
        .start();
    let mut client = router.client();
    let names: String = (0..14)
        .map(|number| {
            let response = client.post(CHAT, &prompt(number, 2000));
            assert_eq!(algorithm(&response), "weighted-round-robin");
            for name in ["Sticky-Key", "Prefix-Blocks"] {
                assert_eq!(response.lifeboat(name), None, "of another algorithm");
            }
            server(&response)
        })
        .collect();
    assert_eq!(names, "aabacaaaabacaa");
}

/// "Least connections: the least busy backend, relative to weight" and "absorbs long-context outliers naturally": who
/// works on a long one gets no more until the others have as much to do for their weight.
#[test]
fn least_connections_absorbs_long_context_outliers() {
    let gate = Gate::new();
    let engines: Vec<Engine> = (0..2).map(|_| holding_some(&gate)).collect();
    let router = Setup::new()
        .pool("p", &[&pool_of("least-connections")])
        .server("a", &engines[0], &["weight = 3"])
        .server("b", &engines[1], &["weight = 1"])
        .start();
    let mut outliers = Vec::new();
    let mut client = router.client();
    // After each long one: what is in flight on each, and who is the less busy for its weight.
    for (number, a, b, next) in [(1, 1, 0, "b"), (2, 1, 1, "a"), (3, 2, 1, "a")] {
        let mut outlier = router.client();
        outlier.send(&request("POST", CHAT, &[], &chat("m", "hold this")));
        outliers.push(outlier);
        eventually(seconds(5), "it is placed", || {
            let got = engines.iter().map(Engine::active).sum::<usize>();
            if got == number { Ok(()) } else { Err(format!("{got} of {number}")) }
        });
        assert_eq!((engines[0].active(), engines[1].active()), (a, b));
        for _ in 0..5 {
            let response = client.post(CHAT, &chat("m", "short"));
            assert_eq!(
                (server(&response).as_str(), algorithm(&response).as_str()),
                (next, "least-connections")
            );
        }
    }
    gate.open();
    for client in &mut outliers {
        server(&client.response());
    }
}

/// "Sticky session: the same backend for the same client."
#[test]
fn sticky_session_keeps_a_client_on_its_backend() {
    let engines = answering(4);
    let router = router_over(&engines, "sticky-session", &[], &[]);
    let mut homes = BTreeMap::new();
    for round in 0..4 {
        for session in 0..40 {
            let id = format!("session-{session}");
            // Nothing depends on the connection.
            let response =
                router.client().ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &prompt(round, 500));
            assert_eq!(algorithm(&response), "sticky-session");
            assert_eq!(response.lifeboat("Sticky-Key"), Some(digest(&id)));
            let home = homes.entry(session).or_insert_with(|| server(&response));
            assert_eq!(*home, server(&response), "session {session}");
        }
    }
    assert_eq!(counts(&engines).iter().sum::<usize>(), 160);
    assert!(counts(&engines).iter().all(|count| (16..=72).contains(count)), "{:?}", counts(&engines));
}

/// "KV-aware: the backend that already holds this prompt's prefix."
#[test]
fn kv_aware_finds_the_backend_that_holds_the_prefix() {
    let engines = answering(3);
    let router = router_over(&engines, "kv-aware", &[], &[]);
    let mut client = router.client();
    let mut homes = Vec::new();
    for number in 0..6 {
        homes.push(server(&client.post(CHAT, &prompt(number, 6000))));
    }
    for round in 0..3 {
        for number in (0..6).rev() {
            let response = client.post(CHAT, &prompt(number, 6000));
            assert_eq!(server(&response), homes[number as usize], "round {round}");
            assert_eq!(algorithm(&response), "kv-aware");
            let (matched, total) = prefix_blocks(&response);
            assert_eq!(matched, total);
            assert!((22..=24).contains(&total), "6,000 bytes in blocks of 256: {total}");
        }
    }
}
