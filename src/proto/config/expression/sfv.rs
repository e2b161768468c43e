//! One Item with Parameters of RFC 8941 (structured fields), strictly: no Date, no Display String, no leniency.
//!
//! A small parser of our own: the crates for it bring a base64 decoder, a map and a procedural macro for parts of the format that an
//! expression may not use anyway, and say less about what is wrong.
//!
//! *Invariant*: what is accepted is exactly what RFC 8941 section 4.2.3 accepts as the whole of a field's value; the public test
//! vectors are replayed by `tests/structured_fields.rs`.
//! *Bound and cost*: linear in the value; one allocation for the parameters, and one for each string with an escape.
//! *Errors*: [`Fault`]: at which byte, and what was expected there.
//! *Source*: RFC 8941 sections 3.1.2, 3.3 and 4.2.

use std::borrow::Cow;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Bare<'a> {
    /// At most 15 digits.
    Integer(i64),
    /// At most 12 digits before the point and 3 behind it.
    Decimal(f64),
    /// Without its quotes and escapes.
    String(Cow<'a, str>),
    Token(&'a str),
    /// As it stands between the colons: base64, padded or not.
    Bytes(&'a str),
    Boolean(bool),
}

/// A parameter, with the text of its value as it was written (empty: none was, which means true).
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter<'a> {
    pub name: &'a str,
    pub value: Bare<'a>,
    pub text: &'a str,
}

/// An item. Parameters as they were written, repeats included: of those the last counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Item<'a> {
    pub value: Bare<'a>,
    pub parameters: Vec<Parameter<'a>>,
}

/// What breaks the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Bytes before it; the value's length where it ends too soon.
    pub at: usize,
    pub expected: &'static str,
}

/// Reads a whole value.
pub fn parse(value: &[u8]) -> Result<Item<'_>, Fault> {
    let mut reader = Reader { value, at: 0 };
    // Beyond ASCII nothing is allowed anywhere, so what follows may cut texts at any byte.
    if let Some(at) = value.iter().position(|b| !b.is_ascii()) {
        return Err(Fault { at, expected: "ASCII" });
    }
    reader.skip_spaces();
    let item = reader.bare()?;
    let mut parameters = Vec::new();
    while reader.take(b';') {
        reader.skip_spaces();
        let name = reader.key()?;
        let start = reader.at + 1;
        let value = if reader.take(b'=') { Some(reader.bare()?) } else { None };
        let text = if value.is_some() { reader.text(start) } else { "" };
        parameters.push(Parameter { name, value: value.unwrap_or(Bare::Boolean(true)), text });
    }
    reader.skip_spaces();
    if reader.at < value.len() {
        return Err(reader.fault("nothing more, or ';' right behind the value before"));
    }
    Ok(Item { value: item, parameters })
}

struct Reader<'a> {
    /// ASCII.
    value: &'a [u8],
    at: usize,
}

const fn is_tchar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^'..=b'`' | b'|' | b'~')
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.value.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    /// Only spaces: a tab is none.
    fn skip_spaces(&mut self) {
        while self.take(b' ') {}
    }

    /// Takes the bytes that `belongs` says yes to.
    fn run(&mut self, belongs: impl Fn(u8) -> bool) -> &'a str {
        let start = self.at;
        while self.peek().is_some_and(&belongs) {
            self.at += 1;
        }
        self.text(start)
    }

    /// What was read from `start` on.
    fn text(&self, start: usize) -> &'a str {
        std::str::from_utf8(&self.value[start..self.at]).expect("the whole value is ASCII")
    }

    const fn fault(&self, expected: &'static str) -> Fault {
        Fault { at: self.at, expected }
    }

    fn key(&mut self) -> Result<&'a str, Fault> {
        if !self.peek().is_some_and(|b| b.is_ascii_lowercase() || b == b'*') {
            return Err(self.fault("a name that starts with a lowercase letter"));
        }
        Ok(self
            .run(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'-' | b'.' | b'*')))
    }

    fn bare(&mut self) -> Result<Bare<'a>, Fault> {
        match self.peek() {
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b'"') => self.string(),
            Some(b'*' | b'a'..=b'z' | b'A'..=b'Z') => {
                Ok(Bare::Token(self.run(|b| is_tchar(b) || b == b':' || b == b'/')))
            }
            Some(b':') => self.bytes(),
            Some(b'?') => {
                self.at += 1;
                match self.peek() {
                    Some(digit @ (b'0' | b'1')) => {
                        self.at += 1;
                        Ok(Bare::Boolean(digit == b'1'))
                    }
                    _ => Err(self.fault("0 or 1 behind '?'")),
                }
            }
            _ => Err(self.fault("a value: a number, a token or a quoted string")),
        }
    }

    fn number(&mut self) -> Result<Bare<'a>, Fault> {
        let start = self.at;
        self.take(b'-');
        let whole = self.run(|b| b.is_ascii_digit());
        if whole.is_empty() {
            return Err(self.fault("a digit"));
        }
        if !self.take(b'.') {
            if whole.len() > 15 {
                return Err(Fault { at: start, expected: "an integer of at most 15 digits" });
            }
            return Ok(Bare::Integer(self.text(start).parse().expect("15 digits fit")));
        }
        let part = self.run(|b| b.is_ascii_digit());
        if whole.len() > 12 || !(1..=3).contains(&part.len()) {
            let expected = "a decimal of at most 12 digits before the point and 1 to 3 behind it";
            return Err(Fault { at: start, expected });
        }
        Ok(Bare::Decimal(self.text(start).parse().expect("digits and a point are a number")))
    }

    fn string(&mut self) -> Result<Bare<'a>, Fault> {
        self.at += 1;
        let mut start = self.at;
        // Empty until the first escape, which costs the allocation.
        let mut unescaped = String::new();
        loop {
            match self.peek() {
                None => return Err(self.fault("a closing '\"'")),
                Some(b'"') => {
                    let rest = self.text(start);
                    self.at += 1;
                    return Ok(Bare::String(if unescaped.is_empty() {
                        Cow::Borrowed(rest)
                    } else {
                        unescaped += rest;
                        Cow::Owned(unescaped)
                    }));
                }
                Some(b'\\') => {
                    unescaped += self.text(start);
                    self.at += 1;
                    start = self.at;
                    if !matches!(self.peek(), Some(b'"' | b'\\')) {
                        return Err(self.fault("'\"' or '\\' behind '\\'"));
                    }
                    // Taken as it stands, as the first byte of what follows.
                    self.at += 1;
                    unescaped += self.text(start);
                    start = self.at;
                }
                Some(b' '..=b'~') => self.at += 1,
                Some(_) => return Err(self.fault("no control character in a string")),
            }
        }
    }

    fn bytes(&mut self) -> Result<Bare<'a>, Fault> {
        self.at += 1;
        let start = self.at;
        let text = self.run(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'='));
        if !self.take(b':') {
            return Err(self.fault("base64 and a closing ':'"));
        }
        let digits = text.trim_end_matches('=');
        let padded = text.len() > digits.len();
        // Padding may be left out (section 4.2.7), not be wrong.
        if digits.contains('=')
            || digits.len() % 4 == 1
            || padded && text.len() != digits.len().next_multiple_of(4)
        {
            return Err(Fault { at: start, expected: "base64" });
        }
        Ok(Bare::Bytes(text))
    }
}
