//! Progress of joins: members that report, and messages that are released or blocked.

use penstock_faults::planted;
use penstock_message::{
    JoinId, JoinOutcome as Outcome, JoinPolicy, Member, MessageId, ReleaseTimes, WorkflowState,
};

use super::{Adjust, BrokerState};
use crate::Position;
use crate::clock::ClockTime;
use crate::joins::{Amount, Arrival};
use crate::messages::{EntryState, Handle};
use crate::reclaim::live_bases::Entity;
use crate::records::{JoinProgress, Renumbered};

/// A member of a join that has arrived.
#[derive(Debug)]
pub(crate) struct Reported {
    pub(crate) join: JoinId,
    pub(crate) index: u32,
    pub(crate) arrival: Arrival,
    /// Whether the arrival must be recorded separately, because the join was already carried forward and so is behind
    /// its member in the journal. The member's segment may be reclaimed. A later reader then does not know the member,
    /// and skips its end.
    pub(crate) must_be_told: bool,
}

impl BrokerState {
    /// Opens a join. Uses only those parts of `progress` that a new join has.
    pub(crate) fn open_join(
        &mut self,
        id: JoinId,
        count: u32,
        policy: JoinPolicy,
        progress: &JoinProgress<'_>,
    ) {
        if self.joins.find(&id).is_some() {
            return;
        }
        let slot = self.joins.open(id, count, policy);
        self.joins.set_then(slot, progress.then.to_vec());
        if let Some(growth) = progress.unsealed {
            self.joins.unseal(slot, growth);
        }
        let join = &mut self.joins[slot];
        join.expects = progress.expects.to_vec();
        join.result_ttl_ms = progress.result_ttl_ms;
        join.base = self.position;
        let bytes = join.journal_bytes();
        self.live_bytes += bytes;
        // The join counts as kept even if it holds nothing; otherwise there could be any number of them.
        join.kept = Amount { jobs: 1, bytes };
        for index in 0..self.joins[slot].held.len() {
            let handle = self.joins[slot].held[index];
            if self.messages.get(handle).is_some()
                && self.messages.state(handle.slot) == EntryState::Held(id)
            {
                self.count_held(handle.slot, Adjust::Add);
            }
        }
        let join = &self.joins[slot];
        self.live_bases.add(
            self.position,
            Entity::Join {
                slot,
                number: join.number,
            },
        );
    }

    /// Counts members added to a join.
    pub(crate) fn grow_join(&mut self, slot: u32, by: u32) {
        let join = &mut self.joins[slot];
        match &mut join.growth {
            Some(growth) => growth.members += by,
            None if planted!("grow-without-count") => {}
            None => join.count += by,
        }
    }

    /// Closes a join to new members. `cancelled`: its workflow was cancelled, so its outcome is already known.
    pub(crate) fn seal_join(&mut self, slot: u32, count: u32, cancelled: bool) {
        self.close_join(slot, count, cancelled);
        let join = &mut self.joins[slot];
        if cancelled {
            join.result_ttl_ms = None;
        }
    }

    fn close_join(&mut self, slot: u32, count: u32, closes: bool) {
        if let Some(growth) = &self.joins[slot].growth {
            self.workflows.touch(growth.workflow);
        }
        let bytes = self.joins[slot].journal_bytes();
        self.joins.seal(slot, count, closes);
        let bytes = bytes - self.joins[slot].journal_bytes();
        self.live_bytes -= bytes;
        self.count_for_join(slot, Adjust::Subtract, Amount { jobs: 0, bytes });
    }

    /// Adds a member that has ended with `arrival`. Returns false if it had already arrived.
    pub(crate) fn arrive(&mut self, slot: u32, index: u32, arrival: Arrival) -> bool {
        let join = &mut self.joins[slot];
        let was_bytes = join.journal_bytes();
        let is_new = join.arrive(index);
        if is_new {
            join.count_failure(&join.judge(index, arrival.clone()));
            self.reported.push_back(Reported {
                join: join.id,
                index,
                arrival,
                must_be_told: false,
            });
        }
        self.recount_join(slot, was_bytes);
        is_new
    }

