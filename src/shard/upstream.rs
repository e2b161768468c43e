//! This shard's keep-alive connections to the servers.
//!
//! Last in, first out: the warmest connection is used, the others age out. A connection is looked at before it is used
//! again; one that the server has closed, or that says something unasked, is dropped. What remains is the race between
//! our request and the server's close: [`Upstream::unread`] settles afterwards whether the server can have read anything.
//!
//! A server's own idle limit is learnt from the connections it closes on us and from its `Keep-Alive: timeout`, and
//! connections are not used beyond three quarters of it, so that the race is rare.
//!
//! *Bound*: [`IDLE_MAX`] idle connections per server and shard.

use std::cell::RefCell;
use std::time::Duration;

use super::socket::{Peek, Socket};
use crate::clock::Nanos;
use crate::proto::ids::BackendId;

/// How long a server's kernel may take to say what became of a request: some round trips.
const VERDICT_MS: u32 = 50;
/// Idle connections kept per server and shard.
pub const IDLE_MAX: usize = 256;
/// A connection put back this recently is used without a look. What a server sends or does right behind its answer may still
/// be on its way then, so that a look would not show it, and looking costs a fiftieth of a whole request.
const LOOK_AFTER_NS: u64 = 100_000;
/// Idle connections are never kept longer than this, whatever the server allows.
const IDLE_NS_MAX: u64 = 60_000_000_000;
/// A learnt idle limit grows fourfold each time this long passes without a close that confirms it: a restarting server
/// closes everything at once, which says nothing about its limit.
const FORGET_NS: u64 = 10_000_000_000;
/// How long the first connections to a server are left alone after a streamed answer, to see whether it closes them. A
/// server that does so, and drains what arrives meanwhile, acknowledges a request that nobody will read: a connection to such
/// a server must not be used again at all. (Plain answers' connections are used at once: no server met so far does it there.)
const PROBATION_NS: u64 = 50_000_000;
/// Connections kept that make a server trusted with streams.
const TRUSTED_AFTER: u32 = 3;
/// A server's habit of closing is put to the test again after this long.
const HABIT_NS: u64 = 60_000_000_000;
/// Least learnt idle limit, so that growing gets anywhere.
const LEARNT_NS_MIN: u64 = 1_000_000;

/// A connection to a server, on loan to one request.
pub struct Upstream {
    pub socket: Socket,
    /// It has served a request before, so the server may be closing it.
    pub reused: bool,
    /// Which of the server's addresses it was made to, counted; see [`Upstreams::forget`].
    generation: u32,
    /// Payload bytes given to the kernel for the requests before the present one.
    pub sent_before: u64,
    /// Payload bytes of the present request.
    pub sent_now: u64,
    /// The server's `Keep-Alive: timeout` of the last answer, in nanoseconds; 0 when it named none.
    pub idle_ns_named: u64,
    /// Made in place of connections that the server had closed.
    pub replaces: bool,
}

impl Upstream {
    /// A connection just made. `generation` as [`Upstreams::generation`] said before it was begun, `replaces` as
    /// [`Upstreams::take_broken`] did.
    pub fn fresh(socket: Socket, generation: u32, replaces: bool) -> Upstream {
        Upstream {
            socket,
            reused: false,
            generation,
            sent_before: 0,
            sent_now: 0,
            idle_ns_named: 0,
            replaces,
        }
    }

    /// Whether it is certain that the server's process has read nothing of the present request, after the connection ended
    /// by the server's FIN without an answer.
    ///
    /// Every FIN acknowledges all that the server's kernel had received, so "nothing of this request is acknowledged" means
    /// that the server had closed before the request arrived. It may have closed only its sending side, and read on: then its
    /// kernel acknowledges the request when it arrives. If it has closed for good, its kernel answers the request with a reset.
    /// So this waits for one of the two, for [`VERDICT_MS`] at most. (A reset without a FIN before it proves nothing: it
    /// acknowledges nothing, and a server may read a request and reset before the delayed acknowledgement is due.)
    /// The SYN counts as one acknowledged byte.
    pub async fn unread(&self) -> bool {
        if !self.reused {
            return false;
        }
        for _ in 0..VERDICT_MS {
            match self.socket.progress() {
                Some(progress) if progress.acked.saturating_sub(1) > self.sent_before => return false,
                Some(progress) if progress.closed => return true,
                Some(_) => monoio::time::sleep(Duration::from_millis(1)).await,
                None => return false,
            }
        }
        false
    }
}

