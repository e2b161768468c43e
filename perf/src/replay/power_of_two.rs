//! A router that knows nothing of prefixes and little of load: the less busy of two servers drawn at random.

use super::policy::{Arrival, Books, Policy, Verdict};
use super::rng::Rng;

/// See the module's text.
#[derive(Debug)]
pub struct PowerOfTwo {
    books: Books,
    rng: Rng,
}

impl PowerOfTwo {
    pub fn new(servers: usize, requests: usize, seed: u64) -> PowerOfTwo {
        PowerOfTwo { books: Books::new(servers, requests), rng: Rng::new(seed) }
    }
}

impl Policy for PowerOfTwo {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        let servers = &self.books.servers;
        let mut draw = || self.rng.below(servers.len() as u64) as usize;
        let (first, second) = (draw(), draw());
        let server = if servers[second].in_flight < servers[first].in_flight { second } else { first };
        verdicts.push(self.books.dispatch(arrival.id, server, arrival.request, 0));
    }

    fn first_token(&mut self, _now: u64, id: usize, _cached_blocks: usize) {
        self.books.first_token(id);
    }

    fn finish(&mut self, _now: u64, id: usize, _verdicts: &mut Vec<Verdict>) {
        self.books.finish(id);
    }
}
