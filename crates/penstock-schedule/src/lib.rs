//! Times of schedules: pure functions of a rule, a time zone and a time. No clock, no files.
//!
//! ```text
//!     Calendar::new(&timing, anchor, seed)?     a rule that was checked
//!     calendar.next(after)                      its first time after this one
//!     calendar.due(time)                        that time with its jitter
//! ```
//!
//! A time's identity is the time before its jitter. All are milliseconds since the Unix epoch.

mod civil;
mod cron;

use std::collections::VecDeque;

use jiff::tz::{TimeZone, TimeZoneDatabase};
use penstock_message::{Rhythm, ScheduleTiming};

use cron::Cron;

/// Shortest interval, and shortest `every`.
pub const SHORTEST_MS: u64 = 1_000;
/// Longest interval: ten years.
const LONGEST_MS: u64 = 10 * 366 * 24 * 60 * 60 * 1000;
/// Maximum of cron times that are passed over in one call.
const PASSED_AT_ONCE: usize = 4_096;
/// Longest jitter: a day.
const LONGEST_JITTER_MS: u64 = 24 * 60 * 60 * 1000;

/// Checked rule for times.
#[derive(Debug)]
pub struct Calendar {
    rule: Rule,
    jitter_ms: u64,
    seed: u64,
}

#[derive(Debug)]
enum Rule {
    Cron(Box<(Cron, TimeZone)>),
    /// Multiples of the interval after the anchor, without the anchor itself.
    Every {
        anchor: u64,
        interval_ms: u64,
    },
    At(u64),
}

impl Calendar {
    /// Reads a rule. `anchor`: the time that intervals count from. `seed`: the seed of the jitter. The error is one
    /// sentence for people.
    pub fn new(timing: &ScheduleTiming, anchor: u64, seed: u64) -> Result<Self, String> {
        // An interval uses no zone, but a wrong one is an error anyway.
        let zone = zone(&timing.zone)?;
        let rule = match &timing.rhythm {
            Rhythm::Cron(line) => Rule::Cron(Box::new((Cron::parse(line)?, zone))),
            Rhythm::Every(interval_ms @ SHORTEST_MS..=LONGEST_MS) => {
                let interval_ms = *interval_ms;
                Rule::Every {
                    anchor,
                    interval_ms,
                }
            }
            Rhythm::Every(interval_ms) => {
                return Err(format!(
                    "an interval must be between 1 second and 10 years, not {} seconds",
                    *interval_ms as f64 / 1000.0
                ));
            }
            Rhythm::At(at) => Rule::At(*at),
        };
        if timing.jitter_ms > LONGEST_JITTER_MS {
            return Err(format!(
                "a jitter must be at most a day, not {} seconds",
                timing.jitter_ms / 1000
            ));
        }
        Ok(Self {
            rule,
            jitter_ms: timing.jitter_ms,
            seed,
        })
    }

    /// Returns the first time after this one; `None`: there is none.
    pub fn next(&self, after: u64) -> Option<u64> {
        match &self.rule {
            Rule::Cron(it) => civil::next(&it.0, &it.1, after),
            Rule::Every {
                anchor,
                interval_ms,
            } => {
                let passed = after.saturating_sub(*anchor) / interval_ms;
                anchor.checked_add(interval_ms.checked_mul(passed + 1)?)
            }
            Rule::At(at) => (*at > after).then_some(*at),
        }
    }

    /// Counts times after `after`, up to `until`, and returns the last of them. Stops after a few thousand.
    pub fn pass(&self, after: u64, until: u64) -> (u64, u64) {
        self.pass_but(after, until, 0)
    }

    /// Counts like `pass`, but without the last `kept` times.
    pub fn pass_but(&self, after: u64, until: u64, kept: u64) -> (u64, u64) {
        if let Rule::Every { interval_ms, .. } = self.rule {
            let Some(first) = self.next(after).filter(|first| *first <= until) else {
                return (0, after);
            };
            let count = ((until - first) / interval_ms + 1).saturating_sub(kept);
            return (
                count,
                first.wrapping_add(count.wrapping_sub(1).wrapping_mul(interval_ms)),
            );
        }
        let mut passed = VecDeque::new();
        let (mut count, mut last) = (0, after);
        let mut from = after;
        for _ in 0..PASSED_AT_ONCE {
            let Some(time) = self.next(from).filter(|time| *time <= until) else {
                break;
            };
            from = time;
            passed.push_back(time);
            if passed.len() as u64 > kept {
                count += 1;
                last = passed.pop_front().unwrap_or(time);
            }
        }
        (count, last)
    }

    /// Returns the time of this time's job: later by up to the jitter, and always the same.
    pub fn due(&self, time: u64) -> u64 {
        match self.jitter_ms {
            0 => time,
            jitter_ms => time + mix(self.seed ^ time) % jitter_ms,
        }
    }
}

/// Returns a time zone by its IANA name.
fn zone(name: &str) -> Result<TimeZone, String> {
    let unknown =
        |_| format!("there is no time zone {name:?}: name one such as \"Europe/Paris\" or \"UTC\"");
    TimeZoneDatabase::bundled().get(name).map_err(unknown)
}

/// Returns a number that looks random and depends only on its input (splitmix64). It outlives a broker: the jitter of a
/// time and the id of its job must be the same under the next broker.
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Hashes a text (FNV-1a); as stable as `mix`.
pub fn seed_of(parts: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        // A byte that occurs in no text separates them.
        for byte in part.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    mix(hash)
}
