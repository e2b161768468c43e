//! Just enough HTTP/1.1 for both ends of the bench: heads through httparse, body framing, chunked decoding in any split.
//!
//! *Invariant*: any split of the input gives the same result. Nothing is repaired: what is doubtful is a [`Fault`].
//! *Bound and cost*: heads up to [`HEAD_BYTES_MAX`]; a head that arrives whole is parsed in place, one that does not is
//! collected; bodies are handed on in pieces, never collected here.
//! *Errors*: [`Fault`], one kind per way in which an answer can be wrong.
//! *Source*: RFC 9112 sections 6 and 7.

/// Largest head accepted, in bytes.
pub const HEAD_BYTES_MAX: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;

/// A way for an exchange to be wrong. Each is counted under its [`Fault::kind`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection could not be made.
    Connect(String),
    /// Closed or reset before the answer was whole.
    Closed(String),
    /// Not HTTP, or framing that contradicts itself.
    Framing(String),
    /// Another status than expected.
    Status(u16),
    /// Another length than expected.
    Length { expected: usize, got: usize },
    /// Right length, wrong bytes; the offset of the first difference.
    Body { offset: usize },
    /// An event missing, repeated, out of order or altered.
    Event(String),
    /// Bytes after the answer's end, with no request open.
    Surplus,
    /// Still unfinished when the grace time after the window ended.
    Unfinished,
}

impl Fault {
    /// The name under which faults of this kind are counted.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Connect(_) => "connect",
            Fault::Closed(_) => "closed",
            Fault::Framing(_) => "framing",
            Fault::Status(_) => "status",
            Fault::Length { .. } => "length",
            Fault::Body { .. } => "body",
            Fault::Event(_) => "event",
            Fault::Surplus => "surplus",
            Fault::Unfinished => "unfinished",
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Connect(why) => write!(f, "connect failed: {why}"),
            Fault::Closed(why) => write!(f, "closed before the answer was whole: {why}"),
            Fault::Framing(why) => write!(f, "not a well-framed answer: {why}"),
            Fault::Status(status) => write!(f, "status {status}"),
            Fault::Length { expected, got } => write!(f, "body of {got} bytes, expected {expected}"),
            Fault::Body { offset } => write!(f, "body differs from byte {offset} on"),
            Fault::Event(why) => write!(f, "event stream: {why}"),
            Fault::Surplus => write!(f, "bytes after the end of the answer"),
            Fault::Unfinished => write!(f, "unfinished when the grace time ended"),
        }
    }
}

/// How a body ends.
#[derive(Debug)]
pub enum Framing {
    /// So many bytes still to come.
    Length(usize),
    Chunked(Chunked),
    /// At the end of the connection.
    Close,
}

