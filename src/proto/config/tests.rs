use proptest::prelude::*;

use super::keys::Word;
use super::*;
use crate::proto::backend::catalog::{Address, Algorithm, KvRules, Miss, RoutingMode};

fn parse(text: &str) -> Result<Settings, Faults> {
    Settings::parse(text, Path::new("/etc/ringway"), &[])
}

/// Faults as lines.
fn faults(text: &str) -> Vec<String> {
    parse(text).expect_err(text).0.iter().map(ToString::to_string).collect()
}

const SERVER: &str = "[[server]]\nname = \"s\"\nurl = \"http://10.0.0.1:8000\"\n";

/// The faults of `text` where a server is given.
fn faults_with_server(text: &str) -> Vec<String> {
    faults(&format!("{text}\n{SERVER}"))
}

#[test]
fn every_value_has_a_default_except_the_servers() {
    assert_eq!(
        faults(""),
        ["server: (missing): expected at least one [[pool.server]] or [[server]], or --backend URL"]
    );
    let settings = parse(SERVER).unwrap();
    assert_eq!(settings.runtime, Runtime { cores: Cores::Allowed, driver: Driver::Auto, spin_us: 0 });
    assert_eq!(settings.listeners[0].address, "127.0.0.1:30000".parse().unwrap());
    assert_eq!(settings.admin.address, "127.0.0.1:29000".parse().unwrap());
    let limits = Limits {
        body_bytes_max: 536_870_912,
        head_bytes_max: 65_536,
        classify_bytes_max: 1_048_576,
        replay_bytes_max: 67_108_864,
        buffered_bytes_max: 1_073_741_824,
        kv_memory_bytes_max: 1_073_741_824,
        connections_max: 100_000,
        client_head_timeout_ms: 10_000,
        client_body_idle_timeout_ms: 30_000,
        half_close: HalfClose::Abort,
        connect_timeout_ms: 2_000,
        response_head_timeout_ms: 1_800_000,
        between_bytes_timeout_ms: 600_000,
        total_timeout_ms: 0,
        keepalive_timeout_ms: 75_000,
        drain_timeout_ms: 30_000,
        drain_settle_ms: 1_000,
    };
    assert_eq!(settings.limits, limits);
    assert_eq!(settings.headers.prefix, "X-Lifeboat-");
    let health = Health {
        path: "/health".into(),
        interval_ms: 2_000,
        timeout_ms: 1_000,
        fall: 2,
        rise: 1,
        bench_after: 3,
        bench_ms: 1_000,
        bench_max_ms: 30_000,
    };
    assert_eq!(settings.health, health);
    assert_eq!(settings.log, Log { format: LogFormat::Text, level: LogLevel::Info });
    let server = &settings.servers[0];
    assert_eq!((server.weight, server.max_concurrency, server.models.len()), (1.0, 32, 0));
    let pool = &parse("[[pool]]\n[[pool.server]]\nurl = \"http://h:1\"").unwrap().pools[0];
    assert_eq!((pool.name.as_str(), pool.queue_size, pool.queue_timeout_ms), ("default", 1_024, 30_000));
    assert_eq!((pool.algorithm, pool.routing_mode), (Algorithm::WeightedRoundRobin, RoutingMode::Queue));
    assert_eq!(pool.servers[0].name, "h:1", "a server without a name is called by where it is");
}

/// Each key that the reference lists, at its default, with a pool and a server that say everything.
const REFERENCE: &str = r#"
[runtime]
cores = "0-3"
driver = "auto"
spin_us = 0
[[listener]]
address = "0.0.0.0:30000"
profile = "openai"
[admin]
address = "127.0.0.1:29000"
token_file = ""
[limits]
body_bytes_max = 536870912
head_bytes_max = 65536
classify_bytes_max = 1048576
replay_bytes_max = 67108864
buffered_bytes_max = 1073741824
kv_memory_bytes_max = 1073741824
connections_max = 100000
client_head_timeout_ms = 10000
client_body_idle_timeout_ms = 30000
half_close = "abort"
connect_timeout_ms = 2000
response_head_timeout_ms = 1800000
between_bytes_timeout_ms = 600000
total_timeout_ms = 0
keepalive_timeout_ms = 75000
drain_timeout_ms = 30000
drain_settle_ms = 1000
[headers]
prefix = "X-Lifeboat-"
digest_secret_file = ""
[health]
path = "/health"
interval_ms = 2000
timeout_ms = 1000
fall = 2
rise = 1
bench_after = 3
bench_ms = 1000
bench_max_ms = 30000
[[pool]]
name = "chat"
algorithm = { name = "least-connections" }
routing_mode = "reject"
queue_size = 7
queue_timeout_ms = 8
[pool.kv]
block_bytes = 256
min_match_blocks = 2
affinity_slack_abs = 12.0
affinity_slack_rel = 1.0
kv_capacity_blocks = 0
miss = "weighted-round-robin"
[[pool.server]]
name = "gpu0"
url = "http://10.0.0.10:8000"
models = ["a", "b"]
weight = 2.25
max_concurrency = 3
max_input_tokens = 0
routing_tier = ""
cluster_id = ""
routing_keys = []
input_tps = 0
api_key_file = "keys/gpu0"
metrics = "auto"
[[server]]
name = "spare"
url = "unix:run/spare.sock"
[stargate]
id = "ringway"
lb_config_path = ""
deregistered_model_grace_ms = 900000
max_connect_retries = 2
max_request_retries = 2
replay_bytes_max = 67108864
require_retry_signal = true
retry_budget_header = "x-stargate-max-wait-ms"
connect_timeout_ms = 2000
response_head_timeout_ms = 30000
registration_ttl_ms = 60000
registration_ttl_ms_max = 300000
metrics_prefix = "stargate_"
metrics_address = ""
[log]
format = "json"
level = "debug"
access = "off"
"#;

#[test]
fn the_whole_reference_file_is_understood() {
    let settings = parse(REFERENCE).unwrap();
    assert_eq!(settings.runtime.cores, Cores::List(vec![0, 1, 2, 3]));
    assert_eq!((settings.log.format, settings.log.level), (LogFormat::Json, LogLevel::Debug));
    let pool = &settings.pools[0];
    assert_eq!((pool.algorithm, pool.routing_mode), (Algorithm::LeastConnections, RoutingMode::Reject));
    assert_eq!((pool.queue_size, pool.queue_timeout_ms), (7, 8));
    let gpu0 = &pool.servers[0];
    assert_eq!((gpu0.weight, gpu0.max_concurrency), (2.25, 3));
    assert_eq!(gpu0.api_key_file.as_deref(), Some(Path::new("/etc/ringway/keys/gpu0")));
    assert_eq!(
        settings.servers[0].url,
        ServerUrl::Unix("/etc/ringway/run/spare.sock".into()),
        "relative paths are relative to the file"
    );
    assert_eq!(parse(&settings.to_toml()).unwrap(), settings);
}

