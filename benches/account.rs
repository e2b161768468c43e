//! What watching an answer for its engine's report costs, in instructions. Run as `benches/http1.rs` is:
//! `scripts/bench-instructions --bench account`.

mod harness;

use std::hint::black_box;

use ringway::proto::account::{Usage, UsageScan};
use ringway::proto::classify::Api;

/// As vLLM streams a token, in its chunk.
const EVENT: &[u8] = b"fa\r\ndata: {\"id\":\"chatcmpl-6b1f0f0e8c554b7e9d0e2f4d1c9be001\",\"object\":\"chat.completion.chunk\",\
    \"created\":1722270617,\"model\":\"meta-llama/Llama-3.1-8B-Instruct\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" the\"},\
    \"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n\r\n";

/// And its last event but one.
const LAST: &[u8] = b"fa\r\ndata: {\"id\":\"chatcmpl-6b1f0f0e8c554b7e9d0e2f4d1c9be001\",\"object\":\"chat.completion.chunk\",\
    \"created\":1722270617,\"model\":\"meta-llama/Llama-3.1-8B-Instruct\",\"choices\":[],\"usage\":{\"prompt_tokens\":2019,\
    \"total_tokens\":2529,\"completion_tokens\":510,\"prompt_tokens_details\":{\"cached_tokens\":2000}}}\n\n\r\n";

const MIB: usize = 1 << 20;

struct Bench {
    open_ai: UsageScan,
    anthropic: UsageScan,
    /// A stream's first megabyte, and a plain answer with one long text.
    stream: Vec<u8>,
    plain: Vec<u8>,
}

type Round = fn(&mut Bench);

const CASES: &[(&str, Round)] = &[
    ("event", |bench| bench.open_ai.feed(black_box(EVENT))),
    ("event_anthropic", |bench| bench.anthropic.feed(black_box(EVENT))),
    ("last_event", |bench| {
        bench.open_ai.feed(black_box(LAST));
        let expected =
            Usage { prompt_tokens: Some(2019), cached_tokens: Some(2000), completion_tokens: Some(510) };
        assert_eq!(black_box(bench.open_ai.finish()), expected);
    }),
    ("stream_1_mib", |bench| bench.open_ai.feed(black_box(&bench.stream))),
    ("plain_1_mib", |bench| {
        bench.open_ai.feed(black_box(&bench.plain));
        assert_eq!(black_box(bench.open_ai.finish()).cached_tokens, Some(2000));
    }),
];

impl Bench {
    fn new() -> Bench {
        let mut plain = b"{\"choices\":[{\"message\":{\"content\":\"".to_vec();
        while plain.len() < MIB {
            plain.extend_from_slice(b"The timings of a model's usage, as \\\"meta_info\\\", are quoted.\\n");
        }
        plain.extend_from_slice(b"\"}}],");
        plain.extend_from_slice(&LAST[memchr::memmem::find(LAST, b"\"usage\"").expect("there")..]);
        Bench {
            open_ai: UsageScan::new(Api::OpenAi),
            anthropic: UsageScan::new(Api::Anthropic),
            stream: EVENT.repeat(MIB / EVENT.len()),
            plain,
        }
    }
}

fn main() {
    harness::run("account", CASES, Bench::new);
}
