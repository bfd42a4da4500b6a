//! Enforces the worker's memory limit: a job does not start if its task's usual peak would not fit.
//!
//! ```text
//!     used        memory of the supervisor and the zygote, and what each child has of its own
//!     reserved    for jobs that run or are on their way: the usual peaks of their tasks, less what their process has grown since
//!     fits        used + reserved + the task's usual peak <= limit
//! ```
//!
//! A task whose jobs don't fit is *held*. Its received jobs go back to the broker, which sends no more, because
//! the consumer of their pool no longer names the task. A consumer without credit names it meanwhile: the
//! broker sends it nothing, but knows that a worker has the task. Other tasks continue. While nothing runs, any
//! job may start; otherwise a job larger than the limit would wait forever. An unknown task is held only when
//! nearly all memory is in use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_faults::planted;
use penstock_message::{Consume, Delivery, TaskSelection};

use super::{End, Phase, Supervisor};
use crate::memory::in_words;
use crate::policy::{HandOut, TaskIndex};

/// Share of the limit in use above which no job with an unknown peak starts.
const NEARLY_ALL_PERCENT: u64 = 95;
/// Peaks below this are ignored.
const SMALL: u64 = 1 << 20;
/// Interval of log lines that a task is held.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Job that is on its way or running, and needs memory.
#[derive(Clone, Copy, Debug)]
struct Reserved {
    bytes: u64,
    /// Child that has it, with the child's own memory when that was first known.
    child: Option<(u32, u64)>,
}

#[derive(Debug, Default)]
pub(super) struct Admission {
    limit: Option<u64>,
    /// Reservations, by place.
    reserved: BTreeMap<usize, Reserved>,
    /// Tasks of the pools that the broker must not send.
    held: BTreeSet<String>,
    told: BTreeMap<String, Instant>,
    /// Whether something has changed since held tasks were last checked.
    has_changed: bool,
}

/// Returns the bytes that these jobs have not taken yet. `own` is the child's present own memory. Its growth
/// since the first of its jobs began already counts as used, and must not count twice.
fn still_to_come<'a>(
    reserved: impl Iterator<Item = &'a Reserved>,
    own: impl Fn(u32) -> u64,
) -> u64 {
    let mut by_child: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    let mut sum = 0;
    for reserved in reserved {
        match reserved.child {
            Some((child, own_before)) => {
                let (bytes, grown) = by_child.entry(child).or_default();
                *bytes += reserved.bytes;
                if !planted!("admission-counts-twice") {
                    *grown = (*grown).max(own(child).saturating_sub(own_before));
                }
            }
            None => sum += reserved.bytes,
        }
    }
    let left = by_child.into_values();
    sum + left
        .map(|(bytes, grown)| bytes.saturating_sub(grown))
        .sum::<u64>()
}

impl Supervisor {
    /// Computes the limit once the app is loaded. False: the app needs more.
    pub(super) fn has_room_for_app(&mut self) -> bool {
        self.look_at_base();
        let limit = self.memory.limit();
        self.admission.limit = limit;
        let base = self.memory.base;
        if let Some(limit) = limit.filter(|limit| *limit < base) {
            tracing::error!(
                "the worker's memory limit is {}, but the loaded app takes {} before the first job: no job was taken \
                 from the broker. Raise --memory-limit, or make the app load less",
                in_words(limit),
                in_words(base)
            );
            self.end = End::NoMemory;
            return false;
        }
        if let Some(limit) = limit {
            tracing::info!(
                "jobs start while this worker's memory is below {}; the loaded app takes {}",
                in_words(limit),
                in_words(base)
            );
        }
        true
    }

    /// Returns the bytes in use.
    fn used(&self) -> u64 {
        let own = self.children.iter().filter(|child| child.is_alive());
        self.memory.base + own.map(|child| child.memory.own).sum::<u64>()
    }

    /// Returns the bytes that running jobs and jobs on their way will still take.
    fn reserved(&self) -> u64 {
        let own = |child: u32| self.children[child as usize].memory.own;
        still_to_come(self.admission.reserved.values(), own)
    }

    /// Returns the bytes in use and the limit, if there is no room for one more process of the usual size.
    pub(super) fn lacks_memory(&self) -> Option<(u64, u64)> {
        let limit = self.admission.limit?;
        let own = self.children.iter().filter(|child| child.is_alive());
        let usual = own.map(|child| child.memory.own).max().unwrap_or(0);
        let used = self.used();
        (used + self.reserved() + usual > limit).then_some((used, limit))
    }

    /// Whether a job of this task may start now.
    fn fits(&self, task: &str) -> bool {
        let Some(limit) = self.admission.limit else {
            return true;
        };
        if self.outstanding.is_empty() {
            return true;
        }
        match self.memory.peaks.usual(task) {
            None => self.used() <= limit / 100 * NEARLY_ALL_PERCENT,
            Some(peak) => self.used() + self.reserved() + peak <= limit,
        }
    }

    /// Holds the task of this pool's next job if that does not fit now. False: the next job may go, if there is
    /// one.
    pub(super) fn is_next_held(&mut self, pool: usize, now: Instant) -> bool {
        if self.admission.limit.is_none() {
            return false;
        }
        let policy = &self.pools[pool].policy;
        let Some(task) = policy.next_task() else {
            return false;
        };
        let name = policy.task_name(task);
        if self.fits(name) {
            return false;
        }
        let name = name.to_owned();
        self.hold(pool, task, name, now);
        true
    }

