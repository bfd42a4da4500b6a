//! Client processes, as the broker remembers them through any number of connections.
//!
//! The numbers of a session's transactions are consecutive, so a single high-water mark says which were decided. Only
//! answers other than a plain `Applied` are kept besides.

use std::collections::VecDeque;

use penstock_faults::planted;
use penstock_message::{Op, Receipt, SeededMap, SeededState, SessionId};
use rustc_hash::FxHashMap;

use crate::held_effects::{HeldEffects, SafeAfter};
use crate::table::slab::Slab;
use crate::{ConnId, Position};

/// Number of recent transactions whose exceptional receipts are kept. No client has more in flight.
const RECEIPTS_KEPT: u64 = 1024;

#[derive(Debug)]
pub(crate) struct BrokerSession {
    pub(crate) id: SessionId,
    /// Number by which records refer to it.
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) heartbeat_ms: u64,
    pub(crate) conn: Option<ConnId>,
    /// Changes when timers that wait for the session to stay away must no longer fire.
    pub(crate) generation: u64,
    /// Steady time at which its connection closed, as journaled.
    pub(crate) left_at: Option<u64>,
    /// Number up to which all transactions are decided.
    pub(crate) applied: u64,
    /// Number up to which all transactions are as safe as requested.
    pub(crate) confirmed: u64,
    /// Number up to which all were confirmed on the present connection.
    pub(crate) told: u64,
    /// Highest number that the client had used, by its own account, when it connected. Lower numbers may be missing:
    /// they were confirmed with little durability, and lost in a crash.
    pub(crate) may_skip_through: u64,
    /// Whether the session was opened for a client that had used numbers before. The client may not yet know that it
    /// was forgotten, since the Welcome that says so may not have arrived. A commit shows that it has.
    pub(crate) is_forgotten: bool,
    receipts: VecDeque<(u64, Receipt)>,
    /// Decisions that are not yet safe, in order.
    unconfirmed: VecDeque<UnconfirmedTx>,
    /// Whether the broker's list of sessions that wait includes it.
    pub(crate) is_listed: bool,
    /// Number of these that might be safe before the first.
    out_of_turn: usize,
    /// Transactions confirmed out of turn, not yet reported to the client.
    early: Vec<u64>,
    /// Slots of the messages that it holds leases of, in no particular order.
    pub(crate) leases: Vec<u32>,
    pub(crate) pending_parts: Option<PendingParts>,
    /// Epoch of the broker that last received its hello, and judged its leases then.
    pub(crate) judged_in: u32,
    pub(crate) base: Position,
}

#[derive(Debug)]
struct UnconfirmedTx {
    first: u64,
    last: u64,
    safe_after: SafeAfter,
    was_told: bool,
}

/// Parts of a transaction that has not arrived completely.
#[derive(Debug)]
pub(crate) struct PendingParts {
    pub(crate) seq: u64,
    pub(crate) ops: Vec<Op>,
    pub(crate) bytes: usize,
    /// Whether the parts exceeded the cap. They are dropped as they arrive, and the whole transaction is refused.
    pub(crate) is_too_large: bool,
}

/// Content of an `Output::Confirm`.
#[derive(Debug)]
pub(crate) struct Confirmation {
    pub(crate) through: u64,
    pub(crate) receipts: Vec<(u64, Receipt)>,
    pub(crate) early: Vec<u64>,
}

impl BrokerSession {
    /// Notes that numbers from `first` to `last` were decided.
    pub(crate) fn decided(&mut self, first: u64, last: u64, safe_after: SafeAfter) {
        debug_assert!(first > self.applied && first <= last);
        self.applied = last;
        if let Some(before) = self.unconfirmed.back()
            && before.safe_after != safe_after
        {
            self.out_of_turn += 1;
        }
        self.unconfirmed.push_back(UnconfirmedTx {
            first,
            last,
            safe_after,
            was_told: false,
        });
    }

    /// Restores the number up to which all were decided from the journal, where everything is safe.
    pub(crate) fn restore(&mut self, applied: u64) {
        self.applied = self.applied.max(applied);
        self.confirmed = self.applied;
        self.told = self.applied;
        self.forget_receipts();
    }

    /// Keeps an exceptional receipt. Only the first counts: a record that was carried forward may repeat it.
    pub(crate) fn keep_receipt(&mut self, seq: u64, receipt: Receipt) {
        if planted!("forget-refusal") {
            return;
        }
        if let Err(at) = self.receipts.binary_search_by_key(&seq, |(seq, _)| *seq) {
            self.receipts.insert(at, (seq, receipt));
        }
    }

    /// Drops receipts that no resend can need any more.
    pub(crate) fn forget_receipts(&mut self) {
        let keep_from = (self.applied + 1)
            .saturating_sub(RECEIPTS_KEPT)
            .min(self.told + 1);
        while self
            .receipts
            .front()
            .is_some_and(|(seq, _)| *seq < keep_from)
        {
            self.receipts.pop_front();
        }
    }

    /// Returns the receipt of a decided transaction.
    pub(crate) fn receipt(&self, seq: u64) -> Receipt {
        let exceptional = self
            .receipts
            .iter()
            .find(|(exceptional, _)| *exceptional == seq);
        exceptional.map_or(Receipt::applied(), |(_, receipt)| receipt.clone())
    }

