use super::*;

const POOL: PoolId = PoolId(0);

fn identity(of: u64) -> u64 {
    let z = (of + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 31)
}

fn chain(of: u64, length: u64) -> Vec<u64> {
    (0..length).map(|i| identity(of << 20 | i)).collect()
}

fn at(at: u64, shard: u8) -> Stamp {
    Stamp { at: Nanos(at), shard: ShardId(shard) }
}

fn lists(memory: &PrefixMemory, server: u16) -> Vec<(ClientId, Vec<(u64, Stamp)>)> {
    let mut lists = memory.members[usize::from(server)].as_ref().unwrap().memory.lists();
    lists.sort_by_key(|list| list.0);
    lists
}

/// Replicas that hear of the same touches in different orders, each shard's own in their order, end with the same lists.
#[test]
fn order_of_arrival_does_not_matter() {
    let mut state = 1_u64;
    let mut random = move |n: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    for _ in 0..200 {
        let touches: Vec<(Stamp, ClientId, Vec<u64>)> = (0..60_u64)
            .map(|i| {
                let mut blocks = chain(random(4), 1 + random(8));
                blocks.extend(chain(8 + random(3), random(6)));
                (at(i / 2, random(3) as u8), ClientId(random(3)), blocks)
            })
            .collect();
        let mut replicas: Vec<PrefixMemory> = Vec::new();
        for _ in 0..3 {
            let mut memory = PrefixMemory::new(4 << 20);
            memory.configure(BackendId(0), Some(POOL), 1000);
            let mut rings: Vec<Vec<_>> = vec![Vec::new(); 3];
            for touch in touches.iter().rev() {
                rings[touch.0.shard.index()].push(touch);
            }
            while rings.iter().any(|ring| !ring.is_empty()) {
                if let Some((stamp, client, blocks)) = rings[random(3) as usize].pop() {
                    memory.record(*stamp, BackendId(0), *client, blocks);
                }
            }
            replicas.push(memory);
        }
        assert_eq!(lists(&replicas[0], 0), lists(&replicas[1], 0));
        assert_eq!(lists(&replicas[0], 0), lists(&replicas[2], 0));
    }
}

/// A late touch finds its place where the last one went, not from the newest end each time; this only shows that it is the right place.
#[test]
fn late_touches_go_where_their_stamp_says() {
    let mut memory = PrefixMemory::new(4 << 20);
    memory.configure(BackendId(0), Some(POOL), 10_000);
    let mut wanted = Vec::new();
    let mut put = |memory: &mut PrefixMemory, stamp: u64| {
        let blocks = chain(stamp, 3);
        memory.record(at(stamp, 0), BackendId(0), ClientId(1), &blocks);
        wanted.extend(blocks.into_iter().map(|block| (stamp, block)).rev());
    };
    // Own touches at even times, late ones in growing and in falling order, and one before all.
    (100..200).for_each(|i| put(&mut memory, 2 * i));
    (100..150).for_each(|i| put(&mut memory, 2 * i + 1));
    (150..199).rev().for_each(|i| put(&mut memory, 2 * i + 1));
    put(&mut memory, 7);
    wanted.sort_by_key(|(stamp, _)| *stamp);
    let held: Vec<_> = lists(&memory, 0)[0].1.iter().map(|(block, stamp)| (stamp.at.0, *block)).collect();
    assert_eq!(held, wanted);
}

#[test]
fn nothing_is_allocated_without_servers_and_nothing_remembered_by_strangers() {
    let mut memory = PrefixMemory::new(1 << 30);
    assert_eq!(memory.bytes(), 0);
    let blocks = chain(0, 5);
    assert_eq!(memory.record(at(1, 0), BackendId(3), ClientId(0), &blocks), 0);
    memory.forget(BackendId(3));
    memory.drop_blocks(at(1, 0), BackendId(3), &blocks);
    memory.configure(BackendId(3), None, 100);
    memory.find_matches(POOL, &blocks);
    let out: Vec<Match> = memory.matches(POOL).collect();
    assert_eq!((memory.matched(BackendId(3), &blocks), memory.bytes(), out.len()), (0, 0, 0));
    assert_eq!(memory.figures(BackendId(3)), MemoryFigures::default());
    assert_eq!(memory.clients(BackendId(3)).count(), 0);
}

