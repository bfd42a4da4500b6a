//! Memory and buffers of a worker's processes.

use pyo3::prelude::*;

/// Have the kernel move this process's memory into huge pages, and return the number of bytes that it did.
#[pyfunction]
pub(crate) fn collapse_heap(py: Python<'_>) -> usize {
    py.detach(penstock_worker::collapse_heap)
}

/// Write out what C code has printed and the C library still holds, as `exit` would.
#[pyfunction]
pub(crate) fn flush_c_output(py: Python<'_>) {
    py.detach(penstock_worker::flush_c_output);
}
