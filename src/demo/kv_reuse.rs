//! `ringway demo --experiment kv-reuse`: how much prompt processing KV-aware routing saves, beside the default algorithm.
//!
//! Two engines, nine distinct prompts, caches that hold about five each, 45 requests. Whoever spreads them evenly and
//! blindly finds next to nothing in the caches, although together they have room for all nine: that is what KV-aware
//! routing is for. Each row of the table is a new router; simulated engines are new for each row too, and engines of one's
//! own get other prompts in each row, so that no row finds what another left.
//!
//! *Invariant*: what counts as reused is what the engines report. The best that is possible is four fifths: the first of
//! each prompt's five requests has to be computed.
//! *Bound and cost*: 45 requests a row, six rows: a few seconds with simulated engines, some 150,000 prompt tokens to
//! compute with real ones. Each row is told as it is done, so that a long run that is interrupted was not for nothing.
//! *Errors*: text with the reason, as in the tour; an engine that reports no cached tokens is one.

use std::fmt::Write;
use std::io;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use super::client::Client;
use super::report::{percent, table};
use super::router::{Options, Router};
use super::{Progress, Stop, engine_name, pause};
use crate::engine::scheduler::Rates;
use crate::engine::text::mix;
use crate::engine::{self, EngineHandle, EngineOptions};
use crate::proto::account::UsageScan;
use crate::proto::classify::Api;

pub(super) const NAME: &str = "kv-reuse";
const PROMPTS: usize = 9;
const ROUNDS: usize = 5;
const REQUESTS: usize = PROMPTS * ROUNDS;
/// Prompts that one engine's cache has room for.
const CACHED_PROMPTS: usize = 5;
/// Text of one prompt: some 1,500 tokens for a simulated engine, and some 900 where a tokenizer knows plain words whole.
const PROMPT_BYTES: usize = 6_000;
const BLOCK_TOKENS: usize = 16;
const OUTPUT_TOKENS: u32 = 4;
/// Shards have heard of the servers by then, as a rule.
const HEARD: Duration = Duration::from_millis(100);
const HEARD_TRIES: u32 = 20;
/// How long an answer may take: engines on CPUs work on a few prompts for minutes.
const ANSWER_MAX: Duration = Duration::from_secs(300);
/// What KV-aware routing has to reach: cached share in percent, and the busier engine's requests.
const REUSE_PERCENT_MIN: f64 = 78.0;
const BUSIER_MAX: usize = 25;

/// The order in which prompts come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    InTurn,
    Shuffled,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
struct Plan {
    algorithm: &'static str,
    order: Order,
    at_once: usize,
}

const PLANS: [Plan; 6] = {
    const fn plan(algorithm: &'static str, order: Order, at_once: usize) -> Plan {
        Plan { algorithm, order, at_once }
    }
    const DEFAULT: &str = "weighted-round-robin";
    const KV: &str = "kv-aware";
    [
        plan(DEFAULT, Order::InTurn, 1),
        plan(KV, Order::InTurn, 1),
        plan(DEFAULT, Order::Shuffled, 1),
        plan(KV, Order::Shuffled, 1),
        plan(DEFAULT, Order::InTurn, 4),
        plan(KV, Order::InTurn, 4),
    ]
};

impl Plan {
    fn name(self) -> String {
        let order = match self.order {
            Order::InTurn => "in turn",
            Order::Shuffled => "shuffled",
        };
        match self.at_once {
            1 => format!("{}, {order}", self.algorithm),
            n => format!("{}, {order}, {n} at once", self.algorithm),
        }
    }

    /// Whether the row is what the experiment is about.
    fn is_judged(self) -> bool {
        self.algorithm == "kv-aware" && self.at_once == 1
    }
}

