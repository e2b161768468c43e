//! What the prefix memory costs, in instructions, and that it allocates nothing once it is full.
//!
//! Each round is one request of [`BLOCKS`] blocks: a lookup over all servers and a recording on one. Run without arguments (as
//! `cargo test` does) each case goes some rounds, its result is checked and its allocations are counted;
//! `scripts/bench-instructions --bench memory` counts instructions. The memories of the cases with `large` in their names are
//! beyond a processor's caches: what counts there is time, and `cargo bench --bench memory -- --time [CASE...]` tells it, in ns per
//! block, the median of several repeats.

#[path = "harness/allocations.rs"]
mod allocations;
mod harness;

use harness::Order;
use std::hint::black_box;

use ringway::clock::Nanos;
use ringway::proto::backend::prefix_memory::{Match, PrefixMemory, Stamp};
use ringway::proto::ids::{BackendId, ClientId, PoolId, ShardId};

/// Of one prompt: 32 KiB at 256 bytes per block.
const BLOCKS: usize = 128;
const POOL: PoolId = PoolId(0);

fn identity(of: u64) -> u64 {
    let z = of.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 31)
}

/// Fills `blocks` with prompt number `of`, of which the first `shared` blocks are every prompt's.
fn prompt(of: u64, shared: usize, blocks: &mut Vec<u64>) {
    blocks.clear();
    blocks
        .extend((0..BLOCKS).map(|i| identity(if i < shared { i as u64 } else { (of + 1) << 20 | i as u64 })));
}

struct Bench {
    memory: PrefixMemory,
    servers: u64,
    capacity: u32,
    shared: usize,
    /// Prompts that are asked for again and again, and how many there are.
    known: Vec<Vec<u64>>,
    matches: Vec<Match>,
    blocks: Vec<u64>,
    round: u64,
    at: u64,
}

