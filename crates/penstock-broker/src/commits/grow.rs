//! Adds members to the group of a job that a transaction settles.

use penstock_message::{
    Hold, JOIN_CAP, JoinId, Member, Message, MessageId, Op, Refusal, SeededMap, SeededSet,
    SeededState, place_of_heir,
};

use super::Checking;
use crate::Broker;
use crate::records::RecordEvent;

/// Members that the transaction adds.
pub(super) struct Grown {
    /// Their places, by the ids that the transaction gives them; `None`: they come too late, and are skipped.
    places: SeededMap<MessageId, Option<Member>>,
    /// Joins that are skipped with them.
    skipped: SeededSet<JoinId>,
}

/// The operations that add members.
fn growth(ops: &[Op]) -> impl Iterator<Item = (MessageId, MessageId, bool)> {
    ops.iter().map_while(|op| match op {
        Op::Grow { job, member, outer } => Some((*job, *member, *outer)),
        _ => None,
    })
}

impl Broker {
    /// Checks the operations that add members, which come first. Returns how many there are.
    pub(super) fn check_growth(
        &self,
        ops: &[Op],
        checking: &mut Checking,
    ) -> Result<usize, (u32, Refusal)> {
        let Some((job, _, outer)) = growth(ops).next() else {
            return Ok(0);
        };
        let by = growth(ops).count() as u32;
        let invalid = |why: &str| (0, Refusal::Invalid(why.to_owned()));
        if growth(ops).any(|(of, _, is_outer)| (of, is_outer) != (job, outer)) {
            return Err(invalid(
                "operations that add to a group must be for one job and one group",
            ));
        }
        let ends = |op: &Op| match op {
            Op::Ack { lease, .. } | Op::Replace { lease, .. } => lease.message == job,
            _ => false,
        };
        if !ops.iter().any(ends) {
            return Err(invalid(
                "a transaction that adds to a group must settle a member of the group",
            ));
        }
        let mut copies = self.state.messages.copies(&job);
        let Some(slot) = copies.next() else {
            // Its settlement will be refused.
            return Ok(by as usize);
        };
        let Some(place) = self.state.messages.member(slot) else {
            return Err(invalid("the job is not a member of a group"));
        };
        let group = self.group_of(place, outer).map_err(|why| (0, why))?;
        if let Some((group, _)) = group {
            let join = &self.state.joins[group];
            if join.is_unsealed() {
                return Err(invalid("its group is still being sent"));
            }
            let count = join.count;
            if count.checked_add(by).is_none_or(|count| count > JOIN_CAP) {
                return Err(invalid("its group has no room for more members"));
            }
            for index in count..count + by {
                let id = MessageId::member(join.id, index);
                if self.state.messages.holds(&id) || !checking.new_ids.insert(id) {
                    return Err((0, Refusal::AlreadyExists));
                }
            }
        }
        for (index, (_, member, _)) in growth(ops).enumerate() {
            if member.is_join() || checking.added.insert(member, false).is_some() {
                return Err((index as u32, Refusal::AlreadyExists));
            }
        }
        Ok(by as usize)
    }

    /// Finds the group of the job that has this place, and the place in it; `None` if it is gone.
    fn group_of(&self, place: Member, outer: bool) -> Result<Option<(u32, Member)>, Refusal> {
        let joins = &self.state.joins;
        let Some(slot) = joins.find(&place.join) else {
            return Ok(None);
        };
        let (slot, place) = match outer {
            false => (slot, place),
            true => match joins[slot].then[..] {
                [place] if joins[slot].count == 1 => match joins.find(&place.join) {
                    Some(slot) => (slot, place),
                    None => return Ok(None),
                },
                _ => return Err(Refusal::Invalid("its join wraps no member".to_owned())),
            },
        };
        match joins[slot].id.is_join() {
            true => Ok(Some((slot, place))),
            false => Err(Refusal::Invalid(
                "members of its group have no ids that follow from their places".to_owned(),
            )),
        }
    }

    /// Adds the members, before the settled job may complete the group.
    pub(super) fn grow(&mut self, ops: &[Op]) -> Option<Grown> {
        let (job, _, outer) = growth(ops).next()?;
        let added: Vec<MessageId> = growth(ops).map(|(_, member, _)| member).collect();
        let group = self.open_group(ops, job, outer);
        let first = group.map(|slot| {
            let (join, first) = (self.state.joins[slot].id, self.state.joins[slot].count);
            let by = added.len() as u32;
            self.record(&RecordEvent::JoinGrown { join, by });
            self.state.grow_join(slot, by);
            (join, first)
        });
        let hashing = SeededState::new(self.options.hash_seed);
        let mut places = SeededMap::with_hasher(hashing);
        places.extend((0..).zip(added).map(|(number, member)| {
            let place = first.map(|(join, first)| Member {
                join,
                index: first + number,
            });
            (member, place)
        }));
        Some(Grown {
            places,
            skipped: SeededSet::with_hasher(hashing),
        })
    }

