//! Reads what an engine reports about a prompt from its answer, while the answer streams by.
//!
//! No JSON tree is built. The three keys under which engines report are searched for; only the object behind one is read,
//! byte by byte, and it is the last complete one that counts: a report comes once, or grows from event to event.
//!
//! *Invariants*: nothing but a value behind an unescaped key is taken, so that a generated text, whatever it says, is never
//! read as a report. How an answer was cut into pieces changes nothing. Every byte is looked at once, and none is kept:
//! pieces may be fed as they were received, chunk framing included. A chunk that begins inside a report is seen through;
//! one that begins inside the key itself hides that report.
//! *Bound and cost*: under 150 bytes of state, no allocation. One vectorised search of each piece for what may be a key, and about
//! 8 instructions per byte inside a report. `benches/account.rs` has the figures.
//! *Errors*: none. What is no such object, or no number, is not known.
//! *Source*: the OpenAI API reference (`usage` of chat, completions, responses and embeddings), the Anthropic API
//! reference (`usage` of `message`, `message_start` and `message_delta`), llama.cpp's server (`timings`), SGLang's
//! `/generate` (`meta_info`); RFC 8259 for JSON, RFC 9112 section 7.1 for chunks.

use crate::proto::classify::Api;
use crate::proto::classify::simd::{Level, Marks, equal_16, marked_quote};

/// What an engine said of one request. Tokens are the engine's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All of the prompt, cached tokens included.
    pub prompt_tokens: Option<u64>,
    /// How much of the prompt came from the engine's cache; never more than `prompt_tokens`.
    pub cached_tokens: Option<u64>,
    /// What was generated.
    pub completion_tokens: Option<u64>,
}

/// The objects that hold a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    Usage,
    Timings,
    MetaInfo,
}

const REPORTS: [Report; 3] = [Report::Usage, Report::Timings, Report::MetaInfo];

impl Report {
    const fn key(self) -> &'static [u8] {
        match self {
            Report::Usage => b"\"usage\"",
            Report::Timings => b"\"timings\"",
            Report::MetaInfo => b"\"meta_info\"",
        }
    }
}

/// The longest of the keys.
const KEY_BYTES_MAX: usize = 11;

/// Of the keys, and of the first of them.
const MARKS: Marks = Marks::of(&[REPORTS[0].key(), REPORTS[1].key(), REPORTS[2].key()]);
const MARKS_OF_USAGE: Marks = Marks::of(&[Report::Usage.key()]);

/// The numbers that reports hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    /// All of the prompt.
    Prompt,
    /// The prompt, all of it or without what came from the cache: that depends on the fields beside it.
    Input,
    /// Part of `Prompt` or `Input`.
    Cached,
    /// Beside `Input`.
    CacheRead,
    /// Beside `Input`.
    CacheWritten,
    /// Prompt tokens not in the cache.
    Processed,
    Completion,
}

const FIELDS: usize = 7;
/// The longest name of a field.
const NAME_BYTES_MAX: usize = 27;
/// The length of a string that is no name that matters.
const TOO_LONG: u8 = u8::MAX;

/// Which number of `report` is called `name`. `nested`: in the object that details the prompt.
fn field(report: Report, nested: bool, name: &[u8]) -> Option<Field> {
    if nested {
        return (name == b"cached_tokens").then_some(Field::Cached);
    }
    Some(match (report, name) {
        (Report::Usage | Report::MetaInfo, b"prompt_tokens") => Field::Prompt,
        (Report::Usage | Report::MetaInfo, b"completion_tokens") => Field::Completion,
        (Report::Usage | Report::MetaInfo, b"cached_tokens") => Field::Cached,
        (Report::Usage, b"input_tokens") => Field::Input,
        (Report::Usage, b"output_tokens") => Field::Completion,
        (Report::Usage, b"cache_read_input_tokens") => Field::CacheRead,
        (Report::Usage, b"cache_creation_input_tokens") => Field::CacheWritten,
        (Report::Timings, b"cache_n") => Field::Cached,
        (Report::Timings, b"prompt_n") => Field::Processed,
        (Report::Timings, b"predicted_n") => Field::Completion,
        _ => return None,
    })
}

