//! Durations of syncs, in a few hundred counters.

/// Buckets for each power of two, so that a figure is at most 12 % too high.
const BUCKETS_A_DOUBLING: u64 = 8;
/// Count at which all counters are halved, so that old durations fade.
const FADE_AFTER: u64 = 8192;

/// Durations in microseconds; recent ones weigh more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    pub fn add(&mut self, us: u64) {
        let bucket = bucket_of(us);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
        if self.total >= FADE_AFTER {
            for count in &mut self.counts {
                *count /= 2;
            }
            self.total = self.counts.iter().sum();
        }
    }

    /// Returns the duration that this share of them (such as 0.99) did not exceed; 0 when there are none.
    pub fn quantile(&self, share: f64) -> u64 {
        let wanted = (self.total as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted && *count > 0 {
                return highest_in(bucket);
            }
        }
        0
    }
}

fn bucket_of(us: u64) -> usize {
    if us < BUCKETS_A_DOUBLING {
        return us as usize;
    }
    let doubling = us.ilog2() - BUCKETS_A_DOUBLING.ilog2();
    let place = (us >> doubling) - BUCKETS_A_DOUBLING;
    (BUCKETS_A_DOUBLING * (u64::from(doubling) + 1) + place) as usize
}

fn highest_in(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < BUCKETS_A_DOUBLING {
        return bucket;
    }
    let doubling = bucket / BUCKETS_A_DOUBLING - 1;
    let place = bucket % BUCKETS_A_DOUBLING + BUCKETS_A_DOUBLING;
    ((place + 1) << doubling) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_never_too_low_and_at_most_an_eighth_too_high() {
        for us in (0..5000).chain((5000..10_000_000).step_by(997)) {
            let shown = highest_in(bucket_of(us));
            assert!(
                us <= shown && shown <= us + us / 8,
                "{us} is shown as {shown}"
            );
        }
    }

    #[test]
    fn half_and_nearly_all_are_told_apart() {
        let mut times = Histogram::default();
        assert_eq!(times.quantile(0.5), 0);
        for _ in 0..98 {
            times.add(100);
        }
        times.add(5000);
        times.add(5000);
        assert_eq!(times.quantile(0.5), 103);
        assert_eq!(times.quantile(0.98), 103);
        assert_eq!(times.quantile(0.99), 5119);
    }

    #[test]
    fn what_happened_long_ago_fades() {
        let mut times = Histogram::default();
        for _ in 0..20_000 {
            times.add(9000);
        }
        for _ in 0..40_000 {
            times.add(100);
        }
        assert_eq!(times.quantile(0.9), 103);
    }
}