#[test]
fn the_effective_file_prints_every_key() {
    fn keys(value: &toml::Value, path: &str, found: &mut std::collections::BTreeSet<String>) {
        match value {
            toml::Value::Table(table) => {
                for (key, value) in table {
                    keys(value, &format!("{path}.{key}"), found);
                }
            }
            toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
                items.iter().for_each(|item| keys(item, path, found));
            }
            _ => {
                found.insert(path.to_owned());
            }
        }
    }
    let (mut wanted, mut printed) = Default::default();
    let reference = REFERENCE.replace("{ name = \"least-connections\" }", "\"least-connections\"");
    keys(&toml::Value::Table(reference.parse().unwrap()), "", &mut wanted);
    keys(&toml::Value::Table(parse(REFERENCE).unwrap().to_toml().parse().unwrap()), "", &mut printed);
    // The reference shows one standalone server by name and URL only.
    printed.retain(|key| !key.starts_with(".server.") || wanted.contains(key));
    assert_eq!(printed, wanted);
}

#[test]
fn all_faults_come_at_once_with_path_value_and_expectation() {
    let text = r#"
[runtime]
spin_uss = 3
[limits]
connections_max = 0
half_close = "allways"
connect_timeout_ms = "2s"
[[pool]]
name = "chat"
[[pool.server]]
url = "http://10.0.0.1:8000"
[[pool.server]]
name = "gpu1"
url = "http://10.0.0.2:8000"
weigth = 2
weight = -1
models = ["a", "", "a", 7]
[[server]]
name = "gpu1"
url = "http://10.0.0.3:8000"
"#;
    assert_eq!(
        faults(text),
        [
            "runtime.spin_uss: 3: unknown key; nearest known key: \"spin_us\"",
            "limits.connections_max: 0: expected a whole number from 1 to 10000000",
            "limits.half_close: \"allways\": expected \"abort\" or \"allow\"; nearest: \"allow\"",
            "limits.connect_timeout_ms: \"2s\": expected a whole number from 1 to 604800000",
            "pool[0].server[1].models[1]: \"\": expected a model name of 1 to 1024 bytes",
            "pool[0].server[1].models[2]: \"a\": expected each value once",
            "pool[0].server[1].models[3]: 7: expected a string",
            "pool[0].server[1].weight: -1: expected a finite number from 0 to 1000000000",
            "pool[0].server[1].weigth: 2: unknown key; nearest known key: \"weight\"",
            "server[0].name: \"gpu1\": expected a name other than pool[0].server[1].name's",
        ]
    );
}

#[test]
fn unknown_keys_name_the_nearest_or_all() {
    assert_eq!(
        faults_with_server("[limit]\nx = 1"),
        ["limit: (a table): unknown key; nearest known key: \"limits\""]
    );
    assert_eq!(
        faults_with_server("[log]\nqqqqqqqq = 1"),
        ["log.qqqqqqqq: 1: unknown key; expected \"access\", \"format\" or \"level\""]
    );
    let secret = format!("{SERVER}api_key = \"sk-very-secret\"");
    assert_eq!(
        faults(&secret),
        ["server[0].api_key: (not shown): unknown key; nearest known key: \"api_key_file\""]
    );
}

#[test]
fn syntax_faults_have_line_and_column() {
    let found = faults("a = 1\n[[pool]\nname = \"x\"\nb = = 2\n");
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("line 2, column 8: [[pool]: "), "{found:?}");
    assert!(found[1].starts_with("line 4, column 5: b = = 2: "), "{found:?}");
    let twice = faults("[log]\nlevel = \"info\"\nlevel = \"warn\"\n");
    assert!(twice[0].starts_with("line 3, column 1: level = \"warn\": duplicate key"), "{twice:?}");
    // Columns count characters, not bytes.
    assert!(faults("\"é\" = \n")[0].starts_with("line 1, column 7: "), "{:?}", faults("\"é\" = \n"));
}

#[test]
fn tables_of_the_wrong_kind_are_one_fault_each() {
    assert_eq!(
        faults_with_server("log = 1\nadmin = []\nlistener = { address = \"127.0.0.1:1\" }\npool = [1]"),
        [
            "listener: (a table): expected one or more tables: [[listener]]",
            "admin: []: expected a table: [admin]",
            "pool[0]: 1: expected a table",
            "log: 1: expected a table: [log]",
        ]
    );
    assert_eq!(
        faults("[[pool]]\nserver = { url = \"http://h\" }")[0],
        "pool[0].server: (a table): expected one or more tables: [[pool.server]]"
    );
}

#[test]
fn what_comes_later_is_refused_unless_it_is_at_its_default() {
    let refused = [
        ("[[listener]]\ntls = { certificate = \"c\" }", "listener[0].tls"),
        ("[admin]\ntoken_file = \"t\"", "admin.token_file"),
        ("[[key]]\nname = \"team\"", "key"),
        ("[log]\naccess = \"stderr\"", "log.access"),
    ];
    for (text, path) in refused {
        let found = faults_with_server(text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with(&format!("{path}: ")) && found[0].contains("not in this version"),
            "{found:?}"
        );
    }
    assert!(faults(&format!("{SERVER}metrics = \"vlm\""))[0].contains("nearest: \"vllm\""));
    for accepted in ["key = []", "[[pool]]\n[pool.kv]\naffinity_slack_abs = 2", "[log]\naccess = \"off\""] {
        parse(&format!("{accepted}\n{SERVER}")).unwrap();
    }
}

/// A listener that follows the Stargate contract.
const TRUSTED: &str = "[[listener]]\nprofile = \"stargate\"\n";

