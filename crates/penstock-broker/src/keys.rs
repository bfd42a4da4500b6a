//! Values stored next to the queues, their watchers, and keys that belong to messages.

pub(crate) mod stored_value;
pub(crate) mod watchers;
pub(crate) mod watches;

use penstock_message::{Key, SeededMap, SeededState};
use rustc_hash::FxHashMap;

use crate::keys::stored_value::{StoredValue, ValueHandle};
use crate::keys::watchers::Watchers;
use crate::messages::Handle;
use crate::table::fifo::Fifo;
use crate::table::interner::Name;
use crate::table::slab::Slab;
use crate::table::slot_index::SlotIndex;
use crate::table::u48::U48;

/// Maximum number of results passed over in one search for a result to drop.
const SPARED_AT_ONCE: usize = 64;

/// Values that share a size cap.
#[derive(Debug, Default)]
struct ValueGroup {
    bytes: u64,
    /// Results in order of arrival; some may be stale.
    order: Fifo<ValueHandle>,
    results: usize,
    was_told: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Keys {
    values: Slab<StoredValue>,
    by_key: SlotIndex,
    results: u64,
    claims: SeededMap<Key, Handle>,
    /// Groups that have results, and groups that a notice named as over the cap.
    groups: FxHashMap<Name, ValueGroup>,
    pub(crate) watchers: Watchers,
    stored: u64,
    pub(crate) results_bytes: u64,
    pub(crate) evicted: u64,
}

impl Keys {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_key: SlotIndex::new(hashing),
            claims: SeededMap::with_hasher(hashing),
            watchers: Watchers::new(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> [SeededState; 3] {
        let Self {
            claims, watchers, ..
        } = self;
        [self.by_key.hashing(), *claims.hasher(), watchers.hashing()]
    }

    pub(crate) fn find(&self, key: &Key) -> Option<u32> {
        let is_it = |slot: u32| self.values[slot].has_key(key);
        self.by_key.find(self.by_key.hash(key), is_it)
    }

    pub(crate) fn value(&self, key: &Key) -> Option<&StoredValue> {
        self.find(key).map(|slot| &self.values[slot])
    }

    pub(crate) fn get(&self, value: ValueHandle) -> Option<&StoredValue> {
        self.values
            .get(value.slot)
            .filter(|stored| stored.number == value.number)
    }

    pub(crate) fn by_slot(&self, slot: u32) -> Option<&StoredValue> {
        self.values.get(slot)
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut StoredValue {
        &mut self.values[slot]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &StoredValue> {
        self.values.iter().map(|(_, stored)| stored)
    }

    pub(crate) fn results(&self) -> u64 {
        self.results
    }

    /// Inserts a value. Returns the key's earlier value too.
    pub(crate) fn insert(&mut self, mut stored: StoredValue) -> (ValueHandle, Option<StoredValue>) {
        self.stored += 1;
        assert!(
            self.stored <= U48::MAX,
            "more values than 48 bits can count"
        );
        let number = U48::new(self.stored);
        stored.number = number;
        let result = stored.is_result().then(|| (stored.group, stored.bytes()));
        let slot = self.values.insert(stored);
        let value = ValueHandle { slot, number };
        let Self { values, by_key, .. } = self;
        let key = values[slot].key();
        let is_it = |other: u32| values[other].has_key(&key);
        let earlier = by_key.put(by_key.hash(&key), slot, is_it);
        let earlier = earlier.map(|earlier| self.take(earlier));
        if let Some((group, bytes)) = result {
            self.results += 1;
            self.results_bytes += bytes;
            let group = self.groups.entry(group).or_default();
            group.bytes += bytes;
            group.results += 1;
            group.order.push_back(value);
        }
        (value, earlier)
    }

    pub(crate) fn remove(&mut self, key: &Key) -> Option<StoredValue> {
        let Self { values, by_key, .. } = self;
        let is_it = |slot: u32| values[slot].has_key(key);
        let slot = by_key.remove(by_key.hash(key), is_it)?;
        Some(self.take(slot))
    }

    /// Removes a value that is no longer in the index.
    fn take(&mut self, slot: u32) -> StoredValue {
        let stored = self.values.remove(slot);
        if stored.is_result() {
            let bytes = stored.bytes();
            self.results -= 1;
            self.results_bytes -= bytes;
            let values = &self.values;
            let group = self.groups.get_mut(&stored.group);
            let group = group.expect("a result is in its group");
            group.bytes -= bytes;
            group.results -= 1;
            if group.results == 0 && !group.was_told {
                self.groups.remove(&stored.group);
                if self.groups.capacity() > 1024 && self.groups.len() < self.groups.capacity() / 8 {
                    self.groups.shrink_to(2 * self.groups.len());
                }
            } else if group.order.len() > 2 * group.results + 64 {
                group.order.retain(|value| is_stored(values, value));
            }
        }
        stored
    }

    /// Returns the oldest result of a group over the cap that nobody watches and that is not pinned; `None` also if
    /// many in a row are.
    pub(crate) fn next_to_evict(
        &mut self,
        group: Name,
        cap_bytes: u64,
        is_pinned: impl Fn(&Key) -> bool,
    ) -> Option<Key> {
        let group = self.groups.get_mut(&group)?;
        if group.bytes <= cap_bytes {
            return None;
        }
        let mut spared = 0;
        while spared < SPARED_AT_ONCE
            && let Some(value) = group.order.pop_front()
        {
            if !is_stored(&self.values, value) {
                continue;
            }
            let key = self.values[value.slot].key();
            if !self.watchers.is_watched(&key) && !is_pinned(&key) {
                return Some(key);
            }
            // A watched value is about to be read, and a pinned one may be; it counts as new.
            group.order.push_back(value);
            spared += 1;
        }
        None
    }

    /// Notes that a notice names the group. Returns true the first time. The group is kept from then on.
    pub(crate) fn must_report_eviction(&mut self, group: Name) -> bool {
        !std::mem::replace(&mut self.groups.entry(group).or_default().was_told, true)
    }

    /// Returns the groups that a notice named.
    pub(crate) fn reported_groups(&self) -> impl Iterator<Item = Name> {
        let groups = self.groups.iter().filter(|(_, group)| group.was_told);
        groups.map(|(name, _)| *name)
    }

    pub(crate) fn claim(&mut self, key: Key, message: Handle) {
        self.claims.insert(key, message);
    }

    pub(crate) fn owner(&self, key: &Key) -> Option<Handle> {
        self.claims.get(key).copied()
    }

    pub(crate) fn claims(&self) -> usize {
        self.claims.len()
    }

    pub(crate) fn end_claim(&mut self, key: &Key) {
        self.claims.remove(key);
        if self.claims.capacity() > 1024 && self.claims.len() < self.claims.capacity() / 8 {
            self.claims.shrink_to(2 * self.claims.len());
        }
    }
}

fn is_stored(values: &Slab<StoredValue>, value: ValueHandle) -> bool {
    values
        .get(value.slot)
        .is_some_and(|stored| stored.number == value.number)
}
