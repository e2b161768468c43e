//! Finds `model` and `stream` at the top level of a JSON body, lazily.
//!
//! The top-level object is walked from quote to quote ([`super::walk`]): keys are compared, values skipped.
//!
//! *Invariant*: for every body that is a JSON object the result is what a full parser finds. Of a repeated key the last
//! value counts, as it does in the engines' parsers; so the walk goes to the end. Keys inside nested values or strings
//! are never taken.
//! *Bound and cost*: O(bytes), no recursion; no allocation but for a model name with escapes in it.
//! *Errors*: none. Of a body whose top level is no well-formed object nothing is reported: half-read values are not to
//! be trusted. What is nested is not validated; an engine refuses such a body anyway.
//! *Source*: RFC 8259.

use std::borrow::Cow;

use super::walk::{Stop, object, spells};

/// What a body says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peek<'a> {
    /// The requested model, unescaped. `None`: none named, not a string, or not known.
    pub model: Option<Cow<'a, [u8]>>,
    /// Whether the answer shall be streamed. `None`: not said, not a boolean, or not known.
    pub stream: Option<bool>,
    /// The body was read to its end and is whole. Otherwise a part still to come may name another model.
    pub complete: bool,
}

/// Reads a body that is all there. One that breaks off says nothing.
pub fn peek(body: &[u8]) -> Peek<'_> {
    let mut found = Peek::default();
    match walk(body, &mut found) {
        Ok(()) => found,
        Err(_) => Peek::default(),
    }
}

/// Reads the beginning of a body: `complete` says whether it was the whole of it; if not, the rest is assumed to be well
/// formed and to name no other model.
pub fn peek_prefix(body: &[u8]) -> Peek<'_> {
    let mut found = Peek::default();
    match walk(body, &mut found) {
        Ok(()) | Err(Stop::Truncated) => found,
        Err(Stop::Malformed) => Peek::default(),
    }
}

fn walk<'a>(body: &'a [u8], found: &mut Peek<'a>) -> Result<(), Stop> {
    object(body, |walker, key| {
        // What was found for a key before no longer counts, even if its new value is not all there.
        if spells(key, b"model") {
            found.model = None;
            found.model = walker.string_value()?;
        } else if spells(key, b"stream") {
            found.stream = None;
            found.stream = walker.boolean_value()?;
        } else {
            walker.skip_value()?;
        }
        Ok(())
    })?;
    found.complete = true;
    Ok(())
}

#[cfg(test)]
mod tests;
