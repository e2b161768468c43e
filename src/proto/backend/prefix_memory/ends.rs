//! Where prompts lately ended: tells one that goes on where another stopped, as a conversation's next turn does, from one that only
//! shares a head with others.
//!
//! *Bound and cost*: [`ENDS`] words, each the identity of a prompt's last full block; a newer one takes the place of an older one
//! that happens to share it, which then counts as a shared head. O(1).

/// Ends that are kept.
const ENDS: usize = 1 << 15;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Ends {
    /// Empty before the first prompt.
    identities: Box<[u64]>,
}

impl Ends {
    /// A prompt of these blocks came.
    #[inline]
    pub fn note(&mut self, blocks: &[u64]) {
        let Some(last) = blocks.last() else { return };
        if self.identities.is_empty() {
            self.identities = vec![0; ENDS].into_boxed_slice();
        }
        self.identities[Self::place(*last)] = *last;
    }

    /// Whether a prompt ended with that block.
    #[inline]
    pub fn contains(&self, block: u64) -> bool {
        self.identities.get(Self::place(block)) == Some(&block)
    }

    /// Identities are random: any bits of theirs will do.
    const fn place(block: u64) -> usize {
        block as usize % ENDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_known_until_their_place_is_taken() {
        let mut ends = Ends::default();
        assert!(!ends.contains(7));
        ends.note(&[]);
        ends.note(&[1, 2, 7]);
        assert!(ends.contains(7) && !ends.contains(2));
        ends.note(&[7 + ENDS as u64]);
        assert!(!ends.contains(7) && ends.contains(7 + ENDS as u64));
    }
}
