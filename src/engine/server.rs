//! The running engine: its listener, its connections, and what they share.
//!
//! One thread with its own monoio runtime. The thread's main task serves the handle's commands; the accept loop and
//! each connection are tasks of their own.
//!
//! *Invariant*: accept is never cancelled: the loop ends when its listener is shut down. Shared state is borrowed for
//! a moment, never across an await.
//! *Bound and cost*: connections as the process's descriptors allow (accept backs off when they run out).
//! *Errors*: [`super::spawn`] reports a listener that cannot be bound and a runtime that cannot be built.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use monoio::buf::IoBufMut;
use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::{TcpListener, UnixStream};
use monoio::time::sleep;
use serde_json::Value;

use super::EngineOptions;
use super::connection::socket;
use super::fault::{Armed, Fault, Faults};
use super::metrics::Stats;
use super::scheduler::{Refusal, Scheduler, Started, Ticket, Work};
use crate::clock::{Clock, Nanos};
use crate::runtime;

/// Waits before the listener is tried again, when descriptors ran out or the port is not free yet.
const RETRY: Duration = Duration::from_millis(10);
/// A stopped engine waits so long for its connections to end.
const STOP_TRIES: u32 = 200;
const STOP_STEP: Duration = Duration::from_millis(5);

/// What a connection is doing, for others to see.
#[derive(Clone, Copy, Debug)]
struct ConnectionState {
    fd: RawFd,
    /// Idle since then; `None`: a request is in progress.
    idle_since: Option<Nanos>,
    /// An inference request is in flight.
    in_flight: bool,
}

#[derive(Debug)]
enum Start {
    Waiting(Option<Waker>),
    Started(Started),
}

/// Whether the listener takes connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    /// Connects are refused until then.
    Refusing(Nanos),
    Stopped,
}

/// See the module's text.
pub struct Engine {
    pub options: EngineOptions,
    pub clock: Clock,
    /// Unix time at the start, in seconds.
    started_at_s: u64,
    pub scheduler: RefCell<Scheduler>,
    starts: RefCell<HashMap<Ticket, Start>>,
    pub stats: RefCell<Stats>,
    pub faults: RefCell<Faults>,
    connections: RefCell<HashMap<u64, ConnectionState>>,
    last_id: Cell<u64>,
    gate: Cell<Gate>,
    listener_fd: Cell<Option<RawFd>>,
    address: SocketAddr,
}

impl Engine {
    pub fn new(options: EngineOptions, address: SocketAddr, started_at_s: u64) -> Rc<Engine> {
        let scheduler = Scheduler::new(options.rates, options.block_tokens, options.kv_blocks);
        let mut faults = Faults::new(options.seed);
        let mut gate = Gate::Open;
        for armed in &options.faults {
            match armed.fault {
                Fault::Refuse { ms: 0 } => gate = Gate::Refusing(Nanos::NEVER),
                Fault::Refuse { ms } => gate = Gate::Refusing(Nanos::from_ms(ms)),
                _ => faults.arm(armed.clone()).expect("options are checked before the engine starts"),
            }
        }
        Rc::new(Engine {
            clock: Clock::new(),
            started_at_s,
            scheduler: RefCell::new(scheduler),
            starts: RefCell::default(),
            stats: RefCell::default(),
            faults: RefCell::new(faults),
            connections: RefCell::default(),
            last_id: Cell::new(0),
            gate: Cell::new(gate),
            listener_fd: Cell::new(None),
            address,
            options,
        })
    }

    /// A number that no answer had before.
    pub fn next_id(&self) -> u64 {
        self.last_id.set(self.last_id.get() + 1);
        self.last_id.get()
    }

    /// Unix time in seconds.
    pub fn unix_s(&self) -> u64 {
        self.started_at_s + self.clock.now().0 / 1_000_000_000
    }

    /// Arms a fault; `refuse` acts on the listener at once.
    pub fn arm(&self, armed: Armed) -> Result<(), String> {
        let Fault::Refuse { ms } = armed.fault else { return self.faults.borrow_mut().arm(armed) };
        if self.gate.get() != Gate::Stopped {
            let until = if ms == 0 { Nanos::NEVER } else { self.clock.now().plus_ms(ms) };
            self.gate.set(Gate::Refusing(until));
            self.close_listener();
        }
        Ok(())
    }

    /// Clears all faults, a refusing listener's too.
    pub fn clear_faults(&self) {
        self.faults.borrow_mut().clear();
        if let Gate::Refusing(_) = self.gate.get() {
            self.gate.set(Gate::Open);
        }
    }

    /// The armed faults, a refusing listener's first.
    pub fn faults_json(&self) -> Value {
        let mut list = self.faults.borrow().to_json();
        if let (Gate::Refusing(until), Value::Array(list)) = (self.gate.get(), &mut list) {
            let ms = if until == Nanos::NEVER { 0 } else { until.since(self.clock.now()) / 1_000_000 };
            list.insert(0, serde_json::json!({"kind": "refuse", "ms": ms}));
        }
        list
    }

