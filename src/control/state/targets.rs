//! What trusted listeners go by beside the catalog: the layout of slots, registrations, what servers report, round trips.
//!
//! *Invariant*: shards hear of a slot before they hear what is reported of it. A slot's number stands for the same server and model
//! for the life of the process. While no listener is trusted nothing here is kept up, and no registration is taken.
//! *Bound and cost*: [`SLOTS_MAX`] slots and [`BACKENDS_MAX`] servers that ever were. A renewal that changes no structure costs one
//! update per model and shard; else the next publication, which is O(slots).
//! *Errors*: [`Refused`].
//! *Source*: the Stargate rules, sections 6.6, 6.7 and 8.2; the configuration reference, admin API.

use std::collections::HashMap;

use tracing::{info, warn};

use super::{State, Watched};
use crate::clock::Nanos;
use crate::control::health::{Check, Rules};
use crate::control::port::Port;
use crate::control::registrations::{Registration, Registrations, Step, body::Snapshot, cluster_of};
use crate::control::scrape::load::Load;
use crate::limits::{BACKENDS_MAX, SLOTS_MAX};
use crate::proto::backend::catalog::{KV_CAPACITY_BLOCKS, Server};
use crate::proto::config::{EngineMetrics, ServerUrl, Settings};
use crate::proto::ids::BackendId;
use crate::proto::message::Update;
use crate::proto::stargate::layout::{Slot, SlotId};
use crate::proto::stargate::stats::{Reported, Scraped};

pub use crate::control::registrations::Refused;

/// From the start of one check of a server to the start of the next, at most.
const CHECK_EVERY_MS: u64 = 1_000;
/// Round trips that differ by less than this, or by less than the part below, are told as one.
const ROUND_TRIP_STEP_NS: u64 = 50_000;
const ROUND_TRIP_STEP_PART: u64 = 16;

/// What the settings say of trusted listeners.
#[derive(Clone, Debug, Default)]
pub struct Trusted {
    /// Every listener is one: readiness is that of their targets.
    pub only: bool,
    /// By server of the first catalog.
    pub servers: Vec<Place>,
    pub ttl_ms: u64,
    pub ttl_ms_max: u64,
}

impl Trusted {
    /// `None`: no listener is trusted.
    pub fn new(settings: &Settings) -> Option<Trusted> {
        let place = |server: &crate::proto::config::ServerSettings| Place {
            cluster_id: match server.cluster_id.as_str() {
                "" => server.name.as_str().into(),
                cluster_id => cluster_id.into(),
            },
            routing_keys: server.routing_keys.iter().map(|key| key.as_str().into()).collect(),
            input_tps: server.input_tps,
        };
        let trusted = |listener: &crate::proto::config::Listener| {
            listener.profile == crate::proto::config::Profile::Stargate
        };
        settings.has_trusted_listener().then(|| Trusted {
            only: settings.listeners.iter().all(trusted),
            servers: settings.all_servers().map(place).collect(),
            ttl_ms: settings.stargate.registration_ttl_ms,
            ttl_ms_max: settings.stargate.registration_ttl_ms_max,
        })
    }
}

/// Where a server stands among targets.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Never empty.
    pub cluster_id: Box<str>,
    pub routing_keys: Vec<Box<str>>,
    /// 0: as reported or measured.
    pub input_tps: f64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Targets {
    /// `None`: no listener is trusted.
    trusted: Option<Trusted>,
    registrations: Registrations,
    slots: HashMap<(BackendId, Box<str>), SlotId>,
    /// Of slots that the shards don't know yet.
    untold: Vec<(SlotId, Box<Reported>)>,
    /// By server: the round trip that shards know, in nanoseconds.
    round_trips: Vec<u64>,
    /// By server: what shards know of its engine.
    loads: Vec<Load>,
    /// It was said that there is no room for more slots.
    full_told: bool,
}

/// An accepted registration.
#[derive(Clone, Debug, PartialEq)]
pub struct Opened {
    pub backend: BackendId,
    /// It is to be watched from now on, as this life of it.
    pub watch: Option<u64>,
    pub lease: Box<str>,
    pub ttl_ms: u64,
    pub expires: Nanos,
}

impl<P: Port> State<P> {
    /// What the settings say of trusted listeners, before anything else happens.
    pub fn trust(&mut self, trusted: Option<Trusted>) {
        self.targets.trusted = trusted;
    }

    /// Some listener is trusted.
    pub fn is_trusting(&self) -> bool {
        self.targets.trusted.is_some()
    }

