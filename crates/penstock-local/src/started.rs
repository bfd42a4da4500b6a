//! Watches a broker process that this one has started, until it exits.

use std::io::{self, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Why a broker exited, in its own words where it left any.
pub(crate) fn last_words(said: String, status: ExitStatus) -> String {
    let words = said.trim();
    match words.strip_prefix("penstock: ").unwrap_or(words) {
        // By the system for want of memory, perhaps.
        "" if status.signal().is_some() => format!("it was killed while it started ({status})"),
        "" => format!("it ended at once ({status})"),
        words => words.to_owned(),
    }
}

/// A broker process that we have started. Its text on standard error is why it can't start; once
/// it has started it closes that and runs on its own.
pub(crate) struct Started {
    pub(crate) since: Instant,
    report: Arc<Report>,
}

#[derive(Default)]
struct Report {
    state: Mutex<ReportState>,
    changed: Condvar,
}

#[derive(Default)]
struct ReportState {
    said: Option<String>,
    end: Option<End>,
}

#[derive(Clone, Copy)]
pub(crate) enum End {
    With(ExitStatus),
    /// The exit status is lost: an application that waits for all its children was quicker.
    Unknown,
}

impl Started {
    /// Waits for the process in a thread, for as long as it runs, so that no zombie is left here.
    pub(crate) fn follow(mut child: Child) -> io::Result<Self> {
        let report = Arc::new(Report::default());
        let told = Arc::clone(&report);
        thread::Builder::new()
            .name("penstock-reap".into())
            .stack_size(64 << 10)
            .spawn(move || {
                let mut said = Vec::new();
                if let Some(mut errors) = child.stderr.take() {
                    // What was read before an error is as good as anything.
                    let _ = errors.read_to_end(&mut said);
                }
                told.change(|state| state.said = Some(String::from_utf8_lossy(&said).into_owned()));
                let end = child.wait().map_or(End::Unknown, End::With);
                told.change(|state| state.end = Some(end));
            })?;
        Ok(Self {
            since: Instant::now(),
            report,
        })
    }

    /// Waits until it has closed its standard error. Returns the text that it wrote there.
    pub(crate) fn spoken(&self, give_up_at: Instant) -> Option<String> {
        let patience = give_up_at.saturating_duration_since(Instant::now());
        self.report.wait(patience, |state| state.said.clone())
    }

    pub(crate) fn ended(&self, patience: Duration) -> Option<End> {
        self.report.wait(patience, |state| state.end)
    }
}

impl Report {
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
