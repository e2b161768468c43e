//! `kv-aware`: a server that already holds the prompt's beginning, among the least busy.
//!
//! Formula. Load = `in_flight / weight`, weights scaled to mean 1 over the candidates. Only servers in the *window* are looked
//! at: load at most the least load + *slack*, which is max(`affinity_slack_abs`, `affinity_slack_rel` × the least load), so that nobody
//! becomes a hot spot for what it holds. What a match is worth is its blocks, less a price for following it:
//!
//! * its load: [`LOAD_PRICE_BLOCKS`] at the window's far end, nothing at its near end;
//! * its share: what the server got above its fair share of requests and of uncached tokens lately ([`Balance`]). At most
//!   [`IMMUNITY`] times the blocks that would have to be computed there anyway, plus [`BUSY_PRICE_BLOCKS`] per request in flight on
//!   the average server: an idle pool keeps conversations where they are and spreads what shares no more than a head.
//!
//! 1. The longest match that is worth at least `min_match_blocks`: an absolute number, so that a long tail of its own does not
//!    hide a prompt's shared head. Of the servers in the window that match equally long, the one with the least load, prompt
//!    tokens waiting there included ([`TOKENS_PER_REQUEST`] count as a request in flight). The wheel does not move.
//! 2. Where all candidates match usefully and none is worth its price, a head that all hold says nothing about where: the one
//!    in the window with the least load, as above.
//! 3. Else [`WeightedRoundRobin`] over all candidates.
//!
//! Tie-break: the furthest below its share, then the group's order. State: wheel and balance. Worst case: O(candidates), no
//! allocation.
//! *Source*: the Lifeboat rules, section 5; the prices, by sweeps over recorded traffic (`perf/replay`), each on a plateau.

use super::balance::Balance;
use super::policy::{Candidate, Choice, Policy};
use super::weighted_round_robin::WeightedRoundRobin;
use super::wheel::Wheel;
use crate::proto::backend::catalog::{Algorithm, KvRules};

/// Price of following a match to the busiest server of the window, in blocks.
const LOAD_PRICE_BLOCKS: f64 = 32.0;
/// Price of a server that got twice its share of requests, in blocks; in proportion.
const SHARE_PRICE_BLOCKS: f64 = 4000.0;
/// So far above its share costs nothing: as part of it, and in requests.
const SHARE_FREE: f64 = 0.01;
/// … in an idle pool and in a busy one.
const SHARE_FREE_REQUESTS: (f64, f64) = (0.0, 4.0);
/// Requests that are added to a fair share, so that the first few do not count as many.
const SHARE_PRIOR: f64 = 16.0;
/// Price of a server that got twice its share of uncached tokens, per block that is to be computed; in proportion.
const WORK_PRICE: f64 = 30.0;
/// So far above its share of work costs nothing: as part of it, and in tokens.
const WORK_FREE: f64 = 0.03;
const WORK_FREE_TOKENS: f64 = 50_000.0;
/// A share of work counts as at least this.
const WORK_FAIR_TOKENS_MIN: f64 = 100_000.0;
/// The share's price is at most this many times the blocks to be computed …
const IMMUNITY: f64 = 2.0;
/// … and this for every request in flight on the average server.
const BUSY_PRICE_BLOCKS: f64 = 256.0;
/// Prompt tokens waiting to be computed that weigh as much as one request in flight.
const TOKENS_PER_REQUEST: f64 = 8192.0;

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct KvAware<'a> {
    pub rules: &'a KvRules,
    pub balance: &'a Balance,
    /// Full blocks of the prompt.
    pub blocks: u32,
}

/// What the candidates have in common.
struct Scene<'a> {
    policy: &'a KvAware<'a>,
    useful: f64,
    /// Of the candidates.
    weight_mean: f64,
    load_least: f64,
    load_mean: f64,
    slack: f64,
}

impl<'a> Scene<'a> {
    fn of(policy: &'a KvAware<'a>, candidates: &[Candidate]) -> Self {
        let count = candidates.len() as f64;
        let weights: u64 = candidates.iter().map(|candidate| candidate.weight).sum();
        let mut scene = Scene {
            policy,
            useful: policy.useful().into(),
            weight_mean: weights as f64 / count,
            load_least: f64::INFINITY,
            load_mean: 0.0,
            slack: 0.0,
        };
        let mut sum = 0.0;
        for candidate in candidates {
            let load = scene.load(candidate);
            scene.load_least = scene.load_least.min(load);
            sum += load;
        }
        scene.load_mean = sum / count;
        let rules = policy.rules;
        scene.slack = rules.affinity_slack_abs.max(rules.affinity_slack_rel * scene.load_least);
        scene
    }

