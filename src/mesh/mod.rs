//! The rings between shards, and between each shard and the control thread; and how a sleeper is woken.
//!
//! Each ordered pair of shards has one `rtrb` ring of [`Message`]s; each shard has one ring from the control thread
//! ([`Update`]) and one to it ([`Notice`]). A producer that pushed something urgent writes the receiver's eventfd, but only
//! when the receiver is *armed*, that is, about to sleep or asleep; the first producer disarms it, so a burst costs one
//! write. A busy receiver stays disarmed and polls.
//!
//! What must arrive and finds its ring full is kept at the sender, in order, and tried again by [`ShardPort::retry`] or with the
//! next send. Load figures are handed back instead: they are absolute, and the next flush repeats them.
//!
//! Which prompts went where is told in rings of their own, see [`touches`]: many words, which may be lost.
//!
//! *Invariant*: per ordered pair, kept messages arrive in the order they were sent. After [`ShardPort::arm`] and one more poll, an
//! urgent message leads to an eventfd write.
//! *Bound and cost*: an empty poll is one load per ring (about 0.5 ns, no cross-core write), a push about 3 ns to a busy
//! peer; the eventfd write about 7 µs, paid only for sleepers. Rings are
//! [`MESH_RING_SLOTS`] × 64 bytes for each ordered pair.
//! *Errors*: only [`build`] can fail. An eventfd write cannot fail short of a programming error and is asserted.

pub mod touches;
mod wake;

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use rtrb::{Consumer, Producer, PushError, RingBuffer};

use crate::clock::Nanos;
use crate::limits::{CONTROL_RING_SLOTS, MESH_RING_SLOTS, SHARDS_MAX};
use crate::proto::backend::prefix_memory::{Touch, TouchStage};
use crate::proto::dispatcher::Dispatcher;
use crate::proto::ids::ShardId;
use crate::proto::message::{Message, Notice, Update, Urgency};
use touches::Touches;
use wake::Waker;

/// A ring's sending end, with what found it full.
#[derive(Debug)]
struct Sender<T> {
    ring: Producer<T>,
    kept: VecDeque<T>,
}

impl<T> Sender<T> {
    fn new(ring: Producer<T>) -> Self {
        Sender { ring, kept: VecDeque::new() }
    }

    /// `Err` when the ring is full, or something older still waits for it.
    fn send(&mut self, item: T) -> Result<(), T> {
        if !self.kept.is_empty() && !self.retry() {
            return Err(item);
        }
        self.ring.push(item).map_err(|PushError::Full(item)| item)
    }

    fn send_kept(&mut self, item: T) {
        if let Err(item) = self.send(item) {
            self.kept.push_back(item);
        }
    }

    /// True when nothing is kept any more.
    fn retry(&mut self) -> bool {
        while let Some(item) = self.kept.pop_front() {
            if let Err(PushError::Full(item)) = self.ring.push(item) {
                self.kept.push_front(item);
                return false;
            }
        }
        true
    }
}

/// One shard's end of all its rings.
#[derive(Debug)]
pub struct ShardPort {
    me: ShardId,
    /// By receiver; `None` for this shard itself.
    out: Vec<Option<Sender<Message>>>,
    /// By sender; `None` for this shard itself.
    incoming: Vec<Option<Consumer<Message>>>,
    updates: Consumer<Update>,
    notices: Sender<Notice>,
    /// By shard, then the control thread's.
    wakers: Arc<[Waker]>,
    /// Receivers to wake at the end of [`ShardPort::carry`].
    to_wake: Vec<ShardId>,
    touches: Touches,
}

/// The control thread's end of all its rings.
#[derive(Debug)]
pub struct ControlPort {
    updates: Vec<Sender<Update>>,
    notices: Vec<Consumer<Notice>>,
    wakers: Arc<[Waker]>,
}

