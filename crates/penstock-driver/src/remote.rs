//! Implements the driver for a broker in another process: the shell around [`DriverSession`].
//!
//! One thread, started by the first call, waits for the socket, resolves calls, reconnects and watches the
//! deadlines. Callers write to the socket themselves unless another thread is writing. A single call at a time
//! saves a wake-up this way. Under load, the writer also sends the bytes that other callers have queued.

mod io_loop;

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::{self, ThreadId};
use std::time::Instant;

use bytes::{Buf, Bytes, BytesMut};
use penstock_message::{
    Answer, Capabilities, Consume, Durability, Feature, Key, MessageId, Notice, Progress, Query,
    Receipt, SessionId, Tx, WorkerReport,
};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, Versions, proto};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::dial::{Dial, DialError};
use crate::encoded::Encoded;
use crate::remote::io_loop::{IoLoop, Sleep, timeout};
use crate::session::{DriverSession, LinkEnd, SessionConfig};
use crate::waker::Waker;
use crate::{
    DeliverySink, Done, Driver, DriverConfig, DriverError, LeadToken, ReadSide, ValueSink, WatchId,
};

const READ_BYTES: usize = 256 << 10;

pub(crate) struct Remote {
    upper_bound: &'static Capabilities,
    /// Never dropped in a forked child, where threads that no longer exist may hold its locks.
    shared: ManuallyDrop<Arc<DriverShared>>,
}

struct DriverShared {
    /// Process that made this driver. A fork copies this value, but not the thread.
    pid: u32,
    broker: String,
    dial: Box<dyn Dial>,
    waker: OnceLock<Waker>,
    /// Descriptor of the connection or -1, for a forked child, which can't take locks.
    socket: AtomicI32,
    state: Mutex<DriverState>,
    input: Mutex<ReceiveBuffer>,
    /// Held while events are carried out in two threads by turns, so that their order stays.
    order: Mutex<()>,
    thread: OnceLock<ThreadId>,
    ended: Condvar,
}

/// Received bytes that are not decoded yet. Locked by the reading thread, never while holding `state`.
struct ReceiveBuffer {
    /// Number of the connection that the bytes came from.
    connection: u64,
    decoder: Decoder<proto::ToClient>,
    buffer: Box<[u8]>,
}

/// Current reader of the socket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadBy {
    Thread,
    /// A caller that is waiting for its own answer.
    Caller(LeadToken),
    /// A thread that waits for more than this socket, until the connection is lost.
    Elsewhere,
    /// Nobody is waiting. Bytes that arrive anyway are read at the next wake-up.
    Nobody,
}

struct DriverState {
    session: DriverSession,
    thread: IoThread,
    phase: ConnectPhase,
    read_by: ReadBy,
    leads: u64,
    /// Incremented with each connection, so that a writer notices when its own is gone.
    connection: u64,
    /// Whether a thread is writing to the socket, without holding the lock.
    writing: bool,
    /// Remainder of the last write, which the socket did not accept.
    unwritten: BytesMut,
    /// Whether the socket is full. The driver's thread then waits until it is writable.
    blocked: bool,
    /// End of the connection, found by a caller that was reading.
    broken: Option<LinkEnd>,
    /// The thread's current wait, if it is waiting.
    asleep: Option<Sleep>,
    closing: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum IoThread {
    NotStarted,
    Running,
    Ended,
}

enum ConnectPhase {
    Down {
        retry_at: Instant,
    },
    Dialing,
    Dialed(Result<OwnedFd, DialError>),
    Connected {
        socket: Arc<OwnedFd>,
        since: Instant,
    },
}

impl Remote {
    pub(crate) fn new(
        config: DriverConfig,
        dial: Box<dyn Dial>,
        upper_bound: &'static Capabilities,
        takes_over: bool,
    ) -> Result<Self, DriverError> {
        let no_chance =
            |error| DriverError::invalid(format!("the system returned no random bytes: {error}"));
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(no_chance)?;
        let hash_seed = getrandom::u64().map_err(no_chance)?;
        let now = Instant::now();
        let session = SessionConfig {
            id: SessionId(id),
            token: Bytes::from(config.token.unwrap_or_default()),
            name: config.name,
            heartbeat: config.heartbeat,
            broker: config.url.clone(),
            hash_seed,
            versions: Versions::TODAY,
            takes_over,
        };
        let state = DriverState {
            session: DriverSession::new(session, now),
            thread: IoThread::NotStarted,
            phase: ConnectPhase::Down { retry_at: now },
            read_by: ReadBy::Thread,
            leads: 0,
            connection: 0,
            writing: false,
            unwritten: BytesMut::new(),
            blocked: false,
            broken: None,
            asleep: None,
            closing: None,
        };
        Ok(Self {
            upper_bound,
            shared: ManuallyDrop::new(Arc::new(DriverShared {
                pid: std::process::id(),
                broker: config.url,
                dial,
                waker: OnceLock::new(),
                socket: AtomicI32::new(-1),
                state: Mutex::new(state),
                input: Mutex::new(ReceiveBuffer {
                    connection: 0,
                    decoder: Decoder::new(MAX_FRAME_BYTES),
                    buffer: vec![0; READ_BYTES].into_boxed_slice(),
                }),
                order: Mutex::new(()),
                thread: OnceLock::new(),
                ended: Condvar::new(),
            })),
        })
    }

