//! What the control thread knows, and what follows from it: health, models, readiness, the shutdown, the shards' figures.
//!
//! Tasks report what happened (`handle_…`); this decides what the shards are told and what the log says.
//!
//! *Invariant*: no I/O of its own and no clock; `now` is an argument. Shards hear of readiness after the catalog it rests on. A catalog
//! goes out only when something in it changed, with a higher version.
//! *Bound and cost*: O(servers × shards) memory; a publication costs O(models + servers) per shard and is asked for at
//! most once per [`super::PUBLISH_GAP_MS`].
//! *Errors*: none; what goes wrong is logged and retried by the tasks. No key and no prompt is ever logged.

use std::net::SocketAddr;

use tracing::{debug, error, info, warn};

use super::client::FetchError;
use super::drain::{Order, Orders, Shutdown};
use super::faults::{FaultLog, Line};
use super::health::{Check, Rules};
use super::models::{self, Listed, Source};
use super::port::Port;
use crate::clock::Nanos;
use crate::proto::backend::catalog::{Address, Catalog};
use crate::proto::backend::grouping::rebuild_groups;
use crate::proto::config::EngineMetrics;
use crate::proto::ids::{BackendId, ShardId};
use crate::proto::message::{Notice, Phase, Update};
use crate::proto::report::ShardReport;

mod engines;
mod live;
mod names;
mod shares;
mod targets;

pub use engines::CapacitySource;
use engines::Engine;
pub use names::RESOLVE_RETRY_MS;
use shares::Shares;
use targets::Targets;
pub use targets::{Opened, Refused, Trusted};

/// Models named in one line of the log; the rest is a count.
const MODELS_LOGGED_MAX: usize = 8;

/// What the control thread keeps for one server beside the catalog.
#[derive(Debug)]
struct Watched {
    check: Check,
    /// Host and port to resolve; `None`: its address is fixed.
    name: Option<(Box<str>, u16)>,
    /// What the name resolved to last, the address in use first.
    resolved: Vec<SocketAddr>,
    /// A question to the resolver is under way.
    asked: bool,
    /// The last answer was an error, which the log has told.
    unresolved_told: bool,
    resolve_due: Nanos,
    /// Its models stand in the configuration.
    configured: bool,
    /// The engine's own list.
    listed: Vec<Listed>,
    /// When its list is to be read (again).
    learn_due: Nanos,
    /// A reading is under way: that of this generation.
    learning: bool,
    /// It is up, but its list could not be read: it is not waited for.
    silent: bool,
    /// How often the server came up. A reading of an earlier life of the engine counts for nothing.
    generation: u64,
    /// Until when it is benched. A verdict of one shard holds on all.
    benched_until: Nanos,
    engine: Engine,
    /// Counts how often the server was taken up and given up.
    life: u64,
}

impl Watched {
    fn new(
        check: Check,
        now: Nanos,
        name: Option<(Box<str>, u16)>,
        configured: bool,
        kind: EngineMetrics,
    ) -> Self {
        Watched {
            check,
            name,
            resolved: Vec::new(),
            asked: false,
            unresolved_told: false,
            resolve_due: now,
            configured,
            listed: Vec::new(),
            learn_due: now,
            learning: false,
            silent: false,
            generation: 0,
            benched_until: Nanos::ZERO,
            engine: Engine::new(kind),
            life: 0,
        }
    }
}

/// How a shard runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardState {
    Starting,
    Running { io_uring: bool },
    Failed,
}

/// See the module's text.
#[derive(Debug)]
pub struct State<P> {
    port: P,
    rules: Rules,
    /// As it will be published next.
    catalog: Catalog,
    /// As it was published last.
    published: Option<Catalog>,
    /// Something that is published may have changed.
    changed: bool,
    watched: Vec<Watched>,
    shards: Vec<ShardState>,
    reports: Vec<Option<Box<ShardReport>>>,
    report_number: u64,
    shares: Shares,
    faults: FaultLog,
    targets: Targets,
    shutdown: Shutdown,
    ready: Option<bool>,
    exit: Option<u8>,
}

/// How often a list of models is read again, in milliseconds.
pub const LEARN_EVERY_MS: u64 = 30_000;
/// A shard failed while the process started.
pub const EXIT_NOT_STARTED: u8 = 2;

