//! Does work that is too much for one record, step by step.
//!
//! A purge, lost leases or a failed group may each concern millions of messages. The broker decides such work at once,
//! in a small record or in none, and does it in steps. It takes one step each time the shell has polled everything, so
//! that clients are served in between. A step adds at most [`ENDED_AT_ONCE`] events to its record. Work that a crash
//! interrupts continues afterwards: a [`Mark`] stays in the journal until it is over, and everything else follows from
//! the state.
//!
//! On the last reserve of the disk, work that needs another segment waits, since that segment is left for reclaim. Work
//! that frees space continues while the segment in use has room.

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
    /// Messages, each with the grant whose lease ends.
    leases: Vec<(Handle, u64)>,
    /// Reason why their worker was lost; `None` if they are only returned.
    crashed: Option<Bytes>,
}

#[derive(Debug, Default)]
pub(crate) struct Chores {
    leases: VecDeque<LeasesEnd>,
    /// Messages that were asked to stop, and whose leases are missing from a repaired journal.
    asked: Vec<Handle>,
    /// Sessions to forget once their leases have ended, with their generations.
    forgotten: Vec<(u32, u64)>,
    /// Failed joins, and how many of their held messages have been reported.
    blocked: VecDeque<(JoinId, usize)>,
    /// Joins whose members have all ended, and which end in a later record with more room.
    pub(crate) undecided: VecDeque<JoinId>,
    /// Reopened joins, and how many of their held messages' reports have been withdrawn.
    pub(crate) reopening: BTreeMap<JoinId, usize>,
    /// Watched keys to check again once all joins know about the reopening.
    pub(crate) unsure: Vec<Key>,
    /// Groups of results that are over their cap.
    groups: BTreeSet<Name>,
    /// Queues over their limits, and the number before which their messages may be dropped.
    queues: BTreeMap<u32, u64>,
}

impl Chores {
    pub(crate) fn queue_blocked_report(&mut self, join: JoinId) {
        self.reopening.remove(&join);
        self.blocked.push_back((join, 0));
    }

    /// Whether messages that a failure has blocked have yet to be reported.
    pub(crate) fn has_blocked_to_report(&self) -> bool {
        !self.blocked.is_empty()
    }

    /// Whether reopened joins have yet to be reported to other joins.
    pub(crate) fn is_reopening(&self) -> bool {
        !self.reopening.is_empty()
    }

    pub(crate) fn reopens(&self, join: &JoinId) -> bool {
        self.is_reopening() && self.reopening.contains_key(join)
    }

    pub(crate) fn evict(&mut self, group: Name) {
        self.groups.insert(group);
    }

    /// Notes that messages of the queue with lower numbers than `before` may be dropped. Earlier messages that were
    /// spared may be dropped for newer ones.
    pub(crate) fn make_room(&mut self, queue: u32, before: u64) {
        self.queues.insert(queue, before);
    }

    /// Whether the queue still has to make room.
    pub(crate) fn has_queue(&self, queue: u32) -> bool {
        self.queues.contains_key(&queue)
    }

    /// Schedules the end of messages that were asked to stop and that no worker runs.
    pub(crate) fn end_asked(&mut self, messages: Vec<Handle>) {
        self.asked = messages;
    }

    /// Whether such messages have yet to end.
    pub(crate) fn has_asked(&self) -> bool {
        !self.asked.is_empty()
    }

    pub(crate) fn forget(&mut self, session: u32, generation: u64) {
        self.forgotten.push((session, generation));
    }

    /// Drops the pending ends of a session's leases: the session is back and says which leases it holds.
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

    /// Whether anything is kept only while there is space.
    fn can_give_way(&self) -> bool {
        self.state.ends.len > 0 || self.state.failed.len() > 0 || !self.state.joins_over.is_empty()
    }

    /// Returns the number of messages that a step may end. Each may need another event for its arrival at a join, and
    /// may end that join.
    pub(crate) fn step_size(&self) -> usize {
        let mut room = ENDED_AT_ONCE.saturating_sub(self.added).min(self.budget);
        if room > 16 && perhaps!("small-steps") {
            room = 16;
        }
        match (self.state.workflows.is_empty(), self.state.joins.is_empty()) {
            (true, true) => room,
            (true, false) => room / 3,
            // The last job of a workflow ends that too, and the join may free a key.
            (false, _) if self.state.keys.claims() > 0 => room / 5,
            (false, _) => room / 4,
        }
    }

    /// Resumes, after a recovery, work that follows from the state and was not done, or not seen to be done.
    pub(crate) fn resume_chores(&mut self) {
        for (_, id) in self.state.joins_over.clone() {
            self.chores.queue_blocked_report(id);
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

    /// Does one step of the pending work. Called once each time everything has been polled.
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

    /// Ends these leases of a session in steps, as far as they still hold by then.
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
            // A worker that is back keeps the leases it holds.
            let is_stale = end.crashed.is_some()
                && session.is_none_or(|session| session.generation != end.generation);
            if is_stale {
                continue;
            }
            while let Some((handle, grant)) = end.leases.last().copied() {
                // A crash may become a failure with a value, be reported to a join, and end it.
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
                        // A message that was asked to stop ends, which a join may have to learn.
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

    /// Forgets sessions whose leases have ended; no message may be leased to a session that does not exist.
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

    /// Cancels workflows whose creators ended before all members had arrived.
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

    /// Ends joins that the records of their last members had no room for. If a join holds more errbacks than a record
    /// has room for, these end first, a few at a time.
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

    /// Reports the messages of a failed join to their own joins, and notifies their watchers.
    fn step_blocked(&mut self) {
        while let Some((id, told)) = self.chores.blocked.pop_front() {
            let slot = self.state.joins.find(&id);
            // A join that has reopened since reports that itself.
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

    /// Ends the messages of joins that are not needed, and then the joins. Messages that wait for those are not needed
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

    /// Takes up to `most` messages from those that a join holds.
    fn take_held(&mut self, slot: u32, most: usize) -> Vec<u32> {
        // From the end, so that messages that are gone cost nothing more.
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

    /// Forgets a join that no longer holds anything.
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

    /// Drops data that is kept for people while space is short: first values without a body, then failed jobs, then
    /// messages blocked by failed groups. Within each kind the oldest go first.
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
            // Each may cause another join to be given up.
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

/// Reason of jobs whose workflow was never completely sent.
const ABANDONED: &str = "its creator ended before it was complete";
/// Reason of a job whose join has failed.
pub(crate) const BLOCKED: &str = "a member of the group it waited for has failed";
