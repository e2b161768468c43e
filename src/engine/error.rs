//! Errors of the simulated engine, in the shape of the API that was called.
//!
//! *Source*: OpenAI's `{"error":{"message","type","param","code"}}` as vLLM fills it in, and Anthropic's
//! `{"type":"error","error":{"type","message"}}`.

use serde_json::json;

use crate::proto::classify::Api;

/// An answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: u16,
    /// What was wrong, where, and what was expected.
    pub message: String,
    /// The field at fault, where there is one.
    pub param: Option<&'static str>,
    /// Seconds of a `Retry-After` header.
    pub retry_after_s: Option<u64>,
}

impl ApiError {
    pub fn new(status: u16, message: String) -> Self {
        ApiError { status, message, param: None, retry_after_s: None }
    }

    /// 400; the message starts with the field's name.
    pub fn bad_request(param: &'static str, message: String) -> Self {
        ApiError { param: Some(param), ..ApiError::new(400, format!("{param}: {message}")) }
    }

    /// The body, as `api` writes errors.
    pub fn body(&self, api: Api) -> Vec<u8> {
        let value = match api {
            Api::OpenAi => {
                let kind = match self.status {
                    404 => "NotFoundError",
                    400 | 405 | 411 | 413 | 414 | 415 | 431 => "BadRequestError",
                    429 => "RateLimitError",
                    503 => "ServiceUnavailableError",
                    _ => "InternalServerError",
                };
                json!({"error": {
                    "message": self.message, "type": kind, "param": self.param, "code": self.status,
                }})
            }
            Api::Anthropic => {
                let kind = match self.status {
                    404 => "not_found_error",
                    413 => "request_too_large",
                    400..=428 => "invalid_request_error",
                    429 => "rate_limit_error",
                    503 | 529 => "overloaded_error",
                    _ => "api_error",
                };
                json!({"type": "error", "error": {"type": kind, "message": self.message}})
            }
        };
        value.to_string().into_bytes()
    }
}
