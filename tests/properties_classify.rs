//! Looking into bodies, against a full parser: whatever a JSON parser accepts, the lazy walk reads the same way; and no
//! byte sequence makes it fail.

use proptest::prelude::*;
use ringway::proto::classify::{peek, peek_multipart, peek_prefix};
use serde_json::Value;

/// A string literal: its value, and a spelling with escapes chosen at random.
fn literal(value: impl Strategy<Value = String>) -> impl Strategy<Value = (String, String)> {
    (value, proptest::collection::vec(0..4_u8, 1..8)).prop_map(|(value, styles)| {
        let mut text = String::from("\"");
        for (c, style) in value.chars().zip(styles.iter().cycle()) {
            match (style, c) {
                (0, _) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        text += &format!("\\u{unit:04x}");
                    }
                }
                (_, '"' | '\\') => {
                    text.push('\\');
                    text.push(c);
                }
                (1, '/') => text += "\\/",
                (_, c) if (c as u32) < 0x20 => text += &format!("\\u{:04X}", c as u32),
                (_, c) => text.push(c),
            }
        }
        text.push('"');
        (value, text)
    })
}

fn words() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => Just("model".to_owned()),
        2 => Just("stream".to_owned()),
        1 => Just("messages".to_owned()),
        2 => "[a-z\"\\\\{}\\[\\]:, ]{0,40}",
        1 => any::<String>(),
    ]
}

fn space() -> impl Strategy<Value = &'static str> {
    prop_oneof![6 => Just(""), 1 => Just(" "), 1 => Just("\r\n\t")]
}

/// A JSON text of any value.
fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("true".to_owned()),
        Just("false".to_owned()),
        Just("null".to_owned()),
        any::<i64>().prop_map(|n| n.to_string()),
        any::<f64>().prop_filter("JSON has no infinities", |x| x.is_finite()).prop_map(|x| format!("{x:e}")),
        literal(words()).prop_map(|(_, text)| text),
    ];
    leaf.prop_recursive(4, 24, 6, |inside| {
        prop_oneof![
            (proptest::collection::vec(inside.clone(), 0..6), space()).prop_map(|(items, space)| format!(
                "[{space}{}{space}]",
                items.join(&format!("{space},{space}"))
            )),
            object(inside),
        ]
    })
}

/// A JSON object; keys repeat often.
fn object(member: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    proptest::collection::vec((literal(words()), member, space()), 0..7).prop_map(|members| {
        let members: Vec<String> =
            members.into_iter().map(|((_, key), value, s)| format!("{s}{key}{s}:{s}{value}{s}")).collect();
        format!("{{{}}}", members.join(","))
    })
}

/// The whole of the promise: on what serde_json accepts as an object (it keeps the last of a repeated key) both agree.
fn check(body: &[u8]) -> Result<(), TestCaseError> {
    let found = peek(body);
    let stripped = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    match serde_json::from_slice::<Value>(stripped) {
        Ok(Value::Object(object)) => {
            let model = object.get("model").and_then(Value::as_str);
            prop_assert_eq!(found.model.as_deref(), model.map(str::as_bytes));
            prop_assert_eq!(found.stream, object.get("stream").and_then(Value::as_bool));
            prop_assert!(found.complete);
        }
        Ok(_) => prop_assert_eq!(&found, &Default::default()),
        Err(_) => {}
    }
    let prefix = peek_prefix(body);
    if found.complete {
        prop_assert_eq!(&prefix, &found);
    } else {
        prop_assert_eq!(&found, &Default::default(), "a half-read body says nothing");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn json_objects_read_as_by_a_full_parser(body in object(value()), mark in any::<bool>()) {
        let body = if mark { [b"\xef\xbb\xbf", body.as_bytes()].concat() } else { body.into_bytes() };
        prop_assert!(serde_json::from_slice::<Value>(body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&body)).is_ok());
        check(&body)?;
    }

    #[test]
    fn mutated_bodies_too(
        body in object(value()),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0..3_u8, any::<u8>()), 1..4),
        structural in any::<bool>(),
    ) {
        let mut body = body.into_bytes();
        for (at, kind, byte) in edits {
            let byte = if structural { b"\"\\{}[]:, tu0"[byte as usize % 12] } else { byte };
            let at = at.index(body.len());
            match kind {
                0 => body[at] = byte,
                1 => body.insert(at, byte),
                _ => { body.remove(at); }
            }
            if body.is_empty() {
                break;
            }
        }
        check(&body)?;
    }

    #[test]
    fn arbitrary_bytes_never_fail(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        check(&body)?;
        check(&[b"{\"model\":", &body[..]].concat())?;
        peek_multipart(b"multipart/form-data; boundary=b", &body);
        peek_multipart(&body, b"--b\r\n\r\n\r\n--b--");
    }

    #[test]
    fn form_fields_read_as_written(
        fields in proptest::collection::vec(
            (prop_oneof![Just("model"), Just("file"), Just("stream")], any::<bool>(), "[a-z\r\n-]{0,30}"), 0..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut body = Vec::new();
        let mut model = None;
        for (name, is_file, content) in &fields {
            let file = if *is_file { "; filename=\"f; name=model\"" } else { "" };
            body.extend(format!(
                "--b0undary\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{content}\r\n"
            ).bytes());
            if *name == "model" && !is_file {
                model = Some(content.as_bytes());
            }
        }
        body.extend(b"--b0undary--\r\n");
        let found = peek_multipart(b"multipart/form-data; boundary=b0undary", &body);
        prop_assert!(found.complete);
        prop_assert_eq!(found.model.as_deref(), model);
        peek_multipart(b"multipart/form-data; boundary=b0undary", &body[..cut.index(body.len())]);
    }
}

proptest! {
    // Each case reads its body once per byte of it.
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_prefix_never_contradicts_its_body(body in object(value())) {
        let whole = peek(body.as_bytes());
        let members = serde_json::from_str::<Value>(&body).unwrap();
        // Only where no key repeats can a prefix know; serde_json cannot tell, so the text is asked.
        let once = |key: &str| body.matches(key).count() + body.matches("\\u").count() <= 1;
        for end in 0..body.len() {
            let prefix = peek_prefix(&body.as_bytes()[..end]);
            prop_assert!(!prefix.complete);
            if once("model") && prefix.model.is_some() {
                prop_assert_eq!(&prefix.model, &whole.model, "{}", members);
            }
            if once("stream") && prefix.stream.is_some() {
                prop_assert_eq!(prefix.stream, whole.stream, "{}", members);
            }
        }
    }
}
