//! What is known of the engines themselves: how much their caches hold, and when one has lost what it held.
//!
//! A server's memory of prefix blocks is void when its engine restarts or another takes its address. An engine that comes back up is
//! taken for restarted at once, unless what it publishes can tell: then the scrape that follows decides.
//!
//! *Invariant*: shards hear of an address before they are told to forget what the old one held. A scrape that began before its
//! server last came up counts for nothing.
//! *Source*: the Lifeboat rules, section 5.

use tracing::{debug, info};

use super::State;
use crate::clock::Nanos;
use crate::control::port::Port;
use crate::control::scrape::load::{Limits, Load, Task};
use crate::control::scrape::{EVERY_MS, Facts, Life, SILENT_EVERY_MS, blocks};
use crate::proto::backend::catalog::{Algorithm, Catalog};
use crate::proto::config::EngineMetrics;
use crate::proto::ids::BackendId;
use crate::proto::message::Update;

/// Where a server's cache size comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacitySource {
    Engine,
    Configured,
    Default,
}

impl CapacitySource {
    /// As the state shows it.
    pub const fn name(self) -> &'static str {
        match self {
            CapacitySource::Engine => "engine",
            CapacitySource::Configured => "configured",
            CapacitySource::Default => "default",
        }
    }
}

/// One server's engine.
#[derive(Debug)]
pub(super) struct Engine {
    kind: EngineMetrics,
    due: Nanos,
    /// A scrape is under way.
    busy: bool,
    /// As the last scrape found it.
    life: Life,
    /// It came back up, and whether it is the same is for the next scrape to say.
    suspect: bool,
    /// As the engine said last.
    blocks: Option<u32>,
    /// When it may be asked next how busy it is.
    load_due: Nanos,
    /// That question is under way.
    load_busy: bool,
    limits: Option<Limits>,
}

/// Between two questions how busy an engine is, at least.
const LOAD_GAP_MS: u64 = 500;

impl Engine {
    pub(super) fn new(kind: EngineMetrics) -> Self {
        Engine {
            kind,
            due: Nanos::ZERO,
            busy: false,
            life: Life::default(),
            suspect: false,
            blocks: None,
            load_due: Nanos::ZERO,
            load_busy: false,
            limits: None,
        }
    }
}

impl<P: Port> State<P> {
    /// How each server's engine publishes its figures, in the order of the catalog; [`EngineMetrics::Auto`] before this.
    pub fn set_engine_metrics(&mut self, kinds: &[EngineMetrics]) {
        for (watched, kind) in self.watched.iter_mut().zip(kinds) {
            watched.engine = Engine::new(*kind);
        }
    }

    /// Whether a server's prefixes are remembered at all.
    fn is_kv_aware(&self, id: BackendId) -> bool {
        let server = self.catalog.server(id);
        !server.removed
            && server.pool.is_some_and(|pool| self.catalog.pool(pool).algorithm == Algorithm::KvAware)
    }

    /// Whether a scrape of this server is to start now; it then counts as under way. Its format, and the round it belongs to.
    pub fn take_scrape(&mut self, id: BackendId, now: Nanos) -> Option<(EngineMetrics, u64)> {
        if !self.is_kv_aware(id) {
            return None;
        }
        let watched = &mut self.watched[id.index()];
        let engine = &mut watched.engine;
        if engine.kind == EngineMetrics::None || !watched.check.up() || engine.busy || now < engine.due {
            return None;
        }
        engine.busy = true;
        Some((engine.kind, watched.generation))
    }

    /// A scrape ended. `None`: the engine could not be read.
    pub fn handle_scrape(&mut self, id: BackendId, round: u64, now: Nanos, facts: Option<Facts>) {
        let watched = &mut self.watched[id.index()];
        if watched.generation != round {
            return;
        }
        let server = &mut self.catalog.servers[id.index()];
        let engine = &mut watched.engine;
        engine.busy = false;
        let suspect = std::mem::take(&mut engine.suspect);
        let (life, tokens) = facts.map_or((Life::default(), None), |facts| (facts.life, facts.cache_tokens));
        let ended = engine.life.ended(&life).unwrap_or(suspect);
        if facts.is_some() {
            engine.life = life;
        }
        let silent = facts.is_some_and(|facts| facts.engine == EngineMetrics::Auto);
        // Whoever else reads TensorRT-LLM's statistics would miss what is read here.
        let known = facts.is_some_and(|facts| facts.engine == EngineMetrics::Trtllm) && tokens.is_some();
        engine.due = now.plus_ms(match (known, silent) {
            (true, _) => u64::MAX,
            (false, true) => SILENT_EVERY_MS,
            (false, false) => EVERY_MS,
        });
        if let (Some(tokens), Some(pool)) = (tokens, server.pool) {
            let rules = &self.catalog.pools[pool.index()].kv;
            let found = blocks(tokens, rules.block_bytes);
            if engine.blocks != Some(found) {
                info!(server = %server.name, cache_tokens = tokens, blocks = found, "engine cache size");
                engine.blocks = Some(found);
            }
            if server.kv_capacity_blocks != found {
                server.kv_capacity_blocks = found;
                self.changed = true;
            }
        }
        if ended {
            self.forget(id, "its engine restarted");
        }
    }

