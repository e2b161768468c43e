//! A small blocking HTTP/1.1 client over one keep-alive connection, for the demo's load and for tests.
//!
//! *Invariant*: an answer that is cut short is an error, never a short body.
//! *Bound and cost*: heads to 64 KiB; a call waits at most [`WAIT_MAX`] for each read.
//! *Errors*: `io::Error`; `UnexpectedEof` for a connection that ends within an answer, `InvalidData` for what is no HTTP.
//! *Source*: RFC 9112 through [`crate::proto::http1`].

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::proto::http1::{BodyReader, HeadLimits, HeadScan, Method, Parse, ResponseHead, parse_response};

/// How long one read may take.
pub const WAIT_MAX: Duration = Duration::from_secs(30);
const HEAD_BYTES_MAX: u32 = 64 * 1024;

/// The head of an answer.
#[derive(Debug)]
pub struct Head {
    pub status: u16,
    fields: Vec<(String, String)>,
    reader: BodyReader,
    /// The server keeps the connection open.
    pub keep_alive: bool,
}

impl Head {
    /// Value of the first field called `name`, in any case.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(have, _)| have.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// A complete answer.
#[derive(Debug)]
pub struct Answer {
    pub head: Head,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.status
    }
    /// The body as text; what is not UTF-8 is replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
    /// The body as JSON.
    pub fn json(&self) -> io::Result<serde_json::Value> {
        serde_json::from_slice(&self.body).map_err(|fault| io::Error::new(io::ErrorKind::InvalidData, fault))
    }
}

/// One connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    host: String,
    buf: Vec<u8>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> io::Result<Client> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(WAIT_MAX))?;
        stream.set_write_timeout(Some(WAIT_MAX))?;
        Ok(Client { stream, host: address.to_string(), buf: Vec::new() })
    }

    /// The socket, to close or to misuse.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends a request in one write. `lines` are further header lines, each with its CRLF.
    pub fn send(&mut self, method: &str, path: &str, lines: &str, body: &[u8]) -> io::Result<()> {
        let mut bytes = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n{lines}", self.host).into_bytes();
        if method == "POST" {
            let length = body.len();
            bytes.extend_from_slice(
                format!("content-type: application/json\r\ncontent-length: {length}\r\n").as_bytes(),
            );
        }
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(body);
        self.stream.write_all(&bytes)
    }

    fn fill(&mut self) -> io::Result<()> {
        let mut room = [0; 16 * 1024];
        match self.stream.read(&mut room)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended within an answer")),
            bytes => {
                self.buf.extend_from_slice(&room[..bytes]);
                Ok(())
            }
        }
    }

    /// Reads the head of the final answer to a request by `method`.
    pub fn head(&mut self, method: Method) -> io::Result<Head> {
        let invalid = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
        let limits = HeadLimits::new(HEAD_BYTES_MAX, b"");
        let mut scan = HeadScan::default();
        let mut head = ResponseHead::default();
        loop {
            match parse_response(&self.buf, &mut scan, &limits, method, &mut head) {
                Ok(Parse::Partial) => self.fill()?,
                Ok(Parse::Complete) if head.is_interim() => {
                    self.buf.drain(..head.head_len);
                }
                Ok(Parse::Complete) => break,
                Err(fault) => return Err(invalid(fault.what)),
            }
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let fields = head
            .fields()
            .iter()
            .map(|field| (text(field.name.of(&self.buf)), text(field.value.of(&self.buf))))
            .collect();
        self.buf.drain(..head.head_len);
        Ok(Head {
            status: head.status,
            fields,
            reader: BodyReader::new(head.framing),
            keep_alive: head.keep_alive,
        })
    }

    /// Reads the next piece of the body as it arrives; `None` at its end.
    pub fn piece(&mut self, head: &mut Head) -> io::Result<Option<Vec<u8>>> {
        let mut piece = Vec::new();
        loop {
            while !self.buf.is_empty() && !head.reader.is_done() {
                let decoded = head
                    .reader
                    .decode(&self.buf)
                    .map_err(|fault| io::Error::new(io::ErrorKind::InvalidData, fault.what))?;
                piece.extend_from_slice(&self.buf[decoded.data]);
                self.buf.drain(..decoded.consumed);
            }
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
            if head.reader.is_done() {
                return Ok(None);
            }
            match self.fill() {
                Err(fault) if fault.kind() == io::ErrorKind::UnexpectedEof && head.reader.may_end() => {
                    return Ok(None);
                }
                other => other?,
            }
        }
    }

    /// A request and its complete answer.
    pub fn call(&mut self, method: &str, path: &str, lines: &str, body: &[u8]) -> io::Result<Answer> {
        self.send(method, path, lines, body)?;
        let mut head = self.head(if method == "GET" { Method::Get } else { Method::Post })?;
        let mut body = Vec::new();
        while let Some(piece) = self.piece(&mut head)? {
            body.extend_from_slice(&piece);
        }
        Ok(Answer { head, body })
    }

    pub fn post(&mut self, path: &str, body: &str) -> io::Result<Answer> {
        self.call("POST", path, "", body.as_bytes())
    }

    pub fn get(&mut self, path: &str) -> io::Result<Answer> {
        self.call("GET", path, "", b"")
    }
}
