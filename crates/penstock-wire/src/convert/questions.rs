//! Questions, answers and notices.

use penstock_message::{
    Answer, BrokerCounts, Failure, JobCounts, MessageInfo, MessageState, Notice, Others,
    ProcessStatus, Query, QueueLimits, QueueStatus, RunningJob, Space, Status, StatusCursor,
    StatusPage, StatusQuery, Tallied, TaskStatus, WorkerState, WorkerStatus,
};

use super::messages::{headers_from_wire, headers_to_wire};
use super::{FromNumber, all, id_bytes, message_id, small, wanted};
use crate::{WireError, proto};

impl From<(u64, Query)> for proto::Query {
    fn from((id, query): (u64, Query)) -> Self {
        use proto::query::Query as Wire;
        Self {
            id,
            query: match query {
                Query::Status(query) => Some(Wire::Status(query.into())),
                Query::Message(message) => Some(Wire::Message(id_bytes(message))),
                Query::Failed(query) => Some(Wire::Failed(query.into())),
                Query::Operation(name) => Some(Wire::Operation(name)),
                Query::Workflows(query) => Some(Wire::Workflows(query.into())),
                Query::Schedules(query) => Some(Wire::Schedules(query.into())),
                Query::Progress(job) => Some(Wire::Progress(id_bytes(job))),
                Query::Ask(ask) => Some(Wire::Ask(ask.into())),
                Query::Unnamed => None,
                Query::Stop => Some(Wire::Stop(true)),
                Query::SetClock {
                    forward_ms,
                    by_schedules,
                } => Some(Wire::SetClock(proto::SetClock {
                    forward_ms,
                    by_schedules,
                })),
            },
        }
    }
}

impl TryFrom<proto::Query> for (u64, Query) {
    type Error = WireError;

    fn try_from(wire: proto::Query) -> Result<Self, WireError> {
        use proto::query::Query as Wire;
        let query = match wire.query {
            // A newer protocol has more queries.
            None => Query::Unnamed,
            Some(Wire::Status(query)) => Query::Status(query.try_into()?),
            Some(Wire::Message(id)) => Query::Message(message_id(&id)?),
            Some(Wire::Failed(query)) => Query::Failed(query.try_into()?),
            Some(Wire::Operation(name)) => Query::Operation(name),
            Some(Wire::Workflows(query)) => Query::Workflows(query.try_into()?),
            Some(Wire::Schedules(query)) => Query::Schedules(query.into()),
            Some(Wire::Progress(job)) => Query::Progress(message_id(&job)?),
            Some(Wire::Ask(ask)) => Query::Ask(ask.into()),
            Some(Wire::Stop(_)) => Query::Stop,
            Some(Wire::SetClock(proto::SetClock {
                forward_ms,
                by_schedules,
            })) => Query::SetClock {
                forward_ms,
                by_schedules,
            },
        };
        Ok((wire.id, query))
    }
}

impl From<(u64, Answer)> for proto::Answer {
    fn from((id, answer): (u64, Answer)) -> Self {
        use proto::answer::Answer as Wire;
        Self {
            id,
            answer: Some(match answer {
                Answer::Status(page) => Wire::Status(page.into()),
                Answer::Message(Some(info)) => Wire::Message(info.into()),
                Answer::Message(None) => Wire::UnknownMessage(true),
                Answer::Failed(page) => Wire::Failed(page.into()),
                Answer::Operation(Some(status)) => Wire::Operation(status.into()),
                Answer::Operation(None) => Wire::UnknownOperation(true),
                Answer::Workflows(page) => Wire::Workflows(page.into()),
                Answer::Schedules(page) => Wire::Schedules(page.into()),
                Answer::Progress(body) => Wire::Progress(proto::ProgressAnswer { body }),
                Answer::Asked(outcome) => Wire::Asked(outcome.into()),
                Answer::Stopping => Wire::Stopping(true),
                Answer::Clock(now) => Wire::ClockMs(now),
                Answer::Refused(why) => Wire::Refused(why),
            }),
        }
    }
}

impl TryFrom<proto::Answer> for (u64, Answer) {
    type Error = WireError;

