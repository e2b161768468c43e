//! A connected stream socket on the shard's ring: reads and writes that own their buffers, and the few direct system
//! calls that need no waiting.
//!
//! *Invariant*: at most one read and one write are in flight on a socket at a time. A dropped read or write is not a
//! cancelled one: the kernel keeps descriptor and buffer until its completion, which monoio sees to.
//! *Cost*: one submission per read or write; `peek`, `progress` and `shutdown_*` are one system call each.

use std::cell::UnsafeCell;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::rc::Rc;

use monoio::buf::{IoBuf, IoBufMut};
use monoio::io::{AsyncReadRent, AsyncWriteRent};
use monoio::net::{TcpStream, UnixStream};

/// What became of an operation, and its buffer back.
pub type Outcome<T> = (io::Result<T>, Vec<u8>);

/// A write that did not go through whole.
#[derive(Debug)]
pub struct WriteError {
    /// Bytes that the kernel took before it failed.
    pub written: usize,
    pub error: io::Error,
}

/// Cheap to clone: clones share the descriptor, which closes when the last one and the last operation are gone.
#[derive(Clone)]
pub struct Socket {
    stream: Rc<UnsafeCell<TcpStream>>,
    fd: RawFd,
}

impl Socket {
    /// Takes over a connected (or listening, or event) descriptor. `TcpStream` is monoio's name for "a descriptor read
    /// by `recv` and written by `send`"; Unix stream sockets are served by the same calls.
    pub fn new(fd: OwnedFd) -> io::Result<Socket> {
        let raw = fd.as_raw_fd();
        let stream = TcpStream::from_std(std::net::TcpStream::from(fd))?;
        Ok(Socket { stream: Rc::new(UnsafeCell::new(stream)), fd: raw })
    }

    /// Connects over TCP, with Nagle's delay off.
    pub async fn connect_tcp(address: SocketAddr) -> io::Result<Socket> {
        let stream = TcpStream::connect_addr(address).await?;
        stream.set_nodelay(true)?;
        let fd = stream.as_raw_fd();
        Ok(Socket { stream: Rc::new(UnsafeCell::new(stream)), fd })
    }

    /// Connects to a Unix stream socket.
    pub async fn connect_unix(path: &Path) -> io::Result<Socket> {
        use std::os::fd::IntoRawFd;
        let raw = UnixStream::connect(path).await?.into_raw_fd();
        // SAFETY: `into_raw_fd` gave up the only owner of this open descriptor.
        Socket::new(unsafe { OwnedFd::from_raw_fd(raw) })
    }

    #[expect(clippy::mut_from_ref, reason = "monoio wants `&mut` for what is one submission through `&`")]
    fn stream(&self) -> &mut TcpStream {
        // SAFETY: single-threaded (`Rc`). A future made from this reference keeps it, but touches the stream only in its
        // first poll, where it clones the stream's descriptor into the operation; no such poll re-enters this function. So no
        // two references are ever used at the same time. monoio's own split halves rest on the same.
        unsafe { &mut *self.stream.get() }
    }

    /// Reads into `buf` behind its `len()` bytes, at most to its capacity; 0 is the end of the stream.
    ///
    /// The operation is submitted when the future is first polled.
    pub fn read_more(&self, buf: Vec<u8>) -> impl Future<Output = Outcome<usize>> + use<> {
        let socket = self.clone();
        async move {
            let (len, capacity) = (buf.len(), buf.capacity());
            debug_assert!(len < capacity, "a read needs room");
            let (result, slice) = socket.stream().read(buf.slice_mut(len..capacity)).await;
            (result, slice.into_inner())
        }
    }

    /// Reads what is there behind `buf`'s content, at most `limit` bytes and never beyond its capacity, without waiting.
    /// `Ok(None)`: nothing is there; `Ok(Some(0))`: the end of the stream.
    pub fn try_read(&self, buf: &mut Vec<u8>, limit: usize) -> io::Result<Option<usize>> {
        let room = buf.spare_capacity_mut();
        let len = room.len().min(limit);
        debug_assert!(len > 0, "a read needs room");
        // SAFETY: `room` is writable memory of at least `len` bytes.
        let n = unsafe { libc::recv(self.fd, room.as_mut_ptr().cast(), len, libc::MSG_DONTWAIT) };
        match n {
            0.. => {
                // SAFETY: the kernel has written `n` bytes behind the content, within the capacity.
                unsafe { buf.set_len(buf.len() + n as usize) };
                Ok(Some(n as usize))
            }
            _ => match io::Error::last_os_error() {
                e if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
                e => Err(e),
            },
        }
    }

