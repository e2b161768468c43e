//! How long a request would wait at a cluster, and by what clusters are compared.
//!
//! With T the mean input rate, Q the queued tokens, R the live requests, C the engine's limit and p the priority, in milliseconds:
//!
//! * queue: 0 while C > 0 and R < C; else the queue time of the greatest priority up to p (none: 0), where queue times are known;
//!   else Q / T rounded up to a whole millisecond.
//! * prefill: I / T for I input tokens, not rounded.
//! * time to first token: round trip + queue + prefill.
//!
//! What needs a rate that is not known (T not finite, or not above 0) is infinite, unless there are no tokens to read.
//!
//! *Invariant*: no result is NaN or negative, so the bits of a result, read as an integer, order as the result does.
//! *Bound and cost*: linear in the priorities that have work, which are few; no allocation.
//! *Source*: the Stargate rules, sections 2.1, 2.2, 2.4 (capacity), 2.5 (KV rule).

use super::stats::{Cluster, KvCache, Stats};
use crate::proto::config::lb_config::Comparator;

/// The first number that 64 bits do not hold.
const TWO_TO_64: f64 = 18_446_744_073_709_551_616.0;

/// A rate that may be divided by: finite and above 0.
#[inline]
pub const fn is_rate(tps: f64) -> bool {
    // Bits of such numbers lie between those of 0 and of infinity; what is negative or NaN has higher ones. One comparison.
    tps.to_bits().wrapping_sub(1) < f64::MAX.to_bits()
}

/// Whole milliseconds for `tokens` at `tps`, rounded up; 0 tokens take none. `None`: no valid rate, or more than 64 bits hold.
pub fn delta_ms(tokens: u64, tps: f64) -> Option<u64> {
    if tokens == 0 {
        return Some(0);
    }
    if !is_rate(tps) {
        return None;
    }
    let ms = tokens as f64 / tps * 1000.0;
    if ms >= TWO_TO_64 {
        return None;
    }
    // Rounding up by hand: without SSE4.1 `ceil` is a call.
    let whole = ms as u64;
    Some(whole + u64::from((whole as f64) < ms))
}

/// Whole milliseconds until a request of that priority would leave the queue: `x-stargate-expected-queue-ms`. `None`: it cannot
/// be said, or never.
#[inline]
pub fn expected_queue_ms(stats: &Stats, priority: u32) -> Option<u64> {
    // A free slot: whatever waits for one need not wait here.
    if stats.num_running_queries < stats.max_engine_concurrency {
        return Some(0);
    }
    let Some((first, ms)) = stats.queue_times.first() else {
        return delta_ms(stats.queued_input_size, stats.last_mean_input_tps);
    };
    let mut ahead = if *first <= priority { *ms } else { 0 };
    for (key, ms) in &stats.queue_times[1..] {
        if *key > priority {
            break;
        }
        ahead = *ms;
    }
    Some(ahead)
}

/// [`expected_queue_ms`] as a number that compares: infinite where it is unknown.
#[inline]
pub fn queue_ms(stats: &Stats, priority: u32) -> f64 {
    match expected_queue_ms(stats, priority) {
        // Signed numbers convert in one instruction.
        Some(ms) if ms <= i64::MAX as u64 => ms.cast_signed() as f64,
        Some(ms) => ms as f64,
        None => f64::INFINITY,
    }
}

/// Milliseconds to read `tokens`, which may be a fraction of what was sent: infinite where the rate is unknown and `nothing` is false.
/// `nothing`: the request has no input, so that none of it needs a rate.
#[inline]
pub(super) fn prefill_ms(tokens: f64, nothing: bool, tps: f64) -> f64 {
    if is_rate(tps) { tokens / tps * 1000.0 } else { prefill_ms_unknown(nothing) }
}

/// Apart and cold: a selection over many clusters is a loop whose every instruction counts.
#[cold]
const fn prefill_ms_unknown(nothing: bool) -> f64 {
    if nothing { 0.0 } else { f64::INFINITY }
}

/// The round trip to a cluster in milliseconds, fractional.
#[inline]
pub(super) fn rtt_ms(cluster: &Cluster) -> f64 {
    // Signed numbers convert in one instruction, and no round trip takes 292 years.
    cluster.rtt_ns.cast_signed().max(0) as f64 / 1e6
}

/// Milliseconds to the first token of a request of so many input tokens and that priority.
pub fn ttft_ms(cluster: &Cluster, input_tokens: u64, priority: u32) -> f64 {
    ttft_ms_of(cluster, priority, input_tokens as f64, input_tokens == 0)
}

/// The same, with [`prefill_ms`]'s arguments.
#[inline]
pub(super) fn ttft_ms_of(cluster: &Cluster, priority: u32, tokens: f64, nothing: bool) -> f64 {
    let stats = &cluster.stats;
    let rtt = rtt_ms(cluster);
    let prefill = prefill_ms(tokens, nothing, stats.last_mean_input_tps);
    if stats.num_running_queries < stats.max_engine_concurrency {
        // No queue; mostly so, and two instructions fewer than to add 0.
        return rtt + prefill;
    }
    rtt + queue_ms(stats, priority) + prefill
}

/// What a cluster is worth to a request in a comparison by `comparator`: the lowest wins.
pub fn score(comparator: Comparator, cluster: &Cluster, input_tokens: u64, priority: u32) -> u64 {
    let stats = &cluster.stats;
    match comparator {
        Comparator::Ttft => ttft_ms(cluster, input_tokens, priority).to_bits(),
        Comparator::QueueTime => queue_ms(stats, priority).to_bits(),
        Comparator::InputWorkSeconds => {
            let tokens = stats.queued_input_size.saturating_add(input_tokens);
            let seconds = match tokens {
                0 => 0.0,
                tokens if is_rate(stats.last_mean_input_tps) => tokens as f64 / stats.last_mean_input_tps,
                _ => f64::INFINITY,
            };
            seconds.to_bits()
        }
        Comparator::Utilization => {
            (stats.num_running_queries as f64 / stats.max_engine_concurrency.max(1) as f64).to_bits()
        }
        Comparator::NumRequestsQueued => stats.queue_size,
    }
}

/// Whether one more request may go to a cluster, of which `max_queued` may wait for a free slot. Without a known limit: always.
#[inline]
pub fn has_capacity(stats: &Stats, max_queued: u64) -> bool {
    stats.max_engine_concurrency == 0
        || stats.num_running_queries < stats.max_engine_concurrency.saturating_add(max_queued)
}

/// Whether a KV cache has room for so many tokens. One that nothing is known of has none, not even for none.
#[inline]
pub fn kv_fits(kv: &KvCache, input_tokens: u64) -> bool {
    let present = kv.capacity_tokens > 0 || kv.used_tokens > 0 || kv.free_tokens > 0;
    present && kv.free_tokens >= input_tokens
}

#[cfg(test)]
mod tests;
