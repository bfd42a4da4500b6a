//! Observes everything that enters and leaves the broker, and checks it against the model.
//!
//! Order of events: the world reports the bytes that the broker has read, then those that it sent. A transaction
//! counts from the moment it is decided: the checker asks the broker for the decision, and the model judges it. A
//! crash takes back a suffix of the decisions. The checker then asks again which ones are left, checks that nothing
//! confirmed is missing, and replays the story to the model without the lost ones.

use std::collections::{BTreeMap, BTreeSet};

use penstock_broker::{Broker, BrokerOptions, ConnId};
use penstock_message::{
    CancelOrder, Delivery, Durability, Key, KeyState, Lease, MessageId, Op, Receipt, RefusedWait,
    ScheduleName, SchedulePlan, SessionId, Space, Target, Tx,
};
use penstock_wire::proto::{ToClient, close::Why};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, convert};

use crate::model::{Failed, Item, Model, Moment, State, Time, Verdict};
use crate::said::{Hearing, Said};

mod consumers;
mod crashes;
mod ending;
mod schedules;
mod story;
#[cfg(test)]
mod tests;
mod waits;

use consumers::ConsumerView;
use schedules::Looks;
use story::Event;
use waits::Waits;

/// Ways in which the broker can die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Written bytes survive.
    Killed,
    /// Only synced bytes are certain to survive.
    PowerCut,
    /// The process exited after a failed write or sync, which may have taken other writes with it.
    DiskFailed,
}

/// Milliseconds by which the clocks of successive brokers may lag, since the journal stores the difference of the
/// clocks to a tenth of a second.
const CLOCKS_DIFFER_BY_MS: u64 = 10_000;

#[derive(Default)]
pub struct Checker {
    pub model: Model,
    /// Limits of the broker.
    pub options: BrokerOptions,
    /// Model at the start of the story: at a quiet moment, or right after a recovery. No crash takes back earlier
    /// decisions.
    base: Model,
    base_tx: u64,
    story: Vec<Event>,
    /// Number of events in the story, and the time, at the last quiet moment that was checked.
    looked_at: usize,
    looked_ms: u64,
    /// Transactions by number, as in the model.
    txs: BTreeMap<u64, Decided>,
    by_seq: BTreeMap<(SessionId, u64), u64>,
    told: u64,
    /// Number up to which all transactions are certainly on disk.
    safe_through: u64,
    /// Sessions that were forgotten and reopened, with the last transaction number they had used before.
    reopened: BTreeMap<SessionId, u64>,
    /// Readers of the bytes that each connection carries to the broker.
    hearings: BTreeMap<ConnId, Hearing>,
    views: BTreeMap<ConnId, View>,
    /// Connection of each session that the broker serves.
    current: BTreeMap<SessionId, ConnId>,
    /// Deliveries of this call, to be sorted by grant, which is the order in which they were decided.
    deliveries: Vec<(SessionId, Delivery)>,
    /// Places in the model of messages that were ready at the last quiet moment and have not moved since.
    ready: Vec<usize>,
    /// Messages that a job has waited for.
    awaited: BTreeSet<MessageId>,
    waits: Waits,
    longest_heartbeat_ms: u64,
    /// Sum of the wall clock's steps, in both directions, since the journal last recorded its difference to the steady
    /// clock.
    wall_was_set_by_ms: u64,
    /// Whether the journal has recorded this boot of the machine, whose clock nobody can set.
    knows_boot: bool,
    /// Sessions that were away for so long that the broker may have forgotten them before they came back.
    maybe_forgotten: BTreeSet<SessionId>,
    /// Schedules as of the last check, and as of the last quiet moment.
    looks: Looks,
    base_looks: Looks,
    /// Jobs of schedules that a crash may take back, since they were created after the last quiet moment, with their plans.
    unsafe_jobs: BTreeMap<MessageId, (ScheduleName, SchedulePlan)>,
    pub counts: Counts,
    /// Story of the model in words, for people who follow along.
    pub words: Option<Vec<String>>,
}

