//! Between the messages of the protocol and the nouns. Towards the wire everything has a form; from
//! the wire it is checked, and what makes no sense is [`WireError::Invalid`].

use bytes::Bytes;
use penstock_message::{
    Answer, Condition, Counts, Delivery, Due, Durability, HeaderPatch, JoinPolicy, Key, KeyState,
    Lease, Message, MessageId, MessageInfo, MessageState, Notice, Op, Overflow, ProcessStatus,
    Query, QueueLimits, QueueStatus, Receipt, Refusal, ReleaseReason, SessionId, Space, Status, Tx,
    Value, ValueStatus, WorkerStatus,
};

use crate::{WireError, proto};

/// Declares both ways between an enum of the nouns and its number on the wire.
macro_rules! same_variants {
    ($noun:ident, $wire:ty, $unknown:literal, { $($variant:ident = $wire_variant:ident),+ $(,)? }) => {
        impl From<$noun> for $wire {
            fn from(noun: $noun) -> Self {
                match noun { $($noun::$variant => Self::$wire_variant),+ }
            }
        }
        impl From<$wire> for $noun {
            fn from(wire: $wire) -> Self {
                match wire { $(<$wire>::$wire_variant => Self::$variant),+ }
            }
        }
        impl FromNumber for $noun {
            fn from_number(number: i32) -> Result<Self, WireError> {
                match <$wire>::try_from(number) {
                    Ok(wire) => Ok(wire.into()),
                    Err(_) => Err(WireError::Invalid($unknown)),
                }
            }
        }
    };
}

trait FromNumber: Sized {
    fn from_number(number: i32) -> Result<Self, WireError>;
}

same_variants!(Durability, proto::Durability, "an unknown durability", {
    Disk = Disk, Os = Os, None = None,
});
same_variants!(ValueStatus, proto::value::Status, "an unknown status of a value", {
    Succeeded = Succeeded, Failed = Failed, Expired = Expired, Crashed = Crashed, Cancelled = Cancelled,
});
same_variants!(Overflow, proto::limit::Overflow, "an unknown overflow of a queue", {
    Reject = Reject, DropOldest = DropOldest,
});
same_variants!(Space, proto::health::Space, "an unknown level of space", {
    Plenty = Plenty, NoPublishes = NoPublishes, NoLeases = NoLeases, NoSettlements = NoSettlements,
});
same_variants!(MessageState, proto::message_info::State, "an unknown state of a message", {
    Ready = Ready, Delayed = Delayed, Running = Running, Held = Held, Dead = Dead,
});

fn wanted<T>(field: Option<T>, missing: &'static str) -> Result<T, WireError> {
    field.ok_or(WireError::Invalid(missing))
}

fn sixteen(bytes: &[u8]) -> Result<[u8; 16], WireError> {
    bytes
        .try_into()
        .map_err(|_| WireError::Invalid("an id is not 16 bytes long"))
}

fn small(number: u32) -> Result<u8, WireError> {
    u8::try_from(number)
        .map_err(|_| WireError::Invalid("a priority or a number of deliveries is over 255"))
}

fn id_bytes(id: MessageId) -> Bytes {
    Bytes::copy_from_slice(&id.0)
}

pub fn message_id(bytes: &[u8]) -> Result<MessageId, WireError> {
    sixteen(bytes).map(MessageId)
}

pub fn session_id(bytes: &[u8]) -> Result<SessionId, WireError> {
    sixteen(bytes).map(SessionId)
}

pub fn durability(number: i32) -> Result<Durability, WireError> {
    Durability::from_number(number)
}

/// All of a repeated field.
pub fn all<W, N>(wire: Vec<W>) -> Result<Vec<N>, WireError>
where
    N: TryFrom<W, Error = WireError>,
{
    wire.into_iter().map(N::try_from).collect()
}

// Messages and what they hang on.

impl From<Lease> for proto::Lease {
    fn from(lease: Lease) -> Self {
        Self {
            message: id_bytes(lease.message),
            epoch: lease.epoch,
            grant: lease.grant,
        }
    }
}

impl TryFrom<proto::Lease> for Lease {
    type Error = WireError;

    fn try_from(wire: proto::Lease) -> Result<Self, WireError> {
        Ok(Self {
            message: message_id(&wire.message)?,
            epoch: wire.epoch,
            grant: wire.grant,
        })
    }
}

fn lease(wire: Option<proto::Lease>) -> Result<Lease, WireError> {
    wanted(wire, "an operation on a delivery has no lease")?.try_into()
}

