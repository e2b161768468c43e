//! A router on its trusted side: `ringway stargate`, servers that register over HTTP, requests as a gateway sends them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::client::{Client, Response, request};
use super::engine::{Engine, EngineSetup};
use super::router::{Router, cpus};
use super::time::{eventually, seconds};

/// A command line in the making.
pub struct Gateway {
    args: Vec<String>,
    lb_config: Option<String>,
    cores: String,
}

impl Default for Gateway {
    fn default() -> Self {
        let args = [
            ("--stargate-id", "sg-test"),
            ("--advertise-addr", "127.0.0.1:50071"),
            ("--stargate-discovery-dns-name", "stargate.test"),
            ("--http-listen-addr", "127.0.0.1:0"),
            ("--metrics-port", "0"),
            ("--admin", "127.0.0.1:0"),
        ];
        Gateway {
            args: args.iter().flat_map(|(flag, value)| [(*flag).into(), (*value).into()]).collect(),
            lb_config: None,
            cores: cpus()[0].to_string(),
        }
    }
}

impl Gateway {
    /// One shard, so that orders are exact; no lb-config file.
    pub fn new() -> Gateway {
        Gateway::default()
    }

    pub fn flag(mut self, flag: &str, value: &str) -> Gateway {
        self.args.push(format!("{flag}={value}"));
        self
    }

    /// A flag without a value.
    pub fn switch(mut self, flag: &str) -> Gateway {
        self.args.push(flag.to_owned());
        self
    }

    /// With this as its `lb-config.json`.
    pub fn lb_config(mut self, json: &str) -> Gateway {
        self.lb_config = Some(json.to_owned());
        self
    }

    pub fn shards(mut self, shards: usize) -> Gateway {
        let cpus = cpus();
        let list: Vec<_> = (0..shards).map(|shard| cpus[shard % cpus.len()].to_string()).collect();
        self.cores = list.join(",");
        self
    }

    /// Starts it and waits for its `ready` line. Nobody has registered yet.
    #[track_caller]
    pub fn start(mut self) -> Router {
        let directory = tempfile::tempdir().expect("a temporary directory");
        if let Some(json) = &self.lb_config {
            let file = directory.path().join("lb-config.json");
            std::fs::write(&file, json).expect("a writable temporary directory");
            self.args.push(format!("--lb-config-path={}", file.display()));
        }
        let mut args = vec!["stargate".to_owned()];
        args.append(&mut self.args);
        args.push(format!("--cores={}", self.cores));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut router = Router::spawn_as(&args, "stargate");
        router.keep(directory);
        router
    }
}

/// An engine of this name: it answers with it, and lists no models of its own.
pub fn engine() -> Engine {
    Engine::answering()
}

/// The same, whose health check takes `rtt_ms`.
pub fn distant_engine(rtt_ms: u64) -> Engine {
    let probe = super::engine::Probe::After(super::time::ms(rtt_ms), 200, "{}".into());
    EngineSetup::new().health(probe).start(|exchange| exchange.reply_ok())
}

/// What a server reports when nothing is going on: 1,000 tokens per second, nothing queued, no known limit.
pub fn idle() -> Value {
    json!({
        "last_mean_input_tps": 1000.0, "queue_size": 0, "queued_input_size": 0, "num_running_queries": 0,
        "max_engine_concurrency": 0, "queue_time_estimate_ms_by_priority": {}
    })
}

/// [`idle`] with some fields set otherwise.
pub fn but(fields: Value) -> Value {
    let mut stats = idle();
    for (name, value) in fields.as_object().expect("an object") {
        stats[name] = value.clone();
    }
    stats
}

/// One registration.
#[derive(Clone, Debug)]
pub struct Registration {
    pub id: String,
    pub url: String,
    pub cluster_id: Option<String>,
    pub routing_key: Option<String>,
    pub models: BTreeMap<String, Value>,
    pub lease: Option<String>,
}

