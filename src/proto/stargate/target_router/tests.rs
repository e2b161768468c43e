use super::*;
use crate::proto::ids::BackendId;
use crate::proto::message::Update;
use crate::proto::stargate::layout::{Layout, Slot};
use crate::proto::stargate::request::{Dispatched, Exhausted};
use crate::proto::stargate::stats::{QueueTimes, Reported};
use crate::proto::stargate::table::ASSUMED_TPS;

mod retries;
mod waits;

fn ms(ms: u64) -> Nanos {
    Nanos::from_ms(ms)
}

/// One router, one process, its clock.
struct Rig {
    router: TargetRouter,
    layout: Layout,
    now: Nanos,
}

fn options() -> TargetRouterOptions {
    TargetRouterOptions {
        me: ShardId(0),
        shards: 1,
        max_connect_retries: 2,
        max_request_retries: 2,
        grace_ms: 900_000,
        seed: 7,
    }
}

impl Rig {
    fn new(options: TargetRouterOptions, file: Option<&str>) -> Rig {
        let config = match file {
            Some(json) => LbConfig::parse(json.as_bytes()).expect("the file is right"),
            None => LbConfig::permissive(),
        };
        let router = TargetRouter::new(options, Arc::new(config));
        Rig { router, layout: Layout::default(), now: ms(1000) }
    }

    /// Servers of `model` as `name` or `name@cluster`, with a fixed rate of 1000 tokens per second and a round trip of 0.
    fn with(file: Option<&str>, servers: &[&str]) -> Rig {
        let mut rig = Rig::new(options(), file);
        for server in servers {
            rig.add(server, "m", &[]);
        }
        rig
    }

    fn add(&mut self, server: &str, model: &str, keys: &[&str]) -> SlotId {
        let (name, cluster_id) = server.split_once('@').unwrap_or((server, server));
        let slots = &mut self.layout.slots;
        let known = slots.iter().find(|slot| *slot.server == *name).map(|slot| slot.backend);
        let next = slots.iter().map(|slot| slot.backend.0 + 1).max().unwrap_or(0);
        let backend = known.unwrap_or(BackendId(next));
        slots.push(Slot {
            backend,
            server: name.into(),
            model: model.into(),
            cluster_id: cluster_id.into(),
            routing_keys: keys.iter().map(|key| (*key).into()).collect(),
            advertised: true,
            active: true,
            input_tps: 1000.0,
            max_concurrency: 0,
        });
        self.lay_out();
        self.router.handle_update(self.now, &Update::RoundTrip { backend, rtt_ns: 0 });
        SlotId(self.layout.slots.len() as u32 - 1)
    }

    fn lay_out(&mut self) {
        self.router.handle_layout(self.now, &self.layout);
    }

    fn change(&mut self, slot: SlotId, change: impl FnOnce(&mut Slot)) {
        change(&mut self.layout.slots[slot.index()]);
        self.lay_out();
    }

    fn report(&mut self, slot: u32, reported: Reported) {
        self.router.handle_report(self.now, SlotId(slot), &reported);
    }

    fn rtt(&mut self, backend: u16, rtt_ms: u64) {
        let update = Update::RoundTrip { backend: BackendId(backend), rtt_ns: rtt_ms * 1_000_000 };
        self.router.handle_update(self.now, &update);
    }

    fn open(&mut self, wish: &Wish<'_>) -> Result<Flight, Refusal> {
        self.router.open(self.now, &Wish { arrived: self.now, model: b"m", ..*wish })
    }

    fn route(&mut self, flight: &mut Flight) -> Routed {
        self.router.route(self.now, flight)
    }

    /// Opens and routes.
    fn send(&mut self, wish: &Wish<'_>) -> (Flight, Dispatched) {
        let mut flight = self.open(wish).expect("accepted");
        match self.route(&mut flight) {
            Routed::Dispatch(dispatched) => (flight, dispatched),
            other => panic!("sent nowhere: {other:?}"),
        }
    }

    fn refused(&mut self, wish: &Wish<'_>) -> Refusal {
        let mut flight = match self.open(wish) {
            Ok(flight) => flight,
            Err(refusal) => return refusal,
        };
        let Routed::Refuse(refusal) = self.route(&mut flight) else { panic!("it was not refused") };
        self.end(flight);
        refusal
    }

