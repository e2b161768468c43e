//! Routing expressions against a second statement of the rules (the Stargate rules, section 3): one for the format, one for the
//! parameters, both as naive as they read. A well-formed expression must come to what a file with the same fields has.

use proptest::prelude::*;
use proptest::sample::select;
use ringway::proto::config::expression::{Code, Refused, Requested, parse};
use ringway::proto::config::lb_config::{Entry, LbConfig, Method};

#[path = "../fuzz/invariants_config.rs"]
mod invariants;

/// The format, piece by piece. No `;` is quoted where the first three rules hold, so pieces are what stands between them.
fn is_well_formed(value: &str) -> bool {
    if value.len() > 1024 || value.contains(',') || semicolon_is_quoted(value) {
        return false;
    }
    let value = value.trim_matches(' ');
    let mut pieces = value.split(';');
    let head = pieces.next().unwrap();
    let is_head = head.starts_with(|c: char| c.is_ascii_alphabetic())
        && head.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    let mut names: Vec<&str> = Vec::new();
    let are_parameters = pieces.all(|piece| {
        let Some((name, value)) = piece.trim_start_matches(' ').split_once('=') else { return false };
        let is_name = name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            && !names.contains(&name);
        names.push(name);
        is_name && (is_number(value) || is_token(value) || is_string(value))
    });
    is_head && are_parameters && names.len() <= 32
}

fn semicolon_is_quoted(value: &str) -> bool {
    let mut quoted = false;
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => {
                // What is escaped neither ends the string nor counts.
                chars.next();
            }
            '"' => quoted = !quoted,
            ';' if quoted => return true,
            _ => {}
        }
    }
    false
}

fn are_digits(text: &str, count: std::ops::RangeInclusive<usize>) -> bool {
    count.contains(&text.len()) && text.chars().all(|c| c.is_ascii_digit())
}

fn is_number(text: &str) -> bool {
    let text = text.strip_prefix('-').unwrap_or(text);
    match text.split_once('.') {
        Some((whole, part)) => are_digits(whole, 1..=12) && are_digits(part, 1..=3),
        None => are_digits(text, 1..=15),
    }
}

fn is_token(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '*')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~:/".contains(c))
}

fn is_string(text: &str) -> bool {
    let Some(text) = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) else { return false };
    // A quote that was escaped is no end: then nothing is left to strip, or a lone backslash.
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' if matches!(chars.next(), Some('"' | '\\')) => {}
            '\\' | '"' => return false,
            ' '..='~' => {}
            _ => return false,
        }
    }
    true
}

/// Text from the alphabet of expressions, of which a good part is well-formed or nearly so.
fn near_expressions() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => select(vec!["pulsar", "random", "x-1_", "seed", "n", "a1_", "true", "1", "-12", "0.5", "12345678.125", "*t", "a/b:c"]),
        4 => select(vec![";", "=", ";", "=", "; "]),
        1 => select(vec![" ", "\"", "\"a b\"", "\"\\\"\"", "\"\\\\\"", "\\", ",", "?1", ":YQ==:", "A", "-", ".", "*", "0.0625", "1.", "@1"]),
    ];
    let pieces = prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat());
    let wild = prop::collection::vec(select((b' '..=b'~').map(char::from).collect::<Vec<_>>()), 0..20);
    let value = prop_oneof![
        30 => "[a-z*][a-zA-Z/:.]{0,4}",
        30 => "-?[0-9]{1,12}(\\.[0-9]{1,3})?",
        30 => "\"[ !#-+.-:<-\\[\\]-~]{0,6}\"",
        1 => "-?[0-9]{13,16}(\\.[0-9]{0,4})?",
        1 => "\"[ -~]{0,6}\"",
        1 => "[ -~]{0,6}",
    ];
    let parameter = ("[a-z][a-z0-9_]{1,4}", value);
    let parameters = prop::collection::vec(parameter, 1..36);
    prop_oneof![
        3 => pieces,
        1 => wild.prop_map(|chars| format!("pulsar;a={}", chars.into_iter().collect::<String>())),
        2 => parameters.prop_map(|all| {
            all.into_iter().fold("random".to_owned(), |text, (name, value)| text + ";" + &name + "=" + &value)
        }),
    ]
}

