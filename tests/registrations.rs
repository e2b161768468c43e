//! Servers that register over HTTP: the configuration reference, admin API, and the Stargate rules, section 8.2.

mod support;

use std::io::{Read, Write};

use serde_json::{Value, json};
use support::router::command;
use support::stargate::*;
use support::*;

#[track_caller]
fn put(router: &Router, id: &str, body: &Value) -> Response {
    router.admin_ask("PUT", &format!("/v1/registrations/{id}"), &body.to_string())
}

#[track_caller]
fn delete(router: &Router, id: &str) -> Response {
    router.admin_ask("DELETE", &format!("/v1/registrations/{id}"), "")
}

#[track_caller]
fn refused(response: &Response, status: u16, code: &str, said: &str) {
    assert_eq!(response.status, status, "{}", response.text());
    let error = &response.json()["error"];
    assert_eq!(error["code"], code, "{error}");
    assert!(error["message"].as_str().is_some_and(|text| text.contains(said)), "{said:?} in {error}");
}

fn unix_ms() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "what the router says is compared with the host's clock")]
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.expect("after 1970").as_millis() as u64
}

#[test]
fn a_registration_is_answered_with_its_lease_and_takes_requests_from_then_on() {
    let engine = engine();
    for shards in [1, 2] {
        let router = Gateway::new().shards(shards).start();
        let before = unix_ms();
        let answer = Registration::new("pod/a", &engine, "m", idle()).put_as(&router, "pod%2Fa");
        assert_eq!(answer.status, 200, "{}", answer.text());
        let json = answer.json();
        assert_eq!(json["ttl_ms"], 60_000);
        assert!(json["lease"].as_str().is_some_and(|lease| lease.len() == 32), "{json}");
        let expires = json["expires_at_unix_ms"].as_u64().expect("a time");
        assert!((before + 59_000..=unix_ms() + 60_000).contains(&expires), "{expires} after {before}");
        // No waiting: every shard has it.
        for _ in 0..8 {
            let response = ask(&router, "m", &[]);
            assert_eq!(sid(&response), "pod/a");
            assert_eq!(response.header("x-inference-server-url"), Some(engine.url()));
            assert_eq!(response.header("x-stargate-cluster-id").as_deref(), Some("pod/a"));
        }
        let log = router.logged("register inference servers stream opened");
        let opened = log.lines().find(|line| line.contains("register inference servers stream opened"));
        assert!(opened.is_some_and(|line| line.contains("pod/a")), "{log}");
    }
}

#[test]
fn a_live_id_belongs_to_whoever_has_its_lease() {
    let engine = engine();
    engine.set_models(Probe::models(&["fixed"]));
    let router = Gateway::new().flag("--backend", &format!("fixed={}", engine.url())).start();
    let mut one = Registration::new("a", &engine, "m", idle());
    one.renew(&router);
    let lease = one.lease.clone();
    refused(
        &Registration::new("a", &engine, "m", idle()).put(&router),
        409,
        "registration_held",
        "not its lease",
    );
    one.lease = Some("0".repeat(32));
    refused(&one.put(&router), 409, "registration_held", "\"a\" is registered");
    one.lease.clone_from(&lease);
    one.renew(&router);
    assert_eq!(one.lease, lease, "a lease stays the same");
    let fixed = Registration::new("fixed", &engine, "m", idle());
    refused(&fixed.put(&router), 409, "registration_held", "the configuration");
    assert_eq!(sid(&ask(&router, "m", &[])), "a", "a stranger closed nothing");
    refused(
        &router.admin_ask("DELETE", "/v1/registrations/a?lease=other", ""),
        409,
        "registration_held",
        "\"a\"",
    );
    let closed = router.admin_ask("DELETE", &format!("/v1/registrations/a?lease={}", lease.unwrap()), "");
    assert_eq!((closed.status, closed.json()), (200, json!({"closed": "a"})));
    refused(&delete(&router, "a"), 404, "no_such_registration", "\"a\"");
    assert_bare(&ask(&router, "m", &[]), 503);
    router.logged("register inference servers stream closed");
    // Its lease is void, and no hindrance.
    one.renew(&router);
    assert_ne!(one.lease.as_deref(), Some("0"));
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
}

