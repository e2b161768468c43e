//! Starting, stopping, checking: what operators and scripts rely on.

mod support;

use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use support::router::socket_path;
use support::*;

/// A21: whatever way 1,500 requests end (answered, aborted before or after the head, reset or cut by the engine, out of
/// time, too large, unknown model, malformed), every gauge is back at zero, and every request is counted as finished.
#[test]
fn a21_gauges_return_to_zero_however_requests_end() {
    const CLIENTS: usize = 50;
    const EACH: usize = 30;
    const KINDS: u64 = 10;
    let engine = || {
        Engine::start(|exchange| {
            exchange.read_body()?;
            let text = String::from_utf8_lossy(&exchange.request.body).into_owned();
            let kind: u64 =
                text.split("kind-").nth(1).and_then(|t| t.split('-').next()?.parse().ok()).unwrap_or(0);
            match kind {
                1 => {
                    exchange.wait_close(seconds(5));
                    Ok(Next::Close)
                }
                2 => {
                    exchange.stream_head()?;
                    exchange.chunk(b"data: 1\n\n")?;
                    exchange.wait_close(seconds(5));
                    Ok(Next::Close)
                }
                3 => Ok(Next::Reset),
                4 => {
                    exchange.stream_head()?;
                    exchange.chunk(b"data: 1\n\n")?;
                    Ok(Next::Reset)
                }
                5 => {
                    // Longer than the router waits for a head.
                    exchange.wait_close(seconds(5));
                    Ok(Next::Close)
                }
                9 => {
                    exchange.stream_head()?;
                    for _ in 0..5 {
                        exchange.chunk(b"data: 1\n\n")?;
                    }
                    exchange.end()
                }
                _ => exchange.reply_ok(),
            }
        })
    };
    let (one, two) = (engine(), engine());
    let router = Setup::new()
        .shards(2)
        .limit("response_head_timeout_ms = 1500")
        .limit("body_bytes_max = 100000")
        .health("bench_after = 1000000")
        .server("a", &one, &["max_concurrency = 20"])
        .server("b", &two, &["max_concurrency = 20"])
        .start();
    let ended = [const { AtomicUsize::new(0) }; KINDS as usize];
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (router, ended) = (&router, &ended);
            scope.spawn(move || {
                let mut dice = Dice::new(number as u64 + 3);
                for turn in 0..EACH {
                    let kind = dice.below(KINDS);
                    let body = chat("m", &format!("kind-{kind}-{number}-{turn}"));
                    let mut client = router.client();
                    match kind {
                        1 => {
                            client.send(&request("POST", CHAT, &[], &body));
                            pause(ms(dice.below(40)));
                            if turn % 2 == 0 { drop(client) } else { client.reset() }
                        }
                        2 => {
                            client.send(&request("POST", CHAT, &[], &body));
                            let (status, ..) = client.head().expect("a head");
                            assert_eq!(status, 200);
                            if turn % 2 == 0 { drop(client) } else { client.reset() }
                        }
                        3 => assert_eq!(client.post(CHAT, &body).status, 502),
                        4 => {
                            client.send(&request("POST", CHAT, &[], &body));
                            // The reset may overtake the head, then it is a 502.
                            match client.try_response() {
                                Ok(response) => assert_eq!(response.status, 502, "{}", response.text()),
                                Err((fault, _)) => {
                                    assert!(matches!(fault, Fault::Eof { .. } | Fault::Reset), "{fault}");
                                }
                            }
                        }
                        5 => assert_eq!(client.post(CHAT, &body).status, 504),
                        6 => {
                            let _ = client.try_send(&request("POST", CHAT, &[], &[b'x'; 100_001]));
                            assert_eq!(client.response().status, 413);
                        }
                        7 => assert_eq!(client.post(CHAT, &chat("nobody", "x")).status, 404),
                        _ => {
                            let response = client.post(CHAT, &body);
                            assert_eq!(response.status, 200, "{}", response.text());
                        }
                    }
                    ended[kind as usize].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let ended: Vec<_> = ended.into_iter().map(AtomicUsize::into_inner).collect();
    assert_eq!(ended.iter().sum::<usize>(), CLIENTS * EACH);
    assert!(ended.iter().all(|n| *n > 50), "{ended:?}");
    router.wait_metric("ringway_active_requests", &[], 0.0, seconds(2));
    router.wait_idle(seconds(2));
    router.wait_metric("ringway_connections", &[], 0.0, seconds(2));
    for name in ["a", "b"] {
        assert_eq!(router.server_state(name)["in_flight"], 0);
    }
    let metrics = router.metrics();
    let finished = metrics.sum("ringway_requests_finished_total", &[]);
    assert_eq!(finished, (CLIENTS * EACH) as f64, "every request is finished once");
    let rejections = |reason: &str| metrics.sum("ringway_rejections_total", &[("reason", reason)]);
    assert_eq!(rejections("body_too_large"), ended[6] as f64);
    assert_eq!(rejections("model_not_found"), ended[7] as f64);
    assert_eq!(rejections("upstream_timeout"), ended[5] as f64);
    let aborts = metrics.sum("ringway_client_aborts_total", &[]);
    assert_eq!(aborts, (ended[1] + ended[2]) as f64);
    let cut = metrics.sum("ringway_upstream_errors_total", &[("kind", "truncated")])
        + metrics.sum("ringway_upstream_errors_total", &[("kind", "before_head")]);
    assert_eq!(cut, (ended[3] + ended[4]) as f64);
}

/// A23: alive is not ready. With no server up, liveness is 200 and readiness 503; readiness follows the first server up
/// within a check's interval and the last one down within the failing checks; both on both listeners.
#[test]
fn a23_readiness_follows_the_servers() {
    let place = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = place.local_addr().unwrap();
    drop(place);
    let router = Setup::new()
        .health("interval_ms = 300")
        .health("timeout_ms = 300")
        .server_at("a", &format!("http://{address}"), &[])
        .start_unready();
    let readiness = |want: u16| {
        let statuses = [router.get("/readiness").status, router.admin_get("/readiness").status];
        if statuses == [want; 2] { Ok(()) } else { Err(format!("{statuses:?}")) }
    };
    assert_eq!(readiness(503), Ok(()));
    assert_eq!((router.get("/liveness").status, router.admin_get("/liveness").status), (200, 200));
    assert_eq!(router.admin_get("/health").status, 200);
    router.post(CHAT, &chat("m", "x")).assert_rejected(503, "no_healthy_server").assert_retry_after();
    for _ in 0..2 {
        let mut engine = EngineSetup::new().address(address).start(|exchange| exchange.reply_ok());
        eventually(ms(300 + 300), "ready within an interval", || readiness(200));
        assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200);
        engine.stop();
        eventually(ms(2 * 300 + 300 + 300), "not ready within two failing checks", || readiness(503));
        assert_eq!(router.get("/liveness").status, 200);
    }
}

/// Ready means ready: a request sent the moment that the admin page says so is served, whichever shard gets it.
#[test]
fn a_ready_router_serves_the_very_next_request() {
    let engine = Engine::answering();
    for _ in 0..5 {
        let router = Setup::new().shards(4).server("a", &engine, &["max_concurrency = 0"]).start_unready();
        let mut admin = Client::connect(router.admin());
        let start = now();
        while admin.ask("GET", "/readiness", &[], b"").status != 200 {
            assert!(start.elapsed() < seconds(5), "never ready: {}", router.log());
        }
        for number in 0..16 {
            let response = router.post(CHAT, &chat("m", "x"));
            assert_eq!(response.status, 200, "request {number}: {}", response.text());
        }
    }
}

/// A server that fails its checks gets nothing; `fall` and `rise` count checks in a row; a hanging check is a failed one.
#[test]
fn health_checks_take_servers_out_and_bring_them_back() {
    let (one, two) = (Engine::answering(), Engine::answering());
    let router =
        Setup::new().health("timeout_ms = 1000").server("a", &one, &[]).server("b", &two, &[]).start();
    for probe in [Probe::Reply(500, String::new()), Probe::Hang, Probe::Reply(404, String::new())] {
        two.set_health(probe.clone());
        router.wait_not_up("b");
        let before = two.request_count();
        for _ in 0..10 {
            assert_eq!(
                router.post(CHAT, &chat("m", "x")).lifeboat("Server").as_deref(),
                Some("a"),
                "{probe:?}"
            );
        }
        assert_eq!(two.request_count(), before);
        two.set_health(Probe::ok());
        router.wait_up(&["a", "b"]);
        for _ in 0..4 {
            assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200);
        }
        assert!(two.request_count() > before, "back in turn");
    }
    // One failed check is not two.
    let slow = Setup::new().health("fall = 1000").server("a", &one, &[]).start();
    one.set_health(Probe::Reply(500, String::new()));
    let (seen, _) = one.probes();
    eventually(seconds(5), "a few checks fail", || {
        if one.probes().0 > seen + 5 { Ok(()) } else { Err("not yet".into()) }
    });
    assert_eq!(slow.server_state("a")["state"], "up");
}

/// Checks are the router's own requests: they are not counted, and take no slot.
#[test]
fn checks_are_not_requests() {
    let engine = Engine::answering();
    let router =
        Setup::new().health("interval_ms = 20").server("a", &engine, &["max_concurrency = 1"]).start();
    eventually(seconds(5), "many checks", || if engine.probes().0 > 20 { Ok(()) } else { Err("few".into()) });
    let metrics = router.metrics();
    for name in [
        "ringway_requests_total",
        "ringway_requests_finished_total",
        "ringway_in_flight",
        "ringway_rejections_total",
    ] {
        assert_eq!(metrics.sum(name, &[]), 0.0, "{name}");
    }
    assert_eq!(router.server_state("a")["dispatched"], 0);
}

/// What cannot start says why and exits with 2: a port in use, whoever uses it, also another router (which shares ports
/// among its own shards).
#[test]
fn a_port_in_use_is_exit_code_2() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap().to_string();
    let backend = ["--backend", "http://127.0.0.1:9"];
    for flags in
        [["--listen", &address, "--admin", "127.0.0.1:0"], ["--listen", "127.0.0.1:0", "--admin", &address]]
    {
        let ended = run_to_exit(&[&["serve"], &flags[..], &backend[..]].concat(), seconds(10));
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(&address), "says which address: {ended:?}");
        assert!(!ended.stdout.contains("ready"), "{ended:?}");
    }
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &[]).start();
    let address = router.http().to_string();
    let ended = run_to_exit(
        &[&["serve", "--listen", &address, "--admin", "127.0.0.1:0"], &backend[..]].concat(),
        seconds(10),
    );
    assert_eq!(ended.code, Some(2), "another router's port: {ended:?}");
    for _ in 0..20 {
        assert_eq!(router.post(CHAT, b"{}").status, 200, "the first router lost nothing");
    }
}

