//! `lb-config.json`: which algorithm routes a model, which others a request may ask for, and their settings.
//!
//! The file is an allow-list. A request that asks for nothing gets what its model's entry says, or the default; one that asks for an
//! algorithm gets an entry that the file has for it, or is refused. An entry is used whole. Without a file everything may be asked
//! for, with defaults.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `method` | algorithms, comparators and weights by name |
//! | `field` | the fields: who accepts which, in a file and in an expression |
//! | `entry` | one algorithm with all its settings |
//! | `effective` | an entry as a log line shows it |
//! | `json`, `read` | the text, and every fault in it |
//! | `pool` | the same settings in a pool of the router's own configuration |
//!
//! *Invariant*: every [`EntryId`] that [`LbConfig::resolve`] gives names an entry of the method that was asked for.
//! *Bound and cost*: parsing is linear in the file, once at start. Resolving hashes the model id once, and that only where the file has
//! models; it allocates nothing.
//! *Errors*: [`Faults`]: every fault at once, as path, value, what was expected; a fault of JSON's own syntax by line and column.
//! *Source*: the Stargate rules, section 1.

mod effective;
mod entry;
pub(super) mod field;
mod json;
mod method;
mod pool;
mod read;

use std::collections::HashMap;

pub use entry::{Entry, MethodSettings, PowerOfN, Pulsar, WaitAndWiden, Widen};
pub use method::{Comparator, Method, RendezvousWeight};
pub(super) use pool::{read_settings, write_settings};

use super::fault::Faults;

/// Names one entry of a loaded file: what load balancers remember is private to a target and an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(u32);

impl EntryId {
    /// Below [`LbConfig::entry_count`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A checked file.
#[derive(Clone, Debug, PartialEq)]
pub struct LbConfig {
    /// By [`EntryId`].
    entries: Vec<Entry>,
    default: Set,
    /// By exact model id.
    models: HashMap<Box<[u8]>, Set>,
}

/// What routes a model, or all models without a set of their own.
#[derive(Clone, Debug, PartialEq)]
struct Set {
    configured: EntryId,
    allowed: Allowed,
}

/// By [`Method`]: the entry for requests that ask for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Allowed([Option<EntryId>; Method::ALL.len()]);

impl LbConfig {
    /// Without a file: power-of-n, and every other algorithm for those who ask, all with defaults.
    pub fn permissive() -> LbConfig {
        let id = |method: Method| EntryId(method as u32);
        LbConfig {
            entries: Method::ALL.map(Entry::new).into(),
            default: Set {
                configured: id(Method::PowerOfN),
                allowed: Allowed(Method::ALL.map(|method| Some(id(method)))),
            },
            models: HashMap::new(),
        }
    }

    /// Reads a file's text.
    pub fn parse(json: &[u8]) -> Result<LbConfig, Faults> {
        let json = json::Json::parse(json).map_err(|fault| Faults(vec![fault]))?;
        read::read(&json)
    }

    /// The name of the algorithm of models without an entry.
    pub fn default_name(&self) -> &'static str {
        self.entry(self.default.configured).method().name()
    }

    /// How many models have an entry.
    pub fn model_overrides(&self) -> usize {
        self.models.len()
    }

    /// How many entries there are: ids run from 0.
    pub fn entry_count(&self) -> usize {
        self.entries.len()
    }

    pub fn entry(&self, id: EntryId) -> &Entry {
        &self.entries[id.index()]
    }

    /// The entry that routes a request for `model` that asks for `requested`, or for nothing. `None`: that algorithm is not available
    /// to the model.
    pub fn resolve(&self, model: &[u8], requested: Option<Method>) -> Option<EntryId> {
        let own = if self.models.is_empty() { None } else { self.models.get(model) };
        let set = own.unwrap_or(&self.default);
        match requested {
            None => Some(set.configured),
            // Also where the map beside it has another entry for the same method.
            Some(method) if self.entry(set.configured).method() == method => Some(set.configured),
            Some(method) => {
                let index = method as usize;
                set.allowed.0[index].or(self.default.allowed.0[index])
            }
        }
    }
}

#[cfg(test)]
mod tests;
