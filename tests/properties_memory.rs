//! The prefix memory against a naive model that follows the Lifeboat rules, sections 5.2, 5.5 and 5.6, to the letter.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;
use ringway::clock::Nanos;
use ringway::limits::TOUCH_BLOCKS_MAX;
use ringway::proto::backend::prefix_memory::{CROWD, Match, PrefixMemory, Stamp};
use ringway::proto::ids::{BackendId, ClientId, PoolId, ShardId};

const POOL: PoolId = PoolId(0);
const SERVER: BackendId = BackendId(0);

/// One server's memory, each rule written down as it reads, nothing fast.
#[derive(Clone, Debug, Default)]
struct Model {
    capacity: usize,
    /// See `PrefixMemory::narrow`.
    narrowed: i32,
    /// By identity: when it was last touched (stamp, then order of telling), and whom it is charged to.
    blocks: HashMap<u64, (Stamp, u64, ClientId)>,
    /// Matches, and nothing else.
    announced: BTreeSet<u64>,
    touches: u64,
    evicted: u64,
}

impl Model {
    fn new(capacity: usize) -> Self {
        Model { capacity, ..Model::default() }
    }

    fn clients(&self) -> BTreeMap<ClientId, usize> {
        let mut clients = BTreeMap::new();
        for (_, _, client) in self.blocks.values() {
            *clients.entry(*client).or_insert(0) += 1;
        }
        clients
    }

    fn limit(&self) -> usize {
        let part = (127.0_f64 / 128.0).powi(self.narrowed);
        ((self.capacity as f64 * part) as usize).max(1.min(self.capacity))
    }

    fn matches(&self, block: u64) -> bool {
        self.blocks.contains_key(&block) || self.announced.contains(&block)
    }

    fn matched(&self, blocks: &[u64]) -> u32 {
        blocks.iter().take_while(|block| self.matches(**block)).count() as u32
    }

    fn announce(&mut self, blocks: &[u64]) -> u32 {
        let matched = self.matched(blocks);
        for block in blocks {
            if self.capacity > 0 && self.announced.len() < self.capacity / 16 + 64 && !self.matches(*block) {
                self.announced.insert(*block);
            }
        }
        matched
    }

    fn record(&mut self, stamp: Stamp, client: ClientId, blocks: &[u64]) -> u32 {
        let blocks = &blocks[..blocks.len().min(TOUCH_BLOCKS_MAX)];
        let matched = blocks.iter().take_while(|block| self.blocks.contains_key(block)).count() as u32;
        self.announced.retain(|block| !blocks.contains(block));
        if self.capacity == 0 || blocks.is_empty() {
            return matched;
        }
        let clients = self.clients();
        let crowded = clients.len() >= (self.capacity / 8).max(64);
        let client = if crowded && !clients.contains_key(&client) { CROWD } else { client };
        let fresh: Vec<u64> =
            blocks.iter().copied().filter(|block| !self.blocks.contains_key(block)).collect();
        for block in blocks.iter().rev() {
            self.touches += 1;
            let touch = (stamp, self.touches, client);
            let held = self.blocks.entry(*block).or_insert(touch);
            if held.0 <= stamp {
                *held = touch;
            }
        }
        // What is held already pushes nothing out.
        if !fresh.is_empty() {
            self.evict(self.limit(), &fresh);
        }
        matched
    }

    /// Blocks in `fresh` were not there before: they count as never remembered.
    fn evict(&mut self, limit: usize, fresh: &[u64]) {
        while self.blocks.len() > limit {
            let clients = self.clients();
            let oldest_of = |client: ClientId| {
                let own = self.blocks.iter().filter(|(_, held)| held.2 == client);
                own.map(|(block, held)| (held.0, held.1, *block))
                    .min()
                    .expect("an active client owns a block")
            };
            let most_over = clients
                .iter()
                .max_by_key(|(client, blocks)| (**blocks, Reverse((oldest_of(**client).0, **client))));
            let (client, blocks) = most_over.expect("blocks have owners");
            // The promise itself: who gives has more than its share.
            assert!(blocks * clients.len() > limit, "{client:?} is evicted at or under its share");
            let (_, _, block) = oldest_of(*client);
            self.blocks.remove(&block);
            self.evicted += u64::from(!fresh.contains(&block));
        }
    }

    fn drop_tail(&mut self, stamp: Stamp, blocks: &[u64], keep: usize) {
        for block in blocks.iter().skip(keep) {
            if self.blocks.get(block).is_some_and(|held| held.0 <= stamp) {
                self.blocks.remove(block);
            }
        }
    }
}

