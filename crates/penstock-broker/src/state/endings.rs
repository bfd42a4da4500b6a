//! Ends of messages: the changes that each makes, live and in replay.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{Key, WorkflowState};

use super::{Adjust, BrokerState};
use crate::clock::ClockTime;
use crate::joins::Arrival;
use crate::messages::{EntryState, KeptFailure, UnrunEnd};
use crate::reclaim::live_bases::Entity;
use crate::records::{Failing, KeptEnd, KeptEnds, RunHead, UnrunCause};
use crate::table::interner::Name;
use crate::timers::Timer;

/// Ways in which a message ends.
pub(crate) enum Ending<'a> {
    /// A worker has finished it.
    Acked { cost_us: Option<u64> },
    /// Its run is over, and something else takes its place.
    Replaced { cost_us: Option<u64> },
    /// Failed for good; the message stays as a failed job.
    Failed {
        failure: &'a Failing<'a>,
        note: Option<Bytes>,
        cost_us: Option<u64>,
    },
    /// The broker ended it without a run. `kept`: its value exists for as long as results are kept.
    Unrun { ended: UnrunEnd, kept: bool },
    /// A failed job is forgotten.
    Dropped,
}

pub(super) fn owned(failure: &Failing<'_>) -> KeptFailure {
    KeptFailure {
        class: failure.class,
        message: failure.message.into(),
        fingerprint: failure.fingerprint,
        preview: failure.preview.into(),
        at: failure.at,
        is_displaced: failure.is_displaced,
    }
}

impl BrokerState {
    /// Ends a message. Every end of a message passes through here, live and in replay, whatever the cause. Removes the
    /// message from its place, frees its key, reports to the join of which it is a member, and keeps the values and
    /// notes that must be kept.
    pub(crate) fn end(&mut self, slot: u32, ending: Ending<'_>) {
        let entry = &self.messages[slot];
        let (id, base) = (entry.id, entry.base());
        let extras = self.messages.extras(slot);
        let member = match entry.may_be_member() {
            true => self.messages.member(slot),
            false => None,
        };
        let inputs = extras.and_then(|extras| extras.inputs);
        if extras.is_some_and(|extras| extras.workflow.is_some()) {
            let outcome = match &ending {
                Ending::Acked { .. } => Some(WorkflowState::Succeeded),
                Ending::Failed { .. } => Some(WorkflowState::Failed),
                Ending::Unrun { ended, .. } => self.outcome_of(*ended),
                // It was counted when it failed, or its job continues.
                Ending::Dropped | Ending::Replaced { .. } => None,
            };
            if let Some(outcome) = outcome {
                self.count_end(slot, outcome);
            }
        }
        let failure = match (member, &ending) {
            (Some(_), Ending::Unrun { ended, .. }) if ended.how == UnrunCause::NotNeeded => {
                Arrival::NotNeeded
            }
            (Some(_), Ending::Failed { .. } | Ending::Unrun { .. }) => {
                Arrival::Failed(self.causes_of(slot))
            }
            _ => Arrival::Succeeded,
        };
        // A failed job may be retried, and reads them again.
        let is_failed = matches!(ending, Ending::Failed { .. });
        let mut is_last = true;
        match ending {
            Ending::Acked { cost_us } => {
                is_last = self.forget_message(slot, cost_us);
                self.report(member, base, Arrival::Succeeded);
            }
            Ending::Replaced { cost_us } => {
                is_last = self.forget_message(slot, cost_us);
                if planted!("replace-doubles-membership") {
                    self.report(member, base, Arrival::Succeeded);
                }
            }
            Ending::Failed {
                failure: reason,
                note,
                cost_us,
            } => {
                self.fail(slot, reason, note, cost_us);
                self.report(member, base, failure);
            }
            Ending::Unrun { ended, kept } => {
                let keeps_value = kept && self.messages.shared_head(slot).result_ttl_ms.is_some();
                match keeps_value {
                    true => self.leave_value(slot, ended),
                    false => is_last = self.forget_message(slot, None),
                }
                if !planted!("lose-member") {
                    self.report(member, base, failure);
                }
            }
            // It reported when it failed.
            Ending::Dropped => is_last = self.forget_message(slot, None),
        }
        if let Some(inputs) = inputs
            && !is_failed
        {
            self.joins.remove_reader(inputs.join);
        }
        if is_last {
            self.touch_result(id);
            self.schedules.job_ended(&id);
        }
    }

