//! The public structured-field test vectors (`tests/data/structured-fields`): our reader of RFC 8941 items agrees with every one of
//! them, and a routing expression with every one that the rules for expressions do not narrow down. What they narrow down is listed
//! here, with the reason.

use std::collections::BTreeMap;

use ringway::proto::config::expression::sfv::{self, Bare, Item};
use ringway::proto::config::expression::{Code, parse};
use serde_json::Value;

/// About items, and lists of which many have a single item.
const FILES: [&str; 14] = [
    "item",
    "number",
    "number-generated",
    "string",
    "string-generated",
    "token",
    "token-generated",
    "boolean",
    "binary",
    "date",
    "display-string",
    "examples",
    "param-list",
    "key-generated",
];

struct Vector {
    file: &'static str,
    name: String,
    /// Lines of a field are one value, joined (RFC 8941 section 4.2).
    raw: String,
    /// An item, or a list of at most one that is no inner list.
    expected: Option<Value>,
    /// Both verdicts are right.
    can_fail: bool,
}

/// The vectors that can be read as an item.
fn vectors() -> Vec<Vector> {
    let mut all = Vec::new();
    for file in FILES {
        let path = format!("{}/tests/data/structured-fields/{file}.json", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let Ok(Value::Array(records)) = serde_json::from_str(&text) else { panic!("{path}: no list") };
        for record in records {
            let lines: Vec<&str> =
                record["raw"].as_array().unwrap().iter().map(|l| l.as_str().unwrap()).collect();
            let raw = lines.join(", ");
            let expected =
                (record.get("must_fail") != Some(&Value::Bool(true))).then(|| record["expected"].clone());
            let expected = match record["header_type"].as_str().unwrap() {
                "item" => expected,
                // A list of one item reads as that item; one with a comma in it or of lists is none. What may not be in a list's
                // only item may not be in an item.
                "list" => match expected {
                    Some(list) if list.as_array().unwrap().len() == 1 && !list[0][0].is_array() => {
                        Some(list[0].clone())
                    }
                    Some(_) => continue,
                    None => None,
                },
                _ => continue,
            };
            let can_fail = record.get("can_fail") == Some(&Value::Bool(true));
            all.push(Vector {
                file,
                name: record["name"].as_str().unwrap().to_owned(),
                raw,
                expected,
                can_fail,
            });
        }
    }
    assert!(all.len() > 1000, "{} vectors", all.len());
    all
}

/// Types that RFC 9651 added: RFC 8941, which the rules name, has none of them.
fn is_of_9651(value: &Value) -> bool {
    matches!(value[0]["__type"].as_str(), Some("date" | "displaystring"))
}

fn bits(text: &str, alphabet: &str, bits_each: u32) -> Vec<u8> {
    let (mut bytes, mut held, mut count) = (Vec::new(), 0u32, 0);
    for digit in text.bytes().filter(|b| *b != b'=') {
        let value = alphabet.bytes().position(|b| b == digit).expect("a digit") as u32;
        held = held << bits_each | value;
        count += bits_each;
        if count >= 8 {
            count -= 8;
            bytes.push((held >> count) as u8);
            held &= (1 << count) - 1;
        }
    }
    bytes
}

fn is_same(bare: &Bare<'_>, expected: &Value) -> bool {
    let typed = |kind: &str| (expected["__type"] == kind).then(|| expected["value"].as_str().unwrap());
    match bare {
        Bare::Integer(n) => expected.as_i64() == Some(*n),
        Bare::Decimal(x) => expected.is_f64() && expected.as_f64() == Some(*x),
        Bare::String(text) => expected.as_str() == Some(text.as_ref()),
        Bare::Token(text) => typed("token") == Some(text),
        Bare::Boolean(on) => expected.as_bool() == Some(*on),
        Bare::Bytes(base64) => {
            let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
            let found = bits(base64, alphabet, 6);
            typed("binary").is_some_and(|base32| bits(base32, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 5) == found)
        }
    }
}

/// Item and parameters, the last of each name at the first one's place.
fn agrees(item: &Item<'_>, expected: &Value) -> bool {
    let mut parameters: Vec<(&str, &Bare<'_>)> = Vec::new();
    for parameter in &item.parameters {
        match parameters.iter_mut().find(|(name, _)| *name == parameter.name) {
            Some((_, value)) => *value = &parameter.value,
            None => parameters.push((parameter.name, &parameter.value)),
        }
    }
    let wanted = expected[1].as_array().unwrap();
    is_same(&item.value, &expected[0])
        && parameters.len() == wanted.len()
        && parameters
            .iter()
            .zip(wanted)
            .all(|((name, value), wanted)| wanted[0] == *name && is_same(value, &wanted[1]))
}

#[test]
fn items_are_read_as_the_vectors_have_it() {
    let (mut accepted, mut refused, mut newer) = (0, 0, 0);
    for vector in vectors() {
        let Vector { file, name, raw, expected, can_fail } = &vector;
        let read = sfv::parse(raw.as_bytes());
        match (expected, read) {
            (Some(expected), Err(_)) if is_of_9651(expected) => newer += 1,
            (Some(expected), Ok(item)) => {
                assert!(agrees(&item, expected), "{file}, {name}: {raw:?}: {item:?} is not {expected}");
                accepted += 1;
            }
            (Some(_), Err(fault)) => assert!(can_fail, "{file}, {name}: {raw:?}: {fault:?}"),
            (None, Ok(item)) => panic!("{file}, {name}: {raw:?} must fail: {item:?}"),
            (None, Err(fault)) => {
                assert!(fault.at <= raw.len() && !fault.expected.is_empty());
                refused += 1;
            }
        }
    }
    // The last are the dates and display strings that RFC 9651 has: each is refused here, or it would not agree.
    assert_eq!((accepted, refused, newer), (539, 555, 17));
}

/// Why an expression refuses a value that RFC 8941 has: the narrower rules.
fn narrowed(raw: &str, item: &Item<'_>) -> Option<&'static str> {
    match &item.value {
        Bare::Boolean(_) => Some("booleans are written as words"),
        Bare::Bytes(_) => Some("no parameter is of bytes"),
        _ if raw.contains(',') => Some("no comma anywhere, so that nobody takes the value for a list"),
        Bare::String(text) if text.contains(';') => {
            Some("no ';' in a string, so that a ';' starts a parameter")
        }
        _ if raw.starts_with(' ') => Some("no space between '=' and the value"),
        _ => narrowed_parameters(item),
    }
}

fn narrowed_parameters(item: &Item<'_>) -> Option<&'static str> {
    let mut names = Vec::new();
    for parameter in &item.parameters {
        if parameter.text.is_empty() {
            return Some("no parameter without a value");
        }
        if !parameter.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_') {
            return Some("names without '-', '.' and '*'");
        }
        if names.contains(&parameter.name) {
            return Some("each name once");
        }
        names.push(parameter.name);
        if matches!(parameter.value, Bare::Boolean(_) | Bare::Bytes(_)) {
            return Some("booleans are written as words");
        }
    }
    None
}

fn is_well_formed(value: &str) -> bool {
    match parse(value.as_bytes()) {
        Ok(_) => true,
        // The bytes are no text, which is seen before the format is looked at.
        Err(refused) if !value.is_ascii() || value.bytes().any(|b| b.is_ascii_control() && b != b'\t') => {
            assert_eq!(refused.code, Code::UnknownMethod);
            false
        }
        Err(refused) => {
            assert_eq!(refused.code, Code::MalformedExpression, "{value}: {}", refused.message);
            false
        }
    }
}

/// Each vector as the value of a parameter.
#[test]
fn values_in_an_expression() {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    let mut accepted = 0;
    for Vector { file, name, raw, expected, .. } in vectors() {
        let well_formed = is_well_formed(&format!("pulsar;seed={raw}"));
        let Ok(item) = sfv::parse(raw.as_bytes()) else {
            assert!(!well_formed, "{file}, {name}: {raw:?}");
            continue;
        };
        assert!(expected.is_some());
        match narrowed(&raw, &item) {
            Some(reason) => {
                assert!(!well_formed, "{file}, {name}: {raw:?}: accepted, and yet: {reason}");
                *reasons.entry(reason).or_default() += 1;
            }
            None => {
                assert!(well_formed, "{file}, {name}: {raw:?}: refused without a reason");
                accepted += 1;
            }
        }
    }
    let expected = [
        ("booleans are written as words", 3),
        ("each name once", 1),
        ("names without '-', '.' and '*'", 4),
        ("no ';' in a string, so that a ';' starts a parameter", 1),
        ("no comma anywhere, so that nobody takes the value for a list", 2),
        ("no parameter is of bytes", 6),
        ("no parameter without a value", 6),
        ("no space between '=' and the value", 3),
    ];
    assert_eq!((accepted, reasons), (513, BTreeMap::from(expected)));
}

/// Each vector as the item, which is to be the name of an algorithm.
#[test]
fn items_of_an_expression() {
    for Vector { file, name, raw, .. } in vectors() {
        let value = format!("{raw};seed=a");
        let refused = parse(value.as_bytes()).expect_err("no vector names an algorithm");
        let plain = |token: &str| {
            token.starts_with(|c: char| c.is_ascii_alphabetic())
                && token.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
        };
        // Well-formed is a plain token, with parameters that are, and none of them another seed.
        let well_formed = sfv::parse(value.as_bytes()).is_ok_and(|item| {
            matches!(item.value, Bare::Token(token) if plain(token)) && narrowed_parameters(&item).is_none()
        });
        let is_text = raw.is_ascii() && !raw.bytes().any(|b| b.is_ascii_control() && b != b'\t');
        let expected = if well_formed || !is_text { Code::UnknownMethod } else { Code::MalformedExpression };
        assert_eq!(refused.code, expected, "{file}, {name}: {raw:?}: {}", refused.message);
    }
}

/// What every implementation must bear (RFC 8941 section 3: sizes), as far as a field of 1,024 bytes can have it.
#[test]
fn the_least_sizes() {
    let parameters: String = (0..256).map(|i| format!(";p{i}={i}")).collect();
    let large = [
        format!("\"{}\"", "a".repeat(1024)),
        format!("\"{}\"", "\\\"".repeat(1024)),
        "a".repeat(512),
        format!(":{}:", "AAAA".repeat(16_384 / 3 + 1)),
        format!("a{parameters}"),
        format!("a;{}=1", "k".repeat(64)),
    ];
    for value in large {
        sfv::parse(value.as_bytes()).unwrap_or_else(|fault| panic!("{value:.40}: {fault:?}"));
    }
}
