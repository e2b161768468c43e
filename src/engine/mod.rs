//! A simulated engine: speaks the engines' HTTP APIs, keeps a real prefix cache, takes the time that its rates say, and
//! fails on demand. No model, no GPU. The demo, the black-box tests and measurements run against it.
//!
//! A tour: [`connection`] reads requests, [`session`] sends each to its endpoint, [`prompt`] renders what was asked into
//! tokens, [`scheduler`] says when they are computed and [`prefix_cache`] which need not be, [`generate`] writes the answer
//! through one of the API shapes ([`openai`], [`responses`], [`anthropic`], [`native`]), [`fault`] spoils it on demand, [`metrics`]
//! counts. [`server`] holds it together.
//!
//! *Invariant*: an engine is one thread; engines of one process share nothing.
//! *Errors*: [`EngineError`] when it cannot start; requests get their API's own errors.

pub mod anthropic;
pub mod connection;
pub mod error;
pub mod fault;
pub mod generate;
pub mod metrics;
pub mod native;
pub mod openai;
pub mod prefix_cache;
pub mod prompt;
pub mod responses;
pub mod scheduler;
pub mod server;
pub mod session;
pub mod text;
pub mod wire;

mod handle;

pub use handle::{EngineError, EngineHandle, run, spawn};

use std::net::{Ipv4Addr, SocketAddr};

use crate::cli::EngineArgs;
use fault::Armed;
use scheduler::Rates;

/// What an engine is to be like.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Port 0 binds a free one.
    pub listen: SocketAddr,
    /// Names of the models served; at least one. A request that names none gets the first.
    pub models: Vec<String>,
    pub rates: Rates,
    /// Tokens per block of key/value memory, at least 1.
    pub block_tokens: usize,
    /// Blocks of key/value memory, at least 1.
    pub kv_blocks: usize,
    /// Length of an answer that ends by itself, in tokens, at least 1.
    pub output_tokens: u32,
    /// Prompt and answer together, in tokens, at least 2.
    pub context_tokens_max: usize,
    /// Idle connections are closed after so many milliseconds; 0: never.
    pub keepalive_ms: u64,
    /// Faults from the start.
    pub faults: Vec<Armed>,
    /// Of the answers' text and the faults' dice. Engines of the same seed answer alike.
    pub seed: u64,
}

impl EngineOptions {
    /// What the command line asks for; the error names the flag at fault.
    pub fn from_args(args: &EngineArgs) -> Result<EngineOptions, String> {
        let faults = args
            .fault
            .iter()
            .map(|text| Armed::parse(text).map_err(|fault| format!("--fault {text}: {fault}")));
        Ok(EngineOptions {
            listen: args.listen,
            models: args.model.clone(),
            rates: Rates {
                prefill_tps: args.prefill_tps,
                decode_tps: args.decode_tps,
                slots: args.slots as usize,
                queue_max: args.queue as usize,
            },
            block_tokens: args.block_tokens as usize,
            kv_blocks: args.kv_blocks as usize,
            output_tokens: args.output_tokens,
            context_tokens_max: args.context_tokens as usize,
            keepalive_ms: args.keepalive_ms,
            faults: faults.collect::<Result<_, _>>()?,
            seed: args.seed,
        })
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            models: vec!["simulated".to_owned()],
            rates: Rates { prefill_tps: 20_000.0, decode_tps: 100.0, slots: 8, queue_max: 1024 },
            block_tokens: 16,
            kv_blocks: 65_536,
            output_tokens: 64,
            context_tokens_max: 131_072,
            keepalive_ms: 0,
            faults: Vec::new(),
            seed: 1,
        }
    }
}
