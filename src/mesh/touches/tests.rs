use super::super::{ShardPort, build};
use super::*;

fn touch(at: u64, backend: u16, blocks: &[u64]) -> Touch<'_> {
    Touch {
        kind: TouchKind::Recorded,
        at: Nanos(at),
        backend: BackendId(backend),
        client: ClientId(at ^ 7),
        blocks,
    }
}

fn taken(port: &mut ShardPort) -> Vec<(u8, u64, u16, Vec<u64>)> {
    let mut got = Vec::new();
    port.poll_touches(|from, touch| {
        assert_eq!(touch.client.0, touch.at.0 ^ 7);
        got.push((from.0, touch.at.0, touch.backend.0, touch.blocks.to_vec()));
    });
    got
}

#[test]
fn peers_hear_of_each_touch_in_the_order_of_time() {
    let (mut ports, _control) = build(3).unwrap();
    ports[0].touch(&touch(10, 1, &[1, 2, 3]));
    ports[0].touch(&touch(30, 65_534, &[]));
    ports[2].touch(&touch(10, 2, &[4]));
    ports[2].touch(&touch(20, 3, &[5, 6]));
    assert_eq!(
        taken(&mut ports[1]),
        [(0, 10, 1, vec![1, 2, 3]), (2, 10, 2, vec![4]), (2, 20, 3, vec![5, 6]), (0, 30, 65_534, vec![])]
    );
    assert_eq!(taken(&mut ports[1]), []);
    assert_eq!(taken(&mut ports[0]).len(), 2, "nobody hears of its own");
    ports[1].touch(&Touch { kind: TouchKind::Dropped, ..touch(u64::MAX, 0, &[u64::MAX]) });
    let mut kinds = Vec::new();
    assert_eq!(
        ports[0].poll_touches(|_, touch| kinds.push((touch.kind, touch.at, touch.blocks.to_vec()))),
        1
    );
    assert_eq!(kinds, [(TouchKind::Dropped, Nanos::NEVER, vec![u64::MAX])]);
    assert_eq!(ports.iter().map(|port| port.touches().dropped).sum::<u64>(), 0);
}

#[test]
fn a_full_ring_costs_that_peer_the_touch_and_is_counted() {
    let (mut ports, _control) = build(3).unwrap();
    let blocks = vec![9; 1000];
    let fit = ring_words(3) / (HEAD_WORDS + blocks.len());
    for at in 0..fit as u64 + 3 {
        ports[0].touch(&touch(at, 0, &blocks));
        assert!(!taken(&mut ports[1]).is_empty(), "this one keeps up");
    }
    assert_eq!(ports[0].touches().dropped, 3);
    assert_eq!(taken(&mut ports[2]).len(), fit);
    ports[0].touch(&touch(99, 0, &blocks));
    assert_eq!(taken(&mut ports[2]), [(0, 99, 0, blocks)]);
}

#[test]
fn a_long_prompt_tells_its_head() {
    let (mut ports, _control) = build(2).unwrap();
    let blocks: Vec<u64> = (0..TOUCH_BLOCKS_MAX as u64 + 50).collect();
    for at in 0..40 {
        ports[0].touch(&touch(at, 0, &blocks));
        assert_eq!(taken(&mut ports[1]), [(0, at, 0, blocks[..TOUCH_BLOCKS_MAX].to_vec())]);
    }
}

/// A sleeper looks at its rings every 100 ms only; half a ring is what it is woken for.
#[test]
fn a_sleeper_is_woken_when_its_ring_is_half_full() {
    let (mut ports, _control) = build(2).unwrap();
    ports[1].set_nonblocking(true).unwrap();
    let written = |port: &ShardPort| {
        let mut count = 0_u64;
        // SAFETY: eight writable bytes; the descriptor is the port's and does not block.
        let read = unsafe { libc::read(port.wake_fd(), (&raw mut count).cast(), 8) };
        (read == 8).then_some(count)
    };
    ports[1].arm();
    let blocks = [1; 97];
    let half = ring_words(2) / 2 / 100;
    for at in 0..half as u64 {
        ports[0].touch(&touch(at, 0, &blocks));
    }
    assert_eq!(written(&ports[1]), None);
    for at in 0..5 {
        ports[0].touch(&touch(at, 0, &blocks));
    }
    assert_eq!(written(&ports[1]), Some(1), "once");
    assert_eq!(taken(&mut ports[1]).len(), half + 5);
    ports[1].arm();
    ports[0].touch(&touch(9, 0, &blocks));
    assert_eq!(written(&ports[1]), None, "there is room again");
}

#[test]
fn rings_share_a_budget() {
    assert_eq!((ring_words(1), ring_words(2), ring_words(8)), (65_536, 65_536, 65_536));
    assert_eq!(ring_words(16), (64 << 20) / 8 / 240);
    assert_eq!((ring_words(64), ring_words(256)), (8192, 8192));
}

/// Touches of all lengths over a ring's end, between threads: each arrives whole, in order, or is counted as dropped.
#[test]
fn touches_arrive_whole_between_threads() {
    let (mut ports, _control) = build(2).unwrap();
    let mut receiver = ports.pop().unwrap();
    let mut sender = ports.pop().unwrap();
    let count = 30_000;
    let sending = std::thread::spawn(move || {
        let mut blocks = Vec::new();
        for at in 1..=count {
            blocks.clear();
            blocks.extend((0..at * 7919 % 300).map(|i| at << 16 | i));
            if at % 1000 == 0 {
                blocks.resize(TOUCH_BLOCKS_MAX, at);
            }
            sender.touch(&touch(at, at as u16, &blocks));
            if at % 64 == 0 {
                std::thread::yield_now();
            }
        }
        sender
    });
    let (mut last, mut arrived) = (0, 0);
    loop {
        // Asked before the poll, so that the last poll sees all.
        let ended = sending.is_finished();
        receiver.poll_touches(|_, touch| {
            let at = touch.at.0;
            assert!(at > last && touch.backend.0 == at as u16, "{at} after {last}");
            let length = (at * 7919 % 300) as usize;
            assert_eq!(touch.blocks.len(), if at % 1000 == 0 { TOUCH_BLOCKS_MAX } else { length });
            assert!(
                touch.blocks[..length].iter().enumerate().all(|(i, block)| *block == at << 16 | i as u64)
            );
            (last, arrived) = (at, arrived + 1);
        });
        if ended {
            break;
        }
    }
    let sender = sending.join().unwrap();
    assert!(arrived > 0);
    assert_eq!(arrived + sender.touches().dropped, count);
}
