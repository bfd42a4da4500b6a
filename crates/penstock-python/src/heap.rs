//! Memory and buffers of a worker's processes.

use pyo3::prelude::*;

/// Have the kernel move this process's memory into large pages, and return the number of bytes that it did.
#[pyfunction]
pub(crate) fn use_large_pages(py: Python<'_>) -> usize {
    py.detach(penstock_worker::use_large_pages)
}

/// Write out what C code has printed and the C library still holds.
#[pyfunction]
pub(crate) fn flush_c_output(py: Python<'_>) {
    py.detach(penstock_worker::flush_c_output);
}
