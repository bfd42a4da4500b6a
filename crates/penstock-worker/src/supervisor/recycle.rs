//! Processes that are replaced while their worker serves.
//!
//! ```text
//!     serving ─▶ due ─▶ its successor is forked, and says that it takes jobs ─▶ closing ─▶ gone
//! ```
//!
//! A closing process ends what it has begun. What it had claimed and not begun is taken back at once, and it claims nothing
//! more (page.rs). Its successor comes first, under the number of a spare child, so the slots that can take jobs are never
//! fewer than they should be. One process at a time is replaced so, or a worker whose processes are all of one age would
//! have to pay for all of them in one moment.
//!
//! An [evicted](Supervisor::evict) process is closed at once, and its successor follows: it does not serve anyhow.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use penstock_faults::planted;

use super::children::Life;
use super::pools::Layout;
use super::{Phase, Supervisor};
use crate::config::{MAX_PLACES, MAX_PROCESSES, RecycleConfig};
use crate::memory::in_words;
use crate::policy::PacketEnd;

/// Replacing processes takes one part in so many of the processors' time, at most. Where jobs are so quick that it would
/// take more, a process runs more jobs than it was to.
const PART_OF_TIME: u32 = 50;
/// Cost of a successor, in forks: its pages are copied when it writes to them, and the old process must exit.
const FORKS_EACH: u32 = 4;
/// How often closing processes are looked at: some wait for a job and must be woken, others may not leave.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Hooks of a process that stops may take this long, or the worker's grace.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// Why a process is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    Jobs(u64),
    Age(Duration),
    Memory {
        own: u64,
        most: u64,
    },
    /// It was forked with another number of slots than this.
    Size(u32),
}

impl std::fmt::Display for Reason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Jobs(jobs) => write!(out, "it has run {jobs} jobs (--max-jobs-per-child)"),
            Self::Memory { own, most } => write!(
                out,
                "it has {} of its own, and may keep {} (--max-memory-per-child)",
                in_words(*own),
                in_words(*most)
            ),
            Self::Size(slots) => write!(out, "it is to have {slots} slots"),
            Self::Age(age) => write!(out, "it is {} s old (--max-age)", age.as_secs()),
        }
    }
}

/// State of a process that takes no more jobs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Closing {
    /// Packets that it has begun and not ended.
    packets: usize,
    /// It has said that it takes no more.
    is_heard: bool,
    leave_by: Option<Instant>,
    /// Whether it was evicted, for a job that can't be stopped.
    is_evicted: bool,
}

/// The process whose turn it is, and its successor.
#[derive(Clone, Copy, Debug)]
struct Turn {
    old: u32,
    successor: u32,
    /// Whether the next may begin once this one's successor is there: it is wanted at once, and jobs may take long.
    is_quick: bool,
}

pub(super) struct Recycling {
    config: RecycleConfig,
    /// Numbers and processes, in the order in which they became due.
    due: VecDeque<(u32, i32, Reason)>,
    turn: Option<Turn>,
    /// When the next turn may begin.
    from: Instant,
    /// When a process reaches its age.
    age_at: Option<Instant>,
    /// When closing processes are looked at, if there are any.
    look_at: Option<Instant>,
    /// Duration of the quickest fork: of the others, a part was spent waiting for a processor.
    fork: Option<Duration>,
    processors: u32,
}

/// Children beyond those of the pools: so many, and places for packets of theirs. One for recycling; and where processes
/// have several slots, one for each two of them that are evicted, as far as there is room.
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

/// As many as a claim can name.
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

    /// How long one turn must be after another.
    fn pause(&self) -> Duration {
        self.fork.unwrap_or_default() * FORKS_EACH * PART_OF_TIME / self.processors
    }

    pub(super) fn forked_within(&mut self, time: Duration) {
        self.fork = Some(self.fork.map_or(time, |fork| fork.min(time)));
    }

    /// All processes are gone.
    pub(super) fn forget(&mut self) {
        self.due.clear();
        (self.turn, self.age_at, self.look_at) = (None, None, None);
    }

    /// When a process that was forked now is old: up to a tenth sooner or later, or all would be replaced at one time.
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
    /// A process is there, and is to be replaced one day.
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

    /// A job of this child has ended, and with it perhaps its packet.
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

    /// Goes on with replacing processes: to be called after each pass.
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

    /// Has a spare child forked for the pool of this one.
    fn make_way(&mut self, old: u32, now: Instant) -> Option<u32> {
        self.add_child(self.children[old as usize].pool, now)
    }

    /// Has a spare child forked for a pool, beside those that it is to have.
    pub(super) fn add_child(&mut self, pool: usize, now: Instant) -> Option<u32> {
        let mut children = self.children.iter();
        let spare = children.position(|child| matches!(child.life, Life::Spare))?;
        self.pools[pool].extra += 1;
        let child = &mut self.children[spare];
        (child.pool, child.failures) = (pool, 0);
        child.life = Life::Wanted { from: now };
        Some(spare as u32)
    }

    /// Closes a process that can serve no more, and has another follow. False: too many are closed already, and this one
    /// is left as it is.
    pub(super) fn evict(&mut self, number: u32, now: Instant) -> bool {
        let child = &self.children[number as usize];
        let is_serving = matches!(child.life, Life::Alive { .. }) && child.closing.is_none();
        let is_old = self.recycling.turn.is_some_and(|turn| turn.old == number);
        // Where its turn has come, the successor is on its way. What a resize may grow by is not for processes that are
        // stuck: each keeps its memory.
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

    /// Returns the number of evicted processes that are still there.
    fn evicted(&self) -> usize {
        let closing = self
            .children
            .iter()
            .filter_map(|child| child.closing.as_ref());
        closing.filter(|closing| closing.is_evicted).count()
    }

    /// A child says that it takes jobs: where it is a successor, the old one may go.
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

    /// Returns the process of this pool whose turn it is, and its successor, while both are to have slots.
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

    /// A closing child says that it takes no more. It may have pulled a packet that it did not claim, or claimed one just
    /// before it was closed.
    pub(super) fn closing_is_heard(&mut self, number: u32) {
        self.take_back_unclaimed();
        self.take_back_unbegun(number);
        if let Some(closing) = &mut self.children[number as usize].closing {
            closing.is_heard = true;
        }
    }

    /// Wakes closing processes that wait for a job, and kills those that do not leave.
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
                    // Once: its death is told.
                    closing.leave_by = now.checked_add(Duration::from_secs(3600));
                    self.kill_overstayed(number as u32, pid, leave_within);
                }
            } else if !closing.is_heard {
                // One with a single slot looks by itself when its job has ended, which a signal would only disturb.
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
            "a process that was replaced did not end within {} s after its last job, and is killed: a thread, perhaps, that a \
             job has left",
            within.as_secs()
        );
        self.kill(number);
    }

    /// A process has gone: true if another has taken its place, or is about to.
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
