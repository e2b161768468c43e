use super::*;

const BLOCK: usize = 16;

fn engine(slots: usize, queue_max: usize, kv_blocks: usize) -> Scheduler {
    // A token of prompt takes 1 ms, a token of answer 10 ms.
    Scheduler::new(Rates { prefill_tps: 1000.0, decode_tps: 100.0, slots, queue_max }, BLOCK, kv_blocks)
}

fn prompt(name: u32, tokens: usize) -> Vec<Token> {
    (0..tokens as u32).map(|index| name * 100_000 + index).collect()
}

fn work(name: u32, tokens: usize, output_max: u32) -> Work {
    Work::generate(&prompt(name, tokens), 0, output_max, BLOCK)
}

fn step(scheduler: &mut Scheduler, ms: u64) -> Vec<Started> {
    let mut started = Vec::new();
    scheduler.step(Nanos::from_ms(ms), &mut started);
    started
}

fn submit(scheduler: &mut Scheduler, ms: u64, work: Work) -> Ticket {
    scheduler.submit(Nanos::from_ms(ms), work).expect("taken")
}

#[test]
fn prefill_is_one_prompt_at_a_time_in_order_of_admission() {
    let mut scheduler = engine(8, 8, 1000);
    let a = submit(&mut scheduler, 0, work(1, 100, 10));
    let b = submit(&mut scheduler, 5, work(2, 50, 10));
    assert_eq!(
        step(&mut scheduler, 5),
        [Started { ticket: a, cached_tokens: 0, first_token_at: Nanos::from_ms(100) }]
    );
    assert_eq!(step(&mut scheduler, 99), []);
    // The call is late; b's times are those of a punctual one.
    assert_eq!(
        step(&mut scheduler, 104),
        [Started { ticket: b, cached_tokens: 0, first_token_at: Nanos::from_ms(150) }]
    );
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 0));
}

#[test]
fn several_prefills_may_end_within_one_late_step() {
    let mut scheduler = engine(8, 8, 1000);
    for name in 1..=3 {
        submit(&mut scheduler, 0, work(name, 10, 1));
    }
    let at: Vec<u64> =
        step(&mut scheduler, 25).iter().map(|started| started.first_token_at.0 / 1_000_000).collect();
    assert_eq!(at, [10, 20, 30]);
}

#[test]
fn slots_bound_what_runs_and_the_longest_waiter_is_next() {
    let mut scheduler = engine(2, 3, 1000);
    let tickets: Vec<Ticket> = (0..5).map(|name| submit(&mut scheduler, 0, work(name, 10, 5))).collect();
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 3));
    assert_eq!(scheduler.submit(Nanos::ZERO, work(9, 10, 5)), Err(Refusal::QueueFull));
    assert_eq!(step(&mut scheduler, 20).len(), 2);
    // A waiter that gives up frees its place in the queue, not a slot.
    scheduler.end(Nanos::from_ms(21), tickets[2]);
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 2));
    scheduler.end(Nanos::from_ms(60), tickets[0]);
    let started = step(&mut scheduler, 60);
    assert_eq!(
        started,
        [Started { ticket: tickets[3], cached_tokens: 0, first_token_at: Nanos::from_ms(70) }]
    );
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 1));
}

#[test]
fn a_repeated_prompt_is_cached_but_for_its_last_block() {
    let mut scheduler = engine(4, 4, 1000);
    let mut ms = 0;
    for (tokens, cached) in [(64, 48), (65, 64), (63, 48), (15, 0), (16, 0), (17, 16)] {
        let name = tokens as u32;
        let first = submit(&mut scheduler, ms, work(name, tokens, 1));
        assert_eq!(step(&mut scheduler, ms)[0].cached_tokens, 0);
        ms += 1000;
        step(&mut scheduler, ms);
        scheduler.end(Nanos::from_ms(ms), first);
        let second = submit(&mut scheduler, ms, work(name, tokens, 1));
        let started = step(&mut scheduler, ms);
        assert_eq!(started[0].cached_tokens, cached, "{tokens} tokens");
        let rest_ms = (tokens - cached) as u64;
        assert_eq!(started[0].first_token_at, Nanos::from_ms(ms + rest_ms), "only the rest is computed");
        ms += 1000;
        step(&mut scheduler, ms);
        scheduler.end(Nanos::from_ms(ms), second);
    }
    assert_eq!(scheduler.cache().pinned(), 0);
}

#[test]
fn an_answer_is_found_by_the_next_turn() {
    let mut scheduler = engine(4, 4, 1000);
    let mut history = prompt(1, 40);
    let ticket = submit(&mut scheduler, 0, Work::generate(&history, 0, 24, BLOCK));
    step(&mut scheduler, 1000);
    let answer = prompt(2, 24);
    answer.iter().for_each(|token| scheduler.record(ticket, &[*token]));
    scheduler.end(Nanos::from_ms(1000), ticket);
    history.extend(answer);
    history.extend(prompt(3, 5));
    submit(&mut scheduler, 2000, Work::generate(&history, 0, 1, BLOCK));
    assert_eq!(step(&mut scheduler, 2000)[0].cached_tokens, 64);
}

#[test]
fn another_salt_shares_nothing() {
    let mut scheduler = engine(4, 4, 1000);
    for (salt, cached) in [(1, 0), (2, 0), (1, 96)] {
        let ticket = submit(&mut scheduler, 0, Work::generate(&prompt(1, 100), salt, 1, BLOCK));
        assert_eq!(step(&mut scheduler, 0)[0].cached_tokens, cached);
        step(&mut scheduler, 1000);
        scheduler.end(Nanos::from_ms(1000), ticket);
    }
}

