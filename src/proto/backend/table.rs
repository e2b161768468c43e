//! This shard's replica of every server's load and health.
