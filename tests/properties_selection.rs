//! wait-and-widen and pulsar-wait-and-widen against the Stargate rules, sections 2.1 to 2.7, told again in the plainest way.
//!
//! The model sorts where the code passes, builds each byte string anew where the code keeps prefixes, and remembers nothing. It says
//! which clusters chance may choose, or for how long to wait. The code, with whatever it remembers of earlier requests, must choose one of
//! these, each of them sooner or later, or wait for as long.

use proptest::prelude::*;
use proptest::test_runner::Config;
use twox_hash::XxHash3_64;

use ringway::proto::config::lb_config::{
    Comparator, Entry, Method, MethodSettings, Pulsar, RendezvousWeight, WaitAndWiden, Widen,
};
use ringway::proto::stargate::balancer::{Ask, Balancer, Choice};
use ringway::proto::stargate::random::Rng;
use ringway::proto::stargate::stats::{Cluster, KvCache, Stats};

const MS: f64 = 1e6;
const ROUTING_KEY: &[u8] = b"rk";
const MODEL: &[u8] = b"llama";

// The model's estimates.

fn valid(tps: f64) -> bool {
    tps.is_finite() && tps > 0.0
}

fn queue_ms(stats: &Stats, priority: u32) -> f64 {
    let (c, r, t, q) = (
        stats.max_engine_concurrency,
        stats.num_running_queries,
        stats.last_mean_input_tps,
        stats.queued_input_size,
    );
    if c > 0 && r < c {
        return 0.0;
    }
    if !stats.queue_times.is_empty() {
        let at_most =
            stats.queue_times.iter().filter(|(key, _)| *key <= priority).max_by_key(|(key, _)| *key);
        return at_most.map_or(0.0, |(_, ms)| *ms as f64);
    }
    match q {
        0 => 0.0,
        _ if valid(t) => (q as f64 / t * 1000.0).ceil(),
        _ => f64::INFINITY,
    }
}

fn prefill_ms(stats: &Stats, input_tokens: u64, scale: f64) -> f64 {
    match input_tokens {
        0 => 0.0,
        _ if !valid(stats.last_mean_input_tps) => f64::INFINITY,
        tokens => tokens as f64 * scale / stats.last_mean_input_tps * 1000.0,
    }
}

fn ttft_ms(cluster: &Cluster, ask: &Ask<'_>, scale: f64, widen: &Widen) -> f64 {
    let queue = if widen.ignore_queue_time { 0.0 } else { queue_ms(&cluster.stats, ask.priority) };
    let prefill = match widen.ignore_input_processing_time {
        true => 0.0,
        false => prefill_ms(&cluster.stats, ask.input_tokens, scale),
    };
    cluster.rtt_ns as f64 / MS + queue + prefill
}

fn score(comparator: Comparator, cluster: &Cluster, ask: &Ask<'_>) -> f64 {
    let stats = &cluster.stats;
    match comparator {
        Comparator::Ttft => ttft_ms(cluster, ask, 1.0, &Widen::default()),
        Comparator::QueueTime => queue_ms(stats, ask.priority),
        Comparator::InputWorkSeconds => match stats.queued_input_size + ask.input_tokens {
            0 => 0.0,
            work if valid(stats.last_mean_input_tps) => work as f64 / stats.last_mean_input_tps,
            _ => f64::INFINITY,
        },
        Comparator::Utilization => {
            stats.num_running_queries as f64 / stats.max_engine_concurrency.max(1) as f64
        }
        Comparator::NumRequestsQueued => stats.queue_size as f64,
    }
}

/// Whether `a` is better than `b`.
fn beats(by: Option<Comparator>, a: &Cluster, b: &Cluster, ask: &Ask<'_>) -> bool {
    if let Some(comparator) = by {
        return score(comparator, a, ask).total_cmp(&score(comparator, b, ask)).is_lt();
    }
    let queues = queue_ms(&a.stats, ask.priority).total_cmp(&queue_ms(&b.stats, ask.priority));
    let load = |cluster: &Cluster| {
        let stats = &cluster.stats;
        let raw = a.stats.max_engine_concurrency == 0 || b.stats.max_engine_concurrency == 0;
        let limit = if raw { 1.0 } else { stats.max_engine_concurrency as f64 };
        stats.num_running_queries as f64 / limit
    };
    queues.then(load(a).total_cmp(&load(b))).is_lt()
}

// The model's selection.

/// What is open, or when something opens, in milliseconds: a bucket, the bounds on queue times.
type Outcome = Result<Vec<usize>, (Option<f64>, Option<f64>)>;