/// Wrong usage and wrong configuration are exit code 1, with the fault named.
#[test]
fn wrong_usage_and_configuration_are_exit_code_1() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all(b"[limits]\nbody_bytes_max = -1\nbody_byte_max = 5\n[[pool]]\nname = \"p\"\nalgorithm = \"fastest\"\n").unwrap();
    let path = file.path().to_str().unwrap();
    let cases: [(&[&str], &[&str]); 9] = [
        (&["serve", "--no-such-flag"], &["--no-such-flag"]),
        (&["no-such-command"], &["no-such-command"]),
        (&[], &[]),
        (&["serve", "--config", "/nonexistent/ringway.toml"], &["/nonexistent/ringway.toml"]),
        (&["serve", "--config", path], &["body_bytes_max", "body_byte_max", "fastest"]),
        (&["serve", "--backend", "ftp://x"], &["ftp://x"]),
        (&["serve", "--backend", "http://127.0.0.1:9", "--algorithm", "fastest"], &["fastest"]),
        (&["serve", "--backend", "http://127.0.0.1:9", "--listen", "nowhere"], &["nowhere"]),
        (&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], &["backend"]),
    ];
    for (args, words) in cases {
        let ended = run_to_exit(args, seconds(10));
        assert_eq!(ended.code, Some(1), "{args:?}: {ended:?}");
        let text = format!("{}{}", ended.stdout, ended.stderr);
        for word in words {
            assert!(text.contains(word), "{args:?} does not name {word}: {ended:?}");
        }
        assert!(!ended.stderr.contains("panicked"), "{ended:?}");
    }
    for flag in ["--help", "--version"] {
        let ended = run_to_exit(&[flag], seconds(10));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("ringway"), "{ended:?}");
    }
}

