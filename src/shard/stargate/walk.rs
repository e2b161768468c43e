//! The walk of a request for a server: open, route (or wait), attempt, and what follows from a setback; then the answer goes through.
//!
//! *Invariants*: what may be tried again is for the target router to say; here it is known whether the body can be. Once the answer
//! has begun to go to the client, nothing is sent again. However it ends, the flight ends with it.
//! *Bound*: attempts are bounded by the two retry limits and the candidates; a body's copy as [`super::super::replay`] says.
//! *Source*: the Stargate rules, sections 4.2 to 5.7.

use super::super::attempt::{self, Attempt, Order};
use super::super::client::Client;
use super::super::intake::Intake;
use super::super::relay::{self, Exchange};
use super::super::session::{After, Desk};
use super::super::upstream::{Kind, Upstream};
use super::aloft::{Aloft, Answered};
use super::answer::{self, Answer};
use super::desk::StargateOptions;
use super::endpoint::Proxied;
use super::headers::{Headers, Invalid};
use super::tell::{Seen, Told};
use super::trace::{self, Parent};
use crate::clock::Nanos;
use crate::proto::error::Rejection;
use crate::proto::http1::{BodyReader, Contract, Framing, ResponseHead};
use crate::proto::ids::BackendId;
use crate::proto::message::{Phase, UpstreamFault};
use crate::proto::stargate::figures::AttemptResult;
use crate::proto::stargate::request::{Dispatched, Exhausted, Refusal, Retry, Routed, Setback};

/// A request up to this size, head and body, that is in hand whole goes out in one write and needs no copy for being sent again.
const PLAIN_BYTES_MAX: usize = 32 * 1024;
/// The reason of an answer that may be tried elsewhere and does not say why.
const NO_REASON: &[u8] = b"retryable_upstream_response";

/// A request on its way.
struct Walk<'a> {
    client: &'a mut Client,
    desk: &'a mut Desk,
    intake: &'a mut Intake,
    aloft: Aloft,
    told: Told,
}

/// What becomes of a request after an attempt.
enum Next {
    /// It asks for a route again.
    Route,
    /// The same server once more, on a fresh connection.
    Reconnect,
    /// That answer is the client's; its head is on the desk.
    Answer(Reply),
    /// It ends with that status.
    End(u16),
    /// The client went away.
    Gone,
}

/// An answer whose head is on the desk.
struct Reply {
    upstream: Upstream,
    rx: Vec<u8>,
    /// The request went out whole.
    sent: bool,
    /// When the request was sent.
    since: Nanos,
}

/// What came of an attempt.
enum Outcome {
    Answered(Reply),
    NoHead(Lost),
    End(u16),
    Gone,
}

/// How an attempt without a head ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// No connection; `again`: which would have been in place of a broken one.
    Unconnected {
        again: bool,
    },
    /// Certainly unread by the server, so that what is kept of the body can be sent again and the rest behind it.
    Stale,
    Broken,
}

/// Takes a request to a server, and its answer back.
pub async fn proxy(
    client: &mut Client,
    desk: &mut Desk,
    intake: &mut Intake,
    endpoint: Proxied,
    arrived: Nanos,
) -> After {
    let shard = client.shard.clone();
    if shard.phase.get() >= Phase::Draining {
        return answer::send(client, desk, intake, &Answer::empty(503)).await;
    }
    let mut told = Told::new(endpoint, arrived, shard.trusted().options.levels);
    let aloft = match open(&Seen { client, desk, intake }, endpoint, arrived, &mut told) {
        Ok(aloft) => aloft,
        Err(answer) => return answer::send(client, desk, intake, &answer).await,
    };
    let mut walk = Walk { client, desk, intake, aloft, told };
    let mut prepared = false;
    loop {
        let dispatched = match walk.route().await {
            Ok(dispatched) => dispatched,
            Err(None) => return After::Gone,
            Err(Some(refusal)) => {
                walk.told.refused(
                    &seen(walk.client, walk.desk, walk.intake),
                    Some(&mut walk.aloft),
                    &refusal,
                );
                return walk.end(&Answer::of(&refusal)).await;
            }
        };
        if !std::mem::replace(&mut prepared, true) && !walk.prepare().await {
            return After::Gone;
        }
        let mut may_reuse = true;
        loop {
            match walk.turn(dispatched, may_reuse).await {
                Next::Route => break,
                Next::Reconnect => may_reuse = false,
                Next::Answer(reply) => return walk.relay(dispatched, reply).await,
                Next::End(status) => return walk.end(&Answer::empty(status)).await,
                Next::Gone => return After::Gone,
            }
        }
    }
}

