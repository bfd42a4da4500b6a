//! Cancellations of one job or of many, and requests to stop running jobs.

use std::collections::{BTreeSet, VecDeque};

use penstock_message::{
    Filter, JoinId, JoinOutcome as Outcome, Key, MessageId, MessageState, OnRunning,
    OperationStatus, place_of_heir,
};

use super::item::{End, Item, Moment, State, When};
use super::{Model, Verdict};

/// Time for which a broker remembers a finished operation.
const REMEMBERED_MS: u64 = 600_000;

/// Cancellation by filter, and its possible effects.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    number: u64,
    decided_ms: u64,
    /// Maximum number of jobs that matched when it was decided.
    at_most: usize,
    /// Places of items that were waiting then, and that it certainly ends, unless another order comes first.
    surely: Vec<usize>,
    /// Whether no other order that ends jobs was given since.
    is_alone: bool,
}

impl Model {
    /// Ends the waiting copies of a message, wherever they wait; running copies may be asked to stop.
    pub(super) fn cancel(
        &mut self,
        id: MessageId,
        found: Option<MessageState>,
        running: OnRunning,
    ) -> Verdict {
        let copies = self.by_id.get(&id).cloned().unwrap_or_default();
        let is_alone = copies.len() == 1;
        self.another_order();
        if copies.is_empty() {
            for index in self.in_place_of(id).unwrap_or_default() {
                self.stop(index, running);
            }
            return Ok(());
        }
        if is_alone {
            self.found_is_right(copies[0], found, running)?;
        }
        for index in copies {
            if running != OnRunning::Leave && !matches!(self.items[index].state, State::Ended(_)) {
                self.items[index].asked = Some(self.moment.grants);
            }
            if is_alone && found == Some(MessageState::Cancelling) {
                self.was_asked_to_stop(index)?;
            } else if is_alone && self.surely_waits(index) {
                self.end(index, End::Purged);
            } else if self.items[index].is_blocked() {
                self.items[index].state = State::Ended(End::Purged);
            } else if self.may_wait(index) || matches!(self.items[index].state, State::Held(_)) {
                self.items[index].purged = true;
                self.items[index].end_is_unsure = true;
            }
        }
        Ok(())
    }

    /// Returns the jobs of the group that has taken the place of a job, and all jobs that run only for their sake.
    /// `None`: no group that may still be open.
    pub(super) fn in_place_of(&self, id: MessageId) -> Option<Vec<usize>> {
        let place = place_of_heir(id)?;
        let group = *self.by_place.get(&(place.join, place.index))?;
        let is_open = |id: &JoinId| self.joins.get(id).is_some_and(|join| !join.over);
        if !is_open(&group) {
            return None;
        }
        let (mut found, mut seen, mut next) =
            (Vec::new(), BTreeSet::from([group]), VecDeque::from([group]));
        let mut behind = BTreeSet::new();
        while let Some(join) = next.pop_front() {
            let count = self.joins.get(&join).map_or(0, |join| join.count);
            for index in 0..count {
                let inner = self.by_place.get(&(join, index)).copied();
                next.extend(inner.filter(|inner| is_open(inner) && seen.insert(*inner)));
                let copies = self.by_id.get(&MessageId::member(join, index));
                for place in copies.into_iter().flatten().copied() {
                    match self.items[place].state {
                        State::Ended(_) => continue,
                        State::Held(before) => {
                            behind.insert(before);
                        }
                        _ => {}
                    }
                    found.push(place);
                }
            }
            if next.is_empty() {
                let is_for_these = |before: &JoinId| {
                    let held = self.live.iter();
                    let mut held = held.filter(|at| self.items[**at].state == State::Held(*before));
                    held.all(|at| found.contains(at))
                };
                let only = behind.iter().filter(|before| is_for_these(before));
                next.extend(only.filter(|before| seen.insert(**before)));
                behind.retain(|before| !seen.contains(before));
            }
        }
        Some(found)
    }

    /// Checks the state in which the job was cancelled, according to the answer.
    fn found_is_right(
        &self,
        index: usize,
        found: Option<MessageState>,
        running: OnRunning,
    ) -> Verdict {
        let item = &self.items[index];
        let runs = matches!(item.state, State::Leased { .. });
        let is_held = matches!(item.state, State::Held(_));
        let may_be = match found {
            Some(MessageState::Ready) => {
                !runs && (item.due_reached || self.clock_is_doubtful) && !self.surely_held(index)
            }
            Some(MessageState::Delayed) => !runs && !is_held && item.is_delayed(),
            Some(MessageState::Held) => is_held,
            Some(MessageState::Blocked) => {
                item.is_blocked() || is_held && !self.surely_waits(index)
            }
            Some(MessageState::Cancelling) => running != OnRunning::Leave,
            None | Some(MessageState::Running | MessageState::Failed | MessageState::Parked) => {
                false
            }
        };
        match may_be {
            true => Ok(()),
            false => self.fail(format!(
                "{} was found {found:?} by who cancelled it, and is {:?}",
                item.message.id, item.state
            )),
        }
    }

