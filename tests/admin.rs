//! What operators change and see while the router runs: the admin API's `PATCH` and `drain`, the commands that use it, drift,
//! and what engines tell of their caches.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};
use support::*;

fn patch(router: &Router, server: &str, change: &Value) -> Response {
    let path = format!("/admin/v1/servers/{server}");
    Client::connect(router.admin()).ask("PATCH", &path, &[], change.to_string().as_bytes())
}

fn drain(router: &Router, server: &str, query: &str) -> Response {
    once(router.admin(), "POST", &format!("/admin/v1/servers/{server}/drain{query}"), b"")
}

/// Who answered each of `count` requests, one after the other.
fn sequence(router: &Router, count: usize) -> Vec<String> {
    let mut client = router.client();
    let answers = (0..count).map(|_| client.post(CHAT, &chat("m", "x")));
    answers
        .map(|answer| {
            assert_eq!(answer.status, 200, "{}", answer.text());
            answer.lifeboat("Server").expect("a server answered")
        })
        .collect()
}

fn counts(names: &[String]) -> (usize, usize) {
    let of = |name: &str| names.iter().filter(|n| *n == name).count();
    (of("a"), of("b"))
}

#[test]
fn a_change_holds_for_every_request_after_its_answer() {
    let (a, b) = (Engine::answering(), Engine::answering());
    let router = Setup::new().shards(2).server("a", &a, &[]).server("b", &b, &[]).start();
    router.wait_up(&["a", "b"]);
    assert_eq!(counts(&sequence(&router, 20)), (10, 10));
    let answer = patch(&router, "a", &json!({"weight": 3, "max_concurrency": 7}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let server = answer.json();
    assert_eq!(
        (&server["name"], &server["weight"], &server["max_concurrency"]),
        (&json!("a"), &json!(3.0), &json!(7))
    );
    assert_eq!(server["state"], "up");
    let (of_a, of_b) = counts(&sequence(&router, 40));
    assert!((27..=33).contains(&of_a) && of_a + of_b == 40, "{of_a} and {of_b}");
    // What ran on the other shard is no longer counted once this one has heard of its end.
    router.settle();
    let response = router.post(CHAT, &chat("m", "x"));
    if response.lifeboat("Server").as_deref() == Some("a") {
        assert_eq!(response.lifeboat("Weight").as_deref(), Some("3"));
        assert_eq!(response.lifeboat("Inflight").as_deref(), Some("1/7"));
    }
    for round in 0..10 {
        assert_eq!(patch(&router, "a", &json!({"weight": 0})).json()["state"], "drained");
        assert_eq!(counts(&sequence(&router, 5)), (0, 5), "round {round}");
        assert_eq!(patch(&router, "a", &json!({"weight": 1})).status, 200);
        assert_eq!(patch(&router, "b", &json!({"weight": 0})).status, 200);
        assert_eq!(counts(&sequence(&router, 5)), (5, 0), "round {round}");
        assert_eq!(patch(&router, "b", &json!({"weight": 1})).status, 200);
    }
    router.logged("server changed by an operator");
}

/// Lifeboat rules: "Tiers never borrow from each other": a server that is moved into a tier is not there for requests that name none.
#[test]
fn a_server_moves_into_a_tier_and_back() {
    let (a, b) = (Engine::answering(), Engine::answering());
    let router = Setup::new().server("a", &a, &[]).server("b", &b, &[]).start();
    router.wait_up(&["a", "b"]);
    assert_eq!(patch(&router, "a", &json!({"routing_tier": "gold"})).json()["routing_tier"], "gold");
    assert_eq!(counts(&sequence(&router, 6)), (0, 6));
    assert_eq!(patch(&router, "b", &json!({"routing_tier": "gold"})).status, 200);
    router.post(CHAT, &chat("m", "x")).assert_rejected(503, "no_server_in_tier");
    assert_eq!(patch(&router, "a", &json!({"routing_tier": ""})).status, 200);
    assert_eq!(counts(&sequence(&router, 6)), (6, 0));
}

#[test]
fn a_raised_ceiling_lets_waiting_requests_go_and_a_lowered_one_holds() {
    let gate = Gate::new();
    let held = gate.clone();
    let a = Engine::start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(20));
        exchange.reply_ok()
    });
    let router = Setup::new().shards(2).server("a", &a, &["max_concurrency = 1"]).start();
    router.wait_up(&["a"]);
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..4).map(|_| scope.spawn(|| router.post(CHAT, &chat("m", "x")).status)).collect();
        router.wait_metric("ringway_queue_depth", &[], 3.0, seconds(5));
        assert_eq!(patch(&router, "a", &json!({"max_concurrency": 3})).json()["max_concurrency"], 3);
        eventually(seconds(5), "three run", || match gate.waiting() {
            3 => Ok(()),
            other => Err(other.to_string()),
        });
        router.wait_metric("ringway_queue_depth", &[], 1.0, seconds(5));
        assert_eq!(patch(&router, "a", &json!({"max_concurrency": 1})).status, 200);
        gate.release(2);
        eventually(seconds(5), "one runs", || match gate.waiting() {
            1 => Ok(()),
            other => Err(other.to_string()),
        });
        pause(ms(100));
        assert_eq!(a.active(), 1, "nobody is let in over the lowered ceiling");
        gate.open();
        for client in clients {
            assert_eq!(client.join().unwrap(), 200);
        }
    });
    assert_eq!(a.active_max(), 3);
    router.wait_idle(seconds(5));
}

