//! How messages end. Every end passes through here, whatever its cause: a worker, a failure, a crash, its age, a purge,
//! a person, a lack of room. The message's value is stored or left to be derived. [`BrokerState::end`] frees its key,
//! counts the end, and reports it to the join of which the message is a member.
//!
//! A message that the broker itself ends has no value of its own in the journal. Its value is derived from how and when
//! it ended, so a million messages end in a thousand small records.

pub(crate) mod ended_values;

use std::collections::BTreeMap;

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    JoinId, JoinOutcome as Outcome, Key, Member, MessageId, Notice, ProducingRun, Space, Value,
    ValueStatus, gathered,
};

use crate::Broker;
use crate::bulk_operations::PURGED;
use crate::chores::BLOCKED;
use crate::endings::ended_values::ENDED_VALUE_BYTES;
use crate::joins::{Arrival, Join};
use crate::messages::{EntryState, Handle, UnrunEnd};
use crate::queues::tally::Counter;
use crate::records::{ENDED_AT_ONCE, Failing, RecordEvent, Renumbered, RunHead, UnrunCause};
use crate::state::{BrokerState, Ending};
use crate::table::interner::Name;

/// End of a run, or of a message that can no longer run.
pub(crate) enum RunEnd<'a> {
    /// The worker has finished the job. Its value is in the same transaction.
    Acked { cost_us: u64 },
    /// The worker has finished the run, and something else takes the place of the job.
    Replaced { cost_us: u64 },
    /// The job failed for good. `value` is the body of its result, if any client may read it.
    Failed {
        failing: Failing<'a>,
        value: Option<Bytes>,
        cost_us: Option<u64>,
    },
}

/// How and why the broker ends messages that do not run.
#[derive(Clone, Copy)]
pub(crate) struct Unrun {
    pub(crate) how: UnrunCause,
    pub(crate) reason: Name,
}

/// Reason of a job that waited for a failure that did not happen.
pub(crate) const NOT_NEEDED: &str = "it was not needed: nothing that it waited for has failed";
/// Group of the values that hold the outcomes of joins.
const OUTCOMES: &str = "penstock.groups";

/// Returns the body of a value that names the failed jobs in the order of their ids. Members of a group keep their
/// order.
pub(crate) fn upstream(causes: &[MessageId]) -> Bytes {
    let mut causes = causes.to_vec();
    causes.sort_unstable();
    let ids = causes.iter().flat_map(|id| id.0);
    ids.collect::<Vec<u8>>().into()
}

/// Class of jobs whose workers crashed too often.
pub(crate) const CRASHED: &str = "WorkerCrashed";
/// Class of jobs whose body could not be read back.
pub(crate) const UNREADABLE: &str = "Unreadable";

impl Broker {
    /// Adds one to a counter of the message's queue and task.
    #[inline]
    pub(crate) fn count(&mut self, slot: u32, what: Counter) {
        self.state.messages.count(slot, what);
    }

    /// Counts a message that has arrived from another queue.
    pub(crate) fn count_arrival(&mut self, slot: u32) {
        let queue = self.state.messages.queue(slot);
        self.state.queues.count_arrival(queue);
    }

    /// Ends a message whose run is over, or that failed without one.
    pub(crate) fn end(&mut self, slot: u32, end: RunEnd<'_>) {
        let number = self.state.messages[slot].number();
        match end {
            RunEnd::Acked { cost_us } => {
                self.counts.settled += 1;
                self.count(slot, Counter::Succeeded);
                self.record(&RecordEvent::Settled { number });
                let cost_us = Some(cost_us);
                self.state.end(slot, Ending::Acked { cost_us });
            }
            RunEnd::Replaced { cost_us } => {
                self.counts.settled += 1;
                self.count(slot, Counter::Succeeded);
                self.record(&RecordEvent::Replaced { number });
                let cost_us = Some(cost_us);
                self.state.end(slot, Ending::Replaced { cost_us });
            }
            RunEnd::Failed {
                failing,
                value,
                cost_us,
            } => {
                self.counts.failed += 1;
                self.count(slot, Counter::Failed);
                let status = match failing.crashed || cost_us.is_none() {
                    true => ValueStatus::Crashed,
                    false => ValueStatus::Failed,
                };
                self.put_result(slot, status, value);
                let is_lost = match failing.crashed {
                    true => planted!("lose-failed-job"),
                    false => planted!("forget-failed"),
                };
                if is_lost {
                    self.record(&RecordEvent::Settled { number });
                    self.state.end(slot, Ending::Acked { cost_us });
                    return;
                }
                self.record(&RecordEvent::Failed {
                    number,
                    failure: failing,
                });
                let note = failing.note.map(Bytes::copy_from_slice);
                let failure = &failing;
                self.state.end(
                    slot,
                    Ending::Failed {
                        failure,
                        note,
                        cost_us,
                    },
                );
                self.trim_failed(slot);
            }
        }
        self.follow_ends();
    }

