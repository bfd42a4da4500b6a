//! Durations of the runs of a schedule's jobs, so that a hanging job is reported.
//!
//! A run lasts from when the broker made the job until it has ended, including its retries and any group that replaces
//! it. If the job waited for a worker, the time counts from when it began. Only the last job of a schedule is watched.
//! All of this is in memory only, so a restarted broker knows no durations.

use std::collections::VecDeque;

/// Number of durations kept for each schedule.
const KEPT: usize = 15;
/// Number of durations needed before anything is reported.
const NEEDED: usize = 5;
/// Multiple of the median after which a run counts as hanging.
const TIMES: u64 = 10;
/// Duration up to which no run counts as hanging.
const AT_LEAST_MS: u64 = 1_000;
/// Interval between checks of a job that has waited long enough to hang but has not begun.
const AGAIN_MS: u64 = 5_000;

#[derive(Debug, Default)]
pub(super) struct Runs {
    lengths_ms: VecDeque<u64>,
    /// Time at which the unfinished job was made.
    made_at: Option<u64>,
    /// Time of its next check; `None` if it was reported.
    look_at: Option<u64>,
}

/// A run that seems to hang.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hung {
    pub(super) for_ms: u64,
    pub(super) median_ms: u64,
}

impl Runs {
    /// Notes that a job was created. Times are in ms of a clock that never goes back.
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

    /// Returns when to check again whether the job hangs.
    pub(super) fn look_at(&self) -> Option<u64> {
        self.look_at
    }

    /// Returns the run if it hangs; only once. `begun_at` is when the job reached a worker; `None` if it waits.
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
