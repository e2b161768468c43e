//! One connection's life: requests one after the other, each to its endpoint, faults on the way.
//!
//! *Invariant*: an answer is complete, or the connection ends; nothing is sent after a fault said stop.
//! *Errors*: [`ApiError`] in the shape of the API that was called.

use std::rc::Rc;
use std::time::Duration;

use monoio::net::TcpStream;
use monoio::time::sleep;
use serde_json::Value;

use super::connection::{Connection, ReadError, Request};
use super::error::ApiError;
use super::fault::{Armed, Fault};
use super::prompt::Endpoint;
use super::server::{Engine, Flight, Outcome, Registered};
use super::{generate, metrics, openai};
use crate::proto::classify::Api;
use crate::proto::http1::Method;

pub const JSON: &str = "application/json";

/// What becomes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It waits for the next request.
    Keep,
    Close,
    Reset,
}

/// Serves a connection to its end.
pub async fn serve(engine: Rc<Engine>, stream: TcpStream) {
    let mut connection = Connection::new(stream);
    let registered = engine.register(connection.fd());
    loop {
        registered.set_idle();
        let read = connection.next_request(|| registered.set_busy()).await;
        let next = match read {
            Ok(Some(request)) => answer(&engine, &registered, &mut connection, request).await,
            Ok(None) | Err(ReadError::Gone) => Next::Close,
            Err(ReadError::Refused(fault)) => {
                refuse(&mut connection, Api::OpenAi, &fault).await;
                Next::Close
            }
        };
        {
            let mut stats = engine.stats.borrow_mut();
            stats.bytes_in += std::mem::take(&mut connection.bytes_in);
            stats.bytes_out += std::mem::take(&mut connection.bytes_out);
        }
        match next {
            Next::Keep => {}
            Next::Close => return,
            Next::Reset => {
                connection.reset();
                return;
            }
        }
    }
}

/// The error shape that a caller of `path` understands.
fn api_of(path: &str) -> Api {
    if path.starts_with("/v1/messages") { Api::Anthropic } else { Api::OpenAi }
}

/// Answers a request whose rest cannot be read, and closes.
async fn refuse(connection: &mut Connection, api: Api, fault: &ApiError) {
    let reply = Reply { fault: None, keep_alive: false, minor: 1 };
    if reply.error(connection, api, fault).await == Next::Keep {
        connection.linger().await;
    }
}

async fn answer(
    engine: &Rc<Engine>,
    registered: &Registered,
    connection: &mut Connection,
    request: Request,
) -> Next {
    let endpoint = Endpoint::at(&request.path).filter(|_| request.method == Method::Post);
    let api = api_of(&request.path);
    let mut flight = endpoint.map(|_| registered.flight());
    let settle = |flight: &mut Option<Flight<'_>>, outcome| {
        if let Some(flight) = flight {
            flight.settle(outcome);
        }
    };
    // The body must be read to its end even where it is not looked at, so decide on faults first.
    let fault = match &request.fault {
        None => Ok(None),
        Some(_) if endpoint.is_none() => Ok(None),
        Some(text) => match Armed::parse(text) {
            Ok(Armed { fault: Fault::Refuse { .. }, .. }) => {
                Err("fault refuse: concerns the listener: arm it by POST /fault".to_owned())
            }
            Ok(armed) => Ok(Some(armed.fault)),
            Err(text) => Err(text),
        },
    };
    let (fault, header_fault) = match fault {
        Ok(Some(fault)) => (Some(fault), None),
        Ok(None) if matches!(request.path.as_str(), "/stats" | "/fault") => (None, None),
        Ok(None) => (engine.faults.borrow_mut().strike(&request.path, endpoint.is_some()), None),
        Err(text) => (None, Some(ApiError::bad_request("x-engine-fault", text))),
    };
    let pace = match fault {
        Some(Fault::SlowRead { bytes_per_s }) => Some(bytes_per_s),
        _ => None,
    };
    let body = match connection.body(&request, pace).await {
        Ok(body) => body,
        Err(ReadError::Gone) => return Next::Close,
        Err(ReadError::Refused(fault)) => {
            settle(&mut flight, Outcome::Rejected);
            refuse(connection, api, &fault).await;
            return Next::Close;
        }
    };
    let reply = Reply { fault, keep_alive: request.keep_alive, minor: request.minor };
    match fault {
        Some(Fault::Reset) => {
            settle(&mut flight, Outcome::Faulted);
            return Next::Reset;
        }
        Some(Fault::Hang) => {
            // Ends when the client goes, which counts as its abort.
            connection.unless_gone(std::future::pending::<()>()).await;
            return Next::Close;
        }
        Some(Fault::Status { code, retry_after_s }) => {
            let message = format!("status {code} on demand");
            let fault = ApiError { retry_after_s, ..ApiError::new(code, message) };
            settle(&mut flight, Outcome::Faulted);
            return reply.error(connection, api, &fault).await;
        }
        _ => {}
    }
    let checked = match (header_fault, &request.content_encoding) {
        (Some(fault), _) => Err(fault),
        (None, Some(coding)) if endpoint.is_some() && coding != "identity" => {
            let message = format!("Content-Encoding `{coding}` is not understood; expected a plain body");
            Err(ApiError::new(415, message))
        }
        _ => Ok(()),
    };
    let result = match (checked, endpoint, &mut flight) {
        (Err(fault), ..) => Err(fault),
        (Ok(()), Some(endpoint), Some(flight)) => {
            generate::serve(engine, connection, endpoint, &body, &reply, flight).await
        }
        _ => service(engine, connection, &request, &body, &reply).await,
    };
    let next = match result {
        Ok(next) => next,
        Err(fault) => {
            settle(&mut flight, Outcome::Rejected);
            reply.error(connection, api, &fault).await
        }
    };
    match fault {
        Some(Fault::CloseAfter { ms }) if next == Next::Keep => {
            // A request that comes before the time is up is served, as a server with a keep-alive limit would.
            if ms > 0 && connection.heard_within(ms).await { Next::Keep } else { Next::Close }
        }
        _ => next,
    }
}

