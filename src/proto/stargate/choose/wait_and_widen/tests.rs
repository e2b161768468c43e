use super::super::super::hash::Text;
use super::super::super::stats::Stats;
use super::*;
use crate::proto::config::lb_config::{Comparator, Widen};

const MS: u64 = 1_000_000;

/// Clusters `a`, `b`, … of unknown limits at these distances, in milliseconds.
fn clusters(rtts_ms: &[u64]) -> Vec<Cluster> {
    let one = |(i, rtt_ms): (usize, &u64)| Cluster {
        id: char::from(b'a' + i as u8).to_string().into(),
        rtt_ns: rtt_ms * MS,
        stats: Stats { last_mean_input_tps: 1000.0, ..Stats::default() },
    };
    rtts_ms.iter().enumerate().map(one).collect()
}

fn fill(cluster: &mut Cluster) {
    cluster.stats.num_running_queries = 1;
    cluster.stats.max_engine_concurrency = 1;
}

struct Fixture {
    rules: WaitAndWiden,
    ring: Ring,
    scratch: Scratch,
    rng: Rng,
    version: u64,
}

fn fixture(rules: WaitAndWiden) -> Fixture {
    let ring = Ring::new(Text::new(b"", b"", b"m"), rules.virtual_nodes);
    Fixture { rules, ring, scratch: Scratch::default(), rng: Rng::new(6), version: 0 }
}

/// As `model-a` of the deployment guide's example: groups of two, and 200 ms for them alone.
fn affine(group: u64, cache_affinity_wait_ms: u64) -> WaitAndWiden {
    let widen = Widen { cache_affinity_wait_ms, ..Widen::default() };
    WaitAndWiden { group, widen, ..WaitAndWiden::default() }
}

impl Fixture {
    fn choose(&mut self, clusters: &[Cluster], ask: &Ask<'_>) -> Choice {
        self.version += 1;
        let (rules, ring) = (&self.rules, &mut self.ring);
        choose(rules, ring, &mut self.scratch, clusters, self.version, ask, &mut self.rng)
    }

    /// All that some of many tries chooses.
    fn chosen(&mut self, clusters: &[Cluster], ask: &Ask<'_>) -> Vec<usize> {
        let mut chosen: Vec<usize> = (0..100)
            .filter_map(|_| match self.choose(clusters, ask) {
                Choice::Selected(selection) => Some(selection.index),
                _ => None,
            })
            .collect();
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    fn group(&mut self, clusters: &[Cluster], key: &[u8]) -> Vec<usize> {
        self.version += 1;
        self.ring.look(clusters, self.version);
        self.ring.group(key, self.rules.group).iter().map(|index| *index as usize).collect()
    }
}

fn keyed(key: &[u8]) -> Ask<'_> {
    Ask { affinity_key: key, ..Ask::default() }
}

#[test]
fn s6_the_nearer_of_two_always() {
    assert_eq!(fixture(WaitAndWiden::default()).chosen(&clusters(&[50, 5]), &Ask::default()), [1]);
}

#[test]
fn s7_the_shorter_queue_within_a_bucket() {
    let widen = Widen { ttft_bucket_size_ms: 100, ..Widen::default() };
    let by_queue =
        WaitAndWiden { widen, comparator: Comparator::NumRequestsQueued, ..WaitAndWiden::default() };
    let mut fleet = clusters(&[5, 50]);
    fleet[0].stats.queue_size = 10;
    fleet[1].stats.queue_size = 1;
    assert_eq!(fixture(by_queue).chosen(&fleet, &Ask::default()), [1]);
}

#[test]
fn s8_a_bucket_that_is_locked_at_arrival() {
    let mut fleet = clusters(&[5, 20, 50]);
    fleet.iter_mut().for_each(|cluster| cluster.stats.last_mean_input_tps = 10.0);
    let n_1 = WaitAndWiden { widen: Widen { n: 1, ..Widen::default() }, ..WaitAndWiden::default() };
    let ask = Ask { input_tokens: 1, ..Ask::default() };
    assert_eq!(fixture(n_1.clone()).chosen(&fleet, &ask), [0, 1]);
    let late = Ask { elapsed_ns: 12 * MS, ..ask };
    assert_eq!(fixture(n_1).chosen(&fleet, &late), [0, 1, 2]);
}

#[test]
fn s9_a_full_one_is_passed_over() {
    let mut fleet = clusters(&[1, 6]);
    fill(&mut fleet[0]);
    fleet[1].stats.max_engine_concurrency = 1;
    assert_eq!(fixture(WaitAndWiden::default()).chosen(&fleet, &Ask::default()), [1]);
}

