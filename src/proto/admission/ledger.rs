//! Home's book of permits: who holds how many of each server's.
//!
//! `spare = ceiling − Σ leased`. A shard keeps its leases while it is busy and gives free ones back when it did not need them
//! for a while, or when home *recalls* the server because somebody waits: then it gives back what is free at once, and each
//! further permit as it becomes free, until home *eases* the recall. While a recall is on, every permit that becomes free
//! passes through home, so home knows when none is free anywhere: that is what makes a denial definite.
//!
//! Judged in the simulation (`judge_variants` in `tests/sim.rs`, 8 shards, messages about permits per request):
//!
//! | servers × ceiling, load | ease at 1 spare | at ½ | at ½, and 2 per shard | when all are spare |
//! | --- | --- | --- | --- | --- |
//! | 4 × 32, 0.7 | 1.45 | 1.78 | **1.78** | 2.59 |
//! | 4 × 32, 0.95 | 5.44 | 2.61 | **2.61** | 2.63 |
//! | 4 × 8, 0.7 | 5.75 | 3.24 | **2.56** | 2.56 |
//! | 2 × 4, 0.95 | 3.58 | 2.96 | **2.66** | 2.66 |
//!
//! Leases save messages while permits are plentiful and cost some when they are scarce, so a recall, once begun, stays until
//! there is plenty again. Batches are small for the same reason: at 4 × 256 and load 0.7 a batch of `spare / (4 × shards)` more
//! than halves the messages (0.11 for 0.27), at 4 × 32 and load 0.3 twice that size doubles them (0.14 for 0.07).
//!
//! *Invariant*: `leased_total` is the sum of `leased`; a grant never makes it exceed the ceiling; a shard's requests on a gated
//! server never exceed what is leased to it. A lowered ceiling makes spare 0 until enough has come back.
//! *Bound and cost*: 4 bytes per server and shard; O(1) per operation, a recall O(shards).

use std::collections::BTreeMap;

use crate::limits::SHARDS_MAX;
use crate::proto::ids::{BackendId, ShardId};

/// A set of shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardSet([u64; SHARDS_MAX / 64]);

impl ShardSet {
    pub fn insert(&mut self, shard: ShardId) {
        self.0[shard.index() / 64] |= 1 << (shard.index() % 64);
    }
    pub fn remove(&mut self, shard: ShardId) {
        self.0[shard.index() / 64] &= !(1 << (shard.index() % 64));
    }
    pub fn contains(&self, shard: ShardId) -> bool {
        self.0[shard.index() / 64] & 1 << (shard.index() % 64) != 0
    }
    pub fn is_empty(&self) -> bool {
        self.0 == [0; SHARDS_MAX / 64]
    }
}

/// How generously permits are leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRules {
    /// A grant that nobody waits behind carries up to `spare / (batch_divisor × shards)` permits, at least 1; 0: always 1.
    pub batch_divisor: u32,
    /// A recall is eased once nobody waits and `ceiling / ease_divisor` permits are spare,
    pub ease_divisor: u32,
    /// and at least that many for each shard (or all there are).
    pub ease_per_shard: u32,
}

impl Default for LeaseRules {
    fn default() -> Self {
        LeaseRules { batch_divisor: 4, ease_divisor: 2, ease_per_shard: 2 }
    }
}

#[derive(Clone, Debug)]
struct Account {
    /// `None`: no gate.
    ceiling: Option<u32>,
    leased_total: u32,
    recalling: bool,
    /// Shards that were told of the recall.
    told: ShardSet,
    /// Of them, those that have not answered.
    due: ShardSet,
    /// Shards that have yet to say how many requests run there without permits; no grants before.
    adopting: u32,
}

/// See the module's text.
#[derive(Debug)]
pub struct Ledger {
    shards: usize,
    rules: LeaseRules,
    accounts: Vec<Account>,
    /// By server, then shard.
    leased: Vec<u32>,
    /// Ceilings that this book and a shard have not both put in force: positive, the shard is behind. Empty but around such
    /// a change.
    adoptions: BTreeMap<(BackendId, ShardId), i32>,
}

