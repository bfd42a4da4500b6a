//! Everything that outlives a restart, and all ways in which it may change.
//!
//! Every change here is one event of the journal. The broker decides, writes the event and makes the change; recovery
//! reads the event and makes the same change. So recovery restores the same state.

mod endings;
mod joins;
mod keys;
mod places;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{Extras, JoinId, Key, QueueLimits, SeededState, SessionId};

use crate::Position;
use crate::endings::ended_values::EndedValues;
use crate::failed::FailedJobs;
use crate::held_effects::SafeAfter;
use crate::joins::{Amount, Joins};
use crate::keys::Keys;
use crate::messages::entry::BodyAt;
use crate::messages::{EntryState, Handle, LeaseState, Messages};
use crate::progress::JobsProgress;
use crate::queues::queue::Service;
use crate::queues::run_charges::Charge;
use crate::queues::{Forgettable, Queues};
use crate::reclaim::live_bases::{Entity, LiveBases};
use crate::records::{Change, Failing, Grant, Mark, MessageHead, RecordedState};
use crate::schedules::ScheduleTable;
use crate::sessions::Sessions;
use crate::table::interner::{Interner, Name};
use crate::timers::{Timer, Timers};
use crate::waits::JobWaits;
use crate::workflows::Workflows;

pub(crate) use endings::Ending;
use endings::owned;
pub(crate) use joins::Reported;

#[derive(Debug)]
pub(crate) struct BrokerState {
    pub(crate) names: Interner,
    pub(crate) messages: Messages,
    pub(crate) queues: Queues,
    pub(crate) keys: Keys,
    pub(crate) joins: Joins,
    pub(crate) waits: JobWaits,
    pub(crate) workflows: Workflows,
    pub(crate) schedules: ScheduleTable,
    pub(crate) progress: JobsProgress,
    pub(crate) sessions: Sessions,
    pub(crate) timers: Timers,
    pub(crate) live_bases: LiveBases,
    /// Highest number of a message, and highest grant.
    pub(crate) numbers: u64,
    pub(crate) grants: u64,
    pub(crate) ends: EndedValues,
    pub(crate) failed: FailedJobs,
    /// Unfinished operations on many messages, and the position of each.
    pub(crate) marks: BTreeMap<u64, (Mark, Position)>,
    pub(crate) mark_numbers: u64,
    /// Members that have reported to joins since the list was last processed.
    pub(crate) reported: VecDeque<Reported>,
    /// Copies that have inherited another copy's key since the list was last processed, and are behind it in the
    /// journal, by their numbers.
    pub(crate) inherited: Vec<(u64, Key)>,
    /// Joins that are over because a member failed, by the time of that.
    pub(crate) joins_over: BTreeSet<(u64, JoinId)>,
    /// Joins that have become not needed since the list was last processed.
    pub(crate) joins_needless: VecDeque<JoinId>,
    /// Failed joins, and the messages that they block.
    pub(crate) blocked: Amount,
    /// Rough number of journal bytes that all of this needs.
    pub(crate) live_bytes: u64,
    /// Position of the record that is being written or replayed, and the records that its effects depend on.
    pub(crate) position: Position,
    pub(crate) safe_after: SafeAfter,
    /// Watched keys that may have changed since their watchers were notified.
    pub(crate) touched: Vec<Key>,
    /// Whether new work to hand out may have appeared.
    pub(crate) has_new_work: bool,
    /// Queues that need a timer, and the number of such timers so far.
    pub(crate) newly_unserved: Vec<u32>,
    /// Likewise for tasks that none of a queue's consumers can run.
    pub(crate) newly_unknown: Vec<u32>,
    generations: u64,
    /// Last record that is safe on disk, so that its content can be read back.
    pub(crate) durable: Position,
    /// Maximum bytes of bodies kept in memory so that work is handed out without reading; `None`: all, since there is
    /// no disk to read from.
    pub(crate) resident_limit: Option<u64>,
    /// Time for which failed jobs are kept.
    pub(crate) failed_kept_ms: u64,
    /// Waiting messages that need less memory once this position is safe.
    to_cool: VecDeque<(Position, Handle)>,
}

/// Number of messages of a queue whose bodies stay in memory longer, so that backlogs of other queues do not slow it
/// down.
const SHORT_QUEUE: u64 = 1024;
/// Maximum bytes of notes that a message keeps: a delivery must fit into a frame with its body.
const NOTES_CAP_BYTES: usize = 256 << 10;
/// Journal bytes of an operation on many messages.
pub(crate) const MARK_BYTES: u64 = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Adjust {
    Add,
    Subtract,
}

