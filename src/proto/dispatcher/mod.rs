//! One shard's brain: no I/O in it.

use super::backend::catalog::{Algorithm, Catalog};
use super::error::Rejection;
use super::ids::{BackendId, GroupId, PoolId, ShardId, Ticket};
use super::message::{Message, Tried, Update, Urgency};
use super::report::ShardReport;
use crate::clock::Nanos;

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
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        DispatcherOptions { bench_after: 3, bench_ms: 1000, bench_max_ms: 30_000, wheel_phase: None }
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

/// See the module's text.
#[derive(Debug)]
pub struct Dispatcher {}

#[expect(unused_variables, reason = "being written")]
impl Dispatcher {
    /// `me` of `shards` (1 to 256) shards. Every server counts as up until [`Update::Health`] says otherwise.
    pub fn new(me: ShardId, shards: usize, options: DispatcherOptions, catalog: Catalog) -> Self {
        unimplemented!()
    }
    /// The catalog in force.
    pub fn catalog(&self) -> &Catalog {
        unimplemented!()
    }
    /// The group of a model as named in the request (`None`: it names none).
    pub fn resolve(&self, model: Option<&[u8]>) -> Result<GroupId, Rejection> {
        unimplemented!()
    }
    /// From the head alone: `Err` when it is already known that nothing can be admitted (`group` `None`: whatever the
    /// body will name). Takes nothing.
    pub fn admissible(&self, now: Nanos, group: Option<GroupId>) -> Result<(), Rejection> {
        unimplemented!()
    }
    /// Places a request.
    pub fn handle_request(&mut self, now: Nanos, group: GroupId, tried: Tried) -> Decision {
        unimplemented!()
    }
    /// The request of `ticket` no longer waits. True: it was still this dispatcher's (waiting, or granted by an event not
    /// yet polled; that permit is freed). False: its event has been polled; a polled `Granted` is the caller's to end.
    pub fn handle_withdraw(&mut self, now: Nanos, ticket: Ticket) -> bool {
        unimplemented!()
    }
    /// A request left its server.
    pub fn handle_done(&mut self, now: Nanos, backend: BackendId, outcome: Outcome) {
        unimplemented!()
    }
    /// A message of another shard. `Connections` and `Socket` are not for the dispatcher and are ignored.
    pub fn handle_message(&mut self, now: Nanos, from: ShardId, message: Message) {
        unimplemented!()
    }
    /// A lazy message that found its ring full: its figure is sent again with the next flush.
    pub fn handle_dropped(&mut self, message: Message) {
        unimplemented!()
    }
    /// `Catalog` and `Health`; others are ignored.
    pub fn handle_update(&mut self, now: Nanos, update: &Update) {
        unimplemented!()
    }
    /// Acts on what is due at `now`.
    pub fn handle_timeout(&mut self, now: Nanos) {
        unimplemented!()
    }
    /// When [`Dispatcher::handle_timeout`] has to be called next.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        unimplemented!()
    }
    pub fn poll_event(&mut self) -> Option<Event> {
        unimplemented!()
    }
    /// The next message to send; call until `None` after every turn.
    pub fn poll_message(&mut self) -> Option<(ShardId, Message, Urgency)> {
        unimplemented!()
    }
    /// Puts out the load figures that changed since the last flush. Call every tick while [`Dispatcher::needs_flush`].
    pub fn flush(&mut self, now: Nanos) {
        unimplemented!()
    }
    /// Some figure has changed and was not flushed.
    pub fn needs_flush(&self) -> bool {
        unimplemented!()
    }
    /// This shard's requests in flight on a server.
    pub fn in_flight(&self, backend: BackendId) -> u32 {
        unimplemented!()
    }
    /// In flight over all shards, as far as heard.
    pub fn in_flight_total(&self, backend: BackendId) -> u32 {
        unimplemented!()
    }
    /// Present, up, weight above 0 and not benched (or spared the bench as the last one).
    pub fn eligible(&self, backend: BackendId) -> bool {
        unimplemented!()
    }
    /// At least one server is eligible for something.
    pub fn routable(&self) -> bool {
        unimplemented!()
    }
    /// This shard's requests that wait, by pool.
    pub fn queued(&self, pool: PoolId) -> u32 {
        unimplemented!()
    }
    /// Fills `in_flight`, `dispatched` and `benched_until` of each server, `queued` and `mesh_lag_ns`; leaves the rest.
    pub fn figures(&self, now: Nanos, report: &mut ShardReport) {
        unimplemented!()
    }
}
