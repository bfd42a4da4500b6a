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
    ValueStatus, place_of_heir,
};

mod cancels;
mod claims;
mod failures;
mod growth;
mod item;
mod joins;
mod known;
mod leases;
mod objections;
mod schedules;
#[cfg(test)]
mod tests;
mod waits;
mod workflows;

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
