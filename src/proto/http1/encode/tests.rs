use super::*;
use crate::proto::http1::{HeadLimits, HeadScan, Method, parse_request, parse_response};

fn request(text: &str, rewrite: &RequestRewrite<'_>) -> String {
    let mut head = RequestHead::default();
    let limits = HeadLimits::new(65536, b"X-Lifeboat-");
    parse_request(text.as_bytes(), &mut HeadScan::default(), &limits, &mut head).expect(text);
    let mut out = b"before".to_vec();
    encode_request(&mut out, &head, text.as_bytes(), rewrite);
    let out = String::from_utf8(out).unwrap();
    out.strip_prefix("before").expect("appended").to_string()
}

fn response(text: &str, method: Method, extra: &str, rewrite: &ResponseRewrite) -> String {
    let mut head = ResponseHead::default();
    let limits = HeadLimits::new(65536, b"X-Lifeboat-");
    parse_response(text.as_bytes(), &mut HeadScan::default(), &limits, method, &mut head).expect(text);
    let mut out = Vec::new();
    encode_response(&mut out, &head, text.as_bytes(), extra.as_bytes(), rewrite);
    String::from_utf8(out).unwrap()
}

const ENGINE: RequestRewrite<'static> = RequestRewrite {
    contract: Contract::OpenAi,
    base_path: b"",
    host: b"engine:8000",
    framing: Framing::None,
    credentials: Credentials::Keep,
    drop_router_own: false,
    extra_lines: b"",
};

#[test]
fn what_is_end_to_end_goes_on_byte_for_byte() {
    let text = "POST /v1/x?y=%20 HTTP/1.0\r\nACCEPT:   */* \r\nhost: router\r\ncookie: a\r\nConnection: close, X-Secret\r\n\
        X-Secret: 1\r\nCookie: b\r\nKeep-Alive: 5\r\nX-Lifeboat-Tier: t\r\nProxy-Authorization: x\r\nProxy: y\r\nTE: gzip\r\n\
        Trailer: z\r\nUpgrade: h2c\r\nContent-Length: 3\r\nExpect: 100-continue\r\nx-Secret: 2\r\nProxy-Status: s\r\ncookie: a\r\n\r\n";
    let rewrite = RequestRewrite { framing: Framing::Length(3), ..ENGINE };
    assert_eq!(
        request(text, &rewrite),
        "POST /v1/x?y=%20 HTTP/1.1\r\nHost: engine:8000\r\nACCEPT:   */* \r\ncookie: a\r\nCookie: b\r\nX-Lifeboat-Tier: t\r\nProxy: y\r\n\
        Proxy-Status: s\r\ncookie: a\r\nContent-Length: 3\r\n\r\n"
    );
}

#[test]
fn targets_become_origin_form_under_the_base_path() {
    let line = |method: &str, target: &str, base_path: &[u8]| {
        let text = format!("{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n");
        let out = request(&text, &RequestRewrite { base_path, ..ENGINE });
        out.split_once(" HTTP/1.1\r\nHost: engine:8000\r\n\r\n").expect("nothing else").0.to_string()
    };
    assert_eq!(line("GET", "/a?b", b""), "GET /a?b");
    assert_eq!(line("GET", "/a?b", b"/base"), "GET /base/a?b");
    assert_eq!(line("GET", "http://h/a?b", b"/base"), "GET /base/a?b");
    assert_eq!(line("GET", "http://h", b""), "GET /");
    assert_eq!(line("GET", "http://h?q", b"/base"), "GET /base/?q");
    assert_eq!(line("OPTIONS", "*", b"/base"), "OPTIONS *");
    assert_eq!(line("OPTIONS", "http://h", b"/base"), "OPTIONS *");
    assert_eq!(line("brew-Tea", "/", b""), "brew-Tea /");
}

