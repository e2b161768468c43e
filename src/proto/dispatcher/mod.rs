//! One shard's brain: who takes each request, who waits, who is benched. No I/O in it, no clock, no chance: the same calls
//! give the same answers.
//!
//! Verbs: `handle_*` tell it what happened at `now`; `poll_event` and `poll_message` say what follows, and have to be drained
//! after every turn; `poll_timeout` says when to call `handle_timeout`. Shard 0 is home: it also keeps the permit ledger and
//! the waiting queue of all shards, and asks itself without a message, so that one shard alone is exact.
//!
//! A request takes a permit that this shard holds free; without one it asks home and waits for the answer. Behind requests
//! of its group that already wait here, a new one asks too: nobody is overtaken by a neighbour.
//!
//! *Invariant*: on a server with a ceiling no request runs without a permit, over all shards never more than the ceiling. Each
//! ticket is answered by one event or withdrawn. A permit is held, on its way, or spare; never lost.
//! *Bound and cost*: [`Dispatcher::handle_request`] costs what the group's algorithm does ([`super::route::router`]), without
//! allocation, hashing or message when a permit is at hand; waiting costs O(log waiting); a change of health O(groups of the server × candidates).
//! *Errors*: [`Rejection`]: `ModelNotFound`, `NoServerInTier`, `InputTooLong`, `NoHealthyServer`, `AtCapacity`, `QueueFull`,
//! `QueueTimeout`.
//! *Source*: the Lifeboat rules, sections 2 to 4, 6 and 9.

mod benching;
mod home;
mod lease;
mod prompts;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};

use super::admission::ledger::{LeaseRules, Ledger};
use super::admission::queue::Queue;
use super::admission::tickets::Tickets;
use super::backend::bench::{BenchRules, Verdict};
use super::backend::catalog::{Algorithm, Catalog, RoutingMode};
use super::backend::prefix_memory::{Ends, PrefixMemory};
use super::backend::table::{BackendTable, Row};
use super::error::Rejection;
use super::ids::{BackendId, GroupId, PoolId, ShardId, Ticket};
use super::message::{Message, Tried, Update, Urgency};
use super::report::{CLIENTS_SHOWN_MAX, ShardReport};
pub use super::route::chooser::Input;
use super::route::policy::{Affinity, Choice};
use super::route::router::Router;
use crate::clock::Nanos;
use crate::limits::SHARDS_MAX;
use home::Home;
pub use prompts::{Belief, Prompted};

/// What a dispatcher is told once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatcherOptions {
    /// Consecutive failures that bench a server; 0 never benches.
    pub bench_after: u32,
    /// First time on the bench, in milliseconds; doubles each time until a success.
    pub bench_ms: u64,
    /// Longest time on the bench, in milliseconds.
    pub bench_max_ms: u64,
    /// Steps that this shard's wheels start further; `None`: the shard's number.
    pub wheel_phase: Option<u32>,
    /// Home's generosity with permits.
    pub lease_rules: LeaseRules,
    /// What this shard's prefix memory may take, in bytes.
    pub kv_memory_bytes_max: usize,
    /// Where algorithms that draw lots begin; each shard draws its own.
    pub seed: u64,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        DispatcherOptions {
            bench_after: 3,
            bench_ms: 1000,
            bench_max_ms: 30_000,
            wheel_phase: None,
            lease_rules: LeaseRules::default(),
            kv_memory_bytes_max: 1 << 30,
            seed: 0,
        }
    }
}

/// A request's place: its permit is taken, in-flight counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub backend: BackendId,
    /// Requests in flight on the server over all shards, this one included; never above `ceiling` where that is not 0.
    pub in_flight: u32,
    /// The ceiling in force; 0 when the gate is off.
    pub ceiling: u32,
    pub algorithm_used: Algorithm,
    /// Time spent waiting, in nanoseconds; 0 when it went straight through.
    pub wait_ns: u64,
}

