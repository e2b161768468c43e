//! The fake world around the dispatchers: rings with delays, engines, clients, an operator; and the checks.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};

use ringway::clock::Nanos;
use ringway::proto::admission::ledger::LeaseRules;
use ringway::proto::backend::catalog::{Algorithm, Catalog, RoutingMode};
use ringway::proto::config::lb_config::Method;
use ringway::proto::dispatcher::{
    Decision, Dispatcher, DispatcherOptions, Event, Input, Outcome, Placement, Wanted,
};
use ringway::proto::error::Rejection;
use ringway::proto::ids::{BackendId, GroupId, PoolId, ShardId, Ticket};
use ringway::proto::message::{Message, Tried, Update, Urgency};
use ringway::proto::report::ShardReport;

use super::scenarios::{add_group, catalog, pool, server};

/// splitmix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bf0_3635_dcd2_2cb5)
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// 0 to `n - 1`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    /// 0 to 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }
    pub fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub requests: u32,
    /// Mean time between arrivals, and longest service time.
    pub gap_ns: f64,
    pub service_ns_max: u64,
    /// A ring takes up to this long.
    pub delay_ns_max: u64,
    /// With this chance up to `slow_ns_max`: the receiver sleeps or is busy.
    pub slow_chance: f64,
    pub slow_ns_max: u64,
    pub ring_slots: usize,
    /// Per arrival: chance that the client goes at some time; that the operator changes something; that the world is made
    /// quiet and checked whole; that the clock jumps.
    pub abort_chance: f64,
    pub change_chance: f64,
    pub quiet_chance: f64,
    pub jump_chance: f64,
    /// Chance that a request fails on a server that is well.
    pub failure_chance: f64,
    /// Events are left in the dispatcher for a while.
    pub lazy_events: bool,
    pub lease_rules: LeaseRules,
}

