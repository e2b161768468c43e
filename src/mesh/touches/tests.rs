use super::super::{ShardPort, build};
use super::*;

fn touch(at: u64, backend: u16, blocks: &[u64]) -> Touch<'_> {
    Touch { kind: TouchKind::Recorded(ClientId(at ^ 7)), at: Nanos(at), backend: BackendId(backend), blocks }
}

/// Much later than everything here.
const LATER: Nanos = Nanos(u64::MAX);

/// What a shard takes of its peers; each was shown before.
fn taken(port: &mut ShardPort) -> Vec<(u8, u64, u16, Vec<u64>)> {
    let me = port.me();
    let (mut shown, mut got) = (0, Vec::new());
    port.poll_touches(LATER, |from, stage, touch| {
        assert_eq!(touch.kind, TouchKind::Recorded(ClientId(touch.at.0 ^ 7)));
        match stage {
            TouchStage::Arrived => shown += 1,
            TouchStage::Settled if from == me => {}
            TouchStage::Settled => got.push((from.0, touch.at.0, touch.backend.0, touch.blocks.to_vec())),
        }
    });
    assert_eq!(shown, got.len());
    got
}

#[test]
fn every_shard_takes_the_same_touches_in_the_order_of_time() {
    let (mut ports, _control) = build(3).unwrap();
    assert!(ports[0].touch(&touch(10, 1, &[1, 2, 3])));
    assert!(ports[0].touch(&touch(30, 65_534, &[])));
    assert!(ports[2].touch(&touch(10, 2, &[4])));
    assert!(ports[2].touch(&touch(20, 3, &[5, 6])));
    for port in &mut ports {
        let mut got = Vec::new();
        port.poll_touches(LATER, |from, stage, t| {
            if stage == TouchStage::Settled {
                got.push((from.0, t.at.0, t.backend.0, t.blocks.to_vec()));
            }
        });
        assert_eq!(
            got,
            [(0, 10, 1, vec![1, 2, 3]), (2, 10, 2, vec![4]), (2, 20, 3, vec![5, 6]), (0, 30, 65_534, vec![])]
        );
        assert_eq!(port.poll_touches(LATER, |_, _, _| panic!("all was taken")), 0);
    }
    let dropped = Touch { kind: TouchKind::Dropped(Nanos(5)), ..touch(1 << 60, 0, &[u64::MAX]) };
    assert!(ports[1].touch(&dropped));
    assert_eq!(ports[0].poll_touches(LATER, |_, _, touch| assert_eq!(*touch, dropped)), 1);
    assert_eq!(ports.iter().map(|port| port.touches().dropped).sum::<u64>(), 0);
}

/// A touch waits until no older one can come any more, and all behind it with it. Peers see it at once, and once.
#[test]
fn touches_are_shown_and_then_settle() {
    let (mut ports, _control) = build(2).unwrap();
    let settle = TOUCH_SETTLE_MS * 1_000_000;
    let take = |port: &mut ShardPort, now| {
        let (mut shown, mut got) = (Vec::new(), Vec::new());
        port.poll_touches(Nanos(now), |_, stage, touch| match stage {
            TouchStage::Arrived => shown.push(touch.at.0),
            TouchStage::Settled => got.push(touch.at.0),
        });
        (shown, got)
    };
    assert!(ports[0].touch(&touch(100, 0, &[1])));
    assert!(ports[1].touch(&touch(90, 0, &[2])));
    assert_eq!(take(&mut ports[0], 89 + settle), (vec![90], vec![]));
    assert_eq!(take(&mut ports[1], 89 + settle), (vec![100], vec![]));
    assert!(ports[1].touch(&touch(110, 0, &[2])));
    assert_eq!(take(&mut ports[0], 99 + settle), (vec![110], vec![90]));
    for (port, other) in [(0, vec![110]), (1, vec![90, 100])] {
        let port = &mut ports[port];
        assert_eq!(take(port, 100 + settle), (vec![], if other.len() == 1 { vec![100] } else { other }));
        assert_eq!(take(port, 110 + settle), (vec![], vec![110]));
    }
    // Unless there is more of it than rings are for.
    for _ in 0..ring_words(2) / 2 / 103 + 1 {
        assert!(ports[0].touch(&touch(200, 0, &[3; 100])));
    }
    assert!(take(&mut ports[1], 200).1.len() > 300);
}

#[test]
fn a_shard_that_is_alone_applies_its_touches_at_once() {
    let (mut ports, _control) = build(1).unwrap();
    assert!(!ports[0].touch(&touch(1, 0, &[1])));
    assert_eq!((ports[0].poll_touches(LATER, |_, _, _| ()), ports[0].touches().dropped), (0, 0));
}

#[test]
fn a_full_ring_costs_that_peer_the_touch_and_is_counted() {
    let (mut ports, _control) = build(3).unwrap();
    let blocks = vec![9; 1000];
    let fit = ring_words(3) / (HEAD_WORDS + blocks.len());
    for at in 0..fit as u64 + 3 {
        assert_eq!(
            ports[0].touch(&touch(at, 0, &blocks)),
            at < fit as u64,
            "the ring to itself is not emptied"
        );
        assert!(!taken(&mut ports[1]).is_empty(), "this one keeps up");
    }
    assert_eq!(ports[0].touches().dropped, 3);
    assert_eq!(taken(&mut ports[2]).len(), fit);
    assert!(!ports[0].touch(&touch(99, 0, &blocks)));
    assert_eq!(taken(&mut ports[2]), [(0, 99, 0, blocks)]);
}

#[test]
fn a_long_prompt_tells_its_head() {
    let (mut ports, _control) = build(2).unwrap();
    let blocks: Vec<u64> = (0..TOUCH_BLOCKS_MAX as u64 + 50).collect();
    for at in 0..40 {
        assert!(ports[0].touch(&touch(at, 0, &blocks)));
        ports[0].poll_touches(LATER, |_, _, _| ());
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
        assert!(ports[0].touch(&touch(at, 0, &blocks)));
    }
    assert_eq!(written(&ports[1]), None);
    for at in 0..5 {
        assert!(ports[0].touch(&touch(at, 0, &blocks)));
    }
    assert_eq!(written(&ports[1]), Some(1), "once");
    assert_eq!(taken(&mut ports[1]).len(), half + 5);
    ports[1].arm();
    assert!(ports[0].touch(&touch(9, 0, &blocks)));
    assert_eq!(written(&ports[1]), None, "there is room again");
}

#[test]
fn rings_share_a_budget() {
    assert_eq!((ring_words(1), ring_words(2), ring_words(8)), (65_536, 65_536, 65_536));
    assert_eq!(ring_words(16), (64 << 20) / 8 / 256);
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
            let _ = sender.touch(&touch(at, at as u16, &blocks));
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
        receiver.poll_touches(LATER, |_, stage, touch| {
            if stage == TouchStage::Arrived {
                return;
            }
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
