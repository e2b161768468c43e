//! A load: what is sent when, how it is judged, and what comes out of it. No I/O here.
//!
//! Closed loop: each connection sends its next request as soon as it has the last answer. Open loop: requests are due at a
//! constant rate whatever the answers do, and latency counts from the time a request was *due*, so that a stall is charged
//! to all who had to wait (no coordinated omission).
//!
//! *Invariant*: every request that was due before the window's end is either counted as answered well or counted as a
//! fault; none is left out. Faults count during warm-up too.
//! *Bound and cost*: fixed-size histograms; O(1) per request. A plan ends early after [`FAULTS_MAX`] faults.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddrV4;
use std::sync::Arc;

use serde::Serialize;

use crate::answer::{Arrival, Expect};
use crate::backend;
use crate::clock::S;
use crate::http::Fault;
use crate::process::{Snapshot, Usage};
use crate::prompts::Script;
use crate::stats::{Quantiles, Times};

/// Faults after which a plan is given up.
pub const FAULTS_MAX: u64 = 1000;

/// When requests are due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    Closed,
    /// Requests per second, evenly spaced.
    Rate(f64),
}

impl Arrivals {
    /// Time from the start at which request `k` is due, in ns. Computed afresh for each `k`, so errors do not add up.
    pub fn due_ns(rate: f64, k: u64) -> u64 {
        (k as f64 * S as f64 / rate) as u64
    }
}

/// Reads the cost of the measured process; called at both ends of the window, on the generator's thread.
pub type Probe = Box<dyn FnMut() -> Result<Snapshot, String> + Send>;

/// What is sent, and what must come back.
#[derive(Clone, Debug)]
pub enum Traffic {
    /// The same request each time, head and body.
    Same { request: Arc<[u8]>, expect: Expect },
    /// Conversations, twice as many at a time as connections, in an order by lot.
    Talks(Arc<Script>),
}

impl Traffic {
    /// What the answer to a request must be; `turn` as in its [`Open`].
    pub fn expect(&self, turn: u32) -> &Expect {
        match self {
            Traffic::Same { expect, .. } => expect,
            Traffic::Talks(script) => script.expect(turn),
        }
    }
}

/// A load to run.
pub struct Plan {
    pub target: SocketAddrV4,
    pub connections: u32,
    pub arrivals: Arrivals,
    pub traffic: Traffic,
    pub warm_ns: u64,
    pub window_ns: u64,
    /// After the window: how long open requests may still take.
    pub grace_ns: u64,
    /// Closed loop: the connections' first requests are spread evenly over this time.
    pub stagger_ns: u64,
    /// Send this many requests, with no warm-up, and end when all are answered (or window and grace are over).
    pub requests_max: Option<u64>,
    /// Most requests under way at once; beyond it, requests that are due wait (and their latency counts on).
    pub in_flight_max: Option<u32>,
    /// Leave the connections open afterwards, until released.
    pub hold: bool,
    /// Poll instead of sleeping.
    pub spin: bool,
    pub probe: Option<Probe>,
}

/// A request under way.
#[derive(Clone, Copy, Debug)]
pub struct Open {
    /// When it was due (open loop) or sent (closed loop).
    pub intended_ns: u64,
    /// Last event seen.
    pub last_event_ns: u64,
    /// Which request of its conversation it is; 0 where there are none.
    pub turn: u32,
}

/// What came out of a load.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Length of the window, between the two probes.
    pub window_ns: u64,
    /// Good answers that became whole within the window.
    pub completed: u64,
    /// Good answers in all, warm-up and grace included.
    pub completed_in_all: u64,
    /// Events received within the window, and the receive calls that brought them.
    pub events: u64,
    pub event_pieces: u64,
    /// From due (or sent) to whole, for requests due within the window.
    pub latency: Option<Quantiles>,
    /// From due (or sent) to the first event.
    pub first_event: Option<Quantiles>,
    /// From the backend's timestamp to arrival, per event.
    pub event_delay: Option<Quantiles>,
    /// Between one event and the next of the same answer.
    pub event_gap: Option<Quantiles>,
    /// Faults by kind, and one of each in words. Empty is what it should be.
    pub faults: BTreeMap<&'static str, u64>,
    pub examples: BTreeMap<&'static str, String>,
    /// Given up after [`FAULTS_MAX`] faults.
    pub gave_up: bool,
    /// Connections made anew after the server had closed them in good order, or after a fault.
    pub reconnects: u64,
    /// Idle connections closed by the server.
    pub idle_closed: u64,
    /// How late requests left, against when they were due (open loop): the generator's own error.
    pub lateness: Option<Quantiles>,
    /// How late the backend's delayed answers and events left (when the backend is on the generator's thread).
    pub backend_lateness: Option<Quantiles>,
    /// Share of the window in which the generator's thread was busy, 0 to 1. Near 1, it limits what is measured.
    pub generator_busy: f64,
    /// Share of the window in which it could have run but another task had its core.
    pub generator_wait: f64,
    /// Cost of the measured process within the window.
    pub usage: Option<Usage>,
    /// What the backends on this thread met during the whole run.
    pub backend: backend::Counts,
}

