//! Reading prompts, against a naive model: a full parser that writes the prompt's bytes out one after the other. Two bodies
//! share as many leading blocks as the model's bytes do, whatever the order of their keys and the white space around them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ringway::proto::classify::{Endpoint, Prompt, PromptRules, decode, read_prompt};
use serde_json::value::RawValue;

#[path = "../fuzz/invariants_classify.rs"]
mod invariants;

const RULES: PromptRules = PromptRules { block_bytes: 64, seed: 5 };

/// A JSON value as a client would build it.
#[derive(Clone, Debug)]
enum Json {
    /// As it stands: literals, numbers, strings with their quotes.
    Plain(String),
    List(Vec<Json>),
    /// An API's object: the order of its members means nothing.
    Object(Vec<(String, Json)>),
    /// A caller's object: the order of its members is its own.
    Own(Vec<(String, Json)>),
}

/// Small and seeded, so that one value can be written in many ways.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

impl Json {
    /// Writes the value with white space and, for an API's objects, an order of members by the roll of `dice`. `None`: compact,
    /// as it stands.
    fn write(&self, out: &mut String, dice: &mut Option<Dice>) {
        match self {
            Json::Plain(text) => *out += text,
            Json::List(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    space(out, dice);
                    item.write(out, dice);
                    space(out, dice);
                }
                out.push(']');
            }
            Json::Own(members) => write_members(members.iter(), out, dice, false),
            Json::Object(members) => {
                let mut members: Vec<&(String, Json)> = members.iter().collect();
                if let Some(dice) = dice {
                    for index in (1..members.len()).rev() {
                        members.swap(index, dice.roll(index + 1));
                    }
                }
                write_members(members.into_iter(), out, dice, true);
            }
        }
    }

    fn text(&self, seed: Option<u64>) -> String {
        let mut out = String::new();
        self.write(&mut out, &mut seed.map(Dice));
        out
    }
}

fn write_members<'a>(
    members: impl Iterator<Item = &'a (String, Json)>,
    out: &mut String,
    dice: &mut Option<Dice>,
    repeats: bool,
) {
    out.push('{');
    for (index, (key, value)) in members.enumerate() {
        if index > 0 {
            out.push(',');
        }
        space(out, dice);
        // Now and then a value that the next one replaces.
        if repeats && dice.as_mut().is_some_and(|dice| dice.roll(12) == 0) {
            *out += &format!("\"{key}\":{},", ["null", "\"no\"", "[{\"text\":\"no\"}]"][index % 3]);
        }
        *out += &format!("\"{key}\"");
        space(out, dice);
        out.push(':');
        space(out, dice);
        value.write(out, dice);
        space(out, dice);
    }
    out.push('}');
}

fn space(out: &mut String, dice: &mut Option<Dice>) {
    if let Some(dice) = dice {
        *out += ["", "", "", " ", "\n", "  ", "\r\n\t"][dice.roll(7)];
    }
}

fn plain(text: &str) -> Json {
    Json::Plain(text.to_owned())
}

fn object(members: Vec<(&str, Json)>) -> Json {
    Json::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// A string literal, long ones among them, with escapes and bytes that mean something outside strings.
fn string() -> impl Strategy<Value = Json> {
    prop_oneof![
        2 => "[a-z]{0,6}",
        2 => "([ -!#-\\[\\]-~é]|\\\\n|\\\\\"|\\\\\\\\|\\\\u00e9){0,40}",
        1 => "([a-z ,:{}\\[\\]]|\\\\\"){100,300}",
    ]
    .prop_map(|text| Json::Plain(format!("\"{text}\"")))
}

fn own() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![string(), Just(plain("true")), Just(plain("-1.5e3")), Just(plain("null"))];
    leaf.prop_recursive(3, 12, 4, |inside| {
        prop_oneof![
            proptest::collection::vec(inside.clone(), 0..4).prop_map(Json::List),
            proptest::collection::btree_map("k[0-9]{1,3}", inside, 0..4)
                .prop_map(|members| Json::Own(members.into_iter().rev().collect())),
        ]
    })
    .prop_filter("a caller's object", |value| !matches!(value, Json::Plain(_)))
}

