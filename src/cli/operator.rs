//! Arguments of `ringway status` and `ringway drain`.

use clap::Args;

/// Which router is meant.
#[derive(Args, Clone, Debug)]
pub struct AdminArgs {
    /// The router's admin listener
    #[arg(long, value_name = "ADDR", env = "RINGWAY_ADMIN", default_value = "127.0.0.1:29000")]
    pub admin: String,
}

/// `ringway status`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  ringway status\n  ringway status --json | jq '.pools[].servers[].in_flight'\n\n\
        Exit codes:\n  0  a router answered\n  1  wrong usage, or no answer that could be understood\n  2  no router answers there"
)]
pub struct StatusArgs {
    #[command(flatten)]
    pub admin: AdminArgs,
    /// The state as JSON, as GET /admin/v1/state gives it
    #[arg(long)]
    pub json: bool,
}

/// `ringway drain`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  ringway drain gpu0\n  ringway drain gpu0 --timeout-ms 600000 && systemctl restart vllm\n\n\
        Exit codes:\n  0  nothing runs on the server any more, and nothing new will\n  1  wrong usage, or no such server\n  \
        2  no router answers there\n  3  the time was over while requests still ran; the server gets no new ones"
)]
pub struct DrainArgs {
    /// Server, as it is called in the configuration
    pub name: String,
    #[command(flatten)]
    pub admin: AdminArgs,
    /// How long to wait for its requests to finish [default: the router's limits.drain_timeout_ms]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=86_400_000))]
    pub timeout_ms: Option<u64>,
}
