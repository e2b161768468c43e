//! One connection of the loop, either side, and the sockets under it.
//!
//! *Invariant*: while `sending`, the front of `queue` is under way and stays; a connection is dropped only when [`idle`].
//!
//! [`idle`]: Connection::idle

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::answer::AnswerReader;
use crate::backend::{Payload, ServerConnection};
use crate::load::Open;
use crate::prompts::Talk;
use crate::ring;

pub(super) enum Role {
    Server(ServerConnection),
    Client { reader: AnswerReader, open: Option<Open>, held: bool, talk: Option<Talk> },
}

pub(super) struct Connection {
    pub(super) role: Role,
    /// Connections made before this one; tells a slot's tenants apart.
    pub(super) serial: u64,
    /// To be sent, in order; the first is under way when `sending`.
    pub(super) queue: VecDeque<Payload>,
    /// Bytes of the first that are sent.
    pub(super) sent: usize,
    pub(super) address: Box<libc::sockaddr_in>,
    pub(super) connecting: bool,
    pub(super) sending: bool,
    pub(super) receiving: bool,
    pub(super) close_after_send: bool,
    pub(super) closing: bool,
    // Last, as it must be closed last.
    pub(super) fd: OwnedFd,
}

impl Connection {
    pub(super) fn new(fd: OwnedFd, role: Role, serial: u64, address: SocketAddrV4) -> Connection {
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

    pub(super) fn idle(&self) -> bool {
        !(self.connecting || self.sending || self.receiving)
    }
}

pub(super) fn socket(bind: Option<Ipv4Addr>) -> Result<OwnedFd, String> {
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

pub(super) fn no_delay(fd: &OwnedFd) {
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
