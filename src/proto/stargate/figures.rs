//! What one shard counted on trusted listeners: plain integers, for the control thread to add up and name.
//!
//! *Bound*: one entry per target that was ever served and per server in it; all targets that nobody serves share one entry
//! without names. At most [`REASONS_MAX`] texts of upstream servers become labels; further ones count as `other`.
//! *Source*: the Stargate rules, section 7.

use crate::proto::ids::BackendId;

/// Distinct retry reasons of upstream servers that are kept apart.
pub const REASONS_MAX: usize = 32;
/// Upper bounds of `proxy_duration_seconds`, in nanoseconds.
pub const PROXY_DURATION_NS: [u64; 12] = [
    1_000_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];
/// Upper bounds of `routing_duration_seconds`, in nanoseconds.
pub const ROUTING_DURATION_NS: [u64; 7] =
    [100_000, 500_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000, 100_000_000];
/// Upper bounds of `proxy_replay_buffer_bytes`.
pub const REPLAY_BYTES: [u64; 10] =
    [0, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// Values up to each of `N` upper bounds (each value in the first bound that holds it), and above the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram<const N: usize> {
    pub buckets: [u64; N],
    pub above: u64,
    /// Of all values; wraps around.
    pub sum: u64,
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Self {
        Histogram { buckets: [0; N], above: 0, sum: 0 }
    }
}

impl<const N: usize> Histogram<N> {
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum::<u64>() + self.above
    }
}

/// What became of an attempt: label `upstream_<status>` or `proxy_<status>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttemptResult {
    /// The server answered with that status.
    Upstream(u16),
    /// It did not; the router's own status for that.
    Proxy(u16),
}

/// Of one server in one target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerFigures {
    /// `None`: no server (404, 503, admission): an empty label.
    pub backend: Option<BackendId>,
    /// Finished requests by final status, ascending.
    pub requests: Vec<(u16, u64)>,
    /// Ascending.
    pub attempts: Vec<(AttemptResult, u64)>,
    pub proxy_duration_ns: Histogram<12>,
}

/// Of one algorithm in one target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlgorithmFigures {
    /// Canonical name.
    pub algorithm: &'static str,
    pub primary: u64,
    pub fallback: u64,
    pub kv_free_token_fallback: u64,
    /// Accepted expressions with parameters, by what the cache said.
    pub expression_hits: u64,
    pub expression_builds: u64,
    pub expression_rebuilds: u64,
}

/// Of one target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TargetFigures {
    /// `None`: all targets that nobody ever served: empty labels.
    pub target: Option<(Box<str>, Box<str>)>,
    /// Active servers now, as this shard sees it.
    pub active: u32,
    /// Requests of this shard that wait for a route.
    pub waiting: u32,
    pub servers: Vec<ServerFigures>,
    pub algorithms: Vec<AlgorithmFigures>,
    /// By reason.
    pub retries: Vec<(Box<str>, u64)>,
    pub exhausted: Vec<(Box<str>, u64)>,
    pub input_work_limit_exceeded: u64,
    pub input_work_capacity_unavailable: u64,
    pub routing_duration_ns: Histogram<7>,
    pub replay_buffer_bytes: Histogram<10>,
}

/// See the module's text. Counters only grow while the process runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StargateFigures {
    pub targets: Vec<TargetFigures>,
    pub expression_cache_entries: u64,
}
