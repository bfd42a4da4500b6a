//! Connects to `local:PATH`: like `unix:`, but a client that finds no broker listening starts one.
//!
//! Several clients may find that at once, and each starts a broker. The lock in PATH lets one of them live. The
//! others exit at once, and their starters connect to the first. So the clients need no agreement beforehand,
//! and none of their locks can be left behind in a forked child. The broker detaches from its starter: it
//! creates its own session, changes to `/`, and closes what it inherited.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock_directory::{EXIT_IN_USE, EXITS_UNTIL_FIXED, LocalPaths, is_nobody};
use penstock_driver::{BrokerStart, Dial, DialError, DriverError, connect_unix};

use crate::broker_process::{StartOutcome, Started, exit_reason};

/// First interval of checking whether another client's broker is listening: nothing announces it.
const FIRST_POLL: Duration = Duration::from_millis(1);
const LONGEST_POLL: Duration = Duration::from_millis(20);
/// Time to wait for another client's broker before starting one again.
const OTHER_START_PATIENCE: Duration = Duration::from_millis(250);
/// Time that a broker has to exit after it reports why it can't start.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

pub(crate) struct Local {
    paths: LocalPaths,
    program: Option<PathBuf>,
    /// Whether a broker was reached before.
    known: AtomicBool,
    /// Reason logged last for why no broker can be started; `None` once one is serving.
    logged: Mutex<Option<String>>,
}

impl Local {
    pub(crate) fn new(path: &Path, program: Option<PathBuf>) -> Result<Self, DriverError> {
        let paths = LocalPaths::resolve(path).map_err(|error| {
            DriverError::invalid(format!(
                "can't use the directory of local:{}: {error}",
                path.display()
            ))
        })?;
        Ok(Self {
            paths,
            program,
            known: AtomicBool::new(false),
            logged: Mutex::new(None),
        })
    }

    fn cannot_start(&self, error: impl std::fmt::Display) -> String {
        let directory = self.paths.directory.display();
        format!("can't start a broker for {directory}: {error}")
    }

    /// Returns the error for a fault that somebody must fix.
    fn permanent(&self, error: impl std::fmt::Display) -> DialError {
        DialError::Hopeless(self.cannot_start(error))
    }

    /// Returns the error for a fault that may pass: a full disk, a system short of processes. Each reason is
    /// logged once, because a worker may have to wait for a long time.
    fn transient(&self, error: impl std::fmt::Display) -> DialError {
        let reason = self.cannot_start(error);
        let mut logged = self.logged.lock().unwrap();
        if logged.as_ref() != Some(&reason) {
            tracing::warn!("{reason}; retrying until one starts; nothing is lost");
            *logged = Some(reason.clone());
        }
        DialError::Unreachable(reason)
    }

    fn connected(&self) {
        self.known.store(true, Ordering::Relaxed);
        if self.logged.lock().unwrap().take().is_some() {
            tracing::warn!(
                "a broker is serving {} again",
                self.paths.directory.display()
            );
        }
    }

    /// Checks whether a broker may be started now; the error says why not.
    fn may_start(&self, start: BrokerStart) -> Result<(), DialError> {
        let deleted = self.known.load(Ordering::Relaxed) && !self.paths.directory.is_dir();
        match start {
            BrokerStart::No | BrokerStart::WhereItWas if deleted => {
                Err(DialError::Hopeless(format!(
                    "the directory {} was deleted, with everything that its broker stored",
                    self.paths.directory.display()
                )))
            }
            BrokerStart::No => Err(DialError::Unreachable(
                "the broker was stopped; the next client that needs it will start it".into(),
            )),
            BrokerStart::WhereItWas | BrokerStart::Anywhere => Ok(()),
        }
    }

    fn start(&self) -> Result<Started, DialError> {
        let program = self.program.as_ref().ok_or_else(|| {
            self.permanent(
                "the penstock executable is missing; reinstall penstock, or start `penstock server` yourself",
            )
        })?;
        let child = Command::new(program)
            .args(["server", "--local"])
            .arg(&self.paths.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| {
                let reason = format!("{}: {error}", program.display());
                // An installer may be replacing a program that worked before.
                let worked = self.known.load(Ordering::Relaxed);
                match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied if !worked => {
                        self.permanent(reason)
                    }
                    _ => self.transient(reason),
                }
            })?;
        tracing::debug!(pid = child.id(), directory = ?self.paths.directory, "started a broker");
        Started::follow(child).map_err(|error| self.transient(error))
    }
}

impl Dial for Local {
    fn starts_brokers(&self) -> bool {
        true
    }

    fn dial(&self, give_up_at: Instant, start: BrokerStart) -> Result<OwnedFd, DialError> {
        let mut started: Option<Started> = None;
        let mut look = FIRST_POLL;
        loop {
            match self.paths.connect(|path| connect_unix(path, give_up_at)) {
                Ok((socket, _)) => {
                    self.connected();
                    return Ok(socket);
                }
                Err(error) if is_nobody(&error) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(self.permanent(error));
                }
                Err(error) => return Err(DialError::Unreachable(error.to_string())),
            }
            if Instant::now() >= give_up_at {
                return Err(DialError::Unreachable(
                    "the broker is still starting".into(),
                ));
            }
            let ended = match &started {
                None => {
                    self.may_start(start)?;
                    let ours = started.insert(self.start()?);
                    // The broker listens before it can serve. If it can't serve, the socket is no answer: read
                    // the reason instead.
                    match ours.startup_output(give_up_at) {
                        Some(said) if !said.is_empty() => ours.ended(EXIT_PATIENCE),
                        _ => None,
                    }
                }
                Some(ours) => {
                    look = (look * 2).min(LONGEST_POLL);
                    ours.ended(look)
                }
            };
            match (ended, &started) {
                (Some(StartOutcome::With(status)), _) if !is_exit(status, &[EXIT_IN_USE]) => {
                    let said = started.and_then(|ours| ours.startup_output(give_up_at));
                    let why = exit_reason(said.unwrap_or_default(), status);
                    return Err(match is_exit(status, &EXITS_UNTIL_FIXED) {
                        true => self.permanent(why),
                        false => self.transient(why),
                    });
                }
                // Another client's broker was first, but may be about to exit.
                (Some(_), Some(ours)) if ours.since.elapsed() > OTHER_START_PATIENCE => {
                    started = None
                }
                _ => {}
            }
        }
    }
}

fn is_exit(status: ExitStatus, codes: &[u8]) -> bool {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.is_some_and(|code| codes.contains(&code))
}
