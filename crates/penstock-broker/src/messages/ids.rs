//! Finds messages by their ids and leases.

use penstock_faults::planted;
use penstock_message::{Lease, MessageId};

use super::{LeaseState, Messages, WaitsFor};
use crate::messages::entry::flag;
use crate::table::slot_index::Hash;

impl Messages {
    /// Stops finding messages by their ids from now on. New ones are entered all at once by `enter_deferred_ids`, which
    /// takes a fraction of the time. Until then ids are only needed for messages that have copies or have claimed a
    /// key, so these are entered at once.
    pub(crate) fn defer_ids(&mut self) {
        self.defers_ids = true;
    }

    pub(crate) fn enter_deferred_ids(&mut self) {
        /// Number of entries sorted at a time.
        const BLOCK: usize = 1 << 20;
        self.defers_ids = false;
        self.by_id.reserve(self.entries.len());
        let mut block = Vec::with_capacity(BLOCK.min(self.entries.len()));
        for slot in 0..self.entries.end() {
            if let Some(entry) = self.entries.get_mut(slot)
                && entry.is_unentered()
            {
                entry.set(flag::UNENTERED, false);
                block.push((self.by_id.hash(entry.id), slot));
                if block.len() == BLOCK {
                    self.enter_ids(&mut block);
                }
            }
        }
        self.enter_ids(&mut block);
    }

    pub(super) fn enter_ids(&mut self, block: &mut Vec<(Hash, u32)>) {
        block.sort_unstable_by_key(|(hash, _)| hash.shard());
        for (hash, slot) in block.drain(..) {
            self.enter_hash(hash, slot);
        }
    }

    pub(super) fn enter_if_deferred(&mut self, slot: u32) {
        let entry = &mut self.entries[slot];
        if entry.is_unentered() {
            entry.set(flag::UNENTERED, false);
            self.enter_id(slot);
        }
    }

    pub(super) fn enter_id(&mut self, slot: u32) {
        self.enter_hash(self.by_id.hash(self.entries[slot].id), slot);
    }

    pub(super) fn enter_hash(&mut self, hash: Hash, slot: u32) {
        let Self { entries, by_id, .. } = self;
        let is_it = |other: u32| entries[other].id == entries[slot].id;
        if let Some(first) = by_id.put(hash, slot, is_it) {
            self.hot_mut(slot).next_copy = Some(first);
        }
    }

    /// Removes a message from its id's copies. Returns whether it was the only one.
    pub(super) fn leave_id(&mut self, slot: u32) -> bool {
        if self.entries[slot].is_unentered() {
            return true;
        }
        let id = self.entries[slot].id;
        let hash = self.by_id.hash(id);
        let next = self.next_copy(slot);
        let is_it = |other: u32| other == slot;
        // Nearly every message is its own only copy, and so the first.
        let found = match next {
            None => self.by_id.remove(hash, is_it),
            Some(next) => self.by_id.replace(hash, next, is_it),
        };
        if found.is_some() {
            return next.is_none();
        }
        let mut before = self.first_copy(&id).expect("a message is found by its id");
        while self.next_copy(before) != Some(slot) {
            let next = self.next_copy(before);
            before = next.expect("a copy is linked from its first");
        }
        self.hot_mut(before).next_copy = next;
        false
    }

    pub(super) fn next_copy(&self, slot: u32) -> Option<u32> {
        self.hot(slot)?.next_copy
    }

    pub(crate) fn holds(&self, id: &MessageId) -> bool {
        self.first_copy(id).is_some()
    }

    pub(super) fn first_copy(&self, id: &MessageId) -> Option<u32> {
        self.by_id
            .find(self.by_id.hash(*id), |slot| self.entries[slot].id == *id)
    }

    /// Returns the slots of all copies.
    pub(crate) fn copies(&self, id: &MessageId) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first_copy(id), |slot| self.next_copy(*slot))
    }

    /// Returns the copy with the lowest number, however they are linked: the links are not journaled.
    pub(crate) fn first_of(&self, id: &MessageId) -> Option<u32> {
        self.copies(id)
            .min_by_key(|slot| self.entries[*slot].number())
    }

    pub(crate) fn find_lease(&self, lease: &Lease) -> Option<u32> {
        let mut slot = self.first_copy(&lease.message)?;
        loop {
            if let Some(LeaseState { grant, .. }) = self.lease_state(slot)
                && ((grant.epoch, grant.number) == (lease.epoch, lease.grant)
                    || planted!("settle-by-any-lease"))
            {
                return Some(slot);
            }
            slot = self.next_copy(slot)?;
        }
    }

    /// Finds a lease of this session for a check that settles it. Each check finds it only once.
    pub(crate) fn check_lease(&mut self, lease: &Lease, session: u32, check: u64) -> Option<u32> {
        let slot = self.find_lease(lease)?;
        // Leased messages are hot.
        let hot = &mut self.hot[self.entries[slot].packed as u32];
        match hot.waits_for {
            WaitsFor::Worker(held) if held.session == session && hot.checked_by != check => {
                hot.checked_by = check;
                Some(slot)
            }
            _ => None,
        }
    }
}
