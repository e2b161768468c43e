//! Anthropic's Messages API: the `message` object and the events that build it.
//!
//! *Invariant*: `input_tokens` leaves out what came from the cache, which `cache_read_input_tokens` counts; their sum
//! is the prompt.
//! *Source*: the Anthropic API reference, "Messages" and "Streaming Messages".

use serde_json::{Value, json};

use super::wire::{Events, Finish, Usage, Wire};

/// One message with one text block.
pub struct Message {
    id: String,
    model: String,
}

impl Message {
    pub fn new(number: u64, model: &str) -> Self {
        Message { id: format!("msg_{number:016x}"), model: model.to_owned() }
    }

    fn usage(usage: Usage) -> Value {
        json!({
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        })
    }

    fn object(&self, content: Value, stop_reason: Value, usage: Usage) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": stop_reason, "stop_sequence": null, "usage": Message::usage(usage),
        })
    }

    fn stop_reason(finish: Finish) -> &'static str {
        match finish {
            Finish::Stop => "end_turn",
            Finish::Length => "max_tokens",
        }
    }
}

impl Wire for Message {
    fn begin(&mut self, events: &mut Events, usage: Usage) {
        let message = self.object(json!([]), Value::Null, usage);
        events.named("message_start", &json!({"type": "message_start", "message": message}).to_string());
        events.named(
            "content_block_start",
            r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
        );
        events.named("ping", r#"{"type":"ping"}"#);
    }

    fn token(&mut self, events: &mut Events, text: &str) {
        events.push(|out| {
            for part in [
                r#"event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""#,
                text,
                "\"}}\n\n",
            ] {
                out.extend_from_slice(part.as_bytes());
            }
        });
    }

    fn end(&mut self, events: &mut Events, _text: &str, finish: Finish, usage: Usage) {
        events.named("content_block_stop", r#"{"type":"content_block_stop","index":0}"#);
        let delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": Message::stop_reason(finish), "stop_sequence": null},
            "usage": Message::usage(usage),
        });
        events.named("message_delta", &delta.to_string());
        events.named("message_stop", r#"{"type":"message_stop"}"#);
    }

    fn whole(&mut self, text: &str, finish: Finish, usage: Usage) -> Vec<u8> {
        let content = json!([{"type": "text", "text": text}]);
        self.object(content, json!(Message::stop_reason(finish)), usage).to_string().into_bytes()
    }
}
