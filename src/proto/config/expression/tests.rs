//! The Stargate rules, section 3, rule by rule, and what section 9.3 (R9 to R15) says of expressions.

use super::*;
use crate::proto::config::lb_config::{LbConfig, MethodSettings, Pulsar, WaitAndWiden, Widen};

/// The entry that `value` makes of `base`.
fn over(base: &Entry, value: &str) -> Result<Entry, Refused> {
    match parse(value.as_bytes())? {
        Requested::Expression(expression) => expression.compile(base),
        Requested::Name(method) => panic!("{value}: a mere name, {method:?}"),
    }
}

/// The same over the method's defaults.
fn compile(value: &str) -> Result<Entry, Refused> {
    match parse(value.as_bytes())? {
        Requested::Expression(expression) => expression.compile(&Entry::new(expression.method())),
        Requested::Name(method) => panic!("{value}: a mere name, {method:?}"),
    }
}

fn accepted(value: &str) -> Entry {
    compile(value).unwrap_or_else(|refused| panic!("{value}: {refused:?}"))
}

#[track_caller]
fn refused(value: &str, code: Code) -> String {
    let refused = match parse(value.as_bytes()) {
        Ok(Requested::Name(method)) => panic!("{value}: names {method:?}"),
        Ok(Requested::Expression(_)) => compile(value).expect_err(value),
        Err(refused) => refused,
    };
    assert_eq!(refused.code, code, "{value}: {}", refused.message);
    assert!(!refused.message.is_empty() && !refused.message.contains('\n'));
    refused.message
}

fn malformed(value: &str) -> String {
    refused(value, Code::MalformedExpression)
}

fn widen(entry: &Entry) -> &Widen {
    entry.widen().expect("the method widens")
}

fn pulsar(entry: &Entry) -> &Pulsar {
    match &entry.method {
        MethodSettings::Pulsar(pulsar) | MethodSettings::PulsarWaitAndWiden { pulsar, .. } => pulsar,
        other => panic!("{other:?}"),
    }
}

#[test]
fn codes_have_the_names_of_the_contract() {
    let names = "malformed_expression unknown_method unavailable unknown_parameter not_applicable invalid_value \
                 inert_value inert_combination";
    assert_eq!(Code::ALL.map(Code::name).join(" "), names);
}

#[test]
fn names_fold() {
    for (value, method) in [
        ("POWER_OF_TWO", Method::PowerOfN),
        ("Power_Of_Two", Method::PowerOfN),
        ("powerOf2", Method::PowerOfN),
        ("groq_multiregion", Method::WaitAndWiden),
        ("PULSAR", Method::Pulsar),
        ("  Round-Robin\t", Method::RoundRobin),
        ("pulsar_MULTIREGION", Method::PulsarWaitAndWiden),
    ] {
        assert_eq!(parse(value.as_bytes()), Ok(Requested::Name(method)), "{value}");
        let with_parameter = format!("{}; require_input_tokens=true", value.trim());
        let Ok(Requested::Expression(expression)) = parse(with_parameter.as_bytes()) else {
            panic!("{with_parameter}");
        };
        assert_eq!(expression.method(), method);
    }
}

#[test]
fn unknown_methods() {
    let names =
        "expected one of power-of-n, wait-and-widen, round-robin, random, pulsar, pulsar-wait-and-widen";
    assert_eq!(refused("sticky", Code::UnknownMethod), format!("unknown algorithm 'sticky': {names}"));
    for blank in ["", "   ", "\t"] {
        assert_eq!(refused(blank, Code::UnknownMethod), format!("no algorithm is named: {names}"));
    }
    // An expression's format comes first, then its name.
    assert!(refused("sticky;seed=a", Code::UnknownMethod).contains("'sticky'"));
    assert!(refused("sticky;widen=2", Code::UnknownMethod).contains("'sticky'"));
    malformed("sticky;seed");
    // A comma or a length means nothing without a parameter.
    refused("pulsar,random", Code::UnknownMethod);
    refused(&"x".repeat(5000), Code::UnknownMethod);
    // Not text at all: before all else.
    for bytes in [&b"puls\xe9r"[..], b"pulsar;seed=\xff", b"pulsar\x7f", b"\x00"] {
        let refused = parse(bytes).expect_err("no text");
        assert_eq!(
            (refused.code, &refused.message[..]),
            (Code::UnknownMethod, "the value is not visible ASCII text")
        );
    }
}