#[test]
fn what_stargate_listeners_go_by_is_read_and_checked() {
    let settings = parse(&format!(
        "{TRUSTED}[stargate]\nid = \"sg 1\"\nretry_budget_header = \"\"\nrequire_retry_signal = false\n\
         metrics_address = \"127.0.0.1:9090\"\nmetrics_prefix = \"sg_\"\n{SERVER}cluster_id = \"rack/1\"\n\
         routing_keys = [\"fn-1\", \"fn 2\"]\ninput_tps = 12.5"
    ))
    .unwrap();
    let server = settings.all_servers().next().unwrap();
    assert_eq!((server.cluster_id.as_str(), server.input_tps), ("rack/1", 12.5));
    assert_eq!(server.routing_keys, ["fn-1", "fn 2"]);
    assert_eq!(settings.stargate.metrics_address, Some("127.0.0.1:9090".parse().unwrap()));
    assert!(!settings.stargate.require_retry_signal && settings.stargate.retry_budget_header.is_empty());
    for (line, said) in [
        (
            "max_connect_retries = 101",
            "stargate.max_connect_retries: 101: expected a whole number from 0 to 100",
        ),
        (
            "registration_ttl_ms = 999",
            "stargate.registration_ttl_ms: 999: expected a whole number from 1000 to",
        ),
        (
            "registration_ttl_ms_max = 2000",
            "stargate.registration_ttl_ms: 60000: expected at most registration_ttl_ms_max, 2000",
        ),
        ("metrics_prefix = \"9_\"", "stargate.metrics_prefix: \"9_\": expected at most 64 letters"),
        (
            "metrics_prefix = \"ringway_x_\"",
            "stargate.metrics_prefix: \"ringway_x_\": expected another prefix",
        ),
        ("metrics_address = \"9090\"", "stargate.metrics_address: \"9090\": expected IP:PORT"),
        (
            "metrics_address = \"127.0.0.1:29000\"",
            "stargate.metrics_address: \"127.0.0.1:29000\": expected an address other than",
        ),
        ("retry_budget_header = \"a b\"", "stargate.retry_budget_header: \"a b\": expected a header's name"),
        ("require_retry_signal = 1", "stargate.require_retry_signal: 1: expected true or false"),
        ("id = \"\"", "stargate.id: \"\": expected a text of 1 to 256 bytes"),
        (
            "lb_config_pth = \"x\"",
            "stargate.lb_config_pth: \"x\": unknown key; nearest known key: \"lb_config_path\"",
        ),
    ] {
        let found = faults_with_server(&format!("{TRUSTED}[stargate]\n{line}"));
        assert!(found.len() == 1 && found[0].starts_with(said), "{line}: {found:?}");
    }
    for (line, said) in [
        ("cluster_id = \"a b\"", "server[0].cluster_id: \"a b\": expected a cluster"),
        (
            "routing_keys = [\"\"]",
            "server[0].routing_keys[0]: \"\": expected a routing key; leave the list empty",
        ),
        ("routing_keys = [\"k\", \"k\"]", "server[0].routing_keys[1]: \"k\": expected each value once"),
        ("input_tps = -1", "server[0].input_tps: -1: expected a finite number"),
    ] {
        let found = faults(&format!("{SERVER}{line}"));
        assert!(found.len() == 1 && found[0].contains(said), "{line}: {found:?}");
    }
}

#[test]
fn a_trusted_listener_needs_no_server_and_others_say_that_its_keys_do_nothing() {
    assert!(parse(TRUSTED).unwrap().warnings().is_empty());
    assert!(faults("")[0].starts_with("server: (missing)"));
    let warnings =
        parse(&format!("[stargate]\nmax_connect_retries = 3\n{SERVER}input_tps = 5")).unwrap().warnings();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings[0].starts_with("[stargate] has no effect") && warnings[1].contains("input_tps"),
        "{warnings:?}"
    );
    let used =
        parse(&format!("{TRUSTED}[stargate]\nmax_connect_retries = 3\n{SERVER}input_tps = 5")).unwrap();
    assert!(used.warnings().is_empty(), "{:?}", used.warnings());
}

#[test]
fn the_algorithms_file_is_read_with_the_configuration_and_all_faults_come_at_once() {
    let text = format!("{TRUSTED}[stargate]\nlb_config_path = \"lb.json\"\nmax_connect_retries = -1");
    let load = |content: Result<&str, &str>| {
        let read = |path: &Path| {
            assert_eq!(path, Path::new("/etc/ringway/lb.json"), "relative to the file");
            content.map(str::to_owned).map_err(str::to_owned)
        };
        Settings::load(&text, Path::new("/etc/ringway"), &[], read)
    };
    let lines = |content| load(content).unwrap_err().0.iter().map(ToString::to_string).collect::<Vec<_>>();
    let found = lines(Ok("{\"defaults\":\"pulsar\",\"models\":{\"m\":\"sticky\"}}"));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with("stargate.max_connect_retries: -1: "), "{found:?}");
    assert!(found[1..].iter().all(|line| line.starts_with("/etc/ringway/lb.json: ")), "{found:?}");
    assert_eq!(
        lines(Err("gone"))[1],
        "stargate.lb_config_path: \"/etc/ringway/lb.json\": expected a readable file: gone"
    );
    let text = text.replace("max_connect_retries = -1", "");
    let read = |_: &Path| Ok("{\"default\":\"random\",\"models\":{\"m\":\"pulsar\"}}".to_owned());
    let settings = Settings::load(&text, Path::new("/etc"), &[], read).unwrap();
    let config = settings.lb_config.as_ref().unwrap();
    assert_eq!((config.default_name(), config.model_overrides()), ("random", 1));
}

