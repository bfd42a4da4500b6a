//! Hands out work, and runs timers.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_jobs::{Blame, CrashEnd, CrashHead, crashed};
use penstock_message::{
    Delivery, Due, Durability, Extras, Failure, JoinOutcome as Outcome, Key, Message, Notice, Space,
};

use crate::Broker;
use crate::clock::{ClockTime, Clocks};
use crate::connections::{UnsentDelivery, truncate};
use crate::endings::{CRASHED, RunEnd, Unrun};
use crate::held_effects::{Effect, SafeAfter};
use crate::messages::shared_heads::SharedHead;
use crate::messages::{EntryState, Handle};
use crate::queues::queue::{Queue, Service};
use crate::queues::tally::Counter;
use crate::records::{Change, ENDED_AT_ONCE, Failing, Grant, Mark, RecordEvent, UnrunCause};
use crate::state::BrokerState;
use crate::table::interner::Name;
use crate::timers::Timer;

/// Returns the interval after which an expired but pinned value is checked again, by the time since it expired. A
/// failed job may pin a million inputs for a month, and checking each once a minute would leave no time for anything
/// else.
fn pinned_for_ms(over_for_ms: u64) -> u64 {
    const LEAST_MS: u64 = 60_000;
    const MOST_MS: u64 = 3_600_000;
    over_for_ms.clamp(LEAST_MS, MOST_MS)
}

/// Maximum number of jobs that may start while the disk has no space for leases. Unless their outcomes are large, they
/// fit into the reserve for settlements, which is at least 2 MiB.
const STARTED_ON_FULL_DISK: usize = 16;

impl Broker {
    /// Hands ready messages to the connections that want work, one each in turn.
    pub(crate) fn hand_out(&mut self) {
        // Timers run first, so that a message that expired while inputs were handled is not handed out.
        self.run_timers();
        let mut may_start = self.may_start();
        if may_start == 0 || !std::mem::take(&mut self.state.has_new_work) {
            return;
        }
        // A message that may be delivered only once must not be handed out again because its grant was lost in a crash,
        // so its delivery waits for the grant. All other grants ride along for free.
        let mut durability = Durability::None;
        self.begin(durability);
        while let Some(queue) = self.state.queues.next_in_ring() {
            // An end may have to be reported to a join, and end that too.
            if self.added + 3 > ENDED_AT_ONCE || may_start == 0 {
                // The record or the disk is full; the next record continues.
                self.state.queues.activate_first(queue);
                self.state.has_new_work = true;
                break;
            }
            match self.hand_out_one(queue) {
                HandOutOutcome::Overdue { slot } => {
                    // It ends at once, since its flow may list it a second time.
                    durability = Durability::Disk;
                    self.must_be_safe();
                    self.state.push_ready(slot);
                    self.expire(&mut vec![slot]);
                    self.state.queues.activate_first(queue);
                }
                HandOutOutcome::Cancelled { slot, mark } => {
                    durability = Durability::Disk;
                    self.must_be_safe();
                    self.state.push_ready(slot);
                    self.end_cancelled(slot, &mark);
                    self.state.queues.activate_first(queue);
                }
                HandOutOutcome::Done { must_be_safe } => {
                    self.counts.delivered += 1;
                    self.added += 1;
                    may_start -= 1;
                    self.state.queues.activate(queue);
                    if must_be_safe {
                        durability = Durability::Disk;
                    }
                }
                HandOutOutcome::NothingReady => {}
            }
        }
        self.seal(durability);
    }

    /// Returns how many jobs may start given the space on the disk. While space is short they start a few at a time,
    /// since each job that ends frees space. If all data on the disk were jobs waiting to run, nothing else would ever
    /// free any.
    fn may_start(&mut self) -> usize {
        if self.space < Space::NoLeases {
            self.fewest_running = None;
            return usize::MAX;
        }
        if self.space > Space::NoLeases {
            return 0;
        }
        let sessions = self.state.sessions.iter();
        let running = sessions.map(|(_, session)| session.leases.len()).sum();
        // Jobs that ran before may run for long, and do not count.
        let fewest = self.fewest_running.map_or(running, |few| few.min(running));
        self.fewest_running = Some(fewest);
        (fewest + STARTED_ON_FULL_DISK).saturating_sub(running)
    }