/// A parameter's row in the table: its reader, and who accepts it.
const TABLE: &[(&str, Reader, &str)] = &[
    ("require_cache_affinity_key", Reader::Bool, "PWRXUB"),
    ("require_input_tokens", Reader::Bool, "PWRXUB"),
    ("max_input_work_seconds", Reader::Seconds, "PWRXUB"),
    ("sample_count", Reader::Samples, "P"),
    ("comparator", Reader::Comparator, "PW"),
    ("seed", Reader::Text, "WUB"),
    ("consider_kv_free_tokens", Reader::Bool, "UB"),
    ("n", Reader::Positive, "WB"),
    ("max_queued", Reader::Uint, "WB"),
    ("max_queue_time_floor_ms", Reader::Uint, "WB"),
    ("max_queue_time_ceil_ms", Reader::Uint, "WB"),
    ("ttft_bucket_size_ms", Reader::Positive, "WB"),
    ("next_bucket_unlock_factor", Reader::Number, "WB"),
    ("ignore_queue_time", Reader::Bool, "WB"),
    ("ignore_input_processing_time", Reader::Bool, "WB"),
    ("cache_affinity_virtual_nodes", Reader::Nodes, "W"),
    ("cache_affinity_backend_selection_count", Reader::Positive, "WB"),
    ("cache_affinity_input_tokens_scale", Reader::Scale, "WB"),
    ("cache_affinity_wait_ms", Reader::Uint, "WB"),
    ("band_widen_interval_ms", Reader::Uint, "B"),
    ("fallback_max_queued", Reader::Uint, "B"),
];

const LETTERS: [char; 6] = ['P', 'W', 'R', 'X', 'U', 'B'];

#[derive(Clone, Copy, Debug)]
enum Reader {
    Bool,
    Text,
    Comparator,
    Uint,
    Positive,
    Samples,
    Nodes,
    Number,
    Seconds,
    Scale,
}

/// The value as JSON has it, or the code.
fn read(reader: Reader, value: &str) -> Result<String, Code> {
    let quoted = value.starts_with('"');
    let content = value.trim_matches('"');
    let word = if quoted || is_token(value) { Some(content) } else { None };
    let plain = {
        let digits = content.strip_prefix(['+', '-']).unwrap_or(content);
        let are = |text: &str| are_digits(text, 1..=usize::MAX);
        if quoted {
            digits.split_once('.').map_or(are(digits), |(a, b)| are(a) && are(b))
        } else {
            is_number(value)
        }
    };
    let uint = (plain && !content.contains('.')).then(|| content.trim_start_matches('+'));
    // What is not quoted is a number of the format, of which "-0" is 0.
    let uint =
        uint.and_then(
            |digits| if !quoted && digits.trim_matches('0') == "-" { Some(0) } else { digits.parse().ok() },
        );
    let number: Option<f64> = if plain { content.parse().ok() } else { None };
    let json = |x: f64| serde_json::to_string(&x).unwrap();
    let uint_from = |least: u64, most: u64, zero: Code| match uint {
        Some(n) if (least..=most).contains(&n) => Ok(n.to_string()),
        Some(0) => Err(zero),
        _ => Err(Code::InvalidValue),
    };
    match reader {
        Reader::Bool => {
            word.filter(|word| ["true", "false"].contains(word)).map(str::to_owned).ok_or(Code::InvalidValue)
        }
        Reader::Text => word.map(|word| serde_json::to_string(word).unwrap()).ok_or(Code::InvalidValue),
        Reader::Comparator => {
            let known = ["ttft", "queue-time", "input-work-seconds", "utilization", "num-requests-queued"];
            word.filter(|word| known.contains(word))
                .map(|word| format!("\"{word}\""))
                .ok_or(Code::InvalidValue)
        }
        Reader::Uint => uint_from(0, u64::MAX, Code::InvalidValue),
        Reader::Positive => uint_from(1, u64::MAX, Code::InertValue),
        Reader::Samples => uint_from(1, 64, Code::InvalidValue),
        Reader::Nodes => uint_from(1, 1024, Code::InertValue),
        Reader::Number => number.map(json).ok_or(Code::InvalidValue),
        Reader::Seconds => match number {
            Some(x) if x > 0.0 => Ok(json(x)),
            Some(_) => Err(Code::InertValue),
            None => Err(Code::InvalidValue),
        },
        Reader::Scale => number.filter(|x| (0.0..=1.0).contains(x)).map(json).ok_or(Code::InvalidValue),
    }
}