    pub fn registrations(&self) -> impl Iterator<Item = (&str, &Registration)> {
        self.targets.registrations.iter()
    }

    /// A number that changes when the server is taken up or given up. A task that watches an earlier life has to end.
    pub fn life(&self, id: BackendId) -> u64 {
        self.watched[id.index()].life
    }

    /// No check of the server has ended in this life.
    pub fn unchecked(&self, id: BackendId) -> bool {
        self.watched[id.index()].check.unknown()
    }

    /// How a server is checked.
    pub(super) fn rules(&self, id: BackendId) -> Rules {
        let often = Rules { interval_ms: self.rules.interval_ms.min(CHECK_EVERY_MS), ..self.rules };
        match (&self.targets.trusted, self.catalog.server(id).registered) {
            (None, _) => self.rules,
            (Some(_), false) => often,
            // One failed check takes it out, as the contract has it.
            (Some(_), true) => Rules { fall: 1, rise: 1, ..often },
        }
    }

    /// Opens or renews a registration. What it reports goes to the shards at once, or with the next publication.
    pub fn register(&mut self, now: Nanos, id: &str, snapshot: Snapshot) -> Result<Opened, Refused> {
        let trusted = self.targets.trusted.as_ref().ok_or(Refused::Unknown)?;
        let ttl_ms = snapshot.ttl_ms.unwrap_or(trusted.ttl_ms);
        self.expire_registrations(now);
        let step = match self.targets.registrations.judge(id, &snapshot) {
            Ok(step) => step,
            Err(refused) => {
                if matches!(refused, Refused::Moved { .. }) {
                    self.close_registration(id, "it changed what may not change");
                }
                return Err(refused);
            }
        };
        if step == Step::Open
            && self.catalog.servers.iter().any(|server| !server.removed && &*server.name == id)
        {
            return Err(Refused::Configured);
        }
        let former = self.targets.registrations.former(id, &snapshot);
        let known = match step {
            Step::Renew(backend) => Some(backend),
            Step::Open => former,
        };
        let is_new = |model: &str| {
            known.is_none_or(|backend| !self.targets.slots.contains_key(&(backend, Box::from(model))))
        };
        let more = snapshot.models.keys().filter(|model| is_new(model)).count();
        if self.targets.slots.len() + more > SLOTS_MAX {
            return Err(Refused::Full("pairs of a server and a model"));
        }
        let mut watch = None;
        let backend = match step {
            Step::Renew(backend) => {
                self.changed |= self.targets.registrations.renew(now, id, &snapshot, ttl_ms);
                backend
            }
            Step::Open => {
                let backend = self.take_up(now, id, &snapshot, former)?;
                self.targets.registrations.open(now, id, &snapshot, backend, ttl_ms);
                self.changed = true;
                watch = Some(self.life(backend));
                info!(
                    inference_server_id = %id,
                    inference_server_url = %snapshot.url,
                    cluster_id = %cluster_of(id, &snapshot),
                    routing_key = %snapshot.routing_key,
                    models = snapshot.models.len(),
                    "register inference servers stream opened"
                );
                backend
            }
        };
        let server = &mut self.catalog.servers[backend.index()];
        server.models = Some(snapshot.models.keys().cloned().collect());
        for (model, told) in snapshot.models {
            let slot = self.slot(backend, &model).expect("room was found above");
            self.report(slot, told.reported);
        }
        let held = self.targets.registrations.get(id).expect("opened or renewed just now");
        Ok(Opened { backend, watch, lease: held.lease.clone(), ttl_ms, expires: held.expires })
    }

    /// Closes a registration; `lease`: only if that is its.
    pub fn deregister(&mut self, now: Nanos, id: &str, lease: Option<&str>) -> Result<(), Refused> {
        self.expire_registrations(now);
        let held = self.targets.registrations.get(id).ok_or(Refused::Unknown)?;
        if lease.is_some_and(|lease| lease != &*held.lease) {
            return Err(Refused::Held);
        }
        self.close_registration(id, "it was deleted");
        Ok(())
    }

    /// Closes the registrations that were not renewed in time.
    pub(super) fn expire_registrations(&mut self, now: Nanos) {
        while let Some(id) = self.targets.registrations.expired(now) {
            warn!(inference_server_id = %id, "registration stream idle timeout; closing registration");
            self.close_registration(&id, "it was not renewed in time");
        }
    }

    /// When the next registration runs out.
    pub(super) fn registrations_deadline(&self) -> Nanos {
        self.targets.registrations.deadline()
    }

