//! What this shard knows of every slot: its live requests, what its server reports, what its engine publishes, what was measured.
//!
//! A figure that a registration reports is taken as reported; of the rest, rates are measured and requests are counted here.
//!
//! *Invariant*: rows are only added. A slot that nobody advertises has no report and no scrape.
//! *Bound and cost*: one row per slot, one per server; each effective figure a few instructions.
//! *Source*: the Stargate rules, sections 6.1, 6.2, 6.6 and 6.7.

use super::estimate::is_rate;
use super::estimator::Estimator;
use super::flight::NOBODY;
use super::layout::{Slot, SlotId};
use super::live::Live;
use super::queue_times::Reserved;
use super::stats::{KvCache, Reported, Scraped};
use crate::proto::ids::BackendId;

/// Input rate, in tokens per second, of a server that reports none and has not answered often enough to be measured. Without one no
/// algorithm that goes by time would ever send it the requests that it is to be measured by.
pub const ASSUMED_TPS: f64 = 1_000.0;

/// One slot.
#[derive(Clone, Debug)]
pub struct Row {
    /// `None`: a peer spoke of it before this shard's layout did.
    pub slot: Option<Slot>,
    pub live: Live,
    pub estimator: Estimator,
    pub reported: Option<Box<Reported>>,
    /// Which report it is, over all slots in order of arrival; of a scrape likewise.
    pub reported_serial: u64,
    pub scraped: Option<Scraped>,
    pub scraped_serial: u64,
    /// This shard's requests since the report, as steps of its queue times.
    pub reserved: Reserved,
    /// This shard's flight that went out last, or [`NOBODY`].
    pub newest: u32,
    /// The clusters it is an active part of: target and index in it.
    pub memberships: Vec<(u32, u32)>,
    /// Priorities of this shard's requests that the peers lack the figures of.
    pub untold: Vec<u32>,
}

impl Default for Row {
    fn default() -> Self {
        Row {
            slot: None,
            live: Live::default(),
            estimator: Estimator::default(),
            reported: None,
            reported_serial: 0,
            scraped: None,
            scraped_serial: 0,
            reserved: Reserved::default(),
            newest: NOBODY,
            memberships: Vec::new(),
            untold: Vec::new(),
        }
    }
}

impl Row {
    fn report(&self) -> Option<&Reported> {
        self.reported.as_deref()
    }

    fn fixed_tps(&self) -> f64 {
        self.slot.as_ref().map_or(0.0, |slot| slot.input_tps)
    }

    /// Mean input rate, tokens per second; 0: reported as unknown.
    pub fn mean_tps(&self) -> f64 {
        let reported = self.report().and_then(|report| report.last_mean_input_tps);
        valid(reported.unwrap_or_else(|| self.own_tps(self.estimator.mean())))
    }

    /// Greatest input rate, tokens per second: known wherever the mean is.
    pub fn max_tps(&self) -> f64 {
        let Some(report) = self.report() else { return self.max_measured() };
        match (report.max_input_tps, report.last_mean_input_tps) {
            (Some(tps), _) if is_rate(tps) => tps,
            // Every router has the same reports: what one of them measured must not move keys.
            (_, Some(mean)) => valid(mean),
            (_, None) => self.max_measured(),
        }
    }

    fn max_measured(&self) -> f64 {
        self.own_tps(self.estimator.greatest())
    }

    /// The fixed rate, else the one measured, else [`ASSUMED_TPS`].
    fn own_tps(&self, measured: f64) -> f64 {
        if self.fixed_tps() > 0.0 {
            return self.fixed_tps();
        }
        if is_rate(measured) { measured } else { ASSUMED_TPS }
    }

    /// Live requests where the server does not report them: all that the engine has and had not told of.
    pub fn running(&self) -> u64 {
        let own = self.live.sum().requests();
        let Some(scraped) = &self.scraped else { return own };
        let Some(running) = scraped.running else { return own };
        let engine = running.saturating_add(scraped.waiting.unwrap_or(0));
        own.max(engine.saturating_add(self.live.since_scrape()))
    }

