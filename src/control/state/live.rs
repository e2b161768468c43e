//! Changes of servers while the router runs.
//!
//! A change goes into the catalog and out to every shard; requests in flight and in the queue stay what they are. Requests that wait
//! in a group which a server has left may still be placed there.
//!
//! *Invariant*: a change is taken over whole or not at all.
//! *Errors*: [`Faults`], where a change would make more groups than are allowed.
//! *Source*: the configuration reference, admin API.

use std::collections::HashSet;

use tracing::info;

use super::State;
use crate::control::port::Port;
use crate::limits::GROUPS_MAX;
use crate::proto::backend::grouping::TOKEN_LIMITS_MAX;
use crate::proto::config::{Faults, ServerChange};
use crate::proto::ids::BackendId;

impl<P: Port> State<P> {
    /// The server of that name, if it is still configured.
    pub fn find(&self, name: &str) -> Option<BackendId> {
        let found = self.catalog.servers.iter().position(|server| !server.removed && &*server.name == name);
        found.map(|index| BackendId(index as u16))
    }

    /// Names of all servers, to help whoever asked for one that is not there.
    pub fn names(&self) -> Vec<&str> {
        self.catalog.servers.iter().filter(|server| !server.removed).map(|server| &*server.name).collect()
    }

    /// Takes a change over; [`State::publish`] brings it to the shards.
    pub fn change_server(&mut self, id: BackendId, change: &ServerChange) -> Result<(), Faults> {
        self.check_change(id, change)?;
        let server = &mut self.catalog.servers[id.index()];
        let before = server.clone();
        if let Some(weight) = change.weight {
            server.weight = weight;
            server.weight_text = weight.to_string().into();
            if weight > 0.0 {
                server.affinity_weight = weight;
            }
        }
        if let Some(max_concurrency) = change.max_concurrency {
            server.max_concurrency = max_concurrency;
        }
        if let Some(max_input_tokens) = change.max_input_tokens {
            server.max_input_tokens = max_input_tokens;
        }
        if let Some(tier) = &change.routing_tier {
            server.tier = tier.as_str().into();
        }
        if *server != before {
            info!(
                server = %server.name,
                weight = %server.weight_text,
                max_concurrency = server.max_concurrency,
                max_input_tokens = server.max_input_tokens,
                routing_tier = %server.tier,
                "server changed by an operator"
            );
            self.changed = true;
        }
        Ok(())
    }

    fn check_change(&self, id: BackendId, change: &ServerChange) -> Result<(), Faults> {
        let mut faults = Faults::default();
        if let Some(tokens) = change.max_input_tokens {
            let others = self.catalog.servers.iter().enumerate();
            let others = others.filter(|(index, server)| *index != id.index() && !server.removed);
            let limits = others.map(|(_, server)| server.max_input_tokens).chain([tokens]);
            let distinct = limits.filter(|tokens| *tokens > 0).collect::<HashSet<_>>().len();
            if distinct > TOKEN_LIMITS_MAX {
                faults.push(
                    "max_input_tokens",
                    tokens.to_string(),
                    format!("expected at most {TOKEN_LIMITS_MAX} distinct values over all servers"),
                );
            }
        }
        // Groups are never forgotten while the process runs.
        let regroups = change.max_input_tokens.is_some() || change.routing_tier.is_some();
        if regroups && self.catalog.groups.len() >= GROUPS_MAX {
            faults.push(
                "body",
                format!("{} groups", self.catalog.groups.len()),
                format!("expected fewer than {GROUPS_MAX} groups of servers so far; a restart forgets those out of use"),
            );
        }
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }
}
