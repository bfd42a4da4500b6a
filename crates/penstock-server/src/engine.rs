//! The server without its sockets: core, journal and protocol put together. Owns no socket, clock,
//! thread or random number, so the shell and the simulator drive the very same code.
//!
//! ```text
//!              received ──► Connection ──► Broker ──► Journal ──► take_batch ──► the writer
//!     sockets                                 │                                      │
//!              poll_transmit ◄── Connection ◄─┴───── batch_written, batch_synced ◄───┘
//! ```
//!
//! Each call takes the time as it is now; times must not run backwards. Tell it all that has happened,
//! then ask, in this order: `take_batch` (there may be something to write), `poll_transmit` and
//! `poll_close` (to send, to close), `next_deadline_ms` (when `tick` is due). The more it is told
//! before it is asked, the larger the batches.
//!
//! Whatever a client can see rests on records that are as durable as was asked: the core holds the
//! rest back until [`Engine::batch_written`] and [`Engine::batch_synced`] say so.

use std::collections::VecDeque;

use penstock_broker::{
    Answer, Broker, BrokerOptions, CloseReason, ConnId, Input, Notice, Now, Output, Position,
    Query, Recovery,
};
use penstock_journal::{
    Batch, Journal, JournalOptions, OpenError, Opened, RecoveryReport, Storage, WriteError, Writer,
};
use penstock_message::{Delivery, Durability, Key, KeyState, Lease, ProcessStatus};
use penstock_wire::proto::{self, ToBroker, ToClient, close::Why};
use penstock_wire::{MAX_FRAME_BYTES, PROTOCOL_VERSION, WireError, convert};
use rustc_hash::FxHashMap;
use subtle::ConstantTimeEq;

use crate::connection::{AcceptedHello, Connection, Due, Stage};
use crate::histogram::Histogram;

pub use crate::connection::Peer;

/// Records that nobody waits for (grants of leases, mostly) are written this much later at most.
const LAZY_MS: u64 = 20;
/// ... or once so many bytes of them have gathered.
const LAZY_BYTES: usize = 1 << 20;
/// After so long without a record the journal gets a watermark that covers the last one.
const IDLE_MS: u64 = 100;
/// While more than this waits for the disk, no more is read from clients.
const UNWRITTEN_HIGH_BYTES: usize = 64 << 20;
/// How much at least is carried forward out of the oldest segment at a time.
const RECLAIM_STEP_BYTES: usize = 256 << 10;
/// Items of one list go into one frame up to this; more follow in another.
const FRAME_TARGET_BYTES: usize = 1 << 20;
/// A heartbeat shorter than this would be lost to scheduling; a longer one hides the dead for hours.
const HEARTBEAT_RANGE_MS: std::ops::RangeInclusive<u64> = 100..=3_600_000;
/// A tick this much later than asked for means that this process did not run meanwhile.
const STALL_MS: u64 = 250;
/// How long an orderly end may take before what is left is cut.
const ENDING_MS: u64 = 5_000;

#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub broker: BrokerOptions,
    pub journal: JournalOptions,
    /// What a client must show that is not trusted for where it comes from.
    pub token: Option<Vec<u8>>,
    /// Whether a client may end this broker: so for local ones.
    pub stop_on_request: bool,
    /// Of the process, for `status`.
    pub pid: u64,
}

pub struct Engine {
    options: EngineOptions,
    broker: Broker,
    journal: Journal,
    connections: FxHashMap<ConnId, Connection>,
    now: Now,

    /// Connections with something to send, each once.
    to_transmit: VecDeque<ConnId>,
    /// Connections that have ended on our side, for the shell to close.
    to_close: VecDeque<ConnId>,
    /// The earliest deadline of any connection; may be too early, never too late.
    connections_due_ms: u64,
    /// What `next_deadline_ms` said last; a tick much after it betrays a stall.
    promised_ms: Option<u64>,

    disk: DiskState,
    reclaiming: bool,
    syncs: Histogram,
    stop_requested: bool,
    end: End,
}

