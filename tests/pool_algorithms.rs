//! Any pool may use any of the ten algorithms: each of them end to end, with full, failing and benched servers, and the affinity
//! ids of those that keep conversations together.

mod support;

use std::collections::BTreeSet;

use support::prompts::*;
use support::*;

const ALGORITHMS: [&str; 10] = [
    "weighted-round-robin",
    "least-connections",
    "sticky-session",
    "kv-aware",
    "power-of-n",
    "wait-and-widen",
    "round-robin",
    "random",
    "pulsar",
    "pulsar-wait-and-widen",
];
/// Those that keep conversations together by an affinity id, as a pool configures them.
const AFFINE: [&str; 3] = [
    "\"pulsar\"",
    "\"pulsar-wait-and-widen\"",
    "{ name = \"wait-and-widen\", cache_affinity_backend_selection_count = 1 }",
];
const ID: &str = "x-multi-turn-session-id";

/// A router over `engines`, named a, b, c, …, in a pool `p`.
fn router_over(engines: &[Engine], algorithm: &str, pool: &[&str], server_lines: &[&str]) -> Router {
    setup_over(engines, algorithm, pool, server_lines).start()
}

fn setup_over(engines: &[Engine], algorithm: &str, pool: &[&str], server_lines: &[&str]) -> Setup {
    let line = format!("algorithm = {algorithm}");
    let lines: Vec<&str> = [line.as_str()].into_iter().chain(pool.iter().copied()).collect();
    let mut setup = Setup::new().pool("p", &lines);
    for (engine, name) in engines.iter().zip('a'..) {
        setup = setup.server(&name.to_string(), engine, server_lines);
    }
    setup
}

fn quoted(name: &str) -> String {
    format!("\"{name}\"")
}

fn answering(count: usize) -> Vec<Engine> {
    (0..count).map(|_| Engine::answering()).collect()
}

/// What the answer may say that chose: the pool's own algorithm, or what stands in for it.
#[track_caller]
fn assert_algorithm(response: &Response, name: &str) {
    let fallback = if name == "kv-aware" { "weighted-round-robin" } else { "least-connections" };
    let used = algorithm(response);
    assert!(used == name || used == fallback, "{used} in a pool of {name}");
}

/// A request of one conversation among others.
fn turn(router: &Router, number: usize, tag: &str) -> Response {
    let session = format!("conversation-{number}");
    let headers = [("X-Lifeboat-Session-Id", session.as_str()), (ID, session.as_str())];
    router.client().ask("POST", CHAT, &headers, &chat("m", tag))
}

#[test]
fn every_algorithm_serves_a_pool() {
    for name in ALGORITHMS {
        let engines = answering(3);
        let router = router_over(&engines, &quoted(name), &[], &[]);
        let mut servers = Vec::new();
        for number in 0..24 {
            let response = turn(&router, number, "x");
            assert_algorithm(&response, name);
            assert_eq!(response.lifeboat("Pool").as_deref(), Some("p"));
            assert_eq!(response.lifeboat("Inflight").as_deref(), Some("1/32"), "{name}");
            assert_eq!(response.lifeboat("Wait-ms").as_deref(), Some("0"), "{name}");
            servers.push(server(&response));
        }
        let distinct: BTreeSet<&String> = servers.iter().collect();
        assert!(distinct.len() > 1, "{name}: 24 conversations on {distinct:?} alone");
        if name == "round-robin" {
            assert_eq!(servers[..6], ["a", "b", "c", "a", "b", "c"]);
        }
        assert_eq!(router.state()["pools"][0]["algorithm"], name);
        router.wait_idle(seconds(5));
    }
}

