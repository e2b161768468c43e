//! The client side of the loop: a plan from its first connection to its report.
//!
//! *Invariant*: a connection counts for the plan that made it; a verdict on an answer either frees its connection for the
//! next request or replaces it, so after a verdict the slot may have a new tenant.
//! *Errors*: before the first request a plan fails as a whole, with the reason; after that, faults are counted.

use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::sync::mpsc;

use super::connection::{Connection, Role, socket};
use super::event_loop::Rig;
use crate::answer::{AnswerReader, Progress};
use crate::backend::{Counts, Payload};
use crate::clock::{self, S};
use crate::http::Fault;
use crate::load::{Arrivals, FAULTS_MAX, Open, Plan, Report, Schedule, Tally, Traffic};
use crate::process::{self, Snapshot};
use crate::prompts::Talks;

/// Connects under way at once: below any listener's queue.
const CONNECTING_MAX: u32 = 64;
/// Time for all connections of a plan to be made.
const CONNECT_NS_MAX: u64 = 20 * S;
/// Connections from one source address before the next is taken: below the ephemeral port range's 28 k.
const PER_SOURCE_MAX: u32 = 20_000;

/// A plan under way.
pub(super) struct Load {
    pub(super) plan: Plan,
    pub(super) reply: mpsc::Sender<Result<Report, String>>,
    pub(super) tally: Tally,
    /// `None` until all connections are made.
    pub(super) schedule: Option<Schedule>,
    pub(super) slots: Vec<u32>,
    /// Connections with a lower serial belong to an earlier plan.
    pub(super) first_serial: u64,
    pub(super) made: u32,
    pub(super) connecting: u32,
    pub(super) in_flight: u32,
    /// Those of the plan's conversations that have no request under way; `None`: there are none.
    pub(super) talks: Option<Talks>,
    pub(super) begun_ns: u64,
    pub(super) window_from_ns: u64,
    pub(super) before: Option<Snapshot>,
    pub(super) after: Option<Snapshot>,
    pub(super) cpu_before_ns: u64,
    pub(super) busy_ns: u64,
    pub(super) wait_before_ns: u64,
    pub(super) wait_ns: u64,
    pub(super) backend_before: Counts,
}

impl Rig {
    pub(super) fn begin(&mut self, plan: Plan, reply: mpsc::Sender<Result<Report, String>>) {
        if self.load.is_some() {
            let _ = reply.send(Err("a plan is under way already".into()));
            return;
        }
        let talks = match &plan.traffic {
            Traffic::Same { .. } => None,
            Traffic::Talks(script) => Some(Talks::new(script, plan.connections)),
        };
        self.load = Some(Load {
            plan,
            reply,
            tally: Tally::new(),
            schedule: None,
            slots: Vec::new(),
            first_serial: self.serial + 1,
            made: 0,
            connecting: 0,
            in_flight: 0,
            talks,
            begun_ns: clock::now_ns(),
            window_from_ns: 0,
            before: None,
            after: None,
            cpu_before_ns: 0,
            busy_ns: 0,
            wait_before_ns: 0,
            wait_ns: 0,
            backend_before: self.backend.counts.clone(),
        });
    }

    /// What an answer's progress means for its connection.
    pub(super) fn judge(&mut self, slot: u32, progress: Result<Progress, Fault>, now_ns: u64) {
        match progress {
            Ok(Progress::More) => {}
            Ok(Progress::Done { keep_alive }) => {
                let (Some(load), Some(c)) = (&mut self.load, self.slots[slot as usize].as_mut()) else {
                    return;
                };
                let Role::Client { open, reader, talk, .. } = &mut c.role else { return };
                if let Some(open) = open.take() {
                    load.tally.completed(&open, now_ns);
                    load.in_flight -= 1;
                }
                if let Some((talks, talk)) = load.talks.as_mut().zip(talk.take()) {
                    talks.put_back(talk);
                }
                reader.reset();
                if !keep_alive || !c.queue.is_empty() {
                    // Answered before the request was out, or told to close.
                    self.replace(slot);
                } else if let Some(schedule) = &mut load.schedule {
                    schedule.put_back(slot);
                    self.issue(now_ns);
                }
            }
            Err(fault) => {
                if let Some(load) = &mut self.load {
                    load.tally.fault(&fault);
                }
                self.replace(slot);
            }
        }
    }

