//! Converts schedules between Python values and the broker's types.

use bytes::Bytes;
use penstock_drawing::fields_of_schedule;
use penstock_message::{
    AppRelease, AppVersion, CatchUp, Due, MessageId, Op, Overlap, Rhythm, ScheduleName,
    SchedulePlan, ScheduleStep, SchedulesPage,
};
use penstock_schedule::Calendar;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::ClientError;
use crate::options::Options;

/// Times and policies of a schedule, checked and frozen.
#[derive(Clone)]
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Timing {
    timing: penstock_message::ScheduleTiming,
    overlap: Overlap,
    catch_up: CatchUp,
    window_ms: u64,
}

#[pymethods]
impl Timing {
    #[new]
    #[pyo3(signature = (*, cron, every_ms, at_ms, zone, jitter_ms, overlap, catchup, window_ms))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        cron: Option<String>,
        every_ms: Option<u64>,
        at_ms: Option<u64>,
        zone: String,
        jitter_ms: u64,
        overlap: &str,
        catchup: &str,
        window_ms: u64,
    ) -> Result<Self, ClientError> {
        let rhythm = match (cron, every_ms, at_ms) {
            (Some(line), None, None) => Rhythm::Cron(line),
            (None, Some(ms), None) => Rhythm::Every(ms),
            (None, None, Some(at)) => Rhythm::At(at),
            _ => {
                let why = "a schedule needs exactly one of a cron line, every= and at=";
                return Err(ClientError::invalid(why));
            }
        };
        let timing = penstock_message::ScheduleTiming {
            rhythm,
            zone,
            jitter_ms,
        };
        Calendar::new(&timing, 0, 0).map_err(ClientError::invalid)?;
        let overlaps = Overlap::ALL.map(|overlap| (overlap, overlap.name()));
        let catch_ups = CatchUp::ALL.map(|catch_up| (catch_up, catch_up.name()));
        Ok(Self {
            timing,
            overlap: one_of("overlap", &overlaps, overlap)?,
            catch_up: one_of("catchup", &catch_ups, catchup)?,
            window_ms,
        })
    }
}

fn one_of<T: Copy>(what: &str, all: &[(T, &str)], wanted: &str) -> Result<T, ClientError> {
    let found = all.iter().find(|(_, name)| *name == wanted);
    found.map(|(one, _)| *one).ok_or_else(|| {
        let names: Vec<String> = all.iter().map(|(_, name)| format!("{name:?}")).collect();
        let names = names.join(", ");
        ClientError::invalid(format!("{what} must be one of {names}, not {wanted:?}"))
    })
}

impl Timing {
    fn plan(&self, options: &Options, body: Bytes) -> Result<SchedulePlan, ClientError> {
        let (queue, message, due) = options.message(MessageId::default(), body);
        if due.is_some() {
            let why = "the schedule sets the times of its jobs: leave out countdown and eta";
            return Err(ClientError::invalid(why));
        }
        if matches!(message.expires_at, Some(Due::At(_))) {
            let why = "jobs of a schedule expire after a duration: give expires in seconds";
            return Err(ClientError::invalid(why));
        }
        Ok(SchedulePlan {
            timing: self.timing.clone(),
            overlap: self.overlap,
            catch_up: self.catch_up,
            window_ms: self.window_ms,
            queue,
            message,
        })
    }
}

/// Version of an app.
#[derive(FromPyObject)]
pub(crate) enum VersionGiven {
    Number(u64),
    Text(String),
}

/// Returns the declaration of a schedule by code, for a worker to send.
#[pyfunction]
#[pyo3(signature = (app, name, timing, options, body, version, started_ms))]
pub(crate) fn declare_schedule(
    app: String,
    name: String,
    timing: &Timing,
    options: &Options,
    body: &Bound<'_, PyBytes>,
    version: Option<VersionGiven>,
    started_ms: u64,
) -> Result<String, ClientError> {
    let plan = timing.plan(options, Bytes::copy_from_slice(body.as_bytes()))?;
    let generation = AppRelease {
        version: match version {
            None => AppVersion::Unnamed,
            Some(VersionGiven::Number(number)) => AppVersion::Number(number),
            Some(VersionGiven::Text(text)) => AppVersion::Text(text),
        },
        started_at: started_ms,
    };
    Ok(penstock_wire::hex_of_op(Op::Schedule {
        schedule: ScheduleName { app, name },
        step: ScheduleStep::Declare(Box::new(plan), generation),
    }))
}

/// Returns the operation that changes a schedule.
pub(crate) fn order(
    schedule: ScheduleName,
    order: &str,
    set: Option<(&Timing, &Options, Bytes)>,
) -> Result<Op, ClientError> {
    let step = match (order, set) {
        ("set", Some((timing, options, body))) => {
            ScheduleStep::Set(Box::new(timing.plan(options, body)?))
        }
        ("pause", None) => ScheduleStep::Pause,
        ("resume", None) => ScheduleStep::Resume,
        ("run", None) => ScheduleStep::Run,
        ("reset", None) => ScheduleStep::Reset,
        ("remove", None) => return Ok(Op::Unschedule { schedule }),
        _ => {
            return Err(ClientError::invalid(format!(
                "{order:?} is not an order for a schedule"
            )));
        }
    };
    Ok(Op::Schedule { schedule, step })
}

/// Returns a page as (schedules as JSON, name of the next page's start).
pub(crate) fn page(page: &SchedulesPage) -> (Vec<String>, Option<String>) {
    let schedules = page.schedules.iter();
    let schedules = schedules.map(|schedule| fields_of_schedule(schedule).to_string());
    (
        schedules.collect(),
        page.next.as_ref().map(|next| next.name.clone()),
    )
}
