//! A broken invariant must not write: the process ends with the first panic, whichever thread it is in.

/// From here on nobody runs another line once a thread has panicked.
pub(crate) fn end_with_the_first() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!(
            "the broker has a bug and ends at once, before it can write anything wrong: {panic}"
        );
        report(panic);
        std::process::abort();
    }));
}

/// Panics in the thread that `PENSTOCK_TEST_PANIC` names, to show what becomes of it. No release has this.
#[cfg(debug_assertions)]
pub(crate) fn panic_if_told(thread: &str) {
    let told = std::env::var("PENSTOCK_TEST_PANIC");
    assert!(told.as_deref() != Ok(thread), "PENSTOCK_TEST_PANIC says so");
}

#[cfg(not(debug_assertions))]
pub(crate) fn panic_if_told(_thread: &str) {}
