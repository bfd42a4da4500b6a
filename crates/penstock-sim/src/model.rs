//! What a broker must do, told once more and as simply as possible: no indexes, no records, no
//! connections. It follows the real one step by step, so it is told what was decided and judges
//! whether that may be.
//!
//! Where nobody outside can know (a lease whose session has gone, a message that a crash may have
//! handed out unseen) the model is in doubt, and the next thing it sees resolves the doubt.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use penstock_jobs::DEAD_LETTER_QUEUE;
use penstock_message::{
    Condition, Delivery, Due, JoinId, JoinPolicy, Key, Lease, Message, MessageId, Op, Overflow,
    QueueLimits, Receipt, Refusal, ReleaseReason, SessionId, Tx, ValueStatus,
};

/// What is wrong, in words; nothing when all is well.
pub type Verdict = Result<(), String>;

/// True time, and what the wall shows; both in milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    pub steady: u64,
    pub wall: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum When {
    Steady(u64),
    Wall(u64),
}

impl When {
    fn resolve(due: Due, now: Time) -> Self {
        match due {
            Due::AfterMs(ms) => Self::Steady(now.steady + ms),
            Due::At(wall) => Self::Wall(wall),
        }
    }

    fn has_come(self, now: Time) -> bool {
        match self {
            Self::Steady(at) => at <= now.steady,
            Self::Wall(at) => at <= now.wall,
        }
    }
}

/// A message in one queue.
#[derive(Clone, Debug)]
pub struct Item {
    pub message: Message,
    pub queue: String,
    pub state: State,
    /// Its place among others of its priority and task.
    pub place: u64,
    /// Ready since it was published or moved, so that its place is when that happened.
    pub in_order: bool,
    due: Option<When>,
    due_reached: bool,
    expires: Option<When>,
    /// How often a worker died under it: at least, and at most.
    crashes: (u8, u8),
    /// Leases that were seen, oldest first.
    leases: Vec<(Lease, SessionId)>,
    /// The last of them that was settled; none before it will ever hold again.
    settled: Option<Lease>,
    /// It may have run since it came into this queue.
    may_have_run: bool,
    claim: Option<Key>,
    /// Those that it certainly has, in order; it may have others.
    notes: Vec<Bytes>,
    /// Its time has come, or its queue was purged: it may have ended, unless it is leased.
    expiry_reached: bool,
    purged: bool,
    /// ... but it may have been leased when its queue was purged.
    end_is_unsure: bool,
    /// After a crash it may be held back for somebody who was given it unseen.
    pub unsure_until: u64,
    /// The transaction that put it where it is.
    pub tx: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// In its queue, ready or due later.
    Waiting,
    Held(JoinId),
    /// `safe`: its grant is certainly on disk.
    Leased {
        lease: Lease,
        session: SessionId,
        safe: bool,
    },
    /// One of these leases may hold; or it is back in its queue, or a dead letter.
    Adrift {
        maybe: Vec<(Lease, SessionId)>,
    },
    Ended(End),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Acked,
    Expired,
    Purged,
    JoinFailed,
}

/// What a key holds.
#[derive(Clone, Debug)]
pub struct Stored {
    pub status: ValueStatus,
    /// `None`: whatever the broker says.
    pub body: Option<Bytes>,
    pub until: Option<u64>,
    pub tx: Option<u64>,
}

#[derive(Clone, Debug)]
struct JoinModel {
    count: u32,
    policy: JoinPolicy,
    arrived: BTreeSet<u32>,
    over: bool,
}

#[derive(Clone, Debug, Default)]
struct Attendance {
    heartbeat_ms: u64,
    /// `None`: it is connected.
    away_since: Option<u64>,
    presented: Vec<Lease>,
}

