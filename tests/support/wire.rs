//! One socket and strict HTTP/1.1 reading on it, for the client's side and the engine's side alike.
//!
//! *Errors*: whatever is not clean HTTP/1.1 is a [`Fault::Malformed`] that names what was wrong; the end of the
//! connection says how it ended.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::time::now;

/// Why a read gave nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The peer closed in order; so many bytes of an unfinished head, chunk or body had come.
    Eof { unfinished: usize },
    /// The peer reset the connection.
    Reset,
    /// Nothing within the limit; so many bytes of something unfinished had come.
    Timeout { unfinished: usize },
    /// Not HTTP/1.1 as it should be.
    Malformed(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Eof { unfinished } => write!(f, "end of connection, {unfinished} bytes unfinished"),
            Fault::Reset => write!(f, "connection reset"),
            Fault::Timeout { unfinished } => write!(f, "timeout, {unfinished} bytes unfinished"),
            Fault::Malformed(what) => write!(f, "malformed: {what}"),
        }
    }
}

pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    fn set_read_timeout(&self, limit: Duration) -> io::Result<()> {
        match self {
            Socket::Tcp(s) => s.set_read_timeout(Some(limit)),
            Socket::Unix(s) => s.set_read_timeout(Some(limit)),
        }
    }
    fn set_write_timeout(&self, limit: Duration) -> io::Result<()> {
        match self {
            Socket::Tcp(s) => s.set_write_timeout(Some(limit)),
            Socket::Unix(s) => s.set_write_timeout(Some(limit)),
        }
    }
    pub fn shutdown(&self, how: std::net::Shutdown) -> io::Result<()> {
        match self {
            Socket::Tcp(s) => s.shutdown(how),
            Socket::Unix(s) => s.shutdown(how),
        }
    }
    /// The next close sends a reset instead of a FIN.
    pub fn reset_on_close(&self) {
        if let Socket::Tcp(s) = self {
            socket2::SockRef::from(s).set_linger(Some(Duration::ZERO)).expect("SO_LINGER on an open socket");
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.read(buf),
            Socket::Unix(s) => s.read(buf),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.write(buf),
            Socket::Unix(s) => s.write(buf),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Socket::Tcp(s) => s.as_raw_fd(),
            Socket::Unix(s) => s.as_raw_fd(),
        }
    }
}

/// Waits up to `limit` for something to read on `fd`, the end of the stream included. Returns the events seen, 0 for
/// none.
pub fn poll_readable(fd: RawFd, limit: Duration) -> i16 {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
    let timeout = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: `entry` is one valid pollfd for the duration of the call.
    let ready = unsafe { libc::poll(&mut entry, 1, timeout) };
    if ready <= 0 { 0 } else { entry.revents }
}

/// Whether the peer of `fd` has closed or reset, as the kernel knows it at this instant.
pub fn peer_gone(fd: RawFd) -> bool {
    poll_readable(fd, Duration::ZERO) & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
}

/// A head, of a request or a response.
#[derive(Debug, Clone, Default)]
pub struct Head {
    pub raw: Vec<u8>,
    /// Request line or status line.
    pub start: String,
    /// In order, names as they came, values without the white space around them.
    pub headers: Vec<(String, Vec<u8>)>,
}

impl Head {
    /// Strict: CRLF line ends, token names, no fold, no control characters.
    pub fn parse(raw: Vec<u8>) -> Result<Head, String> {
        let text = raw.strip_suffix(b"\r\n\r\n").ok_or("a head that does not end in an empty line")?;
        let mut lines = Vec::new();
        let mut rest = text;
        while let Some(at) = rest.windows(2).position(|w| w == b"\r\n") {
            lines.push(&rest[..at]);
            rest = &rest[at + 2..];
        }
        lines.push(rest);
        let mut headers = Vec::new();
        for (number, line) in lines.iter().enumerate() {
            if line.iter().any(|b| matches!(b, b'\r' | b'\n' | 0)) {
                return Err(format!(
                    "CR, LF or NUL inside line {number}: {:?}",
                    String::from_utf8_lossy(line)
                ));
            }
            if number == 0 {
                continue;
            }
            let colon = line
                .iter()
                .position(|b| *b == b':')
                .ok_or_else(|| format!("header line without a colon: {:?}", String::from_utf8_lossy(line)))?;
            let name = &line[..colon];
            let token = |b: &u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(b);
            if name.is_empty() || !name.iter().all(token) {
                return Err(format!("header name is not a token: {:?}", String::from_utf8_lossy(line)));
            }
            headers
                .push((String::from_utf8_lossy(name).into_owned(), line[colon + 1..].trim_ascii().to_vec()));
        }
        let start = String::from_utf8_lossy(lines[0]).into_owned();
        Ok(Head { raw, start, headers })
    }

