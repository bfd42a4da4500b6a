//! Orders of code and people: to set, change, pause, run and remove schedules.

use std::borrow::Cow;

use penstock_message::{
    Due, Extras, MessageId, Overlap, Refusal, ScheduleName, SchedulePlan, ScheduleStep,
    ScheduleTiming,
};
use penstock_schedule::{Calendar, mix};

use super::{Schedule, job_of, seed};
use crate::Broker;
use crate::records::{RecordEvent, ScheduleHead, ScheduleProgress};

/// Maximum number of schedules of a broker.
const SCHEDULES_CAP: usize = 10_000;
/// Maximum bytes of the body of a schedule's jobs, which stays in memory as long as the schedule exists.
const BODY_CAP_BYTES: usize = 256 << 10;

impl Broker {
    pub(crate) fn check_known_schedule(&self, name: &ScheduleName) -> Result<(), Refusal> {
        match self.state.schedules.all.contains_key(name) {
            true => Ok(()),
            false => Err(Refusal::Invalid(format!("there is no schedule {name}"))),
        }
    }

    /// Checks whether a step makes sense. (Its names and message were already checked.)
    pub(crate) fn check_schedule(
        &self,
        name: &ScheduleName,
        step: &ScheduleStep,
    ) -> Result<(), Refusal> {
        let schedules = &self.state.schedules;
        let plan = match step {
            ScheduleStep::Declare(plan, _) | ScheduleStep::Set(plan) => plan,
            ScheduleStep::Retime(times) => {
                self.check_known_schedule(name)?;
                return check_timing(name, &times.timing);
            }
            ScheduleStep::Pause | ScheduleStep::Resume => return self.check_known_schedule(name),
            ScheduleStep::Reset => {
                self.check_known_schedule(name)?;
                return match schedules.all[name].head.declared {
                    Some(_) => Ok(()),
                    None => Err(Refusal::Invalid(format!(
                        "no code declares schedule {name}: there is nothing to reset to"
                    ))),
                };
            }
            ScheduleStep::Run => {
                self.check_known_schedule(name)?;
                return self.check_run(name);
            }
        };
        if schedules.all.len() >= SCHEDULES_CAP && !schedules.all.contains_key(name) {
            return Err(Refusal::Invalid(format!(
                "a broker has at most {SCHEDULES_CAP} schedules"
            )));
        }
        check_timing(name, &plan.timing)?;
        let message = &plan.message;
        if message.body.len() > BODY_CAP_BYTES {
            return Err(Refusal::TooLarge(format!(
                "schedule {name}: the arguments of its jobs take {} bytes; the limit is {BODY_CAP_BYTES}",
                message.body.len()
            )));
        }
        let extras = message.extras.as_deref();
        let has_place = extras.is_some_and(|extras| {
            let own = Extras {
                key: extras.key.clone(),
                headers: extras.headers.clone(),
                retries: extras.retries.clone(),
                timeout_ms: extras.timeout_ms,
                soft_timeout_ms: extras.soft_timeout_ms,
                args_hash: extras.args_hash,
                ..Extras::default()
            };
            own != *extras
        });
        let has_past = message.attempt > 0 || message.crashes > 0 || !message.notes.is_empty();
        let has_moment = matches!(message.expires_at, Some(Due::At(_)));
        match has_place || has_past || has_moment {
            true => Err(Refusal::Invalid(format!(
                "schedule {name}: its jobs must be new, belong to no workflow, and expire after a duration"
            ))),
            false => Ok(()),
        }
    }

    fn check_run(&self, name: &ScheduleName) -> Result<(), Refusal> {
        self.check_admission()?;
        let Schedule { head, progress, .. } = &self.state.schedules.all[name];
        let is_busy = self.is_busy(progress);
        let overlap = head.plan().map_or(Overlap::Skip, |plan| plan.overlap);
        let is_in_the_way = match overlap {
            Overlap::Skip => is_busy || progress.queued.is_some(),
            Overlap::Queue => is_busy && progress.queued.is_some(),
            Overlap::CancelPrevious | Overlap::Allow => false,
        };
        match is_in_the_way {
            true => Err(Refusal::Invalid(format!(
                "schedule {name}: its last job has not ended, and its overlap is {:?}",
                overlap.name()
            ))),
            false => Ok(()),
        }
    }

