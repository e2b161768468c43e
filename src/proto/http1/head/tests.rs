use super::*;

fn request(text: &str) -> Result<RequestHead, HeadError> {
    let limits = HeadLimits::new(65536, b"X-Lifeboat-");
    let mut head = RequestHead::default();
    match parse_request(text.as_bytes(), &mut HeadScan::default(), &limits, &mut head)? {
        Parse::Complete => Ok(head),
        Parse::Partial => panic!("{text:?} is no whole head"),
    }
}

fn response(text: &str, method: Method) -> Result<ResponseHead, ResponseError> {
    let limits = HeadLimits::new(65536, b"X-Lifeboat-");
    let mut head = ResponseHead::default();
    match parse_response(text.as_bytes(), &mut HeadScan::default(), &limits, method, &mut head)? {
        Parse::Complete => Ok(head),
        Parse::Partial => panic!("{text:?} is no whole head"),
    }
}

fn refusal(text: &str) -> &'static str {
    request(text).expect_err(text).what
}

#[test]
fn a_request_head_is_found_where_it_is() {
    let text = "\r\nPOST /v1/chat?x=1 HTTP/1.1\r\nHost: a:1\r\ncontent-TYPE:\tapplication/json \r\nContent-Encoding: gzip\r\n\
        X-Lifeboat-Tier: gold\r\nContent-Length: 07\r\nEmpty:\r\n\r\n{}";
    let head = request(text).unwrap();
    let buf = text.as_bytes();
    assert_eq!(&buf[head.head_len..], b"{}");
    assert_eq!((head.method, head.minor, head.framing), (Method::Post, 1, Framing::Length(7)));
    assert_eq!(head.method_span.of(buf), b"POST");
    assert_eq!(head.target.of(buf), b"/v1/chat?x=1");
    assert_eq!((head.path(buf), head.authority), (&b"/v1/chat"[..], None));
    assert_eq!(head.host.unwrap().of(buf), b"a:1");
    assert_eq!(head.content_type.unwrap().of(buf), b"application/json");
    assert_eq!(head.content_encoding.unwrap().of(buf), b"gzip");
    assert_eq!(head.first(FieldKind::RouterOwn).unwrap().of(buf), b"gold");
    assert_eq!(head.named(buf, b"EMPTY").unwrap().of(buf), b"");
    assert!(head.keep_alive && !head.expect_continue);
    assert_eq!(head.fields().len(), 6);
}

#[test]
fn a_reused_head_keeps_nothing_of_the_last_one() {
    let limits = HeadLimits::new(65536, b"X-Lifeboat-");
    let (mut scan, mut head) = (HeadScan::default(), RequestHead::default());
    let full = b"POST http://h/ HTTP/1.1\r\nHost: a\r\nContent-Type: a\r\nContent-Encoding: b\r\nExpect: 100-continue\r\n\
        Content-Length: 1\r\nConnection: close\r\n\r\n";
    assert_eq!(parse_request(full, &mut scan, &limits, &mut head), Ok(Parse::Complete));
    let capacity = head.fields.capacity();
    // The scan is ready for the next head without being reset by hand.
    assert_eq!(parse_request(b"GET / HTTP/1.0\r\n\r\n", &mut scan, &limits, &mut head), Ok(Parse::Complete));
    let fresh = request("GET / HTTP/1.0\r\n\r\n").unwrap();
    assert_eq!(head, fresh);
    assert_eq!(head.fields.capacity(), capacity, "the space of the fields is reused");
}

#[test]
fn keep_alive_follows_version_and_connection() {
    let cases = [
        ("HTTP/1.1", "", true),
        ("HTTP/1.1", "Connection: close\r\n", false),
        ("HTTP/1.1", "Connection: CLOSE , x\r\n", false),
        ("HTTP/1.1", "Connection: x\r\nConnection: keep-alive, close\r\n", false),
        ("HTTP/1.1", "Connection: closed\r\n", true),
        ("HTTP/1.1", "Proxy-Connection: close\r\n", true),
        ("HTTP/1.0", "", false),
        ("HTTP/1.0", "Connection: Keep-Alive\r\n", true),
        ("HTTP/1.0", "Connection: keep-alive, close\r\n", false),
    ];
    for (version, line, keep_alive) in cases {
        let head = request(&format!("GET / {version}\r\nHost: a\r\n{line}\r\n")).unwrap();
        assert_eq!(head.keep_alive, keep_alive, "{version} {line:?}");
        let text = format!("{version} 200 OK\r\nContent-Length: 0\r\n{line}\r\n");
        assert_eq!(
            response(&text, Method::Get).unwrap().keep_alive,
            keep_alive,
            "response {version} {line:?}"
        );
    }
}