#[test]
fn credentials_are_kept_stripped_or_replaced() {
    let text =
        "GET / HTTP/1.1\r\nHost: a\r\nauthorization: Bearer caller\r\nX: y\r\nX-Api-Key: caller\r\n\r\n";
    let with = |credentials| request(text, &RequestRewrite { credentials, ..ENGINE });
    let start = "GET / HTTP/1.1\r\nHost: engine:8000\r\n";
    assert_eq!(
        with(Credentials::Keep),
        format!("{start}authorization: Bearer caller\r\nX: y\r\nX-Api-Key: caller\r\n\r\n")
    );
    assert_eq!(with(Credentials::Strip), format!("{start}X: y\r\n\r\n"));
    let only = Credentials::Replace { authorization: Some(b"Bearer engine"), x_api_key: None };
    assert_eq!(with(only), format!("{start}X: y\r\nAuthorization: Bearer engine\r\n\r\n"));
    let both = Credentials::Replace { authorization: Some(b"Bearer e"), x_api_key: Some(b"e") };
    assert_eq!(with(both), format!("{start}X: y\r\nAuthorization: Bearer e\r\nx-api-key: e\r\n\r\n"));
}

#[test]
fn te_goes_on_only_as_trailers_alone() {
    let te = |lines: &str| {
        let out = request(&format!("GET / HTTP/1.1\r\nHost: a\r\n{lines}\r\n"), &ENGINE);
        out.strip_prefix("GET / HTTP/1.1\r\nHost: engine:8000\r\n").unwrap().to_string()
    };
    assert_eq!(te("Connection: TE\r\nte: Trailers\r\n"), "TE: trailers\r\nConnection: TE\r\n\r\n");
    assert_eq!(te("TE: trailers, gzip\r\n"), "\r\n");
    assert_eq!(te("TE: trailers\r\nTE: gzip\r\n"), "\r\n");
    assert_eq!(te("TE:\r\n"), "\r\n");
}

#[test]
fn own_lines_of_a_request() {
    let text = "POST / HTTP/1.1\r\nHost: a\r\nX-Lifeboat-Tier: t\r\nTransfer-Encoding: chunked\r\n\r\n";
    let rewrite = RequestRewrite {
        framing: Framing::Chunked,
        drop_router_own: true,
        extra_lines: b"X-Request-Id: 7\r\n",
        ..ENGINE
    };
    assert_eq!(
        request(text, &rewrite),
        "POST / HTTP/1.1\r\nHost: engine:8000\r\nTransfer-Encoding: chunked\r\nX-Request-Id: 7\r\n\r\n"
    );
    // A collected body is sent with its length, whatever the client used.
    let rewrite = RequestRewrite { framing: Framing::Length(u64::MAX), ..ENGINE };
    let out = request(text, &rewrite);
    assert!(
        out.contains("\r\nContent-Length: 18446744073709551615\r\n") && !out.contains("chunked"),
        "{out}"
    );
}

#[test]
fn a_response_keeps_its_own_and_gets_ours() {
    let text = "HTTP/1.0 418 I'm a  teapot\r\nSERVER: e\r\nX-Lifeboat-Server: spoof\r\nSet-Cookie: a\r\nConnection: keep-alive, X-Hop\r\n\
        X-Hop: 1\r\nset-cookie: b\r\nKeep-Alive: timeout=5\r\nContent-Length: 3\r\n\r\n";
    let rewrite = ResponseRewrite {
        framing: Framing::Length(3),
        keep_alive: true,
        client_minor: 1,
        ..Default::default()
    };
    assert_eq!(
        response(text, Method::Get, "X-Lifeboat-Server: gpu0\r\n", &rewrite),
        "HTTP/1.1 418 I'm a  teapot\r\nSERVER: e\r\nSet-Cookie: a\r\nset-cookie: b\r\nContent-Length: 3\r\n\
        X-Lifeboat-Server: gpu0\r\n\r\n"
    );
}

