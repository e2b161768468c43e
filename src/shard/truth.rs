//! What an engine reported about a prompt, against what was believed.
//!
//! *Bound and cost*: once per answer whose engine reported; O(1).
//! *Source*: the Lifeboat rules, section 5.7.

use super::asked::Asked;
use super::state::Shard;
use crate::proto::account::usage::Usage;
use crate::proto::dispatcher::Belief;
use crate::proto::ids::BackendId;

/// Learns from the report of `backend`'s engine. `blocks`: full blocks of the prompt.
pub fn heed(shard: &Shard, asked: &Asked, backend: BackendId, belief: Belief, blocks: usize, usage: &Usage) {
    asked.learn(&mut shard.calibrations.borrow_mut(), usage);
    let (Some(prompt), Some(cached)) = (usage.prompt_tokens, usage.cached_tokens) else { return };
    let mut figures = shard.figures.borrow_mut();
    let counts = &mut figures.server(backend).prefix;
    // The engine's own count of the prompt, by the part of its blocks that was matched.
    let predicted = (prompt * u64::from(belief.matched)).checked_div(blocks as u64).unwrap_or(0);
    counts.reported_prompt_tokens += prompt;
    counts.reported_cached_tokens += cached;
    counts.predicted_cached_tokens += predicted;
    drop(figures);
    if prompt > 0 && blocks > 0 {
        let cached_blocks = cached.min(prompt).saturating_mul(blocks as u64) / prompt;
        let mut dispatcher = shard.dispatcher.borrow_mut();
        dispatcher.handle_report(shard.now(), backend, belief.matched, cached_blocks as u32);
    }
}
