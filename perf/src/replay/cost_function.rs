//! NVIDIA Dynamo's cost function without cache events, from its documentation.
//!
//! Rule: the server of least `overlap weight × prefill blocks + decode blocks`, temperature 0, ties at random. Prefill blocks: prompt
//! tokens still to compute on the server with this request added, over the block size. Decode blocks: blocks of the requests in flight on it,
//! with this one. Without events, a block is believed held for 120 s after the last request with it went there.

use super::policy::{Arrival, Books, Policy, Verdict};
use super::prefix_scoring::least;
use super::rng::Rng;
use super::trace::BLOCK_TOKENS;
use crate::clock::S;

const OVERLAP_WEIGHT: f64 = 1.0;
const BELIEVED_NS: u64 = 120 * S;

/// See the module's text.
#[derive(Debug)]
pub struct CostFunction {
    books: Books,
    /// Per server and block: believed until then, in nanoseconds; 0 for never.
    believed: Vec<Vec<u64>>,
    rng: Rng,
}

impl CostFunction {
    pub fn new(servers: usize, requests: usize, distinct_blocks: usize, seed: u64) -> CostFunction {
        CostFunction {
            books: Books::new(servers, requests),
            believed: vec![vec![0; distinct_blocks]; servers],
            rng: Rng::new(seed),
        }
    }
}

impl Policy for CostFunction {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        let Arrival { now, request, .. } = arrival;
        let matched: Vec<usize> = self
            .believed
            .iter()
            .map(|until| request.blocks.iter().take_while(|&&block| until[block as usize] > now).count())
            .collect();
        let costs = self.books.servers.iter().zip(&matched).map(|(known, &matched)| {
            let prefill =
                (known.prefill_tokens + request.uncached_tokens(matched)) as f64 / BLOCK_TOKENS as f64;
            OVERLAP_WEIGHT * prefill + (known.blocks + request.blocks.len() as u64) as f64
        });
        let server = least(costs, &mut self.rng);
        for &block in &request.blocks {
            self.believed[server][block as usize] = now + BELIEVED_NS;
        }
        verdicts.push(self.books.dispatch(arrival.id, server, request, matched[server]));
    }

    fn first_token(&mut self, _now: u64, id: usize, _cached_blocks: usize) {
        self.books.first_token(id);
    }

    fn finish(&mut self, _now: u64, id: usize, _verdicts: &mut Vec<Verdict>) {
        self.books.finish(id);
    }
}
