//! Flows: the ready messages of one queue, priority and task, first in, first out.

use std::collections::BTreeSet;

use penstock_faults::planted;

use crate::messages::entry::MessageEntry;
use crate::messages::{Handle, Messages};
use crate::queues::active_flows::{ActiveFlows, FlowTurn};
use crate::queues::awaited_ready::{AwaitedReady, AwaitedTurn};
use crate::queues::run_charges::{Charge, ChargedRuns};
use crate::queues::tasks::TaskTable;
use crate::table::boxed_slab::BoxedSlab;
use crate::table::fifo::Fifo;
use crate::table::interner::Name;

/// Flows of one priority.
#[derive(Debug, Default)]
pub(crate) struct Level {
    pub(crate) flows: Vec<u32>,
    /// Flows that have ready messages which a consumer can run, by virtual time.
    pub(crate) active: ActiveFlows,
    /// Virtual time at which the last message was taken: the present.
    pub(crate) present: u64,
    /// Flows with messages that running jobs wait for.
    pub(crate) awaited: Vec<u32>,
}

/// The message that is taken next from a level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowChoice {
    pub(crate) flow: FlowTurn,
    /// The message, if it precedes others of its flow.
    pub(crate) awaited: Option<Handle>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlowKey {
    pub(crate) queue: u32,
    pub(crate) priority: u8,
    pub(crate) task: Name,
}