/// The numbers of one report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Numbers([Option<u64>; FIELDS]);

impl Numbers {
    fn of(&self, field: Field) -> Option<u64> {
        self.0[field as usize]
    }

    fn set(&mut self, field: Field, value: u64) {
        self.0[field as usize] = Some(value);
    }

    /// A later report's numbers take the place of these. One that says nothing of the prompt (Anthropic's last event of a
    /// stream) leaves what is known of it.
    fn follow(&mut self, later: &Numbers) {
        let completion = later.of(Field::Completion).or(self.of(Field::Completion));
        let size = |numbers: &Numbers| {
            let sizes = [Field::Prompt, Field::Input, Field::Processed];
            sizes.into_iter().find_map(|field| numbers.of(field))
        };
        let cache = |numbers: &Numbers| {
            [Field::Cached, Field::CacheRead, Field::CacheWritten].iter().any(|f| numbers.of(*f).is_some())
        };
        // The same size again, and not a word of the cache: that was said before.
        let repeats = size(later) == size(self) && !cache(later);
        if size(later).is_some() && !repeats {
            *self = *later;
        }
        self.0[Field::Completion as usize] = completion;
    }

    fn usage(&self) -> Usage {
        let cached = self.of(Field::Cached).or(self.of(Field::CacheRead));
        let beside = [Field::CacheRead, Field::CacheWritten].map(|field| self.of(field).unwrap_or(0));
        let prompt_tokens = match (self.of(Field::Prompt), self.of(Field::Input), self.of(Field::Processed)) {
            (Some(all), _, _) => Some(all),
            (None, Some(rest), _) => Some(beside.iter().fold(rest, |sum, part| sum.saturating_add(*part))),
            // llama.cpp counts both parts; either alone says nothing of the whole.
            (None, None, Some(rest)) => cached.map(|part| part.saturating_add(rest)),
            (None, None, None) => None,
        };
        Usage {
            prompt_tokens,
            cached_tokens: cached.map(|tokens| tokens.min(prompt_tokens.unwrap_or(u64::MAX))),
            completion_tokens: self.of(Field::Completion),
        }
    }
}

/// Where in the answer the next byte stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Outside reports.
    Search,
    /// Behind the first bytes of what may become a key.
    Key,
    /// Behind a report's key.
    Colon,
    Open,
    /// In a report, between its strings and numbers.
    Between,
    Text,
    Escape,
    /// Behind the colon of the field in `wanted`.
    Value,
    Number,
}

/// Chunk framing met inside a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    None,
    /// Behind the CR that ends a chunk.
    Cr,
    Lf,
    /// In the size of the next chunk.
    Size,
    SizeCr,
}

/// Reads the reports of one answer; see the module's text.
#[derive(Clone, Copy, Debug)]
pub struct UsageScan {
    level: Level,
    /// How many of [`REPORTS`] this API's answers may hold.
    reports: u8,
    step: Step,
    line: Line,
    report: Report,
    /// Open braces and brackets of the report.
    depth: u32,
    /// Depth of the object that details the prompt, while inside it.
    details: u32,
    /// The last byte of the piece before.
    before: u8,
    /// The string being read, or the last one: a part of a key, or a name in a report.
    text: [u8; NAME_BYTES_MAX],
    text_len: u8,
    wanted: Field,
    number: u64,
    /// Of the report being read.
    numbers: Numbers,
    /// Of the complete ones: in `usage` or `meta_info`, and in `timings`.
    reported: Numbers,
    timings: Numbers,
}

impl Default for UsageScan {
    fn default() -> Self {
        UsageScan::new(Api::OpenAi)
    }
}

