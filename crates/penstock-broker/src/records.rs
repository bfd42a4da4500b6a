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

use bytes::Bytes;
use penstock_message::{
    Durability, JoinId, JoinPolicy, Key, MessageId, Receipt, Refusal, SessionId, ValueStatus,
    WallMs,
};

use crate::Position;
use crate::clock::{Clock, When};
use crate::names::{Name, Names};

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
}

/// Which fields of a `Moved` follow, and its flags.
mod moved {
    pub(super) const DUE: u8 = 1;
    pub(super) const NEXT_ATTEMPT: u8 = 2;
    pub(super) const CRASHED: u8 = 4;
    pub(super) const NOTE: u8 = 8;
    pub(super) const EXPIRY: u8 = 16;
}

/// Events of one record on their way into bytes.
#[derive(Debug, Default)]
pub(crate) struct RecordWriter {
    bytes: Vec<u8>,
    epoch: u32,
    time: WallMs,
    number: u64,
    grant: u64,
    /// For each name, the record (by count) that last spelled it out, and its place among the names there.
    spelled: Vec<(u64, u32)>,
    names_spelled: u32,
    records: u64,
}

impl RecordWriter {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The epoch and the time that the next record begins with.
    pub(crate) fn stamp(&mut self, epoch: u32, time: WallMs) {
        if self.bytes.is_empty() {
            self.epoch = epoch;
            self.time = time;
        }
    }

    pub(crate) fn time(&self) -> WallMs {
        self.time
    }