impl Options {
    /// Nothing goes wrong, and rings are as quick as measured between busy shards.
    pub fn calm(requests: u32) -> Self {
        Options {
            requests,
            gap_ns: 100_000.0,
            service_ns_max: 10_000_000,
            delay_ns_max: 2_000,
            slow_chance: 0.1,
            slow_ns_max: 20_000,
            ring_slots: 1024,
            abort_chance: 0.0,
            change_chance: 0.0,
            quiet_chance: 0.0,
            jump_chance: 0.0,
            failure_chance: 0.0,
            lazy_events: false,
            lease_rules: LeaseRules::default(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum State {
    Waiting(Ticket),
    Running(BackendId),
    Over,
}

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) shard: usize,
    pub(super) group: GroupId,
    pub(super) since: Nanos,
    pub(super) tried: Tried,
    pub(super) state: State,
    /// A permit was free when it came.
    pub(super) room: bool,
    pub(super) service_ns: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Deliver { from: usize, to: usize },
    Control(usize),
    Timeout(usize),
    Tick(usize),
    Arrive,
    Finish(usize),
    Abort(usize),
}

/// Since when the ceiling of a server is the same for everyone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Regime {
    /// Not every shard has the newest catalog.
    Changing,
    /// They have; what was on the rings then is not delivered before that time, `round` times.
    Settling {
        round: u8,
        until: Nanos,
    },
    Settled,
}

pub struct World {
    pub(super) seed: u64,
    pub(super) rng: Rng,
    pub(super) options: Options,
    pub(super) now: Nanos,
    pub(super) shards: Vec<Dispatcher>,
    /// By sender × shards + receiver.
    pub(super) links: Vec<VecDeque<(Nanos, Message)>>,
    pub(super) control: Vec<VecDeque<(Nanos, Update)>>,
    steps: BinaryHeap<Reverse<(Nanos, u64, Step)>>,
    pub(super) steps_made: u64,
    /// When the next `Timeout` step of each shard comes, and whether a `Tick` is due.
    pub(super) timeouts: Vec<Nanos>,
    pub(super) ticking: Vec<bool>,
    /// When each shard last handled its timeouts.
    pub(super) timed: Vec<Nanos>,
    pub(super) requests: Vec<Request>,
    pub(super) tickets: HashMap<(usize, Ticket), usize>,
    /// Waiting requests, oldest first.
    pub(super) waiting: BTreeSet<(Nanos, usize)>,
    pub(super) arrived: u32,
    // What the operator and the health checks last said, and what each shard has heard of it.
    pub(super) catalog: Catalog,
    pub(super) catalog_of: Vec<Catalog>,
    pub(super) up: Vec<bool>,
    pub(super) up_of: Vec<Vec<bool>>,
    /// Engines that fail every request.
    pub(super) dead: Vec<bool>,
    pub(super) regime: Regime,
    /// Largest ceiling that some shard may still go by.
    pub(super) allowed: Vec<u32>,
    pub(super) bound_allowed: Vec<u32>,
    /// Last time that anything but requests happened.
    pub(super) disturbed: Nanos,
    pub(super) seen_in_flight: Vec<Vec<u32>>,
    pub(super) rejections: HashMap<Rejection, u32>,
    pub(super) served: u32,
    pub(super) aborted: u32,
    pub(super) came: u32,
    // Figures.
    pub trace: u64,
    pub dispatched: Vec<u64>,
    pub permit_messages: u64,
    pub wakes: u64,
    /// Time waited by requests for which a permit was free when they came.
    pub wasted_ns: u64,
    pub(super) busy_ns: u128,
    pub(super) busy_since: Nanos,
    pub(super) busy: u64,
    pub(super) measured: Option<(Nanos, u128)>,
    pub(super) slots: f64,
}

impl World {
    pub fn new(seed: u64, shards: usize, options: Options, catalog: Catalog) -> Self {
        let servers = catalog.servers.len();
        let dispatcher_options = DispatcherOptions {
            bench_ms: 20,
            bench_max_ms: 200,
            lease_rules: options.lease_rules,
            ..DispatcherOptions::default()
        };
        let mut world = World {
            seed,
            rng: Rng::new(seed),
            options,
            now: Nanos(1_000_000),
            shards: (0..shards)
                .map(|i| Dispatcher::new(ShardId(i as u8), shards, dispatcher_options, catalog.clone()))
                .collect(),
            links: vec![VecDeque::new(); shards * shards],
            control: (0..shards).map(|_| VecDeque::new()).collect(),
            steps: BinaryHeap::new(),
            steps_made: 0,
            timeouts: vec![Nanos::NEVER; shards],
            ticking: vec![false; shards],
            timed: vec![Nanos::ZERO; shards],
            requests: Vec::new(),
            tickets: HashMap::new(),
            waiting: BTreeSet::new(),
            arrived: 0,
            catalog_of: vec![catalog.clone(); shards],
            catalog,
            up: vec![true; servers],
            up_of: vec![vec![true; servers]; shards],
            dead: vec![false; servers],
            regime: Regime::Settled,
            allowed: Vec::new(),
            bound_allowed: Vec::new(),
            disturbed: Nanos::ZERO,
            seen_in_flight: vec![vec![0; servers]; shards],
            rejections: HashMap::new(),
            served: 0,
            aborted: 0,
            came: 0,
            trace: seed,
            dispatched: vec![0; servers],
            permit_messages: 0,
            wakes: 0,
            wasted_ns: 0,
            busy_ns: 0,
            busy_since: Nanos(1_000_000),
            busy: 0,
            measured: None,
            slots: 0.0,
        };
        world.allowed = (0..servers).map(|s| world.ceiling(s)).collect();
        world.bound_allowed = world.catalog.pools.iter().map(|p| p.queue_size).collect();
        if options.requests > 0 {
            world.schedule(1, Step::Arrive);
        }
        world
    }

