//! The smooth wheel: spreads picks in proportion to weight, never in runs.
//!
//! Each pick adds every shown server's weight to its score, takes the largest score (the first of equals), and subtracts
//! the shown weights' sum from it. Weights 5:1:1 give A A B A C A A. A server that is not shown neither gains nor pays, and
//! a wheel that is shown one server only does not move.
//!
//! State: `score = steps × weight − debt`, and for what is shown `turns × weight` more. Adding every weight is one addition to
//! `turns`, or where a peer's picks are followed, which count for hidden servers too, to `steps`. Servers of one weight are
//! ranked by debt alone, so that a [`Tournament`] knows who is next.
//!
//! *Invariant*: when a server is shown to a pick its score is within ± 2 sums of weights (the plain wheel never leaves ± 1), so
//! nobody saves up more than two rounds while hidden from others or unheard of. Picks that are taken back may leave a score
//! as many weights below that, until the scores are next folded.
//! *Bound and cost*: 26 bytes per slot and the tree's. A pick O(log servers + distinct weights); to hide or show one O(log servers);
//! to follow peers' picks O(log servers); every `turns_max` of them O(servers). [`Wheel::turn_among`] is O(shown), and the
//! next plain turn after it O(servers). No allocation, no float.
//! *Source*: the Lifeboat rules, section 4.

use super::policy::Candidate;
use super::tournament::{Key, Tournament};

/// See the module's text. Weights are in millionths, at most 2^40 each.
#[derive(Clone, Debug)]
pub struct Wheel {
    /// 0: not on the wheel at present.
    weights: Vec<u64>,
    debts: Vec<i64>,
    /// On the wheel, but not shown.
    hidden: Vec<bool>,
    /// Steps of everything on the wheel, and of what is shown.
    steps: i64,
    turns: i64,
    /// Of `weights`, and of those that are shown.
    sum: i64,
    sum_shown: i64,
    /// How many are shown.
    shown: usize,
    /// Steps, or turns, after which the scores are folded back into `debts`, so that nothing overflows.
    turns_max: i64,
    /// By debt: what is shown.
    ranks: Tournament<i64>,
    /// The ranks are not those of the debts.
    stale: bool,
    /// Slots whose score may have fallen out of its bound, and whether a slot is among them.
    low: Vec<u16>,
    is_low: Vec<bool>,
}

impl Wheel {
    pub fn new(slots: usize) -> Self {
        Wheel {
            weights: vec![0; slots],
            debts: vec![0; slots],
            hidden: vec![false; slots],
            steps: 0,
            turns: 0,
            sum: 0,
            sum_shown: 0,
            shown: 0,
            turns_max: 1024,
            ranks: Tournament::new(slots),
            stale: false,
            low: Vec::with_capacity(slots),
            is_low: vec![false; slots],
        }
    }

    /// Puts `weights` (0: off the wheel) in force, and shows all that have one; scores are kept. O(slots × distinct weights).
    pub fn set_weights(&mut self, weights: &[u64]) {
        self.fold();
        (self.sum, self.shown) = (0, 0);
        for (slot, weight) in self.weights.iter_mut().zip(weights) {
            *slot = *weight;
            self.sum += *weight as i64;
            self.shown += usize::from(*weight > 0);
        }
        self.sum_shown = self.sum;
        self.hidden.fill(false);
        self.ranks.set_weights(&self.weights);
        // steps × weight, turns × weight and debts stay below 2^62 whatever the weights.
        self.turns_max = ((1 << 59) / self.sum.max(1)).clamp(1, 1024);
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
        self.earned(slot) - self.debts[slot]
    }

    /// Score and debt together.
    fn earned(&self, slot: usize) -> i64 {
        let turns = if self.hidden[slot] { 0 } else { self.turns };
        (self.steps + turns) * self.weights[slot] as i64
    }

    /// How far a score may be from 0.
    fn bound(&self) -> i64 {
        2 * self.sum
    }

    /// Shows a slot that is on the wheel to [`Wheel::turn`], or hides it; its score stays.
    pub fn show(&mut self, slot: u16, show: bool) {
        let at = slot as usize;
        if self.hidden[at] != show {
            return;
        }
        let score = self.score(at);
        self.hidden[at] = !show;
        self.debts[at] = self.earned(at) - score;
        let weight = self.weights[at] as i64;
        if show {
            self.sum_shown += weight;
            self.shown += 1;
            self.suspect(at);
        } else {
            self.sum_shown -= weight;
            self.shown -= 1;
        }
        self.rank(at);
    }

    /// The rank of a slot on the wheel is that of its debt.
    #[inline]
    fn rank(&mut self, slot: usize) {
        if !self.stale {
            self.ranks.set(slot as u16, self.ranking(slot));
        }
    }

