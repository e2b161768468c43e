//! What may be sent again, what must not, and when a server is left alone for a while.

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::*;

/// The number that a test put into a body as `id-N-`.
fn id_of(body: &[u8]) -> usize {
    let text = String::from_utf8_lossy(body);
    let from = text.find("id-").expect("an id") + 3;
    text[from..].split('-').next().and_then(|digits| digits.parse().ok()).expect("a number")
}

/// A4 for one way an engine closes its idle connections: many POSTs with pauses of 0 to 100 ms between them, every one
/// answered with 200 and read by the engine exactly once. Only where the engine closed with the request already on its
/// way (the mock counts those) may the router say 502, because it cannot know whether it was read.
fn stale_connections_cost_no_request(next: Next) {
    const CLIENTS: usize = 8;
    const EACH: usize = 125;
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        if next == Next::Close {
            // The answer and the end of the connection leave together, as from an engine that closes at once.
            exchange.cork();
        }
        exchange.reply_ok()?;
        Ok(next)
    });
    // The checks of the engine's health use connections of their own; none of them is to disturb the count.
    let router = Setup::new().server("a", &engine, &["max_concurrency = 0"]).start();
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (router, failed) = (&router, &failed);
            scope.spawn(move || {
                let mut dice = Dice::new(number as u64 + 7);
                let mut client = router.client();
                for turn in 0..EACH {
                    let id = number * EACH + turn;
                    let response = client.post(CHAT, &chat("m", &format!("id-{id}-")));
                    if response.status != 200 {
                        let text = format!("{}{}", response.head.text(), response.text());
                        failed.lock().expect("no holder panics").push((id, text));
                    }
                    if !response.keeps {
                        client = router.client();
                    }
                    pause(ms(dice.below(101)));
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no holder panics");
    assert!(
        failed.len() <= engine.raced(),
        "{} races, but {} failures: {failed:#?}",
        engine.raced(),
        failed.len()
    );
    assert!(failed.len() <= 5, "races are rare: {failed:#?}");
    let mut seen = HashMap::new();
    for request in engine.requests() {
        *seen.entry(id_of(&request.body)).or_insert(0) += 1;
    }
    let lost = failed.iter().map(|(id, _)| id).collect::<Vec<_>>();
    for id in 0..CLIENTS * EACH {
        let times = seen.get(&id).copied().unwrap_or(0);
        assert!(times == 1 || times == 0 && lost.contains(&&id), "request {id} was read {times} times");
    }
    // The test has met what it is about: connections were used again in the one variant, and never in the other.
    let again = engine.requests().iter().filter(|r| r.ordinal > 0).count();
    assert_eq!(again > 0, next != Next::Close, "{again} requests on used connections");
}

/// A4, first variant: the engine closes each connection right after its answer, and did not say so.
#[test]
fn a4_an_engine_that_closes_after_each_answer_costs_no_request() {
    stale_connections_cost_no_request(Next::Close);
}

/// A4, second variant: the engine closes connections that were idle for 50 ms, in the middle of the clients' pauses.
#[test]
fn a4_an_engine_with_a_short_idle_limit_costs_no_request() {
    stale_connections_cost_no_request(Next::CloseAfter(ms(50)));
}

/// How an engine ends a request that it has read, without an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Death {
    ResetAfterBody,
    FinAfterBody,
    ResetInBody,
    FinInsideHead,
}

/// A14 for one way to die: two equal engines, both die alike. Whatever happens, one POST reaches one of them, and the
/// client gets 502 with a clear code. `warm`: the connection has carried an answered request before.
fn a_request_that_was_read_is_not_sent_again(death: Death, warm: bool) {
    let dying = || {
        Engine::start(move |exchange| {
            if warm && exchange.request.ordinal == 0 {
                return exchange.reply_ok();
            }
            match death {
                Death::ResetInBody => {
                    exchange.body_piece()?;
                    Ok(Next::Reset)
                }
                Death::ResetAfterBody => {
                    exchange.read_body()?;
                    Ok(Next::Reset)
                }
                Death::FinAfterBody => {
                    exchange.read_body()?;
                    Ok(Next::Close)
                }
                Death::FinInsideHead => {
                    exchange.read_body()?;
                    exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Type: te")?;
                    Ok(Next::Close)
                }
            }
        })
    };
    let what = format!("{death:?}, {} connection", if warm { "used" } else { "fresh" });
    let (one, two) = (dying(), dying());
    let router =
        Setup::new().health("bench_after = 1000").server("a", &one, &[]).server("b", &two, &[]).start();
    let total = || one.request_count() + two.request_count();
    let mut before = 0;
    if warm {
        let mut client = router.client();
        for _ in 0..2 {
            assert_eq!(client.post(CHAT, &chat("m", "warm")).status, 200);
        }
        before = total();
    }
    let mut body = chat("m", "x");
    if death == Death::ResetInBody {
        body = br#"{"model":"m","filler":""#.to_vec();
        body.resize(8 << 20, b'x');
        body.extend_from_slice(b"\"}");
    }
    for number in 1..=2 {
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[], &body));
        let response = client.response();
        assert_eq!(response.status, 502, "{what}: {}", response.head.text());
        response.assert_rejected(502, "upstream_error");
        assert_eq!(response.lifeboat("Retries"), None, "{what}");
        assert_eq!(total(), before + number, "{what}: a generation ran twice");
    }
    if warm {
        let fresh = [&one, &two].iter().flat_map(|e| e.requests()).filter(|r| r.ordinal > 0).count();
        assert!(fresh > 0, "{what}: the connections were used again, or this proves nothing");
    }
    router.wait_metric("ringway_upstream_errors_total", &[], 2.0, seconds(2));
    router.wait_metric("ringway_retries_total", &[], 0.0, seconds(1));
    router.wait_idle(seconds(1));
}

