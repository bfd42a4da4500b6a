//! Records and their bytes. A record contains decisions, so that a replay decides nothing.
//!
//! A record is a header, and then events until its end:
//!
//! ```text
//!     version   1 byte    2; records of version 1 can also be read
//!     epoch     varint    of the broker that wrote it
//!     time      varint    by its wall clock, in milliseconds
//!     events              tag (1 byte), then fields
//! ```
//!
//! Integers are LEB128 varints. Bytes and texts are preceded by their length. A record is read from its start or not at
//! all, which makes three things shorter: a *name* is spelled out once, and then referred to by its index among the
//! names of the record; a *number* (of a message) and a *grant* are written as the zigzag difference from the previous
//! one.
//!
//! Messages and sessions are referred to by number. A reference to something unknown is not damage: the segment that
//! held it was reclaimed, because the thing had ended or was carried forward.

use std::borrow::Cow;

use penstock_message::{
    AppRelease, Durability, Extras, JoinId, JoinOutcome as Outcome, JoinPolicy, Key, Member,
    MessageId, OnRunning, QueueLimits, Receipt, ScheduleName, SchedulePlan, ScheduleTally,
    SessionId, Skipped, ValueStatus, WallMs, WorkflowState,
};

use crate::clock::ClockTime;
use crate::table::interner::Name;
use crate::{Boot, Position};

mod read;
mod schedules;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use read::RecordReader;
pub(crate) use write::RecordWriter;

const VERSION: u8 = 2;
/// First version. In its records failed jobs were messages of a queue called `dead`, and only clients reported members
/// to joins.
pub(crate) const FIRST_VERSION: u8 = 1;
/// Maximum number of endings in one event.
pub(crate) const ENDED_AT_ONCE: usize = 1024;

