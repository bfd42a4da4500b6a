//! Lists, draws, cancels and retries workflows.

use clap::{Args, Subcommand, ValueEnum};
use penstock_drawing::{DrawnStep, DrawnWorkflow, fields};
use penstock_message::{
    Answer, Filter, MessageId, Op, OperationStatus, Query, Target, WorkflowInfo, WorkflowState,
    WorkflowsPage, WorkflowsQuery,
};
use serde_json::json;

use crate::exit::{CommandError, FAILED};
use crate::job::Treatment;
use crate::refused_orders::{self, RefusedOrders};
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{TextTable, count, printable, printable_lines, shortened, show, show_json};
use crate::times::{ago, format_time, now_ms};

/// Number of workflows that a person is shown by default.
const SHOWN: usize = 50;
const NAME_WIDTH: usize = 60;

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List workflows, the newest last
    Ls(ListArguments),
    /// Draw one workflow: its steps and the progress of each
    Show(ShowArguments),
    /// Cancel all unfinished jobs of workflows
    Cancel(CancelArguments),
    /// Put the failed jobs of workflows back into their queues, so that the workflows continue
    Retry(RetryArguments),
}

#[derive(Clone, Copy, ValueEnum)]
enum StateChoice {
    Running,
    Succeeded,
    Failed,
    Cancelled,
    Expired,
}

impl From<StateChoice> for WorkflowState {
    fn from(state: StateChoice) -> Self {
        match state {
            StateChoice::Running => Self::Running,
            StateChoice::Succeeded => Self::Succeeded,
            StateChoice::Failed => Self::Failed,
            StateChoice::Cancelled => Self::Cancelled,
            StateChoice::Expired => Self::Expired,
        }
    }
}

