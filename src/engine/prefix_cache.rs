//! The prefix cache: key/value blocks that later prompts with the same beginning need not compute again.
//!
//! Tokens are cut into blocks of `block_tokens`; a block's identity is chained with the block's before it, so equal
//! identities mean equal beginnings. All key/value memory is blocks: those of running requests are pinned, the others
//! stay, findable, until their room is needed, least recently used first. A request's blocks are given back from its
//! tail to its head, so that heads outlive tails.
//!
//! *Invariant*: every block is either pinned (pins > 0) or on the free list, exactly once; `by_hash` names a block if and
//! only if the block carries that hash.
//! *Bound and cost*: `capacity` blocks of 24 bytes and at most as many map entries, all allocated at the start; O(1) per
//! block looked up, taken or given back.
//! *Errors*: taking a block when none is free panics: the scheduler admits a request only when its blocks fit.
//! *Source*: the behaviour of vLLM's automatic prefix caching: full blocks only, and at least the last prompt token is
//! always computed.

use std::collections::HashMap;

use super::text::{Token, mix};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    hash: Option<u64>,
    pins: u32,
    older: u32,
    newer: u32,
}

/// The blocks of one running request, in order. Give it back with [`PrefixCache::release`].
#[derive(Debug, Default)]
pub struct Held {
    blocks: Vec<u32>,
}

impl Held {
    pub fn len(&self) -> usize {
        self.blocks.len()
    }
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct PrefixCache {
    blocks: Vec<Block>,
    by_hash: HashMap<u64, u32>,
    /// Ends of the free list: the first to be reused, and the last.
    oldest: u32,
    newest: u32,
    pinned: usize,
}

impl PrefixCache {
    /// An empty cache of `capacity` blocks, 1 to 2³² − 2.
    pub fn new(capacity: usize) -> Self {
        assert!((1..NONE as usize).contains(&capacity), "the cache holds 1 to 2^32 - 2 blocks");
        let mut cache = PrefixCache {
            blocks: vec![Block { hash: None, pins: 0, older: NONE, newer: NONE }; capacity],
            by_hash: HashMap::with_capacity(capacity),
            oldest: NONE,
            newest: NONE,
            pinned: 0,
        };
        (0..capacity as u32).for_each(|block| cache.push_newest(block));
        cache
    }