/// Counts of what a run covered, which prove that it covered anything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub applied: u64,
    pub refused: u64,
    pub resent: u64,
    pub lost: u64,
    pub deliveries: u64,
    pub redeliveries: u64,
    pub crashes: u64,
    pub values: u64,
    pub order_checks: u64,
    /// Orders to stop a job.
    pub orders: u64,
    /// Waits that were refused because they would have closed a circle.
    pub circles: u64,
    /// Operations that were skipped because of a key, and whose answer names the key's owner.
    pub owners: u64,
    /// Jobs of schedules.
    pub scheduled: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.applied += other.applied;
        self.refused += other.refused;
        self.resent += other.resent;
        self.lost += other.lost;
        self.deliveries += other.deliveries;
        self.redeliveries += other.redeliveries;
        self.crashes += other.crashes;
        self.values += other.values;
        self.order_checks += other.order_checks;
        self.orders += other.orders;
        self.circles += other.circles;
        self.owners += other.owners;
        self.scheduled += other.scheduled;
    }
}

struct Decided {
    session: SessionId,
    seq: u64,
    durability: Durability,
    tx: Tx,
    receipt: Receipt,
    moment: Moment,
    /// Position of its record in the journal, or of an earlier record if the broker read several at once.
    position: u64,
    /// Whether the broker has confirmed it or shown its effect.
    is_public: bool,
}

/// Connection as seen by an observer of its bytes.
struct View {
    session: SessionId,
    decoder: Decoder<ToClient>,
    consumers: BTreeMap<u32, ConsumerView>,
    /// Leases whose jobs the worker was ordered to stop.
    orders: BTreeSet<Lease>,
}

impl Checker {
    pub fn new(is_read_along: bool) -> Self {
        Self {
            words: is_read_along.then(Vec::new),
            ..Self::default()
        }
    }

    // --- what the broker hears

    /// Notes that the wall clock was set, forward or back.
    pub fn wall_was_set(&mut self, by_ms: u64) {
        self.wall_was_set_by_ms += by_ms;
    }

    pub fn time(&mut self, now: Time) {
        if self.model.now == now {
            return;
        }
        self.model.advance(now);
        match self.story.last_mut() {
            // Only the end matters of a period in which nothing happened and no clock was set.
            Some(Event::Time(before)) if before.is_as_far_apart_as(now) => *before = now,
            _ => self.story.push(Event::Time(now)),
        }
    }

    /// Checks which deadlines of workflows have passed: only the broker knows when it looked at its clocks.
    pub fn look_at_deadlines(&mut self, broker: &Broker) -> Verdict {
        for workflow in self.model.deadlines() {
            if !broker.workflow_is_overdue(&workflow) {
                continue;
            }
            let items = self.model.items.iter();
            let items = items.filter(|item| item.workflow() == Some(workflow));
            let ids: BTreeSet<MessageId> = items.map(|item| item.message.id).collect();
            let moment = Self::moment_of(&ids, broker);
            self.tell(Event::Overdue {
                workflow,
                moment: Box::new(moment),
                position: broker.last_position().0,
            })?;
        }
        Ok(())
    }

    /// Handles bytes that the broker has read.
    pub fn heard(&mut self, conn: ConnId, bytes: &[u8], broker: &Broker) -> Verdict {
        self.look_at_deadlines(broker)?;
        let hearing = self.hearings.entry(conn).or_default();
        hearing.extend(bytes);
        while let Some(hearing) = self.hearings.get_mut(&conn)
            && let Some(said) = hearing
                .next_said()
                .map_err(|error| format!("a client says what is no frame: {error}"))?
        {
            self.heard_frame(conn, &said, broker)?;
        }
        Ok(())
    }

