//! What a server says of itself in `PUT /v1/registrations/{id}`: JSON to a checked snapshot.
//!
//! Every registration is a full snapshot: a model or a figure that is not in it is not there any more. A figure that is null counts as
//! not reported, so the router measures it itself.
//!
//! *Invariant*: pure.
//! *Bound and cost*: linear in the body; [`REGISTRATION_MODELS_MAX`] models, [`REGISTRATION_PRIORITIES_MAX`] priorities each.
//! *Errors*: [`Faults`]: every fault at once, as path, value, what was expected.
//! *Source*: the configuration reference, admin API; the Stargate rules, sections 6.1 and 8.2.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::limits::{REGISTRATION_MODELS_MAX, REGISTRATION_PRIORITIES_MAX};
use crate::proto::config::{Faults, ServerUrl, TTL_MS_MIN, identity, nearest, shorten};
use crate::proto::stargate::stats::{KvCache, QueueTimes, Reported};

/// One registration as it came.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    pub url: ServerUrl,
    /// Empty: the server's own.
    pub cluster_id: Box<str>,
    /// Empty: none.
    pub routing_key: Box<str>,
    /// `None`: as configured.
    pub ttl_ms: Option<u64>,
    /// What the answer to the one before said; `None`: it is the first.
    pub lease: Option<Box<str>>,
    pub models: BTreeMap<Box<str>, Model>,
}

/// One model of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Its status is active, and it reports statistics: without them it takes no request.
    pub active: bool,
    pub reported: Reported,
}

const TOP: [&str; 6] = ["url", "cluster_id", "routing_key", "ttl_ms", "lease", "models"];
const MODEL: [&str; 2] = ["status", "stats"];
const STATS: [&str; 18] = [
    "last_mean_input_tps",
    "max_input_tps",
    "output_tps",
    "max_output_tps",
    "queue_size",
    "queued_input_size",
    "num_running_queries",
    "total_query_input_size",
    "max_engine_concurrency",
    "input_processing_queries",
    "output_generation_queries",
    "queue_time_estimate_ms_by_priority",
    "kv_cache_capacity_tokens",
    "kv_cache_used_tokens",
    "kv_cache_free_tokens",
    "stats_observed_at_unix_ms",
    "stats_capabilities",
    "stats_sources",
];
/// Longest lease that is looked at: longer than any that was given out.
const LEASE_BYTES_MAX: usize = 128;

/// Reads a body. `ttl_ms_max`: the longest lease that may be asked for.
pub fn parse(body: &[u8], ttl_ms_max: u64) -> Result<Snapshot, Faults> {
    const EXPECTED: &str = "expected a JSON object with \"url\" and \"models\"";
    let mut faults = Faults::default();
    let top = match serde_json::from_slice(body) {
        Ok(Value::Object(top)) => top,
        Ok(other) => {
            faults.push("body", shorten(&other.to_string()), EXPECTED);
            return Err(faults);
        }
        Err(error) => {
            faults.push("body", "(not JSON)", format!("{EXPECTED}: {error}"));
            return Err(faults);
        }
    };
    let mut fields = Fields { object: &top, path: String::new(), faults: &mut faults };
    let url = fields.url();
    let cluster_id = fields.text("cluster_id", identity::cluster_id).unwrap_or_default();
    let routing_key = fields.text("routing_key", identity::routing_key).unwrap_or_default();
    let ttl_ms = fields.count_in("ttl_ms", TTL_MS_MIN, ttl_ms_max);
    let lease = fields.text("lease", |text| match text.len() {
        1..=LEASE_BYTES_MAX => Ok(()),
        _ => {
            Err("expected the lease of the answer before; leave it out of the first registration".to_owned())
        }
    });
    let models = fields.models();
    fields.end(&TOP);
    match url {
        Some(url) if faults.is_empty() => {
            Ok(Snapshot { url, cluster_id, routing_key, ttl_ms, lease, models })
        }
        _ => Err(faults),
    }
}

