//! Messages, and what they hang on.

use penstock_message::{Delivery, Due, Lease, Message};

use super::{id_bytes, message_id, small, wanted};
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

pub(super) fn lease(wire: Option<proto::Lease>) -> Result<Lease, WireError> {
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

pub(super) fn due(wire: Option<proto::Due>) -> Result<Option<Due>, WireError> {
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
