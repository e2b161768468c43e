//! The shards' figures added up: what `/metrics` and `/admin/v1/state` show.
//!
//! *Invariant*: pure; a shard that has not answered yet adds nothing, one that is late adds its last answer.
//! *Bound and cost*: O(servers × shards), off the request path.

use std::collections::BTreeMap;

use super::targets::Targets;
use crate::proto::account::drift::Drift;
use crate::proto::backend::catalog::{Catalog, RoutingMode};
use crate::proto::backend::grouping::MIXED;
use crate::proto::backend::prefix_memory::MemoryFigures;
use crate::proto::error::Rejection;
use crate::proto::ids::{BackendId, ClientId};
use crate::proto::message::UpstreamFault;
use crate::proto::report::{ShardReport, Times};

/// What the control thread knows of a server beyond the catalog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// By the active checks.
    pub up: bool,
    /// Left out after failures in a row.
    pub benched: bool,
}

/// One server over all shards. The order of the rows is the catalog's.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerRow {
    pub id: BackendId,
    pub name: Box<str>,
    pub url: Box<str>,
    /// Name of its pool; its own name where it stands alone.
    pub pool: Box<str>,
    /// Index into [`Figures::pools`]; `None`: standalone.
    pub pool_index: Option<usize>,
    /// One word: `up`, `down`, `benched`, `learning`, `unresolved`, `drained`.
    pub state: &'static str,
    pub standing: Standing,
    /// It registered itself.
    pub registered: bool,
    pub weight: f64,
    pub max_concurrency: u32,
    pub max_input_tokens: u32,
    pub tier: Box<str>,
    pub models: Option<Vec<Box<str>>>,
    pub in_flight: u64,
    pub dispatched: u64,
    pub statuses: BTreeMap<u16, u64>,
    pub retries: u64,
    pub faults: [u64; UpstreamFault::ALL.len()],
    pub connections: u64,
    /// Its share of its pool's requests lately, and how far that is from its weight.
    pub drift: Drift,
    pub kv: KvRow,
}

/// What prefixes did for one server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvRow {
    /// Blocks that its engine's cache is taken to hold.
    pub capacity_blocks: u32,
    /// Who says so, one word; `None`: its prefixes are not remembered.
    pub source: Option<&'static str>,
    /// Of the shard whose replica holds most; replicas don't add up.
    pub memory: MemoryFigures,
    /// Of the same shard: the largest owners of blocks, where there are several.
    pub clients: Vec<(ClientId, u32)>,
    pub prefix_matched: u64,
    pub prefix_total: u64,
    pub reported_prompt_tokens: u64,
    pub reported_cached_tokens: u64,
    pub predicted_cached_tokens: u64,
}

/// One pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolRow {
    pub name: Box<str>,
    pub algorithm: &'static str,
    pub routing_mode: &'static str,
    pub queued: u64,
}

/// One shard.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardRow {
    pub shard: usize,
    pub connections: u32,
    pub accepted: u64,
    pub active: u32,
    pub finished: u64,
    pub mesh_lag_ns: u64,
    pub touches_sent: u64,
    pub touches_dropped: u64,
    pub touch_bytes: u64,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Figures {
    pub servers: Vec<ServerRow>,
    pub pools: Vec<PoolRow>,
    /// Those that have answered at least once.
    pub shards: Vec<ShardRow>,
    /// By `Rejection as usize`.
    pub rejections: [u64; Rejection::ALL.len()],
    pub client_aborts: u64,
    pub notices_dropped: u64,
    pub queue_wait: Times,
    pub first_token: Times,
    pub overhead: Times,
    /// Of Stargate listeners.
    pub targets: Targets,
}

impl Figures {
    /// Adds up the last report of every shard. `standing` has one entry per server of the catalog.
    pub fn sum(catalog: &Catalog, standing: &[Standing], reports: &[Option<Box<ShardReport>>]) -> Figures {
        let pools = catalog
            .pools
            .iter()
            .map(|pool| PoolRow {
                name: pool.name.clone(),
                algorithm: pool.algorithm.name(),
                routing_mode: mode_name(pool.routing_mode),
                queued: 0,
            })
            .collect();
        let servers = catalog.servers.iter().enumerate().filter(|(_, server)| !server.removed).map(
            |(index, server)| {
                let standing = standing.get(index).copied().unwrap_or_default();
                let pool_index = server.pool.map(|pool| pool.index());
                let pool = pool_index.map_or(&server.name, |index| &catalog.pools[index].name);
                let state = if server.address.is_none() {
                    "unresolved"
                } else if !standing.up {
                    "down"
                } else if server.weight == 0.0 {
                    "drained"
                } else if server.models.is_none() {
                    "learning"
                } else if standing.benched {
                    "benched"
                } else {
                    "up"
                };
                ServerRow {
                    id: BackendId(index as u16),
                    name: server.name.clone(),
                    url: server.url.clone(),
                    pool: pool.clone(),
                    pool_index,
                    state,
                    standing,
                    registered: server.registered,
                    weight: server.weight,
                    max_concurrency: server.max_concurrency,
                    max_input_tokens: server.max_input_tokens,
                    tier: server.tier.clone(),
                    models: server.models.clone(),
                    in_flight: 0,
                    dispatched: 0,
                    statuses: BTreeMap::new(),
                    retries: 0,
                    faults: [0; UpstreamFault::ALL.len()],
                    connections: 0,
                    drift: Drift::default(),
                    kv: KvRow { capacity_blocks: server.kv_capacity_blocks, ..KvRow::default() },
                }
            },
        );
        let mut figures = Figures {
            servers: servers.collect(),
            pools,
            shards: Vec::new(),
            rejections: [0; Rejection::ALL.len()],
            client_aborts: 0,
            notices_dropped: 0,
            queue_wait: Times::default(),
            first_token: Times::default(),
            overhead: Times::default(),
            targets: Targets::sum(catalog, reports),
        };
        for report in reports.iter().flatten() {
            figures.add(report);
        }
        figures.hide_idle_mixed(catalog);
        figures
    }

