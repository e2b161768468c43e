//! `cargo +nightly fuzz run head`
#![no_main]

#[path = "../invariants.rs"]
#[allow(dead_code, reason = "each target uses its part")]
mod invariants;

libfuzzer_sys::fuzz_target!(|data: &[u8]| invariants::head(data));
