//! One of Stargate's algorithms as a pool has it: `algorithm = { name = "power-of-n", sample_count = 4 }`.
//!
//! Keys are an entry's fields, of the same kinds and ranges. What would let a request wait, or refuse it, by rules other than the
//! pool's own is refused: in a pool servers without room are not there, and waiting is the queue's business.
//!
//! *Invariant*: what [`write_settings`] prints, [`read_settings`] takes back.
//! *Errors*: every fault at once, by its path in the configuration.
//! *Source*: the Stargate rules, section 1.4; the Lifeboat rules, section 3.

use super::entry::Entry;
use super::field::{Field, Kind, Setting};
use super::json::Json;
use super::method::Method;
use super::read::setting;
use crate::proto::config::fault::{Faults, show};
use crate::proto::config::keys::{list, nearest};
use crate::proto::config::live::toml_of;

/// Why a field has no place in a pool, beyond the value that changes nothing.
fn stranger(field: Field) -> Option<&'static str> {
    Some(match field {
        Field::CacheAffinityWaitMs | Field::BandWidenIntervalMs => {
            "expected 0: waiting for affinity is for stargate listeners; in a pool a request waits in its queue alone"
        }
        Field::MaxQueueTimeFloorMs | Field::MaxQueueTimeCeilMs => {
            "expected none: bounds on queue times are for stargate listeners; in a pool queue_timeout_ms bounds the wait"
        }
        Field::MaxQueued | Field::FallbackMaxQueued => {
            "expected 0: queueing beyond a server's limit is for stargate listeners; in a pool max_concurrency is a ceiling"
        }
        Field::MaxInputWorkSeconds => {
            "expected none: admission by input work is for stargate listeners; a pool admits by its ceilings and its queue"
        }
        Field::RequireCacheAffinityKey | Field::RequireInputTokens => {
            "expected false: required headers are for stargate listeners"
        }
        Field::ConsiderKvFreeTokens => "expected false: caches are looked at for stargate listeners only",
        _ => return None,
    })
}

/// Whether a setting changes nothing.
fn is_idle(setting: &Setting) -> bool {
    matches!(setting, Setting::Flag(false) | Setting::Uint(0))
}

/// Whether a pool may name that field.
fn has_place(field: Field, method: Method) -> bool {
    field.kind() != Kind::Structure && field.in_file().has(method)
}

/// The settings in `table`, whose `name` is `method`'s. `path` is the table's, with a dot behind it.
pub(in crate::proto::config) fn read_settings(
    path: &str,
    method: Method,
    table: &toml::Table,
    faults: &mut Faults,
) -> Entry {
    let mut entry = Entry::new(method);
    for (key, raw) in table.iter().filter(|(key, _)| *key != "name") {
        let at = format!("{path}{key}");
        let Some(field) = Field::parse(key).filter(|field| has_place(*field, method)) else {
            let known: Vec<&str> = Field::all()
                .filter(|field| has_place(*field, method) && stranger(*field).is_none())
                .map(Field::name)
                .collect();
            let near = nearest(key, &known).map_or(String::new(), |near| format!("; nearest: \"{near}\""));
            let expected = match known[..] {
                [] => format!("expected no setting: {} has none", method.name()),
                _ => format!("expected only settings of {}: {}{near}", method.name(), list(&known)),
            };
            faults.push(at, show(raw), expected);
            continue;
        };
        let unfit = stranger(field);
        match setting(field, &json_of(raw)) {
            Err(expected) => faults.push(at, show(raw), expected),
            Ok(Some(setting)) => match unfit {
                Some(_) if matches!(field, Field::MaxQueueTimeFloorMs | Field::MaxQueueTimeCeilMs) => {
                    faults.push(at, show(raw), unfit.unwrap_or_default());
                }
                Some(expected) if !is_idle(&setting) => faults.push(at, show(raw), expected),
                // It says what stands anyway.
                Some(_) => {}
                None => entry.set(field, setting),
            },
            Ok(None) => {}
        }
    }
    entry
}

fn json_of(raw: &toml::Value) -> Json {
    match raw {
        toml::Value::Boolean(on) => Json::Bool(*on),
        toml::Value::Integer(n) => u64::try_from(*n).map_or(Json::Number(*n as f64), Json::Uint),
        toml::Value::Float(x) => Json::Number(*x),
        toml::Value::String(text) => Json::Text(text.clone()),
        // No field holds any of these.
        toml::Value::Datetime(_) | toml::Value::Array(_) | toml::Value::Table(_) => Json::List,
    }
}

