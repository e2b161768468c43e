//! The engines' own ways to ask for tokens, beside the OpenAI and Anthropic APIs: SGLang's `/generate` and vLLM's
//! `/inference/v1/generate`.
//!
//! *Invariant*: SGLang's stream repeats the whole text in each event, with the counts so far; vLLM's answers hold token ids
//! only, and no counts.
//! *Source*: SGLang's native API ("generate", `meta_info`); vLLM's token-in, token-out endpoint for disaggregated serving.

use serde_json::{Value, json};

use super::text::{TOKEN_BYTES, Token};
use super::wire::{Events, Finish, Usage, Wire, quoted};

/// An answer of SGLang's `/generate`.
pub struct Generated {
    id: String,
    /// What was streamed so far; tokens need no escaping.
    text: String,
    usage: Usage,
}

impl Generated {
    pub fn new(number: u64) -> Self {
        Generated { id: format!("{number:032x}"), text: String::new(), usage: Usage::default() }
    }

    fn object(&self, text: &str, finish: Option<Finish>, usage: Usage) -> String {
        let finish = match finish {
            None => Value::Null,
            Some(Finish::Stop) => json!({"type": "stop", "matched": 2}),
            Some(Finish::Length) => json!({"type": "length", "length": usage.output_tokens}),
        };
        format!(
            r#"{{"text":"{text}","meta_info":{{"id":{},"finish_reason":{finish},"prompt_tokens":{},"weight_version":"default","completion_tokens":{},"cached_tokens":{}}}}}"#,
            quoted(&self.id),
            usage.prompt_tokens,
            usage.output_tokens,
            usage.cached_tokens,
        )
    }
}

impl Wire for Generated {
    fn begin(&mut self, _events: &mut Events, usage: Usage) {
        self.usage = usage;
    }

    fn token(&mut self, events: &mut Events, text: &str) {
        self.text.push_str(text);
        self.usage.output_tokens += 1;
        events.data(&self.object(&self.text, None, self.usage));
    }

    fn end(&mut self, events: &mut Events, text: &str, finish: Finish, usage: Usage) {
        events.data(&self.object(text, Some(finish), usage));
        events.data("[DONE]");
    }

    fn whole(&mut self, text: &str, finish: Finish, usage: Usage) -> Vec<u8> {
        self.object(text, Some(finish), usage).into_bytes()
    }
}

/// An answer of vLLM's `/inference/v1/generate`.
pub struct TokensOut {
    request_id: String,
}

impl TokensOut {
    pub fn new(number: u64) -> Self {
        TokensOut { request_id: format!("generate-tokens-{number:032x}") }
    }

    fn object(&self, text: &str, finish: Option<Finish>) -> String {
        let ids: Vec<Token> = text
            .as_bytes()
            .chunks_exact(TOKEN_BYTES)
            .map(|word| Token::from_le_bytes(word.try_into().expect("whole tokens")))
            .collect();
        json!({
            "request_id": self.request_id,
            "choices": [{
                "index": 0, "logprobs": null, "finish_reason": finish.map(Finish::name), "token_ids": ids,
            }],
            "prompt_logprobs": null,
            "kv_transfer_params": null,
        })
        .to_string()
    }
}

impl Wire for TokensOut {
    fn begin(&mut self, _events: &mut Events, _usage: Usage) {}

    fn token(&mut self, events: &mut Events, text: &str) {
        events.data(&self.object(text, None));
    }

    fn end(&mut self, events: &mut Events, _text: &str, finish: Finish, _usage: Usage) {
        events.data(&self.object("", Some(finish)));
        events.data("[DONE]");
    }

    fn whole(&mut self, text: &str, finish: Finish, _usage: Usage) -> Vec<u8> {
        self.object(text, Some(finish)).into_bytes()
    }
}
