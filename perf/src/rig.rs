//! The bench's event loop: load generator and backends on one thread, so that the measured proxy has a core to itself and
//! every peer it talks to is on the other one.
//!
//! *Invariant*: a slot is freed only when no operation on it is under way; a connection has at most one send under way, and
//! its bytes stay in the slot until the completion. Completions of one turn carry the time at which the turn took them in,
//! so the generator's own work on the first does not count as delay of the last.
//! *Bound and cost*: about 9 us of core time per proxied request (two sends, two receives), nearly all in the kernel; the
//! report states how busy the thread was.
//! *Errors*: a plan that cannot start says why; what goes wrong later is a fault in its report.

mod connection;
mod event_loop;
mod plan_run;

use std::net::{SocketAddrV4, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;

use crate::load::{Plan, Report};
use crate::payload::Recipe;
use crate::sched;
use event_loop::Rig;

/// Connections that may wait to be accepted (the system may allow fewer).
const LISTEN_QUEUE: i32 = 4096;

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

#[cfg(test)]
mod tests;
