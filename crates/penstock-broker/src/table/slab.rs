//! A slab: a table whose slots are reused, so that an entry can be named by a small number.
//!
//! It grows and shrinks by chunks. No entry is ever copied to make room, and a chunk whose slots are all free is
//! released.

use std::collections::BTreeSet;

const NONE: u32 = u32::MAX;

/// Approximate size of a chunk. It is large enough for the system's allocator to map it separately and to release it as
/// a whole; unused parts of it are never touched.
const CHUNK_BYTES: usize = 512 << 10;

/// Counts the entries of all slabs that a thread looks at, for tests that bound them.
#[cfg(test)]
pub(crate) mod looks {
    use std::cell::Cell;

    thread_local! {
        static LOOKS: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn add() {
        LOOKS.set(LOOKS.get() + 1);
    }

    pub(crate) fn count<R>(work: impl FnOnce() -> R) -> usize {
        let before = LOOKS.get();
        work();
        LOOKS.get() - before
    }
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    chunks: Vec<SlabChunk<T>>,
    /// Chunk of the next entry, as long as it has room.
    current: u32,
    /// Chunks with room, except empty ones.
    roomy: BTreeSet<u32>,
    /// Chunks that were released.
    vacant: BTreeSet<u32>,
    len: usize,
}

#[derive(Debug)]
struct SlabChunk<T> {
    slots: Vec<SlabSlot<T>>,
    used: u32,
    /// First free slot of this chunk, or `NONE`.
    first_free: u32,
}

#[derive(Debug)]
enum SlabSlot<T> {
    Full(T),
    /// The next free slot of the chunk, or `NONE`.
    Free(u32),
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            current: 0,
            roomy: BTreeSet::new(),
            vacant: BTreeSet::new(),
            len: 0,
        }
    }
}

impl<T> SlabChunk<T> {
    fn new() -> Self {
        Self {
            slots: Vec::new(),
            used: 0,
            first_free: NONE,
        }
    }

    fn has_room(&self) -> bool {
        (self.used as usize) < Slab::<T>::CHUNK_SLOTS
    }
}

impl<T> Slab<T> {
    const CHUNK_BITS: u32 = {
        let slots = CHUNK_BYTES / size_of::<SlabSlot<T>>();
        if slots < 2 { 1 } else { slots.ilog2() }
    };
    const CHUNK_SLOTS: usize = 1 << Self::CHUNK_BITS;

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Inserts an entry. Uses the most recently freed slot first, while its memory is still cached.
    pub(crate) fn insert(&mut self, entry: T) -> u32 {
        let index = match self.chunks.get(self.current as usize) {
            Some(chunk) if chunk.has_room() => self.current,
            _ => self.next_chunk(),
        };
        let chunk = &mut self.chunks[index as usize];
        let place = if chunk.first_free == NONE {
            if chunk.slots.is_empty() && index > 0 {
                // The first chunk grows with use, since most tables stay small.
                chunk.slots.reserve_exact(Self::CHUNK_SLOTS);
            }
            chunk.slots.push(SlabSlot::Full(entry));
            chunk.slots.len() as u32 - 1
        } else {
            let place = chunk.first_free;
            let slot = &mut chunk.slots[place as usize];
            match std::mem::replace(slot, SlabSlot::Full(entry)) {
                SlabSlot::Free(next) => chunk.first_free = next,
                SlabSlot::Full(_) => panic!("slot {place} is on the free list and full"),
            }
            place
        };
        chunk.used += 1;
        if !chunk.has_room() {
            self.roomy.remove(&index);
        }
        self.len += 1;
        index << Self::CHUNK_BITS | place
    }

    /// Returns the lowest chunk that has room, so that the highest become free.
    fn next_chunk(&mut self) -> u32 {
        let next = self.roomy.first().copied();
        self.current = next.unwrap_or_else(|| {
            let index = self.vacant.pop_first().unwrap_or_else(|| {
                let index = self.chunks.len();
                assert!(
                    index < (NONE >> Self::CHUNK_BITS) as usize,
                    "the table is full"
                );
                self.chunks.push(SlabChunk::new());
                index as u32
            });
            self.roomy.insert(index);
            index
        });
        self.current
    }

