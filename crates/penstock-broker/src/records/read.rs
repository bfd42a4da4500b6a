//! Reads events from bytes. Arbitrary bytes yield events or an error.

mod fields;
mod receipts;
mod workflows;

use std::borrow::Cow;

use bytes::Bytes;
use penstock_message::{
    Due, Extras, InputShape, Inputs, JoinOutcome as Outcome, JoinPolicy, Member, MessageId,
    MessageState, OnRunning, Overflow, QueueLimits, ReleaseTimes, Retries, SessionId, UPSTREAM_IDS,
    ValueStatus, WallMs,
};

use super::{
    Change, ENDED_AT_ONCE, FIRST_VERSION, Failing, KeptEnd, KeptEnds, MARKED_WORKFLOW, Mark,
    MarkedFor, MessageHead, RecordError, RecordEvent, RecordedState, Renumbered, RunHead,
    UnrunCause, VERSION, also, failed, has, later, limited, marked, moved, stored, tag,
};
use crate::Boot;
use crate::table::interner::{Interner, Name};

const STATUSES: [ValueStatus; 9] = [
    ValueStatus::Succeeded,
    ValueStatus::Failed,
    ValueStatus::Expired,
    ValueStatus::Crashed,
    ValueStatus::Cancelled,
    ValueStatus::Upstream,
    ValueStatus::Replaced,
    ValueStatus::Gathered,
    ValueStatus::TimedOut,
];

const STATES: [MessageState; 8] = [
    MessageState::Ready,
    MessageState::Delayed,
    MessageState::Running,
    MessageState::Held,
    MessageState::Failed,
    MessageState::Blocked,
    MessageState::Cancelling,
    MessageState::Parked,
];

fn state_of(number: u8) -> Option<MessageState> {
    STATES.get(usize::from(number)).copied()
}

/// State of a message, without its body.
type Head<'a> = (MessageHead, Option<Extras>, Option<Failing<'a>>);

