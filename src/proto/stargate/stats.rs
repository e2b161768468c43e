//! What is known of a cluster for one target, and what servers and engines report of themselves.
//!
//! *Source*: the Stargate rules, sections 2.0, 6.1 and 6.5.

use crate::clock::Nanos;

/// Times in the queue by priority, in milliseconds: ascending keys, each once. Section 6.3.
pub type QueueTimes = Vec<(u32, u64)>;

/// Tokens of an engine's KV cache. Present when any of the three is above 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCache {
    pub capacity_tokens: u64,
    pub used_tokens: u64,
    pub free_tokens: u64,
}

/// Statistics of one server or one cluster for one model. A number that is not known is 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Plain mean of the input rate, tokens per second; valid when finite and above 0.
    pub last_mean_input_tps: f64,
    /// Greatest input rate seen; valid as above.
    pub max_input_tps: f64,
    pub output_tps: f64,
    pub max_output_tps: f64,
    /// Requests without output yet, and their input tokens.
    pub queue_size: u64,
    pub queued_input_size: u64,
    /// All live requests, their input tokens, and the engine's limit (0: unknown).
    pub num_running_queries: u64,
    pub total_query_input_size: u64,
    pub max_engine_concurrency: u64,
    pub input_processing_queries: u64,
    pub output_generation_queries: u64,
    pub queue_times: QueueTimes,
    pub kv: KvCache,
    pub observed_at_unix_ms: u64,
}

/// A cluster as one request's choice sees it: its servers' statistics together, pending assignments included.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cluster {
    /// Unique within the target; clusters of a target are sorted by it.
    pub id: Box<str>,
    /// Mean of its servers' health round trips, in nanoseconds.
    pub rtt_ns: u64,
    pub stats: Stats,
}

/// What a registration reports of one model; `None`: not reported, so it is measured here. Field names of section 6.1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reported {
    pub last_mean_input_tps: Option<f64>,
    pub max_input_tps: Option<f64>,
    pub output_tps: Option<f64>,
    pub max_output_tps: Option<f64>,
    pub queue_size: Option<u64>,
    pub queued_input_size: Option<u64>,
    pub num_running_queries: Option<u64>,
    pub total_query_input_size: Option<u64>,
    pub max_engine_concurrency: Option<u64>,
    pub input_processing_queries: Option<u64>,
    pub output_generation_queries: Option<u64>,
    /// `None`: not reported. Empty: known to be empty.
    pub queue_times: Option<QueueTimes>,
    pub kv: Option<KvCache>,
    pub observed_at_unix_ms: Option<u64>,
}

/// What the control thread read from an engine's own metrics; `None`: not published.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scraped {
    /// When the engine was asked, on the router's clock.
    pub asked: Nanos,
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    pub max_concurrency: Option<u64>,
    pub kv: Option<KvCache>,
}