impl Registration {
    /// Of one active model.
    pub fn new(id: &str, engine: &Engine, model: &str, stats: Value) -> Registration {
        let entry = json!({"status": "active", "stats": stats});
        Registration {
            id: id.into(),
            url: engine.url(),
            cluster_id: None,
            routing_key: None,
            models: BTreeMap::from([(model.to_owned(), entry)]),
            lease: None,
        }
    }
    pub fn cluster(mut self, id: &str) -> Registration {
        self.cluster_id = Some(id.into());
        self
    }
    pub fn key(mut self, key: &str) -> Registration {
        self.routing_key = Some(key.into());
        self
    }
    pub fn model(mut self, model: &str, status: &str, stats: Value) -> Registration {
        self.models.insert(model.into(), json!({"status": status, "stats": stats}));
        self
    }
    pub fn body(&self) -> Value {
        let mut body = json!({"url": self.url, "models": self.models});
        for (name, value) in
            [("cluster_id", &self.cluster_id), ("routing_key", &self.routing_key), ("lease", &self.lease)]
        {
            if let Some(value) = value {
                body[name] = json!(value);
            }
        }
        body
    }
    /// Sends it, whatever comes of it.
    #[track_caller]
    pub fn put(&self, router: &Router) -> Response {
        router.admin_ask("PUT", &format!("/v1/registrations/{}", self.id), &self.body().to_string())
    }
    /// Sends it (again), and keeps the lease.
    #[track_caller]
    pub fn renew(&mut self, router: &Router) {
        let response = self.put(router);
        assert_eq!(response.status, 200, "PUT of {}: {}", self.id, response.text());
        self.lease = Some(response.json()["lease"].as_str().expect("a lease").to_owned());
    }
    /// Reports other statistics of a model, and waits until every shard has them.
    #[track_caller]
    pub fn report(&mut self, router: &Router, model: &str, stats: Value) {
        self.models.insert(model.into(), json!({"status": "active", "stats": stats}));
        self.renew(router);
        router.settle();
    }
}

/// Registers them all and waits until each takes requests.
#[track_caller]
pub fn register(router: &Router, registrations: &mut [Registration]) {
    for registration in registrations.iter_mut() {
        registration.renew(router);
    }
    let mut active: BTreeMap<(String, String), usize> = BTreeMap::new();
    for registration in registrations.iter() {
        let key = registration.routing_key.clone().unwrap_or_default();
        for (model, entry) in &registration.models {
            *active.entry((key.clone(), model.clone())).or_default() +=
                usize::from(entry["status"] == "active");
        }
    }
    for ((key, model), count) in active {
        wait_active(router, &key, &model, count);
    }
}

/// Waits until exactly `count` servers are active for a target.
#[track_caller]
pub fn wait_active(router: &Router, key: &str, model: &str, count: usize) {
    let labels = [("routing_key", key), ("model", model)];
    router.wait_metric("stargate_active_inference_servers", &labels, count as f64, seconds(10));
    router.settle();
}

/// Who served a request.
#[track_caller]
pub fn sid(response: &Response) -> String {
    assert_eq!(response.status, 200, "{}{}", response.head.text(), response.text());
    response.header("x-inference-server-id").expect("an answer names its server")
}

/// A gateway's request for a model; further headers as given, which may replace the three required ones.
pub fn wish(model: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    wish_at("/v1/chat/completions", model, headers, br#"{"messages":[]}"#)
}

pub fn wish_at(path: &str, model: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut all = vec![("x-request-id", "r-1"), ("x-input-tokens", "1"), ("x-model", model)];
    all.retain(|(name, _)| !headers.iter().any(|(given, _)| given == name));
    all.extend(headers);
    request("POST", path, &all, body)
}

/// Sends one and reads its answer, on a connection of its own.
#[track_caller]
pub fn ask(router: &Router, model: &str, headers: &[(&str, &str)]) -> Response {
    let mut client = Client::connect(router.http());
    client.send(&wish(model, headers));
    client.response()
}

/// [`ask`] until `check` says yes; for what follows statistics that are on their way.
#[track_caller]
pub fn ask_until(
    router: &Router,
    model: &str,
    headers: &[(&str, &str)],
    what: &str,
    check: impl Fn(&Response) -> bool,
) -> Response {
    eventually(seconds(10), what, || {
        let response = ask(router, model, headers);
        if check(&response) {
            Ok(response)
        } else {
            Err(format!("{}{}", response.head.text(), response.text()))
        }
    })
}

/// An error of the router's own with its code, in the shape that gateways read.
#[track_caller]
pub fn assert_code(response: &Response, status: u16, code: &str) {
    let whole = format!("{}{}", response.head.text(), response.text());
    assert_eq!(response.status, status, "{whole}");
    assert_eq!(response.header("x-stargate-error-code").as_deref(), Some(code), "{whole}");
    assert_eq!(response.header("content-type").as_deref(), Some("application/json"), "{whole}");
    let json = response.json();
    assert_eq!(json["code"], code, "{whole}");
    assert!(json["error"].as_str().is_some_and(|text| !text.is_empty()), "{whole}");
    assert_no_identity(response);
}

/// An error of the router's own without a code: its body is empty.
#[track_caller]
pub fn assert_bare(response: &Response, status: u16) {
    let whole = format!("{}{}", response.head.text(), response.text());
    assert_eq!(response.status, status, "{whole}");
    assert!(response.body.is_empty(), "{whole}");
    assert_eq!(response.header("x-stargate-error-code"), None, "{whole}");
    assert_no_identity(response);
}

#[track_caller]
fn assert_no_identity(response: &Response) {
    for name in ["x-inference-server-id", "x-inference-server-url", "x-stargate-cluster-id"] {
        assert_eq!(
            response.header(name),
            None,
            "the router's own errors name no server: {}",
            response.head.text()
        );
    }
}
