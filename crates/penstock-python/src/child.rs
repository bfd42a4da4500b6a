use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, TryLockError};

use penstock_message::{Failure, Retries};
use penstock_worker::{Ended, FailureView, JobView, Kind, Link, Pulled, end_with_parent};
use pyo3::exceptions::{PyRuntimeError, PySystemExit, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::options::retries_to_python;

/// Size above which a value goes over a socket that may have to be waited for.
const MAY_WAIT_BYTES: usize = 32 * 1024;

/// A worker child's side of the link to its supervisor: iterate over the jobs to run, and report how each
/// has ended. See crates/penstock-worker/src/link.rs.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct ChildLink {
    state: Mutex<State>,
    abandoned: AtomicBool,
}

struct State {
    link: Link,
    /// The name of the packet's task: one string for all its jobs.
    task: Option<Py<PyString>>,
}

impl ChildLink {
    fn with_state<R>(&self, use_it: impl FnOnce(&mut State) -> PyResult<R>) -> PyResult<R> {
        if self.abandoned.load(Ordering::Relaxed) {
            // A fork of the task's own, that has left its task as if it were the child.
            return Err(PySystemExit::new_err(0));
        }
        match self.state.try_lock() {
            Ok(mut state) => use_it(&mut state),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => Err(
                PyRuntimeError::new_err("a worker child's link belongs to its main thread"),
            ),
        }
    }
}

/// Rarely set fields of a job, as (generation, attempts of earlier ones, retries, headers); `None` when all are unset.
pub(crate) fn extras_to_python<'py, 'a>(
    py: Python<'py>,
    retried: (u32, u32),
    retries: Option<&Retries>,
    headers: impl ExactSizeIterator<Item = (&'a str, &'a [u8])>,
) -> PyResult<Option<Bound<'py, PyTuple>>> {
    if retried == (0, 0) && retries.is_none() && headers.len() == 0 {
        return Ok(None);
    }
    let (generation, attempts_before) = retried;
    let retries = retries_to_python(py, retries)?;
    let named = PyDict::new(py);
    for (name, value) in headers {
        named.set_item(name, String::from_utf8_lossy(value))?;
    }
    (generation, attempts_before, retries, named)
        .into_pyobject(py)
        .map(Some)
}

fn extras<'py>(py: Python<'py>, job: &JobView<'_>) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let retried = job.retried.map_or((0, 0), |retried| {
        (retried.generation, retried.attempts_before)
    });
    let headers = job.headers.iter().copied();
    extras_to_python(py, retried, job.retries.as_ref(), headers)
}

#[pymethods]
impl ChildLink {
    /// Owns the descriptors from here on. The process exits when `parent_pid`, its parent, does.
    #[new]
    fn new(
        work_fd: i32,
        reply_fd: i32,
        pages_fd: i32,
        slot: u32,
        parent_pid: i32,
    ) -> PyResult<Self> {
        if work_fd < 0 || reply_fd < 0 || pages_fd < 0 {
            return Err(PyValueError::new_err("a descriptor is not open"));
        }
        // SAFETY: the caller gives up these descriptors, which no other object owns any more.
        let [work, reply, pages] =
            [work_fd, reply_fd, pages_fd].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let parent = rustix::process::Pid::from_raw(parent_pid)
            .ok_or_else(|| PyValueError::new_err("not a process id"))?;
        end_with_parent(parent)?;
        Ok(Self {
            state: Mutex::new(State {
                link: Link::new(work, reply, pages, slot)?,
                task: None,
            }),
            abandoned: AtomicBool::new(false),
        })
    }

    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    /// Wait for the next job and claim it; the end comes when the supervisor wants no more.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.with_state(|State { link, task }| {
            loop {
                if let Some(job) = link.begin()? {
                    let notes =
                        PyList::new(py, job.notes.iter().map(|note| PyBytes::new(py, note)))?;
                    let task = task.as_ref().map(|task| task.bind(py));
                    return (
                        task,
                        PyBytes::new(py, &job.id),
                        job.attempt,
                        job.crashes,
                        job.redelivered,
                        job.wants_result,
                        job.enqueued_at_ms,
                        PyBytes::new(py, job.body),
                        notes,
                        extras(py, &job)?,
                    )
                        .into_pyobject(py)
                        .map(Some);
                }
                match py.detach(|| link.pull())? {
                    Pulled::Packet => *task = Some(PyString::new(py, link.task()).unbind()),
                    Pulled::End => return Ok(None),
                    Pulled::Interrupted => py.check_signals()?,
                }
            }
        })
    }

    /// Report how the job returned last has ended, as `Runner.run` says it. `failure`: the error's class, its
    /// message and its fingerprint, and a preview of the arguments.
    #[pyo3(signature = (kind, delay_ms, value, note, failure))]
    fn finish(
        &self,
        py: Python<'_>,
        kind: u8,
        delay_ms: u64,
        value: Option<&[u8]>,
        note: Option<&[u8]>,
        failure: Option<(PyBackedStr, PyBackedStr, u64, PyBackedBytes)>,
    ) -> PyResult<()> {
        let kind = Kind::from_number(kind)
            .ok_or_else(|| PyValueError::new_err("a job ends in one of four ways"))?;
        let failure = failure
            .as_ref()
            .map(|(class, message, fingerprint, preview)| FailureView {
                class,
                message,
                fingerprint: *fingerprint,
                preview,
            });
        let is_listable = |failure: &FailureView<'_>| {
            [failure.class, failure.message]
                .iter()
                .all(|text| text.len() <= Failure::TEXT_CAP_BYTES)
                && failure.preview.len() <= Failure::PREVIEW_CAP_BYTES
        };
        if failure.is_some() != (kind == Kind::Failed) || !failure.iter().all(is_listable) {
            return Err(PyValueError::new_err(
                "a job that failed, and no other, has an error's class and message of at most 200 bytes, and a preview of \
                 at most 1 KiB",
            ));
        }
        let note = note.unwrap_or_default();
        let ended = Ended {
            kind,
            delay_ms,
            value,
            failure,
            note,
        };
        let may_wait = value.map_or(0, <[u8]>::len) + note.len() > MAY_WAIT_BYTES;
        self.with_state(|State { link, .. }| {
            if may_wait {
                py.detach(|| link.finish(ended))?;
            } else {
                link.finish(ended)?;
            }
            Ok(())
        })
    }

    /// Leaves the link, in a process that was forked from the child.
    fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}