/// What a request asks for, besides its group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted<'a> {
    /// Servers that it has been to.
    pub tried: Tried,
    /// The first eight bytes of the digest of its session's key. Read in sticky-session pools.
    pub session: Option<u64>,
    /// Identities of its prompt's full blocks, in order. Read in kv-aware pools.
    pub blocks: &'a [u64],
    /// Read in pools of Stargate's algorithms.
    pub input: Input<'a>,
}

impl<'a> Wanted<'a> {
    fn affinity(&self, memory: &'a PrefixMemory, ends: &'a Ends) -> Affinity<'a> {
        Affinity { session: self.session, memory, ends, blocks: self.blocks, input: self.input }
    }
}

/// The answer to a request.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send it there, and call [`Dispatcher::handle_done`] when it has left the server, however it ended.
    Dispatch(Placement),
    /// An [`Event`] will answer that ticket, unless it is withdrawn first.
    Wait(Ticket),
    Reject(Rejection),
}

/// Whether a server can take a request: at home what the ledger says, elsewhere what this shard holds and believes. One rule for all
/// that a shard's router is asked.
fn room(home: Option<&Home>) -> impl Fn(BackendId, &Row) -> bool + '_ {
    move |id, row| match home {
        Some(home) => home.has_room(id, row),
        None => row.believed_room(),
    }
}

/// How a request left its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The server answered (below 400, or any other answer that proves it well).
    Success,
    /// Says nothing about the server: 4xx, client gone, internal.
    Neutral,
    /// Connect failed, reset or timeout before a head, 502, 503, 504.
    Failure,
}

/// What the dispatcher has to say after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The request may go. From here on the permit is the caller's: it ends with [`Dispatcher::handle_done`].
    Granted {
        ticket: Ticket,
        placement: Placement,
    },
    Refused {
        ticket: Ticket,
        rejection: Rejection,
    },
    /// This shard benched the server.
    Benched {
        backend: BackendId,
        ms: u64,
    },
    /// A bench that this shard had set is over, or a success here cleared one.
    Unbenched {
        backend: BackendId,
    },
}

/// A request of this shard that asked home.
#[derive(Debug)]
struct Waiting {
    group: GroupId,
    pool: PoolId,
    since: Nanos,
    deadline: Nanos,
    tried: Tried,
    /// What the wheel here chose, to be taken back if it comes otherwise.
    preferred: Option<Choice>,
    /// Where its session, or its key, belongs.
    home: Option<BackendId>,
    /// The event is in the queue: the server it got, or none.
    answered: Option<Option<BackendId>>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Dispatcher {
    me: ShardId,
    shards: usize,
    bench_rules: BenchRules,
    catalog: Box<Catalog>,
    /// The groups that some request can still resolve to.
    groups_current: Vec<GroupId>,
    table: BackendTable,
    router: Router,
    /// `None` on every shard but home.
    home: Option<Home>,
    waiting: Tickets<Waiting>,
    deadlines: BTreeSet<(Nanos, Ticket)>,
    /// Unanswered requests of this shard, by group.
    waiting_by_group: Vec<u32>,
    /// The same, by pool.
    waiting_by_pool: Vec<u32>,
    /// Home's word that nothing can be admitted, by group.
    full: Vec<bool>,
    /// When free leases are looked at next; `NEVER`: none is free.
    sweep_at: Nanos,
    /// When the next bench ends, or earlier; `NEVER`: none is on.
    bench_ends: Nanos,
    /// Servers whose bench was this shard's verdict and is not yet over.
    benched_here: Vec<BackendId>,
    /// How stale each peer's last load figure was when it came, in nanoseconds.
    lag_ns: Vec<u64>,
    events: VecDeque<Event>,
    messages: VecDeque<(ShardId, Message, Urgency)>,
    memory: PrefixMemory,
    ends: Ends,
}

impl Dispatcher {
    /// `me` of `shards` (1 to 256) shards. Every server counts as up until [`Update::Health`] says otherwise.
    pub fn new(me: ShardId, shards: usize, options: DispatcherOptions, catalog: Catalog) -> Self {
        assert!((1..=SHARDS_MAX).contains(&shards) && me.index() < shards, "shard {me:?} of {shards}");
        let mut dispatcher = Dispatcher {
            me,
            shards,
            bench_rules: BenchRules {
                after: options.bench_after,
                ms: options.bench_ms,
                ms_max: options.bench_max_ms,
            },
            catalog: Box::default(),
            groups_current: Vec::new(),
            table: BackendTable::new(shards),
            router: Router::new(
                shards,
                options.wheel_phase.unwrap_or(me.0.into()),
                options.seed ^ u64::from(me.0),
            ),
            home: (me == ShardId::HOME).then(|| Home::new(shards, options.lease_rules)),
            waiting: Tickets::default(),
            deadlines: BTreeSet::new(),
            waiting_by_group: Vec::new(),
            waiting_by_pool: Vec::new(),
            full: Vec::new(),
            sweep_at: Nanos::NEVER,
            bench_ends: Nanos::NEVER,
            benched_here: Vec::new(),
            lag_ns: vec![0; shards],
            events: VecDeque::new(),
            messages: VecDeque::new(),
            memory: PrefixMemory::new(options.kv_memory_bytes_max),
            ends: Ends::default(),
        };
        dispatcher.handle_catalog(Nanos::ZERO, Box::new(catalog));
        dispatcher
    }

