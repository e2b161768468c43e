//! A router that sees every engine's true cache at the moment of the request: what a simple policy does with perfect knowledge.
//!
//! Rule: among the servers with at most `least + max(2, 25 %)` requests in flight, the one whose cache holds most leading blocks, if
//! at least two, ties to the less busy; else least connections. What it cannot see is the future: with queues, the cache that a prefill
//! meets is not the one that the router looked at.

use super::policy::{Arrival, Books, Policy, Verdict};

const SLACK_ABS: f64 = 2.0;
const SLACK_REL: f64 = 0.25;
const MATCH_BLOCKS_MIN: usize = 2;

/// See the module's text.
#[derive(Debug)]
pub struct Oracle {
    books: Books,
    next: usize,
}

impl Oracle {
    pub fn new(servers: usize, requests: usize) -> Oracle {
        Oracle { books: Books::new(servers, requests), next: 0 }
    }
}

impl Policy for Oracle {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        let servers = self.books.servers.len();
        let in_flight = |server: usize| self.books.servers[server].in_flight;
        let cached: Vec<usize> =
            arrival.engines.iter().map(|engine| engine.cached(arrival.request)).collect();
        // From `next` on, so that ties take turns.
        let turn = || (0..servers).map(|i| (self.next + i) % servers);
        let least = turn().map(in_flight).min().expect("there are servers") as f64;
        let limit = least + SLACK_ABS.max(SLACK_REL * least);
        let holder = turn()
            .filter(|&server| in_flight(server) as f64 <= limit && cached[server] >= MATCH_BLOCKS_MIN)
            .min_by_key(|&server| (usize::MAX - cached[server], in_flight(server)));
        let server =
            holder.or_else(|| turn().min_by_key(|&server| in_flight(server))).expect("there are servers");
        self.next = (server + 1) % servers;
        verdicts.push(self.books.dispatch(arrival.id, server, arrival.request, cached[server]));
    }

    fn first_token(&mut self, _now: u64, id: usize, _cached_blocks: usize) {
        self.books.first_token(id);
    }

    fn finish(&mut self, _now: u64, id: usize, _verdicts: &mut Vec<Verdict>) {
        self.books.finish(id);
    }
}
