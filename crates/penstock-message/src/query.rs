use std::fmt;

use bytes::Bytes;

use crate::{
    AskQuery, Failure, Filter, MessageId, NoReply, QueueLimits, ScheduleName, SchedulesPage,
    SchedulesQuery, Space, ValueStatus, WallMs, WorkerState,
};

/// Query of a client to a broker. No query changes the state of the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// The status of the broker, with a page of its queues and workers.
    Status(StatusQuery),
    /// Details of a held message.
    Message(MessageId),
    /// A page of failed jobs.
    Failed(FailedQuery),
    /// Progress of a purge, or of another operation on many jobs.
    Operation(u64),
    /// A page of workflows, or one of them with the states of its steps.
    Workflows(WorkflowsQuery),
    Schedules(SchedulesQuery),
    /// Latest progress of a job.
    Progress(MessageId),
    /// A question to a worker, which the broker passes on.
    Ask(AskQuery),
    /// Query of a newer protocol: answered as refused.
    Unnamed,
    /// Stops this broker. Only the process around a broker can do that, and only a local one does.
    Stop,
    /// Moves the broker's clock forward. Only a double for tests lets clients do that.
    SetClock {
        forward_ms: u64,
        /// Whether to pass the times of schedules and delayed jobs one by one, and stop if there is a job to run, or
        /// after many. The answer states the new time.
        by_schedules: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Status(StatusPage),
    /// Details of a message; `None`: no such message is held.
    Message(Option<MessageInfo>),
    Failed(FailedPage),
    /// Status of an operation; `None`: there was none in the last ten minutes.
    Operation(Option<OperationStatus>),
    Workflows(WorkflowsPage),
    Schedules(SchedulesPage),
    /// Progress of a job; `None`: the job has reported none, or the broker no longer has it.
    Progress(Option<Bytes>),
    /// Reply of a worker, or the reason why there is none.
    Asked(Result<Bytes, NoReply>),
    /// The broker now stops cleanly.
    Stopping,
    /// Time by the broker's clock after the move.
    Clock(WallMs),
    /// Reason of a refusal, for people.
    Refused(String),
}

/// Query for one page: the answer must fit into a frame, however many queues there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusQuery {
    /// Queues to list, without workers; empty: all queues and workers.
    pub queues: Vec<String>,
    /// Cursor after which to list: [`StatusPage::next`] of the previous page.
    pub after: Option<StatusCursor>,
    /// Maximum of queues and workers to list; 0: the broker's own limit, 1,024.
    pub limit: u32,
}

impl StatusQuery {
    /// Queries these queues. One answer is enough: a worker serves at most as many queues as a page has.
    pub fn of_queues(queues: Vec<String>) -> Self {
        Self {
            queues,
            ..Self::default()
        }
    }

    /// Asks for the broker's own status, with only the first few queues and workers.
    pub fn first(limit: u32) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }
}

/// Position in the list: queues by name, then tasks by name, then workers in the broker's own order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatusCursor {
    Queue(String),
    Task(String),
    Worker(u64),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusPage {
    /// Queues, tasks and workers of this page. Everything else is of the whole broker.
    pub status: Status,
    /// Position to continue from; `None`: this is the last page.
    pub next: Option<StatusCursor>,
    /// Leases of the session that asks, including deliveries that have not reached it yet.
    pub own_leases: u32,
    /// Jobs that are ready in queues that are not paused, and that the consumers of the session that asks can run.
    pub own_ready: u64,
}

/// Failed jobs in the order in which they failed, or in reverse.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailedQuery {
    pub filter: Filter,
    /// Number after which to list: [`FailedPage::next`] of the previous page, in the same order. 0: from the first.
    pub after: u64,
    /// Maximum of jobs to list; 0: the broker's own limit, 1,000.
    pub limit: u32,
    /// Whether the last job to fail comes first.
    pub newest_first: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailedPage {
    pub jobs: Vec<FailedJob>,
    /// Position to continue from; `None`: this is the last page. A page may be empty without being the last: a query
    /// examines at most 10,000 jobs.
    pub next: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedJob {
    pub id: MessageId,
    pub task: String,
    /// Queue of the job; `None`: it failed under a broker of format 1, which did not keep that.
    pub queue: Option<String>,
    pub attempt: u32,
    pub crashes: u8,
    pub generation: u32,
    pub enqueued_at: WallMs,
    pub failed_at: WallMs,
    pub failure: Failure,
    /// Bytes of its arguments as they were sent.
    pub body_bytes: u64,
}

/// Query for workflows, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkflowsQuery {
    /// Only workflow to list, with its description.
    pub workflow: Option<MessageId>,
    pub state: Option<WorkflowState>,
    /// Name of the workflows.
    pub name: Option<String>,
    /// Id after which to list: [`WorkflowsPage::next`] of the previous page.
    pub after: Option<MessageId>,
    /// Maximum of workflows to list; 0: the broker's own limit, 1,000.
    pub limit: u32,
    /// Jobs and joins whose states to include; at most [`WorkflowsQuery::NODES_CAP`].
    pub nodes: Vec<MessageId>,
}