/// What an answer was, as far as servers treat its connection differently afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    /// A stream of events. llama.cpp's server closes after each one, whatever it said about keeping the connection.
    Stream,
}

/// What a server has been seen to do with connections after streams.
#[derive(Clone, Copy, Default)]
struct Habit {
    /// Connections that were still open after [`PROBATION_NS`].
    kept: u32,
    /// When one was last found closed within that time.
    closed_at: Option<Nanos>,
}

struct Idle {
    upstream: Upstream,
    /// Not to be used before [`PROBATION_NS`] have passed.
    probation: bool,
    since: Nanos,
    /// Last time it was seen open.
    seen: Nanos,
}

#[derive(Default)]
struct Shelf {
    idle: Vec<Idle>,
    generation: u32,
    /// Learnt: the server has closed a connection that was idle for at most this long.
    idle_ns: Option<u64>,
    learnt_at: Nanos,
    streams: Habit,
    /// The server has closed connections, and has not been connected to since.
    broken: bool,
}

impl Shelf {
    /// Whether a connection may be kept after an answer of `kind`, and on probation or not.
    fn admits(&mut self, kind: Kind, now: Nanos) -> Option<bool> {
        if kind == Kind::Plain {
            return Some(false);
        }
        let habit = &mut self.streams;
        match habit.closed_at {
            Some(at) if now.since(at) < HABIT_NS => return None,
            Some(_) => *habit = Habit::default(),
            None => {}
        }
        Some(habit.kept < TRUSTED_AFTER)
    }

    /// An idle connection leaves probation: it was found open, or closed, or is dropped.
    fn judge(&mut self, idle: &mut Idle, open: Option<bool>, now: Nanos) {
        if !std::mem::take(&mut idle.probation) {
            return;
        }
        let habit = &mut self.streams;
        match open {
            Some(true) => habit.kept += 1,
            Some(false) => (habit.kept, habit.closed_at) = (0, Some(now)),
            None => {}
        }
    }

    fn limit_ns(&mut self, now: Nanos, named_ns: u64) -> u64 {
        if let Some(ns) = self.idle_ns
            && now.since(self.learnt_at) > FORGET_NS
        {
            self.idle_ns = (ns < IDLE_NS_MAX).then_some(ns.saturating_mul(4));
            self.learnt_at = now;
        }
        let learnt = self.idle_ns.unwrap_or(IDLE_NS_MAX);
        let named = if named_ns == 0 { IDLE_NS_MAX } else { named_ns };
        learnt.min(named) / 4 * 3
    }

    /// Looks whether an idle connection is still good, and learns from it.
    fn look(&mut self, idle: &mut Idle, now: Nanos) -> bool {
        let over = now.since(idle.since) >= PROBATION_NS;
        match idle.upstream.socket.peek() {
            Peek::Quiet => {
                idle.seen = now;
                if over {
                    self.judge(idle, Some(true), now);
                }
                true
            }
            Peek::Closed if idle.probation => {
                self.broken = true;
                self.judge(idle, Some(false), now);
                false
            }
            Peek::Closed => {
                self.broken = true;
                self.closed_by_server(now, idle);
                false
            }
            // An answer nobody asked for belongs to no request: the connection is out of step.
            Peek::Data => {
                self.judge(idle, None, now);
                false
            }
        }
    }

