//! Notifies a service manager that asks for it: `sd_notify(3)`, one datagram per state.

use std::env;
use std::io;
#[cfg(target_os = "linux")]
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// Variables for this process alone: programs that jobs start must not speak for the service.
pub const VARIABLES: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// Reports the worker's state to a service manager. Does nothing without one.
#[derive(Default)]
pub struct Notifier {
    manager: Option<(UnixDatagram, SocketAddr)>,
    /// Interval of the watchdog messages, and time of the next one.
    watchdog: Option<(Duration, Instant)>,
    said: String,
    is_stopping: bool,
}

impl Notifier {
    pub fn from_environment(now: Instant) -> Self {
        let Some(place) = env::var("NOTIFY_SOCKET").ok().filter(|it| !it.is_empty()) else {
            return Self::default();
        };
        let manager = match reach(&place) {
            Ok(manager) => manager,
            Err(error) => {
                tracing::warn!(
                    "the worker can't report its state to the service manager at NOTIFY_SOCKET={place}: {error}"
                );
                return Self::default();
            }
        };
        let of_variable = |name| env::var(name).ok()?.parse::<u64>().ok();
        let pid = of_variable("WATCHDOG_PID").unwrap_or(std::process::id().into());
        let every = of_variable("WATCHDOG_USEC")
            .filter(|every| *every > 0 && pid == u64::from(std::process::id()))
            .map(|every| Duration::from_micros(every) / 2);
        Self {
            manager: Some(manager),
            watchdog: every.map(|every| (every, now)),
            said: String::new(),
            is_stopping: false,
        }
    }

    /// Reports that the worker has started to run jobs.
    pub fn ready(&self) {
        self.send("READY=1");
    }

    /// Reports that the worker is stopping; from now on the manager applies its own stop limit.
    pub fn stopping(&mut self) {
        if !std::mem::replace(&mut self.is_stopping, true) {
            self.send("STOPPING=1");
        }
    }

    /// Reports a line for `systemctl status`; repeated lines are sent once.
    pub fn status(&mut self, status: String) {
        if self.manager.is_some() && self.said != status {
            self.send(&format!("STATUS={status}"));
            self.said = status;
        }
    }

    pub fn next_ping(&self) -> Option<Instant> {
        self.watchdog.map(|(_, at)| at)
    }

    /// Sends the watchdog message if it is due.
    pub fn ping(&mut self, now: Instant) {
        let Some((every, at)) = &mut self.watchdog else {
            return;
        };
        if *at <= now {
            *at = now + *every;
            self.send("WATCHDOG=1");
        }
    }

    fn send(&self, state: &str) {
        if let Some((socket, manager)) = &self.manager
            && let Err(error) = socket.send_to_addr(state.as_bytes(), manager)
        {
            tracing::debug!("the service manager was not notified of {state}: {error}");
        }
    }
}

fn reach(place: &str) -> io::Result<(UnixDatagram, SocketAddr)> {
    let manager = match place.strip_prefix('@') {
        None => SocketAddr::from_pathname(place)?,
        #[cfg(target_os = "linux")]
        Some(name) => SocketAddr::from_abstract_name(name.as_bytes())?,
        #[cfg(not(target_os = "linux"))]
        Some(_) => return Err(io::ErrorKind::Unsupported.into()),
    };
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read must not block the worker.
    socket.set_nonblocking(true)?;
    Ok((socket, manager))
}