    fn waits(&mut self, wish: &Wish<'_>) -> (Flight, Ticket) {
        let mut flight = self.open(wish).expect("accepted");
        match self.route(&mut flight) {
            Routed::Wait(ticket) => (flight, ticket),
            other => panic!("it does not wait: {other:?}"),
        }
    }

    fn end(&mut self, mut flight: Flight) {
        self.router.handle_end(self.now, &mut flight, End::Other);
    }

    /// A whole request. The server it was at.
    fn visit(&mut self, wish: &Wish<'_>) -> u16 {
        let (flight, dispatched) = self.send(wish);
        self.end(flight);
        dispatched.backend.0
    }

    fn retry(&mut self, flight: &mut Flight, setback: Setback<'_>) -> Retry {
        self.router.handle_retry(self.now, flight, setback, Ok(()))
    }

    fn figures(&self, model: &str) -> TargetFigures {
        let figures = self.router.figures();
        let is_it = |target: &Option<(Box<str>, Box<str>)>| target.as_ref().map_or("", |(_, of)| of) == model;
        figures.targets.into_iter().find(|figures| is_it(&figures.target)).expect("a target")
    }

    fn quiet(&self) {
        assert_eq!(self.router.flights(), 0);
        for slot in 0..self.layout.slots.len() as u32 {
            let row = self.router.table.row(SlotId(slot));
            assert_eq!((row.live.sum().requests(), row.live.sum().tokens()), (0, 0));
            assert_eq!(row.newest, NOBODY);
        }
    }
}

fn tps(tps: f64) -> Reported {
    Reported { last_mean_input_tps: Some(tps), ..Reported::default() }
}

fn times(times: &[(u32, u64)]) -> Option<QueueTimes> {
    Some(times.to_vec())
}

