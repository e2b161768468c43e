use super::*;

fn ask(endpoint: Endpoint, body: &str) -> Ask {
    parse(endpoint, body.as_bytes()).unwrap_or_else(|fault| panic!("{body}: {fault:?}"))
}

fn fault(endpoint: Endpoint, body: &str) -> String {
    let fault = parse(endpoint, body.as_bytes()).expect_err(body);
    assert_eq!(fault.status, 400, "{body}");
    fault.message
}

/// Leading tokens that two prompts share.
fn shared(a: &Ask, b: &Ask) -> usize {
    a.tokens.iter().zip(&b.tokens).take_while(|(a, b)| a == b).count()
}

#[test]
fn key_order_white_space_and_unknown_fields_do_not_matter() {
    let a =
        ask(Endpoint::Chat, r#"{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":5}"#);
    let b = ask(
        Endpoint::Chat,
        r#"{ "max_tokens" : 5, "zebra": [1], "messages": [ {"content":"hello", "role":"user"} ], "model":"m" }"#,
    );
    assert_eq!(a, b);
    assert_eq!((a.output_max, a.stream, a.model.as_deref()), (Some(5), false, Some("m")));
}

#[test]
fn the_next_turn_begins_with_the_whole_last_turn_and_its_answer() {
    let answer = "the sun and sea ";
    let first = ask(Endpoint::Chat, r#"{"messages":[{"role":"user","content":"hi!"}]}"#);
    let next = format!(
        r#"{{"messages":[{{"role":"user","content":"hi!"}},{{"role":"assistant","content":"{answer}"}},{{"role":"user","content":"more"}}]}}"#
    );
    let next = ask(Endpoint::Chat, &next);
    let mut expected = first.tokens.clone();
    tokenize(answer.as_bytes(), &mut expected);
    assert_eq!(next.tokens[..expected.len()], expected);
}

#[test]
fn a_difference_anywhere_in_the_history_shows() {
    let body = |system: &str, history: &str| {
        format!(
            r#"{{"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{history}"}},{{"role":"user","content":"end"}}]}}"#
        )
    };
    let base = ask(Endpoint::Chat, &body("you are kind", "history one"));
    assert_ne!(base.tokens, ask(Endpoint::Chat, &body("you are kind", "history two")).tokens);
    let other = ask(Endpoint::Chat, &body("you are rude", "history one"));
    assert!(shared(&base, &other) < 8);
}

#[test]
fn tools_and_system_stand_before_the_messages_wherever_they_are_written() {
    let a = ask(
        Endpoint::Messages,
        r#"{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"system":"abc","tools":[{"name":"t"}]}"#,
    );
    let b = ask(
        Endpoint::Messages,
        r#"{"tools":[{"name":"t"}],"system":[{"type":"text","text":"abc"}],"messages":[{"role":"user","content":"yyyy"}],"max_tokens":1}"#,
    );
    assert!(shared(&a, &b) > 10, "a system text as a string and as a block are the same");
}

#[test]
fn parts_and_strings_give_the_same_text() {
    let a = ask(Endpoint::Chat, r#"{"messages":[{"role":"user","content":"hello"}]}"#);
    let b =
        ask(Endpoint::Chat, r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}]}"#);
    assert_eq!(a.tokens, b.tokens);
    let c = ask(Endpoint::Responses, r#"{"input":"hello"}"#);
    let d = ask(
        Endpoint::Responses,
        r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"hello"}]}]}"#,
    );
    assert_eq!((&a.tokens, &c.tokens), (&c.tokens, &d.tokens));
}

#[test]
fn media_count_a_fixed_number_of_tokens_and_differ_by_their_data() {
    let body = |byte: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]}}"#,
            byte.repeat(50_000)
        )
    };
    let (a, b) = (ask(Endpoint::Chat, &body("A")), ask(Endpoint::Chat, &body("B")));
    assert!(a.tokens.len() < 100);
    assert_ne!(a.tokens, b.tokens);
}