#[test]
fn unavailable_names_the_algorithm() {
    let refused = Refused::unavailable(Method::RoundRobin);
    assert_eq!(refused.code, Code::Unavailable);
    assert_eq!(refused.message, "algorithm round-robin is not configured for the model");
}

#[test]
fn a_kilobyte_and_not_a_byte_more() {
    let value = |bytes: usize| {
        let start = "pulsar;seed=\"";
        format!("{start}{}\"", "s".repeat(bytes - start.len() - 1))
    };
    assert_eq!(value(1024).len(), 1024);
    assert_eq!(pulsar(&accepted(&value(1024))).seed.len(), 1010);
    assert_eq!(malformed(&value(1025)), "1025 bytes: expected at most 1024");
    // Spaces count: they are bytes of the value.
    malformed(&format!("{}{}", value(1024), " "));
}

#[test]
fn thirty_two_parameters_and_not_one_more() {
    let value = |count: usize| {
        let parameters: String = (0..count).map(|i| format!(";p{i}=1")).collect();
        format!("pulsar{parameters}")
    };
    // Well-formed: the first unknown name decides.
    assert!(refused(&value(32), Code::UnknownParameter).contains("'p0'"));
    assert_eq!(malformed(&value(33)), "more than 32 parameters");
    // Also when they are wrong in another way.
    malformed(&format!("{};", value(32)));
}

#[test]
fn no_comma_anywhere() {
    assert_eq!(malformed("pulsar;seed=x,random"), "a comma at byte 14: expected none, quoted or not");
    malformed("pulsar;seed=\"a,b\"");
    malformed("pulsar;seed=x,");
}

