//! Everything that is not on a request's path, on one thread that is pinned to no core.
//!
//! * [`health`], [`models`], [`scrape`], [`resolve`], [`watch`]: what servers are up, what they serve and hold.
//! * [`registrations`]: servers that say themselves that they are there.
//! * [`state`]: what follows from that, and what the shards are told ([`port`]).
//! * [`drain`], [`signals`]: how the process ends.
//! * [`admin`], [`figures`], [`targets`], [`metrics`]: what operators see.
//! * [`faults`], `stargate_log`: what shards report, in a readable log.
//!
//! *Invariant*: nothing here blocks a shard; shards hear of changes through their rings. Nothing polls: tasks sleep until a
//! socket, a timer or a wake-up descriptor moves.
//! *Errors*: [`run`] fails only where its runtime or a descriptor cannot be made.
#![deny(unsafe_code)]

pub mod admin;
pub mod client;
pub mod drain;
pub mod faults;
pub mod figures;
pub mod health;
pub mod metrics;
pub mod models;
pub mod notify;
pub mod port;
pub mod registrations;
pub mod resolve;
pub mod scrape;
pub mod signals;
mod stargate_log;
pub mod state;
pub mod targets;
pub mod watch;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use tracing::{debug, error, info, warn};

use self::admin::Face;
use self::drain::Shutdown;
use self::health::Rules;
use self::notify::Notify;
use self::port::Port;
use self::resolve::Resolver;
use self::signals::{Bell, Signals};
use self::state::{State, Trusted};
use crate::clock::{Clock, Nanos};
use crate::proto::backend::catalog::Catalog;
use crate::proto::config::{Driver, EngineMetrics, Settings};
use crate::proto::ids::BackendId;
use crate::proto::message::Phase;
use crate::runtime;

/// Largest answer taken from a server, in bytes.
pub const BODY_BYTES_MAX: usize = 4 << 20;
/// Two publications are at least this far apart, so that a start with many servers does not rebuild the catalog for
/// each of them.
pub const PUBLISH_GAP_MS: u64 = 10;
/// Turn of what has no event of its own: counts of faults, benches that end.
const TURN_MS: u64 = 500;
/// How long the first look at the servers may hold up the word that the process is ready.
const READY_WAIT_MS: u64 = 1_500;
/// Turn while a ring to a shard was full.
const RETRY_MS: u64 = 5;

/// What the control thread takes from the settings.
#[derive(Clone, Debug)]
pub struct Options {
    /// io_uring where it can be had.
    pub uring: bool,
    pub rules: Rules,
    pub health_path: String,
    pub health_timeout_ms: u64,
    pub drain_settle_ms: u64,
    pub drain_timeout_ms: u64,
    /// Per server of the catalog: host and port to resolve, where its URL holds a name.
    pub names: Vec<Option<(Box<str>, u16)>>,
    /// Per server of the catalog: how its engine publishes its figures.
    pub engine_metrics: Vec<EngineMetrics>,
    /// What trusted listeners go by; `None`: there are none.
    pub trusted: Option<Trusted>,
    /// What the names of their metrics begin with.
    pub metrics_prefix: Box<str>,
    /// The effective configuration as TOML, without secrets.
    pub config_text: String,
}

/// Where others than clients come in.
#[derive(Debug)]
pub struct Doors {
    pub admin: TcpListener,
    /// For `GET /metrics` and nothing else.
    pub metrics: Option<TcpListener>,
}

impl Options {
    /// As the settings have it.
    pub fn new(settings: &Settings) -> Options {
        let health = &settings.health;
        let name = |(host, port): (&str, u16)| (host.into(), port);
        Options {
            uring: settings.runtime.driver != Driver::Epoll,
            rules: Rules { interval_ms: health.interval_ms, fall: health.fall, rise: health.rise },
            health_path: health.path.clone(),
            health_timeout_ms: health.timeout_ms,
            drain_settle_ms: settings.limits.drain_settle_ms,
            drain_timeout_ms: settings.limits.drain_timeout_ms,
            names: settings.all_servers().map(|server| server.url.unresolved().map(name)).collect(),
            engine_metrics: settings.all_servers().map(|server| server.metrics).collect(),
            trusted: Trusted::new(settings),
            metrics_prefix: settings.stargate.metrics_prefix.as_str().into(),
            config_text: settings.to_toml(),
        }
    }
}

