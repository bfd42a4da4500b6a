//! Consumers: which client takes jobs from which queues, of which tasks, and how many.
//!
//! A connection may have any number of consumers. A consumer that wants work is in the ring of each of its queues,
//! among those that can run the same tasks. A queue that has work and a consumer in such a ring is in the ring of
//! queues. So a job costs the same however many consumers other queues have, and a job that none of its queue's
//! consumers can run is sent to nobody.

use penstock_faults::planted;
use penstock_message::{Consume, MessageId, Notice, TaskSelection};
use rustc_hash::FxHashMap;

use crate::connections::{ClientConnection, NAME_CAP_BYTES};
use crate::queues::queue::WaitingConsumer;
use crate::table::slab::Slab;
use crate::{Broker, CloseReason, ConnId};

/// Maximum number of queues of a consumer. A worker serves a few; the list is compared with itself, so it must stay
/// short.
pub(crate) const QUEUES_CAP: usize = 1024;
/// Maximum number of tasks that a consumer may name.
const TASKS_CAP: usize = 1 << 16;
/// Maximum number of consumers of a connection. A worker has one for each kind of slot.
const CONSUMERS_CAP: usize = 64;

#[derive(Debug)]
pub(crate) struct QueueConsumer {
    pub(crate) conn: ConnId,
    /// Number of the consumer in its connection, chosen by the client.
    pub(crate) number: u32,
    /// Name of the app whose tasks the consumer runs, for people.
    pub(crate) app: String,
    pub(crate) credit: u64,
    pub(crate) seats: Vec<ConsumerSeat>,
    /// Index of the seat that is asked first next time, so that the queues take turns.
    next_seat: usize,
    /// Tasks that the consumer can run, as a set of [`TaskSets`](crate::queues::TaskSets); `None`: any.
    pub(crate) tasks: Option<u32>,
    /// Waiting jobs that hold all of its slots. Empty while it has slots.
    pub(crate) held_by: Vec<MessageId>,
    /// Serial number of its entries in rings: entries from before its last change are stale.
    serial: u64,
}

/// A queue that a consumer takes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConsumerSeat {
    pub(crate) queue: u32,
    /// Whether the consumer is in the ring of the queue.
    is_waiting: bool,
}

#[derive(Debug, Default)]
pub(crate) struct QueueConsumers {
    all: Slab<QueueConsumer>,
    serials: u64,
    /// Time of the next look at consumers without slots, on the monotonic clock.
    pub(crate) next_look: Option<u64>,
}

impl QueueConsumers {
    pub(crate) fn get(&self, slot: u32) -> Option<&QueueConsumer> {
        self.all.get(slot)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &QueueConsumer> {
        self.all.iter().map(|(_, consumer)| consumer)
    }

    pub(crate) fn set_held_by(&mut self, slot: u32, jobs: &[MessageId]) {
        self.all[slot].held_by = jobs.to_vec();
    }

    /// Returns the connection of a waiting consumer, and the consumer's number there.
    pub(crate) fn owner_of(&self, waiter: WaitingConsumer) -> (ConnId, u32) {
        let consumer = &self.all[waiter.consumer];
        (consumer.conn, consumer.number)
    }

    pub(crate) fn tasks_of(&self, waiter: WaitingConsumer) -> Option<u32> {
        self.all[waiter.consumer].tasks
    }

    /// Whether a consumer in the ring of this queue should receive work. If not, it leaves the ring.
    pub(crate) fn wants(
        &mut self,
        waiter: WaitingConsumer,
        queue: u32,
        connections: &FxHashMap<ConnId, ClientConnection>,
    ) -> bool {
        let conn = self.all.get(waiter.consumer).map(|consumer| consumer.conn);
        let is_starved = |other: &QueueConsumer| Some(other.conn) == conn && other.credit == 0;
        let is_held_up =
            planted!("wait-for-other-kinds") && self.all.iter().any(|(_, other)| is_starved(other));
        let consumer = self.all.get_mut(waiter.consumer);
        let Some(consumer) = consumer.filter(|consumer| consumer.serial == waiter.serial) else {
            return false;
        };
        let connection = connections.get(&consumer.conn);
        let wants = consumer.credit > 0
            && connection.is_some_and(ClientConnection::takes_work)
            && !is_held_up;
        if !wants {
            consumer.set_waiting(queue, false);
        }
        wants
    }

    /// Notes that the consumer received a message of this queue. Returns whether it stays in the ring.
    pub(crate) fn was_served(
        &mut self,
        waiter: WaitingConsumer,
        queue: u32,
        connection: &ClientConnection,
    ) -> bool {
        let consumer = &mut self.all[waiter.consumer];
        consumer.credit -= 1;
        let stays = consumer.credit > 0 && connection.takes_work() && !planted!("leave-line-early");
        let mut seats = consumer.seats.iter();
        if let Some(at) = seats.position(|seat| seat.queue == queue) {
            consumer.seats[at].is_waiting = stays;
            consumer.next_seat = (at + 1) % consumer.seats.len();
        }
        stays
    }
}

impl QueueConsumer {
    /// Whether the consumer takes nothing because waiting jobs hold all of its slots.
    pub(crate) fn is_held(&self) -> bool {
        self.credit == 0 && !self.held_by.is_empty()
    }

