//! What a request body asks for: the prompt as tokens in the order a chat template would put it, and the parameters
//! that matter to a simulated engine. Unknown fields are ignored.
//!
//! The rendered order is tools, then the system text, then every message with its role and all of its parts, then the
//! opening of the answer. Each part is cut into tokens by itself, so that a part's tokens do not depend on the length of
//! what stands before it.
//!
//! *Invariant*: equal prompts of equal models give equal tokens; key order and white space of the JSON do not matter.
//! *Bound and cost*: the body is parsed to a tree and copied once into tokens; the caller bounds the body.
//! *Errors*: [`ApiError`] with status 400 that names the field and what was expected.
//! *Source*: the request formats of the OpenAI and Anthropic APIs and vLLM's extensions (`ignore_eos`, `min_tokens`,
//! `cache_salt`, token ids as `prompt`); SGLang's `/generate`; vLLM's `/inference/v1/generate`.

use serde_json::{Map, Value};

use super::error::ApiError;
use super::text::{TOKEN_BYTES, Token, mix_bytes, tokenize};

/// The endpoints that read a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    Rerank,
    Tokenize,
    /// SGLang's.
    Generate,
    /// vLLM's, for prompts that are token ids.
    TokensIn,
}

impl Endpoint {
    /// The endpoint at `path`, which carries no query.
    pub fn at(path: &str) -> Option<Endpoint> {
        Some(match path {
            "/v1/chat/completions" => Endpoint::Chat,
            "/v1/completions" => Endpoint::Completions,
            "/v1/responses" => Endpoint::Responses,
            "/v1/messages" => Endpoint::Messages,
            "/v1/messages/count_tokens" => Endpoint::CountTokens,
            "/v1/embeddings" => Endpoint::Embeddings,
            "/rerank" | "/v1/rerank" | "/v2/rerank" => Endpoint::Rerank,
            "/tokenize" => Endpoint::Tokenize,
            "/generate" => Endpoint::Generate,
            "/inference/v1/generate" => Endpoint::TokensIn,
            _ => return None,
        })
    }
}

/// A parsed request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ask {
    /// As the caller wrote it; `None`: the engine's first model.
    pub model: Option<String>,
    /// The prompt; for embeddings and rerank all inputs one after the other.
    pub tokens: Vec<Token>,
    /// Where each input ends in `tokens` (embeddings, rerank); empty elsewhere.
    pub input_ends: Vec<usize>,
    /// Keeps apart prompts that must not share cached blocks.
    pub salt: u64,
    pub output_max: Option<u32>,
    pub output_min: u32,
    pub ignore_eos: bool,
    pub stream: bool,
    pub include_usage: bool,
    pub seed: Option<i64>,
    /// Embeddings: length of a vector, and whether vectors come as base64.
    pub dimensions: Option<u32>,
    pub base64: bool,
    /// Rerank: the documents, and how many to answer.
    pub documents: Vec<String>,
    pub top_n: Option<u32>,
}

