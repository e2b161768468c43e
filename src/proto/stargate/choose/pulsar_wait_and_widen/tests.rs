use super::super::super::hash::Text;
use super::super::super::stats::{KvCache, Stats};
use super::*;
use crate::proto::config::lb_config::RendezvousWeight;

const MS: u64 = 1_000_000;

/// So many single-slot clusters, all taken.
fn clusters(count: usize) -> Vec<Cluster> {
    let one = |i| Cluster {
        id: format!("cluster-{i:02}").into(),
        rtt_ns: 0,
        stats: Stats {
            max_input_tps: 100.0,
            last_mean_input_tps: 100.0,
            num_running_queries: 1,
            max_engine_concurrency: 1,
            ..Stats::default()
        },
    };
    (0..count).map(one).collect()
}

struct Fixture {
    pulsar: Pulsar,
    widen: Widen,
    group: u64,
    band_widen_interval_ms: Option<u64>,
    fallback_max_queued: u64,
    rankings: Rankings,
    scratch: Scratch,
    rng: Rng,
    version: u64,
}

/// With bounds on queue times that bound nothing here.
fn fixture(wait_ms: u64, interval_ms: Option<u64>) -> Fixture {
    Fixture {
        pulsar: Pulsar::default(),
        widen: Widen {
            cache_affinity_wait_ms: wait_ms,
            max_queue_time_floor_ms: Some(10_000),
            max_queue_time_ceil_ms: Some(10_000),
            ..Widen::default()
        },
        group: 1,
        band_widen_interval_ms: interval_ms,
        fallback_max_queued: 0,
        rankings: Rankings::new(Text::new(b"seed", b"", b"m"), RendezvousWeight::MaxInputTps),
        scratch: Scratch::default(),
        rng: Rng::new(3),
        version: 0,
    }
}

impl Fixture {
    fn order(&mut self, clusters: &[Cluster]) -> Vec<usize> {
        self.version += 1;
        self.rankings.look(clusters, self.version);
        let key = self.rankings.take(clusters, b"k");
        self.rankings.order(key).iter().map(|index| *index as usize).collect()
    }

    fn choose(&mut self, clusters: &[Cluster], ask: &Ask<'_>) -> Choice {
        self.order(clusters);
        let settings = Settings {
            pulsar: &self.pulsar,
            widen: &self.widen,
            group: self.group,
            band_widen_interval_ms: self.band_widen_interval_ms,
            fallback_max_queued: self.fallback_max_queued,
        };
        choose(&settings, &mut self.rankings, &mut self.scratch, clusters, ask, &mut self.rng)
    }

    /// Frees the clusters with these ranks, 1-based, and asks after so many milliseconds. Ranks that some try gives.
    fn ranks(&mut self, clusters: &[Cluster], free: &[usize], elapsed_ms: u64) -> Result<Vec<u32>, Choice> {
        let mut clusters = clusters.to_vec();
        let order = self.order(&clusters);
        free.iter().for_each(|rank| clusters[order[rank - 1]].stats.num_running_queries = 0);
        let mut ranks = Vec::new();
        for _ in 0..50 {
            match self.choose(&clusters, &at(elapsed_ms)) {
                Choice::Selected(selection) => {
                    assert_eq!(order[selection.rank_depth as usize - 1], selection.index);
                    ranks.push(selection.rank_depth);
                }
                other => return Err(other),
            }
        }
        ranks.sort_unstable();
        ranks.dedup();
        Ok(ranks)
    }
}

fn at(elapsed_ms: u64) -> Ask<'static> {
    Ask { affinity_key: b"k", elapsed_ns: elapsed_ms * MS, ..Ask::default() }
}

fn wait(ms: u64) -> Result<Vec<u32>, Choice> {
    Err(Choice::Wait { ns: ms * MS })
}

