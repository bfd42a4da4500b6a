//! The duties of a broker, stated a second time and as simply as possible: no indexes, no records, no connections. The
//! model follows the real broker step by step, so it learns of the decisions and judges whether they are allowed.
//!
//! Some facts cannot be known from outside, such as a lease whose session has gone, or a message that was handed out
//! unseen before a crash. The model is then in doubt, and its next observation resolves the doubt.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use penstock_message::{
    Due, Hold, JoinId, JoinOutcome as Outcome, Key, Lease, Member, Message, MessageId, Op,
    Overflow, QueueLimits, Receipt, Refusal, ReleaseReason, ScheduleName, SessionId, Target, Tx,
    ValueStatus, WorkflowInfo, place_of_heir,
};

mod cancels;
mod claims;
mod growth;
mod item;
mod known;
mod leases;
mod objections;
mod schedules;
#[cfg(test)]
mod tests;
mod waits;

use cancels::Operation;
use item::{Attendance, JoinModel, Replaced, When};
pub use item::{End, Failed, Item, Moment, Run, State, Stored, Time};
use objections::{Named, Objection};
pub use schedules::{ScheduleModel, Schedules};

/// Description of a fault, or nothing if there is none.
pub type Verdict = Result<(), String>;

#[derive(Clone, Debug, Default)]
pub struct Model {
    pub items: Vec<Item>,
    /// Places of items that have not ended, and of some that have ended.
    pub live: Vec<usize>,
    by_id: BTreeMap<MessageId, Vec<usize>>,
    by_member: BTreeMap<(JoinId, u32), Vec<usize>>,
    values: BTreeMap<Key, Stored>,
    /// Results of jobs that were retried since the last quiet moment: they may still be on their way to a watcher.
    on_their_way: BTreeMap<Key, Stored>,
    /// Results that may be either of two. A bulk operation cancelled these jobs just as a failed group blocked them or
    /// was retried. The broker works in steps, so the cancellation may have come first or second.
    either: BTreeSet<Key>,
    /// Jobs that a person has retried, and jobs that waited for one, also if a group has taken their place since.
    retried: BTreeSet<MessageId>,
    /// Places of items that were blocked by a failed group when a bulk operation cancelled them, since the last quiet
    /// moment.
    ending_blocked: BTreeSet<usize>,
    /// Time of the last quiet moment. Values that had expired by then are gone.
    quiet_ms: u64,
    joins: BTreeMap<JoinId, JoinModel>,
    /// Joins by their places in other joins.
    by_place: BTreeMap<(JoinId, u32), JoinId>,
    /// Job whose place the current transaction assigns to another step.
    replaced: Option<Replaced>,
    /// Jobs whose places were taken: they were handed out, though the jobs that have their ids may not have been.
    were_replaced: BTreeSet<MessageId>,
    /// Places of the members that the current transaction adds to a group, by the ids that it gives them; `None`: they
    /// come too late.
    grown: BTreeMap<MessageId, Option<Member>>,
    /// Workflows that were opened.
    pub workflows: BTreeSet<MessageId>,
    /// Deadlines of workflows that have not passed, as far as anybody has seen.
    deadlines: BTreeMap<MessageId, When>,
    /// Workflows that were cancelled as a whole.
    cancelled: BTreeSet<MessageId>,
    sessions: BTreeMap<SessionId, Attendance>,
    pub paused: BTreeSet<String>,
    /// Queues paused since before the last quiet moment, so that no delivery from them is still on its way.
    still: BTreeSet<String>,
    limits: BTreeMap<String, QueueLimits>,
    pub schedules: Schedules,
    /// Jobs that schedules have created. A group may have taken over the id of one.
    scheduled: BTreeSet<MessageId>,
    /// Names of schedules that have been removed at least once.
    was_unscheduled: BTreeSet<ScheduleName>,
    places: u64,
    pub now: Time,
    /// Whether the wall clock was set while nobody knew the steady clock, so that steady times mean little.
    pub clock_is_doubtful: bool,
    /// Maximum milliseconds by which the broker's steady clock may then be ahead or behind.
    pub clock_is_off_by_ms: u64,
    /// Whether a broker of this run has dropped failed jobs, and groups with them.
    pub has_dropped_failed: bool,
    /// Whether steps are replayed after a crash: steps that no longer fit are skipped.
    pub lenient: bool,
    /// Moment at which the current transaction was decided.
    moment: Moment,
    /// Earliest time of the current end, if somebody may have observed it late.
    ended_at: Option<u64>,
    /// Cancellations by filter that had not finished at the last quiet moment.
    operations: Vec<Operation>,
    /// Every observed hand-out, with the work that it gave, whatever crashes have undone since.
    pub seen: BTreeMap<(Lease, SessionId), Run>,
}

impl Model {
    // --- time

    /// Notes that the broker has looked at its clocks.
    pub fn advance(&mut self, now: Time) {
        let looked = std::mem::replace(&mut self.now, now);
        let doubtful = self.clock_is_doubtful;
        let items = &mut self.items;
        self.live
            .retain(|index| !matches!(items[*index].state, State::Ended(_)));
        for index in &self.live {
            let item = &mut self.items[*index];
            item.due_reached |= item.due.is_none_or(|due| due.has_come(now));
            item.expiry_reached |= item
                .expires
                .is_some_and(|when| doubtful || when.has_come(now));
            if let State::Leased { lease, session, .. } = item.state
                && let Some(attendance) = self.sessions.get(&session)
                && attendance.is_over(now)
            {
                // A replayed story does not stop at every moment at which nothing happened.
                if item.crashes.0 == item.crashes.1 {
                    item.lost_at = attendance.ends_at().unwrap_or(now.steady);
                }
                item.set_adrift(vec![(lease, session)]);
            }
            item.note_unseen_end(looked, now);
        }
    }

