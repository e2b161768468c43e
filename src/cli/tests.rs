use clap::CommandFactory;

use super::*;

fn serve_args(arguments: &[&str]) -> ServeArgs {
    let all = ["ringway", "serve"].iter().chain(arguments);
    match Cli::try_parse_from(all).unwrap_or_else(|e| panic!("{e}")).command {
        Command::Serve(args) => *args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

/// Every flag of `serve`, a value other than the default, and what it makes of the effective file.
const FLAGS: &[(&str, &str, &str)] = &[
    ("--algorithm", "least-connections", "algorithm = \"least-connections\""),
    ("--routing-mode", "reject", "routing_mode = \"reject\""),
    ("--queue-size", "7", "queue_size = 7"),
    ("--queue-timeout-ms", "8", "queue_timeout_ms = 8"),
    ("--max-concurrency", "0", "max_concurrency = 0"),
    ("--listen", "127.0.0.1:0", "address = \"127.0.0.1:0\""),
    ("--admin", "[::1]:0", "address = \"[::1]:0\""),
    ("--header-prefix", "X-Test-", "prefix = \"X-Test-\""),
    ("--cores", "0,2-3", "cores = \"0,2-3\""),
    ("--driver", "epoll", "driver = \"epoll\""),
    ("--spin-us", "9", "spin_us = 9"),
    ("--body-bytes-max", "10", "body_bytes_max = 10"),
    ("--classify-bytes-max", "11", "classify_bytes_max = 11"),
    ("--connections-max", "12", "connections_max = 12"),
    ("--connect-timeout-ms", "13", "connect_timeout_ms = 13"),
    ("--response-head-timeout-ms", "14", "response_head_timeout_ms = 14"),
    ("--between-bytes-timeout-ms", "15", "between_bytes_timeout_ms = 15"),
    ("--total-timeout-ms", "16", "total_timeout_ms = 16"),
    ("--drain-timeout-ms", "17", "drain_timeout_ms = 17"),
    ("--drain-settle-ms", "18", "drain_settle_ms = 18"),
    ("--half-close", "allow", "half_close = \"allow\""),
    ("--health-path", "/up", "path = \"/up\""),
    ("--health-interval-ms", "19", "interval_ms = 19"),
    ("--health-timeout-ms", "20", "timeout_ms = 20"),
    ("--log-level", "trace", "level = \"trace\""),
    ("--log-format", "json", "format = \"json\""),
];

#[test]
fn every_flag_reaches_its_key_and_has_an_environment_variable() {
    let command = Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    for argument in
        serve.get_arguments().filter(|argument| argument.get_id() != "help" && argument.get_id() != "version")
    {
        let flag = format!("--{}", argument.get_long().unwrap());
        let variable = format!("RINGWAY_{}", flag[2..].replace('-', "_").to_uppercase());
        assert_eq!(argument.get_env(), Some(variable.as_ref()), "{flag}");
        assert!(
            ["--config", "--backend"].contains(&flag.as_str())
                || FLAGS.iter().any(|(known, ..)| *known == flag),
            "{flag} is not tested"
        );
    }
    let plain = serve_args(&["--backend", "http://h:1"]).settings().unwrap().to_toml();
    for (flag, value, line) in FLAGS {
        let settings = serve_args(&["--backend", "http://h:1", flag, value]).settings().unwrap();
        assert!(!plain.lines().any(|l| l == *line), "{line} is a default");
        assert!(settings.to_toml().lines().any(|l| l == *line), "{flag}");
    }
}

#[test]
fn a_faulty_flag_is_named_with_its_variable() {
    for (flag, ..) in FLAGS {
        let text = format!("{flag}=-7");
        let faults = serve_args(&["--backend", "http://h:1", &text]).settings().expect_err(flag);
        let variable = format!("RINGWAY_{}", flag[2..].replace('-', "_").to_uppercase());
        assert!(faults.contains(&format!("\n{flag} (or {variable}): ")), "{faults}");
    }
    // Also without the equals sign.
    let faults = serve_args(&["--backend", "http://h:1", "--spin-us", "-7"]).settings().unwrap_err();
    assert_eq!(
        faults,
        "ringway serve: 1 fault\n--spin-us (or RINGWAY_SPIN_US): -7: expected a whole number from 0 to 100000"
    );
}

#[test]
fn backends_repeat_and_may_be_named() {
    let settings =
        serve_args(&["--backend", "a=http://h:1,http://h:2", "--backend", "unix:/run/s"]).settings().unwrap();
    let names: Vec<&str> = settings.all_servers().map(|server| server.name.as_str()).collect();
    assert_eq!(names, ["a", "h:2", "s"]);
    assert_eq!((settings.pools[0].name.as_str(), settings.pools.len()), ("default", 1));
}

#[test]
fn engine_and_demo_arguments_keep_to_their_ranges() {
    let parse =
        |arguments: &[&str]| Cli::try_parse_from(["ringway"].iter().chain(arguments)).map(|cli| cli.command);
    let Ok(Command::Engine(engine)) =
        parse(&["engine", "--listen", "127.0.0.1:0", "--model", "a", "--model", "b", "--decode-tps", "0.5"])
    else {
        panic!("engine arguments")
    };
    assert_eq!((engine.model, engine.decode_tps), (vec!["a".to_owned(), "b".to_owned()], 0.5));
    for bad in [
        &["engine", "--listen", "localhost"][..],
        &["engine", "--listen", "127.0.0.1:0", "--decode-tps", "-1"],
        &["engine", "--listen", "127.0.0.1:0", "--prefill-tps", "nan"],
        &["engine", "--listen", "127.0.0.1:0", "--slots", "0"],
        &["demo", "--requests", "0"],
        &["check"],
    ] {
        assert!(parse(bad).is_err(), "{bad:?}");
    }
}

/// Every flag of `stargate` that has an effect: a value, its variable, and what it makes of the effective file.
const STARGATE_FLAGS: &[(&str, &str, &str, &str)] = &[
    ("--stargate-id", "sg-9", "", "id = \"sg-9\""),
    ("--http-listen-addr", "127.0.0.1:1", "", "address = \"127.0.0.1:1\""),
    ("--metrics-port", "2", "", "metrics_address = \"0.0.0.0:2\""),
    ("--metrics-prefix", "sg_", "", "metrics_prefix = \"sg_\""),
    ("--admin", "[::1]:0", "RINGWAY_ADMIN", "address = \"[::1]:0\""),
    ("--health-path", "/up", "RINGWAY_HEALTH_PATH", "path = \"/up\""),
    ("--deregistered-model-grace-ms", "3", "", "deregistered_model_grace_ms = 3"),
    (
        "--registration-update-idle-timeout-ms",
        "4000",
        "STARGATE_REGISTRATION_UPDATE_IDLE_TIMEOUT_MS",
        "registration_ttl_ms = 4000",
    ),
    (
        "--registration-update-max-idle-timeout-ms",
        "70000",
        "STARGATE_REGISTRATION_UPDATE_MAX_IDLE_TIMEOUT_MS",
        "registration_ttl_ms_max = 70000",
    ),
    ("--proxy-max-connect-retries", "5", "STARGATE_PROXY_MAX_CONNECT_RETRIES", "max_connect_retries = 5"),
    ("--proxy-max-request-retries", "6", "STARGATE_PROXY_MAX_REQUEST_RETRIES", "max_request_retries = 6"),
    ("--proxy-max-replay-body-bytes", "7", "STARGATE_PROXY_MAX_REPLAY_BODY_BYTES", "replay_bytes_max = 7"),
    (
        "--proxy-require-pylon-retry-signal",
        "false",
        "STARGATE_PROXY_REQUIRE_PYLON_RETRY_SIGNAL",
        "require_retry_signal = false",
    ),
    (
        "--proxy-retry-budget-header",
        "x-b",
        "STARGATE_PROXY_RETRY_BUDGET_HEADER",
        "retry_budget_header = \"x-b\"",
    ),
    ("--quic-connect-timeout-ms", "8", "", "connect_timeout_ms = 8"),
    ("--quic-request-timeout-ms", "9", "", "response_head_timeout_ms = 9"),
    ("--shutdown-drain-timeout-ms", "10", "", "drain_timeout_ms = 10"),
    ("--cores", "0,2-3", "RINGWAY_CORES", "cores = \"0,2-3\""),
    ("--driver", "epoll", "RINGWAY_DRIVER", "driver = \"epoll\""),
    ("--log-level", "trace", "RINGWAY_LOG_LEVEL", "level = \"trace\""),
    ("--log-format", "json", "RINGWAY_LOG_FORMAT", "format = \"json\""),
];

fn stargate_args(arguments: &[&str]) -> StargateArgs {
    let required = ["--stargate-id=s", "--advertise-addr=a:1", "--stargate-discovery-dns-name=d"];
    let given = |flag: &&&str| {
        !arguments.iter().any(|argument| argument.starts_with(flag.split('=').next().unwrap()))
    };
    let all = ["ringway", "stargate"].iter().chain(required.iter().filter(given)).chain(arguments);
    match Cli::try_parse_from(all).unwrap_or_else(|e| panic!("{e}")).command {
        Command::Stargate(args) => *args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn stargate_s_flags_reach_their_keys_and_keep_its_defaults() {
    let plain = stargate_args(&[]).settings().unwrap();
    let text = plain.to_toml();
    for line in [
        "address = \"0.0.0.0:8000\"",
        "profile = \"stargate\"",
        "metrics_address = \"0.0.0.0:9090\"",
        "metrics_prefix = \"stargate_\"",
        "deregistered_model_grace_ms = 900000",
        "max_connect_retries = 2",
        "max_request_retries = 2",
        "replay_bytes_max = 67108864",
        "require_retry_signal = true",
        "retry_budget_header = \"x-stargate-max-wait-ms\"",
        "connect_timeout_ms = 2000",
        "response_head_timeout_ms = 30000",
        "drain_timeout_ms = 30000",
        "registration_ttl_ms = 60000",
        "registration_ttl_ms_max = 300000",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}");
    }
    assert!(plain.warnings().is_empty() && plain.all_servers().next().is_none(), "{:?}", plain.warnings());
    let command = Cli::command();
    let stargate = command.find_subcommand("stargate").unwrap();
    for (flag, value, variable, line) in STARGATE_FLAGS {
        let argument = stargate.get_arguments().find(|argument| Some(&flag[2..]) == argument.get_long());
        let known =
            argument.unwrap_or_else(|| panic!("no {flag}")).get_env().map(|name| name.to_str().unwrap());
        assert_eq!(known.unwrap_or(""), *variable, "{flag}");
        let settings = stargate_args(&[&format!("{flag}={value}")]).settings().unwrap();
        assert!(!text.lines().any(|found| found == *line), "{line} is a default");
        assert!(settings.to_toml().lines().any(|found| found == *line), "{flag}");
    }
    let with_servers = stargate_args(&["--backend", "gpu0=http://h:1,http://h:2"]).settings().unwrap();
    let servers: Vec<_> = with_servers.all_servers().map(|s| (s.name.as_str(), s.max_concurrency)).collect();
    assert_eq!(servers, [("gpu0", 0), ("h:2", 0)], "limits are what engines report");
}
