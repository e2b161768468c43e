//! Requests that wait: for how long, and what lets them go on.

use super::*;

/// Two clusters of one place each, the first of which is every key's own for 300 ms; afterwards all are open.
fn affine(servers: &[&str]) -> Rig {
    let file = r#"{"default":"wait-and-widen","models":{"m":{"algorithm":"wait-and-widen",
        "cache_affinity_backend_selection_count":1,"cache_affinity_wait_ms":300}}}"#;
    let mut rig = Rig::with(Some(file), servers);
    for slot in 0..servers.len() as u32 {
        rig.change(SlotId(slot), |slot| slot.max_concurrency = 1);
    }
    rig
}

const KEYED: Wish<'static> = Wish {
    arrived: Nanos::ZERO,
    routing_key: b"",
    model: b"m",
    embeddings: false,
    method: None,
    input_tokens: 0,
    priority: 0,
    max_wait_ms: None,
    slo_ms: None,
    affinity_key: b"key",
    retry_budget_ms: None,
};

fn woken(rig: &mut Rig) -> Vec<(Ticket, Result<u16, Refusal>)> {
    let mut all = Vec::new();
    while let Some(woken) = rig.router.poll_woken() {
        all.push((woken.ticket, woken.routed.map(|dispatched| dispatched.backend.0)));
    }
    all
}

#[test]
fn the_group_is_waited_for_and_then_the_rest_opens_to_the_nanosecond() {
    let mut rig = affine(&["a", "b"]);
    let (first, own) = rig.send(&KEYED);
    assert_eq!(own.rank_depth, 1);
    let (second, ticket) = rig.waits(&KEYED);
    let opens = rig.now.plus_ms(300);
    assert_eq!(rig.router.poll_timeout(), opens);
    rig.now = Nanos(opens.0 - 1);
    rig.router.handle_timeout(rig.now);
    assert_eq!(woken(&mut rig), []);
    rig.now = opens;
    rig.router.handle_timeout(rig.now);
    assert_eq!(woken(&mut rig), [(ticket, Ok(1 - own.backend.0))]);
    let facts = rig.router.facts(&second);
    assert_eq!((facts.rank_depth, facts.routing_retry_attempts, facts.num_candidates), (2, 1, 2));
    let algorithms = &rig.figures("m").algorithms;
    assert_eq!((algorithms[0].primary, algorithms[0].fallback), (1, 1));
    // It waited 300 ms from the start of routing to its first choice.
    assert_eq!(rig.figures("m").routing_duration_ns.sum, 300_000_000);
    assert_eq!(rig.router.poll_timeout(), Nanos::NEVER);
    rig.end(first);
    rig.end(second);
    rig.quiet();
}

#[test]
fn a_place_that_becomes_free_is_taken_at_once_by_the_longest_waiting() {
    let mut rig = affine(&["a", "b"]);
    let (first, own) = rig.send(&KEYED);
    let mut queue = Vec::new();
    for _ in 0..3 {
        queue.push(rig.waits(&KEYED));
        rig.now = rig.now.plus_ms(1);
    }
    // Somebody else's cluster does not concern them.
    let (other, _) = rig.send(&Wish { affinity_key: b"", ..KEYED });
    rig.end(other);
    assert_eq!(woken(&mut rig), []);
    rig.end(first);
    assert_eq!(woken(&mut rig), [(queue[0].1, Ok(own.backend.0))]);
    // The client of the next one goes away, and the last one has its turn.
    let (gone, ticket) = queue.remove(1);
    rig.router.give_up(rig.now, ticket);
    rig.end(gone);
    let (sent, _) = queue.remove(0);
    rig.end(sent);
    assert_eq!(woken(&mut rig), [(queue[0].1, Ok(own.backend.0))]);
    assert_eq!(rig.figures("m").waiting, 0);
    rig.end(queue.remove(0).0);
    rig.quiet();
}