#[derive(Clone, Debug, Default)]
pub struct Model {
    pub items: Vec<Item>,
    by_id: BTreeMap<MessageId, Vec<usize>>,
    pub values: BTreeMap<Key, Stored>,
    joins: BTreeMap<JoinId, JoinModel>,
    sessions: BTreeMap<SessionId, Attendance>,
    pub paused: BTreeSet<String>,
    /// Paused since all was quiet last, so that nothing of it is on its way any more.
    still: BTreeSet<String>,
    limits: BTreeMap<String, QueueLimits>,
    places: u64,
    pub now: Time,
    /// The wall was set while nobody could tell the steady clock: times on it mean little.
    pub clock_is_doubtful: bool,
    /// Steps are retold after a crash: what no longer fits is passed over.
    pub lenient: bool,
    /// Every hand-out that anybody ever saw, whatever crashes have undone since.
    pub seen: BTreeSet<(Lease, SessionId)>,
    /// Hand-outs of dead letters, each with the transaction that had put the message where it was. What
    /// a hand-out rests on is on disk, so unless that transaction is lost, the message is dead after a
    /// crash as it was before.
    pub found_dead: BTreeMap<Lease, u64>,
}

enum Objection {
    None,
    Perhaps(Refusal),
    Surely(Refusal),
}

impl Model {
    // --- time

    /// The broker has looked at its clocks.
    pub fn advance(&mut self, now: Time) {
        self.now = now;
        let doubtful = self.clock_is_doubtful;
        for item in &mut self.items {
            item.due_reached |= item.due.is_none_or(|due| due.has_come(now));
            item.expiry_reached |= item
                .expires
                .is_some_and(|when| doubtful || when.has_come(now));
            if let State::Leased { lease, session, .. } = item.state
                && self
                    .sessions
                    .get(&session)
                    .is_some_and(|attendance| attendance.is_over(now))
            {
                item.set_adrift(vec![(lease, session)]);
            }
        }
    }

    /// All is written, synced and told: what was in doubt for being on its way is no more.
    pub fn quiet(&mut self) {
        let now = self.now.steady;
        self.still.clone_from(&self.paused);
        if !self.clock_is_doubtful {
            let is_over = |stored: &Stored| stored.until.is_some_and(|until| until + 200 < now);
            self.values.retain(|_, stored| !is_over(stored));
        }
        for index in 0..self.items.len() {
            let item = &mut self.items[index];
            if let State::Leased { safe, .. } = &mut item.state {
                *safe = true;
            }
            if let (State::Waiting | State::Held(_), Some(end)) = (&item.state, item.ending())
                && item.unsure_until <= now
                && !item.end_is_unsure
                && !item.may_be_dead()
                && !self.clock_is_doubtful
            {
                self.end(index, end);
            }
        }
    }

    // --- transactions

    pub fn decided(
        &mut self,
        number: u64,
        session: SessionId,
        tx: &Tx,
        receipt: &Receipt,
    ) -> Verdict {
        let mut settled = BTreeSet::new();
        let objection = |op| match self.objection(session, op, &mut settled) {
            Objection::None => self.room_objection(tx, op),
            other => other,
        };
        let mut objections = tx.ops.iter().map(objection);
        match receipt {
            Receipt::Applied { skipped } => {
                if let Some(index) =
                    objections.position(|objection| matches!(objection, Objection::Surely(_)))
                {
                    let op = &tx.ops[index];
                    self.fail(format!(
                        "applied, though operation {index} must be refused: {op:?}"
                    ))?;
                }
                for (index, op) in tx.ops.iter().enumerate() {
                    self.apply(number, session, op, skipped.contains(&(index as u32)))?;
                }
                Ok(())
            }
            Receipt::Refused { op, why } => {
                let objections: Vec<Objection> = objections.collect();
                let earlier = objections.iter().take(*op as usize);
                let is_first = earlier
                    .into_iter()
                    .all(|earlier| !matches!(earlier, Objection::Surely(_)));
                let is_right = match &objections[*op as usize] {
                    // How full the disk is, its reserves say, and not what is held.
                    Objection::None | Objection::Perhaps(_) if *why == Refusal::DiskFull => {
                        let is_new =
                            matches!(tx.ops[*op as usize], Op::Publish { .. } | Op::Hold { .. });
                        is_new && !tx.ops.iter().any(Op::is_settlement)
                    }
                    Objection::None => false,
                    Objection::Perhaps(expected) | Objection::Surely(expected) => {
                        std::mem::discriminant(expected) == std::mem::discriminant(why)
                    }
                };
                match is_first && is_right {
                    true => Ok(()),
                    false => self.fail(format!(
                        "refused for operation {op} ({why:?}): {:?}",
                        tx.ops[*op as usize]
                    )),
                }
            }
            Receipt::Duplicate | Receipt::Unknown => Err(format!("{receipt:?} is no decision")),
        }
    }