    fn try_from(wire: proto::Answer) -> Result<Self, WireError> {
        use proto::answer::Answer as Wire;
        let answer = match wanted(wire.answer, "an answer is empty or unknown")? {
            Wire::Status(page) => Answer::Status(page.try_into()?),
            Wire::Message(info) => Answer::Message(Some(info.try_into()?)),
            Wire::UnknownMessage(_) => Answer::Message(None),
            Wire::Failed(page) => Answer::Failed(page.try_into()?),
            Wire::Operation(status) => Answer::Operation(Some(status.into())),
            Wire::UnknownOperation(_) => Answer::Operation(None),
            Wire::Workflows(page) => Answer::Workflows(page.try_into()?),
            Wire::Schedules(page) => Answer::Schedules(page.try_into()?),
            Wire::Progress(progress) => Answer::Progress(progress.body),
            Wire::Asked(asked) => Answer::Asked(asked.try_into()?),
            Wire::Stopping(_) => Answer::Stopping,
            Wire::ClockMs(now) => Answer::Clock(now),
            Wire::Refused(why) => Answer::Refused(why),
        };
        Ok((wire.id, answer))
    }
}

impl From<StatusQuery> for proto::StatusQuery {
    fn from(query: StatusQuery) -> Self {
        Self {
            queues: query.queues,
            after: query.after.map(Into::into),
            limit: query.limit,
        }
    }
}

impl TryFrom<proto::StatusQuery> for StatusQuery {
    type Error = WireError;

    fn try_from(wire: proto::StatusQuery) -> Result<Self, WireError> {
        Ok(Self {
            queues: wire.queues,
            after: wire.after.map(TryInto::try_into).transpose()?,
            limit: wire.limit,
        })
    }
}

impl From<StatusCursor> for proto::StatusCursor {
    fn from(cursor: StatusCursor) -> Self {
        use proto::status_cursor::Place;
        Self {
            place: Some(match cursor {
                StatusCursor::Queue(name) => Place::Queue(name),
                StatusCursor::Task(name) => Place::Task(name),
                StatusCursor::Worker(number) => Place::Worker(number),
            }),
        }
    }
}

impl TryFrom<proto::StatusCursor> for StatusCursor {
    type Error = WireError;

    fn try_from(wire: proto::StatusCursor) -> Result<Self, WireError> {
        use proto::status_cursor::Place;
        Ok(match wanted(wire.place, "a cursor is empty or unknown")? {
            Place::Queue(name) => Self::Queue(name),
            Place::Task(name) => Self::Task(name),
            Place::Worker(number) => Self::Worker(number),
        })
    }
}

impl From<RunningJob> for proto::status::Running {
    fn from(job: RunningJob) -> Self {
        Self {
            id: id_bytes(job.id),
            task: job.task,
            queue: job.queue,
            started_at_ms: job.started_at,
        }
    }
}

impl TryFrom<proto::status::Running> for RunningJob {
    type Error = WireError;

    fn try_from(wire: proto::status::Running) -> Result<Self, WireError> {
        Ok(Self {
            id: message_id(&wire.id)?,
            task: wire.task,
            queue: wire.queue,
            started_at: wire.started_at_ms,
        })
    }
}

impl From<StatusPage> for proto::StatusPage {
    fn from(page: StatusPage) -> Self {
        Self {
            status: Some(page.status.into()),
            next: page.next.map(Into::into),
            own_leases: page.own_leases,
            own_ready: page.own_ready,
        }
    }
}

impl TryFrom<proto::StatusPage> for StatusPage {
    type Error = WireError;

    fn try_from(wire: proto::StatusPage) -> Result<Self, WireError> {
        Ok(Self {
            status: wanted(wire.status, "a page of the status has none")?.try_into()?,
            next: wire.next.map(TryInto::try_into).transpose()?,
            own_leases: wire.own_leases,
            own_ready: wire.own_ready,
        })
    }
}

impl From<JobCounts> for proto::JobCounts {
    fn from(counts: JobCounts) -> Self {
        let JobCounts {
            enqueued,
            started,
            succeeded,
            failed,
            retried,
            expired,
            cancelled,
            crashed,
            dropped,
        } = counts;
        Self {
            enqueued,
            started,
            succeeded,
            failed,
            retried,
            expired,
            cancelled,
            crashed,
            dropped,
        }
    }
}

impl From<proto::JobCounts> for JobCounts {
    fn from(counts: proto::JobCounts) -> Self {
        let proto::JobCounts {
            enqueued,
            started,
            succeeded,
            failed,
            retried,
            expired,
            cancelled,
            crashed,
            dropped,
        } = counts;
        Self {
            enqueued,
            started,
            succeeded,
            failed,
            retried,
            expired,
            cancelled,
            crashed,
            dropped,
        }
    }
}