    fn hold(&mut self, pool: usize, task: TaskIndex, name: String, now: Instant) {
        let told = self.admission.told.get(&name);
        if told.is_none_or(|told| *told + TELL_EVERY <= now) {
            self.admission.told.insert(name.clone(), now);
            let usual = match self.memory.peaks.usual(&name) {
                Some(peak) => format!("usually needs {}", in_words(peak)),
                None => "has not been measured".to_owned(),
            };
            tracing::warn!(
                "{name} waits for memory: it {usual}, and this worker uses {} of {} and reserves {} for running jobs. \
                 Its jobs return to the broker until they fit; other tasks continue",
                in_words(self.used()),
                in_words(self.admission.limit.unwrap_or_default()),
                in_words(self.reserved())
            );
        }
        if self.admission.held.insert(name) {
            // This must precede the return of its jobs, or the broker would send them again.
            self.tell_tasks();
            self.trim_idle();
        }
        let jobs = self.pools[pool].policy.take_task(task);
        self.settlements.give_back(jobs);
        self.memory.begin(now);
    }

    pub(super) fn is_holding(&self) -> bool {
        !self.admission.held.is_empty()
    }

    /// Reserves memory for a packet that is about to be sent.
    pub(super) fn reserve(&mut self, pool: usize, hand_out: &HandOut<Delivery>) {
        let task = self.pools[pool].policy.task_name(hand_out.task);
        if self.admission.limit.is_some()
            && hand_out.jobs.len() == 1
            && let Some(place) = self.outstanding.next_place()
            && let Some(bytes) = self.memory.peaks.usual(task).filter(|peak| *peak >= SMALL)
        {
            let reserved = Reserved { bytes, child: None };
            self.admission.reserved.insert(place, reserved);
        }
    }

    /// Frees the reservation of a packet that has ended or was taken back.
    pub(super) fn release(&mut self, place: usize) {
        self.admission.reserved.remove(&place);
        self.admission.has_changed = true;
    }

    /// Records which children have the jobs with reservations.
    pub(super) fn find_reserved(&mut self) {
        for (place, reserved) in &mut self.admission.reserved {
            if reserved.child.is_none()
                && let Some(owner) = self.outstanding.owner(*place)
                && let Some(child) = self.children.get(owner as usize)
            {
                reserved.child = Some((owner, child.memory.own));
            }
        }
    }

    /// Notes new memory figures.
    pub(super) fn look_at_held(&mut self) {
        self.admission.has_changed = true;
    }

    /// Releases held tasks whose jobs fit now.
    pub(super) fn let_go(&mut self) {
        if !std::mem::take(&mut self.admission.has_changed) || !self.is_holding() {
            return;
        }
        let held = std::mem::take(&mut self.admission.held);
        let before = held.len();
        let held: BTreeSet<String> = held.into_iter().filter(|task| !self.fits(task)).collect();
        let has_changed = held.len() != before;
        self.admission.held = held;
        if has_changed && self.phase == Phase::Serving {
            self.tell_tasks();
        }
    }

    /// Returns the tasks of a pool that the broker may send.
    pub(super) fn wanted_tasks(&self, pool: usize) -> Vec<String> {
        let tasks = self.pools[pool].tasks().iter();
        let wanted = tasks.filter(|task| !self.admission.held.contains(*task));
        wanted.cloned().collect()
    }

    /// Updates the broker's view of held tasks.
    fn tell_tasks(&self) {
        let Some(broker) = &self.broker else {
            return;
        };
        let consume = |consumer: usize, tasks| {
            let consume = Consume {
                consumer: consumer as u32,
                app: self.app.clone(),
                queues: self.queues.clone(),
                tasks: TaskSelection::Named(tasks),
                add_credit: 0,
                held_by: None,
            };
            let inbox = Arc::clone(&self.inbox);
            broker.driver.consume(consume, inbox);
        };
        for pool in 0..self.pools.len() {
            if self.pools[pool].is_needed() {
                consume(pool, self.wanted_tasks(pool));
            }
        }
        // Numbered after those of the pools; it never has credit.
        let held = self.admission.held.iter().cloned().collect();
        consume(self.pools.len(), held);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    pub(crate) fn memory_that_a_job_has_taken_is_not_reserved_for_it_any_more() {
        let check = |reserved: &[(u64, Option<(u32, u64)>)], expected: u64| {
            let reserved: Vec<Reserved> = reserved
                .iter()
                .map(|(bytes, child)| Reserved {
                    bytes: *bytes,
                    child: *child,
                })
                .collect();
            // Child 0 has 70 of its own, and child 1 has 20.
            let own = |child: u32| [70, 20][child as usize];
            assert_eq!(still_to_come(reserved.iter(), own), expected);
        };
        check(&[], 0);
        check(&[(100, None), (100, None)], 200);
        check(&[(100, Some((0, 10)))], 40);
        check(&[(50, Some((0, 10)))], 0);
        // Two jobs of one child share its growth.
        check(&[(50, Some((1, 0))), (50, Some((1, 10)))], 80);
        check(
            &[(100, Some((0, 70))), (100, Some((1, 20))), (1, None)],
            201,
        );
    }
}
