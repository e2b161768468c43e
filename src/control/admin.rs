//! The admin listener: health, readiness, metrics, state and configuration of this process, over HTTP/1.1.
//!
//! *Invariant*: `GET` changes nothing, and nothing is changed for a page of another origin. No secret is in any answer.
//! *Bound and cost*: [`CONNECTIONS_MAX`] connections per listener, one task each; heads of [`HEAD_BYTES_MAX`], request bodies of
//! [`BODY_BYTES_MAX`] (registrations more), dropped where nothing asks for them; [`IDLE_MS`] to send a head or to take an answer in.
//! *Errors*: 400, 413, 414, 431 as the heads' parser says; 404 and 405 name what there is; 503 over the connection limit.
//! *Source*: the configuration reference, admin API; RFC 9110 sections 9.3.2, 15.5.6.

use std::future::Future;
use std::io;
use std::net::TcpListener;
use std::rc::Rc;
use std::time::Duration;

use monoio::io::{AsyncReadRent, AsyncWriteRent, AsyncWriteRentExt};
use monoio::net::TcpStream;
use tracing::{debug, warn};

use super::Shared;
use super::port::Port;
use crate::limits::REGISTRATIONS_MAX;
use crate::proto::http1::{BodyReader, HeadLimits, HeadScan, Method, Parse, RequestHead, parse_request};
use crate::runtime;

mod page;
mod registrations;
mod servers;
mod show;

pub use page::Answer;

/// Connections at once; where servers may register, each of them may keep one more.
pub const CONNECTIONS_MAX: usize = 64;
/// Size of a request head.
pub const HEAD_BYTES_MAX: u32 = 16 << 10;
/// Size of a request body.
pub const BODY_BYTES_MAX: usize = 64 << 10;
/// How long a connection may take for a head, a body, or an answer; also how long it may be idle.
pub const IDLE_MS: u64 = 30_000;
/// How long a client may take to close after its last answer.
const LINGER_MS: u64 = 500;
/// How long the shards are waited for; then their last figures do.
const REPORT_WAIT_MS: u64 = 200;
/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_RETRY_MS: u64 = 100;

/// What a listener answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Face {
    /// Everything.
    Admin,
    /// `GET /metrics` and nothing else.
    Metrics,
}

/// The accept loop, to be spawned. It ends with the process and is never selected against: giving up an accept may lose
/// a descriptor.
pub fn serve<P: Port + 'static>(
    shared: Rc<Shared<P>>,
    listener: TcpListener,
    face: Face,
) -> io::Result<impl Future<Output = ()> + use<P>> {
    runtime::adapt(&listener)?;
    let listener = monoio::net::TcpListener::from_std(listener)?;
    let open = Rc::new(());
    let connections_max = match face {
        Face::Admin if shared.options.trusted.is_some() => CONNECTIONS_MAX + REGISTRATIONS_MAX,
        Face::Admin | Face::Metrics => CONNECTIONS_MAX,
    };
    Ok(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    // One count is the loop's own.
                    let busy = Rc::strong_count(&open) > connections_max;
                    let (shared, open) = (shared.clone(), open.clone());
                    monoio::spawn(async move {
                        if let Err(failure) = converse(&shared, stream, face, busy).await {
                            debug!("admin connection: {failure}");
                        }
                        drop(open);
                    });
                }
                Err(failure) => {
                    warn!("admin listener: accept failed: {failure}");
                    monoio::time::sleep(Duration::from_millis(ACCEPT_RETRY_MS)).await;
                }
            }
        }
    })
}

