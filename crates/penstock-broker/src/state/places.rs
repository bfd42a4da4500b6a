//! Places of messages in their queues: ready, delayed, or behind the mark of an operation.

use penstock_faults::planted;

use super::{Adjust, BrokerState, MARK_BYTES};
use crate::bodies::prefetch::prefetch_at;
use crate::clock::ClockTime;
use crate::messages::{EntryState, Handle};
use crate::queues::Forgettable;
use crate::queues::queue::Service;
use crate::reclaim::live_bases::Entity;
use crate::records::{Mark, MarkedFor, UnrunCause};
use crate::table::interner::Name;
use crate::timers::Timer;

impl BrokerState {
    pub(crate) fn mark(&mut self, mark: Mark) {
        self.mark_numbers = self.mark_numbers.max(mark.number);
        let base = self.position;
        mark.names().for_each(|name| self.names.hold(name));
        if let Some((was, _)) = self.marks.insert(mark.number, (mark, base)) {
            was.names().for_each(|name| self.names.release(name));
            self.live_bases.abandon();
        } else {
            self.live_bytes += MARK_BYTES;
        }
        let number = mark.number;
        self.live_bases.add(base, Entity::Mark { number });
        if mark.what == MarkedFor::Purge
            && let Some(name) = mark.queue
        {
            let index = self.queues.find_or_create(name, &mut self.names);
            let queue = &mut self.queues[index];
            let waiting = queue.ready + queue.delayed;
            let rare = queue.rare_mut();
            rare.purge_before = rare.purge_before.max(mark.before);
            rare.ending = waiting;
        }
    }

    pub(crate) fn end_mark(&mut self, number: u64) {
        let Some((mark, _)) = self.marks.remove(&number) else {
            return;
        };
        self.live_bytes -= MARK_BYTES;
        self.live_bases.abandon();
        mark.names().for_each(|name| self.names.release(name));
        if mark.what == MarkedFor::Purge
            && let Some(queue) = mark.queue.and_then(|name| self.queues.find(name))
            && self.queues[queue].rare().purge_before == mark.before
        {
            let rare = self.queues[queue].rare_mut();
            (rare.purge_before, rare.ending) = (0, 0);
            self.queues.activate(queue);
        }
    }

    /// Whether a purge covers the message, so that it has yet to end.
    pub(crate) fn is_purged(&self, slot: u32) -> bool {
        let entry = &self.messages[slot];
        (entry.is_ready() || entry.is_delayed()) && self.is_behind_mark(slot)
    }

    /// Returns how a message ends that has yet to end: clients that wait for it may already know.
    pub(crate) fn decided_end(&self, slot: u32) -> Option<UnrunCause> {
        if self.is_purged(slot) {
            return Some(UnrunCause::Purged);
        }
        self.is_blocked(slot).then_some(UnrunCause::Blocked)
    }

    /// Whether the message was published before a purge of its queue that is not over.
    pub(crate) fn is_behind_mark(&self, slot: u32) -> bool {
        let before = self.queues[self.messages.queue(slot)].rare().purge_before;
        self.messages[slot].number() < before && !planted!("lose-purge")
    }

