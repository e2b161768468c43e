//! One request at a scripted engine, and the means to answer it.

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use super::engine::{Closed, Next, Request, Shared};
use super::time::{now, pause, seconds};
use super::wire::{Fault, Framing, Socket, Wire, poll_readable};

/// One request, and the means to answer it.
pub struct Exchange<'a> {
    /// As far as it was read.
    pub request: Request,
    framing: Framing,
    index: usize,
    pub wire: &'a mut Wire,
    shared: &'a Arc<Shared>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(
        request: Request,
        framing: Framing,
        index: usize,
        wire: &'a mut Wire,
        shared: &'a Arc<Shared>,
    ) -> Exchange<'a> {
        Exchange { request, framing, index, wire, shared }
    }

    fn failed(&self, fault: Fault) -> io::Error {
        self.shared.note(self.request.connection, &fault);
        io::Error::new(io::ErrorKind::UnexpectedEof, fault.to_string())
    }

    /// The next piece of the body as it comes; `None` at its end. The piece is not recorded.
    pub fn body_piece(&mut self) -> io::Result<Option<Vec<u8>>> {
        match self.wire.piece(&mut self.framing, now() + seconds(60)) {
            Ok(Some(piece)) => Ok(Some(piece)),
            Ok(None) => {
                self.request.complete = true;
                self.shared.lock().requests[self.index].complete = true;
                Ok(None)
            }
            Err(fault) => Err(self.failed(fault)),
        }
    }

    /// Reads the whole body and records it.
    pub fn read_body(&mut self) -> io::Result<()> {
        if self.request.complete && self.framing != (Framing::Chunked { left: 0, first: true, done: false }) {
            return Ok(());
        }
        let keep = self.shared.lock().keep_bodies;
        self.wire.trailers.clear();
        while let Some(piece) = self.body_piece()? {
            if keep {
                self.request.body.extend_from_slice(&piece);
            }
        }
        self.request.trailers = self.wire.trailers.clone();
        let record = &mut self.shared.lock().requests[self.index];
        record.body = self.request.body.clone();
        record.trailers = self.request.trailers.clone();
        Ok(())
    }

    /// Whether the body holds `text`; reads it first.
    pub fn body_has(&mut self, text: &str) -> io::Result<bool> {
        self.read_body()?;
        Ok(memchr::memmem::find(&self.request.body, text.as_bytes()).is_some())
    }

    /// From here on the request counts as answered. To be called before the last bytes are written: the router may
    /// send the next request as soon as it has them.
    pub fn leave(&mut self) {
        self.shared.lock().active.remove(&self.request.connection);
    }

    pub fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.wire.socket.write_all(bytes).inspect_err(|_| {
            // Nobody takes it any more.
            self.shared.note(self.request.connection, &Fault::Reset);
        })
    }

    /// Reads the body, then answers with a length.
    pub fn reply(&mut self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Next> {
        self.read_body()?;
        let mut bytes = format!("HTTP/1.1 {status} Mock\r\n").into_bytes();
        for (name, value) in headers {
            bytes.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        bytes.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
        bytes.extend_from_slice(body);
        self.leave();
        self.raw(&bytes)?;
        Ok(Next::Keep)
    }

    pub fn reply_ok(&mut self) -> io::Result<Next> {
        self.reply(200, &[("Content-Type", "application/json")], br#"{"ok":true}"#)
    }

    /// Reads the body, then opens an event stream in chunks.
    pub fn stream_head(&mut self) -> io::Result<()> {
        self.read_body()?;
        self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    }

    /// One chunk in one write.
    pub fn chunk(&mut self, data: &[u8]) -> io::Result<()> {
        let mut bytes = format!("{:x}\r\n", data.len()).into_bytes();
        bytes.extend_from_slice(data);
        bytes.extend_from_slice(b"\r\n");
        self.raw(&bytes)
    }

    /// The last chunk.
    pub fn end(&mut self) -> io::Result<Next> {
        self.leave();
        self.raw(b"0\r\n\r\n")?;
        Ok(Next::Keep)
    }

    /// Waits up to `limit` for the router to close the connection; `None`: it did not.
    pub fn wait_close(&mut self, limit: Duration) -> Option<Closed> {
        let deadline = now() + limit;
        match self.wire.fill(deadline) {
            Ok(_) => {
                let text = String::from_utf8_lossy(self.wire.buffered()).into_owned();
                self.shared.lock().malformed.push(format!("bytes before the answer was sent: {text:?}"));
                None
            }
            Err(fault) => {
                self.shared.note(self.request.connection, &fault);
                match fault {
                    Fault::Eof { .. } => Some(Closed::Fin),
                    Fault::Reset => Some(Closed::Reset),
                    _ => None,
                }
            }
        }
    }

    /// Works for `span`, and stops early when the router closes.
    pub fn work(&mut self, span: Duration) -> Option<Closed> {
        if poll_readable(self.wire.socket.as_raw_fd(), span) == 0 {
            return None;
        }
        self.wait_close(Duration::from_millis(100))
    }

    /// Sends what follows in one segment with the end of the connection, where the handler then closes.
    pub fn cork(&mut self) {
        if let Socket::Tcp(stream) = &self.wire.socket {
            socket2::SockRef::from(stream).set_tcp_cork(true).expect("TCP_CORK on an open socket");
        }
    }

    pub fn pause(&self, span: Duration) {
        pause(span);
    }
}