    /// Notes a quiet moment: everything is written, synced and sent, so nothing on its way leaves a doubt. `goes_on`:
    /// an operation on many jobs has not finished, because the disk is full.
    pub fn quiet(&mut self, goes_on: bool) {
        let now = self.now.steady;
        self.still.clone_from(&self.paused);
        self.quiet_ms = now;
        if !goes_on {
            self.operations.clear();
            self.ending_blocked.clear();
        }
        self.on_their_way.clear();
        for join in self.joins.values_mut() {
            join.was_over = join.over;
        }
        for index in self.live.clone() {
            let item = &mut self.items[index];
            item.comes_back = None;
            item.started_claim = None;
            item.ran_at_purge &= goes_on;
            if let State::Leased { safe, .. } = &mut item.state {
                *safe = true;
            }
            if let (State::Waiting | State::Held(_), Some(end)) = (&item.state, item.ending())
                && item.unsure_until <= now
                && !item.end_is_unsure
                && !item.may_be_dead()
                && !self.clock_is_doubtful
                && !(goes_on && end == End::Purged)
            {
                self.ended_at = item.may_have_ended_at;
                self.end(index, end);
                self.ended_at = None;
            }
        }
    }

    // --- transactions

    pub fn decided(
        &mut self,
        number: u64,
        session: SessionId,
        tx: &Tx,
        receipt: &Receipt,
        moment: &Moment,
    ) -> Verdict {
        self.moment.clone_from(moment);
        let mut named = Named::default();
        let objection = |op| match self.objection(session, op, &mut named) {
            Objection::None => self.room_objection(tx, op),
            other => other,
        };
        let mut objections = tx.ops.iter().map(objection);
        match receipt {
            Receipt::Applied(applied) => {
                if let Some(index) =
                    objections.position(|objection| matches!(objection, Objection::Surely(_)))
                {
                    let op = &tx.ops[index];
                    self.fail(format!(
                        "applied, though operation {index} must be refused: {op:?}"
                    ))?;
                }
                let is_outcome = tx.ops.iter().any(Op::is_settlement);
                self.replaced = None;
                self.grown.clear();
                let mut comes_too_late = false;
                for (index, op) in tx.ops.iter().enumerate() {
                    let skipped = applied.skipped.contains(&(index as u32));
                    match op {
                        Op::Replace { lease, .. } => {
                            if !self.replace(session, lease) {
                                break;
                            }
                        }
                        Op::Publish { .. } | Op::Hold(_) | Op::Open(_)
                            if comes_too_late || skipped && self.lenient =>
                        {
                            if !skipped {
                                self.fail(format!(
                                    "operation {index} brings a job to a workflow that was cancelled: {op:?}"
                                ))?;
                            }
                        }
                        Op::Grow { job, member, outer } => {
                            self.grow(*job, *member, *outer, tx, &applied.skipped)?;
                        }
                        // Its group is over, or nobody can say.
                        Op::Publish { .. } | Op::Hold(_)
                            if skipped && self.grown.values().any(Option::is_none) => {}
                        Op::Publish {
                            queues,
                            message,
                            due,
                            unless_key,
                        } if self.grown.contains_key(&message.id) => {
                            let op = Op::Publish {
                                queues: queues.clone(),
                                message: self.as_member(message),
                                due: *due,
                                unless_key: unless_key.clone(),
                            };
                            let told = Told {
                                skipped,
                                owner: None,
                            };
                            self.apply(number, session, &op, told, is_outcome)?;
                        }
                        Op::Cancel {
                            target: Target::Job(id),
                            running,
                            ..
                        } => self.cancel(*id, applied.found, *running)?,
                        Op::Cancel {
                            target: Target::Filter(filter),
                            running,
                            ..
                        } => self.cancel_many(filter, *running, applied.operation)?,
                        _ => {
                            if let Op::Ack { lease, .. } = op {
                                let holder = self.holder(lease, session);
                                comes_too_late = holder
                                    .is_some_and(|(index, _)| self.is_of_cancelled_workflow(index));
                            }
                            let owners = applied.owners.iter();
                            let mut owners = owners.filter(|(at, _)| *at as usize == index);
                            let owner = owners.next().map(|(_, owner)| *owner);
                            let told = Told { skipped, owner };
                            self.apply(number, session, op, told, is_outcome)?;
                        }
                    }
                }
                Ok(())
            }
            Receipt::Refused { op, why } => {
                let objections: Vec<Objection> = objections.collect();
                let earlier = objections.iter().take(*op as usize);
                let is_first = earlier
                    .into_iter()
                    .all(|earlier| !matches!(earlier, Objection::Surely(_)));
                let is_right = match &objections[*op as usize] {
                    // The disk's reserves say how full it is; the stored messages do not.
                    Objection::None | Objection::Perhaps(_) if *why == Refusal::DiskFull => {
                        let is_new = matches!(
                            tx.ops[*op as usize],
                            Op::Publish { .. }
                                | Op::Hold(_)
                                | Op::Open(_)
                                | Op::Schedule { .. }
                                | Op::Unschedule { .. }
                        );
                        is_new && !tx.ops.iter().any(Op::is_settlement)
                    }
                    Objection::None => false,
                    // If nobody knows whether it has failed, nobody knows why it can't be retried.
                    Objection::Perhaps(Refusal::NoSuchJob)
                    | Objection::Surely(Refusal::NoSuchJob) => match (why, &tx.ops[*op as usize]) {
                        (
                            Refusal::Invalid(_),
                            Op::RetryFailed {
                                target: Target::Job(id),
                                ..
                            },
                        ) => self.key_may_be_taken(*id),
                        _ => matches!(
                            why,
                            Refusal::NoSuchJob | Refusal::TooLate(_) | Refusal::NotOffered(_)
                        ),
                    },
                    Objection::Perhaps(Refusal::Claimed(_))
                        if *why != Refusal::DiskFull && !matches!(why, Refusal::Claimed(_)) =>
                    {
                        matches!(why, Refusal::QueueFull(_))
                            && matches!(
                                self.room_objection(tx, &tx.ops[*op as usize]),
                                Objection::Perhaps(_)
                            )
                    }
                    Objection::Perhaps(Refusal::Claimed(_))
                    | Objection::Surely(Refusal::Claimed(_)) => {
                        match (why, &tx.ops[*op as usize]) {
                            (
                                Refusal::Claimed(owner),
                                Op::Publish {
                                    unless_key: Some(claim),
                                    ..
                                },
                            ) => self.may_own(*owner, &claim.key),
                            _ => false,
                        }
                    }
                    Objection::Perhaps(expected) | Objection::Surely(expected) => {
                        std::mem::discriminant(expected) == std::mem::discriminant(why)
                    }
                };
                match is_first && is_right {
                    true => Ok(()),
                    false => self.fail(format!(
                        "refused for operation {op} ({why:?}): {:?}{}",
                        tx.ops[*op as usize],
                        self.who_claims(why)
                    )),
                }
            }
            Receipt::Duplicate | Receipt::Unknown => Err(format!("{receipt:?} is no decision")),
        }
    }