    fn objection(&self, session: SessionId, op: &Op, settled: &mut BTreeSet<Lease>) -> Objection {
        match op {
            Op::Ack { lease, .. } | Op::Release { lease, .. } | Op::Move { lease, .. } => {
                let again = !settled.insert(*lease);
                match self.holder(lease, session) {
                    Some((_, true)) if !again => Objection::None,
                    Some((_, false)) if !again => Objection::Perhaps(Refusal::LeaseLost),
                    _ => Objection::Surely(Refusal::LeaseLost),
                }
            }
            Op::Publish { message, .. } => self.id_objection(message.id),
            Op::Hold { join, messages, .. } => {
                if self.joins.get(join).is_some_and(|join| !join.over) {
                    return Objection::Surely(Refusal::AlreadyExists);
                }
                let known = messages
                    .iter()
                    .map(|(_, message)| self.id_objection(message.id));
                known
                    .into_iter()
                    .find(|objection| !matches!(objection, Objection::None))
                    .unwrap_or(Objection::None)
            }
            Op::Guard { key, condition } => {
                let holds = match condition {
                    Condition::Absent => self.key_exists(key).map(|exists| !exists),
                    Condition::Present => self.key_exists(key),
                    Condition::Is(body) => match self.values.get(key) {
                        Some(stored) if self.may_be_over(stored) => None,
                        stored => {
                            Some(stored.is_some_and(|stored| stored.body.as_ref() == Some(body)))
                        }
                    },
                };
                match holds {
                    Some(true) => Objection::None,
                    Some(false) => Objection::Surely(Refusal::GuardFailed),
                    None => Objection::Perhaps(Refusal::GuardFailed),
                }
            }
            Op::Join { join, index, .. } => match self.joins.get(join) {
                Some(join) if !join.over && *index >= join.count => {
                    Objection::Surely(Refusal::Invalid(String::new()))
                }
                _ => Objection::None,
            },
            _ => Objection::None,
        }
    }

    fn id_objection(&self, id: MessageId) -> Objection {
        let held = self
            .with_id(id)
            .filter(|item| !matches!(item.state, State::Ended(_)));
        let (sure, unsure): (Vec<&Item>, Vec<&Item>) =
            held.partition(|item| item.ending().is_none());
        match (sure.is_empty(), unsure.is_empty()) {
            (false, _) => Objection::Surely(Refusal::AlreadyExists),
            (true, false) => Objection::Perhaps(Refusal::AlreadyExists),
            (true, true) => Objection::None,
        }
    }

    /// Only what is new is refused for a full queue. How much waits there is known to the broker alone.
    fn room_objection(&self, tx: &Tx, op: &Op) -> Objection {
        let Op::Publish { queues, .. } = op else {
            return Objection::None;
        };
        let may_be_full = |queue: &String| self.may_overflow(queue, tx.ops.len());
        match queues.iter().any(may_be_full) && !tx.ops.iter().any(Op::is_settlement) {
            true => Objection::Perhaps(Refusal::QueueFull(String::new())),
            false => Objection::None,
        }
    }

    /// Whether a queue may have more than its limit with so many messages more.
    fn may_overflow(&self, queue: &str, more: usize) -> bool {
        let Some(limits) = self.limits.get(queue) else {
            return false;
        };
        let here = self.items.iter().filter(|item| item.queue == queue);
        let may_wait = here.filter(|item| !matches!(item.state, State::Ended(_)));
        !limits.allow((may_wait.count() + more) as u64, 0)
    }

    /// Messages may have been dropped from a queue, whose limits say so, for one that has come.
    fn may_drop(&mut self, queue: &str) {
        let drops = |limits: &QueueLimits| limits.overflow == Overflow::DropOldest;
        if !self.limits.get(queue).is_some_and(drops) || !self.may_overflow(queue, 0) {
            return;
        }
        for item in self.items.iter_mut().filter(|item| item.queue == queue) {
            if matches!(item.state, State::Waiting | State::Adrift { .. }) {
                item.purged = true;
                item.end_is_unsure = true;
            }
        }
    }

