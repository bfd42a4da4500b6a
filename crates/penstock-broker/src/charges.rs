//! What runs is charged while it runs.
//!
//! A hand-out charges its flow what the run is expected to cost, and the settlement corrects that. A job that
//! never ends would so be charged once, and its flow, which seems cheap, would be given one slot after the
//! other until it has them all. So a lease that outlasts what was expected is charged as much again in advance,
//! and so on at twice, four times, eight times as long: a few looks however long it runs. The settlement gives
//! back what was too much.
//!
//! Those that wait for the same power of two of milliseconds stand in one queue, in the order in which they
//! are due: a lease costs a push and a pop, and no timer. They are looked at whenever the broker does anything,
//! which is early enough, since a charge only matters for the next hand-out.

use crate::line::Line;
use crate::messages::Handle;

/// Queues of waits from one millisecond to a year.
const WAITS: usize = 36;

#[derive(Debug)]
pub(crate) struct Charges {
    /// By the binary logarithm of how many milliseconds they wait.
    waiting: [Line<Charged>; WAITS],
    /// Nothing is due before.
    next_ms: u64,
}

/// A lease that is looked at in a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charged {
    pub(crate) message: Handle,
    pub(crate) grant: u64,
    /// On the steady clock.
    pub(crate) since_ms: u64,
    due_ms: u64,
}

impl Default for Charges {
    fn default() -> Self {
        Self {
            waiting: std::array::from_fn(|_| Line::default()),
            next_ms: u64::MAX,
        }
    }
}

impl Charges {
    /// A lease begins, whose run is expected to cost so much.
    pub(crate) fn add(&mut self, message: Handle, grant: u64, estimate_us: u32, now_ms: u64) {
        let charged = Charged {
            message,
            grant,
            since_ms: now_ms,
            due_ms: 0,
        };
        self.wait(charged, u64::from(estimate_us).div_ceil(1000), now_ms);
    }

    /// It still runs, and is looked at again after as long as it has run. Returns how long it will have run by
    /// then.
    pub(crate) fn look_again(&mut self, charged: Charged, now_ms: u64) -> u64 {
        let ran_ms = now_ms - charged.since_ms;
        self.wait(charged, ran_ms, now_ms) - charged.since_ms
    }

    /// Returns when it is due.
    fn wait(&mut self, charged: Charged, wait_ms: u64, now_ms: u64) -> u64 {
        let wait = (wait_ms.max(1).next_power_of_two().ilog2() as usize).min(WAITS - 1);
        let due_ms = now_ms + (1 << wait);
        self.waiting[wait].push_back(Charged { due_ms, ..charged });
        self.next_ms = self.next_ms.min(due_ms);
        due_ms
    }

    /// One that is due.
    pub(crate) fn pop(&mut self, now_ms: u64) -> Option<Charged> {
        if now_ms < self.next_ms {
            return None;
        }
        let is_due = |first: &Charged| first.due_ms <= now_ms;
        let mut waiting = self.waiting.iter_mut();
        let due = waiting.find(|waiting| waiting.front().is_some_and(|first| is_due(&first)));
        let due = due.and_then(Line::pop_front);
        if due.is_none() {
            let firsts = self.waiting.iter().filter_map(Line::front);
            self.next_ms = firsts.map(|first| first.due_ms).min().unwrap_or(u64::MAX);
        }
        due
    }
}
