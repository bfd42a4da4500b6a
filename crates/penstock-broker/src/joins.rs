//! Messages that are held back until a number of members have arrived.

use std::collections::BTreeMap;

use penstock_faults::planted;
use penstock_message::{JoinId, JoinPolicy, SeededMap, SeededState};

use crate::Position;
use crate::messages::Handle;
use crate::slab::Slab;

/// Bytes of the journal for the arrivals of 64 neighbours.
const ARRIVED_WORD_BYTES: u64 = 10;

/// Number of jobs that are kept, and the bytes that they take in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) jobs: u64,
    pub(crate) bytes: u64,
}

impl std::ops::AddAssign for Amount {
    fn add_assign(&mut self, other: Self) {
        self.jobs += other.jobs;
        self.bytes += other.bytes;
    }
}

impl std::ops::SubAssign for Amount {
    fn sub_assign(&mut self, other: Self) {
        self.jobs -= other.jobs;
        self.bytes -= other.bytes;
    }
}

#[derive(Debug)]
pub(crate) struct Join {
    pub(crate) id: JoinId,
    pub(crate) number: u64,
    pub(crate) count: u32,
    pub(crate) policy: JoinPolicy,
    /// Bitmap of the members, in words of 64, those with none left out. A client names the count and the
    /// index, so neither may cost anything: only arrivals do.
    arrived: BTreeMap<u32, u64>,
    pub(crate) arrivals: u32,
    /// Whether a member has failed: the messages that it holds are blocked.
    pub(crate) is_over: bool,
    /// Time of that, on the steady clock.
    pub(crate) over_at: u64,
    /// Messages that it holds. Some may have expired since.
    pub(crate) held: Vec<Handle>,
    /// Size of the join and of the messages that it still holds.
    pub(crate) kept: Amount,
    pub(crate) base: Position,
}

impl Join {
    pub(crate) fn has_arrived(&self, index: u32) -> bool {
        let word = self.arrived.get(&(index / 64)).copied().unwrap_or(0);
        word >> (index % 64) & 1 == 1
    }

    /// Notes that a member has arrived; false when it had arrived before.
    pub(crate) fn arrive(&mut self, index: u32) -> bool {
        if self.has_arrived(index) && !planted!("count-member-twice") {
            return false;
        }
        *self.arrived.entry(index / 64).or_default() |= 1 << (index % 64);
        self.arrivals += 1;
        true
    }

    /// Returns the members that have arrived, as (index / 64, bits).
    pub(crate) fn arrived(&self) -> Vec<(u32, u64)> {
        let words = self.arrived.iter();
        words.map(|(word, bits)| (*word, *bits)).collect()
    }

    /// Sets the members that have arrived, as the journal has them.
    pub(crate) fn restore(&mut self, arrived: &[(u32, u64)]) {
        for (word, bits) in arrived {
            let had = self.arrived.entry(*word).or_default();
            self.arrivals += (bits & !*had).count_ones();
            *had |= bits;
        }
    }

    pub(crate) fn journal_bytes(&self) -> u64 {
        64 + self.arrived.len() as u64 * ARRIVED_WORD_BYTES
    }
}

#[derive(Debug, Default)]
pub(crate) struct Joins {
    joins: Slab<Join>,
    by_id: SeededMap<JoinId, u32>,
    opened: u64,
    /// Messages that stand in the journal before the join that holds them: the join was carried forward,
    /// and stands behind them now.
    early: SeededMap<JoinId, Vec<Handle>>,
}

impl Joins {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_id: SeededMap::with_hasher(hashing),
            early: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> [SeededState; 2] {
        [*self.by_id.hasher(), *self.early.hasher()]
    }

    pub(crate) fn find(&self, id: &JoinId) -> Option<u32> {
        self.by_id.get(id).copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Join> {
        self.joins.get(slot)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Join)> {
        self.joins.iter()
    }

    pub(crate) fn open(&mut self, id: JoinId, count: u32, policy: JoinPolicy) -> u32 {
        self.opened += 1;
        let slot = self.joins.insert(Join {
            id,
            number: self.opened,
            count,
            policy,
            arrived: BTreeMap::new(),
            arrivals: 0,
            is_over: false,
            over_at: 0,
            held: self.early.remove(&id).unwrap_or_default(),
            kept: Amount::default(),
            base: Position(0),
        });
        self.by_id.insert(id, slot);
        slot
    }

    /// Has the join hold the message, now or when the journal comes to it.
    pub(crate) fn hold(&mut self, id: JoinId, message: Handle) {
        match self.find(&id) {
            Some(slot) => self.joins[slot].held.push(message),
            None => self.early.entry(id).or_default().push(message),
        }
    }

    /// Lists the messages that the join holds, or will when the journal comes to it.
    pub(crate) fn held_by(&self, id: &JoinId) -> &[Handle] {
        match self.find(id) {
            Some(slot) => &self.joins[slot].held,
            None => self.early.get(id).map_or(&[], Vec::as_slice),
        }
    }

    /// Takes the messages of a join that the journal names before it.
    pub(crate) fn take_early(&mut self, id: &JoinId) -> Vec<Handle> {
        self.early.remove(id).unwrap_or_default()
    }

    /// Takes the messages whose join is nowhere in the journal.
    pub(crate) fn take_all_early(&mut self) -> Vec<(JoinId, Vec<Handle>)> {
        let mut early: Vec<(JoinId, Vec<Handle>)> = self.early.drain().collect();
        early.sort_unstable_by_key(|(id, _)| *id);
        early
    }

    pub(crate) fn close(&mut self, slot: u32) -> Join {
        let join = self.joins.remove(slot);
        self.by_id.remove(&join.id);
        join
    }
}

impl std::ops::Index<u32> for Joins {
    type Output = Join;

    fn index(&self, slot: u32) -> &Join {
        &self.joins[slot]
    }
}

impl std::ops::IndexMut<u32> for Joins {
    fn index_mut(&mut self, slot: u32) -> &mut Join {
        &mut self.joins[slot]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client may hold messages for sixteen million members, tell of the last one, and go. That used
    /// to take 2 MB, a walk over all of them at each carry, and hundreds of megabytes in the account
    /// of what lives, so that the journal did not shrink again.
    #[test]
    fn a_join_costs_what_has_arrived_and_not_what_a_client_says() {
        let mut joins = Joins::default();
        let slot = joins.open(
            penstock_message::MessageId([1; 16]),
            1 << 24,
            JoinPolicy::AllEnded,
        );
        let join = &mut joins[slot];
        let empty_bytes = join.journal_bytes();
        let last = (1 << 24) - 1;
        for index in [last, 0, 64, last - 1] {
            assert!(join.arrive(index));
            assert!(!join.arrive(index));
        }
        assert_eq!(join.journal_bytes(), empty_bytes + 3 * ARRIVED_WORD_BYTES);
        assert_eq!(join.arrived(), [(0, 1), (1, 1), (last / 64, 3 << 62)]);
        assert!(!join.has_arrived(1) && join.has_arrived(last));
    }
}
