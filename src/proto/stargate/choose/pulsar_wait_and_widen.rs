//! pulsar-wait-and-widen: a key's ranking, whose first clusters are its affinity group and whose others open band by band.
//!
//! Without bounds on queue times, the first cluster of the ranking is chosen whenever it may be, however full. Otherwise the group is
//! tried; once the request has waited `cache_affinity_wait_ms`, the group and the open bands together: 2 clusters more at once, 4 more
//! after `band_widen_interval_ms`, 8 more after another, or all at once with an interval of 0.
//!
//! *Invariant*: bands open by the clock alone. While one is still to open, the answer is to wait.
//! *Bound and cost*: see `widen` and `ranking`.
//! *Source*: the Stargate rules, section 2.7.

use std::mem::take;

use super::super::balancer::{Ask, Choice, Selection};
use super::super::random::Rng;
use super::super::ranking::Rankings;
use super::super::stats::Cluster;
use super::pulsar::{eligible, ranked};
use super::widen::{Bounds, By, Closed, Rules, Scratch, select};
use super::{earlier, ms_to_ns};
use crate::proto::config::lb_config::{Pulsar, Widen};

/// The settings of an entry.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    pub pulsar: &'a Pulsar,
    pub widen: &'a Widen,
    pub group: u64,
    pub band_widen_interval_ms: Option<u64>,
    pub fallback_max_queued: u64,
}

/// How much of a ranking may be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Opening {
    /// Clusters of the group.
    pub group: usize,
    /// Clusters of the group and the open bands; as many as the group before any is open.
    pub open: usize,
    /// For how long bands have been opening. `None`: not yet.
    pub opening_ns: Option<u64>,
    /// When more opens, in nanoseconds from now. `None`: all is open.
    pub next_ns: Option<u64>,
}

impl Settings<'_> {
    /// What is open of a ranking of so many clusters after that time.
    pub(in super::super) fn opening(&self, elapsed_ns: u64, ranked: usize) -> Opening {
        let wait_ms = self.widen.cache_affinity_wait_ms;
        let group = self.group.clamp(1, usize::MAX as u64).min(ranked as u64) as usize;
        let Some(opening_ns) = elapsed_ns.checked_sub(ms_to_ns(wait_ms)) else {
            let next_ns = Some(ms_to_ns(wait_ms) - elapsed_ns);
            return Opening { group, open: group, opening_ns: None, next_ns };
        };
        let interval_ns = ms_to_ns(self.band_widen_interval_ms.unwrap_or(wait_ms));
        // 0: all at once.
        let bands = opening_ns.checked_div(interval_ns).map_or(u64::MAX, |full| full.saturating_add(1));
        let (mut open, mut width) = (group, 2_usize);
        for _ in 0..bands {
            if open == ranked {
                break;
            }
            open = open.saturating_add(width).min(ranked);
            width = width.saturating_mul(2);
        }
        let next_ns = (open < ranked).then(|| interval_ns.saturating_mul(bands) - opening_ns);
        Opening { group, open, opening_ns: Some(opening_ns), next_ns }
    }
}

/// See the module's text.
pub fn choose(
    settings: &Settings<'_>,
    rankings: &mut Rankings,
    scratch: &mut Scratch,
    clusters: &[Cluster],
    ask: &Ask<'_>,
    rng: &mut Rng,
) -> Choice {
    let pulsar = settings.pulsar;
    let key = rankings.take(clusters, ask.affinity_key);
    if Bounds::of(settings.widen).is_none()
        && let Some(first) = rankings.first(key)
        && eligible(pulsar, clusters, ask, first)
    {
        return Choice::Selected(ranked(pulsar, clusters, ask, &[first], 0));
    }
    let order = rankings.order(key);
    let opening = settings.opening(ask.elapsed_ns, order.len());
    let mut rules = Rules {
        widen: settings.widen,
        by: By::QueueThenLoad,
        max_queued: settings.widen.max_queued,
        elapsed_ns: ask.elapsed_ns,
        scale: settings.widen.cache_affinity_input_tokens_scale,
    };
    let mut attempt = |rules: &Rules<'_>, prefix: &[u32]| {
        let mut members = take(&mut scratch.members);
        members.clear();
        members.extend(prefix.iter().filter(|index| eligible(pulsar, clusters, ask, **index)));
        let pick = select(rules, clusters, members.as_slice(), ask, scratch, rng);
        scratch.members = members;
        let pick = pick?;
        let place = prefix.iter().position(|index| *index as usize == pick.index);
        let place = place.expect("members are of the prefix");
        let selection = ranked(pulsar, clusters, ask, order, place);
        Ok::<_, Closed>(Choice::Selected(Selection { considered: pick.considered, ..selection }))
    };
    let of_group = match attempt(&rules, &order[..opening.group]) {
        Ok(choice) => return choice,
        Err(closed) => closed,
    };
    let mut of_bands = Closed::default();
    if let Some(opening_ns) = opening.opening_ns {
        rules.elapsed_ns = opening_ns;
        rules.scale = 1.0;
        rules.max_queued = settings.fallback_max_queued;
        match attempt(&rules, &order[..opening.open]) {
            Ok(choice) => return choice,
            Err(closed) => of_bands = closed,
        }
    }
    scratch.bounds_ns = earlier(of_group.bounds_ns, of_bands.bounds_ns);
    match earlier(opening.next_ns, earlier(of_group.bucket_ns, of_bands.bucket_ns)) {
        Some(ns) => Choice::Wait { ns: scratch.bounds_ns.map_or(ns, |bounds| bounds.min(ns)) },
        None => Choice::Unavailable,
    }
}

#[cfg(test)]
mod tests;