    /// A world in which everything happens.
    pub fn chaotic(seed: u64, shards: usize) -> Self {
        let mut rng = Rng::new(!seed);
        let own = [
            Algorithm::WeightedRoundRobin,
            Algorithm::LeastConnections,
            Algorithm::StickySession,
            Algorithm::KvAware,
        ];
        let algorithms: Vec<_> =
            own.into_iter().chain(Method::ALL.into_iter().map(Algorithm::Stargate)).collect();
        let pools: Vec<_> = (0..1 + rng.below(3))
            .map(|_| {
                let mode = rng.of(&[
                    RoutingMode::Queue,
                    RoutingMode::Queue,
                    RoutingMode::Queue,
                    RoutingMode::Reject,
                    RoutingMode::Unlimited,
                ]);
                pool(rng.of(&algorithms), mode, rng.of(&[0, 2, 8, 1024]), rng.of(&[5, 50, 300]))
            })
            .collect();
        let servers: Vec<_> = (0..1 + rng.below(6))
            .map(|_| {
                let weight = rng.of(&[1.0, 1.0, 0.5, 3.0, 0.0]);
                server(weight, rng.of(&[1, 1, 2, 3, 5, 8, 32, 0]), Some(rng.below(pools.len() as u64) as u16))
            })
            .collect();
        let mut catalog = catalog(servers, pools);
        for server in &mut catalog.servers {
            server.cluster_id = rng.of(&["a", "b", "c", "d", "e"]).into();
        }
        // A mixed pool over everything, and a model that only some servers have.
        let mixed = PoolId(catalog.pools.len() as u16);
        catalog.pools.push(pool(Algorithm::WeightedRoundRobin, RoutingMode::Queue, 4, 100));
        let all: Vec<_> = (0..catalog.servers.len() as u16).map(BackendId).collect();
        let some = all.iter().copied().filter(|_| rng.chance(0.5)).collect();
        for candidates in [all, some] {
            let model = format!("mixed-{}", catalog.groups.len());
            add_group(&mut catalog, model, candidates, mixed);
        }
        let options = Options {
            requests: 150 + rng.below(250) as u32,
            gap_ns: rng.of(&[5_000.0, 50_000.0, 300_000.0, 1_000_000.0]),
            service_ns_max: rng.of(&[200_000, 2_000_000, 20_000_000]),
            delay_ns_max: rng.of(&[300, 5_000, 200_000]),
            slow_chance: rng.of(&[0.0, 0.05, 0.3]),
            slow_ns_max: rng.of(&[50_000, 5_000_000]),
            ring_slots: rng.of(&[1, 4, 64, 1024]),
            abort_chance: rng.of(&[0.0, 0.1, 0.5]),
            change_chance: rng.of(&[0.0, 0.02, 0.2]),
            quiet_chance: 0.05,
            jump_chance: rng.of(&[0.0, 0.01]),
            failure_chance: rng.of(&[0.0, 0.02, 0.2]),
            lazy_events: rng.chance(0.5),
            lease_rules: LeaseRules {
                batch_divisor: rng.of(&[0, 1, 4]),
                ease_divisor: rng.of(&[1, 2, 2, 1000]),
                ease_per_shard: rng.of(&[0, 2]),
            },
        };
        World::new(seed, shards, options, catalog)
    }

    /// Arrivals at `load` times what `slots` requests at once come to.
    pub fn load(&mut self, load: f64, slots: f64) {
        self.options.gap_ns = self.options.service_ns_max as f64 / 2.0 / (load * slots);
        self.slots = slots;
    }

    // The clockwork.

    fn schedule(&mut self, after_ns: u64, step: Step) {
        self.schedule_at(Nanos(self.now.0 + after_ns), step);
    }

    pub(super) fn schedule_at(&mut self, at: Nanos, step: Step) {
        self.steps_made += 1;
        self.steps.push(Reverse((at, self.steps_made, step)));
    }