#[test]
fn connection_is_said_where_the_client_must_hear_it() {
    let text = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    let with = |keep_alive, client_minor| {
        let rewrite =
            ResponseRewrite { framing: Framing::Length(0), keep_alive, client_minor, ..Default::default() };
        let out = response(text, Method::Get, "", &rewrite);
        out.strip_prefix("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n").unwrap().to_string()
    };
    assert_eq!(with(true, 1), "\r\n");
    assert_eq!(with(false, 1), "Connection: close\r\n\r\n");
    assert_eq!(with(true, 0), "Connection: keep-alive\r\n\r\n");
    assert_eq!(with(false, 0), "Connection: close\r\n\r\n");
    // An interim response says nothing about the connection.
    let rewrite =
        ResponseRewrite { framing: Framing::None, keep_alive: false, client_minor: 1, ..Default::default() };
    let interim = "HTTP/1.1 103 Early Hints\r\nLink: a\r\nContent-Length: 4\r\n\r\n";
    assert_eq!(response(interim, Method::Get, "", &rewrite), "HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n");
}

#[test]
fn a_length_without_a_body_stays_only_where_it_describes_one() {
    let rewrite =
        ResponseRewrite { framing: Framing::None, keep_alive: true, client_minor: 1, ..Default::default() };
    let lines = |status: u16, method| {
        let text = format!("HTTP/1.1 {status} x\r\nContent-Length: 9\r\nA: b\r\n\r\n");
        let out = response(&text, method, "", &rewrite);
        out.strip_prefix(&format!("HTTP/1.1 {status} x\r\n")).unwrap().to_string()
    };
    assert_eq!(lines(200, Method::Head), "Content-Length: 9\r\nA: b\r\n\r\n");
    assert_eq!(lines(304, Method::Get), "Content-Length: 9\r\nA: b\r\n\r\n");
    assert_eq!(lines(204, Method::Get), "A: b\r\n\r\n");
    assert_eq!(lines(204, Method::Head), "A: b\r\n\r\n");
    let chunked =
        response("HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n", Method::Head, "", &rewrite);
    assert_eq!(chunked, "HTTP/1.1 200 x\r\n\r\n");
    let reasonless = response("HTTP/1.1 304\r\n\r\n", Method::Get, "", &rewrite);
    assert_eq!(reasonless, "HTTP/1.1 304 \r\n\r\n");
}

#[test]
fn chunk_headers_are_hexadecimal() {
    for len in [1, 9, 10, 15, 16, 255, 256, 4096, 65535, 1 << 20, usize::MAX] {
        let mut out = Vec::new();
        push_chunk_header(&mut out, len);
        assert_eq!(out, format!("{len:x}\r\n").into_bytes());
    }
}

#[test]
fn the_last_chunk_carries_trailers() {
    let mut out = Vec::new();
    push_last_chunk(&mut out, b"", b"X-Lifeboat-");
    assert_eq!(out, LAST_CHUNK);
    out.clear();
    push_last_chunk(&mut out, b"A: b\r\nx-lifeboat-server: spoof\r\nB: c\r\n", b"X-Lifeboat-");
    assert_eq!(out, b"0\r\nA: b\r\nB: c\r\n\r\n");
}

/// Every name of the Stargate rules' filter, in the contract's two directions.
const FILTERED: &str = "connection: close, x-model\r\nProxy-Connection: a\r\nkeep-alive: 5\r\nTE: trailers\r\ntrailer: t\r\nUpgrade: h2c\r\n\
    X-Routing-Method: pulsar\r\nx-stargate-retryable: true\r\nx-stargate-retry-reason: r\r\nX-Stargate-Retry-After-Ms: 1\r\n\
    x-stargate-expected-queue-ms: 9999\r\nx-stargate-error-code: z\r\n";

