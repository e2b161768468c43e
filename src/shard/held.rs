//! A request's hold on its server: the permit, the prompt work that is waited for there, and the ear for what the engine
//! reports of it.
//!
//! *Invariant*: the permit and the work are given back once, however the request ends; so is what was reported until then heeded, be it
//! that the client left before the answer's last byte.
//! *Bound and cost*: one allocation where a report is worth reading, one where rates are measured.
//! *Source*: the Lifeboat rules, sections 3 and 5.7.

use std::rc::Rc;

use super::asked::Asked;
use super::state::Shard;
use super::truth;
use crate::clock::Nanos;
use crate::proto::account::usage::UsageScan;
use crate::proto::classify::Api;
use crate::proto::dispatcher::{Belief, Outcome};
use crate::proto::ids::BackendId;
use crate::proto::stargate::estimator;

/// See the module's text. Dropped without a verdict it says nothing about the server.
pub struct Held {
    shard: Rc<Shard>,
    backend: BackendId,
    open: bool,
    /// In kv-aware pools, what was believed of the prompt …
    pub belief: Option<Belief>,
    /// … whose tokens are still to be computed.
    prefilling: bool,
    /// In pools that measure. Apart, so that other pools' requests are no larger for it.
    reading: Option<Box<Reading>>,
    report: Option<Box<Report>>,
}

/// Input on its way through a server.
struct Reading {
    tokens: u64,
    since: Nanos,
    /// It is still to be read.
    open: bool,
    /// The first output will say how fast it was read.
    timed: bool,
    /// The rate that was measured, in tokens per second; counts if the answer is completed.
    sample: Option<f64>,
}

/// What is read of the engine's report.
struct Report {
    asked: Asked,
    /// Full blocks of the prompt.
    blocks: usize,
    scan: UsageScan,
}

impl Held {
    /// The permit was just taken.
    pub fn new(shard: &Rc<Shard>, backend: BackendId) -> Held {
        Held {
            shard: shard.clone(),
            backend,
            open: true,
            belief: None,
            prefilling: false,
            reading: None,
            report: None,
        }
    }

    /// The request was counted as prompt work.
    pub fn believe(&mut self, belief: Belief) {
        (self.belief, self.prefilling) = (Some(belief), true);
    }

    /// The request is counted as input to be read, from its dispatch on.
    pub fn measure(&mut self, since: Nanos, tokens: u64) {
        self.shard.reading(since, self.backend, tokens);
        self.reading = Some(Box::new(Reading { tokens, since, open: true, timed: false, sample: None }));
    }

    /// The head of the answer has come. `to_head`: such requests are read when their answer begins, as they generate nothing; of
    /// others only an event stream shows when its first output comes.
    pub fn answered(&mut self, status: u16, is_event_stream: bool, to_head: bool) {
        let Some(reading) = &mut self.reading else { return };
        let success = (200..300).contains(&status);
        if success && to_head {
            let ns = self.shard.read_clock().since(reading.since);
            reading.sample = estimator::sample(reading.tokens, ns, true);
        }
        reading.timed = success && is_event_stream && !to_head;
    }

    /// The server has begun to answer. Doing it again does nothing.
    pub fn prefilled(&mut self) {
        if let Some(reading) = &mut self.reading
            && std::mem::take(&mut reading.open)
        {
            if reading.timed {
                let ns = self.shard.read_clock().since(reading.since);
                reading.sample = estimator::sample(reading.tokens, ns, false);
            }
            self.shard.read(self.backend, reading.tokens);
        }
        if std::mem::take(&mut self.prefilling)
            && let Some(belief) = self.belief
        {
            self.shard.prefilled(self.backend, belief.work_tokens);
        }
    }

    /// From now on the answer is listened to for what it says of the prompt, of so many full blocks.
    pub fn listen(&mut self, asked: Asked, blocks: usize, api: Api) {
        self.report = Some(Box::new(Report { asked, blocks, scan: UsageScan::new(api) }));
    }

    /// The next bytes of the answer's body, as they came.
    pub fn hear(&mut self, piece: &[u8]) {
        if let Some(report) = &mut self.report {
            report.scan.feed(piece);
        }
    }

    pub fn done(mut self, outcome: Outcome) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: Outcome) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        if let Some(reading) = &mut self.reading {
            // No output came.
            reading.timed = false;
        }
        self.prefilled();
        if let Some(tps) = self.reading.as_ref().and_then(|reading| reading.sample)
            && outcome == Outcome::Success
        {
            self.shard.sampled(self.backend, tps);
        }
        if let Some(mut report) = self.report.take() {
            let usage = report.scan.finish();
            truth::heed(&self.shard, &report.asked, self.backend, self.belief, report.blocks, &usage);
        }
        self.shard.done(self.backend, outcome);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.end(Outcome::Neutral);
    }
}
