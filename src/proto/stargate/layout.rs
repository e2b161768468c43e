//! Which servers serve which models to whom, as the control thread has it: configured servers and registrations.
//!
//! *Invariant*: a [`SlotId`] indexes [`Layout::slots`], which only grows; a slot keeps its server and its model for the life of the
//! process. A registration that comes back under the same id, URL and cluster takes its slots up again.
//! *Source*: the Stargate rules, sections 6.6 and 6.7; the configuration reference.

use crate::proto::ids::BackendId;

/// What one server does for one model: index into [`Layout::slots`], the same on every shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

impl SlotId {
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// See [`SlotId`].
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    pub backend: BackendId,
    /// The server's name: servers of a cluster take turns in its order.
    pub server: Box<str>,
    /// Exact model id.
    pub model: Box<str>,
    /// Capacity domain; the server's name where nothing else is set. Never empty.
    pub cluster_id: Box<str>,
    /// The routing keys that it serves; empty: requests without one.
    pub routing_keys: Vec<Box<str>>,
    /// A live registration or the configuration lists the model for it, in any status.
    pub advertised: bool,
    /// Its status there is ACTIVE. Whether the server is up is another matter.
    pub active: bool,
    /// Fixed input rate in tokens per second; 0: as reported or measured.
    pub input_tps: f64,
    /// Concurrent requests of the engine as configured; 0: unknown.
    pub max_concurrency: u64,
}

/// All slots of the process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// By [`SlotId`].
    pub slots: Vec<Slot>,
}
