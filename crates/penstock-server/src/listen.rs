//! Addresses that a server listens on, and rules for connecting without a token.

use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use penstock_directory::LocalPaths;
use penstock_journal::is_full;
use rustix::fs::Mode;

use crate::engine::Peer;

/// Number of clients that may wait to be accepted, for example while a journal is recovered.
#[cfg(target_os = "linux")]
const BACKLOG: i32 = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// `tcp://HOST:PORT`
    Tcp(String),
    /// `unix:PATH`
    Unix(PathBuf),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        if let Some(address) = url.strip_prefix("tcp://") {
            let address = address.strip_suffix('/').unwrap_or(address);
            let port = address
                .rsplit_once(':')
                .map(|(_, port)| port.parse::<u16>());
            return match port {
                Some(Ok(_)) => Ok(Self::Tcp(address.to_owned())),
                _ => Err(format!("{url:?} names no port: write tcp://HOST:PORT")),
            };
        }
        match url.strip_prefix("unix:") {
            None | Some("") => Err(format!("{url:?} is neither tcp://HOST:PORT nor unix:PATH")),
            Some(path) => Ok(Self::Unix(PathBuf::from(path))),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(out, "tcp://{address}"),
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(
        "{address} can be reached from other machines, so clients must show a token: set \
         PENSTOCK_TOKEN (or --token-file) for the server and its clients, or listen on 127.0.0.1"
    )]
    NoToken { address: SocketAddr },
    #[error("can't listen on {address}: {source}")]
    Io {
        address: ListenAddress,
        source: io::Error,
    },
    #[error("can't listen on {address}: another server already listens there")]
    InUse { address: ListenAddress },
    #[error(
        "can't listen on {address}: {source}. A socket is a file, and its disk is full. Nothing is lost; make \
         some space (a few MB) or listen on another disk, then start again"
    )]
    NoRoom {
        address: ListenAddress,
        source: io::Error,
    },
}

impl ListenError {
    fn new(address: &ListenAddress, source: io::Error) -> Self {
        let address = address.clone();
        match is_full(&source) {
            true => Self::NoRoom { address, source },
            false => Self::Io { address, source },
        }
    }
}

/// Socket that clients connect to.
pub(crate) struct Listener {
    socket: ListeningSocket,
    peer: Peer,
    /// Bound address, with the chosen port when none was given.
    pub(crate) address: ListenAddress,
}

enum ListeningSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Opens all sockets of an address: a host name may have several.
    pub(crate) fn open(address: &ListenAddress, has_token: bool) -> Result<Vec<Self>, ListenError> {
        let failed = |source| ListenError::new(address, source);
        match address {
            ListenAddress::Tcp(host) => {
                let resolved: Vec<SocketAddr> = host.to_socket_addrs().map_err(failed)?.collect();
                for address in &resolved {
                    if !address.ip().is_loopback() && !has_token {
                        return Err(ListenError::NoToken { address: *address });
                    }
                }
                let mut opened = Vec::new();
                let mut missing =
                    io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                for address in resolved {
                    match Self::open_tcp(address, has_token) {
                        Ok(listener) => opened.push(listener),
                        // `localhost` has an IPv6 address even where there is no IPv6.
                        Err(error) if is_missing(&error) => missing = error,
                        Err(error) => return Err(failed(error)),
                    }
                }
                match opened.is_empty() {
                    true => Err(failed(missing)),
                    false => Ok(opened),
                }
            }
            ListenAddress::Unix(path) => {
                if UnixStream::connect(path).is_ok() {
                    let address = address.clone();
                    return Err(ListenError::InUse { address });
                }
                Ok(vec![Self::open_unix(path).map_err(failed)?])
            }
        }
    }

    fn open_tcp(address: SocketAddr, has_token: bool) -> io::Result<Self> {
        let socket = TcpListener::bind(address)?;
        socket.set_nonblocking(true)?;
        let address = ListenAddress::Tcp(socket.local_addr()?.to_string());
        Ok(Self {
            socket: ListeningSocket::Tcp(socket),
            peer: match has_token {
                true => Peer::MustShowToken,
                false => Peer::Trusted,
            },
            address,
        })
    }

    /// Opens a local broker's socket or, if the disk has no room for it, the spare socket.
    ///
    /// ext4 has room for a socket as soon as the dead one is removed. XFS and Btrfs need free blocks for any new file,
    /// and may have none.
    pub(crate) fn open_local(paths: &LocalPaths) -> Result<Self, ListenError> {
        let failed = |path: &Path, source| {
            ListenError::new(&ListenAddress::Unix(path.to_path_buf()), source)
        };
        let opened = paths.secure_socket_directory();
        let source = match opened.and_then(|()| Self::open_unix(&paths.socket)) {
            Ok(listener) => {
                if paths.spare_socket != paths.socket {
                    // An earlier broker without room may have left it.
                    let _none = fs::remove_file(&paths.spare_socket);
                }
                return Ok(listener);
            }
            Err(error) => error,
        };
        if is_full(&source) && paths.secure_spare_directory().is_ok() {
            match Self::open_unix(&paths.spare_socket) {
                Ok(listener) => return Ok(listener),
                Err(error) => tracing::warn!(
                    "can't listen on {} either: {error}",
                    paths.spare_socket.display()
                ),
            }
        }
        Err(failed(&paths.socket, source))
    }

    /// Opens a socket for this user only, so that no token is needed. Replaces a socket that a killed server left
    /// behind.
    pub(crate) fn open_unix(path: &Path) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_socket() => fs::remove_file(path)?,
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the path is a file, not a socket; remove it, or listen elsewhere",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let socket = UnixListener::from(bind_private(path)?);
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: ListeningSocket::Unix(socket),
            peer: Peer::Trusted,
            address: ListenAddress::Unix(path.to_path_buf()),
        })
    }

    /// Removes the socket after the last client, so that nobody looks for a server there.
    pub(crate) fn remove_socket(&self) {
        if let ListenAddress::Unix(path) = &self.address {
            let _gone = fs::remove_file(path);
        }
    }

    /// Accepts the next waiting client, as a non-blocking socket; fails with `WouldBlock` when there is none.
    pub(crate) fn accept(&self) -> io::Result<(OwnedFd, Peer)> {
        match &self.socket {
            ListeningSocket::Tcp(listener) => {
                let (socket, _) = listener.accept()?;
                socket.set_nonblocking(true)?;
                // Each frame is sent in one piece, so waiting to fill a packet would only add latency. A client that
                // has already left refuses the option; reading finds that.
                let _left = socket.set_nodelay(true);
                Ok((socket.into(), self.peer))
            }
            ListeningSocket::Unix(listener) => {
                let (socket, _) = listener.accept()?;
                socket.set_nonblocking(true)?;
                Ok((socket.into(), self.peer))
            }
        }
    }
}

