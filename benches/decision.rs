//! What a routing decision costs, in instructions, beside a reference walk over the same bodies that no reader of prompts
//! could do without: memchr2 to each quote or backslash, xxh3 of each 256-byte block.
//!
//! `scripts/bench-instructions --bench decision` counts each case under callgrind. Run without arguments (as `cargo test`
//! does) each case goes once and its result is checked; `--case NAME --rounds N` runs one.

mod harness;

use std::collections::VecDeque;
use std::hint::black_box;

use memchr::{memchr2, memmem};
use ringway::clock::Nanos;
use ringway::proto::backend::catalog::{self, Address, Algorithm, Catalog, KvRules, RoutingMode, Server};
use ringway::proto::backend::grouping::rebuild_groups;
use ringway::proto::classify::caller::{CallerRules, Session};
use ringway::proto::classify::{Endpoint, Prompt, PromptRules, peek, read_prompt};
use ringway::proto::dispatcher::{Decision, Dispatcher, DispatcherOptions, Outcome, Prompted, Wanted};
use ringway::proto::ids::{BackendId, ClientId, GroupId, PoolId, ShardId};
use twox_hash::XxHash3_64;

const RULES: PromptRules = PromptRules { block_bytes: 256, seed: 0x1234_5678_9abc_def0 };