    fn load(&self, candidate: &Candidate) -> f64 {
        f64::from(candidate.in_flight) * self.weight_mean / candidate.weight as f64
    }

    fn in_window(&self, candidate: &Candidate) -> bool {
        self.load(candidate) <= self.load_least + self.slack
    }

    /// What the match is worth, its load's price aside.
    fn worth(&self, candidate: &Candidate) -> f64 {
        let computed = f64::from(self.policy.blocks.saturating_sub(candidate.matched));
        let most = IMMUNITY * computed + BUSY_PRICE_BLOCKS * self.load_mean;
        f64::from(candidate.matched) - self.share_price(candidate.slot, computed).min(most)
    }

    fn share_price(&self, slot: u16, computed: f64) -> f64 {
        let deviation = self.policy.balance.of(slot);
        let (idle, full) = SHARE_FREE_REQUESTS;
        let free = SHARE_FREE * deviation.requests_fair + idle + (full - idle) * self.load_mean.min(1.0);
        let over = (deviation.requests - free).max(0.0);
        let requests = SHARE_PRICE_BLOCKS * over / (deviation.requests_fair + SHARE_PRIOR);
        let over = (deviation.work - WORK_FREE * deviation.work_fair - WORK_FREE_TOKENS).max(0.0);
        let work = WORK_PRICE * computed * over / deviation.work_fair.max(WORK_FAIR_TOKENS_MIN);
        requests + work
    }

    fn load_price(&self, candidate: &Candidate) -> f64 {
        let above = self.load(candidate) - self.load_least;
        if above > 0.0 { LOAD_PRICE_BLOCKS * above / self.slack } else { 0.0 }
    }

    /// The least busy of some, prompt tokens that wait included.
    fn least_busy<'c>(&self, some: impl Iterator<Item = &'c Candidate>) -> Option<Candidate> {
        let key = |candidate: &Candidate| {
            let tokens = candidate.prefill_tokens as f64 / TOKENS_PER_REQUEST;
            self.load(candidate) + tokens * self.weight_mean / candidate.weight as f64
        };
        let over = |candidate: &Candidate| self.policy.balance.of(candidate.slot).requests;
        // Of equals the first, which `min_by` keeps.
        some.min_by(|a, b| key(a).total_cmp(&key(b)).then_with(|| over(a).total_cmp(&over(b)))).copied()
    }
}

impl KvAware<'_> {
    fn useful(&self) -> u32 {
        self.rules.min_match_blocks.max(1)
    }

    /// The candidate that affinity decides for.
    fn best(&self, candidates: &[Candidate]) -> Option<Candidate> {
        let useful = |candidate: &&Candidate| candidate.matched >= self.useful();
        let holders = candidates.iter().filter(useful).count();
        if holders == 0 {
            return None;
        }
        let scene = Scene::of(self, candidates);
        let mut top: Option<(f64, u32)> = None;
        for candidate in candidates.iter().filter(useful).filter(|c| scene.in_window(c)) {
            let net = scene.worth(candidate) - scene.load_price(candidate);
            if net >= scene.useful && top.is_none_or(|(most, _)| net > most) {
                top = Some((net, candidate.matched));
            }
        }
        let near = candidates.iter().filter(|c| scene.in_window(c));
        match top {
            Some((_, matched)) => {
                scene.least_busy(near.filter(|c| c.matched == matched && scene.worth(c) >= scene.useful))
            }
            None if holders == candidates.len() => scene.least_busy(near),
            None => None,
        }
    }
}

impl Policy for KvAware<'_> {
    fn choose(&self, wheel: &mut Wheel, candidates: &mut [Candidate], whole: bool) -> Choice {
        match self.best(candidates) {
            Some(chosen) => {
                Choice { backend: chosen.backend, slot: chosen.slot, turned: false, by: Algorithm::KvAware }
            }
            None => WeightedRoundRobin.choose(wheel, candidates, whole),
        }
    }
}

#[cfg(test)]
mod tests;
