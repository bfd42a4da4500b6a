//! `penstock workers`: lists the workers of a broker, and gives orders to running ones.

use std::io::{Write, stderr};
use std::time::Duration;

use clap::{Args, Subcommand};
use penstock_message::{AskQuery, NoReply, WorkerState};
use penstock_worker::{MAX_PROCESSES, MAX_SLOTS, Question, Reply, Sizes, Standing, state_name};
use serde_json::{Value, json};

use crate::confirm::Confirm;
use crate::exit::{FAILED, Failure, WRONG_CALL};
use crate::lists;
use crate::remote::{Broker, BrokerArguments};
use crate::text::{count, duration_ms, printable, show, show_json};

/// How long a worker may take to reply.
const PATIENCE: Duration = Duration::from_secs(10);
/// Workers that are asked at the same time; a broker passes on few questions of one client at once.
const AT_ONCE: usize = 8;

#[derive(Subcommand)]
pub enum WorkersCommand {
    /// List the workers, with their slots and queues and the jobs that they run
    Ls(lists::Arguments),
    /// Have workers begin no job until they are resumed; running jobs go on
    Pause(Named),
    /// Have paused workers begin jobs again
    Resume(Named),
    /// Give workers other numbers of slots; running jobs go on
    Resize(Resize),
    /// Have workers begin no job, and exit once their running jobs have ended, however long that takes
    Drain(Ended),
    /// Have workers exit as SIGTERM does: their running jobs have the grace to end
    Stop(Ended),
}