/// Rings and wake-ups for `shards` (1 to 256) shards. Errors: eventfd creation (descriptor limit).
pub fn build(shards: usize) -> io::Result<(Vec<ShardPort>, ControlPort)> {
    assert!((1..=SHARDS_MAX).contains(&shards), "1 to {SHARDS_MAX} shards, not {shards}");
    let wakers: Arc<[Waker]> = (0..=shards).map(|_| Waker::new()).collect::<io::Result<_>>()?;
    let mut control = ControlPort { updates: Vec::new(), notices: Vec::new(), wakers: wakers.clone() };
    let mut ports: Vec<ShardPort> = touches::build(shards)
        .into_iter()
        .enumerate()
        .map(|(shard, touches)| {
            let (update_out, updates) = RingBuffer::new(CONTROL_RING_SLOTS);
            let (notices, notice_in) = RingBuffer::new(CONTROL_RING_SLOTS);
            control.updates.push(Sender::new(update_out));
            control.notices.push(notice_in);
            ShardPort {
                me: ShardId(shard as u8),
                out: Vec::new(),
                incoming: Vec::new(),
                updates,
                notices: Sender::new(notices),
                wakers: wakers.clone(),
                to_wake: Vec::new(),
                touches,
            }
        })
        .collect();
    for from in 0..shards {
        for to in 0..shards {
            let (sender, receiver) = RingBuffer::new(if from == to { 0 } else { MESH_RING_SLOTS });
            ports[from].out.push((from != to).then(|| Sender::new(sender)));
            // Rows are made in order of `from`, so each `incoming` ends up in that order too.
            ports[to].incoming.push((from != to).then_some(receiver));
        }
    }
    Ok((ports, control))
}

impl ShardPort {
    pub fn me(&self) -> ShardId {
        self.me
    }

    fn out(&mut self, to: ShardId) -> &mut Sender<Message> {
        self.out[to.index()].as_mut().expect("a shard sends nothing to itself")
    }

    /// Puts a message in the ring; `Err` gives it back when the ring is full (or an older kept message still waits for it).
    /// Wakes nobody.
    pub fn send(&mut self, to: ShardId, message: Message) -> Result<(), Message> {
        self.out(to).send(message)
    }

    /// Puts a message in the ring, or keeps it here, in order, until there is room; wakes the receiver if `urgency` says so.
    pub fn send_kept(&mut self, to: ShardId, message: Message, urgency: Urgency) {
        self.out(to).send_kept(message);
        if urgency == Urgency::Wake {
            self.wake(to);
        }
    }

    /// Sends all that the dispatcher has to say, wakes who must be woken (once each), and hands back what was dropped.
    pub fn carry(&mut self, dispatcher: &mut Dispatcher) {
        while let Some((to, message, urgency)) = dispatcher.poll_message() {
            if urgency == Urgency::Lazy {
                if let Err(message) = self.out(to).send(message) {
                    dispatcher.handle_dropped(message);
                }
                continue;
            }
            self.out(to).send_kept(message);
            if urgency == Urgency::Wake && !self.to_wake.contains(&to) {
                self.to_wake.push(to);
            }
        }
        while let Some(to) = self.to_wake.pop() {
            self.wake(to);
        }
    }

    /// Tries the kept messages and notices again; true when none is left. Call every tick while it is false. Receivers are
    /// woken: a ring that was full is drained by nobody who sleeps.
    pub fn retry(&mut self) -> bool {
        let mut done = true;
        for to in 0..self.out.len() {
            let Some(sender) = &mut self.out[to] else { continue };
            if !sender.kept.is_empty() {
                done &= sender.retry();
                self.wakers[to].wake();
            }
        }
        if !self.notices.kept.is_empty() {
            done &= self.notices.retry();
            self.wake_control();
        }
        done
    }

    /// Wakes a shard if it sleeps.
    pub fn wake(&self, to: ShardId) {
        self.wakers[to.index()].wake();
    }

    fn wake_control(&self) {
        self.wakers[self.wakers.len() - 1].wake();
    }

    /// Hands every message that has arrived to `take`; returns how many. At most one ring's length per sender, so that busy
    /// senders cannot hold this shard here.
    pub fn poll(&mut self, mut take: impl FnMut(ShardId, Message)) -> usize {
        let mut taken = 0;
        for (from, ring) in self.incoming.iter_mut().enumerate() {
            let Some(ring) = ring else { continue };
            for _ in 0..MESH_RING_SLOTS {
                let Ok(message) = ring.pop() else { break };
                take(ShardId(from as u8), message);
                taken += 1;
            }
        }
        taken
    }

    /// Tells every shard of a prompt, this one too: copied whole into each ring, or dropped for that peer and counted where there is
    /// no room. False: this shard has not told itself (it is alone, or its ring to itself is full), and is to apply it at once. Wakes
    /// nobody but sleepers whose ring is more than half full.
    #[must_use]
    pub fn touch(&mut self, touch: &Touch) -> bool {
        let wakers = &self.wakers;
        self.touches.send(touch, |to| wakers[to.index()].wake())
    }

