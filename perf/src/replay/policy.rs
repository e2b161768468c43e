//! What is compared: a router, seen from outside. It is told of arrivals, first tokens and ends, and says which engine takes
//! which request.
//!
//! *Invariant*: each request is placed or refused exactly once, at its arrival or later.

use super::engine::Engine;
use super::trace::Request;

/// What a router says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// `predicted`: leading blocks of the trace that it believes the engine to hold.
    Place {
        id: usize,
        server: usize,
        predicted: usize,
    },
    Refuse {
        id: usize,
    },
}

/// What happens around a router.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    pub now: u64,
    pub id: usize,
    pub request: &'a Request,
    /// What engines would report of themselves. A router that only guesses does not look at their caches.
    pub engines: &'a [Engine],
}

/// A router. All times in nanoseconds since the trace's beginning.
pub trait Policy {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>);
    /// The engine's answer begins. `cached_blocks`: what it reports as reused.
    fn first_token(&mut self, _now: u64, _id: usize, _cached_blocks: usize) {}
    fn finish(&mut self, now: u64, id: usize, verdicts: &mut Vec<Verdict>);
    /// When [`Policy::handle_timeout`] wants to be called next.
    fn poll_timeout(&self) -> Option<u64> {
        None
    }
    fn handle_timeout(&mut self, _now: u64, _verdicts: &mut Vec<Verdict>) {}
}

/// What a router knows of one server without asking it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Known {
    pub in_flight: u64,
    /// Requests dispatched whose first token is not there yet.
    pub prefilling: u64,
    /// Their prompt tokens that are not cached, by the router's own estimate.
    pub prefill_tokens: u64,
    /// Prompt blocks of all requests in flight.
    pub blocks: u64,
    /// Requests dispatched so far.
    pub dispatched: u64,
}

#[derive(Clone, Copy, Debug)]
struct Dispatched {
    server: usize,
    prefill_tokens: u64,
    blocks: u64,
}

/// The books that every router keeps: which request went where, and what is still open.
#[derive(Debug)]
pub struct Books {
    pub servers: Vec<Known>,
    open: Vec<Option<Dispatched>>,
}

impl Books {
    pub fn new(servers: usize, requests: usize) -> Books {
        Books { servers: vec![Known::default(); servers], open: vec![None; requests] }
    }

    /// `request` goes to `server`, which is believed to hold its first `matched` blocks.
    pub fn dispatch(&mut self, id: usize, server: usize, request: &Request, matched: usize) -> Verdict {
        let prefill_tokens = request.uncached_tokens(matched);
        let blocks = request.blocks.len() as u64;
        self.open[id] = Some(Dispatched { server, prefill_tokens, blocks });
        let known = &mut self.servers[server];
        known.in_flight += 1;
        known.prefilling += 1;
        known.prefill_tokens += prefill_tokens;
        known.blocks += blocks;
        known.dispatched += 1;
        Verdict::Place { id, server, predicted: matched }
    }

    pub fn first_token(&mut self, id: usize) {
        let Dispatched { server, prefill_tokens, .. } =
            self.open[id].expect("dispatched before its first token");
        self.servers[server].prefilling -= 1;
        self.servers[server].prefill_tokens -= prefill_tokens;
    }

    /// The server it was on.
    pub fn finish(&mut self, id: usize) -> usize {
        let Dispatched { server, blocks, .. } = self.open[id].take().expect("dispatched before it ends");
        self.servers[server].in_flight -= 1;
        self.servers[server].blocks -= blocks;
        server
    }
}
