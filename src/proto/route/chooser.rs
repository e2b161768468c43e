//! Stargate's algorithms in a pool: the live candidates as clusters, what is known of each, and the one that a request gets.
//!
//! Servers of one `cluster_id` are one cluster: figures added up, and its servers take turns. What a cluster is known by is what the
//! router sees itself: requests in flight, prompt tokens and requests not yet computed, ceilings, and measured or configured input
//! rates. A server whose rate is not known yet is taken to read as fast for its weight as the others do on average, or
//! [`STAND_IN_TPS`] for a weight of 1 where none is known: so pulsar has weights and times compare from the first request on.
//! Queue times by priority, round trips and caches are not looked at. A cluster none of whose servers has room, or is untried, is not
//! there for the request, but keeps its place on rings and in rankings.
//!
//! *Invariant*: after [`Chooser::settle`] figures are those of the seats; a choice is a seat with room that the request has not
//! tried. `clusters`, `crews` and `shut` have one order, by cluster id.
//! *Bound and cost*: a changed server costs its cluster's size, and all unknown ones where rates move while some are not known; a
//! choice costs what [`Balancer::choose`] does, and a scan of bytes where somebody is full. No allocation in the steady state.
//! *Source*: the Stargate rules, sections 2, 6.5 and 6.7; the Lifeboat rules, sections 2 and 3.

use crate::proto::backend::rates::Published;
use crate::proto::backend::table::{Row, fixed_weight};
use crate::proto::config::lb_config::{Entry, MethodSettings, RendezvousWeight};
use crate::proto::stargate::balancer::{Ask, Balancer, Choice};
use crate::proto::stargate::random::Rng;
use crate::proto::stargate::stats::{Cluster, Stats};

/// What a server of weight 1 is taken to read, in tokens per second, while no rate is known of any.
pub const STAND_IN_TPS: f64 = 1000.0;

/// Of a seat that is not live.
const NOWHERE: u32 = u32::MAX;

/// What a request says to such an algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Input<'a> {
    /// Of its prompt, estimated; 0: unknown.
    pub tokens: u64,
    /// What ties it to others; empty: nothing.
    pub affinity_key: &'a [u8],
}

/// One candidate of the group, by slot.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seat {
    cluster_id: Box<str>,
    /// Configured; 0: measured.
    input_tps: f64,
    /// Place of its cluster, or [`NOWHERE`].
    cluster: u32,
    now: Figures,
}

/// What was last seen of a seat.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Figures {
    room: bool,
    in_flight: u32,
    ceiling: u32,
    prefilling: u32,
    prefill_tokens: u64,
    weight: u64,
    /// 0: not known.
    rate: Published,
}

/// The servers of a cluster.
#[derive(Clone, Debug, Default)]
struct Crew {
    slots: Vec<u16>,
    turn: u64,
    marked: bool,
}

