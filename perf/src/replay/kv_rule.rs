//! Ringway's `kv-aware` with every number of its rule open, for sweeps.
//!
//! The rule. *Load* is requests in flight; the *window* holds the servers whose load is at most the least load + slack, slack =
//! max(abs, rel × least). A match is worth its blocks, less the price of its server's *share*: for the requests that it got above its fair
//! share lately, and for the prompt work that it got above its fair share, in proportion to what this request would add. A match that
//! *continues*, ending where an earlier prompt ended, pays for requests in proportion to what is to be computed. The price is at most
//! `busy_price` for each request in flight on the average server; for what does not continue, `immunity` times the blocks to be computed
//! more. Following a match to a busier server costs a price for load as well: none at the window's near end, `load_price` at its far end.
//! Prices for requests and load are in mean prompts, of the last 256.
//!
//! Of the servers in the window, the one with the most worth after all prices wins if that is `min_match` blocks or more; of it and those
//! that match as much and are worth `min_match` before the price for load, the one with the least load takes the request, waiting prompt
//! tokens included. Where all servers hold `min_match` blocks and none can pay, the least busy in the window takes it. Otherwise weighted
//! round-robin, whose wheel hits do not turn; or, where [`Miss::LeastBusy`] says so, the server with the fewest requests in flight and prompt
//! tokens waiting, of equals the one furthest below its share.
//!
//! Blocks are the router's, of 64 tokens: eight to a block of the trace, the last of a prompt too, where the router itself takes only as many
//! as are full. Each server's memory is an LRU, touched at dispatch. Ends are kept for ever; the router's own are bounded.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use ringway::proto::backend::catalog::{KvRules, Miss};

use super::lru::Lru;
use super::policy::{Arrival, Books, Policy, Verdict};
use super::trace::{BLOCK_TOKENS, Request};

/// The router's blocks in one of the trace's.
const ROUTER_BLOCKS: f64 = 8.0;

/// The rule's numbers; matches in the router's blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    pub slack_abs: f64,
    pub slack_rel: f64,
    pub min_match: f64,
    /// The router's memory per server, over the engine's cache.
    pub memory: f64,
    /// At the window's far end, in mean prompts.
    pub load_price: f64,
    /// For twice the fair share of requests, in mean prompts.
    pub share_price: f64,
    /// Requests above the fair share that cost nothing: as part of it, and as such in a pool with a request or more in flight on the average
    /// server; with less, in proportion.
    pub share_free: f64,
    pub share_free_requests: f64,
    /// Requests that are added to a fair share, so that the first few do not count as many.
    pub share_prior: f64,
    /// What a server's share costs at most for each request in flight on the average server, in mean prompts.
    pub busy_price: f64,
    /// What does not continue pays at most so many times the blocks to be computed besides.
    pub immunity: f64,
    /// 1: a prompt ends with its last whole block of the trace. 0: with its last block, as the router sees it.
    pub ends_whole: f64,
    /// Per block to be computed, for twice the fair share of work.
    pub work_price: f64,
    pub work_free: f64,
    pub work_free_tokens: f64,
    /// Dispatches after which one counts 1/e.
    pub horizon: f64,
    /// Prompt tokens waiting that weigh as much as a request in flight.
    pub request_tokens: f64,
    /// 1: what a server holds of a prompt without a useful match is taken off its tokens where the least busy gets it. What the product
    /// does not do, to show why.
    pub miss_holds: f64,
}

impl Default for Numbers {
    fn default() -> Self {
        let rules = KvRules::default();
        Numbers {
            slack_abs: rules.affinity_slack_abs,
            slack_rel: rules.affinity_slack_rel,
            min_match: rules.min_match_blocks.into(),
            memory: 1.0,
            load_price: 0.16,
            share_price: 20.0,
            share_free: 0.01,
            share_free_requests: 4.0,
            share_prior: 16.0,
            busy_price: 1.25,
            immunity: 12.0,
            ends_whole: 0.0,
            work_price: 30.0,
            work_free: 0.03,
            work_free_tokens: 50_000.0,
            horizon: 8192.0,
            request_tokens: 4096.0,
            miss_holds: 0.0,
        }
    }
}