#[test]
fn what_may_not_change_ends_the_registration() {
    let (engine, other) = (engine(), engine());
    let router = Gateway::new().start();
    for (field, changed) in [
        ("url", json!({"url": other.url()})),
        ("cluster_id", json!({"cluster_id": "elsewhere"})),
        ("routing_key", json!({"routing_key": "fn-2"})),
    ] {
        let mut one = Registration::new("a", &engine, "m", idle()).cluster("c").key("fn-1");
        register(&router, std::slice::from_mut(&mut one));
        let key = [("x-routing-key", "fn-1")];
        assert_eq!(sid(&ask(&router, "m", &key)), "a");
        let mut body = one.body();
        body.as_object_mut().unwrap().extend(changed.as_object().unwrap().clone());
        refused(&put(&router, "a", &body), 400, "registration_changed", field);
        assert_bare(&ask_until(&router, "m", &key, "it is closed", |response| response.status == 503), 503);
        wait_active(&router, "fn-1", "m", 0);
    }
    assert_eq!(other.request_count(), 0);
}

#[test]
fn a_registration_that_is_not_renewed_runs_out() {
    let engine = engine();
    let router = Gateway::new().flag("--deregistered-model-grace-ms", "0").start();
    let mut body = Registration::new("a", &engine, "m", idle()).body();
    body["ttl_ms"] = json!(1000);
    let asked = now();
    let answer = put(&router, "a", &body);
    assert_eq!((answer.status, &answer.json()["ttl_ms"]), (200, &json!(1000)));
    wait_active(&router, "", "m", 1);
    // A renewal holds it for as long again.
    pause(ms(700));
    body["lease"] = answer.json()["lease"].clone();
    let renewed = now();
    assert_eq!(put(&router, "a", &body).status, 200);
    router.wait_metric("stargate_active_inference_servers", &[("model", "m")], 0.0, seconds(10));
    assert!(renewed.elapsed() >= ms(950), "{:?} after the renewal", renewed.elapsed());
    assert!(asked.elapsed() >= ms(1650));
    let gone = ask_until(&router, "m", &[], "it is unknown", |response| response.status == 404);
    assert_code(&gone, 404, "no_eligible_candidates");
    router.logged("registration stream idle timeout; closing registration");
    // The lease that ran out opens it again, and gets a new one.
    let again = put(&router, "a", &body);
    assert_eq!(again.status, 200);
    assert_ne!(again.json()["lease"], body["lease"]);
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
}

#[test]
fn every_registration_is_a_full_snapshot() {
    let engine = engine();
    let router = Gateway::new().start();
    let mut one = Registration::new("a", &engine, "m", idle()).model("off", "inactive", idle());
    one.renew(&router);
    // Advertised and not active: 503. Without statistics a model is not active.
    one.models.insert("silent".into(), json!({"status": "active", "stats": null}));
    one.models.insert("late".into(), json!({"status": "active", "stats": {}}));
    one.renew(&router);
    router.settle();
    assert_eq!(sid(&ask(&router, "late", &[])), "a", "a model that came later");
    for model in ["off", "silent"] {
        assert_bare(&ask(&router, model, &[]), 503);
    }
    assert_eq!(router.get("/v1/models").json(), json!({"model_ids": ["late", "m"]}));
    one.models.remove("m");
    one.models.insert("off".into(), json!({"status": "active", "stats": {}}));
    one.renew(&router);
    router.settle();
    assert_bare(&ask(&router, "m", &[]), 503);
    assert_eq!(sid(&ask(&router, "off", &[])), "a");
    assert_eq!(router.get("/v1/models").json(), json!({"model_ids": ["late", "off"]}));
}

