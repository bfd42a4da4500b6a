//! What a process has printed and not written yet.

/// Writes out what C code has printed and the C library still holds, as `exit` would. A process that leaves by `_exit`
/// loses it.
pub fn flush_c_output() {
    // SAFETY: all open streams; each has a lock of its own.
    unsafe {
        libc::fflush(std::ptr::null_mut());
    }
}
