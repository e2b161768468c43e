//! `cargo +nightly fuzz run lb_config`
#![no_main]

#[path = "../invariants_config.rs"]
#[allow(dead_code, reason = "each target uses its part")]
mod invariants;

libfuzzer_sys::fuzz_target!(|data: &[u8]| invariants::lb_config(data));
