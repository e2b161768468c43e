//! What must hold for any bytes at all. The fuzz targets and `tests/http1.rs` share it.

use ringway::proto::http1::{
    BodyReader, ChunkError, Contract, Credentials, FieldKind, Framing, HeadError, HeadLimits, HeadScan,
    LAST_CHUNK, Method, Parse, RequestHead, RequestRewrite, ResponseError, ResponseHead, ResponseRewrite,
    downstream_framing, encode_request, encode_response, parse_request, parse_response, push_chunk_header,
    push_last_chunk,
};

pub const PREFIX: &[u8] = b"X-Lifeboat-";

/// Small limits, so that short inputs reach them.
pub fn limits() -> HeadLimits {
    HeadLimits { target_bytes_max: 1024, ..HeadLimits::new(4096, PREFIX) }
}

/// Parses the request in `data` as it grows in steps of `step` bytes. `Ok(None)`: no whole head.
pub fn request_in_steps(data: &[u8], step: usize) -> Result<Option<RequestHead>, HeadError> {
    let (limits, mut scan, mut head) = (limits(), HeadScan::default(), RequestHead::default());
    for end in (0..data.len()).step_by(step).chain([data.len()]) {
        if parse_request(&data[..end], &mut scan, &limits, &mut head)? == Parse::Complete {
            return Ok(Some(head));
        }
    }
    Ok(None)
}

/// Parses the response in `data` as it grows in steps of `step` bytes.
pub fn response_in_steps(
    data: &[u8],
    step: usize,
    method: Method,
) -> Result<Option<ResponseHead>, ResponseError> {
    let (limits, mut scan, mut head) = (limits(), HeadScan::default(), ResponseHead::default());
    for end in (0..data.len()).step_by(step).chain([data.len()]) {
        if parse_response(&data[..end], &mut scan, &limits, method, &mut head)? == Parse::Complete {
            return Ok(Some(head));
        }
    }
    Ok(None)
}

/// Any split of a head gives the same verdict, and what was accepted can be written for the other side and read again.
pub fn head(data: &[u8]) {
    let whole = request_in_steps(data, data.len().max(1));
    for step in [1, 7] {
        assert_eq!(request_in_steps(data, step), whole, "request in steps of {step}");
    }
    if let Ok(Some(head)) = &whole {
        request_round_trip(data, head);
    }
    for method in [Method::Post, Method::Head] {
        let whole = response_in_steps(data, data.len().max(1), method);
        for step in [1, 7] {
            assert_eq!(response_in_steps(data, step, method), whole, "response in steps of {step}");
        }
        if let Ok(Some(head)) = &whole {
            response_round_trip(data, head, method);
        }
    }
}

/// Name and value of each field that is nobody's but the two ends'.
fn kept<'b>(fields: &[ringway::proto::http1::Field], buf: &'b [u8]) -> Vec<(&'b [u8], &'b [u8])> {
    let end_to_end = [
        FieldKind::Other,
        FieldKind::ContentType,
        FieldKind::ContentEncoding,
        FieldKind::Authorization,
        FieldKind::XApiKey,
        FieldKind::TraceParent,
        FieldKind::TraceState,
        FieldKind::ServerIdentity,
    ];
    let both = |f: &ringway::proto::http1::Field| (f.name.of(buf), f.value.of(buf));
    fields.iter().filter(|f| end_to_end.contains(&f.kind)).map(both).collect()
}