/// "A server that restarts, is replaced, or whose address changes starts with an empty memory"; so does one in another pool.
#[test]
fn another_domain_starts_empty() {
    let mut memory = PrefixMemory::new(1 << 30);
    let (a, b) = (BackendId(0), BackendId(1));
    let blocks = chain(0, 5);
    let found = |memory: &mut PrefixMemory, pool: PoolId| -> Vec<Match> {
        memory.find_matches(pool, &blocks);
        memory.matches(pool).collect()
    };
    for server in [a, b] {
        memory.configure(server, Some(POOL), 100);
        memory.record(at(1, 0), server, ClientId(0), &blocks);
    }
    memory.configure(a, Some(PoolId(2)), 100);
    assert_eq!(found(&mut memory, PoolId(2)), []);
    assert_eq!(found(&mut memory, POOL), [Match { backend: b, blocks: 5 }]);
    memory.record(at(2, 0), a, ClientId(0), &blocks[..3]);
    assert_eq!(found(&mut memory, PoolId(2)), [Match { backend: a, blocks: 3 }]);
    memory.forget(b);
    assert_eq!(found(&mut memory, POOL), []);
    memory.configure(b, None, 100);
    assert!(memory.domains[0].is_none());
}

/// Identities that are twice in a prompt (a collision) cost accuracy and nothing else.
#[test]
fn colliding_identities_do_no_harm() {
    let mut memory = PrefixMemory::new(1 << 20);
    memory.configure(BackendId(0), Some(POOL), 20);
    let mut state = 1_u64;
    for i in 0..20_000 {
        let blocks: Vec<u64> = (0..1 + i % 13)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                [0, u64::MAX, identity(1), identity(2), identity(state >> 58)][(state >> 40) as usize % 5]
            })
            .collect();
        let late = state % 5;
        memory.record(at(1000 + i - late, 0), BackendId(0), ClientId(i % 3), &blocks);
        if i % 7 == 0 {
            memory.drop_blocks(at(1000 + i, 0), BackendId(0), blocks.get(2..).unwrap_or_default());
        }
        let held: usize = lists(&memory, 0).iter().map(|(_, list)| list.len()).sum();
        assert_eq!(held as u64, memory.figures(BackendId(0)).held);
        assert!(held <= 20);
    }
}

/// Whatever is remembered, `bytes_max` is kept: many servers, few servers, all clients different, blocks held by several.
#[test]
fn memory_stays_within_its_bound() {
    for (bytes_max, servers, capacity) in [
        (0, 2, 100),
        (20_000, 1, 1000),
        (200_000, 3, 65_536),
        (1 << 20, 8, 65_536),
        (2 << 20, 100, 500),
        (8 << 20, 3, 1000),
    ] {
        let mut memory = PrefixMemory::new(bytes_max);
        for server in 0..servers {
            memory.configure(BackendId(server), Some(PoolId(server % 2)), capacity);
        }
        let mut most = 0;
        for i in 0..20_000_u64 {
            let blocks = chain(i / 3, 1 + i % 12);
            let server = BackendId((i * 7 % u64::from(servers)) as u16);
            if i % 3 != 0 {
                memory.announce(server, &blocks);
            }
            if i % 50 == 1 {
                continue;
            }
            memory.record(at(i, 0), server, ClientId(if i % 4 == 0 { i } else { i % 10 }), &blocks);
            most = most.max(memory.bytes());
            if i == 15_000 {
                // One leaves, and the others may have more.
                memory.configure(BackendId(0), None, capacity);
            }
        }
        assert!(most <= bytes_max.max(30_000), "{most} bytes of {bytes_max}, {servers} servers");
        let figures = memory.figures(BackendId(servers - 1));
        if bytes_max >= 1 << 20 && servers < 100 {
            assert!(
                figures.capacity as usize * usize::from(servers) * 110
                    > bytes_max.min(usize::from(servers) * capacity as usize * 110) * 6 / 10,
                "{figures:?}: much is left unused"
            );
        }
        println!("{bytes_max} {servers} {capacity}: most {most} {figures:?}");
    }
}