/// Numbers that grow whenever what they are of changes.
#[derive(Clone, Copy, Debug, Default)]
struct Versions {
    members: u64,
    mean: u64,
    greatest: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Chooser {
    entry: Box<Entry>,
    balancer: Balancer,
    /// By slot.
    seats: Vec<Seat>,
    clusters: Vec<Cluster>,
    crews: Vec<Crew>,
    /// No server has room.
    shut: Vec<bool>,
    shut_count: usize,
    versions: Versions,
    marked: Vec<u32>,
    /// Rates moved, or who is live.
    rates_moved: bool,
    /// What a weight of a millionth is taken to read.
    stand_in: Published,
    excluded: Vec<usize>,
}

impl Chooser {
    /// One that has chosen nothing yet and has no seats.
    pub fn new(entry: &Entry) -> Chooser {
        Chooser {
            entry: Box::new(entry.clone()),
            balancer: Balancer::new(entry, b"", b""),
            seats: Vec::new(),
            clusters: Vec::new(),
            crews: Vec::new(),
            shut: Vec::new(),
            shut_count: 0,
            versions: Versions::default(),
            marked: Vec::new(),
            rates_moved: false,
            stand_in: Published::default(),
            excluded: Vec::new(),
        }
    }

    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// The group's candidates, by slot: cluster id and configured input rate (0: none). Nobody is live before
    /// [`Chooser::set_live`].
    pub fn set_seats<'c>(&mut self, seats: impl Iterator<Item = (&'c str, f64)>) {
        self.seats.clear();
        let seat = |(cluster_id, input_tps): (&str, f64)| Seat {
            cluster_id: cluster_id.into(),
            input_tps,
            cluster: NOWHERE,
            ..Seat::default()
        };
        self.seats.extend(seats.map(seat));
    }

    /// Who is live from now on. Nobody of them has room until [`Chooser::see`] says so.
    pub fn set_live(&mut self, live: &[u16]) {
        let old: Vec<(Box<str>, u64)> = self
            .clusters
            .drain(..)
            .map(|cluster| cluster.id)
            .zip(self.crews.drain(..).map(|c| c.turn))
            .collect();
        for seat in &mut self.seats {
            (seat.cluster, seat.now) = (NOWHERE, Figures::default());
        }
        let mut slots = live.to_vec();
        slots.sort_by(|a, b| {
            let id = |slot: &u16| &self.seats[usize::from(*slot)].cluster_id;
            id(a).cmp(id(b)).then(a.cmp(b))
        });
        for slot in slots {
            let seat = &mut self.seats[usize::from(slot)];
            if self.clusters.last().is_none_or(|cluster| cluster.id != seat.cluster_id) {
                let turn = old.binary_search_by(|(id, _)| id.cmp(&seat.cluster_id)).map_or(0, |i| old[i].1);
                self.clusters.push(Cluster { id: seat.cluster_id.clone(), ..Cluster::default() });
                self.crews.push(Crew { turn, ..Crew::default() });
            }
            seat.cluster = self.clusters.len() as u32 - 1;
            self.crews.last_mut().expect("just pushed").slots.push(slot);
        }
        self.shut.clear();
        self.shut.resize(self.clusters.len(), true);
        self.shut_count = self.shut.len();
        self.marked.clear();
        self.rates_moved = true;
        self.versions.members += 1;
        self.versions.mean += 1;
        self.versions.greatest += 1;
    }

    /// A server as it is now.
    #[inline]
    pub fn see(&mut self, slot: u16, row: &Row, room: bool, measured: Published) {
        let seat = &mut self.seats[usize::from(slot)];
        if seat.cluster == NOWHERE {
            return;
        }
        let rate = match seat.input_tps {
            0.0 => measured,
            fixed => Published { mean: fixed, greatest: fixed },
        };
        let now = Figures {
            room,
            // Permits are asked for, peers' figures stale, ceilings lowered: whoever has room is not full, and nobody hides it for
            // the others of its cluster.
            in_flight: if row.gated() { row.load().min(row.ceiling - u32::from(room)) } else { row.load() },
            ceiling: row.ceiling,
            prefilling: row.prefilling.saturating_add(row.prefilling_peers),
            prefill_tokens: row.prefill_tokens.saturating_add(row.prefill_tokens_peers),
            weight: row.weight,
            rate,
        };
        if seat.now == now {
            return;
        }
        self.rates_moved |= seat.now.rate != rate || seat.now.weight != row.weight;
        seat.now = now;
        let cluster = seat.cluster;
        self.mark(cluster);
    }

    fn mark(&mut self, cluster: u32) {
        let crew = &mut self.crews[cluster as usize];
        if !crew.marked {
            crew.marked = true;
            self.marked.push(cluster);
        }
    }

    /// Brings the clusters up to date with what was seen.
    #[inline]
    pub fn settle(&mut self) {
        if std::mem::take(&mut self.rates_moved) {
            self.stand_in();
        }
        while let Some(at) = self.marked.pop() {
            self.add_up(at as usize);
        }
    }

    /// Finds what unknown rates are taken to be.
    fn stand_in(&mut self) {
        let live = || self.seats.iter().filter(|seat| seat.cluster != NOWHERE);
        if live().all(|seat| seat.now.rate.mean > 0.0) {
            return;
        }
        let (mut weights, mut mean, mut greatest) = (0.0, 0.0, 0.0);
        for now in live().map(|seat| &seat.now).filter(|now| now.rate.mean > 0.0) {
            weights += now.weight as f64;
            mean += now.rate.mean;
            greatest += now.rate.greatest;
        }
        let stand_in = if weights > 0.0 {
            Published { mean: mean / weights, greatest: greatest / weights }
        } else {
            let tps = STAND_IN_TPS / fixed_weight(1.0) as f64;
            Published { mean: tps, greatest: tps }
        };
        if std::mem::replace(&mut self.stand_in, stand_in) != stand_in {
            for slot in 0..self.seats.len() {
                let Seat { cluster, now, .. } = &self.seats[slot];
                if *cluster != NOWHERE && now.rate.mean == 0.0 {
                    self.mark(*cluster);
                }
            }
        }
    }

    fn add_up(&mut self, at: usize) {
        let crew = &mut self.crews[at];
        crew.marked = false;
        let stats = &mut self.clusters[at].stats;
        let (mut mean, mut greatest) = (0.0, 0.0_f64);
        let (mut running, mut limit, mut unlimited) = (0, 0, false);
        let (mut queued, mut queued_tokens, mut room) = (0, 0_u64, false);
        for slot in &crew.slots {
            let now = &self.seats[usize::from(*slot)].now;
            let rate = match now.rate.mean {
                0.0 => {
                    let weight = now.weight as f64;
                    Published { mean: self.stand_in.mean * weight, greatest: self.stand_in.greatest * weight }
                }
                _ => now.rate,
            };
            mean += rate.mean;
            greatest = greatest.max(rate.greatest);
            running += u64::from(now.in_flight);
            limit += u64::from(now.ceiling);
            unlimited |= now.ceiling == 0;
            queued += u64::from(now.prefilling);
            queued_tokens = queued_tokens.saturating_add(now.prefill_tokens);
            room |= now.room;
        }
        self.versions.mean += u64::from(stats.last_mean_input_tps.to_bits() != mean.to_bits());
        self.versions.greatest += u64::from(stats.max_input_tps.to_bits() != greatest.to_bits());
        *stats = Stats {
            last_mean_input_tps: mean,
            max_input_tps: greatest,
            queue_size: queued,
            queued_input_size: queued_tokens,
            num_running_queries: running,
            max_engine_concurrency: if unlimited { 0 } else { limit },
            input_processing_queries: queued,
            ..Stats::default()
        };
        if std::mem::replace(&mut self.shut[at], !room) == room {
            self.shut_count = if room { self.shut_count - 1 } else { self.shut_count + 1 };
        }
    }

    /// A number that grows when clusters come or go, or what weights are made of changes.
    fn version(&self) -> u64 {
        match &self.entry.method {
            MethodSettings::Pulsar(pulsar) | MethodSettings::PulsarWaitAndWiden { pulsar, .. } => {
                match pulsar.weight {
                    RendezvousWeight::MaxInputTps => self.versions.greatest,
                    RendezvousWeight::LastMeanInputTps => self.versions.mean,
                }
            }
            _ => self.versions.members,
        }
    }

    /// Whether the algorithm goes by affinity keys alone, so that a request without one is nobody's.
    fn needs_key(&self) -> bool {
        matches!(self.entry.method, MethodSettings::Pulsar(_) | MethodSettings::PulsarWaitAndWiden { .. })
    }

    /// The seat that a request gets: with room, and not among `tried`. `None`: the algorithm has no choice. After
    /// [`Chooser::settle`].
    pub fn choose(&mut self, input: Input<'_>, tried: &[u16], rng: &mut Rng) -> Option<u16> {
        if self.shut_count == self.clusters.len() || input.affinity_key.is_empty() && self.needs_key() {
            return None;
        }
        self.excluded.clear();
        let seats = &self.seats;
        let usable = |slot: &u16| seats[usize::from(*slot)].now.room && !tried.contains(slot);
        for slot in tried {
            let cluster = seats[usize::from(*slot)].cluster;
            if cluster != NOWHERE && !self.crews[cluster as usize].slots.iter().any(usable) {
                self.excluded.push(cluster as usize);
            }
        }
        let version = self.version();
        let ask = Ask {
            input_tokens: input.tokens,
            affinity_key: input.affinity_key,
            excluded: &self.excluded,
            shut: if self.shut_count > 0 { &self.shut } else { &[] },
            ..Ask::default()
        };
        // Nothing in a pool's entry waits, so that a wait would be one for buckets: the request goes elsewhere instead.
        let Choice::Selected(selection) =
            self.balancer.choose(&self.entry, &self.clusters, version, &ask, rng)
        else {
            return None;
        };
        let crew = &mut self.crews[selection.index];
        if let [only] = crew.slots[..] {
            return Some(only);
        }
        let count = crew.slots.iter().filter(|slot| usable(slot)).count() as u64;
        let turn = crew.turn % count.max(1);
        crew.turn = crew.turn.wrapping_add(1);
        crew.slots.iter().filter(|slot| usable(slot)).nth(turn as usize).copied()
    }

    /// A seat of the cluster that is first for a key, whatever room it has. `None`: the algorithm ranks none.
    pub fn first(&mut self, affinity_key: &[u8]) -> Option<u16> {
        if affinity_key.is_empty() || self.clusters.is_empty() {
            return None;
        }
        let version = self.version();
        let first = self.balancer.first(&self.clusters, version, affinity_key)?;
        self.crews[first].slots.first().copied()
    }

    /// Whether two live seats are of one cluster.
    pub fn are_one(&self, a: u16, b: u16) -> bool {
        let cluster = |slot: u16| self.seats[usize::from(slot)].cluster;
        cluster(a) != NOWHERE && cluster(a) == cluster(b)
    }
}

#[cfg(test)]
mod tests;
