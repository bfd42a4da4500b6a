//! Where a thread of Python waits for what a driver's thread brings.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use penstock_driver::Lead;
use pyo3::prelude::*;

/// A wait ends this often to let Python run its signal handlers, so that Ctrl-C gets through.
const SLICE: Duration = Duration::from_millis(50);

/// One value that another thread brings.
pub(crate) struct Slot<T> {
    value: Mutex<Option<T>>,
    filled: Condvar,
}

impl<T: Send + 'static> Slot<T> {
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

    /// Waits for what is sure to come: a driver ends each call itself when its time is up.
    pub(crate) fn wait_for_end(&self, py: Python<'_>, lead: &Lead<'_>) -> PyResult<T> {
        loop {
            if let Some(value) = self.wait(py, lead, None)? {
                return Ok(value);
            }
        }
    }

    /// Waits without the interpreter lock, until the deadline. Gives `None` when that has come.
    pub(crate) fn wait(
        &self,
        py: Python<'_>,
        lead: &Lead<'_>,
        deadline: Option<Instant>,
    ) -> PyResult<Option<T>> {
        loop {
            let slice = Instant::now() + SLICE;
            let until = deadline.map_or(slice, |deadline| deadline.min(slice));
            let value = py.detach(|| {
                lead.read_until(until, || self.value.lock().unwrap().is_some());
                let value = self.value.lock().unwrap();
                let left = until.saturating_duration_since(Instant::now());
                let (mut value, _) = self
                    .filled
                    .wait_timeout_while(value, left, |value| value.is_none())
                    .unwrap();
                value.take()
            });
            if value.is_some() {
                return Ok(value);
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
        }
    }
}

/// The end of a call's time. Python's `None`, or a time beyond all bounds, is no end.
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