    /// The finished record; the next event begins another.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        let capacity = self.bytes.len().min(64 << 10);
        std::mem::replace(&mut self.bytes, Vec::with_capacity(capacity))
    }

    pub(crate) fn push(&mut self, names: &Names, event: &Event<'_>) {
        if self.bytes.is_empty() {
            self.begin();
        }
        match event {
            Event::Counters {
                numbers,
                grants,
                sessions,
                evicted,
            } => {
                self.tag(tag::COUNTERS);
                for counter in [numbers, grants, sessions, evicted] {
                    self.varint(*counter);
                }
            }
            Event::SessionOpened {
                number,
                session,
                heartbeat_ms,
                applied,
                name,
            } => {
                self.tag(tag::SESSION_OPENED);
                self.varint(*number);
                self.bytes.extend_from_slice(&session.0);
                self.varint(*heartbeat_ms);
                self.varint(*applied);
                self.text(name);
            }
            Event::SessionLeft { number, at } => {
                self.tag(tag::SESSION_LEFT);
                self.varint(*number);
                self.varint(*at);
            }
            Event::SessionForgotten { number } => {
                self.tag(tag::SESSION_FORGOTTEN);
                self.varint(*number);
            }
            Event::Applied { session, through } => {
                self.tag(tag::APPLIED);
                self.varint(*session);
                self.varint(*through);
            }
            Event::Answered {
                session,
                seq,
                receipt,
            } => {
                self.tag(tag::ANSWERED);
                self.varint(*session);
                self.varint(*seq);
                self.receipt(receipt);
            }
            Event::Message { head, body } => {
                self.tag(tag::MESSAGE);
                self.head(names, head);
                self.slice(body);
            }
            Event::Copied {
                number,
                source,
                queue,
            } => {
                self.tag(tag::COPIED);
                self.number(*source);
                self.number(*number);
                self.name(names, *queue);
            }
            Event::Noted { number, note } => {
                self.tag(tag::NOTED);
                self.number(*number);
                self.slice(note);
            }
            Event::Granted {
                number,
                session,
                grant,
            } => {
                self.tag(tag::GRANTED);
                self.number(*number);
                self.varint(*session);
                self.grant(grant);
            }
            Event::Returned {
                number,
                redelivered,
            } => {
                self.tag(tag::RETURNED);
                self.number(*number);
                self.tag(u8::from(*redelivered));
            }
            Event::Crashed { number, reason } => {
                self.tag(tag::CRASHED);
                self.number(*number);
                self.slice(reason);
            }
            Event::Moved { number, change } => {
                self.tag(tag::MOVED);
                self.number(*number);
                self.change(names, change);
            }
            Event::Settled { number } => {
                self.tag(tag::SETTLED);
                self.number(*number);
            }
            Event::Stored {
                key,
                status,
                body,
                group,
                expires_at,
            } => {
                self.tag(tag::STORED);
                self.key(key);
                self.tag(*status as u8 | u8::from(expires_at.is_some()) << 7);
                self.name(names, *group);
                if let Some(at) = expires_at {
                    self.varint(*at);
                }
                self.slice(body);
            }
            Event::Removed { key } => {
                self.tag(tag::REMOVED);
                self.key(key);
            }
            Event::Evicted { key } => {
                self.tag(tag::EVICTED);
                self.key(key);
            }
            Event::Claimed { number, key } => {
                self.tag(tag::CLAIMED);
                self.number(*number);
                self.key(key);
            }
            Event::JoinOpened {
                join,
                count,
                policy,
            } => {
                self.tag(tag::JOIN_OPENED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*count));
                self.tag(*policy as u8);
            }
            Event::Joined { join, index } => {
                self.tag(tag::JOINED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*index));
            }
            Event::JoinEnded { join, released } => {
                self.tag(tag::JOIN_ENDED);
                self.bytes.extend_from_slice(&join.0);
                self.tag(u8::from(*released));
            }
            Event::Paused { queue, paused } => {
                self.tag(tag::PAUSED);
                self.name(names, *queue);
                self.tag(u8::from(*paused));
            }
        }
    }

    fn begin(&mut self) {
        self.records += 1;
        self.names_spelled = 0;
        self.number = 0;
        self.grant = 0;
        self.tag(VERSION);
        self.varint(u64::from(self.epoch));
        self.varint(self.time);
    }

    fn head(&mut self, names: &Names, head: &MessageHead) {
        let has_history = head.attempt != 0 || head.crashes != 0;
        let place = match head.place {
            Place::Ready => has::READY,
            Place::Delayed(_) => has::DELAYED,
            Place::Held(_) => has::HELD,
            Place::Leased { .. } => has::LEASED,
        };
        let mut flags = place << has::PLACE_SHIFT;
        for (flag, is_set) in [
            (has::EXPIRY, head.expires_at.is_some()),
            (has::RESULT, head.result_ttl_ms.is_some()),
            (has::HISTORY, has_history),
            (has::REDELIVERED, head.redelivered),
        ] {
            if is_set {
                flags |= flag;
            }
        }
        self.tag(flags);
        self.number(head.number);
        self.bytes.extend_from_slice(&head.id.0);
        self.name(names, head.queue);
        self.name(names, head.task);
        self.tag(head.priority);
        self.tag(head.max_deliveries);
        self.difference(head.enqueued_at, self.time);
        if let Some(when) = head.expires_at {
            self.when(when);
        }
        if let Some(ttl_ms) = head.result_ttl_ms {
            self.varint(ttl_ms);
        }
        if has_history {
            self.varint(u64::from(head.attempt));
            self.tag(head.crashes);
        }
        match head.place {
            Place::Ready => {}
            Place::Delayed(when) => self.when(when),
            Place::Held(join) => self.bytes.extend_from_slice(&join.0),
            Place::Leased { session, grant } => {
                self.varint(session);
                self.grant(&grant);
            }
        }
    }

    fn change(&mut self, names: &Names, change: &Change<'_>) {
        let mut flags = 0;
        for (flag, is_set) in [
            (moved::DUE, change.due.is_some()),
            (moved::NEXT_ATTEMPT, change.next_attempt),
            (moved::CRASHED, change.crashed),
            (moved::NOTE, change.note.is_some()),
            (moved::EXPIRY, change.expires_at.is_some()),
        ] {
            if is_set {
                flags |= flag;
            }
        }
        self.tag(flags);
        self.number(change.to);
        self.name(names, change.queue);
        if let Some(when) = change.due {
            self.when(when);
        }
        if let Some(note) = change.note {
            self.slice(note);
        }
        if let Some(when) = change.expires_at {
            self.when(when);
        }
    }

    fn receipt(&mut self, receipt: &Receipt) {
        match receipt {
            Receipt::Applied { skipped } => {
                self.tag(0);
                self.varint(skipped.len() as u64);
                for op in skipped {
                    self.varint(u64::from(*op));
                }
            }
            Receipt::Duplicate => self.tag(1),
            Receipt::Unknown => self.tag(2),
            Receipt::Refused { op, why } => {
                let (code, text) = match why {
                    Refusal::LeaseLost => (3, ""),
                    Refusal::GuardFailed => (4, ""),
                    Refusal::TooLarge(text) => (5, text.as_str()),
                    Refusal::AlreadyExists => (6, ""),
                    Refusal::QueueFull(text) => (7, text.as_str()),
                    Refusal::DiskFull => (8, ""),
                    Refusal::Invalid(text) => (9, text.as_str()),
                };
                self.tag(code);
                self.varint(u64::from(*op));
                self.text(text);
            }
        }
    }

    fn tag(&mut self, byte: u8) {
        self.bytes.push(byte);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn difference(&mut self, value: u64, from: u64) {
        let difference = value.wrapping_sub(from) as i64;
        self.varint(((difference << 1) ^ (difference >> 63)) as u64);
    }

    fn number(&mut self, number: u64) {
        self.difference(number, self.number);
        self.number = number;
    }

    fn grant(&mut self, grant: &Grant) {
        self.varint(u64::from(grant.epoch));
        self.difference(grant.number, self.grant);
        self.grant = grant.number;
        self.difference(grant.started_at, self.time);
    }

    fn when(&mut self, when: When) {
        self.tag(when.clock as u8);
        self.varint(when.at);
    }

    fn slice(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str) {
        self.slice(text.as_bytes());
    }

    fn key(&mut self, key: &Key) {
        match key {
            Key::Result(id) => {
                self.tag(0);
                self.bytes.extend_from_slice(&id.0);
            }
            Key::Named(name) => {
                self.tag(1);
                self.slice(name);
            }
        }
    }

    /// Zero and the text, the first time; then its place, from 1.
    fn name(&mut self, names: &Names, name: Name) {
        if self.spelled.len() <= name.index() {
            self.spelled.resize(name.index() + 1, (0, 0));
        }
        let (record, place) = self.spelled[name.index()];
        if record == self.records {
            self.varint(u64::from(place));
            return;
        }
        self.names_spelled += 1;
        self.spelled[name.index()] = (self.records, self.names_spelled);
        self.varint(0);
        self.text(names.text(name));
    }
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

/// Reads a record event by event.
#[derive(Debug)]
pub(crate) struct RecordReader<'a> {
    bytes: &'a [u8],
    at: usize,
    pub(crate) epoch: u32,
    pub(crate) time: WallMs,
    number: u64,
    grant: u64,
    spelled: Vec<Name>,
}

