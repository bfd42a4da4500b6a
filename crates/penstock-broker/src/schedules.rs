//! Schedules. The broker itself makes their jobs, so no other process's clock or death matters.
//!
//! Each of a schedule's times is decided once: it has a job, is skipped, or was missed. The decision is one record. It
//! contains the job, if there is one, and [`ScheduleProgress::after`], the time up to which everything is then decided.
//! So a killed broker decides a time again only if no client can have seen the job.
//!
//! ```text
//!     timer, start, end of the last job ──► pending ──► a step: one decision for each, again while more times are due
//! ```
//!
//! Times follow the wall clock. If it is set back, decided times do not recur. If it is set forward, the times in
//! between were missed, and the schedule's policy says how many of them to catch up.

mod orders;
mod pages;
mod runs;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use penstock_faults::planted;
use penstock_message::{
    CatchUp, IdSource, MessageId, Notice, OnRunning, Overlap, ScheduleName, SchedulePlan,
    ScheduleTally, SeededMap, SeededState, Skipped,
};
use penstock_schedule::{Calendar, mix, seed_of};

use self::runs::Runs;
use crate::clock::{ClockTime, WhichClock};
use crate::reclaim::live_bases::Entity;
use crate::records::{RecordEvent, ScheduleHead, ScheduleProgress};
use crate::state::BrokerState;
use crate::timers::Timer;
use crate::{Broker, Position};

/// Maximum lateness of a time that counts as kept without asking a policy.
const ON_TIME_MS: u64 = 60_000;
/// Time after which a schedule that could not make a job tries again.
const AGAIN_MS: u64 = 5_000;
/// Distance from a decided time to the present beyond which the clock must have been wrong at the decision.
const CLOCK_WAS_WRONG_MS: u64 = 24 * 60 * 60 * 1000;
/// Maximum number of events that one decision adds to a record.
const EVENTS: usize = 8;
/// Reason of a job that made way for the next.
const NEXT_CAME: &str = "the next job of its schedule was due";

#[derive(Debug)]
pub(crate) struct ScheduleTable {
    all: BTreeMap<ScheduleName, Schedule>,
    /// Schedules by their numbers.
    numbers: BTreeMap<u32, ScheduleName>,
    last_number: u32,
    /// Schedules to review.
    pending: BTreeSet<u32>,
    /// Last jobs of the schedules.
    last_jobs: SeededMap<MessageId, u32>,
}

#[derive(Debug)]
struct Schedule {
    head: ScheduleHead,
    progress: ScheduleProgress,
    /// Number that distinguishes it from other schedules of its name.
    number: u32,
    base: Position,
    /// Its times, read when they are first needed; an error if this program can't read them.
    calendar: Option<Result<Calendar, String>>,
    /// Wall time for which a timer is set.
    timer: Option<u64>,
    runs: Runs,
}

impl Schedule {
    fn journal_bytes(&self) -> u64 {
        let declared = self.head.declared.as_ref().map(|(plan, _)| plan);
        let plans = declared.into_iter().chain(&self.head.set);
        let bytes = plans.map(|plan| plan_bytes(plan) as u64);
        256 + bytes.sum::<u64>()
    }

    fn calendar(&mut self, name: &ScheduleName) -> Option<&Calendar> {
        let head = &self.head;
        let read = || match head.plan() {
            Some(plan) => Calendar::new(&plan.timing, head.anchor, seed(name)),
            None => Err("nobody says when".to_owned()),
        };
        self.calendar.get_or_insert_with(read).as_ref().ok()
    }
}

fn plan_bytes(plan: &SchedulePlan) -> usize {
    let extras = plan.message.extras.as_deref();
    let extras = extras.map_or(0, |extras| 64 + extras.headers_bytes());
    128 + plan.message.body.len() + plan.message.task.len() + plan.queue.len() + extras
}

fn seed(name: &ScheduleName) -> u64 {
    seed_of(&[&name.app, &name.name])
}

/// A schedule, and how far it has come. For the simulator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduleState {
    /// Plan that holds.
    pub plan: Option<SchedulePlan>,
    pub is_paused: bool,
    /// Time from which intervals count.
    pub anchor: u64,
    /// Time up to which all is decided.
    pub after: u64,
    /// Time whose job waits for the end of the last one.
    pub queued: Option<u64>,
    /// Last time that has had a job, and the job.
    pub last: Option<(u64, MessageId)>,
    pub tally: ScheduleTally,
}

