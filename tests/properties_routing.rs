//! Each algorithm against a naive model that says the same in the plainest way.
//!
//! The models follow the Lifeboat rules, section 4: smooth weighted round robin as "add every weight, take the largest,
//! subtract the sum", least-connections as "least in_flight / weight, ties by the wheel".

use proptest::prelude::*;

use ringway::proto::backend::table::fixed_weight;
use ringway::proto::ids::BackendId;
use ringway::proto::route::least_connections::LeastConnections;
use ringway::proto::route::policy::{Candidate, Policy};
use ringway::proto::route::weighted_round_robin::WeightedRoundRobin;
use ringway::proto::route::wheel::Wheel;

/// Smooth weighted round robin as everybody writes it first.
struct NaiveWheel {
    weights: Vec<i128>,
    current: Vec<i128>,
}

impl NaiveWheel {
    fn new(weights: &[f64]) -> Self {
        let weights: Vec<_> = weights.iter().map(|w| i128::from(fixed_weight(*w))).collect();
        NaiveWheel { current: vec![0; weights.len()], weights }
    }

    fn pick(&mut self, shown: &[usize]) -> usize {
        let sum: i128 = shown.iter().map(|i| self.weights[*i]).sum();
        for i in shown {
            self.current[*i] += self.weights[*i];
        }
        let mut best = shown[0];
        for i in shown {
            if self.current[*i] > self.current[best] {
                best = *i;
            }
        }
        self.current[best] -= sum;
        best
    }
}

fn wheel_of(weights: &[f64]) -> Wheel {
    let mut wheel = Wheel::new(weights.len());
    let weights: Vec<u64> = weights.iter().map(|w| fixed_weight(*w)).collect();
    wheel.set_weights(&weights);
    wheel
}

fn candidates(weights: &[f64], in_flight: &[u32], shown: &[usize]) -> Vec<Candidate> {
    let one = |i: &usize| Candidate {
        backend: BackendId(*i as u16 + 100),
        slot: *i as u16,
        weight: fixed_weight(weights[*i]),
        in_flight: in_flight[*i],
        matched: 0,
        continues: false,
        prefill_tokens: 0,
    };
    shown.iter().map(one).collect()
}

/// Turns the wheel with exactly `shown` to be seen.
fn turn(wheel: &mut Wheel, servers: usize, shown: &[usize]) -> usize {
    for slot in 0..servers {
        wheel.show(slot as u16, shown.contains(&slot));
    }
    wheel.turn() as usize
}

fn weight() -> impl Strategy<Value = f64> {
    prop_oneof![Just(1.0), Just(0.5), Just(5.0), 0.001..100.0_f64, Just(1e6), Just(1e-6)]
}

/// Which of `n` are shown in each round: never none.
fn rounds(n: usize) -> impl Strategy<Value = Vec<Vec<usize>>> {
    let round = prop_oneof![
        3 => Just((0..n).collect::<Vec<_>>()),
        1 => proptest::collection::vec(any::<bool>(), n).prop_map(|shown| {
            let shown: Vec<_> = shown.iter().enumerate().filter(|(_, s)| **s).map(|(i, _)| i).collect();
            if shown.is_empty() { vec![0] } else { shown }
        }),
    ];
    proptest::collection::vec(round, 1..200)
}

fn wheel_case() -> impl Strategy<Value = (Vec<f64>, Vec<Vec<usize>>)> {
    proptest::collection::vec(weight(), 1..9).prop_flat_map(|weights| {
        let n = weights.len();
        (Just(weights), rounds(n))
    })
}

/// Who is shown, and the requests in flight on each server.
type Round = (Vec<usize>, Vec<u32>);

