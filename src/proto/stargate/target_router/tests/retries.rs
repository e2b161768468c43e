//! Setbacks: where a request goes next, and what is counted.

use super::*;

const BUSY: Setback<'static> = Setback::Retryable { status: 429, reason: b"busy" };
const MISMATCH: Setback<'static> = Setback::Retryable { status: 429, reason: b"queue_estimate_mismatch" };

fn counts(counts: &[(Box<str>, u64)]) -> Vec<(&str, u64)> {
    counts.iter().map(|(reason, count)| (&**reason, *count)).collect()
}

fn round_robin(servers: &[&str]) -> Rig {
    Rig::with(Some(r#"{"default":"round-robin"}"#), servers)
}

#[test]
fn a_cluster_that_refuses_is_left_for_another() {
    let mut rig = round_robin(&["a1@a", "a2@a", "b"]);
    let (mut flight, at) = rig.send(&Wish::default());
    assert_eq!((at.backend.0, rig.router.live(SlotId(0))), (0, 1));
    rig.router.count_attempt(&flight, AttemptResult::Upstream(429));
    assert_eq!(rig.retry(&mut flight, BUSY), Retry::Route);
    assert_eq!(rig.router.live(SlotId(0)), 0);
    let Routed::Dispatch(at) = rig.route(&mut flight) else { panic!("b is left") };
    assert_eq!(at.backend.0, 2, "not the other server of the cluster");
    rig.router.count_attempt(&flight, AttemptResult::Upstream(200));
    rig.router.count_finished(&flight, 200);
    let facts = rig.router.facts(&flight);
    assert_eq!((facts.attempts, facts.request_retries, facts.failed_backends), (2, 1, 1));
    assert_eq!(facts.routing_retry_attempts, 0, "no waiting");
    rig.end(flight);
    let figures = rig.figures("m");
    assert_eq!(counts(&figures.retries), [("busy", 1)]);
    assert_eq!(figures.exhausted, []);
    let [a, b] = &figures.servers[..] else { panic!("{figures:?}") };
    assert_eq!((a.requests.len(), a.attempts[0].0), (0, AttemptResult::Upstream(429)));
    assert_eq!((b.requests[0], b.attempts[0].0), ((200, 1), AttemptResult::Upstream(200)));
    rig.quiet();
}

#[test]
fn a_mismatched_queue_sends_it_to_a_sibling_first() {
    let mut rig = round_robin(&["a1@a", "a2@a", "a3@a", "b"]);
    let (mut flight, at) = rig.send(&Wish::default());
    assert_eq!(at.backend.0, 0);
    let mut order = Vec::new();
    for _ in 0..2 {
        assert_eq!(rig.retry(&mut flight, MISMATCH), Retry::Route);
        let Routed::Dispatch(at) = rig.route(&mut flight) else { panic!("others are left") };
        order.push(at.backend.0);
    }
    // The cluster's turn stands at 1: of two left, the second; then at 2: of one left, that one.
    assert_eq!(order, [2, 1]);
    assert_eq!(rig.retry(&mut flight, MISMATCH), Retry::Exhausted(Exhausted::Upstream));
    rig.router.count_finished(&flight, 429);
    rig.end(flight);
    let figures = rig.figures("m");
    assert_eq!(counts(&figures.retries), [("queue_estimate_mismatch", 2)]);
    assert_eq!(counts(&figures.exhausted), [("queue_estimate_mismatch", 1)]);
    assert_eq!(figures.algorithms[0].primary, 1, "siblings are no choice of a cluster");
    let [server] = &figures.servers[..] else { panic!("{figures:?}") };
    assert_eq!((server.backend, &server.requests[..]), (Some(BackendId(1)), &[(429, 1)][..]));
    rig.quiet();
}

#[test]
fn a_server_that_is_gone_is_made_up_for_by_its_cluster_even_if_another_is_better() {
    let mut rig = Rig::with(None, &["a1@a", "a2@a", "b"]);
    rig.report(2, Reported { queue_times: times(&[(0, 100)]), ..tps(1000.0) });
    let (mut flight, at) = rig.send(&Wish::default());
    assert_eq!(at.backend.0, 0);
    rig.report(2, Reported { queue_times: times(&[]), ..tps(1000.0) });
    rig.report(1, Reported { queue_times: times(&[(0, 5000)]), ..tps(1000.0) });
    assert_eq!(rig.retry(&mut flight, Setback::Connect), Retry::Route);
    let Routed::Dispatch(at) = rig.route(&mut flight) else { panic!("a sibling is left") };
    assert_eq!((at.backend.0, at.expected_queue_ms), (1, Some(5000)));
    // That one too: the cluster is out, the load balancer goes on with the rest.
    assert_eq!(rig.retry(&mut flight, Setback::Connect), Retry::Route);
    let Routed::Dispatch(at) = rig.route(&mut flight) else { panic!("another cluster is left") };
    assert_eq!(at.backend.0, 2);
    assert_eq!(rig.retry(&mut flight, Setback::Connect), Retry::Exhausted(Exhausted::ConnectRetries));
    rig.router.count_finished(&flight, 502);
    rig.end(flight);
    let figures = rig.figures("m");
    assert_eq!(counts(&figures.retries), [("connect_failover", 2)]);
    assert_eq!(counts(&figures.exhausted), [("connect_retries_exhausted", 1)]);
    assert_eq!(figures.servers.iter().map(|server| server.requests.len()).sum::<usize>(), 1);
    rig.quiet();
}

#[test]
fn a_lone_server_that_refuses_leaves_nobody() {
    let mut rig = round_robin(&["a"]);
    let (mut flight, _) = rig.send(&Wish { max_wait_ms: Some(1000), ..Wish::default() });
    assert_eq!(rig.retry(&mut flight, BUSY), Retry::Route);
    assert_eq!(rig.route(&mut flight), Routed::Refuse(Refusal::Unavailable), "nobody to wait for");
    rig.router.count_finished(&flight, 503);
    rig.end(flight);
    let figures = rig.figures("m");
    assert_eq!(counts(&figures.exhausted), [("no_eligible_backend", 1)]);
    assert_eq!((figures.servers[0].backend, figures.servers[0].requests[0]), (None, (503, 1)));
    // The same when the last attempt was a failed connection, or the target is gone by then.
    let (mut flight, _) = rig.send(&Wish::default());
    assert_eq!(rig.retry(&mut flight, Setback::Connect), Retry::Route);
    rig.change(SlotId(0), |slot| slot.advertised = false);
    rig.now = rig.now.plus_ms(1_000_000);
    assert_eq!(rig.route(&mut flight), Routed::Refuse(Refusal::Unavailable));
    rig.end(flight);
    assert_eq!(counts(&rig.figures("m").exhausted), [("no_eligible_backend", 2)]);
    rig.quiet();
}

#[test]
fn request_retries_end_with_the_answer_itself() {
    let mut rig = Rig::new(TargetRouterOptions { max_request_retries: 1, ..options() }, None);
    for server in ["a", "b", "c"] {
        rig.add(server, "m", &[]);
    }
    let (mut flight, _) = rig.send(&Wish::default());
    assert_eq!(rig.retry(&mut flight, BUSY), Retry::Route);
    let Routed::Dispatch(at) = rig.route(&mut flight) else { panic!("two are left") };
    assert_eq!(rig.retry(&mut flight, BUSY), Retry::Exhausted(Exhausted::Upstream));
    rig.router.handle_head(rig.now, &mut flight);
    rig.router.count_finished(&flight, 429);
    rig.end(flight);
    let figures = rig.figures("m");
    assert_eq!(counts(&figures.exhausted), [("busy", 1)]);
    let server = figures.servers.iter().find(|server| server.backend == Some(at.backend)).unwrap();
    assert_eq!((&server.requests[..], server.proxy_duration_ns.count()), (&[(429, 1)][..], 1));
}

#[test]
fn a_connection_is_made_anew_at_the_same_server() {
    let mut rig = round_robin(&["a", "b"]);
    let (mut flight, _) = rig.send(&Wish { input_tokens: 100, ..Wish::default() });
    rig.now = rig.now.plus_ms(50);
    assert_eq!(rig.retry(&mut flight, Setback::Transport), Retry::Reconnect);
    assert_eq!(rig.router.live(SlotId(0)), 1, "it still counts there");
    assert_eq!(rig.figures("m").retries, [], "not before it worked");
    rig.now = rig.now.plus_ms(100);
    rig.router.handle_head(rig.now, &mut flight);
    rig.router.handle_output(rig.now, &mut flight);
    rig.router.handle_end(rig.now, &mut flight, End::Completed);
    assert_eq!(counts(&rig.figures("m").retries), [("hot_path_reconnect", 1)]);
    let own = rig.router.table.row(SlotId(0)).estimator;
    let mut expected = estimator::Estimator::default();
    expected.note(1000.0);
    assert_eq!(own, expected, "its time runs from the second try");
    // Where that fails as well, another server has its turn, and it was one retry.
    let (mut flight, _) = rig.send(&Wish::default());
    assert_eq!(rig.retry(&mut flight, Setback::Transport), Retry::Reconnect);
    assert_eq!(rig.retry(&mut flight, Setback::Connect), Retry::Route);
    assert_eq!(rig.router.facts(&flight).connect_retries, 1);
    assert_eq!(counts(&rig.figures("m").retries), [("hot_path_reconnect", 1), ("connect_failover", 1)]);
    let Routed::Dispatch(at) = rig.route(&mut flight) else { panic!("another is left") };
    assert_eq!(at.backend.0, 0);
    rig.end(flight);
    rig.quiet();
}

#[test]
fn no_connect_retries_mean_none() {
    let mut rig = Rig::new(TargetRouterOptions { max_connect_retries: 0, ..options() }, None);
    rig.add("a", "m", &[]);
    let (mut flight, _) = rig.send(&Wish::default());
    assert_eq!(rig.retry(&mut flight, Setback::Connect), Retry::Exhausted(Exhausted::ConnectRetries));
    rig.router.count_attempt(&flight, AttemptResult::Proxy(502));
    rig.router.count_finished(&flight, 502);
    rig.end(flight);
    let figures = rig.figures("m");
    assert_eq!(figures.retries, []);
    assert_eq!(counts(&figures.exhausted), [("connect_retries_exhausted", 1)]);
    assert_eq!(figures.servers[0].attempts, [(AttemptResult::Proxy(502), 1)]);
}

#[test]
fn the_body_and_the_budget_can_end_it_too() {
    let mut rig = round_robin(&["a", "b"]);
    for (overflow, exhausted) in [(true, &[][..]), (false, &[("busy", 1)])] {
        let (mut flight, _) = rig.send(&Wish::default());
        let retry = rig.router.handle_retry(rig.now, &mut flight, BUSY, Err(overflow));
        assert_eq!(retry, Retry::Exhausted(Exhausted::Body { overflow }));
        rig.end(flight);
        assert_eq!(counts(&rig.figures("m").exhausted), exhausted, "what is too large is told so");
    }
    let (mut flight, _) = rig.send(&Wish { retry_budget_ms: Some(5), ..Wish::default() });
    rig.now = rig.now.plus_ms(4);
    assert_eq!(rig.retry(&mut flight, BUSY), Retry::Route);
    let Routed::Dispatch(_) = rig.route(&mut flight) else { panic!("another is left") };
    rig.now = rig.now.plus_ms(1);
    assert_eq!(rig.retry(&mut flight, BUSY), Retry::Exhausted(Exhausted::Budget));
    rig.end(flight);
    assert_eq!(counts(&rig.figures("m").exhausted), [("busy", 1), ("retry_budget_exhausted", 1)]);
    rig.quiet();
}
