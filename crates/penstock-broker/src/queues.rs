//! Ready work: queue → priority → flow (the task) → first in, first out; and who waits for it.
//!
//! Flows of one priority share by measured cost. Each has a virtual time, which a hand-out moves on by
//! what the run is expected to cost, and a settlement corrects to what it did cost; the flow that is
//! furthest behind goes next. A flow that was idle rejoins at the present, so that it can't claim the
//! time it did not use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use penstock_faults::planted;
use penstock_message::{Others, QueueLimits, SeededMap, SeededState};

use crate::Position;
use crate::active::{Active, Turn};
use crate::charges::{Charge, Running};
use crate::kinds::Kind;
use crate::line::Line;
use crate::messages::{Entry, Handle, Messages, State};
use crate::names::{Name, Names};
use crate::readiness::Readiness;
use crate::table::Table;
use crate::tally::{self, Counted, Counts, Step, Tally};
use crate::task_sets::TaskSets;
use crate::tasks::{ByName, Tasks};

#[derive(Debug, Default)]
pub(crate) struct Queues {
    all: Table<Queue>,
    pub(crate) by_name: ByName,
    pub(crate) tasks: Tasks,
    flows: Table<Flow>,
    by_key: SeededMap<FlowKey, u32>,
    /// Queues and tasks that nobody has set a timer for yet, by which they are forgotten.
    pub(crate) new: Vec<Forgettable>,
    /// Counts of those that were forgotten.
    pub(crate) others: Others,
    /// The time, for counts.
    pub(crate) now: Step,
    /// The steady clock.
    pub(crate) now_ms: u64,
    /// How many queues have limits.
    pub(crate) limited: u32,
    pub(crate) sets: TaskSets,
    /// Queues that have work and somebody who may take it, in turn. Some may have lost either since.
    ring: VecDeque<u32>,
}

/// A queue or a task, which is forgotten when it has not been in use for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Forgettable {
    Queue(u32),
    Task(u32),
}

/// An entry in the ring of a queue: a consumer, and the serial number by which it is seen to be stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) consumer: u32,
    pub(crate) serial: u64,
}

/// The consumers of a queue that can run the same tasks.
#[derive(Debug)]
struct Served {
    /// `None`: any task.
    tasks: Option<u32>,
    consumers: u32,
    /// Those that want work, in turn. Some may be stale.
    waiting: VecDeque<Waiter>,
}

const PRIORITIES: usize = penstock_message::HIGHEST_PRIORITY as usize + 1;

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) name: Name,
    /// Levels that have flows, by priority; `None`: there are no flows. In boxes, since most queues use one of them.
    levels: Option<Box<Levels>>,
    /// One bit for each level that has ready messages.
    ready_levels: u16,
    pub(crate) ready: u64,
    pub(crate) delayed: u64,
    /// Of the bodies of what is ready, and of what is delayed.
    pub(crate) ready_bytes: u64,
    pub(crate) delayed_bytes: u64,
    pub(crate) running: u64,
    /// `None`: it has no consumers.
    serving: Option<Box<Serving>>,
    in_ring: bool,
    pub(crate) paused: bool,
    pub(crate) service: Service,
    /// Whether it has had a consumer, in this life of the broker or in an earlier one.
    pub(crate) was_served: bool,
    pub(crate) tally: Tally,
    /// Failed jobs of this queue.
    pub(crate) failed: u64,
    /// `None`: all of it is as by default.
    rare: Option<Box<Rare>>,
}

type Levels = [Option<Box<Level>>; PRIORITIES];

/// The consumers of a queue.
#[derive(Debug)]
struct Serving {
    consumers: u32,
    by_tasks: Vec<Served>,
    /// The ones of those that are asked first next time.
    next: usize,
    readiness: Readiness,
}

/// State of a queue that most queues never have; they would take twice the memory otherwise.
#[derive(Debug)]
pub(crate) struct Rare {
    /// A timer waits to tell of tasks that none of the consumers can run; its generation.
    pub(crate) unknown_timer: Option<u64>,
    /// Tasks that were told of so, and still wait.
    pub(crate) told_unknown: BTreeSet<Name>,
    /// Where the journal says that it is paused.
    pub(crate) base: Position,
    pub(crate) limits: QueueLimits,
    /// Where the journal tells of the limits.
    pub(crate) limits_base: Position,
    /// Since the start: transactions refused because it was full.
    pub(crate) refused: u64,
    /// Messages with lower numbers that come to wait here were purged.
    pub(crate) purge_before: u64,
    /// How many of those that wait were purged.
    pub(crate) ending: u64,
}

impl Rare {
    const NONE: Self = Self {
        unknown_timer: None,
        told_unknown: BTreeSet::new(),
        base: Position(0),
        limits: QueueLimits::NONE,
        limits_base: Position(0),
        refused: 0,
        purge_before: 0,
        ending: 0,
    };
}

static NONE: Rare = Rare::NONE;

/// Whether somebody takes from a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// Somebody does, or there is nothing to take.
    Well,
    /// There is work and nobody to do it; the generation tells which timer waits for that to last.
    Missing { generation: u64 },
    /// ... and that was told.
    Told,
}

impl Queues {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            sets: TaskSets::new(hashing),
            by_key: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[inline]
    pub(crate) fn find(&self, name: Name) -> Option<u32> {
        self.by_name.find(name)
    }

