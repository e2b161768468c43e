//! What requests turned out to cost: what engines report about a prompt, how many bytes a token of a model has, and how far the
//! servers' shares of the requests are from their weights.
//!
//! *Invariant*: nothing here holds a byte of an answer back, and nothing here can fail a request.
//! *Bound and cost*: see the modules; no allocation.
//! *Errors*: none. What cannot be read is not known.

pub mod calibration;
pub mod drift;
pub mod usage;

pub use calibration::Calibration;
pub use usage::{Usage, UsageScan};
