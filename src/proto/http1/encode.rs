//! Heads and chunk framing for the other side.
//!
//! *Invariant*: what the two hops say about themselves (framing, connection, Host, hop-by-hop fields) is written anew;
//! everything else goes on byte for byte, in order, with its case and its repeats.
//! *Bound and cost*: one copy per run of kept lines, no formatting machinery; `out` is appended to and allocates only to grow.
//! *Errors*: none. Whatever was parsed can be written; `host`, `base_path`, credentials and extra lines come from checked
//! configuration and hold no control byte.
//! *Source*: RFC 9110 section 7.6; RFC 9112 sections 3.2, 6, 7.1, 9.6.

use super::field::{Field, FieldKind, has_prefix};
use super::framing::Framing;
use super::head::{RequestHead, ResponseHead};

/// The last chunk without trailers.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// What becomes of the caller's `Authorization` and `x-api-key`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Credentials<'a> {
    /// They go on as they are.
    #[default]
    Keep,
    /// They go no further.
    Strip,
    /// They go no further, and these whole field values go instead.
    Replace { authorization: Option<&'a [u8]>, x_api_key: Option<&'a [u8]> },
}

/// Whose rules say which fields go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contract {
    /// Callers are untrusted: what steers routing elsewhere goes no further.
    #[default]
    OpenAi,
    /// The caller is a trusted gateway (the Stargate rules, section 4.3): only the fields listed there stay behind. The caller's
    /// `traceparent` is replaced; its `tracestate` goes on where `tracestate` says so.
    Stargate { tracestate: bool },
}

impl Contract {
    /// Fields of a request that stay behind, as bits of their kinds.
    const fn request_drop(self) -> u32 {
        match self {
            Contract::OpenAi => {
                HOP_BY_HOP
                    | FieldKind::Steering.bit()
                    | FieldKind::Neighbourly.bit()
                    | FieldKind::ClusterIdentity.bit()
            }
            Contract::Stargate { tracestate } => {
                let state = if tracestate { 0 } else { FieldKind::TraceState.bit() };
                STARGATE | FieldKind::TraceParent.bit() | state
            }
        }
    }

    /// As [`Contract::request_drop`], for a response.
    const fn response_drop(self) -> u32 {
        match self {
            Contract::OpenAi => HOP_BY_HOP | FieldKind::RouterOwn.bit(),
            Contract::Stargate { .. } => {
                STARGATE | FieldKind::ServerIdentity.bit() | FieldKind::ClusterIdentity.bit()
            }
        }
    }
}

/// What changes in a request on its way to a server.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestRewrite<'a> {
    pub contract: Contract,
    /// Put before the path: empty, or `/…` without a `/` at its end.
    pub base_path: &'a [u8],
    /// Value of the Host field.
    pub host: &'a [u8],
    /// How the body is sent; [`Framing::UntilClose`] cannot be.
    pub framing: Framing,
    pub credentials: Credentials<'a>,
    /// Whether fields with the router's own prefix stay behind.
    pub drop_router_own: bool,
    /// Whole lines, each with its CRLF, put at the end of the head.
    pub extra_lines: &'a [u8],
}

/// What changes in a response on its way to the client.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseRewrite {
    /// How the body is sent. [`Framing::None`] keeps the Content-Length of an answer to HEAD and of a 304, where it
    /// describes a body that is not there. [`Framing::UntilClose`] needs `keep_alive` false.
    pub framing: Framing,
    /// The client's connection stays open after this response.
    pub keep_alive: bool,
    /// Minor version of the client's request, 0 or 1.
    pub client_minor: u8,
    pub contract: Contract,
}

const HOP_BY_HOP: u32 = FieldKind::Connection.bit()
    | FieldKind::ContentLength.bit()
    | FieldKind::TransferEncoding.bit()
    | FieldKind::KeepAlive.bit()
    | FieldKind::ProxyConnection.bit()
    | FieldKind::ProxyAny.bit()
    | FieldKind::Te.bit()
    | FieldKind::Trailer.bit()
    | FieldKind::Upgrade.bit()
    | FieldKind::Nominated.bit();

