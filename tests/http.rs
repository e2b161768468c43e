//! HTTP/1.1 over real sockets: what passes from hop to hop, and every way to frame an answer.

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

/// Each request has `total_timeout_ms` for itself: what the one before it on the connection took, or lost by it, is not
/// held against it.
#[test]
fn a_pipelined_request_has_its_own_total_time() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        match exchange.request.target.as_str() {
            "/silent" => {
                exchange.wait_close(seconds(20));
                Ok(Next::Close)
            }
            target => {
                let text = target.to_owned();
                exchange.pause(ms(400));
                exchange.reply(200, &[], text.as_bytes())
            }
        }
    });
    let router = Setup::new()
        .limit("total_timeout_ms = 600")
        .health("bench_after = 1000")
        .server("a", &engine, &[])
        .start();
    let mut client = router.client();
    let targets = ["/one", "/two", "/three", "/silent", "/four", "/five"];
    client.send(&targets.map(|target| request("POST", target, &[], b"{}")).concat());
    for target in targets {
        let response = client.response();
        if target == "/silent" {
            response.assert_rejected(504, "upstream_timeout");
            assert!(response.keeps);
        } else {
            assert_eq!((response.status, response.text().as_str()), (200, target));
        }
    }
}

/// The same where the second request had begun to come when the first was answered, and its rest comes after the first
/// one's time would have been over: in its head, and in its body.
#[test]
fn a_request_begun_early_has_its_own_total_time() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        let slow = exchange.request.target == "/slow";
        exchange.pause(ms(if slow { 500 } else { 0 }));
        exchange.reply_ok()
    });
    let router =
        Setup::new().limit("total_timeout_ms = 800").server("a", &engine, &["max_concurrency = 0"]).start();
    let (slow, next) = (request("POST", "/slow", &[], b"{}"), request("POST", "/next", &[], b"{}"));
    std::thread::scope(|scope| {
        for (what, cut) in [("in its head", 20), ("in its body", next.len() - 1)] {
            let (router, slow, next) = (&router, &slow, &next);
            scope.spawn(move || {
                let mut client = router.client();
                let start = now();
                client.send(&[slow, &next[..cut]].concat());
                assert_eq!(client.response().status, 200);
                pause(ms(950).saturating_sub(start.elapsed()));
                client.send(&next[cut..]);
                let response = client.response();
                assert_eq!(response.status, 200, "cut {what}: {}", response.text());
                assert!(response.keeps);
            });
        }
    });
    assert_eq!(engine.request_count(), 4);
}

/// An answer that is the last on its connection arrives whole at a client that has sent on behind its request, more than
/// was read: closing over unread bytes would reset the connection and take the answer with it.
#[test]
fn unread_surplus_does_not_cost_the_answer() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.pause(ms(200));
        exchange.reply(200, &[], &pattern(0, 60_000))
    });
    let router = Setup::new().server("a", &engine, &["max_concurrency = 0"]).start();
    let mut clients: Vec<_> = (0..10)
        .map(|_| {
            // Its kernel takes little of an answer that it does not read.
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.set_recv_buffer_size(8192).unwrap();
            socket.connect(&router.http().into()).unwrap();
            let stream = std::net::TcpStream::from(socket);
            let limits = stream.try_clone().unwrap();
            let wire = support::wire::Wire::new(support::wire::Socket::Tcp(stream));
            limits.set_write_timeout(Some(ms(300))).unwrap();
            let mut client = Client { wire, limit: seconds(10) };
            client.send(&request("POST", CHAT, &[("Connection", "close")], b"{}"));
            let _ = client.try_send(&request("POST", CHAT, &[], &pattern(0, 400_000)));
            client
        })
        .collect();
    engine.wait_requests(10);
    pause(ms(500));
    for client in &mut clients {
        let response = client.response();
        assert_eq!((response.status, response.keeps), (200, false));
        assert_bytes(&response.body, &pattern(0, 60_000), "the answer");
    }
    assert_eq!(engine.request_count(), 10, "what came behind was not begun");
    router.wait_idle(seconds(1));
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
    assert_eq!(rest, b"one two");
    assert!(matches!(fault, Fault::Eof { .. }), "a reset is no end: {fault}");

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

/// An answer that ends with the engine's connection ends whole however long after its last piece the engine closes: here
/// when the router begins to care for what it wrote last.
#[test]
fn an_answer_until_close_is_whole_whenever_the_close_comes() {
    const CLIENTS: usize = 20;
    const EACH: usize = 15;
    let dice = std::sync::Mutex::new(Dice::new(5));
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        let mut answer = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
        answer.extend_from_slice(&exchange.request.body);
        exchange.leave();
        exchange.raw(&answer)?;
        let wait = 20_000 + dice.lock().expect("no holder panics").below(15_000);
        exchange.pause(std::time::Duration::from_micros(wait));
        Ok(Next::Close)
    });
    let router = Setup::new().server("a", &engine, &["max_concurrency = 0"]).start();
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let router = &router;
            scope.spawn(move || {
                let mut client = router.client();
                for turn in 0..EACH {
                    let body = chat("m", &format!("{number}.{turn}"));
                    client.send(&request("POST", CHAT, &[], &body));
                    match client.try_response() {
                        Ok(response) => {
                            assert_eq!(response.status, 200);
                            assert_bytes(&response.body, &body, "the answer");
                            assert!(response.keeps, "it came in chunks");
                        }
                        Err((fault, had)) => {
                            panic!("cut after {} of {} bytes: {fault}", had.len(), body.len())
                        }
                    }
                }
            });
        }
    });
    router.wait_metric("ringway_upstream_errors_total", &[], 0.0, seconds(1));
}
