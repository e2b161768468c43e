//! The catalog: servers, pools, and which servers may take which model.
//!
//! The control thread builds it from the configuration and from what engines list at `/v1/models`, and hands each shard
//! its own copy. A change makes a new version; ids keep their meaning for the life of the process.
//!
//! A request's model and tier name a [`Route`]; its estimated input tokens pick one of the route's groups.
//!
//! *Invariant*: `BackendId`, `PoolId` and `GroupId` index `servers`, `pools` and `groups`; all three only grow. Routes are
//! numbered anew with every version.
//! *Cost*: finding a route is one hash lookup and a scan of the tiers that have the model; finding its group a scan of its
//! few token classes. Neither allocates.
//! *Source*: the Lifeboat rules, sections 1 to 3.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::proto::config::lb_config::{Entry, Method, MethodSettings};
use crate::proto::ids::{BackendId, GroupId, PoolId};
use crate::proto::stargate::layout::Layout;

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
    /// The last non-zero weight of its life, 1 where it never had one: what sticky keys are spread by, so that a drained
    /// server keeps its keys.
    pub affinity_weight: f64,
    /// In-flight ceiling over all shards; 0: none.
    pub max_concurrency: u32,
    /// Longest input it takes, in estimated tokens; 0: any.
    pub max_input_tokens: u32,
    /// The sub-pool it is isolated in; empty for most.
    pub tier: Box<str>,
    /// Prefix blocks its engine's cache is taken to hold, at least 1: as the engine says, else as its pool is configured,
    /// else [`KV_CAPACITY_BLOCKS`].
    pub kv_capacity_blocks: u32,
    /// Sent to the engine as `Authorization: Bearer …` instead of the caller's; `None`: the caller's passes.
    pub api_key: Option<Box<str>>,
    /// Models served; `None` until the engine has answered, empty for "every model".
    pub models: Option<Vec<Box<str>>>,
    /// It has registered itself: only trusted listeners use it. It is in no pool, and no group, route or list of models of
    /// other listeners knows it.
    pub registered: bool,
    /// Capacity domain, which Stargate's algorithms choose; the server's name where nothing else is set.
    pub cluster_id: Box<str>,
    /// Input tokens per second, fixed; 0: measured.
    pub input_tps: f64,
    /// Gone from the configuration, or no longer registered; kept so that ids stay.
    pub removed: bool,
}

impl Server {
    /// Whether pools and untrusted listeners may use it.
    pub const fn is_pooled(&self) -> bool {
        !self.removed && !self.registered
    }
}

/// The load-balancing algorithm of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    WeightedRoundRobin,
    LeastConnections,
    StickySession,
    KvAware,
    /// One of Stargate's, with the pool's [`Pool::entry`].
    Stargate(Method),
    /// No pool's own: where a kv-aware pool sends what no match decides for, if it has [`Miss::LeastBusy`].
    LeastBusy,
}

impl Algorithm {
    /// Header value, configuration value.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::WeightedRoundRobin => "weighted-round-robin",
            Algorithm::LeastConnections => "least-connections",
            Algorithm::StickySession => "sticky-session",
            Algorithm::KvAware => "kv-aware",
            Algorithm::Stargate(method) => method.name(),
            Algorithm::LeastBusy => "least-busy",
        }
    }

    /// What decides where this algorithm has no preference, or it cannot be followed; see [`KvRules::miss`] too.
    pub const fn fallback(self) -> Algorithm {
        match self {
            Algorithm::KvAware => Algorithm::WeightedRoundRobin,
            Algorithm::StickySession | Algorithm::Stargate(Method::Pulsar | Method::PulsarWaitAndWiden) => {
                Algorithm::LeastConnections
            }
            own => own,
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

/// Prefix blocks of a server whose engine and configuration say nothing.
pub const KV_CAPACITY_BLOCKS: u32 = 65_536;
/// Most prefix blocks that one server may be taken to hold.
pub const KV_CAPACITY_BLOCKS_MAX: u32 = 16 << 20;

/// Where a kv-aware pool sends what no match decides for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// In proportion to weight, as if the pool were a weighted-round-robin one.
    WeightedRoundRobin,
    /// Where the least prompt work waits and the fewest requests run, relative to weight.
    LeastBusy,
}

/// How a kv-aware pool matches prompts. The Lifeboat rules, section 5.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvRules {
    /// Prompt bytes per block, 64 to 65,536.
    pub block_bytes: u32,
    /// Fewer leading blocks than this are no useful match.
    pub min_match_blocks: u32,
    /// How far above the least load a server may be and still count as least busy: requests per unit of weight …
    pub affinity_slack_abs: f64,
    /// … or this part of the least load, whichever is more.
    pub affinity_slack_rel: f64,
    /// Blocks per server where its engine does not say; 0: [`KV_CAPACITY_BLOCKS`].
    pub kv_capacity_blocks: u32,
    /// Where requests without a match worth following go.
    pub miss: Miss,
}

impl Default for KvRules {
    fn default() -> Self {
        KvRules {
            block_bytes: 256,
            min_match_blocks: 2,
            affinity_slack_abs: 12.0,
            affinity_slack_rel: 1.0,
            kv_capacity_blocks: 0,
            miss: Miss::WeightedRoundRobin,
        }
    }
}

