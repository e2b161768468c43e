//! One shard's brain for trusted listeners: which server takes each request of a target, who waits, who is tried again. No I/O in it,
//! no clock; chance comes from a seed: the same calls give the same answers.
//!
//! Verbs: `handle_*` tell it what happened at `now`; `poll_woken` and `poll_message` say what follows, and have to be drained after every
//! turn; `poll_timeout` says when to call `handle_timeout`. A request is opened, routed (again after a retry), and ended.
//!
//! Every shard decides by its own replica: its own live requests, exact, those of its peers as last heard, and the reports and scrapes
//! that the control thread gives to all. With one shard, orders are exact.
//!
//! *Invariant*: a request counts as live in one slot at most, from its dispatch to its end or retry. A ticket is answered once or given
//! up. After every call nobody waits who could be chosen for by what is known then, but for what [`RECHECK_MS`] defers.
//! *Bound and cost*: a route costs one look at a target by its names, one choice, and a few counts; none of it allocates in steady
//! state. A change costs those who wait for its target a look, as far as it can help them.
//! *Errors*: [`Refusal`].
//! *Source*: the Stargate rules, sections 1 to 7.

mod hearing;
mod routing;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use super::aggregate::Scratch;
use super::expressions::{Expressions, Outcome};
use super::figures::{
    AttemptResult, Counts, PROXY_DURATION_NS, REPLAY_BYTES, Reasons, StargateFigures, TargetFigures,
};
use super::flight::{Flights, NOBODY, Sent, Stage};
use super::layout::SlotId;
use super::live::Phase;
use super::random::Rng;
use super::request::{End, Refusal, Retry, Routed, Setback, Wish, Woken};
use super::retry::{RetryRules, Step};
use super::stats::Stats;
use super::table::SlotTable;
use super::target::Target;
use super::waiting::{RECHECK_MS, Waiting, max_queued};
use super::{estimator, flight};
use crate::clock::Nanos;
use crate::limits::SHARDS_MAX;
use crate::proto::config::expression::{self, Refused, Requested};
use crate::proto::config::lb_config::{Comparator, Entry, LbConfig, Method, MethodSettings};
use crate::proto::ids::{BackendId, ShardId, Ticket};
use crate::proto::message::{Message, Urgency};
pub use flight::{Facts, Flight};
use routing::Verdict;

/// What a target router is told once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetRouterOptions {
    pub me: ShardId,
    /// 1 to 256.
    pub shards: usize,
    pub max_connect_retries: u32,
    pub max_request_retries: u32,
    /// A target whose last advertisement ended less than that ago is 503, not 404; 0: always 404.
    pub grace_ms: u64,
    /// Of all random choices.
    pub seed: u64,
}

/// See the module's text.
pub struct TargetRouter {
    options: TargetRouterOptions,
    retry_rules: RetryRules,
    config: Arc<LbConfig>,
    table: SlotTable,
    targets: Vec<Target>,
    /// By routing key and model, see [`TargetRouter::find`].
    index: HashMap<Box<[u8]>, u32>,
    /// The key that was asked for last, whose space is used again.
    key: Vec<u8>,
    /// Numbers of cluster names.
    names: HashMap<Box<str>, u32>,
    expressions: Expressions<flight::Method>,
    flights: Flights,
    waiting: Waiting,
    /// Targets that some change may concern those who wait for.
    touched: Vec<u32>,
    /// Targets all of whose waiting requests are looked at then.
    rechecks: VecDeque<(Nanos, u32)>,
    rng: Rng,
    scratch: Scratch,
    /// Indices of clusters that failed the request that is looked at.
    excluded: Vec<usize>,
    /// Clusters that eased, while those who wait are looked at.
    eased: Vec<u32>,
    /// Slots with figures that peers lack.
    untold: Vec<SlotId>,
    messages: VecDeque<(ShardId, Message, Urgency)>,
    /// `None`: to be listed anew.
    active_models: Option<Vec<Box<str>>>,
    models_without_key: Option<Vec<Box<str>>>,
    reasons: Reasons,
    /// Of requests for targets that nobody ever served.
    nowhere: Counts,
}

