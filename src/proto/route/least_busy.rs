//! `least-busy`: where a kv-aware pool sends what no match decides for, if it is configured so.
//!
//! Formula: least `work / weight`, compared by cross-multiplication, where a server's work is the prompt tokens that are still to be
//! computed there and [`TOKENS_PER_REQUEST`] for each request in flight, as kv-aware weighs servers that match equally. Requests alone say too little: what a prompt waits for is the
//! prompts before it, and one of them may be a hundred times as long as another. Tokens alone say too little too: not every prompt is read.
//! What a server holds of the prompt itself does not count: a match that was judged not worth following would be followed all the same,
//! and in an idle pool by every prompt that shares a head. Tie-break: the furthest below its fair share of requests ([`Balance`]), so that
//! an idle pool is spread; then the group's order. The wheel does not move. State: the balance, which every dispatch of a kv-aware group is
//! noted in. Worst case: O(candidates), no allocation.
//! *Source*: our own, an option beside the Lifeboat rules, section 5; chosen by replaying recorded traffic (`perf/runs`).

use std::cmp::Ordering;

use super::balance::Balance;
use super::kv_aware::TOKENS_PER_REQUEST;
use super::policy::{Candidate, Choice, Policy};
use super::wheel::Wheel;
use crate::proto::backend::catalog::Algorithm;

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct LeastBusy<'a> {
    pub balance: &'a Balance,
}

impl LeastBusy<'_> {
    fn compare(&self, a: &Candidate, b: &Candidate) -> Ordering {
        let cross = |of: &Candidate, other: &Candidate| u128::from(work(of)) * u128::from(other.weight);
        let over = |of: &Candidate| self.balance.of(of.slot).requests;
        cross(a, b).cmp(&cross(b, a)).then_with(|| over(a).total_cmp(&over(b)))
    }
}

fn work(candidate: &Candidate) -> u64 {
    (u64::from(candidate.in_flight) * u64::from(TOKENS_PER_REQUEST)).saturating_add(candidate.prefill_tokens)
}

impl Policy for LeastBusy<'_> {
    fn choose(&self, _: &mut Wheel, candidates: &mut [Candidate]) -> Choice {
        let mut chosen = candidates[0];
        for candidate in &candidates[1..] {
            if self.compare(candidate, &chosen).is_lt() {
                chosen = *candidate;
            }
        }
        Choice { backend: chosen.backend, slot: chosen.slot, turned: false, by: Algorithm::LeastBusy }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::ids::BackendId;
    use crate::proto::route::balance::Takers;

    const MILLION: u64 = 1_000_000;

    fn candidate(slot: u16, weight: u64, in_flight: u32, prefill_tokens: u64) -> Candidate {
        let backend = BackendId(slot);
        Candidate { backend, slot, weight, in_flight, matched: 0, continues: false, prefill_tokens }
    }

    fn balance(weights: &[u64]) -> Balance {
        let mut balance = Balance::new(weights.len());
        balance.set_weights(weights);
        balance
    }

    fn chosen(balance: &Balance, candidates: &[Candidate]) -> u16 {
        let choice = LeastBusy { balance }.choose(&mut Wheel::new(0), &mut candidates.to_vec());
        assert_eq!((choice.by, choice.turned), (Algorithm::LeastBusy, false));
        assert_eq!(choice.backend, BackendId(choice.slot));
        choice.slot
    }

    #[test]
    fn tokens_that_wait_count_and_requests_that_run() {
        let even = balance(&[MILLION; 3]);
        let of = |a: (u32, u64), b: (u32, u64)| {
            chosen(&even, &[candidate(0, MILLION, a.0, a.1), candidate(1, MILLION, b.0, b.1)])
        };
        assert_eq!(of((5, 0), (4, 0)), 1, "fewer requests");
        assert_eq!(of((1, 40_000), (8, 0)), 1, "one long prompt outweighs eight that are answered");
        assert_eq!(of((1, 20_000), (8, 0)), 0);
        // Seven requests more weigh 7 × 4096 tokens.
        assert_eq!((of((1, 28_671), (8, 0)), of((1, 28_673), (8, 0))), (0, 1));
    }

    #[test]
    fn a_heavier_server_takes_more() {
        let weights = [3 * MILLION, MILLION];
        let of = |heavy: u64, light: u64| {
            let candidates = [candidate(0, weights[0], 0, heavy), candidate(1, weights[1], 0, light)];
            chosen(&balance(&weights), &candidates)
        };
        assert_eq!((of(2_999, 1_000), of(3_001, 1_000)), (0, 1));
    }

    /// One at a time, each answered before the next comes: nothing waits, and nobody is busier than another.
    #[test]
    fn an_idle_pool_is_spread_by_weight() {
        let weights = [5 * MILLION, MILLION, MILLION];
        let mut balance = balance(&weights);
        let candidates: Vec<Candidate> = (0..).zip(weights).map(|(i, w)| candidate(i, w, 0, 0)).collect();
        let mut taken = [0; 3];
        for n in 1..=70 {
            let slot = chosen(&balance, &candidates);
            taken[slot as usize] += 1;
            balance.note(slot, 1, 0, Takers::Live);
            for (taken, weight) in taken.iter().zip(weights) {
                let fair = f64::from(n) * weight as f64 / (7 * MILLION) as f64;
                assert!((f64::from(*taken) - fair).abs() <= 1.5, "after {n}: {taken} of {fair}");
            }
        }
        assert_eq!(taken, [50, 10, 10]);
    }

    /// Servers without room are not shown; nothing overflows.
    #[test]
    fn only_what_is_shown_is_chosen() {
        let even = balance(&[MILLION; 4]);
        let worst = candidate(3, 1 << 40, u32::MAX, u64::MAX);
        assert_eq!(chosen(&even, &[worst]), 3);
        assert_eq!(chosen(&even, &[candidate(1, 1, u32::MAX, u64::MAX), worst]), 3, "per weight");
        assert_eq!(chosen(&even, &[candidate(1, 1, 0, 0), candidate(2, 1, 0, 0)]), 1, "of equals the first");
    }
}