#[test]
fn giving_up_during_prefill_keeps_what_was_computed_and_starts_the_next_at_once() {
    let mut scheduler = engine(4, 4, 1000);
    let a = submit(&mut scheduler, 0, work(1, 100, 1));
    let b = submit(&mut scheduler, 0, work(1, 100, 1));
    step(&mut scheduler, 0);
    scheduler.end(Nanos::from_ms(40), a);
    // 40 of 100 tokens were computed: two full blocks.
    let started = step(&mut scheduler, 40);
    assert_eq!(started, [Started { ticket: b, cached_tokens: 32, first_token_at: Nanos::from_ms(40 + 68) }]);
}

#[test]
fn requests_wait_for_key_value_room_too() {
    let mut scheduler = engine(8, 8, 10);
    let a = submit(&mut scheduler, 0, work(1, 64, 32));
    let b = submit(&mut scheduler, 0, work(2, 64, 32));
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 1), "six blocks each, ten in all");
    assert_eq!(scheduler.submit(Nanos::ZERO, work(3, 100, 61)), Err(Refusal::TooLong { kv_tokens_max: 160 }));
    step(&mut scheduler, 100);
    scheduler.record(a, &prompt(7, 32));
    assert_eq!(scheduler.cache().pinned(), 6);
    scheduler.end(Nanos::from_ms(100), a);
    assert_eq!(step(&mut scheduler, 100)[0].ticket, b);
}

#[test]
fn ending_twice_frees_once() {
    let mut scheduler = engine(2, 0, 100);
    let a = submit(&mut scheduler, 0, work(1, 10, 1));
    let _b = submit(&mut scheduler, 0, work(2, 10, 1));
    scheduler.end(Nanos::ZERO, a);
    scheduler.end(Nanos::ZERO, a);
    assert_eq!(scheduler.running(), 1);
}

#[test]
fn pooled_work_takes_time_and_leaves_nothing_to_find() {
    let mut scheduler = engine(2, 2, 10);
    let ticket = submit(&mut scheduler, 0, Work::pooled(400, 100));
    assert_eq!(step(&mut scheduler, 0)[0].first_token_at, Nanos::from_ms(400));
    step(&mut scheduler, 400);
    scheduler.end(Nanos::from_ms(400), ticket);
    assert_eq!((scheduler.cache().findable(), scheduler.cache().pinned()), (0, 0));
}

#[test]
fn no_rate_means_no_time() {
    let mut scheduler =
        Scheduler::new(Rates { prefill_tps: 0.0, decode_tps: 0.0, slots: 1, queue_max: 0 }, BLOCK, 100);
    submit(&mut scheduler, 3, work(1, 1000, 10));
    assert_eq!(step(&mut scheduler, 3)[0].first_token_at, Nanos::from_ms(3));
    assert_eq!(scheduler.rates().tokens_by(Nanos::from_ms(3), Nanos::from_ms(3)), u32::MAX);
}

#[test]
fn token_times_and_counts_agree() {
    for decode_tps in [1.0, 3.0, 33.3, 70.0, 999.0] {
        let rates = Rates { prefill_tps: 0.0, decode_tps, slots: 1, queue_max: 0 };
        let first = Nanos(123_456_789);
        for index in 0..2000 {
            let at = rates.token_at(first, index);
            assert_eq!(rates.tokens_by(first, at), index + 1, "{decode_tps} {index}");
            assert_eq!(rates.tokens_by(first, Nanos(at.0 - 1)), index, "{decode_tps} {index}");
        }
    }
}

/// Requests of random size and length come, run and give up at random; whatever happens, places are within bounds and
/// all come back.
#[test]
fn places_are_bounded_and_come_back_whatever_happens() {
    use crate::engine::text::mix;
    for seed in 0..200 {
        let mut scheduler = engine(3, 4, 40);
        let mut live: Vec<Ticket> = Vec::new();
        let mut ms = 0;
        for turn in 0..300 {
            let dice = mix(seed, turn);
            ms += dice % 7;
            let now = Nanos::from_ms(ms);
            if dice >> 8 & 1 == 0 {
                let tokens = 1 + (dice >> 16) as usize % 150;
                if let Ok(ticket) =
                    scheduler.submit(now, work((dice >> 32) as u32 % 4, tokens, (dice >> 40) as u32 % 40))
                {
                    live.push(ticket);
                }
            } else if !live.is_empty() {
                let ticket = live.swap_remove((dice >> 16) as usize % live.len());
                scheduler.end(now, ticket);
            }
            step(&mut scheduler, ms);
            assert!(scheduler.running() <= 3 && scheduler.waiting() <= 4, "seed {seed}");
            assert_eq!(scheduler.running() + scheduler.waiting(), live.len(), "seed {seed}");
            assert!(scheduler.blocks_set_aside <= 40, "seed {seed}");
            assert!(scheduler.cache().pinned() <= scheduler.blocks_set_aside, "seed {seed}");
        }
        live.drain(..).for_each(|ticket| scheduler.end(Nanos::from_ms(ms), ticket));
        assert_eq!((scheduler.running(), scheduler.blocks_set_aside, scheduler.cache().pinned()), (0, 0, 0));
    }
}