#[test]
fn a_wrong_change_is_refused_whole_with_every_fault() {
    let a = Engine::answering();
    let router = Setup::new().server("a", &a, &[]).start();
    router.wait_up(&["a"]);
    let answer = patch(&router, "a", &json!({"weight": 5, "max_concurrency": -1, "wait": 3}));
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "bad_change");
    assert_eq!(
        error["message"],
        "max_concurrency: -1: expected a whole number from 0 to 1000000; \
         wait: 3: unknown key; nearest known key: \"weight\""
    );
    assert_eq!(error["faults"][1]["path"], "wait");
    assert_eq!(router.server_state("a")["weight"], 1.0, "nothing of it was taken over");
    let admin = |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        Client::connect(router.admin()).ask(method, path, headers, body)
    };
    let broken = admin("PATCH", "/admin/v1/servers/a", &[], b"{\"weight\":");
    assert_eq!(broken.status, 400);
    assert!(broken.text().contains("not JSON"), "{}", broken.text());
    let nobody = patch(&router, "b", &json!({"weight": 1}));
    assert_eq!((nobody.status, &nobody.json()["error"]["code"]), (404, &json!("no_such_server")));
    assert!(nobody.text().contains("there are a"), "{}", nobody.text());
    assert_eq!(admin("POST", "/admin/v1/servers/a", &[], b"{}").status, 405);
    assert_eq!(admin("DELETE", "/admin/v1/servers/a", &[], b"").status, 501);
    assert_eq!(admin("PATCH", "/admin/v1/servers/a", &[], &vec![b' '; 70_000]).status, 413);
    for query in ["?timeout_ms=soon", "?wait=1"] {
        assert_eq!(drain(&router, "a", query).status, 400, "{query}");
    }
    assert_eq!(drain(&router, "b", "").status, 404);

    // A page that some browser on this host shows may not change anything.
    for origin in ["http://evil.example", "null"] {
        let sent = admin("POST", "/admin/v1/servers/a/drain", &[("Origin", origin)], b"");
        assert_eq!((sent.status, &sent.json()["error"]["code"]), (403, &json!("foreign_origin")), "{origin}");
    }
    assert_eq!(router.server_state("a")["weight"], 1.0);
    // A name may be somebody else's that points here: it is not this host's own, whatever both fields say.
    let same = admin("PATCH", "/admin/v1/servers/a", &[("Origin", "http://router.test")], b"{\"weight\":2}");
    assert_eq!(same.status, 403);
    for own in ["127.0.0.1:29000", "localhost", "[::1]:80"] {
        let mut client = Client::connect(router.admin());
        let body = "{\"weight\":2}";
        client.send(
            format!(
                "PATCH /admin/v1/servers/a HTTP/1.1\r\nHost: {own}\r\nOrigin: http://{own}\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .as_bytes(),
        );
        assert_eq!(client.response().status, 200, "{own}");
    }
}

#[test]
fn a_body_is_asked_for_where_the_client_waits_to_be_asked() {
    let a = Engine::answering();
    let router = Setup::new().server("a", &a, &[]).start();
    router.wait_up(&["a"]);
    let mut client = Client::connect(router.admin());
    client.send(
        b"PATCH /admin/v1/servers/a HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nExpect: 100-continue\r\n\r\n",
    );
    let (status, _) = client.any_head(now() + seconds(5)).expect("an interim answer");
    assert_eq!(status, 100);
    client.send(b"{\"weight\":4}");
    let answer = client.response();
    assert_eq!((answer.status, &answer.json()["weight"]), (200, &json!(4.0)));
    // And the connection goes on.
    assert_eq!(client.ask("GET", "/health", &[], b"").status, 200);
}

