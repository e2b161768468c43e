//! The load-balancing rules, sentence by sentence: each test quotes what it holds the router to. What a sentence here leaves to
//! other files: smoothness, ceilings and queues are in `capacity.rs`, benching in `retry.rs`, mixed clusters in `surface.rs`
//! (`candidates_of_several_pools_are_mixed`), the measured experiment in `experiment.rs`, every header in `headers.rs`.
//! "Cluster" and "backend" of the rules are "pool" and "server" here.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use support::prompts::*;
use support::*;

const ALGORITHMS: [&str; 4] = ["weighted-round-robin", "least-connections", "sticky-session", "kv-aware"];

fn pool_of(algorithm: &str) -> String {
    format!("algorithm = \"{algorithm}\"")
}

/// A router over `engines`, named a, b, c, …, in a pool `p` of `algorithm`.
fn router_over(engines: &[Engine], algorithm: &str, pool: &[&str], server_lines: &[&str]) -> Router {
    let line = pool_of(algorithm);
    let lines: Vec<&str> = [line.as_str()].into_iter().chain(pool.iter().copied()).collect();
    let mut setup = Setup::new().pool("p", &lines);
    for (engine, name) in engines.iter().zip('a'..) {
        setup = setup.server(&name.to_string(), engine, server_lines);
    }
    setup.start()
}

fn answering(count: usize) -> Vec<Engine> {
    (0..count).map(|_| Engine::answering()).collect()
}

fn counts(engines: &[Engine]) -> Vec<usize> {
    engines.iter().map(Engine::request_count).collect()
}

mod choosing {
    //! "The four algorithms."
    use super::*;

    /// "The algorithm is set per cluster and decides which backend takes each request."
    #[test]
    fn the_algorithm_is_set_per_cluster() {
        let mut setup = Setup::new();
        let engines: Vec<Engine> = ALGORITHMS
            .iter()
            .map(|name| EngineSetup::new().models(Probe::models(&[name])).start(|e| e.reply_ok()))
            .collect();
        for (engine, name) in engines.iter().zip(ALGORITHMS) {
            setup = setup.pool(&format!("{name}-pool"), &[&pool_of(name)]).server(name, engine, &[]);
        }
        let router = setup.start();
        let mut client = router.client();
        for name in ALGORITHMS {
            let body = conversation(name, [("user", words(1, 4000).as_str())]);
            // The second time kv-aware has something to go by.
            for round in 0..2 {
                let response = client.ask("POST", CHAT, &[("X-Lifeboat-Session-Id", "s")], &body);
                assert_eq!(server(&response), name);
                assert_eq!(response.lifeboat("Pool").as_deref(), Some(format!("{name}-pool").as_str()));
                let expected = if name == "kv-aware" && round == 0 { "weighted-round-robin" } else { name };
                assert_eq!(algorithm(&response), expected);
            }
        }
    }

    /// "It is independent of the routing mode, which decides how much each backend will take."
    #[test]
    fn the_algorithm_is_independent_of_the_routing_mode() {
        for name in ALGORITHMS {
            for mode in ["reject", "queue", "unlimited"] {
                let gate = Gate::new();
                let engines: Vec<Engine> = (0..2).map(|_| holding(&gate)).collect();
                let mode_line = format!("routing_mode = \"{mode}\"");
                let router = router_over(&engines, name, &[&mode_line], &["max_concurrency = 1"]);
                let ask = || {
                    let mut client = router.client();
                    let headers = [("X-Lifeboat-Session-Id", "s")];
                    client.send(&request("POST", CHAT, &headers, &prompt(1, 4000)));
                    client
                };
                let mut held: Vec<Client> = Vec::new();
                for count in 1..=2 {
                    held.push(ask());
                    eventually(seconds(5), "the request is placed", || {
                        let got = engines.iter().map(Engine::request_count).sum::<usize>();
                        if got == count { Ok(()) } else { Err(format!("{name}, {mode}: {got} of {count}")) }
                    });
                }
                if mode != "unlimited" {
                    assert_eq!(counts(&engines), [1, 1], "{name}, {mode}: a full server is passed over");
                }
                let mut third = ask();
                match mode {
                    "reject" => {
                        let response = third.response();
                        response.assert_rejected(503, "at_capacity").assert_retry_after();
                        gate.open();
                    }
                    "queue" => {
                        router.wait_metric("ringway_queue_depth", &[("pool", "p")], 1.0, seconds(5));
                        gate.open();
                        let response = third.response();
                        server(&response);
                        assert_ne!(response.lifeboat("Wait-ms").as_deref(), Some("0"), "{name}");
                    }
                    _ => {
                        eventually(seconds(5), "the third goes straight through", || {
                            let got = engines.iter().map(Engine::request_count).sum::<usize>();
                            if got == 3 { Ok(()) } else { Err(format!("{name}: {got}")) }
                        });
                        gate.open();
                        assert_eq!(third.response().lifeboat("Wait-ms").as_deref(), Some("0"), "{name}");
                    }
                }
                for client in &mut held {
                    server(&client.response());
                }
            }
        }
    }

