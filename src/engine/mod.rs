//! (being written)
pub mod prefix_cache;
pub mod scheduler;
pub mod text;
