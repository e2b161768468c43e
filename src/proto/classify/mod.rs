//! What a request is: endpoint, model, streamed or not; found without building a tree.

pub mod body;
pub mod endpoint;

pub use endpoint::{Api, Endpoint};
