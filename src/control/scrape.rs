//! How large an engine's prefix cache is, and whether the engine is still the one it was: read from what engines publish.
//!
//! | engine | cache size | its life |
//! | --- | --- | --- |
//! | vLLM | `/metrics`: `vllm:cache_config_info{block_size,num_gpu_blocks}`, one line per engine | `process_start_time_seconds`, `vllm:prompt_tokens_total` |
//! | SGLang | `/metrics`: `sglang:max_total_num_tokens`, one per data-parallel rank; else `/get_server_info` | the same, `sglang:prompt_tokens_total` |
//! | llama.cpp | `/props`: `total_slots` × `default_generation_settings.n_ctx` | `llamacpp:prompt_tokens_total` |
//! | TensorRT-LLM | `/metrics`, JSON: `kvCacheStats.maxNumBlocks` × `tokensPerBlock` of the newest iteration | |
//!
//! *Invariant*: never on a request's path; what cannot be read is not known, and changes nothing. The reading functions are
//! pure.
//! *Bound and cost*: one scrape per server at a time, [`EVERY_MS`] apart, at most three requests of [`TIMEOUT_MS`] and
//! [`super::BODY_BYTES_MAX`] bytes each; an engine that publishes nothing is asked again only after
//! [`SILENT_EVERY_MS`] or when it comes back up. Reading TensorRT-LLM's statistics takes them from whoever else
//! reads them, so that it is asked only until its cache size is known.
//! *Errors*: debug lines in the log.
//! *Source*: the Lifeboat rules, section 5.5; the engines' own documentation of these endpoints.

pub mod load;

use std::rc::Rc;

use serde_json::Value;
use tracing::debug;

use super::Shared;
use super::port::Port;
use super::watch;
use crate::proto::account::calibration::BYTES_PER_TOKEN_DEFAULT;
use crate::proto::backend::catalog::KV_CAPACITY_BLOCKS_MAX;
use crate::proto::config::EngineMetrics;
use crate::proto::ids::BackendId;

/// From the end of one scrape to the start of the next, in milliseconds.
pub const EVERY_MS: u64 = 15_000;
/// The same where the engine publishes nothing that is known here.
pub const SILENT_EVERY_MS: u64 = 300_000;
/// Deadline of each request.
const TIMEOUT_MS: u64 = 5_000;

/// What one scrape found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Facts {
    /// Whose format it was; [`EngineMetrics::Auto`]: nobody's.
    pub engine: EngineMetrics,
    /// Tokens that the prefix cache holds.
    pub cache_tokens: Option<u64>,
    pub life: Life,
}

/// What tells one life of an engine from the next.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Life {
    /// Start of the process, in seconds since 1970.
    pub started_s: Option<f64>,
    /// Prompt tokens taken in since then.
    pub prompt_tokens: Option<f64>,
}

impl Life {
    /// `Some(false)`: `now` is surely the same life as `self` was; `Some(true)`: surely another; `None`: cannot be told.
    pub fn ended(&self, now: &Life) -> Option<bool> {
        let started = self.started_s.zip(now.started_s).map(|(then, now)| (then - now).abs() > 1.0);
        let went_back = self.prompt_tokens.zip(now.prompt_tokens).map(|(then, now)| now < then);
        match (started, went_back) {
            (Some(ended), _) => Some(ended || went_back == Some(true)),
            // A counter that went on may be a new one that has overtaken the old.
            (None, Some(true)) => Some(true),
            (None, _) => None,
        }
    }
}

/// The prefix blocks of `block_bytes` prompt bytes that a cache of so many tokens holds, at least 1.
pub fn blocks(cache_tokens: u64, block_bytes: u32) -> u32 {
    // Saturates; the bound is far below.
    let blocks = cache_tokens as f64 * BYTES_PER_TOKEN_DEFAULT / f64::from(block_bytes);
    (blocks as u64).clamp(1, u64::from(KV_CAPACITY_BLOCKS_MAX)) as u32
}

