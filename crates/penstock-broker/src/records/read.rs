//! Bytes into events. Whatever the bytes are, it ends in events or an error.

use bytes::Bytes;
use penstock_message::{
    JoinPolicy, Key, MessageId, Overflow, QueueLimits, Receipt, Refusal, SessionId, ValueStatus,
    WallMs,
};

use super::{
    Change, Event, Grant, MessageHead, Place, RecordError, VERSION, has, limited, moved, tag,
};
use crate::Boot;
use crate::clock::{Clock, When};
use crate::names::{Name, Names};

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

    /// How far it has read.
    pub(crate) fn at(&self) -> usize {
        self.at
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
            tag::CLOCK_SET => Event::ClockSet {
                steady: self.difference(self.time)?,
            },
            tag::CLOCK_BOOT => Event::ClockBoot {
                boot: Boot {
                    id: self.array()?,
                    ms: self.varint()?,
                },
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
            tag::LIMITED => Event::Limited {
                queue: self.name(names)?,
                limits: self.limits()?,
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
            has_copies: has(has::COPIES),
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

    fn limits(&mut self) -> Result<QueueLimits, RecordError> {
        let at = self.at;
        let flags = self.byte()?;
        if flags & !(limited::LENGTH | limited::BYTES | limited::DROP_OLDEST) != 0 {
            return Err(RecordError::Malformed { what: "limit", at });
        }
        let mut limit = |flag| match flags & flag {
            0 => Ok(None),
            _ => self.varint().map(Some),
        };
        Ok(QueueLimits {
            max_length: limit(limited::LENGTH)?,
            max_bytes: limit(limited::BYTES)?,
            overflow: match flags & limited::DROP_OLDEST {
                0 => Overflow::Reject,
                _ => Overflow::DropOldest,
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
