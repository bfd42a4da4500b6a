//! Work that is too much for one record, done step by step.
//!
//! A purge, leases that are lost, a group that has failed: each may be about millions of messages. The
//! broker decides such a thing at once, in a small record or in none, and does it in steps: one each time
//! that the shell has polled everything, so that clients are heard in between. A step adds at most
//! [`ENDED_AT_ONCE`] events to its record. What a crash cuts short goes on after it: a [`Mark`] stands in
//! the journal until it is over, and all else follows from the state.
//!
//! On the last reserve of the disk nothing is done that needs another segment, for that is left to reclaim;
//! what frees space goes on while there is room in the segment in use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use penstock_faults::{perhaps, planted};
use penstock_message::{Durability, Filter, JoinId, Key, MessageId, OnRunning, Space};

use crate::Broker;
use crate::endings::{NOT_NEEDED, Unrun};
use crate::messages::Handle;
#[cfg(doc)]
use crate::records::Mark;
use crate::records::{ENDED_AT_ONCE, MarkedFor, RecordEvent, UnrunCause};
use crate::state::BrokerState;
use crate::table::interner::Name;

/// Leases of one session that end.
#[derive(Debug)]
struct LeasesEnd {
    session: u32,
    generation: u64,
    /// Messages and the grants that are meant.
    leases: Vec<(Handle, u64)>,
    /// Reason why their worker was lost; `None`: they are only handed back.
    crashed: Option<Bytes>,
}

#[derive(Debug, Default)]
pub(crate) struct Chores {
    leases: VecDeque<LeasesEnd>,
    /// Messages that were asked to stop, and whose leases a repaired journal has lost.
    asked: Vec<Handle>,
    /// Sessions that are forgotten once their leases have ended, with their generations.
    forgotten: Vec<(u32, u64)>,
    /// Joins that have failed, and up to where in their lists the held messages have been reported.
    blocked: VecDeque<(JoinId, usize)>,
    /// Joins whose members have all ended, and that are to end in a record with more room.
    pub(crate) undecided: VecDeque<JoinId>,
    /// Joins that are open again, and up to where the same was taken back.
    pub(crate) reopening: BTreeMap<JoinId, usize>,
    /// Keys that clients watch and that are looked at once all joins have heard of that.
    pub(crate) unsure: Vec<Key>,
    /// Groups of results that are over their cap.
    groups: BTreeSet<Name>,
    /// Queues that are over their limits, and the numbers before which their messages may be dropped.
    queues: BTreeMap<u32, u64>,
}

impl Chores {
    pub(crate) fn report_blocked_later(&mut self, join: JoinId) {
        self.reopening.remove(&join);
        self.blocked.push_back((join, 0));
    }

    /// Whether messages that a failure has blocked are still to report that.
    pub(crate) fn has_blocked_to_report(&self) -> bool {
        !self.blocked.is_empty()
    }

    /// Whether joins are open again and others are still to hear of it.
    pub(crate) fn is_reopening(&self) -> bool {
        !self.reopening.is_empty()
    }

    pub(crate) fn reopens(&self, join: &JoinId) -> bool {
        self.is_reopening() && self.reopening.contains_key(join)
    }

    pub(crate) fn evict(&mut self, group: Name) {
        self.groups.insert(group);
    }

    /// Notes that messages of the queue with lower numbers than `before` may be dropped. What came earlier and was
    /// spared may be dropped for what comes now.
    pub(crate) fn make_room(&mut self, queue: u32, before: u64) {
        self.queues.insert(queue, before);
    }

    /// Whether the queue still has to make room.
    pub(crate) fn has_queue(&self, queue: u32) -> bool {
        self.queues.contains_key(&queue)
    }

    /// Has messages end that were asked to stop, and that nobody runs.
    pub(crate) fn end_asked(&mut self, messages: Vec<Handle>) {
        self.asked = messages;
    }

    /// Whether such messages are still to be ended.
    pub(crate) fn has_asked(&self) -> bool {
        !self.asked.is_empty()
    }

    pub(crate) fn forget(&mut self, session: u32, generation: u64) {
        self.forgotten.push((session, generation));
    }

    /// Drops the ends of a session's leases: it is here again, and says which leases it holds.
    pub(crate) fn forget_leases(&mut self, session: u32) {
        self.leases.retain(|end| end.session != session);
    }

    fn is_empty(&self) -> bool {
        self.leases.is_empty()
            && self.asked.is_empty()
            && self.forgotten.is_empty()
            && self.blocked.is_empty()
            && self.undecided.is_empty()
            && self.reopening.is_empty()
            && self.unsure.is_empty()
            && self.groups.is_empty()
            && self.queues.is_empty()
    }
}

