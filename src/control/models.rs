//! What engines list at `GET /v1/models`, and the union that the router lists itself.
//!
//! *Invariant*: pure. A model's object is passed on byte for byte as its engine wrote it; an id appears once, at the place
//! of its first mention in server order; an engine's own object wins over the one made up for a configured name, and the
//! first server's over later ones.
//! *Bound and cost*: [`MODELS_PER_SERVER_MAX`] models of [`ID_BYTES_MAX`] bytes per server; the body's size is bounded by
//! the client's limit. One pass, one hash lookup per model.
//! *Errors*: [`ListingError`] says what was wrong with a list and where.
//! *Source*: the Lifeboat rules, sections on choosing the algorithm and on `/v1/models`; OpenAI's list object.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde_json::value::RawValue;

/// Models one engine may list; more is an error rather than a silent cut.
pub const MODELS_PER_SERVER_MAX: usize = 4096;
/// Length of a model's id in bytes.
pub const ID_BYTES_MAX: usize = 1024;

/// One model of an engine.
#[derive(Clone, Debug)]
pub struct Listed {
    pub id: Box<str>,
    /// The object as the engine wrote it.
    pub object: Box<RawValue>,
}

impl PartialEq for Listed {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && self.object.get() == other.object.get()
    }
}

/// Why a list of models could not be taken in.
#[derive(Debug)]
pub enum ListingError {
    /// Not JSON, or not `{"data":[…]}`.
    Json(serde_json::Error),
    /// `data[index]` has no `id` of type string.
    NoId {
        index: usize,
    },
    /// `data[index].id` is empty or too long.
    BadId {
        index: usize,
        bytes: usize,
    },
    TooMany {
        count: usize,
    },
}

impl fmt::Display for ListingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListingError::Json(error) => write!(f, "expected {{\"data\":[{{\"id\":…}}]}}: {error}"),
            ListingError::NoId { index } => write!(f, "data[{index}] has no \"id\" string"),
            ListingError::BadId { index, bytes } => {
                write!(f, "data[{index}].id has {bytes} bytes, expected 1 to {ID_BYTES_MAX}")
            }
            ListingError::TooMany { count } => {
                write!(f, "{count} models, expected at most {MODELS_PER_SERVER_MAX}")
            }
        }
    }
}

#[derive(Deserialize)]
struct ListBody {
    data: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct ModelBody<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
}

/// Reads the body of an engine's answer. An id listed twice is kept once.
pub fn parse_listing(body: &[u8]) -> Result<Vec<Listed>, ListingError> {
    let list: ListBody = serde_json::from_slice(body).map_err(ListingError::Json)?;
    if list.data.len() > MODELS_PER_SERVER_MAX {
        return Err(ListingError::TooMany { count: list.data.len() });
    }
    let mut models: Vec<Listed> = Vec::with_capacity(list.data.len());
    let mut seen = std::collections::HashSet::new();
    for (index, object) in list.data.into_iter().enumerate() {
        let id: Box<str> = match serde_json::from_str::<ModelBody>(object.get()) {
            Ok(model) => model.id.into(),
            Err(_) => return Err(ListingError::NoId { index }),
        };
        if id.is_empty() || id.len() > ID_BYTES_MAX {
            return Err(ListingError::BadId { index, bytes: id.len() });
        }
        if seen.insert(id.clone()) {
            models.push(Listed { id, object });
        }
    }
    Ok(models)
}