    /// Notes that messages may have been dropped from a full queue to make room for a new one. Messages at the `spared`
    /// places were not: they could not be refused, so they are not dropped for each other.
    fn may_drop(&mut self, queue: &str, spared: &Range<usize>) {
        let drops = |limits: &QueueLimits| limits.overflow == Overflow::DropOldest;
        if !self.limits.get(queue).is_some_and(drops) || !self.may_overflow(queue, 0) {
            return;
        }
        // A dropped message may be the last member of a group, which releases others, which may be dropped in turn.
        let mut goes_on = true;
        while std::mem::take(&mut goes_on) {
            for index in self.live.clone() {
                if self.items[index].queue == queue
                    && self.may_wait(index)
                    && !spared.contains(&index)
                {
                    let item = &mut self.items[index];
                    goes_on |= !std::mem::replace(&mut item.purged, true);
                    item.end_is_unsure = true;
                }
            }
        }
    }

    /// Whether it may be in its queue, without a running attempt.
    fn may_wait(&self, index: usize) -> bool {
        match self.items[index].state {
            State::Waiting | State::Adrift { .. } => true,
            State::Held(_) => self.may_let_go(index),
            State::Leased { .. } | State::Ended(_) => false,
        }
    }

    fn apply(
        &mut self,
        number: u64,
        session: SessionId,
        op: &Op,
        told: Told,
        is_outcome: bool,
    ) -> Verdict {
        let Told { skipped, owner } = told;
        match op {
            Op::Ack { lease, .. } => {
                if let Some((index, _)) = self.holder(lease, session) {
                    self.items[index].settled = Some(*lease);
                    self.finish(index, End::Acked);
                }
            }
            Op::Release { lease, reason } => {
                let Some((index, _)) = self.holder(lease, session) else {
                    return Ok(());
                };
                self.items[index].tx = number;
                self.items[index].settled = Some(*lease);
                if self.ends_if_asked(index) {
                    return Ok(());
                }
                match reason {
                    ReleaseReason::Returned => self.items[index].wait_in_old_place(),
                    ReleaseReason::Crashed(reason) => {
                        let item = &mut self.items[index];
                        item.notes.push(reason.clone().into());
                        item.suspects = item.suspects.max(1);
                        self.crash_item(index);
                    }
                    ReleaseReason::Suspected(reason) => {
                        self.items[index].notes.push(reason.clone().into());
                        self.suspect_item(index);
                    }
                }
            }
            Op::Move {
                lease,
                queue,
                due,
                patch,
                ..
            } => {
                let Some((index, _)) = self.holder(lease, session) else {
                    return Ok(());
                };
                let (place, now) = (self.next_place(), self.now);
                if self.ends_if_asked(index) {
                    return Ok(());
                }
                let item = &mut self.items[index];
                item.tx = number;
                item.settled = Some(*lease);
                item.state = State::Waiting;
                item.ran_at_purge = false;
                item.place = place;
                item.in_order = due.is_none();
                item.due = due.map(|due| When::resolve(due, now));
                item.due_reached = item.due.is_none_or(|due| due.has_come(now));
                item.delayed_at_most = 0;
                item.may_have_run = false;
                item.notes.extend(patch.note.clone());
                item.message.attempt += u32::from(patch.next_attempt);
                if let Some(expires) = patch.expires_at {
                    item.expires = Some(When::resolve(expires, now));
                    item.expiry_reached = false;
                }
                if let Some(queue) = queue {
                    item.queue.clone_from(queue);
                }
                let queue = item.queue.clone();
                self.may_drop(&queue, &(index..index + 1));
            }
            Op::Publish {
                queues,
                message,
                due,
                unless_key,
            } => {
                match unless_key {
                    Some(claim) => self.claim_is_right(claim, skipped, owner)?,
                    None if skipped => self.fail(format!("{} was skipped", message.id))?,
                    None => {}
                }
                if !skipped {
                    let claim = unless_key.as_deref();
                    let predecessor =
                        claim.and_then(|claim| self.supersede(number, claim, message.id));
                    let first = self.items.len();
                    for queue in queues {
                        self.publish(number, queue, message, *due, State::Waiting);
                        if let Some(claim) = claim {
                            self.enter_claim(number, claim, predecessor);
                        }
                    }
                    let spared = match is_outcome {
                        true => first..self.items.len(),
                        false => 0..0,
                    };
                    for queue in queues {
                        self.may_drop(queue, &spared);
                    }
                }
            }
            Op::Put {
                key, value, ttl_ms, ..
            } => {
                if let (Key::Result(_), Some(before)) = (key, self.value(key)) {
                    self.fail(format!(
                        "{key:?} has a second result; the first was {before:?}"
                    ))?;
                }
                let stored = Stored {
                    status: value.status,
                    body: Some(value.body.clone()),
                    until: ttl_ms.map(|ttl_ms| self.now.steady + ttl_ms),
                    late_ms: 0,
                    tx: Some(number),
                };
                self.values.insert(key.clone(), stored);
                if let Key::Result(id) = key {
                    for copy in self.by_id.get(id).into_iter().flatten() {
                        self.items[*copy].has_result = true;
                    }
                }
            }
            Op::Delete { key } => {
                self.values.remove(key);
                // A retried failed job reclaims its key, whichever job has had the key since.
                let has_claimed = |item: &&mut Item| item.claim.as_ref() == Some(key);
                for item in self.items.iter_mut().filter(has_claimed) {
                    if item.may_be_dead() {
                        item.claim_is_unsure = true;
                    } else if !item.has_failed() {
                        item.claim = None;
                    }
                }
            }
            Op::Guard { .. } => {}
            Op::Hold(Hold {
                join,
                count,
                messages,
                policy,
                then,
                result_ttl_ms,
                ..
            }) => {
                let (count, policy) = (*count, *policy);
                let mut then = then.clone();
                if let Some(Replaced {
                    id,
                    member: Some(member),
                    ..
                }) = &self.replaced
                {
                    let place = place_of_heir(*id);
                    let heir = then.iter_mut().find(|then| Some(**then) == place);
                    heir.into_iter().for_each(|heir| *heir = *member);
                }
                for place in &mut then {
                    let id = MessageId::member(place.join, place.index);
                    *place = self.grown.get(&id).copied().flatten().unwrap_or(*place);
                }
                for Member { join: outer, index } in &then {
                    self.by_place.insert((*outer, *index), *join);
                }
                let id = then
                    .first()
                    .map_or(*join, |place| MessageId::member(place.join, place.index));
                let joined = JoinModel {
                    count,
                    policy,
                    then,
                    outcome: result_ttl_ms.map(|ttl_ms| (Key::Result(id), ttl_ms)),
                    ..JoinModel::default()
                };
                self.joins.insert(*join, joined);
                for (queue, message) in messages {
                    let message = self.as_member(message);
                    self.publish(number, queue, &message, None, State::Held(*join));
                }
                if count == 0 {
                    self.end_join(*join, false);
                }
            }
            Op::Open(open) => {
                let is_new = self.workflows.insert(open.workflow);
                if let Some(deadline) = open.deadline.filter(|_| is_new) {
                    let when = When::resolve(deadline, self.now);
                    self.deadlines.insert(open.workflow, when);
                }
            }
            Op::Join {
                join,
                index,
                succeeded,
            } => self.arrive(*join, *index, *succeeded),
            Op::Purge { queue } => {
                self.another_order();
                for index in self.live.clone() {
                    if self.items[index].queue != *queue {
                        continue;
                    }
                    self.items[index].ran_at_purge |=
                        matches!(self.items[index].state, State::Leased { .. });
                    if self.may_wait(index) {
                        let now = self.now;
                        let item = &mut self.items[index];
                        item.purged = true;
                        item.end_is_unsure = item.expiry_reached
                            || item.may_be_superseded
                            || item.is_unsure(now)
                            || matches!(item.state, State::Held(_));
                    }
                }
            }
            Op::Pause { queue } => {
                self.paused.insert(queue.clone());
            }
            Op::Resume { queue } => {
                self.paused.remove(queue);
                self.still.remove(queue);
            }
            Op::Limit { queue, limits } => {
                self.another_order();
                self.limits.insert(queue.clone(), *limits);
            }
            Op::Fail {
                lease, value, note, ..
            } => {
                let Some((index, _)) = self.holder(lease, session) else {
                    return Ok(());
                };
                if self.ends_if_asked(index) {
                    return Ok(());
                }
                self.items[index].notes.push(note.clone());
                self.items[index].settled = Some(*lease);
                self.finish(index, End::Failed);
                self.saw_failure(index);
                let item = &self.items[index];
                if let (Some(body), Some(ttl_ms)) = (value, item.message.result_ttl_ms) {
                    let stored = Stored {
                        status: ValueStatus::Failed,
                        body: Some(body.clone()),
                        until: Some(self.now.steady + ttl_ms),
                        late_ms: 0,
                        tx: Some(number),
                    };
                    self.values.insert(Key::Result(lease.message), stored);
                }
            }
            Op::Schedule { schedule, step } => {
                return self.change_schedule(number, schedule, step, owner);
            }
            Op::Unschedule { schedule } => self.unschedule(schedule),
            Op::RetryFailed {
                target: Target::Job(id),
                queue,
            } => self.retry(number, *id, queue.as_deref()),
            Op::DropFailed {
                target: Target::Job(id),
            } => {
                if let Some(index) = self.failed_copy(*id) {
                    self.items[index].state = State::Ended(End::Dropped);
                }
            }
            Op::Cancel { .. }
            | Op::Grow { .. }
            | Op::Replace { .. }
            | Op::RetryFailed { .. }
            | Op::DropFailed { .. }
            | Op::Seal { .. }
            | Op::Unnamed => {
                return self.fail(format!("the model does not know {op:?}"));
            }
        }
        Ok(())
    }

