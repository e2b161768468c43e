//! What must hold for any body at all. The fuzz targets and `tests/properties_prompt.rs` share it.

use ringway::proto::classify::{
    Decoded, Endpoint, Prompt, PromptRules, decode, peek, peek_prefix, read_prompt,
};

pub const ENDPOINTS: [Endpoint; 10] = [
    Endpoint::Chat,
    Endpoint::Completions,
    Endpoint::Responses,
    Endpoint::Embeddings,
    Endpoint::Messages,
    Endpoint::CountTokens,
    Endpoint::Rerank,
    Endpoint::Generate,
    Endpoint::Other,
    Endpoint::Models,
];

/// A body reads the same with new and with used scratch, as `peek` reads it, and a whole one as it does in part.
pub fn prompt(data: &[u8]) {
    let Some((&choice, body)) = data.split_first() else { return };
    let endpoint = ENDPOINTS[choice as usize % ENDPOINTS.len()];
    let block_bytes = [64, 100, 256, 1000][choice as usize / ENDPOINTS.len() % 4];
    let rules = PromptRules { block_bytes, seed: 9 };

    let mut used = Prompt::default();
    let warm = br#"{"messages":[{"content":"a","role":"b","name":"c"}],"prompt":[1,2],"input":{"a": [1]}}"#;
    read_prompt(Endpoint::Other, warm, true, &rules, &mut used);
    for whole in [true, false] {
        let mut fresh = Prompt::default();
        let reading = read_prompt(endpoint, body, whole, &rules, &mut fresh);
        assert_eq!(read_prompt(endpoint, body, whole, &rules, &mut used), reading);
        assert_eq!(used.blocks, fresh.blocks);

        let peeked = if whole { peek(body) } else { peek_prefix(body) };
        assert_eq!((&reading.model, reading.stream), (&peeked.model, peeked.stream));
        assert_eq!(reading.complete, peeked.complete);
        if !reading.has_prompt {
            assert_eq!((reading.prompt_bytes, reading.token_ids, fresh.blocks.len()), (0, 0, 0));
        }
        // Separators are at most one to each two bytes of a body, a digest shorter than what it stands for.
        assert!(fresh.blocks.len() * block_bytes as usize <= 2 * body.len() + 16);
        assert!(reading.affinity_id.as_ref().is_none_or(|id| (1..=256).contains(&id.len())));
        // Another seed, other blocks.
        let other = PromptRules { seed: 10, ..rules };
        read_prompt(endpoint, body, whole, &other, &mut used);
        assert_eq!(used.blocks.len(), fresh.blocks.len());
        assert!(used.blocks.iter().zip(&fresh.blocks).all(|(a, b)| a != b));
        if whole && reading.complete {
            assert_eq!(read_prompt(endpoint, body, false, &rules, &mut used), reading);
            assert_eq!(used.blocks, fresh.blocks);
        }
    }
}

pub const CODINGS: [&[u8]; 5] = [b"gzip", b"deflate", b"zstd", b"br", b"x-gzip"];

/// Nothing fails, exceeds its bound, or depends on it for what stands before it.
pub fn decoding(data: &[u8]) {
    let Some((&choice, body)) = data.split_first() else { return };
    let coding = CODINGS[choice as usize % CODINGS.len()];
    let (mut long, mut short) = (Vec::new(), Vec::new());
    for whole in [true, false] {
        let outcome = decode(coding, body, whole, 1 << 16, &mut long);
        let bounded = decode(coding, body, whole, 1000, &mut short);
        assert!(long.len() <= 1 << 16 && short.len() <= 1000);
        assert!(outcome != Decoded::Plain && bounded != Decoded::Plain);
        if outcome == Decoded::Unreadable {
            assert!(long.is_empty());
        } else if bounded != Decoded::Unreadable {
            assert!(long.starts_with(&short));
            assert!(outcome != Decoded::Complete || (bounded == Decoded::Complete) == (long.len() <= 1000));
        }
        if bounded == Decoded::Unreadable {
            assert!(short.is_empty());
        }
    }
}