/// "To the algorithm a server without room is not there": whoever is full is passed over, and with all full the pool's mode decides.
#[test]
fn every_algorithm_passes_over_who_is_full() {
    for name in ALGORITHMS {
        let gate = Gate::new();
        let engines: Vec<Engine> = (0..3).map(|_| holding_some(&gate)).collect();
        let router =
            router_over(&engines, &quoted(name), &["routing_mode = \"reject\""], &["max_concurrency = 1"]);
        let mut held = Vec::new();
        for full in 0..3 {
            let busy: Vec<usize> = (0..3).filter(|i| engines[*i].active() > 0).collect();
            assert_eq!(busy.len(), full, "{name}");
            for number in 0..6 {
                let response = turn(&router, number, "x");
                assert_algorithm(&response, name);
                let chosen = usize::from(server(&response).as_bytes()[0] - b'a');
                assert!(!busy.contains(&chosen), "{name}: {chosen} is full");
                router.wait_metric("ringway_in_flight", &[], full as f64, seconds(5));
            }
            let mut client = router.client();
            let key = format!("conversation-{full}");
            client.send(&request("POST", CHAT, &[(ID, key.as_str())], &chat("m", "hold")));
            held.push(client);
            eventually(seconds(5), "dispatched", || {
                let active = engines.iter().filter(|engine| engine.active() > 0).count();
                if active == full + 1 { Ok(()) } else { Err(active.to_string()) }
            });
        }
        let refused = turn(&router, 0, "x");
        refused.assert_rejected(503, "at_capacity").assert_retry_after();
        assert_eq!(refused.lifeboat("Algorithm").as_deref(), Some(name));
        gate.open();
        for mut client in held {
            assert_eq!(client.response().status, 200);
        }
        router.wait_idle(seconds(5));
    }
}

/// A request that waits gets the first server that it may use; whoever waits longest, first.
#[test]
fn every_algorithm_waits_in_the_pools_queue() {
    for name in ALGORITHMS {
        let gate = Gate::new();
        let engines = [holding_some(&gate)];
        let router = router_over(&engines, &quoted(name), &[], &["max_concurrency = 1"]);
        let mut holder = router.client();
        holder.send(&request("POST", CHAT, &[], &chat("m", "hold")));
        engines[0].wait_requests(1);
        let mut waiting = router.client();
        waiting.send(&request("POST", CHAT, &[(ID, "k")], &chat("m", "x")));
        router.wait_metric("ringway_queue_depth", &[("pool", "p")], 1.0, seconds(5));
        pause(ms(30));
        gate.open();
        assert_eq!(holder.response().status, 200);
        let response = waiting.response();
        assert_algorithm(&response, name);
        let waited: u64 = response.lifeboat("Wait-ms").expect("known").parse().expect("whole ms");
        assert!(waited >= 20, "{name}: {waited} ms");
    }
}

/// A server that refuses connections costs no request: each goes elsewhere, until it is benched and nothing goes there.
#[test]
fn every_algorithm_retries_elsewhere_and_benches() {
    for name in ALGORITHMS {
        let mut engines = answering(3);
        let router = setup_over(&engines, &quoted(name), &[], &[])
            .health("interval_ms = 3600000")
            .health("bench_ms = 30000")
            .start();
        engines[1].stop();
        let mut retried = 0;
        for number in 0..60 {
            let response = turn(&router, number, "x");
            assert_ne!(server(&response), "b", "{name}");
            assert_algorithm(&response, name);
            retried += usize::from(response.lifeboat("Retries").is_some());
        }
        assert_eq!(retried, 3, "{name}: three failures, then the bench");
        assert_eq!(router.server_state("b")["state"], "benched", "{name}");
    }
}

/// Weight 0 and tiers hold for all.
#[test]
fn every_algorithm_leaves_drained_servers_and_other_tiers_alone() {
    for name in ALGORITHMS {
        let engines = answering(3);
        let router = Setup::new()
            .pool("p", &[&format!("algorithm = \"{name}\"")])
            .server("a", &engines[0], &[])
            .server("b", &engines[1], &[])
            .server("gold", &engines[2], &["routing_tier = \"gold\""])
            .start();
        router.set_weight("a", "0");
        for number in 0..8 {
            assert_eq!(server(&turn(&router, number, "x")), "b", "{name}");
            let session = format!("s-{number}");
            let headers = [("X-Lifeboat-Tier", "gold"), (ID, session.as_str())];
            let response = router.client().ask("POST", CHAT, &headers, &chat("m", "x"));
            assert_eq!(server(&response), "gold", "{name}");
        }
        router.set_weight("a", "1");
        let servers: BTreeSet<String> = (0..24).map(|number| server(&turn(&router, number, "x"))).collect();
        assert_eq!(servers.len(), 2, "{name}: a is back");
    }
}

