//! A table of slots that are used again, so that an entry can be named by a small number.

const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    first_free: u32,
}

#[derive(Debug)]
enum Slot<T> {
    Full(T),
    /// The next free slot, or `NONE`.
    Free(u32),
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            first_free: NONE,
        }
    }
}

impl<T> Slab<T> {
    /// The slot freed last is used first, while its memory is still near.
    pub(crate) fn insert(&mut self, entry: T) -> u32 {
        if self.first_free == NONE {
            let slot = u32::try_from(self.slots.len()).expect("fewer than 2^32 entries");
            assert_ne!(slot, NONE, "the table is full");
            self.slots.push(Slot::Full(entry));
            return slot;
        }
        let slot = self.first_free;
        match std::mem::replace(&mut self.slots[slot as usize], Slot::Full(entry)) {
            Slot::Free(next) => self.first_free = next,
            Slot::Full(_) => panic!("slot {slot} is on the free list and full"),
        }
        slot
    }

    pub(crate) fn remove(&mut self, slot: u32) -> T {
        match std::mem::replace(&mut self.slots[slot as usize], Slot::Free(self.first_free)) {
            Slot::Full(entry) => {
                self.first_free = slot;
                entry
            }
            Slot::Free(_) => panic!("slot {slot} was freed before"),
        }
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        match self.slots.get(slot as usize) {
            Some(Slot::Full(entry)) => Some(entry),
            _ => None,
        }
    }

    /// In the order of the slots, which the same inputs fill alike.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(slot, entry)| match entry {
                Slot::Full(entry) => Some((slot as u32, entry)),
                Slot::Free(_) => None,
            })
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, slot: u32) -> &T {
        match &self.slots[slot as usize] {
            Slot::Full(entry) => entry,
            Slot::Free(_) => panic!("slot {slot} is free"),
        }
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, slot: u32) -> &mut T {
        match &mut self.slots[slot as usize] {
            Slot::Full(entry) => entry,
            Slot::Free(_) => panic!("slot {slot} is free"),
        }
    }
}
