//! Recovers a broker from the journal's records.

use std::collections::BTreeSet;

use bytes::Bytes;
use penstock_message::{Failure, JoinId, SeededState, Value};

use crate::clock::{ClockTime, Clocks, KnownClocks};
use crate::connections::truncate;
use crate::endings::CRASHED;
use crate::joins::Arrival;
use crate::messages::entry::BodyAt;
use crate::messages::{Asked, EntryState, Handle, UnrunEnd, UntilStart};
use crate::records::{
    FIRST_VERSION, Failing, JoinProgress, RecordError, RecordEvent, RecordReader,
};
use crate::state::{BrokerState, Ending};
use crate::table::by_number::SlotsByNumber;
use crate::timers::Timer;
use crate::{Broker, BrokerOptions, Now, Position};

/// Reads every record of the journal, in order, and becomes the broker that wrote them.
///
/// ```text
///     let mut recovery = Recovery::new(options);
///     for (position, record) in journal { recovery.replay(position, record)?; }
///     let broker = recovery.finish(now, epoch);
/// ```
#[derive(Debug)]
pub struct Recovery {
    options: BrokerOptions,
    state: BrokerState,
    /// Slot of each message, by its number.
    slots: SlotsByNumber,
    last: Position,
    epoch: u32,
    clocks: KnownClocks,
    /// Last grant, as (epoch, number).
    last_grant: (u32, u64),
    /// Messages whose workers were asked to stop them.
    asked: Vec<Handle>,
    /// Messages held by joins whose full state appeared again: their joins still list them.
    listed: BTreeSet<Handle>,
    /// Reopened joins, some of whose members may not have learned of it.
    reopened: Vec<JoinId>,
    /// Whether every record so far has the first format.
    is_first_format: bool,
}

/// Queue in which a broker of format 1 kept failed jobs.
const FIRST_FORMAT_FAILED: &str = "dead";
/// Time for which it kept them.
const FIRST_FORMAT_FAILED_MS: u64 = 30 * 24 * 60 * 60 * 1000;

/// A record that this program can't read. The journal's checksums hold, so it was written that way: by a newer program,
/// or by one with a bug. No broker serves such a journal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error("the journal's record {position} can't be read: {error}", position = position.0)]
    Record {
        position: Position,
        error: RecordError,
    },
    #[error("the journal's record {position} comes after {last}: records must come in order", position = position.0, last = last.0)]
    OutOfOrder { position: Position, last: Position },
}

impl Recovery {
    pub fn new(options: BrokerOptions) -> Self {
        // Bodies that can be read back at the hand-out need not be kept now.
        let mut state = BrokerState::new(SeededState::new(options.hash_seed));
        state.resident_limit = options.resident_bodies_bytes.map(|_| 0);
        state.failed_kept_ms = options.failed_kept_ms;
        state.messages.defer_ids();
        Self {
            options,
            state,
            slots: SlotsByNumber::default(),
            last: Position(0),
            epoch: 0,
            clocks: KnownClocks::default(),
            last_grant: (0, 0),
            asked: Vec::new(),
            listed: BTreeSet::new(),
            reopened: Vec::new(),
            is_first_format: true,
        }
    }