    fn surely_held(&self, index: usize) -> bool {
        matches!(self.items[index].state, State::Held(_)) && !self.may_let_go(index)
    }

    /// Ends all waiting jobs of a queue or a task; running jobs may be asked to stop. No job that was waiting at the
    /// decision starts after it.
    pub(super) fn cancel_many(
        &mut self,
        filter: &Filter,
        running: OnRunning,
        operation: Option<u64>,
    ) -> Verdict {
        self.another_order();
        let Some(number) = operation else {
            return self.fail(format!("a cancellation has no number: {filter:?}"));
        };
        let matches = |item: &Item| {
            let queue = filter.queue.as_ref().is_none_or(|name| *name == item.queue);
            let task = filter
                .task
                .as_ref()
                .is_none_or(|name| *name == item.message.task);
            let workflow = filter.workflow.is_none_or(|id| item.workflow() == Some(id));
            queue && task && workflow
        };
        if let Some(workflow) = filter.workflow
            && filter.queue.is_none()
            && filter.task.is_none()
            && !self.moment.unlisted.contains(&workflow)
        {
            self.cancelled.insert(workflow);
        }
        // The broker counts jobs that a failed group has blocked; in the model they have ended.
        let may_count = |item: &&Item| {
            let has_ended = matches!(item.state, State::Ended(_));
            matches(item) && (!has_ended || item.is_blocked())
        };
        let at_most = self.items.iter().filter(may_count).count();
        for index in 0..self.items.len() {
            if matches(&self.items[index]) && self.items[index].is_blocked() {
                self.end_blocked(index);
            }
        }
        let mut surely = Vec::new();
        for index in self.live.clone() {
            let item = &self.items[index];
            if !matches(item) {
                continue;
            }
            if item.state == State::Waiting
                && self.surely_waits(index)
                && item.expires.is_none()
                && !self.limits.contains_key(&item.queue)
            {
                surely.push(index);
            }
            self.stop(index, running);
        }
        self.operations.push(Operation {
            number,
            decided_ms: self.now.steady,
            at_most,
            surely,
            is_alone: true,
        });
        Ok(())
    }

    /// Ends an item that a failed group has blocked, for a bulk order. The item ends as ordered, and a retry of the
    /// member that blocks it does not make it wait again. But the broker works in steps, so the group may block it
    /// later or be retried earlier.
    fn end_blocked(&mut self, index: usize) {
        let item = &mut self.items[index];
        item.state = State::Ended(End::Purged);
        self.ending_blocked.insert(index);
        let key = Key::Result(item.message.id);
        let until = self.values.get(&key).and_then(|stored| stored.until);
        let blocked_at = until.zip(item.message.result_ttl_ms);
        if blocked_at.is_some_and(|(until, ttl_ms)| until - ttl_ms >= self.quiet_ms) {
            self.either.insert(key);
        }
    }

    /// Notes that a join waits again. Messages that it had blocked, and that a bulk order was to end, may also have
    /// waited again when the broker came to them; so may messages that those had blocked. They were then cancelled.
    pub(super) fn may_be_cancelled_anew(&mut self, join: JoinId) {
        let held = self.ending_blocked.iter().copied();
        let held: Vec<usize> = held
            .filter(|index| self.items[*index].held_by == Some(join))
            .collect();
        for index in held {
            self.ending_blocked.remove(&index);
            let item = &self.items[index];
            self.either.insert(Key::Result(item.message.id));
            if let Some(outer) = item.member() {
                self.may_be_cancelled_anew(outer.join);
            }
        }
    }

    /// Ends an item for a bulk order; a running item may be asked to stop.
    pub(super) fn stop(&mut self, index: usize, running: OnRunning) {
        let item = &self.items[index];
        let id = item.message.id;
        // Failed jobs do not match, but their failure may not have been observed, and may never be.
        let may_be_dead = item.may_be_dead() || self.may_have_died_when_released(item);
        let has_failed = may_be_dead && self.moment.failed.contains(&id);
        let may_have_failed = may_be_dead && self.moment.gone.contains(&id);
        if matches!(item.state, State::Ended(_)) || has_failed {
            return;
        }
        let is_unseen = self.moment.handed_out.contains(&id);
        let is_held = matches!(item.state, State::Held(_));
        let may_wait = self.may_wait(index) || is_held;
        let is_unsure = !self.surely_waits(index);
        let grants = self.moment.grants;
        let item = &mut self.items[index];
        if running != OnRunning::Leave && !may_have_failed {
            item.asked = Some(grants);
        }
        if may_wait {
            item.purged = true;
            item.end_is_unsure |= is_unsure;
        }
        if (item.state == State::Waiting || is_held) && !is_unseen {
            item.cancelled = Some(grants);
        } else if running == OnRunning::Leave {
            // It may come back while the operation continues, and then gets a new place.
            item.in_order = false;
        }
    }

    /// Returns the workflows whose deadlines nobody has observed to pass.
    pub fn deadlines(&self) -> Vec<MessageId> {
        self.deadlines.keys().copied().collect()
    }