    fn close_registration(&mut self, id: &str, why: &str) {
        let Some(held) = self.targets.registrations.close(id) else { return };
        info!(
            inference_server_id = %id,
            inference_server_url = %held.url,
            "register inference servers stream closed: {why}"
        );
        self.catalog.servers[held.backend.index()].removed = true;
        self.watched[held.backend.index()].life += 1;
        self.changed = true;
        // Should it come back, it has to be found up anew.
        self.tell_all(|| Update::Health { backend: held.backend, up: false });
    }

    /// The server of a registration that opens: the one that it was before, or a new one.
    fn take_up(
        &mut self,
        now: Nanos,
        id: &str,
        snapshot: &Snapshot,
        former: Option<BackendId>,
    ) -> Result<BackendId, Refused> {
        let server = registered(id, &snapshot.url);
        let name = snapshot.url.unresolved().map(|(host, port)| (host.into(), port));
        let index = former.map_or(self.catalog.servers.len(), BackendId::index);
        if index >= BACKENDS_MAX - 1 {
            return Err(Refused::Full("servers"));
        }
        let backend = BackendId(index as u16);
        let mut watched = Watched::new(Check::at_once(index, now), now, name, true, EngineMetrics::Auto);
        match former {
            Some(_) => {
                let before = &self.watched[index];
                watched.life = before.life + 1;
                // A question to the resolver that is still under way will be answered once.
                watched.asked = before.asked;
                self.catalog.servers[index] = server;
                self.watched[index] = watched;
            }
            None => {
                self.catalog.servers.push(server);
                self.watched.push(watched);
            }
        }
        if let Some(told) = self.targets.round_trips.get_mut(index) {
            *told = 0;
        }
        if let Some(told) = self.targets.loads.get_mut(index) {
            *told = Load::default();
        }
        Ok(backend)
    }

    /// The slot of a server and a model; a new one where there was none. `None`: there is no room.
    fn slot(&mut self, backend: BackendId, model: &str) -> Option<SlotId> {
        let key = (backend, Box::from(model));
        if let Some(slot) = self.targets.slots.get(&key) {
            return Some(*slot);
        }
        let slots = &mut self.catalog.stargate.slots;
        if slots.len() >= SLOTS_MAX {
            return None;
        }
        let slot = SlotId(slots.len() as u32);
        slots.push(Slot {
            backend,
            server: self.catalog.servers[backend.index()].name.clone(),
            model: model.into(),
            cluster_id: self.catalog.servers[backend.index()].name.clone(),
            routing_keys: Vec::new(),
            advertised: false,
            active: false,
            input_tps: 0.0,
            max_concurrency: 0,
        });
        self.targets.slots.insert(key, slot);
        Some(slot)
    }

    fn report(&mut self, slot: SlotId, reported: Reported) {
        let published = self.published.as_ref();
        let known = published.and_then(|catalog| catalog.stargate.slots.get(slot.index()));
        // A slot that nobody advertised forgets what was reported of it.
        if known.is_some_and(|slot| slot.advertised) && !self.targets.untold.iter().any(|(of, _)| *of == slot)
        {
            self.tell_all(|| Update::Reported { slot, reported: Box::new(reported.clone()) });
        } else {
            self.targets.untold.push((slot, Box::new(reported)));
        }
    }

    /// Brings the catalog's slots up to date with its servers.
    pub(super) fn lay_out(&mut self) {
        let Some(trusted) = self.targets.trusted.take() else { return };
        for slot in &mut self.catalog.stargate.slots {
            (slot.advertised, slot.active) = (false, false);
        }
        for index in 0..self.catalog.servers.len() {
            let backend = BackendId(index as u16);
            let server = &self.catalog.servers[index];
            if server.removed {
                continue;
            }
            // An empty list stands for "every model": no request could name one of them.
            let models = server.models.clone().unwrap_or_default();
            for model in models {
                let Some(slot) = self.slot(backend, &model) else {
                    if !std::mem::replace(&mut self.targets.full_told, true) {
                        warn!(
                            "more than {SLOTS_MAX} pairs of a server and a model: further ones get no requests on Stargate listeners"
                        );
                    }
                    break;
                };
                let server = &self.catalog.servers[index];
                let held = self.targets.registrations.get(&server.name).filter(|_| server.registered);
                let serving = server.weight > 0.0;
                let slot = &mut self.catalog.stargate.slots[slot.index()];
                slot.advertised = true;
                slot.max_concurrency = u64::from(server.max_concurrency);
                match held {
                    Some(held) => {
                        slot.active = serving && held.models.get(&model).is_some_and(|model| model.active);
                        slot.cluster_id = held.cluster_id.clone();
                        let keys = Some(&held.routing_key).filter(|key| !key.is_empty());
                        slot.routing_keys = keys.cloned().into_iter().collect();
                    }
                    None => {
                        let place = &trusted.servers[index];
                        slot.active = serving;
                        slot.cluster_id = place.cluster_id.clone();
                        slot.routing_keys.clone_from(&place.routing_keys);
                        slot.input_tps = place.input_tps;
                    }
                }
            }
        }
        self.targets.trusted = Some(trusted);
    }

