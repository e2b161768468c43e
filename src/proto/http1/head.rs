//! Request and response heads: parsed once, strictly, into reusable structures of spans.
//!
//! A head that is there whole, as nearly all are, is split and classified in one walk (`lines`), and one function per
//! direction decides the framing. Where that walk meets the end of the bytes or anything wrong, [`HeadScan`] takes over: it
//! searches each further byte once for the blank line, says what is wrong with the line ends first, and only a head
//! with its blank line is walked again. So the verdict is the search's, then the walk's, however the bytes arrived.
//!
//! *Invariant*: a head that is accepted has one reading. Refused are: bare CR or LF, folded lines, white space
//! before a colon, controls, a missing or repeated Host, any length that is not one plain number, a length beside a
//! transfer coding, any coding but one `chunked`, a coding in HTTP/1.0, CONNECT, and 101 (the router never asks for an
//! upgrade, so that nothing can tunnel through it).
//! *Bound and cost*: 128 fields, [`HeadLimits`] bytes; O(head), at most two walks and one search; no allocation once
//! `fields` has grown.
//! *Source*: RFC 9112 sections 3, 4, 5, 6, 9.3; RFC 9110 sections 7.2, 10.1.1.

use super::field::{self, Field, FieldKind, Span, is};
use super::framing::{self, Framing};
use super::lines::{self, Fault, Seen};
use super::scan::{HeadLimits, HeadScan};
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
    /// Has the fields of that name count as the router's own, which do not go on to a client that is no router: it says itself
    /// what they say.
    pub fn claim(&mut self, buf: &[u8], name: &[u8]) {
        for field in &mut self.fields {
            if field.kind == FieldKind::Other && field.name.of(buf).eq_ignore_ascii_case(name) {
                field.kind = FieldKind::RouterOwn;
            }
        }
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
    let Some(start) = scan.request_start(buf)? else { return Ok(Parse::Partial) };
    if scan.is_fresh() && read_request(within(buf, limits), start, limits, head).is_ok() {
        *scan = HeadScan::default();
        return Ok(Parse::Complete);
    }
    let Some(end) = scan.request_end(buf, limits)? else { return Ok(Parse::Partial) };
    match read_request(&buf[..end], start, limits, head) {
        Ok(()) => Ok(Parse::Complete),
        Err(Refusal::Head(error)) => Err(error),
        Err(Refusal::Line(Fault::Bad(what))) => Err(HeadError::bad(what)),
        Err(Refusal::Line(Fault::Unfinished)) => Err(HeadError::bad("malformed request head")),
        Err(Refusal::Line(Fault::TooManyFields)) => Err(HeadError::too_large("more than 128 header fields")),
    }
}

/// What of `buf` a head may be made of.
fn within<'b>(buf: &'b [u8], limits: &HeadLimits) -> &'b [u8] {
    &buf[..buf.len().min(limits.head_bytes_max as usize)]
}

/// Why a walk over a head came to no good end.
enum Refusal {
    Line(Fault),
    Head(HeadError),
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        Refusal::Line(fault)
    }
}

impl From<&'static str> for Refusal {
    fn from(what: &'static str) -> Refusal {
        Refusal::Head(HeadError::bad(what))
    }
}

/// Walks over the request head that begins at `start`.
#[inline]
fn read_request(
    buf: &[u8],
    start: usize,
    limits: &HeadLimits,
    head: &mut RequestHead,
) -> Result<(), Refusal> {
    let line = lines::request_line(buf, start)?;
    head.minor = line.minor;
    head.method_span = line.method;
    head.method = Method::of(line.method.of(buf));
    head.target = line.target;
    if line.target.len() > limits.target_bytes_max as usize {
        return Err(Refusal::Head(HeadError::uri_too_long()));
    }
    take_target(line.method.of(buf), line.target.of(buf), head)?;
    let mut seen = Seen::default();
    head.head_len = lines::field_lines(buf, line.end, &limits.router_prefix, &mut head.fields, &mut seen)?;
    Ok(finish_request(buf, &seen, limits.nominations_void, head)?)
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
    scan.check_response_start(buf)?;
    if scan.is_fresh() && read_response(within(buf, limits), limits, method, head).is_ok() {
        *scan = HeadScan::default();
        return Ok(Parse::Complete);
    }
    let Some(end) = scan.response_end(buf, limits)? else { return Ok(Parse::Partial) };
    let what = match read_response(&buf[..end], limits, method, head) {
        Ok(()) => return Ok(Parse::Complete),
        Err(Fault::Bad(what)) => what,
        Err(Fault::Unfinished) => "malformed response head",
        Err(Fault::TooManyFields) => "more than 128 response header fields",
    };
    Err(ResponseError { what })
}