    /// Counts the messages that wait behind marks, after a recovery.
    pub(crate) fn count_purged(&mut self) {
        if self.marks.is_empty() {
            return;
        }
        for queue in self.queues.indexes() {
            if self.queues[queue].rare().ending > 0 {
                self.queues[queue].rare_mut().ending = 0;
            }
        }
        let slots: Vec<u32> = self.messages.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            if self.is_purged(slot) {
                self.queues[self.messages.queue(slot)].rare_mut().ending += 1;
            }
        }
    }

    pub(crate) fn make_ready(&mut self, slot: u32) {
        self.messages.set_state(slot, EntryState::Ready);
        let is_unknown = self.push_ready(slot);
        self.has_new_work = true;
        let shared_head = self.messages.shared_head(slot);
        let (queue, task) = (shared_head.queue, shared_head.task);
        if is_unknown && !self.queues[queue].rare().told_unknown.contains(&task) {
            self.wait_for_unknown(queue);
        }
        self.review_service(queue);
    }

    /// Puts a ready message into its flow. Returns whether it is the first there and none of the consumers can run it.
    pub(crate) fn push_ready(&mut self, slot: u32) -> bool {
        let flow = self.flow(slot);
        self.queues.push_ready(&self.messages, slot, flow)
    }

    /// Returns the flow of messages with its shared head.
    #[inline]
    pub(super) fn flow(&mut self, slot: u32) -> u32 {
        self.messages.flow(slot).unwrap_or_else(|| {
            let flow = self.queues.acquire_flow(self.messages.shared_head(slot));
            self.messages.set_flow(slot, flow);
            flow
        })
    }

    /// Notes whether work waits that no consumer of the queue can run, after their tasks have changed.
    pub(crate) fn note_unknown(&mut self, index: u32) {
        let unknown = self.queues.unknown_tasks(index);
        let unknown: Vec<Name> = unknown.map(|(task, _)| task).collect();
        let queue = &mut self.queues[index];
        if unknown.is_empty() && !queue.has_rare() {
            return;
        }
        let queue = queue.rare_mut();
        queue.told_unknown.retain(|task| {
            let waits = unknown.contains(task);
            if !waits {
                self.names.release(*task);
            }
            waits
        });
        match unknown.iter().all(|task| queue.told_unknown.contains(task)) {
            true => queue.unknown_timer = None,
            false => self.wait_for_unknown(index),
        }
    }

    fn wait_for_unknown(&mut self, index: u32) {
        let queue = &mut self.queues[index];
        if queue.rare().unknown_timer.is_none() {
            self.generations += 1;
            queue.rare_mut().unknown_timer = Some(self.generations);
            self.newly_unknown.push(index);
        }
    }

    /// Notes whether the queue has work and no consumer to take it.
    pub(crate) fn review_service(&mut self, index: u32) {
        let queue = &mut self.queues[index];
        if queue.consumers() > 0 {
            queue.service = Service::Well;
            queue.was_served = true;
        } else if queue.service == Service::Well && queue.ready > 0 && !queue.paused {
            self.generations += 1;
            queue.service = Service::Missing {
                generation: self.generations,
            };
            self.newly_unserved.push(index);
        }
    }

    pub(super) fn delay(&mut self, slot: u32, when: ClockTime) {
        let Handle { number, slot } = self.messages.handle(slot);
        self.messages.set_state(slot, EntryState::Delayed(when));
        let queue = &mut self.queues[self.messages.queue(slot)];
        queue.delayed += 1;
        queue.delayed_bytes += self.messages.body_bytes(slot);
        match self.lacks_body(slot) {
            true => {
                let at = prefetch_at(when.at);
                self.timers
                    .set(ClockTime { at, ..when }, Timer::Prefetch { number, slot });
            }
            false => self.timers.set(when, Timer::Due { number, slot }),
        }
    }

    /// Makes a due delayed message ready. The journal has the time, so no event is needed.
    pub(crate) fn end_delay(&mut self, slot: u32) {
        let queue = &mut self.queues[self.messages.queue(slot)];
        queue.delayed -= 1;
        queue.delayed_bytes -= self.messages.body_bytes(slot);
        self.make_ready(slot);
        self.reprioritize(slot);
    }

    /// Reviews all queues after a recovery, in which many may have been served.
    pub(crate) fn review_all_service(&mut self) {
        for index in self.queues.indexes() {
            let queue = &mut self.queues[index];
            queue.service = Service::Well;
            // Its workers get time to come back.
            queue.was_served = true;
            self.review_service(index);
        }
    }

    /// Removes a message from its place; the caller decides what happens to it.
    pub(super) fn take(&mut self, slot: u32, cost_us: Option<u64>) {
        let queue = self.messages.queue(slot);
        if self.queues[queue].rare().purge_before > 0 && self.is_purged(slot) {
            let ending = &mut self.queues[queue].rare_mut().ending;
            // A replay counts them at its end.
            *ending = ending.saturating_sub(1);
        }
        match self.messages.state(slot) {
            EntryState::Failed => {
                let number = self.messages[slot].number();
                self.failed.remove(number);
                self.queues[queue].failed -= 1;
                self.queues.touch(Forgettable::Queue(queue));
            }
            EntryState::Ended => unreachable!("only its value is left of it"),
            EntryState::Ready => {
                self.queues.remove_ready(&self.messages, slot);
                let queue = &mut self.queues[queue];
                if queue.ready == 0 && matches!(queue.service, Service::Missing { .. }) {
                    queue.service = Service::Well;
                }
            }
            EntryState::Delayed(when) => {
                self.timers.abandon(when.clock);
                let queue = &mut self.queues[queue];
                queue.delayed -= 1;
                queue.delayed_bytes -= self.messages.body_bytes(slot);
            }
            EntryState::Held(_) => self.count_held(slot, Adjust::Subtract),
            EntryState::Leased(lease) => {
                if !self.progress.is_empty() {
                    let job = self.messages[slot].id;
                    self.progress.lease_ended(lease.grant.number, &job);
                }
                if self.joins.has_unsealed() {
                    let ended = lease.grant.number;
                    self.joins.abandon(|growth| growth.grant == ended);
                }
                self.queues
                    .correct_cost(&self.messages, slot, lease.charge, cost_us);
                self.queues[queue].running -= 1;
                let leases = &mut self.sessions[lease.session].leases;
                leases.swap_remove(lease.index as usize);
                if let Some(moved) = leases.get(lease.index as usize).copied()
                    && let Some(other) = self.messages.lease_state_mut(moved)
                {
                    other.index = lease.index;
                }
            }
        }
    }

    pub(super) fn set_expiry(&mut self, slot: u32) {
        if let Some(when) = self.messages.expires_at(slot) {
            let Handle { number, slot } = self.messages.handle(slot);
            self.timers.set(when, Timer::Expiry { number, slot });
        }
    }

    pub(super) fn abandon_expiry(&mut self, slot: u32) {
        if let Some(when) = self.messages.expires_at(slot) {
            self.timers.abandon(when.clock);
        }
    }
}
