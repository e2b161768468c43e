//! The client's side of a connection: bytes read and not yet used, and the watch for the client going away.
//!
//! *Invariant*: no buffer waits for the client: a poll does, and what has arrived is read without waiting.
//! *Bound*: bytes of later requests that arrive early are kept up to [`EARLY_BYTES_MAX`]; beyond it nothing is read until
//! the present request is done (the kernel's window then holds the client), and a look at the socket every [`LOOK`]
//! replaces the watch.

use std::future::Future;
use std::os::fd::RawFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use monoio::time::{Sleep, sleep};

use super::armed::ArmedPoll;
use super::buffers::MEDIUM_BYTES;
use super::deadline::{Action, Timer};
use super::lazy_write::{LazyWrite, NUDGE_MS};
use super::socket::{Hangup, Peek, Socket};
use super::state::Shard;
use crate::clock::Nanos;
use crate::proto::config::Profile;
use crate::proto::ids::ClientId;

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
    /// Whose contract its listener follows.
    pub profile: Profile,
    /// Bytes received; the first `used` are done with.
    inbox: Vec<u8>,
    used: usize,
    armed: ArmedPoll,
    /// The piece of the answer that was written last, if nobody has looked whether it is through.
    writing: LazyWrite,
    /// The client has shut its sending side down (or failed).
    end: Option<End>,
    /// Who it counts as where a request names nobody; asked for once.
    peer: Option<ClientId>,
    /// Runs while the watch cannot read because too much has come early.
    look: Option<Pin<Box<Sleep>>>,
}

impl Client {
    pub fn new(shard: Rc<Shard>, socket: Socket, profile: Profile, timer: Timer) -> Client {
        Client {
            shard,
            socket,
            timer,
            profile,
            inbox: Vec::new(),
            used: 0,
            armed: ArmedPoll::default(),
            writing: LazyWrite::default(),
            end: None,
            peer: None,
            look: None,
        }
    }