/// "Live weight: set weight 0 under load, let in-flight finish, stop the server: no failed request."
#[test]
fn a_server_is_drained_under_load_and_stopped_without_a_failed_request() {
    let engine = || {
        Engine::start(|exchange| {
            exchange.read_body()?;
            exchange.pause(ms(15));
            exchange.reply_ok()
        })
    };
    let (mut a, b) = (engine(), engine());
    let router = Setup::new()
        .shards(2)
        .server("a", &a, &["max_concurrency = 4"])
        .server("b", &b, &["max_concurrency = 4"])
        .start();
    router.wait_up(&["a", "b"]);
    let (over, done, failed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let late = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                let mut client = router.client();
                while !over.load(Ordering::Relaxed) {
                    let status = client.post(CHAT, &chat("m", "x")).status;
                    done.fetch_add(1, Ordering::Relaxed);
                    failed.fetch_add(usize::from(status != 200), Ordering::Relaxed);
                }
            });
        }
        eventually(seconds(10), "load on both", || match (a.request_count(), b.request_count()) {
            (20.., 20..) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        let answer = drain(&router, "a", "?timeout_ms=10000");
        let drained = answer.json();
        assert_eq!((answer.status, &drained["idle"], &drained["in_flight"]), (200, &json!(true), &json!(0)));
        assert_eq!(
            (&drained["server"]["state"], &drained["server"]["weight"]),
            (&json!("drained"), &json!(0.0))
        );
        assert_eq!(a.active(), 0);
        let sent = a.request_count();
        a.stop();
        pause(ms(300));
        late.store(a.request_count() - sent, Ordering::Relaxed);
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(failed.into_inner(), 0, "of {}", done.into_inner());
    assert_eq!(late.load(Ordering::Relaxed), 0, "requests to a drained server");
    router.wait_idle(seconds(5));
}

#[test]
fn a_drain_says_what_is_left_when_its_time_is_over() {
    let gate = Gate::new();
    let held = gate.clone();
    let a = Engine::start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(30));
        exchange.reply_ok()
    });
    let router = Setup::new().server("a", &a, &[]).start();
    let admin = router.admin().to_string();
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..2).map(|_| scope.spawn(|| router.post(CHAT, &chat("m", "x")).status)).collect();
        router.wait_metric("ringway_in_flight", &[("server", "a")], 2.0, seconds(5));
        let began = now();
        let left = drain(&router, "a", "?timeout_ms=150").json();
        assert!(began.elapsed() >= ms(150) && began.elapsed() < seconds(5), "{:?}", began.elapsed());
        assert_eq!((&left["idle"], &left["in_flight"]), (&json!(false), &json!(2)));
        let at_once = drain(&router, "a", "?timeout_ms=0").json();
        assert_eq!(at_once["idle"], false);

        let ended = run_to_exit(&["drain", "a", "--admin", &admin, "--timeout-ms", "50"], seconds(10));
        assert_eq!((ended.code, &*ended.stdout), (Some(3), ""));
        assert!(ended.stderr.contains("2 still run on it after"), "{}", ended.stderr);

        // A weight that comes back ends the drain: it would wait for a server that goes on working.
        let waiting = scope.spawn(|| drain(&router, "a", "?timeout_ms=20000"));
        pause(ms(100));
        assert_eq!(patch(&router, "a", &json!({"weight": 1})).status, 200);
        let overtaken = waiting.join().unwrap();
        assert_eq!((overtaken.status, &overtaken.json()["error"]["code"]), (409, &json!("drain_overtaken")));

        let waiting = scope.spawn(|| run_to_exit(&["drain", "a", "--admin", &admin], seconds(20)));
        pause(ms(100));
        gate.open();
        let ended = waiting.join().unwrap();
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
        assert!(ended.stdout.starts_with("a is idle after "), "{}", ended.stdout);
        for client in clients {
            assert_eq!(client.join().unwrap(), 200);
        }
    });
}