#[test]
fn round_robin_takes_turns_and_skips_what_failed() {
    let mut rig = Rig::with(Some(r#"{"default":"round-robin"}"#), &["0", "1", "2", "3"]);
    let order: Vec<u16> = (0..6)
        .map(|_| {
            let (mut flight, dispatched) = rig.send(&Wish::default());
            let mut at = dispatched.backend.0;
            if at == 2 {
                let busy = Setback::Retryable { status: 429, reason: b"" };
                assert_eq!(rig.retry(&mut flight, busy), Retry::Route);
                let Routed::Dispatch(next) = rig.route(&mut flight) else { panic!("there are others") };
                at = next.backend.0;
                assert_eq!(rig.router.facts(&flight).attempts, 2);
            }
            rig.end(flight);
            at
        })
        .collect();
    // The turn goes on with every choice: the third was 2's, and the fourth, of 0, 1 and 3, the first one's; the eighth the second's.
    assert_eq!(order, [0, 1, 0, 0, 1, 1]);
    rig.quiet();
}

#[test]
fn targets_and_expressions_have_turns_of_their_own() {
    let mut rig = Rig::with(None, &["a", "b"]);
    let turn =
        |rig: &mut Rig, method: &str| rig.visit(&Wish { method: Some(method.as_bytes()), ..Wish::default() });
    let (lower, upper) = ("round-robin;require_input_tokens=false", "ROUND_ROBIN;require_input_tokens=false");
    for method in ["round-robin", lower, upper] {
        assert_eq!(
            (turn(&mut rig, method), turn(&mut rig, method), turn(&mut rig, method)),
            (0, 1, 0),
            "{method}"
        );
    }
    assert_eq!((turn(&mut rig, upper), turn(&mut rig, lower), turn(&mut rig, "Round_Robin")), (1, 1, 1));
    let figures = rig.figures("m").algorithms;
    let round_robin = figures.iter().find(|figures| figures.algorithm == "round-robin").unwrap();
    assert_eq!((round_robin.primary, round_robin.fallback), (12, 0));
    assert_eq!(
        (round_robin.expression_builds, round_robin.expression_rebuilds, round_robin.expression_hits),
        (1, 1, 6)
    );
    assert_eq!(rig.router.figures().expression_cache_entries, 1);
    // The same servers for another routing key.
    rig.change(SlotId(0), |slot| slot.routing_keys = vec!["".into(), "k".into()]);
    rig.change(SlotId(1), |slot| slot.routing_keys = vec!["".into(), "k".into()]);
    let keyed = Wish { routing_key: b"k", method: Some(b"round-robin"), ..Wish::default() };
    assert_eq!((rig.visit(&keyed), turn(&mut rig, "round-robin"), rig.visit(&keyed)), (0, 0, 1));
}

#[test]
fn a_target_that_loses_its_last_server_starts_afresh() {
    let mut rig = Rig::with(None, &["a", "b"]);
    let wish = Wish { method: Some(b"round-robin"), ..Wish::default() };
    let expression = Wish { method: Some(b"round-robin;require_input_tokens=true"), ..Wish::default() };
    assert_eq!((rig.visit(&wish), rig.visit(&expression)), (0, 0));
    let set_up = |rig: &mut Rig, backend, up| rig.router.handle_health(rig.now, BackendId(backend), up);
    set_up(&mut rig, 0, false);
    set_up(&mut rig, 0, true);
    assert_eq!((rig.visit(&wish), rig.visit(&expression)), (1, 1), "it had one all the time");
    set_up(&mut rig, 0, false);
    set_up(&mut rig, 1, false);
    assert_eq!((rig.refused(&wish), rig.figures("m").active), (Refusal::Unavailable, 0));
    set_up(&mut rig, 1, true);
    set_up(&mut rig, 0, true);
    assert_eq!((rig.visit(&wish), rig.visit(&expression)), (0, 0));
    rig.quiet();
}

#[test]
fn an_idle_cluster_wins_over_a_busy_one() {
    let mut rig = Rig::with(None, &["busy", "idle"]);
    rig.report(0, Reported { queued_input_size: Some(1000), ..tps(1000.0) });
    rig.report(1, Reported { queued_input_size: Some(0), ..tps(1000.0) });
    assert!((0..20).all(|_| rig.visit(&Wish { input_tokens: 1, ..Wish::default() }) == 1));
    // A cluster of two: 260 tokens at 200 per second are more than 120 at 100.
    let mut rig = Rig::with(None, &["x1@x", "x2@x", "y"]);
    for (slot, queued) in [(0, 130), (1, 130), (2, 120)] {
        rig.report(slot, Reported { queued_input_size: Some(queued), ..tps(100.0) });
    }
    let wish = Wish { input_tokens: 1, ..Wish::default() };
    assert!((0..10).all(|_| rig.visit(&wish) == 2));
    for slot in [0, 1] {
        rig.report(slot, Reported { queued_input_size: Some(0), ..tps(100.0) });
    }
    let order: Vec<u16> = (0..4).map(|_| rig.visit(&wish)).collect();
    assert_eq!(order, [0, 1, 0, 1], "servers of a cluster take turns");
}

#[test]
fn the_priority_decides_which_queue_is_shorter() {
    let mut rig = Rig::with(None, &["a", "b"]);
    rig.report(0, Reported { queue_times: times(&[(0, 1000), (4, 5)]), ..tps(1000.0) });
    rig.report(1, Reported { queue_times: times(&[(0, 0), (4, 500)]), ..tps(1000.0) });
    let wish =
        |priority| Wish { priority, method: Some(b"power-of-n;comparator=queue-time"), ..Wish::default() };
    assert!((0..10).all(|_| rig.visit(&wish(4)) == 0 && rig.visit(&wish(0)) == 1));
}

#[test]
fn the_expected_queue_is_told_without_the_request_itself() {
    let mut rig = Rig::with(None, &["a"]);
    rig.report(
        0,
        Reported {
            max_engine_concurrency: Some(25),
            num_running_queries: Some(24),
            queue_times: times(&[(0, 10_000)]),
            ..tps(8000.0)
        },
    );
    let wish = Wish { input_tokens: 8000, ..Wish::default() };
    let (first, at) = rig.send(&wish);
    assert_eq!((at.expected_queue_ms, at.rank_depth), (Some(0), 1));
    let (second, at) = rig.send(&wish);
    assert_eq!(at.expected_queue_ms, Some(11_000));
    let (cluster, _, stats) = rig.router.cluster_of(&second).unwrap();
    assert_eq!((cluster, stats.num_running_queries, rig.router.cluster_id(&second)), ("a", 25, "a"));
    rig.end(first);
    rig.end(second);
    // Without any rate, and something in the queue, nothing can be said.
    rig.report(0, Reported { queued_input_size: Some(5), ..tps(0.0) });
    let (third, at) = rig.send(&Wish::default());
    assert_eq!(at.expected_queue_ms, None);
    rig.end(third);
    rig.quiet();
}

#[test]
fn who_serves_a_target_and_who_did_decide_between_404_and_503() {
    let mut rig = Rig::new(TargetRouterOptions { grace_ms: 100, ..options() }, None);
    assert_eq!(rig.refused(&Wish::default()), Refusal::NoTarget);
    let slot = rig.add("a", "m", &["k"]);
    assert_eq!(rig.refused(&Wish::default()), Refusal::NoTarget, "the routing key is another target");
    let keyed = Wish { routing_key: b"k", ..Wish::default() };
    assert_eq!(rig.visit(&keyed), 0);
    rig.change(slot, |slot| slot.active = false);
    assert_eq!(rig.refused(&keyed), Refusal::Unavailable, "advertised, in any status");
    rig.change(slot, |slot| (slot.active, slot.advertised) = (true, false));
    assert_eq!(rig.refused(&keyed), Refusal::Unavailable);
    rig.now = rig.now.plus_ms(99);
    assert_eq!(rig.refused(&keyed), Refusal::Unavailable);
    rig.now = rig.now.plus_ms(1);
    assert_eq!(rig.refused(&keyed), Refusal::NoTarget);
    rig.change(slot, |slot| slot.advertised = true);
    assert_eq!(rig.visit(&keyed), 0);
    // Moved to another key, it leaves the old target, which others remember for a while.
    rig.change(slot, |slot| slot.routing_keys = vec!["other".into()]);
    assert_eq!(rig.refused(&keyed), Refusal::Unavailable);
    assert_eq!(rig.visit(&Wish { routing_key: b"other", ..Wish::default() }), 0);
    assert_eq!(rig.figures("m").target.map(|(key, _)| key), Some("k".into()));
    assert_eq!(rig.router.figures().targets.len(), 3, "two targets, and one for all that are none");
    rig.quiet();
}

#[test]
fn a_server_without_a_successful_check_is_no_candidate() {
    let mut rig = Rig::with(None, &["a"]);
    let mut slot = rig.layout.slots[0].clone();
    (slot.backend, slot.server, slot.cluster_id) = (BackendId(1), "b".into(), "b".into());
    rig.layout.slots.push(slot);
    rig.lay_out();
    assert_eq!(rig.router.clusters(b"", b"m").len(), 1);
    rig.rtt(1, 5);
    let clusters = rig.router.clusters(b"", b"m");
    assert_eq!((clusters.len(), clusters[1].rtt_ns), (2, 5_000_000));
    rig.router.handle_health(rig.now, BackendId(1), false);
    assert_eq!(rig.router.clusters(b"", b"m").len(), 1);
    rig.rtt(1, 6);
    assert_eq!(rig.router.clusters(b"", b"m").len(), 1, "down until the checks say otherwise");
    rig.router.handle_health(rig.now, BackendId(1), true);
    assert_eq!(rig.router.clusters(b"", b"m")[1].rtt_ns, 6_000_000);
}

#[test]
fn methods_are_refused_before_keys_and_targets() {
    let mut rig = Rig::new(
        options(),
        Some(r#"{"models":{"m":{"algorithm":"pulsar","require_cache_affinity_key":true}}}"#),
    );
    let code = |rig: &mut Rig, method: &str| match rig
        .refused(&Wish { method: Some(method.as_bytes()), ..Wish::default() })
    {
        Refusal::Method { code, message } => {
            assert!(!message.is_empty());
            code
        }
        other => panic!("{method}: {other:?}"),
    };
    for (method, expected) in [
        ("round-robin", "unavailable"),
        ("wait-and-widen;n=3", "unavailable"),
        ("sticky", "unknown_method"),
        ("   ", "unknown_method"),
        ("pulsar;seed", "malformed_expression"),
        ("pulsar;widen=2", "unknown_parameter"),
        ("pulsar;n=2", "not_applicable"),
    ] {
        assert_eq!(code(&mut rig, method), expected, "{method}");
    }
    assert_eq!(rig.refused(&Wish::default()), Refusal::AffinityKeyMissing);
    let expression = Wish { method: Some(b"pulsar;seed=a"), ..Wish::default() };
    assert_eq!(rig.refused(&expression), Refusal::AffinityKeyMissing);
    let keyed = Wish { affinity_key: b"k", ..expression };
    assert_eq!(rig.refused(&keyed), Refusal::NoTarget, "known or not, the configuration was checked first");
    let free = Wish { method: Some(b"pulsar;require_cache_affinity_key=false"), ..Wish::default() };
    assert_eq!(rig.refused(&free), Refusal::NoTarget);
    rig.quiet();
}

#[test]
fn expressions_keep_their_configurations_and_say_when_they_were_built() {
    let mut rig = Rig::with(None, &["a"]);
    let mut built = |value: &[u8]| {
        let (flight, _) = rig.send(&Wish { method: Some(value), ..Wish::default() });
        let facts = rig.router.facts(&flight).clone();
        let json = rig.router.effective_json(&flight);
        rig.end(flight);
        (facts.expression_built, facts.algorithm, facts.comparator, json)
    };
    let (first, algorithm, comparator, json) = built(b"wait-and-widen;n=3");
    assert_eq!((first, algorithm, comparator), (Some(false), "wait-and-widen", "ttft"));
    assert!(json.contains(r#""algorithm":"wait-and-widen""#) && json.contains(r#""n":3"#), "{json}");
    assert_eq!(built(b"wait-and-widen;n=3").0, None);
    assert_eq!(built(b"wait-and-widen;n=4").0, Some(true));
    assert_eq!(built(b"wait-and-widen;n=3").0, None);
    assert_eq!(built(b"power-of-n").0, None);
}

#[test]
fn rates_are_learnt_from_completed_requests_and_told_to_peers() {
    let mut rig = Rig::new(TargetRouterOptions { shards: 3, me: ShardId(1), ..options() }, None);
    let slot = rig.add("a", "m", &[]);
    rig.change(slot, |slot| slot.input_tps = 0.0);
    let wish = Wish { input_tokens: 100, ..Wish::default() };
    let request = |rig: &mut Rig, wish: &Wish<'_>, [head, output, end]: [u64; 3], how: End| {
        let (mut flight, _) = rig.send(wish);
        rig.now = rig.now.plus_ms(head);
        rig.router.handle_head(rig.now, &mut flight);
        rig.now = rig.now.plus_ms(output);
        rig.router.handle_output(rig.now, &mut flight);
        rig.router.handle_output(rig.now.plus_ms(1), &mut flight);
        rig.now = rig.now.plus_ms(end);
        rig.router.handle_end(rig.now, &mut flight, how);
    };
    // 100 tokens in 100 ms to the first output.
    for _ in 0..4 {
        request(&mut rig, &wish, [40, 60, 500], End::Completed);
    }
    request(&mut rig, &wish, [1, 1, 1], End::Other);
    request(&mut rig, &wish, [4, 5, 500], End::Completed);
    let assumed = rig.router.clusters(b"", b"m")[0].stats.last_mean_input_tps;
    assert_eq!(assumed, ASSUMED_TPS, "four samples are too few");
    // To the head where embeddings are made.
    request(&mut rig, &Wish { embeddings: true, ..wish }, [1, 1000, 1], End::Completed);
    let stats = &rig.router.clusters(b"", b"m")[0].stats;
    assert_eq!((stats.last_mean_input_tps, stats.max_input_tps), (2800.0, 10_000.0));
    let mut samples = Vec::new();
    while let Some((to, message, urgency)) = rig.router.poll_message() {
        if let Message::Sample { slot: at, tps } = message {
            assert_eq!((at, urgency), (slot, Urgency::Quiet));
            samples.push((to.0, tps));
        }
    }
    assert_eq!(samples.len(), 10);
    assert_eq!(&samples[8..], [(0, 10_000.0), (2, 10_000.0)]);
    for _ in 0..5 {
        rig.router.handle_message(rig.now, ShardId(0), &Message::Sample { slot, tps: 2800.0 });
    }
    assert_eq!(rig.router.clusters(b"", b"m")[0].stats.last_mean_input_tps, 2800.0);
    // A new generation keeps what is published.
    rig.router.handle_update(rig.now, &Update::Forget { backend: BackendId(0) });
    rig.router.handle_message(rig.now, ShardId(0), &Message::Sample { slot, tps: 1.0 });
    assert_eq!(rig.router.clusters(b"", b"m")[0].stats.last_mean_input_tps, 2800.0);
    let figures = rig.figures("m");
    assert_eq!(figures.servers[0].proxy_duration_ns.count(), 7);
    assert_eq!(figures.routing_duration_ns.count(), 7);
    rig.quiet();
}

#[test]
fn too_much_work_is_refused_and_counted_by_its_reason() {
    let mut rig = Rig::with(
        Some(
            r#"{"default":"power-of-n","models":{"m":{"algorithm":"power-of-n","max_input_work_seconds":3}}}"#,
        ),
        &["a"],
    );
    rig.report(0, Reported { queued_input_size: Some(300), ..tps(100.0) });
    let wish = Wish { input_tokens: 50, ..Wish::default() };
    assert_eq!(rig.refused(&wish), Refusal::InputWork { capacity: false });
    rig.report(0, Reported { queued_input_size: Some(250), ..tps(100.0) });
    assert_eq!(rig.visit(&wish), 0);
    rig.report(0, tps(0.0));
    assert_eq!(rig.refused(&wish), Refusal::InputWork { capacity: true });
    let figures = rig.figures("m");
    assert_eq!((figures.input_work_limit_exceeded, figures.input_work_capacity_unavailable), (1, 1));
}

#[test]
fn models_are_listed_sorted_each_once_while_a_server_is_active() {
    let mut rig = Rig::new(options(), None);
    assert!(rig.router.active_models().is_empty());
    rig.add("x", "b", &[]);
    let a = rig.add("x", "a", &[]);
    rig.add("y", "a", &[]);
    let k = rig.add("y", "k", &["key"]);
    let names = |models: &[Box<str>]| models.iter().map(|model| model.to_string()).collect::<Vec<_>>();
    assert_eq!(names(rig.router.active_models()), ["a", "b", "k"]);
    assert_eq!(names(rig.router.models_without_key()), ["a", "b"]);
    rig.change(a, |slot| slot.active = false);
    rig.change(k, |slot| slot.advertised = false);
    assert_eq!(names(rig.router.active_models()), ["a", "b"]);
    rig.router.handle_health(rig.now, BackendId(1), false);
    assert_eq!(names(rig.router.active_models()), ["b"]);
    assert_eq!(names(rig.router.models_without_key()), ["b"]);
}

#[test]
fn what_sessions_count_has_the_labels_of_its_server() {
    let mut rig = Rig::with(None, &["a"]);
    let (flight, _) = rig.send(&Wish::default());
    rig.router.count_attempt(&flight, AttemptResult::Upstream(200));
    rig.router.count_replay_bytes(&flight, 2000);
    rig.router.count_finished(&flight, 200);
    rig.end(flight);
    let nowhere = rig.router.open(rig.now, &Wish { model: b"none", ..Wish::default() }).unwrap();
    rig.router.count_finished(&nowhere, 404);
    rig.end(nowhere);
    let figures = rig.router.figures();
    let [target, none] = &figures.targets[..] else { panic!("{figures:?}") };
    assert_eq!(none.target, None, "what clients make up is no label");
    assert_eq!((none.servers[0].backend, &none.servers[0].requests[..]), (None, &[(404, 1)][..]));
    assert_eq!(target.servers.len(), 1);
    let server = &target.servers[0];
    assert_eq!((server.backend, &server.requests[..]), (Some(BackendId(0)), &[(200, 1)][..]));
    assert_eq!(server.attempts, [(AttemptResult::Upstream(200), 1)]);
    assert_eq!((target.replay_buffer_bytes.buckets[2], target.active), (1, 1));
}

#[test]
fn more_tokens_than_can_be_are_counted_as_very_many() {
    let mut rig = Rig::with(None, &["a"]);
    let flights: Vec<Flight> =
        (0..3).map(|_| rig.send(&Wish { input_tokens: u64::MAX, ..Wish::default() }).0).collect();
    let stats = &rig.router.clusters(b"", b"m")[0].stats;
    assert_eq!(stats.queued_input_size, 3 * crate::proto::stargate::live::LIVE_TOKENS_MAX);
    for flight in flights {
        rig.end(flight);
    }
    rig.quiet();
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "dropped and not ended")]
fn a_flight_that_is_dropped_without_its_end_is_noticed() {
    let mut rig = Rig::with(None, &["a"]);
    drop(rig.send(&Wish::default()));
}
