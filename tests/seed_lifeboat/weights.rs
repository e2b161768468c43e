//! "Verifying the weights."
use super::*;

/// The entry of `name` once `ready` says that it shows what is waited for.
fn entry(router: &Router, name: &str, ready: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
    eventually(seconds(10), &format!("the drift of {name}"), || {
        let server = router.server_state(name);
        if ready(&server) { Ok(server) } else { Err(format!("{server:#}")) }
    })
}

/// "Drive steady load, then compare each backend's dispatch share against its configured weight."
#[test]
fn steady_load_follows_the_weights() {
    for name in ["weighted-round-robin", "least-connections", "kv-aware"] {
        let engines = answering(3);
        let router = Setup::new()
            .pool("p", &[&pool_of(name)])
            .server("a", &engines[0], &["weight = 3"])
            .server("b", &engines[1], &["weight = 2"])
            .server("c", &engines[2], &["weight = 1"])
            .start();
        let mut client = router.client();
        for number in 0..240 {
            server(&client.post(CHAT, &prompt(number, 1000)));
        }
        assert_eq!(counts(&engines), [120, 80, 40], "{name}");
        let shares = [("a", 0.5), ("b", 1.0 / 3.0), ("c", 1.0 / 6.0)];
        for (server, share) in shares {
            let near =
                |value: &serde_json::Value| value.as_f64().is_some_and(|value| (value - share).abs() < 0.01);
            let server = entry(&router, server, |server| near(&server["share"]));
            assert!(near(&server["weight_share"]), "{server:#}");
            assert!(server["drift"].as_f64().is_some_and(|drift| drift.abs() < 0.05), "{server:#}");
            assert_eq!(server["drift_cause"], serde_json::Value::Null, "{server:#}");
        }
        // For kv-aware, drift is no sign of trouble.
        assert_eq!(router.metrics().has("ringway_drift_ratio"), name != "kv-aware", "{name}");
    }
}

/// "Drift beyond roughly 10% under steady load means a backend is erroring (and being briefly benched), ..."
#[test]
fn an_erroring_backend_drifts_and_says_why() {
    let broken = Engine::start(|exchange| exchange.reply(503, &[], b"{}"));
    let good = Engine::answering();
    let router = Setup::new()
        .health("bench_ms = 30000")
        .server("good", &good, &[])
        .server("broken", &broken, &[])
        .start();
    let mut client = router.client();
    for _ in 0..200 {
        client.post(CHAT, &chat("m", "x"));
    }
    assert!(broken.request_count() < 20, "{}", broken.request_count());
    let server = entry(&router, "broken", |server| server["drift_cause"] != serde_json::Value::Null);
    assert!(server["drift"].as_f64().is_some_and(|drift| drift < -0.5), "{server:#}");
    let cause = server["drift_cause"].to_string();
    assert!(cause.contains("bench") || cause.contains("err"), "{server:#}");
}

/// "..., is at capacity, ..."
#[test]
fn a_full_backend_drifts_and_says_why() {
    let gate = Gate::new();
    let engines: Vec<Engine> = (0..2).map(|_| holding_some(&gate)).collect();
    let router = Setup::new()
        .server("wide", &engines[0], &[])
        .server("narrow", &engines[1], &["max_concurrency = 1"])
        .start();
    // One long request fills the narrow one.
    let mut holders = Vec::new();
    while engines[1].request_count() == 0 {
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[], &chat("m", "hold")));
        holders.push(client);
        let placed = holders.len();
        eventually(seconds(5), "it is placed", || {
            let got = counts(&engines).iter().sum::<usize>();
            if got == placed { Ok(()) } else { Err(format!("{got}")) }
        });
    }
    let mut client = router.client();
    for _ in 0..200 {
        assert_eq!(server(&client.post(CHAT, &chat("m", "x"))), "wide");
    }
    // (The second in which it came up, and was not eligible yet, counts against it, too: the cause is what lasts.)
    let server = entry(&router, "narrow", |server| server["drift_cause"].to_string().contains("capacity"));
    assert!(server["drift"].as_f64().is_some_and(|drift| drift < -0.5), "{server:#}");
    gate.open();
    for client in &mut holders {
        client.response();
    }
}

/// "... or is parked at weight 0."
#[test]
fn a_backend_parked_at_weight_0_says_so() {
    let engines = answering(2);
    let router = router_over(&engines, "weighted-round-robin", &[], &[]);
    let mut client = router.client();
    for _ in 0..60 {
        server(&client.post(CHAT, &chat("m", "x")));
    }
    router.set_weight("b", "0");
    for _ in 0..140 {
        assert_eq!(server(&client.post(CHAT, &chat("m", "x"))), "a");
    }
    let server = entry(&router, "b", |server| server["drift_cause"] != serde_json::Value::Null);
    assert!(server["drift_cause"].to_string().contains("weight"), "{server:#}");
    assert_eq!(server["weight"].as_f64(), Some(0.0));
}