impl TargetRouter {
    /// Knows no server before its first layout.
    pub fn new(options: TargetRouterOptions, config: Arc<LbConfig>) -> Self {
        let TargetRouterOptions { me, shards, .. } = options;
        assert!((1..=SHARDS_MAX).contains(&shards) && me.index() < shards, "shard {me:?} of {shards}");
        TargetRouter {
            options,
            retry_rules: RetryRules {
                connect_retries_max: options.max_connect_retries,
                request_retries_max: options.max_request_retries,
            },
            config,
            table: SlotTable::default(),
            targets: Vec::new(),
            index: HashMap::new(),
            key: Vec::new(),
            names: HashMap::new(),
            expressions: Expressions::default(),
            flights: Flights::default(),
            waiting: Waiting::default(),
            touched: Vec::new(),
            rechecks: VecDeque::new(),
            rng: Rng::new(options.seed),
            scratch: Scratch::default(),
            excluded: Vec::new(),
            eased: Vec::new(),
            untold: Vec::new(),
            messages: VecDeque::new(),
            active_models: None,
            models_without_key: None,
            reasons: Reasons::default(),
            nowhere: Counts::default(),
        }
    }

    /// The number of a target; leaves the key it is under in `self.key`.
    fn find(&mut self, routing_key: &[u8], model: &[u8]) -> Option<u32> {
        self.key.clear();
        // With its length in front, what ends one part and starts the other is beyond doubt.
        self.key.extend_from_slice(&(routing_key.len() as u64).to_le_bytes());
        self.key.extend_from_slice(routing_key);
        self.key.extend_from_slice(model);
        self.index.get(self.key.as_slice()).copied()
    }

    /// Checks a request's method, expression and affinity key, in this order, and names its target. Neither a candidate nor a known
    /// target is needed for that.
    pub fn open(&mut self, now: Nanos, wish: &Wish<'_>) -> Result<Flight, Refusal> {
        let target = self.find(wish.routing_key, wish.model);
        let (method, found, built) = match wish.method {
            Some(value) if expression::is_expression(value) => {
                let (method, outcome) = self.expression(now, wish, value).map_err(refusal)?;
                (method.entry.method(), Found::Method(method), Some(outcome))
            }
            value => {
                let known = target.and_then(|at| self.targets[at as usize].named(value));
                if let Some(method) = known {
                    (method.entry.method(), Found::Method(method.clone()), None)
                } else {
                    let requested = value.map(requested).transpose().map_err(refusal)?;
                    let Some(id) = self.config.resolve(wish.model, requested) else {
                        let method = requested.expect("the configured algorithm is available");
                        return Err(refusal(Refused::unavailable(method)));
                    };
                    let entry = self.config.entry(id);
                    let found = match target {
                        Some(at) => Found::Method(self.targets[at as usize].method(value, id, entry)),
                        None => Found::Entry(entry),
                    };
                    (entry.method(), found, None)
                }
            }
        };
        let entry = match &found {
            Found::Method(method) => &method.entry,
            Found::Entry(entry) => entry,
        };
        if entry.require_cache_affinity_key && wish.affinity_key.trim_ascii().is_empty() {
            return Err(Refusal::AffinityKeyMissing);
        }
        let index = self.flights.open(wish, target.unwrap_or(NOBODY));
        let state = self.flights.of_mut(index);
        state.facts.algorithm = method.name();
        let (comparator, sample_count) = shown(entry);
        state.facts.comparator = comparator;
        state.facts.sample_count_configured = sample_count;
        state.method = match found {
            Found::Method(method) => Some(method),
            Found::Entry(_) => None,
        };
        if let Some(outcome) = built {
            state.facts.expression_built = outcome.map(|outcome| outcome == Outcome::Rebuild);
            let counts = self.counts(target.unwrap_or(NOBODY)).of(method);
            match outcome {
                None => counts.expression_hits += 1,
                Some(Outcome::Build) => counts.expression_builds += 1,
                Some(Outcome::Rebuild) => counts.expression_rebuilds += 1,
            }
        }
        Ok(Flight { index })
    }

    /// What an expression comes to, and whether it had to be compiled for that.
    fn expression(
        &mut self,
        now: Nanos,
        wish: &Wish<'_>,
        value: &[u8],
    ) -> Result<(Rc<flight::Method>, Option<Outcome>), Refused> {
        if let Some(method) = self.expressions.lookup(now, wish.routing_key, wish.model, value) {
            return Ok((method.clone(), None));
        }
        let entry = match expression::parse(value)? {
            Requested::Expression(expression) => {
                let method = expression.method();
                let base = self.config.resolve(wish.model, Some(method));
                let base = base.ok_or_else(|| Refused::unavailable(method))?;
                expression.compile(self.config.entry(base))?
            }
            Requested::Name(_) => unreachable!("a name has no parameters"),
        };
        let method = Rc::new(flight::Method::new(entry, wish.routing_key, wish.model));
        let outcome = self.expressions.insert(now, wish.routing_key, wish.model, value, method.clone());
        Ok((method, Some(outcome)))
    }

