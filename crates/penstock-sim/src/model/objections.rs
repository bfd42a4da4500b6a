//! Objections to operations, which must or may be refused.

use std::collections::BTreeSet;

use penstock_message::{
    Condition, Conflict, Lease, MessageId, OnRunning, Op, Refusal, ScheduleStep, SessionId, Target,
    Tx,
};

use super::Model;
use super::item::{End, Item, State};

/// Whether an operation must be refused, as far as an outside observer can know.
pub(super) enum Objection {
    None,
    Perhaps(Refusal),
    Surely(Refusal),
}

/// Ids and leases that a transaction has named so far: each may be named once.
#[derive(Default)]
pub(super) struct Named {
    leases: BTreeSet<Lease>,
    ids: BTreeSet<MessageId>,
    /// Job whose place is taken by another.
    replaced: Option<MessageId>,
}

impl Model {
    pub(super) fn objection(&self, session: SessionId, op: &Op, named: &mut Named) -> Objection {
        match op {
            Op::Ack { lease, .. }
            | Op::Replace { lease, .. }
            | Op::Release { lease, .. }
            | Op::Move { lease, .. }
            | Op::Fail { lease, .. } => {
                let again = !named.leases.insert(*lease);
                if matches!(op, Op::Replace { .. }) {
                    named.replaced = Some(lease.message);
                }
                match self.holder(lease, session) {
                    Some((_, true)) if !again => Objection::None,
                    Some((_, false)) if !again => Objection::Perhaps(Refusal::LeaseLost),
                    _ => Objection::Surely(Refusal::LeaseLost),
                }
            }
            Op::Publish { message, .. } if !named.ids.insert(message.id) => {
                Objection::Surely(Refusal::AlreadyExists)
            }
            Op::Publish { message, .. } if named.replaced == Some(message.id) => Objection::None,
            Op::Publish {
                unless_key: Some(claim),
                ..
            } if claim.conflict == Conflict::Refuse => {
                let owner = Refusal::Claimed(MessageId([0; 16]));
                match self.key_exists(&claim.key) {
                    Some(true) => Objection::Surely(owner),
                    Some(false) => Objection::None,
                    None => Objection::Perhaps(owner),
                }
            }
            Op::Publish { message, .. } => self.id_objection(message.id),
            Op::Hold(hold) => {
                if self.joins.get(&hold.join).is_some_and(|join| !join.over) {
                    return Objection::Surely(Refusal::AlreadyExists);
                }
                let ids = hold.messages.iter().map(|(_, message)| message.id);
                let known = ids
                    .filter(|id| named.replaced != Some(*id))
                    .map(|id| self.id_objection(id));
                known
                    .into_iter()
                    .find(|objection| !matches!(objection, Objection::None))
                    .unwrap_or(Objection::None)
            }
            Op::Guard { key, condition } => {
                let holds = match condition {
                    Condition::Absent => self.key_exists(key).map(|exists| !exists),
                    Condition::Present => self.key_exists(key),
                    Condition::Is(body) => match self.value(key) {
                        Some(stored) if self.may_be_over(stored) => None,
                        stored => {
                            Some(stored.is_some_and(|stored| stored.body.as_ref() == Some(body)))
                        }
                    },
                };
                match holds {
                    Some(true) => Objection::None,
                    Some(false) => Objection::Surely(Refusal::GuardFailed),
                    None => Objection::Perhaps(Refusal::GuardFailed),
                }
            }
            Op::Join { join, index, .. } => match self.joins.get(join) {
                Some(join) if !join.over && *index >= join.count => {
                    Objection::Surely(Refusal::Invalid(String::new()))
                }
                _ => Objection::None,
            },
            Op::Cancel {
                target: Target::Job(id),
                running,
                ..
            } => {
                let runs = |item: &Item| matches!(item.state, State::Leased { .. });
                // A message that a failed group has blocked still exists; in the model it has ended.
                let may_wait = |item: &Item| match item.state {
                    State::Leased { .. } => false,
                    State::Ended(end) => end == End::JoinFailed,
                    _ => true,
                };
                let asks = *running != OnRunning::Leave;
                let has_group =
                    self.with_id(*id).next().is_none() && self.in_place_of(*id).is_some();
                match has_group || self.with_id(*id).any(may_wait) {
                    _ if asks && self.with_id(*id).any(runs) => Objection::None,
                    true => Objection::Perhaps(Refusal::NoSuchJob),
                    false => Objection::Surely(Refusal::NoSuchJob),
                }
            }
            Op::Schedule { schedule, step } if self.must_refuse(schedule, Some(step)) => {
                Objection::Surely(Refusal::Invalid(String::new()))
            }
            Op::Schedule {
                schedule,
                step: ScheduleStep::Run,
            } if self.may_refuse_run(schedule) => {
                Objection::Perhaps(Refusal::Invalid(String::new()))
            }
            Op::Unschedule { schedule } if self.must_refuse(schedule, None) => {
                Objection::Surely(Refusal::Invalid(String::new()))
            }
            Op::RetryFailed {
                target: Target::Job(id),
                ..
            } if self.with_id(*id).any(|item| self.key_is_surely_taken(item)) => {
                Objection::Surely(Refusal::NoSuchJob)
            }
            Op::RetryFailed {
                target: Target::Job(id),
                ..
            }
            | Op::DropFailed {
                target: Target::Job(id),
            } => {
                // A failed job may have been dropped, and its key may belong to another.
                let may_have_failed = |item: &Item| item.has_failed() || item.may_be_dead();
                match self.with_id(*id).any(may_have_failed) {
                    true => Objection::Perhaps(Refusal::NoSuchJob),
                    false => Objection::Surely(Refusal::NoSuchJob),
                }
            }
            _ => Objection::None,
        }
    }

    fn id_objection(&self, id: MessageId) -> Objection {
        let held = self
            .with_id(id)
            .filter(|item| !matches!(item.state, State::Ended(_)) || item.has_failed());
        // A failed job may have been dropped.
        let (sure, unsure): (Vec<&Item>, Vec<&Item>) =
            held.partition(|item| item.ending().is_none() && !item.has_failed());
        match (sure.is_empty(), unsure.is_empty()) {
            (false, _) => Objection::Surely(Refusal::AlreadyExists),
            (true, false) => Objection::Perhaps(Refusal::AlreadyExists),
            (true, true) => Objection::None,
        }
    }

    /// Objects to new work for a full queue, and to nothing else. Only the broker knows how many messages wait.
    pub(super) fn room_objection(&self, tx: &Tx, op: &Op) -> Objection {
        let Op::Publish { queues, .. } = op else {
            return Objection::None;
        };
        let may_be_full = |queue: &String| self.may_overflow(queue, tx.ops.len());
        match queues.iter().any(may_be_full) && !tx.ops.iter().any(Op::is_settlement) {
            true => Objection::Perhaps(Refusal::QueueFull(String::new())),
            false => Objection::None,
        }
    }

    /// Whether this many more messages may exceed the queue's limit.
    pub(super) fn may_overflow(&self, queue: &str, more: usize) -> bool {
        let Some(limits) = self.limits.get(queue) else {
            return false;
        };
        let live = self.live.iter().map(|index| &self.items[*index]);
        let here = live.filter(|item| item.queue == queue);
        let may_wait = here.filter(|item| !matches!(item.state, State::Ended(_)));
        !limits.allow((may_wait.count() + more) as u64, 0)
    }
}
