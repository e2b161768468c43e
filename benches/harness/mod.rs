//! The command line of the benches that `scripts/bench-instructions` counts: `--list-cases`, `--case NAME --rounds N`, or nothing, and
//! then each case is tried.

use std::process::exit;

/// What was asked for.
pub enum Order {
    /// So many rounds of the case with that number.
    Rounds(usize, u32),
    /// Try each.
    Try,
}

/// Reads the command line; lists the cases itself. A case or number that cannot be ends the process with exit code 2.
pub fn order<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Order {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |key: &str| args.iter().position(|arg| arg == key).and_then(|i| args.get(i + 1));
    match (value("--case"), value("--rounds")) {
        (Some(case), Some(rounds)) => {
            let Some(found) = names.clone().position(|name| name == case) else {
                eprintln!("--case {case}: expected one of {}", names.collect::<Vec<_>>().join(", "));
                exit(2);
            };
            let Ok(rounds) = rounds.parse() else {
                eprintln!("--rounds {rounds}: expected a number");
                exit(2);
            };
            Order::Rounds(found, rounds)
        }
        _ if args.iter().any(|arg| arg == "--list-cases") => {
            names.for_each(|name| println!("{name}"));
            exit(0);
        }
        _ => Order::Try,
    }
}

/// A case: its name, and what one round does.
pub type Case<B> = (&'static str, fn(&mut B));

/// All there is to do for cases that are one function each on a `Bench`: `fresh` makes one, for the rounds or for each case.
#[allow(dead_code, reason = "a bench with other cases takes `order` alone")]
pub fn run<B>(bench: &str, cases: &[Case<B>], fresh: impl Fn() -> B) {
    match order(cases.iter().map(|(name, _)| *name)) {
        Order::Rounds(case, rounds) => {
            let mut state = fresh();
            for _ in 0..rounds {
                cases[case].1(&mut state);
            }
        }
        Order::Try => {
            for (_, round) in cases {
                round(&mut fresh());
            }
            println!("{bench}: {} cases ran once; scripts/bench-instructions counts them", cases.len());
        }
    }
}
