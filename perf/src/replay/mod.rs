//! The `replay` command: recorded traces through routers to simulated engines, in simulated time.
//!
//! Same trace, options and seed, same output: no clock is read and no socket opened. Ringway's own algorithms are the code that serves traffic. Runs are independent of each other and
//! are spread over the machine's cores.
//!
//! *Bound and cost*: a run of 12,000 requests takes about 50 ms of one core.
//! *Errors*: the option or the file, and what was expected.

mod cache_aware;
mod cost_function;
mod dispatcher;
mod engine;
mod kv_rule;
mod lru;
mod oracle;
mod policy;
mod power_of_two;
mod prefix_scoring;
mod record;
mod rng;
mod simulation;
mod table;
#[cfg(test)]
mod tests;
mod trace;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::{Args, ValueEnum};
use ringway::proto::backend::catalog::{Algorithm, KvRules, Miss};

use crate::clock::MS;
use cache_aware::{CacheAware, Ties};
use cost_function::CostFunction;
use dispatcher::{Dispatched, Rules};
use engine::EngineModel;
use kv_rule::{KvRule, Numbers};
use oracle::Oracle;
use policy::Policy;
use power_of_two::PowerOfTwo;
use prefix_scoring::{PrefixScoring, Weights};
use simulation::{Setting, simulate};
use table::{Figures, Place, Row};
use trace::Trace;

/// A run's bound: traces of this many engines take too much memory to be of use.
const ENGINES_MAX: usize = 256;

/// The default ceiling of a server.
const CEILING: u32 = 32;

/// The model, in the words of the output.
const MODEL: &str = "\
Engines: an exact LRU cache of 512-token blocks, tails evicted before heads; the last, partial block of a prompt counts as a block. Prefill: uncached tokens ÷ \
rate. Each output token takes a fixed time, however many run. Without a queue, every request starts at once and enters the cache as it arrives. With slots and a queue: \
first come, first served; one prefill at a time; a request holds its slot from the beginning of its prefill to its last token; the cache is asked, and the prompt enters it, when the \
prefill begins. Blocks of running requests can be evicted; no chunking, no preemption.
Routers: weighted-round-robin, least-connections and kv-aware are Ringway's own code, one shard's dispatcher and prefix memory, which sees prompts in its own blocks of 64 \
tokens; they have no ceiling per server and hear of no reuse unless the table says so. Those of other projects are built from their published descriptions (see the heads of their files) and place every request as it \
arrives. The traces name no sessions: sticky sessions cannot be shown.
TTFT: from arrival to first token. Expected hits: the blocks that the router believed cached.";

#[derive(Args, Debug)]
#[command(after_long_help = MODEL)]
pub struct ReplayArgs {
    /// Trace to play: JSON lines with timestamp, input_length, output_length, hash_ids. May be repeated.
    #[arg(long = "trace", required = true)]
    traces: Vec<PathBuf>,
    /// Numbers of engines.
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8])]
    engines: Vec<usize>,
    /// Sizes of each engine's cache, in blocks of 512 tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [600, 2000])]
    cache_blocks: Vec<usize>,
    /// Arrivals come this many times as fast as recorded; several are played one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = [1.0])]
    speed: Vec<f64>,
    /// Requests that an engine runs at once, the others wait in its queue. Without it, engines have neither slots nor queue.
    #[arg(long)]
    slots: Option<usize>,
    /// Prompt tokens that an engine computes per second.
    #[arg(long, default_value_t = 8_000.0)]
    prefill_tokens_per_s: f64,
    /// Time per output token, in milliseconds.
    #[arg(long, default_value_t = 20.0)]
    decode_ms_per_token: f64,
    /// Routers to compare, in this order. Without it all but the kv-rules; with --sweep, kv-rule alone.
    #[arg(long, value_enum, value_delimiter = ',')]
    routers: Vec<RouterKind>,
    /// Plays each trace this often, from the second time on with each arrival put off by up to --jitter-ms at random.
    #[arg(long, default_value_t = 1)]
    repeats: u32,
    /// See --repeats.
    #[arg(long, default_value_t = 1_000)]
    jitter_ms: u64,
    /// Seed of all chance.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A number of the kv-aware rule and the values to try, NAME=V1,V2,…; repeated, every combination. Prints one line per variant and
    /// router: × limit, imbalance of requests, imbalance of uncached tokens at each place.
    #[arg(long = "sweep", value_name = "NAME=VALUES")]
    sweeps: Vec<String>,
    /// A number of the kv-aware rule, NAME=VALUE; may be repeated.
    #[arg(long = "set", value_name = "NAME=VALUE")]
    sets: Vec<String>,
    /// Adds the output to a record in this directory, as NAME.md, with commit and command.
    #[arg(long, value_name = "DIRECTORY/NAME.md")]
    record: Option<PathBuf>,
}