    pub fn replay(&mut self, position: Position, record: &[u8]) -> Result<(), ReplayError> {
        if position <= self.last {
            return Err(ReplayError::OutOfOrder {
                position,
                last: self.last,
            });
        }
        self.last = position;
        self.state.position = position;
        self.state.durable = position;
        let unreadable = |error| ReplayError::Record { position, error };
        let mut reader = RecordReader::new(record).map_err(unreadable)?;
        self.epoch = self.epoch.max(reader.epoch);
        if reader.version > FIRST_VERSION {
            self.leave_first_format();
        }
        while let Some(event) = reader.next(&mut self.state.names).map_err(unreadable)? {
            let mut body_at = BodyAt::new(0, 0);
            match &event {
                RecordEvent::ClockSet { steady } => self.clocks.set(reader.time, *steady),
                RecordEvent::ClockBoot { boot } => self.clocks.began(*boot, reader.time),
                // The body is the last part of its event.
                RecordEvent::Message { body, .. } if body.len() <= BodyAt::CAP_BYTES => {
                    body_at = BodyAt::new(reader.at() - body.len(), body.len());
                }
                RecordEvent::Message { .. } => {
                    let (what, at) = ("body", reader.at());
                    return Err(unreadable(RecordError::Malformed { what, at }));
                }
                // A copy and its source are published in one record.
                RecordEvent::Copied { source, .. }
                    if self
                        .slots
                        .of(*source)
                        .is_some_and(|source| self.state.messages[source].base() != position) =>
                {
                    let (what, at) = ("copy", reader.at());
                    return Err(unreadable(RecordError::Malformed { what, at }));
                }
                RecordEvent::Granted { grant, .. } => {
                    self.last_grant = self.last_grant.max((grant.epoch, grant.number));
                }
                RecordEvent::Counters { grants, .. } => {
                    self.last_grant = self.last_grant.max((reader.epoch, *grants));
                }
                _ => {}
            }
            self.apply(event, body_at);
        }
        self.state.newly_unserved.clear();
        // The journal states the consequences in separate events.
        self.state.reported.clear();
        self.state.inherited.clear();
        self.state.workflows.forget_touched();
        self.state.joins.abandoned.clear();
        self.state.cool();
        self.state.sweep();
        Ok(())
    }

    /// Returns the broker. `epoch` is the one under which this start writes: higher than the last if that did not end
    /// cleanly. Leases that were held are kept for one heartbeat, so that their sessions can return.
    pub fn finish(mut self, now: Now, epoch: u32) -> Broker {
        assert!(
            epoch >= self.epoch,
            "epoch {epoch} is older than the journal's {}",
            self.epoch
        );
        self.state.resident_limit = self.options.resident_bodies_bytes;
        self.leave_first_format();
        let asked = self.asked_and_not_leased();
        // Frees its memory for the structures that are built next.
        drop(std::mem::take(&mut self.slots));
        self.state.messages.enter_deferred_ids();
        let clocks = Clocks::resume(now, &self.clocks);
        self.state.release_orphans();
        if epoch > self.epoch {
            // A grant whose record was lost may have run it. This excludes messages that may be delivered only once:
            // they wait for their grant to be safe.
            self.state.messages.may_have_run();
        }
        let away: Vec<u32> = self.state.sessions.iter().map(|(index, _)| index).collect();
        for index in away {
            let left_at = self.state.sessions[index]
                .left_at
                .unwrap_or(clocks.steady());
            self.state.wait_for_session(
                index,
                left_at,
                clocks.steady(),
                self.options.session_memory_ms,
            );
        }
        self.state.count_purged();
        self.state.review_joins(clocks.steady());
        self.state.ends.rebuild(&self.state.messages);
        for ttl_ms in self.state.ends.ttls().collect::<Vec<_>>() {
            self.state.wait_for_ended_values(ttl_ms);
        }
        self.state.failed.is_timed = false;
        self.state.wait_for_failed_jobs();
        self.state.review_all_service();
        self.state.review_workflows();
        let mut broker = Broker::recovered(
            self.options,
            self.state,
            clocks,
            epoch,
            self.last_grant,
            self.last,
        );
        broker.chores.end_asked(asked);
        for join in self.reopened {
            broker.resume_reopening(join);
        }
        broker
    }

    /// Returns the messages whose workers were asked to stop them and that none runs: a repaired journal has lost their
    /// leases.
    fn asked_and_not_leased(&self) -> Vec<Handle> {
        let messages = &self.state.messages;
        let waits = |message: &Handle| {
            let entry = messages.get(*message);
            entry.is_some_and(|entry| !entry.is_leased()) && messages.asked(message.slot).is_some()
        };
        self.asked.iter().copied().filter(waits).collect()
    }

