//! How tasks of the control thread wake each other: a counter and those who wait for it to move.
//!
//! *Invariant*: one thread only (it is not `Send`). A call of [`Notify::notify`] after [`Notify::seen`] was read is never
//! missed, also when nobody waited at that moment.
//! *Cost*: O(tasks waiting) per call.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// See the module's text.
#[derive(Debug, Default)]
pub struct Notify {
    count: Cell<u64>,
    /// One waker per wait under way, by a number of its own.
    waiting: RefCell<BTreeMap<u64, Waker>>,
    waits: Cell<u64>,
}

/// Takes a wait that was given up off the list.
struct Wait<'a> {
    notify: &'a Notify,
    number: u64,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.notify.waiting.borrow_mut().remove(&self.number);
    }
}

impl Notify {
    /// The count to hand to [`Notify::changed`]; read it before looking at what is waited for.
    pub fn seen(&self) -> u64 {
        self.count.get()
    }

    /// Wakes all who wait.
    pub fn notify(&self) {
        self.count.set(self.count.get() + 1);
        for waker in self.waiting.take().into_values() {
            waker.wake();
        }
    }

    /// Ends once there was a call after `seen` was read; returns the present count. May be given up at any time.
    pub async fn changed(&self, seen: u64) -> u64 {
        let wait = Wait { notify: self, number: self.waits.get() };
        self.waits.set(wait.number + 1);
        poll_fn(|context| {
            if self.count.get() != seen {
                return Poll::Ready(self.count.get());
            }
            self.waiting.borrow_mut().insert(wait.number, context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn a_change_before_the_wait_is_not_missed_and_wakers_do_not_pile_up() {
        let notify = Notify::default();
        let mut context = Context::from_waker(Waker::noop());
        let seen = notify.seen();
        {
            let mut changed = pin!(notify.changed(seen));
            for _ in 0..10 {
                assert!(changed.as_mut().poll(&mut context).is_pending());
            }
            assert_eq!(notify.waiting.borrow().len(), 1);
            notify.notify();
            assert!(changed.as_mut().poll(&mut context).is_ready());
        }
        {
            let mut given_up = pin!(notify.changed(notify.seen()));
            assert!(given_up.as_mut().poll(&mut context).is_pending());
        }
        assert!(notify.waiting.borrow().is_empty());
        notify.notify();
        let mut late = pin!(notify.changed(seen));
        assert!(late.as_mut().poll(&mut context).is_ready());
        let now = notify.seen();
        let mut next = pin!(notify.changed(now));
        assert!(next.as_mut().poll(&mut context).is_pending());
    }
}