/// What the tasks of this thread share.
#[derive(Debug)]
pub struct Shared<P> {
    pub options: Options,
    pub clock: Clock,
    pub state: RefCell<State<P>>,
    resolver: RefCell<Resolver>,
    /// An answer of the resolver arrived.
    resolved: Notify,
    /// The catalog or a server's health may have changed.
    changed: Notify,
    /// The shards' rings have what had changed.
    published: Notify,
    /// A check ended.
    checked: Notify,
    /// Notices arrived or a signal was handled.
    moved: Notify,
    /// Notices were taken in.
    polled: Notify,
}

/// Runs the control thread until the process is to end; returns the exit code: 0 all requests finished, 2 a shard failed
/// while starting, 3 requests were cut. Every shard was told to stop by then.
///
/// `catalog` is [`Settings::catalog`]; `ready` is called once, when every shard has started and every server has been looked
/// at, so that requests from then on find what is there (a server that hangs holds it up for [`READY_WAIT_MS`] at most).
pub fn run<P: Port + 'static>(
    options: Options,
    clock: Clock,
    port: P,
    catalog: Catalog,
    doors: Doors,
    signals: Signals,
    ready: impl FnOnce() + 'static,
) -> io::Result<u8> {
    let uring = options.uring;
    runtime::block_on(uring, serve(options, clock, port, catalog, doors, signals, ready))?
}

async fn serve<P: Port + 'static>(
    options: Options,
    clock: Clock,
    port: P,
    catalog: Catalog,
    doors: Doors,
    signals: Signals,
    ready: impl FnOnce() + 'static,
) -> io::Result<u8> {
    let wake_fd = port.wake_fd()?;
    let (resolver, answers) = Resolver::new()?;
    let now = clock.now();
    let shutdown = Shutdown::new(port.shards(), options.drain_settle_ms, options.drain_timeout_ms);
    let servers = catalog.servers.len();
    let mut state = State::new(port, options.rules, catalog, options.names.clone(), shutdown, now);
    state.set_engine_metrics(&options.engine_metrics);
    state.trust(options.trusted.clone());
    let shared = Rc::new(Shared {
        options,
        clock,
        state: RefCell::new(state),
        resolver: RefCell::new(resolver),
        resolved: Notify::default(),
        changed: Notify::default(),
        published: Notify::default(),
        checked: Notify::default(),
        moved: Notify::default(),
        polled: Notify::default(),
    });
    let (terminate, hangup, _handlers) = signals.listen()?;
    monoio::spawn(take_terminations(shared.clone(), terminate));
    monoio::spawn(take_hangups(hangup));
    monoio::spawn(take_wakes(shared.clone(), wake_fd));
    monoio::spawn(watch::take_answers(shared.clone(), answers));
    monoio::spawn(publish(shared.clone()));
    monoio::spawn(admin::serve(shared.clone(), doors.admin, Face::Admin)?);
    if let Some(metrics) = doors.metrics {
        monoio::spawn(admin::serve(shared.clone(), metrics, Face::Metrics)?);
    }
    for index in 0..servers {
        let id = BackendId(u16::try_from(index).expect("the number of servers was checked"));
        monoio::spawn(watch::watch(shared.clone(), id, 0));
    }
    shared.changed.notify();
    Ok(turn(&shared, ready).await)
}

/// The main task: takes in notices and keeps time until there is an exit code.
async fn turn<P: Port>(shared: &Shared<P>, ready: impl FnOnce()) -> u8 {
    let mut ready = Some(ready);
    let ready_by = shared.clock.now().plus_ms(READY_WAIT_MS);
    let mut next_turn = Nanos::ZERO;
    loop {
        let seen = shared.moved.seen();
        let now = shared.clock.now();
        let (deadline, sent) = {
            let mut state = shared.state.borrow_mut();
            // What comes after this poll writes the descriptor.
            state.arm();
            if state.poll(now) > 0 {
                shared.polled.notify();
            }
            if now >= next_turn || now >= state.deadline() {
                next_turn = now.plus_ms(TURN_MS);
                state.handle_timeout(now);
            }
            (state.deadline(), state.flush())
        };
        watch::notify_if_changed(shared);
        if let Some(code) = shared.state.borrow().exit() {
            return code;
        }
        let mut until = next_turn.min(deadline);
        if ready.is_some() && shared.state.borrow().all_started() {
            if shared.state.borrow().settled() || now >= ready_by {
                log_start(shared);
                ready.take().expect("checked above")();
            }
            until = until.min(ready_by);
        }
        if !sent {
            until = until.min(now.plus_ms(RETRY_MS));
        }
        let pause = Duration::from_nanos(until.since(shared.clock.now()));
        let _ = monoio::time::timeout(pause, shared.moved.changed(seen)).await;
    }
}

