//! Members that running members add to their group.

use penstock_message::{Hold, Member, Message, MessageId, Op, Tx};

use super::item::State;
use super::{Model, Verdict};

impl Model {
    /// Adds a member to the group of a job, unless its step was skipped.
    pub(super) fn grow(
        &mut self,
        job: MessageId,
        member: MessageId,
        outer: bool,
        tx: &Tx,
        skipped: &[u32],
    ) -> Verdict {
        let supplies = |op: &Op| match op {
            Op::Publish { message, .. } => message.id == member,
            Op::Hold(Hold { then, messages, .. }) => {
                let mut then = then.iter();
                then.any(|place| MessageId::member(place.join, place.index) == member)
                    || messages.iter().any(|(_, message)| message.id == member)
            }
            _ => false,
        };
        let supplier = tx.ops.iter().position(supplies);
        let is_skipped = supplier.is_some_and(|at| skipped.contains(&(at as u32)));
        let copies = self.by_id.get(&job).into_iter().flatten().copied();
        let mut running = copies.filter(|at| !matches!(self.items[*at].state, State::Ended(_)));
        let index = running.next();
        let place = index.and_then(|index| self.items[index].member());
        let group = match (place, outer) {
            (Some(place), true) => self
                .joins
                .get(&place.join)
                .and_then(|join| join.then.first().map(|place| place.join)),
            (place, _) => place.map(|place| place.join),
        };
        let Some(group) = group.filter(|_| !is_skipped) else {
            self.grown.insert(member, None);
            let is_cancelled = index.is_some_and(|index| self.is_of_cancelled_workflow(index));
            let is_open = group.is_some_and(|group| {
                self.is_open(group) && !self.may_be_released(group) && !self.may_have_failed(group)
            });
            return match is_open && !is_cancelled {
                true => self.fail(format!("{job} could not add a member to an open group")),
                false => Ok(()),
            };
        };
        if let Some(join) = self.joins.get_mut(&group) {
            let index = join.count;
            join.count += 1;
            let place = Member { join: group, index };
            self.grown.insert(member, Some(place));
        }
        Ok(())
    }

    /// Returns the message with the id and the place that it gets if it joins a group.
    pub(super) fn as_member(&self, message: &Message) -> Message {
        let mut message = message.clone();
        if let Some(place) = self.grown.get(&message.id).copied().flatten() {
            message.id = MessageId::member(place.join, place.index);
            message.extras.get_or_insert_default().member = Some(place);
        }
        message
    }
}
