//! Finds the strings of a prompt in a body and puts them in the order in which an engine renders them.
//!
//! The outcome is a list of [`Segment`]s: where bytes of the prompt stand, and the separator in front of them. Objects that
//! an API defines (messages, content parts, tool calls, tools) are brought into one order of members, and members that
//! no chat template renders are left out: clients move `cache_control` from turn to turn, and ids and states of items are
//! the server's own. Objects that belong to the caller (a tool's schema, a tool's arguments) stay as they are, white space
//! between their tokens aside, for that is how templates print them.
//!
//! *Invariant*: what a longer conversation adds, it adds behind: nothing of a message depends on what follows it. Strings
//! hold no control characters, so that separators cannot be written by a caller. A content string and a list of the one
//! text part with that string are the same prompt.
//! *Bound and cost*: O(bytes); recursion ends at [`DEPTH_MAX`], below it a value counts as the caller's own. An object of
//! more than [`MEMBERS_MAX`] members that count is taken in the order it stands. Scratch grows with the body and is reused.
//! *Errors*: [`Stop`]; the segments found until then stay.
//! *Source*: the OpenAI, Anthropic, vLLM and SGLang request formats; the Lifeboat rules, section 5.1.

use super::super::simd::{self, Level, equal_16};
use super::super::walk::{Stop, Walker, string_end, unescape};

/// Separator in front of a segment's bytes. No JSON string holds these bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Lead {
    /// A message begins; the bytes are its role.
    Message = 1,
    /// Text of a message, or a prompt.
    Text = 2,
    /// Name of a member.
    Key = 3,
    /// A member's value, a string.
    Value = 4,
    /// A member's value, JSON.
    Raw = 5,
    /// An object begins that has no text.
    Open = 6,
    /// The object ends.
    Close = 7,
    System = 14,
    Tools = 15,
    /// The next of several prompts begins.
    Next = 16,
}

/// What a segment's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Place {
    /// Bytes of the body.
    Body,
    /// Bytes of [`Outline::scratch`].
    Scratch,
    /// Token ids in [`Outline::scratch`], four bytes each.
    Tokens,
    /// Bytes of the body that enter as their digest.
    Media,
}

/// A run of bytes of the prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub start: u32,
    pub len: u32,
    pub lead: Lead,
    pub place: Place,
}

/// A member of the object being read: its key, and where its segments begin.
#[derive(Clone, Copy, Debug)]
struct Member {
    rank: u8,
    key_start: u32,
    key_len: u32,
    first: u32,
}

/// Objects deeper than this below a prompt's own value are not brought into order.
const DEPTH_MAX: u32 = 16;
/// Members of one object that are brought into order.
const MEMBERS_MAX: usize = 16;
/// Media strings longer than this enter as a digest, in bytes.
const MEDIA_BYTES_MAX: usize = 256;
/// Rank of members that no API we know defines.
const RANK_UNKNOWN: u8 = 200;

/// Which API-defined object is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A message, or another item of a Responses input.
    Message,
    /// A content part, a tool call, and what they hold.
    Part,
    /// A tool's definition.
    Tool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Not part of the prompt.
    Ignored,
    Role,
    Text,
    /// A string, or a list of parts, without its key.
    Content,
    /// API-defined: brought into order.
    Known,
    /// As `Known`; its strings are media.
    Media,
    /// The caller's: stays as it is.
    Own,
}

