//! Takes a request to a server and brings the answer back.
//!
//! *Invariants*: a request is sent again only if no server can have read it: its connection was never made, its kernel
//! took none of its bytes, or an old connection ended in order with none of them acknowledged ([`Upstream::unread`]).
//! After the first byte of an answer nothing is ever sent again. A client that goes takes the server's connection with it.
//! *Bound*: per request one buffer each way; a body that is not in hand streams through one.
//! *Cost*: a small request and its answer are one write and one read each way.

use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use super::asked::Asked;
use super::buffers::{LARGE_BYTES, MEDIUM_BYTES};
use super::client::Client;
use super::deadline::{Action, TimerHandle};
use super::held::Held;
use super::intake::Intake;
use super::lazy_write::{LazyWrite, NUDGE_MS};
use super::relay;
use super::reply::Known;
use super::session::{After, Desk, refuse};
use super::socket::{Outcome as Read, Socket, WriteError};
use super::state::Shard;
use super::upload;
use super::upstream::Upstream;
use crate::clock::Nanos;
use crate::limits::ATTEMPTS_MAX;
use crate::proto::backend::catalog::{Address, Algorithm, Server};
use crate::proto::classify::Api;
use crate::proto::dispatcher::{Decision, Outcome, Placement, Prompted, Wanted};
use crate::proto::error::Rejection;
use crate::proto::http1::{
    Credentials, FieldKind, Framing, HeadLimits, HeadScan, Parse, RequestRewrite, encode_request,
    parse_response,
};
use crate::proto::ids::BackendId;
use crate::proto::message::{Phase, Tried, UpstreamFault};

/// Head and body up to this many bytes go out in one write; copying them is cheaper than a second one.
const ONE_WRITE_BYTES_MAX: usize = 32 * 1024;

