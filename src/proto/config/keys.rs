//! Reads one table of the file: each key by name, with its default, its rule and its path; what nobody asked for is
//! unknown.
//!
//! A derived deserializer stops at its first fault and does not know the path it is at. The file's tables are walked by
//! hand instead, so that an operator sees every fault of a file in one run.
//!
//! *Bound and cost*: linear in the file, apart from the search for a nearest key, which only unknown keys pay for.
//! *Errors*: pushed to one [`Faults`]; after a fault the default is used and reading goes on.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::fault::{Faults, show};

/// A type that a key may have.
pub(super) trait Value: Sized {
    /// What narrows the type down: a range, or nothing.
    type Rule: ?Sized;
    /// The value of `raw`, or what was expected.
    fn read(raw: &toml::Value, rule: &Self::Rule) -> Result<Self, String>;
    /// The form that [`Value::read`] takes back.
    fn write(&self) -> toml::Value;
}

impl Value for u64 {
    type Rule = RangeInclusive<u64>;
    fn read(raw: &toml::Value, range: &RangeInclusive<u64>) -> Result<u64, String> {
        raw.as_integer()
            .and_then(|n| u64::try_from(n).ok())
            .filter(|n| range.contains(n))
            .ok_or_else(|| format!("expected a whole number from {} to {}", range.start(), range.end()))
    }
    fn write(&self) -> toml::Value {
        // Ranges end far below: TOML has no larger integers.
        toml::Value::Integer(i64::try_from(*self).unwrap_or(i64::MAX))
    }
}

impl Value for u32 {
    type Rule = RangeInclusive<u32>;
    fn read(raw: &toml::Value, range: &RangeInclusive<u32>) -> Result<u32, String> {
        let wide = u64::from(*range.start())..=u64::from(*range.end());
        u64::read(raw, &wide).map(|n| u32::try_from(n).expect("the range ends within u32"))
    }
    fn write(&self) -> toml::Value {
        toml::Value::Integer(i64::from(*self))
    }
}

/// Finite numbers; whole ones may be written without a point.
impl Value for f64 {
    type Rule = RangeInclusive<f64>;
    fn read(raw: &toml::Value, range: &RangeInclusive<f64>) -> Result<f64, String> {
        let number = match raw {
            toml::Value::Float(x) => Some(*x),
            toml::Value::Integer(n) => Some(*n as f64),
            _ => None,
        };
        // Adding zero turns -0.0 into 0.0, which would else show as "-0".
        number
            .filter(|x| x.is_finite() && range.contains(x))
            .map(|x| x + 0.0)
            .ok_or_else(|| format!("expected a finite number from {} to {}", range.start(), range.end()))
    }
    fn write(&self) -> toml::Value {
        toml::Value::Float(*self)
    }
}

/// Text that passes a check, whose error says what was expected.
impl Value for String {
    type Rule = fn(&str) -> Result<(), String>;
    fn read(raw: &toml::Value, check: &Self::Rule) -> Result<String, String> {
        let text = raw.as_str().ok_or_else(|| "expected a string".to_owned())?;
        check(text).map(|()| text.to_owned())
    }
    fn write(&self) -> toml::Value {
        toml::Value::String(self.clone())
    }
}

impl Value for bool {
    type Rule = ();
    fn read(raw: &toml::Value, (): &()) -> Result<bool, String> {
        raw.as_bool().ok_or_else(|| "expected true or false".to_owned())
    }
    fn write(&self) -> toml::Value {
        toml::Value::Boolean(*self)
    }
}

/// Where to listen, if at all; empty text: nowhere.
impl Value for Option<SocketAddr> {
    type Rule = ();
    fn read(raw: &toml::Value, (): &()) -> Result<Self, String> {
        match raw.as_str() {
            Some("") => Ok(None),
            text => text
                .and_then(|text| text.parse().ok())
                .map(Some)
                .ok_or_else(|| "expected IP:PORT, such as 0.0.0.0:9090; empty: none".to_owned()),
        }
    }
    fn write(&self) -> toml::Value {
        toml::Value::String(self.map_or_else(String::new, |address| address.to_string()))
    }
}