    /// The catalog in force.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The group of a model as named in the request (`None`: it names none), in a tier (empty: none named), for an input of
    /// about that many tokens (0: unknown). One hash lookup and short scans; allocates nothing.
    pub fn resolve(&self, model: Option<&[u8]>, tier: &[u8], tokens: u64) -> Result<GroupId, Rejection> {
        let Some(route) = self.catalog.route(model, tier) else { return Err(self.unrouted(model, tier)) };
        // All its members admit short inputs, so whoever is up is live there.
        let up = |id| self.router.group(id).is_some_and(|group| group.has_live());
        route.group(tokens).ok_or_else(|| match up(route.widest()) {
            true => Rejection::InputTooLong,
            false => Rejection::NoHealthyServer,
        })
    }

    /// Why nobody serves that model in that tier.
    fn unrouted(&self, model: Option<&[u8]>, tier: &[u8]) -> Rejection {
        let catalog = &self.catalog;
        if model.is_some_and(|model| !catalog.knows(model)) {
            // Some server has not answered yet, or none is there to ask: a 404 would be a guess.
            let guess = catalog.learning || !self.routable();
            return if guess { Rejection::NoHealthyServer } else { Rejection::ModelNotFound };
        }
        // With no server at all the tier is not what is wrong; and one that is still asked may turn out to have the model.
        match catalog.unnamed.is_empty() || catalog.learning && catalog.has_tier(tier) {
            true => Rejection::NoHealthyServer,
            false => Rejection::NoServerInTier,
        }
    }

    /// From the head alone: `Err` when it is already known that nothing can be admitted (`group` `None`: whatever the
    /// body will name). Takes nothing. At home exact; elsewhere as home last said, a ring's delay ago.
    pub fn admissible(&self, _now: Nanos, group: Option<GroupId>) -> Result<(), Rejection> {
        if let Some(group) = group {
            return self.admissible_group(group);
        }
        let mut verdict = None;
        for group in &self.groups_current {
            let rejection = self.admissible_group(*group).err();
            // With room in one group, or different answers, only the body can tell.
            if rejection.is_none() || verdict.is_some_and(|v| v != rejection) {
                return Ok(());
            }
            verdict = Some(rejection);
        }
        verdict.flatten().map_or(Ok(()), Err)
    }

