//! Reads the entries of `lb-config.json` and notes every fault on the way.
//!
//! *Errors*: pushed to one [`Faults`], in the order of the text; after a fault the default stands and reading goes on.
//! *Source*: the Stargate rules, sections 1.1 to 1.5.

use std::collections::HashSet;

use super::entry::Entry;
use super::field::{Field, Kind, Setting};
use super::json::{Json, Members, quote};
use super::method::{Comparator, Method, RendezvousWeight};
use super::{Allowed, EntryId, LbConfig, Set};
use crate::limits::VIRTUAL_NODES_MAX;
use crate::proto::config::fault::{Faults, shorten};
use crate::proto::config::keys::{list, nearest};

const TOP_KEYS: [&str; 3] = ["default", "request_algorithms", "models"];

pub(super) fn read(json: &Json) -> Result<LbConfig, Faults> {
    let mut reader = Reader { faults: Faults::default(), entries: Vec::new() };
    let config = reader.top(json);
    if reader.faults.is_empty() { Ok(config) } else { Err(reader.faults) }
}

struct Reader {
    faults: Faults,
    entries: Vec<Entry>,
}

impl Reader {
    fn top(&mut self, json: &Json) -> LbConfig {
        let mut config = LbConfig {
            entries: Vec::new(),
            default: Set { configured: EntryId(0), allowed: Allowed::default() },
            models: Default::default(),
        };
        let mut default = Method::PowerOfN;
        let Json::Object(members) = json else {
            self.faults.push("file", json.show(), format!("expected an object with {}", list(&TOP_KEYS)));
            return config;
        };
        self.refuse_repeats("", members);
        for (key, value) in members {
            match key.as_str() {
                "default" => default = self.method("default", value).unwrap_or(default),
                "request_algorithms" => config.default.allowed = self.allowed("request_algorithms", value),
                "models" => {
                    let Json::Object(models) = value else {
                        self.faults.push("models", value.show(), "expected an object: model id to entry");
                        continue;
                    };
                    for (model, value) in models {
                        if let Some(set) = self.model(&join("models", model), value) {
                            config.models.insert(model.as_bytes().into(), set);
                        }
                    }
                }
                _ => {
                    let near =
                        nearest(key, &TOP_KEYS).map_or(String::new(), |near| format!("; nearest: {near}"));
                    let expected = format!("unknown key; expected {}{near}", list(&TOP_KEYS));
                    self.faults.push(join("", key), value.show(), expected);
                }
            }
        }
        config.default.configured = self.keep(Entry::new(default));
        config.entries = std::mem::take(&mut self.entries);
        config
    }

    fn keep(&mut self, entry: Entry) -> EntryId {
        let id = u32::try_from(self.entries.len()).expect("a text of so many entries does not fit in memory");
        self.entries.push(entry);
        EntryId(id)
    }

    /// A method name, as the file spells it.
    fn method(&mut self, path: &str, value: &Json) -> Option<Method> {
        let found = match value {
            Json::Text(text) => Method::parse_file(text),
            _ => None,
        };
        if found.is_none() {
            let names = Method::ALL.map(Method::name);
            let near = match value {
                Json::Text(text) => nearest(text, &names),
                _ => None,
            };
            let near = near.map_or(String::new(), |near| format!("; nearest: \"{near}\""));
            let expected = format!("expected the name of an algorithm: {}{near}", list(&names));
            self.faults.push(path, value.show(), expected);
        }
        found
    }

    /// A `request_algorithms` map. Of two keys for one method the later wins.
    fn allowed(&mut self, path: &str, value: &Json) -> Allowed {
        let mut allowed = Allowed::default();
        for (method, entry) in self.overrides(path, value) {
            allowed.0[method as usize] = Some(self.keep(entry));
        }
        allowed
    }