/// One JSON object, and where it stands.
struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: String,
    faults: &'a mut Faults,
}

impl<'a> Fields<'a> {
    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// What stands there; null is nothing.
    fn of(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn fault(&mut self, name: &str, expected: impl Into<String>) {
        let value = match self.object.get(name) {
            None => "(missing)".to_owned(),
            Some(Value::Object(_)) => "(an object)".to_owned(),
            Some(other) => shorten(&other.to_string()),
        };
        let path = self.path_of(name);
        self.faults.push(path, value, expected);
    }

    fn inside(&mut self, name: &str) -> Option<Fields<'_>> {
        match self.of(name)? {
            Value::Object(object) => Some(Fields { object, path: self.path_of(name), faults: self.faults }),
            _ => {
                self.fault(name, "expected an object");
                None
            }
        }
    }

    fn text(&mut self, name: &str, check: impl Fn(&str) -> Result<(), String>) -> Option<Box<str>> {
        let text = match self.of(name)? {
            Value::String(text) => check(text).map(|()| text.as_str().into()),
            _ => Err("expected a string".to_owned()),
        };
        text.map_err(|expected| self.fault(name, expected)).ok()
    }

    fn count(&mut self, name: &str) -> Option<u64> {
        let count = self.of(name)?.as_u64();
        if count.is_none() {
            self.fault(name, "expected a whole number, 0 or greater");
        }
        count
    }

    fn count_in(&mut self, name: &str, least: u64, most: u64) -> Option<u64> {
        let count = self.of(name)?.as_u64().filter(|count| (least..=most).contains(count));
        if count.is_none() {
            self.fault(name, format!("expected a whole number from {least} to {most}"));
        }
        count
    }

    fn rate(&mut self, name: &str) -> Option<f64> {
        let rate = self.of(name)?.as_f64().filter(|rate| rate.is_finite() && *rate >= 0.0);
        if rate.is_none() {
            self.fault(name, "expected a number, 0 or greater");
        }
        rate
    }

    fn url(&mut self) -> Option<ServerUrl> {
        const EXPECTED: &str = "expected http://HOST[:PORT][/BASE] or unix:/PATH";
        let Some(value) = self.of("url") else {
            self.fault("url", EXPECTED);
            return None;
        };
        let url = match value.as_str().map(ServerUrl::parse) {
            Some(Ok(ServerUrl::Unix(path))) if path.is_relative() => {
                Err("expected unix:/PATH with an absolute path".to_owned())
            }
            Some(url) => url,
            None => Err(format!("expected a string: {EXPECTED}")),
        };
        // Whoever puts credentials in a URL does not want to read them in an answer.
        url.map_err(|expected| match value.as_str().is_some_and(|text| text.contains('@')) {
            true => self.faults.push("url", "(not shown)", expected),
            false => self.fault("url", expected),
        })
        .ok()
    }

    fn models(&mut self) -> BTreeMap<Box<str>, Model> {
        if self.of("models").is_none() {
            self.fault("models", "expected an object: {\"MODEL\":{\"status\":\"active\",\"stats\":{…}}}");
        }
        let mut models = BTreeMap::new();
        let Some(mut all) = self.inside("models") else { return models };
        if all.object.len() > REGISTRATION_MODELS_MAX {
            let found = format!("{} models", all.object.len());
            all.faults.push(all.path.clone(), found, format!("expected at most {REGISTRATION_MODELS_MAX}"));
            return models;
        }
        for name in all.object.keys() {
            if let Err(expected) = identity::model(name) {
                all.faults.push(all.path.clone(), shorten(&format!("\"{name}\"")), expected);
                continue;
            }
            match all.object[name].is_null() {
                true => all.fault(name, "expected an object: {\"status\":\"active\",\"stats\":{…}}"),
                false => models.extend(all.inside(name).map(|model| (name.as_str().into(), model.model()))),
            }
        }
        models
    }

