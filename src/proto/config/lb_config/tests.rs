//! The Stargate rules, section 1, rule by rule.

use super::*;
use crate::proto::config::fault::Fault;

fn parse(json: &str) -> LbConfig {
    LbConfig::parse(json.as_bytes()).unwrap_or_else(|faults| panic!("{json}:\n{faults}"))
}

/// The faults of a text, one a line.
fn faults(json: &str) -> String {
    LbConfig::parse(json.as_bytes()).expect_err(json).to_string()
}

/// The one fault of a text.
fn fault(json: &str) -> Fault {
    let Faults(mut all) = LbConfig::parse(json.as_bytes()).expect_err(json);
    assert_eq!(all.len(), 1, "{json}: {all:?}");
    all.remove(0)
}

/// The entry of a model whose entry is that.
fn model(entry: &str) -> Entry {
    let config = parse(&format!(r#"{{"models":{{"m":{entry}}}}}"#));
    config.entry(config.resolve(b"m", None).expect("it is configured")).clone()
}

/// `model` with one field beside the algorithm.
fn with(method: Method, field: &str, value: &str) -> Result<Entry, Faults> {
    let text = format!(r#"{{"models":{{"m":{{"algorithm":"{}","{field}":{value}}}}}}}"#, method.name());
    let config = LbConfig::parse(text.as_bytes())?;
    Ok(config.entry(config.resolve(b"m", None).expect("it is configured")).clone())
}

fn widen(entry: &Entry) -> &Widen {
    entry.widen().expect("the method widens")
}

#[test]
fn without_a_file_all_methods_may_be_asked_for() {
    let config = LbConfig::permissive();
    assert_eq!((config.default_name(), config.model_overrides(), config.entry_count()), ("power-of-n", 0, 6));
    let default = config.resolve(b"any", None).unwrap();
    assert_eq!(config.entry(default), &Entry::new(Method::PowerOfN));
    for method in Method::ALL {
        let id = config.resolve(b"any", Some(method)).unwrap();
        assert_eq!(config.entry(id), &Entry::new(method));
    }
    assert_eq!(config.resolve(b"any", Some(Method::PowerOfN)), Some(default), "one state, not two");
}

#[test]
fn an_empty_file_allows_nothing_but_the_default() {
    let config = parse("{}");
    assert_eq!((config.default_name(), config.model_overrides()), ("power-of-n", 0));
    let default = config.resolve(b"m", None);
    assert_eq!(config.entry(default.unwrap()), &Entry::new(Method::PowerOfN));
    for method in Method::ALL {
        let expected = if method == Method::PowerOfN { default } else { None };
        assert_eq!(config.resolve(b"m", Some(method)), expected, "{method:?}");
    }
}

#[test]
fn the_helmfile_example_of_the_guide() {
    let config = parse(
        r#"{
          "default": "power-of-n",
          "request_algorithms": {"round-robin": "round-robin"},
          "models": {
            "model-a": {
              "algorithm": "wait-and-widen",
              "cache_affinity_backend_selection_count": 2,
              "cache_affinity_wait_ms": 200
            }
          }
        }"#,
    );
    assert_eq!((config.default_name(), config.model_overrides()), ("power-of-n", 1));
    let MethodSettings::WaitAndWiden(own) = &config.entry(config.resolve(b"model-a", None).unwrap()).method
    else {
        panic!("another method");
    };
    let expected = Widen { cache_affinity_wait_ms: 200, ..Widen::default() };
    assert_eq!((own.group, &own.widen), (2, &expected));
    // Validate-routing, step 2: present in request_algorithms. Step 3: neither.
    for model in [&b"model-a"[..], b"model-b"] {
        assert!(config.resolve(model, Some(Method::RoundRobin)).is_some());
        assert_eq!(config.resolve(model, Some(Method::Random)), None);
    }
    assert_eq!(config.resolve(b"model-b", Some(Method::WaitAndWiden)), None);
}

#[test]
fn defaults_are_those_of_the_table() {
    assert_eq!(
        model(r#""power-of-n""#).method,
        MethodSettings::PowerOfN(PowerOfN { sample_count: 2, comparator: Comparator::Ttft })
    );
    let shared = Widen {
        n: 2,
        max_queued: 0,
        max_queue_time_floor_ms: None,
        max_queue_time_ceil_ms: None,
        ttft_bucket_size_ms: 20,
        next_bucket_unlock_factor: 0.25,
        ignore_queue_time: false,
        ignore_input_processing_time: false,
        cache_affinity_wait_ms: 0,
        cache_affinity_input_tokens_scale: 1.0,
    };
    assert_eq!(
        model(r#"{"algorithm":"wait-and-widen"}"#).method,
        MethodSettings::WaitAndWiden(WaitAndWiden {
            seed: "".into(),
            comparator: Comparator::Ttft,
            widen: shared.clone(),
            virtual_nodes: 150,
            group: 0,
        })
    );
    let pulsar =
        Pulsar { seed: "".into(), consider_kv_free_tokens: false, weight: RendezvousWeight::MaxInputTps };
    assert_eq!(model(r#""pulsar""#).method, MethodSettings::Pulsar(pulsar.clone()));
    assert_eq!(
        model(r#""pulsar-wait-and-widen""#).method,
        MethodSettings::PulsarWaitAndWiden {
            pulsar,
            widen: shared,
            group: 1,
            band_widen_interval_ms: None,
            fallback_max_queued: 0,
        }
    );
    for entry in [r#""round-robin""#, r#"{"algorithm":"random"}"#] {
        let entry = model(entry);
        assert!(!entry.require_cache_affinity_key && !entry.require_input_tokens);
        assert_eq!(entry.max_input_work_seconds, None);
    }
}

#[test]
fn every_spelling_in_every_place() {
    let spellings = [
        (Method::PowerOfN, "power-of-n power-of-two powerOf2 powerOfN powerof2 powerofn"),
        (Method::WaitAndWiden, "wait-and-widen groq-multiregion"),
        (Method::RoundRobin, "round-robin"),
        (Method::Random, "random"),
        (Method::Pulsar, "pulsar"),
        (Method::PulsarWaitAndWiden, "pulsar-wait-and-widen pulsar-multiregion"),
    ];
    for (method, names) in spellings {
        for name in names.split(' ') {
            let config = parse(&format!(
                r#"{{"default":"{name}","request_algorithms":{{"{name}":{{"algorithm":"{name}","require_input_tokens":true}}}},
                    "models":{{"a":"{name}","b":{{"algorithm":"{name}"}},"c":"random"}}}}"#
            ));
            assert_eq!(config.default_name(), method.name());
            for model in [&b"a"[..], b"b", b"any"] {
                let entry = config.entry(config.resolve(model, None).unwrap());
                assert_eq!(entry.method(), method, "{name}");
            }
            let asked = config.entry(config.resolve(b"c", Some(method)).unwrap());
            assert_eq!((asked.method(), asked.require_input_tokens), (method, method != Method::Random));
            let header = format!(" {}\t", name.to_uppercase().replace('-', "_"));
            assert_eq!(Method::parse_header(header.as_bytes()), Some(method), "{header}");
        }
    }
}

#[test]
fn other_spellings_are_for_headers_only() {
    for name in ["Power-Of-N", "power_of_n", "RANDOM", "round_robin", " pulsar", "", "sticky"] {
        let told = fault(&format!(r#"{{"default":"{name}"}}"#));
        assert_eq!((&told.path[..], &told.value), ("default", &format!("\"{name}\"")));
        assert!(told.expected.starts_with("expected the name of an algorithm: \"power-of-n\", "), "{told}");
        assert_eq!(Method::parse_file(name), None);
    }
    assert!(fault(r#"{"default":"power_of_n"}"#).expected.ends_with("nearest: \"power-of-n\""));
    for name in ["", "   ", "sticky", "round robin", "pulsar-", "power-of-2", "wait--and-widen", "\u{e9}"] {
        assert_eq!(Method::parse_header(name.as_bytes()), None, "{name}");
    }
}

#[test]
fn the_default_is_a_name_and_nothing_else() {
    for value in ["null", "1", "true", "[]", r#"{"algorithm":"random"}"#] {
        let told = fault(&format!(r#"{{"default":{value}}}"#));
        assert!(told.path == "default" && told.expected.contains("name of an algorithm"), "{told}");
    }
}

#[test]
fn an_entry_is_a_name_or_an_object() {
    for value in ["null", "1", "true", "[]", "2.5"] {
        for (text, path) in [
            (format!(r#"{{"models":{{"m":{value}}}}}"#), "models.m"),
            (format!(r#"{{"request_algorithms":{{"random":{value}}}}}"#), "request_algorithms.random"),
        ] {
            let told = fault(&text);
            assert_eq!((told.path.as_str(), told.expected.starts_with("expected the name of")), (path, true));
        }
    }
    for key in ["models", "request_algorithms"] {
        for value in ["null", "[]", "\"random\"", "3"] {
            let told = fault(&format!(r#"{{"{key}":{value}}}"#));
            assert!(told.path == key && told.expected.starts_with("expected an object"), "{told}");
        }
    }
    assert!(fault("[]").to_string().starts_with("file: (a list): expected an object"));
    assert!(fault("\"random\"").to_string().starts_with("file: \"random\": expected an object"));
}

#[test]
fn syntax_is_told_by_line_and_column() {
    let told = fault("{\n  \"default\": \"random\",\n  \"models\": {]\n}");
    assert_eq!((told.path.as_str(), told.value.as_str()), ("line 3, column 14", "\"models\": {]"));
    assert_eq!(told.expected, "expected JSON: key must be a string");
    assert_eq!(
        fault("").to_string(),
        "line 1, column 0: (nothing): expected JSON: EOF while parsing a value"
    );
    assert!(fault("{} {}").expected.ends_with("trailing characters"));
    assert!(fault("{\"default\":NaN}").path.starts_with("line 1"));
    assert!(
        fault(r#"{"models":{"m":{"algorithm":"random","max_input_work_seconds":1e999}}}"#)
            .expected
            .ends_with("number out of range")
    );
    assert!(LbConfig::parse(b"{\"default\":\"\xff\"}").is_err());
    let deep = "{\"a\":".repeat(200);
    assert!(fault(&deep).expected.ends_with("recursion limit exceeded"));
}

#[test]
fn unknown_keys_of_the_top_level() {
    let told = fault(r#"{"defualt":"random"}"#);
    assert_eq!((told.path.as_str(), told.value.as_str()), ("defualt", "\"random\""));
    assert!(told.expected.ends_with("nearest: default"), "{told}");
    assert!(fault(r#"{"default":"random","default":"pulsar"}"#).expected.contains("each key once"));
}

#[test]
fn a_detailed_object_names_its_algorithm() {
    let told = fault(r#"{"models":{"m":{"seed":"a"}}}"#);
    assert_eq!((told.path.as_str(), told.value.as_str()), ("models.m.algorithm", "(missing)"));
    let told = fault(r#"{"models":{"m":{"algorithm":"sticky"}}}"#);
    assert_eq!((told.path.as_str(), told.value.as_str()), ("models.m.algorithm", "\"sticky\""));
    for value in ["null", "3", "{}"] {
        let told = fault(&format!(r#"{{"models":{{"m":{{"algorithm":{value}}}}}}}"#));
        assert_eq!(told.path, "models.m.algorithm");
    }
}

/// Fields, and who accepts them in a file: the table, P for power-of-n, W for wait-and-widen, U for pulsar, B for both together.
const ACCEPTED: &[(&str, &str, &str)] = &[
    ("require_cache_affinity_key", "true", "PWUBrx"),
    ("require_input_tokens", "true", "PWUBrx"),
    ("max_input_work_seconds", "1.5", "PWUBrx"),
    ("request_algorithms", "{}", "PWUBrx"),
    ("sample_count", "3", "P"),
    ("comparator", "\"utilization\"", "PW"),
    ("seed", "\"s\"", "WUB"),
    ("consider_kv_free_tokens", "true", "UB"),
    ("n", "3", "WB"),
    ("max_queued", "3", "WB"),
    ("max_queue_time_floor_ms", "3", "WB"),
    ("max_queue_time_ceil_ms", "3", "WB"),
    ("ttft_bucket_size_ms", "3", "WB"),
    ("next_bucket_unlock_factor", "-0.5", "WB"),
    ("ignore_queue_time", "true", "WB"),
    ("ignore_input_processing_time", "true", "WB"),
    ("cache_affinity_virtual_nodes", "3", "WB"),
    ("cache_affinity_backend_selection_count", "3", "WB"),
    ("cache_affinity_wait_ms", "3", "WB"),
    ("cache_affinity_input_tokens_scale", "0.5", "WB"),
    ("band_widen_interval_ms", "3", "B"),
    ("fallback_max_queued", "3", "B"),
    ("rendezvous_weight", "\"last-mean-input-tps\"", "UB"),
    ("last_cluster_affinity", "false", "WB"),
];

#[test]
fn fields_are_accepted_as_the_table_says() {
    let letters = ['P', 'W', 'r', 'x', 'U', 'B'];
    for &(field, value, accepted) in ACCEPTED {
        for (method, letter) in Method::ALL.into_iter().zip(letters) {
            let read = with(method, field, value);
            if accepted.contains(letter) {
                let entry = read.unwrap_or_else(|faults| panic!("{faults}"));
                // Of no effect: the last three are the defaults, the map is none, the ring is another's.
                let inert = matches!(field, "request_algorithms" | "last_cluster_affinity")
                    || (field, letter) == ("cache_affinity_virtual_nodes", 'B');
                assert_eq!(entry == Entry::new(method), inert, "{field} for {method:?}");
            } else {
                let Faults(all) = read.expect_err(field);
                assert_eq!((all.len(), all[0].path.as_str(), all[0].value.as_str()), (1, "models.m", field));
                let named =
                    format!("expected only fields of {}: algorithm, request_algorithms", method.name());
                assert!(all[0].expected.starts_with(&named), "{}", all[0]);
            }
        }
    }
}

#[test]
fn stopped_even_where_the_value_is_the_default() {
    for (method, field, value) in [
        (Method::Random, "sample_count", "2"),
        (Method::RoundRobin, "seed", "\"\""),
        (Method::WaitAndWiden, "consider_kv_free_tokens", "false"),
        (Method::PulsarWaitAndWiden, "comparator", "\"ttft\""),
        (Method::Pulsar, "n", "null"),
    ] {
        assert!(with(method, field, value).is_err(), "{field}");
    }
}

#[test]
fn offending_names_stand_in_one_fault() {
    let told = fault(
        r#"{"models":{"m":{"algorithm":"powerOf2","seed":"s","n":0,"sampel_count":3,"comparator":"ttft"}}}"#,
    );
    assert_eq!((told.path.as_str(), told.value.as_str()), ("models.m", "seed, n, sampel_count"));
    assert!(told.expected.starts_with("expected only fields of power-of-n: algorithm, "), "{told}");
    assert!(told.expected.ends_with("; nearest: sample_count"), "{told}");
}

#[test]
fn values_are_stored_where_they_belong() {
    let entry = model(
        r#"{"algorithm":"pulsar-multiregion","require_cache_affinity_key":true,"require_input_tokens":true,
            "max_input_work_seconds":3,"seed":"é","consider_kv_free_tokens":true,"rendezvous_weight":"last-mean-input-tps",
            "n":5,"max_queued":6,"max_queue_time_floor_ms":7,"max_queue_time_ceil_ms":8,"ttft_bucket_size_ms":9,
            "next_bucket_unlock_factor":-10,"ignore_queue_time":true,"ignore_input_processing_time":true,
            "cache_affinity_virtual_nodes":11,"cache_affinity_backend_selection_count":12,"cache_affinity_wait_ms":13,
            "cache_affinity_input_tokens_scale":0.5,"band_widen_interval_ms":14,"fallback_max_queued":18446744073709551615}"#,
    );
    let expected = Entry {
        require_cache_affinity_key: true,
        require_input_tokens: true,
        max_input_work_seconds: Some(3.0),
        method: MethodSettings::PulsarWaitAndWiden {
            pulsar: Pulsar {
                seed: "é".into(),
                consider_kv_free_tokens: true,
                weight: RendezvousWeight::LastMeanInputTps,
            },
            widen: Widen {
                n: 5,
                max_queued: 6,
                max_queue_time_floor_ms: Some(7),
                max_queue_time_ceil_ms: Some(8),
                ttft_bucket_size_ms: 9,
                next_bucket_unlock_factor: -10.0,
                ignore_queue_time: true,
                ignore_input_processing_time: true,
                cache_affinity_wait_ms: 13,
                cache_affinity_input_tokens_scale: 0.5,
            },
            group: 12,
            band_widen_interval_ms: Some(14),
            fallback_max_queued: u64::MAX,
        },
    };
    assert_eq!(entry, expected);
    assert_eq!(widen(&entry).queue_time_ms(), Some((7, 8)));
    let entry = model(
        r#"{"seed":"s","comparator":"num-requests-queued","cache_affinity_virtual_nodes":11,
            "cache_affinity_backend_selection_count":12,"algorithm":"wait-and-widen"}"#,
    );
    let expected = WaitAndWiden {
        seed: "s".into(),
        comparator: Comparator::NumRequestsQueued,
        widen: Widen::default(),
        virtual_nodes: 11,
        group: 12,
    };
    assert_eq!(entry.method, MethodSettings::WaitAndWiden(expected));
    for comparator in Comparator::ALL {
        let entry = with(Method::PowerOfN, "comparator", &format!("\"{}\"", comparator.name())).unwrap();
        assert_eq!(entry.method, MethodSettings::PowerOfN(PowerOfN { sample_count: 2, comparator }));
    }
}

#[test]
fn zeros_that_act_as_one_and_bounds_that_are_alone() {
    for (method, field) in [(Method::WaitAndWiden, "n"), (Method::PulsarWaitAndWiden, "n")] {
        assert_eq!(widen(&with(method, field, "0").unwrap()).n, 1);
    }
    let zero = with(Method::WaitAndWiden, "cache_affinity_virtual_nodes", "0").unwrap();
    assert!(matches!(zero.method, MethodSettings::WaitAndWiden(WaitAndWiden { virtual_nodes: 1, .. })));
    let off = with(Method::WaitAndWiden, "cache_affinity_backend_selection_count", "0").unwrap();
    assert!(matches!(off.method, MethodSettings::WaitAndWiden(WaitAndWiden { group: 0, .. })));
    let one = with(Method::PulsarWaitAndWiden, "cache_affinity_backend_selection_count", "0").unwrap();
    assert!(matches!(one.method, MethodSettings::PulsarWaitAndWiden { group: 1, .. }));
    let alone = with(Method::WaitAndWiden, "max_queue_time_floor_ms", "100").unwrap();
    assert_eq!(widen(&alone).queue_time_ms(), None);
    assert_eq!(widen(&alone).max_queue_time_floor_ms, Some(100));
    let zero = with(Method::WaitAndWiden, "ttft_bucket_size_ms", "0").unwrap();
    assert_eq!(widen(&zero).ttft_bucket_size_ms, 0, "in a file it may be");
}

#[test]
fn null_is_unset_but_for_two_fields() {
    for &(field, _, accepted) in ACCEPTED {
        let letters = ['P', 'W', 'r', 'x', 'U', 'B'];
        let methods = Method::ALL.into_iter().zip(letters).filter(|(_, letter)| accepted.contains(*letter));
        for (method, _) in methods {
            let read = with(method, field, "null");
            match field {
                "sample_count" => {
                    let expected = "models.m.sample_count: null: expected a whole number from 1 to 64";
                    assert_eq!(read.expect_err(field).to_string(), expected);
                }
                "comparator" => {
                    let told = read.expect_err(field).to_string();
                    assert!(told.starts_with("models.m.comparator: null: expected \"ttft\", "), "{told}");
                }
                _ => assert_eq!(read.unwrap(), Entry::new(method), "{field}"),
            }
        }
    }
}

#[test]
fn wrong_types_and_ranges() {
    let whole = "expected a whole number from 0 to 18446744073709551615";
    let cases: &[(Method, &str, &[&str], &str)] = &[
        (Method::Random, "require_cache_affinity_key", &["1", "\"true\"", "[]"], "expected true or false"),
        (Method::Random, "require_input_tokens", &["0", "{}"], "expected true or false"),
        (Method::Pulsar, "consider_kv_free_tokens", &["\"false\""], "expected true or false"),
        (Method::Random, "max_input_work_seconds", &["\"1\"", "true", "[1]"], "expected a number"),
        (
            Method::PowerOfN,
            "sample_count",
            &["0", "65", "-1", "2.0", "\"2\"", "1e1"],
            "expected a whole number from 1 to 64",
        ),
        (Method::Pulsar, "seed", &["1", "true", "[]"], "expected a string"),
        (Method::WaitAndWiden, "n", &["-1", "2.5", "\"2\"", "18446744073709551616", "true"], whole),
        (Method::WaitAndWiden, "cache_affinity_wait_ms", &["-1", "0.5"], whole),
        (
            Method::WaitAndWiden,
            "cache_affinity_virtual_nodes",
            &["8193", "-1"],
            "expected a whole number from 0 to 8192",
        ),
        (
            Method::WaitAndWiden,
            "cache_affinity_input_tokens_scale",
            &["-0.1", "1.001", "2", "\"1\""],
            "expected a number from 0.0 to 1.0",
        ),
        (
            Method::Pulsar,
            "rendezvous_weight",
            &["\"max\"", "1"],
            "expected \"max-input-tps\" or \"last-mean-input-tps\"",
        ),
        (Method::WaitAndWiden, "last_cluster_affinity", &["true"], "not in this version; expected false"),
        (Method::WaitAndWiden, "request_algorithms", &["[]", "\"random\""], "expected an object"),
        (
            Method::WaitAndWiden,
            "comparator",
            &["\"TTFT\"", "\"queue_time\"", "0"],
            "expected \"ttft\", \"queue-time\"",
        ),
    ];
    for (method, field, values, expected) in cases {
        for value in *values {
            let Faults(all) = with(*method, field, value).expect_err(value);
            assert_eq!((all.len(), &all[0].path), (1, &format!("models.m.{field}")), "{value}");
            assert!(all[0].expected.starts_with(expected), "{}", all[0]);
        }
    }
    for value in ["-5", "0", "1e300", "0.001"] {
        let entry = with(Method::Random, "max_input_work_seconds", value).unwrap();
        assert_eq!(entry.max_input_work_seconds, Some(value.parse().unwrap()), "no range");
    }
    for value in ["0", "1", "1.0", "0.0", "-0.0"] {
        assert!(with(Method::WaitAndWiden, "cache_affinity_input_tokens_scale", value).is_ok(), "{value}");
    }
    for value in ["1", "64"] {
        assert!(with(Method::PowerOfN, "sample_count", value).is_ok());
    }
    assert!(with(Method::WaitAndWiden, "next_bucket_unlock_factor", "-1e308").is_ok());
}

#[test]
fn a_key_and_its_entry_are_of_one_method() {
    let told = fault(r#"{"request_algorithms":{"pulsar":"random"}}"#);
    assert_eq!((told.path.as_str(), told.value.as_str()), ("request_algorithms.pulsar", "random"));
    assert_eq!(told.expected, "expected an entry for pulsar, as its key says");
    let told = fault(
        r#"{"models":{"m":{"algorithm":"random","request_algorithms":{"groq-multiregion":{"algorithm":"pulsar"}}}}}"#,
    );
    assert_eq!(told.path, "models.m.request_algorithms.groq-multiregion");
    assert!(parse(r#"{"request_algorithms":{"powerOf2":"power-of-two"}}"#).resolve(b"m", None).is_some());
    let told = fault(r#"{"request_algorithms":{"Pulsar":"pulsar"}}"#);
    assert_eq!((told.path.as_str(), told.value.as_str()), ("request_algorithms.Pulsar", "\"Pulsar\""));
}

#[test]
fn of_two_keys_for_one_method_the_later_wins() {
    let config = parse(
        r#"{"default":"random","request_algorithms":{
            "power-of-two":{"algorithm":"power-of-n","sample_count":3},
            "pulsar":{"algorithm":"pulsar","seed":"a"},
            "powerOfN":{"algorithm":"power-of-n","sample_count":4},
            "pulsar":{"algorithm":"pulsar","seed":"b"}},
            "models":{"m":"random","m":"pulsar"}}"#,
    );
    let asked = |model: &[u8], method| config.entry(config.resolve(model, Some(method)).unwrap());
    let four = MethodSettings::PowerOfN(PowerOfN { sample_count: 4, ..PowerOfN::default() });
    assert_eq!(asked(b"x", Method::PowerOfN).method, four);
    assert!(matches!(&asked(b"x", Method::Pulsar).method, MethodSettings::Pulsar(own) if *own.seed == *"b"));
    assert_eq!(asked(b"m", Method::Pulsar), &Entry::new(Method::Pulsar), "the later entry of a model, too");
    assert_eq!(config.model_overrides(), 1);
    // The same field twice in one entry is nobody's intention.
    let told = fault(r#"{"models":{"m":{"algorithm":"pulsar","seed":"a","seed":"b"}}}"#);
    assert_eq!(told.to_string(), "models.m.seed: \"b\": expected each key once");
}

/// Section 1.5, step by step. The seeds tell the entries apart.
#[test]
fn resolving_goes_step_by_step() {
    let config = parse(
        r#"{"default":"pulsar",
            "request_algorithms":{
              "pulsar":{"algorithm":"pulsar","seed":"top"},
              "wait-and-widen":{"algorithm":"wait-and-widen","seed":"top"},
              "round-robin":"round-robin"},
            "models":{
              "own":{"algorithm":"wait-and-widen","seed":"own",
                "request_algorithms":{
                  "wait-and-widen":{"algorithm":"wait-and-widen","seed":"nested-same"},
                  "pulsar":{"algorithm":"pulsar","seed":"nested","request_algorithms":{"random":"random"}}}},
              "bare":"random"}}"#,
    );
    let seed = |model: &[u8], method| {
        config.resolve(model, method).map(|id| match &config.entry(id).method {
            MethodSettings::Pulsar(own) => own.seed.to_string(),
            MethodSettings::WaitAndWiden(own) => own.seed.to_string(),
            other => format!("{other:?}"),
        })
    };
    let (pulsar, widen) = (Some(Method::Pulsar), Some(Method::WaitAndWiden));
    // 2: nothing asked for.
    assert_eq!(seed(b"other", None).as_deref(), Some(""));
    assert_eq!(seed(b"own", None).as_deref(), Some("own"));
    assert_eq!(seed(b"bare", None).as_deref(), Some("Random"));
    // 3: the configured one, which beats the map beside it.
    assert_eq!(seed(b"other", pulsar).as_deref(), Some(""));
    assert_eq!(config.resolve(b"other", pulsar), config.resolve(b"other", None));
    assert_eq!(seed(b"own", widen).as_deref(), Some("own"));
    // 4: the set's own map.
    assert_eq!(seed(b"own", pulsar).as_deref(), Some("nested"));
    assert_eq!(seed(b"other", widen).as_deref(), Some("top"));
    // 5: the top-level map, also for a bare entry.
    assert_eq!(seed(b"own", Some(Method::RoundRobin)).as_deref(), Some("RoundRobin"));
    assert_eq!(seed(b"bare", pulsar).as_deref(), Some("top"));
    // 6: nowhere; a map nested in an override counts for nothing, nor does another set's configured method.
    assert_eq!(seed(b"own", Some(Method::Random)), None);
    assert_eq!(seed(b"other", Some(Method::Random)), None);
    assert_eq!(seed(b"own", Some(Method::PowerOfN)), None);
    // Exact model ids.
    assert_eq!(config.resolve(b"OWN", None), config.resolve(b"other", None));
    let config = parse(r#"{"default":"random","models":{"m":"pulsar"}}"#);
    assert_eq!(config.resolve(b"m", Some(Method::Random)), None, "the default is no allow-list entry");
}

/// The same algorithm through two entries is two load balancers.
#[test]
fn entries_have_ids_of_their_own() {
    let config = parse(
        r#"{"request_algorithms":{"round-robin":"round-robin"},"models":{"a":"round-robin","b":"round-robin"}}"#,
    );
    let ids = [&b"a"[..], b"b", b"c"].map(|model| config.resolve(model, Some(Method::RoundRobin)).unwrap());
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
    assert!(ids.iter().all(|id| id.index() < config.entry_count()));
}

#[test]
fn a_map_nested_in_an_override_is_checked() {
    let text = |nested: &str| {
        format!(
            r#"{{"request_algorithms":{{"pulsar":{{"algorithm":"pulsar","request_algorithms":{nested}}}}}}}"#
        )
    };
    let config = parse(&text(r#"{"random":"random"}"#));
    assert_eq!(config.resolve(b"m", Some(Method::Random)), None);
    assert_eq!(
        fault(&text(r#"{"sticky":"random"}"#)).path,
        "request_algorithms.pulsar.request_algorithms.sticky"
    );
}

#[test]
fn every_fault_at_once_in_the_order_of_the_text() {
    let text = r#"{
        "default": "sticky",
        "extra": 1,
        "request_algorithms": {"pulsar": {"algorithm": "pulsar", "n": 2}},
        "models": {
            "meta-llama/Llama-3.1": {"algorithm": "power-of-n", "sample_count": 65, "comparator": "latency"},
            "b": 7
        }
    }"#;
    let names =
        r#""power-of-n", "wait-and-widen", "round-robin", "random", "pulsar" or "pulsar-wait-and-widen""#;
    let pulsar = "algorithm, request_algorithms, require_cache_affinity_key, require_input_tokens, \
                  max_input_work_seconds, seed, consider_kv_free_tokens, rendezvous_weight";
    let told = faults(text);
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 6, "{told}");
    assert_eq!(lines[0], format!("default: \"sticky\": expected the name of an algorithm: {names}"));
    assert_eq!(lines[1], "extra: 1: unknown key; expected \"default\", \"request_algorithms\" or \"models\"");
    assert_eq!(lines[2], format!("request_algorithms.pulsar: n: expected only fields of pulsar: {pulsar}"));
    assert_eq!(
        lines[3],
        "models[\"meta-llama/Llama-3.1\"].sample_count: 65: expected a whole number from 1 to 64"
    );
    assert_eq!(
        lines[4],
        "models[\"meta-llama/Llama-3.1\"].comparator: \"latency\": expected \"ttft\", \"queue-time\", \
         \"input-work-seconds\", \"utilization\" or \"num-requests-queued\""
    );
    assert_eq!(lines[5], "models.b: 7: expected the name of an algorithm or an object with \"algorithm\"");
}

#[test]
fn long_and_odd_texts_are_shortened() {
    let long = "x".repeat(500);
    let told = fault(&format!(r#"{{"default":"{long}","models":{{}}}}"#));
    assert!(told.value.chars().count() < 90 && told.value.ends_with("…\""), "{told}");
    let told = faults(&format!(r#"{{"models":{{"{long}":1,"a\nb":1,"":1}}}}"#));
    assert!(told.lines().all(|line| line.chars().count() < 200), "{told}");
    assert_eq!(told.lines().count(), 3, "a line each: {told}");
}

#[test]
fn effective_for_every_method() {
    let text = |entry: &str| model(entry).effective_json();
    let tail = r#""require_cache_affinity_key":false,"require_input_tokens":false}"#;
    for (entry, expected) in [
        (r#""power-of-n""#, r#"{"algorithm":"power-of-n","sample_count":2,"comparator":"ttft","#),
        (r#""round-robin""#, r#"{"algorithm":"round-robin","#),
        (r#""random""#, r#"{"algorithm":"random","#),
        (
            r#""pulsar""#,
            r#"{"algorithm":"pulsar","consider_kv_free_tokens":false,"rendezvous_weight":"max-input-tps","#,
        ),
        (
            r#"{"algorithm":"pulsar-multiregion","cache_affinity_wait_ms":300,"seed":"a\"\\b"}"#,
            r#"{"algorithm":"pulsar-wait-and-widen","seed":"a\"\\b","consider_kv_free_tokens":false,"rendezvous_weight":"max-input-tps","cache_affinity_backend_selection_count":1,"cache_affinity_input_tokens_scale":1.0,"cache_affinity_wait_ms":300,"band_widen_interval_ms":300,"fallback_max_queued":0,"ttft_bucket_size_ms":20,"next_bucket_unlock_factor":0.25,"n":2,"max_queued":0,"ignore_queue_time":false,"ignore_input_processing_time":false,"#,
        ),
        (
            r#"{"algorithm":"wait-and-widen","seed":"s","cache_affinity_backend_selection_count":2,"max_queue_time_floor_ms":1,"max_queue_time_ceil_ms":2}"#,
            r#"{"algorithm":"wait-and-widen","comparator":"ttft","seed":"s","cache_affinity_virtual_nodes":150,"cache_affinity_backend_selection_count":2,"cache_affinity_input_tokens_scale":1.0,"cache_affinity_wait_ms":0,"ttft_bucket_size_ms":20,"next_bucket_unlock_factor":0.25,"n":2,"max_queued":0,"max_queue_time_floor_ms":1,"max_queue_time_ceil_ms":2,"ignore_queue_time":false,"ignore_input_processing_time":false,"#,
        ),
    ] {
        assert_eq!(text(entry), format!("{expected}{tail}"));
    }
    assert!(
        text(r#"{"algorithm":"random","max_input_work_seconds":3}"#)
            .ends_with(r#""require_input_tokens":false,"max_input_work_seconds":3.0}"#)
    );
}

/// What a log line shows can be put into a file, and then is what it was.
#[test]
fn effective_is_a_files_entry() {
    for method in Method::ALL {
        let bare = Entry::new(method);
        let letters = ['P', 'W', 'r', 'x', 'U', 'B'];
        let letter = letters[method as usize];
        let fields = ACCEPTED.iter().filter(|(_, _, accepted)| accepted.contains(letter));
        let fields: String = fields.map(|(field, value, _)| format!(",\"{field}\":{value}")).collect();
        let full = model(&format!(r#"{{"algorithm":"{}"{fields}}}"#, method.name()));
        assert_eq!(model(&full.effective_json()), full);
        let again = model(&bare.effective_json());
        assert_eq!(again.effective_json(), bare.effective_json());
    }
}
