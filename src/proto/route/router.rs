//! The groups of this shard: who may take a request, who is shown to the algorithm, and which algorithm it is.
//!
//! A candidate is *live* when it is eligible; when the bench alone would leave a group without a live candidate, it spares
//! that group (servers go down and up while others sit on the bench, and two shards may each bench one of a pair: so it is
//! judged here, from what is true now, and not only when a bench is set). The algorithm sees the live candidates with room
//! that the request has not tried.
//!
//! Where all that a decision leaves out is servers without room, it looks at none of the others: wheel, balance and roster of a
//! kv-aware or weighted round-robin group know who has room and who is least busy. Each group catches up with the table's
//! changes when it is next asked, so that a change costs nothing where nobody asks.
//!
//! *Invariant*: `live` holds exactly the slots that the group's wheel carries, in the group's order. What a group has caught up with
//! is what a look at every row would find (debug builds look).
//! In groups of Stargate's algorithms the chooser catches up the same way ([`super::chooser`]); where it has no choice, it is
//! least-connections.
//! *Bound and cost*: no allocation, no hashing. In kv-aware and weighted round-robin groups a pick is O(servers that hold as much
//! of the prompt as the one chosen + log candidates + distinct weights), and O(log candidates) for each server that changed since
//! the last pick, at most O(candidates) in all. For least-connections, sticky-session and misses to the least busy, and for a request that has been to other
//! servers, it is O(live candidates). A change of health or catalog is O(groups of the server × their candidates × distinct weights).
//! *Source*: the Lifeboat rules, sections 2 to 4 and 9.

use std::cell::Cell;

use super::balance::{Balance, Takers};
use super::chooser::{Chooser, Input};
use super::group::{RouteGroup, slot_in};
use super::kv_aware::{KvAware, Loads};
use super::least_busy::LeastBusy;
use super::least_connections::LeastConnections;
use super::policy::{Affinity, Candidate, Choice, Policy};
use super::roster::Roster;
use super::sticky_session::{Member, StickySession, hash_name, owner};
use super::weighted_round_robin::WeightedRoundRobin;
use super::wheel::Wheel;
use crate::clock::Nanos;
use crate::limits::ATTEMPTS_MAX;
use crate::proto::backend::catalog::{Algorithm, Catalog};
use crate::proto::backend::table::{BackendTable, Row};
use crate::proto::ids::{BackendId, GroupId, ShardId};
use crate::proto::message::{Sent, Tried};
use crate::proto::stargate::random::Rng;

/// See the module's text.
#[derive(Debug)]
pub struct Router {
    shards: usize,
    phase: u32,
    groups: Vec<RouteGroup>,
    /// By server: the groups it is a candidate of, with its slot there.
    groups_of: Vec<Vec<(GroupId, u16)>>,
    /// Figures that peers lack.
    changes: Vec<(GroupId, u16)>,
    /// What is shown to the algorithm, and weights by slot; kept for their memory.
    shown: Vec<Candidate>,
    weights: Vec<u64>,
    rng: Rng,
}

impl Router {
    /// Wheels start `phase` steps further than the textbook's. Algorithms that draw lots do so from `seed`.
    pub fn new(shards: usize, phase: u32, seed: u64) -> Self {
        Router {
            shards,
            phase,
            groups: Vec::new(),
            groups_of: Vec::new(),
            changes: Vec::new(),
            shown: Vec::new(),
            weights: Vec::new(),
            rng: Rng::new(seed),
        }
    }

