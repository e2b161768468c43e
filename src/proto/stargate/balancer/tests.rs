use super::super::stats::Stats;
use super::*;
use crate::proto::config::lb_config::{Comparator, Method, PowerOfN, WaitAndWiden};

const MS: u64 = 1_000_000;

fn cluster(id: &str, tps: f64, queued_input_size: u64) -> Cluster {
    let stats = Stats { last_mean_input_tps: tps, max_input_tps: tps, queued_input_size, ..Stats::default() };
    Cluster { id: id.into(), rtt_ns: 0, stats }
}

fn three() -> Vec<Cluster> {
    ["a", "b", "c"].map(|id| cluster(id, 1000.0, 0)).into()
}

/// Indices chosen in so many tries.
fn chosen(entry: &Entry, clusters: &[Cluster], ask: &Ask<'_>, tries: usize) -> Vec<usize> {
    let mut balancer = Balancer::new(entry, b"", b"m");
    let mut rng = Rng::new(8);
    (0..tries)
        .filter_map(|_| match balancer.choose(entry, clusters, 1, ask, &mut rng) {
            Choice::Selected(selection) => Some(selection.index),
            _ => None,
        })
        .collect()
}

#[test]
fn s1_power_of_n_finds_the_idle_one() {
    let two = [cluster("a", 1000.0, 1000), cluster("b", 1000.0, 0)];
    let ask = Ask { input_tokens: 1, ..Ask::default() };
    assert_eq!(chosen(&Entry::new(Method::PowerOfN), &two, &ask, 20), [1; 20]);
}

#[test]
fn s2_s3_turns_and_chance() {
    let two = [cluster("a", 1000.0, 0), cluster("b", 1000.0, 0)];
    assert_eq!(chosen(&Entry::new(Method::RoundRobin), &two, &Ask::default(), 6), [0, 1, 0, 1, 0, 1]);
    let random = chosen(&Entry::new(Method::Random), &three(), &Ask::default(), 200);
    assert!((0..3).all(|index| random.contains(&index)));
}

#[test]
fn s4_s5_a_cluster_of_two_servers_counts_as_their_sum() {
    let ask = Ask { input_tokens: 1, ..Ask::default() };
    let entry = Entry::new(Method::PowerOfN);
    let busy = [cluster("x", 200.0, 260), cluster("y", 100.0, 120)];
    assert_eq!(chosen(&entry, &busy, &ask, 20), [1; 20], "1.3 s and 1.2 s");
    let idle = [cluster("x", 200.0, 0), cluster("y", 100.0, 120)];
    assert_eq!(chosen(&entry, &idle, &ask, 20), [0; 20]);
}

#[test]
fn s22_a_priority_sees_its_own_queue() {
    let mut two = [cluster("a", 1000.0, 0), cluster("b", 1000.0, 0)];
    two[0].stats.queue_times = vec![(0, 1000), (4, 5)];
    two[1].stats.queue_times = vec![(0, 0), (4, 500)];
    let mut entry = Entry::new(Method::PowerOfN);
    entry.method = MethodSettings::PowerOfN(PowerOfN { sample_count: 2, comparator: Comparator::QueueTime });
    assert_eq!(chosen(&entry, &two, &Ask { priority: 4, ..Ask::default() }, 10), [0; 10]);
    assert_eq!(chosen(&entry, &two, &Ask::default(), 10), [1; 10]);
}

#[test]
fn s23_and_two_balancers_take_their_own_turns() {
    let four = ["a", "b", "c", "d"].map(|id| cluster(id, 1000.0, 0));
    let entry = Entry::new(Method::RoundRobin);
    let ask = Ask { excluded: &[2], ..Ask::default() };
    assert_eq!(chosen(&entry, &four, &ask, 6), [0, 1, 3, 0, 1, 3]);
    assert_eq!(chosen(&entry, &four, &ask, 2), [0, 1], "a new one begins anew");
}

#[test]
fn routing_key_model_and_seed_move_keys() {
    let clusters: Vec<Cluster> = (0..26).map(|i| cluster(&format!("c{i:02}"), 1000.0, 0)).collect();
    for method in [Method::Pulsar, Method::PulsarWaitAndWiden, Method::WaitAndWiden] {
        let home = |routing_key: &[u8], model: &[u8], seed: &str| {
            let mut entry = Entry::new(method);
            match &mut entry.method {
                MethodSettings::Pulsar(pulsar) | MethodSettings::PulsarWaitAndWiden { pulsar, .. } => {
                    pulsar.seed = seed.into();
                }
                MethodSettings::WaitAndWiden(rules) => {
                    *rules = WaitAndWiden { seed: seed.into(), group: 1, ..WaitAndWiden::default() };
                }
                _ => unreachable!(),
            }
            let mut balancer = Balancer::new(&entry, routing_key, model);
            let mut rng = Rng::new(1);
            let mut home = |key: u8| {
                let ask = Ask { affinity_key: &[key], ..Ask::default() };
                match balancer.choose(&entry, &clusters, 1, &ask, &mut rng) {
                    Choice::Selected(selection) => selection.index,
                    other => panic!("{other:?}"),
                }
            };
            (1..20).map(&mut home).collect::<Vec<_>>()
        };
        let homes = home(b"rk", b"m", "s");
        assert_eq!(homes, home(b"rk", b"m", "s"), "{method:?}");
        for other in [home(b"", b"m", "s"), home(b"rk", b"n", "s"), home(b"rk", b"m", "")] {
            assert_ne!(homes, other, "{method:?}");
        }
    }
}