impl<'a> RecordReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, RecordError> {
        let mut reader = Self {
            bytes,
            at: 0,
            epoch: 0,
            time: 0,
            number: 0,
            grant: 0,
            spelled: Vec::new(),
        };
        match reader.byte()? {
            VERSION => {}
            version => return Err(RecordError::UnknownVersion(version)),
        }
        reader.epoch = reader.small("epoch")?;
        reader.time = reader.varint()?;
        Ok(reader)
    }

    /// `None` at the end.
    pub(crate) fn next(&mut self, names: &mut Names) -> Result<Option<Event<'a>>, RecordError> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let at = self.at;
        let event = match self.byte()? {
            tag::COUNTERS => Event::Counters {
                numbers: self.varint()?,
                grants: self.varint()?,
                sessions: self.varint()?,
                evicted: self.varint()?,
            },
            tag::SESSION_OPENED => Event::SessionOpened {
                number: self.varint()?,
                session: SessionId(self.array()?),
                heartbeat_ms: self.varint()?,
                applied: self.varint()?,
                name: self.text()?,
            },
            tag::SESSION_LEFT => Event::SessionLeft {
                number: self.varint()?,
                at: self.varint()?,
            },
            tag::SESSION_FORGOTTEN => Event::SessionForgotten {
                number: self.varint()?,
            },
            tag::APPLIED => Event::Applied {
                session: self.varint()?,
                through: self.varint()?,
            },
            tag::ANSWERED => Event::Answered {
                session: self.varint()?,
                seq: self.varint()?,
                receipt: self.receipt()?,
            },
            tag::MESSAGE => Event::Message {
                head: self.head(names)?,
                body: self.slice()?,
            },
            tag::COPIED => {
                let source = self.number()?;
                Event::Copied {
                    source,
                    number: self.number()?,
                    queue: self.name(names)?,
                }
            }
            tag::NOTED => Event::Noted {
                number: self.number()?,
                note: self.slice()?,
            },
            tag::GRANTED => Event::Granted {
                number: self.number()?,
                session: self.varint()?,
                grant: self.grant()?,
            },
            tag::RETURNED => Event::Returned {
                number: self.number()?,
                redelivered: self.flag()?,
            },
            tag::CRASHED => Event::Crashed {
                number: self.number()?,
                reason: self.slice()?,
            },
            tag::MOVED => Event::Moved {
                number: self.number()?,
                change: self.change(names)?,
            },
            tag::SETTLED => Event::Settled {
                number: self.number()?,
            },
            tag::STORED => {
                let key = self.key()?;
                let at = self.at;
                let flags = self.byte()?;
                Event::Stored {
                    key,
                    status: match flags & 0x7f {
                        0 => ValueStatus::Succeeded,
                        1 => ValueStatus::Failed,
                        2 => ValueStatus::Expired,
                        3 => ValueStatus::Crashed,
                        4 => ValueStatus::Cancelled,
                        _ => return Err(RecordError::Malformed { what: "status", at }),
                    },
                    group: self.name(names)?,
                    expires_at: if flags & 0x80 != 0 {
                        Some(self.varint()?)
                    } else {
                        None
                    },
                    body: self.slice()?,
                }
            }
            tag::REMOVED => Event::Removed { key: self.key()? },
            tag::EVICTED => Event::Evicted { key: self.key()? },
            tag::CLAIMED => Event::Claimed {
                number: self.number()?,
                key: self.key()?,
            },
            tag::JOIN_OPENED => Event::JoinOpened {
                join: MessageId(self.array()?),
                count: self.small("count")?,
                policy: match self.flag()? {
                    false => JoinPolicy::AllSucceeded,
                    true => JoinPolicy::AllEnded,
                },
            },
            tag::JOINED => Event::Joined {
                join: MessageId(self.array()?),
                index: self.small("index")?,
            },
            tag::JOIN_ENDED => Event::JoinEnded {
                join: MessageId(self.array()?),
                released: self.flag()?,
            },
            tag::PAUSED => Event::Paused {
                queue: self.name(names)?,
                paused: self.flag()?,
            },
            tag => return Err(RecordError::UnknownEvent { tag, at }),
        };
        Ok(Some(event))
    }

    fn head(&mut self, names: &mut Names) -> Result<MessageHead, RecordError> {
        let flags = self.byte()?;
        let has = |flag| flags & flag != 0;
        let number = self.number()?;
        let id = MessageId(self.array()?);
        let queue = self.name(names)?;
        let task = self.name(names)?;
        let at = self.at;
        let priority = self.byte()?;
        if priority > penstock_message::HIGHEST_PRIORITY {
            return Err(RecordError::Malformed {
                what: "priority",
                at,
            });
        }
        let max_deliveries = self.byte()?;
        let enqueued_at = self.difference(self.time)?;
        let expires_at = if has(has::EXPIRY) {
            Some(self.when()?)
        } else {
            None
        };
        let result_ttl_ms = if has(has::RESULT) {
            Some(self.varint()?)
        } else {
            None
        };
        let (attempt, crashes) = if has(has::HISTORY) {
            (self.small("attempt")?, self.byte()?)
        } else {
            (0, 0)
        };
        let place = match (flags >> has::PLACE_SHIFT) & 3 {
            has::READY => Place::Ready,
            has::DELAYED => Place::Delayed(self.when()?),
            has::HELD => Place::Held(MessageId(self.array()?)),
            _ => Place::Leased {
                session: self.varint()?,
                grant: self.grant()?,
            },
        };
        Ok(MessageHead {
            number,
            id,
            queue,
            task,
            priority,
            max_deliveries,
            crashes,
            redelivered: has(has::REDELIVERED),
            attempt,
            enqueued_at,
            expires_at,
            result_ttl_ms,
            place,
        })
    }

    fn change(&mut self, names: &mut Names) -> Result<Change<'a>, RecordError> {
        let flags = self.byte()?;
        let has = |flag| flags & flag != 0;
        Ok(Change {
            to: self.number()?,
            queue: self.name(names)?,
            next_attempt: has(moved::NEXT_ATTEMPT),
            crashed: has(moved::CRASHED),
            due: if has(moved::DUE) {
                Some(self.when()?)
            } else {
                None
            },
            note: if has(moved::NOTE) {
                Some(self.slice()?)
            } else {
                None
            },
            expires_at: if has(moved::EXPIRY) {
                Some(self.when()?)
            } else {
                None
            },
        })
    }

    fn receipt(&mut self) -> Result<Receipt, RecordError> {
        let at = self.at;
        let code = self.byte()?;
        match code {
            0 => {
                let count = self.varint()?;
                let mut skipped = Vec::new();
                for _ in 0..count {
                    skipped.push(self.small("operation")?);
                }
                return Ok(Receipt::Applied { skipped });
            }
            1 => return Ok(Receipt::Duplicate),
            2 => return Ok(Receipt::Unknown),
            _ => {}
        }
        let op = self.small("operation")?;
        let text = self.text()?.to_owned();
        let why = match code {
            3 => Refusal::LeaseLost,
            4 => Refusal::GuardFailed,
            5 => Refusal::TooLarge(text),
            6 => Refusal::AlreadyExists,
            7 => Refusal::QueueFull(text),
            8 => Refusal::DiskFull,
            9 => Refusal::Invalid(text),
            _ => {
                return Err(RecordError::Malformed {
                    what: "receipt",
                    at,
                });
            }
        };
        Ok(Receipt::Refused { op, why })
    }

    fn byte(&mut self) -> Result<u8, RecordError> {
        let byte = *self
            .bytes
            .get(self.at)
            .ok_or(RecordError::Truncated { at: self.at })?;
        self.at += 1;
        Ok(byte)
    }

    fn flag(&mut self) -> Result<bool, RecordError> {
        let at = self.at;
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(RecordError::Malformed { what: "flag", at }),
        }
    }

    fn varint(&mut self) -> Result<u64, RecordError> {
        let at = self.at;
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(RecordError::Malformed {
            what: "integer",
            at,
        })
    }

    fn small(&mut self, what: &'static str) -> Result<u32, RecordError> {
        let at = self.at;
        u32::try_from(self.varint()?).map_err(|_| RecordError::Malformed { what, at })
    }

    fn difference(&mut self, from: u64) -> Result<u64, RecordError> {
        let zigzag = self.varint()?;
        let difference = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
        Ok(from.wrapping_add(difference as u64))
    }

    fn number(&mut self) -> Result<u64, RecordError> {
        self.number = self.difference(self.number)?;
        Ok(self.number)
    }

    fn grant(&mut self) -> Result<Grant, RecordError> {
        let epoch = self.small("epoch")?;
        self.grant = self.difference(self.grant)?;
        Ok(Grant {
            epoch,
            number: self.grant,
            started_at: self.difference(self.time)?,
        })
    }

    fn when(&mut self) -> Result<When, RecordError> {
        let clock = match self.flag()? {
            false => Clock::Steady,
            true => Clock::Wall,
        };
        Ok(When {
            at: self.varint()?,
            clock,
        })
    }

    fn slice(&mut self) -> Result<&'a [u8], RecordError> {
        let at = self.at;
        let length = self.varint()?;
        let rest = &self.bytes[self.at..];
        let length = usize::try_from(length)
            .ok()
            .filter(|length| *length <= rest.len());
        let slice = &rest[..length.ok_or(RecordError::Truncated { at })?];
        self.at += slice.len();
        Ok(slice)
    }

    fn array(&mut self) -> Result<[u8; 16], RecordError> {
        let at = self.at;
        let array = self.bytes[at..]
            .first_chunk()
            .ok_or(RecordError::Truncated { at })?;
        self.at += array.len();
        Ok(*array)
    }

    fn text(&mut self) -> Result<&'a str, RecordError> {
        let at = self.at;
        std::str::from_utf8(self.slice()?).map_err(|_| RecordError::Malformed { what: "text", at })
    }

    fn key(&mut self) -> Result<Key, RecordError> {
        Ok(match self.flag()? {
            false => Key::Result(MessageId(self.array()?)),
            true => Key::Named(Bytes::copy_from_slice(self.slice()?)),
        })
    }

    fn name(&mut self, names: &mut Names) -> Result<Name, RecordError> {
        let at = self.at;
        let place = self.varint()?;
        if place == 0 {
            let name = names.intern(self.text()?);
            self.spelled.push(name);
            return Ok(name);
        }
        usize::try_from(place - 1)
            .ok()
            .and_then(|index| self.spelled.get(index).copied())
            .ok_or(RecordError::Malformed { what: "name", at })
    }
}
