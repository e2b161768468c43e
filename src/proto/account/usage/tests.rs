use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn whole(api: Api, answer: &[u8]) -> Usage {
    let mut scan = UsageScan::new(api);
    scan.feed(answer);
    scan.finish()
}

fn usage(prompt: u64, cached: impl Into<Option<u64>>, completion: u64) -> Usage {
    Usage { prompt_tokens: Some(prompt), cached_tokens: cached.into(), completion_tokens: Some(completion) }
}

/// As a chunked body: each piece one chunk.
fn chunked(pieces: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in pieces {
        out.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        out.extend_from_slice(piece);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"0\r\n\r\n");
    out
}

/// Answers as engines give them, and what they say.
fn known() -> Vec<(Api, &'static str, String, Usage)> {
    use Api::{Anthropic, OpenAi};
    vec![
        (
            OpenAi,
            "vLLM chat",
            r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hi","refusal":null,"tool_calls":[]},"logprobs":null,"finish_reason":"stop"}],"service_tier":null,"usage":{"prompt_tokens":2019,"total_tokens":2029,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":2000}},"prompt_logprobs":null,"kv_transfer_params":null}"#.into(),
            usage(2019, 2000, 10),
        ),
        (
            OpenAi,
            "vLLM chat without --enable-prompt-tokens-details",
            r#"{"choices":[],"usage":{"prompt_tokens":19,"total_tokens":29,"completion_tokens":10,"prompt_tokens_details":null}}"#.into(),
            usage(19, None, 10),
        ),
        (
            OpenAi,
            "OpenAI chat, pretty-printed with CRLF",
            "{\r\n  \"choices\": [],\r\n  \"usage\": {\r\n    \"prompt_tokens\": 19,\r\n    \"completion_tokens\": 10,\r\n    \"prompt_tokens_details\": {\r\n      \"audio_tokens\": 3,\r\n      \"cached_tokens\": 8\r\n    },\r\n    \"completion_tokens_details\": {\"cached_tokens\": 99, \"reasoning_tokens\": 5}\r\n  }\r\n}\r\n".into(),
            usage(19, 8, 10),
        ),
        (
            OpenAi,
            "chat stream with usage null until the end",
            concat!(
                "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n",
                "data: {\"choices\":[{\"delta\":{\"content\":\"b\"}}],\"usage\": null}\n\n",
                "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"total_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\n",
                "data: [DONE]\n\n"
            ).into(),
            usage(7, 0, 2),
        ),
        (
            OpenAi,
            "chat stream with usage in each event, details in the last",
            concat!(
                "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"total_tokens\":7,\"completion_tokens\":0}}\n\n",
                "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"total_tokens\":8,\"completion_tokens\":1}}\n\n",
                "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"total_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
                "data: [DONE]\n\n"
            ).into(),
            usage(7, 4, 2),
        ),
        (
            OpenAi,
            "Responses",
            r#"{"id":"resp_1","object":"response","output":[{"type":"message","content":[{"type":"output_text","text":"x"}]}],"max_output_tokens":null,"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":32},"output_tokens":87,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":123},"user":null,"metadata":{}}"#.into(),
            usage(36, 32, 87),
        ),
        (
            OpenAi,
            "Responses stream",
            concat!(
                "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"usage\":null}}\n\n",
                "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"usage\"}\n\n",
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"output\":[],\"usage\":{\"input_tokens\":37,\"input_tokens_details\":{\"cached_tokens\":16},\"output_tokens\":11,\"total_tokens\":48}}}\n\n"
            ).into(),
            usage(37, 16, 11),
        ),
        (
            OpenAi,
            "embeddings",
            r#"{"object":"list","data":[{"embedding":[0.1,-0.2],"index":0}],"usage":{"prompt_tokens":8,"total_tokens":8,"completion_tokens":0,"prompt_tokens_details":null}}"#.into(),
            usage(8, None, 0),
        ),
        (
            OpenAi,
            "llama.cpp chat with timings",
            r#"{"choices":[],"usage":{"completion_tokens":8,"prompt_tokens":1790,"total_tokens":1798,"prompt_tokens_details":{"cached_tokens":1789}},"timings":{"cache_n":1789,"prompt_n":1,"prompt_ms":30.9,"prompt_per_token_ms":30.9,"predicted_n":8,"predicted_ms":61.8}}"#.into(),
            usage(1790, 1789, 8),
        ),
        (
            OpenAi,
            "llama.cpp with the cached tokens in timings only",
            r#"{"choices":[],"usage":{"completion_tokens":8,"prompt_tokens":410,"total_tokens":418},"timings":{"prompt_n":120,"prompt_ms":900.0,"predicted_n":8,"cache_n":290}}"#.into(),
            usage(410, 290, 8),
        ),
        (
            OpenAi,
            "timings that contradict the usage",
            r#"{"usage":{"completion_tokens":8,"prompt_tokens":410},"timings":{"prompt_n":120,"predicted_n":8,"cache_n":9}}"#.into(),
            usage(410, None, 8),
        ),
        (
            OpenAi,
            "llama.cpp native stream",
            concat!(
                "data: {\"content\":\"a\",\"stop\":false}\n\n",
                "data: {\"content\":\"\",\"stop\":true,\"tokens_evaluated\":30,\"timings\":{\"cache_n\":20,\"prompt_n\":10,\"prompt_ms\":1.5,\"predicted_n\":3}}\n\n"
            ).into(),
            usage(30, 20, 3),
        ),
        (
            OpenAi,
            "llama.cpp of before cache_n: how much was not processed is not known",
            r#"{"content":"a","timings":{"prompt_n":10,"predicted_n":3}}"#.into(),
            Usage { completion_tokens: Some(3), ..Usage::default() },
        ),
        (
            OpenAi,
            "SGLang generate",
            r#"{"text":" Paris","output_ids":[1],"meta_info":{"id":"0a","finish_reason":{"type":"length","length":8,"prompt_tokens":1},"prompt_tokens":14,"weight_version":"default","input_token_logprobs":[[-0.5,1,null]],"completion_tokens":8,"cached_tokens":13,"cached_tokens_details":{"device":13,"cached_tokens":1},"e2e_latency":0.1}}"#.into(),
            usage(14, 13, 8),
        ),
        (
            OpenAi,
            "SGLang generate stream: the figures grow",
            concat!(
                "data: {\"text\":\"a\",\"meta_info\":{\"prompt_tokens\":14,\"completion_tokens\":1,\"cached_tokens\":13}}\n\n",
                "data: {\"text\":\"ab\",\"meta_info\":{\"prompt_tokens\":14,\"completion_tokens\":2,\"cached_tokens\":13}}\n\n",
                "data: [DONE]\n\n"
            ).into(),
            usage(14, 13, 2),
        ),
        (
            Anthropic,
            "llama.cpp messages: the cached part stands beside input_tokens",
            r#"{"id":"msg","type":"message","content":[{"type":"text","text":"x"}],"usage":{"cache_read_input_tokens":1789,"input_tokens":1,"output_tokens":8}}"#.into(),
            usage(1790, 1789, 8),
        ),
        (
            Anthropic,
            "Anthropic messages with a part written to the cache",
            r#"{"content":[],"usage":{"input_tokens":3,"cache_creation_input_tokens":100,"cache_read_input_tokens":20,"cache_creation":{"ephemeral_5m_input_tokens":100,"ephemeral_1h_input_tokens":0},"output_tokens":5,"service_tier":"standard"}}"#.into(),
            usage(123, 20, 5),
        ),
        (
            Anthropic,
            "messages without a word of the cache",
            r#"{"content":[],"usage":{"input_tokens":30,"output_tokens":5,"cache_creation_input_tokens":null,"cache_read_input_tokens":null}}"#.into(),
            usage(30, None, 5),
        ),
        (
            Anthropic,
            "messages stream: the prompt first, what was generated last",
            concat!(
                "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":75,\"output_tokens\":1}}}\n\n",
                "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"x\"}}\n\n",
                "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":15}}\n\n",
                "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
            ).into(),
            usage(100, 75, 15),
        ),
        (
            Anthropic,
            "messages stream whose last event repeats input_tokens alone",
            concat!(
                "data: {\"message\":{\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":75,\"output_tokens\":1}}}\n\n",
                "data: {\"usage\":{\"input_tokens\":25,\"output_tokens\":15}}\n\n"
            ).into(),
            usage(100, 75, 15),
        ),
        (
            Anthropic,
            "messages stream whose last event says everything again",
            concat!(
                "data: {\"message\":{\"usage\":{\"input_tokens\":100,\"output_tokens\":1}}}\n\n",
                "data: {\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":75,\"output_tokens\":15}}\n\n"
            ).into(),
            usage(100, 75, 15),
        ),
    ]
}

