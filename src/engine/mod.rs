//! (being written)
pub mod error;
pub mod fault;
pub mod prefix_cache;
pub mod prompt;
pub mod scheduler;
pub mod text;
