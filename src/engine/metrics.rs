//! What the simulated engine counts: `/stats` for tests, `/metrics` under vLLM's names for scrapers.
//!
//! *Invariant*: `requests` = `completed` + `rejected` + `aborted` + `faulted` + `in_flight`, for requests to inference
//! endpoints.
//! *Source*: vLLM's metric names and labels.

use std::fmt::Write;

use serde_json::{Value, json};

use super::scheduler::Scheduler;

/// Counters of one engine, from its start. Requests are those to inference endpoints unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Heads read.
    pub requests: u64,
    /// Of these, answered as a stream.
    pub streamed: u64,
    /// Answered completely with success; counted before the last byte goes out.
    pub completed: u64,
    /// Answered with an error that the engine meant (400, 404, queue full).
    pub rejected: u64,
    /// The client closed before its answer was complete.
    pub aborted: u64,
    /// Ended by a fault on demand.
    pub faulted: u64,
    /// Head read, and the last byte not yet sent; the most at once. A request whose client is gone does not count
    /// towards the peak, even where the engine has not noticed yet.
    pub in_flight: u64,
    pub in_flight_peak: u64,
    /// The most requests that had a slot at once.
    pub running_peak: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Client connections accepted and open, whatever was asked on them.
    pub connections: u64,
    pub connections_open: u64,
    /// Bytes of request bodies read and of responses sent, all endpoints.
    pub bytes_in: u64,
    pub bytes_out: u64,
}

impl Stats {
    /// The body of `/stats`. `running` and `waiting` are the scheduler's.
    pub fn to_json(&self, running: usize, waiting: usize) -> Value {
        json!({
            "requests": self.requests, "streamed": self.streamed, "completed": self.completed,
            "rejected": self.rejected, "aborted": self.aborted, "faulted": self.faulted,
            "in_flight": self.in_flight, "in_flight_peak": self.in_flight_peak,
            "running": running, "running_peak": self.running_peak, "waiting": waiting,
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "connections": self.connections, "connections_open": self.connections_open,
            "bytes_in": self.bytes_in, "bytes_out": self.bytes_out,
        })
    }

    /// Reads what [`Stats::to_json`] wrote; a missing field is 0.
    pub fn from_json(value: &Value) -> Stats {
        let field = |name: &str| value[name].as_u64().unwrap_or(0);
        Stats {
            requests: field("requests"),
            streamed: field("streamed"),
            completed: field("completed"),
            rejected: field("rejected"),
            aborted: field("aborted"),
            faulted: field("faulted"),
            in_flight: field("in_flight"),
            in_flight_peak: field("in_flight_peak"),
            running_peak: field("running_peak"),
            prompt_tokens: field("prompt_tokens"),
            cached_tokens: field("cached_tokens"),
            output_tokens: field("output_tokens"),
            connections: field("connections"),
            connections_open: field("connections_open"),
            bytes_in: field("bytes_in"),
            bytes_out: field("bytes_out"),
        }
    }
}

/// The body of `/metrics`: Prometheus text format.
pub fn prometheus(stats: &Stats, scheduler: &Scheduler, model: &str) -> Vec<u8> {
    let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels = format!("engine=\"0\",model_name=\"{model}\"");
    let cache = scheduler.cache();
    let mut out = String::new();
    let mut line = |kind: &str, name: &str, help: &str, value: f64| {
        writeln!(
            out,
            "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}\nvllm:{name}{{{labels}}} {value:?}"
        )
        .expect("a string takes every write");
    };
    line("gauge", "num_requests_running", "Requests that have a slot.", scheduler.running() as f64);
    line("gauge", "num_requests_waiting", "Requests that wait for a slot.", scheduler.waiting() as f64);
    let usage = cache.pinned() as f64 / cache.capacity() as f64;
    line("gauge", "kv_cache_usage_perc", "Key/value blocks of running requests. 1 means all.", usage);
    let queried = stats.prompt_tokens as f64;
    line("counter", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", queried);
    let hits = stats.cached_tokens as f64;
    line("counter", "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", hits);
    line("counter", "prompt_tokens_total", "Prompt tokens taken in.", queried);
    let made = stats.output_tokens as f64;
    line("counter", "generation_tokens_total", "Answer tokens made.", made);
    let (block_size, blocks) = (scheduler.block_tokens(), cache.capacity());
    writeln!(
        out,
        "# HELP vllm:cache_config_info Size of the key/value memory.\n# TYPE vllm:cache_config_info gauge\n\
         vllm:cache_config_info{{block_size=\"{block_size}\",engine=\"0\",num_gpu_blocks=\"{blocks}\"}} 1.0"
    )
    .expect("a string takes every write");
    out.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::super::scheduler::Rates;
    use super::*;

    #[test]
    fn stats_survive_the_wire() {
        let stats = Stats { requests: 1, aborted: 2, bytes_out: 3, running_peak: 4, ..Stats::default() };
        assert_eq!(Stats::from_json(&stats.to_json(0, 0)), stats);
    }

    #[test]
    fn metric_lines_have_vllm_s_names_and_labels() {
        let rates = Rates { prefill_tps: 0.0, decode_tps: 0.0, slots: 1, queue_max: 0 };
        let stats = Stats { prompt_tokens: 7, ..Stats::default() };
        let text =
            String::from_utf8(prometheus(&stats, &Scheduler::new(rates, 16, 512), "a\"b")).expect("text");
        for line in [
            r#"vllm:num_requests_running{engine="0",model_name="a\"b"} 0.0"#,
            r#"vllm:prefix_cache_queries_total{engine="0",model_name="a\"b"} 7.0"#,
            r#"vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="512"} 1.0"#,
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in {text}");
        }
    }
}