/// Waiting for a core, as a share of the window, above which a run counts as disturbed. The kernel's own limit on
/// real-time tasks costs up to 0.08.
const WAIT_SHARE_MAX: f64 = 0.12;

impl Report {
    /// Whether something else on the machine took so much of either core that the figures say more about it than about
    /// the proxy.
    pub fn disturbed(&self) -> bool {
        let proxy = self.usage.map_or(0.0, |usage| usage.wait_ns as f64 / self.window_ns.max(1) as f64);
        proxy > WAIT_SHARE_MAX || self.generator_wait > WAIT_SHARE_MAX
    }

    pub fn faults_total(&self) -> u64 {
        self.faults.values().sum()
    }

    pub fn requests_per_s(&self) -> f64 {
        self.completed as f64 * S as f64 / self.window_ns.max(1) as f64
    }
}

/// Counts while a load runs.
#[derive(Debug)]
pub struct Tally {
    /// Start of the window; `None` before it.
    pub opened_ns: Option<u64>,
    /// Its end; `None` before it.
    pub closed_ns: Option<u64>,
    pub completed: u64,
    pub completed_in_all: u64,
    pub events: u64,
    pub event_pieces: u64,
    pub latency: Times,
    pub first_event: Times,
    pub event_delay: Times,
    pub event_gap: Times,
    pub lateness: Times,
    pub backend_lateness: Times,
    pub faults: BTreeMap<&'static str, u64>,
    pub examples: BTreeMap<&'static str, String>,
    pub reconnects: u64,
    pub idle_closed: u64,
}

impl Tally {
    pub fn new() -> Tally {
        Tally {
            opened_ns: None,
            closed_ns: None,
            completed: 0,
            completed_in_all: 0,
            events: 0,
            event_pieces: 0,
            latency: Times::new(),
            first_event: Times::new(),
            event_delay: Times::new(),
            event_gap: Times::new(),
            lateness: Times::new(),
            backend_lateness: Times::new(),
            faults: BTreeMap::new(),
            examples: BTreeMap::new(),
            reconnects: 0,
            idle_closed: 0,
        }
    }

    /// Whether the window is open.
    pub fn within(&self) -> bool {
        self.opened_ns.is_some() && self.closed_ns.is_none()
    }

    /// Whether a request due at `intended_ns` belongs to the window.
    fn measured(&self, intended_ns: u64) -> bool {
        self.opened_ns.is_some_and(|opened| intended_ns >= opened)
            && self.closed_ns.is_none_or(|closed| intended_ns < closed)
    }

    pub fn completed(&mut self, open: &Open, now_ns: u64) {
        self.completed_in_all += 1;
        if self.within() {
            self.completed += 1;
        }
        if self.measured(open.intended_ns) {
            self.latency.record(now_ns.saturating_sub(open.intended_ns));
        }
    }

    pub fn event(&mut self, open: &mut Open, arrival: Arrival, now_ns: u64) {
        if self.within() {
            self.events += 1;
        }
        if self.measured(open.intended_ns) {
            if arrival.index == 0 {
                self.first_event.record(now_ns.saturating_sub(open.intended_ns));
            } else {
                self.event_gap.record(now_ns.saturating_sub(open.last_event_ns));
            }
            if let Some(sent_ns) = arrival.sent_ns {
                self.event_delay.record(now_ns.saturating_sub(sent_ns));
            }
        }
        open.last_event_ns = now_ns;
    }

    pub fn fault(&mut self, fault: &Fault) {
        self.faults_of(fault, 1);
    }

    pub fn faults_of(&mut self, fault: &Fault, count: u64) {
        if count > 0 {
            *self.faults.entry(fault.kind()).or_default() += count;
            self.examples.entry(fault.kind()).or_insert_with(|| fault.to_string());
        }
    }

    pub fn faults_total(&self) -> u64 {
        self.faults.values().sum()
    }
}

