//! Adds and edits schedules by hand.

use clap::Args;
use penstock_drawing::fields_of_schedule;
use penstock_message::{
    CatchUp, DEFAULT_PRIORITY, Message, MessageId, Op, Overlap, Rhythm, ScheduleInfo, ScheduleName,
    SchedulePlan, ScheduleStep, ScheduleTimes, ScheduleTiming, SchedulesQuery,
};
use serde_json::{Map, Value};

use super::{OneArguments, TIMES, page, when};
use crate::exit::{CommandError, FAILED, WRONG_CALL};
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{printable, show, show_json};
use crate::times::{duration, format_time, future_time, now_ms};

/// Time for which a result is kept: the default of a task.
const RESULT_TTL_MS: u64 = 24 * 60 * 60 * 1000;
/// Maximum number of crashes of a job: the default of a task.
const MAX_CRASHES: u8 = 3;
/// Maximum age of missed times that are made up for: the default in code.
const WINDOW_MS: u64 = 60 * 60 * 1000;

#[derive(Args)]
pub(super) struct AddArguments {
    /// Name of the schedule
    #[arg(value_name = "NAME")]
    name: String,
    /// Task to run, such as shop.report
    #[arg(value_name = "TASK")]
    task: String,
    /// App that the schedule belongs to, as in App("shop")
    #[arg(long, value_name = "NAME")]
    app: String,
    /// Positional arguments of the task, as a JSON array
    #[arg(long, value_name = "JSON", default_value = "[]")]
    args: String,
    /// Keyword arguments of the task, as a JSON object
    #[arg(long, value_name = "JSON", default_value = "{}")]
    kwargs: String,
    #[command(flatten)]
    times: TimesArguments,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct EditArguments {
    #[command(flatten)]
    one: OneArguments,
    #[command(flatten)]
    times: TimesArguments,
}

#[derive(Args)]
struct TimesArguments {
    /// A cron line of five fields, such as "30 2 * * *", or @hourly and the like
    #[arg(long, value_name = "LINE")]
    cron: Option<String>,
    /// An interval, such as 90s or 12h, counted from when the schedule is added
    #[arg(long, value_name = "TIME", value_parser = duration)]
    every: Option<std::time::Duration>,
    /// A single time, such as 2030-01-31T08:00:00Z, or 90m from now
    #[arg(long, value_name = "WHEN", value_parser = future_time)]
    at: Option<u64>,
    /// Time zone of the cron line, such as Europe/Paris [default: UTC]
    #[arg(long, value_name = "ZONE")]
    tz: Option<String>,
    /// Handling of a time at which the previous job has not ended: skip, queue, cancel_previous or allow
    #[arg(long, value_name = "HOW", value_parser = overlap)]
    overlap: Option<Overlap>,
    /// Handling of times that passed while no broker was running: once, skip or all
    #[arg(long, value_name = "HOW", value_parser = catch_up)]
    catchup: Option<CatchUp>,
    /// Maximum age of missed times that are made up for [default: 1h]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    window: Option<std::time::Duration>,
    /// Maximum random delay of each job after its time
    #[arg(long, value_name = "TIME", value_parser = duration)]
    jitter: Option<std::time::Duration>,
    /// Queue of the jobs [default: default]
    #[arg(short = 'Q', long, value_name = "QUEUE")]
    queue: Option<String>,
}

fn overlap(text: &str) -> Result<Overlap, String> {
    one_of(&Overlap::ALL, Overlap::name, text)
}

fn catch_up(text: &str) -> Result<CatchUp, String> {
    one_of(&CatchUp::ALL, CatchUp::name, text)
}

fn one_of<T: Copy>(all: &[T], name: fn(T) -> &'static str, text: &str) -> Result<T, String> {
    let found = all.iter().find(|one| name(**one) == text);
    found.copied().ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|one| name(*one)).collect();
        format!("give one of {}", names.join(", "))
    })
}

