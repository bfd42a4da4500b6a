use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use penstock_broker::BrokerOptions;
use penstock_directory::LocalPaths;
use penstock_server::{
    DirectoryLock, Home, ListenAddress, LocalOptions, OnlyClient, Server, ServerOptions, Token,
    detach, release_stderr,
};

use crate::exit::{CommandError, IN_USE, WRONG_CALL, cant_use_directory, is_disk_fault};
use crate::logging::LogArguments;
use crate::remote::{resolve, token_from_environment};
use crate::text::byte_count;

/// Size beyond which a local broker's log is renamed when the broker starts.
const LONG_LOG_BYTES: u64 = 4 << 20;

#[derive(Args)]
pub struct Arguments {
    /// Address to listen on: tcp://HOST:PORT or unix:PATH; may be given several times
    #[arg(
        long,
        value_name = "URL",
        default_value = "tcp://127.0.0.1:5670",
        conflicts_with = "local"
    )]
    listen: Vec<ListenAddress>,
    /// Directory of the journal and everything else the broker stores
    #[arg(
        long,
        value_name = "DIR",
        default_value = "penstock-data",
        conflicts_with = "local"
    )]
    data: PathBuf,
    /// File with the token that TCP clients must send, in place of PENSTOCK_TOKEN
    #[arg(long, value_name = "FILE", conflicts_with = "local")]
    token_file: Option<PathBuf>,
    /// Maximum number of connected clients [default: as many as there are file descriptors for, up to 50000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: Option<u32>,
    /// Run as the background broker of `local:PATH`; clients start it automatically
    #[arg(long, value_name = "PATH")]
    local: Option<PathBuf>,
    /// Run as the broker of `memory:` for the process with this id; clients start it automatically, and
    /// standard input is their socket
    #[arg(long, value_name = "PID", conflicts_with_all = ["local", "listen", "data", "token_file"])]
    memory: Option<u32>,
    /// Seconds that a local broker keeps running after its last client disconnects
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 60.0,
        requires = "local"
    )]
    linger: f64,
    /// Memory use above which new jobs are refused, such as 512M or 4G; 0 for no limit [default: 60 % of the
    /// memory of the machine or container]
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    memory_limit: Option<u64>,
    #[command(flatten)]
    log: LogArguments,
}

pub fn run(arguments: Arguments) -> Result<(), CommandError> {
    match (&arguments.local, arguments.memory) {
        (Some(path), _) => serve_locally(&arguments, path),
        (None, Some(pid)) => serve_in_memory(&arguments, pid),
        (None, None) => serve_others(&arguments),
    }
}

fn serve_others(arguments: &Arguments) -> Result<(), CommandError> {
    arguments.log.to_stderr();
    let (token, place) = match &arguments.token_file {
        None => (token_from_environment(), "PENSTOCK_TOKEN".to_owned()),
        Some(file) => {
            let read = fs::read_to_string(file);
            let token = read.map_err(|error| {
                CommandError::new(
                    WRONG_CALL,
                    format!("can't read {}: {error}", file.display()),
                )
            })?;
            (Some(token.trim().to_owned()), file.display().to_string())
        }
    };
    let token = token.map(|token| Token::new(token.as_bytes())).transpose();
    let token = token
        .map_err(|error| CommandError::new(WRONG_CALL, format!("can't use {place}: {error}")))?;
    let options = ServerOptions {
        home: Home::Directory(arguments.data.join("journal")),
        listen: arguments.listen.clone(),
        token,
        max_connections: arguments.max_connections.map(|wanted| wanted as usize),
        memory_limit_bytes: arguments.memory_limit,
        broker: BrokerOptions::default(),
        local: None,
    };
    Ok(Server::run(options, || Ok(()))?)
}

fn serve_locally(arguments: &Arguments, path: &Path) -> Result<(), CommandError> {
    let linger = Duration::try_from_secs_f64(arguments.linger)
        .map_err(|error| CommandError::new(WRONG_CALL, format!("--linger: {error}")))?;
    let paths = resolve(path)?;
    // SAFETY: only the command line was read so far: there is one thread and no open file.
    drop(unsafe { detach() }?);
    let to_error = |error: io::Error| cant_use_directory(&paths.directory, &error);
    let Some(guard) = DirectoryLock::take(paths.clone()).map_err(to_error)? else {
        let in_use = format!(
            "another broker is already running for {}",
            paths.directory.display()
        );
        return Err(CommandError::new(IN_USE, in_use));
    };
    arguments.log.to_file(open_log(&paths).map_err(to_error)?);
    let options = ServerOptions {
        home: Home::Directory(paths.journal.clone()),
        listen: Vec::new(),
        token: None,
        max_connections: arguments.max_connections.map(|wanted| wanted as usize),
        memory_limit_bytes: arguments.memory_limit,
        broker: BrokerOptions::default(),
        local: Some(LocalOptions {
            lock: guard,
            linger,
        }),
    };
    // The client that started this broker reads the log for the reason. Once it serves, nobody reads its output.
    Ok(Server::run(options, release_stderr).inspect_err(|error| tracing::error!("{error}"))?)
}

/// Serves one client from memory, without a log: each fault is reported to the client or stops the broker.
fn serve_in_memory(arguments: &Arguments, pid: u32) -> Result<(), CommandError> {
    // SAFETY: only the command line was read so far: there is one thread and no open file.
    let socket = unsafe { detach() }?;
    let options = ServerOptions {
        home: Home::Memory(OnlyClient { socket, pid }),
        listen: Vec::new(),
        token: None,
        max_connections: arguments.max_connections.map(|wanted| wanted as usize),
        memory_limit_bytes: arguments.memory_limit,
        broker: BrokerOptions::default(),
        local: None,
    };
    Ok(Server::run(options, release_stderr)?)
}

fn open_log(paths: &LocalPaths) -> io::Result<File> {
    let long = fs::metadata(&paths.log).is_ok_and(|found| found.len() > LONG_LOG_BYTES);
    if long && let Err(error) = fs::rename(&paths.log, paths.log.with_extension("log.1")) {
        // Renaming failed, so logging continues in the long file.
        if !is_disk_fault(&error) {
            return Err(error);
        }
    }
    match paths.open_log() {
        // Draining the queues matters more than the log.
        Err(error) if is_disk_fault(&error) => File::options().append(true).open("/dev/null"),
        opened => opened,
    }
}