/// Entry of the journal, in the order of positions.
#[derive(Debug)]
pub struct Record {
    pub position: Position,
    pub durability: Durability,
    /// Whether it may wait a little for another record, so that one sync serves both: it holds nothing but outcomes of
    /// runs. The worker runs its next jobs meanwhile. [`Broker::awaited`](crate::Broker::awaited) states whether
    /// anybody else needs it.
    pub may_wait: bool,
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

/// A decision in the journal.
// Events are made one at a time and borrowed by the writer; a box would cost each message more than moving these few
// words.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RecordEvent<'a> {
    /// Lower bounds of all later numbers, even if the things that they counted are gone.
    Counters {
        numbers: u64,
        grants: u64,
        sessions: u64,
        evicted: u64,
    },
    /// Steady time at the record's time: the wall clock has been set since the journal last knew the difference between
    /// the two.
    ClockSet {
        steady: u64,
    },
    /// Time of the machine's clock at that moment; follows a `ClockSet`.
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
    /// The session's connection closed, at this time on the steady clock.
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
    /// Receipt of a decided transaction that was not simply applied.
    Answered {
        session: u64,
        seq: u64,
        receipt: Receipt,
    },
    /// Full state of a message: a new one, or one that is carried forward.
    Message {
        head: MessageHead,
        extras: Option<Cow<'a, Extras>>,
        /// Failure of a failed job.
        failure: Option<Failing<'a>>,
        body: &'a [u8],
    },
    /// The same message in one more queue.
    Copied {
        number: u64,
        source: u64,
        queue: Name,
    },
    /// Error of an earlier attempt; follows the message that it belongs to.
    Noted {
        number: u64,
        note: &'a [u8],
    },
    Granted {
        number: u64,
        session: u64,
        grant: Grant,
    },
    /// The message was returned to its place in the queue.
    Returned {
        number: u64,
        redelivered: bool,
    },
    /// The message's worker died. The message returns to its place, with one more crash.
    Crashed {
        number: u64,
        reason: &'a [u8],
    },
    /// The message may have killed its process: its job ran there. An event that ends its lease follows.
    Suspected {
        number: u64,
        reason: &'a [u8],
    },
    /// The worker of the message is asked to stop it: the message ends with its lease.
    CancelAsked {
        number: u64,
        kill: bool,
        reason: Name,
    },
    Moved {
        number: u64,
        change: Change<'a>,
    },
    /// The message is gone for good.
    Settled {
        number: u64,
    },
    /// The message is gone but its job is not: a message or a join that follows takes its place.
    Replaced {
        number: u64,
    },
    Stored {
        key: Key,
        status: ValueStatus,
        body: &'a [u8],
        group: Name,
        expires_at: Option<u64>,
        run: Option<RunHead>,
    },
    Removed {
        key: Key,
    },
    /// The value was removed before its time, to keep its group under the cap.
    Evicted {
        key: Key,
    },
    /// The key belongs to the message until that ends or fails for good.
    Claimed {
        number: u64,
        key: Key,
    },
    /// The key belongs to the message until it is handed out for the first time, or ends before that.
    ClaimedUntilStart {
        number: u64,
        key: Key,
        /// Steady time by which messages that replace each other are due.
        latest: Option<u64>,
    },
    /// The message loses its key before it ends: a failed join blocks it, or it only had the key until it started.
    Unclaimed {
        number: u64,
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
    /// A member of the join has failed.
    MemberFailed {
        join: JoinId,
        index: u32,
        /// Jobs that caused the failure; at most [`UPSTREAM_IDS`].
        causes: Cow<'a, [MessageId]>,
    },
    /// A member of the join was not needed.
    MemberNotNeeded {
        join: JoinId,
        index: u32,
    },
    /// The join has ended. The messages that it held are ready, or have ended by events of their own.
    JoinEnded {
        join: JoinId,
        released: bool,
        /// New numbers of the messages that it held.
        renumbered: Option<Renumbered>,
        /// Time of the release on the steady clock, if any messages have times that count from it.
        at: Option<u64>,
    },
    /// State of a join: a new one, or one that is carried forward.
    JoinState {
        join: JoinId,
        count: u32,
        policy: JoinPolicy,
        /// Steady time at which a member failed, so that the held messages are blocked.
        over_at: Option<u64>,
        /// Members that have arrived, as (index / 64, bits).
        arrived: Cow<'a, [(u32, u64)]>,
        progress: JoinProgress<'a>,
    },
    /// A member has failed: the messages that the join holds are blocked from now on.
    JoinOver {
        join: JoinId,
        /// Time of the failure, on the steady clock.
        at: u64,
    },
    /// A failed member is pending again: it was retried, or the failure that blocked it was.
    MemberRevived {
        join: JoinId,
        index: u32,
        /// Jobs that caused the remaining failures.
        causes: Cow<'a, [MessageId]>,
    },
    /// A join that was over has reopened, with the messages that it holds.
    JoinReopened {
        join: JoinId,
    },
    /// Members have been added to an unsealed join.
    JoinGrown {
        join: JoinId,
        by: u32,
    },
    /// No more members are added to a join: it is complete, or its workflow was cancelled.
    JoinSealed {
        join: JoinId,
        count: u32,
        cancelled: bool,
    },
    /// The broker has ended these messages, which did not run.
    EndedMany {
        how: UnrunCause,
        reason: Name,
        /// Time of their end, on the steady clock.
        at: u64,
        /// Whether their values are kept for as long as results are.
        kept: bool,
        /// Numbers of the messages, ascending; at most [`ENDED_AT_ONCE`].
        numbers: Cow<'a, [u64]>,
    },
    /// A message has failed for good, and is kept as a failed job.
    Failed {
        number: u64,
        failure: Failing<'a>,
    },
    /// Failed jobs up to this number are dropped.
    FailedDropped {
        through: u64,
    },
    /// A failed job is back in a queue, as its next generation.
    Revived {
        number: u64,
        to: u64,
        queue: Name,
    },
    /// An operation on many messages has begun.
    Marked {
        mark: Mark,
    },
    MarkOver {
        mark: u64,
    },
    /// Values of messages that the broker has ended, carried forward.
    KeptEnds {
        ends: KeptEnds<'a>,
    },
    /// Such values are dropped before their time.
    KeptDropped {
        numbers: Cow<'a, [u64]>,
    },
    Paused {
        queue: Name,
        paused: bool,
    },
    Limited {
        queue: Name,
        limits: QueueLimits,
    },
    /// State of a workflow: a new one, or one that is carried forward.
    WorkflowOpened {
        workflow: MessageId,
        head: WorkflowHead<'a>,
        progress: WorkflowProgress,
    },
    /// Progress of a workflow; `None`: it is forgotten before its time.
    WorkflowChanged {
        workflow: MessageId,
        progress: Option<WorkflowProgress>,
    },
    /// State of a schedule: a new one, a changed one, or one that is carried forward.
    ScheduleSet {
        schedule: Cow<'a, ScheduleName>,
        head: Cow<'a, ScheduleHead>,
        progress: ScheduleProgress,
    },
    /// Decisions on times of a schedule, in the record of the job, if there is one. `None`: the schedule is removed.
    ScheduleFired {
        schedule: Cow<'a, ScheduleName>,
        progress: Option<ScheduleProgress>,
    },
}

/// Schedule as configured by code and by people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScheduleHead {
    pub(crate) declared: Option<(SchedulePlan, AppRelease)>,
    /// Plan set by a person, which overrides the declared one.
    pub(crate) set: Option<SchedulePlan>,
    pub(crate) is_paused: bool,
    /// Wall time from which intervals count.
    pub(crate) anchor: u64,
}