/// How one attempt ended.
pub enum Attempt {
    /// A response head is in `rx`, parsed into the desk; `sent`: the request went out whole.
    Answered {
        upstream: Upstream,
        rx: Vec<u8>,
        sent: bool,
    },
    /// Certainly unread by the server: it may be sent again, on a fresh connection.
    Stale,
    /// It never got a connection.
    Unconnected {
        errno: i32,
    },
    Failed {
        fault: UpstreamFault,
        errno: i32,
    },
    /// The client went away.
    ClientGone,
    /// The client's body turned out to be unacceptable while it streamed through.
    Refuse(Rejection, &'static str),
}

/// See the module's text. `asked` says where the request may go.
pub async fn forward(
    client: &mut Client,
    desk: &mut Desk,
    intake: &mut Intake,
    asked: &Asked,
    known: &mut Known,
    api: Api,
) -> After {
    let shard = client.shard.clone();
    let mut tried = Tried::default();
    let mut waited_ns = 0;
    let mut lost = None;
    for _ in 0..ATTEMPTS_MAX {
        let admitted = admit(client, asked, &desk.prompt.blocks, tried, known.until).await;
        if let Ok(Placement { wait_ns: ns, .. }) | Err(Some((_, ns))) = admitted {
            waited_ns += ns;
            known.wait_ns = Some(waited_ns);
            shard.figures.borrow_mut().queue_wait.record(ns);
        }
        let placement = match admitted {
            Ok(placement) => placement,
            Err(Some((rejection, _))) => {
                // Every server it may go to has been tried: that is what the client should hear.
                let lost = lost.filter(|_| rejection == Rejection::NoHealthyServer);
                let (rejection, what) = match &lost {
                    Some(backend) => failure(&shard, *backend, UpstreamFault::Connect),
                    None => (rejection, None),
                };
                let what = if rejection == Rejection::UpstreamTimeout { Some(TOO_LONG.into()) } else { what };
                return refuse(client, desk, intake, rejection, what.as_deref(), known, api).await;
            }
            Err(None) => return After::Gone,
        };
        let backend = placement.backend;
        if lost.take().is_some() {
            again(&shard, backend, known);
        }
        let mut held = Held::new(&shard, backend);
        let arrived = shard.now();
        if asked.algorithm == Algorithm::KvAware {
            let prompt =
                Prompted { client: asked.client, blocks: &desk.prompt.blocks, tokens: asked.prompt_tokens };
            let belief = shard.remember(arrived, asked.group, backend, &prompt);
            let total = prompt.blocks.len() as u32;
            known.prefix_blocks = asked.has_prompt.then_some((belief.matched, total));
            held.believe(belief);
        }
        let mut attempt = attempt(client, desk, intake, backend, true, arrived).await;
        if matches!(attempt, Attempt::Stale) {
            again(&shard, backend, known);
            attempt = self::attempt(client, desk, intake, backend, false, shard.read_clock()).await;
        }
        if !matches!(attempt, Attempt::Answered { .. }) {
            // It may be that of the server's connection, which is gone.
            client.timer.clear();
        }
        match attempt {
            // Cut by us: neither the server's doing nor the client's.
            Attempt::Failed { .. } | Attempt::Unconnected { .. } if shard.phase.get() == Phase::Stopping => {
                drop(held);
                return refuse(client, desk, intake, Rejection::ShuttingDown, None, known, api).await;
            }
            Attempt::Answered { upstream, rx, sent } => {
                let exchange = relay::Exchange::new(held, upstream, placement, *asked, sent, arrived);
                return relay::relay(client, desk, intake, rx, exchange, known, api).await;
            }
            Attempt::Unconnected { errno } => {
                shard.fault(backend, UpstreamFault::Connect, errno);
                held.done(Outcome::Failure);
                if let Some((matched, _)) = known.prefix_blocks {
                    // It never got there.
                    shard.unsent(arrived, backend, &desk.prompt.blocks, matched);
                }
                tried.push(backend);
                lost = Some(backend);
            }
            Attempt::Stale => unreachable!("only a reused connection can be stale"),
            Attempt::Failed { fault: UpstreamFault::HeadTimeout, .. } if shard.now() >= known.until => {
                // The request's own limit: it says nothing about the server.
                drop(held);
                let what = Some(TOO_LONG);
                return refuse(client, desk, intake, Rejection::UpstreamTimeout, what, known, api).await;
            }
            Attempt::Failed { fault, errno } => {
                shard.fault(backend, fault, errno);
                held.done(Outcome::Failure);
                let (rejection, what) = failure(&shard, backend, fault);
                return refuse(client, desk, intake, rejection, what.as_deref(), known, api).await;
            }
            Attempt::ClientGone => return After::Gone,
            Attempt::Refuse(rejection, what) => {
                drop(held);
                return refuse(client, desk, intake, rejection, Some(what), known, api).await;
            }
        }
    }
    let backend = lost.expect("every attempt that comes here lost a server");
    let (rejection, what) = failure(&shard, backend, UpstreamFault::Connect);
    refuse(client, desk, intake, rejection, what.as_deref(), known, api).await
}

const TOO_LONG: &str = "the request took longer than limits.total_timeout_ms";

/// The request is sent again, to `backend`, after a server certainly read nothing of it.
fn again(shard: &Shard, backend: BackendId, known: &mut Known) {
    known.retries += 1;
    shard.figures.borrow_mut().server(backend).retries += 1;
}

/// What the client hears of a server's failure.
pub fn failure(shard: &Shard, backend: BackendId, fault: UpstreamFault) -> (Rejection, Option<String>) {
    let (rejection, what) = match fault {
        UpstreamFault::Connect => (Rejection::UpstreamError, "could not be connected to"),
        UpstreamFault::BeforeHead => (
            Rejection::UpstreamError,
            "closed the connection before it answered; the request was not sent again",
        ),
        UpstreamFault::HeadTimeout => {
            (Rejection::UpstreamTimeout, "did not answer in time (limits.response_head_timeout_ms)")
        }
        UpstreamFault::BadHead => (Rejection::UpstreamError, "answered with something that is not HTTP/1.x"),
        UpstreamFault::Truncated => (Rejection::UpstreamError, "broke off its answer"),
        UpstreamFault::BetweenTimeout => (
            Rejection::UpstreamTimeout,
            "stopped in the middle of its answer (limits.between_bytes_timeout_ms)",
        ),
        UpstreamFault::Status => (Rejection::UpstreamError, "answered with an error"),
    };
    (rejection, Some(format!("server `{}` {what}", shard.catalog.borrow().server(backend).name)))
}

/// Finds the request a server, waiting where the pool says so. `Err(None)`: the client went away meanwhile; else the
/// rejection and how long was waited, in nanoseconds.
async fn admit(
    client: &mut Client,
    asked: &Asked,
    blocks: &[u64],
    tried: Tried,
    until: Nanos,
) -> Result<Placement, Option<(Rejection, u64)>> {
    let shard = client.shard.clone();
    let since = shard.now();
    if since >= until {
        return Err(Some((Rejection::UpstreamTimeout, 0)));
    }
    let wanted = Wanted { tried, session: asked.session.map(|session| session.stable), blocks };
    let decision = shard.dispatcher.borrow_mut().handle_request(since, asked.group, &wanted);
    match decision {
        Decision::Dispatch(placement) => {
            shard.pump();
            Ok(placement)
        }
        Decision::Reject(rejection) => {
            shard.pump();
            Err(Some((rejection, 0)))
        }
        Decision::Wait(ticket) => {
            let mut waiting = std::pin::pin!(shard.wait(ticket));
            shard.pump();
            // Whoever waits for a server is not waited for, but its own time runs.
            client.timer.arm(until, client.socket.fd(), Action::Wake);
            let timer = client.timer.handle();
            let granted = std::future::poll_fn(|cx| match waiting.as_mut().poll(cx) {
                Poll::Ready(result) => Poll::Ready(result),
                Poll::Pending => timer.poll_woken(cx).map(|()| Err(Rejection::UpstreamTimeout)),
            });
            match client.watch(granted).await {
                Ok(Ok(placement)) => Ok(placement),
                Ok(Err(rejection)) => Err(Some((rejection, shard.now().since(since)))),
                Err(_) => Err(None),
            }
        }
    }
}

/// Sends the request to one server and waits for the head of its answer. `since` is when its turn came: up to the sending
/// counts as the router's own time.
async fn attempt(
    client: &mut Client,
    desk: &mut Desk,
    intake: &mut Intake,
    backend: BackendId,
    may_reuse: bool,
    since: Nanos,
) -> Attempt {
    let shard = client.shard.clone();
    let catalog = shard.catalog();
    let server = catalog.server(backend);
    // The client has done its part; what was set for it must not strike while a server is connected to.
    client.timer.clear();
    // A body that streams through cannot be sent twice, so it never goes where the server may just be closing.
    let idle = match may_reuse && intake.whole() {
        true => shard.upstreams.checkout(backend, shard.now()),
        false => None,
    };
    let mut since = since;
    let mut upstream = match idle {
        Some(upstream) => upstream,
        None => {
            let generation = shard.upstreams.generation(backend);
            match client.watch(Box::pin(connect(&shard, server))).await {
                Ok(Ok(socket)) => {
                    // Waiting for the network is not the router's own time.
                    since = shard.read_clock();
                    Upstream::fresh(socket, generation)
                }
                Ok(Err(error)) => return Attempt::Unconnected { errno: error.raw_os_error().unwrap_or(0) },
                Err(_) => return Attempt::ClientGone,
            }
        }
    };
    let (tx, tail) = compose(client, desk, intake, backend, server);
    let sending = shard.read_clock();
    shard.figures.borrow_mut().overhead.record(sending.since(since));
    if !intake.whole() {
        intake.spend(client, desk);
        // Rare and large: on the heap, so that every other request need not carry it.
        return Box::pin(upload::stream(client, desk, intake, upstream, tx)).await;
    }
    upstream.sent_now = (tx.len() + tail.len()) as u64;
    let deadline =
        (shard.deadline(shard.limits.response_head_timeout_ms), upstream.socket.fd(), Action::ShutBoth);
    let rx = shard.buffers.take(MEDIUM_BYTES);
    let lent = tail.clone();
    let both = match tail.is_empty() {
        true => {
            let timer = client.timer.handle();
            let read = upstream.socket.read_more(rx);
            client
                .watch(lazy_both(&mut desk.request, &upstream.socket, tx, read, timer, deadline, shard.now()))
                .await
        }
        false => {
            client.timer.arm(deadline.0, deadline.1, deadline.2);
            let (inbox, used) = client.lend();
            let range = used + tail.start..used + tail.end;
            let write = write_two(upstream.socket.clone(), tx, inbox, range);
            let done = client.watch(both(write, &upstream.socket, rx, desk, &shard.limits.head)).await;
            done.map(|(write, read)| {
                let write = write.map(|(result, tx, inbox)| {
                    client.restore(inbox, used);
                    (result, tx)
                });
                (write, read)
            })
        }
    };
    let Ok((write, (result, rx))) = both else {
        upstream.socket.shutdown_both();
        return Attempt::ClientGone;
    };
    let (sent, untaken) = match &write {
        Some((result, _)) => {
            (result.is_ok(), result.as_ref().is_err_and(|WriteError { written, .. }| *written == 0))
        }
        None => (false, false),
    };
    match write {
        Some((_, tx)) => shard.buffers.give(tx),
        // The answer came before the request was through, and what was being written is gone with the write.
        None if !lent.is_empty() => intake.lose(),
        None => {}
    }
    match result {
        Ok(n) if n > 0 => await_head(client, desk, upstream, rx, sent).await,
        _ if client.timer.fired() => Attempt::Failed { fault: UpstreamFault::HeadTimeout, errno: 0 },
        result => {
            let orderly = result.is_ok();
            shard.buffers.give(rx);
            match upstream.reused && untaken || orderly && upstream.unread().await {
                true => Attempt::Stale,
                false => Attempt::Failed { fault: UpstreamFault::BeforeHead, errno: errno(&result) },
            }
        }
    }
}

pub fn errno<T>(result: &io::Result<T>) -> i32 {
    result.as_ref().err().and_then(io::Error::raw_os_error).unwrap_or(0)
}

/// What is written first, and which part of the client's inbox (counted from its unread part) is written behind it.
fn compose(
    client: &Client,
    desk: &Desk,
    intake: &Intake,
    backend: BackendId,
    server: &Server,
) -> (Vec<u8>, std::ops::Range<usize>) {
    let bytes = client.unread();
    let body = intake.bytes(client, desk);
    let head_len = desk.head.head_len;
    let copied =
        !intake.whole() || intake.framing == Framing::Chunked || head_len + body.len() <= ONE_WRITE_BYTES_MAX;
    let room = head_len + 512 + if copied { body.len() + 32 } else { 0 };
    let mut tx = client.shard.buffers.take(room);
    let faces = client.shard.faces();
    let own_key = faces.credentials[backend.index()].as_ref();
    let rewrite = RequestRewrite {
        base_path: server.base_path.as_bytes(),
        host: server.host.as_bytes(),
        framing: intake.framing,
        credentials: match own_key {
            None => Credentials::Keep,
            // The usual field always; Anthropic's too where the caller used it, as engines differ in what they check.
            Some(key) => Credentials::Replace {
                authorization: Some(&key.bearer),
                x_api_key: desk.head.first(FieldKind::XApiKey).map(|_| &key.bare[..]),
            },
        },
        ..RequestRewrite::default()
    };
    encode_request(&mut tx, &desk.head, bytes, &rewrite);
    match intake.framing {
        Framing::Chunked => {
            upload::push_chunk(&mut tx, body);
            if intake.whole() {
                upload::push_end(&mut tx, &intake.reader);
            }
            (tx, 0..0)
        }
        _ if copied => {
            tx.extend_from_slice(body);
            (tx, 0..0)
        }
        _ => (tx, head_len..head_len + intake.raw),
    }
}

async fn connect(shard: &Shard, server: &Server) -> io::Result<Socket> {
    let work = async {
        match &server.address {
            Some(Address::Tcp(address)) => Socket::connect_tcp(*address).await,
            Some(Address::Unix(path)) => Socket::connect_unix(path).await,
            None => Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH)),
        }
    };
    match shard.limits.connect_timeout_ms {
        0 => work.await,
        ms => match monoio::time::timeout(Duration::from_millis(ms), work).await {
            Ok(result) => result,
            Err(_) => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
        },
    }
}

