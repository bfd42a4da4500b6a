//! One trait over every engine, and the driver for Penstock's own broker.
//!
//! No call here ever blocks, but for `close`: each calls its callback once, on the
//! driver's own thread, or on one that has lent itself to it (see [`Lead`]).
//!
//! ```text
//!     session.rs   what a client knows and owes; no socket, no clock
//!     remote.rs    the thread and the sockets around it
//!     dial.rs      how a connection is made: over a Unix socket or TCP
//! ```
//!
//! Brokers that a client starts are in `penstock-local`, which also finds the driver for a URL.
//!
//! `session` and `encoded` are public for the simulator alone, which puts a network of its own around them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_message::{
    Answer, Ask, CancelOrder, Capabilities, Consume, Delivery, Durability, Key, KeyState, Lease,
    MessageId, Notice, Progress, Query, Receipt, RefusedWait, Tx, WorkerReport,
};

pub use address::{Address, DEFAULT_PORT};
pub use dial::{Dial, DialError, Start, Tcp, Unix, connect_unix};
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

/// Called once with how a call ended; an error says whether it may have been accepted. Runs on the driver's thread: it must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T, DriverError>) + Send>;

pub trait Driver: Send + Sync {
    /// Returns the capabilities of this kind of engine at best. Costs nothing.
    fn upper_bound(&self) -> &'static Capabilities;

    /// Returns the capabilities of the engine behind the URL as it is set up. They are asked for once a connection;
    /// without one, this waits for it until the deadline.
    fn probe(&self, deadline: Instant, done: Done<Arc<Capabilities>>);

    /// Commits transactions in order. All go in one frame where they fit; each is atomic on its own.
    /// Resent by the driver after a reconnect until confirmed, applied once.
    fn commit(
        &self,
        txs: Vec<Tx>,
        durability: Durability,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
    );

    /// Commits settlements of jobs, and orders of people such as a purge: as `commit`, but as durably as the engine
    /// can, up to disk. An engine that keeps less would refuse to keep them on disk, and its jobs would never end.
    fn settle(&self, txs: Vec<Tx>, deadline: Option<Instant>, done: Done<Vec<Receipt>>);

    /// Has a consumer take deliveries, which arrive at the sink. There may be several, by their numbers; the queues
    /// and tasks of each may change. Credit adds up, and is restored by the driver after a reconnect.
    fn consume(&self, consume: Consume, sink: Arc<dyn DeliverySink>);

    /// Stops deliveries to all consumers; held ones stay leased until settled.
    fn stop_consuming(&self);
    /// No more deliveries for this one, until it is given credit again.
    fn stop_consumer(&self, consumer: u32);

    /// Tells the sink of each key once it is not pending any more, through any number of reconnects,
    /// until the deadline.
    fn watch(&self, keys: Vec<Key>, deadline: Option<Instant>, sink: Arc<dyn ValueSink>)
    -> WatchId;
    /// As `watch`, for a caller that waits inside this job. The broker may refuse such a wait, where it would never end; an
    /// engine that knows no such waits never does.
    fn wait_inside(
        &self,
        _waiter: MessageId,
        keys: Vec<Key>,
        deadline: Option<Instant>,
        sink: Arc<dyn ValueSink>,
    ) -> WatchId {
        self.watch(keys, deadline, sink)
    }
    /// As `watch`, but also tells the sink of a key that is pending.
    fn peek(&self, keys: Vec<Key>, deadline: Option<Instant>, sink: Arc<dyn ValueSink>) -> WatchId;
    fn unwatch(&self, watch: WatchId);

    fn query(&self, query: Query, deadline: Instant, done: Done<Answer>);

    /// Reports a worker's own figures and state, for `status`, and whether its sinks take questions.
    fn report(&self, report: WorkerReport);

    /// Tells the progress of a job whose delivery came to a sink. Only the latest of each is sent, before a settlement that
    /// follows it; an engine that keeps none drops it.
    fn progress(&self, _progress: Progress) {}

    /// Replies to a question that a sink was asked. Without effect once the connection that it came on is gone: the
    /// asker has been told.
    fn reply(&self, ask: u64, reply: Bytes);

    /// Takes the broker's notices that nobody has taken yet.
    fn take_notices(&self) -> Vec<Notice>;