/// A14: an engine that read the whole body and then resets: one POST in all, and 502 for the client.
#[test]
fn a14_reset_after_the_body_is_502_once() {
    a_request_that_was_read_is_not_sent_again(Death::ResetAfterBody, false);
}

/// A14: the same on a connection that was kept from an earlier request, which looks like a stale one and is none.
#[test]
fn a14_reset_after_the_body_on_a_used_connection_is_502_once() {
    a_request_that_was_read_is_not_sent_again(Death::ResetAfterBody, true);
}

/// A14: the engine read everything and closes in order, without a word.
#[test]
fn a14_close_after_the_body_is_502_once() {
    a_request_that_was_read_is_not_sent_again(Death::FinAfterBody, false);
    a_request_that_was_read_is_not_sent_again(Death::FinAfterBody, true);
}

/// A14: the engine resets in the middle of the body, or closes in the middle of its answer's head.
#[test]
fn a14_death_in_the_middle_is_502_once() {
    a_request_that_was_read_is_not_sent_again(Death::ResetInBody, false);
    a_request_that_was_read_is_not_sent_again(Death::FinInsideHead, false);
    a_request_that_was_read_is_not_sent_again(Death::FinInsideHead, true);
}

/// A14, the safe case: nobody listens at the first server's port. The request goes to the other one, exactly once, and the
/// answer says that it was sent again.
#[test]
fn a14_a_refused_connection_goes_to_the_other_server_once() {
    let mut gone = Engine::answering();
    let engine = Engine::answering();
    let router = Setup::new()
        // Nobody looks at the servers' health in between.
        .health("interval_ms = 60000")
        .health("bench_after = 1000")
        .server("gone", &gone, &[])
        .server("there", &engine, &[])
        .start();
    gone.stop();
    let mut resent = 0;
    for number in 0..10 {
        let body = chat("m", &format!("id-{number}-"));
        let response = router.post(CHAT, &body);
        assert_eq!(response.status, 200, "{}{}", response.head.text(), response.text());
        assert_eq!(response.lifeboat("Server").as_deref(), Some("there"));
        match response.lifeboat("Retries").as_deref() {
            None => {}
            Some("1") => resent += 1,
            other => panic!("retries: {other:?}"),
        }
    }
    assert_eq!(resent, 5, "every second request met the closed port first");
    let ids: Vec<_> = engine.requests().iter().map(|r| id_of(&r.body)).collect();
    assert_eq!(ids, (0..10).collect::<Vec<_>>(), "each request once");
    assert_eq!(gone.request_count(), 0);
    let metrics = router.metrics();
    assert_eq!(metrics.sum("ringway_retries_total", &[]), 5.0);
    assert_eq!(metrics.sum("ringway_upstream_errors_total", &[("server", "gone"), ("kind", "connect")]), 5.0);
    router.wait_idle(seconds(1));
}

