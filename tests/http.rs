//! HTTP/1.1 over real sockets: heads, framing, bodies, limits, and what is refused.

mod support;

use support::*;

/// A router in front of one engine that answers everything with 200.
fn one(engine: &Engine) -> Router {
    Setup::new().server("a", engine, &[]).start()
}

/// A5: what concerns one connection only stays on it, in both directions; everything else passes, repeated, unknown and
/// non-UTF-8 headers included. The client's `Connection: close` closes the client's connection, never the engine's.
#[test]
fn a5_hop_by_hop_headers_stay_on_their_hop() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.leave();
        exchange.raw(
            b"HTTP/1.1 200 OK\r\nConnection: X-Internal, keep-alive\r\nX-Internal: 1\r\nKeep-Alive: timeout=5\r\n\
              Proxy-Authenticate: Basic\r\nProxy-Connection: keep-alive\r\nUpgrade: h2c\r\nContent-Type: text/plain\r\n\
              Set-Cookie: a=1\r\nx-odd_name: kept\r\nSet-Cookie: b=2\r\nX-Latin: caf\xe9\r\nServer: engine\r\n\
              Content-Length: 2\r\n\r\nok",
        )?;
        Ok(Next::Keep)
    });
    let router = one(&engine);
    let mut client = router.client();
    let body = chat("m", "x");
    let mut raw =
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: router.test\r\nConnection: close, X-Secret\r\n\
        X-Secret: 1\r\nKeep-Alive: 5\r\nProxy-Authorization: x\r\nProxy-Connection: close\r\nTE: gzip\r\n\
        Upgrade: websocket\r\nTrailer: X-Sum\r\nAuthorization: Bearer sk-own\r\nX-Rep: one\r\nAccept: */*\r\n\
        X-Rep: two\r\nX-Bytes: \xff\xfe\r\nx-unknown_thing: kept\r\nX-Empty:\r\n"
            .to_vec();
    raw.extend(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
    raw.extend(&body);
    client.send(&raw);
    let response = client.response();
    assert_eq!((response.status, response.text().as_str()), (200, "ok"));
    for name in ["X-Internal", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "Upgrade"] {
        assert!(!response.head.has(name), "{name} must not reach the client:\n{}", response.head.text());
    }
    assert_eq!(response.head.all("set-cookie"), [b"a=1", b"b=2"], "repeated headers stay, in order");
    assert_eq!(response.header("X-odd_name").as_deref(), Some("kept"));
    assert_eq!(response.head.all("x-latin"), [b"caf\xe9"], "values are bytes");
    assert_eq!(response.header("Server").as_deref(), Some("engine"));
    assert!(!response.keeps, "the client asked to close:\n{}", response.head.text());
    client.assert_closed();

    let seen = &engine.requests()[0];
    for name in
        ["X-Secret", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "Upgrade", "Transfer-Encoding"]
    {
        assert!(!seen.head.has(name), "{name} must not reach the engine:\n{}", seen.head.text());
    }
    assert!(
        !seen.head.text().to_lowercase().contains("gzip"),
        "TE: gzip is this hop's:\n{}",
        seen.head.text()
    );
    assert!(
        !seen.head.all("connection").iter().any(|v| v.to_ascii_lowercase().starts_with(b"close")),
        "the engine's connection is the router's own:\n{}",
        seen.head.text()
    );
    assert_eq!(seen.head.all("x-rep"), [b"one", b"two"]);
    assert_eq!(seen.head.all("x-bytes"), [b"\xff\xfe"]);
    assert_eq!(seen.head.all("x-empty"), [b""]);
    assert_eq!(seen.header("X-Unknown_Thing").as_deref(), Some("kept"));
    assert_eq!(seen.header("Accept").as_deref(), Some("*/*"));
    assert_eq!(
        seen.header("Authorization").as_deref(),
        Some("Bearer sk-own"),
        "no key of the router's: own key passes"
    );
    assert_bytes(&seen.body, &body, "the body");

    let mut next = router.client();
    assert_eq!(next.post(CHAT, &body).status, 200);
    let seen = &engine.requests()[1];
    assert_eq!(
        (seen.connection, seen.ordinal),
        (engine.requests()[0].connection, 1),
        "the connection was kept"
    );
}