    fn publish(&mut self, tx: u64, queue: &str, message: &Message, due: Option<Due>, state: State) {
        let now = self.now;
        let in_order = due.is_none() && state == State::Waiting;
        let due = due.map(|due| When::resolve(due, now));
        let mut message = message.clone();
        let (mut claim, mut claim_is_unsure) = (None, false);
        let heir = self.replaced.as_mut();
        let heir = heir.filter(|replaced| replaced.id == message.id);
        let is_heir = heir.is_some();
        if let Some(replaced) = heir {
            claim = replaced.claim.take();
            claim_is_unsure = replaced.claim_is_unsure;
            message.result_ttl_ms = replaced.result_ttl_ms;
            let extras = message.extras.get_or_insert_default();
            extras.member = replaced.member;
            extras.generation = replaced.generation;
        }
        let message = &message;
        let item = Item {
            queue: queue.to_string(),
            in_order,
            due,
            due_reached: due.is_none_or(|due| due.has_come(now)),
            delayed_at_most: 0,
            expires: message.expires_at.map(|due| When::resolve(due, self.now)),
            crashes: (message.crashes, message.crashes),
            lost_at: 0,
            suspects: suspects(message),
            leases: Vec::new(),
            comes_back: None,
            settled: None,
            may_have_run: false,
            has_result: false,
            expiry_reached: message
                .expires_at
                .is_some_and(|due| When::resolve(due, now).has_come(now)),
            purged: false,
            end_is_unsure: false,
            ran_at_purge: false,
            may_have_ended_at: None,
            asked: None,
            cancelled: None,
            unsure_until: 0,
            place: self.next_place(),
            notes: message.notes.clone(),
            message: message.clone(),
            held_by: match state {
                State::Held(join) => Some(join),
                _ => None,
            },
            state,
            claim,
            until_start: false,
            started_claim: None,
            lacks_key: false,
            latest: None,
            may_be_superseded: false,
            failure: None,
            claim_is_unsure,
            generation: (message.extras.as_ref()).map_or(0, |extras| extras.generation),
            tx,
        };
        let is_late = !is_heir
            && item
                .workflow()
                .is_some_and(|id| self.cancelled.contains(&id));
        if let Some(Member { join, index }) = item.member() {
            let places = self.by_member.entry((join, index)).or_default();
            places.push(self.items.len());
        }
        self.by_id
            .entry(message.id)
            .or_default()
            .push(self.items.len());
        self.live.push(self.items.len());
        self.items.push(item);
        if is_late && let Some(item) = self.items.last_mut() {
            // This has no effect if the broker had forgotten the workflow.
            item.purged = true;
            item.end_is_unsure = true;
        }
    }