/// Returns the id of a time's job, which is the same each time it is computed.
fn job_of(seed: u64, time: u64) -> MessageId {
    let (first, second) = (mix(seed ^ mix(time)), mix(mix(seed) ^ time));
    let mut random = [0; 10];
    random[..8].copy_from_slice(&first.to_be_bytes());
    random[8..].copy_from_slice(&second.to_be_bytes()[..2]);
    MessageId::new(IdSource {
        unix_ms: time,
        random,
    })
}

impl ScheduleTable {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            all: BTreeMap::new(),
            numbers: BTreeMap::new(),
            last_number: 0,
            pending: BTreeSet::new(),
            last_jobs: SeededMap::with_hasher(hashing),
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.last_jobs.hasher()
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Counts the journal bytes of all schedules.
    pub(crate) fn journal_bytes(&self) -> u64 {
        self.all.values().map(Schedule::journal_bytes).sum()
    }

    /// Returns a number that no schedule has. (A timer stores it, and would take more room for a longer one.)
    fn next_number(&mut self) -> u32 {
        loop {
            self.last_number = self.last_number.wrapping_add(1);
            if !self.numbers.contains_key(&self.last_number) {
                return self.last_number;
            }
        }
    }

    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Schedules a review of all of them: the clock was set, or there is space again.
    pub(crate) fn review(&mut self) {
        self.pending.extend(self.numbers.keys());
    }

    /// Schedules a review of the schedule whose timer has fired.
    pub(crate) fn wake(&mut self, number: u32, at: u64) {
        if !self.awaits(number, at) {
            return;
        }
        if let Some(name) = self.numbers.get(&number)
            && let Some(schedule) = self.all.get_mut(name)
        {
            schedule.timer = None;
            self.pending.insert(number);
        }
    }

    /// Whether this is the timer that the schedule has set.
    pub(crate) fn awaits(&self, number: u32, at: u64) -> bool {
        let name = self.numbers.get(&number);
        let schedule = name.and_then(|name| self.all.get(name));
        schedule.is_some_and(|schedule| schedule.timer == Some(at))
    }

    pub(crate) fn is_current(&self, base: Position, number: u32) -> bool {
        let name = self.numbers.get(&number);
        let schedule = name.and_then(|name| self.all.get(name));
        schedule.is_some_and(|schedule| schedule.base == base)
    }

    /// Schedules a review of the schedule whose last job this was.
    pub(crate) fn job_ended(&mut self, id: &MessageId) {
        if self.await_jobs()
            && let Some(number) = self.last_jobs.get(id)
        {
            self.pending.insert(*number);
        }
    }

    /// Whether the end of any job matters to a schedule.
    pub(crate) fn await_jobs(&self) -> bool {
        !self.last_jobs.is_empty()
    }
}

impl BrokerState {
    /// Enters a schedule: a new one, a changed one, or one that is carried forward.
    pub(crate) fn set_schedule(
        &mut self,
        name: &ScheduleName,
        head: ScheduleHead,
        progress: ScheduleProgress,
    ) {
        let known = self.schedules.all.get_mut(name);
        let runs = known.map_or_else(Runs::default, |known| std::mem::take(&mut known.runs));
        self.remove_schedule(name);
        let schedules = &mut self.schedules;
        let number = schedules.next_number();
        let schedule = Schedule {
            head,
            progress: ScheduleProgress::default(),
            number,
            base: self.position,
            calendar: None,
            timer: None,
            runs,
        };
        self.live_bytes += schedule.journal_bytes();
        schedules.numbers.insert(number, name.clone());
        schedules.all.insert(name.clone(), schedule);
        schedules.pending.insert(number);
        self.live_bases
            .add(self.position, Entity::Schedule { number });
        self.change_schedule(name, progress);
    }

    /// Sets the progress of a schedule.
    pub(crate) fn change_schedule(&mut self, name: &ScheduleName, progress: ScheduleProgress) {
        let schedules = &mut self.schedules;
        let Some(schedule) = schedules.all.get_mut(name) else {
            return;
        };
        if let Some((_, job)) = schedule.progress.last {
            schedules.last_jobs.remove(&job);
        }
        if let Some((_, job)) = progress.last {
            schedules.last_jobs.insert(job, schedule.number);
        }
        schedule.progress = progress;
    }

