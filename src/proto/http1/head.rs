//! Request and response heads: parsed once, strictly, into reusable structures of spans.
//!
//! `httparse` splits the lines (SIMD) once the blank line is there; before it [`HeadScan`] has made sure that every line
//! ends in CRLF, which `httparse` itself would not insist on. One pass over the fields then classifies them, and one
//! function per direction decides the framing.
//!
//! *Invariant*: a head that is accepted has one reading. Refused are: bare CR or LF, folded lines, white space
//! before a colon, controls, a missing or repeated Host, any length that is not one plain number, a length beside a
//! transfer coding, any coding but one `chunked`, a coding in HTTP/1.0, CONNECT, and 101 (the router never asks for an
//! upgrade, so that nothing can tunnel through it).
//! *Bound and cost*: [`HEADERS_MAX`] fields, [`HeadLimits`] bytes; O(head); no allocation once `fields` has grown.
//! *Source*: RFC 9112 sections 3, 4, 5, 6, 9.3; RFC 9110 sections 7.2, 10.1.1.

use std::mem::MaybeUninit;

use super::field::{self, Field, FieldKind, Span};
use super::framing::{self, Framing};
use super::scan::{HeadLimits, HeadScan};
use crate::limits::HEADERS_MAX;
use crate::proto::error::Rejection;

/// Whether the buffer holds the whole head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parse {
    /// Read more and call again with the same buffer grown and the same [`HeadScan`].
    Partial,
    /// The head is filled in; its body begins at `head_len`.
    Complete,
}

/// Why a request head is refused. The connection is closed after the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadError {
    /// [`Rejection::BadRequest`], [`Rejection::HeadTooLarge`] or [`Rejection::UriTooLong`].
    pub rejection: Rejection,
    /// What was wrong and what was expected; fixed texts, fit for a client.
    pub what: &'static str,
}

impl HeadError {
    pub(super) const fn bad(what: &'static str) -> HeadError {
        HeadError { rejection: Rejection::BadRequest, what }
    }
    pub(super) const fn too_large(what: &'static str) -> HeadError {
        HeadError { rejection: Rejection::HeadTooLarge, what }
    }
    pub(super) const fn uri_too_long() -> HeadError {
        HeadError { rejection: Rejection::UriTooLong, what: "request target is over the length limit" }
    }
}

impl std::fmt::Display for HeadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.what)
    }
}
impl std::error::Error for HeadError {}

/// Why an engine's response head is refused. Its connection is closed, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseError {
    /// What was wrong and what was expected.
    pub what: &'static str,
}

impl std::fmt::Display for ResponseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.what)
    }
}
impl std::error::Error for ResponseError {}

/// A request method, case-sensitive as the RFC has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Method {
    #[default]
    Get,
    Head,
    Post,
    Put,
    Patch,
    Delete,
    Options,
    Trace,
    /// See [`RequestHead::method_span`].
    Other,
}

impl Method {
    fn of(name: &[u8]) -> Method {
        match name {
            b"GET" => Method::Get,
            b"HEAD" => Method::Head,
            b"POST" => Method::Post,
            b"PUT" => Method::Put,
            b"PATCH" => Method::Patch,
            b"DELETE" => Method::Delete,
            b"OPTIONS" => Method::Options,
            b"TRACE" => Method::Trace,
            _ => Method::Other,
        }
    }
}

/// A parsed request head. All spans point into the buffer given to [`parse_request`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestHead {
    /// Bytes of the head: tolerated empty lines before it and its blank line included.
    pub head_len: usize,
    pub method: Method,
    pub method_span: Span,
    /// As the client sent it: origin-form, absolute-form or `*`.
    pub target: Span,
    /// Path and query. The whole target in origin-form and for `*`; in absolute-form what follows the authority: may
    /// then be empty or begin with `?` (the path is `/`). See [`RequestHead::path`].
    pub path_and_query: Span,
    /// Host and port of an absolute-form target; it beats the Host field.
    pub authority: Option<Span>,
    /// Value of the Host field; may be empty, and absent in HTTP/1.0.
    pub host: Option<Span>,
    /// 0 or 1.
    pub minor: u8,
    /// Never [`Framing::UntilClose`].
    pub framing: Framing,
    /// The client wants the connection to stay.
    pub keep_alive: bool,
    /// The client waits for 100 before it sends its body (never in HTTP/1.0, nor without a body).
    pub expect_continue: bool,
    /// First field of its kind.
    pub content_type: Option<Span>,
    /// First field of its kind.
    pub content_encoding: Option<Span>,
    fields: Vec<Field>,
}

