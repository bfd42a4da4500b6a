//! Decides when a local broker exits, and moves its socket to its directory once there is room.

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Token};

use super::{FIRST_LISTENER, RECHECK_INTERVAL, Server};
use crate::listen::{ListenAddress, Listener};

impl Server {
    pub(super) fn lingers_until(&self) -> Option<Instant> {
        let linger = match self.is_in_memory {
            true => Duration::ZERO,
            false => self.local.as_ref()?.linger,
        };
        Some(self.no_clients_since? + linger)
    }

    pub(super) fn should_exit(&mut self) -> bool {
        let now = Instant::now();
        if self.engine.clients() > 0 {
            self.no_clients_since = None;
        } else if self.no_clients_since.is_none() {
            self.no_clients_since = Some(now);
        }
        let mut leave = self.lingers_until().is_some_and(|until| until <= now);
        if leave {
            tracing::info!("no client is left");
        }
        if now >= self.recheck_at {
            self.recheck_at = now + RECHECK_INTERVAL;
            if let Some(local) = &self.local
                && !local.lock.directory_is_ours()
            {
                tracing::info!("the directory was deleted");
                leave = true;
            }
            if !leave {
                self.move_to_own_socket();
            }
        }
        leave
    }

    /// Moves from the spare socket to the one in the directory, once the disk has room for it. Clients that found the
    /// spare socket may continue to use it.
    fn move_to_own_socket(&mut self) {
        let Some(local) = &self.local else {
            return;
        };
        let home = &local.lock.paths().socket;
        let is_home = |listener: &Listener| matches!(&listener.address, ListenAddress::Unix(path) if path == home);
        if self.listeners.iter().any(is_home) {
            return;
        }
        let Ok(listener) = Listener::open_unix(home) else {
            return;
        };
        let token = Token(FIRST_LISTENER + self.listeners.len());
        let socket = listener.as_fd().as_raw_fd();
        let registry = self.poll.registry();
        match registry.register(&mut SourceFd(&socket), token, Interest::READABLE) {
            Ok(()) => {
                tracing::info!("listening on {}", listener.address);
                self.listeners.push(listener);
            }
            Err(error) => {
                tracing::warn!("can't listen on {}: {error}", listener.address);
                listener.remove_socket();
            }
        }
    }
}
