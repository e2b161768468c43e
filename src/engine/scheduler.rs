//! When the simulated engine computes what: slots, the queue in front of them, prefill and decode.
//!
//! A request waits, first come first served, until a slot is free and its key/value blocks (prompt and longest answer)
//! fit beside those of the running ones. Then its prompt is computed: one prompt at a time per engine, in order of
//! admission, `prefill_tps` tokens per second over the tokens that the prefix cache does not hold. The first token of
//! the answer is there when its prefill ends; the others follow at `decode_tps` per second, each stream by itself.
//!
//! *Invariant*: at most `slots` requests run; blocks of running requests never exceed the cache; a request that starts
//! later is never prefilled before one that was admitted earlier. No clock is read: `now` is an argument, and a late call
//! gives the same times as a punctual one.
//! *Bound and cost*: at most `queue_max` wait. O(1) per call, O(prompt / block_tokens) when a request starts or ends.
//! *Errors*: [`Refusal`].
//! *Source*: the shape of vLLM's scheduler with chunked prefill; the room for an answer is set aside at admission, so
//! that no request is ever preempted (vLLM preempts instead).

use std::collections::{HashMap, VecDeque};

use super::prefix_cache::{Held, PrefixCache, block_hash};
use super::text::Token;
use crate::clock::Nanos;

/// Speed and size of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Prompt tokens per second, whole engine; 0: no time passes.
    pub prefill_tps: f64,
    /// Answer tokens per second, each stream; 0: no time passes.
    pub decode_tps: f64,
    /// Requests that run at once, at least 1.
    pub slots: usize,
    /// Requests that wait for a slot.
    pub queue_max: usize,
}

fn span_ns(tokens: usize, tps: f64) -> u64 {
    if tps > 0.0 { (tokens as f64 * 1e9 / tps) as u64 } else { 0 }
}

impl Rates {
    /// When token `index` (0 is the first) of an answer is there.
    pub fn token_at(&self, first_token_at: Nanos, index: u32) -> Nanos {
        Nanos(first_token_at.0.saturating_add(span_ns(index as usize, self.decode_tps)))
    }
    /// How many of an answer's tokens are there at `now`.
    pub fn tokens_by(&self, first_token_at: Nanos, now: Nanos) -> u32 {
        if now < first_token_at {
            return 0;
        }
        if self.decode_tps <= 0.0 {
            return u32::MAX;
        }
        let mut count = (now.since(first_token_at) as f64 * self.decode_tps / 1e9) as u32 + 1;
        // Rounding must not make `token_at` and this function disagree, or a caller that slept until a token would spin.
        while self.token_at(first_token_at, count) <= now {
            count += 1;
        }
        count
    }
}

/// What a request asks of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Identities of the prompt's full blocks; empty when the prefix cache is not used.
    hashes: Vec<u64>,
    /// What follows them, or the salt when there is none.
    chain: u64,
    /// Tokens after the last full block.
    tail: Vec<Token>,
    /// Tokens to compute, cached or not.
    prompt_tokens: usize,
    /// Longest that the key/value memory gets.
    kv_tokens: usize,
    cacheable: bool,
}

impl Work {
    /// A prompt that is continued by up to `output_max` tokens. `salt` keeps apart prompts that must not share (other
    /// model, other `cache_salt`).
    pub fn generate(tokens: &[Token], salt: u64, output_max: u32, block_tokens: usize) -> Work {
        let mut chain = salt;
        let blocks = tokens.chunks_exact(block_tokens);
        let tail = blocks.remainder().to_vec();
        let hashes = blocks
            .map(|block| {
                chain = block_hash(chain, block);
                chain
            })
            .collect();
        Work {
            hashes,
            chain,
            tail,
            prompt_tokens: tokens.len(),
            kv_tokens: tokens.len() + output_max as usize,
            cacheable: true,
        }
    }

    /// Inputs that are only read (embeddings, rerank): `tokens` in all, `longest` in the longest one. Not cached.
    pub fn pooled(tokens: usize, longest: usize) -> Work {
        Work { prompt_tokens: tokens, kv_tokens: longest, ..Work::default() }
    }

    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }
}

/// Names a request from `submit` to `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// Why a request is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// `queue_max` requests wait already.
    QueueFull,
    /// Longer than the whole key/value memory, which holds this many tokens.
    TooLong { kv_tokens_max: usize },
}

