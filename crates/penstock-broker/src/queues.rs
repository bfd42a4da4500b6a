//! Ready work: queue → priority → flow (the task) → first in, first out; and who waits for it.
//!
//! Flows of one priority share by measured cost. Each has a virtual time, which a hand-out moves on by
//! what the run is expected to cost, and a settlement corrects to what it did cost; the flow that is
//! furthest behind goes next. A flow that was idle rejoins at the present, so that it can't claim the
//! time it did not use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use penstock_faults::planted;
use penstock_message::{QueueLimits, SeededState};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Position;
use crate::kinds::Kind;
use crate::line::Line;
use crate::messages::{Entry, Handle, Messages, State};
use crate::names::Name;
use crate::task_sets::TaskSets;

/// What a run is expected to cost before any has been measured.
const UNKNOWN_COST_US: u32 = 1_000;

/// The moving average of what the runs of a task cost, in eighths of a microsecond; zero before the first.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    eighths: u64,
}

impl Cost {
    fn estimate_us(self) -> u32 {
        match self.eighths {
            0 => UNKNOWN_COST_US,
            eighths => u32::try_from(eighths / 8).unwrap_or(u32::MAX).max(1),
        }
    }

    fn add(&mut self, cost_us: u32) {
        self.eighths = match self.eighths {
            0 => u64::from(cost_us) * 8,
            eighths => eighths - eighths / 8 + u64::from(cost_us),
        };
    }
}