/// All that can be seen from outside.
fn compare(memory: &PrefixMemory, server: BackendId, model: &Model, universe: &[u64]) {
    for block in universe {
        let held = memory.matched(server, &[*block]) == 1;
        assert_eq!(held, model.matches(*block), "block {block:#x}");
    }
    let mut clients: Vec<_> =
        memory.clients(server).map(|(client, blocks)| (client, blocks as usize)).collect();
    clients.sort();
    assert_eq!(clients, model.clients().into_iter().collect::<Vec<_>>());
    let figures = memory.figures(server);
    assert_eq!(
        (figures.held as usize, figures.announced as usize),
        (model.blocks.len(), model.announced.len())
    );
    assert_eq!((figures.clients as usize, figures.evicted), (clients.len(), model.evicted));
}

/// Random identities, as hashes are.
fn identity(of: u64) -> u64 {
    let z = of.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 31)
}

/// A chain: prompts of the same `family` have the same first blocks.
fn chain(family: u64, shared: usize, tail: u64, length: usize) -> Vec<u64> {
    (0..length)
        .map(|i| {
            if i < shared {
                identity(family << 32 | i as u64)
            } else {
                identity(1 << 60 | tail << 32 | i as u64)
            }
        })
        .collect()
}

#[derive(Clone, Debug)]
enum Act {
    Record { server: u16, shard: u8, late: u64, client: u64, blocks: Vec<u64> },
    Announce { server: u16, blocks: Vec<u64> },
    Drop { server: u16, late: u64, blocks: Vec<u64>, keep: usize },
    Capacity { server: u16, capacity: u32 },
    Narrow { server: u16, steps: u32 },
    Forget { server: u16 },
    Lookup { blocks: Vec<u64> },
}

fn prompt() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        (0..4_u64, 0..12_usize, 0..6_u64, 1..16_usize)
            .prop_map(|(family, shared, tail, length)| chain(family, shared, tail, length)),
        // No chain at all: holes and blocks in any order.
        prop::collection::btree_set(0..60_u64, 0..20).prop_shuffle_set(),
    ]
}

trait Shuffled {
    fn prop_shuffle_set(self) -> BoxedStrategy<Vec<u64>>;
}
impl<S: Strategy<Value = BTreeSet<u64>> + 'static> Shuffled for S {
    fn prop_shuffle_set(self) -> BoxedStrategy<Vec<u64>> {
        self.prop_map(|set| set.into_iter().map(|i| identity((i % 4) << 32 | (i / 4))).collect::<Vec<_>>())
            .prop_shuffle()
            .boxed()
    }
}

fn act(servers: u16, clients: u64) -> impl Strategy<Value = Act> {
    let late = prop_oneof![3 => Just(0_u64), 1 => 0..40_u64];
    prop_oneof![
        20 => (0..servers, 0..3_u8, late.clone(), 0..clients, prompt()).prop_map(
            |(server, shard, late, client, blocks)| Act::Record { server, shard, late, client, blocks }
        ),
        5 => (0..servers, prompt()).prop_map(|(server, blocks)| Act::Announce { server, blocks }),
        2 => (0..servers, late, prompt(), 0..10_usize)
            .prop_map(|(server, late, blocks, keep)| Act::Drop { server, late, blocks, keep }),
        1 => (0..servers, 0..50_u32).prop_map(|(server, capacity)| Act::Capacity { server, capacity }),
        1 => (0..servers, 0..300_u32).prop_map(|(server, steps)| Act::Narrow { server, steps }),
        1 => (0..servers).prop_map(|server| Act::Forget { server }),
        4 => prompt().prop_map(|blocks| Act::Lookup { blocks }),
    ]
}

fn naive_lookup(models: &[Model], blocks: &[u64]) -> Vec<Match> {
    let mut wanted: Vec<Match> = models
        .iter()
        .enumerate()
        .map(|(server, model)| Match { backend: BackendId(server as u16), blocks: model.matched(blocks) })
        .filter(|m| m.blocks > 0)
        .collect();
    wanted.sort_by_key(|m| (Reverse(m.blocks), m.backend));
    wanted
}

