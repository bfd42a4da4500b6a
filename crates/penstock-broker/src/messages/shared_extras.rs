//! Rare fields of messages, stored once for all messages that have the same ones. The members of a group share their
//! workflow, headers and parent, and there may be a million of them.
//!
//! A table by slot says which extras a message has. It has chunks only where neighbouring slots have some.

use penstock_message::{Extras, SeededState};

use crate::table::slab::Slab;
use crate::table::slot_index::SlotIndex;

#[derive(Debug, Default)]
pub(crate) struct SharedExtras {
    all: Slab<CountedExtras>,
    by_content: SlotIndex,
    /// Extras that were set last: usually they are set again.
    last: Option<u32>,
    chunks: Vec<Option<ExtrasChunk>>,
    len: usize,
}

#[derive(Debug)]
struct CountedExtras {
    extras: Extras,
    /// Number of messages that have them.
    users: u32,
}

#[derive(Debug)]
struct ExtrasChunk {
    ids: Box<[u32; CHUNK]>,
    len: u32,
}

const CHUNK: usize = 256;
const NONE: u32 = u32::MAX;

impl SharedExtras {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_content: SlotIndex::new(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        self.by_content.hashing()
    }

    /// Returns the extras of a message, which must have some.
    pub(crate) fn of(&self, slot: u32) -> &Extras {
        &self.all[self.id(slot)].extras
    }

    /// Sets the extras of a message, which must have none.
    pub(crate) fn set(&mut self, slot: u32, extras: Extras) {
        let id = self.intern(extras);
        let (index, at) = (slot as usize / CHUNK, slot as usize % CHUNK);
        if self.chunks.len() <= index {
            self.chunks.resize_with(index + 1, || None);
        }
        let chunk = self.chunks[index].get_or_insert_with(|| ExtrasChunk {
            ids: Box::new([NONE; CHUNK]),
            len: 0,
        });
        debug_assert_eq!(chunk.ids[at], NONE, "it has extras already");
        chunk.ids[at] = id;
        chunk.len += 1;
        self.len += 1;
    }

    /// Forgets the extras of a message, which must have some.
    pub(crate) fn forget(&mut self, slot: u32) {
        let id = self.id(slot);
        let (index, at) = (slot as usize / CHUNK, slot as usize % CHUNK);
        let chunk = self.chunks[index].as_mut().expect("it has extras");
        chunk.ids[at] = NONE;
        chunk.len -= 1;
        self.len -= 1;
        if chunk.len == 0 {
            self.chunks[index] = None;
        }
        let shared = &mut self.all[id];
        shared.users -= 1;
        if shared.users == 0 {
            let hash = self.by_content.hash(&shared.extras);
            self.by_content.remove(hash, |other| other == id);
            self.all.remove(id);
            self.last = self.last.filter(|last| *last != id);
        }
    }

    fn id(&self, slot: u32) -> u32 {
        let (index, at) = (slot as usize / CHUNK, slot as usize % CHUNK);
        let chunk = self.chunks[index].as_ref().expect("it has extras");
        chunk.ids[at]
    }

    fn intern(&mut self, extras: Extras) -> u32 {
        let Self {
            all, by_content, ..
        } = self;
        let last = self.last.filter(|last| all[*last].extras == extras);
        let id = match last {
            Some(last) => last,
            None => {
                let hash = by_content.hash(&extras);
                let found = by_content.find(hash, |id| all[id].extras == extras);
                found.unwrap_or_else(|| {
                    let id = all.insert(CountedExtras { extras, users: 0 });
                    by_content.insert(hash, id);
                    id
                })
            }
        };
        all[id].users += 1;
        self.last = Some(id);
        id
    }

    /// Panics unless the counts are right.
    pub(crate) fn assert_counts(&self, messages: usize) {
        assert_eq!(self.len, messages, "messages with extras");
        let users = self.all.iter().map(|(_, shared)| shared.users as usize);
        assert_eq!(users.sum::<usize>(), messages, "users of extras");
        let ids = self.chunks.iter().flatten().map(|chunk| chunk.len as usize);
        assert_eq!(ids.sum::<usize>(), messages, "places of extras");
    }
}

#[cfg(test)]
mod tests {
    use penstock_message::MessageId;

    use super::*;

    fn of(workflow: u8) -> Extras {
        Extras {
            workflow: Some(MessageId([workflow; 16])),
            ..Extras::default()
        }
    }

    #[test]
    fn equal_extras_are_shared_and_go_with_their_last_message() {
        let mut extras = SharedExtras::default();
        for slot in 0..1000 {
            extras.set(slot, of((slot % 2) as u8));
        }
        assert_eq!(extras.all.len(), 2);
        assert_eq!((extras.of(700), extras.of(701)), (&of(0), &of(1)));
        extras.assert_counts(1000);
        (0..1000).step_by(2).for_each(|slot| extras.forget(slot));
        extras.assert_counts(500);
        assert_eq!(extras.all.len(), 1);
        extras.set(2, of(1));
        (1..1000).step_by(2).for_each(|slot| extras.forget(slot));
        assert_eq!(extras.of(2), &of(1));
        extras.forget(2);
        extras.assert_counts(0);
        assert!(extras.chunks.iter().all(Option::is_none) && extras.all.len() == 0);
    }
}