    /// Blocks in all.
    pub fn capacity(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks of running requests.
    pub fn pinned(&self) -> usize {
        self.pinned
    }

    /// Blocks that a prompt could match now, pinned ones included.
    pub fn findable(&self) -> usize {
        self.by_hash.len()
    }

    /// Pins the longest run of leading blocks of `hashes` that are here, at most `blocks_max`.
    pub fn take_prefix(&mut self, hashes: &[u64], blocks_max: usize) -> Held {
        let mut held = Held::default();
        for hash in hashes.iter().take(blocks_max) {
            let Some(&block) = self.by_hash.get(hash) else { break };
            if self.blocks[block as usize].pins == 0 {
                self.unlink(block);
                self.pinned += 1;
            }
            self.blocks[block as usize].pins += 1;
            held.blocks.push(block);
        }
        held
    }

    /// Adds blank blocks to `held` until it has `blocks_total`; evicts the least recently used.
    pub fn grow(&mut self, held: &mut Held, blocks_total: usize) {
        while held.blocks.len() < blocks_total {
            let block = self.oldest;
            assert!(block != NONE, "a request was admitted whose blocks do not fit");
            self.unlink(block);
            self.pinned += 1;
            let entry = &mut self.blocks[block as usize];
            entry.pins = 1;
            if let Some(hash) = entry.hash.take() {
                self.by_hash.remove(&hash);
            }
            held.blocks.push(block);
        }
    }

    /// The block at `index` of `held` now holds what `hash` names. Does nothing where another block already does: the
    /// copy stays unnamed, and its room is the first to be reused.
    pub fn publish(&mut self, held: &Held, index: usize, hash: u64) {
        let block = held.blocks[index];
        if self.blocks[block as usize].hash.is_none() && !self.by_hash.contains_key(&hash) {
            self.blocks[block as usize].hash = Some(hash);
            self.by_hash.insert(hash, block);
        }
    }

    /// Unpins the blocks of a request that ended; what was published stays findable.
    pub fn release(&mut self, held: Held) {
        for block in held.blocks.into_iter().rev() {
            let entry = &mut self.blocks[block as usize];
            entry.pins -= 1;
            if entry.pins > 0 {
                continue;
            }
            self.pinned -= 1;
            if entry.hash.is_some() { self.push_newest(block) } else { self.push_oldest(block) }
        }
    }

    fn push_newest(&mut self, block: u32) {
        let before = self.newest;
        self.blocks[block as usize].older = before;
        self.blocks[block as usize].newer = NONE;
        match before {
            NONE => self.oldest = block,
            before => self.blocks[before as usize].newer = block,
        }
        self.newest = block;
    }

    fn push_oldest(&mut self, block: u32) {
        let after = self.oldest;
        self.blocks[block as usize].newer = after;
        self.blocks[block as usize].older = NONE;
        match after {
            NONE => self.newest = block,
            after => self.blocks[after as usize].older = block,
        }
        self.oldest = block;
    }

    fn unlink(&mut self, block: u32) {
        let Block { older, newer, .. } = self.blocks[block as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.blocks[newer as usize].older = older,
        }
    }
}

/// The identity of the block that follows the one named `before` (or, at the start, the salt) and holds `tokens`.
pub fn block_hash(before: u64, tokens: &[Token]) -> u64 {
    tokens.iter().fold(before, |h, token| mix(h, u64::from(*token)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs one prompt of `blocks` blocks that is number `prompt`; answers how many were here already.
    fn run(cache: &mut PrefixCache, prompt: u64, blocks: usize) -> usize {
        let hashes: Vec<u64> = (0..blocks as u64).map(|block| mix(prompt, block)).collect();
        let mut held = cache.take_prefix(&hashes, blocks);
        let hits = held.len();
        cache.grow(&mut held, blocks);
        for (index, hash) in hashes.iter().enumerate() {
            cache.publish(&held, index, *hash);
        }
        assert_eq!(cache.pinned(), blocks);
        cache.release(held);
        assert_eq!(cache.pinned(), 0);
        hits
    }

    #[test]
    fn a_second_run_of_the_same_prompt_finds_every_block() {
        let mut cache = PrefixCache::new(16);
        assert_eq!(run(&mut cache, 1, 4), 0);
        assert_eq!(run(&mut cache, 1, 4), 4);
        assert_eq!(cache.findable(), 4);
    }

    #[test]
    fn nine_prompts_in_turn_over_room_for_five_never_hit() {
        let mut cache = PrefixCache::new(5 * 4);
        let hits: usize = (0..5).flat_map(|_| 0..9).map(|prompt| run(&mut cache, prompt, 4)).sum();
        assert_eq!(hits, 0);
        let hits: usize = (0..5).flat_map(|_| 0..5).map(|prompt| run(&mut cache, 100 + prompt, 4)).sum();
        assert_eq!(hits, 4 * 5 * 4, "five prompts fit: only the first round misses");
    }

    #[test]
    fn heads_outlive_tails() {
        let mut cache = PrefixCache::new(8);
        run(&mut cache, 1, 8);
        run(&mut cache, 2, 3);
        assert_eq!(
            run(&mut cache, 1, 8),
            5,
            "three blocks were needed: the last three of the first prompt went"
        );
    }

    #[test]
    fn pinned_blocks_are_never_evicted() {
        let mut cache = PrefixCache::new(4);
        let mut first = cache.take_prefix(&[1, 2], 2);
        cache.grow(&mut first, 2);
        cache.publish(&first, 0, 1);
        cache.publish(&first, 1, 2);
        let shared = cache.take_prefix(&[1, 2, 3], 3);
        assert_eq!((shared.len(), cache.pinned()), (2, 2));
        cache.release(first);
        assert_eq!(cache.pinned(), 2, "the second request still uses them");
        for prompt in 10..20 {
            let mut held = Held::default();
            cache.grow(&mut held, 2);
            cache.publish(&held, 0, prompt);
            cache.release(held);
        }
        assert_eq!(cache.take_prefix(&[1, 2], 2).len(), 2);
        cache.release(shared);
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn taking_more_than_there_is_panics() {
        let mut cache = PrefixCache::new(2);
        cache.grow(&mut Held::default(), 3);
    }

    #[test]
    fn an_unnamed_copy_is_reused_before_anything_findable() {
        let mut cache = PrefixCache::new(3);
        run(&mut cache, 1, 2);
        let mut copy = Held::default();
        cache.grow(&mut copy, 1);
        cache.publish(&copy, 0, mix(1, 0));
        cache.release(copy);
        assert_eq!(cache.findable(), 2);
        run(&mut cache, 2, 1);
        assert_eq!(run(&mut cache, 1, 2), 2);
    }
}