    fn apply(&mut self, number: u64, session: SessionId, op: &Op, skipped: bool) -> Verdict {
        match op {
            Op::Ack { lease, .. } => {
                if let Some((index, _)) = self.holder(lease, session) {
                    self.items[index].state = State::Ended(End::Acked);
                }
            }
            Op::Release { lease, reason } => {
                let Some((index, _)) = self.holder(lease, session) else {
                    return Ok(());
                };
                self.items[index].tx = number;
                self.items[index].settled = Some(*lease);
                if let ReleaseReason::Crashed(reason) = reason {
                    self.items[index].notes.push(reason.clone().into());
                    self.crash_item(index);
                } else {
                    self.items[index].state = State::Waiting;
                }
            }
            Op::Move {
                lease,
                queue,
                due,
                patch,
                ..
            } => {
                let Some((index, _)) = self.holder(lease, session) else {
                    return Ok(());
                };
                let (place, now) = (self.next_place(), self.now);
                let item = &mut self.items[index];
                item.tx = number;
                item.settled = Some(*lease);
                item.state = State::Waiting;
                item.place = place;
                item.in_order = due.is_none();
                item.due = due.map(|due| When::resolve(due, now));
                item.due_reached = item.due.is_none_or(|due| due.has_come(now));
                item.may_have_run = false;
                item.notes.extend(patch.note.clone());
                item.message.attempt += u32::from(patch.next_attempt);
                if let Some(expires) = patch.expires_at {
                    item.expires = Some(When::resolve(expires, now));
                    item.expiry_reached = false;
                }
                if let Some(queue) = queue {
                    item.queue.clone_from(queue);
                }
                let queue = item.queue.clone();
                self.may_drop(&queue);
            }
            Op::Publish {
                queues,
                message,
                due,
                unless_key,
            } => {
                let exists = unless_key
                    .as_ref()
                    .map_or(Some(false), |key| self.key_exists(key));
                if exists.is_some_and(|exists| exists != skipped) {
                    self.fail(format!(
                        "skipped is {skipped}, but {unless_key:?} decides otherwise"
                    ))?;
                }
                if !skipped {
                    for queue in queues {
                        let claim = unless_key.clone();
                        self.publish(number, queue, message, *due, State::Waiting, claim);
                    }
                    for queue in queues {
                        self.may_drop(queue);
                    }
                }
            }
            Op::Put {
                key, value, ttl_ms, ..
            } => {
                if let (Key::Result(_), Some(before)) = (key, self.values.get(key)) {
                    self.fail(format!(
                        "{key:?} has a second result; the first was {before:?}"
                    ))?;
                }
                let stored = Stored {
                    status: value.status,
                    body: Some(value.body.clone()),
                    until: ttl_ms.map(|ttl_ms| self.now.steady + ttl_ms),
                    tx: Some(number),
                };
                self.values.insert(key.clone(), stored);
            }
            Op::Delete { key } => {
                self.values.remove(key);
                for item in self
                    .items
                    .iter_mut()
                    .filter(|item| item.claim.as_ref() == Some(key))
                {
                    item.claim = None;
                }
            }
            Op::Guard { .. } => {}
            Op::Hold {
                join,
                count,
                messages,
                policy,
            } => {
                let (count, policy) = (*count, *policy);
                let arrived = BTreeSet::new();
                self.joins.insert(
                    *join,
                    JoinModel {
                        count,
                        policy,
                        arrived,
                        over: false,
                    },
                );
                for (queue, message) in messages {
                    self.publish(number, queue, message, None, State::Held(*join), None);
                }
            }
            Op::Join {
                join,
                index,
                succeeded,
            } => self.arrive(*join, *index, *succeeded),
            Op::Purge { queue } => {
                for item in self.items.iter_mut().filter(|item| item.queue == *queue) {
                    if matches!(item.state, State::Waiting | State::Adrift { .. }) {
                        item.purged = true;
                        item.end_is_unsure = item.expiry_reached || item.is_unsure(self.now);
                    }
                }
            }
            Op::Pause { queue } => {
                self.paused.insert(queue.clone());
            }
            Op::Resume { queue } => {
                self.paused.remove(queue);
                self.still.remove(queue);
            }
            Op::Limit { queue, limits } => {
                self.limits.insert(queue.clone(), *limits);
            }
        }
        Ok(())
    }