/// One line of the Prometheus text format: name, labels as they stand, value.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let (name, labels, rest) = match line.find(['{', ' ']) {
        Some(at) if line.as_bytes()[at] == b'{' => {
            // A quoted value may hold a brace; nothing after the labels does.
            let end = line.rfind('}').filter(|end| *end > at)?;
            (&line[..at], &line[at + 1..end], &line[end + 1..])
        }
        Some(at) => (&line[..at], "", &line[at..]),
        None => return None,
    };
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

/// The value of a label that holds no escaped character.
fn label<'l>(labels: &'l str, name: &str) -> Option<&'l str> {
    let mut from = 0;
    loop {
        let at = from + labels[from..].find(name)?;
        let begins = at == 0 || matches!(labels.as_bytes()[at - 1], b',' | b' ');
        let value = labels[at + name.len()..].strip_prefix("=\"");
        match value {
            Some(value) if begins => return value.split('"').next(),
            _ => from = at + name.len(),
        }
    }
}

/// Reads the body of `/metrics`: the text format, or TensorRT-LLM's JSON.
pub fn read_metrics(body: &[u8]) -> Facts {
    let text = String::from_utf8_lossy(body);
    if text.trim_start().starts_with('[') {
        return read_iterations(body);
    }
    let mut facts = Facts::default();
    let mut ranks: Vec<(String, u64)> = Vec::new();
    let count = |value: f64| (value.is_finite() && value >= 1.0).then_some(value as u64);
    for (name, labels, value) in text.lines().filter_map(sample) {
        match name {
            "vllm:cache_config_info" => {
                let number = |name| label(labels, name)?.parse::<u64>().ok().filter(|n| *n > 0);
                if let Some((size, blocks)) = number("block_size").zip(number("num_gpu_blocks")) {
                    let tokens = facts.cache_tokens.unwrap_or(0);
                    facts.cache_tokens = Some(tokens.saturating_add(size.saturating_mul(blocks)));
                }
            }
            "sglang:max_total_num_tokens" => {
                let rank = label(labels, "dp_rank").unwrap_or("").to_owned();
                match (count(value), ranks.iter_mut().find(|(known, _)| *known == rank)) {
                    // Tensor-parallel ranks hold parts of the same tokens.
                    (Some(tokens), Some((_, most))) => *most = tokens.max(*most),
                    (Some(tokens), None) => ranks.push((rank, tokens)),
                    (None, _) => {}
                }
            }
            "process_start_time_seconds" if value.is_finite() => facts.life.started_s = Some(value),
            "vllm:prompt_tokens_total" | "sglang:prompt_tokens_total" | "llamacpp:prompt_tokens_total"
                if value.is_finite() =>
            {
                *facts.life.prompt_tokens.get_or_insert(0.0) += value;
            }
            _ => {}
        }
        for (prefix, engine) in [
            ("vllm:", EngineMetrics::Vllm),
            ("sglang:", EngineMetrics::Sglang),
            ("llamacpp:", EngineMetrics::Llamacpp),
        ] {
            if name.starts_with(prefix) {
                facts.engine = engine;
            }
        }
    }
    if !ranks.is_empty() {
        facts.cache_tokens = Some(ranks.iter().fold(0, |sum, (_, tokens)| sum.saturating_add(*tokens)));
    }
    facts
}

/// Reads TensorRT-LLM's list of iterations; the newest is the last.
fn read_iterations(body: &[u8]) -> Facts {
    let Ok(Value::Array(iterations)) = serde_json::from_slice(body) else { return Facts::default() };
    let size = |iteration: &Value| {
        let stats = iteration.get("kvCacheStats")?;
        let number = |name: &str| stats.get(name)?.as_u64().filter(|n| *n > 0);
        Some(number("maxNumBlocks")?.saturating_mul(number("tokensPerBlock")?))
    };
    let cache_tokens = iterations.iter().rev().find_map(size);
    // Without an iteration the list is empty, and still nobody else's.
    Facts { engine: EngineMetrics::Trtllm, cache_tokens, life: Life::default() }
}

