use super::super::super::stats::Stats;
use super::super::times::All;
use super::*;

const MS: u64 = 1_000_000;

/// Idle clusters of unknown limits at these distances, in milliseconds.
fn clusters(rtts_ms: &[u64]) -> Vec<Cluster> {
    let one = |rtt_ms: &u64| Cluster {
        rtt_ns: rtt_ms * MS,
        stats: Stats { last_mean_input_tps: 1000.0, ..Stats::default() },
        ..Cluster::default()
    };
    rtts_ms.iter().map(one).collect()
}

fn fill(cluster: &mut Cluster) {
    cluster.stats.num_running_queries = 1;
    cluster.stats.max_engine_concurrency = 1;
}

fn rules(widen: &Widen, elapsed_ns: u64) -> Rules<'_> {
    let by = By::Score(Comparator::Ttft);
    Rules { widen, by, max_queued: widen.max_queued, elapsed_ns, scale: 1.0 }
}

fn pick(rules: &Rules<'_>, clusters: &[Cluster], ask: &Ask<'_>, seed: u64) -> Result<Pick, Closed> {
    select(rules, clusters, All(clusters.len()), ask, &mut Scratch::default(), &mut Rng::new(seed))
}

/// What is chosen with some seed or other; n is 1.
fn open(widen: &Widen, elapsed_ns: u64, clusters: &[Cluster], ask: &Ask<'_>) -> Vec<usize> {
    let widen = Widen { n: 1, ..widen.clone() };
    let mut open: Vec<usize> = (0..200)
        .filter_map(|seed| pick(&rules(&widen, elapsed_ns), clusters, ask, seed).ok())
        .map(|pick| pick.index)
        .collect();
    open.sort_unstable();
    open.dedup();
    open
}