    fn heard_frame(&mut self, conn: ConnId, said: &Said, broker: &Broker) -> Verdict {
        if let Some(hello) = &said.hello {
            let session = hello.session;
            if self.model.may_be_forgotten(&session, self.model.now) {
                self.maybe_forgotten.insert(session);
            }
            self.longest_heartbeat_ms = self.longest_heartbeat_ms.max(hello.heartbeat_ms);
            if let Some(older) = self.current.insert(session, conn) {
                self.takes_back(older);
            }
            let decoder = Decoder::new(MAX_FRAME_BYTES);
            self.views.insert(
                conn,
                View {
                    session,
                    decoder,
                    consumers: BTreeMap::new(),
                    orders: BTreeSet::new(),
                },
            );
            self.tell(Event::Hello(
                session,
                hello.heartbeat_ms,
                hello.leases.clone(),
            ))?;
        }
        let Some(session) = self.views.get(&conn).map(|view| view.session) else {
            return Ok(());
        };
        if self.current.get(&session) != Some(&conn) {
            return Ok(());
        }
        self.heard_of_waits(conn, said);
        for commit in &said.commits {
            for (seq, tx) in (commit.first_seq..).zip(&commit.txs) {
                self.decided(session, seq, commit.durability, tx, broker)?;
            }
        }
        if let Some(view) = self.views.get_mut(&conn) {
            for consumer in &said.consumers {
                let view = view.consumers.entry(consumer.wish.consumer).or_default();
                view.hears(consumer);
            }
        }
        if said.goodbye {
            self.current.remove(&session);
            self.takes_back(conn);
            self.tell(Event::Left {
                session,
                clean: true,
            })?;
        }
        Ok(())
    }

    fn decided(
        &mut self,
        session: SessionId,
        seq: u64,
        durability: Durability,
        tx: &Tx,
        broker: &Broker,
    ) -> Verdict {
        let Some(receipt) = broker.decision(&session, seq) else {
            return Ok(());
        };
        if let Some(number) = self.by_seq.get(&(session, seq)) {
            let before = &self.txs[number].receipt;
            let is_same = *before == receipt;
            // A session that was away for too long is new, and so is everything that it sends again.
            if !is_same && self.maybe_forgotten.contains(&session) {
                self.by_seq.remove(&(session, seq));
                return self.decided(session, seq, durability, tx, broker);
            }
            self.counts.resent += 1;
            return match is_same {
                true => Ok(()),
                false => Err(format!(
                    "{seq} was {before:?}, and resent it is {receipt:?}"
                )),
            };
        }
        match &receipt {
            Receipt::Applied(applied) => {
                self.counts.applied += 1;
                self.counts.owners += applied.owners.len() as u64;
            }
            _ => self.counts.refused += 1,
        }
        self.told += 1;
        self.by_seq.insert((session, seq), self.told);
        let tx = tx.clone();
        let moment = self.moment(&tx, broker);
        let decided = Decided {
            session,
            seq,
            durability,
            tx,
            receipt,
            moment,
            position: broker.next_position().0 - 1,
            is_public: false,
        };
        self.txs.insert(self.told, decided);
        self.tell(Event::Decided(self.told))
    }

    /// Asks the broker for facts about the moment of a decision that no client can know.
    fn moment(&self, tx: &Tx, broker: &Broker) -> Moment {
        let cancels_many = |op: &Op| match op {
            Op::Cancel { target, .. } => match target {
                Target::Filter(_) => true,
                // A group runs in place of the job.
                Target::Job(id) => self.model.with_id(*id).next().is_none(),
            },
            _ => false,
        };
        let mut moment = Moment {
            grants: broker.last_hand_out(),
            ..Moment::default()
        };
        let workflows = tx.ops.iter().flat_map(|op| match op {
            Op::Ack { lease, .. } | Op::Replace { lease, .. } => {
                let items = self.model.with_id(lease.message);
                items.filter_map(Item::workflow).collect()
            }
            Op::Cancel {
                target: Target::Filter(filter),
                ..
            } => Vec::from_iter(filter.workflow),
            _ => Vec::new(),
        });
        let keys = tx.ops.iter().flat_map(|op| match op {
            Op::Publish { unless_key, .. } => {
                Vec::from_iter(unless_key.as_ref().map(|claim| &claim.key))
            }
            Op::RetryFailed {
                target: Target::Job(id),
                ..
            } => {
                let items = self.model.with_id(*id);
                items.filter_map(|item| item.claim.as_ref()).collect()
            }
            _ => Vec::new(),
        });
        let owners = keys.flat_map(|key| self.model.claimants(key));
        let owners = owners.map(|index| self.model.items[index].message.id);
        moment.handed_out = owners.filter(|id| broker.is_handed_out(id)).collect();
        let is_unlisted = |id: &MessageId| broker.workflow(id).is_none();
        moment.unlisted = workflows.filter(is_unlisted).collect();
        if tx.ops.iter().any(cancels_many) {
            // Includes all items: after a crash takes back the end of the story, more of them are live in the replay.
            let items = self.model.items.iter();
            let ids: BTreeSet<MessageId> = items.map(|item| item.message.id).collect();
            let unlisted = moment.unlisted;
            moment = Self::moment_of(&ids, broker);
            moment.unlisted = unlisted;
        }
        moment
    }