    /// Recounts the journal bytes of a join.
    fn recount_join(&mut self, slot: u32, was_bytes: u64) {
        let bytes = self.joins[slot].journal_bytes();
        self.live_bytes += bytes;
        self.live_bytes -= was_bytes;
        let amount = |bytes| Amount { jobs: 0, bytes };
        self.count_for_join(slot, Adjust::Add, amount(bytes));
        self.count_for_join(slot, Adjust::Subtract, amount(was_bytes));
    }

    /// Reports a member of a join that has ended. Its full state is in the journal at `base`.
    pub(crate) fn report(&mut self, member: Option<Member>, base: Position, arrival: Arrival) {
        if let Some(Member { join, index }) = member
            && let Some(slot) = self.joins.find(&join)
            && index < self.joins[slot].count
            && self.arrive(slot, index, arrival)
            && let Some(reported) = self.reported.back_mut()
        {
            reported.must_be_told = base < self.joins[slot].base;
        }
    }

    /// Reports a member of a join that a failure has blocked. No record of the member says so, so the report must be
    /// recorded.
    pub(crate) fn report_blocked(&mut self, member: Option<Member>, causes: &[MessageId]) {
        let reported = self.reported.len();
        let arrival = Arrival::Failed(causes.to_vec());
        self.report(member, self.position, arrival);
        if let Some(reported) = self.reported.get_mut(reported) {
            reported.must_be_told = true;
        }
    }

    /// Blocks the messages of a join with too many failed members; their blocked state is derived from this. Its
    /// errbacks become ready, and the joins in which it has places are notified. If no member has failed and one was
    /// not needed, the messages are not needed either.
    pub(crate) fn block_join(&mut self, slot: u32, at: u64) {
        if let Some(members) = self.joins[slot]
            .growth
            .as_ref()
            .map(|growth| growth.members)
        {
            // Later members would run for nothing, and would escape a cancellation of the workflow.
            self.close_join(slot, members, true);
        }
        let was_over = self.joins[slot].is_over;
        self.put_join_over(slot, at);
        if self.joins[slot].is_over && !was_over {
            self.note_failed_join(slot);
        }
    }

    fn put_join_over(&mut self, slot: u32, at: u64) {
        let join = &mut self.joins[slot];
        let id = join.id;
        if join.is_over {
            // It is given up: see `Broker::give_up`.
            let was = std::mem::replace(&mut join.over_at, at);
            self.joins_over.remove(&(was, id));
            self.joins_over.insert((at, id));
            return;
        }
        if join.is_needless {
            return;
        }
        let failure = join.failure();
        let is_needless = failure == Arrival::NotNeeded;
        match is_needless {
            // Those messages end in steps.
            true => {
                join.is_needless = true;
                self.joins_needless.push_back(id);
            }
            false => {
                join.is_over = true;
                join.over_at = at;
                self.blocked += join.kept;
                self.joins_over.insert((at, id));
                self.count_blocked(slot, Adjust::Add);
                self.wait_for_failed_jobs();
            }
        }
        let is_released = |handle: &Handle| {
            self.messages.get(*handle).is_some()
                && self.messages.state(handle.slot) == EntryState::Held(id)
                && match self.messages.when(handle.slot) {
                    Outcome::Succeeded => false,
                    Outcome::Failed => !is_needless,
                    Outcome::Ended => true,
                }
        };
        let held = self.joins[slot].held.iter().copied();
        let released: Vec<Handle> = held.filter(is_released).collect();
        if !released.is_empty() {
            self.joins[slot]
                .held
                .retain(|handle| !released.contains(handle));
            self.release(id, released, None, Some(at));
        }
        self.report_join(slot, &failure);
    }

