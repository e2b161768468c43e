//! Who is benched: failures are counted, verdicts passed and told, benches end.
//!
//! *Invariant*: a bench is never set on the last eligible server of a pool or of a group that requests can resolve to.
//! *Bound and cost*: a success or failure is O(1) unless it changes a verdict.
//! *Source*: the Lifeboat rules, section 9.

use super::{Dispatcher, Event};
use crate::clock::Nanos;
use crate::proto::backend::bench::Verdict;
use crate::proto::backend::table::Row;
use crate::proto::ids::BackendId;
use crate::proto::message::{Message, Urgency};

impl Dispatcher {
    pub(super) fn note_success(&mut self, now: Nanos, backend: BackendId) {
        let row = self.table.row_mut(backend);
        row.failures = 0;
        if row.verdict.level > 0 {
            // Later than the one it clears, also within one reading of the clock.
            let judged = Nanos(now.0.max(row.verdict.judged.0 + 1));
            let verdict = Verdict::cleared(judged, self.me);
            if row.verdict.benched(now) {
                self.events.push_back(Event::Unbenched { backend });
                self.benched_here.retain(|b| *b != backend);
            }
            self.pass_verdict(now, backend, verdict);
        }
    }

    pub(super) fn note_failure(&mut self, now: Nanos, backend: BackendId) {
        let rules = self.bench_rules;
        let row = self.table.row_mut(backend);
        row.failures = row.failures.saturating_add(1);
        // Requests that were under way when the bench began say nothing new.
        if rules.after == 0 || row.verdict.benched(now) {
            return;
        }
        // On probation one failure is enough.
        if row.failures < rules.after && row.verdict.level == 0 {
            return;
        }
        if self.is_last(now, backend) {
            return;
        }
        let (verdict, ms) = self.table.row(backend).verdict.again(now, self.me, &rules);
        self.pass_verdict(now, backend, verdict);
        if !self.benched_here.contains(&backend) {
            self.benched_here.push(backend);
        }
        self.events.push_back(Event::Benched { backend, ms });
    }

    /// Whether benching this server would leave its pool, or one of its groups, without an eligible server.
    pub(super) fn is_last(&self, now: Nanos, backend: BackendId) -> bool {
        let eligible = |id: &BackendId| *id != backend && self.table.row(*id).eligible(now);
        if let Some(pool) = self.catalog.server(backend).pool {
            let mut of_pool = self.table.ids().take(self.catalog.servers.len());
            if !of_pool.any(|id| self.catalog.server(id).pool == Some(pool) && eligible(&id)) {
                return true;
            }
        }
        let mut groups =
            self.router.groups_of(backend).iter().filter(|(id, _)| self.groups_current.contains(id));
        groups.any(|(id, _)| {
            let group = self.router.group(*id).expect("groups of a server exist");
            !group.candidates.iter().any(eligible)
        })
    }

    pub(super) fn pass_verdict(&mut self, now: Nanos, backend: BackendId, verdict: Verdict) {
        self.table.row_mut(backend).verdict.merge(verdict);
        let Verdict { until, judged, level, .. } = verdict;
        // Ahead of any permit business with that server, on the same ring.
        self.tell_peers(Message::Bench { backend, until, judged, level, by: self.me }, Urgency::Wake);
        self.refresh(now, backend);
    }

    /// Eligibility of a server may have changed.
    pub(super) fn refresh(&mut self, now: Nanos, backend: BackendId) {
        // Only ever earlier: a bench that has ended meanwhile still has to be seen by `handle_timeout`.
        let verdict = self.table.row(backend).verdict;
        if verdict.benched(now) {
            self.bench_ends = self.bench_ends.min(verdict.until);
        }
        self.router.refresh(now, backend, &self.table);
        if self.home.is_some() {
            self.eligibility_at_home(now, backend);
        }
    }

    /// Puts servers whose bench is over back.
    pub(super) fn end_benches(&mut self, now: Nanos) {
        let over = |row: &Row| row.verdict.until != Nanos::ZERO && !row.verdict.benched(now);
        let ids: Vec<_> = self.table.ids().filter(|id| over(self.table.row(*id))).collect();
        let left = self.table.rows().iter().map(|row| row.verdict.until).filter(|until| *until > now);
        self.bench_ends = left.min().unwrap_or(Nanos::NEVER);
        for id in ids {
            if let Some(i) = self.benched_here.iter().position(|b| *b == id) {
                self.benched_here.swap_remove(i);
                self.events.push_back(Event::Unbenched { backend: id });
            }
            self.refresh(now, id);
        }
    }
}