async fn write_two(
    socket: Socket,
    first: Vec<u8>,
    second: Vec<u8>,
    range: std::ops::Range<usize>,
) -> (Result<(), WriteError>, Vec<u8>, Vec<u8>) {
    let (result, first) = socket.write_all(first).await;
    if result.is_err() {
        return (result, first, second);
    }
    let (result, second) = socket.write(second, range).await;
    let written = first.len();
    (result.map_err(|e| WriteError { written: written + e.written, ..e }), first, second)
}

/// Writes and reads at once: both are submitted together. Ends with the read; if that brought nothing, then only after
/// the write has ended too, so that what it held comes back. Interim answers do not end it.
async fn both<W>(
    write: impl Future<Output = W>,
    socket: &Socket,
    rx: Vec<u8>,
    desk: &mut Desk,
    limits: &HeadLimits,
) -> (Option<W>, Read<usize>) {
    let (mut write, mut read) = (pin!(write), pin!(socket.read_more(rx)));
    let (mut written, mut got) = (None, None);
    std::future::poll_fn(|cx| {
        if written.is_none()
            && let Poll::Ready(result) = write.as_mut().poll(cx)
        {
            written = Some(result);
        }
        while got.is_none()
            && let Poll::Ready((result, mut rx)) = read.as_mut().poll(cx)
        {
            match result {
                Ok(n) if n > 0 && written.is_none() && only_interim(&mut rx, desk, limits) => {
                    read.set(socket.read_more(rx));
                }
                result => got = Some((result, rx)),
            }
        }
        match &got {
            Some((Ok(n), _)) if *n > 0 => Poll::Ready(()),
            Some(_) if written.is_some() => Poll::Ready(()),
            _ => Poll::Pending,
        }
    })
    .await;
    (written, got.expect("it ends with the read"))
}

