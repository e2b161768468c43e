//! What an engine reported about a prompt, against what was believed.
//!
//! *Bound and cost*: once per answer whose engine reported; O(1).
//! *Source*: the Lifeboat rules, section 5.7.

use super::asked::Asked;
use super::state::Shard;
use crate::proto::account::usage::Usage;
use crate::proto::dispatcher::Belief;
use crate::proto::ids::BackendId;

/// More tokens than any prompt has: what an engine says is not believed beyond.
const TOKENS_MAX: u64 = 1 << 40;

/// Learns from the report of `backend`'s engine. `belief`: of the prompt, whose full blocks are `blocks`; `None` outside
/// kv-aware pools, where only the length of tokens is learnt.
pub fn heed(
    shard: &Shard,
    asked: &Asked,
    backend: BackendId,
    belief: Option<Belief>,
    blocks: usize,
    usage: &Usage,
) {
    let known = |tokens: Option<u64>| tokens.filter(|tokens| *tokens <= TOKENS_MAX);
    let Some(prompt) = known(usage.prompt_tokens) else { return };
    asked.learn(&mut shard.calibrations.borrow_mut(), prompt);
    let (Some(belief), Some(cached)) = (belief, known(usage.cached_tokens)) else { return };
    let mut figures = shard.figures.borrow_mut();
    let counts = &mut figures.server(backend).prefix;
    // The engine's own count of the prompt, by the part of its blocks that was matched.
    let predicted = (prompt * u64::from(belief.matched)).checked_div(blocks as u64).unwrap_or(0);
    counts.reported_prompt_tokens += prompt;
    counts.reported_cached_tokens += cached.min(prompt);
    counts.predicted_cached_tokens += predicted;
    drop(figures);
    // An image is one block at most and a thousand tokens: nothing to be told from its share.
    if prompt > 0 && blocks > 0 && asked.is_even() {
        let cached_blocks = cached.min(prompt) * blocks as u64 / prompt;
        let mut dispatcher = shard.dispatcher.borrow_mut();
        dispatcher.handle_report(shard.now(), backend, belief.matched, cached_blocks as u32);
    }
}