impl UsageScan {
    /// For one answer of an endpoint of `api`. An answer with a Content-Encoding need not be fed: nothing is found in it.
    pub fn new(api: Api) -> Self {
        UsageScan {
            level: Level::detect(),
            reports: match api {
                Api::OpenAi => REPORTS.len() as u8,
                Api::Anthropic => 1,
            },
            step: Step::Search,
            line: Line::None,
            report: Report::Usage,
            depth: 0,
            details: 0,
            before: 0,
            text: [0; NAME_BYTES_MAX],
            text_len: 0,
            wanted: Field::Prompt,
            number: 0,
            numbers: Numbers::default(),
            reported: Numbers::default(),
            timings: Numbers::default(),
        }
    }

    /// The next bytes of the answer's body, of any length.
    #[inline]
    pub fn feed(&mut self, piece: &[u8]) {
        let mut at = 0;
        if self.step != Step::Search {
            at = self.walk(piece, 0);
        }
        if at < piece.len() {
            self.search(piece, at);
        }
        self.before = piece.last().copied().unwrap_or(self.before);
    }

    /// What the answer said; the scan is as new afterwards.
    pub fn finish(&mut self) -> Usage {
        let (reported, timings) = (self.reported.usage(), self.timings.usage());
        self.reported = Numbers::default();
        self.timings = Numbers::default();
        self.step = Step::Search;
        self.line = Line::None;
        self.before = 0;
        let matching = reported.prompt_tokens.is_none() || reported.prompt_tokens == timings.prompt_tokens;
        Usage {
            prompt_tokens: reported.prompt_tokens.or(timings.prompt_tokens),
            cached_tokens: reported.cached_tokens.or(timings.cached_tokens.filter(|_| matching)),
            completion_tokens: reported.completion_tokens.or(timings.completion_tokens),
        }
    }

    /// Goes from key to key, outside reports from `at` on.
    fn search(&mut self, piece: &[u8], mut at: usize) {
        let mut outside = at;
        while let Some(found) = self.beginning(piece, at) {
            at = found + 1;
            if self.escaped(piece, found) {
                continue;
            }
            let rest = &piece[found..];
            let Some(report) = self.reports().iter().find(|report| rest.starts_with(report.key())) else {
                continue;
            };
            self.report = *report;
            self.step = Step::Colon;
            at = self.walk(piece, found + report.key().len());
            if self.step != Step::Search {
                return;
            }
            outside = at;
        }
        self.keep_tail(piece, outside);
    }

    /// Where the first quote is, from `at` on, that may begin a key.
    #[inline]
    fn beginning(&self, piece: &[u8], at: usize) -> Option<usize> {
        let marks = if self.reports == 1 { &MARKS_OF_USAGE } else { &MARKS };
        marked_quote(self.level, piece, at, marks)
    }