/// A file to read at start; empty text: none.
impl Value for Option<PathBuf> {
    type Rule = ();
    fn read(raw: &toml::Value, (): &()) -> Result<Self, String> {
        let text = raw.as_str().ok_or_else(|| "expected a string: the path of a file".to_owned())?;
        Ok((!text.is_empty()).then(|| PathBuf::from(text)))
    }
    fn write(&self) -> toml::Value {
        toml::Value::String(self.as_deref().map_or_else(String::new, |path| path.display().to_string()))
    }
}

/// A closed set of words. `later` words are known, and refused in this version.
pub(super) trait Word: Sized + Copy + 'static {
    const WORDS: &'static [(&'static str, Self)];
    const LATER: &'static [&'static str] = &[];
}

/// The word's value, or what was expected.
pub(super) fn word<T: Word>(text: &str) -> Result<T, String> {
    if let Some((_, value)) = T::WORDS.iter().find(|(name, _)| *name == text) {
        return Ok(*value);
    }
    let names: Vec<&str> = T::WORDS.iter().map(|(name, _)| *name).collect();
    if T::LATER.contains(&text) {
        return Err(format!("not in this version; expected {}", list(&names)));
    }
    let known: Vec<&str> = names.iter().chain(T::LATER).copied().collect();
    Err(match nearest(text, &known) {
        Some(near) => format!("expected {}; nearest: \"{near}\"", list(&known)),
        None => format!("expected {}", list(&known)),
    })
}

/// `"a", "b" or "c"`.
pub(super) fn list(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

/// The word of `known` that `text` was probably meant to be. `None`: nothing is like it.
pub(crate) fn nearest<'k>(text: &str, known: &[&'k str]) -> Option<&'k str> {
    let text = text.to_lowercase();
    known
        .iter()
        .map(|word| (strsim::normalized_damerau_levenshtein(&text, word), *word))
        .filter(|(likeness, _)| *likeness >= 0.4)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, word)| word)
}

/// Words in a key's name that say that its value is not for a screen.
const SECRET_WORDS: [&str; 4] = ["key", "token", "secret", "password"];

/// One table, and what has been asked of it.
pub(super) struct Keys<'a> {
    table: &'a toml::Table,
    path: String,
    known: Vec<&'static str>,
    pub(super) faults: &'a mut Faults,
}

impl<'a> Keys<'a> {
    /// The whole file.
    pub(super) fn root(table: &'a toml::Table, faults: &'a mut Faults) -> Self {
        Keys { table, path: String::new(), known: Vec::new(), faults }
    }

