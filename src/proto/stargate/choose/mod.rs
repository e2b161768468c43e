//! The six algorithms: which cluster gets a request.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `sample` | power-of-n, round-robin, random: no look at the whole fleet |
//! | `widen` | what the two widening algorithms share: buckets by time to first token that open one after the other |
//! | `times` | estimated times of many clusters |
//! | `wait_and_widen` | wait-and-widen: an affinity group first, then all |
//! | `pulsar` | pulsar: the best of a key's ranking |
//! | `pulsar_wait_and_widen` | pulsar-wait-and-widen: a ranking that opens band by band |
//!
//! *Source*: the Stargate rules, sections 2.3 to 2.7.

pub mod pulsar;
pub mod pulsar_wait_and_widen;
pub mod sample;
pub mod times;
pub mod wait_and_widen;
pub mod widen;

/// Nanoseconds of so many milliseconds; what 64 bits do not hold is never.
pub(super) const fn ms_to_ns(ms: u64) -> u64 {
    ms.saturating_mul(1_000_000)
}

/// The earlier of two times that may not be.
pub(super) fn earlier(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