struct Step<'a> {
    widen: &'a Widen,
    limit: u64,
    elapsed_ms: f64,
    scale: f64,
}

fn core(step: &Step<'_>, clusters: &[Cluster], members: &[usize], ask: &Ask<'_>) -> Outcome {
    let widen = step.widen;
    let bounds = widen.max_queue_time_floor_ms.zip(widen.max_queue_time_ceil_ms);
    let arrived_ms = ask.elapsed_ns as f64 / MS;
    let allowed = bounds.map(|(floor, ceil)| {
        let f = match ask.slo_ms {
            None | Some(0) => 1.0,
            Some(slo) => (arrived_ms / slo as f64).clamp(0.0, 1.0),
        };
        floor as f64 + (ceil as f64 - floor as f64) * f
    });
    let has_capacity = |stats: &Stats| {
        stats.max_engine_concurrency == 0
            || stats.num_running_queries < stats.max_engine_concurrency + step.limit
    };
    let time = |index: &usize| ttft_ms(&clusters[*index], ask, step.scale, widen);
    let asked: Vec<usize> = members.iter().copied().filter(|index| !excluded(ask, index)).collect();
    let queue = |index: &usize| queue_ms(&clusters[*index].stats, ask.priority);
    let mut passing: Vec<usize> = asked
        .iter()
        .copied()
        .filter(|index| allowed.is_none_or(|allowed| queue(index).is_finite() && queue(index) <= allowed))
        .collect();
    passing.sort_by(|a, b| time(a).total_cmp(&time(b)).then(a.cmp(b)));
    // By time alone the bounds let in whom they keep out now, up to the ceiling.
    let bounds_open_ms = asked
        .iter()
        .filter(|index| !passing.contains(index) && has_capacity(&clusters[**index].stats))
        .filter_map(|index| {
            let ((floor, ceil), slo) = (bounds?, ask.slo_ms?);
            let reach = (queue(index) - floor as f64) / (ceil as f64 - floor as f64);
            let prefill_only = Widen { ignore_queue_time: true, ..widen.clone() };
            let finite = ttft_ms(&clusters[*index], ask, step.scale, &prefill_only).is_finite();
            (finite && queue(index) <= ceil as f64).then_some(slo as f64 * reach - arrived_ms)
        })
        .min_by(f64::total_cmp);

    let (mut open, mut bucket_ms) = (Vec::new(), None);
    let mut start = passing.first().map_or(0.0, time);
    let (mut slept, mut owed, mut locked) = (step.elapsed_ms, 0.0, false);
    for index in passing.iter().filter(|index| time(index).is_finite()) {
        let gap = time(index) - start;
        if gap > widen.ttft_bucket_size_ms as f64 {
            let need = gap * widen.next_bucket_unlock_factor;
            if locked || slept < need {
                locked = true;
                owed += need - slept;
                slept = 0.0;
            } else {
                slept -= need;
            }
            start = time(index);
        }
        if has_capacity(&clusters[*index].stats) {
            if locked {
                bucket_ms = bucket_ms.or(Some(owed));
            } else {
                open.push(*index);
            }
        }
    }
    if open.is_empty() { Err((bucket_ms, bounds_open_ms)) } else { Ok(open) }
}

/// What the answer may be.
#[derive(Debug)]
enum Expected {
    /// Open clusters with the depth that each is told with, and whether a better one was short of cache.
    OneOf(Vec<(usize, u32, bool)>),
    /// Milliseconds.
    Wait(f64),
    /// And when bounds open.
    Unavailable(Option<f64>),
}

fn least(times: &[Option<f64>]) -> Option<f64> {
    times.iter().flatten().copied().min_by(f64::total_cmp)
}

fn hash(seed: &str, fields: &[(&str, &[u8])]) -> u64 {
    let mut bytes = vec![1];
    let head = [("seed", seed.as_bytes()), ("routing_key", ROUTING_KEY), ("model_id", MODEL)];
    for (tag, value) in head.iter().chain(fields) {
        bytes.extend_from_slice(tag.as_bytes());
        bytes.push(0xff);
        bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
        bytes.extend_from_slice(value);
    }
    XxHash3_64::oneshot(&bytes)
}

