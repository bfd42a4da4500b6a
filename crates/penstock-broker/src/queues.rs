//! Ready work by queue, priority and flow (the task), first in, first out; and the consumers that wait for it.
//!
//! Flows of one priority share time by measured cost. Each has a virtual time. A hand-out advances it by the expected
//! cost of the run, and the settlement corrects that to the actual cost. The flow that is furthest behind goes next. A
//! flow that was idle rejoins at the present, so that it can't claim the time it did not use.

pub(crate) mod active_flows;
pub(crate) mod awaited_ready;
pub(crate) mod flows;
pub(crate) mod limits;
pub(crate) mod queue;
pub(crate) mod readiness;
pub(crate) mod run_charges;
pub(crate) mod tally;
pub(crate) mod task_sets;
pub(crate) mod tasks;
pub(crate) mod unused;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use penstock_faults::planted;
use penstock_message::{Others, QueueLimits, SeededMap, SeededState};

use crate::messages::entry::MessageEntry;
use crate::messages::shared_heads::SharedHead;
use crate::messages::{EntryState, Messages};
use crate::queues::flows::{Flow, FlowChoice, FlowKey};
use crate::queues::queue::{Queue, Served, Serving, WaitingConsumer, is_wanted};
use crate::queues::readiness::Readiness;
use crate::queues::run_charges::Charge;
use crate::queues::tally::{Counter, TallyCounts, TallyStep};
use crate::queues::task_sets::TaskSets;
use crate::queues::tasks::{ByName, TaskTable};
use crate::table::boxed_slab::BoxedSlab;
use crate::table::interner::{Interner, Name};

#[derive(Debug, Default)]
pub(crate) struct Queues {
    all: BoxedSlab<Queue>,
    pub(crate) by_name: ByName,
    pub(crate) tasks: TaskTable,
    flows: BoxedSlab<Flow>,
    by_key: SeededMap<FlowKey, u32>,
    /// Queues and tasks that do not yet have the timer that forgets them.
    pub(crate) new: Vec<Forgettable>,
    /// Counts of forgotten queues and tasks.
    pub(crate) others: Others,
    /// Current step of the tallies.
    pub(crate) now: TallyStep,
    /// Current time on the steady clock.
    pub(crate) now_ms: u64,
    /// Number of queues that have limits.
    pub(crate) limited: u32,
    pub(crate) sets: TaskSets,
    /// Queues that have work and a consumer that may take it, in turn. Some may have lost either since.
    ring: VecDeque<u32>,
}