    /// Ends waiting messages, as [`Broker::end_unrun`] does. If watchers were already told how a message ended, it ends
    /// that way.
    pub(crate) fn end_waiting(&mut self, slots: Vec<u32>, unrun: Unrun) -> usize {
        let told = |slot: &u32| self.state.decided_end(*slot);
        if !slots.iter().any(|slot| told(slot).is_some()) {
            return self.end_unrun(slots, unrun);
        }
        let of = |how| -> Vec<u32> {
            let slots = slots.iter().copied();
            slots.filter(|slot| told(slot) == how).collect()
        };
        let all =
            [None, Some(UnrunCause::Purged), Some(UnrunCause::Blocked)].map(|how| (how, of(how)));
        let ended = all.into_iter().map(|(how, slots)| {
            let unrun = match how {
                None => unrun,
                Some(how) => Unrun {
                    how,
                    reason: self.state.names.intern(match how {
                        UnrunCause::Purged => PURGED,
                        _ => BLOCKED,
                    }),
                },
            };
            self.end_unrun(slots, unrun)
        });
        ended.sum()
    }

    /// Ends messages that do not run. Returns the number of join events that this caused.
    pub(crate) fn end_unrun(&mut self, slots: Vec<u32>, unrun: Unrun) -> usize {
        if slots.is_empty() {
            return 0;
        }
        self.end_unrun_here(slots, unrun);
        self.make_room_for_ends();
        self.follow_ends()
    }

    /// Ends messages that do not run, and leaves the consequences to the caller.
    fn end_unrun_here(&mut self, mut slots: Vec<u32>, unrun: Unrun) {
        let Unrun { how, reason } = unrun;
        let messages = &self.state.messages;
        slots.sort_unstable_by_key(|slot| messages[*slot].number());
        // A flow or the timers may list a message twice.
        slots.dedup();
        let at = self.clocks.steady();
        // While space is short, values without a body are dropped first: these are not kept at all.
        let kept = self.space == Space::Plenty;
        let mut rest = &slots[..];
        while !rest.is_empty() {
            let (slots, others) = rest.split_at(self.ended_by_one_event(rest, kept));
            rest = others;
            for slot in slots {
                if kept
                    && self
                        .state
                        .messages
                        .shared_head(*slot)
                        .result_ttl_ms
                        .is_some()
                {
                    self.record_removed_value(*slot);
                }
            }
            let numbers = slots.iter().map(|slot| self.state.messages[*slot].number());
            let numbers: Vec<u64> = numbers.collect();
            self.record(&RecordEvent::EndedMany {
                how,
                reason,
                at,
                kept,
                numbers: numbers.into(),
            });
            for slot in slots {
                self.count_unrun(*slot, unrun, kept);
                let ended = UnrunEnd { how, reason, at };
                self.state.end(*slot, Ending::Unrun { ended, kept });
            }
        }
    }

    /// Returns how many of these messages, which are sorted by number, one event can end. If two copies of a message
    /// leave values, the second replaces the first. If the first copy is behind the second in the journal, it must be
    /// told of that in between.
    fn ended_by_one_event(&self, slots: &[u32], kept: bool) -> usize {
        let most = slots.len().min(ENDED_AT_ONCE);
        if !kept {
            return most;
        }
        let messages = &self.state.messages;
        let replaces = |at: usize| {
            let this = &messages[slots[at]];
            this.has_copies()
                && messages.copies(&this.id).any(|copy| {
                    let number = messages[copy].number();
                    let before = &slots[..at];
                    messages[copy].base() > this.base()
                        && before
                            .binary_search_by_key(&number, |slot| messages[*slot].number())
                            .is_ok()
                })
        };
        (1..most).find(|at| replaces(*at)).unwrap_or(most)
    }

