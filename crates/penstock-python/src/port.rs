use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use penstock_driver::WatchId;
use penstock_message::{KeyState, MessageId, MessageInfo};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::answers::{all_ended, ended, ended_or_gone, info_dict, state_now};
use crate::errors::ClientError;

/// Inbox of finished asynchronous calls: register `fileno()` with the event loop, then call `drain()`.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Port {
    pub(crate) inbox: Arc<CallInbox>,
}

/// Side of the port that a driver's thread uses.
pub(crate) struct CallInbox {
    waker: penstock_driver::Waker,
    state: Mutex<InboxState>,
}

#[derive(Default)]
struct InboxState {
    closed: bool,
    /// Calls whose end is still wanted, with their watches.
    wanted: HashMap<u64, Option<WatchId>>,
    ended: Vec<(u64, Result<CallEnd, ClientError>)>,
}

/// Outcome of a call.
pub(crate) enum CallEnd {
    Committed,
    /// Owners of the keys of calls that enqueued no job, each with the index of its call.
    Enqueued(Vec<(u32, MessageId)>),
    JobEnded(KeyState),
    JobsEnded(Vec<KeyState>),
    /// Outcome of one job of a call that continues, by the job's index.
    JobOfMany(usize, KeyState),
    JobState(KeyState),
    /// State in which a cancellation found its job, if it ended that job.
    Found(Option<&'static str>),
    Info(Option<MessageInfo>),
}

impl CallInbox {
    pub(crate) fn expect(&self, token: u64) {
        self.state.lock().unwrap().wanted.insert(token, None);
    }

    /// Keeps the watch of a call, unless the call has already ended.
    pub(crate) fn expect_watch(&self, token: u64, watch: WatchId) {
        if let Some(watching) = self.state.lock().unwrap().wanted.get_mut(&token) {
            *watching = Some(watch);
        }
    }

    pub(crate) fn forget(&self, token: u64) -> Option<WatchId> {
        self.state.lock().unwrap().wanted.remove(&token)?
    }

    pub(crate) fn end(&self, token: u64, end: Result<CallEnd, ClientError>) {
        let mut state = self.state.lock().unwrap();
        if !state.closed && state.wanted.remove(&token).is_some() {
            self.push(state, token, end);
        }
    }

    /// Reports a partial outcome of a call that continues.
    pub(crate) fn tell(&self, token: u64, end: CallEnd) {
        let state = self.state.lock().unwrap();
        if !state.closed && state.wanted.contains_key(&token) {
            self.push(state, token, Ok(end));
        }
    }

    fn push(
        &self,
        mut state: MutexGuard<'_, InboxState>,
        token: u64,
        end: Result<CallEnd, ClientError>,
    ) {
        state.ended.push((token, end));
        // One wake-up is enough for everything that comes before the loop looks.
        let first = state.ended.len() == 1;
        drop(state);
        if first {
            self.waker.wake();
        }
    }
}

#[pymethods]
impl Port {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self {
            inbox: Arc::new(CallInbox {
                waker: penstock_driver::Waker::new()?,
                state: Mutex::default(),
            }),
        })
    }

    fn fileno(&self) -> i32 {
        self.inbox.waker.as_fd().as_raw_fd()
    }

    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        // Cleared first: an end after the list is taken wakes the loop again.
        self.inbox.waker.clear();
        let ended = std::mem::take(&mut self.inbox.state.lock().unwrap().ended);
        let list = PyList::empty(py);
        for (token, end) in ended {
            list.append((token, end_to_python(py, end)?))?;
        }
        Ok(list)
    }

    /// Drop all calls: later ends are not kept. The descriptor lives as long as this object, because it may
    /// still be registered with a loop.
    fn close(&self) {
        let mut state = self.inbox.state.lock().unwrap();
        state.closed = true;
        state.ended.clear();
        state.wanted.clear();
    }
}

fn end_to_python(py: Python<'_>, end: Result<CallEnd, ClientError>) -> PyResult<Bound<'_, PyAny>> {
    let value = end.map_err(|failure| failure.to_error(py)).and_then(|end| {
        Ok(match end {
            CallEnd::Committed => py.None().into_bound(py),
            CallEnd::Enqueued(owners) => {
                let owners = owners.iter();
                let owners = owners.map(|(place, owner)| (place, PyBytes::new(py, &owner.0)));
                PyList::new(py, owners)?.into_any()
            }
            CallEnd::JobEnded(state) => ended(py, state)?.into_any(),
            CallEnd::JobsEnded(states) => all_ended(py, states)?.into_any(),
            CallEnd::JobOfMany(place, KeyState::Pending) => {
                (place, py.None()).into_bound_py_any(py)?
            }
            CallEnd::JobOfMany(place, state) => {
                (place, ended_or_gone(py, state)?).into_bound_py_any(py)?
            }
            CallEnd::Found(found) => found.into_bound_py_any(py)?,
            CallEnd::JobState(state) => state_now(py, state)?.into_bound_py_any(py)?,
            CallEnd::Info(info) => info_dict(py, info)?.into_bound_py_any(py)?,
        })
    });
    match value {
        Ok(value) => Ok(value),
        Err(error) => Ok(error.into_value(py).into_bound(py).into_any()),
    }
}
