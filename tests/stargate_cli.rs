//! `ringway stargate`: the command line of the Stargate rules, section 4.6.

mod support;

use std::process::Stdio;
use std::sync::Arc;

use serde_json::json;
use support::router::{Ended, command};
use support::stargate::*;
use support::*;

/// What every command line has.
const REQUIRED: [&str; 3] =
    ["--stargate-id=sg-0", "--advertise-addr=10.0.0.1:50071", "--stargate-discovery-dns-name=sg.local"];
const FREE_PORTS: [&str; 3] = ["--http-listen-addr=127.0.0.1:0", "--metrics-port=0", "--admin=127.0.0.1:0"];

/// Runs one that is expected to end by itself.
fn run(flags: &[&str]) -> Ended {
    let all: Vec<&str> =
        ["stargate"].iter().chain(&REQUIRED).chain(&FREE_PORTS).chain(flags).copied().collect();
    run_to_exit(&all, seconds(10))
}

#[test]
fn it_says_where_it_listens_and_what_it_is() {
    let router = Gateway::new().start();
    let log = router.logged("metrics server listening");
    let starting = log.lines().find(|line| line.contains("starting stargate")).expect("the first line");
    assert!(starting.contains("stargate_id=sg-test"), "{starting}");
    let metrics = log.lines().find(|line| line.contains("metrics server listening")).expect("its line");
    assert!(metrics.contains(&router.metrics_address().to_string()), "{metrics}");
    assert!(!log.contains("load balancer config loaded"), "there is no file");
    assert!(
        router.metrics_address().ip().is_unspecified(),
        "metrics are for every address, as they are there"
    );
    let state = router.get("/debug/state").json();
    assert_eq!(
        state["config"],
        json!({
            "stargate_id": "sg-test", "grpc_listen_addr": "0.0.0.0:50071",
            "model_discovery_listen_addr": "0.0.0.0:50073", "http_listen_addr": router.http().to_string(),
            "metrics_listen_addr": router.metrics_address().to_string(), "advertise_addr": "127.0.0.1:50071",
            "stargate_discovery_dns_name": "stargate.test", "tunnel_protocol": "raw-quic",
            "backend_connectivity": "direct", "direct_quic_connections": 1
        })
    );
}

#[test]
fn a_required_flag_that_is_missing_is_named() {
    for missing in REQUIRED {
        let kept: Vec<&str> = REQUIRED.into_iter().filter(|flag| *flag != missing).collect();
        let ended = run_to_exit(&[&["stargate"][..], &FREE_PORTS, &kept].concat(), seconds(10));
        let name = missing.split('=').next().expect("a name");
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains(name) && ended.stdout.is_empty(), "{}", ended.stderr);
    }
}

#[test]
fn faulty_values_come_at_once_by_their_flags_and_variables() {
    let ended = run(&[
        "--proxy-max-request-retries=-1",
        "--quic-request-timeout-ms=0",
        "--metrics-prefix=9x",
        "--proxy-retry-budget-header=a b",
        "--backend=gpu0=ftp://h",
        "--lb-config-path=/nonexistent.json",
    ]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
    assert!(ended.stderr.starts_with("ringway stargate: 6 faults\n"), "{}", ended.stderr);
    for said in [
        "--backend (or RINGWAY_BACKEND): \"ftp://h\": expected http://",
        "--proxy-max-request-retries (or STARGATE_PROXY_MAX_REQUEST_RETRIES): -1: expected a whole number",
        "--quic-request-timeout-ms: 0: expected a whole number from 1",
        "--metrics-prefix: \"9x\": expected at most 64 letters",
        "--proxy-retry-budget-header (or STARGATE_PROXY_RETRY_BUDGET_HEADER): \"a b\": expected a header's name",
        "--lb-config-path: \"/nonexistent.json\": expected a readable file",
    ] {
        assert!(ended.stderr.lines().any(|line| line.starts_with(said)), "{said} in {}", ended.stderr);
    }
    let all: Vec<&str> = ["stargate"].iter().chain(&REQUIRED).chain(&FREE_PORTS).copied().collect();
    let output = command(&all).env("STARGATE_PROXY_MAX_CONNECT_RETRIES", "101").output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("STARGATE_PROXY_MAX_CONNECT_RETRIES): 101: expected a whole number from 0 to 100"),
        "{text}"
    );
}

