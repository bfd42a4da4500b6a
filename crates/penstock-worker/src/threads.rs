//! Configures the system for a process with many threads.

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
