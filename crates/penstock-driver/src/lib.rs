//! Defines one trait for every engine, and the driver for Penstock's own broker.
//!
//! No call here blocks except `close`. Each calls its callback once, on the driver's own thread or on one that
//! was lent to it (see [`Lead`]).
//!
//! ```text
//!     session.rs   what a client knows and owes; no socket, no clock
//!     remote.rs    the thread and the sockets around it
//!     dial.rs      how a connection is made: over a Unix socket or TCP
//! ```
//!
//! `penstock-local` has the brokers that clients start, and finds the driver for a URL.
//!
//! `session` and `encoded` are public only for the simulator, which puts its own network around them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_message::{
    Answer, Ask, CancelOrder, Capabilities, Consume, Delivery, Durability, Key, KeyState, Lease,
    MessageId, Notice, Progress, Query, Receipt, RefusedWait, Tx, WorkerReport,
};

pub use address::{BrokerUrl, DEFAULT_PORT};
pub use dial::{BrokerStart, Dial, DialError, Tcp, Unix, connect_unix};
pub use error::{DriverError, ErrorKind};

mod address;
mod dial;
#[doc(hidden)]
pub mod encoded;
mod error;
mod remote;
#[doc(hidden)]
pub mod session;
mod waker;

use penstock_wire::MAX_TOKEN_BYTES;
use remote::Remote;
pub use waker::Waker;

/// Callback for the outcome of a call, run once. An error says whether the call may have been accepted. Runs on
/// the driver's thread, so it must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T, DriverError>) + Send>;

pub trait Driver: Send + Sync {
    /// Returns the best capabilities that this kind of engine can have. Costs nothing.
    fn upper_bound(&self) -> &'static Capabilities;

    /// Returns the capabilities of the connected engine as it is configured. They are fetched once per
    /// connection. Without a connection, waits for one until the deadline.
    fn probe(&self, deadline: Instant, done: Done<Arc<Capabilities>>);

    /// Commits transactions in order. They share a frame where they fit; each is atomic on its own. The driver
    /// sends them again after a reconnect until they are confirmed, and each is applied once.
    fn commit(
        &self,
        txs: Vec<Tx>,
        durability: Durability,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
    );

    /// Commits settlements of jobs, and operators' orders such as a purge. Like `commit`, but as durably as the
    /// engine can, up to disk. An engine without a disk would refuse `durability="disk"`, and its jobs would
    /// never end.
    fn settle(&self, txs: Vec<Tx>, deadline: Option<Instant>, done: Done<Vec<Receipt>>);

    /// Registers a consumer, whose deliveries arrive at the sink. A client may have several, each with a
    /// number; the queues and tasks of each may change. Credit adds up, and the driver restores it after a
    /// reconnect.
    fn consume(&self, consume: Consume, sink: Arc<dyn DeliverySink>);

    /// Settles, and grants credit to consumers of one sink. Like separate calls, but sent together where that is
    /// possible: what a worker does after each job then wakes the broker once.
    fn settle_and_consume(
        &self,
        txs: Vec<Tx>,
        done: Done<Vec<Receipt>>,
        consumes: Vec<Consume>,
        sink: Arc<dyn DeliverySink>,
    ) {
        self.settle(txs, None, done);
        for consume in consumes {
            self.consume(consume, Arc::clone(&sink));
        }
    }

    /// Stops deliveries to all consumers. Leased deliveries stay leased until settled.
    fn stop_consuming(&self);
    /// Stops deliveries to one consumer until it receives credit again.
    fn stop_consumer(&self, consumer: u32);

