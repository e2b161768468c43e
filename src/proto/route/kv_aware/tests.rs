use super::*;
use crate::proto::backend::catalog::Algorithm;
use crate::proto::ids::BackendId;
use crate::proto::route::balance::Takers;
use crate::proto::route::policy::Policy;
use crate::proto::route::weighted_round_robin::WeightedRoundRobin;
use crate::proto::route::wheel::Wheel;

const ONE: u64 = 1_000_000;

/// A pool at work: candidates with weight 1 unless said otherwise.
struct Pool {
    rules: KvRules,
    balance: Balance,
    wheel: Wheel,
    weights: Vec<u64>,
    in_flight: Vec<u32>,
    prefill_tokens: Vec<u64>,
    /// Whether matches end where an earlier prompt did.
    continues: bool,
}

impl Pool {
    fn new(servers: usize) -> Pool {
        let weights = vec![ONE; servers];
        let mut pool = Pool {
            rules: KvRules { affinity_slack_abs: 4.0, affinity_slack_rel: 0.5, ..KvRules::default() },
            balance: Balance::new(servers),
            wheel: Wheel::new(servers),
            weights: weights.clone(),
            in_flight: vec![0; servers],
            prefill_tokens: vec![0; servers],
            continues: false,
        };
        // Prices as if prompts were 200 blocks long.
        pool.balance.note_prompt(200);
        pool.weigh(&weights);
        pool
    }

    fn weigh(&mut self, weights: &[u64]) {
        self.weights = weights.to_vec();
        self.balance.set_weights(weights);
        self.wheel.set_weights(weights);
    }

    /// The server chosen for a prompt of `blocks` blocks, of which each holds so many; and what chose it.
    fn choose(&mut self, blocks: u32, matched: &[u32]) -> (u16, Algorithm) {
        let mut candidates: Vec<Candidate> = (0..matched.len())
            .map(|i| Candidate {
                backend: BackendId(i as u16),
                slot: i as u16,
                weight: self.weights[i],
                in_flight: self.in_flight[i],
                matched: matched[i],
                continues: self.continues,
                prefill_tokens: self.prefill_tokens[i],
            })
            .collect();
        let loads = Loads::of(candidates.iter().map(|c| (c.weight, c.in_flight))).unwrap();
        let mut holders: Vec<Candidate> = candidates.iter().filter(|c| c.matched > 0).copied().collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.matched));
        let policy = KvAware { rules: &self.rules, balance: &self.balance, blocks };
        match policy.choose(&loads, holders.iter().copied()) {
            Some(chosen) => (chosen.slot, HIT),
            None => (WeightedRoundRobin.choose(&mut self.wheel, &mut candidates).slot, MISS),
        }
    }

    fn dispatch(&mut self, slot: u16, work_tokens: u64) {
        self.balance.note(slot, 1, work_tokens, Takers::Live);
    }
}

const HIT: Algorithm = Algorithm::KvAware;
const MISS: Algorithm = Algorithm::WeightedRoundRobin;

#[test]
fn the_longest_match_is_followed_and_no_match_turns_the_wheel() {
    let mut pool = Pool::new(3);
    assert_eq!(pool.choose(40, &[3, 30, 12]), (1, HIT));
    let misses: Vec<_> = (0..4).map(|_| pool.choose(40, &[0, 0, 0])).collect();
    assert_eq!(misses, [(0, MISS), (1, MISS), (2, MISS), (0, MISS)]);
    // A hit in between does not move the wheel.
    assert_eq!(pool.choose(40, &[40, 0, 0]), (0, HIT));
    assert_eq!(pool.choose(40, &[0, 0, 0]), (1, MISS));
}

/// A long unique tail must not hide a shared head: what counts are blocks, not their part of the prompt.
#[test]
fn a_match_is_useful_by_blocks_not_by_share() {
    let mut pool = Pool::new(3);
    assert_eq!(pool.choose(4_000, &[0, 0, 2]), (2, HIT));
    assert_eq!(pool.choose(4_000, &[0, 0, 1]).1, MISS);
    pool.rules.min_match_blocks = 0;
    assert_eq!(pool.choose(4_000, &[0, 0, 1]), (2, HIT));
    assert_eq!(pool.choose(4_000, &[0, 0, 0]).1, MISS, "nothing matched is no match");
}

#[test]
fn affinity_stays_among_the_least_busy() {
    let mut pool = Pool::new(3);
    pool.in_flight = vec![4, 0, 0];
    assert_eq!(pool.choose(500, &[400, 0, 0]), (0, HIT), "at the window's edge");
    pool.in_flight = vec![5, 0, 0];
    assert_eq!(pool.choose(500, &[400, 0, 0]).1, MISS);
    assert_eq!(pool.choose(500, &[400, 100, 0]), (1, HIT), "the best of those that are near");
    // The window widens with the load: half of 20.
    pool.in_flight = vec![30, 20, 20];
    assert_eq!(pool.choose(500, &[400, 0, 0]), (0, HIT));
    pool.in_flight = vec![31, 20, 20];
    assert_eq!(pool.choose(500, &[400, 0, 0]).1, MISS);
    // Load is per weight: 8 on a server of weight 4 are less than 3 on one of weight 1.
    pool.weigh(&[4 * ONE, ONE, ONE]);
    pool.in_flight = vec![8, 3, 3];
    assert_eq!(pool.choose(500, &[400, 0, 0]), (0, HIT));
}