fn seen<'a>(client: &'a Client, desk: &'a Desk, intake: &'a Intake) -> Seen<'a> {
    Seen { client, desk, intake }
}

/// Checks what the request asks for, in the order of the rules.
fn open(request: &Seen<'_>, endpoint: Proxied, arrived: Nanos, told: &mut Told) -> Result<Aloft, Answer> {
    let shard = &request.client.shard;
    let stargate = shard.trusted();
    let options = &stargate.options;
    let head = request.intake.head(request.client);
    let headers = Headers::read(&request.desk.head, head, &options.retry_budget_header);
    let opened = match headers.wish(arrived, endpoint == Proxied::Embeddings) {
        Ok(wish) => stargate.router.borrow_mut().open(shard.now(), &wish),
        Err(Invalid::Header) => return Err(Answer::empty(400)),
        Err(Invalid::Method(refused)) => {
            Err(Refusal::Method { code: refused.code.name(), message: refused.message })
        }
    };
    let mut aloft = match opened {
        Ok(flight) => Aloft::new(shard, flight),
        Err(refusal) => {
            told.refused(request, None, &refusal);
            let answer = Answer::of(&refusal);
            told.span(request, None, answer.status);
            return Err(answer);
        }
    };
    told.opened(request, &mut aloft);
    if headers.retry_budget_ms().is_err() {
        return Err(Answer::empty(400));
    }
    let body_bytes_max = options.replay_bytes_max.min(shard.limits.body_bytes_max);
    match request.intake.framing {
        Framing::Length(bytes) if bytes > body_bytes_max => Err(Answer::empty(413)),
        _ => Ok(aloft),
    }
}

