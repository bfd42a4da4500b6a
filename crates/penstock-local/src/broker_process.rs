//! Watches a broker process that this process started, until it exits.

use std::io::{self, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Returns why a broker exited, in its own words if it left any.
pub(crate) fn exit_reason(said: String, status: ExitStatus) -> String {
    let words = said.trim();
    match words.strip_prefix("penstock: ").unwrap_or(words) {
        // The system may have killed it to free memory.
        "" if status.signal().is_some() => format!("it was killed during its start ({status})"),
        "" => format!("it exited at once ({status})"),
        words => words.to_owned(),
    }
}

/// Broker process that this process started. Its output on standard error says why it can't start. Once it has
/// started, it closes standard error and runs on its own.
pub(crate) struct Started {
    pub(crate) since: Instant,
    report: Arc<ExitReport>,
}

#[derive(Default)]
struct ExitReport {
    state: Mutex<ReportState>,
    changed: Condvar,
}

#[derive(Default)]
struct ReportState {
    said: Option<String>,
    end: Option<StartOutcome>,
}

#[derive(Clone, Copy)]
pub(crate) enum StartOutcome {
    With(ExitStatus),
    /// The exit status is lost, because the application waits for all its children and was faster.
    Unknown,
}

impl Started {
    /// Waits for the process in a thread for as long as it runs, so that it never becomes a zombie.
    pub(crate) fn follow(mut child: Child) -> io::Result<Self> {
        let report = Arc::new(ExitReport::default());
        let told = Arc::clone(&report);
        thread::Builder::new()
            .name("penstock-reap".into())
            .stack_size(64 << 10)
            .spawn(move || {
                let mut said = Vec::new();
                if let Some(mut errors) = child.stderr.take() {
                    // After an error, use the text that was read before it.
                    let _ = errors.read_to_end(&mut said);
                }
                told.change(|state| state.said = Some(String::from_utf8_lossy(&said).into_owned()));
                let end = child
                    .wait()
                    .map_or(StartOutcome::Unknown, StartOutcome::With);
                told.change(|state| state.end = Some(end));
            })?;
        Ok(Self {
            since: Instant::now(),
            report,
        })
    }

    /// Waits until the broker closes its standard error. Returns the text that it wrote there.
    pub(crate) fn startup_output(&self, give_up_at: Instant) -> Option<String> {
        let patience = give_up_at.saturating_duration_since(Instant::now());
        self.report.wait(patience, |state| state.said.clone())
    }

    pub(crate) fn ended(&self, patience: Duration) -> Option<StartOutcome> {
        self.report.wait(patience, |state| state.end)
    }
}

impl ExitReport {
    fn change(&self, change: impl FnOnce(&mut ReportState)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait<T>(&self, patience: Duration, wanted: impl Fn(&ReportState) -> Option<T>) -> Option<T> {
        let state = self.state.lock().unwrap();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, patience, |state| wanted(state).is_none())
            .unwrap();
        wanted(&state)
    }
}