impl WorkflowsQuery {
    pub const NODES_CAP: usize = 1024;
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkflowsPage {
    pub workflows: Vec<WorkflowInfo>,
    /// Position to continue from; `None`: this is the last page. A page may be empty without being the last: a query
    /// examines at most 8,192 workflows.
    pub next: Option<MessageId>,
    /// States of the requested nodes, in their order.
    pub nodes: Vec<NodeState>,
    /// Tasks of the nodes that are jobs, in the same order. Empty where unknown; an older broker sends none at all.
    pub tasks: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkflowInfo {
    pub id: MessageId,
    pub name: String,
    /// Description of the steps; empty in a list.
    pub description: Bytes,
    pub state: WorkflowState,
    pub jobs: WorkflowCounts,
    pub opened_at: WallMs,
    /// Time at which the last of its jobs ended.
    pub ended_at: Option<WallMs>,
    pub deadline: Option<WallMs>,
    pub parent: Option<MessageId>,
}

/// Jobs of a workflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkflowCounts {
    /// Jobs that are ready, delayed, or held until others have ended.
    pub waiting: u64,
    /// Jobs that were handed out to workers.
    pub running: u64,
    pub succeeded: u64,
    /// Jobs that failed for good and were not retried.
    pub failed: u64,
    /// Jobs that were cancelled or purged, or have expired.
    pub cancelled: u64,
    /// Jobs that wait for one that has failed.
    pub blocked: u64,
}

/// Outcome of a workflow: that of the step whose result it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum WorkflowState {
    /// The workflow has no outcome yet.
    #[default]
    Running = 0,
    Succeeded = 1,
    Failed = 2,
    Cancelled = 3,
    Expired = 4,
}

impl WorkflowState {
    pub const ALL: [Self; 5] = [
        Self::Running,
        Self::Succeeded,
        Self::Failed,
        Self::Cancelled,
        Self::Expired,
    ];

    /// Returns the name as users spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
        }
    }
}

/// State of a job or a join that is a step of a workflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeState {
    /// Unknown: the step has ended and left no value.
    #[default]
    Gone,
    /// Job that has not ended, or is kept as a failed one.
    Job(MessageState),
    /// Step whose value is kept.
    Ended(ValueStatus),
    Join {
        members: u32,
        /// Number of members that have ended, failed ones included.
        ended: u32,
        failed: u32,
        state: WorkflowState,
    },
}

/// An operation on many jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationStatus {
    /// Jobs examined so far that match.
    pub matched: u64,
    /// Matching jobs for which the operation is done.
    pub done: u64,
    /// Running jobs that were asked to stop.
    pub asked: u64,
    /// Matching jobs that were left alone: they run, or their unique key is another job's by now.
    pub spared: u64,
    pub is_over: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub queues: Vec<QueueStatus>,
    pub tasks: Vec<TaskStatus>,
    pub workers: Vec<WorkerStatus>,
    /// Counts of queues and tasks that are no longer listed.
    pub others: Box<Others>,
    /// Number of connected workers, listed or not.
    pub connected_workers: u32,
    pub clients: u32,
    pub results: u64,
    pub results_bytes: u64,
    pub evicted: u64,
    /// Messages whose body could not be read back from the journal, since the process began.
    pub unreadable: u64,
    /// Failed jobs, their bytes in the journal, and the number dropped to keep within limits or for lack of space,
    /// including jobs that failed groups had blocked.
    pub failed: u64,
    pub failed_bytes: u64,
    pub failed_dropped: u64,
    pub counts: Box<BrokerCounts>,
    pub space: Space,
    pub memory_is_full: bool,
    /// Figures of the process around the broker, which fills them in. Boxed, since few answers are a status.
    pub process: Box<ProcessStatus>,
}