/// What stays behind both ways in the Stargate contract. (`Content-Length` goes on in its place while it is true.)
const STARGATE: u32 = FieldKind::Connection.bit()
    | FieldKind::ContentLength.bit()
    | FieldKind::TransferEncoding.bit()
    | FieldKind::KeepAlive.bit()
    | FieldKind::ProxyConnection.bit()
    | FieldKind::Te.bit()
    | FieldKind::Trailer.bit()
    | FieldKind::Upgrade.bit()
    | FieldKind::Host.bit()
    | FieldKind::Neighbourly.bit();

/// Whether the Content-Length of `head` goes on where it stands: it says what `framing` would say.
fn keeps_length(contract: Contract, parsed: Framing, framing: Framing) -> bool {
    contract != Contract::OpenAi && parsed == framing && matches!(framing, Framing::Length(_))
}

/// Appends the head of `head` for the server that `rewrite` describes. `buf` is the buffer `head` was parsed from.
pub fn encode_request(out: &mut Vec<u8>, head: &RequestHead, buf: &[u8], rewrite: &RequestRewrite<'_>) {
    debug_assert_ne!(rewrite.framing, Framing::UntilClose, "a request cannot end with its connection");
    out.reserve(
        head.head_len + rewrite.base_path.len() + rewrite.host.len() + rewrite.extra_lines.len() + 128,
    );
    out.extend_from_slice(head.method_span.of(buf));
    out.push(b' ');
    if head.is_asterisk(buf) {
        out.push(b'*');
    } else {
        let path = head.path_and_query.of(buf);
        out.extend_from_slice(rewrite.base_path);
        if path.first() != Some(&b'/') {
            out.push(b'/');
        }
        out.extend_from_slice(path);
    }
    out.extend_from_slice(b" HTTP/1.1\r\nHost: ");
    out.extend_from_slice(rewrite.host);
    out.extend_from_slice(b"\r\n");

    let mut drop = rewrite.contract.request_drop() | FieldKind::Host.bit() | FieldKind::Expect.bit();
    let keeps_length = keeps_length(rewrite.contract, head.framing, rewrite.framing);
    if keeps_length {
        drop &= !FieldKind::ContentLength.bit();
    }
    if rewrite.credentials != Credentials::Keep {
        drop |= FieldKind::Authorization.bit() | FieldKind::XApiKey.bit();
    }
    if rewrite.drop_router_own {
        drop |= FieldKind::RouterOwn.bit();
    }
    copy_kept(out, buf, head.fields(), head.head_len, drop);

    if let Credentials::Replace { authorization, x_api_key } = rewrite.credentials {
        for (name, value) in [(&b"Authorization: "[..], authorization), (b"x-api-key: ", x_api_key)] {
            if let Some(value) = value {
                out.extend_from_slice(name);
                out.extend_from_slice(value);
                out.extend_from_slice(b"\r\n");
            }
        }
    }
    // Who says TE must name it in Connection too (RFC 9110 section 10.1.4).
    let mut te = head.fields().iter().filter(|f| f.kind == FieldKind::Te);
    if rewrite.contract == Contract::OpenAi
        && let (Some(only), None) = (te.next(), te.next())
        && only.value.of(buf).eq_ignore_ascii_case(b"trailers")
    {
        out.extend_from_slice(b"TE: trailers\r\nConnection: TE\r\n");
    }
    if !keeps_length {
        push_framing(out, rewrite.framing);
    }
    out.extend_from_slice(rewrite.extra_lines);
    out.extend_from_slice(b"\r\n");
}