fn group(rules: &WaitAndWiden, clusters: &[Cluster], key: &[u8]) -> Vec<usize> {
    let mut ring = Vec::new();
    for (index, cluster) in clusters.iter().enumerate() {
        for node in 0..u64::from(rules.virtual_nodes) {
            let fields = [("cluster_id", cluster.id.as_bytes()), ("virtual_node", &node.to_le_bytes()[..])];
            ring.push((hash(&rules.seed, &fields), cluster.id.clone(), index));
        }
    }
    ring.sort();
    let position = hash(&rules.seed, &[("cache_affinity_key", key)]);
    let mut group = Vec::new();
    let after = ring.iter().filter(|(node, ..)| *node >= position);
    for (_, _, index) in after.chain(ring.iter().filter(|(node, ..)| *node < position)) {
        if group.len() < rules.group as usize && !group.contains(index) {
            group.push(*index);
        }
    }
    group
}

fn wait_and_widen(rules: &WaitAndWiden, clusters: &[Cluster], ask: &Ask<'_>) -> Expected {
    let widen = &rules.widen;
    let elapsed_ms = ask.elapsed_ns as f64 / MS;
    let all: Vec<usize> = (0..clusters.len()).collect();
    let mut step = Step { widen, limit: widen.max_queued, elapsed_ms, scale: 1.0 };
    let mut of_group = (None, None);
    let mut depth = 1;
    if rules.group > 0 && !ask.affinity_key.is_empty() {
        let group = group(rules, clusters, ask.affinity_key);
        let scaled = Step { scale: widen.cache_affinity_input_tokens_scale, ..step };
        match core(&scaled, clusters, &group, ask) {
            Ok(open) => return Expected::OneOf(open.into_iter().map(|index| (index, 1, false)).collect()),
            Err(closed) => of_group = closed,
        }
        let alone_ms = widen.cache_affinity_wait_ms as f64;
        if elapsed_ms < alone_ms {
            let opens = [Some(alone_ms - elapsed_ms), of_group.0, of_group.1];
            return Expected::Wait(least(&opens).unwrap());
        }
        step = Step {
            elapsed_ms: (ask.elapsed_ns - widen.cache_affinity_wait_ms * 1_000_000) as f64 / MS,
            ..step
        };
        depth = 1 + group.len() as u32;
    }
    match core(&step, clusters, &all, ask) {
        Ok(open) => Expected::OneOf(open.into_iter().map(|index| (index, depth, false)).collect()),
        Err((bucket, bounds)) => {
            let bounds = least(&[of_group.1, bounds]);
            match least(&[of_group.0, bucket]) {
                Some(bucket) => Expected::Wait(least(&[Some(bucket), bounds]).unwrap()),
                None => Expected::Unavailable(bounds),
            }
        }
    }
}

/// The settings of pulsar-wait-and-widen.
#[derive(Clone, Debug)]
struct Banded {
    pulsar: Pulsar,
    widen: Widen,
    group: u64,
    interval_ms: Option<u64>,
    fallback_max_queued: u64,
}

fn ranking(pulsar: &Pulsar, clusters: &[Cluster], key: &[u8]) -> Vec<usize> {
    let mut scored: Vec<(f64, usize)> = Vec::new();
    for (index, cluster) in clusters.iter().enumerate() {
        let weight = match pulsar.weight {
            RendezvousWeight::MaxInputTps => cluster.stats.max_input_tps,
            RendezvousWeight::LastMeanInputTps => cluster.stats.last_mean_input_tps,
        };
        let fields = [("cache_affinity_key", key), ("cluster_id", cluster.id.as_bytes())];
        let u = (hash(&pulsar.seed, &fields) as f64 + 1.0) / (u64::MAX as f64 + 2.0);
        let e = -u.ln();
        if valid(weight) && e.is_finite() && e > 0.0 {
            scored.push((weight / e, index));
        }
    }
    scored.sort_by(|(a, i), (b, j)| b.total_cmp(a).then(i.cmp(j)));
    scored.into_iter().map(|(_, index)| index).collect()
}

