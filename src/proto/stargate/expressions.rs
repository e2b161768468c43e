//! What routing expressions came to: for each routing key and model the two values built last.
//!
//! While a new expression spreads through the gateways, requests bring the old and the new value by turns, and both must go on with
//! what their load balancers remember. A third value takes the place of the older one; that a request came with the older one does not
//! make it the newer.
//!
//! *Invariant*: values are told apart byte for byte. A value that is not inserted changes nothing. What was dropped is not found again;
//! whoever still holds it may finish with it.
//! *Bound and cost*: [`EXPRESSIONS_MAX`] entries, beyond which the longest idle goes; [`EXPRESSION_IDLE_MS`] without a hit. A hit
//! hashes key and model once, compares at most two values and allocates nothing; every operation is O(1), a sweep O(what it drops).
//! Memory: an entry holds key, model and two values, each at most as long as a request's head.
//! *Errors*: none.
//! *Source*: the Stargate rules, section 3.5.

use std::collections::HashMap;
use std::rc::Rc;

use crate::clock::Nanos;
use crate::limits::{EXPRESSION_IDLE_MS, EXPRESSIONS_MAX};

/// The cache of one shard. `S` is what is built of a value: the entry, and what its load balancer remembers.
pub struct Expressions<S> {
    /// By [`Expressions::key`]; the number of an entry.
    index: HashMap<Rc<[u8]>, u32>,
    /// All entries, and free places.
    entries: Vec<Place<S>>,
    /// Free places of `entries`.
    free: Vec<u32>,
    /// Ends of the list of entries by their last hit; [`NOBODY`] where it is empty.
    newest: u32,
    oldest: u32,
    entries_max: usize,
    /// The key that was asked for last, whose space is used again.
    key: Vec<u8>,
}

/// A place, taken or free.
enum Place<S> {
    Free,
    Taken(Entry<S>),
}

struct Entry<S> {
    key: Rc<[u8]>,
    current: Built<S>,
    previous: Option<Built<S>>,
    last_hit: Nanos,
    /// Its neighbours by last hit, or [`NOBODY`].
    newer: u32,
    older: u32,
}

struct Built<S> {
    value: Box<[u8]>,
    state: Rc<S>,
}

/// No entry has that number.
const NOBODY: u32 = u32::MAX;

/// Whether the routing key and model had an expression before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Build,
    Rebuild,
}

impl Outcome {
    /// As logs and metrics have it.
    pub const fn name(self) -> &'static str {
        match self {
            Outcome::Build => "build",
            Outcome::Rebuild => "rebuild",
        }
    }
}

impl<S> Default for Expressions<S> {
    fn default() -> Self {
        Expressions::with_max(EXPRESSIONS_MAX)
    }
}

impl<S> Expressions<S> {
    /// With room for `entries_max` entries, at least 1.
    pub fn with_max(entries_max: usize) -> Expressions<S> {
        assert!((1..NOBODY as usize).contains(&entries_max));
        Expressions {
            index: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            newest: NOBODY,
            oldest: NOBODY,
            entries_max,
            key: Vec::new(),
        }
    }

    /// What `value` came to. `None`: it is not among the two built last, or has been idle for too long. Only a hit ends idleness.
    pub fn lookup(&mut self, now: Nanos, routing_key: &[u8], model: &[u8], value: &[u8]) -> Option<Rc<S>> {
        self.sweep(now);
        let at = self.find(routing_key, model)?;
        let Entry { current, previous, .. } = self.entry(at);
        let is = |built: &&Built<S>| *built.value == *value;
        let state = Some(current).filter(is).or(previous.as_ref().filter(is))?.state.clone();
        self.renew(at, now);
        Some(state)
    }

