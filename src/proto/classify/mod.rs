//! What a request is: endpoint, model, streamed or not; found without building a tree.
//!
//! [`Endpoint::of`] reads method and path; [`peek`] and [`peek_prefix`] read a JSON body, [`peek_multipart`] a form's, and
//! [`read_prompt`] all that the KV-aware policies want to know of one.
//! None of them ever fails: what cannot be read is simply not known, and the engine, which gets the very bytes, is the
//! one to complain about it.

pub mod affinity;
pub mod body;
pub mod caller;
pub mod decode;
pub mod endpoint;
pub mod multipart;
pub mod prompt;
#[expect(unsafe_code, reason = "vector loads and run-time dispatch; nowhere else in `proto`")]
pub(super) mod simd;
mod walk;

pub use body::{Peek, peek, peek_prefix};
pub use decode::{Decoded, decode};
pub use endpoint::{Api, Endpoint};
pub use multipart::peek_multipart;
pub use prompt::{Prompt, PromptRules, Reading, read_prompt};
