//! Parses and formats times for people.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::{Span, SpanRelativeTo, Timestamp, Unit};

use crate::text::duration_ms;

/// Returns milliseconds since 1970 by this machine's clock.
pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_millis() as u64)
}

/// Reads a past moment: an age (`90s`, `30m`, `2h`, `7d`, `1d 12h`), or a time with its zone.
pub fn past_time(text: &str) -> Result<u64, String> {
    moment_before(text, now_ms()).ok_or_else(|| {
        "give an age such as 90s, 30m, 2h or 7d, or a time such as 2026-01-31T08:00:00Z".to_owned()
    })
}

fn moment_before(text: &str, now_ms: u64) -> Option<u64> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return u64::try_from(time.as_millisecond()).ok();
    }
    Some(now_ms.saturating_sub(span_ms(text)?))
}

/// Reads a future moment: a delay (`90s`, `30m`, `1d 12h`), or a time with its zone.
pub fn future_time(text: &str) -> Result<u64, String> {
    let at = match text.parse::<Timestamp>() {
        Ok(time) => u64::try_from(time.as_millisecond()).ok(),
        Err(_) => span_ms(text).map(|ms| now_ms().saturating_add(ms)),
    };
    at.ok_or_else(|| {
        "give a delay such as 90s, 30m or 2h, or a time such as 2030-01-31T08:00:00Z".to_owned()
    })
}

/// Reads a duration: `90s`, `30m`, `12h`, `1d 12h`.
pub fn duration(text: &str) -> Result<Duration, String> {
    match span_ms(text) {
        Some(ms) if ms > 0 => Ok(Duration::from_millis(ms)),
        _ => Err("give a duration with its unit, such as 90s, 30m or 12h".to_owned()),
    }
}

fn span_ms(text: &str) -> Option<u64> {
    let span: Span = text.parse().ok()?;
    let days = SpanRelativeTo::days_are_24_hours();
    let ms = span.total((Unit::Millisecond, days)).ok()?;
    (ms >= 0.0).then_some(ms as u64)
}

/// Formats an age, such as `3 min 20 s ago`. Clocks of two machines may differ, so nothing is in the future.
pub fn ago(now_ms: u64, then_ms: u64) -> String {
    format!("{} ago", duration_ms(now_ms.saturating_sub(then_ms)))
}

/// Formats a time in UTC to the second, with its age.
pub fn format_time(now_ms: u64, then_ms: u64) -> String {
    let time = i64::try_from(then_ms)
        .ok()
        .and_then(|ms| Timestamp::from_millisecond(ms).ok());
    match time.and_then(|time| time.round(Unit::Second).ok()) {
        Some(time) if then_ms <= now_ms => format!("{time} ({})", ago(now_ms, then_ms)),
        Some(time) => format!("{time} (in {})", duration_ms(then_ms - now_ms)),
        None => format!("{then_ms} ms after 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_so_long_ago_or_a_time_with_its_zone() {
        const NOW: u64 = 1_800_000_000_000;
        let check = |text: &str, expected: Option<u64>| {
            assert_eq!(moment_before(text, NOW), expected, "{text}");
        };
        check("90s", Some(NOW - 90_000));
        check("30m", Some(NOW - 1_800_000));
        check("2h", Some(NOW - 7_200_000));
        check("7d", Some(NOW - 604_800_000));
        check("1w", Some(NOW - 604_800_000));
        check("1d 12h", Some(NOW - 129_600_000));
        check("2026-01-31T08:00:00Z", Some(1_769_846_400_000));
        check("2026-01-31T09:00:00+01:00", Some(1_769_846_400_000));
        check("2026-01-31", None);
        check("yesterday", None);
        check("-2h", None);
        check("7", None);
        check("", None);
    }

    #[test]
    fn a_duration_has_its_unit() {
        let check = |text: &str, expected: Option<u64>| {
            let found = duration(text).map(|time| time.as_millis() as u64);
            assert_eq!(found.ok(), expected, "{text}");
        };
        check("90s", Some(90_000));
        check("1h 30m", Some(5_400_000));
        check("250ms", Some(250));
        check("0s", None);
        check("-1h", None);
        check("60", None);
        check("", None);
    }

    #[test]
    fn a_time_is_read_with_how_long_ago_it_is() {
        let then = 1_769_846_400_250;
        assert_eq!(
            format_time(then + 5_000, then),
            "2026-01-31T08:00:00Z (5.0 s ago)"
        );
        assert_eq!(
            format_time(then - 61_000, then),
            "2026-01-31T08:00:00Z (in 1 min 1 s)"
        );
    }
}
