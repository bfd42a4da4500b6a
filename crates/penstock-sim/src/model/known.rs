//! Questions to the model, and the values that clients may be shown.

use bytes::Bytes;
use penstock_message::{Key, MessageId, SessionId, ValueStatus};

use super::item::{End, Item, State, Stored, Time};
use super::{Model, Verdict};

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

    /// Returns the value that a key has, or may have. The end of its time is written nowhere, so a broker whose
    /// clock was set back over a crash has it again: values that may be over are not forgotten here.
    pub fn value(&self, key: &Key) -> Option<&Stored> {
        self.values.get(key).filter(|stored| !self.is_over(stored))
    }

    fn is_over(&self, stored: &Stored) -> bool {
        let is_past = |until: u64| until + 200 < self.quiet_ms;
        !self.clock_is_doubtful && stored.until.is_some_and(is_past)
    }

    pub fn has_locks(&self) -> bool {
        let mut values = self.values.iter();
        values.any(|(key, stored)| matches!(key, Key::Named(_)) && !self.is_over(stored))
    }

    /// Whether the key exists; `None`: it can't be known.
    pub(super) fn key_exists(&self, key: &Key) -> Option<bool> {
        let claims = self.live.iter().map(|index| &self.items[*index]);
        let claims = claims.filter(|item| {
            item.claim.as_ref() == Some(key) && !matches!(item.state, State::Ended(_))
        });
        let (sure, unsure): (Vec<&Item>, Vec<&Item>) = claims.partition(|item| {
            item.ending().is_none() && !item.may_be_dead() && !item.claim_is_unsure
        });
        match self.value(key) {
            _ if !sure.is_empty() => Some(true),
            Some(stored) if self.may_be_over(stored) => None,
            Some(_) => Some(true),
            None if !unsure.is_empty() => None,
            None => Some(false),
        }
    }

    pub(super) fn may_be_over(&self, stored: &Stored) -> bool {
        stored
            .until
            .is_some_and(|until| self.clock_is_doubtful || until <= self.now.steady)
    }

    /// Checks a value that was shown.
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
                None => stored.status == status || self.clock_is_doubtful,
            };
            return match same {
                true => Ok(()),
                false => self.fail(format!(
                    "{key:?} is {status:?}, and was {:?}",
                    stored.status
                )),
            };
        }
        // The broker may have ended the message itself just now.
        let Key::Result(id) = key else {
            return self.fail(format!("{key:?} has a value that nobody put there"));
        };
        let may_be = self.with_id(*id).any(|item| match status {
            ValueStatus::Expired => item.may_have_ended_as(End::Expired, self.clock_is_doubtful),
            ValueStatus::Cancelled => item.may_have_ended_as(End::Purged, self.clock_is_doubtful),
            ValueStatus::Upstream => {
                let State::Held(join) = item.state else {
                    return false;
                };
                // One that may have ended in another way before its group failed is held by a group that is over.
                item.end_is_unsure || self.may_have_failed(join)
            }
            ValueStatus::Crashed => item.may_be_dead(),
            _ => false,
        });
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
