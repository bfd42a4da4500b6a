//! Checks recoveries: a crash may take back a suffix of the decisions, but nothing confirmed.

use std::collections::{BTreeMap, BTreeSet};

use penstock_broker::Broker;
use penstock_message::{Durability, Receipt};

use super::story::Event;
use super::{Checker, Crash, Decided};
use crate::model::{Time, Verdict};

/// Number of the last transactions whose receipts a session can still ask for.
const RECEIPTS_KEPT: u64 = 1024;

impl Checker {
    /// Checks a new broker that has recovered its predecessor's journal up to this record.
    pub fn recovered(
        &mut self,
        crash: Crash,
        broker: &Broker,
        now: Time,
        found_through: u64,
    ) -> Verdict {
        self.counts.crashes += 1;
        self.views.clear();
        self.hearings.clear();
        self.current.clear();
        self.deliveries.clear();
        self.ready.clear();
        self.waits.clear();
        self.knows_boot &= crash != Crash::PowerCut;
        if !self.knows_boot {
            // The journal may not have recorded that step, so the new broker's steady clock may be off by as much.
            self.model.clock_is_doubtful |= self.wall_was_set_by_ms > 0;
            self.model.clock_is_off_by_ms += std::mem::take(&mut self.wall_was_set_by_ms);
        }
        let mut first_lost = None;
        // Sessions that were away for this long may be forgotten, and then nobody can ask.
        let (mut last_seqs, mut unknown) = (BTreeMap::new(), BTreeSet::new());
        for (session, seq) in self.by_seq.keys() {
            last_seqs.insert(*session, *seq);
        }
        for session in last_seqs.keys() {
            let is_known = broker.decision(session, 0).is_some();
            if !is_known && self.model.may_be_forgotten(session, now) {
                unknown.insert(*session);
            }
        }
        for (number, decided) in &self.txs {
            let Decided {
                session,
                seq,
                receipt,
                durability,
                ..
            } = decided;
            let was_found = decided.position <= found_through;
            let cannot_be_asked = unknown.contains(session)
                && (*number <= self.safe_through || was_found)
                || self.reopened.get(session).is_some_and(|at| seq <= at);
            // A forgotten session has sent it again since, as another transaction.
            let is_stale = self.by_seq.get(&(*session, *seq)) != Some(number);
            if cannot_be_asked || is_stale {
                continue;
            }
            let plain = Receipt::applied();
            let is_long_ago = seq + RECEIPTS_KEPT <= last_seqs[session];
            match (broker.decision(session, *seq), first_lost) {
                (Some(found), None) if found == *receipt || found == plain && is_long_ago => {}
                (Some(found), None) => {
                    return Err(format!(
                        "transaction {number} was {receipt:?}, and is recovered as {found:?}"
                    ));
                }
                (Some(_), Some(lost)) => {
                    return Err(format!(
                        "transaction {lost} was lost, but {number} after it was not"
                    ));
                }
                (None, _) => {
                    first_lost.get_or_insert(*number);
                    let must_be_there = match crash {
                        Crash::Killed => *durability >= Durability::Os,
                        Crash::PowerCut | Crash::DiskFailed => *durability == Durability::Disk,
                    };
                    if decided.is_public && must_be_there {
                        return Err(format!(
                            "transaction {number} ({durability:?}) was seen, and is lost: {:?}",
                            decided.tx
                        ));
                    }
                    if *number <= self.base_tx {
                        return Err(format!(
                            "transaction {number} was on disk, and is lost: {:?}",
                            decided.tx
                        ));
                    }
                }
            }
        }
        self.safe_through = self.told;
        let were_early = self.forget_deadlines(broker, found_through)
            | self.forget_scheduled(broker, found_through)?;
        if let Some(lost) = first_lost {
            self.counts.lost += self.told + 1 - lost;
            self.safe_through = lost - 1;
            self.retell_until(lost);
        } else if were_early {
            self.retell_until(self.told + 1);
        }
        self.time(now);
        self.tell(Event::Restarted(self.longest_heartbeat_ms))?;
        self.begin_story();
        // The next crash may take back the decisions that this broker has already made.
        self.look_at_recovered(broker)
    }
}
