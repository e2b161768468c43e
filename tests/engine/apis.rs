//! Each API, streamed and not, in its own shape.

use super::*;

#[test]
fn chat_streamed_and_whole_say_the_same() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let whole = post(&mut client, CHAT, &chat("hello", json!({"max_tokens": 5}))).json().expect("json");
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    let said = whole["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    assert_eq!(said.len(), 20, "four bytes a token");
    assert_eq!(whole["usage"]["completion_tokens"], 5);

    let body =
        chat("hello", json!({"max_tokens": 5, "stream": true, "stream_options": {"include_usage": true}}));
    let events = events(&post(&mut client, CHAT, &body));
    assert_eq!(events[0].1["choices"][0]["delta"]["role"], "assistant");
    let streamed: String =
        events.iter().filter_map(|(_, data)| data["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, said);
    let count = events.len();
    assert_eq!(count, 1 + 5 + 1 + 1 + 1, "role, tokens, end, usage, done");
    assert_eq!(events[count - 3].1["choices"][0]["finish_reason"], "length");
    assert_eq!(events[count - 2].1["choices"], json!([]));
    assert_eq!(events[count - 2].1["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);
    assert_eq!(events[count - 1].1, json!("[DONE]"));
    assert!(events[..count - 1].iter().all(|(_, data)| data["object"] == "chat.completion.chunk"));

    let body = chat("hello", json!({"max_tokens": 5, "stream": true}));
    assert_eq!(super::events(&post(&mut client, CHAT, &body)).len(), count - 1, "usage only when asked for");
}

#[test]
fn limits_seeds_and_natural_ends() {
    let engine = engine(EngineOptions { output_tokens: 10, ..fast() });
    let mut client = client(&engine);
    let mut ask = |more: Value| {
        let value = post(&mut client, CHAT, &chat("hello", more)).json().expect("json");
        let reason = value["choices"][0]["finish_reason"].as_str().expect("a reason").to_owned();
        let text = value["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
        (value["usage"]["completion_tokens"].as_u64().expect("a count"), reason, text)
    };
    let counted = |(count, reason, _): (u64, String, String)| (count, reason);
    assert_eq!(counted(ask(json!({}))), (10, "stop".into()));
    assert_eq!(counted(ask(json!({"max_completion_tokens": 3, "max_tokens": 9}))), (3, "length".into()));
    assert_eq!(counted(ask(json!({"max_tokens": 30, "ignore_eos": true}))), (30, "length".into()));
    assert_eq!(counted(ask(json!({"max_tokens": 30, "min_tokens": 20}))), (20, "stop".into()));
    assert_ne!(ask(json!({"seed": 1})).2, ask(json!({"seed": 2})).2);
    assert_eq!(ask(json!({"seed": 1})).2, ask(json!({"seed": 1})).2);
}

#[test]
fn engines_of_one_seed_answer_alike() {
    let (a, b, c) = (engine(fast()), engine(fast()), engine(EngineOptions { seed: 2, ..fast() }));
    let said = |engine: &EngineHandle| {
        let value =
            post(&mut client(engine), "/v1/completions", &json!({"prompt": "hi"})).json().expect("json");
        value["choices"][0]["text"].clone()
    };
    assert_eq!(said(&a), said(&b));
    assert_ne!(said(&a), said(&c));
}

#[test]
fn completions_streamed_and_whole_say_the_same() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let whole = post(&mut client, "/v1/completions", &json!({"prompt": "one", "max_tokens": 4}))
        .json()
        .expect("json");
    assert_eq!(whole["object"], "text_completion");
    let body = json!({"prompt": "one", "max_tokens": 4, "stream": true});
    let events = events(&post(&mut client, "/v1/completions", &body));
    let streamed: String =
        events.iter().filter_map(|(_, data)| data["choices"][0]["text"].as_str()).collect();
    assert_eq!(json!(streamed), whole["choices"][0]["text"]);
    assert_eq!(events[events.len() - 2].1["choices"][0]["finish_reason"], "length");
}

#[test]
fn responses_build_the_object_that_the_whole_answer_is() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let body = json!({"input": "hello", "instructions": "be brief"});
    let whole = post(&mut client, "/v1/responses", &body).json().expect("json");
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    let text = &whole["output"][0]["content"][0]["text"];

    let mut body = body;
    body["stream"] = json!(true);
    let events = events(&post(&mut client, "/v1/responses", &body));
    for (at, (name, data)) in events.iter().enumerate() {
        assert_eq!(data["type"].as_str(), Some(name.as_str()));
        assert_eq!(data["sequence_number"], json!(at));
    }
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert!(names[4..names.len() - 4].iter().all(|name| *name == "response.output_text.delta"));
    assert_eq!(names.len(), 4 + 64 + 4);
    assert_eq!(
        names[names.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    let deltas: String = events.iter().filter_map(|(_, data)| data["delta"].as_str()).collect();
    assert_eq!(&json!(deltas), text);
    let last = &events.last().expect("events").1["response"];
    assert_eq!(&last["output"][0]["content"][0]["text"], text);
    assert_eq!(last["usage"]["total_tokens"], whole["usage"]["total_tokens"]);

    body["max_output_tokens"] = json!(3);
    let cut = super::events(&post(&mut client, "/v1/responses", &body));
    let (name, data) = cut.last().expect("events");
    assert_eq!(name, "response.incomplete");
    assert_eq!(data["response"]["incomplete_details"]["reason"], "max_output_tokens");
}

#[test]
fn messages_build_the_object_that_the_whole_answer_is() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let mut body = chat(&"hello ".repeat(40), json!({"max_tokens": 6, "system": "be brief"}));
    let whole = post(&mut client, "/v1/messages", &body).json().expect("json");
    assert_eq!((&whole["type"], &whole["stop_reason"]), (&json!("message"), &json!("max_tokens")));

    body["stream"] = json!(true);
    let events = events(&post(&mut client, "/v1/messages", &body));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..3], ["message_start", "content_block_start", "ping"]);
    assert!(names[3..9].iter().all(|name| *name == "content_block_delta"));
    assert_eq!(names[9..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(json!(text), whole["content"][0]["text"]);
    let start = &events[0].1["message"]["usage"];
    let sum = start["input_tokens"].as_u64().expect("a count")
        + start["cache_read_input_tokens"].as_u64().expect("a count");
    assert_eq!(json!(sum), whole["usage"]["input_tokens"], "the first time nothing was cached, now most was");
    assert!(start["cache_read_input_tokens"].as_u64() > Some(0));
    assert_eq!(events[10].1["usage"]["output_tokens"], 6);

    let counted = post(
        &mut client,
        "/v1/messages/count_tokens",
        &chat(&"hello ".repeat(40), json!({"system": "be brief"})),
    );
    assert_eq!(counted.json().expect("json")["input_tokens"], json!(sum));
}

#[test]
fn embeddings_rerank_tokenize_and_models() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let value = post(&mut client, "/v1/embeddings", &json!({"input": ["a", "b"]})).json().expect("json");
    assert_eq!(value["data"][1]["embedding"].as_array().map(Vec::len), Some(64));
    assert_eq!(value["usage"], json!({"prompt_tokens": 2, "total_tokens": 2}));
    let body = json!({"input": "a", "encoding_format": "base64", "dimensions": 3});
    let value = post(&mut client, "/v1/embeddings", &body).json().expect("json");
    assert_eq!(value["data"][0]["embedding"].as_str().map(str::len), Some(16), "twelve bytes");
    let body = json!({"query": "q", "documents": ["one", "two", "three"], "top_n": 2});
    let value = post(&mut client, "/rerank", &body).json().expect("json");
    let scores: Vec<f64> =
        (0..2).map(|at| value["results"][at]["relevance_score"].as_f64().expect("a score")).collect();
    assert!(value["results"].as_array().map(Vec::len) == Some(2) && scores[0] >= scores[1]);
    let value = post(&mut client, "/tokenize", &json!({"prompt": "12345"})).json().expect("json");
    assert_eq!(value["count"], 2);
    let value = client.get("/v1/models").expect("answered").json().expect("json");
    assert_eq!(
        (&value["data"][0]["id"], &value["data"][0]["object"]),
        (&json!("simulated"), &json!("model"))
    );
}

#[test]
fn errors_come_in_the_api_s_own_shape() {
    let engine = engine(EngineOptions { context_tokens_max: 100, ..fast() });
    let mut client = client(&engine);
    for (path, body, status, kind) in [
        (
            CHAT,
            json!({"model": "nope", "messages": [{"role": "user", "content": "x"}]}),
            404,
            "NotFoundError",
        ),
        (CHAT, chat(&"long".repeat(200), json!({})), 400, "BadRequestError"),
        (CHAT, json!({"messages": []}), 400, "BadRequestError"),
        ("/v1/embeddings", json!({"input": "long".repeat(200)}), 400, "BadRequestError"),
        ("/v1/messages", chat("x", json!({"model": "nope", "max_tokens": 1})), 404, "not_found_error"),
        ("/v1/messages", chat("x", json!({"max_tokens": 1000})), 400, "invalid_request_error"),
        ("/v1/messages", chat("x", json!({})), 400, "invalid_request_error"),
    ] {
        let answer = post(&mut client, path, &body);
        let value = answer.json().expect("json");
        assert_eq!(answer.status(), status, "{path} {body}: {value}");
        assert_eq!(value["error"]["type"], kind, "{path}: {value}");
        assert!(value["error"]["message"].as_str().is_some_and(|text| text.len() > 10));
        assert_eq!(value["type"] == "error", path == "/v1/messages");
    }
    let stats = engine.stats();
    assert_eq!((stats.rejected, stats.completed, stats.requests), (7, 0, 7));
}

#[test]
fn sglang_s_generate_repeats_the_text_and_the_counts() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let body = |stream: bool| json!({"text": "hello there", "stream": stream, "sampling_params": {"max_new_tokens": 3}});
    let whole = post(&mut client, "/generate", &body(false)).json().expect("json");
    assert_eq!(whole["meta_info"]["prompt_tokens"], 3, "{whole}");
    assert_eq!(whole["meta_info"]["completion_tokens"], 3);
    assert_eq!(whole["meta_info"]["finish_reason"], json!({"type": "length", "length": 3}));
    let events = events(&post(&mut client, "/generate", &body(true)));
    assert_eq!(events.len(), 3 + 1 + 1, "tokens, end, done");
    let texts: Vec<&str> = events.iter().filter_map(|(_, data)| data["text"].as_str()).collect();
    assert!(texts.windows(2).all(|pair| pair[1].starts_with(pair[0])), "{texts:?}");
    assert_eq!(texts.last().copied(), whole["text"].as_str());
    assert_eq!(events[0].1["meta_info"]["completion_tokens"], 1);
    assert_eq!(events[0].1["meta_info"]["finish_reason"], Value::Null);
    assert_eq!(events[3].1["meta_info"]["finish_reason"]["type"], "length");
    let ids = json!({"input_ids": [1, 2, 3, 4, 5], "sampling_params": {"max_new_tokens": 1}});
    let value = post(&mut client, "/generate", &ids).json().expect("json");
    assert_eq!(value["meta_info"]["prompt_tokens"], 5);
    for (body, said) in [
        (json!({}), "text or input_ids"),
        (json!({"text": ["a", "b"]}), "one prompt per request, got 2"),
        (json!({"text": "a", "sampling_params": {"max_new_tokens": 0}}), "from 1 to"),
        (json!({"text": "a", "sampling_params": 1}), "expected an object"),
    ] {
        let answer = post(&mut client, "/generate", &body);
        assert_eq!(answer.status(), 400);
        assert!(answer.text().contains(said), "{}", answer.text());
    }
}

#[test]
fn vllm_s_token_endpoint_takes_and_gives_token_ids() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let path = "/inference/v1/generate";
    let body = |stream: bool| json!({"token_ids": [5, 6, 7], "stream": stream, "sampling_params": {"max_tokens": 4}});
    let whole = post(&mut client, path, &body(false)).json().expect("json");
    let ids = whole["choices"][0]["token_ids"].as_array().expect("ids").clone();
    assert_eq!((ids.len(), &whole["choices"][0]["finish_reason"]), (4, &json!("length")));
    let streamed: Vec<Value> = events(&post(&mut client, path, &body(true)))
        .iter()
        .flat_map(|(_, data)| data["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, ids);
    for (body, said) in [
        (json!({"prompt": "x"}), "token_ids: field required"),
        (json!({"token_ids": "x"}), "a non-empty array of token ids"),
        (json!({"token_ids": [-1]}), "token ids are whole numbers"),
    ] {
        let answer = post(&mut client, path, &body);
        assert_eq!(answer.status(), 400);
        assert!(answer.text().contains(said), "{}", answer.text());
    }
}

/// What the router reads from an answer as it passes is what the engine says it did, in every API, streamed and not.
#[test]
fn answers_tell_a_passing_reader_what_was_cached() {
    use ringway::proto::account::{Usage, UsageScan};
    use ringway::proto::classify::Api;

    let text = "shared prefix ".repeat(50);
    let chat_body = chat(&text, json!({"max_tokens": 3}));
    let cases: [(&str, Api, Value); 5] = [
        (CHAT, Api::OpenAi, chat_body.clone()),
        ("/v1/completions", Api::OpenAi, json!({"prompt": text, "max_tokens": 3})),
        ("/v1/responses", Api::OpenAi, json!({"input": text, "max_output_tokens": 3})),
        ("/v1/messages", Api::Anthropic, chat_body),
        ("/generate", Api::OpenAi, json!({"text": text, "sampling_params": {"max_new_tokens": 3}})),
    ];
    for (path, api, body) in cases {
        let engine = engine(fast());
        let mut client = client(&engine);
        for (round, streamed) in [false, true, false, true].into_iter().enumerate() {
            let mut body = body.clone();
            if streamed {
                body["stream"] = json!(true);
                if matches!(path, CHAT | "/v1/completions") {
                    body["stream_options"] = json!({"include_usage": true});
                }
            }
            let before = engine.stats();
            let answer = post(&mut client, path, &body);
            let after = engine.stats();
            let mut scan = UsageScan::new(api);
            answer.body.chunks(7).for_each(|piece| scan.feed(piece));
            let expected = Usage {
                prompt_tokens: Some(after.prompt_tokens - before.prompt_tokens),
                cached_tokens: Some(after.cached_tokens - before.cached_tokens),
                completion_tokens: Some(3),
            };
            assert_eq!(scan.finish(), expected, "{path}, streamed: {streamed}: {}", answer.text());
            assert_eq!(expected.cached_tokens > Some(0), round > 0, "{path}");
        }
    }
}
