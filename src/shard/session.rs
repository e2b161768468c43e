//! One client connection, from accept to close: the request's walk through the rooms, in [`exchange`].
//!
//! *Invariants*: a request is answered once, by an engine or by a rejection, or its client has gone. A permit taken is
//! given back on every way out. Nothing of a request reaches a server before its head was found beyond doubt.
//! *Bound*: an idle connection holds no buffer and no large future: it waits for readability. What a request needs is
//! boxed while the connection is busy and for [`LINGER_NS`] after.
//! *Source*: RFC 9112 sections 9.3 (persistence), 9.3.2 (pipelining), 9.6 (tear-down); RFC 9110 section 10.1.1 (Expect).

use std::rc::Rc;

use super::client::{Client, End};
use super::deadline::Action;
use super::forward::{self, Forwarded};
use super::intake::{self, Intake};
use super::reply::{self, Known};
use super::socket::Socket;
use super::state::Shard;
use crate::clock::Nanos;
use crate::proto::classify::{Api, Endpoint};
use crate::proto::dispatcher::{Decision, Placement};
use crate::proto::error::Rejection;
use crate::proto::http1::{HeadScan, Method, Parse, RequestHead, ResponseHead, parse_request};
use crate::proto::ids::GroupId;
use crate::proto::message::{Phase, Tried};

/// How long a connection stays ready for its next request, buffer in hand, before it is put to rest.
const LINGER_NS: u64 = 1_000_000_000;
/// How long a refused client may go on sending before the connection is cut: time to read the answer.
const LINGERING_CLOSE_MS: u64 = 2_000;

/// Scratch of a busy connection, reused from request to request.
#[derive(Default)]
pub struct Desk {
    pub head: RequestHead,
    pub reply: ResponseHead,
    /// A chunked body's content, as far as it is in hand.
    pub body: Vec<u8>,
    /// Lines that the router adds to an answer.
    pub lines: Vec<u8>,
}

/// What happens to the connection after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// The next request may follow.
    Next,
    /// Nothing came for a while: rest.
    Rest,
    /// Close; the client has all it gets.
    Close,
    /// Close, but let a client that still sends read the answer first.
    LingeringClose,
}

/// Serves one client connection until it ends.
pub async fn serve(shard: Rc<Shard>, socket: Socket) {
    let _open = Open::new(&shard);
    let mut timer = shard.deadlines.timer();
    loop {
        timer.arm_idle(shard.deadline(shard.limits.keepalive_timeout_ms), socket.fd(), Action::ShutRead);
        if socket.readable().await.is_err() || timer.fired() {
            return;
        }
        shard.read_clock();
        let client = Client::new(shard.clone(), socket.clone(), timer);
        match Box::pin(busy(client)).await {
            Some(client) => timer = client.timer,
            None => return,
        }
    }
}

/// Serves requests while they come in quick succession. `None`: the connection is over.
async fn busy(mut client: Client) -> Option<Rested> {
    let mut desk = Box::<Desk>::default();
    loop {
        match exchange(&mut client, &mut desk).await {
            After::Next => {}
            After::Rest => return Some(client.rest()),
            After::Close => return None,
            After::LingeringClose => {
                lingering_close(&mut client).await;
                return None;
            }
        }
    }
}

pub use super::client::Rested;

/// One request and its answer.
async fn exchange(client: &mut Client, desk: &mut Desk) -> After {
    let shard = client.shard.clone();
    match read_head(client, desk).await {
        HeadRead::Complete => {}
        HeadRead::Rest => return After::Rest,
        HeadRead::Over => return After::Close,
        HeadRead::Refused(rejection, what) => {
            let _active = Active::new(&shard);
            reply::refuse(client, None, rejection, Some(what), &Known::default(), Api::OpenAi, true).await;
            return After::LingeringClose;
        }
    }
    let _active = Active::new(&shard);
    let arrived = shard.read_clock();
    let bytes = client.unread();
    let path = desk.head.path(bytes);
    let reading = matches!(desk.head.method, Method::Get | Method::Head);
    let endpoint = Endpoint::of(reading, path);
    let api = endpoint.api(path);
    let mut known = Known::default();

    if let Some(answer) = reply::local(&shard, endpoint) {
        return reply::send_local(client, desk, answer).await;
    }
    if shard.phase.get() >= Phase::Draining {
        return refused(client, desk, Rejection::ShuttingDown, None, &known, api).await;
    }
    let admissible = shard.dispatcher.borrow().admissible(arrived, None);
    if let Err(rejection) = admissible
        && !intake::in_hand(client, desk)
    {
        return refused(client, desk, rejection, None, &known, api).await;
    }

    let mut intake = match Intake::read(client, desk).await {
        Ok(intake) => intake,
        Err(intake::Stop::Gone) => {
            shard.figures.borrow_mut().client_aborts += 1;
            return After::Close;
        }
        Err(intake::Stop::Refuse(rejection, what)) => {
            reply::refuse(client, Some(&desk.head), rejection, Some(what), &known, api, true).await;
            return After::LingeringClose;
        }
    };

    let complete = if intake.whole() { shard.read_clock() } else { arrived };
    let group = {
        let model = intake.model(client, desk, endpoint);
        shard.dispatcher.borrow().resolve(model.as_deref())
    };
    let group = match group {
        Ok(group) => group,
        Err(rejection) => return intake.refuse(client, desk, rejection, &known, api).await,
    };
    known.group = Some(group);
    match forward::forward(client, desk, &mut intake, group, &mut known, api, complete).await {
        Forwarded::Next => After::Next,
        Forwarded::Close => After::Close,
        Forwarded::LingeringClose => After::LingeringClose,
        Forwarded::ClientGone => {
            shard.figures.borrow_mut().client_aborts += 1;
            After::Close
        }
    }
}