fn play(servers: u16, capacity: u32, acts: &[Act]) {
    let mut memory = PrefixMemory::new(64 << 20);
    let mut models: Vec<_> = (0..servers).map(|_| Model::new(capacity as usize)).collect();
    for server in 0..servers {
        memory.configure(BackendId(server), Some(POOL), capacity);
    }
    let mut universe = BTreeSet::new();
    let mut now = 1000_u64;
    for act in acts {
        // Some touches share their time.
        now += u64::from(!now.is_multiple_of(3)) + 1;
        let stamp = |late: &u64, shard: u8| Stamp { at: Nanos(now - late), shard: ShardId(shard) };
        let touched = match act {
            Act::Record { server, shard, late, client, blocks } => {
                universe.extend(blocks.iter().copied());
                let (stamp, client) = (stamp(late, *shard), ClientId(*client));
                let matched = memory.record(stamp, BackendId(*server), client, blocks);
                assert_eq!(
                    matched,
                    models[*server as usize]
                        .record(stamp, client, blocks)
                        .min(models[*server as usize].capacity as u32)
                );
                *server
            }
            Act::Announce { server, blocks } => {
                universe.extend(blocks.iter().copied());
                let matched = memory.announce(BackendId(*server), blocks);
                assert_eq!(matched, models[*server as usize].announce(blocks));
                *server
            }
            Act::Drop { server, late, blocks, keep } => {
                memory.drop_blocks(
                    stamp(late, 1),
                    BackendId(*server),
                    blocks.get(*keep..).unwrap_or_default(),
                );
                models[*server as usize].drop_tail(stamp(late, 1), blocks, *keep);
                *server
            }
            Act::Capacity { server, capacity } => {
                memory.configure(BackendId(*server), Some(POOL), *capacity);
                let model = &mut models[*server as usize];
                if model.capacity != *capacity as usize {
                    model.capacity = *capacity as usize;
                    model.announced.clear();
                }
                models[*server as usize].evict(*capacity as usize, &[]);
                *server
            }
            Act::Narrow { server, steps } => {
                memory.narrow(BackendId(*server), *steps);
                models[*server as usize].narrowed = *steps as i32;
                *server
            }
            Act::Forget { server } => {
                memory.forget(BackendId(*server));
                let Model { capacity, narrowed, .. } = models[*server as usize];
                models[*server as usize] = Model { narrowed, ..Model::new(capacity) };
                *server
            }
            Act::Lookup { blocks } => {
                memory.find_matches(POOL, blocks);
                assert_eq!(memory.matches(POOL).collect::<Vec<_>>(), naive_lookup(&models, blocks));
                continue;
            }
        };
        let universe: Vec<_> = universe.iter().copied().collect();
        compare(&memory, BackendId(touched), &models[touched as usize], &universe);
    }
    for block in universe.into_iter().take(100) {
        memory.find_matches(POOL, &[block]);
        assert_eq!(memory.matches(POOL).collect::<Vec<_>>(), naive_lookup(&models, &[block]));
    }
}

proptest! {
    /// "a block is evicted from the client most over its share, oldest first; a client at or under its share loses nothing
    /// while another is over. […] A block used by several clients is charged to the one that used it last."
    #[test]
    fn eviction_is_exact(capacity in 1..50_u32, acts in prop::collection::vec(act(1, 5), 1..120)) {
        play(1, capacity, &acts);
    }

    /// The same where a prompt is longer than what may be announced, and than the capacity.
    #[test]
    fn long_prompts_evict_as_exactly(
        capacity in 1..250_u32,
        prompts in prop::collection::vec((0..3_u64, 0..120_usize, 0..4_u64, 1..180_usize, 0..4_u64, 0..4_u8), 1..25),
    ) {
        let acts = prompts.into_iter().map(|(family, shared, tail, length, client, what)| {
            let blocks = chain(family, shared, tail, length);
            match what {
                0 => Act::Announce { server: (tail % 2) as u16, blocks },
                _ => Act::Record { server: (client % 2) as u16, shard: 0, late: u64::from(what) % 3 * 3, client, blocks },
            }
        });
        play(2, capacity, &acts.collect::<Vec<_>>());
    }

    /// "Matched(s) = length of the longest run of leading blocks that server s is remembered to hold."
    #[test]
    fn one_pass_matches_every_server(capacity in 1..80_u32, acts in prop::collection::vec(act(4, 3), 1..120)) {
        play(4, capacity, &acts);
    }

    /// The same where sets of holders are no bit masks.
    #[test]
    fn one_pass_matches_many_servers(acts in prop::collection::vec(act(80, 3), 1..150)) {
        play(80, 30, &acts);
    }
}

