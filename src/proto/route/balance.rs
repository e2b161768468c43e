//! How far each server of a group is above its fair share of requests and of prompt work, lately.
//!
//! Affinity alone lets a server that holds popular prompts take more than its share for good: load figures only see what runs
//! now. Every dispatch adds to the server that got it and takes its weight's part from all that could have got it, so that
//! the deviations add up to nothing and a full, drained or new server gathers neither debt nor credit. Older dispatches
//! count less and less: one of [`HORIZON`] dispatches ago counts 1/e.
//!
//! *Bound and cost*: 32 bytes per slot. A dispatch is O(1), and so is a server that fills up or has room again; a change of the
//! live servers O(slots). Nothing is multiplied through to forget: instead each dispatch weighs more than the one before, and
//! all is scaled back now and then. Nor is a dispatch's part taken from each server: what all of them owe is added up.
//! *Source*: our own, chosen by replaying recorded traffic.

/// Dispatches after which one counts 1/e.
const HORIZON: f64 = 8192.0;
/// By how much a dispatch weighs more than the one before: exp(1 / HORIZON), to the last bit but rounding.
const GROWTH: f64 =
    1.0 + 1.0 / HORIZON + 0.5 / (HORIZON * HORIZON) + 1.0 / (6.0 * HORIZON * HORIZON * HORIZON);
/// Prompts that the mean length is of.
const PROMPTS: f64 = 256.0;
/// Weight of a dispatch at which all is scaled back.
const UNIT_MAX: f64 = 1e12;

/// Who could have got a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takers {
    /// Every live server.
    Live,
    /// The live servers with room, and the one that got it.
    WithRoom,
}

/// One server's figures.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    requests: f64,
    work: f64,
    /// 0: not live.
    weight: f64,
    /// Live, but without room.
    full: bool,
}

/// See the module's text. Weights in any unit, work in tokens.
#[derive(Clone, Debug)]
pub struct Balance {
    accounts: Vec<Account>,
    /// Sum of the live weights, and of those with room.
    weights: f64,
    weights_with_room: f64,
    /// Taken from every live server, per weight, and not yet from its account.
    owed: Owed,
    /// The same, from every live server with room.
    owed_with_room: Owed,
    /// Of all dispatches.
    requests: f64,
    work: f64,
    /// What one dispatch weighs now.
    unit: f64,
    /// Mean length of the last prompts, in blocks, and how many it is of.
    prompt_blocks: f64,
    prompts: f64,
}

/// Per weight.
#[derive(Clone, Copy, Debug, Default)]
struct Owed {
    requests: f64,
    work: f64,
}

/// How far a server is above its share (below: negative), and that share; in requests, or tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deviation {
    pub requests: f64,
    pub requests_fair: f64,
    pub work: f64,
    pub work_fair: f64,
}

impl Account {
    /// Takes its part of what is owed out of the account; `times` -1 puts it back.
    fn settle(&mut self, owed: Owed, times: f64) {
        self.requests -= times * self.weight * owed.requests;
        self.work -= times * self.weight * owed.work;
    }
}

impl Owed {
    /// Servers of so much weight together owe that.
    fn add(&mut self, requests: f64, work: f64, weights: f64) {
        self.requests += requests / weights;
        self.work += work / weights;
    }
}

impl Balance {
    pub fn new(slots: usize) -> Self {
        Balance {
            accounts: vec![Account::default(); slots],
            weights: 0.0,
            weights_with_room: 0.0,
            owed: Owed::default(),
            owed_with_room: Owed::default(),
            requests: 0.0,
            work: 0.0,
            unit: 1.0,
            prompt_blocks: 0.0,
            prompts: 0.0,
        }
    }

    /// A prompt of so many full blocks came to this shard.
    pub fn note_prompt(&mut self, blocks: u32) {
        self.prompts = (self.prompts + 1.0).min(PROMPTS);
        self.prompt_blocks += (f64::from(blocks) - self.prompt_blocks) / self.prompts;
    }

    /// Mean length of the last prompts, in blocks; 0 before the first.
    pub fn prompt_blocks(&self) -> f64 {
        self.prompt_blocks
    }

    /// Who is live from now on: weights by slot, 0 for those that are not. All of them have room until [`Balance::set_room`] says
    /// otherwise.
    pub fn set_weights(&mut self, weights: &[u64]) {
        for (account, weight) in self.accounts.iter_mut().zip(weights) {
            account.settle(self.owed, 1.0);
            if !account.full {
                account.settle(self.owed_with_room, 1.0);
            }
            account.weight = *weight as f64;
            account.full = false;
        }
        (self.owed, self.owed_with_room) = (Owed::default(), Owed::default());
        self.weights = self.accounts.iter().map(|account| account.weight).sum();
        self.weights_with_room = self.weights;
    }

