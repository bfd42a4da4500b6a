//! Schedules against an oracle: a wall clock that is read in every minute of six years.
//!
//! The oracle knows nothing of gaps and overlaps. It sees local times, one per minute, and
//!
//! - a line that follows elapsed time fires in each minute whose local time matches;
//! - a fixed time fires in the first minute in which the clock shows it or a later one, and two in one minute are one.
//!
//! Lines are generated as sets of numbers, and written as text for the code under test.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use jiff::tz::TimeZoneDatabase;
use penstock_message::{Rhythm, ScheduleTiming};
use penstock_schedule::{Calendar, mix};

const MINUTE_MS: u64 = 60_000;
const DAY: i64 = 24 * 60;

fn timing(line: &str, zone: &str) -> ScheduleTiming {
    ScheduleTiming {
        rhythm: Rhythm::Cron(line.to_owned()),
        zone: zone.to_owned(),
        jitter_ms: 0,
    }
}

/// Cron field as a set and as text.
#[derive(Clone)]
struct FieldSet {
    text: String,
    set: BTreeSet<i64>,
}

impl FieldSet {
    fn any(first: i64, last: i64) -> Self {
        Self {
            text: "*".to_owned(),
            set: (first..=last).collect(),
        }
    }

    fn of(text: &str, set: impl IntoIterator<Item = i64>) -> Self {
        Self {
            text: text.to_owned(),
            set: set.into_iter().collect(),
        }
    }

    /// Draws a random field.
    fn drawn(draw: &mut impl FnMut(u64) -> u64, first: i64, last: i64) -> Self {
        let span = (last - first + 1) as u64;
        let mut number = |below: u64| draw(below) as i64;
        match number(5) {
            0 => Self::any(first, last),
            1 => {
                let step = 1 + number(span - 1);
                let set = (first..=last).filter(|it| (it - first) % step == 0);
                Self::of(&format!("*/{step}"), set)
            }
            2 => {
                let (one, other) = (first + number(span), first + number(span));
                let (from, to) = (one.min(other), one.max(other));
                Self::of(&format!("{from}-{to}"), from..=to)
            }
            3 => {
                let (one, other) = (first + number(span), first + number(span));
                let (from, to) = (one.min(other), one.max(other));
                let step = 1 + number(6);
                let set = (from..=to).filter(|it| (it - from) % step == 0);
                Self::of(&format!("{from}-{to}/{step}"), set)
            }
            _ => {
                let set: Vec<i64> = (0..1 + number(3)).map(|_| first + number(span)).collect();
                let mut text = String::new();
                for it in &set {
                    let _ = write!(text, "{}{it}", if text.is_empty() { "" } else { "," });
                }
                Self::of(&text, set)
            }
        }
    }
}

struct CronLine {
    minute: FieldSet,
    hour: FieldSet,
    day: FieldSet,
    month: FieldSet,
    weekday: FieldSet,
}

impl CronLine {
    fn daily(minute: FieldSet, hour: FieldSet) -> Self {
        Self {
            minute,
            hour,
            day: FieldSet::any(1, 31),
            month: FieldSet::any(1, 12),
            weekday: FieldSet::any(0, 6),
        }
    }

    fn text(&self) -> String {
        let fields = [
            &self.minute,
            &self.hour,
            &self.day,
            &self.month,
            &self.weekday,
        ];
        fields.map(|field| field.text.as_str()).join(" ")
    }

    fn follows_elapsed_time(&self) -> bool {
        let text = format!("{}{}", self.minute.text, self.hour.text);
        text.contains('*') || text.contains('/')
    }

    fn has_day(&self, day: i64) -> bool {
        let date = jiff::civil::date(1970, 1, 1)
            .checked_add(jiff::Span::new().days(day))
            .unwrap();
        let is_day = self.day.set.contains(&i64::from(date.day()));
        let is_weekday = self.weekday.set.contains(&((day + 4) % 7));
        let is_any = |field: &FieldSet| field.text.starts_with('*');
        self.month.set.contains(&i64::from(date.month()))
            && match is_any(&self.day) || is_any(&self.weekday) {
                true => is_day && is_weekday,
                false => is_day || is_weekday,
            }
    }

    /// Returns the matching local minutes of a day, independent of any clock.
    fn of_day(&self, day: i64) -> Vec<i64> {
        if !self.has_day(day) {
            return Vec::new();
        }
        let hours = self.hour.set.iter();
        let times = hours.flat_map(|hour| {
            let minutes = self.minute.set.iter();
            minutes.map(move |minute| day * DAY + hour * 60 + minute)
        });
        times.collect()
    }
}

/// Wall clock: the local minute at each minute of UTC.
struct WallClock {
    first: i64,
    shows: Vec<i64>,
}

