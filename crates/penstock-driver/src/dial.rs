//! Makes one blocking attempt to connect, on a thread that exits with it.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, sockopt};

pub trait Dial: Send + Sync {
    /// Returns a connected non-blocking socket.
    fn dial(&self, give_up_at: Instant, start: BrokerStart) -> Result<OwnedFd, DialError>;

    /// Whether it can start a missing broker.
    fn starts_brokers(&self) -> bool {
        false
    }
}

/// Whether a missing broker may be started, if a client can do that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokerStart {
    /// Don't start one: the broker was stopped cleanly, and no caller has asked for anything since.
    No,
    /// Start one for a worker, but not in a directory that was deleted.
    WhereItWas,
    Anywhere,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DialError {
    /// A retry may succeed; the text says why, for people.
    Unreachable(String),
    /// No retry will succeed until somebody fixes what the text says.
    Hopeless(String),
}

pub struct Unix {
    path: PathBuf,
}

impl Unix {
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }
}

impl Dial for Unix {
    fn dial(&self, give_up_at: Instant, _: BrokerStart) -> Result<OwnedFd, DialError> {
        connect_unix(&self.path, give_up_at)
            .map_err(|error| DialError::Unreachable(error.to_string()))
    }
}

/// Connects, and waits for a broker whose connection queue is full, such as a stopped process.
pub fn connect_unix(path: &Path, give_up_at: Instant) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = new_unix_socket()?;
    let patience = give_up_at.saturating_duration_since(Instant::now());
    // This timeout also limits a blocking connect.
    let patience = patience.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
    while let Err(error) = rustix::net::connect(&socket, &address) {
        match error {
            Errno::INTR => {}
            Errno::AGAIN => return Err(io::ErrorKind::TimedOut.into()),
            error => return Err(error.into()),
        }
    }
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

#[cfg(target_os = "linux")]
fn new_unix_socket() -> io::Result<OwnedFd> {
    let flags = rustix::net::SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

#[cfg(not(target_os = "linux"))]
fn new_unix_socket() -> io::Result<OwnedFd> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    // There is no per-write flag that suppresses SIGPIPE on a closed connection here.
    sockopt::set_socket_nosigpipe(&socket, true)?;
    Ok(socket)
}

pub struct Tcp {
    host: String,
    port: u16,
}

impl Tcp {
    pub fn new(host: String, port: u16) -> Self {
        Self { host, port }
    }

    fn connect(&self, give_up_at: Instant) -> io::Result<OwnedFd> {
        let mut last_error =
            io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            let left = give_up_at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_nonblocking(true)?;
                    return Ok(stream.into());
                }
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }
}

impl Dial for Tcp {
    fn dial(&self, give_up_at: Instant, _: BrokerStart) -> Result<OwnedFd, DialError> {
        self.connect(give_up_at)
            .map_err(|error| DialError::Unreachable(error.to_string()))
    }
}