/// Reads the body of a request to `endpoint`.
pub fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Ask, ApiError> {
    let value: Value = serde_json::from_slice(body)
        .map_err(|fault| ApiError::bad_request("body", format!("the body is not valid JSON: {fault}")))?;
    let Value::Object(object) = value else {
        return Err(ApiError::bad_request("body", format!("expected a JSON object, got {}", kind(&value))));
    };
    let mut ask = Ask {
        model: string(&object, "model")?.map(str::to_owned),
        stream: boolean(&object, "stream")?,
        ignore_eos: boolean(&object, "ignore_eos")?,
        output_min: whole(&object, "min_tokens", 0)?.unwrap_or(0),
        seed: object.get("seed").and_then(Value::as_i64),
        ..Ask::default()
    };
    let salt = string(&object, "cache_salt")?.unwrap_or("");
    ask.salt = mix_bytes(mix_bytes(0, ask.model.as_deref().unwrap_or("").as_bytes()), salt.as_bytes());
    if let Some(options) = present(&object, "stream_options") {
        if !ask.stream {
            return Err(ApiError::bad_request("stream_options", "only allowed when stream is true".into()));
        }
        let Value::Object(options) = options else {
            return Err(expected("stream_options", "an object", options));
        };
        ask.include_usage = boolean(options, "include_usage")?;
    }
    let mut render = Render { tokens: Vec::with_capacity(body.len() / TOKEN_BYTES) };
    match endpoint {
        Endpoint::Chat => {
            render.tools(&object);
            render.messages(required(&object, "messages")?, "messages")?;
            render.open_answer();
            one_choice(&object)?;
            ask.output_max = match whole(&object, "max_completion_tokens", 1)? {
                Some(max) => Some(max),
                None => whole(&object, "max_tokens", 1)?,
            };
        }
        Endpoint::Completions => {
            one_prompt(inputs(required(&object, "prompt")?, "prompt", &mut render)?, "prompt")?;
            one_choice(&object)?;
            ask.output_max = whole(&object, "max_tokens", 1)?.or(Some(16));
        }
        Endpoint::Responses => {
            render.tools(&object);
            if let Some(instructions) = string(&object, "instructions")? {
                render.message("system", |render| {
                    render.text(instructions);
                    Ok(())
                })?;
            }
            match required(&object, "input")? {
                Value::String(text) => render.message("user", |render| {
                    render.text(text);
                    Ok(())
                })?,
                items => render.messages(items, "input")?,
            }
            render.open_answer();
            ask.output_max = whole(&object, "max_output_tokens", 1)?;
        }
        Endpoint::Messages | Endpoint::CountTokens => {
            render.tools(&object);
            if let Some(system) = present(&object, "system") {
                render.message("system", |render| render.content(system, "system"))?;
            }
            render.messages(required(&object, "messages")?, "messages")?;
            render.open_answer();
            ask.output_max = whole(&object, "max_tokens", 1)?;
            if ask.output_max.is_none() && endpoint == Endpoint::Messages {
                return Err(ApiError::bad_request("max_tokens", "field required".into()));
            }
        }
        Endpoint::Embeddings => {
            ask.input_ends = inputs(required(&object, "input")?, "input", &mut render)?;
            ask.dimensions = whole(&object, "dimensions", 1)?;
            ask.base64 = match string(&object, "encoding_format")? {
                None | Some("float") => false,
                Some("base64") => true,
                Some(other) => {
                    return Err(ApiError::bad_request(
                        "encoding_format",
                        format!("expected \"float\" or \"base64\", got {other:?}"),
                    ));
                }
            };
        }
        Endpoint::Rerank => {
            let query = match required(&object, "query")? {
                Value::String(query) => query,
                other => return Err(expected("query", "a string", other)),
            };
            let Value::Array(documents) = required(&object, "documents")? else {
                return Err(expected("documents", "an array of strings", &object["documents"]));
            };
            for document in documents {
                let text = match document {
                    Value::String(text) => text,
                    Value::Object(fields) if matches!(fields.get("text"), Some(Value::String(_))) => {
                        string(fields, "text")?.unwrap_or("")
                    }
                    other => return Err(expected("documents", "strings", other)),
                };
                render.text(query);
                render.text(text);
                ask.input_ends.push(render.tokens.len());
                ask.documents.push(text.to_owned());
            }
            ask.top_n = whole(&object, "top_n", 0)?;
        }
        Endpoint::Generate => {
            let (field, input) = match present(&object, "text") {
                Some(text) => ("text", text),
                None => match present(&object, "input_ids") {
                    Some(ids) => ("input_ids", ids),
                    None => {
                        let message = "field required: text or input_ids".into();
                        return Err(ApiError::bad_request("text", message));
                    }
                },
            };
            one_prompt(inputs(input, field, &mut render)?, field)?;
            sampling(&object, ["max_new_tokens", "min_new_tokens"], 128, &mut ask)?;
        }
        Endpoint::TokensIn => {
            let ids = required(&object, "token_ids")?;
            if !matches!(ids, Value::Array(list) if matches!(list.first(), Some(Value::Number(_)))) {
                return Err(expected("token_ids", "a non-empty array of token ids", ids));
            }
            inputs(ids, "token_ids", &mut render)?;
            sampling(&object, ["max_tokens", "min_tokens"], 16, &mut ask)?;
        }
        Endpoint::Tokenize => match (present(&object, "prompt"), present(&object, "messages")) {
            (Some(Value::String(text)), _) => render.text(text),
            (Some(other), _) => return Err(expected("prompt", "a string", other)),
            (None, Some(messages)) => {
                render.tools(&object);
                render.messages(messages, "messages")?;
                render.open_answer();
            }
            (None, None) => {
                return Err(ApiError::bad_request("prompt", "field required: prompt or messages".into()));
            }
        },
    }
    ask.tokens = render.tokens;
    if ask.tokens.is_empty() && endpoint != Endpoint::Tokenize {
        return Err(ApiError::bad_request(
            "prompt",
            "the prompt is empty; expected at least one token".into(),
        ));
    }
    Ok(ask)
}

