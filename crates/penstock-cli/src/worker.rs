use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgAction, Args};
use penstock_driver::{BrokerUrl, DEFAULT_HEARTBEAT, DriverConfig, DriverError};
use penstock_local::{connect, full_url, memory_url_error};
use penstock_worker::{
    ChildLog, Connected, DEFAULT_GRACE, DEFAULT_KILL_GRACE, MAX_PROCESSES, MAX_SLOTS, MemoryConfig,
    MemoryLimit, PoolConfig, RecycleConfig, SlotKind, WorkerConfig, knows_memory, worker_name,
};

use crate::allocator::give_back;
use crate::exit::{CommandError, NOT_OFFERED, WRONG_CALL};
use crate::logging::{LogArguments, LogFormat, LogLevel};
use crate::remote::{DEFAULT_URL, address_of, token_from_environment};
use crate::text::byte_count;
use crate::times::duration;

/// Slots on the event loop when no number is given.
const DEFAULT_ASYNC_SLOTS: u32 = 100;

#[derive(Args)]
pub struct Arguments {
    /// Location of the app: MODULE:APP, or a module with a single app. Several apps need the same broker and
    /// distinct task names
    #[arg(value_name = "APP", required = true)]
    apps: Vec<String>,
    /// Also import this module for its tasks; may be given several times
    #[arg(short = 'I', long, value_name = "MODULE", action = ArgAction::Append)]
    include: Vec<String>,
    /// The broker: local:PATH, unix:PATH or tcp://HOST:PORT
    #[arg(long, env = "PENSTOCK_URL", hide_env_values = true)]
    url: Option<String>,
    /// Number of processes that run jobs, one job at a time each unless --threads is given [default: one per
    /// CPU]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    concurrency: Option<u32>,
    /// Number of jobs that each of those processes runs at once, in threads: for tasks that wait more than they
    /// compute
    #[arg(long, value_name = "T", value_parser = slots)]
    threads: Option<u32>,
    /// With --threads: number of one-job processes, for tasks with slot="process" [default: one, if there is
    /// such a task]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    processes: Option<u32>,
    /// Number of jobs of async def tasks that run at once, on one event loop in its own process
    #[arg(long = "async", value_name = "N", default_value_t = DEFAULT_ASYNC_SLOTS, value_parser = slots)]
    async_slots: u32,
    /// Maximum number of slot="isolated" jobs that run at once, each in its own process that exits with the job
    /// [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    isolated: Option<u32>,
    /// Comma-separated queues to serve [default: those that the app's tasks use]
    #[arg(short = 'Q', long, value_name = "QUEUES", value_delimiter = ',', value_parser = queue_name, action = ArgAction::Append)]
    queues: Option<Vec<String>>,
    /// Maximum number of jobs per kind of slot that may wait for other jobs without holding a slot [default: 64
    /// plus 8 per process, 1024 in threads, unlimited on an event loop]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_SLOTS)))]
    max_parked: Option<u32>,
    /// Exit once the queues are empty
    #[arg(long)]
    burst: bool,
    /// Replace a process after it has run this many jobs; isolated processes run only one anyway
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_jobs_per_child: Option<u64>,
    /// Replace a process that still holds more memory of its own than this when its jobs have ended, such as
    /// 400M or 2G
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_memory_per_child: Option<u64>,
    /// Replace a process at this age, such as 90s, 30m or 12h; up to a tenth sooner or later, so that processes
    /// are not all replaced at once
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_age: Option<Duration>,
    /// Start no job that would take the memory of all this worker's processes above this: a size such as 2G, a
    /// share of the machine's or container's memory such as 80%, or 0 for no limit [default: 90% of the
    /// container's limit, if it has one]
    #[arg(long, value_name = "SIZE", value_parser = memory_limit)]
    memory_limit: Option<MemoryLimit>,
    /// Seconds that running jobs get to finish after SIGTERM or Ctrl-C before they are handed back
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_GRACE.as_secs())]
    grace: u64,
    /// Seconds that a job gets after its time limit before its process is killed: 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_KILL_GRACE.as_secs_f64(), value_parser = seconds)]
    kill_grace: f64,
    /// Seconds of silence after which this worker's jobs are given to another worker: 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_HEARTBEAT.as_secs_f64(), value_parser = seconds)]
    heartbeat: f64,
    /// Name of the worker in `penstock status` [default: worker@HOST:PID]
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

