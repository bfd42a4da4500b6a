//! All that outlives a restart, and each way in which it may change.
//!
//! Every change here is one event of the journal. The broker decides, writes the event and calls the
//! change; recovery reads the event and calls the same change. So the recovered state is the one that was.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    Extras, JoinId, JoinPolicy, Key, Later, Member, MessageId, QueueLimits, SeededState, SessionId,
    Value, When as Outcome, WorkflowState,
};

use crate::Position;
use crate::charges::Charge;
use crate::clock::{Clock, When};
use crate::effects::Rests;
use crate::ends::Ends;
use crate::failed::FailedJobs;
use crate::joins::{Amount, Arrival, Joins};
use crate::keys::{Keys, NEVER, Stored, StoredRun};
use crate::ledger::{Entity, Ledger};
use crate::messages::{
    BodyAt, Ended, Failure, Handle, LeaseState, Messages, State as MessagePlace,
};
use crate::names::{Name, Names};
use crate::near::near_at;
use crate::queue::Service;
use crate::queues::{Forgettable, Queues};
use crate::records::{
    Change, Failing, Grant, How, JoinProgress, KeptEnd, KeptEnds, Mark, MarkedFor, MessageHead,
    Place, Renumbered, RunHead,
};
use crate::sessions::Sessions;
use crate::timers::{Timer, Timers};
use crate::waits::Waits;
use crate::workflows::Workflows;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) names: Names,
    pub(crate) messages: Messages,
    pub(crate) queues: Queues,
    pub(crate) keys: Keys,
    pub(crate) joins: Joins,
    pub(crate) waits: Waits,
    pub(crate) workflows: Workflows,
    pub(crate) sessions: Sessions,
    pub(crate) timers: Timers,
    pub(crate) ledger: Ledger,
    /// Highest number that a message was given, and the highest grant.
    pub(crate) numbers: u64,
    pub(crate) grants: u64,
    pub(crate) ends: Ends,
    pub(crate) failed: FailedJobs,
    /// Operations on many messages that are not over, and the position of each.
    pub(crate) marks: BTreeMap<u64, (Mark, Position)>,
    pub(crate) mark_numbers: u64,
    /// Members that have reported to joins since anybody looked.
    pub(crate) reported: VecDeque<Reported>,
    /// Copies that have come to own the key of another one since anybody looked, and stand behind it in the
    /// journal, by their numbers.
    pub(crate) inherited: Vec<(u64, Key)>,
    /// Joins that are over because a member failed, by the time of that.
    pub(crate) joins_over: BTreeSet<(u64, JoinId)>,
    /// Joins that have come to be not needed since anybody looked.
    pub(crate) joins_needless: VecDeque<JoinId>,
    /// Those, and all that they have blocked.
    pub(crate) blocked: Amount,
    /// Bytes that the journal would need to hold all of this, roughly.
    pub(crate) live_bytes: u64,
    /// Position of the record that is being written or replayed, and the records that its effects rest on.
    pub(crate) position: Position,
    pub(crate) rests: Rests,
    /// Keys that are watched and may have changed since their watchers were told.
    pub(crate) touched: Vec<Key>,
    /// Whether there may be something to hand out that there was not before.
    pub(crate) has_new_work: bool,
    /// Queues for which a timer is to be set, and the count of such timers so far.
    pub(crate) newly_unserved: Vec<u32>,
    /// Likewise for tasks that none of a queue's consumers can run.
    pub(crate) newly_unknown: Vec<u32>,
    generations: u64,
    /// Last record that is safe on disk, so that its content can be read back.
    pub(crate) durable: Position,
    /// Bytes of bodies that are kept in memory, so that work is handed out without reading; `None`:
    /// all, for there is no disk to read from.
    pub(crate) resident_limit: Option<u64>,
    /// Time for which failed jobs are kept.
    pub(crate) failed_kept_ms: u64,
    /// Messages that wait and may do so with less memory once this position is safe.
    to_cool: VecDeque<(Position, Handle)>,
}

/// Most messages of a queue whose bodies are kept in memory for longer: others' backlogs
/// must not slow it down.
const SHORT_QUEUE: u64 = 1024;
/// Most bytes of notes that a message keeps: a delivery must fit into a frame with its body.
const NOTES_CAP_BYTES: usize = 256 << 10;
/// Bytes of the journal for an operation on many messages.
pub(crate) const MARK_BYTES: u64 = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Adjust {
    Add,
    Subtract,
}

/// A member of a join that has arrived.
#[derive(Debug)]
pub(crate) struct Reported {
    pub(crate) join: JoinId,
    pub(crate) index: u32,
    pub(crate) arrival: Arrival,
    /// The join stands behind its member in the journal: it was carried forward already. The member's segment
    /// may be reclaimed, and then its end says nothing to whoever reads the rest, for it names a message that is
    /// not there. So the arrival is told by itself.
    pub(crate) must_be_told: bool,
}

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
    /// The broker ended it without a run. `kept`: its value is there for as long as results are kept.
    Unrun { ended: Ended, kept: bool },
    /// A failed job is forgotten.
    Dropped,
}

fn owned(failure: &Failing<'_>) -> Failure {
    Failure {
        class: failure.class,
        message: failure.message.into(),
        fingerprint: failure.fingerprint,
        preview: failure.preview.into(),
        at: failure.at,
        is_displaced: failure.is_displaced,
    }
}