    /// Ends all jobs of a workflow whose deadline was observed to pass, except jobs that wait for a failure.
    pub fn overdue(&mut self, workflow: MessageId, moment: &Moment) -> Verdict {
        let Some(deadline) = self.deadlines.remove(&workflow) else {
            return Ok(());
        };
        if !deadline.has_come(self.now) && !self.clock_is_doubtful {
            self.fail(format!(
                "the deadline of workflow {workflow} is to come, and it has ended for that: {deadline:?}"
            ))?;
        }
        self.moment.clone_from(moment);
        self.cancelled.insert(workflow);
        self.another_order();
        for index in 0..self.items.len() {
            let item = &self.items[index];
            if item.workflow() != Some(workflow) || item.when() != Outcome::Succeeded {
                continue;
            }
            if item.is_blocked() {
                self.end_blocked(index);
            }
            self.stop(index, OnRunning::Ask);
        }
        Ok(())
    }

    /// Checks, at a quiet moment, that no workflow continues after its deadline.
    pub fn deadlines_are_kept(&self) -> Verdict {
        if self.clock_is_doubtful {
            return Ok(());
        }
        for (workflow, deadline) in &self.deadlines {
            let is_past = matches!(deadline, When::Steady(at) if at + 1_000 < self.now.steady);
            let mut jobs = self
                .items
                .iter()
                .filter(|it| it.workflow() == Some(*workflow));
            // A job that somebody has retried continues after the end of its workflow.
            if !is_past || jobs.clone().any(|item| item.generation > 0) {
                continue;
            }
            let goes_on = |item: &Item| {
                item.state == State::Waiting && item.ending().is_none() && !item.may_be_dead()
            };
            if let Some(item) = jobs.find(|item| goes_on(item)) {
                return self.fail(format!(
                    "the deadline of workflow {workflow} has come, and {} is to run",
                    item.message.id
                ));
            }
        }
        Ok(())
    }

    /// Notes an order that ends jobs: nobody can tell which of several orders has ended a job.
    pub(super) fn another_order(&mut self) {
        for operation in &mut self.operations {
            operation.is_alone = false;
        }
    }

    /// Returns the numbers of the cancellations that had not finished at the last quiet moment.
    pub fn operations(&self) -> Vec<u64> {
        self.operations.iter().map(|it| it.number).collect()
    }

    /// Checks, at a quiet moment, the broker's report on a cancellation. `None`: it remembers none.
    pub fn operation_is_right(&self, number: u64, status: Option<OperationStatus>) -> Verdict {
        let Some(operation) = self.operations.iter().find(|it| it.number == number) else {
            return Ok(());
        };
        let Some(status) = status else {
            return match operation.decided_ms + REMEMBERED_MS <= self.now.steady {
                true => Ok(()),
                false => self.fail(format!("cancellation {number} is not known any more")),
            };
        };
        let OperationStatus {
            matched,
            done,
            asked,
            spared,
            ..
        } = status;
        let ends = |index: &&usize| {
            let item = &self.items[**index];
            item.state == State::Waiting && item.purged && !item.end_is_unsure
        };
        let at_least = match operation.is_alone && !self.clock_is_doubtful {
            true => operation.surely.iter().filter(ends).count(),
            false => 0,
        };
        let is_right = matched == done + asked + spared
            && matched <= operation.at_most as u64
            && (at_least as u64) <= done;
        match is_right {
            true => Ok(()),
            false => self.fail(format!(
                "cancellation {number} was for {at_least} to {} jobs, and says {status:?}",
                operation.at_most
            )),
        }
    }

    /// Notes that the current holder of a message, observed or not, must stop it.
    fn was_asked_to_stop(&mut self, index: usize) -> Verdict {
        if self.may_let_go(index) {
            self.was_let_go(index);
        }
        let item = &mut self.items[index];
        match item.state {
            State::Leased { .. } => Ok(()),
            // If nobody runs it any more, it has ended.
            State::Waiting | State::Adrift { .. } => {
                item.purged = true;
                Ok(())
            }
            State::Held(_) | State::Ended(_) => {
                let (id, state) = (item.message.id, item.state.clone());
                self.fail(format!("{id} was asked to stop, and can't run: {state:?}"))
            }
        }
    }

    /// Whether the item was cancelled with its whole workflow: it spawns no jobs, and nothing takes its place. Somebody
    /// may have retried it since.
    pub(super) fn is_of_cancelled_workflow(&self, index: usize) -> bool {
        let item = &self.items[index];
        let is_cancelled = |id| self.cancelled.contains(&id) && !self.moment.unlisted.contains(&id);
        // Jobs that waited for a failure run anyway.
        item.generation == 0
            && item.when() != Outcome::Failed
            && item.workflow().is_some_and(is_cancelled)
    }

    /// Ends an item whose lease has ended without success, if it was asked to stop.
    pub(super) fn ends_if_asked(&mut self, index: usize) -> bool {
        let is_asked = self.items[index].asked.is_some();
        if is_asked {
            self.end(index, End::Purged);
        }
        is_asked
    }
}
