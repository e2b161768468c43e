//! What one shard tells the others of each dispatch, so that their replicas follow.
//!
//! Everything is told, also when nothing is new: how recent a block is and whom it is charged to must follow, not only that it
//! is there.

use crate::clock::Nanos;
use crate::limits::TOUCH_BLOCKS_MAX;
use crate::proto::ids::{BackendId, ClientId, ShardId};

use super::{PrefixMemory, Stamp};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TouchKind {
    /// The prompt was sent to the server.
    Recorded,
    /// The server turned out not to hold these blocks.
    Dropped,
}

/// A prompt's blocks on a server. Peers are told of the first [`TOUCH_BLOCKS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch<'a> {
    pub kind: TouchKind,
    /// When the prompt was dispatched, also for [`TouchKind::Dropped`]. With the telling shard it is the stamp.
    pub at: Nanos,
    pub backend: BackendId,
    /// Whom the prompt is charged to; nothing for [`TouchKind::Dropped`].
    pub client: ClientId,
    /// The prompt's blocks from its first on, or those that were dropped.
    pub blocks: &'a [u64],
}

impl Touch<'_> {
    /// The blocks that are told.
    pub fn told(&self) -> &[u64] {
        &self.blocks[..self.blocks.len().min(TOUCH_BLOCKS_MAX)]
    }
}

impl PrefixMemory {
    /// Applies a peer's touch. Touches may come in any order, but those of one shard in its own.
    pub fn hear(&mut self, from: ShardId, touch: &Touch) {
        let stamp = Stamp { at: touch.at, shard: from };
        match touch.kind {
            TouchKind::Recorded => {
                self.record(stamp, touch.backend, touch.client, touch.blocks);
            }
            TouchKind::Dropped => self.drop_tail(stamp, touch.backend, touch.blocks, 0),
        }
    }
}
