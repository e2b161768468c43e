//! Estimated times to first token of many clusters, as a widening selection wants them.
//!
//! *Invariant*: a time is infinite exactly where the cluster must not be chosen or the estimate is infinite; any other is the estimate to
//! the last bit, whichever way it was computed.
//! *Bound and cost*: one pass, about 20 instructions for a cluster without a queue, 60 where queue times are looked up. No allocation
//! once the buffer has its size.
//! *Source*: the Stargate rules, sections 2.1 and 2.4.

use super::super::balancer::Ask;
use super::super::estimate::{prefill_ms, queue_ms, rtt_ms, ttft_ms_of};
use super::super::stats::Cluster;
use crate::proto::config::lb_config::Widen;

/// Clusters to select from: all, or some by index.
pub trait Members: Copy {
    fn count(self) -> usize;
    fn index(self, position: usize) -> usize;
    /// The clusters if these are all of them.
    fn whole(self, clusters: &[Cluster]) -> Option<&[Cluster]>;
    /// In the order of positions.
    fn each(self, clusters: &[Cluster]) -> impl Iterator<Item = (usize, &Cluster)>;
}

/// All of the clusters, so many.
#[derive(Clone, Copy, Debug)]
pub struct All(pub usize);

impl Members for All {
    #[inline]
    fn count(self) -> usize {
        self.0
    }
    #[inline]
    fn index(self, position: usize) -> usize {
        position
    }
    #[inline]
    fn whole(self, clusters: &[Cluster]) -> Option<&[Cluster]> {
        Some(clusters)
    }
    #[inline]
    fn each(self, clusters: &[Cluster]) -> impl Iterator<Item = (usize, &Cluster)> {
        clusters.iter().enumerate()
    }
}

impl Members for &[u32] {
    #[inline]
    fn count(self) -> usize {
        self.len()
    }
    #[inline]
    fn index(self, position: usize) -> usize {
        self[position] as usize
    }
    #[inline]
    fn whole(self, _: &[Cluster]) -> Option<&[Cluster]> {
        None
    }
    #[inline]
    fn each(self, clusters: &[Cluster]) -> impl Iterator<Item = (usize, &Cluster)> {
        self.iter().map(|index| (*index as usize, &clusters[*index as usize]))
    }
}

/// What of a request and of a cluster's queue counts in a time.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    priority: u32,
    /// Input, scaled.
    tokens: f64,
    /// The request has no input, or it is ignored.
    nothing: bool,
    ignore_queue: bool,
}

impl Counted {
    /// With the request's own prefill counting for `scale`, 0 to 1.
    pub fn of(widen: &Widen, scale: f64, ask: &Ask<'_>) -> Counted {
        let nothing = ask.input_tokens == 0 || widen.ignore_input_processing_time;
        Counted {
            priority: ask.priority,
            tokens: if nothing { 0.0 } else { ask.input_tokens as f64 * scale },
            nothing,
            ignore_queue: widen.ignore_queue_time,
        }
    }

    /// Milliseconds that a cluster needs to read the input.
    pub fn prefill_ms(&self, cluster: &Cluster) -> f64 {
        prefill_ms(self.tokens, self.nothing, cluster.stats.last_mean_input_tps)
    }

    /// The time, queue included.
    #[inline]
    fn ttft_ms(&self, cluster: &Cluster) -> f64 {
        ttft_ms_of(cluster, self.priority, self.tokens, self.nothing)
    }
}

/// Writes the members' times by position, in milliseconds; gives the least. Excluded clusters and those whose queue is longer than
/// `allowed_ms` (infinite: no bound) have an infinite one.
#[inline(never)]
pub fn take_times<M: Members>(
    counted: Counted,
    clusters: &[Cluster],
    members: M,
    ask: &Ask<'_>,
    allowed_ms: f64,
    times: &mut Vec<f64>,
) -> f64 {
    times.resize(members.count(), f64::INFINITY);
    let mut first = f64::INFINITY;
    let each = members.each(clusters).zip(&mut *times);
    if !ask.excludes_some() && allowed_ms == f64::INFINITY && !counted.ignore_queue {
        // What most requests need, and nothing else.
        if let Some(clusters) = members.whole(clusters) {
            return take_all_times(counted, clusters, times);
        }
        for ((_, cluster), time) in each {
            *time = counted.ttft_ms(cluster);
            first = lesser(first, *time);
        }
        return first;
    }
    for ((index, cluster), time) in each {
        let queue = queue_ms(&cluster.stats, counted.priority);
        *time = if queue > allowed_ms || ask.excludes(index) {
            f64::INFINITY
        } else {
            let queue = if counted.ignore_queue { 0.0 } else { queue };
            rtt_ms(cluster) + queue + counted.prefill_ms(cluster)
        };
        first = lesser(first, *time);
    }
    first
}

/// Times of all clusters, two at once: the compiler makes vectors of two of them, which takes a third off the instructions.
#[inline]
fn take_all_times(counted: Counted, clusters: &[Cluster], times: &mut [f64]) -> f64 {
    let mut first = [f64::INFINITY; 2];
    let nearer = |first: [f64; 2], times: [f64; 2]| [lesser(first[0], times[0]), lesser(first[1], times[1])];
    let (pairs, last) = clusters.as_chunks::<2>();
    let (times, last_time) = times.as_chunks_mut::<2>();
    for ([a, b], times) in pairs.iter().zip(times) {
        // No queue: a free slot, or no queued work at all.
        let free = |Cluster { stats, .. }: &Cluster| {
            stats.num_running_queries < stats.max_engine_concurrency
                || (stats.queue_times.is_empty() && stats.queued_input_size == 0)
        };
        // With what `is_rate` compares and the round trips in one number: where that is low, each of them is.
        let rate = |cluster: &Cluster| cluster.stats.last_mean_input_tps.to_bits().wrapping_sub(1);
        let together = rate(a) | rate(b) | a.rtt_ns | b.rtt_ns;
        if free(a) && free(b) && together < f64::MAX.to_bits() {
            // `ttft_ms` of such a cluster.
            let time = |cluster: &Cluster| {
                let prefill = counted.tokens / cluster.stats.last_mean_input_tps * 1000.0;
                cluster.rtt_ns.cast_signed() as f64 / 1e6 + prefill
            };
            let both = [time(a), time(b)];
            first = nearer(first, both);
            *times = both;
        } else {
            take_two_times(&counted, a, b, times);
            first = nearer(first, *times);
        }
    }
    for (cluster, time) in last.iter().zip(last_time) {
        *time = counted.ttft_ms(cluster);
        first[0] = lesser(first[0], *time);
    }
    lesser(first[0], first[1])
}

