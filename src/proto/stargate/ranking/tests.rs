use super::super::stats::Stats;
use super::*;

fn clusters(weights: &[f64]) -> Vec<Cluster> {
    let one = |(i, tps): (usize, &f64)| Cluster {
        id: format!("cluster-{i}").into(),
        rtt_ns: 0,
        stats: Stats { max_input_tps: *tps, last_mean_input_tps: 7.0, ..Stats::default() },
    };
    weights.iter().enumerate().map(one).collect()
}

fn rankings(seed: &str, routing_key: &str, model: &str) -> Rankings {
    let text = Text::new(seed.as_bytes(), routing_key.as_bytes(), model.as_bytes());
    Rankings::new(text, RendezvousWeight::MaxInputTps)
}

fn order(rankings: &mut Rankings, clusters: &[Cluster], version: u64, key: &str) -> Vec<u32> {
    rankings.look(clusters, version);
    let key = rankings.take(clusters, key.as_bytes());
    let first = rankings.first(key);
    let order = rankings.order(key).to_vec();
    assert_eq!(order.first().copied(), first);
    order
}

#[test]
#[expect(clippy::excessive_precision, reason = "to as many digits as the rules print")]
fn draws_and_scores_of_the_rules() {
    let cases = [
        (0x1944_3c44_ec9f_8abf, 0.098_697_439_982_627_852, 43.183_556_187_9),
        (0xd4fa_425e_6669_b08c, 0.831_943_653_151_404_62, 543.506_130_233),
        (0x00dc_dca7_7d80_cc0a, 0.003_370_085_612_462_492_7, 17.565_995_482_6),
        (0x079b_3ab6_d100_c655, 0.029_712_361_939_348_762, 28.439_856_913_1),
        (0x2746_c531_4711_ba9c, 0.153_423_618_822_734_39, 53.346_067_166_4),
        (0xab21_e15e_39bc_0b7c, 0.668_485_723_022_726_69, 248.299_003_219),
        (0xda4b_1651_293c_4775, 0.852_708_239_378_658_14, 627.597_348_548),
        (0xe6eb_ff7d_f8a8_abb3, 0.902_038_543_944_089_55, 969.950_655_297),
        (0xa4c3_5725_b312_bf62, 0.643_605_658_248_882_94, 226.927_656_776),
        (0x4db2_2118_c9de_ab48, 0.303_499_287_177_937_56, 83.866_161_815_6),
        (0xd882_ac5e_9419_f655, 0.845_743_916_597_804_35, 596.877_147_4),
        (0x8f0c_fa09_3229_c115, 0.558_791_758_771_042_7, 171.827_683_013),
        (0x58d1_a835_9a2e_5ae5, 0.346_949_112_974_635_76, 94.466_425_255_9),
    ];
    for (hash, u, wanted) in cases {
        assert_eq!(unit(hash), u, "{hash:x}");
        let got = f64::from_bits(score(100.0, draw(hash)) - 1);
        assert!((got / wanted - 1.0).abs() < 1e-10, "{hash:x}: {got}");
    }
}

#[test]
fn a_hash_that_leaves_no_room_below_one_is_not_ranked() {
    assert_eq!(score(100.0, draw(u64::MAX)), 0);
    assert!(score(100.0, draw(0)) > 0);
    assert_eq!(score(0.0, 1.0), 0);
    assert_eq!(score(f64::MIN_POSITIVE, f64::MAX), 1, "as low as can be, and yet ranked");
}

#[test]
fn rankings_of_the_rules() {
    let even = clusters(&[100.0; 5]);
    let skewed = clusters(&[10.0, 100.0, 100.0, 100.0, 1000.0]);
    let mut known = rankings("stable-a", "fn-1", "llama");
    for (key, with_even, with_skewed) in [
        ("session-0", [0, 3, 4, 1, 2], [4, 3, 1, 0, 2]),
        ("session-1", [3, 0, 4, 2, 1], [3, 4, 0, 2, 1]),
        ("session-2", [4, 2, 3, 0, 1], [4, 2, 3, 1, 0]),
    ] {
        assert_eq!(order(&mut known, &even, 1, key), with_even, "{key}");
        assert_eq!(order(&mut known, &skewed, 2, key), with_skewed, "{key}, skewed");
        assert_eq!(order(&mut known, &even, 3, key), with_even, "{key}, even again");
    }
    assert_eq!(order(&mut rankings("stable-b", "fn-1", "llama"), &even, 1, "session-0"), [2, 1, 0, 3, 4]);
    assert_eq!(order(&mut rankings("", "", "llama"), &even, 1, ""), [2, 3, 0, 1, 4]);
}