/// One connection to its end.
async fn converse<P: Port + 'static>(
    shared: &Rc<Shared<P>>,
    mut stream: TcpStream,
    face: Face,
    busy: bool,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if busy {
        let answer = Answer::error(503, "too_many_connections", "too many admin connections are open");
        return part(stream, &answer, Method::Get).await;
    }
    let limits = HeadLimits::new(HEAD_BYTES_MAX, b"");
    let mut head = RequestHead::default();
    let mut received: Vec<u8> = Vec::new();
    loop {
        let mut scan = HeadScan::default();
        let parsed = loop {
            match parse_request(&received, &mut scan, &limits, &mut head) {
                Ok(Parse::Complete) => break Ok(()),
                Ok(Parse::Partial) if !read(&mut stream, &mut received).await? => return Ok(()),
                Ok(Parse::Partial) => {}
                Err(error) => break Err(error),
            }
        };
        if let Err(error) = parsed {
            let row = error.rejection.row();
            let answer = Answer::error(row.status, row.reason, error.what);
            return part(stream, &answer, Method::Get).await;
        }
        let reader = BodyReader::new(head.framing);
        let body_bytes_max = match face {
            Face::Admin => page::body_bytes_max(&head, &received),
            Face::Metrics => None,
        };
        let (answer, rest) = if let Some(body_bytes_max) = body_bytes_max {
            let pending = received[head.head_len..].to_vec();
            if head.expect_continue && pending.is_empty() {
                timed(stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec())).await?.0?;
            }
            match take_body(&mut stream, reader, pending, body_bytes_max).await? {
                Ok((body, rest)) => (page::answer(shared, face, &head, &received, &body).await, Some(rest)),
                Err(answer) => (answer, None),
            }
        } else {
            let answer = page::answer(shared, face, &head, &received, b"").await;
            // A client that waits for 100 gets its final answer instead; its body may or may not follow, so the
            // connection cannot go on.
            match head.keep_alive && !head.expect_continue && !shared.draining() {
                true => {
                    let body = received.split_off(head.head_len);
                    (answer, skip_body(&mut stream, reader, body).await?)
                }
                false => (answer, None),
            }
        };
        let keep_alive = head.keep_alive && rest.is_some() && !shared.draining();
        received = rest.unwrap_or_default();
        if !keep_alive {
            return part(stream, &answer, head.method).await;
        }
        write(&mut stream, &answer, head.method, true).await?;
    }
}

/// Reads a request's body to its end; returns it and what follows it. The inner error is the answer to a body that cannot be
/// taken; the connection has to go then.
async fn take_body(
    stream: &mut TcpStream,
    mut reader: BodyReader,
    mut pending: Vec<u8>,
    body_bytes_max: usize,
) -> io::Result<Result<(Vec<u8>, Vec<u8>), Answer>> {
    let mut body = Vec::new();
    loop {
        while !pending.is_empty() && !reader.is_done() {
            let Ok(decoded) = reader.decode(&pending) else {
                return Ok(Err(Answer::error(400, "bad_request", "the body is malformed")));
            };
            body.extend_from_slice(&pending[decoded.data]);
            pending.drain(..decoded.consumed);
        }
        if body.len() > body_bytes_max {
            let message = format!("the body is over {body_bytes_max} bytes");
            return Ok(Err(Answer::error(413, "body_too_large", &message)));
        }
        if reader.is_done() {
            return Ok(Ok((body, pending)));
        }
        if !read(stream, &mut pending).await? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Reads a request's body to its end and drops it; returns what follows it. `None`: it is too long or malformed, and
/// the connection has to go.
async fn skip_body(
    stream: &mut TcpStream,
    mut reader: BodyReader,
    mut pending: Vec<u8>,
) -> io::Result<Option<Vec<u8>>> {
    let mut skipped = 0;
    loop {
        while !pending.is_empty() && !reader.is_done() {
            let Ok(decoded) = reader.decode(&pending) else { return Ok(None) };
            skipped += decoded.consumed;
            pending.drain(..decoded.consumed);
        }
        if reader.is_done() {
            return Ok(Some(pending));
        }
        if skipped > BODY_BYTES_MAX || !read(stream, &mut pending).await? {
            return Ok(None);
        }
    }
}

/// Sends the last answer and closes so that it arrives: bytes that the client still sends would otherwise reset the
/// connection under it (RFC 9112 section 9.6).
async fn part(mut stream: TcpStream, answer: &Answer, method: Method) -> io::Result<()> {
    write(&mut stream, answer, method, false).await?;
    stream.shutdown().await?;
    let rest = async {
        let mut dropped = Vec::new();
        while dropped.len() <= BODY_BYTES_MAX && read(&mut stream, &mut dropped).await.unwrap_or(false) {}
    };
    let _ = monoio::time::timeout(Duration::from_millis(LINGER_MS), rest).await;
    Ok(())
}

/// Appends what arrives next; false at the end of the stream.
async fn read(stream: &mut TcpStream, received: &mut Vec<u8>) -> io::Result<bool> {
    let buffer = Vec::with_capacity(4096);
    let (result, buffer) = timed(stream.read(buffer)).await?;
    let bytes = result?;
    received.extend_from_slice(&buffer[..bytes]);
    Ok(bytes > 0)
}

async fn write(stream: &mut TcpStream, answer: &Answer, method: Method, keep_alive: bool) -> io::Result<()> {
    let bytes = answer.encode(method, keep_alive);
    timed(stream.write_all(bytes)).await?.0?;
    Ok(())
}

async fn timed<F: Future>(operation: F) -> io::Result<F::Output> {
    monoio::time::timeout(Duration::from_millis(IDLE_MS), operation)
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))
}
