//! The process around the [`Engine`]: one loop over sockets, timers and the writer's reports.
//!
//! ```text
//!     loop {
//!         wait for a socket, the writer, a signal or the next deadline
//!         drain: accept, read into the engine, take reports of the writer and the reader
//!         tick, when it is due
//!         hand the engine's batch to the writer, when it is free, and its reads to the reader
//!         flush: one write for each connection that has something to send
//!         write the batch here instead, if it is small and awaited, the disk quick, and the loop not busy
//!     }
//! ```
//!
//! The loop continues while the writer's thread syncs; work that arrives in that time becomes the next batch. So batches
//! grow with the load, and a lone request waits for nobody.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use penstock_broker::{Boot, BrokerOptions, ConnId, Now};
use penstock_journal::sim::SimStorage;
use penstock_journal::{
    DiskStorage, FORMAT_VERSION, JournalOptions, OpenError, RecoveryReport, Storage, WriteError,
};
use rustc_hash::{FxHashMap, FxHashSet};
use rustix::io::Errno;
use rustix::net::Shutdown;
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};

use crate::directory_lock::DirectoryLock;
use crate::engine::{Engine, EngineOptions, Peer};
use crate::files::{self, MAX_CLOSING};
use crate::listen::{ListenAddress, ListenError, Listener};
use crate::panics;
use crate::process_memory::{self, Gauge, default_limit, trim_heap};
use crate::reader::ReaderThread;
use crate::token::Token as Secret;
use crate::writer::{TaskHere, WriterReport, WriterThread, measure_sync};

const WAKER: Token = Token(0);
const SIGNALS: Token = Token(1);
const ONLY_CLIENT: Token = Token(2);
const FIRST_LISTENER: usize = 3;
/// Number of the first connection. Connections are numbered from here, so that a token identifies one.
const FIRST_CONNECTION: u64 = 1 << 16;

/// Sockets whose events are read in one pass; more follow in the next.
const EVENTS_AT_ONCE: usize = 1024;
/// Clients accepted before the others get their turn.
const ACCEPTS_AT_ONCE: usize = 64;
/// Bytes read from one connection before the others get their turn.
const READ_BYTES: usize = 256 << 10;
/// Time for the client of a closed connection to read the reason.
const CLOSING_TIME: Duration = Duration::from_millis(500);
/// Time over which the loop's load is measured.
const LOAD_TIME: Duration = Duration::from_millis(20);
/// Interval for another try after accepting failed, and for a local broker's check that its directory still exists.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct ServerOptions {
    pub home: Home,
    pub listen: Vec<ListenAddress>,
    /// Token that clients on TCP must present.
    pub token: Option<Secret>,
    /// Maximum number of clients; further ones are refused. `None`: as many as there are file descriptors for.
    pub max_connections: Option<usize>,
    /// Memory above which no new work is accepted; 0: there is no limit. `None`: a share of the machine's memory.
    pub memory_limit_bytes: Option<u64>,
    pub broker: BrokerOptions,
    /// Settings of a local broker, which exits automatically.
    pub local: Option<LocalOptions>,
}

/// Location of a server's journal.
#[derive(Debug)]
pub enum Home {
    /// Directory of the journal.
    Directory(PathBuf),
    /// No directory: the server is a double for the tests of one client, and exits with it.
    Memory(OnlyClient),
}

/// Client of a server that keeps its journal in memory.
#[derive(Debug)]
pub struct OnlyClient {
    /// Socket already connected to the client.
    pub socket: OwnedFd,
    /// Process of the client, which is the parent of this one.
    pub pid: u32,
}

#[derive(Debug)]
pub struct LocalOptions {
    pub lock: DirectoryLock,
    /// Time from the last client's disconnection until the broker exits.
    pub linger: Duration,
}

