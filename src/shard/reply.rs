//! Answers that the router gives itself: rejections, health, the list of models.

use super::client::Client;
use super::session::{After, Desk};
use super::state::{Faces, Shard};
use crate::clock::Nanos;
use crate::proto::backend::catalog::Algorithm;
use crate::proto::classify::affinity::{self, AffinityId};
use crate::proto::classify::caller::push_hex;
use crate::proto::classify::{Api, Endpoint};
use crate::proto::dispatcher::Placement;
use crate::proto::error::Rejection;
use crate::proto::http1::{Framing, Method, RequestHead};
use crate::proto::ids::GroupId;
use crate::proto::message::Phase;

/// What is known of a request's way so far: the header lines say no more than that.
#[derive(Clone, Debug)]
pub struct Known {
    pub group: Option<GroupId>,
    pub wait_ns: Option<u64>,
    pub retries: u32,
    /// What its session is known by, in a sticky-session pool.
    pub sticky_key: Option<u64>,
    /// What keeps its conversation together, in a pool whose algorithm does that.
    pub affinity: Option<Box<AffinityId>>,
    /// Prompt blocks that the chosen server held, and all of them, in a kv-aware pool.
    pub prefix_blocks: Option<(u32, u32)>,
    /// When the request's whole time is up; `NEVER` without such a limit.
    pub until: Nanos,
}

impl Default for Known {
    fn default() -> Self {
        Known {
            group: None,
            wait_ns: None,
            retries: 0,
            sticky_key: None,
            affinity: None,
            prefix_blocks: None,
            until: Nanos::NEVER,
        }
    }
}

/// Appends the router's lines for an answer of a server.
pub fn push_lines(lines: &mut Vec<u8>, faces: &Faces, group: GroupId, placement: &Placement, known: &Known) {
    lines.extend_from_slice(&faces.servers[placement.backend.index()]);
    lines.extend_from_slice(&faces.groups[group.index()]);
    lines.extend_from_slice(&faces.inflight);
    push_number(lines, placement.in_flight.into());
    lines.push(b'/');
    push_number(lines, placement.ceiling.into());
    lines.extend_from_slice(b"\r\n");
    push_way(lines, faces, Some(placement.algorithm_used), known);
    if let Some((matched, total)) = known.prefix_blocks {
        lines.extend_from_slice(&faces.prefix_blocks);
        push_number(lines, matched.into());
        lines.push(b'/');
        push_number_line(lines, b"", total.into());
    }
}

fn push_way(lines: &mut Vec<u8>, faces: &Faces, algorithm: Option<Algorithm>, known: &Known) {
    if let Some(ns) = known.wait_ns {
        push_number_line(lines, &faces.wait_ms, ns / 1_000_000);
    }
    if let Some(algorithm) = algorithm {
        lines.extend_from_slice(&faces.algorithm);
        lines.extend_from_slice(algorithm.name().as_bytes());
        lines.extend_from_slice(b"\r\n");
    }
    if let Some(key) = known.sticky_key {
        lines.extend_from_slice(&faces.sticky_key);
        push_hex(lines, key);
        lines.extend_from_slice(b"\r\n");
    }
    if let Some(id) = &known.affinity {
        lines.extend_from_slice(affinity::FIELD);
        lines.extend_from_slice(b": ");
        id.push_value(lines);
        lines.extend_from_slice(b"\r\n");
    }
    if known.retries > 0 {
        push_number_line(lines, &faces.retries, known.retries.into());
    }
}

