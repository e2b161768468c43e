//! The prefix cache as a caller sees it.

use super::*;

/// Tokens of each of the nine prompts: long enough that the last, always computed block hardly counts.
const PROMPT_TOKENS: usize = 800;

fn prompt(number: usize) -> Value {
    let text: String = (0..PROMPT_TOKENS).map(|word| format!("{:x}{:02x} ", number, word % 256)).collect();
    json!({"prompt": text, "max_tokens": 1})
}

/// Sends the prompts in `order`; answers which share of the prompt tokens came from the cache, in percent.
fn reuse(engine: &EngineHandle, order: impl Iterator<Item = usize>) -> f64 {
    let mut client = client(engine);
    let (mut cached, mut all) = (0, 0);
    for number in order {
        let usage =
            post(&mut client, "/v1/completions", &prompt(number)).json().expect("json")["usage"].take();
        cached += usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        all += usage["prompt_tokens"].as_u64().expect("a count");
    }
    cached as f64 * 100.0 / all as f64
}

/// Nine prompts in turn, five times, over room for five: least recently used always evicts what comes next.
#[test]
fn nine_prompts_in_turn_over_room_for_five_are_never_found() {
    let tokens = PROMPT_TOKENS + 1;
    let engine = engine(EngineOptions { kv_blocks: 5 * tokens.div_ceil(16), ..fast() });
    assert_eq!(reuse(&engine, (0..45).map(|turn| turn % 9)), 0.0);
    assert_eq!(engine.stats().cached_tokens, 0);
    // The same engine finds nearly everything of what fits.
    let share = reuse(&engine, (0..25).map(|turn| turn % 5));
    assert!(
        (75.0..=80.0).contains(&share),
        "{share}: all but the first round, but for each prompt's last block"
    );
    assert!(engine.stats().cached_tokens > 0);
}

/// Two engines, each asked for its own half of the prompts: 80 % is the ceiling of five rounds.
#[test]
fn nine_prompts_split_over_two_engines_are_found() {
    let tokens = PROMPT_TOKENS + 1;
    let shares: Vec<f64> = [0..5, 5..9]
        .into_iter()
        .map(|own: std::ops::Range<usize>| {
            let engine = engine(EngineOptions { kv_blocks: 5 * tokens.div_ceil(16), ..fast() });
            reuse(&engine, (0..5).flat_map(|_| own.clone()))
        })
        .collect();
    assert!(shares.iter().all(|share| (75.0..=80.0).contains(share)), "{shares:?}");
}

#[test]
fn every_api_reports_cached_tokens_in_its_own_field() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let text = "shared prefix ".repeat(50);
    let cases = [
        (
            CHAT,
            chat(&text, json!({"max_tokens": 1})),
            "/usage/prompt_tokens_details/cached_tokens",
            "/usage/prompt_tokens",
        ),
        (
            "/v1/responses",
            json!({"input": text, "cache_salt": "r"}),
            "/usage/input_tokens_details/cached_tokens",
            "/usage/input_tokens",
        ),
        (
            "/v1/messages",
            chat(&text, json!({"max_tokens": 1, "cache_salt": "m"})),
            "/usage/cache_read_input_tokens",
            "/usage/input_tokens",
        ),
    ];
    for (path, body, cached, prompt) in cases {
        let field = |value: &Value, at: &str| value.pointer(at).and_then(Value::as_u64).expect("a count");
        let first = post(&mut client, path, &body).json().expect("json");
        assert_eq!(field(&first, cached), 0, "{path}");
        let second = post(&mut client, path, &body).json().expect("json");
        let hit = field(&second, cached);
        let tokens = field(&first, prompt);
        assert_eq!(hit, (tokens - 1) / 16 * 16, "{path}: every full block but one that holds the last token");
        let expected = if path == "/v1/messages" { tokens - hit } else { tokens };
        assert_eq!(field(&second, prompt), expected, "{path}");
    }
}

#[test]
fn the_next_turn_of_a_conversation_finds_the_last_answer_too() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let mut messages = vec![json!({"role": "user", "content": "tell me a long story about the sea"})];
    let mut last_total = 0;
    for turn in 0..4 {
        let value = post(&mut client, CHAT, &json!({"messages": messages})).json().expect("json");
        let cached = value["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        if turn > 0 {
            assert!(cached + 16 > last_total, "turn {turn}: {cached} of {last_total} tokens known before");
        }
        last_total = value["usage"]["total_tokens"].as_u64().expect("a count");
        messages.push(json!({"role": "assistant", "content": value["choices"][0]["message"]["content"]}));
        messages.push(json!({"role": "user", "content": format!("go on, part {turn}")}));
    }
}

#[test]
fn models_and_salts_share_nothing() {
    let engine = engine(EngineOptions { models: vec!["a".into(), "b".into()], ..fast() });
    let mut client = client(&engine);
    let mut cached = |more: Value| {
        let mut body = chat(&"the same words ".repeat(30), json!({"max_tokens": 1}));
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let value = post(&mut client, CHAT, &body).json().expect("json");
        value["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    };
    assert_eq!(cached(json!({"model": "a"})), 0);
    assert_eq!(cached(json!({"model": "b"})), 0);
    assert_eq!(cached(json!({"model": "a", "cache_salt": "s"})), 0);
    assert!(cached(json!({"model": "a"})) > 0);
}