#[test]
fn the_timed_examples_of_the_rules() {
    let five = clusters(5);
    let mut own_interval = fixture(300, None);
    assert_eq!(own_interval.ranks(&five, &[2, 3, 4, 5], 100), wait(200));
    assert_eq!(own_interval.ranks(&five, &[2, 3, 4, 5], 300), Ok(vec![2, 3]));
    assert_eq!(own_interval.ranks(&five, &[4], 300), wait(300));
    assert_eq!(own_interval.ranks(&five, &[4], 600), Ok(vec![4]));
    let eight = clusters(8);
    let mut interval = fixture(100, Some(200));
    assert_eq!(interval.ranks(&eight, &[8], 100), wait(200));
    assert_eq!(interval.ranks(&eight, &[8], 350), wait(150));
    assert_eq!(interval.ranks(&eight, &[8], 500), Ok(vec![8]));
    assert_eq!(fixture(100, Some(0)).ranks(&eight, &[8], 100), Ok(vec![8]));
    assert_eq!(fixture(0, None).ranks(&eight, &[8], 0), Ok(vec![8]), "no wait: an interval of 0");
}

#[test]
fn bands_open_by_the_clock_even_when_every_cluster_is_full() {
    let eight = clusters(8);
    let mut bands = fixture(100, Some(200));
    assert_eq!(bands.ranks(&eight, &[], 0), wait(100));
    assert_eq!(bands.ranks(&eight, &[], 100), wait(200));
    assert_eq!(bands.ranks(&eight, &[], 499), wait(1));
    assert_eq!(bands.ranks(&eight, &[], 500), Err(Choice::Unavailable));
}

#[test]
fn prefixes_grow_by_doubling_bands() {
    let bands = fixture(100, Some(200));
    let widen = bands.widen.clone();
    let opening = |group, interval, elapsed_ms, ranked| {
        let settings = Settings {
            pulsar: &bands.pulsar,
            widen: &widen,
            group,
            band_widen_interval_ms: interval,
            fallback_max_queued: 0,
        };
        let opening = settings.opening(elapsed_ms * MS, ranked);
        (opening.group, opening.open, opening.next_ns.map(|ns| ns / MS))
    };
    assert_eq!(opening(1, Some(200), 0, 100), (1, 1, Some(100)));
    assert_eq!(opening(1, Some(200), 100, 100), (1, 3, Some(200)));
    assert_eq!(opening(1, Some(200), 300, 100), (1, 7, Some(200)));
    assert_eq!(opening(1, Some(200), 500, 100), (1, 15, Some(200)));
    assert_eq!(opening(1, Some(200), 699, 100), (1, 15, Some(1)));
    assert_eq!(opening(4, Some(200), 100, 100), (4, 6, Some(200)));
    assert_eq!(opening(4, Some(200), 300, 100), (4, 10, Some(200)));
    assert_eq!(opening(4, Some(200), 300, 10), (4, 10, None));
    assert_eq!(opening(9, Some(200), 0, 5), (5, 5, Some(100)), "the wait is waited for even so");
    assert_eq!(opening(u64::MAX, Some(200), 100, 5), (5, 5, None));
    assert_eq!(opening(0, Some(0), 100, 1000), (1, 1000, None));
    assert_eq!(opening(1, Some(200), 1 << 40, 1000), (1, 1000, None));
    assert_eq!(opening(1, None, 100, 100), (1, 3, Some(100)), "the wait's length");
    assert_eq!(opening(1, Some(200), 100, 0), (0, 0, None));
}

#[test]
fn s19_without_bounds_the_first_is_chosen_even_when_full() {
    let mut unbounded = fixture(300, None);
    unbounded.widen.max_queue_time_ceil_ms = None;
    let mut fleet = clusters(5);
    let order = unbounded.order(&fleet);
    fleet[order[0]].stats.queue_times = vec![(0, 1_000_000)];
    fleet[order[1]].stats.num_running_queries = 0;
    let chosen = |choice: Choice| match choice {
        Choice::Selected(selection) => (selection.index, selection.rank_depth, selection.after_kv_skip),
        other => panic!("{other:?}"),
    };
    assert_eq!(chosen(unbounded.choose(&fleet, &at(0))), (order[0], 1, false));
    // Once it failed the request, the others follow after the wait.
    let excluded = [order[0]];
    let failed = Ask { excluded: &excluded, ..at(0) };
    assert_eq!(unbounded.choose(&fleet, &failed), Choice::Wait { ns: 300 * MS });
    let later = Ask { elapsed_ns: 300 * MS, ..failed };
    assert_eq!(chosen(unbounded.choose(&fleet, &later)), (order[1], 2, false));
    // Short of cache: the same, and it is told.
    unbounded.pulsar.consider_kv_free_tokens = true;
    let kv = KvCache { capacity_tokens: 9, used_tokens: 0, free_tokens: 9 };
    fleet.iter_mut().for_each(|cluster| cluster.stats.kv = kv);
    fleet[order[0]].stats.kv = KvCache::default();
    assert_eq!(unbounded.choose(&fleet, &at(0)), Choice::Wait { ns: 300 * MS });
    assert_eq!(chosen(unbounded.choose(&fleet, &at(300))), (order[1], 2, true));
}

