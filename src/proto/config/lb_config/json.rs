//! A JSON text as it stands: members in order, and each as often as it was written.
//!
//! `serde_json`'s own tree sorts members and drops repeats, and here the later of two wins, or is a fault.
//!
//! *Bound and cost*: linear in the text; nesting is refused beyond `serde_json`'s 128 levels.
//! *Errors*: what breaks JSON's own syntax, by line and column, as one [`Fault`].

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::proto::config::fault::{Fault, shorten};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Uint(u64),
    /// Any other number: finite.
    Number(f64),
    Text(String),
    /// Its items mean nothing to anyone here.
    List,
    Object(Members),
}

pub(super) type Members = Vec<(String, Json)>;

impl Json {
    pub fn parse(bytes: &[u8]) -> Result<Json, Fault> {
        serde_json::from_slice(bytes).map_err(|error| {
            let text = String::from_utf8_lossy(bytes);
            let line = text.lines().nth(error.line().saturating_sub(1)).unwrap_or("").trim();
            let shown = if line.is_empty() { "(nothing)".to_owned() } else { shorten(line) };
            let told = error.to_string();
            let place = format!(" at line {} column {}", error.line(), error.column());
            Fault {
                path: format!("line {}, column {}", error.line(), error.column()),
                value: shown,
                expected: format!("expected JSON: {}", told.strip_suffix(&place).unwrap_or(&told)),
            }
        })
    }

    /// As a fault shows it.
    pub fn show(&self) -> String {
        match self {
            Json::Null => "null".to_owned(),
            Json::Bool(on) => on.to_string(),
            Json::Uint(n) => n.to_string(),
            Json::Number(x) => shorten(&serde_json::to_string(x).expect("a number can be written")),
            Json::Text(text) => quote(text),
            Json::List => "(a list)".to_owned(),
            Json::Object(_) => "(an object)".to_owned(),
        }
    }
}

/// `text` in JSON's quotes, shortened.
pub(super) fn quote(text: &str) -> String {
    serde_json::to_string(&shorten(text)).expect("a text can be written")
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(Builder)
    }
}

struct Builder;

impl<'de> Visitor<'de> for Builder {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, on: bool) -> Result<Json, E> {
        Ok(Json::Bool(on))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Json, E> {
        Ok(Json::Uint(n))
    }

    /// Only negative ones come here.
    fn visit_i64<E>(self, n: i64) -> Result<Json, E> {
        Ok(Json::Number(n as f64))
    }

    fn visit_f64<E>(self, x: f64) -> Result<Json, E> {
        Ok(Json::Number(x))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        while items.next_element::<Json>()?.is_some() {}
        Ok(Json::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members = Members::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members))
    }
}
