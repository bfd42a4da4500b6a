//! Schedules: their changes, and their lists.

use bytes::Bytes;
use penstock_message::{
    AppRelease, AppVersion, CatchUp, Op, Overlap, Rhythm, ScheduleInfo, ScheduleName, SchedulePlan,
    ScheduleStep, ScheduleTally, ScheduleTimes, ScheduleTiming, SchedulesPage, SchedulesQuery,
    Skipped,
};

use super::{FromNumber, all, id_bytes, optional_id, wanted};
use crate::{WireError, proto};

impl From<ScheduleName> for proto::ScheduleName {
    fn from(name: ScheduleName) -> Self {
        let ScheduleName { app, name } = name;
        Self { app, name }
    }
}

impl From<proto::ScheduleName> for ScheduleName {
    fn from(wire: proto::ScheduleName) -> Self {
        let proto::ScheduleName { app, name } = wire;
        Self { app, name }
    }
}

pub(super) fn step_to_wire(schedule: ScheduleName, step: ScheduleStep) -> proto::Schedule {
    use proto::schedule::Step as Wire;
    proto::Schedule {
        schedule: Some(schedule.into()),
        step: Some(match step {
            ScheduleStep::Declare(plan, generation) => Wire::Declare(declared(*plan, generation)),
            ScheduleStep::Set(plan) => Wire::Set((*plan).into()),
            ScheduleStep::Retime(times) => Wire::Retime((*times).into()),
            ScheduleStep::Pause => Wire::Pause(true),
            ScheduleStep::Resume => Wire::Resume(true),
            ScheduleStep::Run => Wire::Run(true),
            ScheduleStep::Reset => Wire::Reset(true),
        }),
    }
}

fn declared(plan: SchedulePlan, generation: AppRelease) -> proto::Declared {
    use proto::declared::Version as Wire;
    proto::Declared {
        plan: Some(plan.into()),
        version: match generation.version {
            AppVersion::Unnamed => None,
            AppVersion::Number(number) => Some(Wire::Number(number)),
            AppVersion::Text(text) => Some(Wire::Text(text)),
        },
        started_at_ms: generation.started_at,
    }
}

/// Reads a change of a schedule; one of a newer protocol is `Unnamed`.
pub(super) fn step_from_wire(wire: proto::Schedule) -> Result<Op, WireError> {
    use proto::schedule::Step as Wire;
    let schedule = wanted(wire.schedule, "a schedule has no name")?.into();
    let Some(step) = wire.step else {
        return Ok(Op::Unnamed);
    };
    let step = match step {
        Wire::Declare(declared) => {
            use proto::declared::Version as Named;
            let plan = wanted(declared.plan, "a declaration has no plan")?;
            let generation = AppRelease {
                version: match declared.version {
                    None => AppVersion::Unnamed,
                    Some(Named::Number(number)) => AppVersion::Number(number),
                    Some(Named::Text(text)) => AppVersion::Text(text),
                },
                started_at: declared.started_at_ms,
            };
            ScheduleStep::Declare(Box::new(plan.try_into()?), generation)
        }
        Wire::Set(plan) => ScheduleStep::Set(Box::new(plan.try_into()?)),
        Wire::Retime(plan) => ScheduleStep::Retime(Box::new(plan.try_into()?)),
        Wire::Pause(_) => ScheduleStep::Pause,
        Wire::Resume(_) => ScheduleStep::Resume,
        Wire::Run(_) => ScheduleStep::Run,
        Wire::Reset(_) => ScheduleStep::Reset,
    };
    Ok(Op::Schedule { schedule, step })
}

impl From<ScheduleTiming> for proto::Timing {
    fn from(timing: ScheduleTiming) -> Self {
        use proto::timing::Rhythm as Wire;
        Self {
            rhythm: Some(match timing.rhythm {
                Rhythm::Cron(line) => Wire::Cron(line),
                Rhythm::Every(ms) => Wire::EveryMs(ms),
                Rhythm::At(at) => Wire::AtMs(at),
            }),
            zone: timing.zone,
            jitter_ms: timing.jitter_ms,
        }
    }
}

impl TryFrom<proto::Timing> for ScheduleTiming {
    type Error = WireError;

    fn try_from(wire: proto::Timing) -> Result<Self, WireError> {
        use proto::timing::Rhythm as Wire;
        Ok(Self {
            rhythm: match wanted(wire.rhythm, "a schedule has no times, or unknown ones")? {
                Wire::Cron(line) => Rhythm::Cron(line),
                Wire::EveryMs(ms) => Rhythm::Every(ms),
                Wire::AtMs(at) => Rhythm::At(at),
            },
            zone: wire.zone,
            jitter_ms: wire.jitter_ms,
        })
    }
}

