//! Reports from the field about how routers spread requests, each as a test: A9 to A12 and A16. (A13, "breaker opened by client
//! errors", is `answers_of_4xx_bench_nobody` in `retry.rs`; the rest of A9 is in `bodies.rs`.)

mod support;

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use support::prompts::*;
use support::*;

fn kv_router(engines: &[Engine], shards: usize, server_lines: &[&str]) -> Router {
    let mut setup = Setup::new().shards(shards).pool("p", &["algorithm = \"kv-aware\""]);
    for (engine, name) in engines.iter().zip('a'..) {
        setup = setup.server(&name.to_string(), engine, server_lines);
    }
    setup.start()
}

/// A9: coding clients compress large bodies. The engine gets what the client sent, byte for byte; and the same prompt meets the
/// same server however it was compressed.
#[test]
fn a9_compressed_prompts_meet_plain_ones() {
    let gzip = |body: &[u8]| {
        let mut child = Command::new("gzip")
            .args(["-n", "-c"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("gzip is there");
        child.stdin.take().expect("piped").write_all(body).expect("written");
        child.wait_with_output().expect("ended").stdout
    };
    let engines: Vec<Engine> = (0..4).map(|_| Engine::answering()).collect();
    let router = kv_router(&engines, 1, &[]);
    let mut client = router.client();
    for seed in 0..4 {
        let plain = prompt(seed, 9000);
        let packed = gzip(&plain);
        let first = client.post(CHAT, &plain);
        let (home, total) = (server(&first), prefix_blocks(&first).1);
        for (coding, body) in
            [("gzip", &packed), ("x-gzip", &packed), ("GZIP", &packed), ("identity", &plain)]
        {
            let response = client.ask("POST", CHAT, &[("Content-Encoding", coding)], body);
            assert_eq!(
                (server(&response), algorithm(&response)),
                (home.clone(), "kv-aware".into()),
                "{coding}"
            );
            assert_eq!(prefix_blocks(&response), (total, total), "{coding}");
        }
        let engine = &engines[usize::from(home.as_bytes()[0] - b'a')];
        let got = engine.requests();
        let packed_seen = &got[got.len() - 4];
        assert_eq!(packed_seen.header("Content-Encoding").as_deref(), Some("gzip"));
        assert_bytes(&packed_seen.body, &packed, "the compressed body");
    }
    // What cannot be decoded is placed by load and passed on as it is.
    let broken = gzip(&prompt(9, 9000))[..200].to_vec();
    for (coding, body) in [("gzip", &broken), ("bogus", &broken), ("gzip, gzip", &broken), ("br", &broken)] {
        let response = client.ask("POST", CHAT, &[("Content-Encoding", coding)], body);
        server(&response);
        assert_eq!(algorithm(&response), "weighted-round-robin", "{coding}");
    }
    // A bomb: a thousand times as large when decoded. It is routed at once, without its prefix.
    let bomb = gzip(&[br#"{"model":"m","prompt":""#.to_vec(), vec![b'a'; 64 << 20]].concat());
    let before = router.memory_bytes("VmHWM");
    let response = client.ask("POST", "/v1/completions", &[("Content-Encoding", "gzip")], &bomb);
    server(&response);
    let grown = router.memory_bytes("VmHWM").saturating_sub(before);
    assert!(grown < 24 << 20, "a body of {} bytes took {grown} bytes of memory", bomb.len());
}

/// A10: paths that nobody has heard of count as load like any other, so that no server gets them all.
#[test]
fn a10_unknown_paths_are_spread_by_load() {
    for (path, shared) in
        [("/inference/v1/generate", true), ("/generate", true), ("/v1/never/heard/of", false)]
    {
        let engines: Vec<Engine> = (0..4)
            .map(|_| {
                Engine::start(|exchange| {
                    exchange.read_body()?;
                    exchange.pause(ms(500));
                    exchange.reply_ok()
                })
            })
            .collect();
        let router = kv_router(&engines, 2, &["max_concurrency = 0"]);
        let prefix = words(1, 6000);
        let mut clients: Vec<Client> = (0..64)
            .map(|number| {
                let text = if shared { format!("{prefix} {number}") } else { words(number, 300) };
                let body = format!(r#"{{"model":"m","text":"{text}","prompt":"{text}","max_tokens":5}}"#);
                let mut client = router.client();
                client.send(&request("POST", path, &[], body.as_bytes()));
                client
            })
            .collect();
        for client in &mut clients {
            server(&client.response());
        }
        let most: Vec<usize> = engines.iter().map(Engine::active_max).collect();
        assert!(most.iter().all(|max| *max <= 24), "{path}: fair is 16 each, at most 24: {most:?}");
        assert_eq!(engines.iter().map(Engine::request_count).sum::<usize>(), 64);
        router.wait_idle(seconds(5));
    }
}

/// A11: conversations that share a system prompt are told apart by what follows: each stays where it began, and together they
/// spread.
#[test]
fn a11_conversations_stay_and_spread_behind_one_system_prompt() {
    const CONVERSATIONS: u64 = 40;
    const TURNS: u64 = 5;
    let engines: Vec<Engine> = (0..4)
        .map(|_| {
            Engine::start(|exchange| {
                exchange.read_body()?;
                exchange.pause(ms(60));
                exchange.reply_ok()
            })
        })
        .collect();
    let router = kv_router(&engines, 2, &[]);
    let system = words(999, 4096);
    let places: Vec<Vec<String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CONVERSATIONS)
            .map(|number| {
                let (router, system) = (&router, &system);
                scope.spawn(move || {
                    let mut messages = vec![("system".to_owned(), system.clone())];
                    (0..TURNS)
                        .map(|turn| {
                            messages.push(("user".into(), words(number * 100 + turn, 700)));
                            let pairs = messages.iter().map(|(role, text)| (role.as_str(), text.as_str()));
                            let place = server(&router.post(CHAT, &conversation("m", pairs)));
                            messages.push(("assistant".into(), words(number * 100 + turn + 50, 700)));
                            // A person reads what was said.
                            pause(ms(20 + (number * 7 + turn * 13) % 60));
                            place
                        })
                        .collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a conversation")).collect()
    });
    let stayed: usize = places
        .iter()
        .map(|turns| turns[1..].iter().zip(turns).filter(|(now, before)| now == before).count())
        .sum();
    let follow_ups = (CONVERSATIONS * (TURNS - 1)) as usize;
    let mut shares = BTreeMap::new();
    for place in places.iter().flatten() {
        *shares.entry(place.as_str()).or_insert(0usize) += 1;
    }
    let all = (CONVERSATIONS * TURNS) as usize;
    let largest = shares.values().copied().max().expect("someone served");
    assert!(stayed * 100 >= follow_ups * 95, "{stayed} of {follow_ups} follow-ups stayed; {shares:?}");
    assert!(largest * 100 <= all * 40, "{shares:?} of {all}");
}

/// A12: the memory of prefixes is bounded, and the bound holds whatever comes. Prompts that nobody sends again, until the cap is
/// reached several times over: the process does not grow any more, and is no slower.
///
/// `RINGWAY_TEST_PROMPTS` sets how many; two million of them are the report's own figure.
#[test]
fn a12_the_prefix_memory_stays_within_its_cap() {
    let prompts: u64 =
        std::env::var("RINGWAY_TEST_PROMPTS").ok().and_then(|text| text.parse().ok()).unwrap_or(6000);
    const CLIENTS: u64 = 4;
    let engine = EngineSetup::new().drop_bodies().start(|exchange| exchange.reply_ok());
    let router = Setup::new()
        .limit("kv_memory_bytes_max = 4194304")
        .pool("p", &["algorithm = \"kv-aware\""])
        .server("a", &engine, &[])
        .server("b", &engine, &[])
        .start();
    let next = AtomicU64::new(0);
    // Answers how long each quarter took, and the memory after it.
    let quarter = |until: u64| {
        let begun = now();
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    let mut client = router.client();
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= until {
                            next.fetch_sub(1, Ordering::Relaxed);
                            break;
                        }
                        server(&client.post(CHAT, &prompt(number, 8192)));
                    }
                });
            }
        });
        (begun.elapsed(), router.memory_bytes("VmRSS"))
    };
    let quarters: Vec<(Duration, u64)> = (1..=4).map(|part| quarter(prompts * part / 4)).collect();
    let (after_first, at_the_end) = (quarters[0].1, quarters[3].1);
    // 6,000 prompts are 192,000 blocks; at some 24 bytes each the cap was reached in the first quarter.
    let allowed = after_first + 4_194_304 / 5 + (1 << 20);
    assert!(at_the_end <= allowed, "memory after each quarter: {quarters:?}");
    if prompts >= 100_000 {
        let (first, last) = (quarters[0].0, quarters[3].0);
        assert!(last.as_secs_f64() <= first.as_secs_f64() / 0.9, "time of each quarter: {quarters:?}");
    }
    // The latest is remembered, the first is not.
    let found = |number: u64| prefix_blocks(&router.post(CHAT, &prompt(number, 8192))).0;
    assert!(found(prompts - 1) > 0);
    assert_eq!(found(0), 0);
}

