//! What a request's prompt is, as a chain of block identities; and on the way all that a body says of itself.
//!
//! One walk over the body finds the prompt's strings ([`outline`]), in the order in which an engine's chat template puts
//! them: tools, then system text or instructions, then every message with its role and parts; a second goes over those
//! strings and names each block of `block_bytes` ([`blocks`]). Strings are hashed as they stand in the body, escapes
//! included: a client that spells alike is equal to itself. Token ids are hashed as four bytes each, so that 256 bytes are
//! 64 tokens; media longer than 256 bytes enter as an eight-byte digest.
//!
//! The chain begins at a hash of what decides whether cached blocks may be used at all: model, LoRA adapter, `cache_salt`
//! and `extra_key`.
//!
//! *Invariant*: `model`, `stream` and `complete` are those of [`super::peek`] (body whole) or [`super::peek_prefix`]. Key
//! order and white space do not matter; of a repeated key the last value counts. A prompt that extends another has its
//! blocks in front.
//! *Partly in hand*: of a body that goes on, the blocks are those of what is there, as if no section that renders earlier
//! came later. Clients write bodies in one order, so that two long bodies of one conversation, both cut, agree; only where
//! one is cut and the other is not, and its tools stand behind its messages, a match is missed.
//! *Bound and cost*: two passes, no tree; recursion and the order of members are bounded in [`outline`]; buffers are
//! reused. Bodies are read up to 4 GiB.
//! *Errors*: none. What cannot be read has no blocks, and the engine is the one to complain.
//! *Source*: the Lifeboat rules, sections 5.1, 5.2 and 8; the request formats of the OpenAI, Anthropic and SGLang APIs,
//! vLLM's `cache_salt` and `token_ids`, SGLang's `lora_path` and `extra_key`, TensorRT-LLM's `lora_request`, llama.cpp's
//! `lora`.

mod blocks;
mod outline;

use std::borrow::Cow;

use super::Endpoint;
use super::walk::{Stop, Walker, is_plain, object, unescape};
use blocks::Cutter;
pub(super) use blocks::Keys;
use outline::{Lead, Outline, Place, Section, Segment};

/// Affinity ids longer than this are ignored, in bytes.
pub const AFFINITY_ID_BYTES_MAX: usize = 256;

/// How prompts are cut and hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptRules {
    /// Prompt bytes of a block, 64 to 65,536.
    pub block_bytes: u32,
    /// Secret of the process: without it nobody can choose prompts whose blocks collide.
    pub seed: u64,
}

/// Scratch of a connection, reused from request to request.
#[derive(Debug, Default)]
pub struct Prompt {
    /// Identities of the full blocks of the last prompt read, first block first.
    pub blocks: Vec<u64>,
    outline: Outline,
    keys: Option<Keys>,
}

/// What a body says of itself and of its prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading<'a> {
    /// As in [`super::Peek`].
    pub model: Option<Cow<'a, [u8]>>,
    /// As in [`super::Peek`].
    pub stream: Option<bool>,
    /// The body was read to its end and is whole.
    pub complete: bool,
    /// The body holds a prompt that could be read, be it shorter than a block.
    pub has_prompt: bool,
    /// Bytes of the prompt as they stand in the body, without long media and token ids.
    pub prompt_bytes: u64,
    /// Images, sound or other media are part of the prompt: their tokens cannot be told from bytes.
    pub has_media: bool,
    /// Tokens of the prompt that came as token ids.
    pub token_ids: u64,
    /// `prompt_cache_key`, else `conversation` or its `id`, else `user`; unescaped, not empty, at most
    /// [`AFFINITY_ID_BYTES_MAX`] bytes.
    pub affinity_id: Option<Cow<'a, [u8]>>,
}

/// Top-level keys that are read, in the order in which their values render.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Top {
    Model,
    Stream,
    PromptCacheKey,
    Conversation,
    User,
    /// A part of the prompt: its place in the order, and how it is read.
    Prompt(u8, Section),
    Other,
}

/// Places 0 to 4 seed the chain, later ones are the prompt.
const SEEDS: usize = 5;
const SECTIONS: usize = 20;