impl Framing {
    /// Takes body bytes from `input`, handing them to `sink` in order. Returns how many were taken and whether the body is
    /// whole; all of `input` is taken unless the body ends within it.
    pub fn feed(&mut self, input: &[u8], sink: &mut impl FnMut(&[u8])) -> Result<(usize, bool), Fault> {
        match self {
            Framing::Length(left) => {
                let taken = input.len().min(*left);
                if taken > 0 {
                    sink(&input[..taken]);
                }
                *left -= taken;
                Ok((taken, *left == 0))
            }
            Framing::Chunked(decoder) => decoder.feed(input, sink),
            Framing::Close => {
                if !input.is_empty() {
                    sink(input);
                }
                Ok((input.len(), false))
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Size { digits: u8 },
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    TrailerStart,
    Trailer,
    TrailerLf,
    EndLf,
}

/// Incremental decoder of the chunked coding.
#[derive(Debug)]
pub struct Chunked {
    step: Step,
    left: u64,
}

impl Chunked {
    pub fn new() -> Chunked {
        Chunked { step: Step::Size { digits: 0 }, left: 0 }
    }

    fn feed(&mut self, input: &[u8], sink: &mut impl FnMut(&[u8])) -> Result<(usize, bool), Fault> {
        let mut at = 0;
        while at < input.len() {
            let byte = input[at];
            match self.step {
                Step::Data => {
                    let taken = (input.len() - at).min(usize::try_from(self.left).unwrap_or(usize::MAX));
                    sink(&input[at..at + taken]);
                    self.left -= taken as u64;
                    at += taken;
                    if self.left == 0 {
                        self.step = Step::DataCr;
                    }
                    continue;
                }
                Step::Size { digits } => match ((byte as char).to_digit(16), byte) {
                    (Some(digit), _) if digits < 15 => {
                        self.left = self.left * 16 + u64::from(digit);
                        self.step = Step::Size { digits: digits + 1 };
                    }
                    (None, b'\r') if digits > 0 => self.step = Step::SizeLf,
                    (None, b';') if digits > 0 => self.step = Step::Extension,
                    _ => return Err(framing("chunk size", byte)),
                },
                Step::Extension => {
                    if byte == b'\r' {
                        self.step = Step::SizeLf;
                    }
                }
                Step::SizeLf => {
                    expect(byte, b'\n', "after a chunk size")?;
                    self.step = if self.left == 0 { Step::TrailerStart } else { Step::Data };
                }
                Step::DataCr => {
                    expect(byte, b'\r', "after chunk data")?;
                    self.step = Step::DataLf;
                }
                Step::DataLf => {
                    expect(byte, b'\n', "after chunk data")?;
                    self.step = Step::Size { digits: 0 };
                }
                Step::TrailerStart => self.step = if byte == b'\r' { Step::EndLf } else { Step::Trailer },
                Step::Trailer => {
                    if byte == b'\r' {
                        self.step = Step::TrailerLf;
                    }
                }
                Step::TrailerLf => {
                    expect(byte, b'\n', "after a trailer")?;
                    self.step = Step::TrailerStart;
                }
                Step::EndLf => {
                    expect(byte, b'\n', "at the end of the body")?;
                    return Ok((at + 1, true));
                }
            }
            at += 1;
        }
        Ok((at, false))
    }
}

fn framing(place: &str, byte: u8) -> Fault {
    Fault::Framing(format!("{place}: unexpected byte 0x{byte:02x}"))
}

fn expect(byte: u8, wanted: u8, place: &str) -> Result<(), Fault> {
    if byte == wanted { Ok(()) } else { Err(framing(place, byte)) }
}

/// The parts of an answer's head that the bench looks at.
#[derive(Debug)]
pub struct ResponseHead {
    pub status: u16,
    pub framing: Framing,
    pub keep_alive: bool,
    pub content_type: String,
}

/// Parses an answer's head at the start of `input`: the head and its length, or `None` when more bytes are needed.
pub fn response_head(input: &[u8]) -> Result<Option<(ResponseHead, usize)>, Fault> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(input) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if input.len() > HEAD_BYTES_MAX => {
            return Err(Fault::Framing(format!("head longer than {HEAD_BYTES_MAX} bytes")));
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(Fault::Framing(format!("answer head: {error}"))),
    };
    let status = response.code.unwrap_or(0);
    let version_1_1 = response.version == Some(1);
    let fields = Fields::read(response.headers, version_1_1)?;
    let no_body = (100..200).contains(&status) || status == 204 || status == 304;
    let framing = match (no_body, fields.chunked, fields.length) {
        (true, ..) => Framing::Length(0),
        (_, true, None) => Framing::Chunked(Chunked::new()),
        (_, true, Some(_)) => return Err(Fault::Framing("both Content-Length and chunked".into())),
        (_, false, Some(length)) => Framing::Length(length),
        (_, false, None) => Framing::Close,
    };
    let keep_alive = fields.keep_alive && !matches!(framing, Framing::Close);
    Ok(Some((ResponseHead { status, framing, keep_alive, content_type: fields.content_type }, length)))
}

/// The parts of a request's head that the backend looks at.
#[derive(Debug)]
pub struct RequestHead {
    pub method: String,
    pub path: String,
    pub framing: Framing,
    pub keep_alive: bool,
    pub expect_continue: bool,
    /// Value of the recipe header.
    pub recipe: Option<String>,
}

/// Parses a request's head; as [`response_head`].
pub fn request_head(input: &[u8]) -> Result<Option<(RequestHead, usize)>, Fault> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(input) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if input.len() > HEAD_BYTES_MAX => {
            return Err(Fault::Framing(format!("head longer than {HEAD_BYTES_MAX} bytes")));
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(Fault::Framing(format!("request head: {error}"))),
    };
    let version_1_1 = request.version == Some(1);
    let fields = Fields::read(request.headers, version_1_1)?;
    let framing = match (fields.chunked, fields.length) {
        (true, None) => Framing::Chunked(Chunked::new()),
        (true, Some(_)) => return Err(Fault::Framing("both Content-Length and chunked".into())),
        (false, length) => Framing::Length(length.unwrap_or(0)),
    };
    let head = RequestHead {
        method: request.method.unwrap_or("").to_owned(),
        path: request.path.unwrap_or("").to_owned(),
        framing,
        keep_alive: fields.keep_alive,
        expect_continue: fields.expect_continue,
        recipe: fields.recipe,
    };
    Ok(Some((head, length)))
}

struct Fields {
    length: Option<usize>,
    chunked: bool,
    keep_alive: bool,
    expect_continue: bool,
    content_type: String,
    recipe: Option<String>,
}

impl Fields {
    fn read(headers: &[httparse::Header<'_>], version_1_1: bool) -> Result<Fields, Fault> {
        let mut fields = Fields {
            length: None,
            chunked: false,
            keep_alive: version_1_1,
            expect_continue: false,
            content_type: String::new(),
            recipe: None,
        };
        for header in headers {
            // Most names differ in length from the ones looked for, so the comparison is cheap.
            let name = header.name;
            let text = || {
                std::str::from_utf8(header.value)
                    .map(str::trim)
                    .map_err(|_| Fault::Framing(format!("header {name}: not text")))
            };
            if name.eq_ignore_ascii_case("content-length") {
                let length = text()?
                    .parse()
                    .map_err(|_| Fault::Framing("Content-Length: expected a whole number".into()))?;
                if fields.length.is_some_and(|other| other != length) {
                    return Err(Fault::Framing("two different Content-Length".into()));
                }
                fields.length = Some(length);
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                if !text()?.eq_ignore_ascii_case("chunked") {
                    return Err(Fault::Framing(format!("Transfer-Encoding: {}, expected chunked", text()?)));
                }
                fields.chunked = true;
            } else if name.eq_ignore_ascii_case("connection") {
                for option in text()?.split(',').map(str::trim) {
                    if option.eq_ignore_ascii_case("close") {
                        fields.keep_alive = false;
                    } else if option.eq_ignore_ascii_case("keep-alive") {
                        fields.keep_alive = true;
                    }
                }
            } else if name.eq_ignore_ascii_case("expect") {
                fields.expect_continue = text()?.eq_ignore_ascii_case("100-continue");
            } else if name.eq_ignore_ascii_case("content-type") {
                text()?.clone_into(&mut fields.content_type);
            } else if name.eq_ignore_ascii_case(crate::payload::RECIPE_HEADER) {
                fields.recipe = Some(text()?.to_owned());
            }
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(pieces: &[&[u8]]) -> Result<(Vec<u8>, bool, usize), Fault> {
        let mut framing = Framing::Chunked(Chunked::new());
        let (mut out, mut done, mut taken) = (Vec::new(), false, 0);
        for piece in pieces {
            let (n, end) = framing.feed(piece, &mut |b| out.extend_from_slice(b))?;
            taken += n;
            if end {
                done = true;
                break;
            }
        }
        Ok((out, done, taken))
    }

    #[test]
    fn chunked_decodes_the_same_in_every_split() {
        let wire: &[u8] = b"5\r\nhello\r\n1;x=y\r\n \r\n00B\r\nworld, ok? .\r\n0\r\nA: b\r\nC: d\r\n\r\nNEXT";
        let whole = b"hello world, ok?";
        // The third chunk declares 11 bytes: "world, ok? " would need a byte less than is there.
        assert!(decode(&[wire]).is_err());
        let wire: &[u8] = b"5\r\nhello\r\n1;x=y\r\n \r\n00A\r\nworld, ok?\r\n0\r\nA: b\r\nC: d\r\n\r\nNEXT";
        for a in 0..=wire.len() {
            for b in a..=wire.len() {
                let (out, done, taken) = decode(&[&wire[..a], &wire[a..b], &wire[b..]]).expect("valid");
                assert_eq!(
                    (out.as_slice(), done, taken),
                    (&whole[..], true, wire.len() - 4),
                    "split {a} {b}"
                );
            }
        }
    }

    #[test]
    fn chunked_refuses_what_is_not_chunked() {
        for bad in [
            &b"\r\n"[..],
            b"g\r\n",
            b"5 \r\nhello",
            b"2\r\nabc\r\n",
            b"1\nx",
            b"0\r\n\rx",
            b"1234567890123456\r\n",
        ] {
            assert!(matches!(decode(&[bad]), Err(Fault::Framing(_))), "{bad:?}");
        }
    }

    #[test]
    fn an_unfinished_chunked_body_is_not_done() {
        assert!(!decode(&[b"3\r\nabc\r\n0\r\n"]).expect("valid so far").1);
    }

    #[test]
    fn response_heads() {
        let (head, n) =
            response_head(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nContent-Type: a/b\r\n\r\nabc")
                .expect("valid")
                .expect("whole");
        assert!(matches!(head.framing, Framing::Length(3)));
        assert!(head.keep_alive && head.content_type == "a/b" && n == 57);

        let closing = b"HTTP/1.1 200 OK\r\nConnection: x, close\r\nTransfer-Encoding: chunked\r\n\r\n";
        let (head, _) = response_head(closing).expect("valid").expect("whole");
        assert!(matches!(head.framing, Framing::Chunked(_)) && !head.keep_alive);

        let (head, _) = response_head(b"HTTP/1.1 204 No Content\r\n\r\n").expect("valid").expect("whole");
        assert!(matches!(head.framing, Framing::Length(0)) && head.keep_alive);

        let (head, _) = response_head(b"HTTP/1.0 200 OK\r\n\r\n").expect("valid").expect("whole");
        assert!(matches!(head.framing, Framing::Close) && !head.keep_alive);

        assert!(response_head(b"HTTP/1.1 200 OK\r\nconte").expect("valid so far").is_none());
    }

    #[test]
    fn contradicting_heads_are_faults() {
        for bad in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"SMTP ready\r\n\r\n",
        ] {
            assert!(
                matches!(response_head(bad), Err(Fault::Framing(_))),
                "{:?}",
                String::from_utf8_lossy(bad)
            );
        }
        let endless = vec![b'a'; HEAD_BYTES_MAX + 1];
        let mut long = b"HTTP/1.1 200 OK\r\nx: ".to_vec();
        long.extend_from_slice(&endless);
        assert!(matches!(response_head(&long), Err(Fault::Framing(_))));
    }

    #[test]
    fn request_heads_carry_the_recipe() {
        let (head, _) = request_head(
            b"POST /v1/x HTTP/1.1\r\nHost: a\r\nx-perf: body=1;answer=2\r\nContent-Length: 1\r\n\r\nz",
        )
        .expect("valid")
        .expect("whole");
        assert_eq!((head.method.as_str(), head.path.as_str()), ("POST", "/v1/x"));
        assert_eq!(head.recipe.as_deref(), Some("body=1;answer=2"));
        assert!(matches!(head.framing, Framing::Length(1)) && head.keep_alive && !head.expect_continue);
    }
}