impl Walk<'_> {
    /// A route for the request, now or after a wait. `Err(None)`: the client went away meanwhile.
    async fn route(&mut self) -> Result<Dispatched, Option<Refusal>> {
        let shard = self.client.shard.clone();
        let now = shard.now();
        match self.aloft.with(|router, flight| router.route(now, flight)) {
            Routed::Dispatch(dispatched) => {
                self.aloft.pump();
                Ok(dispatched)
            }
            Routed::Refuse(refusal) => {
                self.aloft.pump();
                Err(Some(refusal))
            }
            Routed::Wait(ticket) => {
                // It is waited for before anything can answer it.
                let waiting = shard.wait_for_route(ticket);
                self.aloft.pump();
                // How long it may wait is the router's to know.
                self.client.timer.clear();
                self.client.watch(waiting).await.map_err(|_| None)?.map_err(Some)
            }
        }
    }

    /// Before the first attempt: the body is asked for where its client waits for that, and kept where it streams through.
    /// False: the client is gone.
    async fn prepare(&mut self) -> bool {
        if self.intake.invite(self.client, self.desk).await.is_err() {
            return false;
        }
        let bytes = self.desk.head.head_len + self.intake.bytes(self.client, self.desk).len();
        if !self.intake.whole() || bytes > PLAIN_BYTES_MAX {
            let bytes_max = self.options().replay_bytes_max;
            self.intake.keep(self.client, self.desk, usize::try_from(bytes_max).unwrap_or(usize::MAX));
        }
        true
    }

    fn options(&self) -> &StargateOptions {
        &self.client.shard.trusted().options
    }

    /// An attempt, and what follows from it.
    async fn turn(&mut self, dispatched: Dispatched, may_reuse: bool) -> Next {
        let backend = dispatched.backend;
        self.told.attempt(&seen(self.client, self.desk, self.intake), &mut self.aloft, backend);
        let outcome = self.attempt(dispatched, may_reuse).await;
        self.count(dispatched, &outcome, may_reuse);
        let (retry, reply) = match outcome {
            Outcome::Answered(reply) => {
                self.told.answered(self.client.shard.now(), self.desk.reply.status);
                let signal = self.options().requires_retry_signal;
                let Some(reason) = retry_reason(&self.desk.reply, &reply.rx, signal) else {
                    return Next::Answer(reply);
                };
                self.told.retryable(reason);
                let status = self.desk.reply.status;
                let replayable = self.replayable();
                (self.setback(Setback::Retryable { status, reason }, replayable), Some(reply))
            }
            Outcome::NoHead(lost) => {
                let setback = match lost {
                    Lost::Unconnected { .. } => Setback::Connect,
                    Lost::Stale | Lost::Broken => Setback::Transport,
                };
                let replayable = match self.replayable() {
                    // Nothing of it was read this time: what came is kept, and the rest follows.
                    Err(false) if lost != Lost::Broken => Ok(()),
                    other => other,
                };
                (self.setback(setback, replayable), None)
            }
            Outcome::End(status) => return Next::End(status),
            Outcome::Gone => return Next::Gone,
        };
        if let Retry::Exhausted(Exhausted::Body { overflow }) = retry {
            self.told.not_replayable(&seen(self.client, self.desk, self.intake), backend, overflow);
        }
        match (retry, reply) {
            (Retry::Exhausted(Exhausted::Body { overflow: true }), _) => Next::End(413),
            (Retry::Exhausted(_), Some(reply)) => Next::Answer(reply),
            (Retry::Exhausted(_), None) => Next::End(502),
            (retry, reply) => {
                if let Some(reply) = reply {
                    self.put_back(backend, reply);
                }
                if retry == Retry::Reconnect { Next::Reconnect } else { Next::Route }
            }
        }
    }

    /// One attempt.
    async fn attempt(&mut self, dispatched: Dispatched, may_reuse: bool) -> Outcome {
        let shard = self.client.shard.clone();
        let stargate = shard.trusted();
        let backend = dispatched.backend;
        // The buffer of the lines is the desk's, which the attempt needs for itself.
        let mut lines = std::mem::take(&mut self.desk.lines);
        lines.clear();
        if let Some(ms) = dispatched.expected_queue_ms {
            lines.extend_from_slice(b"x-stargate-expected-queue-ms: ");
            lines.extend_from_slice(itoa::Buffer::new().format(ms).as_bytes());
            lines.extend_from_slice(b"\r\n");
        }
        let head = self.intake.head(self.client);
        let headers = Headers::read(&self.desk.head, head, b"");
        let parent = headers.trace_parent.and_then(Parent::read);
        trace::push_line(&mut lines, parent, || stargate.random());
        let contract = Contract::Stargate { tracestate: parent.is_some() };
        let since = shard.now();
        let order = Order {
            backend,
            may_reuse,
            since,
            contract,
            extra_lines: &lines,
            connect_timeout_ms: stargate.options.connect_timeout_ms,
            head_timeout_ms: stargate.options.head_timeout_ms,
            head_from_start: true,
        };
        let attempt = attempt::attempt(self.client, self.desk, self.intake, &order).await;
        self.desk.lines = lines;
        self.client.timer.cap(Nanos::NEVER);
        if !matches!(attempt, Attempt::Answered { .. }) {
            // It may be that of the server's connection, which is gone.
            self.client.timer.clear();
        }
        let overdue = shard.now() >= since.plus_ms(stargate.options.head_timeout_ms);
        let no_head = |fault, errno, lost| {
            shard.fault(backend, fault, errno);
            Outcome::NoHead(lost)
        };
        match attempt {
            Attempt::Answered { upstream, rx, sent } => {
                Outcome::Answered(Reply { upstream, rx, sent, since })
            }
            // Cut by us.
            Attempt::Failed { .. } | Attempt::Unconnected { .. } if shard.phase.get() == Phase::Stopping => {
                Outcome::End(503)
            }
            Attempt::Stale => Outcome::NoHead(Lost::Stale),
            Attempt::Unconnected { errno, replaces } => {
                no_head(UpstreamFault::Connect, errno, Lost::Unconnected { again: replaces || !may_reuse })
            }
            Attempt::Failed { fault, errno } => no_head(fault, errno, Lost::Broken),
            Attempt::ClientGone => Outcome::Gone,
            // The limit for the head passed while the client was being waited for.
            Attempt::Refuse(Rejection::RequestTimeout, _) if overdue => {
                no_head(UpstreamFault::HeadTimeout, 0, Lost::Broken)
            }
            Attempt::Refuse(rejection, _) => Outcome::End(rejection.row().status),
        }
    }

    fn replayable(&self) -> Result<(), bool> {
        let bytes_max = self.options().replay_bytes_max;
        self.intake.replayable(usize::try_from(bytes_max).unwrap_or(usize::MAX))
    }

    fn setback(&mut self, setback: Setback<'_>, replayable: Result<(), bool>) -> Retry {
        let now = self.client.shard.now();
        let retry = self.aloft.with(|router, flight| router.handle_retry(now, flight, setback, replayable));
        self.aloft.pump();
        retry
    }

    /// Counts an attempt, and what became of its connection.
    fn count(&mut self, dispatched: Dispatched, outcome: &Outcome, may_reuse: bool) {
        let result = match outcome {
            Outcome::Answered(_) => AttemptResult::Upstream(self.desk.reply.status),
            Outcome::NoHead(_) => AttemptResult::Proxy(502),
            Outcome::End(status) => AttemptResult::Proxy(*status),
            Outcome::Gone => return,
        };
        let replaced = matches!(outcome, Outcome::Answered(reply) if reply.upstream.replaces);
        let kept_bytes = self.intake.kept_bytes();
        self.aloft.with(|router, flight| {
            router.count_attempt(flight, result);
            router.count_replay_bytes(flight, kept_bytes);
            if replaced {
                router.count_reconnect(flight);
            }
        });
        let mut figures = self.client.shard.figures.borrow_mut();
        let links = &mut figures.server(dispatched.backend).links;
        match outcome {
            Outcome::Answered(_) => {
                links.stale += u64::from(replaced);
                links.reconnects += u64::from(replaced || !may_reuse);
            }
            Outcome::NoHead(Lost::Unconnected { again }) => links.failed_reconnects += u64::from(*again),
            Outcome::NoHead(Lost::Stale) => links.stale += 1,
            Outcome::NoHead(Lost::Broken) => links.failed += 1,
            Outcome::End(_) | Outcome::Gone => {}
        }
    }

    /// The connection of an answer that goes nowhere serves again if the answer is all there.
    fn put_back(&self, backend: BackendId, reply: Reply) {
        let shard = &self.client.shard;
        // It may be set for that connection.
        self.client.timer.clear();
        let head = &self.desk.reply;
        let body = &reply.rx[head.head_len..];
        let mut reader = BodyReader::new(head.framing);
        let read = reader.advance(body);
        let whole = read.is_ok_and(|read| read.consumed == body.len()) && reader.is_done();
        if whole && reply.sent && head.keep_alive {
            shard.upstreams.checkin(backend, reply.upstream, Kind::Plain, shard.now());
        }
        shard.buffers.give(reply.rx);
    }

    /// The answer is the client's.
    async fn relay(mut self, dispatched: Dispatched, reply: Reply) -> After {
        let Reply { upstream, rx, sent, since } = reply;
        let backend = dispatched.backend;
        if !self.is_identity_sayable(dispatched) {
            upstream.socket.shutdown_both();
            return self.end(&Answer::empty(500)).await;
        }
        let status = self.desk.reply.status;
        self.told.span(&seen(self.client, self.desk, self.intake), Some(&mut self.aloft), status);
        let Walk { client, desk, intake, aloft, .. } = self;
        let exchange = Exchange::new(Answered::new(aloft, backend), upstream, sent, since);
        match relay::relay(client, desk, intake, rx, exchange).await {
            Ok(after) => after,
            Err(_) => answer::send(client, desk, intake, &Answer::empty(502)).await,
        }
    }

    /// What the answer is to say of its server can stand in a header.
    fn is_identity_sayable(&mut self, dispatched: Dispatched) -> bool {
        let sayable = |text: &str| text.bytes().all(|b| b == b'\t' || b >= b' ' && b != 0x7f);
        let (name, url) = self.client.shard.named(dispatched.backend);
        sayable(&name)
            && sayable(&url)
            && self.aloft.with(|router, flight| sayable(router.cluster_id(flight)))
    }

    /// The request ends with an answer of the router's own.
    async fn end(mut self, answer: &Answer) -> After {
        let status = answer.status;
        self.aloft.with(|router, flight| router.count_finished(flight, status));
        self.told.span(&seen(self.client, self.desk, self.intake), Some(&mut self.aloft), status);
        let Walk { client, desk, intake, aloft, .. } = self;
        drop(aloft);
        answer::send(client, desk, intake, answer).await
    }
}