#[test]
fn shares_follow_weights() {
    let clusters = clusters(&[1.0, 2.0, 3.0]);
    let mut rankings = rankings("seed", "", "m");
    rankings.look(&clusters, 1);
    let mut firsts = [0_i32; 3];
    for i in 0..20_000 {
        let key = rankings.take(&clusters, format!("key-{i}").as_bytes());
        firsts[rankings.first(key).unwrap() as usize] += 1;
    }
    // About five standard deviations.
    for (got, wanted) in firsts.iter().zip([3333, 6667, 10_000]) {
        assert!((got - wanted).abs() < 350, "{firsts:?}");
    }
}

#[test]
fn a_cluster_without_a_valid_weight_is_left_out() {
    let mut rankings = rankings("stable-a", "fn-1", "llama");
    let bad = [100.0, 0.0, -1.0, f64::NAN, f64::INFINITY];
    assert_eq!(order(&mut rankings, &clusters(&bad), 1, "session-0"), [0]);
    assert_eq!(order(&mut rankings, &clusters(&[0.0; 5]), 2, "session-0"), [] as [u32; 0]);
    assert_eq!(order(&mut rankings, &[], 3, "session-0"), [] as [u32; 0]);
    let mut by_mean = Rankings::new(Text::new(b"", b"", b"m"), RendezvousWeight::LastMeanInputTps);
    assert_eq!(order(&mut by_mean, &clusters(&[0.0; 3]), 1, "k").len(), 3, "a mean will do");
}

#[test]
fn what_is_remembered_never_shows() {
    let mut rng = super::super::random::Rng::new(11);
    let mut warm = rankings("seed", "rk", "m");
    let long = "k".repeat(300);
    let mut weights = vec![100.0; 12];
    let mut shown: Vec<Cluster> = clusters(&weights);
    for version in 0..2_000_u64 {
        match rng.below(20) {
            0 => {
                shown = clusters(&weights);
                (0..rng.below(5)).for_each(|_| drop(shown.remove(rng.below(shown.len()))));
            }
            1 => {
                weights[rng.below(12)] = rng.below(4) as f64 * 50.0;
                for cluster in &mut shown {
                    let number: usize = cluster.id["cluster-".len()..].parse().unwrap();
                    cluster.stats.max_input_tps = weights[number];
                }
            }
            _ => {}
        }
        // Clusters of one version are the same; sorted by id, "cluster-10" is before "cluster-2".
        shown.sort_by(|a, b| a.id.cmp(&b.id));
        let key = match rng.below(30) {
            0 => long.clone(),
            n => format!("key-{n}"),
        };
        let mut fresh = rankings("seed", "rk", "m");
        assert_eq!(order(&mut warm, &shown, version, &key), order(&mut fresh, &shown, 0, &key), "{version}");
    }
}

#[test]
fn memory_is_bounded_by_keys_and_by_keys_times_clusters() {
    for (count, keys_max) in [(3, AFFINITY_KEYS_MAX), (1024, AFFINITY_DRAWS_MAX / 1024)] {
        let clusters = {
            let mut clusters = clusters(&vec![1.0; count]);
            clusters.sort_by(|a, b| a.id.cmp(&b.id));
            clusters
        };
        let mut rankings = rankings("", "", "m");
        rankings.look(&clusters, 1);
        for key in 0..keys_max + 100 {
            rankings.take(&clusters, &key.to_le_bytes());
        }
        rankings.take(&clusters, &[b'k'; 257]);
        assert_eq!(rankings.ranked.len(), keys_max, "{count} clusters");
    }
}