    fn hand_out_one(&mut self, queue: u32) -> HandOutOutcome {
        let BrokerState {
            queues, messages, ..
        } = &mut self.state;
        let (consumers, connections) = (&mut self.consumers, &mut self.connections);
        let taken = queues.take_next(queue, messages, |waiter| {
            consumers.wants(waiter, queue, connections)
        });
        let Some((waiter, slot, charge)) = taken else {
            return HandOutOutcome::NothingReady;
        };
        if let Some(when) = messages.expires_at(slot)
            && self.clocks.is_due(when)
            && !planted!("deliver-expired")
        {
            // Its timer is one of many and has not fired yet.
            queues.refund(messages, slot, charge);
            queues.enroll_first(queue, consumers.tasks_of(waiter), waiter);
            return HandOutOutcome::Overdue { slot };
        }
        if let Some(mark) = self.state.mark_that_cancels(slot)
            && !planted!("start-while-cancelling")
        {
            // The steps of an operation under way have not reached it.
            let BrokerState {
                queues, messages, ..
            } = &mut self.state;
            queues.refund(messages, slot, charge);
            queues.enroll_first(queue, self.consumers.tasks_of(waiter), waiter);
            return HandOutOutcome::Cancelled { slot, mark };
        }
        let BrokerState {
            queues,
            messages,
            sessions,
            ..
        } = &mut self.state;
        let (consumers, connections) = (&mut self.consumers, &mut self.connections);
        let (conn, consumer) = consumers.owner_of(waiter);
        let connection = connections.get_mut(&conn).expect("it takes work");
        connection.unsent += 1;
        if consumers.was_served(waiter, queue, connection) {
            queues.enroll(queue, consumers.tasks_of(waiter), waiter);
        }
        messages.count(slot, Counter::Started);
        let session = connection.session;
        let session_number = sessions[session].number;
        let number = messages[slot].number();
        let must_be_safe =
            messages.shared_head(slot).max_deliveries == 1 && !planted!("lend-unsafely");
        let mut safe_after = match planted!("deliver-before-durable") {
            true => SafeAfter::default(),
            false => messages.safe_after(slot),
        };
        if must_be_safe {
            safe_after.add(self.state.position, Durability::Disk);
        }
        self.end_claim_at_start(slot);
        let grant = Grant {
            epoch: self.epoch,
            number: self.state.grants + 1,
            started_at: self.clocks.wall(),
        };
        self.record(&RecordEvent::Granted {
            number,
            session: session_number,
            grant,
        });
        self.state.lease(slot, session, grant, Some(charge), false);
        let message = Handle { number, slot };
        self.effect(
            safe_after,
            Effect::Deliver {
                conn,
                consumer,
                message,
                grant: grant.number,
            },
        );
        HandOutOutcome::Done { must_be_safe }
    }

    /// Frees the key of a message whose claim ends when it starts. It must be called before the message is leased:
    /// after that, neither a retry nor a crash restores the claim.
    pub(crate) fn end_claim_at_start(&mut self, slot: u32) {
        let messages = &self.state.messages;
        if messages.until_start(slot).is_none() {
            return;
        }
        let number = messages[slot].number();
        self.record(&RecordEvent::Unclaimed { number });
        match planted!("claim-retaken-on-retry") {
            true => self.state.free_claim(slot),
            false => self.state.give_up_claim(slot),
        }
    }

