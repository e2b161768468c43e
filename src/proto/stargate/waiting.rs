//! Requests that wait for a route: until when, and whom a change may help.
//!
//! A request waits for one of two reasons. Its algorithm says that time alone will open more, which is honoured for a minute at most;
//! or nothing can be chosen as things are, and it has said how long it would wait for things to change. Nobody polls: a change, or
//! the exact time, has a request looked at again.
//!
//! *Invariant*: a ticket is in the books from the start of its wait until its answer is fetched or it is given up. Timers stand
//! for unanswered tickets, one each.
//! *Bound and cost*: O(log waiting) per change of a request's place; a request looked at in vain costs a few comparisons.
//! *Source*: the Stargate rules, sections 2.4, 2.7 and 4.5.

use std::collections::{BTreeSet, VecDeque};

use super::balancer::Ask;
use super::choose::widen::Bounds;
use super::estimate::{has_capacity, is_rate, kv_fits, queue_ms};
use super::request::{Dispatched, Refusal, Woken};
use super::stats::Cluster;
use crate::clock::Nanos;
use crate::proto::admission::tickets::Tickets;
use crate::proto::config::lb_config::{Entry, MethodSettings, WaitAndWiden};
use crate::proto::ids::Ticket;

/// Nobody waits for longer, in milliseconds since arrival.
pub const WAIT_MS_MAX: u64 = 60_000;
/// A change that can only help in a roundabout way is looked at so many milliseconds later, with all that came since.
pub const RECHECK_MS: u64 = 25;

/// A request in the books.
#[derive(Clone, Copy, Debug)]
struct Entered {
    flight: u32,
    /// Its timer; `NEVER` once it is answered.
    due: Nanos,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Waiting {
    tickets: Tickets<Entered>,
    timers: BTreeSet<(Nanos, Ticket)>,
    woken: VecDeque<Woken>,
}

impl Waiting {
    pub fn enter(&mut self, flight: u32, due: Nanos) -> Ticket {
        let ticket = self.tickets.insert(Entered { flight, due });
        self.timers.insert((due, ticket));
        ticket
    }

    /// The flight of a ticket whose answer was not fetched, and whether it is answered.
    pub fn find(&mut self, ticket: Ticket) -> Option<(u32, bool)> {
        self.tickets.get_mut(ticket).map(|entered| (entered.flight, entered.due == Nanos::NEVER))
    }

    /// It is looked at again at `due`.
    pub fn postpone(&mut self, ticket: Ticket, due: Nanos) {
        let Some(entered) = self.tickets.get_mut(ticket) else { return };
        if entered.due != due {
            self.timers.remove(&(entered.due, ticket));
            self.timers.insert((due, ticket));
            entered.due = due;
        }
    }

    pub fn answer(&mut self, ticket: Ticket, routed: Result<Dispatched, Refusal>) {
        let Some(entered) = self.tickets.get_mut(ticket) else { return };
        self.timers.remove(&(entered.due, ticket));
        entered.due = Nanos::NEVER;
        self.woken.push_back(Woken { ticket, routed });
    }

    /// It waits no more, answered or not.
    pub fn leave(&mut self, ticket: Ticket) {
        if let Some(entered) = self.tickets.remove(ticket) {
            self.timers.remove(&(entered.due, ticket));
        }
    }

    /// The next answer that somebody still waits for, and its flight.
    pub fn poll(&mut self) -> Option<(u32, Woken)> {
        loop {
            let woken = self.woken.pop_front()?;
            if let Some(entered) = self.tickets.remove(woken.ticket) {
                return Some((entered.flight, woken));
            }
        }
    }

    /// The next ticket whose time has come; it keeps its timer.
    pub fn due(&self, now: Nanos) -> Option<Ticket> {
        self.timers.first().filter(|(due, _)| *due <= now).map(|(_, ticket)| *ticket)
    }

    pub fn poll_timeout(&self) -> Nanos {
        self.timers.first().map_or(Nanos::NEVER, |(due, _)| *due)
    }
}

/// Until when a request may wait, if its algorithm says so, or it does.
pub fn limit(arrived: Nanos, max_wait_ms: Option<u64>) -> Nanos {
    arrived.plus_ms(max_wait_ms.unwrap_or(WAIT_MS_MAX).min(WAIT_MS_MAX))
}

/// How many requests may queue at a cluster over its limit, at most, for it to be chosen; `u64::MAX`: the limit does not matter.
pub fn max_queued(entry: &Entry) -> u64 {
    match &entry.method {
        MethodSettings::WaitAndWiden(rules) => rules.widen.max_queued,
        // Without bounds on queue times the first rank is chosen whatever its load.
        MethodSettings::PulsarWaitAndWiden { widen, .. } if widen.queue_time_ms().is_none() => u64::MAX,
        MethodSettings::PulsarWaitAndWiden { widen, fallback_max_queued, .. } => {
            widen.max_queued.max(*fallback_max_queued)
        }
        _ => u64::MAX,
    }
}

/// Whether a cluster that eased could take the request, by its figures; cheap, and true where only a choice can tell. Affinity has
/// its own say, see `Balancer::concerns`.
pub fn could_take(entry: &Entry, cluster: &Cluster, ask: &Ask<'_>) -> bool {
    let stats = &cluster.stats;
    let widen = match &entry.method {
        MethodSettings::Pulsar(pulsar) => {
            return !pulsar.consider_kv_free_tokens || kv_fits(&stats.kv, ask.input_tokens);
        }
        MethodSettings::PulsarWaitAndWiden { pulsar, .. }
            if pulsar.consider_kv_free_tokens && !kv_fits(&stats.kv, ask.input_tokens) =>
        {
            return false;
        }
        MethodSettings::WaitAndWiden(WaitAndWiden { widen, .. })
        | MethodSettings::PulsarWaitAndWiden { widen, .. } => widen,
        MethodSettings::PowerOfN(_) | MethodSettings::RoundRobin | MethodSettings::Random => return true,
    };
    match max_queued(entry) {
        u64::MAX => return true,
        max_queued if !has_capacity(stats, max_queued) => return false,
        _ => {}
    }
    if ask.input_tokens > 0 && !widen.ignore_input_processing_time && !is_rate(stats.last_mean_input_tps) {
        return false;
    }
    Bounds::of(widen).is_none_or(|bounds| queue_ms(stats, ask.priority) <= bounds.allowed_ms(ask))
}