/// What is appended, written and synced, by position.
#[derive(Debug, Default)]
struct DiskState {
    /// The last record that somebody waits to see written, and the last to see synced.
    wanted_written: u64,
    wanted_synced: u64,
    appended: u64,
    taken: u64,
    written: u64,
    synced: u64,
    /// A watermark covers all that was appended.
    proven: bool,
    in_flight: bool,
    /// When records that nobody waits for are written all the same.
    lazy_due_ms: Option<u64>,
    /// When all is quiet enough for a watermark.
    idle_due_ms: Option<u64>,
}

impl DiskState {
    /// Somebody waits for a record that the writer was not given yet.
    fn is_awaited(&self) -> bool {
        self.wanted_synced.max(self.wanted_written) > self.taken
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
enum End {
    #[default]
    NotYet,
    /// What was heard is still answered, then everybody is told.
    Stopping { until_ms: u64, told: bool },
    /// The disk failed: nothing can be promised any more.
    Failed { until_ms: u64 },
}

/// What the writer does in one go, on its own thread.
#[derive(Debug)]
pub struct WriterTask {
    /// To be written with one call.
    pub batch: Option<Batch>,
    /// Whether to sync then.
    pub sync: bool,
    /// Whether somebody waits to hear that it is written, and not for the sync.
    pub tell_written: bool,
    /// For `batch_written` and `batch_synced`.
    pub through: u64,
}

impl WriterTask {
    /// Writes and syncs. `written` is called in between, if somebody waits for just that.
    pub fn carry_out<S: Storage>(
        &self,
        writer: &mut Writer<S>,
        written: impl FnOnce(u64),
    ) -> Result<(), WriteError> {
        if let Some(batch) = &self.batch {
            writer.write(batch)?;
        }
        if self.tell_written {
            written(self.through);
        }
        if self.sync {
            writer.sync()?;
        }
        Ok(())
    }
}

impl Engine {
    /// Recovers what the journal in this storage holds, or begins a new one. The time is asked for once
    /// the journal is read, which may take a while: only then do the sessions in it begin to wait for
    /// their clients.
    pub fn open<S: Storage>(
        storage: S,
        options: EngineOptions,
        now: impl FnOnce() -> Now,
    ) -> Result<(Self, Writer<S>, RecoveryReport), OpenError> {
        let mut recovery = Recovery::new(options.broker.clone());
        let Opened {
            journal,
            writer,
            report,
            epoch,
            next_position,
        } = Journal::open(storage, options.journal.clone(), &mut |position, record| {
            recovery
                .replay(Position(position), record)
                .map_err(|error| error.to_string())
        })?;
        let recovered_through = next_position - 1;
        let now = now();
        let mut engine = Self {
            broker: recovery.finish(now, epoch),
            journal,
            connections: FxHashMap::default(),
            now,
            to_transmit: VecDeque::new(),
            to_close: VecDeque::new(),
            connections_due_ms: u64::MAX,
            promised_ms: None,
            disk: DiskState {
                appended: recovered_through,
                taken: recovered_through,
                written: recovered_through,
                synced: recovered_through,
                ..DiskState::default()
            },
            reclaiming: false,
            syncs: Histogram::default(),
            stop_requested: false,
            end: End::NotYet,
            options,
        };
        engine.pump();
        Ok((engine, writer, report))
    }

    // What has happened.

    /// A client has connected. The shell numbers connections and uses no number twice.
    pub fn opened(&mut self, now: Now, conn: ConnId, peer: Peer) {
        self.now = now;
        let connection = Connection::new(now.mono_ms, peer);
        self.connections_due_ms = self.connections_due_ms.min(connection.next_deadline_ms());
        self.connections.insert(conn, connection);
        if self.end != End::NotYet {
            let (why, text) = self.end_reason();
            self.close(conn, why, text);
        }
    }

    /// Bytes have arrived, in any portions.
    pub fn received(&mut self, now: Now, conn: ConnId, bytes: &[u8]) {
        self.now = now;
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        connection.hear(now.mono_ms, bytes);
        // A frame may end the connection, which then hears no more.
        while let Some(connection) = self.connections.get_mut(&conn) {
            let handled = match connection.next_frame() {
                Ok(None) => break,
                Ok(Some(frame)) => self.handle_frame(conn, frame),
                Err(error) => Err(error.into()),
            };
            if let Err(Refused { why, text }) = handled {
                self.close(conn, why, text);
            }
        }
    }

    /// The other side has closed the connection, or it broke. To be called for each connection but
    /// those that `poll_close` gave.
    pub fn closed(&mut self, now: Now, conn: ConnId) {
        self.now = now;
        if let Some(connection) = self.connections.remove(&conn)
            && connection.is_open()
        {
            self.broker
                .handle(now, Input::Disconnected { conn, clean: false });
        }
    }

    /// To be called when `next_deadline_ms` has come, after everything that has arrived was
    /// `received`: after a stall, a heartbeat that waits in a socket must be heard before its
    /// absence is judged.
    pub fn tick(&mut self, now: Now) {
        self.now = now;
        self.forgive_our_silence();
        if self.connections_due_ms <= now.mono_ms {
            self.judge_connections();
        }
        self.broker.handle_deadline(now);
        self.reclaim();
    }

    /// The batch is written: it survives the death of this process.
    pub fn batch_written(&mut self, now: Now, through: u64) {
        self.now = now;
        self.disk.written = self.disk.written.max(through);
        self.broker.handle_written(Position(through));
    }

    /// The writer has carried out its task. `sync_us`: how long the sync took, if there was one.
    pub fn batch_done(&mut self, now: Now, task: &WriterTask, sync_us: u64) {
        self.now = now;
        let through = task.through;
        self.disk.in_flight = false;
        self.disk.written = self.disk.written.max(through);
        if task.sync {
            self.disk.synced = self.disk.synced.max(through);
            self.journal.batch_synced(through);
            self.syncs.add(sync_us);
            self.broker.handle_durable(Position(through));
        } else {
            self.broker.handle_written(Position(through));
        }
        self.disk.idle_due_ms = Some(now.mono_ms + IDLE_MS);
        self.reclaim();
    }

    /// A write or a sync has failed, which is final: nothing more is confirmed, everybody is told.
    pub fn disk_failed(&mut self, now: Now) {
        self.now = now;
        self.end = End::Failed {
            until_ms: now.mono_ms + ENDING_MS,
        };
        self.tell_all();
    }

    /// Ends in order: what was heard is still answered and gets on disk, then everybody is told.
    pub fn stop(&mut self, now: Now) {
        self.now = now;
        if self.end == End::NotYet {
            self.end = End::Stopping {
                until_ms: now.mono_ms + ENDING_MS,
                told: false,
            };
        }
    }

    // What is to be done.

    /// What the writer shall do now; `None` while it has something to do, or there is nothing.
    /// Calls for [`Engine::batch_done`], or [`Engine::disk_failed`].
    pub fn take_batch(&mut self, now: Now) -> Option<WriterTask> {
        self.now = now;
        self.pump();
        if self.disk.in_flight || matches!(self.end, End::Failed { .. }) {
            return None;
        }
        let batch = if self.is_batch_due() {
            self.journal.take_batch()
        } else {
            None
        };
        let task = match batch {
            Some(batch) => {
                let through = batch.through;
                self.disk.taken = through;
                let more = self.disk.appended > through;
                self.disk.lazy_due_ms = more.then_some(now.mono_ms + LAZY_MS);
                WriterTask {
                    batch: Some(batch),
                    sync: self.disk.wanted_synced > self.disk.synced || self.reclaiming,
                    tell_written: self.disk.wanted_written > self.disk.written,
                    through,
                }
            }
            None => self.idle_task()?,
        };
        self.disk.in_flight = true;
        self.disk.idle_due_ms = None;
        Some(task)
    }

    /// A connection that has something to send, with one call for all of it: take it from
    /// [`Engine::outgoing`] and say with [`Engine::transmitted`] how much went. One that could not
    /// send all is not given again before it has been asked for more with `transmitted`.
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

    /// What waits to be sent to a connection.
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
        connection.sent(bytes);
        if connection.is_closing() && connection.outgoing().is_empty() {
            self.connections.remove(&conn);
            self.to_close.push_back(conn);
        } else if connection.has_room_again() {
            connection.full = false;
            let writable = true;
            self.broker.handle(now, Input::Writable { conn, writable });
        }
    }

    /// A connection to close: the engine knows it no more. All was sent that could be; let the other
    /// side read it before the socket goes.
    pub fn poll_close(&mut self) -> Option<ConnId> {
        self.to_close.pop_front()
    }

    /// When [`Engine::tick`] and [`Engine::take_batch`] are due next, on the monotonic clock.
    pub fn next_deadline_ms(&mut self) -> Option<u64> {
        let ending = match self.end {
            End::NotYet => None,
            End::Stopping { until_ms, .. } | End::Failed { until_ms } => Some(until_ms),
        };
        let connections = (self.connections_due_ms != u64::MAX).then_some(self.connections_due_ms);
        // A watermark comes after what still waits to be written.
        let idle_due_ms = self
            .disk
            .idle_due_ms
            .filter(|_| self.disk.appended == self.disk.taken);
        let disk = [self.disk.lazy_due_ms, idle_due_ms];
        let disk = disk.into_iter().flatten().filter(|_| !self.disk.in_flight);
        let reclaim = (self.reclaiming && !self.disk.in_flight).then_some(self.now.mono_ms);
        let awaited = (self.disk.is_awaited() && !self.disk.in_flight).then_some(self.now.mono_ms);
        self.promised_ms = [
            self.broker.next_deadline(),
            connections,
            ending,
            reclaim,
            awaited,
        ]
        .into_iter()
        .flatten()
        .chain(disk)
        .min();
        self.promised_ms
    }

    /// Whether clients may be read from: so much may wait for the disk that they must wait too.
    pub fn takes_input(&self) -> bool {
        self.end == End::NotYet && self.journal.waiting_bytes() < UNWRITTEN_HIGH_BYTES
    }

    /// A client has asked for the end of this broker, and may have it.
    pub fn stop_requested(&self) -> bool {
        self.stop_requested
    }

    /// After [`Engine::stop`] or [`Engine::disk_failed`]: nothing is left to be done.
    pub fn is_over(&self) -> bool {
        match self.end {
            End::NotYet => false,
            End::Stopping { until_ms, told } => {
                let done = told && self.connections.is_empty() && self.disk.proven;
                done || self.now.mono_ms >= until_ms
            }
            End::Failed { until_ms } => self.connections.is_empty() || self.now.mono_ms >= until_ms,
        }
    }

    /// Connections that have not ended.
    pub fn clients(&self) -> usize {
        self.connections.len()
    }

    /// The core, to look at.
    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    pub fn sync_times(&self) -> &Histogram {
        &self.syncs
    }

    // How it works: frames in.

    fn handle_frame(&mut self, conn: ConnId, mut frame: ToBroker) -> Result<(), Refused> {
        let stage = &self.connections[&conn].stage;
        match (frame.hello.take(), matches!(stage, Stage::Greeting { .. })) {
            (Some(hello), true) => self.greet(conn, hello)?,
            (None, true) => return Err(protocol("the first frame is not a hello")),
            (Some(_), false) => return Err(protocol("a second hello")),
            (None, false) => {}
        }
        if !self.connections[&conn].is_open() {
            return Ok(());
        }
        for commit in frame.commits {
            self.commit(conn, commit)?;
        }
        if let Some(consume) = frame.consume {
            self.input(match consume.stop {
                true => Input::StopConsuming { conn },
                false => Input::Consume {
                    conn,
                    queues: consume.queues,
                    add_credit: consume.add_credit,
                },
            });
        }
        if let Some(watch) = frame.watch {
            if !watch.keys.is_empty() {
                let keys = convert::all(watch.keys)?;
                self.input(Input::Watch { conn, keys });
            }
            if !watch.unwatch.is_empty() {
                let keys = convert::all(watch.unwatch)?;
                self.input(Input::Unwatch { conn, keys });
            }
        }
        for query in frame.queries {
            let (id, query) = query.try_into()?;
            self.query(conn, id, query);
        }
        if let Some(report) = frame.report {
            self.input(Input::Report {
                conn,
                slots: report.slots,
                busy: report.busy,
            });
        }
        if frame.ping {
            let pong = ToClient {
                pong: true,
                ..ToClient::default()
            };
            self.say(conn, &pong);
        }
        if frame.goodbye {
            self.leave(conn, true);
        }
        Ok(())
    }

    /// Judges a hello, or adds what continues one.
    fn greet(&mut self, conn: ConnId, mut hello: proto::Hello) -> Result<(), Refused> {
        let connection = self.connections.get_mut(&conn).expect("it was heard");
        let leases: Vec<Lease> = convert::all(std::mem::take(&mut hello.leases))?;
        let continued = hello.continued;
        let accepted = match connection.take_hello() {
            Some(mut begun) => {
                begun.leases.extend(leases);
                begun
            }
            None => {
                judge_hello(&hello, connection.peer, self.options.token.as_deref())?;
                connection.trust();
                Box::new(AcceptedHello { hello, leases })
            }
        };
        if continued {
            connection.keep_hello(accepted);
            return Ok(());
        }
        let AcceptedHello { hello, leases } = *accepted;
        let session = convert::session_id(&hello.session)?;
        let heartbeat_ms = match hello.heartbeat_ms {
            0 => self.options.broker.default_heartbeat_ms,
            asked => asked.clamp(*HEARTBEAT_RANGE_MS.start(), *HEARTBEAT_RANGE_MS.end()),
        };
        connection.stage = Stage::Open { heartbeat_ms };
        self.connections_due_ms = self.connections_due_ms.min(connection.next_deadline_ms());
        self.input(Input::Connected {
            conn,
            session,
            name: hello.name,
            heartbeat_ms,
            last_seq: hello.last_seq,
            leases,
        });
        Ok(())
    }

    fn commit(&mut self, conn: ConnId, commit: proto::Commit) -> Result<(), Refused> {
        let durability = convert::durability(commit.durability)?;
        let part = proto::Part::try_from(commit.part)
            .map_err(|_| protocol("an unknown part of a transaction"))?;
        if part == proto::Part::Whole {
            let txs = convert::all(commit.txs)?;
            self.input(Input::Commit {
                conn,
                first_seq: commit.first_seq,
                durability,
                txs,
            });
            return Ok(());
        }
        let [tx] = <[proto::Tx; 1]>::try_from(commit.txs)
            .map_err(|_| protocol("a part of a transaction that is not exactly one"))?;
        self.input(Input::CommitPart {
            conn,
            seq: commit.first_seq,
            durability,
            tx: tx.try_into()?,
            last: part == proto::Part::Last,
        });
        Ok(())
    }

    fn query(&mut self, conn: ConnId, id: u64, query: Query) {
        let answer = match query {
            Query::Stop if self.options.stop_on_request => {
                self.stop_requested = true;
                Answer::Stopping
            }
            Query::Stop => Answer::Refused(
                "only a local broker can be stopped by a client; send its process SIGTERM"
                    .to_owned(),
            ),
            query => return self.input(Input::Query { conn, id, query }),
        };
        self.answer(conn, id, answer);
    }

    fn input(&mut self, input: Input) {
        self.broker.handle(self.now, input);
    }

    // How it works: records and outputs out.

    /// Moves on what the core has decided: records to the journal, outputs to their connections.
    fn pump(&mut self) {
        if matches!(self.end, End::Failed { .. }) {
            return;
        }
        self.append_records();
        while let Some(output) = self.broker.poll_output() {
            self.carry_out(output);
        }
        // A connection that became full, or was closed, may have freed work for others.
        self.append_records();
        self.advance_stopping();
    }

    fn append_records(&mut self) {
        while let Some(record) = self.broker.poll_record() {
            let position = record.position.0;
            self.journal.append(position, record.as_bytes());
            self.disk.appended = position;
            self.disk.proven = false;
            match record.durability {
                Durability::Disk => self.disk.wanted_synced = position,
                Durability::Os => self.disk.wanted_written = position,
                Durability::None => {
                    let due_ms = self.now.mono_ms + LAZY_MS;
                    self.disk.lazy_due_ms.get_or_insert(due_ms);
                }
            }
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Welcome {
                conn,
                applied_through,
                forgotten,
                leases,
            } => {
                let Some(connection) = self.connections.get(&conn) else {
                    return;
                };
                let Stage::Open { heartbeat_ms } = connection.stage else {
                    return;
                };
                let welcome = proto::Welcome {
                    protocol_version: PROTOCOL_VERSION,
                    broker_version: env!("CARGO_PKG_VERSION").to_owned(),
                    heartbeat_ms,
                    max_frame_bytes: MAX_FRAME_BYTES as u64,
                    max_body_bytes: self.options.broker.max_body_bytes as u64,
                    applied_through,
                    forgotten,
                    leases: leases.into_iter().map(Into::into).collect(),
                };
                let frame = ToClient {
                    welcome: Some(welcome),
                    ..ToClient::default()
                };
                self.say(conn, &frame);
            }
            Output::Confirm {
                conn,
                through,
                receipts,
                early,
            } => {
                let confirm = proto::Confirm {
                    through,
                    receipts: receipts.into_iter().map(Into::into).collect(),
                    early,
                };
                let frame = ToClient {
                    confirm: Some(confirm),
                    ..ToClient::default()
                };
                self.say(conn, &frame);
            }
            Output::Deliver { conn, deliveries } => {
                for portion in portions(deliveries, delivery_bytes) {
                    let frame = ToClient {
                        deliveries: portion.into_iter().map(Into::into).collect(),
                        ..ToClient::default()
                    };
                    self.say(conn, &frame);
                }
            }
            Output::Values { conn, values } => {
                for portion in portions(values, value_bytes) {
                    let frame = ToClient {
                        values: portion.into_iter().map(Into::into).collect(),
                        ..ToClient::default()
                    };
                    self.say(conn, &frame);
                }
            }
            Output::Answer { conn, id, answer } => self.answer(conn, id, answer),
            Output::Notice(notice) => self.tell_notice(notice),
            Output::Close { conn, reason } => {
                let (why, text) = match reason {
                    CloseReason::Fenced => (
                        Why::Fenced,
                        "a newer connection of this session took over".to_owned(),
                    ),
                    CloseReason::Protocol(text) => (Why::Protocol, text),
                };
                self.close(conn, why, text);
            }
        }
    }

    fn answer(&mut self, conn: ConnId, id: u64, mut answer: Answer) {
        if let Answer::Status(status) = &mut answer {
            status.process = ProcessStatus {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: self.options.pid,
                uptime_ms: self.now.mono_ms,
                sync_p50_us: self.syncs.quantile(0.5),
                sync_p99_us: self.syncs.quantile(0.99),
                journal_bytes: self.journal.total_bytes(),
            };
        }
        let frame = ToClient {
            answers: vec![(id, answer).into()],
            ..ToClient::default()
        };
        self.say(conn, &frame);
    }

    fn tell_notice(&mut self, notice: Notice) {
        tracing::warn!("{notice}");
        let frame = ToClient {
            notices: vec![notice.into()],
            ..ToClient::default()
        };
        let open: Vec<ConnId> = self.connections_where(Connection::is_open);
        for conn in open {
            self.say(conn, &frame);
        }
    }

    fn say(&mut self, conn: ConnId, frame: &ToClient) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if connection.is_closing() {
            return;
        }
        connection.say(self.now.mono_ms, frame);
        if !connection.listed {
            connection.listed = true;
            self.to_transmit.push_back(conn);
        }
        if connection.is_open() && connection.has_become_full() {
            connection.full = true;
            let writable = false;
            self.input(Input::Writable { conn, writable });
        }
    }