    /// Reports a join to those in which it has places, and to the schedule whose job it replaced.
    fn report_join(&mut self, slot: u32, arrival: &Arrival) {
        let join = &self.joins[slot];
        if self.schedules.await_jobs() {
            for id in join.result_ids() {
                self.schedules.job_ended(&id);
            }
        }
        let (then, base) = (join.then.clone(), join.base);
        for place in then {
            self.report(Some(place), base, arrival.clone());
        }
    }

    /// Makes a join wait again for a member that had failed. `causes`: jobs that caused the remaining failures.
    pub(crate) fn revive_member(&mut self, slot: u32, index: u32, causes: Vec<MessageId>) {
        let join = &mut self.joins[slot];
        let was_bytes = join.journal_bytes();
        join.revive_member(index, causes);
        self.recount_join(slot, was_bytes);
    }

    /// Reopens a join that was over: so few of its members have failed now that it tolerates them. Messages that it
    /// released when it failed stay released.
    pub(crate) fn reopen_join(&mut self, slot: u32) {
        let join = &mut self.joins[slot];
        if !std::mem::take(&mut join.is_over) {
            return;
        }
        let over_at = std::mem::take(&mut join.over_at);
        let (id, kept) = (join.id, join.kept);
        self.blocked -= kept;
        self.count_blocked(slot, Adjust::Subtract);
        self.joins_over.remove(&(over_at, id));
    }

    /// Restores the progress of a join from when it was carried forward.
    pub(crate) fn restore_join(
        &mut self,
        slot: u32,
        count: u32,
        arrived: &[(u32, u64)],
        progress: &JoinProgress<'_>,
        over_at: Option<u64>,
    ) {
        match (&mut self.joins[slot].growth, progress.unsealed) {
            (Some(growth), Some(carried)) if carried.session > 0 => **growth = carried,
            // A repaired journal may lack the record of its seal.
            (Some(_), carried) => self.close_join(slot, count, carried.is_some()),
            (None, _) => {}
        }
        let join = &mut self.joins[slot];
        let was_bytes = join.journal_bytes();
        join.restore(arrived);
        join.failures = progress.failures;
        join.causes = progress.causes.to_vec();
        join.has_needless = progress.has_needless;
        join.is_released = progress.is_released;
        if progress.is_needless {
            // Its arrival was already reported.
            join.is_needless = true;
            self.joins_needless.push_back(join.id);
        }
        join.result_ttl_ms = progress.result_ttl_ms;
        self.recount_join(slot, was_bytes);
        if let Some(at) = over_at {
            // Its arrival was already reported.
            let then = std::mem::take(&mut self.joins[slot].then);
            self.put_join_over(slot, at);
            self.joins[slot].then = then;
        }
    }

    /// Whether the join that holds the message has failed.
    pub(crate) fn is_blocked(&self, slot: u32) -> bool {
        match self.messages.state(slot) {
            EntryState::Held(join) => {
                let join = self.joins.find(&join);
                join.is_some_and(|join| self.joins[join].is_over)
            }
            _ => false,
        }
    }

    /// Ends a join. The messages that it held become ready, or the caller settles them. A released join stays while its
    /// values may be read, which the caller determines. `at`: steady time of the release, if messages have times that
    /// count from it.
    pub(crate) fn end_join(
        &mut self,
        slot: u32,
        released: bool,
        renumbered: Option<Renumbered>,
        at: Option<u64>,
    ) {
        if !released {
            self.forget_join(slot);
            return;
        }
        let join = &mut self.joins[slot];
        join.is_released = true;
        self.note_join_outcome(slot, WorkflowState::Succeeded);
        let join = &mut self.joins[slot];
        let (id, held) = (join.id, std::mem::take(&mut join.held));
        self.release(id, held, renumbered, at);
        self.report_join(slot, &Arrival::Succeeded);
        self.joins.may_be_unread(id);
    }

