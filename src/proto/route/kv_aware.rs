//! `kv-aware`: a server that already holds the prompt's beginning, among the least busy.
//!
//! Formula. Load = `in_flight / weight`, weights scaled to mean 1 over the candidates. Only servers in the *window* are looked
//! at: load at most the least load + *slack*, which is max(`affinity_slack_abs`, `affinity_slack_rel` × the least load), so that nobody
//! becomes a hot spot for what it holds. What a match is worth is its blocks, less a price for following it:
//!
//! * its load: [`LOAD_PRICE`] at the window's far end, nothing at its near end;
//! * its share: what the server got above its fair share of requests and of uncached tokens lately ([`Balance`]), at most
//!   [`BUSY_PRICE`] per request in flight on the average server and [`IMMUNITY`] times what is to be computed. A prompt that goes
//!   on where an earlier one ended pays for requests only the part of it that is to be computed, and nothing in an idle pool: that
//!   keeps conversations where they are, brings prompts together that are all but alike, and spreads what shares no
//!   more than a head.
//!
//! Prices are in prompts of the mean length that the pool gets: what is much for short ones is little for long ones.
//!
//! 1. The match that is worth most, if at least `min_match_blocks`: an absolute number, so that a long tail of its own does not
//!    hide a prompt's shared head. Of the servers in the window that match equally long, the one with the least load, prompt
//!    tokens waiting there included ([`TOKENS_PER_REQUEST`] count as a request in flight). The wheel does not move.
//! 2. Where all candidates match usefully and none is worth its price, a head that all hold says nothing about where: the one
//!    in the window with the least load, as above.
//! 3. Else [`super::weighted_round_robin`] over all candidates, or [`super::least_busy`] where the pool's `miss` says so.
//!
//! Tie-break: the furthest below its share, then the group's order. State: wheel and balance. Cost: O(servers that
//! match as well as the one chosen), about 200 instructions each (`benches/decision.rs`, `head_*`); what all candidates' loads
//! come to is given. No allocation.
//! *Source*: the Lifeboat rules, section 5; the prices, by sweeps over recorded traffic (`perf/replay`), each on a plateau; the
//! caps, by requests over the wire too (`tests/field_routing.rs`): in that traffic pools are seldom idle and ends of prompts seldom seen.

use std::ops::ControlFlow;

use super::balance::{Balance, Deviation, Standing};
use super::policy::Candidate;
use crate::proto::backend::catalog::KvRules;

/// Price of following a match to the busiest server of the window, in mean prompts.
const LOAD_PRICE: f64 = 0.16;
/// Price of a server that got twice its share of requests, in mean prompts; in proportion.
const SHARE_PRICE: f64 = 20.0;
/// So far above its share costs nothing: as part of it, and in requests.
const SHARE_FREE: f64 = 0.01;
/// … in a pool with a request in flight on the average server; in proportion below.
const SHARE_FREE_REQUESTS: f64 = 4.0;
/// Requests that are added to a fair share, so that the first few do not count as many.
const SHARE_PRIOR: f64 = 16.0;
/// Price of a server that got twice its share of uncached tokens, per block that is to be computed; in proportion.
const WORK_PRICE: f64 = 30.0;
/// So far above its share of work costs nothing: as part of it, and in tokens.
const WORK_FREE: f64 = 0.03;
const WORK_FREE_TOKENS: f64 = 50_000.0;
/// A share of work counts as at least this.
const WORK_FAIR_TOKENS_MIN: f64 = 100_000.0;
/// The share's price is at most this for every request in flight on the average server, in mean prompts …
const BUSY_PRICE: f64 = 1.25;
/// … and, for what does not go on where an earlier prompt ended, this many times the blocks to be computed.
const IMMUNITY: f64 = 12.0;
/// Prompt tokens waiting to be computed that weigh as much as one request in flight.
pub(super) const TOKENS_PER_REQUEST: u32 = 4096;

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct KvAware<'a> {
    pub rules: &'a KvRules,
    pub balance: &'a Balance,
    /// Full blocks of the prompt.
    pub blocks: u32,
}

