use std::cell::RefCell;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};

use bytes::Bytes;
use penstock_message::{
    Failure, InputShape, InputValue, InputValues, MessageId, Retries, ValueStatus,
};
use penstock_worker::{
    Ended, FailureView, JobView, Kind, Link, Order, Pulled, SharedPages, Slot, Window,
    end_with_parent, limit_arenas, score_of_children, steady_ns, write_score,
};
use pyo3::exceptions::{PyRuntimeError, PySystemExit, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::forks::Role;
use crate::ids;
use crate::loan::Loan;
use crate::options::retries_to_python;
use crate::progress::{Number, encode};

/// Size above which a value goes over a socket that may block.
const MAY_BLOCK_BYTES: usize = 32 * 1024;

/// Worker child's side of the link to its supervisor; creates the slots that run jobs. See
/// crates/penstock-worker/src/link.rs.
///
/// Made in the zygote and opened in the child: each Python object that a child makes is on a page that it must copy first.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct ChildLink {
    link: OnceLock<Arc<Link>>,
    /// Pages for the link, until it is open.
    pages: Mutex<Option<SharedPages>>,
    /// The `oom_score_adj` of a child.
    score: Option<String>,
    /// Slot of a child with a single one.
    only_slot: Py<SlotLink>,
    shared: Arc<ChildShared>,
}

/// State that the slots of a child share, apart from the link.
#[derive(Default)]
struct ChildShared {
    /// Whether this process is a fork of the child.
    abandoned: AtomicBool,
    /// Pipe that reports the ends of threads: (reader, writer).
    ends: OnceLock<(OwnedFd, OwnedFd)>,
}

/// Slot of a child: iterate over its jobs, and report how each ended.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct SlotLink {
    /// Unset in the zygote.
    opened: OnceLock<OpenSlot>,
    shared: Arc<ChildShared>,
}

struct OpenSlot {
    state: Mutex<SlotState>,
    window: Arc<Window>,
}

struct SlotState {
    slot: Slot,
    /// Name of the packet's task: one string for all its jobs.
    task: Option<Py<PyString>>,
}

thread_local! {
    static THREAD_END: RefCell<Option<ThreadEnd>> = const { RefCell::new(None) };
}

/// Reports the end of the thread that owns it, however it ends: C code may end a thread without telling Python.
struct ThreadEnd {
    slot: u32,
    shared: Arc<ChildShared>,
}

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        if let Some((_, told)) = self.shared.ends.get()
            && !self.shared.abandoned.load(Ordering::Relaxed)
        {
            // Writing only fails when nobody is reading.
            let _ = rustix::io::write(told, &self.slot.to_le_bytes());
        }
    }
}

impl ChildShared {
    fn refuse_abandoned(&self) -> PyResult<()> {
        match self.abandoned.load(Ordering::Relaxed) {
            // The task forked a process that returned from the task as if it were the child.
            true => Err(PySystemExit::new_err(0)),
            false => Ok(()),
        }
    }
}

fn not_open() -> PyErr {
    PyRuntimeError::new_err("the link to the supervisor is not open")
}

impl ChildLink {
    fn link(&self) -> PyResult<&Arc<Link>> {
        self.link.get().ok_or_else(not_open)
    }
}

impl SlotLink {
    fn open(&self, link: &Arc<Link>) {
        self.opened.get_or_init(|| {
            let slot = link.slot();
            OpenSlot {
                window: slot.window(),
                state: Mutex::new(SlotState { slot, task: None }),
            }
        });
    }

    fn opened(&self) -> PyResult<&OpenSlot> {
        self.opened.get().ok_or_else(not_open)
    }

    /// Returns the window; none before the slot is open, when it has no job either.
    fn window(&self) -> Option<&Arc<Window>> {
        self.opened.get().map(|opened| &opened.window)
    }

    fn with_state<R>(&self, use_it: impl FnOnce(&mut SlotState) -> PyResult<R>) -> PyResult<R> {
        self.shared.refuse_abandoned()?;
        match self.opened()?.state.try_lock() {
            Ok(mut state) => use_it(&mut state),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => {
                Err(PyRuntimeError::new_err("a slot belongs to one thread"))
            }
        }
    }
}

