//! What the tasks of one shard share.
//!
//! *Invariant*: nothing here is borrowed across an await; every method borrows, acts and lets go.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::asked::Calibrations;
use super::buffers::Buffers;
use super::deadline::Deadlines;
use super::figures::Figures;
use super::memory::Memory;
use super::nap::Nap;
use super::stargate::desk::{Stargate, StargateOptions};
use super::upstream::Upstreams;
use super::waits::{GivenUp, Wait, Waits};
use crate::clock::{Clock, Nanos};
use crate::mesh::ShardPort;
use crate::proto::backend::catalog::{Catalog, Group, Server};
use crate::proto::backend::prefix_memory::{Touch, TouchKind, TouchStage};
use crate::proto::classify::affinity::AffinityIds;
use crate::proto::classify::caller::CallerRules;
use crate::proto::config::Profile;
use crate::proto::dispatcher::{Belief, Dispatcher, Event, Outcome, Placement, Prompted};
use crate::proto::error::Rejection;
use crate::proto::http1::HeadLimits;
use crate::proto::ids::{BackendId, GroupId, ShardId, Ticket};
use crate::proto::message::{Message, Notice, Phase, Update, UpstreamFault, Urgency};
use crate::proto::report::{ServerFigures, ShardReport};

/// The limits a session needs, in the units it needs them.
#[derive(Clone, Debug)]
pub struct SessionLimits {
    pub head: HeadLimits,
    /// How requests say who they are.
    pub caller: CallerRules,
    /// Secret of the process's prompt hashes.
    pub prompt_seed: u64,
    /// Secret of the process's affinity ids.
    pub affinity_seed: [u8; 16],
    pub body_bytes_max: u64,
    pub classify_bytes_max: usize,
    /// This shard's part of what all kept bodies of the process may hold.
    pub buffered_bytes_max: usize,
    /// Client connections of the process.
    pub connections_max: u32,
    pub client_head_timeout_ms: u64,
    pub client_body_idle_timeout_ms: u64,
    pub half_close_allowed: bool,
    pub connect_timeout_ms: u64,
    pub response_head_timeout_ms: u64,
    pub between_bytes_timeout_ms: u64,
    pub total_timeout_ms: u64,
    pub keepalive_timeout_ms: u64,
}

/// The router's own header lines, as far as they can be made once per catalog. Names end with `: `, lines with CRLF.
pub struct Faces {
    pub inflight: Box<[u8]>,
    pub wait_ms: Box<[u8]>,
    pub algorithm: Box<[u8]>,
    pub retries: Box<[u8]>,
    pub sticky_key: Box<[u8]>,
    pub prefix_blocks: Box<[u8]>,
    pub reject_reason: Box<[u8]>,
    /// By `BackendId`: the server and weight lines.
    pub servers: Vec<Box<[u8]>>,
    /// By `BackendId`: what answers on trusted listeners say of it: id and URL.
    pub identities: Vec<Box<[u8]>>,
    /// By `GroupId`: the pool line.
    pub groups: Vec<Box<[u8]>>,
    /// By `BackendId`: the server's own key, where it has one.
    pub credentials: Vec<Option<OwnKey>>,
}

/// A server's own API key, as it stands in `Authorization` and in `x-api-key`.
pub struct OwnKey {
    pub bearer: Box<[u8]>,
    pub bare: Box<[u8]>,
}

impl Faces {
    pub fn new(prefix: &str, catalog: &Catalog) -> Faces {
        let bytes = |text: String| text.into_bytes().into_boxed_slice();
        let name = |suffix: &str| bytes(format!("{prefix}{suffix}: "));
        let server = |server: &Server| {
            bytes(format!("{prefix}Server: {}\r\n{prefix}Weight: {}\r\n", server.name, server.weight_text))
        };
        let group = |group: &Group| bytes(format!("{prefix}Pool: {}\r\n", group.label));
        let credential = |server: &Server| {
            let own = |key: &str| OwnKey { bearer: bytes(format!("Bearer {key}")), bare: bytes(key.into()) };
            server.api_key.as_deref().map(own)
        };
        let identity = |server: &Server| {
            let (name, url) = (&server.name, &server.url);
            bytes(format!("x-inference-server-id: {name}\r\nx-inference-server-url: {url}\r\n"))
        };
        Faces {
            identities: catalog.servers.iter().map(identity).collect(),
            credentials: catalog.servers.iter().map(credential).collect(),
            inflight: name("Inflight"),
            wait_ms: name("Wait-ms"),
            algorithm: name("Algorithm"),
            retries: name("Retries"),
            sticky_key: name("Sticky-Key"),
            prefix_blocks: name("Prefix-Blocks"),
            reject_reason: name("Reject-Reason"),
            servers: catalog.servers.iter().map(server).collect(),
            groups: catalog.groups.iter().map(group).collect(),
        }
    }
}

