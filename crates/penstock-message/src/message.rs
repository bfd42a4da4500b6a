use bytes::Bytes;

use crate::{MessageId, WallMs};

/// Priorities run from 0 to this; higher is handed out first.
pub const HIGHEST_PRIORITY: u8 = 9;
/// The priority of a message that asks for none.
pub const DEFAULT_PRIORITY: u8 = 4;

/// What a broker holds. What it decides by stands in these fields; the body it never parses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub id: MessageId,
    /// The task's name. Messages of one task form a flow; flows of one priority share fairly.
    pub task: String,
    pub priority: u8,
    /// When it is no longer worth starting. It then ends as `expired`.
    pub expires_at: Option<Due>,
    /// How long the result is kept once there is one; `None`: nobody reads it, so none is stored.
    pub result_ttl_ms: Option<u64>,
    /// How many deliveries may end in a crash before it is dead-lettered; at least 1.
    pub max_deliveries: u8,
    /// Attempts that ended in an error and were followed by a retry; 0 at first.
    pub attempt: u32,
    /// Deliveries that ended in a crash of the worker.
    pub crashes: u8,
    /// Set by the broker when it accepts the message; 0 before.
    pub enqueued_at: WallMs,
    /// Errors of earlier attempts, oldest first, each as its attempt's worker encoded it.
    /// The broker appends and never reads them.
    pub notes: Vec<Bytes>,
    pub body: Bytes,
}

use crate::Due;
