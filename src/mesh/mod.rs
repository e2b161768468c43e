//! What shards tell each other. (being written)

use std::io;
use std::os::fd::RawFd;

use crate::proto::dispatcher::Dispatcher;
use crate::proto::ids::ShardId;
use crate::proto::message::{Message, Notice, Update, Urgency};

/// One shard's end of all its rings.
#[derive(Debug)]
pub struct ShardPort {}

/// The control thread's end of all its rings.
#[derive(Debug)]
pub struct ControlPort {}

/// Rings and wake-ups for `shards` (1 to 256) shards. Errors: eventfd creation (descriptor limit).
pub fn build(shards: usize) -> io::Result<(Vec<ShardPort>, ControlPort)> {
    let _ = shards;
    unimplemented!()
}

#[expect(unused_variables, reason = "being written")]
impl ShardPort {
    pub fn me(&self) -> ShardId {
        unimplemented!()
    }
    /// Puts a message in the ring; `Err` gives it back when the ring is full. Wakes nobody.
    pub fn send(&mut self, to: ShardId, message: Message) -> Result<(), Message> {
        unimplemented!()
    }
    /// Puts a message in the ring, or keeps it here, in order, until [`ShardPort::retry`] finds room.
    pub fn send_kept(&mut self, to: ShardId, message: Message, urgency: Urgency) {
        unimplemented!()
    }
    /// Sends all that the dispatcher has to say, wakes who must be woken, and hands back what was dropped.
    pub fn carry(&mut self, dispatcher: &mut Dispatcher) {
        unimplemented!()
    }
    /// Tries the kept messages and notices again; true when none is left. Call every tick.
    pub fn retry(&mut self) -> bool {
        unimplemented!()
    }
    /// Wakes a shard if it sleeps.
    pub fn wake(&self, to: ShardId) {
        unimplemented!()
    }
    /// Hands every message that has arrived to `take`; returns how many.
    pub fn poll(&mut self, mut take: impl FnMut(ShardId, Message)) -> usize {
        unimplemented!()
    }
    /// The next update of the control thread.
    pub fn poll_update(&mut self) -> Option<Update> {
        unimplemented!()
    }
    /// Tells the control thread, and wakes it. False: dropped as the ring was full (never a report, start, end or failure).
    pub fn notify(&mut self, notice: Notice) -> bool {
        unimplemented!()
    }
    /// Asks producers for a wake-up (an eventfd write) with the next urgent message. Call it, then poll once more, then
    /// sleep: what came in between is seen by that poll.
    pub fn arm(&self) {
        unimplemented!()
    }
    /// Tells producers that this shard is awake and polls anyway: no eventfd writes.
    pub fn disarm(&self) {
        unimplemented!()
    }
    /// Descriptor of the eventfd; read 8 bytes of it to sleep. Blocking, as io_uring wants it; see `set_nonblocking`.
    pub fn wake_fd(&self) -> RawFd {
        unimplemented!()
    }
    /// For drivers that poll and then read.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        unimplemented!()
    }
}

#[expect(unused_variables, reason = "being written")]
impl ControlPort {
    pub fn shards(&self) -> usize {
        unimplemented!()
    }
    /// Sends to one shard and wakes it; kept in order while the ring is full.
    pub fn update(&mut self, to: ShardId, update: Update) {
        unimplemented!()
    }
    /// Tries kept updates again; true when none is left.
    pub fn retry(&mut self) -> bool {
        unimplemented!()
    }
    /// Hands every notice that has arrived to `take`; returns how many.
    pub fn poll(&mut self, mut take: impl FnMut(ShardId, Notice)) -> usize {
        unimplemented!()
    }
    /// As [`ShardPort::arm`].
    pub fn arm(&self) {
        unimplemented!()
    }
    pub fn disarm(&self) {
        unimplemented!()
    }
    pub fn wake_fd(&self) -> RawFd {
        unimplemented!()
    }
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        unimplemented!()
    }
}
