use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use penstock_worker::{Forks, SlotKind, ZygoteTurn};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// Role of a process that was forked from the zygote.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Role {
    pub(crate) child: u32,
    slot_kind: SlotKind,
    #[pyo3(get)]
    slots: u32,
    #[pyo3(get)]
    once: bool,
    #[pyo3(get)]
    warm: bool,
    pub(crate) work_fd: i32,
    pub(crate) reply_fd: i32,
    pub(crate) zygote_pid: i32,
}

#[pymethods]
impl Role {
    /// Whether it has one slot, in its main thread.
    #[getter]
    pub(crate) fn has_only_slot(&self) -> bool {
        matches!(self.slot_kind, SlotKind::Process | SlotKind::Isolated)
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.slot_kind.word()
    }
}

/// Fork children, and report how they end, as the supervisor at the other end of `control_fd` asks. Return None
/// when the supervisor is gone, and its role in each child.
///
/// Owns `control_fd` and `work_fds`, the sockets from which the children of each pool pull jobs. Nothing here
/// touches a Python object between two forks, except these functions: `flush`, before each fork, and `fork`, which
/// is `os.fork`.
#[pyfunction]
pub(crate) fn serve_forks(
    py: Python<'_>,
    control_fd: i32,
    work_fds: Vec<i32>,
    flush: &Bound<'_, PyAny>,
    fork: &Bound<'_, PyAny>,
) -> PyResult<Option<Role>> {
    if control_fd < 0 || work_fds.iter().any(|fd| *fd < 0) {
        return Err(PyValueError::new_err("a descriptor is not open"));
    }
    // SAFETY: the caller gives up these descriptors, and no other object owns them.
    let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
    let mut work: Vec<OwnedFd> = work_fds.into_iter().map(own).collect();
    let mut forks = Forks::new(own(control_fd))?;
    let zygote_pid = rustix::process::getpid().as_raw_nonzero().get();
    loop {
        let request = match py.detach(|| forks.next_turn())? {
            ZygoteTurn::Leave => return Ok(None),
            ZygoteTurn::Signal => {
                py.check_signals()?;
                continue;
            }
            ZygoteTurn::Fork(request) => request,
        };
        if request.pool >= work.len() {
            return Err(PyValueError::new_err("a child is for a pool that exists"));
        }
        // Unflushed output would be written once by each child.
        flush.call0()?;
        match fork.call0() {
            Err(error) if error.is_instance_of::<PyOSError>(py) => {
                forks.refuse(request.child, error.value(py))?;
            }
            Err(error) => return Err(error),
            Ok(pid) => match pid.extract()? {
                0 => {
                    forks.leave_in_child()?;
                    // The sockets of other pools are not for this child, and must not stay open in it.
                    let work_fd = work.swap_remove(request.pool).into_raw_fd();
                    work.drain(..).for_each(drop);
                    // Freeing would copy a page of the heap.
                    std::mem::forget(work);
                    return Ok(Some(Role {
                        child: request.child,
                        slot_kind: request.kind,
                        slots: request.slots,
                        once: request.once,
                        warm: request.warm,
                        work_fd,
                        reply_fd: request.reply.into_raw_fd(),
                        zygote_pid,
                    }));
                }
                pid => forks.forked(request.child, pid)?,
            },
        }
    }
}