impl From<Due> for proto::Due {
    fn from(due: Due) -> Self {
        Self {
            due: Some(match due {
                Due::AfterMs(after) => proto::due::Due::AfterMs(after),
                Due::At(at) => proto::due::Due::AtMs(at),
            }),
        }
    }
}

impl TryFrom<proto::Due> for Due {
    type Error = WireError;

    fn try_from(wire: proto::Due) -> Result<Self, WireError> {
        Ok(match wanted(wire.due, "a due time is empty")? {
            proto::due::Due::AfterMs(after) => Self::AfterMs(after),
            proto::due::Due::AtMs(at) => Self::At(at),
        })
    }
}

fn due(wire: Option<proto::Due>) -> Result<Option<Due>, WireError> {
    wire.map(Due::try_from).transpose()
}

impl From<Message> for proto::Message {
    fn from(message: Message) -> Self {
        Self {
            id: id_bytes(message.id),
            task: message.task,
            priority: u32::from(message.priority),
            expires_at: message.expires_at.map(Into::into),
            result_ttl_ms: message.result_ttl_ms,
            max_deliveries: u32::from(message.max_deliveries),
            attempt: message.attempt,
            crashes: u32::from(message.crashes),
            enqueued_at_ms: message.enqueued_at,
            notes: message.notes,
            body: message.body,
        }
    }
}

impl TryFrom<proto::Message> for Message {
    type Error = WireError;

    fn try_from(wire: proto::Message) -> Result<Self, WireError> {
        Ok(Self {
            id: message_id(&wire.id)?,
            task: wire.task,
            priority: small(wire.priority)?,
            expires_at: due(wire.expires_at)?,
            result_ttl_ms: wire.result_ttl_ms,
            max_deliveries: small(wire.max_deliveries)?,
            attempt: wire.attempt,
            crashes: small(wire.crashes)?,
            enqueued_at: wire.enqueued_at_ms,
            notes: wire.notes,
            body: wire.body,
        })
    }
}

impl From<Delivery> for proto::Delivery {
    fn from(delivery: Delivery) -> Self {
        // The message's id says which message the lease is for.
        debug_assert_eq!(delivery.lease.message, delivery.message.id);
        Self {
            epoch: delivery.lease.epoch,
            grant: delivery.lease.grant,
            queue: delivery.queue,
            redelivered: delivery.redelivered,
            message: Some(delivery.message.into()),
        }
    }
}

impl TryFrom<proto::Delivery> for Delivery {
    type Error = WireError;

    fn try_from(wire: proto::Delivery) -> Result<Self, WireError> {
        let message = Message::try_from(wanted(wire.message, "a delivery has no message")?)?;
        Ok(Self {
            lease: Lease {
                message: message.id,
                epoch: wire.epoch,
                grant: wire.grant,
            },
            queue: wire.queue,
            redelivered: wire.redelivered,
            message,
        })
    }
}

// Keys and values.

impl From<Key> for proto::KeyRef {
    fn from(key: Key) -> Self {
        Self {
            key: Some(match key {
                Key::Result(id) => proto::key_ref::Key::Result(id_bytes(id)),
                Key::Named(name) => proto::key_ref::Key::Named(name),
            }),
        }
    }
}

impl TryFrom<proto::KeyRef> for Key {
    type Error = WireError;

    fn try_from(wire: proto::KeyRef) -> Result<Self, WireError> {
        Ok(match wanted(wire.key, "a key is empty")? {
            proto::key_ref::Key::Result(id) => Self::Result(message_id(&id)?),
            proto::key_ref::Key::Named(name) => Self::Named(name),
        })
    }
}

fn key(wire: Option<proto::KeyRef>) -> Result<Key, WireError> {
    wanted(wire, "an operation on a key has none")?.try_into()
}

impl From<Value> for proto::Value {
    fn from(value: Value) -> Self {
        Self {
            status: proto::value::Status::from(value.status).into(),
            body: value.body,
        }
    }
}

impl TryFrom<proto::Value> for Value {
    type Error = WireError;

    fn try_from(wire: proto::Value) -> Result<Self, WireError> {
        Ok(Self {
            status: ValueStatus::from_number(wire.status)?,
            body: wire.body,
        })
    }
}

impl From<(Key, KeyState)> for proto::KeyValue {
    fn from((key, state): (Key, KeyState)) -> Self {
        use proto::key_value::State;
        Self {
            key: Some(key.into()),
            state: Some(match state {
                KeyState::Present(value) => State::Present(value.into()),
                KeyState::Pending => State::Pending(true),
                KeyState::Gone => State::Gone(true),
            }),
        }
    }
}

