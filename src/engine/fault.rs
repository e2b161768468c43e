//! Faults on demand: how the simulated engine misbehaves when asked to.
//!
//! A fault is written `KIND` or `KIND:key=value,key=value` (command line, request header), or as a JSON object with the
//! same names (`POST /fault`). [`crate::cli::ENGINE_HELP`] lists the kinds.
//!
//! *Invariant*: the same seed and the same order of requests draw the same faults.
//! *Bound and cost*: at most [`ARMED_MAX`] faults are armed; a request looks at each once.
//! *Errors*: text that names what was wrong and what was expected.

use serde_json::{Map, Value, json};

use super::text::{mix, unit};

/// Faults armed at once.
pub const ARMED_MAX: usize = 64;

/// Request header that asks for a fault for this request alone.
pub const HEADER: &str = "x-engine-fault";

/// One way to misbehave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// Closes the listener; for so many milliseconds, 0: until cleared.
    Refuse {
        ms: u64,
    },
    Hang,
    Die {
        after_events: u64,
        reset: bool,
    },
    Status {
        code: u16,
        retry_after_s: Option<u64>,
    },
    SlowRead {
        bytes_per_s: u64,
    },
    CloseAfter {
        ms: u64,
    },
    Reset,
    SlowHead {
        ms: u64,
    },
}

/// A fault and when it strikes.
#[derive(Clone, Debug, PartialEq)]
pub struct Armed {
    pub fault: Fault,
    /// How often it may still strike; `None`: always.
    pub left: Option<u64>,
    /// Of each request it applies to, `0.0..=1.0`.
    pub probability: f64,
    /// Only requests to this path; `None`: every request to an inference endpoint.
    pub path: Option<String>,
}

struct Fields<'a> {
    kind: &'a str,
    fields: Vec<(&'a str, String)>,
}

impl Fields<'_> {
    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.fields.iter().position(|(key, _)| *key == name)?;
        Some(self.fields.swap_remove(at).1)
    }

    fn number(&mut self, name: &str, default: u64) -> Result<u64, String> {
        match self.take(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| {
                format!("fault {}: {name}: expected a whole number ≥ 0, got `{text}`", self.kind)
            }),
        }
    }

    fn armed(mut self) -> Result<Armed, String> {
        let kind = self.kind;
        let fault = match kind {
            "refuse" => Fault::Refuse { ms: self.number("ms", 0)? },
            "hang" => Fault::Hang,
            "die" => Fault::Die {
                after_events: self.number("after_events", 1)?,
                reset: match self.take("reset").as_deref() {
                    None | Some("false") => false,
                    Some("true") => true,
                    Some(text) => {
                        return Err(format!("fault die: reset: expected true or false, got `{text}`"));
                    }
                },
            },
            "status" => Fault::Status {
                code: match self.number("code", 503)? {
                    code @ 200..=599 => code as u16,
                    code => return Err(format!("fault status: code: expected 200 to 599, got {code}")),
                },
                retry_after_s: match self.take("retry_after_s") {
                    None => None,
                    Some(text) => Some(text.parse().map_err(|_| {
                        format!("fault status: retry_after_s: expected whole seconds, got `{text}`")
                    })?),
                },
            },
            "slow-read" => match self.number("bytes_per_s", 1000)? {
                0 => return Err("fault slow-read: bytes_per_s: expected at least 1, got 0".into()),
                bytes_per_s => Fault::SlowRead { bytes_per_s },
            },
            "close-after" => Fault::CloseAfter { ms: self.number("ms", 0)? },
            "reset" => Fault::Reset,
            "slow-head" => Fault::SlowHead { ms: self.number("ms", 1000)? },
            other => {
                return Err(format!(
                    "unknown fault `{other}`: expected refuse, hang, die, status, slow-read, close-after, reset or slow-head"
                ));
            }
        };
        if let Fault::Refuse { .. } = fault {
            // It concerns the listener, not requests, so the keys that choose requests make no sense with it.
            return match self.fields.first() {
                Some((name, _)) => Err(format!("fault refuse: unknown key `{name}`")),
                None => Ok(Armed { fault, left: None, probability: 1.0, path: None }),
            };
        }
        let left = match self.take("count") {
            None => None,
            Some(text) => Some(
                text.parse()
                    .map_err(|_| format!("fault {kind}: count: expected a whole number, got `{text}`"))?,
            ),
        };
        let probability = match self.take("probability") {
            None => 1.0,
            Some(text) => match text.parse::<f64>() {
                Ok(probability) if (0.0..=1.0).contains(&probability) => probability,
                _ => return Err(format!("fault {kind}: probability: expected 0 to 1, got `{text}`")),
            },
        };
        let path = self.take("path");
        if let Some(path) = path.as_ref().filter(|path| !path.starts_with('/')) {
            return Err(format!("fault {kind}: path: expected a path that starts with `/`, got `{path}`"));
        }
        match self.fields.first() {
            Some((name, _)) => Err(format!("fault {kind}: unknown key `{name}`")),
            None => Ok(Armed { fault, left, probability, path }),
        }
    }
}

