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
//! | `expressions` | what routing expressions came to, for each routing key and model |
//! | `balancer` | one algorithm at work for one target: a request and the target's clusters in, a choice out |
//! | `choose` | the six algorithms |
//! | `estimate`, `admission` | times and scores of a cluster; how much input work is too much |
//! | `hash`, `members`, `ring`, `keys`, `ranking` | affinity: where keys lie, and what is remembered of that |
//! | `random` | seeded random numbers |
//!
//! *Source*: the Stargate rules.

pub mod admission;
pub mod balancer;
pub mod choose;
pub mod estimate;
pub mod expressions;
pub mod hash;
pub mod keys;
pub mod layout;
pub mod members;
pub mod random;
pub mod ranking;
pub mod request;
pub mod ring;
pub mod stats;