    fn step_once(&mut self) -> bool {
        let Some(Reverse((at, _, step))) = self.steps.pop() else { return false };
        self.now = self.now.max(at);
        match step {
            Step::Deliver { from, to } => self.deliver(from, to),
            Step::Control(shard) => self.deliver_update(shard),
            Step::Timeout(shard) => self.time_out(shard),
            Step::Tick(shard) => self.tick(shard),
            Step::Arrive => self.arrive(),
            Step::Finish(request) => self.finish(request),
            Step::Abort(request) => self.abort(request),
        }
        self.settle();
        true
    }

    pub fn run_to_end(&mut self) {
        // Events that were left in a dispatcher may have more steps follow.
        while !self.steps.is_empty() {
            while self.step_once() {}
            self.quiet();
        }
        // Long enough for benches to end and idle leases to go home.
        self.now = self.now.plus_ms(1000);
        for _ in 0..4 {
            for shard in 0..self.shards.len() {
                self.time_out(shard);
            }
            self.now = self.now.plus_ms(200);
            self.quiet();
        }
        self.check_end();
    }

    pub fn advance_to_ms(&mut self, ms: u64) {
        // The world begins at 1 ms.
        let until = Nanos::from_ms(ms + 1);
        while self.steps.peek().is_some_and(|Reverse((at, ..))| *at <= until) {
            self.step_once();
        }
        self.now = self.now.max(until);
    }

    fn note(&mut self, what: u64) {
        self.trace = Rng(self.trace ^ what ^ self.now.0.rotate_left(20)).next();
    }

    // Clients.

    fn arrive(&mut self) {
        self.arrived += 1;
        let shard = self.rng.below(self.shards.len() as u64) as usize;
        if self.arrived < self.options.requests {
            let gap = -self.options.gap_ns * (1.0 - self.rng.unit()).ln();
            self.schedule(gap as u64 + 1, Step::Arrive);
        } else {
            self.account_busy(0);
            self.measured = Some((self.now, self.busy_ns));
        }
        self.arrive_on(shard, None);
        if self.rng.chance(self.options.change_chance) {
            self.change();
        }
        if self.rng.chance(self.options.quiet_chance) {
            self.quiet();
        }
        if self.rng.chance(self.options.jump_chance) {
            self.now = self.now.plus_ms(self.rng.below(3000));
            self.disturbed = self.now;
        }
    }

    pub fn arrive_on(&mut self, shard: usize, service_ns: Option<u64>) {
        self.came += 1;
        let groups = self.catalog_of[shard].groups.len() as u64;
        let group = GroupId(self.rng.below(groups) as u32);
        if let Err(rejection) = self.shards[shard].admissible(self.now, Some(group)) {
            if shard == 0 && rejection != Rejection::NoHealthyServer {
                self.check_exhausted(group, Tried::default());
            }
            *self.rejections.entry(rejection).or_default() += 1;
            return;
        }
        let index = self.requests.len();
        let (since, tried) = (self.now, Tried::default());
        let state = State::Over;
        self.requests.push(Request { shard, group, since, tried, state, room: false, service_ns });
        self.place(index);
        if self.requests[index].state != State::Over && self.rng.chance(self.options.abort_chance) {
            let after = self.rng.below(self.options.service_ns_max * 2);
            self.schedule(after, Step::Abort(index));
        }
    }