    #[inline]
    pub(crate) fn find_or_create(&mut self, name: Name, names: &mut Names) -> u32 {
        match self.find(name) {
            Some(queue) => queue,
            None => self.create(name, names),
        }
    }

    fn create(&mut self, name: Name, names: &mut Names) -> u32 {
        let queue = self.all.insert(Queue::new(name, self.now));
        self.by_name.insert(name, queue, names);
        self.new.push(Forgettable::Queue(queue));
        queue
    }

    /// A message of the task is about to be there.
    #[inline]
    pub(crate) fn know_task(&mut self, name: Name, names: &mut Names) {
        let (task, is_new) = self.tasks.find_or_create(name, self.now, names);
        if is_new {
            self.new.push(Forgettable::Task(task));
        }
    }

    /// Counts of messages of this kind.
    pub(crate) fn add_counts(&mut self, kind: &Kind, counts: &Counts) {
        let task = self.tasks.find(kind.task);
        let task = task.expect("the task of a message is known");
        self.tasks.all[task].tally.add(counts, self.now);
        self.all[kind.queue].tally.add(counts, self.now);
    }

    /// A message has come to the queue from another.
    pub(crate) fn count_arrival(&mut self, index: u32) {
        self.all[index].tally.count(Counted::Enqueued, self.now);
    }

    /// The queue or task is in use, or was until now.
    pub(crate) fn touch(&mut self, what: Forgettable) {
        let tally = match what {
            Forgettable::Queue(queue) => &mut self.all[queue].tally,
            Forgettable::Task(task) => &mut self.tasks.all[task].tally,
        };
        tally.touch(self.now);
    }

    pub(crate) fn last_use(&self, what: Forgettable) -> Step {
        match what {
            Forgettable::Queue(queue) => self.all[queue].tally.last,
            Forgettable::Task(task) => self.tasks.all[task].tally.last,
        }
    }

    pub(crate) fn get(&self, index: u32) -> Option<&Queue> {
        self.all.get(index)
    }

    pub(crate) fn indexes(&self) -> Vec<u32> {
        self.all.iter().map(|(index, _)| index).collect()
    }

    /// Forgets a queue or a task that nothing is of, but for its counts.
    pub(crate) fn forget(&mut self, what: Forgettable, names: &mut Names) {
        match what {
            Forgettable::Queue(index) => self.forget_queue(index, names),
            Forgettable::Task(task) => {
                let task = self.tasks.remove(task, names);
                self.others.tasks += 1;
                tally::add(&mut self.others.of_tasks, task.tally.counts());
            }
        }
    }

    fn forget_queue(&mut self, index: u32, names: &mut Names) {
        let queue = self.all.remove(index);
        debug_assert!(queue.levels.is_none());
        self.by_name.remove(queue.name, names);
        for task in &queue.rare().told_unknown {
            names.let_go(*task);
        }
        if queue.in_ring {
            self.ring.retain(|other| *other != index);
        }
        self.others.queues += 1;
        self.others.refused += queue.rare().refused;
        tally::add(&mut self.others.of_queues, queue.tally.counts());
    }

    // --- flows

    /// The flow of messages of this kind, which has one user more.
    pub(crate) fn take_flow(&mut self, kind: &Kind) -> u32 {
        let key = FlowKey {
            queue: kind.queue,
            priority: kind.priority,
            task: kind.task,
        };
        let slot = match self.by_key.get(&key) {
            Some(slot) => *slot,
            None => self.add_flow(key),
        };
        self.flows[slot].users += 1;
        slot
    }

    fn add_flow(&mut self, key: FlowKey) -> u32 {
        let queue = &mut self.all[key.queue];
        let is_wanted = is_wanted(queue.served(), &self.sets, key.task);
        let levels = queue.levels.get_or_insert_default();
        let level = levels[usize::from(key.priority)].get_or_insert_default();
        let place = level.flows.len() as u32;
        let slot = self.flows.insert(Flow::new(key, place, is_wanted));
        level.flows.push(slot);
        self.by_key.insert(key, slot);
        slot
    }

    /// A kind of messages that used the flow is no more; the flow goes with the last of them. What it has been
    /// charged beyond the present is forgotten with it: that is what its last runs cost, and kinds are kept for
    /// a while when they are not in use.
    pub(crate) fn give_flow(&mut self, slot: u32) {
        self.flows[slot].users -= 1;
        if self.flows[slot].users > 0 {
            return;
        }
        let Flow {
            key, place, ready, ..
        } = self.flows.remove(slot);
        assert_eq!(ready, 0, "a flow goes without messages");
        self.by_key.remove(&key);
        if self.by_key.capacity() > 1024 && self.by_key.len() < self.by_key.capacity() / 8 {
            self.by_key.shrink_to(2 * self.by_key.len());
        }
        let queue = &mut self.all[key.queue];
        let level = queue.level_mut(key.priority);
        level.flows.swap_remove(place as usize);
        match level.flows.get(place as usize) {
            Some(moved) => self.flows[*moved].place = place,
            None if level.flows.is_empty() => {
                let levels = queue.levels.get_or_insert_default();
                levels[usize::from(key.priority)] = None;
                if levels.iter().all(Option::is_none) {
                    queue.levels = None;
                }
            }
            None => {}
        }
    }

