//! `memory:` is the `penstock` program at the other end of a socket pair, with its journal in memory.
//!
//! The broker belongs to one client and holds nothing longer than that client lives: it exits when the socket closes,
//! and when this process exits, also where a forked child still has a copy of the socket. There is
//! no second connection to it, so no second process can share it.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use penstock_driver::{Dial, DialError, DriverError, Start};

use crate::started::{End, Started, last_words};

/// The longest heartbeat that a broker accepts.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(3600);
/// Time that a broker may take to exit once it has said why it can't start.
const LAST_BREATH: Duration = Duration::from_secs(2);

/// The process in which each name was used first. A fork copies this list.
static MADE_IN: Mutex<Option<HashMap<String, u32>>> = Mutex::new(None);

pub(crate) struct Memory {
    url: String,
    program: Option<PathBuf>,
    begun: Mutex<bool>,
}

impl Memory {
    pub(crate) fn new(name: &str, program: Option<PathBuf>) -> Result<Self, DriverError> {
        let us = std::process::id();
        let mut made_in = MADE_IN.lock().unwrap();
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
                "the penstock executable is not there; install penstock again",
            )
        })?;
        let (ours, theirs) = socket_pair()?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let child = Command::new(program)
            // It ends with this process, which it is told: after a fork the socket alone would not show that.
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

impl Dial for Memory {
    fn dial(&self, give_up_at: Instant, _: Start) -> Result<OwnedFd, DialError> {
        let mut begun = self.begun.lock().unwrap();
        if *begun {
            // Another one would know nothing of what this client has enqueued.
            return Err(DialError::Hopeless(format!(
                "the broker of {} has ended, and everything that it held is gone; make a new App, or a new Client",
                self.url
            )));
        }
        let hopeless = |error: String| {
            DialError::Hopeless(format!(
                "no broker can be started for {}: {error}",
                self.url
            ))
        };
        let (socket, started) = self.start().map_err(|error| hopeless(error.to_string()))?;
        let said = started.spoken(give_up_at);
        match said {
            Some(said) if said.is_empty() => {
                *begun = true;
                Ok(socket)
            }
            Some(said) => Err(hopeless(match started.ended(LAST_BREATH) {
                Some(End::With(status)) => last_words(said, status),
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
        "memory:{name} lives in the process that made it ({process}), and this process ({}) is a fork of it: what it \
         enqueued would go to a broker that nobody else sees. Use local:PATH to share a broker, or another name, such \
         as memory:child, for one of this process's own",
        std::process::id()
    )
}

/// Why a worker or a command can't use `memory:`.
pub fn in_second_process() -> String {
    "memory: lives in the process that made it, a double for its tests, and no other process can reach it. Use \
     local:PATH or a server for programs that share a broker"
        .to_owned()
}