impl<P: Port> State<P> {
    /// `catalog` as the configuration gives it; `names[i]` is the host and port to resolve of server `i`.
    pub fn new(
        port: P,
        rules: Rules,
        catalog: Catalog,
        names: Vec<Option<(Box<str>, u16)>>,
        shutdown: Shutdown,
        now: Nanos,
    ) -> Self {
        let shards = port.shards();
        assert_eq!(names.len(), catalog.servers.len(), "one entry per server");
        let watched = catalog
            .servers
            .iter()
            .zip(names)
            .enumerate()
            .map(|(index, (server, name))| {
                let configured = server.models.is_some();
                Watched::new(Check::new(index, now), now, name, configured, EngineMetrics::Auto)
            })
            .collect();
        State {
            port,
            rules,
            catalog,
            published: None,
            changed: true,
            watched,
            shards: vec![ShardState::Starting; shards],
            reports: vec![None; shards],
            report_number: 0,
            shares: Shares::default(),
            faults: FaultLog::default(),
            targets: Targets::default(),
            shutdown,
            ready: None,
            exit: None,
        }
    }

    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    pub fn shards(&self) -> &[ShardState] {
        &self.shards
    }

    /// The exit code, once the process is to end.
    pub const fn exit(&self) -> Option<u8> {
        self.exit
    }

    pub const fn phase(&self) -> Phase {
        self.shutdown.phase()
    }

    /// What `/readiness` says.
    pub fn ready(&self) -> bool {
        self.ready == Some(true)
    }

    pub fn all_started(&self) -> bool {
        self.shards.iter().all(|shard| matches!(shard, ShardState::Running { .. }))
    }

    /// When the next check of a server is to start.
    pub fn check_due(&self, id: BackendId) -> Nanos {
        self.watched[id.index()].check.due()
    }

    /// A check ended: which of the addresses answered, or why it failed. Returns the generation of the reading of its
    /// list of models that is to start now, if one is.
    pub fn handle_check(
        &mut self,
        id: BackendId,
        started: Nanos,
        now: Nanos,
        result: Result<usize, CheckFailure>,
    ) -> Option<u64> {
        let rules = self.rules(id);
        let server = &mut self.catalog.servers[id.index()];
        let watched = &mut self.watched[id.index()];
        let first = watched.check.unknown();
        let turn = watched.check.record(&rules, started, now, result.is_ok());
        match &result {
            Ok(answered) => {
                if watched.name.is_some()
                    && let Some(address) = watched.resolved.get(*answered).copied()
                {
                    watched.resolved[..=*answered].rotate_right(1);
                    if server.address != Some(Address::Tcp(address)) {
                        info!(server = %server.name, %address, "server address");
                        server.address = Some(Address::Tcp(address));
                        self.changed = true;
                    }
                }
            }
            Err(_) => watched.resolve_due = watched.resolve_due.min(now.plus_ms(RESOLVE_RETRY_MS)),
        }
        let mut returned = false;
        match (turn, &result) {
            (Some(true), _) => {
                info!(server = %server.name, url = %server.url, "server up");
                watched.learn_due = now;
                watched.learning = false;
                watched.silent = false;
                watched.generation += 1;
                returned = watched.generation > 1;
            }
            (turn, Err(failure)) if server.registered && (first || turn.is_some()) => {
                warn!(
                    inference_server_id = %server.name,
                    inference_server_url = %server.url,
                    "health check failed: {failure}"
                );
            }
            (Some(false), Err(failure)) if !first => {
                warn!(server = %server.name, url = %server.url, "server down: {failure}");
            }
            (_, Err(failure)) if first => {
                warn!(server = %server.name, url = %server.url, "server not up: {failure}");
            }
            (_, Err(failure)) => debug!(server = %server.name, "check failed: {failure}"),
            _ => {}
        }
        self.changed |= first;
        // Shards take a server for up until they hear of it, so the first word is said in any case.
        if let Some(up) = turn.or(first.then_some(false)) {
            self.changed = true;
            self.tell_all(|| Update::Health { backend: id, up });
        }
        if returned {
            self.handle_return(id);
        }
        let watched = &mut self.watched[id.index()];
        let learn =
            watched.check.up() && !watched.configured && !watched.learning && now >= watched.learn_due;
        watched.learning |= learn;
        learn.then_some(watched.generation)
    }

    /// Whether the reading of a server's list goes on trying; if not, the next good check starts another.
    pub fn goes_on_learning(&mut self, id: BackendId, generation: u64) -> bool {
        let watched = &mut self.watched[id.index()];
        if watched.generation != generation {
            return false;
        }
        watched.learning = watched.check.up();
        self.changed |= !watched.silent;
        watched.silent = true;
        watched.learning
    }

    /// What this server serves may yet turn out: it has not been checked, or is up and being asked.
    fn undecided(&self, index: usize) -> bool {
        let watched = &self.watched[index];
        let server = &self.catalog.servers[index];
        let unlisted = server.models.is_none() && watched.check.up() && !watched.silent;
        server.is_pooled() && (watched.check.unknown() || unlisted)
    }