    fn closed_by_server(&mut self, now: Nanos, idle: &Idle) {
        let ns = idle.seen.since(idle.since).max(LEARNT_NS_MIN);
        self.idle_ns = Some(self.idle_ns.map_or(ns, |known| known.min(ns)));
        self.learnt_at = now;
    }
}

/// See the module's text.
#[derive(Default)]
pub struct Upstreams {
    shelves: RefCell<Vec<Shelf>>,
}

impl Upstreams {
    /// A connection that was open a moment ago, if there is one. One system call per candidate that was idle for more
    /// than a moment.
    pub fn checkout(&self, backend: BackendId, now: Nanos) -> Option<Upstream> {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelves.get_mut(backend.index())?;
        let mut at = shelf.idle.len();
        while at > 0 {
            at -= 1;
            let idle = &shelf.idle[at];
            let idle_ns = now.since(idle.since);
            if idle.probation && idle_ns < PROBATION_NS {
                continue;
            }
            let mut idle = shelf.idle.remove(at);
            if idle_ns > shelf.limit_ns(now, idle.upstream.idle_ns_named) {
                shelf.judge(&mut idle, None, now);
                continue;
            }
            if idle_ns < LOOK_AFTER_NS || shelf.look(&mut idle, now) {
                return Some(idle.upstream);
            }
        }
        None
    }

    /// Puts a connection back whose exchange is complete, both ways.
    pub fn checkin(&self, backend: BackendId, mut upstream: Upstream, kind: Kind, now: Nanos) {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelf(&mut shelves, backend);
        if shelf.idle.len() >= IDLE_MAX || upstream.generation != shelf.generation {
            return;
        }
        if let Some(probation) = shelf.admits(kind, now) {
            (upstream.reused, upstream.replaces) = (true, false);
            upstream.sent_before += std::mem::take(&mut upstream.sent_now);
            shelf.idle.push(Idle { upstream, probation, since: now, seen: now });
        }
    }

    /// Looks at every idle connection: closed and aged ones go. To be called now and then.
    pub fn prune(&self, now: Nanos) {
        for shelf in self.shelves.borrow_mut().iter_mut() {
            let mut kept = Vec::with_capacity(shelf.idle.len());
            for mut idle in std::mem::take(&mut shelf.idle) {
                if now.since(idle.since) > shelf.limit_ns(now, idle.upstream.idle_ns_named) {
                    shelf.judge(&mut idle, None, now);
                } else if shelf.look(&mut idle, now) {
                    kept.push(idle);
                }
            }
            shelf.idle = kept;
        }
    }

    /// Drops every idle connection to `backend`, and those on loan as they come back: its process or its address changed.
    pub fn forget(&self, backend: BackendId) {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelf(&mut shelves, backend);
        let broken = shelf.broken || !shelf.idle.is_empty();
        *shelf = Shelf { generation: shelf.generation.wrapping_add(1), broken, ..Shelf::default() };
    }

    /// Whether `backend` has closed (or lost) idle connections and was not connected to since; now it is about to be.
    pub fn take_broken(&self, backend: BackendId) -> bool {
        let mut shelves = self.shelves.borrow_mut();
        shelves.get_mut(backend.index()).is_some_and(|shelf| std::mem::take(&mut shelf.broken))
    }

    /// Grows when `backend`'s connections are to be forgotten.
    pub fn generation(&self, backend: BackendId) -> u32 {
        self.shelves.borrow().get(backend.index()).map_or(0, |shelf| shelf.generation)
    }

    /// Idle connections to `backend`.
    pub fn idle(&self, backend: BackendId) -> usize {
        self.shelves.borrow().get(backend.index()).map_or(0, |shelf| shelf.idle.len())
    }
}

fn shelf(shelves: &mut Vec<Shelf>, backend: BackendId) -> &mut Shelf {
    if shelves.len() <= backend.index() {
        shelves.resize_with(backend.index() + 1, Shelf::default);
    }
    &mut shelves[backend.index()]
}
