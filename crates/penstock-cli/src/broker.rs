use std::io;
#[cfg(target_os = "linux")]
use std::os::fd::OwnedFd;
#[cfg(target_os = "linux")]
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use penstock_directory::LocalPaths;
use penstock_driver::BrokerUrl;
use penstock_message::{Query, StatusQuery};
use serde_json::json;

use crate::exit::{CommandError, FAILED};
use crate::remote::{BrokerArguments, find_socket, not_running, resolve, socket_url};
use crate::text::{show, show_json};

/// Time that a broker has to write everything to disk and exit.
const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Stop the local broker of a directory; it starts again when a client needs it
    Stop(StopArguments),
}

#[derive(Args)]
struct StopArguments {
    /// Directory of the broker, in place of a URL
    path: Option<PathBuf>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        Command::Stop(arguments) => stop(arguments),
    }
}

fn stop(arguments: &StopArguments) -> Result<(), CommandError> {
    let path = match (&arguments.path, arguments.broker.address()?) {
        (Some(path), _) => path.clone(),
        (None, BrokerUrl::Local(path)) => path,
        // Any other broker refuses with its own explanation.
        (None, _) => return arguments.broker.find()?.ask(Query::Stop).map(drop),
    };
    let paths = resolve(&path)?;
    let Some(socket) = find_socket(&paths)? else {
        return match arguments.json {
            true => show_json(&outcome(&paths, false, 0)),
            false => show(&format!("{}\n", not_running(&paths))),
        };
    };
    let broker = arguments_for(&socket).find()?;
    // Needed only to count its workers: stopping a broker older than this program works without it.
    let status = broker.status_page(StatusQuery::first(1));
    let end = BrokerExit::watch(&paths, &socket)?;
    broker.ask(Query::Stop)?;
    if !end.wait()? {
        return Err(CommandError::new(
            FAILED,
            format!(
                "the broker was asked to stop, but is still running after {} s",
                PATIENCE.as_secs()
            ),
        ));
    }
    let workers = status.map_or(0, |page| page.status.connected_workers);
    if arguments.json {
        return show_json(&outcome(&paths, true, workers));
    }
    let waiting = match workers {
        0 => String::new(),
        1 => "; a worker waits until a client starts it again".to_owned(),
        many => format!("; {many} workers wait until a client starts it again"),
    };
    show(&format!(
        "the broker for {} has stopped{waiting}\n",
        paths.directory.display()
    ))
}

fn outcome(paths: &LocalPaths, stopped: bool, workers: u32) -> serde_json::Value {
    let directory = paths.directory.to_string_lossy();
    json!({ "directory": directory, "stopped": stopped, "waiting_workers": workers })
}

fn arguments_for(socket: &Path) -> BrokerArguments {
    BrokerArguments {
        url: socket_url(socket),
    }
}

/// Exit of a broker's process, watched from before the order to stop.
#[cfg(target_os = "linux")]
struct BrokerExit(Option<OwnedFd>);

#[cfg(target_os = "linux")]
impl BrokerExit {
    fn watch(_: &LocalPaths, socket: &Path) -> io::Result<Self> {
        use rustix::process::{PidfdFlags, pidfd_open};
        // The kernel reports the process that listens there, whatever version of the protocol it speaks.
        let broker = rustix::net::sockopt::socket_peercred(UnixStream::connect(socket)?)?;
        match pidfd_open(broker.pid, PidfdFlags::empty()) {
            Ok(process) => Ok(Self(Some(process))),
            Err(rustix::io::Errno::SRCH) => Ok(Self(None)),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the exit; `false` if the process is still running.
    fn wait(self) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Some(process) = self.0 else {
            return Ok(true);
        };
        let patience = Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        let mut events = [PollFd::new(&process, PollFlags::IN)];
        Ok(poll(&mut events, Some(&patience))? > 0)
    }
}

/// Exit of a broker's process, on systems where a process can only wait for its children. Watches the broker's
/// lock instead, which is released at exit.
#[cfg(not(target_os = "linux"))]
struct BrokerExit(Option<std::fs::File>);

#[cfg(not(target_os = "linux"))]
impl BrokerExit {
    fn watch(paths: &LocalPaths, _: &Path) -> io::Result<Self> {
        match std::fs::File::open(&paths.lock) {
            Ok(lock) => Ok(Self(Some(lock))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self(None)),
            Err(error) => Err(error),
        }
    }

    fn wait(self) -> io::Result<bool> {
        let Some(lock) = self.0 else {
            return Ok(true);
        };
        let (gone, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || gone.send(lock.lock_shared()));
        match told.recv_timeout(PATIENCE) {
            Ok(locked) => locked.map(|()| true),
            Err(_) => Ok(false),
        }
    }
}