    /// Updates the session, writes the resulting bytes, and wakes the thread if needed.
    fn with_session<R>(
        &self,
        tell: impl FnOnce(&mut DriverSession) -> R,
    ) -> Result<R, DriverError> {
        let mut state = self.shared.lock_in_same_process()?;
        match state.thread {
            IoThread::Running if state.closing.is_none() => {}
            IoThread::NotStarted if state.closing.is_none() => {
                self.shared.start_thread().map_err(|error| {
                    DriverError::unavailable(format!("this process can't start a thread: {error}"))
                })?;
                state.thread = IoThread::Running;
            }
            _ => return Err(DriverError::closed()),
        }
        let told = tell(&mut state.session);
        if state.read_by == ReadBy::Nobody && !state.session.is_idle() {
            state.read_by = ReadBy::Thread;
        }
        let state = self.shared.flush(state);
        self.shared.wake_where_needed(state);
        Ok(told)
    }
}

impl Remote {
    /// Commits transactions. `durability: None` selects the one for settlements.
    fn begin_commit(
        &self,
        txs: Vec<Tx>,
        durability: Option<Durability>,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
    ) {
        self.begin_commit_with(txs, durability, deadline, done, |_| {});
    }

    /// Commits, and then tells the session something else that is sent along.
    fn begin_commit_with(
        &self,
        txs: Vec<Tx>,
        durability: Option<Durability>,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
        tell: impl FnOnce(&mut DriverSession),
    ) {
        let txs = txs.into_iter().map(Encoded::new).collect();
        let mut done = Some(done);
        let outcome = self.with_session(|session| {
            if let Some(done) = done.take() {
                session.commit(txs, durability, deadline, done);
            }
            tell(session);
        });
        if let (Err(error), Some(done)) = (outcome, done) {
            done(Err(error));
        }
    }

    fn begin_watch(
        &self,
        keys: Vec<Key>,
        peeks: bool,
        waiter: Option<MessageId>,
        deadline: Option<Instant>,
        sink: Arc<dyn ValueSink>,
    ) -> WatchId {
        let watching = Arc::clone(&sink);
        match self.with_session(|session| session.watch(keys, peeks, waiter, deadline, watching)) {
            Ok(id) => id,
            Err(error) => {
                sink.failed(error);
                WatchId(0)
            }
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let Ok(mut state) = self.shared.lock_in_same_process() else {
            return;
        };
        state.closing.get_or_insert_with(Instant::now);
        drop(state);
        self.shared.wake();
        // SAFETY: nothing uses it afterwards, and the thread holds its own reference.
        unsafe { ManuallyDrop::drop(&mut self.shared) };
    }
}

impl Driver for Remote {
    fn upper_bound(&self) -> &'static Capabilities {
        self.upper_bound
    }

    fn probe(&self, deadline: Instant, done: Done<Arc<Capabilities>>) {
        let mut done = Some(done);
        let outcome = self.with_session(|session| {
            if let Some(done) = done.take() {
                session.probe(deadline, done);
            }
        });
        if let (Err(error), Some(done)) = (outcome, done) {
            done(Err(error));
        }
    }

