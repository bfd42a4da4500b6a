//! Questions to a worker, which its broker passes on without reading them.

use std::time::Duration;

use bytes::Bytes;

/// Question of a client to the worker of this name. The client sends it again after a reconnect, so a worker may
/// receive it twice: an order must do no more the second time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskQuery {
    pub worker: String,
    /// Question, as the worker reads it; at most [`AskQuery::MOST_BYTES`].
    pub question: Bytes,
    /// Time for the worker to reply; at most [`AskQuery::MOST_PATIENCE`], which 0 means too.
    pub patience_ms: u64,
}

impl AskQuery {
    /// Maximum bytes of a question, and of a reply.
    pub const MOST_BYTES: usize = 4 << 20;
    pub const MOST_PATIENCE: Duration = Duration::from_secs(60);
}

/// Question to this worker, which replies once, on the same connection.
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
    /// The worker accepts no questions.
    TooOld,
    /// Too many questions are under way.
    Busy,
    /// The worker's connection ended first. It may have carried out the request.
    Lost,
    /// The worker has not replied in time. It may still carry out the request.
    Silent,
    /// The question or the reply is too large.
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
    /// Number of jobs that wait for others while their slots are lent; not counted in `busy`.
    pub parked: u32,
}

/// State of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkerState {
    /// Not reported, by an older worker.
    #[default]
    Unsaid,
    Serving,
    /// Begins no job until it is resumed.
    Paused,
    /// Begins no job, and exits when all running ones have ended, however long that takes.
    Draining,
    /// Begins no job, and exits within its grace.
    Ending,
}
