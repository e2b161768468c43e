//! HTTP/1.1 heads and framing, without I/O: bytes in, decisions out.
//!
//! * [`parse_request`], [`parse_response`]: one head in a buffer that grows, into a reusable [`RequestHead`] or
//!   [`ResponseHead`]. Spans into the buffer, no copies.
//! * [`Framing`]: where the body ends; one function per direction decides it, from the head alone.
//! * [`BodyReader`]: follows a body through the bytes that arrive, for verbatim pass-through ([`BodyReader::advance`]) or
//!   for re-framing ([`BodyReader::decode`]).
//! * [`encode_request`], [`encode_response`]: the head for the other side, hop-by-hop fields removed, framing our own.
//!
//! *Invariant*: any split of the same bytes gives the same result. What is doubtful is refused, never guessed: two
//! readers of one message must not see two different ends of it.
//! *Bound and cost*: a head that is there whole costs one pass, well under a microsecond; one that comes in pieces a second
//! one, however many the pieces. Nothing is allocated once the reused structures have grown.
//! *Errors*: [`HeadError`] names the status and what was wrong; [`ResponseError`] and [`ChunkError`] the latter.
//! *Source*: RFC 9110 sections 6.5, 7.6, 10.1; RFC 9112 sections 2 to 9.

pub mod chunked;
pub mod encode;
pub mod field;
pub mod framing;
pub mod head;
mod lines;
pub mod scan;

pub use chunked::{ChunkError, ChunkedDecoder};
pub use encode::{
    Contract, Credentials, LAST_CHUNK, RequestRewrite, ResponseRewrite, encode_request, encode_response,
    push_chunk_header, push_last_chunk,
};
pub use field::{Field, FieldKind, Span};
pub use framing::{Advance, BodyReader, Decoded, Framing, downstream_framing};
pub use head::{
    HeadError, Method, Parse, RequestHead, ResponseError, ResponseHead, parse_request, parse_response,
};
pub use scan::{HeadLimits, HeadScan};