impl Numbers {
    /// What of them is configuration.
    pub fn rules(&self) -> KvRules {
        KvRules {
            affinity_slack_abs: self.slack_abs,
            affinity_slack_rel: self.slack_rel,
            min_match_blocks: self.min_match as u32,
            ..KvRules::default()
        }
    }

    /// The router's memory of one server, in blocks of the trace, for an engine's cache of that many.
    pub fn memory_blocks(&self, cache_blocks: usize) -> usize {
        (cache_blocks as f64 * self.memory).round() as usize
    }

    /// Sets a number by its field's name.
    pub fn set(&mut self, name: &str, value: f64) -> Result<(), String> {
        let place = match name {
            "slack_abs" => &mut self.slack_abs,
            "slack_rel" => &mut self.slack_rel,
            "min_match" => &mut self.min_match,
            "memory" => &mut self.memory,
            "load_price" => &mut self.load_price,
            "share_price" => &mut self.share_price,
            "share_free" => &mut self.share_free,
            "share_free_requests" => &mut self.share_free_requests,
            "share_prior" => &mut self.share_prior,
            "busy_price" => &mut self.busy_price,
            "immunity" => &mut self.immunity,
            "ends_whole" => &mut self.ends_whole,
            "work_price" => &mut self.work_price,
            "work_free" => &mut self.work_free,
            "work_free_tokens" => &mut self.work_free_tokens,
            "horizon" => &mut self.horizon,
            "request_tokens" => &mut self.request_tokens,
            "miss_holds" => &mut self.miss_holds,
            _ => {
                return Err(format!(
                    "`{name}`: expected slack_abs, slack_rel, min_match, memory, load_price, share_price, share_free, \
                     share_free_requests, share_prior, busy_price, immunity, ends_whole, work_price, work_free, \
                     work_free_tokens, horizon, request_tokens or miss_holds"
                ));
            }
        };
        if !(value.is_finite() && value >= 0.0) {
            return Err(format!("{name} {value}: expected a number of at least 0"));
        }
        *place = value;
        Ok(())
    }
}

#[derive(Debug)]
struct Reported {
    blocks: Box<[u32]>,
    matched: usize,
    cached: usize,
}

/// See the module's text.
#[derive(Debug)]
pub struct KvRule {
    numbers: Numbers,
    miss: Miss,
    /// Looks into the engines' caches instead of its own memory.
    sees_caches: bool,
    /// Prompts in flight with what was believed and reported of them, in blocks of the trace; `None`: reports are not heeded.
    reported: Option<HashMap<usize, Reported>>,
    books: Books,
    memory: Vec<Lru>,
    next: usize,
    /// Above the fair share, per server, and all dispatches; forgetting.
    requests_over: Vec<f64>,
    work_over: Vec<f64>,
    requests: f64,
    work: f64,
    /// Last blocks of prompts.
    ends: HashSet<u32>,
    /// Mean length of the last prompts, in the router's blocks, and how many it is of.
    prompt_blocks: f64,
    prompts: f64,
}

impl KvRule {
    pub fn new(
        numbers: Numbers,
        miss: Miss,
        servers: usize,
        requests: usize,
        memory_blocks: usize,
        distinct_blocks: usize,
    ) -> KvRule {
        KvRule {
            numbers,
            miss,
            sees_caches: false,
            reported: None,
            books: Books::new(servers, requests),
            memory: vec![Lru::new(memory_blocks, distinct_blocks); servers],
            next: 0,
            requests_over: vec![0.0; servers],
            work_over: vec![0.0; servers],
            requests: 0.0,
            work: 0.0,
            ends: HashSet::new(),
            prompt_blocks: 0.0,
            prompts: 0.0,
        }
    }

