//! The bytes of a record: what was decided, so that replay evaluates nothing.
//!
//! A record is a header and then events until its end:
//!
//! ```text
//!     version   1 byte    1
//!     epoch     varint    of the broker that wrote it
//!     time      varint    by its wall clock, in milliseconds
//!     events              tag (1 byte), then fields
//! ```
//!
//! Integers are LEB128 varints. Bytes and texts have their length before them. Three things are
//! shorter for standing in one record, which is read from its start or not at all:
//! a *name* is spelled out once and then referred to by its place among the names of the record;
//! a *number* (of a message) and a *grant* are written as the zigzag difference to the one before.
//!
//! Messages are referred to by number, sessions by theirs. A reference to something that is not known is
//! not damage: the segment that held it was reclaimed, because the thing ended or was carried forward.

use penstock_message::{
    Durability, JoinId, JoinPolicy, Key, MessageId, QueueLimits, Receipt, SessionId, ValueStatus,
    WallMs,
};

use crate::clock::When;
use crate::names::Name;
use crate::{Boot, Position};

mod read;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use read::RecordReader;
pub(crate) use write::RecordWriter;

const VERSION: u8 = 1;

/// What the journal keeps, in the order of positions.
#[derive(Debug)]
pub struct Record {
    pub position: Position,
    pub durability: Durability,
    pub(crate) bytes: Vec<u8>,
}

impl Record {
    pub fn encode_into(&self, target: &mut Vec<u8>) {
        target.extend_from_slice(&self.bytes);
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// One thing that was decided.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event<'a> {
    /// Nothing given out later may be below these, though what they counted is gone.
    Counters {
        numbers: u64,
        grants: u64,
        sessions: u64,
        evicted: u64,
    },
    /// The steady clock at the record's time: the wall's has been set since the journal last knew how
    /// the two differ.
    ClockSet {
        steady: u64,
    },
    /// The machine's clock at the same time; follows a `ClockSet`.
    ClockBoot {
        boot: Boot,
    },
    /// A session said hello, for the first time or again.
    SessionOpened {
        number: u64,
        session: SessionId,
        heartbeat_ms: u64,
        applied: u64,
        name: &'a str,
    },
    /// Its connection ended, at this time on the steady clock.
    SessionLeft {
        number: u64,
        at: u64,
    },
    SessionForgotten {
        number: u64,
    },
    /// All transactions of the session up to this one are decided.
    Applied {
        session: u64,
        through: u64,
    },
    /// ... and this one not simply applied.
    Answered {
        session: u64,
        seq: u64,
        receipt: Receipt,
    },
    /// The full state of a message: a new one, or one that is carried forward.
    Message {
        head: MessageHead,
        body: &'a [u8],
    },
    /// The same message in one more queue.
    Copied {
        number: u64,
        source: u64,
        queue: Name,
    },
    /// An error of an earlier attempt; follows the message it belongs to.
    Noted {
        number: u64,
        note: &'a [u8],
    },
    Granted {
        number: u64,
        session: u64,
        grant: Grant,
    },
    /// Handed back, to its place.
    Returned {
        number: u64,
        redelivered: bool,
    },
    /// Its worker died; back to its place, one crash more.
    Crashed {
        number: u64,
        reason: &'a [u8],
    },
    Moved {
        number: u64,
        change: Change<'a>,
    },
    /// Gone for good.
    Settled {
        number: u64,
    },
    Stored {
        key: Key,
        status: ValueStatus,
        body: &'a [u8],
        group: Name,
        expires_at: Option<u64>,
    },
    Removed {
        key: Key,
    },
    /// Removed before its time, to keep its group under the cap.
    Evicted {
        key: Key,
    },
    /// The key belongs to the message until that is settled.
    Claimed {
        number: u64,
        key: Key,
    },
    JoinOpened {
        join: JoinId,
        count: u32,
        policy: JoinPolicy,
    },
    Joined {
        join: JoinId,
        index: u32,
    },
    /// The join is over; what it held is ready, or is settled by events of its own.
    JoinEnded {
        join: JoinId,
        released: bool,
    },
    Paused {
        queue: Name,
        paused: bool,
    },
    Limited {
        queue: Name,
        limits: QueueLimits,
    },
}

/// All of a message but its body and notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHead {
    pub(crate) number: u64,
    pub(crate) id: MessageId,
    pub(crate) queue: Name,
    pub(crate) task: Name,
    pub(crate) priority: u8,
    pub(crate) max_deliveries: u8,
    pub(crate) crashes: u8,
    pub(crate) redelivered: bool,
    /// It was published to other queues as well.
    pub(crate) has_copies: bool,
    pub(crate) attempt: u32,
    pub(crate) enqueued_at: WallMs,
    pub(crate) expires_at: Option<When>,
    pub(crate) result_ttl_ms: Option<u64>,
    pub(crate) place: Place,
}