/// What the parameters come to over the method's defaults: the fields of a file, or the code.
fn compile(method: Method, parameters: &[(&str, &str)]) -> Result<String, Code> {
    let mut fields = String::new();
    for (name, value) in parameters {
        let Some((_, reader, accepted)) = TABLE.iter().find(|row| row.0 == *name) else {
            return Err(Code::UnknownParameter);
        };
        if !accepted.contains(LETTERS[method as usize]) {
            return Err(Code::NotApplicable);
        }
        fields += &format!(",\"{name}\":{}", read(*reader, value)?);
    }
    let bounds = parameters.iter().filter(|(name, _)| name.starts_with("max_queue_time_")).count();
    if bounds == 1 { Err(Code::InertCombination) } else { Ok(fields) }
}

/// Names and values that go together often enough: of the method's own parameters mostly, and of their kind mostly.
fn parameters() -> impl Strategy<Value = (Method, Vec<(&'static str, &'static str)>)> {
    let values: &[&str] = &[
        "true",
        "false",
        "\"true\"",
        "True",
        "1",
        "0",
        "-0",
        "-1",
        "2",
        "64",
        "65",
        "1024",
        "1025",
        "\"3\"",
        "\"+4\"",
        "\"-5\"",
        "\"007\"",
        "\"1.0\"",
        "1.0",
        "0.5",
        "-0.25",
        "\"0.0625\"",
        "\"\"",
        "\".5\"",
        "\"1.\"",
        "\"1e3\"",
        "\"inf\"",
        "ttft",
        "queue-time",
        "\"utilization\"",
        "stable-a",
        "\"a b\"",
        "999999999999999",
        "\"18446744073709551615\"",
        "\"18446744073709551616\"",
        "*x",
        "\"NaN\"",
    ];
    let method = select(&Method::ALL[..]);
    (method, 0usize..25).prop_flat_map(move |(method, odd)| {
        let own: Vec<&'static str> =
            TABLE.iter().filter(|row| row.2.contains(LETTERS[method as usize])).map(|row| row.0).collect();
        let others = [
            "n",
            "sample_count",
            "fallback_max_queued",
            "rendezvous_weight",
            "algorithm",
            "widen",
            "comparator",
        ];
        let name = if odd == 0 { select(others.to_vec()).boxed() } else { select(own).boxed() };
        let pair = (name, select(values.to_vec())).prop_map(|(name, value)| {
            let reader = TABLE.iter().find(|row| row.0 == name).map(|row| row.1);
            // Half of the values that would be refused give way to one that is not: else few expressions get far.
            let fitting = match reader {
                Some(Reader::Bool) => "true",
                Some(Reader::Comparator) => "queue-time",
                Some(Reader::Text) => "s",
                Some(Reader::Samples | Reader::Nodes | Reader::Positive | Reader::Uint) => "7",
                Some(Reader::Number | Reader::Seconds | Reader::Scale) => "0.75",
                None => value,
            };
            (name, value, fitting)
        });
        let pairs = prop::collection::vec((pair, any::<bool>()), 1..8);
        pairs.prop_map(move |pairs| {
            let mut parameters: Vec<(&str, &str)> = Vec::new();
            for ((name, value, fitting), keep) in pairs {
                if parameters.iter().all(|(earlier, _)| *earlier != name) {
                    parameters.push((name, if keep { value } else { fitting }));
                }
            }
            (method, parameters)
        })
    })
}