    /// The entries of a `request_algorithms` map, in order. What they nest in turn is checked and goes no further.
    fn overrides(&mut self, path: &str, value: &Json) -> Vec<(Method, Entry)> {
        let Json::Object(members) = value else {
            self.faults.push(path, value.show(), "expected an object: name of an algorithm to entry");
            return Vec::new();
        };
        let mut entries = Vec::new();
        for (key, value) in members {
            let path = join(path, key);
            let method = self.method(&path, &Json::Text(key.clone()));
            let Some((entry, nested)) = self.entry(&path, value) else { continue };
            if let Some((nested_path, nested)) = nested {
                self.overrides(&nested_path, nested);
            }
            match method {
                Some(method) if method == entry.method() => entries.push((method, entry)),
                Some(method) => {
                    let expected = format!("expected an entry for {}, as its key says", method.name());
                    self.faults.push(path, entry.method().name(), expected);
                }
                None => {}
            }
        }
        entries
    }

    fn model(&mut self, path: &str, value: &Json) -> Option<Set> {
        let (entry, nested) = self.entry(path, value)?;
        let configured = self.keep(entry);
        let allowed = nested.map_or(Allowed::default(), |(path, nested)| self.allowed(&path, nested));
        Some(Set { configured, allowed })
    }

    /// An entry: a name, or an object with settings; beside it its `request_algorithms`, unread, and their path.
    fn entry<'j>(&mut self, path: &str, value: &'j Json) -> Option<(Entry, Option<(String, &'j Json)>)> {
        match value {
            Json::Text(_) => self.method(path, value).map(|method| (Entry::new(method), None)),
            Json::Object(members) => self.detailed(path, members),
            _ => {
                let expected = "expected the name of an algorithm or an object with \"algorithm\"";
                self.faults.push(path, value.show(), expected);
                None
            }
        }
    }

    fn detailed<'j>(
        &mut self,
        path: &str,
        members: &'j Members,
    ) -> Option<(Entry, Option<(String, &'j Json)>)> {
        self.refuse_repeats(path, members);
        let algorithm = members.iter().rev().find(|(key, _)| key == Field::Algorithm.name());
        let at = join(path, Field::Algorithm.name());
        let method = match algorithm {
            Some((_, value)) => self.method(&at, value),
            None => {
                let names = Method::ALL.map(Method::name);
                let expected = format!("expected the name of an algorithm: {}", list(&names));
                self.faults.push(at, "(missing)", expected);
                None
            }
        };
        self.refuse_strangers(path, members, method);
        // Without a method there is no telling what its fields are to be; the names have been checked.
        let mut entry = Entry::new(method?);
        let mut nested = None;
        for (key, value) in members {
            let Some(field) = Field::parse(key).filter(|field| field.in_file().has(entry.method())) else {
                continue;
            };
            let path = join(path, key);
            if field == Field::RequestAlgorithms && *value != Json::Null {
                nested = Some((path, value));
            } else if field.kind() != Kind::Structure {
                match setting(field, value) {
                    Ok(Some(setting)) => entry.set(field, setting),
                    Ok(None) => {}
                    Err(expected) => self.faults.push(path, value.show(), expected),
                }
            }
        }
        Some((entry, nested))
    }

    /// Fields that the method does not accept: one fault names them all.
    fn refuse_strangers(&mut self, path: &str, members: &Members, method: Option<Method>) {
        let accepted = |field: Field| method.is_none_or(|method| field.in_file().has(method));
        let stranger = |key: &&String| !Field::parse(key).is_some_and(accepted);
        let strangers: Vec<&String> = members.iter().map(|(key, _)| key).filter(stranger).collect();
        if strangers.is_empty() {
            return;
        }
        let known: Vec<&str> = Field::all().filter(|field| accepted(*field)).map(Field::name).collect();
        let near: Vec<&str> = strangers.iter().filter_map(|key| nearest(key, &known)).collect();
        let shown: Vec<String> = strangers.iter().map(|key| shorten(key)).collect();
        let whose = method.map_or("any algorithm", Method::name);
        let near = if near.is_empty() { String::new() } else { format!("; nearest: {}", near.join(", ")) };
        let expected = format!("expected only fields of {whose}: {}{near}", known.join(", "));
        self.faults.push(if path.is_empty() { "file" } else { path }, shown.join(", "), expected);
    }

    fn refuse_repeats(&mut self, path: &str, members: &Members) {
        let mut seen = HashSet::new();
        for (key, value) in members {
            if !seen.insert(key) {
                self.faults.push(join(path, key), value.show(), "expected each key once");
            }
        }
    }
}

