//! Names of hosts: when each is looked up, and which of its addresses is used.
//!
//! *Invariant*: one question per server is under way at a time; nothing is sent to an address that has not answered a check.
//! *Bound and cost*: one look-up per server and [`RESOLVE_EVERY_MS`], sooner after a failure.
//! *Errors*: a warning when a name ceases to resolve, then debug lines.

use std::net::SocketAddr;

use tracing::{debug, warn};

use super::State;
use crate::clock::Nanos;
use crate::control::port::Port;
use crate::proto::backend::catalog::Address;
use crate::proto::ids::BackendId;

/// How often a name is looked up again, in milliseconds.
pub const RESOLVE_EVERY_MS: u64 = 30_000;
/// How soon after a failed check a name may be looked up again, in milliseconds.
pub const RESOLVE_RETRY_MS: u64 = 1_000;

impl<P: Port> State<P> {
    /// Where to try to reach a server, best first.
    pub fn addresses(&self, id: BackendId) -> Vec<Address> {
        let watched = &self.watched[id.index()];
        match &watched.name {
            Some(_) => watched.resolved.iter().map(|address| Address::Tcp(*address)).collect(),
            None => self.catalog.server(id).address.iter().cloned().collect(),
        }
    }

    /// The name to look up for a server if that is due; a question then counts as asked.
    pub fn take_question(&mut self, id: BackendId, now: Nanos) -> Option<(Box<str>, u16)> {
        let watched = &mut self.watched[id.index()];
        if watched.asked || now < watched.resolve_due {
            return None;
        }
        watched.asked = watched.name.is_some();
        watched.name.clone()
    }

    /// A name's addresses arrived.
    pub fn handle_resolved(&mut self, id: BackendId, now: Nanos, answer: std::io::Result<Vec<SocketAddr>>) {
        let server = &self.catalog.servers[id.index()];
        let watched = &mut self.watched[id.index()];
        watched.asked = false;
        match answer {
            Ok(mut addresses) => {
                watched.resolve_due = now.plus_ms(RESOLVE_EVERY_MS);
                // The address in use stays first while the name still has it: moving a server for nothing would cost
                // its connections.
                if let Some(Address::Tcp(current)) = &server.address
                    && let Some(place) = addresses.iter().position(|address| address == current)
                {
                    addresses[..=place].rotate_right(1);
                }
                if addresses != watched.resolved {
                    debug!(server = %server.name, ?addresses, "name resolved");
                }
                watched.resolved = addresses;
                watched.unresolved_told = false;
            }
            Err(failure) => {
                watched.resolve_due = now.plus_ms(RESOLVE_RETRY_MS);
                // With an old address the checks go on and tell whether it is still right.
                match watched.unresolved_told {
                    false => warn!(server = %server.name, url = %server.url, "name not resolved: {failure}"),
                    true => debug!(server = %server.name, "name not resolved: {failure}"),
                }
                watched.unresolved_told = true;
            }
        }
    }
}
