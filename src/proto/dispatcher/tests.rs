mod kv;

use std::collections::HashMap;

use super::*;
use crate::proto::backend::catalog::{Address, Group, KvRules, Pool, Route, RouteId, Server};
use crate::proto::backend::grouping::rebuild_groups;

const GROUP: GroupId = GroupId(0);
const A: BackendId = BackendId(0);
const B: BackendId = BackendId(1);

fn server(weight: f64, max_concurrency: u32) -> Server {
    Server {
        name: "s".into(),
        url: "http://s".into(),
        address: Some(Address::Tcp("127.0.0.1:1".parse().unwrap())),
        host: "s".into(),
        base_path: "".into(),
        pool: Some(PoolId(0)),
        weight,
        weight_text: weight.to_string().into(),
        affinity_weight: 1.0,
        max_concurrency,
        max_input_tokens: 0,
        tier: "".into(),
        kv_capacity_blocks: 1,
        api_key: None,
        models: Some(Vec::new()),
        registered: false,
        cluster_id: "server".into(),
        input_tps: 0.0,
        removed: false,
    }
}

fn group(candidates: Vec<BackendId>) -> Group {
    Group { members: candidates.clone(), candidates, pool: PoolId(0), tier: "".into(), label: "p".into() }
}

/// One pool, one group of all servers for model `m` and for requests without a model.
fn catalog(servers: &[(f64, u32)], routing_mode: RoutingMode, queue_size: u32) -> Catalog {
    let pool = Pool {
        name: "p".into(),
        algorithm: Algorithm::WeightedRoundRobin,
        routing_mode,
        queue_size,
        queue_timeout_ms: 1000,
        kv: KvRules::default(),
        entry: None,
    };
    let candidates = (0..servers.len() as u16).map(BackendId).collect();
    Catalog {
        version: 1,
        servers: servers.iter().map(|(weight, ceiling)| server(*weight, *ceiling)).collect(),
        pools: vec![pool],
        groups: vec![group(candidates)],
        routes: vec![Route::to(GROUP, PoolId(0))],
        models: HashMap::from([(b"m"[..].into(), vec![RouteId(0)])]),
        unnamed: vec![RouteId(0)],
        ..Catalog::default()
    }
}

/// Shards with rings of no delay: messages arrive when `pump` is called.
struct Net {
    shards: Vec<Dispatcher>,
    now: Nanos,
}

