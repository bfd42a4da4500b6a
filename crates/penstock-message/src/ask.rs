//! Questions to a worker, which its broker passes on without reading them.

use std::time::Duration;

use bytes::Bytes;

/// Question of a client to the worker of this name. A client sends it again after a reconnect, so a worker may receive
/// it twice: an order must do no more when it comes a second time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskQuery {
    pub worker: String,
    /// Up to [`AskQuery::MOST_BYTES`].
    pub question: Bytes,
    /// Time for the worker to reply; up to [`AskQuery::MOST_PATIENCE`], and 0: as long.
    pub patience_ms: u64,
}

impl AskQuery {
    /// Limit of a question, and of a reply.
    pub const MOST_BYTES: usize = 4 << 20;
    pub const MOST_PATIENCE: Duration = Duration::from_secs(60);
}

/// Question to this worker. It replies once, on the same connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Number of the question, for the reply.
    pub id: u64,
    pub question: Bytes,
}

/// Reason why a question to a worker has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoReply {
    /// No worker of this name is connected.
    UnknownWorker,
    /// Several workers have this name.
    SeveralWorkers,
    /// The worker takes no questions.
    TooOld,
    /// As many questions are under way as may be.
    Busy,
    /// The worker's connection ended first. It may have done what it was asked to do.
    Lost,
    /// The worker has not replied in time. It may still do what it was asked to do.
    Silent,
    /// The question is too large, or the reply.
    TooLarge,
}

/// Figures and state of a worker, as it reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerReport {
    pub slots: u32,
    pub busy: u32,
    pub state: WorkerState,
    /// Whether it replies to questions.
    pub takes_asks: bool,
    /// Number of jobs that wait for others while their slots are lent. The busy slots are without them.
    pub parked: u32,
}

/// State of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkerState {
    /// An older worker does not say.
    #[default]
    Unsaid,
    Serving,
    /// Begins no job until it is resumed.
    Paused,
    /// Begins no job, and ends when all that run have ended, however long that takes.
    Draining,
    /// Begins no job, and ends within its grace.
    Ending,
}