/// Reads llama.cpp's `/props`: the tokens of all slots.
pub fn read_props(body: &[u8]) -> Option<u64> {
    let props: Value = serde_json::from_slice(body).ok()?;
    let slots = props.get("total_slots")?.as_u64()?;
    let context = props.pointer("/default_generation_settings/n_ctx")?.as_u64()?;
    Some(slots.saturating_mul(context)).filter(|tokens| *tokens > 0)
}

/// Reads SGLang's `/get_server_info`.
pub fn read_server_info(body: &[u8]) -> Option<u64> {
    let info: Value = serde_json::from_slice(body).ok()?;
    info.get("max_total_num_tokens")?.as_u64().filter(|tokens| *tokens > 0)
}

/// Scrapes a server once and hands what it found to the state.
pub async fn scrape<P: Port + 'static>(
    shared: Rc<Shared<P>>,
    id: BackendId,
    kind: EngineMetrics,
    round: u64,
) {
    let facts = look(&shared, id, kind).await;
    shared.state.borrow_mut().handle_scrape(id, round, shared.clock.now(), facts);
    watch::notify_if_changed(&shared);
}

/// `None`: the engine did not answer as it should.
async fn look<P: Port>(shared: &Shared<P>, id: BackendId, kind: EngineMetrics) -> Option<Facts> {
    let get = async |path: &str| -> Option<Vec<u8>> {
        match watch::get(shared, id, path, TIMEOUT_MS).await {
            Ok(response) if response.is_success() => Some(response.body),
            Ok(response) => {
                debug!(server = id.0, path, status = response.status, "not published");
                Some(Vec::new())
            }
            Err(failure) => {
                debug!(server = id.0, path, "not read: {failure}");
                None
            }
        }
    };
    let mut facts = read_metrics(&get("/metrics").await?);
    let wanted = |engine| kind == engine || kind == EngineMetrics::Auto;
    if !wanted(facts.engine) {
        facts = Facts { engine: kind, ..Facts::default() };
    }
    let may_be = |facts: &Facts, engine| {
        facts.cache_tokens.is_none()
            && wanted(engine)
            && (facts.engine == engine || facts.engine == EngineMetrics::Auto)
    };
    // Its metrics are off unless asked for, and don't say the size.
    if may_be(&facts, EngineMetrics::Llamacpp)
        && let Some(tokens) = read_props(&get("/props").await?)
    {
        facts = Facts { engine: EngineMetrics::Llamacpp, cache_tokens: Some(tokens), ..facts };
    }
    if may_be(&facts, EngineMetrics::Sglang)
        && let Some(tokens) = read_server_info(&get("/get_server_info").await?)
    {
        facts = Facts { engine: EngineMetrics::Sglang, cache_tokens: Some(tokens), ..facts };
    }
    Some(facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: &str = r#"# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="190"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="au{}to",engine="1",num_gpu_blocks="10"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="a b"} 1.5e+03
vllm:prompt_tokens_total{engine="1",model_name="a b"} 500.0
process_start_time_seconds 1.78e+09
"#;

    #[test]
    fn vllm_s_metrics_say_size_and_life() {
        let facts = read_metrics(VLLM.as_bytes());
        let life = Life { started_s: Some(1.78e9), prompt_tokens: Some(2000.0) };
        assert_eq!(facts, Facts { engine: EngineMetrics::Vllm, cache_tokens: Some(6400), life });
        // Before the cache is laid out the number is not there.
        let early = VLLM.replace("\"190\"", "\"None\"").replace("num_gpu_blocks=\"10\"", "x=\"\"");
        assert_eq!(read_metrics(early.as_bytes()).cache_tokens, None);
    }

    #[test]
    fn sglang_s_ranks_add_up_and_copies_don_t() {
        let text = "sglang:max_total_num_tokens{dp_rank=\"0\",tp_rank=\"0\"} 1000.0\n\
                    sglang:max_total_num_tokens{dp_rank=\"0\",tp_rank=\"1\"} 1000.0\n\
                    sglang:max_total_num_tokens{dp_rank=\"1\",tp_rank=\"0\"} 500.0\n";
        let facts = read_metrics(text.as_bytes());
        assert_eq!((facts.engine, facts.cache_tokens), (EngineMetrics::Sglang, Some(1500)));
        let plain = read_metrics(b"sglang:max_total_num_tokens{model_name=\"m\"} 471258.0");
        assert_eq!(plain.cache_tokens, Some(471_258));
        assert_eq!(read_server_info(br#"{"model_path":"m","max_total_num_tokens":77}"#), Some(77));
    }

    #[test]
    fn llama_cpp_and_tensorrt_llm_are_read_too() {
        let metrics =
            read_metrics(b"# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 12\n");
        assert_eq!((metrics.engine, metrics.cache_tokens), (EngineMetrics::Llamacpp, None));
        assert_eq!(metrics.life.prompt_tokens, Some(12.0));
        let props = br#"{"default_generation_settings":{"id":0,"n_ctx":1792,"params":{}},"total_slots":5}"#;
        assert_eq!(read_props(props), Some(8960));
        let iterations = br#"[{"iter":1,"kvCacheStats":{"maxNumBlocks":7,"tokensPerBlock":32}},
            {"iter":2,"kvCacheStats":{"maxNumBlocks":10,"tokensPerBlock":32,"usedNumBlocks":3}}, {"iter":3}]"#;
        let facts = read_metrics(iterations);
        assert_eq!((facts.engine, facts.cache_tokens), (EngineMetrics::Trtllm, Some(320)));
        assert_eq!(read_metrics(b" []").engine, EngineMetrics::Trtllm);
    }

    #[test]
    fn what_is_none_of_these_is_not_known() {
        for body in [
            &b""[..],
            b"404 page not found",
            b"\xff\xfe{",
            b"[1,",
            b"go_goroutines 12\n",
            b"vllm:cache_config_info} 1{",
            b"vllm:cache_config_info{block_size=\"x\",num_gpu_blocks=\"1\"} 1",
            b"vllm:cache_config_info{block_size=\"0\",num_gpu_blocks=\"1\"} 1",
            b"sglang:max_total_num_tokens NaN\nsglang:max_total_num_tokens 0\n",
            b"{\"total_slots\":5}",
            b"{\"total_slots\":-5,\"default_generation_settings\":{\"n_ctx\":9}}",
            b"{\"max_total_num_tokens\":\"many\"}",
        ] {
            let shown = String::from_utf8_lossy(body);
            assert_eq!(read_metrics(body).cache_tokens, None, "{shown}");
            assert_eq!((read_props(body), read_server_info(body)), (None, None), "{shown}");
        }
        assert_eq!(read_metrics(b"go_goroutines 12\n"), Facts::default());
    }

    #[test]
    fn tokens_become_blocks_within_bounds() {
        assert_eq!(blocks(6400, 256), 100);
        assert_eq!(blocks(1, 65_536), 1);
        assert_eq!(blocks(u64::MAX, 64), KV_CAPACITY_BLOCKS_MAX);
    }

    #[test]
    fn lives_are_told_apart_where_they_can_be() {
        let life = |started_s, prompt_tokens| Life { started_s, prompt_tokens };
        let old = life(Some(100.0), Some(50.0));
        assert_eq!(old.ended(&life(Some(100.2), Some(51.0))), Some(false));
        assert_eq!(old.ended(&life(Some(160.0), Some(51.0))), Some(true));
        assert_eq!(
            old.ended(&life(Some(100.0), Some(49.0))),
            Some(true),
            "workers may die under their server"
        );
        assert_eq!(old.ended(&life(None, Some(49.0))), Some(true));
        assert_eq!(old.ended(&life(None, Some(50.0))), None);
        assert_eq!(old.ended(&Life::default()), None);
    }
}
