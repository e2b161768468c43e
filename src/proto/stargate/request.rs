//! What a request on a trusted listener asks for, and what it is told.
//!
//! *Source*: the Stargate rules, sections 3.4, 4.2, 4.4, 4.5 and 5.

use super::layout::SlotId;
use crate::clock::Nanos;
use crate::proto::ids::{BackendId, Ticket};

/// The router headers of a request, checked and trimmed. Empty slices: absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish<'a> {
    pub arrived: Nanos,
    pub routing_key: &'a [u8],
    pub model: &'a [u8],
    /// An embeddings request: its input rate is read off the response head, not off the first output.
    pub embeddings: bool,
    /// `x-routing-method` as it came.
    pub method: Option<&'a [u8]>,
    pub input_tokens: u64,
    /// Lower is more urgent.
    pub priority: u32,
    pub max_wait_ms: Option<u64>,
    pub slo_ms: Option<u64>,
    pub affinity_key: &'a [u8],
    /// `x-stargate-max-wait-ms`: no attempt after the first begins later than that after arrival.
    pub retry_budget_ms: Option<u64>,
}

/// Why a request gets no server. Section 4.4 maps it to status, code and body.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// 400 with `x-stargate-error-code` (section 3.4).
    Method { code: &'static str, message: String },
    /// 400, empty: the algorithm wants `x-cache-affinity-key`.
    AffinityKeyMissing,
    /// 404 `no_eligible_candidates`: nobody serves the target, and nobody did lately.
    NoTarget,
    /// 503, empty: advertised, lately advertised, or nothing can be chosen now.
    Unavailable,
    /// 503 `input_work_limit_exceeded`; `capacity` tells the metric's reason: no rate is known at all.
    InputWork { capacity: bool },
}

/// Where one attempt goes. Its slot counts the request as live from here on, until `handle_end` or `handle_retry`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dispatched {
    pub backend: BackendId,
    pub slot: SlotId,
    /// `x-stargate-expected-queue-ms`; `None`: not known.
    pub expected_queue_ms: Option<u64>,
    /// 1-based; above 1 it was a fallback.
    pub rank_depth: u32,
}

/// The answer to a request for a route.
#[must_use]
#[derive(Clone, Debug, PartialEq)]
pub enum Routed {
    Dispatch(Dispatched),
    /// A [`Woken`] of that ticket follows, unless it is given up first.
    Wait(Ticket),
    Refuse(Refusal),
}

/// A waiting request goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Woken {
    pub ticket: Ticket,
    pub routed: Result<Dispatched, Refusal>,
}

/// What ended an attempt before an answer could be passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setback<'a> {
    /// A fresh connection could not be made.
    Connect,
    /// No response head on a connection: reset, closed, timeout.
    Transport,
    /// A response head of status 429 or 503 that says or implies that the request may be tried elsewhere (section 5.5).
    Retryable { status: u16, reason: &'a [u8] },
}

/// What follows from a setback.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The same server once more, on a fresh connection; it still counts as live there.
    Reconnect,
    /// Ask for a route again; the server, or its cluster, is excluded by now.
    Route,
    /// No more attempts: the setback itself is the client's answer (502, or the response passed through). The reason is counted.
    Exhausted(Exhausted),
}

/// Label of `proxy_retry_exhausted_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exhausted {
    Budget,
    ConnectRetries,
    /// Request retries used up: the upstream's reason is the label.
    Upstream,
    /// The body cannot be sent again; `overflow`: it outgrew the replay buffer, which is 413.
    Body {
        overflow: bool,
    },
}

/// How a request left its server for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The answer is complete and below 300: its times count for the input rate.
    Completed,
    /// Any other end.
    Other,
}