impl State {
    /// `hashing`: of tables whose keys clients choose.
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            names: Names::new(hashing),
            messages: Messages::new(hashing),
            queues: Queues::new(hashing),
            keys: Keys::new(hashing),
            joins: Joins::new(hashing),
            waits: Waits::new(hashing),
            workflows: Workflows::new(hashing),
            sessions: Sessions::new(hashing),
            timers: Timers::default(),
            ledger: Ledger::default(),
            numbers: 0,
            grants: 0,
            ends: Ends::default(),
            failed: FailedJobs::default(),
            marks: BTreeMap::new(),
            mark_numbers: 0,
            reported: VecDeque::new(),
            inherited: Vec::new(),
            joins_over: BTreeSet::new(),
            joins_needless: VecDeque::new(),
            blocked: Amount::default(),
            live_bytes: 0,
            position: Position(0),
            rests: Rests::default(),
            touched: Vec::new(),
            has_new_work: false,
            newly_unserved: Vec::new(),
            newly_unknown: Vec::new(),
            generations: 0,
            durable: Position(0),
            resident_limit: None,
            failed_kept_ms: u64::MAX,
            to_cool: VecDeque::new(),
        }
    }

    // --- messages

    /// Inserts a message. `body`: its body if that is kept in memory; `body_at`: the body's place in the record.
    pub(crate) fn insert_message(
        &mut self,
        head: &MessageHead,
        extras: Option<Box<Extras>>,
        failure: Option<&Failing<'_>>,
        body_at: BodyAt,
        body: Option<Bytes>,
    ) -> u32 {
        self.numbers = self.numbers.max(head.number);
        self.queues.know_task(head.task, &mut self.names);
        let queue = self.queues.find_or_create(head.queue, &mut self.names);
        let body = body.map(|body| (body, self.rests));
        let slot = self
            .messages
            .insert(head, queue, self.position, body_at, body);
        if let Some(extras) = extras {
            if let Some(inputs) = extras.inputs {
                self.joins.add_reader(inputs.join);
            }
            self.messages.set_extras(slot, *extras);
            if failure.is_none() {
                self.count_live(slot, Adjust::Add);
            }
        }
        if let Some(failure) = failure {
            self.names.hold(failure.class);
            self.messages.set_failure(slot, Some(owned(failure)));
        }
        self.live_bytes += self.messages.journal_bytes(slot);
        let handle = Handle {
            number: head.number,
            slot,
        };
        self.ledger.add(self.position, Entity::Message { slot });
        match head.place {
            _ if failure.is_some() => self.keep_failed(slot),
            Place::Ready => self.make_ready(slot),
            Place::Delayed(when) => self.delay(slot, when),
            Place::Held(join) => {
                self.messages.set_state(slot, MessagePlace::Held(join));
                self.joins.hold(join, handle);
                self.count_held(slot, Adjust::Add);
            }
            Place::Leased { session, grant } => match self.sessions.by_number(session) {
                Some(session) => self.lease(slot, session, grant, None, true),
                None => self.make_ready(slot),
            },
        }
        self.set_expiry(slot);
        self.touch_result(head.id);
        if self.rests.disk != self.position && self.durable < self.position {
            // It could not do without its body from the beginning, as one that is synced at once can.
            self.cool_when_safe(slot);
        }
        slot
    }

    /// Whether the body of a message that comes now is kept in memory. One that is not is read back when
    /// the message is handed out, so it must be on disk before that.
    pub(crate) fn keeps_body(&self, queue: Name, place: Place) -> bool {
        self.has_room(self.queues.find(queue), matches!(place, Place::Delayed(_)))
            || (self.rests.disk != self.position && self.durable < self.position)
    }

    /// Whether one more body may be in memory. Messages that came first are handed out first, so bodies
    /// that come when there is no room are not kept.
    fn has_room(&self, queue: Option<u32>, is_delayed: bool) -> bool {
        let Some(limit) = self.resident_limit else {
            return true;
        };
        let resident = self.messages.resident_bytes();
        // What is delayed has time to be read.
        if resident < limit / if is_delayed { 2 } else { 1 } {
            return true;
        }
        let waiting = queue.map_or(0, |queue| {
            let queue = &self.queues[queue];
            queue.ready + queue.delayed
        });
        resident < 2 * limit && !is_delayed && waiting < SHORT_QUEUE
    }

    /// Gives up memory of a waiting message as soon as it can be read back.
    pub(crate) fn cool_when_safe(&mut self, slot: u32) {
        if self.resident_limit.is_some() && self.messages[slot].is_hot() {
            let rests = self.messages.rests(slot);
            let safe = rests.disk.max(rests.os).max(self.messages[slot].base());
            self.to_cool.push_back((safe, self.messages.handle(slot)));
        }
    }

    /// Gives up that memory after `durable` has moved.
    pub(crate) fn cool(&mut self) {
        while let Some((safe, handle)) = self.to_cool.front().copied()
            && safe <= self.durable
        {
            self.to_cool.pop_front();
            let Some(entry) = self.messages.get(handle) else {
                continue;
            };
            let rests = self.messages.rests(handle.slot);
            let is_safe = rests.disk.max(rests.os).max(entry.base()) <= self.durable;
            if entry.is_leased() || !is_safe {
                continue;
            }
            let (queue, is_delayed) = (self.messages.queue(handle.slot), entry.is_delayed());
            if !self.has_room(Some(queue), is_delayed) {
                self.messages.take_body(handle.slot);
            }
            self.messages.cool(handle.slot);
        }
        if self.to_cool.is_empty() && self.to_cool.capacity() > 4096 {
            self.to_cool = VecDeque::new();
        }
    }

    pub(crate) fn copy_message(&mut self, source: u32, number: u64, queue: Name) -> u32 {
        // The copy's base is this record, and so is its source's.
        let entry = &self.messages[source];
        assert_eq!(entry.base(), self.position, "a copy of an older message");
        self.messages.set_has_copies(source);
        let place = match self.messages.state(source) {
            MessagePlace::Delayed(when) => Place::Delayed(when),
            _ => Place::Ready,
        };
        let body = self.messages.body(source).cloned();
        let body_at = self.messages.body_at(source);
        let extras = self.messages.whole_extras(source).map(Box::new);
        let head = MessageHead {
            number,
            queue,
            place,
            ..self.head(source)
        };
        self.insert_message(&head, extras, None, body_at, body)
    }

    /// Returns the state of the message as the journal would have it now.
    pub(crate) fn head(&self, slot: u32) -> MessageHead {
        let entry = &self.messages[slot];
        let kind = self.messages.kind(slot);
        MessageHead {
            number: entry.number(),
            id: entry.id,
            queue: self.queues[kind.queue].name,
            task: kind.task,
            priority: kind.priority,
            max_deliveries: kind.max_deliveries,
            crashes: kind.crashes,
            redelivered: entry.redelivered(),
            has_copies: entry.has_copies(),
            attempt: kind.attempt,
            generation: kind.generation,
            attempts_before: kind.attempts_before,
            enqueued_at: entry.enqueued_at(),
            expires_at: self.messages.expires_at(slot),
            result_ttl_ms: kind.result_ttl_ms,
            place: match self.messages.state(slot) {
                // A failed job has its failure beside this.
                MessagePlace::Ready | MessagePlace::Failed | MessagePlace::Ended => Place::Ready,
                MessagePlace::Delayed(when) => Place::Delayed(when),
                MessagePlace::Held(join) => Place::Held(join),
                MessagePlace::Leased(lease) => Place::Leased {
                    session: self.sessions[lease.session].number,
                    grant: lease.grant,
                },
            },
        }
    }

    /// Keeps the first note and the latest ones, as far as there is room.
    pub(crate) fn add_note(&mut self, slot: u32, note: Bytes) {
        self.live_bytes -= self.messages.journal_bytes(slot);
        self.count_held(slot, Adjust::Subtract);
        let notes = self.messages.notes_mut(slot);
        notes.push(match note.len() {
            0..=NOTES_CAP_BYTES => note,
            length => format!("an error of {length} bytes, which is too large to keep").into(),
        });
        let mut bytes: usize = notes.iter().map(Bytes::len).sum();
        while bytes > NOTES_CAP_BYTES {
            let spared = usize::from(notes.len() > 2);
            bytes -= notes.remove(spared).len();
        }
        self.live_bytes += self.messages.journal_bytes(slot);
        self.count_held(slot, Adjust::Add);
        self.recount_failed(slot);
    }

    /// Counts what a message that is held takes, for its join.
    pub(crate) fn count_held(&mut self, slot: u32, adjust: Adjust) {
        let MessagePlace::Held(join) = self.messages.state(slot) else {
            return;
        };
        // The journal may tell of the join later, and then it is counted.
        if let Some(join) = self.joins.find(&join) {
            let bytes = self.messages.journal_bytes(slot);
            self.count_for_join(join, adjust, Amount { jobs: 1, bytes });
            if self.joins[join].is_over {
                self.count_blocked_one(slot, adjust);
            }
        }
    }

    fn count_for_join(&mut self, slot: u32, adjust: Adjust, amount: Amount) {
        let join = &mut self.joins[slot];
        let counts = [
            Some(&mut join.kept),
            join.is_over.then_some(&mut self.blocked),
        ];
        for count in counts.into_iter().flatten() {
            match adjust {
                Adjust::Add => *count += amount,
                Adjust::Subtract => *count -= amount,
            }
        }
    }

    /// Counts anew the bytes that a failed job takes in the journal.
    pub(crate) fn recount_failed(&mut self, slot: u32) {
        let entry = &self.messages[slot];
        if entry.is_failed() {
            let bytes = self.messages.journal_bytes(slot);
            self.failed.set_bytes(entry.number(), bytes);
        }
    }

    /// Hands out a message that waits anywhere, now or in replay.
    pub(crate) fn grant(&mut self, slot: u32, session: u32, grant: Grant) {
        self.take(slot, None);
        self.lease(slot, session, grant, None, true);
    }

    /// Enters the lease of a message that was taken out of its place.
    pub(crate) fn lease(
        &mut self,
        slot: u32,
        session: u32,
        grant: Grant,
        charge: Option<Charge>,
        sent: bool,
    ) {
        self.grants = self.grants.max(grant.number);
        let leases = &mut self.sessions[session].leases;
        let index = leases.len() as u32;
        leases.push(slot);
        self.messages.set_recovered(slot, false);
        let lease = LeaseState {
            grant,
            session,
            index,
            charge,
            sent,
            expired: false,
        };
        self.messages.set_state(slot, MessagePlace::Leased(lease));
        self.queues[self.messages.queue(slot)].running += 1;
    }

    /// Charges the flows of runs from now on, after a recovery.
    pub(crate) fn resume_charges(&mut self) {
        let sessions = self.sessions.iter();
        let leases: Vec<u32> = sessions
            .flat_map(|(_, session)| session.leases.iter().copied())
            .collect();
        for slot in leases {
            self.charge_run(slot);
        }
    }

    /// Charges the flow of a run from now on, for a hand-out that charged it nothing.
    pub(crate) fn charge_run(&mut self, slot: u32) {
        let flow = self.flow(slot);
        if let Some(lease) = self.messages.lease_state_mut(slot) {
            lease.charge = Some(self.queues.charge_run(flow));
        }
    }

    /// Puts the message back in its place after its lease ended.
    pub(crate) fn return_message(&mut self, slot: u32, redelivered: bool) {
        self.come_back(slot, redelivered, 0);
    }

    fn come_back(&mut self, slot: u32, redelivered: bool, crashes: u8) {
        let lease = self.messages.lease_state(slot);
        let has_expired = lease.is_some_and(|lease| lease.expired);
        self.forget_asked(slot);
        self.take(slot, None);
        let redelivered = redelivered && !planted!("forget-redelivery");
        let redelivered = self.messages[slot].redelivered() || redelivered;
        self.messages.set_redelivered(slot, redelivered);
        // The next consumer must not see it before the lease has surely ended.
        let rests = self.messages.rests(slot).and(self.rests);
        self.messages.set_rests(slot, rests);
        self.messages.drop_body_read_back(slot);
        if crashes > 0 {
            self.messages.set_kind(slot, |kind| {
                kind.crashes = kind.crashes.saturating_add(crashes)
            });
        }
        self.make_ready(slot);
        self.bring_back_forward(slot);
        self.cool_when_safe(slot);
        if has_expired {
            self.set_expiry(slot);
        }
    }

    pub(crate) fn crash_message(&mut self, slot: u32, reason: Bytes) {
        let crashes = u8::from(!planted!("miscount-crashes"));
        self.come_back(slot, true, crashes);
        self.add_note(slot, reason);
    }

    /// Notes that the message may have killed its process. It keeps its lease for the event that follows. A reason is kept
    /// unless it is empty: then that event has it.
    pub(crate) fn suspect_message(&mut self, slot: u32, reason: Bytes) {
        self.live_bytes -= self.messages.journal_bytes(slot);
        let suspects = self
            .messages
            .extras(slot)
            .map_or(0, |extras| extras.suspects);
        self.messages.set_suspects(slot, suspects.saturating_add(1));
        self.live_bytes += self.messages.journal_bytes(slot);
        if !reason.is_empty() {
            self.add_note(slot, reason);
        }
    }

    pub(crate) fn move_message(
        &mut self,
        slot: u32,
        change: &Change<'_>,
        note: Option<Bytes>,
        cost_us: Option<u64>,
    ) {
        self.forget_asked(slot);
        self.take(slot, cost_us);
        self.abandon_expiry(slot);
        self.numbers = self.numbers.max(change.to);
        let queue = self.queues.find_or_create(change.queue, &mut self.names);
        let was = self.messages[slot].number();
        self.messages.set_number(slot, change.to);
        self.messages.set_kind(slot, |kind| {
            kind.queue = queue;
            kind.attempt = kind.attempt.saturating_add(u32::from(change.next_attempt));
            kind.crashes = kind.crashes.saturating_add(u8::from(change.crashed));
        });
        let redelivered = change.redelivered && self.messages[slot].redelivered();
        self.messages
            .set_redelivered(slot, redelivered || change.was_sent);
        self.messages.set_rests(slot, self.rests);
        if change.redelivered {
            self.messages.drop_body_read_back(slot);
        }
        if change.expires_at.is_some() {
            self.messages.set_expiry(slot, change.expires_at);
        }
        self.renumber_claim(slot, was);
        if let Some(note) = note
            && !planted!("lose-note")
        {
            self.add_note(slot, note);
        }
        match change.due {
            Some(when) if !planted!("retry-at-once") => self.delay(slot, when),
            _ => {
                self.make_ready(slot);
                self.bring_back_forward(slot);
            }
        }
        self.set_expiry(slot);
        self.touch_result(self.messages[slot].id);
        self.cool_when_safe(slot);
    }

    // --- endings

    /// Ends a message: the one way in which that happens, live and in replay, whatever ended it. Takes it
    /// out of its place, frees the key that it owns, reports to the join that it is a member of, and keeps
    /// all values and notes that are to be kept.
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
                // It was counted when it failed; or its job goes on.
                Ending::Dropped | Ending::Replaced { .. } => None,
            };
            if let Some(outcome) = outcome {
                self.count_end(slot, outcome);
            }
        }
        let failure = match (member, &ending) {
            (Some(_), Ending::Unrun { ended, .. }) if ended.how == How::NotNeeded => {
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
                let keeps_value = kept && self.messages.kind(slot).result_ttl_ms.is_some();
                match keeps_value {
                    true => self.leave_value(slot, ended),
                    false => is_last = self.forget_message(slot, None),
                }
                if !planted!("lose-member") {
                    self.report(member, base, failure);
                }
            }
            // It has reported when it failed.
            Ending::Dropped => is_last = self.forget_message(slot, None),
        }
        if let Some(inputs) = inputs
            && !is_failed
        {
            self.joins.remove_reader(inputs.join);
        }
        if is_last {
            self.touch_result(id);
        }
    }

    /// Returns the jobs at the root of a member's failure: itself, or those that have blocked it.
    pub(crate) fn causes_of(&self, slot: u32) -> Vec<MessageId> {
        match self.messages.state(slot) {
            MessagePlace::Held(join) if self.is_blocked(slot) => {
                let join = self.joins.find(&join).expect("it is over");
                self.joins[join].causes.clone()
            }
            _ => vec![self.messages[slot].id],
        }
    }

    /// Counts a message no more among those that read the values of a join.
    pub(crate) fn stop_reading(&mut self, slot: u32) {
        if let Some(inputs) = self.messages.extras(slot).and_then(|extras| extras.inputs) {
            self.joins.remove_reader(inputs.join);
        }
    }

    /// Closes released joins whose values nobody can read any more. Looks at so many; the end of one may be that of others.
    pub(crate) fn close_unread_joins(&mut self, most: usize) {
        for _ in 0..most {
            if !self.joins.has_unread() {
                return;
            }
            if let Some(slot) = self.joins.take_unread() {
                self.forget_join(slot);
            }
        }
    }

    /// Looks, after a recovery, for joins within joins, and closes those whose values nobody can read any more.
    pub(crate) fn review_joins(&mut self, now: u64) {
        self.joins.nest_all();
        let released = self.joins.iter().filter(|(_, join)| join.is_released);
        let released: Vec<JoinId> = released.map(|(_, join)| join.id).collect();
        for id in released {
            self.joins.may_be_unread(id);
        }
        self.close_unread_joins(usize::MAX);
        // What a journal that was repaired has lost may have failed them.
        let failed = self
            .joins
            .iter()
            .filter(|(_, join)| join.failures > join.policy.max_failures() && !join.is_decided());
        let failed: Vec<u32> = failed.map(|(slot, _)| slot).collect();
        for slot in failed {
            self.block_join(slot, now);
        }
    }

    /// Forgets, in a replay, a released join when a new one of the same id follows: nobody read its values any more by
    /// then. `is_released`: it is the same one.
    pub(crate) fn forget_if_unread(&mut self, id: &JoinId, is_released: bool) {
        if let Some(slot) = self.joins.find(id)
            && self.joins[slot].is_released
            && !is_released
        {
            self.forget_join(slot);
        }
    }

    fn forget_join(&mut self, slot: u32) -> crate::joins::Join {
        let join = self.joins.close(slot);
        if join.is_over {
            self.blocked -= join.kept;
            self.joins_over.remove(&(join.over_at, join.id));
        }
        self.live_bytes -= join.journal_bytes();
        self.ledger.abandon();
        join
    }

    /// Removes a message; true when it was the last of its copies.
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
                self.names.let_go(failure.class);
            }
        }
        let removed = self.messages.remove(slot);
        self.live_bytes -= removed.journal_bytes;
        self.ledger.abandon();
        removed.is_last
    }

    fn leave_value(&mut self, slot: u32, ended: Ended) {
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
            self.names.let_go(failure.class);
        }
        self.names.hold(ended.reason);
        self.messages.end(slot, ended);
        self.live_bytes += self.messages.journal_bytes(slot);
        self.count_ended(slot);
    }

    fn count_ended(&mut self, slot: u32) {
        let ttl_ms = self.messages.kind(slot).result_ttl_ms.unwrap_or(0);
        let number = self.messages[slot].number();
        self.ends.push(ttl_ms, slot, number);
        self.wait_for_ended_values(ttl_ms);
    }

    /// Sets the timer for the oldest value of this time to live, unless there is one.
    pub(crate) fn wait_for_ended_values(&mut self, ttl_ms: u64) {
        if let Some(slot) = self.ends.first(ttl_ms, &self.messages)
            && self.ends.timed.insert(ttl_ms)
        {
            let over = self.messages.ended(slot).at.saturating_add(ttl_ms);
            let timer = Timer::EndedValues { ttl_ms };
            self.timers.set(When::steady(over), timer);
        }
    }

    /// Returns the first value of this time to live, if its time is over by `now`, and for how long it is.
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

    fn remove_ended(&mut self, slot: u32) {
        self.names.let_go(self.messages.ended(slot).reason);
        self.live_bytes -= self.messages.remove_ended(slot);
        self.ledger.abandon();
        self.ends.forget_one();
    }

    /// Restores values that were carried forward; returns their places, by number.
    pub(crate) fn restore_ends(&mut self, ends: &KeptEnds<'_>, end: &KeptEnd) -> u32 {
        self.numbers = self.numbers.max(end.number);
        self.forget_value(&Key::Result(end.id));
        let kind = crate::kinds::Kind {
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
        let ended = Ended {
            how: ends.how,
            reason: ends.reason,
            at: end.at,
        };
        self.queues.know_task(ends.task, &mut self.names);
        self.names.hold(ends.reason);
        let position = self.position;
        let slot = self
            .messages
            .insert_ended(end.id, end.number, &kind, position, ended);
        self.live_bytes += self.messages.journal_bytes(slot);
        self.ledger.add(position, Entity::Message { slot });
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
        // It is held no more, while what it takes changes.
        self.messages.set_state(slot, MessagePlace::Failed);
        self.abandon_expiry(slot);
        self.free_claim(slot);
        self.numbers = self.numbers.max(failure.to);
        self.live_bytes -= self.messages.journal_bytes(slot);
        let was = self.messages[slot].number();
        self.messages.set_number(slot, failure.to);
        self.renumber_claim(slot, was);
        self.messages.set_expiry(slot, None);
        self.messages.set_redelivered(slot, false);
        self.messages.set_kind(slot, |kind| {
            kind.crashes = kind.crashes.saturating_add(u8::from(failure.crashed));
        });
        self.messages.set_rests(slot, self.rests);
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

    fn keep_failed(&mut self, slot: u32) {
        self.messages.set_state(slot, MessagePlace::Failed);
        let number = self.messages[slot].number();
        let bytes = self.messages.journal_bytes(slot);
        self.failed.insert(number, slot, bytes);
        self.queues[self.messages.queue(slot)].failed += 1;
        self.wait_for_failed_jobs();
    }

    /// Puts a failed job back in a queue, as its next generation.
    pub(crate) fn revive(&mut self, slot: u32, to: u64, queue: Name) {
        let id = self.messages[slot].id;
        self.take(slot, None);
        self.count_retry(slot);
        self.live_bytes -= self.messages.journal_bytes(slot);
        if let Some(failure) = self.messages.failure(slot) {
            self.names.let_go(failure.class);
        }
        self.messages.set_failure(slot, None);
        self.messages.set_suspects(slot, 0);
        self.live_bytes += self.messages.journal_bytes(slot);
        self.numbers = self.numbers.max(to);
        let queue = self.queues.find_or_create(queue, &mut self.names);
        self.messages.set_number(slot, to);
        self.messages.set_kind(slot, |kind| {
            kind.queue = queue;
            kind.crashes = 0;
            kind.generation = kind.generation.saturating_add(1);
            kind.attempt = kind.attempt.saturating_add(1);
            kind.attempts_before = kind.attempt;
        });
        self.messages.set_rests(slot, self.rests);
        if let Some(claim) = self.messages.claim(slot).cloned() {
            self.own(slot, claim);
        }
        self.forget_value(&Key::Result(id));
        self.make_ready(slot);
        self.touch_result(id);
        self.cool_when_safe(slot);
    }

    /// Renumbers the claim of a message with another number, if the key is its own.
    fn renumber_claim(&mut self, slot: u32, was: u64) {
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

    /// Takes its key from a message for good.
    pub(crate) fn give_up_claim(&mut self, slot: u32) {
        self.free_claim(slot);
        self.messages.forget_claim(slot);
    }

    /// Passes the key that the message owns to another copy of it, or frees it.
    fn free_claim(&mut self, slot: u32) {
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
                // As with members of joins: the end of this one may say nothing later.
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

    /// Hashes class and task, by which failures that the broker finds itself are grouped. FNV-1a, from
    /// the authors' page, because the journal keeps it.
    pub(crate) fn fingerprint(&self, slot: u32, class: &str) -> u64 {
        let task = self.names.text(self.messages.kind(slot).task);
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
        let kind = self.messages.kind(slot);
        RunHead {
            queue: self.queues[kind.queue].name,
            attempt: kind.attempt,
            generation: kind.generation,
            ended_at,
        }
    }

    // --- operations on many messages

    pub(crate) fn mark(&mut self, mark: Mark) {
        self.mark_numbers = self.mark_numbers.max(mark.number);
        let base = self.position;
        mark.names().for_each(|name| self.names.hold(name));
        if let Some((was, _)) = self.marks.insert(mark.number, (mark, base)) {
            was.names().for_each(|name| self.names.let_go(name));
            self.ledger.abandon();
        } else {
            self.live_bytes += MARK_BYTES;
        }
        let number = mark.number;
        self.ledger.add(base, Entity::Mark { number });
        if mark.what == MarkedFor::Purge
            && let Some(name) = mark.queue
        {
            let index = self.queues.find_or_create(name, &mut self.names);
            let queue = &mut self.queues[index];
            let waiting = queue.ready + queue.delayed;
            let rare = queue.rare_mut();
            rare.purge_before = rare.purge_before.max(mark.before);
            rare.ending = waiting;
        }
    }

    pub(crate) fn end_mark(&mut self, number: u64) {
        let Some((mark, _)) = self.marks.remove(&number) else {
            return;
        };
        self.live_bytes -= MARK_BYTES;
        self.ledger.abandon();
        mark.names().for_each(|name| self.names.let_go(name));
        if mark.what == MarkedFor::Purge
            && let Some(queue) = mark.queue.and_then(|name| self.queues.find(name))
            && self.queues[queue].rare().purge_before == mark.before
        {
            let rare = self.queues[queue].rare_mut();
            (rare.purge_before, rare.ending) = (0, 0);
            self.queues.activate(queue);
        }
    }

    /// Whether a purge has come over the message, so that it is only still to be ended.
    pub(crate) fn is_purged(&self, slot: u32) -> bool {
        let entry = &self.messages[slot];
        (entry.is_ready() || entry.is_delayed()) && self.is_behind_mark(slot)
    }

    /// Returns the end of a message that is only still to be ended: clients that wait for it may have been told.
    pub(crate) fn told_end(&self, slot: u32) -> Option<How> {
        if self.is_purged(slot) {
            return Some(How::Purged);
        }
        self.is_blocked(slot).then_some(How::Blocked)
    }

    /// Whether the message was published before a purge of its queue that is not over.
    pub(crate) fn is_behind_mark(&self, slot: u32) -> bool {
        let before = self.queues[self.messages.queue(slot)].rare().purge_before;
        self.messages[slot].number() < before && !planted!("lose-purge")
    }

    /// Counts the messages that wait behind marks, after a recovery.
    pub(crate) fn count_purged(&mut self) {
        if self.marks.is_empty() {
            return;
        }
        for queue in self.queues.indexes() {
            if self.queues[queue].rare().ending > 0 {
                self.queues[queue].rare_mut().ending = 0;
            }
        }
        let slots: Vec<u32> = self.messages.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            if self.is_purged(slot) {
                self.queues[self.messages.queue(slot)].rare_mut().ending += 1;
            }
        }
    }

    pub(crate) fn make_ready(&mut self, slot: u32) {
        self.messages.set_state(slot, MessagePlace::Ready);
        let is_unknown = self.push_ready(slot);
        self.has_new_work = true;
        let kind = self.messages.kind(slot);
        let (queue, task) = (kind.queue, kind.task);
        if is_unknown && !self.queues[queue].rare().told_unknown.contains(&task) {
            self.wait_for_unknown(queue);
        }
        self.review_service(queue);
    }

    /// Puts a message that is ready into its flow; returns whether it is the first there, and none of the consumers
    /// can run it.
    pub(crate) fn push_ready(&mut self, slot: u32) -> bool {
        let flow = self.flow(slot);
        self.queues.push_ready(&self.messages, slot, flow)
    }

    /// Returns the flow of messages of its kind.
    #[inline]
    fn flow(&mut self, slot: u32) -> u32 {
        self.messages.flow(slot).unwrap_or_else(|| {
            let flow = self.queues.take_flow(self.messages.kind(slot));
            self.messages.set_flow(slot, flow);
            flow
        })
    }

    /// Notes whether work waits that no consumer of the queue can run, after their tasks have changed.
    pub(crate) fn note_unknown(&mut self, index: u32) {
        let unknown = self.queues.unknown_tasks(index);
        let unknown: Vec<Name> = unknown.map(|(task, _)| task).collect();
        let queue = &mut self.queues[index];
        if unknown.is_empty() && !queue.has_rare() {
            return;
        }
        let queue = queue.rare_mut();
        queue.told_unknown.retain(|task| {
            let waits = unknown.contains(task);
            if !waits {
                self.names.let_go(*task);
            }
            waits
        });
        match unknown.iter().all(|task| queue.told_unknown.contains(task)) {
            true => queue.unknown_timer = None,
            false => self.wait_for_unknown(index),
        }
    }

    fn wait_for_unknown(&mut self, index: u32) {
        let queue = &mut self.queues[index];
        if queue.rare().unknown_timer.is_none() {
            self.generations += 1;
            queue.rare_mut().unknown_timer = Some(self.generations);
            self.newly_unknown.push(index);
        }
    }

    /// Notes queues that have work and no consumer to take it.
    pub(crate) fn review_service(&mut self, index: u32) {
        let queue = &mut self.queues[index];
        if queue.consumers() > 0 {
            queue.service = Service::Well;
            queue.was_served = true;
        } else if queue.service == Service::Well && queue.ready > 0 && !queue.paused {
            self.generations += 1;
            queue.service = Service::Missing {
                generation: self.generations,
            };
            self.newly_unserved.push(index);
        }
    }

    fn delay(&mut self, slot: u32, when: When) {
        let Handle { number, slot } = self.messages.handle(slot);
        self.messages.set_state(slot, MessagePlace::Delayed(when));
        let queue = &mut self.queues[self.messages.queue(slot)];
        queue.delayed += 1;
        queue.delayed_bytes += self.messages.body_bytes(slot);
        match self.lacks_body(slot) {
            true => {
                let at = near_at(when.at);
                self.timers
                    .set(When { at, ..when }, Timer::Near { number, slot });
            }
            false => self.timers.set(when, Timer::Due { number, slot }),
        }
    }

    /// Makes a delayed message ready that has come due. The journal has its time, so no event is needed.
    pub(crate) fn come_due(&mut self, slot: u32) {
        let queue = &mut self.queues[self.messages.queue(slot)];
        queue.delayed -= 1;
        queue.delayed_bytes -= self.messages.body_bytes(slot);
        self.make_ready(slot);
        self.bring_back_forward(slot);
    }

    /// Reviews all queues after a recovery, in which many have been served since.
    pub(crate) fn review_all_service(&mut self) {
        for index in self.queues.indexes() {
            let queue = &mut self.queues[index];
            queue.service = Service::Well;
            // Its workers have their time to come back.
            queue.was_served = true;
            self.review_service(index);
        }
    }

    /// Takes a message out of its place; the caller decides what becomes of it.
    fn take(&mut self, slot: u32, cost_us: Option<u64>) {
        let queue = self.messages.queue(slot);
        if self.queues[queue].rare().purge_before > 0 && self.is_purged(slot) {
            let ending = &mut self.queues[queue].rare_mut().ending;
            // A replay counts them at its end.
            *ending = ending.saturating_sub(1);
        }
        match self.messages.state(slot) {
            MessagePlace::Failed => {
                let number = self.messages[slot].number();
                self.failed.remove(number);
                self.queues[queue].failed -= 1;
                self.queues.touch(Forgettable::Queue(queue));
            }
            MessagePlace::Ended => unreachable!("only its value is left of it"),
            MessagePlace::Ready => {
                self.queues.remove_ready(&self.messages, slot);
                let queue = &mut self.queues[queue];
                if queue.ready == 0 && matches!(queue.service, Service::Missing { .. }) {
                    queue.service = Service::Well;
                }
            }
            MessagePlace::Delayed(when) => {
                self.timers.abandon(when.clock);
                let queue = &mut self.queues[queue];
                queue.delayed -= 1;
                queue.delayed_bytes -= self.messages.body_bytes(slot);
            }
            MessagePlace::Held(_) => self.count_held(slot, Adjust::Subtract),
            MessagePlace::Leased(lease) => {
                if self.joins.has_unsealed() {
                    let ended = lease.grant.number;
                    self.joins.abandon(|growth| growth.grant == ended);
                }
                self.queues
                    .correct_cost(&self.messages, slot, lease.charge, cost_us);
                self.queues[queue].running -= 1;
                let leases = &mut self.sessions[lease.session].leases;
                leases.swap_remove(lease.index as usize);
                if let Some(moved) = leases.get(lease.index as usize).copied()
                    && let Some(other) = self.messages.lease_state_mut(moved)
                {
                    other.index = lease.index;
                }
            }
        }
    }

    fn set_expiry(&mut self, slot: u32) {
        if let Some(when) = self.messages.expires_at(slot) {
            let Handle { number, slot } = self.messages.handle(slot);
            self.timers.set(when, Timer::Expiry { number, slot });
        }
    }

    fn abandon_expiry(&mut self, slot: u32) {
        if let Some(when) = self.messages.expires_at(slot) {
            self.timers.abandon(when.clock);
        }
    }

    // --- keys

    pub(crate) fn store(
        &mut self,
        key: Key,
        value: Value,
        group: Name,
        expires_at: Option<u64>,
        run: Option<RunHead>,
    ) {
        self.forget_value(&key);
        self.touch(&key);
        self.names.hold(group);
        if let Some(run) = run {
            self.names.hold(run.queue);
        }
        let stored = Stored {
            key,
            status: value.status,
            body: value.body,
            group,
            expires_at: expires_at.unwrap_or(NEVER),
            run: run.map(StoredRun::new),
            number: 0,
            base: self.position,
            rests: self.rests,
        };
        self.live_bytes += stored.bytes();
        let (slot, number) = self.keys.insert(stored);
        self.ledger
            .add(self.position, Entity::Value { slot, number });
        if let Some(at) = expires_at.filter(|at| *at != NEVER) {
            self.timers
                .set(When::steady(at), Timer::ValueExpiry { slot, number });
        }
    }

    /// Whether the value of this key, or what is left of a message that has it, stands behind a message in the
    /// journal.
    pub(crate) fn value_stands_behind(&self, key: &Key, slot: u32) -> bool {
        let base = self.messages[slot].base();
        let stored = self.keys.value(key).map(|stored| stored.base);
        let ended = match key {
            Key::Result(id) => self.messages.find_ended(id),
            Key::Named(_) => None,
        };
        let ended = ended.map(|slot| self.messages[slot].base());
        stored.max(ended).is_some_and(|at| base < at)
    }

    /// Removes the value, and any claim there is. The message that owned the key does not take it again when it fails and
    /// is retried: once its record has been carried forward, nothing says that it ever had the key.
    pub(crate) fn remove_key(&mut self, key: &Key) {
        self.forget_value(key);
        if let Some(owner) = self.keys.owner(key) {
            self.messages.forget_claim(owner.slot);
        }
        self.keys.end_claim(key);
        self.touch(key);
    }

    /// Drops the value: its time is over, or its group is over the cap.
    pub(crate) fn drop_value(&mut self, key: &Key) {
        self.forget_value(key);
        self.touch(key);
    }

    fn forget_value(&mut self, key: &Key) {
        if let Some(stored) = self.keys.remove(key) {
            self.live_bytes -= stored.bytes();
            self.ledger.abandon();
            self.names.let_go(stored.group);
            if let Some(run) = stored.run {
                self.names.let_go(run.head().queue);
            }
            if stored.expires_at().is_some() {
                self.timers.abandon(Clock::Steady);
            }
        }
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

    /// Makes a message the owner of a key. In a journal that was repaired the record may be gone in which the last owner
    /// lost it.
    fn own(&mut self, slot: u32, key: Key) {
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

    fn touch_result(&mut self, id: MessageId) {
        if !self.keys.watchers.is_empty() {
            self.touched.push(Key::Result(id));
        }
    }

    // --- joins

    /// Opens a join. Of its progress only what a new one has is taken.
    pub(crate) fn open_join(
        &mut self,
        id: JoinId,
        count: u32,
        policy: JoinPolicy,
        progress: &JoinProgress<'_>,
    ) {
        if self.joins.find(&id).is_some() {
            return;
        }
        let slot = self.joins.open(id, count, policy);
        self.joins.set_then(slot, progress.then.to_vec());
        if let Some(growth) = progress.unsealed {
            self.joins.unseal(slot, growth);
        }
        let join = &mut self.joins[slot];
        join.expects = progress.expects.to_vec();
        join.result_ttl_ms = progress.result_ttl_ms;
        join.base = self.position;
        let bytes = join.journal_bytes();
        self.live_bytes += bytes;
        // It is something to keep though it may hold nothing, or there could be any number of them.
        join.kept = Amount { jobs: 1, bytes };
        for index in 0..self.joins[slot].held.len() {
            let handle = self.joins[slot].held[index];
            if self.messages.get(handle).is_some()
                && self.messages.state(handle.slot) == MessagePlace::Held(id)
            {
                self.count_held(handle.slot, Adjust::Add);
            }
        }
        let join = &self.joins[slot];
        self.ledger.add(
            self.position,
            Entity::Join {
                slot,
                number: join.number,
            },
        );
    }

    /// Counts members that have come to an unsealed join.
    pub(crate) fn grow_join(&mut self, slot: u32, by: u32) {
        if let Some(growth) = &mut self.joins[slot].growth {
            growth.members += by;
        }
    }

    /// Ends the coming of members to a join. `cancelled`: its workflow was, and its outcome is known already.
    pub(crate) fn seal_join(&mut self, slot: u32, count: u32, cancelled: bool) {
        self.close_join(slot, count, cancelled);
        let join = &mut self.joins[slot];
        if cancelled {
            join.result_ttl_ms = None;
        }
    }

    fn close_join(&mut self, slot: u32, count: u32, closes: bool) {
        if let Some(growth) = &self.joins[slot].growth {
            self.workflows.touch(growth.workflow);
        }
        let bytes = self.joins[slot].journal_bytes();
        self.joins.seal(slot, count, closes);
        let bytes = bytes - self.joins[slot].journal_bytes();
        self.live_bytes -= bytes;
        self.count_for_join(slot, Adjust::Subtract, Amount { jobs: 0, bytes });
    }

    /// Adds a member, which has ended as the arrival says; false when this one had arrived before.
    pub(crate) fn arrive(&mut self, slot: u32, index: u32, arrival: Arrival) -> bool {
        let join = &mut self.joins[slot];
        let was_bytes = join.journal_bytes();
        let is_new = join.arrive(index);
        if is_new {
            join.count_failure(&join.judge(index, arrival.clone()));
            self.reported.push_back(Reported {
                join: join.id,
                index,
                arrival,
                must_be_told: false,
            });
        }
        self.recount_join(slot, was_bytes);
        is_new
    }

    /// Counts anew the bytes that a join takes in the journal.
    fn recount_join(&mut self, slot: u32, was_bytes: u64) {
        let bytes = self.joins[slot].journal_bytes();
        self.live_bytes += bytes;
        self.live_bytes -= was_bytes;
        let amount = |bytes| Amount { jobs: 0, bytes };
        self.count_for_join(slot, Adjust::Add, amount(bytes));
        self.count_for_join(slot, Adjust::Subtract, amount(was_bytes));
    }

    /// Reports a member of a join that has ended; its full state stands in the journal at `base`.
    pub(crate) fn report(&mut self, member: Option<Member>, base: Position, arrival: Arrival) {
        if let Some(Member { join, index }) = member
            && let Some(slot) = self.joins.find(&join)
            && index < self.joins[slot].count
            && self.arrive(slot, index, arrival)
            && let Some(reported) = self.reported.back_mut()
        {
            reported.must_be_told = base < self.joins[slot].base;
        }
    }

    /// Reports a member of a join that a failure has blocked. No record of the member says so, so that the journal has to.
    pub(crate) fn report_blocked(&mut self, member: Option<Member>, causes: &[MessageId]) {
        let reported = self.reported.len();
        let arrival = Arrival::Failed(causes.to_vec());
        self.report(member, self.position, arrival);
        if let Some(reported) = self.reported.get_mut(reported) {
            reported.must_be_told = true;
        }
    }

    /// Blocks the messages of a join, too many members of which have failed: that is derived from this. Those that wait
    /// for a failure are ready now, and the joins in which it has places hear of it. Where no member has failed, and one was
    /// not needed, the same goes for the messages.
    pub(crate) fn block_join(&mut self, slot: u32, at: u64) {
        if let Some(members) = self.joins[slot]
            .growth
            .as_ref()
            .map(|growth| growth.members)
        {
            // What would come later would run for nothing, and escape whoever cancels the workflow.
            self.close_join(slot, members, true);
        }
        let was_over = self.joins[slot].is_over;
        self.put_join_over(slot, at);
        if self.joins[slot].is_over && !was_over {
            self.note_failed_join(slot);
        }
    }

    fn put_join_over(&mut self, slot: u32, at: u64) {
        let join = &mut self.joins[slot];
        let id = join.id;
        if join.is_over {
            // It is given up: see `Broker::give_up`.
            let was = std::mem::replace(&mut join.over_at, at);
            self.joins_over.remove(&(was, id));
            self.joins_over.insert((at, id));
            return;
        }
        if join.is_needless {
            return;
        }
        let failure = join.failure();
        let is_needless = failure == Arrival::NotNeeded;
        match is_needless {
            // Those messages end step by step.
            true => {
                join.is_needless = true;
                self.joins_needless.push_back(id);
            }
            false => {
                join.is_over = true;
                join.over_at = at;
                self.blocked += join.kept;
                self.joins_over.insert((at, id));
                self.count_blocked(slot, Adjust::Add);
                self.wait_for_failed_jobs();
            }
        }
        let is_released = |handle: &Handle| {
            self.messages.get(*handle).is_some()
                && self.messages.state(handle.slot) == MessagePlace::Held(id)
                && match self.messages.when(handle.slot) {
                    Outcome::Succeeded => false,
                    Outcome::Failed => !is_needless,
                    Outcome::Ended => true,
                }
        };
        let held = self.joins[slot].held.iter().copied();
        let released: Vec<Handle> = held.filter(is_released).collect();
        if !released.is_empty() {
            self.joins[slot]
                .held
                .retain(|handle| !released.contains(handle));
            self.release(id, released, None, Some(at));
        }
        self.report_join(slot, &failure);
    }

    /// Reports a join to those in which it has places.
    fn report_join(&mut self, slot: u32, arrival: &Arrival) {
        let join = &self.joins[slot];
        let (then, base) = (join.then.clone(), join.base);
        for place in then {
            self.report(Some(place), base, arrival.clone());
        }
    }

    /// Has a join wait again for a member that had failed. `causes`: jobs at the root of the failures that are left.
    pub(crate) fn revive_member(&mut self, slot: u32, index: u32, causes: Vec<MessageId>) {
        let join = &mut self.joins[slot];
        let was_bytes = join.journal_bytes();
        join.revive_member(index, causes);
        self.recount_join(slot, was_bytes);
    }

    /// Opens a join again that was over: so few of its members have failed now that it puts up with them. What it has
    /// released when it failed stays released.
    pub(crate) fn reopen_join(&mut self, slot: u32) {
        let join = &mut self.joins[slot];
        if !std::mem::take(&mut join.is_over) {
            return;
        }
        let over_at = std::mem::take(&mut join.over_at);
        let (id, kept) = (join.id, join.kept);
        self.blocked -= kept;
        self.count_blocked(slot, Adjust::Subtract);
        self.joins_over.remove(&(over_at, id));
    }

    /// Restores the progress of a join when it was carried forward.
    pub(crate) fn restore_join(
        &mut self,
        slot: u32,
        count: u32,
        arrived: &[(u32, u64)],
        progress: &JoinProgress<'_>,
        over_at: Option<u64>,
    ) {
        match (&mut self.joins[slot].growth, progress.unsealed) {
            (Some(growth), Some(carried)) if carried.session > 0 => **growth = carried,
            // In a journal that was repaired, the record of its seal may be gone.
            (Some(_), carried) => self.close_join(slot, count, carried.is_some()),
            (None, _) => {}
        }
        let join = &mut self.joins[slot];
        let was_bytes = join.journal_bytes();
        join.restore(arrived);
        join.failures = progress.failures;
        join.causes = progress.causes.to_vec();
        join.has_needless = progress.has_needless;
        join.is_released = progress.is_released;
        if progress.is_needless {
            // What it had to say was said before.
            join.is_needless = true;
            self.joins_needless.push_back(join.id);
        }
        join.result_ttl_ms = progress.result_ttl_ms;
        self.recount_join(slot, was_bytes);
        if let Some(at) = over_at {
            // What it had to say was said before.
            let then = std::mem::take(&mut self.joins[slot].then);
            self.put_join_over(slot, at);
            self.joins[slot].then = then;
        }
    }

    /// Whether the join that holds the message has failed.
    pub(crate) fn is_blocked(&self, slot: u32) -> bool {
        match self.messages.state(slot) {
            MessagePlace::Held(join) => {
                let join = self.joins.find(&join);
                join.is_some_and(|join| self.joins[join].is_over)
            }
            _ => false,
        }
    }

    /// Ends a join. The messages that it held are ready now, or the caller settles them. A released one stays while its
    /// values may be read, which the caller finds out.
    /// `at`: time of the release on the steady clock, where messages have times that begin with it.
    pub(crate) fn end_join(
        &mut self,
        slot: u32,
        released: bool,
        renumbered: Option<Renumbered>,
        at: Option<u64>,
    ) {
        if !released {
            self.forget_join(slot);
            return;
        }
        let join = &mut self.joins[slot];
        join.is_released = true;
        self.note_join_outcome(slot, WorkflowState::Succeeded);
        let join = &mut self.joins[slot];
        let (id, held) = (join.id, std::mem::take(&mut join.held));
        self.release(id, held, renumbered, at);
        self.report_join(slot, &Arrival::Succeeded);
        self.joins.may_be_unread(id);
    }

    /// Makes the messages ready that the join held, as far as they have not ended since.
    fn release(
        &mut self,
        join: JoinId,
        held: Vec<Handle>,
        renumbered: Option<Renumbered>,
        at: Option<u64>,
    ) {
        for handle in held {
            let state = MessagePlace::Held(join);
            if self.messages.get(handle).is_some() && self.messages.state(handle.slot) == state {
                self.count_held(handle.slot, Adjust::Subtract);
                if let Some(to) = renumbered.and_then(|renumbered| renumbered.of(handle.number))
                    && !self.keeps_its_number(handle.slot)
                {
                    self.renumber_held(handle, to);
                }
                match self.take_times(handle.slot).zip(at) {
                    Some((times, at)) => self.wait_from(handle.slot, times, at),
                    None => self.make_ready(handle.slot),
                }
                if self.messages[handle.slot].is_ready() {
                    self.bring_back_forward(handle.slot);
                }
                if !self.marks.is_empty() && self.is_purged(handle.slot) {
                    let queue = self.messages.queue(handle.slot);
                    self.queues[queue].rare_mut().ending += 1;
                }
                let rests = self.messages.rests(handle.slot).and(self.rests);
                self.messages.set_rests(handle.slot, rests);
                self.cool_when_safe(handle.slot);
            }
        }
    }

    /// Whether a message that a join releases is cancelled by an operation under way, which knows it by its number. It ends
    /// by that one or by the purge that it would be renumbered for.
    pub(crate) fn keeps_its_number(&self, slot: u32) -> bool {
        self.mark_that_cancels(slot).is_some()
    }

    /// Whether a message that the join holds has times that begin with its release.
    pub(crate) fn has_times(&self, slot: u32) -> bool {
        let mut held = self.joins[slot].held.iter();
        held.any(|handle| {
            let extras = self
                .messages
                .get(*handle)
                .and_then(|_| self.messages.extras(handle.slot));
            extras.is_some_and(|extras| extras.later.is_some())
        })
    }

    /// Takes the times that begin with the release of a message.
    fn take_times(&mut self, slot: u32) -> Option<Later> {
        self.messages.extras(slot)?.later.as_ref()?;
        self.live_bytes -= self.messages.journal_bytes(slot);
        let times = self.messages.take_later(slot);
        self.live_bytes += self.messages.journal_bytes(slot);
        times
    }

    /// Puts a message that was released at this time in its place.
    fn wait_from(&mut self, slot: u32, times: Later, at: u64) {
        if let Some(ms) = times.expires_after_ms {
            self.abandon_expiry(slot);
            let when = When::steady(at.saturating_add(ms));
            self.messages.set_expiry(slot, Some(when));
            self.set_expiry(slot);
        }
        match times.due {
            None => self.make_ready(slot),
            Some(due) => self.delay(slot, When::of_start(due, at)),
        }
    }

    fn renumber_held(&mut self, handle: Handle, to: u64) {
        let Handle { number, slot } = handle;
        self.abandon_expiry(slot);
        self.numbers = self.numbers.max(to);
        self.messages.set_number(slot, to);
        self.renumber_claim(slot, number);
        self.set_expiry(slot);
    }

    /// Returns new numbers for the messages that the join holds, if a purge of one of their queues is under way: only
    /// messages that waited were purged, and these did not.
    pub(crate) fn renumber_behind_marks(&self, slot: u32) -> Option<Renumbered> {
        if self.marks.is_empty() || planted!("purge-released") {
            return None;
        }
        let join = &self.joins[slot];
        let held = join.held.iter().filter(|handle| {
            self.messages.get(**handle).is_some()
                && self.messages.state(handle.slot) == MessagePlace::Held(join.id)
        });
        if !held.clone().any(|handle| self.is_behind_mark(handle.slot)) {
            return None;
        }
        let first = held.clone().map(|handle| handle.number).min()?;
        let last = held.map(|handle| handle.number).max()?;
        Some(Renumbered {
            first,
            to: self.numbers + 1,
            count: last - first + 1,
        })
    }

    /// Returns the numbers of the messages that the join holds.
    pub(crate) fn still_held(&self, join: &JoinId) -> Vec<u64> {
        let held = self.joins.held_by(join).iter();
        let held = held.filter(|handle| {
            self.messages.get(**handle).is_some()
                && self.messages.state(handle.slot) == MessagePlace::Held(*join)
        });
        held.map(|handle| handle.number).collect()
    }

    /// Ends a join that the journal no longer holds itself.
    pub(crate) fn end_unknown_join(
        &mut self,
        id: JoinId,
        released: bool,
        renumbered: Option<Renumbered>,
        at: Option<u64>,
    ) {
        let held = self.joins.take_early(&id);
        if released {
            self.release(id, held, renumbered, at);
        }
    }

    /// Releases messages that only a journal that lost their join could have left; they must not wait for ever.
    pub(crate) fn release_orphans(&mut self) {
        for (join, held) in self.joins.take_all_early() {
            self.release(join, held, None, None);
        }
    }

    // --- queues

    pub(crate) fn queue_named(&mut self, name: Name) -> u32 {
        self.queues.find_or_create(name, &mut self.names)
    }

    pub(crate) fn pause(&mut self, queue: u32, paused: bool) {
        let was = std::mem::replace(&mut self.queues[queue].paused, paused);
        match (was, paused) {
            (false, true) => {
                self.queues[queue].rare_mut().base = self.position;
                self.ledger
                    .add(self.position, Entity::Queue { index: queue });
            }
            (true, false) => self.ledger.abandon(),
            _ => {}
        }
        self.has_new_work = true;
        self.queues.touch(Forgettable::Queue(queue));
        self.queues.activate(queue);
        let now_ms = self.queues.now_ms;
        self.queues[queue].review_readiness(now_ms);
        self.review_service(queue);
    }

    pub(crate) fn limit(&mut self, queue: u32, limits: QueueLimits) {
        let had = !self.queues.set_limits(queue, limits).is_none();
        self.queues.touch(Forgettable::Queue(queue));
        if had {
            self.ledger.abandon();
        }
        if !limits.is_none() {
            self.queues[queue].rare_mut().limits_base = self.position;
            self.ledger
                .add(self.position, Entity::Limits { index: queue });
        }
    }

    // --- sessions

    pub(crate) fn open_session(
        &mut self,
        number: u64,
        id: SessionId,
        heartbeat_ms: u64,
        applied: u64,
        name: &str,
    ) -> u32 {
        let index = match self.sessions.by_number(number) {
            Some(index) => index,
            None => {
                let index = self.sessions.open(number, id, applied);
                let session = &mut self.sessions[index];
                session.base = self.position;
                self.live_bytes += 64;
                self.ledger
                    .add(self.position, Entity::Session { index, number });
                index
            }
        };
        let session = &mut self.sessions[index];
        if session.name != name {
            name.clone_into(&mut session.name);
        }
        session.heartbeat_ms = heartbeat_ms;
        session.left_at = None;
        index
    }

    pub(crate) fn forget_session(&mut self, index: u32) {
        // Leases end before their session does, so that no message is leased to nobody.
        assert!(
            self.sessions[index].leases.is_empty(),
            "a session is forgotten with its leases"
        );
        let number = self.sessions[index].number;
        self.joins.abandon(|growth| growth.session == number);
        self.sessions.remove(index);
        self.live_bytes -= 64;
        self.ledger.abandon();
    }

    // --- housekeeping

    /// Brings counts of kinds of messages to their queues and tasks.
    pub(crate) fn add_counts(&mut self) {
        while let Some((kind, counts)) = self.messages.kinds.next_counted() {
            self.queues.add_counts(&kind, &counts);
        }
    }

    /// Drops unused kinds. Flows go with the last kind of messages that was theirs.
    pub(crate) fn drop_unused_kinds(&mut self) {
        self.add_counts();
        for flow in self.messages.kinds.drop_unused() {
            self.queues.give_flow(flow);
        }
    }

    /// Drops stale timers and ledger entries, when they are the greater part.
    pub(crate) fn sweep(&mut self) {
        if self.messages.kinds.has_many_counted() {
            self.add_counts();
        }
        if self.messages.kinds.has_many_unused() {
            self.drop_unused_kinds();
        }
        // Each is taken out while the rest of the state is asked.
        let mut timers = std::mem::take(&mut self.timers);
        timers.sweep(|timer| self.is_wanted(timer));
        self.timers = timers;
        let mut ledger = std::mem::take(&mut self.ledger);
        ledger.sweep(|base, entity| self.is_current(base, entity));
        self.ledger = ledger;
    }

    fn is_wanted(&self, timer: &Timer) -> bool {
        match *timer {
            Timer::Due { number, slot } | Timer::Near { number, slot } => {
                let entry = self.messages.get(Handle { number, slot });
                entry.is_some_and(|entry| entry.is_delayed())
            }
            Timer::Expiry { number, slot } => self.messages.get(Handle { number, slot }).is_some(),
            Timer::ValueExpiry { slot, number } => self.keys.get(slot, number).is_some(),
            Timer::EndedValues { .. } | Timer::FailedJobs | Timer::Workflows => true,
            Timer::Deadline { workflow } => self.workflows.awaits_deadline(workflow),
            Timer::LeasesLost {
                session,
                generation,
            }
            | Timer::Forget {
                session,
                generation,
            } => {
                let session = self.sessions.get(session);
                session.is_some_and(|session| session.generation == generation)
            }
            Timer::Unserved { queue, generation } => {
                let queue = self.queues.get(queue);
                queue.is_some_and(|queue| queue.service == Service::Missing { generation })
            }
            Timer::Unknown { queue, generation } => {
                let queue = self.queues.get(queue);
                queue.is_some_and(|queue| queue.rare().unknown_timer == Some(generation))
            }
            Timer::Unused(_) => true,
        }
    }

    /// Whether this entry of the ledger is the thing's last.
    pub(crate) fn is_current(&self, base: Position, entity: &Entity) -> bool {
        match *entity {
            Entity::Message { slot } => {
                let entry = self.messages.by_slot(slot);
                entry.is_some_and(|entry| entry.base() == base)
            }
            Entity::Value { slot, number } => {
                let stored = self.keys.get(slot, number);
                stored.is_some_and(|stored| stored.base == base)
            }
            Entity::Session { index, number } => {
                let session = self.sessions.get(index);
                session.is_some_and(|session| session.number == number && session.base == base)
            }
            Entity::Join { slot, number } => {
                let join = self.joins.get(slot);
                join.is_some_and(|join| join.number == number && join.base == base)
            }
            Entity::Queue { index } => {
                let queue = self.queues.get(index);
                queue.is_some_and(|queue| queue.paused && queue.rare().base == base)
            }
            Entity::Limits { index } => {
                let queue = self.queues.get(index);
                queue.is_some_and(|queue| {
                    let rare = queue.rare();
                    !rare.limits.is_none() && rare.limits_base == base
                })
            }
            Entity::Workflow { number } => self.workflow_is_current(base, number),
            Entity::Mark { number } => self
                .marks
                .get(&number)
                .is_some_and(|(_, mark_base)| *mark_base == base),
        }
    }
}
