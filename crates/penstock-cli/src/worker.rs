use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgAction, Args};
use penstock_driver::{Address, DEFAULT_HEARTBEAT, DriverConfig, DriverError};
use penstock_local::{connect, in_full, in_second_process};
use penstock_worker::{
    ChildLog, Connected, DEFAULT_GRACE, DEFAULT_KILL_GRACE, MAX_PROCESSES, MAX_SLOTS, MemoryConfig,
    MemoryLimit, PoolConfig, RecycleConfig, SlotKind, WorkerConfig, knows_memory, worker_name,
};

use crate::exit::{Failure, NOT_OFFERED, WRONG_CALL};
use crate::logging::{LogArguments, LogFormat, LogLevel};
use crate::memory::give_back;
use crate::moment::duration;
use crate::remote::{DEFAULT_URL, address_of, token_from_environment};
use crate::text::byte_count;

/// Slots on the event loop of a worker that was told no number.
const DEFAULT_ASYNC_SLOTS: u32 = 100;

#[derive(Args)]
pub struct Arguments {
    /// Where the app is: module:app, or the module that has one app. Several apps need one broker, and names of their
    /// own for their tasks
    #[arg(value_name = "APP", required = true)]
    apps: Vec<String>,
    /// Import this module too, for its tasks; any number of times
    #[arg(short = 'I', long, value_name = "MODULE", action = ArgAction::Append)]
    include: Vec<String>,
    /// The broker: local:PATH, unix:PATH or tcp://HOST:PORT
    #[arg(long, env = "PENSTOCK_URL", hide_env_values = true)]
    url: Option<String>,
    /// How many processes run jobs, one at a time each unless --threads says more [default: one for each CPU]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    concurrency: Option<u32>,
    /// Run so many jobs at once in each of those processes, in threads: for tasks that wait more than they compute
    #[arg(long, value_name = "T", value_parser = slots)]
    threads: Option<u32>,
    /// With --threads: processes that run one job at a time, for tasks with slot="process" [default: one, if there is
    /// such a task]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    processes: Option<u32>,
    /// Run so many jobs of async def tasks at once, on one event loop in a process of its own
    #[arg(long = "async", value_name = "N", default_value_t = DEFAULT_ASYNC_SLOTS, value_parser = slots)]
    async_slots: u32,
    /// At most so many jobs at once of tasks with slot="isolated", each in a process of its own that ends with it
    /// [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROCESSES)))]
    isolated: Option<u32>,
    /// Queues to serve, with commas between [default: those the app's tasks name]
    #[arg(short = 'Q', long, value_name = "QUEUES", value_delimiter = ',', value_parser = queue_name, action = ArgAction::Append)]
    queues: Option<Vec<String>>,
    /// At most so many jobs of each kind of slot may wait for other jobs with their slots lent [default: 64 and 8 more for each
    /// process, 1024 in threads, any number on an event loop]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_SLOTS)))]
    max_parked: Option<u32>,
    /// End once the queues are empty
    #[arg(long)]
    burst: bool,
    /// Replace a process by a fresh one when it has run so many jobs; not one that is for a single job anyway (isolated)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_jobs_per_child: Option<u64>,
    /// Replace a process by a fresh one when it keeps more memory of its own than this when its jobs have ended, such as 400M or 2G
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_memory_per_child: Option<u64>,
    /// Replace a process by a fresh one when it is so old, such as 90s, 30m or 12h; up to a tenth sooner or later, so that
    /// not all are replaced at one time
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_age: Option<Duration>,
    /// Start no job that would take the memory of all processes of this worker beyond this: a size such as 2G, a share of the
    /// machine's or the container's such as 80%, or 0 for no limit [default: 90% of the container's limit, if it has one]
    #[arg(long, value_name = "SIZE", value_parser = memory_limit)]
    memory_limit: Option<MemoryLimit>,
    /// How long running jobs may go on after SIGTERM or Ctrl-C before they are handed back
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_GRACE.as_secs())]
    grace: u64,
    /// How long a job may go on after its time limit was over before its process is killed: 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_KILL_GRACE.as_secs_f64(), value_parser = seconds)]
    kill_grace: f64,
    /// How long this worker may be silent before its jobs are another's: 0.1 to 3600
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

fn configure(arguments: Arguments) -> Result<WorkerConfig, Failure> {
    let limits_memory =
        arguments.max_memory_per_child.is_some() || arguments.memory_limit.is_some();
    if limits_memory && !knows_memory() {
        return Err(Failure::new(
            NOT_OFFERED,
            "this system does not tell what memory processes have, so a worker can't limit it here: leave out \
             --max-memory-per-child and --memory-limit",
        ));
    }
    let name = arguments.name.unwrap_or_else(worker_name);
    let given = arguments.url.filter(|url| !url.is_empty());
    if let Some(url) = &given {
        // Before an app is loaded in vain.
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
                "the app's own broker is {is_named}, but this worker was told to serve {is_here} (--url or \
                 PENSTOCK_URL): it runs no job that is enqueued with the app's own URL"
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

/// The slots of a worker; the first are for tasks that ask for none.
fn pools(
    concurrency: Option<u32>,
    threads: Option<u32>,
    processes: Option<u32>,
    async_slots: u32,
    isolated: Option<u32>,
) -> Result<Vec<PoolConfig>, Failure> {
    let cpus = available_cpus();
    let concurrency = concurrency.unwrap_or(cpus.min(MAX_PROCESSES));
    let pool = |kind, processes, slots| PoolConfig {
        kind,
        processes,
        slots,
        on_demand: false,
    };
    if threads.is_none() && processes.is_some() {
        return Err(Failure::new(
            WRONG_CALL,
            "--processes is for processes beside those of --threads; without threads, -c N says how many there are",
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
    // Its process is there only if the app has a task for it.
    pools.push(pool(SlotKind::Async, 1, async_slots));
    let all: u64 = pools.iter().map(|pool| u64::from(pool.processes)).sum();
    let all = all + isolated.map_or(0, u64::from);
    if all > u64::from(MAX_PROCESSES) {
        return Err(Failure::new(
            WRONG_CALL,
            format!(
                "these are {all} processes, and a worker has at most {MAX_PROCESSES}; run a second worker"
            ),
        ));
    }
    let slots: u64 = pools
        .iter()
        .map(|pool| u64::from(pool.processes) * u64::from(pool.slots))
        .sum();
    let slots = slots + isolated.map_or(0, u64::from);
    if slots > u64::from(MAX_SLOTS) {
        return Err(Failure::new(
            WRONG_CALL,
            format!(
                "these are {slots} slots, and a worker has at most {MAX_SLOTS}; run a second worker"
            ),
        ));
    }
    // Those that nobody asked for are never what is too much.
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

/// Isolated processes of a worker that was not told how many; fewer than the page has room for.
const MOST_ISOLATED: u32 = 64;

fn available_cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32)
}

/// Reads a size with its unit. A bare number would be Celery's, of KiB.
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
        Some(_) => Err("a share is from 1% to 100%".to_owned()),
    }
}

/// How many slots a process has.
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

/// Returns the broker's URL in full, if a worker can use it.
fn reachable(url: &str) -> Result<String, DriverError> {
    match url.parse()? {
        Address::Memory(_) => Err(DriverError::invalid(in_second_process())),
        Address::Local(_) | Address::Unix(_) | Address::Tcp { .. } => Ok(in_full(url)),
    }
}

fn queue_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("a queue's name is empty; write the names with one comma between them, such as -Q mail,default".to_owned()),
        name => Ok(name.to_owned()),
    }
}

/// Reads a heartbeat or a grace, in the range that a broker accepts for the former.
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