/// The same with a body that was already partly streamed in: it is kept as long as it may have to be sent again.
#[test]
fn a14_a_long_body_survives_a_refused_connection() {
    let mut gone = Engine::answering();
    let engine = Engine::answering();
    let router = Setup::new()
        .health("interval_ms = 60000")
        .health("bench_after = 1000")
        .limit("replay_bytes_max = 1048576")
        .limit("classify_bytes_max = 65536")
        .server("gone", &gone, &[])
        .server("there", &engine, &[])
        .start();
    gone.stop();
    // 900 KB are kept whole; 5 MB are not, but nothing of them is lost before a connection is there.
    for (number, size) in [900_000, 900_000, 5_000_000, 5_000_000].into_iter().enumerate() {
        let body = pattern(number, size);
        let response = router.post("/v1/embeddings", &body);
        assert_eq!(response.status, 200, "{size}: {}", response.text());
        assert_bytes(&engine.requests().pop().unwrap().body, &body, "the body");
    }
    assert_eq!(engine.request_count(), 4);
}

/// Nobody listens anywhere: 502 after each server was tried once at most, and no request hangs.
#[test]
fn every_server_refusing_is_502() {
    let mut engines: Vec<_> = (0..2).map(|_| Engine::answering()).collect();
    let router = Setup::new()
        .health("interval_ms = 60000")
        .server("a", &engines[0], &[])
        .server("b", &engines[1], &[])
        .start();
    for engine in &mut engines {
        engine.stop();
    }
    for _ in 0..3 {
        let start = now();
        let response = router.post(CHAT, &chat("m", "x"));
        assert!(start.elapsed() < seconds(2));
        match response.status {
            502 => response.assert_rejected(502, "upstream_error"),
            _ => response.assert_rejected(503, "no_healthy_server"),
        };
    }
    router.wait_idle(seconds(1));
}

/// Three failures in a row bench a server: for `bench_ms` nothing is sent to it, then it is tried again, and one
/// success clears it.
#[test]
fn three_failures_bench_a_server_until_it_recovers() {
    let failing = Arc::new(AtomicBool::new(true));
    let fails = Arc::clone(&failing);
    let bad = Engine::start(move |exchange| {
        if fails.load(Ordering::SeqCst) {
            exchange.reply(503, &[], b"engine says no")
        } else {
            exchange.reply_ok()
        }
    });
    let good = Engine::answering();
    let router =
        Setup::new().health("bench_ms = 700").server("bad", &bad, &[]).server("good", &good, &[]).start();
    // The engine's own 503 is its answer: it reaches the client, and counts.
    let mut refused = 0;
    for _ in 0..6 {
        let response = router.post(CHAT, &chat("m", "x"));
        if response.status == 503 {
            assert_eq!(response.text(), "engine says no");
            assert_eq!(response.lifeboat("Server").as_deref(), Some("bad"));
            assert_eq!(response.lifeboat("Reject-Reason"), None, "the router did not reject it");
            refused += 1;
        }
    }
    assert_eq!(
        (refused, bad.request_count(), good.request_count()),
        (3, 3, 3),
        "every second one until benched"
    );
    let benched_at = now();
    eventually(seconds(1), "the state page says so", || {
        let state = router.server_state("bad")["state"].clone();
        if state == "benched" { Ok(()) } else { Err(state.to_string()) }
    });
    while benched_at.elapsed() < ms(500) {
        assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200, "nothing goes to a benched server");
    }
    assert_eq!(bad.request_count(), 3);
    failing.store(false, Ordering::SeqCst);
    eventually(seconds(3), "it is tried again", || {
        assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200);
        if bad.request_count() > 3 { Ok(()) } else { Err("not yet".into()) }
    });
    let (before_bad, before_good) = (bad.request_count(), good.request_count());
    for _ in 0..10 {
        assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200);
    }
    assert_eq!(
        (bad.request_count() - before_bad, good.request_count() - before_good),
        (5, 5),
        "its full share again"
    );
    let errors =
        router.metrics().sum("ringway_upstream_errors_total", &[("server", "bad"), ("kind", "status")]);
    assert_eq!(errors, 3.0);
}

