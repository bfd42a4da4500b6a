//! Values under keys, and the unique keys that messages own.

use penstock_message::{Key, MessageId, Value};

use super::BrokerState;
use crate::keys::stored_value::StoredValue;
use crate::messages::{Handle, UntilStart};
use crate::reclaim::live_bases::Entity;
use crate::records::RunHead;
use crate::table::interner::Name;

impl BrokerState {
    pub(crate) fn store(
        &mut self,
        key: Key,
        value: Value,
        group: Name,
        expires_at: Option<u64>,
        run: Option<RunHead>,
    ) {
        self.touch(&key);
        self.forget_ended_value(&key);
        self.names.hold(group);
        if let Some(run) = run {
            self.names.hold(run.queue);
        }
        let at = (self.position, self.safe_after);
        let stored = StoredValue::new(key, value, group, expires_at, run, at);
        self.live_bytes += stored.bytes();
        let expires_at = stored.expires_at();
        let (value, earlier) = self.keys.insert(stored);
        if let Some(earlier) = earlier {
            self.uncount_value(&earlier);
        }
        let slot = value.slot;
        self.live_bases.add(self.position, Entity::Value { slot });
        if let Some(at) = expires_at {
            self.timers.set_value(at, value);
        }
    }

    /// Whether the value of this key, or of an ended message with this key, is behind a message in the journal.
    pub(crate) fn value_stands_behind(&self, key: &Key, slot: u32) -> bool {
        let base = self.messages[slot].base();
        let stored = self.keys.value(key).map(StoredValue::base);
        let ended = match key {
            Key::Result(id) => self.messages.find_ended(id),
            Key::Named(_) | Key::Scoped(..) => None,
        };
        let ended = ended.map(|slot| self.messages[slot].base());
        stored.max(ended).is_some_and(|at| base < at)
    }

    /// Removes the value and any claim on the key. The message that owned the key does not reclaim it when it fails and
    /// is retried. Once its record has been carried forward, nothing shows that it ever had the key.
    pub(crate) fn remove_key(&mut self, key: &Key) {
        self.forget_value(key);
        if let Some(owner) = self.keys.owner(key) {
            self.messages.forget_claim(owner.slot);
        }
        self.keys.end_claim(key);
        self.touch(key);
    }

    /// Drops the value: it has expired, or its group is over the cap.
    pub(crate) fn drop_value(&mut self, key: &Key) {
        self.forget_value(key);
        self.touch(key);
    }

    pub(super) fn forget_value(&mut self, key: &Key) {
        if let Some(stored) = self.keys.remove(key) {
            self.uncount_value(&stored);
        }
        self.forget_ended_value(key);
    }

    fn uncount_value(&mut self, stored: &StoredValue) {
        self.live_bytes -= stored.bytes();
        self.live_bases.abandon();
        self.names.release(stored.group);
        if let Some(run) = stored.run {
            self.names.release(run.head().queue);
        }
        if let Some(at) = stored.expires_at() {
            self.timers.abandon_value(at);
        }
    }

    /// Forgets the value of a message that the broker has ended.
    fn forget_ended_value(&mut self, key: &Key) {
        if let Key::Result(id) = key
            && self.ends.len > 0
            && let Some(slot) = self.messages.find_ended(id)
        {
            self.remove_ended(slot);
        }
    }

    pub(crate) fn claim(&mut self, slot: u32, key: Key) {
        self.messages.set_claim(slot, key.clone());
        self.own(slot, key);
    }

    /// Makes a message the owner of a key until it is handed out.
    pub(crate) fn claim_until_start(&mut self, slot: u32, key: Key, until: UntilStart) {
        self.claim(slot, key);
        self.messages.set_until_start(slot, until);
    }

    /// Returns the message that owns this key, or for which the key is kept although the message may have ended.
    pub(crate) fn owner_of(&self, key: &Key) -> Option<MessageId> {
        if let Some(owner) = self.keys.owner(key) {
            return self.messages.get(owner).map(|entry| entry.id);
        }
        let value = self.keys.value(key)?;
        let id = value.body().try_into().ok().map(MessageId);
        id.filter(|_| matches!(key, Key::Scoped(..)))
    }

    /// Whether a message that owns a key only waits for its turn, so that another may replace it.
    pub(crate) fn can_be_replaced(&self, slot: u32) -> bool {
        let entry = &self.messages[slot];
        let extras = self.messages.extras(slot);
        let is_step =
            extras.is_some_and(|extras| extras.workflow.is_some() || extras.inputs.is_some());
        (entry.is_ready() || entry.is_delayed())
            && !entry.has_copies()
            && !is_step
            && self.messages.member(slot).is_none()
            && self.decided_end(slot).is_none()
            && self.mark_that_cancels(slot).is_none()
    }

    /// Makes a message the owner of a key. A repaired journal may lack the record in which the previous owner lost it.
    pub(super) fn own(&mut self, slot: u32, key: Key) {
        if let Some(owner) = self.keys.owner(&key)
            && owner.slot != slot
            && !self.messages[owner.slot].is_failed()
        {
            self.messages.forget_claim(owner.slot);
        }
        self.keys.claim(key, self.messages.handle(slot));
    }

    pub(crate) fn touch(&mut self, key: &Key) {
        if !self.keys.watchers.is_empty() {
            self.touched.push(key.clone());
        }
    }

    pub(super) fn touch_result(&mut self, id: MessageId) {
        if !self.keys.watchers.is_empty() {
            self.touched.push(Key::Result(id));
        }
    }

    /// Renumbers the claim of a message that has a new number, if it owns the key.
    pub(super) fn renumber_claim(&mut self, slot: u32, was: u64) {
        if let Some(claim) = self.messages.claim(slot).cloned()
            && self.keys.owner(&claim) == Some(Handle { number: was, slot })
        {
            let handle = self.messages.handle(slot);
            self.keys.claim(claim, handle);
        }
    }

    /// Returns the key that the message owns.
    pub(crate) fn owned_claim(&self, slot: u32) -> Option<Key> {
        let claim = self.messages.claim(slot)?;
        let owner = self.keys.owner(claim);
        (owner == Some(self.messages.handle(slot))).then(|| claim.clone())
    }

    /// Frees the key of a message, which loses it for good.
    pub(crate) fn give_up_claim(&mut self, slot: u32) {
        self.free_claim(slot);
        self.messages.forget_claim(slot);
    }

    /// Passes the key that the message owns to another copy of it, or frees it.
    pub(crate) fn free_claim(&mut self, slot: u32) {
        let Some(claim) = self.messages.claim(slot).cloned() else {
            return;
        };
        if self.keys.owner(&claim) != Some(self.messages.handle(slot)) {
            return;
        }
        let messages = &self.messages;
        let others = messages.copies(&messages[slot].id);
        let others = others.filter(|other| *other != slot && !messages[*other].is_failed());
        match others.min_by_key(|other| messages[*other].number()) {
            Some(copy) => {
                // As with members of joins: a later reader may skip the end of this copy.
                if messages[slot].base() < messages[copy].base() {
                    let number = messages[copy].number();
                    self.inherited.push((number, claim.clone()));
                }
                self.claim(copy, claim);
            }
            None => {
                self.keys.end_claim(&claim);
                self.touch(&claim);
            }
        }
    }
}