/// What can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RouterKind {
    WeightedRoundRobin,
    LeastConnections,
    KvAware,
    /// kv-aware that engines tell what they reused.
    KvAwareReports,
    /// kv-aware with `miss = "least-busy"`: requests without a match worth following go there.
    KvAwareLeastBusy,
    /// kv-aware with a ceiling of 32 requests per server, and the router's queue.
    KvAwareCeiling,
    /// kv-aware's rule, numbers open: for sweeps.
    KvRule,
    /// The same; what an engine reports as computed, though it was believed to be there, is forgotten.
    KvRuleDropsTails,
    /// The same; requests without a useful match go to the least busy server.
    KvRuleLeastBusy,
    PowerOfTwo,
    /// SGLang Model Gateway `cache_aware`; equal matches to the least loaded.
    SmgCacheAware,
    /// The same; equal matches always to the same server.
    SmgCacheAwareFirst,
    /// llm-d approximate prefix scoring, weights 1:1:1.
    LlmD111,
    /// The same, weights 3:2:2.
    LlmD322,
    /// NVIDIA Dynamo's cost function without events.
    Dynamo,
    /// The longest match in engines' true caches, among the least busy.
    Oracle,
    /// Our rule, looking into engines' true caches.
    OracleKvAware,
}

impl RouterKind {
    /// All but what only sweeps are for.
    fn compared() -> impl Iterator<Item = RouterKind> {
        let swept = [RouterKind::KvRule, RouterKind::KvRuleDropsTails, RouterKind::KvRuleLeastBusy];
        RouterKind::value_variants().iter().copied().filter(move |kind| !swept.contains(kind))
    }

    /// Whether a number of the rule makes a difference to it.
    fn heeds(self, number: &str) -> bool {
        match self {
            RouterKind::KvRule | RouterKind::KvRuleDropsTails | RouterKind::OracleKvAware => {
                !number.starts_with("miss_")
            }
            RouterKind::KvRuleLeastBusy => true,
            // The others are constants there.
            RouterKind::KvAware
            | RouterKind::KvAwareReports
            | RouterKind::KvAwareLeastBusy
            | RouterKind::KvAwareCeiling => {
                ["slack_abs", "slack_rel", "min_match", "memory"].contains(&number)
            }
            _ => false,
        }
    }