    /// Converts failed jobs of a broker of format 1, which were messages of a queue. Messages that clients published to
    /// a queue of that name stay there.
    fn leave_first_format(&mut self) {
        if !std::mem::take(&mut self.is_first_format) {
            return;
        }
        let state = &mut self.state;
        let queue = state.names.find(FIRST_FORMAT_FAILED);
        let Some(queue) = queue.and_then(|name| state.queues.find(name)) else {
            return;
        };
        let slots = state.messages.iter().map(|(slot, _)| slot);
        let slots = slots.filter(|slot| state.messages.queue(*slot) == queue);
        let mut slots: Vec<u32> = slots
            .filter(|slot| state.has_failed_before(*slot))
            .collect();
        slots.sort_unstable_by_key(|slot| state.messages[*slot].number());
        for slot in slots {
            state.fail_as_before(slot);
        }
    }

    /// Applies an event. Events on unknown things are skipped: their segment was reclaimed, because they had ended or
    /// because their full state comes later.
    fn apply(&mut self, event: RecordEvent<'_>, body_at: BodyAt) {
        let state = &mut self.state;
        match event {
            RecordEvent::ClockSet { .. } | RecordEvent::ClockBoot { .. } => {}
            RecordEvent::Counters {
                numbers,
                grants,
                sessions,
                evicted,
            } => {
                state.numbers = state.numbers.max(numbers);
                state.grants = state.grants.max(grants);
                state.sessions.numbers = state.sessions.numbers.max(sessions);
                state.keys.evicted = state.keys.evicted.max(evicted);
            }
            RecordEvent::SessionOpened {
                number,
                session,
                heartbeat_ms,
                applied,
                name,
            } => {
                let is_new = state.sessions.by_number(number).is_none();
                let index = state.open_session(number, session, heartbeat_ms, applied, name);
                let session = &mut state.sessions[index];
                session.judged_in = self.epoch;
                session.restore(applied);
                // It was opened at a number that its client had used before, and has decided nothing since.
                session.is_forgotten |= is_new && applied > 0;
            }
            RecordEvent::SessionLeft { number, at } => {
                if let Some(index) = state.sessions.by_number(number) {
                    state.sessions[index].left_at = Some(at);
                }
            }
            RecordEvent::SessionForgotten { number } => {
                if let Some(index) = state.sessions.by_number(number)
                    && state.sessions[index].leases.is_empty()
                {
                    state.forget_session(index);
                }
            }
            RecordEvent::Applied { session, through } => {
                if let Some(index) = state.sessions.by_number(session) {
                    let session = &mut state.sessions[index];
                    session.restore(through);
                    session.is_forgotten = false;
                }
            }
            RecordEvent::Answered {
                session,
                seq,
                receipt,
            } => {
                if let Some(index) = state.sessions.by_number(session) {
                    state.sessions[index].keep_receipt(seq, receipt);
                }
            }
            RecordEvent::Message {
                head,
                extras,
                failure,
                body,
            } => {
                if let Some(slot) = self.slots.take(head.number) {
                    if let EntryState::Held(_) = state.messages.state(slot) {
                        self.listed.insert(state.messages.handle(slot));
                    }
                    state.forget(slot);
                }
                let kept = state.keeps_body(head.queue, head.state);
                let body = kept.then(|| Bytes::copy_from_slice(body));
                let extras = extras.map(|extras| Box::new(extras.into_owned()));
                let slot = state.insert_message(&head, extras, failure.as_ref(), body_at, body);
                self.slots.put(head.number, slot);
                if let EntryState::Held(join) = state.messages.state(slot)
                    && self.listed.contains(&state.messages.handle(slot))
                {
                    // It usually has the same slot as before.
                    state.joins.list_once(&join);
                }
            }
            RecordEvent::Copied {
                number,
                source,
                queue,
            } => {
                if let Some(source) = self.slots.of(source) {
                    let slot = state.copy_message(source, number, queue);
                    self.slots.put(number, slot);
                }
            }
            RecordEvent::Noted { number, note } => {
                if let Some(slot) = self.slots.of(number) {
                    state.add_note(slot, Bytes::copy_from_slice(note));
                }
            }
            RecordEvent::Granted {
                number,
                session,
                grant,
            } => {
                state.grants = state.grants.max(grant.number);
                if let Some(slot) = self.slots.of(number)
                    && let Some(session) = state.sessions.by_number(session)
                {
                    state.grant(slot, session, grant);
                }
            }
            RecordEvent::Returned {
                number,
                redelivered,
            } => {
                if let Some(slot) = self.slots.of(number) {
                    state.return_message(slot, redelivered);
                }
            }
            RecordEvent::Crashed { number, reason } => {
                if let Some(slot) = self.slots.of(number) {
                    state.crash_message(slot, Bytes::copy_from_slice(reason));
                }
            }
            RecordEvent::Suspected { number, reason } => {
                if let Some(slot) = self.slots.of(number) {
                    state.suspect_message(slot, Bytes::copy_from_slice(reason));
                }
            }
            RecordEvent::CancelAsked {
                number,
                kill,
                reason,
            } => {
                if let Some(slot) = self.slots.of(number)
                    && !state.messages[slot].is_ended()
                    && !state.messages[slot].is_failed()
                {
                    state.ask_to_stop(slot, Asked { reason, kill });
                    self.asked.push(state.messages.handle(slot));
                }
            }
            RecordEvent::Moved { number, change } => {
                state.numbers = state.numbers.max(change.to);
                if let Some(slot) = self.slots.take(number) {
                    let note = change.note.map(Bytes::copy_from_slice);
                    state.move_message(slot, &change, note, None);
                    self.slots.put(change.to, slot);
                }
            }
            RecordEvent::Settled { number } => {
                if let Some(slot) = self.slots.take(number) {
                    let ending = match state.messages[slot].is_failed() {
                        true => Ending::Dropped,
                        false => Ending::Acked { cost_us: None },
                    };
                    state.end(slot, ending);
                }
            }
            RecordEvent::Replaced { number } => {
                if let Some(slot) = self.slots.take(number) {
                    state.end(slot, Ending::Replaced { cost_us: None });
                }
            }
            RecordEvent::EndedMany {
                how,
                reason,
                at,
                kept,
                numbers,
            } => {
                let ended = UnrunEnd { how, reason, at };
                for number in numbers.iter() {
                    let Some(slot) = self.slots.take(*number) else {
                        continue;
                    };
                    let keeps_value = state.messages.shared_head(slot).result_ttl_ms.is_some();
                    state.end(slot, Ending::Unrun { ended, kept });
                    match (keeps_value, kept) {
                        (true, true) => self.slots.put(*number, slot),
                        (true, false) => state.keys.evicted += 1,
                        (false, _) => {}
                    }
                }
            }
            RecordEvent::Failed { number, failure } => {
                state.numbers = state.numbers.max(failure.to);
                if let Some(slot) = self.slots.take(number) {
                    let note = failure.note.map(Bytes::copy_from_slice);
                    let failure = &failure;
                    state.end(
                        slot,
                        Ending::Failed {
                            failure,
                            note,
                            cost_us: None,
                        },
                    );
                    self.slots.put(failure.to, slot);
                }
            }
            RecordEvent::FailedDropped { through } => {
                while let Some((number, slot)) = state.failed.oldest()
                    && number <= through
                {
                    self.slots.take(number);
                    state.end(slot, Ending::Dropped);
                }
            }
            RecordEvent::Revived { number, to, queue } => {
                state.numbers = state.numbers.max(to);
                // According to a repaired journal, it may not have failed.
                if let Some(slot) = self.slots.of(number)
                    && state.messages[slot].is_failed()
                {
                    self.slots.take(number);
                    state.revive(slot, to, queue);
                    self.slots.put(to, slot);
                }
            }
            RecordEvent::Marked { mark } => state.mark(mark),
            RecordEvent::MarkOver { mark } => {
                state.mark_numbers = state.mark_numbers.max(mark);
                state.end_mark(mark);
            }
            RecordEvent::KeptEnds { ends } => {
                for end in ends.ends.iter() {
                    if let Some(slot) = self.slots.take(end.number) {
                        state.forget(slot);
                    }
                    let slot = state.restore_ends(&ends, end);
                    self.slots.put(end.number, slot);
                }
            }
            RecordEvent::KeptDropped { numbers } => {
                for number in numbers.iter() {
                    // A repaired journal may lack its end.
                    if let Some(slot) = self.slots.of(*number)
                        && state.messages[slot].is_ended()
                    {
                        self.slots.take(*number);
                        state.drop_ended(slot);
                        state.keys.evicted += 1;
                    }
                }
            }
            RecordEvent::JoinState {
                join,
                count,
                policy,
                over_at,
                arrived,
                progress,
            } => {
                state.forget_if_unread(&join, progress.is_released);
                state.open_join(join, count, policy, &progress);
                if let Some(slot) = state.joins.find(&join) {
                    state.restore_join(slot, count, &arrived, &progress, over_at);
                }
            }
            RecordEvent::JoinGrown { join, by } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.grow_join(slot, by);
                }
            }
            RecordEvent::JoinSealed {
                join,
                count,
                cancelled,
            } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.seal_join(slot, count, cancelled);
                }
            }
            RecordEvent::JoinOver { join, at } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.block_join(slot, at);
                }
            }
            RecordEvent::MemberRevived {
                join,
                index,
                causes,
            } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.revive_member(slot, index, causes.into_owned());
                }
            }
            RecordEvent::JoinReopened { join } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.reopen_join(slot);
                    self.reopened.push(join);
                }
            }
            RecordEvent::Stored {
                key,
                status,
                body,
                group,
                expires_at,
                run,
            } => {
                let body = Bytes::copy_from_slice(body);
                state.store(key, Value::new(status, body), group, expires_at, run);
            }
            RecordEvent::Removed { key } => state.remove_key(&key),
            RecordEvent::Evicted { key } => {
                state.drop_value(&key);
                state.keys.evicted += 1;
            }
            RecordEvent::Claimed { number, key } => match self.slots.of(number) {
                Some(slot) if state.messages[slot].is_failed() => {
                    state.messages.set_claim(slot, key);
                }
                Some(slot) => state.claim(slot, key),
                None => {}
            },
            RecordEvent::ClaimedUntilStart {
                number,
                key,
                latest,
            } => {
                if let Some(slot) = self.slots.of(number)
                    && !state.messages[slot].is_failed()
                    && !state.messages[slot].is_ended()
                {
                    state.claim_until_start(slot, key, UntilStart { latest });
                }
            }
            RecordEvent::Unclaimed { number } => {
                if let Some(slot) = self.slots.of(number) {
                    state.give_up_claim(slot);
                }
            }
            RecordEvent::JoinOpened {
                join,
                count,
                policy,
            } => state.open_join(join, count, policy, &JoinProgress::default()),
            RecordEvent::Joined { join, index } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.arrive(slot, index, Arrival::Succeeded);
                }
            }
            RecordEvent::MemberFailed {
                join,
                index,
                causes,
            } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.arrive(slot, index, Arrival::Failed(causes.into_owned()));
                }
            }
            RecordEvent::MemberNotNeeded { join, index } => {
                if let Some(slot) = state.joins.find(&join) {
                    state.arrive(slot, index, Arrival::NotNeeded);
                }
            }
            RecordEvent::JoinEnded {
                join,
                released,
                renumbered,
                at,
            } => {
                if let Some(renumbered) = renumbered {
                    for number in state.still_held(&join) {
                        if let Some(to) = renumbered.of(number)
                            && let Some(slot) = self.slots.of(number)
                            && !state.keeps_its_number(slot)
                        {
                            self.slots.take(number);
                            self.slots.put(to, slot);
                        }
                    }
                }
                if !released {
                    // The messages that it held have ended before that, but a repaired journal may lack those records.
                    for number in state.still_held(&join) {
                        if let Some(slot) = self.slots.take(number) {
                            state.stop_reading(slot);
                            state.forget_message(slot, None);
                        }
                    }
                }
                match state.joins.find(&join) {
                    Some(slot) => state.end_join(slot, released, renumbered, at),
                    None => state.end_unknown_join(join, released, renumbered, at),
                }
            }
            RecordEvent::Paused { queue, paused } => {
                let queue = state.queue_named(queue);
                state.pause(queue, paused);
            }
            RecordEvent::Limited { queue, limits } => {
                let queue = state.queue_named(queue);
                state.limit(queue, limits);
            }
            RecordEvent::WorkflowOpened {
                workflow,
                head,
                progress,
            } => state.open_workflow(workflow, &head, progress),
            RecordEvent::WorkflowChanged { workflow, progress } => match progress {
                Some(progress) => state.change_workflow(workflow, progress),
                None => state.forget_workflow(workflow),
            },
            RecordEvent::ScheduleSet {
                schedule,
                head,
                progress,
            } => state.set_schedule(&schedule, head.into_owned(), progress),
            RecordEvent::ScheduleFired { schedule, progress } => match progress {
                Some(progress) => state.change_schedule(&schedule, progress),
                None => state.remove_schedule(&schedule),
            },
        }
    }
}

