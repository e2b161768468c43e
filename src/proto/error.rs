//! Why the router itself answers a request: one table to status, reason, error type and retry advice.
//!
//! Source: the rejection table of the Lifeboat family. Bodies come in the error shape of the endpoint that was called:
//! OpenAI `{"error":{"message","type","code","param"}}`, Anthropic `{"type":"error","error":{"type","message"}}`.

use super::classify::Api;

/// A request that the router answers without an engine's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Rejection {
    ModelNotFound,
    NoServerInTier,
    NoHealthyServer,
    InputTooLong,
    AtCapacity,
    QueueFull,
    QueueTimeout,
    BodyTooLarge,
    BadRequest,
    Unauthorized,
    UpstreamError,
    UpstreamTimeout,
    ShuttingDown,
    TierForbidden,
    RateLimited,
    RequestTimeout,
    HeadTooLarge,
    UriTooLong,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct RejectionRow {
    /// HTTP status.
    pub status: u16,
    /// Value of the reject-reason header, of the `code` field and of the metric label.
    pub reason: &'static str,
    /// OpenAI's `type` field.
    pub openai_type: &'static str,
    /// Anthropic's `error.type` field.
    pub anthropic_type: &'static str,
    /// Seconds of the `Retry-After` header, where the client may try again.
    pub retry_after_s: Option<u32>,
    /// Default text of the `message` field.
    pub message: &'static str,
}

impl Rejection {
    pub const ALL: [Rejection; 18] = [
        Rejection::ModelNotFound,
        Rejection::NoServerInTier,
        Rejection::NoHealthyServer,
        Rejection::InputTooLong,
        Rejection::AtCapacity,
        Rejection::QueueFull,
        Rejection::QueueTimeout,
        Rejection::BodyTooLarge,
        Rejection::BadRequest,
        Rejection::Unauthorized,
        Rejection::UpstreamError,
        Rejection::UpstreamTimeout,
        Rejection::ShuttingDown,
        Rejection::TierForbidden,
        Rejection::RateLimited,
        Rejection::RequestTimeout,
        Rejection::HeadTooLarge,
        Rejection::UriTooLong,
    ];

    /// The row of this rejection: the only place that maps it to anything a client sees.
    pub const fn row(self) -> RejectionRow {
        const fn row(
            status: u16,
            reason: &'static str,
            types: (&'static str, &'static str),
            retry_after_s: Option<u32>,
            message: &'static str,
        ) -> RejectionRow {
            RejectionRow {
                status,
                reason,
                openai_type: types.0,
                anthropic_type: types.1,
                retry_after_s,
                message,
            }
        }
        const INVALID: (&str, &str) = ("invalid_request_error", "invalid_request_error");
        const TOO_LARGE: (&str, &str) = ("invalid_request_error", "request_too_large");
        const NOT_FOUND: (&str, &str) = ("invalid_request_error", "not_found_error");
        const BUSY: (&str, &str) = ("service_unavailable", "overloaded_error");
        const UPSTREAM: (&str, &str) = ("upstream_error", "api_error");
        match self {
            Rejection::ModelNotFound => {
                row(404, "model_not_found", NOT_FOUND, None, "no server serves the requested model")
            }
            Rejection::NoServerInTier => {
                row(503, "no_server_in_tier", BUSY, None, "the routing tier has no server for this model")
            }
            Rejection::NoHealthyServer => {
                row(503, "no_healthy_server", BUSY, Some(1), "no server for this request is available now")
            }
            Rejection::InputTooLong => {
                row(413, "input_too_long", TOO_LARGE, None, "the input is longer than any server accepts")
            }
            Rejection::AtCapacity => row(
                503,
                "at_capacity",
                BUSY,
                Some(1),
                "every server is at its ceiling (max_concurrency), and the pool's routing_mode is reject",
            ),
            Rejection::QueueFull => row(
                503,
                "queue_full",
                BUSY,
                Some(1),
                "every server is at its ceiling (max_concurrency), and the queue is full (queue_size)",
            ),
            Rejection::QueueTimeout => row(
                503,
                "queue_timeout",
                BUSY,
                Some(1),
                "no server had room within the waiting time (queue_timeout_ms)",
            ),
            Rejection::BodyTooLarge => {
                row(413, "body_too_large", TOO_LARGE, None, "the request body is over the size limit")
            }
            Rejection::BadRequest => row(400, "bad_request", INVALID, None, "malformed HTTP request"),
            Rejection::Unauthorized => row(
                401,
                "unauthorized",
                ("authentication_error", "authentication_error"),
                None,
                "missing or unknown API key",
            ),
            Rejection::UpstreamError => {
                row(502, "upstream_error", UPSTREAM, None, "the server failed before it answered")
            }
            Rejection::UpstreamTimeout => row(
                504,
                "upstream_timeout",
                UPSTREAM,
                None,
                "the server did not answer in time (limits.response_head_timeout_ms)",
            ),
            Rejection::ShuttingDown => {
                row(503, "shutting_down", BUSY, Some(1), "the router is shutting down; try another one")
            }
            Rejection::TierForbidden => row(
                403,
                "tier_forbidden",
                ("permission_error", "permission_error"),
                None,
                "the API key does not include this routing tier",
            ),
            Rejection::RateLimited => row(
                429,
                "rate_limited",
                ("rate_limit_error", "rate_limit_error"),
                Some(1),
                "the API key's own limit is reached",
            ),
            Rejection::RequestTimeout => {
                row(408, "request_timeout", INVALID, None, "the client stopped sending its request")
            }
            Rejection::HeadTooLarge => {
                row(431, "head_too_large", INVALID, None, "the request head is over the size limit")
            }
            Rejection::UriTooLong => {
                row(414, "uri_too_long", INVALID, None, "the request target is over the length limit")
            }
        }
    }