    /// The same rule with perfect knowledge of the moment.
    pub fn seeing_caches(mut self) -> KvRule {
        self.sees_caches = true;
        self
    }

    /// The same rule, but where an engine reports far less reuse than believed (by the product's measure), the memory drops what the
    /// engine had to compute, to the prompt's end. What the product does not do, to show why.
    pub fn dropping_tails(mut self) -> KvRule {
        self.reported = Some(HashMap::new());
        self
    }

    fn load(&self, server: usize) -> f64 {
        self.books.servers[server].in_flight as f64
    }

    fn busy(&self, server: usize) -> f64 {
        let tokens = self.books.servers[server].prefill_tokens as f64;
        self.load(server) + if tokens > 0.0 { tokens / self.numbers.request_tokens } else { 0.0 }
    }

    fn least_busy(&self, servers: impl Iterator<Item = usize>) -> Option<usize> {
        servers.min_by(|&a, &b| {
            self.busy(a)
                .total_cmp(&self.busy(b))
                .then_with(|| self.requests_over[a].total_cmp(&self.requests_over[b]))
        })
    }

    /// Where a prompt goes that no match decides for.
    fn miss_least_busy(&self, matched: &[usize]) -> usize {
        let key = |server: usize| {
            let holds = self.numbers.miss_holds * (matched[server] as u64 * BLOCK_TOKENS) as f64;
            let held = if holds > 0.0 { holds / self.numbers.request_tokens } else { 0.0 };
            (self.busy(server) - held, self.requests_over[server])
        };
        let less = |a: (f64, f64), b: (f64, f64)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
        (0..matched.len()).min_by(|&a, &b| less(key(a), key(b))).expect("there are servers")
    }

    /// The price of the server's share, in the router's blocks; for requests, the `part` of it.
    fn share_price(&self, server: usize, to_compute: f64, part: f64, continues: bool, load_mean: f64) -> f64 {
        let n = &self.numbers;
        let servers = self.memory.len() as f64;
        let (fair_requests, fair_work) = (self.requests / servers, self.work / servers);
        let known = if continues { 1.0 } else { fair_requests / (fair_requests + n.share_prior) };
        let free = n.share_free * fair_requests + n.share_free_requests * load_mean.min(1.0) * known;
        let requests = self.requests_over[server] - free;
        let work = self.work_over[server] - n.work_free * fair_work - n.work_free_tokens;
        n.share_price * self.prompt_blocks * part * requests.max(0.0) / (fair_requests + n.share_prior)
            + n.work_price * to_compute * work.max(0.0) / fair_work.max(100_000.0)
    }

    /// The server that affinity decides for; `matched` in blocks of the trace.
    fn holder(&self, request: &Request, matched: &[usize]) -> Option<usize> {
        let n = &self.numbers;
        // Longest match first: of equals in all else it wins.
        let mut order: Vec<usize> = (0..matched.len()).collect();
        order.sort_by_key(|&server| Reverse(matched[server]));
        let servers = || order.iter().copied();
        let least = servers().map(|server| self.load(server)).fold(f64::INFINITY, f64::min);
        let mean = servers().map(|server| self.load(server)).sum::<f64>() / matched.len() as f64;
        let slack = n.slack_abs.max(n.slack_rel * least);
        let in_window = |server: &usize| self.load(*server) <= least + slack;
        let useful = |server: &usize| matched[*server] as f64 * ROUTER_BLOCKS >= n.min_match.max(1.0);
        let worth = |server: usize| {
            let total = request.blocks.len() as f64 * ROUTER_BLOCKS;
            let to_compute = total - matched[server] as f64 * ROUTER_BLOCKS;
            let continues = matched[server] > 0 && self.ends.contains(&request.blocks[matched[server] - 1]);
            let part = if continues { to_compute / total } else { 1.0 };
            let price = self.share_price(server, to_compute, part, continues, mean);
            let idle = if continues { 0.0 } else { n.immunity * to_compute };
            let most = idle + n.busy_price * self.prompt_blocks * mean;
            matched[server] as f64 * ROUTER_BLOCKS - price.min(most)
        };
        let load_price = |server: usize| {
            let above = self.load(server) - least;
            if above > 0.0 { n.load_price * self.prompt_blocks * above / slack } else { 0.0 }
        };
        let top = servers()
            .filter(in_window)
            .filter(useful)
            .map(|server| (worth(server) - load_price(server), server))
            .filter(|&(net, _)| net >= n.min_match)
            .reduce(|best, next| if next.0 > best.0 { next } else { best });
        match top {
            Some((_, top)) => self.least_busy(
                servers()
                    .filter(in_window)
                    .filter(|&server| matched[server] == matched[top] && worth(server) >= n.min_match),
            ),
            None if servers().all(|server| useful(&server)) => self.least_busy(servers().filter(in_window)),
            None => None,
        }
    }