impl RequestHead {
    /// All fields, in order.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }
    /// Value of the first field of `kind`.
    pub fn first(&self, kind: FieldKind) -> Option<Span> {
        first(&self.fields, kind)
    }
    /// Value of the first field called `name` (in any case) that no `Connection` nominates.
    pub fn named(&self, buf: &[u8], name: &[u8]) -> Option<Span> {
        named(&self.fields, buf, name)
    }
    /// The path without its query; `/` where an absolute-form target has none.
    pub fn path<'b>(&self, buf: &'b [u8]) -> &'b [u8] {
        let whole = self.path_and_query.of(buf);
        let path = memchr::memchr(b'?', whole).map_or(whole, |i| &whole[..i]);
        if path.is_empty() { b"/" } else { path }
    }
    /// `OPTIONS *`, also where it was written as an absolute target without a path (RFC 9112 section 3.2.4).
    pub fn is_asterisk(&self, buf: &[u8]) -> bool {
        self.method == Method::Options
            && (self.target.of(buf) == b"*" || (self.authority.is_some() && self.path_and_query.is_empty()))
    }
}

/// A parsed response head. All spans point into the buffer given to [`parse_response`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseHead {
    /// Bytes of the head with its blank line.
    pub head_len: usize,
    /// 100 to 999.
    pub status: u16,
    /// May be empty, and may hold obs-text.
    pub reason: Span,
    /// 0 or 1.
    pub minor: u8,
    pub framing: Framing,
    /// The connection may serve another request once this body has been read to its end.
    pub keep_alive: bool,
    /// Content-Type is `text/event-stream`.
    pub is_event_stream: bool,
    /// First field of its kind.
    pub content_type: Option<Span>,
    /// First field of its kind.
    pub content_encoding: Option<Span>,
    fields: Vec<Field>,
}

impl ResponseHead {
    /// All fields, in order.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }
    /// Value of the first field of `kind`.
    pub fn first(&self, kind: FieldKind) -> Option<Span> {
        first(&self.fields, kind)
    }
    /// Value of the first field called `name` (in any case) that no `Connection` nominates.
    pub fn named(&self, buf: &[u8], name: &[u8]) -> Option<Span> {
        named(&self.fields, buf, name)
    }
    /// 1xx: the final response is still to come.
    pub fn is_interim(&self) -> bool {
        self.status < 200
    }
}

fn first(fields: &[Field], kind: FieldKind) -> Option<Span> {
    fields.iter().find(|f| f.kind == kind).map(|f| f.value)
}

fn named(fields: &[Field], buf: &[u8], name: &[u8]) -> Option<Span> {
    let is = |f: &&Field| f.kind != FieldKind::Nominated && f.name.of(buf).eq_ignore_ascii_case(name);
    fields.iter().find(is).map(|f| f.value)
}

/// Parses the request head at the start of `buf`. `scan` is new for each head and kept while `buf` grows. On
/// [`Parse::Complete`] `head` is filled in and `scan` is ready for the next head; otherwise `head` means nothing.
pub fn parse_request(
    buf: &[u8],
    scan: &mut HeadScan,
    limits: &HeadLimits,
    head: &mut RequestHead,
) -> Result<Parse, HeadError> {
    let Some((start, end)) = scan.request(buf, limits)? else { return Ok(Parse::Partial) };
    let buf = &buf[..end];
    let mut lines = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut []);
    let minor = match parsed.parse_with_uninit_headers(&buf[start..], &mut lines) {
        Ok(httparse::Status::Complete(n)) if n == end - start => parsed.version,
        Ok(_) => None,
        Err(httparse::Error::TooManyHeaders) => {
            return Err(HeadError::too_large("more than 128 header fields"));
        }
        Err(error) => return Err(HeadError::bad(text(error))),
    };
    let (Some(method), Some(target), Some(minor)) = (parsed.method, parsed.path, minor) else {
        return Err(HeadError::bad("malformed request head"));
    };
    head.head_len = end;
    head.minor = minor;
    head.method_span = Span::within(buf, method.as_bytes());
    head.method = Method::of(method.as_bytes());
    head.target = Span::within(buf, target.as_bytes());
    if target.len() > limits.target_bytes_max as usize {
        return Err(HeadError::uri_too_long());
    }
    take_target(method.as_bytes(), target.as_bytes(), head).map_err(HeadError::bad)?;
    let seen = take_fields(buf, parsed.headers, &limits.router_prefix, &mut head.fields);
    finish_request(buf, seen, head).map_err(HeadError::bad)?;
    Ok(Parse::Complete)
}

