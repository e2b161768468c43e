use super::super::walk::{nested, string_end};
use super::*;

/// Bytes of a small set drawn from a seed, so that quotes, escapes and brackets meet often.
fn noise(seed: u64, set: &[u8], len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            set[(state >> 33) as usize % set.len()]
        })
        .collect()
}

fn detected() -> Level {
    let level = Level::detect();
    #[cfg(target_arch = "x86_64")]
    assert_eq!(level != Level::Plain, is_x86_feature_detected!("avx2"), "AVX2 without the other features?");
    level
}

#[test]
fn string_ends_agree() {
    let level = detected();
    for seed in 0..400 {
        let set: &[u8] = match seed % 4 {
            0 => b"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\\\"",
            1 => b"\\\\\\\\\"",
            2 => b"a\\",
            _ => b"abcdefgh\\\\\\\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        };
        let bytes = noise(seed, set, 300);
        for start in 0..=bytes.len() {
            assert_eq!(
                string_end(level, &bytes, start),
                string_end(Level::Plain, &bytes, start),
                "{seed} {start}"
            );
        }
    }
    assert_eq!(string_end(level, b"", 0), None);
    assert_eq!(string_end(level, b"", 1), None);
}

#[test]
fn marked_quotes_agree() {
    let level = detected();
    let keys: [&[u8]; 3] = [b"\"usage\"", b"\"timings\"", b"\"meta_info\""];
    let marks = Marks::of(&keys);
    let mut found = 0;
    for seed in 0..600 {
        let set: &[u8] = match seed % 4 {
            0 => b"\"utmgi",
            1 => b"\"uu\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            2 => b"\"\"\"\"ummmtttggi",
            _ => b"\"\"\"\"\xf5\xf2\x75\xf4\xf7\x15\x12\xff\x00",
        };
        let mut bytes = noise(seed, set, 300);
        let key = keys[seed as usize % 3];
        bytes[100..][..key.len()].copy_from_slice(key);
        for end in [0, 1, 6, 7, 8, 37, 38, 39, 69, 70, 71, 107, 133, 134, 135, 166, 200, 262, 300] {
            for at in [0, 1, 7, 99, 100, 101, end] {
                let bytes = &bytes[..end];
                let (fast, plain) =
                    (marked_quote(level, bytes, at, &marks), marked_quote(Level::Plain, bytes, at, &marks));
                let half = |byte: u8, of: u8| byte < 0x80 && byte & 15 == of & 15;
                let naive = (at..end.saturating_sub(6)).find(|i| {
                    let fits = |key: &&[u8]| half(bytes[i + 1], key[1]) && half(bytes[i + 6], key[6]);
                    bytes[*i] == b'"' && keys.iter().any(fits)
                });
                assert_eq!((fast, plain), (naive, naive), "{seed} {end} {at}");
                assert!(at > 100 || end < 107 || naive.is_some_and(|i| i <= 100), "{seed} {end} {at}");
                found += usize::from(naive.is_some());
            }
        }
    }
    assert!(found > 1000, "{found}");
}

#[test]
fn nested_ends_agree() {
    let level = detected();
    let mut ended = 0;
    for seed in 0..2000 {
        let set: &[u8] = match seed % 5 {
            0 => b"[]{}\"\"a, \\",
            1 => b"[]aaaaaaaaaaaaaaaa\"\"\"\"aaaaa",
            2 => b"[{}]\"\"\\\\\x5b\x7b\x1a\x3b\x5d\x7d\x00\xdb\xfb\t\n\r 0",
            3 => b"[[[]]aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ",
            // Strings longer than a chunk, with escapes wherever one ends.
            _ => b"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\\\\\\aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"[]",
        };
        let bytes = [b"[", &noise(seed, set, 700)[..]].concat();
        for end in [1, 20, 63, 64, 65, 127, 128, 129, 201, 701] {
            let (fast, plain) =
                (nested::<true>(level, &bytes[..end], 0), nested::<true>(Level::Plain, &bytes[..end], 0));
            assert_eq!(nested::<false>(level, &bytes[..end], 0).end, plain.end, "{seed} {end}");
            assert_eq!(fast.end, plain.end, "{seed} {end}");
            if plain.end.is_some() {
                assert_eq!(fast.spaced, plain.spaced, "{seed} {end}");
                ended += 1;
            }
        }
    }
    assert!(ended > 1000, "{ended}");
}

#[test]
fn hashes_agree() {
    let level = detected();
    let keys = Keys::new(3);
    let plain_keys = Keys { level: Level::Plain, ..keys.clone() };
    assert_eq!(keys.level, level);
    let all: Vec<u8> = (0..=255).collect();
    for seed in 0..50 {
        let bytes = noise(seed, &all, 256 * 8);
        for len in (8..=256).step_by(8) {
            assert_eq!(
                nh(level, &keys.words, &bytes[..len]),
                nh(Level::Plain, &keys.words, &bytes[..len]),
                "{len}"
            );
        }
        for block_bytes in [64, 72, 96, 128, 200, 224, 256] {
            let whole = &bytes[..bytes.len() / block_bytes * block_bytes];
            let (mut fast, mut plain) = ([0; 32], [0; 32]);
            let last = identities(&keys, whole, block_bytes, seed, &mut fast);
            assert_eq!(last, identities(&plain_keys, whole, block_bytes, seed, &mut plain));
            assert_eq!((fast, fast[whole.len() / block_bytes - 1]), (plain, last));
        }
    }
}

#[test]
fn equal_bytes_are_marked() {
    for at in 0..16 {
        let mut chunk = *b"################";
        chunk[at] = b'"';
        assert_eq!(equal_16(&chunk, b'"'), 1 << at);
    }
    assert_eq!(equal_16(b"\xa2\xff\x00################".first_chunk().unwrap(), b'"'), 0);
}

#[test]
fn compacted_texts_agree() {
    let level = detected();
    let mut changed = 0;
    for seed in 0..2000 {
        let set: &[u8] = match seed % 4 {
            0 => b"{}\"\"a,  \t\n\r",
            1 => b"aaaaaaaaaaaaaaaaaaaaaaa aaaaaaaaaaaaaaaaaaaaaaaaaaa\"",
            2 => b"  \\\"\"\"\"\"\"a",
            _ => b"a\x00\x01\x09\x0b\x0c\x1f\xa0\x29 ",
        };
        let bytes = noise(seed, set, 400);
        for len in [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 161, 400] {
            let (mut fast, mut plain) = (b"before".to_vec(), b"before".to_vec());
            compact(level, &bytes[..len], &mut fast);
            compact(Level::Plain, &bytes[..len], &mut plain);
            assert_eq!(fast, plain, "{seed} {len}");
            changed += usize::from(plain.len() < len + 6);
        }
    }
    assert!(changed > 1000, "{changed}");
}