    pub fn stats_json(&self) -> Value {
        let scheduler = self.scheduler.borrow();
        self.stats.borrow().to_json(scheduler.running(), scheduler.waiting())
    }

    fn close_listener(&self) {
        if let Some(fd) = self.listener_fd.take() {
            socket::shutdown(fd);
        }
    }

    /// Takes work in; the seat gives it back when dropped.
    pub fn seat(self: &Rc<Self>, work: Work) -> Result<Seat, Refusal> {
        let ticket = self.scheduler.borrow_mut().submit(self.clock.now(), work)?;
        self.starts.borrow_mut().insert(ticket, Start::Waiting(None));
        self.step();
        Ok(Seat { engine: self.clone(), ticket })
    }

    /// Moves the scheduler on to now, and wakes the requests whose prefill began.
    pub fn step(self: &Rc<Self>) {
        let now = self.clock.now();
        let mut started = Vec::new();
        {
            let mut scheduler = self.scheduler.borrow_mut();
            scheduler.step(now, &mut started);
            let mut stats = self.stats.borrow_mut();
            stats.running_peak = stats.running_peak.max(scheduler.running() as u64);
        }
        let mut starts = self.starts.borrow_mut();
        for entry in started {
            if let Some(Start::Waiting(Some(waker))) = starts.insert(entry.ticket, Start::Started(entry)) {
                waker.wake();
            }
            if entry.first_token_at > now {
                // The next prompt's turn comes whatever this one's client does.
                let engine = self.clone();
                monoio::spawn(async move {
                    engine.sleep_until(entry.first_token_at).await;
                    engine.step();
                });
            }
        }
    }

    pub async fn sleep_until(&self, at: Nanos) {
        let ns = at.since(self.clock.now());
        if ns > 0 {
            sleep(Duration::from_nanos(ns)).await;
        }
    }

    /// Takes a connection into the register; the guard takes it out.
    pub fn register(self: &Rc<Self>, fd: RawFd) -> Registered {
        let id = self.next_id();
        let state = ConnectionState { fd, idle_since: Some(self.clock.now()), in_flight: false };
        self.connections.borrow_mut().insert(id, state);
        let mut stats = self.stats.borrow_mut();
        stats.connections += 1;
        stats.connections_open += 1;
        Registered { engine: self.clone(), id }
    }

    /// In-flight requests whose client is still there, as the kernel knows it: a client that closed and then sent
    /// another request elsewhere must not be counted twice.
    fn live_in_flight(&self) -> u64 {
        let connections = self.connections.borrow();
        connections.values().filter(|state| state.in_flight && !socket::peer_gone(state.fd)).count() as u64
    }
}

/// A request in the scheduler. Dropping it ends it, whatever its state.
pub struct Seat {
    engine: Rc<Engine>,
    ticket: Ticket,
}

