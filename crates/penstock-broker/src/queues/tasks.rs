//! Tasks: the cost of their runs, and counts of their jobs.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::queues::tally::{Tally, TallyStep};
use crate::table::boxed_slab::BoxedSlab;
use crate::table::interner::{Interner, Name};

/// Expected cost of a run before any has been measured.
const UNKNOWN_COST_US: u32 = 1_000;

/// Moving average of the cost of a task's runs, in eighths of a microsecond; zero before the first.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunCost {
    eighths: u64,
}

impl RunCost {
    pub(crate) fn estimate_us(self) -> NonZeroU32 {
        let us = match self.eighths {
            0 => UNKNOWN_COST_US,
            eighths => u32::try_from(eighths / 8).unwrap_or(u32::MAX),
        };
        NonZeroU32::new(us).unwrap_or(NonZeroU32::MIN)
    }

    pub(crate) fn add(&mut self, cost_us: u32) {
        self.eighths = match self.eighths {
            0 => u64::from(cost_us) * 8,
            eighths => eighths - eighths / 8 + u64::from(cost_us),
        };
    }
}

#[derive(Debug)]
pub(crate) struct TaskEntry {
    pub(crate) name: Name,
    pub(crate) cost: RunCost,
    pub(crate) tally: Tally,
}

/// Slots of queues or tasks by name. Holds the names.
#[derive(Debug, Default)]
pub(crate) struct ByName {
    /// Slot of each name, plus 1, since `None` then takes no more room.
    slots: Vec<Option<NonZeroU32>>,
    /// Slots in the order of the texts.
    pub(crate) in_order: BTreeMap<Arc<str>, u32>,
}

impl ByName {
    #[inline]
    pub(crate) fn find(&self, name: Name) -> Option<u32> {
        let slot = self.slots.get(name.index()).copied().flatten();
        slot.map(|slot| slot.get() - 1)
    }

    pub(crate) fn insert(&mut self, name: Name, slot: u32, names: &mut Interner) {
        if self.slots.len() <= name.index() {
            self.slots.resize(name.index() + 1, None);
        }
        self.slots[name.index()] = NonZeroU32::new(slot + 1);
        self.in_order.insert(names.shared(name).clone(), slot);
        names.hold(name);
    }

    pub(crate) fn remove(&mut self, name: Name, names: &mut Interner) {
        self.slots[name.index()] = None;
        self.in_order.remove(names.text(name));
        names.release(name);
    }
}

/// Tasks of all messages, and tasks that were in use recently.
#[derive(Debug, Default)]
pub(crate) struct TaskTable {
    pub(crate) all: BoxedSlab<TaskEntry>,
    pub(crate) by_name: ByName,
}

impl TaskTable {
    #[inline]
    pub(crate) fn find(&self, name: Name) -> Option<u32> {
        self.by_name.find(name)
    }

    /// Finds or creates the task. Returns its slot, and whether it is new.
    pub(crate) fn find_or_create(
        &mut self,
        name: Name,
        now: TallyStep,
        names: &mut Interner,
    ) -> (u32, bool) {
        if let Some(task) = self.find(name) {
            return (task, false);
        }
        let task = self.all.insert(TaskEntry {
            name,
            cost: RunCost::default(),
            tally: Tally::new(now),
        });
        self.by_name.insert(name, task, names);
        (task, true)
    }

    pub(crate) fn remove(&mut self, task: u32, names: &mut Interner) -> TaskEntry {
        let task = self.all.remove(task);
        self.by_name.remove(task.name, names);
        task
    }

    /// Returns the expected cost of a run of the task.
    #[inline]
    pub(crate) fn estimate_us(&self, name: Name) -> NonZeroU32 {
        let cost = self.find(name).map(|task| self.all[task].cost);
        cost.unwrap_or_default().estimate_us()
    }
}
