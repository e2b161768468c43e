//! OpenAI's chat completions, completions, embeddings and models, and the rerank and tokenize answers beside them.
//!
//! *Source*: the OpenAI API reference; vLLM for what it adds (`max_model_len`, an empty first delta that carries the
//! role, rerank and tokenize).

use serde_json::{Value, json};

use super::prompt::Ask;
use super::text::{mix, unit};
use super::wire::{Events, Finish, Usage, Wire, quoted};

/// Values per embedding when the caller names none.
const DIMENSIONS_DEFAULT: u32 = 64;
/// The most a caller may ask for.
pub const DIMENSIONS_MAX: u32 = 8192;

fn usage_json(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

/// A chat completion or, with `chat` false, a completion.
pub struct Completion {
    chat: bool,
    id: String,
    created: u64,
    model: String,
    include_usage: bool,
    /// A token's event up to its text, and from there on.
    before: String,
    after: String,
}

impl Completion {
    pub fn new(chat: bool, number: u64, created: u64, model: &str, include_usage: bool) -> Self {
        let prefix = if chat { "chatcmpl" } else { "cmpl" };
        let mut this = Completion {
            chat,
            id: format!("{prefix}-{number:016x}"),
            created,
            model: model.to_owned(),
            include_usage,
            before: String::new(),
            after: String::new(),
        };
        let opening = this.opening();
        (this.before, this.after) = if chat {
            (
                format!(r#"{opening},"choices":[{{"index":0,"delta":{{"content":""#),
                r#""},"logprobs":null,"finish_reason":null}]}"#.to_owned(),
            )
        } else {
            (
                format!(r#"{opening},"choices":[{{"index":0,"text":""#),
                r#"","logprobs":null,"finish_reason":null}]}"#.to_owned(),
            )
        };
        this
    }

    fn opening(&self) -> String {
        format!(
            r#"{{"id":"{}","object":"{}","created":{},"model":{}"#,
            self.id,
            if self.chat { "chat.completion.chunk" } else { "text_completion" },
            self.created,
            quoted(&self.model)
        )
    }
}

impl Wire for Completion {
    fn begin(&mut self, events: &mut Events, _usage: Usage) {
        if self.chat {
            events.data(&format!(
                r#"{},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}"#,
                self.opening()
            ));
        }
    }

    fn token(&mut self, events: &mut Events, text: &str) {
        events.push(|out| {
            for part in ["data: ", &self.before, text, &self.after, "\n\n"] {
                out.extend_from_slice(part.as_bytes());
            }
        });
    }

    fn end(&mut self, events: &mut Events, _text: &str, finish: Finish, usage: Usage) {
        let (opening, finish) = (self.opening(), finish.name());
        let content = if self.chat { r#""delta":{}"# } else { r#""text":"""# };
        events.data(&format!(
            r#"{opening},"choices":[{{"index":0,{content},"logprobs":null,"finish_reason":"{finish}"}}]}}"#
        ));
        if self.include_usage {
            events.data(&format!(r#"{opening},"choices":[],"usage":{}}}"#, usage_json(usage)));
        }
        events.data("[DONE]");
    }

    fn whole(&mut self, text: &str, finish: Finish, usage: Usage) -> Vec<u8> {
        let choice = if self.chat {
            json!({
                "index": 0, "message": {"role": "assistant", "content": text}, "logprobs": null,
                "finish_reason": finish.name(),
            })
        } else {
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish.name()})
        };
        let value = json!({
            "id": self.id,
            "object": if self.chat { "chat.completion" } else { "text_completion" },
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": usage_json(usage),
        });
        value.to_string().into_bytes()
    }
}

/// The tokens of input `index`, mixed to one number.
fn input_seed(ask: &Ask, index: usize) -> u64 {
    let from = if index == 0 { 0 } else { ask.input_ends[index - 1] };
    ask.tokens[from..ask.input_ends[index]].iter().fold(ask.salt, |h, token| mix(h, u64::from(*token)))
}

/// The answer to `/v1/embeddings`: one unit vector per input, the same for the same input.
pub fn embeddings(ask: &Ask, model: &str) -> Vec<u8> {
    let dimensions = ask.dimensions.unwrap_or(DIMENSIONS_DEFAULT);
    let data: Vec<Value> = (0..ask.input_ends.len())
        .map(|index| {
            let seed = input_seed(ask, index);
            let mut vector: Vec<f32> =
                (0..dimensions).map(|at| unit(mix(seed, u64::from(at))) as f32 * 2.0 - 1.0).collect();
            let norm = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
            vector.iter_mut().for_each(|value| *value /= norm);
            let embedding = if ask.base64 {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                Value::from(base64(&bytes))
            } else {
                Value::from(vector)
            };
            json!({"object": "embedding", "index": index, "embedding": embedding})
        })
        .collect();
    let tokens = ask.tokens.len();
    json!({
        "object": "list", "model": model, "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })
    .to_string()
    .into_bytes()
}

/// The answer to `/rerank`: documents by falling relevance.
pub fn rerank(ask: &Ask, number: u64, model: &str) -> Vec<u8> {
    let mut scores: Vec<(usize, f64)> =
        (0..ask.documents.len()).map(|index| (index, unit(input_seed(ask, index)))).collect();
    scores.sort_by(|a, b| b.1.total_cmp(&a.1));
    if let Some(top) = ask.top_n.filter(|top| *top > 0) {
        scores.truncate(top as usize);
    }
    let results: Vec<Value> = scores
        .into_iter()
        .map(|(index, score)| {
            json!({"index": index, "relevance_score": score, "document": {"text": ask.documents[index]}})
        })
        .collect();
    json!({
        "id": format!("rerank-{number:016x}"), "model": model, "results": results,
        "usage": {"total_tokens": ask.tokens.len()},
    })
    .to_string()
    .into_bytes()
}

/// The answer to `/tokenize`.
pub fn tokenize(ask: &Ask, context_tokens_max: usize) -> Vec<u8> {
    json!({"count": ask.tokens.len(), "max_model_len": context_tokens_max, "tokens": ask.tokens})
        .to_string()
        .into_bytes()
}

/// The answer to `/v1/models`.
pub fn models(names: &[String], created: u64, context_tokens_max: usize) -> Vec<u8> {
    let data: Vec<Value> = names
        .iter()
        .map(|name| {
            json!({
                "id": name, "object": "model", "created": created, "owned_by": "ringway-engine", "root": name,
                "parent": null, "max_model_len": context_tokens_max,
            })
        })
        .collect();
    json!({"object": "list", "data": data}).to_string().into_bytes()
}

/// Standard base64 with padding (RFC 4648 section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let word =
            part.iter().enumerate().fold(0u32, |word, (at, byte)| word | u32::from(*byte) << (16 - 8 * at));
        for digit in 0..4 {
            let shown = digit <= part.len();
            out.push(if shown { DIGITS[(word >> (18 - 6 * digit)) as usize & 63] as char } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_as_the_rfc_has_it() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }

    #[test]
    fn a_model_name_with_quotes_stays_json() {
        let mut completion = Completion::new(true, 1, 2, "a\"b\\", true);
        let mut events = Events::new(false, None);
        completion.begin(&mut events, Usage::default());
        completion.token(&mut events, "the ");
        completion.end(&mut events, "the ", Finish::Stop, Usage::default());
        let text = String::from_utf8(events.take()).expect("text");
        let parsed: Vec<Value> = text
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "))
            .filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).expect(data))
            .collect();
        assert_eq!(parsed.len(), 4);
        assert!(parsed.iter().all(|event| event["model"] == "a\"b\\"));
        assert!(text.ends_with("data: [DONE]\n\n"));
    }

    #[test]
    fn embeddings_are_unit_vectors_that_depend_on_their_own_input_only() {
        let ask = |body: &str| {
            super::super::prompt::parse(super::super::prompt::Endpoint::Embeddings, body.as_bytes())
                .expect(body)
        };
        let vectors = |body: &str| -> Vec<Vec<f64>> {
            let value: Value = serde_json::from_slice(&embeddings(&ask(body), "m")).expect("json");
            let data = value["data"].as_array().expect("data").clone();
            data.iter()
                .map(|entry| {
                    let values = entry["embedding"].as_array().expect("floats");
                    values.iter().map(|value| value.as_f64().expect("a float")).collect()
                })
                .collect()
        };
        let both = vectors(r#"{"input":["one","two"],"dimensions":8}"#);
        assert_eq!(both[1..], vectors(r#"{"input":"two","dimensions":8}"#)[..]);
        assert_ne!(both[0], both[1]);
        let norm: f64 = both[0].iter().map(|value| value * value).sum();
        assert!(both[0].len() == 8 && (norm - 1.0).abs() < 1e-5);
    }
}