/// What a row came to.
#[derive(Clone, Debug, Default, PartialEq)]
struct Row {
    /// Requests of each engine, in the order of their names.
    split: Vec<usize>,
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl Row {
    fn reuse_percent(&self) -> f64 {
        self.cached_tokens as f64 * 100.0 / self.prompt_tokens.max(1) as f64
    }

    fn reuse_text(&self) -> String {
        percent(self.cached_tokens, self.prompt_tokens)
    }

    fn split_text(&self) -> String {
        let counts: Vec<String> = self.split.iter().map(usize::to_string).collect();
        counts.join(" / ")
    }

    fn passes(&self) -> bool {
        let busier = self.split.iter().copied().max().unwrap_or(0);
        self.reuse_percent() >= REUSE_PERCENT_MIN && busier <= BUSIER_MAX
    }
}

/// The experiment's outcome.
pub struct Outcome {
    rows: Vec<(Plan, Row)>,
    own_engines: bool,
}

/// The numbers of the prompts in the order they are sent.
fn sequence(order: Order) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..REQUESTS).map(|request| request % PROMPTS).collect();
    if order == Order::Shuffled {
        for at in (1..numbers.len()).rev() {
            numbers.swap(at, (mix(0x5eed, at as u64) % (at as u64 + 1)) as usize);
        }
    }
    numbers
}

/// Prompt `number` of the set that `set` names; no two share a beginning.
fn prompt(set: u64, number: usize) -> String {
    const WORDS: [&str; 32] = [
        "river", "stone", "engine", "window", "paper", "garden", "signal", "market", "winter", "copper",
        "letter", "bridge", "silver", "candle", "forest", "harbor", "mirror", "number", "orange", "pocket",
        "ribbon", "saddle", "tunnel", "velvet", "anchor", "basket", "cotton", "desert", "falcon", "ginger",
        "hammer", "island",
    ];
    let seed = mix(set, number as u64);
    let mut text = format!("{seed:016x} is the mark of document {number}. ");
    let mut word = 0;
    while text.len() < PROMPT_BYTES {
        text.push_str(WORDS[(mix(seed, word) % WORDS.len() as u64) as usize]);
        text.push(' ');
        word += 1;
    }
    text
}

fn body(model: &str, set: u64, number: usize) -> String {
    json!({
        "model": model, "max_tokens": OUTPUT_TOKENS, "temperature": 0,
        "messages": [{"role": "system", "content": prompt(set, number)}, {"role": "user", "content": "Which mark?"}],
    })
    .to_string()
}

/// Key/value memory for [`CACHED_PROMPTS`] prompts and the answer in progress, in blocks.
fn kv_blocks() -> usize {
    let ask = engine::prompt::parse(engine::prompt::Endpoint::Chat, body("simulated", 0, 0).as_bytes());
    let tokens = ask.expect("the experiment's own request").tokens.len() + OUTPUT_TOKENS as usize;
    CACHED_PROMPTS * tokens.div_ceil(BLOCK_TOKENS)
}

fn start_engines() -> Result<Vec<EngineHandle>, Stop> {
    let options = EngineOptions {
        rates: Rates { prefill_tps: 200_000.0, decode_tps: 2_000.0, slots: 4, queue_max: 64 },
        block_tokens: BLOCK_TOKENS,
        kv_blocks: kv_blocks(),
        ..EngineOptions::default()
    };
    super::spawn_engines(2, &options)
}

/// Runs all rows, on engines at `backends`, or on two simulated ones where there are none.
pub(super) fn run(
    backends: &[String],
    interrupted: &AtomicBool,
    progress: &mut Progress,
) -> Result<Outcome, Stop> {
    let mut rows = Vec::new();
    for (number, plan) in PLANS.into_iter().enumerate() {
        progress.stage(&format!("row {} of {}: {}", number + 1, PLANS.len(), plan.name()));
        // Simulated engines are new and always see the same prompts; others must not know them from before.
        let (engines, set) = match backends.is_empty() {
            true => (start_engines()?, 0),
            false => (Vec::new(), mix(u64::from(std::process::id()), number as u64 + 1)),
        };
        let urls = match backends.is_empty() {
            true => engines.iter().map(EngineHandle::url).collect(),
            false => backends.to_vec(),
        };
        let named: Vec<(String, String)> =
            urls.into_iter().enumerate().map(|(index, url)| (engine_name(index), url)).collect();
        let row = run_row(plan, &named, set, interrupted)?;
        progress.note(&format!("{}: {}, {} reused", plan.name(), row.split_text(), row.reuse_text()));
        rows.push((plan, row));
    }
    progress.clear();
    Ok(Outcome { rows, own_engines: !backends.is_empty() })
}

