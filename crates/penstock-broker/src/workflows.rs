//! Workflows as people see them: named, listed, with counts of their jobs.
//!
//! A job names its workflow. Unfinished jobs are counted as their messages come and go, which needs no event of its
//! own. Ended jobs leave nothing else behind, so the journal has their counts. A workflow *ends* with the last of its
//! jobs that can still run. Jobs that a failure has blocked can't: a person has to retry the failed job.
//!
//! ```text
//!     WorkflowOpened ──► jobs come and end ──► WorkflowChanged: its outcome, its end ──► forgotten after a day, or a month
//!                              ▲                                                  │
//!                              └──────── a job is retried, or another comes ◄─────┘
//! ```
//!
//! A change states all counts. So it can be repeated where the journal has a job before its workflow: a reader that
//! begins between the two does not know that job, and skips its end.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    JoinOutcome as Outcome, Key, MessageId, NodeState, Open, SeededMap, SeededState, WallMs,
    WorkflowCounts, WorkflowInfo, WorkflowState, WorkflowsPage, WorkflowsQuery,
};

use crate::clock::{ClockTime, Clocks};
use crate::endings::NOT_NEEDED;
use crate::messages::{EntryState, Handle, UnrunEnd};
use crate::reclaim::live_bases::Entity;
use crate::records::{RecordEvent, UnrunCause, WorkflowHead, WorkflowProgress};
use crate::state::{Adjust, BrokerState};
use crate::timers::Timer;
use crate::{Broker, Position};

/// Time for which a succeeded workflow is listed by default.
const KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// Maximum number of workflows on a page, and that a query examines.
const LISTED: u32 = 1000;
const LOOKED_AT: usize = 8192;
/// Maximum number of ended workflows that are forgotten for lack of room as one ends.
const FORGOTTEN_AT_ONCE: usize = 2;

/// A known workflow, and its unfinished jobs.
#[derive(Debug, Default)]
struct LiveWorkflow {
    /// Number of its messages that are ready, delayed, held or leased.
    live: u64,
    /// Number of these that a failed join holds.
    blocked: u64,
    /// Record of the workflow; `None` if no client has opened it, or it is forgotten.
    record: Option<Box<WorkflowRecord>>,
}

#[derive(Debug)]
pub(crate) struct WorkflowRecord {
    pub(crate) name: Box<str>,
    pub(crate) description: Bytes,
    pub(crate) opened_at: u64,
    pub(crate) deadline: Option<ClockTime>,
    pub(crate) kept_ms: Option<u64>,
    pub(crate) parent: Option<MessageId>,
    pub(crate) progress: WorkflowProgress,
    /// Number that distinguishes it from others with its id.
    pub(crate) number: u64,
    pub(crate) base: Position,
    /// Whether it has changed, so that the current record must state its progress.
    is_touched: bool,
    must_be_told: bool,
}

impl WorkflowRecord {
    pub(crate) fn journal_bytes(&self) -> u64 {
        96 + self.name.len() as u64 + self.description.len() as u64
    }
}

#[derive(Debug, Default)]
pub(crate) struct Workflows {
    all: SeededMap<MessageId, LiveWorkflow>,
    /// Workflows with a record, in the order of their ids, which is that of their times.
    listed: BTreeSet<MessageId>,
    /// Ended workflows, with the steady time at which each is forgotten.
    ended: BTreeSet<(u64, MessageId)>,
    /// Journal bytes of the ended workflows.
    ended_bytes: u64,
    /// Workflows that may have ended, or have changes to record.
    touched: Vec<MessageId>,
    /// Workflows with a record, by number.
    numbers: BTreeMap<u64, MessageId>,
    opened: u64,
    /// Time for which a timer is set: that of the first to be forgotten, or earlier.
    timed: Option<u64>,
}