    /// Ends a job whose place another step takes. Returns false, and does nothing else, if the job was cancelled.
    fn replace(&mut self, session: SessionId, lease: &Lease) -> bool {
        let live = |index: &usize| !matches!(self.items[*index].state, State::Ended(_));
        let holder = self.holder(lease, session).map(|(index, _)| index);
        let unsure = || {
            let copies = self.by_id.get(&lease.message);
            copies.into_iter().flatten().copied().find(live)
        };
        let Some(index) = holder.or_else(unsure) else {
            return true;
        };
        if self.ends_if_asked(index) {
            return false;
        }
        if self.is_of_cancelled_workflow(index) {
            self.end(index, End::Purged);
            return false;
        }
        let held_by = self.items[index].held_by;
        if held_by.is_some_and(|join| self.was_retried(join)) {
            self.retried.insert(lease.message);
        }
        let item = &mut self.items[index];
        item.state = State::Ended(End::Replaced);
        self.replaced = Some(Replaced {
            id: lease.message,
            member: item.member(),
            result_ttl_ms: item.message.result_ttl_ms,
            claim: item.claim.take().filter(|_| !item.lacks_key),
            claim_is_unsure: item.claim_is_unsure,
            generation: item.generation,
        });
        self.were_replaced.insert(lease.message);
        // From here on, the id belongs to another job.
        if let Some(copies) = self.by_id.get_mut(&lease.message) {
            copies.retain(|copy| *copy != index);
        }
        true
    }

    /// Whether nobody has observed the end of the join. (An item that it holds may have ended in another way before.)
    fn is_open(&self, join: JoinId) -> bool {
        self.joins.get(&join).is_some_and(|join| !join.over)
    }

    /// Whether it is in its queue or held, and certainly has not ended. (It may have been handed out, though.)
    fn surely_waits(&self, index: usize) -> bool {
        let item = &self.items[index];
        let is_there = match item.state {
            State::Waiting => !item.is_unsure(self.now) && !item.may_be_dead(),
            State::Held(join) => {
                !self.may_be_released(join) && !self.may_have_failed(join) && self.is_open(join)
            }
            _ => false,
        };
        is_there && item.ending().is_none() && !self.clock_is_doubtful
    }

    /// Returns some running messages.
    pub fn running(&self, most: usize) -> Vec<MessageId> {
        let live = self.live.iter().map(|index| &self.items[*index]);
        let running = live.filter(|item| matches!(item.state, State::Leased { .. }));
        running.map(|item| item.message.id).take(most).collect()
    }

    /// Finds a copy that has failed, or must have failed if the current operation was applied.
    fn failed_copy(&mut self, id: MessageId) -> Option<usize> {
        let copies = self.by_id.get(&id)?.clone();
        let failed = copies.iter().find(|index| self.items[**index].has_failed());
        let unseen = || {
            copies
                .iter()
                .find(|index| self.items[**index].may_be_dead())
        };
        let index = *failed.or_else(unseen)?;
        if !self.items[index].has_failed() {
            self.bury(index);
        }
        Some(index)
    }

    /// Returns a failed message to the end of its queue, with its attempts and notes.
    fn retry(&mut self, number: u64, id: MessageId, queue: Option<&str>) {
        let Some(index) = self.failed_copy(id) else {
            return;
        };
        if let Some(stored) = self.values.remove(&Key::Result(id)) {
            self.on_their_way.insert(Key::Result(id), stored);
        }
        self.retried.insert(id);
        let place = self.next_place();
        let item = &mut self.items[index];
        item.state = State::Waiting;
        item.tx = number;
        item.place = place;
        item.in_order = true;
        item.lacks_key = false;
        if item.until_start {
            item.claim = None;
        }
        item.due = None;
        item.due_reached = true;
        item.delayed_at_most = 0;
        item.expires = None;
        item.expiry_reached = false;
        item.purged = false;
        item.end_is_unsure = false;
        item.ran_at_purge = false;
        item.may_have_ended_at = None;
        item.unsure_until = 0;
        item.crashes = (0, 0);
        item.failure = None;
        item.suspects = 0;
        item.asked = None;
        item.cancelled = None;
        item.may_have_run = false;
        item.message.attempt += 1;
        item.generation += 1;
        if let Some(queue) = queue {
            queue.clone_into(&mut item.queue);
        }
        if !self.live.contains(&index) {
            self.live.push(index);
        }
        let queue = self.items[index].queue.clone();
        self.may_drop(&queue, &(index..index + 1));
        if let Some(place) = self.items[index].member() {
            self.revive_member(place);
        }
    }