fn closed_for(widen: &Widen, elapsed_ns: u64, clusters: &[Cluster]) -> Option<u64> {
    match pick(&rules(widen, elapsed_ns), clusters, &Ask::default(), 1) {
        Err(Closed { bucket_ns, bounds_ns: None }) => bucket_ns,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_buckets_of_the_rules_open_to_the_nanosecond() {
    let widen = Widen::default();
    let fleet = clusters(&[120, 25, 10, 50]);
    for (elapsed_ns, wanted) in [
        (0, &[1, 2][..]),
        (10 * MS - 1, &[1, 2]),
        (10 * MS, &[1, 2, 3]),
        (27_500_000 - 1, &[1, 2, 3]),
        (27_500_000, &[0, 1, 2, 3]),
        (u64::MAX, &[0, 1, 2, 3]),
    ] {
        assert_eq!(open(&widen, elapsed_ns, &fleet, &Ask::default()), wanted, "{elapsed_ns}");
    }
    assert_eq!(open(&widen, 10 * MS - 1, &clusters(&[20, 60]), &Ask::default()), [0]);
    assert_eq!(open(&widen, 10 * MS, &clusters(&[20, 60]), &Ask::default()), [0, 1]);
    assert_eq!(open(&widen, 0, &clusters(&[5, 25]), &Ask::default()), [0, 1], "a gap of 20 is not over 20");
    assert_eq!(open(&widen, 0, &clusters(&[5, 26]), &Ask::default()), [0]);
    // A bucket reaches as far as it is wide from where it begins, not from its last member.
    assert_eq!(open(&widen, 0, &clusters(&[0, 15, 30]), &Ask::default()), [0, 1]);
}

#[test]
fn a_locked_cluster_with_capacity_says_when_it_opens() {
    let widen = Widen::default();
    let mut fleet = clusters(&[120, 25, 10, 50]);
    fill(&mut fleet[1]);
    fill(&mut fleet[2]);
    assert_eq!(closed_for(&widen, 0, &fleet), Some(10 * MS));
    assert_eq!(closed_for(&widen, 4 * MS, &fleet), Some(6 * MS));
    fill(&mut fleet[3]);
    assert_eq!(
        closed_for(&widen, 4 * MS, &fleet),
        Some(23_500_000),
        "the full one between needs its wait too"
    );
    assert_eq!(closed_for(&widen, 11 * MS, &fleet), Some(16_500_000));
    fill(&mut fleet[0]);
    assert_eq!(closed_for(&widen, 0, &fleet), None);
    assert_eq!(closed_for(&widen, u64::MAX, &fleet), None);
}

#[test]
fn what_was_waited_for_is_open_then() {
    let mut rng = Rng::new(9);
    for round in 0..3_000 {
        let mut fleet = clusters(&[0; 12]);
        for cluster in &mut fleet {
            cluster.rtt_ns = rng.below(300 * MS as usize) as u64;
            if rng.below(8) > 0 {
                fill(cluster);
            }
        }
        let widen = Widen {
            next_bucket_unlock_factor: [0.25, 1.0 / 3.0, 7.7, 1e-9][rng.below(4)],
            ttft_bucket_size_ms: [0, 20, 100][rng.below(3)],
            ..Widen::default()
        };
        let elapsed_ns = rng.below(20 * MS as usize) as u64;
        let Err(closed) = pick(&rules(&widen, elapsed_ns), &fleet, &Ask::default(), round) else { continue };
        let Some(ns) = closed.bucket_ns else {
            assert!(fleet.iter().all(|cluster| !has_capacity(&cluster.stats, 0)), "{round}");
            continue;
        };
        assert!(pick(&rules(&widen, elapsed_ns + ns), &fleet, &Ask::default(), round).is_ok(), "{round}");
        // Rounding of a sum of a dozen needs may come to a nanosecond.
        let early = elapsed_ns + ns.saturating_sub(2);
        assert!(early == elapsed_ns || pick(&rules(&widen, early), &fleet, &Ask::default(), round).is_err());
    }
}

#[test]
fn factors_without_a_wait_open_everything_finite() {
    let mut fleet = clusters(&[0, 1000, 100_000, 5]);
    fleet[3].stats.last_mean_input_tps = 0.0;
    let ask = Ask { input_tokens: 1, ..Ask::default() };
    for next_bucket_unlock_factor in [0.0, -0.0, -3.5] {
        let widen = Widen { next_bucket_unlock_factor, ..Widen::default() };
        assert_eq!(open(&widen, 0, &fleet, &ask), [0, 1, 2], "{next_bucket_unlock_factor}");
    }
}

#[test]
fn many_buckets_open_as_if_they_were_walked_one_by_one() {
    let widen = Widen { ttft_bucket_size_ms: 0, ..Widen::default() };
    // 40 buckets a millisecond apart: each needs a quarter of one.
    let fleet = clusters(&(0..40).rev().collect::<Vec<_>>());
    for waited in [0, 1, 2, 3, 4, 5, 20, 38, 39, 40, 1000] {
        let opened = open(&widen, waited * MS / 4, &fleet, &Ask::default());
        let wanted: Vec<usize> = (39_usize.saturating_sub(waited as usize)..40).collect();
        assert_eq!(opened, wanted, "{waited} quarters");
    }
}

#[test]
fn n_are_drawn_and_the_best_of_them_wins() {
    let mut fleet = clusters(&[1, 2, 3, 4, 5]);
    fill(&mut fleet[0]);
    for n in [1, 2, 3, 4, 5, 100, u64::MAX] {
        let widen = Widen { n, ..Widen::default() };
        let mut hits = [0; 5];
        let (mut scratch, mut rng) = (Scratch::default(), Rng::new(n));
        for _ in 0..6000 {
            let pick =
                select(&rules(&widen, 0), &fleet, All(5), &Ask::default(), &mut scratch, &mut rng).unwrap();
            assert_eq!(u64::from(pick.considered), n.min(4));
            hits[pick.index] += 1;
        }
        // Of four open ones, the best of n.
        let shares: [f64; 5] = match n {
            1 => [0.0, 0.25, 0.25, 0.25, 0.25],
            2 => [0.0, 0.5, 1.0 / 3.0, 1.0 / 6.0, 0.0],
            3 => [0.0, 0.75, 0.25, 0.0, 0.0],
            _ => [0.0, 1.0, 0.0, 0.0, 0.0],
        };
        for (hits, share) in hits.iter().zip(shares) {
            assert!((f64::from(*hits) - 6000.0 * share).abs() < 200.0, "n {n}: {hits}, {share}");
        }
    }
}

#[test]
fn equals_are_chosen_evenly_however_they_are_drawn() {
    // Among 3 open ones draws succeed; among 3 of 300 they do not, and the open ones are listed.
    for (count, n) in [(3, 2), (300, 2), (3, 9), (300, 9)] {
        let mut fleet = clusters(&vec![1; count]);
        fleet[3..].iter_mut().for_each(fill);
        let widen = Widen { n, ..Widen::default() };
        let (mut scratch, mut rng, mut hits) = (Scratch::default(), Rng::new(12), vec![0_i32; count]);
        for _ in 0..9000 {
            let picked =
                select(&rules(&widen, 0), &fleet, All(count), &Ask::default(), &mut scratch, &mut rng);
            hits[picked.unwrap().index] += 1;
        }
        assert!(hits[..3].iter().all(|hits| (hits - 3000).abs() < 225), "{:?}", &hits[..3]);
    }
}

#[test]
fn scores_see_what_the_settings_ignore() {
    // Equal times with queues ignored, and unequal queues.
    let mut fleet = clusters(&[10, 10]);
    fleet[0].stats.queue_times = vec![(0, 500)];
    fleet[1].stats.queue_times = vec![(0, 400)];
    let widen = Widen { ignore_queue_time: true, ignore_input_processing_time: true, ..Widen::default() };
    let chosen = |widen: &Widen, scale: f64, fleet: &[Cluster]| {
        let ask = Ask { input_tokens: 1000, ..Ask::default() };
        let rules = Rules { scale, ..rules(widen, 0) };
        (0..50).map(|seed| pick(&rules, fleet, &ask, seed).unwrap().index).collect::<Vec<_>>()
    };
    assert_eq!(chosen(&widen, 1.0, &fleet), [1; 50]);
    // Equal times with prefill scaled away, and unequal rates.
    let mut fleet = clusters(&[10, 10]);
    fleet[1].stats.last_mean_input_tps = 500.0;
    assert_eq!(chosen(&Widen::default(), 0.0, &fleet), [0; 50]);
    // Scaled in full, the slower one is not even open.
    assert_eq!(chosen(&Widen { n: 1, ..Widen::default() }, 1.0, &fleet), [0; 50]);
}

#[test]
fn queues_then_loads_are_compared() {
    let merit = |queue: u64, running, limit| {
        let queue_times = vec![(0, queue)];
        let stats = Stats {
            queue_times,
            num_running_queries: running,
            max_engine_concurrency: limit,
            ..Stats::default()
        };
        Merit::of(By::QueueThenLoad, &Cluster { stats, ..Cluster::default() }, &Ask::default())
    };
    let full = |queue, running| merit(queue, running, 1);
    assert!(full(5, 90).beats(&full(6, 1)), "the queue comes first");
    // With a free slot there is no queue.
    assert!(merit(9, 1, 10).beats(&merit(8, 2, 10)));
    assert!(merit(0, 2, 100).beats(&merit(0, 1, 10)), "a share of the limit");
    assert!(merit(0, 1, 0).beats(&merit(0, 2, 100)), "raw numbers where one limit is unknown");
    assert!(!merit(0, 2, 100).beats(&merit(0, 1, 0)));
    let (a, b) = (merit(0, 1, 3), merit(0, 2, 6));
    assert!(!a.beats(&b) && !b.beats(&a));
}

fn bounded(floor_ms: u64, ceil_ms: u64) -> Widen {
    Widen {
        max_queue_time_floor_ms: Some(floor_ms),
        max_queue_time_ceil_ms: Some(ceil_ms),
        ..Widen::default()
    }
}

#[test]
fn bounds_of_the_rules() {
    let allowed = |widen: &Widen, elapsed_ms: u64, slo_ms| {
        Bounds::of(widen).unwrap().allowed_ms(&Ask { elapsed_ns: elapsed_ms * MS, slo_ms, ..Ask::default() })
    };
    assert_eq!(allowed(&bounded(100, 300), 500, Some(1000)), 200.0);
    assert_eq!(allowed(&bounded(100, 300), 0, Some(1000)), 100.0);
    assert_eq!(allowed(&bounded(100, 300), 5000, Some(1000)), 300.0);
    assert_eq!(allowed(&bounded(100, 300), 0, None), 300.0);
    assert_eq!(allowed(&bounded(100, 300), 0, Some(0)), 300.0);
    assert_eq!(allowed(&bounded(75, 75), 1, Some(1000)), 75.0);
    assert_eq!(allowed(&bounded(300, 100), 500, Some(1000)), 200.0, "not put in order");
    assert_eq!(allowed(&bounded(300, 100), 0, None), 100.0);
    for (floor, ceil) in [(None, Some(1)), (Some(1), None), (None, None)] {
        let lone = Widen { max_queue_time_floor_ms: floor, max_queue_time_ceil_ms: ceil, ..Widen::default() };
        assert_eq!(Bounds::of(&lone), None);
    }
}

#[test]
fn queues_over_the_bounds_are_out_before_buckets_form() {
    let mut fleet = clusters(&[1, 40]);
    fleet[0].stats.queue_times = vec![(0, 10)];
    assert_eq!(open(&bounded(5, 5), 0, &fleet, &Ask::default()), [1], "at once");
    assert_eq!(open(&bounded(10, 10), 0, &fleet, &Ask::default()), [0], "at most, not under");
    let ignoring = Widen { ignore_queue_time: true, ..bounded(5, 5) };
    assert_eq!(open(&ignoring, 0, &fleet, &Ask::default()), [1], "ignored in times, not in bounds");
    // Nothing is known of the queue: never within bounds, even where queues are ignored.
    fleet[0].stats.queue_times.clear();
    fleet[0].stats.last_mean_input_tps = 0.0;
    fleet[0].stats.queued_input_size = 1;
    let ignoring = Widen { ignore_queue_time: true, ..bounded(u64::MAX, u64::MAX) };
    assert_eq!(open(&ignoring, 0, &fleet, &Ask::default()), [1]);
    let ignoring = Widen { ignore_queue_time: true, ..Widen::default() };
    assert_eq!(open(&ignoring, 0, &fleet, &Ask::default()), [0]);
}

#[test]
fn bounds_that_grow_say_when_they_let_somebody_in() {
    let mut fleet = clusters(&[1, 1, 1]);
    fleet[0].stats.queue_times = vec![(0, 250)];
    fleet[1].stats.queue_times = vec![(0, 200)];
    fleet[2].stats.queue_times = vec![(0, 301)];
    let widen = bounded(100, 300);
    let at = |fleet: &[Cluster], elapsed_ns, slo_ms| {
        pick(&rules(&widen, elapsed_ns), fleet, &Ask { elapsed_ns, slo_ms, ..Ask::default() }, 3)
    };
    assert_eq!(at(&fleet, 0, Some(1000)), Err(Closed { bucket_ns: None, bounds_ns: Some(500 * MS) }));
    assert_eq!(at(&fleet, 300 * MS, Some(1000)), Err(Closed { bucket_ns: None, bounds_ns: Some(200 * MS) }));
    assert_eq!(at(&fleet, 500 * MS, Some(1000)).map(|pick| pick.index), Ok(1));
    fill(&mut fleet[1]);
    assert_eq!(at(&fleet, 0, Some(1000)), Err(Closed { bucket_ns: None, bounds_ns: Some(750 * MS) }));
    fleet[0].stats.queue_times[0].1 = 301;
    assert_eq!(at(&fleet, 0, Some(1000)), Err(Closed::default()), "over the ceiling, or full");
    assert_eq!(at(&fleet, 0, None), Err(Closed::default()), "nothing grows without an objective");
}

#[test]
fn the_excluded_the_full_and_the_endless_are_never_chosen() {
    let mut fleet = clusters(&[1, 2, 3]);
    let ask = Ask { excluded: &[0], ..Ask::default() };
    assert_eq!(open(&Widen::default(), 0, &fleet, &ask), [1, 2]);
    fill(&mut fleet[1]);
    assert_eq!(open(&Widen::default(), 0, &fleet, &ask), [2]);
    assert_eq!(open(&Widen { max_queued: 1, ..Widen::default() }, 0, &fleet, &ask), [1, 2]);
    fleet[2].stats.last_mean_input_tps = -1.0;
    assert_eq!(open(&Widen::default(), 0, &fleet, &ask), [2], "no tokens, no rate needed");
    let ask = Ask { input_tokens: 1, ..ask };
    let nothing = pick(&rules(&Widen::default(), u64::MAX), &fleet, &ask, 1);
    assert_eq!(nothing, Err(Closed::default()));
    assert_eq!(pick(&rules(&Widen::default(), 0), &[], &ask, 1), Err(Closed::default()));
    let all = Ask { excluded: &[2, 1, 0], ..ask };
    assert_eq!(pick(&rules(&Widen::default(), 0), &fleet, &all, 1), Err(Closed::default()));
}
