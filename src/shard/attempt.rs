//! One attempt: a request to one server, up to the head of its answer.
//!
//! *Invariants*: what is written is written to one server and not taken back: whether it may be sent again is for the caller to
//! decide, from how the attempt ended. Writing and reading are submitted together.
//! *Bound*: one buffer each way.
//! *Cost*: a small request is one write, and one read for its head.

use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use super::buffers::{LARGE_BYTES, MEDIUM_BYTES};
use super::client::Client;
use super::deadline::{Action, TimerHandle};
use super::intake::{Intake, push_chunk};
use super::lazy_write::{LazyWrite, NUDGE_MS};
use super::session::Desk;
use super::socket::{Outcome as Read, Socket, WriteError};
use super::state::Shard;
use super::upload;
use super::upstream::Upstream;
use crate::clock::Nanos;
use crate::proto::backend::catalog::{Address, Server};
use crate::proto::error::Rejection;
use crate::proto::http1::{
    Contract, Credentials, FieldKind, Framing, HeadLimits, HeadScan, Parse, RequestRewrite, encode_request,
    parse_response,
};
use crate::proto::ids::BackendId;
use crate::proto::message::UpstreamFault;

/// Head and body up to this many bytes go out in one write; copying them is cheaper than a second one.
const ONE_WRITE_BYTES_MAX: usize = 32 * 1024;

/// What an attempt is to do.
#[derive(Clone, Copy)]
pub struct Order<'a> {
    pub backend: BackendId,
    /// An idle connection will do; else a fresh one is made.
    pub may_reuse: bool,
    /// When its turn came: up to the sending counts as the router's own time.
    pub since: Nanos,
    pub contract: Contract,
    /// Whole lines for the server, each with its CRLF.
    pub extra_lines: &'a [u8],
    /// 0: no limit.
    pub connect_timeout_ms: u64,
    /// How long the server may take for the head of its answer; 0: no limit.
    pub head_timeout_ms: u64,
    /// That counts from the first byte sent, so that it holds for a body that streams through as well. The limit stays in force
    /// as the timer's cap.
    pub head_from_start: bool,
}

impl Order<'_> {
    /// As untrusted callers' requests are sent.
    pub fn new(shard: &Shard, backend: BackendId, may_reuse: bool, since: Nanos) -> Order<'static> {
        Order {
            backend,
            may_reuse,
            since,
            contract: Contract::OpenAi,
            extra_lines: b"",
            connect_timeout_ms: shard.limits.connect_timeout_ms,
            head_timeout_ms: shard.limits.response_head_timeout_ms,
            head_from_start: false,
        }
    }
}

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
    /// It never got a connection; `replaces`: which would have been in place of those that the server had closed.
    Unconnected {
        errno: i32,
        replaces: bool,
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

/// Sends the request to one server and waits for the head of its answer.
pub async fn attempt(
    client: &mut Client,
    desk: &mut Desk,
    intake: &mut Intake,
    order: &Order<'_>,
) -> Attempt {
    let shard = client.shard.clone();
    let catalog = shard.catalog();
    let backend = order.backend;
    let server = catalog.server(backend);
    // The client has done its part; what was set for it must not strike while a server is connected to.
    client.timer.clear();
    // A body that streams through cannot be sent twice unless it is kept, so it never goes where the server may just be closing.
    let idle = match order.may_reuse && intake.may_meet_a_close() {
        true => shard.upstreams.checkout(backend, shard.now()),
        false => None,
    };
    let mut since = order.since;
    let mut upstream = match idle {
        Some(upstream) => upstream,
        None => {
            let generation = shard.upstreams.generation(backend);
            let replaces = order.may_reuse && shard.upstreams.take_broken(backend);
            match client.watch(Box::pin(connect(server, order.connect_timeout_ms))).await {
                Ok(Ok(socket)) => {
                    // Waiting for the network is not the router's own time.
                    since = shard.read_clock();
                    Upstream::fresh(socket, generation, replaces)
                }
                Ok(Err(error)) => {
                    let errno = error.raw_os_error().unwrap_or(0);
                    return Attempt::Unconnected { errno, replaces };
                }
                Err(_) => return Attempt::ClientGone,
            }
        }
    };
    let (tx, tail) = compose(client, desk, intake, order, server);
    let sending = shard.read_clock();
    shard.figures.borrow_mut().overhead.record(sending.since(since));
    if order.head_from_start {
        client.timer.cap(shard.deadline(order.head_timeout_ms));
    }
    if intake.streams() {
        intake.spend(client, desk);
        // Rare and large: on the heap, so that every other request need not carry it.
        return Box::pin(upload::stream(client, desk, intake, upstream, tx, order.head_timeout_ms)).await;
    }
    upstream.sent_now = (tx.len() + tail.len()) as u64;
    let deadline = (shard.deadline(order.head_timeout_ms), upstream.socket.fd(), Action::ShutBoth);
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
            let done = client
                .watch(both(write, &upstream.socket, rx, desk, shard.head_limits(client.profile)))
                .await;
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
    intake: &mut Intake,
    order: &Order<'_>,
    server: &Server,
) -> (Vec<u8>, std::ops::Range<usize>) {
    let backend = order.backend;
    let bytes = intake.head(client);
    let body = intake.bytes(client, desk);
    let head_len = desk.head.head_len;
    let copied = intake.streams()
        || intake.framing == Framing::Chunked
        || head_len + body.len() <= ONE_WRITE_BYTES_MAX;
    let room = head_len + order.extra_lines.len() + 512 + if copied { body.len() + 32 } else { 0 };
    let mut tx = client.shard.buffers.take(room);
    let faces = client.shard.faces();
    let own_key = faces.credentials[backend.index()].as_ref();
    let rewrite = RequestRewrite {
        contract: order.contract,
        extra_lines: order.extra_lines,
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
        _ if intake.is_kept() => {
            intake.rewind();
            intake.push_kept(&mut tx);
            (tx, 0..0)
        }
        Framing::Chunked => {
            push_chunk(&mut tx, body);
            intake.push_end(&mut tx);
            (tx, 0..0)
        }
        _ if copied => {
            tx.extend_from_slice(body);
            (tx, 0..0)
        }
        _ => (tx, head_len..head_len + intake.raw),
    }
}

async fn connect(server: &Server, timeout_ms: u64) -> io::Result<Socket> {
    let work = async {
        match &server.address {
            Some(Address::Tcp(address)) => Socket::connect_tcp(*address).await,
            Some(Address::Unix(path)) => Socket::connect_unix(path).await,
            None => Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH)),
        }
    };
    match timeout_ms {
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
        match parse_response(
            &rx,
            &mut scan,
            shard.head_limits(client.profile),
            desk.head.method,
            &mut desk.reply,
        ) {
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
