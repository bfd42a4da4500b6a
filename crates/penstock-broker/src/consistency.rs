//! Recounts everything that the broker counts.

use std::collections::{BTreeMap, BTreeSet};

use penstock_faults::planted;
use penstock_message::MessageId;

use crate::Broker;
use crate::consumers::ConsumerSeat;
use crate::joins::Amount;
use crate::messages::EntryState;
use crate::table::interner::Name;

impl Broker {
    /// Recounts everything that the broker counts, and panics if a count is wrong. Takes time in proportion to the
    /// state: for tests and the simulator.
    pub fn assert_consistent(&self) {
        self.assert_messages_are_where_they_say();
        self.assert_claims_are_owned();
        self.assert_values_are_counted();
        self.state.messages.assert_counts();
        self.assert_live_things_are_in_the_ledger();
        self.assert_names_are_held();
        self.assert_workflows_are_counted();
        for connection in self.connections.values() {
            let ahead = connection.deliveries.iter().take(connection.ahead);
            assert!(connection.ahead <= connection.deliveries.len());
            assert_eq!(
                connection.ahead_bytes,
                ahead.map(|waiting| waiting.bytes).sum::<usize>(),
                "bytes that were asked for ahead"
            );
        }
        let pending_parts: usize = self
            .state
            .sessions
            .iter()
            .filter_map(|(_, session)| session.pending_parts.as_ref())
            .map(|pending_parts| pending_parts.bytes)
            .sum();
        assert_eq!(
            self.pending_parts_bytes, pending_parts,
            "bytes of staged parts"
        );
    }

    /// Panics if a waiting job is in a circle of waits. For the simulator, whose clients never wait for jobs that are
    /// yet to be enqueued.
    pub fn assert_no_circle_of_waits(&self) {
        self.state.assert_no_circle();
    }

    /// Panics unless each unfailed message remembers exactly the key that it owns: only that key is carried forward.
    fn assert_claims_are_owned(&self) {
        // The simulator's model must find these.
        if planted!("claim-survives-dead-letter") {
            return;
        }
        if planted!("claim-retaken-on-retry") {
            return;
        }
        let state = &self.state;
        let mut owners = 0;
        for (slot, entry) in state.messages.iter() {
            let Some(claim) = state.messages.claim(slot).filter(|_| !entry.is_failed()) else {
                continue;
            };
            let id = entry.id;
            let owner = state.keys.owner(claim);
            assert_eq!(owner, Some(state.messages.handle(slot)), "the key of {id}");
            owners += 1;
        }
        assert_eq!(owners, state.keys.claims(), "owners of keys");
    }

