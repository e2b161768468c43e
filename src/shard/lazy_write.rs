//! A small write that nobody waits for.
//!
//! Nearly every write of a request or of a piece of an answer is done the moment the ring takes it, and the task learns
//! nothing from its completion: what it waits for is the other side's next bytes. So the write is submitted with a waker
//! that does nothing, and asked about when the task is awake anyway. That spares a wake-up and a poll of the task's whole
//! chain of futures per write.
//!
//! *Invariant*: a write that is not done when the task next looks is waited for in the ordinary way, and the task looks at
//! the latest [`NUDGE_MS`] after the start, so a peer with a full window is served on.
//! *Cost*: one allocation for as long as a connection is busy; starting again reuses it.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::socket::{Socket, WriteError};

/// When the task looks at a write whose completion woke nobody.
pub const NUDGE_MS: u64 = 25;

type Written = (Result<(), WriteError>, Vec<u8>);

trait Restart {
    fn start(self: Pin<&mut Self>, socket: &Socket, buf: Vec<u8>, from: usize);
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Written>;
}

/// `M` makes the future, whose type has no name.
struct Slot<M, F> {
    make: M,
    future: Option<F>,
}

impl<M, F> Restart for Slot<M, F>
where
    M: Fn(&Socket, Vec<u8>, usize) -> F,
    F: Future<Output = Written>,
{
    fn start(self: Pin<&mut Self>, socket: &Socket, buf: Vec<u8>, from: usize) {
        // SAFETY: `future` is structurally pinned: it is only ever polled in place or dropped in place by assignment.
        let this = unsafe { self.get_unchecked_mut() };
        this.future = Some((this.make)(socket, buf, from));
    }

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Written> {
        // SAFETY: as above.
        let this = unsafe { self.get_unchecked_mut() };
        let Some(future) = this.future.as_mut() else { return Poll::Pending };
        // SAFETY: the slot is pinned and the future does not move out of it.
        let result = unsafe { Pin::new_unchecked(future) }.poll(cx);
        if result.is_ready() {
            this.future = None;
        }
        result
    }
}

/// See the module's text.
pub struct LazyWrite {
    slot: Pin<Box<dyn Restart>>,
    busy: bool,
}

impl Default for LazyWrite {
    fn default() -> Self {
        let make = |socket: &Socket, buf: Vec<u8>, from: usize| {
            let range = from..buf.len();
            socket.write(buf, range)
        };
        LazyWrite { slot: Box::pin(Slot { make, future: None }), busy: false }
    }
}

impl LazyWrite {
    /// A write was started and its result has not been seen.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Submits `buf[from..]`. `Some`: it has failed (or succeeded) at once.
    pub fn start(&mut self, socket: &Socket, buf: Vec<u8>, from: usize) -> Option<Written> {
        debug_assert!(!self.busy, "one write at a time");
        self.slot.as_mut().start(socket, buf, from);
        match self.slot.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(written) => Some(written),
            Poll::Pending => {
                self.busy = true;
                None
            }
        }
    }

    /// The result of the write under way; pending while there is none.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Written> {
        if !self.busy {
            return Poll::Pending;
        }
        let result = self.slot.as_mut().poll(cx);
        self.busy = result.is_pending();
        result
    }
}
