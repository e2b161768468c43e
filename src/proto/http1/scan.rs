//! Finds the blank line that ends a head in a buffer that grows.
//!
//! *Invariant*: each byte is searched once, however the head arrives. The verdict depends on the bytes alone, not on how
//! they were split: a limit is a position, and the checks on the first bytes come before the search.
//! *Bound and cost*: O(head) over all calls together; [`METHOD_BYTES_MAX`] bytes at most are looked at twice.
//! *Errors*: what cannot become a request is refused at its first wrong byte, so that a TLS or HTTP/2 client hears why at
//! once instead of waiting for a timeout.
//! *Source*: RFC 9112 sections 2.2, 3; RFC 9113 section 3.4 (the HTTP/2 preface).

use super::field::is_token_byte;
use super::head::{HeadError, ResponseError};
use super::lines::find;
use crate::limits::TARGET_BYTES_MAX;

/// Longest method name.
pub const METHOD_BYTES_MAX: usize = 32;
/// Empty lines tolerated before a request line, in bytes. Some clients send one after a body.
pub const LEADING_CRLF_BYTES_MAX: usize = 8;
/// What a request line holds besides its target: method, two spaces, version, CRLF.
const LINE_REST_BYTES_MAX: usize = METHOD_BYTES_MAX + 12;

/// The first bytes of every HTTP/2 connection.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// Bounds of a head, and the name prefix that marks the router's own fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadLimits {
    /// Bytes of a head with its blank line.
    pub head_bytes_max: u32,
    /// Bytes of a request target.
    pub target_bytes_max: u32,
    /// Such as `X-Lifeboat-`; empty: no field is [`super::FieldKind::RouterOwn`].
    pub router_prefix: Box<[u8]>,
    /// Fields that `Connection` nominates go on all the same, as the Stargate contract has it.
    pub nominations_void: bool,
}

impl HeadLimits {
    /// `head_bytes_max` in bytes; the target's limit is [`TARGET_BYTES_MAX`].
    pub fn new(head_bytes_max: u32, router_prefix: &[u8]) -> HeadLimits {
        HeadLimits {
            head_bytes_max,
            target_bytes_max: TARGET_BYTES_MAX as u32,
            router_prefix: router_prefix.into(),
            nominations_void: false,
        }
    }
}

/// How far a head was searched. Starts anew ([`Default`]) with each head and lives as long as the head's buffer grows;
/// a complete head resets it.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeadScan {
    /// Bytes of empty lines before the head.
    start: u32,
    /// Bytes searched.
    searched: u32,
    /// Where the line being searched begins.
    line_start: u32,
    start_checked: bool,
    first_line_done: bool,
}

/// Why no head can come of these bytes.
enum Fault {
    BareLf,
    LineTooLong,
    HeadTooLong,
}

impl HeadScan {
    /// Nothing but the start was looked at yet: no search has begun that would have to be gone on with.
    #[inline]
    pub(super) fn is_fresh(&self) -> bool {
        self.searched == self.start
    }

    /// Where the request head in `buf` begins, or `None` while that cannot be told.
    #[inline]
    pub(super) fn request_start(&mut self, buf: &[u8]) -> Result<Option<usize>, HeadError> {
        let known = self.start_checked || self.check_request_start(buf)?;
        Ok(known.then_some(self.start as usize))
    }

    /// Looks at the first bytes of the response head in `buf`, which begins at its first byte.
    #[inline]
    pub(super) fn check_response_start(&mut self, buf: &[u8]) -> Result<(), ResponseError> {
        const START: &[u8; 7] = b"HTTP/1.";
        if self.start_checked || buf.first_chunk() == Some(START) {
            self.start_checked = true;
        } else if buf.len() >= START.len() || buf != &START[..buf.len()] {
            return Err(ResponseError { what: "response does not begin with HTTP/1." });
        }
        Ok(())
    }