    /// Notifies the sink of each key once it is no longer pending, through any number of reconnects, until the
    /// deadline.
    fn watch(&self, keys: Vec<Key>, deadline: Option<Instant>, sink: Arc<dyn ValueSink>)
    -> WatchId;
    /// Like `watch`, for a caller that waits inside this job. The broker may refuse a wait that would never
    /// end. Engines that don't track such waits never do.
    fn wait_inside(
        &self,
        _waiter: MessageId,
        keys: Vec<Key>,
        deadline: Option<Instant>,
        sink: Arc<dyn ValueSink>,
    ) -> WatchId {
        self.watch(keys, deadline, sink)
    }
    /// Like `watch`, but also reports keys that are pending.
    fn peek(&self, keys: Vec<Key>, deadline: Option<Instant>, sink: Arc<dyn ValueSink>) -> WatchId;
    /// Like `watch` without a deadline, for keys that nobody waits for yet. They are reported while somebody reads for
    /// another reason: alone they cause neither a connection nor a read.
    fn watch_ahead(&self, keys: Vec<Key>, sink: Arc<dyn ValueSink>) -> WatchId {
        self.watch(keys, None, sink)
    }
    /// Says whether a caller waits for keys that were watched ahead.
    fn await_ahead(&self, _watch: WatchId, _awaited: bool) {}
    fn unwatch(&self, watch: WatchId);

    fn query(&self, query: Query, deadline: Instant, done: Done<Answer>);

    /// Reports a worker's own figures and state for `status`, and whether its sinks accept questions.
    fn report(&self, report: WorkerReport);

    /// Reports the progress of a job whose delivery came to a sink. Only the latest of each job is sent, before
    /// a settlement that follows it. An engine that keeps none drops it.
    fn progress(&self, _progress: Progress) {}

    /// Replies to a question that a sink received. Has no effect once that connection is gone: the asker has
    /// already been notified.
    fn reply(&self, ask: u64, reply: Bytes);

    /// Takes the broker's notices that were not taken yet.
    fn take_notices(&self) -> Vec<Notice>;

    /// Lends the calling thread, which is about to wait for its own call: see [`Lead`]. `None` if another
    /// thread is already reading.
    fn take_lead(&self) -> Option<LeadToken> {
        None
    }

    /// Reads for all callers until this thread's wait is over or the deadline passes.
    fn lead(&self, _lead: LeadToken, _until: Instant, _over: &dyn Fn() -> bool) {}

    fn leave_lead(&self, _lead: LeadToken) {}

    /// Lets the calling thread, which waits for other things too, read in place of the driver's thread until the
    /// connection is lost. It then waits for the returned socket as well, and calls [`Driver::read_arrived`]
    /// whenever that is readable. So what arrives wakes one thread instead of two. `None` while there is no
    /// connection, or another thread is reading.
    fn read_elsewhere(&self) -> Option<ReadSide> {
        None
    }

    /// Reads all that has arrived, and calls the sinks in this thread; these must not close the driver. Returns
    /// false once the connection is lost: the driver's thread reads the next one.
    fn read_arrived(&self, _side: &ReadSide) -> bool {
        false
    }

    /// Leaves reading to the driver's thread again. Needed before [`Driver::close`], which waits for confirms.
    fn leave_reading(&self, _side: ReadSide) {}

    /// Returns why no broker is reachable, for people; `None` while one is.
    fn trouble(&self) -> Option<String>;

    /// Drops everything inherited from the parent, in a forked child. No other call is allowed there.
    fn abandon(&self);

    /// Disconnects once all commits are confirmed or the deadline passes. Blocks until then.
    fn close(&self, deadline: Instant);
}

/// Readable side of a connection, for [`Driver::read_elsewhere`].
pub struct ReadSide {
    socket: Arc<OwnedFd>,
    connection: u64,
}

impl AsFd for ReadSide {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Lets a thread that waits for its own call read the socket in place of the driver's thread. The broker then
/// wakes a lone caller directly, instead of through a second thread.
///
/// ```text
///     let lead = Lead::take(driver);                  before the call
///     driver.commit(…, done);
///     lead.read_until(deadline, || it_is_done());     then wait as without it, if it is not over
/// ```
pub struct Lead<'a> {
    driver: &'a dyn Driver,
    token: Option<LeadToken>,
}

impl<'a> Lead<'a> {
    pub fn take(driver: &'a dyn Driver) -> Self {
        let token = driver.take_lead();
        Self { driver, token }
    }

