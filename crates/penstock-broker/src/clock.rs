//! Two clocks. Countdowns and TTLs follow the *steady* clock, which starts at the wall time and never steps. A time
//! that a person named (an ETA) follows the *wall* clock, whatever it is set to.
//!
//! A steady clock stops with its broker. So the journal records its time, together with the time of the machine's own
//! clock, which nobody can set. Both run at the same pace, so one such pair is enough until the machine restarts: the
//! next broker adds the time that has passed since. After a restart of the machine only the wall clock has continued.
//! The steady clock then resumes with the same lead over the wall clock as before.

use penstock_faults::planted;
use penstock_message::Due;

use crate::{Boot, Now};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WhichClock {
    Steady,
    Wall,
}

/// A decided time, on the clock that it follows. Both count milliseconds since the Unix epoch.
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

    /// Returns the time that is `due`, counted from `from` on the steady clock.
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

    /// Returns the time at which a delayed message may start. Like `of`, but the shell rounds milliseconds down, so "in
    /// 5 ms" ends only when the sixth begins.
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

/// Longest sleep that waits for the wall clock: a timer must not be missed when that clock is set forward during the
/// sleep.
const LONGEST_WALL_SLEEP_MS: u64 = 10_000;

/// Precision to which the journal knows the steady clock's lead over the wall clock. Smaller differences come from
/// rounding, or from corrections too gentle to be steps.
const KNOWN_TO_MS: u64 = 100;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clocks {
    now: Now,
    /// Steady time at zero of the monotonic clock.
    steady_zero: u64,
    /// Lead of the steady clock over the wall clock, as journaled.
    journaled_ahead_ms: i64,
    /// Last start of the machine that the journal knows.
    journaled_boot: Option<[u8; 16]>,
    /// Whether the journal of the last broker leads to other clocks than these.
    is_unrecorded: bool,
}

/// The steady clock as the journal knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KnownClocks {
    /// Lead over the wall clock.
    ahead_ms: i64,
    /// Time of the machine's clock, and the steady time at that moment.
    pair: Option<(Boot, u64)>,
}

impl KnownClocks {
    pub(crate) fn set(&mut self, wall: u64, steady: u64) {
        self.ahead_ms = steady.wrapping_sub(wall) as i64;
        self.pair = None;
    }

    /// Notes the machine's clock. `wall` is the wall time of the record, which states the steady clock's lead before
    /// this.
    pub(crate) fn began(&mut self, boot: Boot, wall: u64) {
        self.pair = Some((boot, wall.saturating_add_signed(self.ahead_ms)));
    }
}

impl Clocks {
    /// Continues the steady clock from where it would be if the last broker still ran.
    pub(crate) fn resume(now: Now, known: &KnownClocks) -> Self {
        let steady = match (now.boot, known.pair) {
            (Some(boot), Some((then, steady)))
                if boot.id == then.id && !planted!("trust-the-wall") =>
            {
                steady.saturating_add(boot.ms.saturating_sub(then.ms))
            }
            _ => now.wall_ms.saturating_add_signed(known.ahead_ms),
        };
        let mut clocks = Self {
            now,
            steady_zero: steady.saturating_sub(now.mono_ms),
            journaled_ahead_ms: known.ahead_ms,
            journaled_boot: known.pair.map(|(boot, _)| boot.id),
            is_unrecorded: false,
        };
        clocks.is_unrecorded = clocks.have_stepped();
        clocks
    }

    /// Whether a new broker has clocks that it must journal, although nobody has talked to it yet.
    pub(crate) fn is_unrecorded(&self) -> bool {
        self.is_unrecorded
    }

    /// Whether the wall clock was set or the machine was restarted since the clocks were last journaled.
    pub(crate) fn have_stepped(&self) -> bool {
        let boot = self.now.boot.map(|boot| boot.id);
        let is_set = self.ahead_ms().abs_diff(self.journaled_ahead_ms) >= KNOWN_TO_MS;
        is_set || boot.is_some() && boot != self.journaled_boot
    }

    /// Notes that the clocks are journaled as they are now.
    pub(crate) fn journaled(&mut self) {
        self.journaled_ahead_ms = self.ahead_ms();
        self.journaled_boot = self.now.boot.map(|boot| boot.id);
        self.is_unrecorded = false;
    }

    fn ahead_ms(&self) -> i64 {
        self.steady().wrapping_sub(self.wall()) as i64
    }

    pub(crate) fn boot(&self) -> Option<Boot> {
        self.now.boot
    }

    /// Moves the clocks forward. Time never runs backwards on the monotonic clock, whatever the shell reports.
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

    /// Converts a steady time to wall time by the journaled lead, so that rounding never changes how a time is shown.
    pub(crate) fn wall_at(&self, steady: u64) -> u64 {
        steady.wrapping_sub(self.journaled_ahead_ms as u64)
    }

    /// Converts a time to wall time.
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

    pub(crate) fn is_due(&self, when: ClockTime) -> bool {
        match when.clock {
            WhichClock::Steady => when.at <= self.steady(),
            WhichClock::Wall => when.at <= self.wall(),
        }
    }

    /// Returns the time to check again, on the shell's monotonic clock.
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