/// `Connection` may name what it likes: the body's framing is not this sender's to remove.
#[test]
fn connection_cannot_take_the_framing_away() {
    let engine = Engine::answering();
    let router = one(&engine);
    let body = chat("m", "x");
    for names in [
        "Content-Length",
        "content-length, host",
        "Transfer-Encoding",
        "close, Content-Length, Authorization",
    ] {
        let before = engine.request_count();
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[("Connection", names)], &body));
        let response = client.response();
        if response.status != 400 {
            assert_eq!(response.status, 200, "{names}");
            assert_bytes(&engine.requests()[before].body, &body, names);
        }
    }
}

/// The engine's `Connection: close` ends the engine's connection, not the client's; the next request opens a new one.
#[test]
fn an_engine_that_closes_costs_the_client_nothing() {
    let engine = Engine::start(|exchange| {
        exchange.reply(200, &[("Connection", "close")], b"bye")?;
        Ok(Next::Close)
    });
    let router = one(&engine);
    let mut client = router.client();
    for _ in 0..20 {
        let response = client.post(CHAT, &chat("m", "x"));
        assert_eq!((response.status, response.text().as_str(), response.keeps), (200, "bye", true));
    }
    assert!(engine.requests().iter().all(|r| r.ordinal == 0));
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

/// An HTTP/1.0 client's expectation is ignored (RFC 9110 section 10.1.1), and no interim answer is sent to it.
#[test]
fn an_http_1_0_client_gets_no_interim_answer() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.leave();
        exchange.raw(
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        )?;
        Ok(Next::Keep)
    });
    let router = one(&engine);
    let mut client = router.client();
    client.send(b"POST /x HTTP/1.0\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi");
    let response = client.response();
    assert_eq!((response.status, response.text().as_str()), (200, "ok"));
    assert!(response.interim.is_empty(), "{:?}", response.interim);
    assert_eq!(engine.requests()[0].body, b"hi");
}

/// Interim answers from an engine don't end the exchange; the final answer reaches the client.
#[test]
fn an_engines_interim_answers_are_not_final() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.raw(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nX-Lifeboat-Server: forged\r\n\r\n",
        )?;
        exchange.reply(200, &[], b"final")
    });
    let router = one(&engine);
    let mut client = router.client();
    for _ in 0..3 {
        let response = client.post(CHAT, &chat("m", "x"));
        assert_eq!((response.status, response.text().as_str(), response.keeps), (200, "final", true));
    }
}

/// Sends `raw` on its own connection: the answer must be 400 in the error shape, and the connection closed after it.
fn assert_refused(router: &Router, raw: &[u8], what: &str) {
    let mut client = router.client().with_limit(seconds(5));
    // The router may answer before all of it is written.
    let _ = client.try_send(raw);
    let response = match client.try_response() {
        Ok(response) => response,
        Err((fault, _)) => panic!("{what}: no answer: {fault}"),
    };
    assert_eq!(response.status, 400, "{what}: {}", response.head.text());
    response.assert_rejected(400, "bad_request");
    assert!(!response.keeps, "{what}: the answer says that the connection closes:\n{}", response.head.text());
    let (rest, _) = client.rest();
    assert!(rest.is_empty(), "{what}: more after the answer: {:?}", String::from_utf8_lossy(&rest));
}

