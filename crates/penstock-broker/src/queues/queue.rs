//! A queue: its levels, counts and consumers.

use std::collections::{BTreeSet, VecDeque};

use penstock_faults::planted;
use penstock_message::QueueLimits;

use crate::Position;
use crate::queues::flows::{Flow, FlowChoice, Level};
use crate::queues::readiness::Readiness;
use crate::queues::tally::{Tally, TallyStep};
use crate::queues::task_sets::TaskSets;
use crate::table::boxed_slab::BoxedSlab;
use crate::table::interner::Name;

/// An entry in the ring of a queue: a consumer, and a serial number that tells whether the entry is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitingConsumer {
    pub(crate) consumer: u32,
    pub(crate) serial: u64,
}

/// Consumers of a queue that can run the same tasks.
#[derive(Debug)]
pub(crate) struct Served {
    /// Set of the tasks; `None`: any task.
    pub(crate) tasks: Option<u32>,
    pub(crate) consumers: u32,
    /// Consumers that want work, in turn. Some may be stale.
    pub(crate) waiting: VecDeque<WaitingConsumer>,
}

const PRIORITIES: usize = penstock_message::HIGHEST_PRIORITY as usize + 1;

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) name: Name,
    /// Levels that have flows, by priority; `None` if there are no flows. In boxes, since most queues use one of them.
    pub(crate) levels: Option<Box<Levels>>,
    /// Bitmap of the levels that have ready messages.
    pub(crate) ready_levels: u16,
    pub(crate) ready: u64,
    pub(crate) delayed: u64,
    /// Total body bytes of ready messages, and of delayed ones.
    pub(crate) ready_bytes: u64,
    pub(crate) delayed_bytes: u64,
    pub(crate) running: u64,
    /// Consumers of the queue; `None` if it has none.
    pub(crate) serving: Option<Box<Serving>>,
    pub(crate) in_ring: bool,
    pub(crate) paused: bool,
    pub(crate) service: Service,
    /// Whether it has had a consumer, in this life of the broker or an earlier one.
    pub(crate) was_served: bool,
    pub(crate) tally: Tally,
    /// Number of failed jobs of this queue.
    pub(crate) failed: u64,
    /// State that is rarely set; `None` if all of it has the defaults.
    pub(crate) rare: Option<Box<Rare>>,
}

type Levels = [Option<Box<Level>>; PRIORITIES];

/// Consumers of a queue.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(crate) consumers: u32,
    pub(crate) by_tasks: Vec<Served>,
    /// Index of the consumers that are asked first next time.
    pub(crate) next: usize,
    pub(crate) readiness: Readiness,
}

/// State that most queues never have; it would double their memory.
#[derive(Debug)]
pub(crate) struct Rare {
    /// Generation of the timer that warns of tasks that no consumer can run.
    pub(crate) unknown_timer: Option<u64>,
    /// Tasks that such a warning has named and that still wait.
    pub(crate) told_unknown: BTreeSet<Name>,
    /// Position of the record that pauses it.
    pub(crate) base: Position,
    pub(crate) limits: QueueLimits,
    /// Position of the record with the limits.
    pub(crate) limits_base: Position,
    /// Number of transactions refused because it was full, since the start.
    pub(crate) refused: u64,
    /// Number before which messages that start to wait here are purged.
    pub(crate) purge_before: u64,
    /// Number of waiting messages that were purged.
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

/// Whether a queue is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// A consumer takes from it, or there is nothing to take.
    Well,
    /// Work waits and no consumer takes it. The generation says which timer waits for that to last.
    Missing { generation: u64 },
    /// Work waits, no consumer takes it, and a warning said so.
    Told,
}

impl Queue {
    pub(crate) fn new(name: Name, now: TallyStep) -> Self {
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
    pub(crate) fn served(&self) -> &[Served] {
        self.serving
            .as_ref()
            .map_or(&[], |serving| &serving.by_tasks)
    }

    pub(crate) fn levels(&self) -> impl Iterator<Item = &Level> {
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

    /// Notes whether work waits for its consumers now. Call it whenever that may have changed.
    pub(crate) fn review_readiness(&mut self, now_ms: u64) {
        let waits = self.ready_levels > 0 && !self.in_ring && !self.paused;
        if let Some(serving) = &mut self.serving {
            serving.readiness.set(!waits, now_ms);
        }
    }

    /// Returns the share of the time, mostly of the last 10 seconds, in which a job that some consumer can run would
    /// have been taken at once, in thousandths. Returns `None` if it has no consumers.
    pub(crate) fn capacity_permille(&self, now_ms: u64) -> Option<u16> {
        let serving = self.serving.as_ref()?;
        Some(serving.readiness.permille(now_ms))
    }

    /// Returns the level of a flow that exists.
    #[inline]
    pub(crate) fn level_mut(&mut self, priority: impl Into<usize>) -> &mut Level {
        let levels = self.levels.as_mut();
        let level = levels.and_then(|levels| levels[priority.into()].as_mut());
        level.expect("a flow has its level")
    }

    /// Counts the consumers in its ring.
    pub(crate) fn waiting(&self) -> usize {
        self.served()
            .iter()
            .map(|served| served.waiting.len())
            .sum()
    }

    /// Returns the priority and the flow or message that comes next for consumers that can run these tasks, if there is
    /// any.
    #[inline]
    pub(crate) fn find_active(
        &self,
        tasks: Option<u32>,
        flows: &BoxedSlab<Flow>,
        sets: &TaskSets,
    ) -> Option<(usize, FlowChoice)> {
        // Some consumer can run every active flow.
        let is_for_all = self.served().len() == 1 || tasks.is_none();
        let mut left = self.ready_levels;
        while left != 0 {
            let priority = match planted!("ignore-priority") {
                true => left.trailing_zeros(),
                false => left.ilog2(),
            } as usize;
            left &= !(1 << priority);
            let level = self.levels.as_ref()?[priority].as_ref()?;
            let active = &level.active;
            if !level.awaited.is_empty() {
                let can_run = |flow: &Flow| is_for_all || sets.has(tasks, flow.key.task);
                match level.choose_awaited(flows, can_run) {
                    Some(choice) => return Some((priority, choice)),
                    None => continue,
                }
            }
            let found = match is_for_all || planted!("send-any-task") {
                true => active.first(),
                false => active
                    .iter()
                    .find(|(_, flow)| sets.has(tasks, flows[*flow].key.task)),
            };
            if let Some(flow) = found {
                let awaited = None;
                return Some((priority, FlowChoice { flow, awaited }));
            }
        }
        None
    }
}

/// Whether a consumer of the queue can run the task, or the queue has no consumers.
pub(crate) fn is_wanted(served: &[Served], sets: &TaskSets, task: Name) -> bool {
    served.is_empty() || served.iter().any(|served| sets.has(served.tasks, task))
}