    fn commit(
        &self,
        txs: Vec<Tx>,
        durability: Durability,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
    ) {
        // Features that no broker of this kind has are refused without a connection. The session checks the
        // connected broker's.
        if !self.upper_bound.takes(durability) {
            let lacking = Feature::of_durability(durability);
            return done(Err(self.upper_bound.not_offered(lacking).into()));
        }
        self.begin_commit(txs, Some(durability), deadline, done);
    }

    fn settle(&self, txs: Vec<Tx>, deadline: Option<Instant>, done: Done<Vec<Receipt>>) {
        self.begin_commit(txs, None, deadline, done);
    }

    fn consume(&self, consume: Consume, sink: Arc<dyn DeliverySink>) {
        // A closed driver delivers nothing, so there is nothing to report.
        let _ = self.with_session(|session| session.consume(consume, sink));
    }

    fn settle_and_consume(
        &self,
        txs: Vec<Tx>,
        done: Done<Vec<Receipt>>,
        consumes: Vec<Consume>,
        sink: Arc<dyn DeliverySink>,
    ) {
        self.begin_commit_with(txs, None, None, done, |session| {
            for consume in consumes {
                session.consume(consume, Arc::clone(&sink));
            }
        });
    }

    fn stop_consuming(&self) {
        let _ = self.with_session(DriverSession::stop_consuming);
    }

    fn stop_consumer(&self, consumer: u32) {
        let _ = self.with_session(|session| session.stop_consumer(consumer));
    }

    fn watch(
        &self,
        keys: Vec<Key>,
        deadline: Option<Instant>,
        sink: Arc<dyn ValueSink>,
    ) -> WatchId {
        self.begin_watch(keys, false, None, deadline, sink)
    }

    fn wait_inside(
        &self,
        waiter: MessageId,
        keys: Vec<Key>,
        deadline: Option<Instant>,
        sink: Arc<dyn ValueSink>,
    ) -> WatchId {
        self.begin_watch(keys, false, Some(waiter), deadline, sink)
    }

    fn peek(&self, keys: Vec<Key>, deadline: Option<Instant>, sink: Arc<dyn ValueSink>) -> WatchId {
        self.begin_watch(keys, true, None, deadline, sink)
    }

    fn watch_ahead(&self, keys: Vec<Key>, sink: Arc<dyn ValueSink>) -> WatchId {
        let begun = self.with_session(|session| {
            let id = session.watch(keys, false, None, None, sink);
            session.set_ahead(id, true);
            id
        });
        begun.unwrap_or(WatchId(0))
    }

    fn await_ahead(&self, watch: WatchId, awaited: bool) {
        let _ = self.with_session(|session| session.set_ahead(watch, !awaited));
    }

    fn unwatch(&self, watch: WatchId) {
        let _ = self.with_session(|session| session.unwatch(watch));
    }

    fn query(&self, query: Query, deadline: Instant, done: Done<Answer>) {
        let mut done = Some(done);
        let outcome = self.with_session(|session| {
            if let Some(done) = done.take() {
                session.query(query, deadline, done);
            }
        });
        if let (Err(error), Some(done)) = (outcome, done) {
            done(Err(error));
        }
    }

    fn report(&self, report: WorkerReport) {
        let _ = self.with_session(|session| session.report(report));
    }

    fn progress(&self, progress: Progress) {
        let _ = self.with_session(|session| session.progress(progress));
    }

    fn reply(&self, ask: u64, reply: Bytes) {
        let _ = self.with_session(|session| session.reply(ask, reply));
    }

    fn take_notices(&self) -> Vec<Notice> {
        match self.shared.lock_in_same_process() {
            Ok(mut state) => state.session.take_notices(),
            Err(_) => Vec::new(),
        }
    }

    fn take_lead(&self) -> Option<LeadToken> {
        let mut state = self.shared.lock_in_same_process().ok()?;
        if state.read_by != ReadBy::Nobody {
            return None;
        }
        state.leads += 1;
        let lead = LeadToken(state.leads);
        state.read_by = ReadBy::Caller(lead);
        Some(lead)
    }