fn part() -> impl Strategy<Value = Json> {
    prop_oneof![
        4 => string().prop_map(|text| object(vec![("type", plain("\"text\"")), ("text", text)])),
        1 => string().prop_map(|text| object(vec![
            ("type", plain("\"text\"")),
            ("text", text),
            ("cache_control", object(vec![("type", plain("\"ephemeral\""))])),
        ])),
        1 => "[a-z]{0,100}".prop_map(|url| object(vec![
            ("type", plain("\"image_url\"")),
            ("image_url", object(vec![("url", Json::Plain(format!("\"https://{url}\"")))])),
        ])),
        1 => (string(), own()).prop_map(|(id, input)| object(vec![
            ("type", plain("\"tool_use\"")),
            ("id", id),
            ("name", plain("\"look\"")),
            ("input", input),
        ])),
        1 => (string(), proptest::collection::vec(string(), 0..3)).prop_map(|(id, texts)| object(vec![
            ("type", plain("\"tool_result\"")),
            ("tool_use_id", id),
            ("is_error", plain("false")),
            ("content", Json::List(texts.into_iter().map(|text| object(vec![("text", text)])).collect())),
        ])),
        1 => (string(), string()).prop_map(|(a, b)| object(vec![("type", plain("\"new\"")), ("zeta", a), ("alpha", b)])),
        1 => string(),
    ]
}

fn content() -> impl Strategy<Value = Json> {
    prop_oneof![
        4 => string(),
        3 => proptest::collection::vec(part(), 0..4).prop_map(Json::List),
        1 => Just(plain("null")),
    ]
}

fn message() -> impl Strategy<Value = Json> {
    let role = prop_oneof![Just("user"), Just("assistant"), Just("system"), Just("tool")];
    let call = (string(), string(), string()).prop_map(|(id, name, arguments)| {
        object(vec![
            ("id", id),
            ("type", plain("\"function\"")),
            ("function", object(vec![("name", name), ("arguments", arguments)])),
        ])
    });
    let calls = proptest::option::weighted(0.2, proptest::collection::vec(call, 0..3));
    let extra = proptest::option::weighted(
        0.2,
        (prop_oneof![Just("name"), Just("reasoning_content"), Just("status")], string()),
    );
    (role, content(), calls, extra, any::<bool>()).prop_map(|(role, content, calls, extra, bare)| {
        let mut members = vec![("role", Json::Plain(format!("\"{role}\""))), ("content", content)];
        if !bare {
            // In the order in which they count, so that parts of bodies have theirs.
            if let Some((key, value)) = extra {
                members.insert(if key == "name" { 2 } else { 1 }, (key, value));
            }
            members.extend(calls.map(|calls| ("tool_calls", Json::List(calls))));
        }
        object(members)
    })
}

fn tool() -> impl Strategy<Value = Json> {
    (string(), own(), any::<bool>()).prop_map(|(name, schema, flat)| {
        if flat {
            object(vec![("name", name), ("description", plain("\"d\"")), ("input_schema", schema)])
        } else {
            let function = object(vec![("name", name), ("parameters", schema), ("strict", plain("true"))]);
            object(vec![("type", plain("\"function\"")), ("function", function)])
        }
    })
}

/// A chat in the order of an engine's template: tools, system, messages.
fn chat() -> impl Strategy<Value = Json> {
    let list = |of, most| proptest::collection::vec(of, 0..most).prop_map(Json::List);
    (
        proptest::option::of(list(tool().boxed(), 3)),
        proptest::option::of(content()),
        list(message().boxed(), 6),
    )
        .prop_map(|(tools, system, messages)| {
            let mut members = vec![("model", plain("\"m\"")), ("temperature", plain("0.5"))];
            members.extend(tools.map(|tools| ("tools", tools)));
            members.extend(system.map(|system| ("system", system)));
            members.extend([("messages", messages), ("metadata", Json::Own(vec![]))]);
            object(members)
        })
}

// The naive model.

type Members<'a> = BTreeMap<String, &'a RawValue>;

fn members(text: &str) -> Members<'_> {
    serde_json::from_str(text).unwrap_or_else(|fault| panic!("{fault}: {text}"))
}

