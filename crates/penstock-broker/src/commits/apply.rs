//! Applies the operations of a checked transaction.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_jobs::Blame;
use penstock_message::{
    Applied, Claim, Conflict, Due, Extras, Hold, JOIN_CAP, JoinId, JoinOutcome as Outcome, Key,
    Member, Message, MessageId, Op, ReleaseReason, Target, Unsealed, Until, Value, ValueStatus,
    place_of_heir,
};

use super::Checked;
use crate::Broker;
use crate::clock::ClockTime;
use crate::endings::{RunEnd, Unrun};
use crate::joins::Arrival;
use crate::keys::stored_value::is_short;
use crate::messages::UntilStart;
use crate::messages::entry::BodyAt;
use crate::queues::tally::Counter;
use crate::records::{
    Change, Failing, Growth, JoinProgress, MarkedFor, MessageHead, RecordEvent, RecordedState,
    RunHead, UnrunCause,
};
use crate::state::{BrokerState, Ending};

/// Reason of a job that was added or to be replaced after its workflow was cancelled.
const WORKFLOW_CANCELLED: &str = "its workflow was cancelled";

impl Broker {
    /// Applies operations that were checked, and returns the details.
    pub(super) fn apply(&mut self, session: u32, checked: Checked) -> Applied {
        let Checked { mut ops, leased } = checked;
        let mut applied = Applied::default();
        let mut slots = leased.iter().copied();
        let mut next_lease = || slots.next().expect("each lease was checked");
        // The run whose outcome follows in this transaction.
        let mut run: Option<(MessageId, RunHead)> = None;
        // This costs a pass over all operations, and matters only if a queue may be full.
        let is_outcome = self.state.queues.limited > 0 && ops.iter().any(Op::is_settlement);
        // A plain settlement has an end and a result.
        let brings_jobs = ops.len() > 2 || matches!(&ops[..], [_, Op::Publish { .. }]);
        let mut is_cancelled = false;
        let mut grown = self.grow(&ops);
        // Workflow of the job that the transaction settles.
        let mut of_settled = None;
        let mut replaced: Option<LeftBehind> = None;
        // By reference: an operation is large, and most of it stays in place.
        for (index, op) in ops.iter_mut().enumerate() {
            if let Some(grown) = &mut grown
                && !grown.supply(op)
            {
                applied.skipped.push(index as u32);
                continue;
            }
            match op {
                Op::Ack { lease, cost_us } => {
                    let slot = next_lease();
                    if planted!("cancel-beats-success") && self.end_if_asked(slot) {
                        return applied;
                    }
                    run = Some((lease.message, self.state.run_of(slot, self.writer.time())));
                    if brings_jobs {
                        is_cancelled = self.is_of_cancelled_workflow(slot);
                        of_settled = self.state.workflow_of(slot);
                    }
                    let cost_us = *cost_us;
                    self.end(slot, RunEnd::Acked { cost_us });
                }
                Op::Replace { cost_us, .. } => {
                    let slot = next_lease();
                    if self.end_if_asked(slot) || self.end_with_workflow(slot) {
                        break;
                    }
                    of_settled = self.state.workflow_of(slot);
                    replaced = Some(LeftBehind {
                        id: self.state.messages[slot].id,
                        member: self.state.messages.member(slot),
                        generation: self.state.messages.shared_head(slot).generation,
                        result_ttl_ms: self.state.messages.shared_head(slot).result_ttl_ms,
                        claim: self.state.owned_claim(slot),
                    });
                    let cost_us = *cost_us;
                    self.end(slot, RunEnd::Replaced { cost_us });
                }
                Op::Publish { .. } | Op::Hold(_) | Op::Open(_)
                    if is_cancelled && !planted!("spawn-escapes-cancel") =>
                {
                    applied.skipped.push(index as u32);
                }
                Op::Grow { .. } => {}
                Op::Release { reason, .. } => match reason {
                    ReleaseReason::Returned => self.return_message(next_lease()),
                    ReleaseReason::Crashed(reason) => {
                        let reason = std::mem::take(reason).into();
                        self.crash(next_lease(), reason, Some(Blame::Guilty));
                    }
                    ReleaseReason::Suspected(reason) => {
                        self.suspect(next_lease(), std::mem::take(reason).into());
                    }
                },
                Op::Fail {
                    value,
                    note,
                    failure,
                    cost_us,
                    ..
                } => {
                    let slot = next_lease();
                    if self.end_if_asked(slot) {
                        continue;
                    }
                    let class = self.state.names.intern(&failure.class);
                    let failing = Failing {
                        to: self.state.numbers + 1,
                        crashed: false,
                        is_displaced: false,
                        class,
                        message: &failure.message,
                        fingerprint: failure.fingerprint,
                        preview: &failure.preview,
                        note: Some(note),
                        at: self.clocks.steady(),
                    };
                    let end = RunEnd::Failed {
                        failing,
                        value: value.as_mut().map(copied),
                        cost_us: Some(*cost_us),
                    };
                    self.end(slot, end);
                }
                Op::Move {
                    lease,
                    queue,
                    due,
                    patch,
                    cost_us,
                } => {
                    let slot = next_lease();
                    if !planted!("cancel-resurrected-by-retry") && self.end_if_asked(slot) {
                        continue;
                    }
                    let number = self.state.messages[slot].number();
                    let from = self.state.queues[self.state.messages.queue(slot)].name;
                    run = Some((lease.message, self.state.run_of(slot, self.writer.time())));
                    let change = Change {
                        to: self.state.numbers + 1,
                        queue: match queue {
                            Some(queue) => self.state.names.intern(queue),
                            None => from,
                        },
                        due: due.map(|due| self.clocks.resolve_start(due)),
                        next_attempt: patch.next_attempt,
                        crashed: false,
                        redelivered: false,
                        was_sent: false,
                        note: patch.note.as_deref(),
                        expires_at: patch.expires_at.map(|due| self.clocks.resolve(due)),
                    };
                    self.record(&RecordEvent::Moved { number, change });
                    let note = patch.note.clone().as_mut().map(copied);
                    if change.next_attempt {
                        self.count(slot, Counter::Retried);
                    }
                    self.state.move_message(slot, &change, note, Some(*cost_us));
                    if change.queue != from {
                        self.count_arrival(slot);
                    }
                    let queue = self.state.messages.queue(slot);
                    self.make_room(queue, change.to);
                }
                Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key,
                } => {
                    // An earlier operation of this transaction may have added or removed the key since the check. And
                    // the check did not look for the message if the key existed then.
                    let is_skipped = unless_key.as_ref().is_some_and(|claim| {
                        self.key_exists(&claim.key) || self.state.messages.holds(&message.id)
                    });
                    let unless_key = unless_key.take();
                    if is_skipped {
                        let claim = unless_key.expect("it has a claim");
                        if let Some(slot) = self.to_replace(&claim, message) {
                            self.publish_in_place(slot, &queues[0], message, *due, *claim);
                            continue;
                        }
                        let owner = self.state.owner_of(&claim.key);
                        applied.skipped.push(index as u32);
                        applied
                            .owners
                            .extend(owner.map(|owner| (index as u32, owner)));
                        continue;
                    }
                    let claim = replaced.as_mut().and_then(|it| it.pass_on(message));
                    let claim = claim.map(Into::into).or(unless_key);
                    self.publish(queues, message, *due, claim, is_outcome);
                }
                Op::Put {
                    key,
                    value,
                    ttl_ms,
                    group,
                } => {
                    let group = self.state.names.intern(group);
                    let body = match is_short(&value.body) {
                        true => std::mem::take(&mut value.body),
                        false => copied(&mut value.body),
                    };
                    let value = Value::new(value.status, body);
                    let run = run.filter(|(id, _)| *key == Key::Result(*id));
                    let run = run.map(|(_, run)| run);
                    self.put(own_key(key), value, *ttl_ms, group, run);
                }
                Op::Delete { key } => {
                    self.record(&RecordEvent::Removed { key: key.clone() });
                    self.state.remove_key(key);
                }
                Op::Guard { .. } => {}
                Op::Hold(Hold {
                    join,
                    count,
                    messages,
                    policy,
                    expects,
                    then,
                    result_ttl_ms,
                    unsealed,
                }) => {
                    let growth = unsealed.map(|unsealed| self.growth(session, unsealed));
                    let count = if growth.is_some() { JOIN_CAP } else { *count };
                    let (join, policy) = (*join, *policy);
                    if let Some(replaced) = &replaced {
                        replaced.pass_on_places(then);
                    }
                    let progress = JoinProgress {
                        expects: std::mem::take(expects).into(),
                        then: std::mem::take(then).into(),
                        result_ttl_ms: *result_ttl_ms,
                        unsealed: growth,
                        ..JoinProgress::default()
                    };
                    for place in progress.then.iter() {
                        self.note_member(*place);
                    }
                    self.state.open_join(join, count, policy, &progress);
                    self.record(&RecordEvent::JoinState {
                        join,
                        count,
                        policy,
                        over_at: None,
                        arrived: (&[]).into(),
                        progress,
                    });
                    for (queue, message) in messages {
                        let claim = replaced.as_mut().and_then(|it| it.pass_on(message));
                        let slot = self.insert(queue, message, RecordedState::Held(join));
                        if let Some(key) = claim {
                            self.claim(slot, key);
                        }
                    }
                    if count == 0 {
                        self.end_empty_join(&join);
                    }
                }
                Op::Open(open) => self.open_workflow(open),
                Op::Seal { join, count } => {
                    self.record_growth();
                    self.seal_join(*join, *count);
                }
                Op::Join {
                    join,
                    index,
                    succeeded,
                } => self.join(*join, *index, *succeeded),
                Op::Cancel {
                    target,
                    reason,
                    running,
                } => match target {
                    Target::Job(id) => {
                        let cancelled = self.cancel_job(id, reason, *running);
                        applied.found = cancelled.found;
                        applied.operation = cancelled.operation.or(applied.operation);
                    }
                    Target::Filter(filter) => {
                        applied.operation = Some(self.cancel_all(filter, reason, *running));
                    }
                },
                Op::RetryFailed { target, queue } => match target {
                    Target::Job(id) => applied.found = self.retry(id, queue.as_deref()),
                    Target::Filter(filter) => {
                        let queue = queue.as_deref();
                        let mark = self.new_mark(MarkedFor::Retry, filter, "", queue);
                        applied.operation = Some(self.begin_mark(mark));
                    }
                },
                Op::DropFailed { target } => match target {
                    Target::Job(id) => applied.found = self.drop_failed(id),
                    Target::Filter(filter) => {
                        let mark = self.new_mark(MarkedFor::Drop, filter, "", None);
                        applied.operation = Some(self.begin_mark(mark));
                    }
                },
                Op::Purge { queue } => applied.operation = self.purge(queue),
                Op::Pause { queue } => self.pause(queue, true),
                Op::Resume { queue } => self.pause(queue, false),
                Op::Limit { queue, limits } => self.limit(queue, *limits),
                Op::Schedule { schedule, step } => {
                    let job = self.schedule(schedule, step);
                    applied.owners.extend(job.map(|job| (index as u32, job)));
                }
                Op::Unschedule { schedule } => self.unschedule(schedule),
                Op::Unnamed => unreachable!("it was refused"),
            }
        }
        if let Some(member) = replaced.and_then(|replaced| replaced.member) {
            self.forget_member(member);
        }
        if !self.grown.is_empty() {
            self.record_growth();
        }
        self.cancel_latecomers(of_settled);
        self.spare_leased = leased;
        applied
    }

    /// Returns the progress to record for a new unsealed join.
    fn growth(&self, session: u32, unsealed: Unsealed) -> Growth {
        let messages = &self.state.messages;
        let creator = unsealed.creator.into_iter();
        let mut leases = creator.flat_map(|job| messages.copies(&job).collect::<Vec<u32>>());
        let lease = leases.find_map(|slot| messages.lease_state(slot));
        Growth {
            workflow: unsealed.workflow,
            session: self.state.sessions[session].number,
            grant: lease.map_or(0, |lease| lease.grant.number),
            members: 0,
        }
    }

    /// Counts a member that arrives at an unsealed join.
    fn note_member(&mut self, member: Member) {
        if !self.state.joins.has_unsealed() {
            return;
        }
        match self.grown.last_mut() {
            Some((join, by)) if *join == member.join => *by += 1,
            _ => self.grown.push((member.join, 1)),
        }
    }

    /// Uncounts a member that takes the place of another.
    fn forget_member(&mut self, member: Member) {
        let mut grown = self.grown.iter_mut();
        if let Some((_, by)) = grown.find(|(join, _)| *join == member.join) {
            *by -= 1;
        }
        self.grown.retain(|(_, by)| *by > 0);
    }

    /// Records the members added to unsealed joins.
    fn record_growth(&mut self) {
        for (join, by) in std::mem::take(&mut self.grown) {
            let Some(slot) = self.state.joins.find(&join) else {
                continue;
            };
            if self.state.joins[slot].is_unsealed() {
                self.record(&RecordEvent::JoinGrown { join, by });
                self.state.grow_join(slot, by);
            }
        }
    }

    /// Publishes a message in place of a waiting one that owns the key it claims.
    fn publish_in_place(
        &mut self,
        slot: u32,
        queue: &str,
        message: &mut Message,
        due: Option<Due>,
        claim: Claim,
    ) {
        let messages = &self.state.messages;
        let (id, number) = (messages[slot].id, messages[slot].number());
        let was_ready = messages[slot].is_ready();
        let (task, ttl_ms, is_same_line) = {
            let shared_head = messages.shared_head(slot);
            // Lines keep stale places. A message with the same number in another line would revive one of them.
            let is_same_line = self.is_in_queue(slot, queue)
                && shared_head.priority == message.priority
                && self.state.names.text(shared_head.task) == message.task;
            (shared_head.task, shared_head.result_ttl_ms, is_same_line)
        };
        let first = messages.until_start(slot).and_then(|until| until.latest);
        let latest = first.or_else(|| self.latest(&claim));
        let due = due.map(|due| self.clocks.resolve_start(due));
        let state = match due {
            // Its quiet time is over, and its turn comes soon.
            Some(_) if latest.is_some() && was_ready => RecordedState::Ready,
            Some(when) => RecordedState::Delayed(ClockTime {
                at: match latest.filter(|_| !planted!("debounce-never-runs")) {
                    Some(latest) => when.at.min(latest),
                    None => when.at,
                },
                ..when
            }),
            None => RecordedState::Ready,
        };
        let run = self.state.run_of(slot, self.writer.time());
        self.counts.cancelled += 1;
        self.count(slot, Counter::Cancelled);
        self.record(&RecordEvent::Replaced { number });
        self.state.end(slot, Ending::Replaced { cost_us: None });
        if let Some(ttl_ms) = ttl_ms {
            let body = Bytes::copy_from_slice(&message.id.0);
            let value = Value::new(ValueStatus::Replaced, body);
            self.put(Key::Result(id), value, Some(ttl_ms), task, Some(run));
        }
        // Its number is its place among the ready messages. An operation under way covers all lower numbers.
        let keeps_place = was_ready
            && state == RecordedState::Ready
            && is_same_line
            && self.state.marks.is_empty();
        let number = match keeps_place {
            true => number,
            false => self.state.numbers + 1,
        };
        let slot = self.insert_as(number, queue, message, state);
        self.enter_claim(slot, claim, latest);
        self.follow_ends();
        if self.state.queues.limited > 0 {
            // The message may be larger, or in another queue.
            let queue = self.state.messages.queue(slot);
            self.make_room(queue, u64::MAX);
        }
    }

    /// Returns the latest due time of messages that claim a key in turn, if the first one arrives now.
    fn latest(&self, claim: &Claim) -> Option<u64> {
        match claim.conflict {
            Conflict::Replace {
                max_wait_ms: Some(ms),
            } => Some(self.clocks.steady().saturating_add(ms)),
            _ => None,
        }
    }

    /// Publishes a message that was checked.
    pub(crate) fn publish(
        &mut self,
        queues: &[String],
        message: &mut Message,
        due: Option<Due>,
        claim: Option<Box<Claim>>,
        is_outcome: bool,
    ) {
        let state = match due {
            Some(due) => RecordedState::Delayed(self.clocks.resolve_start(due)),
            None => RecordedState::Ready,
        };
        let slot = self.insert(&queues[0], message, state);
        let source = self.state.messages[slot].number();
        if let Some(claim) = claim
            && !planted!("forget-claim")
        {
            let latest = self.latest(&claim);
            self.enter_claim(slot, *claim, latest);
        }
        let copies = queues.len() - usize::from(queues.len() > 1 && planted!("lose-copy"));
        for queue in &queues[1..copies] {
            let queue = self.state.names.intern(queue);
            let number = self.state.numbers + 1;
            self.record(&RecordEvent::Copied {
                number,
                source,
                queue,
            });
            let copy = self.state.copy_message(slot, number, queue);
            self.count(copy, Counter::Enqueued);
        }
        if self.state.queues.limited > 0 {
            // The next step of a workflow enters even a full queue. Any other new message may itself be dropped.
            let before = if is_outcome { source } else { u64::MAX };
            for queue in queues {
                let name = self.state.names.intern(queue);
                let queue = self.state.queue_named(name);
                self.make_room(queue, before);
            }
        }
    }

    /// Enters the claim of a new message.
    fn enter_claim(&mut self, slot: u32, mut claim: Claim, latest: Option<u64>) {
        let key = own_key(&mut claim.key);
        let messages = &self.state.messages;
        let number = messages[slot].number();
        match claim.until {
            Until::Ended => self.claim(slot, key),
            Until::Started => {
                self.record(&RecordEvent::ClaimedUntilStart {
                    number,
                    key: key.clone(),
                    latest,
                });
                let until = UntilStart { latest };
                self.state.claim_until_start(slot, key, until);
            }
            Until::ForMs(ms) => {
                // A value has its own lifetime and outlives the message.
                let body = Bytes::copy_from_slice(&messages[slot].id.0);
                let value = Value::new(ValueStatus::Succeeded, body);
                let group = messages.shared_head(slot).task;
                self.put(key, value, Some(ms), group, None);
            }
        }
    }

    fn claim(&mut self, slot: u32, key: Key) {
        let number = self.state.messages[slot].number();
        self.record(&RecordEvent::Claimed {
            number,
            key: key.clone(),
        });
        self.state.claim(slot, key);
    }

    /// Whether the job's workflow was cancelled and the job with it. A job that a person has retried is exempt, and so
    /// are errbacks, which run anyway.
    pub(super) fn is_of_cancelled_workflow(&self, slot: u32) -> bool {
        let messages = &self.state.messages;
        let workflow = self.state.workflow_of(slot);
        workflow.is_some_and(|id| self.state.workflows.is_cancelled(&id))
            && messages.shared_head(slot).generation == 0
            && messages.when(slot) != Outcome::Failed
    }

    /// Whether the workflow is cancelled, and the parent job, if any, is not exempt from that.
    fn is_of_ended_workflow(&self, workflow: MessageId, parent: Option<MessageId>) -> bool {
        let BrokerState {
            messages,
            workflows,
            ..
        } = &self.state;
        workflows.is_cancelled(&workflow)
            && parent.is_none_or(|id| {
                let mut copies = messages
                    .copies(&id)
                    .filter(|slot| messages[*slot].is_leased());
                copies.all(|slot| self.is_of_cancelled_workflow(slot))
            })
    }

    /// Ends a job to be replaced if its workflow was cancelled and the job was spared: no further part of it may start.
    fn end_with_workflow(&mut self, slot: u32) -> bool {
        let is_cancelled = self.is_of_cancelled_workflow(slot);
        if is_cancelled {
            let reason = self.state.names.intern(WORKFLOW_CANCELLED);
            let how = UnrunCause::Cancelled;
            self.end_unrun(vec![slot], Unrun { how, reason });
        }
        is_cancelled
    }

    /// Ends the messages that the transaction has added to cancelled workflows: they never start. `of_settled` is the
    /// workflow of the job that the transaction settles; that job continues if its own jobs were not skipped.
    fn cancel_latecomers(&mut self, of_settled: Option<MessageId>) {
        if self.latecomers.is_empty() {
            return;
        }
        let latecomers = std::mem::take(&mut self.latecomers).into_iter();
        let others = latecomers.filter(|(_, workflow)| Some(*workflow) != of_settled);
        let ids: Vec<MessageId> = others.map(|(id, _)| id).collect();
        let messages = &self.state.messages;
        let copies = ids.iter().flat_map(|id| messages.copies(id));
        let slots = copies.filter(|slot| !messages[*slot].is_leased());
        let slots = slots.collect();
        let reason = self.state.names.intern(WORKFLOW_CANCELLED);
        let how = UnrunCause::Cancelled;
        self.end_unrun(slots, Unrun { how, reason });
    }

    fn insert(&mut self, queue: &str, message: &mut Message, state: RecordedState) -> u32 {
        self.insert_as(self.state.numbers + 1, queue, message, state)
    }

    fn insert_as(
        &mut self,
        number: u64,
        queue: &str,
        message: &mut Message,
        state: RecordedState,
    ) -> u32 {
        self.counts.published += 1;
        if let Some(member) = message.extras.as_ref().and_then(|extras| extras.member) {
            self.note_member(member);
        }
        let (mut generation, mut attempts_before) = (0, 0);
        // Properties that many messages have in common are in their shared head.
        let extras = message.extras.take().and_then(|mut extras| {
            generation = std::mem::take(&mut extras.generation);
            attempts_before = std::mem::take(&mut extras.attempts_before);
            copied_extras(&mut extras);
            (*extras != Extras::default()).then_some(extras)
        });
        let head = MessageHead {
            number,
            id: message.id,
            queue: self.state.names.intern(queue),
            task: self.state.names.intern(&message.task),
            priority: message.priority,
            max_deliveries: message.max_deliveries,
            crashes: message.crashes,
            redelivered: false,
            has_copies: false,
            attempt: message.attempt,
            generation,
            attempts_before,
            enqueued_at: self.writer.time(),
            expires_at: message.expires_at.map(|due| self.clocks.resolve(due)),
            result_ttl_ms: message.result_ttl_ms,
            state,
        };
        if let Some(extras) = &extras
            && let Some(workflow) = extras.workflow
            && self.is_of_ended_workflow(workflow, extras.parent)
        {
            self.latecomers.push((message.id, workflow));
        }
        let body_at = self.record_message(&head, extras.as_deref(), &message.body);
        let kept = self.state.keeps_body(head.queue, state);
        let body = kept.then(|| copied(&mut message.body));
        let slot = self
            .state
            .insert_message(&head, extras, None, body_at, body);
        self.count(slot, Counter::Enqueued);
        for note in &mut message.notes {
            self.record(&RecordEvent::Noted {
                number: head.number,
                note,
            });
            self.state.add_note(slot, copied(note));
        }
        slot
    }

    /// Records a new message without the events that follow it. Returns the location of its body.
    fn record_message(
        &mut self,
        head: &MessageHead,
        extras: Option<&Extras>,
        body: &[u8],
    ) -> BodyAt {
        self.record(&RecordEvent::Message {
            head: *head,
            extras: extras.map(std::borrow::Cow::Borrowed),
            failure: None,
            body,
        });
        // The body is the last part of the event.
        BodyAt::new(self.writer.len() - body.len(), body.len())
    }

    /// Adds a member of a join that a client reports.
    fn join(&mut self, id: JoinId, index: u32, succeeded: bool) {
        // The join may be over: its last member has arrived, or a decisive failure.
        let Some(slot) = self.state.joins.find(&id) else {
            return;
        };
        // The broker can't tell which job the member is.
        let arrival = match succeeded {
            true => Arrival::Succeeded,
            false => Arrival::Failed(Vec::new()),
        };
        if self.state.arrive(slot, index, arrival) {
            match succeeded {
                true => self.record(&RecordEvent::Joined { join: id, index }),
                false => self.record(&RecordEvent::MemberFailed {
                    join: id,
                    index,
                    causes: Vec::new().into(),
                }),
            }
            self.follow_ends();
        }
    }

    fn pause(&mut self, queue: &str, paused: bool) {
        let name = self.state.names.intern(queue);
        let queue = self.state.queue_named(name);
        self.record(&RecordEvent::Paused {
            queue: name,
            paused,
        });
        self.state.pause(queue, paused);
    }
}