    /// After a publication: what was reported of slots that the shards know now.
    pub(super) fn tell_reports(&mut self) {
        for (slot, reported) in std::mem::take(&mut self.targets.untold) {
            self.tell_all(|| Update::Reported { slot, reported: reported.clone() });
        }
    }

    /// A check of the server succeeded, and took that long.
    pub fn handle_round_trip(&mut self, id: BackendId, rtt_ns: u64) {
        if self.targets.trusted.is_none() || self.catalog.server(id).removed {
            return;
        }
        let all = &mut self.targets.round_trips;
        if all.len() <= id.index() {
            all.resize(id.index() + 1, 0);
        }
        let told = &mut all[id.index()];
        if rtt_ns.abs_diff(*told) >= ROUND_TRIP_STEP_NS.max(*told / ROUND_TRIP_STEP_PART) || *told == 0 {
            *told = rtt_ns;
            self.tell_all(|| Update::RoundTrip { backend: id, rtt_ns });
        }
    }

    /// Slots of the server that may get requests, where it does not report itself how busy it is.
    pub(super) fn measured_slots(&self, id: BackendId) -> Vec<SlotId> {
        let server = self.catalog.server(id);
        if self.targets.trusted.is_none() || server.removed {
            return Vec::new();
        }
        let held = self.targets.registrations.get(&server.name).filter(|_| server.registered);
        let models = server.models.iter().flatten().filter(|model| {
            held.and_then(|held| held.models.get(*model))
                .is_none_or(|model| model.active && !model.reports_load)
        });
        let slots = models.filter_map(|model| self.targets.slots.get(&(id, model.clone())));
        slots.copied().filter(|slot| self.catalog.stargate.slots[slot.index()].active).collect()
    }

    /// What a server's engine publishes of itself, asked at `asked`.
    pub(super) fn tell_load(&mut self, id: BackendId, asked: Nanos, load: Load) {
        let all = &mut self.targets.loads;
        if all.len() <= id.index() {
            all.resize(id.index() + 1, Load::default());
        }
        // An engine that was idle and is idle says nothing new.
        let idle = load.running.unwrap_or(0) == 0 && load.waiting.unwrap_or(0) == 0;
        let before = std::mem::replace(&mut all[id.index()], load);
        if idle && before == load {
            return;
        }
        let Load { running, waiting, max_concurrency, kv, .. } = load;
        for slot in self.measured_slots(id) {
            let scraped = Scraped { asked, running, waiting, max_concurrency, kv };
            self.tell_all(|| Update::Scraped { slot, scraped: Box::new(scraped) });
        }
    }

    /// Whether a request can be routed, by servers that are up: on trusted listeners where there are no others.
    pub(super) fn is_routable(&self, now: Nanos) -> bool {
        if self.targets.trusted.as_ref().is_some_and(|trusted| trusted.only) {
            return self.catalog.stargate.slots.iter().any(|slot| {
                let server = self.catalog.server(slot.backend);
                slot.active && server.address.is_some() && self.watched[slot.backend.index()].check.up()
            });
        }
        self.catalog.servers.iter().zip(&self.watched).any(|(server, watched)| {
            watched.check.up()
                && server.is_pooled()
                && server.weight > 0.0
                && server.address.is_some()
                && server.models.is_some()
                && watched.benched_until <= now
        })
    }
}

/// A server as the catalog holds it while it is registered.
fn registered(id: &str, url: &ServerUrl) -> Server {
    Server {
        name: id.into(),
        url: url.to_string().into(),
        address: url.address(),
        host: url.host_header().into(),
        base_path: url.base_path().into(),
        pool: None,
        weight: 1.0,
        weight_text: "1".into(),
        affinity_weight: 1.0,
        max_concurrency: 0,
        max_input_tokens: 0,
        tier: "".into(),
        kv_capacity_blocks: KV_CAPACITY_BLOCKS,
        api_key: None,
        models: None,
        registered: true,
        cluster_id: id.into(),
        input_tps: 0.0,
        removed: false,
    }
}

#[cfg(test)]
mod tests;
