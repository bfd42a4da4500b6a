//! Fetches results before a thread asks for them, when it reads those of its jobs one after another.
//!
//! `[job.result() for job in jobs]` would ask the broker once for each job, which costs both as much as enqueueing it
//! did. So each thread keeps the ids of the jobs that it enqueued last. While it reads their results in that order, the
//! next ones are asked for ahead, in portions that grow, as operating systems read files ahead. Only results of jobs that
//! succeeded are kept: another kind of end may change when somebody retries the job.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use penstock_driver::{Driver, DriverError, ValueSink, WatchId};
use penstock_message::{Key, KeyState, MessageId, ValueStatus};
use pyo3::prelude::*;

use crate::loan::{Loan, SHORT};
use crate::wait::{SLICE, ValueSlot};

/// Maximum number of a thread's last jobs whose ids are kept, 16 bytes each.
const MAX_JOBS: usize = 4096;
/// Number of results to ask for at first. With each result that was read in order it is four times as many.
const FIRST_RESULTS: u64 = 4;
const MAX_RESULTS: u64 = 64;
const GROWTH: u64 = 4;
/// Size of all results that are asked for ahead, if each is as large as the largest so far.
const USUAL_BYTES: usize = 1 << 20;
/// Maximum size of the results that are kept. Others are asked for again.
const MAX_BYTES: usize = 4 << 20;
/// Minimum time that a caller must have to wait for a result that was asked for ahead. A shorter wait is left to the
/// usual call, which learns within that time whether a broker is there.
const MIN_TIMEOUT_S: f64 = 1.0;

thread_local! {
    static READ_AHEAD: RefCell<Option<ReadAhead>> = const { RefCell::new(None) };
}

/// Jobs that a thread enqueued with one driver. They are numbered in that order.
struct ReadAhead {
    driver: Weak<dyn Driver>,
    jobs: VecDeque<MessageId>,
    /// Number of the first of `jobs`.
    first: u64,
    /// Number after that of the job that the thread waited for last.
    next: u64,
    /// Number after that of the last job that was asked for ahead.
    asked: u64,
    /// Number of results to ask for ahead.
    window: u64,
    /// Watches in use, each with the number after that of its last job.
    watches: VecDeque<(u64, WatchId)>,
    arrived: Arc<Arrived>,
}

/// Steps before a wait for a job.
struct NextRead {
    /// Watches of a series that the thread has left.
    left: Vec<WatchId>,
    /// Jobs to ask for ahead, which follow this one.
    ask: Vec<Key>,
    /// Watch by which this job was asked for ahead, if it was.
    watch: Option<WatchId>,
    arrived: Arc<Arrived>,
}

/// Notes jobs that this thread has enqueued.
pub(crate) fn published(driver: &Arc<dyn Driver>, jobs: &[MessageId]) {
    with(driver, |ahead| ahead.add(jobs));
}

/// Returns a job's result if it was fetched ahead, and asks for those that the thread will probably read next. `None`:
/// the caller has to ask for this one as usual, and may already have waited up to [`SLICE`].
pub(crate) fn take(
    py: Python<'_>,
    driver: &Arc<dyn Driver>,
    job: MessageId,
    timeout_s: Option<f64>,
    loan: Option<&Loan>,
) -> PyResult<Option<KeyState>> {
    let Some(next) = with(driver, |ahead| ahead.next_read(job)).flatten() else {
        return Ok(None);
    };
    let NextRead {
        left,
        ask,
        watch,
        arrived,
    } = next;
    if !left.is_empty() || !ask.is_empty() {
        let begun = py.detach(|| {
            left.into_iter().for_each(|watch| driver.unwatch(watch));
            let sink = Arc::clone(&arrived);
            (!ask.is_empty()).then(|| driver.watch_ahead(ask, sink))
        });
        if let Some(watch) = begun {
            with(driver, |ahead| {
                ahead.watches.push_back((ahead.asked, watch))
            });
        }
    }
    let Some(watch) = watch else {
        return Ok(None);
    };
    let has_time = timeout_s.is_none_or(|timeout_s| timeout_s >= MIN_TIMEOUT_S);
    let result = match arrived.report(job) {
        Some(Report::Result(result)) => Ok(Some(result)),
        Some(Report::Due) if has_time => {
            // Long waits are for the usual call, which lends a job's slot and notices a broker that is gone.
            let patience = if loan.is_some() { SHORT } else { SLICE };
            arrived.wait(py, &**driver, watch, job, patience)
        }
        _ => Ok(None),
    };
    // Whatever is reported of this job from now on, nobody would take it.
    arrived.forget(job);
    result
}

