//! One target: its clusters, dense and sorted, what its load balancers remember, who waits for it.
//!
//! A cluster stands here as long as one of its servers is active. What a request's choice reads is kept as statistics of whole clusters;
//! when a slot changes, its clusters are marked and brought up to date before the next look at them.
//!
//! *Invariant*: `clusters` and `groups` have the same order, by cluster id, each once; a cluster has at least one member. Once
//! [`Target::refresh`] has run, figures are those of the slots.
//! *Bound and cost*: a refresh is linear in the clusters that were marked; clusters coming or going cost a sort of the target's slots.
//! *Source*: the Stargate rules, sections 1.6, 5.6, 6.5 and 6.6.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::rc::Rc;

use super::aggregate::{self, Scratch};
use super::figures::Counts;
use super::flight::{Flights, Method};
use super::layout::SlotId;
use super::stats::Cluster;
use super::table::SlotTable;
use crate::clock::Nanos;
use crate::proto::config::lb_config::{Entry, EntryId, MethodSettings, RendezvousWeight};
use crate::proto::ids::{BackendId, Ticket};

/// Spellings of methods that are told without reading them.
const NAMED_MAX: usize = 8;

/// Longer spellings are read each time.
const NAMED_BYTES_MAX: usize = 64;

/// A header value, `None` for no header, and what it came to.
#[derive(Debug)]
struct Named {
    value: Option<Box<[u8]>>,
    method: Rc<Method>,
}

/// The servers of a cluster, beside its figures.
#[derive(Clone, Debug)]
pub struct Group {
    /// The cluster's name, as the router numbers names.
    pub name: u32,
    /// Active slots, in the order of their servers' names.
    members: Vec<SlotId>,
    /// Dispatches so far.
    turn: u64,
    /// It is among the target's marked ones.
    marked: bool,
}

impl Group {
    /// The server whose turn it is among those that have not failed the request. `None`: all have.
    pub fn next(&mut self, failed: &[BackendId], table: &SlotTable) -> Option<SlotId> {
        let fit = |id: &SlotId| {
            let slot = table.row(*id).slot.as_ref();
            slot.is_some_and(|slot| !failed.contains(&slot.backend))
        };
        let count = if failed.is_empty() {
            self.members.len()
        } else {
            self.members.iter().filter(|id| fit(id)).count()
        };
        if count == 0 {
            return None;
        }
        let position = (self.turn % count as u64) as usize;
        self.turn += 1;
        if failed.is_empty() {
            return Some(self.members[position]);
        }
        self.members.iter().filter(|id| fit(id)).nth(position).copied()
    }

    pub fn members(&self) -> &[SlotId] {
        &self.members
    }
}

/// Numbers that grow whenever what they are of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Versions {
    members: u64,
    mean: u64,
    max: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Target {
    pub routing_key: Box<str>,
    pub model: Box<str>,
    /// Advertised, active or not.
    slots: Vec<SlotId>,
    pub clusters: Vec<Cluster>,
    pub groups: Vec<Group>,
    marked: Vec<u32>,
    versions: Versions,
    /// When the last advertisement ended.
    left: Option<Nanos>,
    methods: Vec<(EntryId, Rc<Method>)>,
    /// What header values without parameters came to; `None`: no header. At most [`NAMED_MAX`].
    named: Vec<Named>,
    /// Requests that may queue at a cluster over its limit, by the most generous of the methods that somebody waited for.
    pub max_queued: u64,
    pub counts: Counts,
    /// By time of arrival.
    pub waiting: BTreeSet<(Nanos, Ticket)>,
    /// Clusters that eased since they were looked at last, each once.
    pub eased: Vec<u32>,
    /// Clusters came or went, or something moved that may help some other way.
    pub changed: bool,
    /// Something moved otherwise.
    pub moved: bool,
    /// The router has it on its list.
    pub touched: bool,
    /// The router looks at all who wait later on.
    pub recheck: bool,
}

impl Target {
    pub fn new(routing_key: &str, model: &str) -> Target {
        Target { routing_key: routing_key.into(), model: model.into(), ..Target::default() }
    }

    pub fn advertise(&mut self, id: SlotId) {
        if !self.slots.contains(&id) {
            self.slots.push(id);
        }
    }

    pub fn withdraw(&mut self, now: Nanos, id: SlotId) {
        let before = self.slots.len();
        self.slots.retain(|slot| *slot != id);
        if before > 0 && self.slots.is_empty() {
            self.left = Some(now);
        }
    }

    /// Somebody advertises it, or did less than `grace_ms` ago.
    pub fn is_known(&self, now: Nanos, grace_ms: u64) -> bool {
        !self.slots.is_empty() || self.left.is_some_and(|left| now < left.plus_ms(grace_ms))
    }

    /// Active servers.
    pub fn active(&self) -> usize {
        self.groups.iter().map(|group| group.members.len()).sum()
    }