impl Seat {
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Ready once the prefill began.
    pub fn poll_started(&self, cx: &mut Context<'_>) -> Poll<Started> {
        let mut starts = self.engine.starts.borrow_mut();
        match starts.get_mut(&self.ticket).expect("a seat has its entry until it is dropped") {
            Start::Started(started) => Poll::Ready(*started),
            Start::Waiting(waker) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The same, without waiting.
    pub fn started(&self) -> Option<Started> {
        match self.engine.starts.borrow().get(&self.ticket) {
            Some(Start::Started(started)) => Some(*started),
            _ => None,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.engine.starts.borrow_mut().remove(&self.ticket);
        self.engine.scheduler.borrow_mut().end(self.engine.clock.now(), self.ticket);
        self.engine.step();
    }
}

/// A connection in the register.
pub struct Registered {
    engine: Rc<Engine>,
    id: u64,
}

impl Registered {
    fn change(&self, change: impl FnOnce(&mut ConnectionState)) {
        if let Some(state) = self.engine.connections.borrow_mut().get_mut(&self.id) {
            change(state);
        }
    }
    pub fn set_idle(&self) {
        let now = self.engine.clock.now();
        self.change(|state| state.idle_since = Some(now));
    }
    pub fn set_busy(&self) {
        self.change(|state| state.idle_since = None);
    }

    /// Counts an inference request, until the flight is settled or dropped.
    pub fn flight(&self) -> Flight<'_> {
        self.change(|state| state.in_flight = true);
        let mut stats = self.engine.stats.borrow_mut();
        stats.requests += 1;
        stats.in_flight += 1;
        if stats.in_flight > stats.in_flight_peak {
            stats.in_flight_peak = stats.in_flight_peak.max(self.engine.live_in_flight());
        }
        Flight { registered: self, settled: false }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.engine.connections.borrow_mut().remove(&self.id);
        self.engine.stats.borrow_mut().connections_open -= 1;
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Completed,
    Rejected,
    Faulted,
    Aborted,
}

/// An inference request in flight. Dropped without being settled, it was aborted.
pub struct Flight<'a> {
    registered: &'a Registered,
    settled: bool,
}

impl Flight<'_> {
    /// Counts the request's end; the first call holds.
    pub fn settle(&mut self, outcome: Outcome) {
        if std::mem::replace(&mut self.settled, true) {
            return;
        }
        self.registered.change(|state| state.in_flight = false);
        let mut stats = self.registered.engine.stats.borrow_mut();
        stats.in_flight -= 1;
        match outcome {
            Outcome::Completed => stats.completed += 1,
            Outcome::Rejected => stats.rejected += 1,
            Outcome::Faulted => stats.faulted += 1,
            Outcome::Aborted => stats.aborted += 1,
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.settle(Outcome::Aborted);
    }
}

/// Runs the engine until its handle says stop or goes.
///
/// `listener` is bound already, unless the engine is to refuse at first.
pub async fn run(engine: Rc<Engine>, listener: Option<StdListener>, commands: UnixStream) {
    monoio::spawn(accept(engine.clone(), listener));
    if engine.options.keepalive_ms > 0 {
        monoio::spawn(close_idle(engine.clone()));
    }
    serve_commands(&engine, commands).await;
    engine.gate.set(Gate::Stopped);
    engine.close_listener();
    for _ in 0..STOP_TRIES {
        let open: Vec<RawFd> = engine.connections.borrow().values().map(|state| state.fd).collect();
        if open.is_empty() {
            break;
        }
        open.into_iter().for_each(socket::shutdown);
        sleep(STOP_STEP).await;
    }
}

/// The accept loop: opens the listener again after it was told to refuse.
async fn accept(engine: Rc<Engine>, mut ready: Option<StdListener>) {
    loop {
        match engine.gate.get() {
            Gate::Stopped => return,
            Gate::Refusing(until) if until > engine.clock.now() => {
                ready = None;
                sleep(RETRY).await;
                continue;
            }
            Gate::Refusing(_) => engine.gate.set(Gate::Open),
            Gate::Open => {}
        }
        let listener = match ready.take().map_or_else(|| StdListener::bind(engine.address), Ok) {
            Ok(listener) if runtime::adapt(&listener).is_ok() => listener,
            _ => {
                sleep(RETRY).await;
                continue;
            }
        };
        let fd = listener.as_raw_fd();
        let Ok(listener) = TcpListener::from_std(listener) else {
            sleep(RETRY).await;
            continue;
        };
        engine.listener_fd.set(Some(fd));
        while engine.gate.get() == Gate::Open {
            match listener.accept().await {
                Ok(_) if engine.gate.get() != Gate::Open => break,
                Ok((stream, _)) => {
                    monoio::spawn(super::session::serve(engine.clone(), stream));
                }
                Err(_) if engine.gate.get() == Gate::Open => sleep(RETRY).await,
                Err(_) => break,
            }
        }
        engine.listener_fd.set(None);
    }
}

/// Closes connections that were idle for too long, as real engines do.
async fn close_idle(engine: Rc<Engine>) {
    let limit_ms = engine.options.keepalive_ms;
    let turn = Duration::from_millis((limit_ms / 8).clamp(1, 250));
    while engine.gate.get() != Gate::Stopped {
        sleep(turn).await;
        let now = engine.clock.now();
        for state in engine.connections.borrow().values() {
            if state.idle_since.is_some_and(|since| since.plus_ms(limit_ms) <= now) {
                socket::shutdown(state.fd);
            }
        }
    }
}

/// One command a line, one line of answer. Ends with the stream or with `stop`.
async fn serve_commands(engine: &Rc<Engine>, mut commands: UnixStream) {
    let mut buf = Vec::new();
    loop {
        while let Some(end) = memchr::memchr(b'\n', &buf) {
            let line = String::from_utf8_lossy(&buf[..end]).into_owned();
            buf.drain(..=end);
            let answer = match line.split_once(' ').unwrap_or((&line, "")) {
                ("stop", _) => return,
                ("stats", _) => engine.stats_json().to_string(),
                ("clear", _) => {
                    engine.clear_faults();
                    "ok".to_owned()
                }
                ("arm", text) => match Armed::parse(text).and_then(|armed| engine.arm(armed)) {
                    Ok(()) => "ok".to_owned(),
                    Err(fault) => fault,
                },
                (other, _) => format!("unknown command `{other}`"),
            };
            if commands.write_all(format!("{answer}\n").into_bytes()).await.0.is_err() {
                return;
            }
        }
        buf.reserve(1024);
        let (from, to) = (buf.len(), buf.capacity());
        let (result, slice) = commands.read(buf.slice_mut(from..to)).await;
        buf = slice.into_inner();
        if !matches!(result, Ok(1..)) {
            return;
        }
    }
}
