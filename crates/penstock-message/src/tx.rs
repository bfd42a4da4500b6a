use bytes::Bytes;

use crate::{
    JoinOutcome, Key, Lease, Member, Message, MessageId, MessageState, QueueLimits, ReleaseReason,
    ScheduleName, ScheduleStep, Value, WallMs,
};

/// Operations that a broker applies all together or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tx {
    pub ops: Vec<Op>,
}

impl From<Vec<Op>> for Tx {
    fn from(ops: Vec<Op>) -> Self {
        Self { ops }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Ends the message, whose delivery is done. A guard: a lease that was lost fails the whole [`Tx`].
    Ack {
        lease: Lease,
        cost_us: u64,
    },
    /// Ends the run, and not the job: another step takes its place, its id and all that waits for it. A guard, as `Ack` is.
    ///
    /// Exactly one later operation of the [`Tx`] has that step's end: a message with this id, published or held, which gets
    /// the job's own [`Extras::member`](crate::Extras), and whose result is kept as the job's would have been; or a [`Hold`] one of whose places is [`place_of_heir`]. If the job
    /// was cancelled, or its workflow, the job ends as that, and none of the others is applied.
    Replace {
        lease: Lease,
        cost_us: u64,
    },
    /// Hands the delivery back. A guard, as `Ack` is.
    Release {
        lease: Lease,
        reason: ReleaseReason,
    },
    /// Puts the same message, with the same body, in a new place: a retry, for one. A guard, as `Ack` is.
    Move {
        lease: Lease,
        /// `None`: the queue it came from.
        queue: Option<String>,
        due: Option<Due>,
        patch: HeaderPatch,
        cost_us: u64,
    },
    /// Publishes one body to any number of queues.
    Publish {
        queues: Vec<String>,
        message: Message,
        due: Option<Due>,
        /// Key that the message is to own. If it exists, the claim says what becomes of the operation.
        unless_key: Option<Box<Claim>>,
    },
    Put {
        key: Key,
        value: Value,
        ttl_ms: Option<u64>,
        /// Name of the group, which shares a size cap: for results, the task's name.
        group: String,
    },
    Delete {
        key: Key,
    },
    /// Fails the whole [`Tx`] unless the condition holds.
    Guard {
        key: Key,
        condition: Condition,
    },
    /// Keeps messages back until the members of a join have ended.
    Hold(Hold),
    /// Makes a workflow known by name: the broker counts its jobs and lists it. Its jobs name it in
    /// [`Extras::workflow`](crate::Extras). Ignored where the workflow is known already.
    Open(Open),
    /// Ends the coming of members to an unsealed join. Refused unless exactly the members `0..count` have come.
    Seal {
        join: JoinId,
        count: u32,
    },
    /// Reports one member to a join. Idempotent by `index`. A message that names its join needs none: it reports
    /// when it ends.
    Join {
        join: JoinId,
        index: u32,
        succeeded: bool,
    },
    /// Ends a run, and the job, for good: it raised for the last time. The message stays with the failed jobs. A
    /// guard, as `Ack` is.
    Fail {
        lease: Lease,
        /// Encoded error for any client that asks for the result; `None`: nobody may.
        value: Option<Bytes>,
        /// The same error for people who look into failed jobs; appended to the notes.
        note: Bytes,
        failure: Failure,
        cost_us: u64,
    },
    /// Ends jobs that do not run: waiting, delayed or held. `running` says what becomes of those that do.
    Cancel {
        target: Target,
        /// Reason for any client that waits for the result; at most [`Failure::TEXT_CAP_BYTES`].
        reason: String,
        running: OnRunning,
    },
    /// Puts failed jobs back into their queues, as their next generation.
    RetryFailed {
        target: Target,
        /// Queue to put them into; `None`: the queue that they came from, which one that failed under a broker of
        /// format 1 has lost.
        queue: Option<String>,
    },
    /// Forgets failed jobs.
    DropFailed {
        target: Target,
    },
    /// Changes a schedule.
    Schedule {
        schedule: ScheduleName,
        step: ScheduleStep,
    },
    /// Removes a schedule. Jobs that it has made stay.
    Unschedule {
        schedule: ScheduleName,
    },
    /// An operation of a newer protocol: refused as `NotOffered`.
    Unnamed,
    /// Ends all waiting messages of a queue, not leased ones; their results become `cancelled`.
    Purge {
        queue: String,
    },
    Pause {
        queue: String,
    },
    Resume {
        queue: String,
    },
    /// Sets how much may wait in a queue from now on; messages that wait already stay.
    Limit {
        queue: String,
        limits: QueueLimits,
    },
}

impl Op {
    /// Whether it ends a lease. The operations next to it in one [`Tx`] are the outcome of a run, which is
    /// never refused for want of room.
    pub fn is_settlement(&self) -> bool {
        matches!(
            self,
            Self::Ack { .. }
                | Self::Replace { .. }
                | Self::Release { .. }
                | Self::Move { .. }
                | Self::Fail { .. }
        )
    }
}

/// Key that a message is to own, for how long, and the choice between it and an owner that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub key: Key,
    pub until: Until,
    pub conflict: Conflict,
}