    /// The JSON body of this rejection in `api`'s error shape. `detail` replaces the row's message where more is known
    /// (what, where, what was expected). Allocates; rejections are not the request path.
    pub fn body(self, api: Api, detail: Option<&str>) -> Vec<u8> {
        let row = self.row();
        let message = detail.unwrap_or(row.message);
        let value = match api {
            Api::OpenAi => serde_json::json!({
                "error": {"message": message, "type": row.openai_type, "code": row.reason, "param": null}
            }),
            Api::Anthropic => serde_json::json!({
                "type": "error", "error": {"type": row.anthropic_type, "message": message}
            }),
        };
        value.to_string().into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_distinct_and_in_table_order() {
        let reasons: std::collections::HashSet<_> = Rejection::ALL.iter().map(|r| r.row().reason).collect();
        assert_eq!(reasons.len(), Rejection::ALL.len());
        for (i, r) in Rejection::ALL.iter().enumerate() {
            assert_eq!(*r as usize, i, "ALL is indexed by discriminant");
        }
    }

    #[test]
    fn a_limit_is_named_by_its_setting() {
        for (rejection, settings) in [
            (Rejection::AtCapacity, &["max_concurrency", "routing_mode"][..]),
            (Rejection::QueueFull, &["max_concurrency", "queue_size"]),
            (Rejection::QueueTimeout, &["queue_timeout_ms"]),
            (Rejection::UpstreamTimeout, &["limits.response_head_timeout_ms"]),
        ] {
            for setting in settings {
                assert!(rejection.row().message.contains(setting), "{rejection:?}: {setting}");
            }
        }
    }

    #[test]
    fn bodies_are_json_of_the_endpoints_shape() {
        for r in Rejection::ALL {
            let openai: serde_json::Value = serde_json::from_slice(&r.body(Api::OpenAi, None)).unwrap();
            assert_eq!(openai["error"]["code"], r.row().reason);
            assert!(openai["error"]["param"].is_null());
            let anthropic: serde_json::Value =
                serde_json::from_slice(&r.body(Api::Anthropic, Some("a \"quoted\" detail"))).unwrap();
            assert_eq!(anthropic["type"], "error");
            assert_eq!(anthropic["error"]["message"], "a \"quoted\" detail");
        }
    }
}
