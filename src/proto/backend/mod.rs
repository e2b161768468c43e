//! Servers as a shard knows them.

pub mod bench;
pub mod catalog;
pub mod grouping;
pub mod prefix_memory;
pub mod rates;
pub mod table;