#[test]
fn a_faulty_registration_names_every_fault_and_changes_nothing() {
    let engine = engine();
    let router = Gateway::new().start();
    let mut one = Registration::new("a", &engine, "m", idle());
    register(&router, std::slice::from_mut(&mut one));
    let mut body = one.body();
    body["clusterid"] = json!("c");
    body["ttl_ms"] = json!(300_001);
    body["models"]["m"]["stats"]["queue_sise"] = json!(1);
    let answer = put(&router, "a", &body);
    refused(
        &answer,
        400,
        "bad_registration",
        "models.m.stats.queue_sise: 1: unknown field; nearest known field: \"queue_size\"",
    );
    refused(
        &answer,
        400,
        "bad_registration",
        "clusterid: \"c\": unknown field; nearest known field: \"cluster_id\"",
    );
    refused(&answer, 400, "bad_registration", "ttl_ms: 300001: expected a whole number from 1000 to 300000");
    assert_eq!(answer.json()["error"]["faults"].as_array().map(Vec::len), Some(3));
    refused(
        &router.admin_ask("PUT", "/v1/registrations/b", "{"),
        400,
        "bad_registration",
        "expected a JSON object",
    );
    let spaced = put(&router, "a%20b", &one.body());
    refused(&spaced, 400, "bad_registration", "expected an id of 1 to 256");
    let long = put(&router, "b", &json!({"url": engine.url(), "models": {}, "x": "x".repeat(2 << 20)}));
    assert_eq!((long.status, &long.json()["error"]["code"]), (413, &json!("body_too_large")));
    refused(&router.admin_ask("DELETE", "/v1/registrations/a?leese=1", ""), 400, "bad_registration", "leese");
    let wrong = router.admin_ask("POST", "/v1/registrations/a", "{}");
    assert_eq!((wrong.status, wrong.header("allow").as_deref()), (405, Some("PUT, DELETE")));
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
    assert_eq!(router.state()["registrations"].as_array().map(Vec::len), Some(1));
}

/// The Stargate rules, section 6.6: "a failed probe clears readiness".
#[test]
fn a_registered_server_takes_requests_while_its_checks_succeed() {
    let engine = engine();
    engine.set_health(Probe::Reply(503, "{}".into()));
    let router = Gateway::new().start();
    let mut one = Registration::new("a", &engine, "m", idle());
    one.renew(&router);
    assert_bare(&ask(&router, "m", &[]), 503);
    router.logged("health check failed");
    engine.set_health(Probe::Reply(204, String::new()));
    wait_active(&router, "", "m", 1);
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
    engine.set_health(Probe::Reply(500, "{}".into()));
    wait_active(&router, "", "m", 0);
    assert_bare(&ask(&router, "m", &[]), 503);
    assert_eq!(engine.request_count(), 1);
}

/// The same: checks carry what every request to such a server carries.
#[test]
fn checks_look_like_a_gateway_s_requests() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    let head = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a check");
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).expect("bytes") == 1 {
            head.push(byte[0]);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").expect("the check listens");
        String::from_utf8(head).expect("text")
    });
    let router = Gateway::new().start();
    let url = format!("http://{address}/base");
    assert_eq!(put(&router, "a", &json!({"url": url, "models": {}})).status, 200);
    let head = head.join().expect("a check came").to_ascii_lowercase();
    assert!(head.starts_with("get /base/health http/1.1\r\n"), "{head}");
    for line in ["x-request-id: stargate-health-a", "x-model: stargate-health", "x-input-tokens: 0"] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line} in {head}");
    }
}

#[test]
fn a_server_that_comes_back_goes_on_counting() {
    let (engine, elsewhere) = (engine(), engine());
    let router = Gateway::new().start();
    let count = || {
        router.metrics().sum("stargate_requests_total", &[("inference_server_id", "a"), ("status", "200")])
    };
    for (round, at) in [&engine, &engine, &elsewhere].into_iter().enumerate() {
        Registration::new("a", at, "m", idle()).renew(&router);
        assert_eq!(sid(&ask(&router, "m", &[])), "a");
        eventually(seconds(5), "the request is counted", || match count() {
            found if found == (round + 1) as f64 => Ok(()),
            found => Err(found.to_string()),
        });
        assert_eq!(delete(&router, "a").status, 200);
    }
    assert_eq!((engine.request_count(), elsewhere.request_count()), (2, 1));
}