impl WallClock {
    fn of(zone: &str) -> Self {
        let zone = TimeZoneDatabase::bundled().get(zone).unwrap();
        let minute = |year| jiff::civil::date(year, 1, 1).at(0, 0, 0, 0);
        let utc = jiff::tz::TimeZone::UTC;
        let [first, last] = [2024, 2030].map(|year| {
            let moment = utc.to_timestamp(minute(year)).unwrap();
            moment.as_second() / 60
        });
        let shows = (first..last).map(|minute| {
            let moment = jiff::Timestamp::from_second(minute * 60).unwrap();
            minute + i64::from(zone.to_offset(moment).seconds()) / 60
        });
        Self {
            first,
            shows: shows.collect(),
        }
    }

    fn times(&self, line: &CronLine) -> Vec<u64> {
        match line.follows_elapsed_time() {
            true => self.elapsed_times(line),
            false => self.fixed_times(line),
        }
    }

    fn elapsed_times(&self, line: &CronLine) -> Vec<u64> {
        let mut times = Vec::new();
        let (mut day, mut of_day) = (i64::MIN, BTreeSet::new());
        for (minute, local) in (self.first..).zip(&self.shows) {
            if local.div_euclid(DAY) != day {
                day = local.div_euclid(DAY);
                of_day = line.of_day(day).into_iter().collect();
            }
            if of_day.contains(local) {
                times.push(minute as u64 * MINUTE_MS);
            }
        }
        times
    }

    fn fixed_times(&self, line: &CronLine) -> Vec<u64> {
        let begin = self.shows[0];
        let end = *self.shows.last().unwrap();
        let days = begin.div_euclid(DAY)..=end.div_euclid(DAY);
        let mut wanted = days
            .flat_map(|day| line.of_day(day))
            .filter(|time| *time >= begin);
        let mut next = wanted.next();
        let mut times = Vec::new();
        for (minute, local) in (self.first..).zip(&self.shows) {
            while next.is_some_and(|time| time <= *local) {
                let moment = minute as u64 * MINUTE_MS;
                if times.last() != Some(&moment) {
                    times.push(moment);
                }
                next = wanted.next();
            }
        }
        times
    }
}

fn lines() -> Vec<CronLine> {
    let minute = |minute: i64| FieldSet::of(&minute.to_string(), [minute]);
    let hour = minute;
    let mut lines = Vec::new();
    // Fixed times around all changes: at midnight, 1:45, 2 and 3.
    for (at_hour, at_minute) in [
        (0, 0),
        (0, 30),
        (1, 15),
        (1, 59),
        (2, 0),
        (2, 15),
        (2, 45),
        (3, 0),
        (23, 30),
    ] {
        lines.push(CronLine::daily(minute(at_minute), hour(at_hour)));
    }
    let lists = [
        ("0", vec![0], "1-3", vec![1, 2, 3]),
        ("0", vec![0], "2,3", vec![2, 3]),
        ("0", vec![0], "0,1", vec![0, 1]),
        ("0,30", vec![0, 30], "0-4", vec![0, 1, 2, 3, 4]),
        ("10-20", (10..=20).collect(), "2", vec![2]),
        ("5,35", vec![5, 35], "2,23", vec![2, 23]),
    ];
    for (minute, minutes, hour, hours) in lists {
        lines.push(CronLine::daily(
            FieldSet::of(minute, minutes),
            FieldSet::of(hour, hours),
        ));
    }
    let every = |step: i64, last: i64| {
        FieldSet::of(
            &format!("*/{step}"),
            (0..=last).filter(move |it| it % step == 0),
        )
    };
    lines.push(CronLine::daily(every(7, 59), FieldSet::any(0, 23)));
    lines.push(CronLine::daily(minute(0), FieldSet::any(0, 23)));
    lines.push(CronLine::daily(minute(15), every(2, 23)));
    lines.push(CronLine::daily(every(5, 59), hour(2)));
    lines.push(CronLine::daily(
        FieldSet::of("30-45/5", [30, 35, 40, 45]),
        hour(1),
    ));
    let (mut seed, mut count) = (1, 0);
    let mut draw = |below: u64| {
        seed = mix(seed);
        seed % below
    };
    while count < 12 {
        let line = CronLine {
            minute: FieldSet::drawn(&mut draw, 0, 59),
            hour: FieldSet::drawn(&mut draw, 0, 23),
            day: FieldSet::drawn(&mut draw, 1, 31),
            month: FieldSet::drawn(&mut draw, 1, 12),
            weekday: FieldSet::drawn(&mut draw, 0, 6),
        };
        lines.push(line);
        count += 1;
    }
    lines
}