#[test]
fn a_pool_runs_any_of_ten_algorithms() {
    for (name, algorithm) in Algorithm::WORDS {
        for text in [format!("\"{name}\""), format!("{{ name = \"{name}\" }}")] {
            let settings = parse(&format!("[[pool]]\nalgorithm = {text}\n{SERVER}")).unwrap();
            let pool = &settings.pools[0];
            assert_eq!((pool.algorithm, pool.algorithm.name()), (*algorithm, *name));
            let method = pool.entry.as_ref().map(|entry| entry.method());
            assert_eq!(method.map(Algorithm::Stargate), Some(*algorithm).filter(|_| method.is_some()));
            assert_eq!(method.is_some(), matches!(algorithm, Algorithm::Stargate(_)));
        }
    }
    assert_eq!(Algorithm::WORDS.len(), 10);
    let text = format!("[[pool]]\nalgorithm = {{ name = \"power-of-n\", sample_count = 4 }}\n{SERVER}");
    let pool = parse(&text).unwrap().catalog().pools[0].clone();
    let entry = pool.entry.expect("it is one of Stargate's");
    assert!(entry.effective_json().contains("\"sample_count\":4"), "{entry:?}");
    let near = faults_with_server("[[pool]]\nalgorithm = \"least_connection\"");
    assert!(near[0].ends_with("nearest: \"least-connections\""), "{near:?}");
    for (text, path) in [
        ("{ name = \"least-connections\", slack = 1 }", "pool[0].algorithm.slack: 1: unknown key"),
        ("{ }", "pool[0].algorithm.name: (missing): expected"),
        ("7", "pool[0].algorithm: 7: expected the name"),
        ("{ name = 7 }", "pool[0].algorithm.name: 7: expected"),
        ("{ name = \"powerofn\", n = 1 }", "pool[0].algorithm.name: \"powerofn\": expected"),
        ("{ name = \"random\", n = 1 }", "pool[0].algorithm.n: 1: expected no setting"),
        (
            "{ name = \"wait-and-widen\", cache_affinity_wait_ms = 9 }",
            "pool[0].algorithm.cache_affinity_wait_ms: 9: expected 0: waiting for affinity is for stargate listeners",
        ),
    ] {
        let found = faults_with_server(&format!("[[pool]]\nalgorithm = {text}"));
        assert!(found.len() == 1 && found[0].starts_with(path), "{found:?}");
    }
}

#[test]
fn a_faulty_url_hides_no_other_fault() {
    let text = "[[pool]]\n[[pool.server]]\nname = \"a\"\nurl = \"10.0.0.1:8000\"\napi_key_file = \"key\"\n\
                [[server]]\nname = \"a\"\n[[server]]\nurl = \"ftp://h\"\n[[server]]\nurl = \"h:x\"\n";
    let read = |path: &Path| Err(format!("{} is gone", path.display()));
    let found = Settings::load(text, Path::new("/etc"), &[], read).unwrap_err();
    let found: Vec<String> = found.0.iter().map(ToString::to_string).collect();
    assert_eq!(
        found,
        [
            concat!(
                "pool[0].server[0].url: \"10.0.0.1:8000\": expected http://HOST[:PORT][/BASE] or unix:/PATH; ",
                "is \"http://10.0.0.1:8000\" meant?"
            ),
            "server[0].url: (missing): expected http://HOST[:PORT][/BASE] or unix:/PATH",
            "server[1].url: \"ftp://h\": expected http://HOST[:PORT][/BASE] or unix:/PATH",
            "server[2].url: \"h:x\": expected http://HOST[:PORT][/BASE] or unix:/PATH",
            "server[0].name: \"a\": expected a name other than pool[0].server[0].name's",
            "pool[0].server[0].api_key_file: \"/etc/key\": expected a readable file: /etc/key is gone",
        ]
    );
}

#[test]
fn a_pool_says_how_it_matches_prompts() {
    let text = format!(
        "[[pool]]\nname = \"p\"\nalgorithm = \"kv-aware\"\n[pool.kv]\nblock_bytes = 512\nmin_match_blocks = 1\n\
         affinity_slack_abs = 0\naffinity_slack_rel = 0.5\nkv_capacity_blocks = 77\nmiss = \"least-busy\"\n[[pool.server]]\n\
         url = \"http://h:1\"\n{SERVER}"
    );
    let settings = parse(&text).unwrap();
    assert_eq!(settings.warnings(), [""; 0]);
    let catalog = settings.catalog();
    let kv = KvRules {
        block_bytes: 512,
        min_match_blocks: 1,
        affinity_slack_abs: 0.0,
        affinity_slack_rel: 0.5,
        kv_capacity_blocks: 77,
        miss: Miss::LeastBusy,
    };
    assert_eq!((catalog.pools[0].algorithm, catalog.pools[0].kv), (Algorithm::KvAware, kv));
    assert_eq!(catalog.servers[0].kv_capacity_blocks, 77);
    assert_eq!(catalog.servers[1].kv_capacity_blocks, 65_536, "the documented default");
    assert_eq!(catalog.pools[1].kv, KvRules::default());
    assert_eq!((kv.capacity_blocks(Some(9)), kv.capacity_blocks(Some(0))), (9, 1), "the engine knows best");
    let kv_faults = |keys: &str| faults_with_server(&format!("[[pool]]\n[pool.kv]\n{keys}"));
    assert_eq!(
        kv_faults(
            "block_bytes = 63\nmin_match_blocks = 0\naffinity_slack_abs = -1\naffinity_slack_rel = nan\nkv_capacity_blocks = 16777217\nblock_byte = 1\nmiss = \"least-connections\""
        ),
        [
            "pool[0].kv.block_bytes: 63: expected a whole number from 64 to 65536",
            "pool[0].kv.min_match_blocks: 0: expected a whole number from 1 to 1000000",
            "pool[0].kv.affinity_slack_abs: -1: expected a finite number from 0 to 1000000",
            "pool[0].kv.affinity_slack_rel: nan: expected a finite number from 0 to 1000000",
            "pool[0].kv.kv_capacity_blocks: 16777217: expected a whole number from 0 to 16777216",
            "pool[0].kv.miss: \"least-connections\": expected \"weighted-round-robin\" or \"least-busy\"",
            "pool[0].kv.block_byte: 1: unknown key; nearest known key: \"block_bytes\"",
        ]
    );
    let idle = parse(&text.replace("kv-aware", "least-connections")).unwrap();
    assert_eq!(
        idle.warnings(),
        ["pool p: [pool.kv] has no effect under least-connections: it is for kv-aware only"]
    );
}

#[test]
fn servers_have_tiers_and_limits_of_input() {
    let settings =
        parse(&format!("{SERVER}routing_tier = \"gold\"\nmax_input_tokens = 4096\nweight = 0")).unwrap();
    let server = &settings.catalog().servers[0];
    assert_eq!((&*server.tier, server.max_input_tokens), ("gold", 4096));
    assert_eq!((server.weight, server.affinity_weight), (0.0, 1.0), "it never had a weight of its own");
    let weighted = parse(&format!("{SERVER}weight = 2.5")).unwrap().catalog();
    assert_eq!(weighted.servers[0].affinity_weight, 2.5);
    assert_eq!(
        faults(&format!("{SERVER}routing_tier = \"a/b\"\nmax_input_tokens = -1")),
        [
            "server[0].max_input_tokens: -1: expected a whole number from 0 to 1000000000",
            concat!(
                "server[0].routing_tier: \"a/b\": expected a tier of at most 128 letters, digits or any of ",
                "- . _ ~ : @ [ ]; empty: none"
            ),
        ]
    );
    let many = |count: u32| {
        let server =
            |n| format!("[[server]]\nname = \"s{n}\"\nurl = \"http://h{n}\"\nmax_input_tokens = {n}\n");
        (0..=count).map(server).collect::<String>()
    };
    parse(&many(64)).unwrap();
    assert_eq!(
        faults(&many(65)),
        ["server.max_input_tokens: 65 distinct values: expected at most 64 over all servers"]
    );
}

