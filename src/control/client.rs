//! The control thread's HTTP/1.1 client: one request, one connection, one answer in memory.
//!
//! *Invariant*: a fetch ends within its deadline, whatever the server does; the connection is never reused.
//! *Bound and cost*: [`HEAD_BYTES_MAX`] of head, the caller's limit of body, one 16 KiB read buffer.
//! *Errors*: [`FetchError`] says in words what happened; it never holds anything the server sent.
//! *Source*: RFC 9112 sections 3, 6, 9.6.

use std::fmt;
use std::io;
use std::time::Duration;

use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::{TcpStream, UnixStream};

use crate::clock::Clock;
use crate::proto::backend::catalog::Address;
use crate::proto::http1::{BodyReader, HeadLimits, HeadScan, Method, Parse, ResponseHead, parse_response};

/// Size of a response head.
const HEAD_BYTES_MAX: u32 = 64 << 10;
/// Interim (1xx) responses before the final one.
const INTERIM_MAX: usize = 8;
const READ_BYTES: usize = 16 << 10;

/// A GET request. The texts come from checked configuration and hold no control byte.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Value of the Host field.
    pub host: &'a str,
    /// In front of `path`; empty, or `/…` without a slash at its end.
    pub base_path: &'a str,
    /// Starts with `/`.
    pub path: &'a str,
    /// Sent as a bearer token.
    pub api_key: Option<&'a str>,
    /// Further header lines, each with its CRLF; mostly empty.
    pub lines: &'a str,
}

/// A server's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub body: Vec<u8>,
    /// Which of the addresses answered.
    pub address: usize,
    /// From the request's first byte, on a connection that stood, to the answer's last.
    pub exchange_ns: u64,
}

