//! Lets a Python thread wait for values that a driver's thread delivers.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use penstock_driver::{Driver, Lead};
use pyo3::prelude::*;

use crate::loan::{Loan, SHORT, check_interrupts};

/// Interval at which a wait lets Python run its signal handlers, so that Ctrl-C works.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Holder of one value that another thread delivers.
pub(crate) struct ValueSlot<T> {
    value: Mutex<Option<T>>,
    filled: Condvar,
}

impl<T: Send + 'static> ValueSlot<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            value: Mutex::new(None),
            filled: Condvar::new(),
        })
    }

    pub(crate) fn fill(&self, value: T) {
        *self.value.lock().unwrap() = Some(value);
        self.filled.notify_one();
    }

    /// Begins a call that fills this slot, then waits for it until the deadline without the interpreter lock.
    /// Returns the result of the call, and `None` if the deadline passes first.
    pub(crate) fn wait_for<R: Send>(
        &self,
        py: Python<'_>,
        driver: &dyn Driver,
        deadline: Option<Instant>,
        loan: Option<&Loan>,
        begin: impl FnOnce() -> R + Send,
    ) -> (R, PyResult<Option<T>>) {
        // Begin and wait without taking the lock in between: with busy threads around, taking it is expensive.
        let (begun, value) = py.detach(|| {
            let mut until = slice_end(deadline);
            if loan.is_some() {
                until = until.min(Instant::now() + SHORT);
            }
            let lead = Lead::take(driver);
            let begun = begin();
            // Lead only for this first slice, where latency counts. A thread that reads for all others must not
            // stop to wait for the interpreter lock.
            lead.read_until(until, || self.value.lock().unwrap().is_some());
            drop(lead);
            let value = self.take_by(until);
            if let (None, Some(loan)) = (&value, loan) {
                loan.begin_now();
            }
            (begun, value)
        });
        (begun, self.wait_on(py, value, deadline, loan.is_some()))
    }

    fn wait_on(
        &self,
        py: Python<'_>,
        mut value: Option<T>,
        deadline: Option<Instant>,
        is_in_job: bool,
    ) -> PyResult<Option<T>> {
        while value.is_none() {
            match is_in_job {
                true => check_interrupts(py)?,
                false => py.check_signals()?,
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
            value = py.detach(|| self.take_by(slice_end(deadline)));
        }
        Ok(value)
    }

    fn take_by(&self, until: Instant) -> Option<T> {
        let left = until.saturating_duration_since(Instant::now());
        let value = self.value.lock().unwrap();
        let (mut value, _) = self
            .filled
            .wait_timeout_while(value, left, |value| value.is_none())
            .unwrap();
        value.take()
    }
}

fn slice_end(deadline: Option<Instant>) -> Instant {
    let slice = Instant::now() + SLICE;
    deadline.map_or(slice, |deadline| deadline.min(slice))
}

/// Returns the deadline of a call. Python's `None`, or a time beyond all bounds, means none.
pub(crate) fn deadline(timeout_s: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(timeout_s) = timeout_s else {
        return Ok(None);
    };
    if timeout_s.is_nan() {
        return Err(pyo3::exceptions::PyValueError::new_err(
            "the timeout is not a number",
        ));
    }
    let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
    Ok(Instant::now().checked_add(timeout))
}