/// Walks over the response head at the start of `buf`.
#[inline]
fn read_response(
    buf: &[u8],
    limits: &HeadLimits,
    method: Method,
    head: &mut ResponseHead,
) -> Result<(), Fault> {
    let line = lines::status_line(buf)?;
    match line.status {
        ..=99 => return Err(Fault::Bad("status below 100")),
        101 => return Err(Fault::Bad("101 Switching Protocols, but no upgrade was asked for")),
        _ => {}
    }
    head.status = line.status;
    head.minor = line.minor;
    head.reason = line.reason;
    let mut seen = Seen::default();
    head.head_len = lines::field_lines(buf, line.end, &limits.router_prefix, &mut head.fields, &mut seen)?;
    finish_response(buf, &seen, limits.nominations_void, method, head).map_err(Fault::Bad)
}

/// Tells the target's form and finds its parts.
fn take_target(method: &[u8], target: &[u8], head: &mut RequestHead) -> Result<(), &'static str> {
    if method == b"CONNECT" {
        return Err("CONNECT is not served: this router is no tunnel");
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
    lines::find(host, 0, |b| !field::is_authority_byte(b)) == host.len()
}

/// What the fields say together: framing, connection, Host, Expect.
fn finish_request(
    buf: &[u8],
    seen: &Seen,
    nominations_void: bool,
    head: &mut RequestHead,
) -> Result<(), &'static str> {
    let words = connection(buf, seen, nominations_void, &mut head.fields)?;
    head.framing = framing::request_framing(buf, head.minor, seen, &head.fields)?;
    head.keep_alive = keep_alive(head.minor, words);
    head.content_type = seen.first(FieldKind::ContentType, &head.fields);
    head.content_encoding = seen.first(FieldKind::ContentEncoding, &head.fields);
    head.host = seen.first(FieldKind::Host, &head.fields);
    match head.host {
        Some(_) if seen.is_repeated(FieldKind::Host) => return Err("more than one Host field"),
        Some(host) if !is_authority(host.of(buf)) => {
            return Err("malformed Host; expected host or host:port");
        }
        None if head.minor == 1 => return Err("missing Host field, which HTTP/1.1 requires"),
        _ => {}
    }
    head.expect_continue = false;
    if seen.has(FieldKind::Expect) {
        let mut all = head.fields.iter().filter(|f| f.kind == FieldKind::Expect);
        if !all.all(|f| is(f.value.of(buf), b"100-continue")) {
            return Err("unknown expectation; only 100-continue is known");
        }
        let has_body = !matches!(head.framing, Framing::None | Framing::Length(0));
        head.expect_continue = head.minor == 1 && has_body;
    }
    Ok(())
}

fn finish_response(
    buf: &[u8],
    seen: &Seen,
    nominations_void: bool,
    method: Method,
    head: &mut ResponseHead,
) -> Result<(), &'static str> {
    let words = connection(buf, seen, nominations_void, &mut head.fields)?;
    let framed = framing::response_framing(buf, head.minor, head.status, method, seen, &head.fields)?;
    head.framing = framed.framing;
    head.keep_alive = framed.reusable && keep_alive(head.minor, words);
    head.content_type = seen.first(FieldKind::ContentType, &head.fields);
    head.content_encoding = seen.first(FieldKind::ContentEncoding, &head.fields);
    head.is_event_stream = head.content_type.is_some_and(|span| is_event_stream(span.of(buf)));
    Ok(())
}

/// The media type is `text/event-stream`, with parameters or without.
fn is_event_stream(content_type: &[u8]) -> bool {
    const NAME: &[u8; 17] = b"text/event-stream";
    content_type.split_at_checked(NAME.len()).is_some_and(|(name, rest)| {
        is(name, NAME) && matches!(rest.trim_ascii_start().first(), None | Some(b';'))
    })
}

/// Reads `Connection`, if there is one. What it nominates is in `fields` afterwards, and never of a kind that is asked of
/// `seen`.
fn connection(
    buf: &[u8],
    seen: &Seen,
    nominations_void: bool,
    fields: &mut [Field],
) -> Result<field::ConnectionWords, &'static str> {
    if !seen.has(FieldKind::Connection) {
        return Ok(field::ConnectionWords::default());
    }
    field::apply_connection(buf, seen.places(FieldKind::Connection, fields), fields, nominations_void)
}

/// RFC 9112 section 9.3: 1.1 stays unless it says close, 1.0 goes unless it says keep-alive.
fn keep_alive(minor: u8, words: field::ConnectionWords) -> bool {
    !words.close && (minor == 1 || words.keep_alive)
}

#[cfg(test)]
mod tests;