    /// Makes a join wait again for a member that had failed, and restores everything that the join had blocked.
    fn revive_member(&mut self, place: Member) {
        let id = place.join;
        let may_have_gone_on = self.may_be_released(id);
        let may_have_failed = self.may_have_failed(id);
        let Some(join) = self.joins.get_mut(&id) else {
            return;
        };
        let has_gone_on = join.over && !join.has_failed;
        if has_gone_on || !join.arrived.remove(&place.index) {
            return;
        }
        join.may_have_gone_on = may_have_gone_on;
        join.may_have_failed_before |= may_have_failed;
        join.failures -= 1;
        if !join.over || join.failures > join.policy.max_failures() {
            return;
        }
        join.over = false;
        join.was_over = false;
        join.has_failed = false;
        join.was_reopened = true;
        let (then, outcome) = (join.then.clone(), join.outcome.clone());
        if let Some((key, _)) = outcome
            && let Some(stored) = self.values.remove(&key)
        {
            self.on_their_way.insert(key, stored);
        }
        for place in then {
            self.revive_member(place);
        }
        self.may_be_cancelled_anew(id);
        for index in 0..self.items.len() {
            let item = &mut self.items[index];
            let outer = item.member();
            if item.held_by != Some(id) {
                continue;
            }
            if item.state == State::Ended(End::JoinFailed) {
                item.state = State::Held(id);
                let key = Key::Result(item.message.id);
                if let Some(stored) = self.values.remove(&key) {
                    self.on_their_way.insert(key, stored);
                }
                if !self.live.contains(&index) {
                    self.live.push(index);
                }
            } else if item.state != State::Held(id) {
                continue;
            }
            // A message that may have ended before it was blocked has reported to its own join as well. If it was blocked,
            // that join waits again; if not, the next look at the join shows it.
            if let Some(outer) = outer {
                self.revive_member(outer);
            }
        }
    }

    fn arrive(&mut self, id: JoinId, index: u32, succeeded: bool) {
        // All members report to a failed join, because a person may retry the members that failed it.
        let join = self.joins.get_mut(&id);
        let Some(join) = join.filter(|join| !join.over || join.has_failed) else {
            return;
        };
        if !join.arrived.insert(index) {
            return;
        }
        join.failures += u32::from(!succeeded);
        if join.over {
            return;
        }
        let failed = join.failures > join.policy.max_failures();
        if failed || join.arrived.len() == join.count as usize {
            self.end_join(id, failed);
        }
    }

    /// Releases or blocks the messages that a join holds, and notifies the joins of which it is a member.
    fn end_join(&mut self, id: JoinId, failed: bool) {
        let Some(join) = self.joins.get_mut(&id) else {
            return;
        };
        join.over = true;
        join.has_failed = failed;
        let (then, outcome) = (join.then.clone(), join.outcome.clone());
        // The broker may have dropped the group, and ended what it held, before the retry that reopened it here.
        let may_be_gone = join.was_reopened && self.has_dropped_failed;
        let before = self.ended_at;
        if failed {
            // Another end, which nobody observed, may have come first.
            self.ended_at = before.into_iter().chain(self.may_be_over_since(id)).min();
        }
        for index in self.live.clone() {
            if self.items[index].state != State::Held(id) {
                continue;
            }
            let end = match (failed, self.items[index].when()) {
                (true, Outcome::Succeeded) => End::JoinFailed,
                (false, Outcome::Failed) => End::NotNeeded,
                _ => {
                    self.items[index].state = State::Waiting;
                    self.items[index].purged |= may_be_gone;
                    self.items[index].end_is_unsure |= may_be_gone;
                    continue;
                }
            };
            match self.items[index].ending() {
                None => {
                    // A blocked message frees its key, and does not reclaim it when it is retried.
                    self.items[index].claim = None;
                    self.end(index, end);
                }
                Some(_) => {
                    // It may have ended before that; or it was blocked and so does not end in another way.
                    self.items[index].purged = true;
                    self.items[index].end_is_unsure = true;
                    self.items[index].claim_is_unsure = true;
                }
            }
        }
        if let Some((key, ttl_ms)) = outcome {
            let stored = Stored {
                status: match failed {
                    true => ValueStatus::Upstream,
                    false => ValueStatus::Gathered,
                },
                body: None,
                until: Some(self.now.steady + ttl_ms),
                late_ms: self.late_ms(),
                tx: None,
            };
            self.values.insert(key, stored);
        }
        for Member { join, index } in then {
            self.arrive(join, index, !failed);
        }
        self.ended_at = before;
    }

    /// Returns the earliest time at which a member of the join may have ended unobserved, if one may have.
    fn may_be_over_since(&self, id: JoinId) -> Option<u64> {
        let join = self.joins.get(&id)?;
        let missing = (0..join.count).filter(|index| !join.arrived.contains(index));
        let ended = missing.filter_map(|index| {
            let inner = self.by_place.get(&(id, index));
            let inner = inner.and_then(|inner| self.may_be_over_since(*inner));
            let places = self.by_member.get(&(id, index)).into_iter().flatten();
            let ended = places.filter_map(|place| {
                let item = &self.items[*place];
                let held = || self.may_be_over_since(item.held_by?);
                item.may_have_ended_at.or_else(held)
            });
            ended.chain(inner).min()
        });
        ended.min()
    }

    /// Returns the milliseconds by which the current end may have been observed late.
    fn late_ms(&self) -> u64 {
        let now = self.now.steady;
        now - self.ended_at.map_or(now, |at| at.min(now))
    }

    /// Ends a message without a value of its own: the broker stores one for clients that ask.
    fn end(&mut self, index: usize, end: End) {
        let status = match end {
            End::Expired => ValueStatus::Expired,
            End::JoinFailed => ValueStatus::Upstream,
            _ => ValueStatus::Cancelled,
        };
        self.store_end(index, status);
        self.finish(index, end);
    }

    /// Ends an item in any way, and reports the end to the join of which it is a member.
    fn finish(&mut self, index: usize, end: End) {
        self.items[index].state = State::Ended(end);
        if let Some(Member { join, index }) = self.items[index].member() {
            self.arrive(join, index, end == End::Acked);
        }
    }