/// Without a file: flags only, one pool called `default`, names from `NAME=URL`. Environment variables do the same, and a
/// flag beats them.
#[test]
fn flags_alone_make_a_router() {
    let (one, two) = (Engine::answering(), Engine::answering());
    let named = format!("named={}", two.url());
    let cpu = support::router::cpus()[0].to_string();
    let router = Router::spawn(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
        "--backend",
        &one.url(),
        "--backend",
        &named,
        "--algorithm",
        "least-connections",
        "--cores",
        &cpu,
    ]);
    eventually(seconds(10), "both serve", || {
        let response = router.post(CHAT, &chat("m", "x"));
        if response.status != 200 {
            return Err(response.text());
        }
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("default"));
        assert_eq!(response.lifeboat("Algorithm").as_deref(), Some("least-connections"));
        if response.lifeboat("Server").as_deref() == Some("named") { Ok(()) } else { Err("the other".into()) }
    });
}

/// A server behind a Unix socket is a server like any other: checks, models, bodies, streams, aborts.
#[test]
fn a_server_may_be_a_unix_socket() {
    let path = socket_path("engine");
    let mut engine = EngineSetup::new().unix(&path).start(|exchange| {
        if exchange.body_has("abort")? {
            exchange.wait_close(seconds(10));
            return Ok(Next::Close);
        }
        if exchange.body_has("stream")? {
            exchange.stream_head()?;
            exchange.chunk(b"data: 1\n\n")?;
            return exchange.end();
        }
        exchange.reply_ok()
    });
    let router = Setup::new().server("local", &engine, &[]).start();
    let mut client = router.client();
    let body = pattern(1, 300_000);
    for _ in 0..3 {
        let response = client.post("/v1/embeddings", &body);
        assert_eq!((response.status, response.lifeboat("Server").as_deref()), (200, Some("local")));
    }
    assert_bytes(&engine.requests()[2].body, &body, "the body");
    assert!(engine.requests()[2].ordinal > 0, "connections are kept");
    assert_eq!(client.post(CHAT, &chat("m", "stream")).text(), "data: 1\n\n");
    let before = engine.request_count();
    client.send(&request("POST", CHAT, &[], &chat("m", "abort")));
    let connection = engine.wait_requests(before + 1)[before].connection;
    drop(client);
    engine.wait_closed(connection, seconds(1));
    router.wait_idle(seconds(1));
    engine.stop();
    eventually(seconds(5), "it is down", || {
        let response = router.post(CHAT, b"{}");
        if response.status == 503 { Ok(()) } else { Err(response.status.to_string()) }
    });
    engine.listen();
    router.wait_up(&["local"]);
    assert_eq!(router.post(CHAT, b"{}").status, 200);
}

