//! Which servers may take which model: builds a catalog's groups from its servers.
//!
//! A group is a set of candidates. Models served by the same servers share one, so that they share its wheel and its
//! place in the queue.
//!
//! *Invariant*: groups only grow; a candidate set that was there before keeps its `GroupId`; the same catalog gives the
//! same ids. No group names a removed server as long as something refers to it. Idempotent.
//! *Bound and cost*: O(servers × models per server), hashing each model once per server; run by the control thread when
//! something was learnt, never on a request's path.
//! *Errors*: none. More distinct candidate sets than `u32` holds would be a bug.
//! *Source*: the Lifeboat rules, "choosing the algorithm".

use std::collections::HashMap;

use super::catalog::{Algorithm, Catalog, Group, Pool, RoutingMode, Server};
use crate::proto::ids::{BackendId, GroupId, PoolId};

/// The built-in pool of requests whose candidates share no pool.
pub const MIXED: &str = "mixed";
/// Requests that may wait in a pool that says nothing else.
pub const QUEUE_SIZE: u32 = 1_024;
/// How long each of them may.
pub const QUEUE_TIMEOUT_MS: u64 = 30_000;

/// A built-in pool: weighted round-robin, and the defaults of everything else.
pub fn built_in_pool(name: &str) -> Pool {
    Pool {
        name: name.into(),
        algorithm: Algorithm::WeightedRoundRobin,
        routing_mode: RoutingMode::Queue,
        queue_size: QUEUE_SIZE,
        queue_timeout_ms: QUEUE_TIMEOUT_MS,
    }
}

/// Sets `groups`, `models`, `unlisted`, `unnamed` and `learning` from `servers`. Built-in pools that are missing (`mixed`,
/// a standalone server's own) are added. `version` and `models_body` are the caller's.
///
/// A server that has not yet said what it serves is a candidate only of requests that name no model.
pub fn rebuild_groups(catalog: &mut Catalog) {
    let present: Vec<BackendId> = ids(catalog, |_| true);
    let every_model: Vec<BackendId> =
        ids(catalog, |server| server.models.as_ref().is_some_and(Vec::is_empty));
    catalog.learning = catalog.servers.iter().any(|server| !server.removed && server.models.is_none());

    // In the order in which servers list them, so that ids do not depend on a hasher.
    let mut order: Vec<Box<str>> = Vec::new();
    let mut listing: HashMap<Box<str>, Vec<BackendId>> = HashMap::new();
    for id in &present {
        for model in catalog.servers[id.index()].models.iter().flatten() {
            let servers = listing.entry(model.clone()).or_insert_with(|| {
                order.push(model.clone());
                Vec::new()
            });
            // An engine may list a model twice.
            if servers.last() != Some(id) {
                servers.push(*id);
            }
        }
    }

    let mut groups = Groups::of(catalog);
    let unnamed = groups.id(catalog, present);
    let unlisted = groups.id(catalog, every_model.clone());
    catalog.models = order
        .into_iter()
        .filter_map(|model| {
            let mut candidates = listing.remove(&model)?;
            candidates.extend(&every_model);
            candidates.sort_unstable();
            let id = groups.id(catalog, candidates)?;
            Some((model.into_boxed_bytes(), id))
        })
        .collect();
    catalog.unnamed = unnamed;
    catalog.unlisted = unlisted;
}

fn ids(catalog: &Catalog, keep: impl Fn(&Server) -> bool) -> Vec<BackendId> {
    let servers = catalog.servers.iter().enumerate();
    servers
        .filter(|(_, server)| !server.removed && keep(server))
        .map(|(i, _)| BackendId(u16::try_from(i).expect("BACKENDS_MAX fits")))
        .collect()
}

/// Candidate sets and pool names, with their ids so far.
struct Groups {
    sets: HashMap<Vec<BackendId>, GroupId>,
    pools: HashMap<Box<str>, PoolId>,
}

impl Groups {
    fn of(catalog: &Catalog) -> Self {
        let sets =
            catalog.groups.iter().enumerate().map(|(i, group)| (group.candidates.clone(), group_id(i)));
        let pools = catalog.pools.iter().enumerate().map(|(i, pool)| (pool.name.clone(), pool_id(i)));
        // The first of equals wins: it is the one that was given out.
        Groups { sets: sets.rev().collect(), pools: pools.rev().collect() }
    }

    /// The group of exactly these candidates, ascending; a new one where there was none. `None`: no candidate.
    fn id(&mut self, catalog: &mut Catalog, candidates: Vec<BackendId>) -> Option<GroupId> {
        if candidates.is_empty() {
            return None;
        }
        let pool = self.pool_of(catalog, &candidates);
        if let Some(id) = self.sets.get(&candidates) {
            // A server may have changed its pool since.
            catalog.groups[id.index()].pool = pool;
            return Some(*id);
        }
        let id = group_id(catalog.groups.len());
        catalog.groups.push(Group { candidates: candidates.clone(), pool });
        self.sets.insert(candidates, id);
        Some(id)
    }

    /// The pool whose rules apply to these candidates.
    fn pool_of(&mut self, catalog: &mut Catalog, candidates: &[BackendId]) -> PoolId {
        let first = catalog.server(candidates[0]);
        match (first.pool, candidates) {
            (Some(pool), _) if candidates.iter().all(|id| catalog.server(*id).pool == Some(pool)) => pool,
            (None, [_]) => {
                let name = first.name.clone();
                self.named_pool(catalog, &name)
            }
            _ => self.named_pool(catalog, MIXED),
        }
    }

    /// The pool called `name`; a built-in one is added where there is none.
    fn named_pool(&mut self, catalog: &mut Catalog, name: &str) -> PoolId {
        *self.pools.entry(name.into()).or_insert_with(|| {
            catalog.pools.push(built_in_pool(name));
            pool_id(catalog.pools.len() - 1)
        })
    }
}

fn group_id(index: usize) -> GroupId {
    GroupId(u32::try_from(index).expect("fewer groups than u32 holds"))
}

fn pool_id(index: usize) -> PoolId {
    PoolId(u16::try_from(index).expect("the number of pools is checked with the configuration"))
}

#[cfg(test)]
mod tests;