#[test]
fn a_freed_cluster_concerns_those_who_may_use_it() {
    let clusters: Vec<Cluster> = (0..8).map(|i| cluster(&format!("c{i}"), 1000.0, 0)).collect();
    let all = |entry: &Entry, ask: &Ask<'_>| {
        let mut balancer = Balancer::new(entry, b"", b"m");
        (0..9).filter(|index| balancer.concerns(entry, &clusters, 1, ask, *index)).collect::<Vec<usize>>()
    };
    let keyed = Ask { affinity_key: b"k", excluded: &[3], ..Ask::default() };
    for method in [Method::PowerOfN, Method::RoundRobin, Method::Random, Method::WaitAndWiden] {
        assert_eq!(all(&Entry::new(method), &keyed), [0, 1, 2, 4, 5, 6, 7], "{method:?}");
    }

    let mut entry = Entry::new(Method::WaitAndWiden);
    let MethodSettings::WaitAndWiden(rules) = &mut entry.method else { unreachable!() };
    rules.group = 3;
    rules.widen.cache_affinity_wait_ms = 100;
    let early = Ask { excluded: &[], ..keyed };
    assert_eq!(all(&entry, &early).len(), 3);
    assert_eq!(all(&entry, &Ask { elapsed_ns: 100 * MS - 1, ..early }).len(), 3);
    assert_eq!(all(&entry, &Ask { elapsed_ns: 100 * MS, ..early }).len(), 8);
    assert_eq!(all(&entry, &Ask { affinity_key: b"", ..early }).len(), 8);

    let mut entry = Entry::new(Method::PulsarWaitAndWiden);
    let MethodSettings::PulsarWaitAndWiden { widen, .. } = &mut entry.method else { unreachable!() };
    widen.cache_affinity_wait_ms = 100;
    assert_eq!(all(&entry, &early).len(), 1);
    assert_eq!(all(&entry, &Ask { elapsed_ns: 100 * MS, ..early }).len(), 3);
    assert_eq!(all(&entry, &Ask { elapsed_ns: 200 * MS, ..early }).len(), 7);
    assert_eq!(all(&entry, &Ask { elapsed_ns: 300 * MS, ..early }).len(), 8);
    assert_eq!(all(&Entry::new(Method::Pulsar), &keyed), [0, 1, 2, 4, 5, 6, 7]);
}

#[test]
fn what_ranking_leaves_out_concerns_nobody() {
    let mut clusters = three();
    clusters[1].stats.max_input_tps = 0.0;
    let ask = Ask { affinity_key: b"k", elapsed_ns: u64::MAX, ..Ask::default() };
    for method in [Method::Pulsar, Method::PulsarWaitAndWiden] {
        let entry = Entry::new(method);
        let mut balancer = Balancer::new(&entry, b"", b"m");
        let concerned = [0, 1, 2].map(|index| balancer.concerns(&entry, &clusters, 1, &ask, index));
        assert_eq!(concerned, [true, false, true], "{method:?}");
    }
}

#[test]
fn bounds_that_will_open_are_told_until_the_next_choice() {
    let mut entry = Entry::new(Method::WaitAndWiden);
    let MethodSettings::WaitAndWiden(rules) = &mut entry.method else { unreachable!() };
    rules.widen.max_queue_time_floor_ms = Some(0);
    rules.widen.max_queue_time_ceil_ms = Some(100);
    let mut one = [cluster("a", 1000.0, 0)];
    one[0].stats.queue_times = vec![(0, 50)];
    let (mut balancer, mut rng) = (Balancer::new(&entry, b"", b"m"), Rng::new(1));
    let ask = Ask { slo_ms: Some(1000), ..Ask::default() };
    assert_eq!(balancer.choose(&entry, &one, 1, &ask, &mut rng), Choice::Unavailable);
    assert_eq!(balancer.bounds_open_ns(), Some(500 * MS));
    let then = Ask { elapsed_ns: 500 * MS, ..ask };
    assert!(matches!(balancer.choose(&entry, &one, 1, &then, &mut rng), Choice::Selected(_)));
    assert_eq!(balancer.bounds_open_ns(), None);
}

#[test]
fn the_balancer_asks_admission_for_its_entry() {
    let mut entry = Entry::new(Method::PowerOfN);
    entry.max_input_work_seconds = Some(1.0);
    let balancer = Balancer::new(&entry, b"", b"m");
    let busy = [cluster("a", 100.0, 100)];
    assert_eq!(balancer.admit(&entry, &busy, &Ask::default()), Ok(()));
    let one_more = Ask { input_tokens: 1, ..Ask::default() };
    assert_eq!(balancer.admit(&entry, &busy, &one_more), Err(InputWork { capacity: false }));
}