    /// Asks the broker for its knowledge of these messages.
    fn moment_of(ids: &BTreeSet<MessageId>, broker: &Broker) -> Moment {
        let that = |is: fn(&Broker, &MessageId) -> bool| {
            ids.iter().copied().filter(|id| is(broker, id)).collect()
        };
        Moment {
            grants: broker.last_hand_out(),
            failed: that(Broker::has_failed),
            gone: that(|broker, id| !broker.holds(id)),
            handed_out: that(Broker::is_handed_out),
            ..Moment::default()
        }
    }

    /// Notes that the connection broke, or that the broker has closed it.
    pub fn closed(&mut self, conn: ConnId) -> Verdict {
        self.hearings.remove(&conn);
        let session = self.views.get(&conn).map(|view| view.session);
        if let Some(session) = session
            && self.current.get(&session) == Some(&conn)
        {
            self.current.remove(&session);
            self.takes_back(conn);
            let clean = false;
            self.tell(Event::Left { session, clean })?;
        }
        self.views.remove(&conn);
        Ok(())
    }

    /// Returns messages that were handed out over this connection but whose deliveries have not left. Messages behind
    /// them may have been handed out too; those deliveries leave once their bodies are read, which is after this.
    fn takes_back(&mut self, conn: ConnId) {
        self.waits.closed(conn);
        let Some(view) = self.views.get(&conn) else {
            return;
        };
        let items = &self.model.items;
        for consumer in view.consumers.values().filter(|view| view.may_be_given()) {
            self.ready
                .retain(|index| !consumer.queues.contains(&items[*index].queue));
        }
    }

    // --- what the broker says

    /// Handles bytes that the broker sent.
    pub fn sent(&mut self, conn: ConnId, bytes: &[u8]) -> Verdict {
        let Some(view) = self.views.get_mut(&conn) else {
            return Ok(());
        };
        view.decoder.extend(bytes);
        loop {
            let Some(view) = self.views.get_mut(&conn) else {
                return Ok(());
            };
            let frame = view
                .decoder
                .next_message()
                .map_err(|error| format!("the broker sent {error}"))?;
            let Some(frame) = frame else { return Ok(()) };
            let session = view.session;
            self.frame(conn, session, frame)?;
        }
    }

    fn frame(&mut self, conn: ConnId, session: SessionId, frame: ToClient) -> Verdict {
        let invalid =
            |error: penstock_wire::WireError| format!("the broker sent nonsense: {error}");
        if let Some(welcome) = frame.welcome {
            let leases = convert::all(welcome.leases).map_err(invalid)?;
            if welcome.forgotten {
                self.reopened.insert(session, welcome.applied_through);
            }
            self.confirmed_through(session, welcome.applied_through);
            self.tell(Event::Welcomed(session, leases))?;
        }
        if let Some(confirm) = frame.confirm {
            let receipts: Vec<(u64, Receipt)> = convert::all(confirm.receipts).map_err(invalid)?;
            for (seq, receipt) in &receipts {
                self.answered(session, *seq, receipt)?;
            }
            self.confirmed_through(session, confirm.through);
            for seq in confirm.early {
                self.confirmed(session, seq);
            }
        }
        for delivery in frame.deliveries {
            let delivery: Delivery = delivery.try_into().map_err(invalid)?;
            let view = self.views.get_mut(&conn).expect("it was found");
            let consumer = view.consumers.entry(delivery.consumer).or_default();
            if !consumer.pays() {
                return Err(format!("{:?} was delivered without credit", delivery.lease));
            }
            let task = &delivery.message.task;
            if !consumer.runs(task) {
                return Err(format!(
                    "{:?} of {task} was sent to a consumer that can't run it",
                    delivery.lease
                ));
            }
            self.deliveries.push((session, delivery));
        }
        for order in frame.cancels {
            let order: CancelOrder = order.try_into().map_err(invalid)?;
            self.ordered(conn, &order)?;
        }
        for refused in frame.refused_waits {
            let refused: RefusedWait = refused.try_into().map_err(invalid)?;
            self.refused_wait(conn, &refused)?;
        }
        for value in frame.values {
            let (key, state): (Key, KeyState) = value.try_into().map_err(invalid)?;
            if state != KeyState::Pending {
                self.waits.told(conn, &key);
            }
            self.value(&key, &state)?;
        }
        if let Some(close) = frame.close {
            if close.why() == Why::Protocol && !close.text.contains("nothing was received") {
                return Err(format!("an honest client was refused: {}", close.text));
            }
            if close.why() != Why::Fenced {
                self.closed(conn)?;
            }
        }
        Ok(())
    }