    pub(crate) fn remove_schedule(&mut self, name: &ScheduleName) {
        self.change_schedule(name, ScheduleProgress::default());
        let schedules = &mut self.schedules;
        let Some(schedule) = schedules.all.remove(name) else {
            return;
        };
        schedules.numbers.remove(&schedule.number);
        schedules.pending.remove(&schedule.number);
        self.live_bytes -= schedule.journal_bytes();
        self.live_bases.abandon();
        if schedule.timer.is_some() {
            self.timers.abandon(WhichClock::Wall);
        }
    }

    /// Whether the job has not ended: it waits, runs, will be retried, or a group runs in its place.
    fn is_unfinished(&self, id: &MessageId) -> bool {
        let messages = &self.messages;
        messages.copies(id).any(|slot| !messages[slot].is_failed())
            || self
                .joins
                .of_result(id)
                .is_some_and(|join| !self.joins[join].is_decided())
    }

    fn set_schedule_timer(&mut self, name: &ScheduleName, at: Option<u64>) {
        let Some(schedule) = self.schedules.all.get_mut(name) else {
            return;
        };
        if schedule.timer == at {
            return;
        }
        if std::mem::replace(&mut schedule.timer, at).is_some() {
            self.timers.abandon(WhichClock::Wall);
        }
        if let Some(at) = at {
            let number = schedule.number;
            let when = ClockTime {
                at,
                clock: WhichClock::Wall,
            };
            self.timers.set(when, Timer::Schedule { number, at });
        }
    }
}

/// Outcome of the review of a schedule.
enum Looked {
    /// Something was decided, and there may be more.
    Decided,
    /// Nothing needs to be done before this wall time.
    Wait(Option<u64>),
}

impl Broker {
    /// Returns how far a schedule has come. For the simulator.
    pub fn schedule_state(&self, name: &ScheduleName) -> Option<ScheduleState> {
        let Schedule { head, progress, .. } = self.state.schedules.all.get(name)?;
        Some(ScheduleState {
            plan: head.plan().cloned(),
            is_paused: head.is_paused,
            anchor: head.anchor,
            after: progress.after,
            queued: progress.queued,
            last: progress.last,
            tally: progress.tally,
        })
    }

    /// Returns the id of the job that a time of a schedule has. For the simulator.
    pub fn scheduled_job(name: &ScheduleName, time: u64) -> MessageId {
        job_of(seed(name), time)
    }

    fn next_scheduled(&mut self) -> Option<u64> {
        let all = self.state.schedules.all.iter_mut();
        let due = all.filter_map(|(name, schedule)| {
            if schedule.head.is_paused {
                return None;
            }
            let after = schedule.progress.after;
            let calendar = schedule.calendar(name)?;
            Some(calendar.due(calendar.next(after)?))
        });
        due.min()
    }

    /// Whether a time of a schedule is due and undecided.
    pub fn has_due_schedule(&mut self) -> bool {
        let now = self.clocks.wall();
        self.next_scheduled().is_some_and(|due| due <= now)
    }

    /// Returns the milliseconds until the next time at which something may be due. For a test double, whose clock jumps
    /// from one such time to the next. Skips work that is already due but waits for space.
    pub fn next_on_clock_ms(&mut self) -> Option<u64> {
        let wall = self.clocks.wall();
        let scheduled = self.next_scheduled().map(|due| due.saturating_sub(wall));
        let others = self.state.timers.next_but_schedules_ms(&self.clocks);
        let all = scheduled.into_iter().chain(others);
        all.filter(|ms| *ms > 0).min()
    }

    /// Returns a number that changes when a schedule has made a job or a delayed job has become ready.
    pub fn clock_progress(&self) -> u64 {
        let all = self.state.schedules.all.values();
        let made: u64 = all.map(|schedule| schedule.progress.tally.fired).sum();
        made.wrapping_sub(self.state.queues.delayed())
    }

    pub(crate) fn resume_schedules(&mut self) {
        self.state.schedules.review();
    }

    /// Makes the jobs of times that have come, and decides on times that were missed.
    pub(crate) fn step_schedules(&mut self) {
        while self.step_size() >= EVENTS
            && let Some(number) = self.state.schedules.pending.pop_first()
        {
            let Some(name) = self.state.schedules.numbers.get(&number).cloned() else {
                continue;
            };
            // Before the next job replaces the last.
            self.watch_run(&name);
            match self.review_schedule(&name) {
                Looked::Decided => {
                    self.added += EVENTS;
                    self.state.schedules.pending.insert(number);
                }
                Looked::Wait(at) => {
                    let look = self.watch_run(&name);
                    let at = [at, look].into_iter().flatten().min();
                    self.state.set_schedule_timer(&name, at);
                }
            }
        }
    }