#[test]
fn the_digest_secret_is_read_from_its_file_and_never_shown() {
    let text = format!("[headers]\ndigest_secret_file = \"keys/digest\"\n{SERVER}");
    let mut settings = parse(&text).unwrap();
    let file = Path::new("/etc/ringway/keys/digest");
    assert_eq!(settings.headers.digest_secret_file.as_deref(), Some(file));
    assert_eq!(settings.digest_secret, None);
    settings
        .load_files(|path| {
            assert_eq!(path, file);
            Ok(" a secret\n".to_owned())
        })
        .unwrap();
    assert_eq!(settings.digest_secret, Some(Secret("a secret".into())));
    assert!(!settings.to_toml().contains("a secret") && !format!("{settings:?}").contains("a secret"));
    let fault = |settings: &mut Settings, answer: Result<String, String>| {
        settings.load_files(|_| answer.clone()).unwrap_err().to_string()
    };
    let place = "headers.digest_secret_file: \"/etc/ringway/keys/digest\"";
    assert_eq!(
        fault(&mut settings, Ok("\n".into())),
        format!("{place}: expected a file with a secret in it")
    );
    assert_eq!(fault(&mut settings, Err("gone".into())), format!("{place}: expected a readable file: gone"));
    let mut plain = parse(SERVER).unwrap();
    plain.load_files(|path| panic!("{path:?}")).unwrap();
    assert_eq!(plain.digest_secret, None);
    assert_eq!(
        faults_with_server("[headers]\ndigest_secret_file = 7\n[limits]\nkv_memory_bytes_max = 1000"),
        [
            "limits.kv_memory_bytes_max: 1000: expected a whole number from 1048576 to 1099511627776",
            "headers.digest_secret_file: 7: expected a string: the path of a file",
        ]
    );
}

#[test]
fn names_are_unique_and_fit_for_headers() {
    let two_pools = "[[pool]]\nname = \"a\"\n[[pool]]\nname = \"a\"";
    assert_eq!(
        faults_with_server(two_pools),
        ["pool[1].name: \"a\": expected a name other than pool[0].name's"]
    );
    assert_eq!(
        faults_with_server("[[pool]]\nname = \"mixed\""),
        ["pool[0].name: \"mixed\": expected another name: \"mixed\" is the built-in pool's"]
    );
    assert_eq!(
        faults_with_server("[[pool]]\nname = \"s\""),
        ["server[0].name: \"s\": expected a name other than pool[0].name's"],
        "a standalone server's name is also its pool's"
    );
    assert_eq!(faults(&SERVER.replace("\"s\"", "\"mixed\"")).len(), 1);
    for bad in ["", "a b", "a/b", "é", "a\\nb", &"x".repeat(129)] {
        assert_eq!(faults(&SERVER.replace("\"s\"", &format!("\"{bad}\""))).len(), 1, "{bad}");
    }
    // In a pool, a server may bear the pool's name.
    parse("[[pool]]\nname = \"a\"\n[[pool.server]]\nname = \"a\"\nurl = \"http://h:1\"").unwrap();
}

#[test]
fn urls_are_taken_apart() {
    let parse = |text: &str| ServerUrl::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    let v4 = parse("http://10.0.0.1:8000/");
    assert_eq!(v4.address(), Some(Address::Tcp("10.0.0.1:8000".parse().unwrap())));
    assert_eq!((v4.host_header().as_str(), v4.base_path()), ("10.0.0.1:8000", ""));
    let v6 = parse("HTTP://[::1]/engine/a/");
    assert_eq!(v6.address(), Some(Address::Tcp("[::1]:80".parse().unwrap())));
    assert_eq!((v6.host_header().as_str(), v6.base_path()), ("[::1]", "/engine/a"));
    let name = parse("http://GPU-0.example.:65535/b%20c");
    assert_eq!((name.address(), name.unresolved()), (None, Some(("gpu-0.example.", 65_535))));
    assert_eq!((name.host_header().as_str(), name.base_path()), ("gpu-0.example.:65535", "/b%20c"));
    for text in ["unix:/run/e.sock", "unix:///run/e.sock"] {
        let unix = parse(text);
        assert_eq!(unix.address(), Some(Address::Unix("/run/e.sock".into())));
        assert_eq!((unix.host_header().as_str(), unix.default_name().as_str()), ("localhost", "e.sock"));
    }
    for text in [
        "",
        "10.0.0.1:8000",
        "ftp://h",
        "http:/h",
        "http://",
        "http://:80",
        "http://h:",
        "http://h:0",
        "http://h:65536",
        "http://h:+80",
        "http://h:8o",
        "http://10.0.0.256",
        "http://10.0.1",
        "http://::1",
        "http://[::1",
        "http://[::1]x",
        "http://[10.0.0.1]",
        "http://a..b",
        "http://-a",
        "http://h h",
        "http://h/a b",
        "http://h/?q",
        "http://h#f",
        "http://user:pw@h",
        "https://h",
        "unix:",
        "unix:/",
        "unix:a\0b",
    ] {
        assert!(ServerUrl::parse(text).is_err(), "{text}");
    }
    assert!(ServerUrl::parse("https://h").unwrap_err().contains("not in this version"));
    assert!(ServerUrl::parse(&format!("unix:/{}", "x".repeat(106))).is_ok());
    assert!(ServerUrl::parse(&format!("unix:/{}", "x".repeat(107))).is_err());
    assert!(ServerUrl::parse("unix:x").unwrap().under(Path::new(&"/d".repeat(60))).is_err());
    let leak = faults("[[server]]\nurl = \"http://me:s3cr@t/@h:1/x\"");
    assert_eq!(leak.len(), 1, "the server is there, only its URL is faulty: {leak:?}");
    assert!(!leak[0].contains("s3cr") && !leak[0].contains("me:"), "{leak:?}");
}