impl ScheduleHead {
    /// Returns the plan in effect.
    pub(crate) fn plan(&self) -> Option<&SchedulePlan> {
        let declared = self.declared.as_ref().map(|(plan, _)| plan);
        self.set.as_ref().or(declared)
    }
}

/// Progress of a schedule through its times, which are on the wall clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScheduleProgress {
    /// Time up to which everything is decided. Only an explicit decision moves it backwards, whatever the clock does.
    pub(crate) after: u64,
    /// Last time that had a job, and the job.
    pub(crate) last: Option<(u64, MessageId)>,
    /// Time whose job waits for the end of the last one.
    pub(crate) queued: Option<u64>,
    /// Last time without a job, and the reason.
    pub(crate) skipped: Option<(u64, Skipped)>,
    pub(crate) tally: ScheduleTally,
}

/// A workflow as its client opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkflowHead<'a> {
    pub(crate) name: &'a str,
    pub(crate) description: &'a [u8],
    pub(crate) opened_at: WallMs,
    pub(crate) deadline: Option<ClockTime>,
    pub(crate) kept_ms: Option<u64>,
    pub(crate) parent: Option<MessageId>,
}

/// Counts of the ended jobs of a workflow, and its own end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkflowProgress {
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    pub(crate) cancelled: u64,
    pub(crate) outcome: WorkflowState,
    /// Whether it was cancelled as a whole.
    pub(crate) is_cancelled: bool,
    /// Steady time at which the last of its jobs that could run ended.
    pub(crate) ended_at: Option<u64>,
    /// Set once its deadline has passed: number below which its messages are cancelled. Zero if it had already ended.
    pub(crate) overdue_before: Option<u64>,
}

impl WorkflowProgress {
    /// Returns the outcome of a workflow that ended without any step having set one.
    pub(crate) fn outcome_at_end(&self, blocked: u64) -> WorkflowState {
        match (self.failed + blocked, self.cancelled) {
            _ if self.is_cancelled => WorkflowState::Cancelled,
            (1.., _) => WorkflowState::Failed,
            (_, 1..) => WorkflowState::Cancelled,
            (0, 0) => WorkflowState::Succeeded,
        }
    }
}

/// Fields that few joins have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JoinProgress<'a> {
    /// Number of members that have failed.
    pub(crate) failures: u32,
    /// Whether it has released the messages it held, and exists only for its members' values.
    pub(crate) is_released: bool,
    /// Jobs that caused the failures; at most [`UPSTREAM_IDS`].
    pub(crate) causes: Cow<'a, [MessageId]>,
    /// Expected outcomes other than success, by ascending member index.
    pub(crate) expects: Cow<'a, [(u32, Outcome)]>,
    /// Whether a member was not needed.
    pub(crate) has_needless: bool,
    /// Whether the messages that it holds are not needed.
    pub(crate) is_needless: bool,
    /// Places of the join in others.
    pub(crate) then: Cow<'a, [Member]>,
    pub(crate) result_ttl_ms: Option<u64>,
    pub(crate) unsealed: Option<Growth>,
}