impl Armed {
    /// Reads `KIND[:key=value,…]`.
    pub fn parse(text: &str) -> Result<Armed, String> {
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        let mut fields = Vec::new();
        for part in rest.split(',').filter(|part| !part.is_empty()) {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("fault {kind}: expected key=value, got `{part}`"))?;
            fields.push((key.trim(), value.trim().to_owned()));
        }
        Fields { kind: kind.trim(), fields }.armed()
    }

    /// Reads the same as a JSON object.
    pub fn from_json(object: &Map<String, Value>) -> Result<Armed, String> {
        let Some(Value::String(kind)) = object.get("kind") else {
            return Err("fault: kind: expected a string".into());
        };
        let fields = object
            .iter()
            .filter(|(key, value)| *key != "kind" && !value.is_null())
            .map(|(key, value)| match value {
                Value::String(text) => (key.as_str(), text.clone()),
                other => (key.as_str(), other.to_string()),
            })
            .collect();
        Fields { kind, fields }.armed()
    }

    fn to_json(&self) -> Value {
        let mut value = match self.fault {
            Fault::Refuse { ms } => json!({"kind": "refuse", "ms": ms}),
            Fault::Hang => json!({"kind": "hang"}),
            Fault::Die { after_events, reset } => {
                json!({"kind": "die", "after_events": after_events, "reset": reset})
            }
            Fault::Status { code, retry_after_s } => {
                json!({"kind": "status", "code": code, "retry_after_s": retry_after_s})
            }
            Fault::SlowRead { bytes_per_s } => json!({"kind": "slow-read", "bytes_per_s": bytes_per_s}),
            Fault::CloseAfter { ms } => json!({"kind": "close-after", "ms": ms}),
            Fault::Reset => json!({"kind": "reset"}),
            Fault::SlowHead { ms } => json!({"kind": "slow-head", "ms": ms}),
        };
        if !matches!(self.fault, Fault::Refuse { .. }) {
            value["count"] = json!(self.left);
            value["probability"] = json!(self.probability);
            value["path"] = json!(self.path);
        }
        value
    }
}

/// The faults of one engine.
#[derive(Debug, Default)]
pub struct Faults {
    armed: Vec<Armed>,
    seed: u64,
    drawn: u64,
}

impl Faults {
    pub fn new(seed: u64) -> Self {
        Faults { armed: Vec::new(), seed, drawn: 0 }
    }

    /// Adds a fault; the first that strikes wins. Not for [`Fault::Refuse`], which is the listener's.
    pub fn arm(&mut self, armed: Armed) -> Result<(), String> {
        if self.armed.len() == ARMED_MAX {
            return Err(format!("{ARMED_MAX} faults are armed; clear them first"));
        }
        self.armed.push(armed);
        Ok(())
    }

    pub fn clear(&mut self) {
        self.armed.clear();
    }

