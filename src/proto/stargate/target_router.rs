//! One shard's brain for trusted listeners: which server takes each request of a target, who waits, who is tried again.

use std::collections::VecDeque;
use std::sync::Arc;

use super::figures::{AttemptResult, StargateFigures};
use super::layout::Layout;
use super::request::{Dispatched, End, Refusal, Retry, Routed, Setback, Wish, Woken};
use super::stats::Stats;
use crate::clock::Nanos;
use crate::proto::config::lb_config::LbConfig;
use crate::proto::ids::{BackendId, ShardId, Ticket};
use crate::proto::message::{Message, Update, Urgency};

/// What a target router is told once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetRouterOptions {
    pub me: ShardId,
    /// 1 to 256.
    pub shards: usize,
    pub max_connect_retries: u32,
    pub max_request_retries: u32,
    /// A target whose last advertisement ended less than that ago is 503, not 404; 0: always 404.
    pub grace_ms: u64,
    /// Of all random choices.
    pub seed: u64,
}

/// A request that [`TargetRouter::open`] accepted. It has to be ended by [`TargetRouter::handle_end`].
#[must_use]
#[derive(Debug)]
pub struct Flight {
    /// `NOBODY` once it has ended.
    index: u32,
}

const NOBODY: u32 = u32::MAX;

impl Drop for Flight {
    fn drop(&mut self) {
        debug_assert!(self.index == NOBODY || std::thread::panicking(), "a flight was dropped and not ended");
    }
}

/// What log lines tell of a flight. Numbers that are not known are 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Canonical name.
    pub algorithm: &'static str,
    /// Empty where the algorithm has none.
    pub comparator: &'static str,
    /// Clusters of the target when the last choice was made.
    pub num_candidates: u32,
    pub sample_count_configured: u32,
    pub sample_count_effective: u32,
    /// Of the last choice; see [`Dispatched::rank_depth`].
    pub rank_depth: u32,
    pub selected_after_kv_skip: bool,
    /// Evaluations after the first, waiting included.
    pub routing_retry_attempts: u32,
    /// Dispatches so far, reconnects not counted.
    pub attempts: u32,
    pub connect_retries: u32,
    pub request_retries: u32,
    pub failed_backends: u32,
    pub expected_queue_ms: Option<u64>,
    pub dispatched: Option<Dispatched>,
    /// The routing expression was compiled for this request: rebuilt (true) or built.
    pub expression_built: Option<bool>,
}

/// See the module's text.
#[derive(Debug)]
pub struct TargetRouter {
    facts: Facts,
    messages: VecDeque<(ShardId, Message, Urgency)>,
    models: Vec<Box<str>>,
}

impl TargetRouter {
    pub fn new(_options: TargetRouterOptions, _config: Arc<LbConfig>) -> Self {
        TargetRouter { facts: Facts::default(), messages: VecDeque::new(), models: Vec::new() }
    }

    /// The slots there are from now on.
    pub fn handle_layout(&mut self, _now: Nanos, _layout: &Layout) {}

    /// The health checks' word on a server.
    pub fn handle_health(&mut self, _now: Nanos, _backend: BackendId, _up: bool) {}

    /// `Catalog`, `Health`, `Forget`, `RoundTrip`, `Reported` and `Scraped`; others are ignored.
    pub fn handle_update(&mut self, _now: Nanos, _update: &Update) {}

    /// `Live`, `Since` and `Sample` of another shard; others are ignored.
    pub fn handle_message(&mut self, _now: Nanos, _from: ShardId, _message: &Message) {}

    /// A lazy message that found its ring full: its figure is sent again with the next flush.
    pub fn handle_dropped(&mut self, _message: &Message) {}

    /// Some figure has changed and was not flushed.
    pub fn needs_flush(&self) -> bool {
        false
    }

    /// Puts out the figures that changed since the last flush. Call every tick while [`TargetRouter::needs_flush`].
    pub fn flush(&mut self, _now: Nanos) {}