/// The table that [`read_settings`] reads, with all settings that a pool may choose.
pub(in crate::proto::config) fn write_settings(entry: &Entry) -> toml::Value {
    let json = serde_json::from_str(&entry.effective_json()).expect("an entry is printed as JSON");
    let Some(toml::Value::Table(effective)) = toml_of(&json) else { unreachable!("an entry is an object") };
    let mut table = toml::Table::new();
    table.insert("name".to_owned(), entry.method().name().into());
    table.extend(effective.into_iter().filter(|(key, _)| {
        Field::parse(key).is_some_and(|field| has_place(field, entry.method()) && stranger(field).is_none())
    }));
    toml::Value::Table(table)
}

#[cfg(test)]
mod tests {
    use super::super::entry::MethodSettings;
    use super::super::method::Comparator;
    use super::*;

    fn read(text: &str) -> (Entry, Vec<String>) {
        let table: toml::Table = text.parse().unwrap();
        let method = Method::parse_file(table["name"].as_str().unwrap()).unwrap();
        let mut faults = Faults::default();
        let entry = read_settings("pool[0].algorithm.", method, &table, &mut faults);
        (entry, faults.0.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn settings_are_those_of_an_entry() {
        let (entry, faults) = read("name = \"power-of-n\"\nsample_count = 4\ncomparator = \"utilization\"");
        assert_eq!(faults, [""; 0]);
        let MethodSettings::PowerOfN(own) = &entry.method else { panic!("{entry:?}") };
        assert_eq!((own.sample_count, own.comparator), (4, Comparator::Utilization));
        let (entry, faults) = read(
            "name = \"wait-and-widen\"\nn = 3\nnext_bucket_unlock_factor = 1\nseed = \"a\"\n\
             cache_affinity_backend_selection_count = 2\ncache_affinity_wait_ms = 0\nmax_queued = 0",
        );
        assert_eq!(faults, [""; 0]);
        let MethodSettings::WaitAndWiden(own) = &entry.method else { panic!("{entry:?}") };
        assert_eq!((own.group, own.widen.n, &*own.seed), (2, 3, "a"));
        assert_eq!(own.widen.next_bucket_unlock_factor, 1.0);
    }

    #[test]
    fn what_waits_or_refuses_by_itself_is_refused() {
        let (_, faults) = read(
            "name = \"pulsar-wait-and-widen\"\ncache_affinity_wait_ms = 200\nband_widen_interval_ms = 5\n\
             max_queue_time_floor_ms = 0\nmax_queue_time_ceil_ms = 9\nfallback_max_queued = 1\nmax_queued = 2\n\
             consider_kv_free_tokens = true\nrequire_cache_affinity_key = true\nmax_input_work_seconds = 1.5",
        );
        assert_eq!(faults.len(), 9, "{faults:#?}");
        let waits = "pool[0].algorithm.cache_affinity_wait_ms: 200: expected 0: waiting for affinity is for stargate listeners";
        assert!(faults.iter().any(|fault| fault.starts_with(waits)), "{faults:#?}");
        assert!(faults.iter().all(|fault| fault.contains("stargate listeners")), "{faults:#?}");
    }

    #[test]
    fn foreign_and_faulty_settings_are_told_with_their_path() {
        let (_, faults) = read("name = \"power-of-n\"\nsample_count = 65\nseed = \"x\"\nsampel_count = 2");
        let known = "expected only settings of power-of-n: \"sample_count\" or \"comparator\"";
        assert_eq!(
            faults,
            [
                format!("pool[0].algorithm.sampel_count: 2: {known}; nearest: \"sample_count\""),
                "pool[0].algorithm.sample_count: 65: expected a whole number from 1 to 64".to_owned(),
                format!("pool[0].algorithm.seed: \"x\": {known}"),
            ]
        );
        let (_, faults) = read("name = \"random\"\nrequest_algorithms = {}\nsample_count = 2");
        assert_eq!(faults.len(), 2);
        assert!(
            faults.iter().all(|fault| fault.ends_with("expected no setting: random has none")),
            "{faults:?}"
        );
        let (_, faults) = read("name = \"wait-and-widen\"\nn = [2]\nseed = 7\ncomparator = \"tftt\"");
        assert_eq!(faults.len(), 3, "{faults:?}");
    }

    #[test]
    fn what_is_written_is_read_back() {
        for method in Method::ALL {
            let entry = Entry::new(method);
            let toml::Value::Table(table) = write_settings(&entry) else { panic!("{method:?}") };
            let (read, faults) = read(&table.to_string());
            assert_eq!((read, faults), (entry, Vec::new()), "{method:?}");
        }
    }
}