#[derive(Args)]
struct ListArguments {
    /// Only workflows in this state
    #[arg(long, value_name = "STATE")]
    state: Option<StateChoice>,
    /// Only workflows with this name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// List only the newest N; 0 for all [default: 50, and all with --json]
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON array, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ShowArguments {
    /// Id of the workflow
    #[arg(value_name = "ID")]
    id: MessageId,
    /// Print the steps as a graph in Graphviz's DOT language
    #[arg(long, conflicts_with_all = ["svg", "json"])]
    dot: bool,
    /// Print the steps as an SVG picture
    #[arg(long, conflicts_with = "json")]
    svg: bool,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct CancelArguments {
    /// Ids of the workflows
    #[arg(value_name = "ID", required = true)]
    ids: Vec<MessageId>,
    /// Reason, shown to clients that wait for the results: at most 200 bytes
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Handling of running jobs: ask their workers to stop them, kill them at once, or leave them alone
    #[arg(long, value_name = "HOW", default_value = "ask")]
    running: Treatment,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct RetryArguments {
    /// Ids of the workflows
    #[arg(value_name = "ID", required = true)]
    ids: Vec<MessageId>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        Command::Ls(arguments) => list(arguments),
        Command::Show(arguments) => draw(arguments),
        Command::Cancel(arguments) => cancel(arguments),
        Command::Retry(arguments) => retry(arguments),
    }
}

fn page(broker: &RemoteBroker, query: WorkflowsQuery) -> Result<WorkflowsPage, CommandError> {
    match broker.ask(Query::Workflows(query))? {
        Answer::Workflows(page) => Ok(page),
        _ => Err(CommandError::new(
            FAILED,
            "the broker sent an unexpected answer instead of its workflows",
        )),
    }
}

fn list(arguments: &ListArguments) -> Result<(), CommandError> {
    let most = match (arguments.limit, arguments.json) {
        (Some(0), _) | (None, true) => usize::MAX,
        (Some(limit), _) => limit,
        (None, false) => SHOWN,
    };
    let broker = arguments.broker.find()?;
    let mut query = WorkflowsQuery {
        state: arguments.state.map(Into::into),
        name: arguments.name.clone(),
        ..WorkflowsQuery::default()
    };
    let mut found: Vec<WorkflowInfo> = Vec::new();
    // Ask for one more, to know whether there are more.
    while found.len() <= most {
        let wanted = most.saturating_add(1) - found.len();
        query.limit = u32::try_from(wanted).unwrap_or(u32::MAX);
        let page = page(&broker, query.clone())?;
        found.extend(page.workflows);
        match page.next {
            Some(next) => query.after = Some(next),
            None => break,
        }
    }
    let are_all = found.len() <= most;
    found.truncate(most);
    found.reverse();
    if arguments.json {
        return show_json(&found.iter().map(fields).collect());
    }
    if found.is_empty() {
        return show("no workflow matches\n");
    }
    show(&table(&found))?;
    match are_all {
        true => Ok(()),
        false => show(&format!(
            "these are the newest {} that match; --limit 0 lists all\n",
            found.len()
        )),
    }
}

fn table(found: &[WorkflowInfo]) -> String {
    let mut columns = vec![
        "SENT",
        "ID",
        "NAME",
        "STATE",
        ">WAITING",
        ">RUNNING",
        ">SUCCEEDED",
        ">FAILED",
        ">CANCELLED",
        ">BLOCKED",
    ];
    // Few workflows have a deadline, so the column is optional.
    let has_deadlines = found.iter().any(|workflow| workflow.deadline.is_some());
    if has_deadlines {
        columns.push("DEADLINE");
    }
    let mut table = TextTable::new(&columns);
    let now = now_ms();
    for workflow in found {
        let jobs = &workflow.jobs;
        let mut cells = vec![
            ago(now, workflow.opened_at),
            workflow.id.to_string(),
            shortened(&printable(&workflow.name), NAME_WIDTH),
            workflow.state.name().to_owned(),
        ];
        let counts = [
            jobs.waiting,
            jobs.running,
            jobs.succeeded,
            jobs.failed,
            jobs.cancelled,
            jobs.blocked,
        ];
        cells.extend(counts.map(|count| count.to_string()));
        if has_deadlines {
            let deadline = workflow.deadline.map(|at| format_time(now, at));
            cells.push(deadline.unwrap_or_default());
        }
        table.row(cells);
    }
    table.to_string()
}

fn draw(arguments: &ShowArguments) -> Result<(), CommandError> {
    let broker = arguments.broker.find()?;
    let mut query = WorkflowsQuery {
        workflow: Some(arguments.id),
        ..WorkflowsQuery::default()
    };
    let described = page(&broker, query.clone())?;
    let first = described.workflows.first();
    let steps = first.and_then(|workflow| DrawnStep::read(&workflow.description));
    let mut nodes = steps.map_or_else(Vec::new, |steps| steps.ids());
    nodes.truncate(WorkflowsQuery::NODES_CAP);
    query.nodes = nodes;
    let page = page(&broker, query)?;
    let (Some(workflow), Some(info)) = (DrawnWorkflow::of_page(&page), page.workflows.first())
    else {
        return Err(unknown(arguments.id));
    };
    if arguments.json {
        return show_json(&workflow.to_json());
    }
    if arguments.dot {
        return show(&workflow.dot());
    }
    if arguments.svg {
        return show(&workflow.svg());
    }
    show(&printable_lines(&workflow.tree()))?;
    let now = now_ms();
    let mut times = format!("sent {}", format_time(now, info.opened_at));
    if let Some(at) = info.ended_at {
        times += &format!(", ended {}", format_time(now, at));
    }
    if let Some(at) = info.deadline {
        times += &format!(", deadline {}", format_time(now, at));
    }
    if let Some(parent) = info.parent {
        times += &format!(", by job {parent}");
    }
    show(&(times + "\n"))
}

fn unknown(id: MessageId) -> CommandError {
    let text = format!(
        "the broker lists no workflow {id}: it never existed, an older client sent it, or it ended and was removed a day \
         after it succeeded; `penstock workflow ls` lists all workflows"
    );
    CommandError::new(FAILED, text)
}

fn cancel(arguments: &CancelArguments) -> Result<(), CommandError> {
    let op = |target| Op::Cancel {
        target,
        reason: arguments.reason.clone(),
        running: arguments.running.into(),
    };
    let (all, refused) = order_each(&arguments.broker, &arguments.ids, &op)?;
    if arguments.json {
        show_json(&json!({
            "cancelled": all.done, "asked": all.asked, "left": all.spared, "refused": refused_orders::as_json(&refused),
        }))?;
    } else if refused.len() < arguments.ids.len() {
        show(&describe(&all))?;
    }
    refused_orders::report(&refused, "cancelled")
}

fn retry(arguments: &RetryArguments) -> Result<(), CommandError> {
    let op = |target| Op::RetryFailed {
        target,
        queue: None,
    };
    let (all, refused) = order_each(&arguments.broker, &arguments.ids, &op)?;
    if arguments.json {
        show_json(&json!({
            "retried": all.done, "left": all.spared, "refused": refused_orders::as_json(&refused),
        }))?;
    } else if refused.len() < arguments.ids.len() {
        show(&match all.done {
            0 => "no failed jobs to retry; nothing was changed\n".to_owned(),
            done => format!("retried {}\n", count(done, "failed job")),
        })?;
        if all.spared > 0 {
            let left = count(all.spared, "job");
            show(&format!(
                "left {left} alone: another job now has its unique key\n"
            ))?;
        }
    }
    refused_orders::report(&refused, "retried")
}

/// Sends an order for all jobs of each of these workflows. Returns the counts of jobs, and the unknown
/// workflows.
fn order_each(
    broker: &BrokerArguments,
    ids: &[MessageId],
    op: &dyn Fn(Target) -> Op,
) -> Result<(OperationStatus, RefusedOrders), CommandError> {
    let broker = broker.find()?;
    let mut all = OperationStatus::default();
    let mut refused = Vec::new();
    for id in ids {
        let query = WorkflowsQuery {
            workflow: Some(*id),
            ..WorkflowsQuery::default()
        };
        if page(&broker, query)?.workflows.is_empty() {
            refused.push((*id, unknown(*id)));
            continue;
        }
        let filter = Filter {
            workflow: Some(*id),
            ..Filter::default()
        };
        let status = broker.run_operation(op(Target::Filter(filter)))?;
        all.done += status.done;
        all.asked += status.asked;
        all.spared += status.spared;
    }
    Ok((all, refused))
}

fn describe(all: &OperationStatus) -> String {
    let mut lines = String::new();
    if all.done > 0 {
        lines += &format!("cancelled {}\n", count(all.done, "job"));
    }
    if all.asked > 0 {
        let jobs = count(all.asked, "running job");
        lines += &format!(
            "asked {jobs} to stop; `penstock workflow show` shows when they have stopped\n"
        );
    }
    if all.spared > 0 {
        lines += &format!("left {} alone\n", count(all.spared, "running job"));
    }
    match lines.is_empty() {
        true => "all its jobs have already ended; nothing was changed\n".to_owned(),
        false => lines,
    }
}