#[test]
fn cores_are_listed_like_the_kernel_does() {
    assert_eq!(Cores::parse("0-3,5"), Ok(Cores::List(vec![0, 1, 2, 3, 5])));
    assert_eq!(Cores::parse(" 7 , 2 - 3 "), Ok(Cores::List(vec![7, 2, 3])));
    assert_eq!(Cores::parse("0,0,1,1"), Ok(Cores::List(vec![0, 0, 1, 1])));
    assert_eq!(Cores::parse("all"), Ok(Cores::Allowed));
    assert_eq!(Cores::List(vec![0, 1, 2, 3, 5, 7, 8, 8]).to_string(), "0-3,5,7-8,8");
    for bad in ["", ",", "1,", "-1", "1-", "3-1", "a", "+1", "1-2-3", "4096", "0-256"] {
        assert!(Cores::parse(bad).is_err(), "{bad}");
    }
    assert_eq!(faults_with_server("[runtime]\ncores = 4").len(), 1);
}

#[test]
fn header_prefix_and_health_path_are_checked() {
    for prefix in ["X-Ringway-", "Lb-", "X-Request-Router-"] {
        parse(&format!("[headers]\nprefix = \"{prefix}\"\n{SERVER}")).unwrap();
    }
    for prefix in
        ["", "-", "X-Lifeboat", "X y-", "Ä-", "Content-", "content-x-", "X-", "Set-", "Proxy-", "OpenAI-"]
    {
        assert_eq!(faults_with_server(&format!("[headers]\nprefix = \"{prefix}\"")).len(), 1, "{prefix}");
    }
    for path in ["", "health", "/a b", "/a#b", "/é", "/a\\r\\nx"] {
        assert_eq!(faults_with_server(&format!("[health]\npath = \"{path}\"")).len(), 1, "{path}");
    }
    parse(&format!("[health]\npath = \"/v1/health?deep=1\"\n{SERVER}")).unwrap();
}

#[test]
fn values_are_checked_against_each_other() {
    assert_eq!(
        faults_with_server("[health]\nbench_ms = 31000"),
        ["health.bench_ms: 31000: expected at most bench_max_ms, 30000"]
    );
    let same = "[[listener]]\naddress = \"127.0.0.1:1\"\n[[listener]]\naddress = \"127.0.0.1:1\"\n[admin]\naddress = \"127.0.0.1:1\"";
    assert_eq!(
        faults_with_server(same),
        [
            "listener[1].address: \"127.0.0.1:1\": expected an address other than listener[0].address's",
            "admin.address: \"127.0.0.1:1\": expected an address other than listener[1].address's",
        ]
    );
    // Port 0 is a different port each time.
    parse(&format!("{}\n{SERVER}", same.replace(":1\"", ":0\""))).unwrap();
    for bad in ["localhost:1", "127.0.0.1", ":1", "127.0.0.1:70000", "::1:5"] {
        assert_eq!(faults_with_server(&format!("[[listener]]\naddress = \"{bad}\"")).len(), 1, "{bad}");
    }
}

#[test]
fn numbers_keep_to_their_ranges() {
    for (text, ok) in [
        ("weight = 0", true),
        ("weight = 0.5", true),
        ("weight = 1e9", true),
        ("weight = 1e10", false),
        ("weight = inf", false),
        ("weight = nan", false),
        ("weight = -0.5", false),
        ("weight = \"1\"", false),
        ("max_concurrency = 0", true),
        ("max_concurrency = 1.0", false),
        ("max_concurrency = 4294967296", false),
        ("max_concurrency = -1", false),
        ("max_concurrency = true", false),
    ] {
        assert_eq!(parse(&format!("{SERVER}{text}")).is_ok(), ok, "{text}");
    }
    let zero = parse(&format!("{SERVER}weight = -0.0")).unwrap().catalog();
    assert_eq!(&*zero.servers[0].weight_text, "0");
}

#[test]
fn flags_are_laid_over_the_file_and_named_in_faults() {
    let set = |flag: &str, place, value: toml::Value| Override { flag: flag.to_owned(), place, value };
    let file = r#"
[runtime]
spin_us = 5
[[listener]]
address = "127.0.0.1:1"
[[pool]]
name = "a"
[[pool.server]]
url = "http://h:1"
[[server]]
url = "http://h:2"
max_concurrency = 9
"#;
    let overrides = [
        set("--spin-us", Place::Key("runtime", "spin_us"), 7.into()),
        set("--log-level", Place::Key("log", "level"), "warn".into()),
        set("--listen", Place::Listeners, vec!["127.0.0.1:2", "127.0.0.1:3"].into()),
        set("--algorithm", Place::EveryPool("algorithm"), "least-connections".into()),
        set("--max-concurrency", Place::EveryServer("max_concurrency"), 4.into()),
    ];
    let settings = Settings::parse(file, Path::new(""), &overrides).unwrap();
    assert_eq!((settings.runtime.spin_us, settings.log.level), (7, LogLevel::Warn));
    let ports: Vec<u16> = settings.listeners.iter().map(|listener| listener.address.port()).collect();
    assert_eq!(ports, [2, 3]);
    assert_eq!(settings.pools[0].algorithm, Algorithm::LeastConnections);
    assert!(settings.all_servers().all(|server| server.max_concurrency == 4));

    let backends = set("--backend", Place::Backends, vec!["http://h:7/a=b", "n=unix:/run/s=1"].into());
    // Laid first, wherever it stands.
    let overrides = [overrides[3].clone(), overrides[4].clone(), backends];
    let settings = Settings::parse(file, Path::new(""), &overrides).unwrap();
    assert_eq!((settings.pools.len(), settings.servers.len()), (1, 0));
    let pool = &settings.pools[0];
    assert_eq!((pool.name.as_str(), pool.algorithm), ("default", Algorithm::LeastConnections));
    let servers: Vec<_> = pool.servers.iter().map(|s| (s.name.as_str(), s.url.to_string())).collect();
    assert_eq!(servers, [("h:7", "http://h:7/a=b".to_owned()), ("n", "unix:/run/s=1".to_owned())]);

    let bad = [
        set("--spin-us", Place::Key("runtime", "spin_us"), (-1).into()),
        set("--listen", Place::Listeners, vec!["nowhere"].into()),
        set("--backend", Place::Backends, vec!["http://h:1", "h:2", "http://h:1"].into()),
        set("--routing-mode", Place::EveryPool("routing_mode"), "wait".into()),
        set("--max-concurrency", Place::EveryServer("max_concurrency"), (-3).into()),
    ];
    let found = Settings::parse("[health]\nfall = 0", Path::new(""), &bad).unwrap_err();
    let paths: Vec<&str> = found.0.iter().map(|fault| fault.path.as_str()).collect();
    let wanted = [
        "--spin-us",
        "--listen",
        "health.fall",
        "--routing-mode",
        "--max-concurrency",
        "--backend",
        "--max-concurrency",
        "--max-concurrency",
        "--backend",
    ];
    assert_eq!(paths, wanted, "{found}");
}

