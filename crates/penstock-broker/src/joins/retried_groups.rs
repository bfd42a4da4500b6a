//! Groups that continue because a person retries the jobs that failed them.
//!
//! A retried member no longer counts as arrived, so its join waits for it again. If the join was over, it reopens as
//! soon as it tolerates the failures that are left, and so does everything that it had blocked:
//!
//! ```text
//!     retry of a job ──► its join waits for it ──► few enough have failed: the join is open again
//!                              ▲                                     │
//!                              └── places in other joins of that one, and of the jobs that it holds
//! ```
//!
//! The first round is part of the retry; the others are steps. Jobs that were released because of the failure have run,
//! or will: they are not called back, and not released again. A join that has continued without the member does not go
//! back.

use penstock_message::{Key, KeyState, Member, MessageId, ValueStatus};

use crate::Broker;
use crate::joins::Arrival;
use crate::records::RecordEvent;

/// Maximum number of events for a member that becomes pending again: its own, and those of its join, which opens and
/// loses its outcome.
pub(crate) const REVIVAL_EVENTS: usize = 3;
/// Number of places that a step looks at.
const LOOKED_AT: usize = 8192;

impl Broker {
    /// Makes a join wait again for a failed member. Returns the number of events.
    pub(crate) fn revive_member(&mut self, place: Member) -> usize {
        let Member { join: id, index } = place;
        let Some(slot) = self.state.joins.find(&id) else {
            return 0;
        };
        let join = &self.state.joins[slot];
        let is_going = self.state.failed.going == Some(id);
        // A join that is certain to continue has already ended errbacks, or some of them.
        let goes_on = join.is_complete() && self.chores.undecided.contains(&id);
        if join.is_released || join.is_needless || is_going || goes_on {
            return 0;
        }
        if !join.has_arrived(index) {
            // The journal does not say which jobs have reported that they are blocked, only the result.
            return self.reopen_if_few_have_failed(slot);
        }
        let mut causes = join.causes.clone();
        // The last causes are for jobs that were released because of them and have not begun yet.
        if join.failures > 1 {
            causes.retain(|cause| self.has_not_been_retried(cause));
        }
        self.record(&RecordEvent::MemberRevived {
            join: id,
            index,
            causes: (&causes).into(),
        });
        self.state.revive_member(slot, index, causes);
        1 + self.reopen_if_few_have_failed(slot)
    }

    fn has_not_been_retried(&self, id: &MessageId) -> bool {
        let messages = &self.state.messages;
        let mut copies = messages.copies(id).peekable();
        if copies.peek().is_some() {
            return copies.any(|slot| messages[slot].is_failed());
        }
        let stored = self.state.keys.value(&Key::Result(*id));
        stored.is_none_or(|stored| stored.status != ValueStatus::Succeeded)
    }

    /// Reopens a join that was over if it tolerates the remaining failures. If only members that were not needed
    /// remain, the join is not needed either. Returns the number of events.
    fn reopen_if_few_have_failed(&mut self, slot: u32) -> usize {
        let join = &self.state.joins[slot];
        let may_go_on =
            join.failures <= join.policy.max_failures() || join.failure() == Arrival::NotNeeded;
        if !join.is_over || !may_go_on {
            return 0;
        }
        let (id, keys) = (join.id, join.result_ids());
        let mut keys: Vec<Key> = keys.into_iter().map(Key::Result).collect();
        keys.retain(|key| self.state.keys.value(key).is_some());
        if join.result_ttl_ms.is_none() {
            keys.clear();
        }
        self.record(&RecordEvent::JoinReopened { join: id });
        self.state.reopen_join(slot);
        self.chores.reopening.insert(id, 0);
        for key in &keys {
            self.record(&RecordEvent::Removed { key: key.clone() });
            self.state.remove_key(key);
        }
        self.review_waits_behind(id);
        1 + keys.len()
    }

    /// Resumes, after a recovery, a join that was reopened: other joins may not have learned of it.
    pub(crate) fn resume_reopening(&mut self, id: MessageId) {
        let slot = self.state.joins.find(&id);
        if slot.is_some_and(|slot| !self.state.joins[slot].is_decided()) {
            self.chores.reopening.insert(id, 0);
        }
    }

    /// Makes other joins wait again for reopened joins, and for the messages that these hold.
    pub(crate) fn step_reopened(&mut self) {
        if self.chores.has_blocked_to_report() {
            // After a recovery, a join must first learn of everything that blocks it.
            return;
        }
        let mut looked_at = 0;
        while let Some((id, done)) = self.chores.reopening.pop_first() {
            let slot = self.state.joins.find(&id);
            let Some(slot) = slot.filter(|slot| !self.state.joins[*slot].is_decided()) else {
                continue;
            };
            let join = &self.state.joins[slot];
            let all = join.then.len() + join.held.len();
            let most = self.step_size();
            let end = all.min(done + most);
            if most == 0 || looked_at >= LOOKED_AT {
                self.chores.reopening.insert(id, done);
                return;
            }
            looked_at += end - done + 1;
            let place = |at: usize| match at.checked_sub(join.then.len()) {
                None => Some(join.then[at]),
                Some(at) => {
                    let handle = join.held[at];
                    let is_held = self.is_held_by(handle, &id);
                    is_held.then(|| self.state.messages.member(handle.slot))?
                }
            };
            let places: Vec<Member> = (done..end).filter_map(place).collect();
            for place in places {
                self.added += self.revive_member(place);
            }
            if end < all {
                self.chores.reopening.insert(id, end);
            } else {
                self.added += self.decide_join(slot);
                self.added += self.follow_ends();
            }
        }
        for key in std::mem::take(&mut self.chores.unsure) {
            self.state.touch(&key);
        }
    }

    /// Whether the answer to a client that watches this key waits: the key may be about to become pending again.
    pub(crate) fn is_unsure(&mut self, key: &Key, state: &KeyState) -> bool {
        if !self.chores.is_reopening() {
            return false;
        }
        let is_unsure = match state {
            KeyState::Present(value) => value.status == ValueStatus::Upstream,
            KeyState::Gone => matches!(key, Key::Result(_)),
            KeyState::Pending => false,
        };
        if is_unsure {
            self.chores.unsure.push(key.clone());
        }
        is_unsure
    }
}
