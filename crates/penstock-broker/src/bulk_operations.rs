//! Operations on many messages: purges, and operations on all messages that match a filter.
//!
//! An operation is decided when its [`Mark`] is written. A mark names no messages; it covers those with lower numbers
//! than its own. A mark is on disk before its operation is confirmed. From then on no purged message is handed out,
//! even by the next broker after a crash. The messages end in steps (see `chores.rs`), and once none is left, the mark
//! is over.

use std::collections::VecDeque;

use penstock_faults::planted;
use penstock_message::{Filter, MessageState, OnRunning, OperationStatus, Space};

use crate::Broker;
use crate::cancels::CANCELLED;
use crate::endings::Unrun;
use crate::joins::retried_groups::REVIVAL_EVENTS;
use crate::messages::EntryState;
use crate::records::{Mark, MarkedFor, RecordEvent, UnrunCause};
use crate::table::interner::Name;

/// Time for which a finished operation is remembered.
const REMEMBERED_MS: u64 = 600_000;
/// Maximum number of finished operations that are remembered.
const REMEMBERED: usize = 1024;
/// Number of messages that a step looks at, whether they match or not.
const LOOKED_AT: usize = 8192;

pub(crate) const PURGED: &str = "its queue was purged";
/// Reason of jobs that are cancelled at a deadline.
const OVERDUE: &str = "the deadline of its workflow has passed";

/// Operations that are under way, and finished ones.
#[derive(Debug, Default)]
pub(crate) struct Operations {
    under_way: std::collections::BTreeMap<u64, MarkProgress>,
    /// Finished operations, as (operation, status, end on the monotonic clock).
    over: VecDeque<(u64, OperationStatus, u64)>,
}

#[derive(Debug, Default)]
struct MarkProgress {
    status: OperationStatus,
    /// Where the next step starts: the slot of a message, or the number of a failed job.
    cursor: u64,
    /// Whether all ready messages of a purged queue have ended. Delayed ones may be left.
    ready_is_done: bool,
    /// Whether the last jobs of a cancelled workflow have ended.
    last_are_done: bool,
}

impl Broker {
    /// Makes a mark for the messages that match the filter now.
    pub(crate) fn new_mark(
        &mut self,
        what: MarkedFor,
        filter: &Filter,
        reason: &str,
        target: Option<&str>,
    ) -> Mark {
        let names = &mut self.state.names;
        let mut name = |text: Option<&str>| text.map(|text| names.intern(text));
        Mark {
            number: self.state.mark_numbers + 1,
            what,
            before: self.state.numbers + 1,
            queue: name(filter.queue.as_deref()),
            task: name(filter.task.as_deref()),
            workflow: filter.workflow,
            class: name(filter.class.as_deref()),
            target: name(target),
            reason: names.intern(match (what, reason) {
                (MarkedFor::Cancel, "") => CANCELLED,
                _ => reason,
            }),
            fingerprint: filter.fingerprint,
            failed_from: filter.failed_from,
            failed_before: filter.failed_before,
            running: OnRunning::Leave,
        }
    }

    pub(crate) fn operation_under_way(&mut self, number: u64) -> &mut OperationStatus {
        let progress = self.operations.under_way.entry(number).or_default();
        &mut progress.status
    }

    /// Counts a running job that an operation spares before its steps have reached it.
    pub(crate) fn count_spared(&mut self, number: u64, slot: u32) {
        let progress = self.operations.under_way.entry(number).or_default();
        if u64::from(slot) >= progress.cursor {
            progress.status.matched += 1;
            progress.status.spared += 1;
        }
    }

    /// Decides an operation. Returns its number, by which people ask for it.
    pub(crate) fn begin_mark(&mut self, mark: Mark) -> u64 {
        self.record(&RecordEvent::Marked { mark });
        self.state.mark(mark);
        self.must_be_safe();
        mark.number
    }

    /// Cancels the messages of all workflows whose deadlines have passed. Returns the reason. An operation that has not
    /// yet looked at any message also covers further workflows.
    pub(crate) fn begin_overdue(&mut self) -> Name {
        let mut marks = self.state.marks.values();
        let mark = marks.find(|(mark, _)| {
            let progress = self.operations.under_way.get(&mark.number);
            mark.what == MarkedFor::Overdue
                && progress.is_none_or(|progress| progress.cursor == 0 && !progress.last_are_done)
        });
        if let Some((mark, _)) = mark {
            let reason = mark.reason;
            self.must_be_safe();
            return reason;
        }
        let mut mark = self.new_mark(MarkedFor::Overdue, &Filter::default(), OVERDUE, None);
        mark.running = OnRunning::Ask;
        self.added += 1;
        self.begin_mark(mark);
        mark.reason
    }

