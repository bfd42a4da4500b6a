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

use penstock_server::local::LocalPaths;

use crate::DriverError;
use crate::dial::{Dial, DialError, connect_unix};

/// How often a broker that starts is asked whether it listens. It tells nobody, for it must not
/// matter to it who started it.
const SHORTEST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(20);
/// For how long after our broker has given way to another one that one is looked for.
/// The exit code of a broker that found the directory locked.
const EXIT_LOCKED: i32 = 3;
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
            .and_then(|()| self.paths.secure_socket_directory())
            .map_err(|error| self.hopeless(error))?;
        // What a broker says before its own log is open goes there too.
        let mut log = OpenOptions::new()
            .append(true)
            .read(true)
            .create(true)
            .mode(0o600)
            .open(&self.paths.log)
            .map_err(|error| self.hopeless(error))?;
        let said_from = log
            .seek(SeekFrom::End(0))
            .map_err(|error| self.hopeless(error))?;
        let errors = log.try_clone().map_err(|error| self.hopeless(error))?;

        let mut command = Command::new(program);
        command
            .args(["server", "--local"])
            .arg(&self.paths.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors);
        let child = command
            .spawn()
            .map_err(|error| self.hopeless(format!("{}: {error}", program.display())))?;
        tracing::debug!(pid = child.id(), directory = ?self.paths.directory, "started a broker");
        Started::watch(child, log, said_from).map_err(|error| self.hopeless(error))
    }
}

impl Dial for Local {
    fn dial(&self, give_up_at: Instant) -> Result<OwnedFd, DialError> {
        let mut started: Option<Started> = None;
        let mut look = SHORTEST_LOOK;
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
                        if status.code() != Some(EXIT_LOCKED) {
                            return Err(self.hopeless(ours.last_words(status)));
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
    log: File,
    said_from: u64,
}

#[derive(Default)]
struct End {
    status: Mutex<Option<(Instant, ExitStatus)>>,
    changed: Condvar,
}

impl Started {
    /// A thread waits for its end, however far away that is, so that no zombie is left here.
    fn watch(mut child: Child, log: File, said_from: u64) -> io::Result<Self> {
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
        Ok(Self {
            end,
            log,
            said_from,
        })
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

    /// Why it ended, in its own words where it left any.
    fn last_words(&self, status: ExitStatus) -> String {
        let mut said = Vec::new();
        let mut log = &self.log;
        let read = log
            .seek(SeekFrom::Start(self.said_from))
            .and_then(|_| log.take(64 << 10).read_to_end(&mut said));
        let said = String::from_utf8_lossy(&said);
        match said.lines().rev().find(|line| !line.trim().is_empty()) {
            Some(line) if read.is_ok() => line.trim().to_owned(),
            _ => format!("it ended at once ({status})"),
        }
    }
}
