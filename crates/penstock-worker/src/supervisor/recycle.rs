//! Replaces processes while their worker serves.
//!
//! ```text
//!     serving ─▶ due ─▶ its successor is forked, and says that it takes jobs ─▶ closing ─▶ gone
//! ```
//!
//! A closing process ends the jobs that it has begun. Jobs that it had claimed and not begun are taken back at
//! once, and it claims no more (page.rs). Its successor starts first, under the number of a spare child, so
//! there are never too few slots that can take jobs. Only one process at a time is replaced. Otherwise a worker
//! whose processes have the same age would pay for all of them at once.
//!
//! An [evicted](Supervisor::evict) process is closed at once, and its successor follows: the old one no longer
//! serves anyway.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use penstock_faults::planted;

use super::children::Life;
use super::pools::Layout;
use super::{Phase, Supervisor};
use crate::config::{MAX_PLACES, MAX_PROCESSES, RecycleConfig};
use crate::memory::in_words;
use crate::policy::PacketEnd;

/// Replacing processes takes at most one part in this many of the processors' time. If the jobs are so quick that it
/// would take more, a process runs more jobs than configured.
const PART_OF_TIME: u32 = 50;
/// Cost of a successor, in forks: its pages are copied when it writes to them, and the old process must exit.
const FORKS_EACH: u32 = 4;
/// Interval of checking closing processes: some wait for a job and must be woken, others may not exit.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time that hooks of a stopping process get, or the worker's grace if that is longer.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// Reason for replacing a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    Jobs(u64),
    Age(Duration),
    Memory {
        own: u64,
        most: u64,
    },
    /// The child was forked with a different number of slots.
    Size(u32),
}

impl std::fmt::Display for Reason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Jobs(jobs) => write!(out, "it has run {jobs} jobs (--max-jobs-per-child)"),
            Self::Memory { own, most } => write!(
                out,
                "it has {} of its own, and the limit is {} (--max-memory-per-child)",
                in_words(*own),
                in_words(*most)
            ),
            Self::Size(slots) => write!(out, "its new number of slots is {slots}"),
            Self::Age(age) => write!(out, "it is {} s old (--max-age)", age.as_secs()),
        }
    }
}

/// State of a process that takes no more jobs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Closing {
    /// Number of packets that it has begun and not ended.
    packets: usize,
    /// Whether it has reported that it takes no more.
    is_heard: bool,
    leave_by: Option<Instant>,
    /// Whether it was evicted because of a job that can't be stopped.
    is_evicted: bool,
}

/// Process whose turn it is, and its successor.
#[derive(Clone, Copy, Debug)]
struct Turn {
    old: u32,
    successor: u32,
    /// Whether the next turn may begin once this successor is ready, because the change is wanted at once and
    /// jobs may take long.
    is_quick: bool,
}

pub(super) struct Recycling {
    config: RecycleConfig,
    /// Numbers and processes, in the order in which they became due.
    due: VecDeque<(u32, i32, Reason)>,
    turn: Option<Turn>,
    /// Time at which the next turn may begin.
    from: Instant,
    /// Time at which each process reaches its maximum age.
    age_at: Option<Instant>,
    /// Time at which to check closing processes, if there are any.
    look_at: Option<Instant>,
    /// Duration of the quickest fork. All others spent some time waiting for a processor.
    fork: Option<Duration>,
    processors: u32,
}

/// Returns the number of children beyond those of the pools, and places for their packets. One child is for recycling.
/// For evictions, there is one more for every two processes with several slots, as far as there is room.
pub(super) fn spares(layout: &[Layout]) -> (u32, u32) {
    let children: u32 = layout.iter().map(Layout::children).sum();
    let places = layout.iter();
    let places: u32 = places
        .map(|pool| pool.children() * (pool.config.slots + 1))
        .sum();
    let all = layout.iter().map(|pool| pool.config);
    let largest = all.clone().map(|pool| pool.slots + 1).max().unwrap_or(0);
    let shared = all.filter(|pool| pool.slots > 1);
    let shared: u32 = shared.map(|pool| pool.processes).sum();
    let room = (MAX_PLACES - places) / largest.max(1);
    let spares = (1 + shared / 2).min(room).min(MAX_CHILDREN - children);
    (spares, spares * largest)
}

/// Maximum number of children that a claim can name.
pub(super) const MAX_CHILDREN: u32 = 4095;
const _: () = assert!(MAX_PROCESSES < MAX_CHILDREN);