#[test]
fn the_commands_say_what_is_wrong_and_how_to_mend_it() {
    let a = Engine::answering();
    let router = Setup::new().server("a", &a, &[]).start();
    router.wait_up(&["a"]);
    router.post(CHAT, &chat("m", "x"));
    let admin = router.admin().to_string();
    let run = |args: &[&str]| run_to_exit(args, seconds(10));
    let status = run(&["status", "--admin", &admin]);
    assert_eq!((status.code, &*status.stderr), (Some(0), ""));
    assert!(
        status.stdout.starts_with("ringway ") && status.stdout.contains(", serving, up "),
        "{}",
        status.stdout
    );
    let line = status.stdout.lines().find(|line| line.trim_start().starts_with("a ")).expect("a line for a");
    assert!(line.contains("up") && line.contains("0/32"), "{line}");
    let json: Value = serde_json::from_str(&run(&["status", "--json", "--admin", &admin]).stdout).unwrap();
    assert_eq!(json["pools"][0]["servers"][0]["name"], "a");

    let nobody = run(&["drain", "b", "--admin", &admin]);
    assert_eq!((nobody.code, &*nobody.stdout), (Some(1), ""));
    assert!(nobody.stderr.contains("no server is called \"b\"; there are a"), "{}", nobody.stderr);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for args in [&["status", "--admin", &free][..], &["drain", "a", "--admin", &free]] {
        let ended = run(args);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(
            ended.stderr.contains("no router answers on") && ended.stderr.contains("--admin"),
            "{}",
            ended.stderr
        );
    }
    for args in [&["status", "--admin", "nonsense"][..], &["drain"], &["drain", "a", "--timeout-ms", "-1"]] {
        assert_eq!(run(args).code, Some(1), "{args:?}");
    }
    let strange = run(&["status", "--admin", &router.http().to_string()]);
    assert_eq!(strange.code, Some(1), "{}", strange.stderr);
}

/// Lifeboat rules: "capacity … from the engine's own cache size when it can be read, else configured, else a documented default".
#[test]
fn an_engine_s_own_word_on_its_cache_is_taken_and_shown() {
    let vllm = |blocks: u32| {
        let text = format!(
            "# TYPE vllm:cache_config_info gauge\n\
             vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"{blocks}\"}} 1.0\n"
        );
        Probe::Reply(200, text)
    };
    let ask = |setup: EngineSetup| setup.start(|exchange| exchange.reply_ok());
    let a = ask(EngineSetup::new().publishes("/metrics", vllm(800)));
    let props = r#"{"default_generation_settings":{"n_ctx":1792},"total_slots":5}"#;
    let b = ask(EngineSetup::new().publishes("/props", Probe::Reply(200, props.into())));
    let c = ask(EngineSetup::new()
        .publishes("/get_server_info", Probe::Reply(200, r#"{"max_total_num_tokens":6400}"#.into())));
    let (silent, hangs, unasked) = (
        ask(EngineSetup::new()),
        ask(EngineSetup::new().publishes("/metrics", Probe::Hang)),
        ask(EngineSetup::new().publishes("/metrics", vllm(800))),
    );
    let router = Setup::new()
        .pool("p", &["algorithm = \"kv-aware\""])
        .server("a", &a, &[])
        .server("b", &b, &["metrics = \"llamacpp\""])
        .server("c", &c, &[])
        .server("silent", &silent, &[])
        .server("hangs", &hangs, &[])
        .server("unasked", &unasked, &["metrics = \"none\""])
        .pool("q", &[])
        .server("plain", &silent, &[])
        .start();
    let capacity = |name: &str| {
        let server = router.server_state(name);
        (server["kv"]["capacity_blocks"].clone(), server["kv"]["capacity_source"].clone())
    };
    // Tokens × 4 bytes / 256 bytes.
    for (name, blocks) in [("a", 200), ("b", 140), ("c", 100)] {
        eventually(seconds(10), "the engine's own size", || match capacity(name) {
            (found, source) if found == blocks && source == "engine" => Ok(()),
            other => Err(format!("{name}: {other:?}")),
        });
    }
    for name in ["silent", "hangs", "unasked"] {
        assert_eq!(capacity(name), (json!(65_536), json!("default")), "{name}");
    }
    assert_eq!(router.server_state("plain")["kv"], Value::Null);
    assert_eq!(
        router.post(CHAT, &chat("m", "x")).status,
        200,
        "an engine that does not tell serves all the same"
    );
    let configured = Setup::new()
        .pool("p", &["algorithm = \"kv-aware\"", "[pool.kv]", "kv_capacity_blocks = 777"])
        .server("s", &silent, &[])
        .start();
    configured.wait_up(&["s"]);
    let kv = &configured.server_state("s")["kv"];
    assert_eq!((&kv["capacity_blocks"], &kv["capacity_source"]), (&json!(777), &json!("configured")));
}

/// Lifeboat rules, section 7: a server at its ceiling gets less than its share, and the state says so.
#[test]
fn drift_is_shown_with_its_likely_cause() {
    let slow = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.pause(ms(60));
        exchange.reply_ok()
    });
    let quick = Engine::answering();
    let router = Setup::new()
        .server("slow", &slow, &["max_concurrency = 1"])
        .server("quick", &quick, &["max_concurrency = 0"])
        .start();
    router.wait_up(&["slow", "quick"]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = router.client();
                let began = now();
                while began.elapsed() < ms(2500) {
                    assert_eq!(client.post(CHAT, &chat("m", "x")).status, 200);
                    pause(ms(10));
                }
            });
        }
    });
    let (slow, quick) = (router.server_state("slow"), router.server_state("quick"));
    let share = slow["share"].as_f64().expect("a share");
    assert!(share < 0.4 && slow["weight_share"] == 0.5, "{slow:#}");
    assert!((slow["drift"].as_f64().unwrap() - (share / 0.5 - 1.0)).abs() < 0.05, "{slow:#}");
    assert_eq!(
        (&slow["drift_badge"], &slow["drift_cause"]),
        (&json!(true), &json!("at_capacity")),
        "{slow:#}"
    );
    assert_eq!(quick["drift_cause"], "at_capacity", "it got what the other could not take: {quick:#}");
    assert!(router.metrics().sum("ringway_drift_ratio", &[("server", "slow")]) < -0.2);
    // Parked: what it got in the window is its drift.
    assert_eq!(patch(&router, "quick", &json!({"weight": 0})).json()["drift_cause"], "weight_0");
}

