//! pulsar: the best cluster of a key's ranking that may be chosen.
//!
//! Clusters that failed this request are passed over, and, where the configuration says so, those whose KV cache has no room for its
//! input. Queues and limits are not looked at, and nothing is waited for. A request without a key has the empty one.
//!
//! *Invariant*: the rank of a choice is its place in the whole ranking, those passed over included.
//! *Bound and cost*: see `ranking`; a walk as long as clusters are passed over.
//! *Source*: the Stargate rules, section 2.5.

use super::super::balancer::{Ask, Choice, Selection};
use super::super::estimate::kv_fits;
use super::super::ranking::Rankings;
use super::super::stats::Cluster;
use crate::proto::config::lb_config::Pulsar;

/// Whether a cluster may be chosen: neither excluded nor, where that counts, short of cache.
pub(super) fn eligible(rules: &Pulsar, clusters: &[Cluster], ask: &Ask<'_>, index: u32) -> bool {
    !ask.excludes(index as usize) && !short_of_kv(rules, clusters, ask, index)
}

/// Whether a cluster's cache has no room, where that counts.
pub(super) fn short_of_kv(rules: &Pulsar, clusters: &[Cluster], ask: &Ask<'_>, index: u32) -> bool {
    rules.consider_kv_free_tokens && !kv_fits(&clusters[index as usize].stats.kv, ask.input_tokens)
}

/// The choice of a cluster at a place in the ranking; `order` begins with those that are ranked better.
pub(super) fn ranked(
    rules: &Pulsar,
    clusters: &[Cluster],
    ask: &Ask<'_>,
    order: &[u32],
    place: usize,
) -> Selection {
    let skipped = |index: &u32| !ask.excludes(*index as usize) && short_of_kv(rules, clusters, ask, *index);
    Selection {
        index: order[place] as usize,
        rank_depth: place as u32 + 1,
        after_kv_skip: rules.consider_kv_free_tokens && order[..place].iter().any(skipped),
        considered: 1,
    }
}

/// See the module's text.
pub fn choose(rules: &Pulsar, rankings: &mut Rankings, clusters: &[Cluster], ask: &Ask<'_>) -> Choice {
    let key = rankings.take(clusters, ask.affinity_key);
    // Mostly the first will do, and then nothing need be sorted.
    match rankings.first(key) {
        None => return Choice::Unavailable,
        Some(first) if eligible(rules, clusters, ask, first) => {
            return Choice::Selected(ranked(rules, clusters, ask, &[first], 0));
        }
        Some(_) => {}
    }
    let order = rankings.order(key);
    match order.iter().position(|index| eligible(rules, clusters, ask, *index)) {
        Some(place) => Choice::Selected(ranked(rules, clusters, ask, order, place)),
        None => Choice::Unavailable,
    }
}

#[cfg(test)]
mod tests;