    /// Records that the end or retry of a message removes the value of its id, if the value is behind the message in
    /// the journal. A later reader of the journal may know the value but not the message.
    pub(crate) fn record_removed_value(&mut self, slot: u32) {
        let key = Key::Result(self.state.messages[slot].id);
        if !self.state.value_stands_behind(&key, slot) {
            return;
        }
        self.record(&RecordEvent::Removed { key: key.clone() });
        if let Some(owner) = self.state.keys.owner(&key) {
            // The message that owns the key keeps it.
            let number = owner.number;
            self.record(&RecordEvent::Claimed { number, key });
        }
    }

    fn count_unrun(&mut self, slot: u32, unrun: Unrun, kept: bool) {
        let Unrun { how, reason } = unrun;
        let (count, counted) = match how {
            UnrunCause::Expired => (&mut self.counts.expired, Counter::Expired),
            UnrunCause::Displaced => (&mut self.counts.dropped, Counter::Dropped),
            UnrunCause::Purged
            | UnrunCause::Cancelled
            | UnrunCause::Blocked
            | UnrunCause::NotNeeded => (&mut self.counts.cancelled, Counter::Cancelled),
        };
        *count += 1;
        self.count(slot, counted);
        let has_value = self
            .state
            .messages
            .shared_head(slot)
            .result_ttl_ms
            .is_some();
        if has_value && !kept {
            self.state.keys.evicted += 1;
            let id = self.state.messages[slot].id;
            self.notify_of_value(&Key::Result(id), self.state.unrun_value(how, reason));
        }
    }

    /// Stores how a message ended, if any client reads its result.
    fn put_result(&mut self, slot: u32, status: ValueStatus, body: Option<Bytes>) {
        let shared_head = self.state.messages.shared_head(slot);
        let (Some(ttl_ms), Some(body)) = (shared_head.result_ttl_ms, body) else {
            return;
        };
        let (key, group) = (Key::Result(self.state.messages[slot].id), shared_head.task);
        let run = self.state.run_of(slot, self.writer.time());
        self.put(
            key,
            Value::new(status, body),
            Some(ttl_ms),
            group,
            Some(run),
        );
    }

    /// Stores a value. The only place that decides this.
    pub(crate) fn put(
        &mut self,
        key: Key,
        value: Value,
        ttl_ms: Option<u64>,
        group: Name,
        run: Option<RunHead>,
    ) {
        let expires_at = ttl_ms.map(|ttl_ms| self.clocks.steady().saturating_add(ttl_ms));
        let stored = RecordEvent::Stored {
            key,
            status: value.status,
            body: &value.body,
            group,
            expires_at,
            run,
        };
        self.writer.push(&self.state.names, &stored);
        let RecordEvent::Stored { key, .. } = stored else {
            unreachable!("it was made above")
        };
        self.state.store(key, value, group, expires_at, run);
        self.evict(group);
    }

    /// Drops the oldest results of a group that is over its cap, as many as fit into the current record. A later step
    /// continues.
    pub(crate) fn evict(&mut self, group: Name) {
        let cap_bytes = self.options.results_cap_bytes;
        while self.added < ENDED_AT_ONCE {
            let joins = &self.state.joins;
            let now = self.clocks.steady();
            let is_pinned = |key: &Key| joins.is_pinned(key, now);
            let keys = &mut self.state.keys;
            let Some(key) = keys.next_to_evict(group, cap_bytes, is_pinned) else {
                return;
            };
            self.added += 1;
            self.report_eviction(group);
            self.record(&RecordEvent::Evicted { key: key.clone() });
            self.state.drop_value(&key);
            self.state.keys.evicted += 1;
        }
        self.chores.evict(group);
    }

    /// Drops the oldest values of messages that the broker has ended, as many as fit into the current record. They
    /// count as results too. A later step continues.
    pub(crate) fn make_room_for_ends(&mut self) {
        let over = self.ended_values_over();
        self.drop_ended_values(over);
    }