/// A7: whatever is doubtful about where a request ends, or what its headers are, is 400 and close, and the engine gets
/// nothing of it.
#[test]
fn a7_doubtful_requests_are_refused_and_not_forwarded() {
    let engine = Engine::answering();
    let router = one(&engine);
    let post = "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n";
    let cases: Vec<(&str, Vec<u8>)> = [
        ("length with chunked", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("chunked with length", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"),
        ("two different lengths", "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"),
        ("a list of different lengths", "Content-Length: 5, 6\r\n\r\nhello!"),
        ("a length with a sign", "Content-Length: +5\r\n\r\nhello"),
        ("a negative length", "Content-Length: -5\r\n\r\nhello"),
        ("a length in hex", "Content-Length: 0x5\r\n\r\nhello"),
        ("a length with a tail", "Content-Length: 5x\r\n\r\nhello"),
        ("a length with a space inside", "Content-Length: 1 0\r\n\r\nhellohello"),
        ("an empty length", "Content-Length: \r\n\r\n"),
        ("a length beyond 64 bits", "Content-Length: 18446744073709551621\r\n\r\nhello"),
        ("chunked not last", "Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
        (
            "chunked not last, in two headers",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        ),
        ("chunked twice", "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"),
        ("chunked in quotes", "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n"),
        ("a coding that only looks like chunked", "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
        ("an empty coding", "Transfer-Encoding: \r\n\r\n0\r\n\r\n"),
        ("a vertical tab before chunked", "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
        ("a space before the colon", "Content-Length : 5\r\n\r\nhello"),
        ("a tab before the colon", "X-A\t: b\r\nContent-Length: 0\r\n\r\n"),
        ("bare LF line ends", "X-A: b\nX-B: c\r\nContent-Length: 0\r\n\r\n"),
        ("a bare LF before the framing", "X-A: b\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("a bare LF as the empty line", "Content-Length: 0\r\n\nGET /smuggled HTTP/1.1\r\nHost: r\r\n\r\n"),
        ("a bare CR in a value", "X-A: b\rX-B: c\r\nContent-Length: 0\r\n\r\n"),
        ("a folded line", "X-A: b\r\n  folded\r\nContent-Length: 0\r\n\r\n"),
        ("a fold as the first header", " X-A: b\r\nContent-Length: 0\r\n\r\n"),
        ("NUL in a value", "X-A: b\0c\r\nContent-Length: 0\r\n\r\n"),
        ("NUL in a name", "X-\0A: b\r\nContent-Length: 0\r\n\r\n"),
        ("a control character in a value", "X-A: b\x01c\r\nContent-Length: 0\r\n\r\n"),
        ("a space inside a name", "X A: b\r\nContent-Length: 0\r\n\r\n"),
        ("an empty name", ": b\r\nContent-Length: 0\r\n\r\n"),
        ("a line without a colon", "nonsense\r\nContent-Length: 0\r\n\r\n"),
        ("a second Host", "Host: other\r\nContent-Length: 0\r\n\r\n"),
        ("a chunk size that is none", "Transfer-Encoding: chunked\r\n\r\nxyz\r\nhello\r\n0\r\n\r\n"),
        ("a chunk size with a sign", "Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n"),
        ("a chunk size with 0x", "Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n"),
        (
            "a chunk size beyond 64 bits",
            "Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
        ),
        ("an empty chunk size", "Transfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n"),
        ("a chunk without its CRLF", "Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX0\r\n\r\n"),
        ("a chunk line that ends in a bare LF", "Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n"),
        ("a bare LF in a chunk extension", "Transfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n"),
        ("a chunk that ends in a bare LF", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n"),
        ("a malformed trailer", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nbad trailer\r\n\r\n"),
    ]
    .into_iter()
    .map(|(what, rest)| (what, format!("{post}{rest}").into_bytes()))
    .chain(
        [
            ("no Host", "GET /x HTTP/1.1\r\n\r\n"),
            (
                "chunked on HTTP/1.0",
                "POST /x HTTP/1.0\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            ),
            ("no version", "GET /x\r\nHost: r\r\n\r\n"),
            ("another protocol", "GET /x HTPP/1.1\r\nHost: r\r\n\r\n"),
            ("a version that is none", "GET /x HTTP/1.x\r\nHost: r\r\n\r\n"),
            ("a space in the target", "GET /x y HTTP/1.1\r\nHost: r\r\n\r\n"),
            ("a control character in the target", "GET /x\x01 HTTP/1.1\r\nHost: r\r\n\r\n"),
            ("a target that is no path", "GET x HTTP/1.1\r\nHost: r\r\n\r\n"),
            ("a method that is no token", "G@T /x HTTP/1.1\r\nHost: r\r\n\r\n"),
            ("no method", " /x HTTP/1.1\r\nHost: r\r\n\r\n"),
            ("a tab between the words", "GET\t/x\tHTTP/1.1\r\nHost: r\r\n\r\n"),
            ("a bare LF after the request line", "GET /x HTTP/1.1\nHost: r\r\n\r\n"),
        ]
        .map(|(what, raw)| (what, raw.as_bytes().to_vec())),
    )
    .collect();
    assert!(cases.len() >= 12);
    for (what, raw) in &cases {
        assert_refused(&router, raw, what);
        assert_eq!(engine.request_count(), 0, "{what}: reached the engine: {:?}", engine.requests());
    }
    router.wait_metric(
        "ringway_rejections_total",
        &[("reason", "bad_request")],
        cases.len() as f64,
        seconds(2),
    );
    // A valid request still passes, of course.
    assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200);
}

/// A request hidden behind a refused one is not served: the connection is closed, not resynchronised.
#[test]
fn a7_nothing_is_served_after_a_refused_request() {
    let engine = Engine::answering();
    let router = one(&engine);
    let mut client = router.client();
    client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n\
          0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: r\r\n\r\n",
    );
    client.response().assert_rejected(400, "bad_request");
    let (rest, _) = client.rest();
    assert!(rest.is_empty(), "{:?}", String::from_utf8_lossy(&rest));
    assert_eq!(engine.request_count(), 0);
}

/// The engine gets the router's framing: a length stays a length, chunks are cut anew, extensions don't pass.
#[test]
fn a7_requests_are_framed_anew() {
    let engine = Engine::answering();
    let router = one(&engine);
    let mut client = router.client();
    client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: Chunked\r\nTrailer: X-Sum\r\n\r\n\
          5;ext=\"a;b\"\r\nhello\r\n1 ;x\r\n \r\n000006\r\nworld!\r\n0;last\r\nX-Sum: 9\r\n\r\n",
    );
    assert_eq!(client.response().status, 200);
    // The same length twice is unambiguous: taken as one, or refused.
    let mut twice = router.client();
    twice.send(b"POST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello");
    let status = twice.response().status;
    assert!(status == 200 || status == 400, "{status}");
    let requests = engine.requests();
    assert_eq!(requests[0].body, b"hello world!");
    assert!(!requests[0].head.text().contains("ext="));
    assert!(requests.len() == 1 || requests[1].body == b"hello");
    // In step after a chunked body with trailers.
    assert_eq!(client.post(CHAT, b"{}").status, 200);
}

/// Traffic that is not HTTP/1.1 at all gets a 400 that says so, not silence.
#[test]
fn other_protocols_get_a_clear_400() {
    let engine = Engine::answering();
    let router = one(&engine);
    let tls_hello: &[u8] = b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\x17\x29\x33\x51\x9a\xd0\x11\x2c\x5e\x77\x00\x10\
        \x8c\x01\xee\x02\x4b\x71\x6a\x33\x9f\x00\x00\x08\x13\x02\x13\x03\x13\x01\x00\xff\x01\x00\x00\x70\r\n\r\n";
    assert_refused(&router, tls_hello, "a TLS hello");
    assert_refused(&router, b"\0\x01\x02\x03\xff\xfe\r\n\r\n", "binary");
    assert_refused(&router, b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "SSH");
    assert_refused(&router, &[b"garbage ".repeat(3), b"\r\n\r\n".to_vec()].concat(), "garbage");
    let h2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    assert_refused(&router, h2, "the HTTP/2 preface");
    let mut client = router.client();
    client.send(h2);
    let message = client.response().json()["error"]["message"].as_str().unwrap_or("").to_owned();
    assert!(message.contains("HTTP/2"), "says what is not offered: {message:?}");
    assert_eq!(engine.request_count(), 0);
}

/// A CONNECT is not a way through: no tunnel, nothing forwarded.
#[test]
fn connect_opens_no_tunnel() {
    let engine = Engine::answering();
    let router = one(&engine);
    let mut client = router.client();
    client.send(b"CONNECT other.test:443 HTTP/1.1\r\nHost: other.test:443\r\n\r\n");
    let response = client.response();
    assert!((400..600).contains(&response.status), "{}", response.head.text());
    assert_eq!(engine.request_count(), 0);
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

/// Requests sent in one go are answered in their order, each with its own answer, whatever they take.
#[test]
fn pipelined_requests_are_answered_in_order() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        let wait = if exchange.request.target.ends_with("slow") { 60 } else { 0 };
        exchange.pause(ms(wait));
        let text = format!("{}:{}", exchange.request.target, exchange.request.body.len());
        exchange.reply(200, &[], text.as_bytes())
    });
    let router = one(&engine);
    let mut client = router.client();
    let mut raw = Vec::new();
    let mut want = Vec::new();
    for number in 0..12 {
        let target = format!("/r{number}/{}", if number % 3 == 0 { "slow" } else { "fast" });
        let body = pattern(number, number * 1000);
        if number % 2 == 0 {
            raw.extend(request("POST", &target, &[], &body));
            want.push(format!("{target}:{}", body.len()));
        } else {
            raw.extend(request("GET", &target, &[], b""));
            want.push(format!("{target}:0"));
        }
    }
    client.send(&raw);
    for want in &want {
        assert_eq!(&client.response().text(), want);
    }
    // A request after one that closes is not served.
    client.send(&request("GET", "/last", &[("Connection", "close")], b""));
    let _ = client.try_send(&request("GET", "/never", &[], b""));
    assert_eq!(client.response().text(), "/last:0");
    let (rest, _) = client.rest();
    assert!(rest.is_empty(), "{:?}", String::from_utf8_lossy(&rest));
    assert!(engine.requests().iter().all(|r| r.target != "/never"));
}

/// An HTTP/1.0 client gets no chunks, and the end of its connection as the end of a body without a length.
#[test]
fn http_1_0_clients_are_served() {
    let engine = Engine::start(|exchange| {
        if exchange.request.target == "/sized" {
            return exchange.reply(200, &[], b"sized");
        }
        exchange.stream_head()?;
        exchange.chunk(b"one ")?;
        exchange.chunk(b"two")?;
        exchange.end()
    });
    let router = one(&engine);
    let mut client = router.client();
    client.send(b"GET /stream HTTP/1.0\r\n\r\n");
    let (status, head, _) = client.head().unwrap();
    assert_eq!(status, 200);
    assert!(!head.has("transfer-encoding"), "HTTP/1.0 knows no chunks:\n{}", head.text());
    let (rest, fault) = client.rest();
    assert_eq!((rest.as_slice(), fault), (b"one two".as_slice(), Fault::Eof { unfinished: 0 }));

    let mut client = router.client();
    client.send(b"GET /sized HTTP/1.0\r\nHost: r\r\n\r\n");
    let response = client.response();
    assert_eq!(response.text(), "sized");
    let (rest, _) = client.rest();
    assert!(rest.is_empty(), "an HTTP/1.0 connection closes unless asked");

    let mut client = router.client();
    client.send(b"GET /sized HTTP/1.0\r\nHost: r\r\nConnection: keep-alive\r\n\r\n");
    let response = client.response();
    assert_eq!(response.text(), "sized");
    let offered = response.head.all("connection").iter().any(|v| v.eq_ignore_ascii_case(b"keep-alive"));
    if offered {
        client.send(b"GET /sized HTTP/1.0\r\nHost: r\r\n\r\n");
        assert_eq!(client.response().text(), "sized", "kept as promised");
    }
    client.rest();
}

/// HEAD: the head of the answer with its length, no body, and the connection stays in step.
#[test]
fn head_answers_have_no_body() {
    let engine = Engine::start(|exchange| {
        if exchange.request.method == "HEAD" {
            let text = if exchange.request.target == "/chunked" {
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            } else {
                "HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"
            };
            exchange.leave();
            exchange.raw(text.as_bytes())?;
            return Ok(Next::Keep);
        }
        exchange.reply_ok()
    });
    let router = one(&engine);
    let mut client = router.client();
    let response = client.ask("HEAD", "/file", &[], b"");
    assert_eq!((response.status, response.header("Content-Length").as_deref()), (200, Some("1234")));
    assert_eq!(client.ask("HEAD", "/chunked", &[], b"").status, 200);
    assert_eq!(client.ask("HEAD", "/file", &[], b"").status, 200);
    for path in ["/health", "/liveness", "/readiness", "/v1/models"] {
        let response = client.ask("HEAD", path, &[], b"");
        assert!(response.status == 200 || response.status == 405, "{path}: {}", response.head.text());
        assert!(response.keeps, "{path}");
    }
    assert_eq!(client.post(CHAT, b"{}").text(), r#"{"ok":true}"#);
    let connections: std::collections::HashSet<_> = engine.requests().iter().map(|r| r.connection).collect();
    assert_eq!(connections.len(), 1, "the engine's connection stays in step too");
}

/// 204 and 304 have no body whatever their headers say; both connections stay in step.
#[test]
fn answers_without_a_body_keep_step() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        let text: &[u8] = match exchange.request.target.as_str() {
            "/204" => b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n",
            "/304" => b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\nETag: \"x\"\r\n\r\n",
            "/empty" => b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            "/empty-chunked" => b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            _ => b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody",
        };
        exchange.leave();
        exchange.raw(text)?;
        Ok(Next::Keep)
    });
    let router = one(&engine);
    let mut client = router.client();
    for target in ["/204", "/304", "/empty", "/empty-chunked", "/304", "/204"] {
        let response = client.ask("GET", target, &[], b"");
        let status = target[1..].parse().unwrap_or(200);
        assert_eq!((response.status, response.body.len(), response.keeps), (status, 0, true), "{target}");
        if status == 204 {
            assert!(!response.head.has("transfer-encoding"), "{}", response.head.text());
        }
        assert_eq!(client.ask("GET", "/body", &[], b"").text(), "body", "after {target}");
    }
    let connections: std::collections::HashSet<_> = engine.requests().iter().map(|r| r.connection).collect();
    assert_eq!(connections.len(), 1);
}

/// A target in absolute form reaches the engine as a path; queries and odd characters pass as they are.
#[test]
fn targets_reach_the_engine_as_paths() {
    let engine = Engine::answering();
    let router = one(&engine);
    let mut client = router.client();
    client.send(b"POST http://elsewhere.test:81/v1/chat/completions?x=1 HTTP/1.1\r\nHost: elsewhere.test:81\r\nContent-Length: 13\r\n\r\n{\"model\":\"m\"}");
    assert_eq!(client.response().status, 200);
    client.send(b"GET http://elsewhere.test HTTP/1.1\r\nHost: elsewhere.test\r\n\r\n");
    assert_eq!(client.response().status, 200);
    for target in ["/a%20b?c=d&e=%2F", "//double//slash", "/../up", "/x?a=b?c", "/%00", "/semi;colon,comma"] {
        assert_eq!(client.ask("GET", target, &[], b"").status, 200, "{target}");
        assert_eq!(engine.requests().pop().unwrap().target, target);
    }
    let requests = engine.requests();
    assert_eq!(requests[0].target, "/v1/chat/completions?x=1");
    assert_eq!(requests[1].target, "/");
    let host = requests[0].header("host").unwrap();
    assert!(host == engine.address().to_string() || host == "elsewhere.test:81", "{host}");
}

/// Chunked answers with extensions and trailers, and answers that end with the connection, arrive whole, with a clean end,
/// and the client's connection is kept.
#[test]
fn every_way_to_end_an_answer_is_passed_on() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        match exchange.request.target.as_str() {
            "/trailers" => {
                exchange.leave();
                exchange.raw(
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
                      5;a=b\r\nhello\r\n00\r\nX-Sum: 1\r\n\r\n",
                )?;
                Ok(Next::Keep)
            }
            "/until-close" => {
                exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nfirst ")?;
                exchange.pause(ms(30));
                exchange.leave();
                exchange.raw(b"second")?;
                Ok(Next::Close)
            }
            "/1.0" => {
                exchange.leave();
                exchange.raw(b"HTTP/1.0 200 OK\r\n\r\nold engine")?;
                Ok(Next::Close)
            }
            "/1.0-sized" => {
                exchange.leave();
                exchange.raw(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold")?;
                Ok(Next::Close)
            }
            "/no-reason" => {
                exchange.leave();
                exchange.raw(b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok")?;
                Ok(Next::Keep)
            }
            _ => exchange.reply_ok(),
        }
    });
    let router = one(&engine);
    let mut client = router.client();
    for (target, want) in [
        ("/trailers", "hello"),
        ("/until-close", "first second"),
        ("/trailers", "hello"),
        ("/1.0", "old engine"),
        ("/1.0-sized", "old"),
        ("/no-reason", "ok"),
        ("/plain", r#"{"ok":true}"#),
    ] {
        let response = client.ask("GET", target, &[], b"");
        assert_eq!(
            (response.status, response.text().as_str(), response.keeps),
            (200, want, true),
            "{target}"
        );
    }
    router.wait_metric("ringway_upstream_errors_total", &[], 0.0, seconds(1));
}

/// An engine whose answer is not HTTP, or whose framing is doubtful, gives 502; its bytes never reach the client, and
/// its connection is not used again.
#[test]
fn a_doubtful_answer_is_502() {
    let answers: [(&str, &[u8]); 12] = [
        ("nonsense", b"nonsense\r\n\r\n"),
        (
            "length with chunked",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        ("two lengths", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!"),
        ("a length with a sign", b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok"),
        ("a status of two digits", b"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nok"),
        ("a folded line", b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\nok"),
        ("a bare CR", b"HTTP/1.1 200 OK\r\nX: a\rb\r\nContent-Length: 2\r\n\r\nok"),
        ("NUL", b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 2\r\n\r\nok"),
        ("a space before the colon", b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok"),
        ("HTTP/2", b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        (
            "a tunnel nobody asked for",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        ),
        ("half a head", b"HTTP/1.1 200 OK\r\nContent-Len"),
    ];
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        let number: usize = exchange.request.target[1..].parse().unwrap_or(usize::MAX);
        let Some((_, raw)) = answers.get(number) else { return exchange.reply_ok() };
        exchange.raw(raw)?;
        exchange.pause(ms(20));
        Ok(Next::Close)
    });
    let router = Setup::new().health("bench_after = 1000").server("a", &engine, &[]).start();
    for (number, (what, _)) in answers.iter().enumerate() {
        let mut client = router.client().with_limit(seconds(5));
        let response = client.ask("POST", &format!("/{number}"), &[], b"{}");
        assert_eq!(response.status, 502, "{what}: {}", response.head.text());
        response.assert_rejected(502, "upstream_error");
        assert_eq!(engine.request_count(), number + 1, "{what}: sent again");
    }
    assert_eq!(router.post("/ok", b"{}").status, 200);
    assert!(
        engine.requests().iter().all(|r| r.ordinal == 0),
        "no connection was used after a doubtful answer"
    );
    let errors = router.metrics().sum("ringway_upstream_errors_total", &[]);
    assert_eq!(errors, answers.len() as f64);
}

/// Bytes that an engine sends after its answer belong to nobody: they never become the next client's answer.
#[test]
fn bytes_after_an_answer_never_reach_the_next_client() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.leave();
        if exchange.request.target == "/poison" {
            exchange.raw(
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\
                  HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison",
            )?;
        } else {
            exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nclean")?;
        }
        Ok(Next::Keep)
    });
    let router = one(&engine);
    for _ in 0..10 {
        let mut client = router.client();
        assert_eq!(client.post("/poison", b"{}").text(), "ok");
        assert_eq!(router.client().post("/next", b"{}").text(), "clean");
        assert_eq!(client.post("/next", b"{}").text(), "clean");
    }
}
