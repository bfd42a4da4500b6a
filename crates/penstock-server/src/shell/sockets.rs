//! The clients' sockets: accepts them, reads from them, writes to them, and closes them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Interest, Token};
use penstock_broker::ConnId;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::{RECHECK_INTERVAL, Server};
use crate::engine::Peer;
use crate::files::MAX_CLOSING;

/// Clients accepted before the others get their turn.
const ACCEPTS_AT_ONCE: usize = 64;
/// Time for the client of a closed connection to read the reason.
const CLOSING_TIME: Duration = Duration::from_millis(500);

pub(super) struct Socket {
    fd: OwnedFd,
    /// Whether a write was incomplete: wait until the socket is writable.
    full: bool,
    /// Whether the client sends no more, so that a short read does not mean an empty socket.
    half_closed: bool,
}

impl Server {
    pub(super) fn handle_event(&mut self, conn: ConnId, event: &Event) {
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            if let Some(socket) = self.sockets.get_mut(&conn) {
                socket.half_closed |= event.is_read_closed() || event.is_error();
                self.readable.insert(conn);
            } else if let Some((socket, _)) = self.closing.get(&conn)
                && !discard(socket, &mut self.read_buffer)
            {
                self.closing.remove(&conn);
            }
        }
        if event.is_writable()
            && let Some(socket) = self.sockets.get_mut(&conn)
            && socket.full
        {
            socket.full = false;
            self.send(conn);
        }
    }

    pub(super) fn accept_all(&mut self) {
        self.accept_at = None;
        let mut new = Vec::new();
        for listener in &self.listeners {
            for accepted in 0.. {
                if accepted == ACCEPTS_AT_ONCE {
                    self.accept_at = Some(Instant::now());
                    break;
                }
                match listener.accept() {
                    Ok(client) => new.push(client),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if concerns_client(&error) => {}
                    Err(error) => {
                        // Usually file descriptors are used up; a client may disconnect.
                        tracing::warn!("can't accept a client: {error}");
                        self.accept_at = Some(Instant::now() + RECHECK_INTERVAL);
                        break;
                    }
                }
            }
        }
        for (fd, peer) in new {
            if let Err(error) = self.add_client(fd, peer) {
                tracing::warn!("can't accept a client: {error}");
            }
        }
    }

    /// Adds a connected client.
    pub(super) fn add_client(&mut self, fd: OwnedFd, peer: Peer) -> io::Result<()> {
        let conn = ConnId(self.next_conn);
        self.next_conn += 1;
        let token = Token(conn.0 as usize);
        let mut source = SourceFd(&fd.as_raw_fd());
        let registry = self.poll.registry();
        registry.register(&mut source, token, Interest::READABLE)?;
        let socket = Socket {
            fd,
            full: false,
            half_closed: false,
        };
        self.sockets.insert(conn, socket);
        self.readable.insert(conn);
        self.engine.opened(self.clock.now(), conn, peer);
        Ok(())
    }

    /// Reads once from each connection that may have something to read.
    pub(super) fn read_ready(&mut self) {
        if !self.engine.accepts_input() {
            return;
        }
        let mut turn: Vec<ConnId> = self.readable.iter().copied().collect();
        turn.sort_unstable();
        for conn in turn {
            let Some(socket) = self.sockets.get(&conn) else {
                self.readable.remove(&conn);
                continue;
            };
            if !self.engine.may_read(conn) {
                self.readable.remove(&conn);
                self.unread.insert(conn);
                continue;
            }
            match rustix::io::read(&socket.fd, &mut self.read_buffer[..]) {
                Ok(0) => self.drop_client(conn),
                Ok(count) => {
                    // A short read has emptied the socket; later bytes are a new event.
                    if count < self.read_buffer.len() && !socket.half_closed {
                        self.readable.remove(&conn);
                    }
                    let now = self.clock.now();
                    self.memory.read(count);
                    self.engine.received(now, conn, &self.read_buffer[..count]);
                    self.clock.moved_ms += self.engine.take_clock_move();
                }
                Err(Errno::WOULDBLOCK) => {
                    self.readable.remove(&conn);
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::debug!(conn = conn.0, "a connection broke: {error}");
                    self.drop_client(conn);
                }
            }
        }
    }

    pub(super) fn flush(&mut self) {
        while let Some(conn) = self.engine.poll_transmit() {
            if self.sockets.get(&conn).is_some_and(|socket| !socket.full) {
                self.send(conn);
            }
        }
        while let Some(conn) = self.engine.poll_close() {
            self.readable.remove(&conn);
            self.unread.remove(&conn);
            if let Some(socket) = self.sockets.remove(&conn) {
                // Closing at once could destroy the reason before the client reads it.
                let _gone = rustix::net::shutdown(&socket.fd, Shutdown::Write);
                if discard(&socket, &mut self.read_buffer) && self.closing.len() < MAX_CLOSING {
                    self.closing
                        .insert(conn, (socket, Instant::now() + CLOSING_TIME));
                }
            }
        }
    }

    /// Sends the bytes that wait for this connection, with one call.
    fn send(&mut self, conn: ConnId) {
        let Some(socket) = self.sockets.get_mut(&conn) else {
            return;
        };
        let waiting = self.engine.outgoing(conn);
        if waiting.is_empty() {
            return;
        }
        let (sent, all) = match rustix::io::write(&socket.fd, waiting) {
            Ok(sent) => (sent, sent == waiting.len()),
            Err(Errno::WOULDBLOCK | Errno::INTR) => (0, false),
            // Reading finds the same error, after it has read the client's last bytes.
            Err(_) if self.engine.may_read(conn) => {
                self.readable.insert(conn);
                return;
            }
            Err(_) => {
                self.drop_client(conn);
                return;
            }
        };
        let was_full = std::mem::replace(&mut socket.full, !all);
        if was_full || !all {
            let interest = match all {
                true => Interest::READABLE,
                false => Interest::READABLE | Interest::WRITABLE,
            };
            let token = Token(conn.0 as usize);
            let mut source = SourceFd(&socket.fd.as_raw_fd());
            if self
                .poll
                .registry()
                .reregister(&mut source, token, interest)
                .is_err()
            {
                self.drop_client(conn);
                return;
            }
        }
        self.engine.transmitted(self.clock.now(), conn, sent);
        if self.engine.may_read(conn) && self.unread.remove(&conn) {
            self.readable.insert(conn);
        }
    }

    fn drop_client(&mut self, conn: ConnId) {
        self.sockets.remove(&conn);
        self.readable.remove(&conn);
        self.unread.remove(&conn);
        self.engine.closed(self.clock.now(), conn);
    }

    pub(super) fn drop_expired(&mut self) {
        let now = Instant::now();
        self.closing.retain(|_, (_, until)| *until > now);
    }
}

/// Whether the error concerns only the client being accepted: it has disconnected, or its network fails.
fn concerns_client(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(
            Errno::CONNABORTED
                | Errno::CONNRESET
                | Errno::INTR
                | Errno::PROTO
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::HOSTDOWN
                | Errno::HOSTUNREACH
                | Errno::TIMEDOUT
        )
    )
}

/// Discards waiting bytes; returns `false` once the client has closed.
fn discard(socket: &Socket, buffer: &mut [u8]) -> bool {
    loop {
        match rustix::io::read(&socket.fd, &mut *buffer) {
            Ok(0) => return false,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => return true,
            Err(_) => return false,
        }
    }
}