impl Workflows {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            all: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.all.hasher()
    }

    pub(crate) fn record(&self, id: &MessageId) -> Option<&WorkflowRecord> {
        self.all.get(id)?.record.as_deref()
    }

    fn record_mut(&mut self, id: &MessageId) -> Option<&mut WorkflowRecord> {
        self.all.get_mut(id)?.record.as_deref_mut()
    }

    /// Returns the number of listed workflows.
    pub(crate) fn len(&self) -> usize {
        self.listed.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = (MessageId, &WorkflowRecord)> {
        let listed = self.listed.iter();
        listed.filter_map(|id| Some((*id, self.record(id)?)))
    }

    /// Returns live and blocked messages of each workflow that has any.
    pub(crate) fn live(&self) -> impl Iterator<Item = (MessageId, [u64; 2])> {
        let all = self.all.iter();
        let live = all.map(|(id, workflow)| (*id, [workflow.live, workflow.blocked]));
        live.filter(|(_, counts)| *counts != [0, 0])
    }

    /// Counts messages of a workflow that have not ended.
    fn count_live(&mut self, id: MessageId, adjust: Adjust) {
        let workflow = self.all.entry(id).or_default();
        match adjust {
            Adjust::Add => workflow.live += 1,
            Adjust::Subtract => workflow.live -= 1,
        }
        self.drop_unused(id);
        self.touch(id);
    }

    fn count_blocked(&mut self, id: MessageId, adjust: Adjust) {
        let workflow = self.all.entry(id).or_default();
        match adjust {
            Adjust::Add => workflow.blocked += 1,
            Adjust::Subtract => workflow.blocked -= 1,
        }
        self.touch(id);
    }

    fn drop_unused(&mut self, id: MessageId) {
        if let Some(workflow) = self.all.get(&id)
            && workflow.live == 0
            && workflow.record.is_none()
        {
            self.all.remove(&id);
        }
    }

    /// Marks the workflow to be reviewed before the current record is sealed.
    pub(crate) fn touch(&mut self, id: MessageId) {
        if let Some(record) = self.record_mut(&id)
            && !std::mem::replace(&mut record.is_touched, true)
        {
            self.touched.push(id);
        }
    }

    /// Marks the workflow to be written to the current record.
    fn queue_change(&mut self, id: MessageId) {
        if let Some(record) = self.record_mut(&id) {
            record.must_be_told = true;
            self.touch(id);
        }
    }

    /// Forgets changes to be recorded: the journal has them.
    pub(crate) fn forget_touched(&mut self) {
        for id in std::mem::take(&mut self.touched) {
            if let Some(record) = self.record_mut(&id) {
                (record.is_touched, record.must_be_told) = (false, false);
            }
        }
    }

    /// Counts ended jobs of the workflow. `base`: position of the job in the journal.
    fn count(&mut self, id: MessageId, base: Position, what: impl FnOnce(&mut WorkflowProgress)) {
        let Some(record) = self.record_mut(&id) else {
            return;
        };
        what(&mut record.progress);
        if base < record.base && !planted!("untold-end-of-workflow") {
            self.queue_change(id);
        }
    }

    /// Whether the workflow was cancelled as a whole.
    pub(crate) fn is_cancelled(&self, id: &MessageId) -> bool {
        self.record(id)
            .is_some_and(|record| record.progress.is_cancelled)
    }

    /// Notes that the workflow was cancelled as a whole.
    pub(crate) fn mark_cancelled(&mut self, id: MessageId) {
        if let Some(record) = self.record_mut(&id)
            && !record.progress.is_cancelled
        {
            record.progress.is_cancelled = true;
            self.queue_change(id);
        }
    }

    /// Whether the deadline of the workflow with this number has not passed yet.
    pub(crate) fn awaits_deadline(&self, number: u64) -> bool {
        let id = self.numbers.get(&number);
        let record = id.and_then(|id| self.record(id));
        record.is_some_and(|record| {
            record.deadline.is_some() && record.progress.overdue_before.is_none()
        })
    }

    /// Notes that the deadline of the workflow has passed.
    fn mark_overdue(&mut self, id: MessageId, before: u64) {
        if let Some(record) = self.record_mut(&id) {
            record.progress.is_cancelled = true;
            record.progress.overdue_before = Some(before);
            self.queue_change(id);
        }
    }

    /// Notes the outcome of the step whose result is the workflow's. The first one holds.
    fn note_outcome(&mut self, id: MessageId, outcome: WorkflowState) {
        // A group whose members were cancelled with it has not failed.
        let outcome = match outcome {
            WorkflowState::Failed if self.is_cancelled(&id) => WorkflowState::Cancelled,
            outcome => outcome,
        };
        if let Some(record) = self.record_mut(&id)
            && record.progress.outcome == WorkflowState::Running
        {
            record.progress.outcome = outcome;
            self.queue_change(id);
        }
    }

    /// Recounts everything, and panics if a count is wrong.
    pub(crate) fn assert_counts(&self) {
        let known = self.all.iter().filter(|(_, workflow)| {
            let is_known = workflow.record.is_some();
            assert!(is_known || workflow.live > 0, "a workflow that is nothing");
            is_known
        });
        assert_eq!(self.listed.len(), known.count(), "workflows in their list");
        assert_eq!(self.listed.len(), self.numbers.len(), "workflows by number");
        let ended = self.records();
        let ended = ended.filter(|(_, record)| record.progress.ended_at.is_some());
        let bytes: Vec<u64> = ended.map(|(_, record)| record.journal_bytes()).collect();
        assert_eq!(
            (self.ended.len(), self.ended_bytes),
            (bytes.len(), bytes.iter().sum()),
            "workflows that have ended, and their bytes"
        );
        assert!(
            self.ended
                .first()
                .is_none_or(|(until, _)| self.timed.is_some_and(|at| at <= *until)),
            "nobody forgets the workflows that have ended"
        );
    }

    fn counts(workflow: &LiveWorkflow) -> WorkflowCounts {
        let progress = workflow.record.as_ref().map(|record| record.progress);
        let progress = progress.unwrap_or_default();
        WorkflowCounts {
            // The caller knows which of these run.
            waiting: workflow.live - workflow.blocked,
            running: 0,
            succeeded: progress.succeeded,
            failed: progress.failed,
            cancelled: progress.cancelled,
            blocked: workflow.blocked,
        }
    }
}