#[test]
fn key_files_are_read_and_their_content_is_not_shown() {
    let text = format!("{SERVER}api_key_file = \"a\"\n[[server]]\nurl = \"http://h\"\napi_key_file = \"/b\"");
    let mut settings = parse(&text).unwrap();
    settings
        .load_files(|path| match path.to_str() {
            Some("/etc/ringway/a") => Ok("  sk-1\n".to_owned()),
            Some("/b") => Ok("sk-2".to_owned()),
            _ => Err("no such file".to_owned()),
        })
        .unwrap();
    assert_eq!(settings.catalog().servers[0].api_key.as_deref(), Some("sk-1"));
    let shown = format!("{settings:?}{}", settings.to_toml());
    assert!(!shown.contains("sk-1") && !shown.contains("sk-2"), "{shown}");
    for (content, reason) in [(Ok(""), "one key"), (Ok("a b"), "one key"), (Err("denied"), "denied")] {
        let read = |_: &Path| content.map(str::to_owned).map_err(str::to_owned);
        let found = parse(&text).unwrap().load_files(read).unwrap_err();
        assert_eq!(found.len(), 2, "every fault at once");
        assert!(
            found.0[0].path == "server[0].api_key_file" && found.0[0].expected.contains(reason),
            "{found}"
        );
    }
}

#[test]
fn warnings_tell_what_is_probably_not_meant() {
    let quiet = parse(SERVER).unwrap();
    assert_eq!(quiet.warnings(), Vec::<String>::new());
    let loud = r#"
[admin]
address = "0.0.0.0:29000"
[[pool]]
name = "empty"
[[server]]
name = "a"
url = "http://h:1/v1"
weight = 0
[[server]]
name = "b"
url = "http://H:1/v1/"
weight = 0
"#;
    let warnings = parse(loud).unwrap().warnings().join("\n");
    for word in ["admin.address", "/v1/v1/", "a and b share", "pool empty", "weight 0"] {
        assert!(warnings.contains(word), "{word}: {warnings}");
    }
}

#[test]
fn the_catalog_numbers_pools_and_servers_in_order() {
    let text = r#"
[[pool]]
name = "chat"
queue_size = 5
[[pool.server]]
name = "a"
url = "http://10.0.0.1:8000/base"
models = ["m"]
weight = 0.5
[[pool]]
name = "embed"
[[pool.server]]
name = "b"
url = "http://gpu.example:8000"
[[server]]
name = "spare"
url = "unix:/s"
models = ["m"]
"#;
    let catalog = parse(text).unwrap().catalog();
    let pools: Vec<&str> = catalog.pools.iter().map(|pool| &*pool.name).collect();
    assert_eq!(pools, ["chat", "embed", "spare", "mixed"]);
    assert_eq!((catalog.pools[0].queue_size, catalog.pools[3].queue_size), (5, 1_024));
    let servers: Vec<_> =
        catalog.servers.iter().map(|s| (&*s.name, s.pool.map(|p| p.0), &*s.weight_text)).collect();
    assert_eq!(servers, [("a", Some(0), "0.5"), ("b", Some(1), "1"), ("spare", None, "1")]);
    assert_eq!(catalog.servers[0].address, Some(Address::Tcp("10.0.0.1:8000".parse().unwrap())));
    assert_eq!((&*catalog.servers[0].base_path, &*catalog.servers[0].host), ("/base", "10.0.0.1:8000"));
    assert_eq!((&catalog.servers[1].address, &catalog.servers[1].models), (&None, &None));
    let url = ServerUrl::parse(&catalog.servers[1].url).unwrap();
    assert_eq!(url.unresolved(), Some(("gpu.example", 8_000)), "a catalog's URL can be read again");
    assert!(catalog.learning);
    let group = catalog.group(catalog.route(Some(b"m"), b"").unwrap().widest());
    assert_eq!((group.candidates.len(), group.pool.0), (2, 3));
    assert_eq!(catalog.version, 1);
}

fn server_settings(index: usize) -> impl Strategy<Value = ServerSettings> {
    let host = prop_oneof![
        any::<std::net::IpAddr>().prop_map(Host::Ip),
        "[a-z][a-z0-9-]{0,8}[a-z](\\.[a-z]{1,5})?".prop_map(Host::Name),
    ];
    let url = prop_oneof![
        3 => (host, 1..=u16::MAX, "(/[a-z0-9%._-]{1,6}){0,2}")
            .prop_map(|(host, port, base_path)| ServerUrl::Http { host, port, base_path }),
        1 => "/[a-zé\"\\\\ ]{1,20}".prop_map(|path| ServerUrl::Unix(path.into())),
    ];
    let weight =
        prop_oneof![Just(0.0), Just(1.0), 0.0..1e9_f64, (0..1_000_u32).prop_map(|n| f64::from(n) / 8.0)];
    let models =
        proptest::collection::hash_set("[^\\p{Cc}]{1,12}", 0..4).prop_map(|m| m.into_iter().collect());
    let key_file = proptest::option::of("/[^\\p{Cc}/]{1,10}".prop_map(Into::into));
    // Few distinct limits: their number is bounded.
    let ceilings = (0..=1_000_000_u32, (0..8_u32).prop_map(|n| n * 125_000_000));
    let tier = "[a-z0-9._~:@-]{0,3}";
    let keys = proptest::collection::btree_set("[!-~]( ?[!-~]){0,4}", 0..3);
    let target = ("[!-~]{0,5}", keys, prop_oneof![Just(0.0), 0.0..1e9_f64]);
    let tier = (tier, target);
    ("[a-zA-Z0-9._~:@-]{1,10}", url, models, weight, ceilings, tier, key_file).prop_map(
        move |(
            name,
            url,
            models,
            weight,
            (max_concurrency, max_input_tokens),
            (routing_tier, (cluster_id, routing_keys, input_tps)),
            api_key_file,
        )| ServerSettings {
            name: format!("{name}{index}"),
            url,
            models,
            weight,
            max_concurrency,
            max_input_tokens,
            routing_tier,
            cluster_id,
            routing_keys: routing_keys.into_iter().collect(),
            input_tps,
            api_key_file,
            api_key: None,
            metrics: EngineMetrics::Sglang,
        },
    )
}