    /// A live server has room, or none: then it has no part in what goes to those that have.
    pub fn set_room(&mut self, slot: u16, room: bool) {
        let account = &mut self.accounts[slot as usize];
        if account.full != room {
            return;
        }
        account.full = !room;
        if room {
            account.settle(self.owed_with_room, -1.0);
            self.weights_with_room += account.weight;
        } else {
            account.settle(self.owed_with_room, 1.0);
            self.weights_with_room -= account.weight;
        }
    }

    /// The server in that slot got `times` dispatches, of `work` tokens in all.
    pub fn note(&mut self, slot: u16, times: u64, work: u64, takers: Takers) {
        // More than a few horizons at once push everything before out.
        let growth = match times {
            0 => 1.0,
            1 => GROWTH,
            many => (many.min(20 * HORIZON as u64) as f64 / HORIZON).exp(),
        };
        self.unit *= growth;
        if self.weights == 0.0 {
            return;
        }
        let (requests, work) = (times as f64 * self.unit, work as f64 * self.unit);
        let account = &mut self.accounts[slot as usize];
        account.requests += requests;
        account.work += work;
        match takers {
            Takers::Live => self.owed.add(requests, work, self.weights),
            Takers::WithRoom => {
                let own = if account.full { account.weight } else { 0.0 };
                let mut part = Owed::default();
                part.add(requests, work, self.weights_with_room + own);
                if account.full {
                    account.settle(part, 1.0);
                }
                self.owed_with_room.requests += part.requests;
                self.owed_with_room.work += part.work;
            }
        }
        self.requests += requests;
        self.work += work;
        if self.unit > UNIT_MAX {
            self.scale_back();
        }
    }

    /// The server in that slot did not get that many of its dispatches after all.
    pub fn take_back(&mut self, slot: u16, times: u64) {
        if self.weights > 0.0 {
            let requests = times as f64 * self.unit;
            self.owed.requests -= requests / self.weights;
            self.accounts[slot as usize].requests -= requests;
            self.requests -= requests;
        }
    }

    fn scale_back(&mut self) {
        let by = 1.0 / std::mem::replace(&mut self.unit, 1.0);
        for account in &mut self.accounts {
            account.requests *= by;
            account.work *= by;
        }
        for owed in [&mut self.owed, &mut self.owed_with_room] {
            owed.requests *= by;
            owed.work *= by;
        }
        self.requests *= by;
        self.work *= by;
    }

    /// How the server in that slot stands.
    pub fn of(&self, slot: u16) -> Deviation {
        self.standing().of(slot)
    }

    /// How all stand: for a look at many of them.
    pub fn standing(&self) -> Standing<'_> {
        let by = 1.0 / self.unit;
        let per_weight = if self.weights > 0.0 { by / self.weights } else { 0.0 };
        Standing {
            balance: self,
            by,
            requests_fair: self.requests * per_weight,
            work_fair: self.work * per_weight,
        }
    }
}

/// See [`Balance::standing`].
#[derive(Clone, Copy, Debug)]
pub struct Standing<'a> {
    balance: &'a Balance,
    /// Requests, or tokens, that a unit counts as now.
    by: f64,
    /// Per weight.
    requests_fair: f64,
    work_fair: f64,
}