    /// The fault that strikes a request to `path`, if any, and counts it. `inference`: a POST to an API endpoint.
    pub fn strike(&mut self, path: &str, inference: bool) -> Option<Fault> {
        for at in 0..self.armed.len() {
            let armed = &self.armed[at];
            let applies = match &armed.path {
                Some(only) => only == path,
                None => inference,
            };
            if !applies || armed.left == Some(0) {
                continue;
            }
            if armed.probability < 1.0 {
                self.drawn += 1;
                if unit(mix(self.seed, self.drawn)) >= armed.probability {
                    continue;
                }
            }
            let fault = armed.fault;
            if let Some(left) = &mut self.armed[at].left {
                *left -= 1;
                if *left == 0 {
                    self.armed.remove(at);
                }
            }
            return Some(fault);
        }
        None
    }

    pub fn to_json(&self) -> Value {
        Value::Array(self.armed.iter().map(Armed::to_json).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn armed(text: &str) -> Armed {
        Armed::parse(text).unwrap_or_else(|fault| panic!("{text}: {fault}"))
    }

    #[test]
    fn text_and_json_say_the_same() {
        for text in [
            "refuse:ms=5",
            "hang",
            "die:after_events=3,reset=true",
            "status:code=500,retry_after_s=2,count=4",
            "slow-read:bytes_per_s=10,probability=0.25",
            "close-after:ms=50,path=/health",
            "reset",
            "slow-head:ms=7",
        ] {
            let armed = armed(text);
            let Value::Object(object) = armed.to_json() else { panic!() };
            assert_eq!(Armed::from_json(&object), Ok(armed), "{text}");
            let kind = text.split(':').next().expect("a kind");
            assert!(crate::cli::ENGINE_HELP.contains(&format!("\n  {kind} ")), "{kind} is documented");
        }
    }

    #[test]
    fn faulty_faults_are_named() {
        for (text, said) in [
            ("", "unknown fault ``"),
            ("explode", "unknown fault `explode`: expected refuse, hang"),
            ("hang:ms=5", "unknown key `ms`"),
            ("die:after_events=-1", "after_events: expected a whole number"),
            ("die:reset=maybe", "expected true or false, got `maybe`"),
            ("status:code=99", "expected 200 to 599, got 99"),
            ("slow-read:bytes_per_s=0", "at least 1"),
            ("hang:probability=1.5", "expected 0 to 1, got `1.5`"),
            ("hang:count", "expected key=value, got `count`"),
            ("refuse:count=2", "unknown key `count`"),
            ("hang:path=health", "starts with `/`"),
        ] {
            let fault = Armed::parse(text).expect_err(text);
            assert!(fault.contains(said), "{text}: {fault}");
        }
    }

    #[test]
    fn a_counted_fault_strikes_that_often_and_only_where_it_applies() {
        let mut faults = Faults::new(0);
        faults.arm(armed("hang:count=2")).expect("room");
        faults.arm(armed("reset:path=/health")).expect("room");
        assert_eq!(faults.strike("/v1/models", false), None);
        assert_eq!(faults.strike("/health", false), Some(Fault::Reset));
        assert_eq!(faults.strike("/v1/completions", true), Some(Fault::Hang));
        assert_eq!(faults.strike("/v1/completions", true), Some(Fault::Hang));
        assert_eq!(faults.strike("/v1/completions", true), None);
        faults.clear();
        assert_eq!(faults.strike("/health", false), None);
    }

    #[test]
    fn a_probability_is_kept_and_repeatable() {
        let count = || {
            let mut faults = Faults::new(9);
            faults.arm(armed("hang:probability=0.3")).expect("room");
            (0..10_000).filter(|_| faults.strike("/", true).is_some()).count()
        };
        assert!((2800..3200).contains(&count()), "{}", count());
        assert_eq!(count(), count());
    }

    #[test]
    fn the_list_is_bounded() {
        let mut faults = Faults::new(0);
        (0..ARMED_MAX).for_each(|_| faults.arm(armed("hang")).expect("room"));
        assert!(faults.arm(armed("hang")).is_err());
    }
}