/// Growth of an unsealed join, and the creator whose end would end it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    pub(crate) workflow: MessageId,
    /// Number of the creator's session; 0 if the join failed, or its workflow was cancelled, before all members were
    /// added. No more may be added then.
    pub(crate) session: u64,
    /// Number of the grant under which the creating job runs; 0 if no job created it.
    pub(crate) grant: u64,
    /// Number of members added so far.
    pub(crate) members: u32,
}

/// State of a message, without its body and notes.
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
    /// Whether it was also published to other queues.
    pub(crate) has_copies: bool,
    pub(crate) attempt: u32,
    pub(crate) generation: u32,
    pub(crate) attempts_before: u32,
    pub(crate) enqueued_at: WallMs,
    pub(crate) expires_at: Option<ClockTime>,
    pub(crate) result_ttl_ms: Option<u64>,
    pub(crate) state: RecordedState,
}

/// How a message ended that was not run to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum UnrunCause {
    Expired = 0,
    Purged = 1,
    /// Its queue was full, and newer messages took its place.
    Displaced = 2,
    Cancelled = 3,
    /// The join that held it has failed.
    Blocked = 4,
    /// Not needed: the message waited for a failure that did not happen. Everything that waits for it learns that.
    NotNeeded = 5,
}

impl UnrunCause {
    pub(crate) const ALL: [Self; 6] = [
        Self::Expired,
        Self::Purged,
        Self::Displaced,
        Self::Cancelled,
        Self::Blocked,
        Self::NotNeeded,
    ];
}

/// Why and when a message failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failing<'a> {
    /// Its new number: failed jobs are in the order of these.
    pub(crate) to: u64,
    pub(crate) crashed: bool,
    /// Whether its queue is unknown, because it failed under a broker of format 1.
    pub(crate) is_displaced: bool,
    pub(crate) class: Name,
    pub(crate) message: &'a str,
    pub(crate) fingerprint: u64,
    pub(crate) preview: &'a [u8],
    pub(crate) note: Option<&'a [u8]>,
    /// Time of the failure, on the steady clock.
    pub(crate) at: u64,
}

/// The run that produced a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunHead {
    pub(crate) queue: Name,
    pub(crate) attempt: u32,
    pub(crate) generation: u32,
    pub(crate) ended_at: WallMs,
}

/// An operation on many messages: decided at once, and done in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) number: u64,
    pub(crate) what: MarkedFor,
    /// Number below which messages are covered.
    pub(crate) before: u64,
    pub(crate) queue: Option<Name>,
    pub(crate) task: Option<Name>,
    pub(crate) workflow: Option<MessageId>,
    pub(crate) class: Option<Name>,
    pub(crate) fingerprint: Option<u64>,
    /// Earliest wall time of the failure.
    pub(crate) failed_from: Option<u64>,
    pub(crate) failed_before: Option<u64>,
    /// Queue to which retried jobs go.
    pub(crate) target: Option<Name>,
    pub(crate) reason: Name,
    /// How a cancellation treats running jobs.
    pub(crate) running: OnRunning,
}

impl Mark {
    /// Whether it covers the messages of whole workflows.
    pub(crate) fn is_for_workflows(&self) -> bool {
        self.workflow.is_some() || self.what == MarkedFor::Overdue
    }

