//! Implements the driver for a broker in another process: the shell around [`DriverSession`].
//!
//! One thread, started by the first call, waits for the socket, resolves calls, reconnects and watches the
//! deadlines. Callers write to the socket themselves unless another thread is writing. A single call at a time
//! saves a wake-up this way. Under load, the writer also sends the bytes that other callers have queued.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use penstock_message::{
    Answer, Capabilities, Consume, Durability, Feature, Key, Lease, MessageId, Notice, Progress,
    Query, Receipt, SessionId, Tx, WorkerReport,
};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, Versions, proto};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::dial::{BrokerStart, Dial, DialError};
use crate::encoded::Encoded;
use crate::session::{DriverSession, LinkEnd, SessionConfig};
use crate::waker::Waker;
use crate::{
    DeliverySink, Done, Driver, DriverConfig, DriverError, ErrorKind, LeadToken, ReadSide,
    ValueSink, WatchId,
};

/// Maximum time of one attempt to connect before the next one starts.
const DIAL_PATIENCE: Duration = Duration::from_secs(10);
const LONGEST_RETRY: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(4);
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
        if state.read_by == ReadBy::Nobody {
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
        let txs = txs.into_iter().map(Encoded::new).collect();
        let mut done = Some(done);
        let outcome = self.with_session(|session| {
            if let Some(done) = done.take() {
                session.commit(txs, durability, deadline, done);
            }
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

/// State of the driver's thread.
struct IoLoop {
    shared: Arc<DriverShared>,
    backoff: Backoff,
}

impl IoLoop {
    fn new(shared: Arc<DriverShared>) -> Self {
        Self {
            shared,
            backoff: Backoff::new(),
        }
    }

    fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _ = shared.thread.set(thread::current().id());
        while !self.run_due_work(&shared) {
            let (socket, connection, sleep) = {
                let mut state = shared.flush(shared.lock());
                let socket = match &state.phase {
                    ConnectPhase::Connected { socket, .. } => Some(Arc::clone(socket)),
                    ConnectPhase::Dialed(_) => continue,
                    ConnectPhase::Down { .. } | ConnectPhase::Dialing => None,
                };
                if state.session.has_events() {
                    continue;
                }
                if state.read_by == ReadBy::Thread && state.session.is_idle() {
                    state.read_by = ReadBy::Nobody;
                }
                let sleep = Sleep {
                    until: next_wake_up(&state),
                    watches_read: state.read_by == ReadBy::Thread,
                    watches_write: state.blocked,
                };
                state.asleep = Some(sleep);
                (socket, state.connection, sleep)
            };
            let ready = self.wait(socket.as_deref(), sleep);
            let mut state = shared.lock();
            state.asleep = None;
            state.blocked &= !ready.write;
            // The thread that reads may be late, and silence is judged next.
            let checks = state.read_by == ReadBy::Elsewhere && Instant::now() >= sleep.until;
            let reads = ready.read || state.read_by == ReadBy::Nobody || checks;
            drop(state);
            if let Some(socket) = socket
                && reads
                && let Err(end) = shared.read(&socket, connection)
            {
                let mut state = shared.lock();
                if state.connection == connection {
                    self.lose_link(&mut state, end);
                }
            }
        }
        let mut state = shared.lock();
        state.thread = IoThread::Ended;
        if let ConnectPhase::Connected { socket, .. } = &state.phase {
            // Wakes the leading caller; written bytes are still sent.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Read);
        }
        state.phase = ConnectPhase::Down {
            retry_at: Instant::now(),
        };
        shared.ended.notify_all();
    }

    /// Watches deadlines, connects, and carries out the resulting events. Returns whether the driver was
    /// closed.
    fn run_due_work(&mut self, shared: &Arc<DriverShared>) -> bool {
        let mut state = shared.lock();
        let now = Instant::now();
        if let Some(end) = state.broken.take() {
            self.lose_link(&mut state, end);
        }
        if let Err(end) = state.session.tick(now) {
            self.lose_link(&mut state, end);
        }
        let closes = state
            .closing
            .is_some_and(|deadline| now >= deadline || state.session.is_settled());
        if closes {
            state.session.fail_all(&DriverError::closed());
            state.session.say_goodbye();
            state = shared.flush(state);
        }
        match &state.phase {
            ConnectPhase::Dialed(Ok(_)) => {
                // Called without the lock: a sink may be in a call to this driver.
                let sinks = state.session.delivery_sinks();
                drop(state);
                let leases = sinks.iter().flat_map(|sink| sink.held_leases()).collect();
                state = shared.lock();
                self.greet(&mut state, now, leases);
            }
            ConnectPhase::Dialed(Err(error)) => {
                let end = match error.clone() {
                    DialError::Unreachable(why) => LinkEnd::Lost(why),
                    DialError::Hopeless(why) => LinkEnd::Hopeless(ErrorKind::Invalid, why),
                };
                self.lose_link(&mut state, end);
            }
            ConnectPhase::Down { retry_at }
                if now >= *retry_at && state.session.wants_connection() && !closes =>
            {
                self.start_to_dial(shared, &mut state, now);
            }
            _ => {}
        }
        match state.read_by {
            ReadBy::Elsewhere => {
                drop(state);
                shared.carry_out_in_order();
            }
            _ => shared.carry_out_events(state),
        }
        closes
    }

    fn start_to_dial(&mut self, shared: &Arc<DriverShared>, state: &mut DriverState, now: Instant) {
        let shared = Arc::clone(shared);
        let start = state.session.start(state.closing.is_some());
        // Connecting has its own thread, so that this one can keep watching deadlines.
        let attempt = thread::Builder::new()
            .name("penstock-dial".into())
            .spawn(move || {
                let dialed = shared.dial.dial(now + DIAL_PATIENCE, start);
                shared.lock().phase = ConnectPhase::Dialed(dialed);
                shared.wake();
            });
        match attempt {
            Ok(_) => state.phase = ConnectPhase::Dialing,
            Err(error) => {
                let why = format!("this process can't start a thread: {error}");
                self.lose_link(state, LinkEnd::Lost(why));
            }
        }
    }

    fn greet(&mut self, state: &mut DriverState, now: Instant, leases: Vec<Lease>) {
        let retry_at = now;
        if let ConnectPhase::Dialed(Ok(socket)) =
            std::mem::replace(&mut state.phase, ConnectPhase::Down { retry_at })
        {
            state.session.connected(now, leases);
            state.connection += 1;
            state.unwritten.clear();
            state.blocked = false;
            self.shared
                .socket
                .store(socket.as_raw_fd(), Ordering::Relaxed);
            state.phase = ConnectPhase::Connected {
                socket: Arc::new(socket),
                since: now,
            };
        }
    }

    fn lose_link(&mut self, state: &mut DriverState, end: LinkEnd) {
        let now = Instant::now();
        if let ConnectPhase::Connected { since, .. } = &state.phase
            && now - *since > LONGEST_RETRY
        {
            self.backoff.reset();
        }
        // The leading caller waits on this socket.
        if let ConnectPhase::Connected { socket, .. } = &state.phase {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            // A broker that is about to exit accepts further connections, and ends each at once.
            let was_welcome = state.session.trouble().is_none();
            if was_welcome && state.session.start(state.closing.is_some()) == BrokerStart::No {
                let broker = &self.shared.broker;
                let starter = match self.shared.dial.starts_brokers() {
                    true => "a client starts it again",
                    false => "it is started again",
                };
                tracing::info!("the broker at {broker} was stopped; waiting until {starter}");
            }
        }
        state.read_by = ReadBy::Thread;
        state.broken = None;
        self.shared.socket.store(-1, Ordering::Relaxed);
        state.phase = ConnectPhase::Down {
            retry_at: now + self.backoff.next(),
        };
        // A writer that is still running must not touch the bytes of the next connection.
        state.connection += 1;
        state.unwritten.clear();
        state.blocked = false;
        match end {
            LinkEnd::Lost(why) => {
                tracing::debug!(
                    why,
                    broker = self.shared.broker,
                    "no connection to the broker"
                );
                state.session.disconnected(&why);
            }
            LinkEnd::Hopeless(kind, reason) => {
                state.session.disconnected(&reason);
                state.session.fail_all(&DriverError::new(kind, reason));
            }
        }
    }

    fn wait(&self, socket: Option<&OwnedFd>, sleep: Sleep) -> WakeReason {
        let waker = self.shared.waker.get();
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, sleep.watches_read);
        interest.set(PollFlags::OUT, sleep.watches_write);
        let socket = socket.filter(|_| !interest.is_empty());
        let mut fds = Vec::with_capacity(2);
        fds.extend(socket.map(|socket| PollFd::new(socket, interest)));
        fds.extend(waker.map(|waker| PollFd::new(waker, PollFlags::IN)));
        let left = sleep.until.saturating_duration_since(Instant::now());
        // An interrupted wait reports nothing ready; the next one will.
        let _ = poll(&mut fds, timeout(left).as_ref());
        let happened = |index: usize| fds.get(index).map_or(PollFlags::empty(), PollFd::revents);
        let of_socket = match socket {
            Some(_) => happened(0),
            None => PollFlags::empty(),
        };
        if fds.last().is_some_and(|last| !last.revents().is_empty())
            && let Some(waker) = waker
        {
            waker.clear();
        }
        WakeReason {
            // Also on an error or end of stream, which reading then finds.
            read: of_socket.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR),
            write: of_socket.contains(PollFlags::OUT),
        }
    }
}

