use super::*;

const RULES: PromptRules = PromptRules { block_bytes: 64, seed: 7 };

fn blocks_with(rules: &PromptRules, endpoint: Endpoint, body: &str) -> Vec<u64> {
    let mut prompt = Prompt::default();
    let reading = read_prompt(endpoint, body.as_bytes(), true, rules, &mut prompt);
    assert!(reading.complete, "{body}");
    prompt.blocks
}

fn blocks(endpoint: Endpoint, body: &str) -> Vec<u64> {
    blocks_with(&RULES, endpoint, body)
}

fn reading(endpoint: Endpoint, body: &str) -> Reading<'_> {
    read_prompt(endpoint, body.as_bytes(), true, &RULES, &mut Prompt::default())
}

/// Leading blocks that both have.
fn shared(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn text(mark: &str, bytes: usize) -> String {
    mark.chars().cycle().take(bytes).collect()
}

#[test]
fn a_prompt_is_cut_at_multiples_of_the_block_and_its_rest_does_not_count() {
    for (bytes, count) in [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2), (6400, 100)] {
        for prompt in [format!("\"{}\"", text("ab", bytes)), format!("[\"{}\"]", text("ab", bytes))] {
            let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            assert_eq!(blocks(Endpoint::Completions, &body).len(), count, "{bytes}");
            let reading = reading(Endpoint::Completions, &body);
            assert_eq!((reading.prompt_bytes, reading.has_prompt), (bytes as u64, true));
        }
    }
    let body = format!(r#"{{"prompt":"{}"}}"#, text("ab", 65_536));
    for (block_bytes, count) in
        [(0, 1024), (64, 1024), (100, 655), (256, 256), (300, 218), (1000, 65), (65_536, 1), (u32::MAX, 1)]
    {
        let rules = PromptRules { block_bytes, ..RULES };
        assert_eq!(blocks_with(&rules, Endpoint::Completions, &body).len(), count, "{block_bytes}");
    }
}

#[test]
fn a_longer_conversation_begins_with_the_blocks_of_the_shorter() {
    let system = text("You are kind. ", 1000);
    let turn = |rest: &str| {
        format!(
            r#"{{"model":"m","messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{}"}}{rest}]}}"#,
            text("question ", 500)
        )
    };
    let first = blocks(Endpoint::Chat, &turn(""));
    let answer = format!(
        r#",{{"role":"assistant","content":"{}"}},{{"role":"user","content":"more"}}"#,
        text("z", 200)
    );
    let second = blocks(Endpoint::Chat, &turn(&answer));
    assert_eq!(first.len(), 23);
    assert!(second.len() > first.len());
    assert_eq!(shared(&first, &second), first.len());
    // Another system text: nothing in common. Another question: only what stands before it.
    let other = turn("").replace("You are kind", "You are rude");
    assert_eq!(shared(&first, &blocks(Endpoint::Chat, &other)), 0);
    let other = turn("").replace("question", "quastion");
    assert_eq!(shared(&first, &blocks(Endpoint::Chat, &other)), 15);
}

#[test]
fn key_order_and_white_space_do_not_matter() {
    let long = text("long text ", 300);
    let plain = format!(
        r#"{{"model":"m","tools":[{{"type":"function","function":{{"name":"f","parameters":{{"b":{{"type":"x y"}},"a":[1,2]}}}}}}],"messages":[{{"role":"user","name":"n","content":"{long}"}},{{"role":"assistant","content":null,"tool_calls":[{{"id":"c1","function":{{"name":"f","arguments":"{{}}"}}}}]}}]}}"#
    );
    let shuffled = format!(
        r#" {{ "messages" : [ {{ "content" : "{long}", "name":"n","role":"user"}} , {{"tool_calls":[{{"function":{{"arguments":"{{}}","name":"f"}},"id":"c1","type":"function"}}],"role":"assistant"}} ],
        "tools":[ {{"function":{{"parameters": {{ "b" : {{"type": "x y"}}, "a":	[1, 2]}},"name":"f"}},"type":"function"}} ],"model":"m" }} "#
    );
    let expected = blocks(Endpoint::Chat, &plain);
    assert!(expected.len() >= 5);
    assert_eq!(blocks(Endpoint::Chat, &shuffled), expected);
    // What the caller owns is rendered in its own order.
    let reordered = plain.replace(r#""b":{"type":"x y"},"a":[1,2]"#, r#""a":[1,2],"b":{"type":"x y"}"#);
    assert_eq!(shared(&blocks(Endpoint::Chat, &reordered), &expected), 0);
}