    /// The next message to send; call until `None` after every turn.
    pub fn poll_message(&mut self) -> Option<(ShardId, Message, Urgency)> {
        self.messages.pop_front()
    }

    /// Checks a request's method, expression and affinity key, in this order, and names its target. Neither a candidate
    /// nor a known target is needed for that.
    pub fn open(&mut self, _now: Nanos, _wish: &Wish<'_>) -> Result<Flight, Refusal> {
        Ok(Flight { index: 0 })
    }

    /// Admission, then the choice of a cluster (or the next server of the cluster that the last one failed in), then a
    /// server of it, which counts the request as live.
    pub fn route(&mut self, _now: Nanos, _flight: &mut Flight) -> Routed {
        Routed::Refuse(Refusal::Unavailable)
    }

    /// The client of a waiting request has gone. The flight has to be ended all the same.
    pub fn give_up(&mut self, _now: Nanos, _ticket: Ticket) {}

    /// The response head that is passed on has come. Call it for no head that leads to a retry.
    pub fn handle_head(&mut self, _now: Nanos, _flight: &mut Flight) {}

    /// The first output has come. For a successful answer that is no event stream: with its head.
    pub fn handle_output(&mut self, _now: Nanos, _flight: &mut Flight) {}

    /// The request is over, wherever it stands; its flight is of no use from here on.
    pub fn handle_end(&mut self, _now: Nanos, flight: &mut Flight, _end: End) {
        flight.index = NOBODY;
    }

    /// What follows from a setback of the present attempt. `replayable`: the body can be sent (again); else whether it
    /// outgrew the replay buffer.
    pub fn handle_retry(
        &mut self,
        _now: Nanos,
        _flight: &mut Flight,
        _setback: Setback<'_>,
        _replayable: Result<(), bool>,
    ) -> Retry {
        Retry::Route
    }

    /// The next waiting request that goes on; call until `None` after every turn.
    pub fn poll_woken(&mut self) -> Option<Woken> {
        None
    }

    /// When [`TargetRouter::handle_timeout`] has to be called next; [`Nanos::NEVER`]: not at all.
    pub fn poll_timeout(&self) -> Nanos {
        Nanos::NEVER
    }

    pub fn handle_timeout(&mut self, _now: Nanos) {}

    /// Models with an active server under any routing key: sorted, unique.
    pub fn active_models(&mut self) -> &[Box<str>] {
        &self.models
    }

    /// Models with an active server for requests without a routing key: sorted, unique.
    pub fn models_without_key(&mut self) -> &[Box<str>] {
        &self.models
    }

    /// What log lines tell of the flight.
    pub fn facts(&self, _flight: &Flight) -> &Facts {
        &self.facts
    }

    /// The configuration that the flight routes by, as JSON in lb-config form. Allocates.
    pub fn effective_json(&self, _flight: &Flight) -> String {
        String::new()
    }

    /// Statistics and mean round trip (nanoseconds) of the cluster that the flight was sent to last.
    pub fn cluster_of(&self, _flight: &Flight) -> Option<(&str, u64, &Stats)> {
        None
    }

    /// `x-stargate-cluster-id` of the server that the flight was sent to last; empty before that.
    pub fn cluster_id(&self, _flight: &Flight) -> &str {
        ""
    }

    /// The request is finished with that status for the client: `requests_total`, once, before its end.
    pub fn count_finished(&mut self, _flight: &Flight, _status: u16) {}

    /// The present attempt's result: `proxy_attempts_total`.
    pub fn count_attempt(&mut self, _flight: &Flight, _result: AttemptResult) {}

    /// Bytes of the body kept for replay when the present attempt ended: `proxy_replay_buffer_bytes`.
    pub fn count_replay_bytes(&mut self, _flight: &Flight, _bytes: u64) {}

    /// What section 7 counts, as this shard has it.
    pub fn figures(&self) -> StargateFigures {
        StargateFigures::default()
    }
}
