//! Timers. A timer that is no longer wanted stays until it fires, and its receiver finds it stale. A heap of mostly
//! stale timers is swept.

mod value_expiries;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use penstock_faults::perhaps;

use crate::clock::{ClockTime, Clocks, WhichClock};
use crate::keys::stored_value::ValueHandle;
use crate::queues::Forgettable;
use crate::timers::value_expiries::ValueExpiries;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A delayed message becomes ready. (Number and slot are its handle, which would take more room.)
    Due { number: u64, slot: u32 },
    /// A delayed message becomes ready soon, and its body was not in memory when it was delayed.
    Prefetch { number: u64, slot: u32 },
    /// A message has expired.
    Expiry { number: u64, slot: u32 },
    /// A value expires.
    ValueExpiry(ValueHandle),
    /// Values with this time to live, of messages that the broker has ended, expire.
    EndedValues { ttl_ms: u64 },
    /// Ended workflows have been listed for long enough.
    Workflows,
    /// The deadline of a workflow, by its number.
    Deadline { workflow: u64 },
    /// A time of a schedule may have come; stale unless the schedule waits for exactly this time.
    Schedule { number: u32, at: u64 },
    /// Failed jobs have been kept for long enough.
    FailedJobs,
    /// The heartbeat of a session without a connection runs out, and its leases end.
    LeasesLost { session: u32, generation: u64 },
    /// A session without a connection is forgotten.
    Forget { session: u32, generation: u64 },
    /// A queue has had ready messages and no consumer for a while.
    Unserved { queue: u32, generation: u64 },
    /// A queue has for a while had work that none of its consumers can run.
    Unknown { queue: u32, generation: u64 },
    /// A queue or task may be unused. Each has one such timer for as long as it exists.
    Unused(Forgettable),
}

// Every delayed job has one.
const _: () = assert!(size_of::<Timer>() == 16);

#[derive(Debug, Default)]
pub(crate) struct Timers {
    steady: Heap,
    wall: Heap,
    /// Expiry times of values that are not due soon, on the steady clock.
    values: ValueExpiries,
}

#[derive(Debug, Default)]
struct Heap {
    timers: BinaryHeap<Reverse<(u64, Timer)>>,
    /// Number of timers known to be stale.
    stale: usize,
}

impl Heap {
    /// Frees memory after the number of timers was large.
    fn shrink(&mut self) {
        let (len, capacity) = (self.timers.len(), self.timers.capacity());
        if capacity > 4096 && len < capacity / 8 {
            self.timers.shrink_to(capacity / 4);
        }
    }
}

impl Timers {
    pub(crate) fn set(&mut self, when: ClockTime, timer: Timer) {
        self.heap(when.clock).timers.push(Reverse((when.at, timer)));
    }

    /// Sets the time, on the steady clock, at which a value expires.
    pub(crate) fn set_value(&mut self, at: u64, value: ValueHandle) {
        match self.values.covers(at) {
            true => self.values.add(at, value),
            false => self.set(ClockTime::steady(at), Timer::ValueExpiry(value)),
        }
    }

    /// Counts a time at which a value would have expired.
    pub(crate) fn abandon_value(&mut self, at: u64) {
        match self.values.covers(at) {
            true => self.values.abandon(),
            false => self.abandon(WhichClock::Steady),
        }
    }

    /// Counts a timer of this clock that is no longer wanted.
    pub(crate) fn abandon(&mut self, clock: WhichClock) {
        self.heap(clock).stale += 1;
    }

    /// Takes the next timer whose time has come, earliest first. But the times of values enter the heap in steps, so one
    /// of a second that has just begun may come after others of that second.
    pub(crate) fn pop(&mut self, clocks: &Clocks) -> Option<Timer> {
        self.pop_due(clocks).or_else(|| {
            let now = clocks.steady();
            if self.values.next_list_at()? > now {
                return None;
            }
            for (at, value) in self.values.take(now) {
                self.set(ClockTime::steady(at), Timer::ValueExpiry(value));
            }
            self.pop_due(clocks)
        })
    }

    fn pop_due(&mut self, clocks: &Clocks) -> Option<Timer> {
        for (heap, now) in [
            (&mut self.steady, clocks.steady()),
            (&mut self.wall, clocks.wall()),
        ] {
            if let Some(Reverse((at, _))) = heap.timers.peek()
                && *at <= now
            {
                let popped = heap.timers.pop();
                heap.shrink();
                return popped.map(|Reverse((_, timer))| timer);
            }
        }
        None
    }

    pub(crate) fn next_deadline(&self, clocks: &Clocks) -> Option<u64> {
        let first = |heap: &Heap, clock| {
            let Reverse((at, _)) = heap.timers.peek()?;
            Some(clocks.mono_deadline(ClockTime { at: *at, clock }))
        };
        let steady = first(&self.steady, WhichClock::Steady);
        let wall = first(&self.wall, WhichClock::Wall);
        let values = self.values.next_list_at();
        let values = values.map(|at| clocks.mono_deadline(ClockTime::steady(at)));
        [steady, wall, values].into_iter().flatten().min()
    }

    /// Returns the milliseconds until the next timer of each clock, except those of schedules.
    pub(crate) fn next_but_schedules_ms(&self, clocks: &Clocks) -> impl Iterator<Item = u64> {
        let steady = self.steady.timers.peek().map(|Reverse((at, _))| *at);
        let steady = steady.into_iter().chain(self.values.next_list_at());
        let steady = steady.min();
        let steady = steady.map(|at| at.saturating_sub(clocks.steady()));
        let wall = self.wall.timers.iter().filter_map(|Reverse((at, timer))| {
            let is_schedule = matches!(timer, Timer::Schedule { .. });
            (!is_schedule).then(|| at.saturating_sub(clocks.wall()))
        });
        steady.into_iter().chain(wall.min())
    }

    /// Drops stale timers once they are the majority; each timer pays for its own sweep.
    pub(crate) fn sweep(&mut self, is_wanted: impl Fn(&Timer) -> bool) {
        let is_kept = |value| is_wanted(&Timer::ValueExpiry(value));
        self.values.sweep(perhaps!("sweep-early"), is_kept);
        for heap in [&mut self.steady, &mut self.wall] {
            if heap.stale > 1024 && heap.stale > heap.timers.len() / 2 || perhaps!("sweep-early") {
                heap.timers.retain(|Reverse((_, timer))| is_wanted(timer));
                heap.stale = 0;
                heap.shrink();
            }
        }
    }

    fn heap(&mut self, clock: WhichClock) -> &mut Heap {
        match clock {
            WhichClock::Steady => &mut self.steady,
            WhichClock::Wall => &mut self.wall,
        }
    }
}