#[test]
fn a_trusted_callers_fields_go_on_but_for_the_listed_ones() {
    let kept = "Accept: a\r\ncontent-length: 3\r\nX-Model: m\r\nX-Lifeboat-Tier: t\r\nproxy-authorization: p\r\nx-input-tokens: 1\r\n\
        X-Model: second\r\nx-stargate-max-wait-ms: 5\r\nx-max-wait-ms: 6\r\nx-cache-affinity-key: k\r\nx-stargate-cluster-id: c\r\n\
        x-inference-server-id: s\r\nx-routing-key: r\r\nx-priority: 1\r\ntracestate: v=1\r\nx-request-id: i\r\n";
    let text = format!(
        "POST /v1/responses?trace=1 HTTP/1.1\r\nhost: a\r\n{FILTERED}{kept}traceparent: 00-x\r\nExpect: 100-continue\r\n\r\n"
    );
    let mut head = RequestHead::default();
    let limits = HeadLimits { nominations_void: true, ..HeadLimits::new(65536, b"") };
    parse_request(text.as_bytes(), &mut HeadScan::default(), &limits, &mut head).expect(&text);
    let written = |tracestate, framing| {
        let contract = Contract::Stargate { tracestate };
        let extra_lines = b"traceparent: 00-y\r\n";
        let rewrite = RequestRewrite { contract, framing, extra_lines, ..ENGINE };
        let mut out = Vec::new();
        encode_request(&mut out, &head, text.as_bytes(), &rewrite);
        String::from_utf8(out).unwrap()
    };
    let start = "POST /v1/responses?trace=1 HTTP/1.1\r\nHost: engine:8000\r\n";
    assert_eq!(
        written(true, Framing::Length(3)),
        format!("{start}{kept}traceparent: 00-y\r\n\r\n"),
        "all in order, the length in its place"
    );
    let less = kept.replace("tracestate: v=1\r\n", "");
    assert_eq!(written(false, Framing::Length(3)), format!("{start}{less}traceparent: 00-y\r\n\r\n"));
    let chunked = less.replace("content-length: 3\r\n", "");
    assert_eq!(
        written(false, Framing::Chunked),
        format!("{start}{chunked}Transfer-Encoding: chunked\r\ntraceparent: 00-y\r\n\r\n")
    );
}

#[test]
fn a_trusted_callers_answer_loses_what_routers_say_to_each_other() {
    let kept = "server: uvicorn\r\nContent-Length: 2\r\nx-lifeboat-a: b\r\nX-Model: m\r\nRetry-After: 7\r\ntracestate: v=1\r\n";
    let own = "x-inference-server-id: own\r\n";
    let text = format!(
        "HTTP/1.1 418 Short and stout\r\n{FILTERED}X-Inference-Server-Id: theirs\r\nx-inference-server-url: u\r\n{kept}\
        x-stargate-cluster-id: c\r\n\r\n"
    );
    let mut head = ResponseHead::default();
    let limits = HeadLimits { nominations_void: true, ..HeadLimits::new(65536, b"") };
    parse_response(text.as_bytes(), &mut HeadScan::default(), &limits, Method::Post, &mut head).expect(&text);
    let rewrite = ResponseRewrite {
        framing: Framing::Length(2),
        keep_alive: true,
        client_minor: 1,
        contract: Contract::Stargate { tracestate: true },
    };
    let mut out = Vec::new();
    encode_response(&mut out, &head, text.as_bytes(), own.as_bytes(), &rewrite);
    assert_eq!(String::from_utf8(out).unwrap(), format!("HTTP/1.1 418 Short and stout\r\n{kept}{own}\r\n"));
}

/// Who may not steer cannot: neither by the fields themselves, in any case and repeated, nor by nominating them.
#[test]
fn an_untrusted_callers_steering_stays_behind() {
    let steering = "x-model: m\r\nX-MODEL: n\r\nx-routing-key: r\r\nx-routing-method: pulsar\r\nX-Input-Tokens: 1\r\nx-priority: 0\r\n\
        x-max-wait-ms: 1\r\nx-request-slo-ms: 1\r\nx-cache-affinity-key: k\r\nx-stargate-max-wait-ms: 1\r\nx-stargate-cluster-id: c\r\n\
        x-stargate-retryable: true\r\nX-Stargate-Anything: a\r\nx-stargate-expected-queue-ms: 1\r\n";
    let kept = "x-request-id: i\r\nX-Multi-Turn-Session-Id: s\r\ntraceparent: t\r\ntracestate: u\r\nx-stainless-os: Linux\r\n";
    for connection in ["", "Connection: x-model\r\n"] {
        let text = format!("GET / HTTP/1.1\r\nHost: a\r\n{connection}{steering}{kept}\r\n");
        assert_eq!(request(&text, &ENGINE), format!("GET / HTTP/1.1\r\nHost: engine:8000\r\n{kept}\r\n"));
    }
}