    /// A number that grows when clusters come or go, or what weights are made of for that entry changes.
    pub fn version(&self, entry: &Entry) -> u64 {
        let pulsar = match &entry.method {
            MethodSettings::Pulsar(pulsar) | MethodSettings::PulsarWaitAndWiden { pulsar, .. } => pulsar,
            _ => return self.versions.members,
        };
        match pulsar.weight {
            RendezvousWeight::MaxInputTps => self.versions.max,
            RendezvousWeight::LastMeanInputTps => self.versions.mean,
        }
    }

    /// What that header value came to before, if it was seen lately.
    #[inline]
    pub fn named(&self, value: Option<&[u8]>) -> Option<&Rc<Method>> {
        self.named.iter().find(|named| named.value.as_deref() == value).map(|named| &named.method)
    }

    /// The configuration with that number, made of `entry` at its first use, for a header value that [`Target::named`] does not know.
    pub fn method(&mut self, value: Option<&[u8]>, id: EntryId, entry: &Entry) -> Rc<Method> {
        let known = self.methods.iter().find(|(known, _)| *known == id).map(|(_, method)| method.clone());
        let method = known.unwrap_or_else(|| {
            let (routing_key, model) = (self.routing_key.as_bytes(), self.model.as_bytes());
            let method = Rc::new(Method::new(entry.clone(), routing_key, model));
            self.methods.push((id, method.clone()));
            method
        });
        if value.is_none_or(|value| value.len() <= NAMED_BYTES_MAX) {
            if self.named.len() == NAMED_MAX {
                self.named.remove(0);
            }
            self.named.push(Named { value: value.map(Box::from), method: method.clone() });
        }
        method
    }

    /// Where the cluster of that name stands.
    pub fn position(&self, name: u32) -> Option<usize> {
        self.groups.iter().position(|group| group.name == name)
    }

    /// The figures of that cluster are out of date.
    #[inline]
    pub fn mark(&mut self, cluster: u32) {
        let group = &mut self.groups[cluster as usize];
        if !group.marked {
            group.marked = true;
            self.marked.push(cluster);
        }
    }

    /// Brings marked clusters up to date, and notes what that means for those who wait.
    #[inline]
    pub fn refresh(&mut self, table: &mut SlotTable, flights: &Flights, scratch: &mut Scratch) {
        while let Some(at) = self.marked.pop() {
            self.refresh_one(at, table, flights, scratch);
        }
    }

    fn refresh_one(&mut self, at: u32, table: &mut SlotTable, flights: &Flights, scratch: &mut Scratch) {
        let (group, cluster) = (&mut self.groups[at as usize], &mut self.clusters[at as usize]);
        group.marked = false;
        let moved = aggregate::refresh(cluster, &group.members, table, flights, scratch);
        self.versions.mean += u64::from(moved.mean);
        self.versions.max += u64::from(moved.max);
        if self.waiting.is_empty() {
            return;
        }
        if moved.eased && !self.eased.contains(&at) {
            self.eased.push(at);
        }
        self.moved |= moved.at_all;
    }

    /// Servers of the target came, went, rose or fell. `me`: its number; `names`: the numbers of cluster names. True: its last
    /// active server has gone, and with it what its load balancers remember.
    pub fn rebuild(&mut self, me: u32, table: &mut SlotTable, mut name: impl FnMut(&str) -> u32) -> bool {
        let was_active = !self.groups.is_empty();
        for id in self.groups.iter().flat_map(|group| &group.members) {
            table.row_mut(*id).memberships.retain(|(target, _)| *target != me);
        }
        let old = std::mem::take(&mut self.groups);
        self.clusters.clear();
        self.marked.clear();
        self.eased.clear();
        let mut slots: Vec<SlotId> = self.slots.iter().copied().filter(|id| table.is_active(*id)).collect();
        let place = |id: &SlotId| {
            let slot = table.row(*id).slot.as_ref().expect("active slots are laid out");
            (&slot.cluster_id, &slot.server)
        };
        slots.sort_unstable_by(|a, b| match place(a).cmp(&place(b)) {
            Ordering::Equal => a.cmp(b),
            order => order,
        });
        for id in slots {
            let row = table.row_mut(id);
            let cluster_id = row.slot.as_ref().expect("active slots are laid out").cluster_id.clone();
            if self.clusters.last().is_none_or(|last| last.id != cluster_id) {
                let name = name(&cluster_id);
                let turn = old.iter().find(|group| group.name == name).map_or(0, |group| group.turn);
                self.groups.push(Group { name, members: Vec::new(), turn, marked: false });
                self.clusters.push(Cluster { id: cluster_id, ..Cluster::default() });
            }
            let at = self.groups.len() as u32 - 1;
            self.groups[at as usize].members.push(id);
            row.memberships.push((me, at));
        }
        for at in 0..self.groups.len() as u32 {
            self.mark(at);
        }
        self.versions.members += 1;
        self.versions.mean += 1;
        self.versions.max += 1;
        self.changed = true;
        let gone = was_active && self.groups.is_empty();
        if gone {
            self.methods.clear();
            self.named.clear();
            self.max_queued = 0;
        }
        gone
    }
}

#[cfg(test)]
mod tests;
