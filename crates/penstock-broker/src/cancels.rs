//! Cancels jobs. A waiting job ends at once. A running one is asked to stop, by an order to the session that holds its
//! lease:
//!
//! ```text
//!     Cancel ──► CancelAsked, on disk ──► order ──► its worker stops it ──► Release ──► it ends as cancelled
//!                                         again at each hello               Ack ──► it had succeeded before it was stopped
//! ```
//!
//! From that record on the job never returns to a queue. Anything that ends its lease without a success (a retry, a
//! failure, a death, the loss of its worker) ends the job as cancelled, in [`Broker::end_if_asked`].
//!
//! A group that runs in the place of a job has no message with the job's id. Cancelling the job then cancels all jobs
//! of the group. If they are too many for one record and the job's outcome is its workflow's, the whole workflow is
//! cancelled.

use std::collections::{BTreeSet, VecDeque};

use penstock_faults::planted;
use penstock_message::{
    Applied, CancelOrder, Filter, Lease, Member, MessageId, MessageState, OnRunning, Refusal,
};

use crate::Broker;
use crate::endings::Unrun;
use crate::held_effects::Effect;
use crate::messages::{Asked, EntryState, Handle};
use crate::records::{ENDED_AT_ONCE, Mark, MarkedFor, RecordEvent, UnrunCause};
use crate::state::BrokerState;
use crate::table::interner::Name;

/// Reason of a cancelled job when the client gave none.
pub(crate) const CANCELLED: &str = "it was cancelled";

/// Maximum number of jobs of a group that one record ends: each may end a join and be the last of its workflow.
const ENDED_OF_GROUP: usize = ENDED_AT_ONCE / 4;

/// Jobs to cancel for a job that a group has replaced.
enum InPlace {
    /// Unfinished jobs of the group.
    Jobs(Vec<u32>),
    /// The whole workflow: the jobs are too many, and the job's outcome is that of its workflow.
    Workflow,
    TooMany,
}

impl Broker {
    /// Whether any part of the job waits, or runs and may be asked to stop.
    pub(crate) fn check_cancel(&self, id: &MessageId, running: OnRunning) -> Result<(), Refusal> {
        let messages = &self.state.messages;
        let mut found = Err(Refusal::NoSuchJob);
        for slot in messages.copies(id) {
            found = match messages.state(slot) {
                EntryState::Leased(_) if running == OnRunning::Leave => {
                    Err(Refusal::TooLate(self.state_of(slot)))
                }
                EntryState::Failed => Err(Refusal::TooLate(MessageState::Failed)),
                _ => return Ok(()),
            };
        }
        match self.in_place_of(id) {
            Some(InPlace::Jobs(slots)) => {
                let stays = |slot: &u32| running == OnRunning::Leave && messages[*slot].is_leased();
                match slots.iter().find(|slot| !stays(slot)) {
                    Some(_) => Ok(()),
                    None => Err(Refusal::TooLate(MessageState::Running)),
                }
            }
            Some(InPlace::Workflow) => Ok(()),
            Some(InPlace::TooMany) => Err(Refusal::Invalid(format!(
                "more than {ENDED_OF_GROUP} jobs run in its place: cancel its workflow"
            ))),
            None => found,
        }
    }

    /// Cancels a job, or the group that runs in its place.
    pub(crate) fn cancel_job(
        &mut self,
        id: &MessageId,
        reason: &str,
        running: OnRunning,
    ) -> Applied {
        let in_place = match self.state.messages.copies(id).next() {
            Some(_) => None,
            None => self.in_place_of(id),
        };
        let slots = match in_place {
            Some(InPlace::Workflow) => {
                let filter = Filter {
                    workflow: Some(*id),
                    ..Filter::default()
                };
                return Applied {
                    found: Some(MessageState::Cancelling),
                    operation: Some(self.cancel_all(&filter, reason, running)),
                    ..Applied::default()
                };
            }
            Some(InPlace::Jobs(slots)) => slots,
            // The check has refused it.
            Some(InPlace::TooMany) => Vec::new(),
            None => self.state.messages.copies(id).collect(),
        };
        Applied {
            found: self.cancel(slots, reason, running),
            ..Applied::default()
        }
    }

