//! A raw HTTP/1.1 client: sends the bytes it is given, reads answers strictly, says when each piece came.

use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::time::{now, seconds};
use super::wire::{Fault, Framing, Head, Socket, Wire};

/// The bytes of a request with a Host and, where there is a body or the method wants one, a Content-Length.
pub fn request(method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{method} {target} HTTP/1.1\r\nHost: router.test\r\n").into_bytes();
    for (name, value) in headers {
        bytes.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    if !body.is_empty() || method == "POST" {
        bytes.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
    }
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(body);
    bytes
}

/// An answer read to its end.
#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    pub head: Head,
    pub body: Vec<u8>,
    pub trailers: Vec<u8>,
    /// Statuses of the interim answers that came before.
    pub interim: Vec<u16>,
    /// Whether the connection may carry another request.
    pub keeps: bool,
}

impl Response {
    #[track_caller]
    pub fn header(&self, name: &str) -> Option<String> {
        self.head.one(name)
    }
    #[track_caller]
    pub fn lifeboat(&self, name: &str) -> Option<String> {
        self.head.one(&format!("X-Lifeboat-{name}"))
    }
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("body is not JSON ({e}): {:?}\n{}", self.text(), self.head.text()))
    }

    /// Checks a rejection by the router in the OpenAI shape: status, reason header, `code`, `message`, content type,
    /// and that no server is named.
    #[track_caller]
    pub fn assert_rejected(&self, status: u16, reason: &str) -> &Response {
        let whole = format!("{}{}", self.head.text(), self.text());
        assert_eq!(self.status, status, "status of\n{whole}");
        assert_eq!(self.lifeboat("Reject-Reason").as_deref(), Some(reason), "reason of\n{whole}");
        let json = self.json();
        assert_eq!(json["error"]["code"], reason, "code of\n{whole}");
        assert!(json["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "message of\n{whole}");
        assert!(json["error"]["type"].as_str().is_some_and(|m| !m.is_empty()), "type of\n{whole}");
        assert!(json["error"].get("param").is_some(), "param of\n{whole}");
        assert_eq!(
            self.header("Content-Type").as_deref(),
            Some("application/json"),
            "content type of\n{whole}"
        );
        for name in ["Server", "Weight", "Inflight"] {
            assert_eq!(self.lifeboat(name), None, "a rejection names no server:\n{whole}");
        }
        self
    }

    /// Checks that the client is told when to come back, in whole seconds.
    #[track_caller]
    pub fn assert_retry_after(&self) -> &Response {
        let value =
            self.header("Retry-After").unwrap_or_else(|| panic!("no Retry-After in\n{}", self.head.text()));
        assert!(value.parse::<u32>().is_ok_and(|s| s >= 1), "Retry-After {value:?} is not whole seconds ≥ 1");
        self
    }
}

pub struct Client {
    pub wire: Wire,
    /// Limit of each reading call.
    pub limit: Duration,
}

impl Client {
    #[track_caller]
    pub fn connect(address: SocketAddr) -> Client {
        Client::try_connect(address).unwrap_or_else(|e| panic!("connect to {address}: {e}"))
    }

    pub fn try_connect(address: SocketAddr) -> io::Result<Client> {
        let stream = TcpStream::connect_timeout(&address, seconds(5))?;
        Ok(Client { wire: Wire::new(Socket::Tcp(stream)), limit: seconds(20) })
    }

    pub fn with_limit(mut self, limit: Duration) -> Client {
        self.limit = limit;
        self
    }

    fn deadline(&self) -> Instant {
        now() + self.limit
    }

    #[track_caller]
    pub fn send(&mut self, bytes: &[u8]) {
        self.wire.socket.write_all(bytes).unwrap_or_else(|e| panic!("sending {} bytes: {e}", bytes.len()));
    }

    /// For peers that may close while this still sends.
    pub fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.wire.socket.write_all(bytes)
    }

    /// Ends this side's sending only.
    pub fn finish_sending(&mut self) {
        self.wire.socket.shutdown(Shutdown::Write).expect("shutdown of an open socket");
    }

    /// Closes with a reset.
    pub fn reset(self) {
        self.wire.socket.reset_on_close();
    }

    /// The next final head, and the interim statuses before it.
    pub fn head(&mut self) -> Result<(u16, Head, Vec<u16>), Fault> {
        let deadline = self.deadline();
        let mut interim = Vec::new();
        loop {
            let (status, head) = self.any_head(deadline)?;
            if (100..200).contains(&status) && status != 101 {
                interim.push(status);
                continue;
            }
            return Ok((status, head, interim));
        }
    }

    /// The next head, interim or not.
    pub fn any_head(&mut self, deadline: Instant) -> Result<(u16, Head), Fault> {
        let head = self.wire.head(deadline)?;
        let status = head
            .start
            .strip_prefix("HTTP/1.1 ")
            .or(head.start.strip_prefix("HTTP/1.0 "))
            .and_then(|rest| rest.get(..3))
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(|| Fault::Malformed(format!("status line {:?}", head.start)))?;
        Ok((status, head))
    }

    /// How the body of an answer to `method` ends.
    pub fn framing(method: &str, status: u16, head: &Head) -> Result<Framing, Fault> {
        let declared = head.declared_framing().map_err(Fault::Malformed)?;
        if method == "HEAD" || status == 204 || status == 304 {
            return Ok(Framing::None);
        }
        Ok(declared.unwrap_or(Framing::UntilClose { done: false }))
    }

    pub fn piece(&mut self, framing: &mut Framing) -> Result<Option<Vec<u8>>, Fault> {
        let deadline = self.deadline();
        self.wire.piece(framing, deadline)
    }

    /// Reads one answer to its end; the error carries how much of the body had come.
    pub fn try_response_to(&mut self, method: &str) -> Result<Response, (Fault, Vec<u8>)> {
        let (status, head, interim) = self.head().map_err(|fault| (fault, Vec::new()))?;
        let mut framing = Client::framing(method, status, &head).map_err(|fault| (fault, Vec::new()))?;
        let mut body = Vec::new();
        self.wire.trailers.clear();
        loop {
            match self.piece(&mut framing) {
                Ok(Some(piece)) => body.extend_from_slice(&piece),
                Ok(None) => break,
                Err(fault) => return Err((fault, body)),
            }
        }
        let closing = head
            .all("connection")
            .iter()
            .any(|v| v.split(|b| *b == b',').any(|t| t.trim_ascii().eq_ignore_ascii_case(b"close")));
        let keeps = !closing && !matches!(framing, Framing::UntilClose { .. });
        let trailers = self.wire.trailers.clone();
        Ok(Response { status, head, body, trailers, interim, keeps })
    }

    pub fn try_response(&mut self) -> Result<Response, (Fault, Vec<u8>)> {
        self.try_response_to("POST")
    }

    #[track_caller]
    pub fn response(&mut self) -> Response {
        self.response_to("POST")
    }

    #[track_caller]
    pub fn response_to(&mut self, method: &str) -> Response {
        match self.try_response_to(method) {
            Ok(response) => response,
            Err((fault, body)) => panic!("no whole answer: {fault}; {} body bytes before", body.len()),
        }
    }

    /// Sends a request and reads its answer.
    #[track_caller]
    pub fn ask(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        self.send(&request(method, target, headers, body));
        self.response_to(method)
    }

    #[track_caller]
    pub fn post(&mut self, target: &str, body: &[u8]) -> Response {
        self.ask("POST", target, &[("Content-Type", "application/json")], body)
    }

    /// Waits for the peer to close, in order, without another byte before.
    #[track_caller]
    pub fn assert_closed(&mut self) {
        let deadline = self.deadline();
        let left = self.wire.buffered().to_vec();
        assert!(left.is_empty(), "bytes after the answer: {:?}", String::from_utf8_lossy(&left));
        match self.wire.fill(deadline) {
            Err(Fault::Eof { .. }) => {}
            Err(fault) => panic!("connection did not close in order: {fault}"),
            Ok(_) => {
                panic!("bytes instead of a close: {:?}", String::from_utf8_lossy(self.wire.buffered()))
            }
        }
    }

    /// All bytes that come until the peer closes, however it closes.
    pub fn rest(&mut self) -> (Vec<u8>, Fault) {
        let deadline = self.deadline();
        let mut bytes = Vec::new();
        loop {
            let filled = self.wire.fill(deadline);
            let count = self.wire.buffered().len();
            bytes.extend(self.wire.take(count));
            if let Err(fault) = filled {
                return (bytes, fault);
            }
        }
    }
}

/// One request on its own connection.
#[track_caller]
pub fn once(address: SocketAddr, method: &str, target: &str, body: &[u8]) -> Response {
    Client::connect(address).ask(method, target, &[], body)
}
