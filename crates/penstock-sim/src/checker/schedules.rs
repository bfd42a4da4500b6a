//! Times of schedules: each is fired, skipped or missed, exactly one of these, as its policies say.
//!
//! The broker decides times on its own. So after each call the checker looks how far each schedule has come, and checks
//! the times in between against an oracle: `penstock-schedule`, whose own tests check it against another one.

use std::collections::{BTreeMap, BTreeSet};

use penstock_broker::{Broker, ScheduleState};
use penstock_message::{
    CatchUp, Durability, MessageId, Op, Overlap, ScheduleName, SchedulePlan, ScheduleStep, Space,
};
use penstock_schedule::{Calendar, seed_of};

use super::Checker;
use super::story::Event;
use crate::model::{ScheduleModel, Verdict};

/// Maximum lateness of a time that counts as kept.
const ON_TIME_MS: u64 = 60_000;
/// Maximum number of times that a broker catches up on.
const CAUGHT_UP: usize = 100;
/// Number of times at the end of a long gap that are checked one by one.
const LISTED: usize = 200;
/// Maximum time for which a due time may wait for its decision at a quiet moment.
const LATE_MS: u64 = 1_000;

/// Schedule as of the checker's last look.
#[derive(Clone, Debug)]
pub(super) struct Look {
    life: u64,
    state: ScheduleState,
    changes: u64,
    runs: u64,
    answered: u64,
    /// Whether its last job had certainly ended.
    was_finished: bool,
}

pub(super) type Looks = BTreeMap<ScheduleName, Look>;

/// Times that were decided between two looks.
struct Decided {
    count: u64,
    /// The last of these times.
    listed: Vec<u64>,
}

fn calendar(name: &ScheduleName, plan: &SchedulePlan, anchor: u64) -> Result<Calendar, String> {
    Calendar::new(&plan.timing, anchor, seed_of(&[&name.app, &name.name]))
}

/// Whether a job waits in the flow of the plan's jobs, and may be delivered as often.
fn is_line_of(broker: &Broker, job: &MessageId, plan: &SchedulePlan) -> bool {
    let message = &plan.message;
    broker.line_of(job) == Some((&plan.queue, &message.task, message.priority))
        && broker.max_deliveries_of(job) == Some(message.max_deliveries)
}

/// Returns the plan that made a job: this one, if none of the others fits better.
fn made_by<'a>(
    broker: &Broker,
    job: &MessageId,
    plan: &'a SchedulePlan,
    others: &'a [SchedulePlan],
) -> &'a SchedulePlan {
    let is_line = |plan: &&SchedulePlan| is_line_of(broker, job, plan);
    let mut fitting = [plan].into_iter().chain(others).filter(is_line);
    fitting.next().unwrap_or(plan)
}

/// Counts the decided times, including the one that waits for the last job to end.
fn counted(state: &ScheduleState) -> u64 {
    let tally = state.tally;
    tally.fired + tally.skipped + tally.missed + u64::from(state.queued.is_some())
}

impl Decided {
    fn new(calendar: &Calendar, after: u64, until: u64) -> Self {
        let (mut count, mut from) = (0, after);
        loop {
            let (more, last) = calendar.pass_but(from, until, LISTED as u64);
            if more == 0 {
                break;
            }
            count += more;
            from = last;
        }
        let mut listed = Vec::new();
        while let Some(time) = calendar.next(from).filter(|time| *time <= until) {
            listed.push(time);
            from = time;
        }
        count += listed.len() as u64;
        Self { count, listed }
    }
}

impl Checker {
    /// Checks the progress of each schedule.
    pub fn look_at_schedules(&mut self, broker: &Broker) -> Verdict {
        if self.model.schedules.is_empty() && self.looks.is_empty() {
            return Ok(());
        }
        self.looks
            .retain(|name, _| self.model.schedules.contains_key(name));
        let names: Vec<ScheduleName> = self.model.schedules.keys().cloned().collect();
        let mut had_news = false;
        for name in names {
            let schedule = self.model.schedules[&name].clone();
            let Some(state) = broker.schedule_state(&name) else {
                return Err(format!("{name} was set, and is lost"));
            };
            self.is_as_ordered(&name, &schedule, &state)?;
            let look = self
                .looks
                .get(&name)
                .filter(|look| look.life == schedule.life);
            let before = look.cloned().unwrap_or_else(|| Look {
                life: schedule.life,
                state: ScheduleState {
                    after: schedule.moved_at,
                    ..ScheduleState::default()
                },
                changes: schedule.changes,
                runs: 0,
                answered: 0,
                was_finished: true,
            });
            let has_news = before.state != state
                || before.changes != schedule.changes
                || before.runs != schedule.runs;
            had_news |= has_news;
            if has_news {
                self.were_decided(&name, &schedule, &before, &state, broker)?;
            }
            self.remember(name, state);
        }
        if had_news {
            self.look_for_ended(broker)?;
        }
        Ok(())
    }

