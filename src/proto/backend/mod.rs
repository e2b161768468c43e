//! Servers as a shard knows them.

pub mod catalog;
pub mod grouping;
pub mod table;