/// Why an answer may be tried elsewhere; `None`: it may not. `requires_signal`: only if it says so itself.
fn retry_reason<'a>(reply: &ResponseHead, rx: &'a [u8], requires_signal: bool) -> Option<&'a [u8]> {
    if !matches!(reply.status, 429 | 503) {
        return None;
    }
    let retryable = match reply.named(rx, b"x-stargate-retryable") {
        Some(value) => value.of(rx).eq_ignore_ascii_case(b"true"),
        None => !requires_signal,
    };
    let reason = reply.named(rx, b"x-stargate-retry-reason").map(|reason| reason.of(rx));
    let printable = |reason: &&[u8]| !reason.is_empty() && reason.iter().all(|b| (b' '..=b'~').contains(b));
    retryable.then(|| reason.filter(printable).unwrap_or(NO_REASON))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::http1::{HeadLimits, HeadScan, Method, parse_response};

    fn reason(status: u16, lines: &str, requires_signal: bool) -> Option<String> {
        let text = format!("HTTP/1.1 {status} x\r\n{lines}content-length: 0\r\n\r\n");
        let (mut head, limits) = (ResponseHead::default(), HeadLimits::new(65_536, b""));
        parse_response(text.as_bytes(), &mut HeadScan::default(), &limits, Method::Post, &mut head).unwrap();
        retry_reason(&head, text.as_bytes(), requires_signal)
            .map(|reason| String::from_utf8(reason.to_vec()).unwrap())
    }

    #[test]
    fn only_429_and_503_may_be_tried_elsewhere_and_only_if_they_say_so() {
        let says = "x-stargate-retryable: true\r\nx-stargate-retry-reason: queue_estimate_mismatch\r\n";
        let mismatch = Some("queue_estimate_mismatch".to_owned());
        assert_eq!((reason(429, says, true), reason(503, says, true)), (mismatch.clone(), mismatch));
        for status in [200, 400, 500, 502, 504] {
            assert_eq!(reason(status, says, false), None, "{status}");
        }
        let unnamed = Some("retryable_upstream_response".to_owned());
        for blank in ["", "x-stargate-retry-reason:\r\n", "x-stargate-retry-reason: é\r\n"] {
            assert_eq!(reason(503, &format!("X-Stargate-Retryable: TRUE\r\n{blank}"), true), unnamed);
        }
        assert_eq!((reason(503, "", true), reason(503, "", false)), (None, unnamed));
        for no in ["false", "", "1", "true, true"] {
            assert_eq!(reason(429, &format!("x-stargate-retryable: {no}\r\n"), false), None, "{no}");
        }
    }
}
