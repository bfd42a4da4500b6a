use bytes::Bytes;

use crate::{Due, MessageId, WallMs};

/// Highest priority; the lowest is 0. Higher ones are handed out first.
pub const HIGHEST_PRIORITY: u8 = 9;
/// Default priority of a message.
pub const DEFAULT_PRIORITY: u8 = 4;

/// Message as a broker holds it. The broker decides by these fields; it never parses the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub id: MessageId,
    /// Name of the task. Messages of one task form a flow; flows of one priority share fairly.
    pub task: String,
    pub priority: u8,
    /// Time at which the message expires: it is then no longer worth starting, and ends as `expired`.
    pub expires_at: Option<Due>,
    /// Time for which the result is kept; `None`: nobody reads it, so none is stored.
    pub result_ttl_ms: Option<u64>,
    /// Number of deliveries that may end in a crash; the last of them fails the job for good. At least 1.
    pub max_deliveries: u8,
    /// Number of attempts that ended in an error and were followed by a retry; 0 at first.
    pub attempt: u32,
    /// Deliveries that ended in a crash of the worker.
    pub crashes: u8,
    /// Time at which the broker accepted it; 0 before.
    pub enqueued_at: WallMs,
    /// Errors of earlier attempts, oldest first, each as its attempt's worker encoded it.
    /// The broker appends and never reads them.
    pub notes: Vec<Bytes>,
    pub body: Bytes,
    /// Fields that few messages have; `None` when all of them are unset.
    pub extras: Option<Box<Extras>>,
}

/// Fields of a [`Message`] that few messages have. The broker keeps and delivers all of them; it acts
/// on `member`, `inputs`, `when`, `later`, `generation` and `attempts_before`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Extras {
    /// Join to which the message reports when it ends, however it ends.
    pub member: Option<Member>,
    /// Join whose values are the job's first argument: the one that holds it.
    pub inputs: Option<Inputs>,
    /// Outcome of the join that holds the message, on which it is released.
    pub when: JoinOutcome,
    /// Times of a held message that begin with its release.
    pub later: Option<Box<ReleaseTimes>>,
    pub workflow: Option<MessageId>,
    /// Key for fair shares and limits within a task; at most [`Extras::KEY_CAP_BYTES`].
    pub key: Option<Bytes>,
    /// Names and values of an application's own, at most [`Extras::HEADERS_CAP_BYTES`] in total. Names that begin with
    /// `penstock.` are reserved.
    pub headers: Vec<(String, Bytes)>,
    /// Number of retries after it had failed for good.
    pub generation: u32,
    /// Attempts of earlier generations: retries of the current one are counted from here.
    pub attempts_before: u32,
    /// Retries after an error, if the call sets them instead of its task.
    pub retries: Option<Retries>,
    pub timeout_ms: Option<u64>,
    pub soft_timeout_ms: Option<u64>,
    /// Deliveries after which this job and others were suspected of killing their process; at least 1 for a job known
    /// to have killed one.
    pub suspects: u8,
    /// Id of the job that published it.
    pub parent: Option<MessageId>,
    /// Hash of the names, kinds and annotations of the signature that encoded the arguments.
    pub args_hash: Option<u64>,
}

impl Extras {
    pub const KEY_CAP_BYTES: usize = 255;
    pub const HEADERS_CAP_BYTES: usize = 4096;

    /// Boxes the fields; `None` when nothing is set.
    pub fn boxed(self) -> Option<Box<Self>> {
        (self != Self::default()).then(|| Box::new(self))
    }

    /// Returns the total bytes of all headers, names and values.
    pub fn headers_bytes(&self) -> usize {
        let headers = self.headers.iter();
        headers.map(|(name, value)| name.len() + value.len()).sum()
    }
}

/// Times of a message that a join holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ReleaseTimes {
    /// Time before which it does not start; `AfterMs` counts from its release.
    pub due: Option<Due>,
    /// Time after its release at which it expires.
    pub expires_after_ms: Option<u64>,
}

/// Place in a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Member {
    pub join: MessageId,
    /// Index from 0; below the join's count.
    pub index: u32,
}

/// Values of a join, as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Inputs {
    pub join: MessageId,
    pub shape: InputShape,
}

/// Outcome of a join on which a held message is released. On the other outcome it ends as not needed, or is blocked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum JoinOutcome {
    #[default]
    Succeeded = 0,
    Failed = 1,
    Ended = 2,
}

impl JoinOutcome {
    pub const ALL: [Self; 3] = [Self::Succeeded, Self::Failed, Self::Ended];
}

/// Form in which a job receives a join's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum InputShape {
    /// The value of its only member.
    #[default]
    One = 0,
    List = 1,
    Named = 2,
}

impl InputShape {
    pub const ALL: [Self; 3] = [Self::One, Self::List, Self::Named];
}

/// Retries of a job after an error.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Retries {
    AtMost(u32),
    /// Delays in milliseconds, one before each retry; at most [`Retries::DELAYS_CAP`].
    After(Vec<u64>),
}

impl Retries {
    pub const DELAYS_CAP: usize = 32;
}