fn request_round_trip(data: &[u8], head: &RequestHead) {
    assert!(head.head_len <= data.len());
    assert_ne!(head.framing, Framing::UntilClose);
    let rewrite = RequestRewrite {
        contract: Contract::OpenAi,
        base_path: b"/base",
        host: b"engine:8000",
        framing: head.framing,
        credentials: Credentials::Keep,
        drop_router_own: true,
        extra_lines: b"",
    };
    let mut out = Vec::new();
    encode_request(&mut out, head, data, &rewrite);
    let limits = HeadLimits::new(1 << 20, PREFIX);
    let mut again = RequestHead::default();
    let parsed = parse_request(&out, &mut HeadScan::default(), &limits, &mut again);
    // The base path may push a target over the limit that was just within it; the limits above are wide.
    assert_eq!(parsed, Ok(Parse::Complete), "{}", out.escape_ascii());
    assert_eq!(again.head_len, out.len(), "nothing behind the head, nothing split off it");
    assert_eq!(again.framing, head.framing);
    assert_eq!(again.method_span.of(&out), head.method_span.of(data));
    assert!(again.keep_alive && !again.expect_continue && again.minor == 1);
    assert_eq!(again.host.map(|h| h.of(&out)), Some(&b"engine:8000"[..]));
    assert_eq!(kept(again.fields(), &out), kept(head.fields(), data));
    for field in again.fields() {
        let te = matches!(field.kind, FieldKind::Te | FieldKind::Connection);
        assert!(!te || again.first(FieldKind::Te).is_some(), "Connection without TE");
        let hop = [FieldKind::KeepAlive, FieldKind::ProxyAny, FieldKind::Trailer, FieldKind::Upgrade];
        let steers = [FieldKind::Steering, FieldKind::Neighbourly, FieldKind::ClusterIdentity];
        let gone = [&hop[..], &steers, &[FieldKind::ProxyConnection]].concat();
        assert!(!gone.contains(&field.kind) && field.kind != FieldKind::RouterOwn, "{field:?}");
    }
    let mut trusted = Vec::new();
    let stargate = RequestRewrite { contract: Contract::Stargate { tracestate: true }, ..rewrite };
    encode_request(&mut trusted, head, data, &stargate);
    let mut theirs = RequestHead::default();
    let parsed = parse_request(&trusted, &mut HeadScan::default(), &limits, &mut theirs);
    assert_eq!(parsed, Ok(Parse::Complete), "{}", trusted.escape_ascii());
    assert_eq!((theirs.head_len, theirs.framing), (trusted.len(), head.framing), "one length, the true one");
    // What has been rewritten once stays as it is.
    let mut twice = Vec::new();
    encode_request(&mut twice, &again, &out, &RequestRewrite { base_path: b"", ..rewrite });
    assert_eq!(twice.escape_ascii().to_string(), out.escape_ascii().to_string());
}

fn response_round_trip(data: &[u8], head: &ResponseHead, method: Method) {
    assert!(head.head_len <= data.len());
    let framing = downstream_framing(head, 1);
    let mut out = Vec::new();
    let rewrite = ResponseRewrite { framing, keep_alive: true, client_minor: 1, ..Default::default() };
    encode_response(&mut out, head, data, b"X-Lifeboat-Server: a\r\n", &rewrite);
    let limits = HeadLimits::new(1 << 20, PREFIX);
    let mut again = ResponseHead::default();
    let parsed = parse_response(&out, &mut HeadScan::default(), &limits, method, &mut again);
    if head.fields().len() >= ringway::limits::HEADERS_MAX - 1 {
        // Our own two lines may be the ones too many for our own parser.
        return;
    }
    assert_eq!(parsed, Ok(Parse::Complete), "{}", out.escape_ascii());
    assert_eq!(again.head_len, out.len());
    assert_eq!(again.framing, framing);
    assert_eq!((again.status, again.reason.of(&out)), (head.status, head.reason.of(data)));
    assert!(again.keep_alive);
    assert_eq!(again.is_event_stream, head.is_event_stream);
    assert_eq!(kept(again.fields(), &out), kept(head.fields(), data));
    let own = again.fields().iter().filter(|f| f.kind == FieldKind::RouterOwn).count();
    assert_eq!(own, 1, "the engine's own are gone, ours is there");
}

/// What became of a chunked body.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub data: Vec<u8>,
    pub consumed: usize,
    pub trailers: Vec<u8>,
    pub end: Result<bool, ChunkError>,
}