impl Status {
    /// Collects the status from its pages, and sorts workers by name. Queues and workers that come or go in between may
    /// be missing; all others occur once.
    pub fn collect<E>(
        mut ask: impl FnMut(StatusQuery) -> Result<StatusPage, E>,
    ) -> Result<Self, E> {
        let (mut queues, mut tasks, mut workers) = (Vec::new(), Vec::new(), Vec::new());
        let mut after = None;
        loop {
            let page = ask(StatusQuery {
                after,
                ..StatusQuery::default()
            })?;
            let mut status = page.status;
            queues.append(&mut status.queues);
            tasks.append(&mut status.tasks);
            workers.append(&mut status.workers);
            after = page.next;
            if after.is_none() {
                workers.sort_by(|one, other| one.name.cmp(&other.name));
                return Ok(Self {
                    queues,
                    tasks,
                    workers,
                    ..status
                });
            }
        }
    }
}

/// Counts of a broker since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BrokerCounts {
    /// Messages that were accepted, handed out, acknowledged, expired, and dropped from full queues.
    pub published: u64,
    pub delivered: u64,
    pub settled: u64,
    pub expired: u64,
    pub dropped: u64,
    /// Transactions that changed nothing.
    pub refused: u64,
    /// Jobs that failed for good, and jobs that were purged, cancelled, or blocked by a failure.
    pub failed: u64,
    pub cancelled: u64,
}

/// Counts of the jobs of a queue or of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobCounts {
    /// Jobs that were published to it, or moved to it from another queue.
    pub enqueued: u64,
    /// Runs: hand-outs to workers. A job that is retried is started again.
    pub started: u64,
    pub succeeded: u64,
    /// Jobs that failed for good.
    pub failed: u64,
    /// Jobs that got another attempt after a failed one, automatically or by a person.
    pub retried: u64,
    pub expired: u64,
    /// Jobs that were cancelled or purged, or blocked by the failure of another.
    pub cancelled: u64,
    /// Runs that ended with the death of their worker.
    pub crashed: u64,
    /// Jobs that were dropped from a full queue.
    pub dropped: u64,
}

impl JobCounts {
    /// Number of counts.
    pub const LEN: usize = 9;

    /// Reads the counts in the order of the fields.
    pub fn from_array(counts: [u64; Self::LEN]) -> Self {
        let [
            enqueued,
            started,
            succeeded,
            failed,
            retried,
            expired,
            cancelled,
            crashed,
            dropped,
        ] = counts;
        Self {
            enqueued,
            started,
            succeeded,
            failed,
            retried,
            expired,
            cancelled,
            crashed,
            dropped,
        }
    }
}

/// Jobs of a queue or a task since the broker started, and over the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tallied {
    pub counts: JobCounts,
    /// Counts of the last minute; divided by 60 they are rates per second. Accurate to about ten seconds: the ten
    /// seconds that only partly belong to the last minute are counted in proportion.
    pub last_minute: JobCounts,
}

