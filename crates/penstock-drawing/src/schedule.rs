use penstock_message::{Rhythm, ScheduleInfo, Skipped};
use serde_json::{Value, json};

/// Returns the fields of a schedule, for programs.
pub fn fields_of_schedule(info: &ScheduleInfo) -> Value {
    let (cron, every_ms, at_ms) = match &info.timing.rhythm {
        Rhythm::Cron(line) => (Some(line), None, None),
        Rhythm::Every(ms) => (None, Some(*ms), None),
        Rhythm::At(at) => (None, None, Some(*at)),
    };
    let why = info.skipped.map(|(_, why)| match why {
        Skipped::Overlap => "overlap",
        Skipped::QueueFull => "queue_full",
        Skipped::Missed => "missed",
    });
    json!({
        "app": info.name.app,
        "name": info.name.name,
        "task": info.task,
        "queue": info.queue,
        "cron": cron,
        "every_ms": every_ms,
        "at_ms": at_ms,
        "zone": info.timing.zone,
        "jitter_ms": info.timing.jitter_ms,
        "overlap": info.overlap.name(),
        "catchup": info.catch_up.name(),
        "window_ms": info.window_ms,
        "paused": info.is_paused,
        "set": info.is_set,
        "declared": info.is_declared,
        "trouble": info.trouble,
        "next_ms": info.next,
        "last_ms": info.last.map(|(time, _)| time),
        "last_job": info.last.map(|(_, job)| job.to_string()),
        "skipped_ms": info.skipped.map(|(time, _)| time),
        "skipped_why": why,
        "running": info.is_running,
        "queued": info.is_queued,
        "fired": info.tally.fired,
        "skipped": info.tally.skipped,
        "missed": info.tally.missed,
    })
}