/// A16: what a request costs hardly depends on the number of servers. Processor time is compared, not time on the clock, and with
/// a wide margin: only work for each server on each request shows.
#[test]
fn a16_many_servers_cost_little_more_than_few() {
    const REQUESTS: u64 = 1500;
    let engine = EngineSetup::new().drop_bodies().start(|exchange| exchange.reply_ok());
    let cost = |servers: usize, algorithm: &str| {
        let mut setup =
            Setup::new().health("interval_ms = 600000").pool("p", &[&format!("algorithm = \"{algorithm}\"")]);
        for number in 0..servers {
            setup = setup.server(&format!("s{number}"), &engine, &["models = [\"m\"]"]);
        }
        let router = setup.start();
        let mut client = router.client();
        let mut run = |requests: u64| {
            for number in 0..requests {
                // A quarter are new prompts, the others come again.
                let seed = if number % 4 == 0 { number } else { number % 16 };
                server(&client.post(CHAT, &prompt(seed, 2000)));
            }
        };
        // Connections to every server are made before anything counts.
        run(100);
        let before = processor_ticks(&router);
        run(REQUESTS);
        (processor_ticks(&router) - before).max(1)
    };
    for algorithm in ["weighted-round-robin", "kv-aware"] {
        attempts(3, || {
            let (few, many) = (cost(4, algorithm), cost(512, algorithm));
            match many <= few * 3 {
                true => Ok(()),
                false => Err(format!("{algorithm}: {few} ticks with 4 servers, {many} with 512")),
            }
        });
    }
}

/// Processor time of the router so far, in clock ticks.
fn processor_ticks(router: &Router) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", router.pid())).expect("a live process");
    // The name, in parentheses, may hold anything; user and system time are the 12th and 13th field behind it.
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    fields[11].parse::<u64>().expect("ticks") + fields[12].parse::<u64>().expect("ticks")
}