    /// Notes the end of the last job's run, or reports it if it hangs. Returns the wall time of the next check.
    fn watch_run(&mut self, name: &ScheduleName) -> Option<u64> {
        let now = self.clocks.steady();
        let schedule = self.state.schedules.all.get(name)?;
        let (_, job) = schedule.progress.last?;
        if !schedule.runs.is_under_way() {
            return None;
        }
        let is_unfinished = self.state.is_unfinished(&job);
        let begun_at = self.begun_at(&job);
        let schedule = self.state.schedules.all.get_mut(name)?;
        if !is_unfinished {
            schedule.runs.end(now);
            return None;
        }
        let hung = schedule.runs.hung(now, begun_at);
        let look_at = schedule.runs.look_at();
        if let Some(hung) = hung {
            self.notice(Notice::Hung {
                schedule: name.clone(),
                job,
                for_ms: hung.for_ms,
                median_ms: hung.median_ms,
            });
        }
        look_at.map(|at| self.clocks.wall_at(at))
    }

    /// Returns the steady time at which an unfinished job reached its worker; `None` if it waits; 0 if a group runs in
    /// its place.
    fn begun_at(&self, id: &MessageId) -> Option<u64> {
        let messages = &self.state.messages;
        let mut copies = messages.copies(id).peekable();
        if copies.peek().is_none() {
            return Some(0);
        }
        let lease = copies.find_map(|slot| messages.lease_state(slot))?;
        let for_ms = self.clocks.wall().saturating_sub(lease.grant.started_at);
        Some(self.clocks.steady().saturating_sub(for_ms))
    }

    fn review_schedule(&mut self, name: &ScheduleName) -> Looked {
        let now = self.clocks.wall();
        let is_admitted = self.check_admission().is_ok();
        let Some(schedule) = self.state.schedules.all.get_mut(name) else {
            return Looked::Wait(None);
        };
        let Some(plan) = schedule.head.plan().filter(|_| !schedule.head.is_paused) else {
            return Looked::Wait(None);
        };
        let (catch_up, window_ms, jitter_ms) =
            (plan.catch_up, plan.window_ms, plan.timing.jitter_ms);
        let mut progress = schedule.progress;
        let may_be_ahead_ms = match planted!("fire-twice-after-step-back") {
            true => 0,
            false => CLOCK_WAS_WRONG_MS,
        };
        if progress.after > now.saturating_add(may_be_ahead_ms) {
            progress.after = now;
            self.decide_schedule(name, progress);
            return Looked::Decided;
        }
        if let (Some(time), Some((_, job))) = (progress.queued, progress.last)
            && !self.state.is_unfinished(&job)
        {
            if !is_admitted {
                return Looked::Wait(Some(now + AGAIN_MS));
            }
            progress.queued = None;
            self.fire(name, progress, time);
            return Looked::Decided;
        }
        let Some(schedule) = self.state.schedules.all.get_mut(name) else {
            return Looked::Wait(None);
        };
        let Some(calendar) = schedule.calendar(name) else {
            return Looked::Wait(None);
        };
        let Some(next) = calendar.next(progress.after) else {
            return Looked::Wait(None);
        };
        let due = calendar.due(next);
        if due > now {
            return Looked::Wait(Some(due));
        }
        if !is_admitted {
            return Looked::Wait(Some(now + AGAIN_MS));
        }
        let (missed, last) = missed(
            calendar,
            progress.after,
            now - jitter_ms.min(now),
            catch_up,
            window_ms,
        );
        if missed > 0 {
            progress.tally.missed += missed;
            progress.skipped = Some((last, Skipped::Missed));
            progress.after = last;
            self.decide_schedule(name, progress);
            return Looked::Decided;
        }
        progress.after = next;
        let late_ms = now - due;
        let is_kept = late_ms <= ON_TIME_MS
            || match catch_up {
                CatchUp::Skip => false,
                CatchUp::Once | CatchUp::All => late_ms <= window_ms,
            };
        if is_kept {
            self.reach_schedule(name, progress, next);
        } else {
            progress.tally.missed += 1;
            progress.skipped = Some((next, Skipped::Missed));
            self.decide_schedule(name, progress);
        }
        Looked::Decided
    }

