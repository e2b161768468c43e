//! The bench's event loop: load generator and backends on one thread, so that the measured proxy has a core to itself and
//! every peer it talks to is on the other one.
//!
//! *Invariant*: a slot is freed only when no operation on it is under way; a connection has at most one send under way, and
//! its bytes stay in the slot until the completion. Completions of one turn carry the time at which the turn took them in,
//! so the generator's own work on the first does not count as delay of the last.
//! *Bound and cost*: about 9 us of core time per proxied request (two sends, two receives), nearly all in the kernel; the
//! report states how busy the thread was.
//! *Errors*: a plan that cannot start says why; what goes wrong later is a fault in its report.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;

use crate::answer::{AnswerReader, Progress};
use crate::backend::{Action, Backend, Counts, Payload, ServerConnection};
use crate::clock::{self, MS, S};
use crate::http::Fault;
use crate::load::{FAULTS_MAX, Open, Plan, Report, Schedule, Tally};
use crate::payload::Recipe;
use crate::process::Snapshot;
use crate::ring::{self, Completion, Op, Ring};
use crate::sched;

/// Connects under way at once: below any listener's queue.
const CONNECTING_MAX: u32 = 64;
/// Time for all connections of a plan to be made.
const CONNECT_NS_MAX: u64 = 20 * S;
/// Connections from one source address before the next is taken: below the ephemeral port range's 28 k.
const PER_SOURCE_MAX: u32 = 20_000;
/// Connections that may wait to be accepted (the system may allow fewer).
const LISTEN_QUEUE: i32 = 4096;
/// Longest sleep; bounds the time until a command is seen should a wake-up be lost.
const IDLE_NS: u64 = 100 * MS;

/// Orders to the thread.
enum Command {
    Run(Box<Plan>, mpsc::Sender<Result<Report, String>>),
    /// Close what `Plan::hold` left open; answers how many were still open.
    Release(mpsc::Sender<u32>),
    Stop,
}

/// The thread, seen from outside.
pub struct RigHandle {
    /// Addresses of the backends.
    pub backends: Vec<SocketAddrV4>,
    /// The thread's id, for its scheduling policy.
    pub thread_id: i32,
    commands: mpsc::Sender<Command>,
    eventfd: OwnedFd,
    thread: Option<std::thread::JoinHandle<Result<(), String>>>,
}

impl RigHandle {
    /// Starts the thread, pinned to `core` if given, serving on `listen` (port 0: any free one).
    pub fn start(core: Option<usize>, listen: &[SocketAddrV4], default: Recipe) -> Result<RigHandle, String> {
        let mut listeners = Vec::new();
        for address in listen {
            let listener = TcpListener::bind(address).map_err(|e| format!("listen on {address}: {e}"))?;
            // A longer queue than the library's 128: a proxy may open hundreds of connections at once.
            // SAFETY: a listening descriptor that we own; listening again only changes the length of its queue.
            unsafe { libc::listen(listener.as_raw_fd(), LISTEN_QUEUE) };
            listeners.push(listener);
        }
        // SAFETY: no pointers; the descriptor returned is fresh and owned below.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(format!("eventfd: {}", std::io::Error::last_os_error()));
        }
        // SAFETY: fresh from the call above, owned by nobody else.
        let eventfd = unsafe { OwnedFd::from_raw_fd(fd) };
        let wake = eventfd.try_clone().map_err(|e| format!("eventfd: {e}"))?;
        let mut backends = Vec::new();
        for listener in &listeners {
            match listener.local_addr() {
                Ok(std::net::SocketAddr::V4(address)) => backends.push(address),
                other => return Err(format!("address of a listener: {other:?}, expected IPv4")),
            }
        }
        let (commands, received) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("rig".into())
            .spawn(move || {
                let rig = core
                    .map_or(Ok(()), |core| sched::pin(0, core))
                    .and_then(|()| Rig::new(listeners, default, received, wake));
                sched::exact_timers();
                match rig {
                    Ok(mut rig) => {
                        let _ = ready.send(Ok(sched::thread_id()));
                        rig.serve()
                    }
                    Err(why) => {
                        let _ = ready.send(Err(why.clone()));
                        Err(why)
                    }
                }
            })
            .map_err(|e| format!("start a thread: {e}"))?;
        let thread_id =
            started.recv().map_err(|_| "the generator's thread died at its start".to_owned())??;
        Ok(RigHandle { backends, thread_id, commands, eventfd, thread: Some(thread) })
    }

    fn order(&self, command: Command) -> Result<(), String> {
        self.commands.send(command).map_err(|_| "the generator's thread has ended".to_owned())?;
        let one: u64 = 1;
        // SAFETY: eight bytes from a live u64, as an eventfd takes them.
        let written = unsafe { libc::write(self.eventfd.as_raw_fd(), std::ptr::from_ref(&one).cast(), 8) };
        if written == 8 { Ok(()) } else { Err(format!("eventfd: {}", std::io::Error::last_os_error())) }
    }

    /// Runs `plan` and waits for its report.
    pub fn run(&self, plan: Plan) -> Result<Report, String> {
        let (send, receive) = mpsc::channel();
        self.order(Command::Run(Box::new(plan), send))?;
        receive.recv().map_err(|_| "the generator's thread has ended".to_owned())?
    }

    /// Closes held connections; how many were still open.
    pub fn release(&self) -> Result<u32, String> {
        let (send, receive) = mpsc::channel();
        self.order(Command::Release(send))?;
        receive.recv().map_err(|_| "the generator's thread has ended".to_owned())
    }

    /// Waits until the thread ends, which it does by itself only on an error.
    pub fn join(mut self) -> Result<(), String> {
        match self.thread.take().map(std::thread::JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err("the generator's thread panicked".into()),
            None => Ok(()),
        }
    }
}

