//! Tiny traces, figures worked out by hand.

use super::engine::EngineModel;
use super::kv_rule::{KvRule, Numbers};
use super::policy::{Arrival, Policy, Verdict};
use super::simulation::{Outcome, Setting, simulate, single_cache_hit_rate};
use super::trace::{BLOCK_TOKENS, Request, Trace};
use super::*;
use crate::clock::S;

/// Requests as (arrival in seconds, numbers of the prompt's blocks, output tokens). The last block is whole.
fn trace(requests: &[(u64, &[u32], u64)]) -> Trace {
    let distinct_blocks = requests.iter().flat_map(|r| r.1).max().map_or(0, |&most| most as usize + 1);
    let requests = requests
        .iter()
        .map(|&(at, blocks, output_tokens)| Request {
            arrival_ns: at * S,
            prompt_tokens: blocks.len() as u64 * BLOCK_TOKENS,
            output_tokens,
            blocks: blocks.into(),
        })
        .collect();
    Trace { name: "tiny".into(), requests, distinct_blocks }
}

/// Engines that compute a block per second and an output token per second.
fn setting(engines: usize, cache_blocks: usize, slots: Option<usize>) -> Setting {
    let model = EngineModel { prefill_tokens_per_s: 512.0, decode_ms_per_token: 1000.0, cache_blocks, slots };
    Setting { engines, model, speed: 1.0, jitter_ns: 0, seed: 1 }
}

fn play_one(trace: &Trace, setting: &Setting, kind: RouterKind) -> Outcome {
    simulate(trace, setting, kind.router(trace, setting, Numbers::default()).as_mut())
}

fn ttft_s(outcome: &Outcome) -> Vec<u64> {
    outcome.ttft_ns.iter().map(|ns| ns / S).collect()
}

/// Two conversations, A (blocks 0…) and B (10…), in the order A B B A, each answered before the next comes.
fn two_conversations() -> Trace {
    trace(&[(0, &[0, 1], 1), (10, &[10, 11], 1), (20, &[10, 11, 12], 1), (30, &[0, 1, 2], 1)])
}

#[test]
fn blind_routers_split_conversations() {
    // In turn: A on 0, B on 1, B on 0, A on 1: nothing is found again. Prefills of 2, 2, 3 and 3 blocks.
    for kind in [RouterKind::WeightedRoundRobin, RouterKind::LeastConnections] {
        let outcome = play_one(&two_conversations(), &setting(2, 100, None), kind);
        assert_eq!((outcome.hit_blocks, outcome.blocks), (0, 10), "{kind:?}");
        assert_eq!(ttft_s(&outcome), [2, 2, 3, 3], "{kind:?}");
        assert_eq!(outcome.requests, [2, 2], "{kind:?}");
        assert_eq!(outcome.uncached_tokens, [5 * 512, 5 * 512], "{kind:?}");
        assert_eq!(outcome.end_ns, 34 * S, "30 s, three blocks, one token: {kind:?}");
    }
}

#[test]
fn routers_that_know_prefixes_keep_conversations_together() {
    use RouterKind as R;
    for kind in [
        R::KvAware,
        R::KvAwareReports,
        R::KvRuleDropsTails,
        R::KvAwareLeastBusy,
        R::SmgCacheAware,
        R::SmgCacheAwareFirst,
        R::LlmD111,
        R::LlmD322,
        R::Dynamo,
        R::Oracle,
        R::OracleKvAware,
    ] {
        for slots in [None, Some(2)] {
            let outcome = play_one(&two_conversations(), &setting(2, 100, slots), kind);
            assert_eq!((outcome.hit_blocks, outcome.predicted_blocks), (4, 4), "{kind:?}");
            assert_eq!(ttft_s(&outcome), [1, 1, 2, 2], "{kind:?}");
            assert_eq!(outcome.hit_rate(), 0.4, "{kind:?}");
        }
    }
}

