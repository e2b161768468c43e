//! This shard's replica of the requests that live in every slot: its own, exact, and those of each peer as last heard.

/// Requests of one shard and one priority in a slot, by phase, and their input tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Sent, not answered yet.
    pub pending: u32,
    /// Response head received, no output yet.
    pub prefill: u32,
    /// First output seen.
    pub decode: u32,
    pub pending_tokens: u64,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
}

/// The part of one shard's requests of one priority in a slot that some report does not cover yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Since {
    /// Reports of the slot that the sender had handled; its figures since an earlier one are void.
    pub reports: u32,
    /// Live requests sent since that report, and their input tokens.
    pub requests: u32,
    pub tokens: u64,
    /// Answers of the engine's own metrics that the sender had handled.
    pub scrapes: u32,
    /// Live requests sent since the engine was last asked.
    pub since_scrape: u32,
}