    /// Cancels a job, or the group that runs in its place, on the broker's own initiative. A group ends in steps, since
    /// one record may cancel many.
    pub(crate) fn cancel_in_steps(&mut self, id: &MessageId, reason: &str, running: OnRunning) {
        if self.state.messages.copies(id).next().is_some() {
            self.cancel_job(id, reason, running);
            return;
        }
        // A group that replaces a job without a workflow turns it into one.
        let filter = Filter {
            workflow: Some(*id),
            ..Filter::default()
        };
        self.cancel_all(&filter, reason, running);
    }

    /// Returns the jobs that have taken the place of a job that no longer exists; `None` if no unfinished group has.
    fn in_place_of(&self, id: &MessageId) -> Option<InPlace> {
        let joins = &self.state.joins;
        let join = joins.of_result(id).filter(|_| !id.is_join())?;
        if joins[join].is_decided() {
            return None;
        }
        Some(match self.jobs_before(join) {
            Some(slots) => InPlace::Jobs(slots),
            None if self.state.workflows.record(id).is_some() => InPlace::Workflow,
            None => InPlace::TooMany,
        })
    }

    /// Returns exactly the jobs that the end of a join depends on; `None` if one record can't end them all.
    fn jobs_before(&self, join: u32) -> Option<Vec<u32>> {
        let BrokerState {
            messages, joins, ..
        } = &self.state;
        let mut found = Vec::new();
        let mut seen = BTreeSet::from([join]);
        let mut next = vec![join];
        // Joins that hold some of the jobs. Other joins may also wait for those jobs.
        let mut behind = Vec::new();
        while let Some(join) = next.pop() {
            for id in joins[join].pending(ENDED_OF_GROUP)? {
                let copies = messages.copies(&id);
                for slot in copies.filter(|slot| !messages[*slot].is_failed()) {
                    found.push(slot);
                    if let EntryState::Held(before) = messages.state(slot) {
                        behind.extend(joins.find(&before));
                    }
                }
            }
            let nested = joins.nested(join).filter(|slot| !joins[*slot].is_decided());
            next.extend(nested.filter(|slot| seen.insert(*slot)));
            if found.len() > ENDED_OF_GROUP || seen.len() > ENDED_OF_GROUP {
                return None;
            }
            if next.is_empty() {
                let is_for_these =
                    |before: &u32| self.held_slots(*before).all(|slot| found.contains(&slot));
                behind.retain(|before| !seen.contains(before));
                behind.sort_unstable();
                behind.dedup();
                let (only, others) = behind.into_iter().partition(is_for_these);
                (next, behind) = (only, others);
                seen.extend(&next);
            }
        }
        Some(found)
    }

    /// Ends the waiting ones among these messages, and asks the workers of running ones to stop. Returns the state they
    /// were in, or the state they are in now if some run.
    fn cancel(
        &mut self,
        slots: Vec<u32>,
        reason: &str,
        running: OnRunning,
    ) -> Option<MessageState> {
        let messages = &self.state.messages;
        let copies = slots.into_iter();
        let copies = copies.filter(|slot| !messages[*slot].is_failed());
        let (leased, waiting): (Vec<u32>, Vec<u32>) =
            copies.partition(|slot| messages[*slot].is_leased());
        let found = waiting.first().map(|slot| self.state_of(*slot));
        let reason = self.state.names.intern(match reason {
            "" => CANCELLED,
            reason => reason,
        });
        let how = UnrunCause::Cancelled;
        self.end_waiting(waiting, Unrun { how, reason });
        if running == OnRunning::Leave || leased.is_empty() {
            return found;
        }
        for slot in leased {
            self.ask_to_stop(slot, reason, running == OnRunning::Kill);
        }
        Some(MessageState::Cancelling)
    }

    /// Cancels all matching jobs, in steps. Returns the id of the operation.
    pub(crate) fn cancel_all(&mut self, filter: &Filter, reason: &str, running: OnRunning) -> u64 {
        if let Some(workflow) = whole_workflow(filter) {
            self.state.workflows.mark_cancelled(workflow);
        }
        let mut mark = self.new_mark(MarkedFor::Cancel, filter, reason, None);
        mark.running = running;
        let operation = self.begin_mark(mark);
        if let Some(workflow) = &filter.workflow {
            self.cancel_unsealed(workflow, mark.reason);
        }
        operation
    }

