//! Values stored next to the queues, their watchers, and keys that belong to messages.

pub(crate) mod watchers;
pub(crate) mod watches;

use bytes::Bytes;
use penstock_message::{Key, MessageId, Scope, SeededMap, SeededState, Value, ValueStatus};
use rustc_hash::FxHashMap;

use crate::Position;
use crate::held_effects::SafeAfter;
use crate::keys::watchers::Watchers;
use crate::messages::Handle;
use crate::records::RunHead;
use crate::table::fifo::Fifo;
use crate::table::interner::Name;
use crate::table::slab::Slab;
use crate::table::slot_index::SlotIndex;

#[derive(Debug)]
pub(crate) struct StoredValue {
    key: StoredKey,
    /// Feature that the key belongs to. (Inside the key it would take eight bytes more.)
    scope: Option<Scope>,
    pub(crate) status: ValueStatus,
    pub(crate) body: Bytes,
    pub(crate) group: Name,
    /// Expiry on the steady clock; [`NEVER`] if it is kept for good. (An option would take eight bytes more.)
    pub(crate) expires_at: u64,
    pub(crate) run: Option<StoredRun>,
    /// Number that distinguishes the value from later ones in the same slot.
    pub(crate) number: u64,
    pub(crate) base: Position,
    pub(crate) safe_after: SafeAfter,
}

/// A [`Key`] without its scope.
#[derive(Debug)]
enum StoredKey {
    Result(MessageId),
    Bytes(Bytes),
}

/// Maximum number of results passed over in one search for a result to drop.
const SPARED_AT_ONCE: usize = 64;

/// Expiry of values that never expire.
pub(crate) const NEVER: u64 = u64::MAX;

/// A [`RunHead`] in 16 bytes, since there may be millions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRun {
    queue: Name,
    attempt: u32,
    /// Time in the lower 48 bits, the generation above.
    ended: u64,
}

impl StoredRun {
    const TIME_BITS: u32 = 48;

    pub(crate) fn new(run: RunHead) -> Self {
        let time = run.ended_at & ((1 << Self::TIME_BITS) - 1);
        let generation = u64::from(run.generation.min(u32::from(u16::MAX)));
        Self {
            queue: run.queue,
            attempt: run.attempt,
            ended: generation << Self::TIME_BITS | time,
        }
    }

    pub(crate) fn head(self) -> RunHead {
        RunHead {
            queue: self.queue,
            attempt: self.attempt,
            generation: (self.ended >> Self::TIME_BITS) as u32,
            ended_at: self.ended & ((1 << Self::TIME_BITS) - 1),
        }
    }
}

impl StoredValue {
    pub(crate) fn new(
        key: Key,
        value: Value,
        group: Name,
        expires_at: Option<u64>,
        run: Option<RunHead>,
        at: (Position, SafeAfter),
    ) -> Self {
        let (key, scope) = match key {
            Key::Result(id) => (StoredKey::Result(id), None),
            Key::Named(name) => (StoredKey::Bytes(name), None),
            Key::Scoped(scope, key) => (StoredKey::Bytes(key), Some(scope)),
        };
        Self {
            key,
            scope,
            status: value.status,
            body: value.body,
            group,
            expires_at: expires_at.unwrap_or(NEVER),
            run: run.map(StoredRun::new),
            number: 0,
            base: at.0,
            safe_after: at.1,
        }
    }

    pub(crate) fn key(&self) -> Key {
        match (&self.key, self.scope) {
            (StoredKey::Result(id), _) => Key::Result(*id),
            (StoredKey::Bytes(name), None) => Key::Named(name.clone()),
            (StoredKey::Bytes(key), Some(scope)) => Key::Scoped(scope, key.clone()),
        }
    }

    fn has_key(&self, key: &Key) -> bool {
        match (key, &self.key) {
            (Key::Result(id), StoredKey::Result(own)) => id == own,
            (Key::Named(name), StoredKey::Bytes(own)) => self.scope.is_none() && name == own,
            (Key::Scoped(scope, key), StoredKey::Bytes(own)) => {
                self.scope == Some(*scope) && key == own
            }
            _ => false,
        }
    }

    pub(crate) fn is_result(&self) -> bool {
        matches!(self.key, StoredKey::Result(_))
    }

    pub(crate) fn expires_at(&self) -> Option<u64> {
        (self.expires_at != NEVER).then_some(self.expires_at)
    }

    pub(crate) fn value(&self) -> Value {
        Value::new(self.status, self.body.clone())
    }

    /// Returns the bytes that the value counts against the cap, roughly those it takes in the journal.
    pub(crate) fn bytes(&self) -> u64 {
        let key = match &self.key {
            StoredKey::Result(id) => id.0.len(),
            StoredKey::Bytes(name) => name.len(),
        };
        (48 + key + self.body.len()) as u64
    }
}

/// Values that share a size cap.
#[derive(Debug, Default)]
struct ValueGroup {
    bytes: u64,
    /// Results in order of arrival; some may be stale.
    order: Fifo<(u32, u64)>,
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

    pub(crate) fn get(&self, slot: u32, number: u64) -> Option<&StoredValue> {
        self.values
            .get(slot)
            .filter(|stored| stored.number == number)
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

    /// Inserts a value. The caller has already removed the key's earlier value.
    pub(crate) fn insert(&mut self, mut stored: StoredValue) -> (u32, u64) {
        self.stored += 1;
        stored.number = self.stored;
        let number = stored.number;
        let result = stored.is_result().then(|| (stored.group, stored.bytes()));
        let slot = self.values.insert(stored);
        let Self { values, by_key, .. } = self;
        by_key.insert(by_key.hash(values[slot].key()), slot);
        if let Some((group, bytes)) = result {
            self.results += 1;
            self.results_bytes += bytes;
            let group = self.groups.entry(group).or_default();
            group.bytes += bytes;
            group.results += 1;
            group.order.push_back((slot, number));
        }
        (slot, number)
    }

    pub(crate) fn remove(&mut self, key: &Key) -> Option<StoredValue> {
        let Self { values, by_key, .. } = self;
        let is_it = |slot: u32| values[slot].has_key(key);
        let slot = by_key.remove(by_key.hash(key), is_it)?;
        let stored = self.values.remove(slot);
        if let Key::Result(_) = key {
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
                group
                    .order
                    .retain(|(slot, number)| is_stored(values, slot, number));
            }
        }
        Some(stored)
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
            && let Some((slot, number)) = group.order.pop_front()
        {
            if !is_stored(&self.values, slot, number) {
                continue;
            }
            let key = self.values[slot].key();
            if !self.watchers.is_watched(&key) && !is_pinned(&key) {
                return Some(key);
            }
            // A watched value is about to be read, and a pinned one may be; it counts as new.
            group.order.push_back((slot, number));
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

fn is_stored(values: &Slab<StoredValue>, slot: u32, number: u64) -> bool {
    values
        .get(slot)
        .is_some_and(|stored| stored.number == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_takes_128_bytes_beside_its_body() {
        assert_eq!(Slab::<StoredValue>::slot_bytes(), 128);
    }
}
