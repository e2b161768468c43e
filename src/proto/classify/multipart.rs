//! Finds the `model` and `stream` fields of a `multipart/form-data` body (audio transcription, file uploads).
//!
//! *Invariant*: only a part's own headers name it: neither file content nor a file's name can pass for a field. Of a
//! repeated field the last counts.
//! *Bound and cost*: O(bytes), one SIMD search for the delimiter; no allocation.
//! *Errors*: none. Without a usable boundary nothing is reported; what a body that breaks off had named stays, with
//! `complete` false.
//! *Source*: RFC 7578; RFC 2046 section 5.1.1.

use std::borrow::Cow;

use memchr::memmem;

use super::Peek;

/// Longest boundary (RFC 2046 section 5.1.1), in bytes.
const BOUNDARY_BYTES_MAX: usize = 70;
/// Longest header block of a part; behind a longer one nothing is read, in bytes.
const PART_HEAD_BYTES_MAX: usize = 16 * 1024;

/// Reads a form body, or the beginning of one. `content_type` is the value of the request's `Content-Type`; nothing is
/// reported unless it is `multipart/form-data`.
pub fn peek_multipart<'a>(content_type: &[u8], body: &'a [u8]) -> Peek<'a> {
    let mut found = Peek::default();
    if let Some(boundary) = boundary(content_type) {
        // The only `None` inside is "the body ends here".
        let _ = walk(boundary, body, &mut found);
    }
    found
}

/// The boundary of a `multipart/form-data` type.
fn boundary(content_type: &[u8]) -> Option<&[u8]> {
    let (kind, parameters) = content_type.split_at(content_type.iter().position(|b| *b == b';')?);
    if !kind.trim_ascii().eq_ignore_ascii_case(b"multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, b"boundary")?;
    // A quoted boundary with escapes is legal and unheard of.
    let usable = (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len()) && !boundary.contains(&b'\\');
    usable.then_some(boundary)
}

/// The value of a parameter in `; a=b; c="d"`, without its quotes. Quoted values are stepped over whole.
fn parameter<'a>(mut rest: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    loop {
        rest = rest.trim_ascii_start().strip_prefix(b";")?.trim_ascii_start();
        let name_end = rest.iter().position(|b| matches!(b, b'=' | b';')).unwrap_or(rest.len());
        let name = rest[..name_end].trim_ascii();
        rest = &rest[name_end..];
        let Some(value) = rest.strip_prefix(b"=") else { continue };
        let value = value.trim_ascii_start();
        let (text, behind) = match value.strip_prefix(b"\"") {
            Some(quoted) => {
                let end = quote_end(quoted)?;
                (&quoted[..end], &quoted[end + 1..])
            }
            None => {
                let end = value.iter().position(|b| *b == b';').unwrap_or(value.len());
                (value[..end].trim_ascii_end(), &value[end..])
            }
        };
        if name.eq_ignore_ascii_case(wanted) {
            return Some(text);
        }
        rest = behind;
    }
}

/// Where the closing quote is; `\"` and `\\` are inside. (Browsers write a backslash of a file name as it is, so that
/// one before any other byte is just a byte.)
fn quote_end(quoted: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        match quoted.get(at..)? {
            [b'\\', b'"' | b'\\', ..] => at += 2,
            [b'"', ..] => return Some(at),
            _ => at += 1,
        }
    }
}

/// `None`: the body broke off.
fn walk<'a>(boundary: &[u8], body: &'a [u8], found: &mut Peek<'a>) -> Option<()> {
    let mut delimiter = [0; 4 + BOUNDARY_BYTES_MAX];
    let delimiter = &mut delimiter[..4 + boundary.len()];
    delimiter[..4].copy_from_slice(b"\r\n--");
    delimiter[4..].copy_from_slice(boundary);
    let finder = memmem::Finder::new(&*delimiter);

    // The first delimiter may stand at the very beginning, without its line break.
    let mut at = match body.strip_prefix(&delimiter[2..]) {
        Some(_) => delimiter.len() - 2,
        None => finder.find(body)? + delimiter.len(),
    };
    // Field of the part that the delimiter at hand ends, and where its content began.
    let mut part: Option<(Field, usize)> = None;
    loop {
        let behind = body.get(at..)?;
        let closes = behind.starts_with(b"--");
        let line = behind.iter().position(|b| !matches!(b, b' ' | b'\t'))?;
        if !closes && !behind[line..].starts_with(b"\r\n") {
            if behind.len() < line + 2 {
                return None;
            }
            // A longer word that begins like the boundary: content.
            at += finder.find(behind)? + delimiter.len();
            continue;
        }
        if let Some((field, start)) = part.take() {
            // A part without content shares its line break with the delimiter.
            let value = body.get(start..at - delimiter.len()).unwrap_or_default();
            match field {
                Field::Model => found.model = Some(Cow::Borrowed(value)),
                Field::Stream => {
                    found.stream = match value {
                        b"true" | b"True" | b"1" => Some(true),
                        b"false" | b"False" | b"0" => Some(false),
                        _ => None,
                    }
                }
                Field::Other => {}
            }
        }
        if closes {
            found.complete = true;
            return Some(());
        }
        // The line break behind the delimiter counts as the one in front of the empty line, for parts without headers.
        let head_start = at + line;
        let head_end_max = body.len().min(head_start + PART_HEAD_BYTES_MAX);
        let head = memmem::find(&body[head_start..head_end_max], b"\r\n\r\n")?;
        let content = head_start + head + 4;
        part = Some((field(&body[head_start..head_start + head]), content));
        // From the empty line's own break, which an empty part shares with its delimiter.
        let from = content - 2;
        at = from + finder.find(&body[from..])? + delimiter.len();
    }
}

#[derive(Clone, Copy)]
enum Field {
    Model,
    Stream,
    Other,
}

/// Which field a part is, from its headers.
fn field(head: &[u8]) -> Field {
    let lines = head.split(|b| *b == b'\n').map(<[u8]>::trim_ascii);
    for line in lines {
        let Some(colon) = line.iter().position(|b| *b == b':') else { continue };
        if !line[..colon].trim_ascii().eq_ignore_ascii_case(b"content-disposition") {
            continue;
        }
        let value = line[colon + 1..].trim_ascii();
        let (kind, parameters) = value.split_at(value.iter().position(|b| *b == b';').unwrap_or(value.len()));
        // A file is never a plain field, whatever its name.
        if !kind.trim_ascii().eq_ignore_ascii_case(b"form-data")
            || parameter(parameters, b"filename").is_some()
        {
            return Field::Other;
        }
        return match parameter(parameters, b"name") {
            Some(b"model") => Field::Model,
            Some(b"stream") => Field::Stream,
            _ => Field::Other,
        };
    }
    Field::Other
}

#[cfg(test)]
mod tests;
