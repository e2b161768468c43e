//! The HTTP/1.1 core against bytes nobody here wrote, naive models, every split, and the mistakes others have made.

#[path = "../fuzz/invariants.rs"]
mod invariants;
#[path = "http1/llhttp.rs"]
mod llhttp;

use invariants::{advance_in_steps, decode_in_steps, request_in_steps, response_in_steps};
use proptest::prelude::*;
use ringway::proto::error::Rejection;
use ringway::proto::http1::{
    BodyReader, Framing, HeadError, HeadLimits, HeadScan, Method, Parse, RequestHead, ResponseHead,
    ResponseRewrite, downstream_framing, encode_response, parse_request, parse_response, push_chunk_header,
};

/// Requests that some parsers read in two ways. Each is refused, and with the status that closes the connection.
const SMUGGLING: &[(&str, &[u8])] = &[
    (
        "length and chunked",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
    ),
    (
        "chunked and length",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
    ),
    ("differing lengths", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n"),
    ("equal lengths", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\n"),
    ("list of lengths", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\n"),
    ("signed length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\n"),
    ("negative length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"),
    ("hexadecimal length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\n"),
    ("length with underscore", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1_0\r\n\r\n"),
    ("split length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4 2\r\n\r\n"),
    ("overflowing length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551616\r\n\r\n"),
    ("empty length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n"),
    ("space before colon", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 4\r\n\r\n"),
    ("tab before colon", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\t: chunked\r\n\r\n"),
    ("folded coding", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n"),
    ("space before first field", b"POST / HTTP/1.1\r\n Host: a\r\nContent-Length: 4\r\n\r\n"),
    ("bare LF after field", b"POST / HTTP/1.1\r\nHost: a\nTransfer-Encoding: chunked\r\n\r\n"),
    ("bare LF after request line", b"POST / HTTP/1.1\nHost: a\r\n\r\n"),
    ("bare LF as blank line", b"POST / HTTP/1.1\r\nHost: a\r\n\n"),
    ("bare CR in value", b"POST / HTTP/1.1\r\nHost: a\r\nX: 1\rTransfer-Encoding: chunked\r\n\r\n"),
    ("two CR", b"POST / HTTP/1.1\r\nHost: a\r\nX: 1\r\r\n\r\n"),
    ("NUL in value", b"POST / HTTP/1.1\r\nHost: a\r\nX: 1\x002\r\n\r\n"),
    ("control in value", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n"),
    ("DEL in value", b"POST / HTTP/1.1\r\nHost: a\r\nX: \x7f\r\n\r\n"),
    ("chunked not last", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n"),
    ("chunked behind another", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"),
    ("chunked twice", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n"),
    (
        "two codings",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n",
    ),
    ("identity", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n"),
    ("almost chunked", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n"),
    ("quoted chunked", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \"chunked\"\r\n\r\n"),
    ("empty coding", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n\r\n"),
    ("coding in 1.0", b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ("two hosts", b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    ("no host", b"POST / HTTP/1.1\r\n\r\n"),
    ("host with path", b"POST / HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    ("host with user", b"POST / HTTP/1.1\r\nHost: a@b\r\n\r\n"),
    ("two words of target", b"POST / x HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("two spaces", b"POST  / HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("tab in request line", b"POST\t/ HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("space after version", b"POST / HTTP/1.1 \r\nHost: a\r\n\r\n"),
    ("obs-text in target", b"POST /\xff HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("fragment in target", b"POST /a#b HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("version 1.2", b"POST / HTTP/1.2\r\nHost: a\r\n\r\n"),
    ("version 2.0", b"POST / HTTP/2.0\r\nHost: a\r\n\r\n"),
    ("version 0.9", b"GET /\r\n\r\n"),
    ("lower-case version", b"POST / http/1.1\r\nHost: a\r\n\r\n"),
    ("header without colon", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\r\n\r\n"),
    ("header without name", b"POST / HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n"),
    ("CONNECT", b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n"),
];

/// Chunked bodies that some decoders read in two ways.
const BAD_CHUNKS: &[(&str, &[u8])] = &[
    ("no size", b"\r\nabc\r\n0\r\n\r\n"),
    ("prefix 0x", b"0x3\r\nabc\r\n0\r\n\r\n"),
    ("sign", b"+3\r\nabc\r\n0\r\n\r\n"),
    ("negative", b"-3\r\nabc\r\n0\r\n\r\n"),
    ("space before size", b" 3\r\nabc\r\n0\r\n\r\n"),
    ("space after size", b"3 \r\nabc\r\n0\r\n\r\n"),
    ("overflow", b"10000000000000000\r\nabc\r\n0\r\n\r\n"),
    ("bare LF after size", b"3\nabc\r\n0\r\n\r\n"),
    ("bare CR after size", b"3\rabc\r\n0\r\n\r\n"),
    ("bare LF after data", b"3\r\nabc\n0\r\n\r\n"),
    ("data too long", b"3\r\nabcd\r\n0\r\n\r\n"),
    ("bare LF in extension", b"3;a\nabc\r\n0\r\n\r\n"),
    ("CR in extension", b"3;a\rb\r\nabc\r\n0\r\n\r\n"),
    ("NUL in extension", b"3;a\0\r\nabc\r\n0\r\n\r\n"),
    ("line end in quoted extension", b"3;a=\"\r\nabc\r\n0\r\n\r\n"),
    ("empty extension", b"3;\r\nabc\r\n0\r\n\r\n"),
    ("bare LF at the end", b"0\r\n\n"),
    ("CR CR at the end", b"0\r\n\r\r\n"),
    ("folded trailer", b"0\r\nA: b\r\n c\r\n\r\n"),
    ("trailer without colon", b"0\r\nAb\r\n\r\n"),
    ("trailer with space before colon", b"0\r\nA : b\r\n\r\n"),
    ("control in trailer", b"0\r\nA: \x01\r\n\r\n"),
    ("bare LF in trailer", b"0\r\nA: b\nB: c\r\n\r\n"),
];

#[test]
fn smuggling_inputs_are_refused() {
    for (name, input) in SMUGGLING {
        let verdict = request_in_steps(input, input.len());
        let refused = matches!(verdict, Err(HeadError { rejection: Rejection::BadRequest, .. }));
        assert!(refused, "{name}: {verdict:?}");
    }
}

#[test]
fn the_same_head_without_the_trick_is_accepted() {
    // Guards the list above against being refused for another reason than its name says.
    for ok in [
        &b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"[..],
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX: 1\r\n\r\n",
        b"POST / HTTP/1.0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: a:80\r\n\r\n",
    ] {
        assert!(matches!(request_in_steps(ok, ok.len()), Ok(Some(_))), "{}", ok.escape_ascii());
    }
}

#[test]
fn malformed_chunks_are_refused() {
    for (name, input) in BAD_CHUNKS {
        let outcome = decode_in_steps(input, input.len());
        assert!(outcome.end.is_err(), "{name}: {outcome:?}");
        assert!(advance_in_steps(input, input.len()).is_err(), "{name}");
    }
}

/// Two-way splits at every byte, and byte by byte, against the whole.
fn every_split(input: &[u8]) {
    let limits = invariants::limits();
    let request = request_in_steps(input, input.len().max(1));
    let response = response_in_steps(input, input.len().max(1), Method::Get);
    for cut in 0..=input.len() {
        let mut scan = HeadScan::default();
        let mut head = RequestHead::default();
        let mut verdict = parse_request(&input[..cut], &mut scan, &limits, &mut head);
        if verdict == Ok(Parse::Partial) {
            verdict = parse_request(input, &mut scan, &limits, &mut head);
        }
        let split = verdict.map(|parse| (parse == Parse::Complete).then_some(head));
        assert_eq!(split, request, "cut at {cut}: {}", input.escape_ascii());

        let mut scan = HeadScan::default();
        let mut head = ResponseHead::default();
        let mut verdict = parse_response(&input[..cut], &mut scan, &limits, Method::Get, &mut head);
        if verdict == Ok(Parse::Partial) {
            verdict = parse_response(input, &mut scan, &limits, Method::Get, &mut head);
        }
        let split = verdict.map(|parse| (parse == Parse::Complete).then_some(head));
        assert_eq!(split, response, "cut at {cut}: {}", input.escape_ascii());
    }
    invariants::head(input);
}

#[test]
fn every_split_of_every_known_input_gives_the_same() {
    for fixture in llhttp::fixtures() {
        every_split(&fixture.input);
    }
    for (_, input) in SMUGGLING {
        every_split(input);
    }
}

#[test]
fn every_split_of_a_chunked_body_gives_the_same() {
    let good: &[u8] = b"5;a=\"x;\\\"y\";b\r\nhello\r\n1\r\n!\r\n000\r\nA: b\r\nContent-Length: 3\r\nX-Lifeboat-Q: 1\r\n\r\nGET";
    for input in BAD_CHUNKS.iter().map(|(_, input)| *input).chain([good]) {
        invariants::chunked(input);
        let whole = decode_in_steps(input, input.len());
        for step in 1..input.len() {
            assert_eq!(decode_in_steps(input, step), whole, "{}", input.escape_ascii());
        }
    }
    let outcome = decode_in_steps(good, good.len());
    assert_eq!((outcome.end, outcome.data), (Ok(true), b"hello!".to_vec()));
    assert_eq!(outcome.consumed, good.len() - 3, "the next request is not touched");
    assert_eq!(outcome.trailers, b"A: b\r\nX-Lifeboat-Q: 1\r\n");
    let (passed, _, done) = advance_in_steps(good, 3).unwrap();
    assert!(done && passed.ends_with(b"000\r\nA: b\r\n\r\n"), "{}", passed.escape_ascii());
}

/// The corpora of the fuzz targets, replayed.
#[test]
fn fuzz_corpus() {
    for (target, check) in
        [("head", invariants::head as fn(&[u8])), ("chunked", invariants::chunked as fn(&[u8]))]
    {
        let dir = format!("{}/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 10, "corpus of {target} is missing: {dir}");
        for file in files {
            let data = std::fs::read(&file).unwrap();
            std::panic::catch_unwind(|| check(&data)).unwrap_or_else(|_| panic!("{}", file.display()));
        }
    }
}

/// A chunked decoder that sees the whole input at once: `None` unfinished, else data and bytes used.
fn naive_chunks(input: &[u8]) -> Result<Option<(Vec<u8>, usize)>, ()> {
    let (mut at, mut data) = (0, Vec::new());
    loop {
        let Some(line_len) = input[at..].windows(2).position(|w| w == b"\r\n") else {
            // An unfinished size line: digits, then perhaps a CR.
            let digits = input[at..].iter().take_while(|b| b.is_ascii_hexdigit()).count();
            let rest = &input[at + digits..];
            let unfinished = rest.is_empty() || (digits > 0 && rest == b"\r");
            return if unfinished && digits <= 16 { Ok(None) } else { Err(()) };
        };
        let line = std::str::from_utf8(&input[at..at + line_len]).map_err(|_| ())?;
        if line.is_empty() || !line.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(());
        }
        let size = u64::from_str_radix(line, 16).map_err(|_| ())?;
        at += line_len + 2;
        if size == 0 {
            let rest = &input[at..];
            return match rest {
                [b'\r', b'\n', ..] => Ok(Some((data, at + 2))),
                [b'\r'] | [] => Ok(None),
                _ => Err(()),
            };
        }
        let rest = &input[at..];
        if size >= rest.len() as u64 {
            return Ok(None);
        }
        let size = size as usize;
        match &rest[size..] {
            [b'\r', b'\n', ..] => {}
            [b'\r'] => return Ok(None),
            _ => return Err(()),
        }
        data.extend_from_slice(&rest[..size]);
        at += size + 2;
    }
}

/// Chunk framing without extensions or trailers, mostly right.
fn chunk_input() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        6 => proptest::collection::vec(any::<u8>(), 1..20).prop_map(|data| {
            let mut out = Vec::new();
            push_chunk_header(&mut out, data.len());
            out.extend_from_slice(&data);
            out.extend_from_slice(b"\r\n");
            out
        }),
        1 => proptest::sample::select(vec![&b"0\r\n\r\n"[..], b"00\r\n\r\n", b"1\r\n", b"\r", b"\n", b"f", b"fffffffffffffffff\r\n"])
            .prop_map(<[u8]>::to_vec),
    ];
    (proptest::collection::vec(piece, 0..6), any::<bool>()).prop_map(|(pieces, end)| {
        let mut all = pieces.concat();
        if end {
            all.extend_from_slice(b"0\r\n\r\n");
        }
        all
    })
}

/// Where in `buf` name and value of each field are (an empty value is nowhere in particular).
fn places<'a>(
    buf: &[u8],
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
) -> Vec<[Option<std::ops::Range<usize>>; 2]> {
    let place = |part: &[u8]| {
        let start = part.as_ptr().addr().wrapping_sub(buf.as_ptr().addr());
        (!part.is_empty()).then_some(start..start + part.len())
    };
    fields.map(|(name, value)| [place(name), place(value)]).collect()
}

/// What our parser accepts, `httparse`, which is more lenient, accepts too, and it sees the same parts. Returns whether it
/// was a request, a response.
fn agrees_with_httparse(input: &[u8]) -> (bool, bool) {
    let mut lines = [httparse::EMPTY_HEADER; ringway::limits::HEADERS_MAX];
    let request = request_in_steps(input, input.len().max(1)).ok().flatten();
    if let Some(head) = &request {
        let mut theirs = httparse::Request::new(&mut lines);
        let end = theirs.parse(input).expect("what we accept is accepted");
        assert_eq!(end, httparse::Status::Complete(head.head_len));
        assert_eq!(theirs.method.map(str::as_bytes), Some(head.method_span.of(input)));
        assert_eq!(theirs.path.map(str::as_bytes), Some(head.target.of(input)));
        assert_eq!(theirs.version, Some(head.minor));
        let ours = head.fields().iter().map(|f| (f.name.of(input), f.value.of(input)));
        let theirs = theirs.headers.iter().map(|f| (f.name.as_bytes(), f.value));
        assert_eq!(places(input, ours), places(input, theirs), "{}", input.escape_ascii());
    }
    let response = response_in_steps(input, input.len().max(1), Method::Get).ok().flatten();
    if let Some(head) = &response {
        let mut theirs = httparse::Response::new(&mut lines);
        let end = theirs.parse(input).expect("what we accept is accepted");
        assert_eq!(end, httparse::Status::Complete(head.head_len));
        assert_eq!((theirs.code, theirs.version), (Some(head.status), Some(head.minor)));
        // It keeps a reason with obs-text to itself.
        let reason = head.reason.of(input);
        assert_eq!(theirs.reason.map(str::as_bytes), Some(if reason.is_ascii() { reason } else { b"" }));
        let ours = head.fields().iter().map(|f| (f.name.of(input), f.value.of(input)));
        let theirs = theirs.headers.iter().map(|f| (f.name.as_bytes(), f.value));
        assert_eq!(places(input, ours), places(input, theirs), "{}", input.escape_ascii());
    }
    (request.is_some(), response.is_some())
}

#[test]
fn known_inputs_are_split_as_httparse_splits_them() {
    let (mut requests, mut responses) = (0, 0);
    let fixtures = llhttp::fixtures();
    let corpus = std::fs::read_dir(format!("{}/fuzz/corpus/head", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let corpus: Vec<_> = corpus.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    let smuggling = SMUGGLING.iter().map(|(_, input)| *input);
    for input in fixtures.iter().map(|f| &f.input[..]).chain(smuggling).chain(corpus.iter().map(|c| &c[..])) {
        let (request, response) = agrees_with_httparse(input);
        requests += usize::from(request);
        responses += usize::from(response);
        // Each byte in turn replaced by what ends, splits or spoils a line.
        let mut changed = input[..input.len().min(300)].to_vec();
        for i in 0..changed.len() {
            for b in [b'\r', b'\n', b' ', b'\t', b':', 0, 0x7f, 0x80] {
                let was = std::mem::replace(&mut changed[i], b);
                agrees_with_httparse(&changed);
                changed[i] = was;
            }
        }
    }
    assert!(
        requests > 10 && responses > 10,
        "{requests} requests, {responses} responses: nothing was compared"
    );
}

/// A request head of valid parts: method, target, fields. Names are drawn from those that mean something.
fn request_input() -> impl Strategy<Value = Vec<u8>> {
    let name = proptest::sample::select(vec![
        "Accept",
        "accept",
        "X-Lifeboat-Tier",
        "Connection",
        "Content-Type",
        "TE",
        "Trailer",
        "Upgrade",
        "Keep-Alive",
        "Proxy-Authorization",
        "Proxy-Status",
        "Authorization",
        "x-api-key",
        "Content-Encoding",
        "Cookie",
        "Cookie",
        "Content-Length",
        "Transfer-Encoding",
        "Expect",
        "X-A",
    ]);
    let value = prop_oneof![
        proptest::sample::select(vec![
            "",
            "chunked",
            "close",
            "keep-alive, X-A",
            "cookie",
            "te, trailers",
            "trailers",
            "100-continue",
            "17",
            "0",
            "host, content-length, transfer-encoding",
            "application/json; charset=utf-8",
        ])
        .prop_map(|v| v.as_bytes().to_vec()),
        proptest::collection::vec(prop_oneof![b' '..=0x7e, Just(b'\t'), 0x80..=0xffu8], 0..30),
    ];
    let line = (name, value).prop_map(|(name, value)| [name.as_bytes(), b": ", &value, b"\r\n"].concat());
    let target = proptest::sample::select(vec![
        "/",
        "/v1/chat/completions?a=b",
        "http://h:1",
        "http://h?q",
        "HTTPS://h/x",
        "*",
        "/%00//../x",
        "h:1",
    ]);
    let method = proptest::sample::select(vec!["GET", "POST", "HEAD", "OPTIONS", "BREW", "CONNECT"]);
    let empty_lines = 0..3usize;
    (empty_lines, method, target, 0..2u8, proptest::collection::vec(line, 0..8)).prop_map(
        |(empty, method, target, minor, lines)| {
            let start = format!("{}{method} {target} HTTP/1.{minor}\r\nHost: a\r\n", "\r\n".repeat(empty));
            [start.as_bytes(), &lines.concat(), b"\r\n"].concat()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chunks_decode_as_the_naive_model_says(input in chunk_input()) {
        let ours = decode_in_steps(&input, input.len().max(1));
        match naive_chunks(&input) {
            Ok(Some((data, used))) => {
                prop_assert_eq!(ours.end, Ok(true));
                prop_assert_eq!((ours.data, ours.consumed), (data, used));
            }
            Ok(None) => prop_assert_eq!(ours.end, Ok(false)),
            // The first byte of a trailer looks like one until its line is complete: the model has no trailers.
            Err(()) => prop_assert!(ours.end != Ok(true) || !ours.trailers.is_empty()),
        }
        invariants::chunked(&input);
    }

    #[test]
    fn any_bytes_keep_the_invariants(input in proptest::collection::vec(any::<u8>(), 0..200)) {
        invariants::head(&input);
        invariants::chunked(&input);
    }

    #[test]
    fn requests_split_and_round_trip(
        mut input in request_input(),
        change in proptest::option::weighted(0.3, (any::<prop::sample::Index>(), any::<u8>())),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        if let Some((at, byte)) = change {
            let at = at.index(input.len());
            input[at] = byte;
        }
        invariants::head(&input);
        let whole = request_in_steps(&input, input.len());
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(input.len() + 1)).collect();
        ends.sort();
        ends.push(input.len());
        let (mut scan, mut head, limits) = (HeadScan::default(), RequestHead::default(), invariants::limits());
        let mut verdict = Ok(Parse::Partial);
        for end in ends {
            if verdict == Ok(Parse::Partial) {
                verdict = parse_request(&input[..end], &mut scan, &limits, &mut head);
            }
        }
        prop_assert_eq!(verdict.map(|parse| (parse == Parse::Complete).then_some(head)), whole);
        agrees_with_httparse(&input);
    }

    #[test]
    fn responses_split_and_round_trip(input in request_input(), status in 100..600u16) {
        let lf = input.windows(2).position(|w| w == b"H").unwrap_or(0);
        let fields = &input[input[lf..].windows(7).position(|w| w == b"Host: a").unwrap()..];
        let response = [format!("HTTP/1.1 {status} Some reason\r\n").as_bytes(), fields].concat();
        invariants::head(&response);
        agrees_with_httparse(&response);
    }
}

/// CVE-2025-4366: a request body left unread was taken for the next request. The reader says where a body ends and never
/// calls it complete before; whoever reuses a connection must ask.
#[test]
fn a_body_is_not_complete_before_its_last_byte() {
    let input: &[u8] =
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 35\r\n\r\nGET /admin HTTP/1.1\r\nHost: evil\r\n\r\n\
        GET /next HTTP/1.1\r\nHost: a\r\n\r\n";
    let head = request_in_steps(input, input.len()).unwrap().unwrap();
    let body = &input[head.head_len..];
    for cut in 0..35 {
        let mut reader = BodyReader::new(head.framing);
        let first = reader.advance(&body[..cut]).unwrap();
        assert!(!first.done && !reader.is_done() && !reader.may_end(), "cut at {cut}");
        assert_eq!(reader.remaining(), Some(35 - cut as u64));
        let second = reader.advance(&body[cut..]).unwrap();
        assert!(second.done);
        assert!(body[cut + second.consumed..].starts_with(b"GET /next"));
    }
    let mut chunked = BodyReader::new(Framing::Chunked);
    assert!(!chunked.advance(b"23\r\nGET /admin").unwrap().done);
    assert!(!chunked.may_end(), "an end of the connection here cuts the body short");
}

/// CVE-2026-2835: a transfer coding in HTTP/1.0, where other readers see a body until close or none.
#[test]
fn transfer_coding_in_http_1_0_is_refused_both_ways() {
    let request: &[u8] =
        b"POST / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n";
    let error = request_in_steps(request, request.len()).unwrap_err();
    assert_eq!(error.what, "Transfer-Encoding in HTTP/1.0");
    let response: &[u8] = b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let error = response_in_steps(response, response.len(), Method::Get).unwrap_err();
    assert_eq!(error.what, "Transfer-Encoding in HTTP/1.0");
}

/// CVE-2026-2833: bytes behind an upgrade request were tunnelled before the server had agreed. Here nothing tunnels: the
/// request is an ordinary one, what follows its body is the next request, and a 101 is an error.
#[test]
fn an_upgrade_request_never_becomes_a_tunnel() {
    let input: &[u8] = b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nGET /2 HTTP/1.1\r\n";
    let head = request_in_steps(input, input.len()).unwrap().unwrap();
    assert_eq!(head.framing, Framing::None);
    let advance = BodyReader::new(head.framing).advance(&input[head.head_len..]).unwrap();
    assert_eq!((advance.consumed, advance.done), (0, true), "what follows is the next request");
    let mut out = Vec::new();
    let rewrite = ringway::proto::http1::RequestRewrite { host: b"e", ..Default::default() };
    ringway::proto::http1::encode_request(&mut out, &head, input, &rewrite);
    assert_eq!(out, b"GET /ws HTTP/1.1\r\nHost: e\r\n\r\n", "the engine is not asked to upgrade");
    let response: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n";
    let error = response_in_steps(response, response.len(), Method::Get).unwrap_err();
    assert!(error.what.starts_with("101"), "{error}");
}

/// An upstream connection carries the next request only when this response's end is known and was reached.
#[test]
fn upstream_connections_are_reused_only_with_a_known_end() {
    let reuse = |text: &str, method| {
        response_in_steps(text.as_bytes(), text.len(), method).unwrap().unwrap().keep_alive
    };
    assert!(reuse("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Method::Get));
    assert!(reuse("HTTP/1.1 200 OK\r\n\r\n", Method::Head));
    assert!(reuse("HTTP/1.1 304 x\r\nContent-Length: 9\r\n\r\n", Method::Get));
    assert!(reuse("HTTP/1.1 204 x\r\nContent-Length: 0\r\n\r\n", Method::Get));
    assert!(reuse("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\n", Method::Get));
    assert!(!reuse("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", Method::Get));
    assert!(!reuse("HTTP/1.1 200 OK\r\n\r\n", Method::Get), "ends with the connection");
    assert!(!reuse("HTTP/1.1 204 x\r\nContent-Length: 9\r\n\r\n", Method::Get), "promises what cannot be");
    assert!(!reuse("HTTP/1.1 204 x\r\nTransfer-Encoding: chunked\r\n\r\n", Method::Get));
    assert!(!reuse("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", Method::Get));
}

/// A whole response of each framing, as a client of each version gets it.
#[test]
fn responses_are_reframed_for_the_client() {
    let cases = [
        ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", 1, Framing::Length(3)),
        ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", 0, Framing::Length(3)),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 1, Framing::Chunked),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0, Framing::UntilClose),
        ("HTTP/1.1 200 OK\r\n\r\n", 1, Framing::Chunked),
        ("HTTP/1.1 200 OK\r\n\r\n", 0, Framing::UntilClose),
        ("HTTP/1.1 204 x\r\n\r\n", 1, Framing::None),
    ];
    for (text, client_minor, framing) in cases {
        let head = response_in_steps(text.as_bytes(), text.len(), Method::Get).unwrap().unwrap();
        assert_eq!(downstream_framing(&head, client_minor), framing, "{text:?} to 1.{client_minor}");
        let keep_alive = framing != Framing::UntilClose;
        let mut out = Vec::new();
        encode_response(
            &mut out,
            &head,
            text.as_bytes(),
            b"",
            &ResponseRewrite { framing, keep_alive, client_minor, ..ResponseRewrite::default() },
        );
        let again = response_in_steps(&out, out.len(), Method::Get).unwrap().unwrap();
        assert_eq!(again.framing, framing);
        let says = String::from_utf8_lossy(&out).to_ascii_lowercase();
        assert_eq!(says.contains("connection: close"), !keep_alive);
        assert_eq!(says.contains("connection: keep-alive"), keep_alive && client_minor == 0);
    }
}

#[test]
fn limits_have_their_statuses() {
    let status = |input: &[u8]| {
        let limits = HeadLimits { target_bytes_max: 512, ..HeadLimits::new(2048, b"") };
        let verdict = parse_request(input, &mut HeadScan::default(), &limits, &mut RequestHead::default());
        verdict.map_err(|error| error.rejection.row().status)
    };
    let with_target =
        |n: usize| format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(n - 1)).into_bytes();
    assert_eq!(status(&with_target(512)), Ok(Parse::Complete));
    assert_eq!(status(&with_target(513)), Err(414));
    assert_eq!(status(&with_target(1000)[..700]), Err(414), "before the line is complete");
    let start = "GET / HTTP/1.1\r\nHost: a\r\nX: ";
    let with_head = |n: usize| format!("{start}{}\r\n\r\n", "x".repeat(n - start.len() - 4)).into_bytes();
    assert_eq!(status(&with_head(2048)), Ok(Parse::Complete));
    assert_eq!(status(&with_head(2049)), Err(431));
    assert_eq!(status(&with_head(4000)[..2047]), Ok(Parse::Partial));
    assert_eq!(status(&with_head(4000)[..2048]), Err(431), "no more bytes are waited for");
    let with_fields =
        |n: usize| format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(n - 1)).into_bytes();
    assert_eq!(status(&with_fields(128)), Ok(Parse::Complete));
    assert_eq!(status(&with_fields(129)), Err(431));
}