/// Parses the response head at the start of `buf`, the answer to a request with `method` (an interim response is a head
/// of its own). Otherwise as [`parse_request`].
pub fn parse_response(
    buf: &[u8],
    scan: &mut HeadScan,
    limits: &HeadLimits,
    method: Method,
    head: &mut ResponseHead,
) -> Result<Parse, ResponseError> {
    let Some((start, end)) = scan.response(buf, limits)? else { return Ok(Parse::Partial) };
    debug_assert_eq!(start, 0, "no empty line is skipped before a status line");
    let bad = |what| ResponseError { what };
    let buf = &buf[..end];
    let mut lines = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let minor = match config.parse_response_with_uninit_headers(&mut parsed, buf, &mut lines) {
        Ok(httparse::Status::Complete(n)) if n == end => parsed.version,
        Ok(_) => None,
        Err(httparse::Error::TooManyHeaders) => return Err(bad("more than 128 response header fields")),
        Err(error) => return Err(bad(text(error))),
    };
    let (Some(status), Some(minor)) = (parsed.code, minor) else {
        return Err(bad("malformed response head"));
    };
    match status {
        ..=99 => return Err(bad("status below 100")),
        101 => return Err(bad("101 Switching Protocols, but no upgrade was asked for")),
        _ => {}
    }
    head.head_len = end;
    head.status = status;
    head.minor = minor;
    // `HTTP/1.1 200` is followed by CRLF, or by a space and the reason. (`httparse` hides a reason with obs-text.)
    let line_end = memchr::memchr(b'\r', buf).unwrap_or(end);
    head.reason = Span::new(line_end.min(13), line_end);
    let seen = take_fields(buf, parsed.headers, &limits.router_prefix, &mut head.fields);
    finish_response(buf, seen, method, head).map_err(bad)?;
    Ok(Parse::Complete)
}

/// What was wrong, in words.
fn text(error: httparse::Error) -> &'static str {
    match error {
        httparse::Error::HeaderName => {
            "malformed header line; expected `name: value`, no space before the colon, no folded line"
        }
        httparse::Error::HeaderValue => "control byte (bare CR, NUL or other) in a header value",
        httparse::Error::NewLine => "bare CR in the head; expected CRLF",
        httparse::Error::Status => "malformed status code; expected three digits",
        httparse::Error::Version => "HTTP version is not 1.0 or 1.1",
        httparse::Error::Token => "malformed start line; expected three parts with one space between them",
        httparse::Error::TooManyHeaders => "more than 128 header fields",
    }
}

/// Classifies the fields into `fields`; returns which kinds there are, one bit each.
fn take_fields(
    buf: &[u8],
    lines: &[httparse::Header<'_>],
    router_prefix: &[u8],
    fields: &mut Vec<Field>,
) -> u32 {
    fields.clear();
    let mut seen = 0;
    for line in lines {
        let kind = field::classify(line.name.as_bytes(), router_prefix);
        seen |= kind.bit();
        fields.push(Field {
            name: Span::within(buf, line.name.as_bytes()),
            value: Span::within(buf, line.value),
            kind,
        });
    }
    seen
}

/// Tells the target's form and finds its parts.
fn take_target(method: &[u8], target: &[u8], head: &mut RequestHead) -> Result<(), &'static str> {
    if method == b"CONNECT" {
        return Err("CONNECT is not served: this router is no tunnel");
    }
    // No early exit, so that the loop runs over whole vectors.
    let wrong = target.iter().fold(false, |wrong, &b| wrong | !b.is_ascii_graphic() | (b == b'#'));
    if wrong {
        return Err("request target holds a byte that must be percent-encoded");
    }
    head.authority = None;
    head.path_and_query = head.target;
    if target[0] == b'/' {
        return Ok(());
    }
    if target == b"*" {
        return if head.method == Method::Options { Ok(()) } else { Err("target `*` is for OPTIONS only") };
    }
    let scheme = [&b"http://"[..], b"https://"]
        .into_iter()
        .find(|s| target.len() >= s.len() && target[..s.len()].eq_ignore_ascii_case(s));
    let Some(scheme) = scheme else {
        return Err("request target is neither a path that begins with / nor an absolute http URL");
    };
    let rest = &target[scheme.len()..];
    let authority_len = rest.iter().position(|b| matches!(b, b'/' | b'?')).unwrap_or(rest.len());
    if authority_len == 0 || !is_authority(&rest[..authority_len]) {
        return Err("malformed host in an absolute request target");
    }
    let authority_start = head.target.start as usize + scheme.len();
    let path_start = authority_start + authority_len;
    head.authority = Some(Span::new(authority_start, path_start));
    head.path_and_query = Span::new(path_start, head.target.end as usize);
    Ok(())
}

