//! Failed jobs: kept for people to inspect, retry or drop, in the order in which they failed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    FailedJob, FailedPage, FailedQuery, Filter, JoinId, MessageId, MessageState, Notice, Space,
    WallMs,
};

use crate::Broker;
use crate::clock::ClockTime;
use crate::queues::tally::Counter;
use crate::records::{ENDED_AT_ONCE, Mark, RecordEvent};
use crate::state::{BrokerState, Ending};
use crate::table::interner::Name;
use crate::timers::Timer;

/// Maximum number of failed jobs that a page lists, and that a query looks at.
const LISTED: u32 = 1_000;
const LOOKED_AT: usize = 10_000;
/// Failure time of a group that can't continue, so that it is dropped first.
const GIVEN_UP: u64 = 0;

#[derive(Debug, Default)]
pub(crate) struct FailedJobs {
    /// Slots, and bytes in the journal, by number. A message gets a new number when it fails.
    by_number: BTreeMap<u64, (u32, u64)>,
    /// Bytes that failed jobs take in the journal.
    pub(crate) bytes: u64,
    /// Number of jobs dropped because of the limits or for lack of space, since the process started. Includes jobs that
    /// failed groups had blocked.
    pub(crate) dropped: u64,
    pub(crate) was_told: bool,
    /// Group that has lost some of its blocked jobs; the rest will go too.
    pub(crate) going: Option<JoinId>,
    /// Whether a timer is set for the oldest job, or for an even older one.
    pub(crate) is_timed: bool,
}

impl FailedJobs {
    pub(crate) fn insert(&mut self, number: u64, slot: u32, bytes: u64) {
        self.by_number.insert(number, (slot, bytes));
        self.bytes += bytes;
    }

    pub(crate) fn remove(&mut self, number: u64) {
        if let Some((_, bytes)) = self.by_number.remove(&number) {
            self.bytes -= bytes;
        }
    }

    /// Notes that the size of a failed job has changed.
    pub(crate) fn set_bytes(&mut self, number: u64, bytes: u64) {
        if let Some((_, had)) = self.by_number.get_mut(&number) {
            self.bytes += bytes;
            self.bytes -= std::mem::replace(had, bytes);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_number.len()
    }

    pub(crate) fn oldest(&self) -> Option<(u64, u32)> {
        let first = self.by_number.first_key_value();
        first.map(|(number, (slot, _))| (*number, *slot))
    }

    /// Lists the failed jobs after this number, oldest first.
    pub(crate) fn after(&self, number: u64) -> impl Iterator<Item = (u64, u32)> {
        let from = number.saturating_add(1);
        let range = self.by_number.range(from..);
        range.map(|(number, (slot, _))| (*number, *slot))
    }

    /// Lists the failed jobs before this number, newest first; 0: all.
    fn before(&self, number: u64) -> impl Iterator<Item = (u64, u32)> {
        let end = match number {
            0 => Bound::Unbounded,
            number => Bound::Excluded(number),
        };
        let range = self.by_number.range((Bound::Unbounded, end)).rev();
        range.map(|(number, (slot, _))| (*number, *slot))
    }
}

/// A job or group that is kept after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kept {
    Job,
    /// A failed group, with the jobs that it blocks.
    Group,
}

/// Filter of failed jobs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FailedFilter {
    queue: Option<Name>,
    task: Option<Name>,
    workflow: Option<MessageId>,
    class: Option<Name>,
    fingerprint: Option<u64>,
    failed_from: Option<u64>,
    failed_before: Option<u64>,
}

impl From<&Mark> for FailedFilter {
    fn from(mark: &Mark) -> Self {
        Self {
            queue: mark.queue,
            task: mark.task,
            workflow: mark.workflow,
            class: mark.class,
            fingerprint: mark.fingerprint,
            failed_from: mark.failed_from,
            failed_before: mark.failed_before,
        }
    }
}

impl Broker {
    /// Returns the wall time of a failure. The lead of the steady clock is journaled to a tenth of a second, so without
    /// a bound a job could seem to have failed before it was enqueued.
    fn failed_at(&self, slot: u32, steady: u64) -> WallMs {
        let enqueued_at = self.state.messages[slot].enqueued_at();
        self.clocks.wall_at(steady).max(enqueued_at)
    }