/// The last eligible server of a pool is never benched: trying it is better than refusing everybody.
#[test]
fn the_last_server_is_never_benched() {
    let failing = Arc::new(AtomicBool::new(true));
    let fails = Arc::clone(&failing);
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        if fails.load(Ordering::SeqCst) { Ok(Next::Reset) } else { exchange.reply_ok() }
    });
    let router = Setup::new().server("a", &engine, &[]).start();
    for _ in 0..8 {
        router.post(CHAT, &chat("m", "x")).assert_rejected(502, "upstream_error");
    }
    assert_eq!(engine.request_count(), 8, "every request was tried");
    failing.store(false, Ordering::SeqCst);
    assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200, "at once");
}

/// What clients do wrong is no fault of a server: 200 answers of 400 and 429 bench nobody.
#[test]
fn answers_of_4xx_bench_nobody() {
    let turn = Arc::new(AtomicUsize::new(0));
    let complaining = || {
        let turn = Arc::clone(&turn);
        Engine::start(move |exchange| {
            if exchange.body_has("good")? {
                return exchange.reply_ok();
            }
            let status = [400, 404, 422, 429][turn.fetch_add(1, Ordering::SeqCst) % 4];
            exchange.reply(status, &[("Retry-After", "7")], br#"{"error":{"message":"too long"}}"#)
        })
    };
    let (one, two) = (complaining(), complaining());
    let router = Setup::new().server("a", &one, &[]).server("b", &two, &[]).start();
    let mut client = router.client();
    for _ in 0..200 {
        let response = client.post(CHAT, &chat("m", "bad"));
        assert!((400..430).contains(&response.status));
        assert_eq!(
            response.header("Retry-After").as_deref(),
            Some("7"),
            "the engine's answer passes unchanged"
        );
    }
    assert_eq!(client.post(CHAT, &chat("m", "good")).status, 200);
    for name in ["a", "b"] {
        assert_eq!(router.server_state(name)["state"], "up");
    }
    assert_eq!(
        (
            one.request_count() + two.request_count(),
            router.metrics().sum("ringway_upstream_errors_total", &[])
        ),
        (201, 0.0)
    );
}

/// A listener that never accepts, and clients that fill its queue: the kernel drops further connects.
struct Hung {
    url: String,
    _listener: socket2::Socket,
    _fillers: Vec<std::net::TcpStream>,
}

impl Hung {
    fn at(address: std::net::SocketAddr) -> Hung {
        let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        listener.set_reuse_address(true).unwrap();
        listener.bind(&address.into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut fillers = Vec::new();
        while let Ok(filler) = std::net::TcpStream::connect_timeout(&address, ms(200)) {
            fillers.push(filler);
            assert!(fillers.len() < 64, "the queue of the listener does not fill");
        }
        Hung { url: format!("http://{address}"), _listener: listener, _fillers: fillers }
    }
}

/// An engine that accepts connections but never takes them (its backlog is full): after `connect_timeout_ms` the
/// request goes to the other server.
#[test]
fn a_connect_that_hangs_goes_elsewhere() {
    let hung = Hung::at(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    let engine = Engine::answering();
    let router = Setup::new()
        .limit("connect_timeout_ms = 300")
        // Its health cannot be seen either; so it must count as up for long enough.
        .health("interval_ms = 60000")
        .health("fall = 1000")
        .server_at("hung", &hung.url, &["models = [\"m\"]"])
        .server("there", &engine, &[])
        .start_unready();
    router.wait_up(&["there"]);
    for _ in 0..4 {
        let start = now();
        let response = router.post(CHAT, &chat("m", "x"));
        assert_eq!(response.status, 200, "{}", response.text());
        let took = start.elapsed();
        let limit = Duration::from_millis(1500);
        assert!(took < limit, "after {took:?}");
        if response.lifeboat("Retries").is_some() {
            assert!(took >= ms(280), "after {took:?}");
        }
    }
    assert_eq!(engine.request_count(), 4);
}

/// A server that says it keeps the connection after a stream, closes it a moment later all the same, and goes on reading:
/// what arrives meanwhile is acknowledged and thrown away, so it cannot be sent again. llama.cpp's server does this. Streams
/// one behind the other must all be answered.
#[test]
fn streams_back_to_back_outlive_a_server_that_closes_and_drains() {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener};

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serve = move || {
        for (number, stream) in listener.incoming().enumerate() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let (mut seen, mut piece) = (Vec::new(), [0; 4096]);
                while !seen.ends_with(b"!") && !seen.starts_with(b"GET ") {
                    match stream.read(&mut piece) {
                        Ok(n) if n > 0 => seen.extend_from_slice(&piece[..n]),
                        _ => return,
                    }
                }
                if seen.starts_with(b"GET ") {
                    let status = if seen.starts_with(b"GET /health") { "200 OK" } else { "404 Not Found" };
                    let head = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                    let _ = stream.write_all(head.as_bytes());
                    return;
                }
                let answer = b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nContent-Type: text/event-stream\r\n\
                    Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n";
                stream.write_all(answer).unwrap();
                pause(Duration::from_millis(number as u64 % 4));
                stream.shutdown(Shutdown::Write).unwrap();
                while stream.read(&mut piece).is_ok_and(|n| n > 0) {}
            });
        }
    };
    std::thread::spawn(serve);
    let router = Setup::new().server_at("closes", &url, &[]).start();
    let mut client = router.client();
    for number in 0..60 {
        let response = client.post(CHAT, b"{\"stream\":true}  !");
        assert_eq!((response.status, response.text().as_str()), (200, "data: 1\n\n"), "stream {number}");
    }
}