#[test]
fn an_answer_that_nobody_fetches_is_taken_back() {
    let mut rig = affine(&["a"]);
    for give_up in [false, true] {
        let (first, _) = rig.send(&KEYED);
        let (second, ticket) = rig.waits(&KEYED);
        let (third, last) = rig.waits(&KEYED);
        rig.end(first);
        assert_eq!(rig.router.live(SlotId(0)), 1, "the second has its place");
        if give_up {
            rig.router.give_up(rig.now, ticket);
            assert_eq!(rig.router.live(SlotId(0)), 1, "the third has it");
        }
        rig.end(second);
        assert_eq!(woken(&mut rig), [(last, Ok(0))]);
        rig.router.give_up(rig.now, last);
        assert_eq!(rig.router.live(SlotId(0)), 1, "what was fetched is its caller's to end");
        rig.end(third);
        rig.quiet();
    }
}

#[test]
fn a_short_wait_ends_before_the_rest_opens_and_none_is_none() {
    let mut rig = affine(&["a", "b"]);
    let (first, _) = rig.send(&KEYED);
    assert_eq!(rig.refused(&Wish { max_wait_ms: Some(0), ..KEYED }), Refusal::Unavailable);
    let (second, ticket) = rig.waits(&Wish { max_wait_ms: Some(100), ..KEYED });
    rig.now = rig.now.plus_ms(100);
    assert_eq!(rig.router.poll_timeout(), rig.now);
    rig.router.handle_timeout(rig.now);
    assert_eq!(woken(&mut rig), [(ticket, Err(Refusal::Unavailable))]);
    rig.end(second);
    rig.end(first);
    rig.quiet();
}