impl Net {
    fn new(shards: usize, catalog: &Catalog) -> Self {
        let options = DispatcherOptions::default();
        let one = |i| Dispatcher::new(ShardId(i as u8), shards, options, catalog.clone());
        Net { shards: (0..shards).map(one).collect(), now: Nanos::from_ms(1) }
    }
    fn ask(&mut self, shard: usize) -> Decision {
        self.shards[shard].handle_request(self.now, GROUP, &Wanted::default())
    }
    fn done(&mut self, shard: usize, backend: BackendId, outcome: Outcome) {
        self.shards[shard].handle_done(self.now, backend, outcome);
    }
    fn wait_ms(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        for shard in &mut self.shards {
            shard.handle_timeout(self.now);
        }
    }
    fn update(&mut self, update: &Update) {
        for shard in &mut self.shards {
            shard.handle_update(self.now, update);
        }
    }
    fn catalog(&mut self, change: impl Fn(&mut Catalog)) {
        let mut catalog = self.shards[0].catalog().clone();
        change(&mut catalog);
        self.update(&Update::Catalog(Box::new(catalog)));
    }
    /// Delivers until nothing moves; the messages, without load figures.
    fn pump(&mut self) -> Vec<(usize, Message)> {
        let mut seen = Vec::new();
        loop {
            let mut moved = false;
            for from in 0..self.shards.len() {
                while let Some((to, message, _)) = self.shards[from].poll_message() {
                    moved = true;
                    if !matches!(message, Message::Load { .. } | Message::Sent { .. }) {
                        seen.push((to.index(), message));
                    }
                    self.shards[to.index()].handle_message(self.now, ShardId(from as u8), message);
                }
            }
            if !moved {
                return seen;
            }
        }
    }
    fn flush(&mut self) {
        for shard in &mut self.shards {
            shard.flush(self.now);
        }
        self.pump();
    }
    fn events(&mut self, shard: usize) -> Vec<Event> {
        std::iter::from_fn(|| self.shards[shard].poll_event()).collect()
    }
    /// Asks and pumps until the request is placed.
    fn place(&mut self, shard: usize) -> BackendId {
        match self.ask(shard) {
            Decision::Dispatch(placement) => placement.backend,
            Decision::Wait(ticket) => {
                self.pump();
                granted(&self.events(shard), ticket).backend
            }
            Decision::Reject(rejection) => panic!("{rejection:?}"),
        }
    }
    fn queue(&mut self, shard: usize) -> Ticket {
        match self.ask(shard) {
            Decision::Wait(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }
}

fn granted(events: &[Event], wanted: Ticket) -> Placement {
    match events {
        [Event::Granted { ticket, placement }] if *ticket == wanted => *placement,
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_shard_turns_the_textbook_wheel() {
    let mut net = Net::new(1, &catalog(&[(5.0, 0), (1.0, 0), (1.0, 0)], RoutingMode::Queue, 10));
    let picks: String = (0..14).map(|_| char::from(b'A' + net.place(0).0 as u8)).collect();
    assert_eq!(picks, "AABACAAAABACAA");
    assert!(net.shards[0].poll_message().is_none(), "alone there is nobody to tell");
}

#[test]
fn shards_start_their_wheels_at_different_steps() {
    let mut net = Net::new(3, &catalog(&[(1.0, 0), (1.0, 0), (1.0, 0)], RoutingMode::Queue, 10));
    let first: Vec<_> = (0..3).map(|shard| net.place(shard)).collect();
    assert_eq!(first, [BackendId(0), BackendId(1), BackendId(2)]);
}

#[test]
fn a_placement_says_how_many_are_in_flight_everywhere() {
    let mut net = Net::new(2, &catalog(&[(1.0, 5)], RoutingMode::Queue, 10));
    net.place(1);
    net.place(1);
    net.flush();
    let Decision::Dispatch(placement) = net.ask(0) else { panic!("there is room") };
    assert_eq!((placement.in_flight, placement.ceiling, placement.wait_ns), (3, 5, 0));
    assert_eq!(placement.algorithm_used, Algorithm::WeightedRoundRobin);
}

#[test]
fn without_a_gate_and_in_unlimited_mode_everything_goes_through() {
    for (ceiling, mode) in [(0, RoutingMode::Queue), (1, RoutingMode::Unlimited)] {
        let mut net = Net::new(2, &catalog(&[(1.0, ceiling)], mode, 0));
        for i in 0..100 {
            let Decision::Dispatch(placement) = net.ask(1) else { panic!("{mode:?}") };
            assert_eq!((placement.in_flight, placement.ceiling), (i + 1, 0));
        }
        assert!(net.pump().is_empty(), "no permits, no messages");
        (0..100).for_each(|_| net.done(1, A, Outcome::Success));
        assert_eq!(net.shards[1].in_flight(A), 0);
    }
}

#[test]
fn waiting_requests_are_served_oldest_first_over_all_shards() {
    let mut net = Net::new(3, &catalog(&[(1.0, 1)], RoutingMode::Queue, 10));
    net.place(2);
    let tickets: Vec<_> = [1, 0, 2, 1]
        .into_iter()
        .map(|shard| {
            net.now.0 += 1000;
            (shard, net.queue(shard))
        })
        .collect();
    net.pump();
    let mut holder = 2;
    for (shard, ticket) in tickets {
        net.now.0 += 1_000_000;
        net.done(holder, A, Outcome::Success);
        net.pump();
        let placement = granted(&net.events(shard), ticket);
        assert_eq!(placement.in_flight, 1);
        assert!(placement.wait_ns >= 1_000_000);
        holder = shard;
    }
}

#[test]
fn a_request_does_not_overtake_a_neighbour_that_waits() {
    let mut net = Net::new(2, &catalog(&[(1.0, 2)], RoutingMode::Queue, 10));
    net.place(1);
    net.place(1);
    let first = net.queue(1);
    // Frees a permit here, before home has heard that somebody waits.
    net.done(1, A, Outcome::Success);
    net.now.0 += 1;
    let second = net.queue(1);
    net.pump();
    assert_eq!(granted(&net.events(1), first).backend, A);
    net.done(1, A, Outcome::Success);
    net.pump();
    assert_eq!(granted(&net.events(1), second).backend, A);
}

#[test]
fn reject_is_definite() {
    let mut net = Net::new(3, &catalog(&[(1.0, 4)], RoutingMode::Reject, 10));
    // Shards 1 and 2 hold free permits; shard 0 finds one all the same, as often as there are any.
    for shard in [1, 1, 2, 2] {
        net.place(shard);
    }
    net.done(1, A, Outcome::Success);
    net.done(2, A, Outcome::Success);
    net.pump();
    assert_eq!(net.shards[1].leased(A).1 + net.shards[2].leased(A).1, 2, "leases are kept");
    for _ in 0..2 {
        assert_eq!(net.place(0), A);
    }
    assert_eq!(net.ask(0), Decision::Reject(Rejection::AtCapacity), "home knows at once");
    let ticket = net.queue(1);
    net.pump();
    assert_eq!(net.events(1), [Event::Refused { ticket, rejection: Rejection::AtCapacity }]);
    assert_eq!(net.shards[1].queued(PoolId(0)), 0);
}

#[test]
fn from_the_head_alone_only_what_is_known_is_refused() {
    let mut net = Net::new(2, &catalog(&[(1.0, 1)], RoutingMode::Queue, 1));
    let full = Err(Rejection::QueueFull);
    net.place(0);
    let waiting = net.queue(0);
    assert_eq!(net.shards[0].admissible(net.now, Some(GROUP)), full, "home knows");
    assert_eq!(net.shards[0].admissible(net.now, None), full, "whatever model the body names");
    assert_eq!(net.shards[1].admissible(net.now, None), Ok(()), "not told yet");
    assert_eq!(net.ask(0), Decision::Reject(Rejection::QueueFull));
    assert!(net.shards[0].needs_flush());
    net.flush();
    assert_eq!(net.shards[1].admissible(net.now, None), full);
    net.shards[0].handle_withdraw(net.now, waiting);
    net.pump();
    assert_eq!(net.shards[1].admissible(net.now, None), Ok(()), "told without a tick");
    net.update(&Update::Health { backend: A, up: false });
    for shard in &net.shards {
        assert_eq!(shard.admissible(net.now, None), Err(Rejection::NoHealthyServer));
        assert!(!shard.routable() && !shard.eligible(A));
    }
}

#[test]
fn models_resolve_to_their_group() {
    let mut known = catalog(&[(1.0, 1)], RoutingMode::Queue, 1);
    let resolve = |catalog: &Catalog, model| Net::new(1, catalog).shards[0].resolve(model, b"", 0);
    assert_eq!(resolve(&known, Some(b"m")), Ok(GROUP));
    assert_eq!(resolve(&known, None), Ok(GROUP));
    assert_eq!(resolve(&known, Some(b"x")), Err(Rejection::ModelNotFound));
    known.learning = true;
    assert_eq!(resolve(&known, Some(b"x")), Err(Rejection::NoHealthyServer), "a server has yet to say");
    known.unlisted = vec![RouteId(0)];
    assert_eq!(resolve(&known, Some(b"x")), Ok(GROUP));
    assert_eq!(resolve(&Catalog::default(), None), Err(Rejection::NoHealthyServer));
}

/// Lifeboat rules: `no_server_in_tier`: "the tier has no server for the model"; `input_too_long`: "eligible but for
/// max_input_tokens on every one".
#[test]
fn tiers_and_long_inputs_resolve_or_say_why_not() {
    let mut known = catalog(&[(1.0, 1), (1.0, 1), (1.0, 1)], RoutingMode::Queue, 1);
    for (id, model, tier, tokens) in [(0, "m", "", 100), (1, "m", "", 200), (2, "g", "gold", 0)] {
        let server = &mut known.servers[id];
        server.models = Some(vec![model.into()]);
        server.tier = tier.into();
        server.max_input_tokens = tokens;
    }
    rebuild_groups(&mut known);
    let mut net = Net::new(1, &known);
    let resolve = |net: &Net, model: &str, tier: &str, tokens| {
        let model = (!model.is_empty()).then_some(model.as_bytes());
        let group = net.shards[0].resolve(model, tier.as_bytes(), tokens)?;
        Ok(net.shards[0].catalog().group(group).candidates.clone())
    };
    let c = BackendId(2);
    assert_eq!(resolve(&net, "m", "", 100), Ok(vec![A, B]));
    assert_eq!(resolve(&net, "m", "", 101), Ok(vec![B]));
    assert_eq!(resolve(&net, "m", "", 201), Err(Rejection::InputTooLong));
    assert_eq!(resolve(&net, "g", "gold", u64::MAX), Ok(vec![c]));
    assert_eq!(resolve(&net, "", "gold", 0), Ok(vec![c]));
    assert_eq!(resolve(&net, "m", "gold", 0), Err(Rejection::NoServerInTier));
    assert_eq!(resolve(&net, "g", "", 0), Err(Rejection::NoServerInTier));
    assert_eq!(resolve(&net, "m", "silver", 0), Err(Rejection::NoServerInTier));
    assert_eq!(resolve(&net, "", "silver", 0), Err(Rejection::NoServerInTier));
    assert_eq!(resolve(&net, "x", "silver", 0), Err(Rejection::ModelNotFound), "unknown in every tier");

    net.update(&Update::Health { backend: B, up: false });
    assert_eq!(resolve(&net, "m", "", 101), Ok(vec![B]), "whoever could take it is down: 503, not 413");
    assert_eq!(resolve(&net, "m", "", 201), Err(Rejection::InputTooLong), "one is up and does not take it");
    net.update(&Update::Health { backend: A, up: false });
    assert_eq!(resolve(&net, "m", "", 201), Err(Rejection::NoHealthyServer));

    // A server of the tier that is still being asked may turn out to have the model.
    known.servers[2].models = None;
    rebuild_groups(&mut known);
    let net = Net::new(1, &known);
    assert_eq!(resolve(&net, "m", "gold", 0), Err(Rejection::NoHealthyServer));
    assert_eq!(resolve(&net, "m", "silver", 0), Err(Rejection::NoServerInTier));
}

#[test]
fn the_queue_times_out_to_the_nanosecond() {
    for shard in [0, 1] {
        let mut net = Net::new(2, &catalog(&[(1.0, 1)], RoutingMode::Queue, 10));
        net.place(0);
        let ticket = net.queue(shard);
        net.pump();
        let deadline = net.now.plus_ms(1000);
        assert_eq!(net.shards[shard].poll_timeout(), Some(deadline));
        net.now = Nanos(deadline.0 - 1);
        net.wait_ms(0);
        assert_eq!(net.events(shard), []);
        net.now = deadline;
        net.wait_ms(0);
        assert_eq!(net.events(shard), [Event::Refused { ticket, rejection: Rejection::QueueTimeout }]);
        net.pump();
        let (_, queue) = net.shards[0].books().unwrap();
        assert_eq!(queue.settled(PoolId(0)), 0);
    }
}

#[test]
fn a_grant_that_crosses_a_withdrawal_is_not_lost() {
    let mut net = Net::new(2, &catalog(&[(1.0, 1)], RoutingMode::Queue, 10));
    // On its way: the ticket is gone when the grant comes, and the permit stays here, free.
    let ticket = net.queue(1);
    assert!(net.shards[1].handle_withdraw(net.now, ticket));
    net.pump();
    assert_eq!((net.events(1), net.shards[1].leased(A)), (vec![], (1, 1)));
    // Arrived, but the event was not polled.
    net.place(1);
    let ticket = net.queue(1);
    net.done(1, A, Outcome::Success);
    net.pump();
    assert_eq!(net.shards[1].in_flight(A), 1);
    assert!(net.shards[1].handle_withdraw(net.now, ticket));
    net.pump();
    assert_eq!((net.events(1), net.shards[1].in_flight(A)), (vec![], 0));
    // Polled: it is the caller's.
    net.place(0);
    let ticket = net.queue(1);
    net.done(0, A, Outcome::Success);
    net.pump();
    granted(&net.events(1), ticket);
    assert!(!net.shards[1].handle_withdraw(net.now, ticket));
    net.done(1, A, Outcome::Neutral);
    net.pump();
    net.wait_ms(1000);
    net.wait_ms(1000);
    net.pump();
    let (ledger, _) = net.shards[0].books().unwrap();
    assert_eq!(ledger.spare(A), 1);
}

#[test]
fn idle_leases_go_home() {
    let mut net = Net::new(2, &catalog(&[(1.0, 8)], RoutingMode::Queue, 10));
    net.place(1);
    net.done(1, A, Outcome::Success);
    assert_eq!(net.shards[1].leased(A), (1, 1));
    for _ in 0..2 {
        net.now = net.shards[1].poll_timeout().expect("a free lease is watched");
        net.wait_ms(0);
    }
    assert_eq!(net.shards[1].leased(A), (0, 0));
    assert_eq!(net.shards[1].poll_timeout(), None);
    assert!(net.pump().contains(&(0, Message::Return { backend: A, count: 1, recalled: false })));
}

#[test]
fn failures_in_a_row_bench_and_one_success_clears() {
    let mut net = Net::new(2, &catalog(&[(1.0, 0), (1.0, 0)], RoutingMode::Queue, 10));
    let fail = |net: &mut Net, shard: usize, outcome| {
        while net.place(shard) != A {}
        net.done(shard, A, outcome);
    };
    fail(&mut net, 1, Outcome::Failure);
    fail(&mut net, 1, Outcome::Failure);
    fail(&mut net, 1, Outcome::Success);
    fail(&mut net, 1, Outcome::Failure);
    fail(&mut net, 1, Outcome::Neutral);
    fail(&mut net, 1, Outcome::Failure);
    assert_eq!(net.events(1), [], "two in a row");
    fail(&mut net, 1, Outcome::Failure);
    assert_eq!(net.events(1), [Event::Benched { backend: A, ms: 1000 }]);
    net.pump();
    for shard in 0..2 {
        assert!(!net.shards[shard].eligible(A), "benched on every shard");
        assert!((0..4).all(|_| net.place(shard) == B));
    }
    // Two seconds after one failure on probation, on another shard.
    assert_eq!(net.shards[0].poll_timeout(), Some(net.now.plus_ms(1000)));
    net.wait_ms(1000);
    assert_eq!(net.events(1), [Event::Unbenched { backend: A }]);
    fail(&mut net, 0, Outcome::Failure);
    assert_eq!(net.events(0), [Event::Benched { backend: A, ms: 2000 }]);
    net.pump();
    net.wait_ms(2000);
    net.events(0);
    fail(&mut net, 1, Outcome::Success);
    net.pump();
    for shard in 0..2 {
        fail(&mut net, shard, Outcome::Failure);
        fail(&mut net, shard, Outcome::Failure);
        assert_eq!(net.events(shard), [], "a clean sheet");
    }
}

#[test]
fn a_late_success_clears_a_bench_at_once() {
    let mut net = Net::new(2, &catalog(&[(1.0, 0), (1.0, 0)], RoutingMode::Queue, 10));
    let mut on_a = 0;
    while on_a < 4 {
        on_a += u32::from(net.place(0) == A);
    }
    (0..3).for_each(|_| net.done(0, A, Outcome::Failure));
    net.pump();
    assert!(!net.shards[1].eligible(A));
    net.now.0 += 1;
    net.done(0, A, Outcome::Success);
    net.pump();
    assert!(net.shards[0].eligible(A) && net.shards[1].eligible(A));
    let events = net.events(0);
    assert_eq!(events, [Event::Benched { backend: A, ms: 1000 }, Event::Unbenched { backend: A }]);
}

#[test]
fn the_last_eligible_server_is_never_benched() {
    let mut net = Net::new(1, &catalog(&[(1.0, 0), (1.0, 0)], RoutingMode::Queue, 10));
    net.update(&Update::Health { backend: B, up: false });
    for _ in 0..10 {
        assert_eq!(net.place(0), A);
        net.done(0, A, Outcome::Failure);
    }
    assert_eq!(net.events(0), []);
    // Benched while another was there, and then that one goes down: the bench spares the last.
    net.update(&Update::Health { backend: B, up: true });
    while net.place(0) != A {}
    net.done(0, A, Outcome::Failure);
    assert_eq!(net.events(0), [Event::Benched { backend: A, ms: 1000 }]);
    assert!(!net.shards[0].eligible(A));
    net.update(&Update::Health { backend: B, up: false });
    assert!(net.shards[0].eligible(A));
    assert_eq!(net.place(0), A);
}

#[test]
fn the_end_of_a_bench_is_seen_also_when_something_else_comes_first() {
    let mut two_groups = catalog(&[(1.0, 1), (1.0, 1), (1.0, 1)], RoutingMode::Queue, 10);
    two_groups.groups = [vec![A, BackendId(2)], vec![B]].map(group).to_vec();
    let mut net = Net::new(1, &two_groups);
    net.place(0);
    net.place(0);
    (0..3).for_each(|_| net.shards[0].note_failure(net.now, A));
    net.done(0, A, Outcome::Neutral);
    let ticket = net.queue(0);
    assert_eq!(net.events(0), [Event::Benched { backend: A, ms: 1000 }]);
    net.now = net.now.plus_ms(1000);
    net.update(&Update::Health { backend: B, up: false });
    assert_eq!(net.events(0), []);
    net.wait_ms(0);
    let events = net.events(0);
    assert_eq!(events[0], Event::Unbenched { backend: A });
    assert_eq!(granted(&events[1..], ticket).backend, A);
}

#[test]
fn who_waits_outlasts_an_outage_and_who_comes_is_told() {
    let mut net = Net::new(2, &catalog(&[(1.0, 1), (1.0, 0)], RoutingMode::Queue, 10));
    net.update(&Update::Health { backend: B, up: false });
    assert_eq!(net.place(1), A);
    let waiting = net.queue(1);
    net.pump();
    net.update(&Update::Health { backend: A, up: false });
    assert_eq!(net.ask(1), Decision::Reject(Rejection::NoHealthyServer));
    net.done(1, A, Outcome::Neutral);
    net.pump();
    assert_eq!(net.events(1), [], "A is down");
    net.update(&Update::Health { backend: B, up: true });
    net.pump();
    assert_eq!(granted(&net.events(1), waiting).backend, B, "woken by the change");
}

#[test]
fn a_server_that_returns_brings_its_idle_leases_to_who_waits() {
    let mut net = Net::new(3, &catalog(&[(1.0, 1), (1.0, 1)], RoutingMode::Queue, 10));
    net.place(0);
    assert_eq!(net.place(2), B);
    net.done(2, B, Outcome::Success);
    net.pump();
    assert_eq!(net.shards[2].leased(B), (1, 1));
    net.update(&Update::Health { backend: B, up: false });
    let ticket = net.queue(1);
    net.pump();
    assert_eq!(net.events(1), []);
    net.update(&Update::Health { backend: B, up: true });
    net.pump();
    assert_eq!(granted(&net.events(1), ticket).backend, B);
}

#[test]
fn live_changes_wake_who_waits() {
    let changes: [fn(&mut Catalog); 3] = [
        |catalog| catalog.servers[0].max_concurrency = 2,
        |catalog| catalog.servers[1].weight = 1.0,
        |catalog| catalog.pools[0].routing_mode = RoutingMode::Unlimited,
    ];
    for change in changes {
        for shard in 0..2 {
            let mut net = Net::new(2, &catalog(&[(1.0, 1), (0.0, 1)], RoutingMode::Queue, 10));
            net.place(1);
            let ticket = net.queue(shard);
            net.pump();
            assert_eq!(net.events(shard), []);
            net.catalog(change);
            net.pump();
            granted(&net.events(shard), ticket);
        }
    }
}

#[test]
fn a_ceiling_put_on_a_busy_server_counts_what_runs_there() {
    let mut net = Net::new(3, &catalog(&[(1.0, 0)], RoutingMode::Queue, 10));
    for shard in [0, 1, 1, 2] {
        assert_eq!(net.place(shard), A);
    }
    net.catalog(|catalog| catalog.servers[0].max_concurrency = 3);
    // Home has the ceiling, and does not yet know what runs elsewhere.
    let early = net.queue(0);
    assert!(net.shards[0].handle_withdraw(net.now, early));
    let ticket = net.queue(2);
    net.pump();
    net.done(0, A, Outcome::Success);
    net.pump();
    assert_eq!(net.events(2), [], "three still run");
    net.flush();
    net.done(1, A, Outcome::Success);
    net.pump();
    assert_eq!(granted(&net.events(2), ticket).in_flight, 3);
    let (ledger, _) = net.shards[0].books().unwrap();
    assert_eq!((ledger.spare(A), ledger.leased(A, ShardId(1)), ledger.leased(A, ShardId(2))), (0, 1, 2));
}

#[test]
fn a_server_is_not_tried_twice() {
    let mut net = Net::new(1, &catalog(&[(9.0, 0), (1.0, 0)], RoutingMode::Queue, 10));
    let mut tried = Tried::default();
    tried.push(A);
    for _ in 0..5 {
        let decision = net.shards[0].handle_request(net.now, GROUP, &Wanted { tried, ..Wanted::default() });
        assert!(matches!(decision, Decision::Dispatch(Placement { backend: B, .. })), "{decision:?}");
    }
    tried.push(B);
    let decision = net.shards[0].handle_request(net.now, GROUP, &Wanted { tried, ..Wanted::default() });
    assert_eq!(decision, Decision::Reject(Rejection::NoHealthyServer));
}

#[test]
fn a_grant_for_a_server_that_is_drained_here_already_goes_back() {
    let mut net = Net::new(2, &catalog(&[(1.0, 1), (1.0, 1)], RoutingMode::Queue, 10));
    net.place(0);
    net.place(0);
    let ticket = net.queue(1);
    net.pump();
    // Shard 1 hears of the drain of A first; home still grants A.
    let mut drained = net.shards[1].catalog().clone();
    drained.servers[0].weight = 0.0;
    net.shards[1].handle_catalog(net.now, Box::new(drained.clone()));
    net.done(0, A, Outcome::Success);
    let (to, grant, _) = net.shards[0].poll_message().expect("A's permit is granted");
    assert!(matches!(grant, Message::Grant { backend: A, .. }));
    net.shards[to.index()].handle_message(net.now, ShardId::HOME, grant);
    assert_eq!((net.events(1), net.shards[1].leased(A)), (vec![], (0, 0)));
    net.shards[0].handle_catalog(net.now, Box::new(drained));
    net.pump();
    assert_eq!(net.events(1), []);
    net.done(0, B, Outcome::Success);
    net.pump();
    assert_eq!(granted(&net.events(1), ticket).backend, B);
}

#[test]
fn home_keeps_questions_about_a_catalog_that_it_does_not_have_yet() {
    let old = catalog(&[(1.0, 1)], RoutingMode::Queue, 10);
    let mut net = Net::new(2, &old);
    let mut new = old;
    new.version = 2;
    new.groups.push(group(vec![A]));
    net.shards[1].handle_catalog(net.now, Box::new(new.clone()));
    let ask = |net: &mut Net| match net.shards[1].handle_request(net.now, GroupId(1), &Wanted::default()) {
        Decision::Wait(ticket) => ticket,
        other => panic!("{other:?}"),
    };
    let withdrawn = ask(&mut net);
    let kept = ask(&mut net);
    net.shards[1].handle_withdraw(net.now, withdrawn);
    net.pump();
    assert_eq!(net.events(1), []);
    net.shards[0].handle_catalog(net.now, Box::new(new));
    net.pump();
    assert_eq!(granted(&net.events(1), kept).backend, A);
}

#[test]
fn dropped_load_figures_are_sent_again() {
    let mut net = Net::new(2, &catalog(&[(1.0, 0)], RoutingMode::Queue, 10));
    net.place(1);
    net.shards[1].flush(net.now);
    let (_, message, urgency) = net.shards[1].poll_message().expect("a load figure");
    assert_eq!(urgency, Urgency::Lazy);
    assert!(!net.shards[1].needs_flush());
    net.shards[1].handle_dropped(message);
    assert!(net.shards[1].needs_flush());
    net.now.0 += 7_000_000;
    net.flush();
    assert_eq!((net.shards[0].heard(ShardId(1), A), net.shards[0].in_flight_total(A)), (1, 1));
    let mut report = ShardReport::new(ShardId(0));
    net.shards[0].figures(net.now, &mut report);
    assert_eq!(report.mesh_lag_ns, 7_000_000, "as old as the change, not as the message");
}

#[test]
fn figures_fill_the_report() {
    let mut net = Net::new(1, &catalog(&[(1.0, 1), (0.0, 0)], RoutingMode::Queue, 10));
    net.place(0);
    net.queue(0);
    net.queue(0);
    let mut report = ShardReport::new(ShardId(0));
    net.shards[0].figures(net.now, &mut report);
    assert_eq!((report.servers.len(), report.queued), (2, vec![2]));
    assert_eq!((report.servers[0].in_flight, report.servers[0].dispatched), (1, 1));
}