/// The only server there is refuses connections: nothing was sent, so nothing was sent again, and neither the answer nor
/// the metrics may say so.
#[test]
fn a_refused_connection_with_nowhere_else_to_go_is_no_retry() {
    let mut engine = Engine::answering();
    let router = Setup::new().health("interval_ms = 60000").server("a", &engine, &[]).start();
    engine.stop();
    for _ in 0..3 {
        let response = router.post(CHAT, &chat("m", "x"));
        assert_eq!(response.lifeboat("Retries"), None, "{}", response.head.text());
        response.assert_rejected(502, "upstream_error");
    }
    router.wait_metric("ringway_upstream_errors_total", &[("kind", "connect")], 3.0, seconds(2));
    router.wait_metric("ringway_retries_total", &[], 0.0, seconds(1));
}

/// A server that is down when the router starts is down from its first check on, however many it takes to bring one down
/// that was up: no request is tried there.
#[test]
fn a_server_down_from_the_start_is_never_tried() {
    let hung = Hung::at(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    let mut gone = Engine::answering();
    gone.stop();
    let engine = Engine::answering();
    let router = Setup::new()
        .shards(2)
        .limit("connect_timeout_ms = 300")
        .health("interval_ms = 60000")
        .health("timeout_ms = 300")
        .health("fall = 1000")
        .server_at("hung", &hung.url, &["models = [\"m\"]"])
        .server("gone", &gone, &["models = [\"m\"]"])
        .server("there", &engine, &["models = [\"m\"]"])
        .start_unready();
    eventually(seconds(5), "the first checks have failed", || {
        let log = router.log();
        if log.matches("server not up").count() == 2 { Ok(()) } else { Err(log) }
    });
    router.wait_up(&["there"]);
    for name in ["hung", "gone"] {
        assert_eq!(router.server_state(name)["state"], "down");
    }
    for number in 0..20 {
        let start = now();
        let response = router.post(CHAT, &chat("m", "x"));
        assert_eq!(response.status, 200, "request {number}: {}", response.text());
        assert_eq!(response.lifeboat("Server").as_deref(), Some("there"));
        assert_eq!(response.lifeboat("Retries"), None, "request {number} was tried elsewhere first");
        assert!(start.elapsed() < ms(250), "request {number} took {:?}", start.elapsed());
    }
    let metrics = router.metrics();
    assert_eq!(metrics.sum("ringway_upstream_errors_total", &[]), 0.0);
    assert_eq!(metrics.sum("ringway_retries_total", &[]), 0.0);
    assert_eq!(engine.request_count(), 20);
}

/// A client whose head, or body, took most of the time it may take, and a server that cannot be connected to: the client's
/// own limits are over with its request, so it hears of the server's failure, in an answer.
#[test]
fn a_late_request_and_a_hanging_connect_are_answered() {
    let mut engine = Engine::answering();
    let router = Setup::new()
        .limit("client_head_timeout_ms = 700")
        .limit("client_body_idle_timeout_ms = 700")
        .limit("connect_timeout_ms = 500")
        .health("interval_ms = 60000")
        .health("bench_after = 1000")
        .server("a", &engine, &["max_concurrency = 0", "models = [\"m\"]"])
        .start();
    engine.stop();
    let _hung = Hung::at(engine.address());
    let raw = request("POST", CHAT, &[], &chat("m", "x"));
    std::thread::scope(|scope| {
        for (what, cut) in [("late head", 20), ("late body", raw.len() - 3), ("in one piece", raw.len())] {
            let (router, raw) = (&router, &raw);
            scope.spawn(move || {
                let mut client = router.client().with_limit(seconds(5));
                client.send(&raw[..cut]);
                if cut < raw.len() {
                    pause(ms(450));
                    client.send(&raw[cut..]);
                }
                let sent = now();
                let answer = client.try_response();
                let took = sent.elapsed();
                let response = answer.unwrap_or_else(|(fault, _)| panic!("{what}: {fault} after {took:?}"));
                assert_eq!(response.status, 502, "{what}: {}", response.text());
                response.assert_rejected(502, "upstream_error");
                assert!(took > ms(450), "{what}: the connect did not hang, after {took:?}");
            });
        }
    });
    router.wait_metric("ringway_client_aborts_total", &[], 0.0, seconds(1));
    router.wait_metric("ringway_upstream_errors_total", &[("kind", "connect")], 3.0, seconds(1));
}

/// An engine that ends its sending side after an answer, and reads on: a request that meets the end on its way has been
/// read, and must not be sent again. It is 502, or it went over a fresh connection in the first place.
#[test]
fn a_request_that_a_half_closed_server_reads_is_not_sent_again() {
    const CLIENTS: usize = 2;
    const EACH: usize = 700;
    let dice = Mutex::new(Dice::new(11));
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        if exchange.request.ordinal > 0 {
            // Read after the end of the answers: there is no way left to answer.
            exchange.wait_close(seconds(20));
            return Ok(Next::Close);
        }
        exchange.reply_ok()?;
        // Spread over the time in which the next request comes.
        let wait = Duration::from_micros(dice.lock().expect("no holder panics").below(500));
        let start = now();
        while start.elapsed() < wait {
            std::hint::spin_loop();
        }
        exchange.wire.socket.shutdown(std::net::Shutdown::Write)?;
        Ok(Next::Keep)
    });
    let router = Setup::new().server("a", &engine, &["max_concurrency = 0"]).start();
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (router, failed) = (&router, &failed);
            scope.spawn(move || {
                let mut client = router.client();
                for turn in 0..EACH {
                    let id = number * EACH + turn;
                    let response = client.post(CHAT, &chat("m", &format!("id-{id}-")));
                    assert_eq!(response.lifeboat("Retries"), None, "request {id} was sent again");
                    if response.status != 200 {
                        response.assert_rejected(502, "upstream_error");
                        failed.lock().expect("no holder panics").push(id);
                    }
                    if !response.keeps {
                        client = router.client();
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no holder panics");
    router.wait_metric("ringway_retries_total", &[], 0.0, seconds(1));
    router.wait_metric("ringway_upstream_errors_total", &[], failed.len() as f64, seconds(1));
    // What was acknowledged for the engine is read a moment later.
    engine.wait_requests(CLIENTS * EACH);
    pause(ms(100));
    let (mut times, mut unanswered) = (vec![0; CLIENTS * EACH], Vec::new());
    for request in engine.requests() {
        times[id_of(&request.body)] += 1;
        if request.ordinal > 0 {
            unanswered.push(id_of(&request.body));
        }
    }
    let twice: Vec<_> = (0..times.len()).filter(|id| times[*id] != 1).collect();
    assert!(twice.is_empty(), "requests not read once: {twice:?}");
    let sorted = |mut ids: Vec<usize>| {
        ids.sort_unstable();
        ids
    };
    assert_eq!(
        sorted(failed),
        sorted(unanswered),
        "what the half-closed server read, and nothing else, is 502"
    );
}