    /// Returns all names in it.
    pub(crate) fn names(&self) -> impl Iterator<Item = Name> + use<> {
        let names = [self.queue, self.task, self.class, self.target];
        names.into_iter().flatten().chain([self.reason])
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MarkedFor {
    Purge = 0,
    Cancel = 1,
    Retry = 2,
    Drop = 3,
    /// Cancels the messages of all workflows whose deadlines have passed.
    Overdue = 4,
}

impl MarkedFor {
    const ALL: [Self; 5] = [
        Self::Purge,
        Self::Cancel,
        Self::Retry,
        Self::Drop,
        Self::Overdue,
    ];

    /// Whether it cancels messages, and asks the workers of running ones to stop.
    pub(crate) fn is_cancellation(self) -> bool {
        matches!(self, Self::Cancel | Self::Overdue)
    }
}

/// Values of messages that are alike except for the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeptEnds<'a> {
    pub(crate) how: UnrunCause,
    pub(crate) reason: Name,
    pub(crate) queue: Name,
    pub(crate) task: Name,
    pub(crate) attempt: u32,
    pub(crate) generation: u32,
    pub(crate) result_ttl_ms: u64,
    pub(crate) ends: Cow<'a, [KeptEnd]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeptEnd {
    pub(crate) number: u64,
    pub(crate) id: MessageId,
    /// Time of the end, on the steady clock.
    pub(crate) at: u64,
}

/// State of a message, and the data that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordedState {
    Ready,
    Delayed(ClockTime),
    Held(JoinId),
    Leased { session: u64, grant: Grant },
}

/// Consecutive numbers, and the first of those that replace them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Renumbered {
    pub(crate) first: u64,
    pub(crate) to: u64,
    pub(crate) count: u64,
}

impl Renumbered {
    pub(crate) fn of(self, number: u64) -> Option<u64> {
        let offset = number.checked_sub(self.first)?;
        (offset < self.count).then(|| self.to.saturating_add(offset))
    }
}

/// Hand-out of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    pub(crate) started_at: WallMs,
}

/// Changes made by a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change<'a> {
    /// Its new number, which is its place among others.
    pub(crate) to: u64,
    pub(crate) queue: Name,
    pub(crate) due: Option<ClockTime>,
    pub(crate) next_attempt: bool,
    pub(crate) crashed: bool,
    /// Whether its lease ended without an outcome: it counts as redelivered if it already did before.
    pub(crate) redelivered: bool,
    /// Whether the ended delivery had been sent, so that it counts as redelivered anyway.
    pub(crate) was_sent: bool,
    pub(crate) note: Option<&'a [u8]>,
    pub(crate) expires_at: Option<ClockTime>,
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
    pub(super) const WORKFLOW_OPENED: u8 = 25;
    pub(super) const WORKFLOW_CHANGED: u8 = 26;
    // 30, 33, 34 and 38 are reserved: members settled, policies, gates, breakers.
    pub(super) const JOIN_STATE: u8 = 27;
    pub(super) const JOIN_GROWN: u8 = 28;
    pub(super) const JOIN_SEALED: u8 = 29;
    pub(super) const JOIN_OVER: u8 = 31;
    pub(super) const REVIVED: u8 = 32;
    pub(super) const SCHEDULE_SET: u8 = 35;
    pub(super) const SCHEDULE_FIRED: u8 = 36;
    pub(super) const CLAIMED_UNTIL_START: u8 = 37;
    pub(super) const ENDED_MANY: u8 = 39;
    pub(super) const FAILED: u8 = 40;
    pub(super) const SUSPECTED: u8 = 41;
    pub(super) const CANCEL_ASKED: u8 = 42;
    pub(super) const CLOCK_BOOT: u8 = 43;
    pub(super) const FAILED_DROPPED: u8 = 44;
    pub(super) const MARKED: u8 = 45;
    pub(super) const MARK_OVER: u8 = 46;
    pub(super) const KEPT_ENDS: u8 = 47;
    pub(super) const KEPT_DROPPED: u8 = 48;
    pub(super) const MEMBER_FAILED: u8 = 49;
    pub(super) const MEMBER_NOT_NEEDED: u8 = 50;
    pub(super) const MEMBER_REVIVED: u8 = 52;
    pub(super) const JOIN_REOPENED: u8 = 53;
    pub(super) const REPLACED: u8 = 54;
    pub(super) const UNCLAIMED: u8 = 55;
    /// All tags that are in use.
    #[cfg(test)]
    #[rustfmt::skip]
    pub(super) const ALL: [u8; 50] = [
        1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,
        JOIN_STATE, JOIN_GROWN, JOIN_SEALED, JOIN_OVER, REVIVED, ENDED_MANY, FAILED, SUSPECTED,
        CANCEL_ASKED, CLOCK_BOOT, FAILED_DROPPED, MARKED, MARK_OVER, KEPT_ENDS, KEPT_DROPPED, MEMBER_FAILED,
        MEMBER_NOT_NEEDED, MEMBER_REVIVED, JOIN_REOPENED,
        REPLACED, UNCLAIMED, WORKFLOW_OPENED, WORKFLOW_CHANGED, SCHEDULE_SET, SCHEDULE_FIRED,
        CLAIMED_UNTIL_START,
    ];
}