    /// Makes the job of a kept time, unless an earlier job is in its way. Returns the job.
    fn reach_schedule(
        &mut self,
        name: &ScheduleName,
        mut progress: ScheduleProgress,
        time: u64,
    ) -> Option<MessageId> {
        let schedule = &self.state.schedules.all[name];
        let overlap = schedule
            .head
            .plan()
            .map_or(Overlap::Skip, |plan| plan.overlap);
        let earlier = progress.last.map(|(_, job)| job);
        let earlier = earlier.filter(|job| self.state.is_unfinished(job));
        let earlier =
            earlier.filter(|job| !planted!("skip-forgets-retry") || self.begun_at(job).is_some());
        let Some(earlier) = earlier.filter(|_| overlap != Overlap::Allow) else {
            return self.fire(name, progress, time);
        };
        let has_queued = progress.queued.is_some();
        match overlap {
            Overlap::CancelPrevious => {
                if let Some(queued) = progress.queued.replace(time)
                    && !planted!("queue-forgets-its-time")
                {
                    progress.tally.skipped += 1;
                    progress.skipped = Some((queued, Skipped::Overlap));
                }
                self.decide_schedule(name, progress);
                self.cancel_in_steps(&earlier, NEXT_CAME, OnRunning::Ask);
            }
            Overlap::Queue if !has_queued => {
                progress.queued = Some(time);
                self.decide_schedule(name, progress);
            }
            _ => {
                progress.tally.skipped += 1;
                progress.skipped = Some((time, Skipped::Overlap));
                self.decide_schedule(name, progress);
            }
        }
        None
    }

    /// Makes the job of a time.
    fn fire(
        &mut self,
        name: &ScheduleName,
        mut progress: ScheduleProgress,
        time: u64,
    ) -> Option<MessageId> {
        let job = job_of(seed(name), time);
        self.make(name, &mut progress, time, job)
    }

    fn make(
        &mut self,
        name: &ScheduleName,
        progress: &mut ScheduleProgress,
        time: u64,
        job: MessageId,
    ) -> Option<MessageId> {
        let plan = self.state.schedules.all[name].head.plan()?.clone();
        let (queue, mut message) = (plan.queue, plan.message);
        let queues = [queue];
        let bytes = message.body.len() as u64;
        let room = self.check_room(&queues, bytes, false, &mut Vec::new());
        if room.is_err() {
            progress.tally.skipped += 1;
            progress.skipped = Some((time, Skipped::QueueFull));
            self.decide_schedule(name, *progress);
            return None;
        }
        progress.tally.fired += 1;
        progress.last = Some((time, job));
        self.decide_schedule(name, *progress);
        // A clock that was far wrong may repeat a time whose job still exists.
        if !self.state.messages.holds(&job) {
            message.id = job;
            self.publish(&queues, &mut message, None, None, false);
        }
        let now = self.clocks.steady();
        if let Some(schedule) = self.state.schedules.all.get_mut(name) {
            schedule.runs.begin(now);
        }
        Some(job)
    }

    fn decide_schedule(&mut self, name: &ScheduleName, progress: ScheduleProgress) {
        self.record(&RecordEvent::ScheduleFired {
            schedule: Cow::Borrowed(name),
            progress: Some(progress),
        });
        self.state.change_schedule(name, progress);
    }

    /// Writes the full state of a schedule.
    pub(crate) fn carry_schedule(&mut self, number: u32) {
        let position = self.state.position;
        let schedules = &mut self.state.schedules;
        let Some(name) = schedules.numbers.get(&number) else {
            return;
        };
        let Some(schedule) = schedules.all.get_mut(name) else {
            return;
        };
        schedule.base = position;
        let event = RecordEvent::ScheduleSet {
            schedule: Cow::Borrowed(name),
            head: Cow::Borrowed(&schedule.head),
            progress: schedule.progress,
        };
        self.writer.push(&self.state.names, &event);
    }
}

/// Returns the number of times in `after`..`sure`, all of which are due, that are not caught up because there are later
/// ones, and the last of them.
fn missed(
    calendar: &Calendar,
    after: u64,
    sure: u64,
    catch_up: CatchUp,
    window_ms: u64,
) -> (u64, u64) {
    if catch_up == CatchUp::All {
        let old = calendar.pass(after, sure.saturating_sub(window_ms));
        if old.0 > 0 {
            return old;
        }
    }
    let kept = match catch_up {
        CatchUp::All => CatchUp::CAP as u64,
        CatchUp::Once | CatchUp::Skip => 1,
    };
    calendar.pass_but(after, sure, kept)
}