/// A queue or a task, which is forgotten once it has not been in use for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Forgettable {
    Queue(u32),
    Task(u32),
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
    pub(crate) fn find_or_create(&mut self, name: Name, names: &mut Interner) -> u32 {
        match self.find(name) {
            Some(queue) => queue,
            None => self.create(name, names),
        }
    }

    fn create(&mut self, name: Name, names: &mut Interner) -> u32 {
        let queue = self.all.insert(Queue::new(name, self.now));
        self.by_name.insert(name, queue, names);
        self.new.push(Forgettable::Queue(queue));
        queue
    }

    /// Prepares for a message of the task.
    #[inline]
    pub(crate) fn know_task(&mut self, name: Name, names: &mut Interner) {
        let (task, is_new) = self.tasks.find_or_create(name, self.now, names);
        if is_new {
            self.new.push(Forgettable::Task(task));
        }
    }

    /// Adds counts of messages with this shared head.
    pub(crate) fn add_counts(&mut self, shared_head: &SharedHead, counts: &TallyCounts) {
        let task = self.tasks.find(shared_head.task);
        let task = task.expect("the task of a message is known");
        self.tasks.all[task].tally.add(counts, self.now);
        self.all[shared_head.queue].tally.add(counts, self.now);
    }

    /// Counts a message that has arrived from another queue.
    pub(crate) fn count_arrival(&mut self, index: u32) {
        self.all[index].tally.count(Counter::Enqueued, self.now);
    }

    /// Notes that the queue or task is in use, or was until now.
    pub(crate) fn touch(&mut self, what: Forgettable) {
        let tally = match what {
            Forgettable::Queue(queue) => &mut self.all[queue].tally,
            Forgettable::Task(task) => &mut self.tasks.all[task].tally,
        };
        tally.touch(self.now);
    }

    pub(crate) fn last_use(&self, what: Forgettable) -> TallyStep {
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

    /// Forgets a queue or a task without messages, except for its counts.
    pub(crate) fn forget(&mut self, what: Forgettable, names: &mut Interner) {
        match what {
            Forgettable::Queue(index) => self.forget_queue(index, names),
            Forgettable::Task(task) => {
                let task = self.tasks.remove(task, names);
                self.others.tasks += 1;
                tally::add(&mut self.others.of_tasks, task.tally.counts());
            }
        }
    }

    fn forget_queue(&mut self, index: u32, names: &mut Interner) {
        let queue = self.all.remove(index);
        debug_assert!(queue.levels.is_none());
        self.by_name.remove(queue.name, names);
        for task in &queue.rare().told_unknown {
            names.release(*task);
        }
        if queue.in_ring {
            self.ring.retain(|other| *other != index);
        }
        self.others.queues += 1;
        self.others.refused += queue.rare().refused;
        tally::add(&mut self.others.of_queues, queue.tally.counts());
    }

    // --- flows

    /// Returns the flow of messages with this shared head, and adds a user to it.
    pub(crate) fn acquire_flow(&mut self, shared_head: &SharedHead) -> u32 {
        let key = FlowKey {
            queue: shared_head.queue,
            priority: shared_head.priority,
            task: shared_head.task,
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

    /// Removes a shared head from the users of the flow, which is dropped with its last user. Its charge beyond the
    /// present is forgotten too. That is the cost of its last runs, and unused heads are kept for a while anyway.
    pub(crate) fn release_flow(&mut self, slot: u32) {
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

    /// Sets the limits of a queue. Returns its previous ones.
    pub(crate) fn set_limits(&mut self, queue: u32, limits: QueueLimits) -> QueueLimits {
        let had = std::mem::replace(&mut self.all[queue].rare_mut().limits, limits);
        self.limited += u32::from(!limits.is_none());
        self.limited -= u32::from(!had.is_none());
        had
    }

    /// Adds a ready message. Returns whether it is the first of a flow that none of the consumers can run.
    pub(crate) fn push_ready(&mut self, messages: &Messages, slot: u32, flow: u32) -> bool {
        let shared_head = messages.shared_head(slot);
        let queue = &mut self.all[shared_head.queue];
        queue.ready += 1;
        queue.ready_bytes += messages.body_bytes(slot);
        let level = queue.level_mut(shared_head.priority);
        let is_unknown = level.push(flow, &mut self.flows[flow], messages.handle(slot));
        if !level.active.is_empty() {
            queue.ready_levels |= 1 << shared_head.priority;
        }
        self.activate(shared_head.queue);
        is_unknown
    }

    /// Gives the queue a turn, if it has work and a waiting consumer.
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

    /// Takes the queue whose turn it is. It has no other turn until it is put back into the ring.
    pub(crate) fn next_in_ring(&mut self) -> Option<u32> {
        let index = self.ring.pop_front()?;
        self.all[index].in_ring = false;
        Some(index)
    }

    /// Gives the queue the next turn.
    pub(crate) fn activate_first(&mut self, index: u32) {
        let queue = &mut self.all[index];
        if !std::mem::replace(&mut queue.in_ring, true) {
            self.ring.push_front(index);
        }
    }

    /// Adds a consumer of the queue that can run `tasks`. Returns whether it is the first with these.
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

    /// Finds another app's set of tasks, among those of the queue's consumers, that overlaps with these tasks. Returns
    /// the set, one shared task, and the number of other shared tasks.
    pub(crate) fn shared_tasks(&self, index: u32, tasks: Option<u32>) -> Option<(u32, Name, u64)> {
        let served = self.all[index].served();
        let mut others = served.iter().filter_map(|served| served.tasks);
        others.find_map(|other| {
            let (task, more) = self.sets.shared(tasks?, other)?;
            Some((other, task, more))
        })
    }

    /// Removes a consumer of the queue that could run these tasks. `waiter` is its entry in the ring, if it has one.
    /// Stale entries would pile up in a queue without work to remove them.
    pub(crate) fn unsubscribe(
        &mut self,
        index: u32,
        tasks: Option<u32>,
        waiter: Option<WaitingConsumer>,
    ) {
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

    /// Returns the consumers of the queue that can run these tasks.
    fn served_mut(&mut self, index: u32, tasks: Option<u32>) -> &mut Served {
        let serving = self.all[index].serving.as_mut();
        let mut served = serving
            .into_iter()
            .flat_map(|serving| &mut serving.by_tasks);
        served
            .find(|served| served.tasks == tasks)
            .expect("it has subscribed")
    }

    /// Adds a consumer that waits for work of the queue.
    pub(crate) fn enroll(&mut self, index: u32, tasks: Option<u32>, waiter: WaitingConsumer) {
        self.served_mut(index, tasks).waiting.push_back(waiter);
        self.activate(index);
    }

    /// Adds a consumer that waits for work of the queue, ahead of all others.
    pub(crate) fn enroll_first(&mut self, index: u32, tasks: Option<u32>, waiter: WaitingConsumer) {
        self.served_mut(index, tasks).waiting.push_front(waiter);
    }

    /// Determines again which flows any consumer can run.
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

    /// Takes the next message for a waiting consumer that can run it; consumers take turns. Charges the expected cost
    /// of the run to its flow. Returns `None` if there is nothing for any of them, the next message was purged and has
    /// yet to end, or the queue is paused. A consumer that no longer wants work leaves the ring.
    pub(crate) fn take_next(
        &mut self,
        index: u32,
        messages: &Messages,
        mut wants: impl FnMut(WaitingConsumer) -> bool,
    ) -> Option<(WaitingConsumer, u32, Charge)> {
        /// Maximum number of flows that are charged before the next one is taken without a charge.
        const CHARGED_AT_ONCE: usize = 16;
        let now_ms = self.now_ms;
        let queue = &mut self.all[index];
        if queue.ready_levels == 0 || queue.paused && !planted!("serve-paused") {
            return None;
        }
        let count = queue.served().len();
        for turn in 0..count {
            let serving = queue.serving.as_mut()?;
            // Some consumers may have left since.
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
                let Some((priority, FlowChoice { flow, .. })) = found else {
                    break;
                };
                let flow = flow.1;
                let level = queue.level_mut(priority);
                if !level.charge(flow, &mut self.flows[flow], now_ms) {
                    break;
                }
                found = queue.find_active(tasks, &self.flows, &self.sets);
            }
            let Some((priority, choice)) = found else {
                continue;
            };
            let purge_before = queue.rare().purge_before;
            if purge_before > 0
                && !planted!("lose-purge")
                && (choice.awaited)
                    .or_else(|| self.flows[choice.flow.1].next(messages))
                    .is_some_and(|next| next.number < purge_before)
            {
                // Purged messages end first, in steps.
                return None;
            }
            let serving = queue.serving.as_mut()?;
            serving.by_tasks[place].waiting.pop_front();
            serving.next = if place + 1 < count { place + 1 } else { 0 };
            serving.readiness.set(true, self.now_ms);
            let level = queue.level_mut(priority);
            let (slot, charge) = level.pop(choice, &mut self.flows, messages, &self.tasks, now_ms);
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

    /// Moves a ready message that a running job waits for ahead of others of its level.
    pub(crate) fn prioritize(&mut self, messages: &Messages, slot: u32, depth: u32) {
        let shared_head = messages.shared_head(slot);
        let flow = messages.flow(slot).expect("a ready message has a flow");
        let level = self.all[shared_head.queue].level_mut(shared_head.priority);
        level.prioritize(flow, &mut self.flows[flow], messages.handle(slot), depth);
    }

    /// Notes that a job of this flow waits for others.
    pub(crate) fn note_waiting(&mut self, flow: u32) {
        self.flows[flow].waits = true;
    }

    /// Panics unless awaited messages are ready, and in their flows.
    pub(crate) fn assert_awaited(&self, messages: &Messages) {
        for (_, queue) in self.all.iter() {
            for level in queue.levels() {
                let has_awaited = |flow: &&u32| self.flows[**flow].awaited.is_some();
                let flows: BTreeSet<u32> =
                    level.flows.iter().filter(has_awaited).copied().collect();
                assert_eq!(
                    flows,
                    level.awaited.iter().copied().collect(),
                    "awaited flows"
                );
                assert_eq!(flows.len(), level.awaited.len(), "awaited flows, each once");
                for flow in flows {
                    let awaited = self.flows[flow].awaited.as_ref();
                    let awaited = awaited.expect("it has some");
                    assert!(!awaited.is_empty(), "a list of awaited messages is empty");
                    awaited.assert_paired();
                    for handle in awaited.iter() {
                        let entry = messages.get(handle);
                        assert!(
                            entry.is_some_and(MessageEntry::is_ready),
                            "what is awaited is ready"
                        );
                        assert_eq!(messages.flow(handle.slot), Some(flow), "its flow");
                    }
                }
            }
        }
    }

    /// Removes a ready message without handing it out.
    pub(crate) fn remove_ready(&mut self, messages: &Messages, slot: u32) {
        let shared_head = messages.shared_head(slot);
        let queue = &mut self.all[shared_head.queue];
        let level = queue.level_mut(shared_head.priority);
        let flow = messages.flow(slot).expect("a ready message has a flow");
        level.forget_one(flow, &mut self.flows[flow], messages, slot);
        if level.active.is_empty() {
            queue.ready_levels &= !(1 << shared_head.priority);
            queue.review_readiness(self.now_ms);
        }
        queue.ready -= 1;
        queue.ready_bytes -= messages.body_bytes(slot);
    }

    /// Notes that a message had a body of `was_bytes`, and may have lost it.
    pub(crate) fn body_was_lost(&mut self, messages: &Messages, slot: u32, was_bytes: u64) {
        let lost = was_bytes - messages.body_bytes(slot);
        let queue = &mut self.all[messages.queue(slot)];
        match messages.state(slot) {
            EntryState::Ready => queue.ready_bytes -= lost,
            EntryState::Delayed(_) => queue.delayed_bytes -= lost,
            EntryState::Held(_)
            | EntryState::Leased(_)
            | EntryState::Failed
            | EntryState::Ended => {}
        }
    }

    /// Corrects the charge of an ended run to its actual cost, or to nothing if it was returned.
    pub(crate) fn correct_cost(
        &mut self,
        messages: &Messages,
        slot: u32,
        charge: Option<Charge>,
        cost_us: Option<u64>,
    ) {
        let cost_us = cost_us.map_or(0, |cost| {
            let cost = cost.clamp(1, u64::from(u32::MAX)) as u32;
            if let Some(task) = self.tasks.find(messages.shared_head(slot).task) {
                self.tasks.all[task].cost.add(cost);
            }
            cost
        });
        if let Some(charge) = charge {
            self.end_run(messages, slot, charge, cost_us);
        }
    }

    /// Refunds the charge of a popped message to its flow.
    pub(crate) fn refund(&mut self, messages: &Messages, slot: u32, charge: Charge) {
        self.end_run(messages, slot, charge, 0);
    }

    fn end_run(&mut self, messages: &Messages, slot: u32, charge: Charge, cost_us: u32) {
        let flow = messages
            .flow(slot)
            .expect("a run that is charged has a flow");
        let shared_head = messages.shared_head(slot);
        let level = self.all[shared_head.queue].level_mut(shared_head.priority);
        let back_us = self.flows[flow].running.end(charge, self.now_ms);
        let by_us = i64::from(cost_us) - i64::from(charge.estimate_us.get());
        let by_us = by_us.saturating_sub_unsigned(back_us);
        level.correct(flow, &mut self.flows[flow], by_us);
    }

    /// Charges the flow of a run that exists after a recovery.
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

    /// Returns the flows of a queue, by priority.
    fn flows_of(&self, index: u32) -> impl Iterator<Item = &Flow> {
        let levels = self.all[index].levels();
        let flows = levels.flat_map(|level| &level.flows);
        flows.map(|flow| &self.flows[*flow])
    }

    /// Counts the delayed messages.
    pub(crate) fn delayed(&self) -> u64 {
        self.all.iter().map(|(_, queue)| queue.delayed).sum()
    }

    /// Counts the ready messages that a consumer with one of these sets of tasks can run.
    pub(crate) fn ready_for(&self, index: u32, sets: &[Option<u32>]) -> usize {
        let known = self.flows_of(index).filter(|flow| {
            let mut sets = sets.iter();
            sets.any(|set| self.sets.has(*set, flow.key.task))
        });
        known.map(|flow| flow.ready).sum()
    }

    /// Returns the flows with work that none of the queue's consumers can run, as (task, ready messages).
    pub(crate) fn unknown_tasks(&self, index: u32) -> impl Iterator<Item = (Name, usize)> {
        let flows = self.flows_of(index);
        let unknown = flows.filter(|flow| flow.ready > 0 && !flow.is_wanted);
        unknown.map(|flow| (flow.key.task, flow.ready))
    }

    /// Whether a consumer of the queue can run the task, or the queue has no consumers.
    pub(crate) fn has_taker(&self, index: u32, task: Name) -> bool {
        is_wanted(self[index].served(), &self.sets, task)
    }

    /// Counts the ready messages that none of the queue's consumers can run.
    pub(crate) fn unknown(&self, index: u32) -> u64 {
        let flows = self.unknown_tasks(index);
        flows.map(|(_, ready)| ready as u64).sum()
    }

    /// Panics unless the flows count exactly these ready messages, users and runs.
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

    /// Returns the oldest ready message of the lowest priority that has any with a number below `before`.
    pub(crate) fn oldest_of_lowest(
        &mut self,
        queue: u32,
        before: u64,
        messages: &Messages,
    ) -> Option<u32> {
        let queue = &self.all[queue];
        if queue.ready == 0 {
            return None;
        }
        let flows = &mut self.flows;
        queue.levels().find_map(|level| {
            let next = |flow: &u32| flows[*flow].next(messages);
            // The next message of a flow has its lowest number.
            let next = level.flows.iter().filter_map(next);
            let oldest = next.filter(|handle| handle.number < before).min();
            oldest.map(|handle| handle.slot)
        })
    }

    /// Returns up to `most` ready messages with numbers below `before`, in an arbitrary order.
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
                // `next` also forgets stale entries, so a later call finds the message at once.
                if flow.next(messages).is_some_and(|next| next.number < before) {
                    flow.list_before(before, most, messages, &mut found);
                }
            }
        }
        found
    }

    /// Returns the ready message that has waited longest.
    pub(crate) fn oldest_ready<'a>(
        &self,
        queue: u32,
        messages: &'a Messages,
    ) -> Option<&'a MessageEntry> {
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