/// Which request is due next.
#[derive(Debug)]
pub struct Schedule {
    arrivals: Arrivals,
    start_ns: u64,
    /// Requests due at or after this are not sent.
    pub end_ns: u64,
    stagger_ns: u64,
    issued: u64,
    issued_max: u64,
    /// Connections with no request open: open loop, the one idle longest first.
    free: VecDeque<u32>,
    connections: u64,
    /// Closed loop: connections that have had their first request.
    started: u64,
}

impl Schedule {
    /// For `slots`, all connected and free.
    pub fn new(plan: &Plan, start_ns: u64, slots: &[u32]) -> Schedule {
        let warm_ns = if plan.requests_max.is_some() { 0 } else { plan.warm_ns };
        Schedule {
            arrivals: plan.arrivals,
            start_ns,
            end_ns: start_ns + warm_ns + plan.window_ns,
            stagger_ns: plan.stagger_ns,
            issued: 0,
            issued_max: plan.requests_max.unwrap_or(u64::MAX),
            free: slots.iter().copied().collect(),
            connections: slots.len() as u64,
            started: 0,
        }
    }

    /// When the next request that waits for nothing but time is due; `None` when there is none.
    pub fn next_due_ns(&self) -> Option<u64> {
        if self.issued >= self.issued_max {
            return None;
        }
        let due_ns = match self.arrivals {
            Arrivals::Rate(rate) => self.start_ns + Arrivals::due_ns(rate, self.issued),
            Arrivals::Closed if self.started < self.connections => {
                self.start_ns + self.stagger_ns * self.started / self.connections
            }
            Arrivals::Closed => self.start_ns,
        };
        (due_ns < self.end_ns).then_some(due_ns)
    }

    /// When something can next be sent without an answer coming in first; `None` when nothing can.
    pub fn wake_ns(&self, now_ns: u64) -> Option<u64> {
        let over = matches!(self.arrivals, Arrivals::Closed) && now_ns >= self.end_ns;
        if self.free.is_empty() || over { None } else { self.next_due_ns() }
    }

    /// The connection to send on now and the time from which its latency counts.
    pub fn take(&mut self, now_ns: u64) -> Option<(u32, u64)> {
        let due_ns = self.next_due_ns().filter(|&due_ns| due_ns <= now_ns)?;
        let closed = matches!(self.arrivals, Arrivals::Closed);
        if closed && now_ns >= self.end_ns {
            return None;
        }
        let slot = self.free.pop_front()?;
        self.issued += 1;
        if closed {
            self.started = (self.started + 1).min(self.connections);
        }
        Some((slot, if closed { now_ns } else { due_ns }))
    }

    /// `slot` has its answer.
    pub fn put_back(&mut self, slot: u32) {
        self.free.push_back(slot);
    }

    /// `slot` is no longer connected.
    pub fn forget(&mut self, slot: u32) {
        self.free.retain(|&other| other != slot);
    }

    /// Whether all requests of a counted plan have been sent.
    pub fn exhausted(&self) -> bool {
        self.issued >= self.issued_max
    }