/// The configuration reference: other listeners never use registrations, and without a trusted one there are none.
#[test]
fn other_listeners_know_nothing_of_registrations() {
    let (pooled, registered) = (Engine::answering(), engine());
    pooled.set_models(Probe::models(&["pooled"]));
    let plain = Setup::new().server("p", &pooled, &[]).start();
    let body = Registration::new("a", &registered, "m", idle()).body();
    refused(&put(&plain, "a", &body), 404, "no_stargate_listener", "profile = \"stargate\"");
    refused(&delete(&plain, "a"), 404, "no_stargate_listener", "profile = \"stargate\"");

    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("ringway.toml");
    let trusted = format!(
        "{}\n[[listener]]\naddress = \"127.0.0.1:0\"\nprofile = \"stargate\"\n",
        Setup::new().server("p", &pooled, &[]).toml()
    );
    std::fs::write(&file, &trusted).expect("a writable temporary directory");
    let both = Both::start(file.to_str().expect("UTF-8 path"));
    assert_eq!(once(both.admin, "PUT", "/v1/registrations/a", body.to_string().as_bytes()).status, 200);
    let served = |address| {
        let mut client = Client::connect(address);
        client.send(&wish("m", &[]));
        client.response()
    };
    assert_eq!(sid(&served(both.trusted)), "a");
    let pool = eventually(seconds(5), "the pool's server is up", || {
        match once(both.open, "POST", "/v1/chat/completions", br#"{"model":"pooled"}"#) {
            response if response.status == 200 => Ok(response),
            response => Err(response.text()),
        }
    });
    assert_eq!(pool.lifeboat("Server").as_deref(), Some("p"));
    let unknown = once(both.open, "POST", "/v1/chat/completions", br#"{"model":"m"}"#);
    unknown.assert_rejected(404, "model_not_found");
    let models = once(both.open, "GET", "/v1/models", b"").json();
    assert_eq!(models["data"].as_array().map(Vec::len), Some(1), "{models}");
    // Both stand in the state, each in its place.
    let state = once(both.admin, "GET", "/admin/v1/state", b"").json();
    assert_eq!(state["registrations"][0]["id"], "a");
    assert_eq!(state["registrations"][0]["models"], json!({"m": "active"}));
    assert!(!state["pools"].to_string().contains("\"a\""), "{state}");
    assert!(!state.to_string().contains("lease"), "leases are their holders' alone");
}

/// A router with an open and a trusted listener.
struct Both {
    child: std::process::Child,
    open: std::net::SocketAddr,
    trusted: std::net::SocketAddr,
    admin: std::net::SocketAddr,
}

impl Both {
    fn start(config: &str) -> Both {
        use std::io::BufRead;
        let mut child = command(&["serve", "--config", config])
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("the binary starts");
        let lines = std::io::BufReader::new(child.stdout.take().expect("piped")).lines();
        let lines: Vec<String> = lines.map_while(Result::ok).take_while(|line| line != "ready").collect();
        let find = |start: &str, end: &str| {
            let line = lines.iter().find(|line| line.starts_with(start) && line.ends_with(end));
            let address = line
                .and_then(|line| line.split(' ').nth(2))
                .unwrap_or_else(|| panic!("{start} in {lines:?}"));
            address.parse().expect("an address")
        };
        let (open, trusted) =
            (find("listening http", "profile=openai"), find("listening http", "profile=stargate"));
        Both { admin: find("listening admin", ""), open, trusted, child }
    }
}

impl Drop for Both {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_operator_can_take_a_registered_server_out_of_service() {
    let gate = Gate::new();
    let held = std::sync::Arc::clone(&gate);
    let one = Engine::start(move |exchange| {
        held.pass(seconds(20));
        exchange.reply_ok()
    });
    let two = engine();
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &one, "m", idle())]);
    let mut busy = router.client();
    busy.send(&wish("m", &[]));
    one.wait_requests(1);
    Registration::new("b", &two, "m", idle()).renew(&router);
    let early = router.admin_ask("POST", "/admin/v1/servers/a/drain?timeout_ms=200", "");
    assert_eq!(
        (&early.json()["idle"], &early.json()["in_flight"]),
        (&json!(false), &json!(1)),
        "{}",
        early.text()
    );
    gate.open();
    assert_eq!(sid(&busy.response()), "a", "what runs is finished");
    let drained = router.admin_ask("POST", "/admin/v1/servers/a/drain", "");
    assert_eq!((drained.status, &drained.json()["idle"]), (200, &json!(true)), "{}", drained.text());
    wait_active(&router, "", "m", 1);
    for _ in 0..6 {
        assert_eq!(sid(&ask(&router, "m", &[])), "b");
    }
}