    pub(crate) fn remove(&mut self, slot: u32) -> T {
        let (index, place) = Self::place(slot);
        let chunk = &mut self.chunks[index];
        let free = SlabSlot::Free(chunk.first_free);
        let SlabSlot::Full(entry) = std::mem::replace(&mut chunk.slots[place], free) else {
            panic!("slot {slot} was freed before");
        };
        if !chunk.has_room() {
            self.roomy.insert(index as u32);
        }
        chunk.first_free = place as u32;
        chunk.used -= 1;
        self.len -= 1;
        // The current chunk stays, so that a table that is sometimes empty needs no allocation.
        if chunk.used == 0 && index as u32 != self.current {
            *chunk = SlabChunk::new();
            self.roomy.remove(&(index as u32));
            self.vacant.insert(index as u32);
        }
        entry
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        let (index, place) = Self::place(slot);
        match self.chunks.get(index)?.slots.get(place) {
            Some(SlabSlot::Full(entry)) => Some(entry),
            _ => None,
        }
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        let (index, place) = Self::place(slot);
        match self.chunks.get_mut(index)?.slots.get_mut(place) {
            Some(SlabSlot::Full(entry)) => Some(entry),
            _ => None,
        }
    }

    /// Returns a number higher than every slot.
    pub(crate) fn end(&self) -> u32 {
        (self.chunks.len() << Self::CHUNK_BITS) as u32
    }

    /// Iterates in the order of the slots, which depends only on the inputs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let chunks = self.chunks.iter().enumerate();
        chunks.flat_map(|(index, chunk)| {
            let slots = chunk.slots.iter().enumerate();
            slots.filter_map(move |(place, entry)| {
                #[cfg(test)]
                looks::add();
                match entry {
                    SlabSlot::Full(entry) => {
                        Some(((index << Self::CHUNK_BITS | place) as u32, entry))
                    }
                    SlabSlot::Free(_) => None,
                }
            })
        })
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let slots = self.chunks.iter_mut().flat_map(|chunk| &mut chunk.slots);
        slots.filter_map(|entry| {
            #[cfg(test)]
            looks::add();
            match entry {
                SlabSlot::Full(entry) => Some(entry),
                SlabSlot::Free(_) => None,
            }
        })
    }

    fn place(slot: u32) -> (usize, usize) {
        #[cfg(test)]
        looks::add();
        let slot = slot as usize;
        (slot >> Self::CHUNK_BITS, slot & (Self::CHUNK_SLOTS - 1))
    }

    /// Returns the bytes that an entry takes, whether its slot is free or not.
    #[cfg(test)]
    pub(crate) const fn slot_bytes() -> usize {
        size_of::<SlabSlot<T>>()
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, slot: u32) -> &T {
        let (index, place) = Self::place(slot);
        match &self.chunks[index].slots[place] {
            SlabSlot::Full(entry) => entry,
            SlabSlot::Free(_) => panic!("slot {slot} is free"),
        }
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, slot: u32) -> &mut T {
        let (index, place) = Self::place(slot);
        match &mut self.chunks[index].slots[place] {
            SlabSlot::Full(entry) => entry,
            SlabSlot::Free(_) => panic!("slot {slot} is free"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_never_move_and_free_chunks_are_released() {
        let mut slab = Slab::<[u64; 1024]>::default();
        let count = 10 * Slab::<[u64; 1024]>::CHUNK_SLOTS as u32;
        let slots: Vec<u32> = (0..count)
            .map(|number| slab.insert([u64::from(number); 1024]))
            .collect();
        for (number, slot) in slots.iter().enumerate() {
            assert_eq!(slab[*slot][0], number as u64);
        }
        let kept = slots[slots.len() / 2];
        for slot in slots.iter().filter(|slot| **slot != kept) {
            slab.remove(*slot);
        }
        assert_eq!(
            slab.iter().map(|(slot, _)| slot).collect::<Vec<_>>(),
            [kept]
        );
        let full = slab
            .chunks
            .iter()
            .filter(|chunk| chunk.slots.capacity() > 0);
        assert!(
            full.count() <= 2,
            "one chunk is in use, one is kept for the next"
        );
        // Released chunks are used again, lowest first.
        let again: Vec<u32> = (1..count).map(|_| slab.insert([7; 1024])).collect();
        assert_eq!(slab.chunks.len(), 10);
        assert!(
            again
                .iter()
                .all(|slot| *slot != kept && slab[*slot][0] == 7)
        );
    }
}
