//! A read that stays armed across other waiting.
//!
//! While the router waits for an engine it must see the client go, and after the answer the client's next request must
//! find a read waiting. One armed read serves both: it is polled beside whatever else is waited for, and it is never
//! dropped in favour of something else, because a dropped read may swallow bytes.
//!
//! *Cost*: one allocation for as long as a connection is busy; arming again reuses it.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use monoio::io::CancelHandle;

use super::socket::{Outcome, Socket};

trait Rearm {
    fn arm(self: Pin<&mut Self>, socket: &Socket, buf: Vec<u8>, cancel: CancelHandle);
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome<usize>>;
}

/// `M` makes the future, whose type has no name.
struct Slot<M, F> {
    make: M,
    future: Option<F>,
}

impl<M, F> Rearm for Slot<M, F>
where
    M: Fn(&Socket, Vec<u8>, CancelHandle) -> F,
    F: Future<Output = Outcome<usize>>,
{
    fn arm(self: Pin<&mut Self>, socket: &Socket, buf: Vec<u8>, cancel: CancelHandle) {
        // SAFETY: `future` is structurally pinned: it is only ever polled in place or dropped in place by assignment.
        let this = unsafe { self.get_unchecked_mut() };
        debug_assert!(this.future.is_none(), "one read at a time");
        this.future = Some((this.make)(socket, buf, cancel));
    }

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome<usize>> {
        // SAFETY: as above.
        let this = unsafe { self.get_unchecked_mut() };
        let future = this.future.as_mut().expect("polled only while armed");
        // SAFETY: the slot is pinned and the future does not move out of it.
        let result = unsafe { Pin::new_unchecked(future) }.poll(cx);
        if result.is_ready() {
            this.future = None;
        }
        result
    }
}

/// See the module's text.
pub struct ArmedRead {
    slot: Pin<Box<dyn Rearm>>,
    armed: bool,
}

impl Default for ArmedRead {
    fn default() -> Self {
        let make = |socket: &Socket, buf: Vec<u8>, cancel: CancelHandle| socket.read_cancelable(buf, cancel);
        ArmedRead { slot: Box::pin(Slot { make, future: None }), armed: false }
    }
}

impl ArmedRead {
    pub fn is_armed(&self) -> bool {
        self.armed
    }

    /// Starts a read that appends to `buf`. It is submitted when first polled.
    pub fn arm(&mut self, socket: &Socket, buf: Vec<u8>, cancel: CancelHandle) {
        self.slot.as_mut().arm(socket, buf, cancel);
        self.armed = true;
    }

    /// The armed read's result. Pending when none is armed.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Outcome<usize>> {
        if !self.armed {
            return Poll::Pending;
        }
        let result = self.slot.as_mut().poll(cx);
        if result.is_ready() {
            self.armed = false;
        }
        result
    }
}