    fn admissible_group(&self, group: GroupId) -> Result<(), Rejection> {
        let Some(routed) = self.router.group(group) else { return Err(Rejection::NoHealthyServer) };
        if !routed.has_live() {
            return Err(Rejection::NoHealthyServer);
        }
        let full = match &self.home {
            Some(home) => home.is_full(group, &self.router, &self.table),
            None => self.full[group.index()],
        };
        if !full {
            return Ok(());
        }
        match self.catalog.pool(routed.pool).routing_mode {
            RoutingMode::Queue => Err(Rejection::QueueFull),
            RoutingMode::Reject => Err(Rejection::AtCapacity),
            RoutingMode::Unlimited => Ok(()),
        }
    }

    /// Places a request that has been to `tried`. `AtCapacity` and `QueueFull` are definite: given only once no free permit
    /// exists anywhere. `NoHealthyServer`: no eligible server is left that was not tried.
    pub fn handle_request(&mut self, now: Nanos, group: GroupId, wanted: &Wanted<'_>) -> Decision {
        let Some(routed) = self.router.group(group).filter(|_| self.router.has_untried(group, wanted.tried))
        else {
            return Decision::Reject(Rejection::NoHealthyServer);
        };
        if routed.algorithm == Algorithm::KvAware && !wanted.blocks.is_empty() {
            self.memory.find_matches(routed.pool, wanted.blocks);
        }
        if self.home.is_some() {
            self.request_at_home(now, group, wanted)
        } else {
            self.request(now, group, wanted)
        }
    }

    /// On a shard that is not home.
    fn request(&mut self, now: Nanos, group: GroupId, wanted: &Wanted<'_>) -> Decision {
        let tried = wanted.tried;
        let queued_behind = self.waiting_by_group[group.index()] > 0;
        let affinity = wanted.affinity(&self.memory, &self.ends);
        let choice = self.router.pick(group, tried, affinity, &self.table, room(None));
        if let Some(choice) = choice {
            self.router.note_request(group, choice.backend, &self.table, room(None));
            let row = self.table.row(choice.backend);
            if row.open() && (!queued_behind || !row.gated()) {
                return Decision::Dispatch(self.place(now, choice.backend, choice.by, 0));
            }
        }
        let ticket = self.wait(now, group, wanted, choice);
        let preferred = choice.map(|c| c.backend);
        if let Some(backend) = preferred {
            self.table.row_mut(backend).asked += 1;
        }
        self.send_home(Message::Ask { ticket, group, preferred, tried, since: now }, Urgency::Wake);
        Decision::Wait(ticket)
    }

    /// Counts a request in; its permit is at hand.
    fn place(&mut self, now: Nanos, backend: BackendId, by: Algorithm, wait_ns: u64) -> Placement {
        self.table.begin(now, backend);
        let row = self.table.row(backend);
        // Peers' figures may be stale; the permits are not.
        let in_flight =
            if row.gated() { row.total().min(row.ceiling.max(row.in_flight)) } else { row.total() };
        Placement { backend, in_flight, ceiling: row.ceiling, algorithm_used: by, wait_ns }
    }

    fn wait(&mut self, now: Nanos, group: GroupId, wanted: &Wanted<'_>, preferred: Option<Choice>) -> Ticket {
        let tried = wanted.tried;
        let home = self.router.home(group, wanted.session, wanted.input);
        let pool = self.router.group(group).expect("the caller checked").pool;
        let deadline = now.plus_ms(self.catalog.pool(pool).queue_timeout_ms);
        let waiting = Waiting { group, pool, since: now, deadline, tried, preferred, home, answered: None };
        let ticket = self.waiting.insert(waiting);
        self.deadlines.insert((deadline, ticket));
        self.waiting_by_group[group.index()] += 1;
        self.waiting_by_pool[pool.index()] += 1;
        ticket
    }

