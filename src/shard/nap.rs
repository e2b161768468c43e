//! A sleep that can be cut short.
//!
//! *Invariant*: one sleeper at a time. Waking nobody does nothing.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::task::{Poll, Waker};
use std::time::Duration;

/// See the module's text.
#[derive(Default)]
pub struct Nap {
    sleeper: RefCell<Option<Waker>>,
}

impl Nap {
    /// Sleeps for `pause`, or until it is woken.
    pub async fn sleep(&self, pause: Duration) {
        let mut sleep = pin!(monoio::time::sleep(pause));
        let mut asleep = false;
        std::future::poll_fn(|cx| {
            // Taken again: that is the wake-up.
            if std::mem::replace(&mut asleep, true) && self.sleeper.borrow().is_none() {
                return Poll::Ready(());
            }
            *self.sleeper.borrow_mut() = Some(cx.waker().clone());
            sleep.as_mut().poll(cx)
        })
        .await;
        self.sleeper.borrow_mut().take();
    }

    /// Ends the sleep; true: somebody slept.
    pub fn wake(&self) -> bool {
        let sleeper = self.sleeper.borrow_mut().take();
        sleeper.map(Waker::wake).is_some()
    }
}
