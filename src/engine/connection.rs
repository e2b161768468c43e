//! One client connection of the simulated engine: requests in, bytes out, and a watch for the client's going.
//!
//! A read is one future that owns its half of the socket and its buffer. It stays armed while an answer is being made,
//! which is how a client's FIN or reset is seen at once; what it brings is kept for the next request.
//!
//! *Invariant*: no operation's future is dropped before it has completed, except when the whole connection goes; so no
//! byte is lost to a cancelled read.
//! *Bound and cost*: heads as [`HEAD_BYTES_MAX`], bodies as [`BODY_BYTES_MAX`]. A client that sends more while its answer
//! is being made is read once, then no longer watched: its going shows when the answer is written.
//! *Errors*: [`ReadError`].
//! *Source*: RFC 9112 through [`crate::proto::http1`].

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use monoio::buf::IoBufMut;
use monoio::io::{
    AsyncReadRent, AsyncWriteRent, AsyncWriteRentExt, OwnedReadHalf, OwnedWriteHalf, Splitable,
};
use monoio::net::TcpStream;
use monoio::time::sleep;

use super::error::ApiError;
use crate::proto::http1::{
    BodyReader, Framing, HeadLimits, HeadScan, Method, Parse, RequestHead, parse_request,
};

/// A request head.
pub const HEAD_BYTES_MAX: u32 = 64 * 1024;
/// A request body.
pub const BODY_BYTES_MAX: u64 = 512 * 1024 * 1024;
/// Read at once where a head is expected, and where a body is.
const HEAD_READ_BYTES: usize = 4 * 1024;
const BODY_READ_BYTES: usize = 128 * 1024;
/// A body read slowly is read this often.
const SLOW_READS_PER_S: u64 = 20;

/// Why no request could be read.
#[derive(Debug)]
pub enum ReadError {
    /// The client closed or the connection failed, in the middle of a request.
    Gone,
    /// To be answered so; the connection cannot go on.
    Refused(ApiError),
}

/// What the head of a request says.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: Method,
    /// Without the query.
    pub path: String,
    pub keep_alive: bool,
    /// 0 or 1: HTTP/1.x.
    pub minor: u8,
    pub framing: Framing,
    pub expect_continue: bool,
    pub content_encoding: Option<String>,
    /// Value of the fault header.
    pub fault: Option<String>,
}

type ReadDone = (io::Result<usize>, Vec<u8>, OwnedReadHalf<TcpStream>);

enum Reader {
    Idle(OwnedReadHalf<TcpStream>),
    Armed(Pin<Box<dyn Future<Output = ReadDone>>>),
    /// Only while one state gives way to the next.
    Changing,
}

/// See the module's text.
pub struct Connection {
    reader: Reader,
    writer: OwnedWriteHalf<TcpStream>,
    fd: RawFd,
    /// Bytes read and not yet used; empty while a read is armed, which has the buffer then.
    buf: Vec<u8>,
    /// EOF or a failed read was seen.
    gone: bool,
    limits: HeadLimits,
    pub bytes_in: u64,
    pub bytes_out: u64,
}

impl Connection {
    pub fn new(stream: TcpStream) -> Self {
        // A failure only costs latency, and the socket may be closed already.
        let _ = stream.set_nodelay(true);
        let fd = stream.as_raw_fd();
        let (reader, writer) = stream.into_split();
        Connection {
            reader: Reader::Idle(reader),
            writer,
            fd,
            buf: Vec::new(),
            gone: false,
            limits: HeadLimits::new(HEAD_BYTES_MAX, b""),
            bytes_in: 0,
            bytes_out: 0,
        }
    }

    fn arm(&mut self, room: usize) {
        if !matches!(self.reader, Reader::Idle(_)) {
            return;
        }
        let Reader::Idle(mut half) = std::mem::replace(&mut self.reader, Reader::Changing) else {
            unreachable!()
        };
        let mut buf = std::mem::take(&mut self.buf);
        buf.reserve(room);
        let (from, to) = (buf.len(), buf.len() + room);
        self.reader = Reader::Armed(Box::pin(async move {
            let (result, slice) = half.read(buf.slice_mut(from..to)).await;
            (result, slice.into_inner(), half)
        }));
    }