    /// "Weighted round-robin (default): in proportion to weight, smoothly." With nothing said about an algorithm.
    #[test]
    fn weighted_round_robin_is_the_default_and_smooth() {
        let engines = answering(3);
        let router = Setup::new()
            .server("a", &engines[0], &["weight = 5"])
            .server("b", &engines[1], &[])
            .server("c", &engines[2], &[])
            .start();
        let mut client = router.client();
        let names: String = (0..14)
            .map(|number| {
                let response = client.post(CHAT, &prompt(number, 2000));
                assert_eq!(algorithm(&response), "weighted-round-robin");
                for name in ["Sticky-Key", "Prefix-Blocks"] {
                    assert_eq!(response.lifeboat(name), None, "of another algorithm");
                }
                server(&response)
            })
            .collect();
        assert_eq!(names, "aabacaaaabacaa");
    }

    /// "Least connections: the least busy backend, relative to weight" and "absorbs long-context outliers naturally": who
    /// works on a long one gets no more until the others have as much to do for their weight.
    #[test]
    fn least_connections_absorbs_long_context_outliers() {
        let gate = Gate::new();
        let engines: Vec<Engine> = (0..2).map(|_| holding_some(&gate)).collect();
        let router = Setup::new()
            .pool("p", &[&pool_of("least-connections")])
            .server("a", &engines[0], &["weight = 3"])
            .server("b", &engines[1], &["weight = 1"])
            .start();
        let mut outliers = Vec::new();
        let mut client = router.client();
        // After each long one: what is in flight on each, and who is the less busy for its weight.
        for (number, a, b, next) in [(1, 1, 0, "b"), (2, 1, 1, "a"), (3, 2, 1, "a")] {
            let mut outlier = router.client();
            outlier.send(&request("POST", CHAT, &[], &chat("m", "hold this")));
            outliers.push(outlier);
            eventually(seconds(5), "it is placed", || {
                let got = engines.iter().map(Engine::active).sum::<usize>();
                if got == number { Ok(()) } else { Err(format!("{got} of {number}")) }
            });
            assert_eq!((engines[0].active(), engines[1].active()), (a, b));
            for _ in 0..5 {
                let response = client.post(CHAT, &chat("m", "short"));
                assert_eq!(
                    (server(&response).as_str(), algorithm(&response).as_str()),
                    (next, "least-connections")
                );
            }
        }
        gate.open();
        for client in &mut outliers {
            server(&client.response());
        }
    }

    /// "Sticky session: the same backend for the same client."
    #[test]
    fn sticky_session_keeps_a_client_on_its_backend() {
        let engines = answering(4);
        let router = router_over(&engines, "sticky-session", &[], &[]);
        let mut homes = BTreeMap::new();
        for round in 0..4 {
            for session in 0..40 {
                let id = format!("session-{session}");
                // Nothing depends on the connection.
                let response =
                    router.client().ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &prompt(round, 500));
                assert_eq!(algorithm(&response), "sticky-session");
                assert_eq!(response.lifeboat("Sticky-Key"), Some(digest(&id)));
                let home = homes.entry(session).or_insert_with(|| server(&response));
                assert_eq!(*home, server(&response), "session {session}");
            }
        }
        assert_eq!(counts(&engines).iter().sum::<usize>(), 160);
        assert!(counts(&engines).iter().all(|count| (16..=72).contains(count)), "{:?}", counts(&engines));
    }

    /// "KV-aware: the backend that already holds this prompt's prefix."
    #[test]
    fn kv_aware_finds_the_backend_that_holds_the_prefix() {
        let engines = answering(3);
        let router = router_over(&engines, "kv-aware", &[], &[]);
        let mut client = router.client();
        let mut homes = Vec::new();
        for number in 0..6 {
            homes.push(server(&client.post(CHAT, &prompt(number, 6000))));
        }
        for round in 0..3 {
            for number in (0..6).rev() {
                let response = client.post(CHAT, &prompt(number, 6000));
                assert_eq!(server(&response), homes[number as usize], "round {round}");
                assert_eq!(algorithm(&response), "kv-aware");
                let (matched, total) = prefix_blocks(&response);
                assert_eq!(matched, total);
                assert!((22..=24).contains(&total), "6,000 bytes in blocks of 256: {total}");
            }
        }
    }
}