/// Takes interim answers (1xx) off the front of `rx`. True: nothing else has come yet, so the answer has not begun.
pub fn only_interim(rx: &mut Vec<u8>, desk: &mut Desk, limits: &HeadLimits) -> bool {
    loop {
        let mut scan = HeadScan::default();
        match parse_response(rx, &mut scan, limits, desk.head.method, &mut desk.reply) {
            Ok(Parse::Complete) if desk.reply.is_interim() => drop(rx.drain(..desk.reply.head_len)),
            // `HTTP/1.1 1`: the first digit tells.
            Ok(Parse::Partial) => {
                return rx.len() < rx.capacity() && rx.get(9).is_none_or(|digit| *digit == b'1');
            }
            _ => return false,
        }
    }
}

/// As [`both`], for a request that fits the socket's buffer for certain, or nearly so: nobody waits for the write unless it
/// is not through after [`NUDGE_MS`]. From then on `deadline` is in force.
async fn lazy_both(
    write: &mut LazyWrite,
    socket: &Socket,
    tx: Vec<u8>,
    read: impl Future<Output = Read<usize>>,
    timer: TimerHandle,
    deadline: (Nanos, RawFd, Action),
    now: Nanos,
) -> (Option<(Result<(), WriteError>, Vec<u8>)>, Read<usize>) {
    let mut read = pin!(read);
    let mut written = write.start(socket, tx, 0);
    let nudge = now.plus_ms(NUDGE_MS);
    let mut eager = written.is_some() || deadline.0 <= nudge;
    match eager {
        true => timer.arm(deadline.0, deadline.1, deadline.2),
        false => timer.arm(nudge, deadline.1, Action::Wake),
    }
    let mut got = None;
    std::future::poll_fn(|cx| {
        if got.is_none()
            && let Poll::Ready(result) = read.as_mut().poll(cx)
        {
            got = Some(result);
        }
        if !eager && timer.poll_woken(cx).is_ready() {
            eager = true;
            timer.arm(deadline.0, deadline.1, deadline.2);
        }
        if (eager || got.is_some())
            && written.is_none()
            && let Poll::Ready(result) = write.poll(cx)
        {
            written = Some(result);
        }
        match &got {
            Some((Ok(n), _)) if *n > 0 => Poll::Ready(()),
            Some(_) if written.is_some() => Poll::Ready(()),
            _ => Poll::Pending,
        }
    })
    .await;
    if !eager {
        timer.arm(deadline.0, deadline.1, deadline.2);
    }
    if written.is_none() {
        // The answer came first; the connection will not be used again, and the write goes with it.
        *write = LazyWrite::default();
    }
    (written, got.expect("it ends with the read"))
}

