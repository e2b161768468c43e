//! What both widening algorithms do with a set of clusters: near ones first, farther ones as the request waits.
//!
//! Clusters are ordered by estimated time to first token. The first and all within a bucket's width of it are open at once; the next one
//! begins a bucket that opens when the request has waited for its distance from the beginning of the bucket before, times the
//! configured factor; and so on. Of the open clusters with capacity, n are drawn uniformly and the best of these is chosen, the one
//! drawn first among equals. Clusters whose queue is longer than the configured bounds allow are left out before all that.
//!
//! An open cluster is one whose time is within a bucket's width of where the last open bucket begins: times before that are lower
//! still. So the order need not be known, only where buckets begin, which a pass per bucket finds; with many buckets the times are
//! sorted after all. n are drawn from all clusters, and what is not open is passed over; if that takes too many draws, the open ones are
//! listed and drawn from. Either way each set of n is as likely as any other.
//!
//! *Invariant*: an excluded, locked or full cluster, or one over the queue bounds, is never chosen.
//! *Bound and cost*: one pass over the clusters for the times; for a request that has just arrived nothing else is a pass as long as
//! a good part of the clusters is open. A request that waited or finds nothing: some passes more, and a sort of the times at worst.
//! No allocation in the steady state.
//! *Source*: the Stargate rules, section 2.4.

use super::super::balancer::Ask;
use super::super::estimate::{has_capacity, queue_ms, score};
use super::super::random::Rng;
use super::super::stats::Cluster;
use super::times::{Counted, Members, take_times};
use crate::proto::config::lb_config::{Comparator, Widen};

/// Draw one by one up to this n; beyond it, the open clusters are listed first.
const DRAWN_MAX: usize = 4;
/// Buckets that a pass each is made for before times are sorted.
const PASSES_MAX: usize = 4;

/// By what the clusters that were drawn are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Score(Comparator),
    /// The shorter queue time; among equals the lower share of the limit in use, or, where either has no limit, fewer requests.
    QueueThenLoad,
}

/// What one selection goes by.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub widen: &'a Widen,
    pub by: By,
    /// Requests that may queue at a cluster over its limit.
    pub max_queued: u64,
    /// For how long buckets have been opening.
    pub elapsed_ns: u64,
    /// What the request's own prefill counts for.
    pub scale: f64,
}

/// A cluster was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    pub index: usize,
    /// How many were drawn and compared.
    pub considered: u32,
}

/// Nothing can be chosen now; what time alone will change. In nanoseconds from now, at least 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// When the bucket of the nearest locked cluster with capacity opens.
    pub bucket_ns: Option<u64>,
    /// When the queue bounds, which grow with a request's wait towards its objective, let another cluster in.
    pub bounds_ns: Option<u64>,
}

/// Room to work in, kept between selections.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Of a ranking: the clusters that may be chosen.
    pub members: Vec<u32>,
    /// After a choice of nothing: [`Closed::bounds_ns`] of its selections together.
    pub bounds_ns: Option<u64>,
    /// Times to first token by position; infinite: not to be chosen.
    times: Vec<f64>,
    sorted: Vec<f64>,
    open: Vec<u32>,
}

/// Where the last open bucket begins, and what is left of the wait that opened it.
#[derive(Clone, Copy, Debug)]
struct Reach {
    start: f64,
    size: f64,
    factor: f64,
    slept_ms: f64,
}

impl Reach {
    #[inline]
    fn within(&self, time: f64) -> bool {
        // Infinity is within nothing.
        time - self.start <= self.size
    }

    /// The bucket of a time beyond the last open one opens if the wait suffices.
    fn open(&mut self, next: f64) -> bool {
        let need_ms = (next - self.start) * self.factor;
        if self.slept_ms < need_ms {
            return false;
        }
        self.slept_ms -= need_ms;
        self.start = next;
        true
    }
}

/// Chooses among `members` of `clusters`.
pub fn select<M: Members>(
    rules: &Rules<'_>,
    clusters: &[Cluster],
    members: M,
    ask: &Ask<'_>,
    scratch: &mut Scratch,
    rng: &mut Rng,
) -> Result<Pick, Closed> {
    let allowed_ms = Bounds::of(rules.widen).map_or(f64::INFINITY, |bounds| bounds.allowed_ms(ask));
    let counted = Counted::of(rules.widen, rules.scale, ask);
    let first = take_times(counted, clusters, members, ask, allowed_ms, &mut scratch.times);
    if first == f64::INFINITY {
        let bounds_ns = bounds_open_ns(rules, clusters, members, ask);
        return Err(Closed { bucket_ns: None, bounds_ns });
    }
    let mut reach = Reach {
        start: first,
        size: rules.widen.ttft_bucket_size_ms as f64,
        factor: rules.widen.next_bucket_unlock_factor,
        slept_ms: rules.elapsed_ns as f64 / 1e6,
    };
    if reach.factor <= 0.0 {
        // No bucket needs a wait: nothing finite lies beyond this.
        reach.start = f64::MAX;
    } else if reach.slept_ms >= reach.size * reach.factor {
        // Any other bucket is more than its size away, and needs at least that much.
        widen(&mut reach, &scratch.times, &mut scratch.sorted);
    }
    match draw(rules, clusters, members, ask, &reach, scratch, rng) {
        Some(pick) => Ok(pick),
        None => Err(Closed {
            bucket_ns: bucket_opens_ns(rules, clusters, members, reach, scratch),
            bounds_ns: bounds_open_ns(rules, clusters, members, ask),
        }),
    }
}

