//! A request body that is larger than what is taken in for routing: it streams through, one buffer at a time.
//!
//! *Invariant*: the server's answer is watched for all the while. An answer that comes before the body is through ends the
//! upload; both connections close after it.
//! *Bound*: one [`LARGE_BYTES`] buffer. A slow server holds the client back by its window, and the other way round.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::Poll;

use super::attempt::{Attempt, await_head, errno, only_interim};
use super::buffers::{LARGE_BYTES, MEDIUM_BYTES};
use super::client::{Client, End};
use super::deadline::Action;
use super::intake::{Intake, TOO_LARGE, push_chunk};
use super::session::Desk;
use super::socket::Outcome as Read;
use super::upstream::Upstream;
use crate::proto::error::Rejection;
use crate::proto::http1::{Framing, HeadLimits};
use crate::proto::message::UpstreamFault;

/// Sends `tx` (head and what was in hand) and then the rest of the body as it comes, and waits for the head of the answer.
pub async fn stream(
    client: &mut Client,
    desk: &mut Desk,
    intake: &mut Intake,
    mut upstream: Upstream,
    tx: Vec<u8>,
    head_timeout_ms: u64,
) -> Attempt {
    let shard = client.shard.clone();
    let rx = shard.buffers.take(MEDIUM_BYTES);
    let mut read = pin!(upstream.socket.read_more(rx));
    let mut out = tx;
    // The kernel has taken none of the request so far.
    let mut untaken = true;
    loop {
        client.timer.arm(
            shard.deadline(shard.limits.between_bytes_timeout_ms),
            upstream.socket.fd(),
            Action::ShutBoth,
        );
        upstream.sent_now += out.len() as u64;
        let mut write = pin!(upstream.socket.write_all(out));
        loop {
            let Ok(first) = client.watch(race(read.as_mut(), write.as_mut())).await else {
                upstream.socket.shutdown_both();
                return Attempt::ClientGone;
            };
            match first {
                Race::Read(got) => match interim(got, desk, shard.head_limits(client.profile)) {
                    Ok(rx) => read.set(upstream.socket.read_more(rx)),
                    Err(got) => return answered(client, desk, intake, upstream, got, Sent::Part).await,
                },
                Race::Work((Ok(()), buf)) => {
                    (out, untaken) = (buf, false);
                    break;
                }
                Race::Work((Err(error), _)) => {
                    // The server has closed its side; it may have said why before that.
                    let sent = if untaken && error.written == 0 { Sent::None } else { Sent::Part };
                    let got = read.await;
                    return answered(client, desk, intake, upstream, got, sent).await;
                }
            }
        }
        out.clear();
        if intake.is_through() {
            break;
        }
        if out.capacity() != LARGE_BYTES {
            shard.buffers.give(std::mem::replace(&mut out, shard.buffers.take(LARGE_BYTES)));
        }
        loop {
            // What has been appended stays in `out` when this is given up and begun again.
            match race(read.as_mut(), next_piece(client, intake, &mut out)).await {
                Race::Read(got) => match interim(got, desk, shard.head_limits(client.profile)) {
                    Ok(rx) => read.set(upstream.socket.read_more(rx)),
                    Err(got) => return answered(client, desk, intake, upstream, got, Sent::Part).await,
                },
                Race::Work(Ok(())) => break,
                Race::Work(Err(stop)) => {
                    upstream.socket.shutdown_both();
                    return stop;
                }
            }
        }
    }
    shard.buffers.give(out);
    client.timer.arm(shard.deadline(head_timeout_ms), upstream.socket.fd(), Action::ShutBoth);
    match client.watch(read).await {
        Ok(got) => answered(client, desk, intake, upstream, got, Sent::Whole).await,
        Err(_) => {
            upstream.socket.shutdown_both();
            Attempt::ClientGone
        }
    }
}

/// What came is only the promise of an answer: back comes the buffer to read on into.
fn interim(
    (result, mut rx): Read<usize>,
    desk: &mut Desk,
    limits: &HeadLimits,
) -> Result<Vec<u8>, Read<usize>> {
    match result {
        Ok(n) if n > 0 && only_interim(&mut rx, desk, limits) => Ok(rx),
        result => Err((result, rx)),
    }
}

/// How much of a request the kernel has taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    None,
    Part,
    Whole,
}

async fn answered(
    client: &mut Client,
    desk: &mut Desk,
    intake: &Intake,
    upstream: Upstream,
    (result, rx): Read<usize>,
    sent: Sent,
) -> Attempt {
    match result {
        Ok(n) if n > 0 => await_head(client, desk, upstream, rx, sent == Sent::Whole).await,
        _ if client.timer.fired() => Attempt::Failed { fault: UpstreamFault::HeadTimeout, errno: 0 },
        result => {
            let unread = upstream.reused && sent == Sent::None || result.is_ok() && upstream.unread().await;
            match unread && intake.is_kept() {
                true => Attempt::Stale,
                false => Attempt::Failed { fault: UpstreamFault::BeforeHead, errno: errno(&result) },
            }
        }
    }
}

/// Appends the next bytes of the body to `out`, framed for the server. Appends nothing when only framing arrived.
async fn next_piece(client: &mut Client, intake: &mut Intake, out: &mut Vec<u8>) -> Result<(), Attempt> {
    if intake.push_kept(out) {
        return Ok(());
    }
    let idle_ms = client.shard.limits.client_body_idle_timeout_ms;
    if client.unread().is_empty() {
        client.arm_deadline(idle_ms, Action::ShutRead);
        match intake.reader.remaining() {
            // Straight into the outgoing buffer, and never beyond the body's end.
            Some(remaining) => {
                let limit = remaining.min(LARGE_BYTES as u64) as usize;
                client.read_body(out, limit).await.map_err(stopped)?;
                let taken = intake.reader.advance(out).expect("a length cannot be malformed").consumed;
                intake.passed(&out[..taken]);
                return Ok(());
            }
            None => {
                client.more().await.map_err(stopped)?;
            }
        }
    }
    while !client.unread().is_empty() && !intake.reader.is_done() {
        let bytes = client.unread();
        let decoded = match intake.reader.decode(bytes) {
            Ok(decoded) => decoded,
            Err(error) => return Err(Attempt::Refuse(Rejection::BadRequest, error.what)),
        };
        let data = &bytes[decoded.data];
        intake.passed(data);
        match intake.framing {
            Framing::Chunked => push_chunk(out, data),
            _ => out.extend_from_slice(data),
        }
        client.consume(decoded.consumed);
    }
    if intake.content > client.shard.limits.body_bytes_max {
        return Err(Attempt::Refuse(Rejection::BodyTooLarge, TOO_LARGE));
    }
    intake.push_end(out);
    Ok(())
}

fn stopped(end: End) -> Attempt {
    match end {
        End::Closed | End::Failed => Attempt::ClientGone,
        End::Deadline => {
            Attempt::Refuse(Rejection::RequestTimeout, "the client stopped sending the request body")
        }
    }
}

enum Race<R, W> {
    Read(R),
    Work(W),
}

/// Whichever ends first; the read may be polled again if it was the other.
async fn race<R: Future, W: Future>(mut read: Pin<&mut R>, work: W) -> Race<R::Output, W::Output> {
    let mut work = pin!(work);
    std::future::poll_fn(|cx| {
        if let Poll::Ready(got) = read.as_mut().poll(cx) {
            return Poll::Ready(Race::Read(got));
        }
        work.as_mut().poll(cx).map(Race::Work)
    })
    .await
}
