use super::*;

fn cluster(
    tps: f64,
    queued: u64,
    (running, limit): (u64, u64),
    times: &[(u32, u64)],
    rtt_ms: u64,
) -> Cluster {
    let stats = Stats {
        last_mean_input_tps: tps,
        queued_input_size: queued,
        num_running_queries: running,
        max_engine_concurrency: limit,
        queue_times: times.to_vec(),
        ..Stats::default()
    };
    Cluster { rtt_ns: rtt_ms * 1_000_000, stats, ..Cluster::default() }
}

/// A row of the table: T, Q, R/C, queue times, p, I, round trip; queue, prefill, time to first token.
type Row = (f64, u64, (u64, u64), &'static [(u32, u64)], u32, u64, u64, f64, f64, f64);

const NEVER: f64 = f64::INFINITY;

#[test]
fn the_table_of_the_rules() {
    let rows: [Row; 10] = [
        (100.0, 999, (0, 0), &[(4, 25)], 4, 200, 7, 25.0, 2000.0, 2032.0),
        (3.0, 1, (0, 0), &[], 0, 1, 0, 334.0, 333.333_333, 667.333_333),
        (100.0, 25, (0, 0), &[(1, 10), (4, 40)], 3, 0, 5, 10.0, 0.0, 15.0),
        (100.0, 25, (0, 0), &[(4, 250)], 0, 0, 5, 0.0, 0.0, 5.0),
        (100.0, 25, (0, 0), &[], 9, 0, 0, 250.0, 0.0, 250.0),
        (0.0, 25, (0, 0), &[], 0, 0, 0, NEVER, 0.0, NEVER),
        (0.0, 0, (0, 0), &[], 0, 10, 0, 0.0, NEVER, NEVER),
        (8000.0, 80_000, (24, 25), &[(0, 10_000)], 0, 0, 0, 0.0, 0.0, 0.0),
        (8000.0, 88_000, (25, 25), &[(0, 11_000)], 0, 0, 0, 11_000.0, 0.0, 11_000.0),
        (100.0, 1, (5, 0), &[], 0, 0, 0, 10.0, 0.0, 10.0),
    ];
    for (i, (tps, queued, load, times, priority, input, rtt, queue, prefill, ttft)) in rows.iter().enumerate()
    {
        let cluster = cluster(*tps, *queued, *load, times, *rtt);
        let same = |got: f64, wanted: f64| got == wanted || (got - wanted).abs() < 1e-6;
        let row = i + 1;
        assert!(same(queue_ms(&cluster.stats, *priority), *queue), "row {row}: queue");
        assert!(same(prefill_ms(*input as f64, *input == 0, *tps), *prefill), "row {row}: prefill");
        assert!(same(ttft_ms(&cluster, *input, *priority), *ttft), "row {row}: time to first token");
        let header = (*queue < NEVER).then_some(*queue as u64);
        assert_eq!(expected_queue_ms(&cluster.stats, *priority), header, "row {row}: header");
    }
}

#[test]
fn times_round_up_and_what_does_not_fit_is_none() {
    assert_eq!(delta_ms(0, 0.0), Some(0));
    assert_eq!(delta_ms(1, 3.0), Some(334));
    assert_eq!(delta_ms(1, 1000.0), Some(1));
    assert_eq!(delta_ms(1, 1e9), Some(1));
    assert_eq!(delta_ms(25, 100.0), Some(250));
    for rate in [0.0, -1.0, -0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(delta_ms(1, rate), None, "{rate}");
    }
    assert_eq!(delta_ms(u64::MAX, 1000.0), None, "2^64 is one too many");
    assert_eq!(delta_ms(u64::MAX, 1001.0), Some(18_428_315_757_951_600_640));
    assert_eq!(delta_ms(1, f64::MIN_POSITIVE), None);
    // A queue that no 64 bits hold is no queue of nothing.
    let endless = cluster(1e-300, 1, (0, 0), &[], 0);
    assert_eq!(expected_queue_ms(&endless.stats, 0), None);
    assert_eq!(queue_ms(&endless.stats, 0), NEVER);
}

#[test]
fn a_free_slot_ends_the_queue_and_the_last_one_taken_brings_it_back() {
    let mut cluster = cluster(8000.0, 80_000, (24, 25), &[(0, 10_000)], 0);
    assert_eq!(expected_queue_ms(&cluster.stats, 0), Some(0));
    cluster.stats.num_running_queries += 1;
    assert_eq!(expected_queue_ms(&cluster.stats, 0), Some(10_000));
    // Raw work stays as it is for those that ask for it.
    cluster.stats.num_running_queries = 0;
    assert_eq!(score(Comparator::InputWorkSeconds, &cluster, 0, 0), 10.0_f64.to_bits());
}

#[test]
fn priorities_see_the_work_up_to_them() {
    let cluster = cluster(0.0, 9, (0, 0), &[(1, 10), (4, 40), (9, 90)], 0);
    let queue = |priority| expected_queue_ms(&cluster.stats, priority);
    assert_eq!([0, 1, 3, 4, 8, 9, u32::MAX].map(queue), [0, 10, 10, 40, 40, 90, 90].map(Some));
}

#[test]
fn comparators() {
    let cluster = cluster(10.0, 30, (3, 4), &[(0, 7), (5, 50)], 2);
    let mut cluster = Cluster { rtt_ns: cluster.rtt_ns, ..cluster };
    cluster.stats.queue_size = 11;
    let by = |comparator, cluster: &Cluster| f64::from_bits(score(comparator, cluster, 20, 5));
    assert_eq!(by(Comparator::Ttft, &cluster), 2002.0, "a slot is free");
    assert_eq!(by(Comparator::QueueTime, &cluster), 0.0);
    cluster.stats.num_running_queries = 4;
    assert_eq!(by(Comparator::Ttft, &cluster), 2052.0);
    assert_eq!(by(Comparator::QueueTime, &cluster), 50.0);
    assert_eq!(by(Comparator::InputWorkSeconds, &cluster), 5.0);
    assert_eq!(by(Comparator::Utilization, &cluster), 1.0);
    assert_eq!(score(Comparator::NumRequestsQueued, &cluster, 20, 5), 11);
    cluster.stats.max_engine_concurrency = 0;
    assert_eq!(by(Comparator::Utilization, &cluster), 4.0);
    cluster.stats.last_mean_input_tps = f64::NAN;
    assert_eq!(by(Comparator::Ttft, &cluster), NEVER);
    assert_eq!(by(Comparator::InputWorkSeconds, &cluster), NEVER);
    assert_eq!(f64::from_bits(score(Comparator::Ttft, &cluster, 0, 5)), 52.0);
    cluster.stats.queued_input_size = 0;
    assert_eq!(f64::from_bits(score(Comparator::InputWorkSeconds, &cluster, 0, 5)), 0.0);
    // Infinite is more than anything finite, as bits too.
    assert!(NEVER.to_bits() > f64::MAX.to_bits());
}

#[test]
fn capacity_and_cache() {
    let with = |running, limit| cluster(0.0, 0, (running, limit), &[], 0).stats;
    assert!(has_capacity(&with(u64::MAX, 0), 0), "no known limit");
    assert!(has_capacity(&with(0, 1), 0) && !has_capacity(&with(1, 1), 0));
    assert!(has_capacity(&with(3, 1), 3) && !has_capacity(&with(4, 1), 3));
    assert!(has_capacity(&with(u64::MAX - 1, 5), u64::MAX), "a sum that does not fit");

    let kv =
        |capacity_tokens, used_tokens, free_tokens| KvCache { capacity_tokens, used_tokens, free_tokens };
    assert!(kv_fits(&kv(1024, 1024, 0), 0));
    assert!(!kv_fits(&kv(1024, 1024, 0), 1));
    assert!(!kv_fits(&kv(0, 0, 0), 0), "nothing is known");
    assert!(kv_fits(&kv(0, 0, 7), 7) && !kv_fits(&kv(9, 2, 7), 8));
}