    /// Ends the waiting of an unanswered ticket; it stays in the table, answered, until its event is polled. Says for which
    /// group, since when, and what chose the server it got.
    fn answer(&mut self, ticket: Ticket, got: Option<BackendId>) -> Option<(GroupId, Nanos, Algorithm)> {
        let waiting = self.waiting.get_mut(ticket).filter(|w| w.answered.is_none())?;
        waiting.answered = Some(got);
        let (group, since) = (waiting.group, waiting.since);
        let (choice, home) = (waiting.preferred.take(), waiting.home);
        self.deadlines.remove(&(waiting.deadline, ticket));
        self.waiting_by_group[group.index()] -= 1;
        self.waiting_by_pool[waiting.pool.index()] -= 1;
        let held = self.router.group(group).expect("groups with requests exist");
        let (algorithm, fallback) = (held.algorithm, held.fallback());
        let at_home = home.zip(got).is_some_and(|(home, got)| self.router.is_home(group, home, got));
        if let Some(asked) = choice.map(|choice| choice.backend) {
            self.table.row_mut(asked).asked -= 1;
            if got != Some(asked) {
                self.router.take_back_request(group, asked);
            }
        }
        if let Some(got) = got.filter(|got| choice.is_none_or(|choice| choice.backend != *got)) {
            self.router.note_request(group, got, &self.table, room(self.home.as_ref()));
        }
        let by = match choice {
            Some(choice) if got == Some(choice.backend) => choice.by,
            Some(choice) => {
                self.router.undo(group, choice);
                fallback
            }
            // Whichever server had room first; where it belongs it is at home.
            None if at_home => algorithm,
            None => fallback,
        };
        Some((group, since, by))
    }

    /// Gives a waiting request the permit that was just leased for it.
    fn grant(&mut self, now: Nanos, ticket: Ticket, backend: BackendId) -> bool {
        let Some((_, since, by)) = self.answer(ticket, Some(backend)) else { return false };
        let placement = self.place(now, backend, by, now.since(since));
        self.events.push_back(Event::Granted { ticket, placement });
        true
    }

    fn refuse(&mut self, ticket: Ticket, rejection: Rejection) {
        if self.answer(ticket, None).is_some() {
            self.events.push_back(Event::Refused { ticket, rejection });
        }
    }

    /// The request of `ticket` no longer waits. True: it was still this dispatcher's (waiting, or granted by an event not
    /// yet polled; that permit is freed). False: its event has been polled; a polled `Granted` is the caller's to end.
    pub fn handle_withdraw(&mut self, now: Nanos, ticket: Ticket) -> bool {
        let Some(waiting) = self.waiting.get_mut(ticket) else { return false };
        match waiting.answered {
            None => {
                self.leave_queue(now, ticket);
                self.waiting.remove(ticket);
            }
            Some(got) => {
                let group = waiting.group;
                self.waiting.remove(ticket);
                if let Some(backend) = got {
                    // Placed, but never sent.
                    self.router.take_back_request(group, backend);
                    self.table.row_mut(backend).dispatched -= 1;
                    self.release(now, backend);
                }
            }
        }
        self.note_full();
        true
    }

    /// Takes an unanswered request out of the queue.
    fn leave_queue(&mut self, now: Nanos, ticket: Ticket) {
        let Some((group, since, _)) = self.answer(ticket, None) else { return };
        if self.home.is_some() {
            self.withdraw_at_home(now, self.me, ticket, group, since);
        } else {
            self.send_home(Message::Withdraw { ticket, group, since }, Urgency::Wake);
        }
    }

    /// A request left its server.
    pub fn handle_done(&mut self, now: Nanos, backend: BackendId, outcome: Outcome) {
        // The verdict first: a server that is benched now must not get the next request with the freed permit.
        match outcome {
            Outcome::Success => self.note_success(now, backend),
            Outcome::Failure => self.note_failure(now, backend),
            Outcome::Neutral => {}
        }
        self.release(now, backend);
        self.note_full();
    }

    /// Counts a request out and sees to its permit.
    fn release(&mut self, now: Nanos, backend: BackendId) {
        self.table.end(now, backend);
        if self.home.is_some() {
            // Home keeps no free lease of its own: spare is nearer.
            let row = self.table.row_mut(backend);
            let free = row.free();
            row.held -= free;
            self.given_back(now, backend, ShardId::HOME, free);
        } else {
            self.settle_lease(now, backend, Urgency::Wake);
        }
    }

