//! Everything that decides, and nothing that does I/O: no socket, no clock, no thread; randomness comes seeded. No
//! `unsafe` but in the module of vector code, `classify/simd`, and that of one instruction, `prefix_memory/prefetch`.
#![deny(unsafe_code)]

pub mod account;
pub mod admission;
pub mod backend;
pub mod classify;
pub mod config;
pub mod dispatcher;
pub mod error;
pub mod http1;
pub mod ids;
pub mod message;
pub mod report;
pub mod route;
pub mod stargate;
