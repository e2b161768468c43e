//! How busy an engine is: what it says of its requests, its limit and its cache, once a second for servers of trusted listeners.
//!
//! | engine | runs, waits | limit | cache |
//! | --- | --- | --- | --- |
//! | vLLM | `vllm:num_requests_running`, `…_waiting`, summed over engines | not published | `vllm:kv_cache_usage_perc` (before: `gpu_cache_usage_perc`) of `vllm:cache_config_info` |
//! | SGLang | `sglang:num_running_reqs`, `sglang:num_queue_reqs`, per data-parallel rank | `/get_server_info`: `internal_states[].effective_max_running_requests_per_dp` | `sglang:num_used_tokens` of `sglang:max_total_num_tokens` |
//! | llama.cpp | `llamacpp:requests_processing`, `…_deferred` | `/props`: `total_slots` | `llamacpp:kv_cache_tokens`, where it is published, of `/props` |
//! | TensorRT-LLM | `/metrics`, JSON, newest iteration: `numActiveRequests`, `numQueuedRequests` | `maxNumActiveRequests` | `kvCacheStats`: blocks × `tokensPerBlock` |
//!
//! *Invariant*: the reading functions are pure; what an engine does not publish is not known.
//! *Bound and cost*: one request of [`TIMEOUT_MS`] per server and second, a second one once per life of the engine.
//! TensorRT-LLM's statistics go to whoever reads them first: they are read here only where the configuration says that it is such an
//! engine.
//! *Errors*: debug lines in the log.
//! *Source*: the Stargate rules, section 6.7; the engines' own documentation of these endpoints.

use std::collections::BTreeMap;
use std::rc::Rc;

use serde_json::Value;

use super::{label, sample};
use crate::control::Shared;
use crate::control::port::Port;
use crate::control::watch;
use crate::proto::config::EngineMetrics;
use crate::proto::ids::BackendId;
use crate::proto::stargate::stats::KvCache;

/// Deadline of each request.
const TIMEOUT_MS: u64 = 1_000;

/// What one look found; `None`: not published.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Whose format it was; [`EngineMetrics::Auto`]: nobody's.
    pub engine: EngineMetrics,
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    pub max_concurrency: Option<u64>,
    pub kv: Option<KvCache>,
}

/// What does not change while an engine lives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    pub max_concurrency: Option<u64>,
    pub cache_tokens: Option<u64>,
}

/// A look that is to be taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Task {
    pub kind: EngineMetrics,
    /// The life of the engine that it belongs to.
    pub round: u64,
    /// As found before in this life; `None`: to be asked for, where the engine tells them apart from its load.
    pub limits: Option<Limits>,
}

fn whole(value: f64) -> Option<u64> {
    // Saturates: no engine has that many.
    (value.is_finite() && value >= 0.0).then_some(value as u64)
}