    /// Checks an order to stop a job: somebody must have requested it.
    fn ordered(&mut self, conn: ConnId, order: &CancelOrder) -> Verdict {
        self.counts.orders += 1;
        let lease = order.lease;
        let mut items = self.model.with_id(lease.message);
        if !items.any(|item| item.asked.is_some()) {
            return Err(format!("{lease:?} is to stop, and nobody asked for it"));
        }
        let view = self.views.get_mut(&conn).expect("it was found");
        view.orders.insert(lease);
        Ok(())
    }

    /// Checks that every session with a running job that is to stop has received the order.
    fn orders_have_come(&self) -> Verdict {
        let live = self
            .model
            .live
            .iter()
            .map(|index| &self.model.items[*index]);
        for item in live.filter(|item| item.asked.is_some()) {
            let State::Leased { lease, session, .. } = &item.state else {
                continue;
            };
            let conn = self.current.get(session);
            let view = conn.and_then(|conn| self.views.get(conn));
            if view.is_some_and(|view| !view.orders.contains(lease)) {
                return Err(format!(
                    "{} is to stop, and client {} does not know it",
                    item.message.id, session.0[0]
                ));
            }
        }
        Ok(())
    }

    fn answered(&mut self, session: SessionId, seq: u64, receipt: &Receipt) -> Verdict {
        match self
            .by_seq
            .get(&(session, seq))
            .map(|number| &self.txs[number].receipt)
        {
            Some(decided) if decided == receipt => Ok(()),
            decided => Err(format!(
                "{seq} was decided as {decided:?}, and is told to be {receipt:?}"
            )),
        }
    }

    fn confirmed_through(&mut self, session: SessionId, through: u64) {
        let seqs = self.by_seq.range((session, 0)..=(session, through));
        for number in seqs.map(|(_, number)| number).rev() {
            let decided = self
                .txs
                .get_mut(number)
                .expect("numbers are of transactions");
            if std::mem::replace(&mut decided.is_public, true)
                && decided.durability == Durability::Disk
            {
                break;
            }
        }
    }

    fn confirmed(&mut self, session: SessionId, seq: u64) {
        if let Some(number) = self.by_seq.get(&(session, seq)) {
            self.publish(*number);
        }
    }

    fn publish(&mut self, number: u64) {
        if let Some(decided) = self.txs.get_mut(&number) {
            decided.is_public = true;
        }
    }

    fn value(&mut self, key: &Key, state: &KeyState) -> Verdict {
        self.counts.values += 1;
        let KeyState::Present(value) = state else {
            return Ok(());
        };
        if let Some(number) = self.model.value(key).and_then(|stored| stored.tx) {
            self.publish(number);
        }
        self.model.shown(key, value.status, &value.body)
    }