    /// Finds jobs of schedules that ended unseen: waiting jobs that were cancelled in favour of the next.
    fn look_for_ended(&mut self, broker: &Broker) -> Verdict {
        for job in self.model.scheduled_jobs() {
            if !broker.holds(&job) && broker.knows(&job) {
                self.tell(Event::Gone(job))?;
            }
        }
        Ok(())
    }

    /// Stores the observed state of a schedule for the next look.
    fn remember(&mut self, name: ScheduleName, state: ScheduleState) {
        let Some(schedule) = self.model.schedules.get(&name) else {
            return;
        };
        let last = state.last.map(|(_, job)| job);
        let look = Look {
            life: schedule.life,
            changes: schedule.changes,
            runs: schedule.runs,
            answered: schedule.answered,
            was_finished: last.is_none_or(|job| self.model.is_surely_finished(job)),
            state,
        };
        self.looks.insert(name, look);
    }

    /// Compares a schedule with the orders that were given for it.
    fn is_as_ordered(
        &self,
        name: &ScheduleName,
        ordered: &ScheduleModel,
        found: &ScheduleState,
    ) -> Verdict {
        let is_same = ordered.plan() == found.plan.as_ref()
            && ordered.is_paused == found.is_paused
            && ordered.anchor == found.anchor;
        match is_same {
            true => Ok(()),
            false => Err(format!("{name} is to be {ordered:?}, and is {found:?}")),
        }
    }

    /// Checks the decisions between two looks, and notes the jobs that were created.
    fn were_decided(
        &mut self,
        name: &ScheduleName,
        schedule: &ScheduleModel,
        before: &Look,
        found: &ScheduleState,
        broker: &Broker,
    ) -> Verdict {
        let Some(plan) = schedule.plan().cloned() else {
            return Ok(());
        };
        let has_changed = before.changes != schedule.changes;
        // Each of these was in force for a moment between two looks.
        let between = schedule.plans_since(before.changes);
        let calendar = calendar(name, &plan, schedule.anchor)?;
        let after = match has_changed {
            true => before.state.after.max(schedule.moved_at),
            false => before.state.after,
        };
        if found.after < before.state.after {
            return Err(format!(
                "{name} had decided its times up to {}, and now up to {}",
                before.state.after, found.after
            ));
        }
        let decided = Decided::new(&calendar, after, found.after);
        let now = self.model.now.wall;
        let was_there = before.state.plan.is_some();
        if was_there && !has_changed && schedule.is_paused && schedule.runs == before.runs {
            return Err(format!(
                "{name} is paused, and goes on from {before:?} to {found:?}"
            ));
        }
        if !has_changed
            && let Some(early) = decided
                .listed
                .iter()
                .find(|time| calendar.due(**time) > now)
        {
            return Err(format!(
                "{name} has decided {early} at {now}, before it was due"
            ));
        }
        let (was, is) = (&before.state.tally, &found.tally);
        let runs = schedule.runs - before.runs;
        let made = is.fired - was.fired;
        let missed = is.missed - was.missed;
        let skipped = is.skipped - was.skipped;
        let is_queued = u64::from(found.queued.is_some());
        let was_queued = u64::from(before.state.queued.is_some());
        let counted = made + missed + skipped + is_queued;
        let due = decided.count + runs + was_queued;
        // Times just before a change were decided by the old plan, or not at all.
        if counted < due || counted > due && !has_changed {
            return Err(format!(
                "{name}: {} times, {runs} runs and {was_queued} queued before have come to {made} jobs, {skipped} \
                 skipped, {missed} missed and {is_queued} queued",
                decided.count
            ));
        }
        self.counts.scheduled += made;
        if has_changed && let Some(plan) = &before.state.plan {
            // These times may have been decided just before the change.
            let calendar = self::calendar(name, plan, before.state.anchor)?;
            let until = found.after.min(after);
            let decided = Decided::new(&calendar, before.state.after, until);
            self.note_jobs(name, (plan, &between), &decided.listed, broker)?;
        }
        let mut fired = Vec::new();
        if let Some(time) = before.state.queued {
            // The time may have had its job just before the change.
            let job = Broker::scheduled_job(name, time);
            let before = before.state.plan.as_ref().filter(|_| has_changed);
            let before = before.filter(|before| is_line_of(broker, &job, before));
            let plan = before.unwrap_or(&plan);
            fired = self.note_jobs(name, (plan, &between), &[time], broker)?;
        }
        fired.extend(self.note_jobs(name, (&plan, &between), &decided.listed, broker)?);
        if let Some((time, job)) = found.last.filter(|_| found.last != before.state.last)
            && !self.model.knows(job)
        {
            // A run that somebody ordered, and that waited for the last job to end.
            self.was_made(name, job, made_by(broker, &job, &plan, &between))?;
            fired.push(time);
        }
        // Runs that have waited, too, and that others have followed within this look.
        for time in now..now + runs {
            let job = Broker::scheduled_job(name, time);
            if broker.knows(&job) && !self.model.knows(job) {
                self.was_made(name, job, made_by(broker, &job, &plan, &between))?;
                fired.push(time);
            }
        }
        let was_queued = before.state.queued;
        self.last_makes_way(name, (was_queued, has_changed), found, broker)?;
        let answered = schedule.answered - before.answered;
        let is_exact = !has_changed && broker.status().evicted == 0;
        if is_exact && fired.len() as u64 + answered != made {
            return Err(format!(
                "{name} counts {made} jobs more, and has made those of {fired:?}, and {answered} when told to"
            ));
        }
        if is_exact && runs == 0 {
            self.policy_is_kept(name, &plan, (before, &decided), (&fired, missed), &calendar)?;
        }
        Ok(())
    }