    /// Removes a message. Returns whether it was the last of its copies.
    pub(crate) fn forget_message(&mut self, slot: u32, cost_us: Option<u64>) -> bool {
        let was_live = !self.messages[slot].is_failed();
        let has_rare_fields = self.messages[slot].has_rare_fields();
        if has_rare_fields {
            self.forget_asked(slot);
        }
        self.take(slot, cost_us);
        if was_live {
            self.count_live(slot, Adjust::Subtract);
        }
        self.abandon_expiry(slot);
        if has_rare_fields {
            self.free_claim(slot);
            if let Some(failure) = self.messages.failure(slot) {
                self.names.release(failure.class);
            }
        }
        let removed = self.messages.remove(slot);
        self.live_bytes -= removed.journal_bytes;
        self.live_bases.abandon();
        removed.is_last
    }

    fn leave_value(&mut self, slot: u32, ended: UnrunEnd) {
        let id = self.messages[slot].id;
        self.forget_value(&Key::Result(id));
        let was_live = !self.messages[slot].is_failed();
        self.forget_asked(slot);
        self.take(slot, None);
        if was_live {
            self.count_live(slot, Adjust::Subtract);
        }
        self.abandon_expiry(slot);
        self.free_claim(slot);
        self.live_bytes -= self.messages.journal_bytes(slot);
        if let Some(failure) = self.messages.failure(slot) {
            self.names.release(failure.class);
        }
        self.names.hold(ended.reason);
        self.messages.end(slot, ended);
        self.live_bytes += self.messages.journal_bytes(slot);
        self.count_ended(slot);
    }

    fn count_ended(&mut self, slot: u32) {
        let ttl_ms = self.messages.shared_head(slot).result_ttl_ms.unwrap_or(0);
        let number = self.messages[slot].number();
        self.ends.push(ttl_ms, slot, number);
        self.wait_for_ended_values(ttl_ms);
    }

    /// Sets the timer for the oldest value with this time to live, unless there is one.
    pub(crate) fn wait_for_ended_values(&mut self, ttl_ms: u64) {
        if let Some(slot) = self.ends.first(ttl_ms, &self.messages)
            && self.ends.timed.insert(ttl_ms)
        {
            let over = self.messages.ended(slot).at.saturating_add(ttl_ms);
            let timer = Timer::EndedValues { ttl_ms };
            self.timers.set(ClockTime::steady(over), timer);
        }
    }

    /// Returns the first value with this time to live if it has expired by `now`, and how long ago it did.
    pub(crate) fn first_ended_before(&mut self, ttl_ms: u64, now: u64) -> Option<(u32, u64)> {
        let slot = self.ends.first(ttl_ms, &self.messages)?;
        let over = self.messages.ended(slot).at.saturating_add(ttl_ms);
        (over <= now).then(|| (slot, now - over))
    }

    /// Forgets the value of a message that the broker has ended.
    pub(crate) fn drop_ended(&mut self, slot: u32) {
        let id = self.messages[slot].id;
        self.remove_ended(slot);
        self.touch_result(id);
    }

    pub(super) fn remove_ended(&mut self, slot: u32) {
        self.names.release(self.messages.ended(slot).reason);
        self.live_bytes -= self.messages.remove_ended(slot);
        self.live_bases.abandon();
        self.ends.note_removed();
    }

    /// Restores values that were carried forward. Returns their slots, by number.
    pub(crate) fn restore_ends(&mut self, ends: &KeptEnds<'_>, end: &KeptEnd) -> u32 {
        self.numbers = self.numbers.max(end.number);
        self.forget_value(&Key::Result(end.id));
        let shared_head = crate::messages::shared_heads::SharedHead {
            queue: self.queues.find_or_create(ends.queue, &mut self.names),
            task: ends.task,
            priority: 0,
            max_deliveries: 1,
            crashes: 0,
            attempt: ends.attempt,
            generation: ends.generation,
            attempts_before: 0,
            result_ttl_ms: Some(ends.result_ttl_ms),
        };
        let ended = UnrunEnd {
            how: ends.how,
            reason: ends.reason,
            at: end.at,
        };
        self.queues.know_task(ends.task, &mut self.names);
        self.names.hold(ends.reason);
        let position = self.position;
        let slot = self
            .messages
            .insert_ended(end.id, end.number, &shared_head, position, ended);
        self.live_bytes += self.messages.journal_bytes(slot);
        self.live_bases.add(position, Entity::Message { slot });
        self.count_ended(slot);
        slot
    }