impl BrokerState {
    pub(crate) fn workflow_of(&self, slot: u32) -> Option<MessageId> {
        self.messages.extras(slot)?.workflow
    }

    /// Counts a message among the live ones of its workflow.
    pub(crate) fn count_live(&mut self, slot: u32, adjust: Adjust) {
        // A broker without workflows does not look at its messages.
        if matches!(adjust, Adjust::Subtract) && self.workflows.all.is_empty() {
            return;
        }
        if let Some(id) = self.workflow_of(slot) {
            self.workflows.count_live(id, adjust);
        }
    }

    /// Counts a message that a failed join holds.
    pub(crate) fn count_blocked_one(&mut self, slot: u32, adjust: Adjust) {
        if let Some(id) = self.workflow_of(slot) {
            self.workflows.count_blocked(id, adjust);
        }
    }

    /// Counts the messages of a join that has failed, or uncounts them when it has reopened, for their workflows.
    pub(crate) fn count_blocked(&mut self, join: u32, adjust: Adjust) {
        let id = self.joins[join].id;
        for at in 0..self.joins[join].held.len() {
            let Handle { slot, .. } = self.joins[join].held[at];
            let is_held = self.messages.get(self.joins[join].held[at]).is_some()
                && self.messages.state(slot) == EntryState::Held(id);
            let workflow = is_held.then(|| self.workflow_of(slot));
            let Some(workflow) = workflow.flatten() else {
                continue;
            };
            self.workflows.count_blocked(workflow, adjust);
        }
    }