    /// All values of `name`, in order; names compare without case.
    pub fn all(&self, name: &str) -> Vec<&[u8]> {
        self.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_slice()).collect()
    }

    /// The value of `name`, which must not stand there twice.
    #[track_caller]
    pub fn one(&self, name: &str) -> Option<String> {
        let all = self.all(name);
        assert!(all.len() <= 1, "{name} stands {} times in:\n{}", all.len(), self.text());
        all.first().map(|v| String::from_utf8_lossy(v).into_owned())
    }

    pub fn has(&self, name: &str) -> bool {
        !self.all(name).is_empty()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.raw).into_owned()
    }

    /// How the body is framed, apart from the rules that depend on method and status. `None`: neither length nor
    /// chunked.
    pub fn declared_framing(&self) -> Result<Option<Framing>, String> {
        let codings = self.all("transfer-encoding");
        let lengths = self.all("content-length");
        match (codings.as_slice(), lengths.as_slice()) {
            ([], []) => Ok(None),
            ([coding], []) if coding.eq_ignore_ascii_case(b"chunked") => {
                Ok(Some(Framing::Chunked { left: 0, first: true, done: false }))
            }
            ([], [length]) if !length.is_empty() && length.iter().all(u8::is_ascii_digit) => {
                let digits = std::str::from_utf8(length).expect("digits");
                let left = digits.parse().map_err(|_| format!("Content-Length out of range: {digits}"))?;
                Ok(Some(Framing::Length { left }))
            }
            _ => Err(format!("doubtful framing in\n{}", self.text())),
        }
    }
}

/// Where a body ends, and how much of it is still to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Framing {
    None,
    Length { left: u64 },
    Chunked { left: u64, first: bool, done: bool },
    UntilClose { done: bool },
}

/// A socket with its read buffer.
pub struct Wire {
    pub socket: Socket,
    buffer: Vec<u8>,
    start: usize,
    scratch: Vec<u8>,
    /// When the last bytes came in.
    pub last_fill: Instant,
    /// How often bytes came in.
    pub fills: usize,
    /// Bytes one read may bring.
    pub read_bytes_max: usize,
    pub trailers: Vec<u8>,
}

impl Wire {
    pub fn new(socket: Socket) -> Wire {
        if let Socket::Tcp(s) = &socket {
            s.set_nodelay(true).expect("TCP_NODELAY on an open socket");
        }
        socket.set_write_timeout(Duration::from_secs(60)).expect("a write timeout on an open socket");
        Wire {
            socket,
            buffer: Vec::new(),
            start: 0,
            scratch: Vec::new(),
            last_fill: now(),
            fills: 0,
            read_bytes_max: 256 * 1024,
            trailers: Vec::new(),
        }
    }