#[test]
fn no_semicolon_in_a_string() {
    let told = "a ';' at byte 15, inside a quoted string: expected none there";
    assert_eq!(malformed("pulsar;seed=\"a;b\""), told);
    // An escaped quote ends nothing. Without this rule the second is a string with a parameter's look.
    assert!(malformed(r#"pulsar;seed="a\";b""#).contains("inside a quoted string"));
    assert!(malformed(r#"pulsar;seed="a\";n=1""#).contains("inside a quoted string"));
    // The string is over where no backslash is in front of the quote.
    assert!(malformed(r#"pulsar;seed="a\\;b"#).contains("inside a quoted string"));
    assert_eq!(&*pulsar(&accepted(r#"pulsar;seed="a\\";consider_kv_free_tokens=true"#)).seed, "a\\");
    assert!(malformed("pulsar;seed=\"a;n=1").contains("inside a quoted string"));
}

#[test]
fn a_parameter_is_a_name_and_a_value() {
    assert_eq!(malformed("pulsar;seed"), "parameter 1, 'seed': expected name=value");
    assert_eq!(malformed("pulsar;seed=a;"), "parameter 2, '': expected name=value");
    for value in ["pulsar;", "pulsar; ", ";", "pulsar;;seed=a", "pulsar;seed=a; ", "pulsar;seed=a;n"] {
        assert!(malformed(value).ends_with("expected name=value"), "{value}");
    }
    assert_eq!(
        malformed("pulsar;Seed=a"),
        "parameter name 'Seed': expected a lowercase letter, then lowercase letters, digits and '_', up to the '='"
    );
    for name in ["*a", "a*", "a-b", "a.b", "aB", "1a", "_a", "", "seed ", "se ed", "a\t", "\tseed", "s\"d"] {
        assert!(malformed(&format!("pulsar;{name}=1")).starts_with("parameter name '"), "{name}");
    }
    assert_eq!(malformed("pulsar;seed=x;seed=y"), "parameter 'seed' appears twice: expected each once");
    malformed("pulsar;seed=x;seed=x");
    // A name like this one is well-formed, and unknown.
    refused("pulsar;a1_=1", Code::UnknownParameter);
}

#[test]
fn spaces_stand_where_the_format_has_them() {
    for value in [
        "  pulsar;seed=a",
        "pulsar;seed=a  ",
        "pulsar; seed=a",
        "pulsar;   seed=a;  consider_kv_free_tokens=true ",
    ] {
        assert_eq!(&*pulsar(&accepted(value)).seed, "a", "{value}");
    }
    for value in [
        "pulsar ;seed=a",
        "pulsar;seed =a",
        "pulsar;seed= a",
        "pulsar;seed=a ;n=1",
        "pulsar;seed=a b",
        "\tpulsar;seed=a",
        "pulsar;seed=a\t",
        "pulsar;\tseed=a",
        "pul sar;seed=a",
        "pulsar;seed=\"a\tb\"",
    ] {
        malformed(value);
    }
    assert_eq!(
        malformed("pulsar;seed= a"),
        "at byte 13, ' a': expected a value: a number, a token or a quoted string"
    );
}

#[test]
fn the_item_is_a_plain_token() {
    for value in [
        "*pulsar;seed=a",
        "pul/sar;seed=a",
        "pul:sar;seed=a",
        "pul.sar;seed=a",
        "\"pulsar\";seed=a",
        "1;seed=a",
    ] {
        let told = malformed(value);
        assert!(told.contains("no name of an algorithm: expected a letter"), "{told}");
    }
    for value in [";seed=a", " ; seed=a", "-pulsar;seed=a", "(pulsar);seed=a", "_pulsar;seed=a", "?1;seed=a"]
    {
        malformed(value);
    }
    refused("pulsar_2-x;seed=a", Code::UnknownMethod);
}

#[test]
fn numbers_have_the_digits_of_the_format() {
    for value in [
        "1000000000000000",
        "0.0625",
        "1234567890123.0",
        "1.",
        ".5",
        "-",
        "--1",
        "+1",
        "1e3",
        "1.5.2",
        "0x10",
    ] {
        malformed(&format!("wait-and-widen;n={value}"));
        malformed(&format!("pulsar;n={value}"));
    }
    assert_eq!(
        malformed("pulsar;n=0.0625"),
        "at byte 10, '0.0625': expected a decimal of at most 12 digits before the point and 1 to 3 behind it"
    );
    assert_eq!(widen(&accepted("wait-and-widen;n=999999999999999")).n, 999_999_999_999_999);
    let entry = accepted("wait-and-widen;next_bucket_unlock_factor=123456789012.125");
    assert_eq!(widen(&entry).next_bucket_unlock_factor, 123_456_789_012.125);
    assert_eq!(widen(&accepted("wait-and-widen;n=007")).n, 7);
}

#[test]
fn neither_booleans_nor_bytes_for_a_value() {
    assert_eq!(
        malformed("pulsar;consider_kv_free_tokens=?1"),
        "parameter 'consider_kv_free_tokens': ?1: expected true or false"
    );
    malformed("pulsar;consider_kv_free_tokens=?0");
    assert_eq!(malformed("pulsar;seed=:YQ==:"), "parameter 'seed': :YQ==:: expected a quoted string");
    for value in ["@1659578233", "%\"a\"", "(1 2)", "'a'", "?2", ":YQ", "\"a", "\"\\a\""] {
        malformed(&format!("pulsar;seed={value}"));
    }
}

#[test]
fn the_first_failing_parameter_decides() {
    refused("wait-and-widen;n=0;widen=2", Code::InertValue);
    refused("wait-and-widen;widen=2;n=0", Code::UnknownParameter);
    refused("wait-and-widen;sample_count=2;widen=2", Code::NotApplicable);
    refused("wait-and-widen;max_queue_time_floor_ms=1;n=-1", Code::InvalidValue);
    // All of the format comes before any parameter's meaning.
    malformed("wait-and-widen;widen=2;n=0;n=1");
}

#[test]
fn unknown_and_inapplicable_parameters() {
    assert_eq!(
        refused("pulsar;widen=2", Code::UnknownParameter),
        "unknown parameter 'widen' for algorithm pulsar"
    );
    for name in
        ["algorithm", "request_algorithms", "rendezvous_weight", "last_cluster_affinity", "group", "nn"]
    {
        refused(&format!("pulsar;{name}=a"), Code::UnknownParameter);
    }
    assert_eq!(
        refused("wait-and-widen;fallback_max_queued=1", Code::NotApplicable),
        "parameter 'fallback_max_queued' does not apply to wait-and-widen: only to pulsar-wait-and-widen"
    );
    // What does not apply is not looked at.
    refused("random;sample_count=\"no\"", Code::NotApplicable);
    refused("pulsar-wait-and-widen;comparator=ttft", Code::NotApplicable);
}

/// The table: parameter, a value that changes something, who accepts it.
const TABLE: &[(&str, &str, &[Method])] = {
    use Method::{PowerOfN, Pulsar, PulsarWaitAndWiden, Random, RoundRobin, WaitAndWiden};
    const ALL: &[Method] = &[PowerOfN, WaitAndWiden, RoundRobin, Random, Pulsar, PulsarWaitAndWiden];
    const BOTH: &[Method] = &[WaitAndWiden, PulsarWaitAndWiden];
    &[
        ("require_cache_affinity_key", "true", ALL),
        ("require_input_tokens", "true", ALL),
        ("max_input_work_seconds", "0.5", ALL),
        ("sample_count", "3", &[PowerOfN]),
        ("comparator", "utilization", &[PowerOfN, WaitAndWiden]),
        ("seed", "stable-a", &[WaitAndWiden, Pulsar, PulsarWaitAndWiden]),
        ("consider_kv_free_tokens", "true", &[Pulsar, PulsarWaitAndWiden]),
        ("n", "3", BOTH),
        ("max_queued", "3", BOTH),
        ("max_queue_time_floor_ms", "3", BOTH),
        ("max_queue_time_ceil_ms", "3", BOTH),
        ("ttft_bucket_size_ms", "3", BOTH),
        ("next_bucket_unlock_factor", "\"0.0625\"", BOTH),
        ("ignore_queue_time", "true", BOTH),
        ("ignore_input_processing_time", "true", BOTH),
        ("cache_affinity_virtual_nodes", "3", &[WaitAndWiden]),
        ("cache_affinity_backend_selection_count", "3", BOTH),
        ("cache_affinity_input_tokens_scale", "0.5", BOTH),
        ("cache_affinity_wait_ms", "3", BOTH),
        ("band_widen_interval_ms", "3", &[PulsarWaitAndWiden]),
        ("fallback_max_queued", "3", &[PulsarWaitAndWiden]),
    ]
};

/// A parameter does what the field of its name does in a file.
#[test]
fn parameters_are_the_fields_of_the_file() {
    for (name, value, methods) in TABLE {
        for method in Method::ALL {
            let text = format!("{};{name}={value}", method.name());
            if !methods.contains(&method) {
                refused(&text, Code::NotApplicable);
                continue;
            }
            // The two bounds are for each other.
            let (other, json) = match *name {
                "max_queue_time_floor_ms" => (";max_queue_time_ceil_ms=9", ",\"max_queue_time_ceil_ms\":9"),
                "max_queue_time_ceil_ms" => (";max_queue_time_floor_ms=9", ",\"max_queue_time_floor_ms\":9"),
                _ => ("", ""),
            };
            let value = match *value {
                "utilization" | "stable-a" => format!("\"{value}\""),
                value => value.trim_matches('"').to_owned(),
            };
            let file =
                format!(r#"{{"models":{{"m":{{"algorithm":"{}","{name}":{value}{json}}}}}}}"#, method.name());
            let config = LbConfig::parse(file.as_bytes()).unwrap();
            let expected = config.entry(config.resolve(b"m", None).unwrap());
            assert_ne!(expected, &Entry::new(method), "{text}: the value changes nothing");
            assert_eq!(&accepted(&format!("{text}{other}")), expected, "{text}");
        }
    }
}

#[test]
fn what_is_not_named_stays() {
    let file = r#"{"models":{"m":{"algorithm":"wait-and-widen","n":0,"seed":"file","comparator":"queue-time","max_queued":5,
        "cache_affinity_virtual_nodes":0,"max_input_work_seconds":-1,"cache_affinity_backend_selection_count":0}}}"#;
    let config = LbConfig::parse(file.as_bytes()).unwrap();
    let base = config.entry(config.resolve(b"m", Some(Method::WaitAndWiden)).unwrap());
    let mut expected = base.clone();
    let MethodSettings::WaitAndWiden(own) = &mut expected.method else { panic!("{base:?}") };
    own.widen.max_queued = 6;
    assert_eq!(
        over(base, "groq_multiregion;max_queued=6").unwrap(),
        expected,
        "inert zeros of the file stay"
    );
    let emptied = over(base, "wait-and-widen;seed=\"\"").unwrap();
    assert!(
        matches!(&emptied.method, MethodSettings::WaitAndWiden(WaitAndWiden { seed, .. }) if seed.is_empty())
    );
}

#[test]
#[should_panic(expected = "the base is the model's entry")]
fn a_base_of_another_method_is_a_bug() {
    let _ = over(&Entry::new(Method::Random), "pulsar;seed=a");
}

#[test]
fn flags_are_true_or_false() {
    for value in ["true", "\"true\"", "false", "\"false\""] {
        let entry = accepted(&format!("random;require_input_tokens={value}"));
        assert_eq!(entry.require_input_tokens, value.contains("true"));
    }
    for value in ["True", "TRUE", "1", "0", "\"\"", "yes", "\" true\"", "1.0", "\"1\""] {
        let told = refused(&format!("random;require_input_tokens={value}"), Code::InvalidValue);
        assert_eq!(told, format!("parameter 'require_input_tokens': {value}: expected true or false"));
    }
}

#[test]
fn whole_numbers() {
    for (value, n) in [
        ("0", 0),
        ("-0", 0),
        ("25", 25),
        ("\"25\"", 25),
        ("\"+25\"", 25),
        ("\"007\"", 7),
        ("\"18446744073709551615\"", u64::MAX),
    ] {
        assert_eq!(widen(&accepted(&format!("wait-and-widen;max_queued={value}"))).max_queued, n, "{value}");
    }
    for value in [
        "-1",
        "1.0",
        "2.5",
        "\"1.0\"",
        "\"-1\"",
        "\"-0\"",
        "\"\"",
        "\" 1\"",
        "\"1 \"",
        "\"1e3\"",
        "\"0x1\"",
        "ten",
        "true",
        "\"18446744073709551616\"",
        "\"++1\"",
        "\"1_000\"",
    ] {
        let told = refused(&format!("wait-and-widen;max_queued={value}"), Code::InvalidValue);
        assert_eq!(told, format!("parameter 'max_queued': {value}: expected a whole number, 0 or greater"));
    }
    for name in ["max_queue_time_floor_ms", "max_queue_time_ceil_ms", "cache_affinity_wait_ms"] {
        refused(&format!("pulsar-wait-and-widen;{name}=-1"), Code::InvalidValue);
    }
    for name in ["cache_affinity_wait_ms", "band_widen_interval_ms", "fallback_max_queued"] {
        accepted(&format!("pulsar-wait-and-widen;{name}=0"));
    }
}

#[test]
fn zeros_without_an_effect() {
    let told = "parameter 'n': 0 would have no effect: expected a whole number above 0";
    assert_eq!(refused("wait-and-widen;n=0", Code::InertValue), told);
    for name in ["n", "ttft_bucket_size_ms", "cache_affinity_backend_selection_count"] {
        for value in ["0", "\"0\"", "-0", "\"+00\""] {
            refused(&format!("pulsar-wait-and-widen;{name}={value}"), Code::InertValue);
        }
        for value in ["-1", "\"-1\"", "1.0", "one"] {
            let told = refused(&format!("wait-and-widen;{name}={value}"), Code::InvalidValue);
            assert!(told.ends_with("expected a whole number above 0"), "{told}");
        }
    }
    refused("wait-and-widen;cache_affinity_virtual_nodes=0", Code::InertValue);
    let told = refused("wait-and-widen;cache_affinity_virtual_nodes=1025", Code::InvalidValue);
    assert_eq!(
        told,
        "parameter 'cache_affinity_virtual_nodes': 1025: expected a whole number from 1 to 1024"
    );
    accepted("wait-and-widen;cache_affinity_virtual_nodes=1024");
    accepted("wait-and-widen;cache_affinity_virtual_nodes=1");
}

#[test]
fn seconds_of_input_work() {
    for (value, x) in [("3", 3.0), ("0.001", 0.001), ("\"0.0001\"", 0.0001), ("\"+2.50\"", 2.5)] {
        let entry = accepted(&format!("round-robin;max_input_work_seconds={value}"));
        assert_eq!(entry.max_input_work_seconds, Some(x));
    }
    for value in ["0", "0.0", "-0.0", "-1", "\"-0.5\"", "\"0\""] {
        let told = refused(&format!("round-robin;max_input_work_seconds={value}"), Code::InertValue);
        assert!(told.contains("no effect: expected a number above 0"), "{told}");
    }
    for value in [
        "one",
        "inf",
        "\"inf\"",
        "\"NaN\"",
        "\"1e3\"",
        "\".5\"",
        "\"1.\"",
        "\"\"",
        "\"+\"",
        "\" 1\"",
        "\"1 000\"",
    ] {
        refused(&format!("round-robin;max_input_work_seconds={value}"), Code::InvalidValue);
    }
    let huge = format!("round-robin;max_input_work_seconds=\"{}\"", "9".repeat(400));
    let told = refused(&huge, Code::InvalidValue);
    assert!(told.len() < 200, "shortened: {told}");
}

#[test]
fn factors_and_scales() {
    for (value, x) in [("\"0.0625\"", 0.0625), ("-1.5", -1.5), ("0", 0.0), ("-0.0", 0.0), ("\"-3\"", -3.0)] {
        let entry = accepted(&format!("wait-and-widen;next_bucket_unlock_factor={value}"));
        assert_eq!(widen(&entry).next_bucket_unlock_factor.to_bits(), f64::to_bits(x));
    }
    refused("wait-and-widen;next_bucket_unlock_factor=quarter", Code::InvalidValue);
    for value in ["0", "1", "0.5", "\"0.0625\"", "1.0", "-0"] {
        accepted(&format!("pulsar-wait-and-widen;cache_affinity_input_tokens_scale={value}"));
    }
    for value in ["-0.001", "1.001", "2", "\"1.0001\"", "half"] {
        let told =
            refused(&format!("wait-and-widen;cache_affinity_input_tokens_scale={value}"), Code::InvalidValue);
        assert!(told.ends_with("expected a number from 0.0 to 1.0"), "{told}");
    }
}

#[test]
fn sample_counts_and_comparators() {
    for value in ["1", "64", "\"2\""] {
        accepted(&format!("power-of-n;sample_count={value}"));
    }
    for value in ["65", "0", "999", "\"1.0\"", "\"0\"", "-2", "two"] {
        let told = refused(&format!("powerOf2;sample_count={value}"), Code::InvalidValue);
        assert_eq!(told, format!("parameter 'sample_count': {value}: expected a whole number from 1 to 64"));
    }
    for comparator in Comparator::ALL {
        for value in [comparator.name().to_owned(), format!("\"{}\"", comparator.name())] {
            let entry = accepted(&format!("power-of-n;comparator={value}"));
            assert!(matches!(entry.method, MethodSettings::PowerOfN(own) if own.comparator == comparator));
        }
    }
    for value in ["TTFT", "queue_time", "1", "\"\"", "latency"] {
        let told = refused(&format!("wait-and-widen;comparator={value}"), Code::InvalidValue);
        assert!(
            told.ends_with("one of ttft, queue-time, input-work-seconds, utilization, num-requests-queued")
        );
    }
}

#[test]
fn seeds_are_any_text_and_no_number() {
    for (value, seed) in [
        ("stable-a", "stable-a"),
        ("\"stable-a\"", "stable-a"),
        ("a/b:c.d*", "a/b:c.d*"),
        ("\"a b \\\"c\\\" \\\\\"", "a b \"c\" \\"),
        ("\"\"", ""),
        ("\"1\"", "1"),
        ("true", "true"),
        ("*x", "*x"),
    ] {
        for method in ["pulsar", "wait-and-widen", "pulsar-wait-and-widen"] {
            let entry = accepted(&format!("{method};seed={value}"));
            let stored = match &entry.method {
                MethodSettings::WaitAndWiden(own) => &own.seed,
                _ => &pulsar(&entry).seed,
            };
            assert_eq!(&**stored, seed);
        }
    }
    for value in ["1", "-1", "1.5"] {
        let told = refused(&format!("pulsar;seed={value}"), Code::InvalidValue);
        assert_eq!(told, format!("parameter 'seed': {value}: expected a token or a quoted string"));
    }
}

#[test]
fn the_queue_time_pair() {
    let lone = |name: &str| {
        let file = format!(r#"{{"models":{{"m":{{"algorithm":"wait-and-widen","{name}":70}}}}}}"#);
        let config = LbConfig::parse(file.as_bytes()).unwrap();
        config.entry(config.resolve(b"m", None).unwrap()).clone()
    };
    let none = Entry::new(Method::WaitAndWiden);
    let code = |base: &Entry, value: &str| over(base, value).map_err(|refused| refused.code);
    let told = over(&none, "wait-and-widen;max_queue_time_floor_ms=100").unwrap_err();
    assert_eq!(
        (told.code, &told.message[..]),
        (
            Code::InertCombination,
            "parameter 'max_queue_time_floor_ms' would have no effect alone: expected max_queue_time_ceil_ms to be set too"
        )
    );
    for (name, other) in [
        ("max_queue_time_floor_ms", "max_queue_time_ceil_ms"),
        ("max_queue_time_ceil_ms", "max_queue_time_floor_ms"),
    ] {
        let named = format!("wait-and-widen;{name}=100");
        assert_eq!(code(&none, &named), Err(Code::InertCombination));
        assert_eq!(code(&lone(name), &named), Err(Code::InertCombination), "the same one again");
        assert_eq!(
            code(&none, &format!("{named};{other}=0")).map(|e| widen(&e).queue_time_ms().is_some()),
            Ok(true)
        );
        // The other one stands in the file: the expression completes the pair.
        let entry = over(&lone(other), &named).unwrap();
        let expected = if name.contains("floor") { (100, 70) } else { (70, 100) };
        assert_eq!(widen(&entry).queue_time_ms(), Some(expected));
        // A lone one in the file is nobody's business while the expression names neither.
        assert_eq!(widen(&code(&lone(name), "wait-and-widen;n=3").unwrap()).queue_time_ms(), None);
    }
}

#[test]
fn the_examples_of_the_guide() {
    let entry = accepted("pulsar;seed=stable-a;consider_kv_free_tokens=true");
    assert_eq!((&*pulsar(&entry).seed, pulsar(&entry).consider_kv_free_tokens), ("stable-a", true));
    let entry = accepted("wait-and-widen;n=3;max_queue_time_floor_ms=200;max_queue_time_ceil_ms=2000");
    assert_eq!((widen(&entry).n, widen(&entry).queue_time_ms()), (3, Some((200, 2000))));
    // Validate-routing, step 4.
    accepted("pulsar;seed=test");
    refused("pulsar;widen=2", Code::UnknownParameter);
    assert_eq!(
        accepted("wait-and-widen;n=3").effective_json(),
        r#"{"algorithm":"wait-and-widen","comparator":"ttft","cache_affinity_virtual_nodes":150,"cache_affinity_input_tokens_scale":1.0,"cache_affinity_wait_ms":0,"ttft_bucket_size_ms":20,"next_bucket_unlock_factor":0.25,"n":3,"max_queued":0,"ignore_queue_time":false,"ignore_input_processing_time":false,"require_cache_affinity_key":false,"require_input_tokens":false}"#
    );
}

/// Section 9.3, as far as it is about values alone.
#[test]
fn cases_r9_to_r15() {
    // R9: two seeds, two configurations.
    assert_ne!(accepted("pulsar;seed=a"), accepted("pulsar;seed=b"));
    // R10: the same configuration. That there are two counters is the cache's, which keeps them by the bytes of the value.
    assert_eq!(
        accepted("round-robin;require_input_tokens=false"),
        accepted("ROUND_ROBIN;require_input_tokens=false")
    );
    // R11, R12.
    for value in [
        "pulsar;seed",
        "pulsar;seed=x;seed=y",
        "pulsar;seed=x,random",
        "pulsar;n=0.0625",
        "pulsar;n=1000000000000000",
    ] {
        malformed(value);
    }
    // R13.
    refused("wait-and-widen;fallback_max_queued=1", Code::NotApplicable);
    // R14.
    for value in ["0", "999", "\"1.0\""] {
        refused(&format!("power-of-n;sample_count={value}"), Code::InvalidValue);
    }
    // R15.
    refused("wait-and-widen;max_queue_time_floor_ms=100", Code::InertCombination);
}