#[test]
fn s10_s11_queue_bounds_come_before_buckets() {
    let widen =
        Widen { max_queue_time_floor_ms: Some(5), max_queue_time_ceil_ms: Some(5), ..Widen::default() };
    let bounded = WaitAndWiden { widen, ..WaitAndWiden::default() };
    let mut fleet = clusters(&[1, 40]);
    fleet[0].stats.queue_times = vec![(0, 10)];
    assert_eq!(fixture(bounded.clone()).chosen(&fleet, &Ask::default()), [1]);
    assert_eq!(fixture(bounded).choose(&fleet[..1], &Ask::default()), Choice::Unavailable);
}

#[test]
fn s12_prefill_counts() {
    let mut fleet = clusters(&[10, 1]);
    fleet[0].stats.last_mean_input_tps = 200.0;
    fleet[1].stats.last_mean_input_tps = 10.0;
    let ask = Ask { input_tokens: 100, ..Ask::default() };
    assert_eq!(fixture(WaitAndWiden::default()).chosen(&fleet, &ask), [0]);
}

#[test]
fn s13_s14_s15_a_key_stays_with_its_group() {
    let fleet = clusters(&[1, 1, 1]);
    let mut one = fixture(affine(1, 0));
    let mut seen = Vec::new();
    for key in 0..20_u8 {
        let chosen = one.chosen(&fleet, &keyed(&[key + 1]));
        assert_eq!(chosen.len(), 1);
        seen.extend(chosen);
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, [0, 1, 2], "keys spread");
    assert_eq!(one.chosen(&fleet, &keyed(&[b'k'; 300])).len(), 1);
    assert_eq!(one.chosen(&fleet, &Ask::default()), [0, 1, 2], "no key, no group");
    let ungrouped = fixture(affine(0, 1000)).chosen(&fleet, &keyed(b"k"));
    assert_eq!(ungrouped, [0, 1, 2], "no group: a key and a wait mean nothing");
}

#[test]
fn the_group_alone_is_tried_for_as_long_as_configured() {
    let mut fleet = clusters(&[1; 6]);
    let mut two = fixture(affine(2, 200));
    let group = two.group(&[], b"").len();
    assert_eq!(group, 0, "of no clusters");
    let group = two.group(&fleet, b"k");
    assert_eq!(group.len(), 2);
    let sorted = |mut of: Vec<usize>| {
        of.sort_unstable();
        of
    };
    assert_eq!(two.chosen(&fleet, &keyed(b"k")), sorted(group.clone()));
    group.iter().for_each(|index| fill(&mut fleet[*index]));
    assert_eq!(two.choose(&fleet, &keyed(b"k")), Choice::Wait { ns: 200 * MS });
    let at = |elapsed_ns| Ask { elapsed_ns, ..keyed(b"k") };
    assert_eq!(two.choose(&fleet, &at(150 * MS)), Choice::Wait { ns: 50 * MS });
    // An objective shortens nothing.
    let urgent = Ask { slo_ms: Some(1), ..at(150 * MS) };
    assert_eq!(two.choose(&fleet, &urgent), Choice::Wait { ns: 50 * MS });
    let Choice::Selected(selection) = two.choose(&fleet, &at(200 * MS)) else { panic!("all are open") };
    assert_eq!(selection.rank_depth, 3, "beyond a group of two");
    assert!(!group.contains(&selection.index));
    assert_eq!(two.chosen(&fleet, &at(200 * MS)).len(), 4);
    // A slot in the group is taken first, whenever there is one.
    fleet[group[1]].stats.num_running_queries = 0;
    assert_eq!(two.chosen(&fleet, &at(500 * MS)), [group[1]]);
}

#[test]
fn excluded_members_are_dropped_and_not_replaced() {
    let fleet = clusters(&[1; 6]);
    let mut two = fixture(affine(2, 200));
    let group = two.group(&fleet, b"k");
    let without_first = Ask { excluded: &group[..1], ..keyed(b"k") };
    assert_eq!(two.chosen(&fleet, &without_first), [group[1]]);
    let without_both = Ask { excluded: &group, ..keyed(b"k") };
    assert_eq!(two.choose(&fleet, &without_both), Choice::Wait { ns: 200 * MS });
    let later = Ask { elapsed_ns: 200 * MS, ..without_both };
    assert_eq!(two.chosen(&fleet, &later).len(), 4);
}