mod kv_aware {
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
                    let headers =
                        [("X-Lifeboat-Session-Id", session.as_str()), ("Authorization", key.as_str())];
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

    /// Distinct new prompts, one at a time, are spread evenly: an idle pool has no favourite.
    #[test]
    fn distinct_new_prompts_one_at_a_time_spread_evenly() {
        for shards in [1, 2] {
            let engines = answering(4);
            let mut setup = Setup::new().shards(shards).pool("p", &[&pool_of("kv-aware")]);
            for (engine, name) in engines.iter().zip('a'..) {
                setup = setup.server(&name.to_string(), engine, &[]);
            }
            let router = setup.start();
            for number in 0..80 {
                server(&router.client().post(CHAT, &prompt(number, 3000)));
            }
            let counts = counts(&engines);
            assert!(counts.iter().all(|count| (18..=22).contains(count)), "{shards} shards: {counts:?}");
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
}

mod engines_cache {
    //! What "a backend holds" is as much as the engine says that it can.
    use super::*;

    /// An engine that says how large its cache is, in its own metrics, is remembered for no more.
    #[test]
    fn an_engines_own_cache_size_bounds_what_is_remembered() {
        // 16 tokens a block, 400 blocks: 6,400 tokens, some 25,600 bytes at four bytes a token: 100 blocks of the router's.
        let page = "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"400\"} 1.0\n\
                    vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 0.0\n";
        let engines = [EngineSetup::new()
            .publishes("/metrics", Probe::Reply(200, page.into()))
            .start(|exchange| exchange.reply_ok())];
        let router = router_over(&engines, "kv-aware", &[], &[]);
        let mut client = router.client();
        let mut ask = |number| prefix_blocks(&client.post(CHAT, &prompt(number, 6000)));
        eventually(seconds(10), "the engine's size is known and holds", || {
            let first = ask(0);
            // Nine more of 23 blocks: over 100, under the default of 65,536.
            let others: Vec<_> = (1..10).map(&mut ask).collect();
            let again = ask(0);
            match again.0 < again.1 {
                true => Ok(()),
                false => Err(format!("{first:?}, {others:?}, {again:?}")),
            }
        });
        // Two fit.
        ask(100);
        ask(101);
        let (matched, total) = ask(100);
        assert_eq!(matched, total);
    }
}

mod fair_shares {
    //! "One client cannot spend another's cache."
    use super::*;

    /// How a client says who it is.
    #[derive(Clone, Copy, Debug)]
    enum Identity {
        Session,
        BearerKey,
        ApiKey,
    }

    fn ask(router: &Router, identity: Identity, client: &str, body: &[u8]) -> (u64, u64) {
        let bearer = format!("Bearer sk-{client}");
        let header = match identity {
            Identity::Session => ("X-Lifeboat-Session-Id", client),
            Identity::BearerKey => ("Authorization", bearer.as_str()),
            Identity::ApiKey => ("x-api-key", client),
        };
        prefix_blocks(&router.client().ask("POST", CHAT, &[header], body))
    }

    /// "Each client is now guaranteed an equal share of what a backend holds, and only a client over its share is evicted first."
    /// "Clients are identified by the X-Lifeboat-Session-Id header when sent, and otherwise by a one-way digest of the API key."
    #[test]
    fn a_noisy_client_evicts_only_its_own() {
        for identity in [Identity::Session, Identity::BearerKey, Identity::ApiKey] {
            let engines = answering(1);
            let router = router_over(&engines, "kv-aware", &["kv = { kv_capacity_blocks = 320 }"], &[]);
            // Two clients: 160 blocks each are theirs. Six prompts of some 23 blocks are within that.
            let steady: Vec<_> = (0..6).map(|number| prompt(number, 6000)).collect();
            let total: u64 = steady.iter().map(|body| ask(&router, identity, "quiet-one", body).1).sum();
            assert!((130..=160).contains(&total), "the working set is within the share: {total}");
            for number in 0..60 {
                ask(&router, identity, "noisy-one", &prompt(1000 + number, 6000));
                if number % 10 == 9 {
                    for body in &steady {
                        let (matched, total) = ask(&router, identity, "quiet-one", body);
                        assert_eq!(matched, total, "{identity:?}: lost after {} of the other's", number + 1);
                    }
                }
            }
            // The noisy one kept what its share holds of its latest, no more.
            let kept = (0..60)
                .rev()
                .map(|number| ask(&router, identity, "noisy-one", &prompt(1000 + number, 6000)))
                .take_while(|(matched, total)| matched == total)
                .count();
            assert!((5..=8).contains(&kept), "{identity:?}: {kept}");
        }
    }

    /// "A client working alone still gets the whole thing, so the guarantee costs nothing when there is no contention."
    #[test]
    fn a_client_alone_gets_the_whole_thing() {
        let engines = answering(1);
        let router = router_over(&engines, "kv-aware", &["kv = { kv_capacity_blocks = 320 }"], &[]);
        let each = ask(&router, Identity::Session, "alone", &prompt(0, 6000)).1;
        let fit = 320 / each;
        for number in 1..fit {
            assert_eq!(ask(&router, Identity::Session, "alone", &prompt(number, 6000)), (0, each));
        }
        for number in 0..fit {
            let found = ask(&router, Identity::Session, "alone", &prompt(number, 6000));
            assert_eq!(found, (each, each), "prompt {number} of {fit}");
        }
    }

    /// "The key itself is never stored or displayed", whichever algorithm goes by it, whatever the log says.
    #[test]
    fn an_api_key_is_shown_nowhere() {
        for name in ["sticky-session", "kv-aware"] {
            let engines = answering(2);
            let mut setup = Setup::new().log("level = \"trace\"").pool("p", &[&pool_of(name)]);
            for (engine, name) in engines.iter().zip(["a", "b"]) {
                setup = setup.server(name, engine, &[]);
            }
            let router = setup.start();
            let secrets = ["sk-wholly-secret-1", "sk-wholly-secret-2", "session-wholly-secret-3"];
            let headers = [
                [("Authorization", "Bearer sk-wholly-secret-1")],
                [("x-api-key", "sk-wholly-secret-2")],
                [("X-Lifeboat-Session-Id", "session-wholly-secret-3")],
            ];
            let mut seen = String::new();
            for (header, secret) in headers.iter().zip(secrets) {
                for path in [CHAT, "/v1/nothing"] {
                    let response = router.client().ask("POST", path, header, &prompt(1, 3000));
                    seen.push_str(&response.head.text());
                    if name == "sticky-session" {
                        assert_eq!(response.lifeboat("Sticky-Key"), Some(digest(secret)));
                    }
                }
                // A rejection, too.
                let response = router.client().ask("POST", CHAT, header, &chat("nobody", "x"));
                response.assert_rejected(404, "model_not_found");
                seen.push_str(&response.head.text());
                seen.push_str(&response.text());
            }
            for target in ["/metrics", "/admin/v1/state", "/admin/v1/config"] {
                seen.push_str(&router.admin_get(target).text());
            }
            seen.push_str(&router.log());
            for secret in secrets {
                assert!(!seen.contains(secret), "{name}: {secret} in\n{seen}");
            }
        }
    }
}

mod sticky {
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
        for headers in [&[][..], &[("X-Lifeboat-Session-Id", "")], &[("Authorization", "Basic dXNlcjpwYXNz")]]
        {
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
        assert!(
            moved.iter().all(|(_, after)| *after == "e"),
            "whoever moves, moves to the new one: {moved:?}"
        );
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
                    let response =
                        client.ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &chat("m", "x"));
                    assert_eq!(response.lifeboat("Sticky-Key"), Some(digest(&id)));
                    if server(&response) != expected {
                        assert!(
                            ["sticky-session", "least-connections"].contains(&algorithm(&response).as_str())
                        );
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
}

mod knobs {
    //! "Per-server knobs."
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    /// Sets its flag when the thread that has it panics.
    struct StopOnPanic<'a>(&'a AtomicBool);

    impl Drop for StopOnPanic<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                self.0.store(true, Ordering::Relaxed);
            }
        }
    }

    /// "Weight 1.0, max concurrency 32, max input tokens 0 (unbounded), routing tier empty."
    #[test]
    fn defaults_are_as_stated() {
        let engine = Engine::answering();
        let router = Setup::new().server("a", &engine, &[]).start();
        let file = router.directory().join("ringway.toml");
        let checked = run_to_exit(&["check", file.to_str().expect("UTF-8")], seconds(10));
        for line in ["weight = 1.0", "max_concurrency = 32", "max_input_tokens = 0", "routing_tier = \"\""] {
            assert!(checked.stdout.lines().any(|have| have.trim() == line), "{line} in\n{}", checked.stdout);
        }
        let response = router.post(CHAT, &chat("m", "x"));
        assert_eq!(response.lifeboat("Weight").as_deref(), Some("1"));
        assert_eq!(response.lifeboat("Inflight").as_deref(), Some("1/32"));
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("default"));
    }

    /// "Weight: share of traffic in the pool. 0 drains — the backend stops receiving traffic without being stopped."
    #[test]
    fn weight_0_stops_traffic_whatever_the_algorithm() {
        for name in ALGORITHMS {
            let engines = answering(2);
            let router = router_over(&engines, name, &[], &[]);
            let headers = [("X-Lifeboat-Session-Id", "s")];
            let mut client = router.client();
            let mut ask = || server(&client.ask("POST", CHAT, &headers, &prompt(1, 4000)));
            let home = ask();
            router.set_weight(&home, "0");
            for _ in 0..6 {
                assert_ne!(ask(), home, "{name}");
            }
            assert_eq!(router.server_state(&home)["weight"].as_f64(), Some(0.0), "{name}");
            let other = if home == "a" { "b" } else { "a" };
            router.set_weight(other, "0");
            let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
            response.assert_rejected(503, "no_healthy_server").assert_retry_after();
            assert_eq!(response.lifeboat("Pool").as_deref(), Some("p"), "{name}");
            router.set_weight(other, "0.5");
            let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
            assert_eq!(
                (server(&response).as_str(), response.lifeboat("Weight").as_deref()),
                (other, Some("0.5"))
            );
        }
    }

    /// "Max concurrency: in-flight ceiling. 0 disables the gate." (The ceiling is in `capacity.rs`.)
    #[test]
    fn max_concurrency_0_disables_the_gate() {
        let gate = Gate::new();
        let engines = [holding(&gate)];
        let router =
            router_over(&engines, "kv-aware", &["routing_mode = \"reject\""], &["max_concurrency = 0"]);
        let mut clients: Vec<Client> = (0..60)
            .map(|_| {
                let mut client = router.client();
                client.send(&request("POST", CHAT, &[], &chat("m", "x")));
                client
            })
            .collect();
        engines[0].wait_requests(60);
        gate.open();
        let mut inflight: Vec<u32> = clients
            .iter_mut()
            .map(|client| {
                let value = client.response().lifeboat("Inflight").expect("a count");
                value.strip_suffix("/0").unwrap_or_else(|| panic!("{value}")).parse().expect("a count")
            })
            .collect();
        inflight.sort_unstable();
        assert_eq!(inflight, (1..=60).collect::<Vec<_>>());
    }

    /// "Max input tokens: requests estimated larger than this skip this backend."
    #[test]
    fn requests_estimated_larger_than_max_input_tokens_skip_the_backend() {
        for name in ALGORITHMS {
            let engines = answering(2);
            let router = Setup::new()
                .pool("p", &[&pool_of(name)])
                .server("small", &engines[0], &["max_input_tokens = 1000"])
                .server("large", &engines[1], &["max_input_tokens = 20000"])
                .start();
            let headers = |number: u64| format!("s-{number}");
            // Some 250 tokens: for both.
            let short: BTreeSet<String> = (0..16)
                .map(|number| {
                    let id = headers(number);
                    let body = prompt(number, 1000);
                    server(&router.client().ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &body))
                })
                .collect();
            if name != "kv-aware" || short.len() == 2 {
                assert_eq!(short.len(), 2, "{name}: {short:?}");
            }
            // Some 10,000: only for one.
            for number in 0..6 {
                let id = headers(number);
                let response = router.client().ask(
                    "POST",
                    CHAT,
                    &[("X-Lifeboat-Session-Id", &id)],
                    &prompt(number, 40_000),
                );
                assert_eq!(server(&response), "large", "{name}");
            }
            // Some 50,000: for none, and waiting does not help.
            let response = router.post(CHAT, &prompt(1, 200_000));
            response.assert_rejected(413, "input_too_long");
            assert_eq!(response.header("Retry-After"), None);
            assert_eq!(response.lifeboat("Pool").as_deref(), Some("p"), "{name}");
            let message = response.json()["error"]["message"].as_str().expect("text").to_owned();
            assert!(message.contains("max_input_tokens"), "{message}");
            // A body whose text is not the prompt's: an image is not counted by its bytes.
            let image = format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]}}"#,
                "A".repeat(300_000)
            );
            assert_eq!(router.post(CHAT, image.as_bytes()).status, 200, "{name}");
        }
    }

    /// Token ids count as what they are, not by their digits.
    #[test]
    fn token_ids_count_as_tokens() {
        let engine = Engine::answering();
        let router = Setup::new().server("a", &engine, &["max_input_tokens = 1000"]).start();
        let ids = |count: usize| {
            let ids: Vec<String> = (0..count).map(|id| (100_000 + id).to_string()).collect();
            format!(r#"{{"model":"m","prompt":[{}]}}"#, ids.join(",")).into_bytes()
        };
        assert_eq!(router.post("/v1/completions", &ids(990)).status, 200);
        router.post("/v1/completions", &ids(1100)).assert_rejected(413, "input_too_long");
    }

    /// "Routing tier: isolates a sub-pool." Tiers never borrow from each other, not even when they are idle or full.
    #[test]
    fn a_routing_tier_isolates_a_sub_pool() {
        let (plain_gate, gold_gate) = (Gate::new(), Gate::new());
        let engines = [holding_some(&plain_gate), holding_some(&gold_gate), holding_some(&gold_gate)];
        let router = Setup::new()
            .pool("p", &[&pool_of("least-connections"), "routing_mode = \"reject\""])
            .server("plain", &engines[0], &["max_concurrency = 1"])
            .server("gold1", &engines[1], &["max_concurrency = 1", "routing_tier = \"gold\""])
            .server("gold2", &engines[2], &["max_concurrency = 1", "routing_tier = \"gold\""])
            .start();
        let ask = |tier: &str, tag: &str| {
            let headers = [("X-Lifeboat-Tier", tier)];
            let headers = if tier.is_empty() { &[][..] } else { &headers[..] };
            let mut client = router.client();
            client.send(&request("POST", CHAT, headers, &chat("m", tag)));
            client
        };
        for _ in 0..4 {
            let response = ask("", "x").response();
            assert_eq!(
                (server(&response).as_str(), response.lifeboat("Pool").as_deref()),
                ("plain", Some("p"))
            );
            let response = ask("gold", "x").response();
            assert!(server(&response).starts_with("gold"));
            assert_eq!(response.lifeboat("Pool").as_deref(), Some("p/gold"));
        }
        // Gold is full, plain idle: gold is refused, and the other way round.
        let mut held = vec![ask("gold", "hold"), ask("gold", "hold")];
        for name in ["gold1", "gold2"] {
            router.wait_metric("ringway_in_flight", &[("server", name)], 1.0, seconds(5));
        }
        let response = ask("gold", "x").response();
        response.assert_rejected(503, "at_capacity");
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("p/gold"));
        assert_eq!(server(&ask("", "x").response()), "plain");
        held.push(ask("", "hold"));
        router.wait_metric("ringway_in_flight", &[("server", "plain")], 1.0, seconds(5));
        gold_gate.open();
        for client in &mut held[..2] {
            server(&client.response());
        }
        router.wait_metric("ringway_in_flight", &[], 1.0, seconds(5));
        ask("", "x").response().assert_rejected(503, "at_capacity");
        server(&ask("gold", "x").response());
        plain_gate.open();
        server(&held[2].response());
        // A tier that nobody has.
        let response = ask("silver", "x").response();
        response.assert_rejected(503, "no_server_in_tier");
        // A blank tier is none.
        let response = router.client().ask("POST", CHAT, &[("X-Lifeboat-Tier", "")], &chat("m", "x"));
        assert_eq!(server(&response), "plain");
    }

    /// "Weight 0 is the graceful-drain mechanism. Set it, let in-flight requests finish, then stop the server — no failed requests, no
    /// window where the pool is short." Under load, with every algorithm.
    #[test]
    fn a_drained_server_is_stopped_without_a_failed_request() {
        for name in ALGORITHMS {
            let mut engines: Vec<Engine> = (0..3)
                .map(|_| {
                    Engine::start(|exchange| {
                        exchange.read_body()?;
                        exchange.pause(ms(15));
                        exchange.reply_ok()
                    })
                })
                .collect();
            let mut setup = Setup::new().shards(2).pool("p", &[&pool_of(name)]);
            for (engine, name) in engines.iter().zip(["a", "b", "c"]) {
                setup = setup.server(name, engine, &[]);
            }
            let router = setup.start();
            let (stop, served) = (AtomicBool::new(false), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                for number in 0..12u64 {
                    let (router, stop, served) = (&router, &stop, &served);
                    scope.spawn(move || {
                        let mut client = router.client();
                        let id = format!("s-{number}");
                        let mut turn = 0;
                        // A client that fails ends the others, so that the test ends.
                        let _stop = StopOnPanic(stop);
                        while !stop.load(Ordering::Relaxed) {
                            turn += 1;
                            let body = question(&words(number % 4, 3000), &turn.to_string());
                            let response = client.ask("POST", CHAT, &[("X-Lifeboat-Session-Id", &id)], &body);
                            assert_eq!(response.status, 200, "{name}: {}", response.text());
                            served.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                let _stop = StopOnPanic(&stop);
                let more = |count: usize| {
                    let from = served.load(Ordering::Relaxed);
                    eventually(seconds(20), "the load goes on", || {
                        let done = served.load(Ordering::Relaxed) - from;
                        assert!(!stop.load(Ordering::Relaxed), "a client failed");
                        if done >= count { Ok(()) } else { Err(format!("{done}")) }
                    });
                };
                more(100);
                router.set_weight("b", "0");
                router.wait_metric("ringway_in_flight", &[("server", "b")], 0.0, seconds(10));
                let before = engines[1].request_count();
                engines[1].stop();
                more(100);
                assert_eq!(engines[1].request_count(), before, "{name}");
                stop.store(true, Ordering::Relaxed);
            });
            assert_eq!(router.metrics().sum("ringway_upstream_errors_total", &[]), 0.0, "{name}");
            assert_eq!(router.metrics().sum("ringway_rejections_total", &[]), 0.0, "{name}");
        }
    }

    /// The same through the drain call, which answers when the server is idle.
    #[test]
    fn the_drain_call_answers_when_the_server_is_idle() {
        let gate = Gate::new();
        let engines: Vec<Engine> = (0..2).map(|_| holding_some(&gate)).collect();
        let router = router_over(&engines, "weighted-round-robin", &[], &[]);
        let mut holder = router.client();
        holder.send(&request("POST", CHAT, &[], &chat("m", "hold")));
        engines[0].wait_requests(1);
        std::thread::scope(|scope| {
            let drained =
                scope.spawn(|| router.admin_ask("POST", "/admin/v1/servers/a/drain?timeout_ms=20000", ""));
            eventually(seconds(5), "its weight is 0", || match router.server_state("a")["weight"].as_f64() {
                Some(0.0) => Ok(()),
                other => Err(format!("{other:?}")),
            });
            pause(ms(100));
            assert!(!drained.is_finished(), "a request is in flight");
            for _ in 0..3 {
                assert_eq!(server(&router.post(CHAT, &chat("m", "x"))), "b");
            }
            gate.open();
            assert_eq!(server(&holder.response()), "a");
            let response = drained.join().expect("an answer");
            assert_eq!(response.status, 200, "{}", response.text());
            assert_eq!(response.json()["idle"], true, "{}", response.text());
        });
        assert_eq!(router.server_state("a")["in_flight"], 0);
        // And one that does not get idle in time says so.
        let gate = Gate::new();
        let engines = [holding(&gate)];
        let router = router_over(&engines, "weighted-round-robin", &[], &[]);
        let mut holder = router.client();
        holder.send(&request("POST", CHAT, &[], &chat("m", "hold")));
        engines[0].wait_requests(1);
        let response = router.admin_ask("POST", "/admin/v1/servers/a/drain?timeout_ms=100", "");
        assert_eq!(response.json()["idle"], false, "{}", response.text());
        assert_eq!(response.json()["in_flight"], 1, "{}", response.text());
        gate.open();
        server(&holder.response());
    }
}

mod weights {
    //! "Verifying the weights."
    use super::*;

    /// The entry of `name` once `ready` says that it shows what is waited for.
    fn entry(router: &Router, name: &str, ready: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        eventually(seconds(10), &format!("the drift of {name}"), || {
            let server = router.server_state(name);
            if ready(&server) { Ok(server) } else { Err(format!("{server:#}")) }
        })
    }

    /// "Drive steady load, then compare each backend's dispatch share against its configured weight."
    #[test]
    fn steady_load_follows_the_weights() {
        for name in ["weighted-round-robin", "least-connections", "kv-aware"] {
            let engines = answering(3);
            let router = Setup::new()
                .pool("p", &[&pool_of(name)])
                .server("a", &engines[0], &["weight = 3"])
                .server("b", &engines[1], &["weight = 2"])
                .server("c", &engines[2], &["weight = 1"])
                .start();
            let mut client = router.client();
            for number in 0..240 {
                server(&client.post(CHAT, &prompt(number, 1000)));
            }
            assert_eq!(counts(&engines), [120, 80, 40], "{name}");
            let shares = [("a", 0.5), ("b", 1.0 / 3.0), ("c", 1.0 / 6.0)];
            for (server, share) in shares {
                let near = |value: &serde_json::Value| {
                    value.as_f64().is_some_and(|value| (value - share).abs() < 0.01)
                };
                let server = entry(&router, server, |server| near(&server["share"]));
                assert!(near(&server["weight_share"]), "{server:#}");
                assert!(server["drift"].as_f64().is_some_and(|drift| drift.abs() < 0.05), "{server:#}");
                assert_eq!(server["drift_cause"], serde_json::Value::Null, "{server:#}");
            }
            // For kv-aware, drift is no sign of trouble.
            assert_eq!(router.metrics().has("ringway_drift_ratio"), name != "kv-aware", "{name}");
        }
    }

    /// "Drift beyond roughly 10% under steady load means a backend is erroring (and being briefly benched), ..."
    #[test]
    fn an_erroring_backend_drifts_and_says_why() {
        let broken = Engine::start(|exchange| exchange.reply(503, &[], b"{}"));
        let good = Engine::answering();
        let router = Setup::new()
            .health("bench_ms = 30000")
            .server("good", &good, &[])
            .server("broken", &broken, &[])
            .start();
        let mut client = router.client();
        for _ in 0..200 {
            client.post(CHAT, &chat("m", "x"));
        }
        assert!(broken.request_count() < 20, "{}", broken.request_count());
        let server = entry(&router, "broken", |server| server["drift_cause"] != serde_json::Value::Null);
        assert!(server["drift"].as_f64().is_some_and(|drift| drift < -0.5), "{server:#}");
        let cause = server["drift_cause"].to_string();
        assert!(cause.contains("bench") || cause.contains("err"), "{server:#}");
    }

    /// "..., is at capacity, ..."
    #[test]
    fn a_full_backend_drifts_and_says_why() {
        let gate = Gate::new();
        let engines: Vec<Engine> = (0..2).map(|_| holding_some(&gate)).collect();
        let router = Setup::new()
            .server("wide", &engines[0], &[])
            .server("narrow", &engines[1], &["max_concurrency = 1"])
            .start();
        // One long request fills the narrow one.
        let mut holders = Vec::new();
        while engines[1].request_count() == 0 {
            let mut client = router.client();
            client.send(&request("POST", CHAT, &[], &chat("m", "hold")));
            holders.push(client);
            let placed = holders.len();
            eventually(seconds(5), "it is placed", || {
                let got = counts(&engines).iter().sum::<usize>();
                if got == placed { Ok(()) } else { Err(format!("{got}")) }
            });
        }
        let mut client = router.client();
        for _ in 0..200 {
            assert_eq!(server(&client.post(CHAT, &chat("m", "x"))), "wide");
        }
        // (The second in which it came up, and was not eligible yet, counts against it, too: the cause is what lasts.)
        let server =
            entry(&router, "narrow", |server| server["drift_cause"].to_string().contains("capacity"));
        assert!(server["drift"].as_f64().is_some_and(|drift| drift < -0.5), "{server:#}");
        gate.open();
        for client in &mut holders {
            client.response();
        }
    }

    /// "... or is parked at weight 0."
    #[test]
    fn a_backend_parked_at_weight_0_says_so() {
        let engines = answering(2);
        let router = router_over(&engines, "weighted-round-robin", &[], &[]);
        let mut client = router.client();
        for _ in 0..60 {
            server(&client.post(CHAT, &chat("m", "x")));
        }
        router.set_weight("b", "0");
        for _ in 0..140 {
            assert_eq!(server(&client.post(CHAT, &chat("m", "x"))), "a");
        }
        let server = entry(&router, "b", |server| server["drift_cause"] != serde_json::Value::Null);
        assert!(server["drift_cause"].to_string().contains("weight"), "{server:#}");
        assert_eq!(server["weight"].as_f64(), Some(0.0));
    }
}

mod mixed {
    //! "Mixed clusters."
    use super::*;

    /// "If a request's candidates span several clusters, or include a standalone server, routing falls back to weighted round-robin."
    /// Whatever those clusters' algorithms are; and "use routing tiers to keep such workloads apart".
    #[test]
    fn mixed_candidates_fall_back_and_tiers_keep_them_apart() {
        let engines = answering(4);
        let router = Setup::new()
            .pool("sticky", &[&pool_of("sticky-session")])
            .server("a", &engines[0], &[])
            .pool("kv", &[&pool_of("kv-aware")])
            .server("b", &engines[1], &[])
            .server("apart", &engines[3], &["routing_tier = \"batch\""])
            .standalone("c", &engines[2], &[])
            .start();
        let mut client = router.client();
        let mut names = String::new();
        for _ in 0..6 {
            let headers = [("X-Lifeboat-Session-Id", "s")];
            let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
            assert_eq!(algorithm(&response), "weighted-round-robin");
            assert_eq!(response.lifeboat("Pool").as_deref(), Some("mixed"));
            for name in ["Sticky-Key", "Prefix-Blocks"] {
                assert_eq!(response.lifeboat(name), None, "of an algorithm that is not this traffic's");
            }
            names.push_str(&server(&response));
        }
        assert_eq!(names[..3], names[3..], "{names}");
        assert_eq!(counts(&engines), [2, 2, 2, 0]);
        // In a tier of its own the pool's algorithm holds again.
        for round in 0..3 {
            let headers = [("X-Lifeboat-Tier", "batch")];
            let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
            assert_eq!(server(&response), "apart");
            assert_eq!(response.lifeboat("Pool").as_deref(), Some("kv/batch"));
            assert_eq!(algorithm(&response), if round == 0 { "weighted-round-robin" } else { "kv-aware" });
        }
    }
}