impl Broker {
    /// Whether a step would do anything.
    pub(crate) fn has_chores(&self) -> bool {
        let gives_way = self.space != Space::Plenty && self.can_give_way();
        match self.space {
            Space::NoSettlements => self.steps_fit && (gives_way || self.next_mark().is_some()),
            _ => {
                gives_way
                    || !self.chores.is_empty()
                    || !self.state.joins_needless.is_empty()
                    || self.state.joins.has_unread()
                    || !self.state.joins.abandoned.is_empty()
                    || !self.state.marks.is_empty()
                    || !self.state.waits.forward.is_empty()
                    || self.state.schedules.has_pending()
                    || self.ended_values_over() > 0
                    || self.keeps_too_much()
            }
        }
    }

    /// Whether anything is kept only for as long as there is space.
    fn can_give_way(&self) -> bool {
        self.state.ends.len > 0 || self.state.failed.len() > 0 || !self.state.joins_over.is_empty()
    }

    /// Returns the number of messages that a step may end: with each of them an arrival may need an event of its
    /// own, and a join may end, too.
    pub(crate) fn step_size(&self) -> usize {
        let mut room = ENDED_AT_ONCE.saturating_sub(self.added).min(self.budget);
        if room > 16 && perhaps!("small-steps") {
            room = 16;
        }
        match (self.state.workflows.is_empty(), self.state.joins.is_empty()) {
            (true, true) => room,
            (true, false) => room / 3,
            // The last of its jobs ends its workflow, too, and the join may free a key.
            (false, _) if self.state.keys.claims() > 0 => room / 5,
            (false, _) => room / 4,
        }
    }

    /// Goes on, after a recovery, with work that follows from the state and was not done, or not seen to be done.
    pub(crate) fn resume_chores(&mut self) {
        for (_, id) in self.state.joins_over.clone() {
            self.chores.report_blocked_later(id);
        }
        let undecided = self
            .state
            .joins
            .iter()
            .filter(|(_, join)| join.is_complete());
        self.chores
            .undecided
            .extend(undecided.map(|(_, join)| join.id));
        if self.state.joins.has_unsealed() {
            let BrokerState {
                joins,
                sessions,
                messages,
                ..
            } = &mut self.state;
            let leased = sessions.iter().flat_map(|(_, session)| &session.leases);
            let leases = leased.filter_map(|slot| messages.lease_state(*slot));
            let grants: BTreeSet<u64> = leases.map(|lease| lease.grant.number).collect();
            joins.abandon(|growth| {
                sessions.by_number(growth.session).is_none()
                    || (growth.grant > 0 && !grants.contains(&growth.grant))
            });
        }
    }

    /// Does a step of the pending work; once for each time that everything was polled.
    pub(crate) fn step(&mut self) {
        if self.budget == 0 || !self.has_chores() {
            return;
        }
        self.begin(Durability::Disk);
        match self.space {
            Space::NoSettlements => self.step_marks(),
            _ => {
                self.step_leases();
                self.step_asked();
                self.forget_sessions();
                self.step_abandoned();
                self.step_marks();
                self.step_undecided();
                self.step_blocked();
                self.step_reopened();
                self.step_needless();
                self.step_limits();
                self.step_schedules();
                self.state.prioritize_members();
            }
        }
        self.give_way();
        self.budget = 0;
        self.seal(Durability::Disk);
    }

    /// Has these leases of a session end, as far as they still hold by then.
    pub(crate) fn end_leases(&mut self, session: u32, slots: Vec<u32>, crashed: Option<Bytes>) {
        let generation = self.state.sessions[session].generation;
        let messages = &self.state.messages;
        let leases = slots.into_iter().filter_map(|slot| {
            let lease = messages.lease_state(slot)?;
            Some((messages.handle(slot), lease.grant.number))
        });
        let leases: Vec<_> = leases.collect();
        if !leases.is_empty() {
            self.chores.leases.push_back(LeasesEnd {
                session,
                generation,
                leases,
                crashed,
            });
        }
    }

