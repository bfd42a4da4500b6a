//! Cancels jobs: named ones, or all of a task or a queue.

use clap::{Args, ValueEnum};
use penstock_message::{
    Filter, Key, KeyState, MessageId, MessageState, OnRunning, Op, Receipt, Refusal, StatusQuery,
    Target,
};
use serde_json::{Value, json};

use super::status_name;
use crate::confirm::ConfirmArguments;
use crate::exit::{CommandError, FAILED, WRONG_CALL, applied};
use crate::refused_orders;
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{count, printable, show, show_json, state_name};

#[derive(Args)]
pub struct Arguments {
    /// Ids of the jobs
    #[arg(value_name = "ID")]
    ids: Vec<MessageId>,
    /// All unfinished jobs of this task
    #[arg(long, value_name = "NAME")]
    task: Option<String>,
    /// All unfinished jobs of this queue
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Reason, shown to clients that wait for the results: at most 200 bytes
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Handling of running jobs: ask their workers to stop them, kill them at once, or leave them alone
    #[arg(long, value_name = "HOW", default_value = "ask")]
    running: Treatment,
    #[command(flatten)]
    broker: BrokerArguments,
    #[command(flatten)]
    confirm: ConfirmArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Treatment {
    Ask,
    Kill,
    Leave,
}

impl From<Treatment> for OnRunning {
    fn from(treatment: Treatment) -> Self {
        match treatment {
            Treatment::Ask => Self::Ask,
            Treatment::Kill => Self::Kill,
            Treatment::Leave => Self::Leave,
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let filter = Filter {
        queue: arguments.queue.clone(),
        task: arguments.task.clone(),
        ..Filter::default()
    };
    let is_filtered = filter != Filter::default();
    match (arguments.ids.is_empty(), is_filtered) {
        (false, false) => arguments.cancel_each(),
        (true, true) => arguments.cancel_all(filter),
        (true, false) => {
            let text = "no jobs given: give ids, --task or --queue";
            Err(CommandError::new(WRONG_CALL, text))
        }
        (false, true) => {
            let text = "give either ids or a filter, not both";
            Err(CommandError::new(WRONG_CALL, text))
        }
    }
}

impl Arguments {
    fn op(&self, target: Target) -> Op {
        Op::Cancel {
            target,
            reason: self.reason.clone(),
            running: self.running.into(),
        }
    }

    fn cancel_each(&self) -> Result<(), CommandError> {
        let broker = self.broker.find()?;
        let ops = self.ids.iter().map(|id| self.op(Target::Job(*id)));
        let receipts = broker.commit_each(ops.collect())?;
        let (mut cancelled, mut asked, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (id, receipt) in self.ids.iter().zip(receipts) {
            match cancelled_from(&broker, *id, receipt) {
                Ok(Some(MessageState::Cancelling)) => asked.push(id),
                Ok(found) => cancelled.push((id, found)),
                Err(failure) => refused.push((*id, failure)),
            }
        }
        if self.json {
            let cancelled: Vec<Value> = cancelled
                .iter()
                .map(|(id, found)| json!({ "id": id.to_string(), "was": found.map(state_name) }))
                .collect();
            let asked: Vec<String> = asked.iter().map(ToString::to_string).collect();
            show_json(
                &json!({ "cancelled": cancelled, "asked": asked, "refused": refused_orders::as_json(&refused) }),
            )?;
        } else {
            show(&describe(cancelled.len() as u64, asked.len() as u64, 0))?;
        }
        refused_orders::report(&refused, "cancelled")
    }

    fn cancel_all(&self, filter: Filter) -> Result<(), CommandError> {
        let broker = self.broker.find()?;
        self.confirm.ask(&self.question(&broker)?)?;
        let status = broker.run_operation(self.op(Target::Filter(filter)))?;
        if self.json {
            return show_json(
                &json!({ "cancelled": status.done, "asked": status.asked, "left": status.spared }),
            );
        }
        match status.matched {
            0 => show("no job matches\n"),
            _ => show(&describe(status.done, status.asked, status.spared)),
        }
    }

    /// Describes what is about to happen. Gives the counts for a whole queue, which the broker knows without a
    /// scan.
    fn question(&self, broker: &RemoteBroker) -> Result<String, CommandError> {
        let of_task = self
            .task
            .as_ref()
            .map(|task| format!(" of task {}", printable(task)));
        let of_queue = self
            .queue
            .as_ref()
            .map(|queue| format!(" in queue {}", printable(queue)));
        let which = of_task.unwrap_or_default() + &of_queue.unwrap_or_default();
        let (mut waiting, mut running) = ("waiting jobs".to_owned(), "running ones".to_owned());
        if let (Some(queue), None) = (&self.queue, &self.task) {
            let page = broker.status_page(StatusQuery::of_queues(vec![queue.clone()]))?;
            let found = page.status.queues.first();
            let counted =
                found.map_or((0, 0), |queue| (queue.ready + queue.delayed, queue.running));
            waiting = count(counted.0, "waiting job");
            running = count(counted.1, "running job");
        }
        Ok(match self.running {
            Treatment::Ask => {
                format!("This cancels {waiting}{which}, and asks {running} to stop. Continue?")
            }
            Treatment::Kill => {
                format!("This cancels {waiting}{which}, and kills {running}. Continue?")
            }
            Treatment::Leave => format!("This cancels {waiting}{which}. Continue?"),
        })
    }
}

fn describe(cancelled: u64, asked: u64, left: u64) -> String {
    let mut lines = String::new();
    if cancelled > 0 {
        lines += &format!("cancelled {}\n", count(cancelled, "job"));
    }
    if asked > 0 {
        let jobs = count(asked, "running job");
        lines += &format!("asked {jobs} to stop; `penstock job show` shows when one has stopped\n");
    }
    if left > 0 {
        lines += &format!("left {} alone\n", count(left, "running job"));
    }
    lines
}

/// Returns the state that the job had before it was cancelled, or fails with the reason why it was not.
fn cancelled_from(
    broker: &RemoteBroker,
    id: MessageId,
    receipt: Receipt,
) -> Result<Option<MessageState>, CommandError> {
    let Receipt::Refused { why, .. } = &receipt else {
        return Ok(applied(receipt)?.found);
    };
    let why = match why {
        Refusal::TooLate(MessageState::Failed) => {
            "it has already failed; `penstock failed rm` removes it".to_owned()
        }
        Refusal::TooLate(MessageState::Running) => {
            "it is running and was left alone; omit --running leave to ask it to stop".to_owned()
        }
        Refusal::TooLate(MessageState::Cancelling) => {
            "it is running, and was already asked to stop".to_owned()
        }
        Refusal::NoSuchJob => match broker.peek(Key::Result(id))? {
            KeyState::Present(end) => {
                format!(
                    "it has already ended: it {}",
                    ended_as(status_name(end.status))
                )
            }
            KeyState::Pending | KeyState::Gone => {
                "the broker has no such job: it never existed, or it has ended and its result was not \
                 kept. Nothing was changed"
                    .to_owned()
            }
        },
        _ => return Ok(applied(receipt)?.found),
    };
    Err(CommandError::new(FAILED, why))
}

fn ended_as(status: &str) -> String {
    match status {
        "succeeded" | "failed" | "expired" | "crashed" | "timed out" => status.to_owned(),
        other => format!("was {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_is_counted_in_words() {
        assert_eq!(describe(1, 0, 0), "cancelled 1 job\n");
        assert_eq!(
            describe(2, 3, 1),
            "cancelled 2 jobs\nasked 3 running jobs to stop; `penstock job show` shows when one has stopped\nleft 1 running job alone\n"
        );
        assert_eq!(describe(0, 0, 0), "");
    }
}