fn compiled(value: &str) -> Result<Entry, Refused> {
    match parse(value.as_bytes())? {
        Requested::Expression(expression) => expression.compile(&Entry::new(expression.method())),
        Requested::Name(_) => panic!("{value}: no expression"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn the_format_is_that_of_the_second_statement(value in near_expressions()) {
        let verdict = parse(value.as_bytes());
        if value.contains(';') {
            let malformed = matches!(&verdict, Err(refused) if refused.code == Code::MalformedExpression);
            prop_assert_eq!(!malformed, is_well_formed(&value), "{}: {:?}", value, verdict);
        } else {
            prop_assert!(!matches!(verdict, Err(refused) if refused.code != Code::UnknownMethod));
        }
        invariants::expression(value.as_bytes());
    }

    #[test]
    fn an_expression_comes_to_what_a_file_with_its_fields_has((method, parameters) in parameters()) {
        let text = parameters.iter().fold(method.name().to_owned(), |text, (name, value)| format!("{text}; {name}={value}"));
        let found = compiled(&text).map_err(|refused| refused.code);
        match compile(method, &parameters) {
            Err(code) => prop_assert_eq!(found, Err(code), "{}", text),
            Ok(fields) => {
                let file = format!(r#"{{"models":{{"m":{{"algorithm":"{}"{fields}}}}}}}"#, method.name());
                let config = LbConfig::parse(file.as_bytes()).unwrap_or_else(|faults| panic!("{file}: {faults}"));
                let expected = config.entry(config.resolve(b"m", None).unwrap());
                prop_assert_eq!(found.as_ref(), Ok(expected), "{}", text);
            }
        }
        invariants::expression(text.as_bytes());
    }

    #[test]
    fn a_file_holds_its_invariants(model in parameters(), asked in parameters(), default in "[a-z-]{0,12}|random|pulsar") {
        let entry = |(method, parameters): &(Method, Vec<(&str, &str)>)| {
            let fields: String = parameters.iter().map(|(name, value)| format!(",\"{name}\":{value}")).collect();
            format!(r#"{{"algorithm":"{}"{fields}}}"#, method.name())
        };
        let file = format!(
            r#"{{"default":"{default}","request_algorithms":{{"{}":{}}},"models":{{"m":{},"n":"random"}}}}"#,
            asked.0.name(), entry(&asked), entry(&model)
        );
        invariants::lb_config(file.as_bytes());
    }
}

/// That the strategies above reach what they are for.
#[test]
fn the_strategies_reach_both_verdicts() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut draw = |count: usize, verdict: &dyn Fn(&mut proptest::test_runner::TestRunner) -> bool| {
        (0..count).filter(|_| verdict(&mut runner)).count()
    };
    let well_formed = draw(2000, &|runner| {
        let value = near_expressions().new_tree(runner).unwrap().current();
        value.contains(';') && is_well_formed(&value)
    });
    assert!((100..1900).contains(&well_formed), "{well_formed} of 2000 are well-formed");
    let accepted = draw(2000, &|runner| {
        let (method, parameters) = parameters().new_tree(runner).unwrap().current();
        compile(method, &parameters).is_ok()
    });
    assert!((300..1700).contains(&accepted), "{accepted} of 2000 are accepted");
}

/// The corpora of the fuzz targets, replayed.
#[test]
fn fuzz_corpus() {
    for (target, check) in [
        ("expression", invariants::expression as fn(&[u8])),
        ("lb_config", invariants::lb_config as fn(&[u8])),
    ] {
        let dir = format!("{}/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 15, "corpus of {target} is missing: {dir}");
        for file in files {
            let data = std::fs::read(&file).unwrap();
            std::panic::catch_unwind(|| check(&data)).unwrap_or_else(|_| panic!("{}", file.display()));
        }
    }
}
