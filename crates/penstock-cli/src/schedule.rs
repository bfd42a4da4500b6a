//! Adds, changes, lists, shows, pauses, resumes, runs, resets and removes schedules.

mod edit;

use clap::{Args, Subcommand};
use penstock_drawing::fields_of_schedule;
use penstock_message::{
    Answer, Op, Query, Rhythm, ScheduleInfo, ScheduleStep, SchedulesPage, SchedulesQuery, Skipped,
};
use serde_json::json;

use self::edit::{AddArguments, EditArguments};
use crate::exit::{CommandError, FAILED, WRONG_CALL};
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{TextTable, duration_ms, printable, shortened, show, show_json};
use crate::times::{format_time, now_ms};

/// Number of upcoming times that `show` lists.
const TIMES: u32 = 5;
const NAME_WIDTH: usize = 60;

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List schedules with their next times
    Ls(ListArguments),
    /// Show one schedule: its times, its last job, skipped times
    Show(OneArguments),
    /// Add a schedule, by its task and its times
    Add(AddArguments),
    /// Change the times of a schedule; its task and arguments stay
    Edit(EditArguments),
    /// Start no more jobs until resumed; times that pass meanwhile don't count as missed
    Pause(OneArguments),
    /// Continue with the times from now on
    Resume(OneArguments),
    /// Enqueue a job now; the times stay as they are
    Run(OneArguments),
    /// Return to what the code declares: undoes a pause and changes made by hand
    Reset(OneArguments),
    /// Remove a schedule; a worker whose code declares it adds it again when it starts
    Rm(OneArguments),
}

#[derive(Args)]
struct ListArguments {
    /// List only the schedules of this app
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON array, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct OneArguments {
    /// Name of the schedule
    #[arg(value_name = "NAME")]
    name: String,
    /// App of the schedule, if several apps have one with this name
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        Command::Ls(arguments) => list(arguments),
        Command::Show(arguments) => show_one(arguments),
        Command::Add(arguments) => edit::add(arguments),
        Command::Edit(arguments) => edit::edit(arguments),
        Command::Pause(arguments) => arguments.order(ScheduleStep::Pause, "paused"),
        Command::Resume(arguments) => arguments.order(ScheduleStep::Resume, "resumed"),
        Command::Run(arguments) => arguments.order(ScheduleStep::Run, "enqueued a job"),
        Command::Reset(arguments) => {
            arguments.order(ScheduleStep::Reset, "reset to what its code declares")
        }
        Command::Rm(arguments) => remove(arguments),
    }
}

fn page(broker: &RemoteBroker, query: SchedulesQuery) -> Result<SchedulesPage, CommandError> {
    match broker.ask(Query::Schedules(query))? {
        Answer::Schedules(page) => Ok(page),
        _ => Err(CommandError::new(
            FAILED,
            "the broker sent an unexpected answer instead of its schedules",
        )),
    }
}

fn list(arguments: &ListArguments) -> Result<(), CommandError> {
    let broker = arguments.broker.find()?;
    let mut query = SchedulesQuery {
        app: arguments.app.clone(),
        times: 1,
        ..SchedulesQuery::default()
    };
    let mut found: Vec<ScheduleInfo> = Vec::new();
    loop {
        let page = page(&broker, query.clone())?;
        found.extend(page.schedules);
        match page.next {
            Some(next) => query.after = Some(next),
            None => break,
        }
    }
    if arguments.json {
        return show_json(&found.iter().map(fields_of_schedule).collect());
    }
    if found.is_empty() {
        return show("there are no schedules\n");
    }
    show(&table(&found))
}

fn table(found: &[ScheduleInfo]) -> String {
    let mut table = TextTable::new(&[
        "APP", "NAME", "TASK", "WHEN", "NEXT", ">FIRED", ">SKIPPED", ">MISSED",
    ]);
    let now = now_ms();
    for info in found {
        let next = match info.next.first() {
            _ if info.is_paused => "paused".to_owned(),
            Some(next) => format_time(now, *next),
            None if info.trouble.is_empty() => "never again".to_owned(),
            None => "unreadable".to_owned(),
        };
        table.row(vec![
            shortened(&printable(&info.name.app), NAME_WIDTH),
            shortened(&printable(&info.name.name), NAME_WIDTH),
            shortened(&printable(&info.task), NAME_WIDTH),
            when(info),
            next,
            info.tally.fired.to_string(),
            info.tally.skipped.to_string(),
            info.tally.missed.to_string(),
        ]);
    }
    table.to_string()
}

fn when(info: &ScheduleInfo) -> String {
    match &info.timing.rhythm {
        Rhythm::Cron(line) if info.timing.zone == "UTC" => printable(line),
        Rhythm::Cron(line) => printable(&format!("{line} ({})", info.timing.zone)),
        Rhythm::Every(ms) => format!("every {}", duration_ms(*ms)),
        Rhythm::At(_) => "once".to_owned(),
    }
}