    /// Bytes read and not yet taken.
    pub fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    pub fn take(&mut self, count: usize) -> Vec<u8> {
        let taken = self.buffer[self.start..self.start + count].to_vec();
        self.start += count;
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
        }
        taken
    }

    /// One read of whatever is there, waiting for it until `deadline`.
    pub fn fill(&mut self, deadline: Instant) -> Result<usize, Fault> {
        let unfinished = self.buffered().len();
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.scratch.resize(self.read_bytes_max, 0);
        loop {
            let left = deadline.saturating_duration_since(now());
            if left.is_zero() {
                return Err(Fault::Timeout { unfinished });
            }
            self.socket.set_read_timeout(left.max(Duration::from_millis(1))).expect("a read timeout");
            match self.socket.read(&mut self.scratch) {
                Ok(0) => return Err(Fault::Eof { unfinished }),
                Ok(count) => {
                    self.buffer.extend_from_slice(&self.scratch[..count]);
                    self.last_fill = now();
                    self.fills += 1;
                    return Ok(count);
                }
                Err(e) => match e.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => return Err(Fault::Reset),
                    other => return Err(Fault::Malformed(format!("read failed: {other:?}"))),
                },
            }
        }
    }

    /// Reads up to and with `end`.
    fn until(&mut self, end: &[u8], bytes_max: usize, deadline: Instant) -> Result<Vec<u8>, Fault> {
        let mut searched = 0;
        loop {
            let from = searched.min(self.buffered().len());
            if let Some(at) = memchr::memmem::find(&self.buffered()[from..], end) {
                let count = from + at + end.len();
                return Ok(self.take(count));
            }
            searched = self.buffered().len().saturating_sub(end.len() - 1);
            if self.buffered().len() > bytes_max {
                return Err(Fault::Malformed(format!("no {end:?} within {bytes_max} bytes")));
            }
            self.fill(deadline)?;
        }
    }

    /// The next head.
    pub fn head(&mut self, deadline: Instant) -> Result<Head, Fault> {
        let raw = self.until(b"\r\n\r\n", 1 << 20, deadline)?;
        Head::parse(raw).map_err(Fault::Malformed)
    }

    /// The next piece of a body as it comes in; `None` at its proper end.
    pub fn piece(&mut self, framing: &mut Framing, deadline: Instant) -> Result<Option<Vec<u8>>, Fault> {
        match framing {
            Framing::None | Framing::Length { left: 0 } => Ok(None),
            Framing::Length { left } => {
                if self.buffered().is_empty() {
                    self.fill(deadline)?;
                }
                let count = (self.buffered().len() as u64).min(*left);
                *left -= count;
                Ok(Some(self.take(count as usize)))
            }
            Framing::UntilClose { done: true } | Framing::Chunked { done: true, .. } => Ok(None),
            Framing::UntilClose { done } => {
                if self.buffered().is_empty() {
                    match self.fill(deadline) {
                        Ok(_) => {}
                        Err(Fault::Eof { .. }) => {
                            *done = true;
                            return Ok(None);
                        }
                        Err(fault) => return Err(fault),
                    }
                }
                let count = self.buffered().len();
                Ok(Some(self.take(count)))
            }
            Framing::Chunked { left, first, done } => {
                if *left == 0 {
                    if !*first {
                        let end = self.until(b"\r\n", 2, deadline)?;
                        if end != b"\r\n" {
                            return Err(Fault::Malformed(format!("no CRLF after a chunk but {end:?}")));
                        }
                    }
                    *first = false;
                    let line = self.until(b"\r\n", 8192, deadline)?;
                    let digits =
                        line[..line.len() - 2].split(|b| *b == b';').next().expect("split gives one");
                    let text = std::str::from_utf8(digits).unwrap_or("").trim();
                    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                        return Err(Fault::Malformed(format!("chunk size {text:?}")));
                    }
                    *left = u64::from_str_radix(text, 16)
                        .map_err(|_| Fault::Malformed(format!("chunk size out of range {text:?}")))?;
                    if *left == 0 {
                        loop {
                            let trailer = self.until(b"\r\n", 64 * 1024, deadline)?;
                            if trailer == b"\r\n" {
                                break;
                            }
                            self.trailers.extend_from_slice(&trailer);
                        }
                        *done = true;
                        return Ok(None);
                    }
                }
                if self.buffered().is_empty() {
                    self.fill(deadline)?;
                }
                let count = (self.buffered().len() as u64).min(*left);
                *left -= count;
                Ok(Some(self.take(count as usize)))
            }
        }
    }
}
