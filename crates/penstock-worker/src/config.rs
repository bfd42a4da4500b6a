use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use penstock_driver::{Driver, DriverError};

/// Connects to the broker of an app, given the URL that the app names, if it names one.
pub type Connect = Box<dyn FnOnce(Option<&str>) -> Result<Connected, DriverError>>;

/// A connection to a broker, under [`WorkerConfig::name`].
pub struct Connected {
    pub driver: Arc<dyn Driver>,
    /// Where the broker is, for the log.
    pub shown: String,
}

/// Settings of a worker, as `penstock worker` was given them.
pub struct WorkerConfig {
    /// Where each user's `App` is: `module:app`, or the `module` that has one.
    pub apps: Vec<String>,
    /// Modules with tasks of theirs, to be imported after the apps.
    pub modules: Vec<String>,
    /// The interpreter that has the app and `penstock` installed.
    pub python: PathBuf,
    /// Makes the connection to the broker once the app is loaded.
    pub connect: Option<Connect>,
    /// The broker that somebody named for this worker; for the app too, so that its tasks enqueue there. `None`: the
    /// app says where its broker is.
    pub url: Option<String>,
    /// Shown to people, in `status` and `job.info()`: [`worker_name`] unless somebody chose one.
    pub name: String,
    /// Where jobs run, at most one of each kind: see [`WorkerConfig::default_slot`]. In all at most [`MAX_PROCESSES`] and
    /// [`MAX_SLOTS`].
    pub pools: Vec<PoolConfig>,
    /// The kind of slot that runs tasks which name none.
    pub default_slot: SlotKind,
    /// How many jobs of each kind of slot may wait for others while their slots are lent. `None`: see [`SlotKind::max_parked`].
    pub max_parked: Option<u32>,
    /// `None`: every queue that the app's tasks name, and `default`.
    pub queues: Option<Vec<String>>,
    /// End once the queues are empty (see [`crate::run`]).
    pub burst: bool,
    /// How long running jobs may go on after SIGTERM or Ctrl-C before they are handed back.
    pub grace: Duration,
    pub recycle: RecycleConfig,
    /// How long a job may go on after it was stopped, by its limit or by people, before its process is ended.
    pub kill_grace: Duration,
    pub memory: MemoryConfig,
    /// Gives memory back to the system that the allocator of this program keeps: called when nothing has run for a while.
    pub give_back: fn(),
    /// How the processes that run jobs log, where the app does not set up logging itself.
    pub log: ChildLog,
}

/// When a process is replaced by another, between two jobs of its; `None`: never. Processes of single use are none of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecycleConfig {
    /// Number of jobs that it has run; it may run some more until another is there.
    pub max_jobs: Option<u64>,
    /// Time since its fork, up to a tenth more or less.
    pub max_age: Option<Duration>,
}

/// Rules about memory. Where the system does not tell what processes have, they are without effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Memory of its own that a process may keep when its jobs have ended, in bytes; with more it is replaced. `None`: any.
    pub max_per_child: Option<u64>,
    pub limit: MemoryLimit,
}

/// Memory of a worker, all of its processes together, from which on it starts no job that would need more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryLimit {
    /// 90 % of what the container may have; none outside of a container that has a limit.
    #[default]
    Usual,
    Bytes(u64),
    /// Share of the memory of the machine, or of the container.
    Percent(u8),
    None,
}

/// Slots of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    pub kind: SlotKind,
    pub processes: u32,
    /// In each process.
    pub slots: u32,
    /// Nobody asked for these: they are there for tasks that need them.
    pub on_demand: bool,
}

impl PoolConfig {
    /// Kinds and numbers of its slots in words, unless each is a process, as everybody expects.
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
    /// A process of its own.
    Process,
    /// A thread of a process that has several.
    Thread,
    /// A place on the event loop of a process.
    Async,
    /// A process for each job, which ends with it.
    Isolated,
}

impl SlotKind {
    /// In the word that `@app.task(slot=...)` takes.
    pub fn word(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Thread => "thread",
            Self::Async => "async",
            Self::Isolated => "isolated",
        }
    }

    /// How many jobs in slots of this kind may wait for others while their slots are lent, if nobody says otherwise. Each keeps what
    /// it has: a process its memory and connections, a thread its stack.
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

/// Form of the lines that the loggers of a child write to stderr. An app that configures logging has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChildLog {
    /// A level of Python's logging. `DEBUG` has a line for each job, `INFO` for retries and failures only.
    pub level: &'static str,
    /// A JSON object a line.
    pub json: bool,
}

/// More processes than this on one machine help nobody; run a second worker instead.
pub const MAX_PROCESSES: u32 = 4000;
/// As many slots of all kinds as a worker can have.
pub const MAX_SLOTS: u32 = 32_000;

/// As many packets as may be out at once: what a place in a packet can name.
pub(crate) const MAX_PLACES: u32 = 1 << 16;

/// The grace of a worker that was told none: within the 30 s that Kubernetes gives a pod.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(25);

/// The kill grace of a worker that was told none.
pub const DEFAULT_KILL_GRACE: Duration = Duration::from_secs(5);

/// `worker@host:pid`.
pub fn worker_name() -> String {
    let host = rustix::system::uname();
    format!(
        "worker@{}:{}",
        host.nodename().to_string_lossy(),
        std::process::id()
    )
}
