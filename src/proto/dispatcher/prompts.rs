//! What a shard believes of prompts: where they went, what is still to be computed of them, what engines say of them.
//!
//! *Invariant*: each placed prompt is counted as work until [`Dispatcher::handle_prefilled`], once.
//! *Bound and cost*: O(blocks) per prompt and touch without allocation; the rest O(1).
//! *Source*: the Lifeboat rules, sections 5.5 and 5.7.

use super::Dispatcher;
use crate::clock::Nanos;
use crate::proto::backend::prefix_memory::{
    MemoryFigures, NARROWED_MAX, Stamp, Touch, TouchKind, TouchStage,
};
use crate::proto::backend::rates::Published;
use crate::proto::ids::{BackendId, ClientId, GroupId, ShardId};

/// Blocks by which report and belief may differ and be the same: engines cache in blocks of their own size, and compute the
/// last token anyway. Or an eighth of what was believed.
const REPORT_APART_BLOCKS: u32 = 4;

/// How long a report that changed a server's memory is the last one.
const REPORT_PAUSE_MS: u64 = 1_000;

/// The prompt of a placed request.
#[derive(Clone, Copy, Debug)]
pub struct Prompted<'a> {
    /// Whom its blocks are charged to.
    pub client: ClientId,
    /// Identities of its full blocks, in order.
    pub blocks: &'a [u64],
    /// Its length, estimated.
    pub tokens: u64,
}

/// What is believed of a placed prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Belief {
    /// Leading blocks that the server held before.
    pub matched: u32,
    /// Tokens that are to be computed.
    pub work_tokens: u64,
}

impl Dispatcher {
    /// A request of this shard was placed on that server of a kv-aware group, with that prompt of about `tokens` tokens:
    /// it is remembered, and counted as work, which ends with [`Dispatcher::handle_prefilled`]. Among several shards all have to
    /// hear of it as a touch, this one too.
    pub fn handle_prompt(
        &mut self,
        now: Nanos,
        group: GroupId,
        backend: BackendId,
        prompt: &Prompted<'_>,
    ) -> Belief {
        let matched = match self.shards {
            1 => {
                let stamp = Stamp { at: now, shard: self.me };
                self.memory.record(stamp, backend, prompt.client, prompt.blocks)
            }
            // Recorded when its touch has settled, as on every shard.
            _ => self.memory.announce(backend, prompt.blocks),
        };
        let blocks = prompt.blocks.len() as u64;
        let held = (prompt.tokens * u64::from(matched)).checked_div(blocks).unwrap_or(0);
        let work_tokens = prompt.tokens - held;
        self.ends.note(prompt.blocks);
        self.router.note_work(group, backend, prompt.blocks.len() as u32, work_tokens);
        self.table.begin_prefill(now, backend, work_tokens);
        Belief { matched, work_tokens }
    }

    /// The server has begun to answer: the prompt's tokens are computed, or nobody waits for them any more. Once for
    /// each [`Dispatcher::handle_prompt`].
    pub fn handle_prefilled(&mut self, now: Nanos, backend: BackendId, work_tokens: u64) {
        self.table.end_prefill(now, backend, work_tokens);
    }

    /// An engine reported that `cached` leading blocks of a prompt came from its cache, where `matched` were believed to. Far fewer:
    /// it holds less than this memory, which therefore forgets its oldest a little sooner from now on, on all shards; far more:
    /// the other way, up to the configured size. The prompt itself stays: the engine has just computed it.
    pub fn handle_report(&mut self, now: Nanos, backend: BackendId, matched: u32, cached: u32) {
        let apart = REPORT_APART_BLOCKS.max(matched / 8);
        // Prompts that share a head and are computed together are all reported as new: that says once what it says.
        if now.since(self.table.row(backend).narrowed_at) < REPORT_PAUSE_MS * 1_000_000 {
            return;
        }
        let narrowed = self.table.narrowed(backend);
        let step = if cached.saturating_add(apart) < matched && narrowed < NARROWED_MAX {
            1
        } else if cached > matched.saturating_add(apart) && narrowed > 0 {
            -1
        } else {
            return;
        };
        self.table.narrow(now, backend, step);
        self.memory.narrow(backend, self.table.narrowed(backend));
    }

    /// Another process serves there, or the same one anew: neither what it held nor what its size was found to be counts.
    pub(super) fn handle_restart(&mut self, now: Nanos, backend: BackendId) {
        self.memory.forget(backend);
        if backend.index() < self.table.len() {
            self.table.narrow(now, backend, -self.table.row(backend).narrowed);
            self.table.row_mut(backend).narrowed_at = Nanos::ZERO;
            let me = self.me;
            self.table.rate(backend, |rates| {
                rates.restart(me, backend);
                false
            });
            self.memory.narrow(backend, self.table.narrowed(backend));
        }
    }

    /// A request of this shard was placed on that server of a group that measures, with about `tokens` tokens of input: counted
    /// as work until [`Dispatcher::handle_read`], once.
    pub fn handle_input(&mut self, now: Nanos, backend: BackendId, tokens: u64) {
        self.table.note_change(backend);
        self.table.begin_prefill(now, backend, tokens);
    }

    /// The server has begun to answer, or nobody waits for it any more.
    pub fn handle_read(&mut self, now: Nanos, backend: BackendId, tokens: u64) {
        self.table.note_change(backend);
        self.table.end_prefill(now, backend, tokens);
    }

    /// A completed request was read at that rate, in tokens per second.
    pub fn handle_sample(&mut self, backend: BackendId, tps: f64) {
        let me = self.me;
        self.table.rate(backend, |rates| rates.note(me, backend, tps));
    }

    /// Requests whose input a server still has to read, and its tokens, over all shards as far as heard.
    pub fn reading(&self, backend: BackendId) -> (u32, u64) {
        self.table.rows().get(backend.index()).map_or((0, 0), |row| {
            (row.prefilling + row.prefilling_peers, row.prefill_tokens + row.prefill_tokens_peers)
        })
    }

    /// How fast a server reads, measured by all shards as far as heard.
    pub fn rate(&self, backend: BackendId) -> Published {
        if backend.index() < self.table.len() { self.table.rates().of(backend) } else { Published::default() }
    }

    /// A touch of any shard.
    pub fn handle_touch(&mut self, from: ShardId, stage: TouchStage, touch: &Touch<'_>) {
        if stage == TouchStage::Arrived && matches!(touch.kind, TouchKind::Recorded(_)) {
            self.ends.note(touch.blocks);
        }
        self.memory.hear(from, stage, touch);
    }

    /// What this shard remembers of a server's prompts.
    pub fn memory(&self, backend: BackendId) -> MemoryFigures {
        self.memory.figures(backend)
    }
}