    /// Returns the number of such values beyond the cap.
    pub(crate) fn ended_values_over(&self) -> u64 {
        let cap = self.options.results_cap_bytes / ENDED_VALUE_BYTES;
        self.state.ends.len.saturating_sub(cap)
    }

    /// Drops the oldest of such values before their time.
    pub(crate) fn drop_ended_values(&mut self, most: u64) {
        let room = ENDED_AT_ONCE.saturating_sub(self.added);
        let mut numbers = Vec::new();
        while (numbers.len() as u64) < most
            && numbers.len() < room
            && let Some(slot) = self.state.ends.oldest(&self.state.messages)
        {
            numbers.push(self.state.messages[slot].number());
            self.report_eviction(self.state.messages.shared_head(slot).task);
            self.state.drop_ended(slot);
            self.state.keys.evicted += 1;
        }
        if numbers.is_empty() {
            return;
        }
        self.added += numbers.len();
        numbers.sort_unstable();
        self.record(&RecordEvent::KeptDropped {
            numbers: numbers.into(),
        });
    }

    fn report_eviction(&mut self, group: Name) {
        if self.state.keys.must_report_eviction(group) {
            self.state.names.hold(group);
            let cap_bytes = self.options.results_cap_bytes;
            let group = self.state.names.text(group).to_owned();
            self.notice(Notice::Evicting { group, cap_bytes });
        }
    }

    /// Returns the value of a message that the broker has ended.
    pub(crate) fn ended_value(&self, slot: u32) -> Value {
        let ended = self.state.messages.ended(slot);
        let mut value = self.state.unrun_value(ended.how, ended.reason);
        let run = self.state.run_of(slot, self.clocks.wall_at(ended.at));
        value.run = Some(self.describe_run(self.state.messages.shared_head(slot).task, &run));
        value
    }

    pub(crate) fn describe_run(&self, task: Name, run: &RunHead) -> Box<ProducingRun> {
        Box::new(ProducingRun {
            task: self.state.names.text(task).to_owned(),
            queue: self.state.names.text(run.queue).to_owned(),
            attempt: run.attempt,
            generation: run.generation,
            ended_at: run.ended_at,
        })
    }

    // --- joins, and keys of copies

    /// Records the consequences of ends in the same record: keys that copies inherit, and ends of joins. Returns the
    /// number of events.
    pub(crate) fn follow_ends(&mut self) -> usize {
        self.record_inherited_claims() + self.settle_joins()
    }

    /// Records the keys that copies have inherited. Returns the number of events.
    fn record_inherited_claims(&mut self) -> usize {
        let inherited = std::mem::take(&mut self.state.inherited);
        for (number, key) in &inherited {
            let (number, key) = (*number, key.clone());
            self.record(&RecordEvent::Claimed { number, key });
        }
        inherited.len()
    }

    /// Ends the joins whose last member has reported, or whose outcome a failed member has decided. The members that
    /// such a join blocks report in later steps, so a chain of joins can't make this step long.
    fn settle_joins(&mut self) -> usize {
        let mut events = 0;
        while let Some(reported) = self.state.reported.pop_front() {
            let (id, index) = (reported.join, reported.index);
            let Some(slot) = self.state.joins.find(&id) else {
                continue;
            };
            if reported.must_be_told {
                match reported.arrival {
                    Arrival::Succeeded => self.record(&RecordEvent::Joined { join: id, index }),
                    Arrival::Failed(causes) => self.record(&RecordEvent::MemberFailed {
                        join: id,
                        index,
                        causes: causes.into(),
                    }),
                    Arrival::NotNeeded => {
                        self.record(&RecordEvent::MemberNotNeeded { join: id, index })
                    }
                }
                events += 1;
            }
            events += self.decide_join(slot);
        }
        events
    }

    /// Ends the join if its members have decided it. Returns the number of events.
    pub(crate) fn decide_join(&mut self, slot: u32) -> usize {
        let join: &Join = &self.state.joins[slot];
        if join.is_decided() {
            return 0;
        }
        if join.failures > join.policy.max_failures() {
            // Other joins learn that it is not needed once they wait for it again.
            return match join.failure() == Arrival::NotNeeded && self.chores.reopens(&join.id) {
                true => 0,
                false => self.fail_join(slot),
            };
        }
        // Its held messages are released once other joins wait for it again.
        if join.arrivals != join.count || self.chores.reopens(&join.id) {
            return 0;
        }
        // The record may be full of other ends, each of which causes more.
        let is_for_later = self.added > 0 && self.held_for_failure(slot).next().is_some();
        if is_for_later || self.has_many_errbacks(slot) {
            self.chores.undecided.push_back(join.id);
            return 0;
        }
        self.succeed_join(slot)
    }

