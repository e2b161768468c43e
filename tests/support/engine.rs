//! Scripted engines: what an engine does with a request is a closure, one thread per connection runs it.
//!
//! `GET /health` and `GET /v1/models` are answered by [`Probe`]s and are not counted as requests; nor is what the router asks
//! on its own account about the engine's cache ([`FIGURES`]). Everything else is
//! recorded as it came (head bytes, body, connection, time) and given to the closure.
//!
//! *Invariant*: an engine that was sent malformed HTTP fails its test when it is dropped.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::exchange::Exchange;
use super::time::{eventually, now, pause, seconds};
use super::wire::{Fault, Framing, Head, Socket, Wire, peer_gone, poll_readable};

/// How the router ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    Fin,
    Reset,
}

/// What happens to the connection after an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Wait for the next request.
    Keep,
    /// Close in order.
    Close,
    /// Close with a reset.
    Reset,
    /// Close in order when no request has come after this span.
    CloseAfter(Duration),
}

/// Where engines publish figures of themselves. Requests there are the router's own, like probes.
pub const FIGURES: [&str; 3] = ["/metrics", "/props", "/get_server_info"];

/// What a probe path answers.
#[derive(Debug, Clone)]
pub enum Probe {
    Reply(u16, String),
    /// The same after a while.
    After(Duration, u16, String),
    /// Takes the request and says nothing.
    Hang,
}

impl Probe {
    pub fn ok() -> Probe {
        Probe::Reply(200, "{}".into())
    }
    /// A model list as OpenAI's API gives it.
    pub fn models(names: &[&str]) -> Probe {
        let data: Vec<_> = names
            .iter()
            .map(|name| serde_json::json!({"id": name, "object": "model", "created": 1, "owned_by": "mock"}))
            .collect();
        Probe::Reply(200, serde_json::json!({"object": "list", "data": data}).to_string())
    }
}

/// A request as the engine got it.
#[derive(Debug, Clone)]
pub struct Request {
    /// Connections are numbered from 0 as they are accepted.
    pub connection: usize,
    /// How many requests came before it on that connection, probes not counted.
    pub ordinal: usize,
    pub head: Head,
    pub method: String,
    pub target: String,
    pub body: Vec<u8>,
    pub trailers: Vec<u8>,
    /// The body came to its end.
    pub complete: bool,
    /// When its head was complete.
    pub at: Instant,
}

impl Request {
    #[track_caller]
    pub fn header(&self, name: &str) -> Option<String> {
        self.head.one(name)
    }
}

#[derive(Debug, Clone, Default)]
pub struct ConnectionLog {
    /// When and how the router ended it, if the engine saw it.
    pub closed: Option<(Instant, Closed)>,
    /// It carried a request that was no probe.
    pub used: bool,
}

