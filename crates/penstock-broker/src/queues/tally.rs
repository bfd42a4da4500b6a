//! Counts of jobs by outcome, for each queue and each task: since the broker started, and over the last minute.
//!
//! To count is one addition, to the message's shared head (see `messages/shared_heads.rs`). The counts of heads are
//! added to the tallies of their queues and tasks when ten seconds are over, when a client asks, or when there are
//! many. A tally updates its sums and its last minute when another ten seconds have begun. So an unused tally costs
//! nothing, and one that was used only once keeps no minute.

use penstock_message::{JobCounts, Tallied};

/// Events that are counted, in the order of the fields of [`JobCounts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counter {
    Enqueued,
    Started,
    Succeeded,
    Failed,
    Retried,
    Expired,
    Cancelled,
    Crashed,
    Dropped,
}

/// The steady clock in steps of ten seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TallyStep(u32);

const STEP_MS: u64 = 10_000;
/// Number of steps in a minute.
const STEPS: usize = 6;

impl TallyStep {
    pub(crate) fn at(steady_ms: u64) -> Self {
        Self((steady_ms / STEP_MS) as u32)
    }

    pub(crate) fn end_ms(self) -> u64 {
        (u64::from(self.0) + 1) * STEP_MS
    }

    fn minute_index(self) -> usize {
        self.0 as usize % STEPS
    }
}

pub(crate) type TallyCounts = [u32; JobCounts::LEN];

#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Step in which it was last used.
    pub(crate) last: TallyStep,
    /// Counts within that step.
    now: TallyCounts,
    /// Counts up to that step; `None`: nothing. (Most of many queues are used in one step only.)
    before: Option<Box<[u64; JobCounts::LEN]>>,
    /// Earlier steps of the last minute, by [`TallyStep::minute_index`]; `None` if they counted nothing.
    minute: Option<Box<[TallyCounts; STEPS]>>,
}

impl Tally {
    pub(crate) fn new(now: TallyStep) -> Self {
        Self {
            last: now,
            ..Self::default()
        }
    }

    pub(crate) fn count(&mut self, what: Counter, now: TallyStep) {
        self.touch(now);
        self.now[what as usize] += 1;
    }

    pub(crate) fn add(&mut self, counts: &TallyCounts, now: TallyStep) {
        self.touch(now);
        for (sum, count) in self.now.iter_mut().zip(counts) {
            *sum += count;
        }
    }

    /// Notes that it is in use although there is nothing to count.
    #[inline]
    pub(crate) fn touch(&mut self, now: TallyStep) {
        if self.last != now {
            self.turn(now);
        }
    }

    #[cold]
    fn turn(&mut self, now: TallyStep) {
        if self.now != TallyCounts::default() {
            let before = self.before.get_or_insert_default();
            for (before, now) in before.iter_mut().zip(self.now) {
                *before += u64::from(now);
            }
        }
        let passed = now.0.saturating_sub(self.last.0) as usize;
        if passed > STEPS {
            self.minute = None;
        } else if self.minute.is_some() || self.now != TallyCounts::default() {
            let minute = self.minute.get_or_insert_default();
            minute[self.last.minute_index()] = self.now;
            for empty in self.last.0 + 1..now.0 {
                minute[TallyStep(empty).minute_index()] = TallyCounts::default();
            }
        }
        self.now = TallyCounts::default();
        self.last = now;
    }

    pub(crate) fn counts(&self) -> JobCounts {
        let mut counts = self.before.as_deref().copied().unwrap_or_default();
        for (count, now) in counts.iter_mut().zip(self.now) {
            *count += u64::from(now);
        }
        JobCounts::from_array(counts)
    }

    pub(crate) fn tallied(&self, steady_ms: u64) -> Tallied {
        let now = TallyStep::at(steady_ms);
        let mut tally = self.clone();
        tally.touch(now);
        let mut last_minute = tally.now.map(u64::from);
        if let Some(minute) = &tally.minute {
            // The oldest step is only partly within the minute.
            let gone_ms = steady_ms % STEP_MS;
            let part = |count: u32| (u64::from(count) * (STEP_MS - gone_ms)).div_ceil(STEP_MS);
            for (minute_index, counts) in minute.iter().enumerate() {
                for (sum, count) in last_minute.iter_mut().zip(counts) {
                    *sum += match minute_index == now.minute_index() {
                        true => part(*count),
                        false => u64::from(*count),
                    };
                }
            }
        }
        Tallied {
            counts: self.counts(),
            last_minute: JobCounts::from_array(last_minute),
        }
    }
}

/// Adds the counts of another tally.
pub(crate) fn add(sum: &mut JobCounts, counts: JobCounts) {
    sum.enqueued += counts.enqueued;
    sum.started += counts.started;
    sum.succeeded += counts.succeeded;
    sum.failed += counts.failed;
    sum.retried += counts.retried;
    sum.expired += counts.expired;
    sum.cancelled += counts.cancelled;
    sum.crashed += counts.crashed;
    sum.dropped += counts.dropped;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_minute_is_right_to_within_ten_seconds() {
        // One event every 100 ms, after pauses of various lengths.
        for pause_ms in [0, 7_000, 49_000, 61_000, 200_000] {
            let mut tally = Tally::default();
            let mut times = Vec::new();
            let start_ms = 1_000_000;
            let busy = (start_ms..start_ms + 90_000).chain(start_ms + 90_000 + pause_ms..);
            for now_ms in busy.step_by(100).take(1_500) {
                tally.count(Counter::Started, TallyStep::at(now_ms));
                times.push(now_ms);
                let tallied = tally.tallied(now_ms);
                let recent = times.iter().filter(|at| **at + 60_000 > now_ms).count() as u64;
                // As if the counts of a step were spread evenly over it.
                let error = tallied.last_minute.started.abs_diff(recent);
                assert!(
                    error <= if pause_ms == 0 { 1 } else { 71 },
                    "{tallied:?}, not {recent}"
                );
                assert_eq!(tallied.counts.started, times.len() as u64);
                assert_eq!(tallied.counts.enqueued, 0);
            }
            let end_ms = times[times.len() - 1];
            assert!(tally.tallied(end_ms + 30_000).last_minute.started > 0);
            assert_eq!(
                tally.tallied(end_ms + 70_000).last_minute,
                JobCounts::default()
            );
        }
    }

    #[test]
    fn a_tally_that_is_used_once_keeps_no_minute() {
        let mut tally = Tally::new(TallyStep::at(5_000));
        for what in [Counter::Enqueued, Counter::Started, Counter::Succeeded] {
            tally.count(what, TallyStep::at(9_999));
        }
        assert!(tally.minute.is_none());
        assert_eq!(tally.tallied(65_000).last_minute.succeeded, 1);
        assert!(tally.before.is_none());
        assert!(size_of::<Tally>() <= 56);
        // Nor after a long time.
        tally.count(Counter::Enqueued, TallyStep::at(100_000));
        assert!(tally.minute.is_none());
        assert_eq!(tally.counts().enqueued, 2);
    }
}