impl BrokerState {
    /// Creates an empty state. `hashing` is for tables whose keys clients choose.
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            names: Interner::new(hashing),
            messages: Messages::new(hashing),
            queues: Queues::new(hashing),
            keys: Keys::new(hashing),
            joins: Joins::new(hashing),
            waits: JobWaits::new(hashing),
            workflows: Workflows::new(hashing),
            schedules: ScheduleTable::new(hashing),
            progress: JobsProgress::new(hashing),
            sessions: Sessions::new(hashing),
            timers: Timers::default(),
            live_bases: LiveBases::default(),
            numbers: 0,
            grants: 0,
            ends: EndedValues::default(),
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
            safe_after: SafeAfter::default(),
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

    /// Inserts a message. `body` is its body if that is kept in memory; `body_at` is the body's location in the record.
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
        let body = body.map(|body| (body, self.safe_after));
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
        self.live_bases.add(self.position, Entity::Message { slot });
        match head.state {
            _ if failure.is_some() => self.keep_failed(slot),
            RecordedState::Ready => self.make_ready(slot),
            RecordedState::Delayed(when) => self.delay(slot, when),
            RecordedState::Held(join) => {
                self.messages.set_state(slot, EntryState::Held(join));
                self.joins.hold(join, handle);
                self.count_held(slot, Adjust::Add);
            }
            RecordedState::Leased { session, grant } => match self.sessions.by_number(session) {
                Some(session) => self.lease(slot, session, grant, None, true),
                None => self.make_ready(slot),
            },
        }
        self.set_expiry(slot);
        self.touch_result(head.id);
        if self.safe_after.disk != self.position && self.durable < self.position {
            // The body had to stay in memory until its base was synced; a message that is synced at once does not need
            // that.
            self.cool_when_safe(slot);
        }
        slot
    }

    /// Whether the body of a new message is kept in memory. Otherwise it is read back when the message is handed out,
    /// so it must be on disk before that.
    pub(crate) fn keeps_body(&self, queue: Name, state: RecordedState) -> bool {
        self.has_room(
            self.queues.find(queue),
            matches!(state, RecordedState::Delayed(_)),
        ) || (self.safe_after.disk != self.position && self.durable < self.position)
    }

    /// Whether there is room for one more body in memory. Messages that arrived first are handed out first, so bodies
    /// that arrive when there is no room are not kept.
    fn has_room(&self, queue: Option<u32>, is_delayed: bool) -> bool {
        let Some(limit) = self.resident_limit else {
            return true;
        };
        let resident = self.messages.resident_bytes();
        // A delayed message leaves time to read its body.
        if resident < limit / if is_delayed { 2 } else { 1 } {
            return true;
        }
        let waiting = queue.map_or(0, |queue| {
            let queue = &self.queues[queue];
            queue.ready + queue.delayed
        });
        resident < 2 * limit && !is_delayed && waiting < SHORT_QUEUE
    }

    /// Releases memory of a waiting message as soon as it can be read back.
    pub(crate) fn cool_when_safe(&mut self, slot: u32) {
        if self.resident_limit.is_some() && self.messages[slot].is_hot() {
            let safe_after = self.messages.safe_after(slot);
            let safe = safe_after
                .disk
                .max(safe_after.os)
                .max(self.messages[slot].base());
            self.to_cool.push_back((safe, self.messages.handle(slot)));
        }
    }

    /// Releases that memory after `durable` has advanced.
    pub(crate) fn cool(&mut self) {
        while let Some((safe, handle)) = self.to_cool.front().copied()
            && safe <= self.durable
        {
            self.to_cool.pop_front();
            let Some(entry) = self.messages.get(handle) else {
                continue;
            };
            let safe_after = self.messages.safe_after(handle.slot);
            let is_safe = safe_after.disk.max(safe_after.os).max(entry.base()) <= self.durable;
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
        // This record is the base of the copy and of its source.
        let entry = &self.messages[source];
        assert_eq!(entry.base(), self.position, "a copy of an older message");
        self.messages.set_has_copies(source);
        let state = match self.messages.state(source) {
            EntryState::Delayed(when) => RecordedState::Delayed(when),
            _ => RecordedState::Ready,
        };
        let body = self.messages.body(source).cloned();
        let body_at = self.messages.body_at(source);
        let extras = self.messages.whole_extras(source).map(Box::new);
        let head = MessageHead {
            number,
            queue,
            state,
            ..self.head(source)
        };
        self.insert_message(&head, extras, None, body_at, body)
    }

    /// Returns the state of the message as the journal would record it now.
    pub(crate) fn head(&self, slot: u32) -> MessageHead {
        let entry = &self.messages[slot];
        let shared_head = self.messages.shared_head(slot);
        MessageHead {
            number: entry.number(),
            id: entry.id,
            queue: self.queues[shared_head.queue].name,
            task: shared_head.task,
            priority: shared_head.priority,
            max_deliveries: shared_head.max_deliveries,
            crashes: shared_head.crashes,
            redelivered: entry.redelivered(),
            has_copies: entry.has_copies(),
            attempt: shared_head.attempt,
            generation: shared_head.generation,
            attempts_before: shared_head.attempts_before,
            enqueued_at: entry.enqueued_at(),
            expires_at: self.messages.expires_at(slot),
            result_ttl_ms: shared_head.result_ttl_ms,
            state: match self.messages.state(slot) {
                // A failed job's failure is recorded separately.
                EntryState::Ready | EntryState::Failed | EntryState::Ended => RecordedState::Ready,
                EntryState::Delayed(when) => RecordedState::Delayed(when),
                EntryState::Held(join) => RecordedState::Held(join),
                EntryState::Leased(lease) => RecordedState::Leased {
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

    /// Adds the size of a held message to its join, or subtracts it.
    pub(crate) fn count_held(&mut self, slot: u32, adjust: Adjust) {
        let EntryState::Held(join) = self.messages.state(slot) else {
            return;
        };
        // The join may come later in the journal; it is counted then.
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

    /// Recounts the journal bytes of a failed job.
    pub(crate) fn recount_failed(&mut self, slot: u32) {
        let entry = &self.messages[slot];
        if entry.is_failed() {
            let bytes = self.messages.journal_bytes(slot);
            self.failed.set_bytes(entry.number(), bytes);
        }
    }

    /// Hands out a waiting message, now or in replay.
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
        self.messages.set_state(slot, EntryState::Leased(lease));
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

    /// Charges the flow of a run from now on, for a hand-out that did not charge it.
    pub(crate) fn charge_run(&mut self, slot: u32) {
        let flow = self.flow(slot);
        if let Some(lease) = self.messages.lease_state_mut(slot) {
            lease.charge = Some(self.queues.charge_run(flow));
        }
    }

    /// Returns the message to its place in the queue after its lease ended.
    pub(crate) fn return_message(&mut self, slot: u32, redelivered: bool) {
        self.return_to_queue(slot, redelivered, 0);
    }

    fn return_to_queue(&mut self, slot: u32, redelivered: bool, crashes: u8) {
        let lease = self.messages.lease_state(slot);
        let has_expired = lease.is_some_and(|lease| lease.expired);
        self.forget_asked(slot);
        self.take(slot, None);
        let redelivered = redelivered && !planted!("forget-redelivery");
        let redelivered = self.messages[slot].redelivered() || redelivered;
        self.messages.set_redelivered(slot, redelivered);
        // The next consumer must not see it before the end of the lease is safe.
        let safe_after = self.messages.safe_after(slot).and(self.safe_after);
        self.messages.set_rests(slot, safe_after);
        self.messages.drop_body_read_back(slot);
        if crashes > 0 {
            self.messages.set_shared_head(slot, |shared_head| {
                shared_head.crashes = shared_head.crashes.saturating_add(crashes)
            });
        }
        self.make_ready(slot);
        self.reprioritize(slot);
        self.cool_when_safe(slot);
        if has_expired {
            self.set_expiry(slot);
        }
    }

    pub(crate) fn crash_message(&mut self, slot: u32, reason: Bytes) {
        let crashes = u8::from(!planted!("miscount-crashes"));
        self.return_to_queue(slot, true, crashes);
        self.add_note(slot, reason);
    }

    /// Notes that the message may have killed its process. It keeps its lease for the event that follows. An empty
    /// reason is not kept: the event that follows has it.
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
        self.messages.set_shared_head(slot, |shared_head| {
            shared_head.queue = queue;
            shared_head.attempt = shared_head
                .attempt
                .saturating_add(u32::from(change.next_attempt));
            shared_head.crashes = shared_head.crashes.saturating_add(u8::from(change.crashed));
        });
        let redelivered = change.redelivered && self.messages[slot].redelivered();
        self.messages
            .set_redelivered(slot, redelivered || change.was_sent);
        self.messages.set_rests(slot, self.safe_after);
        if change.redelivered {
            self.messages.drop_body_read_back(slot);
        }
        if change.expires_at.is_some() {
            self.messages.set_expiry(slot, change.expires_at);
        }
        self.renumber_claim(slot, was);
        if planted!("claim-retaken-on-retry")
            && let Some(claim) = self.messages.claim(slot).cloned()
            && self.keys.owner(&claim).is_none()
        {
            self.own(slot, claim);
        }
        if let Some(note) = note
            && !planted!("lose-note")
        {
            self.add_note(slot, note);
        }
        match change.due {
            Some(when) if !planted!("retry-at-once") => self.delay(slot, when),
            _ => {
                self.make_ready(slot);
                self.reprioritize(slot);
            }
        }
        self.set_expiry(slot);
        self.touch_result(self.messages[slot].id);
        self.cool_when_safe(slot);
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
                self.live_bases
                    .add(self.position, Entity::Queue { index: queue });
            }
            (true, false) => self.live_bases.abandon(),
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
            self.live_bases.abandon();
        }
        if !limits.is_none() {
            self.queues[queue].rare_mut().limits_base = self.position;
            self.live_bases
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
                self.live_bases
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
        // Leases end before their session, so that every lease has one.
        assert!(
            self.sessions[index].leases.is_empty(),
            "a session is forgotten with its leases"
        );
        let number = self.sessions[index].number;
        self.joins.abandon(|growth| growth.session == number);
        self.sessions.remove(index);
        self.live_bytes -= 64;
        self.live_bases.abandon();
    }

    // --- housekeeping

    /// Adds the counts of shared heads to their queues and tasks.
    pub(crate) fn add_counts(&mut self) {
        while let Some((shared_head, counts)) = self.messages.shared_heads.next_counted() {
            self.queues.add_counts(&shared_head, &counts);
        }
    }

    /// Drops unused shared heads. A flow is dropped with the last shared head that uses it.
    pub(crate) fn drop_unused_heads(&mut self) {
        self.add_counts();
        for flow in self.messages.shared_heads.drop_unused() {
            self.queues.release_flow(flow);
        }
    }

    /// Drops stale timers and live bases once they are the majority.
    pub(crate) fn sweep(&mut self) {
        if self.messages.shared_heads.has_many_counted() {
            self.add_counts();
        }
        if self.messages.shared_heads.has_many_unused() {
            self.drop_unused_heads();
        }
        // Each is taken out while it needs the rest of the state.
        let mut timers = std::mem::take(&mut self.timers);
        timers.sweep(|timer| self.is_wanted(timer));
        self.timers = timers;
        let mut live_bases = std::mem::take(&mut self.live_bases);
        live_bases.sweep(|base, entity| self.is_current(base, entity));
        self.live_bases = live_bases;
    }

    fn is_wanted(&self, timer: &Timer) -> bool {
        match *timer {
            Timer::Due { number, slot } | Timer::Prefetch { number, slot } => {
                let entry = self.messages.get(Handle { number, slot });
                entry.is_some_and(|entry| entry.is_delayed())
            }
            Timer::Expiry { number, slot } => self.messages.get(Handle { number, slot }).is_some(),
            Timer::ValueExpiry(value) => self.keys.get(value).is_some(),
            Timer::EndedValues { .. } | Timer::FailedJobs | Timer::Workflows => true,
            Timer::Deadline { workflow } => self.workflows.awaits_deadline(workflow),
            Timer::Schedule { number, at } => self.schedules.awaits(number, at),
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

    /// Whether this entry of the live bases is the thing's last.
    pub(crate) fn is_current(&self, base: Position, entity: &Entity) -> bool {
        match *entity {
            Entity::Message { slot } => {
                let entry = self.messages.by_slot(slot);
                entry.is_some_and(|entry| entry.base() == base)
            }
            Entity::Value { slot } => {
                let stored = self.keys.by_slot(slot);
                stored.is_some_and(|stored| stored.base() == base)
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
            Entity::Schedule { number } => self.schedules.is_current(base, number),
            Entity::Mark { number } => self
                .marks
                .get(&number)
                .is_some_and(|(_, mark_base)| *mark_base == base),
        }
    }
}
