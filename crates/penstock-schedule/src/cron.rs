//! Five fields of cron, as Vixie's cron reads them.

use jiff::civil::{Date, DateTime};

/// Cron expression that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cron {
    minutes: u64,
    hours: u64,
    days: u64,
    months: u64,
    /// Days of the week; Sunday is 0.
    weekdays: u64,
    /// Whether both fields for days must match, because one of them begins with `*`; otherwise either does.
    needs_both_days: bool,
    /// Whether it follows elapsed time, like `*/5 * * * *`. A fixed time of day, like `30 2 * * *`, comes once a day.
    pub(crate) is_elapsed: bool,
}

struct CronField {
    name: &'static str,
    first: u64,
    last: u64,
    names: &'static [&'static str],
}

const MONTHS: &[&str] = &[
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];
const WEEKDAYS: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
const FIELDS: [CronField; 5] = [
    CronField {
        name: "minute",
        first: 0,
        last: 59,
        names: &[],
    },
    CronField {
        name: "hour",
        first: 0,
        last: 23,
        names: &[],
    },
    CronField {
        name: "day of the month",
        first: 1,
        last: 31,
        names: &[],
    },
    CronField {
        name: "month",
        first: 1,
        last: 12,
        names: MONTHS,
    },
    CronField {
        name: "day of the week",
        first: 0,
        last: 7,
        names: WEEKDAYS,
    },
];
/// Years after which the calendar repeats, including days of the week.
const YEARS: i16 = 400;
/// Maximum length of an expression.
const CAP_BYTES: usize = 500;

impl Cron {
    pub(crate) fn parse(line: &str) -> Result<Self, String> {
        if line.len() > CAP_BYTES {
            return Err(format!(
                "a cron line has at most {CAP_BYTES} bytes, not {}",
                line.len()
            ));
        }
        let wrong = |why: String| format!("the cron line {line:?} is wrong: {why}");
        let trimmed = line.trim();
        let expanded = match trimmed.strip_prefix('@') {
            None => trimmed,
            Some(word) => match word.to_ascii_lowercase().as_str() {
                "hourly" => "0 * * * *",
                "daily" | "midnight" => "0 0 * * *",
                "weekly" => "0 0 * * 0",
                "monthly" => "0 0 1 * *",
                "yearly" | "annually" => "0 0 1 1 *",
                _ => {
                    let why = "it is none of @hourly, @daily, @weekly, @monthly and @yearly";
                    return Err(wrong(why.to_owned()));
                }
            },
        };
        let fields: Vec<&str> = expanded.split_ascii_whitespace().collect();
        let &[minute, hour, day, month, weekday] = fields.as_slice() else {
            let seconds = match fields.len() {
                6.. => "; for seconds, use every=",
                _ => "",
            };
            let count = match fields.len() {
                1 => "1 field".to_owned(),
                count => format!("{count} fields"),
            };
            return Err(wrong(format!(
                "it has {count} instead of five, which are minute, hour, day of the month, month and day of the \
                 week{seconds}"
            )));
        };
        let texts = [minute, hour, day, month, weekday];
        let mut sets = [0_u64; 5];
        for ((set, text), field) in sets.iter_mut().zip(texts).zip(&FIELDS) {
            *set = field.parse(text).map_err(wrong)?;
        }
        let [minutes, hours, days, months, weekdays] = sets;
        let cron = Self {
            minutes,
            hours,
            days,
            months,
            // Sunday has two numbers.
            weekdays: (weekdays | weekdays >> 7) & 0x7f,
            needs_both_days: day.starts_with('*') || weekday.starts_with('*'),
            is_elapsed: [minute, hour].iter().any(|text| text.contains(['*', '/'])),
        };
        match cron.next(jiff::civil::datetime(2000, 1, 1, 0, 0, 0, 0)) {
            Some(_) => Ok(cron),
            None => Err(wrong(
                "no month that it names has that day, so it never fires".to_owned(),
            )),
        }
    }

    /// Returns the first matching time from this one on, on a clock without changes.
    pub(crate) fn next(&self, from: DateTime) -> Option<DateTime> {
        let mut date = from.date();
        let (mut hour, mut minute) = (from.hour(), from.minute());
        let last_year = date.year().saturating_add(YEARS);
        loop {
            if date.year() > last_year {
                return None;
            }
            if self.months >> date.month() & 1 == 0 {
                date = first_of_next_month(date)?;
            } else if self.has_day(date) {
                if let Some((hour, minute)) = self.next_in_day(hour, minute) {
                    return Some(date.at(hour, minute, 0, 0));
                }
                date = date.tomorrow().ok()?;
            } else {
                date = date.tomorrow().ok()?;
            }
            (hour, minute) = (0, 0);
        }
    }

    fn has_day(&self, date: Date) -> bool {
        let is_day = self.days >> date.day() & 1 == 1;
        let weekday = date.weekday().to_sunday_zero_offset();
        let is_weekday = self.weekdays >> weekday & 1 == 1;
        match self.needs_both_days {
            true => is_day && is_weekday,
            false => is_day || is_weekday,
        }
    }

    fn next_in_day(&self, hour: i8, minute: i8) -> Option<(i8, i8)> {
        if self.hours >> hour & 1 == 1
            && let Some(minute) = next_in(self.minutes, minute)
        {
            return Some((hour, minute));
        }
        Some((next_in(self.hours, hour + 1)?, next_in(self.minutes, 0)?))
    }
}

