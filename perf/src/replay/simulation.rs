//! One run: a trace through a router to engines, in simulated time.
//!
//! *Invariant*: the same trace, setting and router give the same outcome; no clock is read. Events of one instant are handled in
//! the order in which they became known, arrivals first.
//! *Bound and cost*: O(requests × log requests) besides the router and the caches.
//! *Errors*: none; a router that breaks its contract panics with what it did.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::engine::{Engine, EngineModel};
use super::lru::Lru;
use super::policy::{Arrival, Policy, Verdict};
use super::rng::Rng;
use super::trace::Trace;

/// Where a trace is played, and how fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    pub engines: usize,
    pub model: EngineModel,
    /// Arrivals come this many times as fast as recorded.
    pub speed: f64,
    /// Each arrival is put off by up to this much (before the speed-up), at random.
    pub jitter_ns: u64,
    pub seed: u64,
}

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Blocks that engines found in their caches, and blocks of all requests placed.
    pub hit_blocks: u64,
    pub blocks: u64,
    /// Blocks that the router believed cached.
    pub predicted_blocks: u64,
    /// Per engine.
    pub requests: Vec<u64>,
    pub uncached_tokens: Vec<u64>,
    /// From arrival to first token, sorted.
    pub ttft_ns: Vec<u64>,
    pub refused: u64,
    /// The last request's end, in nanoseconds since the beginning.
    pub end_ns: u64,
}

impl Outcome {
    /// 0 to 1; 0 when nothing was placed.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hit_blocks, self.blocks)
    }

    /// Busiest engine over the mean; 1 is even. 0 when nothing was placed.
    pub fn request_imbalance(&self) -> f64 {
        imbalance(&self.requests)
    }

    pub fn uncached_imbalance(&self) -> f64 {
        imbalance(&self.uncached_tokens)
    }

    /// Time to the first token that a share `quantile` of the requests stay within, in seconds; by nearest rank.
    pub fn ttft_s(&self, quantile: f64) -> f64 {
        let rank = (quantile * self.ttft_ns.len() as f64).ceil().max(1.0) as usize;
        self.ttft_ns.get(rank - 1).map_or(0.0, |&ns| ns as f64 / 1e9)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn imbalance(per_engine: &[u64]) -> f64 {
    let busiest = per_engine.iter().copied().max().unwrap_or(0);
    ratio(busiest * per_engine.len() as u64, per_engine.iter().sum())
}

/// Hit rate of one cache of `cache_blocks` that serves the whole trace in order of arrival: with `engines` × as many blocks as one
/// engine has, the limit for LRU engines however requests are spread. 0 to 1.
pub fn single_cache_hit_rate(trace: &Trace, cache_blocks: usize) -> f64 {
    let mut cache = Lru::new(cache_blocks, trace.distinct_blocks);
    let (mut hits, mut blocks) = (0, 0);
    for request in &trace.requests {
        hits += cache.matched(&request.blocks) as u64;
        blocks += request.blocks.len() as u64;
        cache.touch(&request.blocks);
    }
    ratio(hits, blocks)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive(usize),
    FirstToken(usize),
    Finish(usize),
    Timeout,
}

struct Run<'a> {
    trace: &'a Trace,
    engines: Vec<Engine>,
    /// Time, order of becoming known, event.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    known: u64,
    arrived_ns: Vec<u64>,
    /// Server of each request placed, and its time from first to last token and cached blocks once it has begun.
    placed: Vec<Option<usize>>,
    begun: Vec<(u64, usize)>,
    outcome: Outcome,
}

