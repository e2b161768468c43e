use std::io::Write;

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::*;

const BOUND: usize = 1 << 20;

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn zlib(content: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn deflate(content: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn zstd(content: &[u8]) -> Vec<u8> {
    compress_to_vec(content, CompressionLevel::Fastest)
}

fn br(content: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    brotli::BrotliCompress(
        &mut &content[..],
        &mut out,
        &brotli::enc::BrotliEncoderParams { quality: 4, ..Default::default() },
    )
    .unwrap();
    out
}

type Coding = (&'static [u8], fn(&[u8]) -> Vec<u8>);
const CODINGS: [Coding; 7] = [
    (b"gzip", gzip),
    (b"x-gzip", gzip),
    (b"GZip", gzip),
    (b"deflate", zlib),
    (b"deflate", deflate),
    (b"zstd", zstd),
    (b" br\t", br),
];

/// Text that compresses as prompts do.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut content = Vec::new();
    while content.len() < bytes {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        content.extend(format!("{} the {:x} request ", state >> 20, state >> 12).bytes());
    }
    content.truncate(bytes);
    content
}

fn decoded(encoding: &[u8], body: &[u8], whole: bool, bound: usize) -> (Decoded, Vec<u8>) {
    let mut out = b"left from before".to_vec();
    let outcome = decode(encoding, body, whole, bound, &mut out);
    assert!(out.len() <= bound);
    (outcome, out)
}

#[test]
fn each_coding_gives_its_content_back() {
    for (encoding, encode) in CODINGS {
        for bytes in [0, 1, 300, 150_000] {
            let content = content(bytes);
            let (outcome, out) = decoded(encoding, &encode(&content), true, BOUND);
            assert_eq!(outcome, Decoded::Complete, "{} {bytes}", encoding.escape_ascii());
            assert!(out == content);
            // Whether more was to come is known from the body, not from its announcement.
            assert_eq!(decoded(encoding, &encode(&content), false, BOUND).0, Decoded::Complete);
        }
    }
    for encoding in [&b""[..], b"identity", b" Identity "] {
        assert_eq!(decoded(encoding, b"{}", true, BOUND), (Decoded::Plain, vec![]));
    }
}

#[test]
fn the_bound_is_exact() {
    for (encoding, encode) in CODINGS {
        let content = content(150_000);
        let body = encode(&content);
        for (bound, expected) in [
            (150_000, Decoded::Complete),
            (149_999, Decoded::Truncated),
            (70_000, Decoded::Truncated),
            (1, Decoded::Truncated),
            (0, Decoded::Truncated),
        ] {
            let (outcome, out) = decoded(encoding, &body, true, bound);
            assert_eq!(outcome, expected, "{} {bound}", encoding.escape_ascii());
            assert!(out == content[..bound.min(content.len())]);
        }
    }
}

#[test]
fn a_body_in_part_gives_the_beginning_and_a_whole_one_may_not_break_off() {
    for (encoding, encode) in CODINGS {
        let content = content(300_000);
        let body = encode(&content);
        let mut most = 0;
        for cut in [0, 1, 2, 5, 17, 100, body.len() / 2, body.len() * 9 / 10, body.len() - 1] {
            let (outcome, out) = decoded(encoding, &body[..cut], false, BOUND);
            assert_eq!(outcome, Decoded::Truncated, "{} {cut}", encoding.escape_ascii());
            assert!(content.starts_with(&out));
            most = most.max(out.len());
            assert_eq!(decoded(encoding, &body[..cut], true, BOUND), (Decoded::Unreadable, vec![]), "{cut}");
        }
        // Blocks of zstd have up to 128 KiB.
        assert!(most >= 250_000, "{}: {most}", encoding.escape_ascii());
    }
}

#[test]
fn bombs_end_at_the_bound() {
    let zeros = vec![0; 4 << 20];
    for (encoding, body) in
        [(&b"gzip"[..], gzip(&zeros)), (b"deflate", zlib(&zeros)), (b"zstd", zstd(&zeros))]
    {
        let (outcome, out) = decoded(encoding, &body, true, BOUND);
        assert_eq!((outcome, out.len()), (Decoded::Truncated, BOUND), "{}", encoding.escape_ascii());
    }
    // Brotli: 16 MiB window, a run of copies of one zero.
    let mut parameters = brotli::enc::BrotliEncoderParams { lgwin: 24, quality: 1, ..Default::default() };
    parameters.large_window = false;
    let mut body = Vec::new();
    brotli::BrotliCompress(&mut &zeros[..], &mut body, &parameters).unwrap();
    assert_eq!(decoded(b"br", &body, true, BOUND).0, Decoded::Truncated);
    // zstd: runs of 128 KiB, each four bytes, in a window of 8 MiB, without end.
    let mut body = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 13 << 3];
    for _ in 0..250_000 {
        body.extend([0x02, 0x00, 0x10, b'x']);
    }
    let (outcome, out) = decoded(b"zstd", &body, true, BOUND);
    assert_eq!((outcome, out.len()), (Decoded::Truncated, BOUND));
}

#[test]
fn windows_beyond_the_bound_are_not_made() {
    let frame = |descriptor: u8| [0x28, 0xb5, 0x2f, 0xfd, 0, descriptor, 1, 0, 0];
    assert_eq!(decoded(b"zstd", &frame(13 << 3), true, BOUND).0, Decoded::Complete, "8 MiB");
    for descriptor in [13 << 3 | 1, 14 << 3, 31 << 3 | 7] {
        assert_eq!(decoded(b"zstd", &frame(descriptor), true, BOUND).0, Decoded::Unreadable, "{descriptor}");
    }
    // A single segment's window is its content: 2^60 bytes.
    let huge = [0x28, 0xb5, 0x2f, 0xfd, 0xe0, 0, 0, 0, 0, 0, 0, 0, 0x10, 1, 0, 0];
    assert_eq!(decoded(b"zstd", &huge, true, BOUND).0, Decoded::Unreadable);
    // Brotli's extension: 2^30.
    let mut parameters = brotli::enc::BrotliEncoderParams { lgwin: 30, ..Default::default() };
    parameters.large_window = true;
    let mut body = Vec::new();
    brotli::BrotliCompress(&mut &b"hello hello hello"[..], &mut body, &parameters).unwrap();
    assert_eq!(body[0] & 0x7f, 0x11, "the encoder wrote no large window");
    assert_eq!(decoded(b"br", &body, true, BOUND).0, Decoded::Unreadable);
    // A dictionary nobody has.
    let dictionary = [0x28, 0xb5, 0x2f, 0xfd, 0x01, 0, 7, 1, 0, 0];
    assert_eq!(decoded(b"zstd", &dictionary, true, BOUND).0, Decoded::Unreadable);
}

#[test]
fn frames_and_members_follow_each_other() {
    let (one, two) = (content(1000), content(2000));
    let both = [&one[..], &two].concat();
    let members = [gzip(&one), gzip(&two)].concat();
    assert_eq!(decoded(b"gzip", &members, true, BOUND), (Decoded::Complete, both.clone()));
    let skippable = [0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
    let frames = [&skippable[..], &zstd(&one), &skippable, &zstd(&two), &skippable].concat();
    assert_eq!(decoded(b"zstd", &frames, true, BOUND), (Decoded::Complete, both));
    assert_eq!(decoded(b"zstd", &frames[..frames.len() - 1], true, BOUND).0, Decoded::Unreadable);
    assert_eq!(decoded(b"zstd", &frames[..frames.len() - 1], false, BOUND).0, Decoded::Truncated);
    let many = gzip(b"x").repeat(GZIP_MEMBERS_MAX);
    assert_eq!(decoded(b"gzip", &many, true, BOUND), (Decoded::Complete, b"x".repeat(GZIP_MEMBERS_MAX)));
    let many = gzip(b"").repeat(50_000);
    assert_eq!(decoded(b"gzip", &many, true, BOUND), (Decoded::Unreadable, Vec::new()));
    let many = zstd(b"x").repeat(ZSTD_FRAMES_MAX);
    assert_eq!(decoded(b"zstd", &many, true, BOUND), (Decoded::Complete, b"x".repeat(ZSTD_FRAMES_MAX)));
    let many = zstd(b"x").repeat(ZSTD_FRAMES_MAX + 1);
    assert_eq!(decoded(b"zstd", &many, true, BOUND).0, Decoded::Unreadable);
}

#[test]
fn what_is_unknown_stacked_or_corrupt_is_unreadable() {
    let text = content(5000);
    for encoding in
        [&b"bogus"[..], b"gzip, zstd", b"gzip,", b"compress", b"gzipped", b"\xff", b"identity, gzip"]
    {
        for whole in [true, false] {
            assert_eq!(decoded(encoding, &gzip(&text), whole, BOUND), (Decoded::Unreadable, vec![]));
        }
    }
    for (encoding, encode) in CODINGS {
        for whole in [true, false] {
            let noise = b"{\"model\":\"m\",\"messages\":[]}".repeat(10);
            let outcome = decoded(encoding, &noise, whole, BOUND).0;
            // Without a mark of its own a coding finds sense in anything, for a while.
            let marked = encoding != b"deflate" && encoding != b" br\t";
            assert!(outcome == Decoded::Unreadable || !marked && !whole && outcome == Decoded::Truncated);
        }
        if encoding != b" br\t" {
            let behind = [&encode(&text)[..], b"more"].concat();
            assert_eq!(decoded(encoding, &behind, true, BOUND).0, Decoded::Unreadable);
        }
    }
    // Checksums are looked at.
    for (encoding, encode) in
        [(&b"gzip"[..], gzip as fn(&[u8]) -> Vec<u8>), (b"deflate", zlib), (b"zstd", zstd)]
    {
        let mut body = encode(&text);
        let last = body.len() - if encoding == b"gzip" { 8 } else { 1 };
        body[last] ^= 1;
        assert_eq!(
            decoded(encoding, &body, true, BOUND).0,
            Decoded::Unreadable,
            "{}",
            encoding.escape_ascii()
        );
    }
}

#[test]
fn no_damage_makes_a_decoder_fail_or_exceed_the_bound() {
    let text = content(3000);
    let mut state = 7_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for (encoding, encode) in CODINGS {
        let good = encode(&text);
        for _ in 0..400 {
            let mut body = good.clone();
            for _ in 0..=random(4) {
                let at = random(body.len());
                body[at] = random(256) as u8;
            }
            body.truncate(1 + random(good.len()));
            let whole = random(2) == 0;
            let (outcome, out) = decoded(encoding, &body, whole, 2000);
            assert!(outcome != Decoded::Unreadable || out.is_empty());
        }
    }
}