/// Sets the exception that the thread raises at its next step, or withdraws one that it has not raised yet.
fn set_exception(thread: std::ffi::c_ulong, exception: Option<&Bound<'_, PyAny>>) {
    let exception = exception.map_or(std::ptr::null_mut(), Bound::as_ptr);
    // SAFETY: a `Bound` only exists while holding the interpreter's lock; without one, the caller is a method.
    unsafe { pyo3::ffi::PyThreadState_SetAsyncExc(thread as _, exception) };
}

impl SlotState {
    /// Begins the next job of the pulled packet.
    fn begin<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(job) = self.slot.begin()? else {
            return Ok(None);
        };
        let notes = PyList::new(py, job.notes.iter().map(|note| PyBytes::new(py, note)))?;
        let task = self.task.as_ref().map(|task| task.bind(py));
        (
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
            .map(Some)
    }

    fn name_task(&mut self, py: Python<'_>) {
        let name = self.slot.task();
        let known = self.task.as_ref().map(|task| task.bind(py));
        if known.is_none_or(|known| known.to_str().ok() != Some(name)) {
            self.task = Some(PyString::new(py, name).unbind());
        }
    }
}

/// Returns the rarely set fields of a job as (generation, attempts of earlier ones, retries, headers, (timeout,
/// soft timeout) in ms, (inputs, workflow, its deadline)); `None` when all are unset.
pub(crate) fn extras_to_python<'py, 'a>(
    py: Python<'py>,
    retried: (u32, u32),
    retries: Option<&Retries>,
    headers: impl ExactSizeIterator<Item = (&'a str, &'a [u8])>,
    limits: (Option<u64>, Option<u64>),
    inputs: Option<(InputShape, Bytes)>,
    workflow: (Option<[u8; 16]>, Option<u64>, Option<MessageId>),
) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let has_limits = limits != (None, None);
    let (workflow, deadline_ms, member) = workflow;
    let is_step = inputs.is_some() || workflow.is_some();
    if retried == (0, 0) && retries.is_none() && headers.len() == 0 && !has_limits && !is_step {
        return Ok(None);
    }
    let (generation, attempts_before) = retried;
    let retries = retries_to_python(py, retries)?;
    let named = PyDict::new(py);
    for (name, value) in headers {
        named.set_item(name, String::from_utf8_lossy(value))?;
    }
    let inputs = match inputs {
        None => None,
        Some((shape, bytes)) => Some((shape as u8, given(py, &bytes)?)),
    };
    let workflow = workflow.map(|id| PyBytes::new(py, &id));
    let step = (
        inputs,
        workflow,
        deadline_ms,
        member.and_then(ids::grows_outside),
    );
    (generation, attempts_before, retries, named, limits, step)
        .into_pyobject(py)
        .map(Some)
}

fn extras<'py>(py: Python<'py>, job: &JobView<'_>) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let retried = job.retried.map_or((0, 0), |retried| {
        (retried.generation, retried.attempts_before)
    });
    let headers = job.headers.iter().copied();
    let limits = (job.timeout_ms, job.soft_timeout_ms);
    let inputs = job
        .inputs
        .map(|(shape, bytes)| (shape, Bytes::copy_from_slice(bytes)));
    extras_to_python(
        py,
        retried,
        job.retries.as_ref(),
        headers,
        limits,
        inputs,
        (
            job.workflow,
            job.deadline_ms,
            job.is_member.then_some(MessageId(job.id)),
        ),
    )
}

/// Returns the values of a join as (join, count, values). Each value is (status, body). The body of a gathered
/// one is such a tuple again, and status -1 means that the value is gone. `None` replaces values that were not
/// sent along.
fn given<'py>(py: Python<'py>, bytes: &Bytes) -> PyResult<Bound<'py, PyTuple>> {
    let values = InputValues::decode(bytes)
        .map_err(|_| PyValueError::new_err("the broker sent inputs that can't be read"))?;
    given_to_python(py, &values)
}

