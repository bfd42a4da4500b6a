//! All that outlives a restart, and each way in which it may change.
//!
//! Every change here is one event of the journal. The broker decides, writes the event and calls the
//! change; recovery reads the event and calls the same change. So what is recovered is what was.

use std::collections::VecDeque;

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    JoinId, JoinPolicy, Key, MessageId, QueueLimits, SeededState, SessionId, Value,
};

use crate::Position;
use crate::clock::{Clock, When};
use crate::effects::Rests;
use crate::joins::Joins;
use crate::keys::{Keys, Stored};
use crate::ledger::{Entity, Ledger};
use crate::messages::{BodyAt, Handle, LeaseState, Messages, State as MessagePlace};
use crate::names::{Name, Names};
use crate::near::near_at;
use crate::queues::{Queues, Service};
use crate::records::{Change, Grant, MessageHead, Place};
use crate::sessions::Sessions;
use crate::timers::{Timer, Timers};

pub(crate) const DEAD_LETTER_QUEUE: &str = "dead";

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) names: Names,
    pub(crate) messages: Messages,
    pub(crate) queues: Queues,
    pub(crate) keys: Keys,
    pub(crate) joins: Joins,
    pub(crate) sessions: Sessions,
    pub(crate) timers: Timers,
    pub(crate) ledger: Ledger,
    /// The highest number that a message was given, and the highest grant.
    pub(crate) numbers: u64,
    pub(crate) grants: u64,
    pub(crate) dead: u32,
    /// What the journal would need to hold all of this, roughly.
    pub(crate) live_bytes: u64,
    /// The record that is being written or replayed, and what its effects rest on.
    pub(crate) position: Position,
    pub(crate) rests: Rests,
    /// Keys that are watched and may have changed since anybody was told.
    pub(crate) touched: Vec<Key>,
    /// There may be something to hand out that there was not before.
    pub(crate) has_new_work: bool,
    /// Queues for which a timer shall be set, and the count of such timers so far.
    pub(crate) newly_unserved: Vec<u32>,
    generations: u64,
    /// The last record that is safe on disk, so that what stands in it can be read back.
    pub(crate) durable: Position,
    /// How many bytes of bodies are kept in memory, so that work is handed out without reading; `None`:
    /// all, for there is no disk to read from.
    pub(crate) resident_limit: Option<u64>,
    /// Messages that wait and may do it with less memory once this position is safe.
    to_cool: VecDeque<(Position, Handle)>,
}

/// A queue that has no more messages than this keeps their bodies in memory for longer: others' backlogs
/// must not slow it down.
const SHORT_QUEUE: u64 = 1024;
/// How many bytes of notes a message keeps: a delivery must fit into a frame beside its body.
const NOTES_CAP_BYTES: usize = 256 << 10;

impl State {
    /// `hashing`: of tables whose keys clients choose.
    pub(crate) fn new(hashing: SeededState) -> Self {
        let mut names = Names::new(hashing);
        let mut queues = Queues::default();
        let dead = queues.find_or_create(names.intern(DEAD_LETTER_QUEUE));
        Self {
            names,
            messages: Messages::new(hashing),
            queues,
            keys: Keys::new(hashing),
            joins: Joins::new(hashing),
            sessions: Sessions::new(hashing),
            timers: Timers::default(),
            ledger: Ledger::default(),
            numbers: 0,
            grants: 0,
            dead,
            live_bytes: 0,
            position: Position(0),
            rests: Rests::default(),
            touched: Vec::new(),
            has_new_work: false,
            newly_unserved: Vec::new(),
            generations: 0,
            durable: Position(0),
            resident_limit: None,
            to_cool: VecDeque::new(),
        }
    }

    // --- messages