/// Decodes `input`, handed over in pieces of `step` bytes.
pub fn decode_in_steps(input: &[u8], step: usize) -> Outcome {
    let mut reader = BodyReader::new(Framing::Chunked);
    let mut outcome = Outcome { data: Vec::new(), consumed: 0, trailers: Vec::new(), end: Ok(false) };
    for piece in input.chunks(step) {
        let mut at = 0;
        while at < piece.len() && !reader.is_done() {
            match reader.decode(&piece[at..]) {
                Ok(decoded) => {
                    assert!(decoded.consumed > 0 && decoded.data.end <= decoded.consumed);
                    assert_eq!(decoded.done, reader.is_done());
                    outcome.data.extend_from_slice(&piece[at..][decoded.data]);
                    at += decoded.consumed;
                    outcome.consumed += decoded.consumed;
                }
                Err(error) => {
                    assert!(reader.decode(b"0\r\n\r\n").is_err(), "an error stays");
                    // How far a failed call came is not part of its result.
                    return Outcome { end: Err(error), consumed: 0, ..outcome };
                }
            }
        }
    }
    outcome.trailers = reader.trailers().to_vec();
    outcome.end = Ok(reader.is_done());
    outcome
}

/// Passes `input` through in pieces of `step` bytes; returns what goes on, with the tail once the body is complete.
pub fn advance_in_steps(input: &[u8], step: usize) -> Result<(Vec<u8>, usize, bool), ChunkError> {
    let mut reader = BodyReader::new(Framing::Chunked);
    let (mut out, mut consumed) = (Vec::new(), 0);
    for piece in input.chunks(step) {
        let advance = reader.advance(piece)?;
        assert!(advance.forward <= advance.consumed && advance.consumed <= piece.len());
        assert!(advance.done || advance.consumed == piece.len());
        out.extend_from_slice(&piece[..advance.forward]);
        consumed += advance.consumed;
        if advance.done {
            reader.push_tail(&mut out, PREFIX);
            break;
        }
    }
    Ok((out, consumed, reader.is_done()))
}

/// Any split decodes alike, pass-through and decoding agree, and what goes on decodes to the same.
pub fn chunked(input: &[u8]) {
    let whole = decode_in_steps(input, input.len().max(1));
    let passed = advance_in_steps(input, input.len().max(1));
    for step in [1, 5] {
        assert_eq!(decode_in_steps(input, step), whole, "in steps of {step}");
        assert_eq!(advance_in_steps(input, step), passed, "passed through in steps of {step}");
    }
    match (&whole.end, &passed) {
        (Err(a), Err(b)) => assert_eq!(a, b),
        (Ok(done), Ok((out, consumed, passed_done))) => {
            assert_eq!((whole.consumed, *done), (*consumed, *passed_done));
            if *done {
                let again = decode_in_steps(out, out.len());
                assert_eq!((again.end, again.consumed), (Ok(true), out.len()));
                assert_eq!(again.data, whole.data);
                assert_eq!(again.trailers, without_own(&whole.trailers));
            }
        }
        other => panic!("decoding and pass-through differ: {other:?}"),
    }
    if whole.end == Ok(true) {
        let mut framed = Vec::new();
        for part in whole.data.chunks(11) {
            push_chunk_header(&mut framed, part.len());
            framed.extend_from_slice(part);
            framed.extend_from_slice(b"\r\n");
        }
        push_last_chunk(&mut framed, &whole.trailers, b"");
        if whole.trailers.is_empty() {
            assert!(framed.ends_with(LAST_CHUNK));
        }
        let again = decode_in_steps(&framed, framed.len());
        assert_eq!((again.end, again.consumed), (Ok(true), framed.len()));
        assert_eq!((again.data, again.trailers), (whole.data, whole.trailers));
    }
}

fn without_own(trailers: &[u8]) -> Vec<u8> {
    let own = |line: &&[u8]| line.len() > PREFIX.len() && line[..PREFIX.len()].eq_ignore_ascii_case(PREFIX);
    trailers.split_inclusive(|&b| b == b'\n').filter(|l| !own(l)).flatten().copied().collect()
}
