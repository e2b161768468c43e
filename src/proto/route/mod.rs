//! Which server gets a request, and why.
//!
//! [`router`] knows the candidates of each group ([`group`]) and shows the eligible ones with room to the pool's algorithm; each
//! algorithm ([`policy::Policy`]) is one file. [`wheel`] is the smooth wheel that they share, [`roster`] who has
//! room and how busy all are, [`tournament`] what both rank servers with. [`chooser`] is how Stargate's algorithms, which choose
//! among clusters, come to choose servers.

pub mod balance;
pub mod chooser;
pub mod group;
pub mod kv_aware;
pub mod least_busy;
pub mod least_connections;
pub mod policy;
pub mod roster;
pub mod router;
pub mod sticky_session;
pub mod tournament;
pub mod weighted_round_robin;
pub mod wheel;