#[test]
fn the_limit_is_one_cache_for_all() {
    assert_eq!(single_cache_hit_rate(&two_conversations(), 100), 0.4);
    // Four blocks: A and B fit; B's third turns out A's tail; of A, the head is left.
    assert_eq!(single_cache_hit_rate(&two_conversations(), 4), 0.3);
    assert_eq!(single_cache_hit_rate(&two_conversations(), 0), 0.0);
}

#[test]
fn an_engine_works_through_its_queue() {
    // All on one engine at once: 2, 1 and 3 blocks, 4, 1 and 1 tokens.
    let trace = trace(&[(0, &[0, 1], 4), (0, &[2], 1), (0, &[3, 4, 5], 1)]);
    let ttft = |slots| ttft_s(&play_one(&trace, &setting(1, 100, slots), RouterKind::WeightedRoundRobin));
    assert_eq!(ttft(None), [1, 2, 3], "at once");
    // Prefills one after the other: 2, then 1, then 3.
    assert_eq!(ttft(Some(3)), [2, 3, 6]);
    // Two slots: the third waits for the second's token, at 4.
    assert_eq!(ttft(Some(2)), [2, 3, 7]);
    // One slot: 0–2–6, 6–7–8, 8–11.
    assert_eq!(ttft(Some(1)), [2, 7, 11]);
}

#[test]
fn a_queued_engine_looks_into_its_cache_when_the_prefill_begins() {
    // The second waits behind the first, and finds what it left. An oracle looks too early to know.
    let trace = trace(&[(0, &[0, 1], 0), (1, &[0, 1, 2], 0)]);
    let queued = play_one(&trace, &setting(1, 100, Some(4)), RouterKind::Oracle);
    assert_eq!((queued.hit_blocks, ttft_s(&queued)), (2, vec![2, 2]));
    // No prompt is cached before a prefill has begun.
    let three = play_one(
        &self::trace(&[(0, &[5, 6, 7], 0), (1, &[0, 1], 0), (2, &[0, 1, 2], 0)]),
        &setting(1, 100, Some(4)),
        RouterKind::Oracle,
    );
    assert_eq!((three.predicted_blocks, three.hit_blocks), (0, 2));
    let ours = play_one(
        &self::trace(&[(0, &[5, 6, 7], 0), (1, &[0, 1], 0), (2, &[0, 1, 2], 0)]),
        &setting(1, 100, Some(4)),
        RouterKind::KvAware,
    );
    assert_eq!((ours.predicted_blocks, ours.hit_blocks), (2, 2), "what was sent there will be there");
}

#[test]
fn speed_and_jitter_move_arrivals_only() {
    let trace = two_conversations();
    let mut fast = setting(2, 100, None);
    fast.speed = 20.0;
    let outcome = play_one(&trace, &fast, RouterKind::WeightedRoundRobin);
    assert_eq!(outcome.end_ns, 5_500_000_000, "30 s / 20, three blocks, one token");
    let mut late = setting(2, 100, None);
    late.jitter_ns = 1_000;
    let outcome = play_one(&trace, &late, RouterKind::WeightedRoundRobin);
    assert_eq!(ttft_s(&outcome), [2, 2, 3, 3]);
    assert!((34 * S..=34 * S + 1_000).contains(&outcome.end_ns));
}

#[test]
fn the_same_run_twice_is_the_same() {
    let mut requests = Vec::new();
    let prompts: Vec<Vec<u32>> = (0..40u32).map(|i| (0..=i % 7).map(|b| (i % 5) * 8 + b).collect()).collect();
    for (i, prompt) in prompts.iter().enumerate() {
        requests.push((i as u64 / 3, prompt.as_slice(), 3));
    }
    let trace = trace(&requests);
    for &kind in RouterKind::value_variants() {
        for slots in [None, Some(2)] {
            let mut setting = setting(3, 12, slots);
            setting.jitter_ns = S;
            let first = play_one(&trace, &setting, kind);
            assert_eq!(first, play_one(&trace, &setting, kind), "{kind:?}");
            assert_eq!(first.requests.iter().sum::<u64>(), 40, "{kind:?}");
            assert_eq!(
                first.blocks,
                prompts.iter().map(|prompt| prompt.len() as u64).sum::<u64>(),
                "{kind:?}"
            );
        }
    }
}