fn is_missing(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(
        Errno::from_io_error(error),
        Some(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT)
    )
}

#[cfg(target_os = "linux")]
fn bind_private(path: &Path) -> io::Result<OwnedFd> {
    use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let socket = net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Set before it has a name, so that others can never connect.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

#[cfg(not(target_os = "linux"))]
fn bind_private(path: &Path) -> io::Result<OwnedFd> {
    let socket = UnixListener::bind(path)?;
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
    Ok(socket.into())
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            ListeningSocket::Tcp(listener) => listener.as_fd(),
            ListeningSocket::Unix(listener) => listener.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_address_reads_back_or_says_what_to_write() {
        fn check(url: &str, expected: Result<&str, &str>) {
            let parsed = url
                .parse::<ListenAddress>()
                .map(|address| address.to_string());
            assert_eq!(parsed.as_deref().map_err(String::as_str), expected);
        }
        check("tcp://127.0.0.1:5670", Ok("tcp://127.0.0.1:5670"));
        check("tcp://[::1]:5670/", Ok("tcp://[::1]:5670"));
        check("unix:/run/penstock.sock", Ok("unix:/run/penstock.sock"));
        check(
            "tcp://localhost",
            Err("\"tcp://localhost\" names no port: write tcp://HOST:PORT"),
        );
        check(
            "amqp://localhost:1",
            Err("\"amqp://localhost:1\" is neither tcp://HOST:PORT nor unix:PATH"),
        );
    }

    #[test]
    fn beyond_loopback_a_token_is_needed() {
        let everywhere = ListenAddress::Tcp("0.0.0.0:0".to_owned());
        let refused = Listener::open(&everywhere, false)
            .err()
            .expect("it is refused");
        assert!(refused.to_string().contains("PENSTOCK_TOKEN"), "{refused}");
        let home = ListenAddress::Tcp("127.0.0.1:0".to_owned());
        assert_eq!(Listener::open(&home, false).unwrap()[0].peer, Peer::Trusted);
        assert_eq!(
            Listener::open(&home, true).unwrap()[0].peer,
            Peer::MustShowToken
        );
    }

    #[test]
    fn a_unix_socket_is_for_its_user_alone_and_replaces_only_a_dead_one() {
        let directory = tempfile::tempdir().unwrap();
        let address = ListenAddress::Unix(directory.path().join("broker.sock"));
        let first = Listener::open(&address, false).unwrap();
        let ListenAddress::Unix(path) = &address else {
            unreachable!()
        };
        assert_eq!(
            fs::metadata(path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let refused = Listener::open(&address, false).err().expect("it is in use");
        assert!(matches!(refused, ListenError::InUse { .. }), "{refused}");
        drop(first);
        Listener::open(&address, false).expect("what was left behind is replaced");

        let precious = directory.path().join("precious");
        fs::write(&precious, "mine").unwrap();
        let refused = Listener::open(&ListenAddress::Unix(precious.clone()), false)
            .err()
            .expect("it is not a socket");
        assert!(refused.to_string().contains("not a socket"), "{refused}");
        assert_eq!(fs::read_to_string(precious).unwrap(), "mine");
    }
}