#[test]
fn nominated_fields_are_absent_but_for_what_frames_routes_or_describes() {
    let text = "POST / HTTP/1.1\r\nX-A: 1\r\nConnection: x-a,, X-API-KEY\r\nHost: a\r\nx-A: 2\r\nx-api-key: k\r\nContent-Length: 3\r\n\
        Content-Type: t\r\nX-Lifeboat-Tier: g\r\nX-B: 3\r\n\
        Connection: content-length , host, content-type, transfer-encoding, connection, x-lifeboat-tier\r\n\r\n";
    let head = request(text).unwrap();
    let buf = text.as_bytes();
    let kinds: Vec<FieldKind> = head.fields().iter().map(|f| f.kind).collect();
    use FieldKind::*;
    assert_eq!(
        kinds,
        [
            Nominated,
            Connection,
            Host,
            Nominated,
            Nominated,
            ContentLength,
            ContentType,
            RouterOwn,
            Other,
            Connection
        ]
    );
    assert_eq!((head.framing, head.first(XApiKey)), (Framing::Length(3), None));
    assert_eq!(head.named(buf, b"x-a"), None);
    assert_eq!(head.named(buf, b"x-b").unwrap().of(buf), b"3");
}

#[test]
fn connection_has_a_bound_and_a_grammar() {
    let with = |value: &str| format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: {value}\r\n\r\n");
    assert!(request(&with(&vec!["x"; 32].join(","))).is_ok());
    assert!(refusal(&with(&vec!["x"; 33].join(","))).contains("more than 32"));
    assert!(request(&with(&vec!["close"; 500].join(","))).is_ok(), "its own words cost nothing");
    assert!(refusal(&with("a b")).contains("comma-separated"));
    assert!(refusal(&with("close;")).contains("comma-separated"));
}

#[test]
fn expectations_need_a_body_and_http_1_1() {
    let head = |version: &str, line: &str| {
        request(&format!("POST / {version}\r\nHost: a\r\nExpect: 100-Continue\r\n{line}\r\n")).unwrap()
    };
    assert!(head("HTTP/1.1", "Content-Length: 1\r\n").expect_continue);
    assert!(head("HTTP/1.1", "Transfer-Encoding: chunked\r\n").expect_continue);
    assert!(!head("HTTP/1.1", "Content-Length: 0\r\n").expect_continue);
    assert!(!head("HTTP/1.1", "").expect_continue);
    assert!(!head("HTTP/1.0", "Content-Length: 1\r\n").expect_continue);
    assert!(refusal("GET / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\n\r\n").contains("expectation"));
}

