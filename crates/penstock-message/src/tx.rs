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
    /// Ends the message after its delivery. A guard: a lost lease fails the whole [`Tx`].
    Ack {
        lease: Lease,
        cost_us: u64,
    },
    /// Ends the run but not the job: another step takes over its place, its id and everything that waits for it. A
    /// guard, like `Ack`.
    ///
    /// Exactly one later operation of the [`Tx`] supplies that step's end. It is a message with this id, published or
    /// held, which gets the job's own [`Extras::member`](crate::Extras) and keeps its result as the job would have. Or
    /// it is a [`Hold`] with [`place_of_heir`] among its places. If the job or its workflow was cancelled, the job ends
    /// that way, and none of the other operations is applied.
    Replace {
        lease: Lease,
        cost_us: u64,
    },
    /// Adds a member to the group of a job that this transaction settles, by [`Op::Ack`] or [`Op::Replace`]. Such
    /// operations come before all others, and all of them are for the same job.
    ///
    /// Exactly one later operation supplies the member, under an id that is drawn for it as for any job. It is a message
    /// with this id, published or held, or a [`Hold`] with [`place_of_heir`] among its places. The broker gives it the
    /// next index of the group, and the id that follows from the index. If the group can no longer be joined, because
    /// it or its workflow is over, the operations that supply the member are skipped, and all others are applied.
    Grow {
        /// Member of the group that runs; a job that was published to one queue.
        job: MessageId,
        member: MessageId,
        /// Whether the job is the only member of a join that wraps it, and the group is the join in which that one has
        /// its only place.
        outer: bool,
    },
    /// Hands the delivery back. A guard, like `Ack`.
    Release {
        lease: Lease,
        reason: ReleaseReason,
    },
    /// Assigns a new place to the same message, with the same body: for a retry, for example. A guard, like `Ack`.
    Move {
        lease: Lease,
        /// Target queue; `None`: the queue it came from.
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
        /// Key that the message will own. If the key exists, the claim decides about the operation.
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
    /// Holds messages back until the members of a join have ended.
    Hold(Hold),
    /// Makes a workflow known by name: the broker counts its jobs and lists it. Its jobs name it in
    /// [`Extras::workflow`](crate::Extras). Ignored if the workflow is known already.
    Open(Open),
    /// Completes the members of an unsealed join. Refused unless exactly the members `0..count` have come.
    Seal {
        join: JoinId,
        count: u32,
    },
    /// Reports one member to a join. Idempotent by `index`. Not needed for a message that names its join: it reports
    /// when it ends.
    Join {
        join: JoinId,
        index: u32,
        succeeded: bool,
    },
    /// Ends a run, and the job, for good: it raised in its last attempt. The message stays among the failed jobs. A
    /// guard, like `Ack`.
    Fail {
        lease: Lease,
        /// Encoded error for any client that asks for the result; `None`: no client may.
        value: Option<Bytes>,
        /// The same error for people who look into failed jobs; appended to the notes.
        note: Bytes,
        failure: Failure,
        cost_us: u64,
    },
    /// Ends jobs that do not run: waiting, delayed or held. `running` decides about running ones.
    Cancel {
        target: Target,
        /// Reason for any client that waits for the result; at most [`Failure::TEXT_CAP_BYTES`].
        reason: String,
        running: OnRunning,
    },
    /// Puts failed jobs back into their queues, as their next generation.
    RetryFailed {
        target: Target,
        /// Target queue; `None`: the queue that they came from, which is unknown for a job that failed under a broker
        /// of format 1.
        queue: Option<String>,
    },
    /// Drops failed jobs.
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
    /// Operation of a newer protocol: refused as `NotOffered`.
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
    /// Sets how much may wait in a queue from now on; waiting messages stay.
    Limit {
        queue: String,
        limits: QueueLimits,
    },
}

impl Op {
    /// Whether it ends a lease. The operations next to it in one [`Tx`] are the outcome of a run, which is never
    /// refused for lack of room.
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

/// Key that a message will own, for how long, and the choice between it and an existing owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub key: Key,
    pub until: Until,
    pub conflict: Conflict,
}

impl From<Key> for Box<Claim> {
    /// Claims a key for an application: until the message has ended, and only if the key has no owner.
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
    /// The end of the message, also as a failed job. A person who retries that job takes the key again, or is refused.
    #[default]
    Ended,
    /// The first time that the message is handed out. Retries do not take the key again.
    Started,
    /// Fixed time after the publish, whatever happens to the message.
    ForMs(u64),
}

/// Treatment of an operation whose key already exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conflict {
    /// Skips the operation; the receipt names it and the owner.
    #[default]
    Skip,
    /// Refuses the transaction with [`Refusal::Claimed`].
    Refuse,
    /// Gives the message the place of a waiting owner, which ends as replaced. Skips the operation if the owner does
    /// not wait.
    ///
    /// With `max_wait_ms`, a message that replaces another is due at most this long after the first one was published.
    Replace { max_wait_ms: Option<u64> },
}

/// Returns the place that belongs to a job's id, for a step that replaces the job; `None` for the id of a join. The
/// broker substitutes the job's actual place. If the job has none, no such join is open, and only the outcome is kept
/// under the id.
pub fn place_of_heir(job: MessageId) -> Option<Member> {
    Some(Member {
        join: job.join_of(),
        index: job.index_in_join()?,
    })
}