    fn model(mut self) -> Model {
        let status = self.text("status", |_| Ok(()));
        let active = match status.as_deref() {
            Some("active") => true,
            Some("inactive") => false,
            _ => {
                // A fault of the type has been told.
                if status.is_some() || self.of("status").is_none() {
                    self.fault("status", "expected \"active\" or \"inactive\"");
                }
                false
            }
        };
        let reported = self.inside("stats").map(Fields::stats);
        let model = Model { active: active && reported.is_some(), reported: reported.unwrap_or_default() };
        self.end(&MODEL);
        model
    }

    fn stats(mut self) -> Reported {
        let kv = [
            self.count("kv_cache_capacity_tokens"),
            self.count("kv_cache_used_tokens"),
            self.count("kv_cache_free_tokens"),
        ];
        let [capacity_tokens, used_tokens, free_tokens] = kv.map(Option::unwrap_or_default);
        let reported = Reported {
            last_mean_input_tps: self.rate("last_mean_input_tps"),
            max_input_tps: self.rate("max_input_tps"),
            output_tps: self.rate("output_tps"),
            max_output_tps: self.rate("max_output_tps"),
            queue_size: self.count("queue_size"),
            queued_input_size: self.count("queued_input_size"),
            num_running_queries: self.count("num_running_queries"),
            total_query_input_size: self.count("total_query_input_size"),
            max_engine_concurrency: self.count("max_engine_concurrency"),
            input_processing_queries: self.count("input_processing_queries"),
            output_generation_queries: self.count("output_generation_queries"),
            queue_times: self.queue_times(),
            kv: kv.iter().any(Option::is_some).then_some(KvCache {
                capacity_tokens,
                used_tokens,
                free_tokens,
            }),
            observed_at_unix_ms: self.count("stats_observed_at_unix_ms"),
        };
        for name in ["stats_capabilities", "stats_sources"] {
            let strings =
                |value: &Value| value.as_array().is_some_and(|items| items.iter().all(Value::is_string));
            if self.of(name).is_some_and(|value| !strings(value)) {
                self.fault(name, "expected a list of strings");
            }
        }
        self.end(&STATS);
        reported
    }

    fn queue_times(&mut self) -> Option<QueueTimes> {
        let mut times = self.inside("queue_time_estimate_ms_by_priority")?;
        if times.object.len() > REGISTRATION_PRIORITIES_MAX {
            let found = format!("{} priorities", times.object.len());
            times.faults.push(
                times.path.clone(),
                found,
                format!("expected at most {REGISTRATION_PRIORITIES_MAX}"),
            );
            return None;
        }
        let mut all = QueueTimes::new();
        for key in times.object.keys() {
            // "+1" and "01" would be second spellings of one key.
            let priority = key.parse::<u32>().ok().filter(|priority| priority.to_string() == *key);
            match (priority, times.object[key].as_u64()) {
                (Some(priority), Some(ms)) => all.push((priority, ms)),
                (None, _) => times.fault(key, "expected a priority from 0 to 4294967295 as the key"),
                (_, None) => times.fault(key, "expected a whole number of milliseconds, 0 or greater"),
            }
        }
        all.sort_unstable();
        Some(all)
    }

