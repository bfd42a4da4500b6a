//! Values of messages that the broker has ended, in the order in which they expire.
//!
//! Such a value has no body. It is derived from how and when its message ended, so all it takes is the message's entry
//! (see `messages.rs`) and an entry here.

use std::collections::{BTreeMap, BTreeSet};

use crate::messages::Messages;
use crate::table::fifo::Fifo;

/// Size of such a value among the bytes of results: the size of its entries.
pub(crate) const ENDED_VALUE_BYTES: u64 = 64;

#[derive(Debug, Default)]
pub(crate) struct EndedValues {
    /// Messages in the order in which they ended, by the time for which their results are kept, as (slot, lower half of
    /// the number). Some may be stale.
    by_ttl: BTreeMap<u64, Fifo<(u32, u32)>>,
    /// Number of values.
    pub(crate) len: u64,
    /// Times to live that have a timer.
    pub(crate) timed: BTreeSet<u64>,
}

impl EndedValues {
    pub(crate) fn push(&mut self, ttl_ms: u64, slot: u32, number: u64) {
        self.len += 1;
        let fifo = self.by_ttl.entry(ttl_ms).or_default();
        fifo.push_back((slot, number as u32));
    }

    /// Notes that a value was removed from the messages; its entry here is stale.
    pub(crate) fn note_removed(&mut self) {
        self.len -= 1;
    }

    /// Returns the oldest value with this time to live, if any is left.
    pub(crate) fn first(&mut self, ttl_ms: u64, messages: &Messages) -> Option<u32> {
        let fifo = self.by_ttl.get_mut(&ttl_ms)?;
        while let Some((slot, number)) = fifo.front() {
            let entry = messages.by_slot(slot);
            if entry.is_some_and(|entry| entry.is_ended() && entry.number() as u32 == number) {
                return Some(slot);
            }
            fifo.pop_front();
        }
        self.by_ttl.remove(&ttl_ms);
        None
    }

    /// Moves the first value with this time to live behind the others, to keep it beyond its time.
    pub(crate) fn move_first_to_back(&mut self, ttl_ms: u64) {
        if let Some(fifo) = self.by_ttl.get_mut(&ttl_ms)
            && let Some(first) = fifo.front()
        {
            fifo.pop_front();
            fifo.push_back(first);
        }
    }

    /// Returns the oldest value.
    pub(crate) fn oldest(&mut self, messages: &Messages) -> Option<u32> {
        let ttls: Vec<u64> = self.by_ttl.keys().copied().collect();
        let firsts = ttls.into_iter().filter_map(|ttl| self.first(ttl, messages));
        firsts.min_by_key(|slot| (messages.ended(*slot).at, messages[*slot].number()))
    }

    /// Returns the times to live that have values.
    pub(crate) fn ttls(&self) -> impl Iterator<Item = u64> {
        self.by_ttl.keys().copied()
    }

    /// Sorts the values by time after a recovery, which reads them in journal order.
    pub(crate) fn rebuild(&mut self, messages: &Messages) {
        let ended = messages.iter().filter(|(_, entry)| entry.is_ended());
        let mut ended: Vec<(u64, u64, u32)> = ended
            .map(|(slot, entry)| (messages.ended(slot).at, entry.number(), slot))
            .collect();
        ended.sort_unstable();
        *self = Self::default();
        for (_, number, slot) in ended {
            let ttl_ms = messages.shared_head(slot).result_ttl_ms.unwrap_or(0);
            self.push(ttl_ms, slot, number);
        }
    }
}