/// Reason why a job failed for good. Failed jobs are listed, filtered and grouped by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failure {
    /// The error's type, such as `ValueError`; at most [`Failure::TEXT_CAP_BYTES`].
    pub class: String,
    /// First line of the error; at most [`Failure::TEXT_CAP_BYTES`].
    pub message: String,
    /// Hash that is equal for errors of one type that were raised in one function of the user's own code.
    pub fingerprint: u64,
    /// Arguments, shortened and without secrets, for people; at most [`Failure::PREVIEW_CAP_BYTES`].
    pub preview: Bytes,
}

impl Failure {
    pub const TEXT_CAP_BYTES: usize = 200;
    pub const PREVIEW_CAP_BYTES: usize = 1024;
}

/// Jobs that an operation is for.
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
    /// Leaves them alone: for a single running job the answer is `TooLate`.
    #[default]
    Leave = 0,
    /// Asks their workers to stop them. Such a job ends as cancelled, unless it succeeds before it is stopped.
    Ask = 1,
    /// Like `Ask`, but its worker kills the process at once.
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

/// New join, and the messages that it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    pub join: JoinId,
    /// Number of members, at most [`JOIN_CAP`](crate::JOIN_CAP). A join without any succeeds at once, unless it is unsealed.
    pub count: u32,
    /// Held messages, each with its queue. [`Extras::when`](crate::Extras) determines which outcome releases it.
    pub messages: Vec<(String, Message)>,
    pub policy: JoinPolicy,
    /// Expected outcomes of some members, by ascending index; `Succeeded` for all others. A member that was expected to
    /// fail but succeeds counts as not needed, and so does everything that waits for it.
    pub expects: Vec<(u32, JoinOutcome)>,
    /// Places of this join itself in others: it arrives there with its own outcome.
    pub then: Vec<Member>,
    /// Time for which the join's outcome is kept as a value; `None`: it has none. The value's key is the result of the
    /// first place in `then`, or of the join's own id.
    pub result_ttl_ms: Option<u64>,
    /// Set while members are still to come, until an [`Op::Seal`]; `None`: `count` is their number.
    pub unsealed: Option<Unsealed>,
}

/// Join whose members come in several transactions. It can't end before it is sealed. If its creator ends first, the
/// workflow is cancelled, so that no member waits for others that never come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsealed {
    /// Workflow that the whole join belongs to.
    pub workflow: MessageId,
    /// Running job that creates it, if any. The creator ends with the job's lease or with the session.
    pub creator: Option<MessageId>,
}

/// Workflow as people see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// Id of the job or the join whose outcome is the workflow's.
    pub workflow: MessageId,
    /// Name for people; at most [`Open::NAME_CAP_BYTES`].
    pub name: String,
    /// Steps as clients draw them; the broker does not read them. At most [`Open::DESCRIPTION_CAP_BYTES`].
    pub description: Bytes,
    /// Time by which the workflow must have ended.
    pub deadline: Option<Due>,
    /// Time for which it is listed after it has succeeded; `None`: 24 hours.
    pub kept_ms: Option<u64>,
    /// Job that sent it.
    pub parent: Option<MessageId>,
}

impl Open {
    pub const NAME_CAP_BYTES: usize = 255;
    pub const DESCRIPTION_CAP_BYTES: usize = 16 << 10;
}

/// Number of failed members that a join tolerates. With one more it fails. Its held messages are then blocked: they are
/// kept like failed jobs, while their results read as [`ValueStatus::Upstream`](crate::ValueStatus).
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

    /// Returns the policy for this number of failures.
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

/// Time at which something is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Due {
    /// Time after the broker accepts it (a countdown, a TTL): follows the monotonic clock.
    AfterMs(u64),
    /// Time by the wall clock (an ETA): follows changes of that clock.
    At(WallMs),
}

/// Changes that an [`Op::Move`] makes to the message's header; the body stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderPatch {
    /// Adds one to `attempt`.
    pub next_attempt: bool,
    /// Text to append to `notes`.
    pub note: Option<Bytes>,
    pub expires_at: Option<Due>,
}

/// Promise behind a broker's confirm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Durability {
    /// Waits for nothing; lost if the broker dies shortly afterwards.
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
    /// The transaction was applied before, and was not applied again.
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
    /// Owners of the keys of those operations, as (index, message); for a `ScheduleStep::Run` the job that it has made.
    pub owners: Vec<(u32, MessageId)>,
    /// Earlier state of the one job that the last operation was for.
    pub found: Option<MessageState>,
    /// Id of the last bulk operation, for [`crate::Query::Operation`].
    pub operation: Option<u64>,
}

impl Applied {
    /// Whether everything was applied and there are no details.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

impl Receipt {
    /// Returns the receipt for a transaction that was applied without details.
    pub fn applied() -> Self {
        Self::Applied(Applied::default())
    }

    /// Returns the receipt for a transaction of which all but these operations were applied.
    pub fn skipped(skipped: Vec<u32>) -> Self {
        Self::Applied(Applied {
            skipped,
            ..Applied::default()
        })
    }
}

/// Reason why a [`Tx`] changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The lease was settled, handed back or fenced off; another worker may run the message now.
    LeaseLost,
    /// A `Guard` did not hold.
    GuardFailed,
    /// The transaction exceeds a limit; the text names the limit and the size.
    TooLarge(String),
    /// A message with this id is held already.
    AlreadyExists,
    /// The queue is at its length or byte limit.
    QueueFull(String),
    /// The disk's outer reserve is reached; settlements are still accepted.
    DiskFull,
    /// The operation makes no sense; the text says why.
    Invalid(String),
    /// This broker does not know the operation, or does not offer it; the text says what to do.
    NotOffered(String),
    /// No such job is held.
    NoSuchJob,
    /// The job is past the point where this was possible.
    TooLate(MessageState),
    /// The key of a claim belongs to this message.
    Claimed(MessageId),
}