/// Asks for each line's times one by one, and also from times in between.
fn check(zone: &str) {
    let clock = WallClock::of(zone);
    for line in lines() {
        let text = line.text();
        let calendar = Calendar::new(&timing(&text, zone), 0, 0).unwrap();
        let expected = clock.times(&line);
        let begin = clock.first as u64 * MINUTE_MS;
        let end = begin + clock.shows.len() as u64 * MINUTE_MS;
        let mut after = begin - 1;
        let found = std::iter::from_fn(|| {
            after = calendar.next(after)?;
            (after < end).then_some(after)
        });
        let mut compared = 0;
        for (found, expected) in found.zip(&expected) {
            assert_eq!(
                jiff::Timestamp::from_millisecond(found as i64)
                    .unwrap()
                    .to_string(),
                jiff::Timestamp::from_millisecond(*expected as i64)
                    .unwrap()
                    .to_string(),
                "{text:?} in {zone}",
            );
            compared += 1;
        }
        assert_eq!(
            compared,
            expected.len(),
            "{text:?} in {zone}: the number of times"
        );
        for (index, pair) in expected.windows(2).enumerate() {
            let between = pair[0] + mix(index as u64) % (pair[1] - pair[0]);
            assert_eq!(
                calendar.next(between),
                Some(pair[1]),
                "{text:?} in {zone} after {between}"
            );
        }
    }
}

macro_rules! zones {
    ($($test:ident: $zone:literal,)*) => {
        $(#[test] fn $test() { check($zone); })*
    };
}

zones! {
    an_hour_at_two_in_paris: "Europe/Paris",
    an_hour_at_two_in_new_york: "America/New_York",
    half_an_hour_on_lord_howe: "Australia/Lord_Howe",
    an_hour_at_a_quarter_to_three_on_chatham: "Pacific/Chatham",
    two_hours_in_troll: "Antarctica/Troll",
    an_hour_at_midnight_in_santiago: "America/Santiago",
    no_change_in_kathmandu: "Asia/Kathmandu",
}

#[test]
fn a_fixed_time_in_a_gap_comes_at_its_end_and_once_in_an_overlap() {
    let times = |line: &str, zone: &str, after: &str, count| {
        let calendar = Calendar::new(&timing(line, zone), 0, 0).unwrap();
        let after: jiff::Timestamp = after.parse().unwrap();
        let mut after = after.as_millisecond() as u64;
        let times = (0..count).map(|_| {
            after = calendar.next(after).unwrap();
            jiff::Timestamp::from_millisecond(after as i64)
                .unwrap()
                .to_string()
        });
        times.collect::<Vec<_>>()
    };
    let gap = times("30 2 * * *", "Europe/Paris", "2026-03-28T12:00:00Z", 2);
    assert_eq!(gap, ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]);
    let overlap = times("30 2 * * *", "Europe/Paris", "2026-10-24T12:00:00Z", 2);
    assert_eq!(overlap, ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]);
    let midnight = times("0 0 * * *", "America/Santiago", "2026-09-05T12:00:00Z", 2);
    assert_eq!(midnight, ["2026-09-06T04:00:00Z", "2026-09-07T03:00:00Z"]);
    let hourly = times("0 * * * *", "Europe/Paris", "2026-10-24T23:30:00Z", 3);
    assert_eq!(
        hourly,
        [
            "2026-10-25T00:00:00Z",
            "2026-10-25T01:00:00Z",
            "2026-10-25T02:00:00Z"
        ]
    );
}

#[test]
fn intervals_count_from_their_anchor_and_one_time_is_once() {
    let timing = |rhythm, jitter_ms| ScheduleTiming {
        rhythm,
        zone: "UTC".to_owned(),
        jitter_ms,
    };
    let every = Calendar::new(&timing(Rhythm::Every(60_000), 0), 1_000, 0).unwrap();
    assert_eq!(every.next(0), Some(61_000));
    assert_eq!(every.next(60_999), Some(61_000));
    assert_eq!(every.next(61_000), Some(121_000));
    let once = Calendar::new(&timing(Rhythm::At(5_000), 0), 0, 0).unwrap();
    assert_eq!(once.next(4_999), Some(5_000));
    assert_eq!(once.next(5_000), None);
    let jittered = Calendar::new(&timing(Rhythm::Every(60_000), 10_000), 0, 7).unwrap();
    let late: Vec<u64> = (1..20)
        .map(|n| jittered.due(n * 60_000) - n * 60_000)
        .collect();
    assert!(late.iter().all(|late| *late < 10_000));
    assert!(late.iter().collect::<BTreeSet<_>>().len() > 15, "{late:?}");
    for interval_ms in [0, 999, u64::MAX] {
        let error = Calendar::new(&timing(Rhythm::Every(interval_ms), 0), 0, 0).unwrap_err();
        assert!(
            error.contains("an interval must be between 1 second and 10 years"),
            "{error}"
        );
    }
    let unknown = ScheduleTiming {
        rhythm: Rhythm::Cron("@daily".to_owned()),
        zone: "Europe/Pariss".to_owned(),
        jitter_ms: 0,
    };
    let error = Calendar::new(&unknown, 0, 0).unwrap_err();
    assert!(
        error.contains("there is no time zone \"Europe/Pariss\""),
        "{error}"
    );
}
