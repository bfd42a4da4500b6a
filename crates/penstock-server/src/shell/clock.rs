//! The loop's clock, which clients of a test can move.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use penstock_broker::{Boot, Now};

pub(super) struct ServerClock {
    pub(super) zero: Instant,
    /// Time by which a client has moved the clock.
    pub(super) moved_ms: u64,
    boot_id: Option<[u8; 16]>,
}

impl ServerClock {
    pub(super) fn start() -> Self {
        Self {
            zero: Instant::now(),
            moved_ms: 0,
            boot_id: boot_id(),
        }
    }

    pub(super) fn now(&self) -> Now {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut now = Now {
            mono_ms: self.zero.elapsed().as_millis() as u64,
            wall_ms: wall.unwrap_or_default().as_millis() as u64,
            boot: self.boot_id.map(|id| Boot {
                id,
                ms: milliseconds_since_boot(),
            }),
        };
        now.move_on(self.moved_ms);
        now
    }

    pub(super) fn at(&self, mono_ms: u64) -> Instant {
        self.zero + Duration::from_millis(mono_ms.saturating_sub(self.moved_ms))
    }
}

/// Returns the id of the machine's current boot.
#[cfg(target_os = "linux")]
fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits = text.trim().replace('-', "");
    let number = u128::from_str_radix(&digits, 16).ok()?;
    Some(number.to_be_bytes())
}

#[cfg(target_os = "linux")]
fn milliseconds_since_boot() -> u64 {
    let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    since.tv_sec as u64 * 1000 + since.tv_nsec as u64 / 1_000_000
}

/// Returns none: on other systems only the wall clock continues while no broker runs.
#[cfg(not(target_os = "linux"))]
fn boot_id() -> Option<[u8; 16]> {
    None
}

#[cfg(not(target_os = "linux"))]
fn milliseconds_since_boot() -> u64 {
    0
}