fn run_row(
    plan: Plan,
    backends: &[(String, String)],
    set: u64,
    interrupted: &AtomicBool,
) -> Result<Row, Stop> {
    let ended = |text: String| match interrupted.load(Ordering::Relaxed) {
        true => Stop::Interrupted,
        false => Stop::Failed(text),
    };
    let options = Options { max_concurrency: 32, algorithm: Some(plan.algorithm), probed: false };
    let mut router = Router::start(backends, options, interrupted)
        .map_err(|text| ended(format!("router with {}: {text}", plan.algorithm)))?;
    pause(HEARD);
    let numbers = sequence(plan.order);
    let next = AtomicUsize::new(0);
    let row = Mutex::new(Row { split: vec![0; backends.len()], ..Row::default() });
    let fault = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..plan.at_once {
            scope.spawn(|| {
                let sent = work(router.address, &router.model, set, &numbers, &next, &row, interrupted);
                if let Err(error) = sent {
                    // The others stop at their next request.
                    next.store(numbers.len(), Ordering::Relaxed);
                    fault.lock().expect("no client panics while it holds the lock").get_or_insert(error);
                }
            });
        }
    });
    if interrupted.load(Ordering::Relaxed) {
        return Err(Stop::Interrupted);
    }
    if let Some(error) = fault.into_inner().expect("no client panics while it holds the lock") {
        let text = router.ended().map_or_else(|| error.to_string(), |text| format!("router: {text}"));
        return Err(Stop::Failed(format!("{}: {text}", plan.name())));
    }
    router.stop();
    Ok(row.into_inner().expect("no client panics while it holds the lock"))
}

