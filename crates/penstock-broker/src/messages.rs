//! Messages, in any state.
//!
//! Ten million may wait, so a message that only waits is small: 48 bytes here, with its body in the journal. Such a
//! message is *cold*. Anything else that a message may have (a body in memory, a lease, a join that it waits for,
//! notes) is in a second table, and a message with an entry there is *hot*.
//!
//! ```text
//!     entries       id 16, number 6, base 6, enqueued 6, flags 2, shared head 4, location of the body 8
//!                   (for an ended message: when and how it ended, in place of the last two)
//!     hot           body, durability, lease or join, copies, notes, claim: about 150 bytes
//!     shared heads  queue, task, priority, attempt, ...: one for all messages that are alike
//!     extras        workflow, headers, ...: one for all messages with the same; an index of 4 bytes a message
//!     dues          when a delayed message is due: 8 bytes; expiries likewise
//! ```

mod changes;
pub(crate) mod entry;
mod ids;
mod parts;
pub(crate) mod shared_extras;
pub(crate) mod shared_heads;

use bytes::Bytes;
use penstock_message::{JoinId, Key, MessageId, SeededState};

use crate::Position;
use crate::clock::ClockTime;
use crate::held_effects::SafeAfter;
use crate::messages::entry::{BodyAt, MessageEntry, flag};
use crate::messages::shared_extras::SharedExtras;
use crate::messages::shared_heads::{SharedHead, SharedHeads};
use crate::queues::run_charges::Charge;
use crate::records::{Grant, MessageHead, UnrunCause};
use crate::table::interner::Name;
use crate::table::slab::Slab;
use crate::table::slot_index::SlotIndex;
use crate::table::slot_times::SlotTimes;
use crate::table::u48::U48;

/// A message, named by its slot and its number. The slot may be reused. The number never is, and it changes when the
/// message moves, so a stale handle is recognized.
///
/// Handles sort by number, which is the order of publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Handle {
    pub(crate) number: u64,
    pub(crate) slot: u32,
}

/// Fields of a message that does more than wait.
#[derive(Debug)]
struct Hot {
    body: Option<Bytes>,
    /// Whether the body is part of a larger piece that was read from the journal.
    was_read_back: bool,
    body_at: BodyAt,
    waits_for: WaitsFor,
    /// Records that must be safe before a delivery.
    safe_after: SafeAfter,
    /// Last transaction whose checks accepted this lease: a transaction may settle it once.
    checked_by: u64,
    /// Next copy of the message, in another queue.
    next_copy: Option<u32>,
    extra: Option<Box<Extra>>,
}

#[derive(Clone, Copy, Debug)]
enum WaitsFor {
    Nothing,
    Join(JoinId),
    Worker(LeaseState),
}

/// Fields that most hot messages do not have either.
#[derive(Debug, Default)]
struct Extra {
    notes: Vec<Bytes>,
    claim: Option<Key>,
    /// End of that claim, unless it ends with the message.
    until_start: Option<UntilStart>,
    failure: Option<Box<KeptFailure>>,
    asked: Option<Asked>,
}

/// A claim that ends when its message is handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UntilStart {
    /// Steady time by which messages that replace each other are due.
    pub(crate) latest: Option<u64>,
}

/// Request to stop a message, made to the worker that runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) reason: Name,
    /// Whether the worker may kill the job without time to clean up.
    pub(crate) kill: bool,
}

/// Why and when a message failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeptFailure {
    pub(crate) class: Name,
    pub(crate) message: Box<str>,
    pub(crate) fingerprint: u64,
    pub(crate) preview: Box<[u8]>,
    /// Time of the failure, on the steady clock.
    pub(crate) at: u64,
    /// Whether its queue is unknown, because it failed under a broker of format 1.
    pub(crate) is_displaced: bool,
}