    fn title(self) -> &'static str {
        match self {
            RouterKind::WeightedRoundRobin => "weighted-round-robin",
            RouterKind::LeastConnections => "least-connections",
            RouterKind::KvAware => "**kv-aware**",
            RouterKind::KvAwareReports => "kv-aware, told of reuse",
            RouterKind::KvAwareCeiling => "kv-aware, ceiling 32",
            RouterKind::KvRule => "kv-aware's rule, numbers open",
            RouterKind::KvRuleDropsTails => "kv-aware's rule, drops reported tails (no option)",
            RouterKind::KvAwareLeastBusy => "kv-aware, miss = least-busy",
            RouterKind::KvRuleLeastBusy => "kv-aware's rule, numbers open, misses to the least busy",
            RouterKind::PowerOfTwo => "power of two",
            RouterKind::SmgCacheAware => "smg cache_aware, ties to the least loaded",
            RouterKind::SmgCacheAwareFirst => "smg cache_aware, ties to the first",
            RouterKind::LlmD111 => "llm-d prefix scoring 1:1:1",
            RouterKind::LlmD322 => "llm-d prefix scoring 3:2:2",
            RouterKind::Dynamo => "Dynamo cost function, no events",
            RouterKind::Oracle => "oracle: sees the caches, simple policy",
            RouterKind::OracleKvAware => "oracle: sees the caches, kv-aware's rule",
        }
    }

    fn router(self, trace: &Trace, setting: &Setting, numbers: Numbers) -> Box<dyn Policy> {
        let (servers, requests, blocks) = (setting.engines, trace.requests.len(), trace.distinct_blocks);
        let pool = |algorithm| Rules {
            algorithm,
            kv: numbers.rules(),
            ceiling: 0,
            memory_blocks: numbers.memory_blocks(setting.model.cache_blocks),
            reports: false,
        };
        let ours = |rules: Rules| Box::new(Dispatched::new(&rules, servers));
        let rule = |miss| {
            let memory_blocks = numbers.memory_blocks(setting.model.cache_blocks);
            KvRule::new(numbers, miss, servers, requests, memory_blocks, blocks)
        };
        let scoring =
            |weights| Box::new(PrefixScoring::new(weights, servers, requests, blocks, setting.seed));
        match self {
            RouterKind::WeightedRoundRobin => ours(pool(Algorithm::WeightedRoundRobin)),
            RouterKind::LeastConnections => ours(pool(Algorithm::LeastConnections)),
            RouterKind::KvAware => ours(pool(Algorithm::KvAware)),
            RouterKind::KvAwareReports => ours(Rules { reports: true, ..pool(Algorithm::KvAware) }),
            RouterKind::KvAwareLeastBusy => {
                let kv = KvRules { miss: Miss::LeastBusy, ..numbers.rules() };
                ours(Rules { kv, ..pool(Algorithm::KvAware) })
            }
            RouterKind::KvAwareCeiling => ours(Rules { ceiling: CEILING, ..pool(Algorithm::KvAware) }),
            RouterKind::PowerOfTwo => Box::new(PowerOfTwo::new(servers, requests, setting.seed)),
            RouterKind::KvRule => Box::new(rule(Miss::WeightedRoundRobin)),
            RouterKind::KvRuleDropsTails => Box::new(rule(Miss::WeightedRoundRobin).dropping_tails()),
            RouterKind::KvRuleLeastBusy => Box::new(rule(Miss::LeastBusy)),
            RouterKind::OracleKvAware => Box::new(rule(Miss::WeightedRoundRobin).seeing_caches()),
            RouterKind::SmgCacheAware => {
                Box::new(CacheAware::new(Ties::LeastLoaded, servers, requests, blocks))
            }
            RouterKind::SmgCacheAwareFirst => {
                Box::new(CacheAware::new(Ties::First, servers, requests, blocks))
            }
            RouterKind::LlmD111 => scoring(Weights(1.0, 1.0, 1.0)),
            RouterKind::LlmD322 => scoring(Weights(3.0, 2.0, 2.0)),
            RouterKind::Dynamo => Box::new(CostFunction::new(servers, requests, blocks, setting.seed)),
            RouterKind::Oracle => Box::new(Oracle::new(servers, requests)),
        }
    }
}

