use super::*;
use std::collections::BTreeMap;

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state ^ *state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// What [`Part`] promises of itself.
fn check(part: &Part, blocks: &BTreeMap<u64, (Set, u32)>) {
    let mut passed = vec![0; part.lines.len()];
    let mut found = BTreeMap::new();
    for (number, line) in part.lines.iter().enumerate() {
        for way in 0..WAYS {
            let (identity, holders) = (line.identities[way], line.holders[way]);
            assert_eq!(holders.is_empty(), identity == part.nobody, "a free place is nobody's");
            if holders.is_empty() {
                continue;
            }
            found.insert(identity, (holders, line.node(way)));
            let mut at = part.home(identity);
            while at != number {
                passed[at] += 1;
                at = part.next(at);
            }
        }
    }
    assert_eq!((&found, part.taken as usize), (blocks, blocks.len()));
    for (line, passed) in part.lines.iter().zip(passed) {
        assert_eq!(line.passed(), passed, "each line counts the blocks behind it");
        assert!(passed == 0 || line.free_way() == WAYS, "and has no free place then");
    }
}

/// Random blocks come and go, also where they crowd at few homes and around the end: what is there is found, what is not is not.
#[test]
fn parts_hold_what_was_put_in_them() {
    let mut state = 5;
    // Identities differ in so many of the bits that make the home.
    for (bits, most) in [(32, 300), (2, 60), (0, 40), (6, 200)] {
        let mut part = Part::new(63);
        let mut blocks = BTreeMap::new();
        for round in 0..6000_u32 {
            let home = match bits {
                0 => u64::from(u32::MAX),
                bits => (random(&mut state) >> 32) >> (32 - bits) << (32 - bits),
            };
            let identity = 63 << 58 | home << 26 | random(&mut state) >> 60;
            let grow = blocks.len() < most && !random(&mut state).is_multiple_of(2);
            match (part.find(identity), grow) {
                (None, true) => {
                    assert!(!blocks.contains_key(&identity));
                    let holders = Set::single((round % 40) as u16);
                    if round % 3 == 0 {
                        part.insert(identity, holders, round);
                    } else {
                        assert!(part.insert_new(identity, holders, round));
                    }
                    blocks.insert(identity, (holders, round));
                }
                (Some(_), true) => assert!(!part.insert_new(identity, Set::single(0), 0)),
                (found, false) => {
                    assert_eq!(found.is_some(), blocks.contains_key(&identity));
                    let gone = blocks.range(identity..).next().or_else(|| blocks.iter().next());
                    let Some((gone, (holders, node))) = gone.map(|(gone, held)| (*gone, *held)) else {
                        continue;
                    };
                    assert_eq!(part.holders(gone), holders);
                    let place = part.find(gone).expect("it was put in");
                    assert_eq!(part.lines[place.line].node(place.way), node);
                    part.remove(gone, place);
                    blocks.remove(&gone);
                }
            }
            if round % 8 == 0 {
                check(&part, &blocks);
            }
            if round % 1000 == 999 {
                part.resize(blocks.len());
                check(&part, &blocks);
            }
        }
    }
}

/// More blocks of one home than a line can count: the part grows until it has room for them, and forgets none.
#[test]
fn a_line_that_is_passed_too_often_makes_the_part_grow() {
    let mut part = Part::new(0);
    let crowd = u64::from(PASSED_MAX) + WAYS as u64;
    let identity = |i: u64| i << 40;
    for i in 0..crowd + 60 {
        part.insert(identity(i), Set::single(1), i as u32);
    }
    assert!(part.lines.iter().all(|line| line.passed() <= PASSED_MAX));
    for i in 0..crowd + 60 {
        let Place { line, way } = part.find(identity(i)).expect("it was put in");
        assert_eq!(part.lines[line].node(way), i as u32);
    }
}