#[derive(Clone, Copy)]
struct Sleep {
    until: Instant,
    watches_read: bool,
    watches_write: bool,
}

struct WakeReason {
    read: bool,
    write: bool,
}

fn next_wake_up(state: &DriverState) -> Instant {
    let retry = match state.phase {
        ConnectPhase::Down { retry_at } if state.session.wants_connection() => Some(retry_at),
        _ => None,
    };
    let far = Instant::now() + Duration::from_secs(3600);
    [state.session.next_deadline(), retry, state.closing]
        .into_iter()
        .flatten()
        .fold(far, Instant::min)
}

/// Rounds up: waking slightly too early would mean waking twice.
fn timeout(left: Duration) -> Option<Timespec> {
    Timespec::try_from(left + Duration::from_micros(50)).ok()
}

/// Delay before the next attempt. It doubles each time, with jitter, so that clients that lost the same broker
/// do not reconnect in step.
struct Backoff {
    next: Duration,
    random: u64,
}

impl Backoff {
    fn new() -> Self {
        Self {
            next: FIRST_RETRY,
            random: getrandom::u64().unwrap_or(1),
        }
    }

    fn reset(&mut self) {
        self.next = FIRST_RETRY;
    }

    fn next(&mut self) -> Duration {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let share = 0.5 + (mixed >> 40) as f64 / (1_u64 << 25) as f64;
        let wait = self.next.mul_f64(share);
        self.next = (self.next * 2).min(LONGEST_RETRY);
        wait
    }
}
