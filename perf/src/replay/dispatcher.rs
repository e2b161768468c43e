//! Ringway's own algorithms, driven through the very code that serves traffic: one shard's `Dispatcher` with its prefix memory,
//! in simulated time.
//!
//! Each block of the trace is cut as the wire would have it: eight blocks of the router's default size, 64 tokens, whose identities are
//! made from the block's number; of the last one, as many as its tokens fill. All requests come from one client. What engines
//! report of reuse is told when a request is over, if at all: most engines say it with the last of an answer.
//!
//! *Invariant*: nothing is decided here.

use std::collections::HashMap;

use ringway::clock::Nanos;
use ringway::proto::backend::catalog::{Address, Algorithm, Catalog, KvRules, Pool, RoutingMode, Server};
use ringway::proto::backend::grouping::{QUEUE_SIZE, QUEUE_TIMEOUT_MS, rebuild_groups};
use ringway::proto::dispatcher::{
    Decision, Dispatcher, DispatcherOptions, Event, Outcome, Placement, Prompted, Wanted,
};
use ringway::proto::ids::{BackendId, ClientId, GroupId, PoolId, ShardId, Ticket};

use super::policy::{Arrival, Policy, Verdict};
use super::rng::Rng;
use super::trace::{BLOCK_TOKENS, Request};

/// Tokens of one of the router's blocks: 256 bytes of text.
const ROUTER_BLOCK_TOKENS: u64 = 64;
const PER_BLOCK: u64 = BLOCK_TOKENS / ROUTER_BLOCK_TOKENS;

/// A pool as it would be configured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    pub algorithm: Algorithm,
    pub kv: KvRules,
    /// Requests in flight per server, at most; 0: any number. The others wait in the router's queue.
    pub ceiling: u32,
    /// The router's memory per server, in blocks of the trace.
    pub memory_blocks: usize,
    /// Engines report what they reused.
    pub reports: bool,
}

/// A request whose prompt is kept until it is placed, and then what it costs.
#[derive(Debug)]
enum Open {
    Waiting { blocks: Vec<u64>, prompt_blocks: usize, tokens: u64 },
    Placed { backend: BackendId, work_tokens: u64, reuse: Reuse },
}

/// Of a prompt, in the router's blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Reuse {
    blocks: u64,
    tokens: u64,
    matched: u32,
    /// Known from the answer's beginning.
    cached: u32,
}

/// See the module's text.
pub struct Dispatched {
    algorithm: Algorithm,
    reports: bool,
    dispatcher: Dispatcher,
    group: GroupId,
    open: HashMap<usize, Open>,
    waiting: HashMap<Ticket, usize>,
}

impl Dispatched {
    pub fn new(rules: &Rules, servers: usize) -> Dispatched {
        let catalog = catalog(rules, servers);
        // One bound for all: this replay has no use for a process's.
        let options = DispatcherOptions {
            kv_memory_bytes_max: usize::MAX,
            wheel_phase: Some(0),
            ..DispatcherOptions::default()
        };
        let dispatcher = Dispatcher::new(ShardId::HOME, 1, options, catalog);
        let group =
            dispatcher.resolve(None, b"", 0).unwrap_or_else(|r| panic!("no route to any server: {r:?}"));
        Dispatched {
            algorithm: rules.algorithm,
            reports: rules.reports,
            dispatcher,
            group,
            open: HashMap::new(),
            waiting: HashMap::new(),
        }
    }

    fn place(&mut self, now: Nanos, id: usize, placement: &Placement, verdicts: &mut Vec<Verdict>) {
        let Some(Open::Waiting { blocks, prompt_blocks, tokens }) = self.open.remove(&id) else {
            panic!("request {id} placed, but it did not wait");
        };
        let backend = placement.backend;
        let mut predicted = 0;
        let mut work_tokens = 0;
        let mut reuse = Reuse { blocks: blocks.len() as u64, tokens, ..Reuse::default() };
        if self.algorithm == Algorithm::KvAware {
            let prompt = Prompted { client: ClientId::default(), blocks: &blocks, tokens };
            let belief = self.dispatcher.handle_prompt(now, self.group, backend, &prompt);
            work_tokens = belief.work_tokens;
            reuse.matched = belief.matched;
            predicted = match belief.matched as usize == blocks.len() {
                true => prompt_blocks,
                false => belief.matched as usize / PER_BLOCK as usize,
            };
        }
        self.open.insert(id, Open::Placed { backend, work_tokens, reuse });
        verdicts.push(Verdict::Place { id, server: backend.index(), predicted });
    }