    fn ranking(&self, slot: usize) -> i64 {
        if self.hidden[slot] { i64::LAST } else { self.debts[slot] }
    }

    /// Notes a score that fell out of its bound: peers' picks come one server after the other, so it may be back in it by
    /// the next turn.
    #[inline]
    fn suspect(&mut self, slot: usize) {
        if self.score(slot) < -self.bound() && !self.is_low[slot] {
            self.is_low[slot] = true;
            self.low.push(slot as u16);
        }
    }

    /// Puts a score back into its bound. True: it was out of it.
    fn clamp(&mut self, slot: usize) -> bool {
        let (score, bound) = (self.score(slot), self.bound());
        if score.abs() <= bound {
            return false;
        }
        self.debts[slot] = self.earned(slot) - score.clamp(-bound, bound);
        true
    }

    /// Turns once and gives the slot that wins among those shown, at least one.
    pub fn turn(&mut self) -> u16 {
        if self.stale {
            self.rank_all();
        }
        if self.shown > 1 {
            while let Some(slot) = self.low.pop() {
                let slot = slot as usize;
                self.is_low[slot] = false;
                // What is hidden is looked at again when it is shown.
                if !self.hidden[slot] && self.clamp(slot) {
                    self.rank(slot);
                }
            }
        }
        let mut best: Option<(i64, u16)> = None;
        for index in 0..self.ranks.weights() {
            let mut first = self.ranks.least(index);
            if first.key == i64::LAST {
                continue;
            }
            // The largest scores come first, and so do those out of their bound.
            while self.shown > 1 && self.clamp(first.slot as usize) {
                self.rank(first.slot as usize);
                first = self.ranks.least(index);
            }
            let weight = first.weight as i64;
            let score = (self.steps + self.turns + 1) * weight - first.key;
            if best.is_none_or(|(most, slot)| score > most || score == most && first.slot < slot) {
                best = Some((score, first.slot));
            }
        }
        let (_, slot) = best.expect("the caller shows at least one");
        if self.shown > 1 {
            self.turns += 1;
            self.debts[slot as usize] += self.sum_shown;
            self.rank(slot as usize);
            self.suspect(slot as usize);
            if self.turns >= self.turns_max {
                self.fold();
            }
        }
        slot
    }

    fn rank_all(&mut self) {
        let (hidden, debts) = (&self.hidden, &self.debts);
        self.ranks.set_all(|slot| if hidden[slot as usize] { i64::LAST } else { debts[slot as usize] });
        self.stale = false;
    }

    /// As [`Wheel::turn`] with `shown` (not empty, all of them on the wheel) in place of what is shown otherwise; gives the
    /// winner's index in it.
    pub fn turn_among(&mut self, shown: &[Candidate]) -> usize {
        if shown.len() == 1 {
            return 0;
        }
        let (mut best, mut best_score, mut sum) = (0, i64::MIN, 0);
        for (i, candidate) in shown.iter().enumerate() {
            let slot = candidate.slot as usize;
            let weight = self.weights[slot] as i64;
            self.clamp(slot);
            let score = self.score(slot) + weight;
            self.debts[slot] -= weight;
            sum += weight;
            if score > best_score {
                (best, best_score) = (i, score);
            }
        }
        let slot = shown[best].slot as usize;
        self.debts[slot] += sum;
        self.suspect(slot);
        self.stale = true;
        best
    }

    /// Follows `picks` picks of `slot` that were made elsewhere (negative: takes them back), as if everything on the wheel
    /// had been shown. More than the wheel can hold counts as what it can hold. O(log servers).
    pub fn follow(&mut self, slot: u16, picks: i64) {
        if self.carries(slot) {
            let slot = slot as usize;
            let picks = picks.clamp(-self.turns_max, self.turns_max);
            self.steps += picks;
            self.debts[slot] += picks * self.sum;
            self.rank(slot);
            self.suspect(slot);
            if self.steps.abs() >= self.turns_max {
                self.fold();
            }
        }
    }

    /// Folds `steps` and `turns` into the debts, with the scores back in their bounds.
    fn fold(&mut self) {
        let bound = self.bound();
        for slot in 0..self.weights.len() {
            let score = self.score(slot);
            // A slot off the wheel keeps its score for when it comes back.
            self.debts[slot] = if self.weights[slot] > 0 { -score.clamp(-bound, bound) } else { -score };
        }
        (self.steps, self.turns) = (0, 0);
        for slot in self.low.drain(..) {
            self.is_low[slot as usize] = false;
        }
        self.stale = true;
    }
}