    /// Purges a queue. Returns `None` if no message waits there, since there is nothing to do.
    pub(crate) fn purge(&mut self, queue: &str) -> Option<u64> {
        let name = self.state.names.find(queue)?;
        let index = self.state.queues.find(name)?;
        let waiting = &self.state.queues[index];
        if waiting.ready + waiting.delayed == 0 {
            return None;
        }
        let filter = Filter {
            queue: Some(queue.to_owned()),
            ..Filter::default()
        };
        let mark = self.new_mark(MarkedFor::Purge, &filter, PURGED, None);
        Some(self.begin_mark(mark))
    }

    /// Returns the progress of an operation; `None` if none with that number is under way or remembered.
    pub fn operation_status(&self, operation: u64) -> Option<OperationStatus> {
        let now_ms = self.clocks.mono();
        if self.state.marks.contains_key(&operation) {
            let progress = self.operations.under_way.get(&operation);
            return Some(
                progress.map_or_else(OperationStatus::default, |progress| progress.status),
            );
        }
        let mut over = self.operations.over.iter();
        let found = over.find(|(number, _, at_ms)| {
            *number == operation && at_ms.saturating_add(REMEMBERED_MS) > now_ms
        });
        found.map(|(_, status, _)| *status)
    }

    /// Returns the oldest unfinished operation. On the last reserve of the disk, an operation that frees no space
    /// waits.
    pub(crate) fn next_mark(&self) -> Option<Mark> {
        let (_, (mark, _)) = self.state.marks.first_key_value()?;
        let waits = self.space == Space::NoSettlements && mark.what == MarkedFor::Retry;
        (!waits).then_some(*mark)
    }

    /// Continues the oldest operation, and the next ones if there is room.
    pub(crate) fn step_marks(&mut self) {
        while let Some(mark) = self.next_mark()
            && self.step_size() > 0
        {
            let number = mark.number;
            let mut progress = self
                .operations
                .under_way
                .remove(&number)
                .unwrap_or_default();
            let is_over = match mark.what {
                MarkedFor::Purge => self.step_purge(&mark, &mut progress),
                MarkedFor::Cancel | MarkedFor::Overdue => self.step_cancel(&mark, &mut progress),
                MarkedFor::Retry | MarkedFor::Drop => self.step_failed(&mark, &mut progress),
            };
            if !is_over {
                self.operations.under_way.insert(number, progress);
                return;
            }
            self.record(&RecordEvent::MarkOver { mark: number });
            self.added += 1;
            self.state.end_mark(number);
            progress.status.is_over = true;
            let now_ms = self.clocks.mono();
            let over = &mut self.operations.over;
            over.push_back((number, progress.status, now_ms));
            while over.len() > REMEMBERED
                || over
                    .front()
                    .is_some_and(|(_, _, at_ms)| at_ms + REMEMBERED_MS < now_ms)
            {
                over.pop_front();
            }
        }
    }

    fn unrun(&self, how: UnrunCause, reason: Name) -> Unrun {
        Unrun { how, reason }
    }

    /// Ends messages for an operation.
    fn end_marked(&mut self, slots: Vec<u32>, unrun: Unrun, progress: &mut MarkProgress) {
        progress.status.matched += slots.len() as u64;
        progress.status.done += slots.len() as u64;
        self.added += slots.len();
        self.added += self.end_waiting(slots, unrun);
    }

    fn step_purge(&mut self, mark: &Mark, progress: &mut MarkProgress) -> bool {
        let Some(queue) = mark.queue.and_then(|name| self.state.queues.find(name)) else {
            return true;
        };
        let unrun = self.unrun(UnrunCause::Purged, mark.reason);
        // Messages behind the purged ones were out of reach until now.
        self.state.has_new_work = true;
        self.state.queues.activate(queue);
        if !progress.ready_is_done {
            let most = match planted!("purge-at-once") {
                true => usize::MAX,
                false => self.step_size(),
            };
            let mut slots = self.purged_ready(queue, mark.before, most);
            progress.ready_is_done = slots.len() < most;
            // A message that was returned to its flow may be listed there twice.
            slots.sort_unstable();
            slots.dedup();
            self.end_marked(slots, unrun, progress);
            if !progress.ready_is_done {
                return false;
            }
        }
        if self.state.queues[queue].rare().ending == 0 {
            return true;
        }
        // The rest is delayed, or has come due since, and is in no list of its queue.
        let state = &self.state;
        let is_covered = |slot: u32| state.messages.queue(slot) == queue && state.is_purged(slot);
        let (slots, cursor) = self.find_messages(progress.cursor, is_covered);
        self.end_marked(slots, unrun, progress);
        progress.cursor = cursor.unwrap_or(0);
        // A message that a join has released keeps its place.
        cursor.is_none() && self.state.queues[queue].rare().ending == 0
    }

    /// Returns ready messages that were purged, up to `most`.
    pub(crate) fn purged_ready(&mut self, queue: u32, before: u64, most: usize) -> Vec<u32> {
        if planted!("lose-purge") {
            return Vec::new();
        }
        let (queues, messages) = (&mut self.state.queues, &self.state.messages);
        queues.ready_before(queue, before, most, messages)
    }

