//! What shards and the control thread say to each other.
//!
//! *Bound*: a [`Message`] is at most 64 bytes, so that a ring slot is one cache line.

use super::backend::catalog::Catalog;
use super::backend::rates::Rate;
use super::backend::table::Load;
use super::error::Rejection;
use super::ids::{BackendId, GroupId, ShardId, Ticket};
use super::report::ShardReport;
use super::stargate::layout::SlotId;
use super::stargate::live::{Since, Work};
use super::stargate::notice::StargateNotice;
use super::stargate::stats::{Reported, Scraped};
use crate::clock::Nanos;
use crate::limits::ATTEMPTS_MAX;

/// Servers that a request was already sent to, or that refused it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tried {
    ids: [Option<BackendId>; ATTEMPTS_MAX],
}

impl Tried {
    pub fn contains(&self, id: BackendId) -> bool {
        self.ids.contains(&Some(id))
    }
    /// Adds `id`; once full the oldest entry stays and the newest is replaced.
    pub fn push(&mut self, id: BackendId) {
        let free = self.ids.iter().position(|slot| slot.is_none()).unwrap_or(ATTEMPTS_MAX - 1);
        self.ids[free] = Some(id);
    }
    pub fn is_empty(&self) -> bool {
        self.ids[0].is_none()
    }
    pub fn iter(&self) -> impl Iterator<Item = BackendId> {
        self.ids.iter().flatten().copied()
    }
}

/// What one shard has sent to a server for a group since it started. Wraps around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Turns of the wheel that chose it.
    pub turns: u64,
    /// Dispatches, turns or not, and the prompt tokens that were to be computed for them; both 0 outside kv-aware pools.
    pub dispatches: u64,
    pub work_tokens: u64,
}

/// Shard to shard. Load figures are absolute, so the newest may replace what was lost; anything about permits, benching
/// and sockets must arrive, exactly once and in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Message {
    /// The sender's own load on one server. `changed` is when the figure first differed from the one sent
    /// before: what the receiver's clock says beyond it is how stale the table was.
    Load { backend: BackendId, load: Load, changed: Nanos },
    /// What the sender has measured of how fast a server reads, in all.
    Rate { backend: BackendId, rate: Rate },
    /// A verdict about a server, benched (`until` in the future) or cleared (`until` zero). The verdict with the latest
    /// `judged`, then the highest shard, holds on every shard. `level` counts the benchings since the last success.
    Bench { backend: BackendId, until: Nanos, judged: Nanos, level: u8, by: ShardId },
    /// What the sender has sent to `backend` for a group, so far; wheels and balances of peers follow.
    Sent { group: GroupId, backend: BackendId, sent: Sent },
    /// The sender's client connections.
    Connections { count: u32 },
    /// From home: whether nothing can be admitted for `group` just now.
    Full { group: GroupId, full: bool },
    /// To home: a request wants a permit for a server of `group`, best `preferred`.
    Ask { ticket: Ticket, group: GroupId, preferred: Option<BackendId>, tried: Tried, since: Nanos },
    /// To home: the request of that ticket no longer waits. `group` and `since` as asked: they are its place in the queue.
    Withdraw { ticket: Ticket, group: GroupId, since: Nanos },
    /// To home: `count` permits come back. `recalled` answers a [`Message::Recall`], also with none.
    Return { backend: BackendId, count: u32, recalled: bool },
    /// To home: a server got a ceiling while `count` requests ran on it without permits; they hold permits from now on.
    Adopt { backend: BackendId, count: u32 },
    /// From home: `count` permits, the first for `ticket`. `recalled`: as if a [`Message::Recall`] came right after it,
    /// without an answer due.
    Grant { ticket: Ticket, backend: BackendId, count: u32, recalled: bool },
    /// From home: nothing for that ticket, and why.
    Deny { ticket: Ticket, rejection: Rejection },
    /// From home: give back what is free, and each further permit as it becomes free.
    Recall { backend: BackendId },
    /// From home: nobody waits for that server any more; free permits may be kept.
    Ease { backend: BackendId },
    /// The sender's own requests of one priority in one slot of the Stargate family.
    Live { slot: SlotId, priority: u32, work: Work },
    /// Those of them that went out since the server's last report, and since its engine was last asked.
    Since { slot: SlotId, priority: u32, since: Since },
    /// An input rate, in tokens per second, that the sender measured in a slot; each counts once on every shard.
    Sample { slot: SlotId, tps: f64 },
    /// A freshly accepted client socket, handed over with its descriptor.
    Socket { fd: i32, listener: u16 },
}

