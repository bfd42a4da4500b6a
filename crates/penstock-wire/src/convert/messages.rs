//! Messages, and their leases, due times and extras.

use bytes::Bytes;
use penstock_message::{
    CancelOrder, Delivery, Due, Extras, InputShape, Inputs, JoinOutcome, Lease, Member, Message,
    Progress, Retries,
};

use super::{FromNumber, id_bytes, message_id, optional_id, small, wanted};
use crate::{WireError, proto};

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

impl From<Progress> for proto::Progress {
    fn from(progress: Progress) -> Self {
        Self {
            lease: Some(progress.lease.into()),
            body: progress.body,
        }
    }
}

impl TryFrom<proto::Progress> for Progress {
    type Error = WireError;

    fn try_from(wire: proto::Progress) -> Result<Self, WireError> {
        Ok(Self {
            lease: lease(wire.lease)?,
            body: wire.body,
        })
    }
}

pub(super) fn lease(wire: Option<proto::Lease>) -> Result<Lease, WireError> {
    wanted(wire, "an operation on a delivery has no lease")?.try_into()
}

impl From<CancelOrder> for proto::CancelOrder {
    fn from(order: CancelOrder) -> Self {
        Self {
            lease: Some(order.lease.into()),
            kill: order.kill,
            reason: order.reason,
        }
    }
}

impl TryFrom<proto::CancelOrder> for CancelOrder {
    type Error = WireError;

    fn try_from(wire: proto::CancelOrder) -> Result<Self, WireError> {
        Ok(Self {
            lease: wanted(wire.lease, "an order to stop a job has no lease")?.try_into()?,
            kill: wire.kill,
            reason: wire.reason,
        })
    }
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

pub(super) fn due(wire: Option<proto::Due>) -> Result<Option<Due>, WireError> {
    wire.map(Due::try_from).transpose()
}

impl From<Message> for proto::Message {
    fn from(message: Message) -> Self {
        Self {
            head: proto::MessageHead {
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
            },
            extras: message.extras.map(|extras| Box::new((*extras).into())),
        }
    }
}

impl TryFrom<proto::Message> for Message {
    type Error = WireError;

    fn try_from(wire: proto::Message) -> Result<Self, WireError> {
        let head = wire.head;
        Ok(Self {
            id: message_id(&head.id)?,
            task: head.task,
            priority: small(head.priority)?,
            expires_at: due(head.expires_at)?,
            result_ttl_ms: head.result_ttl_ms,
            max_deliveries: small(head.max_deliveries)?,
            attempt: head.attempt,
            crashes: small(head.crashes)?,
            enqueued_at: head.enqueued_at_ms,
            notes: head.notes,
            body: head.body,
            extras: match wire.extras {
                None => None,
                Some(extras) => Extras::try_from(*extras)?.boxed(),
            },
        })
    }
}

pub(super) fn headers_to_wire(headers: Vec<(String, Bytes)>) -> Vec<proto::Header> {
    let header = |(key, value)| proto::Header { key, value };
    headers.into_iter().map(header).collect()
}

pub(super) fn headers_from_wire(headers: Vec<proto::Header>) -> Vec<(String, Bytes)> {
    let header = |header: proto::Header| (header.key, header.value);
    headers.into_iter().map(header).collect()
}

impl From<Extras> for proto::MessageExtras {
    fn from(extras: Extras) -> Self {
        Self {
            member: extras.member.map(Into::into),
            inputs: extras.inputs.map(|inputs| proto::Inputs {
                join: id_bytes(inputs.join),
                shape: proto::inputs::Shape::from(inputs.shape).into(),
            }),
            workflow: extras.workflow.map_or(Bytes::new(), id_bytes),
            key: extras.key,
            headers: headers_to_wire(extras.headers),
            generation: extras.generation,
            timeout_ms: extras.timeout_ms,
            soft_timeout_ms: extras.soft_timeout_ms,
            suspects: u32::from(extras.suspects),
            parent: extras.parent.map_or(Bytes::new(), id_bytes),
            retries: extras.retries.map(Into::into),
            args_hash: extras.args_hash,
            attempts_before: extras.attempts_before,
            when: proto::hold::When::from(extras.when).into(),
        }
    }
}

impl TryFrom<proto::MessageExtras> for Extras {
    type Error = WireError;

    fn try_from(wire: proto::MessageExtras) -> Result<Self, WireError> {
        let inputs = |inputs: proto::Inputs| -> Result<Inputs, WireError> {
            Ok(Inputs {
                join: message_id(&inputs.join)?,
                shape: InputShape::from_number(inputs.shape)?,
            })
        };
        Ok(Self {
            member: wire.member.map(Member::try_from).transpose()?,
            inputs: wire.inputs.map(inputs).transpose()?,
            when: JoinOutcome::from_number(wire.when)?,
            // Sent next to a held message, not inside it.
            later: None,
            workflow: optional_id(&wire.workflow)?,
            key: wire.key,
            headers: headers_from_wire(wire.headers),
            generation: wire.generation,
            attempts_before: wire.attempts_before,
            retries: wire.retries.map(Retries::try_from).transpose()?,
            timeout_ms: wire.timeout_ms,
            soft_timeout_ms: wire.soft_timeout_ms,
            suspects: small(wire.suspects)?,
            parent: optional_id(&wire.parent)?,
            args_hash: wire.args_hash,
        })
    }
}

impl From<Member> for proto::Member {
    fn from(member: Member) -> Self {
        Self {
            join: id_bytes(member.join),
            index: member.index,
        }
    }
}

impl TryFrom<proto::Member> for Member {
    type Error = WireError;

    fn try_from(wire: proto::Member) -> Result<Self, WireError> {
        Ok(Self {
            join: message_id(&wire.join)?,
            index: wire.index,
        })
    }
}

impl From<Retries> for proto::Retries {
    fn from(retries: Retries) -> Self {
        match retries {
            Retries::AtMost(times) => Self {
                at_most: Some(times),
                after_ms: Vec::new(),
            },
            Retries::After(delays) => Self {
                at_most: None,
                after_ms: delays,
            },
        }
    }
}

impl TryFrom<proto::Retries> for Retries {
    type Error = WireError;

    fn try_from(wire: proto::Retries) -> Result<Self, WireError> {
        match (wire.at_most, wire.after_ms) {
            (Some(times), delays) if delays.is_empty() => Ok(Self::AtMost(times)),
            (Some(_), _) => Err(WireError::Invalid(
                "retries are limited by a number and by a list of delays",
            )),
            (None, delays) => Ok(Self::After(delays)),
        }
    }
}

impl From<Delivery> for proto::Delivery {
    fn from(delivery: Delivery) -> Self {
        // The message's id identifies the leased message.
        debug_assert_eq!(delivery.lease.message, delivery.message.id);
        Self {
            epoch: delivery.lease.epoch,
            grant: delivery.lease.grant,
            consumer: delivery.consumer,
            queue: delivery.queue,
            redelivered: delivery.redelivered,
            message: Some(delivery.message.into()),
            inputs: delivery.inputs,
            deadline_ms: delivery.deadline,
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
            consumer: wire.consumer,
            queue: wire.queue,
            redelivered: wire.redelivered,
            message,
            inputs: wire.inputs,
            deadline: wire.deadline_ms,
        })
    }
}
