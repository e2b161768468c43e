//! `kv-aware`: the server that already holds the prompt's beginning, among the least busy.
//!
//! Formula: load = `in_flight / weight`, weights scaled to mean 1 over the candidates. Only servers whose load is at most the
//! least load + max(`affinity_slack_abs`, `affinity_slack_rel` × the least load) are looked at, so that nobody becomes a hot spot for
//! what it holds. Of those, the one with the most matched blocks, if they are at least `min_match_blocks`: an absolute
//! number, so that a long tail of its own does not hide a prompt's shared head. Tie-break: less load, then the one whose turn
//! on the wheel is nearer; the wheel does not move. No useful match: [`WeightedRoundRobin`] over all candidates. State: the
//! wheel. Worst case: O(candidates), no allocation.
//! *Source*: the Lifeboat rules, section 5.

use super::policy::{Candidate, Choice, Policy};
use super::weighted_round_robin::WeightedRoundRobin;
use super::wheel::Wheel;
use crate::proto::backend::catalog::{Algorithm, KvRules};

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct KvAware<'a> {
    pub rules: &'a KvRules,
}

impl KvAware<'_> {
    /// The candidate whose match is followed.
    fn best(&self, wheel: &Wheel, candidates: &[Candidate]) -> Option<Candidate> {
        let least_useful = self.rules.min_match_blocks.max(1);
        if candidates.iter().all(|candidate| candidate.matched < least_useful) {
            return None;
        }
        let weights: u64 = candidates.iter().map(|candidate| candidate.weight).sum();
        let mean = weights as f64 / candidates.len() as f64;
        let load = |candidate: &Candidate| f64::from(candidate.in_flight) * mean / candidate.weight as f64;
        let least = candidates.iter().map(load).fold(f64::INFINITY, f64::min);
        let slack = self.rules.affinity_slack_abs.max(self.rules.affinity_slack_rel * least);
        let near = candidates.iter().filter(|c| c.matched >= least_useful && load(c) <= least + slack);
        near.copied().max_by(|a, b| {
            let by_match = a.matched.cmp(&b.matched);
            let by_load = || load(b).total_cmp(&load(a));
            // Of equals `max_by` takes the last, the wheel the first.
            let by_turn = || wheel.lead(a.slot).cmp(&wheel.lead(b.slot)).then(b.slot.cmp(&a.slot));
            by_match.then_with(by_load).then_with(by_turn)
        })
    }
}

impl Policy for KvAware<'_> {
    fn choose(&self, wheel: &mut Wheel, candidates: &mut [Candidate], whole: bool) -> Choice {
        match self.best(wheel, candidates) {
            Some(chosen) => {
                Choice { backend: chosen.backend, slot: chosen.slot, turned: false, by: Algorithm::KvAware }
            }
            None => WeightedRoundRobin.choose(wheel, candidates, whole),
        }
    }
}