    pub(crate) fn receipts(&self) -> impl Iterator<Item = &(u64, Receipt)> {
        self.receipts.iter()
    }

    /// Returns the number up to which a client that connects need not resend. It stops at an exceptional receipt, which
    /// the client may not know: it would believe that the transaction was applied.
    pub(crate) fn plainly_applied(&self) -> u64 {
        self.receipts
            .front()
            .map_or(self.confirmed, |(seq, _)| self.confirmed.min(seq - 1))
    }

    /// Confirms decisions that have become safe. Returns whether there is news for the client.
    pub(crate) fn confirm(&mut self, effects: &HeldEffects) -> bool {
        while let Some(first) = self.unconfirmed.front()
            && effects.is_safe(first.safe_after)
        {
            self.confirmed = first.last;
            self.unconfirmed.pop_front();
        }
        if self.unconfirmed.len() < 2 {
            self.out_of_turn = 0;
        }
        if self.out_of_turn > 0 {
            for waiting in self.unconfirmed.iter_mut().skip(1) {
                if !waiting.was_told && effects.is_safe(waiting.safe_after) {
                    waiting.was_told = true;
                    self.early.extend(waiting.first..=waiting.last);
                }
            }
        }
        self.confirmed > self.told || !self.early.is_empty()
    }

    pub(crate) fn is_all_confirmed(&self) -> bool {
        self.unconfirmed.is_empty()
    }

    /// Begins a new connection: confirms sent to the last one may not have arrived.
    pub(crate) fn begin_connection(&mut self) {
        self.told = self.plainly_applied();
        self.early.clear();
        for waiting in &mut self.unconfirmed {
            waiting.was_told = false;
        }
    }

    pub(crate) fn take_confirmation(&mut self) -> Option<Confirmation> {
        if self.confirmed <= self.told && self.early.is_empty() {
            return None;
        }
        let early = std::mem::take(&mut self.early);
        let told = std::mem::replace(&mut self.told, self.confirmed);
        let is_new = |seq: u64| (seq > told && seq <= self.confirmed) || early.contains(&seq);
        let receipts = if self.receipts.is_empty() {
            Vec::new()
        } else {
            self.receipts
                .iter()
                .filter(|(seq, _)| is_new(*seq))
                .cloned()
                .collect()
        };
        Some(Confirmation {
            through: self.confirmed,
            receipts,
            early,
        })
    }
}

#[derive(Debug, Default)]
pub(crate) struct Sessions {
    sessions: Slab<BrokerSession>,
    by_id: SeededMap<SessionId, u32>,
    by_number: FxHashMap<u64, u32>,
    /// Highest number in use.
    pub(crate) numbers: u64,
    generations: u64,
}

impl Sessions {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_id: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.by_id.hasher()
    }

    pub(crate) fn find(&self, id: &SessionId) -> Option<u32> {
        self.by_id.get(id).copied()
    }

    pub(crate) fn by_number(&self, number: u64) -> Option<u32> {
        self.by_number.get(&number).copied()
    }

    pub(crate) fn get(&self, index: u32) -> Option<&BrokerSession> {
        self.sessions.get(index)
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut BrokerSession> {
        self.sessions
            .get(index)
            .is_some()
            .then(|| &mut self.sessions[index])
    }

    pub(crate) fn open(&mut self, number: u64, id: SessionId, applied: u64) -> u32 {
        self.numbers = self.numbers.max(number);
        let index = self.sessions.insert(BrokerSession {
            id,
            number,
            name: String::new(),
            heartbeat_ms: 0,
            conn: None,
            generation: 0,
            left_at: None,
            applied,
            confirmed: applied,
            told: applied,
            may_skip_through: 0,
            is_forgotten: false,
            receipts: VecDeque::new(),
            unconfirmed: VecDeque::new(),
            is_listed: false,
            out_of_turn: 0,
            early: Vec::new(),
            leases: Vec::new(),
            pending_parts: None,
            judged_in: 0,
            base: Position(0),
        });
        self.by_id.insert(id, index);
        self.by_number.insert(number, index);
        index
    }

    /// Makes timers that were set for this session stale. No two sessions ever share a generation.
    pub(crate) fn next_generation(&mut self, index: u32) -> u64 {
        self.generations += 1;
        self.sessions[index].generation = self.generations;
        self.generations
    }

    pub(crate) fn remove(&mut self, index: u32) -> BrokerSession {
        let session = self.sessions.remove(index);
        // A repaired journal may lack the record that forgot an older session with this id.
        if self.by_id.get(&session.id) == Some(&index) {
            self.by_id.remove(&session.id);
        }
        self.by_number.remove(&session.number);
        session
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &BrokerSession)> {
        self.sessions.iter()
    }
}

impl std::ops::Index<u32> for Sessions {
    type Output = BrokerSession;

    fn index(&self, index: u32) -> &BrokerSession {
        &self.sessions[index]
    }
}

impl std::ops::IndexMut<u32> for Sessions {
    fn index_mut(&mut self, index: u32) -> &mut BrokerSession {
        &mut self.sessions[index]
    }
}
