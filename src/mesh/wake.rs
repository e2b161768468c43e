//! Waking a sleeper: an eventfd, written only when its owner armed it.
//!
//! The owner arms, looks at its rings once more, and sleeps; a producer pushes, then looks whether the owner is armed. Both
//! put a sequentially consistent fence between their two steps, so at least one of them sees the other.
//!
//! *Invariant*: between two arms at most one write.
//! *Bound and cost*: one load per urgent message to an owner who is awake.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// One flag per cache line: neighbours' flags are written by other cores.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Waker {
    armed: AtomicBool,
    event: OwnedFd,
}

impl Waker {
    /// Armed from the start: what is sent before the owner's first sleep is not missed.
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers; a negative answer is an error.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nobody else has it.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Waker { armed: AtomicBool::new(true), event })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    pub(super) fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
    }

    /// To be called after the push.
    pub(super) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            let one = 1_u64.to_ne_bytes();
            loop {
                // SAFETY: `one` is 8 readable bytes, and the descriptor is open as long as `self`.
                let written = unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
                if written == 8 {
                    return;
                }
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The counter is at its top: the owner has 2^64 reasons to wake already.
                    Some(libc::EAGAIN) => return,
                    _ => panic!("write to an eventfd: {error}"),
                }
            }
        }
    }

    pub(super) fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        // SAFETY: fcntl with F_GETFL takes no pointers.
        let flags = unsafe { libc::fcntl(self.fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
        // SAFETY: fcntl with F_SETFL takes no pointers.
        if unsafe { libc::fcntl(self.fd(), libc::F_SETFL, flags) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}