impl From<ScheduleTimes> for proto::Plan {
    fn from(times: ScheduleTimes) -> Self {
        Self {
            timing: Some(times.timing.into()),
            overlap: proto::plan::Overlap::from(times.overlap).into(),
            catch_up: proto::plan::CatchUp::from(times.catch_up).into(),
            window_ms: times.window_ms,
            queue: times.queue,
            message: None,
        }
    }
}

impl TryFrom<proto::Plan> for ScheduleTimes {
    type Error = WireError;

    fn try_from(wire: proto::Plan) -> Result<Self, WireError> {
        Ok(Self {
            timing: wanted(wire.timing, "a plan has no times")?.try_into()?,
            overlap: Overlap::from_number(wire.overlap)?,
            catch_up: CatchUp::from_number(wire.catch_up)?,
            window_ms: wire.window_ms,
            queue: wire.queue,
        })
    }
}

impl From<SchedulePlan> for proto::Plan {
    fn from(plan: SchedulePlan) -> Self {
        let (times, message) = plan.into_parts();
        let mut wire = Self::from(times);
        wire.message = Some(message.into());
        wire
    }
}

impl TryFrom<proto::Plan> for SchedulePlan {
    type Error = WireError;

    fn try_from(mut wire: proto::Plan) -> Result<Self, WireError> {
        let message = wanted(wire.message.take(), "a plan has no message")?.try_into()?;
        Ok(Self::new(wire.try_into()?, message))
    }
}

impl From<SchedulesQuery> for proto::SchedulesQuery {
    fn from(query: SchedulesQuery) -> Self {
        Self {
            app: query.app,
            name: query.name,
            after: query.after.map(Into::into),
            times: query.times,
        }
    }
}

impl From<proto::SchedulesQuery> for SchedulesQuery {
    fn from(wire: proto::SchedulesQuery) -> Self {
        Self {
            app: wire.app,
            name: wire.name,
            after: wire.after.map(Into::into),
            times: wire.times,
        }
    }
}

impl From<SchedulesPage> for proto::SchedulesPage {
    fn from(page: SchedulesPage) -> Self {
        Self {
            schedules: page.schedules.into_iter().map(Into::into).collect(),
            next: page.next.map(Into::into),
        }
    }
}

impl TryFrom<proto::SchedulesPage> for SchedulesPage {
    type Error = WireError;

    fn try_from(wire: proto::SchedulesPage) -> Result<Self, WireError> {
        Ok(Self {
            schedules: all(wire.schedules)?,
            next: wire.next.map(Into::into),
        })
    }
}

impl From<ScheduleInfo> for proto::schedules_page::Schedule {
    fn from(info: ScheduleInfo) -> Self {
        let ScheduleTally {
            fired,
            skipped,
            missed,
        } = info.tally;
        let why = info.skipped.map(|(_, why)| why).unwrap_or_default();
        Self {
            schedule: Some(info.name.into()),
            timing: Some(info.timing.into()),
            overlap: proto::plan::Overlap::from(info.overlap).into(),
            catch_up: proto::plan::CatchUp::from(info.catch_up).into(),
            window_ms: info.window_ms,
            queue: info.queue,
            task: info.task,
            is_paused: info.is_paused,
            is_set: info.is_set,
            is_declared: info.is_declared,
            trouble: info.trouble,
            next_ms: info.next,
            last_ms: info.last.map(|(time, _)| time),
            last_job: info.last.map_or(Bytes::new(), |(_, job)| id_bytes(job)),
            skipped_ms: info.skipped.map(|(time, _)| time),
            skipped_why: proto::schedules_page::Why::from(why).into(),
            is_running: info.is_running,
            is_queued: info.is_queued,
            fired,
            skipped,
            missed,
        }
    }
}

impl TryFrom<proto::schedules_page::Schedule> for ScheduleInfo {
    type Error = WireError;

    fn try_from(wire: proto::schedules_page::Schedule) -> Result<Self, WireError> {
        let why = Skipped::from_number(wire.skipped_why)?;
        Ok(Self {
            name: wanted(wire.schedule, "a schedule has no name")?.into(),
            timing: wanted(wire.timing, "a schedule has no times")?.try_into()?,
            overlap: Overlap::from_number(wire.overlap)?,
            catch_up: CatchUp::from_number(wire.catch_up)?,
            window_ms: wire.window_ms,
            queue: wire.queue,
            task: wire.task,
            is_paused: wire.is_paused,
            is_set: wire.is_set,
            is_declared: wire.is_declared,
            trouble: wire.trouble,
            next: wire.next_ms,
            last: wire.last_ms.zip(optional_id(&wire.last_job)?),
            skipped: wire.skipped_ms.map(|time| (time, why)),
            is_running: wire.is_running,
            is_queued: wire.is_queued,
            tally: ScheduleTally {
                fired: wire.fired,
                skipped: wire.skipped,
                missed: wire.missed,
            },
        })
    }
}
