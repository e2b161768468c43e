//! Request bodies: `Expect: 100-continue`, any size byte for byte, compressed or not.

mod support;

use std::io::Write;
use std::os::fd::AsRawFd;

use support::wire::{Socket, Wire};
use support::*;

/// A router in front of one engine that answers everything with 200.
fn one(engine: &Engine) -> Router {
    Setup::new().server("a", engine, &[]).start()
}

/// A6: a client that waits for `100 Continue` gets it within 100 ms, its body goes through whole, and the engine never
/// hears of the expectation.
#[test]
fn a6_expect_continue_is_answered_here() {
    let engine = Engine::answering();
    let router = one(&engine);
    let body = {
        let mut text = br#"{"model":"m","messages":[{"role":"user","content":""#.to_vec();
        text.resize(200_000 - 5, b'x');
        text.extend_from_slice(br#""}]} "#);
        text
    };
    assert_eq!(body.len(), 200_000);
    for (path, expect) in [(CHAT, "100-continue"), ("/unknown/path", "100-Continue")] {
        attempts(3, || {
            let before = engine.request_count();
            let mut client = router.client();
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: r\r\nExpect: {expect}\r\nContent-Length: 200000\r\n\r\n"
            );
            let sent = now();
            client.send(head.as_bytes());
            let (status, _) = client.any_head(now() + seconds(5)).expect("an interim answer");
            let took = sent.elapsed();
            assert_eq!(status, 100);
            client.send(&body);
            let response = client.response();
            assert_eq!(
                (response.status, response.interim.as_slice()),
                (200, [].as_slice()),
                "100 once, then 200"
            );
            let seen = &engine.requests()[before];
            assert!(!seen.head.has("expect"), "{}", seen.head.text());
            assert_bytes(&seen.body, &body, path);
            if took < ms(100) { Ok(()) } else { Err(format!("100 came after {took:?}")) }
        });
    }
}

/// A6, rejected: where the head alone shows that the request cannot be taken, the final status comes instead of the
/// 100, before a byte of the body.
#[test]
fn a6_a_rejection_comes_instead_of_the_continue() {
    let gate = Gate::new();
    let held = std::sync::Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(20));
        exchange.reply_ok()
    });
    let expecting = |length: u64| {
        format!("POST {CHAT} HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n")
    };
    let refused = |router: &Router, head: &str, status: u16, reason: &str| {
        let mut client = router.client().with_limit(seconds(2));
        client.send(head.as_bytes());
        let response = client.response();
        response.assert_rejected(status, reason);
        assert!(response.interim.is_empty(), "{reason}: 100 before {status}");
        // The client did not send its body: whatever it sends next is a request, or the connection is closed.
        if response.keeps {
            client.send(b"GET /liveness HTTP/1.1\r\nHost: r\r\n\r\n");
            assert_eq!(client.response_to("GET").status, 200, "{reason}: the connection is in step");
        } else {
            client.assert_closed();
        }
    };

    // All full, mode `reject`.
    let router = Setup::new()
        .pool("p", &["routing_mode = \"reject\""])
        .server("a", &engine, &["max_concurrency = 1"])
        .start();
    let mut busy = router.client();
    busy.send(&request("POST", CHAT, &[], &chat("m", "x")));
    engine.wait_requests(1);
    refused(&router, &expecting(200_000), 503, "at_capacity");

    // Queue full.
    let router = Setup::new()
        .limit("body_bytes_max = 300000")
        .pool("p", &["queue_size = 1"])
        .server("a", &engine, &["max_concurrency = 1"])
        .start();
    let mut first = router.client();
    first.send(&request("POST", CHAT, &[], &chat("m", "x")));
    engine.wait_requests(2);
    // Over the body limit, whoever is busy.
    refused(&router, &expecting(300_001), 413, "body_too_large");
    let mut second = router.client();
    second.send(&request("POST", CHAT, &[], &chat("m", "x")));
    router.wait_metric("ringway_queue_depth", &[], 1.0, seconds(2));
    refused(&router, &expecting(200_000), 503, "queue_full");
    gate.open();
    assert_eq!((busy.response().status, first.response().status, second.response().status), (200, 200, 200));

    // Nobody healthy.
    engine.set_health(Probe::Reply(500, String::new()));
    router.wait_not_up("a");
    refused(&router, &expecting(200_000), 503, "no_healthy_server");
    refused(&router, &expecting(5).replace(CHAT, "/unknown/path"), 503, "no_healthy_server");
    assert_eq!(engine.request_count(), 3);
}