    /// Where the request head in `buf` ends, or `None` while its blank line is missing.
    #[cold]
    pub(super) fn request_end(
        &mut self,
        buf: &[u8],
        limits: &HeadLimits,
    ) -> Result<Option<usize>, HeadError> {
        let line_bytes_max = limits.target_bytes_max as usize + LINE_REST_BYTES_MAX;
        self.seek_end(buf, limits.head_bytes_max as usize, line_bytes_max).map_err(|fault| match fault {
            Fault::BareLf => HeadError::bad("line ends in a bare LF; expected CRLF"),
            Fault::LineTooLong => HeadError::uri_too_long(),
            Fault::HeadTooLong => HeadError::too_large("request head is over the size limit"),
        })
    }

    /// Where the response head in `buf` ends, or `None` while its blank line is missing.
    #[cold]
    pub(super) fn response_end(
        &mut self,
        buf: &[u8],
        limits: &HeadLimits,
    ) -> Result<Option<usize>, ResponseError> {
        self.seek_end(buf, limits.head_bytes_max as usize, usize::MAX).map_err(|fault| ResponseError {
            what: match fault {
                Fault::BareLf => "response line ends in a bare LF; expected CRLF",
                Fault::LineTooLong | Fault::HeadTooLong => "response head is over the size limit",
            },
        })
    }

    /// Skips empty lines and looks at the method. False: more bytes are needed to tell.
    fn check_request_start(&mut self, buf: &[u8]) -> Result<bool, HeadError> {
        loop {
            match buf[self.start as usize..] {
                [b'\r', b'\n', ..] => {
                    self.start += 2;
                    if self.start as usize > LEADING_CRLF_BYTES_MAX {
                        return Err(HeadError::bad("more than 4 empty lines before the request line"));
                    }
                }
                [b'\r'] | [] => return Ok(false),
                [b'\r', ..] => return Err(HeadError::bad("bare CR before the request line")),
                [b'\n', ..] => return Err(HeadError::bad("bare LF before the request line")),
                // Handshake record of TLS 1.x.
                [0x16, ..] => {
                    return Err(HeadError::bad("TLS on a plain HTTP listener; use http:// for this address"));
                }
                [..] => break,
            }
        }
        let line = &buf[self.start as usize..];
        let begin = &line[..line.len().min(METHOD_BYTES_MAX + 1)];
        let end = find(begin, 0, |b| !is_token_byte(b));
        if end == begin.len() {
            if line.len() > METHOD_BYTES_MAX {
                return Err(HeadError::bad("method is longer than 32 bytes"));
            }
            return Ok(false);
        }
        if end == 0 || line[end] != b' ' {
            return Err(HeadError::bad("not an HTTP request line; expected a method followed by one space"));
        }
        let n = line.len().min(HTTP2_PREFACE.len());
        // (The method is complete: three bytes tell most others from it.)
        if line.starts_with(b"PRI") && line[..n] == HTTP2_PREFACE[..n] {
            if n < HTTP2_PREFACE.len() {
                return Ok(false);
            }
            return Err(HeadError::bad("HTTP/2 without TLS is not offered; use HTTP/1.1"));
        }
        self.start_checked = true;
        self.searched = self.start;
        self.line_start = self.start;
        Ok(true)
    }

    fn seek_end(
        &mut self,
        buf: &[u8],
        head_bytes_max: usize,
        line_bytes_max: usize,
    ) -> Result<Option<usize>, Fault> {
        let start = self.start as usize;
        let limit = buf.len().min(head_bytes_max);
        let mut searched = self.searched as usize;
        let mut line_start = self.line_start as usize;
        while let Some(i) = memchr::memchr(b'\n', buf.get(searched..limit).unwrap_or_default()) {
            let lf = searched + i;
            if !self.first_line_done && lf + 1 - start > line_bytes_max {
                return Err(Fault::LineTooLong);
            }
            if lf == line_start || buf[lf - 1] != b'\r' {
                return Err(Fault::BareLf);
            }
            searched = lf + 1;
            if lf - line_start == 1 {
                *self = HeadScan::default();
                return Ok(Some(searched));
            }
            self.first_line_done = true;
            line_start = searched;
        }
        if !self.first_line_done && limit - start.min(limit) > line_bytes_max {
            return Err(Fault::LineTooLong);
        }
        if limit == head_bytes_max {
            return Err(Fault::HeadTooLong);
        }
        self.searched = limit as u32;
        self.line_start = line_start as u32;
        Ok(None)
    }
}