/// Per case: name, servers, capacity in blocks, blocks that all prompts share, and a round.
type Case = (&'static str, u64, u32, usize, fn(&mut Bench));

const CASES: &[Case] = &[
    ("lookup_8", 8, 4096, 0, Bench::lookup),
    ("lookup_256", 256, 4096, 0, Bench::lookup),
    ("lookup_shared_8", 8, 4096, 64, Bench::lookup),
    ("lookup_shared_256", 256, 4096, 64, Bench::lookup),
    ("best_shared_8", 8, 4096, 64, Bench::best),
    ("best_shared_256", 256, 4096, 64, Bench::best),
    ("hit_8", 8, 4096, 0, Bench::hit),
    ("hit_256", 256, 4096, 0, Bench::hit),
    ("hit_shared_8", 8, 4096, 64, Bench::hit),
    ("hit_shared_256", 256, 4096, 64, Bench::hit),
    ("hit_8_large", 8, 65_536, 0, Bench::hit),
    ("announced_hit_8", 8, 4096, 0, Bench::announced_hit),
    ("announced_new_8", 8, 4096, 0, Bench::announced),
    ("late_8", 8, 4096, 0, Bench::late),
    ("prompt_8", 8, 4096, 0, Bench::fresh_prompt),
    ("new_8", 8, 4096, 0, Bench::fresh),
    ("new_256", 256, 4096, 0, Bench::fresh),
    ("new_8_large", 8, 65_536, 0, Bench::fresh),
    ("lookup_8_large", 8, 65_536, 0, Bench::lookup_any),
    ("again_8_large", 8, 65_536, 0, Bench::again),
    ("announced_new_8_large", 8, 65_536, 0, Bench::announced),
    ("new_shared_8", 8, 4096, 64, Bench::fresh),
    ("new_shared_256", 256, 4096, 64, Bench::fresh),
];

impl Bench {
    fn new(servers: u64, capacity: u32, shared: usize) -> Self {
        let mut memory = PrefixMemory::new(1 << 30);
        for server in 0..servers {
            memory.configure(BackendId(server as u16), Some(POOL), capacity);
        }
        let mut bench = Bench {
            memory,
            servers,
            capacity,
            shared,
            known: vec![Vec::new(); 64],
            matches: Vec::with_capacity(servers as usize),
            blocks: Vec::with_capacity(BLOCKS),
            round: 0,
            at: 0,
        };
        // Twice what fits, so that all is full and what grows has grown.
        for _ in 0..2 * u64::from(capacity) * servers / (BLOCKS - shared) as u64 + 1 {
            bench.fresh();
        }
        // What is announced comes on top.
        (0..200).for_each(|_| bench.announced());
        for of in 0..bench.known.len() as u64 {
            let mut blocks = Vec::new();
            prompt(of, shared, &mut blocks);
            bench.record(of % servers, of % 10, &blocks);
            bench.known[of as usize] = blocks;
        }
        bench.round = 0;
        bench
    }

    fn record(&mut self, server: u64, client: u64, blocks: &[u64]) -> u32 {
        self.at += 1;
        let stamp = Stamp { at: Nanos(self.at), shard: ShardId(0) };
        self.memory.record(stamp, BackendId(server as u16), ClientId(client), blocks)
    }

    /// One of 64 known prompts is looked up: one server holds it whole, the others what is shared.
    fn lookup(&mut self) {
        let of = self.round % 64;
        self.round += 1;
        self.memory.find_matches(POOL, black_box(&self.known[of as usize]));
        self.matches.clear();
        self.matches.extend(self.memory.matches(POOL));
        let best = Match { backend: BackendId((of % self.servers) as u16), blocks: BLOCKS as u32 };
        assert_eq!(self.matches[0], best);
        assert_eq!(self.matches.len() as u64, if self.shared > 0 { self.servers } else { 1 });
    }

    /// As `lookup`, asked for the best alone.
    fn best(&mut self) {
        let of = self.round % 64;
        self.round += 1;
        self.memory.find_matches(POOL, black_box(&self.known[of as usize]));
        self.matches.clear();
        self.matches.extend(self.memory.matches(POOL).next());
        let best = Match { backend: BackendId((of % self.servers) as u16), blocks: BLOCKS as u32 };
        assert_eq!(self.matches, [best]);
    }

    /// ... and recorded on that server, for its client.
    fn hit(&mut self) {
        let of = self.round % 64;
        self.lookup();
        let blocks = std::mem::take(&mut self.known[of as usize]);
        assert_eq!(self.record(of % self.servers, of % 10, black_box(&blocks)), BLOCKS as u32);
        self.known[of as usize] = blocks;
    }

    /// ... with a second shard about: announced, and recorded when it has settled.
    fn announced_hit(&mut self) {
        let of = self.round % 64;
        let blocks = std::mem::take(&mut self.known[of as usize]);
        let server = BackendId((of % self.servers) as u16);
        assert_eq!(self.memory.announce(server, black_box(&blocks)), BLOCKS as u32);
        self.known[of as usize] = blocks;
        self.hit();
    }

    /// One of all the prompts that there is room for, in no order.
    fn lookup_any(&mut self) {
        let prompts = u64::from(self.capacity) * self.servers / BLOCKS as u64 * 3 / 4;
        if self.round == 0 {
            for of in 0..prompts {
                self.any(of);
                let blocks = std::mem::take(&mut self.blocks);
                self.record(of % self.servers, of % 10, &blocks);
                self.blocks = blocks;
            }
        }
        self.round += 1;
        // Steps of a prime number.
        self.any(self.round * 7919 % prompts);
        self.memory.find_matches(POOL, black_box(&self.blocks));
        self.matches.clear();
        self.matches.extend(self.memory.matches(POOL));
        assert_eq!(self.matches[0].blocks, BLOCKS as u32);
    }

    fn any(&mut self, of: u64) {
        prompt(1 << 40 | of, 0, &mut self.blocks);
    }

    /// ... and recorded where it was before.
    fn again(&mut self) {
        self.lookup_any();
        let blocks = std::mem::take(&mut self.blocks);
        let server = u64::from(self.matches[0].backend.0);
        assert_eq!(self.record(server, self.round % 10, black_box(&blocks)), BLOCKS as u32);
        self.blocks = blocks;
    }

    /// As `hit`, told by a peer: each second touch is older than the one before.
    fn late(&mut self) {
        self.at = if self.round.is_multiple_of(2) { self.at + 3 } else { self.at - 2 };
        self.hit();
    }

    /// A prompt that nobody has seen: what making it costs, to be taken off `new`.
    fn fresh_prompt(&mut self) {
        self.round += 1;
        prompt(1 << 20 | self.round, self.shared, &mut self.blocks);
        black_box(&self.blocks);
    }

    /// A prompt that nobody has seen, by one of ten clients: looked up, recorded, and as much evicted.
    fn fresh(&mut self) {
        self.fresh_prompt();
        self.memory.find_matches(POOL, black_box(&self.blocks));
        self.matches.clear();
        self.matches.extend(self.memory.matches(POOL));
        let blocks = std::mem::take(&mut self.blocks);
        let matched = self.record(self.round % self.servers, self.round % 10, black_box(&blocks));
        assert!(matched as usize <= self.shared);
        self.blocks = blocks;
    }

    /// As `fresh`, announced before.
    fn announced(&mut self) {
        self.fresh_prompt();
        self.memory.find_matches(POOL, black_box(&self.blocks));
        self.matches.clear();
        self.matches.extend(self.memory.matches(POOL));
        let blocks = std::mem::take(&mut self.blocks);
        let server = self.round % self.servers;
        self.memory.announce(BackendId(server as u16), black_box(&blocks));
        let matched = self.record(server, self.round % 10, black_box(&blocks));
        assert!(matched as usize <= self.shared);
        self.blocks = blocks;
    }
}

/// Times the cases that are asked for, or the large ones: ns per block, the making of a prompt (about 1) included
/// where a round makes one.
fn time(wanted: &[String]) {
    const REPEATS: usize = 9;
    const ROUNDS: u32 = 4000;
    for (name, servers, capacity, shared, round) in CASES {
        if !(wanted.iter().any(|wanted| wanted == name) || wanted.is_empty() && name.ends_with("_large")) {
            continue;
        }
        let mut bench = Bench::new(*servers, *capacity, *shared);
        round(&mut bench);
        let mut times: Vec<f64> = (0..REPEATS)
            .map(|_| {
                #[expect(clippy::disallowed_methods, reason = "a bench measures")]
                let start = std::time::Instant::now();
                (0..ROUNDS).for_each(|_| round(&mut bench));
                start.elapsed().as_nanos() as f64 / f64::from(ROUNDS) / BLOCKS as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{name:<24} {:7.1} ns per block ({:.1} to {:.1})",
            times[REPEATS / 2],
            times[0],
            times[REPEATS - 1]
        );
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    if let Some(("--time", wanted)) = args.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return time(wanted);
    }
    match harness::order(CASES.iter().map(|(name, ..)| *name)) {
        Order::Rounds(case, rounds) => {
            let (_, servers, capacity, shared, round) = &CASES[case];
            let mut bench = Bench::new(*servers, *capacity, *shared);
            for _ in 0..rounds {
                round(&mut bench);
            }
        }
        Order::Try => {
            for (name, servers, capacity, shared, round) in CASES {
                // Unoptimised, the large ones take too long to fill.
                let mut bench = Bench::new((*servers).min(70), (*capacity).min(8192), *shared);
                let before = allocations::count();
                for _ in 0..200 {
                    round(&mut bench);
                }
                // Now and then a part of the index reaches a new height: two allocations each, in 25,600 blocks.
                let allocations = allocations::count() - before;
                assert!(allocations <= 20, "{name}: {allocations} allocations once all is full");
            }
            println!(
                "memory: {} cases ran; scripts/bench-instructions --bench memory counts them",
                CASES.len()
            );
        }
    }
}