/// Returns the first number in the set from this one on.
fn next_in(set: u64, from: i8) -> Option<i8> {
    let left = set >> from << from;
    (left != 0).then(|| left.trailing_zeros() as i8)
}

fn first_of_next_month(date: Date) -> Option<Date> {
    date.last_of_month().tomorrow().ok()
}

impl CronField {
    /// Reads a list of numbers, ranges and steps as a set of bits.
    fn parse(&self, text: &str) -> Result<u64, String> {
        text.split(',')
            .try_fold(0, |set, part| Ok(set | self.parse_part(part)?))
    }

    fn parse_part(&self, part: &str) -> Result<u64, String> {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => (range, Some(step)),
            None => (part, None),
        };
        let (first, last) = match range.split_once('-') {
            _ if range == "*" => (self.first, self.last),
            Some((first, last)) => (self.number(first)?, self.number(last)?),
            None if step.is_some() => {
                return Err(format!(
                    "{part:?} has a step without a range: write */n, or {range}-{}/n",
                    self.last
                ));
            }
            None => {
                let number = self.number(range)?;
                (number, number)
            }
        };
        if first > last {
            return Err(format!("the range {range:?} runs backwards"));
        }
        let step = match step.map(str::parse::<usize>) {
            None => 1,
            Some(Ok(step)) if step > 0 && step as u64 <= self.last => step,
            Some(_) => {
                return Err(format!(
                    "the step of {part:?} is not between 1 and {}",
                    self.last
                ));
            }
        };
        Ok((first..=last)
            .step_by(step)
            .fold(0, |set, bit| set | 1 << bit))
    }

    fn number(&self, text: &str) -> Result<u64, String> {
        let lower = text.to_ascii_lowercase();
        if let Some(index) = self.names.iter().position(|name| *name == lower) {
            return Ok(self.first + index as u64);
        }
        let digits = (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
            .then(|| text.parse::<u64>().ok());
        match digits.flatten() {
            Some(number) if (self.first..=self.last).contains(&number) => Ok(number),
            Some(number) => Err(format!(
                "{number} is not a valid {}: give {} to {}",
                self.name, self.first, self.last
            )),
            None if text.contains(['L', 'W', '#', '?', 'l', 'w']) => Err(format!(
                "{text:?} is not offered: L, W, # and ? have no place in the {}",
                self.name
            )),
            None => Err(format!("{text:?} is not a valid {}", self.name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_lines_are_one_clear_error() {
        let told = [
            ("* * * *", "it has 4 fields instead of five"),
            (
                "0 * * * * *",
                "it has 6 fields instead of five, which are minute, hour, day of the month, month and day of the week; \
                 for seconds, use every=",
            ),
            ("60 * * * *", "60 is not a valid minute: give 0 to 59"),
            ("* 24 * * *", "24 is not a valid hour: give 0 to 23"),
            (
                "0 0 0 * *",
                "0 is not a valid day of the month: give 1 to 31",
            ),
            (
                "0 0 30 2 *",
                "no month that it names has that day, so it never fires",
            ),
            ("0 0 31 4,6,9,11 *", "never fires"),
            ("5-1 * * * *", "the range \"5-1\" runs backwards"),
            ("*/0 * * * *", "the step of \"*/0\" is not between 1 and 59"),
            ("5/10 * * * *", "write */n, or 5-59/n"),
            ("0 0 L * *", "\"L\" is not offered"),
            ("0 0 * * 5#2", "\"5#2\" is not offered"),
            ("0 0 15W * *", "\"15W\" is not offered"),
            ("0 0 * * fry", "\"fry\" is not a valid day of the week"),
            ("@reboot", "it is none of @hourly"),
            ("", "it has 0 fields"),
            ("1,,2 * * * *", "\"\" is not a valid minute"),
            ("+1 * * * *", "\"+1\" is not a valid minute"),
        ];
        for (line, part) in told {
            let error = Cron::parse(line).unwrap_err();
            assert!(error.contains(part), "{line:?}: {error}");
            assert!(error.contains(&format!("{line:?}")), "{error}");
        }
    }

    #[test]
    fn names_and_nicknames_stand_for_numbers() {
        let alike = [
            ("@hourly", "0 * * * *"),
            ("@Daily", "0 0 * * *"),
            ("@weekly", "0 0 * * sun"),
            ("@monthly", "0 0 1 * *"),
            ("@yearly", "0 0 1 JAN *"),
            ("0 9 * * mon-fri", "0 9 * * 1-5"),
            ("0 9 * * 7", "0 9 * * 0"),
            ("0 9 * * 5-7", "0 9 * * 0,5,6"),
            ("0 9 * feb,Dec *", "0 9 * 2,12 *"),
        ];
        for (line, other) in alike {
            assert_eq!(Cron::parse(line), Cron::parse(other), "{line}");
        }
    }

    #[test]
    fn the_29th_of_february_is_found_also_on_one_day_of_the_week() {
        let cron = Cron::parse("0 12 29 2 */6").unwrap();
        let from = jiff::civil::date(2024, 3, 1).at(0, 0, 0, 0);
        assert_eq!(
            cron.next(from).unwrap(),
            jiff::civil::date(2032, 2, 29).at(12, 0, 0, 0)
        );
    }
}
