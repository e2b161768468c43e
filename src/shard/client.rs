//! The client's side of a connection: bytes read and not yet used, and the watch for the client going away.
//!
//! *Invariant*: at most one read is in flight, and what it brings is never lost.
//! *Bound*: bytes of later requests that arrive early are kept up to [`EARLY_BYTES_MAX`]; beyond it nothing is read until
//! the present request is done (the kernel's window then holds the client), and a look at the socket every [`LOOK`]
//! replaces the watch.

use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use monoio::time::{Sleep, sleep};

use super::armed::ArmedRead;
use super::buffers::SMALL_BYTES;
use super::deadline::{Action, Timer};
use super::socket::Socket;
use super::state::Shard;
use crate::clock::Nanos;

/// Early bytes of later requests kept per connection.
pub const EARLY_BYTES_MAX: usize = 64 * 1024;
const LOOK: Duration = Duration::from_millis(50);

/// Why no more bytes come from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It closed, or its sending side.
    Closed,
    /// Its connection failed.
    Failed,
    /// Our deadline passed.
    Deadline,
}

/// The client went away while something else was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// See the module's text.
pub struct Client {
    pub shard: Rc<Shard>,
    pub socket: Socket,
    pub timer: Timer,
    /// Bytes received; the first `used` are done with.
    inbox: Vec<u8>,
    used: usize,
    armed: ArmedRead,
    /// The client has shut its sending side down (or failed).
    end: Option<End>,
    /// Runs while the watch cannot read because too much has come early.
    look: Option<Pin<Box<Sleep>>>,
}

impl Client {
    pub fn new(shard: Rc<Shard>, socket: Socket, timer: Timer) -> Client {
        Client {
            shard,
            socket,
            timer,
            inbox: Vec::new(),
            used: 0,
            armed: ArmedRead::default(),
            end: None,
            look: None,
        }
    }

    /// Bytes received and not yet used.
    pub fn unread(&self) -> &[u8] {
        &self.inbox[self.used..]
    }

    /// Why no more bytes come, if so.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// The first `n` unread bytes are done with.
    pub fn consume(&mut self, n: usize) {
        self.used += n;
        debug_assert!(self.used <= self.inbox.len());
        if self.used == self.inbox.len() {
            self.used = 0;
            let inbox = std::mem::take(&mut self.inbox);
            self.shard.buffers.give(inbox);
        }
    }

    /// Takes the inbox out, for writing from it without a copy; its unread part begins at the offset returned.
    pub fn lend(&mut self) -> (Vec<u8>, usize) {
        (std::mem::take(&mut self.inbox), std::mem::take(&mut self.used))
    }

    /// Gives a lent inbox back. What came meanwhile goes behind it.
    pub fn restore(&mut self, mut inbox: Vec<u8>, used: usize) {
        inbox.extend_from_slice(self.unread());
        let late = std::mem::replace(&mut self.inbox, inbox);
        self.used = used;
        self.shard.buffers.give(late);
    }

    /// Keeps a read armed, so that the client's next bytes, or its going, are seen.
    pub fn arm(&mut self) {
        if !self.armed.is_armed() && self.end.is_none() && self.unread().len() < EARLY_BYTES_MAX {
            let buf = self.shard.buffers.take(SMALL_BYTES);
            self.armed.arm(&self.socket, buf, self.timer.cancel_handle());
        }
    }

    fn absorb(&mut self, result: std::io::Result<usize>, buf: Vec<u8>) {
        match result {
            Ok(0) => self.end = Some(if self.timer.fired() { End::Deadline } else { End::Closed }),
            Ok(_) if self.inbox.is_empty() => {
                self.used = 0;
                let empty = std::mem::replace(&mut self.inbox, buf);
                self.shard.buffers.give(empty);
                return;
            }
            Ok(_) => self.inbox.extend_from_slice(&buf),
            // The sweep asked for the buffer; the connection lives.
            Err(e) if e.raw_os_error() == Some(libc::ECANCELED) => {}
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => self.end = Some(if self.timer.fired() { End::Deadline } else { End::Failed }),
        }
        self.shard.buffers.give(buf);
    }