impl BrokerState {
    /// Forgets a message whose full state appears again, or an ended one's value.
    fn forget(&mut self, slot: u32) {
        match self.messages[slot].is_ended() {
            true => self.drop_ended(slot),
            false => {
                self.stop_reading(slot);
                self.forget_message(slot, None);
            }
        }
    }

    /// Whether a message of format 1's queue for failed jobs was put there because it had failed.
    fn has_failed_before(&self, slot: u32) -> bool {
        let entry = &self.messages[slot];
        let expires = self.messages.expires_at(slot).map(|when| when.at);
        let is_kept_so_long = expires
            .is_some_and(|at| at.saturating_sub(FIRST_FORMAT_FAILED_MS) >= entry.enqueued_at());
        (entry.is_ready() || entry.is_leased())
            && (!self.messages.notes(slot).is_empty()
                || self.messages.shared_head(slot).crashes > 0
                || is_kept_so_long)
    }

    fn fail_as_before(&mut self, slot: u32) {
        let number = self.messages[slot].number();
        let shared_head = self.messages.shared_head(slot);
        let has_crashed =
            shared_head.crashes > 0 && shared_head.crashes >= shared_head.max_deliveries;
        let expires = self.messages.expires_at(slot).map(|when| when.at);
        let enqueued_at = self.messages[slot].enqueued_at();
        let at = expires.map_or(enqueued_at, |at| at.saturating_sub(FIRST_FORMAT_FAILED_MS));
        let last = self
            .messages
            .notes(slot)
            .last()
            .cloned()
            .unwrap_or_default();
        let text = match has_crashed {
            true => String::from_utf8_lossy(&last).into_owned(),
            false => String::new(),
        };
        let class = if has_crashed { CRASHED } else { "" };
        let failure = Failing {
            to: number,
            crashed: false,
            is_displaced: true,
            class: self.names.intern(class),
            message: truncate(&text, Failure::TEXT_CAP_BYTES),
            fingerprint: self.fingerprint(slot, class),
            preview: &[],
            note: None,
            at,
        };
        let failure = &failure;
        self.end(
            slot,
            Ending::Failed {
                failure,
                note: None,
                cost_us: None,
            },
        );
    }

