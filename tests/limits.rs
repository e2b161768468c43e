//! Limits of size and time on the client's side, and clients that are slow or silent.

mod support;

use support::*;

/// A router in front of one engine that answers everything with 200.
fn one(engine: &Engine) -> Router {
    Setup::new().server("a", engine, &[]).start()
}

/// Heads up to the limits pass whole; over them 431 (size, count) and 414 (target).
#[test]
fn head_limits_are_431_and_414() {
    let engine = Engine::answering();
    let router = one(&engine);
    let many = |count: usize, size: usize| {
        let mut raw = b"POST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n".to_vec();
        for number in 0..count {
            raw.extend(format!("X-{number}: {}\r\n", "v".repeat(size)).as_bytes());
        }
        raw.extend(b"\r\nhi");
        raw
    };
    let mut client = router.client();
    client.send(&many(100, 600));
    assert_eq!(client.response().status, 200, "61 KB in 102 headers");
    let seen = engine.requests().pop().unwrap();
    assert_eq!(seen.header("X-99"), Some("v".repeat(600)));
    let long_target = format!("/x?{}", "q".repeat(15_000));
    assert_eq!(client.ask("GET", &long_target, &[], b"").status, 200);
    assert_eq!(engine.requests().pop().unwrap().target, long_target, "targets pass unchanged");

    let refused = |raw: &[u8], status: u16, reason: &str| {
        let before = engine.request_count();
        let mut client = router.client();
        let _ = client.try_send(raw);
        let response = client.response();
        response.assert_rejected(status, reason);
        assert!(!response.keeps, "{reason} closes");
        client.rest();
        assert_eq!(engine.request_count(), before);
    };
    refused(&many(100, 700), 431, "head_too_large");
    refused(&many(1, 70_000), 431, "head_too_large");
    refused(&many(200, 5), 431, "head_too_large");
    refused(
        &[b"POST /x HTTP/1.1\r\nHost: r\r\nX: ".to_vec(), b"v".repeat(1 << 20)].concat(),
        431,
        "head_too_large",
    );
    let uri = format!("GET /{} HTTP/1.1\r\nHost: r\r\n\r\n", "q".repeat(20_000));
    refused(uri.as_bytes(), 414, "uri_too_long");
}

/// A client that was refused and sends on all the same, more than the router is ready to read and throw away, is cut off
/// soon: it must not sit on a full socket that nobody reads and nobody resets. The router is held still for a while, so
/// that the socket is full when its patience ends.
#[test]
fn a_refused_client_that_sends_on_is_cut_off() {
    let engine = Engine::answering();
    let router = Setup::new().limit("body_bytes_max = 1000").server("a", &engine, &[]).start();
    for _ in 0..2 {
        let mut client = router.client();
        client.send(b"POST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 4000000000\r\n\r\n");
        client.response().assert_rejected(413, "body_too_large");
        router.signal(libc::SIGSTOP);
        let sending = std::thread::spawn(move || {
            let start = now();
            let piece = vec![b'x'; 1 << 20];
            let sent = (0..4000).take_while(|_| client.try_send(&piece).is_ok()).count();
            (sent, start.elapsed())
        });
        pause(seconds(3));
        router.signal(libc::SIGCONT);
        let (sent, took) = sending.join().expect("a sender");
        assert!(took < seconds(40), "cut off after {took:?}, {sent} MiB");
        router.wait_metric("ringway_connections", &[], 0.0, seconds(5));
    }
}

/// A head that dribbles in, one byte each 5 ms, is served like any other.
#[test]
fn a_head_may_come_byte_by_byte() {
    let engine = Engine::answering();
    let router = one(&engine);
    let mut client = router.client();
    let raw = request("POST", CHAT, &[("X-A", "b")], b"{\"model\":\"m\"}");
    for byte in &raw {
        client.send(&[*byte]);
        pause(ms(5));
    }
    assert_eq!(client.response().status, 200);
    assert_eq!(engine.requests()[0].body, b"{\"model\":\"m\"}");
    // A chunked one too, over the same connection.
    for byte in b"POST /x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nX: y\r\n\r\n" {
        client.send(&[*byte]);
        pause(ms(1));
    }
    assert_eq!(client.response().status, 200);
    assert_eq!(engine.requests()[1].body, b"abcde");
}