/// A8: any size up to the limit goes through byte for byte, with a length or in chunks.
#[test]
fn a8_long_bodies_arrive_byte_for_byte() {
    let engine = Engine::answering();
    let router = one(&engine);
    let mut client = router.client();
    let sizes = [0, 1, 32_767, 32_768, 32_769, 131_073, 1 << 20, (1 << 20) + 1, 4 << 20, 64 << 20];
    for (number, size) in sizes.into_iter().enumerate() {
        let body = pattern(number, size);
        let response = client.ask("POST", "/v1/embeddings", &[], &body);
        assert_eq!(response.status, 200, "{size} bytes: {}", response.text());
        assert_bytes(&engine.requests().pop().expect("a request").body, &body, &format!("{size} bytes"));
    }
    for (number, size) in sizes[..9].iter().enumerate() {
        let body = pattern(number, *size);
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n");
        for (at, piece) in body.chunks(50_021).enumerate() {
            client.send(format!("{:X}\r\n", piece.len()).as_bytes());
            client.send(piece);
            client.send(b"\r\n");
            if at == 3 {
                pause(ms(20));
            }
        }
        client.send(b"0\r\n\r\n");
        let response = client.response();
        assert_eq!(response.status, 200, "{size} bytes in chunks: {}", response.text());
        assert_bytes(
            &engine.requests().pop().expect("a request").body,
            &body,
            &format!("{size} bytes in chunks"),
        );
    }
}

/// A8, limit: exactly the limit passes; one byte more is 413 in the error shape, and the client can read it although it
/// sent everything first.
#[test]
fn a8_one_byte_over_the_limit_is_413() {
    const LIMIT: usize = 1 << 20;
    let engine = Engine::answering();
    let router = Setup::new().limit("body_bytes_max = 1048576").server("a", &engine, &[]).start();
    let chunked = |size: usize| {
        let mut raw =
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for piece in pattern(0, size).chunks(100_000) {
            raw.extend(format!("{:x}\r\n", piece.len()).as_bytes());
            raw.extend(piece);
            raw.extend(b"\r\n");
        }
        raw.extend(b"0\r\n\r\n");
        raw
    };
    let mut client = router.client();
    client.send(&request("POST", CHAT, &[], &pattern(0, LIMIT)));
    assert_eq!(client.response().status, 200);
    client.send(&chunked(LIMIT));
    assert_eq!(client.response().status, 200);
    let requests = engine.requests();
    assert_bytes(&requests[0].body, &pattern(0, LIMIT), "the limit with a length");
    assert_bytes(&requests[1].body, &pattern(0, LIMIT), "the limit in chunks");

    for (what, raw) in [
        ("with a length", request("POST", CHAT, &[], &pattern(0, LIMIT + 1))),
        ("in chunks", chunked(LIMIT + 1)),
        ("far over, with a length", request("POST", CHAT, &[], &pattern(0, 5 * LIMIT))),
        ("far over, in chunks", chunked(5 * LIMIT)),
    ] {
        let mut client = router.client();
        let _ = client.try_send(&raw);
        let response = client.response();
        response.assert_rejected(413, "body_too_large");
        if response.keeps {
            assert_eq!(client.post(CHAT, b"{}").status, 200, "{what}: in step");
        } else {
            client.assert_closed();
        }
    }
    router.wait_metric("ringway_rejections_total", &[("reason", "body_too_large")], 4.0, seconds(2));
    let whole = engine.requests().iter().filter(|r| r.complete && r.body.len() > LIMIT).count();
    assert_eq!(whole, 0, "no engine got a body over the limit");
    router.wait_idle(seconds(1));
}