    /// Keeps what `value` came to, which [`Expressions::lookup`] has not found.
    pub fn insert(
        &mut self,
        now: Nanos,
        routing_key: &[u8],
        model: &[u8],
        value: &[u8],
        state: Rc<S>,
    ) -> Outcome {
        self.sweep(now);
        let built = Built { value: value.into(), state };
        if let Some(at) = self.find(routing_key, model) {
            let entry = self.entry_mut(at);
            // Else one value would take both places.
            debug_assert!(*entry.current.value != *value);
            debug_assert!(entry.previous.as_ref().is_none_or(|previous| *previous.value != *value));
            entry.previous = Some(std::mem::replace(&mut entry.current, built));
            self.renew(at, now);
            return Outcome::Rebuild;
        }
        if self.len() == self.entries_max {
            self.remove(self.oldest);
        }
        let key: Rc<[u8]> = self.key.as_slice().into();
        let entry = Entry {
            key: key.clone(),
            current: built,
            previous: None,
            last_hit: now,
            newer: NOBODY,
            older: NOBODY,
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.entries[at as usize] = Place::Taken(entry);
                at
            }
            None => {
                self.entries.push(Place::Taken(entry));
                self.entries.len() as u32 - 1
            }
        };
        self.index.insert(key, at);
        self.link_newest(at);
        Outcome::Build
    }

    /// Drops what the routing key and model have: their target is gone.
    pub fn forget(&mut self, routing_key: &[u8], model: &[u8]) {
        if let Some(at) = self.find(routing_key, model) {
            self.remove(at);
        }
    }

    /// Drops what has been idle for [`EXPRESSION_IDLE_MS`].
    pub fn sweep(&mut self, now: Nanos) {
        while self.poll_timeout() <= now {
            self.remove(self.oldest);
        }
    }

    /// When [`Expressions::sweep`] has something to drop; [`Nanos::NEVER`] with no entries.
    pub fn poll_timeout(&self) -> Nanos {
        match self.oldest {
            NOBODY => Nanos::NEVER,
            at => self.entry(at).last_hit.plus_ms(EXPRESSION_IDLE_MS),
        }
    }

    /// Routing keys and models with an expression.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// The entry's number; leaves the key it is under in `self.key`.
    fn find(&mut self, routing_key: &[u8], model: &[u8]) -> Option<u32> {
        self.key.clear();
        // With its length in front, what ends one part and starts the other is beyond doubt.
        self.key.extend_from_slice(&(routing_key.len() as u64).to_le_bytes());
        self.key.extend_from_slice(routing_key);
        self.key.extend_from_slice(model);
        self.index.get(self.key.as_slice()).copied()
    }

    fn entry(&self, at: u32) -> &Entry<S> {
        match &self.entries[at as usize] {
            Place::Taken(entry) => entry,
            Place::Free => unreachable!("neither the index nor the list names a free place"),
        }
    }

    fn entry_mut(&mut self, at: u32) -> &mut Entry<S> {
        match &mut self.entries[at as usize] {
            Place::Taken(entry) => entry,
            Place::Free => unreachable!("neither the index nor the list names a free place"),
        }
    }

    fn renew(&mut self, at: u32, now: Nanos) {
        self.entry_mut(at).last_hit = now;
        if self.newest != at {
            self.unlink(at);
            self.link_newest(at);
        }
    }

    fn remove(&mut self, at: u32) {
        self.unlink(at);
        if let Place::Taken(entry) = std::mem::replace(&mut self.entries[at as usize], Place::Free) {
            self.index.remove(&entry.key);
        }
        self.free.push(at);
    }

    fn unlink(&mut self, at: u32) {
        let (newer, older) = (self.entry(at).newer, self.entry(at).older);
        match newer {
            NOBODY => self.newest = older,
            newer => self.entry_mut(newer).older = older,
        }
        match older {
            NOBODY => self.oldest = newer,
            older => self.entry_mut(older).newer = newer,
        }
    }

    fn link_newest(&mut self, at: u32) {
        let second = std::mem::replace(&mut self.newest, at);
        let entry = self.entry_mut(at);
        (entry.newer, entry.older) = (NOBODY, second);
        match second {
            NOBODY => self.oldest = at,
            second => self.entry_mut(second).newer = at,
        }
    }
}

#[cfg(test)]
mod tests;