/// Every flag of what this version does not have is taken and told once, and only when it was given.
#[test]
fn flags_of_what_is_not_there_are_taken_with_a_warning_each() {
    const WITHOUT: [&str; 24] = [
        "--listen-addr=0.0.0.0:50071",
        "--model-discovery-listen-addr=0.0.0.0:50073",
        "--remote-stargate-url=http://a:1,http://b:1",
        "--grpc-pylon-dial-addr=a:1",
        "--advertised-hostname-template={pod_name}.x",
        "--pod-name=p",
        "--pod-namespace=n",
        "--dns-poll-ms=1000",
        "--dns-resolver-ttl-ms=1000",
        "--watch-heartbeat-ms=5000",
        "--direct-quic-connections=2",
        "--tls-cert-path=/c.pem",
        "--tls-key-path=/k.pem",
        "--quic-insecure",
        "--otel-endpoint=http://o:4317",
        "--otel-service-name=stargate",
        "--backend-connectivity=reverse",
        "--reverse-tunnel-listen-addr=0.0.0.0:1",
        "--reverse-tunnel-pylon-dial-addr=a:1",
        "--reverse-tunnel-connect-timeout-ms=10000",
        "--tunnel-protocol=http3",
        "--worker-auth-endpoint=http://w:1",
        "--secrets-path=/s.json",
        "--registration-update-idle-timeout-ms=0",
    ];
    let warned = |log: &str, flag: &str| {
        let start = format!("WARN {}: ", flag.split('=').next().expect("a name"));
        log.lines().filter(|line| line.contains(&start)).count()
    };
    let mut gateway = Gateway::new();
    for flag in WITHOUT {
        gateway = match flag.split_once('=') {
            Some((name, value)) => gateway.flag(name, value),
            None => gateway.switch(flag),
        };
    }
    let router = gateway.start();
    let log = router.logged("ringway runs");
    for flag in WITHOUT {
        assert_eq!(warned(&log, flag), 1, "{flag} in {log}");
    }
    assert_eq!(warned(&log, "--stargate-discovery-dns-name"), 1, "nobody is found by it");
    let config = router.get("/debug/state").json()["config"].clone();
    assert_eq!(
        (&config["tunnel_protocol"], &config["direct_quic_connections"]),
        (&json!("http3"), &json!(2))
    );

    let quiet = Gateway::new().switch("--disable-dns-discovery").start();
    let log = quiet.log();
    assert!(!log.contains("WARN --"), "{log}");
}

#[test]
fn servers_named_on_the_command_line_serve_what_their_engines_list() {
    let (one, two) = (engine(), engine());
    one.set_models(Probe::models(&["a"]));
    two.set_models(Probe::models(&["a", "b"]));
    let router = Gateway::new()
        .flag("--backend", &format!("gpu0={},gpu1={}", one.url(), two.url()))
        .lb_config(r#"{"default":"round-robin"}"#)
        .start();
    // What it says with `ready` holds: engines have been asked by then.
    let served: Vec<String> = (0..4).map(|_| sid(&ask(&router, "a", &[]))).collect();
    assert_eq!(served, ["gpu0", "gpu1", "gpu0", "gpu1"]);
    assert_eq!(sid(&ask(&router, "b", &[])), "gpu1");
    assert_eq!(router.get("/v1/models").json(), json!({"model_ids": ["a", "b"]}));
    assert_eq!(router.admin_get("/readiness").status, 200);
}

#[test]
fn a_metrics_listener_serves_metrics_alone_and_the_prefix_is_replaced() {
    let engine = engine();
    let router = Gateway::new().flag("--metrics-prefix", "sg_").start();
    Registration::new("a", &engine, "m", idle()).renew(&router);
    assert_eq!(sid(&ask(&router, "m", &[])), "a");
    let at = std::net::SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), router.metrics_address().port());
    let page = eventually(seconds(5), "the request is counted", || {
        let page = once(at, "GET", "/metrics", b"");
        let counted = page.text().contains(
            r#"sg_requests_total{routing_key="",model="m",inference_server_id="a",status="200"} 1"#,
        );
        if counted { Ok(page) } else { Err(page.text()) }
    });
    assert_eq!(page.header("content-type").as_deref(), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert!(!page.text().contains("stargate_"), "{}", page.text());
    for (method, target, status) in [
        ("GET", "/", 404),
        ("GET", "/admin/v1/state", 404),
        ("PUT", "/v1/registrations/x", 404),
        ("POST", "/admin/v1/servers/a/drain", 404),
        ("POST", "/metrics", 405),
    ] {
        assert_eq!(once(at, method, target, b"").status, status, "{method} {target}");
    }
    assert_eq!(sid(&ask(&router, "m", &[])), "a", "nothing was drained");
    assert!(router.admin_get("/metrics").text().contains("sg_requests_total"), "the same page");
}

#[test]
fn an_orderly_end_is_zero_and_a_forced_one_is_one() {
    let mut idle_router = Gateway::new().start();
    idle_router.signal(libc::SIGTERM);
    assert_eq!(idle_router.wait_exit(seconds(10)), Some(0));
    idle_router.logged("graceful shutdown complete");
    for second_signal in [true, false] {
        let gate = Gate::new();
        let held = Arc::clone(&gate);
        let engine = Engine::start(move |exchange| {
            held.pass(seconds(20));
            exchange.reply_ok()
        });
        let limit = if second_signal { "30000" } else { "200" };
        let mut router = Gateway::new().flag("--shutdown-drain-timeout-ms", limit).start();
        register(&router, &mut [Registration::new("a", &engine, "m", idle())]);
        let mut busy = router.client();
        busy.send(&wish("m", &[]));
        engine.wait_requests(1);
        router.signal(libc::SIGTERM);
        if second_signal {
            pause(ms(100));
            router.signal(libc::SIGTERM);
        }
        assert_eq!(router.wait_exit(seconds(10)), Some(1), "{}", router.log());
        assert!(!router.log().contains("graceful shutdown complete"));
        gate.open();
    }
}