    /// Returns the limits it had.
    pub(crate) fn set_limits(&mut self, queue: u32, limits: QueueLimits) -> QueueLimits {
        let had = std::mem::replace(&mut self.all[queue].rare_mut().limits, limits);
        self.limited += u32::from(!limits.is_none());
        self.limited -= u32::from(!had.is_none());
        had
    }

    /// Returns whether it is the first of a flow that none of the consumers can run.
    pub(crate) fn push_ready(&mut self, messages: &Messages, slot: u32, flow: u32) -> bool {
        let kind = messages.kind(slot);
        let queue = &mut self.all[kind.queue];
        queue.ready += 1;
        queue.ready_bytes += messages.body_bytes(slot);
        let level = queue.level_mut(kind.priority);
        let is_unknown = level.push(flow, &mut self.flows[flow], messages.handle(slot));
        if !level.active.is_empty() {
            queue.ready_levels |= 1 << kind.priority;
        }
        self.activate(kind.queue);
        is_unknown
    }

    /// The queue has a turn, if it has work and anybody waits for it.
    pub(crate) fn activate(&mut self, index: u32) {
        let queue = &mut self.all[index];
        let waits = |served: &Served| !served.waiting.is_empty();
        if queue.ready_levels > 0 && !queue.in_ring {
            if queue.served().iter().any(waits) {
                queue.in_ring = true;
                self.ring.push_back(index);
            } else {
                queue.review_readiness(self.now_ms);
            }
        }
    }

    /// The queue whose turn it is. It has another one once it is given back to the ring.
    pub(crate) fn next_in_ring(&mut self) -> Option<u32> {
        let index = self.ring.pop_front()?;
        self.all[index].in_ring = false;
        Some(index)
    }

    /// The queue is to go on at once.
    pub(crate) fn activate_first(&mut self, index: u32) {
        let queue = &mut self.all[index];
        if !std::mem::replace(&mut queue.in_ring, true) {
            self.ring.push_front(index);
        }
    }

    /// A consumer takes from the queue from now on. `tasks`: those that it can run. Returns whether it is the
    /// first with these.
    pub(crate) fn subscribe(&mut self, index: u32, tasks: Option<u32>) -> bool {
        let queue = &mut self.all[index];
        let serving = queue.serving.get_or_insert_with(|| {
            Box::new(Serving {
                consumers: 0,
                by_tasks: Vec::new(),
                next: 0,
                readiness: Readiness::new(self.now_ms),
            })
        });
        serving.consumers += 1;
        let mut same = serving.by_tasks.iter_mut();
        match same.find(|served| served.tasks == tasks) {
            Some(served) => {
                served.consumers += 1;
                false
            }
            None => {
                serving.by_tasks.push(Served {
                    tasks,
                    consumers: 1,
                    waiting: VecDeque::new(),
                });
                self.review_flows(index);
                true
            }
        }
    }

    /// Another set of tasks of the queue's consumers, of another app, that has some of these tasks, with one of
    /// them and how many others.
    pub(crate) fn shared_tasks(&self, index: u32, tasks: Option<u32>) -> Option<(u32, Name, u64)> {
        let served = self.all[index].served();
        let mut others = served.iter().filter_map(|served| served.tasks);
        others.find_map(|other| {
            let (task, more) = self.sets.shared(tasks?, other)?;
            Some((other, task, more))
        })
    }

    /// A consumer that could run these tasks does not take from the queue any more. `waiter`: its entry in the
    /// ring, if it has one; others would pile up where there is no work to meet them.
    pub(crate) fn unsubscribe(&mut self, index: u32, tasks: Option<u32>, waiter: Option<Waiter>) {
        self.touch(Forgettable::Queue(index));
        let queue = &mut self.all[index];
        let serving = queue.serving.as_mut().expect("it has subscribed");
        serving.consumers -= 1;
        let mut served = serving.by_tasks.iter();
        let place = served
            .position(|served| served.tasks == tasks)
            .expect("it has subscribed");
        let served = &mut serving.by_tasks[place];
        served.consumers -= 1;
        if let Some(waiter) = waiter {
            served.waiting.retain(|other| *other != waiter);
        }
        if served.consumers == 0 {
            serving.by_tasks.remove(place);
            if serving.by_tasks.is_empty() {
                queue.serving = None;
            }
            self.review_flows(index);
        }
        self.all[index].review_readiness(self.now_ms);
    }

    /// The consumers of the queue that can run these tasks.
    fn served_mut(&mut self, index: u32, tasks: Option<u32>) -> &mut Served {
        let serving = self.all[index].serving.as_mut();
        let mut served = serving
            .into_iter()
            .flat_map(|serving| &mut serving.by_tasks);
        served
            .find(|served| served.tasks == tasks)
            .expect("it has subscribed")
    }

    /// A consumer waits for work of the queue.
    pub(crate) fn enroll(&mut self, index: u32, tasks: Option<u32>, waiter: Waiter) {
        self.served_mut(index, tasks).waiting.push_back(waiter);
        self.activate(index);
    }

    /// A consumer waits for work of the queue, before all others.
    pub(crate) fn enroll_first(&mut self, index: u32, tasks: Option<u32>, waiter: Waiter) {
        self.served_mut(index, tasks).waiting.push_front(waiter);
    }

