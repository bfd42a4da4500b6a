//! Shows jobs, and sends orders for them. Never prints the arguments or the result of a job as they are.

mod cancel;

use clap::{Args, Subcommand};
use penstock_message::{
    FailedQuery, Filter, Key, KeyState, MessageId, MessageInfo, MessageState, Op, Value as Ended,
    ValueStatus,
};
use serde_json::{Value, json};

use crate::attempts::Attempt;
use crate::exit::{CommandError, FAILED};
use crate::failed::{act_on_each, error_text, failed_page, preview};
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{bytes, count, indented, printable, show, show_json, state_name};
use crate::times::{format_time, now_ms};

pub use cancel::Treatment;

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show everything the broker knows about a job
    Show(ShowArguments),
    /// Cancel jobs: waiting jobs end at once, running jobs are asked to stop
    Cancel(cancel::Arguments),
    /// Put failed jobs back into their queues, with all their retries available again
    Retry(RetryArguments),
}

#[derive(Args)]
pub struct ShowArguments {
    /// Id of the job
    id: MessageId,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct RetryArguments {
    /// Ids of the jobs
    #[arg(value_name = "ID", required = true)]
    ids: Vec<MessageId>,
    /// Put the jobs into this queue instead of the one that each came from
    #[arg(long, value_name = "QUEUE")]
    to: Option<String>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        Command::Show(arguments) => show_job(arguments),
        Command::Cancel(arguments) => cancel::run(arguments),
        Command::Retry(arguments) => {
            let op = |target| Op::RetryFailed {
                target,
                queue: arguments.to.clone(),
            };
            act_on_each(&arguments.broker.find()?, &arguments.ids, &op)?
                .report("retried", arguments.json)
        }
    }
}

fn show_job(arguments: &ShowArguments) -> Result<(), CommandError> {
    Known::of(arguments)?.report(arguments)
}

/// Shows a failed job; refuses any other.
pub fn show_failed(arguments: &ShowArguments) -> Result<(), CommandError> {
    let known = Known::of(arguments)?;
    match &known.held {
        Some(held) if held.failed.is_some() => known.report(arguments),
        _ => Err(CommandError::new(
            FAILED,
            format!(
                "job {} is {}, so it is not a failed job; `penstock job show` shows it",
                arguments.id,
                known.state()
            ),
        )),
    }
}

/// Everything that a broker knows about one job: `held`, `ended` or both.
struct Known {
    held: Option<MessageInfo>,
    ended: Option<Ended>,
    /// Size of the job's arguments, if known.
    body_bytes: Option<u64>,
    /// Progress that the job's code reported: [done, total or null, message].
    progress: Option<Value>,
}

impl Known {
    fn of(arguments: &ShowArguments) -> Result<Self, CommandError> {
        let broker = arguments.broker.find()?;
        let id = arguments.id;
        // Query in this order: a job that ends in between is then found by its result.
        let held = broker.job(id)?;
        let ended = match broker.peek(Key::Result(id))? {
            KeyState::Present(value) => Some(value),
            KeyState::Pending | KeyState::Gone => None,
        };
        if held.is_none() && ended.is_none() {
            let text = format!(
                "the broker has no job {id}: it has ended and its result was not kept, or it never existed"
            );
            return Err(CommandError::new(FAILED, text));
        }
        let body_bytes = match &held {
            Some(held) => failed_bytes(&broker, held)?,
            None => None,
        };
        let is_running = |held: &MessageInfo| {
            use MessageState::{Cancelling, Parked, Running};
            matches!(held.state, Running | Cancelling | Parked)
        };
        let progress = match held.as_ref().is_some_and(is_running) && ended.is_none() {
            true => broker.progress(id),
            false => None,
        };
        Ok(Self {
            held,
            ended,
            body_bytes,
            progress,
        })
    }