    /// Notes that the last job of a schedule must stop if a time that waits for it has come.
    fn last_makes_way(
        &mut self,
        name: &ScheduleName,
        (was_queued, has_changed): (Option<u64>, bool),
        found: &ScheduleState,
        broker: &Broker,
    ) -> Verdict {
        let cancels = |plan: &SchedulePlan| plan.overlap == Overlap::CancelPrevious;
        let surely = !has_changed && found.plan.as_ref().is_some_and(cancels);
        let (Some(time), Some((_, job))) = (found.queued, found.last) else {
            return Ok(());
        };
        let waited_before = was_queued == Some(time);
        if waited_before && !has_changed {
            return Ok(());
        }
        let jobs = self.model.makes_way_with(job).into_iter();
        let items = jobs.map(|index| &self.model.items[index]);
        // A time that has waited for the job may cancel it after a change.
        let items = items.filter(|item| !waited_before || item.asked.is_none());
        let ids: BTreeSet<MessageId> = items.map(|item| item.message.id).collect();
        // After a change, the time may belong to another plan, which cancels nothing.
        if surely || ids.iter().any(|id| broker.is_to_stop(id)) {
            let moment = Self::moment_of(&ids, broker);
            let position = broker.last_position().0;
            self.tell(Event::MakesWay(
                name.clone(),
                time,
                position,
                job,
                Box::new(moment),
            ))?;
        }
        Ok(())
    }

    /// Notes the jobs of decided times, which this plan made, or one of those between. Returns those times.
    fn note_jobs(
        &mut self,
        name: &ScheduleName,
        (plan, between): (&SchedulePlan, &[SchedulePlan]),
        times: &[u64],
        broker: &Broker,
    ) -> Result<Vec<u64>, String> {
        let mut fired = Vec::new();
        for time in times {
            let job = Broker::scheduled_job(name, *time);
            if !broker.knows(&job) {
                continue;
            }
            let plan = made_by(broker, &job, plan, between);
            let mut plans = between.iter().chain([plan]);
            if plans.all(|plan| plan.overlap != Overlap::Allow) {
                let schedule = self.model.schedules.get(name);
                let last = schedule.and_then(|schedule| schedule.last);
                self.model.nothing_is_in_the_way(name, last)?;
            }
            self.was_made(name, job, plan)?;
            fired.push(*time);
        }
        Ok(fired)
    }

