//! Takes in a request's body, as far as routing wants to see it: whole if it is small, its beginning if not.
//!
//! *Bound*: `classify_bytes_max` per request (twice that for a chunked one: as it came, and its content), and the shard's part
//! of `buffered_bytes_max` over all, [`FREE_BYTES`] per request aside; beyond either the rest streams through.
//! *Errors*: [`Stop`]: a body over its limit, malformed chunks, a client that stops sending or goes.

use std::borrow::Cow;

use super::buffers::LARGE_BYTES;
use super::client::{Client, End};
use super::deadline::Action;
use super::replay::Replay;
use super::session::Desk;
use crate::proto::classify::{self, Decoded};
use crate::proto::error::Rejection;
use crate::proto::http1::{BodyReader, Framing, push_chunk_header, push_last_chunk};

/// Why a request does not get as far as routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The client went away.
    Gone,
    Refuse(Rejection, &'static str),
}

impl From<End> for Stop {
    fn from(end: End) -> Stop {
        match end {
            End::Closed | End::Failed => Stop::Gone,
            End::Deadline => {
                Stop::Refuse(Rejection::RequestTimeout, "the client stopped sending the request body")
            }
        }
    }
}

/// So much of a body is taken in whatever the budget says: a request's model stands in it.
const FREE_BYTES: usize = 64 * 1024;

pub const TOO_LARGE: &str = "the request body is over the size limit (limits.body_bytes_max)";

/// The part of a request's body that is in hand.
pub struct Intake {
    /// Follows the body; stands behind what is in hand.
    pub reader: BodyReader,
    pub framing: Framing,
    /// Bytes behind the head, in the client's inbox, that are in hand; as they came.
    pub raw: usize,
    /// Bytes of content so far.
    pub content: u64,
    /// Head and body have been taken out of the inbox.
    spent: bool,
    /// The client's bytes behind this request, if any, cannot be told from its body any more: its connection must close.
    pub torn: bool,
    held: Held,
    /// Where it may be sent again although it streams through.
    kept: Option<Box<Replay>>,
}

/// Bytes accounted to the shard's buffer budget; given back on drop.
struct Held {
    shard: std::rc::Rc<super::state::Shard>,
    bytes: usize,
}

impl Held {
    /// Whether `more` bytes may be held too.
    fn grow(&mut self, more: usize) -> bool {
        let total = self.shard.buffered_bytes.get() + more;
        let fits = total <= self.shard.limits.buffered_bytes_max;
        if fits {
            self.shard.buffered_bytes.set(total);
            self.bytes += more;
        }
        fits
    }
}