/// What is no report, or no sensible one.
fn tricks() -> Vec<(&'static str, &'static str, Usage)> {
    let none = Usage::default();
    vec![
        (
            "a generated text that looks like a report",
            r#"{"choices":[{"message":{"content":"{\"usage\":{\"prompt_tokens\":1,\"prompt_tokens_details\":{\"cached_tokens\":1}}}"}}]}"#,
            none,
        ),
        ("a text that is a key", r#"{"content":"usage","prompt_tokens":5}"#, none),
        (
            "a text that ends in a key",
            r#"{"content":"\"usage","a":{"prompt_tokens":5}} {"x":"say \"usage" ,"b":1}"#,
            none,
        ),
        (
            "a key with a key inside",
            r#"{"x\"usage":{"prompt_tokens":5},"my_usage":{"prompt_tokens":5}}"#,
            none,
        ),
        (
            "an escaped key whose quote is not",
            r#"{"\"usage":{"prompt_tokens":5},"a\"usage":{"prompt_tokens":5}}"#,
            none,
        ),
        ("usage that is no object", r#"{"usage":[{"prompt_tokens":5}],"usage":"x","usage":7}"#, none),
        ("numbers that are no counts", r#"{"usage":{"prompt_tokens":"5","completion_tokens":-5}}"#, none),
        ("more numbers that are none", r#"{"usage":{"prompt_tokens":5.5,"completion_tokens":5e3}}"#, none),
        (
            "a number over 64 bits",
            r#"{"usage":{"prompt_tokens":18446744073709551616,"completion_tokens":18446744073709551615}}"#,
            Usage { completion_tokens: Some(u64::MAX), ..Usage::default() },
        ),
        (
            "fields at the wrong depth",
            r#"{"usage":{"more":{"prompt_tokens":5},"list":[{"prompt_tokens":6}],"x":["prompt_tokens",7]}}"#,
            none,
        ),
        (
            "strings of a report that look like its fields",
            r#"{"usage":{"a":"prompt_tokens","b":"\"prompt_tokens\":5","c\"prompt_tokens":9,"d":"}{"}}"#,
            none,
        ),
        (
            "more cached than there is",
            r#"{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":50}}}"#,
            Usage { prompt_tokens: Some(5), cached_tokens: Some(5), completion_tokens: None },
        ),
        ("an object that never ends", r#"{"usage":{"prompt_tokens":5,"#, none),
        (
            "arguments that a model made, before the engine's own report",
            r#"{"content":[{"type":"tool_use","input":{"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}}}],"usage":{"prompt_tokens":90,"completion_tokens":2}}"#,
            Usage { prompt_tokens: Some(90), cached_tokens: None, completion_tokens: Some(2) },
        ),
        ("nothing", "", none),
        ("no JSON", "\r\n\"usage\"\r\n:\r\n{\r\n\"prompt_tokens\"\r\n:zz\r\nqq", none),
    ]
}

#[test]
fn engines_reports_are_read() {
    for (api, what, answer, expected) in known() {
        assert_eq!(whole(api, answer.as_bytes()), expected, "{what}");
    }
}

#[test]
fn what_is_no_report_is_not_taken() {
    for (what, answer, expected) in tricks() {
        assert_eq!(whole(Api::OpenAi, answer.as_bytes()), expected, "{what}");
    }
}

#[test]
fn every_split_in_two_and_every_single_byte() {
    let known = known().into_iter().map(|(api, what, answer, _)| (api, what, answer));
    let tricks = tricks().into_iter().map(|(what, answer, _)| (Api::OpenAi, what, answer.to_owned()));
    for (api, what, answer) in known.chain(tricks) {
        let events: Vec<&[u8]> = answer.as_bytes().split_inclusive(|byte| *byte == b'\n').collect();
        for bytes in [answer.as_bytes().to_vec(), chunked(&events)] {
            let expected = whole(api, &bytes);
            for cut in 0..=bytes.len() {
                let mut scan = UsageScan::new(api);
                scan.feed(&bytes[..cut]);
                scan.feed(&bytes[cut..]);
                assert_eq!(scan.finish(), expected, "{what}, cut at {cut}");
            }
            let mut scan = UsageScan::new(api);
            bytes.chunks(1).for_each(|byte| scan.feed(byte));
            assert_eq!(scan.finish(), expected, "{what}, byte by byte");
        }
    }
}

#[test]
fn chunks_that_end_anywhere_in_a_report_are_seen_through() {
    for (api, what, answer, expected) in known() {
        let bytes = answer.as_bytes();
        for cut in 0..=bytes.len() {
            let (first, rest) = bytes.split_at(cut);
            let pieces: Vec<&[u8]> = [first, rest].into_iter().filter(|piece| !piece.is_empty()).collect();
            // A key in two chunks is missed, together with its report, and nothing wrong is read instead.
            let in_key = REPORTS.iter().any(|report| {
                let key = report.key();
                (1..key.len()).any(|len| first.ends_with(&key[..len]) && rest.starts_with(&key[len..]))
            });
            if !in_key {
                assert_eq!(whole(api, &chunked(&pieces)), expected, "{what}, chunks meet at {cut}");
            }
        }
        // Chunk sizes of every look, extensions included.
        let thirds: Vec<&[u8]> = bytes.chunks(bytes.len().div_ceil(3).max(64)).collect();
        let mut extended = Vec::new();
        for piece in &thirds {
            extended.extend_from_slice(format!("{:X};a=b c\r\n", piece.len()).as_bytes());
            extended.extend_from_slice(piece);
            extended.extend_from_slice(b"\r\n");
        }
        let keys_whole = REPORTS.iter().all(|report| {
            let count = |bytes: &[u8]| memchr::memmem::find_iter(bytes, report.key()).count();
            count(bytes) == count(&extended)
        });
        if keys_whole {
            assert_eq!(whole(api, &extended), expected, "{what}, with extensions");
        }
    }
}

#[test]
fn a_scan_is_as_new_after_its_end() {
    let mut scan = UsageScan::new(Api::OpenAi);
    scan.feed(br#"{"usage":{"prompt_tokens":5},"usa"#);
    assert_eq!(scan.finish().prompt_tokens, Some(5));
    scan.feed(br#"ge":{"prompt_tokens":7}}"#);
    assert_eq!(scan.finish(), Usage::default());
}

#[test]
fn the_state_stays_small() {
    assert!(size_of::<UsageScan>() <= 400, "{} bytes", size_of::<UsageScan>());
}

/// What a full parser makes of an answer: the same rules, on a tree.
fn naive(api: Api, answer: &str) -> Usage {
    let events: Vec<&str> = match answer.starts_with('{') {
        true => vec![answer],
        false => answer.lines().filter_map(|line| line.strip_prefix("data: ")).collect(),
    };
    let mut found = Usage::default();
    for event in events {
        let Ok(event) = serde_json::from_str::<Value>(event) else { continue };
        let at = |path: &str| event.pointer(path).and_then(Value::as_u64);
        let any = |paths: &[&str]| paths.iter().find_map(|path| at(path));
        let (prompt, cached) = match api {
            Api::Anthropic => {
                let base = if event.get("message").is_some() { "/message/usage" } else { "/usage" };
                let field = |name: &str| at(&format!("{base}/{name}"));
                let read = field("cache_read_input_tokens");
                let beside = read.unwrap_or(0) + field("cache_creation_input_tokens").unwrap_or(0);
                (field("input_tokens").map(|rest| rest + beside), read)
            }
            Api::OpenAi => (
                any(&[
                    "/usage/prompt_tokens",
                    "/usage/input_tokens",
                    "/response/usage/input_tokens",
                    "/meta_info/prompt_tokens",
                ]),
                any(&[
                    "/usage/prompt_tokens_details/cached_tokens",
                    "/usage/input_tokens_details/cached_tokens",
                    "/response/usage/input_tokens_details/cached_tokens",
                    "/meta_info/cached_tokens",
                    "/timings/cache_n",
                ]),
            ),
        };
        let completion = any(&[
            "/usage/completion_tokens",
            "/usage/output_tokens",
            "/message/usage/output_tokens",
            "/response/usage/output_tokens",
            "/meta_info/completion_tokens",
        ]);
        if prompt.is_some() {
            found = Usage { prompt_tokens: prompt, cached_tokens: cached, ..found };
        }
        found.completion_tokens = completion.or(found.completion_tokens);
    }
    found
}

/// Text as models make it, and as it hurts.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => "[ -~]{0,24}",
        1 => Just("\"usage\":{\"prompt_tokens\":3}".to_owned()),
        1 => Just("usage".to_owned()),
        1 => Just("\"usage".to_owned()),
        1 => Just("\\".to_owned()),
        1 => Just("\"timings\": {\"cache_n\":1,\"prompt_n\":1}".to_owned()),
        1 => "\\PC{0,6}",
    ];
    proptest::collection::vec(part, 0..4).prop_map(|parts| parts.concat())
}

fn answer() -> impl Strategy<Value = (Api, String)> {
    let counts = (0..100_000u64, 0..100_000u64, proptest::option::of(0..100_000u64), any::<bool>());
    (text(), proptest::collection::vec(text(), 0..4), counts, 0..7u8).prop_map(
        |(start, tokens, (rest, made, cached, pretty), kind)| {
            let prompt = rest + cached.unwrap_or(0);
            let details = cached.map_or(Value::Null, |cached| json!({"cached_tokens": cached}));
            let chat = json!({"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made, "prompt_tokens_details": details});
            let events = |first: Option<Value>, token: &dyn Fn(&str) -> Value, last: Value| {
                let all = first.into_iter().chain(tokens.iter().map(|text| token(text))).chain([last]);
                all.map(|event| format!("data: {event}\n\n")).collect::<String>()
            };
            let print = |value: Value| match pretty {
                true => serde_json::to_string_pretty(&value).unwrap(),
                false => value.to_string(),
            };
            let messages = match cached {
                Some(cached) => json!({"input_tokens": rest, "cache_read_input_tokens": cached, "output_tokens": made}),
                None => json!({"input_tokens": rest, "output_tokens": made}),
            };
            match kind {
                0 => (Api::OpenAi, print(json!({"id": start, "choices": [{"message": {"content": tokens}}], "usage": chat}))),
                1 => (
                    Api::OpenAi,
                    events(None, &|text| json!({"choices": [{"delta": {"content": text}}], "usage": null}), json!({"choices": [], "usage": chat})) + "data: [DONE]\n\n",
                ),
                2 => {
                    let usage = json!({"input_tokens": prompt, "input_tokens_details": details, "output_tokens": made});
                    let token = |text: &str| json!({"type": "response.output_text.delta", "delta": text});
                    (Api::OpenAi, events(None, &token, json!({"response": {"output": tokens, "usage": usage}})))
                }
                3 => {
                    let meta = |made: u64| json!({"id": start, "finish_reason": {"matched": start}, "prompt_tokens": prompt, "completion_tokens": made, "cached_tokens": cached});
                    let token = |text: &str| json!({"text": text, "meta_info": meta(1)});
                    (Api::OpenAi, events(None, &token, json!({"text": start, "meta_info": meta(made)})))
                }
                4 => (
                    Api::OpenAi,
                    print(json!({"choices": [{"text": start}], "usage": {"prompt_tokens": prompt, "completion_tokens": made}, "timings": {"prompt_n": rest, "cache_n": cached, "predicted_n": made}})),
                ),
                5 => (Api::Anthropic, print(json!({"content": [{"text": start}], "usage": messages}))),
                _ => {
                    let first = json!({"message": {"model": start, "usage": messages}});
                    let token = |text: &str| json!({"delta": {"text": text}});
                    (Api::Anthropic, events(Some(first), &token, json!({"usage": {"output_tokens": made}})))
                }
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_full_parser_reads_the_same((api, answer) in answer(), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6)) {
        let expected = naive(api, &answer);
        prop_assert_eq!(whole(api, answer.as_bytes()), expected, "{}", answer);
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(answer.len())).collect();
        at.extend([0, answer.len()]);
        at.sort_unstable();
        let mut scan = UsageScan::new(api);
        at.windows(2).for_each(|cut| scan.feed(&answer.as_bytes()[cut[0]..cut[1]]));
        prop_assert_eq!(scan.finish(), expected, "{} cut at {:?}", answer, at);
    }

    #[test]
    fn any_bytes_in_any_pieces_give_the_same(
        parts in proptest::collection::vec(
            prop_oneof![
                Just(b"\"usage\"".to_vec()), Just(b"\"usage\":{".to_vec()), Just(b"\"timings\":{".to_vec()),
                Just(b"\"prompt_tokens\":".to_vec()), Just(b"\"cache_n\":3,".to_vec()), Just(b"12".to_vec()),
                Just(b"\r\n".to_vec()), Just(b"1f\r\n".to_vec()), Just(b"\"".to_vec()), Just(b"\\".to_vec()),
                Just(b"}".to_vec()), Just(b"{".to_vec()), Just(b"[".to_vec()), Just(b",".to_vec()), Just(b":".to_vec()),
                Just(b"\"prompt_tokens_details\":{\"cached_tokens\":".to_vec()), proptest::collection::vec(any::<u8>(), 0..4),
            ],
            0..40,
        ),
        sizes in proptest::collection::vec(1..9usize, 1..20),
    ) {
        let bytes = parts.concat();
        let expected = whole(Api::OpenAi, &bytes);
        let mut scan = UsageScan::new(Api::OpenAi);
        let mut rest = &bytes[..];
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, behind) = rest.split_at(rest.len().min(*size));
            scan.feed(piece);
            rest = behind;
        }
        prop_assert_eq!(scan.finish(), expected, "{:?}", String::from_utf8_lossy(&bytes));
    }
}
