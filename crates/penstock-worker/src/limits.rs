//! Tracks the time limits of running jobs. The supervisor does this because the process of a job may hang.
//!
//! ```text
//!     began ──── soft limit ──────── limit ────────── + kill grace
//!                Order::Soft         Order::Hard      the process is killed, or evicted
//! ```
//!
//! A job without limits costs nothing here. A job with limits is first checked when the earliest of them can
//! have passed, so nothing needs to report its start.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use penstock_faults::planted;
use penstock_message::Message;

use crate::order::Order;

/// A signal may arrive while its order can't be carried out: the job is importing, or shields itself. So it is
/// repeated, at growing intervals.
const FIRST_REPEAT: Duration = Duration::from_millis(50);
const LAST_REPEAT: Duration = Duration::from_secs(5);

/// Maximum time of an attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub soft: Option<Duration>,
    pub hard: Option<Duration>,
}

impl Limits {
    pub fn of(message: &Message) -> Self {
        let Some(extras) = message.extras.as_deref() else {
            return Self::default();
        };
        Self {
            soft: extras.soft_timeout_ms.map(Duration::from_millis),
            hard: extras.timeout_ms.map(Duration::from_millis),
        }
    }

    /// Returns the limit that passes first.
    pub fn first(self) -> Option<Duration> {
        self.soft.into_iter().chain(self.hard).min()
    }
}

/// Order to a running job.
#[derive(Clone, Copy, Debug)]
pub struct Ordered {
    pub index: usize,
    pub order: Order,
    repeat_at: Instant,
    pause: Duration,
    /// Time by which the job must have ended.
    end_by: Option<Instant>,
    /// Whether the job missed it, so that its process must be killed.
    pub is_condemned: bool,
    /// Whether to kill it at once.
    pub is_hastened: bool,
}

/// Next step with a running job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Nothing,
    /// Write its order.
    Give(Order),
    /// Remind its child of the order.
    Remind,
    /// The job did not end in time.
    Condemn,
}

impl Ordered {
    pub fn new(index: usize, order: Order, now: Instant, grace: Duration) -> Self {
        Self {
            index,
            order,
            repeat_at: now + FIRST_REPEAT,
            pause: FIRST_REPEAT,
            end_by: (order >= Order::Cancel).then_some(now + grace),
            is_condemned: false,
            is_hastened: false,
        }
    }

    /// Cancels the remaining time.
    pub fn hasten(&mut self, now: Instant) {
        if !planted!("kill-after-the-grace") {
            self.end_by = Some(now);
        }
        self.is_hastened = true;
    }

    /// Escalates the order to the same job.
    pub fn raise(&mut self, order: Order, now: Instant, grace: Duration) {
        let end_by = self.end_by;
        *self = Self {
            is_condemned: self.is_condemned,
            is_hastened: self.is_hastened,
            ..Self::new(self.index, order, now, grace)
        };
        // A cancelled job doesn't get more time because its limit has passed too.
        if !planted!("cancel-gains-time") {
            self.end_by = end_by.or(self.end_by);
        }
    }

    fn remind(&mut self, now: Instant) {
        self.pause = LAST_REPEAT.min(2 * self.pause);
        self.repeat_at = now + self.pause;
    }
}

/// Decides about a job that has run for this long. Also returns when to check again; `None` if nothing more can
/// happen.
pub fn step(
    limits: Limits,
    age: Duration,
    ordered: Option<&mut Ordered>,
    has_heard: bool,
    now: Instant,
) -> (Step, Option<Instant>) {
    let level = ordered.as_ref().map(|ordered| ordered.order);
    let at = |limit: Duration| now + limit.saturating_sub(age);
    let is_over = |limit: Option<Duration>| limit.is_some_and(|limit| limit <= age);
    let hard = limits.hard.filter(|_| level < Some(Order::Hard));
    let soft = limits.soft.filter(|_| level < Some(Order::Soft));
    if is_over(hard) {
        return (Step::Give(Order::Hard), Some(now));
    }
    if is_over(soft) {
        return (Step::Give(Order::Soft), Some(now));
    }
    let mut next: Vec<Instant> = hard.into_iter().chain(soft).map(at).collect();
    let Some(ordered) = ordered else {
        return (Step::Nothing, next.into_iter().min());
    };
    let mut step = Step::Nothing;
    if !has_heard {
        if ordered.repeat_at <= now {
            ordered.remind(now);
            step = match planted!("remind-never") {
                true => Step::Nothing,
                false => Step::Remind,
            };
        }
        next.push(ordered.repeat_at);
    }
    if let Some(end_by) = ordered.end_by {
        if end_by <= now {
            ordered.is_condemned = true;
            step = Step::Condemn;
            // This code does not know whether its process could be evicted.
            next.push(now + LAST_REPEAT);
        } else {
            next.push(end_by);
        }
    }
    (step, next.into_iter().min())
}