    fn place(&mut self, index: usize) {
        let Request { shard, group, tried, .. } = self.requests[index];
        self.requests[index].since = self.now;
        self.requests[index].room = self.has_room(group);
        // Some belong together, some do not; prompts of kv-aware pools have a simulation of their own.
        let key = [1 + (index % 5) as u8];
        let affinity_key = if index.is_multiple_of(7) { &[][..] } else { &key };
        let input = Input { tokens: Self::tokens(index), affinity_key };
        let session = (!index.is_multiple_of(7)).then_some(index as u64 % 5);
        let wanted = Wanted { tried, session, input, ..Wanted::default() };
        match self.shards[shard].handle_request(self.now, group, &wanted) {
            Decision::Dispatch(placement) => {
                assert_eq!(placement.wait_ns, 0);
                self.begin(index, placement);
            }
            Decision::Wait(ticket) => {
                self.requests[index].state = State::Waiting(ticket);
                assert!(self.tickets.insert((shard, ticket), index).is_none(), "a ticket is used once");
                self.waiting.insert((self.now, index));
            }
            Decision::Reject(rejection) => {
                if matches!(rejection, Rejection::AtCapacity | Rejection::QueueFull) {
                    assert_eq!(shard, 0, "only home knows");
                    self.check_exhausted(group, tried);
                } else {
                    assert_eq!(rejection, Rejection::NoHealthyServer);
                    let lately = self.live_lately(shard, group);
                    let none = |live: &Vec<BackendId>| live.iter().all(|id| tried.contains(*id));
                    assert!(lately.iter().any(none), "seed {}: {lately:?} are fine", self.seed);
                }
                self.end(index, Some(rejection));
            }
        }
        self.after(shard);
    }

    /// Of a request's input.
    fn tokens(index: usize) -> u64 {
        100 * (index % 9) as u64
    }

    pub(super) fn has_room(&self, group: GroupId) -> bool {
        let live = self.live(0, group, self.now);
        live.iter().any(|id| self.running_on(*id) < self.ceiling(id.index()))
    }

    /// A request was placed: the dispatcher says so.
    fn begin(&mut self, index: usize, placement: Placement) {
        let Request { shard, group, since, tried, room, service_ns, .. } = self.requests[index];
        let Placement { backend, in_flight, ceiling, algorithm_used, wait_ns } = placement;
        self.note(u64::from(backend.0) << 32 | index as u64);
        assert!(!tried.contains(backend), "was sent to {backend:?} before");
        if !self.options.lazy_events {
            let lately = self.live_lately(shard, group);
            let fine = lately.iter().any(|live| live.contains(&backend));
            assert!(
                fine,
                "seed {}: {backend:?} is not eligible for shard {shard}, only {lately:?}",
                self.seed
            );
            assert_eq!(wait_ns, self.now.since(since));
            self.check_order(index, backend);
        }
        let catalog = &self.catalog_of[shard];
        if !self.options.lazy_events {
            let own = catalog.pool(catalog.group(group).pool).algorithm;
            let fallback = match own {
                Algorithm::Stargate(_) => Algorithm::LeastConnections,
                own => own.fallback(),
            };
            assert!([own, fallback].contains(&algorithm_used), "{algorithm_used:?} in a pool of {own:?}");
            let own = self.shards[shard].in_flight(backend);
            assert!(in_flight >= 1 && (ceiling == 0 || in_flight <= ceiling.max(own)));
        }
        if room {
            self.wasted_ns += wait_ns;
        }
        self.requests[index].state = State::Running(backend);
        self.shards[shard].handle_input(self.now, backend, Self::tokens(index));
        self.dispatched[backend.index()] += 1;
        self.account_busy(1);
        let mut service = service_ns.unwrap_or_else(|| self.rng.below(self.options.service_ns_max));
        if self.dead[backend.index()] {
            service /= 10;
        }
        self.schedule(service + 1, Step::Finish(index));
    }

    fn finish(&mut self, index: usize) {
        let State::Running(backend) = self.requests[index].state else { return };
        let failed = self.dead[backend.index()] || self.rng.chance(self.options.failure_chance);
        let neutral = self.rng.chance(0.1);
        let outcome = match (failed, neutral) {
            (true, _) => Outcome::Failure,
            (_, true) => Outcome::Neutral,
            _ => Outcome::Success,
        };
        self.requests[index].state = State::Over;
        self.account_busy(-1);
        let shard = self.requests[index].shard;
        self.shards[shard].handle_read(self.now, backend, Self::tokens(index));
        if outcome == Outcome::Success {
            self.shards[shard].handle_sample(backend, 1.0 + self.rng.below(1000) as f64 / 7.0);
        }
        self.shards[shard].handle_done(self.now, backend, outcome);
        self.after(shard);
        if failed && self.rng.chance(0.5) {
            self.requests[index].tried.push(backend);
            self.place(index);
        } else {
            self.served += 1;
        }
    }

