//! One client connection, from accept to close: the request's walk through the rooms, in [`exchange`].
//!
//! *Invariants*: a request is answered once, by an engine or by a rejection, or its client has gone. A permit taken is
//! given back on every way out. Nothing of a request reaches a server before its head was found beyond doubt.
//! *Bound*: an idle connection holds no buffer and no large future: it waits for readability. What a request needs is
//! boxed while the connection is busy and for [`REST_AFTER_MS`] after.
//! *Source*: RFC 9112 sections 9.3 (persistence), 9.3.2 (pipelining), 9.6 (tear-down); RFC 9110 section 10.1.1 (Expect).

use std::rc::Rc;

use super::asked::{Asked, Unroutable};
use super::client::{Client, End};
use super::deadline::{Action, Timer};
use super::forward;
use super::intake::{self, Intake, Stop};
use super::lazy_write::{LazyWrite, NUDGE_MS};
use super::reply::{self, Known};
use super::socket::Socket;
use super::stargate;
use super::state::Shard;
use crate::proto::classify::{Api, Endpoint, Prompt};
use crate::proto::config::Profile;
use crate::proto::error::Rejection;
use crate::proto::http1::{Framing, HeadScan, Method, Parse, RequestHead, ResponseHead, parse_request};
use crate::proto::message::Phase;

/// How long a connection stays ready for its next request, buffer in hand, before it is put to rest.
const REST_AFTER_MS: u64 = 1_000;
/// About what a busy connection's box and its parts take.
const BUSY_BYTES: usize = 5120;
/// How long a refused client may pause in what it still sends, and how long it may go on sending, before it is cut off:
/// meanwhile it can read its answer.
const LINGERING_CLOSE_MS: u64 = 2_000;
const LINGERING_CLOSE_MS_MAX: u64 = 30_000;

/// Scratch of a busy connection, reused from request to request.
#[derive(Default)]
pub struct Desk {
    pub head: RequestHead,
    pub reply: ResponseHead,
    /// A chunked body's content, as far as it is in hand.
    pub body: Vec<u8>,
    /// Lines that the router adds to an answer.
    pub lines: Vec<u8>,
    /// What was read of the prompt.
    pub prompt: Prompt,
    /// The request on its way to the server.
    pub request: LazyWrite,
}

/// What happens to the connection after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The next request may follow.
    Next,
    /// Nothing came for a while: rest.
    Rest,
    /// Close; the client has all it gets.
    Close,
    /// Close, but let a client that still sends read the answer first.
    LingeringClose,
    /// The client went away before it had its answer.
    Gone,
}

/// Serves one client connection until it ends.
pub async fn serve(shard: Rc<Shard>, socket: Socket, profile: Profile, _open: Open) {
    let mut timer = shard.deadlines.timer();
    loop {
        timer.arm_idle(shard.deadline(shard.limits.keepalive_timeout_ms), socket.fd(), Action::ShutRead);
        if socket.readable().await.is_err() || timer.fired() {
            return;
        }
        shard.read_clock();
        let rested = Box::pin(busy(Client::new(shard.clone(), socket.clone(), profile, timer))).await;
        shard.memory.freed(BUSY_BYTES);
        match rested {
            Some(back) => timer = back,
            None => return,
        }
    }
}

/// Serves requests while they come in quick succession. `None`: the connection is over.
async fn busy(mut client: Client) -> Option<Timer> {
    let mut desk = Desk::default();
    loop {
        let after = exchange(&mut client, &mut desk).await;
        // Whatever it was set for is over; it may be a server's connection, which now is another's.
        client.timer.clear_all();
        if after != After::Next && after != After::Gone {
            let _ = client.settle(client.shard.limits.between_bytes_timeout_ms).await;
        }
        match after {
            After::Next => {}
            After::Rest => return Some(client.rest()),
            After::Close if !client.is_sending() => return None,
            After::Close | After::LingeringClose => {
                lingering_close(&mut client).await;
                return None;
            }
            After::Gone => {
                client.shard.figures.borrow_mut().client_aborts += 1;
                return None;
            }
        }
    }
}