    /// Notes the failure of a join, if it or a job that it has blocked is the last step of a workflow.
    pub(crate) fn note_failed_join(&mut self, join: u32) {
        if self.workflows.is_empty() {
            return;
        }
        let id = self.joins[join].id;
        let held = self.joins[join].held.iter();
        let blocked = held.filter(|handle| {
            let slot = handle.slot;
            self.messages.get(**handle).is_some()
                && self.messages.state(slot) == EntryState::Held(id)
                && self.messages.when(slot) == Outcome::Succeeded
                && self.workflow_of(slot) == Some(self.messages[slot].id)
        });
        let blocked: Vec<MessageId> = blocked.map(|held| self.messages[held.slot].id).collect();
        for id in blocked {
            self.workflows.note_outcome(id, WorkflowState::Failed);
        }
        self.note_join_outcome(join, WorkflowState::Failed);
    }

    /// Counts the end of a job for its workflow.
    pub(crate) fn count_end(&mut self, slot: u32, outcome: WorkflowState) {
        let Some(workflow) = self.workflow_of(slot) else {
            return;
        };
        let (id, base) = (self.messages[slot].id, self.messages[slot].base());
        self.workflows
            .count(workflow, base, |progress| match outcome {
                WorkflowState::Succeeded => progress.succeeded += 1,
                WorkflowState::Failed => progress.failed += 1,
                _ => progress.cancelled += 1,
            });
        if workflow == id {
            self.workflows.note_outcome(id, outcome);
        }
    }

    /// Returns the outcome of a job that the broker has ended; `None` if it was not needed, which is not a
    /// cancellation.
    pub(crate) fn outcome_of(&self, ended: UnrunEnd) -> Option<WorkflowState> {
        match ended.how {
            UnrunCause::Expired => Some(WorkflowState::Expired),
            UnrunCause::NotNeeded => None,
            UnrunCause::Cancelled if self.names.text(ended.reason) == NOT_NEEDED => None,
            UnrunCause::Purged
            | UnrunCause::Displaced
            | UnrunCause::Cancelled
            | UnrunCause::Blocked => Some(WorkflowState::Cancelled),
        }
    }

    /// Notes the outcome of a join, if it is that of a workflow.
    pub(crate) fn note_join_outcome(&mut self, join: u32, outcome: WorkflowState) {
        if !self.workflows.is_empty() {
            for id in self.joins[join].result_ids() {
                self.workflows.note_outcome(id, outcome);
            }
        }
    }

    /// Counts a failed job as unfinished again, since it is retried. The workflow may then have another outcome.
    pub(crate) fn count_retry(&mut self, slot: u32) {
        let Some(workflow) = self.workflow_of(slot) else {
            return;
        };
        self.workflows.count_live(workflow, Adjust::Add);
        let base = self.messages[slot].base();
        self.workflows.count(workflow, base, |progress| {
            // The journal may have been repaired.
            progress.failed = progress.failed.saturating_sub(1);
            if progress.outcome != WorkflowState::Succeeded {
                progress.outcome = WorkflowState::Running;
            }
        });
        self.workflows.queue_change(workflow);
    }

    /// Enters a workflow: a new one, or one that is carried forward.
    pub(crate) fn open_workflow(
        &mut self,
        id: MessageId,
        head: &WorkflowHead<'_>,
        progress: WorkflowProgress,
    ) {
        self.forget_workflow(id);
        self.workflows.opened += 1;
        let record = WorkflowRecord {
            name: head.name.into(),
            description: Bytes::copy_from_slice(head.description),
            opened_at: head.opened_at,
            deadline: head.deadline,
            kept_ms: head.kept_ms,
            parent: head.parent,
            progress: WorkflowProgress {
                ended_at: None,
                ..progress
            },
            number: self.workflows.opened,
            base: self.position,
            is_touched: false,
            must_be_told: false,
        };
        self.live_bytes += record.journal_bytes();
        let number = record.number;
        if let Some(deadline) = record.deadline
            && progress.overdue_before.is_none()
        {
            let timer = Timer::Deadline { workflow: number };
            self.timers.set(deadline, timer);
        }
        self.workflows.all.entry(id).or_default().record = Some(Box::new(record));
        self.workflows.listed.insert(id);
        self.workflows.numbers.insert(number, id);
        self.workflows.touch(id);
        self.live_bases
            .add(self.position, Entity::Workflow { number });
        self.change_workflow(id, progress);
    }