/// The candidates' loads, in short.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loads {
    /// Of candidates.
    pub count: usize,
    /// Mean weight, in millionths.
    pub weight_mean: f64,
    pub least: f64,
    pub mean: f64,
}

impl Loads {
    /// Of candidates given as weight and requests in flight; two passes. `None`: there are none.
    pub fn of(candidates: impl Iterator<Item = (u64, u32)> + Clone) -> Option<Loads> {
        let (count, weights) = candidates.clone().fold((0, 0), |(n, sum), (weight, _)| (n + 1, sum + weight));
        let weight_mean = weights as f64 / count as f64;
        let loads = candidates.map(|(weight, requests)| f64::from(requests) * weight_mean / weight as f64);
        let (least, sum) =
            loads.fold((f64::INFINITY, 0.0), |(least, sum), load| (load.min(least), sum + load));
        (count > 0).then_some(Loads { count, weight_mean, least, mean: sum / count as f64 })
    }
}

impl KvAware<'_> {
    /// The candidate that affinity decides for. `holders`: the candidates that hold some of the prompt, longest match first, of
    /// equals in the group's order; no more of them are asked for than may win.
    pub fn choose(
        &self,
        loads: &Loads,
        holders: impl Iterator<Item = Candidate> + Clone,
    ) -> Option<Candidate> {
        let useful = self.rules.min_match_blocks.max(1);
        let holders = holders.take_while(|holder| holder.matched >= useful);
        let slack = self.rules.affinity_slack_abs.max(self.rules.affinity_slack_rel * loads.least);
        let prompt_blocks = self.balance.prompt_blocks();
        let scene = Scene {
            loads,
            standing: self.balance.standing(),
            blocks: self.blocks,
            slack,
            useful: useful.into(),
            prompt_blocks,
            share_price_max: BUSY_PRICE * prompt_blocks * loads.mean,
            share_free_requests: SHARE_FREE_REQUESTS * loads.mean.min(1.0),
        };
        let mut best: Option<(f64, Candidate)> = None;
        let mut level = Level::default();
        // Not a loop: of chained iterators only the whole is quick.
        let outcome = holders.clone().try_for_each(|holder| {
            if holder.matched != level.matched {
                level.close(&mut best);
                // Nothing is worth more than its blocks.
                if best.is_some_and(|(most, _)| most >= holder.matched.into()) {
                    return ControlFlow::Break(());
                }
                level = Level { matched: holder.matched, ..Level::default() };
            }
            scene.look(&mut level, &holder);
            ControlFlow::Continue(())
        });
        if outcome.is_continue() {
            level.close(&mut best);
        }
        if let Some((_, chosen)) = best {
            return Some(chosen);
        }
        // A head that all hold.
        if holders.clone().count() < loads.count {
            return None;
        }
        holders.for_each(|holder| {
            let load = scene.load(&holder);
            if load <= loads.least + slack {
                let deviation = scene.standing.of(holder.slot);
                level.take(0.0, true, scene.key(load, &holder, &deviation), holder);
            }
        });
        level.close(&mut best);
        best.map(|(_, chosen)| chosen)
    }
}

/// How busy a server is, prompt tokens that wait included, and how far above its share of requests.
type Key = (f64, f64);

/// The servers that hold equally much.
#[derive(Default)]
struct Level {
    matched: u32,
    /// The most that following one of them is worth, if that is enough.
    net: Option<f64>,
    least_busy: Option<(Key, Candidate)>,
}

impl Level {
    fn take(&mut self, net: f64, enough: bool, key: Key, holder: Candidate) {
        if enough {
            self.net = Some(self.net.map_or(net, |most| most.max(net)));
        }
        // Of equals the first stays.
        if self.least_busy.is_none_or(|(least, _)| key < least) {
            self.least_busy = Some((key, holder));
        }
    }

    /// All of them have been seen: the least busy is chosen if that is worth more than the best so far.
    fn close(&mut self, best: &mut Option<(f64, Candidate)>) {
        if let (Some(net), Some((_, holder))) = (self.net.take(), self.least_busy.take())
            && best.is_none_or(|(most, _)| net > most)
        {
            *best = Some((net, holder));
        }
    }
}