    /// Notes a fault for each field that is not among `known`.
    fn end(self, known: &[&str]) {
        for name in self.object.keys().filter(|name| !known.contains(&name.as_str())) {
            let expected = match nearest(name, known) {
                Some(near) => format!("unknown field; nearest known field: \"{near}\""),
                None => format!("unknown field; expected {}", known.join(", ")),
            };
            let path = shorten(name);
            let value = match name.to_ascii_lowercase() {
                secret if ["key", "token", "secret", "password"].iter().any(|word| secret.contains(word)) => {
                    "(not shown)".to_owned()
                }
                _ => shorten(&self.object[name].to_string()),
            };
            let path = self.path_of(&path);
            self.faults.push(path, value, expected);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: &Value) -> Result<Snapshot, Vec<String>> {
        parse(body.to_string().as_bytes(), 300_000)
            .map_err(|faults| faults.0.iter().map(ToString::to_string).collect())
    }

    fn with_stats(stats: Value) -> Value {
        json!({"url": "http://10.0.0.1:8000", "models": {"m": {"status": "active", "stats": stats}}})
    }

    #[test]
    fn a_whole_snapshot_is_read() {
        let body = json!({
            "url": "http://10.0.0.1:8000/base/", "cluster_id": "c 1".replace(' ', "-"), "routing_key": "fn 1",
            "ttl_ms": 1000, "lease": "abc",
            "models": {
                "m": {"status": "active", "stats": {
                    "last_mean_input_tps": 100, "max_input_tps": 120.5, "output_tps": 7.25, "max_output_tps": 9,
                    "queue_size": 1, "queued_input_size": 2, "num_running_queries": 3, "total_query_input_size": 4,
                    "max_engine_concurrency": 5, "input_processing_queries": 6, "output_generation_queries": 7,
                    "queue_time_estimate_ms_by_priority": {"10": 40, "2": u64::MAX},
                    "kv_cache_capacity_tokens": 8, "kv_cache_free_tokens": 9, "stats_observed_at_unix_ms": 10,
                    "stats_capabilities": ["request.output.chunk_usage"], "stats_sources": []
                }},
                "idle": {"status": "inactive", "stats": {}},
                "silent": {"status": "active"},
                "nothing": {"status": "active", "stats": null},
            }
        });
        let snapshot = read(&body).unwrap();
        assert_eq!(snapshot.url.to_string(), "http://10.0.0.1:8000/base");
        assert_eq!((&*snapshot.cluster_id, &*snapshot.routing_key), ("c-1", "fn 1"));
        assert_eq!((snapshot.ttl_ms, snapshot.lease.as_deref()), (Some(1000), Some("abc")));
        let m = &snapshot.models["m"];
        assert!(m.active);
        let expected = Reported {
            last_mean_input_tps: Some(100.0),
            max_input_tps: Some(120.5),
            output_tps: Some(7.25),
            max_output_tps: Some(9.0),
            queue_size: Some(1),
            queued_input_size: Some(2),
            num_running_queries: Some(3),
            total_query_input_size: Some(4),
            max_engine_concurrency: Some(5),
            input_processing_queries: Some(6),
            output_generation_queries: Some(7),
            queue_times: Some(vec![(2, u64::MAX), (10, 40)]),
            kv: Some(KvCache { capacity_tokens: 8, used_tokens: 0, free_tokens: 9 }),
            observed_at_unix_ms: Some(10),
        };
        assert_eq!(m.reported, expected);
        let active = |name: &str| snapshot.models[name].active;
        assert!(!active("idle") && !active("silent") && !active("nothing"), "no statistics, no requests");
    }

    #[test]
    fn what_is_absent_or_null_is_not_reported() {
        let snapshot =
            read(&with_stats(json!({"queue_size": null, "queue_time_estimate_ms_by_priority": {}}))).unwrap();
        let reported = Reported { queue_times: Some(Vec::new()), ..Reported::default() };
        assert_eq!(snapshot.models["m"], Model { active: true, reported });
        assert_eq!((snapshot.ttl_ms, snapshot.lease, &*snapshot.cluster_id), (None, None, ""));
        assert!(read(&json!({"url": "unix:/run/e.sock", "models": {}})).unwrap().models.is_empty());
    }

    #[test]
    fn every_fault_comes_at_once_with_its_place() {
        let found = read(&json!({
            "url": "10.0.0.1:8000", "cluster": "c", "cluster_id": "a b", "routing_key": 7, "ttl_ms": 999, "lease": "",
            "api_key": "sk-1",
            "models": {
                "m": {"status": "up", "stats": {"queue_sise": 1, "queue_size": -1, "output_tps": "fast",
                    "queue_time_estimate_ms_by_priority": {"+1": 5, "2": 1.5, "4294967296": 1},
                    "stats_sources": "x"}, "weight": 1},
                "n": {"stats": []}, "o": null, "": {"status": "active"},
            }
        }))
        .unwrap_err();
        assert_eq!(
            found,
            [
                "url: \"10.0.0.1:8000\": expected http://HOST[:PORT][/BASE] or unix:/PATH; is \"http://10.0.0.1:8000\" meant?",
                "cluster_id: \"a b\": expected a cluster of at most 256 visible ASCII characters without spaces; empty: the server's own",
                "routing_key: 7: expected a string",
                "ttl_ms: 999: expected a whole number from 1000 to 300000",
                "lease: \"\": expected the lease of the answer before; leave it out of the first registration",
                "models: \"\": expected a model name of 1 to 1024 bytes",
                "models.m.status: \"up\": expected \"active\" or \"inactive\"",
                "models.m.stats.output_tps: \"fast\": expected a number, 0 or greater",
                "models.m.stats.queue_size: -1: expected a whole number, 0 or greater",
                "models.m.stats.queue_time_estimate_ms_by_priority.+1: 5: expected a priority from 0 to 4294967295 as the key",
                "models.m.stats.queue_time_estimate_ms_by_priority.2: 1.5: expected a whole number of milliseconds, 0 or greater",
                "models.m.stats.queue_time_estimate_ms_by_priority.4294967296: 1: expected a priority from 0 to 4294967295 as the key",
                "models.m.stats.stats_sources: \"x\": expected a list of strings",
                "models.m.stats.queue_sise: 1: unknown field; nearest known field: \"queue_size\"",
                "models.m.weight: 1: unknown field; expected status, stats",
                "models.n.status: (missing): expected \"active\" or \"inactive\"",
                "models.n.stats: []: expected an object",
                "models.o: null: expected an object: {\"status\":\"active\",\"stats\":{…}}",
                "api_key: (not shown): unknown field; nearest known field: \"routing_key\"",
                "cluster: \"c\": unknown field; nearest known field: \"cluster_id\"",
            ]
        );
    }

    #[test]
    fn bodies_that_are_no_registration_say_what_is_expected() {
        for body in ["", "[]", "7", "{\"url\":"] {
            let faults = parse(body.as_bytes(), 1).unwrap_err();
            assert_eq!(faults.len(), 1);
            assert!(
                faults.to_string().contains("expected a JSON object with \"url\" and \"models\""),
                "{faults}"
            );
        }
        let found = read(&json!({})).unwrap_err();
        assert!(
            found.len() == 2
                && found[0].starts_with("url: (missing)")
                && found[1].starts_with("models: (missing)")
        );
        let secret = read(&json!({"url": "http://user:pass@h", "models": {}})).unwrap_err();
        assert!(!secret[0].contains("pass@"), "{secret:?}");
        for url in ["https://h", "quic://127.0.0.1:1", "unix:run/e.sock"] {
            assert_eq!(read(&json!({"url": url, "models": {}})).unwrap_err().len(), 1, "{url}");
        }
    }

    #[test]
    fn sizes_are_bounded() {
        let models: Map<String, Value> = (0..=REGISTRATION_MODELS_MAX)
            .map(|n| (format!("m{n}"), json!({"status": "active", "stats": {}})))
            .collect();
        let found = read(&json!({"url": "http://h", "models": models})).unwrap_err();
        assert_eq!(found, ["models: 257 models: expected at most 256"]);
        let times: Map<String, Value> =
            (0..=REGISTRATION_PRIORITIES_MAX).map(|n| (n.to_string(), json!(1))).collect();
        let found = read(&with_stats(json!({"queue_time_estimate_ms_by_priority": times}))).unwrap_err();
        assert!(found[0].ends_with("257 priorities: expected at most 256"), "{found:?}");
    }
}