    /// Sets the progress of a workflow.
    pub(crate) fn change_workflow(&mut self, id: MessageId, progress: WorkflowProgress) {
        let failed_kept_ms = self.failed_kept_ms;
        let Some(record) = self.workflows.record_mut(&id) else {
            return;
        };
        let kept_until = |progress: &WorkflowProgress, kept_ms: Option<u64>| {
            let kept_ms = match progress.outcome {
                WorkflowState::Succeeded => kept_ms.unwrap_or(KEPT_MS),
                _ => kept_ms.unwrap_or(0).max(failed_kept_ms),
            };
            let ended_at = progress.ended_at;
            ended_at.map(|at| at.saturating_add(kept_ms))
        };
        let was = kept_until(&record.progress, record.kept_ms);
        let until = kept_until(&progress, record.kept_ms);
        let bytes = record.journal_bytes();
        record.progress = progress;
        let workflows = &mut self.workflows;
        if let Some(until) = was {
            workflows.ended.remove(&(until, id));
            workflows.ended_bytes -= bytes;
        }
        if let Some(until) = until {
            workflows.ended.insert((until, id));
            workflows.ended_bytes += bytes;
            self.wait_for_workflows();
        }
    }

    /// Forgets a workflow; its jobs stay.
    pub(crate) fn forget_workflow(&mut self, id: MessageId) {
        let Some(record) = self.workflows.record_mut(&id) else {
            return;
        };
        let (bytes, number) = (record.journal_bytes(), record.number);
        let deadline = record.deadline;
        let awaited = deadline.filter(|_| record.progress.overdue_before.is_none());
        if let Some(deadline) = awaited {
            self.timers.abandon(deadline.clock);
        }
        let progress = WorkflowProgress {
            ended_at: None,
            ..record.progress
        };
        self.change_workflow(id, progress);
        self.live_bytes -= bytes;
        self.live_bases.abandon();
        self.workflows.listed.remove(&id);
        self.workflows.numbers.remove(&number);
        if let Some(workflow) = self.workflows.all.get_mut(&id) {
            workflow.record = None;
        }
        self.workflows.drop_unused(id);
    }

    /// Sets the timer for the first workflow to be forgotten, unless there is one.
    pub(crate) fn wait_for_workflows(&mut self) {
        let workflows = &mut self.workflows;
        let first = workflows.ended.first().map(|(until, _)| *until);
        if let Some(until) = first.filter(|until| workflows.timed.is_none_or(|at| *until < at)) {
            workflows.timed = Some(until);
            self.timers.set(ClockTime::steady(until), Timer::Workflows);
        }
    }

    /// Whether the deadline of the message's workflow has passed and ends this message. Errbacks may still run.
    pub(crate) fn is_overdue(&self, slot: u32) -> bool {
        let workflow = self.workflow_of(slot);
        let record = workflow.and_then(|id| self.workflows.record(&id));
        record.is_some_and(|record| {
            let before = record.progress.overdue_before;
            before.is_some_and(|before| self.messages[slot].number() < before)
                && self.messages.when(slot) == Outcome::Succeeded
        })
    }

    /// Returns the time at which the message's workflow is cancelled.
    pub(crate) fn deadline_of(&self, slot: u32, clocks: &Clocks) -> Option<WallMs> {
        let record = self.workflows.record(&self.workflow_of(slot)?)?;
        let is_to_come = record.progress.overdue_before.is_none();
        let deadline = record.deadline.filter(|_| is_to_come)?;
        Some(clocks.wall_of(deadline))
    }

    pub(crate) fn workflow_is_current(&self, base: Position, number: u64) -> bool {
        let id = self.workflows.numbers.get(&number);
        let record = id.and_then(|id| self.workflows.record(id));
        record.is_some_and(|record| record.base == base)
    }

