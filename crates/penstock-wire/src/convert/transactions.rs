//! Transactions and their receipts.

use bytes::{Buf, Bytes};
use penstock_message::{
    Applied, Claim, Condition, Conflict, HeaderPatch, Hold, JoinOutcome, JoinPolicy, Key, Message,
    MessageState, OnRunning, Op, Overflow, QueueLimits, Receipt, Refusal, ReleaseReason,
    ReleaseTimes, Target, Tx, Unsealed, Until, Value, ValueStatus,
};
use prost::encoding::message::merge;
use prost::encoding::{
    DecodeContext, WireType, decode_key, encode_key, encode_varint, encoded_len_varint, key_len,
    skip_field,
};
use prost::{DecodeError, Message as _};

use super::messages::due;
use super::messages::lease;
use super::schedules::{step_from_wire, step_to_wire};
use super::values::key;
use super::{FromNumber, all, id_bytes, message_id, wanted};
use crate::{WireError, proto};

/// Field number of the operations in `proto::Tx`.
const OPS: u32 = 1;

// A frame is weighed by its wire operations before it is converted.
const _: () = assert!(size_of::<Op>() <= size_of::<proto::Op>());

/// Encodes a transaction as `proto::Tx`.
pub fn encode_tx(tx: Tx) -> Bytes {
    let mut encoded = Vec::new();
    for op in tx.ops {
        let op = proto::Op::from(op);
        let op_bytes = op.encoded_len();
        let bytes = encoded_op_len(op_bytes);
        match encoded.is_empty() {
            // Most transactions have one operation.
            true => encoded.reserve_exact(bytes),
            false => encoded.reserve(bytes),
        }
        encode_op(&op, op_bytes, &mut encoded);
    }
    encoded.into()
}

/// Returns the bytes that an operation takes within a transaction.
pub fn encoded_op_len(op_bytes: usize) -> usize {
    key_len(OPS) + encoded_len_varint(op_bytes as u64) + op_bytes
}

/// Appends an operation to an encoded transaction.
///
/// A nested message computes its length once per level of nesting. For settlements that took a tenth of the
/// supervisor's time, so the caller computes it once: `op_bytes` is `op.encoded_len()`.
pub fn encode_op(op: &proto::Op, op_bytes: usize, encoded: &mut Vec<u8>) {
    encode_key(OPS, WireType::LengthDelimited, encoded);
    encode_varint(op_bytes as u64, encoded);
    op.encode_raw(encoded);
}

/// Decodes `proto::Tx`. Byte fields are slices of `encoded`, not copies.
///
/// Each operation is converted at once: a vector of all wire operations would take 224 bytes a job, mapped and zeroed anew
/// for each large frame. That was a sixth of the broker's time for jobs that arrive in bulk.
pub fn decode_tx(mut encoded: Bytes) -> Result<Tx, WireError> {
    let malformed = |error: DecodeError| WireError::NotProtobuf(error.to_string());
    let context = DecodeContext::default;
    let mut ops = Vec::new();
    while encoded.has_remaining() {
        let (number, wire_type) = decode_key(&mut encoded).map_err(malformed)?;
        if number != OPS {
            skip_field(wire_type, number, &mut encoded, context()).map_err(malformed)?;
            continue;
        }
        let mut op = proto::Op::default();
        merge(wire_type, &mut op, &mut encoded, context()).map_err(malformed)?;
        ops.push(op.try_into()?);
    }
    Ok(Tx { ops })
}

/// Decodes the transactions of a commit.
pub fn decode_txs(encoded: Vec<Bytes>) -> Result<Vec<Tx>, WireError> {
    encoded.into_iter().map(decode_tx).collect()
}