impl Drop for RigHandle {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = self.order(Command::Stop);
            let _ = thread.join();
        }
    }
}

enum Role {
    Server(ServerConnection),
    Client { reader: AnswerReader, open: Option<Open>, held: bool },
}

struct Connection {
    role: Role,
    /// Connections made before this one; tells a slot's tenants apart.
    serial: u64,
    /// To be sent, in order; the first is under way when `sending`.
    queue: VecDeque<Payload>,
    /// Bytes of the first that are sent.
    sent: usize,
    address: Box<libc::sockaddr_in>,
    connecting: bool,
    sending: bool,
    receiving: bool,
    close_after_send: bool,
    closing: bool,
    // Last, as it must be closed last.
    fd: OwnedFd,
}

impl Connection {
    fn new(fd: OwnedFd, role: Role, serial: u64, address: SocketAddrV4) -> Connection {
        Connection {
            role,
            serial,
            queue: VecDeque::new(),
            sent: 0,
            address: Box::new(ring::sockaddr(address)),
            connecting: false,
            sending: false,
            receiving: false,
            close_after_send: false,
            closing: false,
            fd,
        }
    }

    fn idle(&self) -> bool {
        !(self.connecting || self.sending || self.receiving)
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    due_ns: u64,
    slot: u32,
    serial: u64,
    ticket: u64,
}

/// A plan under way.
struct Load {
    plan: Plan,
    reply: mpsc::Sender<Result<Report, String>>,
    tally: Tally,
    /// `None` until all connections are made.
    schedule: Option<Schedule>,
    slots: Vec<u32>,
    /// Connections with a lower serial belong to an earlier plan.
    first_serial: u64,
    made: u32,
    connecting: u32,
    in_flight: u32,
    begun_ns: u64,
    window_from_ns: u64,
    before: Option<Snapshot>,
    after: Option<Snapshot>,
    cpu_before_ns: u64,
    busy_ns: u64,
    backend_before: Counts,
}

struct Rig {
    // First, as it must be closed before the memory its operations point at.
    ring: Ring,
    slots: Vec<Option<Connection>>,
    free: Vec<u32>,
    serial: u64,
    listeners: Vec<TcpListener>,
    backend: Backend,
    timers: BinaryHeap<Reverse<Timer>>,
    /// Connections whose receive ended because no buffer was free.
    starved: Vec<(u32, u64)>,
    load: Option<Load>,
    commands: mpsc::Receiver<Command>,
    eventfd: OwnedFd,
    stop: bool,
    actions: Vec<Action>,
    /// Idle time while polling.
    idle_ns: u64,
}

impl Rig {
    fn new(
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

    fn accept(&mut self, index: u32) {
        self.ring.accept(self.listeners[index as usize].as_raw_fd(), index);
    }

    fn arm_wake(&mut self) {
        // Eight bytes per wake-up (a few per run) are given away, so that the kernel never writes to memory in use.
        self.ring.wake_on(self.eventfd.as_raw_fd(), Box::leak(Box::new(0)));
    }

    fn serve(&mut self) -> Result<(), String> {
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

    fn take_commands(&mut self) {
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

    fn is_held(&self, slot: u32) -> bool {
        self.slots[slot as usize]
            .as_ref()
            .is_some_and(|c| !c.closing && matches!(c.role, Role::Client { held: true, .. }))
    }

    fn begin(&mut self, plan: Plan, reply: mpsc::Sender<Result<Report, String>>) {
        if self.load.is_some() {
            let _ = reply.send(Err("a plan is under way already".into()));
            return;
        }
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
            begun_ns: clock::now_ns(),
            window_from_ns: 0,
            before: None,
            after: None,
            cpu_before_ns: 0,
            busy_ns: 0,
            backend_before: self.backend.counts.clone(),
        });
    }

    /// How long the thread may sleep.
    fn sleep_ns(&self, now_ns: u64) -> u64 {
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
                    if let Some(due_ns) = schedule.wake_ns(now_ns) {
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

    fn fire_timers(&mut self) -> bool {
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

    fn act(&mut self, slot: u32, actions: &mut Vec<Action>) {
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
    fn pump(&mut self, slot: u32) {
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

    fn insert(&mut self, mut connection: Connection) -> u32 {
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

    fn receive(&mut self, slot: u32) {
        if let Some(c) = self.slots[slot as usize].as_mut().filter(|c| !c.closing && !c.receiving) {
            c.receiving = true;
            self.ring.recv(c.fd.as_raw_fd(), slot);
        }
    }

    fn feed_starved(&mut self) {
        for (slot, serial) in std::mem::take(&mut self.starved) {
            if self.slots[slot as usize].as_ref().is_some_and(|c| c.serial == serial) {
                self.receive(slot);
            }
        }
    }

    /// Shuts the connection down; its slot is freed when the kernel has let go of it.
    fn close(&mut self, slot: u32) {
        let Some(c) = self.slots[slot as usize].as_mut().filter(|c| !c.closing) else { return };
        c.closing = true;
        if let Role::Server(server) = &mut c.role {
            server.end(&mut self.backend);
        }
        // SAFETY: a descriptor this connection owns.
        unsafe { libc::shutdown(c.fd.as_raw_fd(), libc::SHUT_RDWR) };
        self.free_if_idle(slot);
    }

    fn free_if_idle(&mut self, slot: u32) {
        if self.slots[slot as usize].as_ref().is_some_and(|c| c.closing && c.idle()) {
            self.slots[slot as usize] = None;
            self.free.push(slot);
        }
    }

    fn complete(&mut self, completion: &Completion, now_ns: u64) {
        let slot = completion.slot;
        match completion.op {
            Op::Wake => self.arm_wake(),
            Op::Accept => {
                if completion.result >= 0 {
                    // SAFETY: a fresh descriptor from the kernel, owned by nobody else.
                    let fd = unsafe { OwnedFd::from_raw_fd(completion.result) };
                    no_delay(&fd);
                    let nowhere = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
                    let role = Role::Server(ServerConnection::new());
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

    fn sent(&mut self, slot: u32, result: i32) {
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

    fn received(&mut self, completion: &Completion, now_ns: u64) {
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

    fn take_bytes(&mut self, slot: u32, buffer: u16, length: usize, now_ns: u64) {
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
                    let progress = reader.feed(bytes, &load.plan.expect, &mut |arrival| {
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

    /// What an answer's progress means for its connection.
    fn judge(&mut self, slot: u32, progress: Result<Progress, Fault>, now_ns: u64) {
        match progress {
            Ok(Progress::More) => {}
            Ok(Progress::Done { keep_alive }) => {
                let (Some(load), Some(c)) = (&mut self.load, self.slots[slot as usize].as_mut()) else {
                    return;
                };
                let Role::Client { open, reader, .. } = &mut c.role else { return };
                if let Some(open) = open.take() {
                    load.tally.completed(&open, now_ns);
                    load.in_flight -= 1;
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

    fn end_of_stream(&mut self, slot: u32, now_ns: u64) {
        let Some(c) = self.slots[slot as usize].as_mut() else { return };
        match &mut c.role {
            Role::Client { reader, open: Some(_), .. } => {
                let progress = match &self.load {
                    Some(load) => reader.close(&load.plan.expect),
                    None => return self.close(slot),
                };
                self.judge(slot, progress, now_ns);
                self.close(slot);
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
    fn lost(&mut self, slot: u32, why: &str) {
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
    fn replace(&mut self, slot: u32) {
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

    fn connect(&mut self) {
        let Some(load) = &mut self.load else { return };
        let source = Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) + load.made / PER_SOURCE_MAX);
        load.made += 1;
        let bind = (load.plan.target.ip().is_loopback() && source != Ipv4Addr::LOCALHOST).then_some(source);
        let (target, held) = (load.plan.target, load.plan.hold);
        match socket(bind) {
            Ok(fd) => {
                load.connecting += 1;
                let role = Role::Client { reader: AnswerReader::new(), open: None, held };
                let slot = self.insert(Connection::new(fd, role, 0, target));
                let Some(c) = self.slots[slot as usize].as_mut() else { return };
                c.connecting = true;
                // SAFETY: the address is boxed in the connection, which is not freed while `connecting`.
                unsafe { self.ring.connect(c.fd.as_raw_fd(), slot, &c.address) };
            }
            Err(why) => load.tally.fault(&Fault::Connect(why)),
        }
    }

    fn connected(&mut self, slot: u32, result: i32) {
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
    fn drive_load(&mut self) -> bool {
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
    fn gather(&mut self, now_ns: u64) {
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
    fn issue(&mut self, now_ns: u64) -> bool {
        let mut sent = false;
        loop {
            let Some(Load { schedule: Some(schedule), tally, plan, in_flight, .. }) = &mut self.load else {
                break;
            };
            if tally.faults_total() >= FAULTS_MAX {
                break;
            }
            let now_ns = if sent { clock::now_ns() } else { now_ns.max(clock::now_ns()) };
            let waited = schedule.next_due_ns();
            let Some((slot, intended_ns)) = schedule.take(now_ns) else { break };
            if matches!(plan.arrivals, crate::load::Arrivals::Rate(_)) && tally.within() {
                tally.lateness.record(now_ns.saturating_sub(waited.unwrap_or(now_ns)));
            }
            let payload = Payload::Shared(plan.request.clone());
            *in_flight += 1;
            let Some(c) = self.slots[slot as usize].as_mut() else {
                unreachable!("a slot that went is forgotten by the schedule")
            };
            if let Role::Client { open, .. } = &mut c.role {
                *open = Some(Open { intended_ns, last_event_ns: intended_ns });
            }
            c.queue.push_back(payload);
            self.pump(slot);
            sent = true;
        }
        sent
    }

    fn open_window(&mut self) -> Result<(), String> {
        let Some(load) = &mut self.load else { return Ok(()) };
        if let Some(probe) = &mut load.plan.probe {
            load.before = Some(probe()?);
        }
        load.cpu_before_ns = clock::thread_cpu_ns();
        self.idle_ns = 0;
        load.tally.opened_ns = Some(clock::now_ns());
        Ok(())
    }

    fn close_window(&mut self) -> Result<(), String> {
        let Some(load) = &mut self.load else { return Ok(()) };
        let now_ns = clock::now_ns();
        load.busy_ns = if load.plan.spin {
            (now_ns - load.tally.opened_ns.unwrap_or(now_ns)).saturating_sub(self.idle_ns)
        } else {
            clock::thread_cpu_ns() - load.cpu_before_ns
        };
        if let Some(probe) = &mut load.plan.probe {
            load.after = Some(probe()?);
        }
        load.tally.closed_ns = Some(now_ns);
        Ok(())
    }

    /// Ends the plan: counts what is unfinished, closes or keeps the connections, reports.
    fn finish(&mut self, error: Option<String>) {
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
            usage: load.after.zip(load.before).map(|(after, before)| after.since(&before)),
            backend: Counts {
                connections: counts.connections - load.backend_before.connections,
                requests: counts.requests - load.backend_before.requests,
                housekeeping: counts.housekeeping - load.backend_before.housekeeping,
                refused: counts.refused - load.backend_before.refused,
                cut: counts.cut - load.backend_before.cut,
                example: counts.example.clone(),
            },
        };
        let _ = load.reply.send(Ok(report));
    }
}

fn socket(bind: Option<Ipv4Addr>) -> Result<OwnedFd, String> {
    // SAFETY: numbers only; the descriptor returned is fresh and owned below.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(format!("socket: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: fresh from the call above.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    no_delay(&fd);
    if let Some(source) = bind {
        let address = ring::sockaddr(SocketAddrV4::new(source, 0));
        let size = size_of::<libc::sockaddr_in>() as u32;
        // SAFETY: a valid address of the size given.
        if unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), size) } != 0 {
            return Err(format!("bind to {source}: {}", std::io::Error::last_os_error()));
        }
    }
    Ok(fd)
}

fn no_delay(fd: &OwnedFd) {
    let on: libc::c_int = 1;
    // SAFETY: a valid option value of the size given. Failure would show as delays of 40 ms in the direct run.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NODELAY,
            std::ptr::from_ref(&on).cast(),
            4,
        )
    };
}

#[cfg(test)]
mod tests;
