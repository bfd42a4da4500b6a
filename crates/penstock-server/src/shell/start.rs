//! Starts a server: listens, fits the options to the machine, recovers the journal, and starts the threads.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use penstock_broker::BrokerOptions;
use penstock_journal::sim::SimStorage;
use penstock_journal::{DiskStorage, FORMAT_VERSION, JournalOptions, RecoveryReport, Storage};
use rustc_hash::{FxHashMap, FxHashSet};
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};

use super::{
    EVENTS_AT_ONCE, FIRST_CONNECTION, FIRST_LISTENER, Home, Load, ONLY_CLIENT, READ_BYTES, SIGNALS,
    Server, ServerClock, ServerError, ServerOptions, WAKER,
};
use crate::engine::{Engine, EngineOptions, Peer};
use crate::files;
use crate::listen::Listener;
use crate::panics;
use crate::process_memory::{self, Gauge, default_limit, trim_heap};
use crate::reader::ReaderThread;
use crate::writer::{WriterThread, measure_sync};

/// Adapts the options to a machine with this much memory and disk, and draws their random numbers.
fn options_for_machine(
    mut broker: BrokerOptions,
    memory_limit_bytes: u64,
    disk_bytes: u64,
) -> io::Result<(BrokerOptions, JournalOptions)> {
    let mut journal = JournalOptions::default();
    journal.fit_to_disk(disk_bytes);
    getrandom::fill(&mut journal.journal_id)?;
    broker.hash_seed = getrandom::u64()?;
    if memory_limit_bytes > 0 {
        // Incomplete large transactions must not exceed the limit, nor must bodies, which are on disk anyway and may
        // take twice the option's bytes. Results make room for newer ones of their task, so that they don't fill up a
        // small broker.
        let share = usize::try_from(memory_limit_bytes / 4).unwrap_or(usize::MAX);
        broker.staged_parts_cap_bytes = broker.staged_parts_cap_bytes.min(share);
        let share = memory_limit_bytes / 8;
        broker.resident_bodies_bytes = broker.resident_bodies_bytes.map(|bytes| bytes.min(share));
        broker.results_cap_bytes = broker.results_cap_bytes.min(share);
    }
    Ok((broker, journal))
}

/// Adapts the options to a journal in memory.
fn options_in_memory(mut broker: BrokerOptions) -> io::Result<(BrokerOptions, JournalOptions)> {
    broker.hash_seed = getrandom::u64()?;
    // Bodies that are read back from memory need no second copy.
    broker.resident_bodies_bytes = None;
    let mut journal = JournalOptions {
        // All segments have the same size, so that each is reused.
        segment_bytes: 2 << 20,
        batch_bytes: 1 << 20,
        ..JournalOptions::default()
    };
    getrandom::fill(&mut journal.journal_id)?;
    Ok((broker, journal))
}

/// Engine with its threads.
struct OpenedEngine {
    engine: Engine,
    writer: WriterThread,
    reader: ReaderThread,
    report: RecoveryReport,
}

impl OpenedEngine {
    fn open<S: Storage>(
        storage: S,
        options: EngineOptions,
        clock: &ServerClock,
        waker: &Arc<Waker>,
    ) -> Result<Self, ServerError> {
        let (engine, writer, report) = Engine::open(storage, options, || clock.now())?;
        let reader = ReaderThread::start(writer.reader(), Arc::clone(waker))
            .map_err(ServerError::system("start the reader's thread"))?;
        let writer = WriterThread::start(writer, Arc::clone(waker))
            .map_err(ServerError::system("start the writer's thread"))?;
        Ok(Self {
            engine,
            writer,
            reader,
            report,
        })
    }
}