    fn fail(
        &mut self,
        slot: u32,
        failure: &Failing<'_>,
        note: Option<Bytes>,
        cost_us: Option<u64>,
    ) {
        self.forget_asked(slot);
        self.take(slot, cost_us);
        self.count_live(slot, Adjust::Subtract);
        // It is not held while its size changes.
        self.messages.set_state(slot, EntryState::Failed);
        self.abandon_expiry(slot);
        if !planted!("claim-survives-dead-letter") {
            self.free_claim(slot);
        }
        self.numbers = self.numbers.max(failure.to);
        self.live_bytes -= self.messages.journal_bytes(slot);
        let was = self.messages[slot].number();
        self.messages.set_number(slot, failure.to);
        self.renumber_claim(slot, was);
        self.messages.set_expiry(slot, None);
        self.messages.set_redelivered(slot, false);
        self.messages.set_shared_head(slot, |shared_head| {
            shared_head.crashes = shared_head
                .crashes
                .saturating_add(u8::from(failure.crashed));
        });
        self.messages.set_rests(slot, self.safe_after);
        self.names.hold(failure.class);
        self.messages.set_failure(slot, Some(owned(failure)));
        self.live_bytes += self.messages.journal_bytes(slot);
        if let Some(note) = note
            && !planted!("lose-note")
        {
            self.add_note(slot, note);
        }
        self.keep_failed(slot);
        self.cool_when_safe(slot);
    }

    pub(super) fn keep_failed(&mut self, slot: u32) {
        self.messages.set_state(slot, EntryState::Failed);
        let number = self.messages[slot].number();
        let bytes = self.messages.journal_bytes(slot);
        self.failed.insert(number, slot, bytes);
        self.queues[self.messages.queue(slot)].failed += 1;
        self.wait_for_failed_jobs();
    }

    /// Returns a failed job to a queue, as its next generation.
    pub(crate) fn revive(&mut self, slot: u32, to: u64, queue: Name) {
        let id = self.messages[slot].id;
        self.take(slot, None);
        self.count_retry(slot);
        self.live_bytes -= self.messages.journal_bytes(slot);
        if let Some(failure) = self.messages.failure(slot) {
            self.names.release(failure.class);
        }
        self.messages.set_failure(slot, None);
        self.messages.set_suspects(slot, 0);
        self.live_bytes += self.messages.journal_bytes(slot);
        self.numbers = self.numbers.max(to);
        let queue = self.queues.find_or_create(queue, &mut self.names);
        self.messages.set_number(slot, to);
        self.messages.set_shared_head(slot, |shared_head| {
            shared_head.queue = queue;
            shared_head.crashes = 0;
            shared_head.generation = shared_head.generation.saturating_add(1);
            shared_head.attempt = shared_head.attempt.saturating_add(1);
            shared_head.attempts_before = shared_head.attempt;
        });
        self.messages.set_rests(slot, self.safe_after);
        if let Some(claim) = self.messages.claim(slot).cloned() {
            self.own(slot, claim);
        }
        self.forget_value(&Key::Result(id));
        self.make_ready(slot);
        self.touch_result(id);
        self.cool_when_safe(slot);
    }

    /// Hashes class and task, which group the failures that the broker finds itself. FNV-1a, from its authors' page,
    /// since the journal stores it.
    pub(crate) fn fingerprint(&self, slot: u32, class: &str) -> u64 {
        let task = self.names.text(self.messages.shared_head(slot).task);
        let bytes = class.bytes().chain([0]).chain(task.bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// Describes how a message failed, for the journal.
    pub(crate) fn failing(&self, slot: u32) -> Option<Failing<'_>> {
        let failure = self.messages.failure(slot)?;
        Some(Failing {
            to: self.messages[slot].number(),
            crashed: false,
            is_displaced: failure.is_displaced,
            class: failure.class,
            message: &failure.message,
            fingerprint: failure.fingerprint,
            preview: &failure.preview,
            note: None,
            at: failure.at,
        })
    }

    /// Returns the run of a job that ends now, for its value.
    pub(crate) fn run_of(&self, slot: u32, ended_at: u64) -> RunHead {
        let shared_head = self.messages.shared_head(slot);
        RunHead {
            queue: self.queues[shared_head.queue].name,
            attempt: shared_head.attempt,
            generation: shared_head.generation,
            ended_at,
        }
    }
}
