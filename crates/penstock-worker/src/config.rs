use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use penstock_driver::{Driver, DriverError};

/// Connects to an app's broker, given the URL that the app names, if any.
pub type Connect = Box<dyn FnOnce(Option<&str>) -> Result<Connected, DriverError>>;

/// Connection to a broker, under [`WorkerConfig::name`].
pub struct Connected {
    pub driver: Arc<dyn Driver>,
    /// Location of the broker, for the log.
    pub shown: String,
}

/// Settings of a worker, as given to `penstock worker`.
pub struct WorkerConfig {
    /// Location of each user's `App`: `module:app`, or a `module` with a single one.
    pub apps: Vec<String>,
    /// Modules with further tasks, imported after the apps.
    pub modules: Vec<String>,
    /// Interpreter that has the app and `penstock` installed.
    pub python: PathBuf,
    /// Creates the connection to the broker once the app is loaded.
    pub connect: Option<Connect>,
    /// URL of the broker that was given for this worker. The app uses it too, so that its tasks enqueue there.
    /// `None`: the app names its broker.
    pub url: Option<String>,
    /// Name for people, in `status` and `job.info()`; [`worker_name`] by default.
    pub name: String,
    /// Places to run jobs, at most one pool per kind: see [`WorkerConfig::default_slot`]. At most
    /// [`MAX_PROCESSES`] and [`MAX_SLOTS`] in total.
    pub pools: Vec<PoolConfig>,
    /// Kind of slot for tasks that name none.
    pub default_slot: SlotKind,
    /// Number of jobs per kind of slot that may wait for others while their slots are lent. `None`: see
    /// [`SlotKind::max_parked`].
    pub max_parked: Option<u32>,
    /// Queues to serve. `None`: `default` and every queue that the app's tasks name.
    pub queues: Option<Vec<String>>,
    /// Whether to stop once the queues are empty (see [`crate::run`]).
    pub burst: bool,
    /// Time that running jobs get after SIGTERM or Ctrl-C before they are handed back.
    pub grace: Duration,
    pub recycle: RecycleConfig,
    /// Time that a job gets after it was stopped, by its limit or by a person, before its process is killed.
    pub kill_grace: Duration,
    pub memory: MemoryConfig,
    /// Returns memory that this program's allocator keeps to the system. Called after a while without jobs.
    pub give_back: fn(),
    /// Log settings of the processes that run jobs, used if the app does not configure logging itself.
    pub log: ChildLog,
}

/// When to replace a process by another, between two of its jobs. `None`: never. Does not apply to processes
/// for a single job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecycleConfig {
    /// Number of jobs after which to replace it. It may run some more until its successor is ready.
    pub max_jobs: Option<u64>,
    /// Age at which to replace it, up to a tenth more or less.
    pub max_age: Option<Duration>,
}

/// Rules about memory. They have no effect on systems that don't report the memory of processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Bytes of its own memory that a process may keep once its jobs have ended; above this it is replaced.
    /// `None`: no limit.
    pub max_per_child: Option<u64>,
    pub limit: MemoryLimit,
}

/// Memory of all the worker's processes together above which it starts no job that would need more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryLimit {
    /// 90 % of the container's limit; none outside a container with a limit.
    #[default]
    Usual,
    Bytes(u64),
    /// Share of the machine's or the container's memory.
    Percent(u8),
    None,
}

/// Slots of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    pub kind: SlotKind,
    pub processes: u32,
    /// Number per process.
    pub slots: u32,
    /// Whether the pool was not requested, and only starts for tasks that need it.
    pub on_demand: bool,
}

impl PoolConfig {
    /// Describes the kinds and numbers of slots, unless each is a process, which is the normal case.
    pub fn in_words(self) -> Option<String> {
        let (slots, processes) = (self.slots, self.processes);
        match (self.kind, processes) {
            (SlotKind::Process, _) => None,
            (SlotKind::Isolated, _) => Some(format!("{processes} isolated")),
            (SlotKind::Thread, 1) => Some(format!("{slots} threads in a process")),
            (SlotKind::Async, 1) => Some(format!("{slots} on an event loop")),
            (SlotKind::Async, _) => Some(format!("{slots} on each of {processes} event loops")),
            (SlotKind::Thread, _) => {
                Some(format!("{slots} threads in each of {processes} processes"))
            }
        }
    }
}

/// Kind of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotKind {
    /// Separate process.
    Process,
    /// Thread of a process that has several.
    Thread,
    /// Task on the event loop of a process.
    Async,
    /// Process for a single job, which exits with the job.
    Isolated,
}

impl SlotKind {
    /// Returns the word that `@app.task(slot=...)` accepts.
    pub fn word(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Thread => "thread",
            Self::Async => "async",
            Self::Isolated => "isolated",
        }
    }

    /// Returns the default number of jobs in slots of this kind that may wait for others while their slots are
    /// lent. Each keeps its resources: a process its memory and connections, a thread its stack.
    pub fn max_parked(self, processes: u32) -> u32 {
        match self {
            Self::Process | Self::Isolated => 64 + 8 * processes,
            Self::Thread => 1024,
            Self::Async => u32::MAX,
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        let all = [Self::Process, Self::Thread, Self::Async, Self::Isolated];
        all.into_iter().find(|kind| kind.word() == word)
    }
}

/// Format of the lines that a child's loggers write to stderr. An app that configures logging uses its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChildLog {
    /// Level of Python's logging. `DEBUG` has a line for each job, `INFO` only for retries and failures.
    pub level: &'static str,
    /// Whether to write one JSON object per line.
    pub json: bool,
}

/// Maximum number of processes. More on one machine don't help; run a second worker instead.
pub const MAX_PROCESSES: u32 = 4000;
/// Maximum number of slots of all kinds.
pub const MAX_SLOTS: u32 = 32_000;

/// Maximum number of packets that are out at once, because a packet's place has this range.
pub(crate) const MAX_PLACES: u32 = 1 << 16;

/// Default grace period: within the 30 s that Kubernetes gives a pod.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(25);

/// Default kill grace.
pub const DEFAULT_KILL_GRACE: Duration = Duration::from_secs(5);

/// Returns `worker@host:pid`.
pub fn worker_name() -> String {
    let host = rustix::system::uname();
    format!(
        "worker@{}:{}",
        host.nodename().to_string_lossy(),
        std::process::id()
    )
}
