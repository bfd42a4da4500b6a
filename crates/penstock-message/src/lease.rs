use bytes::Bytes;

use crate::{Message, MessageId, WallMs};

/// Right to run one message. It belongs to a live session, not to a clock. It ends when it is settled or when its
/// session's heartbeat ends, never because a job takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease {
    pub message: MessageId,
    /// Number of the broker's life, raised at every start after an unclean end.
    pub epoch: u32,
    /// Number of the hand-out within an epoch; it only rises.
    pub grant: u64,
}

/// Delivery of a message to a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    pub lease: Lease,
    /// Number of the target consumer.
    pub consumer: u32,
    pub queue: String,
    /// Whether an earlier hand-out of this message may have run.
    pub redelivered: bool,
    pub message: Message,
    /// Values of the join that are the message's inputs, as [`InputValues`](crate::InputValues) reads them; empty: it
    /// has none.
    pub inputs: Bytes,
    /// Time at which the workflow of the message is cancelled.
    pub deadline: Option<WallMs>,
}

/// Progress that a running job reports. The broker does not read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub lease: Lease,
    /// At most [`Progress::CAP_BYTES`].
    pub body: Bytes,
}

impl Progress {
    pub const CAP_BYTES: usize = 4096;
}

/// Order to a worker to stop a running job and hand it back. The broker then ends the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CancelOrder {
    pub lease: Lease,
    pub reason: String,
    /// Whether the job gets no time to clean up.
    pub kill: bool,
}

/// Reason why a lease is handed back unsettled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// The message never ran, or was stopped cleanly: no attempt is counted, and it returns to its place. A message
    /// that was asked to stop ends as cancelled.
    Returned,
    /// The process that ran it died; counts against `max_deliveries`. The text is the reason for people, such as
    /// `killed by signal 11 (SIGSEGV)`.
    Crashed(String),
    /// The process that ran it died with several running jobs, and nobody knows which is guilty. Counts in `suspects`,
    /// not against `max_deliveries`: see `crashed` in `penstock-jobs`. The text is the reason.
    Suspected(String),
}