    fn publish(
        &mut self,
        tx: u64,
        queue: &str,
        message: &Message,
        due: Option<Due>,
        state: State,
        claim: Option<Key>,
    ) {
        let now = self.now;
        let in_order = due.is_none() && state == State::Waiting;
        let due = due.map(|due| When::resolve(due, now));
        let item = Item {
            queue: queue.to_string(),
            in_order,
            due,
            due_reached: due.is_none_or(|due| due.has_come(now)),
            expires: message.expires_at.map(|due| When::resolve(due, self.now)),
            crashes: (message.crashes, message.crashes),
            leases: Vec::new(),
            settled: None,
            may_have_run: false,
            expiry_reached: message
                .expires_at
                .is_some_and(|due| When::resolve(due, now).has_come(now)),
            purged: false,
            end_is_unsure: false,
            unsure_until: 0,
            place: self.next_place(),
            notes: message.notes.clone(),
            message: message.clone(),
            state,
            claim,
            tx,
        };
        self.by_id
            .entry(message.id)
            .or_default()
            .push(self.items.len());
        self.items.push(item);
    }

    fn arrive(&mut self, id: JoinId, index: u32, succeeded: bool) {
        let Some(join) = self.joins.get_mut(&id).filter(|join| !join.over) else {
            return;
        };
        if !join.arrived.insert(index) {
            return;
        }
        let failed = !succeeded && join.policy == JoinPolicy::AllSucceeded;
        join.over = failed || join.arrived.len() == join.count as usize;
        if !join.over {
            return;
        }
        for index in 0..self.items.len() {
            if self.items[index].state == State::Held(id) {
                match (failed, self.items[index].ending()) {
                    (true, end) => self.end(index, end.unwrap_or(End::JoinFailed)),
                    (false, _) => self.items[index].state = State::Waiting,
                }
            }
        }
    }

    /// It ended without a word of its own, so the broker stores one for whoever asks.
    fn end(&mut self, index: usize, end: End) {
        let item = &mut self.items[index];
        item.state = State::Ended(end);
        if item.queue != DEAD_LETTER_QUEUE {
            let status = match end {
                End::Expired => ValueStatus::Expired,
                _ => ValueStatus::Cancelled,
            };
            self.store_end(index, status);
        }
    }

    fn store_end(&mut self, index: usize, status: ValueStatus) {
        let item = &self.items[index];
        let Some(ttl_ms) = item.message.result_ttl_ms else {
            return;
        };
        let until = Some(self.now.steady + ttl_ms);
        let stored = Stored {
            status,
            body: None,
            until,
            tx: None,
        };
        self.values.insert(Key::Result(item.message.id), stored);
    }

    fn crash_item(&mut self, index: usize) {
        let item = &mut self.items[index];
        item.crashes = (item.crashes.0 + 1, item.crashes.1 + 1);
        item.state = State::Waiting;
        if item.queue == DEAD_LETTER_QUEUE {
            return;
        }
        if item.crashes.0 >= item.message.max_deliveries {
            self.bury(index);
        } else if item.crashes.1 >= item.message.max_deliveries {
            item.state = State::Adrift { maybe: Vec::new() };
        }
    }

    /// The broker has moved it to the dead letters by itself.
    fn bury(&mut self, index: usize) {
        self.store_end(index, ValueStatus::Crashed);
        let place = self.next_place();
        let item = &mut self.items[index];
        item.queue = DEAD_LETTER_QUEUE.to_string();
        item.state = State::Waiting;
        item.place = place;
        item.expires = None;
        item.expiry_reached = false;
        item.may_have_run = false;
    }

    fn next_place(&mut self) -> u64 {
        self.places += 1;
        self.places
    }

    // --- leases