    /// Whether no job of the workflow can run, and none will come.
    fn workflow_has_ended(&self, id: &MessageId) -> bool {
        let workflow = self.workflows.all.get(id);
        workflow.is_none_or(|workflow| workflow.live == workflow.blocked)
            && self.joins.unsealed_of(id).is_none()
    }

    /// Schedules a review of all workflows that have no job left and have not ended: a repaired journal lacks their
    /// ends.
    pub(crate) fn review_workflows(&mut self) {
        let workflows = &self.workflows;
        let is_stale = |(id, record): &(MessageId, &WorkflowRecord)| {
            let workflow = &workflows.all[id];
            (workflow.live == workflow.blocked) != record.progress.ended_at.is_some()
        };
        let stale = workflows.records().filter(is_stale);
        let stale: Vec<MessageId> = stale.map(|(id, _)| id).collect();
        for id in stale {
            self.workflows.touch(id);
        }
        self.workflows.timed = None;
        self.wait_for_workflows();
    }
}

impl Broker {
    pub(crate) fn open_workflow(&mut self, open: &Open) {
        if self.state.workflows.record(&open.workflow).is_some() {
            return;
        }
        let head = WorkflowHead {
            name: &open.name,
            description: &open.description,
            opened_at: self.writer.time(),
            deadline: open.deadline.map(|due| self.clocks.resolve(due)),
            kept_ms: open.kept_ms,
            parent: open.parent,
        };
        let progress = WorkflowProgress::default();
        let workflow = open.workflow;
        self.record(&RecordEvent::WorkflowOpened {
            workflow,
            head,
            progress,
        });
        self.state.open_workflow(workflow, &head, progress);
    }

    /// Records the new states of workflows whose jobs have changed in the current record.
    pub(crate) fn settle_workflows(&mut self) {
        if self.state.workflows.touched.is_empty() {
            return;
        }
        self.end_late_workflows();
        for id in std::mem::take(&mut self.state.workflows.touched) {
            let has_ended = self.state.workflow_has_ended(&id);
            let Some(workflow) = self.state.workflows.all.get_mut(&id) else {
                continue;
            };
            let blocked = workflow.blocked;
            let Some(record) = workflow.record.as_deref_mut() else {
                continue;
            };
            record.is_touched = false;
            let mut must_be_told = std::mem::take(&mut record.must_be_told);
            let mut progress = record.progress;
            if has_ended != progress.ended_at.is_some() {
                must_be_told = true;
                progress.ended_at = has_ended.then_some(self.clocks.steady());
                if let Some(deadline) = record.deadline
                    && !has_ended
                    && progress.overdue_before.is_none()
                {
                    // It continues after its end: a deadline that has passed since does not apply.
                    match self.clocks.is_due(deadline) {
                        true => progress.overdue_before = Some(0),
                        false => {
                            let timer = Timer::Deadline {
                                workflow: record.number,
                            };
                            self.state.timers.set(deadline, timer);
                        }
                    }
                }
            }
            if has_ended && progress.outcome == WorkflowState::Running {
                progress.outcome = progress.outcome_at_end(blocked);
            }
            if !must_be_told {
                continue;
            }
            self.record(&RecordEvent::WorkflowChanged {
                workflow: id,
                progress: Some(progress),
            });
            self.state.change_workflow(id, progress);
        }
        self.trim_workflows();
    }

    /// Forgets ended workflows while there are too many, starting with those that would be forgotten next.
    fn trim_workflows(&mut self) {
        for _ in 0..FORGOTTEN_AT_ONCE {
            let workflows = &self.state.workflows;
            let is_over = workflows.ended.len() as u64 > self.options.workflows_kept
                || workflows.ended_bytes > self.options.workflows_kept_bytes;
            let Some((_, id)) = workflows.ended.first().copied().filter(|_| is_over) else {
                return;
            };
            self.record(&RecordEvent::WorkflowChanged {
                workflow: id,
                progress: None,
            });
            self.state.forget_workflow(id);
        }
    }