#[test]
fn a_short_match_is_not_worth_a_busier_server() {
    let mut pool = Pool::new(3);
    pool.in_flight = vec![4, 0, 0];
    assert_eq!(pool.choose(500, &[33, 0, 0]).1, MISS);
    assert_eq!(pool.choose(500, &[34, 0, 0]), (0, HIT));
    pool.in_flight = vec![2, 0, 0];
    assert_eq!(pool.choose(500, &[18, 0, 0]), (0, HIT));
    assert_eq!(pool.choose(500, &[17, 0, 0]).1, MISS);
    pool.rules.affinity_slack_abs = 0.0;
    pool.in_flight = vec![0, 0, 0];
    assert_eq!(pool.choose(500, &[2, 0, 0]), (0, HIT), "no window, no price");
}

#[test]
fn equal_matches_go_to_the_least_busy_then_to_whom_has_had_least() {
    let mut pool = Pool::new(3);
    pool.in_flight = vec![2, 1, 1];
    pool.prefill_tokens = vec![0, 5_000, 4_100];
    assert_eq!(pool.choose(50, &[50, 50, 50]), (0, HIT), "two in flight are less than one and a long prompt");
    pool.prefill_tokens = vec![0, 5_000, 4_090];
    assert_eq!(pool.choose(50, &[50, 50, 50]), (2, HIT));
    pool.in_flight = vec![0; 3];
    pool.prefill_tokens = vec![0; 3];
    assert_eq!(pool.choose(50, &[50, 50, 50]), (0, HIT), "of equals the first");
    pool.dispatch(0, 100);
    pool.dispatch(1, 100);
    assert_eq!(pool.choose(50, &[50, 50, 50]), (2, HIT));
}

/// What most prompts of an idle pool share says little about where they belong: it must not draw all of them to one server.
#[test]
fn an_idle_pool_spreads_what_shares_no_more_than_a_head() {
    let mut pool = Pool::new(4);
    let mut held = [false; 4];
    let mut got = [0; 4];
    for _ in 0..40 {
        let matched = held.map(|held| if held { 16 } else { 0 });
        let (slot, _) = pool.choose(40, &matched);
        pool.dispatch(slot, 24 * 64);
        held[slot as usize] = true;
        got[slot as usize] += 1;
    }
    assert_eq!(got, [10; 4]);
}

/// What differs in little more than a last question is brought together, as long as there is room for it.
#[test]
fn an_idle_pool_brings_together_what_is_all_but_alike() {
    let mut pool = Pool::new(4);
    for _ in 0..50 {
        assert_eq!(pool.choose(32, &[0, 0, 31, 0]), (2, HIT));
        pool.dispatch(2, 64);
    }
}

/// A conversation in an idle pool stays where it is, however long it goes on.
#[test]
fn an_idle_pool_leaves_conversations_where_they_are() {
    let mut pool = Pool::new(4);
    pool.continues = true;
    for turn in 1..500 {
        let (held, blocks) = (20 * turn, 20 * turn + 8);
        assert_eq!(pool.choose(blocks, &[0, held, 16, 0]), (1, HIT), "turn {turn}");
        pool.dispatch(1, 8 * 64);
    }
}

#[test]
fn a_busy_pool_keeps_shares_of_requests_and_of_work() {
    let mut pool = Pool::new(2);
    pool.in_flight = vec![30, 30];
    for i in 0..1000 {
        pool.dispatch(u16::from(i % 20 == 0), 1_000);
    }
    assert_eq!(pool.choose(120, &[100, 0]).1, MISS, "far over its share of requests");
    assert_eq!(pool.choose(120, &[0, 100]), (1, HIT), "under its share");
    pool.continues = true;
    assert_eq!(pool.choose(101, &[100, 0]), (0, HIT), "what goes on there pays for what is new");
    assert_eq!(pool.choose(400, &[100, 0]).1, MISS);
    // The same number of requests each, but all the work on one.
    let mut pool = Pool::new(2);
    pool.in_flight = vec![30, 30];
    for i in 0..1000 {
        pool.dispatch(i % 2, if i % 2 == 0 { 9_000 } else { 1_000 });
    }
    assert_eq!(pool.choose(200, &[100, 0]).1, MISS, "much is left to compute");
    assert_eq!(pool.choose(102, &[100, 0]), (0, HIT), "hardly anything is");
}

/// Where every server holds the head and none is worth its price, affinity is kept wherever it goes.
#[test]
fn a_head_that_all_hold_goes_to_the_least_busy() {
    let mut pool = Pool::new(2);
    pool.in_flight = vec![3, 0];
    assert_eq!(pool.choose(90, &[8, 8]), (1, HIT));
    for _ in 0..1000 {
        pool.dispatch(1, 10_000);
    }
    pool.in_flight = vec![2, 0];
    assert_eq!(pool.choose(90, &[3, 3]), (1, HIT));
}

#[test]
fn nobody_has_no_load() {
    assert_eq!(Loads::of(std::iter::empty()), None);
}
