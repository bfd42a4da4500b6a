//! Lengths of the runs of a schedule's jobs, so that one which hangs is named.
//!
//! A run is from when the broker made the job until it has ended, with its retries, and with the whole group that has taken its
//! place. One that waited for a worker is given its time from when it began. Only the last job of a schedule is watched. All
//! of it is in memory: a broker that starts knows no lengths.

use std::collections::VecDeque;

/// Lengths that are kept of each schedule.
const KEPT: usize = 15;
/// Lengths without which nothing is said.
const NEEDED: usize = 5;
/// Multiple of the median at which a run is said to hang.
const TIMES: u64 = 10;
/// Length up to which no run is said to hang.
const AT_LEAST_MS: u64 = 1_000;
/// Distance of two looks at a job that has waited for so long that it could hang, but has not begun.
const AGAIN_MS: u64 = 5_000;

#[derive(Debug, Default)]
pub(super) struct Runs {
    lengths_ms: VecDeque<u64>,
    /// Time at which the job was made that has not ended.
    made_at: Option<u64>,
    /// Time of the next look at it; `None`: it was named.
    look_at: Option<u64>,
}

/// A run that seems to hang.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hung {
    pub(super) for_ms: u64,
    pub(super) median_ms: u64,
}

impl Runs {
    /// Notes that a job was made. Times are in ms of one clock that never goes back.
    pub(super) fn begin(&mut self, now: u64) {
        self.made_at = Some(now);
        let median = self.median();
        self.look_at = median.map(|median| now + hanging_ms(median));
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.made_at.is_some()
    }

    /// Notes that the job has ended.
    pub(super) fn end(&mut self, now: u64) {
        let Some(made_at) = self.made_at.take() else {
            return;
        };
        self.look_at = None;
        if self.lengths_ms.len() == KEPT {
            self.lengths_ms.pop_front();
        }
        self.lengths_ms.push_back(now.saturating_sub(made_at));
    }

    /// Returns when to ask again whether the job hangs.
    pub(super) fn look_at(&self) -> Option<u64> {
        self.look_at
    }

    /// Returns the run if it hangs: once. `begun_at`: when the job came to a worker; `None`: it waits.
    pub(super) fn hung(&mut self, now: u64, begun_at: Option<u64>) -> Option<Hung> {
        self.look_at.filter(|at| *at <= now)?;
        let (made_at, median_ms) = (self.made_at?, self.median()?);
        let Some(begun_at) = begun_at else {
            self.look_at = Some(now + AGAIN_MS);
            return None;
        };
        let hangs_at = begun_at.max(made_at) + hanging_ms(median_ms);
        if hangs_at > now {
            self.look_at = Some(hangs_at);
            return None;
        }
        self.look_at = None;
        Some(Hung {
            for_ms: now.saturating_sub(begun_at.max(made_at)),
            median_ms,
        })
    }

    fn median(&self) -> Option<u64> {
        if self.lengths_ms.len() < NEEDED {
            return None;
        }
        let mut lengths: Vec<u64> = self.lengths_ms.iter().copied().collect();
        let middle = lengths.len() / 2;
        Some(*lengths.select_nth_unstable(middle).1)
    }
}

fn hanging_ms(median_ms: u64) -> u64 {
    (median_ms * TIMES).max(AT_LEAST_MS)
}