    pub fn group(&self, id: GroupId) -> Option<&RouteGroup> {
        self.groups.get(id.index())
    }
    pub fn ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.groups.len()).map(|i| GroupId(i as u32))
    }
    pub fn groups_of(&self, id: BackendId) -> &[(GroupId, u16)] {
        self.groups_of.get(id.index()).map_or(&[], Vec::as_slice)
    }
    /// The `i`th group of a server, by value: for walks that change things on the way.
    pub fn group_of(&self, id: BackendId, i: usize) -> Option<(GroupId, u16)> {
        self.groups_of(id).get(i).copied()
    }
    /// Whether the candidate in that slot is live.
    pub fn carries(&self, group: GroupId, slot: u16) -> bool {
        self.groups[group.index()].wheel.carries(slot)
    }
    /// The place of a server in a group. O(log of the server's groups).
    fn slot_of(&self, group: GroupId, id: BackendId) -> Option<u16> {
        slot_in(&self.groups_of, group, id)
    }
    /// Whether that server is a live candidate of that group.
    pub fn is_live(&self, group: GroupId, id: BackendId) -> bool {
        self.slot_of(group, id).is_some_and(|slot| self.carries(group, slot))
    }
    /// The `i`th live candidate, by value: for walks that change things on the way.
    pub fn live_at(&self, group: GroupId, i: usize) -> Option<BackendId> {
        let group = &self.groups[group.index()];
        group.live.get(i).map(|slot| group.candidates[*slot as usize])
    }

    /// Takes over a catalog whose servers the table already has. Wheels keep turning where a group's candidates stay the
    /// same and start anew where they change.
    pub fn configure(&mut self, now: Nanos, catalog: &Catalog, table: &BackendTable) {
        self.groups_of.clear();
        self.groups_of.resize_with(catalog.servers.len(), Vec::new);
        for (i, group) in catalog.groups.iter().enumerate() {
            let id = GroupId(i as u32);
            for (slot, backend) in (0..).zip(&group.candidates) {
                self.groups_of[backend.index()].push((id, slot));
            }
            let pool = catalog.pool(group.pool);
            let (algorithm, kv) = (pool.algorithm, pool.kv);
            let members = match algorithm {
                Algorithm::StickySession => members(catalog, &group.members),
                _ => Vec::new(),
            };
            let slots = group.candidates.len();
            let chooser = pool.entry.as_deref().map(|entry| {
                // What it remembers is of clusters by name, and goes on where the configuration is the same.
                let held = self.groups.get_mut(i).and_then(|held| held.chooser.take());
                let held = held.filter(|held| held.entry() == entry);
                let mut chooser = held.unwrap_or_else(|| Box::new(Chooser::new(entry)));
                let servers = group.candidates.iter().map(|id| catalog.server(*id));
                chooser.set_seats(servers.map(|server| (&*server.cluster_id, server.input_tps)));
                chooser
            });
            let fresh = RouteGroup {
                candidates: group.candidates.clone(),
                pool: group.pool,
                algorithm,
                kv,
                members,
                live: Vec::with_capacity(slots),
                wheel: Wheel::new(slots),
                balance: Balance::new(slots),
                roster: Roster::new(slots),
                chooser,
                seen: None,
                phase: self.phase,
                sent: vec![Sent::default(); slots],
                heard: vec![Sent::default(); slots * self.shards],
                unsaid: vec![false; slots],
            };
            match self.groups.get_mut(i) {
                None => self.groups.push(fresh),
                Some(held) if held.candidates == group.candidates => {
                    held.pool = group.pool;
                    held.algorithm = algorithm;
                    held.kv = kv;
                    held.members = fresh.members;
                    held.chooser = fresh.chooser;
                }
                Some(held) => {
                    // These figures are absolute: what stands under a server must go on, or peers would hear of turns undone.
                    let mut fresh = fresh;
                    for (slot, backend) in group.candidates.iter().enumerate() {
                        if let Some(old) = held.slot(*backend) {
                            let old = old as usize;
                            fresh.sent[slot] = held.sent[old];
                            fresh.heard[slot * self.shards..][..self.shards]
                                .copy_from_slice(&held.heard[old * self.shards..][..self.shards]);
                        }
                    }
                    self.changes.retain(|(changed, _)| *changed != id);
                    *held = fresh;
                }
            }
        }
        for group in &mut self.groups {
            group.refresh(now, table, &mut self.weights);
        }
    }

    /// Finds out again who is live in the groups of one server.
    pub fn refresh(&mut self, now: Nanos, id: BackendId, table: &BackendTable) {
        for (group, _) in self.groups_of.get(id.index()).map_or(&[][..], Vec::as_slice) {
            self.groups[group.index()].refresh(now, table, &mut self.weights);
        }
    }

    /// Whether some live candidate of the group was not tried.
    pub fn has_untried(&self, group: GroupId, tried: Tried) -> bool {
        let group = &self.groups[group.index()];
        if tried.is_empty() { group.has_live() } else { group.live().any(|id| !tried.contains(id)) }
    }

    /// The algorithm's choice among the live candidates that were not tried and for which `room` holds, a rule that must be the
    /// same in all calls. Turns the wheel unless an affinity decides.
    pub fn pick(
        &mut self,
        group: GroupId,
        tried: Tried,
        affinity: Affinity<'_>,
        table: &BackendTable,
        room: impl Fn(BackendId, &Row) -> bool,
    ) -> Option<Choice> {
        let choice = if tried.is_empty() && self.groups[group.index()].is_kept() {
            self.pick_of_all(group, affinity, table, room)
        } else if let Some(choice) = self.pick_by_chooser(group, tried, affinity, table, &room) {
            return Some(choice);
        } else {
            let fits = |id, row: &Row| !tried.contains(id) && room(id, row);
            self.pick_of_some(group, affinity, table, fits)
        };
        if let Some(choice) = choice.filter(|choice| choice.turned) {
            self.count(group, choice.slot, 1);
        }
        choice
    }

    /// Of all that have room, in a kv-aware or weighted round-robin group.
    fn pick_of_all(
        &mut self,
        group: GroupId,
        affinity: Affinity<'_>,
        table: &BackendTable,
        room: impl Fn(BackendId, &Row) -> bool,
    ) -> Option<Choice> {
        let held = &mut self.groups[group.index()];
        held.catch_up(group, table, &self.groups_of, &room);
        let with_room = held.roster.count();
        if with_room == 0 {
            return None;
        }
        let held = &self.groups[group.index()];
        let fits = |slot, _, _: &Row| held.roster.has_room(slot);
        if let Some(choice) = self.follow_match(group, affinity, table, || held.roster.loads(), fits) {
            return Some(choice);
        }
        let held = &mut self.groups[group.index()];
        if held.fallback() == Algorithm::LeastBusy {
            let with_room = held.live.iter().filter(|slot| held.roster.has_room(**slot));
            self.shown.clear();
            self.shown.extend(with_room.map(|slot| {
                let backend = held.candidates[*slot as usize];
                candidate(backend, *slot, table.row(backend))
            }));
            return Some(LeastBusy { balance: &held.balance }.choose(&mut held.wheel, &mut self.shown));
        }
        let slot = held.wheel.turn();
        Some(Choice {
            backend: held.candidates[slot as usize],
            slot,
            turned: with_room > 1,
            by: Algorithm::WeightedRoundRobin,
        })
    }

    /// In a group of one of Stargate's algorithms, if it has a choice.
    fn pick_by_chooser(
        &mut self,
        group: GroupId,
        tried: Tried,
        affinity: Affinity<'_>,
        table: &BackendTable,
        room: &impl Fn(BackendId, &Row) -> bool,
    ) -> Option<Choice> {
        let held = &mut self.groups[group.index()];
        held.chooser.as_ref()?;
        held.catch_up_chooser(group, table, &self.groups_of, room);
        let groups_of = &self.groups_of;
        let (mut slots, mut count) = ([0; ATTEMPTS_MAX], 0);
        for slot in tried.iter().filter_map(|id| slot_in(groups_of, group, id)) {
            slots[count] = slot;
            count += 1;
        }
        let slot = held.chooser.as_mut()?.choose(affinity.input, &slots[..count], &mut self.rng)?;
        let backend = held.candidates[slot as usize];
        Some(Choice { backend, slot, turned: false, by: held.algorithm })
    }

    /// Of those that `fits` holds for, looking at all.
    fn pick_of_some(
        &mut self,
        group: GroupId,
        affinity: Affinity<'_>,
        table: &BackendTable,
        fits: impl Fn(BackendId, &Row) -> bool,
    ) -> Option<Choice> {
        self.shown.clear();
        let held = &self.groups[group.index()];
        for slot in &held.live {
            let backend = held.candidates[*slot as usize];
            let row = table.row(backend);
            if fits(backend, row) {
                self.shown.push(candidate(backend, *slot, row));
            }
        }
        if self.shown.is_empty() {
            return None;
        }
        let loads = || Loads::of(self.shown.iter().map(|shown| (shown.weight, shown.in_flight)));
        let fits = |slot, id, row: &Row| held.wheel.carries(slot) && fits(id, row);
        if let Some(choice) = self.follow_match(group, affinity, table, loads, fits) {
            return Some(choice);
        }
        let held = &mut self.groups[group.index()];
        // A kv-aware group comes here when no match is followed.
        let by = if held.algorithm == Algorithm::KvAware { held.fallback() } else { held.algorithm };
        let (wheel, shown) = (&mut held.wheel, &mut self.shown[..]);
        Some(match by {
            Algorithm::LeastBusy => LeastBusy { balance: &held.balance }.choose(wheel, shown),
            Algorithm::WeightedRoundRobin | Algorithm::KvAware => WeightedRoundRobin.choose(wheel, shown),
            // One of Stargate's comes here when it has no choice.
            Algorithm::LeastConnections | Algorithm::Stargate(_) => LeastConnections.choose(wheel, shown),
            Algorithm::StickySession => {
                let sticky = StickySession { key: affinity.session, members: &held.members };
                sticky.choose(wheel, shown)
            }
        })
    }

    /// In a kv-aware group: the server whose match is followed, if any. `fits`: whether a server, given by slot, name and row, is one of
    /// those whose `loads` are given.
    fn follow_match(
        &self,
        group: GroupId,
        affinity: Affinity<'_>,
        table: &BackendTable,
        loads: impl FnOnce() -> Option<Loads>,
        fits: impl Fn(u16, BackendId, &Row) -> bool,
    ) -> Option<Choice> {
        let held = &self.groups[group.index()];
        if affinity.blocks.is_empty() || held.algorithm != Algorithm::KvAware {
            return None;
        }
        let matches = affinity.memory.matches(held.pool);
        matches.clone().next().filter(|best| best.blocks >= held.kv.min_match_blocks)?;
        // Of the last length that was asked about: many servers may match as long.
        let end = Cell::new((0, false));
        let continues = |blocks: u32| {
            if end.get().0 != blocks {
                end.set((blocks, affinity.ends.contains(affinity.blocks[blocks as usize - 1])));
            }
            end.get().1
        };
        let holders = matches.filter_map(|found| {
            let slot = self.slot_of(group, found.backend)?;
            let row = table.row(found.backend);
            fits(slot, found.backend, row).then(|| Candidate {
                matched: found.blocks,
                continues: continues(found.blocks),
                ..candidate(found.backend, slot, row)
            })
        });
        let policy =
            KvAware { rules: &held.kv, balance: &held.balance, blocks: affinity.blocks.len() as u32 };
        let chosen = policy.choose(&loads()?, holders)?;
        Some(Choice { backend: chosen.backend, slot: chosen.slot, turned: false, by: Algorithm::KvAware })
    }

    /// Where a request belongs, eligible or not: in a sticky-session group the session's server, in one of pulsar's a server of the
    /// first cluster of its key.
    pub fn home(&mut self, group: GroupId, session: Option<u64>, input: Input<'_>) -> Option<BackendId> {
        let held = self.groups.get_mut(group.index())?;
        match &mut held.chooser {
            Some(chooser) => {
                let slot = chooser.first(input.affinity_key)?;
                Some(held.candidates[slot as usize])
            }
            None => session.and_then(|key| owner(key, &held.members)),
        }
    }

    /// Whether who belongs at the one server is at home at the other.
    pub fn is_home(&self, group: GroupId, home: BackendId, other: BackendId) -> bool {
        let clustered = || {
            let chooser = self.groups.get(group.index())?.chooser.as_ref()?;
            Some(chooser.are_one(self.slot_of(group, home)?, self.slot_of(group, other)?))
        };
        home == other || clustered().unwrap_or(false)
    }

    /// Takes a turned choice back: the request went elsewhere or nowhere.
    pub fn undo(&mut self, group: GroupId, choice: Choice) {
        let Some(held) = self.groups.get_mut(group.index()) else { return };
        // A group whose candidates changed in between has a new wheel that never turned for this.
        if choice.turned && held.candidates.get(choice.slot as usize) == Some(&choice.backend) {
            held.wheel.follow(choice.slot, -1);
            self.count(group, choice.slot, -1);
        }
    }

    /// A request of this shard was given to that server, or a permit there was asked for: in a kv-aware group its share is
    /// counted. `room`, as in [`Router::pick`]: who else could have taken it.
    pub fn note_request(
        &mut self,
        group: GroupId,
        backend: BackendId,
        table: &BackendTable,
        room: impl Fn(BackendId, &Row) -> bool,
    ) {
        let Some(slot) = self.slot_of(group, backend) else { return };
        let held = &mut self.groups[group.index()];
        if held.algorithm == Algorithm::KvAware {
            held.catch_up(group, table, &self.groups_of, &room);
            held.balance.note(slot, 1, 0, Takers::WithRoom);
            self.tell(group, slot, |sent| sent.dispatches = sent.dispatches.wrapping_add(1));
        }
    }

    /// A request that was counted went elsewhere or nowhere.
    pub fn take_back_request(&mut self, group: GroupId, backend: BackendId) {
        let Some((slot, held)) = self.kv_slot(group, backend) else { return };
        held.balance.take_back(slot, 1);
        self.tell(group, slot, |sent| sent.dispatches = sent.dispatches.wrapping_sub(1));
    }

    /// A counted request's prompt has so many full blocks, and tokens to be computed.
    pub fn note_work(&mut self, group: GroupId, backend: BackendId, blocks: u32, work_tokens: u64) {
        let Some((slot, held)) = self.kv_slot(group, backend) else { return };
        if blocks > 0 {
            held.balance.note_prompt(blocks);
        }
        held.balance.note(slot, 0, work_tokens, Takers::Live);
        self.tell(group, slot, |sent| sent.work_tokens = sent.work_tokens.wrapping_add(work_tokens));
    }

    fn kv_slot(&mut self, group: GroupId, backend: BackendId) -> Option<(u16, &mut RouteGroup)> {
        let slot = self.slot_of(group, backend)?;
        let held = &mut self.groups[group.index()];
        (held.algorithm == Algorithm::KvAware).then_some((slot, held))
    }

    /// Peers have to hear of a changed figure.
    fn tell(&mut self, group: GroupId, slot: u16, change: impl FnOnce(&mut Sent)) {
        if self.shards > 1 {
            change(&mut self.groups[group.index()].sent[slot as usize]);
            self.mark(group, slot);
        }
    }

    fn count(&mut self, group: GroupId, slot: u16, turns: i64) {
        self.tell(group, slot, |sent| sent.turns = sent.turns.wrapping_add_signed(turns));
    }

    fn mark(&mut self, group: GroupId, slot: u16) {
        let unsaid = &mut self.groups[group.index()].unsaid[slot as usize];
        if !*unsaid {
            *unsaid = true;
            self.changes.push((group, slot));
        }
    }

    /// What a peer has sent to a server, in all.
    pub fn hear(&mut self, from: ShardId, group: GroupId, backend: BackendId, sent: Sent) {
        // A group this shard has not yet been told of: the next figure is absolute again.
        let Some(slot) = self.slot_of(group, backend) else { return };
        let held = &mut self.groups[group.index()];
        let before = &mut held.heard[slot as usize * self.shards + from.index()];
        let turns = sent.turns.wrapping_sub(before.turns) as i64;
        let dispatches = sent.dispatches.wrapping_sub(before.dispatches) as i64;
        let work_tokens = sent.work_tokens.wrapping_sub(before.work_tokens);
        *before = sent;
        if held.fallback() == Algorithm::WeightedRoundRobin {
            held.wheel.follow(slot, turns);
        }
        if dispatches < 0 {
            held.balance.take_back(slot, dispatches.unsigned_abs());
        }
        if dispatches > 0 || work_tokens > 0 {
            let times = dispatches.max(0) as u64;
            held.balance.note(slot, times, work_tokens, Takers::Live);
        }
    }

    pub fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// The next figure that peers lack.
    pub fn pop_change(&mut self) -> Option<(GroupId, BackendId, Sent)> {
        let (group, slot) = self.changes.pop()?;
        let held = &mut self.groups[group.index()];
        held.unsaid[slot as usize] = false;
        Some((group, held.candidates[slot as usize], held.sent[slot as usize]))
    }

    /// Has that figure sent once more.
    pub fn resend(&mut self, group: GroupId, backend: BackendId) {
        if let Some(slot) = self.slot_of(group, backend) {
            self.mark(group, slot);
        }
    }
}

#[inline]
fn candidate(backend: BackendId, slot: u16, row: &Row) -> Candidate {
    Candidate {
        backend,
        slot,
        weight: row.weight,
        in_flight: row.load(),
        matched: 0,
        continues: false,
        prefill_tokens: row.prefill_tokens + row.prefill_tokens_peers,
    }
}

fn members(catalog: &Catalog, ids: &[BackendId]) -> Vec<Member> {
    let member = |id: &BackendId| {
        let server = catalog.server(*id);
        Member { backend: *id, name: hash_name(&server.name), weight: server.affinity_weight }
    };
    ids.iter().map(member).collect()
}