fn items(text: &str) -> Vec<&RawValue> {
    serde_json::from_str(text).unwrap_or_else(|fault| panic!("{fault}: {text}"))
}

/// A string's bytes between its quotes.
fn inside(text: &str) -> &[u8] {
    &text.as_bytes()[1..text.len() - 1]
}

fn compact(text: &str) -> Vec<u8> {
    let (mut out, mut string, mut escaped) = (Vec::new(), false, false);
    for byte in text.bytes() {
        if !string && byte.is_ascii_whitespace() {
            continue;
        }
        string ^= byte == b'"' && !escaped;
        escaped = string && byte == b'\\' && !escaped;
        out.push(byte);
    }
    out
}

/// Members that count, in their order.
const ORDER: &[&str] = &[
    "id",
    "tool_call_id",
    "tool_use_id",
    "function",
    "reasoning_content",
    "content",
    "name",
    "description",
    "tool_calls",
    "input",
    "input_schema",
    "arguments",
    "parameters",
    "image_url",
    "url",
];
/// Members that count as absent, besides a kind's own.
const IGNORED: &[&str] = &["cache_control", "status"];
const NESTED: [&str; 4] = ["function", "tool_calls", "image_url", "content"];

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Message,
    Part,
    Tool,
}

fn naive_value(out: &mut Vec<u8>, key: &str, text: &str) {
    let name = |out: &mut Vec<u8>| {
        out.push(3);
        out.extend(key.bytes());
    };
    match text.as_bytes()[0] {
        b'n' => {}
        b'"' => {
            name(out);
            out.push(4);
            out.extend(inside(text));
        }
        b'[' if NESTED.contains(&key) => {
            name(out);
            naive_list(out, text, Kind::Part);
        }
        b'{' if NESTED.contains(&key) => {
            name(out);
            naive_object(out, text, Kind::Part);
        }
        _ => {
            name(out);
            out.push(5);
            out.extend(compact(text));
        }
    }
}

fn naive_content(out: &mut Vec<u8>, text: &str) {
    match text.as_bytes()[0] {
        b'n' => {}
        b'"' => {
            out.push(2);
            out.extend(inside(text));
        }
        _ => naive_list(out, text, Kind::Part),
    }
}

fn naive_list(out: &mut Vec<u8>, text: &str, kind: Kind) {
    for item in items(text) {
        match item.get().as_bytes()[0] {
            b'{' => naive_object(out, item.get(), kind),
            b'[' => {
                out.push(16);
                naive_list(out, item.get(), kind);
            }
            b'"' => {
                out.push(2);
                out.extend(inside(item.get()));
            }
            _ => {
                out.push(2);
                out.extend(item.get().trim().parse::<u32>().unwrap().to_le_bytes());
            }
        }
    }
}

fn naive_object(out: &mut Vec<u8>, text: &str, kind: Kind) {
    let members = members(text);
    let string = |key: &str| members.get(key).map(|value| value.get()).filter(|value| value.starts_with('"'));
    let mut ends = true;
    match kind {
        Kind::Message => {
            out.push(1);
            out.extend(string("role").map_or(&b""[..], inside));
            ends = false;
        }
        Kind::Part if string("text").is_some() => {
            out.push(2);
            out.extend(inside(string("text").unwrap()));
            ends = false;
        }
        _ => out.push(6),
    }
    let before = out.len();
    if kind == Kind::Tool
        && let Some(value) = members.get("type")
    {
        naive_value(out, "type", value.get());
    }
    let own = match kind {
        Kind::Message => ["id", "role", "type"],
        Kind::Part => ["text", "type", "type"],
        Kind::Tool => ["type", "type", "type"],
    };
    // Members nobody knows come last, by their names.
    let unknown = members.keys().map(String::as_str).filter(|key| !ORDER.contains(key));
    for key in ORDER.iter().copied().chain(unknown) {
        let Some(value) = members.get(key) else { continue };
        match key {
            _ if own.contains(&key) || IGNORED.contains(&key) => {}
            "content" => naive_content(out, value.get()),
            _ => naive_value(out, key, value.get()),
        }
    }
    if ends || (kind != Kind::Message && out.len() > before) {
        out.push(7);
    }
}