    /// Who its requests count as that name neither session nor key.
    pub fn peer(&mut self) -> ClientId {
        let (socket, caller) = (&self.socket, &self.shard.limits.caller);
        *self.peer.get_or_insert_with(|| socket.peer().map_or(ClientId(0), |ip| caller.client_of_peer(ip)))
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

    /// Takes what has arrived, at most `limit` bytes. False: nothing was there.
    fn take(&mut self, limit: usize) -> bool {
        if self.end.is_some() {
            return false;
        }
        if self.inbox.capacity() == 0 {
            self.inbox = self.shard.buffers.take(MEDIUM_BYTES);
        } else if self.inbox.len() == self.inbox.capacity() {
            self.inbox.reserve(MEDIUM_BYTES.min(limit));
        }
        match self.socket.try_read(&mut self.inbox, limit) {
            Ok(None) => return false,
            Ok(Some(n)) if n > 0 => return true,
            Ok(_) if self.timer.fired() => self.end = Some(End::Deadline),
            Ok(_) => self.end = Some(End::Closed),
            Err(_) if self.timer.fired() => self.end = Some(End::Deadline),
            Err(_) => self.end = Some(End::Failed),
        }
        false
    }

    /// Waits for the socket to have something to read. False: the deadline passed first, with [`Action::Wake`].
    async fn readable(&mut self) -> bool {
        std::future::poll_fn(|cx| match self.armed.poll_readable(&self.socket, cx) {
            Poll::Ready(_) => Poll::Ready(true),
            Poll::Pending => self.timer.poll_woken(cx).map(|()| false),
        })
        .await
    }

    /// Waits until something has come. `Ok(false)`: the deadline passed first, with [`Action::Wake`].
    pub async fn more(&mut self) -> Result<bool, End> {
        self.more_of(usize::MAX).await
    }

    async fn more_of(&mut self, limit: usize) -> Result<bool, End> {
        loop {
            if let Some(end) = self.end {
                return Err(end);
            }
            if !self.readable().await {
                return Ok(false);
            }
            if self.take(limit) {
                return Ok(true);
            }
        }
    }

    /// Reads until `want` unread bytes are there; nothing beyond them is taken. Each wait may last `idle_ms`.
    pub async fn fill(&mut self, want: usize, idle_ms: u64) -> Result<(), End> {
        while self.unread().len() < want {
            let missing = want - self.unread().len();
            if self.inbox.capacity() - self.inbox.len() < missing {
                self.inbox.reserve_exact(missing);
            }
            // What has arrived meanwhile needs no waiting.
            if !self.take(missing) {
                self.arm_deadline(idle_ms, Action::ShutRead);
                self.more_of(missing).await?;
            }
        }
        Ok(())
    }

    /// Waits for bytes of the body and appends them to `buf`, at most `limit`; the inbox must be empty.
    pub async fn read_body(&mut self, buf: &mut Vec<u8>, limit: usize) -> Result<usize, End> {
        debug_assert!(self.unread().is_empty());
        loop {
            if let Some(end) = self.end {
                return Err(end);
            }
            match self.socket.try_read(buf, limit) {
                Ok(Some(n)) if n > 0 => return Ok(n),
                Ok(None) => {
                    self.readable().await;
                }
                _ if self.timer.fired() => self.end = Some(End::Deadline),
                Ok(_) => self.end = Some(End::Closed),
                Err(_) => self.end = Some(End::Failed),
            }
        }
    }

    /// Puts the connection to rest: only the timer goes on. Nothing may be unread.
    pub fn rest(mut self) -> Timer {
        debug_assert!(self.unread().is_empty());
        let another = self.shard.deadlines.timer();
        std::mem::replace(&mut self.timer, another)
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
                Some(End::Closed) if self.shard.limits.half_close_allowed => match self.poll_look(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(()) => continue,
                },
                Some(_) => return Poll::Ready(Gone),
                None => {}
            }
            let woken = match self.unread().len() < EARLY_BYTES_MAX {
                true => self.armed.poll_readable(&self.socket, cx).map(|_| ()),
                false => self.poll_look(cx),
            };
            match woken {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(()) if self.unread().len() < EARLY_BYTES_MAX => {
                    self.take(EARLY_BYTES_MAX);
                }
                Poll::Ready(()) => {}
            }
        }
    }

    /// Instead of reading: every now and then asks the kernel whether the client has shut its side down.
    fn poll_look(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.armed.disarm();
        let look = self.look.get_or_insert_with(|| Box::pin(sleep(LOOK)));
        if look.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.look = None;
        match self.socket.hung_up() {
            Hangup::None => {}
            Hangup::Half => self.end = self.end.or(Some(End::Closed)),
            Hangup::Full => self.end = Some(End::Failed),
        }
        Poll::Ready(())
    }

    /// There are bytes of the client's that nobody has read: closing now would reset the connection and take what it has
    /// not yet read with it.
    pub fn is_sending(&self) -> bool {
        self.end.is_none() && (!self.unread().is_empty() || self.socket.peek() == Peek::Data)
    }

    /// Writes `out` without waiting for it. The one before must be settled.
    pub fn begin_write(&mut self, out: Vec<u8>) {
        self.begin_write_from(out, 0);
    }

    /// As [`Client::begin_write`], but straight away as far as the kernel takes it: for pieces that come one at a time, where
    /// there is nothing to send together with, and a completion would only wake the ring's next wait.
    pub fn begin_write_now(&mut self, out: Vec<u8>) {
        match self.socket.try_write(&out) {
            Ok(n) if n == out.len() => self.written(true, out),
            Ok(n) => self.begin_write_from(out, n),
            Err(_) => self.written(false, out),
        }
    }

    fn begin_write_from(&mut self, out: Vec<u8>, from: usize) {
        match self.writing.start(&self.socket, out, from) {
            Some((result, out)) => self.written(result.is_ok(), out),
            None => self.unsettled(1),
        }
    }

    /// Something of this client's is (1) or is no longer (-1) under way that a draining shard waits for.
    pub fn unsettled(&self, change: i32) {
        let count = &self.shard.unsettled;
        count.set(count.get().wrapping_add_signed(change));
    }

    fn written(&mut self, ok: bool, out: Vec<u8>) {
        self.shard.buffers.give(out);
        if !ok && self.end.is_none() {
            self.end = Some(End::Failed);
        }
    }

    /// A write was begun, and nobody has looked whether it is through.
    pub fn is_writing(&self) -> bool {
        self.writing.is_busy()
    }

    /// Looks whether the write that was begun is through. Ready at once when there is none.
    fn poll_written(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.writing.is_busy() {
            return Poll::Ready(());
        }
        self.writing.poll(cx).map(|(result, out)| {
            self.unsettled(-1);
            self.written(result.is_ok(), out);
        })
    }

    /// Waits until the write that was begun is through, `ms` at most. An error means that the client has gone.
    pub async fn settle(&mut self, ms: u64) -> Result<(), Gone> {
        if self.writing.is_busy() {
            let mut first = true;
            std::future::poll_fn(|cx| match self.poll_written(cx) {
                Poll::Ready(()) => Poll::Ready(Ok(())),
                Poll::Pending => {
                    if std::mem::take(&mut first) {
                        self.arm_deadline(ms, Action::ShutBoth);
                    }
                    self.poll_gone(cx).map(Err)
                }
            })
            .await?;
        }
        match self.end {
            Some(End::Failed) => Err(Gone),
            _ => Ok(()),
        }
    }

    /// Writes `out` and waits until it is through. False: the client is gone.
    pub async fn send(&mut self, out: Vec<u8>) -> bool {
        let ms = self.shard.limits.client_body_idle_timeout_ms;
        if self.settle(ms).await.is_err() {
            return false;
        }
        self.arm_deadline(ms, Action::ShutBoth);
        let (result, out) = self.socket.write_all(out).await;
        self.shard.buffers.give(out);
        result.is_ok()
    }

    /// Waits for `work` with the client's last piece perhaps still under way, and watches the client. From the moment
    /// that the piece is known to be through, `deadline` is in force: at that time, do the action to the descriptor.
    pub async fn watch_writing<T>(
        &mut self,
        deadline: (Nanos, RawFd, Action),
        work: impl Future<Output = T>,
    ) -> Result<T, Gone> {
        let mut work = pin!(work);
        let (at, fd, action) = deadline;
        let stall = self.shard.deadline(self.shard.limits.between_bytes_timeout_ms);
        // 0: nobody has looked at the write; 1: it is being waited for, too; 2: it is through.
        let mut stage = if self.writing.is_busy() { 0 } else { 2 };
        match stage {
            0 => self.timer.arm(self.shard.deadline(NUDGE_MS), self.socket.fd(), Action::Wake),
            _ => self.timer.arm(at, fd, action),
        }
        std::future::poll_fn(|cx| {
            if let Poll::Ready(value) = work.as_mut().poll(cx) {
                return Poll::Ready(Ok(value));
            }
            if stage == 0 && self.timer.poll_woken(cx).is_ready() {
                stage = 1;
                self.timer.arm(stall, self.socket.fd(), Action::ShutBoth);
            }
            if stage == 1 && self.poll_written(cx).is_ready() {
                stage = 2;
                self.timer.arm(at, fd, action);
            }
            self.poll_gone(cx).map(Err)
        })
        .await
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

impl Drop for Client {
    fn drop(&mut self) {
        if self.writing.is_busy() {
            self.unsettled(-1);
        }
    }
}