    /// Whether the join holds more errbacks than one record should end.
    pub(crate) fn has_many_errbacks(&self, slot: u32) -> bool {
        self.held_for_failure(slot).nth(ENDED_AT_ONCE).is_some()
    }

    /// Ends some of the many errbacks of a join that is certain to succeed. Errbacks that are members of other joins
    /// end with the rest, since messages that wait for all of them are not needed either. Returns the number of events;
    /// `None` if there are no others.
    pub(crate) fn end_some_errbacks(&mut self, slot: u32) -> Option<usize> {
        let is_no_member = |slot: &u32| self.state.messages.member(*slot).is_none();
        let mut slots = self.held_for_failure(slot).filter(is_no_member).peekable();
        slots.peek()?;
        let slots: Vec<u32> = slots.take(self.step_size()).collect();
        let (reason, how) = (self.state.names.intern(NOT_NEEDED), UnrunCause::Cancelled);
        Some(slots.len() + self.end_unrun(slots, Unrun { how, reason }))
    }

    /// Whether the record has room for the end of a join and of all messages that are then not needed.
    pub(crate) fn has_room_to_end(&self, slot: u32) -> bool {
        let room = self.step_size();
        let slots: Vec<u32> = self.held_for_failure(slot).take(room + 1).collect();
        let left = room.checked_sub(slots.len());
        left.is_some_and(|left| self.not_needed_after(slot, &slots, left).is_some())
    }

    /// Returns the errbacks of a join: the messages that it holds in case it fails.
    fn held_for_failure(&self, join: u32) -> impl Iterator<Item = u32> {
        let is_for_failure = |slot: &u32| self.state.messages.when(*slot) == Outcome::Failed;
        self.held_slots(join).filter(is_for_failure)
    }

    /// Ends a new join that has no members.
    pub(crate) fn end_empty_join(&mut self, join: &JoinId) {
        let Some(slot) = self.state.joins.find(join) else {
            return;
        };
        if self.has_many_errbacks(slot) {
            return self.chores.undecided.push_back(*join);
        }
        self.succeed_join(slot);
        self.follow_ends();
    }

    /// Closes an unsealed join to new members, which may end it.
    pub(crate) fn seal_join(&mut self, join: JoinId, count: u32) {
        let Some(slot) = self.state.joins.find(&join) else {
            return;
        };
        self.record(&RecordEvent::JoinSealed {
            join,
            count,
            cancelled: false,
        });
        self.state.seal_join(slot, count, false);
        self.decide_join(slot);
        self.follow_ends();
    }

    /// Closes the unsealed join of a workflow that is being cancelled to new members. Returns the number of events.
    pub(crate) fn cancel_unsealed(&mut self, workflow: &MessageId, reason: Name) -> usize {
        let Some(slot) = self.state.joins.unsealed_of(workflow) else {
            return 0;
        };
        let reason = self.state.names.text(reason).to_owned();
        let mut events = 1 + self.put_outcome_of(slot, ValueStatus::Cancelled, reason.into());
        let join = &self.state.joins[slot];
        let count = join
            .growth
            .as_ref()
            .map_or(join.count, |growth| growth.members);
        self.record(&RecordEvent::JoinSealed {
            join: join.id,
            count,
            cancelled: true,
        });
        self.state.seal_join(slot, count, true);
        events += self.decide_join(slot);
        events + self.follow_ends()
    }

    /// Ends a join with too many failed members. Returns the number of events.
    fn fail_join(&mut self, slot: u32) -> usize {
        let at = self.clocks.steady();
        let id = self.state.joins[slot].id;
        let moved = self.release_behind_marks(slot);
        self.record(&RecordEvent::JoinOver { join: id, at });
        let held = match planted!("errback-per-member") && self.state.joins[slot].count > 1 {
            true => self.state.joins[slot].held.clone(),
            false => Vec::new(),
        };
        self.state.block_join(slot, at);
        self.release_again(held);
        if self.state.joins[slot].is_needless {
            return 1 + self.put_outcome(slot, ValueStatus::Cancelled);
        }
        self.chores.queue_blocked_report(id);
        1 + moved + self.free_blocked(slot) + self.put_outcome(slot, ValueStatus::Upstream)
    }