impl Run<'_> {
    fn schedule(&mut self, at: u64, event: Event) {
        self.events.push(Reverse((at, self.known, event)));
        self.known += 1;
    }

    fn obey(&mut self, now: u64, verdicts: &mut Vec<Verdict>) {
        for verdict in verdicts.drain(..) {
            match verdict {
                Verdict::Refuse { id } => {
                    assert!(self.placed[id].is_none(), "request {id} refused after it was placed");
                    self.outcome.refused += 1;
                }
                Verdict::Place { id, server, predicted } => {
                    assert!(self.placed[id].replace(server).is_none(), "request {id} placed twice");
                    self.outcome.requests[server] += 1;
                    self.outcome.predicted_blocks += predicted as u64;
                    self.outcome.blocks += self.trace.requests[id].blocks.len() as u64;
                    self.engines[server].accept(id);
                    self.start(now, server);
                }
            }
        }
    }

    fn start(&mut self, now: u64, server: usize) {
        while let Some(started) = self.engines[server].start(&self.trace.requests) {
            let request = &self.trace.requests[started.id];
            self.outcome.hit_blocks += started.cached_blocks as u64;
            self.outcome.uncached_tokens[server] += request.uncached_tokens(started.cached_blocks);
            self.begun[started.id] = (started.decode_ns, started.cached_blocks);
            self.schedule(now + started.prefill_ns, Event::FirstToken(started.id));
        }
    }
}

/// Plays `trace` in `setting` through `policy`.
pub fn simulate(trace: &Trace, setting: &Setting, policy: &mut dyn Policy) -> Outcome {
    let requests = trace.requests.len();
    let mut rng = Rng::new(setting.seed);
    let mut run = Run {
        trace,
        engines: (0..setting.engines).map(|_| Engine::new(setting.model, trace.distinct_blocks)).collect(),
        events: BinaryHeap::with_capacity(requests * 2),
        known: 0,
        arrived_ns: Vec::with_capacity(requests),
        placed: vec![None; requests],
        begun: vec![(0, 0); requests],
        outcome: Outcome {
            requests: vec![0; setting.engines],
            uncached_tokens: vec![0; setting.engines],
            ttft_ns: Vec::with_capacity(requests),
            ..Outcome::default()
        },
    };
    for (id, request) in trace.requests.iter().enumerate() {
        let late = if setting.jitter_ns > 0 { rng.below(setting.jitter_ns + 1) } else { 0 };
        let at = ((request.arrival_ns + late) as f64 / setting.speed).round() as u64;
        run.arrived_ns.push(at);
        run.schedule(at, Event::Arrive(id));
    }
    let mut verdicts = Vec::new();
    let mut timeout = None;
    while let Some(Reverse((now, _, event))) = run.events.pop() {
        match event {
            Event::Arrive(id) => {
                let request = &trace.requests[id];
                policy.arrive(Arrival { now, id, request, engines: &run.engines }, &mut verdicts);
            }
            Event::FirstToken(id) => {
                let server = run.placed[id].expect("it has begun, so it was placed");
                let (decode_ns, cached_blocks) = run.begun[id];
                run.outcome.ttft_ns.push(now - run.arrived_ns[id]);
                run.engines[server].first_token();
                run.schedule(now + decode_ns, Event::Finish(id));
                policy.first_token(now, id, cached_blocks);
                run.start(now, server);
            }
            Event::Finish(id) => {
                let server = run.placed[id].expect("it has begun, so it was placed");
                run.engines[server].finish(&trace.requests[id]);
                run.outcome.end_ns = now;
                policy.finish(now, id, &mut verdicts);
                run.start(now, server);
            }
            Event::Timeout => {
                timeout = None;
                policy.handle_timeout(now, &mut verdicts);
            }
        }
        run.obey(now, &mut verdicts);
        if let Some(due) = policy.poll_timeout()
            && timeout.is_none_or(|set| due < set)
        {
            timeout = Some(due);
            run.schedule(due.max(now), Event::Timeout);
        }
    }
    let answered = run.outcome.ttft_ns.len() as u64 + run.outcome.refused;
    assert_eq!(answered, requests as u64, "every request is placed or refused");
    run.outcome.ttft_ns.sort_unstable();
    run.outcome
}