    /// Whether an engine is to be asked now how busy it is; the question then counts as under way.
    pub fn take_load(&mut self, id: BackendId, now: Nanos) -> Option<Task> {
        let watched = &self.watched[id.index()];
        let engine = &watched.engine;
        let can = engine.kind != EngineMetrics::None && watched.check.up();
        if !can || engine.load_busy || now < engine.load_due || self.measured_slots(id).is_empty() {
            return None;
        }
        let watched = &mut self.watched[id.index()];
        watched.engine.load_busy = true;
        Some(Task { kind: watched.engine.kind, round: watched.generation, limits: watched.engine.limits })
    }

    /// An engine that was asked at `asked` said how busy it is. `None`: it did not answer.
    pub fn handle_load(
        &mut self,
        id: BackendId,
        round: u64,
        asked: Nanos,
        found: Option<(Load, Option<Limits>)>,
    ) {
        let watched = &mut self.watched[id.index()];
        if watched.generation != round {
            return;
        }
        let engine = &mut watched.engine;
        engine.load_busy = false;
        engine.load_due = asked.plus_ms(LOAD_GAP_MS);
        let Some((load, limits)) = found else { return };
        engine.limits = limits;
        match (engine.kind, load.engine) {
            // Nothing that is known here is published.
            (EngineMetrics::Auto, EngineMetrics::Auto) => engine.load_due = asked.plus_ms(SILENT_EVERY_MS),
            // Whoever else reads these would miss what is read here; the configuration has to ask for it.
            (EngineMetrics::Auto, EngineMetrics::Trtllm) => {
                engine.load_due = Nanos::NEVER;
                let name = &self.catalog.server(id).name;
                info!(server = %name, "TensorRT-LLM's figures are read where the server says metrics = \"trtllm\"");
            }
            _ => self.tell_load(id, asked, load),
        }
    }

    /// A server that was up before came up again.
    pub(super) fn handle_return(&mut self, id: BackendId) {
        let scraped = self.is_kv_aware(id);
        let engine = &mut self.watched[id.index()].engine;
        engine.due = Nanos::ZERO;
        engine.busy = false;
        engine.load_due = Nanos::ZERO;
        engine.load_busy = false;
        engine.limits = None;
        if scraped && engine.kind != EngineMetrics::None && engine.life != Life::default() {
            engine.suspect = true;
        } else {
            self.forget(id, "it was down");
        }
    }

    /// A catalog went out that may have given servers other addresses.
    pub(super) fn forget_moved(&mut self, before: Option<&Catalog>) {
        let Some(before) = before else { return };
        let pairs = before.servers.iter().zip(&self.catalog.servers).enumerate();
        let moved = pairs.filter(|(_, (old, new))| old.address.is_some() && old.address != new.address);
        let moved: Vec<BackendId> = moved.map(|(index, _)| BackendId(index as u16)).collect();
        for id in moved {
            self.watched[id.index()].engine.life = Life::default();
            self.forget(id, "it has another address");
        }
    }

    fn forget(&mut self, id: BackendId, why: &str) {
        let name = &self.catalog.server(id).name;
        match self.is_kv_aware(id) {
            true => info!(server = %name, "prefix memory starts empty: {why}"),
            false => debug!(server = %name, "nothing to forget: {why}"),
        }
        self.tell_all(|| Update::Forget { backend: id });
    }

    /// Where a server's cache size comes from; `None`: its prefixes are not remembered.
    pub fn capacity_source(&self, id: BackendId) -> Option<CapacitySource> {
        if !self.is_kv_aware(id) {
            return None;
        }
        let pool = self.catalog.server(id).pool?;
        Some(match (self.watched[id.index()].engine.blocks, self.catalog.pool(pool).kv.kv_capacity_blocks) {
            (Some(_), _) => CapacitySource::Engine,
            (None, 0) => CapacitySource::Default,
            (None, _) => CapacitySource::Configured,
        })
    }
}
