//! Decodes a compressed request body, for routing only: the engine gets the bytes as they came.
//!
//! One content coding of gzip (`x-gzip`), deflate (with zlib's wrapper, as it should be, or without), zstd and br is known.
//!
//! *Invariant*: never more than `content_bytes_max` bytes come out, and what comes out is the beginning of the content.
//! *Bound and cost*: input: what is in hand, each byte once. Output: `content_bytes_max`, and for zstd at most the window of
//! 8 MiB more, which a decoder must keep before it lets go. Memory: the window (zstd 8 MiB at most, br 16 MiB, gzip and
//! deflate 32 KiB), for the duration of the call. Decoders run at a few hundred megabytes of content per second.
//! *Errors*: [`Decoded::Unreadable`], at the first byte that is wrong: unknown or stacked codings, corrupt data, larger
//! windows, dictionaries, a body that is whole and yet breaks off, bytes behind the end (of br they are not looked at). What
//! breaks off with more to come may be sense or nonsense: the decoder has not met its checksum yet.
//! *Source*: RFC 9110 section 8.4.1; RFC 1951, 1950, 1952 (deflate, zlib, gzip); RFC 8878 and 9659 (zstd, and its window as a
//! content coding); RFC 7932 (Brotli).

use std::io::{BufRead, Error, Read};

use brotli_decompressor::{BrotliDecoderParameter, Decompressor};
use flate2::bufread::{DeflateDecoder, GzDecoder, ZlibDecoder};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Largest zstd window, in bytes: what RFC 9659 allows as a content coding.
const ZSTD_WINDOW_BYTES_MAX: u64 = 8 << 20;
/// Most members of one gzip body, and frames of one zstd body; encoders write one, parallel ones a few.
const GZIP_MEMBERS_MAX: usize = 64;
const ZSTD_FRAMES_MAX: usize = 64;
/// Bytes read ahead by the Brotli decoder.
const BROTLI_BUFFER_BYTES: usize = 4096;

/// What came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// The body is not encoded (`identity`, or no coding): it is its own content, and nothing was written.
    Plain,
    /// The whole content.
    Complete,
    /// The beginning of the content: it is longer than the bound, or the body goes on.
    Truncated,
    /// No content; nothing was written.
    Unreadable,
}

/// Decodes `body`, of which `whole` says whether it is all there, into `out`, which is cleared first.
///
/// `encoding` is the value of `Content-Encoding`; at most `content_bytes_max` bytes are written.
pub fn decode(
    encoding: &[u8],
    body: &[u8],
    whole: bool,
    content_bytes_max: usize,
    out: &mut Vec<u8>,
) -> Decoded {
    out.clear();
    let encoding = encoding.trim_ascii();
    let is = |name: &[u8]| encoding.eq_ignore_ascii_case(name);
    let mut source = Source { rest: body, dry: false };
    let outcome = if encoding.is_empty() || is(b"identity") {
        return Decoded::Plain;
    } else if is(b"gzip") || is(b"x-gzip") {
        gzip(&mut source, content_bytes_max, out)
    } else if is(b"deflate") {
        // The first two bytes of zlib's wrapper are a multiple of 31 and say "deflate" in the low half of the first.
        match body {
            [first, second, ..]
                if first & 15 == 8 && u16::from_be_bytes([*first, *second]).is_multiple_of(31) =>
            {
                bounded(ZlibDecoder::new(&mut source), content_bytes_max, out)
            }
            _ => bounded(DeflateDecoder::new(&mut source), content_bytes_max, out),
        }
    } else if is(b"br") {
        let mut decoder = Decompressor::new(&mut source, BROTLI_BUFFER_BYTES);
        // Windows beyond RFC 7932's 16 MiB.
        decoder.set_parameter(BrotliDecoderParameter::BROTLI_DECODER_PARAM_LARGE_WINDOW, 0);
        bounded(decoder, content_bytes_max, out)
    } else if is(b"zstd") {
        zstd(&mut source, content_bytes_max, out)
    } else {
        Err(Fault)
    };
    match outcome {
        Ok(End::Bound) => Decoded::Truncated,
        Ok(End::Content) if source.rest.is_empty() => Decoded::Complete,
        // Broken off, and rightly so.
        Err(Fault) if source.dry && !whole => Decoded::Truncated,
        _ => {
            out.clear();
            Decoded::Unreadable
        }
    }
}

/// Why decoding ended.
enum End {
    /// The content is all there.
    Content,
    /// The bound is reached.
    Bound,
}

/// The data are corrupt, or break off; [`Source::dry`] tells.
struct Fault;

impl From<Error> for Fault {
    fn from(_: Error) -> Fault {
        Fault
    }
}

/// The body, and whether a decoder asked for more of it than there is.
struct Source<'a> {
    rest: &'a [u8],
    dry: bool,
}