/// Runs the command. `Ok(true)`: all is well.
pub fn run(args: &ReplayArgs) -> Result<bool, String> {
    check(args)?;
    let mut numbers = Numbers::default();
    for set in &args.sets {
        let (name, value) = assignment("--set", set)?;
        numbers.set(name, number("--set", set, value)?).map_err(|e| format!("--set {set}: {e}"))?;
    }
    let variants = variants(&args.sweeps, numbers)?;
    let routers = routers(args)?;
    let traces = args.traces.iter().map(|path| Trace::read(path)).collect::<Result<Vec<_>, _>>()?;
    let places = places(args, &traces);
    let text = if args.sweeps.is_empty() {
        let routers: Vec<_> = routers.iter().map(|&kind| (kind, numbers)).collect();
        let mut rows = play(args, &places, &routers).into_iter();
        places.iter().fold(String::new(), |mut text, (_, place)| {
            let rows: Vec<Row> = rows.by_ref().take(routers.len()).collect();
            let _ = writeln!(text, "{}", table::place_table(place, &rows));
            text
        })
    } else {
        let named = routers.len() > 1 || args.routers.len() == 1;
        let (names, routers): (Vec<String>, Vec<_>) = variants
            .iter()
            .flat_map(|(name, numbers)| routers.iter().map(move |kind| (name, *kind, *numbers)))
            .map(|(name, kind, numbers)| match named {
                true => (format!("{name}: {}", kind.title()), (kind, numbers)),
                false => (name.clone(), (kind, numbers)),
            })
            .unzip();
        let rows = play(args, &places, &routers);
        let of = |line: usize| (0..places.len()).map(|p| rows[p * routers.len() + line].clone()).collect();
        let lines: Vec<(String, Vec<Row>)> =
            names.into_iter().enumerate().map(|(i, name)| (name, of(i))).collect();
        let places: Vec<Place> = places.iter().map(|(_, place)| place.clone()).collect();
        table::matrix(&places, &lines)
    };
    let text = format!("{}\n\n{text}", conditions(args));
    print!("{text}");
    if let Some(path) = &args.record {
        record::write(path, &text)?;
    }
    Ok(true)
}

fn check(args: &ReplayArgs) -> Result<(), String> {
    let positive = |option: &str, value: f64| {
        if value.is_finite() && value > 0.0 {
            Ok(())
        } else {
            Err(format!("{option} {value}: expected a number above 0"))
        }
    };
    for &engines in &args.engines {
        if !(1..=ENGINES_MAX).contains(&engines) {
            return Err(format!("--engines {engines}: expected 1 to {ENGINES_MAX}"));
        }
    }
    for &speed in &args.speed {
        positive("--speed", speed)?;
    }
    positive("--prefill-tokens-per-s", args.prefill_tokens_per_s)?;
    if !(args.decode_ms_per_token.is_finite() && args.decode_ms_per_token >= 0.0) {
        let value = args.decode_ms_per_token;
        return Err(format!("--decode-ms-per-token {value}: expected a number of at least 0"));
    }
    if args.slots == Some(0) {
        return Err("--slots 0: expected at least 1; leave it out for engines without slots".into());
    }
    if args.repeats == 0 {
        return Err("--repeats 0: expected at least 1".into());
    }
    Ok(())
}

fn assignment<'a>(option: &str, text: &'a str) -> Result<(&'a str, &'a str), String> {
    text.split_once('=').ok_or_else(|| format!("{option} {text}: expected NAME=VALUE"))
}

fn number(option: &str, text: &str, value: &str) -> Result<f64, String> {
    value.trim().parse().map_err(|_| format!("{option} {text}: `{value}`: expected a number"))
}

/// Who is played.
fn routers(args: &ReplayArgs) -> Result<Vec<RouterKind>, String> {
    let routers: Vec<RouterKind> = match (args.routers.is_empty(), args.sweeps.is_empty()) {
        (false, _) => args.routers.clone(),
        (true, true) => RouterKind::compared().collect(),
        (true, false) => vec![RouterKind::KvRule],
    };
    let title = |kind: &RouterKind| {
        kind.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    };
    for sweep in &args.sweeps {
        let (name, _) = assignment("--sweep", sweep)?;
        if let Some(deaf) = routers.iter().find(|kind| !kind.heeds(name)) {
            return Err(format!(
                "--sweep {sweep}: {} does not heed {name}: expected routers that do, as kv-rule",
                title(deaf)
            ));
        }
    }
    for set in &args.sets {
        let (name, _) = assignment("--set", set)?;
        if !routers.iter().any(|kind| kind.heeds(name)) {
            return Err(format!(
                "--set {set}: no router played heeds {name}: expected one that does, as kv-rule"
            ));
        }
    }
    Ok(routers)
}