    /// Applies a step that was checked. Returns the job, if the step has made one.
    pub(crate) fn schedule(
        &mut self,
        name: &ScheduleName,
        step: &mut ScheduleStep,
    ) -> Option<MessageId> {
        let was = self.state.schedules.all.get(name);
        let mut head = was.map_or_else(ScheduleHead::default, |was| was.head.clone());
        let timing = head.plan().map(|plan| plan.timing.clone());
        match step {
            ScheduleStep::Declare(plan, generation) => {
                let generation = std::mem::take(generation);
                if let Some((declared, latest)) = &head.declared
                    && (generation.is_older_than(latest)
                        || (declared == &**plan && generation == *latest))
                {
                    return None;
                }
                head.declared = Some(((**plan).clone(), generation));
            }
            ScheduleStep::Set(plan) => head.set = Some((**plan).clone()),
            ScheduleStep::Retime(times) => {
                let message = head.plan()?.message.clone();
                head.set = Some(SchedulePlan::new((**times).clone(), message));
            }
            ScheduleStep::Pause => head.is_paused = true,
            ScheduleStep::Resume => head.is_paused = false,
            ScheduleStep::Reset => {
                head.is_paused = false;
                head.set = None;
            }
            ScheduleStep::Run => return self.run_schedule(name),
        }
        self.put_schedule(name, head, timing.as_ref());
        None
    }

    /// Enters a schedule that has changed. If its times changed, they continue from now; times during a pause are not
    /// missed.
    fn put_schedule(
        &mut self,
        name: &ScheduleName,
        mut head: ScheduleHead,
        timing: Option<&ScheduleTiming>,
    ) {
        let now = self.clocks.wall();
        let was = self.state.schedules.all.get(name);
        let mut progress = was.map_or_else(ScheduleProgress::default, |was| was.progress);
        let was_paused = was.is_some_and(|was| was.head.is_paused);
        let is_new_timing = head.plan().map(|plan| &plan.timing) != timing;
        if is_new_timing {
            head.anchor = now;
        }
        if is_new_timing || was_paused {
            progress.after = progress.after.max(now);
        }
        self.record(&RecordEvent::ScheduleSet {
            schedule: Cow::Borrowed(name),
            head: Cow::Borrowed(&head),
            progress,
        });
        self.state.set_schedule(name, head, progress);
    }

    /// Creates an extra job, in addition to those of the times.
    fn run_schedule(&mut self, name: &ScheduleName) -> Option<MessageId> {
        let schedule = self.state.schedules.all.get(name)?;
        let mut progress = schedule.progress;
        let overlap = schedule.head.plan()?.overlap;
        // A time that has waited for the last job to end comes first, even if no step has made its job yet.
        if !self.is_busy(&progress)
            && let Some(time) = progress.queued.take()
        {
            self.fire(name, progress, time);
            progress = self.state.schedules.all.get(name)?.progress;
        }
        let now = self.clocks.wall();
        if self.is_busy(&progress) && overlap != Overlap::Allow {
            let time = self.time_of_run(name, now);
            return self.reach_schedule(name, progress, time);
        }
        // A job for exactly the current time must be a different one.
        let job = job_of(seed(name) ^ mix(self.state.numbers + 1), now);
        self.make(name, &mut { progress }, now, job)
    }

    fn is_busy(&self, progress: &ScheduleProgress) -> bool {
        let last = progress.last;
        last.is_some_and(|(_, job)| self.state.is_unfinished(&job))
    }

    /// Returns a time for a run that waits, from now on: none of the schedule's own, and none whose job is known. The id of a
    /// job follows from its time.
    fn time_of_run(&mut self, name: &ScheduleName, now: u64) -> u64 {
        let mut time = now;
        while self.is_taken(name, time) {
            time += 1;
        }
        time
    }

    fn is_taken(&mut self, name: &ScheduleName, time: u64) -> bool {
        if self.knows(&job_of(seed(name), time)) {
            return true;
        }
        let schedule = self.state.schedules.all.get_mut(name);
        schedule.is_some_and(|schedule| {
            let calendar = schedule.calendar(name);
            calendar.is_some_and(|calendar| calendar.next(time - 1) == Some(time))
        })
    }

    pub(crate) fn unschedule(&mut self, name: &ScheduleName) {
        self.record(&RecordEvent::ScheduleFired {
            schedule: Cow::Borrowed(name),
            progress: None,
        });
        self.state.remove_schedule(name);
    }
}

fn check_timing(name: &ScheduleName, timing: &ScheduleTiming) -> Result<(), Refusal> {
    match Calendar::new(timing, 0, 0) {
        Ok(_) => Ok(()),
        Err(why) => Err(Refusal::Invalid(format!("schedule {name}: {why}"))),
    }
}
