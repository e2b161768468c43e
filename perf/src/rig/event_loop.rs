//! The loop itself: waits on the ring, moves bytes, fires timers. What the bytes mean is decided in `backend` (server side)
//! and in `plan_run` (client side).
//!
//! *Invariant*: see the parent module.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;

use super::Command;
use super::connection::{Connection, Role, no_delay};
use super::plan_run::Load;
use crate::backend::{Action, Backend, ServerConnection};
use crate::clock::{self, MS};
use crate::http::Fault;
use crate::payload::Recipe;
use crate::ring::{Completion, Op, Ring};

/// Longest sleep; bounds the time until a command is seen should a wake-up be lost.
const IDLE_NS: u64 = 100 * MS;

#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Timer {
    due_ns: u64,
    slot: u32,
    serial: u64,
    ticket: u64,
}

pub(super) struct Rig {
    // First, as it must be closed before the memory its operations point at.
    pub(super) ring: Ring,
    pub(super) slots: Vec<Option<Connection>>,
    pub(super) free: Vec<u32>,
    pub(super) serial: u64,
    pub(super) listeners: Vec<TcpListener>,
    pub(super) backend: Backend,
    pub(super) timers: BinaryHeap<Reverse<Timer>>,
    /// Connections whose receive ended because no buffer was free.
    pub(super) starved: Vec<(u32, u64)>,
    pub(super) load: Option<Load>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) eventfd: OwnedFd,
    pub(super) stop: bool,
    pub(super) actions: Vec<Action>,
    /// Idle time while polling.
    pub(super) idle_ns: u64,
}

impl Rig {
    pub(super) fn new(
        listeners: Vec<TcpListener>,
        default: Recipe,
        commands: mpsc::Receiver<Command>,
        eventfd: OwnedFd,
    ) -> Result<Rig, String> {
        let mut rig = Rig {
            ring: Ring::new()?,
            slots: Vec::new(),
            free: Vec::new(),
            serial: 0,
            listeners,
            backend: Backend::new(default),
            timers: BinaryHeap::new(),
            starved: Vec::new(),
            load: None,
            commands,
            eventfd,
            stop: false,
            actions: Vec::new(),
            idle_ns: 0,
        };
        for index in 0..rig.listeners.len() {
            rig.accept(index as u32);
        }
        rig.arm_wake();
        Ok(rig)
    }

    pub(super) fn accept(&mut self, index: u32) {
        self.ring.accept(self.listeners[index as usize].as_raw_fd(), index);
    }

    pub(super) fn arm_wake(&mut self) {
        // Eight bytes per wake-up (a few per run) are given away, so that the kernel never writes to memory in use.
        self.ring.wake_on(self.eventfd.as_raw_fd(), Box::leak(Box::new(0)));
    }

    pub(super) fn serve(&mut self) -> Result<(), String> {
        let mut completions = Vec::new();
        while !self.stop {
            self.take_commands();
            let progressed = self.fire_timers() | self.drive_load();
            self.feed_starved();
            let spin = self.load.as_ref().is_some_and(|load| load.plan.spin && load.schedule.is_some());
            let before_ns = clock::now_ns();
            if spin {
                self.ring.poll()?;
            } else {
                self.ring.wait(self.sleep_ns(before_ns))?;
            }
            completions.clear();
            self.ring.drain(&mut completions);
            let now_ns = clock::now_ns();
            if spin && completions.is_empty() && !progressed {
                self.idle_ns += now_ns - before_ns;
            }
            for completion in &completions {
                self.complete(completion, now_ns);
            }
        }
        Ok(())
    }