    fn assert_messages_are_where_they_say(&self) {
        let state = &self.state;
        // Ready, delayed and running messages of each queue, bytes of the first two, and ready messages of each flow.
        let mut counts: BTreeMap<u32, [u64; 5]> = BTreeMap::new();
        let mut flows = BTreeMap::new();
        let mut leases = 0;
        let mut runs: BTreeMap<u32, u32> = BTreeMap::new();
        let mut failed = BTreeMap::new();
        let mut failed_of: BTreeMap<u32, u64> = BTreeMap::new();
        let mut ending: BTreeMap<u32, u64> = BTreeMap::new();
        for (slot, entry) in state.messages.iter() {
            let id = entry.id;
            if entry.is_ended() {
                continue;
            }
            assert!(
                state.messages.copies(&id).any(|copy| copy == slot),
                "{id} is not found by its id"
            );
            assert!(
                entry.number() <= state.numbers,
                "{id} has a number that was never given out"
            );
            let shared_head = state.messages.shared_head(slot);
            if state.is_purged(slot) {
                *ending.entry(shared_head.queue).or_insert(0) += 1;
            }
            let count = counts.entry(shared_head.queue).or_default();
            assert!(
                state.messages.asked(slot).is_none()
                    || entry.is_leased()
                    || self.chores.has_asked(),
                "{id} was asked to stop, and nobody runs it"
            );
            let has_times = state
                .messages
                .extras(slot)
                .is_some_and(|extras| extras.later.is_some());
            assert!(
                !has_times || matches!(state.messages.state(slot), EntryState::Held(_)),
                "{id} has times that begin with a release which is over"
            );
            match state.messages.state(slot) {
                EntryState::Ready => {
                    count[0] += 1;
                    count[3] += state.messages.body_bytes(slot);
                    *flows
                        .entry((shared_head.queue, shared_head.priority, shared_head.task))
                        .or_default() += 1;
                }
                EntryState::Delayed(_) => {
                    count[1] += 1;
                    count[4] += state.messages.body_bytes(slot);
                }
                EntryState::Leased(lease) => {
                    count[2] += 1;
                    leases += 1;
                    let flow = state.messages.flow(slot).expect("it is charged");
                    *runs.entry(flow).or_default() += 1;
                    let held = &state.sessions[lease.session].leases;
                    assert_eq!(
                        held.get(lease.index as usize),
                        Some(&slot),
                        "the lease of {id}"
                    );
                    assert!(
                        lease.grant.number <= state.grants,
                        "{id} has a grant that was never given out"
                    );
                }
                EntryState::Failed => {
                    failed.insert(entry.number(), slot);
                    *failed_of.entry(shared_head.queue).or_insert(0) += 1;
                }
                EntryState::Ended => unreachable!("it was passed over"),
                EntryState::Held(join) => {
                    let join = state
                        .joins
                        .find(&join)
                        .expect("a held message has its join");
                    let this = state.messages.handle(slot);
                    let held = state.joins[join].held.iter();
                    assert_eq!(
                        held.filter(|handle| **handle == this).count(),
                        1,
                        "places of {id} in the list of the join that holds it"
                    );
                }
            }
        }
        let mut readers: BTreeMap<penstock_message::JoinId, u32> = BTreeMap::new();
        for (slot, entry) in state.messages.iter() {
            let inputs = state.messages.extras(slot).and_then(|extras| extras.inputs);
            if let Some(inputs) = inputs
                && !entry.is_ended()
            {
                *readers.entry(inputs.join).or_default() += 1;
            }
        }
        assert_eq!(state.joins.readers(), readers, "readers of joins' values");
        let held: usize = state
            .sessions
            .iter()
            .map(|(_, session)| session.leases.len())
            .sum();
        assert_eq!(held, leases, "leases of all sessions");
        let users = state.messages.shared_heads.users_of_flows();
        state.queues.assert_flows_hold(&flows, &users, &runs);
        let listed: BTreeMap<u64, u32> = state.failed.after(0).collect();
        assert_eq!(listed, failed, "failed jobs in their list");
        let ended = state.messages.iter().filter(|(_, entry)| entry.is_ended());
        assert_eq!(
            state.ends.len,
            ended.count() as u64,
            "values of ended messages"
        );
        for index in state.queues.indexes() {
            let queue = &state.queues[index];
            let count = counts.remove(&index).unwrap_or_default();
            assert_eq!(
                [
                    queue.ready,
                    queue.delayed,
                    queue.running,
                    queue.ready_bytes,
                    queue.delayed_bytes
                ],
                count,
                "the counts of a queue"
            );
            let failed_here = failed_of.get(&index).copied().unwrap_or(0);
            assert_eq!(queue.failed, failed_here, "failed jobs of a queue");
            let ending = ending.get(&index).copied().unwrap_or(0);
            assert_eq!(queue.rare().ending, ending, "purged messages of a queue");
            let all = self.connections.values();
            let slots = all.flat_map(|connection| &connection.consumers);
            let consumers = slots.filter_map(|slot| self.consumers.get(*slot));
            let waiting = consumers
                .clone()
                .filter(|consumer| consumer.is_waiting(index));
            assert_eq!(
                queue.waiting(),
                waiting.count(),
                "consumers in the ring of a queue"
            );
            let takes = |seat: &ConsumerSeat| seat.queue == index;
            let consumers = consumers
                .filter(|consumer| consumer.seats.iter().any(takes))
                .count();
            assert_eq!(
                queue.consumers() as usize,
                consumers,
                "the consumers of a queue"
            );
        }
    }

    /// Panics unless each workflow knows how many of its jobs have not ended, and how many of these are blocked.
    fn assert_workflows_are_counted(&self) {
        let state = &self.state;
        let mut live: BTreeMap<MessageId, [u64; 2]> = BTreeMap::new();
        for (slot, entry) in state.messages.iter() {
            if entry.is_ended() || entry.is_failed() {
                continue;
            }
            if let Some(workflow) = state.workflow_of(slot) {
                let counts = live.entry(workflow).or_default();
                counts[0] += 1;
                counts[1] += u64::from(state.is_blocked(slot));
            }
        }
        let counted: BTreeMap<_, _> = state.workflows.live().collect();
        assert_eq!(counted, live, "jobs of workflows that have not ended");
        state.workflows.assert_counts();
    }

    /// Panics unless each name is held as often as queues, tasks, values, reasons and failure classes use it.
    fn assert_names_are_held(&self) {
        let state = &self.state;
        let mut held: BTreeMap<Name, u32> = BTreeMap::new();
        let mut hold = |name: Name| *held.entry(name).or_insert(0) += 1;
        let queues = &state.queues;
        for index in queues.indexes() {
            let queue = &queues[index];
            assert_eq!(queues.find(queue.name), Some(index), "a queue by its name");
            hold(queue.name);
            queue
                .rare()
                .told_unknown
                .iter()
                .for_each(|task| hold(*task));
        }
        let in_order = &queues.by_name.in_order;
        assert_eq!(in_order.len(), queues.indexes().len(), "queues in order");
        for (slot, task) in queues.tasks.all.iter() {
            let found = queues.tasks.find(task.name);
            assert_eq!(found, Some(slot), "a task by its name");
            hold(task.name);
        }
        let in_order = &queues.tasks.by_name.in_order;
        assert_eq!(in_order.len(), queues.tasks.all.len(), "tasks in order");
        queues.sets.names().for_each(&mut hold);
        for (mark, _) in state.marks.values() {
            mark.names().for_each(&mut hold);
        }
        for stored in state.keys.iter() {
            hold(stored.group);
            stored.run.iter().for_each(|run| hold(run.head().queue));
        }
        state.keys.reported_groups().for_each(&mut hold);
        for (slot, entry) in state.messages.iter() {
            match entry.is_ended() {
                true => hold(state.messages.ended(slot).reason),
                false => {
                    let failure = state.messages.failure(slot);
                    failure.iter().for_each(|failure| hold(failure.class));
                    let asked = state.messages.asked(slot);
                    asked.iter().for_each(|asked| hold(asked.reason));
                }
            }
            let shared_head = state.messages.shared_head(slot);
            assert!(
                queues.tasks.find(shared_head.task).is_some(),
                "an unknown task"
            );
            assert!(queues.get(shared_head.queue).is_some(), "a forgotten queue");
        }
        state.names.assert_held(&held);
    }

