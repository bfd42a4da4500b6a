//! Ready work: queue → priority → flow (the task) → first in, first out.
//!
//! Flows of one priority share by measured cost. Each has a virtual time, which a hand-out moves on by
//! what the run is expected to cost, and a settlement corrects to what it did cost; the flow that is
//! furthest behind goes next. A flow that was idle rejoins at the present, so that it can't claim the
//! time it did not use.

use std::collections::{BTreeMap, BTreeSet};

use penstock_faults::planted;
use penstock_message::QueueLimits;
use rustc_hash::FxHashMap;

use crate::Position;
use crate::line::Line;
use crate::messages::{Entry, Handle, Messages, State};
use crate::names::Name;

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

    pub(crate) fn push_ready(&mut self, messages: &Messages, slot: u32) {
        let kind = messages.kind(slot);
        let queue = &mut self.all[kind.queue as usize];
        queue.ready += 1;
        queue.ready_bytes += messages.body_bytes(slot);
        queue.ready_levels |= 1 << kind.priority;
        queue.levels[usize::from(kind.priority)].push(kind.task, messages.handle(slot));
    }

    /// Takes the message that is next, unless there is none or the queue is paused. What its run is
    /// expected to cost is charged to its flow.
    pub(crate) fn pop_ready(&mut self, queue: u32, messages: &Messages) -> Option<(u32, u32)> {
        let queue = &mut self.all[queue as usize];
        if queue.ready == 0 || queue.paused && !planted!("serve-paused") {
            return None;
        }
        let priority = match planted!("ignore-priority") {
            true => queue.ready_levels.trailing_zeros(),
            false => queue.ready_levels.ilog2(),
        } as usize;
        let level = &mut queue.levels[priority];
        let taken = level.pop(messages, &self.costs);
        if level.active.is_empty() {
            queue.ready_levels &= !(1 << priority);
        }
        queue.ready -= 1;
        queue.ready_bytes -= messages.body_bytes(taken.0);
        Some(taken)
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

    pub(crate) fn estimate_us(&self, task: Name) -> u32 {
        estimate_us(&self.costs, task)
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
                    assert_eq!(
                        is_active,
                        flow.ready > 0,
                        "a flow takes part while it has messages"
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
        let lowest = queue.ready_levels.trailing_zeros() as usize;
        let flows = queue.levels[lowest].flows.iter_mut();
        let oldest = flows.filter_map(|flow| flow.next(messages)).min();
        oldest.map(|handle| handle.slot)
    }

    /// The number of the message that `pop_ready` would take, or one near it.
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
    /// Flows that have ready messages, by virtual time.
    active: BTreeSet<(u64, u32)>,
    /// The virtual time at which the last message was taken: the present.
    present: u64,
}

#[derive(Debug)]
struct Flow {
    task: Name,
    virtual_time: u64,
    ready: usize,
    /// In order of number; some may be stale.
    run: Line<InRun>,
    /// The number of the last in the run.
    last_number: u64,
    /// Those that came back after a younger one had come: taken by number among the others.
    returned: BTreeSet<Handle>,
}

impl Level {
    fn push(&mut self, task: Name, handle: Handle) {
        let index = *self.by_task.entry(task).or_insert_with(|| {
            self.flows.push(Flow::new(task));
            (self.flows.len() - 1) as u32
        });
        let flow = &mut self.flows[index as usize];
        if flow.ready == 0 {
            flow.virtual_time = flow.virtual_time.max(self.present);
            self.active.insert((flow.virtual_time, index));
        }
        flow.ready += 1;
        let is_late = !flow.run.is_empty() && flow.last_number > handle.number;
        if is_late && !planted!("return-to-end") {
            flow.returned.insert(handle);
        } else {
            flow.run.push_back(InRun::new(handle));
            flow.last_number = handle.number;
        }
    }

    fn pop(&mut self, messages: &Messages, costs: &[Cost]) -> (u32, u32) {
        let (virtual_time, index) = *self
            .active
            .first()
            .expect("a level that is marked ready has an active flow");
        self.present = virtual_time;
        let flow = &mut self.flows[index as usize];
        let slot = flow.pop(messages);
        let estimate_us = estimate_us(costs, flow.task);
        flow.ready -= 1;
        flow.virtual_time += u64::from(estimate_us);
        // One busy flow is the common case, and needs no sorting until another joins it.
        self.active.pop_first();
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
        if flow.ready > 0 {
            self.active.remove(&(flow.virtual_time, index));
            self.active.insert((corrected, index));
        }
        flow.virtual_time = corrected;
    }
}

impl Flow {
    fn new(task: Name) -> Self {
        Self {
            task,
            virtual_time: 0,
            ready: 0,
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