/// Which of the keys `key` is at this endpoint. Unknown endpoints have the keys of all.
fn top(endpoint: Endpoint, key: &[u8]) -> Top {
    use Endpoint::*;
    use Top::Prompt;
    match key {
        b"model" => Top::Model,
        b"stream" => Top::Stream,
        b"prompt_cache_key" => Top::PromptCacheKey,
        b"conversation" => Top::Conversation,
        b"user" => Top::User,
        b"cache_salt" => Prompt(0, Section::Seed),
        b"extra_key" => Prompt(1, Section::Seed),
        b"lora_path" => Prompt(2, Section::Seed),
        b"lora_request" => Prompt(3, Section::Seed),
        b"lora" => Prompt(4, Section::Seed),
        b"tools" if matches!(endpoint, Chat | Responses | Messages | CountTokens | Other) => {
            Prompt(5, Section::Tools)
        }
        b"functions" if matches!(endpoint, Chat | Other) => Prompt(6, Section::Tools),
        b"system" if matches!(endpoint, Messages | CountTokens | Other) => Prompt(7, Section::System),
        b"instructions" if matches!(endpoint, Responses | Other) => Prompt(8, Section::System),
        b"query" if matches!(endpoint, Rerank | Other) => Prompt(9, Section::Messages),
        b"documents" if matches!(endpoint, Chat | Rerank | Other) => Prompt(10, Section::Parts),
        b"image_data" if matches!(endpoint, Generate | Other) => Prompt(11, Section::Media),
        b"video_data" if matches!(endpoint, Generate | Other) => Prompt(12, Section::Media),
        b"audio_data" if matches!(endpoint, Generate | Other) => Prompt(13, Section::Media),
        b"messages" if matches!(endpoint, Chat | Messages | CountTokens | Embeddings | Other) => {
            Prompt(14, Section::Messages)
        }
        b"prompt" if matches!(endpoint, Completions | Generate | Other) => Prompt(15, Section::Messages),
        b"input" if endpoint == Responses => Prompt(16, Section::Input),
        b"input" if matches!(endpoint, Embeddings | Other) => Prompt(16, Section::Messages),
        b"text" if matches!(endpoint, Generate | Other) => Prompt(17, Section::Messages),
        b"input_ids" if matches!(endpoint, Generate | Other) => Prompt(18, Section::Messages),
        b"token_ids" | b"prompt_token_ids" if endpoint == Other => Prompt(19, Section::Messages),
        _ => Top::Other,
    }
}

/// Reads what is in hand of a body; `whole` says whether that is all of it. Fills `prompt.blocks`.
///
/// `rules.block_bytes` out of its range counts as the nearest in it.
pub fn read_prompt<'a>(
    endpoint: Endpoint,
    body: &'a [u8],
    whole: bool,
    rules: &PromptRules,
    prompt: &mut Prompt,
) -> Reading<'a> {
    prompt.outline.clear();
    let reading = read(endpoint, body, whole, rules, prompt);
    if !reading.has_prompt {
        prompt.blocks.clear();
    }
    reading
}

/// As [`read_prompt`]; without a prompt, `prompt.blocks` stays as it was.
fn read<'a>(
    endpoint: Endpoint,
    body: &'a [u8],
    whole: bool,
    rules: &PromptRules,
    prompt: &mut Prompt,
) -> Reading<'a> {
    // Segments count in 32 bits.
    let (body, whole) = match u32::try_from(body.len()) {
        Ok(_) => (body, whole),
        Err(_) => (&body[..u32::MAX as usize], false),
    };
    let mut reading = Reading::default();
    let mut sections = Sections { present: 0, ranges: [(0, 0); SECTIONS] };
    let mut affinity = [None, None, None];
    let mut walk = Walk {
        endpoint,
        reading: &mut reading,
        outline: &mut prompt.outline,
        sections: &mut sections,
        affinity: &mut affinity,
        unreadable: false,
    };
    let outcome = object(body, |walker, key| walk.member(walker, key));
    let unreadable = walk.unreadable;
    match outcome {
        Ok(()) => reading.complete = true,
        Err(Stop::Truncated) if !whole => {}
        Err(_) => return Reading::default(),
    }
    let [key, conversation, user] = affinity;
    reading.affinity_id = key.or(conversation).or(user);
    if unreadable || sections.present >> SEEDS == 0 {
        return reading;
    }
    reading.has_prompt = true;
    reading.has_media = prompt.outline.has_media;
    if !prompt.keys.as_ref().is_some_and(|keys| keys.is_of(rules.seed)) {
        prompt.keys = Some(Keys::new(rules.seed));
    }
    if let Some(keys) = &prompt.keys {
        let block_bytes = rules.block_bytes.clamp(64, 65_536) as usize;
        cut(&mut reading, body, &prompt.outline, &sections, keys, block_bytes, &mut prompt.blocks);
    }
    reading
}

/// Which segments are a section's, by its place in the order.
struct Sections {
    /// A bit for each that has any.
    present: u32,
    ranges: [(u32, u32); SECTIONS],
}

impl Sections {
    fn set(&mut self, place: u8, start: usize, end: usize) {
        self.ranges[place as usize] = (start as u32, end as u32);
        self.present = self.present & !(1 << place) | u32::from(start < end) << place;
    }

    /// The segments of those sections that `among` has bits for, in order, with their place.
    fn of<'o>(&self, among: u32, outline: &'o Outline) -> impl Iterator<Item = (usize, &'o [Segment])> {
        let mut left = self.present & among;
        std::iter::from_fn(move || {
            let place = left.trailing_zeros() as usize;
            let (start, end) = *self.ranges.get(place)?;
            left &= left - 1;
            Some((place, &outline.segments[start as usize..end as usize]))
        })
    }
}

/// The state of the walk over a body's members.
struct Walk<'a, 'p> {
    endpoint: Endpoint,
    reading: &'p mut Reading<'a>,
    outline: &'p mut Outline,
    sections: &'p mut Sections,
    /// By rank: cache key, conversation, user.
    affinity: &'p mut [Option<Cow<'a, [u8]>>; 3],
    /// A prompt is not what its API wants; the body is no less JSON for that.
    unreadable: bool,
}