/// Appends the head of `head` for the client that `rewrite` describes, `extra_lines` (whole lines with their CRLF) at its
/// end. `buf` is the buffer `head` was parsed from.
pub fn encode_response(
    out: &mut Vec<u8>,
    head: &ResponseHead,
    buf: &[u8],
    extra_lines: &[u8],
    rewrite: &ResponseRewrite,
) {
    debug_assert!(!(rewrite.framing == Framing::UntilClose && rewrite.keep_alive), "its end is the close");
    out.reserve(head.head_len + extra_lines.len() + 128);
    out.extend_from_slice(b"HTTP/1.1 ");
    // Status 100 to 999: the three digits stand where they were parsed.
    out.extend_from_slice(&buf[9..12]);
    out.push(b' ');
    out.extend_from_slice(head.reason.of(buf));
    out.extend_from_slice(b"\r\n");

    let mut drop = rewrite.contract.response_drop();
    let describes = rewrite.framing == Framing::None && !head.is_interim() && head.status != 204;
    let keeps_length = keeps_length(rewrite.contract, head.framing, rewrite.framing);
    if describes || keeps_length {
        drop &= !FieldKind::ContentLength.bit();
    }
    copy_kept(out, buf, head.fields(), head.head_len, drop);
    if !keeps_length {
        push_framing(out, rewrite.framing);
    }
    if !head.is_interim() {
        if !rewrite.keep_alive {
            out.extend_from_slice(b"Connection: close\r\n");
        } else if rewrite.client_minor == 0 {
            out.extend_from_slice(b"Connection: keep-alive\r\n");
        }
    }
    out.extend_from_slice(extra_lines);
    out.extend_from_slice(b"\r\n");
}

/// Copies the lines whose kind is not in `drop`. Lines lie one behind the other, so that a run of them is one copy.
fn copy_kept(out: &mut Vec<u8>, buf: &[u8], fields: &[Field], head_len: usize, drop: u32) {
    let mut run = None;
    for field in fields {
        let start = field.name.start as usize;
        if field.kind.bit() & drop == 0 {
            run.get_or_insert(start);
        } else if let Some(from) = run.take() {
            out.extend_from_slice(&buf[from..start]);
        }
    }
    if let Some(from) = run {
        // Without the blank line.
        out.extend_from_slice(&buf[from..head_len - 2]);
    }
}

fn push_framing(out: &mut Vec<u8>, framing: Framing) {
    match framing {
        Framing::None | Framing::UntilClose => {}
        Framing::Length(length) => {
            out.extend_from_slice(b"Content-Length: ");
            out.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        Framing::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
    }
}

/// Appends the size line of a chunk of `len` bytes, above 0 (0 would end the body). CRLF must follow the data.
pub fn push_chunk_header(out: &mut Vec<u8>, len: usize) {
    debug_assert_ne!(len, 0, "a chunk of 0 bytes is the last one");
    let mut line = [0u8; 18];
    let mut at = 16;
    line[16..].copy_from_slice(b"\r\n");
    let mut rest = len as u64;
    while rest > 0 {
        at -= 1;
        line[at] = b"0123456789abcdef"[(rest & 0xf) as usize];
        rest >>= 4;
    }
    out.extend_from_slice(&line[at..]);
}

/// Appends the last chunk with `trailers` ([`super::BodyReader::trailers`]; may be empty), those with the router's own prefix
/// left out.
pub fn push_last_chunk(out: &mut Vec<u8>, trailers: &[u8], router_prefix: &[u8]) {
    out.extend_from_slice(b"0\r\n");
    push_trailers(out, trailers, router_prefix);
    out.extend_from_slice(b"\r\n");
}

pub(super) fn push_trailers(out: &mut Vec<u8>, trailers: &[u8], router_prefix: &[u8]) {
    for line in trailers.split_inclusive(|&b| b == b'\n') {
        if !has_prefix(line, router_prefix) {
            out.extend_from_slice(line);
        }
    }
}

#[cfg(test)]
mod tests;
