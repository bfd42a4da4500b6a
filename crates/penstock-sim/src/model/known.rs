//! Questions to the model, and the values that clients may see.

use bytes::Bytes;
use penstock_message::{
    InputValue, InputValues, JoinId, JoinOutcome as Outcome, Key, MessageId, SessionId, ValueStatus,
};

use super::item::{End, Item, JoinModel, Run, State, Stored, Time};
use super::{Model, Verdict};
use crate::work::{MADE_BYTES, made_of};

impl Model {
    /// Whether the session may be forgotten: a broker remembers one for ten minutes.
    pub fn may_be_forgotten(&self, session: &SessionId, now: Time) -> bool {
        let attendance = self.sessions.get(session);
        let away_since = attendance.and_then(|attendance| attendance.away_since);
        self.clock_is_doubtful || away_since.is_some_and(|since| now.steady >= since + 600_000)
    }

    pub fn joins_are_over(&self) -> bool {
        self.joins.values().all(|join| join.over)
    }

    pub fn with_id(&self, id: MessageId) -> impl Iterator<Item = &Item> {
        self.by_id
            .get(&id)
            .into_iter()
            .flatten()
            .map(|index| &self.items[*index])
    }

    /// Returns the value that a key has, or may have. Its expiry is recorded nowhere, so a broker whose clock was set
    /// back over a crash has it again. So values that may have expired are not forgotten here.
    pub fn value(&self, key: &Key) -> Option<&Stored> {
        let stored = self.values.get(key)?;
        (self.is_kept_longer(key) || !self.is_over(stored)).then_some(stored)
    }

    /// Whether this value may outlive its TTL, for a join or because the job is still blocked.
    fn is_kept_longer(&self, key: &Key) -> bool {
        let is_blocked = |item: &Item| item.state == State::Ended(End::JoinFailed);
        match key {
            Key::Result(id) => {
                self.joins.contains_key(&id.join_of()) || self.with_id(*id).any(is_blocked)
            }
            Key::Named(_) | Key::Scoped(..) => false,
        }
    }

    fn is_over(&self, stored: &Stored) -> bool {
        let is_past = |until: u64| until + 200 < self.quiet_ms;
        !self.clock_is_doubtful && stored.until.is_some_and(is_past)
    }

    pub fn has_locks(&self) -> bool {
        let mut values = self.values.iter();
        values.any(|(key, stored)| matches!(key, Key::Named(_)) && !self.is_over(stored))
    }

    /// Whether the key exists; `None`: this can't be known.
    pub(super) fn key_exists(&self, key: &Key) -> Option<bool> {
        let claimants = self.claimants(key);
        let (sure, unsure): (Vec<usize>, Vec<usize>) =
            claimants.partition(|index| self.surely_owns(*index));
        match self.value(key) {
            _ if !sure.is_empty() => Some(true),
            Some(stored) if self.may_be_over(stored) => None,
            Some(_) => Some(true),
            None if !unsure.is_empty() => None,
            None => Some(false),
        }
    }

    pub fn may_be_over(&self, stored: &Stored) -> bool {
        stored.until.is_some_and(|until| {
            self.clock_is_doubtful || until - stored.late_ms <= self.now.steady
        })
    }

    /// Evaluates a job that has succeeded: the result that it computes from the values of its predecessors, each
    /// evaluated the same way. `None`: one of them has no known value, or a crash has undone that another job took the
    /// id.
    pub fn evaluated(&self, id: MessageId) -> Option<[u8; MADE_BYTES]> {
        let mut items = self.with_id(id);
        let item = items.next()?;
        if items.next().is_some() || item.state != State::Ended(End::Acked) {
            return None;
        }
        if !self.ran_as_it_is(item) {
            return None;
        }
        let extras = item.message.extras.as_ref();
        let inputs = match extras.and_then(|extras| extras.inputs) {
            Some(inputs) => Some(self.values_of(inputs.join)?),
            None => None,
        };
        let (task, attempt) = (&item.message.task, item.message.attempt);
        Some(made_of(task, attempt, inputs.as_ref()))
    }

    /// Whether the hand-out whose outcome it has ran this very job. A worker that ran the job's replacement may come
    /// back with that lease after a crash has undone the replacement.
    fn ran_as_it_is(&self, item: &Item) -> bool {
        let Some(settled) = item.settled else {
            return false;
        };
        let sessions = (settled, SessionId([0; 16]))..=(settled, SessionId([u8::MAX; 16]));
        let mut runs = self.seen.range(sessions).map(|(_, run)| run);
        runs.all(|run| *run == Run::from(&item.message))
    }