fn servers(from: usize, least: usize) -> impl Strategy<Value = Vec<ServerSettings>> {
    (least..4_usize).prop_flat_map(move |count| (from..from + count).map(server_settings).collect::<Vec<_>>())
}

fn pool_settings(index: usize) -> impl Strategy<Value = PoolSettings> {
    let algorithm = (0..Algorithm::WORDS.len()).prop_map(|i| Algorithm::WORDS[i].1);
    let miss = prop_oneof![Just(Miss::WeightedRoundRobin), Just(Miss::LeastBusy)];
    let kv = (64..=65_536_u32, 1..=1_000_000_u32, 0.0..1e6_f64, 0..=16_777_216_u32, miss);
    let kv = kv.prop_map(|(block_bytes, min_match_blocks, affinity_slack_abs, kv_capacity_blocks, miss)| {
        Kv { block_bytes, min_match_blocks, affinity_slack_abs, kv_capacity_blocks, miss, ..Kv::default() }
    });
    let mode = prop_oneof![Just(RoutingMode::Queue), Just(RoutingMode::Reject), Just(RoutingMode::Unlimited)];
    (algorithm, mode, 0..=1_000_000_u32, 1..=sections::MS_MAX, kv, servers(100 * index, 0)).prop_map(
        move |(algorithm, routing_mode, queue_size, queue_timeout_ms, kv, servers)| PoolSettings {
            name: format!("pool-{index}"),
            algorithm,
            entry: match algorithm {
                Algorithm::Stargate(method) => Some(lb_config::Entry::new(method)),
                _ => None,
            },
            routing_mode,
            queue_size,
            queue_timeout_ms,
            kv,
            servers,
        },
    )
}

fn settings() -> impl Strategy<Value = Settings> {
    let cores = prop_oneof![
        Just(Cores::Allowed),
        proptest::collection::btree_set(0..4_096_usize, 1..40)
            .prop_map(|c| Cores::List(c.into_iter().collect())),
    ];
    let driver = prop_oneof![Just(Driver::Auto), Just(Driver::IoUring), Just(Driver::Epoll)];
    let runtime = (cores, driver, 0..=100_000_u64).prop_map(|(cores, driver, spin_us)| Runtime {
        cores,
        driver,
        spin_us,
    });
    let address = |port: u16| any::<std::net::IpAddr>().prop_map(move |ip| SocketAddr::new(ip, port));
    let limits = (1..1_u64 << 40, 0..1_u64 << 30, 1..sections::MS_MAX, any::<bool>()).prop_map(
        |(body, classify, ms, half)| Limits {
            body_bytes_max: body,
            classify_bytes_max: classify,
            connect_timeout_ms: ms,
            drain_settle_ms: 0,
            kv_memory_bytes_max: body.max(1 << 20),
            half_close: if half { HalfClose::Allow } else { HalfClose::Abort },
            ..Limits::default()
        },
    );
    let health = ("/[a-z?=&]{0,9}", 1..=1_000_u32, 1..1_000_u64).prop_map(|(path, fall, bench_ms)| Health {
        path,
        fall,
        bench_ms,
        ..Health::default()
    });
    let pools = (0..3_usize).prop_flat_map(|count| (0..count).map(pool_settings).collect::<Vec<_>>());
    let log = (any::<bool>(), any::<bool>()).prop_map(|(json, trace)| Log {
        format: if json { LogFormat::Json } else { LogFormat::Text },
        level: if trace { LogLevel::Trace } else { LogLevel::Error },
    });
    let stargate = (
        "[^\\p{Cc}]{1,9}",
        proptest::option::of("/[^\\p{Cc}/]{1,10}".prop_map(Into::into)),
        0..=100_u32,
        any::<bool>(),
        "([a-z-]{1,9})?",
        1_000..=60_000_u64,
        proptest::option::of(address(3)),
    );
    let stargate =
        stargate.prop_map(|(id, lb_config_path, retries, signal, budget, ttl_ms, metrics)| Stargate {
            id,
            lb_config_path,
            max_connect_retries: retries,
            require_retry_signal: signal,
            retry_budget_header: budget,
            registration_ttl_ms: ttl_ms,
            registration_ttl_ms_max: ttl_ms,
            metrics_address: metrics,
            ..Stargate::default()
        });
    let log = (log, stargate, any::<bool>());
    (
        runtime,
        (address(1), address(2), address(0)),
        limits,
        ("X-[A-Za-z]{3,9}-", proptest::option::of("/[a-z\"]{1,9}".prop_map(Into::into))),
        health,
        pools,
        servers(900, 1),
        log,
    )
        .prop_map(
            |(
                runtime,
                (first, second, admin),
                limits,
                (prefix, digest_secret_file),
                health,
                pools,
                servers,
                (log, stargate, trusted),
            )| {
                let profiles = [Profile::OpenAi, if trusted { Profile::Stargate } else { Profile::OpenAi }];
                Settings {
                    runtime,
                    listeners: [first, second]
                        .into_iter()
                        .zip(profiles)
                        .map(|(address, profile)| Listener { address, profile })
                        .collect(),
                    admin: Admin { address: admin },
                    limits,
                    headers: Headers { prefix, digest_secret_file },
                    health,
                    pools,
                    servers,
                    stargate,
                    log,
                    lb_config: None,
                    digest_secret: None,
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn printed_settings_read_as_themselves(settings in settings()) {
        let text = settings.to_toml();
        match parse(&text) {
            Ok(again) => prop_assert_eq!(again, settings),
            Err(faults) => prop_assert!(false, "{}\n{}", faults, text),
        }
    }

    #[test]
    fn any_text_gives_settings_or_faults(text in "[\\[\\]a-z_=\"{}.,\\n 0-9]{0,80}") {
        if let Err(faults) = parse(&text) {
            prop_assert!(!faults.is_empty());
        }
    }
}

/// One set of defaults: what a file leaves out is what the rules say.
#[test]
fn kv_defaults_are_those_of_the_rules() {
    let settings =
        parse("[[pool]]\nalgorithm = \"kv-aware\"\n[[pool.server]]\nurl = \"http://a:1\"").unwrap();
    assert_eq!(settings.catalog().pools[0].kv, crate::proto::backend::catalog::KvRules::default());
}