/// Where a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Ready,
    Delayed(When),
    Held(JoinId),
    Leased { session: u64, grant: Grant },
}

/// A hand-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    pub(crate) started_at: WallMs,
}

/// What a move changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change<'a> {
    /// Its number from now on, which is its place among others.
    pub(crate) to: u64,
    pub(crate) queue: Name,
    pub(crate) due: Option<When>,
    pub(crate) next_attempt: bool,
    pub(crate) crashed: bool,
    pub(crate) note: Option<&'a [u8]>,
    pub(crate) expires_at: Option<When>,
}

mod tag {
    pub(super) const COUNTERS: u8 = 1;
    pub(super) const SESSION_OPENED: u8 = 2;
    pub(super) const SESSION_LEFT: u8 = 3;
    pub(super) const SESSION_FORGOTTEN: u8 = 4;
    pub(super) const APPLIED: u8 = 5;
    pub(super) const ANSWERED: u8 = 6;
    pub(super) const MESSAGE: u8 = 7;
    pub(super) const COPIED: u8 = 8;
    pub(super) const NOTED: u8 = 9;
    pub(super) const GRANTED: u8 = 10;
    pub(super) const RETURNED: u8 = 11;
    pub(super) const CRASHED: u8 = 12;
    pub(super) const MOVED: u8 = 13;
    pub(super) const SETTLED: u8 = 14;
    pub(super) const STORED: u8 = 15;
    pub(super) const REMOVED: u8 = 16;
    pub(super) const EVICTED: u8 = 17;
    pub(super) const CLAIMED: u8 = 18;
    pub(super) const JOIN_OPENED: u8 = 19;
    pub(super) const JOINED: u8 = 20;
    pub(super) const JOIN_ENDED: u8 = 21;
    pub(super) const PAUSED: u8 = 22;
    pub(super) const CLOCK_SET: u8 = 23;
    pub(super) const LIMITED: u8 = 24;
    pub(super) const CLOCK_BOOT: u8 = 43;
    /// The highest of those without a gap.
    #[cfg(test)]
    pub(super) const LAST: u8 = LIMITED;
}

/// Which optional fields of a `Message` follow.
mod has {
    pub(super) const EXPIRY: u8 = 1;
    pub(super) const RESULT: u8 = 2;
    pub(super) const HISTORY: u8 = 4;
    pub(super) const REDELIVERED: u8 = 8;
    /// Two bits: the place.
    pub(super) const PLACE_SHIFT: u8 = 4;
    pub(super) const READY: u8 = 0;
    pub(super) const DELAYED: u8 = 1;
    pub(super) const HELD: u8 = 2;
    pub(super) const LEASED: u8 = 3;
    pub(super) const COPIES: u8 = 64;
}

/// Which fields of a `Moved` follow, and its flags.
mod moved {
    pub(super) const DUE: u8 = 1;
    pub(super) const NEXT_ATTEMPT: u8 = 2;
    pub(super) const CRASHED: u8 = 4;
    pub(super) const NOTE: u8 = 8;
    pub(super) const EXPIRY: u8 = 16;
}

/// Which fields of a `Limited` follow, and its flag.
mod limited {
    pub(super) const LENGTH: u8 = 1;
    pub(super) const BYTES: u8 = 2;
    pub(super) const DROP_OLDEST: u8 = 4;
}

/// Why bytes are not a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("it ends within an event, at byte {at}")]
    Truncated { at: usize },
    #[error("it has version {0}, and this program reads version {VERSION}: a newer one wrote it")]
    UnknownVersion(u8),
    #[error(
        "it has an event {tag} at byte {at}, which this program does not know: a newer one wrote it"
    )]
    UnknownEvent { tag: u8, at: usize },
    #[error("no {what} can be read at byte {at}")]
    Malformed { what: &'static str, at: usize },
}