    /// The message was handed to this session.
    pub fn delivered(&mut self, session: SessionId, delivery: &Delivery) -> Verdict {
        let Delivery {
            lease,
            queue,
            message,
            redelivered,
        } = delivery;
        self.seen.insert((*lease, session));
        let copies = self.by_id.get(&lease.message).cloned().unwrap_or_default();
        let here = copies.iter().copied().find(|index| {
            let item = &self.items[*index];
            item.queue == *queue
                && matches!(item.state, State::Waiting | State::Adrift { .. })
                && (item.crashes.0..=item.crashes.1).contains(&message.crashes)
        });
        // Of several copies, the one that is known to have been handed out.
        let died = copies.iter().copied().filter(|index| {
            let item = &self.items[*index];
            let is_certain = || self.found_dead.get(lease) == Some(&item.tx);
            queue == DEAD_LETTER_QUEUE && item.may_be_dead() && (!self.lenient || is_certain())
        });
        let died = died.max_by_key(|index| self.items[*index].leases.len());
        let Some(index) = here.or(died) else {
            let states: Vec<String> = copies
                .iter()
                .map(|index| {
                    format!(
                        "{:?} in {}, {:?} crashes",
                        self.items[*index].state,
                        self.items[*index].queue,
                        self.items[*index].crashes
                    )
                })
                .collect();
            if self.lenient {
                // What is certain of it is less than what was seen before the crash.
                let mut copies = copies.into_iter().filter(|index| {
                    !matches!(self.items[*index].state, State::Ended(_) | State::Held(_))
                });
                let first = copies.clone().next();
                if let Some(index) = copies
                    .find(|index| self.items[*index].queue == *queue)
                    .or(first)
                {
                    let (least, most) = self.items[index].crashes;
                    self.items[index].lend(*lease, session, (least, most.max(message.crashes)));
                }
                return Ok(());
            }
            return Err(format!(
                "{} must not be delivered from {queue} with {} crashes: it is {states:?}",
                lease.message, message.crashes
            ));
        };
        if queue == DEAD_LETTER_QUEUE && !self.lenient {
            self.found_dead.insert(*lease, self.items[index].tx);
        }
        if here.is_none() {
            self.bury(index);
            // Nobody saw when that was.
            self.items[index].place = 0;
        }
        let id = lease.message;
        let item = &self.items[index];
        if !item.due_reached && !self.clock_is_doubtful {
            self.fail(format!("{id} was started before its time: {:?}", item.due))?;
        }
        let same = (
            &item.message.body,
            &item.message.task,
            item.message.priority,
            item.message.attempt,
        );
        if same
            != (
                &message.body,
                &message.task,
                message.priority,
                message.attempt,
            )
        {
            self.fail(format!(
                "{id} is not as it was sent: {message:?}, not {:?}",
                item.message
            ))?;
        }
        let mut found = message.notes.iter();
        if !item
            .notes
            .iter()
            .all(|note| found.any(|other| other == note))
        {
            self.fail(format!("{id} lacks a note of {:?}", item.notes))?;
        }
        if self.still.contains(queue) {
            self.fail(format!("{id} was delivered from {queue}, which is paused"))?;
        }
        if item.may_have_run && !redelivered {
            self.fail(format!("{id} may have run before, and does not say so"))?;
        }
        if !item
            .leases
            .iter()
            .all(|(before, _)| order(before) < order(lease))
        {
            self.fail(format!("{lease:?} is not newer than {:?}", item.leases))?;
        }
        let least = if self.lenient {
            item.crashes.0
        } else {
            message.crashes
        };
        self.items[index].lend(*lease, session, (least, message.crashes));
        Ok(())
    }

    /// A session said hello; what it holds and does not present goes back.
    pub fn hello(&mut self, session: SessionId, heartbeat_ms: u64, presented: &[Lease]) {
        let presented = presented.to_vec();
        for item in &mut self.items {
            // As when it leaves: this may be a second connection.
            item.end_is_unsure |= item.purged;
            if let State::Leased {
                lease,
                session: holder,
                ..
            } = item.state
                && holder == session
                && !presented.contains(&lease)
            {
                item.state = State::Waiting;
            }
        }
        let attendance = Attendance {
            heartbeat_ms,
            away_since: None,
            presented,
        };
        self.sessions.insert(session, attendance);
    }

