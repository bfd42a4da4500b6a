//! All that outlives a restart, and each way in which it may change.
//!
//! Every change here is one event of the journal. The broker decides, writes the event and calls the
//! change; recovery reads the event and calls the same change. So what is recovered is what was.

use bytes::Bytes;
use penstock_message::{JoinId, JoinPolicy, Key, MessageId, SessionId, Value};

use crate::Position;
use crate::clock::{Clock, When};
use crate::effects::Rests;
use crate::joins::Joins;
use crate::keys::{Keys, Stored};
use crate::ledger::{Entity, Ledger};
use crate::messages::{Entry, Handle, LeaseState, Messages, State as MessagePlace};
use crate::names::{Name, Names};
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
}

/// How many bytes of notes a message keeps: a delivery must fit into a frame beside its body.
const NOTES_CAP_BYTES: usize = 256 << 10;

impl State {
    pub(crate) fn new() -> Self {
        let mut names = Names::default();
        let mut queues = Queues::default();
        let dead = queues.find_or_create(names.intern(DEAD_LETTER_QUEUE));
        Self {
            names,
            messages: Messages::default(),
            queues,
            keys: Keys::default(),
            joins: Joins::default(),
            sessions: Sessions::default(),
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
        }
    }

    // --- messages

    pub(crate) fn insert_message(&mut self, head: &MessageHead, body: Bytes) -> u32 {
        self.numbers = self.numbers.max(head.number);
        let queue = self.queues.find_or_create(head.queue);
        let mut entry = Entry::new(head, queue, body);
        entry.base = self.position;
        entry.rests = self.rests;
        self.live_bytes += entry.journal_bytes();
        let slot = self.messages.insert(entry);
        let handle = Handle {
            number: head.number,
            slot,
        };
        self.ledger.add(self.position, Entity::Message { slot });
        match head.place {
            Place::Ready => self.make_ready(slot),
            Place::Delayed(when) => self.delay(slot, when),
            Place::Held(join) => {
                self.messages[slot].state = MessagePlace::Held(join);
                match self.joins.find(&join) {
                    Some(join) => self.joins[join].held.push(handle),
                    // Only a journal that lost the join could say so; the message must not wait for ever.
                    None => self.make_ready(slot),
                }
            }
            Place::Leased { session, grant } => match self.sessions.by_number(session) {
                Some(session) => self.lease(slot, session, grant, 0, true),
                None => self.make_ready(slot),
            },
        }
        self.set_expiry(slot);
        self.touch_result(self.messages[slot].id);
        slot
    }

    pub(crate) fn copy_message(&mut self, source: u32, number: u64, queue: Name) -> u32 {
        let entry = &mut self.messages[source];
        entry.has_copies = true;
        let place = match entry.state {
            MessagePlace::Delayed(when) => Place::Delayed(when),
            _ => Place::Ready,
        };
        let body = entry.body.clone();
        let head = MessageHead {
            number,
            queue,
            place,
            ..self.head(source)
        };
        self.insert_message(&head, body)
    }