    /// Asks the worker of a running job to stop it. A second request passes on only news: that the worker may kill the
    /// job.
    pub(crate) fn ask_to_stop(&mut self, slot: u32, reason: Name, kill: bool) {
        let asked = self.state.messages.asked(slot);
        if asked.is_some_and(|asked| asked.kill || !kill) {
            return;
        }
        // The first request has set the reason.
        let reason = asked.map_or(reason, |asked| asked.reason);
        let number = self.state.messages[slot].number();
        self.must_be_safe();
        self.record(&RecordEvent::CancelAsked {
            number,
            kill,
            reason,
        });
        self.state.ask_to_stop(slot, Asked { reason, kill });
        self.order_to_stop(slot);
    }

    /// Sends the order to the session that holds the lease, once all decisions so far are safe. A session without a
    /// connection receives it at its next hello.
    pub(crate) fn order_to_stop(&mut self, slot: u32) {
        let messages = &self.state.messages;
        let Some(lease) = messages.lease_state(slot) else {
            return;
        };
        if let Some(conn) = self.state.sessions[lease.session].conn {
            let (message, grant) = (messages.handle(slot), lease.grant.number);
            let safe_after = self.state.safe_after.and(self.everything);
            let effect = Effect::Cancel {
                conn,
                message,
                grant,
            };
            self.effect(safe_after, effect);
        }
    }

    /// Ends a job that was asked to stop and whose lease ends without a success.
    pub(crate) fn end_if_asked(&mut self, slot: u32) -> bool {
        let asked = self.state.messages.asked(slot);
        let reason = match asked {
            Some(asked) => asked.reason,
            None => match self.mark_that_asks_to_stop(slot) {
                Some(mark) => {
                    let status = self.operation_under_way(mark.number);
                    status.matched += 1;
                    status.asked += 1;
                    mark.reason
                }
                None => return false,
            },
        };
        let how = UnrunCause::Cancelled;
        self.end_unrun(vec![slot], Unrun { how, reason });
        true
    }

    /// Ends a waiting job that an operation under way has not reached yet.
    pub(crate) fn end_cancelled(&mut self, slot: u32, mark: &Mark) {
        let mut slots = vec![slot];
        if mark.is_for_workflows() {
            self.add_dependents(&mut slots, mark);
        }
        let status = self.operation_under_way(mark.number);
        status.matched += slots.len() as u64;
        status.done += slots.len() as u64;
        let (how, reason) = (UnrunCause::Cancelled, mark.reason);
        self.added += slots.len();
        self.added += self.end_waiting(slots, Unrun { how, reason });
    }

    /// Adds all messages that depend on this one at any distance and are cancelled with it: its end alone would block
    /// them, and "blocked" would be their result. The message whose result is the workflow's comes first, since there
    /// may not be room for all.
    fn add_dependents(&self, slots: &mut Vec<u32>, mark: &Mark) {
        let (messages, joins) = (&self.state.messages, &self.state.joins);
        let most = self.step_size();
        let mut places: VecDeque<Member> = messages.member(slots[0]).into_iter().collect();
        let workflow = self.state.workflow_of(slots[0]);
        let last = workflow
            .as_ref()
            .into_iter()
            .flat_map(|id| messages.copies(id));
        slots.extend(last.filter(|slot| {
            let is_held = matches!(messages.state(*slot), EntryState::Held(_));
            is_held && !self.state.is_blocked(*slot) && self.state.is_covered(mark, *slot)
        }));
        let mut seen = BTreeSet::new();
        while let Some(place) = places.pop_front()
            && slots.len() < most
            && seen.len() < most
        {
            let join = joins.find(&place.join).filter(|join| seen.insert(*join));
            let Some(join) = join.filter(|join| !joins[*join].is_decided()) else {
                continue;
            };
            let held = self.held_slots(join);
            for slot in held.filter(|slot| self.state.is_covered(mark, *slot)) {
                if slots.len() == most {
                    break;
                }
                places.extend(messages.member(slot));
                if !slots.contains(&slot) {
                    slots.push(slot);
                }
            }
            places.extend(joins[join].then.iter().take(most));
        }
    }