    fn abort(&mut self, index: usize) {
        let shard = self.requests[index].shard;
        match self.requests[index].state {
            State::Over => return,
            State::Running(backend) => {
                self.requests[index].state = State::Over;
                self.account_busy(-1);
                self.shards[shard].handle_read(self.now, backend, Self::tokens(index));
                self.shards[shard].handle_done(self.now, backend, Outcome::Neutral);
            }
            State::Waiting(ticket) => {
                assert!(self.shards[shard].handle_withdraw(self.now, ticket), "its event was not polled");
                assert!(!self.shards[shard].handle_withdraw(self.now, ticket), "once only");
                self.tickets.remove(&(shard, ticket));
                self.end(index, None);
            }
        }
        self.aborted += 1;
        self.after(shard);
    }

    fn end(&mut self, index: usize, rejection: Option<Rejection>) {
        self.waiting.remove(&(self.requests[index].since, index));
        self.requests[index].state = State::Over;
        if let Some(rejection) = rejection {
            self.note(rejection as u64);
            *self.rejections.entry(rejection).or_default() += 1;
        }
    }

    // The dispatchers' side.

    /// After every call of a shard's dispatcher.
    fn after(&mut self, shard: usize) {
        self.check_new_dispatches(shard);
        if !self.options.lazy_events || self.rng.chance(0.7) {
            self.drain_events(shard);
        }
        self.drain_messages(shard);
        let next = self.shards[shard].poll_timeout().unwrap_or(Nanos::NEVER);
        if next < self.timeouts[shard] {
            self.timeouts[shard] = next;
            self.schedule_at(next, Step::Timeout(shard));
        }
        if self.shards[shard].needs_flush() && !self.ticking[shard] {
            self.ticking[shard] = true;
            let after = 1 + self.rng.below(5_000_000);
            self.schedule(after, Step::Tick(shard));
        }
        if shard == 0 {
            let (_, queue) = self.shards[0].books().expect("shard 0 is home");
            for (pool, bound) in self.bound_allowed.iter().enumerate() {
                assert!(queue.settled(PoolId(pool as u16)) <= *bound, "queue of pool {pool} over its bound");
            }
        }
    }

    fn drain_events(&mut self, shard: usize) {
        while let Some(event) = self.shards[shard].poll_event() {
            match event {
                Event::Granted { ticket, placement } => {
                    let index = self.tickets.remove(&(shard, ticket)).expect("a ticket is answered once");
                    self.waiting.remove(&(self.requests[index].since, index));
                    self.begin(index, placement);
                }
                Event::Refused { ticket, rejection } => {
                    let index = self.tickets.remove(&(shard, ticket)).expect("a ticket is answered once");
                    let Request { since, group, tried, .. } = self.requests[index];
                    match rejection {
                        Rejection::QueueTimeout => {
                            let timeouts = self.catalog.pools.iter().map(|p| p.queue_timeout_ms);
                            assert!(timeouts.into_iter().any(|ms| since.plus_ms(ms) <= self.now));
                        }
                        Rejection::AtCapacity | Rejection::QueueFull if shard == 0 => {
                            if !self.options.lazy_events {
                                self.check_exhausted(group, tried);
                            }
                        }
                        Rejection::AtCapacity | Rejection::QueueFull | Rejection::NoHealthyServer => {}
                        other => panic!("refused with {other:?}"),
                    }
                    self.end(index, Some(rejection));
                }
                Event::Benched { backend, ms } => {
                    assert!((20..=200).contains(&ms));
                    self.disturbed = self.now;
                    self.note(u64::from(backend.0) | 1 << 50);
                }
                Event::Unbenched { .. } => self.disturbed = self.now,
            }
        }
    }