/// One shard. See the module's text.
pub struct Shard {
    pub id: ShardId,
    pub shards: usize,
    pub clock: Clock,
    /// The time at the last look at the clock: good enough for deadlines.
    now: Cell<Nanos>,
    pub limits: SessionLimits,
    /// Whose contract each listener follows.
    pub profiles: Box<[Profile]>,
    /// Where some listener is trusted.
    pub stargate: Option<Stargate>,
    pub header_prefix: Box<str>,
    pub buffers: Buffers,
    pub memory: Memory,
    pub deadlines: Rc<Deadlines>,
    pub upstreams: Upstreams,
    pub figures: RefCell<Figures>,
    /// Bytes per token, by model.
    pub calibrations: RefCell<Calibrations>,
    pub affinity_ids: RefCell<AffinityIds>,
    pub dispatcher: RefCell<Dispatcher>,
    pub port: RefCell<ShardPort>,
    pub catalog: RefCell<Rc<Catalog>>,
    pub faces: RefCell<Rc<Faces>>,
    pub phase: Cell<Phase>,
    pub ready: Cell<bool>,
    /// Bytes of bodies held for routing and resending.
    pub buffered_bytes: Cell<usize>,
    /// Writes to clients that were begun and not yet seen through, and connections that close gently.
    pub unsettled: Cell<u32>,
    /// Accepting tasks, to be woken when the shard drains.
    pub acceptors: RefCell<Vec<Waker>>,
    /// Client connections of each shard, as last heard; the own entry is not used.
    pub peers: RefCell<Vec<u32>>,
    waits: Waits<Result<Placement, Rejection>>,
    drained_said: Cell<bool>,
    connections_said: Cell<u32>,
    /// Where the timekeeper sleeps long; the next request wakes it.
    pub timekeeper: Nap,
    /// When a request last came, for the spinner, and the spinner's waker while it rests.
    activity: Cell<Nanos>,
    spinner: RefCell<Option<Waker>>,
}

impl Shard {
    #[expect(clippy::too_many_arguments, reason = "one caller, which names them")]
    pub fn new(
        id: ShardId,
        shards: usize,
        clock: Clock,
        limits: SessionLimits,
        header_prefix: &str,
        dispatcher: Dispatcher,
        port: ShardPort,
        catalog: Catalog,
        profiles: Box<[Profile]>,
        stargate: Option<StargateOptions>,
    ) -> Shard {
        let affinity_ids = AffinityIds::new(limits.affinity_seed, id.0);
        let stargate = stargate.map(Stargate::new);
        if let Some(stargate) = &stargate {
            stargate.router.borrow_mut().handle_layout(clock.now(), &catalog.stargate);
        }
        Shard {
            id,
            shards,
            clock,
            now: Cell::new(clock.now()),
            limits,
            profiles,
            stargate,
            header_prefix: header_prefix.into(),
            buffers: Buffers::default(),
            memory: Memory::default(),
            deadlines: Rc::default(),
            upstreams: Upstreams::default(),
            figures: RefCell::default(),
            calibrations: RefCell::default(),
            affinity_ids: RefCell::new(affinity_ids),
            dispatcher: RefCell::new(dispatcher),
            port: RefCell::new(port),
            faces: RefCell::new(Rc::new(Faces::new(header_prefix, &catalog))),
            catalog: RefCell::new(Rc::new(catalog)),
            phase: Cell::new(Phase::Serving),
            ready: Cell::new(false),
            buffered_bytes: Cell::new(0),
            unsettled: Cell::new(0),
            acceptors: RefCell::default(),
            peers: RefCell::new(vec![0; shards]),
            waits: Waits::default(),
            drained_said: Cell::new(false),
            connections_said: Cell::new(0),
            timekeeper: Nap::default(),
            activity: Cell::new(Nanos::ZERO),
            spinner: RefCell::default(),
        }
    }

    /// Reads the clock.
    pub fn read_clock(&self) -> Nanos {
        let now = self.clock.now();
        self.now.set(now);
        now
    }