/// Properties of a replaced job that its replacement inherits.
struct LeftBehind {
    id: MessageId,
    member: Option<Member>,
    generation: u32,
    result_ttl_ms: Option<u64>,
    claim: Option<Key>,
}

impl LeftBehind {
    /// Passes the job's properties on to the message, if it takes the job's place. Returns the key that the job owned.
    fn pass_on(&mut self, message: &mut Message) -> Option<Key> {
        if message.id != self.id {
            return None;
        }
        // The same clients read the result.
        message.result_ttl_ms = self.result_ttl_ms;
        let member = self
            .member
            .filter(|_| !planted!("replace-loses-membership"));
        let extras = message.extras.as_deref_mut();
        match (extras, member) {
            (Some(extras), member) => extras.member = member,
            (None, Some(_)) => message.extras.get_or_insert_default().member = member,
            (None, None) => {}
        }
        if self.generation > 0 {
            message.extras.get_or_insert_default().generation = self.generation;
        }
        self.claim.take()
    }

    /// Makes a join that takes the job's place report where the job did.
    fn pass_on_places(&self, then: &mut [Member]) {
        if let Some(member) = self.member {
            let by_id = place_of_heir(self.id);
            let place = then.iter_mut().find(|place| Some(**place) == by_id);
            if let Some(place) = place {
                *place = member;
            }
        }
    }
}

/// Copies bytes out of a frame, whose memory they would otherwise keep alive. Bytes that are most of their frame may
/// share it.
fn copied(bytes: &mut Bytes) -> Bytes {
    const SHARED_FROM_BYTES: usize = 256 << 10;
    match bytes.len() {
        0..SHARED_FROM_BYTES => Bytes::copy_from_slice(bytes),
        _ => std::mem::take(bytes),
    }
}

fn copied_extras(extras: &mut Extras) {
    extras.key = extras.key.as_mut().map(copied);
    for (_, value) in &mut extras.headers {
        *value = copied(value);
    }
}

pub(crate) fn own_key(key: &mut Key) -> Key {
    match key {
        Key::Result(id) => Key::Result(*id),
        Key::Named(name) => Key::Named(copied(name)),
        Key::Scoped(scope, key) => Key::Scoped(*scope, copied(key)),
    }
}
