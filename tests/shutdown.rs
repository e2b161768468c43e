//! Stopping: signals, the settle time, streams that finish, exit codes.

mod support;

use std::time::Duration;

use support::wire::{Socket, Wire};
use support::*;

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

/// Opens `count` streams and waits for the first event of each.
fn open_streams(router: &Router, count: usize) -> Vec<(Client, Framing)> {
    (0..count)
        .map(|_| {
            let mut client = router.client();
            client.send(&request("POST", CHAT, &[], &chat_stream("m", "x")));
            let (status, head, _) = client.head().expect("a head");
            assert_eq!(status, 200);
            let mut framing = Client::framing("POST", status, &head).expect("clean framing");
            client.piece(&mut framing).expect("an event").expect("more than nothing");
            (client, framing)
        })
        .collect()
}

/// A22: SIGTERM loses nothing. Readiness says 503 at once, new connections are served during the settle time and refused
/// after it, idle connections close, all 50 running streams finish, and the exit code is 0.
#[test]
fn a22_sigterm_lets_streams_finish() {
    const STREAMS: usize = 50;
    const EVENTS: usize = 40;
    let engine = streaming(EVENTS, ms(75));
    let mut router = Setup::new()
        .shards(2)
        .limit("drain_settle_ms = 600")
        .limit("drain_timeout_ms = 15000")
        .server("a", &engine, &["max_concurrency = 0"])
        .start();
    let mut idle = router.client();
    assert_eq!(idle.ask("GET", "/liveness", &[], b"").status, 200);
    let streams = open_streams(&router, STREAMS);
    let finishing: Vec<_> = streams
        .into_iter()
        .map(|(mut client, mut framing)| {
            std::thread::spawn(move || {
                let mut text = String::new();
                while let Some(piece) = client.piece(&mut framing)? {
                    text.push_str(&String::from_utf8_lossy(&piece));
                }
                Ok::<_, Fault>(text)
            })
        })
        .collect();
    assert_eq!(router.get("/readiness").status, 200);
    router.signal(libc::SIGTERM);
    let told = now();
    eventually(ms(400), "readiness says 503", || {
        let status = router.get("/readiness").status;
        if status == 503 { Ok(()) } else { Err(status.to_string()) }
    });
    assert_eq!(router.admin_get("/readiness").status, 503);
    assert_eq!(router.get("/liveness").status, 200, "it lives");
    assert!(told.elapsed() < ms(550), "too slow to say anything about the settle time: {:?}", told.elapsed());
    let mut late = router.client();
    late.send(&request("POST", CHAT, &[], &chat_stream("m", "late")));
    let (status, ..) = late.head().expect("served while it settles");
    assert_eq!(status, 200);
    eventually(seconds(3), "new connections are refused", || match Client::try_connect(router.http()) {
        Ok(mut client) => {
            let _ = client.try_send(&request("GET", "/liveness", &[], b""));
            client.limit = ms(500);
            match client.try_response_to("GET") {
                Ok(response) => Err(format!("answered {}", response.status)),
                Err((fault, _)) => Err(fault.to_string()),
            }
        }
        Err(_) => Ok(()),
    });
    assert!(told.elapsed() >= ms(550), "refused before the settle time: {:?}", told.elapsed());
    idle.limit = seconds(2);
    idle.assert_closed();
    let want: String = (0..EVENTS).map(|n| format!("data: {n}\n\n")).collect();
    for stream in finishing {
        let text = stream.join().expect("a reader");
        let text = text.unwrap_or_else(|fault| panic!("a stream was cut: {fault}"));
        assert!(want.ends_with(&text) && text.len() > want.len() / 2, "a stream lost events: {text:?}");
    }
    let mut framing = Framing::Chunked { left: 0, first: true, done: false };
    while late.piece(&mut framing).expect("the late one finishes too").is_some() {}
    let code = router.wait_exit(seconds(4));
    assert_eq!(code, Some(0), "{}", router.log());
    assert!(told.elapsed() < seconds(7), "{:?}", told.elapsed());
}

/// A22: a busy keep-alive connection is told to close with its next answer once the router drains, and nothing of it is
/// lost: each answer is whole, and after the last the connection ends in order.
#[test]
fn a22_keep_alive_connections_are_told_to_close() {
    let engine = Engine::answering();
    let mut router = Setup::new().limit("drain_settle_ms = 300").server("a", &engine, &[]).start();
    let mut client = router.client();
    assert!(client.post(CHAT, b"{}").keeps);
    router.signal(libc::SIGTERM);
    let start = now();
    loop {
        if client.try_send(&request("POST", CHAT, &[], b"{}")).is_err() {
            break;
        }
        match client.try_response() {
            Ok(response) if response.status == 200 => {
                if !response.keeps {
                    client.assert_closed();
                    break;
                }
            }
            Ok(response) => {
                response.assert_rejected(503, "shutting_down");
                break;
            }
            // Closed while idle: the request just sent was not begun.
            Err((Fault::Eof { unfinished: 0 } | Fault::Reset, body)) if body.is_empty() => break,
            Err((fault, _)) => panic!("an answer was cut: {fault}"),
        }
        assert!(start.elapsed() < seconds(5), "it serves for ever");
        pause(ms(10));
    }
    assert_eq!(router.wait_exit(seconds(5)), Some(0), "{}", router.log());
}

