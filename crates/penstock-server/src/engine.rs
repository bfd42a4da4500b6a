//! The server without its sockets: joins core, journal and protocol. Owns no socket, clock, thread or random number, so
//! the shell and the simulator drive the very same code.
//!
//! ```text
//!              received ──► Connection ──► Broker ──► Journal ──► take_batch ──► the writer
//!     sockets                                 │                                      │
//!              poll_transmit ◄── Connection ◄─┴───── batch_written, batch_done ◄─────┘
//! ```
//!
//! Each call takes the current time; times must not run backwards. Report all events, then poll in this order:
//! `take_batch` (something to write), `take_reads` (something to read back), `poll_transmit` and `poll_close` (to send,
//! to close), `next_deadline_ms` (the time of the next `tick`). The more events are reported before the polls, the
//! larger the batches.
//!
//! Everything a client can see relies on records that are as durable as it asked for. The core holds outputs back until
//! [`Engine::batch_written`] and [`Engine::batch_done`] report that.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use penstock_broker::{
    Broker, BrokerOptions, ConnId, Input, Now, Position, RecordError, Recovery, ReplayError,
};
use penstock_journal::{
    Journal, JournalOptions, NotReplayed, OpenError, OpenedJournal, RecoveryReport, Storage, Writer,
};
use penstock_message::Space;
use penstock_wire::proto::{self, ToClient, close::Why};
use rustc_hash::FxHashMap;

use crate::connection::{Connection, DueAction};
use crate::histogram::Histogram;
use crate::token::Token;
use disk::DiskState;
use incoming::RefusedFrame;

mod disk;
mod incoming;
mod outgoing;
mod reads;

pub use crate::connection::Peer;
pub use disk::WriterTask;
pub use reads::ReadTask;

/// Bytes waiting for the disk above which clients are not read.
const UNWRITTEN_HIGH_BYTES: usize = 64 << 20;
/// Delay of a tick above which this process is assumed to have been stalled.
const STALL_MS: u64 = 250;
/// Time for an orderly stop, after which the remaining connections are cut.
const SHUTDOWN_MS: u64 = 5_000;

#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub broker: BrokerOptions,
    pub journal: JournalOptions,
    /// Token that a client must present unless its socket is trusted.
    pub token: Option<Token>,
    /// Maximum number of clients; further ones are refused.
    pub max_connections: usize,
    /// Whether a client may stop this broker, as it may a local one.
    pub stop_on_request: bool,
    /// Whether this is a double for tests: it keeps nothing, and its client may move its clock.
    pub is_double: bool,
    /// Process id, for `status`.
    pub pid: u64,
}

pub struct Engine {
    options: EngineOptions,
    broker: Broker,
    journal: Journal,
    journal_format: u32,
    connections: FxHashMap<ConnId, Connection>,
    now: Now,

    /// Connections with something to send, each once.
    to_transmit: VecDeque<ConnId>,
    /// Connections that this side has ended, for the shell to close.
    to_close: VecDeque<ConnId>,
    /// Connections that may not have said hello yet, oldest first.
    greeting: VecDeque<ConnId>,
    /// Times at which to check connections. Each connection has one entry for its `check_at_ms`, which may be too early
    /// but never too late; its other entries are stale.
    connections_due: BinaryHeap<Reverse<(u64, ConnId)>>,
    /// Last result of `next_deadline_ms`; a tick much later than that reveals a stall.
    promised_ms: Option<u64>,

    disk: DiskState,
    reclaiming: bool,
    /// Whether reclaiming waits until some bodies were read.
    reclaim_reads: bool,
    /// Whether the reader has a task.
    reading: bool,
    syncs: Histogram,
    batches: Batches,
    space: Space,
    /// Last value of [`Input::StepsFit`].
    steps_fit: bool,
    /// Settlements that wait for disk space, in order of arrival.
    blocked: VecDeque<(ConnId, Input)>,
    memory: MemoryUse,
    /// Time that the shell's loop has spent working.
    worked_ns: u64,
    stop_requested: bool,
    /// Time by which clients have moved the clock: since the shell last asked, and since the start.
    clock_move_ms: u64,
    clock_moved_ms: u64,
    lifecycle: Lifecycle,
}