#[derive(Args)]
pub struct Named {
    /// The workers, by their names in `penstock workers ls`
    #[arg(value_name = "NAME", required_unless_present = "all")]
    names: Vec<String>,
    /// All workers that are connected
    #[arg(long, conflicts_with = "names")]
    all: bool,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON array, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Ended {
    #[command(flatten)]
    named: Named,
    #[command(flatten)]
    confirm: Confirm,
}

#[derive(Args)]
pub struct Resize {
    #[command(flatten)]
    named: Named,
    /// How many processes run jobs, one at a time each unless it has threads
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    concurrency: Option<u32>,
    /// How many jobs run at once in each of those processes, of a worker that was started with --threads
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    threads: Option<u32>,
    /// How many processes run one job at a time beside those with threads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    processes: Option<u32>,
    /// How many jobs of async def tasks run at once
    #[arg(long = "async", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    async_slots: Option<u32>,
    /// How many jobs run at once of tasks with slot="isolated"
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    isolated: Option<u32>,
}

pub fn run(command: &WorkersCommand) -> Result<(), Failure> {
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
    fn run(&self) -> Result<(), Failure> {
        let sizes = Sizes {
            concurrency: self.concurrency,
            threads: self.threads,
            processes: self.processes,
            async_slots: self.async_slots,
            isolated: self.isolated,
        };
        if sizes == Sizes::default() {
            let text = "say how many slots there are to be, such as -c 8; `penstock workers resize --help` lists the kinds";
            return Err(Failure::new(WRONG_CALL, text));
        }
        self.named.order(&Question::Resize(sizes), None)
    }
}

impl Ended {
    /// Asks a person first when it is for all workers, whichever they are.
    fn order(&self, question: &Question, verb: &str) -> Result<(), Failure> {
        self.named.order(question, Some((verb, &self.confirm)))
    }
}

impl Named {
    fn order(&self, question: &Question, asks: Option<(&str, &Confirm)>) -> Result<(), Failure> {
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
                    Ok(standing) => show(&format!("{shown}: {}\n", in_words(question, &standing)))?,
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
                let text = format!("{failed} of {asked} workers did not do it; the others did");
                Err(Failure::new(FAILED, text))
            }
        }
    }

    /// Returns the names, each once, in the order in which they were given.
    fn names(&self, broker: &Broker) -> Result<Vec<String>, Failure> {
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

impl Broker {
    /// Asks several workers at once. Fails as a whole when the broker can't pass questions on.
    fn ask_workers(
        &self,
        names: &[String],
        question: &Question,
    ) -> Result<Vec<Result<Standing, Failure>>, Failure> {
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

fn standing(name: &str, reply: Option<Reply>) -> Result<Standing, Failure> {
    let text = match reply {
        Some(Reply::Done(standing)) => return Ok(standing),
        Some(Reply::Refused(why)) => format!("{name} refuses: {why}. Nothing was changed"),
        Some(Reply::Unknown { penstock }) => format!(
            "{name} runs penstock {penstock}, which does not know this order: nothing was changed. Upgrade that worker and \
             start it again"
        ),
        None => format!(
            "{name} has replied in a way that this program does not know: it may be newer. `penstock workers ls` shows how \
             it is; use a command of its version"
        ),
    };
    Err(Failure::new(FAILED, text))
}

fn no_reply(name: &str, why: NoReply) -> Failure {
    let text = match why {
        NoReply::UnknownWorker => {
            format!(
                "no worker named {name} is connected; `penstock workers ls` lists those that are"
            )
        }
        NoReply::SeveralWorkers => format!(
            "several workers are named {name}, so nobody was asked: start them with a --name of their own each. A signal \
             to its process reaches one of them"
        ),
        NoReply::TooOld => format!(
            "{name} runs an older penstock, which takes no orders from here: nothing was changed. Upgrade that worker and \
             start it again; signals to its process work as ever"
        ),
        NoReply::Busy => format!(
            "too many questions are under way already, to {name} or in all: nothing was changed. Try again in a moment"
        ),
        NoReply::Lost => format!(
            "{name} has ended, or lost its connection, before it replied: the order was carried out or not. \
             `penstock workers ls` shows how it is"
        ),
        NoReply::Silent => format!(
            "{name} has not replied within {} s: it may hang, or be stopped, and may still carry out the order. \
             `penstock workers ls` shows how it is; its jobs are kept",
            PATIENCE.as_secs()
        ),
        NoReply::TooLarge => format!("the reply of {name} is too large to be passed on"),
    };
    Failure::new(FAILED, text)
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

fn in_words(question: &Question, standing: &Standing) -> String {
    let busy = u64::from(standing.busy);
    let jobs = match busy {
        0 => "no job runs".to_owned(),
        1 => "1 job runs on".to_owned(),
        _ => format!("{busy} jobs run on"),
    };
    let slots = count(standing.slots.into(), "slot");
    match (standing.state, standing.ends_within_ms) {
        (WorkerState::Ending, Some(left_ms)) if busy > 0 => {
            format!("stops; {jobs}, for {} at most", duration_ms(left_ms))
        }
        (WorkerState::Ending, _) => format!("stops; {jobs}"),
        (WorkerState::Draining, _) if busy > 0 => {
            format!("drains; {jobs}, and it exits after the last one")
        }
        (WorkerState::Draining, _) => format!("drains; {jobs}"),
        (WorkerState::Paused, _) if matches!(question, Question::Resize(_)) => {
            format!("has {slots}, and is paused; {jobs}")
        }
        (WorkerState::Paused, _) => format!("paused; {jobs}"),
        (WorkerState::Serving | WorkerState::Unsaid, _) => format!("serves with {slots}; {jobs}"),
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
            assert_eq!(in_words(&question, &standing), expected);
        };
        use WorkerState::{Draining, Ending, Paused, Serving};
        let resize = Question::Resize(Sizes::default());
        check(Question::Pause, Paused, 0, None, "paused; no job runs");
        check(Question::Pause, Paused, 1, None, "paused; 1 job runs on");
        check(
            resize.clone(),
            Paused,
            0,
            None,
            "has 8 slots, and is paused; no job runs",
        );
        check(
            resize,
            Serving,
            2,
            None,
            "serves with 8 slots; 2 jobs run on",
        );
        check(
            Question::Drain,
            Draining,
            2,
            None,
            "drains; 2 jobs run on, and it exits after the last one",
        );
        check(
            Question::Stop,
            Ending,
            2,
            Some(25_000),
            "stops; 2 jobs run on, for 25 s at most",
        );
        check(
            Question::Stop,
            Ending,
            0,
            Some(25_000),
            "stops; no job runs",
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