/// One request and its answer.
async fn exchange(client: &mut Client, desk: &mut Desk) -> After {
    let shard = client.shard.clone();
    let mut known = Known::default();
    match read_head(client, desk).await {
        Head::Complete => {}
        Head::Rest => return After::Rest,
        Head::Over => return After::Close,
        Head::Refused(rejection, what) => {
            let _active = Active::new(&shard);
            if client.profile == Profile::Stargate {
                return stargate::answer::refuse_head(client, rejection.row().status).await;
            }
            reply::refuse(client, None, rejection, Some(what), &known, Api::OpenAi, true).await;
            return After::LingeringClose;
        }
    }
    let _active = Active::new(&shard);
    // Answers go out in order: the one before may still be on its way.
    if client.settle(shard.limits.between_bytes_timeout_ms).await.is_err() {
        return After::Gone;
    }
    let arrived = shard.now();
    if shard.active_now() {
        // It has slept for long: what its peers said meanwhile comes first.
        super::hear(&shard);
    }
    if client.profile == Profile::Stargate {
        // On the heap, so that other connections need not carry it.
        return Box::pin(stargate::exchange(client, desk, arrived)).await;
    }
    known.until = shard.deadline(shard.limits.total_timeout_ms);
    client.timer.cap(known.until);
    let path = desk.head.path(client.unread());
    let endpoint = Endpoint::of(matches!(desk.head.method, Method::Get | Method::Head), path);
    let api = endpoint.api(path);
    if let Some(answer) = reply::local(&shard, endpoint) {
        return reply::send_local(client, desk, answer).await;
    }
    let early = match shard.phase.get() >= Phase::Draining {
        true => Err(Rejection::ShuttingDown),
        false if intake::in_hand(client, desk) => Ok(()),
        false => shard.dispatcher.borrow().admissible(arrived, None),
    };
    if let Err(rejection) = early {
        return refuse_unread(client, desk, rejection, None, &known, api).await;
    }
    let mut intake = match Intake::read(client, desk).await {
        Ok(intake) => intake,
        Err(Stop::Gone) => return After::Gone,
        Err(Stop::Refuse(rejection, what)) => {
            return refuse_unread(client, desk, rejection, Some(what), &known, api).await;
        }
    };
    match Asked::read(client, desk, &intake, endpoint, &mut known.affinity) {
        Ok(asked) => {
            known.group = Some(asked.group);
            known.sticky_key = asked.session.map(|session| session.shown);
            forward::forward(client, desk, &mut intake, &asked, &mut known, api).await
        }
        Err(Unroutable { rejection, what, group }) => {
            known.group = group;
            refuse(client, desk, &mut intake, rejection, what.as_deref(), &known, api).await
        }
    }
}

