//! The smooth wheel: spreads picks in proportion to weight, never in runs.
//!
//! Each pick adds every shown server's weight to its score, takes the largest score (the first of equals), and subtracts
//! the shown weights' sum from it. Weights 5:1:1 give A A B A C A A. A server that is not shown neither gains nor pays, and
//! a wheel that is shown one server only does not move.
//!
//! State: `score(slot) = steps × weight − debt`. Adding every weight is one addition to `steps`, so that following a
//! peer's picks costs O(1) instead of O(candidates).
//!
//! *Invariant*: scores stay within ± 2 sums of weights (the plain wheel never leaves ± 1), so nobody saves up more than two
//! rounds while hidden from others or unheard of.
//! *Bound and cost*: 16 bytes per slot; a pick O(shown), twice that when something is hidden; no allocation, no float.
//! *Source*: the Lifeboat rules, section 4.

use super::policy::Candidate;

/// See the module's text. Weights are in millionths, at most 2^40 each.
#[derive(Clone, Debug, Default)]
pub struct Wheel {
    /// 0: not on the wheel at present.
    weights: Vec<u64>,
    debts: Vec<i64>,
    steps: i64,
    /// Of `weights`.
    sum: i64,
    /// Steps after which the scores are folded back into `debts`, so that nothing overflows.
    steps_max: i64,
}

impl Wheel {
    pub fn new(slots: usize) -> Self {
        Wheel { weights: vec![0; slots], debts: vec![0; slots], steps: 0, sum: 0, steps_max: 1024 }
    }

    /// Puts `weights` (0: off the wheel) in force; scores are kept. O(slots).
    pub fn set_weights(&mut self, weights: impl IntoIterator<Item = u64>) {
        self.fold();
        self.sum = 0;
        for (slot, weight) in self.weights.iter_mut().zip(weights) {
            *slot = weight;
            self.sum += weight as i64;
        }
        // steps × weight and debts stay below 2^62 whatever the weights.
        self.steps_max = ((1 << 59) / self.sum.max(1)).clamp(1, 1024);
        self.fold();
    }

    /// Whether that slot is on the wheel.
    pub fn carries(&self, slot: u16) -> bool {
        self.weights[slot as usize] > 0
    }

    /// How near a slot that is on the wheel is to its next turn: the largest would win now.
    pub fn lead(&self, slot: u16) -> i64 {
        self.score(slot as usize) + self.weights[slot as usize] as i64
    }

    /// The score of a slot that is on the wheel.
    fn score(&self, slot: usize) -> i64 {
        self.steps * self.weights[slot] as i64 - self.debts[slot]
    }

    /// Turns once and gives the index of the winner in `shown` (not empty). `whole`: `shown` is all that is on the wheel.
    pub fn turn(&mut self, shown: &[Candidate], whole: bool) -> usize {
        if shown.len() == 1 {
            return 0;
        }
        let bound = 2 * self.sum;
        let (mut best, mut best_score, mut sum) = (0, i64::MIN, 0);
        for (i, candidate) in shown.iter().enumerate() {
            let slot = candidate.slot as usize;
            let weight = self.weights[slot] as i64;
            let mut score = self.steps * weight - self.debts[slot];
            if score.abs() > bound {
                score = score.clamp(-bound, bound);
                self.debts[slot] = self.steps * weight - score;
            }
            sum += weight;
            if score + weight > best_score {
                (best, best_score) = (i, score + weight);
            }
        }
        if whole {
            self.steps += 1;
        } else {
            for candidate in shown {
                self.debts[candidate.slot as usize] -= self.weights[candidate.slot as usize] as i64;
            }
        }
        self.debts[shown[best].slot as usize] += sum;
        if self.steps >= self.steps_max {
            self.fold();
        }
        best
    }

    /// Follows `picks` picks of `slot` that were made elsewhere (negative: takes them back), as if everything on the wheel
    /// had been shown. More than the wheel can hold counts as what it can hold. O(1).
    pub fn follow(&mut self, slot: u16, picks: i64) {
        if self.carries(slot) {
            let picks = picks.clamp(-self.steps_max, self.steps_max);
            self.steps += picks;
            self.debts[slot as usize] += picks * self.sum;
            if self.steps.abs() >= self.steps_max {
                self.fold();
            }
        }
    }

    /// Folds `steps` into the debts, with the scores back in their bounds.
    fn fold(&mut self) {
        let bound = 2 * self.sum;
        for slot in 0..self.weights.len() {
            let score = self.score(slot);
            // A slot off the wheel keeps its score for when it comes back.
            self.debts[slot] = if self.weights[slot] > 0 { -score.clamp(-bound, bound) } else { -score };
        }
        self.steps = 0;
    }
}
