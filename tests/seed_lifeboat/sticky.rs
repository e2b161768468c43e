//! "Why sticky sessions are worth it for chat."
use super::*;

/// "A conversation resends its whole transcript every turn. If it lands on the backend that served the previous turn, that backend
/// already has the prefix cached and only processes the new part." "On a long agent conversation that is the difference ..., and
/// it costs nothing to enable": one line in the pool, no wiring at the client but its API key.
#[test]
fn a_conversation_stays_where_it_began() {
    let engines = answering(4);
    let router = router_over(&engines, "sticky-session", &[], &[]);
    for number in 0..6u64 {
        let key = format!("Bearer sk-user-{number}");
        let mut transcript = words(number, 500);
        let mut home = None;
        for turn in 0..5 {
            let body = conversation("m", [("user", transcript.as_str())]);
            let response = router.client().ask("POST", CHAT, &[("Authorization", &key)], &body);
            assert_eq!(algorithm(&response), "sticky-session");
            let here = server(&response);
            assert_eq!(*home.get_or_insert(here.clone()), here, "turn {turn} of conversation {number}");
            transcript.push_str(&words(100 * number + turn, 700));
        }
    }
}

/// "Affinity comes from an X-Lifeboat-Session-Id header if the client sends one, and otherwise from a digest of the API key." "The
/// response reports only the digest, never the key." A blank id is none.
#[test]
fn affinity_comes_from_the_session_id_or_else_the_api_key() {
    let engines = answering(8);
    let router = router_over(&engines, "sticky-session", &[], &[]);
    let ask = |headers: &[(&str, &str)]| {
        let response = router.client().ask("POST", CHAT, headers, &chat("m", "x"));
        (server(&response), response.lifeboat("Sticky-Key"), algorithm(&response))
    };
    let key = ("Authorization", "Bearer sk-1");
    let by_key = ask(&[key]);
    assert_eq!((by_key.1.clone(), by_key.2.as_str()), (Some(digest("sk-1")), "sticky-session"));
    assert_eq!(ask(&[("x-api-key", "sk-1")]), by_key, "the same key in the other header");
    assert_eq!(ask(&[("authorization", "bearer sk-1")]), by_key, "names and schemes in any case");
    let by_session = ask(&[key, ("X-Lifeboat-Session-Id", "s-1")]);
    assert_eq!(by_session.1, Some(digest("s-1")), "the session id comes first");
    assert_eq!(ask(&[("x-lifeboat-session-id", "s-1")]), by_session, "alone, too");
    for blank in ["", " ", "\t "] {
        assert_eq!(ask(&[key, ("X-Lifeboat-Session-Id", blank)]), by_key, "{blank:?} is no session id");
    }
    // Neither: no affinity.
    for headers in [&[][..], &[("X-Lifeboat-Session-Id", "")], &[("Authorization", "Basic dXNlcjpwYXNz")]] {
        let (_, sticky_key, algorithm) = ask(headers);
        assert_eq!((sticky_key, algorithm.as_str()), (None, "least-connections"), "{headers:?}");
    }
}

/// The choice is stable: another router, or the same one restarted, chooses alike; adding a server moves only its share.
#[test]
fn adding_a_backend_moves_only_its_share() {
    let engines = answering(5);
    let homes = |count: usize| -> Vec<String> {
        let router = router_over(&engines[..count], "sticky-session", &[], &[]);
        let mut client = router.client();
        (0..100)
            .map(|number| {
                let id = format!("s-{number}");
                server(&client.ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &chat("m", "x")))
            })
            .collect()
    };
    let four = homes(4);
    assert_eq!(homes(4), four, "a restart moves nobody");
    let five = homes(5);
    let moved: Vec<_> = four.iter().zip(&five).filter(|(before, after)| before != after).collect();
    assert!(moved.iter().all(|(_, after)| *after == "e"), "whoever moves, moves to the new one: {moved:?}");
    assert!((8..=35).contains(&moved.len()), "its share is a fifth: {}", moved.len());
}

/// The same for weights: shares follow them, and weight 0 moves nobody for good.
#[test]
fn draining_a_backend_moves_nobody_for_good() {
    let engines = answering(3);
    let router = router_over(&engines, "sticky-session", &[], &[]);
    let homes = |expected: &str| -> Vec<String> {
        let mut client = router.client();
        (0..60)
            .map(|number| {
                let id = format!("s-{number}");
                let response = client.ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &chat("m", "x"));
                assert_eq!(response.lifeboat("Sticky-Key"), Some(digest(&id)));
                if server(&response) != expected {
                    assert!(["sticky-session", "least-connections"].contains(&algorithm(&response).as_str()));
                }
                server(&response)
            })
            .collect()
    };
    let before = homes("");
    router.set_weight("b", "0");
    let during = homes("");
    for (before, during) in before.iter().zip(&during) {
        assert_ne!(during, "b");
        assert!(before == "b" || before == during, "only b's clients go elsewhere");
    }
    router.set_weight("b", "1");
    assert_eq!(homes(""), before, "and they come back");
}

/// "If the chosen backend is unhealthy, at capacity or draining, the request falls through to least-connections rather than failing.
/// Affinity is an optimization, not a constraint."
#[test]
fn a_chosen_backend_that_cannot_take_it_is_passed_over() {
    let gate = Gate::new();
    let engines: Vec<Engine> = (0..3).map(|_| holding_some(&gate)).collect();
    let router = router_over(&engines, "sticky-session", &[], &["max_concurrency = 1"]);
    let headers = [("X-Lifeboat-Session-Id", "someone")];
    let ask = || router.client().ask("POST", CHAT, &headers, &chat("m", "x"));
    let chosen = ask();
    let home = server(&chosen);
    assert_eq!(algorithm(&chosen), "sticky-session");
    let passed_over = |why: &str| {
        let response = ask();
        assert_ne!(server(&response), home, "{why}");
        assert_eq!(algorithm(&response), "least-connections", "{why}");
        assert_eq!(response.lifeboat("Sticky-Key"), Some(digest("someone")), "{why}");
    };
    let back_home = || {
        let response = ask();
        assert_eq!((server(&response), algorithm(&response)), (home.clone(), "sticky-session".into()));
    };
    // At capacity.
    let mut holder = router.client();
    holder.send(&request("POST", CHAT, &headers, &chat("m", "hold")));
    router.wait_metric("ringway_in_flight", &[("server", &home)], 1.0, seconds(5));
    passed_over("at capacity");
    gate.release(1);
    assert_eq!(server(&holder.response()), home);
    router.wait_idle(seconds(5));
    back_home();
    // Unhealthy.
    let engine = &engines[usize::from(home.as_bytes()[0] - b'a')];
    engine.set_health(Probe::Reply(503, String::new()));
    router.wait_not_up(&home);
    passed_over("unhealthy");
    engine.set_health(Probe::ok());
    router.wait_up(&[&home]);
    back_home();
    // Draining.
    router.set_weight(&home, "0");
    passed_over("draining");
    router.set_weight(&home, "1");
    back_home();
}