    /// Returns its queues, and its entries in their rings.
    fn places(&self, slot: u32) -> impl Iterator<Item = (u32, Option<WaitingConsumer>)> {
        let waiter = WaitingConsumer {
            consumer: slot,
            serial: self.serial,
        };
        let seats = self.seats.iter();
        seats.map(move |seat| (seat.queue, seat.is_waiting.then_some(waiter)))
    }

    /// Whether the consumer is in the ring of the queue.
    pub(crate) fn is_waiting(&self, queue: u32) -> bool {
        let mut seats = self.seats.iter();
        seats.any(|seat| seat.queue == queue && seat.is_waiting)
    }

    fn set_waiting(&mut self, queue: u32, is_waiting: bool) {
        if let Some(seat) = self.seats.iter_mut().find(|seat| seat.queue == queue) {
            seat.is_waiting = is_waiting;
        }
    }
}

impl Broker {
    pub(crate) fn consume(&mut self, conn: ConnId, consume: &Consume) {
        let Consume {
            consumer: number,
            app,
            queues,
            tasks,
            add_credit,
            held_by,
        } = consume;
        let number = *number;
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        let consumers = &self.consumers.all;
        let known = connection.consumers.iter().copied();
        let known = known
            .into_iter()
            .find(|slot| consumers[*slot].number == number);
        let checked = check(queues, tasks, known.is_none(), connection.consumers.len());
        if let Err(reason) = checked {
            return self.close(conn, CloseReason::Protocol(reason));
        }
        connection.is_worker = true;
        let slot = known.unwrap_or_else(|| {
            let slot = self.consumers.all.insert(QueueConsumer {
                conn,
                number,
                app: String::new(),
                credit: 0,
                seats: Vec::new(),
                next_seat: 0,
                tasks: None,
                held_by: Vec::new(),
                serial: 0,
            });
            connection.consumers.push(slot);
            slot
        });
        connection.is_worker = true;
        let consumer = &mut self.consumers.all[slot];
        consumer.credit += u64::from(*add_credit);
        let is_renamed = consumer.app != *app && !app.is_empty();
        if is_renamed {
            consumer.app.clone_from(app);
        }
        self.change_consumer(slot, queues, tasks, is_renamed);
        self.join_rings(slot);
        if let Some(jobs) = held_by {
            self.set_held_by(slot, jobs);
        }
    }

    /// Changes the consumer's queues or tasks. An empty list of queues, or [`TaskSelection::Same`], leaves them as they are.
    fn change_consumer(
        &mut self,
        slot: u32,
        queues: &[String],
        tasks: &TaskSelection,
        is_renamed: bool,
    ) {
        let state = &mut self.state;
        let consumer = &self.consumers.all[slot];
        let mut chosen: Vec<u32> = Vec::with_capacity(queues.len());
        for queue in queues {
            let name = state.names.intern(queue);
            let index = state.queue_named(name);
            if !chosen.contains(&index) {
                chosen.push(index);
            }
        }
        let seats = consumer.seats.iter().map(|seat| seat.queue);
        let seats: Vec<u32> = seats.collect();
        if chosen.is_empty() {
            chosen.clone_from(&seats);
        }
        // The new set is acquired before the old one is released, so that an equal one stays.
        let was = consumer.tasks;
        let (sets, names) = (&mut state.queues.sets, &mut state.names);
        let set = match tasks {
            TaskSelection::Same => was
                .filter(|_| is_renamed)
                .map(|set| Some(sets.acquire_for(&consumer.app, set, names))),
            TaskSelection::Any => Some(None),
            TaskSelection::Named(tasks) => {
                let tasks = tasks.iter().map(|task| names.intern(task)).collect();
                Some(Some(sets.acquire(&consumer.app, tasks, names)))
            }
        };
        let is_same = chosen == seats && set.is_none_or(|set| set == was);
        if !is_same {
            let now = set.unwrap_or(was);
            let mut first_in = chosen.clone();
            first_in.retain(|queue| state.queues.subscribe(*queue, now));
            for (queue, waiter) in self.consumers.all[slot].places(slot) {
                state.queues.unsubscribe(queue, was, waiter);
            }
            self.consumers.serials += 1;
            let serial = self.consumers.serials;
            let consumer = &mut self.consumers.all[slot];
            let set_waiting = |queue: &u32| ConsumerSeat {
                queue: *queue,
                is_waiting: false,
            };
            consumer.seats = chosen.iter().map(set_waiting).collect();
            consumer.next_seat = 0;
            consumer.tasks = now;
            consumer.serial = serial;
            first_in
                .iter()
                .for_each(|queue| self.report_shared_tasks(*queue, now));
        }
        if let Some(set) = set {
            // Its users are consumers, and the set gained one only if this consumer had another set before.
            let old_set = if is_same { set } else { was };
            let state = &mut self.state;
            state.queues.sets.release(old_set, &mut state.names);
        }
        for queue in chosen {
            self.state.review_service(queue);
            self.state.note_unknown(queue);
        }
    }

