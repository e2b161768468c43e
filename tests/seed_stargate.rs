//! What the guide to Stargate's load balancing says, sentence by sentence, with its own examples as files and headers.

mod support;

use std::collections::BTreeSet;

use serde_json::json;
use support::stargate::*;
use support::*;

/// The configuration of the guide's Helmfile, as the chart mounts it.
const HELMFILE: &str = r#"{
  "default": "power-of-n",
  "request_algorithms": {
    "round-robin": "round-robin"
  },
  "models": {
    "model-a": {
      "algorithm": "wait-and-widen",
      "cache_affinity_backend_selection_count": 2,
      "cache_affinity_wait_ms": 200
    }
  }
}"#;

#[track_caller]
fn register_for(router: &Router, engine: &Engine, model: &str, ids: &[&str]) -> Vec<Registration> {
    let mut all: Vec<_> = ids.iter().map(|id| Registration::new(id, engine, model, idle())).collect();
    register(router, &mut all);
    all
}

/// "For each pod, check for the `load balancer config loaded` startup log and compare its reported default and
/// model-override count"
#[test]
fn the_helmfiles_configuration_loads_and_says_so() {
    let router = Gateway::new().lb_config(HELMFILE).start();
    let log = router.logged("load balancer config loaded");
    let line =
        log.lines().find(|line| line.contains("load balancer config loaded")).expect("the startup line");
    assert!(line.contains("power-of-n") && line.contains("model_overrides=1"), "{line}");
}

/// "For requests with an affinity key, this example keeps global buckets closed for 200 ms. Stargate can select an
/// available affine candidate immediately." "After the wait, global buckets include all backends".
#[test]
fn global_buckets_stay_closed_for_the_affinity_wait() {
    let engine = engine();
    let router = Gateway::new().lb_config(HELMFILE).start();
    let mut all = register_for(&router, &engine, "model-a", &["a", "b", "c", "d"]);
    let key = [("x-cache-affinity-key", "session")];
    let mut group = BTreeSet::new();
    for _ in 0..30 {
        let asked = now();
        group.insert(sid(&ask(&router, "model-a", &key)));
        assert!(asked.elapsed() < ms(150), "an affine candidate is selected at once");
    }
    assert!(group.len() <= 2, "a group of two: {group:?}");
    // The group fills up: whoever comes now waits for it, then goes to the others.
    let full = but(json!({"max_engine_concurrency": 1, "num_running_queries": 1}));
    let members: Vec<String> = group_of_two(&router, &key);
    for one in all.iter_mut().filter(|one| members.contains(&one.id)) {
        one.report(&router, "model-a", full.clone());
    }
    let asked = now();
    let served_by = sid(&ask(&router, "model-a", &key));
    assert!(asked.elapsed() >= ms(195), "served by {served_by} after {:?}", asked.elapsed());
    assert!(!members.contains(&served_by), "{served_by} is full");
    let labels = [("model", "model-a"), ("selection", "fallback")];
    router.wait_metric("stargate_routing_selections_total", &labels, 1.0, seconds(5));
}

/// Both members of a key's group: requests until two have been seen.
fn group_of_two(router: &Router, key: &[(&str, &str)]) -> Vec<String> {
    eventually(seconds(10), "both members of the group serve", || {
        let mut seen = BTreeSet::new();
        for _ in 0..60 {
            seen.insert(sid(&ask(router, "model-a", key)));
        }
        if seen.len() == 2 { Ok(seen.into_iter().collect()) } else { Err(format!("{seen:?}")) }
    })
}

/// "An explicit x-max-wait-ms shorter than the configured affinity wait can end routing with HTTP 503 before global
/// buckets become eligible."
#[test]
fn a_short_routing_limit_ends_before_the_affinity_wait() {
    let engine = engine();
    let router = Gateway::new().lb_config(HELMFILE).start();
    let mut all = register_for(&router, &engine, "model-a", &["a", "b", "c", "d"]);
    let key = [("x-cache-affinity-key", "session")];
    let members = group_of_two(&router, &key);
    let full = but(json!({"max_engine_concurrency": 1, "num_running_queries": 1}));
    for one in all.iter_mut().filter(|one| members.contains(&one.id)) {
        one.report(&router, "model-a", full.clone());
    }
    let asked = now();
    assert_bare(
        &ask(&router, "model-a", &[("x-cache-affinity-key", "session"), ("x-max-wait-ms", "50")]),
        503,
    );
    let waited = asked.elapsed();
    assert!(waited >= ms(45) && waited < ms(190), "{waited:?}");
    // "x-request-slo-ms … does not shorten the affinity wait."
    let asked = now();
    let slo = [("x-cache-affinity-key", "session"), ("x-request-slo-ms", "10")];
    assert_eq!(ask(&router, "model-a", &slo).status, 200);
    assert!(asked.elapsed() >= ms(195));
}

