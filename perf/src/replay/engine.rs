//! The simulated engine: a prefix cache, and how long a request takes.
//!
//! Two models, told apart by [`EngineModel::slots`]:
//!
//! * *Without a queue* every request starts at once: prefill takes its uncached tokens over the prefill rate, each output token a
//!   fixed time, whatever else runs. Prompts enter the cache when they arrive. It shows hit rates, never contention.
//! * *With slots and a queue*: first come, first served. One prefill at a time, and only while a slot is free; a request holds its
//!   slot from the beginning of its prefill to its last token. The cache is asked, and the prompt enters it, when the prefill begins.
//!   Output tokens again take a fixed time each.
//!
//! The cache is an exact LRU of 512-token blocks, tails evicted before heads. The last, partial block of a prompt counts as a block, as in
//! the published limits; blocks of running requests can be evicted; prefill is not chunked; nothing is preempted.
//!
//! *Invariant*: a request's tokens come after its prefill; no engine runs two prefills at once or more requests than slots.

use std::collections::VecDeque;

use super::lru::Lru;
use super::trace::Request;
use crate::clock::S;

/// How engines work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineModel {
    /// Uncached prompt tokens per second.
    pub prefill_tokens_per_s: f64,
    /// Time per output token, in milliseconds.
    pub decode_ms_per_token: f64,
    /// Blocks that the cache holds.
    pub cache_blocks: usize,
    /// Requests that run at once; `None`: no slots and no queue.
    pub slots: Option<usize>,
}

impl EngineModel {
    fn prefill_ns(&self, tokens: u64) -> u64 {
        (tokens as f64 / self.prefill_tokens_per_s * S as f64).round() as u64
    }

    fn decode_ns(&self, tokens: u64) -> u64 {
        (tokens as f64 * self.decode_ms_per_token * 1e6).round() as u64
    }
}

/// A prefill that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    pub id: usize,
    pub cached_blocks: usize,
    /// From now to the first token, in nanoseconds.
    pub prefill_ns: u64,
    /// From the first to the last token, in nanoseconds.
    pub decode_ns: u64,
}

/// One engine.
#[derive(Debug)]
pub struct Engine {
    model: EngineModel,
    cache: Lru,
    queue: VecDeque<usize>,
    prefilling: bool,
    running: usize,
    /// Blocks of running requests' prompts, each request for itself.
    running_blocks: usize,
}

impl Engine {
    pub fn new(model: EngineModel, distinct_blocks: usize) -> Engine {
        Engine {
            model,
            cache: Lru::new(model.cache_blocks, distinct_blocks),
            queue: VecDeque::new(),
            prefilling: false,
            running: 0,
            running_blocks: 0,
        }
    }

    /// Leading blocks in the cache now.
    pub fn cached(&self, request: &Request) -> usize {
        self.cache.matched(&request.blocks)
    }

    /// Requests that wait for their prefill to begin.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Share of the cache that running requests' prompts take, 0 to 1.
    pub fn cache_use(&self) -> f64 {
        (self.running_blocks as f64 / self.model.cache_blocks.max(1) as f64).min(1.0)
    }

    /// A request has come. [`Engine::start`] says what follows.
    pub fn accept(&mut self, id: usize) {
        self.queue.push_back(id);
    }

    /// The next prefill, if one can begin now; to be asked until it says no.
    pub fn start(&mut self, requests: &[Request]) -> Option<Started> {
        if let Some(slots) = self.model.slots
            && (self.prefilling || self.running >= slots)
        {
            return None;
        }
        let id = self.queue.pop_front()?;
        let request = &requests[id];
        let cached_blocks = self.cache.matched(&request.blocks);
        self.cache.touch(&request.blocks);
        self.prefilling = true;
        self.running += 1;
        self.running_blocks += request.blocks.len();
        Some(Started {
            id,
            cached_blocks,
            prefill_ns: self.model.prefill_ns(request.uncached_tokens(cached_blocks)),
            decode_ns: self.model.decode_ns(request.output_tokens),
        })
    }

    /// A prefill is over: the first token is out.
    pub fn first_token(&mut self) {
        self.prefilling = false;
    }

    /// A request is over.
    pub fn finish(&mut self, request: &Request) {
        self.running -= 1;
        self.running_blocks -= request.blocks.len();
    }
}