    fn drain_messages(&mut self, shard: usize) {
        let shards = self.shards.len();
        let mut dropped = Vec::new();
        while let Some((to, message, urgency)) = self.shards[shard].poll_message() {
            assert_ne!(to.index(), shard, "nothing is sent to oneself");
            let link = shard * shards + to.index();
            if urgency == Urgency::Lazy && self.links[link].len() >= self.options.ring_slots {
                dropped.push(message);
                continue;
            }
            match message {
                Message::Deny { ticket, rejection: Rejection::AtCapacity | Rejection::QueueFull } => {
                    if let Some(index) = self.tickets.get(&(to.index(), ticket)) {
                        let request = &self.requests[*index];
                        self.check_exhausted(request.group, request.tried);
                    }
                }
                Message::Bench { .. } => self.disturbed = self.now,
                _ => {}
            }
            if urgency != Urgency::Lazy && !matches!(message, Message::Full { .. } | Message::Bench { .. }) {
                self.permit_messages += 1;
                self.wakes += u64::from(urgency == Urgency::Wake);
            }
            let mut delay = 200 + self.rng.below(self.options.delay_ns_max);
            if self.rng.chance(self.options.slow_chance) || self.links[link].len() >= self.options.ring_slots
            {
                delay += self.rng.below(self.options.slow_ns_max);
            }
            let last = self.links[link].back().map_or(Nanos::ZERO, |(at, _)| *at);
            let at = last.max(Nanos(self.now.0 + delay));
            self.links[link].push_back((at, message));
            self.schedule_at(at, Step::Deliver { from: shard, to: to.index() });
        }
        for message in dropped {
            self.shards[shard].handle_dropped(message);
        }
    }

    fn deliver(&mut self, from: usize, to: usize) {
        let link = &mut self.links[from * self.shards.len() + to];
        if link.front().is_some_and(|(at, _)| *at <= self.now) {
            let (_, message) = link.pop_front().expect("just seen");
            self.shards[to].handle_message(self.now, ShardId(from as u8), message);
            self.after(to);
        }
    }

    fn deliver_update(&mut self, shard: usize) {
        if self.control[shard].front().is_none_or(|(at, _)| *at > self.now) {
            return;
        }
        let (_, update) = self.control[shard].pop_front().expect("just seen");
        match &update {
            Update::Catalog(catalog) => {
                self.up_of[shard].resize(catalog.servers.len(), true);
                for (id, server) in catalog.servers.iter().enumerate() {
                    if server.removed {
                        self.up_of[shard][id] = true;
                    }
                }
                self.catalog_of[shard] = (**catalog).clone();
            }
            Update::Health { backend, up } => self.up_of[shard][backend.index()] = *up,
            _ => {}
        }
        self.disturbed = self.now;
        self.shards[shard].handle_update(self.now, &update);
        self.after(shard);
    }

    fn time_out(&mut self, shard: usize) {
        self.timeouts[shard] = Nanos::NEVER;
        self.shards[shard].handle_timeout(self.now);
        self.timed[shard] = self.now;
        self.after(shard);
        let next = self.shards[shard].poll_timeout();
        assert!(next.is_none_or(|at| at > self.now), "what was due is done");
    }

    fn tick(&mut self, shard: usize) {
        self.ticking[shard] = false;
        self.shards[shard].flush(self.now);
        assert!(!self.shards[shard].needs_flush());
        self.after(shard);
    }