    fn lead(&self, lead: LeadToken, until: Instant, over: &dyn Fn() -> bool) {
        while !over() {
            let state = self.shared.lock();
            let ConnectPhase::Connected { socket, .. } = &state.phase else {
                return;
            };
            if state.read_by != ReadBy::Caller(lead) {
                return;
            }
            let (socket, connection) = (Arc::clone(socket), state.connection);
            let next = state.session.next_deadline();
            drop(state);
            let wake_at = next.map_or(until, |next| next.min(until));
            let left = wake_at.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&*socket, PollFlags::IN)];
            let ready = poll(&mut fds, timeout(left).as_ref());
            let now = Instant::now();
            let outcome = match ready {
                Ok(1..) => self.shared.read(&socket, connection).map(drop),
                Ok(0) if now < until => self.shared.lock().session.tick(now),
                // The deadline passed, or a signal arrived that the caller may want to handle.
                Ok(0) | Err(_) => return,
            };
            let mut state = self.shared.lock();
            if let Err(end) = outcome
                && state.connection == connection
            {
                // Only the driver's thread reconnects.
                state.broken = Some(end);
                drop(state);
                self.shared.wake();
                return;
            }
            state = self.shared.flush(state);
            self.shared.carry_out_events(state);
            // Return on time, however much arrives for other callers.
            if now >= until {
                return;
            }
        }
    }

    fn leave_lead(&self, lead: LeadToken) {
        let mut state = self.shared.lock();
        if state.read_by != ReadBy::Caller(lead) {
            return;
        }
        state.read_by = match state.session.is_idle() {
            true => ReadBy::Nobody,
            false => ReadBy::Thread,
        };
        self.shared.wake_where_needed(state);
    }

    fn read_elsewhere(&self) -> Option<ReadSide> {
        let mut state = self.shared.lock_in_same_process().ok()?;
        let ConnectPhase::Connected { socket, .. } = &state.phase else {
            return None;
        };
        if !matches!(state.read_by, ReadBy::Thread | ReadBy::Nobody) {
            return None;
        }
        let side = ReadSide {
            socket: Arc::clone(socket),
            connection: state.connection,
        };
        state.read_by = ReadBy::Elsewhere;
        let wakes = state.asleep.take_if(|sleep| sleep.watches_read);
        drop(state);
        if wakes.is_some() {
            self.shared.wake();
        }
        Some(side)
    }

    fn read_arrived(&self, side: &ReadSide) -> bool {
        let connection = side.connection;
        let outcome = loop {
            match self.shared.read(&side.socket, connection) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(end) => break Err(end),
            }
        };
        let mut state = self.shared.lock();
        let is_current = state.connection == connection;
        if let Err(end) = outcome
            && is_current
        {
            // Only the driver's thread reconnects.
            state.broken = Some(end);
            drop(state);
            self.shared.wake();
            return false;
        }
        drop(self.shared.flush(state));
        self.shared.carry_out_in_order();
        is_current
    }

    fn leave_reading(&self, side: ReadSide) {
        let mut state = self.shared.lock();
        if state.connection == side.connection && state.read_by == ReadBy::Elsewhere {
            state.read_by = ReadBy::Thread;
            self.shared.wake_where_needed(state);
        }
    }

    fn trouble(&self) -> Option<String> {
        match self.shared.lock_in_same_process() {
            Ok(state) => state.session.trouble(),
            Err(error) => Some(error.to_string()),
        }
    }

    fn abandon(&self) {
        if std::process::id() == self.shared.pid {
            return;
        }
        // While this child holds a copy of the socket, the broker would not notice the parent's death.
        let socket = self.shared.socket.swap(-1, Ordering::Relaxed);
        if socket >= 0 {
            // SAFETY: the owner is a thread of the parent. In this process it neither runs nor is dropped.
            unsafe { rustix::io::close(socket) };
        }
    }

    fn close(&self, deadline: Instant) {
        let Ok(mut state) = self.shared.lock_in_same_process() else {
            return;
        };
        state.closing.get_or_insert(deadline);
        self.shared.wake();
        // When called from a callback, this thread itself has to exit, so it can't be joined.
        let by_itself = self.shared.thread.get() == Some(&thread::current().id());
        while state.thread == IoThread::Running && !by_itself {
            state = self.shared.ended.wait(state).unwrap();
        }
    }
}