    /// Finds out anew which flows anybody can run.
    fn review_flows(&mut self, index: u32) {
        let queue = &mut self.all[index];
        let served = queue.serving.as_ref();
        let served = served.map_or(&[][..], |serving| &serving.by_tasks);
        let sets = &self.sets;
        queue.ready_levels = 0;
        let levels = queue.levels.iter_mut();
        for (priority, level) in levels.flat_map(|levels| levels.iter_mut().enumerate()) {
            let Some(level) = level else {
                continue;
            };
            level.review(&mut self.flows, |task| is_wanted(served, sets, task));
            queue.ready_levels |= u16::from(!level.active.is_empty()) << priority;
        }
        self.activate(index);
    }

    /// Takes the message that is next, for one of those who wait and can run it, in turn. What its run is
    /// expected to cost is charged to its flow. `None`: there is nothing for any of them, or it was purged and
    /// has still to end, or the queue is paused. Whoever is not found to want work any more leaves the ring.
    pub(crate) fn take_next(
        &mut self,
        index: u32,
        messages: &Messages,
        mut wants: impl FnMut(Waiter) -> bool,
    ) -> Option<(Waiter, u32, Charge)> {
        /// Flows that are charged before one is taken as it is.
        const CHARGED_AT_ONCE: usize = 16;
        let now_ms = self.now_ms;
        let queue = &mut self.all[index];
        if queue.ready_levels == 0 || queue.paused && !planted!("serve-paused") {
            return None;
        }
        let count = queue.served().len();
        for turn in 0..count {
            let serving = queue.serving.as_mut()?;
            // Some may have left since.
            let first = if serving.next < count {
                serving.next
            } else {
                0
            };
            let place = match first + turn {
                place if place < count => place,
                place => place - count,
            };
            let served = &mut serving.by_tasks[place];
            while served.waiting.front().is_some_and(|waiter| !wants(*waiter)) {
                served.waiting.pop_front();
            }
            let Some(waiter) = served.waiting.front().copied() else {
                continue;
            };
            let tasks = served.tasks;
            let mut found = queue.find_active(tasks, &self.flows, &self.sets);
            for _ in 0..CHARGED_AT_ONCE {
                let Some((priority, (_, flow))) = found else {
                    break;
                };
                let level = queue.level_mut(priority);
                if !level.charge(flow, &mut self.flows[flow], now_ms) {
                    break;
                }
                found = queue.find_active(tasks, &self.flows, &self.sets);
            }
            let Some((priority, active)) = found else {
                continue;
            };
            let purge_before = queue.rare().purge_before;
            if purge_before > 0
                && !planted!("lose-purge")
                && self.flows[active.1]
                    .next(messages)
                    .is_some_and(|next| next.number < purge_before)
            {
                // What was purged ends first, step by step.
                return None;
            }
            let serving = queue.serving.as_mut()?;
            serving.by_tasks[place].waiting.pop_front();
            serving.next = if place + 1 < count { place + 1 } else { 0 };
            serving.readiness.set(true, self.now_ms);
            let level = queue.level_mut(priority);
            let (slot, charge) = level.pop(active, &mut self.flows, messages, &self.tasks, now_ms);
            if level.active.is_empty() {
                queue.ready_levels &= !(1 << priority);
            }
            queue.ready -= 1;
            queue.ready_bytes -= messages.body_bytes(slot);
            return Some((waiter, slot, charge));
        }
        queue.review_readiness(self.now_ms);
        None
    }

    /// A ready message goes another way than by being handed out.
    pub(crate) fn remove_ready(&mut self, messages: &Messages, slot: u32) {
        let kind = messages.kind(slot);
        let queue = &mut self.all[kind.queue];
        let level = queue.level_mut(kind.priority);
        let flow = messages.flow(slot).expect("a ready message has a flow");
        level.forget_one(flow, &mut self.flows[flow], messages);
        if level.active.is_empty() {
            queue.ready_levels &= !(1 << kind.priority);
            queue.review_readiness(self.now_ms);
        }
        queue.ready -= 1;
        queue.ready_bytes -= messages.body_bytes(slot);
    }

    /// A message had a body of so many bytes, and may now be without.
    pub(crate) fn body_was_lost(&mut self, messages: &Messages, slot: u32, was_bytes: u64) {
        let lost = was_bytes - messages.body_bytes(slot);
        let queue = &mut self.all[messages.queue(slot)];
        match messages.state(slot) {
            State::Ready => queue.ready_bytes -= lost,
            State::Delayed(_) => queue.delayed_bytes -= lost,
            State::Held(_) | State::Leased(_) | State::Failed | State::Ended => {}
        }
    }

    /// A run of the message has ended: it cost what it cost, or nothing at all when it was handed back.
    pub(crate) fn correct_cost(
        &mut self,
        messages: &Messages,
        slot: u32,
        charge: Option<Charge>,
        cost_us: Option<u64>,
    ) {
        let cost_us = cost_us.map_or(0, |cost| {
            let cost = cost.clamp(1, u64::from(u32::MAX)) as u32;
            if let Some(task) = self.tasks.find(messages.kind(slot).task) {
                self.tasks.all[task].cost.add(cost);
            }
            cost
        });
        if let Some(charge) = charge {
            self.end_run(messages, slot, charge, cost_us);
        }
    }