/// Reads the body of `/metrics`.
pub fn read_load(body: &[u8]) -> Load {
    let text = String::from_utf8_lossy(body);
    if text.trim_start().starts_with('[') {
        return read_iterations(body);
    }
    let mut load = Load::default();
    // By figure and part of the engine: parts add up, copies of one part don't.
    let mut parts: BTreeMap<(Figure, String), f64> = BTreeMap::new();
    for (name, labels, value) in text.lines().filter_map(sample).filter(|(_, _, value)| value.is_finite()) {
        let Some((engine, figure)) = figure(name) else { continue };
        load.engine = engine;
        let part = label(labels, if engine == EngineMetrics::Vllm { "engine" } else { "dp_rank" });
        let value = match figure {
            Figure::Capacity if engine == EngineMetrics::Vllm => {
                let number = |name| label(labels, name)?.parse::<f64>().ok();
                number("block_size").zip(number("num_gpu_blocks")).map_or(0.0, |(size, blocks)| size * blocks)
            }
            _ => value,
        };
        let most = parts.entry((figure, part.unwrap_or("").to_owned())).or_insert(0.0);
        *most = most.max(value);
    }
    let of = |figure: Figure| {
        let mut found = parts.iter().filter(|((of, _), _)| *of == figure).map(|(_, value)| *value).peekable();
        found.peek().is_some().then(|| found.sum::<f64>())
    };
    load.running = of(Figure::Running).and_then(whole);
    load.waiting = of(Figure::Waiting).and_then(whole);
    let capacity = of(Figure::Capacity).filter(|tokens| *tokens > 0.0);
    let engines = parts.keys().filter(|(figure, _)| *figure == Figure::Usage).count() as f64;
    let used = of(Figure::Used).or_else(|| Some(of(Figure::Usage)? / engines * capacity?));
    load.kv = capacity.zip(used).and_then(|(capacity, used)| cache(whole(capacity)?, whole(used.round())?));
    if load.engine == EngineMetrics::Llamacpp && load.kv.is_none() {
        // The capacity stands elsewhere.
        load.kv = used.and_then(whole).map(|used_tokens| KvCache { used_tokens, ..KvCache::default() });
    }
    load
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Figure {
    Running,
    Waiting,
    /// Tokens that the cache holds, all and in use; or the part in use, 0 to 1.
    Capacity,
    Used,
    Usage,
}

fn figure(name: &str) -> Option<(EngineMetrics, Figure)> {
    use EngineMetrics::{Llamacpp, Sglang, Vllm};
    Some(match name {
        "vllm:num_requests_running" => (Vllm, Figure::Running),
        "vllm:num_requests_waiting" => (Vllm, Figure::Waiting),
        "vllm:cache_config_info" => (Vllm, Figure::Capacity),
        "vllm:kv_cache_usage_perc" | "vllm:gpu_cache_usage_perc" => (Vllm, Figure::Usage),
        "sglang:num_running_reqs" => (Sglang, Figure::Running),
        "sglang:num_queue_reqs" => (Sglang, Figure::Waiting),
        "sglang:max_total_num_tokens" => (Sglang, Figure::Capacity),
        "sglang:num_used_tokens" => (Sglang, Figure::Used),
        "llamacpp:requests_processing" => (Llamacpp, Figure::Running),
        "llamacpp:requests_deferred" => (Llamacpp, Figure::Waiting),
        "llamacpp:kv_cache_tokens" => (Llamacpp, Figure::Used),
        _ => return None,
    })
}

fn cache(capacity_tokens: u64, used_tokens: u64) -> Option<KvCache> {
    let used_tokens = used_tokens.min(capacity_tokens);
    let free_tokens = capacity_tokens - used_tokens;
    (capacity_tokens > 0).then_some(KvCache { capacity_tokens, used_tokens, free_tokens })
}

/// Reads TensorRT-LLM's list of iterations; the newest is the last.
fn read_iterations(body: &[u8]) -> Load {
    let none = Load { engine: EngineMetrics::Trtllm, ..Load::default() };
    let Ok(Value::Array(iterations)) = serde_json::from_slice(body) else { return Load::default() };
    let newest = iterations.iter().rev().find(|one| one.get("numActiveRequests").is_some());
    let Some(newest) = newest else { return none };
    let number = |name: &str| newest.get(name)?.as_u64();
    let kv = newest.get("kvCacheStats").and_then(|stats| {
        let tokens = |name: &str| {
            Some(stats.get(name)?.as_u64()?.saturating_mul(stats.get("tokensPerBlock")?.as_u64()?))
        };
        cache(tokens("maxNumBlocks")?, tokens("usedNumBlocks")?)
    });
    Load {
        running: number("numActiveRequests"),
        waiting: number("numQueuedRequests"),
        max_concurrency: number("maxNumActiveRequests").filter(|limit| *limit > 0),
        kv,
        ..none
    }
}

/// Reads llama.cpp's `/props`.
pub fn read_slots(body: &[u8]) -> Limits {
    let slots = || serde_json::from_slice::<Value>(body).ok()?.get("total_slots")?.as_u64();
    Limits { max_concurrency: slots().filter(|slots| *slots > 0), cache_tokens: super::read_props(body) }
}

/// Reads SGLang's `/get_server_info`: a limit for each data-parallel rank.
pub fn read_server_limits(body: &[u8]) -> Limits {
    let limit = || {
        let info: Value = serde_json::from_slice(body).ok()?;
        let ranks = info.get("internal_states")?.as_array()?;
        let of_rank = |rank: &Value| rank.get("effective_max_running_requests_per_dp")?.as_u64();
        let limits: Option<Vec<u64>> = ranks.iter().map(of_rank).collect();
        Some(limits?.into_iter().fold(0u64, u64::saturating_add)).filter(|limit| *limit > 0)
    };
    Limits { max_concurrency: limit(), cache_tokens: None }
}

/// Asks a server's engine once and hands what it says to the state.
pub async fn look<P: Port + 'static>(shared: Rc<Shared<P>>, id: BackendId, task: Task) {
    let asked = shared.clock.now();
    let found = ask(&shared, id, task).await;
    shared.state.borrow_mut().handle_load(id, task.round, asked, found);
    shared.moved.notify();
}

/// `None`: the engine did not answer.
async fn ask<P: Port>(shared: &Shared<P>, id: BackendId, task: Task) -> Option<(Load, Option<Limits>)> {
    let get = async |path: &str| -> Option<Vec<u8>> {
        let response = watch::get(shared, id, path, TIMEOUT_MS).await.ok()?;
        Some(if response.is_success() { response.body } else { Vec::new() })
    };
    let wanted = |engine| task.kind == engine || task.kind == EngineMetrics::Auto;
    let mut load = read_load(&get("/metrics").await?);
    if !wanted(load.engine) {
        load = Load { engine: task.kind, ..Load::default() };
    }
    let limits = match (task.limits, load.engine) {
        (Some(limits), _) => Some(limits),
        (None, EngineMetrics::Llamacpp) => Some(read_slots(&get("/props").await?)),
        (None, EngineMetrics::Sglang) => Some(read_server_limits(&get("/get_server_info").await?)),
        (None, _) => None,
    };
    Some((completed(load, limits), limits))
}

