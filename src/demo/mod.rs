//! (being written)
pub mod client;