#[test]
fn prefill_counts_less_within_the_group() {
    // The group's only cluster, far slower than the rest: with its prefill scaled away it is near.
    let mut fleet = clusters(&[1; 3]);
    let mut rules = affine(2, 0);
    rules.widen.n = 1;
    rules.widen.cache_affinity_input_tokens_scale = 0.0;
    let mut scaled = fixture(rules.clone());
    let group = scaled.group(&fleet, b"k");
    fleet[group[0]].stats.last_mean_input_tps = 10.0;
    let ask = Ask { input_tokens: 100, ..keyed(b"k") };
    let mut both = group.clone();
    both.sort_unstable();
    assert_eq!(scaled.chosen(&fleet, &ask), both, "10 s of prefill that its cache may hold");
    rules.widen.cache_affinity_input_tokens_scale = 1.0;
    assert_eq!(fixture(rules).chosen(&fleet, &ask), [group[1]]);
    // Beyond the group, prefill counts in full.
    fill(&mut fleet[group[0]]);
    fill(&mut fleet[group[1]]);
    let Choice::Selected(selection) = scaled.choose(&fleet, &ask) else { panic!("one is free") };
    assert_eq!(selection.rank_depth, 3);
}

#[test]
fn buckets_of_all_open_from_the_end_of_the_groups_time_on() {
    // The group's cluster is full; the nearest other one too; a third is 100 ms away, which needs 25 ms.
    let mut rules = affine(1, 200);
    rules.widen.n = 1;
    let mut one = fixture(rules);
    let mut fleet = clusters(&[0; 3]);
    let member = one.group(&fleet, b"k")[0];
    let (near, far) = ((member + 1) % 3, (member + 2) % 3);
    fill(&mut fleet[member]);
    fill(&mut fleet[near]);
    fleet[far].rtt_ns = 100 * MS;
    let at = |elapsed_ms| Ask { elapsed_ns: elapsed_ms * MS, ..keyed(b"k") };
    assert_eq!(one.choose(&fleet, &at(0)), Choice::Wait { ns: 200 * MS });
    assert_eq!(one.choose(&fleet, &at(200)), Choice::Wait { ns: 25 * MS });
    assert_eq!(one.choose(&fleet, &at(224)), Choice::Wait { ns: MS });
    assert_eq!(one.chosen(&fleet, &at(225)), [far]);
    fill(&mut fleet[far]);
    assert_eq!(one.choose(&fleet, &at(225)), Choice::Unavailable);
}

#[test]
fn a_groups_locked_bucket_ends_the_wait_early() {
    let mut rules = affine(2, 200);
    rules.widen.n = 1;
    let mut two = fixture(rules);
    let mut fleet = clusters(&[0; 3]);
    let group = two.group(&fleet, b"k");
    fill(&mut fleet[group[0]]);
    fleet[group[1]].rtt_ns = 100 * MS;
    assert_eq!(two.choose(&fleet, &keyed(b"k")), Choice::Wait { ns: 25 * MS });
    let later = Ask { elapsed_ns: 25 * MS, ..keyed(b"k") };
    assert_eq!(two.chosen(&fleet, &later), [group[1]]);
    // After the group's time, the third one is nearer.
    fleet[group[1]].rtt_ns = 10_000 * MS;
    let last = Ask { elapsed_ns: 200 * MS, ..keyed(b"k") };
    assert_eq!(two.chosen(&fleet, &last).len(), 1);
    assert!(!group.contains(&two.chosen(&fleet, &last)[0]));
}

#[test]
fn bounds_that_grow_end_a_wait_early_and_are_told_apart_from_it() {
    let mut rules = affine(1, 200);
    rules.widen.max_queue_time_floor_ms = Some(0);
    rules.widen.max_queue_time_ceil_ms = Some(100);
    let mut fleet = clusters(&[1; 2]);
    fleet.iter_mut().for_each(|cluster| cluster.stats.queue_times = vec![(0, 50)]);
    let mut one = fixture(rules);
    let ask = Ask { slo_ms: Some(300), ..keyed(b"k") };
    assert_eq!(one.choose(&fleet, &ask), Choice::Wait { ns: 150 * MS });
    // Without a group there is nothing to wait for but the bounds, which is not a wait of the algorithm's.
    let keyless = Ask { slo_ms: Some(300), ..Ask::default() };
    assert_eq!(one.choose(&fleet, &keyless), Choice::Unavailable);
    assert_eq!(one.scratch.bounds_ns, Some(150 * MS));
}

#[test]
fn no_clusters_no_choice() {
    assert_eq!(fixture(affine(2, 200)).choose(&[], &keyed(b"k")), Choice::Unavailable);
}