    /// Sets the timers of a session without a connection.
    pub(crate) fn wait_for_session(
        &mut self,
        session: u32,
        left_at: u64,
        now: u64,
        memory_ms: u64,
    ) {
        let generation = self.sessions.next_generation(session);
        let heartbeat_ms = self.sessions[session].heartbeat_ms;
        if !self.sessions[session].leases.is_empty() {
            let ends = ClockTime::steady(now.saturating_add(heartbeat_ms));
            self.timers.set(
                ends,
                Timer::LeasesLost {
                    session,
                    generation,
                },
            );
        }
        let ends = ClockTime::steady(left_at.saturating_add(memory_ms));
        self.timers.set(
            ends,
            Timer::Forget {
                session,
                generation,
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_replayed_is_named() {
        let mut recovery = Recovery::new(BrokerOptions::default());
        let empty_record = [1, 1, 0];
        assert_eq!(recovery.replay(Position(4), &empty_record), Ok(()));
        let late = recovery.replay(Position(4), &empty_record).unwrap_err();
        assert_eq!(
            late.to_string(),
            "the journal's record 4 comes after 4: records must come in order"
        );
        let unreadable = recovery.replay(Position(5), &[1, 1, 0, 99]).unwrap_err();
        assert_eq!(
            unreadable.to_string(),
            "the journal's record 5 can't be read: it has an event 99 at byte 3, which this program \
             does not know: a newer one wrote it"
        );
    }
}
