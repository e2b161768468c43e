//! The process's own log: lines on stderr, as text or JSON.
//!
//! *Invariant*: only the control thread and the start-up write to it, never a shard; stdout belongs to the lines that
//! scripts read.
//! *Errors*: none; a log that cannot be written is dropped by the writer.

use tracing::level_filters::LevelFilter;

use crate::proto::config::{Log, LogFormat, LogLevel};

/// Sets up the log for the process. Calls after the first change nothing.
pub fn init(settings: &Log) {
    let level = match settings.level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let builder =
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level).with_target(false);
    // A second subscriber is refused: the first one, whoever set it, stays.
    let _ = match settings.format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