    /// Lets everything arrive that is on its way, while no client, engine or operator does anything, and checks the whole.
    pub fn quiet(&mut self) {
        let shards = self.shards.len();
        loop {
            let mut busy = false;
            for shard in 0..shards {
                self.drain_events(shard);
                self.drain_messages(shard);
                while let Some((at, _)) = self.control[shard].front() {
                    self.now = self.now.max(*at);
                    self.deliver_update(shard);
                    busy = true;
                }
                if self.shards[shard].poll_timeout().is_some_and(|at| at <= self.now) {
                    self.time_out(shard);
                    busy = true;
                }
                if self.shards[shard].needs_flush() {
                    self.tick(shard);
                    busy = true;
                }
            }
            for link in 0..shards * shards {
                while let Some((at, _)) = self.links[link].front() {
                    self.now = self.now.max(*at);
                    self.deliver(link / shards, link % shards);
                    busy = true;
                }
            }
            self.settle();
            if !busy {
                break;
            }
        }
        self.check_quiet();
    }

    // The naive model.

    /// The ceiling that the newest catalog gives a server; `u32::MAX`: none.
    pub(super) fn ceiling(&self, s: usize) -> u32 {
        let server = &self.catalog.servers[s];
        let pool = server.pool.map(|p| self.catalog.pool(p).routing_mode);
        match server.max_concurrency {
            0 => u32::MAX,
            _ if pool == Some(RoutingMode::Unlimited) => u32::MAX,
            ceiling => ceiling,
        }
    }

    pub(super) fn benched(&self, shard: usize, at: Nanos) -> Vec<bool> {
        let mut report = ShardReport::new(ShardId(shard as u8));
        self.shards[shard].figures(at, &mut report);
        report.servers.iter().map(|figures| figures.benched_until > at).collect()
    }

    /// What was live at any time since the shard last looked at its timers: benches that ended meanwhile may or may not have
    /// been noticed on the way.
    fn live_lately(&self, shard: usize, group: GroupId) -> Vec<Vec<BackendId>> {
        let mut report = ShardReport::new(ShardId(shard as u8));
        self.shards[shard].figures(self.timed[shard], &mut report);
        let mut times = vec![self.timed[shard], self.now];
        times.extend(report.servers.iter().map(|f| f.benched_until).filter(|until| *until < self.now));
        times.retain(|at| *at >= self.timed[shard]);
        times.into_iter().map(|at| self.live(shard, group, at)).collect()
    }

    /// Candidates that are live as far as a shard has been told.
    pub(super) fn live(&self, shard: usize, group: GroupId, at: Nanos) -> Vec<BackendId> {
        let catalog = &self.catalog_of[shard];
        let Some(group) = catalog.groups.get(group.index()) else { return Vec::new() };
        let mut live = group.candidates.clone();
        live.retain(|id| {
            let server = catalog.server(*id);
            !server.removed && server.weight > 0.0 && self.up_of[shard][id.index()]
        });
        let benched = self.benched(shard, at);
        if live.iter().any(|id| !benched[id.index()]) {
            live.retain(|id| !benched[id.index()]);
        }
        live
    }

    pub(super) fn running_on(&self, backend: BackendId) -> u32 {
        self.shards.iter().map(|shard| shard.in_flight(backend)).sum()
    }

    pub fn running(&self) -> usize {
        self.requests.iter().filter(|r| matches!(r.state, State::Running(_))).count()
    }
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
    pub fn rejected(&self, rejection: Rejection) -> u32 {
        self.rejections.get(&rejection).copied().unwrap_or(0)
    }
    pub fn served(&self) -> u32 {
        self.served
    }

    fn account_busy(&mut self, change: i64) {
        self.busy_ns += u128::from(self.busy) * u128::from(self.now.since(self.busy_since));
        self.busy_since = self.now;
        self.busy = self.busy.wrapping_add_signed(change);
    }

    /// Share of the permits' time that was used while requests arrived.
    pub fn busy_share(&self) -> f64 {
        let (at, busy_ns) = self.measured.expect("requests have arrived");
        busy_ns as f64 / (at.since(Nanos(1_000_000)) as f64 * self.slots)
    }
}