fn with<R>(driver: &Arc<dyn Driver>, use_it: impl FnOnce(&mut ReadAhead) -> R) -> Option<R> {
    let with_cell = |cell: &RefCell<Option<ReadAhead>>| {
        let mut held = cell.borrow_mut();
        let ahead = match &mut *held {
            Some(ahead) if ahead.is_of(driver) => ahead,
            other => other.insert(ReadAhead::new(driver)),
        };
        use_it(ahead)
    };
    // A thread that is ending may still run Python code.
    READ_AHEAD.try_with(with_cell).ok()
}

impl ReadAhead {
    fn new(driver: &Arc<dyn Driver>) -> Self {
        Self {
            driver: Arc::downgrade(driver),
            jobs: VecDeque::new(),
            first: 0,
            next: 0,
            asked: 0,
            window: 0,
            watches: VecDeque::new(),
            arrived: Arc::default(),
        }
    }

    fn is_of(&self, driver: &Arc<dyn Driver>) -> bool {
        // The weak reference keeps the address from being used again.
        std::ptr::addr_eq(self.driver.as_ptr(), Arc::as_ptr(driver))
    }

    fn add(&mut self, jobs: &[MessageId]) {
        let last = jobs.len().saturating_sub(MAX_JOBS);
        let (skipped, jobs) = jobs.split_at(last);
        let surplus = (self.jobs.len() + jobs.len()).saturating_sub(MAX_JOBS);
        self.jobs.drain(..surplus);
        self.first += (surplus + skipped.len()) as u64;
        self.jobs.extend(jobs);
        if self.next < self.first && self.next < self.asked {
            // Nobody will read what was asked for ahead: the thread has enqueued too many others since.
            self.window = 0;
            self.watches.clear();
            self.arrived = Arc::default();
        }
        self.next = self.next.max(self.first);
        self.asked = self.asked.max(self.first);
    }

    /// Returns the number after that of the last job.
    fn end(&self) -> u64 {
        self.first + self.jobs.len() as u64
    }

    fn job(&self, number: u64) -> Option<MessageId> {
        let place = number.checked_sub(self.first)?;
        self.jobs.get(place as usize).copied()
    }

    /// Begins the wait for a job. Returns `None` if there is nothing to do for it.
    fn next_read(&mut self, job: MessageId) -> Option<NextRead> {
        let mut left = Vec::new();
        if self.job(self.next) == Some(job) {
            self.window = (self.window * GROWTH).clamp(FIRST_RESULTS, MAX_RESULTS);
            self.next += 1;
        } else {
            let place = self.jobs.iter().rposition(|other| *other == job)?;
            let next = self.first + place as u64 + 1;
            if next == self.next {
                // The usual wait for this job continues.
                return None;
            }
            self.next = next;
            self.asked = next;
            self.window = 0;
            left.extend(self.watches.drain(..).map(|(_, watch)| watch));
            self.arrived = Arc::default();
        }
        let passed = |(end, _): &(u64, WatchId)| *end < self.next;
        let passed = self
            .watches
            .iter()
            .take_while(|watch| passed(watch))
            .count();
        self.watches.drain(..passed);
        let watch = match self.next <= self.asked {
            true => self.watches.front().map(|(_, watch)| *watch),
            false => None,
        };
        self.asked = self.asked.max(self.next);
        let ask = self.ask();
        let is_idle = left.is_empty() && ask.is_empty() && watch.is_none();
        (!is_idle).then(|| NextRead {
            left,
            ask,
            watch,
            arrived: Arc::clone(&self.arrived),
        })
    }