    /// The time at the last look at the clock, at most a tick old while there is work.
    pub fn now(&self) -> Nanos {
        self.now.get()
    }

    /// How heads are read on a listener of that profile, and those of its answers.
    pub fn head_limits(&self, profile: Profile) -> &HeadLimits {
        match (&self.stargate, profile) {
            (Some(stargate), Profile::Stargate) => &stargate.options.head,
            _ => &self.limits.head,
        }
    }

    /// `ms` from now; 0 means never.
    pub fn deadline(&self, ms: u64) -> Nanos {
        if ms == 0 { Nanos::NEVER } else { self.now.get().plus_ms(ms) }
    }

    /// A request came: worth staying awake for the next one. True: the shard had been resting.
    pub fn active_now(&self) -> bool {
        self.activity.set(self.now.get());
        if let Some(waker) = self.spinner.borrow_mut().take() {
            waker.wake();
        }
        self.timekeeper.wake()
    }

    pub fn last_activity(&self) -> Nanos {
        self.activity.get()
    }

    /// The spinner rests until the next request.
    pub fn rest_spinner(&self, waker: Waker) {
        *self.spinner.borrow_mut() = Some(waker);
    }

    pub fn catalog(&self) -> Rc<Catalog> {
        self.catalog.borrow().clone()
    }

    pub fn faces(&self) -> Rc<Faces> {
        self.faces.borrow().clone()
    }

    /// Tells the control thread, or counts that it could not be told.
    pub fn notify(&self, notice: Notice) {
        if !self.port.borrow_mut().notify(notice) {
            self.figures.borrow_mut().notices_dropped += 1;
        }
    }

    pub fn fault(&self, backend: BackendId, fault: UpstreamFault, errno: i32) {
        self.figures.borrow_mut().server(backend).faults[fault as usize] += 1;
        self.notify(Notice::UpstreamFault { backend, fault, errno });
    }

    /// A request of a kv-aware pool goes to that server with this prompt: remembered here, and told to the other shards.
    pub fn remember(&self, now: Nanos, group: GroupId, backend: BackendId, prompt: &Prompted<'_>) -> Belief {
        let belief = self.dispatcher.borrow_mut().handle_prompt(now, group, backend, prompt);
        let mut figures = self.figures.borrow_mut();
        let counts = &mut figures.server(backend).prefix;
        counts.matched_blocks += u64::from(belief.matched);
        counts.total_blocks += prompt.blocks.len() as u64;
        drop(figures);
        if self.shards > 1 && !prompt.blocks.is_empty() {
            let kind = TouchKind::Recorded(prompt.client);
            self.tell(&Touch { kind, at: now, backend, blocks: prompt.blocks });
        }
        belief
    }

    /// Tells all shards, and applies at once what this one could not tell itself.
    fn tell(&self, touch: &Touch<'_>) {
        if !self.port.borrow_mut().touch(touch) {
            self.dispatcher.borrow_mut().handle_touch(self.id, TouchStage::Settled, touch);
        }
    }

    /// Prompt tokens that this shard had computed there are, or are given up.
    pub fn prefilled(&self, backend: BackendId, work_tokens: u64) {
        self.dispatcher.borrow_mut().handle_prefilled(self.now(), backend, work_tokens);
    }

    /// A request of a pool that measures goes to that server, with about so many tokens of input.
    pub fn reading(&self, now: Nanos, backend: BackendId, tokens: u64) {
        self.dispatcher.borrow_mut().handle_input(now, backend, tokens);
    }

    /// That input is read, or given up.
    pub fn read(&self, backend: BackendId, tokens: u64) {
        self.dispatcher.borrow_mut().handle_read(self.now(), backend, tokens);
    }

    /// The server read the input of a completed request at that rate, in tokens per second.
    pub fn sampled(&self, backend: BackendId, tps: f64) {
        self.dispatcher.borrow_mut().handle_sample(backend, tps);
    }

    /// What was dispatched to the server at `sent` never got there, or was refused: it holds `keep` leading blocks of the prompt,
    /// as before.
    pub fn unsent(&self, sent: Nanos, backend: BackendId, blocks: &[u64], keep: u32) {
        let tail = &blocks[keep as usize..];
        self.tell(&Touch { kind: TouchKind::Dropped(sent), at: self.now(), backend, blocks: tail });
    }

    /// The request has left the server: its permit is free.
    pub fn done(&self, backend: BackendId, outcome: Outcome) {
        self.dispatcher.borrow_mut().handle_done(self.now(), backend, outcome);
        self.pump();
    }