/// Reason why the server did not start, or stopped unexpectedly.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("can't use {}: {source}", directory.display())]
    Directory {
        directory: PathBuf,
        source: io::Error,
    },
    #[error(transparent)]
    Journal(#[from] OpenError),
    #[error(
        "{0}. The broker stops now. Check the disk (space, quota, kernel log), then start it again: it keeps \
         everything that was confirmed"
    )]
    DiskFailed(#[from] WriteError),
    #[error(
        "{wanted} connections are more than the {room} that this process has file descriptors for; raise its \
         limit of open files (ulimit -n, or LimitNOFILE= of a service), or ask for fewer"
    )]
    TooManyConnections { wanted: usize, room: u64 },
    #[error("can't {action}: {source}")]
    System {
        action: &'static str,
        source: io::Error,
    },
}

impl ServerError {
    pub(crate) fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action, source }
    }
}

/// Server that has recovered its journal and listens.
pub struct Server {
    engine: Engine,
    writer: WriterThread,
    reader: ReaderThread,
    poll: Poll,
    listeners: Vec<Listener>,
    /// Time at which to accept clients again.
    accept_at: Option<Instant>,
    signals: UnixStream,
    sockets: FxHashMap<ConnId, Socket>,
    /// Connections that may have something to read.
    readable: FxHashSet<ConnId>,
    /// Connections that have something to read but are not read: they do not receive their waiting bytes, or their
    /// frames wait for disk space.
    unread: FxHashSet<ConnId>,
    memory: Gauge,
    /// Connections that the engine has dropped, but whose clients may not have read everything.
    closing: FxHashMap<ConnId, (Socket, Instant)>,
    next_conn: u64,
    read_buffer: Vec<u8>,
    clock: ServerClock,
    local: Option<LocalOptions>,
    /// Descriptor that becomes readable when the only client's process exits; kept open for that.
    _only_client: Option<OwnedFd>,
    is_in_memory: bool,
    /// Time since which a local broker has had no client.
    no_clients_since: Option<Instant>,
    recheck_at: Instant,
    stopping: bool,
    failure: Option<WriteError>,
    events: Events,
    /// Passes in a row after which some connections may still be unread.
    full_passes: usize,
    load: Load,
}

/// Result of a pass of the loop.
pub(crate) enum Pass {
    Done,
    /// The thread is to carry out this task, while the server can be continued elsewhere.
    Write(TaskHere),
    Over(Result<(), ServerError>),
}

struct Socket {
    fd: OwnedFd,
    /// Whether a write was incomplete: wait until the socket is writable.
    full: bool,
    /// Whether the client sends no more, so that a short read does not mean an empty socket.
    half_closed: bool,
}

/// Whether the loop has time to write batches itself.
#[derive(Debug, Default)]
struct Load {
    worked: Duration,
    waited: Duration,
    /// Whether the loop has worked more than it has waited for events, in the last [`LOAD_TIME`].
    is_busy: bool,
}

impl Load {
    fn add(&mut self, worked: Duration, waited: Duration) {
        self.worked += worked;
        self.waited += waited;
        if self.worked + self.waited >= LOAD_TIME {
            self.is_busy = self.worked > self.waited;
            (self.worked, self.waited) = Default::default();
        }
    }
}

struct ServerClock {
    zero: Instant,
    /// Time by which a client has moved the clock.
    moved_ms: u64,
    boot_id: Option<[u8; 16]>,
}

impl ServerClock {
    fn start() -> Self {
        Self {
            zero: Instant::now(),
            moved_ms: 0,
            boot_id: boot_id(),
        }
    }

    fn now(&self) -> Now {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut now = Now {
            mono_ms: self.zero.elapsed().as_millis() as u64,
            wall_ms: wall.unwrap_or_default().as_millis() as u64,
            boot: self.boot_id.map(|id| Boot {
                id,
                ms: milliseconds_since_boot(),
            }),
        };
        now.move_on(self.moved_ms);
        now
    }

