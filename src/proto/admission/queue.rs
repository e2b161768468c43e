//! The waiting requests of all shards, at home, first come first served.
//!
//! One line per group, ordered by arrival at the request's own shard; a server's freed permit goes to the oldest among the
//! heads of its groups' lines, so freeing costs O(groups of the server), not O(waiting). (Requests that already tried that
//! very server are passed over one by one.)
//!
//! `queue_size` bounds the *settled* requests of a pool, exactly. A request that arrives at a full queue while some shard may
//! still hold a free permit is *provisional*: it moves up when a settled one leaves, or is denied once the recall has
//! answered that nothing is free. Mode `reject` is a queue of size 0.
//!
//! *Invariant*: `pools[p].settled` and `.provisional` count the entries of the lines of pool `p`.
//! *Bound and cost*: O(log waiting) per operation. Provisional requests live for one recall, and each has its own client
//! connection, which `connections_max` bounds.
//! *Source*: the Lifeboat rules, section 3.

use std::collections::BTreeMap;

use crate::clock::Nanos;
use crate::proto::backend::catalog::{Catalog, RoutingMode};
use crate::proto::error::Rejection;
use crate::proto::ids::{BackendId, GroupId, PoolId, ShardId, Ticket};
use crate::proto::message::Tried;

/// A waiting request, ordered by who is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub since: Nanos,
    pub shard: ShardId,
    pub ticket: Ticket,
}

#[derive(Debug, Default)]
struct Line {
    pool: Option<PoolId>,
    settled: BTreeMap<Place, Tried>,
    provisional: BTreeMap<Place, Tried>,
}

#[derive(Clone, Copy, Debug)]
struct PoolLine {
    bound: u32,
    rejection: Rejection,
    settled: u32,
    provisional: u32,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Queue {
    lines: Vec<Line>,
    pools: Vec<PoolLine>,
}

impl Queue {
    /// Takes over a catalog's groups and bounds. Who waits stays, also beyond a lowered bound.
    pub fn configure(&mut self, catalog: &Catalog) {
        self.pools.clear();
        self.pools.extend(catalog.pools.iter().map(|pool| {
            let (bound, rejection) = match pool.routing_mode {
                RoutingMode::Reject => (0, Rejection::AtCapacity),
                RoutingMode::Queue | RoutingMode::Unlimited => (pool.queue_size, Rejection::QueueFull),
            };
            PoolLine { bound, rejection, settled: 0, provisional: 0 }
        }));
        self.lines.resize_with(self.lines.len().max(catalog.groups.len()), Line::default);
        for (line, group) in self.lines.iter_mut().zip(&catalog.groups) {
            line.pool = Some(group.pool);
            let pool = &mut self.pools[group.pool.index()];
            pool.settled += line.settled.len() as u32;
            pool.provisional += line.provisional.len() as u32;
        }
    }

    fn pool(&self, group: GroupId) -> &PoolLine {
        let pool = self.lines[group.index()].pool.expect("lines exist for the catalog's groups only");
        &self.pools[pool.index()]
    }
    fn pool_mut(&mut self, group: GroupId) -> &mut PoolLine {
        let pool = self.lines[group.index()].pool.expect("lines exist for the catalog's groups only");
        &mut self.pools[pool.index()]
    }

    /// Whether one more request of that group would be over its pool's bound.
    pub fn at_bound(&self, group: GroupId) -> bool {
        let pool = self.pool(group);
        pool.settled >= pool.bound
    }
    /// What a request hears that nothing can be done for.
    pub fn rejection(&self, group: GroupId) -> Rejection {
        self.pool(group).rejection
    }
    /// Settled requests of a pool.
    pub fn settled(&self, pool: PoolId) -> u32 {
        self.pools.get(pool.index()).map_or(0, |p| p.settled)
    }
    /// Provisional requests of a pool.
    pub fn provisional(&self, pool: PoolId) -> u32 {
        self.pools.get(pool.index()).map_or(0, |p| p.provisional)
    }
    pub fn is_empty(&self, group: GroupId) -> bool {
        let line = &self.lines[group.index()];
        line.settled.is_empty() && line.provisional.is_empty()
    }
    pub fn has_provisional(&self, group: GroupId) -> bool {
        !self.lines[group.index()].provisional.is_empty()
    }

    /// Lines a request up, as provisional when the queue is at its bound.
    pub fn push(&mut self, group: GroupId, place: Place, tried: Tried) {
        let provisional = self.at_bound(group);
        let line = &mut self.lines[group.index()];
        if provisional {
            line.provisional.insert(place, tried);
            self.pool_mut(group).provisional += 1;
        } else {
            line.settled.insert(place, tried);
            self.pool_mut(group).settled += 1;
        }
    }

