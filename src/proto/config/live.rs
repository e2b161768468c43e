//! Settings of a server that may change while the router runs: read from JSON by the rules of the file's keys.
//!
//! *Bound and cost*: linear in the text.
//! *Errors*: [`Faults`]: every fault at once; nothing is taken over then.
//! *Source*: the configuration reference, admin API.

use serde_json::Value as Json;

use super::fault::{Faults, shorten};
use super::keys::Keys;
use super::pools::{CONCURRENCY_MAX, Check, INPUT_TOKENS_MAX, WEIGHT_MAX, tier_check};

/// What is to change; `None`: what is there stays.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerChange {
    pub weight: Option<f64>,
    pub max_concurrency: Option<u32>,
    pub max_input_tokens: Option<u32>,
    pub routing_tier: Option<String>,
}

impl ServerChange {
    /// Reads `{"weight":…}` and the like; at least one key.
    pub fn parse(text: &[u8]) -> Result<ServerChange, Faults> {
        let mut faults = Faults::default();
        let object = match serde_json::from_slice(text) {
            Ok(Json::Object(object)) => object,
            Ok(other) => {
                faults.push("body", shorten(&other.to_string()), EXPECTED);
                return Err(faults);
            }
            Err(error) => {
                faults.push("body", "(not JSON)", format!("{EXPECTED}: {error}"));
                return Err(faults);
            }
        };
        let mut table = toml::Table::new();
        for (key, json) in &object {
            match toml_of(json) {
                Some(value) => drop(table.insert(key.clone(), value)),
                None => faults.push(key, shorten(&json.to_string()), "expected a number or a string"),
            }
        }
        if object.is_empty() {
            faults.push("body", "{}", EXPECTED);
        }
        let mut keys = Keys::root(&table, &mut faults);
        let change = ServerChange {
            weight: keys.optional("weight", &(0.0..=WEIGHT_MAX)),
            max_concurrency: keys.optional("max_concurrency", &(0..=CONCURRENCY_MAX)),
            max_input_tokens: keys.optional("max_input_tokens", &(0..=INPUT_TOKENS_MAX)),
            routing_tier: keys.optional("routing_tier", &(tier_check as Check)),
        };
        keys.end();
        if faults.is_empty() { Ok(change) } else { Err(faults) }
    }
}

const EXPECTED: &str = "expected a JSON object with one or more of \"weight\", \"max_concurrency\", \"max_input_tokens\", \"routing_tier\"";

/// `None`: TOML has no such value.
pub(super) fn toml_of(json: &Json) -> Option<toml::Value> {
    match json {
        Json::Null => None,
        Json::Bool(yes) => Some((*yes).into()),
        Json::Number(number) => {
            number.as_i64().map(toml::Value::from).or(number.as_f64().map(toml::Value::from))
        }
        Json::String(text) => Some(text.as_str().into()),
        Json::Array(items) => items.iter().map(toml_of).collect::<Option<Vec<_>>>().map(toml::Value::Array),
        Json::Object(object) => {
            let entries = object.iter().map(|(key, json)| Some((key.clone(), toml_of(json)?)));
            entries.collect::<Option<toml::Table>>().map(toml::Value::Table)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<String> {
        ServerChange::parse(text.as_bytes()).expect_err(text).0.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_is_named_changes_and_nothing_else() {
        let change = |text: &str| ServerChange::parse(text.as_bytes()).unwrap();
        assert_eq!(change("{\"weight\":0}"), ServerChange { weight: Some(0.0), ..ServerChange::default() });
        let whole = ServerChange {
            weight: Some(2.5),
            max_concurrency: Some(0),
            max_input_tokens: Some(8_192),
            routing_tier: Some("gold".into()),
        };
        let text =
            "{\"weight\":2.5,\"max_concurrency\":0,\"max_input_tokens\":8192,\"routing_tier\":\"gold\"}";
        assert_eq!(change(text), whole);
    }

    #[test]
    fn every_fault_comes_at_once() {
        assert_eq!(
            faults(
                "{\"weight\":-1,\"max_concurrency\":1.5,\"max_input_tokens\":null,\"routing_tier\":\"a b\",\"wieght\":1,\"url\":{}}"
            ),
            [
                "max_input_tokens: null: expected a number or a string",
                "weight: -1: expected a finite number from 0 to 1000000000",
                "max_concurrency: 1.5: expected a whole number from 0 to 1000000",
                concat!(
                    "routing_tier: \"a b\": expected a tier of at most 128 letters, digits or any of ",
                    "- . _ ~ : @ [ ]; empty: none"
                ),
                concat!(
                    "url: (a table): unknown key; expected \"max_concurrency\", \"max_input_tokens\", ",
                    "\"routing_tier\" or \"weight\""
                ),
                "wieght: 1: unknown key; nearest known key: \"weight\"",
            ]
        );
        for text in ["", "[]", "7", "{\"weight\":", "{}"] {
            let found = faults(text);
            assert!(found.len() == 1 && found[0].contains(EXPECTED), "{text}: {found:?}");
        }
    }
}
