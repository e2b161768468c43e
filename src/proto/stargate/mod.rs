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
//! | `table`, `live`, `estimator` | what is known of every slot: reports, scrapes, live requests by priority and phase, measured rates |
//! | `queue_times`, `by_priority` | how long each priority waits |
//! | `aggregate`, `target` | slots together as clusters, and the clusters of a target |
//! | `flight`, `waiting`, `retry` | a request on its way: what it asked, how it waits, where it may go after a setback |
//! | `figures` | what is counted |
//! | `notice` | what is said of a request for the log |
//! | `expressions` | what routing expressions came to, for each routing key and model |
//! | `balancer` | one algorithm at work for one target: a request and the target's clusters in, a choice out |
//! | `choose` | the six algorithms |
//! | `estimate`, `admission` | times and scores of a cluster; how much input work is too much |
//! | `hash`, `members`, `ring`, `keys`, `ranking` | affinity: where keys lie, and what is remembered of that |
//! | `random` | seeded random numbers |
//!
//! *Source*: the Stargate rules.

pub mod admission;
pub mod aggregate;
pub mod balancer;
pub mod by_priority;
pub mod choose;
pub mod estimate;
pub mod estimator;
pub mod expressions;
pub mod figures;
pub mod flight;
pub mod hash;
pub mod keys;
pub mod layout;
pub mod live;
pub mod members;
pub mod notice;
pub mod queue_times;
pub mod random;
pub mod ranking;
pub mod request;
pub mod retry;
pub mod ring;
pub mod stats;
pub mod table;
pub mod target;
pub mod target_router;
pub mod waiting;