/// What the candidates have in common.
struct Scene<'a> {
    loads: &'a Loads,
    standing: Standing<'a>,
    /// Full blocks of the prompt.
    blocks: u32,
    slack: f64,
    useful: f64,
    /// Of the mean prompt.
    prompt_blocks: f64,
    /// The share's price for what goes on where an earlier prompt ended.
    share_price_max: f64,
    /// So far above its share costs nothing, in requests.
    share_free_requests: f64,
}

impl Scene<'_> {
    /// One of the servers of a level.
    #[inline]
    fn look(&self, level: &mut Level, holder: &Candidate) {
        let load = self.load(holder);
        if load > self.loads.least + self.slack {
            return;
        }
        // It cannot be the level's choice, and were it within its share, it would be worth no more than another: nearly all, where
        // many hold the same head.
        if let (Some((least, _)), Some(net)) = (level.least_busy, level.net)
            && load >= least.0
            && f64::from(holder.matched) - self.load_price(load) <= net
            && (load > least.0 || self.standing.requests(holder.slot) >= least.1)
        {
            return;
        }
        let deviation = self.standing.of(holder.slot);
        let worth = self.worth(holder, &deviation);
        if worth >= self.useful {
            let net = worth - self.load_price(load);
            level.take(net, net >= self.useful, self.key(load, holder, &deviation), *holder);
        }
    }

    /// Per weight, with weights scaled to mean 1.
    #[inline]
    fn per_weight(&self, amount: f64, candidate: &Candidate) -> f64 {
        let weight = candidate.weight as f64;
        // Where all weigh the same there is nothing to scale.
        if weight == self.loads.weight_mean { amount } else { amount * self.loads.weight_mean / weight }
    }

    #[inline]
    fn load(&self, candidate: &Candidate) -> f64 {
        self.per_weight(candidate.in_flight.into(), candidate)
    }

    /// What the match is worth, its load's price aside.
    #[inline]
    fn worth(&self, candidate: &Candidate, deviation: &Deviation) -> f64 {
        let computed = self.blocks.saturating_sub(candidate.matched).into();
        let idle = if candidate.continues { 0.0 } else { IMMUNITY * computed };
        let price = self.share_price(candidate, computed, deviation);
        f64::from(candidate.matched) - price.min(idle + self.share_price_max)
    }

    /// `computed`: blocks that are to be computed there.
    #[inline]
    fn share_price(&self, candidate: &Candidate, computed: f64, deviation: &Deviation) -> f64 {
        let fair = deviation.requests_fair;
        // At first nobody has a share to speak of, and what has nothing but a head in common can go anywhere.
        let known = if candidate.continues { 1.0 } else { fair / (fair + SHARE_PRIOR) };
        let over = deviation.requests - (SHARE_FREE * fair + self.share_free_requests * known);
        let mut price = 0.0;
        if over > 0.0 {
            let part = if candidate.continues { computed / f64::from(self.blocks.max(1)) } else { 1.0 };
            price += SHARE_PRICE * self.prompt_blocks * part * over / (fair + SHARE_PRIOR);
        }
        let over = deviation.work - WORK_FREE * deviation.work_fair - WORK_FREE_TOKENS;
        if over > 0.0 {
            price += WORK_PRICE * computed * over / deviation.work_fair.max(WORK_FAIR_TOKENS_MIN);
        }
        price
    }

    #[inline]
    fn load_price(&self, load: f64) -> f64 {
        let above = load - self.loads.least;
        if above > 0.0 { LOAD_PRICE * self.prompt_blocks * above / self.slack } else { 0.0 }
    }

    #[inline]
    fn key(&self, load: f64, candidate: &Candidate, deviation: &Deviation) -> Key {
        let waiting = candidate.prefill_tokens as f64 / f64::from(TOKENS_PER_REQUEST);
        (load + self.per_weight(waiting, candidate), deviation.requests)
    }
}

#[cfg(test)]
mod tests;