/// Host and port, without user information. Tells what could not be one; does not resolve anything.
fn is_authority(host: &[u8]) -> bool {
    host.iter().all(|&b| b.is_ascii_alphanumeric() || b"-._~%!$&'()*+;=:[]".contains(&b))
}

/// What the fields say together: framing, connection, Host, Expect.
fn finish_request(buf: &[u8], seen: u32, head: &mut RequestHead) -> Result<(), &'static str> {
    let words = if seen & FieldKind::Connection.bit() != 0 {
        field::apply_connection(buf, &mut head.fields)?
    } else {
        field::ConnectionWords::default()
    };
    head.framing = framing::request_framing(buf, head.minor, seen, &head.fields)?;
    head.keep_alive = keep_alive(head.minor, words);
    head.host = None;
    head.content_type = None;
    head.content_encoding = None;
    head.expect_continue = false;
    for f in &head.fields {
        match f.kind {
            FieldKind::Host => {
                if head.host.is_some() {
                    return Err("more than one Host field");
                }
                if !is_authority(f.value.of(buf)) {
                    return Err("malformed Host; expected host or host:port");
                }
                head.host = Some(f.value);
            }
            FieldKind::Expect => {
                if !f.value.of(buf).eq_ignore_ascii_case(b"100-continue") {
                    return Err("unknown expectation; only 100-continue is known");
                }
                let has_body = !matches!(head.framing, Framing::None | Framing::Length(0));
                head.expect_continue = head.minor == 1 && has_body;
            }
            FieldKind::ContentType if head.content_type.is_none() => head.content_type = Some(f.value),
            FieldKind::ContentEncoding if head.content_encoding.is_none() => {
                head.content_encoding = Some(f.value);
            }
            _ => {}
        }
    }
    if head.host.is_none() && head.minor == 1 {
        return Err("missing Host field, which HTTP/1.1 requires");
    }
    Ok(())
}

fn finish_response(
    buf: &[u8],
    seen: u32,
    method: Method,
    head: &mut ResponseHead,
) -> Result<(), &'static str> {
    let words = if seen & FieldKind::Connection.bit() != 0 {
        field::apply_connection(buf, &mut head.fields)?
    } else {
        field::ConnectionWords::default()
    };
    let framed = framing::response_framing(buf, head.minor, head.status, method, seen, &head.fields)?;
    head.framing = framed.framing;
    head.keep_alive = framed.reusable && keep_alive(head.minor, words);
    head.content_type = first(&head.fields, FieldKind::ContentType);
    head.content_encoding = first(&head.fields, FieldKind::ContentEncoding);
    head.is_event_stream = head.content_type.is_some_and(|span| {
        let value = span.of(buf);
        let end = memchr::memchr(b';', value).unwrap_or(value.len());
        value[..end].trim_ascii_end().eq_ignore_ascii_case(b"text/event-stream")
    });
    Ok(())
}

/// RFC 9112 section 9.3: 1.1 stays unless it says close, 1.0 goes unless it says keep-alive.
fn keep_alive(minor: u8, words: field::ConnectionWords) -> bool {
    !words.close && (minor == 1 || words.keep_alive)
}

#[cfg(test)]
mod tests;
