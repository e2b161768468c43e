//! How many requests at once, and who waits.
//!
//! Ceilings hold over all shards because permits are leases: the home shard's [`ledger`] gives each server's permits out to
//! shards, and their sum is the ceiling by construction. Who finds none waits in the home's [`queue`], first come first
//! served over all shards. Each shard keeps its own waiting requests in [`tickets`].

pub mod ledger;
pub mod queue;
pub mod tickets;
