//! One shard's brain: no I/O in it.