    fn progress_for_people(&self) -> Option<String> {
        let progress = self.progress.as_ref()?;
        let (done, total) = (&progress[0], &progress[1]);
        let mut text = match (done.as_f64(), total.as_f64()) {
            (Some(part), Some(all)) if all > 0.0 => {
                format!("{done} of {total} ({:.0} %)", 100.0 * part / all)
            }
            _ => done.to_string(),
        };
        let message = progress[2].as_str().unwrap_or_default();
        if !message.is_empty() {
            text += ": ";
            text += &printable(message);
        }
        Some(text)
    }

    fn state(&self) -> &'static str {
        match (&self.ended, &self.held) {
            (Some(ended), _) => status_name(ended.status),
            (None, Some(held)) => state_name(held.state),
            (None, None) => "gone",
        }
    }

    fn task(&self) -> Option<&str> {
        let run = self.ended.as_ref().and_then(|ended| ended.run.as_ref());
        let held = self.held.as_ref().map(|held| held.task.as_str());
        held.or(run.map(|run| run.task.as_str()))
    }

    fn queue(&self) -> Option<&str> {
        let run = self.ended.as_ref().and_then(|ended| ended.run.as_ref());
        let held = self.held.as_ref().map(|held| held.queue.as_str());
        held.or(run.map(|run| run.queue.as_str()))
    }

    /// Returns the broker's reason for ending the job: a dead worker, a cancel, a purge. An error of the task
    /// is not text.
    fn reason(&self) -> Option<String> {
        let ended = self.ended.as_ref()?;
        match ended.status {
            ValueStatus::Crashed | ValueStatus::Cancelled if !ended.body.is_empty() => {
                Some(String::from_utf8_lossy(&ended.body).into_owned())
            }
            _ => None,
        }
    }

    fn finished_at(&self) -> Option<u64> {
        let failed = self.held.as_ref().and_then(|held| held.failed.as_ref());
        let run = self.ended.as_ref().and_then(|ended| ended.run.as_ref());
        let ended_at = run.map(|run| run.ended_at);
        ended_at.or(failed.map(|failed| failed.0))
    }

    fn generation(&self) -> Option<u32> {
        let run = self.ended.as_ref().and_then(|ended| ended.run.as_ref());
        let held = self.held.as_ref().map(|held| held.generation);
        held.or(run.map(|run| run.generation))
    }

    fn report(&self, arguments: &ShowArguments) -> Result<(), CommandError> {
        match arguments.json {
            true => show_json(&self.as_json(arguments.id)),
            false => show(&self.for_people(arguments.id, now_ms())),
        }
    }

    fn as_json(&self, id: MessageId) -> Value {
        let held = self.held.as_ref();
        let failed = held.and_then(|held| held.failed.as_ref());
        json!({
            "id": id.to_string(),
            "state": self.state(),
            "task": self.task(),
            "queue": self.queue(),
            "generation": self.generation(),
            "crashes": held.map(|held| held.crashes),
            "enqueued_at_ms": held.map(|held| held.enqueued_at),
            "due_at_ms": held.and_then(|held| held.due_at),
            "started_at_ms": held.and_then(|held| held.started_at),
            "progress": self.progress.as_ref().map(|progress| json!({
                "done": progress[0],
                "total": progress[1],
                "message": progress[2],
            })),
            "finished_at_ms": self.finished_at(),
            "worker": held.and_then(|held| held.worker.as_deref()),
            "reason": self.reason(),
            "error": failed.map(|failed| failed.1.class.as_str()),
            "message": failed.map(|failed| failed.1.message.as_str()),
            "fingerprint": failed.map(|failed| format!("{:016x}", failed.1.fingerprint)),
            "arguments": failed.and_then(|failed| preview(&failed.1)),
            "argument_bytes": self.body_bytes,
            "result_bytes": self.ended.as_ref().map(|ended| ended.body.len()),
            "attempts": held.map(|held| Attempt::all_of(held).iter().map(Attempt::as_json).collect::<Vec<_>>()),
        })
    }

    fn for_people(&self, id: MessageId, now: u64) -> String {
        let mut lines = vec![("job", id.to_string()), ("state", self.state().to_owned())];
        let mut line = |name, text: Option<String>| lines.extend(text.map(|text| (name, text)));
        line("task", self.task().map(printable));
        line("queue", self.queue().map(printable));
        let retried = self.generation().filter(|generation| *generation > 0);
        line(
            "retried",
            retried.map(|times| format!("{} after a failure", count(times.into(), "time"))),
        );
        line("why", self.reason().map(|reason| printable(&reason)));
        if let Some(held) = &self.held {
            let crashes = Some(held.crashes).filter(|crashes| *crashes > 0);
            line("crashes", crashes.map(|crashes| crashes.to_string()));
            line("enqueued", Some(format_time(now, held.enqueued_at)));
            let due = held.due_at.filter(|_| held.state == MessageState::Delayed);
            let why = match Attempt::has_crashed(held) {
                true => ", after its process died",
                false => "",
            };
            line("due", due.map(|at| format_time(now, at) + why));
            line("started", held.started_at.map(|at| format_time(now, at)));
            line("worker", held.worker.as_deref().map(printable));
            line("progress", self.progress_for_people());
        }
        line(
            "finished",
            self.finished_at().map(|at| format_time(now, at)),
        );
        if let Some(held) = &self.held
            && let Some(failed) = &held.failed
        {
            line("error", Some(printable(&error_text(&failed.1))));
            let size = self.body_bytes.map(bytes);
            let preview = preview(&failed.1).map(|preview| printable(&preview));
            line("arguments", preview.or(size));
        }
        let result = self
            .ended
            .as_ref()
            .filter(|ended| ended.status == ValueStatus::Succeeded);
        line("result", result.map(|ended| bytes(ended.body.len() as u64)));
        let mut text: String = lines
            .iter()
            .map(|(name, text)| format!("{name:<9}  {text}\n"))
            .collect();
        for attempt in self.held.iter().flat_map(Attempt::all_of) {
            let worker = attempt
                .worker
                .as_deref()
                .map_or(String::new(), |worker| format!(" on {}", printable(worker)));
            let at = attempt
                .finished_at_ms
                .map_or(String::new(), |at| format!(", {}", format_time(now, at)));
            text += &format!(
                "\nattempt {}{worker}{at}: {}\n{}",
                attempt.number,
                printable(&attempt.error),
                indented(&attempt.traceback)
            );
        }
        text
    }
}