/// Omits the counts while all are zero, as they are for most queues and tasks in any minute.
fn some(counts: JobCounts) -> Option<proto::JobCounts> {
    (counts != JobCounts::default()).then(|| counts.into())
}

fn tallied(counts: Option<proto::JobCounts>, last_minute: Option<proto::JobCounts>) -> Tallied {
    Tallied {
        counts: counts.unwrap_or_default().into(),
        last_minute: last_minute.unwrap_or_default().into(),
    }
}

fn share(permille: u32) -> Result<u16, WireError> {
    let permille = u16::try_from(permille).ok();
    let permille = permille.filter(|permille| *permille <= 1000);
    permille.ok_or(WireError::Invalid("a share is over 1000 thousandths"))
}

impl From<Status> for proto::Status {
    fn from(status: Status) -> Self {
        let queue = |queue: QueueStatus| proto::status::Queue {
            name: queue.name,
            ready: queue.ready,
            delayed: queue.delayed,
            running: queue.running,
            oldest_ready_ms: queue.oldest_ready_ms,
            paused: queue.paused,
            consumers: queue.consumers,
            waiting_bytes: queue.waiting_bytes,
            limits: (!queue.limits.is_none()).then(|| queue.limits.into()),
            refused: queue.refused,
            dropped: queue.dropped,
            ending: queue.ending,
            failed: queue.failed,
            unknown: queue.unknown,
            counts: some(queue.tallied.counts),
            last_minute: some(queue.tallied.last_minute),
            capacity_permille: queue.capacity_permille.map(u32::from),
        };
        let task = |task: TaskStatus| proto::status::Task {
            name: task.name,
            counts: some(task.tallied.counts),
            last_minute: some(task.tallied.last_minute),
        };
        let others = proto::status::Others {
            queues: status.others.queues,
            tasks: status.others.tasks,
            of_queues: some(status.others.of_queues),
            of_tasks: some(status.others.of_tasks),
            refused: status.others.refused,
        };
        let worker = |worker: WorkerStatus| proto::status::Worker {
            name: worker.name,
            queues: worker.queues,
            slots: worker.slots,
            busy: worker.busy,
            parked: worker.parked,
            leases: worker.leases,
            connected: worker.connected,
            running: worker.running.into_iter().map(Into::into).collect(),
            state: proto::WorkerState::from(worker.state).into(),
        };
        Self {
            queues: status.queues.into_iter().map(queue).collect(),
            tasks: status.tasks.into_iter().map(task).collect(),
            workers: status.workers.into_iter().map(worker).collect(),
            others: Some(Box::new(others)),
            clients: status.clients,
            connected_workers: status.connected_workers,
            results: status.results,
            results_bytes: status.results_bytes,
            evicted: status.evicted,
            unreadable: status.unreadable,
            failed: status.failed,
            failed_bytes: status.failed_bytes,
            failed_dropped: status.failed_dropped,
            health: Some(proto::Health {
                space: proto::health::Space::from(status.space).into(),
                memory_is_full: status.memory_is_full,
                published: status.counts.published,
                delivered: status.counts.delivered,
                settled: status.counts.settled,
                expired: status.counts.expired,
                dropped: status.counts.dropped,
                refused: status.counts.refused,
                failed: status.counts.failed,
                cancelled: status.counts.cancelled,
                unsynced_records: status.process.unsynced_records,
                unsynced_bytes: status.process.unsynced_bytes,
                batch_records: status.process.batch_records,
                batch_bytes: status.process.batch_bytes,
                reclaim_debt_bytes: status.process.reclaim_debt_bytes,
                reserves: status.process.reserves,
                memory_bytes: status.process.memory_bytes,
                memory_limit_bytes: status.process.memory_limit_bytes,
                full_connections: status.process.full_connections,
                blocked: status.process.blocked,
                cost_ns: status.process.cost_ns,
            }),
            broker_pid: status.process.pid,
            uptime_ms: status.process.uptime_ms,
            sync_p50_us: status.process.sync_p50_us,
            sync_p99_us: status.process.sync_p99_us,
            journal_bytes: status.process.journal_bytes,
            broker_version: status.process.version,
        }
    }
}

impl TryFrom<proto::Status> for Status {
    type Error = WireError;