/// Messages of one queue, priority and task. Exists as long as a shared head uses it.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(crate) key: FlowKey,
    /// Index in the list of its level.
    pub(crate) place: u32,
    /// Number of shared heads that use the flow.
    pub(crate) users: u32,
    pub(crate) virtual_time: u64,
    pub(crate) ready: usize,
    pub(crate) running: ChargedRuns,
    /// Whether some consumer of the queue can run its task, or the queue has none.
    pub(crate) is_wanted: bool,
    /// Whether jobs of this flow have ever waited for others.
    pub(crate) waits: bool,
    /// Ready messages that running jobs wait for. They are also in the run.
    pub(crate) awaited: Option<Box<AwaitedReady>>,
    /// Messages in order of number; some may be stale.
    run: Fifo<InRun>,
    /// Number of the last message in the run.
    last_number: u64,
    /// Messages that were returned after a younger one had arrived. Taken by number among the others.
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
    pub(crate) fn push(&mut self, slot: u32, flow: &mut Flow, handle: Handle) -> bool {
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

    /// Handles a change of the tasks that the queue's consumers can run.
    pub(crate) fn review(&mut self, flows: &mut BoxedSlab<Flow>, is_wanted: impl Fn(Name) -> bool) {
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

    /// Returns the next message for consumers that can run these flows, if some messages are awaited.
    ///
    /// Flows of jobs that never wait take turns by virtual time, as usual. Flows of jobs that wait begin nothing new
    /// while an awaited message is ready; of those the deepest goes first.
    pub(crate) fn choose_awaited(
        &self,
        flows: &BoxedSlab<Flow>,
        can_run: impl Fn(&Flow) -> bool,
    ) -> Option<FlowChoice> {
        let first = |flow: u32| -> Option<AwaitedTurn> { flows[flow].awaited.as_ref()?.first() };
        let takes_part = |flow: &u32| flows[*flow].is_wanted && can_run(&flows[*flow]);
        let awaited = self.awaited.iter().copied().filter(takes_part);
        let deepest = awaited.min_by_key(|flow| first(*flow));
        let mut turns = self.active.iter();
        let turn = turns.find(|(_, flow)| {
            can_run(&flows[*flow])
                && (deepest.is_none() || deepest == Some(*flow) || !flows[*flow].waits)
        })?;
        Some(FlowChoice {
            flow: turn,
            awaited: first(turn.1).map(|(_, handle)| handle),
        })
    }

    /// Moves a ready message of the flow ahead of others.
    pub(crate) fn prioritize(&mut self, slot: u32, flow: &mut Flow, handle: Handle, depth: u32) {
        if flow.awaited.is_none() {
            self.awaited.push(slot);
        }
        flow.awaited.get_or_insert_default().insert(handle, depth);
    }

    /// Notes that a message of the flow is no longer ready.
    fn leave_awaited(&mut self, slot: u32, flow: &mut Flow, message: u32) {
        let Some(awaited) = &mut flow.awaited else {
            return;
        };
        awaited.remove(message);
        if awaited.is_empty() {
            flow.awaited = None;
            self.awaited.retain(|other| *other != slot);
        }
    }

    /// Takes the next message of an active flow, or the awaited one.
    pub(crate) fn pop(
        &mut self,
        FlowChoice {
            flow: active,
            awaited,
        }: FlowChoice,
        flows: &mut BoxedSlab<Flow>,
        messages: &Messages,
        tasks: &TaskTable,
        now_ms: u64,
    ) -> (u32, Charge) {
        let (virtual_time, index) = active;
        // Flows that wait for their own consumers may be behind.
        self.present = self.present.max(virtual_time);
        let flow = &mut flows[index];
        let slot = match awaited {
            Some(handle) => handle.slot,
            None => flow.pop(messages),
        };
        self.leave_awaited(index, flow, slot);
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
        if awaited.is_some() {
            flow.sweep(messages);
        }
        (slot, charge)
    }

    /// Charges an active flow for the time that its runs have taken beyond the expected. Returns whether that may have
    /// changed whose turn it is.
    pub(crate) fn charge(&mut self, slot: u32, flow: &mut Flow, now_ms: u64) -> bool {
        if self.active.is_alone() {
            // No other flow wants the turn. The flow is charged when one does.
            return false;
        }
        let more_us = flow.running.charge(now_ms);
        self.correct(slot, flow, i64::try_from(more_us).unwrap_or(i64::MAX));
        more_us > 0
    }

    pub(crate) fn forget_one(
        &mut self,
        slot: u32,
        flow: &mut Flow,
        messages: &Messages,
        message: u32,
    ) {
        self.leave_awaited(slot, flow, message);
        flow.ready -= 1;
        if flow.ready == 0 {
            self.active.remove((flow.virtual_time, slot));
            flow.run.clear();
            flow.returned.clear();
        } else {
            flow.sweep(messages);
        }
    }

    pub(crate) fn correct(&mut self, slot: u32, flow: &mut Flow, by_us: i64) {
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
    pub(crate) fn new(key: FlowKey, place: u32, is_wanted: bool) -> Self {
        Self {
            key,
            place,
            users: 0,
            virtual_time: 0,
            ready: 0,
            is_wanted,
            waits: false,
            awaited: None,
            run: Fifo::default(),
            last_number: 0,
            running: ChargedRuns::default(),
            returned: Returned::default(),
        }
    }

    /// Drops stale entries once they are the majority. Called while the removed message still looks ready; its entry is
    /// dropped at the next sweep or pop.
    fn sweep(&mut self, messages: &Messages) {
        if self.run.len() + self.returned.len() > 2 * self.ready + 64 {
            self.run
                .retain(|place| place.find(messages).is_some_and(MessageEntry::is_ready));
            self.returned.retain(|handle| is_ready(messages, *handle));
        }
    }

    pub(crate) fn pop(&mut self, messages: &Messages) -> u32 {
        loop {
            // Stale entries no longer have a number, and do not delay the others.
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

    /// Returns the next message to take. Forgets earlier entries that are no longer ready.
    pub(crate) fn next(&mut self, messages: &Messages) -> Option<Handle> {
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

    /// Adds ready messages with numbers below `before`, up to `most`.
    pub(crate) fn list_before(
        &self,
        before: u64,
        most: usize,
        messages: &Messages,
        found: &mut Vec<u32>,
    ) {
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

    pub(crate) fn first_ready<'a>(&self, messages: &'a Messages) -> Option<&'a MessageEntry> {
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

/// An entry in a run: a handle with the lower half of its number, which is enough. A stale entry is swept or skipped
/// long before its slot has been reused by four billion others, one of which would look like it.
#[derive(Clone, Copy, Debug)]
struct InRun {
    slot: u32,
    number: u32,
}

impl InRun {
    pub(crate) fn new(handle: Handle) -> Self {
        Self {
            slot: handle.slot,
            number: handle.number as u32,
        }
    }

    /// Finds the message, unless the entry is stale.
    pub(crate) fn find(self, messages: &Messages) -> Option<&MessageEntry> {
        let entry = messages.by_slot(self.slot)?;
        (entry.number() as u32 == self.number).then_some(entry)
    }
}

fn is_ready(messages: &Messages, handle: Handle) -> bool {
    messages.get(handle).is_some_and(MessageEntry::is_ready)
}
