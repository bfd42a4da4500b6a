use std::fmt;

use bytes::Bytes;

use crate::{MessageId, QueueLimits, WallMs};

/// What a client may ask a broker. Nothing of it changes what the broker holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    Status,
    /// What is known of a message that is held.
    Message(MessageId),
    /// End this broker. Only the process around a broker can do that, and only a local one does.
    Stop,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Status(Status),
    /// `None`: no such message is held.
    Message(Option<MessageInfo>),
    /// It ends now, in order.
    Stopping,
    /// The text says why, for people.
    Refused(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub queues: Vec<QueueStatus>,
    pub workers: Vec<WorkerStatus>,
    pub clients: u32,
    pub results: u64,
    pub results_bytes: u64,
    pub evicted: u64,
    /// Messages whose body could not be read back from the journal, since the process began.
    pub unreadable: u64,
    /// Of the process around the broker, which fills it in.
    pub process: ProcessStatus,
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
    /// Of the bodies of what is ready or delayed.
    pub waiting_bytes: u64,
    pub limits: QueueLimits,
    /// Since the broker started: transactions that were refused because this queue was full, and
    /// messages that were dropped from it to make room.
    pub refused: u64,
    pub dropped: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerStatus {
    pub name: String,
    pub queues: Vec<String>,
    pub slots: u32,
    pub busy: u32,
    pub leases: u32,
    /// It is connected; otherwise its leases are held back for it until its heartbeat ends.
    pub connected: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStatus {
    pub version: String,
    pub pid: u64,
    pub uptime_ms: u64,
    /// How long a sync of the journal takes, over the last thousands of them.
    pub sync_p50_us: u64,
    pub sync_p99_us: u64,
    pub journal_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageInfo {
    pub id: MessageId,
    pub task: String,
    pub queue: String,
    pub state: MessageState,
    pub enqueued_at: WallMs,
    /// When the present run was handed out.
    pub started_at: Option<WallMs>,
    pub due_at: Option<WallMs>,
    pub attempt: u32,
    pub crashes: u8,
    pub worker: Option<String>,
    pub notes: Vec<Bytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageState {
    Ready,
    Delayed,
    Running,
    /// Held until a join releases it.
    Held,
    Dead,
}

/// Something a person should know; sent to every connection and written to the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// `waiting` messages are in a queue that no worker has served for `for_ms`. Once a queue, until
    /// a worker has served it again.
    Unserved {
        queue: String,
        waiting: u64,
        for_ms: u64,
    },
    /// Results of this group are evicted before their time because the group is over its size cap.
    /// Once a group and process.
    Evicting { group: String, cap_bytes: u64 },
    /// A message has gone to the dead letters because its body can't be read back.
    Unreadable {
        id: MessageId,
        queue: String,
        reason: String,
    },
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
                "{waiting} jobs wait in queue {queue:?}, which no worker has served for {} s; start one with -Q {queue}",
                for_ms / 1000
            ),
            Self::Evicting { group, cap_bytes } => write!(
                out,
                "results of task {group:?} are evicted before their time, because they take more than {} MiB; \
                 shorten its result_ttl, or set store_result=False if nobody reads them",
                cap_bytes >> 20
            ),
            Self::Unreadable { id, queue, reason } => write!(
                out,
                "job {id} of queue {queue:?} went to the dead letters: {reason}. All else goes on; see what \
                 the disk has to say, and `penstock fsck`"
            ),
        }
    }
}
