//! Expiry times of stored values, of which there may be ten million, for days.
//!
//! In a heap, each would take 24 bytes, and up to as many again while the heap grows. Here they are in a list for each
//! second, and a list enters the heap of [`Timers`](super::Timers) when its second comes.

use std::collections::BTreeMap;

use crate::keys::stored_value::ValueHandle;
use crate::table::u48::U48;

/// Duration of a list. The remainder of a time fits into two bytes.
const LIST_MS: u64 = 1 << 10;
/// Maximum number of times that enter the heap in one step.
const AT_ONCE: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct ValueExpiries {
    /// Expiry times by the number of their list.
    lists: BTreeMap<u64, Vec<ListedExpiry>>,
    len: usize,
    /// Number of times known to be stale.
    stale: usize,
    /// Lists before this one are being emptied.
    open: u64,
}

#[derive(Clone, Copy, Debug)]
struct ListedExpiry {
    slot: u32,
    number: U48,
    after_ms: u16,
}

const _: () = assert!(size_of::<ListedExpiry>() == 12);

impl ListedExpiry {
    fn value(self) -> ValueHandle {
        ValueHandle {
            slot: self.slot,
            number: self.number,
        }
    }
}

impl ValueExpiries {
    /// Whether a time this late goes into a list, not into the heap.
    pub(super) fn covers(&self, at: u64) -> bool {
        at / LIST_MS >= self.open
    }

    pub(super) fn add(&mut self, at: u64, value: ValueHandle) {
        debug_assert!(self.covers(at));
        self.lists
            .entry(at / LIST_MS)
            .or_default()
            .push(ListedExpiry {
                slot: value.slot,
                number: value.number,
                after_ms: (at % LIST_MS) as u16,
            });
        self.len += 1;
    }

    /// Counts a time that is no longer wanted.
    pub(super) fn abandon(&mut self) {
        self.stale += 1;
    }

    /// Returns the time at which the first list enters the heap.
    pub(super) fn next_list_at(&self) -> Option<u64> {
        let (number, _) = self.lists.first_key_value()?;
        Some(number * LIST_MS)
    }

    /// Takes the times of lists whose second has come, as many as fit into one step.
    pub(super) fn take(&mut self, now: u64) -> Vec<(u64, ValueHandle)> {
        self.open = self.open.max(now / LIST_MS + 1);
        let mut taken = Vec::new();
        while taken.len() < AT_ONCE
            && let Some(mut first) = self.lists.first_entry()
            && *first.key() < self.open
        {
            let begin = *first.key() * LIST_MS;
            let list = first.get_mut();
            let from = list.len().saturating_sub(AT_ONCE - taken.len());
            let drained = list.drain(from..);
            taken.extend(drained.map(|each| (begin + u64::from(each.after_ms), each.value())));
            if list.is_empty() {
                first.remove();
            }
        }
        self.len -= taken.len();
        taken
    }

    /// Drops stale times once they are the majority; each pays for its own sweep.
    pub(super) fn sweep(&mut self, at_once: bool, is_wanted: impl Fn(ValueHandle) -> bool) {
        if !(at_once || self.stale > 1024 && self.stale > self.len / 2) {
            return;
        }
        self.lists.retain(|_, list| {
            list.retain(|each| is_wanted(each.value()));
            if list.len() < list.capacity() / 2 {
                list.shrink_to_fit();
            }
            !list.is_empty()
        });
        self.len = self.lists.values().map(Vec::len).sum();
        self.stale = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(slot: u32) -> ValueHandle {
        ValueHandle {
            slot,
            number: U48::new(u64::from(slot) + 1),
        }
    }

    #[test]
    fn a_list_is_taken_when_its_second_comes_and_not_all_at_once() {
        let mut expiries = ValueExpiries::default();
        let count = 2500;
        for slot in 0..count {
            expiries.add(5000 + u64::from(slot % 100), value(slot));
        }
        expiries.add(90_000, value(count));
        let begin = 5000 / LIST_MS * LIST_MS;
        assert_eq!(expiries.next_list_at(), Some(begin));
        assert!(expiries.take(begin - 1).is_empty());
        let mut taken = Vec::new();
        for step in [1024, 1024, 452, 0] {
            let some = expiries.take(begin);
            assert_eq!(some.len(), step);
            taken.extend(some);
        }
        taken.sort_by_key(|(_, value)| value.slot);
        for (slot, (at, taken)) in taken.into_iter().enumerate() {
            assert_eq!((at, taken), (5000 + slot as u64 % 100, value(slot as u32)));
        }
        assert!(!expiries.covers(5000) && expiries.covers(begin + LIST_MS));
        assert_eq!(expiries.next_list_at(), Some(90_000 / LIST_MS * LIST_MS));
    }

    #[test]
    fn times_of_values_that_are_gone_are_dropped_once_they_are_the_majority() {
        let mut expiries = ValueExpiries::default();
        for slot in 0..4000 {
            expiries.add(1_000_000 + u64::from(slot) * 100, value(slot));
        }
        let is_kept = |value: ValueHandle| value.slot >= 3000;
        for _ in 0..2000 {
            expiries.abandon();
        }
        expiries.sweep(false, is_kept);
        assert_eq!(expiries.len, 4000);
        for _ in 0..1000 {
            expiries.abandon();
        }
        expiries.sweep(false, is_kept);
        assert_eq!((expiries.len, expiries.stale), (1000, 0));
        assert_eq!(expiries.take(u64::MAX / 2).len(), 1000);
        assert!(expiries.lists.is_empty());
    }
}