    pub(super) fn end_of_stream(&mut self, slot: u32, now_ns: u64) {
        let Some(c) = self.slots[slot as usize].as_mut() else { return };
        match &mut c.role {
            Role::Client { reader, open: Some(open), .. } => {
                let progress = match &self.load {
                    Some(load) => reader.close(load.plan.traffic.expect(open.turn)),
                    None => return self.close(slot),
                };
                // Closes the connection whatever the verdict; after it the slot may have a new tenant.
                self.judge(slot, progress, now_ns);
            }
            Role::Client { .. } => {
                if let Some(load) = &mut self.load {
                    load.tally.idle_closed += 1;
                    self.replace(slot);
                } else {
                    self.close(slot);
                }
            }
            Role::Server(_) => self.close(slot),
        }
    }

    /// The connection broke.
    pub(super) fn lost(&mut self, slot: u32, why: &str) {
        let Some(c) = self.slots[slot as usize].as_ref() else { return };
        match &c.role {
            Role::Server(_) => self.close(slot),
            Role::Client { open, .. } => {
                if let Some(load) = &mut self.load {
                    if open.is_some() {
                        load.tally.fault(&Fault::Closed(why.to_owned()));
                    } else {
                        load.tally.idle_closed += 1;
                    }
                }
                self.replace(slot);
            }
        }
    }

    /// Closes a client connection and, while its plan runs, makes a new one in its stead.
    pub(super) fn replace(&mut self, slot: u32) {
        let held = match self.slots[slot as usize].as_mut() {
            Some(Connection { closing: false, role: Role::Client { open, held, .. }, .. }) => {
                if open.take().is_some()
                    && let Some(load) = &mut self.load
                {
                    load.in_flight -= 1;
                }
                *held
            }
            _ => return,
        };
        self.close(slot);
        let Some(load) = &mut self.load else { return };
        // A held connection belongs to an earlier plan.
        if held && !load.slots.contains(&slot) {
            return;
        }
        load.slots.retain(|&other| other != slot);
        if let Some(schedule) = &mut load.schedule {
            schedule.forget(slot);
        }
        if load.tally.closed_ns.is_none() && load.tally.faults_total() < FAULTS_MAX {
            load.tally.reconnects += 1;
            self.connect();
        }
    }