/// Times to check each place, at most one per place.
#[derive(Default)]
pub struct Alarms {
    /// By place, for all places used so far.
    at: Vec<Option<Instant>>,
    queue: BTreeSet<(Instant, u32)>,
}

impl Alarms {
    /// Schedules a check of the place by this time. An earlier time stays. Its reason may be gone, but a
    /// useless check is cheaper than cancelling each of them.
    pub fn by(&mut self, place: usize, at: Instant) {
        if self.at.len() <= place {
            self.at.resize(place + 1, None);
        }
        if self.at[place].is_some_and(|set| set <= at || planted!("alarm-too-late")) {
            return;
        }
        if let Some(set) = self.at[place].replace(at) {
            self.queue.remove(&(set, place as u32));
        }
        self.queue.insert((at, place as u32));
    }

    pub fn next(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Returns a place whose check is due.
    pub fn pop(&mut self, now: Instant) -> Option<usize> {
        let (at, place) = *self.queue.first()?;
        if at > now {
            return None;
        }
        self.queue.pop_first();
        self.at[place as usize] = None;
        Some(place as usize)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Follows a job that never ends, recording its steps and their times, until it is condemned.
    fn followed(limits: Limits, hears: bool, until_ms: u64) -> String {
        let start = Instant::now();
        let mut ordered: Option<Ordered> = None;
        let mut now = start;
        let mut told = Vec::new();
        while now < start + ms(until_ms) {
            let heard = hears && ordered.is_some();
            let (step, next) = step(limits, now - start, ordered.as_mut(), heard, now);
            let at = (now - start).as_millis();
            match step {
                Step::Nothing => {}
                Step::Give(order) => {
                    told.push(format!("{order:?} {at}"));
                    match &mut ordered {
                        Some(ordered) => ordered.raise(order, now, GRACE),
                        None => ordered = Some(Ordered::new(0, order, now, GRACE)),
                    }
                }
                Step::Remind => told.push(format!("remind {at}")),
                Step::Condemn => {
                    told.push(format!("condemn {at}"));
                    break;
                }
            }
            match next {
                Some(next) => now = next,
                None => break,
            }
        }
        told.join(", ")
    }

    #[test]
    pub(crate) fn a_job_is_warned_then_stopped_then_condemned_each_in_its_time() {
        let check = |soft: Option<u64>, hard: Option<u64>, hears, expected: &str| {
            let limits = Limits {
                soft: soft.map(ms),
                hard: hard.map(ms),
            };
            assert_eq!(followed(limits, hears, 60_000), expected);
        };
        check(None, None, true, "");
        check(Some(100), None, true, "Soft 100");
        check(None, Some(100), true, "Hard 100, condemn 5100");
        check(
            Some(100),
            Some(300),
            true,
            "Soft 100, Hard 300, condemn 5300",
        );
        // A job that can't be interrupted is reminded at growing intervals.
        let reminded: Vec<String> = [150, 250, 450, 850, 1650, 3250]
            .map(|at| format!("remind {at}"))
            .to_vec();
        let expected = format!("Hard 100, {}, condemn 5100", reminded.join(", "));
        check(None, Some(100), false, &expected);
    }

    #[test]
    pub(crate) fn a_cancelled_job_gains_no_time_by_its_limit() {
        let start = Instant::now();
        let mut ordered = Ordered::new(0, Order::Cancel, start, GRACE);
        ordered.raise(Order::Hard, start + ms(4_000), GRACE);
        let limits = Limits {
            soft: None,
            hard: Some(ms(4_000)),
        };
        let now = start + GRACE;
        let (step, _) = step(limits, GRACE, Some(&mut ordered), true, now);
        assert_eq!((step, ordered.is_condemned), (Step::Condemn, true));
    }

    #[test]
    pub(crate) fn a_job_that_is_to_be_killed_has_no_time() {
        let now = Instant::now();
        let mut ordered = Ordered::new(0, Order::Cancel, now, GRACE);
        ordered.hasten(now);
        let (step, _) = step(Limits::default(), ms(7), Some(&mut ordered), true, now);
        assert_eq!((step, ordered.is_condemned), (Step::Condemn, true));
    }

    #[test]
    pub(crate) fn a_place_is_looked_at_at_the_earliest_of_its_times_and_once() {
        let start = Instant::now();
        let mut alarms = Alarms::default();
        alarms.by(0, start + ms(30));
        alarms.by(1, start + ms(20));
        alarms.by(1, start + ms(40));
        alarms.by(2, start + ms(50));
        alarms.by(2, start + ms(10));
        assert_eq!(alarms.next(), Some(start + ms(10)));
        assert_eq!(alarms.pop(start), None);
        let popped: Vec<_> = std::iter::from_fn(|| alarms.pop(start + ms(60))).collect();
        assert_eq!((popped, alarms.next()), (vec![2, 1, 0], None));
        alarms.by(1, start + ms(90));
        assert_eq!(alarms.next(), Some(start + ms(90)));
    }
}