    /// What the dispatcher has to say.
    fn drain(&mut self, now: Nanos, verdicts: &mut Vec<Verdict>) {
        while let Some(event) = self.dispatcher.poll_event() {
            match event {
                Event::Granted { ticket, placement } => {
                    let id = self.waiting.remove(&ticket).expect("granted to a request that waits");
                    self.place(now, id, &placement, verdicts);
                }
                Event::Refused { ticket, .. } => {
                    let id = self.waiting.remove(&ticket).expect("refused to a request that waits");
                    self.open.remove(&id);
                    verdicts.push(Verdict::Refuse { id });
                }
                Event::Benched { .. } | Event::Unbenched { .. } => {
                    unreachable!("simulated engines do not fail")
                }
            }
        }
        assert!(self.dispatcher.poll_message().is_none(), "one shard has nobody to tell");
    }
}

/// Identities of a prompt's full blocks.
fn router_blocks(request: &Request) -> Vec<u64> {
    let full = request.prompt_tokens / ROUTER_BLOCK_TOKENS;
    (0..full)
        .map(|i| {
            let block = u64::from(request.blocks[(i / PER_BLOCK) as usize]);
            Rng::new(block * PER_BLOCK + i % PER_BLOCK).next_u64()
        })
        .collect()
}

fn catalog(rules: &Rules, servers: usize) -> Catalog {
    let capacity = (rules.memory_blocks as u64 * PER_BLOCK).clamp(1, u32::MAX.into()) as u32;
    let server = |i: usize| Server {
        name: format!("s{i}").into(),
        url: format!("http://s{i}").into(),
        address: Some(Address::Unix("/simulated".into())),
        host: format!("s{i}").into(),
        base_path: "".into(),
        pool: Some(PoolId(0)),
        weight: 1.0,
        weight_text: "1".into(),
        affinity_weight: 1.0,
        max_concurrency: rules.ceiling,
        max_input_tokens: 0,
        tier: "".into(),
        kv_capacity_blocks: capacity,
        api_key: None,
        models: Some(Vec::new()),
        registered: false,
        cluster_id: "server".into(),
        input_tps: 0.0,
        removed: false,
    };
    let pool = Pool {
        name: "replay".into(),
        algorithm: rules.algorithm,
        routing_mode: RoutingMode::Queue,
        queue_size: QUEUE_SIZE,
        queue_timeout_ms: QUEUE_TIMEOUT_MS,
        kv: rules.kv,
        entry: None,
    };
    let mut catalog = Catalog {
        version: 1,
        servers: (0..servers).map(server).collect(),
        pools: vec![pool],
        ..Catalog::default()
    };
    rebuild_groups(&mut catalog);
    catalog
}

impl Policy for Dispatched {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        let (now, id, request) = (Nanos(arrival.now), arrival.id, arrival.request);
        let blocks = if self.algorithm == Algorithm::KvAware { router_blocks(request) } else { Vec::new() };
        let decision =
            self.dispatcher.handle_request(now, self.group, &Wanted { blocks: &blocks, ..Wanted::default() });
        let waiting =
            Open::Waiting { blocks, prompt_blocks: request.blocks.len(), tokens: request.prompt_tokens };
        match decision {
            Decision::Dispatch(placement) => {
                self.open.insert(id, waiting);
                self.place(now, id, &placement, verdicts);
            }
            Decision::Wait(ticket) => {
                self.open.insert(id, waiting);
                self.waiting.insert(ticket, id);
            }
            Decision::Reject(_) => verdicts.push(Verdict::Refuse { id }),
        }
        self.drain(now, verdicts);
    }

    fn first_token(&mut self, now: u64, id: usize, cached_blocks: usize) {
        let Some(Open::Placed { backend, work_tokens, reuse }) = self.open.get_mut(&id) else {
            panic!("request {id} is answered, but it was not placed");
        };
        if self.algorithm == Algorithm::KvAware {
            // As the product does: in tokens first, then in its own blocks.
            let cached = (cached_blocks as u64 * BLOCK_TOKENS).min(reuse.tokens);
            reuse.cached = (cached * reuse.blocks / reuse.tokens) as u32;
            self.dispatcher.handle_prefilled(Nanos(now), *backend, *work_tokens);
        }
    }

    fn finish(&mut self, now: u64, id: usize, verdicts: &mut Vec<Verdict>) {
        let Some(Open::Placed { backend, reuse, .. }) = self.open.remove(&id) else {
            panic!("request {id} is over, but it was not placed");
        };
        if self.reports && self.algorithm == Algorithm::KvAware && reuse.blocks > 0 {
            self.dispatcher.handle_report(Nanos(now), backend, reuse.matched, reuse.cached);
        }
        self.dispatcher.handle_done(Nanos(now), backend, Outcome::Success);
        self.drain(Nanos(now), verdicts);
    }

    fn poll_timeout(&self) -> Option<u64> {
        self.dispatcher.poll_timeout().map(|at| at.0)
    }

    fn handle_timeout(&mut self, now: u64, verdicts: &mut Vec<Verdict>) {
        self.dispatcher.handle_timeout(Nanos(now));
        self.drain(Nanos(now), verdicts);
    }
}