impl DriverShared {
    fn lock_in_same_process(&self) -> Result<MutexGuard<'_, DriverState>, DriverError> {
        match std::process::id() == self.pid {
            true => Ok(self.lock()),
            false => Err(DriverError::invalid(
                "this client belongs to the parent process; create a new one after a fork",
            )),
        }
    }

    fn lock(&self) -> MutexGuard<'_, DriverState> {
        self.state.lock().unwrap()
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        if self.waker.get().is_none() {
            // Callers hold the lock, so no other thread sets it.
            let _ = self.waker.set(Waker::new()?);
        }
        let shared = Arc::clone(self);
        thread::Builder::new()
            .name("penstock-io".into())
            .spawn(move || IoLoop::new(shared).run())?;
        Ok(())
    }

    /// Reads arrived bytes; returns whether there may be more. The caller must carry out the resulting events.
    fn read(&self, socket: &OwnedFd, connection: u64) -> Result<bool, LinkEnd> {
        let mut input = self.input.lock().unwrap();
        let ReceiveBuffer {
            connection: of,
            decoder,
            buffer,
        } = &mut *input;
        if *of != connection {
            *of = connection;
            *decoder = Decoder::new(MAX_FRAME_BYTES);
        }
        let length = match rustix::io::read(socket, &mut buffer[..]) {
            Ok(0) => return Err(LinkEnd::Lost("the broker closed the connection".into())),
            Ok(length) => length,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => return Ok(true),
            Err(error) => return Err(LinkEnd::Lost(error.to_string())),
        };
        decoder.extend(&buffer[..length]);
        while let Some(frame) = decoder.next_message()? {
            let mut state = self.lock();
            if state.connection != connection {
                break;
            }
            state.session.handle(Instant::now(), frame)?;
        }
        Ok(length == buffer.len())
    }

    fn carry_out_in_order(&self) {
        let _turn = self.order.lock().unwrap();
        self.carry_out_events(self.lock());
    }

    fn carry_out_events(&self, mut state: MutexGuard<'_, DriverState>) {
        let mut events = Vec::new();
        while let Some(event) = state.session.poll_event() {
            events.push(event);
        }
        drop(state);
        for event in events {
            event.carry_out();
        }
    }

    /// Wakes the thread if it has something to do before its wait ends.
    fn wake_where_needed(&self, mut state: MutexGuard<'_, DriverState>) {
        let Some(sleep) = state.asleep else {
            return;
        };
        let connects = matches!(state.phase, ConnectPhase::Down { retry_at } if retry_at < sleep.until)
            && state.session.wants_connection();
        // A leading caller also watches the deadlines.
        let led = matches!(state.read_by, ReadBy::Caller(_));
        let next = state.session.next_deadline().filter(|_| !led);
        let sooner = next.is_some_and(|next| next < sleep.until);
        let blocked = state.blocked && !sleep.watches_write;
        let reads = state.read_by == ReadBy::Thread && !sleep.watches_read;
        if connects || sooner || blocked || reads || state.session.has_events() {
            state.asleep = None;
            drop(state);
            self.wake();
        }
    }

    /// Writes the waiting bytes. If another thread is already writing, that thread sends them too.
    fn flush<'a>(&'a self, mut state: MutexGuard<'a, DriverState>) -> MutexGuard<'a, DriverState> {
        while !state.writing
            && !state.blocked
            && let ConnectPhase::Connected { socket, .. } = &state.phase
        {
            let socket = Arc::clone(socket);
            if state.unwritten.is_empty() {
                state.unwritten = state.session.next_bytes(Instant::now());
            }
            if state.unwritten.is_empty() {
                break;
            }
            let mut bytes = std::mem::take(&mut state.unwritten);
            let connection = state.connection;
            state.writing = true;
            drop(state);
            let outcome = write_until_full(&socket, &mut bytes);
            state = self.lock();
            state.writing = false;
            if state.connection != connection {
                continue;
            }
            if let Err(error) = outcome {
                state.unwritten = bytes;
                // The reader notices and handles a broken connection.
                state.blocked = true;
                if error != Errno::AGAIN {
                    tracing::debug!(%error, broker = self.broker, "can't write to the broker");
                }
            }
        }
        state
    }
}

/// Writes as much as the socket accepts. Fails with `AGAIN` when it is full.
fn write_until_full(socket: &OwnedFd, bytes: &mut BytesMut) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match send(socket, bytes) {
            Ok(written) => bytes.advance(written),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(target_os = "linux")]
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
    rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
    rustix::io::write(socket, bytes)
}