#[test]
fn completions_take_text_and_token_ids() {
    assert_eq!(ask(Endpoint::Completions, r#"{"prompt":"12345678"}"#).tokens.len(), 2);
    assert_eq!(ask(Endpoint::Completions, r#"{"prompt":["12345678"]}"#).tokens.len(), 2);
    assert_eq!(ask(Endpoint::Completions, r#"{"prompt":[7,8,9]}"#).tokens, [7, 8, 9]);
    assert_eq!(ask(Endpoint::Completions, r#"{"prompt":[[7,8]]}"#).tokens, [7, 8]);
    assert_eq!(ask(Endpoint::Completions, r#"{"prompt":"x"}"#).output_max, Some(16), "the API's own default");
}

#[test]
fn embeddings_take_many_inputs() {
    let many = ask(Endpoint::Embeddings, r#"{"input":["12345678","1234"],"encoding_format":"base64"}"#);
    assert_eq!((many.input_ends, many.base64), (vec![2, 3], true));
    assert_eq!(ask(Endpoint::Embeddings, r#"{"input":[[1,2],[3]],"dimensions":4}"#).input_ends, [2, 3]);
    assert_eq!(ask(Endpoint::Embeddings, r#"{"input":[1,2]}"#).input_ends, [2]);
}

#[test]
fn models_and_salts_are_kept_apart() {
    let salts: Vec<u64> =
        [r#""model":"a""#, r#""model":"b""#, r#""model":"a","cache_salt":"s""#, r#""model":"a""#]
            .iter()
            .map(|fields| ask(Endpoint::Completions, &format!(r#"{{{fields},"prompt":"x"}}"#)).salt)
            .collect();
    assert_eq!(salts[0], salts[3]);
    assert!(salts[0] != salts[1] && salts[0] != salts[2]);
}

#[test]
fn faults_name_the_field_and_what_was_expected() {
    for (endpoint, body, said) in [
        (Endpoint::Chat, "", "not valid JSON"),
        (Endpoint::Chat, "[]", "body: expected a JSON object, got an empty array"),
        (Endpoint::Chat, "{}", "messages: field required"),
        (Endpoint::Chat, r#"{"messages":null}"#, "messages: field required"),
        (Endpoint::Chat, r#"{"messages":[]}"#, "messages: expected a non-empty array, got an empty array"),
        (Endpoint::Chat, r#"{"messages":"x"}"#, "messages: expected a non-empty array, got a string"),
        (Endpoint::Chat, r#"{"messages":[{"content":"x"}]}"#, "messages: each message needs a role"),
        (Endpoint::Chat, r#"{"messages":[{"role":"user","content":5}]}"#, "got a number"),
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":0}"#,
            "from 1 to 4294967295",
        ),
        (Endpoint::Chat, r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":-1}"#, "got -1"),
        (Endpoint::Chat, r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":"9"}"#, "got \"9\""),
        (Endpoint::Chat, r#"{"messages":[{"role":"user","content":"x"}],"n":2}"#, "expected 1, got 2"),
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":"x"}],"stream":"yes"}"#,
            "stream: expected true",
        ),
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":"x"}],"stream_options":{"include_usage":true}}"#,
            "stream_options: only allowed when stream is true",
        ),
        (Endpoint::Chat, r#"{"model":5,"messages":[]}"#, "model: expected a string, got a number"),
        (Endpoint::Completions, r#"{"prompt":["a","b"]}"#, "one prompt per request, got 2"),
        (Endpoint::Completions, r#"{"prompt":""}"#, "prompt is empty"),
        (Endpoint::Completions, r#"{"prompt":[1,-2]}"#, "token ids are whole numbers"),
        (Endpoint::Messages, r#"{"messages":[{"role":"user","content":"x"}]}"#, "max_tokens: field required"),
        (Endpoint::Responses, r#"{}"#, "input: field required"),
        (Endpoint::Embeddings, r#"{"input":[]}"#, "input: expected a non-empty string"),
        (Endpoint::Embeddings, r#"{"input":"x","encoding_format":"hex"}"#, "got \"hex\""),
        (Endpoint::Rerank, r#"{"query":"q","documents":"d"}"#, "documents: expected an array of strings"),
        (Endpoint::Tokenize, r#"{}"#, "prompt or messages"),
    ] {
        let message = fault(endpoint, body);
        assert!(message.contains(said), "{body}: {message}");
    }
}
