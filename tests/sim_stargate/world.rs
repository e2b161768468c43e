//! The world of the simulation: shards, the mesh between them, servers, clients, and what must be true of it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ringway::clock::Nanos;
use ringway::proto::config::lb_config::LbConfig;
use ringway::proto::ids::{BackendId, ShardId, Ticket};
use ringway::proto::message::{Message, Update, Urgency};
use ringway::proto::stargate::flight::Flight;
use ringway::proto::stargate::layout::{Layout, Slot, SlotId};
use ringway::proto::stargate::random::Rng;
use ringway::proto::stargate::request::{End, Retry, Routed, Setback, Wish};
use ringway::proto::stargate::stats::{Reported, Scraped};
use ringway::proto::stargate::target_router::{TargetRouter, TargetRouterOptions};

const SERVERS: u16 = 6;
const STEPS: usize = 1500;
/// Models, and routing keys that servers have.
const MODELS: [&str; 2] = ["m", "n"];
const KEYS: [&str; 2] = ["", "k"];
const METHODS: [Option<&str>; 7] = [
    None,
    Some("round-robin"),
    Some("random"),
    Some("pulsar"),
    Some("wait-and-widen"),
    Some("wait-and-widen;cache_affinity_backend_selection_count=2;cache_affinity_wait_ms=40;max_queued=1"),
    Some(
        "pulsar-wait-and-widen;cache_affinity_wait_ms=30;max_queue_time_floor_ms=50;max_queue_time_ceil_ms=500",
    ),
];

/// A client's request, as the world knows it.
struct Request {
    shard: usize,
    flight: Flight,
    /// What it asked, to be asked again.
    asked: Asked,
    stage: Stage,
    retried: bool,
}

#[derive(Clone)]
struct Asked {
    arrived: Nanos,
    key: &'static str,
    model: &'static str,
    method: Option<&'static str>,
    affinity: String,
    tokens: u64,
    priority: u32,
    max_wait_ms: Option<u64>,
    slo_ms: Option<u64>,
}

impl Asked {
    fn wish(&self) -> Wish<'_> {
        Wish {
            arrived: self.arrived,
            routing_key: self.key.as_bytes(),
            model: self.model.as_bytes(),
            method: self.method.map(str::as_bytes),
            input_tokens: self.tokens,
            priority: self.priority,
            max_wait_ms: self.max_wait_ms,
            slo_ms: self.slo_ms,
            affinity_key: self.affinity.as_bytes(),
            ..Wish::default()
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Waiting(Ticket),
    /// In that slot, after so many reports of it that its shard knew.
    Sent {
        slot: SlotId,
        reports: usize,
        output: bool,
    },
}

pub struct World {
    rng: Rng,
    now: Nanos,
    shards: Vec<TargetRouter>,
    /// By sender and receiver: in order, each with the time of its arrival.
    mesh: Vec<Vec<VecDeque<(Nanos, Message)>>>,
    /// By receiver, from the control thread.
    updates: Vec<VecDeque<(Nanos, Arc<Update>)>>,
    layout: Layout,
    up: Vec<bool>,
    requests: Vec<Request>,
    /// By slot: running requests as last reported, `None`: not reported; and how many reports there were.
    reported: Vec<(Option<u64>, usize)>,
    /// By shard and slot: reports that it has handled.
    handled: Vec<Vec<usize>>,
    pub trace: Vec<u64>,
}

impl World {
    pub fn new(seed: u64, shards: usize) -> World {
        let mut rng = Rng::new(seed);
        let config = Arc::new(LbConfig::permissive());
        let routers = (0..shards).map(|me| {
            let options = TargetRouterOptions {
                me: ShardId(me as u8),
                shards,
                max_connect_retries: 2,
                max_request_retries: 2,
                grace_ms: 50,
                seed: rng.next_u64(),
            };
            TargetRouter::new(options, config.clone())
        });
        let mut world = World {
            now: Nanos::from_ms(1),
            shards: routers.collect(),
            mesh: (0..shards).map(|_| vec![VecDeque::new(); shards]).collect(),
            updates: vec![VecDeque::new(); shards],
            layout: Layout::default(),
            up: vec![true; usize::from(SERVERS)],
            requests: Vec::new(),
            reported: Vec::new(),
            handled: vec![Vec::new(); shards],
            trace: Vec::new(),
            rng,
        };
        for backend in 0..SERVERS {
            for model in MODELS {
                let keys = world.keys();
                let slots = &mut world.layout.slots;
                slots.push(Slot {
                    backend: BackendId(backend),
                    server: format!("s{backend}").into(),
                    model: model.into(),
                    cluster_id: format!("c{}", backend / 2 * 2 + backend % 2 * (backend / 4)).into(),
                    routing_keys: keys,
                    advertised: true,
                    active: true,
                    // A token takes one millisecond or two: nothing is rounded, whoever adds up.
                    input_tps: 500.0,
                    max_concurrency: world.rng.below(4) as u64,
                });
            }
        }
        world.reported = vec![(None, 0); world.layout.slots.len()];
        for handled in &mut world.handled {
            handled.resize(world.layout.slots.len(), 0);
        }
        world.publish();
        for backend in 0..SERVERS {
            world.tell(Update::RoundTrip { backend: BackendId(backend), rtt_ns: 1_000_000 });
        }
        world
    }

    fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound)
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn keys(&mut self) -> Vec<Box<str>> {
        match self.below(3) {
            0 => Vec::new(),
            1 => vec![KEYS[1].into()],
            _ => KEYS.map(Box::from).into(),
        }
    }

    /// From the control thread to every shard, in order.
    fn tell(&mut self, update: Update) {
        let update = Arc::new(update);
        for shard in 0..self.shards.len() {
            let due = self.now.0 + self.below(3_000_000) as u64;
            let last = self.updates[shard].back().map_or(0, |(due, _)| due.0);
            self.updates[shard].push_back((Nanos(due.max(last)), update.clone()));
        }
    }

    fn publish(&mut self) {
        let catalog =
            ringway::proto::backend::catalog::Catalog { stargate: self.layout.clone(), ..Default::default() };
        self.tell(Update::Catalog(Box::new(catalog)));
    }

    pub fn run(&mut self) {
        for step in 0..STEPS {
            self.act();
            self.now.0 += self.below(2_000_000) as u64;
            self.turn(step % 3 == 0);
            if step % 250 == 249 {
                self.quiesce();
            }
        }
        self.finish();
    }

    fn act(&mut self) {
        match self.below(100) {
            0..45 => self.arrive(),
            45..85 => self.progress(),
            85..88 => {
                let backend = BackendId(self.below(usize::from(SERVERS)) as u16);
                let rtt_ns = self.below(40_000_000) as u64;
                self.tell(Update::RoundTrip { backend, rtt_ns });
            }
            88..91 => {
                let backend = self.below(usize::from(SERVERS));
                self.up[backend] ^= true;
                self.tell(Update::Health { backend: BackendId(backend as u16), up: self.up[backend] });
            }
            91..94 => self.report(),
            94..97 => {
                let slot = SlotId(self.below(self.layout.slots.len()) as u32);
                let scraped =
                    Scraped { asked: self.now, running: Some(self.below(3) as u64), ..Scraped::default() };
                self.tell(Update::Scraped { slot, scraped: Box::new(scraped) });
            }
            _ => {
                let at = self.below(self.layout.slots.len());
                let (advertised, active, max_concurrency, keys) =
                    (self.chance(85), self.chance(85), self.below(5) as u64, self.keys());
                let slot = &mut self.layout.slots[at];
                (slot.advertised, slot.active, slot.max_concurrency) = (advertised, active, max_concurrency);
                if at.is_multiple_of(3) {
                    slot.routing_keys = keys;
                }
                if !advertised {
                    self.reported[at].0 = None;
                }
                self.publish();
            }
        }
    }

    fn report(&mut self) {
        let at = self.below(self.layout.slots.len());
        if !self.layout.slots[at].advertised {
            return;
        }
        let running = self.below(3) as u64;
        let reported = Reported {
            num_running_queries: Some(running),
            queue_times: self.chance(50).then(|| vec![(0, running * 100)]),
            max_engine_concurrency: Some(self.below(5) as u64),
            ..Reported::default()
        };
        self.reported[at] = (Some(running), self.reported[at].1 + 1);
        self.tell(Update::Reported { slot: SlotId(at as u32), reported: Box::new(reported) });
    }

    fn arrive(&mut self) {
        let shard = self.below(self.shards.len());
        let asked = Asked {
            arrived: self.now,
            key: KEYS[self.below(2)],
            model: MODELS[self.below(2)],
            method: METHODS[self.below(METHODS.len())],
            affinity: if self.chance(80) { format!("key-{}", self.below(6)) } else { String::new() },
            tokens: self.below(200) as u64,
            priority: self.below(3) as u32,
            max_wait_ms: self.chance(60).then(|| self.rng.below(400) as u64),
            slo_ms: self.chance(50).then(|| self.rng.below(300) as u64),
        };
        let flight = self.shards[shard].open(self.now, &asked.wish()).expect("every method is available");
        self.route(Request { shard, flight, asked, stage: Stage::Waiting(Ticket(0)), retried: false });
    }

