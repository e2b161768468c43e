//! Which servers may take which request: builds a catalog's groups and routes from its servers.
//!
//! A model's servers in one tier are the *members* of its route; what of them admits an input of some length are the
//! *candidates* of a group, one group per distinct limit. Models served by the same servers share a route and its groups,
//! so that they share their wheels and their places in the queue. Tiers never share a server.
//!
//! *Invariant*: groups only grow; a group that was there before keeps its `GroupId`, and an id its candidates, members,
//! pool and tier; the same catalog gives the same ids. No group in use names a removed server. Idempotent.
//! *Bound and cost*: O(servers × models per server + groups × servers), hashing each model once per server; at most
//! [`TOKEN_LIMITS_MAX`] groups per route. Run by the control thread when something was learnt or changed, never on a
//! request's path.
//! *Errors*: none. More distinct groups than `u32` holds would be a bug.
//! *Source*: the Lifeboat rules, sections 2 and 3.

use std::collections::{BTreeMap, HashMap};

use super::catalog::{
    Algorithm, Catalog, Group, KvRules, Pool, Route, RouteId, RoutingMode, Server, TokenClass,
};
use crate::proto::ids::{BackendId, GroupId, PoolId};

/// The built-in pool of requests whose candidates share no pool.
pub const MIXED: &str = "mixed";
/// Requests that may wait in a pool that says nothing else.
pub const QUEUE_SIZE: u32 = 1_024;
/// How long each of them may.
pub const QUEUE_TIMEOUT_MS: u64 = 30_000;
/// Distinct values of `max_input_tokens` over all servers: each makes a group of its own per route.
pub const TOKEN_LIMITS_MAX: usize = 64;

/// A built-in pool: weighted round-robin, and the defaults of everything else.
pub fn built_in_pool(name: &str) -> Pool {
    Pool {
        name: name.into(),
        algorithm: Algorithm::WeightedRoundRobin,
        routing_mode: RoutingMode::Queue,
        queue_size: QUEUE_SIZE,
        queue_timeout_ms: QUEUE_TIMEOUT_MS,
        kv: KvRules::default(),
        entry: None,
    }
}

/// Sets `groups`, `routes`, `models`, `unlisted`, `unnamed`, `learning` and the flags from `servers`. Built-in pools that
/// are missing (`mixed`, a standalone server's own) are added. `version` and `models_body` are the caller's.
///
/// A server that has not yet said what it serves is a candidate only of requests that name no model.
pub fn rebuild_groups(catalog: &mut Catalog) {
    let mut present = catalog.servers.iter().filter(|server| server.is_pooled());
    catalog.learning = present.clone().any(|server| server.models.is_none());
    catalog.has_token_limits = present.any(|server| server.max_input_tokens > 0);
    let present = ids(catalog, |_| true);
    let every_model = ids(catalog, |server| server.models.as_ref().is_some_and(Vec::is_empty));

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

    let mut builder = Builder::of(catalog);
    builder.catalog.routes.clear();
    let present = builder.by_tier(present);
    let every_model = builder.by_tier(every_model);
    let unnamed = present.iter().map(|(tier, members)| builder.route(tier, members.clone())).collect();
    let unlisted = every_model.iter().map(|(tier, members)| builder.route(tier, members.clone())).collect();
    let models = order.into_iter().filter_map(|model| {
        let tiers = builder.by_tier(listing.remove(&model)?);
        let routes = tiers.into_iter().map(|(tier, mut members)| {
            members.extend(every_model.get(&tier).into_iter().flatten());
            members.sort_unstable();
            builder.route(&tier, members)
        });
        let routes = routes.collect();
        Some((model.into_boxed_bytes(), routes))
    });
    let models = models.collect();
    catalog.models = models;
    catalog.unnamed = unnamed;
    catalog.unlisted = unlisted;
    let pool_with = |algorithm| {
        catalog.routes.iter().map(|route| catalog.pool(route.pool)).find(|pool| pool.algorithm == algorithm)
    };
    let kv = pool_with(Algorithm::KvAware).map(|pool| pool.kv);
    let sticky = pool_with(Algorithm::StickySession).is_some();
    catalog.has_kv_pools = kv.is_some();
    catalog.kv_block_bytes = kv.unwrap_or_default().block_bytes;
    catalog.has_sticky_pools = sticky;
    catalog.has_measured_pools = catalog.routes.iter().any(|route| catalog.pool(route.pool).measures());
}