fn given_to_python<'py>(py: Python<'py>, given: &InputValues) -> PyResult<Bound<'py, PyTuple>> {
    let value = |value: &InputValue| -> PyResult<Bound<'py, PyTuple>> {
        match value {
            InputValue::Of(status, body) => {
                (*status as i32, PyBytes::new(py, body)).into_pyobject(py)
            }
            InputValue::Gathered(inner) => {
                let status = ValueStatus::Gathered as i32;
                (status, given_to_python(py, inner)?).into_pyobject(py)
            }
            InputValue::Gone => (-1, PyBytes::new(py, b"")).into_pyobject(py),
        }
    };
    let values = match &given.values {
        None => None,
        Some(values) => {
            let values: Vec<_> = values.iter().map(value).collect::<PyResult<_>>()?;
            Some(PyList::new(py, values)?)
        }
    };
    (PyBytes::new(py, &given.join.0), given.count, values).into_pyobject(py)
}

#[pymethods]
impl ChildLink {
    /// Make the link of a zygote's future children. Owns the descriptor of the worker's pages from here on.
    #[new]
    fn new(py: Python<'_>, pages_fd: i32) -> PyResult<Self> {
        if pages_fd < 0 {
            return Err(PyValueError::new_err("a descriptor is not open"));
        }
        // SAFETY: the caller gives up this descriptor, and no other object owns it.
        let pages = SharedPages::map(unsafe { OwnedFd::from_raw_fd(pages_fd) })?;
        // The first look at the clock finds out where to read it.
        steady_ns();
        let shared = Arc::new(ChildShared::default());
        let only_slot = SlotLink {
            opened: OnceLock::new(),
            shared: Arc::clone(&shared),
        };
        Ok(Self {
            link: OnceLock::new(),
            pages: Mutex::new(Some(pages)),
            score: score_of_children(),
            only_slot: Py::new(py, only_slot)?,
            shared,
        })
    }

    /// Open the link in a child, which exits when the zygote does. Owns the descriptors from here on.
    fn open(&self, role: &Role) -> PyResult<()> {
        let pages = self.pages.lock().ok().and_then(|mut pages| pages.take());
        let pages = pages.ok_or_else(|| PyValueError::new_err("a child opens its link once"))?;
        // SAFETY: the caller gives up these descriptors, and no other object owns them.
        let [work, reply] =
            [role.work_fd, role.reply_fd].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let parent = rustix::process::Pid::from_raw(role.zygote_pid)
            .ok_or_else(|| PyValueError::new_err("not a process id"))?;
        end_with_parent(parent)?;
        // If the kernel is short of memory, it should kill a process that runs jobs first.
        if let Some(score) = &self.score {
            write_score(score.as_bytes());
        }
        // This process is a fork of the zygote, but not of the child.
        self.shared.abandoned.store(false, Ordering::Relaxed);
        let opened = Link::new(work, reply, pages, role.child)?;
        let link = self.link.get_or_init(|| opened);
        if role.has_only_slot() {
            self.only_slot.get().open(link);
        }
        Ok(())
    }

    /// Slot of a child with a single one, open once the link is.
    #[getter]
    fn only_slot(&self, py: Python<'_>) -> Py<SlotLink> {
        self.only_slot.clone_ref(py)
    }

    /// Create a slot, which belongs to the thread that uses it.
    fn slot(&self) -> PyResult<SlotLink> {
        let slot = SlotLink {
            opened: OnceLock::new(),
            shared: Arc::clone(&self.shared),
        };
        slot.open(self.link()?);
        Ok(slot)
    }

    /// Prepare this process for slots in threads. Returns a descriptor that reports the ends of these threads
    /// (see `SlotLink.tell_end_of_thread`).
    fn begin_threads(&self, slots: usize) -> PyResult<i32> {
        limit_arenas();
        self.link()?.watch_faults(slots)?;
        if self.shared.ends.get().is_none() {
            let flags = rustix::pipe::PipeFlags::CLOEXEC;
            let ends = rustix::pipe::pipe_with(flags).map_err(std::io::Error::from)?;
            self.link()?.tell_parked_on(ends.1.try_clone()?);
            let _ = self.shared.ends.set(ends);
        }
        let ends = self.shared.ends.get();
        ends.map(|(heard, _)| heard.as_raw_fd())
            .ok_or_else(|| PyRuntimeError::new_err("there is no pipe"))
    }