    /// Reads until the wait is over. Returns at once if another thread is reading.
    pub fn read_until(&self, until: Instant, over: impl Fn() -> bool) {
        if let Some(token) = self.token {
            self.driver.lead(token, until, &over);
        }
    }
}

/// Number of a lead. A lead that was taken away must not end the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeadToken(pub u64);

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token {
            self.driver.leave_lead(token);
        }
    }
}

pub trait DeliverySink: Send + Sync {
    fn deliver(&self, deliveries: Vec<Delivery>);
    /// Handles the broker's orders to stop and release jobs. The broker repeats them after each reconnect while
    /// their leases hold. They follow the deliveries that they concern; some may concern another sink.
    fn cancel(&self, _orders: Vec<CancelOrder>) {}
    /// Handles questions of clients to this worker, which must [reply](Driver::reply) to each.
    fn asked(&self, _asks: Vec<Ask>) {}
    /// Returns the leases still in use; called at each reconnect.
    fn held_leases(&self) -> Vec<Lease>;
    /// Handles the loss of the connection. Leases hold for one heartbeat from now; then the broker gives them
    /// to others.
    fn out_of_reach(&self) {}
    /// Handles a reconnect: these leases still hold, and all others are lost.
    fn leases_kept(&self, kept: &[Lease]);
    /// Handles a failure that persists until somebody fixes what the error says. The driver keeps trying.
    fn failed(&self, _error: DriverError) {}
}

pub trait ValueSink: Send + Sync {
    /// Receives the state of a key, `Present` or `Gone`, once per key.
    fn value(&self, key: Key, state: KeyState);
    /// Notes that a key has no value yet, but will. Called at first, and again after a reconnect.
    fn pending(&self, _key: Key) {}
    /// Notes whether the watch's broker became reachable (`true`) or unreachable.
    fn reachable(&self, reachable: bool);
    /// Handles a failure that persists until somebody fixes what the error says. The driver keeps trying.
    fn failed(&self, _error: DriverError) {}
    /// Handles the deadline: no further calls follow. `trouble` says why no broker is reachable, if none is.
    fn timed_out(&self, _trouble: Option<String>) {}
    /// Handles the refusal of a wait inside a job that would never end: no further calls follow.
    fn refused(&self, _refused: RefusedWait) {}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WatchId(pub u64);

/// Default time that a client or its broker may be silent before the other considers it dead.
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(15);

/// Settings with which a client reaches its broker.
#[derive(Clone)]
pub struct DriverConfig {
    pub url: String,
    pub token: Option<String>,
    /// Path of the penstock executable, for `local:`.
    pub program: Option<std::path::PathBuf>,
    /// Name that `status` shows to people.
    pub name: String,
    pub heartbeat: Duration,
}

impl std::fmt::Debug for DriverConfig {
    /// Formats the settings without the token.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("DriverConfig")
            .field("url", &self.url)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl DriverConfig {
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            token: None,
            program: None,
            name: format!("pid {}", std::process::id()),
            heartbeat: DEFAULT_HEARTBEAT,
        }
    }
}

/// Creates the driver for a broker that speaks the native protocol, whatever the transport. Opens, starts and
/// connects nothing: the first call does.
///
/// `upper_bound` has the best capabilities of a broker reached like this. `takes_over` says whether a broker
/// older than this client is stopped, because it belongs to its clients.
pub fn native(
    config: DriverConfig,
    dial: Box<dyn Dial>,
    upper_bound: &'static Capabilities,
    takes_over: bool,
) -> Result<Arc<dyn Driver>, DriverError> {
    let token_bytes = config.token.as_ref().map_or(0, String::len);
    if token_bytes > MAX_TOKEN_BYTES {
        return Err(DriverError::invalid(format!(
            "the token has {token_bytes} bytes; the limit is {MAX_TOKEN_BYTES} bytes"
        )));
    }
    Ok(Arc::new(Remote::new(
        config,
        dial,
        upper_bound,
        takes_over,
    )?))
}
