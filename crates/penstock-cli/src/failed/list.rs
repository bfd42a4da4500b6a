//! Implements `failed ls`: lists failed jobs one by one, or grouped by error.

use std::collections::{BTreeSet, HashMap, VecDeque};

use clap::Args;
use penstock_message::{FailedJob, FailedQuery, Failure as Reason, Filter, StatusQuery};
use serde_json::{Value, json};

use super::{FilterArguments, failed_page, for_each};
use crate::exit::CommandError;
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{TextTable, bytes, count, shortened, show, show_json};
use crate::times::{ago, now_ms};

/// Number of jobs that a person is shown by default.
const SHOWN: usize = 50;
const ERROR_WIDTH: usize = 60;
const PREVIEW_WIDTH: usize = 60;

/// Error class of a job that the broker gave up because its worker process died. No attempt of the job raised.
const CRASHED: &str = "WorkerCrashed";

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    filter: FilterArguments,
    /// List errors, with the number of jobs that each has failed, instead of jobs
    #[arg(long)]
    group: bool,
    /// List only the newest N; 0 for all [default: 50, and all with --json]
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON array, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let most = match (arguments.limit, arguments.json) {
        (Some(0), _) | (None, true) => usize::MAX,
        (Some(limit), _) => limit,
        (None, false) => SHOWN,
    };
    let broker = arguments.broker.find()?;
    let filter = arguments.filter.filter();
    match arguments.group {
        true => list_errors(&broker, filter, most, arguments.json),
        false => list_jobs(&broker, filter, most, arguments.json),
    }
}

fn list_errors(
    broker: &RemoteBroker,
    filter: Filter,
    most: usize,
    as_json: bool,
) -> Result<(), CommandError> {
    let mut groups: HashMap<(u64, String), ErrorGroup> = HashMap::new();
    for_each(broker, filter, |job| {
        let key = (job.failure.fingerprint, job.failure.class.clone());
        groups.entry(key).or_default().add(job);
    })?;
    let mut groups: Vec<ErrorGroup> = groups.into_values().collect();
    groups.sort_by_key(|group| (group.last_failed_at, group.jobs));
    let found = groups.len();
    groups.drain(..found.saturating_sub(most));
    if as_json {
        return show_json(&groups.iter().map(ErrorGroup::as_json).collect());
    }
    show(&group_table(&groups))?;
    match groups.len() < found {
        true => show_remaining_hint(groups.len(), &format!(" of {found} errors")),
        false => Ok(()),
    }
}

fn list_jobs(
    broker: &RemoteBroker,
    filter: Filter,
    most: usize,
    as_json: bool,
) -> Result<(), CommandError> {
    let is_filtered = filter != Filter::default();
    let (jobs, are_all) = newest(broker, filter, most)?;
    if as_json {
        return show_json(&jobs.iter().map(job_json).collect());
    }
    if jobs.is_empty() {
        return show("no failed job matches\n");
    }
    show(&job_table(&jobs))?;
    match (are_all, is_filtered) {
        (true, _) => Ok(()),
        // Counting all matches would need a scan of all failed jobs.
        (false, true) => show_remaining_hint(jobs.len(), " that match"),
        (false, false) => {
            let counts = StatusQuery {
                limit: 1,
                ..StatusQuery::default()
            };
            // Other jobs may be retried or dropped in the meantime.
            let failed = broker.status_page(counts)?.status.failed;
            let failed = failed.max(jobs.len() as u64 + 1);
            show_remaining_hint(jobs.len(), &format!(" of {failed} failed jobs"))
        }
    }
}

/// Returns the newest `most` matching failed jobs, in the order in which they failed, and whether these are
/// all.
fn newest(
    broker: &RemoteBroker,
    filter: Filter,
    most: usize,
) -> Result<(VecDeque<FailedJob>, bool), CommandError> {
    let mut jobs = VecDeque::new();
    let mut query = FailedQuery {
        filter,
        newest_first: true,
        ..FailedQuery::default()
    };
    loop {
        // Ask for one more, to know whether there are more.
        let wanted = most.saturating_add(1) - jobs.len();
        query.limit = u32::try_from(wanted).unwrap_or(u32::MAX);
        let page = failed_page(broker, query.clone())?;
        page.jobs.into_iter().for_each(|job| jobs.push_front(job));
        if jobs.len() > most {
            jobs.drain(..jobs.len() - most);
            return Ok((jobs, false));
        }
        match page.next {
            Some(next) => query.after = next,
            None => return Ok((jobs, true)),
        }
    }
}

