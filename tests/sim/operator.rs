//! What the operator, the health checks and the engines do to the world, and since when everyone knows.

use std::collections::VecDeque;

use ringway::clock::Nanos;
use ringway::proto::backend::catalog::RoutingMode;
use ringway::proto::ids::{BackendId, PoolId};
use ringway::proto::message::{Message, Update};

use super::scenarios::{add_group, server};
use super::world::{Regime, Step, World};

impl World {
    pub(super) fn change(&mut self) {
        let s = self.rng.below(self.catalog.servers.len() as u64) as usize;
        match self.rng.below(12) {
            0 => self.catalog.servers[s].weight = 0.0,
            1 | 2 => self.catalog.servers[s].weight = self.rng.of(&[0.5, 1.0, 2.0]),
            3..=5 => self.catalog.servers[s].max_concurrency = self.rng.of(&[0, 1, 2, 4, 8, 32]),
            6 => {
                let p = self.rng.below(self.catalog.pools.len() as u64) as usize;
                let mode = self.rng.of(&[RoutingMode::Queue, RoutingMode::Reject, RoutingMode::Unlimited]);
                self.catalog.pools[p].routing_mode = mode;
                self.catalog.pools[p].queue_size = self.rng.of(&[0, 3, 100]);
                let bound = &mut self.bound_allowed[p];
                *bound = self.catalog.pools[p].queue_size.max(*bound);
            }
            7 => self.catalog.servers[s].removed ^= true,
            8 => self.dead[s] ^= true,
            9 | 10 => {
                self.up[s] = !self.up[s];
                for shard in 0..self.shards.len() {
                    self.send_update(shard, Update::Health { backend: BackendId(s as u16), up: self.up[s] });
                }
                return;
            }
            _ => self.add_server(),
        }
        self.catalog.version += 1;
        for (id, server) in self.catalog.servers.iter().enumerate() {
            if server.removed {
                self.up[id] = true;
            }
        }
        self.allowed.resize(self.catalog.servers.len(), 0);
        for s in 0..self.catalog.servers.len() {
            self.allowed[s] = self.allowed[s].max(self.ceiling(s));
        }
        self.regime = Regime::Changing;
        for shard in 0..self.shards.len() {
            self.send_update(shard, Update::Catalog(Box::new(self.catalog.clone())));
        }
    }

    pub(super) fn add_server(&mut self) {
        let id = BackendId(self.catalog.servers.len() as u16);
        if id.0 > 12 {
            return;
        }
        let pool = PoolId(self.rng.below(self.catalog.pools.len() as u64 - 1) as u16);
        self.catalog.servers.push(server(1.0, self.rng.of(&[0, 1, 4]), Some(pool.0)));
        self.up.push(true);
        self.dead.push(false);
        self.dispatched.push(0);
        self.seen_in_flight.iter_mut().for_each(|seen| seen.push(0));
        for group in &mut self.catalog.groups {
            if group.pool == pool {
                group.candidates.push(id);
                group.members.push(id);
            }
        }
        // And a model of its own, in a group that no shard has seen before.
        add_group(&mut self.catalog, format!("new-{}", id.0), vec![id], pool);
    }

    pub(super) fn send_update(&mut self, shard: usize, update: Update) {
        let delay = self.rng.below(self.options.slow_ns_max.max(1));
        let last = self.control[shard].back().map_or(Nanos::ZERO, |(at, _)| *at);
        let at = last.max(Nanos(self.now.0 + delay));
        self.control[shard].push_back((at, update));
        self.schedule_at(at, Step::Control(shard));
    }

    /// Advances the regime of ceilings.
    pub(super) fn settle(&mut self) {
        let on_rings = |links: &[VecDeque<(Nanos, Message)>]| {
            links.iter().filter_map(|link| link.back()).map(|(at, _)| *at).max().unwrap_or(Nanos::ZERO)
        };
        match self.regime {
            Regime::Settled => {}
            Regime::Changing => {
                if self.catalog_of.iter().all(|catalog| catalog.version == self.catalog.version) {
                    self.regime = Regime::Settling { round: 1, until: on_rings(&self.links) };
                }
            }
            // First what shards said on hearing of the ceiling gets home, then home's recalls get to them.
            Regime::Settling { round, until } => {
                if self.now > until && self.links.iter().flatten().all(|(at, _)| *at > until) {
                    if round == 2 {
                        self.regime = Regime::Settled;
                        self.allowed = (0..self.catalog.servers.len()).map(|s| self.ceiling(s)).collect();
                    } else {
                        self.regime = Regime::Settling { round: 2, until: on_rings(&self.links) };
                    }
                }
            }
        }
    }
}
