//! Small names for things that every shard numbers alike.

/// A server: its index in the catalog, the same on every shard. Never reused while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendId(pub u16);

/// A shard: 0 is the home of the permit ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardId(pub u8);

/// A set of candidates that some model may be sent to, numbered by the control thread; ids only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// A pool: its index in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u16);

/// A request that waits for a permit, named by the shard that holds its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u32);

/// Whom prompts are charged to: a digest of the session id, the API key or the peer's address. Never the thing itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

impl BackendId {
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
impl ShardId {
    pub const HOME: ShardId = ShardId(0);
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
impl GroupId {
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
impl PoolId {
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
