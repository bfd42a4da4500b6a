//! The messages that are held, whatever their state.

use bytes::Bytes;
use penstock_message::{JoinId, Key, Lease, MessageId, WallMs};
use rustc_hash::FxHashMap;

use crate::Position;
use crate::clock::When;
use crate::effects::Rests;
use crate::names::Name;
use crate::records::{Grant, MessageHead};
use crate::slab::Slab;

/// A message, by its slot and its number. The slot may be used again; the number never is, and it
/// changes when the message moves. So a handle that was left behind is seen to be stale.
///
/// Handles sort by number, which is the order of publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Handle {
    pub(crate) number: u64,
    pub(crate) slot: u32,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: MessageId,
    pub(crate) number: u64,
    pub(crate) body: Bytes,
    pub(crate) queue: u32,
    pub(crate) task: Name,
    pub(crate) enqueued_at: WallMs,
    pub(crate) expires_at: Option<When>,
    pub(crate) result_ttl_ms: Option<u64>,
    pub(crate) attempt: u32,
    pub(crate) crashes: u8,
    pub(crate) max_deliveries: u8,
    pub(crate) priority: u8,
    pub(crate) redelivered: bool,
    pub(crate) has_copies: bool,
    /// It was read from the journal after an unclean end, and not handed out since: there may be a
    /// grant whose record was lost.
    pub(crate) recovered: bool,
    pub(crate) state: State,
    /// The same message in another queue.
    next_copy: Option<u32>,
    pub(crate) base: Position,
    /// What a delivery waits for.
    pub(crate) rests: Rests,
    /// The last transaction whose checks found this lease good: it may be settled once in each.
    pub(crate) checked_by: u64,
    pub(crate) extra: Option<Box<Extra>>,
}

/// What most messages do without.
#[derive(Debug, Default)]
pub(crate) struct Extra {
    pub(crate) notes: Vec<Bytes>,
    pub(crate) claim: Option<Key>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum State {
    Ready,
    Delayed(When),
    Held(JoinId),
    Leased(LeaseState),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LeaseState {
    pub(crate) grant: Grant,
    pub(crate) session: u32,
    /// Its place in the session's list.
    pub(crate) index: u32,
    /// What the run was expected to cost when it was handed out.
    pub(crate) estimate_us: u32,
    /// Whether the delivery has left the broker, so that the job may have begun.
    pub(crate) sent: bool,
    /// Whether the message would have expired meanwhile: it does when it comes back.
    pub(crate) expired: bool,
}

impl Entry {
    pub(crate) fn new(head: &MessageHead, queue: u32, body: Bytes) -> Self {
        Self {
            id: head.id,
            number: head.number,
            body,
            queue,
            task: head.task,
            enqueued_at: head.enqueued_at,
            expires_at: head.expires_at,
            result_ttl_ms: head.result_ttl_ms,
            attempt: head.attempt,
            crashes: head.crashes,
            max_deliveries: head.max_deliveries,
            priority: head.priority,
            redelivered: head.redelivered,
            has_copies: head.has_copies,
            recovered: false,
            state: State::Ready,
            next_copy: None,
            base: Position(0),
            rests: Rests::default(),
            checked_by: 0,
            extra: None,
        }
    }

    pub(crate) fn lease(&self) -> Option<Lease> {
        match self.state {
            State::Leased(LeaseState { grant, .. }) => Some(Lease {
                message: self.id,
                epoch: grant.epoch,
                grant: grant.number,
            }),
            _ => None,
        }
    }

    pub(crate) fn notes(&self) -> &[Bytes] {
        self.extra.as_ref().map_or(&[], |extra| &extra.notes)
    }

    pub(crate) fn extra(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    /// What it takes in the journal, roughly.
    pub(crate) fn journal_bytes(&self) -> u64 {
        let notes: usize = self.notes().iter().map(|note| note.len() + 8).sum();
        (64 + self.body.len() + notes) as u64
    }
}

#[derive(Debug, Default)]
pub(crate) struct Messages {
    entries: Slab<Entry>,
    by_id: FxHashMap<MessageId, u32>,
}

impl Messages {
    pub(crate) fn insert(&mut self, entry: Entry) -> u32 {
        let id = entry.id;
        let slot = self.entries.insert(entry);
        if let Some(first) = self.by_id.insert(id, slot) {
            self.entries[slot].next_copy = Some(first);
        }
        slot
    }

    /// Removes one copy; true when it was the last.
    pub(crate) fn remove(&mut self, slot: u32) -> (Entry, bool) {
        let entry = self.entries.remove(slot);
        let first = self.by_id[&entry.id];
        let is_last = match (first == slot, entry.next_copy) {
            (true, None) => {
                self.by_id.remove(&entry.id);
                true
            }
            (true, Some(next)) => {
                self.by_id.insert(entry.id, next);
                false
            }
            (false, next) => {
                let mut before = first;
                while self.entries[before].next_copy != Some(slot) {
                    before = self.entries[before]
                        .next_copy
                        .expect("a copy is linked from its first");
                }
                self.entries[before].next_copy = next;
                false
            }
        };
        (entry, is_last)
    }

    pub(crate) fn holds(&self, id: &MessageId) -> bool {
        self.by_id.contains_key(id)
    }

    /// The slots of all copies.
    pub(crate) fn copies(&self, id: &MessageId) -> impl Iterator<Item = u32> {
        let first = self.by_id.get(id).copied();
        std::iter::successors(first, |slot| self.entries[*slot].next_copy)
    }

    pub(crate) fn find_lease(&self, lease: &Lease) -> Option<u32> {
        self.copies(&lease.message)
            .find(|slot| self.entries[*slot].lease() == Some(*lease))
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<&Entry> {
        self.entries
            .get(handle.slot)
            .filter(|entry| entry.number == handle.number)
    }

    pub(crate) fn by_slot(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot)
    }

    pub(crate) fn handle(&self, slot: u32) -> Handle {
        Handle {
            number: self.entries[slot].number,
            slot,
        }
    }

    /// In the order of slots, which is no order that a user would know, but always the same.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.entries.iter()
    }
}

impl std::ops::Index<u32> for Messages {
    type Output = Entry;

    fn index(&self, slot: u32) -> &Entry {
        &self.entries[slot]
    }
}

impl std::ops::IndexMut<u32> for Messages {
    fn index_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.entries[slot]
    }
}