/// The Stargate rules, section 6.7: what only the engine knows is read from its own metrics.
#[test]
fn what_an_engine_publishes_counts_where_its_registration_says_nothing() {
    let (busy, free) = (engine(), engine());
    let page = |running: u32| {
        Probe::Reply(
            200,
            format!(
                "vllm:num_requests_running{{engine=\"0\"}} {running}\nvllm:num_requests_waiting{{engine=\"0\"}} 0\n"
            ),
        )
    };
    busy.publish("/metrics", page(9));
    free.publish("/metrics", page(0));
    let lb_config = r#"{"models":{"m":{"algorithm":"power-of-n","comparator":"utilization"}}}"#;
    let router = Gateway::new().lb_config(lb_config).start();
    let stats = json!({"last_mean_input_tps": 1000.0});
    register(
        &router,
        &mut [
            Registration::new("a", &busy, "m", stats.clone()),
            Registration::new("b", &free, "m", stats.clone()),
        ],
    );
    let all_to = |id: &str| {
        eventually(seconds(10), "requests follow what the engines say", || {
            let found: Vec<String> = (0..8).map(|_| sid(&ask(&router, "m", &[]))).collect();
            if found.iter().all(|one| one == id) { Ok(()) } else { Err(format!("{found:?}")) }
        });
    };
    all_to("b");
    busy.publish("/metrics", page(1));
    free.publish("/metrics", page(5));
    all_to("a");
}

#[test]
fn what_is_registered_is_forgotten_with_the_process_and_bounded_in_it() {
    let engine = engine();
    let router = Gateway::new().start();
    let models: serde_json::Map<String, Value> =
        (0..257).map(|n| (format!("m{n}"), json!({"status": "active", "stats": {}}))).collect();
    let many = put(&router, "a", &json!({"url": engine.url(), "models": models}));
    refused(&many, 400, "bad_registration", "257 models: expected at most 256");
    let most: serde_json::Map<String, Value> = models.into_iter().take(256).collect();
    assert_eq!(put(&router, "a", &json!({"url": engine.url(), "models": most})).status, 200);
    assert_eq!(sid(&ask(&router, "m255", &[])), "a");
}

/// Registering is for programs: no page in a browser may do it.
#[test]
fn a_page_of_another_origin_registers_nothing() {
    let engine = engine();
    let router = Gateway::new().start();
    let body = Registration::new("a", &engine, "m", idle()).body().to_string();
    let mut client = Client::connect(router.admin());
    let headers = [("origin", "http://example.com"), ("content-type", "application/json")];
    let answer = client.ask("PUT", "/v1/registrations/a", &headers, body.as_bytes());
    refused(&answer, 403, "foreign_origin", "another origin");
    assert_code(&ask(&router, "m", &[]), 404, "no_eligible_candidates");
}

trait PutAs {
    fn put_as(&self, router: &Router, id: &str) -> Response;
}

impl PutAs for Registration {
    /// Under an id that is escaped in the path.
    #[track_caller]
    fn put_as(&self, router: &Router, id: &str) -> Response {
        put(router, id, &self.body())
    }
}
