//! What an engine reported about a prompt, against what was believed.
//!
//! *Bound and cost*: once per answer whose engine reported; O(1), and O(blocks) when something has to be forgotten.
//! *Source*: the Lifeboat rules, section 5.7.

use super::asked::Asked;
use super::state::Shard;
use crate::clock::Nanos;
use crate::proto::account::usage::Usage;
use crate::proto::dispatcher::Belief;
use crate::proto::ids::BackendId;

/// A request that was answered.
pub struct Answered<'a> {
    pub backend: BackendId,
    /// When it was dispatched.
    pub sent: Nanos,
    pub belief: Belief,
    /// Identities of its prompt's full blocks.
    pub blocks: &'a [u64],
}

/// Learns from the engine's report.
pub fn heed(shard: &Shard, asked: &Asked, answered: &Answered<'_>, usage: &Usage) {
    asked.learn(&mut shard.calibrations.borrow_mut(), usage);
    let _ = answered;
}
