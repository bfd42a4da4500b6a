//! Aborts the process at the first panic, in any thread: a broken invariant must not write.

/// Installs a hook that aborts the process at the first panic, before any thread runs on.
pub(crate) fn abort_on_first_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!(
            "the broker hit a bug and aborts at once, before it can write anything wrong: {panic}"
        );
        report(panic);
        std::process::abort();
    }));
}

/// Panics in the thread that `PENSTOCK_TEST_PANIC` names, for tests. Absent from release builds.
#[cfg(debug_assertions)]
pub(crate) fn panic_if_asked(thread: &str) {
    let asked = std::env::var("PENSTOCK_TEST_PANIC");
    assert!(
        asked.as_deref() != Ok(thread),
        "PENSTOCK_TEST_PANIC says so"
    );
}

#[cfg(not(debug_assertions))]
pub(crate) fn panic_if_asked(_thread: &str) {}
