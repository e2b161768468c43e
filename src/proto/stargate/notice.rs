//! What a shard has to say of a request on a trusted listener for the log: values, not words. The control thread words them.
//!
//! *Bound*: sent only while its level is logged, and dropped where the ring to the control thread is full.
//! *Source*: the Stargate rules, section 7.

use super::flight::Facts;
use super::stats::Stats;

/// Whose request it is. Texts as they came.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Subject {
    pub routing_key: Box<[u8]>,
    pub model: Box<[u8]>,
    /// `x-routing-method`; `None`: it had none.
    pub requested_algorithm: Option<Box<[u8]>>,
    pub input_tokens: u64,
}

/// One log line.
#[derive(Clone, Debug, PartialEq)]
pub enum StargateNotice {
    /// Info, once per attempt.
    Proxying {
        subject: Subject,
        algorithm: &'static str,
        server: Box<str>,
        url: Box<str>,
        connect_retries: u32,
        request_retries: u32,
    },
    /// Warn.
    InvalidMethod { subject: Subject, code: &'static str, message: Box<str> },
    /// Info, when a routing expression was compiled. `rebuilt`: in place of an older one.
    ExpressionBuilt { algorithm: &'static str, rebuilt: bool, expression: Box<[u8]>, effective: Box<str> },
    /// Warn.
    AffinityKeyMissing { subject: Subject },
    /// Warn: nobody can take it.
    NoCandidates { subject: Subject, failed_backends: u32, routing_retry_attempts: u32 },
    /// Warn. `capacity`: no input rate is known at all.
    InputWork { subject: Subject, capacity: bool },
    /// Warn: an attempt failed and the body cannot be sent again. `overflow`: it outgrew the replay buffer.
    NotReplayable { subject: Subject, server: Box<str>, overflow: bool },
    /// Debug, once per request.
    Span(Box<Span>),
}

/// The fields of the span `proxy_openai_request`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    pub subject: Subject,
    /// `chat_completions`, `responses` or `embeddings`.
    pub endpoint: &'static str,
    pub path: Box<[u8]>,
    pub priority: u32,
    pub max_wait_ms: u64,
    pub slo_ms: u64,
    pub cache_affinity_key_present: bool,
    pub facts: Facts,
    /// Empty: none.
    pub admission_rejection_reason: &'static str,
    /// The method was refused.
    pub invalid_requested_algorithm: bool,
    /// Of the cluster of the last attempt; empty: there was none.
    pub cluster: Box<str>,
    pub cluster_rtt_ns: u64,
    pub stats: Stats,
    /// Server of the last attempt; empty: there was none.
    pub server: Box<str>,
    /// 0: no server answered.
    pub upstream_status: u16,
    /// What the client is told.
    pub status: u16,
    /// From the request's arrival to the head of the answer; 0: there was none.
    pub time_to_first_byte_ns: u64,
    /// Of the last retryable answer.
    pub retry_reason: Box<[u8]>,
    pub replay_body_bytes: u64,
}
