//! What an algorithm is: it chooses one of the candidates it is shown.

use super::chooser::Input;
use super::wheel::Wheel;
use crate::proto::backend::catalog::Algorithm;
use crate::proto::backend::prefix_memory::{Ends, PrefixMemory};
use crate::proto::ids::BackendId;

/// A server as an algorithm sees it: eligible, and with room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub backend: BackendId,
    /// Its place in the group, which is its place on the group's wheel.
    pub slot: u16,
    /// In millionths, above 0.
    pub weight: u64,
    /// Over all shards, as far as heard.
    pub in_flight: u32,
    /// Leading prompt blocks that it is believed to hold; 0 outside kv-aware pools.
    pub matched: u32,
    /// The match ends where an earlier prompt did: this one goes on from there.
    pub continues: bool,
    /// Prompt tokens that are still to be computed there, over all shards; 0 outside kv-aware pools.
    pub prefill_tokens: u64,
}

/// What ties a request to some servers more than to others.
#[derive(Clone, Copy, Debug)]
pub struct Affinity<'a> {
    /// The first eight bytes of the digest of its session's key.
    pub session: Option<u64>,
    /// The memory that was asked who holds the beginning of its prompt.
    pub memory: &'a PrefixMemory,
    /// Where earlier prompts ended.
    pub ends: &'a Ends,
    /// What it says to Stargate's algorithms.
    pub input: Input<'a>,
    /// Its prompt's full blocks; none when the memory was not asked.
    pub blocks: &'a [u64],
}

/// A choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub backend: BackendId,
    pub slot: u16,
    /// The wheel moved: peers have to hear of it, and the choice can be undone.
    pub turned: bool,
    /// The algorithm that chose: the pool's own, or the one it falls back to.
    pub by: Algorithm,
}

/// A load-balancing algorithm. Without state of its own: what it remembers is the group's wheel.
pub trait Policy {
    /// One of `candidates`, which are never empty and in the group's order. May reorder them. O(candidates), no allocation.
    fn choose(&self, wheel: &mut Wheel, candidates: &mut [Candidate]) -> Choice;
}