    /// Checks by the policy which of the times were missed, and that each kept time has a job if nothing prevents it.
    fn policy_is_kept(
        &self,
        name: &ScheduleName,
        plan: &SchedulePlan,
        (before, decided): (&Look, &Decided),
        (fired, missed): (&[u64], u64),
        calendar: &Calendar,
    ) -> Verdict {
        let now = self.model.now.wall;
        // Times that are certainly due, whatever their jitter.
        let sure = now.saturating_sub(plan.timing.jitter_ms);
        let surely = Decided::new(calendar, before.state.after, sure).listed;
        let kept = |time: &u64| {
            let late_ms = now.saturating_sub(calendar.due(*time));
            let later = surely.iter().filter(|other| *other > time).count();
            let is_in_window = late_ms <= plan.window_ms;
            match plan.catch_up {
                _ if plan.catch_up != CatchUp::All && later > 0 => false,
                CatchUp::All if *time <= sure.saturating_sub(plan.window_ms) && *time <= sure => {
                    false
                }
                CatchUp::All if later >= CAUGHT_UP => false,
                CatchUp::Skip => late_ms <= ON_TIME_MS,
                CatchUp::Once | CatchUp::All => late_ms <= ON_TIME_MS || is_in_window,
            }
        };
        let kept: Vec<u64> = decided.listed.iter().copied().filter(kept).collect();
        let to_miss = decided.count - kept.len() as u64;
        if missed != to_miss {
            return Err(format!(
                "{name} has missed {missed} of {} times at {now}, and not {to_miss}: by {:?} within {} ms it keeps {kept:?}",
                decided.count, plan.catch_up, plan.window_ms
            ));
        }
        if let Some(wrong) = fired
            .iter()
            .find(|time| !kept.contains(time) && before.state.queued != Some(**time))
        {
            return Err(format!(
                "{name} has made a job for {wrong}, which it was to miss"
            ));
        }
        let last = before.state.last.map(|(_, job)| job);
        let is_finished =
            before.was_finished && last.is_none_or(|job| self.model.is_surely_finished(job));
        let is_free =
            plan.overlap == Overlap::Allow || is_finished && before.state.queued.is_none();
        if let Some(first) = kept
            .first()
            .filter(|_| is_free && !self.model.has_limits(&plan.queue))
            && !fired.contains(first)
        {
            return Err(format!(
                "{name} has no job for {first}, and nothing was in its way"
            ));
        }
        Ok(())
    }

    /// Checks, at a quiet moment, that no time still waits for its decision.
    pub(super) fn times_are_decided(&self, broker: &Broker) -> Verdict {
        if broker.status().space != Space::Plenty {
            return Ok(());
        }
        let now = self.model.now.wall;
        for (name, look) in &self.looks {
            let schedule = &self.model.schedules[name];
            let Some(plan) = schedule.plan().filter(|_| !schedule.is_paused) else {
                continue;
            };
            let calendar = calendar(name, plan, schedule.anchor)?;
            let next = calendar.next(look.state.after);
            if let Some(next) = next.filter(|next| calendar.due(*next) + LATE_MS < now) {
                return Err(format!("{name} has not decided {next} at {now}"));
            }
            if let (Some(queued), Some((_, last))) = (look.state.queued, look.state.last)
                && self.model.is_surely_finished(last)
            {
                return Err(format!(
                    "{name} keeps {queued} queued behind {last}, which has ended"
                ));
            }
        }
        Ok(())
    }

    /// Notes that no crash can take back the observations of schedules any more.
    pub(super) fn schedules_are_safe(&mut self) {
        self.base_looks = self.looks.clone();
        self.unsafe_jobs.clear();
    }

    /// Forgets decisions on schedules that a crash may have taken back. Returns whether the story has changed. Checks a
    /// new broker again if it has repeated some of these decisions.
    pub(super) fn forget_scheduled(
        &mut self,
        broker: &Broker,
        found_through: u64,
    ) -> Result<bool, String> {
        let events = self.story.len();
        self.looked_at = 0;
        let mut lost = Vec::new();
        for (job, (name, plan)) in &self.unsafe_jobs {
            // A broker that has lost a change of the schedule creates the job by the earlier plan.
            let is_elsewhere = broker.line_of(job).is_some_and(|line| {
                !is_line_of(broker, job, plan) && !self.model.was_scheduled_to(*job, line)
            });
            if broker.knows(job) && !is_elsewhere {
                continue;
            }
            let may_be_lost = self.was_run_unsafely(name, found_through);
            if self.model.surely_goes_on(*job) && !may_be_lost {
                return Err(format!(
                    "job {job} of a schedule was handed out, and is lost"
                ));
            }
            if may_be_lost || !self.model.was_lent(*job) {
                lost.push(*job);
            }
        }
        // The new broker may have decided a time again, by the plan that it knows.
        let cancels_again = |name: &ScheduleName, time: u64| {
            broker.schedule_state(name).is_some_and(|it| {
                let overlap = it.plan.map(|plan| plan.overlap);
                it.queued == Some(time) && overlap == Some(Overlap::CancelPrevious)
            })
        };
        self.story.retain(|event| match event {
            Event::Scheduled(_, job, _) => !lost.contains(job),
            Event::MakesWay(name, time, position, ..) => {
                *position <= found_through || cancels_again(name, *time)
            }
            _ => true,
        });
        for job in lost {
            self.unsafe_jobs.remove(&job);
            self.model.forget_scheduled(job);
            self.base.forget_scheduled(job);
        }
        Ok(self.story.len() < events)
    }