    /// Return the socket that slots pull from, for an event loop.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.link()?.work().as_raw_fd())
    }

    /// Notify the supervisor of outcomes. Iterating over a slot does so automatically.
    fn flush(&self) -> PyResult<()> {
        self.shared.refuse_abandoned()?;
        Ok(self.link()?.flush()?)
    }

    /// Report to the supervisor how many slots can take jobs.
    fn serve(&self, py: Python<'_>, slots: u32) -> PyResult<()> {
        self.shared.refuse_abandoned()?;
        let link = self.link()?;
        Ok(py.detach(|| link.tell_serving(slots))?)
    }

    /// Take no more jobs: idle slots in line end at once, the others with their jobs.
    fn close(&self) -> PyResult<()> {
        self.link()?.close();
        Ok(())
    }

    /// Interrupt the slot in line at the socket, after `close`. False: there is none.
    fn nudge(&self) -> PyResult<bool> {
        Ok(self.link()?.nudge())
    }

    /// Report the progress of a job that runs here, from any thread. False: it does not run here, or no longer
    /// does.
    #[pyo3(signature = (job_id, done, total, message))]
    fn progress(
        &self,
        py: Python<'_>,
        job_id: [u8; 16],
        done: Number,
        total: Option<Number>,
        message: &str,
    ) -> PyResult<bool> {
        let body = encode(done, total, message)?;
        if self.shared.abandoned.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let link = self.link()?;
        Ok(py.detach(|| link.tell_progress(job_id, &body))?)
    }

    /// Carry out the supervisor's requests between two jobs. True: this process must exit once its running jobs
    /// have ended.
    fn heed(&self, py: Python<'_>) -> PyResult<bool> {
        let link = self.link()?;
        Ok(py.detach(|| link.heed()))
    }

    /// Number of slots with a parked job: as many other slots may run jobs instead.
    #[getter]
    fn parked(&self) -> PyResult<u32> {
        Ok(self.link()?.parked())
    }

    /// Whether a slot waits at the socket.
    #[getter]
    fn has_head(&self) -> PyResult<bool> {
        Ok(self.link()?.has_head())
    }

    /// End this many slots in line, except the one at the socket. Return how many there were.
    fn dismiss(&self, slots: usize) -> PyResult<usize> {
        Ok(self.link()?.dismiss(slots))
    }

    /// Leave the link, in a process that was forked from the child.
    fn abandon(&self) {
        self.shared.abandoned.store(true, Ordering::Relaxed);
    }

    #[getter]
    fn is_abandoned(&self) -> bool {
        self.shared.abandoned.load(Ordering::Relaxed)
    }
}