impl Ledger {
    pub fn new(shards: usize, rules: LeaseRules) -> Self {
        Ledger { shards, rules, accounts: Vec::new(), leased: Vec::new(), adoptions: BTreeMap::new() }
    }

    pub fn ensure(&mut self, id: BackendId) {
        if self.accounts.len() <= id.index() {
            let blank = Account {
                ceiling: None,
                leased_total: 0,
                recalling: false,
                told: ShardSet::default(),
                due: ShardSet::default(),
                adopting: 0,
            };
            self.accounts.resize(id.index() + 1, blank);
            self.leased.resize(self.accounts.len() * self.shards, 0);
        }
    }

    /// Puts a ceiling in force (0: no gate). `adopt`: the server was there before without one, so each other shard is going to
    /// say what runs there.
    pub fn set_ceiling(&mut self, id: BackendId, ceiling: u32, adopt: bool) {
        self.ensure(id);
        let ceiling = (ceiling > 0).then_some(ceiling);
        let opened = adopt && ceiling.is_some() && self.accounts[id.index()].ceiling.is_none();
        self.accounts[id.index()].ceiling = ceiling;
        if opened {
            for shard in 1..self.shards {
                self.expect_adoption(id, ShardId(shard as u8), 1);
            }
        }
    }

    /// A shard has put the ceiling in force; `count` requests ran there without permits.
    pub fn adopt(&mut self, id: BackendId, shard: ShardId, count: u32) {
        self.ensure(id);
        self.lease(id, shard, count);
        if shard != ShardId::HOME {
            self.expect_adoption(id, shard, -1);
        }
    }

    fn expect_adoption(&mut self, id: BackendId, shard: ShardId, change: i32) {
        let due = self.adoptions.entry((id, shard)).or_default();
        let was_behind = *due > 0;
        *due += change;
        let behind = *due > 0;
        if *due == 0 {
            self.adoptions.remove(&(id, shard));
        }
        let account = &mut self.accounts[id.index()];
        account.adopting = account.adopting + u32::from(behind) - u32::from(was_behind);
    }

    /// Permits that can be granted; `u32::MAX` without a gate.
    pub fn spare(&self, id: BackendId) -> u32 {
        let account = &self.accounts[id.index()];
        match account.ceiling {
            None => u32::MAX,
            Some(_) if account.adopting > 0 => 0,
            Some(ceiling) => ceiling.saturating_sub(account.leased_total),
        }
    }

    /// Writes `count` permits to a shard.
    pub fn lease(&mut self, id: BackendId, shard: ShardId, count: u32) {
        self.leased[id.index() * self.shards + shard.index()] += count;
        self.accounts[id.index()].leased_total += count;
    }

    /// Takes `count` permits back from a shard.
    pub fn give_back(&mut self, id: BackendId, shard: ShardId, count: u32) {
        let leased = &mut self.leased[id.index() * self.shards + shard.index()];
        assert!(*leased >= count, "a shard gives back what it was given");
        *leased -= count;
        self.accounts[id.index()].leased_total -= count;
    }

    pub fn leased(&self, id: BackendId, shard: ShardId) -> u32 {
        self.leased[id.index() * self.shards + shard.index()]
    }

    /// How many permits a shard that asks for one gets. At least 1: there has to be a spare one.
    pub fn batch(&self, id: BackendId) -> u32 {
        let account = &self.accounts[id.index()];
        if account.ceiling.is_none() || account.recalling || self.rules.batch_divisor == 0 {
            return 1;
        }
        (self.spare(id) / (self.rules.batch_divisor * self.shards as u32)).max(1)
    }

    /// More is leased than the (lowered) ceiling allows.
    pub fn overdrawn(&self, id: BackendId) -> bool {
        let account = &self.accounts[id.index()];
        account.ceiling.is_some_and(|ceiling| account.leased_total > ceiling)
    }

    pub fn recalling(&self, id: BackendId) -> bool {
        self.accounts[id.index()].recalling
    }