impl Recycling {
    pub(super) fn new(config: RecycleConfig, now: Instant) -> Self {
        let processors = std::thread::available_parallelism();
        Self {
            config,
            due: VecDeque::new(),
            turn: None,
            from: now,
            age_at: None,
            look_at: None,
            fork: None,
            processors: processors.map_or(1, |number| number.get() as u32),
        }
    }

    pub(super) fn next(&self) -> Option<Instant> {
        let is_free = !self.due.is_empty() && self.turn.is_none();
        let turn = is_free.then_some(self.from);
        [turn, self.age_at, self.look_at]
            .into_iter()
            .flatten()
            .min()
    }

    /// Returns the minimum pause between two turns.
    fn pause(&self) -> Duration {
        self.fork.unwrap_or_default() * FORKS_EACH * PART_OF_TIME / self.processors
    }

    pub(super) fn forked_within(&mut self, time: Duration) {
        self.fork = Some(self.fork.map_or(time, |fork| fork.min(time)));
    }

    /// Resets everything once all processes are gone.
    pub(super) fn forget(&mut self) {
        self.due.clear();
        (self.turn, self.age_at, self.look_at) = (None, None, None);
    }

    /// Returns when a process forked now is due for its age: up to a tenth sooner or later, so that they are
    /// not all replaced at once.
    fn old_at(&self, now: Instant) -> Option<Instant> {
        let jitter = f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX);
        let jitter = if planted!("grow-old-together") {
            0.5
        } else {
            jitter
        };
        let age = self.config.max_age?.mul_f64(0.9 + 0.2 * jitter);
        now.checked_add(age)
    }
}

impl Supervisor {
    /// Notes a new process, which must be replaced some day.
    pub(super) fn child_begins(&mut self, number: u32, now: Instant) {
        let child = &mut self.children[number as usize];
        child.begun_at = now;
        if !self.pools[child.pool].is_single_use() {
            child.old_at = self.recycling.old_at(now);
            self.recycling.age_at = [self.recycling.age_at, child.old_at]
                .into_iter()
                .flatten()
                .min();
        }
    }

    /// Notes that a job of this child has ended, and perhaps its packet.
    pub(super) fn child_ended_job(&mut self, number: u32, was_last: bool) {
        let child = &mut self.children[number as usize];
        child.jobs += 1;
        if let Some(closing) = &mut child.closing {
            if was_last && closing.packets > 0 {
                closing.packets -= 1;
                self.pools[child.pool].closing_ended(1);
            }
        } else if Some(child.jobs) == self.recycling.config.max_jobs
            && !self.pools[child.pool].is_single_use()
        {
            let jobs = child.jobs;
            self.make_due(number, Reason::Jobs(jobs));
        }
    }

    pub(super) fn make_due(&mut self, number: u32, reason: Reason) {
        let child = &mut self.children[number as usize];
        if let Life::Alive { pid } = child.life
            && !std::mem::replace(&mut child.is_due, true)
        {
            self.recycling.due.push_back((number, pid, reason));
        }
    }

    /// Advances the replacement of processes: must be called after each pass.
    pub(super) fn recycle(&mut self, now: Instant) {
        if self.recycling.age_at.is_some_and(|at| at <= now) {
            self.find_old(now);
        }
        if self.phase == Phase::Serving && self.recycling.turn.is_none() {
            self.begin_turn(now);
        }
        if self.recycling.look_at.is_some_and(|at| at <= now) {
            self.look_at_closing(now);
        }
    }

    fn find_old(&mut self, now: Instant) {
        let mut next: Option<Instant> = None;
        for number in 0..self.children.len() {
            let child = &mut self.children[number];
            match child.old_at {
                Some(at) if at <= now => {
                    child.old_at = None;
                    let age = now.saturating_duration_since(child.begun_at);
                    self.make_due(number as u32, Reason::Age(age));
                }
                Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                None => {}
            }
        }
        self.recycling.age_at = next;
    }

    fn begin_turn(&mut self, now: Instant) {
        while self.recycling.from <= now
            && let Some((old, pid, reason)) = self.recycling.due.pop_front()
        {
            let child = &self.children[old as usize];
            let is_here = matches!(child.life, Life::Alive { pid: alive } if alive == pid);
            if !is_here || child.closing.is_some() {
                continue;
            }
            let Some(successor) = self.make_way(old, now) else {
                // All spare children are in use for evicted or resized ones.
                self.recycling.due.push_front((old, pid, reason));
                self.recycling.from = now + LOOK_EVERY;
                return;
            };
            match reason {
                Reason::Memory { .. } => {
                    tracing::info!(pid, process = old, "a process is replaced: {reason}");
                }
                _ => tracing::debug!(pid, process = old, "a process is replaced: {reason}"),
            }
            let is_quick = matches!(reason, Reason::Size(_));
            self.recycling.turn = Some(Turn {
                old,
                successor,
                is_quick,
            });
            self.recycling.from = match is_quick {
                true => now,
                false => now + self.recycling.pause(),
            };
            return;
        }
    }