fn configure(arguments: Arguments) -> Result<WorkerConfig, CommandError> {
    let limits_memory =
        arguments.max_memory_per_child.is_some() || arguments.memory_limit.is_some();
    if limits_memory && !knows_memory() {
        return Err(CommandError::new(
            NOT_OFFERED,
            "this system does not report the memory of processes, so a worker can't limit it here: leave out \
             --max-memory-per-child and --memory-limit",
        ));
    }
    let name = arguments.name.unwrap_or_else(worker_name);
    let given = arguments.url.filter(|url| !url.is_empty());
    if let Some(url) = &given {
        // Check the URL before loading an app.
        address_of(url)?;
    }
    let url = given.clone();
    let called = name.clone();
    let heartbeat = Duration::from_secs_f64(arguments.heartbeat);
    let connect = move |named: Option<&str>| {
        let url = given.as_deref().or(named).unwrap_or(DEFAULT_URL);
        let (is_here, is_named) = (reachable(url)?, named.map(reachable).transpose()?);
        if let Some(is_named) = is_named.filter(|is_named| *is_named != is_here) {
            tracing::warn!(
                "the app's own broker is {is_named}, but this worker serves {is_here} (--url or \
                 PENSTOCK_URL): it runs no jobs that are enqueued with the app's own URL"
            );
        }
        let driver = connect(DriverConfig {
            token: token_from_environment(),
            program: std::env::current_exe().ok(),
            name: called,
            heartbeat,
            ..DriverConfig::new(url.to_owned())
        })?;
        Ok(Connected {
            driver,
            shown: is_here,
        })
    };
    let pools = pools(
        arguments.concurrency,
        arguments.threads,
        arguments.processes,
        arguments.async_slots,
        arguments.isolated,
    )?;
    let default_slot = pools[0].kind;
    Ok(WorkerConfig {
        apps: arguments.apps,
        modules: arguments.include,
        python: python(),
        connect: Some(Box::new(connect)),
        url,
        name,
        pools,
        default_slot,
        max_parked: arguments.max_parked,
        queues: arguments.queues,
        burst: arguments.burst,
        grace: Duration::from_secs(arguments.grace),
        recycle: RecycleConfig {
            max_jobs: arguments.max_jobs_per_child,
            max_age: arguments.max_age,
        },
        kill_grace: Duration::from_secs_f64(arguments.kill_grace),
        give_back,
        memory: MemoryConfig {
            max_per_child: arguments.max_memory_per_child,
            limit: arguments.memory_limit.unwrap_or_default(),
        },
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

/// Builds the worker's pools; the first is for tasks that name no kind of slot.
fn pools(
    concurrency: Option<u32>,
    threads: Option<u32>,
    processes: Option<u32>,
    async_slots: u32,
    isolated: Option<u32>,
) -> Result<Vec<PoolConfig>, CommandError> {
    let cpus = available_cpus();
    let concurrency = concurrency.unwrap_or(cpus.min(MAX_PROCESSES));
    let pool = |kind, processes, slots| PoolConfig {
        kind,
        processes,
        slots,
        on_demand: false,
    };
    if threads.is_none() && processes.is_some() {
        return Err(CommandError::new(
            WRONG_CALL,
            "--processes adds processes to those of --threads; without --threads, use -c N",
        ));
    }
    let mut pools = Vec::new();
    match threads {
        None => pools.push(pool(SlotKind::Process, concurrency, 1)),
        Some(threads) => {
            pools.push(pool(SlotKind::Thread, concurrency, threads));
            pools.push(PoolConfig {
                on_demand: processes.is_none(),
                ..pool(SlotKind::Process, processes.unwrap_or(1), 1)
            });
        }
    }
    // Its process only starts if the app has an async task.
    pools.push(pool(SlotKind::Async, 1, async_slots));
    let all: u64 = pools.iter().map(|pool| u64::from(pool.processes)).sum();
    let all = all + isolated.map_or(0, u64::from);
    if all > u64::from(MAX_PROCESSES) {
        return Err(CommandError::new(
            WRONG_CALL,
            format!(
                "{all} processes are too many: a worker has at most {MAX_PROCESSES}; run a second worker"
            ),
        ));
    }
    let slots: u64 = pools
        .iter()
        .map(|pool| u64::from(pool.processes) * u64::from(pool.slots))
        .sum();
    let slots = slots + isolated.map_or(0, u64::from);
    if slots > u64::from(MAX_SLOTS) {
        return Err(CommandError::new(
            WRONG_CALL,
            format!(
                "{slots} slots are too many: a worker has at most {MAX_SLOTS}; run a second worker"
            ),
        ));
    }
    // Added last: default isolated processes must not trigger the errors above.
    pools.push(PoolConfig {
        on_demand: isolated.is_none(),
        ..pool(
            SlotKind::Isolated,
            isolated.unwrap_or(cpus.min(MOST_ISOLATED)),
            1,
        )
    });
    Ok(pools)
}

/// Default limit on isolated processes; fewer than the shared page has room for.
const MOST_ISOLATED: u32 = 64;

fn available_cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32)
}

/// Reads a size with its unit. A bare number might be meant in KiB, as in Celery.
fn size(text: &str) -> Result<u64, String> {
    if text.bytes().all(|letter| letter.is_ascii_digit()) {
        return Err("give a size with its unit, such as 400M or 2G".to_owned());
    }
    byte_count(text)
}

/// Reads `2G`, `80%` or `0`.
fn memory_limit(text: &str) -> Result<MemoryLimit, String> {
    if text == "0" {
        return Ok(MemoryLimit::None);
    }
    match text.strip_suffix('%').map(str::parse) {
        None => size(text).map(MemoryLimit::Bytes),
        Some(Ok(percent @ 1..=100)) => Ok(MemoryLimit::Percent(percent)),
        Some(_) => Err("give a share from 1% to 100%".to_owned()),
    }
}

/// Reads the number of slots of a process.
fn slots(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Err(
            "a process without slots runs nothing; give at least 1, or leave the option out"
                .to_owned(),
        ),
        Ok(slots) if slots <= MAX_SLOTS => Ok(slots),
        _ => Err(format!("give a number from 1 to {MAX_SLOTS}")),
    }
}

