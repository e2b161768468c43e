//! Accepts clients: one SO_REUSEPORT listener per shard and address, and the hand-off to a less busy shard.
//!
//! The kernel spreads connections over the listeners by hash, which is uneven when they are few and live long. A shard
//! that is well above its peers hands a fresh connection on before anything is read from it.
//!
//! *Invariant*: waiting for clients is a poll, and accepting never waits, so stopping loses no descriptor: what is in the
//! queue is accepted before the listener closes.
//! *Errors*: out of descriptors: pauses and tries again; `connections_max` reached: 503 and close.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use super::session;
use super::socket::Socket;
use super::state::Shard;
use crate::proto::config::Profile;
use crate::proto::error::Rejection;
use crate::proto::ids::ShardId;
use crate::proto::message::{Message, Notice, Phase, Urgency};

/// Clients waiting to be accepted, per listener (the kernel caps it at net.core.somaxconn).
const BACKLOG: i32 = 4096;
/// Pause when the process is out of descriptors.
const PAUSE: Duration = Duration::from_millis(50);
/// A shard hands a connection on when it has this many more than the least busy one, and a quarter more than the mean.
const SKEW_MIN: u32 = 2;

/// Fails if somebody listens on `address` already: sharing it with another process's SO_REUSEPORT listeners would split the
/// clients between the two without a word.
pub fn probe(address: SocketAddr) -> io::Result<()> {
    let socket = socket(address)?;
    socket.bind(&address.into())?;
    socket.listen(1)
}

fn socket(address: SocketAddr) -> io::Result<socket2::Socket> {
    let domain = socket2::Domain::for_address(address);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, Some(socket2::Protocol::TCP))?;
    // What lingers of former connections is not somebody who listens.
    socket.set_reuse_address(true)?;
    Ok(socket)
}

/// Binds a listener that shares its address with the other shards' ones.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket(address)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Accepts until the shard drains. `index`: of the listener.
pub async fn accept(shard: Rc<Shard>, listener: TcpListener, index: u16, nonblocking: bool) {
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    let fd = listener.as_raw_fd();
    let Ok(listener) = Socket::new(OwnedFd::from(listener)) else { return };
    while shard.phase.get() < Phase::Draining {
        let mut readable = std::pin::pin!(listener.readable());
        std::future::poll_fn(|cx| {
            if shard.phase.get() >= Phase::Draining {
                return Poll::Ready(());
            }
            shard.acceptors.borrow_mut().push(cx.waker().clone());
            readable.as_mut().poll(cx).map(|_| ())
        })
        .await;
        // When the shard drains, too: whoever is in the queue by now has been let in.
        match accept_all(&shard, fd, index, nonblocking) {
            Ok(()) => {}
            Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK)) => {
                let text = format!("shard {} accepts no more: {e}", shard.id.0);
                shard.notify(Notice::Failed { shard: shard.id, text });
                return;
            }
            // Out of descriptors or memory, or a network error of the one connection (accept(2)): it may pass.
            Err(_) => monoio::time::sleep(PAUSE).await,
        }
    }
}

fn accept_all(shard: &Rc<Shard>, listener: RawFd, index: u16, nonblocking: bool) -> io::Result<()> {
    // io_uring wants blocking sockets (it waits for us), epoll non-blocking ones.
    let flags = libc::SOCK_CLOEXEC | if nonblocking { libc::SOCK_NONBLOCK } else { 0 };
    loop {
        // SAFETY: no address is asked for; a wrong descriptor is an error, nothing else.
        let fd = unsafe { libc::accept4(listener, std::ptr::null_mut(), std::ptr::null_mut(), flags) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN) => return Ok(()),
                // The client has gone already, or a signal came.
                Some(libc::ECONNABORTED | libc::EINTR | libc::EPROTO | libc::EPERM) => continue,
                _ => return Err(error),
            }
        }
        // SAFETY: accept4 gave this descriptor to us alone.
        place(shard, unsafe { OwnedFd::from_raw_fd(fd) }, index);
    }
}

/// Serves a fresh connection here, or hands it to the least busy shard.
fn place(shard: &Rc<Shard>, fd: OwnedFd, listener: u16) {
    // SAFETY: the option is an int of the length given.
    unsafe {
        let on: libc::c_int = 1;
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NODELAY,
            (&raw const on).cast(),
            std::mem::size_of::<libc::c_int>() as libc::socklen_t,
        );
    }
    let own = shard.figures.borrow().connections;
    let mut peers = shard.peers.borrow_mut();
    peers[shard.id.index()] = own;
    let total: u32 = peers.iter().sum();
    if total >= shard.limits.connections_max {
        drop(peers);
        turn_away(shard, fd, shard.profiles[usize::from(listener)]);
        return;
    }
    let (least, &fewest) =
        peers.iter().enumerate().min_by_key(|(_, count)| **count).expect("one shard at least");
    let skewed = own >= fewest + SKEW_MIN && u64::from(own) * shard.shards as u64 * 4 > u64::from(total) * 5;
    if skewed && least != shard.id.index() {
        peers[least] += 1;
        drop(peers);
        let message = Message::Socket { fd: std::os::fd::IntoRawFd::into_raw_fd(fd), listener };
        shard.port.borrow_mut().send_kept(ShardId(least as u8), message, Urgency::Wake);
        return;
    }
    drop(peers);
    adopt(shard, fd, listener);
}

/// Serves a connection on this shard that came by that listener.
pub fn adopt(shard: &Rc<Shard>, fd: OwnedFd, listener: u16) {
    let profile = shard.profiles[usize::from(listener)];
    if let Ok(socket) = Socket::new(fd) {
        monoio::spawn(session::serve(shard.clone(), socket, profile, session::Open::new(shard)));
    }
}

/// Too many connections: says so if that takes no waiting, and closes.
fn turn_away(shard: &Shard, fd: OwnedFd, profile: Profile) {
    shard.figures.borrow_mut().rejections[Rejection::AtCapacity as usize] += 1;
    let body = Rejection::AtCapacity
        .body(crate::proto::classify::Api::OpenAi, Some("too many connections (limits.connections_max)"));
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {}\r\nRetry-After: 1\r\n",
        body.len()
    );
    let faces = shard.faces();
    let reason = Rejection::AtCapacity.row().reason.as_bytes();
    let answer = match profile {
        Profile::OpenAi => {
            [head.as_bytes(), &faces.reject_reason, reason, b"\r\nConnection: close\r\n\r\n", &body].concat()
        }
        Profile::Stargate => {
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec()
        }
    };
    // SAFETY: the buffer is as long as said; the send does not wait.
    unsafe {
        libc::send(
            fd.as_raw_fd(),
            answer.as_ptr().cast(),
            answer.len(),
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        );
    }
}