    /// What the journal would say of the message now.
    pub(crate) fn head(&self, slot: u32) -> MessageHead {
        let entry = &self.messages[slot];
        MessageHead {
            number: entry.number,
            id: entry.id,
            queue: self.queues[entry.queue].name,
            task: entry.task,
            priority: entry.priority,
            max_deliveries: entry.max_deliveries,
            crashes: entry.crashes,
            redelivered: entry.redelivered,
            has_copies: entry.has_copies,
            attempt: entry.attempt,
            enqueued_at: entry.enqueued_at,
            expires_at: entry.expires_at,
            result_ttl_ms: entry.result_ttl_ms,
            place: match entry.state {
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
        let entry = &mut self.messages[slot];
        self.live_bytes -= entry.journal_bytes();
        let notes = &mut entry.extra().notes;
        notes.push(match note.len() {
            0..=NOTES_CAP_BYTES => note,
            length => format!("an error of {length} bytes, which is too large to keep").into(),
        });
        let mut bytes: usize = notes.iter().map(Bytes::len).sum();
        while bytes > NOTES_CAP_BYTES {
            let spared = usize::from(notes.len() > 2);
            bytes -= notes.remove(spared).len();
        }
        self.live_bytes += entry.journal_bytes();
    }

    /// A message that waits anywhere is handed out, or a hand-out is heard of later.
    pub(crate) fn grant(&mut self, slot: u32, session: u32, grant: Grant) {
        self.take(slot, None);
        let estimate_us = self.queues.estimate_us(self.messages[slot].task);
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
        let entry = &mut self.messages[slot];
        entry.recovered = false;
        entry.state = MessagePlace::Leased(LeaseState {
            grant,
            session,
            index,
            estimate_us,
            sent,
            expired: false,
        });
        self.queues[entry.queue].running += 1;
    }

    /// The lease ended and the message goes back to its place.
    pub(crate) fn return_message(&mut self, slot: u32, redelivered: bool) {
        let has_expired =
            matches!(self.messages[slot].state, MessagePlace::Leased(lease) if lease.expired);
        self.take(slot, None);
        let entry = &mut self.messages[slot];
        entry.redelivered |= redelivered;
        // Whoever is given it next must not see it before the lease has surely ended.
        entry.rests = entry.rests.and(self.rests);
        self.make_ready(slot);
        if has_expired {
            self.set_expiry(slot);
        }
    }

    pub(crate) fn crash_message(&mut self, slot: u32, reason: Bytes) {
        self.return_message(slot, true);
        let entry = &mut self.messages[slot];
        entry.crashes = entry.crashes.saturating_add(1);
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
        let entry = &mut self.messages[slot];
        let was = std::mem::replace(&mut entry.number, change.to);
        entry.queue = queue;
        entry.redelivered = false;
        entry.rests = self.rests;
        entry.attempt = entry.attempt.saturating_add(u32::from(change.next_attempt));
        entry.crashes = entry.crashes.saturating_add(u8::from(change.crashed));
        entry.expires_at = change.expires_at.or(entry.expires_at);
        if let Some(claim) = entry.extra.as_ref().and_then(|extra| extra.claim.clone())
            && self.keys.owner(&claim) == Some(was)
        {
            self.keys.claim(claim, change.to);
        }
        if let Some(note) = note {
            self.add_note(slot, note);
        }
        match change.due {
            Some(when) => self.delay(slot, when),
            None => self.make_ready(slot),
        }
        self.set_expiry(slot);
        self.touch_result(self.messages[slot].id);
    }

    /// The message is done with, however it ended.
    pub(crate) fn settle_message(&mut self, slot: u32, cost_us: Option<u64>) {
        self.take(slot, cost_us);
        self.abandon_expiry(slot);
        let (entry, is_last) = self.messages.remove(slot);
        self.live_bytes -= entry.journal_bytes();
        self.ledger.abandon();
        if let Some(claim) = entry.extra.and_then(|extra| extra.claim)
            && self.keys.owner(&claim) == Some(entry.number)
        {
            // The key is the message's until the last of its copies is settled.
            let copy = self.messages.copies(&entry.id).next();
            match copy {
                Some(copy) => self.claim(copy, claim),
                None => {
                    self.keys.end_claim(&claim);
                    self.touch(&claim);
                }
            }
        }
        if is_last {
            self.touch_result(entry.id);
        }
    }

    pub(crate) fn make_ready(&mut self, slot: u32) {
        self.messages[slot].state = MessagePlace::Ready;
        self.queues.push_ready(&self.messages, slot);
        self.has_new_work = true;
        self.review_service(self.messages[slot].queue);
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
        let handle = self.messages.handle(slot);
        let entry = &mut self.messages[slot];
        entry.state = MessagePlace::Delayed(when);
        self.queues[entry.queue].delayed += 1;
        self.timers.set(when, Timer::Due(handle));
    }

    /// A delayed message has come due. The journal says when, so it need not say that.
    pub(crate) fn come_due(&mut self, slot: u32) {
        let queue = self.messages[slot].queue;
        self.queues[queue].delayed -= 1;
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
        let entry = &self.messages[slot];
        let queue = entry.queue;
        match entry.state {
            MessagePlace::Ready => {
                self.queues.remove_ready(&self.messages, slot);
                let queue = &mut self.queues[queue];
                if queue.ready == 0 && matches!(queue.service, Service::Missing { .. }) {
                    queue.service = Service::Well;
                }
            }
            MessagePlace::Delayed(when) => {
                self.timers.abandon(when.clock);
                self.queues[queue].delayed -= 1;
            }
            MessagePlace::Held(_) => {}
            MessagePlace::Leased(lease) => {
                self.queues.correct_cost(
                    queue,
                    entry.priority,
                    entry.task,
                    lease.estimate_us,
                    cost_us,
                );
                self.queues[queue].running -= 1;
                let leases = &mut self.sessions[lease.session].leases;
                leases.swap_remove(lease.index as usize);
                if let Some(moved) = leases.get(lease.index as usize)
                    && let MessagePlace::Leased(other) = &mut self.messages[*moved].state
                {
                    other.index = lease.index;
                }
            }
        }
    }

    fn set_expiry(&mut self, slot: u32) {
        if let Some(when) = self.messages[slot].expires_at {
            self.timers
                .set(when, Timer::Expiry(self.messages.handle(slot)));
        }
    }

    fn abandon_expiry(&mut self, slot: u32) {
        if let Some(when) = self.messages[slot].expires_at {
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
        let entry = &mut self.messages[slot];
        let number = entry.number;
        entry.extra().claim = Some(key.clone());
        self.keys.claim(key, number);
    }

    pub(crate) fn touch(&mut self, key: &Key) {
        if self.keys.is_anything_watched() {
            self.touched.push(key.clone());
        }
    }

    fn touch_result(&mut self, id: MessageId) {
        if self.keys.is_anything_watched() {
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

    /// The join is over. What it held is ready now, or the caller settles it.
    pub(crate) fn end_join(&mut self, slot: u32, released: bool) {
        let join = self.joins.close(slot);
        self.live_bytes -= join.journal_bytes();
        self.ledger.abandon();
        if released {
            for handle in join.held {
                let held = MessagePlace::Held(join.id);
                if self
                    .messages
                    .get(handle)
                    .is_some_and(|entry| entry.state == held)
                {
                    self.make_ready(handle.slot);
                    let entry = &mut self.messages[handle.slot];
                    entry.rests = entry.rests.and(self.rests);
                }
            }
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
            Timer::Due(handle) => {
                let entry = self.messages.get(handle);
                entry.is_some_and(|entry| matches!(entry.state, MessagePlace::Delayed(_)))
            }
            Timer::Expiry(handle) => self.messages.get(handle).is_some(),
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
                entry.is_some_and(|entry| entry.base == base)
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
        }
    }
}
