//! The status of a broker.

use std::collections::BTreeMap;
use std::ops::Bound;

use penstock_message::{
    MessageId, MessageInfo, MessageState, QueueStatus, RunningJob, Status, StatusCursor,
    StatusPage, StatusQuery, TaskStatus, WorkerStatus,
};

use crate::consumers::QUEUES_CAP;
use crate::endings::ended_values::ENDED_VALUE_BYTES;
use crate::messages::EntryState;
use crate::records::Grant;
use crate::{Broker, ConnId};

/// Maximum number of queues, tasks and workers on a page of the status: the number of queues that a worker may serve.
pub(crate) const STATUS_PAGE: usize = QUEUES_CAP;
/// Bytes of queues, tasks and workers at which a page ends, so that it fits into a frame whatever their names.
const STATUS_PAGE_BYTES: usize = 1 << 20;
/// Bytes in a frame of a queue, a task or a worker without its names; more than all of its numbers take.
const ENTRY_BYTES: usize = 400;
/// Maximum number of jobs of a worker that are listed, and maximum number of jobs of workers that a page looks at.
const RUNNING_LISTED: usize = 64;
const LEASES_LOOKED_AT: usize = 32_768;
/// Bytes in a frame of a running job, without its names.
const RUNNING_BYTES: usize = 50;

impl Broker {
    /// Returns the whole status, for tests: clients ask for pages. Counts of queues and tasks may lack the latest ones,
    /// which are added when a client asks.
    pub fn status(&self) -> Status {
        let workers = self.workers().map(|(number, worker)| WorkerStatus {
            running: self.longest_running(number),
            ..worker
        });
        let mut workers: Vec<WorkerStatus> = workers.collect();
        workers.sort_by(|one, other| one.name.cmp(&other.name));
        let queues = self.state.queues.by_name.in_order.values();
        let tasks = self.state.queues.tasks.by_name.in_order.values();
        Status {
            queues: queues.map(|index| self.queue_status(*index)).collect(),
            tasks: tasks.map(|task| self.task_status(*task)).collect(),
            workers,
            ..self.totals()
        }
    }

    /// Returns a page of the status. Looks at no other queues and tasks.
    pub(crate) fn status_page(&self, conn: ConnId, query: &StatusQuery) -> StatusPage {
        let mut page = Page::new(query.limit);
        let queues = &self.state.queues;
        let has_no_names = query.queues.is_empty();
        if let None | Some(StatusCursor::Queue(_)) = &query.after {
            let behind = match &query.after {
                Some(StatusCursor::Queue(name)) => Bound::Excluded(name.as_str()),
                _ => Bound::Unbounded,
            };
            let place = |name: &str| StatusCursor::Queue(name.to_owned());
            if has_no_names {
                let range = (behind, Bound::Unbounded);
                for (name, index) in queues.by_name.in_order.range::<str, _>(range) {
                    let Some(page) = page.take(name.len(), || place(name)) else {
                        break;
                    };
                    page.queues.push(self.queue_status(*index));
                }
            } else {
                for (name, index) in self.named(&query.queues, behind) {
                    let Some(page) = page.take(name.len(), || place(name)) else {
                        break;
                    };
                    page.queues.push(self.queue_status(index));
                }
            }
        }
        if has_no_names && !page.is_cut_off && !matches!(query.after, Some(StatusCursor::Worker(_)))
        {
            let behind = match &query.after {
                Some(StatusCursor::Task(name)) => Bound::Excluded(name.as_str()),
                _ => Bound::Unbounded,
            };
            let range = (behind, Bound::Unbounded);
            for (name, task) in queues.tasks.by_name.in_order.range::<str, _>(range) {
                let place = || StatusCursor::Task(name.as_ref().to_owned());
                let Some(page) = page.take(name.len(), place) else {
                    break;
                };
                page.tasks.push(self.task_status(*task));
            }
        }
        if has_no_names && !page.is_cut_off {
            let after = match query.after {
                Some(StatusCursor::Worker(number)) => Some(number),
                _ => None,
            };
            let mut looked_at = 0;
            for (number, mut worker) in self.workers() {
                if after.is_some_and(|after| number <= after) {
                    continue;
                }
                looked_at += worker.leases as usize;
                if looked_at > LEASES_LOOKED_AT && !page.workers.is_empty() {
                    page.is_cut_off = true;
                    break;
                }
                worker.running = self.longest_running(number);
                let queues: usize = worker.queues.iter().map(|name| name.len() + 8).sum();
                let running = worker.running.iter();
                let running: usize = running
                    .map(|job| job.task.len() + job.queue.len() + RUNNING_BYTES)
                    .sum();
                let place = || StatusCursor::Worker(number);
                let names_bytes = worker.name.len() + queues + running;
                let Some(workers) = page.take(names_bytes, place) else {
                    break;
                };
                workers.workers.push(worker);
            }
        }
        let session = self.connections.get(&conn);
        let leases = session.map_or(0, |conn| self.state.sessions[conn.session].leases.len());
        StatusPage {
            next: page.next(),
            status: Status {
                queues: page.queues,
                tasks: page.tasks,
                workers: page.workers,
                ..self.totals()
            },
            own_leases: leases as u32,
            own_ready: self.ready_for(conn),
        }
    }