    /// Makes the messages ready that the join held and that have not ended since.
    fn release(
        &mut self,
        join: JoinId,
        held: Vec<Handle>,
        renumbered: Option<Renumbered>,
        at: Option<u64>,
    ) {
        for handle in held {
            let state = EntryState::Held(join);
            if self.messages.get(handle).is_some() && self.messages.state(handle.slot) == state {
                self.count_held(handle.slot, Adjust::Subtract);
                if let Some(to) = renumbered.and_then(|renumbered| renumbered.of(handle.number))
                    && !self.keeps_its_number(handle.slot)
                {
                    self.renumber_held(handle, to);
                }
                match self.take_times(handle.slot).zip(at) {
                    Some((times, at)) => self.wait_from(handle.slot, times, at),
                    None => self.make_ready(handle.slot),
                }
                if self.messages[handle.slot].is_ready() {
                    self.reprioritize(handle.slot);
                }
                if !self.marks.is_empty() && self.is_purged(handle.slot) {
                    let queue = self.messages.queue(handle.slot);
                    self.queues[queue].rare_mut().ending += 1;
                }
                let safe_after = self.messages.safe_after(handle.slot).and(self.safe_after);
                self.messages.set_rests(handle.slot, safe_after);
                self.cool_when_safe(handle.slot);
            }
        }
    }

    /// Whether an operation under way, which knows the message by its number, cancels a message that a join releases.
    /// That operation then ends the message, or the purge does because of which it would be renumbered.
    pub(crate) fn keeps_its_number(&self, slot: u32) -> bool {
        self.mark_that_cancels(slot).is_some()
    }

    /// Whether a message that the join holds has times that count from its release.
    pub(crate) fn has_times(&self, slot: u32) -> bool {
        let mut held = self.joins[slot].held.iter();
        held.any(|handle| {
            let extras = self
                .messages
                .get(*handle)
                .and_then(|_| self.messages.extras(handle.slot));
            extras.is_some_and(|extras| extras.later.is_some())
        })
    }

    /// Takes the times that count from the release of a message.
    fn take_times(&mut self, slot: u32) -> Option<ReleaseTimes> {
        self.messages.extras(slot)?.later.as_ref()?;
        self.live_bytes -= self.messages.journal_bytes(slot);
        let times = self.messages.take_later(slot);
        self.live_bytes += self.messages.journal_bytes(slot);
        times
    }

    /// Puts a message that was released at this time into its place.
    fn wait_from(&mut self, slot: u32, times: ReleaseTimes, at: u64) {
        if let Some(ms) = times.expires_after_ms {
            self.abandon_expiry(slot);
            let when = ClockTime::steady(at.saturating_add(ms));
            self.messages.set_expiry(slot, Some(when));
            self.set_expiry(slot);
        }
        match times.due {
            None => self.make_ready(slot),
            Some(due) => self.delay(slot, ClockTime::of_start(due, at)),
        }
    }

    fn renumber_held(&mut self, handle: Handle, to: u64) {
        let Handle { number, slot } = handle;
        self.abandon_expiry(slot);
        self.numbers = self.numbers.max(to);
        self.messages.set_number(slot, to);
        self.renumber_claim(slot, number);
        self.set_expiry(slot);
    }

    /// Returns new numbers for the messages that the join holds, if a purge of one of their queues is under way: a
    /// purge covers waiting messages, and these were not waiting.
    pub(crate) fn renumber_behind_marks(&self, slot: u32) -> Option<Renumbered> {
        if self.marks.is_empty() || planted!("purge-released") {
            return None;
        }
        let join = &self.joins[slot];
        let held = join.held.iter().filter(|handle| {
            self.messages.get(**handle).is_some()
                && self.messages.state(handle.slot) == EntryState::Held(join.id)
        });
        if !held.clone().any(|handle| self.is_behind_mark(handle.slot)) {
            return None;
        }
        let first = held.clone().map(|handle| handle.number).min()?;
        let last = held.map(|handle| handle.number).max()?;
        Some(Renumbered {
            first,
            to: self.numbers + 1,
            count: last - first + 1,
        })
    }