    /// ... and was told which of its leases hold.
    pub fn welcomed(&mut self, session: SessionId, named: &[Lease]) -> Verdict {
        let presented = self
            .sessions
            .get_mut(&session)
            .map(|attendance| std::mem::take(&mut attendance.presented));
        for lease in named {
            match self
                .holder(lease, session)
                .map(|(index, _)| index)
                .or_else(|| self.published_again(lease, session))
            {
                Some(index) => {
                    let safe = false;
                    self.items[index].state = State::Leased {
                        lease: *lease,
                        session,
                        safe,
                    };
                }
                None => self.fail(format!("{lease:?} was said to hold, and can't"))?,
            }
        }
        for lease in presented.unwrap_or_default() {
            if !named.contains(&lease)
                && let Some((index, certain)) = self.holder(&lease, session)
            {
                if certain {
                    self.fail(format!("{lease:?} held, and was taken away"))?;
                }
                self.items[index].give_up(&lease);
            }
        }
        Ok(())
    }

    pub fn left(&mut self, session: SessionId, clean: bool) {
        let now = self.now.steady;
        if let Some(attendance) = self.sessions.get_mut(&session) {
            attendance.away_since.get_or_insert(now);
        }
        for item in &mut self.items {
            // It may have been on its way to this session when its queue was purged.
            item.end_is_unsure |= item.purged;
            if clean
                && matches!(item.state, State::Leased { session: holder, .. } if holder == session)
            {
                item.state = State::Waiting;
            }
        }
    }

    /// The broker has died and come back: grants may be lost, or may have been made unseen.
    pub fn restarted(&mut self, longest_heartbeat_ms: u64) {
        let now = self.now.steady;
        for item in &mut self.items {
            let safe_and_present = match item.state {
                State::Leased { session, safe, .. } => {
                    safe && self.sessions[&session].away_since.is_none()
                }
                _ => false,
            };
            if matches!(item.state, State::Ended(_)) || safe_and_present {
                continue;
            }
            item.unsure_until = now + longest_heartbeat_ms;
            item.end_is_unsure |= item.purged;
            if item.leases.is_empty() {
                item.crashes.1 = item.crashes.1.saturating_add(1);
            } else {
                let may_hold = |(lease, _): &&(Lease, SessionId)| {
                    item.settled
                        .is_none_or(|settled| order(lease) > order(&settled))
                };
                let maybe = item.leases.iter().filter(may_hold).copied().collect();
                item.set_adrift(maybe);
            }
        }
        for attendance in self.sessions.values_mut() {
            attendance.away_since.get_or_insert(now);
        }
    }

    /// The item that this lease is of, if it may hold, and whether it certainly does.
    fn holder(&self, lease: &Lease, session: SessionId) -> Option<(usize, bool)> {
        let copies = self.by_id.get(&lease.message)?;
        copies
            .iter()
            .find_map(|index| match &self.items[*index].state {
                State::Leased {
                    lease: held,
                    session: holder,
                    ..
                } if held == lease && *holder == session => Some((*index, true)),
                State::Adrift { maybe } if maybe.contains(&(*lease, session)) => {
                    Some((*index, false))
                }
                _ => None,
            })
    }

    /// The message whose publishing and hand-out were lost in a crash, and which was then sent again:
    /// whoever was given it may go on.
    fn published_again(&self, lease: &Lease, session: SessionId) -> Option<usize> {
        let copies = self.by_id.get(&lease.message)?;
        let may_hold = |item: &Item| {
            item.unsure_until > 0 && matches!(item.state, State::Waiting | State::Adrift { .. })
        };
        let index = copies
            .iter()
            .copied()
            .find(|index| may_hold(&self.items[*index]))?;
        self.seen.contains(&(*lease, session)).then_some(index)
    }

    // --- what is known

    pub fn with_id(&self, id: MessageId) -> impl Iterator<Item = &Item> {
        self.by_id
            .get(&id)
            .into_iter()
            .flatten()
            .map(|index| &self.items[*index])
    }

    /// `None`: it can't be known.
    fn key_exists(&self, key: &Key) -> Option<bool> {
        let claims = self.items.iter().filter(|item| {
            item.claim.as_ref() == Some(key) && !matches!(item.state, State::Ended(_))
        });
        let (sure, unsure): (Vec<&Item>, Vec<&Item>) =
            claims.partition(|item| item.ending().is_none());
        match self.values.get(key) {
            _ if !sure.is_empty() => Some(true),
            Some(stored) if self.may_be_over(stored) => None,
            Some(_) => Some(true),
            None if !unsure.is_empty() => None,
            None => Some(false),
        }
    }