/// A request that waits for its group takes the slot that becomes free there, at once.
#[test]
fn a_freed_slot_of_the_group_ends_the_affinity_wait() {
    let engine = engine();
    let file = HELMFILE.replace("200", "30000");
    let router = Gateway::new().lb_config(&file).start();
    let mut all = register_for(&router, &engine, "model-a", &["a", "b", "c", "d"]);
    let key = [("x-cache-affinity-key", "session")];
    let members = group_of_two(&router, &key);
    let full = but(json!({"max_engine_concurrency": 1, "num_running_queries": 1}));
    for one in all.iter_mut().filter(|one| members.contains(&one.id)) {
        one.report(&router, "model-a", full.clone());
    }
    let before = engine.request_count();
    let mut waiting = router.client();
    waiting.send(&wish("model-a", &key));
    pause(ms(150));
    assert_eq!(engine.request_count(), before, "it waits");
    let freed = all.iter_mut().find(|one| one.id == members[0]).expect("a member");
    let id = freed.id.clone();
    let told = now();
    freed.report(&router, "model-a", but(json!({"max_engine_concurrency": 1})));
    assert_eq!(sid(&waiting.response()), id);
    assert!(told.elapsed() < seconds(5), "woken by the change, not by the clock");
}

/// "When neither value is set, Stargate uses its built-in power-of-n default and accepts a routing-method override when
/// it is in the allowlist of built-in algorithms."
#[test]
fn without_a_file_power_of_n_is_the_default_and_all_may_be_asked_for() {
    let engine = engine();
    let router = Gateway::new().start();
    register_for(&router, &engine, "m", &["a", "b"]);
    assert_eq!(ask(&router, "m", &[]).status, 200);
    let labels = [("model", "m"), ("algorithm", "power-of-n"), ("selection", "primary")];
    router.wait_metric("stargate_routing_selections_total", &labels, 1.0, seconds(5));
}