/// A22: a second signal ends it at once, with code 3.
#[test]
fn a22_a_second_signal_exits_at_once() {
    for second in [libc::SIGTERM, libc::SIGINT] {
        let engine = streaming(1000, ms(20));
        let mut router = Setup::new().server("a", &engine, &[]).start();
        let mut streams = open_streams(&router, 3);
        router.signal(libc::SIGTERM);
        assert_eq!(router.wait_exit(ms(300)), None, "streams run");
        let start = now();
        router.signal(second);
        assert_eq!(router.wait_exit(seconds(3)), Some(3), "{}", router.log());
        assert!(start.elapsed() < seconds(1), "{:?}", start.elapsed());
        // What was cut looks cut.
        for (client, framing) in &mut streams {
            let fault = loop {
                match client.piece(framing) {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("a cut stream ended cleanly"),
                    Err(fault) => break fault,
                }
            };
            assert!(matches!(fault, Fault::Eof { .. } | Fault::Reset), "{fault}");
        }
    }
}

/// A22: streams that outlast `drain_timeout_ms` are cut, and the exit code says that the stop was forced.
#[test]
fn a22_the_drain_limit_is_kept() {
    let engine = streaming(1000, ms(20));
    let mut router = Setup::new()
        .limit("drain_settle_ms = 200")
        .limit("drain_timeout_ms = 700")
        .server("a", &engine, &[])
        .start();
    let streams = open_streams(&router, 3);
    let start = now();
    router.signal(libc::SIGINT);
    assert_eq!(router.wait_exit(seconds(6)), Some(3), "{}", router.log());
    let took = start.elapsed();
    assert!(took > ms(600) && took < seconds(3), "after {took:?}");
    for (mut client, mut framing) in streams {
        while let Some(_event) = match client.piece(&mut framing) {
            Ok(None) => panic!("a cut stream ended cleanly"),
            Ok(more) => more,
            Err(_) => None,
        } {}
    }
}

/// An idle router stops at once when told to, without waiting for anything but the settle time.
#[test]
fn an_idle_router_stops_soon() {
    let engine = Engine::answering();
    let mut router = Setup::new().limit("drain_settle_ms = 0").server("a", &engine, &[]).start();
    assert_eq!(router.post(CHAT, b"{}").status, 200);
    router.signal(libc::SIGTERM);
    assert_eq!(router.wait_exit(seconds(3)), Some(0), "{}", router.log());
}

/// A stop that is forced while an answer streams whose end is the end of the engine's connection: the router cuts that
/// connection itself, and must not take it for the answer's end. The client, which gets chunks, never gets the last one.
#[test]
fn a_forced_stop_never_ends_an_answer_until_close() {
    for (what, settle_ms, timeout_ms) in [
        ("second signal, settling", 5000, 30_000),
        ("second signal, draining", 0, 30_000),
        ("drain limit", 0, 300),
    ] {
        let engine = Engine::start(|exchange| {
            exchange.read_body()?;
            exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")?;
            for number in 0..500 {
                exchange.raw(format!("piece {number}\n").as_bytes())?;
                // Some talk all the while, the router waits for the others with nothing left to write.
                exchange.pause(ms(if exchange.request.connection.is_multiple_of(3) { 15 } else { 150 }));
            }
            Ok(Next::Close)
        });
        let mut router = Setup::new()
            .shards(2)
            .limit(&format!("drain_settle_ms = {settle_ms}"))
            .limit(&format!("drain_timeout_ms = {timeout_ms}"))
            .server("a", &engine, &["max_concurrency = 0"])
            .start();
        let streams = open_streams(&router, 40);
        for (_, framing) in &streams {
            assert!(matches!(framing, Framing::Chunked { .. }), "{framing:?}");
        }
        pause(ms(200));
        router.signal(libc::SIGTERM);
        if what != "drain limit" {
            assert_eq!(router.wait_exit(ms(200)), None, "answers run");
            router.signal(libc::SIGTERM);
        }
        assert_eq!(router.wait_exit(seconds(3)), Some(3), "{}", router.log());
        for (mut client, mut framing) in streams {
            let fault = loop {
                match client.piece(&mut framing) {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("an answer that was cut looks whole: {what}"),
                    Err(fault) => break fault,
                }
            };
            assert!(matches!(fault, Fault::Eof { .. } | Fault::Reset), "{fault}");
        }
    }
}

