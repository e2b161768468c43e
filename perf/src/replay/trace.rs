//! A request trace: when each request came, how long its prompt and answer were, and which prompts share a beginning.
//!
//! Format: JSON lines, `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, …]}`, one id per
//! 512 tokens of prompt, the last block counted even when it is partial. Ids are chained: the same id always stands behind the
//! same predecessor, so two prompts share exactly the leading ids they have in common. The published Mooncake traces are
//! of this form.
//!
//! *Invariant*: what is returned is in order of arrival, its blocks are numbered 0, 1, 2, … in order of appearance, and its
//! ids are chained.
//! *Bound and cost*: the whole file in memory; O(blocks).
//! *Errors*: the file or the line, what was found and what was expected.
//! *Source*: the Mooncake traces (FAST'25), as published with their paper.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

use crate::clock::MS;

/// Tokens of one block of the trace.
pub const BLOCK_TOKENS: u64 = 512;
/// Longest prompt or answer believed, in tokens: beyond it the file is not what it claims to be.
const TOKENS_MAX: u64 = 1 << 24;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Since the first request, in nanoseconds.
    pub arrival_ns: u64,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    /// Numbers of the prompt's blocks, from its beginning; at least one.
    pub blocks: Box<[u32]>,
}

impl Request {
    /// Tokens left to compute when the first `cached` blocks are there; the last block may be partial.
    pub fn uncached_tokens(&self, cached: usize) -> u64 {
        self.prompt_tokens.saturating_sub(cached as u64 * BLOCK_TOKENS)
    }
}

/// All requests of a file.
#[derive(Clone, Debug)]
pub struct Trace {
    pub name: String,
    pub requests: Vec<Request>,
    /// Blocks are numbered below this.
    pub distinct_blocks: usize,
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads a trace; its name is the file's, without ending.
    pub fn read(path: &Path) -> Result<Trace, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Trace::parse(name, &text).map_err(|e| format!("{}: {e}", path.display()))
    }

    pub fn parse(name: String, text: &str) -> Result<Trace, String> {
        let mut requests = Vec::new();
        // Number and predecessor of each id.
        let mut known: HashMap<u64, (u32, Option<u64>)> = HashMap::new();
        let (mut first_ms, mut last_ms) = (None, f64::NEG_INFINITY);
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let fault = |what: String| format!("line {}: {what}", i + 1);
            let line: Line = serde_json::from_str(line).map_err(|e| fault(e.to_string()))?;
            if !line.timestamp.is_finite() || line.timestamp < last_ms {
                return Err(fault(format!(
                    "timestamp {} after {last_ms}: expected requests in order of arrival",
                    line.timestamp
                )));
            }
            if line.input_length == 0 || line.input_length.max(line.output_length) > TOKENS_MAX {
                return Err(fault(format!(
                    "input_length {}, output_length {}: expected 1 to {TOKENS_MAX} and at most {TOKENS_MAX} tokens",
                    line.input_length, line.output_length
                )));
            }
            let wanted = line.input_length.div_ceil(BLOCK_TOKENS);
            if line.hash_ids.len() as u64 != wanted {
                return Err(fault(format!(
                    "{} hash_ids for {} tokens: expected {wanted}, one per {BLOCK_TOKENS} tokens",
                    line.hash_ids.len(),
                    line.input_length
                )));
            }
            let mut before = None;
            let mut blocks = Vec::with_capacity(line.hash_ids.len());
            for &id in &line.hash_ids {
                let number = u32::try_from(known.len()).map_err(|_| fault("over 2^32 blocks".into()))?;
                let &mut (number, predecessor) = known.entry(id).or_insert((number, before));
                if predecessor != before {
                    return Err(fault(format!(
                        "hash id {id} follows {} here and {} earlier: expected chained ids",
                        named(before),
                        named(predecessor)
                    )));
                }
                blocks.push(number);
                before = Some(id);
            }
            last_ms = line.timestamp;
            let since = line.timestamp - *first_ms.get_or_insert(line.timestamp);
            requests.push(Request {
                arrival_ns: (since * MS as f64).round() as u64,
                prompt_tokens: line.input_length,
                output_tokens: line.output_length,
                blocks: blocks.into(),
            });
        }
        if requests.is_empty() {
            return Err("no request: expected one JSON object per line".into());
        }
        Ok(Trace { name, requests, distinct_blocks: known.len() })
    }
}

fn named(id: Option<u64>) -> String {
    id.map_or_else(|| "nothing".into(), |id| id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Trace, String> {
        Trace::parse("t".into(), text)
    }

    #[test]
    fn a_line_becomes_a_request() {
        let trace = parse(
            "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 7, \"hash_ids\": [40, 9]}\n\n\
             {\"timestamp\": 6.5, \"input_length\": 1024, \"output_length\": 0, \"hash_ids\": [40, 10]}\n",
        )
        .expect("sound");
        assert_eq!(trace.distinct_blocks, 3);
        assert_eq!(*trace.requests[0].blocks, [0, 1]);
        assert_eq!(*trace.requests[1].blocks, [0, 2]);
        assert_eq!((trace.requests[0].arrival_ns, trace.requests[1].arrival_ns), (0, 1_500_000));
        let partial = &trace.requests[0];
        assert_eq!([0, 1, 2].map(|cached| partial.uncached_tokens(cached)), [600, 88, 0]);
    }

    #[test]
    fn faults_name_line_and_expectation() {
        let good = "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 7, \"hash_ids\": [1, 2]}";
        for (bad, wanted) in [
            (good.replace("5,", "4,"), "line 2: timestamp 4 after 5: expected requests in order"),
            (good.replace("600", "0"), "line 2: input_length 0"),
            (good.replace("600", "99999999"), "line 2: input_length 99999999"),
            (good.replace("600", "512"), "line 2: 2 hash_ids for 512 tokens: expected 1"),
            (good.replace("[1, 2]", "[3, 2]"), "line 2: hash id 2 follows 3 here and 1 earlier"),
            (good.replace("[1, 2]", "[2, 1]"), "line 2: hash id 2 follows nothing here and 1 earlier"),
            (good.replace("hash_ids", "ids"), "line 2: missing field `hash_ids`"),
        ] {
            let fault = parse(&format!("{good}\n{bad}\n")).expect_err(&bad);
            assert!(fault.starts_with(wanted), "{fault}");
        }
        assert!(parse("\n").expect_err("empty").starts_with("no request"));
        let fault = Trace::read(Path::new("/nowhere/trace.jsonl")).expect_err("absent");
        assert!(fault.starts_with("/nowhere/trace.jsonl: "), "{fault}");
    }
}
