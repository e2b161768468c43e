//! What this shard counts: plain integers, added up by the control thread.

use crate::proto::error::Rejection;
use crate::proto::ids::BackendId;
use crate::proto::message::UpstreamFault;
use crate::proto::report::{LinkCounts, Times};

/// Per server. In-flight and dispatched counts are the dispatcher's.
#[derive(Clone, Debug, Default)]
pub struct ServerCounts {
    pub statuses: Vec<(u16, u64)>,
    pub retries: u64,
    pub faults: [u64; UpstreamFault::ALL.len()],
    pub prefix: PrefixCounts,
    pub links: LinkCounts,
}

/// What was believed of prompts, and what engines said of them. As in [`crate::proto::report::ServerFigures`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefixCounts {
    pub matched_blocks: u64,
    pub total_blocks: u64,
    pub reported_prompt_tokens: u64,
    pub reported_cached_tokens: u64,
    pub predicted_cached_tokens: u64,
}

/// Per shard.
#[derive(Debug, Default)]
pub struct Figures {
    pub connections: u32,
    pub accepted: u64,
    pub active: u32,
    pub finished: u64,
    pub client_aborts: u64,
    pub notices_dropped: u64,
    pub rejections: [u64; Rejection::ALL.len()],
    pub servers: Vec<ServerCounts>,
    pub queue_wait: Times,
    pub first_token: Times,
    pub overhead: Times,
}

impl Figures {
    pub fn server(&mut self, backend: BackendId) -> &mut ServerCounts {
        let index = backend.index();
        if self.servers.len() <= index {
            self.servers.resize_with(index + 1, ServerCounts::default);
        }
        &mut self.servers[index]
    }

    /// Counts an answer. Few statuses occur, so a short list beats a table.
    pub fn answered(&mut self, backend: BackendId, status: u16) {
        let statuses = &mut self.server(backend).statuses;
        match statuses.iter_mut().find(|(s, _)| *s == status) {
            Some((_, count)) => *count += 1,
            None => statuses.push((status, 1)),
        }
    }
}