/// Any two times. Apart, so that the loop over clusters without a queue has the registers to itself.
#[inline(never)]
fn take_two_times(counted: &Counted, a: &Cluster, b: &Cluster, times: &mut [f64; 2]) {
    *times = [a, b].map(|cluster| counted.ttft_ms(cluster));
}

/// As one instruction: there is no NaN to ask about.
#[inline]
fn lesser(a: f64, b: f64) -> f64 {
    if b < a { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::super::super::random::Rng;
    use super::super::super::stats::Stats;
    use super::*;

    /// Clusters of all kinds, mostly free ones.
    fn clusters(count: usize, rng: &mut Rng) -> Vec<Cluster> {
        let one = |_| {
            let mut stats = Stats {
                last_mean_input_tps: 1000.0 + rng.below(1000) as f64 / 7.0,
                num_running_queries: 3,
                max_engine_concurrency: 4,
                queued_input_size: rng.below(2) as u64 * 77,
                ..Stats::default()
            };
            match rng.below(16) {
                0 => stats.last_mean_input_tps = [0.0, -1.0, f64::NAN, f64::INFINITY, f64::MAX][rng.below(5)],
                1 => stats.max_engine_concurrency = 0,
                2 => stats.num_running_queries = 4,
                3 => stats.queue_times = vec![(1, 50)],
                4 => {
                    stats.queue_times = vec![(1, 50), (2, 70), (4, u64::MAX)];
                    stats.num_running_queries = u64::MAX;
                }
                _ => {}
            }
            let rtt_ns = if rng.below(30) == 0 { u64::MAX } else { rng.below(5_000_000) as u64 };
            Cluster { id: "".into(), rtt_ns, stats }
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn two_at_once_are_one_by_one_to_the_last_bit() {
        let mut rng = Rng::new(17);
        let mut times = Vec::new();
        for round in 0..2_000 {
            let clusters = clusters(rng.below(20), &mut rng);
            let input_tokens = [0, 1, 999, u64::MAX][rng.below(4)];
            let ask = Ask { input_tokens, priority: rng.below(5) as u32, ..Ask::default() };
            let counted = Counted::of(&Widen::default(), 1.0, &ask);
            let first = take_times(counted, &clusters, All(clusters.len()), &ask, f64::INFINITY, &mut times);
            let singly: Vec<f64> = clusters.iter().map(|cluster| counted.ttft_ms(cluster)).collect();
            let bits = |times: &[f64]| times.iter().map(|time| time.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&times), bits(&singly), "round {round}");
            assert_eq!(first, singly.iter().copied().fold(f64::INFINITY, f64::min));
            // By index, and the long way: a bound that bounds nothing finite.
            let every: Vec<u32> = (0..clusters.len() as u32).collect();
            take_times(counted, &clusters, every.as_slice(), &ask, f64::INFINITY, &mut times);
            assert_eq!(bits(&times), bits(&singly));
            take_times(counted, &clusters, every.as_slice(), &ask, f64::MAX, &mut times);
            assert_eq!(bits(&times), bits(&singly));
        }
    }

    #[test]
    fn what_is_ignored_counts_for_nothing() {
        let mut rng = Rng::new(18);
        let mut clusters = clusters(1, &mut rng);
        clusters[0].rtt_ns = 7_000_000;
        clusters[0].stats = Stats {
            last_mean_input_tps: 100.0,
            queue_times: vec![(4, 25)],
            queued_input_size: 999,
            ..Stats::default()
        };
        let ask = Ask { input_tokens: 200, priority: 4, ..Ask::default() };
        let mut times = Vec::new();
        for (ignore_queue_time, ignore_input_processing_time, scale, wanted) in [
            (false, false, 1.0, 2032.0),
            (true, false, 1.0, 2007.0),
            (false, true, 1.0, 32.0),
            (true, true, 1.0, 7.0),
            (false, false, 0.25, 532.0),
            (false, false, 0.0, 32.0),
        ] {
            let widen = Widen { ignore_queue_time, ignore_input_processing_time, ..Widen::default() };
            let counted = Counted::of(&widen, scale, &ask);
            let first = take_times(counted, &clusters, All(1), &ask, f64::INFINITY, &mut times);
            assert_eq!(first, wanted);
        }
        // Without a rate, no scale makes a prefill finite.
        clusters[0].stats.last_mean_input_tps = 0.0;
        let counted = Counted::of(&Widen::default(), 0.0, &ask);
        let first = take_times(counted, &clusters, All(1), &ask, f64::INFINITY, &mut times);
        assert_eq!(first, f64::INFINITY);
        let widen = Widen { ignore_input_processing_time: true, ..Widen::default() };
        let counted = Counted::of(&widen, 1.0, &ask);
        assert_eq!(take_times(counted, &clusters, All(1), &ask, f64::INFINITY, &mut times), 32.0);
    }
}
