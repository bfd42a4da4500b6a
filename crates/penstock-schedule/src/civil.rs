//! Converts local times to moments, also at changes of daylight saving time.
//!
//! | line | in a gap | in an overlap |
//! | --- | --- | --- |
//! | fixed times: `30 2 * * *`, `0 1-3 * * *` | at the end of the gap; several at that moment are one | the first time only |
//! | elapsed time: `*/5 * * * *`, a `*` or `/` in minute or hour | skipped | both times |

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};

use crate::cron::Cron;

/// Returns the first time after this one.
pub(crate) fn next(cron: &Cron, zone: &TimeZone, after: u64) -> Option<u64> {
    let after = Timestamp::from_millisecond(i64::try_from(after).ok()?).ok()?;
    let next = match cron.is_elapsed {
        true => next_elapsed(cron, zone, after),
        false => next_fixed(cron, zone, after),
    };
    u64::try_from(next?.as_millisecond()).ok()
}

/// Searches the fixed times of the days: their moments never run backwards.
fn next_fixed(cron: &Cron, zone: &TimeZone, after: Timestamp) -> Option<Timestamp> {
    let mut local = zone.to_datetime(after);
    loop {
        local = cron.next(local)?;
        let moment = moment_of(zone, local)?;
        if moment > after {
            return Some(moment);
        }
        local = a_minute_later(local)?;
    }
}

fn moment_of(zone: &TimeZone, local: DateTime) -> Option<Timestamp> {
    match zone.to_ambiguous_timestamp(local).offset() {
        AmbiguousOffset::Unambiguous { offset } => offset.to_timestamp(local).ok(),
        AmbiguousOffset::Fold { before, .. } => before.to_timestamp(local).ok(),
        AmbiguousOffset::Gap { before, .. } => {
            // By the clock before the change, the moment is after it.
            let behind = before.to_timestamp(local).ok()?;
            let change = zone
                .preceding(behind + jiff::SignedDuration::from_secs(1))
                .next()?;
            Some(change.timestamp())
        }
    }
}

/// Searches the times between two clock changes, where a local time is one moment.
fn next_elapsed(cron: &Cron, zone: &TimeZone, after: Timestamp) -> Option<Timestamp> {
    let minute = after.as_second().div_euclid(60) + 1;
    let mut from = Timestamp::from_second(minute * 60).ok()?;
    // Number of days after which the rule's calendar repeats, with two clock changes a year.
    for _ in 0..1_000 {
        let offset: Offset = zone.to_offset(from);
        let change = zone.following(from).next();
        let local = from_next_minute(offset.to_datetime(from))?;
        let moment = offset.to_timestamp(cron.next(local)?).ok();
        match (moment, change) {
            (Some(moment), None) => return Some(moment),
            (Some(moment), Some(change)) if moment < change.timestamp() => return Some(moment),
            (_, Some(change)) => from = change.timestamp(),
            (None, None) => return None,
        }
    }
    None
}

/// Returns this minute if it has just begun, or the next one.
fn from_next_minute(local: DateTime) -> Option<DateTime> {
    match local.second() {
        0 => Some(local),
        _ => a_minute_later(local.with().second(0).build().ok()?),
    }
}

fn a_minute_later(local: DateTime) -> Option<DateTime> {
    local.checked_add(jiff::SignedDuration::from_secs(60)).ok()
}