    /// Path of a key of this table.
    pub(super) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// What stands at `key`, which becomes known.
    pub(super) fn raw(&mut self, key: &'static str) -> Option<&'a toml::Value> {
        self.known.push(key);
        self.table.get(key)
    }

    /// A fault at `key`, whose value is shown as it stands.
    pub(super) fn fault(&mut self, key: &str, expected: impl Into<String>) {
        let value = self.table.get(key).map_or_else(|| "(missing)".to_owned(), show);
        let path = self.path_of(key);
        self.faults.push(path, value, expected);
    }

    /// The value of `key`; `default` where it is absent or faulty.
    pub(super) fn value<T: Value>(&mut self, key: &'static str, default: T, rule: &T::Rule) -> T {
        self.optional(key, rule).unwrap_or(default)
    }

    /// The value of `key`; `None` where it is absent or faulty.
    pub(super) fn optional<T: Value>(&mut self, key: &'static str, rule: &T::Rule) -> Option<T> {
        match self.raw(key).map(|raw| T::read(raw, rule)) {
            None => None,
            Some(Ok(value)) => Some(value),
            Some(Err(expected)) => {
                self.fault(key, expected);
                None
            }
        }
    }

    /// A list of distinct strings, each passing `check`; empty where it is absent or faulty.
    pub(super) fn strings(
        &mut self,
        key: &'static str,
        check: fn(&str) -> Result<(), String>,
    ) -> Vec<String> {
        let Some(raw) = self.raw(key) else { return Vec::new() };
        let Some(items) = raw.as_array() else {
            self.fault(key, "expected a list of strings");
            return Vec::new();
        };
        let mut strings: Vec<String> = Vec::with_capacity(items.len());
        let mut seen = std::collections::HashSet::new();
        for (i, item) in items.iter().enumerate() {
            match String::read(item, &check) {
                Ok(text) if seen.insert(text.clone()) => strings.push(text),
                Ok(_) => self.faults.push(
                    format!("{}[{i}]", self.path_of(key)),
                    show(item),
                    "expected each value once",
                ),
                Err(expected) => {
                    self.faults.push(format!("{}[{i}]", self.path_of(key)), show(item), expected);
                }
            }
        }
        strings
    }

    /// A key whose feature comes later: its default is accepted, anything else would silently have no effect.
    pub(super) fn later(&mut self, key: &'static str, default: &toml::Value) {
        if let Some(raw) = self.raw(key)
            && !same(raw, default)
        {
            self.fault(key, format!("not in this version; only the default, {default}, is accepted"));
        }
    }

    /// A key or table whose feature comes later and that has no default: any use is refused.
    pub(super) fn refuse(&mut self, key: &'static str, expected: &str) {
        if self.raw(key).is_some_and(|raw| !raw.as_array().is_some_and(Vec::is_empty)) {
            self.fault(key, expected);
        }
    }

    /// The sub-table at `key`, empty where it is absent. `None`: it is no table (and the fault is noted).
    pub(super) fn table(&mut self, key: &'static str) -> Option<Keys<'_>> {
        static EMPTY: std::sync::LazyLock<toml::Table> = std::sync::LazyLock::new(toml::Table::new);
        let table = match self.raw(key) {
            None => &EMPTY,
            Some(toml::Value::Table(table)) => table,
            Some(_) => {
                let path = self.path_of(key);
                self.fault(key, format!("expected a table: [{path}]"));
                return None;
            }
        };
        Some(Keys { table, path: self.path_of(key), known: Vec::new(), faults: self.faults })
    }

    /// How many tables stand at `key`; 0 where it is absent or no list of tables (and the fault is noted).
    pub(super) fn count(&mut self, key: &'static str) -> usize {
        match self.raw(key) {
            None => 0,
            Some(toml::Value::Array(items)) => items.len(),
            Some(_) => {
                let path = self.path_of(key);
                self.fault(key, format!("expected one or more tables: [[{}]]", strip_indexes(&path)));
                0
            }
        }
    }

    /// The table at `key[index]`, after [`Keys::count`]. `None`: it is no table (and the fault is noted).
    pub(super) fn table_at(&mut self, key: &'static str, index: usize) -> Option<Keys<'_>> {
        let path = format!("{}[{index}]", self.path_of(key));
        match self.table.get(key)?.as_array()?.get(index)? {
            toml::Value::Table(table) => Some(Keys { table, path, known: Vec::new(), faults: self.faults }),
            other => {
                self.faults.push(path, show(other), "expected a table");
                None
            }
        }
    }

    /// Notes a fault for each key that nobody asked for. Ends the reading of this table.
    pub(super) fn end(self) {
        for (key, raw) in self.table {
            if self.known.contains(&key.as_str()) {
                continue;
            }
            let lower = key.to_lowercase();
            let shown = match raw {
                toml::Value::String(_) if SECRET_WORDS.iter().any(|word| lower.contains(word)) => {
                    "(not shown)".to_owned()
                }
                other => show(other),
            };
            let expected = match nearest(key, &self.known) {
                Some(near) => format!("unknown key; nearest known key: \"{near}\""),
                None => {
                    let mut known = self.known.clone();
                    known.sort_unstable();
                    format!("unknown key; expected {}", list(&known))
                }
            };
            self.faults.push(self.path_of(key), shown, expected);
        }
    }
}

/// Equal, where 2 and 2.0 are.
fn same(a: &toml::Value, b: &toml::Value) -> bool {
    match (a, b) {
        (toml::Value::Integer(n), toml::Value::Float(x))
        | (toml::Value::Float(x), toml::Value::Integer(n)) => *n as f64 == *x,
        _ => a == b,
    }
}

/// `pool[0].server` as a table header has it: `pool.server`.
fn strip_indexes(path: &str) -> String {
    let mut plain = String::with_capacity(path.len());
    let mut inside = false;
    for c in path.chars() {
        match c {
            '[' => inside = true,
            ']' => inside = false,
            _ if !inside => plain.push(c),
            _ => {}
        }
    }
    plain
}