const PLAIN: &[u8] = br#"{"model":"m","messages":[{"role":"user","content":"compressed prompt compressed prompt compressed prompt"}]}"#;
const GZIP: &[u8] = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xabV\xca\xcdOI\xcdQ\xb2R\xcaU\xd2Q\xcaM-.NLO-V\xb2\x8a\
    \xaeV*\xca\xcfI\x05\x8a\x97\x16\xa7\x16\x01\xa5\x92\xf3\xf3JR\xf3J\x80\x02\xc9\xf9\xb9\x05E@\x85\xa9)\n\x05E@v\x89\
    \x02\x11\"J\xb5\xb1\xb5\x00\x8a\x1d\x0f\x15l\x00\x00\x00";
const ZSTD: &[u8] = include_bytes!("support/prompt.json.zst");

/// A Brotli stream of one uncompressed block.
fn brotli(plain: &[u8]) -> Vec<u8> {
    // WBITS 16, not last, four nibbles of length - 1, uncompressed; then the empty last block.
    let header = (plain.len() as u32 - 1) << 4 | 1 << 20;
    let mut bytes = header.to_le_bytes()[..3].to_vec();
    bytes.extend_from_slice(plain);
    bytes.push(3);
    bytes
}

/// A9: a compressed body passes untouched with its `Content-Encoding`, also one that nobody can read. Not being able to
/// look into a body is no reason to refuse it.
#[test]
fn a9_compressed_bodies_pass_untouched() {
    let (one, two) = (Engine::answering(), Engine::answering());
    let router = Setup::new().server("a", &one, &[]).server("b", &two, &[]).start();
    let mut client = router.client();
    for (coding, body) in [
        (None, PLAIN.to_vec()),
        (Some("gzip"), GZIP.to_vec()),
        (Some("zstd"), ZSTD.to_vec()),
        (Some("br"), brotli(PLAIN)),
        (Some("bogus"), pattern(5, 5000)),
        (Some("gzip"), b"not gzip at all".to_vec()),
        (Some("gzip, zstd"), GZIP.to_vec()),
        (Some("identity"), PLAIN.to_vec()),
    ] {
        for path in [CHAT, "/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings", "/elsewhere"]
        {
            let before = (one.request_count(), two.request_count());
            let mut headers = vec![("Content-Type", "application/json")];
            headers.extend(coding.map(|c| ("Content-Encoding", c)));
            let response = client.ask("POST", path, &headers, &body);
            assert_eq!(response.status, 200, "{coding:?} at {path}: {}", response.text());
            let engine = if one.request_count() > before.0 { &one } else { &two };
            let seen = engine.requests().pop().expect("a request");
            assert_eq!(seen.header("content-encoding").as_deref(), coding, "{path}");
            assert_eq!(seen.target, path);
            assert_bytes(&seen.body, &body, &format!("{coding:?} at {path}"));
            assert_eq!(one.request_count() + two.request_count(), before.0 + before.1 + 1);
        }
    }
}

/// A server whose sockets take little, so that what it does not read stays with the sender. `serve` is given each request
/// after its head. Returns its URL; it listens until the process ends.
fn narrow_server(serve: impl Fn(&mut Wire, &Head) + Send + Sync + 'static) -> String {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(8192).unwrap();
    socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(64).unwrap();
    let listener = std::net::TcpListener::from(socket);
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serve = std::sync::Arc::new(serve);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let serve = std::sync::Arc::clone(&serve);
            std::thread::spawn(move || {
                let mut wire = Wire::new(Socket::Tcp(stream));
                while let Ok(head) = wire.head(now() + seconds(60)) {
                    if !head.start.starts_with("GET /health ") {
                        return serve(&mut wire, &head);
                    }
                    let healthy = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                    if wire.socket.write_all(healthy).is_err() {
                        return;
                    }
                }
            });
        }
    });
    url
}