    /// `body`: what is to be kept in memory, if anything; `body_at`: where it stands in the record.
    pub(crate) fn insert_message(
        &mut self,
        head: &MessageHead,
        body_at: BodyAt,
        body: Option<Bytes>,
    ) -> u32 {
        self.numbers = self.numbers.max(head.number);
        let queue = self.queues.find_or_create(head.queue);
        let body = body.map(|body| (body, self.rests));
        let slot = self
            .messages
            .insert(head, queue, self.position, body_at, body);
        self.live_bytes += self.messages.journal_bytes(slot);
        let handle = Handle {
            number: head.number,
            slot,
        };
        self.ledger.add(self.position, Entity::Message { slot });
        match head.place {
            Place::Ready => self.make_ready(slot),
            Place::Delayed(when) => self.delay(slot, when),
            Place::Held(join) => {
                self.messages.set_state(slot, MessagePlace::Held(join));
                self.joins.hold(join, handle);
            }
            Place::Leased { session, grant } => match self.sessions.by_number(session) {
                Some(session) => self.lease(slot, session, grant, 0, true),
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

    /// Whether one more body may be in memory. Those that came first are handed out first, so it is those
    /// that come when there is no room that are not.
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

    /// The message waits. As soon as it can be read back, it may do so with less memory.
    pub(crate) fn cool_when_safe(&mut self, slot: u32) {
        if self.resident_limit.is_some() && self.messages[slot].is_hot() {
            let rests = self.messages.rests(slot);
            let safe = rests.disk.max(rests.os).max(self.messages[slot].base());
            self.to_cool.push_back((safe, self.messages.handle(slot)));
        }
    }

    /// After `durable` has moved.
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
        let head = MessageHead {
            number,
            queue,
            place,
            ..self.head(source)
        };
        self.insert_message(&head, body_at, body)
    }

    /// What the journal would say of the message now.
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
            enqueued_at: entry.enqueued_at(),
            expires_at: self.messages.expires_at(slot),
            result_ttl_ms: kind.result_ttl_ms,
            place: match self.messages.state(slot) {
                MessagePlace::Ready => Place::Ready,
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
    }

    /// A message that waits anywhere is handed out, or a hand-out is heard of later.
    pub(crate) fn grant(&mut self, slot: u32, session: u32, grant: Grant) {
        self.take(slot, None);
        let estimate_us = self.queues.estimate_us(self.messages.kind(slot).task);
        self.lease(slot, session, grant, estimate_us, true);
    }

    /// Enters the lease of a message that was taken out of its place.
    pub(crate) fn lease(
        &mut self,
        slot: u32,
        session: u32,
        grant: Grant,
        estimate_us: u32,
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
            estimate_us,
            sent,
            expired: false,
        };
        self.messages.set_state(slot, MessagePlace::Leased(lease));
        self.queues[self.messages.queue(slot)].running += 1;
    }

    /// The lease ended and the message goes back to its place.
    pub(crate) fn return_message(&mut self, slot: u32, redelivered: bool) {
        let lease = self.messages.lease_state(slot);
        let has_expired = lease.is_some_and(|lease| lease.expired);
        self.take(slot, None);
        let redelivered = redelivered && !planted!("forget-redelivery");
        let redelivered = self.messages[slot].redelivered() || redelivered;
        self.messages.set_redelivered(slot, redelivered);
        // Whoever is given it next must not see it before the lease has surely ended.
        let rests = self.messages.rests(slot).and(self.rests);
        self.messages.set_rests(slot, rests);
        self.messages.drop_body_read_back(slot);
        self.make_ready(slot);
        self.cool_when_safe(slot);
        if has_expired {
            self.set_expiry(slot);
        }
    }

    pub(crate) fn crash_message(&mut self, slot: u32, reason: Bytes) {
        self.return_message(slot, true);
        let crashes = u8::from(!planted!("miscount-crashes"));
        self.messages.set_kind(slot, |kind| {
            kind.crashes = kind.crashes.saturating_add(crashes)
        });
        self.add_note(slot, reason);
    }

    pub(crate) fn move_message(
        &mut self,
        slot: u32,
        change: &Change<'_>,
        note: Option<Bytes>,
        cost_us: Option<u64>,
    ) {
        self.take(slot, cost_us);
        self.abandon_expiry(slot);
        self.numbers = self.numbers.max(change.to);
        let queue = self.queues.find_or_create(change.queue);
        let was = self.messages[slot].number();
        self.messages.set_number(slot, change.to);
        self.messages.set_kind(slot, |kind| {
            kind.queue = queue;
            kind.attempt = kind.attempt.saturating_add(u32::from(change.next_attempt));
            kind.crashes = kind.crashes.saturating_add(u8::from(change.crashed));
        });
        self.messages.set_redelivered(slot, false);
        self.messages.set_rests(slot, self.rests);
        if change.expires_at.is_some() {
            self.messages.set_expiry(slot, change.expires_at);
        }
        if let Some(claim) = self.messages.claim(slot).cloned()
            && self.keys.owner(&claim) == Some(was)
        {
            self.keys.claim(claim, change.to);
        }
        if let Some(note) = note
            && !planted!("lose-note")
        {
            self.add_note(slot, note);
        }
        match change.due {
            Some(when) if !planted!("retry-at-once") => self.delay(slot, when),
            _ => self.make_ready(slot),
        }
        self.set_expiry(slot);
        self.touch_result(self.messages[slot].id);
        self.cool_when_safe(slot);
    }

    /// The message is done with, however it ended.
    pub(crate) fn settle_message(&mut self, slot: u32, cost_us: Option<u64>) {
        self.take(slot, cost_us);
        self.abandon_expiry(slot);
        let removed = self.messages.remove(slot);
        self.live_bytes -= removed.journal_bytes;
        self.ledger.abandon();
        if let Some(claim) = removed.claim
            && self.keys.owner(&claim) == Some(removed.number)
        {
            // The key is the message's until the last of its copies is settled.
            let copy = self.messages.first_of(&removed.id);
            match copy {
                Some(copy) => self.claim(copy, claim),
                None => {
                    self.keys.end_claim(&claim);
                    self.touch(&claim);
                }
            }
        }
        if removed.is_last {
            self.touch_result(removed.id);
        }
    }

    pub(crate) fn make_ready(&mut self, slot: u32) {
        self.messages.set_state(slot, MessagePlace::Ready);
        self.queues.push_ready(&self.messages, slot);
        self.has_new_work = true;
        self.review_service(self.messages.queue(slot));
    }

    /// Notes queues that have work and nobody who takes it.
    pub(crate) fn review_service(&mut self, index: u32) {
        let queue = &mut self.queues[index];
        if queue.consumers > 0 {
            queue.service = Service::Well;
        } else if queue.service == Service::Well
            && queue.ready > 0
            && !queue.paused
            && index != self.dead
        {
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

    /// A delayed message has come due. The journal says when, so it need not say that.
    pub(crate) fn come_due(&mut self, slot: u32) {
        let queue = &mut self.queues[self.messages.queue(slot)];
        queue.delayed -= 1;
        queue.delayed_bytes -= self.messages.body_bytes(slot);
        self.make_ready(slot);
    }

    /// After a recovery, which hears of many queues that were served since.
    pub(crate) fn review_all_service(&mut self) {
        for index in 0..self.queues.len() {
            self.queues[index].service = Service::Well;
            self.review_service(index);
        }
    }

    /// Takes a message out of its place; what becomes of it is the caller's to say.
    fn take(&mut self, slot: u32, cost_us: Option<u64>) {
        let kind = *self.messages.kind(slot);
        let queue = kind.queue;
        match self.messages.state(slot) {
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
            MessagePlace::Held(_) => {}
            MessagePlace::Leased(lease) => {
                self.queues.correct_cost(
                    queue,
                    kind.priority,
                    kind.task,
                    lease.estimate_us,
                    cost_us,
                );
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

    pub(crate) fn store(&mut self, key: Key, value: Value, group: Name, expires_at: Option<u64>) {
        self.forget_value(&key);
        self.touch(&key);
        let stored = Stored {
            key,
            value,
            group,
            expires_at,
            number: 0,
            base: self.position,
            rests: self.rests,
        };
        self.live_bytes += stored.bytes();
        let (slot, number) = self.keys.insert(stored);
        self.ledger
            .add(self.position, Entity::Value { slot, number });
        if let Some(at) = expires_at {
            self.timers
                .set(When::steady(at), Timer::ValueExpiry { slot, number });
        }
    }

    /// The value goes, and whatever claim there is.
    pub(crate) fn remove_key(&mut self, key: &Key) {
        self.forget_value(key);
        self.keys.end_claim(key);
        self.touch(key);
    }

    /// The value goes: its time is over, or its group is over the cap.
    pub(crate) fn drop_value(&mut self, key: &Key) {
        self.forget_value(key);
        self.touch(key);
    }

    fn forget_value(&mut self, key: &Key) {
        if let Some(stored) = self.keys.remove(key) {
            self.live_bytes -= stored.bytes();
            self.ledger.abandon();
            if stored.expires_at.is_some() {
                self.timers.abandon(Clock::Steady);
            }
        }
    }

    pub(crate) fn claim(&mut self, slot: u32, key: Key) {
        let number = self.messages[slot].number();
        self.messages.set_claim(slot, key.clone());
        self.keys.claim(key, number);
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

    pub(crate) fn open_join(&mut self, id: JoinId, count: u32, policy: JoinPolicy) {
        if self.joins.find(&id).is_some() {
            return;
        }
        let slot = self.joins.open(id, count, policy);
        let join = &mut self.joins[slot];
        join.base = self.position;
        self.live_bytes += join.journal_bytes();
        self.ledger.add(
            self.position,
            Entity::Join {
                slot,
                number: join.number,
            },
        );
    }

    /// False when this member had arrived before.
    pub(crate) fn arrive(&mut self, slot: u32, index: u32) -> bool {
        let join = &mut self.joins[slot];
        let bytes = join.journal_bytes();
        let is_new = join.arrive(index);
        self.live_bytes += join.journal_bytes() - bytes;
        is_new
    }

    /// The join is over. What it held is ready now, or the caller settles it.
    pub(crate) fn end_join(&mut self, slot: u32, released: bool) {
        let join = self.joins.close(slot);
        self.live_bytes -= join.journal_bytes();
        self.ledger.abandon();
        if released {
            self.release(join.id, join.held);
        }
    }

    /// What the join held, as far as it has not ended since, is ready.
    fn release(&mut self, join: JoinId, held: Vec<Handle>) {
        for handle in held {
            let state = MessagePlace::Held(join);
            if self.messages.get(handle).is_some() && self.messages.state(handle.slot) == state {
                self.make_ready(handle.slot);
                let rests = self.messages.rests(handle.slot).and(self.rests);
                self.messages.set_rests(handle.slot, rests);
                self.cool_when_safe(handle.slot);
            }
        }
    }

    /// The journal tells of the end of a join that it no longer tells of itself.
    pub(crate) fn end_unknown_join(&mut self, id: JoinId, released: bool) {
        let held = self.joins.take_early(&id);
        if released {
            self.release(id, held);
        }
    }

    /// Only a journal that lost the join could have left these; they must not wait for ever.
    pub(crate) fn release_orphans(&mut self) {
        for (join, held) in self.joins.take_all_early() {
            self.release(join, held);
        }
    }

    // --- queues

    pub(crate) fn pause(&mut self, queue: u32, paused: bool) {
        let was = std::mem::replace(&mut self.queues[queue].paused, paused);
        match (was, paused) {
            (false, true) => {
                self.queues[queue].base = self.position;
                self.ledger
                    .add(self.position, Entity::Queue { index: queue });
            }
            (true, false) => self.ledger.abandon(),
            _ => {}
        }
        self.has_new_work = true;
        self.review_service(queue);
    }

    pub(crate) fn limit(&mut self, queue: u32, limits: QueueLimits) {
        let had = !self.queues.set_limits(queue, limits).is_none();
        if had {
            self.ledger.abandon();
        }
        if !limits.is_none() {
            self.queues[queue].limits_base = self.position;
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
        self.sessions.remove(index);
        self.live_bytes -= 64;
        self.ledger.abandon();
    }

    // --- housekeeping

    /// Drops what is stale of timers and ledger, when it is the greater part.
    pub(crate) fn sweep(&mut self) {
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
                self.queues[queue].service == Service::Missing { generation }
            }
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
            Entity::Queue { index } => self.queues[index].paused && self.queues[index].base == base,
            Entity::Limits { index } => {
                let queue = &self.queues[index];
                !queue.limits.is_none() && queue.limits_base == base
            }
        }
    }
}
