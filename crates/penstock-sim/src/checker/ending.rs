//! Checks at the end of a run.

use penstock_broker::Broker;
use penstock_message::{Key, KeyState, ValueStatus};

use super::Checker;
use crate::model::{Item, State, Verdict};

impl Checker {
    /// Checks that nothing is left or missing after all faults have ended and every client has had time to finish.
    pub fn drained(&self) -> Verdict {
        for item in self
            .model
            .live
            .iter()
            .map(|index| &self.model.items[*index])
        {
            let is_over = match item.state {
                State::Ended(_) => true,
                // Not all of its members have succeeded for certain.
                State::Held(_) => true,
                _ => self.may_be_left(item),
            };
            if !is_over {
                return Err(format!(
                    "lost or stuck: {} is still {:?} in {}",
                    item.message.id, item.state, item.queue
                ));
            }
        }
        Ok(())
    }

    /// Checks that the broker's counts are zero after every client has gone and every deadline has passed. Locks, and
    /// messages whose group will never end, are exempt.
    pub fn nothing_is_left(&self, broker: &Broker, held: usize) -> Verdict {
        let status = broker.status();
        for queue in &status.queues {
            // Some came, or were not dropped, after the last consumer of their queue had left.
            let live = self.model.live.iter();
            let items = live.map(|index| &self.model.items[*index]);
            let left = items.filter(|item| item.queue == queue.name && self.may_be_left(item));
            let may_wait = left.count() as u64;
            if queue.ready > may_wait || queue.delayed + queue.running > 0 {
                return Err(format!("in the end {queue:?} is not empty"));
            }
        }
        if !status.workers.is_empty() || status.clients > 0 {
            return Err(format!("in the end somebody is there: {status:?}"));
        }
        // Jobs that may still be there were checked above.
        let waits = status.queues.iter().any(|queue| queue.ready > 0);
        if held == 0
            && !waits
            && !self.model.has_locks()
            && self.model.joins_are_over()
            && broker.live_bytes() > 0
        {
            let bytes = broker.live_bytes();
            return Err(format!(
                "in the end nothing is left, and it takes {bytes} bytes"
            ));
        }
        Ok(())
    }

    /// Whether a message that has not ended for certain may have done so, or may be due later than anybody waits for it.
    fn may_be_left(&self, item: &Item) -> bool {
        match item.state {
            _ if self.may_be_late(item) => true,
            State::Leased { .. } if self.may_wait_for_a_late_job(item.message.id) => true,
            State::Waiting if self.slots_may_wait_for_late_jobs(item) => true,
            // It may have been dropped as a failed job before anybody looked.
            _ if item.may_be_dead() && self.model.has_dropped_failed => true,
            _ => item.ending().is_some(),
        }
    }

    /// Whether the broker's countdown for this message may be hours behind.
    pub(super) fn may_be_late(&self, item: &Item) -> bool {
        let waits = matches!(item.state, State::Waiting | State::Adrift { .. });
        waits && self.model.clock_is_doubtful && item.is_delayed()
    }

    /// Checks the result of a message at the end of the run. Any result is right if nobody can know it.
    pub fn result_is_right(&self, key: &Key, state: &KeyState, has_evicted: bool) -> Verdict {
        let Key::Result(id) = key else { return Ok(()) };
        let is_sure = self
            .model
            .with_id(*id)
            .all(|item| matches!(item.state, State::Ended(_)));
        let is_sure = is_sure && !self.model.may_have_outcome(key);
        let expected = self.model.value(key).map(|stored| stored.status);
        let shown: Option<ValueStatus> = match state {
            KeyState::Present(value) => Some(value.status),
            KeyState::Pending | KeyState::Gone => None,
        };
        let has_no_body = self
            .model
            .value(key)
            .is_some_and(|stored| stored.body.is_none());
        if let KeyState::Present(value) = state
            && value.status == ValueStatus::Succeeded
            && !has_evicted
            && let Some(made) = self.model.evaluated(*id)
            && !value.body.starts_with(&made)
        {
            return Err(format!(
                "the result of {id} is {:?}, and not what its steps make: {made:?}",
                value.body
            ));
        }
        let may_be_over =
            (self.model.value(key)).is_some_and(|stored| self.model.may_be_over(stored));
        let is_over = may_be_over && shown.is_none();
        let is_evicted = has_evicted && has_no_body && shown.is_none();
        let may_be_cancelled = shown.is_some_and(|status| self.model.may_be_cancelled(key, status));
        let is_right = expected == shown || may_be_cancelled;
        match !is_sure || is_right || is_evicted || is_over || self.model.clock_is_doubtful {
            true => Ok(()),
            false => Err(format!(
                "the result of {id} is {shown:?}, and should be {expected:?}"
            )),
        }
    }
}