    /// Admission, then the choice of a cluster (or the next server of the cluster that the last one failed in), then a server of it,
    /// which counts the request as live.
    pub fn route(&mut self, now: Nanos, flight: &mut Flight) -> Routed {
        let index = flight.index;
        let state = self.flights.of_mut(index);
        debug_assert_eq!(state.stage, Stage::Open, "a request is routed where it is not yet");
        if state.facts.attempts == 0 {
            state.routing_began = now;
        }
        state.evaluated = false;
        let routed = match self.evaluate(now, index) {
            Verdict::Dispatch(dispatched) => Routed::Dispatch(dispatched),
            Verdict::Refuse(refusal) => Routed::Refuse(refusal),
            Verdict::Wait(due) => {
                let ticket = self.waiting.enter(index, due);
                let state = self.flights.of_mut(index);
                state.stage = Stage::Waiting(ticket);
                let target = &mut self.targets[state.target as usize];
                target.waiting.insert((state.arrived, ticket));
                let method = state.method.as_ref();
                let max_queued = method.map_or(u64::MAX, |method| max_queued(&method.entry));
                target.max_queued = target.max_queued.max(max_queued);
                Routed::Wait(ticket)
            }
        };
        self.settle(now);
        routed
    }

    /// The client of a waiting request has gone. The flight has to be ended all the same. Of a ticket whose [`Woken`] was polled nothing
    /// is left to give up.
    pub fn give_up(&mut self, now: Nanos, ticket: Ticket) {
        let Some((index, _)) = self.waiting.find(ticket) else { return };
        self.leave(now, index);
        self.waiting.leave(ticket);
        self.settle(now);
    }

    /// Brings a flight back to its caller from wherever it is.
    fn leave(&mut self, now: Nanos, index: u32) {
        let state = self.flights.of_mut(index);
        match state.stage {
            Stage::Open => {}
            Stage::Waiting(ticket) => {
                state.stage = Stage::Open;
                self.targets[state.target as usize].waiting.remove(&(state.arrived, ticket));
                self.waiting.leave(ticket);
            }
            Stage::Sent(_) => self.take_back(now, index),
        }
    }

    /// The response head that is passed on has come. Call it for no head that leads to a retry.
    pub fn handle_head(&mut self, now: Nanos, flight: &mut Flight) {
        self.note_reconnect(flight.index);
        let state = self.flights.of_mut(flight.index);
        let Stage::Sent(Sent { slot, phase: Phase::Pending }) = state.stage else { return };
        state.head = now;
        let (target, elapsed_ns) = (state.target, now.since(state.arrived));
        let backend = state.facts.dispatched.map(|dispatched| dispatched.backend);
        let figures = self.counts(target).server(backend);
        figures.proxy_duration_ns.note(&PROXY_DURATION_NS, elapsed_ns);
        self.advance(flight.index, slot, Phase::Pending, Phase::Prefill);
        self.settle(now);
    }

    /// The first output has come. For a successful answer that is no event stream: with its head.
    pub fn handle_output(&mut self, now: Nanos, flight: &mut Flight) {
        let state = self.flights.of_mut(flight.index);
        let Stage::Sent(Sent { slot, phase }) = state.stage else { return };
        if phase != Phase::Decode {
            state.output = now;
            self.advance(flight.index, slot, phase, Phase::Decode);
            self.settle(now);
        }
    }

    /// The request is over, wherever it stands; its flight is of no use from here on.
    pub fn handle_end(&mut self, now: Nanos, flight: &mut Flight, end: End) {
        let index = std::mem::replace(&mut flight.index, NOBODY);
        if index == NOBODY {
            return;
        }
        let state = self.flights.of(index);
        if let Stage::Sent(Sent { slot, .. }) = state.stage
            && end == End::Completed
        {
            let read = match (state.embeddings, state.head, state.output) {
                (true, Nanos::NEVER, _) => Some(now),
                (true, head, _) => Some(head),
                (false, _, Nanos::NEVER) => None,
                (false, _, output) => Some(output),
            };
            let tps = read.and_then(|read| {
                estimator::sample(state.input_tokens, read.since(state.sent), state.embeddings)
            });
            if let Some(tps) = tps {
                self.note_sample(slot, tps);
                self.tell_peers(Message::Sample { slot, tps }, Urgency::Quiet);
            }
        }
        self.leave(now, index);
        if let Some(ticket) = self.flights.of_mut(index).woken.take() {
            self.waiting.leave(ticket);
        }
        self.flights.close(index);
        self.settle(now);
    }

