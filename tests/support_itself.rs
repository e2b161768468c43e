//! The support code, tried without a router: a test bench that lies proves nothing.

mod support;

use std::sync::Arc;

use support::wire::{Socket, Wire, peer_gone};
use support::*;

/// An answer, its framing kinds and the record of the request.
#[test]
fn engine_and_client_speak_to_each_other() {
    let engine = Engine::start(|exchange| match exchange.request.target.as_str() {
        "/chunked" => {
            exchange.stream_head()?;
            for event in ["data: one\n\n", "data: two\n\n"] {
                exchange.chunk(event.as_bytes())?;
                exchange.pause(ms(30));
            }
            exchange.end()
        }
        "/until-close" => {
            exchange.read_body()?;
            exchange.raw(b"HTTP/1.1 200 OK\r\n\r\nall of it")?;
            Ok(Next::Close)
        }
        _ => exchange.reply(201, &[("X-Kind", "length")], b"hello"),
    });
    let mut client = Client::connect(engine.address());
    let response = client.post("/length", b"abc");
    assert_eq!((response.status, response.text().as_str(), response.keeps), (201, "hello", true));
    assert_eq!(response.header("x-kind").as_deref(), Some("length"));

    client.send(&request("POST", "/chunked", &[], b""));
    let (_, head, _) = client.head().unwrap();
    let mut framing = Client::framing("POST", 200, &head).unwrap();
    let first = client.piece(&mut framing).unwrap().unwrap();
    let first_at = client.wire.last_fill;
    let second = client.piece(&mut framing).unwrap().unwrap();
    assert_eq!(
        (first.as_slice(), second.as_slice()),
        (b"data: one\n\n".as_slice(), b"data: two\n\n".as_slice())
    );
    assert!(client.wire.last_fill - first_at > ms(20), "pieces carry the time they came");
    assert_eq!(client.piece(&mut framing), Ok(None));

    let response = client.ask("GET", "/until-close", &[], b"");
    assert_eq!((response.text().as_str(), response.keeps), ("all of it", false));

    let requests = engine.requests();
    let seen: Vec<_> =
        requests.iter().map(|r| (r.connection, r.ordinal, r.target.as_str(), r.complete)).collect();
    assert_eq!(seen, [(0, 0, "/length", true), (0, 1, "/chunked", true), (0, 2, "/until-close", true)]);
    assert_eq!(requests[0].body, b"abc");
}

#[test]
fn probes_are_answered_and_not_counted() {
    let engine = Engine::answering();
    let mut client = Client::connect(engine.address());
    assert_eq!(client.ask("GET", "/health", &[], b"").status, 200);
    assert_eq!(client.ask("GET", "/v1/models", &[], b"").json()["data"][0]["id"], "m");
    engine.set_health(Probe::Reply(503, "no".into()));
    assert_eq!(client.ask("GET", "/health", &[], b"").status, 503);
    engine.set_health(Probe::Hang);
    let mut other = Client::connect(engine.address()).with_limit(ms(100));
    other.send(&request("GET", "/health", &[], b""));
    assert!(matches!(other.try_response(), Err((Fault::Timeout { .. }, _))));
    assert_eq!((engine.request_count(), engine.probes()), (0, (3, 1)));
}

#[test]
fn the_engine_says_how_its_client_left() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.wait_close(seconds(5));
        Ok(Next::Close)
    });
    for (reset, want) in [(false, Closed::Fin), (true, Closed::Reset)] {
        let before = engine.request_count();
        let mut client = Client::connect(engine.address());
        client.send(&request("POST", "/", &[], b"x"));
        let connection = engine.wait_requests(before + 1)[before].connection;
        eventually(seconds(2), "in work", || if engine.active() == 1 { Ok(()) } else { Err("not".into()) });
        if reset {
            client.reset();
        } else {
            drop(client);
        }
        let (_, how) = engine.wait_closed(connection, seconds(2));
        assert_eq!(how, want);
        eventually(
            seconds(2),
            "not in work",
            || if engine.active() == 0 { Ok(()) } else { Err("is".into()) },
        );
    }
    assert_eq!(engine.active_max(), 1, "a request whose client has left does not count");
}

#[test]
fn the_engine_can_cut_and_reset_a_stream() {
    let engine = Engine::start(|exchange| {
        exchange.stream_head()?;
        exchange.chunk(b"data: 1\n\n")?;
        exchange.pause(ms(50));
        Ok(if exchange.request.target == "/reset" { Next::Reset } else { Next::Close })
    });
    for (target, want) in [("/reset", Fault::Reset), ("/close", Fault::Eof { unfinished: 0 })] {
        let mut client = Client::connect(engine.address());
        client.send(&request("POST", target, &[], b""));
        let (fault, body) = client.try_response().unwrap_err();
        assert_eq!((fault, body.as_slice()), (want, b"data: 1\n\n".as_slice()));
    }
}