    fn step_cancel(&mut self, mark: &Mark, progress: &mut MarkProgress) -> bool {
        let state = &self.state;
        let mut spared = 0;
        // Its last jobs come first: cancelling a job before them would block them, and "blocked" would be their result.
        let only_last = mark.is_for_workflows() && !progress.last_are_done;
        let is_last = |slot: u32| {
            let message_state = state.messages.state(slot);
            let is_last = state.messages.member(slot).is_none()
                || state.workflow_of(slot) == Some(state.messages[slot].id);
            matches!(message_state, EntryState::Held(_)) && is_last
        };
        let is_covered = |slot: u32| {
            let is_covered = state.is_covered(mark, slot) && (!only_last || is_last(slot));
            let is_spared = mark.running == OnRunning::Leave && state.messages[slot].is_leased();
            spared += u64::from(is_covered && is_spared);
            let is_missed = planted!("cancel-misses-delayed") && state.messages[slot].is_delayed();
            is_covered && !is_spared && !is_missed
        };
        let (slots, cursor) = self.find_messages(progress.cursor, is_covered);
        progress.status.matched += spared;
        progress.status.spared += spared;
        let is_leased = |slot: &u32| self.state.messages[*slot].is_leased();
        let (running, slots): (Vec<u32>, Vec<u32>) = slots.into_iter().partition(is_leased);
        let unrun = self.unrun(UnrunCause::Cancelled, mark.reason);
        self.end_marked(slots, unrun, progress);
        progress.status.matched += running.len() as u64;
        if !planted!("miscount-asked") {
            progress.status.asked += running.len() as u64;
        }
        self.added += running.len();
        for slot in running {
            self.ask_to_stop(slot, mark.reason, mark.running == OnRunning::Kill);
        }
        progress.cursor = cursor.unwrap_or(0);
        progress.last_are_done |= cursor.is_none();
        cursor.is_none() && !only_last
    }

    /// Returns the matching messages from this slot on, and the slot to continue from; `None` after the last.
    fn find_messages(
        &self,
        from: u64,
        mut is_covered: impl FnMut(u32) -> bool,
    ) -> (Vec<u32>, Option<u64>) {
        let messages = &self.state.messages;
        let most = self.step_size();
        let mut found = Vec::new();
        let from = from as u32;
        let end = messages.end_of_slots();
        for slot in from..end {
            if found.len() == most || (slot - from) as usize == LOOKED_AT {
                return (found, Some(u64::from(slot)));
            }
            if messages
                .by_slot(slot)
                .is_some_and(|entry| !entry.is_ended())
                && is_covered(slot)
            {
                found.push(slot);
            }
        }
        (found, None)
    }

    fn step_failed(&mut self, mark: &Mark, progress: &mut MarkProgress) -> bool {
        // Retrying a job removes its result, and may reopen its group, which removes the group's outcome.
        let events = match mark.what {
            MarkedFor::Retry => 2 + REVIVAL_EVENTS,
            // Its group may be given up.
            _ => 2,
        };
        let most = self.step_size() / events;
        let mut found = Vec::new();
        let mut cursor = None;
        for (looked_at, (number, slot)) in self.state.failed.after(progress.cursor).enumerate() {
            if number >= mark.before {
                break;
            }
            if found.len() == most || looked_at == LOOKED_AT {
                cursor = Some(progress.cursor);
                break;
            }
            progress.cursor = number;
            if self.failed_matches(slot, &mark.into()) {
                found.push(slot);
            }
        }
        progress.status.matched += found.len() as u64;
        self.added += events * found.len();
        let mut dropped = Vec::new();
        for slot in found {
            let is_done = match mark.what {
                MarkedFor::Retry => {
                    let may = self.check_retry(slot, mark.target.is_some()).is_ok();
                    if may {
                        self.revive(slot, mark.target);
                    }
                    may
                }
                _ => {
                    dropped.push(slot);
                    true
                }
            };
            match is_done {
                true => progress.status.done += 1,
                false => progress.status.spared += 1,
            }
        }
        self.forget_failed(dropped);
        // The operation is not over until all messages that the retried jobs had blocked are pending again.
        cursor.is_none() && !self.chores.is_reopening()
    }

    /// Names the state of a message, for people.
    pub(crate) fn state_of(&self, slot: u32) -> MessageState {
        match self.state.messages.state(slot) {
            EntryState::Ready => MessageState::Ready,
            EntryState::Delayed(_) => MessageState::Delayed,
            EntryState::Held(_) if self.state.is_blocked(slot) => MessageState::Blocked,
            EntryState::Held(_) => MessageState::Held,
            EntryState::Leased(_) if self.state.messages.asked(slot).is_some() => {
                MessageState::Cancelling
            }
            EntryState::Leased(_) => MessageState::Running,
            EntryState::Failed | EntryState::Ended => MessageState::Failed,
        }
    }
}