/// A client that stops in the middle of its head or its body: 408, close, nothing hangs on.
#[test]
fn a_client_that_stops_sending_gets_408() {
    let engine = Engine::answering();
    let router = Setup::new()
        .limit("client_head_timeout_ms = 400")
        .limit("client_body_idle_timeout_ms = 400")
        .server("a", &engine, &[])
        .start();
    for (what, raw) in [
        ("in the head", b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nConte".as_slice()),
        ("in a body with a length", b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n{\"mod"),
        ("in a chunk", b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{\"mod"),
        ("before the last chunk", b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"),
    ] {
        let mut client = router.client();
        client.send(raw);
        let start = now();
        let response = client.response();
        let took = start.elapsed();
        response.assert_rejected(408, "request_timeout");
        assert!(!response.keeps, "{what}");
        client.assert_closed();
        assert!(took > ms(300) && took < seconds(2), "{what}: after {took:?}");
    }
    // A head that keeps coming, but slower than the limit for the whole, is out of time too: it must not hold a
    // connection for ever.
    let mut client = router.client();
    let start = now();
    let mut status = None;
    client.limit = ms(60);
    for byte in request("POST", CHAT, &[], b"").iter().cycle().take(400) {
        if client.try_send(&[*byte]).is_err() {
            break;
        }
        match client.head() {
            Ok((code, ..)) => {
                status = Some(code);
                break;
            }
            Err(Fault::Timeout { .. }) => {}
            Err(_) => break,
        }
    }
    assert_eq!(status, Some(408));
    assert!(start.elapsed() < seconds(3), "{:?}", start.elapsed());
    // A body that keeps coming is not: only silence counts.
    let mut client = router.client();
    client.send(b"POST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 10\r\n\r\n");
    for _ in 0..10 {
        pause(ms(100));
        client.send(b"x");
    }
    assert_eq!(client.response().status, 200, "slow, but never silent");
    router.wait_metric("ringway_rejections_total", &[("reason", "request_timeout")], 5.0, seconds(2));
    router.wait_idle(seconds(1));
}

/// An idle connection is closed after `keepalive_timeout_ms`, without a word: no request was cut.
#[test]
fn an_idle_connection_is_closed_silently() {
    let engine = Engine::answering();
    let router = Setup::new().limit("keepalive_timeout_ms = 400").server("a", &engine, &[]).start();
    let mut client = router.client();
    assert_eq!(client.post(CHAT, b"{}").status, 200);
    let start = now();
    client.assert_closed();
    let took = start.elapsed();
    assert!(took > ms(300) && took < seconds(2), "after {took:?}");
}

/// More clients than `connections_max`: those beyond it are not served, those within are not disturbed, and a place that
/// is given up is used again.
#[test]
fn connections_max_is_kept() {
    const MAX: usize = 8;
    let engine = Engine::answering();
    let router = Setup::new().limit("connections_max = 8").server("a", &engine, &[]).start();
    let mut clients: Vec<_> = (0..MAX).map(|_| router.client()).collect();
    for client in &mut clients {
        assert_eq!(client.post(CHAT, b"{}").status, 200);
    }
    let beyond = || {
        let Ok(mut client) = Client::try_connect(router.http()) else { return None };
        client.limit = ms(300);
        client.try_send(&request("POST", CHAT, &[], b"{}")).ok()?;
        client.try_response().ok().map(|response| response.status)
    };
    for _ in 0..3 {
        let status = beyond();
        assert!(status.is_none_or(|s| s == 503), "served beyond the limit: {status:?}");
    }
    let served = engine.request_count();
    assert_eq!(served, MAX);
    for client in &mut clients {
        assert_eq!(client.post(CHAT, b"{}").status, 200, "undisturbed");
    }
    clients.pop();
    eventually(seconds(5), "the place is used again", || match beyond() {
        Some(200) => Ok(()),
        other => Err(format!("{other:?}")),
    });
}

/// Nothing at all from a client, or only a few bytes, does not hold up anyone else.
#[test]
fn silent_clients_hold_nobody_up() {
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &[]).start();
    let mut silent: Vec<_> = (0..200).map(|_| router.client()).collect();
    for (number, client) in silent.iter_mut().enumerate() {
        client.send(
            &b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 10\r\n\r\n12345"
                [..number % 70],
        );
    }
    for _ in 0..20 {
        let start = now();
        assert_eq!(router.post(CHAT, b"{}").status, 200);
        assert!(start.elapsed() < ms(500), "{:?}", start.elapsed());
    }
    drop(silent);
    router.wait_metric("ringway_connections", &[], 0.0, seconds(3));
}