    // How it works: ends of connections.

    /// Tells a client why, and hears it no more.
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
        self.say(conn, &frame);
        self.leave(conn, false);
    }

    /// Ends a connection on our side, once what waits is sent.
    fn leave(&mut self, conn: ConnId, clean: bool) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if connection.is_closing() {
            return;
        }
        let was_open = connection.is_open();
        connection.begin_closing(self.now.mono_ms);
        self.connections_due_ms = self.connections_due_ms.min(connection.next_deadline_ms());
        if connection.outgoing().is_empty() {
            self.drop_connection(conn);
        }
        if was_open && !matches!(self.end, End::Failed { .. }) {
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
        // A hash map's order is no order: the same inputs shall give the same outputs.
        found.sort_unstable();
        found
    }

    // How it works: time.

    /// A process that was stopped, or starved of CPU, has not heard what was said meanwhile; nor has
    /// one that reads nothing because its disk is slow.
    fn forgive_our_silence(&mut self) {
        let now_ms = self.now.mono_ms;
        let promised_ms = self.promised_ms.take().unwrap_or(now_ms);
        let deaf_ms = match self.takes_input() {
            true => now_ms.saturating_sub(promised_ms),
            false => u64::MAX,
        };
        if deaf_ms > STALL_MS {
            for connection in self.connections.values_mut() {
                connection.forgive(now_ms, deaf_ms);
            }
        }
    }

    fn judge_connections(&mut self) {
        let now_ms = self.now.mono_ms;
        for conn in self.connections_where(|connection| connection.due(now_ms) != Due::Nothing) {
            match self.connections[&conn].due(now_ms) {
                Due::Nothing => {}
                Due::SaySomething => {
                    let pong = ToClient {
                        pong: true,
                        ..ToClient::default()
                    };
                    self.say(conn, &pong);
                }
                Due::NoHello => {
                    self.close(conn, Why::Protocol, "no hello came in time".to_owned());
                }
                Due::Silent { heartbeat_ms } => {
                    let text = format!("nothing was heard of this client for {heartbeat_ms} ms");
                    self.close(conn, Why::Protocol, text);
                }
                Due::GiveUp => self.drop_connection(conn),
            }
        }
        self.connections_due_ms = self
            .connections
            .values()
            .map(Connection::next_deadline_ms)
            .min()
            .unwrap_or(u64::MAX);
    }

    // How it works: the disk.

    fn is_batch_due(&self) -> bool {
        let disk = &self.disk;
        let lazy = disk
            .lazy_due_ms
            .is_some_and(|due_ms| due_ms <= self.now.mono_ms);
        disk.is_awaited()
            || lazy
            || self.reclaiming
            || self.end != End::NotYet
            || self.journal.waiting_bytes() >= LAZY_BYTES
    }

    /// When nothing has happened for a while, or never will again: syncs what was only written, then
    /// proves it with a watermark.
    fn idle_task(&mut self) -> Option<WriterTask> {
        let stopping = self.end != End::NotYet;
        let quiet = self
            .disk
            .idle_due_ms
            .is_some_and(|due_ms| due_ms <= self.now.mono_ms);
        if !(stopping || quiet) || self.disk.appended > self.disk.taken {
            return None;
        }
        self.disk.idle_due_ms = None;
        let mut batch = None;
        if self.disk.synced == self.disk.taken {
            batch = self.journal.watermark_batch();
            self.disk.proven = batch.is_none();
            if self.disk.proven {
                return None;
            }
        }
        Some(WriterTask {
            batch,
            sync: true,
            tell_written: false,
            through: self.disk.taken,
        })
    }

    /// Empties the oldest segment step by step while too little of the journal is live.
    fn reclaim(&mut self) {
        if self.end != End::NotYet || self.disk.in_flight {
            return;
        }
        self.reclaiming = self.journal.reclaim_due(self.broker.live_bytes());
        if !self.reclaiming {
            return;
        }
        let Some((segment, before)) = self.journal.oldest_segment() else {
            self.reclaiming = false;
            return;
        };
        // At least as fast as new records come in, so that the journal's size stays bounded.
        let step = RECLAIM_STEP_BYTES.max(self.journal.waiting_bytes());
        let more = self.broker.carry_forward(Position(before), step);
        self.append_records();
        if !more {
            tracing::debug!(segment, "the oldest segment holds nothing live any more");
            self.journal.drop_oldest();
        }
    }

    // How it works: the end.

    fn end_reason(&self) -> (Why, String) {
        match self.end {
            End::Failed { .. } => (
                Why::Failed,
                "the broker's disk failed: what was not confirmed may be lost".to_owned(),
            ),
            _ => (Why::Stopping, "the broker ends".to_owned()),
        }
    }

    fn tell_all(&mut self) {
        let (why, text) = self.end_reason();
        for conn in self.connections_where(|connection| !connection.is_closing()) {
            self.close(conn, why, text.clone());
        }
    }

    /// Everybody is told once all that they were promised is on disk and on its way to them.
    fn advance_stopping(&mut self) {
        let End::Stopping {
            until_ms,
            told: false,
        } = self.end
        else {
            return;
        };
        let settled = self.disk.synced == self.disk.appended && !self.disk.in_flight;
        if settled {
            self.end = End::Stopping {
                until_ms,
                told: true,
            };
            self.tell_all();
        }
    }
}