#[test]
fn an_occupied_port_ends_with_one_and_says_what_to_do() {
    let occupied = std::net::TcpListener::bind("0.0.0.0:0").expect("a free port");
    let port = occupied.local_addr().expect("an address").port();
    for (flag, value) in [
        ("--http-listen-addr", format!("0.0.0.0:{port}")),
        ("--metrics-port", port.to_string()),
        ("--admin", format!("127.0.0.1:{port}")),
    ] {
        let given = format!("{flag}={value}");
        let mut all = vec!["stargate"];
        all.extend(REQUIRED);
        all.extend(FREE_PORTS.into_iter().filter(|free| !free.starts_with(flag)));
        all.push(&given);
        let ended = run_to_exit(&all, seconds(10));
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{}", ended.stderr);
        assert!(
            ended.stderr.contains(&format!(":{port}")) && ended.stderr.contains("choose another port"),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn leases_follow_the_registration_timeouts() {
    let engine = engine();
    let router = Gateway::new().flag("--registration-update-max-idle-timeout-ms", "2000").start();
    let one = Registration::new("a", &engine, "m", idle());
    let answer = one.put(&router);
    assert_eq!(
        (answer.status, &answer.json()["ttl_ms"]),
        (200, &json!(2000)),
        "the longest wins over the usual"
    );
    let mut body = Registration::new("b", &engine, "m", idle()).body();
    body["ttl_ms"] = json!(3000);
    let refused = router.admin_ask("PUT", "/v1/registrations/b", &body.to_string());
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("from 1000 to 2000"), "{}", refused.text());
    let clamped = Gateway::new().flag("--registration-update-idle-timeout-ms", "900000").start();
    assert_eq!(one.put(&clamped).json()["ttl_ms"], 300_000);
    assert!(clamped.log().contains("registrations hold from 1000 to 300000 ms"), "{}", clamped.log());
}

/// `ringway check` and `ringway serve` read the same file, relative to the configuration's.
#[test]
fn the_algorithms_file_of_a_configuration_is_checked_with_it() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).expect("a writable temporary directory");
        path.to_str().expect("UTF-8 path").to_owned()
    };
    let config = file(
        "ringway.toml",
        "[[listener]]\naddress = \"127.0.0.1:0\"\nprofile = \"stargate\"\n[admin]\naddress = \"127.0.0.1:0\"\n\
         [stargate]\nlb_config_path = \"lb.json\"\nmax_connect_retries = -1\n",
    );
    let lb_config =
        file("lb.json", r#"{"default":"sticky","models":{"m":{"algorithm":"random","seed":"x"}}}"#);
    for arguments in [&["check", config.as_str()][..], &["serve", "--config", &config]] {
        let ended = run_to_exit(arguments, seconds(10));
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains(": 3 faults\n"), "{}", ended.stderr);
        let of_lb_config =
            ended.stderr.lines().filter(|line| line.starts_with(&format!("{lb_config}: "))).count();
        assert_eq!(of_lb_config, 2, "{}", ended.stderr);
        assert!(ended.stderr.contains("stargate.max_connect_retries: -1: "), "{}", ended.stderr);
    }
    file("ringway.toml", &std::fs::read_to_string(&config).unwrap().replace("-1", "1"));
    file("lb.json", r#"{"default":"pulsar","models":{"m":"random","n":"pulsar"}}"#);
    let ended = run_to_exit(&["check", &config], seconds(10));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert!(ended.stdout.contains(&format!("lb_config_path = \"{lb_config}\"")), "{}", ended.stdout);
    let router = Router::spawn_as(&["serve", "--config", &config], "stargate");
    let log = router.logged("load balancer config loaded");
    let line = log.lines().find(|line| line.contains("load balancer config loaded")).expect("its line");
    assert!(line.contains("default_lb=pulsar") && line.contains("model_overrides=2"), "{line}");
}

#[test]
fn help_tells_defaults_variables_and_exit_codes() {
    let help = command(&["stargate", "--help"]).stderr(Stdio::piped()).output().expect("it runs");
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    assert_eq!(help.status.code(), Some(0));
    for word in [
        "--proxy-require-pylon-retry-signal",
        "STARGATE_REMOTE_WATCH_URLS",
        "POD_NAMESPACE",
        "0.0.0.0:8000",
        "/v1/registrations/",
        "Exit codes",
        "without effect in this version",
    ] {
        assert!(text.contains(word), "{word} in {text}");
    }
}