/// The bytes of a chat's prompt.
fn naive_chat(text: &str) -> Vec<u8> {
    let members = members(text);
    let mut out = Vec::new();
    let get = |key: &str| members.get(key).map(|value| value.get());
    if let Some(tools) = get("tools").filter(|tools| !items(tools).is_empty()) {
        out.push(15);
        naive_list(&mut out, tools, Kind::Tool);
    }
    if let Some(system) = get("system").filter(|system| *system != "null") {
        let mut text = Vec::new();
        naive_content(&mut text, system);
        if !text.is_empty() {
            out.push(14);
            out.extend(text);
        }
    }
    naive_list(&mut out, get("messages").unwrap(), Kind::Message);
    out
}

fn shared<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn blocks(endpoint: Endpoint, body: &str) -> Vec<u64> {
    let mut prompt = Prompt::default();
    assert!(read_prompt(endpoint, body.as_bytes(), true, &RULES, &mut prompt).complete);
    prompt.blocks
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn blocks_are_those_of_the_naive_models_bytes(one in chat(), other in chat(), seeds in any::<[u64; 2]>()) {
        let naive = naive_chat(&one.text(None));
        let expected = blocks(Endpoint::Other, &one.text(None));
        prop_assert_eq!(expected.len(), naive.len() / 64, "{:?}", naive.escape_ascii().to_string());
        for seed in seeds {
            let text = one.text(Some(seed));
            prop_assert_eq!(&naive_chat(&text), &naive, "the model itself: {}", text);
            prop_assert_eq!(&blocks(Endpoint::Other, &text), &expected, "{}", text);
        }
        let (b, naive_b) = (blocks(Endpoint::Other, &other.text(None)), naive_chat(&other.text(Some(seeds[0]))));
        prop_assert_eq!(shared(&expected, &b), shared(&naive, &naive_b) / 64);
    }

    #[test]
    fn any_change_changes_the_blocks_from_there_on(chat in chat(), seed in any::<u64>(), at in any::<prop::sample::Index>()) {
        // Letters of strings; what they change is a value, a key or an ignored member.
        let text = chat.text(None);
        let letters: Vec<usize> = text
            .bytes()
            .enumerate()
            .filter(|(at, byte)| byte.is_ascii_lowercase() && text.as_bytes()[at - 1] != b'\\' && !text[..*at].ends_with("\\u00"))
            .map(|(at, _)| at)
            .collect();
        let at = letters[at.index(letters.len())];
        let mut changed = text.clone().into_bytes();
        changed[at] = changed[at].to_ascii_uppercase();
        let changed = String::from_utf8(changed).unwrap();
        prop_assume!(serde_json::from_str::<serde_json::Value>(&changed).is_ok());
        // Another section, or another chain, is not what this is about.
        prop_assume!(members(&changed).keys().eq(members(&text).keys()) && changed.contains("\"model\":\"m\""));
        let (a, b) = (naive_chat(&text), naive_chat(&changed));
        let (blocks_a, blocks_b) = (blocks(Endpoint::Other, &chat.text(Some(seed))), blocks(Endpoint::Other, &changed));
        let same = shared(&a, &b) / 64;
        prop_assert_eq!(shared(&blocks_a, &blocks_b), same.min(blocks_a.len()));
        for (a, b) in blocks_a.iter().zip(&blocks_b).skip(same) {
            prop_assert_ne!(a, b, "a block behind a change is another");
        }
    }

    #[test]
    fn a_longer_chat_begins_with_the_shorter(chat in chat(), more in proptest::collection::vec(message(), 1..3), seeds in any::<[u64; 2]>()) {
        let Json::Object(mut members) = chat.clone() else { unreachable!() };
        for (key, value) in &mut members {
            if let (true, Json::List(messages)) = (key == "messages", value) {
                messages.extend(more.iter().cloned());
            }
        }
        let short = blocks(Endpoint::Other, &chat.text(Some(seeds[0])));
        let long = blocks(Endpoint::Other, &Json::Object(members).text(Some(seeds[1])));
        prop_assert_eq!(shared(&short, &long), short.len());
    }

    #[test]
    fn lists_of_prompts_and_token_ids_too(
        prompts in proptest::collection::vec(
            prop_oneof![
                string(),
                proptest::collection::vec(any::<u32>(), 1..40)
                    .prop_map(|ids| Json::List(ids.iter().map(|id| Json::Plain(id.to_string())).collect())),
            ],
            1..5,
        ),
        seed in any::<u64>(),
    ) {
        let text = object(vec![("prompt", Json::List(prompts))]).text(Some(seed));
        let list = members(&text)["prompt"].get();
        // Naively every id has its separator; a run of ids has one.
        let mut naive = Vec::new();
        for item in items(list) {
            if item.get().starts_with('[') {
                naive.extend([16, 2]);
                for id in items(item.get()) {
                    naive.extend(id.get().trim().parse::<u32>().unwrap().to_le_bytes());
                }
            } else {
                naive_list(&mut naive, &format!("[{}]", item.get()), Kind::Message);
            }
        }
        let first = naive.iter().take_while(|byte| matches!(byte, 16)).count() + 1;
        prop_assert_eq!(blocks(Endpoint::Completions, &text).len(), (naive.len() - first) / 64, "{}", text);
    }
}