/// What a member means, and where among its siblings it stands.
fn member(kind: Kind, key: &[u8]) -> (Shape, u8) {
    use Shape::*;
    match key {
        b"role" if kind == Kind::Message => (Role, 0),
        b"text" if kind == Kind::Part => (Text, 0),
        b"content" => (Content, 40),
        // Kinds of parts and items show in their other members; tools may have nothing else.
        b"type" if kind == Kind::Tool => (Known, 5),
        b"type" => (Ignored, 0),
        b"id" if kind == Kind::Message => (Ignored, 0),
        b"id" => (Known, 10),
        // Behind the content: most clients write it there, and a body in part may hold no more than the content.
        b"name" => (Known, 45),
        b"tool_call_id" | b"tool_use_id" | b"call_id" => (Known, 12),
        b"description" => (Known, 46),
        b"function" => (Known, 14),
        b"reasoning_content" | b"reasoning" | b"thinking" | b"summary" => (Known, 30),
        b"refusal" => (Known, 50),
        b"tool_calls" => (Known, 60),
        b"function_call" => (Known, 61),
        b"input" | b"arguments" | b"parameters" | b"input_schema" => (Own, 62),
        b"output" => (Known, 63),
        b"media_type" | b"format" | b"filename" => (Known, 70),
        b"source" | b"file" | b"input_audio" => (Known, 71),
        b"image_url" | b"video_url" | b"audio_url" | b"url" | b"file_url" | b"data" | b"file_data"
        | b"image" | b"audio" | b"video" => (Media, 72),
        b"cache_control" | b"status" | b"annotations" | b"logprobs" | b"citations" | b"signature"
        | b"encrypted_content" | b"index" => (Ignored, 0),
        _ => (Own, RANK_UNKNOWN),
    }
}

/// Segments of a prompt and the scratch to find them; reused from body to body.
#[derive(Debug, Default)]
pub(super) struct Outline {
    /// Some of it is an image, sound or another medium: its bytes say nothing of its tokens.
    pub has_media: bool,
    pub segments: Vec<Segment>,
    /// Bytes of the prompt that do not stand in the body as they are needed.
    pub scratch: Vec<u8>,
    members: Vec<Member>,
    spare: Vec<Segment>,
}

impl Outline {
    pub fn clear(&mut self) {
        self.has_media = false;
        self.segments.clear();
        self.scratch.clear();
        self.members.clear();
    }

    #[inline]
    fn push(&mut self, lead: Lead, place: Place, start: usize, len: usize) {
        self.segments.push(Segment { start: start as u32, len: len as u32, lead, place });
    }

    fn push_scratch(&mut self, lead: Lead, bytes: &[u8]) {
        let start = self.scratch.len();
        self.scratch.extend_from_slice(bytes);
        self.push(lead, Place::Scratch, start, bytes.len());
    }

    /// The string that begins here. One that breaks off counts as far as it goes, unless it is a digest's.
    #[inline]
    fn string(&mut self, walker: &mut Walker<'_>, lead: Lead, media: bool) -> Result<(), Stop> {
        let start = walker.at + 1;
        walker.at = start;
        self.has_media |= media;
        match walker.string() {
            Ok(raw) if media && raw.len() > MEDIA_BYTES_MAX => {
                self.push(lead, Place::Media, start, raw.len())
            }
            Ok(raw) => self.push(lead, Place::Body, start, raw.len()),
            Err(stop) => {
                if !media {
                    self.push(lead, Place::Body, start, walker.body.len() - start);
                }
                return Err(stop);
            }
        }
        Ok(())
    }

    /// The value that begins here as it stands, without white space between its tokens.
    pub fn own(&mut self, walker: &mut Walker<'_>) -> Result<(), Stop> {
        let start = walker.at;
        match walker.skip_nested::<true>() {
            Ok(false) => {
                self.push(Lead::Raw, Place::Body, start, walker.at - start);
                Ok(())
            }
            Ok(true) => {
                self.compact(walker.level, &walker.body[start..walker.at]);
                Ok(())
            }
            Err(stop) => {
                if stop == Stop::Truncated {
                    self.compact(walker.level, &walker.body[start..]);
                }
                Err(stop)
            }
        }
    }

    /// A segment for `bytes` without white space outside strings.
    fn compact(&mut self, level: Level, bytes: &[u8]) {
        let start = self.scratch.len();
        simd::compact(level, bytes, &mut self.scratch);
        self.push(Lead::Raw, Place::Scratch, start, self.scratch.len() - start);
    }

    /// A scalar that is not `null`, behind what `before` puts in front of it.
    fn scalar(&mut self, walker: &mut Walker<'_>, before: impl FnOnce(&mut Outline)) -> Result<(), Stop> {
        let start = walker.at;
        let text = walker.scalar()?;
        if text != b"null" {
            before(self);
            self.push(Lead::Raw, Place::Body, start, text.len());
        }
        Ok(())
    }