    /// Begins a recall; the shards to tell are handed to `tell`. Nothing when one is on, or without a gate.
    pub fn recall(&mut self, id: BackendId, mut tell: impl FnMut(ShardId)) {
        let account = &mut self.accounts[id.index()];
        if account.recalling || account.ceiling.is_none() {
            return;
        }
        account.recalling = true;
        let leased = &self.leased[id.index() * self.shards..][..self.shards];
        for (shard, count) in leased.iter().enumerate().skip(1) {
            if *count > 0 {
                let shard = ShardId(shard as u8);
                account.told.insert(shard);
                account.due.insert(shard);
                tell(shard);
            }
        }
    }

    /// Whether a shard that holds permits has yet to be told of the recall that is on; it counts as told from now on.
    pub fn recall_late(&mut self, id: BackendId, shard: ShardId) -> bool {
        let account = &mut self.accounts[id.index()];
        let late = account.recalling && shard != ShardId::HOME && !account.told.contains(shard);
        if late {
            account.told.insert(shard);
            account.due.insert(shard);
        }
        late
    }

    /// A grant told that shard of the recall.
    pub fn note_told(&mut self, id: BackendId, shard: ShardId) {
        self.accounts[id.index()].told.insert(shard);
    }

    /// A shard answered the recall.
    pub fn note_answer(&mut self, id: BackendId, shard: ShardId) {
        self.accounts[id.index()].due.remove(shard);
    }

    /// Ends a recall that is answered and has enough spare; the shards to tell are handed to `tell`. The caller knows that
    /// nobody waits.
    pub fn ease(&mut self, id: BackendId, mut tell: impl FnMut(ShardId)) {
        let spare = self.spare(id);
        let account = &mut self.accounts[id.index()];
        if !account.recalling || !account.due.is_empty() {
            return;
        }
        let per_shard = self.rules.ease_per_shard.saturating_mul(self.shards as u32);
        let enough = account.ceiling.map_or(0, |ceiling| {
            (ceiling / self.rules.ease_divisor.max(1)).max(per_shard.min(ceiling)).max(1)
        });
        if spare >= enough {
            account.recalling = false;
            let told = std::mem::take(&mut account.told);
            (1..self.shards)
                .map(|shard| ShardId(shard as u8))
                .filter(|s| told.contains(*s))
                .for_each(&mut tell);
        }
    }

