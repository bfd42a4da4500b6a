//! Implements `penstock workers`, which lists the workers of a broker and sends orders to them.

use std::io::{Write, stderr};
use std::time::Duration;

use clap::{Args, Subcommand};
use penstock_message::{AskQuery, NoReply, WorkerState};
use penstock_worker::{MAX_PROCESSES, MAX_SLOTS, Question, Reply, Sizes, Standing, state_name};
use serde_json::{Value, json};

use crate::confirm::ConfirmArguments;
use crate::exit::{CommandError, FAILED, WRONG_CALL};
use crate::lists;
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{count, duration_ms, printable, show, show_json};

/// Time that a worker has to reply.
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of workers asked at the same time. A broker relays only a few questions of one client at once.
const AT_ONCE: usize = 8;

#[derive(Subcommand)]
pub enum WorkersCommand {
    /// List the workers, with their slots, their queues and their running jobs
    Ls(lists::Arguments),
    /// Start no new jobs until resumed; running jobs continue
    Pause(NamedArguments),
    /// Start jobs again
    Resume(NamedArguments),
    /// Change the number of slots; running jobs continue
    Resize(Resize),
    /// Start no new jobs, and exit once the running jobs have finished, however long that takes
    Drain(ExitArguments),
    /// Stop as on SIGTERM: running jobs get the grace period to finish
    Stop(ExitArguments),
}

#[derive(Args)]
pub struct NamedArguments {
    /// Names of the workers, as `penstock workers ls` shows them
    #[arg(value_name = "NAME", required_unless_present = "all")]
    names: Vec<String>,
    /// All connected workers
    #[arg(long, conflicts_with = "names")]
    all: bool,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON array, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct ExitArguments {
    #[command(flatten)]
    named: NamedArguments,
    #[command(flatten)]
    confirm: ConfirmArguments,
}

#[derive(Args)]
pub struct Resize {
    #[command(flatten)]
    named: NamedArguments,
    /// Number of processes that run jobs: one job at a time each, or more with threads
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    concurrency: Option<u32>,
    /// Number of jobs that each of those processes runs at once; only for a worker started with --threads
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    threads: Option<u32>,
    /// Number of one-job processes next to those with threads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    processes: Option<u32>,
    /// Number of jobs of async def tasks that run at once
    #[arg(long = "async", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    async_slots: Option<u32>,
    /// Number of jobs of slot="isolated" tasks that run at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    isolated: Option<u32>,
}

pub fn run(command: &WorkersCommand) -> Result<(), CommandError> {
    match command {
        WorkersCommand::Ls(arguments) => lists::workers(arguments),
        WorkersCommand::Pause(named) => named.order(&Question::Pause, None),
        WorkersCommand::Resume(named) => named.order(&Question::Resume, None),
        WorkersCommand::Resize(resize) => resize.run(),
        WorkersCommand::Drain(ended) => ended.order(&Question::Drain, "Drain"),
        WorkersCommand::Stop(ended) => ended.order(&Question::Stop, "Stop"),
    }
}

impl Resize {
    fn run(&self) -> Result<(), CommandError> {
        let sizes = Sizes {
            concurrency: self.concurrency,
            threads: self.threads,
            processes: self.processes,
            async_slots: self.async_slots,
            isolated: self.isolated,
        };
        if sizes == Sizes::default() {
            let text = "give the new number of slots, such as -c 8; `penstock workers resize --help` lists the options";
            return Err(CommandError::new(WRONG_CALL, text));
        }
        self.named.order(&Question::Resize(sizes), None)
    }
}

impl ExitArguments {
    /// Sends the order. Asks for confirmation first when it addresses all workers.
    fn order(&self, question: &Question, verb: &str) -> Result<(), CommandError> {
        self.named.order(question, Some((verb, &self.confirm)))
    }
}

impl NamedArguments {
    fn order(
        &self,
        question: &Question,
        asks: Option<(&str, &ConfirmArguments)>,
    ) -> Result<(), CommandError> {
        let broker = self.broker.find()?;
        let names = self.names(&broker)?;
        if names.is_empty() && !self.json {
            return show("no worker is connected\n");
        }
        if let (Some((verb, confirm)), true) = (asks, self.all && !names.is_empty()) {
            let workers = count(names.len() as u64, "worker");
            confirm.ask(&format!(
                "{verb} {workers} of {}?",
                printable(&broker.shown)
            ))?;
        }
        let mut failures = Vec::new();
        let mut items = Vec::new();
        for some in names.chunks(AT_ONCE) {
            let replies = broker.ask_workers(some, question)?;
            for (name, reply) in some.iter().zip(replies) {
                let shown = printable(name);
                match reply {
                    Ok(standing) if self.json => items.push(as_json(name, &standing)),
                    Ok(standing) => show(&format!("{shown}: {}\n", describe(question, &standing)))?,
                    Err(failure) => {
                        items.push(json!({ "name": name, "error": failure.message }));
                        failures.push(failure);
                    }
                }
            }
        }
        if self.json {
            show_json(&Value::Array(items))?;
        }
        match (failures.pop(), names.len()) {
            (None, _) => Ok(()),
            (Some(failure), 1) => Err(failure),
            (Some(last), asked) => {
                for failure in failures.iter().chain([&last]) {
                    let _unread = writeln!(stderr(), "penstock: {}", printable(&failure.message));
                }
                let failed = failures.len() + 1;
                let text = format!(
                    "{failed} of {asked} workers did not carry out the order; the others did"
                );
                Err(CommandError::new(FAILED, text))
            }
        }
    }