/// One client: takes prompts from the sequence until there are none left.
fn work(
    router: SocketAddr,
    model: &str,
    set: u64,
    numbers: &[usize],
    next: &AtomicUsize,
    row: &Mutex<Row>,
    interrupted: &AtomicBool,
) -> io::Result<()> {
    let connect = || {
        let client = Client::connect(router)?;
        client.stream().set_read_timeout(Some(ANSWER_MAX))?;
        io::Result::Ok(client)
    };
    let mut client = connect()?;
    while !interrupted.load(Ordering::Relaxed) {
        let Some(number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
        let request = body(model, set, *number);
        let mut answer = client.post("/v1/chat/completions", &request)?;
        // Of a shard that is slower to hear of the servers than we waited.
        for _ in 0..HEARD_TRIES {
            if answer.head.field("x-lifeboat-server").is_some() || interrupted.load(Ordering::Relaxed) {
                break;
            }
            pause(HEARD);
            client = connect()?;
            answer = client.post("/v1/chat/completions", &request)?;
        }
        if answer.status() != 200 {
            let text: String = answer.text().chars().take(200).collect();
            return Err(io::Error::other(format!("status {}: {text}", answer.status())));
        }
        let mut scan = UsageScan::new(Api::OpenAi);
        scan.feed(&answer.body);
        let usage = scan.finish();
        let server = answer.head.field("x-lifeboat-server").unwrap_or_default();
        let (Some(prompt_tokens), Some(cached_tokens)) = (usage.prompt_tokens, usage.cached_tokens) else {
            return Err(io::Error::other(format!(
                "{server} does not report cached prompt tokens (usage.prompt_tokens_details.cached_tokens); vLLM needs \
                 --enable-prompt-tokens-details, SGLang --enable-cache-report"
            )));
        };
        let index = (0..).take(numbers.len()).find(|index| engine_name(*index) == server);
        let mut row = row.lock().expect("no client panics while it holds the lock");
        let place = index.and_then(|index| row.split.get_mut(index));
        *place.ok_or_else(|| io::Error::other(format!("an answer names an unknown server {server:?}")))? += 1;
        row.prompt_tokens += prompt_tokens;
        row.cached_tokens += cached_tokens;
        if !answer.head.keep_alive {
            client = connect()?;
        }
    }
    Ok(())
}

impl Outcome {
    /// Whether KV-aware routing reached what it has to.
    pub fn passes(&self) -> bool {
        self.rows.iter().filter(|(plan, _)| plan.is_judged()).all(|(_, row)| row.passes())
    }

    /// The whole text.
    pub fn text(&self) -> String {
        let cells = |name: String, split: String, reuse: String| vec![name, split, reuse];
        let mut rows = vec![cells("".into(), "traffic split".into(), "cache reuse".into())];
        for (plan, row) in &self.rows {
            rows.push(cells(plan.name(), row.split_text(), row.reuse_text()));
        }
        rows.push(cells(String::new(), String::new(), String::new()));
        rows.push(cells("published: weighted round-robin".into(), "23 / 22".into(), "3.4 %".into()));
        rows.push(cells("published: KV-aware".into(), "25 / 20".into(), "48.3 %".into()));
        let prompt_tokens = self.rows.first().map_or(0, |(_, row)| row.prompt_tokens / REQUESTS as u64);
        let engines = if self.own_engines { "engines of your own" } else { "simulated engines" };
        let mut out = format!(
            "\n{PROMPTS} distinct prompts of about {prompt_tokens} tokens, {ROUNDS} times each, to {engines} through one router\n\n"
        );
        out.push_str(&table(&rows));
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "\n  Reuse is the share of prompt tokens that the engines report as cached; 80 % is the most there can be.\n\
             \x20 {}\n\
             \x20 Published figures: two backends on an RTX PRO 6000 Blackwell, caches for about five of nine prompts.",
            match self.own_engines {
                true =>
                    "For a comparison each engine's cache should hold about five of the prompts, not nine.",
                false => "Each engine's cache holds five of the prompts.",
            }
        );
        let verdict = if self.passes() { "reached" } else { "MISSED" };
        let _ = writeln!(
            out,
            "\n  To be reached by kv-aware, one request at a time: {REUSE_PERCENT_MIN} % reuse, split no worse than \
             {BUSIER_MAX} / {}: {verdict}",
            REQUESTS - BUSIER_MAX
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prompt_comes_five_times_in_either_order() {
        for order in [Order::InTurn, Order::Shuffled] {
            let numbers = sequence(order);
            assert_eq!(numbers.len(), 45);
            for prompt in 0..PROMPTS {
                assert_eq!(numbers.iter().filter(|number| **number == prompt).count(), ROUNDS);
            }
        }
        assert_ne!(sequence(Order::InTurn), sequence(Order::Shuffled));
        assert_eq!(sequence(Order::Shuffled), sequence(Order::Shuffled));
    }

    #[test]
    fn prompts_differ_from_their_first_bytes_on() {
        let mut starts: Vec<String> =
            (0..3).flat_map(|set| (0..PROMPTS).map(move |n| prompt(set, n)[..8].to_owned())).collect();
        starts.sort();
        starts.dedup();
        assert_eq!(starts.len(), 3 * PROMPTS);
        assert!((PROMPT_BYTES..PROMPT_BYTES + 10).contains(&prompt(0, 0).len()));
    }

    fn row(split: [usize; 2], cached_tokens: u64) -> Row {
        Row { split: split.to_vec(), prompt_tokens: 1000, cached_tokens }
    }

    #[test]
    fn the_verdict_needs_reuse_and_an_even_split_in_both_orders() {
        let outcome = |turn: Row, shuffled: Row| Outcome {
            rows: PLANS
                .into_iter()
                .map(|plan| match (plan.is_judged(), plan.order) {
                    (false, _) => (plan, row([45, 0], 0)),
                    (true, Order::InTurn) => (plan, turn.clone()),
                    (true, Order::Shuffled) => (plan, shuffled.clone()),
                })
                .collect(),
            own_engines: false,
        };
        let good = || row([25, 20], 780);
        assert!(outcome(good(), row([20, 25], 800)).passes());
        for bad in [row([26, 19], 800), row([19, 26], 800), row([23, 22], 779)] {
            assert!(!outcome(good(), bad.clone()).passes());
            assert!(!outcome(bad, good()).passes());
        }
        let text = outcome(good(), row([20, 25], 800)).text();
        for part in
            ["25 / 20", "78.0 %", "20 / 25", "80.0 %", "23 / 22", "3.4 %", "48.3 %", "25 / 20: reached"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        assert!(outcome(good(), row([0, 45], 0)).text().contains("MISSED"));
    }
}