#[derive(Debug, Default)]
pub(crate) struct Queues {
    all: Vec<Queue>,
    by_name: Vec<Option<u32>>,
    costs: Vec<Cost>,
    /// How many queues have limits.
    pub(crate) limited: u32,
    pub(crate) sets: TaskSets,
    /// Queues that have work and somebody who may take it, in turn. Some may have lost either since.
    ring: VecDeque<u32>,
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

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) name: Name,
    levels: [Level; penstock_message::HIGHEST_PRIORITY as usize + 1],
    /// One bit for each level that has ready messages.
    ready_levels: u16,
    pub(crate) ready: u64,
    pub(crate) delayed: u64,
    /// Of the bodies of what is ready, and of what is delayed.
    pub(crate) ready_bytes: u64,
    pub(crate) delayed_bytes: u64,
    pub(crate) running: u64,
    pub(crate) consumers: u32,
    served: Vec<Served>,
    /// Of those, the ones that are asked first next time.
    next_served: usize,
    in_ring: bool,
    /// A timer waits to tell of tasks that none of the consumers can run; its generation.
    pub(crate) unknown_timer: Option<u64>,
    /// Tasks that were told of so, and still wait.
    pub(crate) told_unknown: FxHashSet<Name>,
    pub(crate) paused: bool,
    pub(crate) service: Service,
    /// Where the journal says that it is paused.
    pub(crate) base: Position,
    pub(crate) limits: QueueLimits,
    /// Where the journal tells of the limits.
    pub(crate) limits_base: Position,
    /// Since the start: transactions refused because it was full, and messages dropped to make room.
    pub(crate) refused: u64,
    pub(crate) dropped: u64,
    /// Messages with lower numbers that come to wait here were purged.
    pub(crate) purge_before: u64,
    /// How many of those that wait were purged.
    pub(crate) ending: u64,
    /// Failed jobs of this queue.
    pub(crate) failed: u64,
}

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
            ..Self::default()
        }
    }

    pub(crate) fn find(&self, name: Name) -> Option<u32> {
        self.by_name.get(name.index()).copied().flatten()
    }

    pub(crate) fn find_or_create(&mut self, name: Name) -> u32 {
        if self.by_name.len() <= name.index() {
            self.by_name.resize(name.index() + 1, None);
        }
        *self.by_name[name.index()].get_or_insert_with(|| {
            self.all.push(Queue::new(name));
            (self.all.len() - 1) as u32
        })
    }

    pub(crate) fn len(&self) -> u32 {
        self.all.len() as u32
    }

    /// Returns the limits it had.
    pub(crate) fn set_limits(&mut self, queue: u32, limits: QueueLimits) -> QueueLimits {
        let had = std::mem::replace(&mut self.all[queue as usize].limits, limits);
        self.limited += u32::from(!limits.is_none());
        self.limited -= u32::from(!had.is_none());
        had
    }

    /// Returns whether it is the first of a flow that none of the consumers can run.
    pub(crate) fn push_ready(&mut self, messages: &Messages, slot: u32) -> bool {
        let kind = messages.kind(slot);
        let queue = &mut self.all[kind.queue as usize];
        queue.ready += 1;
        queue.ready_bytes += messages.body_bytes(slot);
        let (served, sets) = (&queue.served, &self.sets);
        let level = &mut queue.levels[usize::from(kind.priority)];
        let is_unknown = level.push(kind.task, messages.handle(slot), || {
            is_wanted(served, sets, kind.task)
        });
        if !level.active.is_empty() {
            queue.ready_levels |= 1 << kind.priority;
        }
        self.activate(kind.queue);
        is_unknown
    }

    /// The queue has a turn, if it has work and anybody waits for it.
    pub(crate) fn activate(&mut self, index: u32) {
        let queue = &mut self.all[index as usize];
        let waits = |served: &Served| !served.waiting.is_empty();
        if queue.ready_levels > 0 && !queue.in_ring && queue.served.iter().any(waits) {
            queue.in_ring = true;
            self.ring.push_back(index);
        }
    }

    /// The queue whose turn it is. It has another one once it is given back to the ring.
    pub(crate) fn next_in_ring(&mut self) -> Option<u32> {
        let index = self.ring.pop_front()?;
        self.all[index as usize].in_ring = false;
        Some(index)
    }

    /// The queue is to go on at once.
    pub(crate) fn activate_first(&mut self, index: u32) {
        let queue = &mut self.all[index as usize];
        if !std::mem::replace(&mut queue.in_ring, true) {
            self.ring.push_front(index);
        }
    }

    /// A consumer takes from the queue from now on. `tasks`: those that it can run.
    pub(crate) fn subscribe(&mut self, index: u32, tasks: Option<u32>) {
        let queue = &mut self.all[index as usize];
        queue.consumers += 1;
        let same = queue.served.iter_mut().find(|served| served.tasks == tasks);
        match same {
            Some(served) => served.consumers += 1,
            None => {
                queue.served.push(Served {
                    tasks,
                    consumers: 1,
                    waiting: VecDeque::new(),
                });
                self.review_flows(index);
            }
        }
    }

    /// A consumer that could run these tasks does not take from the queue any more. `waiter`: its entry in the
    /// ring, if it has one; others would pile up where there is no work to meet them.
    pub(crate) fn unsubscribe(&mut self, index: u32, tasks: Option<u32>, waiter: Option<Waiter>) {
        let queue = &mut self.all[index as usize];
        queue.consumers -= 1;
        let served = queue.served.iter_mut();
        let place = served
            .into_iter()
            .position(|served| served.tasks == tasks)
            .expect("it has subscribed");
        queue.served[place].consumers -= 1;
        if let Some(waiter) = waiter {
            let waiting = &mut queue.served[place].waiting;
            waiting.retain(|other| *other != waiter);
        }
        if queue.served[place].consumers == 0 {
            queue.served.remove(place);
            self.review_flows(index);
        }
    }

    /// A consumer waits for work of the queue.
    pub(crate) fn enroll(&mut self, index: u32, tasks: Option<u32>, waiter: Waiter) {
        let queue = &mut self.all[index as usize];
        let mut served = queue.served.iter_mut();
        let served = served
            .find(|served| served.tasks == tasks)
            .expect("it has subscribed");
        served.waiting.push_back(waiter);
        self.activate(index);
    }

    /// A consumer waits for work of the queue, before all others.
    pub(crate) fn enroll_first(&mut self, index: u32, tasks: Option<u32>, waiter: Waiter) {
        let mut served = self.all[index as usize].served.iter_mut();
        let served = served
            .find(|served| served.tasks == tasks)
            .expect("it has subscribed");
        served.waiting.push_front(waiter);
    }

    /// Finds out anew which flows anybody can run.
    fn review_flows(&mut self, index: u32) {
        let queue = &mut self.all[index as usize];
        let (served, sets) = (&queue.served, &self.sets);
        queue.ready_levels = 0;
        for (priority, level) in queue.levels.iter_mut().enumerate() {
            level.review(|task| is_wanted(served, sets, task));
            queue.ready_levels |= u16::from(!level.active.is_empty()) << priority;
        }
        self.activate(index);
    }

    /// Takes the message that is next, for one of those who wait and can run it, in turn. What its run is
    /// expected to cost is charged to its flow. `None`: there is nothing for any of them, or the queue is
    /// paused. Whoever is not found to want work any more leaves the ring.
    pub(crate) fn take_next(
        &mut self,
        index: u32,
        messages: &Messages,
        mut wants: impl FnMut(Waiter) -> bool,
    ) -> Option<(Waiter, u32, u32)> {
        let queue = &mut self.all[index as usize];
        if queue.ready_levels == 0 || queue.paused && !planted!("serve-paused") {
            return None;
        }
        let count = queue.served.len();
        for turn in 0..count {
            let place = (queue.next_served + turn) % count;
            let served = &mut queue.served[place];
            while served.waiting.front().is_some_and(|waiter| !wants(*waiter)) {
                served.waiting.pop_front();
            }
            let Some(waiter) = served.waiting.front().copied() else {
                continue;
            };
            let Some((priority, active)) = queue.find_active(place, &self.sets) else {
                continue;
            };
            queue.served[place].waiting.pop_front();
            queue.next_served = (place + 1) % count;
            let level = &mut queue.levels[priority];
            let (slot, estimate_us) = level.pop(active, messages, &self.costs);
            if level.active.is_empty() {
                queue.ready_levels &= !(1 << priority);
            }
            queue.ready -= 1;
            queue.ready_bytes -= messages.body_bytes(slot);
            return Some((waiter, slot, estimate_us));
        }
        None
    }

    /// A ready message goes another way than by being handed out.
    pub(crate) fn remove_ready(&mut self, messages: &Messages, slot: u32) {
        let kind = messages.kind(slot);
        let queue = &mut self.all[kind.queue as usize];
        let level = &mut queue.levels[usize::from(kind.priority)];
        level.forget_one(kind.task, messages);
        if level.active.is_empty() {
            queue.ready_levels &= !(1 << kind.priority);
        }
        queue.ready -= 1;
        queue.ready_bytes -= messages.body_bytes(slot);
    }

    /// A message had a body of so many bytes, and may now be without.
    pub(crate) fn body_was_lost(&mut self, messages: &Messages, slot: u32, was_bytes: u64) {
        let lost = was_bytes - messages.body_bytes(slot);
        let queue = &mut self.all[messages.queue(slot) as usize];
        match messages.state(slot) {
            State::Ready => queue.ready_bytes -= lost,
            State::Delayed(_) => queue.delayed_bytes -= lost,
            State::Held(_) | State::Leased(_) | State::Failed | State::Ended => {}
        }
    }

    /// A run has ended: it cost what it cost, or nothing at all when it was handed back.
    pub(crate) fn correct_cost(
        &mut self,
        queue: u32,
        priority: u8,
        task: Name,
        estimate_us: u32,
        cost_us: Option<u64>,
    ) {
        let cost_us = cost_us.map_or(0, |cost| {
            let cost = cost.clamp(1, u64::from(u32::MAX)) as u32;
            if self.costs.len() <= task.index() {
                self.costs.resize(task.index() + 1, Cost::default());
            }
            self.costs[task.index()].add(cost);
            cost
        });
        let level = &mut self.all[queue as usize].levels[usize::from(priority)];
        level.correct(task, i64::from(cost_us) - i64::from(estimate_us));
    }

    /// A run of this kind has cost more by now than its flow was charged.
    pub(crate) fn charge(&mut self, kind: &Kind, more_us: u32) {
        let level = &mut self.all[kind.queue as usize].levels[usize::from(kind.priority)];
        level.correct(kind.task, i64::from(more_us));
    }

    pub(crate) fn estimate_us(&self, task: Name) -> u32 {
        estimate_us(&self.costs, task)
    }

    /// How many ready messages somebody with one of these sets of tasks can run.
    pub(crate) fn ready_for(&self, index: u32, sets: &[Option<u32>]) -> usize {
        let levels = self.all[index as usize].levels.iter();
        let flows = levels.flat_map(|level| &level.flows);
        let known = flows.filter(|flow| sets.iter().any(|set| self.sets.has(*set, flow.task)));
        known.map(|flow| flow.ready).sum()
    }

    /// Flows with work that none of the queue's consumers can run, as (task, ready messages).
    pub(crate) fn unknown_tasks(&self, index: u32) -> impl Iterator<Item = (Name, usize)> {
        let levels = self.all[index as usize].levels.iter();
        let flows = levels.flat_map(|level| &level.flows);
        let unknown = flows.filter(|flow| flow.ready > 0 && !flow.is_wanted);
        unknown.map(|flow| (flow.task, flow.ready))
    }

    /// Ready messages that none of the queue's consumers can run.
    pub(crate) fn unknown(&self, index: u32) -> u64 {
        let flows = self.unknown_tasks(index);
        flows.map(|(_, ready)| ready as u64).sum()
    }

    /// Panics unless the flows count these ready messages, and no others.
    pub(crate) fn assert_flows_hold(&self, expected: &BTreeMap<(u32, u8, Name), usize>) {
        let mut flows = BTreeMap::new();
        for (index, queue) in self.all.iter().enumerate() {
            for (priority, level) in queue.levels.iter().enumerate() {
                let is_marked = queue.ready_levels >> priority & 1 == 1;
                assert_eq!(
                    is_marked,
                    !level.active.is_empty(),
                    "the mark of a priority"
                );
                for (place, flow) in level.flows.iter().enumerate() {
                    let is_active = level.active.contains(&(flow.virtual_time, place as u32));
                    let is_wanted = is_wanted(&queue.served, &self.sets, flow.task);
                    assert_eq!(flow.is_wanted, is_wanted, "whether anybody can run a flow");
                    assert_eq!(
                        is_active,
                        flow.ready > 0 && is_wanted,
                        "a flow takes part while it has messages that somebody can run"
                    );
                    if flow.ready > 0 {
                        flows.insert((index as u32, priority as u8, flow.task), flow.ready);
                    }
                }
            }
        }
        assert_eq!(flows, *expected, "the ready messages of all flows");
    }

    /// The oldest ready message of the lowest priority that has any.
    pub(crate) fn oldest_of_lowest(&mut self, queue: u32, messages: &Messages) -> Option<u32> {
        let queue = &mut self.all[queue as usize];
        if queue.ready == 0 {
            return None;
        }
        queue.levels.iter_mut().find_map(|level| {
            let flows = level.flows.iter_mut();
            let oldest = flows.filter_map(|flow| flow.next(messages)).min();
            oldest.map(|handle| handle.slot)
        })
    }

    /// The number of the message that is next, or one near it.
    pub(crate) fn next_number(&mut self, queue: u32, messages: &Messages) -> Option<u64> {
        let queue = &mut self.all[queue as usize];
        let priority = queue.ready_levels.checked_ilog2()? as usize;
        let level = &mut queue.levels[priority];
        let (_, index) = *level.active.first()?;
        let next = level.flows[index as usize].next(messages);
        next.map(|handle| handle.number)
    }

    /// Gives its flow back what the message was charged when it was popped.
    pub(crate) fn refund(&mut self, messages: &Messages, slot: u32, estimate_us: u32) {
        let kind = messages.kind(slot);
        let level = &mut self.all[kind.queue as usize].levels[usize::from(kind.priority)];
        level.correct(kind.task, -i64::from(estimate_us));
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
        for level in &mut self.all[queue as usize].levels {
            for flow in &mut level.flows {
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
        let flows = self.all[queue as usize]
            .levels
            .iter()
            .flat_map(|level| &level.flows);
        flows
            .filter_map(|flow| flow.first_ready(messages))
            .min_by_key(|entry| entry.number())
    }
}

impl std::ops::Index<u32> for Queues {
    type Output = Queue;

    fn index(&self, queue: u32) -> &Queue {
        &self.all[queue as usize]
    }
}

impl std::ops::IndexMut<u32> for Queues {
    fn index_mut(&mut self, queue: u32) -> &mut Queue {
        &mut self.all[queue as usize]
    }
}

impl Queue {
    fn new(name: Name) -> Self {
        Self {
            name,
            levels: std::array::from_fn(|_| Level::default()),
            ready_levels: 0,
            ready: 0,
            delayed: 0,
            running: 0,
            consumers: 0,
            served: Vec::new(),
            next_served: 0,
            in_ring: false,
            unknown_timer: None,
            told_unknown: FxHashSet::default(),
            paused: false,
            service: Service::Well,
            base: Position(0),
            ready_bytes: 0,
            delayed_bytes: 0,
            limits: QueueLimits::NONE,
            limits_base: Position(0),
            refused: 0,
            dropped: 0,
            purge_before: 0,
            ending: 0,
            failed: 0,
        }
    }

    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.ready_bytes + self.delayed_bytes
    }

    /// How many consumers stand in its ring.
    pub(crate) fn waiting(&self) -> usize {
        self.served.iter().map(|served| served.waiting.len()).sum()
    }

    /// The priority and the flow of the next message for these consumers, if there is any.
    fn find_active(&self, served: usize, sets: &TaskSets) -> Option<(usize, (u64, u32))> {
        let tasks = self.served[served].tasks;
        let mut left = self.ready_levels;
        while left != 0 {
            let priority = match planted!("ignore-priority") {
                true => left.trailing_zeros(),
                false => left.ilog2(),
            } as usize;
            left &= !(1 << priority);
            let level = &self.levels[priority];
            let mut active = level.active.iter();
            let found = active.find(|(_, flow)| {
                sets.has(tasks, level.flows[*flow as usize].task) || planted!("send-any-task")
            });
            if let Some(active) = found {
                return Some((priority, *active));
            }
        }
        None
    }
}