    /// Carries out what the dispatcher has to say: wakes waiting requests, sends messages.
    pub fn pump(&self) {
        loop {
            let event = self.dispatcher.borrow_mut().poll_event();
            match event {
                None => break,
                Some(Event::Granted { ticket, placement }) => self.settle(ticket, Ok(placement)),
                Some(Event::Refused { ticket, rejection }) => self.settle(ticket, Err(rejection)),
                Some(Event::Benched { backend, ms }) => self.notify(Notice::Benched { backend, ms }),
                Some(Event::Unbenched { backend }) => self.notify(Notice::Unbenched { backend }),
            }
        }
        self.port.borrow_mut().carry(&mut self.dispatcher.borrow_mut());
    }

    fn settle(&self, ticket: Ticket, result: Result<Placement, Rejection>) {
        // Granted before the session began to wait cannot happen: it registers before it pumps.
        if let Err(Ok(placement)) = self.waits.settle(ticket, result) {
            self.dispatcher.borrow_mut().handle_done(self.now(), placement.backend, Outcome::Neutral);
        }
    }

    /// Waits for a ticket's answer. Dropped early, the request no longer waits, and a permit that came meanwhile goes
    /// back.
    pub fn wait(self: &Rc<Self>, ticket: Ticket) -> Waiting {
        Waiting { shard: self.clone(), ticket, wait: self.waits.wait(ticket) }
    }

    /// Takes in everything that came from peers and the control thread, and wakes whom it concerns. Sockets handed over
    /// by peers go to `adopt`, with the listener they came by.
    pub fn hear(&self, mut adopt: impl FnMut(i32, u16)) {
        let now = self.now();
        self.port.borrow_mut().poll(|from, message| match message {
            Message::Connections { count } => self.peers.borrow_mut()[from.index()] = count,
            Message::Socket { fd, listener } => adopt(fd, listener),
            message @ (Message::Live { .. } | Message::Since { .. } | Message::Sample { .. }) => {
                if let Some(stargate) = &self.stargate {
                    stargate.router.borrow_mut().handle_message(now, from, &message);
                }
            }
            message => self.dispatcher.borrow_mut().handle_message(now, from, message),
        });
        self.port.borrow_mut().poll_touches(now, |from, stage, touch| {
            self.dispatcher.borrow_mut().handle_touch(from, stage, touch);
        });
        loop {
            let update = self.port.borrow_mut().poll_update();
            let Some(update) = update else { break };
            self.handle_update(now, update);
        }
        self.pump();
        if let Some(stargate) = &self.stargate {
            stargate.pump(&self.port);
        }
    }

    fn handle_update(&self, now: Nanos, update: Update) {
        match &update {
            Update::Catalog(catalog) => {
                let old = self.catalog();
                for (index, (new, old)) in catalog.servers.iter().zip(&old.servers).enumerate() {
                    if new.address != old.address || new.removed {
                        self.upstreams.forget(BackendId(index as u16));
                    }
                }
                *self.faces.borrow_mut() = Rc::new(Faces::new(&self.header_prefix, catalog));
                *self.catalog.borrow_mut() = Rc::new((**catalog).clone());
            }
            Update::Health { backend, up: false } => self.upstreams.forget(*backend),
            Update::Health { .. } | Update::Forget { .. } => {}
            Update::RoundTrip { .. } | Update::Reported { .. } | Update::Scraped { .. } => {}
            Update::Ready(ready) => self.ready.set(*ready),
            Update::Phase(phase) => {
                self.phase.set(*phase);
                match phase {
                    Phase::Draining => {
                        self.deadlines.close_idle();
                        self.acceptors.borrow_mut().drain(..).for_each(Waker::wake);
                    }
                    Phase::Stopping => {
                        self.refuse_waiting(now);
                        if let Some(stargate) = &self.stargate {
                            stargate.refuse_waiting(now);
                        }
                        self.deadlines.close_all();
                    }
                    Phase::Serving | Phase::Settling => {}
                }
            }
            Update::Report { number } => {
                let report = self.report(now, *number);
                self.notify(Notice::Report(Box::new(report)));
            }
        }
        self.dispatcher.borrow_mut().handle_update(now, &update);
        if let Some(stargate) = &self.stargate {
            stargate.router.borrow_mut().handle_update(now, &update);
        }
    }