/// What was found, with what is known of the engine's limits.
fn completed(mut load: Load, limits: Option<Limits>) -> Load {
    let Limits { max_concurrency, cache_tokens } = limits.unwrap_or_default();
    load.max_concurrency = load.max_concurrency.or(max_concurrency);
    load.kv = match (load.kv, cache_tokens) {
        (Some(kv), Some(tokens)) if kv.capacity_tokens == 0 => cache(tokens, kv.used_tokens),
        // In use, of nobody knows what: not known.
        (Some(kv), None) if kv.capacity_tokens == 0 => None,
        (kv, _) => kv,
    };
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllm_s_engines_add_up() {
        let text = "# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4.0\n\
            vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0.0\n\
            vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 2.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"1\",model_name=\"m\",reason=\"capacity\"} 2.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.5\n\
            vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.25\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"100\"} 1.0\n";
        let kv = KvCache { capacity_tokens: 3200, used_tokens: 1200, free_tokens: 2000 };
        let expected = Load {
            engine: EngineMetrics::Vllm,
            running: Some(7),
            waiting: Some(2),
            max_concurrency: None,
            kv: Some(kv),
        };
        assert_eq!(read_load(text.as_bytes()), expected);
        let older = text.replace("kv_cache_usage_perc", "gpu_cache_usage_perc");
        assert_eq!(read_load(older.as_bytes()), expected);
        let early = text.replace("\"100\"", "\"None\"");
        assert_eq!(read_load(early.as_bytes()).kv, None, "before the cache is laid out");
    }

    #[test]
    fn sglang_s_ranks_add_up_and_copies_don_t() {
        let text = "sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"0\"} 5\n\
            sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"1\"} 5\n\
            sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"0\"} 1\n\
            sglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"0\"} 2\n\
            sglang:num_used_tokens{dp_rank=\"0\"} 100\nsglang:num_used_tokens{dp_rank=\"1\"} 50\n\
            sglang:max_total_num_tokens{dp_rank=\"0\"} 1000\nsglang:max_total_num_tokens{dp_rank=\"1\"} 1000\n";
        let load = read_load(text.as_bytes());
        assert_eq!((load.engine, load.running, load.waiting), (EngineMetrics::Sglang, Some(6), Some(2)));
        assert_eq!(load.kv, Some(KvCache { capacity_tokens: 2000, used_tokens: 150, free_tokens: 1850 }));
        let info = br#"{"max_running_requests":null,"internal_states":[{"effective_max_running_requests_per_dp":128},
            {"effective_max_running_requests_per_dp":64}]}"#;
        assert_eq!(read_server_limits(info).max_concurrency, Some(192));
        assert_eq!(completed(load, Some(read_server_limits(info))).max_concurrency, Some(192));
        for unknown in [&b"{}"[..], b"[]", b"{\"internal_states\":[{}]}", b"{\"internal_states\":[]}", b"x"] {
            assert_eq!(read_server_limits(unknown), Limits::default());
        }
    }

    #[test]
    fn llama_cpp_s_slots_are_its_limit() {
        let load = read_load(b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 7\n");
        assert_eq!((load.running, load.waiting, load.kv), (Some(2), Some(7), None));
        let props = br#"{"default_generation_settings":{"n_ctx":1792},"total_slots":5}"#;
        let full = completed(load, Some(read_slots(props)));
        assert_eq!((full.max_concurrency, full.kv), (Some(5), None));
        let old = read_load(b"llamacpp:requests_processing 2\nllamacpp:kv_cache_tokens 960\n");
        let kv = KvCache { capacity_tokens: 8960, used_tokens: 960, free_tokens: 8000 };
        assert_eq!(completed(old, Some(read_slots(props))).kv, Some(kv));
        assert_eq!(completed(old, None).kv, None, "in use of nobody knows what");
        assert_eq!(read_slots(b"{\"total_slots\":0}"), Limits::default());
    }

    #[test]
    fn tensorrt_llm_s_newest_iteration_counts() {
        let body = br#"[{"iter":1,"numActiveRequests":9,"maxNumActiveRequests":64},
            {"iter":2,"numActiveRequests":5,"numQueuedRequests":3,"maxNumActiveRequests":64,
             "kvCacheStats":{"maxNumBlocks":10,"usedNumBlocks":4,"freeNumBlocks":6,"tokensPerBlock":32}},{"iter":3}]"#;
        let load = read_load(body);
        assert_eq!((load.engine, load.running, load.waiting), (EngineMetrics::Trtllm, Some(5), Some(3)));
        assert_eq!(load.max_concurrency, Some(64));
        assert_eq!(load.kv, Some(KvCache { capacity_tokens: 320, used_tokens: 128, free_tokens: 192 }));
        assert_eq!(read_load(b"[]"), Load { engine: EngineMetrics::Trtllm, ..Load::default() });
    }

    #[test]
    fn what_is_none_of_these_is_not_known() {
        for body in [
            &b""[..],
            b"404 page not found",
            b"go_goroutines 12\n",
            b"[1",
            b"vllm:num_requests_running NaN\n",
        ] {
            let load = read_load(body);
            assert_eq!((load.running, load.waiting, load.kv), (None, None, None), "{load:?}");
        }
        assert_eq!(read_load(b"go_goroutines 12\n"), Load::default());
    }
}
