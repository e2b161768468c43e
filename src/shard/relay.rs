//! Brings a server's answer to the client, as it comes.
//!
//! *Invariants*: the body goes on byte for byte. What one read brought goes out in one write, at once: nothing waits for
//! more, and nothing that is there is split. The permit is free and the server's connection back in its pool as soon as
//! the server is done, not when a slow client is. An answer that breaks off never looks whole to the client.
//! *Bound*: one buffer per answer: a client that does not read holds the server back by its window.
//! *Cost*: one read and one write per piece; a small answer is one of each.
//! *Source*: RFC 9112 sections 6.3, 8 (incomplete messages); server-sent events as the WHATWG HTML standard has them.

use super::attempt::errno;
use super::buffers::{LARGE_BYTES, MEDIUM_BYTES};
use super::client::Client;
use super::deadline::Action;
use super::forward::failure;
use super::intake::Intake;
use super::session::{After, Desk};
use super::upstream::{Kind, Upstream};
use crate::clock::Nanos;
use crate::proto::classify::Api;
use crate::proto::dispatcher::Outcome;
use crate::proto::error::Rejection;
use crate::proto::http1::{
    BodyReader, ChunkError, Contract, FieldKind, Framing, LAST_CHUNK, ResponseRewrite, downstream_framing,
    encode_response, push_chunk_header,
};
use crate::proto::ids::BackendId;
use crate::proto::message::{Phase, UpstreamFault};

/// A piece larger than this may not fit the client's socket buffer, so it is waited for; a smaller one is not.
const SMALL_WRITE_BYTES_MAX: usize = 8 * 1024;

/// What of an exchange depends on whose contract the client's listener follows. Dropped before it is done, it says that the
/// request has left its server some other way.
pub trait Errand {
    const CONTRACT: Contract;

    fn backend(&self) -> BackendId;

    /// How long the server may pause in its answer; 0: for as long as it likes.
    fn between_bytes_timeout_ms(&self, client: &Client) -> u64;

    /// In whose shape an event stream that breaks off says so; `None`: it just ends.
    fn api(&self) -> Option<Api>;

    /// The answer's head is on the desk; `rx` begins with it and with what has come of its body. Appends the router's own lines
    /// for the client to the desk's.
    fn begin(&mut self, client: &Client, desk: &mut Desk, rx: &[u8]);

    /// The answer goes to the client.
    fn accept(&mut self, client: &Client, desk: &Desk);

    /// More of the answer has come, as the server framed it.
    fn hear(&mut self, piece: &[u8]);

    /// Some of the body has come; may be called again.
    fn output(&mut self);

    /// The server has said all it has to say.
    fn done(self, status: u16);
}

/// One request on its server, from the head of the answer on.
pub struct Exchange<E> {
    errand: Option<E>,
    upstream: Option<Upstream>,
    backend: BackendId,
    /// The request went out whole.
    sent: bool,
    dispatched: Nanos,
}

impl<E: Errand> Exchange<E> {
    pub fn new(errand: E, upstream: Upstream, sent: bool, dispatched: Nanos) -> Exchange<E> {
        let backend = errand.backend();
        Exchange { errand: Some(errand), upstream: Some(upstream), backend, sent, dispatched }
    }

    /// The server has said all it has to say: it may have its next request.
    fn server_done(&mut self, client: &Client, desk: &Desk, surplus: bool) {
        let shard = &client.shard;
        if let Some(errand) = self.errand.take() {
            errand.done(desk.reply.status);
        }
        let upstream = self.upstream.take().expect("the server is done once");
        if self.sent && desk.reply.keep_alive && !surplus {
            let kind = if desk.reply.is_event_stream { Kind::Stream } else { Kind::Plain };
            shard.upstreams.checkin(self.backend, upstream, kind, shard.now());
        }
    }

    fn upstream(&self) -> &Upstream {
        self.upstream.as_ref().expect("still reading from the server")
    }

    fn errand(&mut self) -> &mut E {
        self.errand.as_mut().expect("still reading from the server")
    }
}

/// What an answer's status says of its server.
pub fn outcome(status: u16) -> Outcome {
    match status {
        502..=504 => Outcome::Failure,
        400..=499 => Outcome::Neutral,
        _ => Outcome::Success,
    }
}

/// How the body goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// As it came.
    Verbatim,
    /// Without the server's framing, in chunks of our own.
    Chunks,
    /// Without framing, until the connection closes.
    Plain,
}

/// Appends what `input` holds of the body to `out`. Returns how much of the input was the body's, and whether it is complete.
fn pass(
    reader: &mut BodyReader,
    mode: Mode,
    input: &[u8],
    prefix: &[u8],
    out: &mut Vec<u8>,
) -> Result<(usize, bool), ChunkError> {
    if mode == Mode::Verbatim {
        let advance = reader.advance(input)?;
        out.extend_from_slice(&input[..advance.forward]);
        if advance.done {
            reader.push_tail(out, prefix);
        }
        return Ok((advance.consumed, advance.done));
    }
    let mut at = 0;
    while at < input.len() && !reader.is_done() {
        let decoded = reader.decode(&input[at..])?;
        let data = &input[at..][decoded.data];
        if mode == Mode::Chunks && !data.is_empty() {
            push_chunk_header(out, data.len());
            out.extend_from_slice(data);
            out.extend_from_slice(b"\r\n");
        } else {
            out.extend_from_slice(data);
        }
        at += decoded.consumed;
    }
    Ok((at, reader.is_done()))
}

