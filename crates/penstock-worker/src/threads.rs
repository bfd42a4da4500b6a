//! Configures the C library's allocator, for a process with many threads and for a supervisor; and counts threads.

/// Makes this process's threads share two arenas of the allocator, unless the environment sets another number.
/// By default each thread gets its own, up to eight per processor. Memory that a job frees in one arena is
/// useless to the next job in another, so the process would grow for hours.
pub fn limit_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if std::env::var_os("MALLOC_ARENA_MAX").is_none() {
        // SAFETY: it only changes a number in the allocator. Running threads keep their arenas.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 2);
        }
    }
}

/// Makes the C library's allocator return large blocks to the system when they are freed, unless the environment
/// configures it. By default, freeing a large block raises the size from which it does so, up to 32 MiB. `malloc_trim`
/// skips the free end of all arenas but the main one: a supervisor kept 18 MB there.
pub fn return_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const MMAP_BYTES: i32 = 512 << 10;
        const TRIM_BYTES: i32 = 1 << 20;
        let set = |variable, option, bytes| {
            if std::env::var_os(variable).is_none() {
                // SAFETY: it only changes a number in the allocator.
                unsafe { libc::mallopt(option, bytes) };
            }
        };
        set("MALLOC_MMAP_THRESHOLD_", libc::M_MMAP_THRESHOLD, MMAP_BYTES);
        set("MALLOC_TRIM_THRESHOLD_", libc::M_TRIM_THRESHOLD, TRIM_BYTES);
    }
}

/// Whether this process certainly has no thread but the calling one.
#[cfg(target_os = "linux")]
pub fn has_one_thread() -> bool {
    /// Links of a directory without subdirectories: its name, and its own entry for itself.
    const LINKS: usize = 2;
    // It has a subdirectory for each thread. Counting its links takes one call, and no memory.
    let task = rustix::fs::stat("/proc/self/task");
    // The type of the number depends on the processor.
    task.is_ok_and(|task| usize::try_from(task.st_nlink) == Ok(LINKS + 1))
}

#[cfg(not(target_os = "linux"))]
pub fn has_one_thread() -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_a_second_thread_has_not_one_thread() {
        // A test has a thread of its own, beside the main one.
        assert!(!has_one_thread());
    }
}