    /// Ends a call: the broker has sent everything that it had to send for now.
    pub fn end_of_call(&mut self, broker: Option<&Broker>) -> Verdict {
        self.model.has_dropped_failed |= broker.is_some_and(Broker::has_dropped_failed);
        let mut deliveries = std::mem::take(&mut self.deliveries);
        deliveries.sort_by_key(|(_, delivery)| (delivery.lease.epoch, delivery.lease.grant));
        for (session, delivery) in deliveries {
            self.counts.deliveries += 1;
            self.counts.redeliveries += u64::from(delivery.redelivered);
            let id = delivery.lease.message;
            let (queue, consumer) = (delivery.queue.clone(), delivery.consumer);
            self.tell(Event::Delivered(session, Box::new(delivery)))?;
            let here = self.model.with_id(id).filter(|item| item.queue == queue);
            let brought_by: Vec<u64> = here.map(|item| item.tx).collect();
            for number in brought_by {
                self.publish(number);
            }
            self.in_turn((session, consumer), id, &queue, broker)?;
        }
        Ok(())
    }

    /// Checks the order of a delivery. No earlier ready message of the same queue may still be there that has a higher
    /// priority, or the same priority and task. The exception is a message that was handed out before and whose
    /// delivery waits for its body to be read. Jobs that other jobs wait for may precede others of their priority, and
    /// so may members of groups that hold it.
    fn in_turn(
        &mut self,
        (session, consumer): (SessionId, u32),
        id: penstock_message::MessageId,
        queue: &str,
        broker: Option<&Broker>,
    ) -> Verdict {
        let now = self.model.now;
        let items = &self.model.items;
        self.ready
            .retain(|index| items[*index].is_ready(now) && items[*index].in_order);
        let Some(given) = self.model.with_id(id).find(|item| item.queue == queue) else {
            return Ok(());
        };
        let is_member =
            (given.message.extras.as_ref()).is_some_and(|extras| extras.member.is_some());
        let is_awaited = self.awaited.contains(&id) || is_member && !self.awaited.is_empty();
        self.counts.order_checks += self.ready.len() as u64;
        let conn = self.current.get(&session);
        let view = conn.and_then(|conn| self.views.get(conn));
        let consumer = view.and_then(|view| view.consumers.get(&consumer));
        let can_run = |task: &String| {
            consumer.is_none_or(|view| {
                let sets = view.tasks.iter().chain(&view.tasks_before);
                sets.into_iter().all(|tasks| tasks.contains(task))
            })
        };
        let skipped = self.ready.iter().map(|index| &items[*index]).find(|item| {
            let level = (item.message.priority, given.message.priority);
            item.queue == queue
                && can_run(&item.message.task)
                && (level.0 > level.1
                    || level.0 == level.1
                        && !is_awaited
                        && item.message.task == given.message.task
                        && item.place < given.place)
                && !broker.is_some_and(|broker| broker.is_handed_out(&item.message.id))
        });
        match skipped {
            Some(item) => Err(format!(
                "{id} was delivered before {}, whose turn it was",
                item.message.id
            )),
            None => Ok(()),
        }
    }

    /// Compares failed jobs. No worker ever gets one, so its failure shows only in a query. No decision of the broker
    /// may be on its way to the disk, because a crash could take back what this check sees.
    pub fn look_at_failed(&mut self, broker: &Broker) -> Verdict {
        let unsettled = self
            .model
            .live
            .iter()
            .map(|index| &self.model.items[*index]);
        let failed = unsettled.filter(|item| !item.has_failed());
        let failed = failed
            .map(|item| item.message.id)
            .filter(|id| broker.has_failed(id));
        for id in failed.collect::<BTreeSet<_>>() {
            self.tell(Event::Failed(id))?;
        }
        Ok(())
    }

