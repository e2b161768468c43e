//! The catalog: servers, pools, and which servers may take which model.
//!
//! The control thread builds it from the configuration and from what engines list at `/v1/models`, and hands each shard
//! its own copy. A change makes a new version; ids keep their meaning for the life of the process.
//!
//! *Invariant*: `BackendId`, `PoolId` and `GroupId` index `servers`, `pools` and `groups`; all three only grow.
//! *Cost*: resolving a model is one hash lookup.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::proto::ids::{BackendId, GroupId, PoolId};

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// One engine endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Server {
    /// Unique; header value and metric label.
    pub name: Box<str>,
    /// As configured, for people.
    pub url: Box<str>,
    /// `None` while its host name does not resolve: not eligible.
    pub address: Option<Address>,
    /// Value of the `Host` header sent to it.
    pub host: Box<str>,
    /// Path in front of every target, without a trailing slash; empty for most.
    pub base_path: Box<str>,
    /// `None`: standalone.
    pub pool: Option<PoolId>,
    /// Share of traffic, finite and ≥ 0; 0 drains.
    pub weight: f64,
    /// `weight` in its shortest decimal form, as the header shows it.
    pub weight_text: Box<str>,
    /// In-flight ceiling over all shards; 0: none.
    pub max_concurrency: u32,
    /// Sent to the engine as `Authorization: Bearer …` instead of the caller's; `None`: the caller's passes.
    pub api_key: Option<Box<str>>,
    /// Models served; `None` until the engine has answered, empty for "every model".
    pub models: Option<Vec<Box<str>>>,
    /// Gone from the configuration; kept so that ids stay.
    pub removed: bool,
}

/// The load-balancing algorithm of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    WeightedRoundRobin,
    LeastConnections,
}

impl Algorithm {
    /// Header value, configuration value.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::WeightedRoundRobin => "weighted-round-robin",
            Algorithm::LeastConnections => "least-connections",
        }
    }
}

/// What a pool does when no eligible candidate has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutingMode {
    /// Wait, first come first served.
    Queue,
    /// Answer 503 at once.
    Reject,
    /// Ceilings are ignored.
    Unlimited,
}

/// A named group of servers with one algorithm and one routing mode.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    pub name: Box<str>,
    pub algorithm: Algorithm,
    pub routing_mode: RoutingMode,
    /// Requests that may wait at once, over all shards.
    pub queue_size: u32,
    /// How long one may wait, in milliseconds.
    pub queue_timeout_ms: u64,
}

/// The candidates of a model, and the pool whose rules apply to them.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Servers that may take the request, in configuration order; never empty.
    pub candidates: Vec<BackendId>,
    /// Index into [`Catalog::pools`]. The candidates' own pool if they share one; else the built-in pool `mixed`, or one
    /// named after the only, standalone, candidate.
    pub pool: PoolId,
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Catalog {
    /// Grows with every change.
    pub version: u64,
    pub servers: Vec<Server>,
    pub pools: Vec<Pool>,
    pub groups: Vec<Group>,
    /// Model name, as it stands in a request, to the servers that list it.
    pub models: HashMap<Box<[u8]>, GroupId>,
    /// Requests whose model no server lists: the servers that serve every model.
    pub unlisted: Option<GroupId>,
    /// Requests that name no model: every server.
    pub unnamed: Option<GroupId>,
    /// Some server has not yet said what it serves: an unknown model may be on it.
    pub learning: bool,
    /// The answer to `GET /v1/models`: union over live servers, JSON.
    pub models_body: Box<[u8]>,
}

impl Catalog {
    pub fn server(&self, id: BackendId) -> &Server {
        &self.servers[id.index()]
    }
    pub fn group(&self, id: GroupId) -> &Group {
        &self.groups[id.index()]
    }
    pub fn pool(&self, id: PoolId) -> &Pool {
        &self.pools[id.index()]
    }
}