/// The value of a field. `None`: unset, which `null` says of all but two.
pub(super) fn setting(field: Field, value: &Json) -> Result<Option<Setting>, String> {
    if *value == Json::Null && !matches!(field, Field::SampleCount | Field::Comparator) {
        return Ok(None);
    }
    let setting = match (field.kind(), value) {
        (Kind::Flag, Json::Bool(true)) if field == Field::LastClusterAffinity => {
            return Err("not in this version; expected false".to_owned());
        }
        (Kind::Flag, Json::Bool(on)) => Setting::Flag(*on),
        (Kind::Flag, _) => return Err("expected true or false".to_owned()),
        (Kind::Uint, value) => {
            let range = match field {
                Field::SampleCount => 1..=64,
                Field::VirtualNodes => 0..=VIRTUAL_NODES_MAX,
                _ => 0..=u64::MAX,
            };
            match value {
                Json::Uint(n) if range.contains(n) => Setting::Uint(*n),
                _ => {
                    return Err(format!("expected a whole number from {} to {}", range.start(), range.end()));
                }
            }
        }
        (Kind::Number, value) => {
            let number = match value {
                Json::Uint(n) => Some(*n as f64),
                Json::Number(x) => Some(*x),
                _ => None,
            };
            let scale = field == Field::CacheAffinityInputTokensScale;
            match number {
                // Adding zero turns -0.0 into 0.0, which would else show as "-0.0".
                Some(x) if x.is_finite() && (!scale || (0.0..=1.0).contains(&x)) => Setting::Number(x + 0.0),
                _ if scale => return Err("expected a number from 0.0 to 1.0".to_owned()),
                _ => return Err("expected a number".to_owned()),
            }
        }
        (Kind::Text, Json::Text(text)) => Setting::Text(text.as_str().into()),
        (Kind::Text, _) => return Err("expected a string".to_owned()),
        (Kind::Comparator, value) => {
            Setting::Comparator(word(value, Comparator::parse, &Comparator::ALL.map(Comparator::name))?)
        }
        (Kind::Weight, value) => Setting::Weight(word(
            value,
            RendezvousWeight::parse,
            &RendezvousWeight::ALL.map(RendezvousWeight::name),
        )?),
        (Kind::Structure, _) => unreachable!("read before the settings"),
    };
    Ok(Some(setting))
}

fn word<T>(value: &Json, parse: impl Fn(&str) -> Option<T>, words: &[&str]) -> Result<T, String> {
    let text = match value {
        Json::Text(text) => Some(text.as_str()),
        _ => None,
    };
    text.and_then(parse).ok_or_else(|| {
        let near = text.and_then(|text| nearest(text, words));
        let near = near.map_or(String::new(), |near| format!("; nearest: \"{near}\""));
        format!("expected {}{near}", list(words))
    })
}

/// The path of a member: `models.llama-8b.seed`, `models["meta/llama.8b"].seed`.
fn join(path: &str, key: &str) -> String {
    let plain = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    match (path.is_empty(), plain && key.len() <= 80) {
        (true, true) => key.to_owned(),
        (true, false) => quote(key),
        (false, true) => format!("{path}.{key}"),
        (false, false) => format!("{path}[{}]", quote(key)),
    }
}