    pub(crate) fn run_timers(&mut self) {
        let mut is_begun = false;
        let mut durability = Durability::None;
        let mut overdue = Vec::new();
        // On the last reserve of the disk all timers wait, since their work may take space.
        while self.budget > 0
            && self.space != Space::NoSettlements
            && let Some(timer) = self.state.timers.pop(&self.clocks)
        {
            if !planted!("expire-at-once") {
                self.budget -= 1;
            }
            if !is_begun {
                // Clients may wait for anything that a timer ends, so effects wait for the disk.
                is_begun = true;
                self.begin(Durability::Disk);
            }
            if let Timer::Expiry { number, slot } = timer {
                if self.is_overdue(Handle { number, slot }) {
                    durability = Durability::Disk;
                    overdue.push(slot);
                }
            } else {
                self.expire(&mut overdue);
                self.run_timer(timer);
            }
            if self.step_size() <= overdue.len() && !planted!("expire-at-once") {
                break;
            }
        }
        if is_begun {
            self.expire(&mut overdue);
            self.seal(durability);
            self.reading.prefetch.sort();
        }
    }

    fn run_timer(&mut self, timer: Timer) {
        match timer {
            Timer::Due { number, slot } => {
                if self.state.messages.get(Handle { number, slot }).is_some()
                    && let EntryState::Delayed(when) = self.state.messages.state(slot)
                {
                    debug_assert!(self.clocks.is_due(when));
                    self.state.end_delay(slot);
                }
            }
            Timer::Prefetch { number, slot } => {
                if self.state.messages.get(Handle { number, slot }).is_some()
                    && let EntryState::Delayed(when) = self.state.messages.state(slot)
                {
                    self.state.timers.set(when, Timer::Due { number, slot });
                    self.prefetch(Handle { number, slot });
                }
            }
            Timer::Expiry { .. } => unreachable!("these are ended together"),
            Timer::ValueExpiry(value) => {
                let Some(stored) = self.state.keys.get(value) else {
                    return;
                };
                let now = self.clocks.steady();
                let (key, at) = (stored.key(), stored.expires_at().unwrap_or(now));
                if self.state.joins.is_pinned(&key, now) && !planted!("unpin-early") {
                    let later = now.saturating_add(pinned_for_ms(now.saturating_sub(at)));
                    let timer = Timer::ValueExpiry(value);
                    self.state.timers.set(ClockTime::steady(later), timer);
                } else if !planted!("keep-key") {
                    self.state.drop_value(&key);
                }
            }
            Timer::EndedValues { ttl_ms } => {
                self.state.ends.timed.remove(&ttl_ms);
                let now = self.clocks.steady();
                let mut first_pinned = None;
                let mut has_dropped = false;
                while self.budget > 0
                    && let Some((slot, _)) = self.state.first_ended_before(ttl_ms, now)
                    && first_pinned != Some(slot)
                {
                    self.budget -= 1;
                    let key = Key::Result(self.state.messages[slot].id);
                    if self.state.joins.is_pinned(&key, now) {
                        first_pinned = first_pinned.or(Some(slot));
                        self.state.ends.move_first_to_back(ttl_ms);
                    } else {
                        has_dropped = true;
                        self.state.drop_ended(slot);
                    }
                }
                let left = self.state.first_ended_before(ttl_ms, now);
                match left.filter(|_| first_pinned.is_some() && !has_dropped) {
                    Some((_, over_for_ms)) => {
                        self.state.ends.timed.insert(ttl_ms);
                        let later = now.saturating_add(pinned_for_ms(over_for_ms));
                        let timer = Timer::EndedValues { ttl_ms };
                        self.state.timers.set(ClockTime::steady(later), timer);
                    }
                    None => self.state.wait_for_ended_values(ttl_ms),
                }
            }
            Timer::Workflows => self.forget_old_workflows(),
            Timer::Deadline { workflow } => self.end_overdue_workflow(workflow),
            Timer::Schedule { number, at } => self.state.schedules.wake(number, at),
            Timer::FailedJobs => {
                self.state.failed.is_timed = false;
                // Old failed jobs are dropped in steps, the last of which sets the timer again.
                if !self.keeps_too_much() {
                    self.state.wait_for_failed_jobs();
                }
            }
            Timer::LeasesLost {
                session,
                generation,
            } => {
                let is_away = |session: &crate::sessions::BrokerSession| {
                    session.generation == generation && !planted!("keep-leases")
                };
                if self.state.sessions.get(session).is_some_and(is_away) {
                    self.lose_leases(session);
                }
            }
            Timer::Forget {
                session: index,
                generation,
            } => {
                let Some(session) = self.state.sessions.get(index) else {
                    return;
                };
                if session.generation != generation {
                    return;
                }
                if !session.leases.is_empty() {
                    self.lose_leases(index);
                }
                self.chores.forget(index, generation);
            }
            Timer::Unknown {
                queue: index,
                generation,
            } => {
                let queue = self.state.queues.get(index);
                if queue.is_some_and(|queue| queue.rare().unknown_timer == Some(generation)) {
                    self.report_unknown_tasks(index);
                }
            }
            Timer::Unserved {
                queue: index,
                generation,
            } => {
                let is_covered = |queue: &Queue| queue.service == Service::Missing { generation };
                if self.state.queues.get(index).is_some_and(is_covered) {
                    let queue = &mut self.state.queues[index];
                    queue.service = Service::Told;
                    let notice = Notice::Unserved {
                        queue: self.state.names.text(queue.name).to_owned(),
                        waiting: queue.ready,
                        for_ms: self.options.patience_ms(queue.was_served),
                    };
                    self.notice(notice);
                }
            }
            Timer::Unused(what) => self.review_use(what),
        }
    }