impl Held {
    fn release(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.shard.buffered_bytes.set(self.shard.buffered_bytes.get() - bytes);
        self.shard.memory.freed(bytes);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

/// Whether the whole of the body has already been received. False for chunked bodies: only reading them tells.
pub fn in_hand(client: &Client, desk: &Desk) -> bool {
    match desk.head.framing {
        Framing::None => true,
        Framing::Length(n) => (client.unread().len() - desk.head.head_len) as u64 >= n,
        Framing::Chunked | Framing::UntilClose => false,
    }
}

impl Intake {
    /// Reads what routing may want. A client that waits for `100 Continue` gets it here: by now nothing stands against
    /// its body but its size, which has been checked too.
    pub async fn read(client: &mut Client, desk: &mut Desk) -> Result<Intake, Stop> {
        let mut intake = Intake::new(client, desk);
        if let Framing::Length(n) = intake.framing
            && n > client.shard.limits.body_bytes_max
        {
            return Err(Stop::Refuse(Rejection::BodyTooLarge, TOO_LARGE));
        }
        intake.invite(client, desk).await?;
        match intake.framing {
            Framing::Length(n) => intake.read_length(client, desk, n).await?,
            Framing::Chunked => intake.read_chunked(client, desk).await?,
            Framing::None | Framing::UntilClose => {}
        }
        Ok(intake)
    }

    /// Takes what of the body is in hand, and waits for no more.
    pub fn in_hand(client: &Client, desk: &mut Desk) -> Result<Intake, Stop> {
        let mut intake = Intake::new(client, desk);
        match intake.framing {
            Framing::Length(n) => {
                let here = client.unread().len() - desk.head.head_len;
                intake.take_length(client, desk, n.min(here as u64) as usize);
            }
            Framing::Chunked => {
                desk.body.clear();
                intake.take_chunks(client, desk)?;
            }
            Framing::None | Framing::UntilClose => {}
        }
        Ok(intake)
    }

    fn new(client: &Client, desk: &Desk) -> Intake {
        let framing = desk.head.framing;
        Intake {
            reader: BodyReader::new(framing),
            framing,
            raw: 0,
            content: 0,
            spent: false,
            torn: false,
            held: Held { shard: client.shard.clone(), bytes: 0 },
            kept: None,
        }
    }

    /// Tells a client that waits for `100 Continue` to go on.
    pub async fn invite(&self, client: &mut Client, desk: &Desk) -> Result<(), Stop> {
        let waits = desk.head.expect_continue && !self.reader.is_done();
        if waits && self.raw == 0 && client.unread().len() == self.unread_head_bytes(desk) {
            let mut out = client.shard.buffers.take(32);
            out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
            if !client.send(out).await {
                return Err(Stop::Gone);
            }
        }
        Ok(())
    }

    /// Bytes of the head that are still in the client's inbox.
    fn unread_head_bytes(&self, desk: &Desk) -> usize {
        if self.spent { 0 } else { desk.head.head_len }
    }

    async fn read_length(&mut self, client: &mut Client, desk: &Desk, n: u64) -> Result<(), Stop> {
        let limits = &client.shard.limits;
        let idle_ms = limits.client_body_idle_timeout_ms;
        let want = n.min(limits.classify_bytes_max as u64) as usize;
        // What the budget is asked for is what has come, not what was announced.
        let mut have = (client.unread().len() - desk.head.head_len).min(want);
        while have < want {
            let step = (want - have).min(LARGE_BYTES);
            if !self.held.grow(step) && have >= FREE_BYTES {
                break;
            }
            client.fill(desk.head.head_len + have + step, idle_ms).await?;
            have += step;
        }
        self.take_length(client, desk, have);
        Ok(())
    }

    /// `have` bytes behind the head are the body's.
    fn take_length(&mut self, client: &Client, desk: &Desk, have: usize) {
        let bytes = &client.unread()[desk.head.head_len..][..have];
        let advance = self.reader.advance(bytes).expect("a length cannot be malformed");
        (self.raw, self.content) = (advance.consumed, advance.consumed as u64);
    }

    /// Takes the chunks that are there into the desk's body.
    fn take_chunks(&mut self, client: &Client, desk: &mut Desk) -> Result<(), Stop> {
        while self.raw + desk.head.head_len < client.unread().len() && !self.reader.is_done() {
            let bytes = &client.unread()[desk.head.head_len + self.raw..];
            let decoded =
                self.reader.decode(bytes).map_err(|e| Stop::Refuse(Rejection::BadRequest, e.what))?;
            desk.body.extend_from_slice(&bytes[decoded.data]);
            self.raw += decoded.consumed;
        }
        self.content = desk.body.len() as u64;
        Ok(())
    }

    async fn read_chunked(&mut self, client: &mut Client, desk: &mut Desk) -> Result<(), Stop> {
        let (classify_max, body_max, idle_ms) = {
            let limits = &client.shard.limits;
            (limits.classify_bytes_max, limits.body_bytes_max, limits.client_body_idle_timeout_ms)
        };
        desk.body.clear();
        loop {
            let start = desk.head.head_len + self.raw;
            self.take_chunks(client, desk)?;
            if self.content > body_max {
                return Err(Stop::Refuse(Rejection::BodyTooLarge, TOO_LARGE));
            }
            let taken = desk.head.head_len + self.raw - start;
            let over = !self.held.grow(2 * taken) && desk.body.len() >= FREE_BYTES;
            // Chunk lines count too: a body can be all framing.
            if self.reader.is_done()
                || desk.body.len() >= classify_max
                || self.raw >= 2 * classify_max
                || over
            {
                return Ok(());
            }
            client.arm_deadline(idle_ms, Action::ShutRead);
            client.more().await?;
        }
    }

    /// From now on what streams through is copied, up to `bytes_max` bytes, so that it can be sent again. Head and body leave the
    /// inbox.
    pub fn keep(&mut self, client: &mut Client, desk: &Desk, bytes_max: usize) {
        let head = client.unread()[..desk.head.head_len].to_vec();
        let mut kept = Box::new(Replay::new(head, bytes_max));
        let held = &mut self.held;
        let body = match self.framing {
            Framing::Chunked => &desk.body,
            _ => &client.unread()[desk.head.head_len..][..self.raw],
        };
        kept.push(body, false, |n| held.grow(n) || n <= FREE_BYTES);
        self.kept = Some(kept);
        self.spent = true;
        client.consume(desk.head.head_len + self.raw);
    }

    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// The body goes out piece by piece.
    pub fn streams(&self) -> bool {
        self.kept.is_some() || !self.whole()
    }

    /// It may go to a server that is just closing the connection: whatever that leads to, it can be sent again.
    pub fn may_meet_a_close(&self) -> bool {
        match &self.kept {
            Some(kept) => !kept.is_over(),
            None => self.whole(),
        }
    }

    /// A new attempt begins: what is kept goes out from its start.
    pub fn rewind(&mut self) {
        if let Some(kept) = &mut self.kept {
            kept.rewind();
        }
    }

    /// Appends the next piece of what is kept and not yet sent to `out`, framed for the server. False: there is none.
    pub fn push_kept(&mut self, out: &mut Vec<u8>) -> bool {
        let Some(kept) = &mut self.kept else { return false };
        let begin = out.len();
        match self.framing {
            Framing::Chunked => push_chunk(out, kept.next_piece()),
            _ => out.extend_from_slice(kept.next_piece()),
        }
        if kept.drop_sent() {
            self.held.release();
        }
        self.push_end(out);
        out.len() > begin
    }

    /// More of the body has come and goes out: it is copied where that is wanted.
    pub fn passed(&mut self, data: &[u8]) {
        self.content += data.len() as u64;
        let Some(kept) = &mut self.kept else { return };
        let (held, before) = (&mut self.held, kept.held_bytes());
        if kept.push(data, true, |n| held.grow(n) || before + n <= FREE_BYTES) {
            held.release();
        }
    }

    /// Appends the end of a chunked body, once all of it is in `out` or before it.
    pub fn push_end(&mut self, out: &mut Vec<u8>) {
        if self.framing != Framing::Chunked || !self.whole() {
            return;
        }
        if let Some(kept) = &mut self.kept
            && (!kept.is_sent() || std::mem::replace(&mut kept.ended, true))
        {
            return;
        }
        push_last_chunk(out, self.reader.trailers(), b"");
    }

    /// All of the body has been put out.
    pub fn is_through(&self) -> bool {
        self.whole()
            && self
                .kept
                .as_ref()
                .is_none_or(|kept| kept.is_sent() && (self.framing != Framing::Chunked || kept.ended))
    }

    /// Whether the body can be sent again; if not, whether that is because it outgrew its copy.
    pub fn replayable(&self, bytes_max: usize) -> Result<(), bool> {
        match &self.kept {
            None if self.content > bytes_max as u64 => Err(true),
            None => Ok(()),
            Some(kept) if kept.is_lost() => Err(true),
            Some(_) if self.whole() => Ok(()),
            Some(_) => Err(false),
        }
    }

    /// Bytes held for sending the body again.
    pub fn kept_bytes(&self) -> u64 {
        match &self.kept {
            Some(kept) => kept.held_bytes() as u64,
            None => self.content,
        }
    }

    /// The head, as it came.
    pub fn head<'a>(&'a self, client: &'a Client) -> &'a [u8] {
        match &self.kept {
            Some(kept) => &kept.head,
            None => client.unread(),
        }
    }

    /// It will not be sent again: nothing is kept any more.
    pub fn finish(&mut self, client: &mut Client, desk: &Desk) {
        self.spend(client, desk);
        if self.kept.take().is_some() {
            self.held.release();
        }
    }

    /// The whole body is in hand.
    pub fn whole(&self) -> bool {
        self.reader.is_done()
    }

    /// Bytes of the body that are announced and not in hand.
    pub fn missing(&self) -> u64 {
        match self.framing {
            Framing::Length(n) => n - self.content,
            Framing::None | Framing::Chunked | Framing::UntilClose => 0,
        }
    }

    /// Takes head and body out of the inbox: they are not needed any more. Doing it again does nothing.
    pub fn spend(&mut self, client: &mut Client, desk: &Desk) {
        if !self.spent {
            self.spent = true;
            client.consume(desk.head.head_len + self.raw);
            self.held.release();
        }
    }

    /// The inbox went with a write that was given up.
    pub fn lose(&mut self) {
        self.spent = true;
        self.torn = true;
    }

    /// The content in hand, without chunk framing; nothing where it is kept.
    pub fn bytes<'a>(&self, client: &'a Client, desk: &'a Desk) -> &'a [u8] {
        match self.framing {
            _ if self.kept.is_some() => b"",
            Framing::Chunked => &desk.body,
            _ => &client.unread()[desk.head.head_len..][..self.raw],
        }
    }

    /// What is in hand to be read for routing: decoded into `decoded`, bounded by `classify_bytes_max`, where it came with a
    /// Content-Encoding. Nothing can be read of what cannot be decoded.
    pub fn content<'a>(&self, client: &'a Client, desk: &'a Desk, decoded: &'a mut Vec<u8>) -> Content<'a> {
        let bytes = self.bytes(client, desk);
        let kind = desk.head.content_type.map(|span| span.of(client.unread()));
        let (bytes, whole) = match desk.head.content_encoding {
            Some(encoding) if !bytes.is_empty() => {
                let bytes_max = client.shard.limits.classify_bytes_max;
                match classify::decode(encoding.of(client.unread()), bytes, self.whole(), bytes_max, decoded)
                {
                    Decoded::Plain => (bytes, self.whole()),
                    Decoded::Complete => (&decoded[..], true),
                    Decoded::Truncated => (&decoded[..], false),
                    Decoded::Unreadable => (&[][..], false),
                }
            }
            _ => (bytes, self.whole()),
        };
        Content { bytes, whole, form: kind.filter(|kind| is_form(kind)) }
    }
}