/// Once the settle time is over, a new connection is refused by the kernel, the very first one: nobody listens any more, on
/// any shard. It is not let in and then turned away, however long the answers that still run take.
#[test]
fn new_connections_are_refused_once_it_drains() {
    const SETTLE_MS: u64 = 300;
    attempts(3, || {
        let engine = streaming(1000, ms(20));
        let mut router = Setup::new()
            .shards(2)
            .limit(&format!("drain_settle_ms = {SETTLE_MS}"))
            .server("a", &engine, &["max_concurrency = 0"])
            .start();
        let streams = open_streams(&router, 4);
        router.signal(libc::SIGTERM);
        let told = now();
        pause(ms(SETTLE_MS / 2));
        assert_eq!(router.get("/liveness").status, 200, "served while it settles");
        // Nobody connects meanwhile: a listener must not need that to see that its time is over.
        pause(ms(SETTLE_MS + 200).saturating_sub(told.elapsed()));
        let results: Vec<_> = (0..20)
            .map(|_| match Client::try_connect(router.http()) {
                Ok(_) => "let in".to_owned(),
                Err(e) => e.kind().to_string(),
            })
            .collect();
        assert_eq!(router.wait_exit(ms(1)), None, "streams run");
        drop(streams);
        assert_eq!(router.wait_exit(seconds(3)), Some(0), "{}", router.log());
        let refused = std::io::ErrorKind::ConnectionRefused.to_string();
        if results.iter().all(|r| *r == refused) { Ok(()) } else { Err(format!("{results:?}")) }
    });
}

/// A client whose kernel takes little of an answer that it does not read, and that does not wait long to send.
fn narrow_client(router: &Router) -> Client {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(8192).unwrap();
    socket.connect(&router.http().into()).unwrap();
    let stream = std::net::TcpStream::from(socket);
    let client = Client { wire: Wire::new(Socket::Tcp(stream.try_clone().unwrap())), limit: seconds(10) };
    stream.set_write_timeout(Some(ms(300))).unwrap();
    client
}

/// A client that has sent on behind its request, more than was read, gets its last answer whole when the router drains:
/// closing over unread bytes would reset the connection and take the answer with it.
#[test]
fn unread_bytes_do_not_cost_the_last_answer() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.pause(ms(400));
        exchange.reply(200, &[], &pattern(0, 60_000))
    });
    let mut router =
        Setup::new().limit("drain_settle_ms = 0").server("a", &engine, &["max_concurrency = 0"]).start();
    let mut clients: Vec<_> = (0..10)
        .map(|_| {
            let mut client = narrow_client(&router);
            client.send(&request("POST", CHAT, &[], b"{}"));
            let _ = client.try_send(&request("POST", CHAT, &[], &pattern(0, 400_000)));
            client
        })
        .collect();
    engine.wait_requests(10);
    router.signal(libc::SIGTERM);
    pause(ms(700));
    for client in &mut clients {
        let response = client.response();
        assert_eq!((response.status, response.keeps), (200, false));
        assert_bytes(&response.body, &pattern(0, 60_000), "the answer");
    }
    drop(clients);
    assert_eq!(router.wait_exit(seconds(5)), Some(0), "{}", router.log());
    assert_eq!(engine.request_count(), 10, "what came behind was not begun");
}

/// A stop that is forced by the drain limit says so: neither the request that runs nor the one that waits hears that the
/// server failed, and the place that the first one leaves starts nothing.
#[test]
fn a_forced_stop_says_so_to_whoever_it_cuts() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.wait_close(seconds(20));
        Ok(Next::Close)
    });
    let mut router = Setup::new()
        .shards(1)
        .limit("drain_settle_ms = 100")
        .limit("drain_timeout_ms = 400")
        .server("a", &engine, &["max_concurrency = 1"])
        .start();
    let (mut running, mut waiting) = (router.client(), router.client());
    running.send(&request("POST", CHAT, &[], &chat("m", "runs")));
    engine.wait_requests(1);
    waiting.send(&request("POST", CHAT, &[], &chat("m", "waits")));
    router.wait_metric("ringway_queue_depth", &[], 1.0, seconds(5));
    router.signal(libc::SIGTERM);
    for client in [&mut running, &mut waiting] {
        let response = client.response();
        assert_eq!(
            (response.status, response.lifeboat("Reject-Reason").as_deref()),
            (503, Some("shutting_down"))
        );
    }
    assert_eq!(router.wait_exit(seconds(5)), Some(3));
    assert_eq!(engine.request_count(), 1, "nothing was started by the stop");
}
