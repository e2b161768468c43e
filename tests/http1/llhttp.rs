//! Every llhttp fixture: its strict verdict is ours too, except where the table below says why not.
//!
//! How a fixture is run: message after message from one buffer, bodies passed through, until the input ends, the
//! connection would close, or something is refused. Two repairs keep a fixture about what it is about, since llhttp
//! checks neither: a missing Host is added, and a fragment in the target is cut off (both are refused, and that has its own
//! tests). A head that is refused by llhttp before its blank line is completed with one: our verdict comes then.

use ringway::proto::http1::{
    BodyReader, HeadLimits, HeadScan, Method, Parse, RequestHead, ResponseHead, parse_request, parse_response,
};

pub struct Fixture {
    /// `request` or `response`.
    kind: &'static str,
    file: String,
    line: u64,
    /// The mode ends in nothing (strict) or in a leniency.
    strict: bool,
    /// Messages that llhttp saw, or `None` where it refused.
    messages: Option<u64>,
    pub input: Vec<u8>,
}

pub fn fixtures() -> Vec<Fixture> {
    let mut all = Vec::new();
    for kind in ["request", "response"] {
        let path = format!("{}/tests/data/http1/llhttp/llhttp_{kind}.json", env!("CARGO_MANIFEST_DIR"));
        let list: Vec<serde_json::Value> =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        all.extend(list.iter().map(|item| {
            let mode = item["type"].as_str().unwrap();
            Fixture {
                kind,
                file: item["file"].as_str().unwrap().trim_end_matches(".md").into(),
                line: item["line"].as_u64().unwrap(),
                strict: mode == kind || mode == format!("{kind}-finish"),
                messages: (item["llhttp"] == "ok").then(|| item["messages"].as_u64().unwrap()),
                input: base64(item["b64"].as_str().unwrap()),
            }
        }));
    }
    assert_eq!(all.len(), 166 + 85);
    all
}

/// Messages seen, or what was refused.
type Verdict = Result<u64, &'static str>;

/// Where we decide otherwise: kind, file, line, our verdict (the start of its text), why.
const DIFFERENCES: &[(&str, &str, u64, Verdict, &str)] = &[
    // Bytes after a close.
    ("request", "connection", 84, Ok(1), AFTER_CLOSE),
    ("request", "connection", 297, Ok(1), AFTER_CLOSE),
    ("request", "connection", 347, Ok(1), AFTER_CLOSE),
    ("response", "connection", 167, Ok(1), AFTER_CLOSE),
    ("response", "connection", 230, Ok(1), AFTER_CLOSE),
    // Methods.
    ("request", "invalid", 69, Ok(1), ANY_METHOD),
    ("request", "invalid", 359, Ok(1), ANY_METHOD),
    ("request", "method", 30, Err("CONNECT"), NO_TUNNEL),
    ("request", "method", 65, Err("CONNECT"), NO_TUNNEL),
    ("request", "method", 99, Err("CONNECT"), NO_TUNNEL),
    ("request", "uri", 191, Err("CONNECT"), NO_TUNNEL),
    ("request", "method", 138, Err("target `*`"), "RFC 9112 section 3.2.4: `*` is for OPTIONS only"),
    (
        "request",
        "method",
        461,
        Err("target `*`"),
        "HTTP/2 without TLS is not offered; this is not even its preface",
    ),
    // Versions and protocols.
    ("request", "method", 375, Err("HTTP version"), HTTP_ONLY),
    ("request", "method", 405, Err("HTTP version"), HTTP_ONLY),
    ("request", "method", 433, Err("HTTP version"), HTTP_ONLY),
    ("request", "sample", 317, Err("malformed start line"), "HTTP/0.9 has no head to forward"),
    ("response", "sample", 43, Err("response does not begin"), HTTP_ONLY),
    ("response", "sample", 63, Err("response does not begin"), HTTP_ONLY),
    ("response", "sample", 648, Err("response does not begin"), HTTP_ONLY),
    // Targets.
    (
        "request",
        "uri",
        225,
        Err("malformed host"),
        "RFC 9110 section 4.2.4: user information in a target is an error",
    ),
    // Transfer codings.
    ("request", "transfer-encoding", 754, Err("Transfer-Encoding is not exactly"), ONE_CODING),
    ("request", "transfer-encoding", 796, Err("Transfer-Encoding is not exactly"), ONE_CODING),
    ("response", "transfer-encoding", 46, Err("Transfer-Encoding is not exactly"), ONE_CODING),
    ("response", "transfer-encoding", 77, Err("more than one Transfer-Encoding"), ONE_CODING),
    ("response", "transfer-encoding", 115, Err("Transfer-Encoding is not exactly"), ONE_CODING),
    // Upgrades.
    ("response", "connection", 296, Err("101"), NO_TUNNEL),
    ("response", "connection", 334, Err("101"), NO_TUNNEL),
    // Where a body is.
    ("request", "content-length", 447, Ok(0), DECLARED_BODY),
    ("response", "content-length", 126, Ok(0), DECLARED_BODY),
    // Bytes between responses.
    ("response", "connection", 495, Err("response does not begin"), BETWEEN_RESPONSES),
    ("response", "connection", 589, Err("response does not begin"), BETWEEN_RESPONSES),
    ("response", "pipelining", 7, Err("response does not begin"), BETWEEN_RESPONSES),
    ("response", "sample", 698, Err("response does not begin"), BETWEEN_RESPONSES),
    // Lenient modes that change nothing about what we read.
    ("request", "connection", 113, Ok(1), AFTER_CLOSE),
    ("request", "connection", 397, Ok(1), AFTER_CLOSE),
    ("response", "connection", 196, Ok(1), AFTER_CLOSE),
    ("response", "connection", 263, Ok(1), AFTER_CLOSE),
];

