//! What the control thread needs of the mesh, so that tests can stand in for the shards.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::mesh::ControlPort;
use crate::proto::ids::ShardId;
use crate::proto::message::{Notice, Update};

/// The control thread's end of its rings to all shards.
pub trait Port {
    fn shards(&self) -> usize;
    /// Sends to one shard and wakes it; kept in order while the ring is full.
    fn update(&mut self, to: ShardId, update: Update);
    /// Tries kept updates again; true when none is left.
    fn retry(&mut self) -> bool;
    /// Hands every notice that has arrived to `take`; returns how many.
    fn poll(&mut self, take: &mut dyn FnMut(ShardId, Notice)) -> usize;
    /// Asks for the wake-up descriptor to be written with the next notice; poll once more after it.
    fn arm(&self);
    /// A descriptor of our own, not blocking, that becomes readable (8 bytes) after [`Port::arm`] when notices come.
    fn wake_fd(&self) -> io::Result<OwnedFd>;
}

impl Port for ControlPort {
    fn shards(&self) -> usize {
        ControlPort::shards(self)
    }
    fn update(&mut self, to: ShardId, update: Update) {
        ControlPort::update(self, to, update);
    }
    fn retry(&mut self) -> bool {
        ControlPort::retry(self)
    }
    fn poll(&mut self, take: &mut dyn FnMut(ShardId, Notice)) -> usize {
        ControlPort::poll(self, take)
    }
    fn arm(&self) {
        ControlPort::arm(self);
    }
    fn wake_fd(&self) -> io::Result<OwnedFd> {
        // It is waited for with readiness and then read, on either driver.
        self.set_nonblocking(true)?;
        // SAFETY: the port owns the descriptor and outlives this call, which only duplicates it.
        #[expect(unsafe_code, reason = "the port names its descriptor by number")]
        let descriptor = unsafe { BorrowedFd::borrow_raw(ControlPort::wake_fd(self)) };
        descriptor.try_clone_to_owned()
    }
}