/// "Each is guaranteed capacity / active clients": one client with 10,000 distinct prompts beside nine with a steady working
/// set within their share. The nine lose no block.
#[test]
fn a_noisy_client_takes_nothing_from_those_within_their_share() {
    let capacity = 4096;
    let mut memory = PrefixMemory::new(16 << 20);
    memory.configure(SERVER, Some(POOL), capacity);
    // Nine times 400 blocks of 4096 / 10 each, in prompts of 25; the noisy one's have 1 to 40.
    let steady: Vec<(ClientId, Vec<Vec<u64>>)> = (0..9)
        .map(|client| {
            (ClientId(client), (0..16).map(|prompt| chain(0, 0, client << 8 | prompt, 25)).collect())
        })
        .collect();
    let mut at = 0;
    let mut record = |memory: &mut PrefixMemory, client, blocks: &[u64]| {
        at += 1;
        memory.record(Stamp { at: Nanos(at), shard: ShardId(0) }, SERVER, client, blocks)
    };
    // The noisy one comes first and fills it all: a client alone holds everything.
    let noisy = ClientId(1000);
    for prompt in 0..1000 {
        record(&mut memory, noisy, &chain(0, 0, 1 << 16 | prompt, 10));
    }
    assert_eq!(memory.figures(SERVER).held, u64::from(capacity));
    for (client, prompts) in &steady {
        for prompt in prompts {
            record(&mut memory, *client, prompt);
        }
    }
    for round in 0..10_000_u64 {
        record(&mut memory, noisy, &chain(0, 0, 1 << 20 | round, 1 + (round % 40) as usize));
        if round % 100 == 0 {
            let (client, prompts) = &steady[(round / 100 % 9) as usize];
            let prompt = &prompts[(round / 900 % 16) as usize];
            assert_eq!(record(&mut memory, *client, prompt), 25, "after {round} noisy prompts");
        }
    }
    for (client, prompts) in &steady {
        for prompt in prompts {
            assert_eq!(memory.matched(SERVER, prompt), 25, "{client:?}");
        }
        assert!(memory.clients(SERVER).any(|owned| owned == (*client, 400)));
    }
}

/// The reverse: one who invents a client for every prompt wins what clients win, and no more than one share per eight blocks.
#[test]
fn invented_clients_are_no_more_than_the_crowd() {
    let capacity = 4096;
    let mut memory = PrefixMemory::new(16 << 20);
    memory.configure(SERVER, Some(POOL), capacity);
    let mut stamp = Stamp { at: Nanos(0), shard: ShardId(0) };
    let steady = chain(0, 0, 7, 8);
    for prompt in 0..50_000_u64 {
        stamp.at.0 += 1;
        memory.record(stamp, SERVER, ClientId(1 << 32 | prompt), &chain(0, 0, 1 << 20 | prompt, 4));
        if prompt == 100 {
            memory.record(stamp, SERVER, ClientId(7), &steady);
        }
    }
    let figures = memory.figures(SERVER);
    assert!(figures.clients <= u64::from(capacity) / 8 + 1, "{figures:?}");
    assert_eq!(memory.matched(SERVER, &steady), 8, "as many as a share can be worth");
}

/// "heads outlive tails and a cut chain never hides behind a missing head"; "a chain longer than the capacity keeps its head".
#[test]
fn heads_outlive_tails() {
    let mut memory = PrefixMemory::new(16 << 20);
    memory.configure(SERVER, Some(POOL), 100);
    let at = |at| Stamp { at: Nanos(at), shard: ShardId(0) };
    let long = chain(0, 0, 1, 250);
    assert_eq!(memory.record(at(1), SERVER, ClientId(1), &long), 0);
    assert_eq!(memory.matched(SERVER, &long), 100);
    assert_eq!(memory.record(at(2), SERVER, ClientId(1), &chain(0, 0, 2, 30)), 0);
    assert_eq!(memory.matched(SERVER, &long), 70);
    assert_eq!(memory.record(at(3), SERVER, ClientId(1), &long), 70);
    assert_eq!(memory.matched(SERVER, &long), 100);
}

/// More than `TOUCH_BLOCKS_MAX` blocks of one prompt are not told to peers, so they are not remembered either.
#[test]
fn a_prompt_is_remembered_up_to_its_bound() {
    let mut memory = PrefixMemory::new(16 << 20);
    memory.configure(SERVER, Some(POOL), 10_000);
    let long = chain(0, 0, 1, 6000);
    memory.record(Stamp { at: Nanos(1), shard: ShardId(0) }, SERVER, ClientId(1), &long);
    assert_eq!(memory.matched(SERVER, &long) as usize, TOUCH_BLOCKS_MAX);
}
