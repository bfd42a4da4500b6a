//! Conversions between the messages of the protocol and the nouns. Every noun can be sent. Input is checked, and input
//! that makes no sense is [`WireError::Invalid`].

use bytes::Bytes;
use penstock_message::{
    CatchUp, Durability, InputShape, JoinOutcome, MessageId, MessageState, OnRunning, Overflow,
    Overlap, SessionId, Skipped, Space, ValueStatus, WorkerState, WorkflowState,
};

use crate::{WireError, proto};

mod asks;
mod capabilities;
mod consumers;
mod failures;
mod messages;
mod questions;
mod schedules;
mod transactions;
mod values;
mod workflows;

pub use transactions::{decode_tx, decode_txs, encode_op, encode_tx, encoded_op_len};

/// Declares both conversions between an enum of the nouns and its number on the wire.
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
    Disk = Disk, Os = Os, None = None, Replicated = Replicated,
});
same_variants!(ValueStatus, proto::value::Status, "an unknown status of a value", {
    Succeeded = Succeeded, Failed = Failed, Expired = Expired, Crashed = Crashed, Cancelled = Cancelled,
    Upstream = Upstream, Replaced = Replaced, Gathered = Gathered, TimedOut = TimedOut,
});
same_variants!(Overflow, proto::limit::Overflow, "an unknown overflow of a queue", {
    Reject = Reject, DropOldest = DropOldest,
});
same_variants!(Overlap, proto::plan::Overlap, "an unknown overlap of a schedule", {
    Skip = Skip, Queue = Queue, CancelPrevious = CancelPrevious, Allow = Allow,
});
same_variants!(CatchUp, proto::plan::CatchUp, "an unknown catch-up of a schedule", {
    Once = Once, Skip = None, All = All,
});
same_variants!(Skipped, proto::schedules_page::Why, "an unknown reason of a skip", {
    Overlap = Overlap, QueueFull = QueueFull, Missed = Missed,
});
same_variants!(Space, proto::health::Space, "an unknown level of space", {
    Plenty = Plenty, NoPublishes = NoPublishes, NoLeases = NoLeases, NoSettlements = NoSettlements,
});
same_variants!(MessageState, proto::message_info::State, "an unknown state of a message", {
    Ready = Ready, Delayed = Delayed, Running = Running, Held = Held, Failed = Failed,
    Blocked = Blocked, Cancelling = Cancelling, Parked = Parked,
});
same_variants!(OnRunning, proto::cancel::Running, "an unknown treatment of running jobs", {
    Leave = Leave, Ask = Ask, Kill = Kill,
});
same_variants!(WorkerState, proto::WorkerState, "an unknown state of a worker", {
    Unsaid = Unsaid, Serving = Serving, Paused = Paused, Draining = Draining, Ending = Ending,
});
same_variants!(WorkflowState, proto::workflows_page::State, "an unknown state of a workflow", {
    Running = Running, Succeeded = Succeeded, Failed = Failed, Cancelled = Cancelled, Expired = Expired,
});
same_variants!(InputShape, proto::inputs::Shape, "an unknown shape of inputs", {
    One = One, List = List, Named = Named,
});
same_variants!(JoinOutcome, proto::hold::When, "an unknown outcome of a join", {
    Succeeded = Succeeded, Failed = Failed, Ended = Ended,
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

/// Reads an optional id; no bytes mean none.
fn optional_id(bytes: &[u8]) -> Result<Option<MessageId>, WireError> {
    match bytes {
        [] => Ok(None),
        bytes => message_id(bytes).map(Some),
    }
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

/// Converts all items of a repeated field.
pub fn all<W, N>(wire: Vec<W>) -> Result<Vec<N>, WireError>
where
    N: TryFrom<W, Error = WireError>,
{
    wire.into_iter().map(N::try_from).collect()
}