    /// Every server has been checked, and those that are up have been asked what they serve.
    pub fn settled(&self) -> bool {
        !(0..self.watched.len()).any(|index| self.undecided(index))
    }

    /// A server's list arrived; `None`: it has no such endpoint, so it serves every model.
    pub fn handle_listing(
        &mut self,
        id: BackendId,
        generation: u64,
        now: Nanos,
        listing: Option<Vec<Listed>>,
    ) {
        let server = &mut self.catalog.servers[id.index()];
        let watched = &mut self.watched[id.index()];
        if watched.generation != generation {
            return;
        }
        watched.learning = false;
        watched.silent = false;
        watched.learn_due = now.plus_ms(LEARN_EVERY_MS);
        let listed = listing.unwrap_or_default();
        let names: Vec<Box<str>> = listed.iter().map(|model| model.id.clone()).collect();
        if server.models.as_deref() != Some(&names[..]) {
            // An engine chooses these names: escaped, they cannot pass for lines of the log.
            let shown = names.iter().take(MODELS_LOGGED_MAX).map(|name| name.escape_debug().to_string());
            let shown = shown.collect::<Vec<_>>().join(", ");
            match names.len() {
                0 => info!(server = %server.name, "server lists no models: it takes every model"),
                count if count > MODELS_LOGGED_MAX => {
                    info!(server = %server.name, count, "server models: {shown}, …");
                }
                count => info!(server = %server.name, count, "server models: {shown}"),
            }
            server.models = Some(names);
            self.changed = true;
        }
        if watched.listed != listed {
            watched.listed = listed;
            self.changed = true;
        }
    }

    /// Whether [`State::publish`] has something to do.
    pub const fn changed(&self) -> bool {
        self.changed
    }

    /// A notice of a shard.
    pub fn handle_notice(&mut self, now: Nanos, shard: ShardId, notice: Notice) {
        match notice {
            Notice::Started { io_uring, downgrade } => {
                self.shards[shard.index()] = ShardState::Running { io_uring };
                let driver = if io_uring { "io_uring" } else { "epoll" };
                match downgrade {
                    Some(reason) => {
                        warn!(shard = shard.0, driver, "not on the best I/O driver: {reason}");
                    }
                    None => debug!(shard = shard.0, driver, "shard runs"),
                }
            }
            Notice::Report(report) => {
                self.reports[shard.index()] = Some(report);
                self.take_sample(now);
            }
            Notice::UpstreamFault { backend, fault, errno } => {
                if let Some(line) = self.faults.note(now, backend, fault, errno) {
                    self.log_fault(line);
                }
            }
            Notice::Benched { backend, ms } => {
                let name = &self.catalog.servers[backend.index()].name;
                warn!(server = %name, shard = shard.0, ms, "server benched after failures in a row");
                self.watched[backend.index()].benched_until = now.plus_ms(ms);
            }
            Notice::Unbenched { backend } => {
                let name = &self.catalog.servers[backend.index()].name;
                info!(server = %name, shard = shard.0, "server back from the bench");
                self.watched[backend.index()].benched_until = Nanos::ZERO;
            }
            Notice::Stargate(notice) => super::stargate_log::log(&notice),
            Notice::Drained { shard } => {
                debug!(shard = shard.0, "shard drained");
                let orders = self.shutdown.handle_drained(shard);
                self.obey(orders);
            }
            Notice::Failed { shard, text } => {
                error!(shard = shard.0, "shard failed: {text}");
                let started = self.all_started();
                self.shards[shard.index()] = ShardState::Failed;
                if started || self.shutdown.phase() != Phase::Serving {
                    let orders = self.shutdown.handle_failed(shard, now);
                    self.obey(orders);
                } else {
                    self.exit.get_or_insert(EXIT_NOT_STARTED);
                }
            }
        }
    }

    /// Asks for a wake-up with the next notice; poll after it.
    pub fn arm(&self) {
        self.port.arm();
    }

    /// Takes in all notices that have arrived. Returns how many there were.
    pub fn poll(&mut self, now: Nanos) -> usize {
        let mut arrived = Vec::new();
        self.port.poll(&mut |shard, notice| arrived.push((shard, notice)));
        let count = arrived.len();
        for (shard, notice) in arrived {
            self.handle_notice(now, shard, notice);
        }
        count
    }

    /// Sends what the rings had no room for; true when nothing is left.
    pub fn flush(&mut self) -> bool {
        self.port.retry()
    }

    /// A signal to end arrived.
    pub fn handle_terminate(&mut self, now: Nanos) {
        match self.phase() {
            Phase::Serving => info!("signal to end: no longer ready, finishing running requests"),
            _ => warn!("second signal to end: cutting running requests"),
        }
        let orders = self.shutdown.handle_terminate(now);
        self.obey(orders);
        self.update_readiness(now);
    }