    /// What follows from a setback of the present attempt. `replayable`: the body can be sent (again); else whether it outgrew the
    /// replay buffer.
    pub fn handle_retry(
        &mut self,
        now: Nanos,
        flight: &mut Flight,
        setback: Setback<'_>,
        replayable: Result<(), bool>,
    ) -> Retry {
        let index = flight.index;
        if setback != Setback::Connect {
            self.note_reconnect(index);
        }
        let rules = self.retry_rules;
        let state = self.flights.of_mut(index);
        let step = state.tries.step(now, rules, setback, replayable);
        state.facts.connect_retries = state.tries.connect_retries;
        state.facts.request_retries = state.tries.request_retries;
        let target = state.target;
        let (reason, retry) = match step {
            Step::Reconnect => {
                // Its time at the server starts anew.
                state.sent = now;
                return Retry::Reconnect;
            }
            Step::Exhausted { exhausted, reason } => {
                if let Some(reason) = reason {
                    let reason = self.reasons.id(reason);
                    self.counts(target).exhaust(reason);
                }
                return Retry::Exhausted(exhausted);
            }
            Step::Sibling { reason } | Step::Cluster { reason } => (self.reasons.id(reason), Retry::Route),
        };
        let Stage::Sent(Sent { slot, .. }) = state.stage else {
            debug_assert!(false, "only what was sent meets setbacks");
            return retry;
        };
        let backend = self.table.row(slot).slot.as_ref().map(|slot| slot.backend);
        state.failed.extend(backend.filter(|backend| !state.failed.contains(backend)));
        state.facts.failed_backends = state.failed.len() as u32;
        match step {
            Step::Sibling { .. } => state.stay = Some(state.cluster),
            _ => {
                state.exclude(state.cluster);
                state.stay = None;
            }
        }
        self.counts(target).retry(reason);
        self.take_back(now, index);
        self.settle(now);
        retry
    }

    /// Of itself, before anything of the request was sent, its server got a fresh connection in place of those that it had closed.
    pub fn count_reconnect(&mut self, flight: &Flight) {
        let target = self.flights.of(flight.index).target;
        let reason = self.reasons.id("hot_path_reconnect");
        self.counts(target).retry(reason);
    }

    /// A fresh connection that a retry wanted is in use by now.
    fn note_reconnect(&mut self, index: u32) {
        let state = self.flights.of_mut(index);
        if state.tries.reconnected() {
            let target = state.target;
            let reason = self.reasons.id("hot_path_reconnect");
            self.counts(target).retry(reason);
        }
    }

    /// The next waiting request that goes on; call until `None` after every turn.
    pub fn poll_woken(&mut self) -> Option<Woken> {
        let (index, woken) = self.waiting.poll()?;
        self.flights.of_mut(index).woken = None;
        Some(woken)
    }

    /// When [`TargetRouter::handle_timeout`] has to be called next; [`Nanos::NEVER`]: not at all.
    pub fn poll_timeout(&self) -> Nanos {
        let recheck = self.rechecks.front().map_or(Nanos::NEVER, |(due, _)| *due);
        self.waiting.poll_timeout().min(recheck).min(self.expressions.poll_timeout())
    }

    /// Looks at whom time alone may help at `now`, and refuses those whose time is over.
    pub fn handle_timeout(&mut self, now: Nanos) {
        self.expressions.sweep(now);
        while let Some((_, at)) = self.rechecks.front().copied().filter(|(due, _)| *due <= now) {
            self.rechecks.pop_front();
            let target = &mut self.targets[at as usize];
            target.recheck = false;
            target.changed = true;
            self.touch(at);
        }
        self.settle(now);
        while let Some(ticket) = self.waiting.due(now) {
            self.look(now, ticket);
        }
        self.settle(now);
    }

    /// The next message to send; call until `None` after every turn.
    pub fn poll_message(&mut self) -> Option<(ShardId, Message, Urgency)> {
        self.messages.pop_front()
    }

    /// What log lines tell of the flight.
    pub fn facts(&self, flight: &Flight) -> &Facts {
        &self.flights.of(flight.index).facts
    }

    /// The configuration that the flight routes by, as JSON in lb-config form; empty for a target that nobody ever served. Allocates.
    pub fn effective_json(&self, flight: &Flight) -> String {
        let method = self.flights.of(flight.index).method.as_ref();
        method.map(|method| method.entry.effective_json()).unwrap_or_default()
    }

    /// Id, mean round trip (nanoseconds) and statistics of the cluster that the flight was sent to last, as they were when something was
    /// chosen last. `None`: it was sent nowhere, or the cluster has gone.
    pub fn cluster_of(&self, flight: &Flight) -> Option<(&str, u64, &Stats)> {
        let state = self.flights.of(flight.index);
        state.facts.dispatched?;
        let target = &self.targets[state.target as usize];
        let cluster = &target.clusters[target.position(state.cluster)?];
        Some((&cluster.id, cluster.rtt_ns, &cluster.stats))
    }