/// Totals of the batches written.
#[derive(Debug, Default)]
struct Batches {
    count: u64,
    records: u64,
    bytes: u64,
}

/// Memory of the process, as the shell measures it; a limit of 0 means none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub bytes: u64,
    pub limit_bytes: u64,
    pub is_full: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Lifecycle {
    #[default]
    Running,
    /// Frames that were read are still answered, then every client is notified of the stop.
    Stopping { until_ms: u64, announced: bool },
    /// The disk failed: nothing can be promised any more.
    Failed { until_ms: u64 },
}

/// Distinguishes a record that this program does not know from a damaged one.
fn not_replayed(error: ReplayError) -> NotReplayed {
    let text = error.to_string();
    match error {
        ReplayError::Record {
            error:
                RecordError::UnknownVersion(_)
                | RecordError::UnknownEvent { .. }
                | RecordError::UnknownField { .. },
            ..
        } => NotReplayed::Newer(text),
        _ => NotReplayed::Wrong(text),
    }
}

impl Engine {
    /// Recovers the journal in this storage, or begins a new one. Asks for the time only once the journal is read,
    /// which may take a while: sessions start waiting for their clients then.
    pub fn open<S: Storage>(
        storage: S,
        options: EngineOptions,
        now: impl FnOnce() -> Now,
    ) -> Result<(Self, Writer<S>, RecoveryReport), OpenError> {
        let mut recovery = Recovery::new(options.broker.clone());
        let OpenedJournal {
            journal,
            writer,
            report,
            format,
            epoch,
            next_position,
        } = Journal::open(storage, options.journal.clone(), &mut |record| {
            let replayed = recovery.replay(Position(record.position), record.bytes);
            replayed.map_err(not_replayed)
        })?;
        let now = now();
        let mut engine = Self {
            broker: recovery.finish(now, epoch),
            journal,
            journal_format: format,
            connections: FxHashMap::default(),
            now,
            to_transmit: VecDeque::new(),
            to_close: VecDeque::new(),
            greeting: VecDeque::new(),
            connections_due: BinaryHeap::new(),
            promised_ms: None,
            disk: DiskState::recovered(next_position - 1),
            reclaiming: false,
            reclaim_reads: false,
            reading: false,
            syncs: Histogram::default(),
            batches: Batches::default(),
            space: Space::Plenty,
            steps_fit: false,
            blocked: VecDeque::new(),
            memory: MemoryUse::default(),
            worked_ns: 0,
            stop_requested: false,
            clock_move_ms: 0,
            clock_moved_ms: 0,
            lifecycle: Lifecycle::Running,
            options,
        };
        engine.pump();
        Ok((engine, writer, report))
    }

    // Events.

    /// Adds a client that has connected. The shell numbers connections and uses no number twice.
    pub fn opened(&mut self, now: Now, conn: ConnId, peer: Peer) {
        self.now = now;
        let is_one_too_many = !self.make_room();
        let connection = Connection::new(now.mono_ms, peer);
        self.connections.insert(conn, connection);
        self.greeting.push_back(conn);
        self.schedule_check(conn);
        if self.lifecycle != Lifecycle::Running {
            let (why, text) = self.shutdown_reason();
            self.close(conn, why, text);
        } else if is_one_too_many {
            self.refuse_client(conn);
        }
    }

    /// Whether there is room for one more client. Connections without a hello give way to new ones, so silent strangers
    /// keep nobody out.
    fn make_room(&mut self) -> bool {
        let is_greeting = |connection: &Connection| connection.is_greeting();
        while let Some(oldest) = self.greeting.front().copied() {
            let greets = self.connections.get(&oldest).is_some_and(is_greeting);
            let is_full = self.connections.len() >= self.options.max_connections;
            if greets && !is_full {
                break;
            }
            self.greeting.pop_front();
            if greets {
                self.refuse_client(oldest);
                return true;
            }
        }
        self.connections.len() < self.options.max_connections
    }

    fn refuse_client(&mut self, conn: ConnId) {
        let limit = self.options.max_connections;
        let text = format!("this broker already has {limit} connections, which is its limit");
        self.close(conn, Why::TooManyClients, text);
    }

