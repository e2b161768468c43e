//! wait-and-widen: the clusters of a key's affinity group first, then all.
//!
//! A group exists where the configuration gives it a size and the request has an affinity key. Its own prefill may count for less there.
//! Once a request has waited `cache_affinity_wait_ms`, all clusters are tried as well at each evaluation, and their buckets open from then
//! on. Without a group all clusters are tried from arrival on.
//!
//! *Invariant*: before that wait is over nobody outside the group is chosen, objectives and deadlines notwithstanding.
//! *Bound and cost*: see `widen` and `ring`.
//! *Source*: the Stargate rules, section 2.4.

use super::super::balancer::{Ask, Choice, Selection};
use super::super::random::Rng;
use super::super::ring::Ring;
use super::super::stats::Cluster;
use super::times::All;
use super::widen::{By, Closed, Rules, Scratch, select};
use super::{earlier, ms_to_ns};
use crate::proto::config::lb_config::WaitAndWiden;

/// Whether the request has an affinity group.
#[inline]
pub(in super::super) fn has_group(rules: &WaitAndWiden, ask: &Ask<'_>) -> bool {
    rules.group > 0 && !ask.affinity_key.is_empty()
}

/// How long the group alone is tried, in nanoseconds from arrival.
#[inline]
pub(in super::super) fn group_only_ns(rules: &WaitAndWiden) -> u64 {
    ms_to_ns(rules.widen.cache_affinity_wait_ms)
}

/// See the module's text.
pub fn choose(
    rules: &WaitAndWiden,
    ring: &mut Ring,
    scratch: &mut Scratch,
    clusters: &[Cluster],
    version: u64,
    ask: &Ask<'_>,
    rng: &mut Rng,
) -> Choice {
    let widen = &rules.widen;
    let mut step = Rules {
        widen,
        by: By::Score(rules.comparator),
        max_queued: widen.max_queued,
        elapsed_ns: ask.elapsed_ns,
        scale: 1.0,
    };
    let mut rank_depth = 1;
    let mut of_group = Closed::default();
    if has_group(rules, ask) && !clusters.is_empty() {
        ring.look(clusters, version);
        let group = ring.group(ask.affinity_key, rules.group);
        let in_group = Rules { scale: widen.cache_affinity_input_tokens_scale, ..step };
        match select(&in_group, clusters, group, ask, scratch, rng) {
            Ok(pick) => return selected(pick.index, rank_depth, pick.considered),
            Err(closed) => of_group = closed,
        }
        let alone_ns = group_only_ns(rules);
        let Some(elapsed_ns) = ask.elapsed_ns.checked_sub(alone_ns) else {
            let opens_ns = Some(alone_ns - ask.elapsed_ns);
            let ns = earlier(opens_ns, earlier(of_group.bucket_ns, of_group.bounds_ns));
            return Choice::Wait { ns: ns.expect("the first is some") };
        };
        step.elapsed_ns = elapsed_ns;
        rank_depth = group.len() as u32 + 1;
    }
    match select(&step, clusters, All(clusters.len()), ask, scratch, rng) {
        Ok(pick) => selected(pick.index, rank_depth, pick.considered),
        Err(closed) => {
            scratch.bounds_ns = earlier(of_group.bounds_ns, closed.bounds_ns);
            match earlier(of_group.bucket_ns, closed.bucket_ns) {
                Some(ns) => Choice::Wait { ns: scratch.bounds_ns.map_or(ns, |bounds| bounds.min(ns)) },
                None => Choice::Unavailable,
            }
        }
    }
}

fn selected(index: usize, rank_depth: u32, considered: u32) -> Choice {
    Choice::Selected(Selection { index, rank_depth, after_kv_skip: false, considered })
}

#[cfg(test)]
mod tests;