    /// Shows `take` every touch of a peer that has arrived since the last poll, then hands it every one that has settled, this shard's own
    /// among them, in the order of their stamps; returns how many have settled. To be called on every tick, and before placing.
    pub fn poll_touches(&mut self, now: Nanos, take: impl FnMut(ShardId, TouchStage, &Touch)) -> usize {
        self.touches.poll(now, take)
    }

    /// What this shard told its peers of prompts.
    pub fn touches(&self) -> touches::TouchFigures {
        self.touches.figures()
    }

    /// The next update of the control thread.
    pub fn poll_update(&mut self) -> Option<Update> {
        self.updates.pop().ok()
    }

    /// Whether something has arrived that was not polled.
    pub fn has_input(&self) -> bool {
        !self.updates.is_empty() || self.incoming.iter().flatten().any(|ring| !ring.is_empty())
    }

    /// Tells the control thread, and wakes it. False: dropped as the ring was full. Reports and what happens once in a
    /// shard's life are kept and never dropped.
    pub fn notify(&mut self, notice: Notice) -> bool {
        let kept = match &notice {
            Notice::Started { .. } | Notice::Report(_) | Notice::Drained { .. } | Notice::Failed { .. } => {
                true
            }
            Notice::UpstreamFault { .. }
            | Notice::Benched { .. }
            | Notice::Unbenched { .. }
            | Notice::Stargate(_) => false,
        };
        let sent = if kept {
            self.notices.send_kept(notice);
            true
        } else {
            self.notices.send(notice).is_ok()
        };
        self.wake_control();
        sent
    }

    /// Asks producers for a wake-up (an eventfd write) with the next urgent message. Call it, then poll once more, then
    /// sleep: what came in between is seen by that poll.
    pub fn arm(&self) {
        self.wakers[self.me.index()].arm();
    }

    /// Tells producers that this shard is awake and polls anyway: no eventfd writes.
    pub fn disarm(&self) {
        self.wakers[self.me.index()].disarm();
    }

    /// Descriptor of the eventfd, open as long as any port is; read 8 bytes of it to sleep. Blocking, as io_uring wants it; see
    /// [`ShardPort::set_nonblocking`].
    pub fn wake_fd(&self) -> RawFd {
        self.wakers[self.me.index()].fd()
    }

    /// For drivers that poll and then read. Errors: as fcntl(2).
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        self.wakers[self.me.index()].set_nonblocking(on)
    }
}

impl ControlPort {
    pub fn shards(&self) -> usize {
        self.updates.len()
    }

    fn waker(&self) -> &Waker {
        &self.wakers[self.wakers.len() - 1]
    }

    /// Sends to one shard and wakes it; kept in order while the ring is full.
    pub fn update(&mut self, to: ShardId, update: Update) {
        self.updates[to.index()].send_kept(update);
        self.wakers[to.index()].wake();
    }

    /// Tries kept updates again; true when none is left.
    pub fn retry(&mut self) -> bool {
        let mut done = true;
        for (to, sender) in self.updates.iter_mut().enumerate() {
            if !sender.kept.is_empty() {
                done &= sender.retry();
                self.wakers[to].wake();
            }
        }
        done
    }

    /// Hands every notice that has arrived to `take`; returns how many.
    pub fn poll(&mut self, mut take: impl FnMut(ShardId, Notice)) -> usize {
        let mut taken = 0;
        for (from, ring) in self.notices.iter_mut().enumerate() {
            for _ in 0..CONTROL_RING_SLOTS {
                let Ok(notice) = ring.pop() else { break };
                take(ShardId(from as u8), notice);
                taken += 1;
            }
        }
        taken
    }

    /// As [`ShardPort::arm`].
    pub fn arm(&self) {
        self.waker().arm();
    }

    /// As [`ShardPort::disarm`].
    pub fn disarm(&self) {
        self.waker().disarm();
    }

    /// As [`ShardPort::wake_fd`].
    pub fn wake_fd(&self) -> RawFd {
        self.waker().fd()
    }

    /// As [`ShardPort::set_nonblocking`].
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        self.waker().set_nonblocking(on)
    }
}

#[cfg(test)]
mod tests;