/// Every combination of the sweeps' values, named.
fn variants(sweeps: &[String], numbers: Numbers) -> Result<Vec<(String, Numbers)>, String> {
    let mut variants = vec![(String::new(), numbers)];
    for sweep in sweeps {
        let (name, values) = assignment("--sweep", sweep)?;
        let mut wider = Vec::new();
        for (before, numbers) in &variants {
            for value in values.split(',') {
                let mut numbers = *numbers;
                numbers
                    .set(name, number("--sweep", sweep, value)?)
                    .map_err(|e| format!("--sweep {sweep}: {e}"))?;
                let comma = if before.is_empty() { "" } else { ", " };
                wider.push((format!("{before}{comma}{name} {}", value.trim()), numbers));
            }
        }
        variants = wider;
    }
    Ok(variants)
}

fn places<'a>(args: &ReplayArgs, traces: &'a [Trace]) -> Vec<(&'a Trace, Place)> {
    let mut places = Vec::new();
    for &speed in &args.speed {
        for trace in traces {
            for &engines in &args.engines {
                for &cache_blocks in &args.cache_blocks {
                    let limit = simulation::single_cache_hit_rate(trace, engines * cache_blocks);
                    let name = trace.name.clone();
                    places.push((trace, Place { trace: name, engines, cache_blocks, speed, limit }));
                }
            }
        }
    }
    places
}

/// All routers at all places: rows place by place, in the routers' order.
fn play(args: &ReplayArgs, places: &[(&Trace, Place)], routers: &[(RouterKind, Numbers)]) -> Vec<Row> {
    let repeats = args.repeats as usize;
    let jobs = places.len() * routers.len() * repeats;
    let job = |i: usize| (i / repeats / routers.len(), i / repeats % routers.len(), i % repeats);
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Figures>>> = Mutex::new(vec![None; jobs]);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= jobs {
                return;
            }
            let (place, router, repeat) = job(i);
            let ((trace, place), (kind, numbers)) = (&places[place], routers[router]);
            let setting = setting(args, place, repeat as u64);
            let mut router = kind.router(trace, &setting, numbers);
            let figures = Figures::of(&simulate(trace, &setting, router.as_mut()), place.limit);
            done.lock().expect("a worker that panics ends the command")[i] = Some(figures);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(jobs) {
            scope.spawn(work);
        }
    });
    let done = done.into_inner().expect("a worker that panics ends the command");
    let done: Vec<Figures> = done.into_iter().flatten().collect();
    let row = |(i, runs): (usize, &[Figures])| {
        let (kind, _) = routers[i % routers.len()];
        Row { router: kind.title().into(), runs: runs.to_vec() }
    };
    done.chunks(repeats).enumerate().map(row).collect()
}

/// The first repeat is the trace as it is.
fn setting(args: &ReplayArgs, place: &Place, repeat: u64) -> Setting {
    Setting {
        engines: place.engines,
        model: EngineModel {
            prefill_tokens_per_s: args.prefill_tokens_per_s,
            decode_ms_per_token: args.decode_ms_per_token,
            cache_blocks: place.cache_blocks,
            slots: args.slots,
        },
        speed: place.speed,
        jitter_ns: if repeat == 0 { 0 } else { args.jitter_ms * MS },
        seed: args.seed.wrapping_add(repeat),
    }
}

/// What stands above the tables.
fn conditions(args: &ReplayArgs) -> String {
    let queue = args
        .slots
        .map_or_else(|| "no slots, no queue".to_owned(), |slots| format!("{slots} slots and a queue"));
    let repeats = match args.repeats {
        1 => "the trace as it is, once".to_owned(),
        n => format!(
            "mean of {n} runs [least–most]: the trace as it is, then arrivals put off by up to {} ms",
            args.jitter_ms
        ),
    };
    format!(
        "{MODEL}\n\nHere: {} prompt tokens/s, {} ms per output token, {queue}; {repeats}; seed {}.",
        args.prefill_tokens_per_s, args.decode_ms_per_token, args.seed
    )
}
