//! How many bytes of prompt text one token of a model is, learnt from what engines report.
//!
//! The figure turns a prompt's length into an estimate of its tokens before an engine has seen it, for `max_input_tokens`
//! and for placing by size. It is one number per model: tokenizers and chat templates differ, and so do languages.
//!
//! *Invariant*: always within [`BYTES_PER_TOKEN_MIN`] and [`BYTES_PER_TOKEN_MAX`]; one odd report moves it by an eighth of
//! the distance at most.
//! *Bound and cost*: eight bytes; a handful of instructions.
//! *Errors*: none. What cannot be true is not learnt from.
//! *Source*: our own; the exponentially weighted mean is textbook.

/// Before anything was learnt: English text in the tokenizers of today's models has three and a half to four and a half.
pub const BYTES_PER_TOKEN_DEFAULT: f64 = 4.0;
/// Text in a script that its tokenizer hardly knows goes byte by byte.
pub const BYTES_PER_TOKEN_MIN: f64 = 1.0;
/// Long runs of white space go many bytes to a token.
pub const BYTES_PER_TOKEN_MAX: f64 = 16.0;
/// In shorter prompts the chat template, whose tokens no byte of the request shows, outweighs the text.
const LEARN_BYTES_MIN: u64 = 512;
/// Weight of one report.
const WEIGHT: f64 = 1.0 / 8.0;

/// The figure of one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    bytes_per_token: f64,
}

impl Default for Calibration {
    fn default() -> Self {
        Calibration { bytes_per_token: BYTES_PER_TOKEN_DEFAULT }
    }
}

impl Calibration {
    /// Bytes of prompt text to a token, from [`BYTES_PER_TOKEN_MIN`] to [`BYTES_PER_TOKEN_MAX`].
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes_per_token
    }

    /// Estimated tokens of a prompt of `prompt_bytes` bytes of text and `token_ids` tokens sent as their numbers, which
    /// count as what they are. Rounded up.
    pub fn estimate(&self, prompt_bytes: u64, token_ids: u64) -> u64 {
        // Exact up to 2^53 bytes, far beyond any body; the cast saturates.
        let text = (prompt_bytes as f64 / self.bytes_per_token).ceil() as u64;
        text.saturating_add(token_ids)
    }

    /// An engine counted `prompt_tokens` for a prompt of `prompt_bytes` bytes of text. Media and token ids have no place
    /// here: their tokens are not in the bytes.
    pub fn learn(&mut self, prompt_bytes: u64, prompt_tokens: u64) {
        if prompt_bytes < LEARN_BYTES_MIN || prompt_tokens == 0 {
            return;
        }
        let seen = prompt_bytes as f64 / prompt_tokens as f64;
        let seen = seen.clamp(BYTES_PER_TOKEN_MIN, BYTES_PER_TOKEN_MAX);
        self.bytes_per_token += (seen - self.bytes_per_token) * WEIGHT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_round_up_and_token_ids_count_as_themselves() {
        let fresh = Calibration::default();
        assert_eq!(fresh.estimate(0, 0), 0);
        assert_eq!(fresh.estimate(1, 0), 1);
        assert_eq!(fresh.estimate(4000, 0), 1000);
        assert_eq!(fresh.estimate(4001, 7), 1008);
        assert_eq!(fresh.estimate(0, 123), 123);
        assert_eq!(fresh.estimate(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn it_comes_to_what_engines_report() {
        let mut model = Calibration::default();
        for _ in 0..40 {
            model.learn(30_000, 10_000);
        }
        assert!((model.bytes_per_token() - 3.0).abs() < 0.01, "{model:?}");
        assert!(model.estimate(3000, 0).abs_diff(1000) <= 4);
    }

    #[test]
    fn one_odd_report_moves_it_little_and_never_out_of_bounds() {
        let mut model = Calibration::default();
        model.learn(100_000, 1);
        assert!(model.bytes_per_token() <= BYTES_PER_TOKEN_DEFAULT + (16.0 - 4.0) / 8.0);
        for _ in 0..1000 {
            model.learn(u64::MAX, 1);
        }
        assert!((15.9..=BYTES_PER_TOKEN_MAX).contains(&model.bytes_per_token()));
        for _ in 0..1000 {
            model.learn(600, u64::MAX);
        }
        assert!((BYTES_PER_TOKEN_MIN..1.1).contains(&model.bytes_per_token()));
    }

    #[test]
    fn tiny_prompts_and_empty_reports_teach_nothing() {
        let mut model = Calibration::default();
        model.learn(LEARN_BYTES_MIN - 1, 500);
        model.learn(0, 0);
        model.learn(100_000, 0);
        assert_eq!(model, Calibration::default());
        model.learn(LEARN_BYTES_MIN, 512);
        assert!(model.bytes_per_token() < BYTES_PER_TOKEN_DEFAULT);
    }
}