    /// Cancels workflows that the current record has opened and whose deadlines have already passed: none of their jobs
    /// start.
    fn end_late_workflows(&mut self) {
        let (workflows, position) = (&self.state.workflows, self.state.position);
        let touched = workflows.touched.iter();
        let late = touched.filter_map(|id| {
            let record = workflows.record(id)?;
            let deadline = record.deadline.filter(|_| record.base == position)?;
            self.clocks.is_due(deadline).then_some(record.number)
        });
        let late: Vec<u64> = late.take(self.step_size()).collect();
        for number in late {
            self.end_overdue_workflow(number);
        }
    }

    /// Cancels the workflow with this number, whose deadline has passed.
    pub(crate) fn end_overdue_workflow(&mut self, number: u64) {
        let workflows = &mut self.state.workflows;
        if !workflows.awaits_deadline(number) {
            return;
        }
        let id = workflows.numbers[&number];
        if self.state.workflow_has_ended(&id) {
            return;
        }
        let before = self.state.numbers + 1;
        self.state.workflows.mark_overdue(id, before);
        self.added += 1;
        let reason = self.begin_overdue();
        self.added += self.cancel_unsealed(&id, reason);
    }

    /// Forgets the workflows whose time is over. The journal has the times, so no event is needed.
    pub(crate) fn forget_old_workflows(&mut self) {
        self.state.workflows.timed = None;
        while self.budget > 0
            && let Some((until, id)) = self.state.workflows.ended.first().copied()
            && until <= self.clocks.steady()
        {
            self.budget -= 1;
            self.state.forget_workflow(id);
        }
        self.state.wait_for_workflows();
    }

    /// Writes the full state of a workflow.
    pub(crate) fn carry_workflow(&mut self, number: u64) {
        let position = self.state.position;
        let workflows = &mut self.state.workflows;
        let Some(id) = workflows.numbers.get(&number).copied() else {
            return;
        };
        let Some(record) = workflows.record_mut(&id) else {
            return;
        };
        record.base = position;
        let event = RecordEvent::WorkflowOpened {
            workflow: id,
            head: WorkflowHead {
                name: &record.name,
                description: &record.description,
                opened_at: record.opened_at,
                deadline: record.deadline,
                kept_ms: record.kept_ms,
                parent: record.parent,
            },
            progress: record.progress,
        };
        if !planted!("carry-no-workflow") {
            self.writer.push(&self.state.names, &event);
        }
    }

    // --- queries

    /// Returns a page of workflows.
    pub(crate) fn workflows_page(&self, query: &WorkflowsQuery) -> WorkflowsPage {
        let workflows = &self.state.workflows;
        let mut page = WorkflowsPage::default();
        if let Some(id) = &query.workflow {
            page.workflows.extend(self.describe_workflow(id, true));
        } else {
            let limit = match query.limit {
                0 => LISTED,
                limit => limit.min(LISTED),
            };
            let end = query.after.unwrap_or(MessageId([u8::MAX; 16]));
            let mut last = end;
            for (looked_at, id) in workflows.listed.range(..end).rev().enumerate() {
                if page.workflows.len() == limit as usize || looked_at == LOOKED_AT {
                    page.next = Some(last);
                    break;
                }
                last = *id;
                let matches = workflows.record(id).is_some_and(|record| {
                    let (state, name) = (query.state, query.name.as_deref());
                    state.is_none_or(|state| record.progress.outcome == state)
                        && name.is_none_or(|name| *record.name == *name)
                });
                if matches {
                    page.workflows.extend(self.describe_workflow(id, false));
                }
            }
        }
        self.count_running(&mut page.workflows);
        let nodes = query.nodes.iter().take(WorkflowsQuery::NODES_CAP);
        page.nodes = nodes.clone().map(|id| self.node_state(id)).collect();
        page.tasks = nodes.map(|id| self.task_of(id).to_owned()).collect();
        page
    }