/// "when a configuration is set and power-of-n is the effective algorithm, wait_and_widen requires a wait-and-widen entry
/// in request_algorithms. The legacy groq_multiregion value remains accepted and resolves to the same algorithm."
#[test]
fn an_override_needs_an_entry_and_aliases_are_folded() {
    let engine = engine();
    for (file, status) in [
        (r#"{"default":"power-of-n"}"#, 400),
        (r#"{"default":"power-of-n","request_algorithms":{"wait-and-widen":"wait-and-widen"}}"#, 200),
        (r#"{"default":"powerOf2","request_algorithms":{"groq-multiregion":"groq-multiregion"}}"#, 200),
    ] {
        let router = Gateway::new().lb_config(file).start();
        register_for(&router, &engine, "m", &["a"]);
        for value in ["wait_and_widen", "groq_multiregion", "Wait-And-Widen"] {
            let response = ask(&router, "m", &[("x-routing-method", value)]);
            assert_eq!(response.status, status, "{file} {value}: {}", response.text());
            if status == 400 {
                assert_code(&response, 400, "unavailable");
            }
        }
    }
}

/// The two expressions of the guide, as written.
#[test]
fn the_guides_expressions_route() {
    let engine = engine();
    let router = Gateway::new().start();
    let roomy = but(json!({
        "kv_cache_capacity_tokens": 1024, "kv_cache_used_tokens": 24, "kv_cache_free_tokens": 1000
    }));
    let mut all: Vec<_> =
        ["a", "b", "c"].iter().map(|id| Registration::new(id, &engine, "m", roomy.clone())).collect();
    register(&router, &mut all);
    for value in [
        "pulsar;seed=stable-a;consider_kv_free_tokens=true",
        "wait-and-widen;n=3;max_queue_time_floor_ms=200;max_queue_time_ceil_ms=2000",
        "wait-and-widen;next_bucket_unlock_factor=\"0.0625\"",
    ] {
        let response = ask(&router, "m", &[("x-routing-method", value), ("x-cache-affinity-key", "k")]);
        assert_eq!(response.status, 200, "{value}: {}", response.text());
    }
}

/// "For example, the value wait-and-widen;n=3 logs: effective={…}"
#[test]
fn the_effective_configuration_is_logged_as_the_guide_shows_it() {
    const EFFECTIVE: &str = r#"{"algorithm":"wait-and-widen","comparator":"ttft","cache_affinity_virtual_nodes":150,"cache_affinity_input_tokens_scale":1.0,"cache_affinity_wait_ms":0,"ttft_bucket_size_ms":20,"next_bucket_unlock_factor":0.25,"n":3,"max_queued":0,"ignore_queue_time":false,"ignore_input_processing_time":false,"require_cache_affinity_key":false,"require_input_tokens":false}"#;
    let engine = engine();
    let router = Gateway::new().start();
    register_for(&router, &engine, "m", &["a"]);
    let value = [("x-routing-method", "wait-and-widen;n=3")];
    for _ in 0..3 {
        assert_eq!(ask(&router, "m", &value).status, 200);
    }
    let log = eventually(seconds(5), "the line is logged", || {
        let log = router.log();
        if log.contains("routing expression configuration built") { Ok(log) } else { Err(log) }
    });
    let lines: Vec<_> =
        log.lines().filter(|line| line.contains("routing expression configuration built")).collect();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    for part in [&format!("effective={EFFECTIVE}")[..], "outcome=build", "expression=wait-and-widen;n=3"] {
        assert!(
            lines[0]
                .replace("\\\"", "\"")
                .replace("\"wait-and-widen;n=3\"", "wait-and-widen;n=3")
                .contains(part),
            "{part} in {}",
            lines[0]
        );
    }
}

/// "For each routing key and model, each router keeps the configurations of the two most recent values … A third value
/// replaces the older one."
#[test]
fn a_third_value_replaces_the_older_one() {
    let engine = engine();
    let router = Gateway::new().start();
    register_for(&router, &engine, "m", &["a", "b", "c"]);
    let turn = |value: &str| sid(&ask(&router, "m", &[("x-routing-method", value)]));
    let (one, two, three) = (
        "round-robin;require_input_tokens=false",
        "round-robin; require_input_tokens=false",
        "round-robin;require_input_tokens=true",
    );
    assert_eq!([turn(one), turn(two), turn(one), turn(two)], ["a", "a", "b", "b"]);
    assert_eq!(turn(three), "a");
    assert_eq!(turn(two), "c", "still there");
    assert_eq!(turn(one), "a", "a new value starts with new load-balancer state");
}

/// "Validate routing", steps 1 to 6.
#[test]
fn routing_is_validated_as_the_guide_does_it() {
    let busy = Engine::start(|exchange| exchange.reply(429, &[("x-stargate-retryable", "true")], b"{}"));
    let engine = engine();
    let file = r#"{"default":"power-of-n","request_algorithms":{"pulsar":"pulsar"}}"#;
    let router = Gateway::new().lb_config(file).start();
    let mut all = register_for(&router, &engine, "m", &["a", "b", "c"]);
    // 1. Without a routing method.
    assert_eq!(ask(&router, "m", &[]).status, 200);
    // 2. A method present in request_algorithms.
    assert_eq!(ask(&router, "m", &[("x-routing-method", "pulsar")]).status, 200);
    // 3. One that is neither.
    assert_code(&ask(&router, "m", &[("x-routing-method", "round-robin")]), 400, "unavailable");
    // 4. A parameter that applies; then an unknown one.
    assert_eq!(ask(&router, "m", &[("x-routing-method", "pulsar;seed=test")]).status, 200);
    let response = ask(&router, "m", &[("x-routing-method", "pulsar;widen=2")]);
    assert_code(&response, 400, "unknown_parameter");
    assert!(response.text().contains("widen") && response.text().contains("pulsar"), "{}", response.text());
    // 5. A multi-turn request with the same key.
    let key = [("x-routing-method", "pulsar;seed=test"), ("x-cache-affinity-key", "conversation-7")];
    let served: BTreeSet<_> = (0..10).map(|_| sid(&ask(&router, "m", &key))).collect();
    assert_eq!(served.len(), 1);
    // 6. A saturated backend: selection and retry counters change.
    let before = router.metrics();
    all.push(Registration::new("d", &busy, "m", but(json!({"last_mean_input_tps": 100_000_000}))));
    register(&router, &mut all);
    for number in 0..40 {
        let number = number.to_string();
        let headers = [("x-routing-method", "pulsar"), ("x-cache-affinity-key", &number)];
        assert_ne!(sid(&ask(&router, "m", &headers)), "d");
    }
    eventually(seconds(5), "the counters change", || {
        let after = router.metrics();
        let grew = |name: &str| after.sum(name, &[("model", "m")]) > before.sum(name, &[("model", "m")]);
        match grew("stargate_routing_selections_total") && grew("stargate_proxy_retries_total") {
            true => Ok(()),
            false => Err(after.text),
        }
    });
}

/// "Pod does not start after a configuration change: Inspect request-router logs for file read, JSON parse, unknown field,
/// or algorithm factory errors."
#[test]
fn a_wrong_file_keeps_the_router_from_starting_and_says_all_that_is_wrong() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("lb-config.json");
    let start = |flag: &str| {
        run_to_exit(
            &[
                "stargate",
                "--stargate-id=s",
                "--advertise-addr=127.0.0.1:1",
                "--stargate-discovery-dns-name=d",
                "--http-listen-addr=127.0.0.1:0",
                "--metrics-port=0",
                "--admin=127.0.0.1:0",
                flag,
            ],
            seconds(10),
        )
    };
    let flag = format!("--lb-config-path={}", file.display());
    for (text, said) in [
        ("{", &["lb-config.json"][..]),
        (r#"{"defaults":"pulsar"}"#, &["defaults", "default"]),
        (
            r#"{"default":"sticky","models":{"m":{"algorithm":"random","sample_count":2,"seed":"x"}}}"#,
            &["sticky", "models.m", "sample_count, seed", "random"],
        ),
        (r#"{"models":{"m":{"algorithm":"power-of-n","sample_count":65}}}"#, &["sample_count", "65", "64"]),
        (
            r#"{"models":{"m":{"algorithm":"wait-and-widen","consider_kv_free_tokens":false}}}"#,
            &["consider_kv_free_tokens"],
        ),
        (r#"{"request_algorithms":{"pulsar":"random"}}"#, &["request_algorithms", "pulsar", "random"]),
    ] {
        std::fs::write(&file, text).expect("a writable temporary directory");
        let ended = start(&flag);
        assert_eq!(ended.code, Some(1), "{text}: {}", ended.stderr);
        for part in said {
            assert!(ended.stderr.contains(part), "{part} in {}", ended.stderr);
        }
    }
    let ended = start("--lb-config-path=/nonexistent/lb-config.json");
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("/nonexistent/lb-config.json"), "{}", ended.stderr);
}

/// "Keep router headers trusted": on the default profile callers cannot steer routing, and engines see none of it.
#[test]
fn on_the_openai_profile_router_headers_of_callers_go_no_further() {
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &[]).start();
    let names = [
        "x-routing-key",
        "x-model",
        "x-routing-method",
        "x-input-tokens",
        "x-cache-affinity-key",
        "x-priority",
        "x-request-slo-ms",
        "x-max-wait-ms",
        "x-stargate-max-wait-ms",
        "x-stargate-expected-queue-ms",
        "x-stargate-retryable",
    ];
    let mut headers: Vec<_> = names.iter().map(|name| (*name, "nonsense")).collect();
    headers.extend([("x-request-id", "mine"), ("x-multi-turn-session-id", "session")]);
    let response = router.client().ask("POST", CHAT, &headers, &chat("m", "hello"));
    assert_eq!(response.status, 200, "{}", response.text());
    let seen = engine.wait_requests(1).remove(0).head;
    for name in names {
        assert!(!seen.has(name), "{name} in {}", seen.text());
    }
    assert_eq!(seen.one("x-request-id").as_deref(), Some("mine"));
    // "Preserve x-multi-turn-session-id; clients can use it for session affinity."
    assert_eq!(seen.one("x-multi-turn-session-id").as_deref(), Some("session"));
}