    /// Requests that were due before the end (open loop), or belong to a counted plan, and were never sent.
    pub fn unsent(&self) -> u64 {
        if self.issued_max != u64::MAX {
            return self.issued_max - self.issued;
        }
        let due = match self.arrivals {
            Arrivals::Closed => return 0,
            Arrivals::Rate(rate) => {
                let mut k = ((self.end_ns - self.start_ns) as f64 * rate / S as f64) as u64;
                k = k.saturating_sub(1);
                while self.start_ns + Arrivals::due_ns(rate, k) < self.end_ns {
                    k += 1;
                }
                k
            }
        };
        due.saturating_sub(self.issued)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(arrivals: Arrivals) -> Plan {
        Plan {
            target: "127.0.0.1:1".parse().expect("an address"),
            connections: 2,
            arrivals,
            traffic: Traffic::Same { request: Arc::from(&b""[..]), expect: Expect::Any },
            warm_ns: 100,
            window_ns: 900,
            grace_ns: 0,
            stagger_ns: 0,
            requests_max: None,
            in_flight_max: None,
            hold: false,
            spin: false,
            probe: None,
        }
    }

    #[test]
    fn rates_do_not_drift() {
        assert_eq!(Arrivals::due_ns(3.0, 3_000_000_000), S * 1_000_000_000);
        assert_eq!(Arrivals::due_ns(1000.0, 1), 1_000_000);
    }

    #[test]
    fn an_open_loop_charges_the_wait_for_a_connection() {
        // One per 100 ns, start at 1000, end at 2000: ten requests are due.
        let mut schedule = Schedule::new(&plan(Arrivals::Rate(1e7)), 1_000, &[7, 8]);
        assert_eq!(schedule.take(999), None);
        assert_eq!(schedule.take(1_000), Some((7, 1_000)));
        assert_eq!(schedule.take(1_050), None, "the second is not due yet");
        assert_eq!(schedule.take(1_130), Some((8, 1_100)), "late, but counted from when it was due");
        assert_eq!(schedule.take(1_500), None, "no free connection");
        schedule.put_back(8);
        assert_eq!(schedule.take(1_500), Some((8, 1_200)), "300 ns of waiting are part of its latency");
        assert_eq!(schedule.unsent(), 7);
        for slot in 0..7 {
            schedule.put_back(slot);
            assert!(schedule.take(5_000).is_some(), "what was due before the end is sent even after it");
        }
        schedule.put_back(1);
        assert_eq!((schedule.take(5_000), schedule.next_due_ns(), schedule.unsent()), (None, None, 0));
    }

    #[test]
    fn a_closed_loop_staggers_then_follows_the_answers() {
        let mut schedule = Schedule::new(&Plan { stagger_ns: 200, ..plan(Arrivals::Closed) }, 1_000, &[7, 8]);
        assert_eq!(schedule.take(1_000), Some((7, 1_000)));
        assert_eq!((schedule.take(1_050), schedule.next_due_ns()), (None, Some(1_100)));
        assert_eq!(schedule.take(1_120), Some((8, 1_120)), "counted from when it is sent");
        schedule.put_back(7);
        assert_eq!(schedule.take(1_121), Some((7, 1_121)));
        schedule.put_back(8);
        assert_eq!(schedule.take(2_000), None, "nothing is sent after the end");
        assert_eq!(schedule.unsent(), 0);
    }

    #[test]
    fn a_counted_plan_uses_each_connection_in_turn_and_stops() {
        let counted = Plan { requests_max: Some(3), ..plan(Arrivals::Rate(1e9)) };
        let mut schedule = Schedule::new(&counted, 0, &[1, 2]);
        assert_eq!(schedule.take(500).map(|t| t.0), Some(1));
        schedule.put_back(1);
        assert_eq!(schedule.take(500).map(|t| t.0), Some(2), "the one idle longest");
        assert!(!schedule.exhausted());
        assert_eq!(schedule.take(500).map(|t| t.0), Some(1));
        schedule.put_back(1);
        assert!(schedule.exhausted() && schedule.take(500).is_none());
    }

    #[test]
    fn only_requests_due_within_the_window_are_timed() {
        let mut tally = Tally::new();
        let open = |intended_ns| Open { intended_ns, last_event_ns: intended_ns, turn: 0 };
        tally.completed(&open(10), 20);
        tally.opened_ns = Some(100);
        tally.completed(&open(90), 110);
        tally.completed(&open(120), 150);
        tally.closed_ns = Some(200);
        tally.completed(&open(190), 400);
        tally.completed(&open(200), 410);
        assert_eq!((tally.completed_in_all, tally.completed), (5, 2), "throughput: whole within the window");
        let q = tally.latency.quantiles().expect("two timed");
        assert_eq!((q.count, q.max_ns), (2, 210), "latency: due within the window, whenever whole");
    }

    #[test]
    fn events_are_timed_against_their_stamp() {
        let mut tally = Tally::new();
        tally.opened_ns = Some(0);
        let mut open = Open { intended_ns: 100, last_event_ns: 100, turn: 0 };
        tally.event(&mut open, Arrival { index: 0, sent_ns: Some(150) }, 180);
        tally.event(&mut open, Arrival { index: 1, sent_ns: Some(250) }, 300);
        assert_eq!(tally.first_event.quantiles().expect("one").max_ns, 80);
        assert_eq!(tally.event_gap.quantiles().expect("one").max_ns, 120);
        let delay = tally.event_delay.quantiles().expect("two");
        assert_eq!((delay.count, delay.p50_ns, delay.max_ns), (2, 30, 50));
    }

    #[test]
    fn faults_are_counted_by_kind_with_an_example() {
        let mut tally = Tally::new();
        tally.fault(&Fault::Status(502));
        tally.fault(&Fault::Status(503));
        tally.faults_of(&Fault::Unfinished, 0);
        assert_eq!(tally.faults, BTreeMap::from([("status", 2)]));
        assert_eq!(tally.examples["status"], "status 502");
        assert_eq!(tally.faults_total(), 2);
    }
}