    fn step_leases(&mut self) {
        while let Some(mut end) = self.chores.leases.pop_front() {
            let session = self.state.sessions.get(end.session);
            // A worker that is back keeps what it holds.
            let is_stale = end.crashed.is_some()
                && session.is_none_or(|session| session.generation != end.generation);
            if is_stale {
                continue;
            }
            while let Some((handle, grant)) = end.leases.last().copied() {
                // A crash may be a failure, with its value, and be told to a join, and end it.
                if self.step_size() < 5 {
                    self.chores.leases.push_front(end);
                    return;
                }
                end.leases.pop();
                let messages = &self.state.messages;
                let lease = messages
                    .get(handle)
                    .and_then(|_| messages.lease_state(handle.slot));
                if lease.is_none_or(|lease| lease.grant.number != grant) {
                    continue;
                }
                match &end.crashed {
                    Some(reason) => {
                        self.added += 4;
                        self.crash(handle.slot, reason.clone(), None);
                    }
                    None => {
                        // One that was asked to stop ends, which a join may have to be told.
                        self.added += 4;
                        self.return_message(handle.slot);
                    }
                }
            }
        }
    }

    fn step_asked(&mut self) {
        while self.step_size() >= 5
            && let Some(message) = self.chores.asked.pop()
        {
            let entry = self.state.messages.get(message);
            if entry.is_some_and(|entry| !entry.is_leased()) {
                self.added += 4;
                self.end_if_asked(message.slot);
            }
        }
    }

    /// No message is leased to nobody: a session is forgotten after its leases have ended.
    fn forget_sessions(&mut self) {
        let mut later = Vec::new();
        for (index, generation) in std::mem::take(&mut self.chores.forgotten) {
            let session = self.state.sessions.get(index);
            let Some(session) = session.filter(|session| session.generation == generation) else {
                continue;
            };
            if !session.leases.is_empty() || self.step_size() == 0 {
                later.push((index, generation));
                continue;
            }
            let number = session.number;
            self.added += 1;
            self.record(&RecordEvent::SessionForgotten { number });
            self.state.keys.watchers.unwatch_all(index);
            self.state.forget_session(index);
        }
        self.chores.forgotten = later;
    }

    /// Cancels workflows whose creators ended before all members had come.
    fn step_abandoned(&mut self) {
        while self.step_size() >= 4
            && let Some(id) = self.state.joins.abandoned.pop_front()
        {
            let slot = self.state.joins.find(&id);
            let join = slot.map(|slot| &self.state.joins[slot]);
            let growth = join
                .filter(|join| join.is_unsealed())
                .and_then(|join| join.growth.as_ref());
            let Some(workflow) = growth.map(|growth| growth.workflow) else {
                continue;
            };
            let filter = Filter {
                workflow: Some(workflow),
                ..Filter::default()
            };
            let mut mark = self.new_mark(MarkedFor::Cancel, &filter, ABANDONED, None);
            mark.running = OnRunning::Ask;
            self.state.workflows.mark_cancelled(workflow);
            self.begin_mark(mark);
            self.added += 1 + self.cancel_unsealed(&workflow, mark.reason);
        }
    }

    /// Ends joins for which the records in which their last members ended had no room. Of one that holds more in case it fails
    /// than any record has room for, that ends first, some at a time.
    fn step_undecided(&mut self) {
        while let Some(id) = self.chores.undecided.pop_front() {
            let slot = self.state.joins.find(&id);
            let Some(slot) = slot.filter(|slot| self.state.joins[*slot].is_complete()) else {
                continue;
            };
            let join = &self.state.joins[slot];
            let has_succeeded = join.failures <= join.policy.max_failures();
            let succeeds = has_succeeded && !self.chores.reopens(&id);
            if succeeds
                && self.has_many_errbacks(slot)
                && let Some(events) = self.end_some_errbacks(slot)
            {
                self.added += events;
                self.chores.undecided.push_front(id);
                return;
            }
            if self.added > 0 && !self.has_room_to_end(slot) {
                self.chores.undecided.push_front(id);
                return;
            }
            let events = match succeeds {
                true => self.succeed_join(slot),
                false => self.decide_join(slot),
            };
            let events = events + self.follow_ends();
            self.added = (self.added + events).min(ENDED_AT_ONCE);
        }
    }

    /// Reports the messages of a failed join to joins of their own, and tells their watchers.
    fn step_blocked(&mut self) {
        while let Some((id, told)) = self.chores.blocked.pop_front() {
            let slot = self.state.joins.find(&id);
            // One that is open again since says so itself.
            let Some(slot) = slot.filter(|slot| self.state.joins[*slot].is_over) else {
                continue;
            };
            let most = self.step_size();
            let held = &self.state.joins[slot].held;
            let some: Vec<Handle> = held.iter().skip(told).take(most).copied().collect();
            let is_all = told + some.len() >= held.len();
            if some.is_empty() && !is_all {
                self.chores.blocked.push_front((id, told));
                return;
            }
            self.added += some.len();
            let next = told + some.len();
            for handle in some {
                if self.is_held_by(handle, &id) {
                    let held = self.state.messages[handle.slot].id;
                    self.state.touch(&Key::Result(held));
                    let member = self.state.messages.member(handle.slot);
                    if member.is_some() {
                        let causes = self.state.causes_of(handle.slot);
                        let is_near = |cause: &MessageId| cause.join_of() == id;
                        if !planted!("cascade-one-level") || causes.iter().any(is_near) {
                            self.state.report_blocked(member, &causes);
                        }
                    }
                }
            }
            self.added += self.follow_ends();
            if !is_all {
                self.chores.blocked.push_front((id, next));
                return;
            }
        }
    }