    /// A message of another shard. `Connections`, `Socket` and those of the Stargate family are not for the
    /// dispatcher and are ignored.
    pub fn handle_message(&mut self, now: Nanos, from: ShardId, message: Message) {
        match message {
            Message::Load { backend, load, changed } => {
                self.table.hear(from, backend, load);
                self.memory.narrow(backend, self.table.narrowed(backend));
                self.lag_ns[from.index()] = now.since(changed);
            }
            Message::Sent { group, backend, sent } => self.router.hear(from, group, backend, sent),
            Message::Rate { backend, rate } => {
                self.table.rate(backend, |rates| rates.hear(from, backend, rate))
            }
            Message::Bench { backend, until, judged, level, by } => {
                self.table.ensure(backend);
                let verdict = Verdict { until, judged, level, by: Some(by) };
                let row = self.table.row_mut(backend);
                if row.verdict.merge(verdict) {
                    if level == 0 {
                        // A success elsewhere is a success: what failed here before it counts no more.
                        row.failures = 0;
                    }
                    self.benched_here.retain(|b| *b != backend);
                    self.refresh(now, backend);
                }
            }
            Message::Full { group, full } => {
                if self.full.len() <= group.index() {
                    self.full.resize(group.index() + 1, false);
                }
                self.full[group.index()] = full;
            }
            Message::Grant { ticket, backend, count, recalled } => {
                self.granted(now, ticket, backend, count, recalled);
            }
            Message::Deny { ticket, rejection } => self.refuse(ticket, rejection),
            Message::Recall { backend } => self.recalled(backend),
            Message::Ease { backend } => {
                self.table.ensure(backend);
                self.table.row_mut(backend).recalled = false;
            }
            Message::Ask { .. }
            | Message::Withdraw { .. }
            | Message::Return { .. }
            | Message::Adopt { .. } => {
                self.message_at_home(now, from, message);
            }
            Message::Live { .. } | Message::Since { .. } | Message::Sample { .. } => {}
            Message::Connections { .. } | Message::Socket { .. } => {}
        }
        self.note_full();
    }

    /// A lazy message that found its ring full: its figure is sent again with the next flush.
    pub fn handle_dropped(&mut self, message: Message) {
        match message {
            Message::Load { backend, changed, .. } => self.table.resend(backend, changed),
            Message::Rate { backend, .. } => self.table.resend_rate(backend),
            Message::Sent { group, backend, .. } => self.router.resend(group, backend),
            _ => {}
        }
    }

    /// `Catalog` and `Health`; others are ignored. Copies a catalog; [`Dispatcher::handle_catalog`] does not.
    pub fn handle_update(&mut self, now: Nanos, update: &Update) {
        match update {
            Update::Catalog(catalog) => self.handle_catalog(now, catalog.clone()),
            Update::Health { backend, up } => self.handle_health(now, *backend, *up),
            Update::Forget { backend } => self.handle_restart(now, *backend),
            // Told for trusted listeners' targets.
            Update::RoundTrip { .. } | Update::Reported { .. } | Update::Scraped { .. } => {}
            Update::Ready(_) | Update::Phase(_) | Update::Report { .. } => {}
        }
    }

    /// The health checks' word on a server.
    pub fn handle_health(&mut self, now: Nanos, backend: BackendId, up: bool) {
        self.table.ensure(backend);
        let row = self.table.row_mut(backend);
        if row.up != up {
            row.up = up;
            self.refresh(now, backend);
            self.note_full();
        }
    }