/// Whether any of the consumers of a queue can run the task, or it has none.
fn is_wanted(served: &[Served], sets: &TaskSets, task: Name) -> bool {
    served.is_empty() || served.iter().any(|served| sets.has(served.tasks, task))
}

fn estimate_us(costs: &[Cost], task: Name) -> u32 {
    costs
        .get(task.index())
        .copied()
        .unwrap_or_default()
        .estimate_us()
}

/// The flows of one priority.
#[derive(Debug, Default)]
struct Level {
    flows: Vec<Flow>,
    by_task: FxHashMap<Name, u32>,
    /// Flows that have ready messages which somebody can run, by virtual time.
    active: BTreeSet<(u64, u32)>,
    /// The virtual time at which the last message was taken: the present.
    present: u64,
}

#[derive(Debug)]
struct Flow {
    task: Name,
    virtual_time: u64,
    ready: usize,
    /// Some consumer of the queue can run its task, or the queue has none.
    is_wanted: bool,
    /// In order of number; some may be stale.
    run: Line<InRun>,
    /// The number of the last in the run.
    last_number: u64,
    /// Those that came back after a younger one had come: taken by number among the others.
    returned: BTreeSet<Handle>,
}

impl Level {
    fn push(&mut self, task: Name, handle: Handle, is_wanted: impl FnOnce() -> bool) -> bool {
        let index = *self.by_task.entry(task).or_insert_with(|| {
            self.flows.push(Flow::new(task, is_wanted()));
            (self.flows.len() - 1) as u32
        });
        let flow = &mut self.flows[index as usize];
        if flow.ready == 0 && flow.is_wanted {
            flow.virtual_time = flow.virtual_time.max(self.present);
            self.active.insert((flow.virtual_time, index));
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
    fn review(&mut self, is_wanted: impl Fn(Name) -> bool) {
        for (index, flow) in self.flows.iter_mut().enumerate() {
            let was_wanted = std::mem::replace(&mut flow.is_wanted, is_wanted(flow.task));
            if flow.ready == 0 || was_wanted == flow.is_wanted {
                continue;
            }
            if was_wanted {
                self.active.remove(&(flow.virtual_time, index as u32));
            } else {
                flow.virtual_time = flow.virtual_time.max(self.present);
                self.active.insert((flow.virtual_time, index as u32));
            }
        }
    }

    /// Takes the next message of an active flow.
    fn pop(&mut self, active: (u64, u32), messages: &Messages, costs: &[Cost]) -> (u32, u32) {
        let (virtual_time, index) = active;
        // Others may be behind that wait for consumers of their own.
        self.present = self.present.max(virtual_time);
        let flow = &mut self.flows[index as usize];
        let slot = flow.pop(messages);
        let estimate_us = estimate_us(costs, flow.task);
        flow.ready -= 1;
        flow.virtual_time += u64::from(estimate_us);
        self.active.remove(&active);
        if flow.ready > 0 {
            self.active.insert((flow.virtual_time, index));
        } else {
            flow.run.clear();
            flow.returned.clear();
        }
        (slot, estimate_us)
    }

    fn forget_one(&mut self, task: Name, messages: &Messages) {
        let index = self.by_task[&task];
        let flow = &mut self.flows[index as usize];
        flow.ready -= 1;
        if flow.ready == 0 {
            self.active.remove(&(flow.virtual_time, index));
            flow.run.clear();
            flow.returned.clear();
        } else if flow.run.len() + flow.returned.len() > 2 * flow.ready + 64 {
            // Called while the message still looks ready; it is dropped at the next sweep or pop.
            flow.run
                .retain(|place| place.find(messages).is_some_and(Entry::is_ready));
            flow.returned.retain(|handle| is_ready(messages, *handle));
        }
    }

    fn correct(&mut self, task: Name, by_us: i64) {
        // The flow may be unknown: after a restart, for a run that was handed out before it.
        let Some(&index) = self.by_task.get(&task) else {
            return;
        };
        let flow = &mut self.flows[index as usize];
        if by_us == 0 {
            return;
        }
        let corrected = flow.virtual_time.saturating_add_signed(by_us);
        if flow.ready > 0 && flow.is_wanted {
            self.active.remove(&(flow.virtual_time, index));
            self.active.insert((corrected, index));
        }
        flow.virtual_time = corrected;
    }
}

impl Flow {
    fn new(task: Name, is_wanted: bool) -> Self {
        Self {
            task,
            virtual_time: 0,
            ready: 0,
            is_wanted,
            run: Line::default(),
            last_number: 0,
            returned: BTreeSet::new(),
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
            let (slot, is_ready) = match (next, self.returned.first().copied()) {
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
            .is_some_and(|first| !is_ready(messages, *first))
        {
            self.returned.pop_first();
        }
        let returned = self.returned.first().copied();
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
        for handle in &self.returned {
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
