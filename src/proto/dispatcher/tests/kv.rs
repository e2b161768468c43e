use super::*;
use crate::proto::backend::catalog::Miss;
use crate::proto::backend::prefix_memory::{Touch, TouchKind, TouchStage};
use crate::proto::ids::ClientId;

const C: BackendId = BackendId(2);
const CLIENT: ClientId = ClientId(7);

fn pool(algorithm: Algorithm, ceilings: &[u32]) -> Catalog {
    let servers: Vec<(f64, u32)> = ceilings.iter().map(|ceiling| (1.0, *ceiling)).collect();
    let mut catalog = catalog(&servers, RoutingMode::Queue, 8);
    catalog.pools[0].algorithm = algorithm;
    for (server, name) in catalog.servers.iter_mut().zip(["a", "b", "c"]) {
        server.name = name.into();
        server.kv_capacity_blocks = 1000;
    }
    catalog
}

fn prompt(of: u64, blocks: u64) -> Vec<u64> {
    (0..blocks).map(|i| (of << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).collect()
}

impl Net {
    /// A request with a prompt: what was decided, and what was believed of it, if it was placed at once. Peers hear of it.
    fn prompt(&mut self, shard: usize, blocks: &[u64]) -> (Decision, Option<Belief>) {
        self.now = Nanos(self.now.0 + 1);
        let decision =
            self.shards[shard].handle_request(self.now, GROUP, &Wanted { blocks, ..Wanted::default() });
        let Decision::Dispatch(placement) = decision else { return (decision, None) };
        (decision, Some(self.send(shard, placement.backend, blocks)))
    }
    fn send(&mut self, shard: usize, backend: BackendId, blocks: &[u64]) -> Belief {
        let prompt = Prompted { client: CLIENT, blocks, tokens: 64 * blocks.len() as u64 };
        let belief = self.shards[shard].handle_prompt(self.now, GROUP, backend, &prompt);
        if self.shards.len() > 1 {
            let touch = Touch { kind: TouchKind::Recorded(CLIENT), at: self.now, backend, blocks };
            self.touch(shard, &touch);
        }
        belief
    }
}

impl Net {
    fn touch(&mut self, from: usize, touch: &Touch<'_>) {
        for (shard, dispatcher) in self.shards.iter_mut().enumerate() {
            if shard != from {
                dispatcher.handle_touch(ShardId(from as u8), TouchStage::Arrived, touch);
            }
            dispatcher.handle_touch(ShardId(from as u8), TouchStage::Settled, touch);
        }
    }
}

fn placed(decision: Decision) -> (BackendId, Algorithm) {
    match decision {
        Decision::Dispatch(placement) => (placement.backend, placement.algorithm_used),
        other => panic!("not placed: {other:?}"),
    }
}

#[test]
fn a_prompt_meets_its_server_again_on_every_shard() {
    let mut net = Net::new(2, &pool(Algorithm::KvAware, &[0, 0, 0]));
    let prompts: Vec<Vec<u64>> = (0..6).map(|of| prompt(of, 20)).collect();
    let first: Vec<_> = prompts.iter().map(|blocks| placed(net.prompt(0, blocks).0)).collect();
    assert!(first.iter().all(|(_, by)| *by == Algorithm::WeightedRoundRobin));
    assert_eq!(first.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
    for shard in [1, 0] {
        for (blocks, (home, _)) in prompts.iter().zip(&first) {
            let (decision, belief) = net.prompt(shard, blocks);
            assert_eq!(placed(decision), (*home, Algorithm::KvAware));
            assert_eq!(belief, Some(Belief { matched: 20, work_tokens: 0 }));
        }
    }
}

/// What a request that came by the queue is said to have been placed by, and what it is believed to find.
#[test]
fn a_preferred_server_without_room_is_not_waited_for() {
    let mut net = Net::new(2, &pool(Algorithm::KvAware, &[1, 1, 1]));
    let blocks = prompt(1, 20);
    let (decision, _) = net.prompt(0, &blocks);
    let (home, _) = placed(decision);
    // Full now: the same prompt goes elsewhere, as a miss would.
    let (decision, belief) = net.prompt(0, &blocks);
    let (other, by) = placed(decision);
    assert!(other != home && by == Algorithm::WeightedRoundRobin);
    assert_eq!(belief.map(|b| b.matched), Some(0));
    assert_eq!(placed(net.prompt(0, &prompt(2, 4)).0).1, Algorithm::WeightedRoundRobin);
    // Nothing has room: it waits, and takes what comes first.
    let (decision, _) = net.prompt(0, &blocks);
    let Decision::Wait(ticket) = decision else { panic!("{decision:?}") };
    net.done(0, home, Outcome::Success);
    let event = net.shards[0].poll_event();
    let Some(Event::Granted { ticket: granted, placement }) = event else { panic!("{event:?}") };
    assert_eq!((granted, placement.backend), (ticket, home));
    assert_eq!(
        placement.algorithm_used,
        Algorithm::WeightedRoundRobin,
        "it was not chosen for what it holds"
    );
    assert_eq!(net.send(0, home, &blocks).matched, 20);
}

#[test]
fn a_peer_gets_its_preferred_server_from_home() {
    let mut net = Net::new(2, &pool(Algorithm::KvAware, &[4, 4, 4]));
    let blocks = prompt(1, 20);
    let (home, _) = placed(net.prompt(0, &blocks).0);
    let (decision, _) = net.prompt(1, &blocks);
    let Decision::Wait(ticket) = decision else { panic!("a shard begins without permits: {decision:?}") };
    net.pump();
    let event = net.shards[1].poll_event();
    let Some(Event::Granted { ticket: granted, placement }) = event else { panic!("{event:?}") };
    assert_eq!((granted, placement.backend, placement.algorithm_used), (ticket, home, Algorithm::KvAware));
}

/// A pool whose misses go to the least busy: tokens that wait steer them, on every shard; answers, grants by the queue included, say
/// who chose.
#[test]
fn misses_go_to_the_least_busy_where_that_is_configured() {
    let mut catalog = pool(Algorithm::KvAware, &[2, 2, 2]);
    catalog.pools[0].kv.miss = Miss::LeastBusy;
    let mut net = Net::new(1, &catalog);
    // One long prompt, then short ones: they keep away from it while others have room.
    let long = prompt(1, 200);
    let (decision, _) = net.prompt(0, &long);
    assert_eq!(placed(decision), (A, Algorithm::LeastBusy));
    let short: Vec<_> = (2..6).map(|of| placed(net.prompt(0, &prompt(of, 4)).0)).collect();
    assert_eq!(short, [B, C, B, C].map(|id| (id, Algorithm::LeastBusy)));
    // They are full: what nobody holds goes to it after all, and then waits; so does what a full one holds.
    assert_eq!(placed(net.prompt(0, &prompt(6, 4)).0), (A, Algorithm::LeastBusy));
    let Decision::Wait(ticket) = net.prompt(0, &prompt(2, 4)).0 else { panic!("all are full") };
    net.done(0, C, Outcome::Success);
    let event = net.shards[0].poll_event();
    let Some(Event::Granted { ticket: granted, placement }) = event else { panic!("{event:?}") };
    assert_eq!((granted, placement.backend, placement.algorithm_used), (ticket, C, Algorithm::LeastBusy));
    // A match is followed as ever.
    net.done(0, A, Outcome::Success);
    assert_eq!(placed(net.prompt(0, &long).0), (A, Algorithm::KvAware));
}

/// What peers have sent counts as busy too.
#[test]
fn the_least_busy_is_so_over_all_shards() {
    let mut catalog = pool(Algorithm::KvAware, &[0, 0, 0]);
    catalog.pools[0].kv.miss = Miss::LeastBusy;
    let mut net = Net::new(2, &catalog);
    assert_eq!(placed(net.prompt(0, &prompt(1, 200)).0).0, A);
    net.flush();
    let on_the_other: Vec<_> = (2..6).map(|of| placed(net.prompt(1, &prompt(of, 4)).0)).collect();
    assert_eq!(on_the_other, [B, C, B, C].map(|id| (id, Algorithm::LeastBusy)));
    // Computed: requests alone count from then on, one there and two at each of the others.
    net.shards[0].handle_prefilled(net.now, A, 200 * 64);
    net.flush();
    assert_eq!(placed(net.prompt(1, &prompt(7, 4)).0), (A, Algorithm::LeastBusy));
}

/// Only what still has to be computed counts as work, until the answer begins; peers hear of it.
#[test]
fn prompt_work_is_counted_until_the_answer_begins() {
    let mut net = Net::new(2, &pool(Algorithm::KvAware, &[0, 0, 0]));
    let mut blocks = prompt(1, 20);
    let (decision, belief) = net.prompt(0, &blocks);
    let (home, _) = placed(decision);
    assert_eq!(belief, Some(Belief { matched: 0, work_tokens: 20 * 64 }));
    blocks.extend(prompt(9, 5));
    let (_, belief) = net.prompt(1, &blocks);
    assert_eq!(belief, Some(Belief { matched: 20, work_tokens: 5 * 64 }));
    net.flush();
    let waiting = |net: &Net, shard: usize| {
        let row = net.shards[shard].table.row(home);
        (row.prefill_tokens, row.prefill_tokens_peers)
    };
    assert_eq!((waiting(&net, 0), waiting(&net, 1)), ((1280, 320), (320, 1280)));
    net.shards[0].handle_prefilled(net.now, home, 1280);
    net.shards[1].handle_prefilled(net.now, home, 320);
    net.flush();
    assert_eq!((waiting(&net, 0), waiting(&net, 1)), ((0, 0), (0, 0)));
}

#[test]
fn short_reports_narrow_the_memory_on_every_shard_and_full_ones_widen_it() {
    let mut net = Net::new(2, &pool(Algorithm::KvAware, &[0, 0, 0]));
    let capacity = |net: &Net, shard: usize| net.shards[shard].memory(A).capacity;
    for i in 0..100 {
        net.now = net.now.plus_ms(1000);
        net.shards[i % 2].handle_report(net.now, A, 100, 40);
        // More of the same within a second: a burst says no more than one.
        net.shards[i % 2].handle_report(net.now, A, 100, 0);
        // The same within what blocks of another size explain: nothing.
        net.shards[i % 2].handle_report(net.now, A, 100, 90);
        net.flush();
    }
    let narrow = capacity(&net, 0);
    assert!(narrow < 500 && narrow > 400, "{narrow}");
    assert_eq!(capacity(&net, 1), narrow);
    assert_eq!(net.shards[0].memory(B).capacity, 1000);
    // More than it may hold is not remembered from then on.
    for of in 0..60 {
        net.send(0, A, &prompt(of, 20));
    }
    assert!(net.shards[0].memory(A).held <= narrow && net.shards[1].memory(A).held <= narrow);
    for _ in 0..300 {
        net.now = net.now.plus_ms(1000);
        net.shards[1].handle_report(net.now, A, 10, 80);
        net.flush();
    }
    assert_eq!((capacity(&net, 0), capacity(&net, 1)), (1000, 1000), "no wider than configured");
    for _ in 0..2000 {
        net.now = net.now.plus_ms(1000);
        net.shards[0].handle_report(net.now, A, 100, 0);
    }
    net.flush();
    assert_eq!(capacity(&net, 0), capacity(&net, 1));
    assert!((15..=16).contains(&capacity(&net, 1)), "no narrower than a 64th: {}", capacity(&net, 1));
    // Another process has another cache.
    net.update(&Update::Forget { backend: A });
    net.flush();
    assert_eq!((capacity(&net, 0), capacity(&net, 1)), (1000, 1000));
}

#[test]
fn a_prompt_that_never_got_there_is_not_remembered() {
    let mut net = Net::new(1, &pool(Algorithm::KvAware, &[0, 0, 0]));
    let blocks = prompt(1, 20);
    net.send(0, A, &blocks[..8]);
    let belief = net.send(0, A, &blocks);
    assert_eq!(belief.matched, 8);
    let tail = &blocks[belief.matched as usize..];
    net.touch(0, &Touch { kind: TouchKind::Dropped(net.now), at: net.now, backend: A, blocks: tail });
    assert_eq!(net.send(0, A, &blocks).matched, 8);
}

#[test]
fn a_restart_another_address_and_removal_empty_the_memory() {
    let mut net = Net::new(2, &pool(Algorithm::KvAware, &[0, 0, 0]));
    let blocks = prompt(1, 20);
    let held = |net: &Net| [A, B, C].map(|id| net.shards[1].memory(id).held);
    for id in [A, B, C] {
        net.send(0, id, &blocks);
    }
    assert_eq!(held(&net), [20, 20, 20]);
    net.update(&Update::Forget { backend: A });
    assert_eq!(held(&net), [0, 20, 20]);
    net.catalog(|catalog| {
        catalog.servers[1].address = Some(Address::Tcp("127.0.0.1:2".parse().unwrap()));
        catalog.servers[2].removed = true;
    });
    assert_eq!(held(&net), [0, 0, 0]);
}

#[test]
fn a_session_stays_with_its_server_and_comes_back_to_it() {
    let mut net = Net::new(2, &pool(Algorithm::StickySession, &[2, 2, 2]));
    let ask = |net: &mut Net, session| {
        net.shards[0].handle_request(net.now, GROUP, &Wanted { session: Some(session), ..Wanted::default() })
    };
    let homes: Vec<_> = (0..30)
        .map(|session: u64| {
            let (home, by) = placed(ask(&mut net, session << 40));
            assert_eq!(by, Algorithm::StickySession);
            net.done(0, home, Outcome::Success);
            home
        })
        .collect();
    assert!([A, B, C].iter().all(|id| homes.contains(id)));
    let session = (homes.iter().position(|home| *home == A).unwrap() as u64) << 40;
    assert_eq!(placed(ask(&mut net, session)), (A, Algorithm::StickySession));
    assert_eq!(placed(ask(&mut net, session)), (A, Algorithm::StickySession));
    // Full.
    let (other, by) = placed(ask(&mut net, session));
    assert!(other != A && by == Algorithm::LeastConnections);
    net.done(0, A, Outcome::Success);
    // Down.
    net.update(&Update::Health { backend: A, up: false });
    assert_eq!(placed(ask(&mut net, session)).1, Algorithm::LeastConnections);
    net.update(&Update::Health { backend: A, up: true });
    assert_eq!(placed(ask(&mut net, session)), (A, Algorithm::StickySession));
}