    /// Frees the keys of messages that a failed join blocks, as for failed jobs. Only a job that replaced another has a
    /// key while it is held. It does not reclaim the key when its blocker is retried. Another message may have the key
    /// by then, and the retry of one member must not refuse the rest of a workflow. Returns the number of events.
    fn free_blocked(&mut self, join: u32) -> usize {
        if self.state.keys.claims() == 0 || planted!("blocked-keeps-key") {
            return 0;
        }
        let has_key = |slot: &u32| self.state.owned_claim(*slot).is_some();
        let slots: Vec<u32> = self.held_slots(join).filter(has_key).collect();
        for slot in &slots {
            let number = self.state.messages[*slot].number();
            self.record(&RecordEvent::Unclaimed { number });
            self.state.give_up_claim(*slot);
        }
        slots.len() + self.record_inherited_claims()
    }

    /// Releases the errbacks of a join whose queues are being purged: a purge is for waiting messages, and these did
    /// not wait. Returns the number of events.
    fn release_behind_marks(&mut self, slot: u32) -> usize {
        if self.state.marks.is_empty() || planted!("purge-released") {
            return 0;
        }
        let is_covered = |slot: &u32| {
            self.state.messages.when(*slot) != Outcome::Succeeded
                && self.state.is_behind_mark(*slot)
                && !self.state.keeps_its_number(*slot)
        };
        let slots: Vec<u32> = self.held_slots(slot).filter(is_covered).collect();
        for slot in &slots {
            self.renumber(*slot, None, None);
        }
        slots.len()
    }

    /// Ends a join whose members have met its conditions. Returns the number of events.
    pub(crate) fn succeed_join(&mut self, slot: u32) -> usize {
        let mut events = 1 + self.put_outcome(slot, ValueStatus::Gathered);
        events += self.end_not_needed(slot);
        let renumbered = self.state.renumber_behind_marks(slot);
        let at = self.state.has_times(slot).then(|| self.clocks.steady());
        self.record(&RecordEvent::JoinEnded {
            join: self.state.joins[slot].id,
            released: true,
            renumbered,
            at,
        });
        self.release_join(slot, renumbered, at);
        events
    }

    /// Ends the errbacks of a join, and all messages that wait for these alone. They have neither succeeded nor failed,
    /// so messages that wait for them are not needed either. Returns the number of events.
    fn end_not_needed(&mut self, slot: u32) -> usize {
        let slots: Vec<u32> = self.held_for_failure(slot).collect();
        if slots.is_empty() {
            return 0;
        }
        let mut events = slots.len();
        let reason = self.state.names.intern(NOT_NEEDED);
        let how = UnrunCause::Cancelled;
        // Waiting messages end before those that they wait for, or these would report their end to them.
        let after = self.not_needed_after(slot, &slots, usize::MAX);
        for (join, held) in after.into_iter().flatten().rev() {
            events += held.len() + 1;
            self.end_unrun_here(held, Unrun { how, reason });
            let id = self.state.joins[join].id;
            self.record(&RecordEvent::JoinEnded {
                join: id,
                released: false,
                renumbered: None,
                at: None,
            });
            self.state.end_join(join, false, None, None);
        }
        self.end_unrun_here(slots, Unrun { how, reason });
        events
    }