fn ids(catalog: &Catalog, keep: impl Fn(&Server) -> bool) -> Vec<BackendId> {
    let servers = catalog.servers.iter().enumerate();
    servers
        .filter(|(_, server)| server.is_pooled() && keep(server))
        .map(|(i, _)| BackendId(u16::try_from(i).expect("BACKENDS_MAX fits")))
        .collect()
}

/// What a route is made of; its pool follows from the members.
type RouteKey = (Box<str>, Vec<BackendId>);

/// Groups, routes and pool names, with their ids so far.
struct Builder<'a> {
    catalog: &'a mut Catalog,
    groups: HashMap<Group, GroupId>,
    routes: HashMap<RouteKey, RouteId>,
    pools: HashMap<Box<str>, PoolId>,
}

impl<'a> Builder<'a> {
    fn of(catalog: &'a mut Catalog) -> Self {
        // The first of equals wins: it is the one that was given out.
        let groups = catalog.groups.iter().enumerate().map(|(i, group)| (group.clone(), group_id(i)));
        let pools = catalog.pools.iter().enumerate().map(|(i, pool)| (pool.name.clone(), pool_id(i)));
        let (groups, pools) = (groups.rev().collect(), pools.rev().collect());
        Builder { catalog, groups, routes: HashMap::new(), pools }
    }

    /// Servers by their tier, in the order of its name; servers in theirs.
    fn by_tier(&self, ids: Vec<BackendId>) -> BTreeMap<Box<str>, Vec<BackendId>> {
        let mut tiers: BTreeMap<Box<str>, Vec<BackendId>> = BTreeMap::new();
        for id in ids {
            let tier = &self.catalog.server(id).tier;
            match tiers.get_mut(tier) {
                Some(members) => members.push(id),
                None => drop(tiers.insert(tier.clone(), vec![id])),
            }
        }
        tiers
    }

    /// The route to exactly these members, ascending, at least one; a new one where there was none.
    fn route(&mut self, tier: &str, members: Vec<BackendId>) -> RouteId {
        let key = (Box::from(tier), members);
        if let Some(id) = self.routes.get(&key) {
            return *id;
        }
        let members = &key.1;
        let pool = self.pool_of(members);
        let limit = |catalog: &Catalog, id: BackendId| match catalog.server(id).max_input_tokens {
            0 => u64::MAX,
            tokens => u64::from(tokens),
        };
        let mut limits: Vec<u64> = members.iter().map(|id| limit(self.catalog, *id)).collect();
        limits.sort_unstable();
        limits.dedup();
        let classes = limits.into_iter().map(|tokens_max| {
            let candidates = members.iter().copied();
            let candidates = candidates.filter(|id| limit(self.catalog, *id) >= tokens_max).collect();
            TokenClass { tokens_max, group: self.group(candidates, members, pool, tier) }
        });
        let route = Route { tier: tier.into(), pool, classes: classes.collect() };
        let id = RouteId(u32::try_from(self.catalog.routes.len()).expect("fewer routes than u32 holds"));
        self.catalog.routes.push(route);
        self.routes.insert(key, id);
        id
    }

    fn group(
        &mut self,
        candidates: Vec<BackendId>,
        members: &[BackendId],
        pool: PoolId,
        tier: &str,
    ) -> GroupId {
        let name = &self.catalog.pool(pool).name;
        let label = if tier.is_empty() { name.clone() } else { format!("{name}/{tier}").into() };
        let group = Group { candidates, members: members.to_vec(), pool, tier: tier.into(), label };
        if let Some(id) = self.groups.get(&group) {
            return *id;
        }
        let id = group_id(self.catalog.groups.len());
        self.catalog.groups.push(group.clone());
        self.groups.insert(group, id);
        id
    }

    /// The pool whose rules apply to these members.
    fn pool_of(&mut self, members: &[BackendId]) -> PoolId {
        let first = self.catalog.server(members[0]);
        match (first.pool, members) {
            (Some(pool), _) if members.iter().all(|id| self.catalog.server(*id).pool == Some(pool)) => pool,
            (None, [_]) => {
                let name = first.name.clone();
                self.named_pool(&name)
            }
            _ => self.named_pool(MIXED),
        }
    }

    /// The pool called `name`; a built-in one is added where there is none.
    fn named_pool(&mut self, name: &str) -> PoolId {
        if let Some(id) = self.pools.get(name) {
            return *id;
        }
        let id = pool_id(self.catalog.pools.len());
        self.catalog.pools.push(built_in_pool(name));
        self.pools.insert(name.into(), id);
        id
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
