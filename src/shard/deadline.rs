//! Deadlines of connections, swept once per tick.
//!
//! An expired deadline shuts the socket down and never drops an operation: the task that waits on the socket wakes up by
//! itself and asks the [`Timer`] why. Only a wait between requests, which holds nothing, is simply woken.
//!
//! *Invariant*: a slot belongs to one live [`Timer`]; its descriptor is open while a deadline is set.
//! *Bound and cost*: setting one is a few stores. A sweep compares one `u64` per connection: 100,000 connections are
//! 800 KB read in order. Precision: one tick.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::socket::shutdown;
use crate::clock::Nanos;

/// What happens at the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A waiting read ends; an answer can still be written.
    ShutRead,
    /// The connection ends.
    ShutBoth,
    /// The task is woken ([`TimerHandle::poll_woken`]).
    Wake,
}

struct Slot {
    fd: RawFd,
    action: Action,
    /// The deadline has passed and the socket was shut.
    fired: bool,
    /// The deadline has passed and the task was woken.
    woken: bool,
    /// Between requests: closed when the shard drains.
    idle: bool,
    /// No deadline is later than this: the total time of a request.
    cap: Nanos,
    /// Its client is being told that the process stops: not to be cut while it hears that.
    last_words: bool,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Slots {
    /// Apart from the rest, so that a sweep reads nothing else.
    at: Vec<Nanos>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// All deadlines of a shard.
#[derive(Default)]
pub struct Deadlines {
    slots: RefCell<Slots>,
}

impl Deadlines {
    /// A timer for one connection.
    pub fn timer(self: &Rc<Self>) -> Timer {
        let mut all = self.slots.borrow_mut();
        let slot = Slot {
            fd: -1,
            action: Action::Wake,
            fired: false,
            woken: false,
            idle: false,
            cap: Nanos::NEVER,
            last_words: false,
            waker: None,
        };
        let index = match all.free.pop() {
            Some(index) => {
                all.slots[index as usize] = slot;
                index
            }
            None => {
                all.slots.push(slot);
                all.at.push(Nanos::NEVER);
                (all.slots.len() - 1) as u32
            }
        };
        Timer { handle: TimerHandle { deadlines: self.clone(), index } }
    }

    /// Acts on every deadline that is not after `now`.
    pub fn sweep(&self, now: Nanos) {
        let mut all = self.slots.borrow_mut();
        let all = &mut *all;
        for (at, slot) in all.at.iter_mut().zip(&mut all.slots) {
            if *at <= now {
                *at = Nanos::NEVER;
                slot.fire();
            }
        }
    }

    /// Ends the connections that are between requests.
    pub fn close_idle(&self) {
        for slot in self.slots.borrow_mut().slots.iter_mut().filter(|slot| slot.idle) {
            shutdown(slot.fd, libc::SHUT_RD);
        }
    }

    /// Ends every connection that has a deadline set or is idle, but for those that hear their last words. A task that is
    /// only to be woken is woken; what it then waits for ends with the next call.
    pub fn close_all(&self) {
        let mut all = self.slots.borrow_mut();
        let all = &mut *all;
        for (at, slot) in all.at.iter_mut().zip(&mut all.slots) {
            if slot.last_words || *at == Nanos::NEVER && !slot.idle {
                continue;
            }
            if slot.action == Action::Wake && !slot.idle {
                *at = Nanos::NEVER;
                slot.fire();
            } else {
                // Whoever waits must not take this for the other side's end.
                (slot.fired, slot.woken) = (true, false);
                shutdown(slot.fd, libc::SHUT_RDWR);
            }
        }
    }
}

impl Slot {
    fn fire(&mut self) {
        self.fired = self.action != Action::Wake;
        self.woken = !self.fired;
        match self.action {
            Action::ShutRead => shutdown(self.fd, libc::SHUT_RD),
            Action::ShutBoth => shutdown(self.fd, libc::SHUT_RDWR),
            Action::Wake => {
                if let Some(waker) = self.waker.take() {
                    waker.wake();
                }
            }
        }
    }
}

/// The deadline of one connection. One at a time: a new one replaces the old. The slot is free again when it is dropped.
pub struct Timer {
    handle: TimerHandle,
}

/// What a [`Timer`] can do, without owning the slot: for work that runs while the timer's owner is borrowed. Not to be
/// used once the timer is gone.
#[derive(Clone)]
pub struct TimerHandle {
    deadlines: Rc<Deadlines>,
    index: u32,
}

impl Timer {
    pub fn handle(&self) -> TimerHandle {
        self.handle.clone()
    }
}

impl std::ops::Deref for Timer {
    type Target = TimerHandle;
    fn deref(&self) -> &TimerHandle {
        &self.handle
    }
}

impl TimerHandle {
    /// At `at`, do `action` to `fd`. `fd` must stay open until the deadline is replaced, cleared or dropped.
    pub fn arm(&self, at: Nanos, fd: RawFd, action: Action) {
        let all = &mut *self.deadlines.slots.borrow_mut();
        let index = self.index as usize;
        let slot = &mut all.slots[index];
        all.at[index] = at.min(slot.cap);
        (slot.fd, slot.action, slot.fired, slot.woken, slot.idle) = (fd, action, false, false, false);
    }

    /// As [`TimerHandle::arm`], for a connection between requests.
    pub fn arm_idle(&self, at: Nanos, fd: RawFd, action: Action) {
        self.cap(Nanos::NEVER);
        self.arm(at, fd, action);
        self.deadlines.slots.borrow_mut().slots[self.index as usize].idle = true;
    }

    /// From now until the next [`TimerHandle::arm_idle`], no deadline is later than `at`.
    pub fn cap(&self, at: Nanos) {
        self.deadlines.slots.borrow_mut().slots[self.index as usize].cap = at;
    }

    /// From now on [`Deadlines::close_all`] leaves this connection alone: its client is being told why it ends.
    pub fn spare(&self) {
        self.deadlines.slots.borrow_mut().slots[self.index as usize].last_words = true;
    }

    /// Takes the deadline away, and the cap.
    pub fn clear_all(&self) {
        self.cap(Nanos::NEVER);
        self.clear();
    }

    /// Takes the deadline away.
    pub fn clear(&self) {
        let mut all = self.deadlines.slots.borrow_mut();
        all.at[self.index as usize] = Nanos::NEVER;
        all.slots[self.index as usize].idle = false;
    }

    /// Whether the last deadline set has passed and shut the socket.
    pub fn fired(&self) -> bool {
        self.deadlines.slots.borrow().slots[self.index as usize].fired
    }

    /// Ready once a deadline with [`Action::Wake`] has passed.
    pub fn poll_woken(&self, cx: &mut Context<'_>) -> Poll<()> {
        let slot = &mut self.deadlines.slots.borrow_mut().slots[self.index as usize];
        match slot.action {
            Action::Wake if slot.woken => Poll::Ready(()),
            Action::Wake => {
                if slot.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                    slot.waker = Some(cx.waker().clone());
                }
                Poll::Pending
            }
            Action::ShutRead | Action::ShutBoth => Poll::Pending,
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let mut all = self.handle.deadlines.slots.borrow_mut();
        let index = self.handle.index as usize;
        all.at[index] = Nanos::NEVER;
        all.slots[index].waker = None;
        all.slots[index].idle = false;
        all.free.push(self.handle.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn an_expired_deadline_ends_the_socket_once() {
        let deadlines = Rc::new(Deadlines::default());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let timer = deadlines.timer();
        timer.arm(Nanos(100), ours.as_raw_fd(), Action::ShutBoth);
        deadlines.sweep(Nanos(99));
        assert!(!timer.fired());
        deadlines.sweep(Nanos(100));
        assert!(timer.fired());
        assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0);
        timer.arm(Nanos::NEVER, ours.as_raw_fd(), Action::ShutBoth);
        assert!(!timer.fired(), "a new deadline starts afresh");
    }

    /// What is written when the process stops is not cut by the very stop, however often it is repeated; who is only to be
    /// woken keeps its socket.
    #[test]
    fn a_stop_spares_last_words_and_wakes_who_waits_to_be_woken() {
        let deadlines = Rc::new(Deadlines::default());
        let pair = || UnixStream::pair().unwrap();
        let (talking, heard) = pair();
        let (waiting, _theirs) = pair();
        let (busy, mut cut) = pair();
        let timers = [deadlines.timer(), deadlines.timer(), deadlines.timer()];
        timers[0].spare();
        timers[0].arm(Nanos(100), talking.as_raw_fd(), Action::ShutBoth);
        timers[1].arm(Nanos(100), waiting.as_raw_fd(), Action::Wake);
        timers[2].arm(Nanos(100), busy.as_raw_fd(), Action::ShutBoth);
        deadlines.close_all();
        deadlines.close_all();
        assert_eq!(timers.each_ref().map(|timer| timer.fired()), [false, false, true]);
        assert_eq!(cut.read(&mut [0; 1]).unwrap(), 0);
        heard.set_nonblocking(true).unwrap();
        assert_eq!((&heard).read(&mut [0; 1]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        assert!(timers[1].poll_woken(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn a_dropped_timer_never_acts_and_its_slot_is_reused() {
        let deadlines = Rc::new(Deadlines::default());
        let (ours, theirs) = UnixStream::pair().unwrap();
        let timer = deadlines.timer();
        timer.arm_idle(Nanos(1), ours.as_raw_fd(), Action::ShutBoth);
        drop(timer);
        deadlines.sweep(Nanos(2));
        deadlines.close_idle();
        deadlines.close_all();
        theirs.set_nonblocking(true).unwrap();
        assert_eq!((&theirs).read(&mut [0; 1]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        let _again = deadlines.timer();
        assert_eq!(deadlines.slots.borrow().slots.len(), 1);
    }
}