    /// A new catalog takes the place of the old one. Every shard has to see every version, in order.
    pub fn handle_catalog(&mut self, now: Nanos, catalog: Box<Catalog>) {
        let known = self.catalog.servers.len();
        let old = std::mem::replace(&mut self.catalog, catalog);
        let catalog = &self.catalog;
        let ids = || (0..).map(BackendId).zip(&catalog.servers);
        self.memory.configure_all(ids().map(|(id, server)| {
            let pool = server.pool.filter(|pool| catalog.pool(*pool).algorithm == Algorithm::KvAware);
            (id, pool.filter(|_| !server.removed), server.kv_capacity_blocks)
        }));
        let moved: Vec<BackendId> = ids()
            .zip(&old.servers)
            .filter(|((_, server), old)| server.address != old.address)
            .map(|((id, _), _)| id)
            .collect();
        if !catalog.servers.is_empty() {
            self.table.ensure(BackendId((catalog.servers.len() - 1) as u16));
        }
        for id in moved {
            self.handle_restart(now, id);
        }
        let catalog = &self.catalog;
        let mut opened = Vec::new();
        for i in 0..catalog.servers.len() {
            let id = BackendId(i as u16);
            let ceiling = self.table.configure(id, catalog);
            let row = self.table.row_mut(id);
            let newly_gated = i < known && row.ceiling == 0 && ceiling > 0;
            row.ceiling = ceiling;
            self.memory.narrow(id, self.table.narrowed(id));
            let row = self.table.row_mut(id);
            if newly_gated {
                // What runs without permits gets them: home counts it against the ceiling before it grants anything.
                let count = row.in_flight.saturating_sub(row.held);
                row.held += count;
                opened.push((id, count));
            }
        }
        self.groups_current.clear();
        self.groups_current.extend(catalog.groups_in_use());
        self.groups_current.sort_unstable();
        self.groups_current.dedup();
        self.waiting_by_group.resize(self.waiting_by_group.len().max(catalog.groups.len()), 0);
        self.waiting_by_pool.resize(self.waiting_by_pool.len().max(catalog.pools.len()), 0);
        self.full.resize(self.full.len().max(catalog.groups.len()), false);
        self.router.configure(now, &self.catalog, &self.table);
        if self.home.is_some() {
            self.catalog_at_home(now, known, &opened);
        } else {
            for (backend, count) in opened {
                self.send_home(Message::Adopt { backend, count }, Urgency::Wake);
            }
        }
        self.note_full();
    }

    /// Acts on what is due at `now`: waiting requests whose time is over, benches that end, leases that are idle.
    pub fn handle_timeout(&mut self, now: Nanos) {
        // Benches first: who may go now has not waited in vain.
        if self.bench_ends <= now {
            self.end_benches(now);
        }
        while let Some((_, ticket)) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now).copied()
        {
            self.leave_queue(now, ticket);
            self.events.push_back(Event::Refused { ticket, rejection: Rejection::QueueTimeout });
        }
        if self.sweep_at <= now {
            self.sweep(now);
        }
        self.note_full();
    }

