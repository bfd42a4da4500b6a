//! What a broker tells of itself.

use penstock_message::{MessageId, MessageInfo, QueueStatus, Status, WorkerStatus};

use crate::Broker;
use crate::ends::ENDED_VALUE_BYTES;
use crate::messages::State as MessagePlace;

impl Broker {
    pub fn status(&self) -> Status {
        let state = &self.state;
        let mut queues: Vec<QueueStatus> = (0..state.queues.len())
            .map(|index| self.queue_status(index))
            .collect();
        queues.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let mut workers = Vec::new();
        let mut clients = 0;
        for (_, session) in state.sessions.iter() {
            let connection = session.conn.and_then(|conn| self.connections.get(&conn));
            let is_worker = match connection {
                Some(connection) => connection.is_worker,
                None => !session.leases.is_empty(),
            };
            if !is_worker {
                clients += u32::from(connection.is_some());
                continue;
            }
            let consumers = connection.map_or(&[][..], |connection| &connection.consumers);
            let consumers = consumers
                .iter()
                .filter_map(|slot| self.consumers.get(*slot));
            let seats = consumers.flat_map(|consumer| &consumer.seats);
            let mut served: Vec<u32> = Vec::new();
            for seat in seats {
                if !served.contains(&seat.queue) {
                    served.push(seat.queue);
                }
            }
            let name_of = |queue: &u32| state.names.text(state.queues[*queue].name).to_owned();
            workers.push(WorkerStatus {
                name: session.name.clone(),
                queues: served.iter().map(name_of).collect(),
                slots: connection.map_or(0, |connection| connection.slots),
                // A worker tells of itself once a second; what it has settled since is known better here.
                busy: connection
                    .map_or(0, |connection| connection.busy)
                    .min(session.leases.len() as u32),
                leases: session.leases.len() as u32,
                connected: connection.is_some(),
            });
        }
        workers.sort_by(|one, other| one.name.cmp(&other.name));
        Status {
            queues,
            workers,
            clients,
            results: state.keys.results() + state.ends.len,
            results_bytes: state.keys.results_bytes + state.ends.len * ENDED_VALUE_BYTES,
            evicted: state.keys.evicted,
            failed: state.failed.len() as u64,
            failed_bytes: state.failed.bytes,
            failed_dropped: state.failed.dropped,
            unreadable: self.reading.unreadable,
            counts: self.counts,
            space: self.space,
            memory_is_full: self.memory_is_full.is_some(),
            ..Status::default()
        }
    }

    fn queue_status(&self, index: u32) -> QueueStatus {
        let queue = &self.state.queues[index];
        let oldest = self.state.queues.oldest_ready(index, &self.state.messages);
        QueueStatus {
            name: self.state.names.text(queue.name).to_owned(),
            ready: queue.ready,
            delayed: queue.delayed,
            ending: queue.ending,
            failed: queue.failed,
            running: queue.running,
            oldest_ready_ms: oldest.map_or(0, |entry| {
                self.clocks.wall().saturating_sub(entry.enqueued_at())
            }),
            paused: queue.paused,
            consumers: queue.consumers,
            waiting_bytes: queue.waiting_bytes(),
            limits: queue.limits,
            refused: queue.refused,
            dropped: queue.dropped,
        }
    }

    pub(crate) fn message_info(&self, id: &MessageId) -> Option<MessageInfo> {
        let state = &self.state;
        let slot = state.messages.first_of(id)?;
        let (entry, kind) = (&state.messages[slot], state.messages.kind(slot));
        let (mut started_at, mut due_at, mut worker) = (None, None, None);
        match state.messages.state(slot) {
            MessagePlace::Leased(lease) => {
                started_at = Some(lease.grant.started_at);
                worker = Some(state.sessions[lease.session].name.clone());
            }
            MessagePlace::Delayed(when) => due_at = Some(when.at),
            _ => {}
        }
        Some(MessageInfo {
            id: *id,
            task: state.names.text(kind.task).to_owned(),
            queue: state.names.text(state.queues[kind.queue].name).to_owned(),
            state: self.state_of(slot),
            enqueued_at: entry.enqueued_at(),
            started_at,
            due_at,
            attempt: kind.attempt,
            crashes: kind.crashes,
            worker,
            notes: state.messages.notes(slot).to_vec(),
            generation: kind.generation,
            failed: self.describe_failure(slot).map(Box::new),
        })
    }
}