    /// Returns a workflow, if it is listed. For the simulator.
    pub fn workflow(&self, id: &MessageId) -> Option<WorkflowInfo> {
        let mut listed = [self.describe_workflow(id, true)?];
        self.count_running(&mut listed);
        let [workflow] = listed;
        Some(workflow)
    }

    /// Whether the jobs of a workflow were ended because its deadline had passed. For the simulator.
    pub fn workflow_is_overdue(&self, id: &MessageId) -> bool {
        let record = self.state.workflows.record(id);
        let before = record.and_then(|record| record.progress.overdue_before);
        before.is_some_and(|before| before > 0)
    }

    /// Separates running jobs from waiting ones. There are few leases compared with jobs, so they are counted on
    /// demand.
    fn count_running(&self, listed: &mut [WorkflowInfo]) {
        if listed.iter().all(|workflow| workflow.jobs.waiting == 0) {
            return;
        }
        let mut running: BTreeMap<MessageId, u64> = BTreeMap::new();
        for (_, session) in self.state.sessions.iter() {
            for slot in &session.leases {
                if let Some(id) = self.state.workflow_of(*slot) {
                    *running.entry(id).or_default() += 1;
                }
            }
        }
        for workflow in listed {
            let running = running.get(&workflow.id).copied().unwrap_or(0);
            workflow.jobs.waiting -= running;
            workflow.jobs.running = running;
        }
    }

    fn describe_workflow(&self, id: &MessageId, whole: bool) -> Option<WorkflowInfo> {
        let workflow = self.state.workflows.all.get(id)?;
        let record = workflow.record.as_deref()?;
        let opened_at = record.opened_at;
        let ended_at = record.progress.ended_at;
        Some(WorkflowInfo {
            id: *id,
            name: record.name.to_string(),
            description: match whole {
                true => record.description.clone(),
                false => Bytes::new(),
            },
            state: record.progress.outcome,
            jobs: Workflows::counts(workflow),
            opened_at,
            ended_at: ended_at.map(|at| self.clocks.wall_at(at).max(opened_at)),
            deadline: record.deadline.map(|when| self.clocks.wall_of(when)),
            parent: record.parent,
        })
    }

    fn join_state(&self, slot: u32) -> NodeState {
        let join = &self.state.joins[slot];
        NodeState::Join {
            members: (join.growth.as_ref()).map_or(join.count, |growth| growth.members),
            ended: join.arrivals,
            failed: join.failures,
            state: match (join.is_over, join.is_released) {
                (true, _) => WorkflowState::Failed,
                (_, true) => WorkflowState::Succeeded,
                _ => WorkflowState::Running,
            },
        }
    }

    /// Returns the task that a job runs, or whose result it has; empty for others.
    fn task_of(&self, id: &MessageId) -> &str {
        let BrokerState {
            messages,
            keys,
            names,
            ..
        } = &self.state;
        let mut copies = messages.copies(id).chain(messages.find_ended(id));
        let of_value = || {
            let stored = keys.value(&Key::Result(*id))?;
            stored.run.map(|_| stored.group)
        };
        let task = copies.next().map(|slot| messages.shared_head(slot).task);
        task.or_else(of_value).map_or("", |task| names.text(task))
    }

    /// Returns the state of a job, or of a join.
    fn node_state(&self, id: &MessageId) -> NodeState {
        let state = &self.state;
        if let Some(slot) = state.joins.find(id) {
            return self.join_state(slot);
        }
        if let Some(slot) = state.messages.copies(id).next() {
            return NodeState::Job(self.state_of(slot));
        }
        if let Some(stored) = state.keys.value(&Key::Result(*id)) {
            return NodeState::Ended(stored.status);
        }
        if let Some(slot) = state.joins.of_result(id) {
            return self.join_state(slot);
        }
        match state.messages.find_ended(id) {
            Some(slot) => {
                let ended = state.messages.ended(slot);
                NodeState::Ended(state.unrun_value(ended.how, ended.reason).status)
            }
            None => NodeState::Gone,
        }
    }
}
