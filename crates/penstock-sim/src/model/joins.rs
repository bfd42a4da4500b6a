//! Joins of workflows: arrivals, releases, and what may have become of them.

use penstock_message::{JoinId, JoinOutcome as Outcome, Key, Member, ValueStatus};

use super::item::{End, State, Stored};
use super::{Item, Model, Verdict};

impl Model {
    /// Whether nobody has observed the end of the join. (An item that it holds may have ended in another way before.)
    pub(super) fn is_open(&self, join: JoinId) -> bool {
        self.joins.get(&join).is_some_and(|join| !join.over)
    }

    /// Makes a join wait again for a member that had failed, and restores everything that the join had blocked.
    pub(super) fn revive_member(&mut self, place: Member) {
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

    pub(super) fn arrive(&mut self, id: JoinId, index: u32, succeeded: bool) {
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
    pub(super) fn end_join(&mut self, id: JoinId, failed: bool) {
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

    /// Whether the unobserved members of a join may all have ended, now or before a retry.
    pub(super) fn may_be_released(&self, id: JoinId) -> bool {
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

    /// Whether a member of the join may have failed, so that the join blocks the messages that it holds.
    pub(super) fn may_have_failed(&self, id: JoinId) -> bool {
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

    pub(super) fn may_have_ended(&self, join: JoinId, index: u32) -> bool {
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
    pub(super) fn may_have_died_when_released(&self, item: &Item) -> bool {
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
    pub(super) fn was_dropped(&mut self, id: JoinId) {
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
    pub(super) fn was_released(&mut self, id: JoinId) {
        self.ended_at = self.may_be_over_since(id);
        self.end_join(id, false);
        self.ended_at = None;
    }
}