#[test]
fn the_state_says_that_the_process_is_ending() {
    let gate = Gate::new();
    let held = gate.clone();
    let a = Engine::start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(30));
        exchange.reply_ok()
    });
    let mut router = Setup::new().limit("drain_settle_ms = 200").server("a", &a, &[]).start();
    router.wait_up(&["a"]);
    assert_eq!(router.state()["phase"], "serving");
    assert_eq!(router.state()["shards"][0]["state"], "running");
    std::thread::scope(|scope| {
        let client = scope.spawn(|| router.post(CHAT, &chat("m", "x")).status);
        router.wait_metric("ringway_in_flight", &[], 1.0, seconds(5));
        router.signal(15);
        eventually(seconds(5), "draining", || {
            let state = router.state();
            match (state["phase"].as_str(), state["shards"][0]["state"].as_str()) {
                (Some("draining"), Some("draining")) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
        gate.open();
        assert_eq!(client.join().unwrap(), 200);
    });
    assert_eq!(router.wait_exit(seconds(10)), Some(0));
}

/// Lifeboat rules: "A server that restarts, is replaced, or whose address changes starts with an empty memory."
#[test]
fn a_restarted_engine_starts_with_an_empty_memory_and_a_slow_one_does_not() {
    let life = |started: u64| {
        let size = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"800\"} 1.0";
        Probe::Reply(200, format!("process_start_time_seconds {started}.5\n{size}\n"))
    };
    let prompt = "the same long prompt, again and again. ".repeat(60);
    for tells in [false, true] {
        let mut setup = EngineSetup::new();
        if tells {
            setup = setup.publishes("/metrics", life(1_700_000_000));
        }
        let engine = setup.start(|exchange| exchange.reply_ok());
        let router =
            Setup::new().shards(2).pool("p", &["algorithm = \"kv-aware\""]).server("s", &engine, &[]).start();
        let matched = |what: &str, expected: bool| {
            let response = router.post(CHAT, &chat("m", &prompt));
            let blocks = response.lifeboat("Prefix-Blocks").expect("kv-aware says what it knew");
            let (matched, total) = blocks.split_once('/').expect("matched/total");
            assert_eq!((matched != "0", total), (expected, "9"), "{what}: {blocks}\n{}", router.log());
            // Until both shards know.
            pause(ms(100));
        };
        let flap = || {
            engine.set_health(Probe::Reply(500, "{}".into()));
            router.wait_not_up("s");
            engine.set_health(Probe::ok());
            router.wait_up(&["s"]);
        };
        matched("new", false);
        matched("known", true);
        if tells {
            eventually(seconds(5), "a scrape", || match router.server_state("s") {
                state if state["kv"]["capacity_source"] == "engine" => Ok(()),
                state => Err(format!("{state:#}")),
            });
            flap();
            pause(ms(200));
            matched("the same process", true);
            engine.publish("/metrics", life(1_800_000_000));
            flap();
            eventually(seconds(5), "the new start is seen", || {
                if router.log().contains("its engine restarted") { Ok(()) } else { Err(router.log()) }
            });
            pause(ms(100));
        } else {
            flap();
        }
        matched("restarted", false);
    }
}