    fn may_be_over(&self, stored: &Stored) -> bool {
        stored
            .until
            .is_some_and(|until| self.clock_is_doubtful || until <= self.now.steady)
    }

    /// Whether a value that was shown is what it must be.
    pub fn shown(&self, key: &Key, status: ValueStatus, body: &Bytes) -> Verdict {
        if let Some(stored) = self.values.get(key) {
            let same = match &stored.body {
                Some(stored_body) => stored.status == status && stored_body == body,
                // With a doubtful clock nobody knows whether it had expired before.
                None => stored.status == status || self.clock_is_doubtful,
            };
            return match same {
                true => Ok(()),
                false => self.fail(format!(
                    "{key:?} is {status:?}, and was {:?}",
                    stored.status
                )),
            };
        }
        // The broker may have ended the message by itself just now.
        let Key::Result(id) = key else {
            return self.fail(format!("{key:?} has a value that nobody put there"));
        };
        let may_be = self.with_id(*id).any(|item| match status {
            ValueStatus::Expired => item.may_have_ended_as(End::Expired, self.clock_is_doubtful),
            ValueStatus::Cancelled => item.may_have_ended_as(End::Purged, self.clock_is_doubtful),
            ValueStatus::Crashed => item.may_be_dead(),
            _ => false,
        });
        match may_be {
            true => Ok(()),
            false => {
                let items: Vec<&Item> = self.with_id(*id).collect();
                self.fail(format!(
                    "{key:?} has ended as {status:?}, and nobody said so: {items:?}"
                ))
            }
        }
    }

    fn fail(&self, what: String) -> Verdict {
        if self.lenient { Ok(()) } else { Err(what) }
    }
}

/// Grants are made in this order.
fn order(lease: &Lease) -> (u32, u64) {
    (lease.epoch, lease.grant)
}

impl Item {
    fn lend(&mut self, lease: Lease, session: SessionId, crashes: (u8, u8)) {
        self.state = State::Leased {
            lease,
            session,
            safe: false,
        };
        self.leases.push((lease, session));
        self.crashes = crashes;
        self.may_have_run = true;
        self.purged = false;
    }

    /// This lease does not hold; another may.
    fn give_up(&mut self, lease: &Lease) {
        match &mut self.state {
            State::Adrift { maybe } => maybe.retain(|(other, _)| other != lease),
            _ => self.set_adrift(Vec::new()),
        }
    }

    fn set_adrift(&mut self, maybe: Vec<(Lease, SessionId)>) {
        self.state = State::Adrift { maybe };
        self.crashes.1 = self.crashes.1.saturating_add(1);
    }

    /// Whether a worker may have died under it once too often.
    fn may_be_dead(&self) -> bool {
        // It is found there at any time after.
        let was_unsure = self.state == State::Waiting && self.unsure_until > 0;
        (was_unsure || matches!(self.state, State::Adrift { .. }))
            && self.queue != DEAD_LETTER_QUEUE
            && self.crashes.1 >= self.message.max_deliveries
    }

    /// How it may have ended; at the next quiet moment it has.
    pub fn ending(&self) -> Option<End> {
        match self.state {
            State::Leased { .. } | State::Ended(_) => None,
            _ if self.purged => Some(End::Purged),
            _ => self.expiry_reached.then_some(End::Expired),
        }
    }

    fn may_have_ended_as(&self, end: End, clock_is_doubtful: bool) -> bool {
        let ending = self.ending();
        ending == Some(end) || ending.is_some() && (clock_is_doubtful || self.end_is_unsure)
    }

    /// Whether somebody may hold a lease of it that nobody has seen, or that may have ended.
    fn is_unsure(&self, now: Time) -> bool {
        matches!(self.state, State::Adrift { .. }) || self.unsure_until > now.steady
    }

    /// Certainly in its queue, and to be handed out to whoever asks.
    pub fn is_ready(&self, now: Time) -> bool {
        self.state == State::Waiting
            && self.due_reached
            && self.ending().is_none()
            && self.unsure_until <= now.steady
    }
}

impl Attendance {
    fn is_over(&self, now: Time) -> bool {
        self.away_since
            .is_some_and(|since| now.steady >= since + self.heartbeat_ms)
    }
}