impl TryFrom<proto::KeyValue> for (Key, KeyState) {
    type Error = WireError;

    fn try_from(wire: proto::KeyValue) -> Result<Self, WireError> {
        use proto::key_value::State;
        let state = match wanted(wire.state, "a key has no state")? {
            State::Present(value) => KeyState::Present(value.try_into()?),
            State::Pending(_) => KeyState::Pending,
            State::Gone(_) => KeyState::Gone,
        };
        Ok((key(wire.key)?, state))
    }
}

// Transactions.

impl From<Tx> for proto::Tx {
    fn from(tx: Tx) -> Self {
        Self {
            ops: tx.ops.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<proto::Tx> for Tx {
    type Error = WireError;

    fn try_from(wire: proto::Tx) -> Result<Self, WireError> {
        Ok(Self {
            ops: all(wire.ops)?,
        })
    }
}

impl From<Op> for proto::Op {
    fn from(op: Op) -> Self {
        use proto::op::Op as Wire;
        let op = match op {
            Op::Ack { lease, cost_us } => Wire::Ack(proto::Ack {
                lease: Some(lease.into()),
                cost_us,
            }),
            Op::Release { lease, reason } => {
                let (crashed, reason) = match reason {
                    ReleaseReason::Returned => (false, String::new()),
                    ReleaseReason::Crashed(reason) => (true, reason),
                };
                Wire::Release(proto::Release {
                    lease: Some(lease.into()),
                    crashed,
                    reason,
                })
            }
            Op::Move {
                lease,
                queue,
                due,
                patch,
                cost_us,
            } => Wire::Move(proto::Move {
                lease: Some(lease.into()),
                queue,
                due: due.map(Into::into),
                next_attempt: patch.next_attempt,
                note: patch.note,
                expires_at: patch.expires_at.map(Into::into),
                cost_us,
            }),
            Op::Publish {
                queues,
                message,
                due,
                unless_key,
            } => Wire::Publish(proto::Publish {
                queues,
                message: Some(message.into()),
                due: due.map(Into::into),
                unless_key: unless_key.map(Into::into),
            }),
            Op::Put {
                key,
                value,
                ttl_ms,
                group,
            } => Wire::Put(proto::Put {
                key: Some(key.into()),
                value: Some(value.into()),
                ttl_ms,
                group,
            }),
            Op::Delete { key } => Wire::Delete(key.into()),
            Op::Guard { key, condition } => {
                use proto::guard::Condition as Wanted;
                Wire::Guard(proto::Guard {
                    key: Some(key.into()),
                    condition: Some(match condition {
                        Condition::Absent => Wanted::Absent(true),
                        Condition::Present => Wanted::Present(true),
                        Condition::Is(body) => Wanted::Is(body),
                    }),
                })
            }
            Op::Hold {
                join,
                count,
                messages,
                policy,
            } => Wire::Hold(proto::Hold {
                join: id_bytes(join),
                count,
                messages: messages
                    .into_iter()
                    .map(|(queue, message)| proto::hold::Held {
                        queue,
                        message: Some(message.into()),
                    })
                    .collect(),
                all_ended: policy == JoinPolicy::AllEnded,
            }),
            Op::Join {
                join,
                index,
                succeeded,
            } => Wire::Join(proto::Join {
                join: id_bytes(join),
                index,
                succeeded,
            }),
            Op::Purge { queue } => Wire::Purge(queue),
            Op::Pause { queue } => Wire::Pause(queue),
            Op::Resume { queue } => Wire::Resume(queue),
            Op::Limit { queue, limits } => Wire::Limit(proto::Limit {
                queue,
                ..limits.into()
            }),
        };
        Self { op: Some(op) }
    }
}

impl TryFrom<proto::Op> for Op {
    type Error = WireError;

    fn try_from(wire: proto::Op) -> Result<Self, WireError> {
        use proto::op::Op as Wire;
        Ok(match wanted(wire.op, "an operation is empty or unknown")? {
            Wire::Ack(ack) => Self::Ack {
                lease: lease(ack.lease)?,
                cost_us: ack.cost_us,
            },
            Wire::Release(release) => Self::Release {
                lease: lease(release.lease)?,
                reason: if release.crashed {
                    ReleaseReason::Crashed(release.reason)
                } else {
                    ReleaseReason::Returned
                },
            },
            Wire::Move(moved) => Self::Move {
                lease: lease(moved.lease)?,
                queue: moved.queue,
                due: due(moved.due)?,
                patch: HeaderPatch {
                    next_attempt: moved.next_attempt,
                    note: moved.note,
                    expires_at: due(moved.expires_at)?,
                },
                cost_us: moved.cost_us,
            },
            Wire::Publish(publish) => Self::Publish {
                queues: publish.queues,
                message: wanted(publish.message, "a publish has no message")?.try_into()?,
                due: due(publish.due)?,
                unless_key: publish.unless_key.map(Key::try_from).transpose()?,
            },
            Wire::Put(put) => Self::Put {
                key: key(put.key)?,
                value: wanted(put.value, "a put has no value")?.try_into()?,
                ttl_ms: put.ttl_ms,
                group: put.group,
            },
            Wire::Delete(key) => Self::Delete {
                key: key.try_into()?,
            },
            Wire::Guard(guard) => {
                use proto::guard::Condition as Wanted;
                Self::Guard {
                    key: key(guard.key)?,
                    condition: match wanted(guard.condition, "a guard has no condition")? {
                        Wanted::Absent(_) => Condition::Absent,
                        Wanted::Present(_) => Condition::Present,
                        Wanted::Is(body) => Condition::Is(body),
                    },
                }
            }
            Wire::Hold(hold) => Self::Hold {
                join: message_id(&hold.join)?,
                count: hold.count,
                messages: hold
                    .messages
                    .into_iter()
                    .map(|held| {
                        let message = wanted(held.message, "a held message is missing")?;
                        Ok((held.queue, message.try_into()?))
                    })
                    .collect::<Result<_, WireError>>()?,
                policy: if hold.all_ended {
                    JoinPolicy::AllEnded
                } else {
                    JoinPolicy::AllSucceeded
                },
            },
            Wire::Join(join) => Self::Join {
                join: message_id(&join.join)?,
                index: join.index,
                succeeded: join.succeeded,
            },
            Wire::Purge(queue) => Self::Purge { queue },
            Wire::Pause(queue) => Self::Pause { queue },
            Wire::Resume(queue) => Self::Resume { queue },
            Wire::Limit(mut limit) => Self::Limit {
                queue: std::mem::take(&mut limit.queue),
                limits: limit.try_into()?,
            },
        })
    }
}

impl From<QueueLimits> for proto::Limit {
    fn from(limits: QueueLimits) -> Self {
        Self {
            queue: String::new(),
            max_length: limits.max_length,
            max_bytes: limits.max_bytes,
            overflow: proto::limit::Overflow::from(limits.overflow).into(),
        }
    }
}

impl TryFrom<proto::Limit> for QueueLimits {
    type Error = WireError;

    fn try_from(wire: proto::Limit) -> Result<Self, WireError> {
        Ok(Self {
            max_length: wire.max_length,
            max_bytes: wire.max_bytes,
            overflow: Overflow::from_number(wire.overflow)?,
        })
    }
}

impl From<(u64, Receipt)> for proto::Receipt {
    fn from((seq, receipt): (u64, Receipt)) -> Self {
        use proto::receipt::Why;
        let of = |why: Why| Self {
            seq,
            why: why.into(),
            ..Self::default()
        };
        match receipt {
            Receipt::Applied { skipped } => Self {
                skipped,
                ..of(Why::Applied)
            },
            Receipt::Duplicate => of(Why::Duplicate),
            Receipt::Unknown => of(Why::Unknown),
            Receipt::Refused { op, why } => {
                let (why, text) = match why {
                    Refusal::LeaseLost => (Why::LeaseLost, String::new()),
                    Refusal::GuardFailed => (Why::GuardFailed, String::new()),
                    Refusal::TooLarge(text) => (Why::TooLarge, text),
                    Refusal::AlreadyExists => (Why::AlreadyExists, String::new()),
                    Refusal::QueueFull(text) => (Why::QueueFull, text),
                    Refusal::DiskFull => (Why::DiskFull, String::new()),
                    Refusal::Invalid(text) => (Why::Invalid, text),
                };
                Self {
                    op,
                    text,
                    ..of(why)
                }
            }
        }
    }
}

impl TryFrom<proto::Receipt> for (u64, Receipt) {
    type Error = WireError;

    fn try_from(wire: proto::Receipt) -> Result<Self, WireError> {
        use proto::receipt::Why;
        let why = Why::try_from(wire.why).map_err(|_| WireError::Invalid("an unknown receipt"))?;
        let refusal = match why {
            Why::Applied => {
                let skipped = wire.skipped;
                return Ok((wire.seq, Receipt::Applied { skipped }));
            }
            Why::Duplicate => return Ok((wire.seq, Receipt::Duplicate)),
            Why::Unknown => return Ok((wire.seq, Receipt::Unknown)),
            Why::LeaseLost => Refusal::LeaseLost,
            Why::GuardFailed => Refusal::GuardFailed,
            Why::TooLarge => Refusal::TooLarge(wire.text),
            Why::AlreadyExists => Refusal::AlreadyExists,
            Why::QueueFull => Refusal::QueueFull(wire.text),
            Why::DiskFull => Refusal::DiskFull,
            Why::Invalid => Refusal::Invalid(wire.text),
        };
        Ok((
            wire.seq,
            Receipt::Refused {
                op: wire.op,
                why: refusal,
            },
        ))
    }
}

// Questions and answers.

impl From<(u64, Query)> for proto::Query {
    fn from((id, query): (u64, Query)) -> Self {
        use proto::query::Query as Wire;
        Self {
            id,
            query: Some(match query {
                Query::Status => Wire::Status(true),
                Query::Message(message) => Wire::Message(id_bytes(message)),
                Query::Stop => Wire::Stop(true),
            }),
        }
    }
}

impl TryFrom<proto::Query> for (u64, Query) {
    type Error = WireError;

    fn try_from(wire: proto::Query) -> Result<Self, WireError> {
        use proto::query::Query as Wire;
        let query = match wanted(wire.query, "a query is empty or unknown")? {
            Wire::Status(_) => Query::Status,
            Wire::Message(id) => Query::Message(message_id(&id)?),
            Wire::Stop(_) => Query::Stop,
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
                Answer::Status(status) => Wire::Status(status.into()),
                Answer::Message(Some(info)) => Wire::Message(info.into()),
                Answer::Message(None) => Wire::UnknownMessage(true),
                Answer::Stopping => Wire::Stopping(true),
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
            Wire::Status(status) => Answer::Status(status.try_into()?),
            Wire::Message(info) => Answer::Message(Some(info.try_into()?)),
            Wire::UnknownMessage(_) => Answer::Message(None),
            Wire::Stopping(_) => Answer::Stopping,
            Wire::Refused(why) => Answer::Refused(why),
        };
        Ok((wire.id, answer))
    }
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
        };
        let worker = |worker: WorkerStatus| proto::status::Worker {
            name: worker.name,
            queues: worker.queues,
            slots: worker.slots,
            busy: worker.busy,
            leases: worker.leases,
            connected: worker.connected,
        };
        Self {
            queues: status.queues.into_iter().map(queue).collect(),
            workers: status.workers.into_iter().map(worker).collect(),
            clients: status.clients,
            results: status.results,
            results_bytes: status.results_bytes,
            evicted: status.evicted,
            unreadable: status.unreadable,
            health: Some(proto::Health {
                space: proto::health::Space::from(status.space).into(),
                memory_is_full: status.memory_is_full,
                published: status.counts.published,
                delivered: status.counts.delivered,
                settled: status.counts.settled,
                expired: status.counts.expired,
                dropped: status.counts.dropped,
                refused: status.counts.refused,
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
            })
        };
        let worker = |worker: proto::status::Worker| WorkerStatus {
            name: worker.name,
            queues: worker.queues,
            slots: worker.slots,
            busy: worker.busy,
            leases: worker.leases,
            connected: worker.connected,
        };
        let health = wire.health.unwrap_or_default();
        Ok(Self {
            queues: wire
                .queues
                .into_iter()
                .map(queue)
                .collect::<Result<_, WireError>>()?,
            workers: wire.workers.into_iter().map(worker).collect(),
            clients: wire.clients,
            results: wire.results,
            results_bytes: wire.results_bytes,
            evicted: wire.evicted,
            unreadable: wire.unreadable,
            counts: Counts {
                published: health.published,
                delivered: health.delivered,
                settled: health.settled,
                expired: health.expired,
                dropped: health.dropped,
                refused: health.refused,
            },
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
            Wire::Space(space) => Self::Space(Space::from_number(space)?),
            Wire::Memory(memory) => Self::Memory {
                is_full: memory.is_full,
                limit_bytes: memory.limit_bytes,
            },
            Wire::Evicting(evicting) => Self::Evicting {
                group: evicting.group,
                cap_bytes: evicting.cap_bytes,
            },
            Wire::Unreadable(unreadable) => Self::Unreadable {
                id: message_id(&unreadable.id)?,
                queue: unreadable.queue,
                reason: unreadable.reason,
            },
        })
    }
}