    /// Whether the unobserved members of a join may all have ended, now or before a retry.
    fn may_be_released(&self, id: JoinId) -> bool {
        let Some(join) = self.joins.get(&id).filter(|join| !join.over) else {
            return false;
        };
        if join.may_have_gone_on {
            return true;
        }
        // A success is always observed, so these members can only have failed.
        let mut missing = (0..join.count).filter(|index| !join.arrived.contains(index));
        let failures = u64::from(join.failures) + missing.clone().count() as u64;
        failures <= u64::from(join.policy.max_failures())
            && missing.all(|index| self.may_have_ended(id, index))
    }

    /// Whether the join that holds this item may have released it: for a failure, if the item waits for one.
    fn may_let_go(&self, index: usize) -> bool {
        let item = &self.items[index];
        match (&item.state, item.when()) {
            (State::Held(join), Outcome::Succeeded) => self.may_be_released(*join),
            (State::Held(join), Outcome::Failed) => self.may_have_failed(*join),
            (State::Held(join), Outcome::Ended) => {
                self.may_be_released(*join) || self.may_have_failed(*join)
            }
            _ => false,
        }
    }

    /// Notes that an item was observed to be released. Which members have failed the join is observed later.
    fn was_let_go(&mut self, index: usize) {
        if let State::Held(join) = self.items[index].state {
            match self.items[index].when() {
                Outcome::Succeeded => self.was_released(join),
                _ => self.items[index].state = State::Waiting,
            }
        }
    }

    /// Whether a member of the join may have failed, so that the join blocks the messages that it holds.
    fn may_have_failed(&self, id: JoinId) -> bool {
        let Some(join) = self.joins.get(&id).filter(|join| !join.over) else {
            return false;
        };
        if join.may_have_failed_before {
            return true;
        }
        let missing = (0..join.count).filter(|index| !join.arrived.contains(index));
        let ended = missing.filter(|index| self.may_have_ended(id, *index));
        let failures = u64::from(join.failures) + ended.count() as u64;
        failures > u64::from(join.policy.max_failures())
    }

    fn may_have_ended(&self, join: JoinId, index: u32) -> bool {
        let inner = self.by_place.get(&(join, index));
        let may_have_ended = |id: &JoinId| {
            let was_dropped = self.joins.get(id).is_some_and(|join| join.was_dropped);
            was_dropped || self.may_have_failed(*id)
        };
        if inner.is_some_and(may_have_ended) {
            return true;
        }
        let places = self.by_member.get(&(join, index));
        let mut items = places
            .into_iter()
            .flatten()
            .map(|place| &self.items[*place]);
        items.any(|item| {
            item.ending().is_some()
                || item.may_be_dead()
                || self.may_have_died_when_released(item)
                || matches!(item.state, State::Held(other) if self.may_have_failed(other))
        })
    }

    /// Whether its group may have released it, and its workers may have died, all unobserved.
    fn may_have_died_when_released(&self, item: &Item) -> bool {
        match item.state {
            State::Held(join) => {
                let may_be_released = match item.when() {
                    Outcome::Succeeded => self.may_be_released(join),
                    _ => self.may_be_released(join) || self.may_have_failed(join),
                };
                item.may_have_died_unseen() && may_be_released
            }
            _ => false,
        }
    }

    /// Compares, at a quiet moment, the counts of all workflows with their jobs.
    pub fn workflows_are_right(
        &self,
        seen: impl Fn(&MessageId) -> Option<WorkflowInfo>,
    ) -> Verdict {
        let mut jobs: BTreeMap<MessageId, Vec<&Item>> = BTreeMap::new();
        for item in &self.items {
            let extras = item.message.extras.as_ref();
            if let Some(workflow) = extras.and_then(|extras| extras.workflow)
                && item.state != State::Ended(End::Replaced)
            {
                jobs.entry(workflow).or_default().push(item);
            }
        }
        for workflow in &self.workflows {
            let jobs = jobs.get(workflow).map_or(&[][..], Vec::as_slice);
            Self::workflow_is_right(*workflow, jobs, seen(workflow).as_ref())?;
        }
        Ok(())
    }

    /// Compares the counts of a workflow with its jobs. The broker lists a workflow at least until its first end.
    fn workflow_is_right(id: MessageId, jobs: &[&Item], seen: Option<&WorkflowInfo>) -> Verdict {
        let Some(WorkflowInfo { jobs: counts, .. }) = seen else {
            let goes_on = |item: &&&Item| match item.state {
                State::Leased { .. } => true,
                State::Waiting => item.ending().is_none() && !item.may_be_dead(),
                _ => false,
            };
            // A workflow that has ended and was forgotten may have resumed because a person retried a job.
            let was_retried = jobs.iter().any(|item| item.generation > 0);
            return match jobs.iter().find(goes_on).filter(|_| !was_retried) {
                Some(item) => Err(format!(
                    "workflow {id} is not listed, and {} has not ended",
                    item.message.id
                )),
                None => Ok(()),
            };
        };
        let ended = counts.succeeded + counts.failed + counts.cancelled;
        let counted = counts.waiting + counts.running + counts.blocked + ended;
        // A job that was not needed is not counted, and it may have ended in another way before.
        let waits_for_failure = |item: &&&Item| item.when() == Outcome::Failed;
        let unsure = jobs.iter().filter(waits_for_failure).count() as u64;
        let all = jobs.len() as u64;
        if counted > all || counted + unsure < all {
            return Err(format!(
                "workflow {id} has {} jobs, and counts {counts:?}",
                jobs.len()
            ));
        }
        let succeeded = jobs
            .iter()
            .filter(|item| item.state == State::Ended(End::Acked));
        match succeeded.count() as u64 {
            succeeded if succeeded == counts.succeeded => Ok(()),
            succeeded => Err(format!(
                "{succeeded} jobs of workflow {id} have succeeded, and it counts {counts:?}"
            )),
        }
    }

    /// Returns the joins whose end nobody has observed.
    pub fn open_joins(&self) -> Vec<JoinId> {
        let open = self.joins.iter().filter(|(_, join)| !join.over);
        open.map(|(id, _)| *id).collect()
    }