impl Standing<'_> {
    /// [`Deviation::requests`] alone.
    #[inline]
    pub fn requests(&self, slot: u16) -> f64 {
        let Balance { accounts, owed, owed_with_room, .. } = self.balance;
        let account = &accounts[slot as usize];
        let with_room = if account.full { 0.0 } else { owed_with_room.requests };
        (account.requests - account.weight * (owed.requests + with_room)) * self.by
    }

    /// How the server in that slot stands.
    #[inline]
    pub fn of(&self, slot: u16) -> Deviation {
        let Balance { accounts, owed, owed_with_room, .. } = self.balance;
        let account = &accounts[slot as usize];
        let with_room = if account.full { Owed::default() } else { *owed_with_room };
        let work_owed = account.weight * (owed.work + with_room.work);
        Deviation {
            requests: self.requests(slot),
            requests_fair: self.requests_fair * account.weight,
            work: (account.work - work_owed) * self.by,
            work_fair: self.work_fair * account.weight,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the module's text says it, multiplied through.
    struct Naive {
        requests: Vec<f64>,
        work: Vec<f64>,
        total: (f64, f64),
    }

    impl Naive {
        fn note(&mut self, slot: usize, work: f64, takers: &[(u16, u64)]) {
            let keep = (-1.0 / HORIZON).exp();
            self.requests.iter_mut().chain(&mut self.work).for_each(|x| *x *= keep);
            let weights: u64 = takers.iter().map(|(_, weight)| weight).sum();
            for (slot, weight) in takers {
                self.requests[*slot as usize] -= *weight as f64 / weights as f64;
                self.work[*slot as usize] -= work * *weight as f64 / weights as f64;
            }
            self.requests[slot] += 1.0;
            self.work[slot] += work;
            self.total = (self.total.0 * keep + 1.0, self.total.1 * keep + work);
        }
    }

    #[test]
    fn deviations_are_those_of_the_plain_sums() {
        let weights = [3u64, 1, 0, 2];
        let live: Vec<(u16, u64)> = (0..).zip(weights).filter(|(_, weight)| *weight > 0).collect();
        let mut balance = Balance::new(4);
        balance.set_weights(&weights);
        let mut full = [false; 4];
        let mut naive = Naive { requests: vec![0.0; 4], work: vec![0.0; 4], total: (0.0, 0.0) };
        let mut random = 1u64;
        // Far enough for the unit to be scaled back.
        for i in 0..150_000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (slot, work) = (live[(random >> 33) as usize % 3].0, random >> 52);
            // Each is full now and then; the one that takes may be so by now.
            if i % 5 == 0 {
                full[slot as usize] ^= true;
                balance.set_room(slot, !full[slot as usize]);
            }
            if i % 3 == 0 {
                let takers = live.iter().filter(|(other, _)| *other == slot || !full[*other as usize]);
                let takers: Vec<(u16, u64)> = takers.copied().collect();
                balance.note(slot, 1, work, Takers::WithRoom);
                naive.note(slot.into(), work as f64, &takers);
            } else {
                balance.note(slot, 1, work, Takers::Live);
                naive.note(slot.into(), work as f64, &live);
            }
            if i % 1_000 == 0 {
                if i % 5_000 == 0 {
                    balance.set_weights(&weights);
                    full = [false; 4];
                }
                for (slot, weight) in live.iter().copied() {
                    let (got, at) = (balance.of(slot), slot as usize);
                    let close = |a: f64, b: f64| (a - b).abs() <= 1e-6 * (1.0 + b.abs());
                    assert!(close(got.requests, naive.requests[at]) && close(got.work, naive.work[at]));
                    assert!(close(got.requests_fair, naive.total.0 * weight as f64 / 6.0));
                    assert!(close(got.work_fair, naive.total.1 * weight as f64 / 6.0));
                }
            }
        }
    }

    #[test]
    fn what_is_taken_back_counts_no_more() {
        let mut balance = Balance::new(2);
        balance.set_weights(&[1, 3]);
        balance.note(0, 1, 100, Takers::Live);
        balance.note(1, 1, 0, Takers::Live);
        let before = balance.of(1);
        balance.note(0, 2, 0, Takers::Live);
        balance.take_back(0, 2);
        let after = balance.of(1);
        assert!((before.requests - after.requests).abs() < 1e-3, "{before:?} {after:?}");
        assert!((before.requests_fair - after.requests_fair).abs() < 1e-3);
    }

    #[test]
    fn a_new_server_has_neither_debt_nor_credit_and_many_at_once_are_many() {
        let mut balance = Balance::new(3);
        balance.set_weights(&[1, 1, 0]);
        for _ in 0..100 {
            balance.note(0, 1, 10, Takers::Live);
        }
        balance.set_weights(&[1, 1, 1]);
        assert_eq!((balance.of(2).requests, balance.of(2).work), (0.0, 0.0));
        assert!((balance.of(0).requests + balance.of(1).requests).abs() < 1e-9);
        balance.note(1, 100, 1000, Takers::Live);
        let two = balance.of(1);
        assert!(two.requests > 15.0 && two.work > 150.0, "{two:?}");
        balance.note(1, u64::MAX, u64::MAX, Takers::Live);
        assert!(balance.of(1).requests.is_finite());
        // Nobody is live: nothing to share.
        balance.set_weights(&[0, 0, 0]);
        balance.note(0, 1, 1, Takers::Live);
        assert!(balance.of(0).requests.is_finite());
    }
}
