//! Routers that know nothing of prefixes: weighted round-robin, least connections, two random choices.
//!
//! All engines weigh the same here, so the smooth wheel is a plain one.

use super::policy::{Arrival, Books, Policy, Verdict};
use super::rng::Rng;

/// How the next server is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// One after the other.
    RoundRobin,
    /// Least in flight; ties in turn.
    LeastConnections,
    /// The less busy of two drawn at random.
    PowerOfTwo,
}

/// See the module's text.
#[derive(Debug)]
pub struct PlainRouter {
    plain: Plain,
    books: Books,
    next: usize,
    rng: Rng,
}

impl PlainRouter {
    pub fn new(plain: Plain, servers: usize, requests: usize, seed: u64) -> PlainRouter {
        PlainRouter { plain, books: Books::new(servers, requests), next: 0, rng: Rng::new(seed) }
    }

    fn choose(&mut self) -> usize {
        let servers = self.books.servers.len();
        let in_flight = |server: usize| self.books.servers[server].in_flight;
        match self.plain {
            Plain::RoundRobin => {
                let server = self.next;
                self.next = (server + 1) % servers;
                server
            }
            Plain::LeastConnections => {
                let turn = (0..servers).map(|i| (self.next + i) % servers);
                let server = turn.min_by_key(|&server| in_flight(server)).expect("there are servers");
                self.next = (server + 1) % servers;
                server
            }
            Plain::PowerOfTwo => {
                let first = self.rng.below(servers as u64) as usize;
                let second = self.rng.below(servers as u64) as usize;
                if in_flight(second) < in_flight(first) { second } else { first }
            }
        }
    }
}

impl Policy for PlainRouter {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        let server = self.choose();
        verdicts.push(self.books.dispatch(arrival.id, server, arrival.request, 0));
    }

    fn first_token(&mut self, _now: u64, id: usize, _cached_blocks: usize) {
        self.books.first_token(id);
    }

    fn finish(&mut self, _now: u64, id: usize, _verdicts: &mut Vec<Verdict>) {
        self.books.finish(id);
    }
}