#[test]
fn targets_in_every_form() {
    let parse =
        |method: &str, target: &str| request(&format!("{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n"));
    let parts = |method: &str, target: &str| {
        let text = format!("{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n");
        let head = request(&text).unwrap();
        let buf = text.as_bytes();
        let string = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (
            head.authority.map(|a| string(a.of(buf))),
            string(head.path_and_query.of(buf)),
            string(head.path(buf)),
            head.is_asterisk(buf),
        )
    };
    let expect = |authority: Option<&str>, path_and_query: &str, path: &str, asterisk| {
        (authority.map(String::from), path_and_query.into(), path.into(), asterisk)
    };
    assert_eq!(parts("GET", "/a/b?c=/d?e"), expect(None, "/a/b?c=/d?e", "/a/b", false));
    assert_eq!(parts("GET", "//x"), expect(None, "//x", "//x", false));
    assert_eq!(parts("GET", "/http://x"), expect(None, "/http://x", "/http://x", false));
    assert_eq!(parts("GET", "http://h:1/a?b"), expect(Some("h:1"), "/a?b", "/a", false));
    assert_eq!(parts("GET", "HTTPS://[::1]"), expect(Some("[::1]"), "", "/", false));
    assert_eq!(parts("GET", "http://h?q"), expect(Some("h"), "?q", "/", false));
    assert_eq!(parts("OPTIONS", "*"), expect(None, "*", "*", true));
    assert_eq!(parts("OPTIONS", "http://h"), expect(Some("h"), "", "/", true));
    assert_eq!(parts("OPTIONS", "http://h/"), expect(Some("h"), "/", "/", false));
    for (method, target) in [
        ("GET", "*"),
        ("GET", "a"),
        ("GET", "h:1"),
        ("GET", "http:/a"),
        ("GET", "http:///a"),
        ("GET", "http://u@h/"),
        ("GET", "ftp://h/"),
        ("GET", "?q"),
        ("OPTIONS", "**"),
        ("CONNECT", "h:1"),
        ("CONNECT", "/"),
        ("GET", "/a#b"),
        ("GET", "/\u{e9}"),
    ] {
        let error = parse(method, target).expect_err(target);
        assert_eq!(error.rejection, Rejection::BadRequest);
    }
}

#[test]
fn impossible_starts_are_refused_at_once_and_by_name() {
    let start = |bytes: &[u8]| {
        let limits = HeadLimits::new(65536, b"");
        parse_request(bytes, &mut HeadScan::default(), &limits, &mut RequestHead::default())
            .map_err(|e| e.what)
    };
    for (bytes, says) in [
        (&b"\x16"[..], "TLS"),
        (b"\r\n\x16\x03", "TLS"),
        (b"PRI * HTTP/2.0", "HTTP/2"),
        (b"\x00", "not an HTTP request line"),
        (b" GET", "not an HTTP request line"),
        (b"GET\t", "not an HTTP request line"),
        (b"GET\r\n", "not an HTTP request line"),
        (b"{\"a\"", "not an HTTP request line"),
        (b"\n", "bare LF"),
        (b"\rG", "bare CR"),
        (b"\r\n\r\n\r\n\r\n\r\n", "empty lines"),
        (b"ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFG", "longer than 32"),
        (b"GET / HTTP/1.1\n", "bare LF"),
        (b"GET / HTTP/1.1\r\nA: b\n", "bare LF"),
    ] {
        let what = start(bytes).expect_err("must not wait for more");
        assert!(what.contains(says), "{what}: {}", bytes.escape_ascii());
    }
    for bytes in [
        &b""[..],
        b"\r",
        b"\r\n\r\n\r\n\r\n",
        b"P",
        b"PRI * HTTP/2.",
        b"PRI * HTTP/1.1",
        b"PRINT /",
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEF",
        b"GET / HTTP/1.1\r\n\r",
    ] {
        assert_eq!(start(bytes), Ok(Parse::Partial), "{}", bytes.escape_ascii());
    }
    let limits = HeadLimits::new(65536, b"");
    for (bytes, refused) in [(&b"HTTP/1"[..], false), (b"HTTP/2", true), (b"\r\n", true), (b"ICY 200", true)]
    {
        let parsed = parse_response(
            bytes,
            &mut HeadScan::default(),
            &limits,
            Method::Get,
            &mut ResponseHead::default(),
        );
        assert_eq!(parsed.is_err(), refused, "{}", bytes.escape_ascii());
    }
}

#[test]
fn a_large_head_byte_by_byte_is_searched_once() {
    // 64 KiB in 65,536 calls: searched anew each time this would look at 2 GiB and take many seconds in a debug build.
    let limits = HeadLimits::new(65536, b"");
    let mut text = b"GET / HTTP/1.1\r\nHost: a\r\nX: ".to_vec();
    text.resize(65536 - 4, b'x');
    text.extend_from_slice(b"\r\n\r\n");
    let (mut scan, mut head) = (HeadScan::default(), RequestHead::default());
    for end in 1..text.len() {
        assert_eq!(parse_request(&text[..end], &mut scan, &limits, &mut head), Ok(Parse::Partial));
    }
    assert_eq!(parse_request(&text, &mut scan, &limits, &mut head), Ok(Parse::Complete));
}