#[test]
fn s20_a_first_over_the_bounds_leaves_the_next_two() {
    let mut bounded = fixture(0, Some(10_000));
    bounded.widen.max_queue_time_floor_ms = Some(100);
    bounded.widen.max_queue_time_ceil_ms = Some(100);
    let mut fleet = clusters(5);
    fleet.iter_mut().for_each(|cluster| cluster.stats.max_engine_concurrency = 0);
    let order = bounded.order(&fleet);
    fleet[order[0]].stats.queue_times = vec![(0, 200)];
    assert_eq!(bounded.ranks(&fleet, &[], 0), Ok(vec![2, 3]));
}

#[test]
fn the_group_is_tried_first_and_queues_within_its_own_limit() {
    let eight = clusters(8);
    let mut grouped = fixture(300, None);
    grouped.group = 3;
    assert_eq!(grouped.ranks(&eight, &[2, 3, 4], 0), Ok(vec![2, 3]));
    assert_eq!(grouped.ranks(&eight, &[2, 5], 300), Ok(vec![2]), "before what has opened since");
    assert_eq!(grouped.ranks(&eight, &[4, 5, 6], 300), Ok(vec![4, 5]));
    grouped.fallback_max_queued = 1;
    assert_eq!(grouped.ranks(&eight, &[], 299), wait(1), "not within the group's own limit");
    let open = grouped.ranks(&eight, &[], 300).unwrap();
    assert_eq!(open, [1, 2, 3, 4, 5], "group and band alike");
    grouped.widen.max_queued = 1;
    assert_eq!(grouped.ranks(&eight, &[], 0), Ok(vec![1, 2, 3]));
}

#[test]
fn a_shorter_queue_then_a_lower_load_wins() {
    let mut fleet = clusters(3);
    let mut grouped = fixture(0, None);
    grouped.group = 3;
    for (cluster, running) in fleet.iter_mut().zip([5, 4, 6]) {
        cluster.stats.max_engine_concurrency = 10;
        cluster.stats.num_running_queries = running;
    }
    let order = grouped.order(&fleet);
    // Two of three are compared: the second cluster wins whenever it is drawn, the third never.
    let ranks = grouped.ranks(&fleet, &[], 0).unwrap();
    let rank = |cluster| order.iter().position(|index| *index == cluster).unwrap() as u32 + 1;
    assert!(ranks.contains(&rank(1)) && !ranks.contains(&rank(2)));
    fleet[1].stats.num_running_queries = 10;
    fleet[1].stats.queue_times = vec![(0, 1)];
    let ranks = grouped.ranks(&fleet, &[], 0).unwrap();
    assert!(!ranks.contains(&rank(1)));
}

#[test]
fn a_locked_bucket_of_an_open_band_is_waited_for() {
    let mut bands = fixture(100, Some(200));
    let mut fleet = clusters(8);
    let order = bands.order(&fleet);
    fleet[order[2]].rtt_ns = 100 * MS;
    // Its 25 ms begin with the band.
    assert_eq!(bands.ranks(&fleet, &[3], 100), wait(25));
    assert_eq!(bands.ranks(&fleet, &[3], 125), Ok(vec![3]));
}

#[test]
fn nothing_ranked_waits_for_the_wait_and_then_is_unavailable() {
    let mut fleet = clusters(3);
    fleet.iter_mut().for_each(|cluster| cluster.stats.max_input_tps = 0.0);
    let mut bands = fixture(100, None);
    assert_eq!(bands.choose(&fleet, &at(0)), Choice::Wait { ns: 100 * MS });
    assert_eq!(bands.choose(&fleet, &at(100)), Choice::Unavailable);
}