    /// Finds the group of the job unless it can no longer be joined.
    fn open_group(&self, ops: &[Op], job: MessageId, outer: bool) -> Option<u32> {
        let messages = &self.state.messages;
        let slot = messages.copies(&job).next()?;
        let (group, place) = self.group_of(messages.member(slot)?, outer).ok()??;
        // Then a replaced job ends as cancelled, and none of its steps is sent.
        let is_asked = || {
            let replaces = ops.iter().any(|op| matches!(op, Op::Replace { .. }));
            let is_marked = || self.mark_that_asks_to_stop(slot).is_some();
            replaces && (messages.asked(slot).is_some() || is_marked())
        };
        let join = &self.state.joins[group];
        let is_open = !join.is_released
            && !join.is_needless
            && join.growth.is_none()
            && !join.has_arrived(place.index);
        (is_open && !self.is_of_cancelled_workflow(slot) && !is_asked()).then_some(group)
    }
}

impl Checking {
    /// Whether the message joins a group.
    pub(super) fn is_added(&self, message: &Message) -> bool {
        !self.added.is_empty() && self.added.contains_key(&message.id)
    }

    /// Notes that a message joins a group.
    pub(super) fn find_added(&mut self, message: &Message) -> Result<(), Refusal> {
        let member = message.extras.as_ref().and_then(|extras| extras.member);
        match [None, place_of_heir(message.id)].contains(&member) {
            true => self.supply(message.id),
            false => Err(Refusal::Invalid(
                "a message that joins a group must not report to another join".to_owned(),
            )),
        }
    }

    /// Notes that a join has one of these places. Returns false for any other place.
    pub(super) fn find_added_place(&mut self, place: Member) -> Result<bool, Refusal> {
        match named_by(place).filter(|id| self.added.contains_key(id)) {
            Some(id) => self.supply(id).map(|()| true),
            None => Ok(false),
        }
    }

    fn supply(&mut self, id: MessageId) -> Result<(), Refusal> {
        match self.added.insert(id, true) {
            Some(false) => Ok(()),
            _ => Err(Refusal::AlreadyExists),
        }
    }
}

/// Checks that each new member is supplied: the group would wait for it forever.
pub(super) fn check_added(checking: &Checking) -> Result<(), Refusal> {
    match checking.added.values().all(|supplied| *supplied) {
        true => Ok(()),
        false => Err(Refusal::Invalid(
            "a transaction that adds a member to a group must publish it".to_owned(),
        )),
    }
}

/// Returns the id for which this is the [`place_of_heir`].
fn named_by(place: Member) -> Option<MessageId> {
    let is_named = place.join.is_join() && place.index < JOIN_CAP;
    is_named.then(|| MessageId::member(place.join, place.index))
}

impl Grown {
    /// Gives a message or a join that supplies a member its place. Returns false if it must be skipped.
    pub(super) fn supply(&mut self, op: &mut Op) -> bool {
        match op {
            Op::Publish { message, .. } => self.supply_message(message),
            Op::Hold(Hold {
                join,
                then,
                messages,
                ..
            }) => {
                let then = then.iter_mut().map(|place| self.supply_place(place));
                // Each must be visited.
                let is_skipped = then.fold(false, |any, supplied| any | !supplied);
                let messages = messages.iter_mut();
                let is_skipped = messages.fold(is_skipped, |any, (_, message)| {
                    any | !self.supply_message(message)
                });
                if is_skipped {
                    self.skipped.insert(*join);
                }
                !is_skipped
            }
            _ => true,
        }
    }

    fn supply_message(&self, message: &mut Message) -> bool {
        match self.places.get(&message.id) {
            Some(Some(place)) => {
                message.id = MessageId::member(place.join, place.index);
                message.extras.get_or_insert_default().member = Some(*place);
                true
            }
            Some(None) => false,
            None => {
                let member = message.extras.as_ref().and_then(|extras| extras.member);
                member.is_none_or(|member| !self.skipped.contains(&member.join))
            }
        }
    }

    fn supply_place(&self, place: &mut Member) -> bool {
        match named_by(*place).and_then(|id| self.places.get(&id)) {
            Some(Some(actual)) => {
                *place = *actual;
                true
            }
            Some(None) => false,
            None => !self.skipped.contains(&place.join),
        }
    }
}
