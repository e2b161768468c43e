//! What is wrong with a configuration: every fault at once, each with its place.

use std::fmt;

/// One fault. Shown as `path: value: what was expected`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Key path such as `pool[0].server[1].weight`, a flag such as `--spin-us`, or `line 3, column 7`.
    pub path: String,
    /// What stood there, shortened; `(missing)` where nothing did.
    pub value: String,
    /// What was expected instead.
    pub expected: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.path, self.value, self.expected)
    }
}

/// All faults of one configuration, in the order of its keys. Never empty when returned as an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl Faults {
    pub fn push(&mut self, path: impl Into<String>, value: impl Into<String>, expected: impl Into<String>) {
        self.0.push(Fault { path: path.into(), value: value.into(), expected: expected.into() });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// One fault a line, no newline at the end.
impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// Longest value shown in a fault, in characters.
const VALUE_CHARS_MAX: usize = 80;

/// `text` on one line, cut to [`VALUE_CHARS_MAX`].
pub(crate) fn shorten(text: &str) -> String {
    let mut short: String =
        text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).take(VALUE_CHARS_MAX + 1).collect();
    if short.chars().count() > VALUE_CHARS_MAX {
        short.pop();
        short.push('…');
    }
    short
}

/// `raw` as a fault shows it. Tables and lists of tables are only named.
pub(super) fn show(raw: &toml::Value) -> String {
    match raw {
        toml::Value::Table(_) => "(a table)".to_owned(),
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => "(tables)".to_owned(),
        other => shorten(&other.to_string()),
    }
}

/// Syntax faults of a file, by line and column (both from 1, columns in characters). One a line: what follows a fault on
/// its line is mostly its echo.
pub(super) fn syntax(text: &str) -> Option<Faults> {
    let (_, mut errors) = toml::de::DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return None;
    }
    errors.sort_by_key(|error| error.span().map_or(0, |span| span.start));
    let mut faults = Faults::default();
    let mut last_line = None;
    for error in errors {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let before = &text.as_bytes()[..at];
        let line = memchr::memchr_iter(b'\n', before).count();
        if last_line.replace(line) == Some(line) {
            continue;
        }
        let line_start = memchr::memrchr(b'\n', before).map_or(0, |newline| newline + 1);
        let column = String::from_utf8_lossy(&before[line_start..]).chars().count() + 1;
        let shown = text.lines().nth(line).unwrap_or("").trim();
        let shown = if shown.is_empty() { "(nothing)".to_owned() } else { shorten(shown) };
        let message = error.message().trim().replace('\n', ", ");
        faults.push(format!("line {}, column {column}", line + 1), shown, message);
    }
    Some(faults)
}