    /// Items of a list: strings, token ids, objects of `kind`, lists of those. The walker stands on the bracket.
    pub fn list(&mut self, walker: &mut Walker<'_>, kind: Kind, media: bool, depth: u32) -> Result<(), Stop> {
        if depth > DEPTH_MAX {
            return self.own(walker);
        }
        walker.expect(b'[')?;
        if walker.peek_byte()? == b']' {
            walker.at += 1;
            return Ok(());
        }
        loop {
            match walker.peek_byte()? {
                b'"' => self.string(walker, Lead::Text, media)?,
                b'{' if kind == Kind::Message && self.plain_message(walker).is_some() => {}
                b'{' => self.object(walker, kind, depth + 1)?,
                b'[' => {
                    self.push(Lead::Next, Place::Body, 0, 0);
                    self.list(walker, kind, media, depth + 1)?;
                }
                b'-' | b'0'..=b'9' => self.tokens(walker)?,
                _ => self.scalar(walker, |_| {})?,
            }
            match walker.peek_byte()? {
                b',' => walker.at += 1,
                b']' => {
                    walker.at += 1;
                    return Ok(());
                }
                _ => return Err(Stop::Malformed),
            }
        }
    }

    /// A run of token ids, up to the comma or bracket behind the last; four bytes each.
    fn tokens(&mut self, walker: &mut Walker<'_>) -> Result<(), Stop> {
        let start = self.scratch.len();
        let outcome = self.token_run(walker);
        self.push(Lead::Text, Place::Tokens, start, self.scratch.len() - start);
        outcome
    }

    fn token_run(&mut self, walker: &mut Walker<'_>) -> Result<(), Stop> {
        loop {
            let mut id = 0_u64;
            let first = walker.at;
            while let Some(digit @ b'0'..=b'9') = walker.body.get(walker.at).copied() {
                id = id * 10 + u64::from(digit - b'0');
                walker.at += 1;
                if walker.at - first > 10 {
                    return Err(Stop::Malformed);
                }
            }
            let next = walker.peek_byte()?;
            let id = u32::try_from(id).ok().filter(|_| walker.at > first);
            match (id, next) {
                (Some(id), b',' | b']') => self.scratch.extend_from_slice(&id.to_le_bytes()),
                _ => return Err(Stop::Malformed),
            }
            if next == b']' {
                return Ok(());
            }
            let comma = walker.at;
            walker.at += 1;
            if !walker.peek_byte()?.is_ascii_digit() {
                walker.at = comma;
                return Ok(());
            }
        }
    }

    /// A string, or a list of parts, as a message's content or a system text.
    fn content(
        &mut self,
        walker: &mut Walker<'_>,
        key: Option<(usize, usize)>,
        depth: u32,
    ) -> Result<(), Stop> {
        match walker.peek_byte()? {
            b'"' => self.string(walker, Lead::Text, false),
            b'[' => self.list(walker, Kind::Part, false, depth),
            _ => self.value(walker, key, Shape::Own, depth),
        }
    }

    /// A member's value with its key in front; `null` counts as absent.
    fn value(
        &mut self,
        walker: &mut Walker<'_>,
        key: Option<(usize, usize)>,
        shape: Shape,
        depth: u32,
    ) -> Result<(), Stop> {
        let name = |outline: &mut Outline| {
            if let Some((start, len)) = key {
                outline.push(Lead::Key, Place::Body, start, len);
            }
        };
        let media = shape == Shape::Media;
        match walker.peek_byte()? {
            b'"' => {
                name(self);
                self.string(walker, Lead::Value, media)
            }
            b'[' if shape != Shape::Own => {
                name(self);
                self.list(walker, Kind::Part, media, depth)
            }
            b'{' if shape != Shape::Own => {
                name(self);
                self.object(walker, Kind::Part, depth + 1)
            }
            b'[' | b'{' => {
                name(self);
                self.own(walker)
            }
            _ => self.scalar(walker, name),
        }
    }