/// See the module's text. `rx` begins with the head of the answer, which is parsed into the desk. An error: the answer is no
/// HTTP, and nothing of it has gone to the client.
pub async fn relay<E: Errand>(
    client: &mut Client,
    desk: &mut Desk,
    intake: &mut Intake,
    mut rx: Vec<u8>,
    mut exchange: Exchange<E>,
) -> Result<After, UpstreamFault> {
    let shard = client.shard.clone();
    let backend = exchange.backend;
    let (api, between_ms) = (exchange.errand().api(), exchange.errand().between_bytes_timeout_ms(client));
    let minor = desk.head.minor;
    let framing = downstream_framing(&desk.reply, minor);
    let mode = match framing {
        same if same == desk.reply.framing => Mode::Verbatim,
        Framing::Chunked => Mode::Chunks,
        _ => Mode::Plain,
    };
    let keep_alive = desk.head.keep_alive
        && exchange.sent
        && intake.whole()
        && !intake.torn
        && framing != Framing::UntilClose
        && client.end().is_none()
        && shard.phase.get() < Phase::Draining;
    desk.lines.clear();
    exchange.errand().begin(client, desk, &rx);
    let first = &rx[desk.reply.head_len..];
    let mut out = shard.buffers.take(MEDIUM_BYTES);
    let rewrite = ResponseRewrite { framing, keep_alive, client_minor: minor, contract: E::CONTRACT };
    encode_response(&mut out, &desk.reply, &rx, &desk.lines, &rewrite);
    let mut reader = BodyReader::new(desk.reply.framing);
    let prefix = &shard.head_limits(client.profile).router_prefix;
    let mut taken = match pass(&mut reader, mode, first, prefix, &mut out) {
        Ok((taken, _)) => taken,
        Err(_) => {
            // Nothing has gone to the client yet, so it can still hear of it.
            exchange.upstream().socket.shutdown_both();
            shard.fault(backend, UpstreamFault::Truncated, 0);
            return Err(UpstreamFault::Truncated);
        }
    };
    {
        let mut figures = shard.figures.borrow_mut();
        figures.answered(backend, desk.reply.status);
    }
    if outcome(desk.reply.status) == Outcome::Failure {
        shard.fault(backend, UpstreamFault::Status, 0);
    }
    exchange.errand().accept(client, desk);
    // Nothing of the request is needed any more: it will not be sent again.
    intake.finish(client, desk);
    // Until the first event has come.
    let mut first_token = desk.reply.is_event_stream.then_some(exchange.dispatched);
    let mut surplus = taken < first.len();
    let mut done = reader.is_done();
    let mut between_events = first.is_empty() || ends_event(&out, mode);
    if let Some(upstream) = &mut exchange.upstream {
        upstream.idle_ns_named = idle_ns_named(desk, &rx);
    }
    let mut bulk = rx.len() == rx.capacity();
    loop {
        if taken > 0
            && let Some(errand) = &mut exchange.errand
        {
            errand.output();
        }
        if taken > 0
            && let Some(dispatched) = first_token.take()
        {
            shard.figures.borrow_mut().first_token.record(shard.read_clock().since(dispatched));
        }
        if done {
            exchange.server_done(client, desk, surplus);
        }
        // The piece before this one is through by now, or has to be waited for: a slow client holds the server back here.
        if client.settle(shard.limits.between_bytes_timeout_ms).await.is_err() {
            if let Some(upstream) = &exchange.upstream {
                upstream.socket.shutdown_both();
            }
            return Ok(After::Gone);
        }
        let small = out.len() <= SMALL_WRITE_BYTES_MAX;
        match desk.reply.is_event_stream {
            _ if out.is_empty() => {}
            true => client.begin_write_now(out),
            false => client.begin_write(out),
        }
        if !small && client.settle(shard.limits.between_bytes_timeout_ms).await.is_err() {
            if let Some(upstream) = &exchange.upstream {
                upstream.socket.shutdown_both();
            }
            return Ok(After::Gone);
        }
        if done {
            break;
        }
        // The answer fills whole buffers: it is bulk, and larger ones cost fewer turns.
        if bulk && rx.capacity() < LARGE_BYTES {
            shard.buffers.give(std::mem::replace(&mut rx, shard.buffers.take(LARGE_BYTES)));
        }
        rx.clear();
        let deadline = (shard.deadline(between_ms), exchange.upstream().socket.fd(), Action::ShutBoth);
        let read = exchange.upstream().socket.read_more(rx);
        let Ok((result, buf)) = client.watch_writing(deadline, read).await else {
            exchange.upstream().socket.shutdown_both();
            return Ok(After::Gone);
        };
        out = shard.buffers.take(buf.capacity());
        rx = buf;
        bulk = rx.len() == rx.capacity();
        taken = 0;
        exchange.errand().hear(&rx);
        let ended = match &result {
            Ok(n) if *n > 0 => match pass_whole(&mut reader, mode, &mut rx, prefix, &mut out) {
                Ok(bytes) => {
                    taken = bytes;
                    None
                }
                Err(_) => Some(UpstreamFault::Truncated),
            },
            Ok(_) if reader.may_end() && !client.timer.fired() && shard.phase.get() < Phase::Stopping => {
                if mode == Mode::Chunks {
                    out.extend_from_slice(LAST_CHUNK);
                }
                done = true;
                None
            }
            _ if client.timer.fired() => Some(UpstreamFault::BetweenTimeout),
            _ => Some(UpstreamFault::Truncated),
        };
        if let Some(fault) = ended {
            if shard.phase.get() < Phase::Stopping {
                shard.fault(backend, fault, errno(&result));
            }
            let open = between_events && reader.between_pieces() && framing == Framing::Chunked;
            let fault = open.then_some(fault);
            let fault = fault.zip(api);
            return Ok(Box::pin(broken_off(client, desk, exchange, fault, framing)).await);
        }
        surplus = taken < rx.len();
        between_events = ends_event(&out, mode);
        done |= reader.is_done();
    }
    shard.buffers.give(rx);
    Ok(match keep_alive {
        true => After::Next,
        // A client that still sends its body would lose the answer to a reset.
        false if !exchange.sent => After::LingeringClose,
        false => After::Close,
    })
}