/// Descriptors: after hundreds of requests of every kind, aborted ones and refused ones included, none is left over.
#[test]
fn no_descriptor_is_lost() {
    let mut engine = Engine::start(|exchange| {
        if exchange.body_has("abort")? {
            exchange.wait_close(seconds(10));
            return Ok(Next::Close);
        }
        if exchange.body_has("reset")? {
            return Ok(Next::Reset);
        }
        if exchange.body_has("cut")? {
            exchange.stream_head()?;
            exchange.chunk(b"data: 1\n\n")?;
            return Ok(Next::Close);
        }
        exchange.reply_ok()
    });
    let router =
        Setup::new().health("bench_after = 1000000").server("a", &engine, &["max_concurrency = 4"]).start();
    let round = |router: &Router, engine: &Engine| {
        std::thread::scope(|scope| {
            for number in 0..8 {
                scope.spawn(move || {
                    for turn in 0..25 {
                        let mut client = router.client();
                        match (number + turn) % 6 {
                            0 => {
                                client.send(&request("POST", CHAT, &[], &chat("m", "abort")));
                                pause(ms(5));
                            }
                            1 => {
                                client.post(CHAT, &chat("m", "reset"));
                            }
                            2 => {
                                client.send(&request("POST", CHAT, &[], &chat("m", "cut")));
                                let _ = client.try_response();
                            }
                            3 => {
                                let _ = client.try_send(b"POST / HTTP/1.1\r\nHost: r\r\nContent-Le");
                            }
                            4 => {
                                let _ = client.try_send(b"nonsense\r\n\r\n");
                                let _ = client.try_response();
                            }
                            _ => {
                                client.post(CHAT, &chat("m", "fine"));
                            }
                        }
                        if turn % 2 == 0 {
                            client.reset();
                        }
                    }
                });
            }
        });
        router.wait_idle(seconds(5));
        router.wait_metric("ringway_connections", &[], 0.0, seconds(3));
        let _ = engine;
    };
    round(&router, &engine);
    let first = router.descriptors();
    for _ in 0..3 {
        round(&router, &engine);
    }
    // Up to four connections to the engine are kept for later, and the admin listener may be closing one.
    eventually(seconds(3), "no more descriptors than after the first round", || {
        let count = router.descriptors();
        if count <= first + 5 { Ok(()) } else { Err(format!("{count} instead of {first}")) }
    });
    // With the engine gone, the kept connections go too.
    engine.stop();
    for _ in 0..3 {
        router.post(CHAT, &chat("m", "fine"));
    }
    eventually(seconds(5), "nothing is left over", || {
        let count = router.descriptors();
        if count <= first { Ok(()) } else { Err(format!("{count} instead of {first}")) }
    });
}

