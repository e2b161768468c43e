//! A shard's figures, copied out when the control thread asks. Shards count in plain integers; the control thread adds
//! the shards up.

use super::backend::prefix_memory::MemoryFigures;
use super::error::Rejection;
use super::ids::{ClientId, ShardId};
use super::message::UpstreamFault;
use super::stargate::figures::StargateFigures;
use crate::clock::Nanos;

/// Upper bounds of the latency buckets, in nanoseconds: 1-2.5-5 steps from 10 µs to 100 s.
pub const BUCKETS_NS: [u64; 22] = [
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
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
    25_000_000_000,
    50_000_000_000,
    100_000_000_000,
];

/// A histogram of times over [`BUCKETS_NS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// One count per bound (not cumulative), and one for what is beyond the last.
    pub counts: [u64; BUCKETS_NS.len() + 1],
    pub sum_ns: u64,
}

impl Times {
    /// Counts one time. A handful of compares, no allocation.
    pub fn record(&mut self, ns: u64) {
        let bucket = BUCKETS_NS.partition_point(|bound| *bound < ns);
        self.counts[bucket] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }
    pub fn add(&mut self, other: &Times) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// Per server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerFigures {
    pub in_flight: u32,
    /// Requests sent to it, resends included.
    pub dispatched: u64,
    /// Answers by status: (status, count), in no order; few.
    pub statuses: Vec<(u16, u64)>,
    pub retries: u64,
    pub faults: [u64; UpstreamFault::ALL.len()],
    /// Until when this shard keeps it benched.
    pub benched_until: Nanos,
    /// Idle and busy connections to it.
    pub connections: u32,
    /// Blocks of the prompts sent to it that this shard's memory took it to hold.
    pub prefix_matched: u64,
    /// All blocks of those prompts.
    pub prefix_total: u64,
    /// Over the answers that report cached tokens: their prompts, …
    pub reported_prompt_tokens: u64,
    /// … what of them the engine had cached, …
    pub reported_cached_tokens: u64,
    /// … and what this shard's memory had foretold, in estimated tokens.
    pub predicted_cached_tokens: u64,
    /// This shard's replica of its prefix memory. Replicas tell of the same blocks: they don't add up.
    pub memory: MemoryFigures,
    /// Who owns how many of its remembered blocks: the largest owners, most first, at most [`CLIENTS_SHOWN_MAX`]. Empty
    /// while one client alone owns blocks.
    pub clients: Vec<(ClientId, u32)>,
    pub links: LinkCounts,
}

/// What trusted listeners' requests met on connections to a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounts {
    /// Connections dropped because the server had closed them before a request went out, …
    pub stale: u64,
    /// … and because a request on them failed.
    pub failed: u64,
    /// Fresh connections made in place of such: that could be made, …
    pub reconnects: u64,
    /// … and that could not.
    pub failed_reconnects: u64,
}

/// Clients that a report names per server.
pub const CLIENTS_SHOWN_MAX: usize = 20;

/// Per shard.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardReport {
    pub shard: ShardId,
    /// The number of the question this answers.
    pub number: u64,
    /// Client connections open.
    pub connections: u32,
    /// Client connections accepted so far.
    pub accepted: u64,
    /// Requests whose head was read and that are not finished.
    pub active: u32,
    /// Requests ended so far, however they ended.
    pub finished: u64,
    /// Requests that wait for a permit, by pool.
    pub queued: Vec<u32>,
    /// By `BackendId`.
    pub servers: Vec<ServerFigures>,
    /// By `Rejection as usize`.
    pub rejections: [u64; Rejection::ALL.len()],
    pub client_aborts: u64,
    /// Notices lost because the ring to the control thread was full.
    pub notices_dropped: u64,
    /// Age of the oldest peer figure in use, in nanoseconds.
    pub mesh_lag_ns: u64,
    /// Touches of prefix memories told to peers, one count per peer, …
    pub touches_sent: u64,
    /// … not told because a ring was full, …
    pub touches_dropped: u64,
    /// … and the bytes that those sent took.
    pub touch_bytes: u64,
    pub queue_wait: Times,
    /// From dispatch to the first byte of the answer's body, streamed answers only.
    pub first_token: Times,
    /// Time spent inside the router per request, queue wait aside.
    pub overhead: Times,
    /// Where some listener is trusted: what is counted there.
    pub stargate: Option<Box<StargateFigures>>,
}

impl ShardReport {
    pub fn new(shard: ShardId) -> Self {
        ShardReport {
            shard,
            number: 0,
            connections: 0,
            accepted: 0,
            active: 0,
            finished: 0,
            queued: Vec::new(),
            servers: Vec::new(),
            rejections: [0; Rejection::ALL.len()],
            client_aborts: 0,
            notices_dropped: 0,
            mesh_lag_ns: 0,
            touches_sent: 0,
            touches_dropped: 0,
            touch_bytes: 0,
            queue_wait: Times::default(),
            first_token: Times::default(),
            overhead: Times::default(),
            stargate: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_lands_in_the_first_bucket_that_holds_it() {
        let mut times = Times::default();
        for ns in [0, 10_000, 10_001, 100_000_000_001] {
            times.record(ns);
        }
        assert_eq!((times.counts[0], times.counts[1], times.counts[BUCKETS_NS.len()]), (2, 1, 1));
        assert_eq!(times.count(), 4);
    }
}