    /// Gives its flow back what the message was charged when it was popped.
    pub(crate) fn refund(&mut self, messages: &Messages, slot: u32, charge: Charge) {
        self.end_run(messages, slot, charge, 0);
    }

    fn end_run(&mut self, messages: &Messages, slot: u32, charge: Charge, cost_us: u32) {
        let flow = messages
            .flow(slot)
            .expect("a run that is charged has a flow");
        let kind = messages.kind(slot);
        let level = self.all[kind.queue].level_mut(kind.priority);
        let back_us = self.flows[flow].running.end(charge, self.now_ms);
        let by_us = i64::from(cost_us) - i64::from(charge.estimate_us.get());
        let by_us = by_us.saturating_sub_unsigned(back_us);
        level.correct(flow, &mut self.flows[flow], by_us);
    }

    /// Charges the flow of a run that is there after a recovery.
    pub(crate) fn charge_run(&mut self, flow: u32) -> Charge {
        let key = self.flows[flow].key;
        let charge = Charge {
            estimate_us: self.tasks.estimate_us(key.task),
            since_ms: self.now_ms,
        };
        self.flows[flow].running.begin(charge);
        let level = self.all[key.queue].level_mut(key.priority);
        level.correct(
            flow,
            &mut self.flows[flow],
            i64::from(charge.estimate_us.get()),
        );
        charge
    }

    /// Flows of a queue, by priority.
    fn flows_of(&self, index: u32) -> impl Iterator<Item = &Flow> {
        let levels = self.all[index].levels();
        let flows = levels.flat_map(|level| &level.flows);
        flows.map(|flow| &self.flows[*flow])
    }

    /// How many ready messages somebody with one of these sets of tasks can run.
    pub(crate) fn ready_for(&self, index: u32, sets: &[Option<u32>]) -> usize {
        let known = self.flows_of(index).filter(|flow| {
            let mut sets = sets.iter();
            sets.any(|set| self.sets.has(*set, flow.key.task))
        });
        known.map(|flow| flow.ready).sum()
    }

    /// Flows with work that none of the queue's consumers can run, as (task, ready messages).
    pub(crate) fn unknown_tasks(&self, index: u32) -> impl Iterator<Item = (Name, usize)> {
        let flows = self.flows_of(index);
        let unknown = flows.filter(|flow| flow.ready > 0 && !flow.is_wanted);
        unknown.map(|flow| (flow.key.task, flow.ready))
    }

    /// Ready messages that none of the queue's consumers can run.
    pub(crate) fn unknown(&self, index: u32) -> u64 {
        let flows = self.unknown_tasks(index);
        flows.map(|(_, ready)| ready as u64).sum()
    }

    /// Panics unless the flows count these ready messages, and no others, and have so many users and runs.
    pub(crate) fn assert_flows_hold(
        &self,
        expected: &BTreeMap<(u32, u8, Name), usize>,
        users: &BTreeMap<u32, u32>,
        runs: &BTreeMap<u32, u32>,
    ) {
        let mut flows = BTreeMap::new();
        let mut listed = 0;
        for (index, queue) in self.all.iter() {
            if let Some(serving) = &queue.serving {
                let is_ready = serving.readiness.is_ready();
                let can_go = queue.ready_levels > 0 && !queue.paused;
                assert!(is_ready || can_go, "work that can go waits for consumers");
                let waits = can_go && !queue.in_ring && queue.waiting() == 0;
                assert!(!(is_ready && waits), "no consumer is ready");
            }
            for (priority, level) in queue
                .levels
                .iter()
                .flat_map(|levels| levels.iter().enumerate())
            {
                let is_marked = queue.ready_levels >> priority & 1 == 1;
                let is_active = level.as_ref().is_some_and(|level| !level.active.is_empty());
                assert_eq!(is_marked, is_active, "the mark of a priority");
                let Some(level) = level else {
                    continue;
                };
                assert!(!level.flows.is_empty(), "a level without flows");
                for (place, slot) in level.flows.iter().enumerate() {
                    let flow = &self.flows[*slot];
                    let key = FlowKey {
                        queue: index,
                        priority: priority as u8,
                        task: flow.key.task,
                    };
                    assert_eq!((flow.key, flow.place as usize), (key, place), "a flow");
                    assert_eq!(self.by_key.get(&key), Some(slot), "a flow is found");
                    let used = users.get(slot).copied().unwrap_or(0);
                    assert_eq!(flow.users, used, "the users of a flow");
                    let runs = runs.get(slot).copied().unwrap_or(0);
                    assert_eq!(flow.running.runs(), runs, "the runs of a flow");
                    listed += 1;
                    let is_active = level.active.contains((flow.virtual_time, *slot));
                    let is_wanted = is_wanted(queue.served(), &self.sets, key.task);
                    assert_eq!(flow.is_wanted, is_wanted, "whether anybody can run a flow");
                    assert_eq!(
                        is_active,
                        flow.ready > 0 && is_wanted,
                        "a flow takes part while it has messages that somebody can run"
                    );
                    if flow.ready > 0 {
                        flows.insert((index, priority as u8, key.task), flow.ready);
                    }
                }
            }
        }
        assert_eq!(flows, *expected, "the ready messages of all flows");
        assert_eq!((self.flows.len(), self.by_key.len()), (listed, listed));
    }