    /// Forks a spare child for the pool of this one.
    fn make_way(&mut self, old: u32, now: Instant) -> Option<u32> {
        self.add_child(self.children[old as usize].pool, now)
    }

    /// Forks a spare child for a pool, in addition to its normal ones.
    pub(super) fn add_child(&mut self, pool: usize, now: Instant) -> Option<u32> {
        let mut children = self.children.iter();
        let spare = children.position(|child| matches!(child.life, Life::Spare))?;
        self.pools[pool].extra += 1;
        let child = &mut self.children[spare];
        (child.pool, child.failures) = (pool, 0);
        child.life = Life::Wanted { from: now };
        Some(spare as u32)
    }

    /// Closes a process that can no longer serve, and starts its successor. Returns false, and leaves the process as it
    /// is, if too many are closed already.
    pub(super) fn evict(&mut self, number: u32, now: Instant) -> bool {
        let child = &self.children[number as usize];
        let is_serving = matches!(child.life, Life::Alive { .. }) && child.closing.is_none();
        let is_old = self.recycling.turn.is_some_and(|turn| turn.old == number);
        // If its turn has come, the successor is on its way. The reserve for resizes must not go to stuck
        // processes, each of which keeps its memory.
        let may_follow = self.evicted() < self.evictions;
        if is_serving && (is_old || may_follow && self.make_way(number, now).is_some()) {
            self.close(number, now);
            if let Some(closing) = &mut self.children[number as usize].closing {
                closing.is_evicted = true;
            }
            return true;
        }
        false
    }

    /// Returns the number of evicted processes that still exist.
    fn evicted(&self) -> usize {
        let closing = self
            .children
            .iter()
            .filter_map(|child| child.closing.as_ref());
        closing.filter(|closing| closing.is_evicted).count()
    }

    /// Notes that a child takes jobs: if it is a successor, the old process may go.
    pub(super) fn child_is_ready(&mut self, number: u32, now: Instant) {
        if let Some(turn) = self.recycling.turn
            && turn.successor == number
            && self.children[turn.old as usize].closing.is_none()
        {
            self.close(turn.old, now);
            if turn.is_quick {
                self.recycling.turn = None;
            }
        }
    }

    /// Returns the process of this pool whose turn it is, and its successor, while both should have slots.
    pub(super) fn turn_of(&self, pool: usize) -> Option<(u32, u32)> {
        let turn = self.recycling.turn?;
        let old = &self.children[turn.old as usize];
        (old.pool == pool && old.closing.is_none()).then_some((turn.old, turn.successor))
    }

    pub(super) fn close(&mut self, number: u32, now: Instant) {
        self.outstanding.pages.close(number);
        self.take_back_unbegun(number);
        let packets = self.outstanding.places_of(Some(number)).len();
        let parked = self.outstanding.parked_of(number);
        let child = &mut self.children[number as usize];
        child.closing = Some(Closing {
            packets,
            ..Closing::default()
        });
        let pool = &mut self.pools[child.pool];
        pool.closing_begun(packets);
        pool.lending.close(parked);
        pool.child_changed(std::mem::take(&mut child.serving), 0);
        self.look_at_closing(now);
    }

    pub(super) fn take_back_unbegun(&mut self, number: u32) {
        for place in self.outstanding.places_of(Some(number)) {
            self.take_back(place, PacketEnd::TakenBack);
        }
    }

    /// Notes that a closing child takes no more jobs. It may have pulled a packet without claiming it, or
    /// claimed one just before it was closed.
    pub(super) fn closing_is_heard(&mut self, number: u32) {
        self.take_back_unclaimed();
        self.take_back_unbegun(number);
        if let Some(closing) = &mut self.children[number as usize].closing {
            closing.is_heard = true;
        }
    }