    /// Handles the first consumer with these tasks in a queue. Sends a notice if another app has some of them too.
    fn report_shared_tasks(&mut self, queue: u32, tasks: Option<u32>) {
        let state = &self.state;
        let shared = state.queues.shared_tasks(queue, tasks);
        let (Some(set), Some((other, task, others))) = (tasks, shared) else {
            return;
        };
        let sets = &state.queues.sets;
        let notice = Notice::SharedTask {
            queue: state.names.text(state.queues[queue].name).to_owned(),
            task: state.names.text(task).to_owned(),
            others,
            app: sets.app(set).to_owned(),
            other_app: sets.app(other).to_owned(),
        };
        self.notice(notice);
    }

    /// Stops a consumer: sets its credit to 0.
    pub(crate) fn stop_consuming(&mut self, conn: ConnId, number: u32) {
        if let Some(connection) = self.connections.get(&conn) {
            for slot in &connection.consumers {
                let consumer = &mut self.consumers.all[*slot];
                if consumer.number == number {
                    consumer.credit = 0;
                }
            }
        }
    }

    /// Drops the consumers of a closed connection.
    pub(crate) fn drop_consumers(&mut self, slots: Vec<u32>) {
        for slot in slots {
            let consumer = self.consumers.all.remove(slot);
            for (queue, waiter) in consumer.places(slot) {
                self.state.queues.unsubscribe(queue, consumer.tasks, waiter);
                self.state.review_service(queue);
                self.state.note_unknown(queue);
            }
            let state = &mut self.state;
            state.queues.sets.release(consumer.tasks, &mut state.names);
        }
    }

    /// Puts the consumers of a connection that want work into the rings of their queues.
    pub(crate) fn join_rings_of(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.get(&conn) else {
            return;
        };
        for slot in connection.consumers.clone() {
            self.join_rings(slot);
        }
    }

    fn join_rings(&mut self, slot: u32) {
        let consumer = &mut self.consumers.all[slot];
        let connection = &self.connections[&consumer.conn];
        if consumer.credit == 0 || !connection.takes_work() {
            return;
        }
        let waiter = WaitingConsumer {
            consumer: slot,
            serial: consumer.serial,
        };
        let (before, first) = consumer.seats.split_at_mut(consumer.next_seat);
        for seat in first.iter_mut().chain(before) {
            if !std::mem::replace(&mut seat.is_waiting, true) {
                self.state.queues.enroll(seat.queue, consumer.tasks, waiter);
            }
        }
        self.state.has_new_work = true;
    }
}

fn check(
    queues: &[String],
    tasks: &TaskSelection,
    is_new: bool,
    consumers: usize,
) -> Result<(), String> {
    if is_new && consumers == CONSUMERS_CAP {
        return Err(format!(
            "a connection can have at most {CONSUMERS_CAP} consumers"
        ));
    }
    if queues.len() > QUEUES_CAP {
        let asked = queues.len();
        return Err(format!(
            "a consumer takes from {asked} queues; the limit is {QUEUES_CAP}"
        ));
    }
    let named: &[String] = match tasks {
        TaskSelection::Named(tasks) => tasks,
        TaskSelection::Same | TaskSelection::Any => &[],
    };
    if named.len() > TASKS_CAP {
        let named = named.len();
        return Err(format!(
            "a consumer names {named} tasks; the limit is {TASKS_CAP}"
        ));
    }
    for (what, names) in [("queue", queues), ("task", named)] {
        let mut names = names.iter();
        if let Some(name) = names.find(|name| name.is_empty() || name.len() > NAME_CAP_BYTES) {
            return Err(format!(
                "a {what}'s name must have 1 to {NAME_CAP_BYTES} bytes, not {}",
                name.len()
            ));
        }
    }
    Ok(())
}