struct Render {
    tokens: Vec<Token>,
}

impl Render {
    fn text(&mut self, text: &str) {
        tokenize(text.as_bytes(), &mut self.tokens);
    }

    fn open(&mut self, role: &str) {
        self.text("<|");
        self.text(role);
        self.text("|>\n");
    }

    fn message(
        &mut self,
        role: &str,
        body: impl FnOnce(&mut Render) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        self.open(role);
        body(self)?;
        self.text("<|e|");
        Ok(())
    }

    fn open_answer(&mut self) {
        self.open("assistant");
    }

    fn tools(&mut self, object: &Map<String, Value>) {
        if let Some(tools) = present(object, "tools") {
            self.open("tools");
            self.text(&tools.to_string());
        }
    }

    /// Messages of the three chat-like APIs, and the other items of a Responses input.
    fn messages(&mut self, messages: &Value, param: &'static str) -> Result<(), ApiError> {
        let list = match messages {
            Value::Array(list) if !list.is_empty() => list,
            other => return Err(expected(param, "a non-empty array", other)),
        };
        for message in list {
            let Value::Object(message) = message else {
                return Err(expected(param, "an array of objects", message));
            };
            match message.get("role") {
                Some(Value::String(role)) => self.message(role, |render| {
                    if let Some(content) = present(message, "content") {
                        render.content(content, param)?;
                    }
                    for extra in ["tool_calls", "tool_call_id", "name"] {
                        if let Some(extra) = present(message, extra) {
                            render.text(&extra.to_string());
                        }
                    }
                    Ok(())
                })?,
                None if message.contains_key("type") => {
                    self.open("item");
                    self.text(&Value::Object(message.clone()).to_string());
                }
                _ => return Err(ApiError::bad_request(param, "each message needs a role, a string".into())),
            }
        }
        Ok(())
    }

    /// A string, or parts: text as it is, media as their address or a digest of their data, all else as JSON.
    fn content(&mut self, content: &Value, param: &'static str) -> Result<(), ApiError> {
        match content {
            Value::String(text) => self.text(text),
            Value::Array(parts) => {
                for part in parts {
                    self.part(part, param)?;
                }
            }
            other => return Err(expected(param, "content that is a string or an array of parts", other)),
        }
        Ok(())
    }

    fn part(&mut self, part: &Value, param: &'static str) -> Result<(), ApiError> {
        if let Value::String(text) = part {
            self.text(text);
            return Ok(());
        }
        let Value::Object(fields) = part else {
            return Err(expected(param, "content parts that are objects", part));
        };
        if let Some(Value::String(text)) = fields.get("text") {
            self.text(text);
            return Ok(());
        }
        if let Some(content) = present(fields, "content") {
            return self.content(content, param);
        }
        let text = part.to_string();
        if text.len() <= 1024 {
            self.text(&text);
        } else {
            // Media take a fixed number of tokens, which stand for their bytes.
            let digest = mix_bytes(0, text.as_bytes());
            self.tokens.extend((0..64).map(|index| (digest.rotate_left(index) >> 32) as Token));
        }
        Ok(())
    }
}