    /// Whether a client ordered a run, did not ask for the disk (ours always do), and the order is lost. Such a run may
    /// create the job of a time that had waited.
    fn was_run_unsafely(&self, name: &ScheduleName, found_through: u64) -> bool {
        let is_run = |op: &Op| match op {
            Op::Schedule { schedule, step } => schedule == name && *step == ScheduleStep::Run,
            _ => false,
        };
        self.txs.values().any(|decided| {
            let is_lost = decided.position > found_through;
            is_lost && decided.durability != Durability::Disk && decided.tx.ops.iter().any(is_run)
        })
    }

    /// Reports a job that a schedule has created to the model.
    fn was_made(&mut self, name: &ScheduleName, job: MessageId, plan: &SchedulePlan) -> Verdict {
        self.unsafe_jobs.insert(job, (name.clone(), plan.clone()));
        self.tell(Event::Scheduled(name.clone(), job, Box::new(plan.clone())))
    }

    /// Examines the schedules after a recovery: the new broker may have decided some times already.
    pub(super) fn look_at_recovered(&mut self, broker: &Broker) -> Verdict {
        self.looks = self.base_looks.clone();
        self.looks.retain(|name, look| {
            let schedule = self.model.schedules.get(name);
            schedule.is_some_and(|schedule| schedule.life == look.life)
        });
        let names: Vec<ScheduleName> = self.model.schedules.keys().cloned().collect();
        for name in names {
            let schedule = self.model.schedules[&name].clone();
            let Some(found) = broker.schedule_state(&name) else {
                return Err(format!("{name} was set, and is lost with its broker"));
            };
            self.is_as_ordered(&name, &schedule, &found)?;
            let Some(plan) = schedule.plan().cloned() else {
                continue;
            };
            let before = self.looks.get(&name).cloned();
            let is_same = before
                .as_ref()
                .is_some_and(|it| it.changes == schedule.changes);
            let (after, queued) = match &before {
                Some(it) => (it.state.after, it.state.queued),
                None => (schedule.moved_at, None),
            };
            if is_same && found.after < after {
                return Err(format!(
                    "{name} had decided its times up to {after}, and is recovered up to {}",
                    found.after
                ));
            }
            let calendar = calendar(&name, &plan, schedule.anchor)?;
            let decided = Decided::new(&calendar, after, found.after);
            // Jobs of times just before a change have the earlier plan.
            let earlier = before.as_ref().and_then(|it| it.state.plan.clone());
            if let Some(Look { state, runs, .. }) = before.filter(|_| is_same) {
                let due = decided.count + schedule.runs - runs;
                if counted(&found) != counted(&state) + due {
                    return Err(format!(
                        "{name} had {state:?}, then {due} times, and is recovered as {found:?}"
                    ));
                }
            }
            let times = queued.iter().chain(&decided.listed);
            let mut jobs: Vec<MessageId> = times
                .map(|time| Broker::scheduled_job(&name, *time))
                .collect();
            jobs.extend(found.last.map(|(_, job)| job));
            for job in jobs {
                if broker.knows(&job) && !self.model.knows(job) {
                    let earlier = earlier.as_ref().filter(|it| is_line_of(broker, &job, it));
                    self.was_made(&name, job, earlier.unwrap_or(&plan))?;
                }
            }
            self.last_makes_way(&name, (None, true), &found, broker)?;
            let last = found.last.map(|(_, job)| job);
            if let Some(schedule) = self.model.schedules.get_mut(&name) {
                schedule.last = last;
            }
            self.remember(name, found);
        }
        self.look_for_ended(broker)
    }
}