    /// The oldest request of a group that has not tried `backend`.
    pub fn oldest(&self, group: GroupId, backend: BackendId) -> Option<Place> {
        let line = &self.lines[group.index()];
        let first = |entries: &BTreeMap<Place, Tried>| {
            entries.iter().find(|(_, tried)| !tried.contains(backend)).map(|(place, _)| *place)
        };
        // A provisional request may be older: messages of different shards overtake each other.
        match (first(&line.settled), first(&line.provisional)) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Takes a request out; a provisional one of its pool moves up. False: it was not there.
    pub fn remove(&mut self, group: GroupId, place: Place) -> bool {
        let Some(line) = self.lines.get_mut(group.index()) else { return false };
        if line.settled.remove(&place).is_some() {
            self.pool_mut(group).settled -= 1;
            self.promote(group);
            true
        } else if line.provisional.remove(&place).is_some() {
            self.pool_mut(group).provisional -= 1;
            true
        } else {
            false
        }
    }

    /// Settles the oldest provisional requests of that group's pool while the bound allows.
    pub fn promote(&mut self, group: GroupId) {
        let id = self.lines[group.index()].pool;
        while self.pool(group).provisional > 0 && !self.at_bound(group) {
            let of_pool = self.lines.iter_mut().filter(|line| line.pool == id);
            let oldest = of_pool.filter(|line| !line.provisional.is_empty());
            let line = oldest
                .min_by_key(|line| line.provisional.first_key_value().map(|(place, _)| *place))
                .expect("the pool counts its lines' provisional requests");
            let (place, tried) = line.provisional.pop_first().expect("lines without any were left out");
            line.settled.insert(place, tried);
            let pool = self.pool_mut(group);
            pool.provisional -= 1;
            pool.settled += 1;
        }
    }

    /// The provisional requests of a group, oldest first.
    pub fn provisional_of(&self, group: GroupId) -> impl Iterator<Item = (Place, Tried)> {
        self.lines[group.index()].provisional.iter().map(|(place, tried)| (*place, *tried))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::backend::catalog::{Algorithm, Group, KvRules, Pool};

    const A: BackendId = BackendId(0);
    const ONE: GroupId = GroupId(0);
    const TWO: GroupId = GroupId(1);

    /// Two groups of one pool.
    fn queue(queue_size: u32, routing_mode: RoutingMode) -> (Queue, Catalog) {
        let pool = Pool {
            name: "p".into(),
            algorithm: Algorithm::WeightedRoundRobin,
            routing_mode,
            queue_size,
            queue_timeout_ms: 1000,
            kv: KvRules::default(),
            entry: None,
        };
        let (pool_id, tier, label) = (PoolId(0), "".into(), "p".into());
        let group = Group { candidates: vec![A], members: vec![A], pool: pool_id, tier, label };
        let catalog = Catalog { pools: vec![pool], groups: vec![group.clone(), group], ..Catalog::default() };
        let mut queue = Queue::default();
        queue.configure(&catalog);
        (queue, catalog)
    }

    fn place(since: u64) -> Place {
        Place { since: Nanos(since), shard: ShardId(since as u8), ticket: Ticket(0) }
    }

    fn counts(queue: &Queue) -> (u32, u32) {
        (queue.settled(PoolId(0)), queue.provisional(PoolId(0)))
    }

    #[test]
    fn the_oldest_first_and_provisional_ones_move_up_in_order() {
        let (mut queue, _) = queue(2, RoutingMode::Queue);
        for (group, since) in [(ONE, 5), (TWO, 3), (ONE, 9), (TWO, 8), (ONE, 1)] {
            queue.push(group, place(since), Tried::default());
        }
        assert_eq!(counts(&queue), (2, 3));
        assert_eq!(queue.oldest(ONE, A), Some(place(1)), "also when it is provisional");
        assert!(queue.remove(ONE, place(1)));
        assert_eq!(counts(&queue), (2, 2));
        assert!(queue.remove(TWO, place(3)));
        assert_eq!(counts(&queue), (2, 1), "8 moved up, in another group of the pool");
        let left: Vec<_> = queue.provisional_of(ONE).map(|(place, _)| place).collect();
        assert_eq!(left, [place(9)]);
        assert!(!queue.remove(TWO, place(3)), "once only");
        assert!(!queue.remove(GroupId(7), place(3)), "a group it never heard of");
    }

    #[test]
    fn servers_that_were_tried_are_passed_over() {
        let (mut queue, _) = queue(9, RoutingMode::Queue);
        let mut tried = Tried::default();
        tried.push(A);
        queue.push(ONE, place(1), tried);
        queue.push(ONE, place(2), Tried::default());
        assert_eq!(queue.oldest(ONE, A), Some(place(2)));
        assert_eq!(queue.oldest(ONE, BackendId(1)), Some(place(1)));
    }

    #[test]
    fn rejecting_is_a_queue_of_no_size() {
        let (mut queue, _) = queue(100, RoutingMode::Reject);
        assert!(queue.at_bound(ONE));
        assert_eq!(queue.rejection(ONE), Rejection::AtCapacity);
        queue.push(ONE, place(1), Tried::default());
        assert_eq!(counts(&queue), (0, 1));
    }

    #[test]
    fn bounds_change_under_those_who_wait() {
        let (mut queue, mut catalog) = queue(2, RoutingMode::Queue);
        (1..=3).for_each(|since| queue.push(ONE, place(since), Tried::default()));
        catalog.pools[0].queue_size = 1;
        queue.configure(&catalog);
        assert_eq!((counts(&queue), queue.at_bound(TWO)), ((2, 1), true), "who waits stays");
        catalog.pools[0].queue_size = 3;
        queue.configure(&catalog);
        queue.promote(ONE);
        assert_eq!(counts(&queue), (3, 0));
    }
}