    fn route(&mut self, mut request: Request) {
        let shard = request.shard;
        match self.shards[shard].route(self.now, &mut request.flight) {
            Routed::Dispatch(dispatched) => {
                request.stage = self.sent(shard, dispatched.slot);
                self.requests.push(request);
            }
            Routed::Wait(ticket) => {
                request.stage = Stage::Waiting(ticket);
                self.requests.push(request);
            }
            Routed::Refuse(_) => self.shards[shard].handle_end(self.now, &mut request.flight, End::Other),
        }
    }

    fn sent(&mut self, shard: usize, slot: SlotId) -> Stage {
        self.trace.push(u64::from(slot.0));
        Stage::Sent { slot, reports: self.handled[shard][slot.index()], output: false }
    }

    fn progress(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let at = self.below(self.requests.len());
        let (now, kind) = (self.now, self.below(100));
        let request = &mut self.requests[at];
        let router = &mut self.shards[request.shard];
        match &mut request.stage {
            Stage::Waiting(ticket) => {
                if kind < 10 {
                    let (ticket, mut gone) = (*ticket, self.requests.swap_remove(at));
                    if kind < 5 {
                        router.give_up(now, ticket);
                    }
                    router.handle_end(now, &mut gone.flight, End::Other);
                }
            }
            Stage::Sent { output, .. } => match kind {
                0..30 if !*output => router.handle_head(now, &mut request.flight),
                0..60 if !*output => {
                    router.handle_output(now, &mut request.flight);
                    *output = true;
                }
                60..75 if !*output => {
                    let setback = match kind % 4 {
                        0 => Setback::Connect,
                        1 => Setback::Transport,
                        2 => Setback::Retryable { status: 429, reason: b"queue_estimate_mismatch" },
                        _ => Setback::Retryable { status: 503, reason: b"busy" },
                    };
                    match router.handle_retry(now, &mut request.flight, setback, Ok(())) {
                        Retry::Reconnect => {}
                        Retry::Route => {
                            let mut again = self.requests.swap_remove(at);
                            again.retried = true;
                            self.route(again);
                        }
                        Retry::Exhausted(_) => self.end(at, End::Other),
                    }
                }
                _ => self.end(at, if kind % 2 == 0 { End::Completed } else { End::Other }),
            },
        }
    }

    fn end(&mut self, at: usize, end: End) {
        let mut request = self.requests.swap_remove(at);
        self.shards[request.shard].handle_end(self.now, &mut request.flight, end);
    }

    /// A turn of every shard's loop: what has arrived, what is due, what is to be sent.
    fn turn(&mut self, flush: bool) {
        let now = self.now;
        for shard in 0..self.shards.len() {
            // Who went on meanwhile went on with the reports that were known then.
            self.fetch(shard);
            while self.updates[shard].front().is_some_and(|(due, _)| *due <= now) {
                let (_, update) = self.updates[shard].pop_front().expect("just seen");
                if let Update::Reported { slot, .. } = &*update {
                    self.handled[shard][slot.index()] += 1;
                }
                self.shards[shard].handle_update(now, &update);
                self.fetch(shard);
            }
            for from in 0..self.shards.len() {
                while self.mesh[from][shard].front().is_some_and(|(due, _)| *due <= now) {
                    let (_, message) = self.mesh[from][shard].pop_front().expect("just seen");
                    self.shards[shard].handle_message(now, ShardId(from as u8), &message);
                }
            }
            self.shards[shard].handle_timeout(now);
            assert!(self.shards[shard].poll_timeout() > now, "what is due is done");
            if flush && self.shards[shard].needs_flush() {
                self.shards[shard].flush(now);
            }
            self.fetch(shard);
            while let Some((to, message, urgency)) = self.shards[shard].poll_message() {
                if urgency == Urgency::Lazy && self.chance(20) {
                    self.shards[shard].handle_dropped(&message);
                    continue;
                }
                let due = now.0 + self.below(2_000_000) as u64;
                let ring = &mut self.mesh[shard][to.index()];
                let last = ring.back().map_or(0, |(due, _)| due.0);
                ring.push_back((Nanos(due.max(last)), message));
            }
        }
    }

    fn fetch(&mut self, shard: usize) {
        while let Some(woken) = self.shards[shard].poll_woken() {
            let is_it = |r: &Request| r.shard == shard && r.stage == Stage::Waiting(woken.ticket);
            let at = self.requests.iter().position(is_it).expect("an answer is somebody's, once");
            match woken.routed {
                Ok(dispatched) => self.requests[at].stage = self.sent(shard, dispatched.slot),
                Err(_) => self.end(at, End::Other),
            }
        }
    }