/// Parses the head that begins in `rx`, reading on as needed. Interim answers are passed over: the router has answered
/// `Expect` itself, and no other is promised to anybody.
pub async fn await_head(
    client: &mut Client,
    desk: &mut Desk,
    upstream: Upstream,
    mut rx: Vec<u8>,
    sent: bool,
) -> Attempt {
    let shard = client.shard.clone();
    let mut scan = HeadScan::default();
    loop {
        match parse_response(&rx, &mut scan, &shard.limits.head, desk.head.method, &mut desk.reply) {
            Ok(Parse::Complete) if desk.reply.is_interim() => {
                rx.drain(..desk.reply.head_len);
                scan = HeadScan::default();
                continue;
            }
            Ok(Parse::Complete) => {
                shard.read_clock();
                return Attempt::Answered { upstream, rx, sent };
            }
            Ok(Parse::Partial) => {}
            Err(_) => return Attempt::Failed { fault: UpstreamFault::BadHead, errno: 0 },
        }
        if rx.len() == rx.capacity() {
            rx.reserve(LARGE_BYTES);
        }
        let Ok((result, buf)) = client.watch(upstream.socket.read_more(rx)).await else {
            upstream.socket.shutdown_both();
            return Attempt::ClientGone;
        };
        rx = buf;
        match result {
            Ok(n) if n > 0 => {}
            _ if client.timer.fired() => {
                return Attempt::Failed { fault: UpstreamFault::HeadTimeout, errno: 0 };
            }
            result => return Attempt::Failed { fault: UpstreamFault::BeforeHead, errno: errno(&result) },
        }
    }
}
