//! The worker: a supervisor that takes jobs from a broker and runs them in forked children.

mod config;

pub use config::{DEFAULT_GRACE, MAX_SLOTS, WorkerConfig, worker_name};

use std::process::ExitCode;

/// Runs a worker until it is told to end.
pub fn run(config: WorkerConfig) -> ExitCode {
    tracing::error!(app = config.app, "this build has no worker yet");
    ExitCode::FAILURE
}
