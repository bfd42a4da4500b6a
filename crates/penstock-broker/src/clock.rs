//! Two clocks. Countdowns and TTLs follow the *steady* one, which starts at the wall's time and never
//! steps; a time that a person named (an ETA) follows the *wall*, wherever that is set to.

use penstock_message::Due;

use crate::Now;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Clock {
    Steady,
    Wall,
}

/// A time that was decided, on the clock it follows; both count milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct When {
    pub(crate) at: u64,
    pub(crate) clock: Clock,
}

impl When {
    pub(crate) fn steady(at: u64) -> Self {
        Self {
            at,
            clock: Clock::Steady,
        }
    }
}

/// A timer must not be missed when the wall's clock is set forward while we sleep: so a sleep that
/// waits for the wall is at most this long.
const LONGEST_WALL_SLEEP_MS: u64 = 10_000;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clocks {
    now: Now,
    /// The steady clock at mono zero.
    steady_zero: u64,
}

impl Clocks {
    pub(crate) fn new(now: Now) -> Self {
        Self {
            now,
            steady_zero: now.wall_ms.saturating_sub(now.mono_ms),
        }
    }

    /// Time never runs backwards on the monotonic clock, whatever the shell says.
    pub(crate) fn advance(&mut self, now: Now) {
        self.now = Now {
            mono_ms: self.now.mono_ms.max(now.mono_ms),
            wall_ms: now.wall_ms,
        };
    }

    pub(crate) fn wall(&self) -> u64 {
        self.now.wall_ms
    }

    pub(crate) fn steady(&self) -> u64 {
        self.steady_zero.saturating_add(self.now.mono_ms)
    }

    pub(crate) fn resolve(&self, due: Due) -> When {
        match due {
            Due::AfterMs(ms) => When {
                at: self.steady().saturating_add(ms),
                clock: Clock::Steady,
            },
            Due::At(wall_ms) => When {
                at: wall_ms,
                clock: Clock::Wall,
            },
        }
    }

    /// When a message that is delayed may start. The shell's milliseconds are rounded down, so "in 5 ms"
    /// is not over before the sixth begins.
    pub(crate) fn resolve_start(&self, due: Due) -> When {
        match due {
            Due::AfterMs(ms) if ms > 0 => self.resolve(Due::AfterMs(ms.saturating_add(1))),
            due => self.resolve(due),
        }
    }

    pub(crate) fn has_come(&self, when: When) -> bool {
        match when.clock {
            Clock::Steady => when.at <= self.steady(),
            Clock::Wall => when.at <= self.wall(),
        }
    }

    /// When to look again, as a time on the shell's monotonic clock.
    pub(crate) fn mono_deadline(&self, when: When) -> u64 {
        match when.clock {
            Clock::Steady => when.at.saturating_sub(self.steady_zero),
            Clock::Wall => {
                let wait_ms = when.at.saturating_sub(self.wall());
                self.now.mono_ms + wait_ms.min(LONGEST_WALL_SLEEP_MS)
            }
        }
    }
}