    pub(crate) fn failed_matches(&self, slot: u32, wanted: &FailedFilter) -> bool {
        let BrokerState {
            messages, queues, ..
        } = &self.state;
        let Some(failure) = messages.failure(slot) else {
            return false;
        };
        let shared_head = messages.shared_head(slot);
        let queue = (!failure.is_displaced).then_some(queues[shared_head.queue].name);
        let failed_at = self.failed_at(slot, failure.at);
        wanted.queue.is_none_or(|wanted| queue == Some(wanted))
            && wanted.task.is_none_or(|wanted| shared_head.task == wanted)
            && (wanted.workflow.is_none() || self.state.workflow_of(slot) == wanted.workflow)
            && wanted.class.is_none_or(|wanted| failure.class == wanted)
            && wanted
                .fingerprint
                .is_none_or(|wanted| failure.fingerprint == wanted)
            && wanted.failed_from.is_none_or(|from| failed_at >= from)
            && wanted.failed_before.is_none_or(|before| failed_at < before)
    }

    /// Returns a failed job to a queue. Returns the state that it was in.
    pub(crate) fn retry(&mut self, id: &MessageId, queue: Option<&str>) -> Option<MessageState> {
        let messages = &self.state.messages;
        let slot = messages
            .copies(id)
            .find(|slot| messages[*slot].is_failed())?;
        let queue = queue.map(|queue| self.state.names.intern(queue));
        self.revive(slot, queue);
        Some(MessageState::Failed)
    }

    pub(crate) fn revive(&mut self, slot: u32, queue: Option<Name>) {
        let (number, to) = (self.state.messages[slot].number(), self.state.numbers + 1);
        let from = self.state.queues[self.state.messages.queue(slot)].name;
        let queue = queue.unwrap_or(from);
        self.record_removed_value(slot);
        self.record(&RecordEvent::Revived { number, to, queue });
        self.count(slot, Counter::Retried);
        self.state.revive(slot, to, queue);
        if queue != from {
            self.count_arrival(slot);
        }
        if let Some(place) = self.state.messages.member(slot)
            && !planted!("revive-keeps-old-arrival")
        {
            self.revive_member(place);
        }
        let queue = self.state.messages.queue(slot);
        self.make_room(queue, to);
    }

    /// Forgets a failed job. Returns the state that it was in.
    pub(crate) fn drop_failed(&mut self, id: &MessageId) -> Option<MessageState> {
        let messages = &self.state.messages;
        let slot = messages
            .copies(id)
            .find(|slot| messages[*slot].is_failed())?;
        self.forget_failed(vec![slot]);
        Some(MessageState::Failed)
    }

    /// Forgets failed jobs. Each has a small event, since it holds only a number, and may cause a group to be given up.
    pub(crate) fn forget_failed(&mut self, slots: Vec<u32>) {
        let joins = self.joins_of(&slots);
        for slot in slots {
            let number = self.state.messages[slot].number();
            self.record(&RecordEvent::Settled { number });
            self.state.end(slot, Ending::Dropped);
        }
        self.give_up(joins);
    }

    /// Returns the joins that these messages are members of.
    pub(crate) fn joins_of(&self, slots: &[u32]) -> BTreeSet<JoinId> {
        if self.state.joins.is_empty() {
            return BTreeSet::new();
        }
        let members = slots.iter();
        let members = members.filter_map(|slot| self.state.messages.member(*slot));
        members.map(|member| member.join).collect()
    }

    /// Marks failed joins that can't reopen as the first to be dropped: nobody can retry a failed member that no longer
    /// exists. Returns the number of events.
    pub(crate) fn give_up(&mut self, joins: BTreeSet<JoinId>) -> usize {
        let mut events = 0;
        for id in joins {
            let Some(slot) = self.state.joins.find(&id) else {
                continue;
            };
            let join = &self.state.joins[slot];
            let puts_up = join.policy.max_failures() > 0;
            let is_lost = !puts_up || !join.causes.iter().any(|cause| self.has_failed(cause));
            if join.is_over && join.over_at != GIVEN_UP && is_lost {
                let at = GIVEN_UP;
                self.record(&RecordEvent::JoinOver { join: id, at });
                self.state.block_join(slot, at);
                events += 1;
            }
        }
        events
    }

