//! What the HTTP/1.1 core costs, in instructions: a figure that repeats to the unit, on any machine, under any load.
//!
//! `scripts/bench-instructions` runs each case under callgrind with two counts of rounds and divides the difference, so
//! that start-up falls out. Run without arguments (as `cargo test` does) each case goes once and its result is checked, so
//! that it cannot rot; `--case NAME --rounds N` runs one.

mod harness;

use std::hint::black_box;

use ringway::proto::http1::{
    BodyReader, Framing, HeadLimits, HeadScan, Method, Parse, RequestHead, RequestRewrite, ResponseHead,
    ResponseRewrite, encode_request, encode_response, parse_request, parse_response,
};

/// As an OpenAI client behind a gateway sends it: 11 fields, body behind the head.
const REQUEST: &[u8] = b"POST /v1/chat/completions HTTP/1.1\r\n\
    Host: llm.example.internal:8080\r\n\
    User-Agent: OpenAI/Python 1.51.0\r\n\
    Accept: application/json\r\n\
    Accept-Encoding: gzip, deflate, br\r\n\
    Connection: keep-alive\r\n\
    Content-Type: application/json\r\n\
    Authorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n\
    X-Stainless-Lang: python\r\n\
    X-Stainless-Async: false\r\n\
    X-Request-Id: 6b1f0f0e-8c55-4b7e-9d0e-2f4d1c9be001\r\n\
    Content-Length: 187\r\n\
    \r\n\
    {\"model\":\"llama\",\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}";

/// As vLLM starts a stream: 5 fields, the first event behind the head.
const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\n\
    date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
    server: uvicorn\r\n\
    content-type: text/event-stream; charset=utf-8\r\n\
    x-request-id: 6b1f0f0e8c554b7e9d0e2f4d1c9be001\r\n\
    Transfer-Encoding: chunked\r\n\
    \r\n\
    5\r\ndata:\r\n";

/// One read of a stream: four events, each a chunk of its own.
const CHUNKS: &[u8] = b"2a\r\ndata: {\"choices\":[{\"delta\":{\"text\":\"a\"}}]}\r\n\
    2a\r\ndata: {\"choices\":[{\"delta\":{\"text\":\"b\"}}]}\r\n\
    2a\r\ndata: {\"choices\":[{\"delta\":{\"text\":\"c\"}}]}\r\n\
    2a\r\ndata: {\"choices\":[{\"delta\":{\"text\":\"d\"}}]}\r\n";

/// What one round of a case works on; everything that a connection reuses is made once.
struct Bench {
    limits: HeadLimits,
    scan: HeadScan,
    request: RequestHead,
    response: ResponseHead,
    body: BodyReader,
    out: Vec<u8>,
}

type Round = fn(&mut Bench);

const CASES: &[(&str, Round)] = &[
    ("parse_request", |bench| {
        let Bench { limits, scan, request, .. } = bench;
        let parsed = parse_request(black_box(REQUEST), scan, limits, request);
        assert_eq!(black_box(parsed), Ok(Parse::Complete));
    }),
    ("parse_response", |bench| {
        let Bench { limits, scan, response, .. } = bench;
        let parsed = parse_response(black_box(RESPONSE), scan, limits, Method::Post, response);
        assert_eq!(black_box(parsed), Ok(Parse::Complete));
    }),
    ("encode_request", |bench| {
        bench.out.clear();
        let rewrite =
            RequestRewrite { host: b"10.0.0.7:8000", framing: Framing::Length(187), ..Default::default() };
        encode_request(&mut bench.out, &bench.request, black_box(REQUEST), &rewrite);
        assert!(black_box(&bench.out).len() > 300);
    }),
    ("encode_response", |bench| {
        bench.out.clear();
        let rewrite = ResponseRewrite {
            framing: Framing::Chunked,
            keep_alive: true,
            client_minor: 1,
            ..Default::default()
        };
        encode_response(
            &mut bench.out,
            &bench.response,
            black_box(RESPONSE),
            b"X-Lifeboat-Server: a\r\n",
            &rewrite,
        );
        assert!(black_box(&bench.out).len() > 150);
    }),
    ("advance_chunks", |bench| {
        let advance = bench.body.advance(black_box(CHUNKS)).expect("well-formed chunks");
        assert_eq!((black_box(advance).forward, advance.done), (CHUNKS.len(), false));
    }),
];

impl Bench {
    fn new() -> Bench {
        let mut bench = Bench {
            limits: HeadLimits::new(64 * 1024, b"X-Lifeboat-"),
            scan: HeadScan::default(),
            request: RequestHead::default(),
            response: ResponseHead::default(),
            body: BodyReader::new(Framing::Chunked),
            out: Vec::new(),
        };
        // The encoders need a parsed head.
        for (_, round) in &CASES[..2] {
            round(&mut bench);
        }
        assert_eq!((bench.request.fields().len(), bench.response.fields().len()), (11, 5));
        bench
    }
}

fn main() {
    harness::run("http1", CASES, Bench::new);
}