    /// Takes out the built-in pool `mixed` while nothing can be placed or waits in it. Built-in pools come after those that
    /// servers belong to, so their indices stay.
    fn hide_idle_mixed(&mut self, catalog: &Catalog) {
        let Some(index) = catalog.pools.iter().position(|pool| &*pool.name == MIXED) else { return };
        let in_use = catalog.routes.iter().any(|route| route.pool.index() == index);
        if !in_use && self.pools[index].queued == 0 {
            self.pools.remove(index);
        }
    }

    fn add(&mut self, report: &ShardReport) {
        for row in &mut self.servers {
            let Some(server) = report.servers.get(row.id.index()) else { continue };
            row.in_flight += u64::from(server.in_flight);
            row.dispatched += server.dispatched;
            row.retries += server.retries;
            row.connections += u64::from(server.connections);
            for (status, count) in &server.statuses {
                *row.statuses.entry(*status).or_default() += count;
            }
            for (mine, theirs) in row.faults.iter_mut().zip(&server.faults) {
                *mine += theirs;
            }
            row.kv.prefix_matched += server.prefix_matched;
            row.kv.prefix_total += server.prefix_total;
            row.kv.reported_prompt_tokens += server.reported_prompt_tokens;
            row.kv.reported_cached_tokens += server.reported_cached_tokens;
            row.kv.predicted_cached_tokens += server.predicted_cached_tokens;
            if server.memory.held >= row.kv.memory.held {
                row.kv.memory = server.memory;
                row.kv.clients.clone_from(&server.clients);
            }
        }
        for (pool, queued) in self.pools.iter_mut().zip(&report.queued) {
            pool.queued += u64::from(*queued);
        }
        for (mine, theirs) in self.rejections.iter_mut().zip(&report.rejections) {
            *mine += theirs;
        }
        self.client_aborts += report.client_aborts;
        self.notices_dropped += report.notices_dropped;
        self.queue_wait.add(&report.queue_wait);
        self.first_token.add(&report.first_token);
        self.overhead.add(&report.overhead);
        self.shards.push(ShardRow {
            shard: report.shard.index(),
            connections: report.connections,
            accepted: report.accepted,
            active: report.active,
            finished: report.finished,
            mesh_lag_ns: report.mesh_lag_ns,
            touches_sent: report.touches_sent,
            touches_dropped: report.touches_dropped,
            touch_bytes: report.touch_bytes,
        });
    }
}