    /// Lends the calling thread, which is about to wait for its own call: see [`Lead`]. `None`: another reads already.
    fn take_lead(&self) -> Option<LeadToken> {
        None
    }

    /// Reads for all callers, until the wait of this thread is over, or the time has come.
    fn lead(&self, _lead: LeadToken, _until: Instant, _over: &dyn Fn() -> bool) {}

    fn leave_lead(&self, _lead: LeadToken) {}

    /// Why no broker is in reach, for people; `None` while one is.
    fn trouble(&self) -> Option<String>;

    /// Gives up, in a forked child, what was inherited from the parent. Nothing else may be called there.
    fn abandon(&self);

    /// Disconnects once all commits are confirmed, or the deadline has come. Blocks until then.
    fn close(&self, deadline: Instant);
}

/// A thread that waits for its own call may read the socket meanwhile, in place of the driver's
/// thread. A lone caller is then woken by the broker itself, and not by a thread that was woken first.
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

    /// Returns at once where another thread reads.
    pub fn read_until(&self, until: Instant, over: impl Fn() -> bool) {
        if let Some(token) = self.token {
            self.driver.lead(token, until, &over);
        }
    }
}

/// Number of a lead: one that was taken away must not end the next.
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
    /// The broker asks for jobs to be stopped and released. It asks again after each reconnect, for as long as
    /// their leases hold. Comes after the deliveries that the orders are about; some may be another sink's.
    fn cancel(&self, _orders: Vec<CancelOrder>) {}
    /// Clients ask this worker, which is to [reply](Driver::reply) to each question.
    fn asked(&self, _asks: Vec<Ask>) {}
    /// Returns the leases still worked on; asked for at each reconnect.
    fn held_leases(&self) -> Vec<Lease>;
    /// The connection is gone. Leases hold for one heartbeat from here; after that the broker gives them to others.
    fn out_of_reach(&self) {}
    /// After a reconnect: the leases that still hold; all others are lost.
    fn leases_kept(&self, kept: &[Lease]);
    /// No broker can be had until somebody fixes what the error says; the driver keeps trying.
    fn failed(&self, _error: DriverError) {}
}

pub trait ValueSink: Send + Sync {
    /// `Present` or `Gone`, once a key.
    fn value(&self, key: Key, state: KeyState);
    /// No value yet, but one is on its way. Called at first, and again after a reconnect.
    fn pending(&self, _key: Key) {}
    /// The watch's broker came back into reach (`true`) or went out of it.
    fn reachable(&self, reachable: bool);
    /// No broker can be had until somebody fixes what the error says; the driver keeps trying.
    fn failed(&self, _error: DriverError) {}
    /// The deadline has come: no further calls follow. `trouble`: why no broker is in reach, when none is.
    fn timed_out(&self, _trouble: Option<String>) {}
    /// The wait inside a job would never end: no further calls follow.
    fn refused(&self, _refused: RefusedWait) {}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WatchId(pub u64);

/// Time that a client or its broker may be silent before the other takes it for dead.
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(15);

/// How a client reaches its broker.
#[derive(Clone)]
pub struct DriverConfig {
    pub url: String,
    pub token: Option<String>,
    /// The penstock executable, for `local:`.
    pub program: Option<std::path::PathBuf>,
    /// Shown to people in `status`.
    pub name: String,
    pub heartbeat: Duration,
}

impl std::fmt::Debug for DriverConfig {
    /// Without the token.
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

/// Makes the driver for a broker that speaks the native protocol, however it is reached. Opens, starts and
/// connects nothing: the first call does.
///
/// `upper_bound`: capabilities of a broker reached like this, at best. `takes_over`: whether one that is older
/// than this client is stopped, because it belongs to its clients.
pub fn native(
    config: DriverConfig,
    dial: Box<dyn Dial>,
    upper_bound: &'static Capabilities,
    takes_over: bool,
) -> Result<Arc<dyn Driver>, DriverError> {
    let token_bytes = config.token.as_ref().map_or(0, String::len);
    if token_bytes > MAX_TOKEN_BYTES {
        return Err(DriverError::invalid(format!(
            "the token has {token_bytes} bytes; the limit is {MAX_TOKEN_BYTES}"
        )));
    }
    Ok(Arc::new(Remote::new(
        config,
        dial,
        upper_bound,
        takes_over,
    )?))
}
