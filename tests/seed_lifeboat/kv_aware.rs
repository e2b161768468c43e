//! "KV-aware routing."
use super::*;

/// "Many different clients sending the same long prefix. They share no session, so a session hash spreads them across the
/// pool and every backend ends up processing the same opening tokens. KV-aware routing decides from the prompt itself."
#[test]
fn clients_that_share_a_prefix_but_no_session_meet_on_one_backend() {
    let shared = words(7, 8000);
    let used = |name: &str| {
        let engines = answering(4);
        let router = router_over(&engines, name, &[], &[]);
        let servers: BTreeSet<String> = (0..16)
            .map(|number| {
                let session = format!("client-{number}");
                let key = format!("Bearer sk-{number}");
                let headers = [("X-Lifeboat-Session-Id", session.as_str()), ("Authorization", key.as_str())];
                let body = question(&shared, &words(1000 + number, 300));
                server(&router.client().ask("POST", CHAT, &headers, &body))
            })
            .collect();
        servers.len()
    };
    assert!(used("sticky-session") >= 3, "a session hash spreads them");
    assert_eq!(used("kv-aware"), 1, "the prompt brings them together");
}

/// "The control plane remembers which backend was recently sent which prefix and prefers that one." In every API, and
/// however the JSON around the text is written.
#[test]
fn the_prefix_is_found_in_every_api() {
    let text = words(3, 5000);
    let cases: Vec<(&str, &str, [String; 2])> = vec![
        (
            "chat",
            CHAT,
            [
                format!(r#"{{"model":"m","messages":[{{"role":"system","content":"{text}"}},{{"role":"user","content":"one"}}]}}"#),
                format!(r#"{{ "messages" : [ {{"content":[{{"type":"text","text":"{text}"}}],"role":"system"}}, {{"role":"user","content":"two"}} ], "stream":false, "model":"m" }}"#),
            ],
        ),
        (
            "completions",
            "/v1/completions",
            [format!(r#"{{"model":"m","prompt":"{text} one"}}"#), format!(r#"{{"prompt":["{text} two"],"model":"m"}}"#)],
        ),
        (
            "token ids",
            "/v1/completions",
            [1, 2].map(|last| {
                let ids: Vec<String> = (0..2000).map(|id| (id * 7 % 32_000).to_string()).collect();
                format!(r#"{{"model":"m","prompt":[{},{last}]}}"#, ids.join(","))
            }),
        ),
        (
            "responses",
            "/v1/responses",
            ["one", "two"].map(|tail| format!(r#"{{"model":"m","instructions":"{text}","input":"{tail}"}}"#)),
        ),
        (
            "messages",
            "/v1/messages",
            ["one", "two"].map(|tail| {
                format!(r#"{{"model":"m","max_tokens":9,"messages":[{{"role":"user","content":"{tail}"}}],"system":"{text}"}}"#)
            }),
        ),
        (
            "tools",
            CHAT,
            ["one", "two"].map(|tail| {
                format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{tail}"}}],"tools":[{{"type":"function","function":{{"name":"f","description":"{text}"}}}}]}}"#)
            }),
        ),
    ];
    let engines = answering(3);
    for (what, path, [first, second]) in cases {
        let router = router_over(&engines, "kv-aware", &[], &[]);
        let mut client = router.client();
        let response = client.post(path, first.as_bytes());
        let (home, blocks) = (server(&response), prefix_blocks(&response));
        assert_eq!(blocks.0, 0, "{what}: nothing is known yet");
        assert!(blocks.1 >= 18, "{what}: {blocks:?}");
        for _ in 0..3 {
            let response = client.post(path, second.as_bytes());
            assert_eq!(
                (server(&response), algorithm(&response)),
                (home.clone(), "kv-aware".into()),
                "{what}"
            );
            assert!(prefix_blocks(&response).0 >= 18, "{what}: {:?}", prefix_blocks(&response));
        }
    }
}

/// "Affinity is applied only among backends that are already among the least busy, so a backend holding a popular prefix is
/// never allowed to become a hot spot."
#[test]
fn a_popular_prefix_makes_no_hot_spot() {
    hot_spot(&[], 12.0, 1.0);
    hot_spot(&["kv = { affinity_slack_abs = 2, affinity_slack_rel = 0.25 }"], 2.0, 0.25);
}

fn hot_spot(pool: &[&str], slack_abs: f64, slack_rel: f64) {
    let gate = Gate::new();
    let engines: Vec<Engine> = (0..4).map(|_| holding(&gate)).collect();
    let router = router_over(&engines, "kv-aware", pool, &["max_concurrency = 0"]);
    let shared = words(11, 8000);
    let mut clients = Vec::new();
    for number in 0..40u64 {
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[], &question(&shared, &number.to_string())));
        clients.push(client);
        eventually(seconds(5), "it is placed", || {
            let active: Vec<usize> = engines.iter().map(Engine::active).collect();
            match active.iter().sum::<usize>() as u64 == number + 1 {
                true => Ok(()),
                false => Err(format!("{active:?}")),
            }
        });
        let active = engines.iter().map(Engine::active);
        let (min, max) = (active.clone().min().expect("four"), active.max().expect("four"));
        // The window's slack, and one comes on top.
        assert!(max as f64 <= min as f64 + slack_abs.max(slack_rel * min as f64) + 1.0, "{min} to {max}");
    }
    let most = engines.iter().map(Engine::active).max();
    assert!(most <= Some(15), "ten each is fair, {most:?} too many");
    gate.open();
    for client in &mut clients {
        server(&client.response());
    }
}

/// "When no backend holds a useful match, the request is spread exactly as weighted round-robin would spread it, so the worst
/// case is the default algorithm."
#[test]
fn without_a_match_the_spread_is_exactly_weighted_round_robin() {
    let engines = answering(3);
    let router = Setup::new()
        .pool("p", &[&pool_of("kv-aware")])
        .server("a", &engines[0], &["weight = 5"])
        .server("b", &engines[1], &[])
        .server("c", &engines[2], &[])
        .start();
    let mut client = router.client();
    let mut names = String::new();
    for number in 0..21 {
        let response = client.post(CHAT, &prompt(number, 4000));
        assert_eq!(algorithm(&response), "weighted-round-robin");
        assert_eq!(prefix_blocks(&response).0, 0);
        names.push_str(&server(&response));
        // Hits between the misses do not turn the wheel, and one block in common is not a useful match.
        if number % 4 == 3 {
            let response = client.post(CHAT, &prompt(number, 4000));
            assert_eq!(algorithm(&response), "kv-aware");
        }
    }
    assert_eq!(names, "aabacaa".repeat(3));
}

/// The same where prompts cannot be read, or are shorter than two blocks.
#[test]
fn short_and_unreadable_prompts_are_spread_as_by_default() {
    let engines = answering(3);
    let router = Setup::new()
        .pool("p", &[&pool_of("kv-aware")])
        .server("a", &engines[0], &["weight = 5"])
        .server("b", &engines[1], &[])
        .server("c", &engines[2], &[])
        .start();
    let mut client = router.client();
    let bodies: [&[u8]; 7] = [
        &chat("m", "hello"),
        b"",
        b"no JSON at all",
        br#"{"model":"m","messages":[{"role":"user","content":"#,
        br#"{"model":"m","messages":"odd"}"#,
        br#"{"model":"m"}"#,
        &chat("m", "hello"),
    ];
    let names: String = bodies
        .iter()
        .map(|body| {
            let response = client.post(CHAT, body);
            assert_eq!(algorithm(&response), "weighted-round-robin", "{}", String::from_utf8_lossy(body));
            server(&response)
        })
        .collect();
    assert_eq!(names, "aabacaa");
}

/// The pool may say `miss = "least-busy"` instead: what nobody holds goes where the least prompt work waits, and the answer says so.
#[test]
fn without_a_match_the_least_busy_may_be_asked_for_instead() {
    const LEAST_BUSY: &str = "kv = { miss = \"least-busy\" }";
    let gate = Gate::new();
    let engines: Vec<Engine> = (0..3)
        .map(|_| {
            let gate = std::sync::Arc::clone(&gate);
            Engine::start(move |exchange| {
                if exchange.body_has("a very long question")? {
                    gate.pass(seconds(30));
                }
                exchange.reply_ok()
            })
        })
        .collect();
    let router = router_over(&engines, "kv-aware", &[LEAST_BUSY], &["max_concurrency = 0"]);
    let mut client = router.client();
    // Nothing runs: in turn, prompts that cannot be read included.
    let idle: Vec<String> = (0..12)
        .map(|number| {
            let unreadable = number % 4 == 3;
            let body = if unreadable { b"no JSON at all".to_vec() } else { prompt(number, 3000) };
            let response = client.post(CHAT, &body);
            assert_eq!(algorithm(&response), "least-busy");
            server(&response)
        })
        .collect();
    let taken = |name: &str| idle.iter().filter(|server| *server == name).count();
    assert_eq!(["a", "b", "c"].map(taken), [4, 4, 4], "{idle:?}");
    // About fifty thousand tokens are to be computed at one of them.
    let long = question(&words(100, 200_000), "a very long question");
    let mut waiting = router.client();
    waiting.send(&request("POST", CHAT, &[], &long));
    eventually(seconds(5), "it is placed", || {
        engines.iter().any(|engine| engine.active() == 1).then_some(()).ok_or_else(|| "nobody has it".into())
    });
    let busy = engines.iter().position(|engine| engine.active() == 1).expect("somebody has it");
    let before = counts(&engines);
    // By turns, a third of these would wait behind it.
    for number in 200..220 {
        let response = client.post(CHAT, &prompt(number, 3000));
        assert_eq!((algorithm(&response), prefix_blocks(&response).0), ("least-busy".into(), 0));
    }
    let after = counts(&engines);
    let got: Vec<usize> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
    assert_eq!(got[busy], 0, "{got:?}");
    assert!(got.iter().all(|got| *got == 0 || (9..=11).contains(got)), "the others share them: {got:?}");
    // A match is followed as ever, to the busy one too.
    let response = client.post(CHAT, &prompt(219, 3000));
    assert_eq!(algorithm(&response), "kv-aware");
    gate.open();
    let first = waiting.response();
    assert_eq!((algorithm(&first), prefix_blocks(&first).0), ("least-busy".into(), 0));
    assert_eq!(server(&first), ["a", "b", "c"][busy]);
    let again = client.post(CHAT, &long);
    assert_eq!((server(&again), algorithm(&again)), (server(&first), "kv-aware".into()));
}

/// Distinct new prompts, one at a time, are spread evenly: an idle pool has no favourite.
#[test]
fn distinct_new_prompts_one_at_a_time_spread_evenly() {
    for (shards, miss) in
        [(1, "weighted-round-robin"), (2, "weighted-round-robin"), (1, "least-busy"), (2, "least-busy")]
    {
        let engines = answering(4);
        let kv = format!("kv = {{ miss = \"{miss}\" }}");
        let mut setup = Setup::new().shards(shards).pool("p", &[&pool_of("kv-aware"), &kv]);
        for (engine, name) in engines.iter().zip('a'..) {
            setup = setup.server(&name.to_string(), engine, &[]);
        }
        let router = setup.start();
        for number in 0..80 {
            server(&router.client().post(CHAT, &prompt(number, 3000)));
        }
        let counts = counts(&engines);
        assert!(counts.iter().all(|count| (18..=22).contains(count)), "{shards} shards, {miss}: {counts:?}");
    }
}

/// "A stale guess costs nothing beyond the ordinary processing that would have happened anyway": the backend that is remembered
/// was restarted, and holds nothing. Every request is answered, and what is remembered starts anew.
#[test]
fn a_stale_guess_costs_nothing() {
    let mut engines = answering(2);
    let router = router_over(&engines, "kv-aware", &[], &[]);
    let mut client = router.client();
    let home = server(&client.post(CHAT, &prompt(1, 6000)));
    let index = usize::from(home == "b");
    engines[index].stop();
    let other = server(&client.post(CHAT, &prompt(1, 6000)));
    assert_ne!(other, home, "the refused connect is tried elsewhere");
    router.wait_not_up(&home);
    engines[index].listen();
    router.wait_up(&["a", "b"]);
    // Known to the other now. The first, back with an empty cache, is remembered to hold nothing.
    for _ in 0..4 {
        let response = client.post(CHAT, &prompt(1, 6000));
        assert_eq!((server(&response), algorithm(&response)), (other.clone(), "kv-aware".into()));
    }
}

/// "What Lifeboat remembers about each backend is bounded": the least recently used prefix is forgotten.
#[test]
fn what_is_remembered_is_bounded() {
    let engines = answering(1);
    let router = router_over(&engines, "kv-aware", &["kv = { kv_capacity_blocks = 64 }"], &[]);
    let mut client = router.client();
    let mut ask = |number| prefix_blocks(&client.post(CHAT, &prompt(number, 6000)));
    let (_, each) = ask(0);
    assert_eq!(ask(1), (0, each));
    assert_eq!(ask(0), (each, each), "two fit");
    assert_eq!(ask(1), (each, each));
    assert_eq!(ask(2), (0, each));
    // Three are 69 blocks or more. The first lost its tail or all of it, and its head is never behind its tail.
    let (matched, total) = ask(0);
    assert!(matched < total, "{matched}/{total}");
    assert_eq!(ask(0), (each, each), "it is remembered anew");
}
