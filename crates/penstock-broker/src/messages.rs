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

pub(crate) mod entry;
pub(crate) mod shared_extras;
pub(crate) mod shared_heads;

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    Extras, JoinId, JoinOutcome as Outcome, Key, Lease, Member, MessageId, ReleaseTimes,
    SeededState,
};

use crate::Position;
use crate::clock::ClockTime;
use crate::held_effects::SafeAfter;
use crate::messages::entry::{BodyAt, MessageEntry, flag};
use crate::messages::shared_extras::SharedExtras;
use crate::messages::shared_heads::{SharedHead, SharedHeads};
use crate::queues::run_charges::Charge;
use crate::queues::tally::Counter;
use crate::records::{Grant, MessageHead, UnrunCause};
use crate::table::interner::Name;
use crate::table::slab::Slab;
use crate::table::slot_index::{Hash, SlotIndex};
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

    fn enter_ids(&mut self, block: &mut Vec<(Hash, u32)>) {
        block.sort_unstable_by_key(|(hash, _)| hash.shard());
        for (hash, slot) in block.drain(..) {
            self.enter_hash(hash, slot);
        }
    }

    fn enter_if_deferred(&mut self, slot: u32) {
        let entry = &mut self.entries[slot];
        if entry.is_unentered() {
            entry.set(flag::UNENTERED, false);
            self.enter_id(slot);
        }
    }

    fn enter_id(&mut self, slot: u32) {
        self.enter_hash(self.by_id.hash(self.entries[slot].id), slot);
    }

    fn enter_hash(&mut self, hash: Hash, slot: u32) {
        let Self { entries, by_id, .. } = self;
        let is_it = |other: u32| entries[other].id == entries[slot].id;
        if let Some(first) = by_id.put(hash, slot, is_it) {
            self.hot_mut(slot).next_copy = Some(first);
        }
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

    /// Removes a message from its id's copies. Returns whether it was the only one.
    fn leave_id(&mut self, slot: u32) -> bool {
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

    fn next_copy(&self, slot: u32) -> Option<u32> {
        self.hot(slot)?.next_copy
    }

    pub(crate) fn holds(&self, id: &MessageId) -> bool {
        self.first_copy(id).is_some()
    }

    fn first_copy(&self, id: &MessageId) -> Option<u32> {
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

    // --- what a message is
    //
    // A job reads these some twenty times. Inlining them by hand, where the compiler does not, saves a job 1.7 % of its
    // instructions.

    #[inline(always)]
    pub(crate) fn shared_head(&self, slot: u32) -> &SharedHead {
        &self.shared_heads[self.entries[slot].shared_head]
    }

    /// Returns the flow of ready messages with its shared head, once there has been one.
    #[inline]
    pub(crate) fn flow(&self, slot: u32) -> Option<u32> {
        self.shared_heads.flow(self.entries[slot].shared_head)
    }

    /// Adds one to a counter of the message's queue and task.
    #[inline]
    pub(crate) fn count(&mut self, slot: u32, what: Counter) {
        self.shared_heads
            .count(self.entries[slot].shared_head, what);
    }

    pub(crate) fn set_flow(&mut self, slot: u32, flow: u32) {
        self.shared_heads
            .set_flow(self.entries[slot].shared_head, flow);
    }

    pub(crate) fn shared_head_of(&self, entry: &MessageEntry) -> &SharedHead {
        &self.shared_heads[entry.shared_head]
    }

    pub(crate) fn queue(&self, slot: u32) -> u32 {
        self.shared_head(slot).queue
    }

    pub(crate) fn state(&self, slot: u32) -> EntryState {
        let entry = &self.entries[slot];
        match entry.flags & flag::STATE {
            flag::READY => EntryState::Ready,
            flag::FAILED => EntryState::Failed,
            flag::ENDED => EntryState::Ended,
            flag::DELAYED => {
                let due = self.dues.get(slot);
                EntryState::Delayed(due.expect("a delayed message has a time"))
            }
            _ => match self.hot[entry.packed as u32].waits_for {
                WaitsFor::Join(join) => EntryState::Held(join),
                WaitsFor::Worker(lease) => EntryState::Leased(lease),
                WaitsFor::Nothing => unreachable!("it waits for a join or a worker"),
            },
        }
    }

    pub(crate) fn lease_state(&self, slot: u32) -> Option<&LeaseState> {
        match &self.hot(slot)?.waits_for {
            WaitsFor::Worker(lease) => Some(lease),
            _ => None,
        }
    }

    pub(crate) fn lease_state_mut(&mut self, slot: u32) -> Option<&mut LeaseState> {
        let entry = &self.entries[slot];
        if !entry.is_leased() {
            return None;
        }
        match &mut self.hot[entry.packed as u32].waits_for {
            WaitsFor::Worker(lease) => Some(lease),
            _ => None,
        }
    }

    pub(crate) fn lease(&self, slot: u32) -> Option<Lease> {
        let LeaseState { grant, .. } = self.lease_state(slot)?;
        Some(Lease {
            message: self.entries[slot].id,
            epoch: grant.epoch,
            grant: grant.number,
        })
    }

    #[inline(always)]
    pub(crate) fn expires_at(&self, slot: u32) -> Option<ClockTime> {
        match self.entries[slot].expires() {
            true => self.expiries.get(slot),
            false => None,
        }
    }

    /// Returns the records that must be safe before it is delivered. For a cold message, that is its base alone.
    #[inline(always)]
    pub(crate) fn safe_after(&self, slot: u32) -> SafeAfter {
        match self.hot(slot) {
            Some(hot) => hot.safe_after,
            None => SafeAfter {
                disk: self.entries[slot].base(),
                ..SafeAfter::default()
            },
        }
    }

    pub(crate) fn checked_by(&self, slot: u32) -> u64 {
        self.hot(slot).map_or(0, |hot| hot.checked_by)
    }

    pub(crate) fn notes(&self, slot: u32) -> &[Bytes] {
        self.extra(slot).map_or(&[], |extra| &extra.notes)
    }

    pub(crate) fn claim(&self, slot: u32) -> Option<&Key> {
        self.extra(slot)?.claim.as_ref()
    }

    /// Returns how the message's claim ends, if that is at its first hand-out.
    pub(crate) fn until_start(&self, slot: u32) -> Option<UntilStart> {
        match self.entries[slot].has_rare_fields() {
            true => self.extra(slot)?.until_start,
            false => None,
        }
    }

    /// Returns its extras, without its place in a join if its id already says that.
    #[inline]
    pub(crate) fn extras(&self, slot: u32) -> Option<&Extras> {
        match self.entries[slot].has_extras() {
            true => Some(self.extras.of(slot)),
            false => None,
        }
    }

    /// Returns all its extras.
    #[inline]
    pub(crate) fn whole_extras(&self, slot: u32) -> Option<Extras> {
        let entry = &self.entries[slot];
        if !entry.has_extras() && !entry.is_member() {
            return None;
        }
        let mut extras = self.extras(slot).cloned().unwrap_or_default();
        extras.member = self.member(slot);
        Some(extras)
    }

    #[inline]
    pub(crate) fn member(&self, slot: u32) -> Option<Member> {
        let entry = &self.entries[slot];
        match entry.is_member() {
            true => Some(Member {
                join: entry.id.join_of(),
                index: entry.id.index_in_join()?,
            }),
            false => self.extras(slot)?.member,
        }
    }

    /// Returns the outcome of its join that releases it.
    pub(crate) fn when(&self, slot: u32) -> Outcome {
        self.extras(slot)
            .map_or(Outcome::Succeeded, |extras| extras.when)
    }

    pub(crate) fn failure(&self, slot: u32) -> Option<&KeptFailure> {
        self.extra(slot)?.failure.as_deref()
    }

    pub(crate) fn asked(&self, slot: u32) -> Option<Asked> {
        self.extra(slot)?.asked
    }

    /// Returns the body, if it is in memory.
    pub(crate) fn body(&self, slot: u32) -> Option<&Bytes> {
        self.hot(slot)?.body.as_ref()
    }

    /// Whether the message was handed out and can't be sent before its body is read from the journal.
    pub(crate) fn is_sent_after_read(&self, slot: u32) -> bool {
        self.hot(slot).is_some_and(|hot| {
            let is_unsent = matches!(&hot.waits_for, WaitsFor::Worker(lease) if !lease.sent);
            is_unsent && hot.body.is_none() && hot.body_at.length() > 0
        })
    }

    pub(crate) fn body_at(&self, slot: u32) -> BodyAt {
        match self.hot(slot) {
            Some(hot) => hot.body_at,
            None => BodyAt(self.entries[slot].packed),
        }
    }

    pub(crate) fn body_bytes(&self, slot: u32) -> u64 {
        self.body_at(slot).length() as u64
    }

    /// Returns roughly how many bytes it takes in the journal.
    pub(crate) fn journal_bytes(&self, slot: u32) -> u64 {
        if self.entries[slot].is_ended() {
            return ENDED_BYTES;
        }
        let entry = &self.entries[slot];
        let (body_at, extra) = match entry.is_hot() {
            true => {
                let hot = &self.hot[entry.packed as u32];
                (hot.body_at, hot.extra.as_ref())
            }
            false => (BodyAt(entry.packed), None),
        };
        let extra = extra.map_or(0, |extra| extra.journal_bytes());
        let extra = match self.extras(slot) {
            Some(extras) => {
                let key = extras.key.as_ref().map_or(0, Bytes::len);
                extra + (48 + extras.headers_bytes() + key) as u64
            }
            None if entry.is_member() => extra + 48,
            None => extra,
        };
        64 + body_at.length() as u64 + extra
    }

    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Returns the bytes that its body takes, or would take, in memory.
    pub(crate) fn resident_bytes_of(&self, slot: u32) -> u64 {
        RESIDENT_BYTES + self.body_bytes(slot)
    }

    // --- how it changes

    pub(crate) fn set_state(&mut self, slot: u32, state: EntryState) {
        let (bits, waits_for, due) = match state {
            EntryState::Ready => (flag::READY, WaitsFor::Nothing, None),
            EntryState::Delayed(when) => (flag::DELAYED, WaitsFor::Nothing, Some(when)),
            EntryState::Held(join) => (flag::HELD, WaitsFor::Join(join), None),
            EntryState::Leased(lease) => (flag::LEASED, WaitsFor::Worker(lease), None),
            EntryState::Failed => (flag::FAILED, WaitsFor::Nothing, None),
            EntryState::Ended => unreachable!("`end` is the way there"),
        };
        self.set_due(slot, due);
        let entry = &mut self.entries[slot];
        entry.flags = entry.flags & !flag::STATE | bits;
        match (waits_for, entry.is_hot()) {
            (WaitsFor::Nothing, false) => {}
            (waits_for, _) => self.hot_mut(slot).waits_for = waits_for,
        }
    }

    fn set_due(&mut self, slot: u32, due: Option<ClockTime>) {
        if due.is_some() || self.entries[slot].is_delayed() {
            self.dues.set(slot, due);
        }
    }

    pub(crate) fn set_expiry(&mut self, slot: u32, expires_at: Option<ClockTime>) {
        let entry = &mut self.entries[slot];
        if expires_at.is_some() || entry.expires() {
            entry.set(flag::EXPIRES, expires_at.is_some());
            self.expiries.set(slot, expires_at);
        }
    }

    pub(crate) fn set_number(&mut self, slot: u32, number: u64) {
        assert!(number <= U48::MAX, "more messages than 48 bits can count");
        self.entries[slot].number = U48::new(number);
    }

    /// Sets the record that holds its full state from now on.
    pub(crate) fn set_base(&mut self, slot: u32, base: Position, body_at: BodyAt) {
        assert!(base.0 <= U48::MAX, "more records than 48 bits can count");
        let entry = &mut self.entries[slot];
        entry.base = U48::new(base.0);
        match entry.is_hot() {
            true => self.hot[entry.packed as u32].body_at = body_at,
            false => entry.packed = body_at.0,
        }
    }

    /// Sets the record that holds its value from now on.
    pub(crate) fn set_base_of_ended(&mut self, slot: u32, base: Position) {
        assert!(base.0 <= U48::MAX, "more records than 48 bits can count");
        let entry = &mut self.entries[slot];
        debug_assert!(entry.is_ended());
        entry.base = U48::new(base.0);
    }

    pub(crate) fn set_shared_head(&mut self, slot: u32, change: impl FnOnce(&mut SharedHead)) {
        let mut shared_head = *self.shared_head(slot);
        change(&mut shared_head);
        let new = self.shared_heads.add_message(&shared_head);
        let old = std::mem::replace(&mut self.entries[slot].shared_head, new);
        self.shared_heads.remove_message(old);
    }

    pub(crate) fn set_redelivered(&mut self, slot: u32, redelivered: bool) {
        self.entries[slot].set(flag::REDELIVERED, redelivered);
    }

    pub(crate) fn set_has_copies(&mut self, slot: u32) {
        self.entries[slot].set(flag::COPIES, true);
        self.enter_if_deferred(slot);
    }

    pub(crate) fn set_recovered(&mut self, slot: u32, recovered: bool) {
        self.entries[slot].set(flag::RECOVERED, recovered);
    }

    /// Marks all messages that are not leased after an unclean end: a grant whose record was lost may have run them.
    /// Skips messages that may be delivered only once, which wait for their grant to be safe. Skips messages that a
    /// join holds. A lost grant may have run those too, if the end of a member was lost with it. But that run was given
    /// values of members that have not ended, so its grant never holds again.
    pub(crate) fn may_have_run(&mut self) {
        let Self {
            entries,
            shared_heads,
            ..
        } = self;
        for entry in entries.iter_mut() {
            let may_run = !entry.is_leased() && !entry.is_failed() && !entry.is_ended();
            if shared_heads[entry.shared_head].max_deliveries > 1 && may_run {
                // A lease does not say which of several copies it was for, and the others may be gone.
                entry.set(flag::RECOVERED, !entry.has_copies() && !entry.is_held());
                entry.set(flag::REDELIVERED, !planted!("forget-unseen-run"));
            }
        }
    }

    pub(crate) fn set_rests(&mut self, slot: u32, safe_after: SafeAfter) {
        self.hot_mut(slot).safe_after = safe_after;
    }

    pub(crate) fn set_checked_by(&mut self, slot: u32, check: u64) {
        self.hot_mut(slot).checked_by = check;
    }

    pub(crate) fn set_claim(&mut self, slot: u32, key: Key) {
        let extra = self.extra_mut(slot);
        (extra.claim, extra.until_start) = (Some(key), None);
        self.enter_if_deferred(slot);
    }

    pub(crate) fn set_until_start(&mut self, slot: u32, until: UntilStart) {
        self.extra_mut(slot).until_start = Some(until);
    }

    pub(crate) fn forget_claim(&mut self, slot: u32) {
        let extra = self.extra_mut(slot);
        (extra.claim, extra.until_start) = (None, None);
    }

    pub(crate) fn set_extras(&mut self, slot: u32, mut extras: Extras) {
        self.forget_extras(slot);
        let entry = &mut self.entries[slot];
        if let Some(Member { join, index }) = extras.member
            && (join, Some(index)) == (entry.id.join_of(), entry.id.index_in_join())
        {
            extras.member = None;
            entry.set(flag::MEMBER, true);
        }
        if extras != Extras::default() {
            entry.set(flag::EXTRAS, true);
            self.extras.set(slot, extras);
        }
    }

    fn forget_extras(&mut self, slot: u32) {
        let entry = &mut self.entries[slot];
        if entry.has_extras() {
            self.extras.forget(slot);
        }
        entry.flags &= !(flag::EXTRAS | flag::MEMBER);
    }

    pub(crate) fn set_suspects(&mut self, slot: u32, suspects: u8) {
        if self.extras(slot).map_or(0, |extras| extras.suspects) != suspects {
            let extras = self.whole_extras(slot).unwrap_or_default();
            self.set_extras(slot, Extras { suspects, ..extras });
        }
    }

    pub(crate) fn take_later(&mut self, slot: u32) -> Option<ReleaseTimes> {
        let mut extras = self.whole_extras(slot)?;
        let later = extras.later.take()?;
        self.set_extras(slot, extras);
        Some(*later)
    }

    pub(crate) fn set_failure(&mut self, slot: u32, failure: Option<KeptFailure>) {
        self.extra_mut(slot).failure = failure.map(Box::new);
    }

    pub(crate) fn set_asked(&mut self, slot: u32, asked: Option<Asked>) {
        self.extra_mut(slot).asked = asked;
    }

    pub(crate) fn notes_mut(&mut self, slot: u32) -> &mut Vec<Bytes> {
        &mut self.extra_mut(slot).notes
    }

    /// Sets a body that was read back from the journal, as part of a larger piece.
    pub(crate) fn set_body_read_back(&mut self, slot: u32, body: Bytes) {
        self.take_body(slot);
        let hot = self.hot_mut(slot);
        hot.body = Some(body);
        hot.was_read_back = true;
        self.resident_bytes += resident_bytes(&self.hot(slot).expect("it is hot").body);
    }

    pub(crate) fn take_body(&mut self, slot: u32) -> Option<Bytes> {
        if !self.entries[slot].is_hot() {
            return None;
        }
        let hot = self.hot_mut(slot);
        hot.was_read_back = false;
        let body = hot.body.take();
        self.resident_bytes -= resident_bytes(&body);
        body
    }

    /// Drops a body that is part of a larger piece, which it would keep in memory.
    pub(crate) fn drop_body_read_back(&mut self, slot: u32) {
        if self.hot(slot).is_some_and(|hot| hot.was_read_back) {
            self.take_body(slot);
        }
    }

    /// Drops the hot entry of a message that does not need it. Its base, and everything that its delivery depends on,
    /// must be safe.
    pub(crate) fn cool(&mut self, slot: u32) {
        let Some(hot) = self.hot(slot) else {
            return;
        };
        let is_plain = hot.body.is_none()
            && matches!(hot.waits_for, WaitsFor::Nothing)
            && hot.next_copy.is_none()
            && hot.extra.is_none();
        if is_plain {
            let entry = &mut self.entries[slot];
            let hot = self.hot.remove(entry.packed as u32);
            entry.set(flag::HOT, false);
            entry.packed = hot.body_at.0;
        }
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
