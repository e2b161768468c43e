use super::super::super::stats::Stats;
use super::*;
use crate::proto::config::lb_config::Comparator;

/// Clusters with these queue sizes, idle otherwise.
fn clusters(queue_sizes: &[u64]) -> Vec<Cluster> {
    let one = |queue_size: &u64| Cluster {
        stats: Stats { queue_size: *queue_size, last_mean_input_tps: 1000.0, ..Stats::default() },
        ..Cluster::default()
    };
    queue_sizes.iter().map(one).collect()
}

fn without(excluded: &[usize]) -> Ask<'_> {
    Ask { excluded, input_tokens: 1, ..Ask::default() }
}

fn index(choice: Choice) -> Option<usize> {
    match choice {
        Choice::Selected(Selection { index, rank_depth: 1, after_kv_skip: false, .. }) => Some(index),
        Choice::Unavailable => None,
        other => panic!("{other:?}"),
    }
}

fn shortest(sample_count: u8) -> PowerOfN {
    PowerOfN { sample_count, comparator: Comparator::NumRequestsQueued }
}

/// How often each cluster is chosen in so many draws.
fn hits(draws: usize, clusters: usize, mut choose: impl FnMut() -> Choice) -> Vec<usize> {
    let mut hits = vec![0; clusters];
    (0..draws).for_each(|_| hits[index(choose()).unwrap()] += 1);
    hits
}

#[track_caller]
fn assert_shares(hits: &[usize], shares: &[f64]) {
    let draws: usize = hits.iter().sum();
    for (hits, share) in hits.iter().zip(shares) {
        let deviation = (draws as f64 * share * (1.0 - share)).sqrt();
        assert!((*hits as f64 - draws as f64 * share).abs() <= 5.0 * deviation, "{hits} of {draws}: {share}");
    }
}

#[test]
fn round_robin_steps_over_the_excluded() {
    let (mut turn, mut drawn, clusters) = (0, Drawn::default(), clusters(&[9, 0, 9, 0]));
    let mut next =
        |excluded: &[usize]| index(round_robin(&mut turn, &mut drawn, &clusters, &without(excluded)));
    let turns: Vec<_> = (0..6).filter_map(|_| next(&[2])).collect();
    assert_eq!(turns, [0, 1, 3, 0, 1, 3]);
    // 6 of 4, then 7 of 2: the counter goes on whoever is counted.
    assert_eq!([next(&[]), next(&[3, 0])], [Some(2), Some(2)]);
    // Where nobody is left, nobody's turn is used up. Duplicates and indices of no cluster mean nothing.
    assert_eq!(next(&[3, 2, 1, 0, 0]), None);
    assert_eq!(next(&[7, 3, 3]), Some(8 % 3));
    assert_eq!(index(round_robin(&mut 0, &mut Drawn::default(), &[], &without(&[]))), None);
}

#[test]
fn random_is_uniform_over_the_rest() {
    let (mut rng, mut drawn, clusters) = (Rng::new(1), Drawn::default(), clusters(&[0, 5, 0, 0, 9]));
    let third = 1.0 / 3.0;
    let got = hits(9000, 5, || random(&mut drawn, &clusters, &without(&[3, 1]), &mut rng));
    assert_shares(&got, &[third, 0.0, third, 0.0, third]);
    assert_eq!(index(random(&mut drawn, &clusters, &without(&[0, 1, 2, 3, 4]), &mut rng)), None);
}

#[test]
fn the_best_of_each_sample_wins_and_each_sample_is_as_likely() {
    let (mut rng, mut drawn, clusters) = (Rng::new(2), Drawn::default(), clusters(&[1, 2, 3, 4, 5]));
    let of_two = hits(20_000, 5, || power_of_n(&shortest(2), &mut drawn, &clusters, &without(&[]), &mut rng));
    assert_shares(&of_two, &[0.4, 0.3, 0.2, 0.1, 0.0]);
    let of_three =
        hits(20_000, 5, || power_of_n(&shortest(3), &mut drawn, &clusters, &without(&[]), &mut rng));
    assert_shares(&of_three, &[0.6, 0.3, 0.1, 0.0, 0.0]);
    // The first is out: two of four.
    let rest = hits(12_000, 5, || power_of_n(&shortest(2), &mut drawn, &clusters, &without(&[0]), &mut rng));
    assert_shares(&rest, &[0.0, 0.5, 1.0 / 3.0, 1.0 / 6.0, 0.0]);
}

#[test]
fn equals_share_evenly_whether_all_or_some_are_drawn() {
    let (mut rng, mut drawn, clusters) = (Rng::new(3), Drawn::default(), clusters(&[7, 1, 1, 7, 1, 1]));
    let quarter = [0.0, 0.25, 0.25, 0.0, 0.25, 0.25];
    let of_all =
        hits(20_000, 6, || power_of_n(&shortest(64), &mut drawn, &clusters, &without(&[]), &mut rng));
    assert_shares(&of_all, &quarter);
    let of_five =
        hits(20_000, 6, || power_of_n(&shortest(5), &mut drawn, &clusters, &without(&[]), &mut rng));
    assert_shares(&of_five, &quarter);
}

#[test]
fn the_effective_sample_is_told() {
    let (mut rng, mut drawn, clusters) = (Rng::new(4), Drawn::default(), clusters(&[0; 5]));
    for (configured, excluded, effective) in
        [(2, &[][..], 2), (64, &[][..], 5), (64, &[1, 3][..], 3), (1, &[0, 1][..], 1)]
    {
        let choice = power_of_n(&shortest(configured), &mut drawn, &clusters, &without(excluded), &mut rng);
        let Choice::Selected(Selection { index, considered, .. }) = choice else { panic!("{choice:?}") };
        assert_eq!(considered, effective);
        assert!(!excluded.contains(&index));
    }
    assert_eq!(
        index(power_of_n(&shortest(2), &mut drawn, &clusters, &without(&[0, 1, 2, 3, 4]), &mut rng)),
        None
    );
}

#[test]
fn full_clusters_and_endless_times_stay_eligible() {
    let (mut rng, mut drawn, mut clusters) = (Rng::new(5), Drawn::default(), clusters(&[0; 2]));
    let by_time = PowerOfN { sample_count: 2, comparator: Comparator::Ttft };
    clusters[0].stats.last_mean_input_tps = 0.0;
    clusters[1].stats.num_running_queries = 9;
    clusters[1].stats.max_engine_concurrency = 1;
    let got = hits(50, 2, || power_of_n(&by_time, &mut drawn, &clusters, &without(&[]), &mut rng));
    assert_eq!(got, [0, 50], "a full cluster, before one without a rate");
    clusters[1].stats.last_mean_input_tps = f64::NAN;
    let got = hits(50, 2, || power_of_n(&by_time, &mut drawn, &clusters, &without(&[]), &mut rng));
    assert!(got[0] > 0 && got[1] > 0, "all are endless: each of them");
}
