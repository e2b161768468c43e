//! OpenAI's Responses API: the `response` object and the events that build it.
//!
//! *Source*: the OpenAI API reference, "Responses" and its streaming events.

use serde_json::{Value, json};

use super::wire::{Events, Finish, Usage, Wire};

/// One response with one message of one text part.
pub struct Response {
    id: String,
    item_id: String,
    created: u64,
    model: String,
    output_max: Option<u32>,
    /// Number of the next event.
    sequence: u64,
    /// A delta event between its number and its text.
    delta: String,
}

impl Response {
    pub fn new(number: u64, created: u64, model: &str, output_max: Option<u32>) -> Self {
        let item_id = format!("msg_{number:016x}");
        Response {
            id: format!("resp_{number:016x}"),
            delta: format!(
                r#","item_id":"{item_id}","output_index":0,"content_index":0,"logprobs":[],"delta":""#
            ),
            item_id,
            created,
            model: model.to_owned(),
            output_max,
            sequence: 0,
        }
    }

    fn object(&self, status: &str, output: Value, usage: Option<Usage>) -> Value {
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "output": output, "error": null, "instructions": null, "metadata": {}, "parallel_tool_calls": true,
            "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0, "background": false,
            "max_output_tokens": self.output_max, "previous_response_id": null, "text": {"format": {"type": "text"}},
            "truncation": "disabled", "user": null,
            "incomplete_details": if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null },
            "usage": usage.map(|usage| json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.output_tokens,
            })),
        })
    }

    fn part(text: &str) -> Value {
        json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
    }

    fn item(&self, status: &str, content: Value) -> Value {
        json!({"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content})
    }

    fn event(&mut self, events: &mut Events, name: &str, mut fields: Value) {
        fields["type"] = json!(name);
        fields["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        events.named(name, &fields.to_string());
    }

    fn status(finish: Finish) -> &'static str {
        match finish {
            Finish::Stop => "completed",
            Finish::Length => "incomplete",
        }
    }
}

impl Wire for Response {
    fn begin(&mut self, events: &mut Events, _usage: Usage) {
        let response = self.object("in_progress", json!([]), None);
        self.event(events, "response.created", json!({"response": response}));
        self.event(events, "response.in_progress", json!({"response": response}));
        let item = self.item("in_progress", json!([]));
        self.event(events, "response.output_item.added", json!({"output_index": 0, "item": item}));
        let part = json!({
            "item_id": self.item_id, "output_index": 0, "content_index": 0, "part": Response::part(""),
        });
        self.event(events, "response.content_part.added", part);
    }

    fn token(&mut self, events: &mut Events, text: &str) {
        let mut number = itoa::Buffer::new();
        let number = number.format(self.sequence);
        self.sequence += 1;
        events.push(|out| {
            for part in [
                "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":",
                number,
                &self.delta,
                text,
                "\"}\n\n",
            ] {
                out.extend_from_slice(part.as_bytes());
            }
        });
    }

    fn end(&mut self, events: &mut Events, text: &str, finish: Finish, usage: Usage) {
        let status = Response::status(finish);
        let done = json!({
            "item_id": self.item_id, "output_index": 0, "content_index": 0, "text": text, "logprobs": [],
        });
        self.event(events, "response.output_text.done", done);
        let part = json!({
            "item_id": self.item_id, "output_index": 0, "content_index": 0, "part": Response::part(text),
        });
        self.event(events, "response.content_part.done", part);
        let item = self.item(status, json!([Response::part(text)]));
        self.event(events, "response.output_item.done", json!({"output_index": 0, "item": item}));
        let response = self.object(status, json!([item]), Some(usage));
        self.event(events, &format!("response.{status}"), json!({"response": response}));
    }

    fn whole(&mut self, text: &str, finish: Finish, usage: Usage) -> Vec<u8> {
        let status = Response::status(finish);
        let item = self.item(status, json!([Response::part(text)]));
        self.object(status, json!([item]), Some(usage)).to_string().into_bytes()
    }
}