    /// Whether an operation under way spares this running job. With its old number, the job would be cancelled as soon
    /// as it waits again.
    pub(crate) fn is_spared(&mut self, slot: u32) -> bool {
        let Some(mark) = self.state.mark_that_cancels(slot) else {
            return false;
        };
        self.count_spared(mark.number, slot);
        !planted!("cancel-spared-jobs")
    }

    /// Returns an operation under way that has yet to ask this running job to stop. With a new number the job would
    /// escape it.
    pub(crate) fn mark_that_asks_to_stop(&self, slot: u32) -> Option<Mark> {
        let mut marks = self.state.marks.values().map(|(mark, _)| *mark);
        marks.find(|mark| {
            mark.what.is_cancellation()
                && mark.running != OnRunning::Leave
                && self.state.is_covered(mark, slot)
        })
    }
}

/// Returns the workflow, if the filter selects all of its jobs and nothing else.
fn whole_workflow(filter: &Filter) -> Option<MessageId> {
    let all = Filter {
        workflow: filter.workflow,
        ..Filter::default()
    };
    filter.workflow.filter(|_| *filter == all)
}

impl BrokerState {
    /// Returns an operation under way that cancels this message, or would if it waited.
    #[inline]
    pub(crate) fn mark_that_cancels(&self, slot: u32) -> Option<Mark> {
        if self.marks.is_empty() {
            return None;
        }
        let mut marks = self.marks.values().map(|(mark, _)| *mark);
        marks.find(|mark| mark.what.is_cancellation() && self.is_covered(mark, slot))
    }

    /// Whether an operation that cancels jobs covers this one.
    pub(crate) fn is_covered(&self, mark: &Mark, slot: u32) -> bool {
        let (entry, shared_head) = (&self.messages[slot], self.messages.shared_head(slot));
        if mark.what == MarkedFor::Overdue {
            return self.is_overdue(slot) && !entry.is_failed() && !entry.is_ended();
        }
        let queue = || self.queues[shared_head.queue].name;
        (entry.number() < mark.before || planted!("cancel-later-jobs"))
            && mark.queue.is_none_or(|name| name == queue())
            && mark.task.is_none_or(|task| task == shared_head.task)
            && (mark.workflow.is_none() || self.workflow_of(slot) == mark.workflow)
            && !entry.is_failed()
            && !entry.is_ended()
    }

    /// Notes that the worker of a message was asked to stop it.
    pub(crate) fn ask_to_stop(&mut self, slot: u32, asked: Asked) {
        self.names.hold(asked.reason);
        self.forget_asked(slot);
        self.set_asked(slot, Some(asked));
    }

    /// Forgets that a message was asked to stop: it ends, or comes back anyway.
    pub(crate) fn forget_asked(&mut self, slot: u32) {
        if let Some(asked) = self.messages.asked(slot) {
            self.names.release(asked.reason);
            self.set_asked(slot, None);
        }
    }

    fn set_asked(&mut self, slot: u32, asked: Option<Asked>) {
        self.live_bytes -= self.messages.journal_bytes(slot);
        self.messages.set_asked(slot, asked);
        self.live_bytes += self.messages.journal_bytes(slot);
    }

    /// Returns the order for a message, while its lease with this grant holds.
    pub(crate) fn cancel_order(&self, message: Handle, grant: u64) -> Option<CancelOrder> {
        self.messages.get(message)?;
        let lease: Lease = self.messages.lease(message.slot)?;
        let asked = self.messages.asked(message.slot)?;
        (lease.grant == grant).then(|| CancelOrder {
            lease,
            reason: self.names.text(asked.reason).to_owned(),
            kill: asked.kill,
        })
    }

    /// Whether the delivery that an order refers to is still unsent: the order goes after it.
    pub(crate) fn is_unsent(&self, message: Handle) -> bool {
        self.messages.get(message).is_some()
            && (self.messages.lease_state(message.slot)).is_some_and(|lease| !lease.sent)
    }
}
