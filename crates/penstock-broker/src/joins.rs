//! Joins: hold messages until a number of members have arrived.
//!
//! A join is open until its last member has arrived, or more members have failed than it tolerates. In the first case
//! it is released. In the second it is over: it stays, with the messages that it blocks, and reopens once a person has
//! retried enough of the failed members (see `joins/retried_groups.rs`). A released join stays while its values may
//! still be read, by a message that has them as inputs or by a join that it is itself a member of. The results of its
//! members are pinned for as long.

pub(crate) mod inputs;
pub(crate) mod retried_groups;

use std::collections::{BTreeMap, VecDeque};

use penstock_faults::planted;
use penstock_message::{
    JOIN_CAP, JoinId, JoinOutcome as Outcome, JoinPolicy, Key, Member, MessageId, SeededMap,
    SeededState, UPSTREAM_IDS,
};

use crate::Position;
use crate::messages::Handle;
use crate::records::Growth;
use crate::table::slab::Slab;

/// Journal bytes for the arrivals of 64 neighbouring members.
const ARRIVED_WORD_BYTES: u64 = 10;

/// Additional journal bytes of an unsealed join.
const UNSEALED_BYTES: u64 = 40;

/// Number of kept jobs, and the bytes that they take in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) jobs: u64,
    pub(crate) bytes: u64,
}

impl std::ops::AddAssign for Amount {
    fn add_assign(&mut self, other: Self) {
        self.jobs += other.jobs;
        self.bytes += other.bytes;
    }
}

impl std::ops::SubAssign for Amount {
    fn sub_assign(&mut self, other: Self) {
        self.jobs -= other.jobs;
        self.bytes -= other.bytes;
    }
}

/// Outcome of a member, as reported to its joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    Succeeded,
    /// Failed because of these jobs (only the first few are listed).
    Failed(Vec<MessageId>),
    /// Never ran, since the failure that it waits for did not happen.
    NotNeeded,
}