impl Read for Source<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        self.dry |= self.rest.is_empty() && !buffer.is_empty();
        self.rest.read(buffer)
    }
}

impl BufRead for Source<'_> {
    fn fill_buf(&mut self) -> Result<&[u8], Error> {
        self.dry |= self.rest.is_empty();
        Ok(self.rest)
    }

    fn consume(&mut self, amount: usize) {
        self.rest = &self.rest[amount..];
    }
}

/// Reads `decoder` to its end or the bound.
fn bounded(decoder: impl Read, content_bytes_max: usize, out: &mut Vec<u8>) -> Result<End, Fault> {
    // One more tells content of just the bound from longer.
    let left = (content_bytes_max - out.len()) as u64;
    let outcome = decoder.take(left + 1).read_to_end(out);
    if out.len() > content_bytes_max {
        out.truncate(content_bytes_max);
        return Ok(End::Bound);
    }
    outcome?;
    Ok(End::Content)
}

/// Member after member: each costs setting up a decoder, however little it holds.
fn gzip(source: &mut Source<'_>, content_bytes_max: usize, out: &mut Vec<u8>) -> Result<End, Fault> {
    for _ in 0..GZIP_MEMBERS_MAX {
        match bounded(GzDecoder::new(&mut *source), content_bytes_max, out)? {
            End::Content if !source.rest.is_empty() => {}
            end => return Ok(end),
        }
    }
    Err(Fault)
}

/// Frame after frame, skippable ones between them.
fn zstd(source: &mut Source<'_>, content_bytes_max: usize, out: &mut Vec<u8>) -> Result<End, Fault> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(ZSTD_WINDOW_BYTES_MAX);
    for index in 0..=ZSTD_FRAMES_MAX {
        let Some(magic) = source.rest.first_chunk::<4>() else {
            source.dry |= index == 0 || !source.rest.is_empty();
            return if source.dry { Err(Fault) } else { Ok(End::Content) };
        };
        if index == ZSTD_FRAMES_MAX {
            break;
        }
        if matches!(magic, [0x50..=0x5f, 0x2a, 0x4d, 0x18]) {
            let Some((head, rest)) = source.rest.split_first_chunk::<8>() else {
                source.dry = true;
                return Err(Fault);
            };
            let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
            source.rest = rest.get(length as usize..).unwrap_or_else(|| {
                source.dry = true;
                &[]
            });
            if source.dry {
                return Err(Fault);
            }
            continue;
        }
        if let End::Bound = zstd_frame(&mut decoder, source, content_bytes_max, out)? {
            return Ok(End::Bound);
        }
    }
    Err(Fault)
}

fn zstd_frame(
    decoder: &mut FrameDecoder,
    source: &mut Source<'_>,
    content_bytes_max: usize,
    out: &mut Vec<u8>,
) -> Result<End, Fault> {
    decoder.init(&mut *source).map_err(|_| Fault)?;
    loop {
        let left = content_bytes_max - out.len();
        if bounded_rest(decoder, left, out)? {
            return Ok(End::Bound);
        }
        if decoder.is_finished() {
            let checked = match decoder.get_checksum_from_data() {
                Some(sum) => decoder.get_calculated_checksum() == Some(sum),
                None => true,
            };
            return if checked { Ok(End::Content) } else { Err(Fault) };
        }
        if !zstd_block_is_there(source.rest) {
            source.dry = true;
            // The decoder keeps its window until the frame ends: an empty last block, and a checksum nobody looks at,
            // make it let go of what it has.
            decoder
                .decode_blocks(&[1, 0, 0, 0, 0, 0, 0][..], BlockDecodingStrategy::UptoBlocks(1))
                .map_err(|_| Fault)?;
            let left = content_bytes_max - out.len();
            return if bounded_rest(decoder, left, out)? { Ok(End::Bound) } else { Err(Fault) };
        }
        decoder.decode_blocks(&mut *source, BlockDecodingStrategy::UptoBlocks(1)).map_err(|_| Fault)?;
    }
}

/// Takes what the decoder lets go of, at most `left` bytes; whether there was more.
fn bounded_rest(decoder: &mut FrameDecoder, left: usize, out: &mut Vec<u8>) -> Result<bool, Fault> {
    let ready = decoder.can_collect();
    let (start, some) = (out.len(), ready.min(left));
    out.resize(start + some, 0);
    decoder.read_exact(&mut out[start..])?;
    Ok(ready > left)
}

/// The next block is in hand to its end. Its header has three bytes: last or not, kind, size.
fn zstd_block_is_there(rest: &[u8]) -> bool {
    let Some((head, body)) = rest.split_first_chunk::<3>() else { return false };
    let head = u32::from_le_bytes([head[0], head[1], head[2], 0]);
    // A run is one byte, however long.
    let size = if head >> 1 & 3 == 1 { 1 } else { head as usize >> 3 };
    body.len() >= size
}

#[cfg(test)]
mod tests;
