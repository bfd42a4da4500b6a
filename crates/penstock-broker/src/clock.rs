//! Two clocks. Countdowns and TTLs follow the *steady* one, which starts at the wall's time and never
//! steps; a time that a person named (an ETA) follows the *wall*, wherever that is set to.
//!
//! A steady clock stops with its broker. So the journal is told what it showed, and what the machine's own
//! clock showed at the same time, which nobody can set. Both go at the same pace, so one such pair is enough
//! for as long as the machine runs: the next broker adds what has passed since. After a new start of the
//! machine only the wall's clock has gone on; then the steady one is as far ahead of it as it was.

use penstock_faults::planted;
use penstock_message::Due;

use crate::{Boot, Now};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WhichClock {
    Steady,
    Wall,
}

/// A time that was decided, on the clock it follows; both count milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ClockTime {
    pub(crate) at: u64,
    pub(crate) clock: WhichClock,
}

impl ClockTime {
    pub(crate) fn steady(at: u64) -> Self {
        Self {
            at,
            clock: WhichClock::Steady,
        }
    }

    /// Returns the time when something is due that counts from this time on the steady clock.
    pub(crate) fn of(due: Due, from: u64) -> Self {
        match due {
            Due::AfterMs(ms) => Self::steady(from.saturating_add(ms)),
            Due::At(wall_ms) => Self {
                at: wall_ms,
                clock: match planted!("wrong-clock") {
                    true => WhichClock::Steady,
                    false => WhichClock::Wall,
                },
            },
        }
    }

    /// Like `of`, for the time at which a delayed message may start. The shell's milliseconds are rounded down, so "in 5
    /// ms" is not over before the sixth begins.
    pub(crate) fn of_start(due: Due, from: u64) -> Self {
        match due {
            Due::AfterMs(ms) if planted!("start-early") => {
                Self::of(Due::AfterMs(ms.saturating_sub(20)), from)
            }
            Due::AfterMs(ms) if ms > 0 => Self::of(Due::AfterMs(ms.saturating_add(1)), from),
            due => Self::of(due, from),
        }
    }
}

/// A timer must not be missed when the wall's clock is set forward while we sleep: so a sleep that
/// waits for the wall is at most this long.
const LONGEST_WALL_SLEEP_MS: u64 = 10_000;

/// A journal knows to this how far the steady clock is ahead of the wall's. A smaller difference is
/// made up of roundings, or of corrections so gentle that they are no steps.
const KNOWN_TO_MS: u64 = 100;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clocks {
    now: Now,
    /// Time of the steady clock at mono zero.
    steady_zero: u64,
    /// Lead of the steady clock over the wall's, as the journal knows it.
    journaled_ahead_ms: i64,
    /// Start of the machine that the journal knows of.
    journaled_boot: Option<[u8; 16]>,
}

/// The steady clock, as far as the journal knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KnownClocks {
    /// Lead over the wall's clock.
    ahead_ms: i64,
    /// The machine's clock, and the steady one at that time.
    pair: Option<(Boot, u64)>,
}

impl KnownClocks {
    pub(crate) fn set(&mut self, wall: u64, steady: u64) {
        self.ahead_ms = steady.wrapping_sub(wall) as i64;
        self.pair = None;
    }

    /// `wall`: that of the record, in which the steady clock stands before this.
    pub(crate) fn began(&mut self, boot: Boot, wall: u64) {
        self.pair = Some((boot, wall.saturating_add_signed(self.ahead_ms)));
    }
}

impl Clocks {
    /// The steady clock goes on from where it would be if the last broker still ran.
    pub(crate) fn resume(now: Now, known: &KnownClocks) -> Self {
        let steady = match (now.boot, known.pair) {
            (Some(boot), Some((then, steady)))
                if boot.id == then.id && !planted!("trust-the-wall") =>
            {
                steady.saturating_add(boot.ms.saturating_sub(then.ms))
            }
            _ => now.wall_ms.saturating_add_signed(known.ahead_ms),
        };
        Self {
            now,
            steady_zero: steady.saturating_sub(now.mono_ms),
            journaled_ahead_ms: known.ahead_ms,
            journaled_boot: known.pair.map(|(boot, _)| boot.id),
        }
    }

    /// Whether the journal must be told anew how the clocks stand: the wall's was set since this was asked
    /// last, or the machine was started.
    pub(crate) fn take_step(&mut self) -> bool {
        let ahead_ms = self.steady().wrapping_sub(self.wall()) as i64;
        let is_set = ahead_ms.abs_diff(self.journaled_ahead_ms) >= KNOWN_TO_MS;
        let boot = self.now.boot.map(|boot| boot.id);
        if !is_set && (boot.is_none() || boot == self.journaled_boot) {
            return false;
        }
        self.journaled_ahead_ms = ahead_ms;
        self.journaled_boot = boot;
        true
    }

    pub(crate) fn boot(&self) -> Option<Boot> {
        self.now.boot
    }

    /// Time never runs backwards on the monotonic clock, whatever the shell says.
    pub(crate) fn advance(&mut self, now: Now) {
        self.now = Now {
            mono_ms: self.now.mono_ms.max(now.mono_ms),
            wall_ms: now.wall_ms,
            boot: now.boot,
        };
    }

    pub(crate) fn mono(&self) -> u64 {
        self.now.mono_ms
    }

    pub(crate) fn wall(&self) -> u64 {
        self.now.wall_ms
    }

    /// A time on the steady clock as the wall's clock shows it, by what the journal knows of how far the
    /// two are apart: so the same time is shown alike each time, whatever roundings say.
    pub(crate) fn wall_at(&self, steady: u64) -> u64 {
        steady.wrapping_sub(self.journaled_ahead_ms as u64)
    }

    /// Returns a time as the wall's clock shows it.
    pub(crate) fn wall_of(&self, when: ClockTime) -> u64 {
        match when.clock {
            WhichClock::Steady => self.wall_at(when.at),
            WhichClock::Wall => when.at,
        }
    }

    pub(crate) fn steady(&self) -> u64 {
        self.steady_zero.saturating_add(self.now.mono_ms)
    }

    pub(crate) fn resolve(&self, due: Due) -> ClockTime {
        ClockTime::of(due, self.steady())
    }

    /// Returns the time at which a delayed message may start.
    pub(crate) fn resolve_start(&self, due: Due) -> ClockTime {
        ClockTime::of_start(due, self.steady())
    }

    pub(crate) fn has_come(&self, when: ClockTime) -> bool {
        match when.clock {
            WhichClock::Steady => when.at <= self.steady(),
            WhichClock::Wall => when.at <= self.wall(),
        }
    }

    /// Returns the time to look again, on the shell's monotonic clock.
    pub(crate) fn mono_deadline(&self, when: ClockTime) -> u64 {
        match when.clock {
            WhichClock::Steady => when.at.saturating_sub(self.steady_zero),
            WhichClock::Wall => {
                let wait_ms = when.at.saturating_sub(self.wall());
                self.now.mono_ms + wait_ms.min(LONGEST_WALL_SLEEP_MS)
            }
        }
    }
}
