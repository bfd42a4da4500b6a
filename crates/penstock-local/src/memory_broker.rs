//! Connects to `memory:`: a `penstock` program at the other end of a socket pair, with its journal in memory.
//!
//! The broker belongs to one client, and nothing in it outlives that client. It exits when the socket closes,
//! and when this process exits, even if a forked child still has a copy of the socket. It accepts no second
//! connection, so no second process can share it.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use penstock_driver::{BrokerStart, Dial, DialError, DriverError};

use crate::broker_process::{StartOutcome, Started, exit_reason};

/// Longest heartbeat that a broker accepts.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(3600);
/// Time that a broker has to exit after it reports why it can't start.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

/// Process that first used each name. A fork copies this list.
static FIRST_USED_BY: Mutex<Option<HashMap<String, u32>>> = Mutex::new(None);

pub(crate) struct MemoryDial {
    url: String,
    program: Option<PathBuf>,
    begun: Mutex<bool>,
}

impl MemoryDial {
    pub(crate) fn new(name: &str, program: Option<PathBuf>) -> Result<Self, DriverError> {
        let us = std::process::id();
        let mut made_in = FIRST_USED_BY.lock().unwrap();
        let made_in = made_in.get_or_insert_default();
        let process = *made_in.entry(name.to_owned()).or_insert(us);
        if process != us {
            return Err(DriverError::invalid(in_fork(name, process)));
        }
        Ok(Self {
            url: format!("memory:{name}"),
            program,
            begun: Mutex::new(false),
        })
    }

    fn start(&self) -> io::Result<(OwnedFd, Started)> {
        let program = self.program.as_ref().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "the penstock executable is missing; reinstall penstock",
            )
        })?;
        let (ours, theirs) = socket_pair()?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let child = Command::new(program)
            // The broker watches this process and exits with it: after a fork, the socket alone would not show
            // its exit.
            .args(["server", "--memory", &std::process::id().to_string()])
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", program.display()))
            })?;
        tracing::debug!(pid = child.id(), "started a broker in memory");
        Ok((ours, Started::follow(child)?))
    }
}

impl Dial for MemoryDial {
    fn dial(&self, give_up_at: Instant, _: BrokerStart) -> Result<OwnedFd, DialError> {
        let mut begun = self.begun.lock().unwrap();
        if *begun {
            // A new broker would not have anything that this client enqueued.
            return Err(DialError::Hopeless(format!(
                "the broker of {} exited, and everything that it stored is gone; create a new App, or a new Client",
                self.url
            )));
        }
        let permanent = |error: String| {
            DialError::Hopeless(format!("can't start a broker for {}: {error}", self.url))
        };
        let (socket, started) = self.start().map_err(|error| permanent(error.to_string()))?;
        let said = started.startup_output(give_up_at);
        match said {
            Some(said) if said.is_empty() => {
                *begun = true;
                Ok(socket)
            }
            Some(said) => Err(permanent(match started.ended(EXIT_PATIENCE) {
                Some(StartOutcome::With(status)) => exit_reason(said, status),
                _ => said,
            })),
            None => Err(DialError::Unreachable(
                "the broker is still starting".into(),
            )),
        }
    }
}

#[cfg(target_os = "linux")]
fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let ends = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok(ends)
}

#[cfg(not(target_os = "linux"))]
fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use std::os::unix::net::UnixStream;
    let (ours, theirs) = UnixStream::pair()?;
    rustix::net::sockopt::set_socket_nosigpipe(&ours, true)?;
    Ok((ours.into(), theirs.into()))
}

fn in_fork(name: &str, process: u32) -> String {
    format!(
        "memory:{name} lives in the process that created it ({process}), and this process ({}) is a fork of that one. Its \
         jobs would go to a broker that no other process sees. Use local:PATH to share a broker, or another name, such \
         as memory:child, for a broker of this process",
        std::process::id()
    )
}

/// Returns the error for a worker or command that is given `memory:`.
pub fn memory_url_error() -> String {
    "memory: is a test double inside the process that created it, and no other process can reach it. Use \
     local:PATH or a server for programs that share a broker"
        .to_owned()
}
