//! Keys and values.

use penstock_message::{
    Key, KeyState, ProducingRun, RefusedWait, Scope, Value, ValueStatus, WaitRefusal, WaitingJob,
};

use super::{FromNumber, id_bytes, message_id, wanted};
use crate::{WireError, proto};

impl From<Key> for proto::KeyRef {
    fn from(key: Key) -> Self {
        Self {
            key: Some(match key {
                Key::Result(id) => proto::key_ref::Key::Result(id_bytes(id)),
                Key::Named(name) => proto::key_ref::Key::Named(name),
                Key::Scoped(scope, key) => proto::key_ref::Key::Scoped(proto::key_ref::Scoped {
                    scope: scope as u32,
                    key,
                }),
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
            proto::key_ref::Key::Scoped(wire) => {
                let mut known = Scope::ALL.into_iter();
                let scope = known.find(|scope| *scope as u32 == wire.scope);
                Self::Scoped(wanted(scope, "a key of an unknown scope")?, wire.key)
            }
        })
    }
}

pub(super) fn key(wire: Option<proto::KeyRef>) -> Result<Key, WireError> {
    wanted(wire, "an operation on a key does not name it")?.try_into()
}

impl From<Value> for proto::Value {
    /// Converts all but the run's generation, which is a field next to the value.
    fn from(value: Value) -> Self {
        let status = proto::value::Status::from(value.status).into();
        let body = value.body;
        match value.run {
            None => Self {
                status,
                body,
                ..Self::default()
            },
            Some(run) => Self {
                status,
                body,
                task: run.task,
                queue: run.queue,
                ended_at_ms: Some(run.ended_at),
                attempt: run.attempt,
            },
        }
    }
}

impl TryFrom<proto::Value> for Value {
    type Error = WireError;

    fn try_from(wire: proto::Value) -> Result<Self, WireError> {
        Ok(Self {
            status: ValueStatus::from_number(wire.status)?,
            body: wire.body,
            run: wire.ended_at_ms.map(|ended_at| {
                Box::new(ProducingRun {
                    task: wire.task,
                    queue: wire.queue,
                    attempt: wire.attempt,
                    generation: 0,
                    ended_at,
                })
            }),
        })
    }
}

impl From<(Key, KeyState)> for proto::KeyValue {
    fn from((key, state): (Key, KeyState)) -> Self {
        use proto::key_value::State;
        let run = match &state {
            KeyState::Present(value) => value.run.as_ref(),
            KeyState::Pending | KeyState::Gone => None,
        };
        Self {
            generation: run.map_or(0, |run| run.generation),
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
            State::Present(value) => {
                let mut value = Value::try_from(value)?;
                if let Some(run) = &mut value.run {
                    run.generation = wire.generation;
                }
                KeyState::Present(value)
            }
            State::Pending(_) => KeyState::Pending,
            State::Gone(_) => KeyState::Gone,
        };
        Ok((key(wire.key)?, state))
    }
}

impl From<RefusedWait> for proto::RefusedWait {
    fn from(refused: RefusedWait) -> Self {
        use proto::refused_wait::{Job, Why};
        Self {
            key: Some(refused.key.into()),
            waiter: id_bytes(refused.waiter),
            why: match refused.why {
                WaitRefusal::Cycle => Why::Cycle,
                WaitRefusal::NoSlotLeft => Why::NoSlotLeft,
            }
            .into(),
            jobs: refused
                .jobs
                .into_iter()
                .map(|WaitingJob { id, task }| Job {
                    id: id_bytes(id),
                    task,
                })
                .collect(),
            left_out: refused.left_out,
        }
    }
}

impl TryFrom<proto::RefusedWait> for RefusedWait {
    type Error = WireError;

    fn try_from(wire: proto::RefusedWait) -> Result<Self, WireError> {
        use proto::refused_wait::Why;
        let why = Why::try_from(wire.why)
            .map_err(|_| WireError::Invalid("an unknown reason why a wait was refused"))?;
        let jobs = wire.jobs.into_iter().map(|job| {
            Ok(WaitingJob {
                id: message_id(&job.id)?,
                task: job.task,
            })
        });
        Ok(Self {
            key: key(wire.key)?,
            waiter: message_id(&wire.waiter)?,
            why: match why {
                Why::Cycle => WaitRefusal::Cycle,
                Why::NoSlotLeft => WaitRefusal::NoSlotLeft,
            },
            jobs: jobs.collect::<Result<_, WireError>>()?,
            left_out: wire.left_out,
        })
    }
}