/// Requests that all run at once, and where they went.
fn spread(router: &mut dyn Policy, prompts: &[&[u32]], servers: usize) -> Vec<usize> {
    let engines: Vec<_> =
        (0..servers).map(|_| engine::Engine::new(setting(1, 100, None).model, 2_000)).collect();
    let mut verdicts = Vec::new();
    for (id, prompt) in prompts.iter().enumerate() {
        let request = trace(&[(0, prompt, 1)]).requests.remove(0);
        router.arrive(Arrival { now: id as u64, id, request: &request, engines: &engines }, &mut verdicts);
    }
    verdicts
        .iter()
        .map(|verdict| match verdict {
            Verdict::Place { server, .. } => *server,
            Verdict::Refuse { id } => panic!("{id} refused"),
        })
        .collect()
}

#[test]
fn power_of_two_takes_the_less_busy() {
    let prompts = vec![&[0u32][..]; 1000];
    let mut router = PowerOfTwo::new(2, 1000, 3);
    let on_first = spread(&mut router, &prompts, 2).iter().filter(|&&server| server == 0).count();
    // Chance alone would be off by 16 on average; two choices are off by one or two.
    assert!((495..=505).contains(&on_first), "{on_first}");
}

#[test]
fn cache_aware_drops_affinity_when_one_server_is_far_busier() {
    let mut router = CacheAware::new(Ties::LeastLoaded, 2, 200, 2_000);
    // One prompt for all: server 0 takes 65 (difference 64), then is over the threshold and they go to 1 in turn.
    let prompts = vec![&[0u32, 1][..]; 100];
    let went = spread(&mut router, &prompts, 2);
    assert!(went[..65].iter().all(|&server| server == 0), "{went:?}");
    assert_eq!(went[65], 1);
    // From then on both have seen it, and the less busy is preferred.
    assert!(went[66..].iter().all(|&server| server == 1), "{went:?}");
    let mut first = CacheAware::new(Ties::First, 2, 200, 2_000);
    let went = spread(&mut first, &prompts, 2);
    assert_eq!(
        (went[65], went[66], went[67]),
        (1, 0, 1),
        "back to the first as soon as the threshold allows"
    );
}

#[test]
fn cache_aware_wants_over_three_tenths() {
    let long: Vec<u32> = (0..10).collect();
    let mut other = long.clone();
    // Three of ten blocks shared: not more than 0.3. Four: more.
    other.iter_mut().skip(3).for_each(|block| *block += 100);
    let mut four = long.clone();
    four.iter_mut().skip(4).for_each(|block| *block += 200);
    let mut router = CacheAware::new(Ties::LeastLoaded, 2, 10, 2_000);
    assert_eq!(spread(&mut router, &[&long, &other, &[50], &four], 2)[..2], [0, 1]);
    let mut router = CacheAware::new(Ties::LeastLoaded, 2, 10, 2_000);
    assert_eq!(spread(&mut router, &[&long, &four], 2), [0, 0]);
}

#[test]
fn prefix_scoring_adds_three_scores() {
    // One server runs a prompt of 50 of its 100 blocks. A match of three in four outweighs the half less free cache.
    let requests =
        [(0, &(0..50).collect::<Vec<u32>>()[..], 500), (100, &[0, 1, 2, 60][..], 1), (200, &[70][..], 1)];
    let trace = trace(&requests);
    let outcome = play_one(&trace, &setting(2, 100, Some(4)), RouterKind::LlmD111);
    let (busy, idle) =
        (outcome.requests.iter().max().expect("two"), outcome.requests.iter().min().expect("two"));
    assert_eq!((*busy, *idle), (2, 1), "without a match, the empty one is preferred");
    assert_eq!(outcome.hit_blocks, 3);
}