fn pulsar_wait_and_widen(rules: &Banded, clusters: &[Cluster], ask: &Ask<'_>) -> Expected {
    let widen = &rules.widen;
    let ranking = ranking(&rules.pulsar, clusters, ask.affinity_key);
    let short = |index: &usize| {
        let kv = clusters[*index].stats.kv;
        let present = kv.capacity_tokens > 0 || kv.used_tokens > 0 || kv.free_tokens > 0;
        rules.pulsar.consider_kv_free_tokens && !(present && kv.free_tokens >= ask.input_tokens)
    };
    let excluded = |index: &usize| excluded(ask, index);
    let told = |open: Vec<usize>| {
        let one = |index: usize| {
            let place = ranking.iter().position(|ranked| *ranked == index).unwrap();
            let skipped = ranking[..place].iter().any(|better| short(better) && !excluded(better));
            (index, place as u32 + 1, skipped)
        };
        Expected::OneOf(open.into_iter().map(one).collect())
    };
    let eligible = |prefix: usize| -> Vec<usize> {
        ranking[..prefix].iter().copied().filter(|index| !excluded(index) && !short(index)).collect()
    };
    let bounded = widen.max_queue_time_floor_ms.is_some() && widen.max_queue_time_ceil_ms.is_some();
    if !bounded && let Some(first) = eligible(ranking.len().min(1)).first() {
        return told(vec![*first]);
    }
    let elapsed_ms = ask.elapsed_ns as f64 / MS;
    let scale = widen.cache_affinity_input_tokens_scale;
    let step = Step { widen, limit: widen.max_queued, elapsed_ms, scale };
    let group = (rules.group as usize).min(ranking.len());
    let of_group = match core(&step, clusters, &eligible(group), ask) {
        Ok(open) => return told(open),
        Err(closed) => closed,
    };
    let alone_ns = widen.cache_affinity_wait_ms * 1_000_000;
    if ask.elapsed_ns < alone_ns {
        let opens = [Some((alone_ns - ask.elapsed_ns) as f64 / MS), of_group.0, of_group.1];
        return Expected::Wait(least(&opens).unwrap());
    }
    let w = ask.elapsed_ns - alone_ns;
    let interval = rules.interval_ms.unwrap_or(widen.cache_affinity_wait_ms) * 1_000_000;
    let bands = w.checked_div(interval).map_or(40, |full| full + 1);
    let mut prefix = group;
    for band in 0..bands.min(40) {
        prefix = (prefix + (2 << band)).min(ranking.len());
    }
    let step = Step { limit: rules.fallback_max_queued, elapsed_ms: w as f64 / MS, scale: 1.0, ..step };
    let of_bands = match core(&step, clusters, &eligible(prefix), ask) {
        Ok(open) => return told(open),
        Err(closed) => closed,
    };
    let next = (prefix < ranking.len()).then(|| (interval * bands - w) as f64 / MS);
    let bounds = least(&[of_group.1, of_bands.1]);
    match least(&[of_group.0, of_bands.0, next]) {
        Some(ms) => Expected::Wait(least(&[Some(ms), bounds]).unwrap()),
        None => Expected::Unavailable(bounds),
    }
}

// What is thrown at both.

fn rate() -> impl Strategy<Value = f64> {
    prop_oneof![
        8 => 10.0..5000.0_f64,
        4 => Just(1000.0),
        1 => prop_oneof![Just(0.0), Just(-5.0), Just(f64::NAN), Just(f64::INFINITY)],
    ]
}

fn queue_times() -> impl Strategy<Value = Vec<(u32, u64)>> {
    let some = proptest::collection::btree_map(0..6_u32, 0..400_u64, 1..4);
    prop_oneof![2 => Just(Vec::new()), 1 => some.prop_map(|map| map.into_iter().collect())]
}

fn stats() -> impl Strategy<Value = Stats> {
    let kv = prop_oneof![Just(0), 0..300_u64].prop_map(|free_tokens| KvCache {
        capacity_tokens: free_tokens * 2,
        used_tokens: free_tokens,
        free_tokens,
    });
    let load = prop_oneof![Just((0, 0)), (0..6_u64, 0..6_u64), (3..5_u64, Just(3))];
    (rate(), rate(), load, queue_times(), 0..300_u64, 0..5_u64, kv).prop_map(
        |(mean, max, (running, limit), queue_times, queued_input_size, queue_size, kv)| Stats {
            last_mean_input_tps: mean,
            max_input_tps: max,
            num_running_queries: running,
            max_engine_concurrency: limit,
            queue_times,
            queued_input_size,
            queue_size,
            kv,
            ..Stats::default()
        },
    )
}

fn clusters() -> impl Strategy<Value = Vec<Cluster>> {
    let rtt = prop_oneof![Just(1_000_000), 0..200_000_000_u64];
    proptest::collection::vec((stats(), rtt), 0..14).prop_map(|all| {
        let one = |(i, (stats, rtt_ns)): (usize, _)| Cluster { id: format!("c{i:02}").into(), rtt_ns, stats };
        all.into_iter().enumerate().map(one).collect()
    })
}