    /// Returns each name once, in the order given.
    fn names(&self, broker: &RemoteBroker) -> Result<Vec<String>, CommandError> {
        let named = match self.all {
            false => self.names.clone(),
            true => {
                let workers = broker.status()?.workers.into_iter();
                let connected = workers.filter(|worker| worker.connected);
                connected.map(|worker| worker.name).collect()
            }
        };
        let mut names: Vec<String> = Vec::with_capacity(named.len());
        for name in named {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Ok(names)
    }
}

impl RemoteBroker {
    /// Asks several workers at once. Fails as a whole when the broker can't relay questions.
    fn ask_workers(
        &self,
        names: &[String],
        question: &Question,
    ) -> Result<Vec<Result<Standing, CommandError>>, CommandError> {
        let asks = names.iter().map(|name| AskQuery {
            worker: name.clone(),
            question: question.encode(),
            patience_ms: PATIENCE.as_millis() as u64,
        });
        let replies = self.relay(asks.collect(), PATIENCE)?;
        let replies = names.iter().zip(replies);
        Ok(replies
            .map(|(name, reply)| {
                let reply = reply.map_err(|why| no_reply(name, why))?;
                standing(name, Reply::decode(&reply))
            })
            .collect())
    }
}

fn standing(name: &str, reply: Option<Reply>) -> Result<Standing, CommandError> {
    let text = match reply {
        Some(Reply::Done(standing)) => return Ok(standing),
        Some(Reply::Refused(why)) => format!("{name} refused: {why}. Nothing was changed"),
        Some(Reply::Unknown { penstock }) => format!(
            "{name} runs penstock {penstock}, which does not support this order. Nothing was changed. Upgrade that worker and \
             restart it"
        ),
        None => format!(
            "{name} sent a reply that this program can't read; it may run a newer version. `penstock workers ls` shows its \
             state; use the `penstock` command of that version"
        ),
    };
    Err(CommandError::new(FAILED, text))
}

fn no_reply(name: &str, why: NoReply) -> CommandError {
    let text = match why {
        NoReply::UnknownWorker => {
            format!(
                "no worker named {name} is connected; `penstock workers ls` lists those that are"
            )
        }
        NoReply::SeveralWorkers => format!(
            "several workers are named {name}, so none received the order. Start each with its own --name. To reach one of \
             them now, send a signal to its process"
        ),
        NoReply::TooOld => format!(
            "{name} runs an older penstock, which takes no orders through the broker. Nothing was changed. Upgrade that worker \
             and restart it; signals to its process work as before"
        ),
        NoReply::Busy => format!(
            "too many questions are already on their way to {name} or to all workers. Nothing was changed. Try again in a moment"
        ),
        NoReply::Lost => format!(
            "{name} exited or lost its connection before it replied. The order may have been carried out: \
             `penstock workers ls` shows the worker's state"
        ),
        NoReply::Silent => format!(
            "{name} did not reply within {} s. It may hang or be stopped, and may still carry out the order. \
             `penstock workers ls` shows its state; its jobs are kept",
            PATIENCE.as_secs()
        ),
        NoReply::TooLarge => format!("the reply from {name} is too large for the broker to relay"),
    };
    CommandError::new(FAILED, text)
}

fn as_json(name: &str, standing: &Standing) -> Value {
    json!({
        "name": name,
        "state": state_name(standing.state),
        "slots": standing.slots,
        "busy": standing.busy,
        "ends_within_ms": standing.ends_within_ms,
    })
}

fn describe(question: &Question, standing: &Standing) -> String {
    let busy = u64::from(standing.busy);
    let jobs = match busy {
        0 => "no job is running".to_owned(),
        1 => "1 job still running".to_owned(),
        _ => format!("{busy} jobs still running"),
    };
    let slots = count(standing.slots.into(), "slot");
    match (standing.state, standing.ends_within_ms) {
        (WorkerState::Ending, Some(left_ms)) if busy > 0 => {
            format!("stopping; {jobs}, for at most {}", duration_ms(left_ms))
        }
        (WorkerState::Ending, _) => format!("stopping; {jobs}"),
        (WorkerState::Draining, _) if busy > 0 => {
            format!("draining; {jobs}; exits after the last one")
        }
        (WorkerState::Draining, _) => format!("draining; {jobs}"),
        (WorkerState::Paused, _) if matches!(question, Question::Resize(_)) => {
            format!("paused, with {slots}; {jobs}")
        }
        (WorkerState::Paused, _) => format!("paused; {jobs}"),
        (WorkerState::Serving | WorkerState::Unsaid, _) => format!("serving with {slots}; {jobs}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_says_in_one_line_how_it_stands() {
        let check = |question: Question, state, busy, ends_within_ms, expected: &str| {
            let standing = Standing {
                state,
                slots: 8,
                busy,
                ends_within_ms,
            };
            assert_eq!(describe(&question, &standing), expected);
        };
        use WorkerState::{Draining, Ending, Paused, Serving};
        let resize = Question::Resize(Sizes::default());
        check(
            Question::Pause,
            Paused,
            0,
            None,
            "paused; no job is running",
        );
        check(
            Question::Pause,
            Paused,
            1,
            None,
            "paused; 1 job still running",
        );
        check(
            resize.clone(),
            Paused,
            0,
            None,
            "paused, with 8 slots; no job is running",
        );
        check(
            resize,
            Serving,
            2,
            None,
            "serving with 8 slots; 2 jobs still running",
        );
        check(
            Question::Drain,
            Draining,
            2,
            None,
            "draining; 2 jobs still running; exits after the last one",
        );
        check(
            Question::Stop,
            Ending,
            2,
            Some(25_000),
            "stopping; 2 jobs still running, for at most 25 s",
        );
        check(
            Question::Stop,
            Ending,
            0,
            Some(25_000),
            "stopping; no job is running",
        );
    }

    #[test]
    fn every_reason_for_no_reply_names_the_worker_and_what_to_do() {
        for (why, expected) in [
            (NoReply::UnknownWorker, "penstock workers ls"),
            (NoReply::SeveralWorkers, "--name"),
            (NoReply::TooOld, "Upgrade"),
            (NoReply::Busy, "Try again"),
            (NoReply::Lost, "penstock workers ls"),
            (NoReply::Silent, "its jobs are kept"),
            (NoReply::TooLarge, "too large"),
        ] {
            let failure = no_reply("mill", why);
            assert_eq!(failure.code, FAILED);
            assert!(failure.message.contains("mill"), "{}", failure.message);
            assert!(failure.message.contains(expected), "{}", failure.message);
        }
    }
}