fn with_key(field: &str, key: &str) -> Vec<u8> {
    let mut body = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    match field {
        "conversation" => body["conversation"] = serde_json::json!({ "id": key }),
        field => body[field] = key.into(),
    }
    body.to_string().into_bytes()
}

/// The same `prompt_cache_key`, or the returned id, reaches the same server; the key itself is in no answer.
#[test]
fn a_cache_key_and_the_returned_id_lead_to_the_same_server() {
    for algorithm in AFFINE {
        let engines = answering(4);
        let router = router_over(&engines, algorithm, &[], &[]);
        let mut homes = BTreeSet::new();
        for number in 0..20 {
            let key = format!("secret-key-{number}");
            let first = router.post(CHAT, &with_key("prompt_cache_key", &key));
            let (home, id) = (server(&first), first.header(ID).expect("the value to send back"));
            assert!(!first.head.text().contains(&key) && id.len() == 35, "{id}");
            for _ in 0..3 {
                let again = router.post(CHAT, &with_key("prompt_cache_key", &key));
                assert_eq!(
                    (server(&again), again.header(ID)),
                    (home.clone(), Some(id.clone())),
                    "{algorithm}"
                );
                let back = router.client().ask("POST", CHAT, &[(ID, &id)], &chat("m", "other"));
                assert_eq!((server(&back), back.header(ID)), (home.clone(), Some(id.clone())), "{algorithm}");
            }
            homes.insert(home);
        }
        assert!(homes.len() >= 2, "{algorithm}: 20 keys on {homes:?}");
        // The choice depends on key and names alone: another process makes it, too.
        let other = router_over(&engines, algorithm, &[], &[]);
        for number in 0..10 {
            let body = with_key("prompt_cache_key", &format!("secret-key-{number}"));
            let (here, there) = (router.post(CHAT, &body), other.post(CHAT, &body));
            assert_eq!((server(&here), here.header(ID)), (server(&there), there.header(ID)), "{algorithm}");
        }
    }
}

/// Whoever names no conversation begins one, and finds it again.
#[test]
fn a_generated_id_leads_back() {
    for algorithm in AFFINE {
        let engines = answering(4);
        let router = router_over(&engines, algorithm, &[], &[]);
        let mut ids = BTreeSet::new();
        for _ in 0..12 {
            let first = router.post(CHAT, &chat("m", "x"));
            let id = first.header(ID).expect("a generated id");
            assert!(ids.insert(id.clone()), "{id} was given before");
            for _ in 0..3 {
                let back = router.client().ask("POST", CHAT, &[(ID, &id)], &chat("m", "y"));
                assert_eq!(
                    (server(&back), back.header(ID)),
                    (server(&first), Some(id.clone())),
                    "{algorithm}"
                );
            }
        }
    }
}