    /// The oldest ready message of the lowest priority that has any.
    pub(crate) fn oldest_of_lowest(&mut self, queue: u32, messages: &Messages) -> Option<u32> {
        let queue = &self.all[queue];
        if queue.ready == 0 {
            return None;
        }
        let flows = &mut self.flows;
        queue.levels().find_map(|level| {
            let next = |flow: &u32| flows[*flow].next(messages);
            let oldest = level.flows.iter().filter_map(next).min();
            oldest.map(|handle| handle.slot)
        })
    }

    /// Up to so many ready messages with lower numbers than this, in no order that matters.
    pub(crate) fn ready_before(
        &mut self,
        queue: u32,
        before: u64,
        most: usize,
        messages: &Messages,
    ) -> Vec<u32> {
        let mut found = Vec::new();
        for level in self.all[queue].levels() {
            for flow in &level.flows {
                let flow = &mut self.flows[*flow];
                if found.len() >= most {
                    return found;
                }
                // `next` also forgets what is stale, so a later call finds its way at once.
                if flow.next(messages).is_some_and(|next| next.number < before) {
                    flow.list_before(before, most, messages, &mut found);
                }
            }
        }
        found
    }

    /// The message that has waited longest among those that are ready.
    pub(crate) fn oldest_ready<'a>(&self, queue: u32, messages: &'a Messages) -> Option<&'a Entry> {
        self.flows_of(queue)
            .filter_map(|flow| flow.first_ready(messages))
            .min_by_key(|entry| entry.number())
    }
}

impl std::ops::Index<u32> for Queues {
    type Output = Queue;

    fn index(&self, queue: u32) -> &Queue {
        &self.all[queue]
    }
}

impl std::ops::IndexMut<u32> for Queues {
    fn index_mut(&mut self, queue: u32) -> &mut Queue {
        &mut self.all[queue]
    }
}

impl Queue {
    fn new(name: Name, now: Step) -> Self {
        Self {
            name,
            levels: None,
            ready_levels: 0,
            ready: 0,
            delayed: 0,
            running: 0,
            serving: None,
            in_ring: false,
            paused: false,
            service: Service::Well,
            was_served: false,
            ready_bytes: 0,
            delayed_bytes: 0,
            tally: Tally::new(now),
            failed: 0,
            rare: None,
        }
    }

    #[inline]
    pub(crate) fn rare(&self) -> &Rare {
        self.rare.as_deref().unwrap_or(&NONE)
    }

    pub(crate) fn has_rare(&self) -> bool {
        self.rare.is_some()
    }

    pub(crate) fn rare_mut(&mut self) -> &mut Rare {
        self.rare.get_or_insert_with(|| Box::new(Rare::NONE))
    }

    #[inline]
    pub(crate) fn consumers(&self) -> u32 {
        self.serving.as_ref().map_or(0, |serving| serving.consumers)
    }

    #[inline]
    fn served(&self) -> &[Served] {
        self.serving
            .as_ref()
            .map_or(&[], |serving| &serving.by_tasks)
    }

    fn levels(&self) -> impl Iterator<Item = &Level> {
        let levels = self.levels.iter().flat_map(|levels| levels.iter());
        levels.flatten().map(Box::as_ref)
    }

    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.ready_bytes + self.delayed_bytes
    }

    /// Whether it has messages, consumers, or settings of its own.
    pub(crate) fn is_in_use(&self) -> bool {
        let rare = self.rare();
        self.ready + self.delayed + self.running + self.failed + rare.ending > 0
            || self.serving.is_some()
            || self.paused
            || !rare.limits.is_none()
            || rare.purge_before > 0
    }

    /// Notes whether work waits for its consumers now: to be called when that may have changed.
    pub(crate) fn review_readiness(&mut self, now_ms: u64) {
        let waits = self.ready_levels > 0 && !self.in_ring && !self.paused;
        if let Some(serving) = &mut self.serving {
            serving.readiness.set(!waits, now_ms);
        }
    }

    /// The share of the time, mostly of the last 10 seconds, in which a job that some consumer can run would have gone
    /// to one at once, in thousandths. `None`: it has no consumers.
    pub(crate) fn capacity_permille(&self, now_ms: u64) -> Option<u16> {
        let serving = self.serving.as_ref()?;
        Some(serving.readiness.permille(now_ms))
    }

    /// The level of a flow that is there.
    #[inline]
    fn level_mut(&mut self, priority: impl Into<usize>) -> &mut Level {
        let levels = self.levels.as_mut();
        let level = levels.and_then(|levels| levels[priority.into()].as_mut());
        level.expect("a flow has its level")
    }

    /// How many consumers stand in its ring.
    pub(crate) fn waiting(&self) -> usize {
        self.served()
            .iter()
            .map(|served| served.waiting.len())
            .sum()
    }

    /// The priority and the flow of the next message for consumers that can run these tasks, if there is any.
    #[inline]
    fn find_active(
        &self,
        tasks: Option<u32>,
        flows: &Table<Flow>,
        sets: &TaskSets,
    ) -> Option<(usize, Turn)> {
        // What takes part can be run by somebody.
        let is_for_all = self.served().len() == 1 || tasks.is_none();
        let mut left = self.ready_levels;
        while left != 0 {
            let priority = match planted!("ignore-priority") {
                true => left.trailing_zeros(),
                false => left.ilog2(),
            } as usize;
            left &= !(1 << priority);
            let active = &self.levels.as_ref()?[priority].as_ref()?.active;
            let found = match is_for_all || planted!("send-any-task") {
                true => active.first(),
                false => active
                    .iter()
                    .find(|(_, flow)| sets.has(tasks, flows[*flow].key.task)),
            };
            if let Some(turn) = found {
                return Some((priority, turn));
            }
        }
        None
    }
}