    fn try_from(wire: proto::Status) -> Result<Self, WireError> {
        let queue = |queue: proto::status::Queue| -> Result<QueueStatus, WireError> {
            Ok(QueueStatus {
                name: queue.name,
                ready: queue.ready,
                delayed: queue.delayed,
                running: queue.running,
                oldest_ready_ms: queue.oldest_ready_ms,
                paused: queue.paused,
                consumers: queue.consumers,
                waiting_bytes: queue.waiting_bytes,
                limits: queue
                    .limits
                    .map_or(Ok(QueueLimits::NONE), QueueLimits::try_from)?,
                refused: queue.refused,
                dropped: queue.dropped,
                ending: queue.ending,
                failed: queue.failed,
                unknown: queue.unknown,
                tallied: tallied(queue.counts, queue.last_minute),
                capacity_permille: queue.capacity_permille.map(share).transpose()?,
            })
        };
        let task = |task: proto::status::Task| TaskStatus {
            name: task.name,
            tallied: tallied(task.counts, task.last_minute),
        };
        let others = wire.others.unwrap_or_default();
        let others = Box::new(Others {
            queues: others.queues,
            tasks: others.tasks,
            of_queues: others.of_queues.unwrap_or_default().into(),
            of_tasks: others.of_tasks.unwrap_or_default().into(),
            refused: others.refused,
        });
        let worker = |worker: proto::status::Worker| {
            Ok(WorkerStatus {
                name: worker.name,
                queues: worker.queues,
                slots: worker.slots,
                busy: worker.busy,
                parked: worker.parked,
                leases: worker.leases,
                connected: worker.connected,
                running: all(worker.running)?,
                // A newer worker's state may have no name here.
                state: WorkerState::from_number(worker.state).unwrap_or_default(),
            })
        };
        let health = wire.health.unwrap_or_default();
        Ok(Self {
            queues: wire
                .queues
                .into_iter()
                .map(queue)
                .collect::<Result<_, WireError>>()?,
            tasks: wire.tasks.into_iter().map(task).collect(),
            workers: wire
                .workers
                .into_iter()
                .map(worker)
                .collect::<Result<_, WireError>>()?,
            others,
            clients: wire.clients,
            connected_workers: wire.connected_workers,
            results: wire.results,
            results_bytes: wire.results_bytes,
            evicted: wire.evicted,
            unreadable: wire.unreadable,
            failed: wire.failed,
            failed_bytes: wire.failed_bytes,
            failed_dropped: wire.failed_dropped,
            counts: Box::new(BrokerCounts {
                published: health.published,
                delivered: health.delivered,
                settled: health.settled,
                expired: health.expired,
                dropped: health.dropped,
                refused: health.refused,
                failed: health.failed,
                cancelled: health.cancelled,
            }),
            space: Space::from_number(health.space)?,
            memory_is_full: health.memory_is_full,
            process: Box::new(ProcessStatus {
                version: wire.broker_version,
                pid: wire.broker_pid,
                uptime_ms: wire.uptime_ms,
                sync_p50_us: wire.sync_p50_us,
                sync_p99_us: wire.sync_p99_us,
                journal_bytes: wire.journal_bytes,
                unsynced_records: health.unsynced_records,
                unsynced_bytes: health.unsynced_bytes,
                batch_records: health.batch_records,
                batch_bytes: health.batch_bytes,
                reclaim_debt_bytes: health.reclaim_debt_bytes,
                reserves: health.reserves,
                memory_bytes: health.memory_bytes,
                memory_limit_bytes: health.memory_limit_bytes,
                full_connections: health.full_connections,
                blocked: health.blocked,
                cost_ns: health.cost_ns,
            }),
        })
    }
}

impl From<MessageInfo> for proto::MessageInfo {
    fn from(info: MessageInfo) -> Self {
        let (failed_at_ms, failure) = info.failed.map(|failed| *failed).unzip();
        Self {
            id: id_bytes(info.id),
            task: info.task,
            queue: info.queue,
            state: proto::message_info::State::from(info.state).into(),
            enqueued_at_ms: info.enqueued_at,
            started_at_ms: info.started_at,
            due_at_ms: info.due_at,
            attempt: info.attempt,
            crashes: u32::from(info.crashes),
            worker: info.worker,
            notes: info.notes,
            generation: info.generation,
            failed_at_ms,
            failure: failure.map(Into::into),
            headers: headers_to_wire(info.headers),
            task_unknown: info.task_unknown,
        }
    }
}

impl TryFrom<proto::MessageInfo> for MessageInfo {
    type Error = WireError;