impl<'a> Walk<'a, '_> {
    #[inline]
    fn member(&mut self, walker: &mut Walker<'a>, key: &'a [u8]) -> Result<(), Stop> {
        let mut kind = top(self.endpoint, key);
        if kind == Top::Other && !is_plain(key) {
            // A key with a bad escape is nobody's.
            kind = unescape(key).map_or(Top::Other, |key| top(self.endpoint, &key));
        }
        match kind {
            Top::Model => {
                self.reading.model = None;
                self.reading.model = walker.string_value()?;
            }
            Top::Stream => {
                self.reading.stream = None;
                self.reading.stream = walker.boolean_value()?;
            }
            Top::PromptCacheKey => self.affinity(walker, 0)?,
            Top::Conversation => self.conversation(walker)?,
            Top::User => self.affinity(walker, 2)?,
            Top::Prompt(place, section) => self.section(walker, place, section)?,
            Top::Other => walker.skip_value()?,
        }
        Ok(())
    }

    fn affinity(&mut self, walker: &mut Walker<'a>, rank: usize) -> Result<(), Stop> {
        self.affinity[rank] = None;
        if walker.peek_byte()? != b'"' {
            return walker.skip_value();
        }
        walker.at += 1;
        // An escape has at most six bytes for each of the value's. What cannot be read here is no reason to give up the body.
        let raw = walker.string()?;
        let id = if raw.len() > 6 * AFFINITY_ID_BYTES_MAX { None } else { unescape(raw) };
        self.affinity[rank] = id.filter(|id| (1..=AFFINITY_ID_BYTES_MAX).contains(&id.len()));
        Ok(())
    }

    fn conversation(&mut self, walker: &mut Walker<'a>) -> Result<(), Stop> {
        if walker.peek_byte()? != b'{' {
            return self.affinity(walker, 1);
        }
        self.affinity[1] = None;
        let start = walker.at;
        let outcome = walker.members(|walker, key| match key {
            b"id" => self.affinity(walker, 1),
            _ => walker.skip_value(),
        });
        if outcome == Err(Stop::Malformed) {
            self.affinity[1] = None;
            walker.at = start;
            return walker.skip_value();
        }
        outcome
    }

    #[inline]
    fn section(&mut self, walker: &mut Walker<'a>, place: u8, section: Section) -> Result<(), Stop> {
        if self.unreadable {
            return walker.skip_value();
        }
        let (start, first) = (walker.at, self.outline.segments.len());
        let outcome = self.outline.section(walker, section);
        self.sections.set(place, first, self.outline.segments.len());
        if outcome == Err(Stop::Malformed) {
            // What is nested is not validated where it is only stepped over: see whether that works.
            self.unreadable = true;
            walker.at = start;
            return walker.skip_value();
        }
        outcome
    }
}

/// Hashes the sections in their order.
fn cut(
    reading: &mut Reading<'_>,
    body: &[u8],
    outline: &Outline,
    sections: &Sections,
    keys: &Keys,
    block_bytes: usize,
    blocks: &mut Vec<u64>,
) {
    let mut seed =
        keys.absorb(0, 1 + u64::from(reading.model.is_some()), reading.model.as_deref().unwrap_or(b""));
    for (place, segments) in sections.of((1 << SEEDS) - 1, outline) {
        for segment in segments {
            let all = if segment.place == Place::Body { body } else { &outline.scratch };
            let bytes = &all[segment.start as usize..][..segment.len as usize];
            seed = keys.absorb(seed, 3 + place as u64, bytes);
        }
    }

    // No byte is in two segments, and a digest is shorter than what it stands for.
    let bytes_max = body.len() + outline.scratch.len() + outline.segments.len();
    // What the last prompt left there is written over: zeroing it would cost as much as hashing an eighth of the prompt.
    blocks.resize(bytes_max / block_bytes, 0);
    let mut cutter = Cutter::new(keys, block_bytes, seed, blocks);
    // Nothing to be separated from yet: a lone prompt is cut exactly at multiples of the block.
    let mut first = true;
    for (_, segments) in sections.of(u32::MAX << SEEDS, outline) {
        for segment in segments {
            let lead = segment.lead;
            if !first || !matches!(lead, Lead::Text | Lead::Next) {
                cutter.push_byte(lead as u8);
                first = false;
            } else if lead == Lead::Text {
                first = false;
            }
            let (start, len) = (segment.start as usize, segment.len as usize);
            match segment.place {
                Place::Body => {
                    reading.prompt_bytes += len as u64;
                    cutter.push_part(body, start, len);
                }
                Place::Scratch => {
                    reading.prompt_bytes += len as u64;
                    cutter.push_part(&outline.scratch, start, len);
                }
                Place::Tokens => {
                    reading.token_ids += len as u64 / 4;
                    cutter.push_part(&outline.scratch, start, len);
                }
                Place::Media => cutter.push(&keys.digest(&body[start..start + len]).to_le_bytes()),
            }
        }
    }
    let count = cutter.count();
    blocks.truncate(count);
}

#[cfg(test)]
mod tests;
