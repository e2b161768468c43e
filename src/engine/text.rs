//! Pseudo text: the answer of the simulated engine, from a seed.
//!
//! *Invariant*: the same seed and index give the same token on every machine and in every engine process, so an answer
//! taken through a router can be compared byte for byte with one taken directly. Every token is exactly
//! [`TOKEN_BYTES`] bytes of printable ASCII that JSON need not escape: an answer that comes back in the next turn of a
//! conversation is cut into the same tokens again, and its blocks are found in the prefix cache.
//! *Bound and cost*: O(1) per token, no allocation.
//! *Errors*: none.
//! *Source*: the finaliser of MurmurHash3 (public domain) for [`mix`].

/// A token: four bytes of text, or an id that the caller sent.
pub type Token = u32;

/// Bytes of text per token, in prompts and in answers.
pub const TOKEN_BYTES: usize = 4;

const WORDS: [&[u8; TOKEN_BYTES]; 64] = [
    b"the ", b"and ", b"sun ", b"sea ", b"sky ", b"ice ", b"oak ", b"elm ", b"fox ", b"owl ", b"bee ",
    b"ant ", b"hen ", b"cat ", b"dog ", b"elk ", b"red ", b"tan ", b"old ", b"new ", b"big ", b"shy ",
    b"dry ", b"wet ", b"ran ", b"sat ", b"saw ", b"ate ", b"met ", b"won ", b"hid ", b"dug ", b"far ",
    b"low ", b"out ", b"off ", b"now ", b"yet ", b"too ", b"not ", b"one ", b"two ", b"six ", b"ten ",
    b"all ", b"few ", b"own ", b"any ", b"day ", b"eve ", b"bay ", b"hut ", b"inn ", b"mill", b"ing ",
    b"rain", b"bow ", b"corn", b"lake", b"moss", b"fern", b"wind", b"ward", b"dew ",
];

/// Mixes `word` into `state`. Chained, it identifies a sequence; alone, it is a cheap source of pseudo-random bits.
pub const fn mix(state: u64, word: u64) -> u64 {
    let mut h = state.rotate_left(23) ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

/// Mixes all of `bytes`, its length included.
pub fn mix_bytes(state: u64, bytes: &[u8]) -> u64 {
    let mut h = mix(state, bytes.len() as u64);
    for part in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        h = mix(h, u64::from_le_bytes(word));
    }
    h
}

/// A number in `0.0..1.0` from mixed bits.
pub fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The token at `index` of the answer that `seed` gives.
pub fn token(seed: u64, index: u32) -> Token {
    let word = WORDS[(mix(seed, u64::from(index)) % WORDS.len() as u64) as usize];
    Token::from_le_bytes(*word)
}

/// Appends the text of a token made by [`token`].
pub fn push(out: &mut Vec<u8>, token: Token) {
    out.extend_from_slice(&token.to_le_bytes());
}

/// Cuts `text` into tokens and appends them; the last one is padded with zero bytes.
pub fn tokenize(text: &[u8], out: &mut Vec<Token>) {
    out.extend(text.chunks(TOKEN_BYTES).map(|part| {
        let mut bytes = [0; TOKEN_BYTES];
        bytes[..part.len()].copy_from_slice(part);
        Token::from_le_bytes(bytes)
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_cut_into_the_tokens_it_was_made_of() {
        let tokens: Vec<Token> = (0..500).map(|index| token(7, index)).collect();
        let mut answer = Vec::new();
        tokens.iter().for_each(|token| push(&mut answer, *token));
        let mut again = Vec::new();
        tokenize(&answer, &mut again);
        assert_eq!(again, tokens);
    }

    #[test]
    fn answers_need_no_escaping_in_json() {
        for word in WORDS {
            assert!(word.iter().all(|byte| byte.is_ascii_lowercase() || *byte == b' '), "{word:?}");
        }
    }

    #[test]
    fn seeds_give_different_answers_and_the_same_seed_the_same() {
        let answer = |seed| (0..32).map(|index| token(seed, index)).collect::<Vec<_>>();
        assert_eq!(answer(1), answer(1));
        assert_ne!(answer(1), answer(2));
    }

    #[test]
    fn a_padded_text_differs_from_its_prefix() {
        assert_ne!(mix_bytes(0, b"ab"), mix_bytes(0, b"ab\0"));
    }
}
