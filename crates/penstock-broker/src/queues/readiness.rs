//! Share of the time in which consumers of a queue were ready for its jobs, like RabbitMQ's consumer capacity.

/// Time in which weights fade by a factor of e.
const MEMORY_MS: f32 = 10_000.0;

/// A moving average over time. It starts when it was created, so no earlier value has to fade.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readiness {
    began_ms: u64,
    /// Time up to which `unready` counts.
    until_ms: u64,
    /// Weight of the time in which they were not ready; all time together weighs 1.
    unready: f32,
    is_ready: bool,
}

impl Readiness {
    pub(crate) fn new(now_ms: u64) -> Self {
        Self {
            began_ms: now_ms,
            until_ms: now_ms,
            unready: 0.0,
            is_ready: true,
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.is_ready
    }

    #[inline]
    pub(crate) fn set(&mut self, is_ready: bool, now_ms: u64) {
        if self.is_ready != is_ready {
            self.unready = self.unready_at(now_ms);
            self.until_ms = now_ms;
            self.is_ready = is_ready;
        }
    }

    fn unready_at(&self, now_ms: u64) -> f32 {
        if now_ms <= self.until_ms {
            return self.unready;
        }
        let faded = faded(now_ms - self.until_ms);
        let added = if self.is_ready { 0.0 } else { 1.0 - faded };
        self.unready * faded + added
    }

    /// Returns the share in thousandths, from 0 to 1000.
    pub(crate) fn permille(&self, now_ms: u64) -> u16 {
        let whole = 1.0 - faded(now_ms.saturating_sub(self.began_ms));
        let unready = match whole > 0.0 {
            true => self.unready_at(now_ms) / whole,
            false if self.is_ready => 0.0,
            false => 1.0,
        };
        ((1.0 - unready) * 1000.0).round().clamp(0.0, 1000.0) as u16
    }
}

fn faded(passed_ms: u64) -> f32 {
    (-(passed_ms as f32) / MEMORY_MS).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_is_weighted_by_time() {
        let mut readiness = Readiness::new(5_000);
        assert_eq!(readiness.permille(5_000), 1000);
        // Ready for 1 ms of every 4 ms, from the first second to the second minute.
        for now_ms in (5_000..125_000).step_by(4) {
            readiness.set(false, now_ms);
            // A state that takes no time weighs nothing.
            readiness.set(true, now_ms);
            readiness.set(false, now_ms);
            readiness.set(true, now_ms + 3);
            if now_ms >= 6_000 {
                let permille = readiness.permille(now_ms + 4);
                assert!((245..=255).contains(&permille), "{permille} at {now_ms}");
            }
        }
        assert_eq!(readiness.permille(125_000 + 100_000), 1000);
        readiness.set(false, 225_000);
        let half_ms = (MEMORY_MS * 2f32.ln()) as u64;
        assert!(readiness.permille(225_000 + half_ms).abs_diff(500) <= 1);
        assert_eq!(readiness.permille(325_000), 0);
    }
}