    /// An object that an API defines.
    pub fn object(&mut self, walker: &mut Walker<'_>, kind: Kind, depth: u32) -> Result<(), Stop> {
        if depth > DEPTH_MAX {
            return self.own(walker);
        }
        let (open, base) = (self.segments.len(), self.members.len());
        let lead = if kind == Kind::Message { Lead::Message } else { Lead::Open };
        self.push(lead, Place::Body, 0, 0);
        let outcome = walker.members(|walker, key| self.member(walker, kind, key, open, base, depth));
        let head = self.segments[open];
        match outcome {
            Ok(()) => {
                self.sort(walker.body, base);
                // A text alone needs no end: what follows begins with a separator of its own.
                if head.lead == Lead::Open || (kind != Kind::Message && self.segments.len() > open + 1) {
                    self.push(Lead::Close, Place::Body, 0, 0);
                }
            }
            // Broken off: a role or text yet to come would stand in front; and what was read out of order has a gap.
            Err(_) if head.len == 0 => self.segments.truncate(open),
            Err(_) if !self.is_sorted(walker.body, base) => self.segments.truncate(open + 1),
            Err(_) => {}
        }
        self.members.truncate(base);
        outcome
    }

    /// Reads `{"role":"…","content":"…"}`, as nearly all messages are and most clients write it, with a space behind each colon
    /// and comma or with none. `None`: it is not that, and nothing has happened.
    #[inline]
    fn plain_message(&mut self, walker: &mut Walker<'_>) -> Option<()> {
        // Longest with spaces: ten bytes, sixteen of a role with its quote, fifteen.
        let head = walker.body.get(walker.at..)?.first_chunk::<48>()?;
        let role = match head {
            [b'{', b'"', b'r', b'o', b'l', b'e', b'"', b':', b'"', ..] => 9,
            [b'{', b'"', b'r', b'o', b'l', b'e', b'"', b':', b' ', b'"', ..] => 10,
            _ => return None,
        };
        let quotes = equal_16(head[role..].first_chunk()?, b'"');
        let role_len = quotes.trailing_zeros() as usize;
        // A quote behind a backslash needs a closer look, as do roles that no API knows.
        if role_len > 15 || head[role + role_len - 1] == b'\\' {
            return None;
        }
        let content = role
            + role_len
            + match head.get(role + role_len..)?.first_chunk::<15>()? {
                [b'"', b',', b'"', b'c', b'o', b'n', b't', b'e', b'n', b't', b'"', b':', b'"', ..] => 13,
                b"\", \"content\": \"" => 15,
                _ => return None,
            };
        let (role, content) = (walker.at + role, walker.at + content);
        let end = string_end(walker.level, walker.body, content)?;
        if walker.body.get(end + 1) != Some(&b'}') {
            return None;
        }
        walker.at = end + 2;
        self.push(Lead::Message, Place::Body, role, role_len);
        self.push(Lead::Text, Place::Body, content, end - content);
        Some(())
    }

    /// One member of the object whose first segment is `open`.
    #[inline]
    fn member(
        &mut self,
        walker: &mut Walker<'_>,
        kind: Kind,
        key: &[u8],
        open: usize,
        base: usize,
        depth: u32,
    ) -> Result<(), Stop> {
        let (mut shape, mut rank) = member(kind, key);
        if rank == RANK_UNKNOWN && key.contains(&b'\\') {
            (shape, rank) = member(kind, &unescape(key).ok_or(Stop::Malformed)?);
        }
        match shape {
            Shape::Ignored => return walker.skip_value(),
            Shape::Role | Shape::Text => {
                let (lead, none) = match shape {
                    Shape::Role => (Lead::Message, Lead::Message),
                    _ => (Lead::Text, Lead::Open),
                };
                self.segments[open] = Segment { start: 0, len: 0, lead: none, place: Place::Body };
                if walker.peek_byte()? != b'"' {
                    return walker.skip_value();
                }
                let outcome = self.string(walker, lead, false);
                let text = self.segments.pop();
                // A part of it in front of what follows would be wrong.
                let usable = outcome.is_ok() || self.segments.len() == open + 1;
                if let Some(text) = text.filter(|_| usable) {
                    self.segments[open] = text;
                }
                return outcome;
            }
            _ => {}
        }
        let key_start = key.as_ptr() as usize - walker.body.as_ptr() as usize;
        self.forget(walker.body, base, key);
        if self.members.len() - base < MEMBERS_MAX {
            let first = self.segments.len() as u32;
            self.members.push(Member { rank, key_start: key_start as u32, key_len: key.len() as u32, first });
        }
        match shape {
            Shape::Content => self.content(walker, Some((key_start, key.len())), depth),
            _ => self.value(walker, Some((key_start, key.len())), shape, depth),
        }
    }