impl Response {
    /// 200 to 299.
    pub const fn is_success(&self) -> bool {
        matches!(self.status, 200..=299)
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub enum FetchError {
    /// No address to connect to.
    NoAddress,
    /// The last address that was tried refused.
    Connect(io::Error),
    ConnectTimeout,
    /// After so many milliseconds in all.
    Timeout {
        ms: u64,
    },
    Io(io::Error),
    /// The server closed before the end of its answer.
    Closed,
    BadHead(&'static str),
    BadBody(&'static str),
    TooLarge {
        bytes_max: usize,
    },
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FetchError::NoAddress => f.write_str("its host name has no address yet"),
            FetchError::Connect(error) => write!(f, "connect failed: {error}"),
            FetchError::ConnectTimeout => f.write_str("connect timed out"),
            FetchError::Timeout { ms } => write!(f, "no complete answer within {ms} ms"),
            FetchError::Io(error) => write!(f, "connection failed: {error}"),
            FetchError::Closed => f.write_str("the server closed before its answer was complete"),
            FetchError::BadHead(what) => write!(f, "malformed answer: {what}"),
            FetchError::BadBody(what) => write!(f, "malformed body: {what}"),
            FetchError::TooLarge { bytes_max } => write!(f, "the answer is over {bytes_max} bytes"),
        }
    }
}

/// A connection to a server.
#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    async fn connect(address: &Address) -> io::Result<Stream> {
        match address {
            Address::Tcp(address) => {
                let stream = TcpStream::connect_addr(*address).await?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
            Address::Unix(path) => Ok(Stream::Unix(UnixStream::connect(path).await?)),
        }
    }

    async fn write_all(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        let (result, _) = match self {
            Stream::Tcp(stream) => stream.write_all(bytes).await,
            Stream::Unix(stream) => stream.write_all(bytes).await,
        };
        result.map(|_| ())
    }

    async fn read(&mut self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        match self {
            Stream::Tcp(stream) => stream.read(buffer).await,
            Stream::Unix(stream) => stream.read(buffer).await,
        }
    }
}

/// Asks the first of `addresses` that can be connected to. `timeout_ms` covers everything; each address but the last gets
/// an equal part of it to connect in, so that one that swallows packets does not hide the next.
pub async fn fetch(
    addresses: &[Address],
    request: Request<'_>,
    timeout_ms: u64,
    body_bytes_max: usize,
    clock: &Clock,
) -> Result<Response, FetchError> {
    let whole = async {
        let (mut stream, address) = connect(addresses, timeout_ms).await?;
        let began = clock.now();
        stream.write_all(encode(&request)).await.map_err(FetchError::Io)?;
        let (status, body) = read_response(&mut stream, body_bytes_max).await?;
        Ok(Response { status, body, address, exchange_ns: clock.now().since(began) })
    };
    match monoio::time::timeout(Duration::from_millis(timeout_ms), whole).await {
        Ok(result) => result,
        Err(_) => Err(FetchError::Timeout { ms: timeout_ms }),
    }
}

async fn connect(addresses: &[Address], timeout_ms: u64) -> Result<(Stream, usize), FetchError> {
    let part = Duration::from_millis(timeout_ms) / addresses.len().max(1) as u32;
    let mut failure = FetchError::NoAddress;
    for (index, address) in addresses.iter().enumerate() {
        match monoio::time::timeout(part, Stream::connect(address)).await {
            Ok(Ok(stream)) => return Ok((stream, index)),
            Ok(Err(error)) => failure = FetchError::Connect(error),
            Err(_) => failure = FetchError::ConnectTimeout,
        }
    }
    Err(failure)
}

fn encode(request: &Request<'_>) -> Vec<u8> {
    let mut head = Vec::with_capacity(256);
    for part in ["GET ", request.base_path, request.path, " HTTP/1.1\r\nHost: ", request.host, "\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    head.extend_from_slice(
        concat!("User-Agent: ringway/", env!("CARGO_PKG_VERSION"), "\r\nAccept: */*\r\n").as_bytes(),
    );
    if let Some(key) = request.api_key {
        for part in ["Authorization: Bearer ", key, "\r\n"] {
            head.extend_from_slice(part.as_bytes());
        }
    }
    head.extend_from_slice(request.lines.as_bytes());
    head.extend_from_slice(b"Connection: close\r\n\r\n");
    head
}

async fn read_response(stream: &mut Stream, body_bytes_max: usize) -> Result<(u16, Vec<u8>), FetchError> {
    let limits = HeadLimits::new(HEAD_BYTES_MAX, b"");
    let mut head = ResponseHead::default();
    let mut scan = HeadScan::default();
    let mut received: Vec<u8> = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut interim = 0;
    loop {
        match parse_response(&received, &mut scan, &limits, Method::Get, &mut head)
            .map_err(|error| FetchError::BadHead(error.what))?
        {
            Parse::Complete if head.is_interim() => {
                interim += 1;
                if interim > INTERIM_MAX {
                    return Err(FetchError::BadHead("more interim responses than expected"));
                }
                received.drain(..head.head_len);
            }
            Parse::Complete => break,
            Parse::Partial => {
                let read;
                (read, buffer) = stream.read(buffer).await;
                match read.map_err(FetchError::Io)? {
                    0 => return Err(FetchError::Closed),
                    bytes => received.extend_from_slice(&buffer[..bytes]),
                }
            }
        }
    }
    let mut reader = BodyReader::new(head.framing);
    let mut body = Vec::new();
    let mut pending = received.split_off(head.head_len);
    while !reader.is_done() {
        let mut at = 0;
        while at < pending.len() && !reader.is_done() {
            let decoded = reader.decode(&pending[at..]).map_err(|error| FetchError::BadBody(error.what))?;
            body.extend_from_slice(&pending[at..][decoded.data]);
            at += decoded.consumed;
            if body.len() > body_bytes_max {
                return Err(FetchError::TooLarge { bytes_max: body_bytes_max });
            }
        }
        if reader.is_done() {
            break;
        }
        let read;
        (read, buffer) = stream.read(buffer).await;
        pending.clear();
        match read.map_err(FetchError::Io)? {
            0 if reader.may_end() => break,
            0 => return Err(FetchError::Closed),
            bytes => pending.extend_from_slice(&buffer[..bytes]),
        }
    }
    Ok((head.status, body))
}

#[cfg(test)]
mod tests;