/// What one live server adds to the union.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// The engine's own list.
    Listed(&'a [Listed]),
    /// Names from the configuration.
    Configured(&'a [Box<str>]),
}

/// The body of the router's `GET /v1/models`: every model of every source once.
pub fn union<'a>(sources: impl IntoIterator<Item = Source<'a>>) -> Box<[u8]> {
    let mut order: Vec<(&str, Option<&RawValue>)> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut mention = |id: &'a str, object: Option<&'a RawValue>| match places.get(id) {
        Some(place) => {
            let known = &mut order[*place].1;
            *known = known.or(object);
        }
        None => {
            places.insert(id, order.len());
            order.push((id, object));
        }
    };
    for source in sources {
        match source {
            Source::Listed(models) => {
                for model in models {
                    mention(&model.id, Some(&model.object));
                }
            }
            Source::Configured(names) => {
                for name in names {
                    mention(name, None);
                }
            }
        }
    }
    let mut body = String::from(r#"{"object":"list","data":["#);
    for (place, (id, object)) in order.iter().enumerate() {
        if place > 0 {
            body.push(',');
        }
        match object {
            Some(object) => body.push_str(object.get()),
            None => {
                let made = serde_json::json!({"id": id, "object": "model", "owned_by": "ringway"});
                body.push_str(&made.to_string());
            }
        }
    }
    body.push_str("]}");
    body.into_bytes().into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(body: &[u8]) -> Vec<String> {
        let value: serde_json::Value = serde_json::from_slice(body).unwrap();
        assert_eq!(value["object"], "list");
        value["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn a_list_keeps_each_object_as_the_engine_wrote_it() {
        let body = br#"{"object":"list", "data":[{"id":"b", "max_model_len": 8192, "x":1.0,"nested":{"z":1,"a":[2]}},
            {"created":12345678901234567890123,"id":"a\/\u0062"}], "models":[{"name":"other shape"}]}"#;
        let models = parse_listing(body).unwrap();
        assert_eq!(models.len(), 2);
        assert_eq!(&*models[0].id, "b");
        assert_eq!(
            models[0].object.get(),
            r#"{"id":"b", "max_model_len": 8192, "x":1.0,"nested":{"z":1,"a":[2]}}"#
        );
        assert_eq!(&*models[1].id, "a/b", "an id is compared in its decoded form");
        let union = union([Source::Listed(&models)]);
        let text = std::str::from_utf8(&union).unwrap();
        assert!(text.contains("12345678901234567890123") && text.contains(r#""x":1.0"#), "{text}");
    }

    #[test]
    fn a_bad_list_says_what_and_where() {
        let say = |body: &[u8]| parse_listing(body).unwrap_err().to_string();
        assert!(say(b"<html>").contains("line 1 column 1"));
        assert!(say(br#"{"models":[]}"#).contains("missing field `data`"));
        assert_eq!(say(br#"{"data":[{"id":"a"},{"name":"b"}]}"#), "data[1] has no \"id\" string");
        assert_eq!(say(br#"{"data":[{"id":7}]}"#), "data[0] has no \"id\" string");
        assert_eq!(say(br#"{"data":[{"id":""}]}"#), "data[0].id has 0 bytes, expected 1 to 1024");
        let many = format!(r#"{{"data":[{}{{"id":"z"}}]}}"#, r#"{"id":"a"},"#.repeat(MODELS_PER_SERVER_MAX));
        assert_eq!(say(many.as_bytes()), "4097 models, expected at most 4096");
    }

    #[test]
    fn an_empty_list_is_a_list() {
        assert_eq!(parse_listing(br#"{"data":[]}"#).unwrap(), []);
        assert_eq!(&*union([]), br#"{"object":"list","data":[]}"#);
    }

    #[test]
    fn the_union_lists_each_model_once_in_server_order() {
        let one = parse_listing(br#"{"data":[{"id":"a","from":1},{"id":"b","from":1},{"id":"a","from":9}]}"#)
            .unwrap();
        let two = parse_listing(br#"{"data":[{"id":"b","from":2},{"id":"c","from":2}]}"#).unwrap();
        let body = union([Source::Listed(&one), Source::Listed(&two)]);
        assert_eq!(ids(&body), ["a", "b", "c"]);
        let value: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(value["data"][1]["from"], 1, "the first server's object wins");
        assert_eq!(ids(&union([Source::Listed(&two), Source::Listed(&one)])), ["b", "c", "a"]);
    }

    #[test]
    fn a_configured_name_gets_an_object_unless_an_engine_lists_it() {
        let listed = parse_listing(br#"{"data":[{"id":"b","max_model_len":4096}]}"#).unwrap();
        let names: [Box<str>; 2] = ["q\"uote".into(), "b".into()];
        let body = union([Source::Configured(&names), Source::Listed(&listed)]);
        assert_eq!(ids(&body), ["q\"uote", "b"]);
        let value: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            value["data"][0],
            serde_json::json!({"id":"q\"uote","object":"model","owned_by":"ringway"})
        );
        assert_eq!(value["data"][1]["max_model_len"], 4096);
    }
}