    /// Checks that failed jobs are kept until their limits are reached and no longer, and that the oldest are dropped
    /// first.
    fn failed_are_kept(&self, broker: &Broker) -> Verdict {
        let (status, limits, now) = (broker.status(), &self.options, self.model.now);
        let has_steps = status.space == Space::Plenty;
        let is_over =
            status.failed > limits.failed_kept || status.failed_bytes > limits.failed_kept_bytes;
        if has_steps && is_over {
            let (failed, bytes) = (status.failed, status.failed_bytes);
            return Err(format!(
                "{failed} failed jobs are kept, with {bytes} bytes, and that is too much"
            ));
        }
        let (mut oldest, mut newest_dropped) = (None, None);
        for item in self.model.items.iter().filter(|item| item.has_failed()) {
            let id = item.message.id;
            let place = item.failure.map(|failure| failure.place);
            if !broker.has_failed(&id) {
                if !self.model.has_dropped_failed {
                    return Err(format!("{id} has failed, and is not kept"));
                }
                newest_dropped = newest_dropped.max(place.map(|place| (place, id)));
                continue;
            }
            oldest = place
                .map(|place| (place, id))
                .into_iter()
                .chain(oldest)
                .min();
            let is_old = |failure: Failed| {
                let over_ms = failure.steady_ms.saturating_add(limits.failed_kept_ms);
                over_ms + CLOCKS_DIFFER_BY_MS < now.steady
            };
            if has_steps && !self.model.clock_is_doubtful && item.failure.is_some_and(is_old) {
                return Err(format!("{id} has failed, and is kept for too long"));
            }
        }
        match (oldest, newest_dropped) {
            (Some(oldest), Some(dropped)) if oldest.0 < dropped.0 => Err(format!(
                "{} was dropped, and {}, which failed before, is kept",
                dropped.1, oldest.1
            )),
            _ => Ok(()),
        }
    }

    /// Checks the progress of cancellations by filter at a quiet moment; true: one has not finished.
    fn operations_are_right(&self, broker: &Broker) -> Result<bool, String> {
        let mut goes_on = false;
        for number in self.model.operations() {
            let status = broker.operation_status(number);
            let is_over = status.is_none_or(|status| status.is_over);
            if is_over {
                self.model.operation_is_right(number, status)?;
            } else if broker.status().space == Space::Plenty {
                return Err(format!(
                    "all is quiet, and cancellation {number} is not over"
                ));
            }
            goes_on |= !is_over;
        }
        Ok(goes_on)
    }

    /// Checks a quiet moment: everything is written, synced and sent, and nothing is on its way. Of the moments between
    /// which only time passed, it checks one a second: a job that waits for a minute at the end of a run has hundreds
    /// of them.
    pub fn quiet(&mut self, broker: &Broker) -> Verdict {
        let now_ms = self.model.now.steady;
        let since = self.story.get(self.looked_at..).unwrap_or_default();
        let has_news = since.iter().any(|event| !matches!(event, Event::Time(_)));
        if !has_news && now_ms < self.looked_ms + 1_000 {
            return Ok(());
        }
        broker.assert_consistent();
        self.look_at_failed(broker)?;
        self.failed_are_kept(broker)?;
        self.times_are_decided(broker)?;
        for join in self.model.open_joins() {
            self.tell(Event::Join(join, broker.join_members(&join)))?;
        }
        if broker.status().space == Space::Plenty {
            self.model.deadlines_are_kept()?;
        }
        self.model
            .workflows_are_right(|workflow| broker.workflow(workflow))?;
        let goes_on = self.operations_are_right(broker)?;
        self.tell(Event::Quiet { goes_on })?;
        for key in self.model.claimed_keys() {
            let owner = broker.owner_of(&key);
            self.tell(Event::Owner(key, owner))?;
        }
        self.no_circle_was_missed()?;
        broker.assert_no_circle_of_waits();
        self.waits.quiet();
        self.safe_through = self.told;
        self.schedules_are_safe();
        self.wall_was_set_by_ms = 0;
        self.knows_boot = true;
        // The limit is as many events as there are items to copy for the next story.
        if self.story.len() > story::IS_LONG.max(self.model.items.len()) {
            self.begin_story();
        }
        let now = self.model.now;
        let items = &self.model.items;
        // A message that may be delivered only once leaves after its grant is on disk, so others may precede it. A
        // message whose workers may have died too often may have failed.
        let is_candidate = |index: &usize| {
            let item = &items[*index];
            item.in_order
                && item.is_ready(now)
                && item.message.max_deliveries > 1
                && !item.may_be_dead()
        };
        let live = self.model.live.iter().copied();
        self.ready = live.filter(is_candidate).collect();
        self.nobody_waits()?;
        self.orders_have_come()?;
        let views = self.views.values_mut();
        views
            .flat_map(|view| view.consumers.values_mut())
            .for_each(ConsumerView::quiet);
        (self.looked_at, self.looked_ms) = (self.story.len(), now_ms);
        Ok(())
    }
}
