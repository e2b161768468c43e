//! What has to hold: at every step, and of the whole once it is quiet.

use ringway::clock::Nanos;
use ringway::proto::backend::catalog::RoutingMode;
use ringway::proto::ids::{BackendId, GroupId, PoolId, ShardId};
use ringway::proto::message::{Message, Tried};

use super::world::{Regime, State, World};

impl World {
    /// Every new dispatch keeps to the ceiling, whatever the rings hold.
    pub(super) fn check_new_dispatches(&mut self, shard: usize) {
        for s in 0..self.catalog.servers.len() {
            let id = BackendId(s as u16);
            let own = self.shards[shard].in_flight(id);
            if own > self.seen_in_flight[shard][s] {
                let total = self.running_on(id);
                let allowed = self.allowed[s];
                assert!(
                    total <= allowed,
                    "seed {}: {total} on server {s} with a ceiling of {allowed} at {:?}",
                    self.seed,
                    self.now
                );
            }
            self.seen_in_flight[shard][s] = own;
        }
    }

    /// A request was placed: nobody waits who came earlier, by more than the rings' delay, and could have had that permit.
    pub(super) fn check_order(&self, index: usize, backend: BackendId) {
        let slack = 3 * (self.options.delay_ns_max + self.options.slow_ns_max + 200);
        let since = self.requests[index].since;
        // Rings that were full add up.
        if self.options.ring_slots < 64 || self.now.since(self.disturbed) < 2 * slack {
            return;
        }
        let ceiling = self.ceiling(backend.index());
        for (older, waiting) in &self.waiting {
            if older.0 + slack >= since.0 || older.0 < self.disturbed.0 + slack {
                return;
            }
            let request = &self.requests[*waiting];
            let State::Waiting(ticket) = request.state else { panic!("{waiting} is in the set") };
            let granted = |(_, message): &(Nanos, Message)| matches!(message, Message::Grant { ticket: t, .. } if *t == ticket);
            if self.links[request.shard].iter().any(granted) {
                continue;
            }
            let could = ceiling != u32::MAX
                && !request.tried.contains(backend)
                && (0..self.shards.len())
                    .all(|shard| self.live(shard, request.group, self.now).contains(&backend));
            assert!(
                !could,
                "request {waiting} waits for {backend:?} since {older:?}; {index} came at {since:?}"
            );
        }
    }

    /// Somebody was told that nothing can be had: no live server of the group that was
    /// not tried has a free permit anywhere.
    pub(super) fn check_exhausted(&self, group: GroupId, tried: Tried) {
        if self.regime != Regime::Settled {
            return;
        }
        let (ledger, queue) = self.shards[0].books().expect("shard 0 is home");
        let pool = self.catalog.group(group).pool;
        let settings = self.catalog.pool(pool);
        if settings.routing_mode == RoutingMode::Queue {
            assert!(queue.settled(pool) >= settings.queue_size, "the queue of {pool:?} is not full");
        }
        let mut live = self.live(0, group, self.timed[0]);
        live.retain(|id| !tried.contains(*id));
        for id in live {
            let free: u32 = self.shards.iter().map(|shard| shard.leased(id).1).sum();
            assert_eq!((ledger.spare(id), free), (0, 0), "{id:?} had room for group {group:?}");
        }
    }

    pub(super) fn check_quiet(&self) {
        let seed = self.seed;
        let (ledger, queue) = self.shards[0].books().expect("shard 0 is home");
        for s in 0..self.catalog.servers.len() {
            let id = BackendId(s as u16);
            let ceiling = self.ceiling(s);
            let mut leased = 0;
            for (i, shard) in self.shards.iter().enumerate() {
                let (held, free) = shard.leased(id);
                assert_eq!(
                    ledger.leased(id, ShardId(i as u8)),
                    held,
                    "seed {seed}: server {s}, shard {i}: permits lost"
                );
                assert!(ceiling == u32::MAX || held == shard.in_flight(id) + free, "runs without a permit");
                leased += held;
                for (j, peer) in self.shards.iter().enumerate().filter(|(j, _)| *j != i) {
                    let heard = peer.heard(ShardId(i as u8), id);
                    assert_eq!(
                        heard,
                        shard.in_flight(id),
                        "seed {seed}: shard {j} of shard {i}'s server {s}"
                    );
                }
                assert_eq!(shard.in_flight_total(id), self.running_on(id));
                let first = &self.shards[0];
                assert_eq!(shard.rate(id), first.rate(id), "seed {seed}: shard {i}'s rate of server {s}");
                assert_eq!(shard.reading(id), first.reading(id), "seed {seed}: shard {i}, server {s}");
            }
            assert_eq!(self.shards[0].reading(id).0, self.running_on(id), "all that runs here is still read");
            if ceiling != u32::MAX {
                assert_eq!(ledger.spare(id), ceiling.saturating_sub(leased), "seed {seed}: server {s}");
                if leased > ceiling {
                    assert_eq!(leased, self.running_on(id), "over a lowered ceiling nothing is free");
                }
            }
        }
        for shard in 1..self.shards.len() {
            assert_eq!(self.benched(shard, self.now), self.benched(0, self.now), "verdicts agree");
        }
        // Nobody waits for what is free.
        let mut waiting = vec![0; self.catalog.pools.len()];
        for (_, index) in &self.waiting {
            let request = &self.requests[*index];
            waiting[self.catalog.group(request.group).pool.index()] += 1;
            for id in self.live(0, request.group, self.now) {
                assert!(
                    request.tried.contains(id) || self.running_on(id) >= self.ceiling(id.index()),
                    "seed {seed}: request {index} waits though {id:?} has room"
                );
            }
        }
        for (p, waiting) in waiting.into_iter().enumerate() {
            let pool = PoolId(p as u16);
            assert_eq!(
                (queue.settled(pool), queue.provisional(pool)),
                (waiting, 0),
                "seed {seed}: queue of pool {p}"
            );
            assert_eq!(self.shards.iter().map(|shard| shard.queued(pool)).sum::<u32>(), waiting);
        }
        for group in (0..self.catalog.groups.len()).map(|g| GroupId(g as u32)) {
            if self.has_room(group) {
                for (i, shard) in self.shards.iter().enumerate() {
                    assert_eq!(
                        shard.admissible(self.now, Some(group)),
                        Ok(()),
                        "seed {seed}: shard {i}, {group:?}"
                    );
                }
            }
        }
    }

    pub(super) fn check_end(&self) {
        let seed = self.seed;
        assert!(self.requests.iter().all(|r| r.state == State::Over), "seed {seed}: somebody was forgotten");
        assert!(self.tickets.is_empty() && self.waiting.is_empty());
        for s in 0..self.catalog.servers.len() {
            let id = BackendId(s as u16);
            assert_eq!(self.running_on(id), 0);
            for (i, shard) in self.shards.iter().enumerate() {
                assert_eq!(
                    shard.leased(id),
                    (0, 0),
                    "seed {seed}: shard {i} keeps idle permits of server {s}"
                );
            }
        }
        let done = self.served + self.aborted + self.rejections.values().sum::<u32>();
        assert_eq!(done, self.came, "everybody is counted once");
    }
}