    /// Writes what the kernel takes without waiting; 0 when it takes nothing just now.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: `bytes` is readable memory of the length given.
        let n = unsafe {
            libc::send(self.fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
        match n {
            0.. => Ok(n as usize),
            _ => match io::Error::last_os_error() {
                e if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
                e => Err(e),
            },
        }
    }

    /// Writes `buf[range]` whole, by the ring: the writes of one turn of the loop go out together, so that a peer that
    /// sleeps is woken once for all of them. (Sent one by one as they arise, the whole request costs 4 % more.)
    pub fn write(
        &self,
        buf: Vec<u8>,
        range: Range<usize>,
    ) -> impl Future<Output = (Result<(), WriteError>, Vec<u8>)> + use<> {
        let socket = self.clone();
        async move {
            let (mut buf, mut at) = (buf, range.start);
            let failed = |at, error| Err(WriteError { written: at - range.start, error });
            while at < range.end {
                let (result, slice) = socket.stream().write(buf.slice(at..range.end)).await;
                buf = slice.into_inner();
                match result {
                    Ok(0) => return (failed(at, io::ErrorKind::WriteZero.into()), buf),
                    Ok(n) => at += n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return (failed(at, e), buf),
                }
            }
            (Ok(()), buf)
        }
    }

    /// Writes the whole of `buf`.
    pub fn write_all(&self, buf: Vec<u8>) -> impl Future<Output = (Result<(), WriteError>, Vec<u8>)> + use<> {
        let whole = 0..buf.len();
        self.write(buf, whole)
    }

    /// Waits until a read would not block, without holding a buffer.
    pub async fn readable(&self) -> io::Result<()> {
        self.stream().readable(false).await
    }

    /// What an idle connection has to say, without waiting and without taking it.
    pub fn peek(&self) -> Peek {
        let mut byte = 0u8;
        // SAFETY: `byte` is one writable byte, `fd` is open while `self` lives.
        let n =
            unsafe { libc::recv(self.fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        match n {
            0 => Peek::Closed,
            n if n > 0 => Peek::Data,
            _ => match io::Error::last_os_error().kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Peek::Quiet,
                _ => Peek::Closed,
            },
        }
    }

    /// Whether the peer has shut its sending side down or the connection failed, whatever lies unread before it.
    pub fn hung_up(&self) -> Hangup {
        let mut poll = libc::pollfd { fd: self.fd, events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one valid pollfd, and no waiting.
        let n = unsafe { libc::poll(&mut poll, 1, 0) };
        match poll.revents {
            events if n > 0 && events & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0 => Hangup::Full,
            events if n > 0 && events != 0 => Hangup::Half,
            _ => Hangup::None,
        }
    }

    /// How far the connection has come, as TCP tells. `None` on Unix sockets.
    pub fn progress(&self) -> Option<Progress> {
        const LEN: usize = std::mem::size_of::<TcpInfoHead>();
        let mut info = TcpInfoHead::default();
        let mut len = LEN as libc::socklen_t;
        // SAFETY: `info` is plain integers of at least `len` bytes; the kernel writes at most `len`.
        let result = unsafe {
            libc::getsockopt(self.fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &mut len)
        };
        (result == 0 && len as usize == LEN)
            .then_some(Progress { acked: info.bytes_acked, closed: info.bytes[0] == TCP_CLOSE })
    }

    /// No more reads: a waiting one ends as at the end of the stream. Writing goes on.
    pub fn shutdown_read(&self) {
        shutdown(self.fd, libc::SHUT_RD);
    }

    /// Says to the peer that nothing more comes.
    pub fn shutdown_write(&self) {
        shutdown(self.fd, libc::SHUT_WR);
    }

    /// Ends both directions now, whatever operations are in flight.
    pub fn shutdown_both(&self) {
        shutdown(self.fd, libc::SHUT_RDWR);
    }

    /// Closing will reset the connection, so that the peer cannot take what it has for the whole.
    pub fn reset_on_close(&self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: `linger` is a valid `struct linger` for the length given.
        unsafe {
            libc::setsockopt(
                self.fd,
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                std::mem::size_of::<libc::linger>() as libc::socklen_t,
            );
        }
    }

    /// The peer's address. `None`: it has none (a Unix socket), or the connection is over.
    pub fn peer(&self) -> Option<IpAddr> {
        // SAFETY: the descriptor is open while `self` lives.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        socket2::SockRef::from(&fd).peer_addr().ok()?.as_socket().map(|address| address.ip())
    }

    pub fn fd(&self) -> RawFd {
        self.fd
    }
}

/// Shuts `fd` down; an error means that it is already.
pub fn shutdown(fd: RawFd, how: i32) {
    // SAFETY: shutdown takes no pointer; a descriptor that is not a connected socket gives an error, nothing else.
    unsafe { libc::shutdown(fd, how) };
}

/// See [`Socket::hung_up`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hangup {
    None,
    /// It sends no more, but may still read.
    Half,
    /// The connection is over.
    Full,
}

/// See [`Socket::progress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of ours that the peer's kernel has acknowledged, the SYN counting as one.
    pub acked: u64,
    /// The connection is over both ways: after a FIN of the peer's, a reset came.
    pub closed: bool,
}

/// `TCP_CLOSE` of the kernel's connection states (net/tcp_states.h).
const TCP_CLOSE: u8 = 7;

/// See [`Socket::peek`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peek {
    Quiet,
    Data,
    Closed,
}

/// The head of the kernel's `struct tcp_info` up to `tcpi_bytes_acked` (linux/tcp.h; the field is there since 4.1).
/// The libc crate's own struct ends before it.
#[repr(C)]
#[derive(Default)]
struct TcpInfoHead {
    bytes: [u8; 8],
    words: [u32; 24],
    pacing_rates: [u64; 2],
    bytes_acked: u64,
}

const _: () = assert!(std::mem::offset_of!(TcpInfoHead, bytes_acked) == 120);

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    /// The offset of `bytes_acked` holds on this kernel, and it counts what the peer's kernel took: one more than the
    /// payload, because the SYN counts.
    #[test]
    fn acked_counts_payload_and_syn() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(&[7; 1000]).unwrap();
        let mut taken = [0; 1000];
        server.read_exact(&mut taken).unwrap();
        server.write_all(b"x").unwrap();
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        let mut runtime =
            monoio::RuntimeBuilder::<monoio::LegacyDriver>::new().build().expect("an epoll runtime");
        client.set_nonblocking(true).unwrap();
        let progress = runtime.block_on(async { Socket::new(OwnedFd::from(client)).unwrap().progress() });
        assert_eq!(progress, Some(Progress { acked: 1001, closed: false }));
    }
}
