//! Runs many seeds, on all cores. A panic in a run is a failure like any other.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::world::{Outcome, Without, run_without};

thread_local! {
    /// Text of this thread's last panic.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps panics for [`run_without_panic`] from now on, without printing them.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|info| {
        if std::env::var_os("SIM_BACKTRACE").is_some() {
            eprintln!("{}", std::backtrace::Backtrace::force_capture());
        }
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| Some(payload.downcast_ref::<String>()?.as_str()));
        let text = text.unwrap_or("without words");
        let place = info.location().map_or(String::new(), ToString::to_string);
        PANIC.set(Some(format!("a panic: {text} ({place})")));
    }));
}

pub fn run_without_panic(seed: u64, without: &Without) -> Outcome {
    let run = AssertUnwindSafe(|| run_without(seed, without, None));
    catch_unwind(run).unwrap_or_else(|_| Outcome {
        failure: Some(PANIC.take().unwrap_or_else(|| "a panic".to_string())),
        ..Outcome::default()
    })
}
