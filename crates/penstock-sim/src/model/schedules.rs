//! Schedules: the orders of code and people, and the jobs that the broker has created.

use std::collections::BTreeMap;

use penstock_message::{
    AppRelease, Message, MessageId, OnRunning, Overlap, ScheduleName, SchedulePlan, ScheduleStep,
    ScheduleTiming,
};

use super::item::{End, Item, Moment, State};
use super::{Model, Verdict};

/// Schedule as its orders have left it.
#[derive(Clone, Debug)]
pub struct ScheduleModel {
    /// Transaction that created it, which distinguishes it from others of the same name.
    pub life: u64,
    declared: Option<(SchedulePlan, AppRelease)>,
    set: Option<SchedulePlan>,
    pub is_paused: bool,
    /// Time from which intervals count.
    pub anchor: u64,
    /// Time at which its times last resumed from the present.
    pub moved_at: u64,
    /// Number of orders that have changed it.
    pub changes: u64,
    /// Plan in force after each of these orders, with the order's number.
    plans: Vec<(u64, SchedulePlan)>,
    /// Number of orders to create a job at once.
    pub runs: u64,
    /// Number of such orders that were answered with a job.
    pub answered: u64,
    /// Last job that it is known to have created.
    pub last: Option<MessageId>,
}

pub type Schedules = BTreeMap<ScheduleName, ScheduleModel>;

impl ScheduleModel {
    fn new(life: u64) -> Self {
        Self {
            life,
            declared: None,
            set: None,
            is_paused: false,
            anchor: 0,
            moved_at: 0,
            changes: 0,
            plans: Vec::new(),
            runs: 0,
            answered: 0,
            last: None,
        }
    }

    /// Returns the plan in force: a person's, or else the code's.
    pub fn plan(&self) -> Option<&SchedulePlan> {
        let declared = self.declared.as_ref().map(|(plan, _)| plan);
        self.set.as_ref().or(declared)
    }

    /// Returns the plans that were in force for some time since it had changed so often, apart from the last.
    pub fn plans_since(&self, changes: u64) -> Vec<SchedulePlan> {
        let between = changes + 1..self.changes;
        let plans = self.plans.iter().filter(|(at, _)| between.contains(at));
        plans.map(|(_, plan)| plan.clone()).collect()
    }

    pub fn overlap(&self) -> Overlap {
        self.plan().map_or(Overlap::Skip, |plan| plan.overlap)
    }

    fn timing(&self) -> Option<ScheduleTiming> {
        self.plan().map(|plan| plan.timing.clone())
    }
}

impl Model {
    /// Whether an order for a schedule must be refused. It may be refused if the last job is in the way of another.
    pub(super) fn must_refuse(&self, name: &ScheduleName, step: Option<&ScheduleStep>) -> bool {
        let is_known = self.schedules.get(name);
        match step {
            Some(ScheduleStep::Declare(..) | ScheduleStep::Set(_)) => false,
            Some(ScheduleStep::Reset) => is_known.is_none_or(|it| it.declared.is_none()),
            _ => is_known.is_none(),
        }
    }

    /// Whether an order to create a job at once may be refused.
    pub(super) fn may_refuse_run(&self, name: &ScheduleName) -> bool {
        let schedule = self.schedules.get(name);
        schedule.is_some_and(|it| matches!(it.overlap(), Overlap::Skip | Overlap::Queue))
    }

    /// Changes a schedule as ordered. `job`: the job that the answer names.
    pub(super) fn change_schedule(
        &mut self,
        number: u64,
        name: &ScheduleName,
        step: &ScheduleStep,
        job: Option<MessageId>,
    ) -> Verdict {
        if matches!(step, ScheduleStep::Run) {
            return self.was_run(number, name, job);
        }
        let now = self.now.wall;
        let is_new = !self.schedules.contains_key(name);
        let schedule = self.schedules.entry(name.clone());
        let schedule = schedule.or_insert_with(|| ScheduleModel::new(number));
        let timing = schedule.timing();
        let was_paused = schedule.is_paused;
        match step {
            ScheduleStep::Declare(plan, generation) => {
                if let Some((declared, latest)) = &schedule.declared
                    && (generation.is_older_than(latest)
                        || declared == &**plan && generation == latest)
                {
                    return Ok(());
                }
                schedule.declared = Some(((**plan).clone(), generation.clone()));
            }
            ScheduleStep::Set(plan) => schedule.set = Some((**plan).clone()),
            ScheduleStep::Retime(times) => {
                if let Some(plan) = schedule.plan() {
                    let message = plan.message.clone();
                    schedule.set = Some(SchedulePlan::new((**times).clone(), message));
                }
            }
            ScheduleStep::Pause => schedule.is_paused = true,
            ScheduleStep::Resume => schedule.is_paused = false,
            ScheduleStep::Reset => {
                schedule.is_paused = false;
                schedule.set = None;
            }
            ScheduleStep::Run => {}
        }
        schedule.changes += 1;
        let plan = schedule.plan().cloned();
        schedule
            .plans
            .extend(plan.map(|plan| (schedule.changes, plan)));
        let is_new_timing = schedule.timing() != timing;
        if is_new_timing {
            schedule.anchor = now;
        }
        if is_new_timing || was_paused || is_new {
            schedule.moved_at = schedule.moved_at.max(now);
        }
        Ok(())
    }

