//! SGLang Model Gateway's `cache_aware`, from its documentation.
//!
//! Rule: when the busiest server has over 64 requests more than the least busy *and* over 1.5 times as many, the request goes
//! to the least loaded. Otherwise to the server with the longest prefix seen, if that is over 0.3 of the prompt; below, to the least
//! loaded (in flight, then requests so far, then the order of servers). What each server has seen is kept in a tree of at most
//! `max_tree_size` = 2^26 characters per server, swept down to it every 120 s, least recently used first.
//!
//! Two things are not documented and are variants here: which of several servers with equally long prefixes gets the request, the
//! least loaded or always the same. A character is taken as a quarter of a token.

use super::lru::Lru;
use super::policy::{Arrival, Books, Policy, Verdict};
use super::trace::BLOCK_TOKENS;
use crate::clock::S;

const MATCH_SHARE_MIN: f64 = 0.3;
const IMBALANCE_ABS: u64 = 64;
const IMBALANCE_REL: f64 = 1.5;
const TREE_CHARACTERS_MAX: u64 = 1 << 26;
const CHARACTERS_PER_TOKEN: u64 = 4;
const SWEEP_NS: u64 = 120 * S;

/// Who gets a request when several servers have seen the same longest prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ties {
    LeastLoaded,
    First,
}

/// See the module's text.
#[derive(Debug)]
pub struct CacheAware {
    ties: Ties,
    books: Books,
    seen: Vec<Lru>,
    swept_ns: u64,
}

impl CacheAware {
    pub fn new(ties: Ties, servers: usize, requests: usize, distinct_blocks: usize) -> CacheAware {
        let blocks = (TREE_CHARACTERS_MAX / CHARACTERS_PER_TOKEN / BLOCK_TOKENS) as usize;
        CacheAware {
            ties,
            books: Books::new(servers, requests),
            seen: vec![Lru::new(blocks, distinct_blocks); servers],
            swept_ns: 0,
        }
    }

    fn load(&self, server: usize) -> (u64, u64, usize) {
        let known = &self.books.servers[server];
        (known.in_flight, known.dispatched, server)
    }

    fn choose(&self, matched: &[usize], total: usize) -> usize {
        let servers = || 0..matched.len();
        let least_loaded = servers().min_by_key(|&server| self.load(server)).expect("there are servers");
        let least = self.books.servers[least_loaded].in_flight;
        let most = self.books.servers.iter().map(|known| known.in_flight).max().expect("there are servers");
        if most - least > IMBALANCE_ABS && most as f64 > IMBALANCE_REL * least as f64 {
            return least_loaded;
        }
        let longest = matched.iter().copied().max().expect("there are servers");
        if longest as f64 / total as f64 <= MATCH_SHARE_MIN {
            return least_loaded;
        }
        let mut best = servers().filter(|&server| matched[server] == longest);
        match self.ties {
            Ties::First => best.next(),
            Ties::LeastLoaded => best.min_by_key(|&server| self.load(server)),
        }
        .expect("the longest is one of them")
    }
}

impl Policy for CacheAware {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        if arrival.now - self.swept_ns >= SWEEP_NS {
            self.swept_ns = arrival.now;
            self.seen.iter_mut().for_each(Lru::evict);
        }
        let blocks = &arrival.request.blocks;
        let matched: Vec<usize> = self.seen.iter().map(|seen| seen.matched(blocks)).collect();
        let server = self.choose(&matched, blocks.len());
        self.seen[server].touch_without_eviction(blocks);
        verdicts.push(self.books.dispatch(arrival.id, server, arrival.request, matched[server]));
    }

    fn first_token(&mut self, _now: u64, id: usize, _cached_blocks: usize) {
        self.books.first_token(id);
    }

    fn finish(&mut self, _now: u64, id: usize, _verdicts: &mut Vec<Verdict>) {
        self.books.finish(id);
    }
}