impl From<Key> for Box<Claim> {
    /// Claims a key as an application does: until the message has ended, and only where nobody has it.
    fn from(key: Key) -> Self {
        Self::new(Claim {
            key,
            until: Until::Ended,
            conflict: Conflict::Skip,
        })
    }
}

/// End of a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Until {
    /// The end of the message, also as a failed job. A person who retries that takes the key again, or is refused.
    #[default]
    Ended,
    /// The first time that the message is handed out. Retries do not take the key again.
    Started,
    /// A time after the publish, whatever becomes of the message.
    ForMs(u64),
}

/// Outcome of an operation whose key exists already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conflict {
    /// The operation is skipped, and the receipt says so and names the owner.
    #[default]
    Skip,
    /// The transaction is refused with [`Refusal::Claimed`].
    Refuse,
    /// The message takes the place of an owner that waits, which ends as replaced. Skipped where the owner does not wait.
    ///
    /// With `max_wait_ms`, no message that takes a place is due later than this time after the first one was published.
    Replace { max_wait_ms: Option<u64> },
}

/// Returns the place that goes by a job's id, which whatever replaces it names; `None` for the id of a join. The broker takes
/// it for the place that the job has. If it has none, no such join is open, and only the outcome is kept under the id.
pub fn place_of_heir(job: MessageId) -> Option<Member> {
    Some(Member {
        join: job.join_of(),
        index: job.index_in_join()?,
    })
}

/// Why a job failed for good. Failed jobs are listed, filtered and grouped by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failure {
    /// The error's type, such as `ValueError`; at most [`Failure::TEXT_CAP_BYTES`].
    pub class: String,
    /// Its first line; at most [`Failure::TEXT_CAP_BYTES`].
    pub message: String,
    /// Equal for errors of one type that were raised in one function of the user's own code.
    pub fingerprint: u64,
    /// The arguments, shortened and without secrets, for people; at most [`Failure::PREVIEW_CAP_BYTES`].
    pub preview: Bytes,
}

impl Failure {
    pub const TEXT_CAP_BYTES: usize = 200;
    pub const PREVIEW_CAP_BYTES: usize = 1024;
}

/// The jobs that an operation is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Job(MessageId),
    /// All jobs that match when the operation is accepted, and none that come later.
    Filter(Filter),
}

/// Treatment of running jobs by an [`Op::Cancel`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum OnRunning {
    /// Leaves them alone: for one job that runs the answer is `TooLate`.
    #[default]
    Leave = 0,
    /// Asks their workers to stop them. Such a job ends: as cancelled, unless it succeeds before it is stopped.
    Ask = 1,
    /// As `Ask`, and its worker need not be gentle: it kills the process at once.
    Kill = 2,
}

impl OnRunning {
    pub const ALL: [Self; 3] = [Self::Leave, Self::Ask, Self::Kill];
}

/// Selects jobs; a field that is `None` matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    pub queue: Option<String>,
    pub task: Option<String>,
    /// Workflow that the jobs belong to. For cancelling only.
    pub workflow: Option<MessageId>,
    /// Class of the failure. This field and all below match failed jobs only.
    pub class: Option<String>,
    pub fingerprint: Option<u64>,
    /// Earliest time of the failure.
    pub failed_from: Option<WallMs>,
    /// Time before which the job failed.
    pub failed_before: Option<WallMs>,
}

/// Id of a join. Drawn like a message id by the client that creates it.
pub type JoinId = MessageId;

/// A new join, and the messages that it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    pub join: JoinId,
    /// Number of members, at most [`JOIN_CAP`](crate::JOIN_CAP). A join without any succeeds at once, unless it is unsealed.
    pub count: u32,
    /// Held messages, each with its queue. [`Extras::when`](crate::Extras) says which outcome releases it.
    pub messages: Vec<(String, Message)>,
    pub policy: JoinPolicy,
    /// Outcomes that some of the members are to have, by ascending index; `Succeeded` for those that are not named. A
    /// member that was to fail and succeeds is as good as never needed, and so is all that waits for it.
    pub expects: Vec<(u32, JoinOutcome)>,
    /// Places of this join itself in others: it arrives there with its own outcome.
    pub then: Vec<Member>,
    /// Time for which the join's outcome is kept as a value; `None`: it has none. The value's key is the result of the
    /// first place in `then`, or of the join's own id.
    pub result_ttl_ms: Option<u64>,
    /// Members are still to come, until an [`Op::Seal`]; `None`: `count` says how many there are.
    pub unsealed: Option<Unsealed>,
}

/// A join whose members come in several transactions. It can't end before it is sealed. If its creator ends first, the
/// workflow is cancelled: no member waits for others that never come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsealed {
    /// Workflow that all of it belongs to.
    pub workflow: MessageId,
    /// Running job that creates it, if one does. The end of its lease is the end of the creator, as is the end of the
    /// session.
    pub creator: Option<MessageId>,
}

