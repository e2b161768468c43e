//! Everything that is not on a request's path.
#![forbid(unsafe_code)]

pub mod client;
pub mod drain;
pub mod faults;
pub mod figures;
pub mod health;
pub mod metrics;
pub mod models;
pub mod notify;
pub mod resolve;
pub mod runtime;
pub mod signals;