/// Opens buckets one after the other, as far as the wait suffices.
fn widen(reach: &mut Reach, times: &[f64], sorted: &mut Vec<f64>) {
    let last =
        times.iter().filter(|time| **time < f64::INFINITY).fold(0.0, |last: f64, time| last.max(*time));
    // All buckets together need the whole distance times the factor, rounded a little at each of them.
    if (last - reach.start) * reach.factor * (1.0 + 1e-6) < reach.slept_ms {
        reach.start = f64::MAX;
        return;
    }
    for _ in 0..PASSES_MAX {
        let mut next = f64::INFINITY;
        for time in times {
            if *time < next && !reach.within(*time) {
                next = *time;
            }
        }
        if next == f64::INFINITY || !reach.open(next) {
            return;
        }
    }
    sorted.clear();
    sorted.extend(times.iter().filter(|time| **time < f64::INFINITY && !reach.within(**time)));
    sorted.sort_unstable_by(f64::total_cmp);
    for time in sorted {
        if !reach.within(*time) && !reach.open(*time) {
            return;
        }
    }
}

/// Draws up to n open clusters with capacity, and chooses the best of them.
fn draw<M: Members>(
    rules: &Rules<'_>,
    clusters: &[Cluster],
    members: M,
    ask: &Ask<'_>,
    reach: &Reach,
    scratch: &mut Scratch,
    rng: &mut Rng,
) -> Option<Pick> {
    let count = members.count();
    let n = usize::try_from(rules.widen.n).unwrap_or(usize::MAX).max(1);
    let times = &scratch.times[..];
    let open = |position: usize, time: f64| {
        reach.within(time) && has_capacity(&clusters[members.index(position)].stats, rules.max_queued)
    };
    if n <= DRAWN_MAX && n <= count {
        let mut drawn = [0; DRAWN_MAX];
        let mut held = 0;
        for _ in 0..n + 4 {
            let position = rng.below(count) as u32;
            if open(position as usize, times[position as usize]) && !drawn[..held].contains(&position) {
                drawn[held] = position;
                held += 1;
                if held == n {
                    return Some(best(rules, clusters, members, ask, times, &drawn[..n]));
                }
            }
        }
    }
    // Few are open, or many are wanted.
    let listed = &mut scratch.open;
    listed.clear();
    for (position, time) in times.iter().enumerate() {
        if open(position, *time) {
            listed.push(position as u32);
        }
    }
    let found = listed.len();
    let n = n.min(found);
    for held in 0..n {
        listed.swap(held, held + rng.below(found - held));
    }
    if n == 0 {
        return None;
    }
    Some(best(rules, clusters, members, ask, times, &scratch.open[..n]))
}

/// The best of the positions drawn, of which there is at least one.
#[inline]
fn best<M: Members>(
    rules: &Rules<'_>,
    clusters: &[Cluster],
    members: M,
    ask: &Ask<'_>,
    times: &[f64],
    drawn: &[u32],
) -> Pick {
    let widen = rules.widen;
    let mut held = drawn[0];
    if rules.by == By::Score(Comparator::Ttft)
        // Scores are never scaled, and count what the settings may ignore.
        && rules.scale == 1.0
        && !(widen.ignore_queue_time || widen.ignore_input_processing_time)
    {
        for position in &drawn[1..] {
            if times[*position as usize] < times[held as usize] {
                held = *position;
            }
        }
    } else {
        let merit = |position: u32| Merit::of(rules.by, &clusters[members.index(position as usize)], ask);
        let mut most = merit(held);
        for position in &drawn[1..] {
            let merit = merit(*position);
            if merit.beats(&most) {
                (most, held) = (merit, *position);
            }
        }
    }
    Pick { index: members.index(held as usize), considered: drawn.len() as u32 }
}

/// What a cluster is compared by.
#[derive(Clone, Copy)]
struct Merit {
    score: u64,
    running: u64,
    limit: u64,
}

impl Merit {
    fn of(by: By, cluster: &Cluster, ask: &Ask<'_>) -> Merit {
        match by {
            // Equal scores are equal merits.
            By::Score(comparator) => Merit {
                score: score(comparator, cluster, ask.input_tokens, ask.priority),
                running: 0,
                limit: 0,
            },
            By::QueueThenLoad => Merit {
                score: queue_ms(&cluster.stats, ask.priority).to_bits(),
                running: cluster.stats.num_running_queries,
                limit: cluster.stats.max_engine_concurrency,
            },
        }
    }

