//! Lists, shows, retries and removes failed jobs: named ones, or all that match a filter.

mod list;

use clap::{Args, Subcommand};
use penstock_message::{
    FailedJob, FailedPage, FailedQuery, Filter, MessageId, Op, Query, Receipt, Refusal, Target,
};
use serde_json::json;

use crate::confirm::ConfirmArguments;
use crate::exit::{CommandError, FAILED, WRONG_CALL};
use crate::job;
use crate::refused_orders::{self, RefusedOrders};
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{count, show, show_json, state_name};
use crate::times::past_time;
pub use list::{error_text, preview};

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List failed jobs, the newest last
    Ls(list::Arguments),
    /// Show one failed job, with the error and traceback of each attempt
    Show(job::ShowArguments),
    /// Put failed jobs back into their queues, with all their retries available again
    Retry(RetryArguments),
    /// Remove failed jobs; their results are kept
    Rm(RemoveArguments),
}

/// Filter for failed jobs; a job must match every field that is given.
#[derive(Args, Clone)]
struct FilterArguments {
    /// Only jobs of this task
    #[arg(long, value_name = "NAME")]
    task: Option<String>,
    /// Only jobs of this queue
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Only jobs with an error of this class, by its full name as `penstock failed ls` shows it: ValueError,
    /// shop.Gone
    #[arg(long, value_name = "CLASS")]
    error: Option<String>,
    /// Only jobs with the same error from the same place in the code: the number from `penstock failed ls
    /// --group`
    #[arg(long, value_name = "NUMBER", value_parser = fingerprint)]
    fingerprint: Option<u64>,
    /// Only jobs that failed since then: 90s, 30m, 2h, 7d, or a time such as 2026-01-31T08:00:00Z
    #[arg(long, value_name = "WHEN", value_parser = past_time)]
    since: Option<u64>,
}

impl FilterArguments {
    fn filter(&self) -> Filter {
        Filter {
            queue: self.queue.clone(),
            workflow: None,
            task: self.task.clone(),
            class: self.error.clone(),
            fingerprint: self.fingerprint,
            failed_from: self.since,
            failed_before: None,
        }
    }
}

/// Jobs that an order addresses: named ones, those of a filter, or all.
#[derive(Args)]
struct Chosen {
    /// Ids of the jobs
    #[arg(value_name = "ID")]
    ids: Vec<MessageId>,
    #[command(flatten)]
    filter: FilterArguments,
    /// All failed jobs
    #[arg(long)]
    all: bool,
}

#[derive(Args)]
struct RetryArguments {
    #[command(flatten)]
    chosen: Chosen,
    /// Put the jobs into this queue instead of the one that each came from
    #[arg(long, value_name = "QUEUE")]
    to: Option<String>,
    #[command(flatten)]
    broker: BrokerArguments,
    #[command(flatten)]
    confirm: ConfirmArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct RemoveArguments {
    #[command(flatten)]
    chosen: Chosen,
    #[command(flatten)]
    broker: BrokerArguments,
    #[command(flatten)]
    confirm: ConfirmArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        Command::Ls(arguments) => list::run(arguments),
        Command::Show(arguments) => job::show_failed(arguments),
        Command::Retry(arguments) => FailedOrder {
            chosen: &arguments.chosen,
            does: "retries",
            done: "retried",
            op: &|target| Op::RetryFailed {
                target,
                queue: arguments.to.clone(),
            },
        }
        .run_operation(&arguments.broker, &arguments.confirm, arguments.json),
        Command::Rm(arguments) => FailedOrder {
            chosen: &arguments.chosen,
            does: "removes",
            done: "removed",
            op: &|target| Op::DropFailed { target },
        }
        .run_operation(&arguments.broker, &arguments.confirm, arguments.json),
    }
}

struct FailedOrder<'a> {
    chosen: &'a Chosen,
    does: &'static str,
    done: &'static str,
    op: &'a dyn Fn(Target) -> Op,
}