    /// Whether a person has retried a member of the join, or any predecessor of one.
    pub(super) fn was_retried(&self, join: JoinId) -> bool {
        let count = self.joins.get(&join).map_or(0, |join| join.count);
        (0..count).any(|index| {
            let inner = self.by_place.get(&(join, index));
            let id = MessageId::member(join, index);
            let mut items = self.with_id(id);
            self.retried.contains(&id)
                || inner.is_some_and(|inner| self.was_retried(*inner))
                || items.any(|item| {
                    item.generation > 0 || item.held_by.is_some_and(|by| self.was_retried(by))
                })
        })
    }

    fn values_of(&self, join: JoinId) -> Option<InputValues> {
        let JoinModel { count, policy, .. } = self.joins.get(&join)?;
        let count = *count;
        // It may have continued without the retried member.
        if policy.max_failures() > 0 && self.was_retried(join) {
            return None;
        }
        let value = |index| {
            if let Some(inner) = self.by_place.get(&(join, index)) {
                return self.values_of(*inner).map(InputValue::Gathered);
            }
            let id = MessageId::member(join, index);
            let made = self.evaluated(id)?;
            let is_kept = |item: &Item| item.message.result_ttl_ms.is_some() && item.has_result;
            Some(match self.with_id(id).all(is_kept) {
                true => InputValue::Of(ValueStatus::Succeeded, made.to_vec().into()),
                false => InputValue::Gone,
            })
        };
        let values = (0..count).map(value).collect::<Option<Vec<_>>>()?;
        Some(InputValues {
            join,
            count,
            values: Some(values),
        })
    }

    /// Whether a join with this outcome key may have failed, its end unobserved.
    pub fn may_have_outcome(&self, key: &Key) -> bool {
        let mut joins = self.joins.iter();
        joins.any(|(id, join)| {
            let is_its_own = (join.outcome.as_ref()).is_some_and(|(outcome, _)| outcome == key);
            is_its_own && (join.was_dropped || self.may_have_failed(*id))
        })
    }

    /// Whether a bulk order has yet to end the job, which a failed group blocks until then. It is said to be blocked, even
    /// after the time for which its result is kept.
    fn is_ending_blocked(&self, id: MessageId) -> bool {
        let mut copies = self.by_id.get(&id).into_iter().flatten();
        copies.any(|index| self.ending_blocked.contains(index))
    }

    /// Whether the job was cancelled just as a failed group blocked it, so that it may have ended either way.
    pub fn may_be_cancelled(&self, key: &Key, status: ValueStatus) -> bool {
        status == ValueStatus::Cancelled && self.either.contains(key)
    }

    /// Checks a value that a client received.
    pub fn shown(&self, key: &Key, status: ValueStatus, body: &Bytes) -> Verdict {
        let is_same = |stored: &Stored| {
            stored.status == status && stored.body.as_ref().is_none_or(|is| is == body)
        };
        if self.on_their_way.get(key).is_some_and(is_same) {
            return Ok(());
        }
        if let Some(stored) = self.value(key) {
            let same = match &stored.body {
                Some(stored_body) => stored.status == status && stored_body == body,
                // With a doubtful clock nobody knows whether it had expired before.
                None => {
                    stored.status == status
                        || self.clock_is_doubtful
                        || self.may_be_cancelled(key, status)
                }
            };
            return match same {
                true => Ok(()),
                false => self.fail(format!(
                    "{key:?} is {status:?}, and was {:?}",
                    stored.status
                )),
            };
        }
        // The broker may just have ended the message itself.
        let Key::Result(id) = key else {
            return self.fail(format!("{key:?} has a value that nobody put there"));
        };
        let may_be = self.with_id(*id).any(|item| match status {
            ValueStatus::Expired => item.may_have_ended_as(End::Expired, self.clock_is_doubtful),
            ValueStatus::Cancelled => {
                // A job that waits for a failure is not needed once the failure can't happen.
                let is_not_needed = item.when() == Outcome::Failed
                    && matches!(item.state, State::Held(join) if self.may_be_released(join));
                is_not_needed || item.may_have_ended_as(End::Purged, self.clock_is_doubtful)
            }
            ValueStatus::Upstream => match item.state {
                // An item that may have ended in another way before its group failed is held by a group that is over.
                State::Held(join) => item.end_is_unsure || self.may_have_failed(join),
                // It was cancelled while blocked and ended that way, though its group has reopened.
                State::Waiting => item.end_is_unsure && item.held_by.is_some(),
                _ => false,
            },
            ValueStatus::Crashed => item.may_be_dead(),
            ValueStatus::Replaced => item.may_be_superseded,
            _ => false,
        });
        let may_be = may_be
            || status == ValueStatus::Upstream
                && (self.may_have_outcome(key) || self.is_ending_blocked(*id));
        match may_be {
            true => Ok(()),
            false => {
                let items: Vec<&Item> = self.with_id(*id).collect();
                self.fail(format!(
                    "{key:?} has ended as {status:?}, and nobody said so: {items:?}"
                ))
            }
        }
    }
}