    /// Handles bytes that have arrived, in any portions.
    pub fn received(&mut self, now: Now, conn: ConnId, bytes: &[u8]) {
        self.now = now;
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        connection.receive(now.mono_ms, bytes);
        self.handle_frames(conn);
    }

    fn handle_frames(&mut self, conn: ConnId) {
        // A frame may end the connection, which then receives nothing more.
        while let Some(connection) = self.connections.get_mut(&conn) {
            let handled = match connection.next_frame() {
                Ok(None) => break,
                Ok(Some(frame)) => self.handle_frame(conn, frame),
                Err(error) => Err(error.into()),
            };
            if let Err(RefusedFrame { why, text }) = handled {
                self.close(conn, why, text);
            }
        }
    }

    /// Notes that the client has closed the connection, or that it broke. Call it for each connection except those that
    /// `poll_close` returned.
    pub fn closed(&mut self, now: Now, conn: ConnId) {
        self.now = now;
        self.forget_blocked(conn);
        if let Some(connection) = self.connections.remove(&conn)
            && connection.is_open()
        {
            self.broker
                .handle(now, Input::Disconnected { conn, clean: false });
        }
    }

    /// Handles deadlines. Call it when `next_deadline_ms` has come, after everything that has arrived was `received`:
    /// after a stall, a heartbeat waiting in a socket must be read before its absence is judged.
    pub fn tick(&mut self, now: Now) {
        self.now = now;
        self.excuse_silence_after_stall();
        self.check_connections();
        self.broker.handle_deadline(now);
        self.reclaim();
    }

    /// Sets the memory that the process uses. Above its limit no new work is accepted.
    pub fn memory_measured(&mut self, now: Now, memory: MemoryUse) {
        self.now = now;
        if self.memory.is_full != memory.is_full {
            self.input(Input::Memory {
                is_full: memory.is_full,
                limit_bytes: memory.limit_bytes,
            });
        }
        self.memory = memory;
    }

    /// Adds time that the shell's loop has spent working rather than waiting.
    pub fn worked(&mut self, ns: u64) {
        self.worked_ns += ns;
    }

    /// Fails for good after a write or a sync has failed: nothing more is confirmed, and every client is notified.
    pub fn disk_failed(&mut self, now: Now) {
        self.now = now;
        self.lifecycle = Lifecycle::Failed {
            until_ms: now.mono_ms + SHUTDOWN_MS,
        };
        self.close_all();
    }

    /// Stops in order: frames that were read are still answered and reach the disk, then every client is notified.
    pub fn stop(&mut self, now: Now) {
        self.now = now;
        if self.lifecycle == Lifecycle::Running {
            self.lifecycle = Lifecycle::Stopping {
                until_ms: now.mono_ms + SHUTDOWN_MS,
                announced: false,
            };
        }
    }

    // Actions. (For batches see engine/disk.rs.)

    /// Returns a connection that has bytes to send. Send [`Engine::outgoing`] with one call, and report the number of
    /// bytes sent with [`Engine::transmitted`]. A connection that could not send everything is not returned again
    /// before that report.
    #[must_use = "the connection is not returned again before it is asked for its bytes"]
    pub fn poll_transmit(&mut self) -> Option<ConnId> {
        self.pump();
        while let Some(conn) = self.to_transmit.pop_front() {
            if let Some(connection) = self.connections.get_mut(&conn) {
                connection.listed = false;
                if !connection.outgoing().is_empty() {
                    return Some(conn);
                }
            }
        }
        None
    }

    /// Returns the bytes that wait to be sent to a connection.
    pub fn outgoing(&self, conn: ConnId) -> &[u8] {
        self.connections
            .get(&conn)
            .map_or(&[], Connection::outgoing)
    }

    pub fn transmitted(&mut self, now: Now, conn: ConnId, bytes: usize) {
        self.now = now;
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        let was_backlogged = connection.is_backlogged();
        connection.sent(now.mono_ms, bytes);
        let may_read_again = was_backlogged && !connection.is_backlogged();
        if connection.is_closing() && connection.outgoing().is_empty() {
            self.connections.remove(&conn);
            self.to_close.push_back(conn);
        } else if connection.has_room_again() {
            connection.full = false;
            let writable = true;
            self.broker.handle(now, Input::Writable { conn, writable });
        }
        if may_read_again {
            self.handle_frames(conn);
        }
    }