    /// Nothing is spare, and no other shard has a free permit that it has not sent: nothing can be had.
    pub fn exhausted(&self, id: BackendId) -> bool {
        let account = &self.accounts[id.index()];
        let elsewhere = account.leased_total - self.leased(id, ShardId::HOME);
        self.spare(id) == 0
            && account.adopting == 0
            && (elsewhere == 0 || (account.recalling && account.due.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: BackendId = BackendId(1);
    const ONE: ShardId = ShardId(1);
    const TWO: ShardId = ShardId(2);

    fn ledger(ceiling: u32) -> Ledger {
        let mut ledger = Ledger::new(3, LeaseRules::default());
        ledger.set_ceiling(ID, ceiling, false);
        ledger
    }

    fn recall(ledger: &mut Ledger) -> Vec<ShardId> {
        let mut told = Vec::new();
        ledger.recall(ID, |shard| told.push(shard));
        told
    }

    fn ease(ledger: &mut Ledger) -> Vec<ShardId> {
        let mut told = Vec::new();
        ledger.ease(ID, |shard| told.push(shard));
        told
    }

    #[test]
    fn shard_sets_hold_all_256() {
        let mut set = ShardSet::default();
        for shard in [0, 63, 64, 255] {
            assert!(!set.contains(ShardId(shard)));
            set.insert(ShardId(shard));
            assert!(set.contains(ShardId(shard)));
        }
        assert!(!set.contains(ShardId(128)));
        for shard in [0, 63, 64, 255] {
            set.remove(ShardId(shard));
        }
        assert!(set.is_empty());
    }

    #[test]
    fn only_an_answered_recall_proves_that_nothing_is_free() {
        let mut ledger = ledger(2);
        ledger.lease(ID, ONE, 1);
        ledger.lease(ID, TWO, 1);
        assert!(!ledger.exhausted(ID), "either may be free");
        assert_eq!(recall(&mut ledger), [ONE, TWO]);
        assert_eq!(recall(&mut ledger), [], "it is on");
        ledger.note_answer(ID, ONE);
        assert!(!ledger.exhausted(ID));
        ledger.note_answer(ID, TWO);
        assert!(ledger.exhausted(ID));
        ledger.give_back(ID, ONE, 1);
        assert!(!ledger.exhausted(ID));
    }

    #[test]
    fn what_home_holds_itself_needs_no_recall() {
        let mut ledger = ledger(1);
        ledger.lease(ID, ShardId::HOME, 1);
        assert!(ledger.exhausted(ID));
    }

    #[test]
    fn a_recall_is_eased_when_answered_and_half_is_spare() {
        let mut ledger = ledger(16);
        ledger.lease(ID, ONE, 12);
        ledger.lease(ID, ShardId::HOME, 4);
        recall(&mut ledger);
        ledger.give_back(ID, ONE, 9);
        assert_eq!(ease(&mut ledger), [], "the answer is due: it would be taken for the next recall's");
        ledger.note_answer(ID, ONE);
        assert_eq!(ease(&mut ledger), [ONE]);
        assert!(!ledger.recalling(ID));
        assert_eq!(recall(&mut ledger), [ONE]);
        ledger.note_answer(ID, ONE);
        ledger.lease(ID, ShardId::HOME, 2);
        assert_eq!(ease(&mut ledger), [], "7 of 16 are spare");
    }

    #[test]
    fn few_permits_are_eased_when_all_are_back() {
        let mut ledger = ledger(4);
        ledger.lease(ID, ONE, 1);
        recall(&mut ledger);
        ledger.note_answer(ID, ONE);
        assert_eq!(ease(&mut ledger), [], "3 of 4 are not 2 for each of 3 shards");
        ledger.give_back(ID, ONE, 1);
        assert_eq!(ease(&mut ledger), [ONE]);
    }

    #[test]
    fn batches_are_a_small_share_of_what_is_spare() {
        let mut ledger = ledger(240);
        assert_eq!(ledger.batch(ID), 20);
        ledger.lease(ID, ONE, 230);
        assert_eq!(ledger.batch(ID), 1);
        ledger.give_back(ID, ONE, 230);
        recall(&mut ledger);
        assert_eq!(ledger.batch(ID), 1, "no leases beyond need while somebody may wait");
    }

    #[test]
    fn a_first_ceiling_waits_for_what_every_shard_runs() {
        let mut ledger = ledger(0);
        assert_eq!(ledger.spare(ID), u32::MAX);
        // Shard 2 has put the ceiling in force before home has.
        ledger.adopt(ID, TWO, 3);
        ledger.set_ceiling(ID, 8, true);
        ledger.adopt(ID, ShardId::HOME, 1);
        assert_eq!((ledger.spare(ID), ledger.exhausted(ID)), (0, false), "shard 1 has yet to say");
        ledger.adopt(ID, ONE, 2);
        assert_eq!(ledger.spare(ID), 2);
        // Off and on again, and shard 1 is the slow one.
        ledger.set_ceiling(ID, 0, true);
        ledger.set_ceiling(ID, 8, true);
        ledger.adopt(ID, TWO, 0);
        assert_eq!(ledger.spare(ID), 0);
        ledger.adopt(ID, ONE, 1);
        assert_eq!(ledger.spare(ID), 1);
    }

    #[test]
    fn a_lowered_ceiling_is_overdrawn_until_enough_is_back() {
        let mut ledger = ledger(5);
        ledger.lease(ID, ONE, 4);
        ledger.set_ceiling(ID, 2, true);
        assert!(ledger.overdrawn(ID));
        assert_eq!(ledger.spare(ID), 0);
        ledger.give_back(ID, ONE, 3);
        assert_eq!((ledger.overdrawn(ID), ledger.spare(ID)), (false, 1));
    }
}
