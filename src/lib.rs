//! Ringway: a front router for LLM inference engines.
//!
//! A tour in the order a request meets the rooms:
//!
//! * [`shard`]: one pinned thread per core. Accepts, reads, forwards.
//! * [`proto::http1`]: heads and framing, without I/O.
//! * [`proto::classify`]: which endpoint, which model, streamed or not.
//! * [`proto::route`]: which server gets the request, and why.
//! * [`proto::admission`]: permits: how many at once, and who waits.
//! * [`proto::dispatcher`]: one shard's brain, which ties the three above together.
//! * [`mesh`]: what shards tell each other.
//! * [`control`]: health checks, models, admin listener, metrics, signals: all that is not on a request's path.
//! * [`serve`], [`runtime`], [`log`]: what joins them into a process.
//! * [`cli`]: the command line, which ends in [`proto::config::Settings`].
//! * [`operator`]: the commands that talk to a running router.
//! * [`engine`] and [`demo`]: a simulated engine, and the guided first run.
//!
//! *Invariant*: [`proto`], [`limits`] and the `Nanos` type touch no socket, no clock and no thread. They build without
//! the `io` feature.

pub mod clock;
pub mod limits;
pub mod proto;

#[cfg(feature = "io")]
pub mod cli;
#[cfg(feature = "io")]
pub mod control;
#[cfg(feature = "io")]
pub mod demo;
#[cfg(feature = "io")]
pub mod engine;
#[cfg(feature = "io")]
pub mod log;
#[cfg(feature = "io")]
pub mod mesh;
#[cfg(feature = "io")]
pub mod operator;
#[cfg(feature = "io")]
pub mod runtime;
#[cfg(feature = "io")]
pub mod serve;
#[cfg(feature = "io")]
pub mod shard;