/// Appends one or several inputs, each a string or token ids; answers where each ends.
fn inputs(value: &Value, param: &'static str, render: &mut Render) -> Result<Vec<usize>, ApiError> {
    const EXPECTED: &str = "a non-empty string, array of strings, array of token ids, or array of those";
    fn ids(list: &[Value], param: &'static str, render: &mut Render) -> Result<(), ApiError> {
        for id in list {
            let id = id.as_u64().and_then(|id| Token::try_from(id).ok());
            render.tokens.push(id.ok_or_else(|| {
                ApiError::bad_request(param, "token ids are whole numbers from 0 to 4294967295".into())
            })?);
        }
        Ok(())
    }
    let mut ends = Vec::new();
    match value {
        Value::String(text) => {
            render.text(text);
            ends.push(render.tokens.len());
        }
        Value::Array(list) if matches!(list.first(), Some(Value::Number(_))) => {
            ids(list, param, render)?;
            ends.push(render.tokens.len());
        }
        Value::Array(list) if !list.is_empty() => {
            for input in list {
                match input {
                    Value::String(text) => render.text(text),
                    Value::Array(list) => ids(list, param, render)?,
                    other => return Err(expected(param, EXPECTED, other)),
                }
                ends.push(render.tokens.len());
            }
        }
        other => return Err(expected(param, EXPECTED, other)),
    }
    Ok(ends)
}

fn one_prompt(ends: Vec<usize>, param: &'static str) -> Result<(), ApiError> {
    match ends.len() {
        1 => Ok(()),
        n => Err(ApiError::bad_request(
            param,
            format!("the simulated engine takes one prompt per request, got {n}"),
        )),
    }
}

/// The answer's length as `sampling_params` has it: the most and the least tokens by these names, and the API's default.
fn sampling(
    object: &Map<String, Value>,
    names: [&'static str; 2],
    default_max: u32,
    ask: &mut Ask,
) -> Result<(), ApiError> {
    ask.output_max = Some(default_max);
    let Some(params) = present(object, "sampling_params") else { return Ok(()) };
    let Value::Object(params) = params else {
        return Err(expected("sampling_params", "an object", params));
    };
    if let Some(max) = whole(params, names[0], 1)? {
        ask.output_max = Some(max);
    }
    ask.output_min = whole(params, names[1], 0)?.unwrap_or(0);
    ask.ignore_eos = boolean(params, "ignore_eos")?;
    one_choice(params)
}

fn one_choice(object: &Map<String, Value>) -> Result<(), ApiError> {
    match whole(object, "n", 1)? {
        None | Some(1) => Ok(()),
        Some(n) => Err(ApiError::bad_request(
            "n",
            format!("the simulated engine gives one choice: expected 1, got {n}"),
        )),
    }
}

/// The field, unless it is missing or null.
fn present<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    object.get(name).filter(|value| !value.is_null())
}

fn required<'a>(object: &'a Map<String, Value>, name: &'static str) -> Result<&'a Value, ApiError> {
    present(object, name).ok_or_else(|| ApiError::bad_request(name, "field required".into()))
}

fn string<'a>(object: &'a Map<String, Value>, name: &'static str) -> Result<Option<&'a str>, ApiError> {
    match present(object, name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(expected(name, "a string", other)),
    }
}

fn boolean(object: &Map<String, Value>, name: &'static str) -> Result<bool, ApiError> {
    match present(object, name) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(expected(name, "true or false", other)),
    }
}

fn whole(object: &Map<String, Value>, name: &'static str, least: u32) -> Result<Option<u32>, ApiError> {
    let Some(value) = present(object, name) else { return Ok(None) };
    match value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number >= least) {
        Some(number) => Ok(Some(number)),
        None => Err(ApiError::bad_request(
            name,
            format!("expected a whole number from {least} to {}, got {value}", u32::MAX),
        )),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(list) if list.is_empty() => "an empty array",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn expected(param: &'static str, what: &str, got: &Value) -> ApiError {
    ApiError::bad_request(param, format!("expected {what}, got {}", kind(got)))
}

#[cfg(test)]
mod tests;