/// Flags of the optional fields of a `Message` that follow.
mod has {
    pub(super) const EXPIRY: u8 = 1;
    pub(super) const RESULT: u8 = 2;
    pub(super) const HISTORY: u8 = 4;
    pub(super) const REDELIVERED: u8 = 8;
    /// The state, in two bits.
    pub(super) const STATE_SHIFT: u8 = 4;
    pub(super) const READY: u8 = 0;
    pub(super) const DELAYED: u8 = 1;
    pub(super) const HELD: u8 = 2;
    pub(super) const LEASED: u8 = 3;
    pub(super) const COPIES: u8 = 64;
    /// Further flags follow: see `also`.
    pub(super) const ALSO: u8 = 128;
}

/// Flags of the rare fields of a `Message` that follow, in this order, before its body.
mod also {
    pub(super) const MEMBER: u64 = 1;
    pub(super) const INPUTS: u64 = 1 << 1;
    pub(super) const WORKFLOW: u64 = 1 << 2;
    pub(super) const KEY: u64 = 1 << 3;
    pub(super) const HEADERS: u64 = 1 << 4;
    pub(super) const GENERATION: u64 = 1 << 5;
    pub(super) const RETRIES: u64 = 1 << 6;
    pub(super) const TIMEOUT: u64 = 1 << 7;
    pub(super) const SOFT_TIMEOUT: u64 = 1 << 8;
    pub(super) const SUSPECTS: u64 = 1 << 9;
    pub(super) const PARENT: u64 = 1 << 10;
    pub(super) const FAILED: u64 = 1 << 11;
    pub(super) const ARGS_HASH: u64 = 1 << 12;
    pub(super) const ATTEMPTS_BEFORE: u64 = 1 << 13;
    pub(super) const WHEN: u64 = 1 << 14;
    /// Flags of `later` follow, and its fields.
    pub(super) const LATER: u64 = 1 << 15;
    pub(super) const KNOWN: u64 = (1 << 16) - 1;
}

/// Flags of the times that count from a release, and of the fields that follow.
mod later {
    pub(super) const AFTER: u8 = 1;
    pub(super) const AT: u8 = 2;
    pub(super) const EXPIRES: u8 = 4;
    pub(super) const KNOWN: u8 = 7;
}

/// Flags of a `Failed`, and of its fields that follow.
mod failed {
    pub(super) const CRASHED: u8 = 1;
    pub(super) const DISPLACED: u8 = 2;
    pub(super) const NOTE: u8 = 4;
}

/// Flags of the fields of a `Marked` that follow.
mod marked {
    pub(super) const QUEUE: u8 = 1;
    pub(super) const TASK: u8 = 2;
    pub(super) const CLASS: u8 = 4;
    pub(super) const FINGERPRINT: u8 = 8;
    pub(super) const FROM: u8 = 16;
    pub(super) const BEFORE: u8 = 32;
    pub(super) const TARGET: u8 = 64;
    /// Running jobs are asked to stop: a byte says how.
    pub(super) const RUNNING: u8 = 128;
}

/// Flag next to the purpose of a `Marked`: a workflow follows.
const MARKED_WORKFLOW: u8 = 128;

