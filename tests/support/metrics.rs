//! The metrics page, parsed.

use std::collections::BTreeMap;

#[derive(Debug, Clone)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// All samples of one scrape.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    pub samples: Vec<Sample>,
    pub text: String,
}

impl Metrics {
    /// Parses the text exposition format; panics on a line that is none of its forms.
    #[track_caller]
    pub fn parse(text: &str) -> Metrics {
        let samples = text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| sample(line).unwrap_or_else(|what| panic!("metrics line {line:?}: {what}")))
            .collect();
        Metrics { samples, text: text.to_owned() }
    }

    /// The sum over all samples of `name` whose labels include `labels`; 0 when there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|s| s.value).sum()
    }

    pub fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |s| {
            s.name == name && labels.iter().all(|(k, v)| s.labels.get(*k).is_some_and(|have| have == v))
        })
    }

    pub fn has(&self, name: &str) -> bool {
        self.samples.iter().any(|s| s.name == name)
    }
}

fn sample(line: &str) -> Result<Sample, &'static str> {
    let name_end = line.find(['{', ' ']).ok_or("no value")?;
    let name = line[..name_end].to_owned();
    let mut labels = BTreeMap::new();
    let mut rest = &line[name_end..];
    if let Some(mut inside) = rest.strip_prefix('{') {
        loop {
            if let Some(after) = inside.strip_prefix('}') {
                rest = after;
                break;
            }
            let (key, after) = inside.split_once("=\"").ok_or("label without =\"")?;
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next().ok_or("label value without an end")? {
                    (_, '\\') => match chars.next().ok_or("label value ends in a backslash")?.1 {
                        'n' => value.push('\n'),
                        other => value.push(other),
                    },
                    (at, '"') => break at + 1,
                    (_, other) => value.push(other),
                }
            };
            labels.insert(key.to_owned(), value);
            inside = after[end..].strip_prefix(',').unwrap_or(&after[end..]);
        }
    }
    let value = rest.split_whitespace().next().ok_or("no value")?;
    let value = value.parse().map_err(|_| "value is not a number")?;
    Ok(Sample { name, labels, value })
}