    pub(super) fn connect(&mut self) {
        let Some(load) = &mut self.load else { return };
        let source = Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) + load.made / PER_SOURCE_MAX);
        load.made += 1;
        let bind = (load.plan.target.ip().is_loopback() && source != Ipv4Addr::LOCALHOST).then_some(source);
        let (target, held) = (load.plan.target, load.plan.hold);
        match socket(bind) {
            Ok(fd) => {
                load.connecting += 1;
                let role = Role::Client { reader: AnswerReader::new(), open: None, held, talk: None };
                let slot = self.insert(Connection::new(fd, role, 0, target));
                let Some(c) = self.slots[slot as usize].as_mut() else { return };
                c.connecting = true;
                // SAFETY: the address is boxed in the connection, which is not freed while `connecting`.
                unsafe { self.ring.connect(c.fd.as_raw_fd(), slot, &c.address) };
            }
            Err(why) => load.tally.fault(&Fault::Connect(why)),
        }
    }

    pub(super) fn connected(&mut self, slot: u32, result: i32) {
        let Some(c) = self.slots[slot as usize].as_mut() else { return };
        c.connecting = false;
        let (closing, serial) = (c.closing, c.serial);
        let mut load = self.load.as_mut().filter(|load| serial >= load.first_serial);
        if let Some(load) = &mut load {
            load.connecting -= 1;
            if result < 0 && !closing {
                let why = std::io::Error::from_raw_os_error(-result).to_string();
                load.tally.fault(&Fault::Connect(format!("{}: {why}", load.plan.target)));
            }
        }
        match load {
            _ if closing => self.free_if_idle(slot),
            Some(load) if result >= 0 => {
                load.slots.push(slot);
                if let Some(schedule) = &mut load.schedule {
                    schedule.put_back(slot);
                }
                self.receive(slot);
            }
            _ => self.close(slot),
        }
    }

    /// Moves the plan on: connections, requests that are due, edges of the window. Whether anything was done.
    pub(super) fn drive_load(&mut self) -> bool {
        let Some(load) = &self.load else { return false };
        let now_ns = clock::now_ns();
        if load.schedule.is_none() {
            self.gather(now_ns);
            return true;
        }
        let mut progressed = self.issue(now_ns);
        let Some(load) = &mut self.load else { return true };
        let gave_up = load.tally.faults_total() >= FAULTS_MAX;
        if load.tally.opened_ns.is_none() && now_ns >= load.window_from_ns {
            progressed = true;
            if let Err(why) = self.open_window() {
                self.finish(Some(why));
                return true;
            }
        }
        let Some(load) = &mut self.load else { return true };
        let Some((end_ns, exhausted)) = load.schedule.as_ref().map(|s| (s.end_ns, s.exhausted())) else {
            return true;
        };
        let all_done = exhausted && load.in_flight == 0;
        if load.tally.within() && (now_ns >= end_ns || all_done || gave_up) {
            progressed = true;
            if let Err(why) = self.close_window() {
                self.finish(Some(why));
                return true;
            }
        }
        let Some(load) = &mut self.load else { return true };
        let drained = load.in_flight == 0 && load.schedule.as_ref().is_none_or(|s| s.unsent() == 0);
        let over = now_ns >= end_ns + load.plan.grace_ns;
        if load.tally.closed_ns.is_some() && (drained || over || gave_up) {
            self.finish(None);
            return true;
        }
        progressed
    }

    /// Makes the plan's connections; starts it when all are there.
    pub(super) fn gather(&mut self, now_ns: u64) {
        loop {
            let Some(load) = &mut self.load else { return };
            let (there, wanted) = (load.slots.len() as u32, load.plan.connections);
            if load.tally.faults_total() > 0 || now_ns > load.begun_ns + CONNECT_NS_MAX {
                let why = load.tally.examples.values().next().cloned();
                let why = why.unwrap_or_else(|| format!("took longer than {} s", CONNECT_NS_MAX / S));
                self.finish(Some(format!("{there} of {wanted} connections made, then: {why}")));
                return;
            }
            if there == wanted {
                let schedule = Schedule::new(&load.plan, now_ns, &load.slots);
                load.window_from_ns = schedule.end_ns - load.plan.window_ns;
                load.schedule = Some(schedule);
                return;
            }
            if there + load.connecting >= wanted || load.connecting >= CONNECTING_MAX {
                return;
            }
            self.connect();
        }
    }

    /// Sends all requests that are due and have a connection.
    pub(super) fn issue(&mut self, now_ns: u64) -> bool {
        let mut sent = false;
        while let Some(Load { schedule: Some(schedule), tally, plan, in_flight, talks, .. }) = &mut self.load
        {
            if tally.faults_total() >= FAULTS_MAX || plan.in_flight_max.is_some_and(|max| *in_flight >= max) {
                break;
            }
            let now_ns = if sent { clock::now_ns() } else { now_ns.max(clock::now_ns()) };
            let waited = schedule.next_due_ns();
            let Some((slot, intended_ns)) = schedule.take(now_ns) else { break };
            if matches!(plan.arrivals, Arrivals::Rate(_)) && tally.within() {
                tally.lateness.record(now_ns.saturating_sub(waited.unwrap_or(now_ns)));
            }
            *in_flight += 1;
            let Some(c) = self.slots[slot as usize].as_mut() else {
                unreachable!("a slot that went is forgotten by the schedule")
            };
            if let Role::Client { open, talk, .. } = &mut c.role {
                let (request, turn) = match (&plan.traffic, talks.as_mut()) {
                    (Traffic::Same { request, .. }, _) => (request.clone(), 0),
                    (Traffic::Talks(_), Some(talks)) => {
                        let (drawn, request, turn) = talks.draw();
                        *talk = Some(drawn);
                        (request, turn)
                    }
                    (Traffic::Talks(_), None) => unreachable!("a plan with conversations begins with some"),
                };
                *open = Some(Open { intended_ns, last_event_ns: intended_ns, turn });
                c.queue.push_back(Payload::Shared(request));
            }
            self.pump(slot);
            sent = true;
        }
        sent
    }

    pub(super) fn open_window(&mut self) -> Result<(), String> {
        let Some(load) = &mut self.load else { return Ok(()) };
        if let Some(probe) = &mut load.plan.probe {
            load.before = Some(probe()?);
        }
        load.cpu_before_ns = clock::thread_cpu_ns();
        load.wait_before_ns = process::own_wait_ns();
        self.idle_ns = 0;
        let now_ns = clock::now_ns();
        load.tally.opened_ns = Some(now_ns);
        // However late it opened, the window has its full length.
        if let Some(schedule) = &mut load.schedule {
            schedule.end_ns = now_ns + load.plan.window_ns;
        }
        Ok(())
    }

    pub(super) fn close_window(&mut self) -> Result<(), String> {
        let Some(load) = &mut self.load else { return Ok(()) };
        let now_ns = clock::now_ns();
        load.busy_ns = if load.plan.spin {
            (now_ns - load.tally.opened_ns.unwrap_or(now_ns)).saturating_sub(self.idle_ns)
        } else {
            clock::thread_cpu_ns() - load.cpu_before_ns
        };
        load.wait_ns = process::own_wait_ns().saturating_sub(load.wait_before_ns);
        if let Some(probe) = &mut load.plan.probe {
            load.after = Some(probe()?);
        }
        load.tally.closed_ns = Some(now_ns);
        Ok(())
    }

    /// Ends the plan: counts what is unfinished, closes or keeps the connections, reports.
    pub(super) fn finish(&mut self, error: Option<String>) {
        let Some(mut load) = self.load.take() else { return };
        let gave_up = load.tally.faults_total() >= FAULTS_MAX;
        let unsent = load.schedule.as_ref().map_or(0, Schedule::unsent);
        let slots = std::mem::take(&mut load.slots);
        for &slot in &slots {
            let open = match self.slots[slot as usize].as_mut() {
                Some(Connection { role: Role::Client { open, .. }, .. }) => open.take().is_some(),
                _ => false,
            };
            if open {
                load.tally.fault(&Fault::Unfinished);
            }
            if open || !load.plan.hold || error.is_some() {
                self.close(slot);
            }
        }
        load.tally.faults_of(&Fault::Unfinished, unsent);
        if let Some(why) = error {
            let _ = load.reply.send(Err(why));
            return;
        }
        let tally = load.tally;
        let window_ns = tally.closed_ns.zip(tally.opened_ns).map_or(0, |(to, from)| to - from);
        let counts = &self.backend.counts;
        let report = Report {
            window_ns,
            completed: tally.completed,
            completed_in_all: tally.completed_in_all,
            events: tally.events,
            event_pieces: tally.event_pieces,
            latency: tally.latency.quantiles(),
            first_event: tally.first_event.quantiles(),
            event_delay: tally.event_delay.quantiles(),
            event_gap: tally.event_gap.quantiles(),
            faults: tally.faults,
            examples: tally.examples,
            gave_up,
            reconnects: tally.reconnects,
            idle_closed: tally.idle_closed,
            lateness: tally.lateness.quantiles(),
            backend_lateness: tally.backend_lateness.quantiles(),
            generator_busy: load.busy_ns as f64 / window_ns.max(1) as f64,
            generator_wait: load.wait_ns as f64 / window_ns.max(1) as f64,
            usage: load.after.zip(load.before).map(|(after, before)| after.since(&before)),
            backend: Counts {
                connections: counts.connections - load.backend_before.connections,
                requests: counts.requests - load.backend_before.requests,
                housekeeping: counts.housekeeping - load.backend_before.housekeeping,
                refused: counts.refused - load.backend_before.refused,
                turns_later: counts.turns_later - load.backend_before.turns_later,
                turns_at_home: counts.turns_at_home - load.backend_before.turns_at_home,
                cut: counts.cut - load.backend_before.cut,
                example: counts.example.clone(),
            },
        };
        let _ = load.reply.send(Ok(report));
    }
}
