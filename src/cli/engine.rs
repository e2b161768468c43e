//! The flags of `ringway engine`, and what its help says about endpoints and faults.

use std::net::SocketAddr;

use clap::Args;

/// `ringway engine`.
#[derive(Args, Clone, Debug)]
#[command(after_help = ENGINE_HELP, after_long_help = ENGINE_HELP)]
pub struct EngineArgs {
    /// Where to listen, IP:PORT; port 0 binds a free one, and `listening engine ADDR` on stdout says which
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8001")]
    pub listen: SocketAddr,
    /// A served model's name; repeatable
    #[arg(long, value_name = "NAME", default_value = "simulated")]
    pub model: Vec<String>,
    /// Prompt tokens that are not cached, read per second; 0: reading takes no time
    #[arg(long, value_name = "N", default_value_t = 20_000.0, value_parser = rate)]
    pub prefill_tps: f64,
    /// Tokens written per second, by each running request; 0: writing takes no time
    #[arg(long, value_name = "N", default_value_t = 100.0, value_parser = rate)]
    pub decode_tps: f64,
    /// Requests worked on at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub slots: u32,
    /// Requests that may wait for a slot; one more is answered 503
    #[arg(long, value_name = "N", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub queue: u32,
    /// Blocks of key/value memory: running requests and the prefix cache
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    pub kv_blocks: u32,
    /// Tokens in one block
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub block_tokens: u32,
    /// Tokens of an answer that ends by itself (a request's own limit, `min_tokens` and `ignore_eos` are honoured)
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub output_tokens: u32,
    /// Longest prompt and answer together, in tokens; more is answered 400
    #[arg(long, value_name = "N", default_value_t = 131_072, value_parser = clap::value_parser!(u32).range(2..=268_435_456))]
    pub context_tokens: u32,
    /// Close connections that are idle for so long, as real engines do; 0: never
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub keepalive_ms: u64,
    /// A fault to show; repeatable; see below
    #[arg(long, value_name = "SPEC")]
    pub fault: Vec<String>,
    /// Seed of everything random; engines of the same seed answer alike
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// What `ringway engine --help` says after the flags: its endpoints, and the faults it can be told to show.
pub const ENGINE_HELP: &str = "\
Examples:
  ringway engine --listen 127.0.0.1:8001
  ringway engine --listen 127.0.0.1:0 --model small --model large --slots 4 --decode-tps 50
  ringway engine --listen 127.0.0.1:8002 --fault status:code=503,retry_after_s=1,probability=0.1

Endpoints: POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/messages,
/v1/messages/count_tokens, /rerank, /tokenize, /generate (SGLang's), /inference/v1/generate (vLLM's); GET /v1/models,
/health, /metrics (vLLM's names), /version; GET /stats (what the engine counted, JSON), GET, POST, DELETE /fault.

Faults: --fault KIND[:key=value,...] at start (repeatable), the request header `X-Engine-Fault: KIND[:...]` for one request,
or while running POST /fault {\"kind\":...,\"key\":...} to arm, GET /fault to list, DELETE /fault to clear.

  refuse        the listener is closed, connects are refused; ms=N: opened again after N ms (default: until cleared)
  hang          the request is read and never answered
  die           the answer ends midway: after_events=N events of a stream (default 1), or half of a plain answer;
                reset=true: by RST instead of FIN
  status        answered with code=N (default 503); retry_after_s=N: with a Retry-After header
  slow-read     the body is read at bytes_per_s=N (default 1000)
  close-after   the connection is closed after the answer without saying so; ms=N: after N ms idle (default 0)
  reset         the request is read, then the connection is reset without an answer
  slow-head     half of the answer's head is sent, the rest ms=N later (default 1000)

Any kind but refuse: count=N times, then no more; probability=P (0 to 1) of each request; path=/P: requests to that path only
(default: every POST to an API endpoint; health checks and /stats stay well unless named).";

/// A rate in tokens per second; 0: no limit.
fn rate(text: &str) -> Result<f64, String> {
    text.parse::<f64>()
        .ok()
        .filter(|rate| rate.is_finite() && *rate >= 0.0 && *rate <= 1e9)
        .ok_or_else(|| "expected a number from 0 to 1000000000".to_owned())
}