/// Returns the broker's full URL, if a worker can use it.
fn reachable(url: &str) -> Result<String, DriverError> {
    match url.parse()? {
        BrokerUrl::Memory(_) => Err(DriverError::invalid(memory_url_error())),
        BrokerUrl::Local(_) | BrokerUrl::Unix(_) | BrokerUrl::Tcp { .. } => Ok(full_url(url)),
    }
}

fn queue_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err(
            "a queue name is empty; separate names with one comma, such as -Q mail,default"
                .to_owned(),
        ),
        name => Ok(name.to_owned()),
    }
}

/// Reads a heartbeat or a grace period, in the range that a broker accepts for a heartbeat.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds, from 0.1 to 3600".to_owned()),
    }
}

/// Returns the interpreter that this command was installed for; the Python entry point sets it.
pub fn python() -> PathBuf {
    std::env::var_os("PENSTOCK_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memory_have_units() {
        let check = |text: &str, expected: Option<MemoryLimit>| {
            assert_eq!(memory_limit(text).ok(), expected, "{text}");
        };
        check("2G", Some(MemoryLimit::Bytes(2 << 30)));
        check("512MiB", Some(MemoryLimit::Bytes(512 << 20)));
        check("80%", Some(MemoryLimit::Percent(80)));
        check("0", Some(MemoryLimit::None));
        check("0%", None);
        check("101%", None);
        check("half", None);
        check("2000000", None);
        assert_eq!(size("400M"), Ok(400 << 20));
        assert!(size("200000").is_err_and(|error| error.contains("with its unit")));
    }
}