    /// Ready once the armed read has completed, with the bytes it added; 0: the client has closed or the connection
    /// failed.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        let Reader::Armed(read) = &mut self.reader else { return Poll::Ready(0) };
        let (result, buf, half) = std::task::ready!(read.as_mut().poll(cx));
        self.buf = buf;
        self.reader = Reader::Idle(half);
        let bytes = result.unwrap_or(0);
        self.gone |= bytes == 0;
        Poll::Ready(bytes)
    }

    /// Reads more into `buf`; `false` at the end.
    async fn fill(&mut self, room: usize) -> bool {
        if self.gone {
            return false;
        }
        self.arm(room);
        poll_fn(|cx| self.poll_read(cx)).await > 0
    }

    /// Ready once the client has closed. Never, where it has sent more than its request.
    pub fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.gone {
            return Poll::Ready(());
        }
        if let Reader::Idle(_) = self.reader {
            if !self.buf.is_empty() {
                return Poll::Pending;
            }
            self.arm(HEAD_READ_BYTES);
        }
        match self.poll_read(cx) {
            Poll::Ready(0) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Waits for `event`, but not longer than the client does; `None`: it has gone.
    pub async fn unless_gone<T>(&mut self, event: impl Future<Output = T>) -> Option<T> {
        let mut event = pin!(event);
        poll_fn(|cx| {
            if let Poll::Ready(value) = event.as_mut().poll(cx) {
                return Poll::Ready(Some(value));
            }
            self.poll_gone(cx).map(|()| None)
        })
        .await
    }

    /// Waits `ms`, or until the client sends something or closes; `true` if it did.
    pub async fn heard_within(&mut self, ms: u64) -> bool {
        if self.gone || !self.buf.is_empty() {
            return true;
        }
        self.arm(HEAD_READ_BYTES);
        let mut over = pin!(sleep(Duration::from_millis(ms)));
        poll_fn(|cx| {
            if self.poll_read(cx).is_ready() {
                return Poll::Ready(true);
            }
            over.as_mut().poll(cx).map(|()| false)
        })
        .await
    }

    /// The next request's head; `None`: the client closed between requests. `begun` is called when its first bytes are
    /// there.
    pub async fn next_request(&mut self, mut begun: impl FnMut()) -> Result<Option<Request>, ReadError> {
        let mut scan = HeadScan::default();
        let mut head = RequestHead::default();
        loop {
            if !self.buf.is_empty() {
                begun();
                match parse_request(&self.buf, &mut scan, &self.limits, &mut head) {
                    Ok(Parse::Complete) => break,
                    Ok(Parse::Partial) => {}
                    Err(fault) => {
                        let status = fault.rejection.row().status;
                        return Err(ReadError::Refused(ApiError::new(status, fault.what.to_owned())));
                    }
                }
            }
            if !self.fill(HEAD_READ_BYTES).await {
                return if self.buf.is_empty() { Ok(None) } else { Err(ReadError::Gone) };
            }
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let request = Request {
            method: head.method,
            path: text(head.path(&self.buf)),
            keep_alive: head.keep_alive,
            minor: head.minor,
            framing: head.framing,
            expect_continue: head.expect_continue,
            content_encoding: head.content_encoding.map(|span| text(span.of(&self.buf))),
            fault: head
                .named(&self.buf, super::fault::HEADER.as_bytes())
                .map(|span| text(span.of(&self.buf))),
        };
        self.buf.drain(..head.head_len);
        Ok(Some(request))
    }

    /// The body of `request`, at `bytes_per_s` where that is stated.
    pub async fn body(&mut self, request: &Request, bytes_per_s: Option<u64>) -> Result<Vec<u8>, ReadError> {
        let too_large = || {
            let message = format!("the body is over the limit of {BODY_BYTES_MAX} bytes");
            Err(ReadError::Refused(ApiError::new(413, message)))
        };
        if let Framing::Length(bytes) = request.framing
            && bytes > BODY_BYTES_MAX
        {
            return too_large();
        }
        let mut reader = BodyReader::new(request.framing);
        let mut body = Vec::new();
        if request.expect_continue
            && self.buf.is_empty()
            && !self.send(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec()).await.0
        {
            return Err(ReadError::Gone);
        }
        loop {
            let mut at = 0;
            while at < self.buf.len() && !reader.is_done() {
                let decoded = reader
                    .decode(&self.buf[at..])
                    .map_err(|fault| ReadError::Refused(ApiError::new(400, fault.what.to_owned())))?;
                body.extend_from_slice(&self.buf[at..][decoded.data]);
                at += decoded.consumed;
            }
            self.buf.drain(..at);
            self.bytes_in += at as u64;
            if let Some(rate) = bytes_per_s {
                sleep(Duration::from_millis(at as u64 * 1000 / rate)).await;
            }
            if body.len() as u64 > BODY_BYTES_MAX {
                return too_large();
            }
            if reader.is_done() {
                return Ok(body);
            }
            let room = match bytes_per_s {
                None => BODY_READ_BYTES,
                Some(rate) => (rate / SLOW_READS_PER_S).clamp(1, BODY_READ_BYTES as u64) as usize,
            };
            if !self.fill(room).await {
                return Err(ReadError::Gone);
            }
        }
    }

    /// Sends all of `bytes`; gives the buffer back and whether that worked.
    pub async fn send(&mut self, bytes: Vec<u8>) -> (bool, Vec<u8>) {
        if bytes.is_empty() {
            return (true, bytes);
        }
        let (result, bytes) = self.writer.write_all(bytes).await;
        if let Ok(sent) = result {
            self.bytes_out += sent as u64;
        }
        (result.is_ok(), bytes)
    }

    /// Says that no more comes, and waits shortly for the client to close, so that unread bytes of its request do not
    /// turn the answer into a reset.
    pub async fn linger(&mut self) {
        if self.writer.shutdown().await.is_err() {
            return;
        }
        let mut over = pin!(sleep(Duration::from_millis(500)));
        for _ in 0..1024 {
            if self.gone {
                return;
            }
            self.buf.clear();
            self.arm(BODY_READ_BYTES);
            let heard = poll_fn(|cx| {
                if self.poll_read(cx).is_ready() {
                    return Poll::Ready(true);
                }
                over.as_mut().poll(cx).map(|()| false)
            });
            if !heard.await {
                return;
            }
        }
    }

    /// Sends a reset: the connection is of no use any more.
    pub fn reset(&self) {
        socket::reset(self.fd);
    }

    pub fn fd(&self) -> RawFd {
        self.fd
    }
}

/// The few socket calls that monoio has no word for.
pub mod socket {
    use std::os::fd::RawFd;

    /// Ends both directions: reads and accepts in progress complete, and further connects to a listener are refused.
    pub fn shutdown(fd: RawFd) {
        // SAFETY: no memory is passed; a descriptor that is not a connected socket is answered with an error.
        unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
    }

    /// Sends RST at once and gives the connection up. (`SO_LINGER` would not do: monoio's write half sends a FIN when it
    /// is dropped, ahead of the close.)
    pub fn reset(fd: RawFd) {
        let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
        // SAFETY: the pointer and length describe `nowhere`, which outlives the call; the call only reads it.
        unsafe { libc::connect(fd, &raw const nowhere, size_of::<libc::sockaddr>() as libc::socklen_t) };
    }

    /// The peer has closed or reset, and everything it sent before has been read.
    pub fn peer_gone(fd: RawFd) -> bool {
        let mut byte = 0u8;
        // SAFETY: the pointer and length describe `byte`, which outlives the call; the call does not wait.
        let result =
            unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        match result {
            0 => true,
            -1 => std::io::Error::last_os_error().kind() != std::io::ErrorKind::WouldBlock,
            _ => false,
        }
    }
}