/// Whether any of the consumers of a queue can run the task, or it has none.
fn is_wanted(served: &[Served], sets: &TaskSets, task: Name) -> bool {
    served.is_empty() || served.iter().any(|served| sets.has(served.tasks, task))
}

/// The flows of one priority.
#[derive(Debug, Default)]
struct Level {
    flows: Vec<u32>,
    /// Flows that have ready messages which somebody can run, by virtual time.
    active: Active,
    /// The virtual time at which the last message was taken: the present.
    present: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FlowKey {
    queue: u32,
    priority: u8,
    task: Name,
}

/// Messages of one queue, priority and task. It is there for as long as there are kinds of them.
#[derive(Debug)]
struct Flow {
    key: FlowKey,
    /// In the list of its level.
    place: u32,
    /// Kinds of messages that are of this flow.
    users: u32,
    virtual_time: u64,
    ready: usize,
    running: Running,
    /// Some consumer of the queue can run its task, or the queue has none.
    is_wanted: bool,
    /// In order of number; some may be stale.
    run: Line<InRun>,
    /// The number of the last in the run.
    last_number: u64,
    /// Those that came back after a younger one had come: taken by number among the others.
    returned: Returned,
}

/// Messages by number. Most flows never have any.
#[derive(Debug, Default)]
struct Returned(
    #[expect(
        clippy::box_collection,
        reason = "a third of the size, where it is not"
    )]
    Option<Box<BTreeSet<Handle>>>,
);

impl Returned {
    fn insert(&mut self, handle: Handle) {
        self.0.get_or_insert_default().insert(handle);
    }

    fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |handles| handles.len())
    }

    fn iter(&self) -> impl Iterator<Item = &Handle> {
        self.0.iter().flat_map(|handles| handles.iter())
    }

    #[inline]
    fn first(&self) -> Option<Handle> {
        self.0.as_ref()?.first().copied()
    }

    fn pop_first(&mut self) {
        if let Some(handles) = &mut self.0 {
            handles.pop_first();
            if handles.is_empty() {
                self.clear();
            }
        }
    }

    fn clear(&mut self) {
        self.0 = None;
    }

    fn retain(&mut self, is_wanted: impl FnMut(&Handle) -> bool) {
        if let Some(handles) = &mut self.0 {
            handles.retain(is_wanted);
        }
    }
}

impl Level {
    fn push(&mut self, slot: u32, flow: &mut Flow, handle: Handle) -> bool {
        if flow.ready == 0 && flow.is_wanted {
            flow.virtual_time = flow.virtual_time.max(self.present);
            self.active.insert((flow.virtual_time, slot));
        }
        let is_unknown = flow.ready == 0 && !flow.is_wanted;
        flow.ready += 1;
        let is_late = !flow.run.is_empty() && flow.last_number > handle.number;
        if is_late && !planted!("return-to-end") {
            flow.returned.insert(handle);
        } else {
            flow.run.push_back(InRun::new(handle));
            flow.last_number = handle.number;
        }
        is_unknown
    }

    /// The consumers of the queue can run other tasks than before.
    fn review(&mut self, flows: &mut Table<Flow>, is_wanted: impl Fn(Name) -> bool) {
        for slot in &self.flows {
            let flow = &mut flows[*slot];
            let was_wanted = std::mem::replace(&mut flow.is_wanted, is_wanted(flow.key.task));
            if flow.ready == 0 || was_wanted == flow.is_wanted {
                continue;
            }
            if was_wanted {
                self.active.remove((flow.virtual_time, *slot));
            } else {
                flow.virtual_time = flow.virtual_time.max(self.present);
                self.active.insert((flow.virtual_time, *slot));
            }
        }
    }

    /// Takes the next message of an active flow.
    fn pop(
        &mut self,
        active: Turn,
        flows: &mut Table<Flow>,
        messages: &Messages,
        tasks: &Tasks,
        now_ms: u64,
    ) -> (u32, Charge) {
        let (virtual_time, index) = active;
        // Others may be behind that wait for consumers of their own.
        self.present = self.present.max(virtual_time);
        let flow = &mut flows[index];
        let slot = flow.pop(messages);
        let charge = Charge {
            estimate_us: tasks.estimate_us(flow.key.task),
            since_ms: now_ms,
        };
        flow.running.begin(charge);
        flow.ready -= 1;
        flow.virtual_time += u64::from(charge.estimate_us.get());
        if flow.ready > 0 {
            self.active.replace(active, (flow.virtual_time, index));
        } else {
            self.active.remove(active);
            flow.run.clear();
            flow.returned.clear();
        }
        (slot, charge)
    }