/// What can be read of a request's content.
#[derive(Clone, Copy)]
pub struct Content<'a> {
    pub bytes: &'a [u8],
    /// That is all of it.
    pub whole: bool,
    /// It is a form: its Content-Type.
    form: Option<&'a [u8]>,
}

impl<'a> Content<'a> {
    /// It may be JSON: there is some, and it is no form.
    pub fn json(&self) -> Option<&'a [u8]> {
        (!self.bytes.is_empty() && self.form.is_none()).then_some(self.bytes)
    }

    /// The model that the request names, where it can be read.
    pub fn model(&self) -> Option<Cow<'a, [u8]>> {
        match self.form {
            Some(kind) => classify::peek_multipart(kind, self.bytes).model,
            None if self.whole => classify::peek(self.bytes).model,
            None => classify::peek_prefix(self.bytes).model,
        }
    }
}

/// Appends `data` as one chunk; nothing for no data, which would end the body.
pub fn push_chunk(out: &mut Vec<u8>, data: &[u8]) {
    if !data.is_empty() {
        push_chunk_header(out, data.len());
        out.extend_from_slice(data);
        out.extend_from_slice(b"\r\n");
    }
}

fn is_form(content_type: &[u8]) -> bool {
    content_type.get(..10).is_some_and(|head| head.eq_ignore_ascii_case(b"multipart/"))
}