    /// Returns the numbers of the messages that the join holds.
    pub(crate) fn still_held(&self, join: &JoinId) -> Vec<u64> {
        let held = self.joins.held_by(join).iter();
        let held = held.filter(|handle| {
            self.messages.get(**handle).is_some()
                && self.messages.state(handle.slot) == EntryState::Held(*join)
        });
        held.map(|handle| handle.number).collect()
    }

    /// Ends a join that is no longer in the journal itself.
    pub(crate) fn end_unknown_join(
        &mut self,
        id: JoinId,
        released: bool,
        renumbered: Option<Renumbered>,
        at: Option<u64>,
    ) {
        let held = self.joins.take_early(&id);
        if released {
            self.release(id, held, renumbered, at);
        }
    }

    /// Releases messages whose join is missing, which only a damaged journal can leave. They must not wait forever.
    pub(crate) fn release_orphans(&mut self) {
        for (join, held) in self.joins.take_all_early() {
            self.release(join, held, None, None);
        }
    }

    /// Returns the jobs that caused a member's failure: itself, or those that have blocked it.
    pub(crate) fn causes_of(&self, slot: u32) -> Vec<MessageId> {
        match self.messages.state(slot) {
            EntryState::Held(join) if self.is_blocked(slot) => {
                let join = self.joins.find(&join).expect("it is over");
                self.joins[join].causes.clone()
            }
            _ => vec![self.messages[slot].id],
        }
    }

    /// Uncounts a message among those that read the values of a join.
    pub(crate) fn stop_reading(&mut self, slot: u32) {
        if let Some(inputs) = self.messages.extras(slot).and_then(|extras| extras.inputs) {
            self.joins.remove_reader(inputs.join);
        }
    }

    /// Closes up to `most` released joins whose values can't be read any more; closing one may close others.
    pub(crate) fn close_unread_joins(&mut self, most: usize) {
        for _ in 0..most {
            if !self.joins.has_unread() {
                return;
            }
            if let Some(slot) = self.joins.take_unread() {
                self.forget_join(slot);
            }
        }
    }

    /// Links joins within joins after a recovery, and closes those whose values can't be read any more.
    pub(crate) fn review_joins(&mut self, now: u64) {
        self.joins.nest_all();
        let released = self.joins.iter().filter(|(_, join)| join.is_released);
        let released: Vec<JoinId> = released.map(|(_, join)| join.id).collect();
        for id in released {
            self.joins.may_be_unread(id);
        }
        self.close_unread_joins(usize::MAX);
        // Records that a repaired journal lacks may have failed them.
        let failed = self
            .joins
            .iter()
            .filter(|(_, join)| join.failures > join.policy.max_failures() && !join.is_decided());
        let failed: Vec<u32> = failed.map(|(slot, _)| slot).collect();
        for slot in failed {
            self.block_join(slot, now);
        }
    }

    /// Drops, during replay, a released join when a new one with the same id follows; no reader can hold its values by
    /// then. `is_released`: the join that follows is the same one.
    pub(crate) fn forget_if_unread(&mut self, id: &JoinId, is_released: bool) {
        if let Some(slot) = self.joins.find(id)
            && self.joins[slot].is_released
            && !is_released
        {
            self.forget_join(slot);
        }
    }

    fn forget_join(&mut self, slot: u32) -> crate::joins::Join {
        let join = self.joins.close(slot);
        if join.is_over {
            self.blocked -= join.kept;
            self.joins_over.remove(&(join.over_at, join.id));
        }
        self.live_bytes -= join.journal_bytes();
        self.live_bases.abandon();
        join
    }
}
