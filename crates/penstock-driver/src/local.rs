//! `local:PATH` is `unix:` and a start: whoever finds nobody listening starts the broker.
//!
//! Many may find that at once, and each starts one. The lock in PATH lets one of them live; the others
//! end at once, and their starters find the first. So nothing has to be agreed on beforehand, and no
//! lock of ours can be left behind in a forked child. The broker lets go of us by itself: it takes a
//! session of its own, `/` as its directory, and closes what it inherited.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use penstock_server::EXIT_IN_USE;
use penstock_server::local::LocalPaths;

use crate::DriverError;
use crate::dial::{Dial, DialError, connect_unix};

/// How often a broker that starts is asked whether it listens. It tells nobody, for it must not
/// matter to it who started it.
const SHORTEST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(20);
/// For how long after our broker has given way to another one that one is looked for.
const OTHER_PATIENCE: Duration = Duration::from_millis(250);

pub(crate) struct Local {
    paths: LocalPaths,
    program: Option<PathBuf>,
}

impl Local {
    pub(crate) fn new(path: &Path, program: Option<PathBuf>) -> Result<Self, DriverError> {
        let paths = LocalPaths::resolve(path).map_err(|error| DriverError::Invalid {
            reason: format!(
                "local:{} names no usable directory: {error}",
                path.display()
            ),
        })?;
        Ok(Self { paths, program })
    }

    fn hopeless(&self, error: impl std::fmt::Display) -> DialError {
        let directory = self.paths.directory.display();
        DialError::Hopeless(format!("no broker can be started for {directory}: {error}"))
    }

    fn start(&self) -> Result<Started, DialError> {
        let program = self.program.as_ref().ok_or_else(|| {
            self.hopeless("the penstock executable is not there; install penstock again, or start `penstock server` yourself")
        })?;
        self.paths
            .create_directory()
            .map_err(|error| self.hopeless(error))?;
        let said = self.log_length().map_err(|error| self.hopeless(error))?;

        let child = Command::new(program)
            .args(["server", "--local"])
            .arg(&self.paths.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| self.hopeless(format!("{}: {error}", program.display())))?;
        tracing::debug!(pid = child.id(), directory = ?self.paths.directory, "started a broker");
        Started::watch(child, said).map_err(|error| self.hopeless(error))
    }

    /// Where what the next broker says will begin. Also finds out whether this user may write there.
    fn log_length(&self) -> io::Result<u64> {
        let mut options = OpenOptions::new();
        let log = options
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&self.paths.log)?;
        Ok(log.metadata()?.len())
    }

    /// Why a broker ended, in its own words where it left any.
    fn last_words(&self, said: u64, status: ExitStatus) -> String {
        self.last_error_logged(said).unwrap_or_else(|| {
            format!(
                "it ended at once ({status}); {} may say why",
                self.paths.log.display()
            )
        })
    }

    fn last_error_logged(&self, said: u64) -> Option<String> {
        const ENOUGH_BYTES: u64 = 64 << 10;
        let mut log = File::open(&self.paths.log).ok()?;
        let length = log.metadata().ok()?.len();
        // A broker puts a long log aside when it starts, and begins a new one.
        let said = if said > length { 0 } else { said };
        log.seek(SeekFrom::Start(
            said.max(length.saturating_sub(ENOUGH_BYTES)),
        ))
        .ok()?;
        let mut text = Vec::new();
        log.read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let (_, error) = text
            .lines()
            .rev()
            .find_map(|line| line.split_once(" ERROR "))?;
        Some(error.trim().to_owned())
    }
}

impl Dial for Local {
    fn dial(&self, give_up_at: Instant) -> Result<OwnedFd, DialError> {
        let mut started: Option<Started> = None;
        let mut look = SHORTEST_LOOK;
        self.paths
            .secure_socket_directory()
            .map_err(|error| self.hopeless(error))?;
        loop {
            match connect_unix(&self.paths.socket, give_up_at) {
                Ok(socket) => return Ok(socket),
                // No socket, or one that its broker has left behind.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) => {}
                Err(error) => return Err(DialError::Unreachable(error.to_string())),
            }
            if Instant::now() >= give_up_at {
                return Err(DialError::Unreachable(
                    "the broker is still starting".into(),
                ));
            }
            match &started {
                None => started = Some(self.start()?),
                Some(ours) => match ours.ended(look) {
                    None => look = (look * 2).min(LONGEST_LOOK),
                    Some((ended_at, status)) => {
                        if status.code() != Some(i32::from(EXIT_IN_USE)) {
                            return Err(self.hopeless(self.last_words(ours.said, status)));
                        }
                        if ended_at.elapsed() > OTHER_PATIENCE {
                            started = None;
                        }
                    }
                },
            }
        }
    }
}

/// A broker process that we have started.
struct Started {
    end: Arc<End>,
    /// The length of the log before it was started.
    said: u64,
}

#[derive(Default)]
struct End {
    status: Mutex<Option<(Instant, ExitStatus)>>,
    changed: Condvar,
}

impl Started {
    /// A thread waits for its end, however far away that is, so that no zombie is left here.
    fn watch(mut child: Child, said: u64) -> io::Result<Self> {
        let end = Arc::new(End::default());
        let told = Arc::clone(&end);
        thread::Builder::new()
            .name("penstock-reap".into())
            .stack_size(64 << 10)
            .spawn(move || {
                // An application that waits for all its children may have been quicker.
                let status = child.wait().unwrap_or_default();
                *told.status.lock().unwrap() = Some((Instant::now(), status));
                told.changed.notify_all();
            })?;
        Ok(Self { end, said })
    }

    /// Waits so long for its end.
    fn ended(&self, wait: Duration) -> Option<(Instant, ExitStatus)> {
        let status = self.end.status.lock().unwrap();
        let (status, _) = self
            .end
            .changed
            .wait_timeout_while(status, wait, |status| status.is_none())
            .unwrap();
        *status
    }
}
