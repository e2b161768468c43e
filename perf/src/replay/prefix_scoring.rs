//! llm-d's approximate prefix scoring with its two companions, from its documentation.
//!
//! Rule: the server with the highest weighted sum of three scores between 0 and 1, ties at random.
//! *Prefix*: matched share of the prompt's blocks, by an LRU of 31,250 blocks of 64 tokens per server (the block size in effect).
//! *Queue*: 1 for the shortest queue, 0 for the longest, evenly between; 1 for all when equal.
//! *Cache use*: 1 − the share of the engine's cache in use. Queue and cache use are engines' own figures; here they are never stale,
//! which is better than the real thing (50 ms old).

use super::engine::Engine;
use super::lru::Lru;
use super::policy::{Arrival, Books, Policy, Verdict};
use super::rng::Rng;
use super::trace::BLOCK_TOKENS;

const LRU_BLOCKS: u64 = 31_250;
const LRU_BLOCK_TOKENS: u64 = 64;

/// Weights of prefix, queue and cache use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights(pub f64, pub f64, pub f64);

/// See the module's text.
#[derive(Debug)]
pub struct PrefixScoring {
    weights: Weights,
    books: Books,
    seen: Vec<Lru>,
    rng: Rng,
}

impl PrefixScoring {
    pub fn new(weights: Weights, servers: usize, requests: usize, blocks: usize, seed: u64) -> PrefixScoring {
        let capacity = (LRU_BLOCKS * LRU_BLOCK_TOKENS / BLOCK_TOKENS) as usize;
        PrefixScoring {
            weights,
            books: Books::new(servers, requests),
            seen: vec![Lru::new(capacity, blocks); servers],
            rng: Rng::new(seed),
        }
    }
}

/// Scores of queues, in the order of engines.
fn queue_scores(engines: &[Engine]) -> impl Iterator<Item = f64> {
    let waiting = || engines.iter().map(Engine::waiting);
    let (least, most) = (waiting().min().unwrap_or(0), waiting().max().unwrap_or(0));
    waiting()
        .map(move |waiting| if most == least { 1.0 } else { (most - waiting) as f64 / (most - least) as f64 })
}

/// Place of the least of `costs`; one of those that tie, at random.
pub fn least(costs: impl Iterator<Item = f64>, rng: &mut Rng) -> usize {
    let (mut best, mut least, mut ties) = (0, f64::INFINITY, 0);
    for (i, cost) in costs.enumerate() {
        if cost < least - 1e-9 {
            (best, least, ties) = (i, cost, 1);
        } else if cost <= least + 1e-9 {
            ties += 1;
            if rng.below(ties) == 0 {
                best = i;
            }
        }
    }
    best
}

impl Policy for PrefixScoring {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        let blocks = &arrival.request.blocks;
        let matched: Vec<usize> = self.seen.iter().map(|seen| seen.matched(blocks)).collect();
        let Weights(prefix, queue, cache_use) = self.weights;
        let costs = queue_scores(arrival.engines).zip(arrival.engines).zip(&matched).map(
            |((queue_score, engine), &matched)| {
                -(prefix * matched as f64 / blocks.len() as f64
                    + queue * queue_score
                    + cache_use * (1.0 - engine.cache_use()))
            },
        );
        let server = least(costs, &mut self.rng);
        self.seen[server].touch(blocks);
        verdicts.push(self.books.dispatch(arrival.id, server, arrival.request, matched[server]));
    }

    fn first_token(&mut self, _now: u64, id: usize, _cached_blocks: usize) {
        self.books.first_token(id);
    }

    fn finish(&mut self, _now: u64, id: usize, _verdicts: &mut Vec<Verdict>) {
        self.books.finish(id);
    }
}