#[test]
fn borders_and_roles_matter() {
    let tail = text("t", 64);
    let chat = |messages: &[(&str, &str)]| {
        let messages: Vec<String> = messages
            .iter()
            .map(|(role, content)| format!(r#"{{"role":"{role}","content":"{content}"}}"#))
            .collect();
        blocks(
            Endpoint::Chat,
            &format!(r#"{{"messages":[{},{{"role":"user","content":"{tail}"}}]}}"#, messages.join(",")),
        )
    };
    let all = [
        chat(&[("user", "ab"), ("user", "c")]),
        chat(&[("user", "a"), ("user", "bc")]),
        chat(&[("user", "abc"), ("user", "")]),
        chat(&[("user", "abc")]),
        chat(&[("system", "ab"), ("user", "c")]),
        chat(&[("user", "ab"), ("assistant", "c")]),
    ];
    for (index, one) in all.iter().enumerate() {
        assert!(!one.is_empty());
        for other in &all[index + 1..] {
            assert_ne!(one[0], other[0]);
        }
    }
}

#[test]
fn what_moves_from_turn_to_turn_is_no_part_of_the_prompt() {
    let long = text("long text ", 300);
    let plain = blocks(
        Endpoint::Messages,
        &format!(
            r#"{{"system":"{long}","messages":[{{"role":"user","content":"{long}"}},{{"role":"user","content":"x"}}]}}"#
        ),
    );
    assert_eq!(plain.len(), 9);
    let marked = blocks(
        Endpoint::Messages,
        &format!(
            r#"{{"tools":[],"system":[{{"type":"text","text":"{long}","cache_control":{{"type":"ephemeral"}}}}],"messages":[{{"role":"user","content":[{{"cache_control":{{"type":"ephemeral"}},"type":"text","text":"{long}"}}]}},{{"role":"user","content":[{{"type":"text","text":"x"}}]}}]}}"#
        ),
    );
    assert_eq!(marked, plain);
    // Responses: a string is a message of the user; ids and states of items are the server's.
    let string = blocks(Endpoint::Responses, &format!(r#"{{"instructions":"{long}","input":"{long}"}}"#));
    let items = blocks(
        Endpoint::Responses,
        &format!(
            r#"{{"instructions":"{long}","input":[{{"type":"message","id":"msg_1","status":"completed","role":"user","content":[{{"type":"input_text","text":"{long}"}}]}}]}}"#
        ),
    );
    assert_eq!(string.len(), 9);
    assert_eq!(items, string);
}

#[test]
fn every_part_that_renders_counts() {
    // Each body differs from the first in one thing.
    let base = r#"{"model":"m","tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}],"messages":[{"role":"user","content":[{"type":"text","text":"look"},{"type":"image_url","image_url":{"url":"https://h/1.png"}}]},{"role":"assistant","reasoning_content":"why","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"c","content":"result"},{"role":"user","content":"PAD"}]}"#;
    let base = base.replace("PAD", &text("p", 64));
    let reference = *blocks(Endpoint::Chat, &base).last().unwrap();
    for (from, to) in [
        (r#""model":"m""#, r#""model":"n""#),
        (r#""name":"f","description""#, r#""name":"g","description""#),
        (r#""description":"d""#, r#""description":"e""#),
        (r#"{"type":"object"}"#, r#"{"type":"string"}"#),
        ("look", "Look"),
        ("1.png", "2.png"),
        ("why", "who"),
        (r#""id":"c""#, r#""id":"d""#),
        (r#"\"a\":1"#, r#"\"a\":2"#),
        (r#""tool_call_id":"c""#, r#""tool_call_id":"d""#),
        ("result", "resulT"),
        (r#"{"model""#, r#"{"cache_salt":"s","model""#),
        (r#"{"model""#, r#"{"lora_path":"s","model""#),
        (r#"{"model""#, r#"{"lora_request":{"a": 1},"model""#),
        (r#"{"model""#, r#"{"extra_key":"s","model""#),
        (r#""role":"tool""#, r#""role":"fool""#),
    ] {
        let changed = base.replacen(from, to, 1);
        assert_ne!(changed, base, "{from}");
        assert_ne!(*blocks(Endpoint::Chat, &changed).last().unwrap(), reference, "{from} -> {to}");
    }
    // And these do not.
    for (from, to) in [
        (r#"{"model""#, r#"{"temperature":0.5,"cache_salt":null,"metadata":{"a":[]},"model""#),
        (r#""type":"text","text""#, r#""text""#),
        (r#""name":"f","description""#, r#""name":"x","name":"f","description""#),
        (r#"{"model":"m","#, r#"{"model":"x","messages":[{"role":"user","content":"no"}],"model":"m","#),
        (r#""role":"tool""#, r#""content":"other","role":"fool","role":"tool""#),
    ] {
        let changed = base.replacen(from, to, 1);
        assert_ne!(changed, base, "{from}");
        assert_eq!(*blocks(Endpoint::Chat, &changed).last().unwrap(), reference, "{from} -> {to}");
    }
}

#[test]
fn salts_and_adapters_are_kept_apart_from_each_other() {
    let long = text("long text ", 300);
    let variants = [
        r#""model":"ab""#,
        r#""model":"a","lora_path":"b""#,
        r#""model":"a","cache_salt":"b""#,
        r#""model":"a","extra_key":"b""#,
        r#""lora_path":"ab""#,
        r#""model":"""#,
        r#""stream":true"#,
    ];
    let all: Vec<u64> = variants
        .iter()
        .map(|seed| blocks(Endpoint::Completions, &format!(r#"{{"prompt":"{long}",{seed}}}"#))[0])
        .collect();
    for (index, one) in all.iter().enumerate() {
        assert!(!all[index + 1..].contains(one), "{}", variants[index]);
    }
    let other = PromptRules { seed: 8, ..RULES };
    let body = format!(r#"{{"prompt":"{long}"}}"#);
    assert_ne!(blocks_with(&other, Endpoint::Completions, &body)[0], blocks(Endpoint::Completions, &body)[0]);
}

#[test]
fn token_ids_count_as_themselves() {
    let ids: Vec<String> = (0..100).map(|id| (id * 40_000_000_u64).to_string()).collect();
    let flat = format!(r#"{{"prompt":[{}]}}"#, ids.join(","));
    let found = reading(Endpoint::Completions, &flat);
    assert_eq!((found.token_ids, found.prompt_bytes, found.has_prompt), (100, 0, true));
    let expected = blocks(Endpoint::Completions, &flat);
    assert_eq!(expected.len(), 6, "64 bytes are 16 token ids");
    for same in [
        format!(r#"{{"prompt":[[{}]]}}"#, ids.join(",")),
        format!("{{\"prompt\":[ [{}\n]]}}", ids.join(" ,\t")),
    ] {
        assert_eq!(blocks(Endpoint::Completions, &same), expected);
    }
    for (endpoint, key) in [
        (Endpoint::Generate, "input_ids"),
        (Endpoint::Embeddings, "input"),
        (Endpoint::Other, "token_ids"),
        (Endpoint::Other, "prompt_token_ids"),
    ] {
        assert_eq!(blocks(endpoint, &flat.replace("prompt", key)), expected, "{key}");
    }
    for bad in ["[1,-2]", "[1,2.5]", "[4294967296]", "[99999999999999999999999]", "[1e3]", "[1 2]"] {
        let body = format!(r#"{{"model":"m","prompt":{bad}}}"#);
        let mut prompt = Prompt::default();
        let found = read_prompt(Endpoint::Completions, body.as_bytes(), true, &RULES, &mut prompt);
        assert_eq!((found.has_prompt, found.token_ids, prompt.blocks.len()), (false, 0, 0), "{bad}");
        assert!(found.complete && found.model.is_some(), "the rest is known all the same");
    }
    // llama.cpp's mixed prompts, and several prompts.
    let mixed = reading(Endpoint::Completions, r#"{"prompt":[12,34,"string",56,78]}"#);
    assert_eq!((mixed.token_ids, mixed.prompt_bytes), (4, 6));
}

#[test]
fn each_endpoint_reads_its_own_keys() {
    let long = text("long text ", 300);
    let has = |endpoint, body: &str| {
        let body = body.replace("LONG", &long);
        let count = blocks(endpoint, &body).len();
        assert_eq!(reading(endpoint, &body).has_prompt, count > 0);
        count > 0
    };
    for (endpoint, body) in [
        (Endpoint::Chat, r#"{"messages":[{"role":"user","content":"LONG"}]}"#),
        (Endpoint::Completions, r#"{"prompt":"LONG"}"#),
        (Endpoint::Responses, r#"{"input":"LONG"}"#),
        (Endpoint::Embeddings, r#"{"input":["LONG","b"]}"#),
        (Endpoint::Messages, r#"{"messages":[{"role":"user","content":[{"text":"LONG"}]}]}"#),
        (Endpoint::CountTokens, r#"{"system":"LONG"}"#),
        (Endpoint::Rerank, r#"{"query":"q","documents":["LONG",{"text":"b"}]}"#),
        (Endpoint::Generate, r#"{"text":"LONG"}"#),
        (Endpoint::Generate, r#"{"text":["LONG","b"]}"#),
    ] {
        assert!(has(endpoint, body), "{body}");
        assert!(has(Endpoint::Other, body), "an unknown path reads them all: {body}");
        assert!(!has(Endpoint::Models, body), "{body}");
    }
    assert!(!has(Endpoint::Responses, r#"{"text":{"format":{"type":"LONG"}},"prompt":{"id":"LONG"}}"#));
    assert!(!has(Endpoint::Chat, r#"{"input":"LONG","prompt":"LONG","system":"LONG"}"#));
    assert!(!has(Endpoint::Other, r#"{"x":{"messages":"LONG"},"y":"LONG","text":{"a":"LONG"}}"#));
    assert!(has(Endpoint::Chat, r#"{"m\u0065ssages":[{"r\u006fle":"user","content":"LONG"}]}"#));
}

#[test]
fn long_media_enter_as_a_digest() {
    let part = |data: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{data}"}}}},{{"type":"text","text":"{}"}}]}}]}}"#,
            text("what is this? ", 200)
        )
    };
    let data = text("iVBORw0KGgo", 100_000);
    let (one, other) = (part(&data), part(&data.replacen('o', "p", 1)));
    let found = reading(Endpoint::Chat, &one);
    assert!(found.prompt_bytes < 300, "{}", found.prompt_bytes);
    assert_eq!(blocks(Endpoint::Chat, &one).len(), 3);
    assert_ne!(blocks(Endpoint::Chat, &one)[0], blocks(Endpoint::Chat, &other)[0]);
    let longer = part(&format!("{data}i"));
    assert_ne!(blocks(Endpoint::Chat, &one)[0], blocks(Endpoint::Chat, &longer)[0]);
    let anthropic = format!(
        r#"{{"messages":[{{"role":"user","content":[{{"type":"image","source":{{"type":"base64","media_type":"image/png","data":"{data}"}}}},{{"type":"tool_result","tool_use_id":"t","content":[{{"type":"text","text":"x"}}]}}]}}]}}"#
    );
    assert!((1..300).contains(&reading(Endpoint::Messages, &anthropic).prompt_bytes));
    let native = format!(r#"{{"text":"{}","image_data":["{data}"]}}"#, text("a", 200));
    assert_eq!(blocks(Endpoint::Generate, &native).len(), 3);
}

#[test]
fn affinity_ids_have_an_order_and_a_limit() {
    let id = |body: &str| {
        reading(Endpoint::Responses, body).affinity_id.map(|id| String::from_utf8(id.into_owned()).unwrap())
    };
    let all = r#"{"user":"u","conversation":{"a":[{"id":"x"}],"id":"c"},"prompt_cache_key":"k"}"#;
    assert_eq!(id(all).as_deref(), Some("k"));
    assert_eq!(id(&all.replace("prompt_cache_key", "x")).as_deref(), Some("c"));
    assert_eq!(id(r#"{"user":"u","conversation":"conv_1"}"#).as_deref(), Some("conv_1"));
    assert_eq!(id(r#"{"user":"u\u00e9\n","conversation":{}}"#).as_deref(), Some("u\u{e9}\n"));
    assert_eq!(id(r#"{"user":"u","user":"v"}"#).as_deref(), Some("v"));
    assert_eq!(id(r#"{"user":"u","user":null}"#), None);
    assert_eq!(id(r#"{"user":"u","prompt_cache_key":""}"#).as_deref(), Some("u"));
    assert_eq!(id(r#"{"user":"u","prompt_cache_key":"\ud800"}"#).as_deref(), Some("u"));
    assert_eq!(id(r#"{"user":{"id":"u"}}"#), None);
    let max = text("k", AFFINITY_ID_BYTES_MAX);
    assert_eq!(id(&format!(r#"{{"user":"u","prompt_cache_key":"{max}"}}"#)), Some(max.clone()));
    assert_eq!(id(&format!(r#"{{"user":"u","prompt_cache_key":"{max}k"}}"#)).as_deref(), Some("u"));
}

#[test]
fn what_cannot_be_read_has_no_blocks() {
    let long = text("long text ", 300);
    let mut prompt = Prompt::default();
    for broken in
        ["", "{", "[]", "null", "x", r#"{"prompt":"LONG""#, r#"{"prompt":"LONG"}}"#, r#"{"prompt":"LONG","#]
    {
        let body = broken.replace("LONG", &long);
        let found = read_prompt(Endpoint::Completions, body.as_bytes(), true, &RULES, &mut prompt);
        assert_eq!((found, prompt.blocks.len()), (Reading::default(), 0), "{broken}");
    }
    // Inside a prompt: no blocks, but the rest is as `peek` has it.
    for broken in [
        r#"[{"role":"user","content":"LONG"]}]"#,
        r#"[{"role":"user" "content":"LONG"}]"#,
        r#"[{"role":"user","content":"LONG"},]"#,
        r#"[{"role":"user","content":"LONG"}{}]"#,
        r#"[{"role" "content":"LONG"}]"#,
    ] {
        let body = format!(r#"{{"messages":{},"model":"m","stream":true}}"#, broken.replace("LONG", &long));
        let found = read_prompt(Endpoint::Chat, body.as_bytes(), true, &RULES, &mut prompt);
        let peeked = super::super::peek(body.as_bytes());
        assert_eq!(
            (found.model, found.stream, found.complete),
            (peeked.model, peeked.stream, peeked.complete)
        );
        assert_eq!((found.has_prompt, prompt.blocks.len()), (false, 0), "{broken}");
    }
}

#[test]
fn a_body_in_part_has_the_first_blocks_of_the_whole() {
    let long = text("long text ", 300);
    let body = format!(
        r#"{{"model":"m","tools":[{{"type":"function","function":{{"name":"f","parameters":{{"a": "{long}"}}}}}}],"messages":[{{"role":"user","content":"{long}"}},{{"role":"assistant","content":[{{"type":"text","text":"{long}"}}],"tool_calls":[{{"id":"a","function":{{"name":"b","arguments":"{long}"}}}}]}},{{"content":"{long}","role":"user"}}]}}"#
    );
    let whole = blocks(Endpoint::Chat, &body);
    let (mut prompt, mut most) = (Prompt::default(), 0);
    for end in 0..body.len() {
        let found = read_prompt(Endpoint::Chat, &body.as_bytes()[..end], false, &RULES, &mut prompt);
        assert!(!found.complete);
        // Before the tools' name is known to be all there, what is in hand of them may be less than what stands before.
        assert_eq!(shared(&prompt.blocks, &whole), prompt.blocks.len(), "{end} of {}", body.len());
        most = most.max(prompt.blocks.len());
    }
    assert!(most + 5 >= whole.len(), "{most} of {}", whole.len());
}

#[test]
fn depth_ends_in_a_value_that_is_not_looked_into() {
    let deep = |depth: usize, mark: &str| {
        let parts = r#"{"content":["#.repeat(depth) + &format!("\"{mark}\"") + &"]}".repeat(depth);
        format!(
            r#"{{"messages":[{{"role":"user","content":[{parts}]}},{{"role":"user","content":"{}"}}]}}"#,
            text("x", 64)
        )
    };
    for depth in [1, 7, 8, 9, 50, 100_000] {
        let (a, b) = (deep(depth, "a"), deep(depth, "b"));
        let (a, b) = (blocks(Endpoint::Chat, &a), blocks(Endpoint::Chat, &b));
        assert!(!a.is_empty() && a.last() != b.last(), "{depth}");
    }
    let lists = format!(r#"{{"prompt":{}{}}}"#, "[".repeat(1 << 20), "]".repeat(1 << 20));
    assert!(blocks(Endpoint::Completions, &lists).len() > 100, "beyond the depth it is bytes like any");
}