fn show_one(arguments: &OneArguments) -> Result<(), CommandError> {
    let broker = arguments.broker.find()?;
    let info = arguments.look_up(&broker)?;
    if arguments.json {
        return show_json(&fields_of_schedule(&info));
    }
    let now = now_ms();
    let mut lines = vec![
        format!(
            "{} of app {}: {}",
            printable(&info.name.name),
            printable(&info.name.app),
            when(&info)
        ),
        format!(
            "task {}, queue {}, overlap {}, catchup {} within {}",
            printable(&info.task),
            printable(&info.queue),
            info.overlap.name(),
            info.catch_up.name(),
            duration_ms(info.window_ms)
        ),
    ];
    if info.timing.jitter_ms > 0 {
        let jitter = duration_ms(info.timing.jitter_ms);
        lines.push(format!(
            "each job is enqueued up to {jitter} after its time"
        ));
    }
    lines.push(match (info.is_set, info.is_declared) {
        (true, true) => {
            "changed by hand; `penstock schedule reset` returns to what its code declares"
                .to_owned()
        }
        (true, false) => "set by hand or by a program".to_owned(),
        (false, _) => "declared by code".to_owned(),
    });
    if info.is_paused {
        lines.push("paused".to_owned());
    }
    if !info.trouble.is_empty() {
        lines.push(format!(
            "the broker can't compute its times: {}",
            printable(&info.trouble)
        ));
    }
    lines.extend(
        info.next
            .iter()
            .map(|next| format!("next {}", format_time(now, *next))),
    );
    if let Some((time, job)) = info.last {
        let state = match (info.is_running, info.is_queued) {
            (true, true) => "has not ended, and the next one waits for it",
            (true, false) => "has not ended",
            (false, _) => "has ended",
        };
        lines.push(format!(
            "last {}: job {job} {state}",
            format_time(now, time)
        ));
    }
    if let Some((time, why)) = info.skipped {
        let why = match why {
            Skipped::Overlap => "was skipped: an earlier job had not ended",
            Skipped::QueueFull => "was skipped: the queue was full",
            Skipped::Missed => "was missed: no broker was running, or its disk was full",
        };
        lines.push(format!("{} {why}", format_time(now, time)));
    }
    let tally = info.tally;
    lines.push(format!(
        "{} fired, {} skipped, {} missed",
        tally.fired, tally.skipped, tally.missed
    ));
    show(&(lines.join("\n") + "\n"))
}

fn remove(arguments: &OneArguments) -> Result<(), CommandError> {
    let broker = arguments.broker.find()?;
    let info = arguments.look_up(&broker)?;
    let schedule = info.name.clone();
    broker.commit(Op::Unschedule { schedule })?;
    if arguments.json {
        return show_json(
            &json!({ "app": info.name.app, "name": info.name.name, "removed": true }),
        );
    }
    show(&format!("{}: removed\n", printable(&info.name.name)))?;
    match info.is_declared {
        true => show(
            "a worker whose code declares it adds it again when it starts; `penstock schedule pause` survives that\n",
        ),
        false => Ok(()),
    }
}

impl OneArguments {
    /// Finds the one schedule with this name.
    fn look_up(&self, broker: &RemoteBroker) -> Result<ScheduleInfo, CommandError> {
        let query = SchedulesQuery {
            app: self.app.clone(),
            name: Some(self.name.clone()),
            after: None,
            times: TIMES,
        };
        let mut found = page(broker, query)?.schedules;
        if found.len() > 1 {
            let apps: Vec<String> = found.iter().map(|info| printable(&info.name.app)).collect();
            let text = format!(
                "several apps have a schedule {:?}: choose one with --app: {}",
                self.name,
                apps.join(", ")
            );
            return Err(CommandError::new(WRONG_CALL, text));
        }
        found.pop().ok_or_else(|| {
            let text = format!(
                "there is no schedule {:?}; `penstock schedule ls` lists all schedules",
                self.name
            );
            CommandError::new(FAILED, text)
        })
    }

    fn order(&self, step: ScheduleStep, done: &str) -> Result<(), CommandError> {
        let broker = self.broker.find()?;
        let info = self.look_up(&broker)?;
        let name = printable(&info.name.name);
        let applied = broker.commit(Op::Schedule {
            schedule: info.name,
            step,
        })?;
        let job = applied.owners.first().map(|(_, job)| job.to_string());
        if self.json {
            // Read the schedule again to show its present state.
            let info = self.look_up(&broker)?;
            let mut fields = fields_of_schedule(&info);
            if let Some(job) = job {
                fields["job"] = job.into();
            }
            return show_json(&fields);
        }
        show(&match job {
            Some(job) => format!("{name}: {done}, {job}\n"),
            None => format!("{name}: {done}\n"),
        })
    }
}
