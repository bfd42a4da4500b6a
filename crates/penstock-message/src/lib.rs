//! The nouns that every part of Penstock shares. Data only: nothing here decides, stores or sends.
//!
//! A *message* is what a broker holds; a job travels in one. Everything that changes a broker's
//! state is a [`Tx`]: operations that are applied all together or not at all.

mod ask;
mod capabilities;
mod consumer;
mod hashing;
mod id;
mod input_values;
mod lease;
mod limits;
mod message;
mod query;
mod schedule;
mod tx;
mod value;
mod waits;

pub use ask::{Ask, AskQuery, NoReply, WorkerReport, WorkerState};
pub use capabilities::{
    Capabilities, Dedupe, Feature, Features, LeaseLife, LimitSupport, NotOffered, Priorities,
    Remark, Settlement,
};
pub use consumer::{Consume, TaskSelection};
pub use hashing::{SeededHasher, SeededMap, SeededSet, SeededState};
pub use id::{IdSource, JOIN_CAP, MessageId, SessionId};
pub use input_values::{
    BadInputValues, InputValue, InputValues, UPSTREAM_IDS, gathered, read_gathered,
};
pub use lease::{CancelOrder, Delivery, Lease, Progress, ReleaseReason};
pub use limits::{Overflow, QueueLimits, Space};
pub use message::{
    DEFAULT_PRIORITY, Extras, HIGHEST_PRIORITY, InputShape, Inputs, JoinOutcome, Member, Message,
    ReleaseTimes, Retries,
};
pub use query::{
    Answer, BrokerCounts, FailedJob, FailedPage, FailedQuery, JobCounts, MessageInfo, MessageState,
    NodeState, Notice, OperationStatus, Others, ProcessStatus, Query, QueueStatus, RunningJob,
    Status, StatusCursor, StatusPage, StatusQuery, Tallied, TaskStatus, WorkerStatus,
    WorkflowCounts, WorkflowInfo, WorkflowState, WorkflowsPage, WorkflowsQuery,
};
pub use schedule::{
    AppRelease, AppVersion, CatchUp, Overlap, Rhythm, ScheduleInfo, ScheduleName, SchedulePlan,
    ScheduleStep, ScheduleTally, ScheduleTimes, ScheduleTiming, SchedulesPage, SchedulesQuery,
    Skipped,
};
pub use tx::{
    Applied, Claim, Condition, Conflict, Due, Durability, Failure, Filter, HeaderPatch, Hold,
    JoinId, JoinPolicy, OnRunning, Op, Open, Receipt, Refusal, Target, Tx, Unsealed, Until,
    place_of_heir,
};
pub use value::{Key, KeyState, ProducingRun, Scope, Value, ValueStatus};
pub use waits::{RefusedWait, WaitRefusal, WaitingJob};

/// Milliseconds since the Unix epoch, by the broker's clock.
pub type WallMs = u64;