/// A request whose prefill has begun: from now on its times are fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    pub ticket: Ticket,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
    /// When the prefill ends and the first token is there.
    pub first_token_at: Nanos,
}

#[derive(Debug)]
enum Stage {
    Waiting,
    /// Has a slot, waits for its turn to be prefilled; since when.
    Admitted(Nanos),
    Prefilling {
        from: Nanos,
        until: Nanos,
        cached_tokens: usize,
    },
    Decoding,
}

#[derive(Debug)]
struct Sequence {
    work: Work,
    stage: Stage,
    held: Held,
    /// Blocks set aside for it.
    blocks_max: usize,
    /// Tokens whose keys and values are in `held`, once decoding.
    kv_tokens: usize,
}

/// See the module's text.
#[derive(Debug)]
pub struct Scheduler {
    rates: Rates,
    block_tokens: usize,
    cache: PrefixCache,
    sequences: HashMap<Ticket, Sequence>,
    waiting: VecDeque<Ticket>,
    admitted: VecDeque<Ticket>,
    prefilling: Option<Ticket>,
    /// When the last prefill ended or was given up.
    prefill_free_at: Nanos,
    running: usize,
    blocks_set_aside: usize,
    last_ticket: u64,
}

impl Scheduler {
    /// `block_tokens` ≥ 1 tokens per block, `kv_blocks` ≥ 1 blocks.
    pub fn new(rates: Rates, block_tokens: usize, kv_blocks: usize) -> Self {
        assert!(block_tokens >= 1 && rates.slots >= 1);
        Scheduler {
            rates,
            block_tokens,
            cache: PrefixCache::new(kv_blocks),
            sequences: HashMap::new(),
            waiting: VecDeque::new(),
            admitted: VecDeque::new(),
            prefilling: None,
            prefill_free_at: Nanos::ZERO,
            running: 0,
            blocks_set_aside: 0,
            last_ticket: 0,
        }
    }

