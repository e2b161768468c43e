//! A poll for readability that stays armed across other waiting.
//!
//! While the router waits for an engine it must see the client go, and after the answer it must see the client's next
//! request. One armed poll serves both. It holds no buffer, and dropping it loses nothing.
//!
//! *Cost*: one allocation for as long as a connection is busy; arming again reuses it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::socket::Socket;

trait Rearm {
    fn arm(self: Pin<&mut Self>, socket: &Socket);
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn disarm(self: Pin<&mut Self>);
}

/// `M` makes the future, whose type has no name.
struct Slot<M, F> {
    make: M,
    future: Option<F>,
}

impl<M, F> Rearm for Slot<M, F>
where
    M: Fn(&Socket) -> F,
    F: Future<Output = io::Result<()>>,
{
    fn arm(self: Pin<&mut Self>, socket: &Socket) {
        // SAFETY: `future` is structurally pinned: it is only ever polled in place or dropped in place by assignment.
        let this = unsafe { self.get_unchecked_mut() };
        this.future = Some((this.make)(socket));
    }

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
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

    fn disarm(self: Pin<&mut Self>) {
        // SAFETY: as above.
        unsafe { self.get_unchecked_mut() }.future = None;
    }
}

/// See the module's text.
pub struct ArmedPoll {
    slot: Pin<Box<dyn Rearm>>,
    armed: bool,
}

impl Default for ArmedPoll {
    fn default() -> Self {
        let make = |socket: &Socket| {
            let socket = socket.clone();
            async move { socket.readable().await }
        };
        ArmedPoll { slot: Box::pin(Slot { make, future: None }), armed: false }
    }
}

impl ArmedPoll {
    /// Ready once `socket` has something to read, its end included. Arms itself.
    pub fn poll_readable(&mut self, socket: &Socket, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.armed {
            self.slot.as_mut().arm(socket);
            self.armed = true;
        }
        let result = self.slot.as_mut().poll(cx);
        if result.is_ready() {
            self.armed = false;
        }
        result
    }

    /// Takes the poll back.
    pub fn disarm(&mut self) {
        self.slot.as_mut().disarm();
        self.armed = false;
    }
}
