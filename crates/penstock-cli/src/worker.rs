use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgAction, Args};
use penstock_driver::{DEFAULT_HEARTBEAT, DriverConfig, connect};
use penstock_worker::{ChildLog, DEFAULT_GRACE, MAX_SLOTS, WorkerConfig, worker_name};

use crate::exit::Failure;
use crate::logging::{LogArguments, LogFormat, LogLevel};
use crate::remote::{BrokerArguments, token_from_environment};

#[derive(Args)]
pub struct Arguments {
    /// Where the app is, as module:app
    app: String,
    #[command(flatten)]
    broker: BrokerArguments,
    /// How many jobs run at once, each in a process [default: one for each CPU]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    concurrency: Option<u32>,
    /// Queues to serve, with commas between [default: those the app's tasks name]
    #[arg(short = 'Q', long, value_name = "QUEUES", value_delimiter = ',', value_parser = queue_name, action = ArgAction::Append)]
    queues: Option<Vec<String>>,
    /// End once the queues are empty
    #[arg(long)]
    burst: bool,
    /// How long running jobs may go on after SIGTERM or Ctrl-C before they are handed back
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_GRACE.as_secs())]
    grace: u64,
    /// How long this worker may be silent before its jobs are another's: 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_HEARTBEAT.as_secs_f64(), value_parser = heartbeat)]
    heartbeat: f64,
    /// What to be called in `penstock status` [default: worker@HOST:PID]
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    log: LogArguments,
}

pub fn run(arguments: Arguments) -> ExitCode {
    arguments.log.to_stderr();
    match configure(arguments) {
        Ok(config) => penstock_worker::run(config),
        Err(failure) => failure.report(),
    }
}

fn configure(arguments: Arguments) -> Result<WorkerConfig, Failure> {
    let name = arguments.name.unwrap_or_else(worker_name);
    let url = arguments.broker.url;
    let driver = connect(DriverConfig {
        token: token_from_environment(),
        program: std::env::current_exe().ok(),
        name: name.clone(),
        heartbeat: Duration::from_secs_f64(arguments.heartbeat),
        ..DriverConfig::new(url.clone())
    })?;
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32);
    Ok(WorkerConfig {
        app: arguments.app,
        python: python(),
        driver,
        name,
        broker: url,
        slots: arguments.concurrency.unwrap_or(cpus.min(MAX_SLOTS)),
        queues: arguments.queues,
        burst: arguments.burst,
        grace: Duration::from_secs(arguments.grace),
        log: ChildLog {
            level: match arguments.log.level() {
                LogLevel::Error => "ERROR",
                LogLevel::Warning => "WARNING",
                LogLevel::Info => "INFO",
                LogLevel::Debug => "DEBUG",
            },
            json: matches!(arguments.log.log_format, LogFormat::Json),
        },
    })
}

fn queue_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("a queue's name is empty; write the names with one comma between them, such as -Q mail,default".to_owned()),
        name => Ok(name.to_owned()),
    }
}

/// What a broker heeds.
fn heartbeat(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds, from 0.1 to 3600".to_owned()),
    }
}

/// The interpreter that this command was installed for; the Python entry tells.
pub fn python() -> PathBuf {
    std::env::var_os("PENSTOCK_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from)
}