    /// Counts the ready jobs that the consumers of a connection can run.
    fn ready_for(&self, conn: ConnId) -> u64 {
        let Some(connection) = self.connections.get(&conn) else {
            return 0;
        };
        let queues = &self.state.queues;
        let consumers = connection.consumers.iter();
        let consumers = consumers.filter_map(|slot| self.consumers.get(*slot));
        let served = consumers.flat_map(|consumer| {
            let seats = consumer.seats.iter();
            seats.map(|seat| (seat.queue, consumer.tasks))
        });
        let mut by_queue: BTreeMap<u32, Vec<Option<u32>>> = BTreeMap::new();
        for (queue, tasks) in served.filter(|(queue, _)| !queues[*queue].paused) {
            by_queue.entry(queue).or_default().push(tasks);
        }
        let ready = by_queue
            .iter()
            .map(|(queue, sets)| queues.ready_for(*queue, sets) as u64);
        ready.sum()
    }

    /// Returns the existing queues with these names: each once, in the order of their names.
    fn named(&self, names: &[String], behind: Bound<&str>) -> Vec<(&str, u32)> {
        let in_order = &self.state.queues.by_name.in_order;
        let found = names.iter().filter_map(|name| {
            let (name, index) = in_order.get_key_value(name.as_str())?;
            Some((name.as_ref(), *index))
        });
        let is_behind = |(name, _): &(&str, u32)| match behind {
            Bound::Excluded(after) => *name > after,
            _ => true,
        };
        let mut found: Vec<(&str, u32)> = found.filter(is_behind).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Returns the sessions of workers, connected or expected back, each with its number.
    fn workers(&self) -> impl Iterator<Item = (u64, WorkerStatus)> {
        let state = &self.state;
        let workers = state.sessions.iter().filter_map(|(index, session)| {
            let connection = session.conn.and_then(|conn| self.connections.get(&conn));
            let is_worker = match connection {
                Some(connection) => connection.is_worker,
                None => !session.leases.is_empty(),
            };
            is_worker.then_some((index, session, connection))
        });
        workers.map(|(index, session, connection)| {
            let consumers = connection.map_or(&[][..], |connection| &connection.consumers);
            let report = connection.and_then(|connection| connection.report);
            let report = report.unwrap_or_default();
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
            let worker = WorkerStatus {
                name: session.name.clone(),
                queues: served.iter().map(name_of).collect(),
                slots: report.slots,
                // A worker reports once a second. The broker knows what it has settled since.
                busy: report.busy.min(session.leases.len() as u32),
                parked: report.parked.min(session.leases.len() as u32),
                leases: session.leases.len() as u32,
                connected: connection.is_some(),
                state: report.state,
                running: Vec::new(),
            };
            (u64::from(index), worker)
        })
    }

    /// Returns the jobs that a session has held the longest.
    fn longest_running(&self, session: u64) -> Vec<RunningJob> {
        let state = &self.state;
        let leases = &state.sessions[session as u32].leases;
        let leases = leases.iter().take(LEASES_LOOKED_AT);
        let started = leases.filter_map(|slot| match state.messages.state(*slot) {
            EntryState::Leased(lease) => Some((lease.grant, *slot)),
            _ => None,
        });
        let mut started: Vec<(Grant, u32)> = started.collect();
        // Of jobs that started in the same millisecond, the first to be handed out comes first, even after a restart.
        started.sort_unstable_by_key(|(grant, _)| (grant.started_at, grant.number));
        started.truncate(RUNNING_LISTED);
        let described = started.into_iter().map(|(grant, slot)| {
            let shared_head = state.messages.shared_head(slot);
            RunningJob {
                id: state.messages[slot].id,
                task: state.names.text(shared_head.task).to_owned(),
                queue: state
                    .names
                    .text(state.queues[shared_head.queue].name)
                    .to_owned(),
                started_at: grant.started_at,
            }
        });
        described.collect()
    }

    /// Returns the status without its queues and workers.
    fn totals(&self) -> Status {
        let state = &self.state;
        let (mut clients, mut connected_workers) = (0, 0);
        for connection in self.connections.values() {
            match connection.is_worker {
                true => connected_workers += 1,
                false => clients += 1,
            }
        }
        Status {
            connected_workers,
            clients,
            results: state.keys.results() + state.ends.len,
            results_bytes: state.keys.results_bytes + state.ends.len * ENDED_VALUE_BYTES,
            evicted: state.keys.evicted,
            failed: state.failed.len() as u64,
            failed_bytes: state.failed.bytes,
            failed_dropped: state.failed.dropped,
            unreadable: self.reading.unreadable,
            counts: Box::new(self.counts),
            others: Box::new(state.queues.others),
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
            ending: queue.rare().ending,
            failed: queue.failed,
            unknown: self.state.queues.unknown(index),
            running: queue.running,
            oldest_ready_ms: oldest.map_or(0, |entry| {
                self.clocks.wall().saturating_sub(entry.enqueued_at())
            }),
            paused: queue.paused,
            consumers: queue.consumers(),
            capacity_permille: queue.capacity_permille(self.clocks.steady()),
            waiting_bytes: queue.waiting_bytes(),
            limits: queue.rare().limits,
            refused: queue.rare().refused,
            dropped: queue.tally.counts().dropped,
            tallied: queue.tally.tallied(self.clocks.steady()),
        }
    }

    fn task_status(&self, task: u32) -> TaskStatus {
        let task = &self.state.queues.tasks.all[task];
        TaskStatus {
            name: self.state.names.text(task.name).to_owned(),
            tallied: task.tally.tallied(self.clocks.steady()),
        }
    }

    pub(crate) fn message_info(&self, id: &MessageId) -> Option<MessageInfo> {
        let state = &self.state;
        let slot = state.messages.first_of(id)?;
        let (entry, shared_head) = (&state.messages[slot], state.messages.shared_head(slot));
        let (mut started_at, mut due_at, mut worker) = (None, None, None);
        match state.messages.state(slot) {
            EntryState::Leased(lease) => {
                started_at = Some(lease.grant.started_at);
                worker = Some(state.sessions[lease.session].name.clone());
            }
            EntryState::Delayed(when) => due_at = Some(when.at),
            _ => {}
        }
        let place = self.state_of(slot);
        Some(MessageInfo {
            id: *id,
            task: state.names.text(shared_head.task).to_owned(),
            queue: state
                .names
                .text(state.queues[shared_head.queue].name)
                .to_owned(),
            state: place,
            enqueued_at: entry.enqueued_at(),
            started_at,
            due_at,
            attempt: shared_head.attempt,
            crashes: shared_head.crashes,
            worker,
            notes: state.messages.notes(slot).to_vec(),
            generation: shared_head.generation,
            failed: self.describe_failure(slot).map(Box::new),
            headers: state
                .messages
                .extras(slot)
                .map_or_else(Vec::new, |extras| extras.headers.clone()),
            task_unknown: place == MessageState::Ready
                && !state.queues.has_taker(shared_head.queue, shared_head.task),
        })
    }
}

/// A page that is being filled.
struct Page {
    queues: Vec<QueueStatus>,
    tasks: Vec<TaskStatus>,
    workers: Vec<WorkerStatus>,
    limit: usize,
    bytes: usize,
    last: Option<StatusCursor>,
    /// Whether further entries had no room.
    is_cut_off: bool,
}

impl Page {
    fn new(limit: u32) -> Self {
        let limit = match limit as usize {
            0 => STATUS_PAGE,
            limit => limit.min(STATUS_PAGE),
        };
        Self {
            queues: Vec::new(),
            tasks: Vec::new(),
            workers: Vec::new(),
            limit,
            bytes: 0,
            last: None,
            is_cut_off: false,
        }
    }

    /// Makes room for one more entry. The first always has room.
    fn take(
        &mut self,
        name_bytes: usize,
        place: impl FnOnce() -> StatusCursor,
    ) -> Option<&mut Self> {
        let bytes = self.bytes + name_bytes + ENTRY_BYTES;
        let has_room = self.last.is_none() || self.len() < self.limit && bytes <= STATUS_PAGE_BYTES;
        if !has_room {
            self.is_cut_off = true;
            return None;
        }
        self.bytes = bytes;
        self.last = Some(place());
        Some(self)
    }

    fn len(&self) -> usize {
        self.queues.len() + self.tasks.len() + self.workers.len()
    }

    fn next(&mut self) -> Option<StatusCursor> {
        self.is_cut_off.then(|| self.last.take()).flatten()
    }
}