#[pymethods]
impl SlotLink {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    /// Wait for the next job and claim it. Iteration ends when the supervisor sends no more.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.with_state(|state| {
            loop {
                if let Some(job) = state.begin(py)? {
                    return Ok(Some(job));
                }
                let slot = &mut state.slot;
                match py.detach(|| slot.pull())? {
                    Pulled::Packet => state.name_task(py),
                    Pulled::End => return Ok(None),
                    Pulled::Interrupted | Pulled::Nothing => py.check_signals()?,
                }
            }
        })
    }

    /// Take a packet. True: there was one; False: there is none now; None: there will be no more.
    fn try_pull(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        self.with_state(|state| {
            loop {
                match state.slot.try_pull()? {
                    Pulled::Packet => {
                        state.name_task(py);
                        return Ok(Some(true));
                    }
                    Pulled::Nothing => return Ok(Some(false)),
                    Pulled::End => return Ok(None),
                    Pulled::Interrupted => py.check_signals()?,
                }
            }
        })
    }

    /// Claim the next job of the packet, if there is one.
    fn begin<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.with_state(|state| state.begin(py))
    }

    /// Report how the last returned job ended, as `Runner.run` states it. `failure`: the error's class, its
    /// message and its fingerprint, and a preview of the arguments.
    /// True: the job's time was over, so it can't have succeeded and must be reported as failed.
    #[pyo3(signature = (kind, delay_ms, value, note, failure))]
    fn finish(
        &self,
        py: Python<'_>,
        kind: u8,
        delay_ms: u64,
        value: Option<&[u8]>,
        note: Option<&[u8]>,
        failure: Option<(PyBackedStr, PyBackedStr, u64, PyBackedBytes)>,
    ) -> PyResult<bool> {
        let kind = Kind::from_number(kind)
            .filter(|kind| *kind != Kind::Lost)
            .ok_or_else(|| PyValueError::new_err("a job ends in one of eight ways"))?;
        if let Some(heard) = self.opened()?.window.heard() {
            // An exception that was sent to this thread and not raised must not reach a later job.
            // SAFETY: this is a thread of the interpreter.
            set_exception(unsafe { pyo3::ffi::PyThread_get_thread_ident() } as _, None);
            let has_returned = matches!(kind, Kind::Succeeded | Kind::Replaced | Kind::Spawned);
            if heard == Order::Hard && has_returned {
                return Ok(true);
            }
        }
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
        let is_large = value.map_or(0, <[u8]>::len) + note.len() > MAY_BLOCK_BYTES;
        self.with_state(|SlotState { slot, .. }| {
            if is_large || slot.would_wait() {
                py.detach(|| slot.finish(ended))?;
            } else {
                slot.finish(ended)?;
            }
            Ok(false)
        })
    }

    /// Return the order to the running job that may be carried out now: 1, to wind up; 2, to end because it was
    /// cancelled; 3, to end because its time is over; 0, none.
    fn order(&self) -> u8 {
        self.window()
            .and_then(|window| window.order())
            .map_or(0, |order| order as u8)
    }

    /// Like `order`, but the order then counts as carried out.
    fn take_order(&self) -> u8 {
        self.window()
            .and_then(|window| window.take_order())
            .map_or(0, |order| order as u8)
    }

    /// Return the order last taken for the running job.
    #[getter]
    fn heard(&self) -> u8 {
        self.window()
            .and_then(|window| window.heard())
            .map_or(0, |order| order as u8)
    }

    /// Carry out an order in another thread, which runs this slot: raise the one of these exceptions that
    /// matches the order.
    fn strike(&self, thread: std::ffi::c_ulong, exceptions: [Bound<'_, PyAny>; 3]) {
        // The interpreter's lock is held from here on, as it is when the job ends. So the exception can't reach
        // a later job.
        if let Some(order) = self.window().and_then(|window| window.take_order()) {
            set_exception(thread, Some(&exceptions[order as usize - 1]));
        }
    }

    /// Shield the running job from orders, except the end of its time.
    fn shield(&self) -> PyResult<()> {
        self.opened()?.window.shield();
        Ok(())
    }

    fn unshield(&self) -> PyResult<()> {
        self.opened()?.window.unshield();
        Ok(())
    }

    /// Create the loan for a wait of the job with this id.
    fn loan(&self, job_id: &[u8]) -> PyResult<Loan> {
        let job = job_id
            .try_into()
            .map_err(|_| PyValueError::new_err("an id has sixteen bytes"))?;
        Ok(Loan::new(Arc::clone(&self.opened()?.window), job))
    }

    /// Whether a job has begun and its end was not reported.
    #[getter]
    fn is_running(&self) -> bool {
        self.window().is_some_and(|window| window.is_open())
    }

    /// Make the calling thread this slot's. Its end, however it comes, and its fatal signals are reported on
    /// the descriptor of `ChildLink.begin_threads`: `number`, in four bytes.
    fn tell_end_of_thread(&self, number: u32) -> PyResult<()> {
        // First, so that the end is reported even if a later step fails.
        THREAD_END.set(Some(ThreadEnd {
            slot: number,
            shared: Arc::clone(&self.shared),
        }));
        self.with_state(|SlotState { slot, .. }| Ok(slot.watch_thread()?))
    }

    /// Report that this slot's thread has ended, and why. False: it had no job then.
    fn lose(&self, py: Python<'_>, why: &str) -> PyResult<bool> {
        self.with_state(|SlotState { slot, .. }| Ok(py.detach(|| slot.lose(why))?))
    }
}