    /// When [`Dispatcher::handle_timeout`] has to be called next.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        let deadline = self.deadlines.first().map_or(Nanos::NEVER, |(deadline, _)| *deadline);
        let next = deadline.min(self.sweep_at).min(self.bench_ends);
        (next != Nanos::NEVER).then_some(next)
    }

    /// What the caller has to act on; call until `None` after every turn.
    pub fn poll_event(&mut self) -> Option<Event> {
        loop {
            let event = self.events.pop_front()?;
            match event {
                // Withdrawn since.
                Event::Granted { ticket, .. } | Event::Refused { ticket, .. }
                    if self.waiting.remove(ticket).is_none() => {}
                _ => return Some(event),
            }
        }
    }

    /// The next message to send; call until `None` after every turn.
    pub fn poll_message(&mut self) -> Option<(ShardId, Message, Urgency)> {
        self.messages.pop_front()
    }

    /// Puts out the load figures that changed since the last flush. Call every tick while [`Dispatcher::needs_flush`].
    /// O(changes × shards).
    pub fn flush(&mut self, _now: Nanos) {
        while let Some((backend, load, changed)) = self.table.pop_change() {
            self.tell_peers(Message::Load { backend, load, changed }, Urgency::Lazy);
        }
        while let Some((backend, rate)) = self.table.pop_rate(self.me) {
            self.tell_peers(Message::Rate { backend, rate }, Urgency::Lazy);
        }
        while let Some((group, backend, sent)) = self.router.pop_change() {
            self.tell_peers(Message::Sent { group, backend, sent }, Urgency::Lazy);
        }
        self.tell_full();
    }

    /// Some figure has changed and was not flushed.
    pub fn needs_flush(&self) -> bool {
        self.table.has_changes()
            || self.router.has_changes()
            || self.home.as_ref().is_some_and(|h| h.may_be_full())
    }

    fn send_home(&mut self, message: Message, urgency: Urgency) {
        self.messages.push_back((ShardId::HOME, message, urgency));
    }

    fn tell_peers(&mut self, message: Message, urgency: Urgency) {
        for shard in 0..self.shards {
            if shard != self.me.index() {
                self.messages.push_back((ShardId(shard as u8), message, urgency));
            }
        }
    }

    /// This shard's requests in flight on a server.
    pub fn in_flight(&self, backend: BackendId) -> u32 {
        self.table.rows().get(backend.index()).map_or(0, |row| row.in_flight)
    }

    /// In flight over all shards, as far as heard.
    pub fn in_flight_total(&self, backend: BackendId) -> u32 {
        self.table.rows().get(backend.index()).map_or(0, |row| row.total())
    }

    /// Permits of a server leased to this shard, and how many of them are free.
    pub fn leased(&self, backend: BackendId) -> (u32, u32) {
        self.table.rows().get(backend.index()).map_or((0, 0), |row| (row.held, row.free()))
    }

    /// What `peer` last said of its requests in flight on a server.
    pub fn heard(&self, peer: ShardId, backend: BackendId) -> u32 {
        self.table.heard(peer, backend).in_flight
    }

    /// The book of permits and the queue, on the home shard.
    pub fn books(&self) -> Option<(&Ledger, &Queue)> {
        self.home.as_ref().map(Home::books)
    }

    /// A live candidate of some group: present, up, weight above 0 and not benched (or spared the bench as the last one).
    pub fn eligible(&self, backend: BackendId) -> bool {
        self.router.groups_of(backend).iter().any(|(group, slot)| self.router.carries(*group, *slot))
    }

    /// At least one server is eligible for something.
    pub fn routable(&self) -> bool {
        self.groups_current.iter().any(|id| self.router.group(*id).is_some_and(|group| group.has_live()))
    }

    /// This shard's requests that wait, by pool.
    pub fn queued(&self, pool: PoolId) -> u32 {
        self.waiting_by_pool.get(pool.index()).copied().unwrap_or(0)
    }

    /// Fills `in_flight`, `dispatched`, `benched_until`, `memory` and `clients` of each server, `queued` and `mesh_lag_ns`;
    /// leaves the rest.
    pub fn figures(&self, now: Nanos, report: &mut ShardReport) {
        report.servers.resize_with(report.servers.len().max(self.table.len()), Default::default);
        for (id, (figures, row)) in self.table.ids().zip(report.servers.iter_mut().zip(self.table.rows())) {
            figures.memory = self.memory.figures(id);
            figures.clients.clear();
            if figures.memory.clients > 1 {
                figures.clients.extend(self.memory.clients(id));
                figures.clients.sort_unstable_by_key(|(client, blocks)| (Reverse(*blocks), *client));
                figures.clients.truncate(CLIENTS_SHOWN_MAX);
            }
            figures.in_flight = row.in_flight;
            figures.dispatched = row.dispatched;
            figures.benched_until = if row.verdict.benched(now) { row.verdict.until } else { Nanos::ZERO };
        }
        report.queued.clear();
        report.queued.extend(&self.waiting_by_pool);
        report.mesh_lag_ns = self.lag_ns.iter().copied().max().unwrap_or(0);
    }
}