#[test]
fn obs_text_values_and_repeats_stay() {
    let bytes = b"GET / HTTP/1.1\r\nHost: a\r\nX: \xff\x80\xe9\r\nX: 2\r\nX: \xff\x80\xe9\r\n\r\n";
    let limits = HeadLimits::new(65536, b"");
    let mut head = RequestHead::default();
    assert_eq!(parse_request(bytes, &mut HeadScan::default(), &limits, &mut head), Ok(Parse::Complete));
    let values: Vec<&[u8]> = head.fields()[1..].iter().map(|f| f.value.of(bytes)).collect();
    assert_eq!(values, [&b"\xff\x80\xe9"[..], b"2", b"\xff\x80\xe9"]);
}

#[test]
fn status_lines() {
    let parts = |text: &str| {
        let head = response(text, Method::Get).map_err(|e| e.what)?;
        Ok::<_, &str>((head.status, head.reason.of(text.as_bytes()).to_vec()))
    };
    assert_eq!(parts("HTTP/1.1 200 OK\r\n\r\n"), Ok((200, b"OK".to_vec())));
    assert_eq!(parts("HTTP/1.1 200 Not so  bad\r\n\r\n"), Ok((200, b"Not so  bad".to_vec())));
    assert_eq!(parts("HTTP/1.0 299 \r\nA: b\r\n\r\n"), Ok((299, b"".to_vec())));
    assert_eq!(parts("HTTP/1.1 404\r\n\r\n"), Ok((404, b"".to_vec())));
    assert_eq!(parts("HTTP/1.1 500 Ori\u{eb}n\r\n\r\n"), Ok((500, "Ori\u{eb}n".into())));
    for wrong in [
        "HTTP/1.1 99 x\r\n\r\n",
        "HTTP/1.1 099 x\r\n\r\n",
        "HTTP/1.1 101 x\r\n\r\n",
        "HTTP/1.1 2000 x\r\n\r\n",
        "HTTP/1.1 20x x\r\n\r\n",
        "HTTP/1.1  200 x\r\n\r\n",
        "HTTP/1.2 200 x\r\n\r\n",
        "HTTP/1.1 200 x\0\r\n\r\n",
        "HTTP/1.1 200 x\ry\r\n\r\n",
    ] {
        assert!(parts(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn event_streams_are_told_by_their_media_type() {
    for (value, is) in [
        ("text/event-stream", true),
        ("Text/Event-Stream; charset=utf-8", true),
        ("text/event-stream ;x", true),
        ("text/event-streams", false),
        ("application/json; text/event-stream", false),
        ("", false),
    ] {
        let head =
            response(&format!("HTTP/1.1 200 OK\r\nContent-Type: {value}\r\n\r\n"), Method::Get).unwrap();
        assert_eq!(head.is_event_stream, is, "{value:?}");
    }
}

#[test]
fn refusals_say_what_is_wrong() {
    for (line, says) in [
        ("Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", "beside"),
        ("Content-Length: 1\r\nContent-Length: 1\r\n", "more than one Content-Length"),
        ("Content-Length: 1,1\r\n", "decimal digits"),
        ("Content-Length: 99999999999999999999\r\n", "2^64"),
        ("Transfer-Encoding: gzip\r\n", "exactly `chunked`"),
        ("A : b\r\n", "space before the colon"),
        (" A: b\r\n", "space before the colon"),
        ("A: b\r\n c\r\n", "folded"),
        ("A: \x01\r\n", "control byte"),
        ("Host: b\r\n", "more than one Host"),
    ] {
        let what = refusal(&format!("POST / HTTP/1.1\r\nHost: a\r\n{line}\r\n"));
        assert!(what.contains(says), "{line:?}: {what}");
    }
    assert!(refusal("GET / HTTP/1.1\r\n\r\n").contains("missing Host"));
    assert!(refusal("GET / HTTP/3\r\nHost: a\r\n\r\n").contains("version"));
    assert!(request("GET / HTTP/1.1\r\nHost:\r\n\r\n").unwrap().host.unwrap().is_empty());
    assert!(request("GET / HTTP/1.0\r\n\r\n").unwrap().host.is_none());
}
