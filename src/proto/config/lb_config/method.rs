//! The six algorithms, and the words of their settings.
//!
//! A configuration file spells an algorithm exactly, by its name or an older alias. The header `x-routing-method` may also write it
//! in any case and with underscores.
//!
//! *Source*: the Stargate rules, sections 1.3, 1.4 and 3.1.

/// An algorithm that chooses a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    PowerOfN,
    WaitAndWiden,
    RoundRobin,
    Random,
    Pulsar,
    PulsarWaitAndWiden,
}

/// Every spelling of the file. A method's first one is its name in logs, metrics and traces.
const SPELLINGS: &[(&str, Method)] = &[
    ("power-of-n", Method::PowerOfN),
    ("power-of-two", Method::PowerOfN),
    ("powerOf2", Method::PowerOfN),
    ("powerOfN", Method::PowerOfN),
    ("powerof2", Method::PowerOfN),
    ("powerofn", Method::PowerOfN),
    ("wait-and-widen", Method::WaitAndWiden),
    ("groq-multiregion", Method::WaitAndWiden),
    ("round-robin", Method::RoundRobin),
    ("random", Method::Random),
    ("pulsar", Method::Pulsar),
    ("pulsar-wait-and-widen", Method::PulsarWaitAndWiden),
    ("pulsar-multiregion", Method::PulsarWaitAndWiden),
];

impl Method {
    pub const ALL: [Method; 6] = [
        Method::PowerOfN,
        Method::WaitAndWiden,
        Method::RoundRobin,
        Method::Random,
        Method::Pulsar,
        Method::PulsarWaitAndWiden,
    ];

    /// The canonical name.
    pub const fn name(self) -> &'static str {
        match self {
            Method::PowerOfN => "power-of-n",
            Method::WaitAndWiden => "wait-and-widen",
            Method::RoundRobin => "round-robin",
            Method::Random => "random",
            Method::Pulsar => "pulsar",
            Method::PulsarWaitAndWiden => "pulsar-wait-and-widen",
        }
    }

    /// The method that a file spells like that, to the letter.
    pub fn parse_file(text: &str) -> Option<Method> {
        SPELLINGS.iter().find(|(spelling, _)| *spelling == text).map(|(_, method)| *method)
    }

    /// The method that a header names: spaces around it, case, and `_` for `-` mean nothing. Allocates nothing.
    pub fn parse_header(value: &[u8]) -> Option<Method> {
        let value = value.trim_ascii();
        let mut folded = [0; SPELLING_BYTES_MAX];
        let folded = folded.get_mut(..value.len())?;
        for (to, from) in folded.iter_mut().zip(value) {
            *to = fold(*from);
        }
        // A spelling with capitals is found by its twin without them.
        SPELLINGS.iter().find(|(spelling, _)| spelling.as_bytes() == folded).map(|(_, method)| *method)
    }
}

/// The longest spelling.
const SPELLING_BYTES_MAX: usize = "pulsar-wait-and-widen".len();

const fn fold(byte: u8) -> u8 {
    if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() }
}

/// By what the clusters of a sample are compared; the lowest wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparator {
    Ttft,
    QueueTime,
    InputWorkSeconds,
    Utilization,
    NumRequestsQueued,
}

impl Comparator {
    pub const ALL: [Comparator; 5] = [
        Comparator::Ttft,
        Comparator::QueueTime,
        Comparator::InputWorkSeconds,
        Comparator::Utilization,
        Comparator::NumRequestsQueued,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Comparator::Ttft => "ttft",
            Comparator::QueueTime => "queue-time",
            Comparator::InputWorkSeconds => "input-work-seconds",
            Comparator::Utilization => "utilization",
            Comparator::NumRequestsQueued => "num-requests-queued",
        }
    }

    /// To the letter.
    pub fn parse(text: &str) -> Option<Comparator> {
        Comparator::ALL.into_iter().find(|comparator| comparator.name() == text)
    }
}

/// What a cluster's share of the keys is proportional to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RendezvousWeight {
    MaxInputTps,
    LastMeanInputTps,
}

impl RendezvousWeight {
    pub const ALL: [RendezvousWeight; 2] =
        [RendezvousWeight::MaxInputTps, RendezvousWeight::LastMeanInputTps];

    pub const fn name(self) -> &'static str {
        match self {
            RendezvousWeight::MaxInputTps => "max-input-tps",
            RendezvousWeight::LastMeanInputTps => "last-mean-input-tps",
        }
    }

    /// To the letter.
    pub fn parse(text: &str) -> Option<RendezvousWeight> {
        RendezvousWeight::ALL.into_iter().find(|weight| weight.name() == text)
    }
}