    /// Returns the joins whose members are all not needed, given that these messages of another join are not, and the
    /// messages that they hold. Each precedes those that wait for its messages. Returns `None` if there are more than
    /// `most` in total.
    fn not_needed_after(
        &self,
        origin: u32,
        slots: &[u32],
        most: usize,
    ) -> Option<Vec<(u32, Vec<u32>)>> {
        let joins = &self.state.joins;
        let members = |slots: &[u32]| -> Vec<Member> {
            let members = slots.iter().map(|slot| self.state.messages.member(*slot));
            members.flatten().collect()
        };
        let mut places = members(slots);
        let mut missed: BTreeMap<u32, u32> = BTreeMap::new();
        let mut found = Vec::new();
        let mut left = most;
        while let Some(place) = places.pop() {
            let Some(slot) = joins.find(&place.join).filter(|slot| *slot != origin) else {
                continue;
            };
            let missed = missed.entry(slot).or_default();
            *missed += 1;
            let join = &joins[slot];
            if *missed == join.count && join.arrivals == 0 && !join.is_decided() {
                let held = self.held_slots(slot);
                let held: Vec<u32> = held.take(left.saturating_add(1)).collect();
                left = left.checked_sub(held.len() + 1)?;
                places.extend(members(&held));
                places.extend(&join.then);
                found.push((slot, held));
            }
        }
        Some(found)
    }

    /// Returns the messages that the join still holds.
    pub(crate) fn held_slots(&self, join: u32) -> impl Iterator<Item = u32> {
        let join = &self.state.joins[join];
        let held = join.held.iter();
        let held = held.filter(|handle| self.is_held_by(**handle, &join.id));
        held.map(|handle| handle.slot)
    }

    /// Keeps the outcome of a join as a value, if any client reads it. Returns the number of events.
    fn put_outcome(&mut self, slot: u32, status: ValueStatus) -> usize {
        let join = &self.state.joins[slot];
        if join.result_ttl_ms.is_none() {
            return 0;
        }
        let body = match status {
            ValueStatus::Gathered => gathered(join.id, join.count),
            ValueStatus::Cancelled => NOT_NEEDED.into(),
            _ => upstream(&join.causes),
        };
        self.put_outcome_of(slot, status, body)
    }

    fn put_outcome_of(&mut self, slot: u32, status: ValueStatus, body: Bytes) -> usize {
        let join = &self.state.joins[slot];
        let Some(ttl_ms) = join.result_ttl_ms else {
            return 0;
        };
        let (ids, group) = (join.result_ids(), self.state.names.intern(OUTCOMES));
        for id in &ids {
            let value = Value::new(status, body.clone());
            self.put(Key::Result(*id), value, Some(ttl_ms), group, None);
        }
        ids.len()
    }

    fn release_join(&mut self, slot: u32, renumbered: Option<Renumbered>, at: Option<u64>) {
        let held = match planted!("release-twice") {
            true => self.state.joins[slot].held.clone(),
            false => Vec::new(),
        };
        self.state.end_join(slot, true, renumbered, at);
        self.release_again(held);
    }

    /// Copies messages that a join has released, for planted bugs.
    fn release_again(&mut self, held: Vec<Handle>) {
        let is_ready = |handle: &Handle| {
            let messages = &self.state.messages;
            messages.get(*handle).is_some() && messages[handle.slot].is_ready()
        };
        let held: Vec<Handle> = held.into_iter().filter(is_ready).collect();
        for handle in held {
            // A copy needs its source in the same record.
            let body = self.state.messages.body(handle.slot).cloned();
            self.carry_message(handle.slot, &body.unwrap_or_default());
            let queue = self.state.queues[self.state.messages.shared_head(handle.slot).queue].name;
            let source = self.state.messages[handle.slot].number();
            let number = self.state.numbers + 1;
            self.record(&RecordEvent::Copied {
                number,
                source,
                queue,
            });
            self.state.copy_message(handle.slot, number, queue);
        }
    }

    /// Whether the join still holds this message.
    pub(crate) fn is_held_by(&self, handle: Handle, join: &JoinId) -> bool {
        let messages = &self.state.messages;
        messages.get(handle).is_some() && messages.state(handle.slot) == EntryState::Held(*join)
    }
}

impl BrokerState {
    /// Returns the value of a message that the broker has ended in this way.
    pub(crate) fn unrun_value(&self, how: UnrunCause, reason: Name) -> Value {
        let status = match how {
            UnrunCause::Expired => ValueStatus::Expired,
            // The jobs that blocked it are forgotten with the join.
            UnrunCause::Blocked => return Value::new(ValueStatus::Upstream, Bytes::new()),
            _ => ValueStatus::Cancelled,
        };
        let reason = self.names.text(reason);
        Value::new(status, Bytes::copy_from_slice(reason.as_bytes()))
    }
}