/// Cuts a list so that each part fits a frame: it has at most [`FRAME_TARGET_BYTES`], or one item.
fn portions<T>(mut items: Vec<T>, bytes_of: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut cuts = Vec::new();
    let mut bytes = 0;
    for (index, item) in items.iter().enumerate() {
        bytes += bytes_of(item);
        if bytes > FRAME_TARGET_BYTES && index > 0 {
            bytes = bytes_of(item);
            cuts.push(index);
        }
    }
    let mut cut_off: Vec<Vec<T>> = cuts
        .into_iter()
        .rev()
        .map(|cut| items.split_off(cut))
        .collect();
    cut_off.push(items);
    cut_off.reverse();
    cut_off
}

/// What a delivery takes in a frame, or somewhat more.
fn delivery_bytes(delivery: &Delivery) -> usize {
    let message = &delivery.message;
    let notes: usize = message.notes.iter().map(|note| note.len() + 8).sum();
    128 + delivery.queue.len() + message.task.len() + message.body.len() + notes
}

/// What a key and its state take in a frame, or somewhat more.
fn value_bytes((key, state): &(Key, KeyState)) -> usize {
    let key = match key {
        Key::Result(_) => 16,
        Key::Named(name) => name.len(),
    };
    let body = match state {
        KeyState::Present(value) => value.body.len(),
        KeyState::Pending | KeyState::Gone => 0,
    };
    48 + key + body
}

/// Why a connection must be closed.
struct Refused {
    why: Why,
    text: String,
}

/// Whether a first hello may go on.
fn judge_hello(hello: &proto::Hello, peer: Peer, token: Option<&[u8]>) -> Result<(), Refused> {
    let token = token.unwrap_or_default();
    // In constant time: how long a refusal takes must not tell how much of a guess was right.
    if peer == Peer::MustShowToken && !bool::from(token.ct_eq(&hello.token)) {
        return Err(Refused {
            why: Why::Unauthorized,
            text: match hello.token.is_empty() {
                true => "this broker wants a token: set PENSTOCK_TOKEN".to_owned(),
                false => "this broker has another token than this PENSTOCK_TOKEN".to_owned(),
            },
        });
    }
    if hello.protocol_version == 0 {
        return Err(Refused {
            why: Why::Version,
            text: format!("no common protocol version: this broker speaks {PROTOCOL_VERSION}"),
        });
    }
    Ok(())
}

fn protocol(text: &str) -> Refused {
    Refused {
        why: Why::Protocol,
        text: text.to_owned(),
    }
}

impl From<WireError> for Refused {
    fn from(error: WireError) -> Self {
        protocol(&error.to_string())
    }
}