    /// Takes out what an earlier member of the same key brought: the last counts.
    fn forget(&mut self, body: &[u8], base: usize, key: &[u8]) {
        let same = |member: &Member| body[member.key_start as usize..][..member.key_len as usize] == *key;
        let Some(index) = self.members[base..].iter().position(same) else { return };
        let index = base + index;
        let first = self.members[index].first as usize;
        let end = self.members.get(index + 1).map_or(self.segments.len(), |next| next.first as usize);
        self.segments.drain(first..end);
        self.members.remove(index);
        for later in &mut self.members[index..] {
            later.first -= (end - first) as u32;
        }
    }

    /// Brings the members from `base` on into order.
    #[inline]
    fn sort(&mut self, body: &[u8], base: usize) {
        if !self.is_sorted(body, base) {
            self.sort_slow(body, base);
        }
    }

    #[inline]
    fn is_sorted(&self, body: &[u8], base: usize) -> bool {
        let before = |pair: &[Member]| (pair[0].rank, pair[0].key(body)) <= (pair[1].rank, pair[1].key(body));
        self.members[base..].windows(2).all(before)
    }

    #[cold]
    fn sort_slow(&mut self, body: &[u8], base: usize) {
        let start = self.members[base].first as usize;
        self.spare.clear();
        self.spare.extend_from_slice(&self.segments[start..]);
        let mut order = [(0_u8, 0_u32, 0_u32); MEMBERS_MAX];
        let members = &self.members[base..];
        for (index, member) in members.iter().enumerate() {
            let end = members.get(index + 1).map_or(self.segments.len() as u32, |next| next.first);
            order[index] = (index as u8, member.first, end);
        }
        let order = &mut order[..members.len()];
        order.sort_unstable_by_key(|(index, ..)| {
            let member = &members[*index as usize];
            (member.rank, member.key(body), *index)
        });
        let mut at = start;
        for (_, first, end) in order {
            let run = &self.spare[*first as usize - start..*end as usize - start];
            self.segments[at..][..run.len()].copy_from_slice(run);
            at += run.len();
        }
    }

    /// What `rest` finds behind `lead`, if it finds anything: an empty list is as good as none.
    fn headed(
        &mut self,
        lead: Lead,
        rest: impl FnOnce(&mut Outline) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        self.push(lead, Place::Body, 0, 0);
        let behind = self.segments.len();
        let outcome = rest(self);
        if self.segments.len() == behind {
            self.segments.truncate(behind - 1);
        }
        outcome
    }

    /// The value of a top-level key that is a prompt; `null` is none. What comes out has a separator of its own in front,
    /// or is text.
    pub fn section(&mut self, walker: &mut Walker<'_>, section: Section) -> Result<(), Stop> {
        match (section, walker.peek_byte()?) {
            (Section::Seed, _) => self.value(walker, None, Shape::Own, 0),
            (Section::System, b'"' | b'[') => {
                self.headed(Lead::System, |outline| outline.content(walker, None, 0))
            }
            (Section::Tools, b'[') => {
                self.headed(Lead::Tools, |outline| outline.list(walker, Kind::Tool, false, 0))
            }
            // As a list of one message would be.
            (Section::Input, b'"') => {
                self.push_scratch(Lead::Message, b"user");
                self.string(walker, Lead::Text, false)
            }
            (Section::Parts | Section::Media, b'[') => {
                self.list(walker, Kind::Part, section == Section::Media, 0)
            }
            (_, b'"') => self.string(walker, Lead::Text, section == Section::Media),
            (_, b'[') => self.list(walker, Kind::Message, false, 0),
            (Section::Tools | Section::System | Section::Media, b'{') => self.own(walker),
            _ => walker.skip_value(),
        }
    }
}

impl Member {
    fn key<'a>(&self, body: &'a [u8]) -> &'a [u8] {
        &body[self.key_start as usize..][..self.key_len as usize]
    }
}

/// How the value of a top-level key is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    /// Not prompt, but decides what a cached block may be used for.
    Seed,
    Tools,
    System,
    /// A list of parts: documents.
    Parts,
    Media,
    /// Messages; or a prompt, several, or their token ids.
    Messages,
    /// As `Messages`, but a string stands for a message of the user.
    Input,
}