/// A workflow as people see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// Id of the job or the join whose outcome is the workflow's.
    pub workflow: MessageId,
    /// Name for people; at most [`Open::NAME_CAP_BYTES`].
    pub name: String,
    /// The steps, as clients draw them: the broker does not read it. At most [`Open::DESCRIPTION_CAP_BYTES`].
    pub description: Bytes,
    /// Time by which it must have ended.
    pub deadline: Option<Due>,
    /// Time for which it is listed after it has succeeded; `None`: 24 hours.
    pub kept_ms: Option<u64>,
    /// Job that has sent it.
    pub parent: Option<MessageId>,
}

impl Open {
    pub const NAME_CAP_BYTES: usize = 255;
    pub const DESCRIPTION_CAP_BYTES: usize = 16 << 10;
}

/// Number of failed members that a join puts up with. With one more it has failed: the messages that it holds are
/// blocked, that is kept like failed jobs, while their results read as [`ValueStatus::Upstream`](crate::ValueStatus).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JoinPolicy {
    #[default]
    AllSucceeded,
    UpTo(u32),
    /// The join succeeds once every member has ended, however it ended.
    AllEnded,
}

impl JoinPolicy {
    /// Returns the number of failed members up to which the join succeeds.
    pub fn max_failures(self) -> u32 {
        match self {
            Self::AllSucceeded => 0,
            Self::UpTo(failures) => failures,
            Self::AllEnded => u32::MAX,
        }
    }

    /// Returns the policy with this number.
    pub fn of_max_failures(failures: u32) -> Self {
        match failures {
            0 => Self::AllSucceeded,
            u32::MAX => Self::AllEnded,
            failures => Self::UpTo(failures),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Absent,
    Present,
    /// Present, with exactly this body.
    Is(Bytes),
}

/// When something is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Due {
    /// Time after the broker accepts it (a countdown, a TTL): follows the monotonic clock.
    AfterMs(u64),
    /// Time by the wall clock (an ETA): follows the clock on the wall.
    At(WallMs),
}

/// Changes that an [`Op::Move`] makes to the message's header; the body stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderPatch {
    /// Adds one to `attempt`.
    pub next_attempt: bool,
    /// Appended to `notes`.
    pub note: Option<Bytes>,
    pub expires_at: Option<Due>,
}

/// Promise behind a broker's confirm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Durability {
    /// Waits for nothing; lost if the broker dies within the next moments.
    None = 0,
    /// Written to the operating system: survives kill -9, not a power cut.
    Os = 1,
    /// Synced to disk.
    #[default]
    Disk = 2,
    /// Synced on more than one machine. No engine offers it yet.
    Replicated = 3,
}

impl Durability {
    /// Returns the name as users spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Os => "os",
            Self::Disk => "disk",
            Self::Replicated => "replicated",
        }
    }
}

/// Outcome of a [`Tx`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Receipt {
    Applied(Applied),
    /// This (session, sequence) was applied before, and was not applied again.
    Duplicate,
    /// Nothing was applied.
    Refused {
        op: u32,
        why: Refusal,
    },
    /// The broker no longer remembers the session: the [`Tx`] may have been applied before, and was not applied now.
    Unknown,
}

/// Details of a [`Tx`] that was applied; mostly empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Operations that were not applied, by index: the key of their claim existed.
    pub skipped: Vec<u32>,
    /// Owners of the keys of those operations, as (index, message); of a `ScheduleStep::Run` the job that it has made.
    pub owners: Vec<(u32, MessageId)>,
    /// State of the one job that the last operation was for, before it.
    pub found: Option<MessageState>,
    /// Id of the last bulk operation, for [`crate::Query::Operation`].
    pub operation: Option<u64>,
}

impl Applied {
    /// Whether all was applied, and there is nothing else to say.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

impl Receipt {
    /// Returns the receipt when all was applied, and there is nothing else to say.
    pub fn applied() -> Self {
        Self::Applied(Applied::default())
    }

    /// Returns the receipt when all but these operations were applied.
    pub fn skipped(skipped: Vec<u32>) -> Self {
        Self::Applied(Applied {
            skipped,
            ..Applied::default()
        })
    }
}

/// Why a [`Tx`] changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The lease was settled, handed back or fenced off; somebody else may run the message now.
    LeaseLost,
    /// A `Guard` did not hold.
    GuardFailed,
    /// Larger than a limit; the text names the limit and what was sent.
    TooLarge(String),
    /// A message with this id is held already.
    AlreadyExists,
    /// The queue is at its length or byte limit.
    QueueFull(String),
    /// The disk's outer reserve is reached; settlements still pass.
    DiskFull,
    /// The operation makes no sense; the text says why.
    Invalid(String),
    /// This broker does not know the operation, or does not offer it; the text says what to do.
    NotOffered(String),
    /// No such job is held.
    NoSuchJob,
    /// The job is past the point where this could be done to it.
    TooLate(MessageState),
    /// The key of a claim belongs to this message.
    Claimed(MessageId),
}