#[test]
fn the_cost_function_forgets_after_two_minutes_and_weighs_prefill() {
    let outcome = |gap: u64| {
        play_one(&trace(&[(0, &[0, 1], 1), (gap, &[0, 1], 1)]), &setting(1, 100, None), RouterKind::Dynamo)
    };
    assert_eq!(outcome(119).predicted_blocks, 2);
    assert_eq!(outcome(121).predicted_blocks, 0);
    assert_eq!(outcome(121).hit_blocks, 2, "the engine still has it");
    // The holder: prefill 2 + 1 blocks, decode 2 + 3, together 8. The other: prefill 3, decode 3, together 6.
    let mut router = CostFunction::new(2, 10, 2_000, 1);
    let went = spread(&mut router, &[&[0, 1], &[0, 1, 2]], 2);
    assert_ne!(went[0], went[1]);
}

/// The numbers that these tests' figures are worked out for.
fn numbers() -> Numbers {
    Numbers { slack_abs: 16.0, slack_rel: 1.0, min_match: 2.0, ..Numbers::default() }
}

fn rule(numbers: Numbers, servers: usize) -> KvRule {
    KvRule::new(numbers, Miss::WeightedRoundRobin, servers, 10_000, 1_000, 2_000)
}

#[test]
fn distinct_prompts_are_spread_as_round_robin_does_and_hits_do_not_turn_the_wheel() {
    let prompts: Vec<[u32; 1]> = (0..9).map(|i| [i]).collect();
    let prompts: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
    assert_eq!(spread(&mut rule(numbers(), 3), &prompts, 3), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
    let long: Vec<u32> = (100..200).collect();
    let mixed: [&[u32]; 7] = [&long, &[0], &long, &long, &[1], &long, &[2]];
    assert_eq!(spread(&mut rule(numbers(), 3), &mixed, 3), [0, 1, 0, 0, 2, 0, 0]);
}

#[test]
fn affinity_ends_where_the_window_does() {
    // 800 of the router's blocks: worth any price within the window, which ends at 16 above the idle server.
    let long: Vec<u32> = (0..100).collect();
    let numbers = Numbers { share_free_requests: 100.0, ..numbers() };
    let went = spread(&mut rule(numbers, 2), &[&long[..]; 20], 2);
    assert_eq!(went[..17], [0; 17]);
    // One miss, to the next in turn; then both hold it, and the less busy is preferred.
    assert_eq!(went[17..], [1, 1, 1]);
}

#[test]
fn a_short_head_does_not_draw_everything_to_its_first_holder() {
    // All prompts share block 0 and nothing else: eight of the router's blocks, of 16 per prompt. The window's far end, 16 requests
    // above, costs two prompts: two blocks per request.
    let prompts: Vec<[u32; 2]> = (1..=40).map(|i| [0, i]).collect();
    let prompts: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
    let dear = Numbers { load_price: 2.0, share_price: 0.0, ..numbers() };
    let went = spread(&mut rule(dear, 4), &prompts, 4);
    assert_eq!(went[..5], [0, 0, 0, 0, 1], "three above the idle ones cost 6, four cost 8");
    let on = |server| went.iter().filter(|&&on| on == server).count();
    assert_eq!([on(0), on(1), on(2), on(3)], [10; 4], "{went:?}");
    // Without a price, it holds on until the window ends.
    let free = Numbers { load_price: 0.0, share_price: 0.0, ..numbers() };
    let went = spread(&mut rule(free, 4), &prompts, 4);
    assert!(went[..17].iter().all(|&server| server == 0), "{went:?}");
}

#[test]
fn a_server_far_above_its_share_of_requests_loses_short_matches() {
    // Load is no reason here; all share 32 of their 40 blocks, and none goes on where another ended. After 9 requests the server
    // is 4.5 above the fair 4.5, of which 4.045 are free: 20 × 40 × 0.455 ÷ 4.5 is more than 32 blocks; one less costs nothing.
    let even = Numbers { load_price: 0.0, slack_abs: 1000.0, share_prior: 0.0, ..numbers() };
    let prompts: Vec<[u32; 5]> = (4..44).map(|own| [0, 1, 2, 3, own]).collect();
    let prompts: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
    let went = spread(&mut rule(even, 2), &prompts, 2);
    assert_eq!(went[..9], [0; 9]);
    // Then one goes to the other server; both hold the head, and it catches up.
    assert_eq!(went[9..18], [1; 9], "{went:?}");
    let careless = Numbers { share_price: 0.0, ..even };
    assert_eq!(spread(&mut rule(careless, 2), &prompts, 2), [0; 40]);
    // What is all but alike pays little: for eight blocks to be computed, three times as many at most, as if nothing ran there.
    let immune = Numbers { immunity: 3.0, busy_price: 0.0, ..even };
    assert_eq!(spread(&mut rule(immune, 2), &prompts, 2), [0; 40]);
}

#[test]
fn what_goes_on_where_a_prompt_ended_pays_for_its_new_part_and_no_more_than_the_load_says() {
    // As above, but each prompt is the one before and 40 blocks more. Of n prompts, all on the first server, the next has n ÷ (n + 1) of
    // its blocks there. After 20: 10 above the fair 10, 4.1 of them free. 20 × mean prompt × 5.9 ÷ 26 is 4.5 mean prompts, of which it pays
    // a 21st. To pay the whole would be too much.
    let even = Numbers { load_price: 0.0, work_price: 0.0, slack_abs: 1000.0, ..numbers() };
    let prompts: Vec<Vec<u32>> = (1..=40).map(|n| (0..5 * n).collect()).collect();
    let prompts: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
    assert_eq!(spread(&mut rule(even, 2), &prompts, 2), [0; 40]);
    // The same text behind a tail of their own is a head: the tail makes sure that nothing ends where another did.
    let heads: Vec<Vec<u32>> = (1..=40).map(|n| (0..5 * n).chain([1_000 + n]).collect()).collect();
    let heads: Vec<&[u32]> = heads.iter().map(|prompt| &prompt[..]).collect();
    assert!(spread(&mut rule(even, 2), &heads, 2).contains(&1));
    // One prompt forty times pays nothing, with nothing left to compute. What goes on there with nineteen times as much pays nearly all: more
    // than its 32 blocks, unless a cap of a hundredth of a mean prompt for each of 20 requests in flight spares it.
    let (short, long): (Vec<u32>, Vec<u32>) = ((0..4).collect(), (0..80).collect());
    let prompts: Vec<&[u32]> = std::iter::repeat_n(&short[..], 40).chain([&long[..]]).collect();
    for (busy_price, last) in [(numbers().busy_price, 1), (0.01, 0)] {
        let went = spread(&mut rule(Numbers { busy_price, ..even }, 2), &prompts, 2);
        assert_eq!(went[..40], [0; 40]);
        assert_eq!(went[40], last, "{busy_price}");
    }
}

#[test]
fn an_idle_pool_keeps_its_one_conversation_where_it_is() {
    let prompts: Vec<Vec<u32>> = (4..60).map(|len| (0..len).collect()).collect();
    let requests: Vec<(u64, &[u32], u64)> =
        prompts.iter().zip(0..).map(|(prompt, i)| (i * 1_000, &prompt[..], 1)).collect();
    let trace = trace(&requests);
    for kind in [RouterKind::KvAware, RouterKind::KvRule] {
        let outcome = play_one(&trace, &setting(2, 100, None), kind);
        assert_eq!(outcome.requests, [56, 0], "{kind:?}");
        assert_eq!(outcome.blocks - outcome.hit_blocks, 59, "each block computed once: {kind:?}");
    }
}

#[test]
fn what_all_hold_goes_where_fewest_tokens_wait() {
    // So dear that the second prompt goes elsewhere: then both hold block 0. The long prompt goes to the first of equals;
    // the others, to the one where less waits, though it has more requests.
    let dear = Numbers { load_price: 1000.0, ..numbers() };
    let long: Vec<u32> = std::iter::once(0).chain(100..200).collect();
    let went = spread(&mut rule(dear, 2), &[&[0, 1], &[0, 2], &long, &[0, 3], &[0, 4], &[0, 5]], 2);
    assert_eq!(went, [0, 1, 0, 1, 1, 1]);
}

#[test]
fn predictions_are_of_the_router_and_hits_of_the_engine() {
    // The router remembers twice what the engine holds: two blocks, of which the second prompt turned out the first's.
    let trace = trace(&[(0, &[0, 1], 1), (10, &[5, 6], 1), (20, &[0, 1], 1)]);
    let wide = Numbers { memory: 2.0, ..numbers() };
    let setting = setting(1, 2, None);
    let outcome = simulate(&trace, &setting, RouterKind::KvAware.router(&trace, &setting, wide).as_mut());
    assert_eq!((outcome.predicted_blocks, outcome.hit_blocks), (2, 0));
    let same = play_one(&trace, &setting, RouterKind::KvAware);
    assert_eq!((same.predicted_blocks, same.hit_blocks), (0, 0));
}

/// 60 beginnings of ten blocks, each with a new end, in turn and again, on one engine that holds 36 such prompts: LRU finds nothing.
fn one_too_many() -> (Trace, Setting) {
    let prompts: Vec<Vec<u32>> =
        (0..1_200).map(|i| (0..10).map(|b| i % 60 * 10 + b).chain([600 + i]).collect()).collect();
    let requests: Vec<(u64, &[u32], u64)> =
        prompts.iter().zip(0..).map(|(prompt, i)| (i * 1_000, &prompt[..], 1)).collect();
    (trace(&requests), setting(1, 400, None))
}

#[test]
fn what_engines_report_narrows_a_memory_that_is_too_wide() {
    let (trace, setting) = one_too_many();
    let wide = Numbers { memory: 4.0, ..numbers() };
    let predicted = |kind: RouterKind, numbers| {
        let outcome = simulate(&trace, &setting, kind.router(&trace, &setting, numbers).as_mut());
        assert_eq!(outcome.hit_blocks, 0, "{kind:?}");
        outcome.predicted_blocks
    };
    // Told nothing, all but the first round is believed to be there, for ever.
    assert_eq!(predicted(RouterKind::KvAware, wide), 11_400);
    assert_eq!(predicted(RouterKind::KvRule, wide), 11_400);
    // A step of a 128th per report: from 1,600 blocks to 660, those of one round, in 113 of them, two rounds; then on until a few
    // of the router's blocks at most are believed of a prompt.
    let told = predicted(RouterKind::KvAwareReports, wide);
    assert!((1_130..2_400).contains(&told), "{told}");
    // Exactly as large as the cache: nothing is believed, nothing to learn.
    assert_eq!(predicted(RouterKind::KvAwareReports, numbers()), 0);
    // What was computed was dropped, so it is not believed the next time, but the time after that.
    assert_eq!(predicted(RouterKind::KvRuleDropsTails, wide), 6_000);
}

#[test]
fn reports_that_differ_by_little_are_not_heeded() {
    // 20 blocks believed, 19 there: within an eighth. 16 there: not.
    let long: Vec<u32> = (0..20).collect();
    for (engine_holds, kept) in [(19, true), (16, false)] {
        let trace = trace(&[(0, &long, 1), (100, &long, 1), (200, &long, 1)]);
        let setting = setting(1, engine_holds, None);
        let wide = Numbers { memory: 2.0, ..numbers() };
        let mut router = RouterKind::KvRuleDropsTails.router(&trace, &setting, wide);
        let outcome = simulate(&trace, &setting, router.as_mut());
        assert_eq!(outcome.hit_blocks, 2 * engine_holds as u64);
        let third = if kept { 20 } else { engine_holds as u64 };
        assert_eq!(outcome.predicted_blocks, 20 + third);
    }
}

/// Two engines, nine distinct prompts, caches for five of them, one request at a time.
fn nine_prompts(blocks: u32, rounds: u64, order: impl Fn(u64, u64) -> u64) -> (Trace, Setting) {
    let prompts: Vec<Vec<u32>> = (0..9).map(|p| (p * blocks..(p + 1) * blocks).collect()).collect();
    let times = (0..rounds).flat_map(|round| (0..9).map(move |i| (round, i)));
    let requests: Vec<(u64, &[u32], u64)> = times
        .map(|(round, i)| ((round * 9 + i) * 1_000, &prompts[order(round, i) as usize][..], 1))
        .collect();
    (trace(&requests), setting(2, 5 * blocks as usize, None))
}

#[test]
fn nine_prompts_on_two_engines_of_five_are_reused() {
    // The first round computes all nine. Of five rounds, four can be reused: 80 %. Nine prompts on two engines are five and four at
    // best: 25 and 20 of 45.
    for blocks in [2, 20, 200] {
        for shuffled in [false, true] {
            let order = |round: u64, i: u64| {
                if shuffled { (i * [1, 2, 4, 5, 7][round as usize % 5] + round) % 9 } else { i }
            };
            let (trace, setting) = nine_prompts(blocks, 5, order);
            for kind in [RouterKind::KvAware, RouterKind::KvRule] {
                let outcome = play_one(&trace, &setting, kind);
                assert!(outcome.hit_rate() >= 0.78, "{kind:?}, {blocks} blocks: {}", outcome.hit_rate());
                assert!(outcome.requests.iter().max() <= Some(&25), "{kind:?}: {:?}", outcome.requests);
            }
            let blind = play_one(&trace, &setting, RouterKind::WeightedRoundRobin);
            assert!(blind.hit_rate() < 0.5, "{}", blind.hit_rate());
        }
    }
}

#[test]
fn the_dispatcher_decides_as_the_rule_says() {
    // Conversations that grow, restart and share heads, on engines that queue; whole blocks, so that both count alike.
    // Which of the rule's finer points decided something.
    let mut mattered = [false; 5];
    for seed in 0..8 {
        let mut rng = rng::Rng::new(seed);
        let mut next_block = 40;
        let mut conversations: Vec<Vec<u32>> = (0..30).map(|i| vec![i % 3]).collect();
        let prompts: Vec<(u64, Vec<u32>, u64)> = (0..1_500)
            .map(|i| {
                // In half of the runs, one conversation is most of the traffic.
                let hot = seed >= 4 && rng.below(4) > 0;
                let conversation = &mut conversations[if hot { 0 } else { rng.below(30) as usize }];
                if conversation.len() > 40 || rng.below(12) == 0 {
                    conversation.truncate(1);
                }
                for _ in 0..=rng.below(6) {
                    conversation.push(next_block);
                    next_block += 1;
                }
                (i * [1, 4, 16, 60][seed as usize % 4], conversation.clone(), rng.below(30))
            })
            .collect();
        let requests: Vec<(u64, &[u32], u64)> =
            prompts.iter().map(|(at, blocks, tokens)| (*at, &blocks[..], *tokens)).collect();
        let trace = trace(&requests);
        let mut setting = setting(4, 150, (seed < 4).then_some(16));
        setting.model.prefill_tokens_per_s = 2_048.0;
        let [real, rule] =
            [RouterKind::KvAware, RouterKind::KvRule].map(|kind| play_one(&trace, &setting, kind));
        assert!(real.hit_rate() > 0.2, "seed {seed}: {}", real.hit_rate());
        assert!(real == rule, "seed {seed}: {:?} and {:?}", real.requests, rule.requests);
        let none = Numbers { work_price: 0.0, share_price: 0.0, ..Numbers::default() };
        let uncapped = Numbers { busy_price: 1e9, ..Numbers::default() };
        let immune = Numbers { immunity: 0.0, ..Numbers::default() };
        // The same where misses go to the least busy.
        let [real_least, rule_least] = [RouterKind::KvAwareLeastBusy, RouterKind::KvRuleLeastBusy]
            .map(|kind| play_one(&trace, &setting, kind));
        assert!(
            real_least == rule_least,
            "seed {seed}: {:?} and {:?}",
            real_least.requests,
            rule_least.requests
        );
        let requests_alone = Numbers { request_tokens: 1e9, ..Numbers::default() };
        let others = [
            (RouterKind::KvRule, none, &real),
            (RouterKind::KvRule, uncapped, &real),
            (RouterKind::KvRule, immune, &real),
            (RouterKind::KvRule, Numbers::default(), &real_least),
            (RouterKind::KvRuleLeastBusy, requests_alone, &real_least),
        ];
        for ((kind, numbers, real), mattered) in others.into_iter().zip(&mut mattered) {
            let mut other = kind.router(&trace, &setting, numbers);
            *mattered |= simulate(&trace, &setting, other.as_mut()) != *real;
        }
    }
    assert_eq!(mattered, [true; 5], "prices, the caps on them, where misses go, and by what");
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    args: ReplayArgs,
}

/// Those who are played with these options, by their names there.
fn played(options: &[&str]) -> Result<Vec<RouterKind>, String> {
    let line = ["replay", "--trace", "t"].iter().chain(options);
    routers(&<Line as clap::Parser>::parse_from(line).args)
}

#[test]
fn numbers_are_for_routers_that_heed_them() {
    let all = played(&[]).expect("all");
    assert!(all.contains(&RouterKind::KvAware) && !all.contains(&RouterKind::KvRule));
    assert_eq!(played(&["--sweep", "load_price=1"]), Ok(vec![RouterKind::KvRule]));
    let two = ["--routers", "kv-aware,kv-rule"];
    assert_eq!(
        played(&[&two[..], &["--sweep", "memory=1,2"]].concat()),
        Ok(vec![RouterKind::KvAware, RouterKind::KvRule])
    );
    assert!(played(&[&two[..], &["--set", "load_price=1"]].concat()).is_ok(), "one of them does");
    for (options, wanted) in [
        (
            &["--routers", "kv-rule,kv-aware", "--sweep", "load_price=1"],
            "--sweep load_price=1: kv-aware does not heed load_price",
        ),
        (
            &["--routers", "kv-aware,oracle", "--set", "load_price=1"],
            "--set load_price=1: no router played heeds load_price",
        ),
    ] {
        let fault = played(options).expect_err(wanted);
        assert!(fault.starts_with(wanted) && fault.contains("expected"), "{fault}");
    }
}

#[test]
fn sweeps_are_every_combination() {
    let sweeps = ["slack_abs=2,4".to_owned(), "min_match=1, 8".to_owned()];
    let variants = variants(&sweeps, Numbers::default()).expect("sound");
    let names: Vec<&str> = variants.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "slack_abs 2, min_match 1",
            "slack_abs 2, min_match 8",
            "slack_abs 4, min_match 1",
            "slack_abs 4, min_match 8"
        ]
    );
    assert_eq!((variants[3].1.slack_abs, variants[3].1.min_match), (4.0, 8.0));
    for (bad, wanted) in [
        ("slack", "expected NAME=VALUE"),
        ("slack=1", "expected slack_abs, slack_rel"),
        ("slack_abs=x", "`x`: expected a number"),
        ("slack_abs=-1", "expected a number of at least 0"),
        ("slack_abs=NaN", "expected a number of at least 0"),
    ] {
        let fault = super::variants(&[bad.to_owned()], Numbers::default()).expect_err(bad);
        assert!(fault.starts_with(&format!("--sweep {bad}: ")) && fault.contains(wanted), "{fault}");
    }
}
