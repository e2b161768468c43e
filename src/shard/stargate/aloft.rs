//! A request's hold on its flight, from the router's acceptance to its end.
//!
//! *Invariant*: a flight is ended once, however the request ends; a client that leaves ends it, too.

use std::rc::Rc;

use super::super::client::Client;
use super::super::relay::Errand;
use super::super::session::Desk;
use super::super::state::Shard;
use crate::proto::classify::Api;
use crate::proto::http1::Contract;
use crate::proto::ids::BackendId;
use crate::proto::stargate::request::End;
use crate::proto::stargate::target_router::{Flight, TargetRouter};

/// See the module's text. Dropped, it says nothing about its server's rate.
pub struct Aloft {
    pub shard: Rc<Shard>,
    flight: Flight,
    open: bool,
}

impl Aloft {
    /// The router has just accepted it.
    pub fn new(shard: &Rc<Shard>, flight: Flight) -> Aloft {
        Aloft { shard: shard.clone(), flight, open: true }
    }

    /// Lets the router see the flight; what follows from that for others is left for [`Aloft::pump`].
    pub fn with<T>(&mut self, act: impl FnOnce(&mut TargetRouter, &mut Flight) -> T) -> T {
        act(&mut self.shard.trusted().router.borrow_mut(), &mut self.flight)
    }

    pub fn pump(&self) {
        self.shard.trusted().pump(&self.shard.port);
    }

    /// The request is over.
    pub fn end(&mut self, end: End) {
        if std::mem::take(&mut self.open) {
            let now = self.shard.now();
            self.with(|router, flight| router.handle_end(now, flight, end));
            self.pump();
        }
    }
}

impl Drop for Aloft {
    fn drop(&mut self) {
        self.end(End::Other);
    }
}

/// A flight whose server has begun to answer.
pub struct Answered {
    aloft: Aloft,
    backend: BackendId,
    /// The answer has gone to the client, so that its status is what is counted.
    accepted: bool,
    /// The router has not heard of output yet, and is to.
    awaits_output: bool,
}

impl Answered {
    pub fn new(aloft: Aloft, backend: BackendId) -> Answered {
        Answered { aloft, backend, accepted: false, awaits_output: false }
    }
}

impl Errand for Answered {
    const CONTRACT: Contract = Contract::Stargate { tracestate: true };

    fn backend(&self) -> BackendId {
        self.backend
    }

    /// A body may take its time: only its client can end it.
    fn between_bytes_timeout_ms(&self, _client: &Client) -> u64 {
        0
    }

    fn api(&self) -> Option<Api> {
        None
    }

    fn begin(&mut self, client: &Client, desk: &mut Desk, _rx: &[u8]) {
        desk.lines.extend_from_slice(&client.shard.faces.borrow().identities[self.backend.index()]);
        desk.lines.extend_from_slice(b"x-stargate-cluster-id: ");
        self.aloft.with(|router, flight| {
            desk.lines.extend_from_slice(router.cluster_id(flight).as_bytes());
        });
        desk.lines.extend_from_slice(b"\r\n");
    }

    fn accept(&mut self, client: &Client, desk: &Desk) {
        self.accepted = true;
        let (now, reply) = (client.shard.now(), &desk.reply);
        let success = (200..300).contains(&reply.status);
        self.awaits_output = success && reply.is_event_stream;
        self.aloft.with(|router, flight| {
            router.count_finished(flight, reply.status);
            router.handle_head(now, flight);
            if success && !reply.is_event_stream {
                router.handle_output(now, flight);
            }
        });
        self.aloft.pump();
    }

    fn hear(&mut self, _piece: &[u8]) {}

    fn output(&mut self) {
        if std::mem::take(&mut self.awaits_output) {
            let now = self.aloft.shard.now();
            self.aloft.with(|router, flight| router.handle_output(now, flight));
            self.aloft.pump();
        }
    }

    fn done(mut self, status: u16) {
        self.aloft.end(if (200..300).contains(&status) { End::Completed } else { End::Other });
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        if !self.accepted {
            // It turned out to be no answer.
            self.aloft.with(|router, flight| router.count_finished(flight, 502));
        }
    }
}
