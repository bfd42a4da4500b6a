use bytes::Bytes;

use crate::MessageId;

/// Names a value that a broker keeps beside its queues: a result, a lock, a marker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// The result of the job with this id. It is *pending* for as long as the message is held.
    Result(MessageId),
    /// A key of an application's own choosing.
    Named(Bytes),
}

/// How the thing that a value tells of has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ValueStatus {
    /// The job returned; the body is its encoded result.
    Succeeded = 0,
    /// The job's last attempt raised; the body is its encoded error.
    Failed = 1,
    /// It was not started in time. Written by the broker; the body is empty.
    Expired = 2,
    /// Its worker crashed once too often. Written by the broker; the body is the last reason, in UTF-8.
    Crashed = 3,
    /// It was purged or cancelled. Written by the broker; the body is the reason, in UTF-8.
    Cancelled = 4,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    pub status: ValueStatus,
    pub body: Bytes,
}

/// What a watcher of a key is told. Level-triggered: it is the state, not the change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyState {
    Present(Value),
    /// There is none yet, but the message that will bring it is held.
    Pending,
    /// There is none and none is on its way: never stored, evicted, past its time, or unknown.
    Gone,
}
