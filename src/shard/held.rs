//! A request's hold on its server: the permit, and the prompt work that is waited for there.
//!
//! *Invariant*: both are given back once, however the request ends.

use std::rc::Rc;

use super::state::Shard;
use crate::proto::dispatcher::{Belief, Outcome};
use crate::proto::ids::BackendId;

/// See the module's text. Dropped without a verdict it says nothing about the server.
pub struct Held {
    shard: Rc<Shard>,
    backend: BackendId,
    open: bool,
    /// In kv-aware pools, what was believed of the prompt …
    pub belief: Option<Belief>,
    /// … whose tokens are still to be computed.
    prefilling: bool,
}

impl Held {
    /// The permit was just taken.
    pub fn new(shard: &Rc<Shard>, backend: BackendId) -> Held {
        Held { shard: shard.clone(), backend, open: true, belief: None, prefilling: false }
    }

    /// The request was counted as prompt work.
    pub fn believe(&mut self, belief: Belief) {
        (self.belief, self.prefilling) = (Some(belief), true);
    }

    /// The server has begun to answer. Doing it again does nothing.
    pub fn prefilled(&mut self) {
        if std::mem::take(&mut self.prefilling)
            && let Some(belief) = self.belief
        {
            self.shard.prefilled(self.backend, belief.work_tokens);
        }
    }

    pub fn done(mut self, outcome: Outcome) {
        self.open = false;
        self.prefilled();
        self.shard.done(self.backend, outcome);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.open {
            self.prefilled();
            self.shard.done(self.backend, Outcome::Neutral);
        }
    }
}