    /// Wakes closing processes that wait for a job, and kills those that don't exit.
    fn look_at_closing(&mut self, now: Instant) {
        let mut any = false;
        let leave_within = self.config.grace.max(LEAVE_WITHIN);
        for number in 0..self.children.len() {
            let child = &mut self.children[number];
            let (Life::Alive { pid }, Some(closing)) = (&child.life, &mut child.closing) else {
                continue;
            };
            any = true;
            let pid = *pid;
            let has_ended = closing.packets == 0;
            if closing.is_heard && has_ended {
                let leave_by = *closing.leave_by.get_or_insert(now + leave_within);
                if leave_by <= now {
                    // Only once: its death will be reported.
                    closing.leave_by = now.checked_add(Duration::from_secs(3600));
                    self.kill_overstayed(number as u32, pid, leave_within);
                }
            } else if !closing.is_heard {
                // A process with a single slot checks after its job anyway, and a signal would only disturb the
                // job.
                let has_one_slot = child.slots == 1;
                if (has_ended || !has_one_slot)
                    && let Some(zygote) = &mut self.zygote
                {
                    let _ = zygote.nudge_child(number as u32);
                }
            }
        }
        self.recycling.look_at = any.then(|| now + LOOK_EVERY);
    }

    fn kill_overstayed(&mut self, number: u32, pid: i32, within: Duration) {
        tracing::warn!(
            pid,
            process = number,
            "a replaced process did not exit within {} s after its last job, and is killed: a job may have left a \
             thread",
            within.as_secs()
        );
        self.kill(number);
    }

    /// Notes that a process is gone; returns true if another has replaced it, or is about to.
    pub(super) fn has_successor(&mut self, number: u32) -> bool {
        let is_old = self.recycling.turn.is_some_and(|turn| turn.old == number);
        let child = &mut self.children[number as usize];
        let closing = child.closing.take();
        if !is_old && closing.is_none() {
            return false;
        }
        if is_old {
            self.recycling.turn = None;
        }
        child.life = Life::Spare;
        let pool = &mut self.pools[child.pool];
        pool.extra -= 1;
        pool.closing_ended(closing.map_or(0, |closing| closing.packets));
        true
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::{MAX_SLOTS, PoolConfig, SlotKind};
    use crate::supervisor::pools::lay_out;

    #[test]
    fn there_is_a_spare_child_beside_any_pools() {
        let check = |pools: &[(u32, u32)], expected: (u32, u32)| {
            let pool = |(processes, slots): &(u32, u32)| PoolConfig {
                kind: SlotKind::Thread,
                processes: *processes,
                slots: *slots,
                on_demand: false,
            };
            let pools: Vec<PoolConfig> = pools.iter().map(pool).collect();
            assert_eq!(spares(&lay_out(&pools)), expected, "{pools:?}");
        };
        check(&[(4, 1)], (1, 2));
        check(&[(MAX_PROCESSES, 1), (64, 1)], (1, 2));
        // One for recycling, two for evicted ones of four.
        check(&[(4, 10)], (3, 33));
        check(&[(1, MAX_SLOTS)], (1, MAX_SLOTS + 1));
        check(&[(1, MAX_SLOTS - 100), (1, 100)], (1, MAX_SLOTS - 99));
        check(&[(4, MAX_SLOTS / 4)], (3, 3 * (MAX_SLOTS / 4 + 1)));
        check(&[(10, MAX_SLOTS / 10)], (6, 6 * (MAX_SLOTS / 10 + 1)));
    }

    #[test]
    fn replacing_processes_takes_a_fiftieth_of_the_time_at_most() {
        let now = Instant::now();
        let mut recycling = Recycling::new(RecycleConfig::default(), now);
        recycling.processors = 2;
        assert_eq!(recycling.pause(), Duration::ZERO, "nothing is known yet");
        recycling.forked_within(Duration::from_millis(9));
        recycling.forked_within(Duration::from_millis(1));
        recycling.forked_within(Duration::from_millis(5));
        assert_eq!(recycling.pause(), Duration::from_millis(100));
    }

    #[test]
    pub(crate) fn processes_of_one_moment_grow_old_at_different_times() {
        let now = Instant::now();
        let hour = Duration::from_secs(3600);
        let config = RecycleConfig {
            max_age: Some(hour),
            ..RecycleConfig::default()
        };
        let recycling = Recycling::new(config, now);
        let old_at: Vec<Instant> = (0..100).filter_map(|_| recycling.old_at(now)).collect();
        let (first, last) = (old_at.iter().min().unwrap(), old_at.iter().max().unwrap());
        assert!(*first >= now + hour.mul_f64(0.9) && *last <= now + hour.mul_f64(1.1));
        assert!(*last - *first > hour.mul_f64(0.1), "{first:?} to {last:?}");
    }
}