    /// Notes that a schedule has created an extra job on demand, or holds one back until the last has ended.
    fn was_run(&mut self, number: u64, name: &ScheduleName, job: Option<MessageId>) -> Verdict {
        let Some(schedule) = self.schedules.get(name).cloned() else {
            return Ok(());
        };
        if job.is_some() && schedule.overlap() != Overlap::Allow {
            self.nothing_is_in_the_way(name, schedule.last)?;
        }
        if let (Some(job), Some(plan)) = (job, schedule.plan()) {
            self.add_scheduled(number, job, plan);
        }
        if let Some(schedule) = self.schedules.get_mut(name) {
            schedule.runs += 1;
            schedule.answered += u64::from(job.is_some());
            schedule.last = job.or(schedule.last);
        }
        Ok(())
    }

    /// Notes that the broker has created the job of a time.
    pub fn was_scheduled(
        &mut self,
        name: &ScheduleName,
        job: MessageId,
        plan: &SchedulePlan,
    ) -> Verdict {
        // A schedule that is removed and recreated, after the clock was set back, may reach the same times again.
        if self.knows(job) && !self.was_unscheduled.contains(name) {
            return self.fail(format!("{name} has made job {job} twice"));
        }
        if plan.overlap == Overlap::CancelPrevious {
            self.may_have_made_way(name);
        }
        self.add_scheduled(0, job, plan);
        if let Some(schedule) = self.schedules.get_mut(name) {
            schedule.last = Some(job);
        }
        Ok(())
    }

    /// Notes that the last job of a schedule may have been cancelled in favour of the next one, if it was waiting.
    fn may_have_made_way(&mut self, name: &ScheduleName) {
        let last = self.schedules.get(name).and_then(|schedule| schedule.last);
        let Some(last) = last else { return };
        for index in self.makes_way_with(last) {
            if !matches!(
                self.items[index].state,
                State::Leased { .. } | State::Ended(_)
            ) {
                let item = &mut self.items[index];
                item.purged = true;
                item.end_is_unsure = true;
            }
        }
    }

    /// Returns jobs of schedules that have not ended, as far as anybody has observed, and that may not be running.
    pub fn scheduled_jobs(&self) -> Vec<MessageId> {
        let live = self.live.iter().map(|index| &self.items[*index]);
        let open = live.filter(|item| {
            matches!(item.state, State::Waiting | State::Adrift { .. }) && item.ending().is_none()
        });
        let ids = open.map(|item| item.message.id);
        ids.filter(|id| self.scheduled.contains(id)).collect()
    }

    /// Notes that a job of a schedule has ended unobserved, such as one that was cancelled for the next.
    pub fn has_ended_unseen(&mut self, job: MessageId) {
        for index in self.by_id.get(&job).cloned().unwrap_or_default() {
            let item = &mut self.items[index];
            if !matches!(item.state, State::Ended(_)) {
                item.purged = true;
                item.end_is_unsure = true;
            }
        }
    }

    /// Notes that a job must stop because the next one of its schedule is due.
    pub fn makes_way(&mut self, job: MessageId, moment: &Moment) {
        self.moment.clone_from(moment);
        self.another_order();
        if self.runs_as_workflow(job) {
            self.cancelled.insert(job);
        }
        for index in self.makes_way_with(job) {
            self.stop(index, OnRunning::Ask);
        }
    }

    /// Whether a group has replaced the job, which is a workflow since.
    fn runs_as_workflow(&self, job: MessageId) -> bool {
        self.by_id.get(&job).is_none_or(Vec::is_empty)
    }