proptest! {
    // Each case reads its body once per byte of it.
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_body_in_part_never_contradicts_its_whole(chat in chat()) {
        let text = chat.text(None);
        let whole = blocks(Endpoint::Other, &text);
        let mut prompt = Prompt::default();
        let mut most = 0;
        for end in 0..text.len() {
            let reading = read_prompt(Endpoint::Other, &text.as_bytes()[..end], false, &RULES, &mut prompt);
            prop_assert!(!reading.complete);
            prop_assert_eq!(shared(&prompt.blocks, &whole), prompt.blocks.len(), "{}", &text[..text.floor_char_boundary(end)]);
            most = most.max(prompt.blocks.len());
        }
        prop_assert_eq!(most, whole.len(), "with all but the last bracket nothing is missing");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bodies_hold_the_invariants(
        chat in chat(),
        seed in any::<u64>(),
        choice in any::<u8>(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0..3_u8, 0..14_usize), 0..4),
    ) {
        let mut body = vec![choice];
        body.extend(chat.text(Some(seed)).bytes());
        for (at, kind, byte) in edits {
            let (at, byte) = (1 + at.index(body.len() - 1), b"\"\\{}[]:, tu01\x01"[byte]);
            match kind {
                0 => body[at] = byte,
                1 => body.insert(at, byte),
                _ => body.truncate(at.max(2)),
            }
        }
        invariants::prompt(&body);
    }

    #[test]
    fn arbitrary_bytes_hold_the_invariants(data in proptest::collection::vec(any::<u8>(), 0..200)) {
        invariants::prompt(&data);
        invariants::decoding(&data);
    }
}

/// The corpora of the fuzz targets, replayed.
#[test]
fn fuzz_corpus() {
    for (target, check) in
        [("prompt", invariants::prompt as fn(&[u8])), ("decode", invariants::decoding as fn(&[u8]))]
    {
        let dir = format!("{}/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 10, "corpus of {target} is missing: {dir}");
        for file in files {
            let data = std::fs::read(&file).unwrap();
            std::panic::catch_unwind(|| check(&data)).unwrap_or_else(|_| panic!("{}", file.display()));
        }
    }
}

/// Coding, content and body of a corpus file that must decode.
#[test]
fn what_other_encoders_wrote_is_read() {
    for (file, coding) in [
        ("gzip", "gzip"),
        ("zlib", "deflate"),
        ("deflate", "deflate"),
        ("deflate_stored", "deflate"),
        ("br", "br"),
        ("br_stored", "br"),
        ("zstd", "zstd"),
        ("zstd_long", "zstd"),
    ] {
        let path = format!("{}/fuzz/corpus/decode/{file}", env!("CARGO_MANIFEST_DIR"));
        let data = std::fs::read(path).unwrap();
        let mut content = Vec::new();
        let outcome = decode(coding.as_bytes(), &data[1..], true, 1 << 20, &mut content);
        assert_eq!(outcome, ringway::proto::classify::Decoded::Complete, "{file}");
        assert!(content.starts_with(b"{\"model\":"), "{file}: {}", content.escape_ascii());
    }
}