    /// Whoever waits for a server hears that there will be none.
    fn refuse_waiting(&self, now: Nanos) {
        for ticket in self.waits.tickets() {
            if self.dispatcher.borrow_mut().handle_withdraw(now, ticket) {
                self.settle(ticket, Err(Rejection::ShuttingDown));
            }
        }
    }

    fn report(&self, now: Nanos, number: u64) -> ShardReport {
        let figures = self.figures.borrow();
        let mut report = ShardReport {
            number,
            connections: figures.connections,
            accepted: figures.accepted,
            active: figures.active,
            finished: figures.finished,
            rejections: figures.rejections,
            client_aborts: figures.client_aborts,
            notices_dropped: figures.notices_dropped,
            queue_wait: figures.queue_wait.clone(),
            first_token: figures.first_token.clone(),
            overhead: figures.overhead.clone(),
            stargate: self.stargate.as_ref().map(|stargate| Box::new(stargate.router.borrow().figures())),
            servers: vec![ServerFigures::default(); self.catalog.borrow().servers.len()],
            ..ShardReport::new(self.id)
        };
        let touches = self.port.borrow().touches();
        (report.touches_sent, report.touches_dropped) = (touches.sent, touches.dropped);
        report.touch_bytes = touches.bytes;
        self.dispatcher.borrow().figures(now, &mut report);
        for (index, server) in report.servers.iter_mut().enumerate() {
            if let Some(stargate) = &self.stargate {
                server.in_flight += stargate.router.borrow().in_flight(BackendId(index as u16));
            }
            server.connections = self.upstreams.idle(BackendId(index as u16)) as u32 + server.in_flight;
            if let Some(counts) = figures.servers.get(index) {
                server.statuses = counts.statuses.clone();
                server.retries = counts.retries;
                server.links = counts.links;
                server.faults = counts.faults;
                server.prefix_matched = counts.prefix.matched_blocks;
                server.prefix_total = counts.prefix.total_blocks;
                server.reported_prompt_tokens = counts.prefix.reported_prompt_tokens;
                server.reported_cached_tokens = counts.prefix.reported_cached_tokens;
                server.predicted_cached_tokens = counts.prefix.predicted_cached_tokens;
            }
        }
        report
    }

    /// Time passes: deadlines, queue timeouts, figures for the peers.
    pub fn tick(&self) {
        let now = self.read_clock();
        self.deadlines.sweep(now);
        {
            let mut dispatcher = self.dispatcher.borrow_mut();
            dispatcher.handle_timeout(now);
            dispatcher.flush(now);
        }
        self.pump();
        if let Some(stargate) = &self.stargate {
            stargate.tick(now, &self.port);
        }
        let (connections, active) = {
            let figures = self.figures.borrow();
            (figures.connections, figures.active)
        };
        {
            let mut port = self.port.borrow_mut();
            if connections != self.connections_said.get() {
                self.connections_said.set(connections);
                for peer in (0..self.shards).filter(|peer| *peer != self.id.index()) {
                    let message = Message::Connections { count: connections };
                    port.send_kept(ShardId(peer as u8), message, Urgency::Quiet);
                }
            }
            port.retry();
        }
        if self.phase.get() >= Phase::Draining {
            self.deadlines.close_idle();
            if active == 0 && self.unsettled.get() == 0 && !self.drained_said.replace(true) {
                self.notify(Notice::Drained { shard: self.id });
            }
        }
        if self.phase.get() == Phase::Stopping {
            self.deadlines.close_all();
        }
    }
}

/// See [`Shard::wait`].
pub struct Waiting {
    shard: Rc<Shard>,
    ticket: Ticket,
    wait: Wait<Result<Placement, Rejection>>,
}

impl Future for Waiting {
    type Output = Result<Placement, Rejection>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.wait).poll(cx)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let given_up = self.wait.give_up();
        if matches!(given_up, GivenUp::Over) {
            return;
        }
        self.shard.waits.forget(self.ticket);
        let now = self.shard.now();
        let mut dispatcher = self.shard.dispatcher.borrow_mut();
        match given_up {
            GivenUp::Answered(Ok(placement)) => {
                dispatcher.handle_done(now, placement.backend, Outcome::Neutral);
            }
            GivenUp::Waiting => {
                dispatcher.handle_withdraw(now, self.ticket);
            }
            GivenUp::Answered(Err(_)) | GivenUp::Over => {}
        }
        drop(dispatcher);
        self.shard.pump();
    }
}
