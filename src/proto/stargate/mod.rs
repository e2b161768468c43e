//! Stargate's contract: targets, clusters, six algorithms chosen by `lb-config.json`, waiting, retries.
//!
//! A *target* is a routing key (empty: none) and a model. A *cluster* is a capacity domain of one or more servers; algorithms choose a
//! cluster, then the servers of it take turns. What is known of a server for one model stands in its *slot*.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `layout` | which servers serve what: from the control thread, as part of the catalog |
//! | `stats` | what is known of a cluster, and what a server reports |
//! | `request` | what a request asks, and what it is told |
//! | `target_router` | one shard's brain, which ties the rest together |
//! | `live` | requests in every slot, by priority and phase, over all shards |
//! | `figures` | what is counted |
//! | `notice` | what is said of a request for the log |
//! | `expressions` | what routing expressions came to, for each routing key and model |
//!
//! *Source*: the Stargate rules.

pub mod expressions;
pub mod figures;
pub mod layout;
pub mod live;
pub mod notice;
pub mod request;
pub mod stats;
pub mod target_router;
