//! One group as a shard routes it: its candidates, who of them is live, and what its algorithm knows of them.
//!
//! Wheel, balance, roster and chooser catch up with the table's changes when the group is asked.
//!
//! *Invariant*: `live` holds exactly the slots that the wheel carries, in the group's order. What the group has caught up with is what a
//! look at every row would find (debug builds look).
//! *Bound and cost*: no allocation once built; catching up is O(log candidates) for each server that changed since, at most
//! O(candidates) in all.

use super::balance::Balance;
use super::chooser::Chooser;
use super::roster::Roster;
use super::sticky_session::Member;
use super::wheel::Wheel;
use crate::clock::Nanos;
use crate::proto::backend::catalog::{Algorithm, KvRules, Miss};
use crate::proto::backend::table::{BackendTable, Row};
use crate::proto::ids::{BackendId, GroupId, PoolId};
use crate::proto::message::Sent;

/// One group as a shard routes it.
#[derive(Debug)]
pub struct RouteGroup {
    pub candidates: Vec<BackendId>,
    pub pool: PoolId,
    pub algorithm: Algorithm,
    pub(super) kv: KvRules,
    /// What session keys are spread over, in sticky-session pools.
    pub(super) members: Vec<Member>,
    /// Slots of the live candidates.
    pub(super) live: Vec<u16>,
    pub(super) wheel: Wheel,
    /// In kv-aware pools.
    pub(super) balance: Balance,
    /// In kv-aware and weighted round-robin pools, as the table was at `seen`.
    pub(super) roster: Roster,
    /// In groups of Stargate's algorithms, as the table was at `seen`.
    pub(super) chooser: Option<Box<Chooser>>,
    /// The table's count of changes; `None`: all is to be looked at.
    pub(super) seen: Option<u64>,
    /// Steps the wheel still has to start further, once something is on it.
    pub(super) phase: u32,
    /// What this shard sent, by slot.
    pub(super) sent: Vec<Sent>,
    /// What peers sent as last heard, by slot, then shard.
    pub(super) heard: Vec<Sent>,
    /// By slot: peers lack the newest `sent`.
    pub(super) unsaid: Vec<bool>,
}

impl RouteGroup {
    pub fn has_live(&self) -> bool {
        !self.live.is_empty()
    }
    pub fn live(&self) -> impl Iterator<Item = BackendId> {
        self.live.iter().map(|slot| self.candidates[*slot as usize])
    }
    /// What places a request for which the group's algorithm has no preference, or one that cannot be followed.
    pub fn fallback(&self) -> Algorithm {
        match (self.algorithm, self.kv.miss) {
            (Algorithm::KvAware, Miss::LeastBusy) => Algorithm::LeastBusy,
            (own, _) => own.fallback(),
        }
    }
    /// O(candidates): off the request path only.
    pub(super) fn slot(&self, id: BackendId) -> Option<u16> {
        self.candidates.iter().position(|c| *c == id).map(|slot| slot as u16)
    }

    pub(super) fn refresh(&mut self, now: Nanos, table: &BackendTable, weights: &mut Vec<u64>) {
        self.live.clear();
        let slots = || (0..).zip(self.candidates.iter().map(|id| table.row(*id)));
        self.live.extend(slots().filter(|(_, row)| row.eligible(now)).map(|(slot, _)| slot));
        if self.live.is_empty() {
            self.live.extend(slots().filter(|(_, row)| row.fit()).map(|(slot, _): (u16, _)| slot));
        }
        weights.clear();
        weights.resize(self.candidates.len(), 0);
        for slot in &self.live {
            weights[*slot as usize] = table.row(self.candidates[*slot as usize]).weight;
        }
        self.wheel.set_weights(weights);
        self.balance.set_weights(weights);
        self.roster.set_weights(weights);
        if let Some(chooser) = &mut self.chooser {
            chooser.set_live(&self.live);
        }
        self.seen = None;
        if !self.live.is_empty() {
            for _ in 0..std::mem::take(&mut self.phase) {
                self.wheel.turn();
            }
        }
    }

    /// Whether decisions look at `roster`.
    pub(super) fn is_kept(&self) -> bool {
        self.algorithm.fallback() == Algorithm::WeightedRoundRobin
    }

    /// Takes over what changed in the table since it was last looked at. `groups_of`: the groups of each server, with its slot.
    #[inline]
    pub(super) fn catch_up(
        &mut self,
        id: GroupId,
        table: &BackendTable,
        groups_of: &[Vec<(GroupId, u16)>],
        room: &impl Fn(BackendId, &Row) -> bool,
    ) {
        self.each_change(id, table, groups_of, |group, slot, backend, row| {
            group.see(slot, backend, row, room)
        });
        debug_assert!(self.live.iter().all(|slot| {
            let backend = self.candidates[*slot as usize];
            let row = table.row(backend);
            self.roster.entry(*slot) == (row.load(), room(backend, row))
        }));
    }

    /// The same for the chooser's sake.
    pub(super) fn catch_up_chooser(
        &mut self,
        id: GroupId,
        table: &BackendTable,
        groups_of: &[Vec<(GroupId, u16)>],
        room: &impl Fn(BackendId, &Row) -> bool,
    ) {
        self.each_change(id, table, groups_of, |group, slot, backend, row| {
            if let Some(chooser) = &mut group.chooser {
                chooser.see(slot, row, room(backend, row), table.rates().of(backend));
            }
        });
        if let Some(chooser) = &mut self.chooser {
            chooser.settle();
        }
    }

    /// Calls `see` for each candidate that changed since the last time, or for all that are live.
    #[inline(always)]
    pub(super) fn each_change(
        &mut self,
        id: GroupId,
        table: &BackendTable,
        groups_of: &[Vec<(GroupId, u16)>],
        mut see: impl FnMut(&mut RouteGroup, u16, BackendId, &Row),
    ) {
        let changes = match self.seen {
            // A look at all is cheaper than one at as many changes.
            Some(seen) if table.change_count() - seen <= self.live.len() as u64 => table.changes_since(seen),
            _ => None,
        };
        match changes {
            Some(changes) => {
                for backend in changes {
                    if let Some(slot) = slot_in(groups_of, id, backend) {
                        see(self, slot, backend, table.row(backend));
                    }
                }
            }
            None => {
                for i in 0..self.live.len() {
                    let slot = self.live[i];
                    let backend = self.candidates[slot as usize];
                    see(self, slot, backend, table.row(backend));
                }
                // All of them are read.
                table.changes_since(table.change_count());
            }
        }
        self.seen = Some(table.change_count());
    }

    /// One server as it is now.
    #[inline]
    pub(super) fn see(
        &mut self,
        slot: u16,
        id: BackendId,
        row: &Row,
        room: &impl Fn(BackendId, &Row) -> bool,
    ) {
        if !self.wheel.carries(slot) {
            return;
        }
        let has_room = room(id, row);
        if self.roster.set(slot, row.weight, row.load(), has_room) {
            self.wheel.show(slot, has_room);
            self.balance.set_room(slot, has_room);
        }
    }
}

/// The place of a server in a group. O(log of the server's groups).
#[inline]
pub(super) fn slot_in(groups_of: &[Vec<(GroupId, u16)>], group: GroupId, id: BackendId) -> Option<u16> {
    let groups = groups_of.get(id.index())?;
    groups.binary_search_by_key(&group, |(g, _)| *g).ok().map(|i| groups[i].1)
}