#[test]
fn a_stopped_engine_refuses_and_comes_back() {
    let mut engine = Engine::answering();
    let mut client = Client::connect(engine.address());
    assert_eq!(client.post("/", b"").status, 200);
    engine.stop();
    client.assert_closed();
    assert!(Client::try_connect(engine.address()).is_err(), "a stopped engine refuses");
    engine.listen();
    assert_eq!(Client::connect(engine.address()).post("/", b"").status, 200);
}

#[test]
fn a_request_that_races_with_a_close_is_counted() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        exchange.reply_ok()?;
        held.pass(seconds(5));
        Ok(Next::Close)
    });
    let mut client = Client::connect(engine.address());
    assert_eq!(client.post("/", b"").status, 200);
    client.send(&request("POST", "/", &[], b"late"));
    gate.open();
    let answer = client.try_response();
    assert!(answer.is_err(), "{answer:?}");
    eventually(seconds(2), "the race is counted", || {
        if engine.raced() == 1 { Ok(()) } else { Err(engine.raced().to_string()) }
    });
    assert_eq!(engine.request_count(), 1);
}

#[test]
fn both_ends_refuse_doubtful_framing() {
    for (raw, what) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", "two lengths"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "length and chunked",
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok", "a sign"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2x\r\nok\r\n0\r\n\r\n", "a chunk size"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokay0\r\n\r\n", "no CRLF after a chunk"),
        ("HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n", "a name that is no token"),
        ("HTTP/1.1 200 OK\r\nX: a\nY: b\r\n\r\n", "a bare LF"),
        ("nonsense\r\n\r\n", "no status line"),
    ] {
        let engine = Engine::start(move |exchange| {
            exchange.raw(raw.as_bytes())?;
            Ok(Next::Close)
        });
        let mut client = Client::connect(engine.address());
        client.send(&request("POST", "/", &[], b""));
        let answer = client.try_response();
        assert!(matches!(answer, Err((Fault::Malformed(_), _))), "{what}: {answer:?}");
    }
    for raw in [
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX : b\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        let engine = Engine::answering();
        let mut client = Client::connect(engine.address()).with_limit(ms(200));
        client.send(raw.as_bytes());
        let _ = client.try_response();
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(engine)));
        assert!(dropped.is_err(), "an engine that got {raw:?} must fail its test");
    }
}

#[test]
fn concurrency_counts_only_what_is_in_work() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(5));
        exchange.reply_ok()
    });
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(engine.address())).collect();
    for client in &mut clients {
        client.send(&request("POST", "/", &[], b"x"));
    }
    engine.wait_requests(3);
    eventually(seconds(2), "three held", || if gate.waiting() == 3 { Ok(()) } else { Err("fewer".into()) });
    assert_eq!(engine.active(), 3);
    gate.release(1);
    eventually(seconds(2), "two held", || if engine.active() == 2 { Ok(()) } else { Err("three".into()) });
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().status, 200);
    }
    assert_eq!((engine.active(), engine.active_max()), (0, 3));
}

#[test]
fn metrics_parse_labels_and_escapes() {
    let page = "# HELP a b\n# TYPE a counter\na{server=\"x\\\"y\",kind=\"p,q\"} 3\na{server=\"z\"} 4.5\nb 1e3 123\n# EOF\n";
    let metrics = Metrics::parse(page);
    assert_eq!(metrics.sum("a", &[]), 7.5);
    assert_eq!(metrics.sum("a", &[("server", "x\"y"), ("kind", "p,q")]), 3.0);
    assert_eq!(metrics.sum("b", &[]), 1000.0);
    assert!(!metrics.has("c"));
}

#[test]
fn the_pattern_continues_where_it_was_cut() {
    let whole = pattern(0, 200_000);
    let mut pieces = pattern(0, 70_001);
    pieces.extend(pattern(70_001, 129_999));
    assert!(whole == pieces);
    assert!(whole[..1000] != whole[1..1001], "a shift by one shows");
}

#[test]
fn a_gone_peer_shows_at_once() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = Client::connect(listener.local_addr().unwrap());
    let (server, _) = listener.accept().unwrap();
    let wire = Wire::new(Socket::Tcp(server));
    let fd = std::os::fd::AsRawFd::as_raw_fd(&wire.socket);
    assert!(!peer_gone(fd));
    drop(client);
    eventually(seconds(1), "the peer is gone", || if peer_gone(fd) { Ok(()) } else { Err("there".into()) });
}

#[test]
fn unix_sockets_work_like_tcp() {
    let path = support::router::socket_path("self");
    let engine = EngineSetup::new().unix(&path).start(|exchange| exchange.reply_ok());
    assert_eq!(engine.url(), format!("unix:{}", path.display()));
    let stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let mut client = Client { wire: Wire::new(Socket::Unix(stream)), limit: seconds(5) };
    assert_eq!(client.post("/", b"x").status, 200);
    assert_eq!(engine.requests()[0].body, b"x");
}

#[test]
#[should_panic(expected = "not within 50ms: the moon; last seen: cheese")]
fn a_wait_that_runs_out_says_what_it_saw() {
    eventually(ms(50), "the moon", || Err::<(), _>("cheese".to_owned()));
}
