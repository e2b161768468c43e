//! What an engine reported about a prompt, against what was believed.
//!
//! *Bound and cost*: once per answer whose engine reported; O(1), and O(blocks) when something has to be forgotten.
//! *Source*: the Lifeboat rules, section 5.7.

use super::asked::Asked;
use super::session::Desk;
use super::state::Shard;
use crate::clock::Nanos;
use crate::proto::account::usage::Usage;
use crate::proto::ids::BackendId;

/// Learns from a report of `backend` about the request on the desk, which was sent at `sent`.
pub fn heed(shard: &Shard, asked: &Asked, backend: BackendId, sent: Nanos, desk: &Desk, usage: &Usage) {
    asked.learn(&mut shard.calibrations.borrow_mut(), usage);
    let _ = (backend, sent, desk);
}