fn load_case() -> impl Strategy<Value = (Vec<f64>, Vec<Round>)> {
    proptest::collection::vec(weight(), 1..9).prop_flat_map(|weights| {
        let n = weights.len();
        let load = proptest::collection::vec(prop_oneof![Just(0), 0..5_u32, 0..u32::MAX], n);
        let rounds = rounds(n).prop_flat_map(move |rounds| {
            let length = rounds.len();
            (Just(rounds), proptest::collection::vec(load.clone(), length))
        });
        (Just(weights), rounds.prop_map(|(shown, load)| shown.into_iter().zip(load).collect()))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Lifeboat rules: "each pick: every candidate's current += weight; take the largest, subtract the sum".
    #[test]
    fn weighted_round_robin_is_the_naive_wheel((weights, rounds) in wheel_case()) {
        let mut naive = NaiveWheel::new(&weights);
        // One that is told who is to be seen, one that is shown them each time, and one that is used either way in turns.
        let (mut told, mut shown_to, mut both) = (wheel_of(&weights), wheel_of(&weights), wheel_of(&weights));
        let idle = vec![0; weights.len()];
        for (round, shown) in rounds.into_iter().enumerate() {
            // A score that had to be clamped to its bound leaves the naive model by intent, see
            // `what_a_server_can_save_up_is_bounded`.
            let sum: i128 = naive.weights.iter().sum();
            prop_assume!(naive.current.iter().all(|score| score.abs() <= 2 * sum));
            let choice = WeightedRoundRobin.choose(&mut shown_to, &mut candidates(&weights, &idle, &shown));
            let wanted = naive.pick(&shown);
            prop_assert_eq!(choice.slot as usize, wanted);
            prop_assert_eq!(turn(&mut told, weights.len(), &shown), wanted);
            let mixed = match round / 3 % 2 {
                0 => turn(&mut both, weights.len(), &shown),
                _ => shown[both.turn_among(&candidates(&weights, &idle, &shown))],
            };
            prop_assert_eq!(mixed, wanted);
            prop_assert_eq!(choice.backend, BackendId(choice.slot + 100));
            prop_assert_eq!(choice.turned, shown.len() > 1);
        }
    }

    /// Lifeboat rules: "least in-flight / weight; ties broken by the smooth wheel".
    #[test]
    fn least_connections_is_the_least_ratio_then_the_naive_wheel((weights, rounds) in load_case()) {
        let mut naive = NaiveWheel::new(&weights);
        let mut wheel = wheel_of(&weights);
        for (shown, load) in rounds {
            let sum: i128 = naive.weights.iter().sum();
            prop_assume!(naive.current.iter().all(|score| score.abs() <= 2 * sum));
            let choice = LeastConnections.choose(&mut wheel, &mut candidates(&weights, &load, &shown));
            let less = |a: usize, b: usize| {
                i128::from(load[a]) * naive.weights[b] < i128::from(load[b]) * naive.weights[a]
            };
            let ties: Vec<_> =
                shown.iter().copied().filter(|a| !shown.iter().any(|b| less(*b, *a))).collect();
            let wanted = if ties.len() == 1 { ties[0] } else { naive.pick(&ties) };
            prop_assert_eq!(choice.slot as usize, wanted);
        }
    }

    /// Picks of peers count like picks made here: after any mixture, `steps` more picks give each server its share.
    #[test]
    fn a_wheel_that_follows_peers_makes_up_for_what_they_picked(
        weights in proptest::collection::vec((1..20_u32).prop_map(f64::from), 2..6),
        seed in any::<u64>(),
    ) {
        let n = weights.len();
        let sum: f64 = weights.iter().sum();
        let mut here = wheel_of(&weights);
        let mut peer = wheel_of(&weights);
        let mut counts = vec![0.0; n];
        let mut state = seed;
        for _ in 0..1000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (turning, following) = if state >> 63 == 0 { (&mut here, &mut peer) } else { (&mut peer, &mut here) };
            let slot = turning.turn();
            following.follow(slot, 1);
            counts[slot as usize] += 1.0;
        }
        for (count, weight) in counts.iter().zip(&weights) {
            let wanted = 1000.0 * weight / sum;
            prop_assert!((count - wanted).abs() <= 2.0, "{} for {} of {:?}", count, wanted, weights);
        }
    }

    /// A pick taken back leaves no trace.
    #[test]
    fn an_undone_pick_changes_nothing((weights, rounds) in wheel_case(), undone in any::<prop::sample::Index>()) {
        let mut wheel = wheel_of(&weights);
        let mut plain = wheel_of(&weights);
        let at = undone.index(rounds.len());
        for i in 0..rounds.len() {
            if i == at && weights.len() > 1 {
                let slot = wheel.turn();
                wheel.follow(slot, -1);
            }
            let a = wheel.turn();
            let b = plain.turn();
            prop_assert_eq!(a, b);
        }
    }
}

fn sequence(weights: &[f64], picks: usize) -> String {
    let mut wheel = wheel_of(weights);
    (0..picks)
        .map(|_| {
            let slot = wheel.turn();
            char::from(b'A' + slot as u8)
        })
        .collect()
}

/// Lifeboat rules: "5:1:1 gives A A B A C A A, not five A in a row. Fractional weights work."
#[test]
fn the_textbook_sequence() {
    assert_eq!(sequence(&[5.0, 1.0, 1.0], 14), "AABACAAAABACAA");
    assert_eq!(sequence(&[2.5, 0.5, 0.5], 14), "AABACAAAABACAA");
    assert_eq!(sequence(&[0.1, 0.1, 0.1], 6), "ABCABC");
    assert_eq!(sequence(&[0.1, 0.2], 6), "BABBAB");
}

/// A server hidden from others, or unheard of, saves up two rounds at most.
#[test]
fn what_a_server_can_save_up_is_bounded() {
    let weights = [1.0, 1.0, 1.0];
    let mut wheel = wheel_of(&weights);
    for _ in 0..10_000 {
        wheel.follow(0, 1000);
    }
    let picks: Vec<_> = (0..30).map(|_| wheel.turn()).collect();
    let first = picks.iter().position(|slot| *slot == 0).expect("server 0 is not locked out");
    assert!(first <= 12, "server 0 sat out {first} picks");
}

/// The largest weights, the smallest among them, and peers that report any number of picks: nothing overflows (the test
/// profile would panic), and the shares hold afterwards.
#[test]
fn extreme_weights_do_not_overflow() {
    let n = 500;
    let mut weights = vec![1e6; n];
    weights[0] = 1e-6;
    let mut wheel = wheel_of(&weights);
    let shown: Vec<_> = (0..n).collect();
    let idle = vec![0; n];
    for slot in 0..n as u16 {
        wheel.follow(slot, i64::MAX);
        wheel.follow(n as u16 - 1 - slot, -i64::MAX);
        wheel.follow(slot, 100);
        WeightedRoundRobin.choose(&mut wheel, &mut candidates(&weights, &idle, &shown[..n / 2]));
    }
    // Whatever was saved up or owed, at most two rounds each, is paid by now.
    for _ in 0..30 * n {
        wheel.turn();
    }
    let mut again = vec![0_i32; n];
    for _ in 0..10 * n {
        let slot = wheel.turn();
        again[slot as usize] += 1;
    }
    assert!(again[1..].iter().all(|count| (9..=11).contains(count)), "{again:?}");
}