    /// Sends one notice for each task that has waiting jobs and is unknown to every worker of the queue.
    fn report_unknown_tasks(&mut self, index: u32) {
        let unknown: Vec<(Name, usize)> = self.state.queues.unknown_tasks(index).collect();
        let queue = &mut self.state.queues[index];
        let name = queue.name;
        let queue = queue.rare_mut();
        queue.unknown_timer = None;
        let new = unknown
            .iter()
            .filter(|(task, _)| !queue.told_unknown.contains(task));
        let Some((task, _)) = new.clone().next().copied() else {
            return;
        };
        let notice = Notice::UnknownTask {
            queue: self.state.names.text(name).to_owned(),
            task: self.state.names.text(task).to_owned(),
            others: new.clone().count() as u64 - 1,
            waiting: new.map(|(_, ready)| *ready as u64).sum(),
        };
        let told = unknown.into_iter().map(|(task, _)| task).collect();
        let names = &mut self.state.names;
        let was_told = std::mem::replace(&mut queue.told_unknown, told);
        queue.told_unknown.iter().for_each(|task| names.hold(*task));
        was_told.iter().for_each(|task| names.release(*task));
        self.notice(notice);
    }

    /// Ends a message that has expired, unless it runs.
    fn is_overdue(&mut self, handle: Handle) -> bool {
        let messages = &mut self.state.messages;
        if messages.get(handle).is_none() || planted!("deliver-expired") {
            return false;
        }
        if let Some(lease) = messages.lease_state_mut(handle.slot) {
            lease.expired = true;
            return false;
        }
        // A message that has replaced another has its number, and another time.
        let at = messages.expires_at(handle.slot);
        if !at.is_some_and(|at| self.clocks.is_due(at)) {
            return false;
        }
        // A message whose end was already reported does not end in another way.
        !self.state.messages[handle.slot].is_failed()
            && self.state.decided_end(handle.slot).is_none()
    }

    /// Ends expired messages.
    fn expire(&mut self, overdue: &mut Vec<u32>) {
        if overdue.is_empty() {
            return;
        }
        let reason = self.state.names.intern("");
        let how = UnrunCause::Expired;
        self.added += overdue.len();
        self.added += self.end_unrun(std::mem::take(overdue), Unrun { how, reason });
    }

    /// Ends the leases of a worker that did not come back in time, in steps.
    fn lose_leases(&mut self, session: u32) {
        let heartbeat_ms = self.state.sessions[session].heartbeat_ms;
        let seconds = heartbeat_ms as f64 / 1000.0;
        let reason = Bytes::from(format!("worker lost: no heartbeat for {seconds} s"));
        let lost = self.state.sessions[session].leases.clone();
        self.end_leases(session, lost, Some(reason));
        self.state.keys.watchers.unwatch_all(session);
    }