    fn note(&mut self, server: usize, tokens: f64) {
        let keep = (-1.0 / self.numbers.horizon).exp();
        let share = 1.0 / self.memory.len() as f64;
        for (i, (requests, work)) in self.requests_over.iter_mut().zip(&mut self.work_over).enumerate() {
            let mine = if i == server { 1.0 } else { 0.0 };
            *requests = *requests * keep + mine - share;
            *work = *work * keep + (mine - share) * tokens;
        }
        self.requests = self.requests * keep + 1.0;
        self.work = self.work * keep + tokens;
    }
}

impl Policy for KvRule {
    fn arrive(&mut self, arrival: Arrival<'_>, verdicts: &mut Vec<Verdict>) {
        let request = arrival.request;
        let matched: Vec<usize> = if self.sees_caches {
            arrival.engines.iter().map(|engine| engine.cached(request)).collect()
        } else {
            self.memory.iter().map(|memory| memory.matched(&request.blocks)).collect()
        };
        let server = self.holder(request, &matched).unwrap_or_else(|| match self.miss {
            Miss::WeightedRoundRobin => {
                let server = self.next;
                self.next = (server + 1) % matched.len();
                server
            }
            Miss::LeastBusy => self.miss_least_busy(&matched),
        });
        self.memory[server].touch(&request.blocks);
        if let Some(reported) = &mut self.reported {
            let of = Reported { blocks: request.blocks.clone(), matched: matched[server], cached: 0 };
            reported.insert(arrival.id, of);
        }
        let tokens = (request.prompt_tokens as f64 - (matched[server] as u64 * BLOCK_TOKENS) as f64).max(0.0);
        self.note(server, tokens);
        let end = match self.numbers.ends_whole > 0.0 {
            true => (request.prompt_tokens / BLOCK_TOKENS) as usize,
            false => request.blocks.len(),
        };
        self.ends.extend(request.blocks[..end].last());
        let blocks = (request.prompt_tokens / 64) as f64;
        if blocks > 0.0 {
            self.prompts = (self.prompts + 1.0).min(256.0);
            self.prompt_blocks += (blocks - self.prompt_blocks) / self.prompts;
        }
        verdicts.push(self.books.dispatch(arrival.id, server, request, matched[server]));
    }

    fn first_token(&mut self, _now: u64, id: usize, cached_blocks: usize) {
        self.books.first_token(id);
        if let Some(reported) = self.reported.as_mut().and_then(|reported| reported.get_mut(&id)) {
            reported.cached = cached_blocks;
        }
    }

    fn finish(&mut self, _now: u64, id: usize, _verdicts: &mut Vec<Verdict>) {
        let server = self.books.finish(id);
        let Some(Reported { blocks, matched, cached }) = self.reported.as_mut().and_then(|r| r.remove(&id))
        else {
            return;
        };
        // Four of the router's blocks or an eighth of the match.
        let apart = (4.0 / ROUTER_BLOCKS).max((matched / 8) as f64);
        if cached as f64 + apart < matched as f64 {
            self.memory[server].forget(&blocks[cached..]);
        }
    }
}