/// Queues and tasks that were empty and had no settings for an hour: only their counts are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// Number of times that a queue was dropped, and a task.
    pub queues: u64,
    pub tasks: u64,
    pub of_queues: JobCounts,
    pub of_tasks: JobCounts,
    /// Transactions that such queues had refused because they were full.
    pub refused: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskStatus {
    pub name: String,
    pub tallied: Tallied,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStatus {
    pub name: String,
    pub ready: u64,
    pub delayed: u64,
    pub running: u64,
    pub oldest_ready_ms: u64,
    pub paused: bool,
    pub consumers: u32,
    /// Total body bytes of ready and delayed messages.
    pub waiting_bytes: u64,
    pub limits: QueueLimits,
    /// Transactions refused because this queue was full, and messages dropped from it to make room, since the broker
    /// started.
    pub refused: u64,
    pub dropped: u64,
    /// Jobs that were purged and are still being ended.
    pub ending: u64,
    /// Jobs of this queue that failed for good.
    pub failed: u64,
    /// Ready jobs of tasks that none of the queue's consumers can run. 0 while it has no consumers.
    pub unknown: u64,
    pub tallied: Tallied,
    /// Share of the time in which consumers were ready to take a job at once, like RabbitMQ's consumer capacity, in
    /// thousandths: a moving average over about 10 seconds. `None`: the queue has no consumers.
    pub capacity_permille: Option<u16>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerStatus {
    pub name: String,
    pub queues: Vec<String>,
    pub slots: u32,
    pub busy: u32,
    /// Number of jobs that wait for others while their slots are lent.
    pub parked: u32,
    pub leases: u32,
    /// Whether the worker is connected; otherwise its leases are kept for it until its heartbeat ends.
    pub connected: bool,
    pub state: WorkerState,
    /// Jobs that the worker has held longest, oldest first: at most 64. A worker fetches short jobs ahead, so the last
    /// ones may not have started yet.
    pub running: Vec<RunningJob>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningJob {
    pub id: MessageId,
    pub task: String,
    pub queue: String,
    pub started_at: WallMs,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStatus {
    pub version: String,
    pub pid: u64,
    pub uptime_ms: u64,
    /// Duration of a sync of the journal, over the last thousands of them.
    pub sync_p50_us: u64,
    pub sync_p99_us: u64,
    pub journal_bytes: u64,
    /// Records that are decided but not on disk yet.
    pub unsynced_records: u64,
    pub unsynced_bytes: u64,
    /// Average size of a write.
    pub batch_records: u64,
    pub batch_bytes: u64,
    /// Bytes of the journal that are no longer needed.
    pub reclaim_debt_bytes: u64,
    /// Segments kept ready for a full disk.
    pub reserves: u64,
    /// Memory of the process, and the limit above which it accepts no new work; 0: there is none.
    pub memory_bytes: u64,
    pub memory_limit_bytes: u64,
    /// Connections that receive more slowly than the broker sends.
    pub full_connections: u64,
    /// Transactions that wait for space on the disk.
    pub blocked: u64,
    /// CPU time of the loop for each transaction and delivery, on average.
    pub cost_ns: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageInfo {
    pub id: MessageId,
    pub task: String,
    pub queue: String,
    pub state: MessageState,
    pub enqueued_at: WallMs,
    /// Time at which the current run was handed out.
    pub started_at: Option<WallMs>,
    pub due_at: Option<WallMs>,
    pub attempt: u32,
    pub crashes: u8,
    pub worker: Option<String>,
    pub notes: Vec<Bytes>,
    pub generation: u32,
    /// Time and reason of the failure of a failed job.
    pub failed: Option<Box<(WallMs, Failure)>>,
    pub headers: Vec<(String, Bytes)>,
    /// Whether it is ready, but none of its queue's consumers can run its task.
    pub task_unknown: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageState {
    Ready,
    Delayed,
    Running,
    /// Held until a join releases it.
    Held,
    /// Failed for good, and kept for people to look into, retry or drop.
    Failed,
    /// Held by a join that has failed.
    Blocked,
    /// Running, and asked to stop. Reserved.
    Cancelling,
    /// Running, and waiting for other jobs. Reserved.
    Parked,
}

/// Event that a person should know about; sent to every connection and written to the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// No worker has served a queue with `waiting` messages for `for_ms`. Sent once per queue, until a worker has
    /// served it again.
    Unserved {
        queue: String,
        waiting: u64,
        for_ms: u64,
    },
    /// A queue has `waiting` jobs of this task, and of `others` more tasks, that none of its workers know. Sent once
    /// per task and queue, until a worker knows the task.
    UnknownTask {
        queue: String,
        task: String,
        others: u64,
        waiting: u64,
    },
    /// Workers of two apps have this task, and `others` more, and take from one queue: each runs jobs that were meant
    /// for the other. Sent whenever the first such worker of an app connects.
    SharedTask {
        queue: String,
        task: String,
        others: u64,
        app: String,
        other_app: String,
    },
    /// Results of this group are evicted early because the group exceeds its size cap, or because disk space is short.
    /// Sent once per group and process.
    Evicting { group: String, cap_bytes: u64 },
    /// The space on the disk has changed level.
    Space(Space),
    /// The broker has reached its memory limit, or has room again.
    Memory { is_full: bool, limit_bytes: u64 },
    /// The oldest failed jobs, and jobs that failed groups have blocked, are dropped because more exist than are kept,
    /// or because disk space is short. Sent once per process.
    FailedDropped { kept: u64, kept_bytes: u64 },
    /// The last job of a schedule has run ten times as long as its runs do in the median. Sent once per job.
    Hung {
        schedule: ScheduleName,
        job: MessageId,
        for_ms: u64,
        median_ms: u64,
    },
    /// A job has failed because its body can't be read back.
    Unreadable {
        id: MessageId,
        queue: String,
        reason: String,
    },
}

fn jobs_wait(count: &u64) -> String {
    match count {
        1 => "1 job waits".to_owned(),
        _ => format!("{count} jobs wait"),
    }
}

/// Writes a time in seconds, with a tenth below ten.
fn seconds(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{}.{} s", ms / 1000, ms / 100 % 10),
        _ => format!("{} s", ms / 1000),
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unserved {
                queue,
                waiting,
                for_ms,
            } => write!(
                out,
                "{} in queue {queue:?}, which no worker has served for {} s; start one with -Q {queue}",
                jobs_wait(waiting),
                for_ms / 1000
            ),
            Self::UnknownTask {
                queue,
                task,
                others,
                waiting,
            } => {
                let (others, them) = match others {
                    0 => (String::new(), "it"),
                    1 => (" or 1 other task".to_owned(), "them"),
                    _ => (format!(" or {others} other tasks"), "them"),
                };
                write!(
                    out,
                    "no worker of queue {queue:?} has the task {task:?}{others}: {}; start a worker whose app has {them}, \
                     or deploy {them}",
                    jobs_wait(waiting)
                )
            }
            Self::SharedTask {
                queue,
                task,
                others,
                app,
                other_app,
            } => {
                let others = match others {
                    0 => String::new(),
                    1 => " and 1 other task".to_owned(),
                    _ => format!(" and {others} other tasks"),
                };
                write!(
                    out,
                    "the apps {app:?} and {other_app:?} both have the task {task:?}{others} in queue {queue:?}, so \
                     each may run the other's jobs; rename the task in one of them, give them separate queues, or, if \
                     they are the same app, give them the same name"
                )
            }
            Self::Space(space) => out.write_str(match space {
                Space::Plenty => "the broker's disk has room again: everything continues",
                Space::NoPublishes => {
                    "the broker's disk is nearly full: it accepts no new jobs until there is space; workers continue; \
                     drain the queues or free some space on its machine"
                }
                Space::NoLeases => {
                    "the broker's disk is full: it accepts no new jobs, and starts only a few at a time until there \
                     is space; running jobs can still end; nothing is lost; free some space on its machine"
                }
                Space::NoSettlements => {
                    "the broker's disk is full, including its last reserve: outcomes of jobs wait until there is \
                     space; nothing is lost; free some space on its machine"
                }
            }),
            Self::Memory {
                is_full: true,
                limit_bytes,
            } => write!(
                out,
                "the broker has reached its memory limit of {} MiB: it accepts no new jobs until workers have made \
                 room",
                limit_bytes >> 20
            ),
            Self::Memory { is_full: false, .. } => {
                out.write_str("the broker is below its memory limit again: it accepts new jobs")
            }
            Self::Evicting { group, cap_bytes } => write!(
                out,
                "results of task {group:?} are evicted before they expire, because they take more than {} MiB or \
                 the disk is short of space; shorten its result_ttl, or set store_result=False if nobody reads them",
                cap_bytes >> 20
            ),
            Self::FailedDropped { kept, kept_bytes } => write!(
                out,
                "the oldest failed jobs, and jobs that failed groups have blocked, are dropped: at most {kept} of \
                 them and {} MiB are kept, and fewer while the disk is short of space; no other waiting or running \
                 job is \
                 lost",
                kept_bytes >> 20
            ),
            Self::Hung {
                schedule,
                job,
                for_ms,
                median_ms,
            } => write!(
                out,
                "job {job} of schedule {:?} has not ended for {}, and half of its runs take less than {}: if it hangs, \
                 `penstock job cancel {job} --running kill` ends it, and a `timeout` on its task does so automatically",
                schedule.name,
                seconds(*for_ms),
                seconds(*median_ms)
            ),
            Self::Unreadable { id, queue, reason } => write!(
                out,
                "job {id} of queue {queue:?} failed: {reason}. All other jobs continue; check the disk, and run \
                 `penstock journal check`"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_counts_the_other_tasks() {
        let check = |others, expected: &str| {
            let notice = Notice::UnknownTask {
                queue: "mail".to_owned(),
                task: "shop.greet".to_owned(),
                others,
                waiting: 5,
            };
            let text = notice.to_string();
            assert!(text.contains(expected), "{text}");
        };
        check(0, "has the task \"shop.greet\": 5 jobs wait");
        check(
            1,
            "has the task \"shop.greet\" or 1 other task: 5 jobs wait",
        );
        check(
            2,
            "has the task \"shop.greet\" or 2 other tasks: 5 jobs wait",
        );
    }
}