    /// Handles the death of a message's worker: returns the message to its queue, delays it, or fails it after too many
    /// crashes. `blame` is set if its process died, not if its worker was lost.
    pub(crate) fn crash(&mut self, slot: u32, reason: Bytes, blame: Option<Blame>) {
        if self.end_if_asked(slot) {
            return;
        }
        let number = self.state.messages[slot].number();
        self.count(slot, Counter::Crashed);
        let head = self.crash_head(slot);
        let (suspects, delay_ms) = match crashed(head, blame) {
            CrashEnd::Failed { .. } => return self.fail_by_itself(slot, true, CRASHED, &reason),
            // The record only says that it crashed; the state does the counting.
            CrashEnd::Again {
                suspects, delay_ms, ..
            } => (suspects, delay_ms),
        };
        if suspects != head.suspects {
            self.put_under_suspicion(slot, Bytes::new());
        }
        let waits = delay_ms > 0 && !planted!("crash-runs-at-once");
        let due = waits.then(|| self.clocks.resolve_start(Due::AfterMs(delay_ms)));
        if self.state.is_behind_mark(slot) || self.is_spared(slot) || due.is_some() {
            // Purges and cancellations are for waiting messages. This one was running, so it gets a number behind the
            // mark. If it is delayed it goes behind the ready messages, as a retry does.
            return self.renumber(slot, Some(&reason), due);
        }
        self.record(&RecordEvent::Crashed {
            number,
            reason: &reason,
        });
        self.state.crash_message(slot, reason);
    }

    /// Handles the death of a worker process that ran the message, alone or with others: returns the message to its
    /// queue, or fails it after too many such deaths.
    pub(crate) fn suspect(&mut self, slot: u32, reason: Bytes) {
        if self.end_if_asked(slot) {
            return;
        }
        if planted!("suspect-counted-as-crash") {
            return self.crash(slot, reason, Some(Blame::Guilty));
        }
        match crashed(self.crash_head(slot), Some(Blame::Suspected)) {
            CrashEnd::Failed { .. } => {
                self.count(slot, Counter::Crashed);
                return self.fail_by_itself(slot, true, CRASHED, &reason);
            }
            CrashEnd::Again { .. } => {}
        }
        self.put_under_suspicion(slot, reason);
        self.return_message(slot);
    }

    fn put_under_suspicion(&mut self, slot: u32, reason: Bytes) {
        let number = self.state.messages[slot].number();
        self.record(&RecordEvent::Suspected {
            number,
            reason: &reason,
        });
        self.state.suspect_message(slot, reason);
    }

    fn crash_head(&self, slot: u32) -> CrashHead {
        let shared_head = self.state.messages.shared_head(slot);
        let extras = self.state.messages.extras(slot);
        CrashHead {
            crashes: shared_head.crashes,
            suspects: extras.map_or(0, |extras| extras.suspects),
            max_deliveries: shared_head.max_deliveries,
        }
    }

    /// Renumbers a message that starts to wait behind a purge, or until it is due: its lease ended without an outcome,
    /// or a join held it.
    pub(crate) fn renumber(&mut self, slot: u32, crashed: Option<&Bytes>, due: Option<ClockTime>) {
        let lease = self.state.messages.lease_state(slot);
        let was_sent = lease.is_some_and(|lease| lease.sent);
        let number = self.state.messages[slot].number();
        let change = Change {
            to: self.state.numbers + 1,
            queue: self.state.queues[self.state.messages.queue(slot)].name,
            due,
            next_attempt: false,
            crashed: crashed.is_some(),
            redelivered: true,
            was_sent: was_sent || crashed.is_some(),
            note: crashed.map(|reason| &reason[..]),
            expires_at: None,
        };
        self.record(&RecordEvent::Moved { number, change });
        self.state
            .move_message(slot, &change, crashed.cloned(), None);
    }