    fn assert_values_are_counted(&self) {
        let keys = &self.state.keys;
        keys.watchers.assert_paired();
        self.state.waits.assert_paired();
        self.state.queues.assert_awaited(&self.state.messages);
        let mut bytes = 0;
        let mut results = 0;
        for stored in keys.iter() {
            let found = keys
                .value(&stored.key())
                .expect("a value is found by its key");
            assert_eq!(found.number, stored.number, "two values of one key");
            if stored.is_result() {
                bytes += stored.bytes();
                results += 1;
            }
        }
        assert_eq!(
            (keys.results(), keys.results_bytes),
            (results, bytes),
            "results and their bytes"
        );
    }

    fn assert_live_things_are_in_the_ledger(&self) {
        let state = &self.state;
        // A slot used twice within one record has two entries that look current.
        let live: BTreeSet<_> = state
            .live_bases
            .iter()
            .chain(self.reading.carrying.iter().map(|(slot, base)| {
                let entity = crate::reclaim::live_bases::Entity::Message { slot: *slot };
                (*base, entity)
            }))
            .filter(|(base, entity)| state.is_current(*base, entity))
            .collect();
        let mut expected = state.messages.len() + state.keys.iter().count();
        expected += state.sessions.iter().count() + state.joins.iter().count();
        let indexes = state.queues.indexes();
        let queues = indexes.iter().map(|index| &state.queues[*index]);
        expected += queues.clone().filter(|queue| queue.paused).count();
        let limited = queues
            .filter(|queue| !queue.rare().limits.is_none())
            .count();
        assert_eq!(
            state.queues.limited as usize, limited,
            "the count of queues with limits"
        );
        expected += limited;
        expected += state.marks.len() + state.workflows.len() + state.schedules.len();
        assert_eq!(live.len(), expected, "live things in the ledger");
        let messages: u64 = state
            .messages
            .iter()
            .map(|(slot, _)| state.messages.journal_bytes(slot))
            .sum();
        let values: u64 = state.keys.iter().map(|stored| stored.bytes()).sum();
        let joins: u64 = state
            .joins
            .iter()
            .map(|(_, join)| join.journal_bytes())
            .sum();
        let mut kept: BTreeMap<_, Amount> = BTreeMap::new();
        for (slot, entry) in state.messages.iter() {
            if !entry.is_ended()
                && let EntryState::Held(join) = state.messages.state(slot)
            {
                let bytes = state.messages.journal_bytes(slot);
                *kept.entry(join).or_default() += Amount { jobs: 1, bytes };
            }
        }
        let over = state.joins.iter().filter(|(_, join)| join.is_over);
        let over: BTreeSet<_> = over.map(|(_, join)| (join.over_at, join.id)).collect();
        assert_eq!(state.joins_over, over, "failed joins in their order");
        let mut blocked = Amount::default();
        for (_, join) in state.joins.iter() {
            let bytes = join.journal_bytes();
            let mut kept = kept.get(&join.id).copied().unwrap_or_default();
            kept += Amount { jobs: 1, bytes };
            assert_eq!(join.kept, kept, "a join and what it holds");
            let arrived: u32 = join
                .arrived()
                .iter()
                .map(|(_, bits)| bits.count_ones())
                .sum();
            assert_eq!(join.arrivals, arrived, "arrivals of a join");
            let has_failed = join.failures > join.policy.max_failures();
            assert!(join.is_over || !has_failed, "a failed join is over");
            if join.is_over {
                blocked += kept;
            }
        }
        assert_eq!(state.blocked, blocked, "failed joins and what they block");
        let workflows: u64 = state
            .workflows
            .records()
            .map(|(_, record)| record.journal_bytes())
            .sum();
        let marks = state.marks.len() as u64 * crate::state::MARK_BYTES;
        let schedules = state.schedules.journal_bytes();
        let sessions = 64 * state.sessions.iter().count() as u64;
        assert_eq!(
            state.live_bytes,
            messages + values + joins + sessions + marks + workflows + schedules,
            "live bytes"
        );
    }
}
