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

mod clock;
mod local;
mod sockets;
mod start;

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token};
use penstock_broker::{BrokerOptions, ConnId};
use penstock_journal::{OpenError, WriteError};
use rustc_hash::{FxHashMap, FxHashSet};

use self::clock::ServerClock;
use self::sockets::Socket;
use crate::directory_lock::DirectoryLock;
use crate::engine::Engine;
use crate::listen::{ListenAddress, ListenError, Listener};
use crate::panics;
use crate::process_memory::Gauge;
use crate::reader::ReaderThread;
use crate::token::Token as Secret;
use crate::writer::{TaskHere, WriterReport, WriterThread};

const WAKER: Token = Token(0);
const SIGNALS: Token = Token(1);
const ONLY_CLIENT: Token = Token(2);
const FIRST_LISTENER: usize = 3;
/// Number of the first connection. Connections are numbered from here, so that a token identifies one.
const FIRST_CONNECTION: u64 = 1 << 16;

/// Sockets whose events are read in one pass; more follow in the next.
const EVENTS_AT_ONCE: usize = 1024;
/// Bytes read from one connection before the others get their turn.
const READ_BYTES: usize = 256 << 10;
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

impl Server {
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

    fn take_signals(&mut self) -> bool {
        let mut signals = [0; 16];
        matches!(self.signals.read(&mut signals), Ok(count) if count > 0)
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
}