fn show_remaining_hint(shown: usize, of: &str) -> Result<(), CommandError> {
    show(&format!(
        "these are the newest {shown}{of}; --limit 0 lists all\n"
    ))
}

fn job_table(jobs: &VecDeque<FailedJob>) -> String {
    let mut table = TextTable::new(&[
        "FAILED",
        "ID",
        "TASK",
        "QUEUE",
        ">ATTEMPTS",
        "ERROR",
        "ARGUMENTS",
    ]);
    let now = now_ms();
    for job in jobs {
        table.row(vec![
            ago(now, job.failed_at),
            job.id.to_string(),
            job.task.clone(),
            job.queue.clone().unwrap_or_else(|| "-".to_owned()),
            attempts(job).to_string(),
            shortened(&error_text(&job.failure), ERROR_WIDTH),
            match preview(&job.failure) {
                Some(preview) => shortened(&preview, PREVIEW_WIDTH),
                None => bytes(job.body_bytes),
            },
        ]);
    }
    table.to_string()
}

fn group_table(groups: &[ErrorGroup]) -> String {
    if groups.is_empty() {
        return "no failed job matches\n".to_owned();
    }
    let mut table = TextTable::new(&["LAST", ">JOBS", "TASK", "ERROR", "FINGERPRINT"]);
    let now = now_ms();
    for group in groups {
        let more = match group.tasks.len() {
            0 | 1 => String::new(),
            tasks => format!(" and {}", count(tasks as u64 - 1, "other")),
        };
        table.row(vec![
            ago(now, group.last_failed_at),
            group.jobs.to_string(),
            format!("{}{more}", group.tasks.first().map_or("", |task| task)),
            shortened(&error_text(&group.last), ERROR_WIDTH),
            fingerprint_text(group.last.fingerprint),
        ]);
    }
    table.to_string()
}

/// Jobs that failed by the same error from the same place.
#[derive(Default)]
struct ErrorGroup {
    jobs: u64,
    tasks: BTreeSet<String>,
    first_failed_at: u64,
    last_failed_at: u64,
    last: Reason,
}

impl ErrorGroup {
    fn add(&mut self, job: FailedJob) {
        if self.jobs == 0 {
            self.first_failed_at = job.failed_at;
        }
        self.jobs += 1;
        self.first_failed_at = self.first_failed_at.min(job.failed_at);
        self.last_failed_at = self.last_failed_at.max(job.failed_at);
        self.tasks.insert(job.task);
        self.last = job.failure;
    }

    fn as_json(&self) -> Value {
        json!({
            "jobs": self.jobs,
            "tasks": self.tasks,
            "error": self.last.class,
            "message": self.last.message,
            "fingerprint": fingerprint_text(self.last.fingerprint),
            "first_failed_at_ms": self.first_failed_at,
            "last_failed_at_ms": self.last_failed_at,
        })
    }
}

fn job_json(job: &FailedJob) -> Value {
    json!({
        "id": job.id.to_string(),
        "task": job.task,
        "queue": job.queue,
        "attempts": attempts(job),
        "crashes": job.crashes,
        "generation": job.generation,
        "enqueued_at_ms": job.enqueued_at,
        "failed_at_ms": job.failed_at,
        "error": job.failure.class,
        "message": job.failure.message,
        "fingerprint": fingerprint_text(job.failure.fingerprint),
        "arguments": preview(&job.failure),
        "argument_bytes": job.body_bytes,
    })
}

/// Returns the number of times that the job was started.
fn attempts(job: &FailedJob) -> u32 {
    let raised = u32::from(job.failure.class != CRASHED);
    job.attempt + u32::from(job.crashes) + raised
}

/// Returns the worker's preview of the arguments: short, and without secrets.
pub fn preview(failure: &Reason) -> Option<String> {
    match failure.preview.is_empty() {
        true => None,
        false => Some(String::from_utf8_lossy(&failure.preview).into_owned()),
    }
}

pub fn error_text(failure: &Reason) -> String {
    match (failure.class.as_str(), failure.message.as_str()) {
        ("", "") => "-".to_owned(),
        (class, "") => class.to_owned(),
        ("", message) => message.to_owned(),
        (class, message) => format!("{class}: {message}"),
    }
}

fn fingerprint_text(fingerprint: u64) -> String {
    format!("{fingerprint:016x}")
}
