use std::borrow::Cow;

use super::*;

fn model(body: &[u8]) -> Option<String> {
    peek(body).model.map(|model| String::from_utf8(model.into_owned()).unwrap())
}

#[test]
fn a_chat_body_says_model_and_stream() {
    let body = br#"{"model":"org/llama-3","messages":[{"role":"user","content":"hi"}],"stream":true,"n":1}"#;
    let found = peek(body);
    assert_eq!(found.model.as_deref(), Some(&b"org/llama-3"[..]));
    assert!(matches!(found.model, Some(Cow::Borrowed(_))), "a plain name is not copied");
    assert_eq!((found.stream, found.complete), (Some(true), true));
    assert_eq!(peek(br#"{"stream":false}"#).stream, Some(false));
}

#[test]
fn only_the_top_level_counts() {
    for body in [
        r#"{"a":{"model":"x","stream":true},"b":[{"model":"y"},["model","z"]]}"#,
        r#"{"text":"\",\"model\":\"x\",\"stream\":true,\"","model2":"y","Model":"z"}"#,
        r#"{"text":"ends in a backslash \\","t2":"{[\"model\":\"x\"","n":-1.5e3}"#,
        r#"{"text":"model","model ":"x"," model":"y","":"z"}"#,
        r#"[{"model":"x","stream":true}]"#,
        r#""model""#,
    ] {
        assert_eq!((model(body.as_bytes()), peek(body.as_bytes()).stream), (None, None), "{body}");
    }
    let mixed = r#"{"a":[[[{"model":"no"}]]],"b":"}{][\"","model":"yes","c":{"model":"no"}}"#;
    assert_eq!(model(mixed.as_bytes()).as_deref(), Some("yes"));
}

#[test]
fn the_last_of_a_repeated_key_counts() {
    let twice = br#"{"model":"first","stream":true,"model":"last","stream":false}"#;
    assert_eq!((model(twice).as_deref(), peek(twice).stream), (Some("last"), Some(false)));
    let spelt = br#"{"model":"first","mod\u0065l":"last","stream":true,"\u0073tream":null}"#;
    assert_eq!((model(spelt).as_deref(), peek(spelt).stream), (Some("last"), None));
    assert_eq!(model(br#"{"model":"first","model":7}"#), None);
    assert_eq!(model(br#"{"model":"first","model":{"model":"nested"}}"#), None);
}

#[test]
fn names_with_escapes_are_decoded() {
    let cases = [
        (r#""a\"b\\c\/d""#, "a\"b\\c/d"),
        (r#""\b\f\n\r\t""#, "\u{8}\u{c}\n\r\t"),
        (r#""\u00e9\u4F60x\u0000""#, "\u{e9}\u{4f60}x\0"),
        (r#""pair \ud83d\ude00!""#, "pair \u{1f600}!"),
        (r#""""#, ""),
        (r#""plain é 你""#, "plain é 你"),
    ];
    for (text, value) in cases {
        assert_eq!(model(format!(r#"{{"model":{text}}}"#).as_bytes()).as_deref(), Some(value));
    }
    for bad in [r"\x", r"\u12", r"\u12g4", r"\ud800", r"\ud800\n", r"\ud800\u0041", r"\udc00", "\u{1}", "\n"]
    {
        let body = format!(r#"{{"stream":true,"model":"{bad}"}}"#);
        assert_eq!(peek(body.as_bytes()), Peek::default(), "{bad:?}");
    }
}

#[test]
fn keys_with_escapes_are_compared_by_value() {
    for (spelling, is_model) in [
        (r"\u006d\u006f\u0064\u0065\u006c", true),
        (r"mode\u006C", true),
        (r"model\u0000", false),
        (r"mode\u006c2", false),
        (r"mod\u0065", false),
        (r"\u004dodel", false),
        (r"mode\u00", false),
        (r"\ud83d\ude00del", false),
    ] {
        let body = format!(r#"{{"{spelling}":"x"}}"#);
        assert_eq!(model(body.as_bytes()).is_some(), is_model, "{spelling}");
    }
}

#[test]
fn white_space_and_a_byte_order_mark_are_fine() {
    let body = b"\xef\xbb\xbf \t\r\n{ \"model\"\n:\t\"x\" , \"stream\" : true\r\n}\n\n";
    assert_eq!(
        (model(body).as_deref(), peek(body).stream, peek(body).complete),
        (Some("x"), Some(true), true)
    );
    assert_eq!(peek(b"{}"), Peek { model: None, stream: None, complete: true });
    assert_eq!(peek(b" { } "), Peek { model: None, stream: None, complete: true });
}

#[test]
fn what_is_malformed_says_nothing() {
    for body in [
        r#"{"model":"x"} trailing"#,
        r#"{"model":"x"}{"model":"y"}"#,
        r#"{"model":"x",}"#,
        r#"{"model":"x" "stream":true}"#,
        r#"{"model":"x","stream" true}"#,
        r#"{"model":"x","stream":}"#,
        r#"{"model":"x","a":1"b":2}"#,
        r#"{"model":"x",,"a":1}"#,
        r#"{"model":"x",1:2}"#,
        r#"{"model":"x"]"#,
        r#"{,"model":"x"}"#,
        r#"model=x&stream=true"#,
        "\u{1f}\u{8b}\u{8}",
        "null",
        "}",
    ] {
        assert_eq!(peek(body.as_bytes()), Peek::default(), "{body}");
        assert_eq!(peek_prefix(body.as_bytes()), Peek::default(), "{body}");
    }
}

#[test]
fn a_prefix_says_what_it_holds_and_that_it_is_one() {
    let body = br#"{"model":"x","stream":true,"messages":[{"content":"long \" text"}],"n":12}"#;
    let values_from = br#"{"model":"x","stream":true,"#.len() - 1;
    for end in 0..body.len() {
        let found = peek_prefix(&body[..end]);
        assert!(!found.complete, "{end}");
        assert_eq!(found.model.is_some(), end >= br#"{"model":"x""#.len(), "{end}");
        assert_eq!(found.stream.is_some(), end > values_from, "{end}");
        assert_eq!(peek(&body[..end]), Peek::default(), "a whole body that breaks off is malformed");
    }
    assert_eq!(peek_prefix(body), peek(body));
    // A value that is being replaced is not known any more.
    assert_eq!(peek_prefix(br#"{"model":"x","model":"y"#).model, None);
}

#[test]
fn depth_and_backslashes_cost_no_stack_and_stay_linear() {
    let deep =
        [&b"{\"a\":"[..], &b"[".repeat(2 << 20), b"\"]\"", &b"]".repeat(2 << 20), b",\"model\":\"x\"}"]
            .concat();
    assert_eq!(model(&deep).as_deref(), Some("x"));
    let slashes = [&b"{\"a\":\""[..], &b"\\\\".repeat(2 << 20), b"\",\"model\":\"x\"}"].concat();
    assert_eq!(model(&slashes).as_deref(), Some("x"));
    let quotes = [&b"{\"a\":\""[..], &b"\\\"".repeat(2 << 20), b"\",\"model\":\"x\"}"].concat();
    assert_eq!(model(&quotes).as_deref(), Some("x"));
}