/// End of a message whose value is all that is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnrunEnd {
    pub(crate) how: UnrunCause,
    pub(crate) reason: Name,
    /// Time of the end, on the steady clock.
    pub(crate) at: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum EntryState {
    Ready,
    Delayed(ClockTime),
    Held(JoinId),
    Leased(LeaseState),
    Failed,
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LeaseState {
    pub(crate) grant: Grant,
    pub(crate) session: u32,
    /// Index in the session's list.
    pub(crate) index: u32,
    /// Charge to its flow; `None` if it has not been made yet, during a recovery.
    pub(crate) charge: Option<Charge>,
    /// Whether the delivery has left the broker, so that the job may have begun.
    pub(crate) sent: bool,
    /// Whether the message has expired during the lease: it expires if it is returned.
    pub(crate) expired: bool,
}

/// Remains of a removed message.
#[derive(Debug)]
pub(crate) struct Removed {
    pub(crate) journal_bytes: u64,
    /// Whether it was the last of its copies.
    pub(crate) is_last: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Messages {
    entries: Slab<MessageEntry>,
    hot: Slab<Hot>,
    pub(crate) shared_heads: SharedHeads,
    dues: SlotTimes,
    expiries: SlotTimes,
    pub(crate) extras: SharedExtras,
    by_id: SlotIndex,
    /// Messages that have ended, one for each id.
    ended: SlotIndex,
    /// Whether messages are entered in `by_id` later, all at once.
    defers_ids: bool,
    /// Bytes of the bodies in memory, with the overhead of keeping them there.
    resident_bytes: u64,
}

/// Overhead of a body in memory: the allocator's share, and its message's hot entry.
const RESIDENT_BYTES: u64 = 192;

/// Journal bytes of an ended message's value, once it was carried forward.
const ENDED_BYTES: u64 = 24;

impl Extra {
    /// Returns roughly how many bytes it takes in the journal.
    fn journal_bytes(&self) -> u64 {
        let notes: usize = self.notes.iter().map(|note| note.len() + 8).sum();
        let failure = self.failure.as_ref().map_or(0, |failure| {
            24 + failure.message.len() + failure.preview.len()
        });
        let asked = if self.asked.is_some() { 12 } else { 0 };
        (notes + failure + asked) as u64
    }
}

fn resident_bytes(body: &Option<Bytes>) -> u64 {
    body.as_ref()
        .map_or(0, |body| RESIDENT_BYTES + body.len() as u64)
}

impl Messages {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            shared_heads: SharedHeads::new(hashing),
            extras: SharedExtras::new(hashing),
            by_id: SlotIndex::new(hashing),
            ended: SlotIndex::new(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        self.by_id.hashing()
    }

    #[cfg(test)]
    pub(crate) fn heads_hashing(&self) -> SeededState {
        self.shared_heads.hashing()
    }

    /// Inserts a message, ready until another state is set. Without its body in memory it is cold.
    pub(crate) fn insert(
        &mut self,
        head: &MessageHead,
        queue: u32,
        base: Position,
        body_at: BodyAt,
        body: Option<(Bytes, SafeAfter)>,
    ) -> u32 {
        assert!(
            head.number.max(base.0) <= U48::MAX,
            "more messages than 48 bits can count"
        );
        let shared_head = self.shared_heads.add_message(&SharedHead {
            queue,
            task: head.task,
            priority: head.priority,
            max_deliveries: head.max_deliveries,
            crashes: head.crashes,
            attempt: head.attempt,
            generation: head.generation,
            attempts_before: head.attempts_before,
            result_ttl_ms: head.result_ttl_ms,
        });
        let slot = self.entries.insert(MessageEntry {
            id: head.id,
            number: U48::new(head.number),
            base: U48::new(base.0),
            enqueued_at: U48::new(head.enqueued_at.min(U48::MAX)),
            flags: 0,
            shared_head,
            packed: body_at.0,
        });
        let entry = &mut self.entries[slot];
        entry.set(flag::REDELIVERED, head.redelivered);
        entry.set(flag::COPIES, head.has_copies);
        if let Some((body, safe_after)) = body {
            let hot = self.hot_mut(slot);
            hot.body = Some(body);
            hot.safe_after = safe_after;
            self.resident_bytes += resident_bytes(&self.hot(slot).expect("it is hot").body);
        }
        self.set_expiry(slot, head.expires_at);
        match self.defers_ids && !head.has_copies {
            true => self.entries[slot].set(flag::UNENTERED, true),
            false => self.enter_id(slot),
        }
        slot
    }

    /// Keeps only the value of a message, which is its only copy.
    pub(crate) fn end(&mut self, slot: u32, ended: UnrunEnd) {
        self.set_due(slot, None);
        self.set_expiry(slot, None);
        self.leave_id(slot);
        self.forget_extras(slot);
        let entry = &mut self.entries[slot];
        if entry.is_hot() {
            let hot = self.hot.remove(entry.packed as u32);
            self.resident_bytes -= resident_bytes(&hot.body);
        }
        entry.flags = flag::ENDED;
        self.set_ended(slot, ended);
    }

    /// Inserts the value of a message that ended before its journal was carried forward.
    pub(crate) fn insert_ended(
        &mut self,
        id: MessageId,
        number: u64,
        shared_head: &SharedHead,
        base: Position,
        ended: UnrunEnd,
    ) -> u32 {
        let shared_head = self.shared_heads.add_message(shared_head);
        let slot = self.entries.insert(MessageEntry {
            id,
            number: U48::new(number),
            base: U48::new(base.0),
            enqueued_at: U48::new(0),
            flags: flag::ENDED,
            shared_head,
            packed: 0,
        });
        self.set_ended(slot, ended);
        slot
    }

    fn set_ended(&mut self, slot: u32, ended: UnrunEnd) {
        let entry = &mut self.entries[slot];
        entry.enqueued_at = U48::new(ended.at.min(U48::MAX));
        entry.packed = (ended.reason.index() as u64) << 8 | ended.how as u64;
        let Self { entries, ended, .. } = self;
        ended.insert(ended.hash(entries[slot].id), slot);
    }

    pub(crate) fn ended(&self, slot: u32) -> UnrunEnd {
        let entry = &self.entries[slot];
        debug_assert!(entry.is_ended());
        UnrunEnd {
            how: UnrunCause::ALL[(entry.packed & 0xff) as usize],
            reason: Name::at((entry.packed >> 8) as usize),
            at: entry.enqueued_at(),
        }
    }

    /// Finds the ended message with this id, if its value still exists.
    pub(crate) fn find_ended(&self, id: &MessageId) -> Option<u32> {
        self.ended
            .find(self.ended.hash(*id), |slot| self.entries[slot].id == *id)
    }

    /// Forgets the value of an ended message. Returns the bytes that it took in the journal.
    pub(crate) fn remove_ended(&mut self, slot: u32) -> u64 {
        let journal_bytes = self.journal_bytes(slot);
        let id = self.entries[slot].id;
        self.ended
            .remove(self.ended.hash(id), |other| other == slot);
        let entry = self.entries.remove(slot);
        self.shared_heads.remove_message(entry.shared_head);
        journal_bytes
    }

    /// Removes one copy.
    pub(crate) fn remove(&mut self, slot: u32) -> Removed {
        let journal_bytes = self.journal_bytes(slot);
        self.set_due(slot, None);
        self.set_expiry(slot, None);
        let is_last = self.leave_id(slot);
        let entry = self.entries.remove(slot);
        if entry.has_extras() {
            self.extras.forget(slot);
        }
        self.shared_heads.remove_message(entry.shared_head);
        if entry.is_hot() {
            let hot = self.hot.remove(entry.packed as u32);
            self.resident_bytes -= resident_bytes(&hot.body);
        }
        Removed {
            journal_bytes,
            is_last,
        }
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<&MessageEntry> {
        self.entries
            .get(handle.slot)
            .filter(|entry| entry.number() == handle.number && !entry.is_ended())
    }

    pub(crate) fn by_slot(&self, slot: u32) -> Option<&MessageEntry> {
        self.entries.get(slot)
    }

    pub(crate) fn handle(&self, slot: u32) -> Handle {
        Handle {
            number: self.entries[slot].number(),
            slot,
        }
    }

    /// Returns a number higher than every slot.
    pub(crate) fn end_of_slots(&self) -> u32 {
        self.entries.end()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Iterates in slot order, which means nothing to users but is always the same.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &MessageEntry)> {
        self.entries.iter()
    }

    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    #[inline(always)]
    fn hot(&self, slot: u32) -> Option<&Hot> {
        let entry = &self.entries[slot];
        entry.is_hot().then(|| &self.hot[entry.packed as u32])
    }

    fn hot_mut(&mut self, slot: u32) -> &mut Hot {
        let entry = &mut self.entries[slot];
        if !entry.is_hot() {
            let packed = self.hot.insert(Hot {
                body: None,
                was_read_back: false,
                body_at: BodyAt(entry.packed),
                waits_for: WaitsFor::Nothing,
                safe_after: SafeAfter {
                    disk: entry.base(),
                    ..SafeAfter::default()
                },
                checked_by: 0,
                next_copy: None,
                extra: None,
            });
            entry.set(flag::HOT, true);
            entry.packed = u64::from(packed);
        }
        &mut self.hot[entry.packed as u32]
    }

    /// Returns the rare fields. The end of a message looks at several of them; the flag saves looking up its hot entry.
    #[inline]
    fn extra(&self, slot: u32) -> Option<&Extra> {
        match self.entries[slot].has_rare_fields() {
            true => self.hot(slot)?.extra.as_deref(),
            false => None,
        }
    }

    fn extra_mut(&mut self, slot: u32) -> &mut Extra {
        self.entries[slot].set(flag::EXTRA, true);
        self.hot_mut(slot).extra.get_or_insert_default()
    }

    /// Panics unless the counts are right.
    pub(crate) fn assert_counts(&self) {
        let mut shared_heads = penstock_message::SeededMap::default();
        let (mut resident_bytes, mut hot, mut dues, mut expiries) = (0, 0, 0, 0);
        let mut with_extras = 0;
        for (slot, entry) in self.entries.iter() {
            if entry.is_ended() {
                let found = self.find_ended(&entry.id);
                assert_eq!(found, Some(slot), "the value of {:?}", entry.id);
            }
            *shared_heads.entry(*self.shared_head_of(entry)).or_default() += 1;
            with_extras += usize::from(entry.has_extras());
            dues += usize::from(entry.is_delayed());
            expiries += usize::from(entry.expires());
            let extra = self.hot(slot).and_then(|hot| hot.extra.as_deref());
            assert_eq!(
                extra.is_some(),
                entry.has_rare_fields(),
                "rare fields of {:?}",
                entry.id
            );
            if let Some(entry) = self.hot(slot) {
                hot += 1;
                resident_bytes += self::resident_bytes(&entry.body);
                if let Some(body) = &entry.body {
                    assert_eq!(body.len(), entry.body_at.length(), "the length of a body");
                }
            }
        }
        self.shared_heads.assert_counts(&shared_heads);
        self.extras.assert_counts(with_extras);
        assert_eq!(self.hot.len(), hot, "hot messages");
        assert_eq!(self.resident_bytes, resident_bytes, "bodies in memory");
        assert_eq!(self.dues.len(), dues, "times of delayed messages");
        assert_eq!(
            self.expiries.len(),
            expiries,
            "times of messages that expire"
        );
    }
}

impl std::ops::Index<u32> for Messages {
    type Output = MessageEntry;

    fn index(&self, slot: u32) -> &MessageEntry {
        &self.entries[slot]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_only_waits_takes_48_bytes() {
        assert_eq!(Slab::<MessageEntry>::slot_bytes(), 48);
        assert!(
            Slab::<Hot>::slot_bytes() <= 176,
            "{}",
            Slab::<Hot>::slot_bytes()
        );
    }
}
