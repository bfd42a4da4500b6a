//! Manages the memory and buffers of a worker's processes.

use pyo3::prelude::*;

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