#[test]
fn without_a_wish_to_wait_only_what_time_opens_is_waited_for() {
    let mut rig = Rig::with(Some(r#"{"default":"wait-and-widen"}"#), &["a"]);
    rig.change(SlotId(0), |slot| slot.max_concurrency = 1);
    let (first, _) = rig.send(&Wish::default());
    assert_eq!(rig.refused(&Wish::default()), Refusal::Unavailable);
    let patient = Wish { max_wait_ms: Some(u64::MAX), ..Wish::default() };
    let (second, ticket) = rig.waits(&patient);
    assert_eq!(rig.router.poll_timeout(), rig.now.plus_ms(60_000), "a minute at most");
    rig.end(first);
    assert_eq!(woken(&mut rig), [(ticket, Ok(0))]);
    let (third, ticket) = rig.waits(&patient);
    rig.now = rig.now.plus_ms(60_000);
    rig.router.handle_timeout(rig.now);
    assert_eq!(woken(&mut rig), [(ticket, Err(Refusal::Unavailable))]);
    rig.end(second);
    rig.end(third);
    rig.quiet();
}

#[test]
fn buckets_open_when_the_rules_say() {
    // Round trips of 5 and 200 ms: the far one opens (200 - 5) × 0.25 ms after arrival.
    let mut rig = Rig::with(Some(r#"{"default":"wait-and-widen"}"#), &["near", "far"]);
    rig.rtt(0, 5);
    rig.rtt(1, 200);
    rig.change(SlotId(0), |slot| slot.max_concurrency = 1);
    let (first, at) = rig.send(&Wish::default());
    assert_eq!(at.backend.0, 0);
    let (second, ticket) = rig.waits(&Wish::default());
    let opens = Nanos(rig.now.0 + 48_750_000);
    assert_eq!(rig.router.poll_timeout(), opens);
    // The near one recedes: the same bucket for both. Nothing eased, so it is seen a little later.
    let arrived = rig.now;
    rig.now = rig.now.plus_ms(1);
    rig.rtt(0, 190);
    assert_eq!(woken(&mut rig), []);
    assert_eq!(rig.router.poll_timeout(), arrived.plus_ms(26));
    rig.now = arrived.plus_ms(26);
    rig.router.handle_timeout(rig.now);
    assert_eq!(woken(&mut rig), [(ticket, Ok(1))]);
    rig.end(first);
    rig.end(second);
    rig.quiet();
}

#[test]
fn bounds_that_grow_with_the_objective_let_a_request_in_by_time_alone() {
    let file = r#"{"default":"wait-and-widen","models":{"m":{"algorithm":"wait-and-widen",
        "max_queue_time_floor_ms":100,"max_queue_time_ceil_ms":300}}}"#;
    let mut rig = Rig::with(Some(file), &["a"]);
    rig.report(0, Reported { queue_times: times(&[(0, 200)]), ..tps(1000.0) });
    let wish = Wish { slo_ms: Some(1000), max_wait_ms: Some(2000), ..Wish::default() };
    let (flight, ticket) = rig.waits(&wish);
    let due = rig.router.poll_timeout();
    let after_ms = (due.0 - rig.now.0) as f64 / 1e6;
    assert!((after_ms - 500.0).abs() < 0.001, "{after_ms}");
    rig.now = due;
    rig.router.handle_timeout(rig.now);
    assert_eq!(woken(&mut rig), [(ticket, Ok(0))]);
    rig.end(flight);
    rig.quiet();
}

#[test]
fn servers_that_come_or_go_are_news_for_all_who_wait() {
    let mut rig = affine(&["a"]);
    let (first, _) = rig.send(&KEYED);
    let mut queue: Vec<_> = (0..3).map(|_| rig.waits(&KEYED)).collect();
    // New clusters, one of which may be the key's own now, with room for all.
    let slot = rig.add("z", "m", &[]);
    let before = woken(&mut rig);
    rig.change(slot, |slot| slot.max_concurrency = 0);
    assert!(before.len() <= 3);
    rig.now = rig.now.plus_ms(300);
    rig.router.handle_timeout(rig.now);
    let all: Vec<_> = before.into_iter().chain(woken(&mut rig)).collect();
    let expected: Vec<_> = queue.iter().map(|(_, ticket)| (*ticket, Ok(1))).collect();
    assert_eq!(all, expected);
    for (flight, _) in queue.drain(..) {
        rig.end(flight);
    }
    // Nobody is left to wait for: refused, in order.
    let mut queue: Vec<_> = Vec::new();
    rig.change(slot, |slot| slot.advertised = false);
    for _ in 0..2 {
        queue.push(rig.waits(&KEYED));
    }
    rig.router.handle_health(rig.now, BackendId(0), false);
    let expected: Vec<_> = queue.iter().map(|(_, ticket)| (*ticket, Err(Refusal::Unavailable))).collect();
    assert_eq!(woken(&mut rig), expected);
    for (flight, _) in queue {
        rig.end(flight);
    }
    rig.end(first);
    rig.quiet();
}

#[test]
fn admission_is_looked_at_again_while_a_request_waits() {
    let file = r#"{"default":"wait-and-widen","models":{"m":{"algorithm":"wait-and-widen","max_input_work_seconds":5}}}"#;
    let mut rig = Rig::with(Some(file), &["a"]);
    rig.change(SlotId(0), |slot| slot.max_concurrency = 1);
    let (first, _) = rig.send(&Wish::default());
    let (second, ticket) = rig.waits(&Wish { max_wait_ms: Some(10_000), ..Wish::default() });
    rig.report(0, Reported { queued_input_size: Some(6000), ..tps(1000.0) });
    rig.now = rig.now.plus_ms(RECHECK_MS);
    rig.router.handle_timeout(rig.now);
    assert_eq!(woken(&mut rig), [(ticket, Err(Refusal::InputWork { capacity: false }))]);
    rig.end(first);
    rig.end(second);
    rig.quiet();
}

#[test]
fn a_retry_may_wait_as_well() {
    let mut rig = affine(&["a", "b"]);
    let (other, at) = rig.send(&Wish { affinity_key: b"", ..KEYED });
    let (second, second_at) = rig.send(&Wish { affinity_key: b"", ..KEYED });
    assert_ne!(at.backend, second_at.backend);
    rig.end(other);
    let (mut flight, _) = rig.send(&Wish { affinity_key: b"", max_wait_ms: Some(1000), ..KEYED });
    let busy = Setback::Retryable { status: 503, reason: b"" };
    assert_eq!(rig.retry(&mut flight, busy), Retry::Route);
    let Routed::Wait(ticket) = rig.route(&mut flight) else { panic!("the other one is full") };
    assert_eq!(rig.figures("m").waiting, 1);
    rig.end(second);
    assert_eq!(woken(&mut rig), [(ticket, Ok(second_at.backend.0))]);
    assert_eq!(rig.figures("m").routing_duration_ns.count(), 3, "once per request");
    rig.end(flight);
    rig.quiet();
}
