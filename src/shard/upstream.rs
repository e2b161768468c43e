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

use super::socket::{Peek, Socket};
use crate::clock::Nanos;
use crate::proto::ids::BackendId;

/// Idle connections kept per server and shard.
pub const IDLE_MAX: usize = 256;
/// A connection put back this recently is used without a look: looking costs as much as a short answer's whole parsing,
/// and whether the server closes right now, no look can tell.
const LOOK_AFTER_NS: u64 = 2_000_000;
/// Idle connections are never kept longer than this, whatever the server allows.
const IDLE_NS_MAX: u64 = 60_000_000_000;
/// A learnt idle limit grows fourfold each time this long passes without a close that confirms it: a restarting server
/// closes everything at once, which says nothing about its limit.
const FORGET_NS: u64 = 10_000_000_000;
/// Least learnt idle limit, so that growing gets anywhere.
const LEARNT_NS_MIN: u64 = 1_000_000;

/// A connection to a server, on loan to one request.
pub struct Upstream {
    pub socket: Socket,
    /// It has served a request before, so the server may be closing it.
    pub reused: bool,
    /// Payload bytes given to the kernel for the requests before the present one.
    pub sent_before: u64,
    /// Payload bytes of the present request.
    pub sent_now: u64,
    /// The server's `Keep-Alive: timeout` of the last answer, in nanoseconds; 0 when it named none.
    pub idle_ns_named: u64,
}

impl Upstream {
    pub fn fresh(socket: Socket) -> Upstream {
        Upstream { socket, reused: false, sent_before: 0, sent_now: 0, idle_ns_named: 0 }
    }

    /// Whether it is certain that the server's process has read nothing of the present request, after the connection
    /// ended without an answer. `closed_orderly`: it ended by the server's FIN, not by a reset.
    ///
    /// Every FIN acknowledges all that the server's kernel had received. So after a FIN, "nothing of this request was
    /// acknowledged" means that the server closed before the request arrived. A reset acknowledges nothing: the server
    /// may have read the request within the delayed-acknowledgement time and then reset, so a reset proves nothing.
    /// The SYN counts as one acknowledged byte.
    pub fn unread(&self, closed_orderly: bool) -> bool {
        self.reused
            && closed_orderly
            && self.socket.acked().is_some_and(|acked| acked.saturating_sub(1) <= self.sent_before)
    }
}

struct Idle {
    upstream: Upstream,
    since: Nanos,
    /// Last time it was seen open.
    seen: Nanos,
}

#[derive(Default)]
struct Shelf {
    idle: Vec<Idle>,
    /// Learnt: the server has closed a connection that was idle for at most this long.
    idle_ns: Option<u64>,
    learnt_at: Nanos,
}

impl Shelf {
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
    /// A connection that was open a moment ago, if there is one. One system call per candidate that was idle for long.
    pub fn checkout(&self, backend: BackendId, now: Nanos) -> Option<Upstream> {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelves.get_mut(backend.index())?;
        while let Some(idle) = shelf.idle.pop() {
            if now.since(idle.since) > shelf.limit_ns(now, idle.upstream.idle_ns_named) {
                continue;
            }
            if now.since(idle.since) < LOOK_AFTER_NS {
                return Some(idle.upstream);
            }
            match idle.upstream.socket.peek() {
                Peek::Quiet => return Some(idle.upstream),
                Peek::Closed => shelf.closed_by_server(now, &idle),
                // An answer nobody asked for belongs to no request: the connection is out of step.
                Peek::Data => {}
            }
        }
        None
    }

    /// Puts a connection back whose exchange is complete, both ways.
    pub fn checkin(&self, backend: BackendId, mut upstream: Upstream, now: Nanos) {
        let mut shelves = self.shelves.borrow_mut();
        if shelves.len() <= backend.index() {
            shelves.resize_with(backend.index() + 1, Shelf::default);
        }
        let shelf = &mut shelves[backend.index()];
        if shelf.idle.len() < IDLE_MAX {
            upstream.reused = true;
            upstream.sent_before += std::mem::take(&mut upstream.sent_now);
            shelf.idle.push(Idle { upstream, since: now, seen: now });
        }
    }

    /// Looks at every idle connection: closed and aged ones go. To be called now and then.
    pub fn prune(&self, now: Nanos) {
        for shelf in self.shelves.borrow_mut().iter_mut() {
            let mut kept = Vec::with_capacity(shelf.idle.len());
            for mut idle in std::mem::take(&mut shelf.idle) {
                if now.since(idle.since) > shelf.limit_ns(now, idle.upstream.idle_ns_named) {
                    continue;
                }
                match idle.upstream.socket.peek() {
                    Peek::Quiet => {
                        idle.seen = now;
                        kept.push(idle);
                    }
                    Peek::Closed => shelf.closed_by_server(now, &idle),
                    Peek::Data => {}
                }
            }
            shelf.idle = kept;
        }
    }

    /// Drops every idle connection to `backend`: it was lost, removed or replaced.
    pub fn forget(&self, backend: BackendId) {
        if let Some(shelf) = self.shelves.borrow_mut().get_mut(backend.index()) {
            *shelf = Shelf::default();
        }
    }

    /// Drops every idle connection.
    pub fn clear(&self) {
        self.shelves.borrow_mut().clear();
    }

    /// Idle connections to `backend`.
    pub fn idle(&self, backend: BackendId) -> usize {
        self.shelves.borrow().get(backend.index()).map_or(0, |shelf| shelf.idle.len())
    }
}