/// As [`pass`], but where all of `rx` goes on as it came, the buffers change places instead of being copied.
fn pass_whole(
    reader: &mut BodyReader,
    mode: Mode,
    rx: &mut Vec<u8>,
    prefix: &[u8],
    out: &mut Vec<u8>,
) -> Result<usize, ChunkError> {
    if mode != Mode::Verbatim {
        return pass(reader, mode, rx, prefix, out).map(|(taken, _)| taken);
    }
    let advance = reader.advance(rx)?;
    if advance.forward == rx.len() {
        std::mem::swap(rx, out);
        rx.clear();
    } else {
        out.extend_from_slice(&rx[..advance.forward]);
    }
    if advance.done {
        reader.push_tail(out, prefix);
    }
    Ok(advance.consumed)
}

/// Whether what was written last ends an event (an empty line), chunk framing aside.
fn ends_event(out: &[u8], mode: Mode) -> bool {
    let content = match mode {
        Mode::Plain => Some(out),
        Mode::Verbatim | Mode::Chunks => out.strip_suffix(b"\r\n"),
    };
    content.is_some_and(|bytes| bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n"))
}

/// The `timeout` of the answer's Keep-Alive field, in nanoseconds; 0 when it names none.
fn idle_ns_named(desk: &Desk, rx: &[u8]) -> u64 {
    let Some(value) = desk.reply.first(FieldKind::KeepAlive) else { return 0 };
    let text = std::str::from_utf8(value.of(rx)).unwrap_or("");
    let seconds =
        text.split(',').find_map(|part| part.trim().strip_prefix("timeout=")?.trim().parse::<u64>().ok());
    seconds.unwrap_or(0).saturating_mul(1_000_000_000)
}

/// Makes sure that the client cannot take what it has for the whole answer: its connection ends without the framing's end,
/// and an event stream first gets an error event, if one can still be put between two events and is wanted (`fault` says so).
async fn broken_off<E: Errand>(
    client: &mut Client,
    desk: &Desk,
    exchange: Exchange<E>,
    fault: Option<(UpstreamFault, Api)>,
    framing: Framing,
) -> After {
    let shard = client.shard.clone();
    let backend = exchange.backend;
    if let Some(upstream) = &exchange.upstream {
        upstream.socket.shutdown_both();
    }
    drop(exchange);
    if shard.phase.get() == Phase::Stopping {
        client.timer.spare();
    }
    let stall_ms = shard.limits.between_bytes_timeout_ms;
    if client.settle(stall_ms).await.is_err() {
        return After::Close;
    }
    if let Some((fault, api)) = fault.filter(|_| desk.reply.is_event_stream) {
        let (rejection, what) = match shard.phase.get() {
            Phase::Stopping => (Rejection::ShuttingDown, None),
            _ => failure(&shard, backend, fault),
        };
        let mut event = match api {
            Api::OpenAi => b"data: ".to_vec(),
            Api::Anthropic => b"event: error\ndata: ".to_vec(),
        };
        event.extend_from_slice(&rejection.body(api, what.as_deref()));
        event.extend_from_slice(b"\n\n");
        let mut out = shard.buffers.take(event.len() + 32);
        push_chunk_header(&mut out, event.len());
        out.extend_from_slice(&event);
        out.extend_from_slice(b"\r\n");
        client.send(out).await;
    }
    if framing == Framing::UntilClose {
        // Here an orderly close would be the end of the body.
        client.socket.reset_on_close();
    }
    After::Close
}