/// Endpoints beside inference.
async fn service(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    request: &Request,
    body: &[u8],
    reply: &Reply,
) -> Result<Next, ApiError> {
    let options = &engine.options;
    let path = request.path.as_str();
    let (kind, body) = match (request.method, path) {
        (Method::Get, "/health" | "/ping") => ("", Vec::new()),
        (Method::Get, "/v1/models") => {
            (JSON, openai::models(&options.models, engine.unix_s(), options.context_tokens_max))
        }
        (Method::Get, "/metrics") => {
            let stats = engine.stats.borrow();
            let text = metrics::prometheus(&stats, &engine.scheduler.borrow(), &options.models[0]);
            ("text/plain; version=0.0.4; charset=utf-8", text)
        }
        (Method::Get, "/version") => {
            (JSON, format!(r#"{{"version":"{}"}}"#, env!("CARGO_PKG_VERSION")).into())
        }
        (Method::Get, "/stats") => (JSON, engine.stats_json().to_string().into_bytes()),
        (Method::Get, "/fault") => (JSON, engine.faults_json().to_string().into_bytes()),
        (Method::Delete, "/fault") => {
            engine.clear_faults();
            (JSON, engine.faults_json().to_string().into_bytes())
        }
        (Method::Post, "/fault") => {
            let armed = match serde_json::from_slice(body) {
                Ok(Value::Object(object)) => Armed::from_json(&object),
                Ok(_) => Err("expected a JSON object".to_owned()),
                Err(fault) => Err(format!("not valid JSON: {fault}")),
            };
            armed.and_then(|armed| engine.arm(armed)).map_err(|text| ApiError::bad_request("body", text))?;
            (JSON, engine.faults_json().to_string().into_bytes())
        }
        (_, "/health" | "/ping" | "/v1/models" | "/metrics" | "/version" | "/stats") => {
            return Err(ApiError::new(405, format!("{path} expects GET")));
        }
        (_, "/fault") => return Err(ApiError::new(405, "/fault expects GET, POST or DELETE".into())),
        _ if Endpoint::at(path).is_some() => return Err(ApiError::new(405, format!("{path} expects POST"))),
        _ => return Err(ApiError::new(404, format!("no endpoint at {path}"))),
    };
    Ok(reply.whole(connection, 200, kind, "", body).await)
}

/// How one answer is to be sent.
pub struct Reply {
    pub fault: Option<Fault>,
    pub keep_alive: bool,
    pub minor: u8,
}

impl Reply {
    pub fn next(&self) -> Next {
        if self.keep_alive { Next::Keep } else { Next::Close }
    }

    /// Status line and fields; the caller adds what says how long the body is. `lines` end in CRLF.
    fn head(&self, status: u16, kind: &str, lines: &str, keep_alive: bool) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {status} {}\r\nserver: ringway-engine\r\n", reason(status));
        if !kind.is_empty() {
            head.push_str(&format!("content-type: {kind}\r\n"));
        }
        match (keep_alive, self.minor) {
            (false, _) => head.push_str("connection: close\r\n"),
            (true, 0) => head.push_str("connection: keep-alive\r\n"),
            (true, _) => {}
        }
        head.push_str(lines);
        head.into_bytes()
    }

    /// A complete answer.
    pub async fn whole(
        &self,
        connection: &mut Connection,
        status: u16,
        kind: &str,
        lines: &str,
        body: Vec<u8>,
    ) -> Next {
        let mut head = self.head(status, kind, lines, self.keep_alive);
        head.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
        if !self.dawdle(connection, &mut head).await {
            return Next::Close;
        }
        if let Some(Fault::Die { reset, .. }) = self.fault {
            head.extend_from_slice(&body[..body.len() / 2]);
            connection.send(head).await;
            return if reset { Next::Reset } else { Next::Close };
        }
        head.extend_from_slice(&body);
        if connection.send(head).await.0 { self.next() } else { Next::Close }
    }

    /// An error answer.
    pub async fn error(&self, connection: &mut Connection, api: Api, fault: &ApiError) -> Next {
        let lines = fault.retry_after_s.map_or(String::new(), |s| format!("retry-after: {s}\r\n"));
        self.whole(connection, fault.status, JSON, &lines, fault.body(api)).await
    }

    /// The head of an event stream, not yet sent, and whether its body is chunked.
    pub fn stream_head(&self) -> (Vec<u8>, bool) {
        let chunked = self.minor > 0;
        let keep_alive = self.keep_alive && chunked;
        let coding = if chunked { "transfer-encoding: chunked\r\n" } else { "" };
        let lines = format!("cache-control: no-cache\r\n{coding}\r\n");
        (self.head(200, "text/event-stream; charset=utf-8", &lines, keep_alive), chunked)
    }

    /// Where the fault says so, sends half of `head` and waits before the rest; `false`: the client has gone.
    pub async fn dawdle(&self, connection: &mut Connection, head: &mut Vec<u8>) -> bool {
        let Some(Fault::SlowHead { ms }) = self.fault else { return true };
        let rest = head.split_off(head.len() / 2);
        if !connection.send(std::mem::replace(head, rest)).await.0 {
            return false;
        }
        connection.unless_gone(sleep(Duration::from_millis(ms))).await.is_some()
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Status",
    }
}
