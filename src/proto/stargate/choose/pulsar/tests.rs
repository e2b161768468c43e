use super::super::super::hash::Text;
use super::super::super::stats::{KvCache, Stats};
use super::*;

/// `session-0` prefers these in the order 0, 3, 4, 1, 2.
fn clusters() -> Vec<Cluster> {
    let one = |i| Cluster {
        id: format!("cluster-{i}").into(),
        rtt_ns: 0,
        stats: Stats { max_input_tps: 100.0, ..Stats::default() },
    };
    (0..5).map(one).collect()
}

const SESSION: &[u8] = b"session-0";

fn rankings(rules: &Pulsar) -> Rankings {
    Rankings::new(Text::new(b"stable-a", b"fn-1", b"llama"), rules.weight)
}

fn pick(rules: &Pulsar, clusters: &[Cluster], ask: &Ask<'_>) -> Option<(usize, u32, bool)> {
    let mut rankings = rankings(rules);
    rankings.look(clusters, 1);
    // Twice: what is remembered must not show.
    let choice = choose(rules, &mut rankings, clusters, ask);
    assert_eq!(choose(rules, &mut rankings, clusters, ask), choice);
    match choice {
        Choice::Selected(Selection { index, rank_depth, after_kv_skip, considered: 1 }) => {
            Some((index, rank_depth, after_kv_skip))
        }
        Choice::Unavailable => None,
        other => panic!("{other:?}"),
    }
}

fn keyed(excluded: &[usize]) -> Ask<'_> {
    Ask { affinity_key: SESSION, excluded, input_tokens: 10, ..Ask::default() }
}

fn free(tokens: u64) -> KvCache {
    KvCache { capacity_tokens: 100, used_tokens: 100 - tokens, free_tokens: tokens }
}

#[test]
fn excluded_clusters_keep_their_ranks() {
    let plain = Pulsar::default();
    assert_eq!(pick(&plain, &clusters(), &keyed(&[])), Some((0, 1, false)));
    assert_eq!(pick(&plain, &clusters(), &keyed(&[0])), Some((3, 2, false)));
    assert_eq!(pick(&plain, &clusters(), &keyed(&[4, 3, 0])), Some((1, 4, false)));
    assert_eq!(pick(&plain, &clusters(), &keyed(&[0, 1, 2, 3, 4])), None);
}

#[test]
fn queues_and_limits_do_not_matter() {
    let mut fleet = clusters();
    fleet[0].stats.num_running_queries = 900;
    fleet[0].stats.max_engine_concurrency = 1;
    fleet[0].stats.queued_input_size = u64::MAX;
    assert_eq!(pick(&Pulsar::default(), &fleet, &keyed(&[])), Some((0, 1, false)));
}

#[test]
fn s17_a_cluster_without_a_weight_is_never_chosen() {
    let mut fleet = clusters();
    fleet[0].stats.max_input_tps = 0.0;
    fleet[0].stats.last_mean_input_tps = 100.0;
    assert_eq!(pick(&Pulsar::default(), &fleet, &keyed(&[])), Some((3, 1, false)), "a mean is no maximum");
    fleet.iter_mut().for_each(|cluster| cluster.stats.max_input_tps = f64::NAN);
    assert_eq!(pick(&Pulsar::default(), &fleet, &keyed(&[])), None);
}

#[test]
fn s18_clusters_short_of_cache_are_skipped_and_told() {
    let checked = Pulsar { consider_kv_free_tokens: true, ..Pulsar::default() };
    let mut fleet = clusters();
    fleet.iter_mut().for_each(|cluster| cluster.stats.kv = free(10));
    assert_eq!(pick(&checked, &fleet, &keyed(&[])), Some((0, 1, false)), "just enough");
    fleet[0].stats.kv = KvCache::default();
    assert_eq!(pick(&checked, &fleet, &keyed(&[])), Some((3, 2, true)), "nothing known");
    fleet[3].stats.kv = free(9);
    assert_eq!(pick(&checked, &fleet, &keyed(&[])), Some((4, 3, true)));
    assert_eq!(pick(&Pulsar::default(), &fleet, &keyed(&[])), Some((0, 1, false)), "not asked about");
    // What had failed already was not skipped for its cache.
    assert_eq!(pick(&checked, &fleet, &keyed(&[0, 3])), Some((4, 3, false)));
    assert_eq!(pick(&checked, &fleet, &keyed(&[0])), Some((4, 3, true)));
    fleet.iter_mut().for_each(|cluster| cluster.stats.kv = free(9));
    assert_eq!(pick(&checked, &fleet, &keyed(&[])), None);
}

#[test]
fn s16_a_key_has_one_home_and_keys_have_many() {
    let homes: Vec<usize> = (0..20)
        .map(|i| {
            let key = format!("session-{i}");
            let ask = Ask { affinity_key: key.as_bytes(), ..Ask::default() };
            pick(&Pulsar::default(), &clusters(), &ask).unwrap().0
        })
        .collect();
    assert_eq!(homes[..3], [0, 3, 4]);
    assert!((0..5).all(|cluster| homes.contains(&cluster)));
    // A request without a key has the empty one's home.
    let mut unseeded = Rankings::new(Text::new(b"", b"", b"llama"), Pulsar::default().weight);
    unseeded.look(&clusters(), 1);
    let Choice::Selected(home) = choose(&Pulsar::default(), &mut unseeded, &clusters(), &Ask::default())
    else {
        panic!("there is one");
    };
    assert_eq!(home.index, 2);
}