/// The configuration's word for a routing mode.
const fn mode_name(mode: RoutingMode) -> &'static str {
    match mode {
        RoutingMode::Queue => "queue",
        RoutingMode::Reject => "reject",
        RoutingMode::Unlimited => "unlimited",
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::proto::backend::catalog::{Address, Algorithm, KvRules, Pool, Server};
    use crate::proto::backend::grouping::rebuild_groups;
    use crate::proto::ids::{PoolId, ShardId};
    use crate::proto::report::ServerFigures;

    /// A catalog server on a port of loopback that serves every model.
    pub fn server(name: &str, pool: Option<u16>, weight: f64) -> Server {
        Server {
            name: name.into(),
            url: "http://127.0.0.1:1".into(),
            address: Some(Address::Tcp("127.0.0.1:1".parse().unwrap())),
            host: "127.0.0.1:1".into(),
            base_path: "".into(),
            pool: pool.map(PoolId),
            weight,
            weight_text: weight.to_string().into(),
            affinity_weight: 1.0,
            max_concurrency: 32,
            max_input_tokens: 0,
            tier: "".into(),
            kv_capacity_blocks: 1,
            api_key: None,
            models: Some(Vec::new()),
            registered: false,
            cluster_id: name.into(),
            input_tps: 0.0,
            removed: false,
        }
    }

    pub fn pool(name: &str) -> Pool {
        Pool {
            name: name.into(),
            algorithm: Algorithm::LeastConnections,
            routing_mode: RoutingMode::Queue,
            queue_size: 10,
            queue_timeout_ms: 1000,
            kv: KvRules::default(),
            entry: None,
        }
    }

    /// Two servers in `chat`, one alone, and two shards' reports about them.
    pub fn sample() -> Figures {
        let catalog = Catalog {
            servers: vec![
                server("gpu0", Some(0), 3.0),
                server("gpu1", Some(0), 1.0),
                server("spare", None, 1.0),
            ],
            pools: vec![pool("chat")],
            ..Catalog::default()
        };
        let up = Standing { up: true, benched: false };
        let reports: Vec<_> = (0..2u8)
            .map(|shard| {
                let mut report = ShardReport::new(ShardId(shard));
                report.connections = 5;
                report.active = 2;
                report.finished = 40;
                report.queued = vec![3];
                report.rejections[Rejection::QueueFull as usize] = 4;
                report.client_aborts = 1;
                report.mesh_lag_ns = 1_000_000 * u64::from(shard + 1);
                report.queue_wait.record(20_000);
                report.first_token.record(200_000_000_000);
                let busy = ServerFigures {
                    in_flight: 2,
                    dispatched: 30,
                    statuses: vec![(200, 20), (503, 1)],
                    retries: 1,
                    faults: [2, 0, 0, 0, 0, 0, 1],
                    ..ServerFigures::default()
                };
                let calm =
                    ServerFigures { dispatched: 10, statuses: vec![(200, 10)], ..ServerFigures::default() };
                report.servers = vec![busy, calm];
                Some(Box::new(report))
            })
            .chain([None])
            .collect();
        Figures::sum(&catalog, &[up, Standing { up: true, benched: true }, Standing::default()], &reports)
    }

    #[test]
    fn shards_are_added_up_and_a_silent_one_adds_nothing() {
        let figures = sample();
        let gpu0 = &figures.servers[0];
        assert_eq!((gpu0.in_flight, gpu0.dispatched, gpu0.retries), (4, 60, 2));
        assert_eq!(gpu0.statuses, BTreeMap::from([(200, 40), (503, 2)]));
        assert_eq!(gpu0.faults[UpstreamFault::Connect as usize], 4);
        assert_eq!(figures.pools[0].queued, 6);
        assert_eq!(figures.rejections[Rejection::QueueFull as usize], 8);
        assert_eq!(figures.shards.len(), 2);
        assert_eq!(figures.queue_wait.count(), 2);
        assert_eq!(figures.servers[2].dispatched, 0, "a report older than a server says nothing of it");
    }

    #[test]
    fn the_mixed_pool_shows_while_something_is_in_it() {
        let mut catalog = Catalog {
            servers: vec![server("a", Some(0), 1.0), server("b", None, 1.0)],
            pools: vec![pool("p")],
            ..Catalog::default()
        };
        rebuild_groups(&mut catalog);
        let pools = |catalog: &Catalog, queued: &[u32]| {
            let mut report = ShardReport::new(ShardId(0));
            report.queued = queued.to_vec();
            let figures = Figures::sum(catalog, &[], &[Some(Box::new(report))]);
            figures.pools.iter().map(|pool| pool.name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(pools(&catalog, &[0, 0]), ["p", MIXED]);
        catalog.servers[1].removed = true;
        rebuild_groups(&mut catalog);
        assert_eq!(pools(&catalog, &[0, 1]), ["p", MIXED], "some request still waits there");
        assert_eq!(pools(&catalog, &[1, 0]), ["p"]);
    }

    #[test]
    fn replicas_of_a_memory_are_not_added_up() {
        let catalog = Catalog {
            servers: vec![server("a", Some(0), 1.0)],
            pools: vec![pool("p")],
            ..Catalog::default()
        };
        let report = |shard, held, clients: &[(u64, u32)]| {
            let mut report = ShardReport::new(ShardId(shard));
            let memory = MemoryFigures {
                held,
                capacity: 100,
                clients: clients.len() as u64,
                ..MemoryFigures::default()
            };
            let clients = clients.iter().map(|(id, blocks)| (ClientId(*id), *blocks)).collect();
            report.servers = vec![ServerFigures {
                prefix_matched: 3,
                prefix_total: 5,
                memory,
                clients,
                ..ServerFigures::default()
            }];
            Some(Box::new(report))
        };
        let reports = [report(0, 7, &[(1, 4), (2, 3)]), report(1, 9, &[(2, 5), (1, 4)]), report(2, 8, &[])];
        let kv = &Figures::sum(&catalog, &[Standing::default()], &reports).servers[0].kv;
        assert_eq!((kv.prefix_matched, kv.prefix_total), (9, 15));
        assert_eq!((kv.memory.held, kv.memory.clients), (9, 2));
        assert_eq!(kv.clients, [(ClientId(2), 5), (ClientId(1), 4)]);
        assert_eq!(kv.capacity_blocks, 1);
    }

    #[test]
    fn a_state_names_what_keeps_a_server_from_work() {
        let figures = sample();
        let states: Vec<_> = figures.servers.iter().map(|row| row.state).collect();
        assert_eq!(states, ["up", "benched", "down"]);
    }
}