    /// Time has passed: the shutdown's next step, benches that ended, counts of faults.
    pub fn handle_timeout(&mut self, now: Nanos) {
        let orders = self.shutdown.handle_timeout(now);
        if orders.contains(&Order::Exit(super::drain::EXIT_FORCED)) {
            warn!("the drain limit is over: cutting running requests");
        }
        self.obey(orders);
        for line in self.faults.sweep(now) {
            self.log_fault(line);
        }
        self.expire_registrations(now);
        self.ask_sample(now);
        self.update_readiness(now);
    }

    /// When [`State::handle_timeout`] must be called at the latest, beside its regular turn: the shutdown's next step, or a
    /// registration that runs out.
    pub fn deadline(&self) -> Nanos {
        self.shutdown.deadline().min(self.registrations_deadline())
    }

    /// Brings the shards' catalog and readiness up to date.
    pub fn publish(&mut self, now: Nanos) {
        self.changed = false;
        self.catalog.models_body = self.models_body();
        rebuild_groups(&mut self.catalog);
        self.lay_out();
        // A server that is down, or does not say what it serves, does not leave unknown models open for ever.
        self.catalog.learning = !self.settled();
        if self.published.as_ref() != Some(&self.catalog) {
            self.catalog.version += 1;
            let catalog = self.catalog.clone();
            self.tell_all(|| Update::Catalog(Box::new(catalog.clone())));
            let before = self.published.replace(catalog);
            self.forget_moved(before.as_ref());
        }
        self.tell_reports();
        self.update_readiness(now);
    }

    /// Asks every shard for its figures; returns the number their reports will carry.
    pub fn ask_reports(&mut self) -> u64 {
        self.report_number += 1;
        let number = self.report_number;
        self.tell_all(|| Update::Report { number });
        number
    }

    /// Every shard that runs has answered the question `number` or a later one.
    pub fn have_reports(&self, number: u64) -> bool {
        let answered =
            |report: &Option<Box<ShardReport>>| report.as_ref().is_some_and(|r| r.number >= number);
        self.reports
            .iter()
            .zip(&self.shards)
            .all(|(report, shard)| answered(report) || *shard == ShardState::Failed)
    }

    fn models_body(&self) -> Box<[u8]> {
        let live = self
            .catalog
            .servers
            .iter()
            .zip(&self.watched)
            .filter(|(server, watched)| watched.check.up() && server.is_pooled());
        models::union(live.map(|(server, watched)| match watched.configured {
            true => Source::Configured(server.models.as_deref().unwrap_or_default()),
            false => Source::Listed(&watched.listed),
        }))
    }

    fn update_readiness(&mut self, now: Nanos) {
        let routable = self.is_routable(now);
        // Before the first publication the shards know nothing that they could route by.
        let ready = routable && self.published.is_some() && self.phase() == Phase::Serving;
        if self.ready != Some(ready) {
            match ready {
                true => info!("ready: at least one server is routable"),
                false if self.ready.is_none() => debug!("not ready yet: no server is routable"),
                false if self.phase() == Phase::Serving => warn!("no longer ready: no server is routable"),
                false => info!("no longer ready: the process ends"),
            }
            self.ready = Some(ready);
            self.tell_all(|| Update::Ready(ready));
        }
    }

    fn obey(&mut self, orders: Orders) {
        for order in orders {
            match order {
                Order::Phase(phase) => {
                    info!(?phase, "shutdown");
                    self.tell_all(|| Update::Phase(phase));
                }
                Order::Exit(code) => {
                    self.exit.get_or_insert(code);
                }
            }
        }
    }

    fn tell_all(&mut self, update: impl Fn() -> Update) {
        for shard in 0..self.shards.len() {
            self.port.update(ShardId(shard as u8), update());
        }
    }

    fn log_fault(&self, line: Line) {
        let Some(server) = self.catalog.servers.get(line.backend.index()) else { return };
        let (server, kind) = (&server.name, line.fault.name());
        let system = match line.errno {
            0 => String::new(),
            errno => format!(": {}", std::io::Error::from_raw_os_error(errno)),
        };
        match line.count {
            None => warn!(%server, kind, "request to server failed{system}"),
            Some(count) => warn!(%server, kind, count, "requests to server failed within a second{system}"),
        }
    }
}

/// Why a check failed.
#[derive(Debug)]
pub enum CheckFailure {
    Fetch(FetchError),
    /// Anything but 2xx.
    Status(u16),
}

impl std::fmt::Display for CheckFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CheckFailure::Fetch(failure) => failure.fmt(f),
            CheckFailure::Status(status) => write!(f, "answered {status}, expected 2xx"),
        }
    }
}

#[cfg(test)]
mod tests;