    /// Returns the jobs to ask for now: none while half of a portion is still ahead.
    fn ask(&mut self) -> Vec<Key> {
        let mut arrived = self.arrived.lock();
        // After a few results that are not fetched ahead, it is tried again with one.
        arrived.largest -= arrived.largest / 8;
        let fit = USUAL_BYTES / arrived.largest.max(1);
        let window = self.window.min(fit as u64);
        if self.asked - self.next > window / 2 {
            return Vec::new();
        }
        let asked = self.asked;
        self.asked = self.end().min(self.next + window).max(asked);
        let jobs = (asked..self.asked).filter_map(|number| self.job(number));
        let jobs: Vec<MessageId> = jobs.collect();
        let due = jobs.iter().map(|job| (*job, Report::Due));
        arrived.reports.extend(due);
        jobs.into_iter().map(Key::Result).collect()
    }
}

/// Reports on the jobs that were asked for ahead and not read yet.
#[derive(Default)]
struct Arrived {
    state: Mutex<ArrivedState>,
}

#[derive(Default)]
struct ArrivedState {
    reports: HashMap<MessageId, Report>,
    /// Total size of the results.
    bytes: usize,
    /// Size of the largest recent result.
    largest: usize,
    /// Job that the thread waits for.
    awaited: Option<(MessageId, Arc<ValueSlot<Option<KeyState>>>)>,
}

#[derive(Clone)]
enum Report {
    Due,
    Result(KeyState),
    /// The job has to be asked for again.
    Unkept,
}

impl Report {
    fn bytes(&self) -> usize {
        match self {
            Self::Result(KeyState::Present(value)) => value.body.len(),
            _ => 0,
        }
    }

    fn result(self) -> Option<KeyState> {
        match self {
            Self::Result(result) => Some(result),
            Self::Due | Self::Unkept => None,
        }
    }
}

impl Arrived {
    fn lock(&self) -> MutexGuard<'_, ArrivedState> {
        // No holder of the lock panics, and each change leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, job: MessageId) -> Option<Report> {
        self.lock().reports.get(&job).cloned()
    }

    fn forget(&self, job: MessageId) {
        let mut state = self.lock();
        let report = state.reports.remove(&job);
        state.bytes -= report.map_or(0, |report| report.bytes());
    }

    /// Waits for a job that was asked for by this watch. Returns its result, if it arrives in time.
    fn wait(
        &self,
        py: Python<'_>,
        driver: &dyn Driver,
        watch: WatchId,
        job: MessageId,
        patience: Duration,
    ) -> PyResult<Option<KeyState>> {
        let slot = ValueSlot::new();
        let until = Instant::now() + patience;
        let (_, result) = slot.wait_for(py, driver, Some(until), None, || {
            driver.await_ahead(watch, true);
            let mut state = self.lock();
            // It may have arrived in the meantime.
            match state.reports.get(&job) {
                Some(Report::Due) => state.awaited = Some((job, Arc::clone(&slot))),
                arrived => slot.fill(arrived.cloned().and_then(Report::result)),
            }
        });
        py.detach(|| driver.await_ahead(watch, false));
        self.lock().awaited = None;
        Ok(result?.flatten())
    }

    /// Lets a waiting thread ask for its job as usual.
    fn give_up(&self) {
        let awaited = self.lock().awaited.take();
        if let Some((_, slot)) = awaited {
            slot.fill(None);
        }
    }
}

impl ValueSink for Arrived {
    fn value(&self, key: Key, told: KeyState) {
        let Key::Result(job) = key else {
            return;
        };
        let mut report = match &told {
            KeyState::Present(value) if value.status == ValueStatus::Succeeded => {
                Report::Result(told)
            }
            _ => Report::Unkept,
        };
        let bytes = report.bytes();
        let mut state = self.lock();
        state.largest = state.largest.max(bytes);
        if let Some((_, slot)) = state.awaited.take_if(|(awaited, _)| *awaited == job) {
            drop(state);
            return slot.fill(report.result());
        }
        if !matches!(state.reports.get(&job), Some(Report::Due)) {
            // The thread asked as usual meanwhile.
            return;
        }
        match state.bytes + bytes <= MAX_BYTES {
            true => state.bytes += bytes,
            false => report = Report::Unkept,
        }
        state.reports.insert(job, report);
    }

    fn reachable(&self, reachable: bool) {
        if !reachable {
            self.give_up();
        }
    }

    fn failed(&self, _error: DriverError) {
        self.give_up();
    }
}