impl Arrival {
    /// Converts the arrival where an outcome other than success is expected.
    fn by_expectation(self, when: Outcome) -> Self {
        match (when, self) {
            (Outcome::Ended, _) | (Outcome::Failed, Self::Failed(_)) => Self::Succeeded,
            (Outcome::Failed, _) => Self::NotNeeded,
            (Outcome::Succeeded, arrival) => arrival,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Join {
    pub(crate) id: JoinId,
    pub(crate) number: u64,
    pub(crate) count: u32,
    pub(crate) policy: JoinPolicy,
    /// Bitmap of the arrived members, in words of 64, without empty words. A client chooses the count and the index, so
    /// neither may cost anything: only arrivals do.
    arrived: BTreeMap<u32, u64>,
    pub(crate) arrivals: u32,
    /// Number of arrived members that have failed.
    pub(crate) failures: u32,
    /// The first of the jobs that caused the failures.
    pub(crate) causes: Vec<MessageId>,
    /// Expected outcomes other than success, by member index.
    pub(crate) expects: Vec<(u32, Outcome)>,
    /// Whether one of the failed members was not needed.
    pub(crate) has_needless: bool,
    /// Places of this join in other joins.
    pub(crate) then: Vec<Member>,
    /// Time for which its outcome is kept as a value.
    pub(crate) result_ttl_ms: Option<u64>,
    /// Growth of an unsealed join; `count` is the maximum until it is sealed. A join that was closed before its seal
    /// keeps this, so that late members are refused.
    pub(crate) growth: Option<Box<Growth>>,
    /// Joins that are members of this one, perhaps including released ones.
    nested: Vec<JoinId>,
    /// Whether too many members have failed: the messages that it holds are blocked.
    pub(crate) is_over: bool,
    /// Whether its held messages are not needed: the failure that they wait for can no longer happen.
    pub(crate) is_needless: bool,
    /// Whether it has released its held messages, and is kept only for its members' values.
    pub(crate) is_released: bool,
    /// Time at which it failed, on the steady clock.
    pub(crate) over_at: u64,
    /// Depth at which running jobs wait for its held messages; 0 if none do. Not in the journal.
    pub(crate) awaited: u32,
    /// Held messages. Some may have expired since.
    pub(crate) held: Vec<Handle>,
    /// Size of the join and of the messages that it still holds.
    pub(crate) kept: Amount,
    pub(crate) base: Position,
}

impl Join {
    pub(crate) fn has_arrived(&self, index: u32) -> bool {
        let word = self.arrived.get(&(index / 64)).copied().unwrap_or(0);
        word >> (index % 64) & 1 == 1
    }

    /// Notes that a member has arrived. Returns false if it had already arrived.
    pub(crate) fn arrive(&mut self, index: u32) -> bool {
        if self.has_arrived(index) && !planted!("count-member-twice") {
            return false;
        }
        *self.arrived.entry(index / 64).or_default() |= 1 << (index % 64);
        self.arrivals += 1;
        true
    }

    /// Whether more members may be added.
    pub(crate) fn is_unsealed(&self) -> bool {
        self.growth
            .as_ref()
            .is_some_and(|growth| growth.session > 0)
    }

    /// Whether all members have ended but the join has not.
    pub(crate) fn is_complete(&self) -> bool {
        self.arrivals == self.count && !self.is_unsealed() && !self.is_decided()
    }

    /// Returns the ids of the members that have not arrived; `None` if there are more than `most`.
    pub(crate) fn pending(&self, most: usize) -> Option<Vec<MessageId>> {
        if (self.count - self.arrivals.min(self.count)) as usize > most || !self.id.is_join() {
            return None;
        }
        let words = (0..self.count.div_ceil(64)).map(|word| {
            let arrived = self.arrived.get(&word).copied().unwrap_or(0);
            (word * 64, !arrived)
        });
        let pending = words
            .filter(|(_, bits)| *bits != 0)
            .flat_map(|(first, bits)| {
                let of_word = (0..64).filter(move |bit| bits >> bit & 1 == 1);
                of_word.map(move |bit| first + bit)
            });
        let pending = pending.filter(|index| *index < self.count.min(JOIN_CAP));
        Some(
            pending
                .map(|index| MessageId::member(self.id, index))
                .collect(),
        )
    }

    /// Returns the members that have arrived, as (index / 64, bits).
    pub(crate) fn arrived(&self) -> Vec<(u32, u64)> {
        let words = self.arrived.iter();
        words.map(|(word, bits)| (*word, *bits)).collect()
    }

    /// Sets the arrived members from the journal.
    pub(crate) fn restore(&mut self, arrived: &[(u32, u64)]) {
        for (word, bits) in arrived {
            let had = self.arrived.entry(*word).or_default();
            self.arrivals += (bits & !*had).count_ones();
            *had |= bits;
        }
    }

    /// Withdraws the arrival of a failed member.
    pub(crate) fn revive_member(&mut self, index: u32, causes: Vec<MessageId>) {
        if !self.has_arrived(index) {
            return;
        }
        if let Some(word) = self.arrived.get_mut(&(index / 64)) {
            *word &= !(1 << (index % 64));
            if *word == 0 {
                self.arrived.remove(&(index / 64));
            }
        }
        self.arrivals -= 1;
        // If an outcome other than success was expected, this did not count as a failure.
        if self.judge(index, Arrival::Failed(Vec::new())) != Arrival::Succeeded {
            self.failures = self.failures.saturating_sub(1);
            self.causes = causes;
        }
    }

    /// Returns how the outcome of a member counts in this join.
    pub(crate) fn judge(&self, index: u32, arrival: Arrival) -> Arrival {
        let place = self.expects.binary_search_by_key(&index, |(of, _)| *of);
        match place {
            Ok(place) => arrival.by_expectation(self.expects[place].1),
            Err(_) => arrival,
        }
    }

    /// Counts a member that has arrived, if it has not succeeded.
    pub(crate) fn count_failure(&mut self, arrival: &Arrival) {
        if self.failures == 0 && *arrival != Arrival::Succeeded {
            // The causes of a retried failure were kept for the messages that it has released.
            self.causes.clear();
        }
        match arrival {
            Arrival::Succeeded => {}
            Arrival::Failed(causes) => {
                self.failures += u32::from(!planted!("forget-failures"));
                // One job may have failed several members.
                for cause in causes {
                    if self.causes.len() < UPSTREAM_IDS && !self.causes.contains(cause) {
                        self.causes.push(*cause);
                    }
                }
            }
            Arrival::NotNeeded => {
                self.failures += 1;
                self.has_needless = true;
            }
        }
    }

    /// Returns the outcome of a failed join as a member of others.
    pub(crate) fn failure(&self) -> Arrival {
        match self.has_needless && self.causes.is_empty() {
            true => Arrival::NotNeeded,
            false => Arrival::Failed(self.causes.clone()),
        }
    }

    /// Whether its held messages are released, blocked or not needed.
    pub(crate) fn is_decided(&self) -> bool {
        self.is_over || self.is_released || self.is_needless
    }

    /// Returns the ids under which its outcome is kept: those of its places in others, or else its own.
    pub(crate) fn result_ids(&self) -> Vec<MessageId> {
        let is_named = |place: &&Member| place.join.is_join() && place.index < JOIN_CAP;
        let places = self.then.iter().filter(is_named);
        let ids = places.map(|place| MessageId::member(place.join, place.index));
        let ids: Vec<MessageId> = ids.collect();
        match ids.is_empty() {
            true => vec![self.id],
            false => ids,
        }
    }

    pub(crate) fn journal_bytes(&self) -> u64 {
        let ids = 16 * self.causes.len() + 20 * self.then.len() + 4 * self.expects.len();
        let unsealed = if self.growth.is_some() {
            UNSEALED_BYTES
        } else {
            0
        };
        64 + unsealed + self.arrived.len() as u64 * ARRIVED_WORD_BYTES + ids as u64
    }
}

#[derive(Debug, Default)]
pub(crate) struct Joins {
    joins: Slab<Join>,
    by_id: SeededMap<JoinId, u32>,
    opened: u64,
    /// Held messages that precede their join in the journal, because the join was carried forward.
    early: SeededMap<JoinId, Vec<Handle>>,
    /// Number of messages that have the values of each join as inputs.
    readers: SeededMap<JoinId, u32>,
    /// Unsealed joins. There are few at a time.
    unsealed: Vec<JoinId>,
    /// Unsealed joins whose creators have ended.
    pub(crate) abandoned: VecDeque<JoinId>,
    /// Joins whose outcome is kept under an id for which no open join has a place, by that id.
    loose: SeededMap<MessageId, JoinId>,
    /// Joins that have lost a reader or were released, and must be checked.
    unread: VecDeque<JoinId>,
}

impl Joins {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_id: SeededMap::with_hasher(hashing),
            early: SeededMap::with_hasher(hashing),
            readers: SeededMap::with_hasher(hashing),
            loose: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> [SeededState; 4] {
        [
            *self.by_id.hasher(),
            *self.early.hasher(),
            *self.readers.hasher(),
            *self.loose.hasher(),
        ]
    }

    pub(crate) fn find(&self, id: &JoinId) -> Option<u32> {
        self.by_id.get(id).copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Join> {
        self.joins.get(slot)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Join)> {
        self.joins.iter()
    }

    pub(crate) fn open(&mut self, id: JoinId, count: u32, policy: JoinPolicy) -> u32 {
        self.opened += 1;
        let slot = self.joins.insert(Join {
            id,
            number: self.opened,
            count,
            policy,
            arrived: BTreeMap::new(),
            arrivals: 0,
            failures: 0,
            causes: Vec::new(),
            expects: Vec::new(),
            has_needless: false,
            then: Vec::new(),
            result_ttl_ms: None,
            growth: None,
            nested: Vec::new(),
            is_over: false,
            is_needless: false,
            is_released: false,
            over_at: 0,
            awaited: 0,
            held: self.early.remove(&id).unwrap_or_default(),
            kept: Amount::default(),
            base: Position(0),
        });
        self.by_id.insert(id, slot);
        slot
    }

    /// Lets members be added to a join until it is sealed.
    pub(crate) fn unseal(&mut self, slot: u32, growth: Growth) {
        let join = &mut self.joins[slot];
        join.growth = Some(Box::new(growth));
        if join.is_unsealed() {
            let id = join.id;
            join.count = JOIN_CAP;
            self.unsealed.push(id);
        }
    }

    /// Fixes the number of members of an unsealed join. `closes`: others could still have been added.
    pub(crate) fn seal(&mut self, slot: u32, count: u32, closes: bool) {
        let join = &mut self.joins[slot];
        if !join.is_unsealed() {
            return;
        }
        join.count = count;
        match &mut join.growth {
            Some(growth) if closes => growth.session = 0,
            growth => *growth = None,
        }
        let id = join.id;
        self.unsealed.retain(|other| *other != id);
    }

    pub(crate) fn has_unsealed(&self) -> bool {
        !self.unsealed.is_empty()
    }

    pub(crate) fn unsealed(&self) -> impl Iterator<Item = (u32, &Growth)> {
        self.unsealed.iter().filter_map(|id| {
            let slot = self.find(id)?;
            Some((slot, self.joins[slot].growth.as_deref()?))
        })
    }

    /// Finds the unsealed join of a workflow, which has at most one.
    pub(crate) fn unsealed_of(&self, workflow: &MessageId) -> Option<u32> {
        let found = self
            .unsealed()
            .find(|(_, growth)| growth.workflow == *workflow);
        found.map(|(slot, _)| slot)
    }

    /// Notes the unsealed joins whose creators have ended, to be checked.
    pub(crate) fn abandon(&mut self, has_ended: impl Fn(&Growth) -> bool) {
        let ended = self.unsealed().filter(|(_, growth)| has_ended(growth));
        let ended: Vec<JoinId> = ended.map(|(slot, _)| self.joins[slot].id).collect();
        self.abandoned.extend(ended);
    }

    /// Sets the places of a join in others.
    pub(crate) fn set_then(&mut self, slot: u32, then: Vec<Member>) {
        let id = self.joins[slot].id;
        for place in &then {
            match self.find(&place.join) {
                Some(outer) => self.joins[outer].nested.push(id),
                None => self.set_detached(*place, id),
            }
        }
        self.joins[slot].then = then;
    }

    /// Notes that a join has a place in no open join: it has replaced a job, or the outer join is gone.
    fn set_detached(&mut self, place: Member, id: JoinId) {
        if place.join.is_join() && place.index < JOIN_CAP {
            self.loose
                .insert(MessageId::member(place.join, place.index), id);
        }
    }

    /// Links places in other joins once all joins are known.
    pub(crate) fn nest_all(&mut self) {
        let nested = self.joins.iter().map(|(slot, _)| slot);
        let slots: Vec<u32> = nested.collect();
        self.loose.clear();
        for slot in &slots {
            self.joins[*slot].nested.clear();
        }
        for slot in slots {
            let then = std::mem::take(&mut self.joins[slot].then);
            self.set_then(slot, then);
        }
    }

    /// Counts a message that has the values of the join as inputs.
    pub(crate) fn add_reader(&mut self, id: JoinId) {
        *self.readers.entry(id).or_default() += 1;
    }

    /// Uncounts a message that had the values of the join as inputs.
    pub(crate) fn remove_reader(&mut self, id: JoinId) {
        if let Some(readers) = self.readers.get_mut(&id) {
            *readers -= 1;
            if *readers == 0 {
                self.readers.remove(&id);
                self.unread.push_back(id);
            }
        }
    }

    /// Schedules a check of a released join whose values may no longer be readable.
    pub(crate) fn may_be_unread(&mut self, id: JoinId) {
        self.unread.push_back(id);
    }

    /// Whether there are joins to check whose values may no longer be readable.
    pub(crate) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Takes the next of these that is released and whose values can't be read any more.
    pub(crate) fn take_unread(&mut self) -> Option<u32> {
        let id = self.unread.pop_front()?;
        let slot = self.find(&id)?;
        let join = &self.joins[slot];
        let mut places = join.then.iter();
        let is_read =
            self.readers.contains_key(&id) || places.any(|place| self.find(&place.join).is_some());
        (join.is_released && !is_read).then_some(slot)
    }

    /// Returns the number of messages that have the values of each join as inputs.
    pub(crate) fn readers(&self) -> BTreeMap<JoinId, u32> {
        self.readers
            .iter()
            .map(|(id, readers)| (*id, *readers))
            .collect()
    }

    /// Whether the value is the result of a member of a join whose values may still be read.
    pub(crate) fn is_pinned(&self, key: &Key, now: u64) -> bool {
        let Key::Result(id) = key else {
            return false;
        };
        !self.by_id.is_empty()
            && !id.is_join()
            && self.find(&id.join_of()).is_some_and(|slot| {
                let join = &self.joins[slot];
                // A person may retry the failed jobs, and then the values are read after all.
                let may_be_read = !join.is_over || !join.then.is_empty() || !join.held.is_empty();
                // A client that learns of the failure asks for the errors that caused it.
                let kept = join
                    .result_ttl_ms
                    .map(|ttl_ms| join.over_at.saturating_add(ttl_ms));
                let is_asked_for = kept.is_some_and(|until| until > now);
                (may_be_read || (is_asked_for && join.causes.contains(id))) && !join.is_needless
            })
    }

    /// Whether a value with this id is still to come: the outcome of an open join, or the value of one of its members
    /// that has not arrived.
    pub(crate) fn awaits(&self, id: &MessageId) -> bool {
        let Some(slot) = self.find(&id.join_of()) else {
            return self.is_detached_and_open(id);
        };
        let join = &self.joins[slot];
        match id.index_in_join() {
            None => join.result_ttl_ms.is_some() && !join.is_decided(),
            Some(index) => index < join.count && !join.has_arrived(index),
        }
    }

    fn is_detached_and_open(&self, id: &MessageId) -> bool {
        !self.loose.is_empty()
            && self.of_result(id).is_some_and(|slot| {
                let join = &self.joins[slot];
                join.result_ttl_ms.is_some() && !join.is_decided()
            })
    }

    /// Makes the join hold the message, now or when the journal names the join.
    pub(crate) fn hold(&mut self, id: JoinId, message: Handle) {
        match self.find(&id) {
            Some(slot) => self.joins[slot].held.push(message),
            None => self.early.entry(id).or_default().push(message),
        }
    }

    /// Removes the latest held message from the join's list, since it was already listed.
    pub(crate) fn list_once(&mut self, id: &JoinId) {
        match self.find(id) {
            Some(slot) => self.joins[slot].held.pop(),
            None => self.early.get_mut(id).and_then(Vec::pop),
        };
    }

    /// Lists the messages that the join holds, or will hold when the journal reaches it.
    pub(crate) fn held_by(&self, id: &JoinId) -> &[Handle] {
        match self.find(id) {
            Some(slot) => &self.joins[slot].held,
            None => self.early.get(id).map_or(&[], Vec::as_slice),
        }
    }

    /// Returns the join whose outcome is kept under this id.
    pub(crate) fn of_result(&self, id: &MessageId) -> Option<u32> {
        if id.is_join() {
            return self.find(id);
        }
        let Some(outer) = self.find(&id.join_of()) else {
            return self.find(self.loose.get(id)?);
        };
        let mut nested = self.joins[outer].nested.iter();
        nested.find_map(|join| {
            self.find(join)
                .filter(|slot| self.joins[*slot].result_ids().contains(id))
        })
    }

    /// Returns the joins that have a place in this one.
    pub(crate) fn nested(&self, slot: u32) -> impl Iterator<Item = u32> {
        let nested = self.joins[slot].nested.iter();
        nested.filter_map(|id| self.find(id))
    }

    /// Takes the messages of a join that precede it in the journal.
    pub(crate) fn take_early(&mut self, id: &JoinId) -> Vec<Handle> {
        self.early.remove(id).unwrap_or_default()
    }

    /// Takes the messages whose join is not in the journal.
    pub(crate) fn take_all_early(&mut self) -> Vec<(JoinId, Vec<Handle>)> {
        let mut early: Vec<(JoinId, Vec<Handle>)> = self.early.drain().collect();
        early.sort_unstable_by_key(|(id, _)| *id);
        early
    }

    pub(crate) fn close(&mut self, slot: u32) -> Join {
        let join = self.joins.remove(slot);
        self.by_id.remove(&join.id);
        if join.is_unsealed() {
            self.unsealed.retain(|id| *id != join.id);
        }
        for place in &join.then {
            if place.join.is_join() && place.index < JOIN_CAP {
                let of = MessageId::member(place.join, place.index);
                if self.loose.get(&of) == Some(&join.id) {
                    self.loose.remove(&of);
                }
            }
        }
        for id in &join.nested {
            let places = self.find(id).map(|slot| self.joins[slot].then.clone());
            for place in places.into_iter().flatten() {
                if place.join == join.id {
                    self.set_detached(place, *id);
                }
            }
        }
        self.unread.extend(&join.nested);
        join
    }
}

impl std::ops::Index<u32> for Joins {
    type Output = Join;

    fn index(&self, slot: u32) -> &Join {
        &self.joins[slot]
    }
}

impl std::ops::IndexMut<u32> for Joins {
    fn index_mut(&mut self, slot: u32) -> &mut Join {
        &mut self.joins[slot]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client may hold messages for sixteen million members, report the last one, and disconnect. That used to take 2
    /// MB, a pass over all members at each carry, and hundreds of megabytes in the count of live bytes, so that the
    /// journal never shrank again.
    #[test]
    fn a_join_costs_what_has_arrived_and_not_what_a_client_announces() {
        let mut joins = Joins::default();
        let slot = joins.open(
            penstock_message::MessageId([1; 16]),
            1 << 24,
            JoinPolicy::AllEnded,
        );
        let join = &mut joins[slot];
        let empty_bytes = join.journal_bytes();
        let last = (1 << 24) - 1;
        for index in [last, 0, 64, last - 1] {
            assert!(join.arrive(index));
            assert!(!join.arrive(index));
        }
        assert_eq!(join.journal_bytes(), empty_bytes + 3 * ARRIVED_WORD_BYTES);
        assert_eq!(join.arrived(), [(0, 1), (1, 1), (last / 64, 3 << 62)]);
        assert!(!join.has_arrived(1) && join.has_arrived(last));
    }
}
