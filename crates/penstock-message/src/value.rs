use bytes::Bytes;

use crate::{MessageId, WallMs};

/// Name of a value that a broker keeps next to its queues: a result, a lock, a marker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// The result of the job with this id. It is *pending* until the job ends or fails for good, and again
    /// once a failed job is retried.
    Result(MessageId),
    /// Key chosen by an application.
    Named(Bytes),
    /// Key derived by a feature, separate from all that applications choose. Only a [`Claim`](crate::Claim) names it.
    Scoped(Scope, Bytes),
}

/// Feature that a derived key belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Scope {
    /// Calls of a task that are one job at a time.
    Unique = 1,
    /// Calls that a program makes once.
    Idempotency = 2,
    // 3 schedule, 4 progress, 5 once and 6 lock are reserved.
}

impl Scope {
    pub const ALL: [Self; 2] = [Self::Unique, Self::Idempotency];
}

/// Outcome that a value reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ValueStatus {
    /// The job returned; the body is its encoded result.
    Succeeded = 0,
    /// The job's last attempt raised; the body is its encoded error.
    Failed = 1,
    /// The job was not started in time. Derived by the broker; the body is empty.
    Expired = 2,
    /// The job's worker crashed once too often. Written by the broker; the body is the last reason, in UTF-8.
    Crashed = 3,
    /// The job was purged, cancelled or displaced, or the join that held it has failed. Derived by the broker; the
    /// body is the reason, in UTF-8.
    Cancelled = 4,
    /// A job that it waited for failed. Derived by the broker; the body is the ids of the failed jobs, 16 bytes each,
    /// at most [`UPSTREAM_IDS`](crate::UPSTREAM_IDS).
    Upstream = 5,
    /// Another job took its place while it waited, by a claim; the body is that job's id.
    Replaced = 6,
    /// A join has succeeded. Written by the broker; the body is the join's id and the number of its members (4 bytes,
    /// little-endian), whose results have the values.
    Gathered = 7,
    /// The job ran longer than allowed. Reserved for time limits.
    TimedOut = 8,
}

impl ValueStatus {
    /// All variants, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Succeeded,
        Self::Failed,
        Self::Expired,
        Self::Crashed,
        Self::Cancelled,
        Self::Upstream,
        Self::Replaced,
        Self::Gathered,
        Self::TimedOut,
    ];
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    pub status: ValueStatus,
    pub body: Bytes,
    /// Run that produced the value. The broker fills it in; `None` for a key of an application's
    /// own, and for a value that a broker of format 1 stored.
    pub run: Option<Box<ProducingRun>>,
}

impl Value {
    pub fn new(status: ValueStatus, body: Bytes) -> Self {
        Self {
            status,
            body,
            run: None,
        }
    }
}

/// Run of a job that produced a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProducingRun {
    pub task: String,
    pub queue: String,
    pub attempt: u32,
    /// Number of retries of the job after it had failed for good.
    pub generation: u32,
    pub ended_at: WallMs,
}

/// State of a key, as its watcher receives it. Level-triggered: the state, not the change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyState {
    Present(Value),
    /// No value yet, but the message that will bring it is held.
    Pending,
    /// No value exists or is on its way: never stored, evicted, expired, or unknown.
    Gone,
}