fn widen() -> impl Strategy<Value = Widen> {
    let bounds = prop_oneof![
        Just((None, None)),
        Just((None, Some(9))),
        (0..300_u64, 0..300_u64).prop_map(|(floor, ceil)| (Some(floor), Some(ceil))),
    ];
    let factor = prop_oneof![Just(0.25), Just(0.0), Just(-1.0), 0.001..3.0_f64];
    let size = prop_oneof![Just(20), Just(0), 0..200_u64];
    let flags = (proptest::bool::weighted(0.2), proptest::bool::weighted(0.2));
    let scale = prop_oneof![Just(1.0), Just(0.0), 0.0..1.0_f64];
    let wait = prop_oneof![Just(0), Just(100), 0..300_u64];
    (1..4_u64, 0..3_u64, bounds, size, factor, flags, wait, scale).prop_map(
        |(n, max_queued, (floor, ceil), size, factor, (no_queue, no_prefill), wait, scale)| Widen {
            n,
            max_queued,
            max_queue_time_floor_ms: floor,
            max_queue_time_ceil_ms: ceil,
            ttft_bucket_size_ms: size,
            next_bucket_unlock_factor: factor,
            ignore_queue_time: no_queue,
            ignore_input_processing_time: no_prefill,
            cache_affinity_wait_ms: wait,
            cache_affinity_input_tokens_scale: scale,
        },
    )
}

#[derive(Clone, Debug)]
struct Asked {
    input_tokens: u64,
    priority: u32,
    elapsed_ns: u64,
    slo_ms: Option<u64>,
    key: Vec<u8>,
    excluded: Vec<usize>,
    shut: Vec<bool>,
}

/// Whether a cluster failed the request or is shut.
fn excluded(ask: &Ask<'_>, index: &usize) -> bool {
    ask.excluded.contains(index) || ask.shut.get(*index) == Some(&true)
}

impl Asked {
    fn ask(&self) -> Ask<'_> {
        Ask {
            input_tokens: self.input_tokens,
            priority: self.priority,
            elapsed_ns: self.elapsed_ns,
            slo_ms: self.slo_ms,
            affinity_key: &self.key,
            excluded: &self.excluded,
            shut: &self.shut,
        }
    }
}

fn asked() -> impl Strategy<Value = Asked> {
    let elapsed = prop_oneof![
        2 => Just(0),
        3 => (0..500_u64).prop_map(|ms| ms * 1_000_000),
        3 => 0..500_000_000_u64,
        1 => Just(60_000_000_000),
    ];
    let key = prop_oneof![
        1 => Just(Vec::new()),
        6 => (0..5_u8).prop_map(|key| vec![b'k', key]),
        1 => Just(vec![b'k'; 300]),
    ];
    let slo = prop_oneof![Just(None), Just(Some(0)), (1..1000_u64).prop_map(Some)];
    let excluded = prop_oneof![2 => Just(Vec::new()), 1 => proptest::collection::vec(0..14_usize, 0..4)];
    let flags = proptest::collection::vec(proptest::bool::weighted(0.3), 14);
    let shut = prop_oneof![2 => Just(Vec::new()), 1 => flags];
    (prop_oneof![Just(0), 0..200_u64], 0..6_u32, elapsed, slo, key, excluded, shut).prop_map(
        |(input_tokens, priority, elapsed_ns, slo_ms, key, excluded, shut)| Asked {
            input_tokens,
            priority,
            elapsed_ns,
            slo_ms,
            key,
            excluded,
            shut,
        },
    )
}

/// Rounded up to a nanosecond, and a nanosecond for the sum of roundings.
fn same_wait(ns: u64, ms: f64) -> bool {
    (ns as f64 - (ms * MS).ceil().max(1.0)).abs() <= 1.0
}

