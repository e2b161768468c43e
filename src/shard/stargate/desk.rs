//! A shard's part for trusted listeners: its target router, who waits for it, and when it wants to be woken.
//!
//! *Invariant*: nothing here is borrowed across an await. Whoever changes something calls [`Stargate::pump`] after it, so that
//! waiting requests and peers hear of it at once.
//! *Bound and cost*: one task, which sleeps until the router has something to do; it is woken earlier only where that comes closer.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::super::nap::Nap;
use super::super::state::Shard;
use super::super::waits::{GivenUp, Wait, Waits};
use crate::clock::Nanos;
use crate::mesh::ShardPort;
use crate::proto::config::lb_config::LbConfig;
use crate::proto::http1::HeadLimits;
use crate::proto::ids::{BackendId, Ticket};
use crate::proto::message::{Notice, Urgency};
use crate::proto::stargate::notice::StargateNotice;
use crate::proto::stargate::request::{Dispatched, Refusal};
use crate::proto::stargate::target_router::{TargetRouter, TargetRouterOptions};

/// Longest sleep of the router's task.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// What trusted listeners are started with.
#[derive(Clone, Debug)]
pub struct StargateOptions {
    /// How heads are read: nominations are void there, and no field is the router's own.
    pub head: HeadLimits,
    pub router: TargetRouterOptions,
    pub lb_config: Arc<LbConfig>,
    /// Bytes of a body that are kept for sending it again; a declared length above it is 413.
    pub replay_bytes_max: u64,
    /// 0: no limit.
    pub connect_timeout_ms: u64,
    /// From a request's first byte to the head of the answer; 0: no limit.
    pub head_timeout_ms: u64,
    /// Only an answer that says so itself may be tried elsewhere.
    pub requires_retry_signal: bool,
    /// Name of the header with the retry budget; empty: there is none.
    pub retry_budget_header: Box<[u8]>,
    /// The `config` of `/debug/state`: a JSON object.
    pub debug_config: Box<str>,
    pub levels: Levels,
}

/// Which levels the log takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    pub warn: bool,
    pub info: bool,
    pub debug: bool,
}

/// See the module's text.
pub struct Stargate {
    pub options: StargateOptions,
    pub router: RefCell<TargetRouter>,
    waits: Waits<Result<Dispatched, Refusal>>,
    random: Cell<u64>,
    /// When the router's task wakes by itself, and how it is woken before that.
    alarm_at: Cell<Nanos>,
    alarm: Nap,
}

impl Stargate {
    pub fn new(options: StargateOptions) -> Stargate {
        let router = TargetRouter::new(options.router, options.lb_config.clone());
        Stargate {
            random: Cell::new(options.router.seed),
            options,
            router: RefCell::new(router),
            waits: Waits::default(),
            alarm_at: Cell::new(Nanos::NEVER),
            alarm: Nap::default(),
        }
    }

    /// Numbers for the ids of spans: distinct, not secret (splitmix64).
    pub fn random(&self) -> u64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Carries out what the router has to say: wakes waiting requests, sends messages, sets the alarm.
    pub fn pump(&self, port: &RefCell<ShardPort>) {
        let mut router = self.router.borrow_mut();
        while let Some(woken) = router.poll_woken() {
            // Nobody waits any more only where the client has gone in this very turn: its flight is ended by its guard.
            let _ = self.waits.settle(woken.ticket, woken.routed);
        }
        let mut port = port.borrow_mut();
        while let Some((to, message, urgency)) = router.poll_message() {
            match urgency {
                Urgency::Lazy => {
                    if let Err(message) = port.send(to, message) {
                        router.handle_dropped(&message);
                    }
                }
                Urgency::Quiet | Urgency::Wake => port.send_kept(to, message, urgency),
            }
        }
        if router.poll_timeout() < self.alarm_at.get() {
            self.alarm.wake();
        }
    }

    /// Time passes: figures go out to the peers.
    pub fn tick(&self, now: Nanos, port: &RefCell<ShardPort>) {
        let needs_flush = self.router.borrow().needs_flush();
        if needs_flush {
            self.router.borrow_mut().flush(now);
            self.pump(port);
        }
    }

    /// Whoever waits hears that nothing comes.
    pub fn refuse_waiting(&self, now: Nanos) {
        for ticket in self.waits.tickets() {
            self.router.borrow_mut().give_up(now, ticket);
            let _ = self.waits.settle(ticket, Err(Refusal::Unavailable));
        }
    }
}

impl Shard {
    /// The part for trusted listeners, which there is where there are such listeners.
    pub fn trusted(&self) -> &Stargate {
        self.stargate.as_ref().expect("a trusted listener has its part")
    }

    /// Says something for the log.
    pub fn say(&self, notice: StargateNotice) {
        self.notify(Notice::Stargate(Box::new(notice)));
    }

    /// Waits for a route. Dropped early, the request waits no longer; its flight has to be ended all the same.
    pub fn wait_for_route(self: &Rc<Self>, ticket: Ticket) -> WaitForRoute {
        WaitForRoute { shard: self.clone(), ticket, wait: self.trusted().waits.wait(ticket) }
    }

    /// The name and the URL of a server, for the log.
    pub fn named(&self, backend: BackendId) -> (Box<str>, Box<str>) {
        let catalog = self.catalog.borrow();
        let server = catalog.server(backend);
        (server.name.clone(), server.url.clone())
    }
}

/// See [`Shard::wait_for_route`].
pub struct WaitForRoute {
    shard: Rc<Shard>,
    ticket: Ticket,
    wait: Wait<Result<Dispatched, Refusal>>,
}

impl Future for WaitForRoute {
    type Output = Result<Dispatched, Refusal>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.wait).poll(cx)
    }
}

impl Drop for WaitForRoute {
    fn drop(&mut self) {
        if let GivenUp::Waiting = self.wait.give_up() {
            let stargate = self.shard.trusted();
            stargate.waits.forget(self.ticket);
            stargate.router.borrow_mut().give_up(self.shard.now(), self.ticket);
            stargate.pump(&self.shard.port);
        }
    }
}

/// Calls the router when it wants to be called.
pub async fn keep_appointments(shard: Rc<Shard>) {
    let stargate = shard.trusted();
    loop {
        let now = shard.read_clock();
        let mut at = stargate.router.borrow().poll_timeout();
        if at <= now {
            stargate.router.borrow_mut().handle_timeout(now);
            stargate.pump(&shard.port);
            at = stargate.router.borrow().poll_timeout();
        }
        stargate.alarm_at.set(at);
        let pause = Duration::from_nanos(at.since(now)).min(SLEEP_MAX);
        stargate.alarm.sleep(pause).await;
    }
}