/// A chat as clients send it: a system text, then turns of a few hundred bytes to a few kilobytes. Every 50 bytes or so of
/// the text stands an escape, every third of them a quote; `bytes` is about the body's length.
fn chat(bytes: usize) -> Vec<u8> {
    const WORDS: [&str; 12] = [
        "the ",
        "cache ",
        "of ",
        "an ",
        "engine ",
        "holds ",
        "blocks, ",
        "which ",
        "requests ",
        "share ",
        "if ",
        "routed ",
    ];
    const ESCAPES: [&str; 6] = ["\\n", "\\\"", "\\n\\n", "\\t", "\\\"", "\\u00e9"];
    let mut state = 42_u32;
    let mut random = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    let mut text = |bytes: usize| {
        let mut text = String::new();
        let mut escape_at = 50;
        while text.len() < bytes {
            text += WORDS[random(WORDS.len())];
            if text.len() >= escape_at {
                text += ESCAPES[random(ESCAPES.len())];
                escape_at = text.len() + 30 + random(36);
            }
        }
        text
    };
    let mut body = format!(
        r#"{{"model":"meta-llama/Llama-3.1-70B-Instruct","messages":[{{"role":"system","content":"{}"}}"#,
        text((bytes / 4).min(1500))
    );
    for turn in 0.. {
        let wanted = [350, 1800, 120, 1400, 900, 2400][turn % 6];
        let Some(left) = bytes.checked_sub(body.len() + 160).filter(|left| *left > 0) else { break };
        let role = ["user", "assistant"][turn % 2];
        body += &format!(r#",{{"role":"{role}","content":"{}"}}"#, text(wanted.min(left)));
    }
    body += r#"],"stream":true,"stream_options":{"include_usage":true},"temperature":0.7,"max_tokens":512}"#;
    body.into_bytes()
}

/// Tools as agents send them, white space included where `spaced`, before one long message.
fn agent(spaced: bool) -> Vec<u8> {
    let tool = r#"{"type":"function","function":{"name":"read_file","description":"Reads a file from the local disk. Use this whenever the contents of a file are needed.","parameters":{"type":"object","properties":{"path":{"type":"string","description":"The absolute path of the file"},"offset":{"type":"integer","minimum":0},"limit":{"type":"integer"}},"required":["path"],"additionalProperties":false}}}"#;
    let tool = if spaced { tool.replace("\":", "\": ").replace(",\"", ", \"") } else { tool.to_owned() };
    let tools = vec![tool; 80].join(",");
    format!(r#"{{"model":"m","tools":[{tools}],"messages":[{{"role":"user","content":"hello"}}]}}"#)
        .into_bytes()
}

fn reference(body: &[u8], hashes: &mut Vec<u64>) -> usize {
    hashes.clear();
    let (mut at, mut hits) = (0, 0);
    while let Some(hit) = memchr2(b'"', b'\\', &body[at..]) {
        // What a backslash escapes is stepped over.
        at += hit + if body[at + hit] == b'\\' { 2 } else { 1 };
        hits += 1;
    }
    hashes.extend(body.chunks_exact(256).map(XxHash3_64::oneshot));
    hits
}

/// A kv-aware pool on one shard, at work: every server's memory is full, with the chats' system text at the
/// head of all that is in it.
struct Pool {
    dispatcher: Dispatcher,
    now: Nanos,
    running: VecDeque<BackendId>,
}

/// Requests in flight in a busy pool.
const BUSY: usize = 96;

const GROUP: GroupId = GroupId(0);
/// Enough for the longest prompt.
const CAPACITY_BLOCKS: u32 = 2560;

impl Pool {
    fn new(servers: u16, head: &[u64]) -> Pool {
        let server = |i: u16| Server {
            name: format!("gpu{i}").into(),
            url: "http://10.0.0.1:8000".into(),
            address: Some(Address::Tcp("10.0.0.1:8000".parse().expect("an address"))),
            host: "10.0.0.1:8000".into(),
            base_path: "".into(),
            pool: Some(PoolId(0)),
            weight: 1.0,
            weight_text: "1".into(),
            affinity_weight: 1.0,
            max_concurrency: 32,
            max_input_tokens: 0,
            tier: "".into(),
            kv_capacity_blocks: CAPACITY_BLOCKS,
            api_key: None,
            models: Some(Vec::new()),
            registered: false,
            cluster_id: "server".into(),
            input_tps: 0.0,
            removed: false,
        };
        let pool = catalog::Pool {
            name: "chat".into(),
            algorithm: Algorithm::KvAware,
            routing_mode: RoutingMode::Queue,
            queue_size: 1024,
            queue_timeout_ms: 30_000,
            kv: KvRules::default(),
            entry: None,
        };
        let mut all =
            Catalog { servers: (0..servers).map(server).collect(), pools: vec![pool], ..Catalog::default() };
        rebuild_groups(&mut all);
        let dispatcher = Dispatcher::new(ShardId(0), 1, DispatcherOptions::default(), all);
        let mut pool = Pool { dispatcher, now: Nanos::from_ms(1), running: VecDeque::new() };
        let mut own: Vec<u64> = head.to_vec();
        for server in 0..servers {
            for chain in 0..=CAPACITY_BLOCKS / 40 {
                own.truncate(head.len());
                let start = u64::from(server) << 32 | u64::from(chain) << 16;
                own.extend((0..40).map(|i| (start | i).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
                pool.send(BackendId(server), &own);
            }
        }
        pool
    }

    fn send(&mut self, backend: BackendId, blocks: &[u64]) {
        let prompt = Prompted { client: ClientId(1), blocks, tokens: 64 * blocks.len() as u64 };
        let belief = self.dispatcher.handle_prompt(self.now, GROUP, backend, &prompt);
        self.dispatcher.handle_prefilled(self.now, backend, belief.work_tokens);
    }

    /// A request from its decision to its end, which comes `BUSY` requests later where the pool is `busy`.
    fn serve(&mut self, blocks: &[u64], busy: bool) -> Algorithm {
        self.now = Nanos(self.now.0 + 1000);
        let wanted = Wanted { blocks, ..Wanted::default() };
        let Decision::Dispatch(placement) = self.dispatcher.handle_request(self.now, GROUP, &wanted) else {
            panic!("the pool has room");
        };
        self.send(placement.backend, blocks);
        self.running.push_back(placement.backend);
        if !busy || self.running.len() > BUSY {
            let first = self.running.pop_front().expect("one was just put in");
            self.dispatcher.handle_done(self.now, first, Outcome::Success);
        }
        assert!(self.dispatcher.poll_event().is_none() && self.dispatcher.poll_message().is_none());
        placement.algorithm_used
    }
}

/// What one round of a case works on; everything that a connection reuses is made once.
struct Bench {
    /// Of 8 and of 256 servers, made when first asked for.
    pools: [Option<Pool>; 2],
    round: u64,
    /// Where the first content of the body in use begins.
    content: Option<usize>,
    caller: CallerRules,
    bodies: Vec<Vec<u8>>,
    prompt: Prompt,
    hashes: Vec<u64>,
}

type Round = fn(&mut Bench);

const SIZES: [usize; 4] = [2 << 10, 32 << 10, 128 << 10, 512 << 10];

fn read(bench: &mut Bench, body: usize) {
    let body = black_box(&bench.bodies[body]);
    let reading = read_prompt(Endpoint::Chat, body, true, &RULES, &mut bench.prompt);
    assert!(black_box(&reading).complete && reading.has_prompt);
    assert!(bench.prompt.blocks.len() >= body.len() / 300);
}

fn walk(bench: &mut Bench, body: usize) {
    let body = black_box(&bench.bodies[body]);
    assert!(black_box(reference(body, &mut bench.hashes)) > 20);
}

/// The whole decision about a prompt that its server holds, system text, history and all.
fn hit(bench: &mut Bench, body: usize, pool: usize) {
    read(bench, body);
    let (pool, blocks) = bench.pool(pool);
    let by = pool.serve(blocks, false);
    // The first round is the one that puts it there.
    bench.round += 1;
    assert!(by == Algorithm::KvAware || bench.round == 1);
}

/// The whole decision about a new prompt, which pushes older ones out.
fn miss(bench: &mut Bench, body: usize, pool: usize) {
    bench.round += 1;
    // What makes the prompt a new one is no part of the decision: it costs next to nothing.
    let start = *bench.content.get_or_insert_with(|| {
        memmem::find(&bench.bodies[body], b"content").expect("a chat has content") + 10
    });
    for (place, digit) in bench.bodies[body][start..][..8].iter_mut().zip(0..) {
        *place = b'a' + (bench.round >> (4 * digit) & 15) as u8;
    }
    read(bench, body);
    let (pool, blocks) = bench.pool(pool);
    let by = pool.serve(blocks, false);
    // The pool was made with the first round's system text.
    assert!(by == Algorithm::WeightedRoundRobin || bench.round == 1);
}

/// The whole decision about a new prompt in a busy pool, of which every server holds the beginning: a chat's system text.
fn head(bench: &mut Bench, body: usize, pool: usize) {
    bench.round += 1;
    let round = bench.round;
    bench.bodies[body][2400..][..8].copy_from_slice(format!("{round:08x}").as_bytes());
    read(bench, body);
    let (pool, blocks) = bench.pool(pool);
    pool.serve(blocks, true);
}

const CASES: &[(&str, Round)] = &[
    ("hit_2k_8", |bench| hit(bench, 0, 0)),
    ("hit_2k_256", |bench| hit(bench, 0, 1)),
    ("miss_2k_8", |bench| miss(bench, 0, 0)),
    ("miss_2k_256", |bench| miss(bench, 0, 1)),
    ("hit_32k_8", |bench| hit(bench, 1, 0)),
    ("hit_32k_256", |bench| hit(bench, 1, 1)),
    ("miss_32k_8", |bench| miss(bench, 1, 0)),
    ("miss_32k_256", |bench| miss(bench, 1, 1)),
    ("hit_128k_8", |bench| hit(bench, 2, 0)),
    ("hit_128k_256", |bench| hit(bench, 2, 1)),
    ("miss_128k_8", |bench| miss(bench, 2, 0)),
    ("miss_128k_256", |bench| miss(bench, 2, 1)),
    ("hit_512k_8", |bench| hit(bench, 3, 0)),
    ("hit_512k_256", |bench| hit(bench, 3, 1)),
    ("miss_512k_8", |bench| miss(bench, 3, 0)),
    ("miss_512k_256", |bench| miss(bench, 3, 1)),
    ("head_32k_8", |bench| head(bench, 1, 0)),
    ("head_32k_256", |bench| head(bench, 1, 1)),
    // What weighted round-robin reads of a body, and what it takes to know a caller by its key.
    ("peek_2k", |bench| {
        let model = peek(black_box(&bench.bodies[0])).model;
        assert!(black_box(model).is_some());
    }),
    ("peek_128k", |bench| {
        let model = peek(black_box(&bench.bodies[2])).model;
        assert!(black_box(model).is_some());
    }),
    ("digest", |bench| {
        let key = Session::Key(black_box(b"sk-proj-0123456789abcdefghijklmnopqrstuvwxyz0123456"));
        assert!(black_box(bench.caller.digest(key)).shown != 0);
    }),
    ("read_2k", |bench| read(bench, 0)),
    ("reference_2k", |bench| walk(bench, 0)),
    ("read_32k", |bench| read(bench, 1)),
    ("reference_32k", |bench| walk(bench, 1)),
    ("read_128k", |bench| read(bench, 2)),
    ("reference_128k", |bench| walk(bench, 2)),
    ("read_512k", |bench| read(bench, 3)),
    ("reference_512k", |bench| walk(bench, 3)),
    ("read_tools_32k", |bench| read(bench, 4)),
    ("reference_tools_32k", |bench| walk(bench, 4)),
    ("read_spaced_tools_32k", |bench| read(bench, 5)),
    ("reference_spaced_tools_32k", |bench| walk(bench, 5)),
];

impl Bench {
    fn new() -> Bench {
        let mut bodies: Vec<Vec<u8>> = SIZES.iter().map(|bytes| chat(*bytes)).collect();
        for (body, bytes) in bodies.iter().zip(SIZES) {
            assert!(body.len().abs_diff(bytes) < bytes / 8, "{} is not about {bytes}", body.len());
        }
        bodies.extend([agent(false), agent(true)]);
        let caller = CallerRules::new("X-Lifeboat-", None);
        Bench {
            pools: [None, None],
            round: 0,
            content: None,
            caller,
            bodies,
            prompt: Prompt::default(),
            hashes: Vec::new(),
        }
    }

    /// A pool, and the blocks of the prompt that was read last.
    fn pool(&mut self, which: usize) -> (&mut Pool, &[u64]) {
        let blocks = &self.prompt.blocks[..];
        let head = &blocks[..blocks.len().min(5)];
        let pool = self.pools[which].get_or_insert_with(|| Pool::new([8, 256][which], head));
        (pool, blocks)
    }
}

fn main() {
    harness::run("decision", CASES, Bench::new);
}
