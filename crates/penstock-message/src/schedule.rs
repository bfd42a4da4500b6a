use std::fmt;

use crate::{Message, MessageId, WallMs};

/// Name of a schedule: an app's own, so that two programs may both have a `nightly`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScheduleName {
    pub app: String,
    pub name: String,
}

impl ScheduleName {
    pub const CAP_BYTES: usize = 255;
}

impl fmt::Display for ScheduleName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?} of app {:?}", self.name, self.app)
    }
}

/// Rule by which a schedule's times follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rhythm {
    /// Five fields of cron, or `@daily` and its like.
    Cron(String),
    /// Interval in milliseconds, counted from the creation of the schedule.
    Every(u64),
    /// Once.
    At(WallMs),
}

/// Times of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleTiming {
    pub rhythm: Rhythm,
    /// IANA name of the time zone that cron's fields are in.
    pub zone: String,
    /// Maximum delay of each job after its time; the actual one depends on the schedule's name and the time.
    pub jitter_ms: u64,
}

/// Treatment of a time that comes while the job of an earlier one has not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Overlap {
    /// Makes no job for that time.
    #[default]
    Skip = 0,
    /// Makes the job once the earlier one has ended. At most one waits.
    Queue = 1,
    /// Cancels the earlier job, and makes the new one once that has ended.
    CancelPrevious = 2,
    /// Makes the job at once.
    Allow = 3,
}

impl Overlap {
    pub const ALL: [Self; 4] = [Self::Skip, Self::Queue, Self::CancelPrevious, Self::Allow];

    /// Returns the name as users spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Queue => "queue",
            Self::CancelPrevious => "cancel_previous",
            Self::Allow => "allow",
        }
    }
}

/// Treatment of times that came while no broker ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CatchUp {
    /// Makes one job, for the last of them, unless it is older than the window.
    #[default]
    Once = 0,
    /// Makes no job.
    Skip = 1,
    /// Makes a job for each of them within the window, up to [`CatchUp::CAP`].
    All = 2,
}

impl CatchUp {
    pub const ALL: [Self; 3] = [Self::Once, Self::Skip, Self::All];
    /// Maximum of jobs made after a pause of the broker.
    pub const CAP: usize = 100;

    /// Returns the name as users spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Once => "once",
            Self::Skip => "skip",
            Self::All => "all",
        }
    }
}

/// Job that a schedule makes, and its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulePlan {
    pub timing: ScheduleTiming,
    pub overlap: Overlap,
    pub catch_up: CatchUp,
    /// Maximum age of missed times that are caught up with.
    pub window_ms: u64,
    pub queue: String,
    /// Message of each job, without its id. Its extras are only an application's own.
    pub message: Message,
}

/// Times of a schedule and their policies: a whole [`SchedulePlan`] without its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleTimes {
    pub timing: ScheduleTiming,
    pub overlap: Overlap,
    pub catch_up: CatchUp,
    pub window_ms: u64,
    pub queue: String,
}

impl SchedulePlan {
    pub fn new(times: ScheduleTimes, message: Message) -> Self {
        let ScheduleTimes {
            timing,
            overlap,
            catch_up,
            window_ms,
            queue,
        } = times;
        Self {
            timing,
            overlap,
            catch_up,
            window_ms,
            queue,
            message,
        }
    }

    pub fn into_parts(self) -> (ScheduleTimes, Message) {
        let times = ScheduleTimes {
            timing: self.timing,
            overlap: self.overlap,
            catch_up: self.catch_up,
            window_ms: self.window_ms,
            queue: self.queue,
        };
        (times, self.message)
    }
}

/// The code that declares a schedule: of two that run at a time, as in a rolling deployment, the later one's holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppRelease {
    pub version: AppVersion,
    /// Start of the worker that declares it.
    pub started_at: WallMs,
}

/// Version of an app as its code names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AppVersion {
    #[default]
    Unnamed,
    Number(u64),
    Text(String),
}

impl AppRelease {
    /// Whether this one's declarations give way to those of the other.
    pub fn is_older_than(&self, other: &Self) -> bool {
        let by_version = match (&self.version, &other.version) {
            (AppVersion::Number(mine), AppVersion::Number(other)) => mine.cmp(other),
            (AppVersion::Text(mine), AppVersion::Text(other)) => mine.cmp(other),
            _ => std::cmp::Ordering::Equal,
        };
        by_version
            .then(self.started_at.cmp(&other.started_at))
            .is_lt()
    }
}

/// Change of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleStep {
    /// Declares the schedule, as code does.
    Declare(Box<SchedulePlan>, AppRelease),
    /// Sets the schedule, as a person or a running program does. Overrides declarations until a `Reset`.
    Set(Box<SchedulePlan>),
    /// Changes its times but not its jobs. Overrides declarations like `Set`.
    Retime(Box<ScheduleTimes>),
    Pause,
    Resume,
    /// Makes a job at once. The schedule's times are unaffected.
    Run,
    /// Removes overrides and resumes.
    Reset,
}

/// A page of schedules, by app and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulesQuery {
    pub app: Option<String>,
    pub name: Option<String>,
    /// Schedule after which to list: [`SchedulesPage::next`] of the previous page.
    pub after: Option<ScheduleName>,
    /// Number of coming times to list for each; at most [`SchedulesQuery::TIMES_CAP`].
    pub times: u32,
}

impl SchedulesQuery {
    pub const TIMES_CAP: u32 = 100;
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulesPage {
    pub schedules: Vec<ScheduleInfo>,
    /// Position to continue from, if there are more.
    pub next: Option<ScheduleName>,
}

/// A schedule as people see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleInfo {
    pub name: ScheduleName,
    pub timing: ScheduleTiming,
    pub overlap: Overlap,
    pub catch_up: CatchUp,
    pub window_ms: u64,
    pub queue: String,
    pub task: String,
    pub is_paused: bool,
    /// Whether a person or a program has set it, overriding declarations of code.
    pub is_set: bool,
    /// Whether code declares it.
    pub is_declared: bool,
    /// Reason why it has no times, if this broker can't read them.
    pub trouble: String,
    /// Coming times with their jitter, unless it is paused.
    pub next: Vec<WallMs>,
    /// Last time that had a job, and that job.
    pub last: Option<(WallMs, MessageId)>,
    /// Last time that had no job, and the reason.
    pub skipped: Option<(WallMs, Skipped)>,
    /// Whether the last job has not ended yet.
    pub is_running: bool,
    /// Whether the next job waits for the end of the last one.
    pub is_queued: bool,
    pub tally: ScheduleTally,
}

/// Reason why a time had no job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Skipped {
    /// The job of an earlier time had not ended.
    #[default]
    Overlap = 0,
    /// The queue was full.
    QueueFull = 1,
    /// No broker ran, or it had no space.
    Missed = 2,
}

impl Skipped {
    pub const ALL: [Self; 3] = [Self::Overlap, Self::QueueFull, Self::Missed];
}

/// Counts of a schedule's times so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScheduleTally {
    /// Times that had jobs.
    pub fired: u64,
    /// Times that had none because of an earlier job, or because the queue was full.
    pub skipped: u64,
    /// Times that passed while no broker ran, and were not caught up on.
    pub missed: u64,
}