/// Reads a record, event by event.
#[derive(Debug)]
pub(crate) struct RecordReader<'a> {
    bytes: &'a [u8],
    pub(super) at: usize,
    pub(crate) version: u8,
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
            version: VERSION,
            epoch: 0,
            time: 0,
            number: 0,
            grant: 0,
            spelled: Vec::new(),
        };
        match reader.byte()? {
            version @ FIRST_VERSION..=VERSION => reader.version = version,
            version => return Err(RecordError::UnknownVersion(version)),
        }
        reader.epoch = reader.small("epoch")?;
        reader.time = reader.varint()?;
        Ok(reader)
    }

    /// Returns the offset up to which it has read.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Reads the next event; `None` at the end.
    pub(crate) fn next(
        &mut self,
        names: &mut Interner,
    ) -> Result<Option<RecordEvent<'a>>, RecordError> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let at = self.at;
        let event = match self.byte()? {
            tag::COUNTERS => RecordEvent::Counters {
                numbers: self.varint()?,
                grants: self.varint()?,
                sessions: self.varint()?,
                evicted: self.varint()?,
            },
            tag::CLOCK_SET => RecordEvent::ClockSet {
                steady: self.difference(self.time)?,
            },
            tag::CLOCK_BOOT => RecordEvent::ClockBoot {
                boot: Boot {
                    id: self.array()?,
                    ms: self.varint()?,
                },
            },
            tag::SESSION_OPENED => RecordEvent::SessionOpened {
                number: self.varint()?,
                session: SessionId(self.array()?),
                heartbeat_ms: self.varint()?,
                applied: self.varint()?,
                name: self.text()?,
            },
            tag::SESSION_LEFT => RecordEvent::SessionLeft {
                number: self.varint()?,
                at: self.varint()?,
            },
            tag::SESSION_FORGOTTEN => RecordEvent::SessionForgotten {
                number: self.varint()?,
            },
            tag::APPLIED => RecordEvent::Applied {
                session: self.varint()?,
                through: self.varint()?,
            },
            tag::ANSWERED => RecordEvent::Answered {
                session: self.varint()?,
                seq: self.varint()?,
                receipt: self.receipt()?,
            },
            tag::MESSAGE => {
                let (head, extras, failure) = self.head(names)?;
                RecordEvent::Message {
                    head,
                    extras: extras.map(Cow::Owned),
                    failure,
                    body: self.slice()?,
                }
            }
            tag::COPIED => {
                let source = self.number()?;
                RecordEvent::Copied {
                    source,
                    number: self.number()?,
                    queue: self.name(names)?,
                }
            }
            tag::NOTED => RecordEvent::Noted {
                number: self.number()?,
                note: self.slice()?,
            },
            tag::GRANTED => RecordEvent::Granted {
                number: self.number()?,
                session: self.varint()?,
                grant: self.grant()?,
            },
            tag::RETURNED => RecordEvent::Returned {
                number: self.number()?,
                redelivered: self.flag()?,
            },
            tag::CRASHED => RecordEvent::Crashed {
                number: self.number()?,
                reason: self.slice()?,
            },
            tag::SUSPECTED => RecordEvent::Suspected {
                number: self.number()?,
                reason: self.slice()?,
            },
            tag::CANCEL_ASKED => RecordEvent::CancelAsked {
                number: self.number()?,
                kill: self.running()? == OnRunning::Kill,
                reason: self.name(names)?,
            },
            tag::MOVED => RecordEvent::Moved {
                number: self.number()?,
                change: self.change(names)?,
            },
            tag::SETTLED => RecordEvent::Settled {
                number: self.number()?,
            },
            tag::REPLACED => RecordEvent::Replaced {
                number: self.number()?,
            },
            tag::STORED => {
                let key = self.key()?;
                let at = self.at;
                let flags = self.byte()?;
                RecordEvent::Stored {
                    key,
                    status: *STATUSES
                        .get(usize::from(flags & stored::STATUS))
                        .ok_or(RecordError::UnknownField { what: "status", at })?,
                    group: self.name(names)?,
                    expires_at: match flags & stored::EXPIRY {
                        0 => None,
                        _ => Some(self.varint()?),
                    },
                    run: match flags & stored::RUN {
                        0 => None,
                        _ => Some(RunHead {
                            queue: self.name(names)?,
                            attempt: self.small("attempt")?,
                            generation: self.small("generation")?,
                            ended_at: self.difference(self.time)?,
                        }),
                    },
                    body: self.slice()?,
                }
            }
            tag::REMOVED => RecordEvent::Removed { key: self.key()? },
            tag::EVICTED => RecordEvent::Evicted { key: self.key()? },
            tag::CLAIMED => RecordEvent::Claimed {
                number: self.number()?,
                key: self.key()?,
            },
            tag::CLAIMED_UNTIL_START => RecordEvent::ClaimedUntilStart {
                number: self.number()?,
                key: self.key()?,
                latest: match self.flag()? {
                    true => Some(self.varint()?),
                    false => None,
                },
            },
            tag::UNCLAIMED => RecordEvent::Unclaimed {
                number: self.number()?,
            },
            tag::JOIN_OPENED => RecordEvent::JoinOpened {
                join: MessageId(self.array()?),
                count: self.small("count")?,
                policy: match self.flag()? {
                    false => JoinPolicy::AllSucceeded,
                    true => JoinPolicy::AllEnded,
                },
            },
            tag::JOINED => RecordEvent::Joined {
                join: MessageId(self.array()?),
                index: self.small("index")?,
            },
            tag::MEMBER_FAILED => RecordEvent::MemberFailed {
                join: MessageId(self.array()?),
                index: self.small("index")?,
                causes: self.ids()?.into(),
            },
            tag::JOIN_ENDED => {
                let join = MessageId(self.array()?);
                let at = self.at;
                let flags = self.byte()?;
                if flags > 7 {
                    return Err(RecordError::UnknownField {
                        what: "end of a join",
                        at,
                    });
                }
                RecordEvent::JoinEnded {
                    join,
                    released: flags & 1 != 0,
                    renumbered: match flags & 2 {
                        0 => None,
                        _ => Some(Renumbered {
                            first: self.number()?,
                            to: self.number()?,
                            count: self.varint()?,
                        }),
                    },
                    at: match flags & 4 {
                        0 => None,
                        _ => Some(self.difference(self.time)?),
                    },
                }
            }
            tag::MEMBER_NOT_NEEDED => RecordEvent::MemberNotNeeded {
                join: MessageId(self.array()?),
                index: self.small("index")?,
            },
            tag::JOIN_STATE => self.join_state()?,
            tag::JOIN_GROWN => RecordEvent::JoinGrown {
                join: MessageId(self.array()?),
                by: self.small("count")?,
            },
            tag::JOIN_SEALED => RecordEvent::JoinSealed {
                join: MessageId(self.array()?),
                count: self.small("count")?,
                cancelled: self.flag()?,
            },
            tag::JOIN_OVER => RecordEvent::JoinOver {
                join: MessageId(self.array()?),
                at: self.difference(self.time)?,
            },
            tag::MEMBER_REVIVED => RecordEvent::MemberRevived {
                join: MessageId(self.array()?),
                index: self.small("index")?,
                causes: self.ids()?.into(),
            },
            tag::JOIN_REOPENED => RecordEvent::JoinReopened {
                join: MessageId(self.array()?),
            },
            tag::ENDED_MANY => {
                let at = self.at;
                let flags = self.byte()?;
                RecordEvent::EndedMany {
                    how: *UnrunCause::ALL
                        .get(usize::from(flags >> 1))
                        .ok_or(RecordError::UnknownField { what: "end", at })?,
                    kept: flags & 1 != 0,
                    reason: self.name(names)?,
                    at: self.difference(self.time)?,
                    numbers: self.numbers()?.into(),
                }
            }
            tag::FAILED => RecordEvent::Failed {
                number: self.number()?,
                failure: self.failure(names)?,
            },
            tag::FAILED_DROPPED => RecordEvent::FailedDropped {
                through: self.varint()?,
            },
            tag::REVIVED => RecordEvent::Revived {
                number: self.number()?,
                to: self.number()?,
                queue: self.name(names)?,
            },
            tag::MARKED => RecordEvent::Marked {
                mark: self.mark(names)?,
            },
            tag::MARK_OVER => RecordEvent::MarkOver {
                mark: self.varint()?,
            },
            tag::KEPT_ENDS => RecordEvent::KeptEnds {
                ends: self.kept_ends(names)?,
            },
            tag::KEPT_DROPPED => RecordEvent::KeptDropped {
                numbers: self.numbers()?.into(),
            },
            tag::PAUSED => RecordEvent::Paused {
                queue: self.name(names)?,
                paused: self.flag()?,
            },
            tag::LIMITED => RecordEvent::Limited {
                queue: self.name(names)?,
                limits: self.limits()?,
            },
            tag::WORKFLOW_OPENED => RecordEvent::WorkflowOpened {
                workflow: MessageId(self.array()?),
                head: self.workflow_head()?,
                progress: self.workflow_progress()?.unwrap_or_default(),
            },
            tag::WORKFLOW_CHANGED => RecordEvent::WorkflowChanged {
                workflow: MessageId(self.array()?),
                progress: self.workflow_progress()?,
            },
            tag::SCHEDULE_SET => RecordEvent::ScheduleSet {
                schedule: Cow::Owned(self.schedule_name()?),
                head: Cow::Owned(self.schedule_head(names)?),
                progress: self.schedule_progress()?.unwrap_or_default(),
            },
            tag::SCHEDULE_FIRED => RecordEvent::ScheduleFired {
                schedule: Cow::Owned(self.schedule_name()?),
                progress: self.schedule_progress()?,
            },
            tag => return Err(RecordError::UnknownEvent { tag, at }),
        };
        Ok(Some(event))
    }

    fn head(&mut self, names: &mut Interner) -> Result<Head<'a>, RecordError> {
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
        let state = match (flags >> has::STATE_SHIFT) & 3 {
            has::READY => RecordedState::Ready,
            has::DELAYED => RecordedState::Delayed(self.when()?),
            has::HELD => RecordedState::Held(MessageId(self.array()?)),
            _ => RecordedState::Leased {
                session: self.varint()?,
                grant: self.grant()?,
            },
        };
        let mut head = MessageHead {
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
            generation: 0,
            attempts_before: 0,
            enqueued_at,
            expires_at,
            result_ttl_ms,
            state,
        };
        if !has(has::ALSO) {
            return Ok((head, None, None));
        }
        let counts = [&mut head.generation, &mut head.attempts_before];
        let (extras, failure) = self.rare(names, counts)?;
        Ok((head, extras, failure))
    }

    pub(super) fn rare(
        &mut self,
        names: &mut Interner,
        [generation, attempts_before]: [&mut u32; 2],
    ) -> Result<(Option<Extras>, Option<Failing<'a>>), RecordError> {
        let at = self.at;
        let flags = self.varint()?;
        if flags & !also::KNOWN != 0 {
            let what = "field of a message";
            return Err(RecordError::UnknownField { what, at });
        }
        let has = |flag| flags & flag != 0;
        let mut extras = Extras::default();
        let mut failure = None;
        if has(also::MEMBER) {
            extras.member = Some(Member {
                join: MessageId(self.array()?),
                index: self.small("index")?,
            });
        }
        if has(also::INPUTS) {
            let join = MessageId(self.array()?);
            let at = self.at;
            let shape = match self.byte()? {
                0 => InputShape::One,
                1 => InputShape::List,
                2 => InputShape::Named,
                _ => return Err(RecordError::UnknownField { what: "shape", at }),
            };
            extras.inputs = Some(Inputs { join, shape });
        }
        if has(also::WORKFLOW) {
            extras.workflow = Some(MessageId(self.array()?));
        }
        if has(also::KEY) {
            extras.key = Some(Bytes::copy_from_slice(self.slice()?));
        }
        if has(also::HEADERS) {
            for _ in 0..self.varint()? {
                let name = self.text()?.to_owned();
                let value = Bytes::copy_from_slice(self.slice()?);
                extras.headers.push((name, value));
            }
        }
        if has(also::GENERATION) {
            *generation = self.small("generation")?;
        }
        if has(also::RETRIES) {
            extras.retries = Some(self.retries()?);
        }
        if has(also::TIMEOUT) {
            extras.timeout_ms = Some(self.varint()?);
        }
        if has(also::SOFT_TIMEOUT) {
            extras.soft_timeout_ms = Some(self.varint()?);
        }
        if has(also::SUSPECTS) {
            extras.suspects = self.byte()?;
        }
        if has(also::PARENT) {
            extras.parent = Some(MessageId(self.array()?));
        }
        if has(also::FAILED) {
            failure = Some(self.failure(names)?);
        }
        if has(also::ARGS_HASH) {
            extras.args_hash = Some(self.word()?);
        }
        if has(also::ATTEMPTS_BEFORE) {
            *attempts_before = self.small("attempt")?;
        }
        if has(also::WHEN) {
            let at = self.at;
            let when = Outcome::ALL.get(usize::from(self.byte()?));
            let unknown = RecordError::UnknownField {
                what: "outcome of a join",
                at,
            };
            extras.when = *when.ok_or(unknown)?;
        }
        if has(also::LATER) {
            extras.later = Some(Box::new(self.later()?));
        }
        Ok(((extras != Extras::default()).then_some(extras), failure))
    }

    fn later(&mut self) -> Result<ReleaseTimes, RecordError> {
        let at = self.at;
        let flags = self.byte()?;
        if flags & !later::KNOWN != 0 || flags & later::AFTER & (flags >> 1) != 0 {
            let what = "time of a held message";
            return Err(RecordError::UnknownField { what, at });
        }
        let due = match (flags & later::AFTER, flags & later::AT) {
            (0, 0) => None,
            (0, _) => Some(Due::At(self.varint()?)),
            _ => Some(Due::AfterMs(self.varint()?)),
        };
        let expires_after_ms = match flags & later::EXPIRES {
            0 => None,
            _ => Some(self.varint()?),
        };
        Ok(ReleaseTimes {
            due,
            expires_after_ms,
        })
    }

    fn retries(&mut self) -> Result<Retries, RecordError> {
        let at = self.at;
        Ok(match self.byte()? {
            0 => Retries::AtMost(self.small("retries")?),
            1 => {
                let count = self.varint()?;
                if count > Retries::DELAYS_CAP as u64 {
                    return Err(RecordError::Malformed {
                        what: "retries",
                        at,
                    });
                }
                let delays = (0..count).map(|_| self.varint());
                Retries::After(delays.collect::<Result<_, _>>()?)
            }
            _ => {
                return Err(RecordError::UnknownField {
                    what: "retries",
                    at,
                });
            }
        })
    }

    fn failure(&mut self, names: &mut Interner) -> Result<Failing<'a>, RecordError> {
        let at = self.at;
        let flags = self.byte()?;
        if flags & !(failed::CRASHED | failed::DISPLACED | failed::NOTE) != 0 {
            return Err(RecordError::UnknownField {
                what: "failure",
                at,
            });
        }
        Ok(Failing {
            crashed: flags & failed::CRASHED != 0,
            is_displaced: flags & failed::DISPLACED != 0,
            to: self.number()?,
            class: self.name(names)?,
            message: self.text()?,
            fingerprint: self.word()?,
            preview: self.slice()?,
            note: match flags & failed::NOTE {
                0 => None,
                _ => Some(self.slice()?),
            },
            at: self.difference(self.time)?,
        })
    }

    fn mark(&mut self, names: &mut Interner) -> Result<Mark, RecordError> {
        let number = self.varint()?;
        let at = self.at;
        let what = self.byte()?;
        let workflow = match what & MARKED_WORKFLOW {
            0 => None,
            _ => Some(MessageId(self.array()?)),
        };
        let what = *MarkedFor::ALL
            .get(usize::from(what & !MARKED_WORKFLOW))
            .ok_or(RecordError::UnknownField { what: "mark", at })?;
        let before = self.varint()?;
        let reason = self.name(names)?;
        let flags = self.byte()?;
        let has = |flag| flags & flag != 0;
        let mut name = |flag| match has(flag) {
            true => self.name(names).map(Some),
            false => Ok(None),
        };
        let (queue, task, class) = (
            name(marked::QUEUE)?,
            name(marked::TASK)?,
            name(marked::CLASS)?,
        );
        let fingerprint = match has(marked::FINGERPRINT) {
            true => Some(self.word()?),
            false => None,
        };
        let mut time = |flag| match has(flag) {
            true => self.varint().map(Some),
            false => Ok(None),
        };
        let (failed_from, failed_before) = (time(marked::FROM)?, time(marked::BEFORE)?);
        let target = match has(marked::TARGET) {
            true => Some(self.name(names)?),
            false => None,
        };
        Ok(Mark {
            number,
            what,
            before,
            queue,
            task,
            workflow,
            class,
            fingerprint,
            failed_from,
            failed_before,
            target,
            reason,
            running: match flags & marked::RUNNING {
                0 => OnRunning::Leave,
                _ => self.running()?,
            },
        })
    }

    fn running(&mut self) -> Result<OnRunning, RecordError> {
        let at = self.at;
        let running = OnRunning::ALL.get(usize::from(self.byte()?));
        running.copied().ok_or(RecordError::UnknownField {
            what: "treatment of running jobs",
            at,
        })
    }

    fn kept_ends(&mut self, names: &mut Interner) -> Result<KeptEnds<'a>, RecordError> {
        let at = self.at;
        let how = *UnrunCause::ALL
            .get(usize::from(self.byte()?))
            .ok_or(RecordError::UnknownField { what: "end", at })?;
        let (reason, queue, task) = (self.name(names)?, self.name(names)?, self.name(names)?);
        let (attempt, generation) = (self.small("attempt")?, self.small("generation")?);
        let result_ttl_ms = self.varint()?;
        let mut before = self.time;
        let mut ends = Vec::new();
        for _ in 0..self.varint()? {
            let end = KeptEnd {
                number: self.number()?,
                id: MessageId(self.array()?),
                at: self.difference(before)?,
            };
            before = end.at;
            ends.push(end);
        }
        Ok(KeptEnds {
            how,
            reason,
            queue,
            task,
            attempt,
            generation,
            result_ttl_ms,
            ends: ends.into(),
        })
    }

    fn ids(&mut self) -> Result<Vec<MessageId>, RecordError> {
        let at = self.at;
        let count = self.varint()?;
        if count > UPSTREAM_IDS as u64 {
            return Err(RecordError::Malformed {
                what: "list of ids",
                at,
            });
        }
        (0..count).map(|_| Ok(MessageId(self.array()?))).collect()
    }

    fn numbers(&mut self) -> Result<Vec<u64>, RecordError> {
        let at = self.at;
        let malformed = RecordError::Malformed { what: "run", at };
        let mut numbers = Vec::new();
        for _ in 0..self.varint()? {
            let first = self.number()?;
            let length = self.varint()?;
            let room = (ENDED_AT_ONCE - numbers.len()) as u64;
            let last = length
                .checked_sub(1)
                .filter(|_| length <= room)
                .and_then(|more| first.checked_add(more));
            let last = last.ok_or_else(|| malformed.clone())?;
            numbers.extend(first..=last);
            self.number = last;
        }
        Ok(numbers)
    }

    /// Reads eight bytes, lowest first.
    fn word(&mut self) -> Result<u64, RecordError> {
        let at = self.at;
        let bytes = self.bytes[at..]
            .first_chunk()
            .ok_or(RecordError::Truncated { at })?;
        self.at += bytes.len();
        Ok(u64::from_le_bytes(*bytes))
    }

    fn change(&mut self, names: &mut Interner) -> Result<Change<'a>, RecordError> {
        let flags = self.byte()?;
        let has = |flag| flags & flag != 0;
        Ok(Change {
            to: self.number()?,
            queue: self.name(names)?,
            next_attempt: has(moved::NEXT_ATTEMPT),
            crashed: has(moved::CRASHED),
            redelivered: has(moved::REDELIVERED),
            was_sent: has(moved::SENT),
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
}
