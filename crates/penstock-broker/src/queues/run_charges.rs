//! Charges runs while they run.
//!
//! A hand-out charges its flow the expected cost of the run, and the settlement corrects that. A job that never ends
//! would be charged only once, and its seemingly cheap flow would get one slot after another until it has them all. So
//! before a flow has its turn, its runs are charged in advance if together they have already taken longer than
//! expected: they are assumed to be half done. When a run ends, the part that it did not cost is refunded.
//!
//! Sums are enough: n runs that began at t1, t2, … have taken n × now − (t1 + t2 + …). A queue of runs to review one by
//! one took a twelfth of the broker's time for jobs that do nothing.

use std::num::NonZeroU32;

/// Charge for a run, made when it is handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// Expected cost. Never zero, which makes an `Option` of this no larger.
    pub(crate) estimate_us: NonZeroU32,
    /// Time of the hand-out, on the steady clock.
    pub(crate) since_ms: u64,
}

impl Charge {
    fn expected_ms(self) -> u64 {
        u64::from(self.estimate_us.get().div_ceil(1000))
    }
}

/// Running jobs of a flow.
#[derive(Debug, Default)]
pub(crate) struct ChargedRuns {
    runs: u32,
    /// Sum of the times at which they began.
    since_ms: u64,
    /// Total time that they were expected to take.
    expected_ms: u64,
    /// Charge beyond the expected one.
    beyond_us: u64,
}

impl ChargedRuns {
    pub(crate) fn runs(&self) -> u32 {
        self.runs
    }

    pub(crate) fn begin(&mut self, charge: Charge) {
        self.runs += 1;
        self.since_ms += charge.since_ms;
        self.expected_ms += charge.expected_ms();
    }

    /// Ends a run. Returns the reduction of the charge beyond the expected cost; the cost of this run is charged
    /// separately.
    pub(crate) fn end(&mut self, charge: Charge, now_ms: u64) -> u64 {
        self.runs -= 1;
        self.since_ms -= charge.since_ms;
        self.expected_ms -= charge.expected_ms();
        if self.beyond_us == 0 {
            return 0;
        }
        let beyond_us = self.beyond_us.min(self.beyond_us(now_ms));
        std::mem::replace(&mut self.beyond_us, beyond_us) - beyond_us
    }

    /// Charges the amount that is due. Returns how much more that is.
    pub(crate) fn charge(&mut self, now_ms: u64) -> u64 {
        let more_us = self.beyond_us(now_ms).saturating_sub(self.beyond_us);
        self.beyond_us += more_us;
        more_us
    }

    /// Returns the charge that is due beyond the expected one.
    fn beyond_us(&self, now_ms: u64) -> u64 {
        let (now_ms, since_ms) = (u64::from(self.runs) * now_ms, self.since_ms);
        let (ran_ms, expected_ms) = (now_ms.saturating_sub(since_ms), self.expected_ms);
        match ran_ms >= expected_ms {
            true => (2 * ran_ms - expected_ms) * 1000,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_charged_for_their_time_and_refunded_when_they_end() {
        let mut running = ChargedRuns::default();
        let charge = |estimate_us, since_ms| Charge {
            estimate_us: NonZeroU32::new(estimate_us).unwrap(),
            since_ms,
        };
        let (short, long) = (charge(1_000, 0), charge(5_000, 10));
        running.begin(short);
        running.begin(long);
        assert_eq!(running.charge(2), 0, "a clock behind");
        assert_eq!(
            running.charge(10),
            14_000,
            "10 + 0 ms ran, 1 + 5 were expected"
        );
        assert_eq!(running.charge(10), 0);
        assert_eq!(running.charge(12), 8_000, "12 + 2 ms ran");
        assert_eq!(
            running.end(short, 12),
            22_000,
            "the other is within its time"
        );
        assert_eq!(running.charge(14), 0);
        assert_eq!(running.charge(18), 11_000, "8 ms ran, 5 were expected");
        assert_eq!(running.end(long, 20), 11_000);
        assert_eq!(running.runs(), 0);
    }
}