fn log_start<P: Port>(shared: &Shared<P>) {
    let state = shared.state.borrow();
    let uring =
        state.shards().iter().filter(|s| matches!(s, state::ShardState::Running { io_uring: true })).count();
    let shards = state.shards().len();
    let catalog = state.catalog();
    info!(
        version = env!("CARGO_PKG_VERSION"),
        shards,
        io_uring = uring,
        epoll = shards - uring,
        servers = catalog.servers.len(),
        pools = catalog.pools.len(),
        "ringway runs"
    );
}

/// Publishes what changed, at most once per [`PUBLISH_GAP_MS`].
async fn publish<P: Port + 'static>(shared: Rc<Shared<P>>) {
    let mut seen = 0;
    loop {
        seen = shared.changed.changed(seen).await;
        shared.state.borrow_mut().publish(shared.clock.now());
        shared.published.notify();
        // What the rings had no room for is the main task's to send.
        shared.moved.notify();
        monoio::time::sleep(Duration::from_millis(PUBLISH_GAP_MS)).await;
    }
}

async fn take_terminations<P: Port + 'static>(shared: Rc<Shared<P>>, mut bell: Bell) {
    loop {
        match bell.ring().await {
            Ok(rings) => {
                for _ in 0..rings {
                    shared.state.borrow_mut().handle_terminate(shared.clock.now());
                }
                shared.moved.notify();
            }
            Err(failure) => return error!("signals are no longer heard: {failure}"),
        }
    }
}

async fn take_hangups(mut bell: Bell) {
    while bell.ring().await.is_ok() {
        warn!("SIGHUP: reload is not in this version; the configuration stays as it is");
    }
}

/// Turns the mesh's wake-up descriptor into [`Shared::moved`].
async fn take_wakes<P: Port + 'static>(shared: Rc<Shared<P>>, wake_fd: OwnedFd) {
    // Any descriptor can be waited for; the stream type is only what the runtime offers for it.
    let waited = wake_fd
        .try_clone()
        .map(std::os::unix::net::UnixStream::from)
        .and_then(monoio::net::UnixStream::from_std);
    let waited = match waited {
        Ok(waited) => waited,
        Err(failure) => return error!("shards are heard only every {TURN_MS} ms: {failure}"),
    };
    let mut file = File::from(wake_fd);
    loop {
        if let Err(failure) = waited.readable(false).await {
            return error!("shards are heard only every {TURN_MS} ms: {failure}");
        }
        match file.read(&mut [0; 8]) {
            Ok(_) => shared.moved.notify(),
            Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => {}
            Err(failure) => debug!("wake-up descriptor: {failure}"),
        }
    }
}

impl<P: Port> Shared<P> {
    /// Asks all shards for their figures and waits for them, at most `wait_ms`; then the last ones known do.
    async fn fresh_figures(&self, wait_ms: u64) -> figures::Figures {
        self.newest_figures(wait_ms).await.0
    }

    /// The same, and whether every shard answered in time.
    async fn newest_figures(&self, wait_ms: u64) -> (figures::Figures, bool) {
        let number = self.state.borrow_mut().ask_reports();
        let arrival = async {
            let mut seen = self.polled.seen();
            while !self.state.borrow().have_reports(number) {
                seen = self.polled.changed(seen).await;
            }
        };
        let all = monoio::time::timeout(Duration::from_millis(wait_ms), arrival).await.is_ok();
        if !all {
            debug!(number, "not every shard reported in time");
        }
        (self.state.borrow().figures(self.clock.now()), all)
    }

    fn draining(&self) -> bool {
        self.state.borrow().phase() != Phase::Serving
    }
}

#[cfg(test)]
mod tests;