    /// Compares, at a quiet moment, the members of the join that have reported, and whether it has failed. Every
    /// certain end must be among them, and no impossible one.
    pub fn saw_join(&mut self, id: JoinId, seen: Option<&(Vec<u32>, bool)>) -> Verdict {
        let Some(join) = self.joins.get(&id).filter(|join| !join.over) else {
            return Ok(());
        };
        let (arrived, count) = (join.arrived.clone(), join.count);
        let was_reopened = join.was_reopened;
        let Some((seen, has_failed)) = seen else {
            if self.may_be_released(id) {
                self.was_released(id);
            } else if self.may_have_failed(id) || was_reopened {
                // The broker may have dropped the group before the retry.
                self.was_dropped(id);
            } else {
                self.fail(format!(
                    "group {id} is over, and only {arrived:?} of its {count} members have ended"
                ))?;
            }
            return Ok(());
        };
        if let Some(join) = self.joins.get_mut(&id) {
            join.may_have_gone_on = false;
        }
        if let Some(unreported) = arrived.iter().find(|index| !seen.contains(index)) {
            self.fail(format!(
                "member {unreported} of group {id} has ended, and the group has not heard of it"
            ))?;
        }
        if seen.len() == count as usize && !has_failed {
            self.fail(format!("group {id} has all its members, and is not over"))?;
        }
        for index in seen.iter().filter(|index| !arrived.contains(index)) {
            if !self.may_have_ended(id, *index) {
                self.fail(format!(
                    "group {id} has heard of member {index}, which has not ended"
                ))?;
            }
            // Its end was not observed, so it has not succeeded.
            self.ended_at = self.may_be_over_since(id);
            self.arrive(id, *index, false);
            self.ended_at = None;
        }
        let is_over = self.joins.get(&id).is_some_and(|join| join.over);
        match *has_failed == is_over {
            true => Ok(()),
            false => self.fail(format!("group {id} has failed: {has_failed}")),
        }
    }

    /// Drops a join that may have failed: it no longer exists, and its messages have ended or will be reported as
    /// ended.
    fn was_dropped(&mut self, id: JoinId) {
        if let Some(join) = self.joins.get_mut(&id) {
            join.over = true;
            join.was_dropped = true;
        }
        for index in self.live.clone() {
            let item = &mut self.items[index];
            if item.state == State::Held(id) {
                item.purged = true;
                item.end_is_unsure = true;
                if item.when() != Outcome::Succeeded {
                    item.state = State::Waiting;
                }
            }
        }
    }

    /// Releases a join: nobody observed the end of its last member, but its held messages have appeared.
    fn was_released(&mut self, id: JoinId) {
        self.ended_at = self.may_be_over_since(id);
        self.end_join(id, false);
        self.ended_at = None;
    }

    fn store_end(&mut self, index: usize, status: ValueStatus) {
        let item = &self.items[index];
        let Some(ttl_ms) = item.message.result_ttl_ms else {
            return;
        };
        let until = Some(self.now.steady + ttl_ms);
        let stored = Stored {
            status,
            body: None,
            until,
            late_ms: self.late_ms(),
            tx: None,
        };
        self.values.insert(Key::Result(item.message.id), stored);
    }

    fn crash_item(&mut self, index: usize) {
        let (place, now) = (self.next_place(), self.now);
        let item = &mut self.items[index];
        item.crashes = (item.crashes.0 + 1, item.crashes.1 + 1);
        item.wait_in_old_place();
        item.is_delayed_by_crash(place, now);
        if item.crashes.0 >= item.message.max_deliveries {
            self.bury(index);
            self.saw_failure(index);
        } else if item.crashes.1 >= item.message.max_deliveries {
            item.state = State::Adrift { maybe: Vec::new() };
        }
    }

    /// Notes that a message has just failed.
    fn saw_failure(&mut self, index: usize) {
        let place = self.next_place();
        let steady_ms = self.now.steady;
        self.items[index].failure = Some(Failed { place, steady_ms });
    }

    /// Notes that this item or another one has killed the worker that ran both.
    fn suspect_item(&mut self, index: usize) {
        let item = &mut self.items[index];
        item.suspects += 1;
        item.wait_in_old_place();
        if item.suspects >= 3 || item.message.max_deliveries == 1 {
            self.bury(index);
        }
    }

    /// Fails a message whose workers have died too often.
    fn bury(&mut self, index: usize) {
        self.store_end(index, ValueStatus::Crashed);
        self.finish(index, End::Crashed);
    }

    /// Notes that the broker lists this message among the failed jobs, which the model may not have known.
    pub fn has_failed(&mut self, id: MessageId) -> Verdict {
        let copies = self.by_id.get(&id).cloned().unwrap_or_default();
        let is_known = copies.iter().any(|index| self.items[*index].has_failed());
        let died = copies.iter().copied().filter(|index| {
            let item = &self.items[*index];
            item.may_be_dead() || self.may_have_died_when_released(item)
        });
        // Of several copies, the one that is known to have been handed out.
        let died = died.max_by_key(|index| self.items[*index].leases.len());
        match died {
            Some(index) => {
                self.was_let_go(index);
                self.ended_at = self.items[index].may_have_ended_at;
                self.bury(index);
                self.ended_at = None;
                Ok(())
            }
            None if is_known => Ok(()),
            None => {
                let items: Vec<&Item> = self.with_id(id).collect();
                self.fail(format!("{id} has failed, and nothing says so: {items:?}"))
            }
        }
    }

    fn next_place(&mut self) -> u64 {
        self.places += 1;
        self.places
    }

    fn fail(&self, what: String) -> Verdict {
        if self.lenient { Ok(()) } else { Err(what) }
    }
}

/// Outcome of one operation in a receipt.
#[derive(Clone, Copy)]
struct Told {
    skipped: bool,
    /// Job that owns the key of its claim.
    owner: Option<MessageId>,
}

/// Returns how often the message was a suspect, by its own count.
fn suspects(message: &Message) -> u8 {
    message.extras.as_ref().map_or(0, |extras| extras.suspects)
}
