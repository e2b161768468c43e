//! What is not clean HTTP/1.1, from clients and from engines, is refused and never passed on.

mod support;

use support::*;

/// A router in front of one engine that answers everything with 200.
fn one(engine: &Engine) -> Router {
    Setup::new().server("a", engine, &[]).start()
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
          5;ext=\"a;b\"\r\nhello\r\n1;x\r\n \r\n000006\r\nworld!\r\n0;last\r\nX-Sum: 9\r\n\r\n",
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

/// The same when they come a moment after the answer, with the connection already put back for others: whoever asks next
/// gets the answer to its own request.
#[test]
fn an_unasked_answer_that_comes_later_reaches_nobody() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    let unasked = Arc::new(AtomicUsize::new(0));
    let said = Arc::clone(&unasked);
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        let own = exchange.request.body.clone();
        exchange.reply(200, &[], &own)?;
        if own.starts_with(b"first") {
            let start = now();
            while start.elapsed() < std::time::Duration::from_micros(300) {
                std::hint::spin_loop();
            }
            let result = exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nunasked");
            said.fetch_add(1, Ordering::SeqCst);
            result?;
        }
        Ok(Next::Keep)
    });
    let router = one(&engine);
    let (mut first, mut second) = (router.client(), router.client());
    for number in 0..400 {
        let body = format!("first {number}");
        let response = first.post("/x", body.as_bytes());
        assert_eq!((response.status, response.text()), (200, body));
        eventually(seconds(5), "the engine has said more", || {
            if unasked.load(Ordering::SeqCst) > number { Ok(()) } else { Err("not yet".into()) }
        });
        // From at once to long after.
        pause(std::time::Duration::from_micros(number as u64 % 8 * 300));
        let body = format!("second {number}");
        let response = second.post("/x", body.as_bytes());
        assert_eq!((response.status, response.text()), (200, body), "a stranger's answer");
    }
}