    /// Whether there are too many failed jobs, or failed groups with blocked jobs, or one has been kept long enough.
    pub(crate) fn keeps_too_much(&self) -> bool {
        self.is_over_caps()
            || self.state.failed.going.is_some()
            || self.oldest_kept().is_some_and(|(at, _)| self.is_old(at))
    }

    fn is_over_caps(&self) -> bool {
        let BrokerState {
            failed, blocked, ..
        } = &self.state;
        if planted!("keep-all-failed") {
            return false;
        }
        failed.len() as u64 + blocked.jobs > self.options.failed_kept
            || failed.bytes + blocked.bytes > self.options.failed_kept_bytes
    }

    fn is_old(&self, at: u64) -> bool {
        at == GIVEN_UP || at.saturating_add(self.options.failed_kept_ms) <= self.clocks.steady()
    }

    /// Returns the oldest kept job or group, and its time. A job fails before the group that it is a member of.
    fn oldest_kept(&self) -> Option<(u64, Kept)> {
        let failed = &self.state.failed;
        // A group that is being dropped goes first.
        let job = failed.oldest().filter(|_| failed.going.is_none());
        let job = job.and_then(|(_, slot)| self.state.messages.failure(slot));
        let job = job.map(|failure| (failure.at, Kept::Job));
        let group = self.state.joins_over.first();
        let group = group.map(|(over_at, _)| (*over_at, Kept::Group));
        job.into_iter().chain(group).min()
    }

    /// Drops older failed jobs while there are too many after this one. Drops no group, which is too much work for the
    /// end of one job, and not the job itself, which is still in use. A step drops the groups, and the jobs that do not
    /// fit into the record.
    pub(crate) fn trim_failed(&mut self, slot: u32) {
        while self.added + 1 < ENDED_AT_ONCE
            && self.keeps_too_much()
            && let Some((_, Kept::Job)) = self.oldest_kept()
            && self
                .state
                .failed
                .oldest()
                .is_some_and(|(_, oldest)| oldest != slot)
        {
            self.drop_oldest_kept(Kept::Job);
        }
        self.state.wait_for_failed_jobs();
    }

    /// Drops the oldest failed jobs and failed groups while there are too many, as far as they fit into the current
    /// record.
    pub(crate) fn trim_kept(&mut self) {
        // Each may cause a group to be given up.
        while self.step_size() > 1
            && self.keeps_too_much()
            && let Some((_, kept)) = self.oldest_kept()
        {
            self.drop_oldest_kept(kept);
        }
        self.state.wait_for_failed_jobs();
    }

    fn drop_oldest_kept(&mut self, kept: Kept) {
        if self.is_over_caps() {
            self.report_dropped();
        }
        match kept {
            Kept::Job => self.drop_oldest_failed(1),
            Kept::Group => self.drop_oldest_join(),
        }
    }

    /// Drops the oldest failed jobs: at most `most`, and as many as fit into the current record.
    pub(crate) fn drop_oldest_failed(&mut self, most: usize) {
        if planted!("drop-newest-failed") && self.state.failed.len() > 1 {
            let newer = self.state.failed.before(0).skip(1).take(1);
            let newer = newer.map(|(_, slot)| slot).collect();
            self.forget_failed(newer);
            self.state.failed.dropped += 1;
            return;
        }
        let room = ENDED_AT_ONCE.saturating_sub(self.added);
        // Each may cause a group to be given up.
        let room = match self.state.joins.is_empty() {
            true => room.min(most),
            false => (room / 2).min(most),
        };
        let oldest: Vec<(u64, u32)> = self.state.failed.after(0).take(room).collect();
        let Some((through, _)) = oldest.last().copied() else {
            return;
        };
        if self.space != Space::Plenty {
            self.report_dropped();
        }
        self.added += oldest.len();
        let slots: Vec<u32> = oldest.iter().map(|(_, slot)| *slot).collect();
        let joins = self.joins_of(&slots);
        self.record(&RecordEvent::FailedDropped { through });
        self.state.drop_failed_through(through);
        self.added += self.give_up(joins);
        self.state.failed.dropped += oldest.len() as u64;
    }