/// What came of waiting for a head.
enum Head {
    Complete,
    Rest,
    Over,
    Refused(Rejection, &'static str),
}

async fn read_head(client: &mut Client, desk: &mut Desk) -> Head {
    let shard = client.shard.clone();
    let limits = shard.head_limits(client.profile);
    let mut scan = HeadScan::default();
    let mut begun = false;
    loop {
        if !client.unread().is_empty() {
            match parse_request(client.unread(), &mut scan, limits, &mut desk.head) {
                Ok(Parse::Complete) => return Head::Complete,
                Ok(Parse::Partial) => {}
                Err(error) => return Head::Refused(error.rejection, error.what),
            }
        }
        if !begun && !client.unread().is_empty() {
            begun = true;
            client.arm_deadline(shard.limits.client_head_timeout_ms, Action::ShutRead);
        } else if !begun {
            if shard.phase.get() >= Phase::Draining {
                return Head::Over;
            }
            let wait_ms = if client.is_writing() { NUDGE_MS } else { REST_AFTER_MS };
            client.arm_idle(shard.deadline(wait_ms), Action::Wake);
        }
        match client.more().await {
            Ok(true) => {}
            Ok(false) if begun => {}
            Ok(false) if client.is_writing() => {
                if client.settle(shard.limits.between_bytes_timeout_ms).await.is_err() {
                    return Head::Over;
                }
            }
            Ok(false) => return Head::Rest,
            Err(End::Deadline) if begun => {
                return Head::Refused(Rejection::RequestTimeout, "the request head did not arrive in time");
            }
            Err(_) => return Head::Over,
        }
        shard.read_clock();
    }
}

/// Refuses a request whose body was not (all) taken in: the connection cannot go on behind it, unless there is none.
async fn refuse_unread(
    client: &mut Client,
    desk: &Desk,
    rejection: Rejection,
    what: Option<&str>,
    known: &Known,
    api: Api,
) -> After {
    let bodiless = intake::in_hand(client, desk) && what.is_none();
    let close = !bodiless || !desk.head.keep_alive || rejection == Rejection::ShuttingDown;
    let here = match desk.head.framing {
        Framing::Length(n) if bodiless => desk.head.head_len + n as usize,
        _ => desk.head.head_len,
    };
    finish_refused(client, desk, here, rejection, what, known, api, close).await
}

/// Refuses a request whose body is in hand, whole or in part.
pub async fn refuse(
    client: &mut Client,
    desk: &Desk,
    intake: &mut Intake,
    rejection: Rejection,
    what: Option<&str>,
    known: &Known,
    api: Api,
) -> After {
    let close = !intake.whole() || intake.torn || !desk.head.keep_alive;
    intake.spend(client, desk);
    finish_refused(client, desk, 0, rejection, what, known, api, close).await
}

#[expect(clippy::too_many_arguments, reason = "one place for what all refusals share")]
async fn finish_refused(
    client: &mut Client,
    desk: &Desk,
    here: usize,
    rejection: Rejection,
    what: Option<&str>,
    known: &Known,
    api: Api,
    close: bool,
) -> After {
    let close = close || client.shard.phase.get() >= Phase::Draining;
    // The limit of the request's whole time is not for its refusal, and no stop cuts what says that the process stops.
    client.timer.clear_all();
    if rejection == Rejection::ShuttingDown {
        client.timer.spare();
    }
    let sent = reply::refuse(client, Some(&desk.head), rejection, what, known, api, close).await;
    match (sent, close) {
        (false, _) => After::Close,
        (true, true) => After::LingeringClose,
        (true, false) => {
            client.consume(here);
            After::Next
        }
    }
}

/// Says that nothing more comes, and reads what the client still sends for a while: closing at once would reset the
/// connection and take the answer with it (RFC 9112 section 9.6). A client that goes on sending is cut off.
async fn lingering_close(client: &mut Client) {
    client.socket.shutdown_write();
    // The process waits for it when it drains: its end would reset the connection as well.
    client.unsettled(1);
    linger(client).await;
    client.unsettled(-1);
}

async fn linger(client: &mut Client) {
    let until = client.shard.now().plus_ms(LINGERING_CLOSE_MS_MAX);
    while client.end().is_none() {
        let unread = client.unread().len();
        client.consume(unread);
        client.arm_deadline(LINGERING_CLOSE_MS, Action::Wake);
        let more = client.more().await;
        if more == Ok(false) || client.shard.now() >= until {
            // An orderly close would leave a client with a full window waiting for room that never comes.
            client.socket.reset_on_close();
            return;
        }
    }
}

/// Counts a connection while it is open, from the accept on.
pub struct Open {
    shard: Rc<Shard>,
}

impl Open {
    pub fn new(shard: &Rc<Shard>) -> Open {
        let mut figures = shard.figures.borrow_mut();
        figures.connections += 1;
        figures.accepted += 1;
        Open { shard: shard.clone() }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shard.figures.borrow_mut().connections -= 1;
    }
}

/// Counts a request while it is active.
struct Active {
    shard: Rc<Shard>,
}

impl Active {
    fn new(shard: &Rc<Shard>) -> Active {
        shard.figures.borrow_mut().active += 1;
        Active { shard: shard.clone() }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let mut figures = self.shard.figures.borrow_mut();
        figures.active -= 1;
        figures.finished += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::proto::backend::catalog::Catalog;
    use crate::proto::classify::caller::CallerRules;
    use crate::proto::dispatcher::{Dispatcher, DispatcherOptions};
    use crate::proto::http1::HeadLimits;
    use crate::proto::ids::ShardId;
    use crate::shard::state::SessionLimits;

    fn limits() -> SessionLimits {
        SessionLimits {
            head: HeadLimits::new(65_536, b"X-Lifeboat-"),
            caller: CallerRules::new("X-Lifeboat-", None),
            prompt_seed: 1,
            affinity_seed: [1; 16],
            body_bytes_max: 1 << 20,
            classify_bytes_max: 1 << 20,
            buffered_bytes_max: 1 << 20,
            connections_max: 1,
            client_head_timeout_ms: 1,
            client_body_idle_timeout_ms: 1,
            half_close_allowed: false,
            connect_timeout_ms: 1,
            response_head_timeout_ms: 1,
            between_bytes_timeout_ms: 1,
            total_timeout_ms: 0,
            keepalive_timeout_ms: 1,
        }
    }

    /// An idle connection is its task and its socket; a busy one has a box besides. Both are what many connections are
    /// multiplied by.
    #[test]
    fn connections_are_small() {
        crate::runtime::block_on(true, async {
            let (mut ports, _control) = crate::mesh::build(1).unwrap();
            let dispatcher = Dispatcher::new(ShardId(0), 1, DispatcherOptions::default(), Catalog::default());
            let port = ports.pop().unwrap();
            let clock = Clock::new();
            let shard = Rc::new(Shard::new(
                ShardId(0),
                1,
                clock,
                limits(),
                "X-Lifeboat-",
                dispatcher,
                port,
                Catalog::default(),
                [Profile::OpenAi].into(),
                None,
            ));
            let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            let socket = Socket::new(ours.into()).unwrap();
            let timer = shard.deadlines.timer();
            let client = Client::new(shard.clone(), socket.clone(), Profile::OpenAi, timer);
            let (idle, busy) = (
                std::mem::size_of_val(&serve(shard.clone(), socket, Profile::OpenAi, Open::new(&shard))),
                std::mem::size_of_val(&busy(client)),
            );
            assert!(idle <= 256 && busy <= BUSY_BYTES, "idle {idle} bytes, busy {busy} bytes");
        })
        .unwrap();
    }
}