impl FailedOrder<'_> {
    fn run_operation(
        &self,
        broker: &BrokerArguments,
        confirm: &ConfirmArguments,
        as_json: bool,
    ) -> Result<(), CommandError> {
        let filter = self.chosen.filter.filter();
        let is_filtered = filter != Filter::default();
        let ids = &self.chosen.ids;
        match (ids.is_empty(), is_filtered, self.chosen.all) {
            (false, false, false) => {
                let outcome = act_on_each(&broker.find()?, ids, self.op)?;
                return outcome.report(self.done, as_json);
            }
            (true, true, false) | (true, false, true) => {}
            (true, false, false) => {
                let text = "no jobs given: give ids, a filter such as --task or --error, or --all";
                return Err(CommandError::new(WRONG_CALL, text));
            }
            _ => {
                let text = "give only one of these: ids, a filter, --all";
                return Err(CommandError::new(WRONG_CALL, text));
            }
        }
        let broker = broker.find()?;
        let (matching, pinned) = count_matching(&broker, filter)?;
        if matching == 0 {
            return OrderOutcome::default().report(self.done, as_json);
        }
        let jobs = count(matching, "failed job");
        confirm.ask(&format!("This {} {jobs}. Continue?", self.does))?;
        let status = broker.run_operation((self.op)(Target::Filter(pinned)))?;
        OrderOutcome {
            done: status.done,
            spared: status.spared,
            refused: Vec::new(),
        }
        .report(self.done, as_json)
    }
}

/// Counts the matching jobs, and narrows the filter to them. Jobs that fail while the user decides were not
/// counted, so the order must not include them.
fn count_matching(
    broker: &RemoteBroker,
    mut filter: Filter,
) -> Result<(u64, Filter), CommandError> {
    let (mut matching, mut last_failed_at) = (0, 0);
    for_each(broker, filter.clone(), |job| {
        matching += 1;
        last_failed_at = last_failed_at.max(job.failed_at);
    })?;
    filter.failed_before = Some(last_failed_at + 1);
    Ok((matching, filter))
}

/// Calls `each` for every matching failed job, in the order in which they failed.
fn for_each(
    broker: &RemoteBroker,
    filter: Filter,
    mut look: impl FnMut(FailedJob),
) -> Result<(), CommandError> {
    let mut query = FailedQuery {
        filter,
        ..FailedQuery::default()
    };
    loop {
        let page = failed_page(broker, query.clone())?;
        page.jobs.into_iter().for_each(&mut look);
        match page.next {
            Some(next) => query.after = next,
            None => return Ok(()),
        }
    }
}

pub fn failed_page(broker: &RemoteBroker, query: FailedQuery) -> Result<FailedPage, CommandError> {
    match broker.ask(Query::Failed(query))? {
        penstock_message::Answer::Failed(page) => Ok(page),
        _ => Err(CommandError::new(
            FAILED,
            "the broker sent an unexpected answer instead of its failed jobs",
        )),
    }
}

/// Outcome of an order for failed jobs.
#[derive(Default)]
pub struct OrderOutcome {
    done: u64,
    spared: u64,
    refused: RefusedOrders,
}

/// Sends an order for each of these jobs.
pub fn act_on_each(
    broker: &RemoteBroker,
    ids: &[MessageId],
    op: &dyn Fn(Target) -> Op,
) -> Result<OrderOutcome, CommandError> {
    let ops = ids.iter().map(|id| op(Target::Job(*id))).collect();
    let mut outcome = OrderOutcome::default();
    for (id, receipt) in ids.iter().zip(broker.commit_each(ops)?) {
        let failure = match receipt {
            Receipt::Refused {
                why: Refusal::TooLate(state),
                ..
            } => CommandError::new(
                FAILED,
                format!("the job is {}, not failed", state_name(state)),
            ),
            receipt => match crate::exit::applied(receipt) {
                Ok(_) => {
                    outcome.done += 1;
                    continue;
                }
                Err(failure) => failure,
            },
        };
        outcome.refused.push((*id, failure));
    }
    Ok(outcome)
}

impl OrderOutcome {
    pub fn report(self, done: &str, as_json: bool) -> Result<(), CommandError> {
        if as_json {
            let refused = refused_orders::as_json(&self.refused);
            show_json(&json!({ done: self.done, "spared": self.spared, "refused": refused }))?;
        } else if self.refused.is_empty() && self.done + self.spared == 0 {
            show("no failed job matches\n")?;
        } else if self.done > 0 || self.refused.is_empty() {
            show(&format!("{done} {}\n", count(self.done, "failed job")))?;
        }
        if self.spared > 0 && !as_json {
            show(&format!(
                "left {} alone: another job now has its unique key, or its queue is unknown (give --to)\n",
                count(self.spared, "job")
            ))?;
        }
        refused_orders::report(&self.refused, done)
    }
}

fn fingerprint(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16).map_err(|_| {
        "give 16 hexadecimal digits, as `penstock failed ls --group` shows them".to_owned()
    })
}