/// A cut changes nobody's share: all are cut alike, and what is cut off is the oldest.
#[test]
fn capacities_beyond_the_bound_are_cut_in_proportion() {
    let mut memory = PrefixMemory::new(4 << 20);
    memory.configure(BackendId(0), Some(POOL), 20_000);
    for prompt in 0..2000 {
        memory.record(at(prompt, 0), BackendId(0), ClientId(0), &chain(prompt, 10));
    }
    assert_eq!(memory.figures(BackendId(0)).held, 20_000);
    memory.configure(BackendId(1), Some(POOL), 80_000);
    let (a, b) = (memory.figures(BackendId(0)), memory.figures(BackendId(1)));
    assert!(a.capacity < 20_000 && a.held == a.capacity, "{a:?}");
    assert!((a.capacity * 4).abs_diff(b.capacity) < 64, "{a:?} {b:?}");
    assert_eq!(memory.matched(BackendId(0), &chain(1999, 10)), 10);
    assert_eq!(memory.matched(BackendId(0), &chain(0, 10)), 0);
    memory.configure(BackendId(1), None, 0);
    assert_eq!(memory.figures(BackendId(0)).capacity, 20_000);
    assert_eq!(memory.matched(BackendId(0), &chain(1999, 10)), 10, "what was left is still there");
}

/// Where sets of holders cannot be kept, a server still knows what it holds itself, whoever came first or leaves first.
#[test]
fn what_the_index_overlooks_is_held_nevertheless() {
    let mut index = Index::new();
    index.configure(100, 0, 1000);
    let mut servers = [ServerMemory::new(100), ServerMemory::new(100), ServerMemory::new(100)];
    let mut found = [NONE; 64];
    let blocks = chain(1, 20);
    for (slot, memory) in (60..).zip(&mut servers) {
        assert_eq!(memory.record(&mut index, slot, &mut found, at(1, 0), ClientId(1), &blocks), 0);
        assert_eq!(memory.announce(&mut index, slot, &mut found, &blocks), 20);
    }
    let [first, second, third] = &mut servers;
    let held =
        |memory: &ServerMemory, index: &Index, slot| (memory.matched(index, slot, &blocks), memory.held());
    // Whom the index tells forgets half, from which on it tells nobody; then somebody comes anew.
    first.drop_blocks(&mut index, 60, at(1, 0), &blocks[10..]);
    assert_eq!(held(first, &index, 60), (10, 10));
    assert_eq!((held(second, &index, 61), held(third, &index, 62)), ((20, 20), (20, 20)));
    second.clear(&mut index, 61);
    assert_eq!(second.record(&mut index, 61, &mut found, at(2, 0), ClientId(1), &blocks), 0);
    assert_eq!(second.record(&mut index, 61, &mut found, at(3, 0), ClientId(2), &blocks), 20);
    third.resize(15, &mut index, 62);
    first.resize(200, &mut index, 60);
    assert_eq!((held(first, &index, 60), held(second, &index, 61)), ((10, 10), (20, 20)));
    assert_eq!(held(third, &index, 62), (15, 15));
    for (slot, memory) in (60..).zip(&mut servers) {
        memory.clear(&mut index, slot);
        assert_eq!((memory.matched(&index, slot, &blocks), memory.held()), (0, 0));
    }
    index.lookup(&blocks, &mut Vec::new());
    assert_eq!(index.find(blocks[0], 60), None, "nothing is overlooked any more");
}
