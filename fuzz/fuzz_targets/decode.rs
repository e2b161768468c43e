//! `cargo +nightly fuzz run decode`
#![no_main]

#[path = "../invariants_classify.rs"]
#[allow(dead_code, reason = "each target uses its part")]
mod invariants;

libfuzzer_sys::fuzz_target!(|data: &[u8]| invariants::decoding(data));