fn ms(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl TimesArguments {
    fn rhythm(&self) -> Result<Option<Rhythm>, CommandError> {
        match (&self.cron, self.every, self.at) {
            (None, None, None) => Ok(None),
            (Some(line), None, None) => Ok(Some(Rhythm::Cron(line.clone()))),
            (None, Some(every), None) => Ok(Some(Rhythm::Every(ms(every)))),
            (None, None, Some(at)) => Ok(Some(Rhythm::At(at))),
            _ => Err(CommandError::new(
                WRONG_CALL,
                "give only one of --cron, --every and --at".to_owned(),
            )),
        }
    }

    /// Whether no option was given.
    fn is_empty(&self) -> bool {
        let Self {
            cron,
            every,
            at,
            tz,
            overlap,
            catchup,
            window,
            jitter,
            queue,
        } = self;
        let times = cron.is_none() && every.is_none() && at.is_none() && tz.is_none();
        let policies = overlap.is_none() && catchup.is_none() && window.is_none();
        times && policies && jitter.is_none() && queue.is_none()
    }

    /// Returns these times, with those of `was` for every option that was left out.
    fn over(&self, was: ScheduleTimes) -> Result<ScheduleTimes, CommandError> {
        Ok(ScheduleTimes {
            timing: ScheduleTiming {
                rhythm: self.rhythm()?.unwrap_or(was.timing.rhythm),
                zone: self.tz.clone().unwrap_or(was.timing.zone),
                jitter_ms: self.jitter.map_or(was.timing.jitter_ms, ms),
            },
            overlap: self.overlap.unwrap_or(was.overlap),
            catch_up: self.catchup.unwrap_or(was.catch_up),
            window_ms: self.window.map_or(was.window_ms, ms),
            queue: self.queue.clone().unwrap_or(was.queue),
        })
    }
}

pub(super) fn add(arguments: &AddArguments) -> Result<(), CommandError> {
    let Some(rhythm) = arguments.times.rhythm()? else {
        let text = "give the times of the schedule: --cron, --every or --at".to_owned();
        return Err(CommandError::new(WRONG_CALL, text));
    };
    let body = body(&arguments.args, &arguments.kwargs)?;
    let broker = arguments.broker.find()?;
    let schedule = ScheduleName {
        app: arguments.app.clone(),
        name: arguments.name.clone(),
    };
    if look_up(&broker, &schedule)?.is_some() {
        let text = format!(
            "app {:?} already has a schedule {:?}; `penstock schedule edit` changes its times",
            schedule.app, schedule.name
        );
        return Err(CommandError::new(FAILED, text));
    }
    let times = arguments.times.over(ScheduleTimes {
        timing: ScheduleTiming {
            rhythm,
            zone: "UTC".to_owned(),
            jitter_ms: 0,
        },
        overlap: Overlap::default(),
        catch_up: CatchUp::default(),
        window_ms: WINDOW_MS,
        queue: "default".to_owned(),
    })?;
    let message = Message {
        id: MessageId::default(),
        task: arguments.task.clone(),
        priority: DEFAULT_PRIORITY,
        expires_at: None,
        result_ttl_ms: Some(RESULT_TTL_MS),
        max_deliveries: MAX_CRASHES,
        attempt: 0,
        crashes: 0,
        enqueued_at: 0,
        notes: Vec::new(),
        body: body.into(),
        extras: None,
    };
    let step = ScheduleStep::Set(Box::new(SchedulePlan::new(times, message)));
    broker.commit(Op::Schedule {
        schedule: schedule.clone(),
        step,
    })?;
    tell(&broker, &schedule, "added", arguments.json)
}

pub(super) fn edit(arguments: &EditArguments) -> Result<(), CommandError> {
    let (one, times) = (&arguments.one, &arguments.times);
    if times.is_empty() {
        let text = "give at least one change, such as --every 5m or --overlap queue".to_owned();
        return Err(CommandError::new(WRONG_CALL, text));
    }
    let broker = one.broker.find()?;
    let info = one.look_up(&broker)?;
    let schedule = info.name.clone();
    let times = times.over(ScheduleTimes {
        timing: info.timing,
        overlap: info.overlap,
        catch_up: info.catch_up,
        window_ms: info.window_ms,
        queue: info.queue,
    })?;
    broker.commit(Op::Schedule {
        schedule: schedule.clone(),
        step: ScheduleStep::Retime(Box::new(times)),
    })?;
    tell(&broker, &schedule, "changed", one.json)
}

/// Encodes the arguments of a job as `penstock/_values/envelope.py` does.
fn body(args: &str, kwargs: &str) -> Result<Vec<u8>, CommandError> {
    let args: Vec<Value> = read("--args", "a JSON array, such as '[\"de\", 3]'", args)?;
    let kwargs: Map<String, Value> = read(
        "--kwargs",
        "a JSON object, such as '{\"country\": \"de\"}'",
        kwargs,
    )?;
    rmp_serde::to_vec(&(args, kwargs))
        .map_err(|error| CommandError::new(WRONG_CALL, format!("the arguments: {error}")))
}

fn read<T: serde::de::DeserializeOwned>(
    what: &str,
    wanted: &str,
    text: &str,
) -> Result<T, CommandError> {
    serde_json::from_str(text)
        .map_err(|error| CommandError::new(WRONG_CALL, format!("{what} must be {wanted}: {error}")))
}

fn look_up(
    broker: &RemoteBroker,
    schedule: &ScheduleName,
) -> Result<Option<ScheduleInfo>, CommandError> {
    let query = SchedulesQuery {
        app: Some(schedule.app.clone()),
        name: Some(schedule.name.clone()),
        after: None,
        times: TIMES,
    };
    Ok(page(broker, query)?.schedules.pop())
}

/// Reports the present state of a schedule.
fn tell(
    broker: &RemoteBroker,
    schedule: &ScheduleName,
    done: &str,
    as_json: bool,
) -> Result<(), CommandError> {
    let Some(info) = look_up(broker, schedule)? else {
        return Err(CommandError::new(
            FAILED,
            "the schedule was removed in the meantime".to_owned(),
        ));
    };
    if as_json {
        return show_json(&fields_of_schedule(&info));
    }
    let next = match info.next.first() {
        _ if info.is_paused => "paused".to_owned(),
        Some(next) => format!("next {}", format_time(now_ms(), *next)),
        None => "no more times".to_owned(),
    };
    let name = printable(&info.name.name);
    show(&format!("{name}: {done}, {}; {next}\n", when(&info)))
}