/// How a message travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody waits for it: it must arrive, and a sleeping receiver is woken.
    Wake,
    /// It must arrive, but the receiver may sleep on.
    Quiet,
    /// Dropped when the ring is full (and then handed to `Dispatcher::handle_dropped`); wakes nobody.
    Lazy,
}

const _: () = assert!(std::mem::size_of::<Message>() <= 64);

/// How far a shutdown has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Normal service.
    Serving,
    /// Readiness says 503, everything else goes on.
    Settling,
    /// No new connection, idle ones closed, running requests finish.
    Draining,
    /// Whatever still runs is cut.
    Stopping,
}

/// Control thread to shard.
#[derive(Debug)]
pub enum Update {
    /// Replaces the catalog.
    Catalog(Box<Catalog>),
    /// Active health check of a server.
    Health {
        backend: BackendId,
        up: bool,
    },
    /// The server's engine has lost its cache (it restarted, or another stands at its address): what is remembered of its
    /// prefix blocks is void.
    Forget {
        backend: BackendId,
    },
    /// A health check of the server took that long.
    RoundTrip {
        backend: BackendId,
        rtt_ns: u64,
    },
    /// A registration reports of one model.
    Reported {
        slot: SlotId,
        reported: Box<Reported>,
    },
    /// What the engine's own metrics say of one model.
    Scraped {
        slot: SlotId,
        scraped: Box<Scraped>,
    },
    /// Readiness changed: at least one server is routable.
    Ready(bool),
    Phase(Phase),
    /// Answer with [`Notice::Report`] carrying the same number.
    Report {
        number: u64,
    },
}

/// Which part of an exchange with a server failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum UpstreamFault {
    /// Connection refused, unreachable, or not open within the connect limit.
    Connect,
    /// Reset or closed before a response head.
    BeforeHead,
    /// No response head in time.
    HeadTimeout,
    /// A response head that is not HTTP/1.x.
    BadHead,
    /// The body ended before its end.
    Truncated,
    /// Nothing came for the between-bytes limit.
    BetweenTimeout,
    /// 502, 503 or 504 from the engine.
    Status,
}

impl UpstreamFault {
    pub const ALL: [UpstreamFault; 7] = [
        UpstreamFault::Connect,
        UpstreamFault::BeforeHead,
        UpstreamFault::HeadTimeout,
        UpstreamFault::BadHead,
        UpstreamFault::Truncated,
        UpstreamFault::BetweenTimeout,
        UpstreamFault::Status,
    ];
    /// Metric label.
    pub const fn name(self) -> &'static str {
        match self {
            UpstreamFault::Connect => "connect",
            UpstreamFault::BeforeHead => "before_head",
            UpstreamFault::HeadTimeout => "head_timeout",
            UpstreamFault::BadHead => "bad_head",
            UpstreamFault::Truncated => "truncated",
            UpstreamFault::BetweenTimeout => "between_timeout",
            UpstreamFault::Status => "status",
        }
    }
}

/// Shard to control thread. Dropped (and counted by the shard) when the ring is full, except reports.
#[derive(Debug)]
pub enum Notice {
    /// The shard's loop runs; `io_uring` says which driver, `downgrade` why not the best one.
    Started {
        io_uring: bool,
        downgrade: Option<String>,
    },
    Report(Box<ShardReport>),
    UpstreamFault {
        backend: BackendId,
        fault: UpstreamFault,
        errno: i32,
    },
    Benched {
        backend: BackendId,
        ms: u64,
    },
    Unbenched {
        backend: BackendId,
    },
    /// Something to log of a request on a trusted listener.
    Stargate(Box<StargateNotice>),
    /// Draining, and no request is left.
    Drained {
        shard: ShardId,
    },
    /// The shard cannot go on.
    Failed {
        shard: ShardId,
        text: String,
    },
}
