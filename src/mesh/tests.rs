use super::*;
use crate::proto::ids::BackendId;
use std::io::Read;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;

fn count(n: u32) -> Message {
    Message::Connections { count: n }
}

/// Reads the eventfd's counter; `None`: nothing was written.
fn written(fd: RawFd) -> Option<u64> {
    // SAFETY: the port that owns the descriptor outlives this borrow, and ManuallyDrop leaves it open.
    let mut file = ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(fd) });
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes).ok().map(|()| u64::from_ne_bytes(bytes))
}

#[test]
fn every_pair_has_its_own_ring() {
    let (mut ports, _control) = build(3).unwrap();
    for from in 0..3_u8 {
        for to in 0..3_u8 {
            if from != to {
                ports[from as usize].send(ShardId(to), count(u32::from(from) * 10 + u32::from(to))).unwrap();
            }
        }
    }
    for to in 0..3_u8 {
        let mut got = Vec::new();
        assert!(ports[to as usize].has_input());
        assert_eq!(ports[to as usize].poll(|from, message| got.push((from, message))), 2);
        let others = (0..3_u8).filter(|from| *from != to);
        let wanted: Vec<_> =
            others.map(|from| (ShardId(from), count(u32::from(from) * 10 + u32::from(to)))).collect();
        assert_eq!(got, wanted);
        assert!(!ports[to as usize].has_input());
    }
}

#[test]
fn kept_messages_stay_in_order_and_lazy_ones_do_not_overtake_them() {
    let (mut ports, _control) = build(2).unwrap();
    let slots = MESH_RING_SLOTS as u32;
    for n in 0..slots + 5 {
        ports[0].send_kept(ShardId(1), count(n), Urgency::Quiet);
    }
    assert_eq!(ports[0].send(ShardId(1), count(9999)), Err(count(9999)));
    assert!(!ports[0].retry());
    let mut got = Vec::new();
    ports[1].poll(|_, message| got.push(message));
    assert_eq!(got.len(), MESH_RING_SLOTS);
    ports[0].send(ShardId(1), count(slots + 5)).unwrap();
    assert!(ports[0].retry());
    ports[1].poll(|_, message| got.push(message));
    assert_eq!(got, (0..slots + 6).map(count).collect::<Vec<_>>());
}

#[test]
fn a_burst_to_a_sleeper_writes_once_and_to_a_waker_never() {
    let (mut ports, _control) = build(2).unwrap();
    ports[1].set_nonblocking(true).unwrap();
    let fd = ports[1].wake_fd();
    ports[1].arm();
    for n in 0..5 {
        ports[0].send_kept(ShardId(1), count(n), Urgency::Wake);
    }
    assert_eq!(written(fd), Some(1));
    ports[0].send_kept(ShardId(1), count(5), Urgency::Wake);
    assert_eq!(written(fd), None, "not armed again yet");
    ports[1].arm();
    ports[0].send_kept(ShardId(1), count(6), Urgency::Quiet);
    assert_eq!(written(fd), None, "quiet messages wake nobody");
    ports[1].disarm();
    ports[0].send_kept(ShardId(1), count(7), Urgency::Wake);
    assert_eq!(written(fd), None);
    assert_eq!(ports[1].poll(|_, _| ()), 8);
}

#[test]
fn control_and_shards_reach_each_other() {
    let (mut ports, mut control) = build(2).unwrap();
    control.set_nonblocking(true).unwrap();
    ports[1].set_nonblocking(true).unwrap();
    control.update(ShardId(1), Update::Ready(true));
    assert_eq!(written(ports[1].wake_fd()), Some(1));
    assert!(matches!(ports[1].poll_update(), Some(Update::Ready(true))));
    assert!(ports[1].poll_update().is_none() && ports[0].poll_update().is_none());

    let unbenched = || Notice::Unbenched { backend: BackendId(3) };
    let mut sent = 0;
    while ports[0].notify(unbenched()) {
        sent += 1;
    }
    assert_eq!(sent, CONTROL_RING_SLOTS, "then it is dropped");
    assert!(ports[0].notify(Notice::Drained { shard: ShardId(0) }), "this one is kept");
    assert_eq!(written(control.wake_fd()), Some(1), "one write for the burst");
    assert_eq!(control.poll(|_, _| ()), CONTROL_RING_SLOTS);
    assert!(ports[0].retry());
    let mut last = Vec::new();
    control.poll(|from, notice| last.push((from, notice)));
    assert!(matches!(last[..], [(ShardId(0), Notice::Drained { shard: ShardId(0) })]), "{last:?}");
}

#[test]
fn updates_beyond_the_ring_arrive_in_order() {
    let (mut ports, mut control) = build(1).unwrap();
    let all = CONTROL_RING_SLOTS as u64 + 10;
    for number in 0..all {
        control.update(ShardId(0), Update::Report { number });
    }
    let mut wanted = 0;
    loop {
        while let Some(Update::Report { number }) = ports[0].poll_update() {
            assert_eq!(number, wanted);
            wanted += 1;
        }
        if wanted == all {
            break;
        }
        control.retry();
    }
    assert!(control.retry());
}

/// Two threads that sleep whenever they have nothing to do: a lost wake-up hangs here.
#[test]
fn no_wake_up_is_lost_between_threads() {
    const TURNS: u32 = 20_000;
    let (ports, _control) = build(2).unwrap();
    let threads: Vec<_> = ports
        .into_iter()
        .map(|mut port| {
            std::thread::spawn(move || {
                let peer = ShardId(1 - port.me().0);
                let mut next = u32::from(port.me().0);
                if next == 0 {
                    port.send_kept(peer, count(0), Urgency::Wake);
                    next = 2;
                }
                // Each number is answered by the next one, up to TURNS.
                let mut seen = 0;
                while seen < TURNS / 2 {
                    let mut got = Vec::new();
                    port.poll(|_, message| got.push(message));
                    if got.is_empty() {
                        port.arm();
                        if !port.has_input() {
                            written(port.wake_fd()).expect("a blocking read gives the counter");
                        }
                    }
                    for message in got {
                        let Message::Connections { count: n } = message else { panic!("{message:?}") };
                        seen += 1;
                        if n + 1 < TURNS {
                            assert_eq!(n + 1, next);
                            next += 2;
                            port.send_kept(peer, count(n + 1), Urgency::Wake);
                        }
                    }
                }
                seen
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), TURNS / 2);
    }
}
