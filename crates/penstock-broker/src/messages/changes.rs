//! Changes the parts of a message.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{Extras, Key, Member, ReleaseTimes};

use super::{Asked, EntryState, KeptFailure, Messages, UntilStart, WaitsFor, resident_bytes};
use crate::Position;
use crate::clock::ClockTime;
use crate::held_effects::SafeAfter;
use crate::messages::entry::{BodyAt, flag};
use crate::messages::shared_heads::SharedHead;
use crate::queues::tally::Counter;
use crate::table::u48::U48;

impl Messages {
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

    pub(super) fn set_due(&mut self, slot: u32, due: Option<ClockTime>) {
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

    pub(super) fn forget_extras(&mut self, slot: u32) {
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
}
