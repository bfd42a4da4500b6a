//! Waits of jobs and groups that have not begun: a job for the members of its group, and a group for its own.

use penstock_message::{JoinId, MessageId, SessionId, place_of_heir};

use super::Model;
use super::item::State;

impl Model {
    /// Whether the session is connected, as far as anybody knows.
    pub fn is_there(&self, session: SessionId) -> bool {
        let attendance = self.sessions.get(&session);
        attendance.is_some_and(|attendance| attendance.away_since.is_none())
    }

    /// Returns the ids that this job or group certainly waits for: unended members of a group that is not over.
    pub fn surely_waits_for(&self, id: MessageId) -> Vec<MessageId> {
        let held_by = match self.by_id.get(&id).map(Vec::as_slice) {
            Some([index]) if self.surely_waits(*index) => match self.items[*index].state {
                State::Held(join) => Some(join),
                _ => None,
            },
            _ => None,
        };
        let joins = held_by.into_iter().chain(self.group_at(id));
        let is_sure = |id: &JoinId| {
            !self.may_be_released(*id) && !self.may_have_failed(*id) && !self.clock_is_doubtful
        };
        let open = joins.filter_map(|id| {
            let join = self.joins.get(&id)?;
            (!join.over && is_sure(&id)).then_some((id, join))
        });
        let members = open.flat_map(|(id, join)| {
            let has_ended =
                |index: &u32| join.arrived.contains(index) || self.may_have_ended(id, *index);
            let left: Vec<u32> = (0..join.count).filter(|index| !has_ended(index)).collect();
            left.into_iter()
                .map(move |index| MessageId::member(id, index))
        });
        members.collect()
    }

    /// Returns the ids that it may wait for, or may have waited for since the last quiet moment.
    pub fn perhaps_waits_for(&self, id: MessageId) -> Vec<MessageId> {
        let held_by = self.with_id(id).filter_map(|item| item.held_by);
        let joins = held_by.chain(self.group_at(id));
        let members = joins.flat_map(|id| {
            let join = self.joins.get(&id);
            let join = join.filter(|join| !join.over || !join.was_over);
            let count = join.map_or(0, |join| join.count);
            (0..count).map(move |index| MessageId::member(id, index))
        });
        members.collect()
    }

    /// Returns the group whose outcome has this id.
    fn group_at(&self, id: MessageId) -> Option<JoinId> {
        let place = place_of_heir(id)?;
        self.by_place.get(&(place.join, place.index)).copied()
    }
}