    /// `x-stargate-cluster-id` of the server that the flight was sent to last; empty before that.
    pub fn cluster_id(&self, flight: &Flight) -> &str {
        let dispatched = self.flights.of(flight.index).facts.dispatched;
        let slot = dispatched.and_then(|dispatched| self.table.row(dispatched.slot).slot.as_ref());
        slot.map_or("", |slot| &slot.cluster_id)
    }

    /// The request is finished with that status for the client: `requests_total`, once, before its end. It counts for the server
    /// that it is at.
    pub fn count_finished(&mut self, flight: &Flight, status: u16) {
        let state = self.flights.of(flight.index);
        let at_server = matches!(state.stage, Stage::Sent(_));
        let backend = state.facts.dispatched.filter(|_| at_server).map(|dispatched| dispatched.backend);
        self.counts(state.target).server(backend).finish(status);
    }

    /// The last attempt's result: `proxy_attempts_total`.
    pub fn count_attempt(&mut self, flight: &Flight, result: AttemptResult) {
        let state = self.flights.of(flight.index);
        let backend = state.facts.dispatched.map(|dispatched| dispatched.backend);
        self.counts(state.target).server(backend).attempt(result);
    }

    /// Bytes of the body kept for replay when the last attempt ended: `proxy_replay_buffer_bytes`.
    pub fn count_replay_bytes(&mut self, flight: &Flight, bytes: u64) {
        let target = self.flights.of(flight.index).target;
        self.counts(target).replay_buffer_bytes.note(&REPLAY_BYTES, bytes);
    }

    fn counts(&mut self, target: u32) -> &mut Counts {
        match self.targets.get_mut(target as usize) {
            Some(target) => &mut target.counts,
            None => &mut self.nowhere,
        }
    }

    /// What section 7 counts, as this shard has it. Allocates.
    pub fn figures(&self) -> StargateFigures {
        let of_targets = self.targets.iter().map(|target| TargetFigures {
            target: Some((target.routing_key.clone(), target.model.clone())),
            active: target.active() as u32,
            waiting: target.waiting.len() as u32,
            ..target.counts.figures(&self.reasons)
        });
        StargateFigures {
            targets: of_targets.chain([self.nowhere.figures(&self.reasons)]).collect(),
            expression_cache_entries: self.expressions.len() as u64,
        }
    }

    /// Requests that were opened and not ended.
    pub fn flights(&self) -> usize {
        self.flights.len()
    }

    /// This shard's live requests on a server, whatever their models.
    pub fn in_flight(&self, backend: BackendId) -> u32 {
        let slots = self.table.server(backend).map_or(&[][..], |server| &server.slots);
        let own = slots.iter().map(|slot| self.table.row(*slot).live.own_requests()).sum::<u64>();
        u32::try_from(own).unwrap_or(u32::MAX)
    }

    /// Live requests in a slot over all shards, as far as heard.
    pub fn live(&self, slot: SlotId) -> u64 {
        self.table.row(slot).live.sum().requests()
    }

    /// The statistics of a target's clusters, with their ids. Brings them up to date.
    pub fn clusters(&mut self, routing_key: &[u8], model: &[u8]) -> &[super::stats::Cluster] {
        let Some(at) = self.find(routing_key, model) else { return &[] };
        let target = &mut self.targets[at as usize];
        target.refresh(&mut self.table, &self.flights, &mut self.scratch);
        &target.clusters
    }
}

impl std::fmt::Debug for TargetRouter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("TargetRouter");
        shown.field("options", &self.options).field("targets", &self.targets.len());
        shown.field("flights", &self.flights.len()).finish_non_exhaustive()
    }
}

/// What routes a request: with a load balancer's memory, or the entry alone where no target is there to remember anything for.
enum Found<'a> {
    Method(Rc<flight::Method>),
    Entry(&'a Entry),
}

fn requested(value: &[u8]) -> Result<Method, Refused> {
    expression::parse(value).map(|requested| requested.method())
}

fn refusal(refused: Refused) -> Refusal {
    Refusal::Method { code: refused.code.name(), message: refused.message }
}

/// Comparator and sample count, as logged.
fn shown(entry: &Entry) -> (&'static str, u32) {
    match &entry.method {
        MethodSettings::PowerOfN(rules) => (rules.comparator.name(), u32::from(rules.sample_count)),
        MethodSettings::WaitAndWiden(rules) => (Comparator::name(rules.comparator), 0),
        _ => ("", 0),
    }
}
