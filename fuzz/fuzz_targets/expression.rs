//! `cargo +nightly fuzz run expression`
#![no_main]

#[path = "../invariants_config.rs"]
#[allow(dead_code, reason = "each target uses its part")]
mod invariants;

libfuzzer_sys::fuzz_target!(|data: &[u8]| invariants::expression(data));