    fn beats(&self, other: &Merit) -> bool {
        if self.score != other.score {
            return self.score < other.score;
        }
        if self.limit == 0 || other.limit == 0 {
            return self.running < other.running;
        }
        // One division each, as the rules have it, so that what is equal by them is equal here.
        (self.running as f64 / self.limit as f64) < (other.running as f64 / other.limit as f64)
    }
}

/// When the bucket of the nearest locked cluster with capacity opens.
#[cold]
fn bucket_opens_ns<M: Members>(
    rules: &Rules<'_>,
    clusters: &[Cluster],
    members: M,
    mut reach: Reach,
    scratch: &mut Scratch,
) -> Option<u64> {
    let mut useful = f64::INFINITY;
    for ((_, cluster), time) in members.each(clusters).zip(&scratch.times) {
        if *time < useful && !reach.within(*time) && has_capacity(&cluster.stats, rules.max_queued) {
            useful = *time;
        }
    }
    if useful == f64::INFINITY {
        return None;
    }
    let sorted = &mut scratch.sorted;
    sorted.clear();
    sorted.extend(scratch.times.iter().filter(|time| **time <= useful));
    sorted.sort_unstable_by(f64::total_cmp);
    let first = Reach { start: sorted[0], ..reach };
    let mut wait_ms = -reach.slept_ms;
    for time in &*sorted {
        if !reach.within(*time) {
            wait_ms += (time - reach.start) * reach.factor;
            reach.start = *time;
        }
    }
    let mut ns = at_least_1_ns(wait_ms);
    // Whoever waits that long walks the buckets, and rounds at each of them.
    for _ in 0..3 {
        let slept_ms = rules.elapsed_ns.saturating_add(ns) as f64 / 1e6;
        let mut then = Reach { slept_ms, ..first };
        if sorted.iter().all(|time| then.within(*time) || then.open(*time)) {
            break;
        }
        ns = ns.saturating_add(1);
    }
    Some(ns)
}

/// Rounded up, so that the time has come when it is over.
fn at_least_1_ns(ms: f64) -> u64 {
    ((ms * 1e6).ceil() as u64).max(1)
}

/// The bounds on a cluster's queue time, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    floor_ms: f64,
    ceil_ms: f64,
}

impl Bounds {
    /// `None`: not both are configured, so there are none.
    #[inline]
    pub fn of(widen: &Widen) -> Option<Bounds> {
        let (floor_ms, ceil_ms) = widen.queue_time_ms()?;
        Some(Bounds { floor_ms: floor_ms as f64, ceil_ms: ceil_ms as f64 })
    }

    /// The longest queue that the request may join now: from the floor at its arrival to the ceiling at its objective. Without an
    /// objective, the ceiling.
    pub fn allowed_ms(self, ask: &Ask<'_>) -> f64 {
        let waited = match ask.slo_ms {
            None | Some(0) => 1.0,
            Some(slo_ms) => (ask.elapsed_ns as f64 / 1e6 / slo_ms as f64).clamp(0.0, 1.0),
        };
        self.floor_ms + (self.ceil_ms - self.floor_ms) * waited
    }

    /// Milliseconds after arrival at which a queue of that length is allowed. `None`: now, or never by time alone.
    fn opens_ms(self, ask: &Ask<'_>, queue_ms: f64) -> Option<f64> {
        let slo_ms = ask.slo_ms.filter(|slo_ms| *slo_ms > 0)?;
        if queue_ms <= self.allowed_ms(ask) || queue_ms > self.ceil_ms {
            return None;
        }
        // Over what is allowed and not over the ceiling: the ceiling is above the floor.
        Some(slo_ms as f64 * ((queue_ms - self.floor_ms) / (self.ceil_ms - self.floor_ms)))
    }
}

/// When the queue bounds let the next cluster with capacity in.
#[cold]
fn bounds_open_ns<M: Members>(
    rules: &Rules<'_>,
    clusters: &[Cluster],
    members: M,
    ask: &Ask<'_>,
) -> Option<u64> {
    let bounds = Bounds::of(rules.widen)?;
    ask.slo_ms?;
    let counted = Counted::of(rules.widen, rules.scale, ask);
    let elapsed_ms = ask.elapsed_ns as f64 / 1e6;
    let mut opens_ms: Option<f64> = None;
    for (index, cluster) in members.each(clusters) {
        let usable = !ask.excludes(index)
            && has_capacity(&cluster.stats, rules.max_queued)
            && counted.prefill_ms(cluster) < f64::INFINITY;
        if !usable {
            continue;
        }
        if let Some(ms) = bounds.opens_ms(ask, queue_ms(&cluster.stats, ask.priority)) {
            opens_ms = Some(opens_ms.map_or(ms, |least| least.min(ms)));
        }
    }
    opens_ms.map(|ms| at_least_1_ns(ms - elapsed_ms))
}

#[cfg(test)]
mod tests;