type Handler = dyn Fn(&mut Exchange<'_>) -> io::Result<Next> + Send + Sync;

pub(super) struct Shared {
    handler: Box<Handler>,
    state: Mutex<State>,
}

pub(super) struct State {
    health: Probe,
    models: Probe,
    published: HashMap<String, Probe>,
    health_seen: usize,
    models_seen: usize,
    pub(super) requests: Vec<Request>,
    connections: Vec<ConnectionLog>,
    /// Sockets that are open, by connection.
    open: HashMap<usize, RawFd>,
    /// Connections with a request in work.
    pub(super) active: HashMap<usize, RawFd>,
    active_max: usize,
    pub(super) malformed: Vec<String>,
    raced: usize,
    stopped: bool,
    pub(super) keep_bodies: bool,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
    fn set_closed(&self, connection: usize, closed: Closed) {
        let log = &mut self.lock().connections[connection];
        if log.closed.is_none() {
            log.closed = Some((now(), closed));
        }
    }
    pub(super) fn note(&self, connection: usize, fault: &Fault) {
        match fault {
            Fault::Eof { .. } => self.set_closed(connection, Closed::Fin),
            Fault::Reset => self.set_closed(connection, Closed::Reset),
            Fault::Timeout { .. } => {}
            Fault::Malformed(what) => self.lock().malformed.push(what.clone()),
        }
    }
}

#[derive(Debug, Clone)]
enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// How an engine starts, where it is not the usual way.
pub struct EngineSetup {
    health: Probe,
    models: Probe,
    published: HashMap<String, Probe>,
    place: Place,
    keep_bodies: bool,
}

impl Default for EngineSetup {
    fn default() -> Self {
        EngineSetup {
            health: Probe::ok(),
            models: Probe::models(&["m"]),
            published: FIGURES.iter().map(|path| ((*path).into(), Probe::Reply(404, "{}".into()))).collect(),
            place: Place::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
            keep_bodies: true,
        }
    }
}

impl EngineSetup {
    pub fn new() -> Self {
        Self::default()
    }
    pub fn health(mut self, probe: Probe) -> Self {
        self.health = probe;
        self
    }
    pub fn models(mut self, probe: Probe) -> Self {
        self.models = probe;
        self
    }
    /// What the engine tells of itself at `path`; without this it tells nothing at any of [`FIGURES`].
    pub fn publishes(mut self, path: &str, probe: Probe) -> Self {
        self.published.insert(path.into(), probe);
        self
    }
    pub fn address(mut self, address: SocketAddr) -> Self {
        self.place = Place::Tcp(address);
        self
    }
    pub fn unix(mut self, path: &Path) -> Self {
        self.place = Place::Unix(path.to_owned());
        self
    }
    /// Bodies are read and thrown away.
    pub fn drop_bodies(mut self) -> Self {
        self.keep_bodies = false;
        self
    }
    pub fn start(
        self,
        handler: impl Fn(&mut Exchange<'_>) -> io::Result<Next> + Send + Sync + 'static,
    ) -> Engine {
        let shared = Arc::new(Shared {
            handler: Box::new(handler),
            state: Mutex::new(State {
                health: self.health,
                models: self.models,
                published: self.published,
                health_seen: 0,
                models_seen: 0,
                requests: Vec::new(),
                connections: Vec::new(),
                open: HashMap::new(),
                active: HashMap::new(),
                active_max: 0,
                malformed: Vec::new(),
                raced: 0,
                stopped: false,
                keep_bodies: self.keep_bodies,
            }),
        });
        let mut engine = Engine { shared, place: self.place, accepting: None };
        engine.listen();
        engine
    }
}

/// A scripted engine; stops when dropped.
pub struct Engine {
    shared: Arc<Shared>,
    place: Place,
    accepting: Option<(RawFd, JoinHandle<()>)>,
}

impl Engine {
    pub fn start(handler: impl Fn(&mut Exchange<'_>) -> io::Result<Next> + Send + Sync + 'static) -> Engine {
        EngineSetup::new().start(handler)
    }

    /// Answers every request with 200 and a small JSON body.
    pub fn answering() -> Engine {
        Engine::start(|exchange| exchange.reply_ok())
    }

    /// Starts to listen, again after a [`Engine::stop`] at the same address.
    pub fn listen(&mut self) {
        assert!(self.accepting.is_none(), "it listens already");
        self.shared.lock().stopped = false;
        let listener = match &self.place {
            Place::Tcp(address) => {
                let listener = TcpListener::bind(address).unwrap_or_else(|e| panic!("bind {address}: {e}"));
                self.place = Place::Tcp(listener.local_addr().expect("bound"));
                Listener::Tcp(listener)
            }
            Place::Unix(path) => {
                let _ = std::fs::remove_file(path);
                Listener::Unix(UnixListener::bind(path).unwrap_or_else(|e| panic!("bind {path:?}: {e}")))
            }
        };
        let fd = match &listener {
            Listener::Tcp(l) => l.as_raw_fd(),
            Listener::Unix(l) => l.as_raw_fd(),
        };
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::spawn(move || accept(listener, &shared));
        self.accepting = Some((fd, thread));
    }

    /// As if the process ended: closes every connection; from its return on, connects are refused.
    pub fn stop(&mut self) {
        let Some((fd, thread)) = self.accepting.take() else { return };
        {
            let mut state = self.shared.lock();
            state.stopped = true;
            for fd in state.open.values() {
                // SAFETY: a descriptor stays in `open` until its owner, under this lock, takes it out before it closes it.
                unsafe { libc::shutdown(*fd, libc::SHUT_RDWR) };
            }
        }
        // SAFETY: the accepting thread owns the listener and closes it only when `accept` has failed, which needs this call.
        unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
        thread.join().expect("the accepting thread does not panic");
    }

    #[track_caller]
    pub fn address(&self) -> SocketAddr {
        match &self.place {
            Place::Tcp(address) => *address,
            Place::Unix(path) => panic!("{path:?} is no socket address"),
        }
    }

    pub fn url(&self) -> String {
        match &self.place {
            Place::Tcp(address) => format!("http://{address}"),
            Place::Unix(path) => format!("unix:{}", path.display()),
        }
    }

    /// All requests so far, in the order their heads came, probes left out.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.lock().requests.clone()
    }
    pub fn request_count(&self) -> usize {
        self.shared.lock().requests.len()
    }
    pub fn connection(&self, number: usize) -> ConnectionLog {
        self.shared.lock().connections[number].clone()
    }
    /// Connections that carried requests and are open still.
    pub fn connections_open(&self) -> usize {
        let state = self.shared.lock();
        state.open.keys().filter(|number| state.connections[**number].used).count()
    }
    /// Requests in work now.
    pub fn active(&self) -> usize {
        self.shared.lock().active.values().filter(|fd| !peer_gone(**fd)).count()
    }
    /// The most requests ever in work at once. One whose connection the router had closed before the next came does not
    /// count.
    pub fn active_max(&self) -> usize {
        self.shared.lock().active_max
    }
    /// Connections that the engine closed while a request was already on its way: no router can know.
    pub fn raced(&self) -> usize {
        self.shared.lock().raced
    }
    pub fn probes(&self) -> (usize, usize) {
        let state = self.shared.lock();
        (state.health_seen, state.models_seen)
    }
    pub fn set_health(&self, probe: Probe) {
        self.shared.lock().health = probe;
    }
    pub fn publish(&self, path: &str, probe: Probe) {
        self.shared.lock().published.insert(path.into(), probe);
    }
    pub fn set_models(&self, probe: Probe) {
        self.shared.lock().models = probe;
    }

    /// Waits until it got `count` requests in all.
    #[track_caller]
    pub fn wait_requests(&self, count: usize) -> Vec<Request> {
        eventually(seconds(10), &format!("{count} requests at the engine"), || {
            let requests = self.requests();
            if requests.len() >= count { Ok(requests) } else { Err(format!("{} requests", requests.len())) }
        })
    }

    /// Waits until a connection has been closed by the router, and says when and how.
    #[track_caller]
    pub fn wait_closed(&self, connection: usize, limit: Duration) -> (Instant, Closed) {
        eventually(limit, "the router closes the connection to the engine", || {
            self.connection(connection).closed.ok_or_else(|| "still open".to_owned())
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
        if let Place::Unix(path) = &self.place {
            let _ = std::fs::remove_file(path);
        }
        if !std::thread::panicking() {
            let malformed = self.shared.lock().malformed.clone();
            assert!(malformed.is_empty(), "the engine was sent malformed HTTP: {malformed:?}");
        }
    }
}

fn accept(listener: Listener, shared: &Arc<Shared>) {
    loop {
        let socket = match &listener {
            Listener::Tcp(l) => l.accept().map(|(s, _)| Socket::Tcp(s)),
            Listener::Unix(l) => l.accept().map(|(s, _)| Socket::Unix(s)),
        };
        let socket = match socket {
            Ok(socket) => socket,
            Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                continue;
            }
            Err(_) => return,
        };
        let number = {
            let mut state = shared.lock();
            if state.stopped {
                return;
            }
            let number = state.connections.len();
            state.connections.push(ConnectionLog::default());
            state.open.insert(number, socket.as_raw_fd());
            number
        };
        let shared = Arc::clone(shared);
        std::thread::Builder::new()
            .stack_size(256 * 1024)
            .spawn(move || {
                let mut wire = Wire::new(socket);
                let next = serve(&mut wire, number, &shared);
                finish(&mut wire, next, number, &shared);
            })
            .expect("a thread per connection");
    }
}

/// Ends a connection. A request that had arrived when the engine decided to close is counted as raced.
fn finish(wire: &mut Wire, next: Next, number: usize, shared: &Shared) {
    {
        let mut state = shared.lock();
        state.active.remove(&number);
        state.open.remove(&number);
    }
    if next == Next::Reset {
        wire.socket.reset_on_close();
        return;
    }
    // From here on the kernel answers whatever still comes with a reset, as after a close; but what came before can
    // still be seen.
    if wire.socket.shutdown(Shutdown::Both).is_ok() && !wire.buffered().is_empty()
        || matches!(wire.fill(now() + Duration::from_millis(5)), Ok(count) if count > 0)
    {
        shared.lock().raced += 1;
    }
}

/// Serves one connection until something ends it.
fn serve(wire: &mut Wire, number: usize, shared: &Arc<Shared>) -> Next {
    let mut ordinal = 0;
    let mut idle_limit = seconds(600);
    loop {
        let head = match wire.head(now() + idle_limit) {
            Ok(head) => head,
            Err(fault) => {
                shared.note(number, &fault);
                return Next::Close;
            }
        };
        let mut words = head.start.split(' ');
        let (method, target, version) = (words.next(), words.next(), words.next());
        let (Some(method), Some(target), Some("HTTP/1.1"), None) = (method, target, version, words.next())
        else {
            shared.lock().malformed.push(format!("request line {:?}", head.start));
            return Next::Close;
        };
        let (method, target) = (method.to_owned(), target.to_owned());
        let framing = match head.declared_framing() {
            Ok(framing) => framing.unwrap_or(Framing::None),
            Err(what) => {
                shared.lock().malformed.push(what);
                return Next::Close;
            }
        };
        if head.all("host").len() != 1 {
            shared.lock().malformed.push(format!("not one Host in\n{}", head.text()));
        }
        let probe = {
            let mut state = shared.lock();
            match (method.as_str(), target.as_str()) {
                ("GET", "/health") => {
                    state.health_seen += 1;
                    Some(state.health.clone())
                }
                ("GET", "/v1/models") => {
                    state.models_seen += 1;
                    Some(state.models.clone())
                }
                ("GET", path) => state.published.get(path).cloned(),
                _ => None,
            }
        };
        if let Some(probe) = probe {
            match &probe {
                Probe::Hang => {
                    let fault = wire.fill(now() + seconds(600));
                    if let Err(fault) = fault {
                        shared.note(number, &fault);
                    }
                    return Next::Close;
                }
                Probe::After(_, status, body) | Probe::Reply(status, body) => {
                    if let Probe::After(span, ..) = &probe {
                        pause(*span);
                    }
                    let length = body.len();
                    let text = format!(
                        "HTTP/1.1 {status} Probe\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
                    );
                    if wire.socket.write_all(text.as_bytes()).is_err() {
                        return Next::Close;
                    }
                    continue;
                }
            }
        }
        let request = Request {
            connection: number,
            ordinal,
            head,
            method,
            target,
            body: Vec::new(),
            trailers: Vec::new(),
            complete: framing == Framing::None || framing == (Framing::Length { left: 0 }),
            at: now(),
        };
        ordinal += 1;
        let index = {
            let mut state = shared.lock();
            state.connections[number].used = true;
            state.active.insert(number, wire.socket.as_raw_fd());
            let alive = state.active.values().filter(|fd| !peer_gone(**fd)).count();
            state.active_max = state.active_max.max(alive);
            state.requests.push(request.clone());
            state.requests.len() - 1
        };
        let mut exchange = Exchange::new(request, framing, index, wire, shared);
        let next = (shared.handler)(&mut exchange).unwrap_or(Next::Close);
        let whole = exchange.request.complete;
        exchange.leave();
        match next {
            // A request whose body was not read cannot be followed by another.
            Next::Keep if whole => idle_limit = seconds(600),
            Next::CloseAfter(span) if whole => idle_limit = span,
            Next::Keep | Next::CloseAfter(_) => return Next::Close,
            ended => return ended,
        }
    }
}