const AFTER_CLOSE: &str =
    "the message itself is whole; what follows a close is never read (RFC 9112 section 9.6)";
const ANY_METHOD: &str = "an unknown method is the engine's to judge (RFC 9110 section 9.1)";
const NO_TUNNEL: &str = "this router never tunnels";
const HTTP_ONLY: &str = "only HTTP/1.0 and HTTP/1.1";
const ONE_CODING: &str =
    "codings under or over chunked cannot be passed on by a proxy that frames anew; doubt is refused";
const DECLARED_BODY: &str =
    "the fixture skips bodies; here the next head's bytes are part of the declared one";
const BETWEEN_RESPONSES: &str =
    "nothing may stand before a status line: an engine that is out of step is not reused";

#[test]
fn fixtures_get_their_strict_verdict_or_a_stated_one() {
    let mut stated = vec![false; DIFFERENCES.len()];
    let mut followed = [0, 0];
    for f in fixtures() {
        let run = |input: &[u8]| if f.kind == "request" { requests(input) } else { responses(input) };
        let (mut ours, in_head) = run(&f.input);
        let refuses = f.messages.is_none() || !f.strict;
        if in_head && refuses && ours.is_ok() {
            (ours, _) = run(&[&f.input[..], b"\r\n\r\n"].concat());
        }
        let at = format!("{} {}.md:{}: {}", f.kind, f.file, f.line, f.input.escape_ascii());
        let difference = DIFFERENCES.iter().position(|d| (d.0, d.1, d.2) == (f.kind, &f.file, f.line));
        if let Some(i) = difference {
            stated[i] = true;
            match (ours, DIFFERENCES[i].3) {
                (Ok(ours), Ok(expected)) => assert_eq!(ours, expected, "{at}"),
                (Err(ours), Err(expected)) => assert!(ours.starts_with(expected), "{ours}: {at}"),
                (ours, expected) => panic!("{ours:?}, stated {expected:?}: {at}"),
            }
            let same = ours.ok() == f.messages;
            assert!(!same || !f.strict, "no difference any more: {at}");
        } else if f.strict {
            assert_eq!(ours.ok(), f.messages, "{ours:?}: {at}");
            followed[ours.is_err() as usize] += 1;
        } else {
            // We have no lenient modes: what needs one is refused.
            assert!(ours.is_err(), "{ours:?} in a lenient mode: {at}");
        }
    }
    for (i, used) in stated.iter().enumerate() {
        assert!(used, "{:?} is no fixture", DIFFERENCES[i]);
    }
    assert!(followed[0] > 100 && followed[1] > 50, "{followed:?} accepted and refused alike");
}

/// Our verdict, and whether the input ended within a head.
fn requests(input: &[u8]) -> (Verdict, bool) {
    let mut input = input.to_vec();
    let limits = HeadLimits::new(65536, b"X-Lifeboat-");
    let (mut at, mut messages) = (0, 0);
    loop {
        let mut head = RequestHead::default();
        match parse_request(&input[at..], &mut HeadScan::default(), &limits, &mut head) {
            Ok(Parse::Partial) => return (Ok(messages), true),
            Ok(Parse::Complete) => {}
            Err(e) if e.what.starts_with("missing Host") => {
                let line =
                    input[at..].windows(10).position(|w| w.starts_with(b" HTTP/1.1\r")).unwrap() + at + 11;
                input.splice(line..line, *b"Host: a\r\n");
                continue;
            }
            Err(e) if e.what.starts_with("request target holds") && input[at..].contains(&b'#') => {
                let from = at + input[at..].iter().position(|&b| b == b'#').unwrap();
                let to = from + input[from..].iter().position(|&b| b == b' ').unwrap();
                input.drain(from..to);
                continue;
            }
            Err(e) => return (Err(e.what), true),
        }
        at += head.head_len;
        match pass_body(head.framing, &input[at..]) {
            Err(what) => return (Err(what), false),
            Ok((consumed, true)) => at += consumed,
            Ok((_, false)) => return (Ok(messages), false),
        }
        messages += 1;
        if !head.keep_alive {
            return (Ok(messages), false);
        }
    }
}

fn responses(input: &[u8]) -> (Verdict, bool) {
    let limits = HeadLimits::new(65536, b"X-Lifeboat-");
    let (mut at, mut messages) = (0, 0);
    loop {
        let mut head = ResponseHead::default();
        match parse_response(&input[at..], &mut HeadScan::default(), &limits, Method::Get, &mut head) {
            Ok(Parse::Partial) => return (Ok(messages), true),
            Ok(Parse::Complete) => at += head.head_len,
            Err(e) => return (Err(e.what), true),
        }
        match pass_body(head.framing, &input[at..]) {
            Err(what) => return (Err(what), false),
            Ok((consumed, true)) => at += consumed,
            Ok((_, false)) => return (Ok(messages), false),
        }
        messages += 1;
        if !head.keep_alive {
            return (Ok(messages), false);
        }
    }
}

fn pass_body(framing: ringway::proto::http1::Framing, input: &[u8]) -> Result<(usize, bool), &'static str> {
    let advance = BodyReader::new(framing).advance(input).map_err(|e| e.what)?;
    Ok((advance.consumed, advance.done))
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |c| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{c:?} is not base64"),
    };
    let mut out = Vec::new();
    for quad in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = quad.iter().fold(0u32, |bits, &c| bits << 6 | digit(c) as u32) << (6 * (4 - quad.len()));
        out.extend_from_slice(&bits.to_be_bytes()[1..quad.len()]);
    }
    out
}