/// Fetches the size of a failed job's arguments, which only the list of failed jobs has.
fn failed_bytes(broker: &RemoteBroker, held: &MessageInfo) -> Result<Option<u64>, CommandError> {
    let Some(failed) = &held.failed else {
        return Ok(None);
    };
    let mut query = FailedQuery {
        filter: Filter {
            task: Some(held.task.clone()),
            failed_from: Some(failed.0),
            failed_before: Some(failed.0 + 1),
            ..Filter::default()
        },
        ..FailedQuery::default()
    };
    loop {
        let page = failed_page(broker, query.clone())?;
        if let Some(job) = page.jobs.iter().find(|job| job.id == held.id) {
            return Ok(Some(job.body_bytes));
        }
        match page.next {
            Some(next) => query.after = next,
            None => return Ok(None),
        }
    }
}

fn status_name(status: ValueStatus) -> &'static str {
    match status {
        ValueStatus::Succeeded => "succeeded",
        ValueStatus::Failed => "failed",
        ValueStatus::Expired => "expired",
        ValueStatus::Crashed => "crashed",
        ValueStatus::Cancelled => "cancelled",
        ValueStatus::Upstream => "cancelled by an earlier job's failure",
        ValueStatus::Replaced => "replaced",
        ValueStatus::Gathered => "gathered",
        ValueStatus::TimedOut => "timed out",
    }
}
