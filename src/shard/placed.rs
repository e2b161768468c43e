//! A request of an untrusted caller on its server: what its answer's head says of the way it went, and who hears of its progress.

use super::asked::Asked;
use super::client::Client;
use super::held::Held;
use super::relay::{Errand, outcome};
use super::reply::{self, Known};
use super::session::Desk;
use crate::clock::Nanos;
use crate::proto::classify::{Api, affinity};
use crate::proto::dispatcher::Placement;
use crate::proto::http1::Contract;
use crate::proto::ids::BackendId;

/// See the module's text.
pub struct Placed<'a> {
    pub held: Held,
    pub placement: Placement,
    pub asked: Asked,
    pub known: &'a Known,
    pub api: Api,
    pub dispatched: Nanos,
}

impl Errand for Placed<'_> {
    const CONTRACT: Contract = Contract::OpenAi;

    fn backend(&self) -> BackendId {
        self.placement.backend
    }

    fn between_bytes_timeout_ms(&self, client: &Client) -> u64 {
        client.shard.limits.between_bytes_timeout_ms
    }

    fn api(&self) -> Option<Api> {
        Some(self.api)
    }

    fn begin(&mut self, client: &Client, desk: &mut Desk, rx: &[u8]) {
        let shard = &client.shard;
        if self.asked.measured {
            self.held.answered(desk.reply.status, desk.reply.is_event_stream, self.asked.reads_to_head);
        }
        if self.known.affinity.is_some() {
            desk.reply.claim(rx, affinity::FIELD);
        }
        let group = self.asked.group;
        reply::push_lines(&mut desk.lines, &shard.faces.borrow(), group, &self.placement, self.known);
        if self.asked.wants_usage(&shard.catalog.borrow()) && desk.reply.content_encoding.is_none() {
            self.held.listen(self.asked, desk.prompt.blocks.len(), self.api);
            self.held.hear(&rx[desk.reply.head_len..]);
        }
    }

    fn accept(&mut self, client: &Client, desk: &Desk) {
        if desk.reply.status >= 400
            && let Some(belief) = self.held.belief
        {
            // It was not computed.
            client.shard.unsent(self.dispatched, self.backend(), &desk.prompt.blocks, belief.matched);
        }
    }

    fn hear(&mut self, piece: &[u8]) {
        self.held.hear(piece);
    }

    fn output(&mut self) {
        self.held.prefilled();
    }

    fn done(self, status: u16) {
        self.held.done(outcome(status));
    }
}