/// Asks often enough that chance shows all it may choose, and compares.
fn compare(
    balancer: &mut Balancer,
    entry: &Entry,
    (by, n): (Option<Comparator>, u64),
    clusters: &[Cluster],
    version: u64,
    asked: &Asked,
    expected: &Expected,
) -> Result<(), TestCaseError> {
    let ask = asked.ask();
    let mut rng = Rng::new(version);
    let mut seen: Vec<usize> = Vec::new();
    for _ in 0..if n == 1 { 300 } else { 40 } {
        let choice = balancer.choose(entry, clusters, version, &ask, &mut rng);
        match (choice, expected) {
            (Choice::Selected(selection), Expected::OneOf(open)) => {
                let found = open.iter().find(|(index, ..)| *index == selection.index);
                let told = Some(&(selection.index, selection.rank_depth, selection.after_kv_skip));
                prop_assert_eq!(found, told, "of {:?}", open);
                // Among so many that were drawn, it can be the best.
                let drawn = (n as usize).min(open.len());
                if drawn <= 2 || by.is_some() {
                    let best = &clusters[selection.index];
                    let not_better = open
                        .iter()
                        .filter(|(index, ..)| *index != selection.index)
                        .filter(|(index, ..)| !beats(by, &clusters[*index], best, &ask))
                        .count();
                    prop_assert!(not_better + 1 >= drawn, "{} of {:?}", selection.index, open);
                }
                seen.push(selection.index);
            }
            (Choice::Wait { ns }, Expected::Wait(ms)) => {
                prop_assert!(same_wait(ns, *ms), "{} ns instead of {} ms", ns, ms);
                break;
            }
            (Choice::Unavailable, Expected::Unavailable(bounds_ms)) => {
                let same = match (balancer.bounds_open_ns(), bounds_ms) {
                    (Some(ns), Some(ms)) => same_wait(ns, *ms),
                    (told, wanted) => told.is_none() && wanted.is_none(),
                };
                prop_assert!(same, "{:?} instead of {:?}", balancer.bounds_open_ns(), bounds_ms);
                break;
            }
            (choice, expected) => prop_assert!(false, "{:?} instead of {:?}", choice, expected),
        }
    }
    if let Expected::OneOf(open) = expected
        && n == 1
    {
        let missed: Vec<_> = open.iter().filter(|(index, ..)| !seen.contains(index)).collect();
        prop_assert!(missed.is_empty(), "never chosen: {:?}", missed);
    }
    // Who is chosen is concerned.
    for index in seen {
        prop_assert!(balancer.concerns(entry, clusters, version, &ask, index));
    }
    Ok(())
}

fn comparator() -> impl Strategy<Value = Comparator> {
    proptest::sample::select(Comparator::ALL.to_vec())
}

proptest! {
    #![proptest_config(Config { cases: 600, ..Config::default() })]

    #[test]
    fn wait_and_widen_is_what_the_rules_say(
        (widen, comparator, group, virtual_nodes) in (widen(), comparator(), 0..5_u64, 1..20_u32),
        rounds in proptest::collection::vec((clusters(), asked()), 1..4),
    ) {
        let n = widen.n;
        let rules = WaitAndWiden { seed: "s".into(), comparator, widen, virtual_nodes, group };
        let mut entry = Entry::new(Method::WaitAndWiden);
        entry.method = MethodSettings::WaitAndWiden(rules.clone());
        let mut balancer = Balancer::new(&entry, ROUTING_KEY, MODEL);
        for (version, (clusters, asked)) in rounds.iter().enumerate() {
            if clusters.is_empty() {
                continue;
            }
            let expected = wait_and_widen(&rules, clusters, &asked.ask());
            let by = (Some(comparator), n);
            compare(&mut balancer, &entry, by, clusters, version as u64, asked, &expected)?;
        }
    }

    #[test]
    fn pulsar_wait_and_widen_is_what_the_rules_say(
        widen in widen(),
        (consider_kv_free_tokens, by_mean) in (any::<bool>(), any::<bool>()),
        (group, interval_ms, fallback_max_queued) in
            (1..5_u64, prop_oneof![Just(None), Just(Some(0)), (1..200_u64).prop_map(Some)], 0..3_u64),
        rounds in proptest::collection::vec((clusters(), asked()), 1..4),
    ) {
        let n = widen.n;
        let weight =
            if by_mean { RendezvousWeight::LastMeanInputTps } else { RendezvousWeight::MaxInputTps };
        let pulsar = Pulsar { seed: "s".into(), consider_kv_free_tokens, weight };
        let rules = Banded { pulsar, widen, group, interval_ms, fallback_max_queued };
        let mut entry = Entry::new(Method::PulsarWaitAndWiden);
        entry.method = MethodSettings::PulsarWaitAndWiden {
            pulsar: rules.pulsar.clone(),
            widen: rules.widen.clone(),
            group,
            band_widen_interval_ms: interval_ms,
            fallback_max_queued,
        };
        let mut balancer = Balancer::new(&entry, ROUTING_KEY, MODEL);
        for (version, (clusters, asked)) in rounds.iter().enumerate() {
            let expected = pulsar_wait_and_widen(&rules, clusters, &asked.ask());
            compare(&mut balancer, &entry, (None, n), clusters, version as u64, asked, &expected)?;
        }
    }
}