    fn at(&self, mono_ms: u64) -> Instant {
        self.zero + Duration::from_millis(mono_ms.saturating_sub(self.moved_ms))
    }
}

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

/// Returns the id of the machine's current boot.
#[cfg(target_os = "linux")]
fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits = text.trim().replace('-', "");
    let number = u128::from_str_radix(&digits, 16).ok()?;
    Some(number.to_be_bytes())
}

#[cfg(target_os = "linux")]
fn milliseconds_since_boot() -> u64 {
    let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    since.tv_sec as u64 * 1000 + since.tv_nsec as u64 / 1_000_000
}

/// Returns none: on other systems only the wall clock continues while no broker runs.
#[cfg(not(target_os = "linux"))]
fn boot_id() -> Option<[u8; 16]> {
    None
}

#[cfg(not(target_os = "linux"))]
fn milliseconds_since_boot() -> u64 {
    0
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

    /// Handles what has happened since the last pass; first waits until something does.
    pub(crate) fn pass(&mut self) -> Pass {
        match self.handle_next() {
            Ok(Some(task)) => Pass::Write(task),
            Ok(None) if self.engine.is_over() && self.closing.is_empty() => {
                Pass::Over(self.finish())
            }
            Ok(None) => Pass::Done,
            Err(error) => Pass::Over(Err(error)),
        }
    }

    /// Returns a batch that this thread is to write.
    fn handle_next(&mut self) -> Result<Option<TaskHere>, ServerError> {
        let poll_timeout = self.poll_timeout();
        let waits = Instant::now();
        match self.poll.poll(&mut self.events, poll_timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(None),
            outcome => outcome.map_err(ServerError::system("wait for events"))?,
        }
        let began = Instant::now();
        let mut stop = false;
        let events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        for event in &events {
            match event.token() {
                WAKER => {}
                SIGNALS => stop |= self.take_signals(),
                ONLY_CLIENT => stop = true,
                Token(token) if (token as u64) < FIRST_CONNECTION => {
                    self.accept_at = Some(Instant::now())
                }
                Token(token) => self.handle_event(ConnId(token as u64), event),
            }
        }
        self.events = events;
        if self.accept_at.is_some_and(|at| at <= Instant::now()) {
            self.accept_all();
        }
        self.read_ready();
        while let Ok(report) = self.writer.reports.try_recv() {
            self.handle_writer_report(report);
        }
        if let Some(memory) = self.memory.measure() {
            self.engine.memory_measured(self.clock.now(), memory);
        }
        self.memory
            .set_live_bytes(self.engine.broker().live_bytes());
        while let Ok(task) = self.reader.done.try_recv() {
            self.engine.reads_done(self.clock.now(), task);
        }
        // Reads everything that has arrived before it judges anybody's silence. But after enough passes every
        // connection has had its turn, however much others send.
        self.full_passes += 1;
        let has_read_all = self.events.iter().count() < EVENTS_AT_ONCE;
        if has_read_all || self.full_passes * EVENTS_AT_ONCE > self.sockets.len() {
            self.full_passes = 0;
            self.tick_when_due();
        }

        if !self.stopping && (stop || self.engine.stop_requested() || self.should_exit()) {
            self.stopping = true;
            self.engine.stop(self.clock.now());
        }
        let task = self.engine.take_batch(self.clock.now());
        let here = task.and_then(|task| {
            panics::panic_if_asked("loop");
            if task.is_awaited && !self.load.is_busy && self.writer.is_quick(&task) {
                return Some(self.writer.task_here(task));
            }
            self.writer.carry_out(task);
            None
        });
        if let Some(task) = self.engine.take_reads(self.clock.now()) {
            self.reader.carry_out(task);
        }
        self.flush();
        self.drop_expired();
        let worked = began.elapsed();
        self.engine.worked(worked.as_nanos() as u64);
        self.load.add(worked, began - waits);
        Ok(here)
    }

    /// Takes the report of the task that a pass has returned, and sends what it has made safe.
    pub(crate) fn written_here(&mut self, report: WriterReport) {
        let began = Instant::now();
        self.handle_writer_report(report);
        self.flush();
        let worked = began.elapsed();
        self.engine.worked(worked.as_nanos() as u64);
        self.load.add(worked, Duration::ZERO);
    }

    /// Leaves the task that a pass has returned to the writer's thread.
    pub(crate) fn write_in_thread(&self, task: TaskHere) {
        self.writer.carry_out(task.task);
    }

    fn finish(&mut self) -> Result<(), ServerError> {
        // A process that recreated a local broker's directory may listen there by now.
        if self
            .local
            .as_ref()
            .is_none_or(|local| local.lock.directory_is_ours())
        {
            self.listeners.iter().for_each(Listener::remove_socket);
        }
        match self.failure.take() {
            Some(failure) => Err(failure.into()),
            None => {
                tracing::info!("stopped cleanly");
                Ok(())
            }
        }
    }

    /// Returns the time to wait for events.
    fn poll_timeout(&mut self) -> Option<Duration> {
        if self.engine.accepts_input() && !self.readable.is_empty() {
            return Some(Duration::ZERO);
        }
        let due = self.engine.next_deadline_ms();
        // A broker that is stopping needs no more reasons to exit.
        let may_leave = !self.stopping;
        let deadlines = [
            due.map(|due_ms| self.clock.at(due_ms)),
            self.closing.values().map(|(_, until)| *until).min(),
            self.accept_at,
            (may_leave && self.local.is_some()).then_some(self.recheck_at),
            self.lingers_until().filter(|_| may_leave),
            self.memory.deadline(),
        ];
        let next = deadlines.into_iter().flatten().min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    // Input.

    fn take_signals(&mut self) -> bool {
        let mut signals = [0; 16];
        matches!(self.signals.read(&mut signals), Ok(count) if count > 0)
    }

    fn handle_event(&mut self, conn: ConnId, event: &Event) {
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

    fn accept_all(&mut self) {
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
    fn add_client(&mut self, fd: OwnedFd, peer: Peer) -> io::Result<()> {
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
    fn read_ready(&mut self) {
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

    fn handle_writer_report(&mut self, report: WriterReport) {
        let now = self.clock.now();
        match report {
            WriterReport::Written(through) => self.engine.batch_written(now, through),
            WriterReport::Done { task, sync_us } => {
                self.writer.took(&task, sync_us);
                self.engine.batch_done(now, &task, sync_us);
            }
            WriterReport::NoRoom(task) => self.writer.carry_out(task),
            WriterReport::SpaceChanged => {
                self.engine.space_changed(now);
                // Connections that waited for space may be read again.
                let heard = self.unread.iter().copied();
                let heard: Vec<ConnId> = heard.filter(|conn| self.engine.may_read(*conn)).collect();
                for conn in heard {
                    self.unread.remove(&conn);
                    self.readable.insert(conn);
                }
            }
            WriterReport::Failed(error) => {
                self.stopping = true;
                self.failure = Some(error);
                self.engine.disk_failed(now);
            }
        }
    }

    fn tick_when_due(&mut self) {
        let now = self.clock.now();
        let due = self.engine.next_deadline_ms();
        if due.is_some_and(|due_ms| due_ms <= now.mono_ms) {
            self.engine.tick(now);
        }
    }

    // Output.

    fn flush(&mut self) {
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

    fn drop_expired(&mut self) {
        let now = Instant::now();
        self.closing.retain(|_, (_, until)| *until > now);
    }

    // When to exit.

    fn lingers_until(&self) -> Option<Instant> {
        let linger = match self.is_in_memory {
            true => Duration::ZERO,
            false => self.local.as_ref()?.linger,
        };
        Some(self.no_clients_since? + linger)
    }

    fn should_exit(&mut self) -> bool {
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
