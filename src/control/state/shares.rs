//! How the shards' figures are brought together with what else is known of the servers, and their drift over time.
//!
//! *Bound and cost*: a sample once a second is O(servers × shards); see [`DriftWindow`].
//! *Source*: the Lifeboat rules, section 7.

use std::collections::HashMap;

use super::State;
use crate::clock::Nanos;
use crate::control::figures::{Figures, Standing};
use crate::control::port::Port;
use crate::proto::account::drift::{DriftWindow, ROUND_MS, Sample};
use crate::proto::backend::catalog::{Algorithm, RoutingMode, Server};
use crate::proto::message::Phase;

/// The window, and what the last sample saw.
#[derive(Debug, Default)]
pub(super) struct Shares {
    window: DriftWindow,
    /// By server: failed exchanges so far.
    faults: Vec<u64>,
    /// When the shards are to be asked next.
    due: Nanos,
    /// The number of the reports that the newest sample was made of.
    sampled: u64,
}

impl<P: Port> State<P> {
    /// What the shards reported last, added up.
    pub fn figures(&self, now: Nanos) -> Figures {
        let mut figures = self.sum(now);
        let drifts = self.shares.window.judge();
        for row in &mut figures.servers {
            row.drift = drifts.get(row.id.index()).copied().unwrap_or_default();
            row.kv.source = self.capacity_source(row.id).map(|source| source.name());
        }
        figures
    }

    fn sum(&self, now: Nanos) -> Figures {
        let standing = |watched: &super::Watched| Standing {
            up: watched.check.up(),
            benched: watched.benched_until > now,
        };
        let standing: Vec<Standing> = self.watched.iter().map(standing).collect();
        Figures::sum(&self.catalog, &standing, &self.reports)
    }

    /// Asks the shards for a sample's figures when it is time.
    pub(super) fn ask_sample(&mut self, now: Nanos) {
        if now < self.shares.due || self.phase() != Phase::Serving || !self.all_started() {
            return;
        }
        self.shares.due = now.plus_ms(ROUND_MS);
        self.ask_reports();
    }

    /// Takes a sample of the newest reports, unless there is one already or some shard has yet to answer.
    pub(super) fn take_sample(&mut self, now: Nanos) {
        if self.shares.sampled == self.report_number || !self.have_reports(self.report_number) {
            return;
        }
        self.shares.sampled = self.report_number;
        let figures = self.sum(now);
        let cohorts = self.cohorts();
        self.shares.faults.resize(self.catalog.servers.len(), 0);
        let mut samples = vec![Sample::default(); self.catalog.servers.len()];
        for row in &figures.servers {
            let (cohort, judged) = cohorts[row.id.index()];
            let server = self.catalog.server(row.id);
            let faults: u64 = row.faults.iter().sum();
            let before = std::mem::replace(&mut self.shares.faults[row.id.index()], faults);
            let mode = server.pool.map(|pool| self.catalog.pool(pool).routing_mode);
            let gated = server.max_concurrency > 0 && mode != Some(RoutingMode::Unlimited);
            samples[row.id.index()] = Sample {
                cohort,
                judged,
                dispatched: row.dispatched,
                weight: server.weight,
                erroring: !row.standing.up || row.standing.benched || faults > before,
                full: gated && row.in_flight >= u64::from(server.max_concurrency),
            };
        }
        self.shares.window.sample(now, &samples);
    }

    /// Per server: who it shares its requests with, and whether drift among them means something: only where weights alone decide
    /// and all take the same requests.
    fn cohorts(&self) -> Vec<(Option<u32>, bool)> {
        let key = |server: &Server| (!server.removed).then_some((server.pool?, server.tier.clone()));
        let mut known: HashMap<_, (u32, &Server, bool)> = HashMap::new();
        for server in &self.catalog.servers {
            let Some(key) = key(server) else { continue };
            let by_weight = match self.catalog.pool(key.0).algorithm {
                Algorithm::WeightedRoundRobin | Algorithm::LeastConnections => true,
                Algorithm::StickySession
                | Algorithm::KvAware
                | Algorithm::LeastBusy
                | Algorithm::Stargate(_) => false,
            };
            let number = known.len() as u32;
            let (_, first, judged) = known.entry(key).or_insert((number, server, by_weight));
            *judged &= first.models == server.models && first.max_input_tokens == server.max_input_tokens;
        }
        let of = |server: &Server| match key(server).and_then(|key| known.get(&key)) {
            Some((number, _, judged)) => (Some(*number), *judged),
            None => (None, false),
        };
        self.catalog.servers.iter().map(of).collect()
    }
}