/// Flags of a `JoinState`, and of its fields that follow.
mod join {
    pub(super) const ALL_ENDED: u8 = 1;
    pub(super) const OVER: u8 = 2;
    pub(super) const MAX_FAILURES: u8 = 4;
    pub(super) const RELEASED: u8 = 8;
    pub(super) const FAILURES: u8 = 16;
    pub(super) const THEN: u8 = 32;
    pub(super) const RESULT: u8 = 64;
    /// Further flags follow after those fields: see `also_join`.
    pub(super) const ALSO: u8 = 128;
}

/// Flags of the rare fields of a `JoinState` that follow.
mod also_join {
    pub(super) const EXPECTS: u64 = 1;
    pub(super) const HAS_NEEDLESS: u64 = 1 << 1;
    pub(super) const NEEDLESS: u64 = 1 << 2;
    pub(super) const UNSEALED: u64 = 1 << 3;
    pub(super) const KNOWN: u64 = (1 << 4) - 1;
}

/// Flags of a `WorkflowOpened`, and of its fields that follow.
mod opened {
    pub(super) const DEADLINE: u8 = 1;
    pub(super) const KEPT: u8 = 2;
    pub(super) const PARENT: u8 = 4;
}

/// Flags of the progress of a workflow, and of its fields that follow.
mod changed {
    /// The outcome, in three bits.
    pub(super) const OUTCOME: u8 = 7;
    pub(super) const ENDED: u8 = 8;
    pub(super) const COUNTS: u8 = 16;
    pub(super) const FORGOTTEN: u8 = 32;
    pub(super) const CANCELLED: u8 = 64;
    pub(super) const OVERDUE: u8 = 128;
}

/// Flags of a `ScheduleSet`, and of its fields that follow.
mod scheduled {
    pub(super) const DECLARED: u8 = 1;
    pub(super) const SET: u8 = 2;
    pub(super) const PAUSED: u8 = 4;
    pub(super) const KNOWN: u8 = 7;
}

/// Flags of a plan's message, and of its fields that follow.
mod planned {
    pub(super) const EXPIRY: u8 = 1;
    pub(super) const RESULT: u8 = 2;
    pub(super) const EXTRAS: u8 = 4;
    pub(super) const KNOWN: u8 = 7;
}

/// Flags of the progress of a schedule, and of its fields that follow.
mod fired {
    pub(super) const LAST: u8 = 1;
    pub(super) const QUEUED: u8 = 2;
    pub(super) const SKIPPED: u8 = 4;
    pub(super) const TALLY: u8 = 8;
    pub(super) const REMOVED: u8 = 16;
    pub(super) const KNOWN: u8 = 15;
}

/// Flags next to the status of a `StoredValue`.
mod stored {
    pub(super) const EXPIRY: u8 = 128;
    pub(super) const RUN: u8 = 64;
    pub(super) const STATUS: u8 = 63;
}

/// Flags of a `Moved`, and of its fields that follow.
mod moved {
    pub(super) const DUE: u8 = 1;
    pub(super) const NEXT_ATTEMPT: u8 = 2;
    pub(super) const CRASHED: u8 = 4;
    pub(super) const NOTE: u8 = 8;
    pub(super) const EXPIRY: u8 = 16;
    // 32 is reserved: its end counts as a failure for the join that it is a member of.
    pub(super) const REDELIVERED: u8 = 64;
    pub(super) const SENT: u8 = 128;
}

/// Flags of a `Limited`, and of its fields that follow.
mod limited {
    pub(super) const LENGTH: u8 = 1;
    pub(super) const BYTES: u8 = 2;
    pub(super) const DROP_OLDEST: u8 = 4;
}

/// Reason why bytes are not a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("it ends within an event, at byte {at}")]
    Truncated { at: usize },
    #[error(
        "it has version {0}, and this program reads versions up to {VERSION}: a newer one wrote it"
    )]
    UnknownVersion(u8),
    #[error(
        "it has an event {tag} at byte {at}, which this program does not know: a newer one wrote it"
    )]
    UnknownEvent { tag: u8, at: usize },
    #[error("it has a {what} at byte {at} that this program does not know: a newer one wrote it")]
    UnknownField { what: &'static str, at: usize },
    #[error("no {what} can be read at byte {at}")]
    Malformed { what: &'static str, at: usize },
}
