//! The loads that are compared: what each sends, at which rate, and for how long.

use clap::ValueEnum;
use serde::Serialize;

use crate::clock::{MS, S};
use crate::load::Arrivals;
use crate::payload::{Answer, Recipe};
use crate::peers::Kind;

/// Path of all requests: one that every router knows.
pub const PATH: &str = "/v1/chat/completions";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scenario {
    /// 2 KiB POST, 1 KiB JSON, 64 connections, closed loop: cost and capacity at saturation.
    Json,
    /// The same at a fixed rate on 256 connections, answered after 3 ms: cost at an ordinary load.
    Paced,
    /// Streams of 32 events 10 ms apart on 256 connections.
    Sse,
    /// 128 KiB POST, 1 KiB JSON, 32 connections, closed loop.
    Big,
    /// Conversations of 2, 32 and 128 KiB per request, 1 KiB JSON, closed loop: cost of reading prompts for routing.
    Prompts,
    /// 10,000 idle connections, then 64 bodies of 16 MiB: memory.
    Conns,
}

/// A scenario in numbers.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub recipe: Recipe,
    pub connections: u32,
    pub arrivals: Arrivals,
    pub warm_ns: u64,
    pub stagger_ns: u64,
    pub grace_ns: u64,
}

impl Scenario {
    pub fn name(self) -> &'static str {
        match self {
            Scenario::Json => "json",
            Scenario::Paced => "paced",
            Scenario::Sse => "sse",
            Scenario::Big => "big",
            Scenario::Prompts => "prompts",
            Scenario::Conns => "conns",
        }
    }

    /// The lengths of its requests' bodies, in bytes; each is run on its own.
    pub fn bodies(self) -> &'static [usize] {
        match self {
            Scenario::Json | Scenario::Paced | Scenario::Sse | Scenario::Conns => &[2 << 10],
            Scenario::Big => &[128 << 10],
            Scenario::Prompts => &[2 << 10, 32 << 10, 128 << 10],
        }
    }

    /// Its name, and the length of the bodies where there are several.
    pub fn title(self, body_len: usize) -> String {
        match self.bodies() {
            [_] => self.name().to_owned(),
            _ => format!("{}, {} KiB", self.name(), body_len >> 10),
        }
    }

    /// Whether `kind` takes part when nobody says who does.
    pub fn includes(self, kind: Kind) -> bool {
        // Where all prompts are the same, a router that tells them apart has nothing to do.
        kind != Kind::RingwayKv || self == Scenario::Prompts
    }

    /// Its load with bodies of `body_len` bytes. `rate` is for [`Scenario::Paced`]; for [`Scenario::Conns`] this is the
    /// request with which each connection is opened.
    pub fn shape(self, body_len: usize, rate: f64, warm_ns: u64) -> Shape {
        let json = |delay_ns| Recipe { body_len, answer: Answer::Json { len: 1024, delay_ns } };
        let plain = Shape {
            recipe: json(0),
            connections: 64,
            arrivals: Arrivals::Closed,
            warm_ns,
            stagger_ns: 0,
            grace_ns: 3 * S,
        };
        match self {
            Scenario::Json => plain,
            Scenario::Paced => {
                Shape { recipe: json(3 * MS), connections: 256, arrivals: Arrivals::Rate(rate), ..plain }
            }
            Scenario::Sse => {
                let (count, first_ns, every_ns) = (32, 5 * MS, 10 * MS);
                let answer_ns = first_ns + u64::from(count) * every_ns;
                Shape {
                    recipe: Recipe { body_len, answer: Answer::Events { count, first_ns, every_ns } },
                    connections: 256,
                    // Spread over a whole answer, so that at any time some streams begin and some end; and every
                    // connection has had a whole answer before the window opens.
                    stagger_ns: answer_ns,
                    warm_ns: warm_ns + 2 * answer_ns,
                    grace_ns: plain.grace_ns + answer_ns,
                    ..plain
                }
            }
            Scenario::Big => Shape { connections: 32, ..plain },
            Scenario::Prompts => Shape {
                recipe: Recipe { body_len, answer: Answer::Chat { conversation: 0, turn: 0 } },
                connections: if body_len > 2 << 10 { 32 } else { 64 },
                // Until a router's memory of prompts is full and forgets as fast as it learns.
                warm_ns: warm_ns + S,
                ..plain
            },
            Scenario::Conns => plain,
        }
    }
}

/// Requests under way at once while the idle connections are opened.
pub const OPENING_IN_FLIGHT_MAX: u32 = 32;
/// The burst after them.
pub const BURST_BODIES: u32 = 64;
pub const BURST_BODY_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_can_be_built_and_read() {
        for scenario in Scenario::value_variants() {
            for &body_len in scenario.bodies() {
                let shape = scenario.shape(body_len, 1000.0, 100 * MS);
                crate::payload::request("h:1", PATH, &shape.recipe, &[]).expect("its body fits");
                assert_eq!(Recipe::parse(&shape.recipe.header()), Ok(shape.recipe));
            }
        }
    }

    #[test]
    fn only_several_lengths_are_told_apart() {
        assert_eq!(Scenario::Big.title(128 << 10), "big");
        assert_eq!(Scenario::Prompts.title(32 << 10), "prompts, 32 KiB");
    }

    #[test]
    fn streams_are_warm_before_the_window() {
        let shape = Scenario::Sse.shape(2048, 0.0, 0);
        // 5 + 31 * 10 ms is the answer; the last connection starts just before `stagger_ns`.
        assert!(shape.warm_ns >= shape.stagger_ns + 315 * MS);
    }
}