impl KvRules {
    /// What a server is taken to hold: as its engine says, else as configured, else [`KV_CAPACITY_BLOCKS`].
    pub fn capacity_blocks(&self, engine: Option<u32>) -> u32 {
        let configured = (self.kv_capacity_blocks > 0).then_some(self.kv_capacity_blocks);
        engine.or(configured).unwrap_or(KV_CAPACITY_BLOCKS).clamp(1, KV_CAPACITY_BLOCKS_MAX)
    }
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
    /// Read where `algorithm` is [`Algorithm::KvAware`].
    pub kv: KvRules,
    /// Where `algorithm` is [`Algorithm::Stargate`], that method with its settings. Nothing in them waits: waiting is the queue's
    /// business.
    pub entry: Option<Box<Entry>>,
}

impl Pool {
    /// Its algorithm keeps what belongs together on one cluster, told by an affinity key.
    pub fn wants_affinity(&self) -> bool {
        match (self.algorithm, self.entry.as_deref()) {
            (Algorithm::Stargate(Method::Pulsar | Method::PulsarWaitAndWiden), _) => true,
            (Algorithm::Stargate(_), Some(Entry { method: MethodSettings::WaitAndWiden(rules), .. })) => {
                rules.group > 0
            }
            _ => false,
        }
    }

    /// Its algorithm goes by how long input is, and how fast and how long servers read it.
    pub const fn measures(&self) -> bool {
        match self.algorithm {
            Algorithm::Stargate(method) => !matches!(method, Method::RoundRobin | Method::Random),
            _ => false,
        }
    }
}

/// The candidates of requests, and the pool whose rules apply to them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    /// Servers that may take the request, in configuration order; never empty.
    pub candidates: Vec<BackendId>,
    /// All servers of the model in this tier, whatever input they admit, in configuration order: what session keys are
    /// hashed over, so that a long request does not move a session's short ones.
    pub members: Vec<BackendId>,
    /// Index into [`Catalog::pools`]. The members' own pool if they share one; else the built-in pool `mixed`, or one
    /// named after the only, standalone, member.
    pub pool: PoolId,
    /// The tier of every member.
    pub tier: Box<str>,
    /// What responses call it: the pool's name, or `pool/tier`.
    pub label: Box<str>,
}

/// Index into [`Catalog::routes`], of one version of the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteId(pub u32);

/// Where requests for some models go in one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub tier: Box<str>,
    /// The pool of all its groups.
    pub pool: PoolId,
    /// By rising limit; never empty. The first admits every member.
    pub classes: Vec<TokenClass>,
}

/// Requests up to a length, and who takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenClass {
    /// Estimated input tokens, at most; `u64::MAX`: any number.
    pub tokens_max: u64,
    pub group: GroupId,
}

impl Route {
    /// A route with one group, for any input.
    pub fn to(group: GroupId, pool: PoolId) -> Route {
        Route { tier: "".into(), pool, classes: vec![TokenClass { tokens_max: u64::MAX, group }] }
    }

    /// The group of an input of so many tokens (0: unknown). `None`: longer than every member admits.
    pub fn group(&self, tokens: u64) -> Option<GroupId> {
        self.classes.iter().find(|class| tokens <= class.tokens_max).map(|class| class.group)
    }

    /// The group of all members.
    pub fn widest(&self) -> GroupId {
        self.classes[0].group
    }
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Catalog {
    /// Grows with every change.
    pub version: u64,
    pub servers: Vec<Server>,
    pub pools: Vec<Pool>,
    pub groups: Vec<Group>,
    pub routes: Vec<Route>,
    /// Model name, as it stands in a request, to its routes, one per tier with a server that lists it.
    pub models: HashMap<Box<[u8]>, Vec<RouteId>>,
    /// Requests whose model no server of their tier lists: per tier, the servers that serve every model.
    pub unlisted: Vec<RouteId>,
    /// Requests that name no model: per tier, every server.
    pub unnamed: Vec<RouteId>,
    /// Some server has not yet said what it serves: an unknown model may be on it.
    pub learning: bool,
    /// Some route's pool is kv-aware: prompts are worth reading.
    pub has_kv_pools: bool,
    /// [`KvRules::block_bytes`] of the first such pool.
    pub kv_block_bytes: u32,
    /// Some route's pool is sticky-session.
    pub has_sticky_pools: bool,
    /// Some route's pool [`Pool::measures`]: prompts are worth reading.
    pub has_measured_pools: bool,
    /// Some server has a [`Server::max_input_tokens`]: tokens are worth estimating.
    pub has_token_limits: bool,
    /// What servers and registrations serve on trusted listeners.
    pub stargate: Layout,
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

    /// The route of a model as named in the request (`None`: it names none) in a tier (empty: none named). `None`: nobody
    /// serves that model in that tier.
    pub fn route(&self, model: Option<&[u8]>, tier: &[u8]) -> Option<&Route> {
        let Some(model) = model else { return self.route_in(&self.unnamed, tier) };
        let listed = self.models.get(model).and_then(|routes| self.route_in(routes, tier));
        listed.or_else(|| self.route_in(&self.unlisted, tier))
    }

    fn route_in(&self, routes: &[RouteId], tier: &[u8]) -> Option<&Route> {
        routes.iter().map(|id| &self.routes[id.0 as usize]).find(|route| route.tier.as_bytes() == tier)
    }

    /// Whether some server of any tier serves that model, as far as is known.
    pub fn knows(&self, model: &[u8]) -> bool {
        !self.unlisted.is_empty() || self.models.contains_key(model)
    }

    /// Whether some server is in that tier.
    pub fn has_tier(&self, tier: &[u8]) -> bool {
        self.route_in(&self.unnamed, tier).is_some()
    }

    /// The groups that some request can resolve to; some more than once.
    pub fn groups_in_use(&self) -> impl Iterator<Item = GroupId> {
        self.routes.iter().flat_map(|route| &route.classes).map(|class| class.group)
    }
}