    /// Charges an active flow what its runs have taken beyond what they were expected to. Returns whether that
    /// may have changed whose turn it is.
    fn charge(&mut self, slot: u32, flow: &mut Flow, now_ms: u64) -> bool {
        if self.active.is_alone() {
            // Nobody else wants the turn. It is charged when somebody does.
            return false;
        }
        let more_us = flow.running.charge(now_ms);
        self.correct(slot, flow, i64::try_from(more_us).unwrap_or(i64::MAX));
        more_us > 0
    }

    fn forget_one(&mut self, slot: u32, flow: &mut Flow, messages: &Messages) {
        flow.ready -= 1;
        if flow.ready == 0 {
            self.active.remove((flow.virtual_time, slot));
            flow.run.clear();
            flow.returned.clear();
        } else if flow.run.len() + flow.returned.len() > 2 * flow.ready + 64 {
            // Called while the message still looks ready; it is dropped at the next sweep or pop.
            flow.run
                .retain(|place| place.find(messages).is_some_and(Entry::is_ready));
            flow.returned.retain(|handle| is_ready(messages, *handle));
        }
    }

    fn correct(&mut self, slot: u32, flow: &mut Flow, by_us: i64) {
        if by_us == 0 {
            return;
        }
        let corrected = flow.virtual_time.saturating_add_signed(by_us);
        if flow.ready > 0 && flow.is_wanted {
            self.active
                .replace((flow.virtual_time, slot), (corrected, slot));
        }
        flow.virtual_time = corrected;
    }
}

impl Flow {
    fn new(key: FlowKey, place: u32, is_wanted: bool) -> Self {
        Self {
            key,
            place,
            users: 0,
            virtual_time: 0,
            ready: 0,
            is_wanted,
            run: Line::default(),
            last_number: 0,
            running: Running::default(),
            returned: Returned::default(),
        }
    }

    fn pop(&mut self, messages: &Messages) -> u32 {
        loop {
            // What is stale has no number any more, and is in nobody's way.
            let next = loop {
                match self.run.front() {
                    None => break None,
                    Some(place) => match place.find(messages) {
                        Some(entry) => break Some((place, entry)),
                        None => self.run.pop_front(),
                    },
                };
            };
            let (slot, is_ready) = match (next, self.returned.first()) {
                (Some((_, next)), Some(returned)) if returned.number < next.number() => {
                    self.returned.pop_first();
                    (returned.slot, is_ready(messages, returned))
                }
                (Some((place, next)), _) => {
                    self.run.pop_front();
                    (place.slot, next.is_ready())
                }
                (None, Some(returned)) => {
                    self.returned.pop_first();
                    (returned.slot, is_ready(messages, returned))
                }
                (None, None) => panic!("a flow that counts ready messages has one"),
            };
            if is_ready {
                return slot;
            }
        }
    }

    /// The next one to be taken. Forgets those before it that are no longer ready.
    fn next(&mut self, messages: &Messages) -> Option<Handle> {
        if self.ready == 0 {
            return None;
        }
        let next = loop {
            let Some(place) = self.run.front() else {
                break None;
            };
            match place.find(messages) {
                Some(entry) if entry.is_ready() => break Some(messages.handle(place.slot)),
                _ => self.run.pop_front(),
            };
        };
        while self
            .returned
            .first()
            .is_some_and(|first| !is_ready(messages, first))
        {
            self.returned.pop_first();
        }
        let returned = self.returned.first();
        next.into_iter().chain(returned).min()
    }

    /// Adds ready messages with lower numbers than this, until there are so many.
    fn list_before(&self, before: u64, most: usize, messages: &Messages, found: &mut Vec<u32>) {
        for place in self.run.iter() {
            let Some(entry) = place.find(messages) else {
                continue;
            };
            if entry.number() >= before || found.len() >= most {
                break;
            }
            if entry.is_ready() {
                found.push(place.slot);
            }
        }
        for handle in self.returned.iter() {
            if handle.number >= before || found.len() >= most {
                break;
            }
            if is_ready(messages, *handle) {
                found.push(handle.slot);
            }
        }
    }

    fn first_ready<'a>(&self, messages: &'a Messages) -> Option<&'a Entry> {
        let next = self.run.iter().find_map(|place| {
            let entry = place.find(messages)?;
            entry.is_ready().then_some(entry)
        });
        let returned = self
            .returned
            .iter()
            .find(|handle| is_ready(messages, **handle));
        let returned = returned.and_then(|handle| messages.get(*handle));
        next.into_iter()
            .chain(returned)
            .min_by_key(|entry| entry.number())
    }
}

/// A place in a run: a handle, of whose number the lower half will do. A place left behind is swept, or
/// passed by, long before its slot has been used by four billion others and one that looks like it.
#[derive(Clone, Copy, Debug)]
struct InRun {
    slot: u32,
    number: u32,
}

impl InRun {
    fn new(handle: Handle) -> Self {
        Self {
            slot: handle.slot,
            number: handle.number as u32,
        }
    }

    /// The message, unless the place is stale.
    fn find(self, messages: &Messages) -> Option<&Entry> {
        let entry = messages.by_slot(self.slot)?;
        (entry.number() as u32 == self.number).then_some(entry)
    }
}

fn is_ready(messages: &Messages, handle: Handle) -> bool {
    messages.get(handle).is_some_and(Entry::is_ready)
}
