use bytes::Bytes;

use crate::{Message, MessageId, WallMs};

/// The right to run one message. It belongs to a live session, not to a clock: it ends when it is
/// settled or when its session's heartbeat does, never because a job takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease {
    pub message: MessageId,
    /// Raised at every start of the broker that follows an unclean end.
    pub epoch: u32,
    /// Rises with each hand-out within an epoch.
    pub grant: u64,
}

/// One hand-out of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    pub lease: Lease,
    /// Number of the consumer that it is for.
    pub consumer: u32,
    pub queue: String,
    /// Whether an earlier hand-out of this message may have run.
    pub redelivered: bool,
    pub message: Message,
    /// Values of the join that the message has as its inputs, as [`GivenValues`](crate::GivenValues) reads them; empty: it
    /// has none.
    pub inputs: Bytes,
    /// Time at which the workflow of the message is cancelled.
    pub deadline: Option<WallMs>,
}

/// Progress of a running job, as its code tells it. The broker does not read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub lease: Lease,
    /// At most [`Progress::CAP_BYTES`].
    pub body: Bytes,
}

impl Progress {
    pub const CAP_BYTES: usize = 4096;
}

/// Order to a worker to stop a job that it holds, and to hand it back. The broker then ends the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CancelOrder {
    pub lease: Lease,
    pub reason: String,
    /// Whether the job need not be given the time to clean up.
    pub kill: bool,
}

/// Why a lease is handed back unsettled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// The message never ran, or was stopped in order: no attempt is burned, and it goes back to its place. One that was
    /// asked to stop ends as cancelled.
    Returned,
    /// The process that ran it died; counts against `max_deliveries`. The text is the reason that a
    /// person reads, for instance `killed by signal 11 (SIGSEGV)`.
    Crashed(String),
    /// The process that ran it died with several jobs under way, and nobody knows which of them is guilty. Not counted
    /// against `max_deliveries`, but in `suspects`: see `crashed` in `penstock-jobs`. The text is the reason.
    Suspected(String),
}
