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