    fn try_from(wire: proto::MessageInfo) -> Result<Self, WireError> {
        Ok(Self {
            id: message_id(&wire.id)?,
            task: wire.task,
            queue: wire.queue,
            state: MessageState::from_number(wire.state)?,
            enqueued_at: wire.enqueued_at_ms,
            started_at: wire.started_at_ms,
            due_at: wire.due_at_ms,
            attempt: wire.attempt,
            crashes: small(wire.crashes)?,
            worker: wire.worker,
            notes: wire.notes,
            generation: wire.generation,
            failed: wire
                .failed_at_ms
                .zip(wire.failure)
                .map(|(at, failure)| Box::new((at, Failure::from(failure)))),
            headers: headers_from_wire(wire.headers),
            task_unknown: wire.task_unknown,
        })
    }
}

impl From<Notice> for proto::Notice {
    fn from(notice: Notice) -> Self {
        use proto::notice;
        Self {
            notice: Some(match notice {
                Notice::Unserved {
                    queue,
                    waiting,
                    for_ms,
                } => notice::Notice::Unserved(notice::Unserved {
                    queue,
                    waiting,
                    for_ms,
                }),
                Notice::Space(space) => {
                    notice::Notice::Space(proto::health::Space::from(space).into())
                }
                Notice::Memory {
                    is_full,
                    limit_bytes,
                } => notice::Notice::Memory(notice::Memory {
                    is_full,
                    limit_bytes,
                }),
                Notice::Evicting { group, cap_bytes } => {
                    notice::Notice::Evicting(notice::Evicting { group, cap_bytes })
                }
                Notice::FailedDropped { kept, kept_bytes } => {
                    notice::Notice::FailedDropped(notice::FailedDropped { kept, kept_bytes })
                }
                Notice::UnknownTask {
                    queue,
                    task,
                    others,
                    waiting,
                } => notice::Notice::UnknownTask(notice::UnknownTask {
                    queue,
                    task,
                    others,
                    waiting,
                }),
                Notice::SharedTask {
                    queue,
                    task,
                    others,
                    app,
                    other_app,
                } => notice::Notice::SharedTask(notice::SharedTask {
                    queue,
                    task,
                    others,
                    app,
                    other_app,
                }),
                Notice::Hung {
                    schedule,
                    job,
                    for_ms,
                    median_ms,
                } => notice::Notice::Hung(notice::Hung {
                    schedule: Some(schedule.into()),
                    job: id_bytes(job),
                    for_ms,
                    median_ms,
                }),
                Notice::Unreadable { id, queue, reason } => {
                    notice::Notice::Unreadable(notice::Unreadable {
                        id: id_bytes(id),
                        queue,
                        reason,
                    })
                }
            }),
        }
    }
}

impl TryFrom<proto::Notice> for Notice {
    type Error = WireError;

    fn try_from(wire: proto::Notice) -> Result<Self, WireError> {
        use proto::notice::Notice as Wire;
        Ok(match wanted(wire.notice, "a notice is empty or unknown")? {
            Wire::Unserved(unserved) => Self::Unserved {
                queue: unserved.queue,
                waiting: unserved.waiting,
                for_ms: unserved.for_ms,
            },
            Wire::SharedTask(shared) => Self::SharedTask {
                queue: shared.queue,
                task: shared.task,
                others: shared.others,
                app: shared.app,
                other_app: shared.other_app,
            },
            Wire::UnknownTask(unknown) => Self::UnknownTask {
                queue: unknown.queue,
                task: unknown.task,
                others: unknown.others,
                waiting: unknown.waiting,
            },
            Wire::Space(space) => Self::Space(Space::from_number(space)?),
            Wire::Memory(memory) => Self::Memory {
                is_full: memory.is_full,
                limit_bytes: memory.limit_bytes,
            },
            Wire::Evicting(evicting) => Self::Evicting {
                group: evicting.group,
                cap_bytes: evicting.cap_bytes,
            },
            Wire::FailedDropped(dropped) => Self::FailedDropped {
                kept: dropped.kept,
                kept_bytes: dropped.kept_bytes,
            },
            Wire::Hung(hung) => Self::Hung {
                schedule: wanted(hung.schedule, "a schedule has no name")?.into(),
                job: message_id(&hung.job)?,
                for_ms: hung.for_ms,
                median_ms: hung.median_ms,
            },
            Wire::Unreadable(unreadable) => Self::Unreadable {
                id: message_id(&unreadable.id)?,
                queue: unreadable.queue,
                reason: unreadable.reason,
            },
        })
    }
}