    /// Waits until the armed read has brought something. `Ok(false)`: it was cancelled for being idle too long.
    pub async fn more(&mut self) -> Result<bool, End> {
        if let Some(end) = self.end {
            return Err(end);
        }
        if !self.armed.is_armed() {
            let buf = self.shard.buffers.take(SMALL_BYTES);
            self.armed.arm(&self.socket, buf, self.timer.cancel_handle());
        }
        let before = self.unread().len();
        let (result, buf) = std::future::poll_fn(|cx| self.armed.poll(cx)).await;
        self.absorb(result, buf);
        match self.end {
            Some(end) => Err(end),
            None => Ok(self.unread().len() > before),
        }
    }

    /// Reads until `want` unread bytes are there, straight into the inbox: nothing beyond them is taken.
    pub async fn fill(&mut self, want: usize, idle_ms: u64) -> Result<(), End> {
        while self.unread().len() < want {
            self.arm_deadline(idle_ms, Action::ShutRead);
            if self.armed.is_armed() {
                self.more().await?;
                continue;
            }
            if let Some(end) = self.end {
                return Err(end);
            }
            let missing = want - self.unread().len();
            let (mut inbox, used) = self.lend();
            inbox.reserve_exact(missing);
            let (result, inbox) = self.socket.read_at_most(inbox, missing).await;
            self.inbox = inbox;
            self.used = used;
            self.check(result)?;
        }
        Ok(())
    }

    /// Reads into `buf` behind its content, at most `limit` bytes; no read may be armed.
    pub async fn read_body(&mut self, buf: Vec<u8>, limit: usize) -> (Result<usize, End>, Vec<u8>) {
        debug_assert!(!self.armed.is_armed() && self.unread().is_empty());
        if let Some(end) = self.end {
            return (Err(end), buf);
        }
        let (result, buf) = self.socket.read_at_most(buf, limit).await;
        (self.check(result), buf)
    }

    fn check(&mut self, result: std::io::Result<usize>) -> Result<usize, End> {
        let end = match result {
            Ok(n) if n > 0 => return Ok(n),
            _ if self.timer.fired() => End::Deadline,
            Ok(_) => End::Closed,
            Err(_) => End::Failed,
        };
        self.end = Some(end);
        Err(end)
    }

    /// Puts the connection to rest: only the timer goes on. Nothing may be unread or armed.
    pub fn rest(self) -> Timer {
        debug_assert!(self.unread().is_empty() && !self.armed.is_armed());
        self.timer
    }

    pub fn is_armed(&self) -> bool {
        self.armed.is_armed()
    }

    /// At `ms` from now (0: never), do `action` to the client's socket.
    pub fn arm_deadline(&self, ms: u64, action: Action) {
        self.timer.arm(self.shard.deadline(ms), self.socket.fd(), action);
    }

    /// As [`Client::arm_deadline`], between requests.
    pub fn arm_idle(&self, at: Nanos, action: Action) {
        self.timer.arm_idle(at, self.socket.fd(), action);
    }

    /// Polls the watch. Ready once the client has gone: it closed (or, where half-closing is allowed, its connection
    /// failed).
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<Gone> {
        loop {
            match self.end {
                Some(End::Closed) if self.shard.limits.half_close_allowed => return Poll::Pending,
                Some(_) => return Poll::Ready(Gone),
                None => {}
            }
            self.arm();
            match self.armed.poll(cx) {
                Poll::Pending if self.armed.is_armed() => return Poll::Pending,
                Poll::Pending => match self.poll_look(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(()) => {}
                },
                Poll::Ready((result, buf)) => self.absorb(result, buf),
            }
        }
    }

    /// Instead of reading: every now and then asks the kernel whether the client has shut its side down.
    fn poll_look(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let look = self.look.get_or_insert_with(|| Box::pin(sleep(LOOK)));
        if look.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.look = None;
        if self.socket.hung_up() {
            self.end = Some(End::Closed);
        }
        Poll::Ready(())
    }

    /// Waits for `work` while watching the client. If the client goes first, `work` is dropped.
    pub async fn watch<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Gone> {
        let mut work = pin!(work);
        std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Ready(value) => Poll::Ready(Ok(value)),
            Poll::Pending => self.poll_gone(cx).map(Err),
        })
        .await
    }
}
