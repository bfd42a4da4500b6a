//! A slab whose entries are boxed separately, one pointer away. For a few things that are used often; a
//! [`Slab`](crate::table::slab::Slab) is for many.

#[derive(Debug)]
pub(crate) struct BoxedSlab<T> {
    slots: Vec<Option<Box<T>>>,
    free: Vec<u32>,
}

impl<T> Default for BoxedSlab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> BoxedSlab<T> {
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn insert(&mut self, thing: T) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(Box::new(thing));
        slot
    }

    pub(crate) fn remove(&mut self, slot: u32) -> T {
        let thing = self.slots[slot as usize].take();
        let thing = thing.expect("a slot that is in use is full");
        self.free.push(slot);
        if self.free.len() == self.slots.len() {
            *self = Self::default();
        }
        *thing
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.as_deref()
    }

    /// Iterates in the order of the slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, thing)| Some((slot as u32, thing.as_deref()?)))
    }
}

impl<T> std::ops::Index<u32> for BoxedSlab<T> {
    type Output = T;

    #[inline]
    fn index(&self, slot: u32) -> &T {
        let thing = self.slots[slot as usize].as_deref();
        thing.expect("a slot that is in use is full")
    }
}

impl<T> std::ops::IndexMut<u32> for BoxedSlab<T> {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut T {
        let thing = self.slots[slot as usize].as_deref_mut();
        thing.expect("a slot that is in use is full")
    }
}