    /// Returns the places of the jobs that stop when a job of a schedule makes way: its copies or, once a group has
    /// replaced it, all jobs of the workflow that it has become.
    pub fn makes_way_with(&self, job: MessageId) -> Vec<usize> {
        match self.runs_as_workflow(job) {
            true => {
                let all = self.items.iter().enumerate();
                let its = all.filter(|(_, item)| item.workflow() == Some(job));
                its.map(|(index, _)| index).collect()
            }
            false => self.by_id[&job].clone(),
        }
    }

    fn add_scheduled(&mut self, number: u64, job: MessageId, plan: &SchedulePlan) {
        let message = Message {
            id: job,
            ..plan.message.clone()
        };
        self.scheduled.insert(job);
        let first = self.items.len();
        self.publish(number, &plan.queue, &message, None, State::Waiting);
        if let Some(item) = self.items.last_mut() {
            // Other jobs of the same call may have come before or after it.
            item.in_order = false;
            item.place = 0;
        }
        self.may_drop(&plan.queue, &(first..first));
    }

    /// Whether a job was certainly created: it was handed out, whatever remains of it.
    pub fn was_lent(&self, job: MessageId) -> bool {
        let is_heir = self.were_replaced.contains(&job);
        is_heir || self.by_place_of(job) || self.with_id(job).any(Item::was_lent)
    }

    /// Whether a job was handed out and has certainly not ended.
    pub fn surely_goes_on(&self, job: MessageId) -> bool {
        self.is_surely_unfinished(job, false) && self.with_id(job).any(Item::was_lent)
    }

    /// Notes that a schedule was removed.
    pub(super) fn unschedule(&mut self, name: &ScheduleName) {
        self.schedules.remove(name);
        self.was_unscheduled.insert(name.clone());
    }

    /// Forgets a job that was taken back before anybody saw it.
    pub fn forget_scheduled(&mut self, job: MessageId) {
        self.scheduled.remove(&job);
        for index in self.by_id.remove(&job).unwrap_or_default() {
            self.items[index].state = State::Ended(End::Replaced);
        }
        for schedule in self.schedules.values_mut() {
            schedule.last = schedule.last.filter(|last| *last != job);
        }
    }

    pub fn knows(&self, job: MessageId) -> bool {
        self.scheduled.contains(&job)
    }

    /// Whether a job of a schedule, or a message that took its place, has this queue, task and priority.
    pub fn was_scheduled_to(&self, job: MessageId, line: (&str, &str, u8)) -> bool {
        let (queue, task, priority) = line;
        self.with_id(job)
            .any(|item| item.line() == (queue, priority, task))
    }

    /// Checks that an earlier job of a schedule may have ended by the time another one is created.
    pub fn nothing_is_in_the_way(&self, name: &ScheduleName, last: Option<MessageId>) -> Verdict {
        let schedule = self.schedules.get(name);
        let cancels = schedule.is_some_and(|it| it.overlap() == Overlap::CancelPrevious);
        match last.filter(|last| self.is_surely_unfinished(*last, cancels)) {
            None => Ok(()),
            Some(last) => {
                let items: Vec<_> = self.with_id(last).collect();
                self.fail(format!(
                    "{name} has made another job, and {last} has not ended: {items:?}"
                ))
            }
        }
    }

    /// Whether a job has certainly not ended. `may_cancel`: it may just have been cancelled, if it was waiting.
    fn is_surely_unfinished(&self, job: MessageId, may_cancel: bool) -> bool {
        let mut copies = self.by_id.get(&job).into_iter().flatten();
        copies.any(|index| {
            let item = &self.items[*index];
            // A job that failed and was retried may have been finished in between.
            item.generation == 0
                && match item.state {
                    State::Leased { .. } => true,
                    State::Waiting => !may_cancel && self.surely_waits(*index),
                    _ => false,
                }
        })
    }

    /// Whether a job of a schedule, and everything that runs in its place, has certainly ended.
    pub fn is_surely_finished(&self, job: MessageId) -> bool {
        let has_ended = |state: &State| matches!(state, State::Ended(_));
        let has_group = self.in_place_of(job).is_some();
        self.knows(job)
            && !has_group
            && self
                .with_id(job)
                .all(|item| has_ended(&item.state) && !item.is_blocked())
            && !self.by_place_of(job)
    }

    /// Whether a group has ever taken the place of the job: the group's end may not have been observed.
    fn by_place_of(&self, job: MessageId) -> bool {
        let place = penstock_message::place_of_heir(job);
        place.is_some_and(|place| self.by_place.contains_key(&(place.join, place.index)))
    }

    /// Whether a queue may be full, so that a time has no job for that reason.
    pub fn has_limits(&self, queue: &str) -> bool {
        self.limits.contains_key(queue)
    }
}