    pub fn rates(&self) -> &Rates {
        &self.rates
    }
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }
    /// Requests that have a slot.
    pub fn running(&self) -> usize {
        self.running
    }
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes a request in. Call [`Scheduler::step`] afterwards, and [`Scheduler::end`] when it is over for any reason.
    pub fn submit(&mut self, now: Nanos, work: Work) -> Result<Ticket, Refusal> {
        let blocks_max = work.kv_tokens.max(1).div_ceil(self.block_tokens);
        if blocks_max > self.cache.capacity() {
            return Err(Refusal::TooLong { kv_tokens_max: self.cache.capacity() * self.block_tokens });
        }
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        let sequence =
            Sequence { work, stage: Stage::Waiting, held: Held::default(), blocks_max, kv_tokens: 0 };
        self.sequences.insert(ticket, sequence);
        self.waiting.push_back(ticket);
        self.admit(now);
        if self.waiting.len() > self.rates.queue_max {
            self.waiting.pop_back();
            self.sequences.remove(&ticket);
            return Err(Refusal::QueueFull);
        }
        Ok(ticket)
    }

    /// Moves everything on to `now`, and appends the requests whose prefill began. Call it again when a request's
    /// `first_token_at` has come and after [`Scheduler::end`].
    pub fn step(&mut self, now: Nanos, started: &mut Vec<Started>) {
        self.admit(now);
        loop {
            if let Some(ticket) = self.prefilling {
                let Stage::Prefilling { until, .. } = self.sequence(ticket).stage else { unreachable!() };
                if until > now {
                    return;
                }
                self.prefilling = None;
                self.prefill_free_at = until;
                let prompt_tokens = self.sequence(ticket).work.prompt_tokens;
                self.publish_prompt(ticket, prompt_tokens);
                let sequence = self.sequence(ticket);
                sequence.kv_tokens = prompt_tokens;
                sequence.stage = Stage::Decoding;
            }
            let Some(ticket) = self.admitted.pop_front() else { return };
            started.push(self.start_prefill(ticket));
        }
    }

    /// Tokens of `ticket`'s answer that were made: their keys and values take room, and full blocks can be found by
    /// later prompts. Its prefill must have ended by the last [`Scheduler::step`].
    pub fn record(&mut self, ticket: Ticket, tokens: &[Token]) {
        let block_tokens = self.block_tokens;
        let sequence = self.sequences.get_mut(&ticket).expect("a ticket is valid until its end");
        assert!(matches!(sequence.stage, Stage::Decoding), "tokens come after the prefill");
        for token in tokens {
            sequence.kv_tokens += 1;
            let blocks = sequence.kv_tokens.div_ceil(block_tokens).min(sequence.blocks_max);
            self.cache.grow(&mut sequence.held, blocks);
            sequence.work.tail.push(*token);
            if sequence.work.cacheable && sequence.work.tail.len() == block_tokens {
                let hash = block_hash(sequence.work.chain, &sequence.work.tail);
                self.cache.publish(&sequence.held, sequence.kv_tokens / block_tokens - 1, hash);
                sequence.work.chain = hash;
                sequence.work.tail.clear();
            }
        }
    }

    /// The request is over: answered, or given up in whatever state it was. Frees its place; call
    /// [`Scheduler::step`] afterwards. A ticket that ended already does nothing.
    pub fn end(&mut self, now: Nanos, ticket: Ticket) {
        let Some(sequence) = self.sequences.get(&ticket) else { return };
        match sequence.stage {
            Stage::Waiting => self.waiting.retain(|waiting| *waiting != ticket),
            Stage::Admitted(_) => self.admitted.retain(|admitted| *admitted != ticket),
            Stage::Prefilling { from, until, cached_tokens } => {
                // What was computed by now stays useful; the rest of the time is the next request's.
                let (done, all) = (now.since(from), until.since(from));
                let fresh = sequence.work.prompt_tokens - cached_tokens;
                let computed =
                    if done >= all { fresh } else { (fresh as f64 * done as f64 / all as f64) as usize };
                self.publish_prompt(ticket, cached_tokens + computed);
                self.prefilling = None;
                self.prefill_free_at = now.min(until);
            }
            Stage::Decoding => {}
        }
        let sequence = self.sequences.remove(&ticket).expect("looked up above");
        if !matches!(sequence.stage, Stage::Waiting) {
            self.running -= 1;
            self.blocks_set_aside -= sequence.blocks_max;
        }
        self.cache.release(sequence.held);
    }

    fn sequence(&mut self, ticket: Ticket) -> &mut Sequence {
        self.sequences.get_mut(&ticket).expect("queues name live requests only")
    }

    fn admit(&mut self, now: Nanos) {
        while let Some(&ticket) = self.waiting.front() {
            let blocks_max = self.sequence(ticket).blocks_max;
            if self.running == self.rates.slots || self.blocks_set_aside + blocks_max > self.cache.capacity()
            {
                return;
            }
            self.waiting.pop_front();
            self.admitted.push_back(ticket);
            self.running += 1;
            self.blocks_set_aside += blocks_max;
            self.sequence(ticket).stage = Stage::Admitted(now);
        }
    }

    fn start_prefill(&mut self, ticket: Ticket) -> Started {
        let sequence = self.sequences.get_mut(&ticket).expect("queues name live requests only");
        let Stage::Admitted(since) = sequence.stage else { unreachable!("only admitted requests start") };
        let prompt_tokens = sequence.work.prompt_tokens;
        // The last prompt token is always computed: its result is the first token of the answer.
        let reusable = prompt_tokens.saturating_sub(1) / self.block_tokens;
        sequence.held = self.cache.take_prefix(&sequence.work.hashes, reusable);
        let cached_tokens = sequence.held.len() * self.block_tokens;
        let blocks = prompt_tokens.div_ceil(self.block_tokens).min(sequence.blocks_max);
        self.cache.grow(&mut sequence.held, blocks);
        let from = self.prefill_free_at.max(since);
        let until = Nanos(from.0 + span_ns(prompt_tokens - cached_tokens, self.rates.prefill_tps));
        sequence.stage = Stage::Prefilling { from, until, cached_tokens };
        self.prefilling = Some(ticket);
        Started { ticket, cached_tokens, first_token_at: until }
    }

    /// The first `tokens` of the prompt are computed: their full blocks can be found.
    fn publish_prompt(&mut self, ticket: Ticket, tokens: usize) {
        let sequence = self.sequences.get(&ticket).expect("queues name live requests only");
        for (index, hash) in sequence.work.hashes.iter().enumerate().take(tokens / self.block_tokens) {
            self.cache.publish(&sequence.held, index, *hash);
        }
    }
}

#[cfg(test)]
mod tests;
