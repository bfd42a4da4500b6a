//! Manages the memory and buffers of a worker's processes.

use pyo3::prelude::*;

/// Place the memory of Python objects side by side from now on, until `collapse_heap`. Return whether this works here.
#[pyfunction]
pub(crate) fn gather_arenas() -> bool {
    penstock_worker::gather_arenas()
}

/// Fill the holes of the heap, so that forks allocate without copying its pages. Call it between `gather_arenas` and
/// `collapse_heap`, from the main thread.
#[pyfunction]
pub(crate) fn fill_holes() {
    // SAFETY: the interpreter is attached.
    penstock_worker::fill_holes(|bytes| unsafe { pyo3::ffi::PyObject_Malloc(bytes) });
}

/// Move this process's memory into huge pages, and return the number of bytes that the kernel moved.
#[pyfunction]
pub(crate) fn collapse_heap(py: Python<'_>) -> usize {
    py.detach(penstock_worker::collapse_heap)
}

/// Flush the C library's output buffers, as `exit` would.
#[pyfunction]
pub(crate) fn flush_c_output(py: Python<'_>) {
    py.detach(penstock_worker::flush_c_output);
}

/// Whether this process certainly has no thread but the calling one.
#[pyfunction]
pub(crate) fn has_one_thread() -> bool {
    penstock_worker::has_one_thread()
}

/// Pages of the shared heap that isolated jobs write to. Make it before the forks.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct WrittenPages(penstock_worker::PageNotes);

#[pymethods]
impl WrittenPages {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self(penstock_worker::PageNotes::new()?))
    }

    /// Note that a job ended in this process.
    fn job_ended(&self, py: Python<'_>) {
        py.detach(|| self.0.job_ended());
    }

    /// Copy the pages that jobs wrote to, and return their number.
    fn copy(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.copy())
    }
}
