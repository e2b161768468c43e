//! Where requests that wait for a server find their answers.
//!
//! *Invariant*: an answer goes to the one request that waits for its ticket, once.
//! *Bound and cost*: one allocation and one entry per waiting request; both go when it has its answer or gives up.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::proto::ids::Ticket;

/// See the module's text. `T`: the answer.
pub struct Waits<T> {
    waiting: RefCell<HashMap<Ticket, Rc<Slot<T>>>>,
}

struct Slot<T> {
    answer: Cell<Option<T>>,
    waker: RefCell<Option<Waker>>,
}

impl<T> Default for Waits<T> {
    fn default() -> Self {
        Waits { waiting: RefCell::default() }
    }
}

impl<T> Waits<T> {
    /// From now on answers to `ticket` find their request.
    pub fn wait(&self, ticket: Ticket) -> Wait<T> {
        let slot = Rc::new(Slot { answer: Cell::new(None), waker: RefCell::new(None) });
        self.waiting.borrow_mut().insert(ticket, slot.clone());
        Wait { slot, over: false }
    }

    /// The answer to `ticket`; it comes back where nobody waits for it.
    pub fn settle(&self, ticket: Ticket, answer: T) -> Result<(), T> {
        let Some(slot) = self.waiting.borrow_mut().remove(&ticket) else { return Err(answer) };
        slot.answer.set(Some(answer));
        if let Some(waker) = slot.waker.borrow_mut().take() {
            waker.wake();
        }
        Ok(())
    }

    /// Nobody waits for `ticket` any more.
    pub fn forget(&self, ticket: Ticket) {
        self.waiting.borrow_mut().remove(&ticket);
    }

    /// All that are waited for.
    pub fn tickets(&self) -> Vec<Ticket> {
        self.waiting.borrow().keys().copied().collect()
    }
}

/// One request's wait.
pub struct Wait<T> {
    slot: Rc<Slot<T>>,
    over: bool,
}

/// How a wait stands that is given up.
pub enum GivenUp<T> {
    /// The answer was taken before.
    Over,
    /// It came, and nobody had looked.
    Answered(T),
    Waiting,
}

impl<T> Wait<T> {
    /// The request waits no longer.
    pub fn give_up(&mut self) -> GivenUp<T> {
        match (std::mem::replace(&mut self.over, true), self.slot.answer.take()) {
            (true, _) => GivenUp::Over,
            (false, Some(answer)) => GivenUp::Answered(answer),
            (false, None) => GivenUp::Waiting,
        }
    }
}

impl<T> Future for Wait<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match self.slot.answer.take() {
            Some(answer) => {
                self.over = true;
                Poll::Ready(answer)
            }
            None => {
                *self.slot.waker.borrow_mut() = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[test]
    fn an_answer_reaches_its_own_request_once() {
        let waits = Waits::default();
        let mut cx = Context::from_waker(Waker::noop());
        let (mut first, mut second) = (pin!(waits.wait(Ticket(1))), pin!(waits.wait(Ticket(2))));
        assert!(first.as_mut().poll(&mut cx).is_pending() && second.as_mut().poll(&mut cx).is_pending());
        assert_eq!(waits.settle(Ticket(2), "two"), Ok(()));
        assert_eq!(waits.settle(Ticket(2), "again"), Err("again"));
        assert!(first.as_mut().poll(&mut cx).is_pending());
        assert_eq!(second.as_mut().poll(&mut cx), Poll::Ready("two"));
        assert!(matches!(second.give_up(), GivenUp::Over));
        assert!(matches!(first.give_up(), GivenUp::Waiting));
        waits.forget(Ticket(1));
        assert!(waits.tickets().is_empty());
        let mut late = waits.wait(Ticket(3));
        assert_eq!(waits.settle(Ticket(3), "three"), Ok(()));
        assert!(matches!(late.give_up(), GivenUp::Answered("three")));
    }
}