    fn reports(&self) -> &'static [Report] {
        &REPORTS[..usize::from(self.reports)]
    }

    /// Whether the quote at `at` is part of a string.
    #[inline]
    fn escaped(&self, piece: &[u8], at: usize) -> bool {
        at.checked_sub(1).map_or(self.before, |at| piece[at]) == b'\\'
    }

    /// Notes a key that the piece may end inside of, outside reports from `at` on. Keys have quotes only at their ends, so
    /// only the last quote can begin one.
    #[inline]
    fn keep_tail(&mut self, piece: &[u8], at: usize) {
        let from = at.max(piece.len().saturating_sub(KEY_BYTES_MAX - 1));
        let Some(quote) = piece[from..].iter().rposition(|byte| *byte == b'"') else { return };
        let begun = &piece[from + quote..];
        if self.begins_key(begun) && !self.escaped(piece, from + quote) {
            self.text[..begun.len()].copy_from_slice(begun);
            self.text_len = begun.len() as u8;
            self.step = Step::Key;
        }
    }

    fn begins_key(&self, begun: &[u8]) -> bool {
        self.reports().iter().any(|report| report.key().starts_with(begun))
    }

    /// Reads on until it is outside reports again, or the piece ends. Returns how far it came.
    fn walk(&mut self, piece: &[u8], mut at: usize) -> usize {
        while let Some(&byte) = piece.get(at) {
            if self.line == Line::None {
                match self.step {
                    Step::Text => {
                        at += self.text_run(&piece[at..]);
                        continue;
                    }
                    Step::Number if byte.is_ascii_digit() => {
                        at += self.digit_run(&piece[at..]);
                        continue;
                    }
                    Step::Between if byte != b'\r' => {
                        at += self.between_run(&piece[at..]);
                        if self.step == Step::Search {
                            break;
                        }
                        continue;
                    }
                    _ => {}
                }
            }
            let plain = self.line == Line::None && (byte != b'\r' || self.step == Step::Key);
            let takes = if plain { self.step(byte) } else { self.framing(byte) };
            at += usize::from(takes);
            if self.step == Step::Search {
                break;
            }
        }
        at
    }

    /// A string up to its end, or as far as `rest` has it. Returns how far it came: at least one byte.
    #[inline]
    fn text_run(&mut self, rest: &[u8]) -> usize {
        let have = usize::from(self.text_len);
        // Nearly all names are short, and all of them are here.
        if have == 0
            && let Some(chunk) = rest.first_chunk::<16>()
        {
            let end = equal_16(chunk, b'"').trailing_zeros() as usize;
            let others = equal_16(chunk, b'\\') | equal_16(chunk, b'\r');
            if end < 16 && others.trailing_zeros() as usize > end {
                self.text[..16].copy_from_slice(chunk);
                self.text_len = end as u8;
                self.step = Step::Between;
                return end + 1;
            }
        }
        let end = rest.iter().position(|byte| matches!(byte, b'"' | b'\\' | b'\r')).unwrap_or(rest.len());
        if let Some(room) = self.text.get_mut(have..have + end) {
            room.copy_from_slice(&rest[..end]);
            self.text_len += end as u8;
        } else {
            self.text_len = TOO_LONG;
        }
        match rest.get(end) {
            None => end,
            Some(b'"') => {
                self.step = Step::Between;
                end + 1
            }
            Some(b'\\') => {
                self.text_len = TOO_LONG;
                self.step = Step::Escape;
                end + 1
            }
            Some(_) => {
                self.line = Line::Cr;
                end + 1
            }
        }
    }

    /// From between strings and numbers on, through those that are all there. Returns how far it came: at least one byte, which is no
    /// CR.
    #[inline]
    fn between_run(&mut self, rest: &[u8]) -> usize {
        let mut at = 0;
        while let Some(&byte) = rest.get(at).filter(|byte| **byte != b'\r') {
            at += 1;
            self.between(byte);
            if self.step == Step::Text && at < rest.len() {
                at += self.text_run(&rest[at..]);
            } else if self.step == Step::Value && rest.get(at).is_some_and(u8::is_ascii_digit) {
                (self.number, self.step) = (0, Step::Number);
                at += self.digit_run(&rest[at..]);
                if self.step == Step::Number && matches!(rest.get(at), Some(b',' | b'}')) {
                    self.numbers.set(self.wanted, self.number);
                    self.step = Step::Between;
                }
            }
            if self.step != Step::Between || self.line != Line::None {
                break;
            }
        }
        at
    }

    /// Digits of a number, as far as `rest` has them. Returns how many: at least one.
    #[inline]
    fn digit_run(&mut self, rest: &[u8]) -> usize {
        for (at, byte) in rest.iter().enumerate() {
            if !byte.is_ascii_digit() {
                return at;
            }
            let digit = u64::from(byte - b'0');
            match self.number.checked_mul(10).and_then(|tens| tens.checked_add(digit)) {
                Some(number) => self.number = number,
                None => {
                    self.step = Step::Between;
                    return at + 1;
                }
            }
        }
        rest.len()
    }

    /// From a CR on, which no string holds: chunk framing, or the end of a line. False: as for `step`.
    fn framing(&mut self, byte: u8) -> bool {
        self.line = match (self.line, byte) {
            (Line::None, b'\r') => Line::Cr,
            (Line::Cr, b'\n') => Line::Lf,
            // A chunk that ends between the two bytes of a line's end.
            (Line::Cr, b'\r') => Line::Cr,
            (Line::Lf, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => Line::Size,
            (Line::Size, b'\r') => Line::SizeCr,
            // An extension, too.
            (Line::Size, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F' | b';' | b'=' | b' ') => Line::Size,
            (Line::SizeCr, b'\n') => Line::None,
            (Line::Lf, _) if !matches!(self.step, Step::Text | Step::Escape) => {
                // The end of a line: white space, then `byte`.
                self.line = Line::None;
                self.step(b'\n');
                return false;
            }
            _ => {
                // Neither JSON nor chunks.
                self.line = Line::None;
                self.step = Step::Search;
                return false;
            }
        };
        true
    }

    /// Takes one byte. False: it is to be looked at again, in the step that is now.
    fn step(&mut self, byte: u8) -> bool {
        let space = matches!(byte, b' ' | b'\n' | b'\t');
        match self.step {
            Step::Search => return false,
            Step::Key => return self.key_byte(byte),
            Step::Colon | Step::Open if space => {}
            Step::Colon if byte == b':' => self.step = Step::Open,
            Step::Open if byte == b'{' => {
                self.numbers = Numbers::default();
                (self.depth, self.details) = (1, 0);
                self.step = Step::Between;
            }
            Step::Colon | Step::Open => {
                self.step = Step::Search;
                return false;
            }
            // `between_run` and `text_run` read them.
            Step::Between | Step::Text => {}
            Step::Escape => self.step = Step::Text,
            Step::Value if space => {}
            Step::Value => {
                let digit = byte.is_ascii_digit();
                self.number = 0;
                self.step = if digit { Step::Number } else { Step::Between };
                return false;
            }
            // Digits, `digit_run` reads.
            Step::Number => match byte {
                // No count of tokens.
                b'.' | b'e' | b'E' => self.step = Step::Between,
                _ => {
                    self.numbers.set(self.wanted, self.number);
                    self.step = Step::Between;
                    return false;
                }
            },
        }
        true
    }

    #[inline]
    fn between(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.text_len = 0;
                self.step = Step::Text;
            }
            b':' => {
                let name = self.text.get(..usize::from(self.text_len)).unwrap_or_default();
                let nested = self.details == self.depth;
                if (nested || self.depth == 1)
                    && let Some(field) = field(self.report, nested, name)
                {
                    self.wanted = field;
                    self.step = Step::Value;
                }
            }
            b'{' | b'[' => {
                let name = self.text.get(..usize::from(self.text_len)).unwrap_or_default();
                self.depth = self.depth.saturating_add(1);
                if self.depth == 2
                    && self.report == Report::Usage
                    && matches!(name, b"prompt_tokens_details" | b"input_tokens_details")
                {
                    self.details = 2;
                }
                // Not the name of what comes inside.
                self.text_len = 0;
            }
            b'}' | b']' => {
                self.depth -= 1;
                self.text_len = 0;
                if self.depth < self.details {
                    self.details = 0;
                }
                if self.depth == 0 {
                    match self.report {
                        Report::Timings => self.timings.follow(&self.numbers),
                        Report::Usage | Report::MetaInfo => self.reported.follow(&self.numbers),
                    }
                    self.step = Step::Search;
                }
            }
            // A value that is no object.
            b',' => self.text_len = 0,
            _ => {}
        }
    }

    /// One more byte of what may be a key.
    fn key_byte(&mut self, byte: u8) -> bool {
        let len = usize::from(self.text_len);
        self.text[len] = byte;
        let begun = &self.text[..len + 1];
        if let Some(report) = self.reports().iter().find(|report| report.key() == begun) {
            self.report = *report;
            self.step = Step::Colon;
        } else if self.begins_key(begun) {
            self.text_len += 1;
        } else {
            // The byte may begin another.
            self.step = Step::Search;
            return false;
        }
        true
    }
}

#[cfg(test)]
mod tests;