fn push_number(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

pub fn push_number_line(out: &mut Vec<u8>, name: &[u8], number: u64) {
    out.extend_from_slice(name);
    push_number(out, number);
    out.extend_from_slice(b"\r\n");
}

/// Answers with a rejection, and counts it. `head` is `None` when the request had none that could be read. False: the
/// client is gone. The connection must be closed afterwards where `close` is set.
pub async fn refuse(
    client: &mut Client,
    head: Option<&RequestHead>,
    rejection: Rejection,
    detail: Option<&str>,
    known: &Known,
    api: Api,
    close: bool,
) -> bool {
    let shard = client.shard.clone();
    shard.figures.borrow_mut().rejections[rejection as usize] += 1;
    let row = rejection.row();
    let body = rejection.body(api, detail);
    let mut out = shard.buffers.take(1024 + body.len());
    push_status(&mut out, row.status);
    out.extend_from_slice(b"Content-Type: application/json\r\n");
    push_number_line(&mut out, b"Content-Length: ", body.len() as u64);
    if let Some(seconds) = row.retry_after_s {
        push_number_line(&mut out, b"Retry-After: ", seconds.into());
    }
    let faces = shard.faces();
    let mut algorithm = None;
    if let Some(group) = known.group {
        let catalog = shard.catalog();
        out.extend_from_slice(&faces.groups[group.index()]);
        algorithm = Some(catalog.pool(catalog.group(group).pool).algorithm);
    }
    push_way(&mut out, &faces, algorithm, known);
    out.extend_from_slice(&faces.reject_reason);
    out.extend_from_slice(row.reason.as_bytes());
    out.extend_from_slice(b"\r\n");
    push_connection(&mut out, close, head.map_or(1, |head| head.minor));
    out.extend_from_slice(b"\r\n");
    if head.is_none_or(|head| head.method != Method::Head) {
        out.extend_from_slice(&body);
    }
    client.send(out).await
}

/// An answer without a server.
pub struct Local {
    status: u16,
    body: Box<[u8]>,
}

/// The router's own endpoints. `None`: the request is for a server.
pub fn local(shard: &Shard, endpoint: Endpoint) -> Option<Local> {
    let ok = |body: &[u8]| Some(Local { status: 200, body: body.into() });
    match endpoint {
        Endpoint::Health | Endpoint::Liveness => ok(br#"{"status":"ok"}"#),
        Endpoint::Readiness if shard.phase.get() != Phase::Serving => {
            Some(Local { status: 503, body: br#"{"status":"draining"}"#[..].into() })
        }
        Endpoint::Readiness if !shard.ready.get() => {
            Some(Local { status: 503, body: br#"{"status":"no server is ready"}"#[..].into() })
        }
        Endpoint::Readiness => ok(br#"{"status":"ok"}"#),
        Endpoint::Models => ok(&shard.catalog.borrow().models_body),
        _ => None,
    }
}

/// Sends an answer of [`local`].
pub async fn send_local(client: &mut Client, desk: &Desk, answer: Local) -> After {
    let bodiless = matches!(desk.head.framing, Framing::None | Framing::Length(0));
    let close = !bodiless || !desk.head.keep_alive || client.shard.phase.get() >= Phase::Draining;
    let mut out = client.shard.buffers.take(512 + answer.body.len());
    push_status(&mut out, answer.status);
    out.extend_from_slice(b"Content-Type: application/json\r\n");
    push_number_line(&mut out, b"Content-Length: ", answer.body.len() as u64);
    push_connection(&mut out, close, desk.head.minor);
    out.extend_from_slice(b"\r\n");
    if desk.head.method != Method::Head {
        out.extend_from_slice(&answer.body);
    }
    let sent = client.send(out).await;
    client.consume(desk.head.head_len);
    match (sent, close) {
        (true, false) => After::Next,
        (true, true) => After::LingeringClose,
        (false, _) => After::Close,
    }
}

pub fn push_status(out: &mut Vec<u8>, status: u16) {
    out.extend_from_slice(b"HTTP/1.1 ");
    push_number(out, status.into());
    out.extend_from_slice(reason(status));
}

fn reason(status: u16) -> &'static [u8] {
    match status {
        200 => b" OK\r\n",
        400 => b" Bad Request\r\n",
        401 => b" Unauthorized\r\n",
        403 => b" Forbidden\r\n",
        404 => b" Not Found\r\n",
        405 => b" Method Not Allowed\r\n",
        408 => b" Request Timeout\r\n",
        413 => b" Content Too Large\r\n",
        414 => b" URI Too Long\r\n",
        429 => b" Too Many Requests\r\n",
        431 => b" Request Header Fields Too Large\r\n",
        500 => b" Internal Server Error\r\n",
        502 => b" Bad Gateway\r\n",
        503 => b" Service Unavailable\r\n",
        504 => b" Gateway Timeout\r\n",
        _ => b" \r\n",
    }
}

pub fn push_connection(out: &mut Vec<u8>, close: bool, minor: u8) {
    if close {
        out.extend_from_slice(b"Connection: close\r\n");
    } else if minor == 0 {
        out.extend_from_slice(b"Connection: keep-alive\r\n");
    }
}