    pub(super) fn take_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Run(plan, reply)) => self.begin(*plan, reply),
                Ok(Command::Release(reply)) => {
                    let held: Vec<u32> =
                        (0..self.slots.len() as u32).filter(|&slot| self.is_held(slot)).collect();
                    let _ = reply.send(held.len() as u32);
                    for slot in held {
                        self.close(slot);
                    }
                }
                Ok(Command::Stop) | Err(mpsc::TryRecvError::Disconnected) => {
                    self.stop = true;
                    return;
                }
                Err(mpsc::TryRecvError::Empty) => return,
            }
        }
    }

    pub(super) fn is_held(&self, slot: u32) -> bool {
        self.slots[slot as usize]
            .as_ref()
            .is_some_and(|c| !c.closing && matches!(c.role, Role::Client { held: true, .. }))
    }

    /// How long the thread may sleep.
    pub(super) fn sleep_ns(&self, now_ns: u64) -> u64 {
        let mut until_ns = now_ns + IDLE_NS;
        if let Some(Reverse(timer)) = self.timers.peek() {
            until_ns = until_ns.min(timer.due_ns);
        }
        if let Some(load) = &self.load {
            match &load.schedule {
                None => until_ns = until_ns.min(now_ns + MS),
                Some(schedule) => {
                    for edge_ns in
                        [load.window_from_ns, schedule.end_ns, schedule.end_ns + load.plan.grace_ns]
                    {
                        if edge_ns > now_ns {
                            until_ns = until_ns.min(edge_ns);
                        }
                    }
                    let full = load.plan.in_flight_max.is_some_and(|max| load.in_flight >= max);
                    if let Some(due_ns) = schedule.wake_ns(now_ns).filter(|_| !full) {
                        until_ns = until_ns.min(due_ns);
                    }
                }
            }
        }
        if !self.starved.is_empty() {
            until_ns = until_ns.min(now_ns + MS);
        }
        until_ns.saturating_sub(now_ns)
    }

    pub(super) fn fire_timers(&mut self) -> bool {
        let mut fired = false;
        while let Some(Reverse(timer)) = self.timers.peek() {
            let now_ns = clock::now_ns();
            if timer.due_ns > now_ns {
                break;
            }
            let Some(Reverse(timer)) = self.timers.pop() else { break };
            fired = true;
            let mut actions = std::mem::take(&mut self.actions);
            if let Some(c) = self.slots[timer.slot as usize].as_mut()
                && c.serial == timer.serial
                && !c.closing
                && let Role::Server(server) = &mut c.role
            {
                if let Some(load) = self.load.as_mut().filter(|load| load.tally.within()) {
                    load.tally.backend_lateness.record(now_ns - timer.due_ns);
                }
                server.timer(timer.ticket, now_ns, &mut self.backend, &mut actions);
            }
            self.act(timer.slot, &mut actions);
            self.actions = actions;
        }
        fired
    }

    pub(super) fn act(&mut self, slot: u32, actions: &mut Vec<Action>) {
        for action in actions.drain(..) {
            let Some(c) = self.slots[slot as usize].as_mut() else { continue };
            match action {
                Action::Send(payload) => {
                    c.queue.push_back(payload);
                    self.pump(slot);
                }
                Action::Timer { due_ns, ticket } => {
                    let serial = c.serial;
                    self.timers.push(Reverse(Timer { due_ns, slot, serial, ticket }));
                }
                Action::Close if c.queue.is_empty() => self.close(slot),
                Action::Close => c.close_after_send = true,
            }
        }
    }

    /// Sends what is queued on `slot`, if no send is under way.
    pub(super) fn pump(&mut self, slot: u32) {
        let Some(c) = self.slots[slot as usize].as_mut() else { return };
        if c.sending || c.closing {
            return;
        }
        if let Some(front) = c.queue.front() {
            let rest = &front.bytes()[c.sent..];
            // SAFETY: the payload stays at the queue's front until the completion: nothing but `sent()` takes from it while
            // `sending` is set, a slot is not freed while `sending`, and a payload's bytes lie on the heap or are static,
            // so a growing queue does not move them.
            unsafe { self.ring.send(c.fd.as_raw_fd(), slot, rest) };
            c.sending = true;
        } else if c.close_after_send {
            self.close(slot);
        }
    }

    pub(super) fn insert(&mut self, mut connection: Connection) -> u32 {
        self.serial += 1;
        connection.serial = self.serial;
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = Some(connection);
            slot
        } else {
            self.slots.push(Some(connection));
            (self.slots.len() - 1) as u32
        }
    }

    pub(super) fn receive(&mut self, slot: u32) {
        if let Some(c) = self.slots[slot as usize].as_mut().filter(|c| !c.closing && !c.receiving) {
            c.receiving = true;
            self.ring.recv(c.fd.as_raw_fd(), slot);
        }
    }

    pub(super) fn feed_starved(&mut self) {
        for (slot, serial) in std::mem::take(&mut self.starved) {
            if self.slots[slot as usize].as_ref().is_some_and(|c| c.serial == serial) {
                self.receive(slot);
            }
        }
    }

    /// Shuts the connection down; its slot is freed when the kernel has let go of it.
    pub(super) fn close(&mut self, slot: u32) {
        let Some(c) = self.slots[slot as usize].as_mut().filter(|c| !c.closing) else { return };
        c.closing = true;
        if let Role::Server(server) = &mut c.role {
            server.end(&mut self.backend);
        }
        // SAFETY: a descriptor this connection owns.
        unsafe { libc::shutdown(c.fd.as_raw_fd(), libc::SHUT_RDWR) };
        self.free_if_idle(slot);
    }

    pub(super) fn free_if_idle(&mut self, slot: u32) {
        if self.slots[slot as usize].as_ref().is_some_and(|c| c.closing && c.idle()) {
            self.slots[slot as usize] = None;
            self.free.push(slot);
        }
    }

    pub(super) fn complete(&mut self, completion: &Completion, now_ns: u64) {
        let slot = completion.slot;
        match completion.op {
            Op::Wake => self.arm_wake(),
            Op::Accept => {
                if completion.result >= 0 {
                    // SAFETY: a fresh descriptor from the kernel, owned by nobody else.
                    let fd = unsafe { OwnedFd::from_raw_fd(completion.result) };
                    no_delay(&fd);
                    let nowhere = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
                    let role = Role::Server(ServerConnection::new(slot));
                    self.backend.counts.connections += 1;
                    let slot = self.insert(Connection::new(fd, role, 0, nowhere));
                    self.receive(slot);
                }
                if !completion.more {
                    self.accept(slot);
                }
            }
            Op::Connect => self.connected(slot, completion.result),
            Op::Send => self.sent(slot, completion.result),
            Op::Recv => self.received(completion, now_ns),
        }
    }

    pub(super) fn sent(&mut self, slot: u32, result: i32) {
        let Some(c) = self.slots[slot as usize].as_mut() else { return };
        c.sending = false;
        if c.closing {
            self.free_if_idle(slot);
            return;
        }
        if result < 0 {
            let why = std::io::Error::from_raw_os_error(-result).to_string();
            self.lost(slot, &format!("send: {why}"));
            return;
        }
        c.sent += result as usize;
        if c.queue.front().is_some_and(|front| c.sent >= front.bytes().len()) {
            c.queue.pop_front();
            c.sent = 0;
        }
        self.pump(slot);
    }

    pub(super) fn received(&mut self, completion: &Completion, now_ns: u64) {
        let slot = completion.slot;
        let Some(c) = self.slots[slot as usize].as_mut() else {
            unreachable!("a slot with a receive under way is not freed")
        };
        c.receiving = completion.more;
        let (closing, serial) = (c.closing, c.serial);
        match (completion.result, completion.buffer) {
            (length, Some(buffer)) if length > 0 => {
                if !closing {
                    self.take_bytes(slot, buffer, length as usize, now_ns);
                }
                self.ring.recycle(buffer);
            }
            (0, buffer) => {
                if let Some(buffer) = buffer {
                    self.ring.recycle(buffer);
                }
                if !closing {
                    self.end_of_stream(slot, now_ns);
                }
            }
            (error, _) if error == -libc::ENOBUFS => {
                if !closing {
                    self.starved.push((slot, serial));
                }
            }
            (error, _) => {
                if !closing {
                    let why = std::io::Error::from_raw_os_error(-error).to_string();
                    self.lost(slot, &format!("receive: {why}"));
                }
            }
        }
        if !completion.more {
            let ended = |c: &Connection| c.serial == serial && !c.closing;
            if completion.result > 0 && self.slots[slot as usize].as_ref().is_some_and(ended) {
                self.receive(slot);
            }
            self.free_if_idle(slot);
        }
    }

    pub(super) fn take_bytes(&mut self, slot: u32, buffer: u16, length: usize, now_ns: u64) {
        let mut actions = std::mem::take(&mut self.actions);
        let Some(c) = self.slots[slot as usize].as_mut() else { return };
        let bytes = self.ring.received(buffer, length);
        match &mut c.role {
            Role::Server(server) => {
                server.feed(bytes, now_ns, &mut self.backend, &mut actions);
                self.act(slot, &mut actions);
            }
            Role::Client { reader, open, .. } => match (open, &mut self.load) {
                (Some(open), Some(load)) => {
                    let (tally, mut events) = (&mut load.tally, 0);
                    let expect = load.plan.traffic.expect(open.turn);
                    let progress = reader.feed(bytes, expect, &mut |arrival| {
                        events += 1;
                        tally.event(open, arrival, now_ns);
                    });
                    if events > 0 && tally.within() {
                        tally.event_pieces += 1;
                    }
                    self.judge(slot, progress, now_ns);
                }
                // Bytes that nobody asked for.
                (_, Some(load)) => {
                    load.tally.fault(&Fault::Surplus);
                    self.replace(slot);
                }
                (_, None) => self.close(slot),
            },
        }
        self.actions = actions;
    }
}