/// An engine whose answers are streams of `events` events, `gap` apart.
fn streaming(events: usize, gap: Duration) -> Engine {
    Engine::start(move |exchange| {
        exchange.stream_head()?;
        for number in 0..events {
            exchange.chunk(format!("data: {number}\n\n").as_bytes())?;
            exchange.pause(gap);
        }
        exchange.end()
    })
}

/// Drivers: the same router on epoll serves the same.
#[test]
fn the_epoll_driver_serves_too() {
    let engine = streaming(5, ms(10));
    let router = Setup::new().runtime("driver = \"epoll\"").server("a", &engine, &[]).start();
    let mut client = router.client();
    for _ in 0..5 {
        let response = client.post(CHAT, &chat_stream("m", "x"));
        assert_eq!((response.status, response.body.len()), (200, 5 * "data: 0\n\n".len()));
    }
    client.send(&request("POST", CHAT, &[], &chat_stream("m", "x")));
    client.head().unwrap();
    drop(client);
    router.wait_idle(seconds(1));
    router.wait_metric("ringway_client_aborts_total", &[], 1.0, seconds(2));
}

/// Where io_uring is allowed, it is what runs, and the log says so.
#[test]
fn the_log_says_which_driver_runs() {
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &[]).start();
    eventually(seconds(2), "the log names the driver", || {
        let log = router.log();
        if log.contains("io_uring") { Ok(()) } else { Err(log) }
    });
}

/// A spinning shard serves, keeps its timers and sees new clients.
#[test]
fn a_spinning_shard_keeps_its_timers_and_accepts() {
    let engine = Engine::start(|exchange| {
        if exchange.body_has("hang")? {
            exchange.wait_close(seconds(10));
            return Ok(Next::Close);
        }
        exchange.reply_ok()
    });
    let router = Setup::new()
        .runtime("spin_us = 200")
        .limit("response_head_timeout_ms = 200")
        .server("a", &engine, &[])
        .start();
    for _ in 0..10 {
        assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200);
        pause(ms(5));
    }
    router.post(CHAT, &chat("m", "hang")).assert_rejected(504, "upstream_timeout");
}
