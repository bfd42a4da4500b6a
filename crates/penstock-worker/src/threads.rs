//! Settings of the system for a process with many threads.

/// Has the threads of this process share two arenas of the allocator, unless the environment says otherwise. By default
/// each gets one of its own, up to eight for each processor, and what a job frees in one is of no use to the next job in
/// another: the memory of such a process grows for hours.
pub fn limit_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if std::env::var_os("MALLOC_ARENA_MAX").is_none() {
        // SAFETY: it changes a number of the allocator's. Threads that run already keep their arenas.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 2);
        }
    }
}