    /// Ends the messages of joins that are not needed, and then the joins. What waits for those messages is not needed
    /// either.
    fn step_needless(&mut self) {
        while let Some(id) = self.state.joins_needless.pop_front() {
            let Some(slot) = self.state.joins.find(&id) else {
                continue;
            };
            let most = self.step_size();
            let slots = self.take_held(slot, most);
            let reason = self.state.names.intern(NOT_NEEDED);
            let how = UnrunCause::NotNeeded;
            self.added += self.end_unrun(slots, Unrun { how, reason });
            if !self.state.joins[slot].held.is_empty() || self.step_size() == 0 {
                self.state.joins_needless.push_front(id);
                return;
            }
            self.end_failed_join(slot);
        }
    }

    /// Takes so many messages from what a join holds.
    fn take_held(&mut self, slot: u32, most: usize) -> Vec<u32> {
        // From the end, so that what is gone costs nothing more.
        let mut slots = Vec::new();
        while slots.len() < most
            && let Some(handle) = self.state.joins[slot].held.last().copied()
        {
            self.state.joins[slot].held.pop();
            if self.is_held_by(handle, &self.state.joins[slot].id) {
                slots.push(handle.slot);
            }
        }
        self.added += slots.len();
        slots
    }

    /// Forgets a join that holds nothing any more.
    fn end_failed_join(&mut self, slot: u32) {
        self.record(&RecordEvent::JoinEnded {
            join: self.state.joins[slot].id,
            released: false,
            renumbered: None,
            at: None,
        });
        self.added += 1;
        self.state.end_join(slot, false, None, None);
    }

    fn step_limits(&mut self) {
        for group in std::mem::take(&mut self.chores.groups) {
            self.evict(group);
        }
        for (queue, before) in std::mem::take(&mut self.chores.queues) {
            self.make_room(queue, before);
        }
        self.make_room_for_ends();
        self.trim_kept();
    }

    /// Drops things that are kept for people while space is short: first values without a body, then failed
    /// jobs, then messages that failed groups have blocked; the oldest of each first.
    fn give_way(&mut self) {
        if self.space == Space::Plenty {
            return;
        }
        self.drop_ended_values(u64::MAX);
        if self.state.ends.len == 0 {
            self.drop_oldest_failed(usize::MAX);
        }
        if self.state.failed.len() == 0 {
            self.drop_oldest_join();
        }
    }

    /// Ends the messages of the oldest failed join, and then the join.
    pub(crate) fn drop_oldest_join(&mut self) {
        while let Some((_, first)) = self.state.joins_over.first().copied() {
            let going = self.state.failed.going.take();
            let id = going.unwrap_or(first);
            let slot = self.state.joins.find(&id);
            let Some(slot) = slot.filter(|slot| self.state.joins[*slot].is_over) else {
                continue;
            };
            // With each of them another join may be given up.
            let most = self.step_size() / 2;
            let slots = self.take_held(slot, most);
            self.state.failed.dropped += slots.len() as u64;
            if self.space != Space::Plenty {
                self.report_dropped();
            }
            let reason = self.state.names.intern(BLOCKED);
            let how = UnrunCause::Blocked;
            let outer = self.joins_of(&slots);
            self.added += self.end_unrun(slots, Unrun { how, reason });
            self.added += self.give_up(outer);
            if !self.state.joins[slot].held.is_empty() || self.step_size() == 0 {
                self.state.failed.going = Some(id);
                return;
            }
            let then = self.state.joins[slot].then.iter();
            let outer = then.take(self.step_size() - 1).map(|place| place.join);
            let outer = outer.collect();
            self.end_failed_join(slot);
            self.added += self.give_up(outer);
            if self.space == Space::Plenty {
                return;
            }
        }
    }
}

/// Reason of jobs of a workflow that was not sent whole.
const ABANDONED: &str = "its creator ended before it was complete";
/// Reason of a job whose join has failed.
pub(crate) const BLOCKED: &str = "a member of the group it waited for has failed";