    /// Whether this client may be read; a client that does not receive its waiting bytes must wait.
    pub fn may_read(&self, conn: ConnId) -> bool {
        self.connections
            .get(&conn)
            .is_none_or(|connection| !connection.is_backlogged() && !connection.is_blocked())
    }

    /// Returns a connection to close; the engine has dropped it. Everything that could be sent was sent: let the client
    /// read it before the socket is closed.
    #[must_use = "the engine has dropped the connection: close its socket"]
    pub fn poll_close(&mut self) -> Option<ConnId> {
        self.to_close.pop_front()
    }

    /// Returns the time of the next [`Engine::tick`] and [`Engine::take_batch`], on the monotonic clock.
    pub fn next_deadline_ms(&mut self) -> Option<u64> {
        let ending = match self.lifecycle {
            Lifecycle::Running => None,
            Lifecycle::Stopping { until_ms, .. } | Lifecycle::Failed { until_ms } => Some(until_ms),
        };
        let connections = self.connections_due.peek().map(|Reverse((at, _))| *at);
        self.promised_ms = [
            self.broker.next_deadline(),
            self.disk_due_ms(),
            connections,
            ending,
        ]
        .into_iter()
        .flatten()
        .min();
        self.promised_ms
    }

    /// Whether clients may be read; they must wait while too many bytes wait for the disk.
    pub fn accepts_input(&self) -> bool {
        self.lifecycle == Lifecycle::Running && self.journal.waiting_bytes() < UNWRITTEN_HIGH_BYTES
    }

    /// Whether a client has asked this broker to stop and is allowed to.
    pub fn stop_requested(&self) -> bool {
        self.stop_requested
    }

    /// Returns the time by which a client has moved the clock since the last call. The shell's times are later by this
    /// amount from now on. Call it after each `received`.
    #[must_use = "the shell must add the time, which is returned once"]
    pub fn take_clock_move(&mut self) -> u64 {
        std::mem::take(&mut self.clock_move_ms)
    }

    /// Whether nothing is left to do, after [`Engine::stop`] or [`Engine::disk_failed`].
    pub fn is_over(&self) -> bool {
        match self.lifecycle {
            Lifecycle::Running => false,
            Lifecycle::Stopping {
                until_ms,
                announced,
            } => {
                let done = announced && self.connections.is_empty() && self.disk.closed;
                done || self.now.mono_ms >= until_ms
            }
            Lifecycle::Failed { until_ms } => {
                self.connections.is_empty() || self.now.mono_ms >= until_ms
            }
        }
    }

    /// Returns the number of connections that have not ended.
    pub fn clients(&self) -> usize {
        self.connections.len()
    }

    /// Returns the core, for inspection.
    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    // Internals: records and outputs (engine/outgoing.rs).

    /// Passes on the core's decisions: records to the journal, outputs to their connections.
    fn pump(&mut self) {
        if matches!(self.lifecycle, Lifecycle::Failed { .. }) {
            return;
        }
        if self.space == Space::NoSettlements {
            self.update_space();
        }
        self.append_records();
        while let Some(output) = self.broker.poll_output() {
            self.carry_out(output);
        }
        // A connection that became full or was closed may have freed work for others.
        self.append_records();
        self.advance_stopping();
    }

    // Internals: ends of connections.

    /// Sends a client the reason and stops reading it.
    fn close(&mut self, conn: ConnId, why: Why, text: String) {
        tracing::debug!(
            conn = conn.0,
            why = why.as_str_name(),
            "closing a connection: {text}"
        );
        let frame = ToClient {
            close: Some(proto::Close {
                why: why.into(),
                text,
            }),
            ..ToClient::default()
        };
        self.send_frame(conn, &frame);
        self.end_connection(conn, false);
    }