/// An interim answer that comes while the body is still on its way is no answer: the upload goes on to its end, whether the
/// body was in hand or streams through, and the client gets the final one.
#[test]
fn an_interim_answer_does_not_end_an_upload() {
    const INTERIM: [&[u8]; 3] = [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
    ];
    let url = narrow_server(|wire, head| {
        let number: usize =
            head.start.split(['/', ' ']).nth(2).and_then(|n| n.parse().ok()).expect("a number");
        wire.socket.write_all(INTERIM[number]).expect("the router listens");
        // The rest of the body stays with the router meanwhile.
        pause(ms(200));
        if let Socket::Tcp(stream) = &wire.socket {
            socket2::SockRef::from(stream).set_recv_buffer_size(1 << 20).expect("an open socket");
        }
        let mut framing = head.declared_framing().expect("clean framing").expect("a body");
        let mut body = Vec::new();
        while let Ok(Some(piece)) = wire.piece(&mut framing, now() + seconds(5)) {
            body.extend_from_slice(&piece);
        }
        let whole = body == pattern(0, body.len());
        let text = format!("{} {whole}", body.len());
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        let _ = wire.socket.write_all(answer.as_bytes());
    });
    let router = Setup::new().server_at("a", &url, &["max_concurrency = 0", "models = [\"m\"]"]).start();
    std::thread::scope(|scope| {
        for (number, interim) in INTERIM.iter().enumerate() {
            for size in [100_000, 900_000, 6 << 20] {
                let router = &router;
                scope.spawn(move || {
                    let mut client = router.client();
                    client.send(&request("POST", &format!("/{number}"), &[], &pattern(0, size)));
                    let response = client.response();
                    assert_eq!(
                        (response.status, response.text()),
                        (200, format!("{size} true")),
                        "{:?}, {size} bytes",
                        String::from_utf8_lossy(interim)
                    );
                });
            }
        }
    });
    router.wait_metric("ringway_upstream_errors_total", &[], 0.0, seconds(1));
    router.wait_idle(seconds(1));
}

/// Bytes that this side's kernel still holds: not sent, or not acknowledged.
fn unsent_bytes(client: &Client) -> i32 {
    let mut bytes = 0;
    // SAFETY: the descriptor is open, and `bytes` is one int to write to.
    let result = unsafe { libc::ioctl(client.wire.socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    assert_eq!(result, 0, "TIOCOUTQ on an open socket");
    bytes
}

/// A client that goes in the middle of a long upload, while the engine reads nothing of it, is missed all the same: its
/// slot is free within 2 s, and the engine's connection ends before the body does.
#[test]
fn a_client_that_leaves_a_blocked_upload_frees_its_slot() {
    let ends = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let gate = Gate::new();
    let (seen, held) = (std::sync::Arc::clone(&ends), std::sync::Arc::clone(&gate));
    let url = narrow_server(move |wire, head| {
        held.pass(seconds(30));
        let mut framing = head.declared_framing().expect("clean framing").expect("a body");
        let end = loop {
            match wire.piece(&mut framing, now() + seconds(2)) {
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        seen.lock().expect("no holder panics").push(end);
    });
    let router = Setup::new().server_at("a", &url, &["max_concurrency = 0", "models = [\"m\"]"]).start();
    let sizes = [1_300_000, 2 << 20, 3 << 20, 64 << 20];
    let body = pattern(0, 64 << 20);
    for size in sizes {
        let mut client = router.client();
        if let Socket::Tcp(stream) = &client.wire.socket {
            stream.set_write_timeout(Some(ms(400))).expect("an open socket");
        }
        let length = 100 << 20;
        client
            .send(format!("POST {CHAT} HTTP/1.1\r\nHost: r\r\nContent-Length: {length}\r\n\r\n").as_bytes());
        let through = client.try_send(&body[..size]).is_ok();
        assert!(through || size == 64 << 20, "{size} bytes fit the sockets on the way");
        assert!(!through || size < 64 << 20, "nobody reads, and yet {size} bytes went somewhere");
        router.wait_metric("ringway_in_flight", &[("server", "a")], 1.0, seconds(2));
        pause(ms(300));
        // The end of a connection waits its turn behind the bytes before it; only a reset does not.
        match unsent_bytes(&client) {
            0 => drop(client),
            _ => client.reset(),
        }
        router.wait_metric("ringway_in_flight", &[], 0.0, seconds(2));
    }
    router.wait_metric("ringway_client_aborts_total", &[], sizes.len() as f64, seconds(1));
    gate.open();
    let ends = eventually(seconds(5), "the engine's connections end", || {
        let ends = ends.lock().expect("no holder panics").clone();
        if ends.len() == sizes.len() { Ok(ends) } else { Err(format!("{ends:?}")) }
    });
    for end in ends {
        assert!(matches!(end, Err(Fault::Eof { .. } | Fault::Reset)), "{end:?}");
    }
}