impl Server {
    pub(crate) fn start(options: ServerOptions) -> Result<Self, ServerError> {
        panics::abort_on_first_panic();
        let files = files::raise_limit();
        let max_connections =
            files::connections(options.max_connections, files).map_err(|room| {
                let wanted = options.max_connections.unwrap_or_default();
                ServerError::TooManyConnections { wanted, room }
            })?;
        let clock = ServerClock::start();
        let poll = Poll::new().map_err(ServerError::system("wait for events"))?;
        let waker = Waker::new(poll.registry(), WAKER)
            .map_err(ServerError::system("wait for the writer"))?;
        let waker = Arc::new(waker);
        // Clients may queue while the journal is recovered.
        let has_token = options.token.is_some();
        let mut listeners = Vec::new();
        for address in &options.listen {
            listeners.extend(Listener::open(address, has_token)?);
        }
        if let Some(local) = &options.local {
            listeners.push(Listener::open_local(local.lock.paths())?);
        }

        let memory_limit_bytes = options.memory_limit_bytes.unwrap_or_else(default_limit);
        if let Some(warning) = process_memory::warning(process_memory::usable_bytes()) {
            tracing::warn!("{warning}");
        }
        let is_in_memory = matches!(options.home, Home::Memory(_));
        let engine_options = |broker, journal| EngineOptions {
            broker,
            journal,
            token: options.token,
            max_connections,
            stop_on_request: options.local.is_some(),
            is_double: is_in_memory,
            pid: u64::from(std::process::id()),
        };
        let (opened, only_client) = match options.home {
            Home::Directory(journal) => {
                let directory = |source| ServerError::Directory {
                    directory: journal.clone(),
                    source,
                };
                let storage = DiskStorage::open(&journal).map_err(directory)?;
                let disk_bytes = storage.disk_bytes().map_err(directory)?;
                let (broker, mut options_of_journal) =
                    options_for_machine(options.broker, memory_limit_bytes, disk_bytes)
                        .map_err(ServerError::system("draw random numbers"))?;
                // Nobody else can upgrade a local broker's journal: its clients start the broker automatically.
                options_of_journal.upgrades = options.local.is_some();
                let in_place = storage.overwrites_in_place().map_err(directory)?;
                options_of_journal.keep_reserve(disk_bytes, in_place);
                let engine_options = engine_options(broker, options_of_journal);
                let opened = OpenedEngine::open(storage.clone(), engine_options, &clock, &waker)?;
                log_recovery(&journal, &opened.report, clock.zero.elapsed());
                measure_sync(storage).map_err(ServerError::system("start a thread"))?;
                (opened, None)
            }
            Home::Memory(client) => {
                let (broker, journal) = options_in_memory(options.broker)
                    .map_err(ServerError::system("draw random numbers"))?;
                let storage = SimStorage::new();
                let engine_options = engine_options(broker, journal);
                let opened = OpenedEngine::open(storage, engine_options, &clock, &waker)?;
                (opened, Some(client))
            }
        };
        // Returns the memory that reading the journal took.
        trim_heap();
        let OpenedEngine {
            engine,
            writer,
            reader,
            ..
        } = opened;
        let signals = watch_signals(&poll).map_err(ServerError::system("watch for signals"))?;
        for (index, listener) in listeners.iter().enumerate() {
            poll.registry()
                .register(
                    &mut SourceFd(&listener.as_fd().as_raw_fd()),
                    Token(FIRST_LISTENER + index),
                    Interest::READABLE,
                )
                .map_err(ServerError::system("wait for clients"))?;
            tracing::info!("listening on {}", listener.address);
        }
        let watched = match &only_client {
            Some(client) => watch_parent(&poll, client.pid)
                .map_err(ServerError::system("watch the client's process"))?,
            None => None,
        };
        let mut server = Self {
            engine,
            writer,
            reader,
            poll,
            listeners,
            accept_at: Some(Instant::now()),
            signals,
            sockets: FxHashMap::default(),
            readable: FxHashSet::default(),
            unread: FxHashSet::default(),
            memory: Gauge::new(memory_limit_bytes),
            closing: FxHashMap::default(),
            next_conn: FIRST_CONNECTION,
            read_buffer: vec![0; READ_BYTES],
            clock,
            local: options.local,
            _only_client: watched,
            is_in_memory,
            no_clients_since: Some(Instant::now()),
            recheck_at: Instant::now(),
            stopping: false,
            failure: None,
            events: Events::with_capacity(EVENTS_AT_ONCE),
            full_passes: 0,
            load: Load::default(),
        };
        if let Some(client) = only_client {
            rustix::io::ioctl_fionbio(&client.socket, true)
                .map_err(io::Error::from)
                .and_then(|()| server.add_client(client.socket, Peer::Trusted))
                .map_err(ServerError::system("accept the client"))?;
        }
        Ok(server)
    }
}

fn watch_signals(poll: &Poll) -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    // A limit on file sizes is handled like a full disk, instead of killing the process.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    poll.registry().register(
        &mut SourceFd(&read.as_raw_fd()),
        SIGNALS,
        Interest::READABLE,
    )?;
    Ok(read)
}

/// Wakes the loop when the parent of this process exits. The socket does not always show that: a process forked by the
/// parent may hold a copy.
#[cfg(target_os = "linux")]
fn watch_parent(poll: &Poll, pid: u32) -> io::Result<Option<OwnedFd>> {
    use rustix::process::{PidfdFlags, getppid, pidfd_open};
    let gone = || io::Error::new(io::ErrorKind::NotFound, "it has ended");
    let parent = getppid().filter(|parent| parent.as_raw_pid() as u32 == pid);
    let process = pidfd_open(parent.ok_or_else(gone)?, PidfdFlags::empty())?;
    // Another process may have taken the number in between.
    getppid()
        .filter(|parent| parent.as_raw_pid() as u32 == pid)
        .ok_or_else(gone)?;
    let mut source = SourceFd(&process.as_raw_fd());
    poll.registry()
        .register(&mut source, ONLY_CLIENT, Interest::READABLE)?;
    Ok(Some(process))
}

/// Returns none: other systems rely on the end of the socket.
#[cfg(not(target_os = "linux"))]
fn watch_parent(_: &Poll, _: u32) -> io::Result<Option<OwnedFd>> {
    Ok(None)
}

fn log_recovery(journal: &std::path::Path, report: &RecoveryReport, took: Duration) {
    let took_ms = took.as_millis();
    if let Some(format) = report.upgraded_from {
        tracing::info!(
            "upgraded {} from format {format} to {FORMAT_VERSION}: earlier programs refuse it from now on",
            journal.display()
        );
    }
    if report.created {
        tracing::info!("began a new journal in {}", journal.display());
    } else {
        tracing::info!(
            records = report.records,
            segments = report.segments,
            torn_batches = report.torn_batches,
            "recovered {} in {took_ms} ms",
            journal.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that no two servers share a seed: under a known seed, clients could choose ids that collide.
    #[test]
    fn each_server_draws_the_seed_of_its_hashes() {
        let draw =
            || options_for_machine(BrokerOptions::default(), 0, 1 << 30).expect("random numbers");
        let ((one, _), (other, _)) = (draw(), draw());
        assert_ne!(one.hash_seed, BrokerOptions::default().hash_seed);
        assert_ne!(one.hash_seed, other.hash_seed);
    }
}