    /// Lets everything arrive that is under way, and what is deferred be done; then looks at the whole.
    fn quiesce(&mut self) {
        for _ in 0..30 {
            self.now.0 += 4_000_000;
            self.turn(true);
        }
        let arrived = self.mesh.iter().flatten().all(VecDeque::is_empty);
        if !arrived || self.shards.iter().any(TargetRouter::needs_flush) {
            // Some rings were full all the time.
            return self.quiesce();
        }
        self.check();
    }

    fn check(&mut self) {
        // By slot: live requests, and those of them that went out after the last report.
        let mut live: BTreeMap<SlotId, (u64, u64)> = BTreeMap::new();
        for request in &self.requests {
            if let Stage::Sent { slot, reports, .. } = request.stage {
                let (all, since) = live.entry(slot).or_default();
                *all += 1;
                *since += u64::from(reports == self.reported[slot.index()].1);
            }
        }
        let of = |slot: usize| live.get(&SlotId(slot as u32)).copied().unwrap_or_default();
        for (shard, router) in self.shards.iter_mut().enumerate() {
            for slot in 0..self.layout.slots.len() {
                assert_eq!(router.live(SlotId(slot as u32)), of(slot).0, "shard {shard}, slot {slot}");
            }
            let held = self.requests.iter().filter(|request| request.shard == shard).count();
            assert_eq!(router.flights(), held, "shard {shard}");
        }
        for (key, model) in KEYS.iter().flat_map(|key| MODELS.map(|model| (*key, model))) {
            let figures: Vec<_> = self.shards.iter_mut().map(|router| figures(router, key, model)).collect();
            assert!(figures.windows(2).all(|pair| pair[0] == pair[1]), "{key}/{model}: {figures:?}");
        }
        // Of servers alone in their cluster: what was reported, and what went out since.
        for (at, slot) in self.layout.slots.iter().enumerate() {
            let alone = self.layout.slots.iter().filter(|other| other.cluster_id == slot.cluster_id).count()
                == MODELS.len();
            let (Some(reported), true) = (self.reported[at].0, alone) else { continue };
            let key = slot.routing_keys.first().map_or("", |key| key);
            let clusters = self.shards[0].clusters(key.as_bytes(), slot.model.as_bytes());
            if let Some(cluster) = clusters.iter().find(|cluster| cluster.id == slot.cluster_id) {
                assert_eq!(cluster.stats.num_running_queries, reported + of(at).1, "slot {at}");
            }
        }
        self.check_waiting();
    }

    /// Nobody waits whose request, made again, would go.
    fn check_waiting(&mut self) {
        for at in 0..self.requests.len() {
            let request = &self.requests[at];
            if !matches!(request.stage, Stage::Waiting(_)) || request.retried {
                continue;
            }
            let (router, asked) = (&mut self.shards[request.shard], request.asked.clone());
            let mut again = router.open(self.now, &asked.wish()).expect("every method is available");
            let routed = router.route(self.now, &mut again);
            assert!(
                !matches!(routed, Routed::Dispatch(_)),
                "{:?} for {:?} at {:?}: {routed:?} was there to be had",
                asked.method,
                asked.affinity,
                self.now
            );
            router.handle_end(self.now, &mut again, End::Other);
        }
    }

    fn finish(&mut self) {
        while !self.requests.is_empty() {
            let at = self.below(self.requests.len());
            self.end(at, End::Other);
            for shard in 0..self.shards.len() {
                self.fetch(shard);
            }
        }
        self.quiesce();
        for router in &self.shards {
            assert_eq!(router.flights(), 0);
            let figures = router.figures();
            assert!(figures.targets.iter().all(|target| target.waiting == 0));
        }
    }
}

/// A cluster's name, its numbers, and its times in the queue by priority.
type Agreed = (String, [u64; 7], Vec<(u32, u64)>);

/// What all shards must agree on.
fn figures(router: &mut TargetRouter, key: &str, model: &str) -> Vec<Agreed> {
    let clusters = router.clusters(key.as_bytes(), model.as_bytes());
    let of = |cluster: &ringway::proto::stargate::stats::Cluster| {
        let stats = &cluster.stats;
        let numbers = [
            cluster.rtt_ns,
            stats.num_running_queries,
            stats.max_engine_concurrency,
            stats.queue_size,
            stats.queued_input_size,
            stats.total_query_input_size,
            stats.output_generation_queries,
        ];
        (cluster.id.to_string(), numbers, stats.queue_times.clone())
    };
    clusters.iter().map(of).collect()
}
