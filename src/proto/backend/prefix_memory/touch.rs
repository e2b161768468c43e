//! What the shards tell each other, and each itself, so that their replicas do the same things in the same order.
//!
//! Everything is told, also when nothing is new: how recent a block is and whom it is charged to must follow, not only that it
//! is there. Eviction depends on the order: which client is most over its share differs by what was in flight, and a client
//! under its share loses nothing afterwards, so what once differed would differ for good (simulated: a sixth of a busy memory). So a
//! shard records a prompt, also its own, only when its touch has settled: when no older one can come any more, and in the order of all
//! shards' stamps. From its arrival on, an own one's from its dispatch on, it is announced: it matches, and changes nothing else.

use crate::clock::Nanos;
use crate::limits::TOUCH_BLOCKS_MAX;
use crate::proto::ids::{BackendId, ClientId, ShardId};

use super::{PrefixMemory, Stamp};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TouchKind {
    /// The prompt was sent to the server, for this client.
    Recorded(ClientId),
    /// The server turned out not to hold these blocks of a prompt dispatched at this time.
    Dropped(Nanos),
}

/// A touch comes twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TouchStage {
    /// As soon as it is there, from peers only.
    Arrived,
    /// In its turn.
    Settled,
}

/// Something about a prompt's blocks on a server. The first [`TOUCH_BLOCKS_MAX`] are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch<'a> {
    pub kind: TouchKind,
    /// The time of telling: of the dispatch, or of the answer that showed it. With the shard that tells it is the stamp.
    pub at: Nanos,
    pub backend: BackendId,
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
    /// Takes in a touch of any shard. For replicas to agree, those that have settled come in the order of their stamps; one that comes
    /// late still finds its place, only what was evicted in between may differ.
    pub fn hear(&mut self, from: ShardId, stage: TouchStage, touch: &Touch) {
        match (stage, touch.kind) {
            (TouchStage::Arrived, TouchKind::Recorded(_)) => {
                self.announce(touch.backend, touch.blocks);
            }
            (TouchStage::Arrived, TouchKind::Dropped(_)) => {}
            (TouchStage::Settled, TouchKind::Recorded(client)) => {
                self.record(Stamp { at: touch.at, shard: from }, touch.backend, client, touch.blocks);
            }
            (TouchStage::Settled, TouchKind::Dropped(at)) => {
                self.drop_blocks(Stamp { at, shard: from }, touch.backend, touch.blocks);
            }
        }
    }
}