    /// Fails a message that the broker finds can't be run, for this reason. Clients that wait for its result learn of
    /// it.
    pub(crate) fn fail_by_itself(&mut self, slot: u32, crashed: bool, class: &str, reason: &Bytes) {
        let text = String::from_utf8_lossy(reason);
        let failing = Failing {
            to: self.state.numbers + 1,
            crashed,
            is_displaced: false,
            class: self.state.names.intern(class),
            message: truncate(&text, Failure::TEXT_CAP_BYTES),
            // Crashes of one task are all alike, as far as the broker can tell.
            fingerprint: self.state.fingerprint(slot, class),
            preview: &[],
            note: Some(reason),
            at: self.clocks.steady(),
        };
        let end = RunEnd::Failed {
            failing,
            value: Some(reason.clone()),
            cost_us: None,
        };
        self.end(slot, end);
    }
}

enum HandOutOutcome {
    /// The message has expired. It is in no queue now.
    Overdue {
        slot: u32,
    },
    /// An operation under way cancels the message. It is in no queue now.
    Cancelled {
        slot: u32,
        mark: Mark,
    },
    Done {
        must_be_safe: bool,
    },
    NothingReady,
}

impl BrokerState {
    /// Whether the message is handed out but can't be sent before its body has been read back.
    pub(crate) fn awaits_body(&self, message: Handle) -> bool {
        self.messages.get(message).is_some() && self.messages.is_sent_after_read(message.slot)
    }

    /// Whether the message has a body that is not in memory.
    pub(crate) fn lacks_body(&self, slot: u32) -> bool {
        self.messages.body(slot).is_none() && self.messages.body_at(slot).length() > 0
    }

    /// Returns the body to send. It need not stay in memory after that, if it can be read again.
    fn body_to_send(&mut self, slot: u32) -> Bytes {
        let can_be_read =
            self.resident_limit.is_some() && self.messages[slot].base() <= self.durable;
        let body = match can_be_read {
            true => self.messages.take_body(slot),
            false => self.messages.body(slot).cloned(),
        };
        body.unwrap_or_default()
    }

    fn extras_to_send(shared_head: &SharedHead, extras: Option<Extras>) -> Option<Box<Extras>> {
        if extras.is_none() && shared_head.generation == 0 {
            return None;
        }
        let extras = Extras {
            generation: shared_head.generation,
            attempts_before: shared_head.attempts_before,
            ..extras.unwrap_or_default()
        };
        extras.boxed()
    }

    /// Returns the delivery of a hand-out that still holds. From here on the job may have begun.
    pub(crate) fn delivery(
        &mut self,
        waiting: &UnsentDelivery,
        clocks: &Clocks,
    ) -> Option<Delivery> {
        self.messages.get(waiting.message)?;
        let slot = waiting.message.slot;
        let lease = self.messages.lease(slot)?;
        if lease.grant != waiting.grant {
            return None;
        }
        let body = self.body_to_send(slot);
        if let Some(held) = self.messages.lease_state_mut(slot) {
            held.sent = true;
        }
        let entry = &self.messages[slot];
        let shared_head = self.messages.shared_head(slot);
        let expires_at = self.messages.expires_at(slot);
        let (notes, extras) = (self.messages.notes(slot), self.messages.whole_extras(slot));
        let inputs = extras.as_ref().and_then(|extras| extras.inputs);
        let when = extras
            .as_ref()
            .map_or(Outcome::Succeeded, |extras| extras.when);
        Some(Delivery {
            inputs: self.inputs_to_send(inputs, when),
            deadline: self.deadline_of(slot, clocks),
            lease,
            consumer: waiting.consumer,
            queue: self
                .names
                .text(self.queues[shared_head.queue].name)
                .to_owned(),
            redelivered: entry.redelivered(),
            message: Message {
                id: entry.id,
                task: self.names.text(shared_head.task).to_owned(),
                priority: shared_head.priority,
                expires_at: expires_at.map(|when| Due::At(when.at)),
                result_ttl_ms: shared_head.result_ttl_ms,
                max_deliveries: shared_head.max_deliveries,
                attempt: shared_head.attempt,
                crashes: shared_head.crashes,
                enqueued_at: entry.enqueued_at(),
                notes: notes.to_vec(),
                body,
                extras: Self::extras_to_send(shared_head, extras),
            },
        })
    }
}