    pub(crate) fn report_dropped(&mut self) {
        if !std::mem::replace(&mut self.state.failed.was_told, true) {
            self.notice(Notice::FailedDropped {
                kept: self.options.failed_kept,
                kept_bytes: self.options.failed_kept_bytes,
            });
        }
    }

    /// Returns a page of failed jobs.
    pub(crate) fn failed_page(&self, query: &FailedQuery) -> FailedPage {
        match query.newest_first {
            true => self.page_of(query, self.state.failed.before(query.after)),
            false => self.page_of(query, self.state.failed.after(query.after)),
        }
    }

    fn page_of(&self, query: &FailedQuery, failed: impl Iterator<Item = (u64, u32)>) -> FailedPage {
        let limit = match query.limit {
            0 => LISTED,
            limit => limit.min(LISTED),
        };
        let Some(wanted) = self.wanted(&query.filter) else {
            return FailedPage::default();
        };
        let mut page = FailedPage::default();
        let mut last = query.after;
        for (looked_at, (number, slot)) in failed.enumerate() {
            if page.jobs.len() == limit as usize || looked_at == LOOKED_AT {
                page.next = Some(last);
                break;
            }
            last = number;
            if self.failed_matches(slot, &wanted) {
                page.jobs.extend(self.describe_failed(slot));
            }
        }
        page
    }

    /// Converts the filter to the broker's names; `None` if it has an unknown name, so that nothing can match.
    fn wanted(&self, filter: &Filter) -> Option<FailedFilter> {
        let names = &self.state.names;
        let name = |text: &Option<String>| match text {
            None => Some(None),
            Some(text) => names.find(text).map(Some),
        };
        Some(FailedFilter {
            queue: name(&filter.queue)?,
            task: name(&filter.task)?,
            workflow: filter.workflow,
            class: name(&filter.class)?,
            fingerprint: filter.fingerprint,
            failed_from: filter.failed_from,
            failed_before: filter.failed_before,
        })
    }

    fn describe_failed(&self, slot: u32) -> Option<FailedJob> {
        let BrokerState {
            messages,
            queues,
            names,
            ..
        } = &self.state;
        let (entry, shared_head) = (&messages[slot], messages.shared_head(slot));
        let (failed_at, failure) = self.describe_failure(slot)?;
        let is_displaced = messages.failure(slot)?.is_displaced;
        Some(FailedJob {
            id: entry.id,
            task: names.text(shared_head.task).to_owned(),
            queue: (!is_displaced).then(|| names.text(queues[shared_head.queue].name).to_owned()),
            attempt: shared_head.attempt,
            crashes: shared_head.crashes,
            generation: shared_head.generation,
            enqueued_at: entry.enqueued_at(),
            failed_at,
            failure,
            body_bytes: messages.body_bytes(slot),
        })
    }

    /// Returns the wall time of a job's failure, and its reason.
    pub(crate) fn describe_failure(
        &self,
        slot: u32,
    ) -> Option<(WallMs, penstock_message::Failure)> {
        let failure = self.state.messages.failure(slot)?;
        let described = penstock_message::Failure {
            class: self.state.names.text(failure.class).to_owned(),
            message: failure.message.to_string(),
            fingerprint: failure.fingerprint,
            preview: Bytes::copy_from_slice(&failure.preview),
        };
        Some((self.failed_at(slot, failure.at), described))
    }
}

impl BrokerState {
    /// Drops the failed jobs up to this number, which are about as many as fit into a step.
    pub(crate) fn drop_failed_through(&mut self, through: u64) {
        while let Some((number, slot)) = self.failed.oldest()
            && number <= through
        {
            self.end(slot, Ending::Dropped);
        }
    }

    /// Sets the timer for the oldest failed job or failed join, unless there is one.
    pub(crate) fn wait_for_failed_jobs(&mut self) {
        if self.failed.is_timed {
            return;
        }
        let oldest = self.failed.oldest();
        let failed_at = oldest.and_then(|(_, slot)| Some(self.messages.failure(slot)?.at));
        let over_at = self.joins_over.first().map(|(over_at, _)| *over_at);
        if let Some(at) = failed_at.into_iter().chain(over_at).min() {
            self.failed.is_timed = true;
            let over = at.saturating_add(self.failed_kept_ms);
            self.timers.set(ClockTime::steady(over), Timer::FailedJobs);
        }
    }
}