/// The header first, then `prompt_cache_key`, `conversation.id`, `user`. What is not sent, blank or too long does not count.
#[test]
fn the_first_that_is_named_counts() {
    let engines = answering(1);
    let router = router_over(&engines, "\"pulsar\"", &[], &[]);
    let id = |headers: &[(&str, &str)], body: &[u8]| {
        router.client().ask("POST", CHAT, headers, body).header(ID).expect("an id")
    };
    let body = |fields: &str| {
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}]{fields}}}"#).into_bytes()
    };
    let user = id(&[], &body(r#","user":"u""#));
    let conversation = id(&[], &body(r#","user":"u","conversation":{"id":"c"}"#));
    let key = id(&[], &body(r#","user":"u","conversation":{"id":"c"},"prompt_cache_key":"k""#));
    let header = id(&[(ID, "h")], &body(r#","user":"u","prompt_cache_key":"k""#));
    let all: BTreeSet<&String> = [&user, &conversation, &key, &header].into_iter().collect();
    assert_eq!(all.len(), 4);
    assert_eq!(conversation, id(&[], &with_key("conversation", "c")));
    assert_eq!(key, id(&[], &with_key("prompt_cache_key", "k")));
    assert_eq!(header, id(&[(ID, "h")], &chat("m", "x")));
    assert_eq!(user, id(&[(ID, "  ")], &body(r#","user":"u","prompt_cache_key":"""#)));
    assert_eq!(user, id(&[], &body(&format!(r#","user":"u","prompt_cache_key":"{}""#, "k".repeat(257)))));
    assert_ne!(id(&[(ID, "k")], &chat("m", "x")), key, "kinds do not meet");
}

/// The id stands on rejections too, once; an engine's own of that name gives way. Without affinity there is none.
#[test]
fn ids_stand_on_all_answers_of_affinity_aware_pools_and_on_no_others() {
    let gate = Gate::new();
    let held = std::sync::Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        if exchange.body_has("hold")? {
            held.pass(seconds(30));
        }
        exchange.reply(200, &[("X-Multi-Turn-Session-Id", "engine's")], b"{}")
    });
    let engines = [engine];
    let lines = &["max_concurrency = 1"];
    let router = router_over(&engines, "\"pulsar\"", &["routing_mode = \"reject\""], lines);
    let response = router.post(CHAT, &with_key("user", "u"));
    let id = response.header(ID).expect("exactly one");
    let mut holder = router.client();
    holder.send(&request("POST", CHAT, &[], &chat("m", "hold")));
    engines[0].wait_requests(2);
    let refused = router.post(CHAT, &with_key("user", "u"));
    refused.assert_rejected(503, "at_capacity");
    assert_eq!(refused.header(ID), Some(id));
    gate.open();
    assert_eq!(holder.response().status, 200);
    for name in ALGORITHMS.iter().filter(|name| !name.starts_with("pulsar")) {
        let router = router_over(&engines, &quoted(name), &[], &[]);
        let response = router.post(CHAT, &with_key("prompt_cache_key", "k"));
        assert_eq!(response.header(ID).as_deref(), Some("engine's"), "{name}: what is not ours passes");
    }
}

/// A conversation whose server is full, or failed, goes elsewhere and comes back.
#[test]
fn a_conversation_comes_home_when_its_server_has_room_again() {
    for algorithm in AFFINE {
        let gate = Gate::new();
        let mut engines: Vec<Engine> = (0..3).map(|_| holding_some(&gate)).collect();
        let router = setup_over(&engines, algorithm, &[], &["max_concurrency = 1"])
            .health("interval_ms = 3600000")
            .health("bench_after = 1000")
            .start();
        let ask = || router.client().ask("POST", CHAT, &[(ID, "someone")], &chat("m", "x"));
        let home = server(&ask());
        let mut holder = router.client();
        holder.send(&request("POST", CHAT, &[(ID, "someone")], &chat("m", "hold")));
        router.wait_metric("ringway_in_flight", &[("server", &home)], 1.0, seconds(5));
        let away = server(&ask());
        assert_ne!(away, home, "{algorithm}");
        gate.release(1);
        assert_eq!(server(&holder.response()), home);
        router.wait_idle(seconds(5));
        assert_eq!(server(&ask()), home, "{algorithm}");
        let engine = usize::from(home.as_bytes()[0] - b'a');
        engines[engine].stop();
        let elsewhere = ask();
        assert_ne!(server(&elsewhere), home, "{algorithm}");
        assert_eq!(elsewhere.lifeboat("Retries").as_deref(), Some("1"), "{algorithm}");
        engines[engine].listen();
        assert_eq!(server(&ask()), home, "{algorithm}");
        gate.open();
    }
}

/// With every server full a request takes the first that is free: at home it is pulsar's choice, elsewhere nobody's.
#[test]
fn a_waiting_conversation_takes_what_is_free_and_says_so() {
    let gates = [Gate::new(), Gate::new()];
    let engines: Vec<Engine> = gates.iter().map(holding_some).collect();
    let router = router_over(&engines, "\"pulsar\"", &[], &["max_concurrency = 1"]);
    let home = server(&router.client().ask("POST", CHAT, &[(ID, "k")], &chat("m", "x")));
    let at = usize::from(home.as_bytes()[0] - b'a');
    for (freed, expected) in [(at, "pulsar"), (1 - at, "least-connections")] {
        let mut holders: Vec<_> = (0..2).map(|_| router.client()).collect();
        for (number, holder) in holders.iter_mut().enumerate() {
            holder.send(&request("POST", CHAT, &[(ID, "k")], &chat("m", "hold")));
            router.wait_metric("ringway_in_flight", &[], number as f64 + 1.0, seconds(5));
        }
        eventually(seconds(5), "both are full", || {
            let active: Vec<usize> = engines.iter().map(Engine::active).collect();
            if active == [1, 1] { Ok(()) } else { Err(format!("{active:?}")) }
        });
        let mut waiting = router.client();
        waiting.send(&request("POST", CHAT, &[(ID, "k")], &chat("m", "x")));
        router.wait_metric("ringway_queue_depth", &[("pool", "p")], 1.0, seconds(5));
        gates[freed].release(1);
        let response = waiting.response();
        assert_eq!((server(&response) == home, algorithm(&response).as_str()), (freed == at, expected));
        gates[1 - freed].release(1);
        for holder in &mut holders {
            assert_eq!(holder.response().status, 200);
        }
        router.wait_idle(seconds(5));
    }
}

/// Servers of one `cluster_id` are one to the algorithm and take turns within.
#[test]
fn servers_of_a_cluster_take_turns() {
    let engines = answering(4);
    let mut setup = Setup::new().pool("p", &["algorithm = \"pulsar\""]);
    for (engine, (name, cluster)) in engines.iter().zip([("a", "x"), ("b", "x"), ("c", "y"), ("d", "y")]) {
        setup = setup.server(name, engine, &[&format!("cluster_id = \"{cluster}\"")]);
    }
    let router = setup.start();
    let mut clusters = BTreeSet::new();
    for number in 0..20 {
        let id = format!("k-{number}");
        let ask = || server(&router.client().ask("POST", CHAT, &[(ID, &id)], &chat("m", "x")));
        let mut pair = [ask(), ask()];
        pair.sort();
        let pair = pair.join("");
        assert!(pair == "ab" || pair == "cd", "{pair} for {id}");
        clusters.insert(pair);
    }
    assert_eq!(clusters.len(), 2);
}

/// Several shards send a conversation to the same server, whichever of them it comes to.
#[test]
fn all_shards_choose_alike() {
    for algorithm in AFFINE {
        let engines = answering(4);
        let router = setup_over(&engines, algorithm, &[], &[]).shards(3).start();
        for number in 0..8 {
            let id = format!("k-{number}");
            let homes: BTreeSet<String> = (0..12)
                .map(|_| server(&router.client().ask("POST", CHAT, &[(ID, &id)], &chat("m", "x"))))
                .collect();
            assert_eq!(homes.len(), 1, "{algorithm}: {id} on {homes:?}");
        }
    }
}

/// An engine that streams, and takes so long until its first event.
fn streaming_after(span: std::time::Duration) -> Engine {
    Engine::start(move |exchange| {
        exchange.stream_head()?;
        exchange.pause(span);
        exchange.chunk(b"data: {}\n\n")?;
        exchange.chunk(b"data: [DONE]\n\n")?;
        exchange.end()
    })
}

/// Times to the first event teach the router how fast servers read, and the faster is chosen; configured rates need no teaching.
#[test]
fn measured_and_configured_rates_steer() {
    let body = chat_stream("m", &words(1, 20_000));
    for name in ["power-of-n", "wait-and-widen"] {
        let engines = [streaming_after(ms(250)), streaming_after(ms(15))];
        let router = router_over(&engines, &quoted(name), &[], &[]);
        let mut counts = [0, 0];
        for _ in 0..100 {
            let chosen = server(&router.post(CHAT, &body));
            counts[usize::from(chosen == "b")] += 1;
            if counts.iter().all(|count| *count >= 6) {
                break;
            }
        }
        assert!(counts.iter().all(|count| *count >= 5), "{name}: both were tried: {counts:?}");
        for _ in 0..8 {
            let response = router.post(CHAT, &body);
            assert_eq!((server(&response), algorithm(&response)), ("b".into(), name.into()));
        }
        let engines = answering(2);
        let router = Setup::new()
            .pool("p", &[&format!("algorithm = \"{name}\"")])
            .server("a", &engines[0], &["input_tps = 10"])
            .server("b", &engines[1], &["input_tps = 100000"])
            .start();
        for _ in 0..10 {
            assert_eq!(server(&router.post(CHAT, &body)), "b", "{name}");
        }
    }
}