    /// Ends a connection on this side, once its waiting bytes are sent.
    fn end_connection(&mut self, conn: ConnId, clean: bool) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if connection.is_closing() {
            return;
        }
        let was_open = connection.is_open();
        connection.begin_closing(self.now.mono_ms);
        self.forget_blocked(conn);
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if connection.outgoing().is_empty() {
            self.drop_connection(conn);
        } else {
            self.schedule_check(conn);
        }
        if was_open && !matches!(self.lifecycle, Lifecycle::Failed { .. }) {
            self.input(Input::Disconnected { conn, clean });
        }
    }

    fn drop_connection(&mut self, conn: ConnId) {
        if self.connections.remove(&conn).is_some() {
            self.to_close.push_back(conn);
        }
    }

    fn connections_where(&self, wanted: impl Fn(&Connection) -> bool) -> Vec<ConnId> {
        let mut found: Vec<ConnId> = self
            .connections
            .iter()
            .filter(|(_, connection)| wanted(connection))
            .map(|(conn, _)| *conn)
            .collect();
        // A hash map has no stable order, and the same inputs must give the same outputs.
        found.sort_unstable();
        found
    }

    // Internals: time.

    /// Excuses clients' silence after a stall: a stopped process, or one starved of CPU, has not read its sockets. Nor
    /// has one that stops reading because its disk is slow.
    fn excuse_silence_after_stall(&mut self) {
        let now_ms = self.now.mono_ms;
        let promised_ms = self.promised_ms.take().unwrap_or(now_ms);
        let unread_ms = match self.accepts_input() {
            true => now_ms.saturating_sub(promised_ms),
            false => u64::MAX,
        };
        if unread_ms > STALL_MS {
            for connection in self.connections.values_mut() {
                connection.excuse_silence(now_ms, unread_ms);
            }
        }
    }

    /// Schedules a check in time for this connection's deadline.
    fn schedule_check(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        let at_ms = connection.next_deadline_ms();
        if at_ms < connection.check_at_ms {
            connection.check_at_ms = at_ms;
            self.connections_due.push(Reverse((at_ms, conn)));
        }
    }

    fn check_connections(&mut self) {
        let now_ms = self.now.mono_ms;
        while let Some(Reverse((at_ms, conn))) = self.connections_due.peek().copied()
            && at_ms <= now_ms
        {
            self.connections_due.pop();
            let Some(connection) = self.connections.get_mut(&conn) else {
                continue;
            };
            if connection.check_at_ms != at_ms {
                continue;
            }
            connection.check_at_ms = u64::MAX;
            match connection.due(now_ms) {
                DueAction::Nothing => {}
                DueAction::SendPong => {
                    connection.shrink_buffers();
                    let pong = ToClient {
                        pong: true,
                        ..ToClient::default()
                    };
                    self.send_frame(conn, &pong);
                }
                DueAction::NoHello => {
                    self.close(conn, Why::Protocol, "no hello arrived in time".to_owned());
                }
                // The client is not silent: the broker does not read.
                DueAction::Silent { .. } if connection.is_blocked() => {
                    connection.excuse_silence(now_ms, u64::MAX);
                }
                DueAction::Silent { heartbeat_ms } => {
                    let text =
                        format!("nothing was received from this client for {heartbeat_ms} ms");
                    self.close(conn, Why::Protocol, text);
                }
                DueAction::GiveUp => self.drop_connection(conn),
            }
            self.schedule_check(conn);
        }
    }

    // Internals: shutdown.

    fn shutdown_reason(&self) -> (Why, String) {
        match self.lifecycle {
            Lifecycle::Failed { .. } => (
                Why::Failed,
                "the broker's disk failed: unconfirmed work may be lost".to_owned(),
            ),
            _ => (Why::Stopping, "the broker is stopping".to_owned()),
        }
    }

    fn close_all(&mut self) {
        let (why, text) = self.shutdown_reason();
        for conn in self.connections_where(|connection| !connection.is_closing()) {
            self.close(conn, why, text.clone());
        }
    }

    /// Notifies clients of the stop once all confirms are on disk and on their way.
    fn advance_stopping(&mut self) {
        let Lifecycle::Stopping {
            until_ms,
            announced: false,
        } = self.lifecycle
        else {
            return;
        };
        let settled = self.disk.synced == self.disk.appended && !self.disk.in_flight;
        if settled {
            self.lifecycle = Lifecycle::Stopping {
                until_ms,
                announced: true,
            };
            self.close_all();
        }
    }
}
