//! Finds slots by the content of their entries. A slot takes eight bytes here and a tag. Its hash is stored next to it,
//! so the table grows without looking at entries, and a lookup hardly ever looks at a wrong one.
//!
//! The table is divided into shards, so that no insertion has to move more than a small part of it, and a shard that
//! has become much too large for its content shrinks. Shards differ in size. Equal ones would all grow within the same
//! few insertions, and half of a burst would be spent on moving.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use penstock_message::SeededState;

const SHARDS: usize = 256;
/// Capacity below which a shard is not worth shrinking.
const SMALL: usize = 256;

#[derive(Debug)]
pub(crate) struct SlotIndex {
    hashing: SeededState,
    shards: Vec<HashTable<IndexEntry>>,
}

#[derive(Clone, Copy, Debug)]
struct IndexEntry {
    hash: Hash,
    slot: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hash(u32);

impl Default for SlotIndex {
    fn default() -> Self {
        Self::new(SeededState::default())
    }
}

impl Hash {
    /// Returns the shard. Code that enters many slots does so in the order of shards, each of which then fits into the
    /// cache.
    ///
    /// The first shard gets half as many as the last, and those in between rise evenly: two thirds of the hashes are
    /// spread evenly, and a third by the larger of two even draws. (Computed from the square root of the hash, the shard
    /// cost 40 cycles before the table could even be looked at, half a dozen times a job.)
    #[inline]
    pub(crate) fn shard(self) -> usize {
        let [which, _, other, one] = self.0.to_le_bytes();
        usize::from(one.max(if which < 85 { other } else { 0 }))
    }

    /// Mixes the hash for a table, which takes a position from the lowest bits and a tag from the highest. (Hashes in
    /// one shard have bits of the hash itself in common.)
    #[inline]
    fn spread(self) -> u64 {
        let mixed = u64::from(self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 32
    }
}

/// Returns about how many of `all` are in this shard.
fn share(shard: usize, all: usize) -> usize {
    all * (2 * SHARDS + 2 * shard) / (3 * SHARDS * SHARDS)
}

impl SlotIndex {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            hashing,
            shards: vec![HashTable::new(); SHARDS],
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        self.hashing
    }

    #[inline]
    pub(crate) fn hash(&self, what: impl std::hash::Hash) -> Hash {
        let hash = self.hashing.hash_one(what);
        Hash((hash ^ hash >> 32) as u32)
    }

    /// Makes room for entries that are about to be inserted.
    pub(crate) fn reserve(&mut self, more: usize) {
        for (index, shard) in self.shards.iter_mut().enumerate() {
            let share = share(index, more);
            shard.reserve(share + share / 16, |entry| entry.hash.spread());
        }
    }

    pub(crate) fn find(&self, hash: Hash, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let shard = &self.shards[hash.shard()];
        let found = shard.find(hash.spread(), is_entry(hash, is_it))?;
        Some(found.slot)
    }

    /// Inserts a slot. The caller knows that it is not there yet.
    pub(crate) fn insert(&mut self, hash: Hash, slot: u32) {
        let shard = &mut self.shards[hash.shard()];
        shard.insert_unique(hash.spread(), IndexEntry { hash, slot }, |entry| {
            entry.hash.spread()
        });
    }

    /// Inserts a slot, in place of the one that `is_it` names if there is one. Returns the replaced slot.
    pub(crate) fn put(
        &mut self,
        hash: Hash,
        slot: u32,
        is_it: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let shard = &mut self.shards[hash.shard()];
        let entry = shard.entry(hash.spread(), is_entry(hash, is_it), |entry| {
            entry.hash.spread()
        });
        match entry {
            Entry::Occupied(mut found) => Some(std::mem::replace(&mut found.get_mut().slot, slot)),
            Entry::Vacant(vacant) => {
                vacant.insert(IndexEntry { hash, slot });
                None
            }
        }
    }

    /// Replaces a slot with another. Returns the replaced slot.
    pub(crate) fn replace(
        &mut self,
        hash: Hash,
        slot: u32,
        is_it: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let shard = &mut self.shards[hash.shard()];
        let found = shard.find_mut(hash.spread(), is_entry(hash, is_it))?;
        Some(std::mem::replace(&mut found.slot, slot))
    }

    pub(crate) fn remove(&mut self, hash: Hash, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let shard = &mut self.shards[hash.shard()];
        let found = shard.find_entry(hash.spread(), is_entry(hash, is_it));
        let (entry, _) = found.ok()?.remove();
        if shard.capacity() > SMALL && shard.len() < shard.capacity() / 8 {
            shard.shrink_to(2 * shard.len(), |entry| entry.hash.spread());
        }
        Some(entry.slot)
    }
}

fn is_entry(hash: Hash, is_it: impl Fn(u32) -> bool) -> impl Fn(&IndexEntry) -> bool {
    move |entry| entry.hash == hash && is_it(entry.slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_index_moves_little_at_a_time() {
        let mut index = SlotIndex::default();
        let mut capacities = vec![0; SHARDS];
        let (mut moved, mut most) = (0, 0);
        for slot in 0..400_000 {
            index.insert(index.hash(slot), slot);
            let at = index.hash(slot).shard();
            let capacity = index.shards[at].capacity();
            if std::mem::replace(&mut capacities[at], capacity) != capacity {
                moved += index.shards[at].len();
            }
            if slot % 20_000 == 0 {
                // Large enough that chance does not matter.
                most = most.max(if slot < 100_000 { 0 } else { moved });
                moved = 0;
            }
        }
        // Each slot is moved once while their number doubles, or hardly more often.
        assert!(
            (1..3 * 20_000).contains(&most),
            "{most} were moved in 20,000 insertions"
        );
    }

    #[test]
    fn an_index_finds_its_slots_and_shrinks_with_them() {
        let mut index = SlotIndex::default();
        let count = 200_000;
        let name = |slot: u32| u64::from(slot) * 3;
        for slot in 0..count {
            index.insert(index.hash(name(slot)), slot);
        }
        let capacity =
            |index: &SlotIndex| -> usize { index.shards.iter().map(HashTable::capacity).sum() };
        let full = capacity(&index);
        assert!(full < 3 * count as usize, "{full} places for {count} slots");
        for (entry, shard) in index.shards.iter().enumerate() {
            let expected = share(entry, count as usize);
            assert!(
                shard.len().abs_diff(expected) < expected / 4,
                "{} in shard {entry}, which should have about {expected}",
                shard.len()
            );
        }
        for slot in 0..count {
            let wanted = name(slot);
            assert_eq!(
                index.find(index.hash(wanted), |slot| name(slot) == wanted),
                Some(slot)
            );
        }
        for slot in 0..count - 10 {
            let wanted = name(slot);
            let is_it = |slot| name(slot) == wanted;
            assert_eq!(index.remove(index.hash(wanted), is_it), Some(slot));
            assert_eq!(index.find(index.hash(wanted), is_it), None);
        }
        for slot in count - 10..count {
            let wanted = name(slot);
            assert_eq!(
                index.find(index.hash(wanted), |slot| name(slot) == wanted),
                Some(slot)
            );
        }
        assert!(capacity(&index) < SHARDS * 2 * SMALL);
    }
}
