//! Stalled workers: workers whose slots are all held by jobs that wait for other jobs, and can't be lent.
//!
//! Such a worker reports that for its consumer, which then takes nothing. The jobs continue if the jobs that they wait
//! for already run, or can run elsewhere. Otherwise they would wait forever, so the wait of the deepest one is refused.

use penstock_faults::planted;
use penstock_message::{MessageId, SeededSet, SeededState, WaitRefusal};
use rustc_hash::FxHashMap;

use crate::Broker;
use crate::messages::EntryState;
use crate::table::interner::Name;

/// Interval at which such workers are checked. A worker is also left alone for this long at first, so that jobs on
/// their way arrive.
const PATIENCE_MS: u64 = 500;

impl Broker {
    /// Notes the jobs that hold all slots of a consumer.
    pub(crate) fn set_held_by(&mut self, consumer: u32, jobs: &[MessageId]) {
        let now = self.clocks.mono();
        self.consumers.set_held_by(consumer, jobs);
        if !jobs.is_empty() {
            let next = &mut self.consumers.next_look;
            *next = next.or(Some(now + PATIENCE_MS));
        }
    }

    /// Refuses the wait of the deepest job that holds a slot, if nothing that it waits for can continue.
    pub(crate) fn refuse_stalled_waits(&mut self) {
        let now = self.clocks.mono();
        if self.consumers.next_look.is_none_or(|at| at > now) {
            return;
        }
        let mut held: Vec<(bool, u32, MessageId)> = Vec::new();
        let mut is_any = false;
        for consumer in self.consumers.iter() {
            is_any |= !consumer.held_by.is_empty();
            let waits = |job: &MessageId| !self.state.awaited_in_any_run(job).is_empty();
            if consumer.is_held() && consumer.held_by.iter().all(waits) {
                let jobs = consumer.held_by.iter();
                held.extend(jobs.map(|job| {
                    let is_lost = self.state.awaited_by(job).is_empty();
                    (is_lost, self.state.waits.depth_of(job), *job)
                }));
            }
        }
        self.consumers.next_look = is_any.then_some(now + PATIENCE_MS);
        // Takes the youngest of equally deep jobs; but first those whose leases were lost, and whose outcomes nobody takes.
        held.sort_unstable();
        let mut takers = FxHashMap::default();
        let stuck = held
            .into_iter()
            .rev()
            .find(|(.., job)| !self.can_go_on(job, &mut takers));
        if let Some((.., job)) = stuck.filter(|_| !planted!("leave-stalled-workers")) {
            self.end_wait_of(job, WaitRefusal::NoSlotLeft);
        }
    }

    /// Whether anything that a job waits for, directly or not, runs, will run, or can be run by some consumer.
    fn can_go_on(&self, job: &MessageId, takers: &mut FxHashMap<(u32, Name), bool>) -> bool {
        let state = &self.state;
        let mut seen = SeededSet::with_hasher(SeededState::new(self.options.hash_seed));
        let mut next = state.awaited_in_any_run(job);
        while let Some(id) = next.pop() {
            if !seen.insert(id) {
                continue;
            }
            let mut join = state.joins.of_result(&id);
            let mut copies = state.messages.copies(&id).peekable();
            if copies.peek().is_none() && join.is_none() {
                return true;
            }
            for slot in copies {
                match state.messages.state(slot) {
                    EntryState::Ready => {
                        let shared_head = state.messages.shared_head(slot);
                        let queue_and_task = (shared_head.queue, shared_head.task);
                        let can_be_run = *takers.entry(queue_and_task).or_insert_with(|| {
                            self.can_be_run(shared_head.queue, shared_head.task)
                        });
                        if can_be_run {
                            return true;
                        }
                    }
                    EntryState::Leased(_) => {
                        let awaited = state.awaited_by(&id);
                        if awaited.is_empty() {
                            return true;
                        }
                        next.extend(awaited);
                    }
                    EntryState::Held(id) => match state.joins.find(&id) {
                        Some(slot) => join = Some(slot),
                        None => return true,
                    },
                    EntryState::Delayed(_) | EntryState::Failed | EntryState::Ended => {
                        return true;
                    }
                }
            }
            if let Some(slot) = join {
                let join = &state.joins[slot];
                if join.is_decided() || !join.id.is_join() {
                    return true;
                }
                let left = (0..join.count).filter(|index| !join.has_arrived(*index));
                next.extend(left.map(|index| MessageId::member(join.id, index)));
            }
        }
        false
    }

    /// Whether a consumer of the queue may run the task later, or only people can help (a paused queue, a missing worker).
    fn can_be_run(&self, queue: u32, task: Name) -> bool {
        let queues = &self.state.queues;
        let takes = |consumer: &&crate::consumers::QueueConsumer| {
            consumer.seats.iter().any(|seat| seat.queue == queue)
                && queues.sets.has(consumer.tasks, task)
        };
        let mut takers = self.consumers.iter().filter(takes).peekable();
        queues[queue].paused
            || takers.peek().is_none()
            || takers.any(|consumer| !consumer.is_held())
    }
}