    /// The engine's limit where the server does not report it; 0: not known.
    pub fn concurrency(&self) -> u64 {
        let scraped = self.scraped.as_ref().and_then(|scraped| scraped.max_concurrency);
        scraped.unwrap_or_else(|| self.slot.as_ref().map_or(0, |slot| slot.max_concurrency))
    }

    /// The KV cache as reported, else as scraped, and how late that came.
    pub fn kv(&self) -> Option<(u64, KvCache)> {
        let reported = self.report().and_then(|report| report.kv).map(|kv| (self.reported_serial, kv));
        let scraped = || self.scraped.as_ref()?.kv.map(|kv| (self.scraped_serial, kv));
        reported.or_else(scraped)
    }
}

fn valid(tps: f64) -> f64 {
    if is_rate(tps) { tps } else { 0.0 }
}

/// One server.
#[derive(Clone, Debug, Default)]
pub struct Server {
    /// The health checks' last word; `None`: they have said nothing.
    pub up: Option<bool>,
    /// Of the last health check; `None`: none has succeeded yet.
    pub rtt_ns: Option<u64>,
    pub slots: Vec<SlotId>,
}

impl Server {
    /// Some health check has succeeded, and it is not down.
    pub fn is_ready(&self) -> bool {
        self.up.unwrap_or(self.rtt_ns.is_some())
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct SlotTable {
    rows: Vec<Row>,
    servers: Vec<Server>,
    serial: u64,
}

impl SlotTable {
    pub fn row(&self, id: SlotId) -> &Row {
        &self.rows[id.index()]
    }

    pub fn row_mut(&mut self, id: SlotId) -> &mut Row {
        &mut self.rows[id.index()]
    }

    /// Makes rows up to `id`: a peer may speak of a slot before this shard has the layout with it.
    pub fn ensure(&mut self, id: SlotId) {
        if self.rows.len() <= id.index() {
            self.rows.resize_with(id.index() + 1, Row::default);
        }
    }

    pub fn server(&self, id: BackendId) -> Option<&Server> {
        self.servers.get(id.index())
    }

    pub fn server_mut(&mut self, id: BackendId) -> &mut Server {
        if self.servers.len() <= id.index() {
            self.servers.resize_with(id.index() + 1, Server::default);
        }
        &mut self.servers[id.index()]
    }

    /// Takes over what the layout says of a slot. Returns what it said before, if it said something else.
    pub fn configure(&mut self, id: SlotId, slot: &Slot) -> Option<Option<Slot>> {
        self.ensure(id);
        let row = &mut self.rows[id.index()];
        if row.slot.as_ref() == Some(slot) {
            return None;
        }
        let before = row.slot.replace(slot.clone());
        if !slot.advertised {
            (row.reported, row.scraped) = (None, None);
            row.estimator.restart();
        }
        let server = self.server_mut(slot.backend);
        if !server.slots.contains(&id) {
            server.slots.push(id);
        }
        Some(before)
    }

    /// Whether the slot may be chosen.
    pub fn is_active(&self, id: SlotId) -> bool {
        let slot = self.rows[id.index()].slot.as_ref();
        slot.is_some_and(|slot| {
            slot.advertised && slot.active && self.server(slot.backend).is_some_and(Server::is_ready)
        })
    }

    /// A report, which takes the place of the one before.
    pub fn report(&mut self, id: SlotId, reported: &Reported) {
        self.ensure(id);
        self.serial += 1;
        let row = &mut self.rows[id.index()];
        row.reported = Some(Box::new(reported.clone()));
        row.reported_serial = self.serial;
        row.live.report();
        row.reserved.reset(0.0);
    }

    /// What an engine publishes, which takes the place of what it did before.
    pub fn scrape(&mut self, id: SlotId, scraped: &Scraped) {
        self.ensure(id);
        self.serial += 1;
        let row = &mut self.rows[id.index()];
        row.scraped = Some(*scraped);
        row.scraped_serial = self.serial;
        row.live.scrape();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Nanos;

    fn row(input_tps: f64, max_concurrency: u64) -> Row {
        let slot = Slot {
            backend: BackendId(0),
            server: "a".into(),
            model: "m".into(),
            cluster_id: "a".into(),
            routing_keys: Vec::new(),
            advertised: true,
            active: true,
            input_tps,
            max_concurrency,
        };
        Row { slot: Some(slot), ..Row::default() }
    }

    fn reports(row: &mut Row, mean: Option<f64>, max: Option<f64>) {
        let reported = Reported { last_mean_input_tps: mean, max_input_tps: max, ..Reported::default() };
        row.reported = Some(Box::new(reported));
    }

    #[test]
    fn rates_are_reported_else_fixed_else_measured() {
        let mut measured = row(0.0, 0);
        for tps in [10.0, 20.0, 30.0, 40.0, 50.0] {
            assert_eq!((measured.mean_tps(), measured.max_tps()), (ASSUMED_TPS, ASSUMED_TPS));
            measured.estimator.note(tps);
        }
        assert_eq!((measured.mean_tps(), measured.max_tps()), (30.0, 50.0));
        let mut fixed = row(500.0, 0);
        fixed.estimator = measured.estimator;
        assert_eq!((fixed.mean_tps(), fixed.max_tps()), (500.0, 500.0));
        reports(&mut fixed, Some(100.0), None);
        assert_eq!((fixed.mean_tps(), fixed.max_tps()), (100.0, 100.0), "not what was measured here");
        reports(&mut fixed, Some(100.0), Some(900.0));
        assert_eq!((fixed.mean_tps(), fixed.max_tps()), (100.0, 900.0));
        // Reported to be unknown is not known, and has no greatest either.
        for unknown in [0.0, -1.0, f64::NAN] {
            reports(&mut fixed, Some(unknown), None);
            assert_eq!((fixed.mean_tps(), fixed.max_tps()), (0.0, 0.0));
        }
        reports(&mut measured, None, Some(80.0));
        assert_eq!((measured.mean_tps(), measured.max_tps()), (30.0, 80.0));
        reports(&mut measured, None, None);
        assert_eq!((measured.mean_tps(), measured.max_tps()), (30.0, 50.0));
    }

    #[test]
    fn what_runs_is_what_the_engine_told_and_what_went_out_since() {
        let mut row = row(0.0, 7);
        row.live.begin(0, 5);
        assert_eq!((row.running(), row.concurrency()), (1, 7));
        row.scraped = Some(Scraped {
            running: Some(4),
            waiting: Some(2),
            max_concurrency: Some(9),
            asked: Nanos(1),
            ..Scraped::default()
        });
        row.live.scrape();
        assert_eq!((row.running(), row.concurrency()), (6, 9), "the one here is among them");
        let marks = row.live.begin(0, 5);
        assert_eq!(row.running(), 7);
        row.live.end(0, 5, super::super::live::Phase::Pending, marks);
        assert_eq!(row.running(), 6, "what ended before the next scrape was never told of");
        for _ in 0..9 {
            row.live.begin(0, 5);
        }
        assert_eq!(row.running(), 15);
        row.scraped = Some(Scraped::default());
        assert_eq!((row.running(), row.concurrency()), (10, 7), "nothing of it published");
    }

    #[test]
    fn a_server_is_ready_once_a_check_has_succeeded_and_until_one_says_down() {
        let mut server = Server::default();
        assert!(!server.is_ready());
        server.rtt_ns = Some(5);
        assert!(server.is_ready());
        server.up = Some(false);
        assert!(!server.is_ready());
        server.up = Some(true);
        assert!(server.is_ready());
        assert!(Server { up: Some(true), ..Server::default() }.is_ready());
    }
}