impl From<Op> for proto::Op {
    fn from(op: Op) -> Self {
        use proto::op::Op as Wire;
        let op = match op {
            Op::Ack { lease, cost_us } => Wire::Ack(proto::Ack {
                lease: Some(lease.into()),
                cost_us,
                carry: false,
            }),
            Op::Replace { lease, cost_us } => Wire::Ack(proto::Ack {
                lease: Some(lease.into()),
                cost_us,
                carry: true,
            }),
            Op::Release { lease, reason } => {
                // A broker that does not know suspects counts a crash for each of them.
                let (crashed, suspected, reason) = match reason {
                    ReleaseReason::Returned => (false, false, String::new()),
                    ReleaseReason::Crashed(reason) => (true, false, reason),
                    ReleaseReason::Suspected(reason) => (true, true, reason),
                };
                Wire::Release(proto::Release {
                    lease: Some(lease.into()),
                    crashed,
                    reason,
                    suspected,
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
            } => {
                let (unless_key, claim) = claim_to_wire(unless_key);
                Wire::Publish(proto::Publish {
                    queues,
                    message: Some(message.into()),
                    due: due.map(Into::into),
                    unless_key: unless_key.map(Box::new),
                    claim: claim.map(Box::new),
                })
            }
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
            Op::Hold(hold) => Wire::Hold(hold.into()),
            Op::Join {
                join,
                index,
                succeeded,
            } => Wire::Join(proto::Join {
                join: id_bytes(join),
                index,
                succeeded,
            }),
            Op::Seal { join, count } => Wire::Seal(proto::Seal {
                join: id_bytes(join),
                count,
            }),
            Op::Grow { job, member, outer } => Wire::Grow(proto::Grow {
                job: id_bytes(job),
                member: id_bytes(member),
                outer,
            }),
            Op::Purge { queue } => Wire::Purge(queue),
            Op::Pause { queue } => Wire::Pause(queue),
            Op::Resume { queue } => Wire::Resume(queue),
            Op::Limit { queue, limits } => Wire::Limit(proto::Limit {
                queue,
                ..limits.into()
            }),
            Op::Cancel {
                target,
                reason,
                running,
            } => Wire::Cancel(proto::Cancel {
                target: Some(target.into()),
                reason,
                running: proto::cancel::Running::from(running).into(),
            }),
            Op::Fail {
                lease,
                value,
                note,
                failure,
                cost_us,
            } => Wire::Fail(proto::Fail {
                lease: Some(lease.into()),
                value,
                note,
                failure: Some(failure.into()),
                cost_us,
            }),
            Op::RetryFailed { target, queue } => Wire::RetryFailed(proto::RetryFailed {
                target: Some(target.into()),
                queue,
            }),
            Op::DropFailed { target } => Wire::DropFailed(target.into()),
            Op::Open(open) => Wire::Open(open.into()),
            Op::Schedule { schedule, step } => {
                Wire::Schedule(Box::new(step_to_wire(schedule, step)))
            }
            Op::Unschedule { schedule } => Wire::Unschedule(schedule.into()),
            Op::Unnamed => return Self { op: None },
        };
        Self { op: Some(op) }
    }
}

impl TryFrom<proto::Op> for Op {
    type Error = WireError;

    fn try_from(wire: proto::Op) -> Result<Self, WireError> {
        use proto::op::Op as Wire;
        // A newer protocol has more operations, and more kinds of targets. Each is refused separately, and the
        // connection continues.
        let Some(op) = wire.op else {
            return Ok(Self::Unnamed);
        };
        Ok(match op {
            Wire::Ack(ack) => {
                let (lease, cost_us) = (lease(ack.lease)?, ack.cost_us);
                match ack.carry {
                    false => Self::Ack { lease, cost_us },
                    true => Self::Replace { lease, cost_us },
                }
            }
            Wire::Release(release) => Self::Release {
                lease: lease(release.lease)?,
                reason: match (release.crashed, release.suspected) {
                    (false, _) => ReleaseReason::Returned,
                    (true, false) => ReleaseReason::Crashed(release.reason),
                    (true, true) => ReleaseReason::Suspected(release.reason),
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
                unless_key: claim_from_wire(publish.unless_key, publish.claim)?,
            },
            Wire::Put(put) => Self::Put {
                key: key(put.key)?,
                value: {
                    let value = wanted(put.value, "a put has no value")?;
                    // Sent without a run: only the broker knows the run.
                    Value::new(ValueStatus::from_number(value.status)?, value.body)
                },
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
            Wire::Hold(hold) => Self::Hold(hold.try_into()?),
            Wire::Join(join) => Self::Join {
                join: message_id(&join.join)?,
                index: join.index,
                succeeded: join.succeeded,
            },
            Wire::Seal(seal) => Self::Seal {
                join: message_id(&seal.join)?,
                count: seal.count,
            },
            Wire::Grow(grow) => Self::Grow {
                job: message_id(&grow.job)?,
                member: message_id(&grow.member)?,
                outer: grow.outer,
            },
            Wire::Purge(queue) => Self::Purge { queue },
            Wire::Pause(queue) => Self::Pause { queue },
            Wire::Resume(queue) => Self::Resume { queue },
            Wire::Limit(mut limit) => Self::Limit {
                queue: std::mem::take(&mut limit.queue),
                limits: limit.try_into()?,
            },
            Wire::Cancel(cancel) => match target(cancel.target)? {
                Some(target) => Self::Cancel {
                    target,
                    reason: cancel.reason,
                    running: OnRunning::from_number(cancel.running)?,
                },
                None => Self::Unnamed,
            },
            Wire::Fail(fail) => Self::Fail {
                lease: lease(fail.lease)?,
                value: fail.value,
                note: fail.note,
                failure: fail.failure.unwrap_or_default().into(),
                cost_us: fail.cost_us,
            },
            Wire::RetryFailed(retry) => match target(retry.target)? {
                Some(target) => Self::RetryFailed {
                    target,
                    queue: retry.queue,
                },
                None => Self::Unnamed,
            },
            Wire::Open(open) => Self::Open(open.try_into()?),
            Wire::Schedule(schedule) => step_from_wire(*schedule)?,
            Wire::Unschedule(schedule) => Self::Unschedule {
                schedule: schedule.into(),
            },
            Wire::DropFailed(dropped) => match target(Some(dropped))? {
                Some(target) => Self::DropFailed { target },
                None => Self::Unnamed,
            },
        })
    }
}

impl From<Hold> for proto::Hold {
    fn from(hold: Hold) -> Self {
        let held = |(queue, mut message): (String, Message)| {
            let extras = message.extras.as_mut();
            let later = extras.and_then(|extras| extras.later.take());
            let later = later.map_or_else(ReleaseTimes::default, |later| *later);
            proto::hold::Held {
                queue,
                message: Some(message.into()),
                due: later.due.map(Into::into),
                expires_after_ms: later.expires_after_ms,
            }
        };
        let expected = |(index, when): (u32, JoinOutcome)| proto::hold::Expected {
            index,
            when: proto::hold::When::from(when).into(),
        };
        let all_ended = hold.policy == JoinPolicy::AllEnded;
        Self {
            join: id_bytes(hold.join),
            count: hold.count,
            messages: hold.messages.into_iter().map(held).collect(),
            all_ended,
            max_failures: match all_ended {
                true => 0,
                false => hold.policy.max_failures(),
            },
            then: hold.then.into_iter().map(Into::into).collect(),
            result_ttl_ms: hold.result_ttl_ms,
            expects: hold.expects.into_iter().map(expected).collect(),
            unsealed: hold.unsealed.map(|unsealed| proto::Unsealed {
                workflow: id_bytes(unsealed.workflow),
                creator: unsealed.creator.map(id_bytes),
            }),
        }
    }
}

impl TryFrom<proto::Hold> for Hold {
    type Error = WireError;

    fn try_from(wire: proto::Hold) -> Result<Self, WireError> {
        let held = |held: proto::hold::Held| -> Result<_, WireError> {
            let message = wanted(held.message, "a held message is missing")?;
            let mut message: Message = message.try_into()?;
            let later = ReleaseTimes {
                due: due(held.due)?,
                expires_after_ms: held.expires_after_ms,
            };
            if later != ReleaseTimes::default() {
                message.extras.get_or_insert_default().later = Some(Box::new(later));
            }
            Ok((held.queue, message))
        };
        Ok(Self {
            join: message_id(&wire.join)?,
            count: wire.count,
            messages: wire
                .messages
                .into_iter()
                .map(held)
                .collect::<Result<_, _>>()?,
            policy: match wire.all_ended {
                true => JoinPolicy::AllEnded,
                false => JoinPolicy::of_max_failures(wire.max_failures),
            },
            expects: wire
                .expects
                .into_iter()
                .map(|expected| Ok((expected.index, JoinOutcome::from_number(expected.when)?)))
                .collect::<Result<_, WireError>>()?,
            then: all(wire.then)?,
            result_ttl_ms: wire.result_ttl_ms,
            unsealed: wire.unsealed.map(unsealed).transpose()?,
        })
    }
}

fn unsealed(wire: proto::Unsealed) -> Result<Unsealed, WireError> {
    let creator = wire.creator.as_deref().map(message_id);
    Ok(Unsealed {
        workflow: message_id(&wire.workflow)?,
        creator: creator.transpose()?,
    })
}

impl From<Target> for proto::Target {
    fn from(target: Target) -> Self {
        Self {
            target: Some(match target {
                Target::Job(id) => proto::target::Target::Job(id_bytes(id)),
                Target::Filter(filter) => proto::target::Target::Filter(filter.into()),
            }),
        }
    }
}

/// Reads a target; `None`: its kind is of a newer protocol.
fn target(wire: Option<proto::Target>) -> Result<Option<Target>, WireError> {
    use proto::target::Target as Wire;
    let target = wanted(wire, "an operation on jobs has no target")?;
    Ok(match target.target {
        None => None,
        Some(Wire::Job(id)) => Some(Target::Job(message_id(&id)?)),
        Some(Wire::Filter(filter)) => Some(Target::Filter(filter.try_into()?)),
    })
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
            Receipt::Applied(applied) => {
                let owner = |(op, message)| proto::receipt::Owner {
                    op,
                    message: id_bytes(message),
                };
                Self {
                    skipped: applied.skipped,
                    owners: applied.owners.into_iter().map(owner).collect(),
                    state: applied.found.map(state_number),
                    operation: applied.operation,
                    ..of(Why::Applied)
                }
            }
            Receipt::Duplicate => of(Why::Duplicate),
            Receipt::Unknown => of(Why::Unknown),
            Receipt::Refused { op, why } => {
                let mut state = None;
                let mut owners = Vec::new();
                let (why, text) = match why {
                    Refusal::LeaseLost => (Why::LeaseLost, String::new()),
                    Refusal::GuardFailed => (Why::GuardFailed, String::new()),
                    Refusal::TooLarge(text) => (Why::TooLarge, text),
                    Refusal::AlreadyExists => (Why::AlreadyExists, String::new()),
                    Refusal::QueueFull(text) => (Why::QueueFull, text),
                    Refusal::DiskFull => (Why::DiskFull, String::new()),
                    Refusal::Invalid(text) => (Why::Invalid, text),
                    Refusal::NotOffered(text) => (Why::NotOffered, text),
                    Refusal::NoSuchJob => (Why::NoSuchJob, String::new()),
                    Refusal::Claimed(owner) => {
                        owners.push(proto::receipt::Owner {
                            op,
                            message: id_bytes(owner),
                        });
                        (Why::Claimed, String::new())
                    }
                    Refusal::TooLate(found) => {
                        state = Some(state_number(found));
                        (Why::TooLate, String::new())
                    }
                };
                Self {
                    op,
                    text,
                    state,
                    owners,
                    ..of(why)
                }
            }
        }
    }
}

/// Returns the fields of a claim; a claim of an application's own key has always had a shorter form.
fn claim_to_wire(claim: Option<Box<Claim>>) -> (Option<proto::KeyRef>, Option<proto::Claim>) {
    use proto::claim;
    let Some(claim) = claim else {
        return (None, None);
    };
    let Claim {
        key,
        until,
        conflict,
    } = *claim;
    if (until, conflict) == (Until::Ended, Conflict::Skip) && !matches!(key, Key::Scoped(..)) {
        return (Some(key.into()), None);
    }
    let (until, for_ms) = match until {
        Until::Ended => (claim::Until::Ended, 0),
        Until::Started => (claim::Until::Started, 0),
        Until::ForMs(for_ms) => (claim::Until::Time, for_ms),
    };
    let (conflict, max_wait_ms) = match conflict {
        Conflict::Skip => (claim::Conflict::Skip, None),
        Conflict::Refuse => (claim::Conflict::Refuse, None),
        Conflict::Replace { max_wait_ms } => (claim::Conflict::Replace, max_wait_ms),
    };
    let claim = proto::Claim {
        key: Some(key.into()),
        until: until.into(),
        for_ms,
        conflict: conflict.into(),
        max_wait_ms,
    };
    (None, Some(claim))
}

fn claim_from_wire(
    unless_key: Option<Box<proto::KeyRef>>,
    wire: Option<Box<proto::Claim>>,
) -> Result<Option<Box<Claim>>, WireError> {
    use proto::claim;
    let Some(wire) = wire else {
        let key = unless_key.map(|key| Key::try_from(*key)).transpose()?;
        return Ok(key.map(Into::into));
    };
    let until = claim::Until::try_from(wire.until);
    let conflict = claim::Conflict::try_from(wire.conflict);
    Ok(Some(Box::new(Claim {
        key: key(wire.key)?,
        until: match until.map_err(|_| WireError::Invalid("an unknown end of a claim"))? {
            claim::Until::Ended => Until::Ended,
            claim::Until::Started => Until::Started,
            claim::Until::Time => Until::ForMs(wire.for_ms),
        },
        conflict: match conflict.map_err(|_| WireError::Invalid("an unknown conflict of claims"))? {
            claim::Conflict::Skip => Conflict::Skip,
            claim::Conflict::Refuse => Conflict::Refuse,
            claim::Conflict::Replace => Conflict::Replace {
                max_wait_ms: wire.max_wait_ms,
            },
        },
    })))
}

fn state_number(state: MessageState) -> i32 {
    proto::message_info::State::from(state).into()
}

impl TryFrom<proto::Receipt> for (u64, Receipt) {
    type Error = WireError;

    fn try_from(wire: proto::Receipt) -> Result<Self, WireError> {
        use proto::receipt::Why;
        let why = Why::try_from(wire.why).map_err(|_| WireError::Invalid("an unknown receipt"))?;
        let refusal = match why {
            Why::Applied => {
                let owner = |owner: proto::receipt::Owner| -> Result<_, WireError> {
                    Ok((owner.op, message_id(&owner.message)?))
                };
                let applied = Applied {
                    skipped: wire.skipped,
                    owners: wire
                        .owners
                        .into_iter()
                        .map(owner)
                        .collect::<Result<_, _>>()?,
                    found: wire.state.map(MessageState::from_number).transpose()?,
                    operation: wire.operation,
                };
                return Ok((wire.seq, Receipt::Applied(applied)));
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
            Why::NotOffered => Refusal::NotOffered(wire.text),
            Why::NoSuchJob => Refusal::NoSuchJob,
            Why::TooLate => {
                let state = wanted(wire.state, "a refusal as too late has no state")?;
                Refusal::TooLate(MessageState::from_number(state)?)
            }
            Why::Claimed => {
                let owner = wanted(wire.owners.first(), "a key of nobody is claimed")?;
                Refusal::Claimed(message_id(&owner.message)?)
            }
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
