//! Keeps the state of a client through any number of connections: its open calls. Has no socket, thread or
//! clock: the shell in `remote.rs` moves bytes and passes in the time.
//!
//! ```text
//!     commit() ──► waiting ──► window ──► confirmed          each call ends once, by an Event
//!                  never sent  sent, has a number
//! ```
//!
//! A transaction gets its sequence number when it is first written, and keeps it until the broker confirms it.
//! After a reconnect the window is written again from its start. The broker remembers (session, number), so it
//! applies nothing twice. A call whose deadline passes earlier is dropped from `waiting`. Numbers have no gaps,
//! so the window can't drop one. If an expired call there must be resent, it is sent empty, because its caller
//! already received an error.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use penstock_message::{
    Answer, Applied, Ask, CancelOrder, Capabilities, Consume, Delivery, Durability, Features, Key,
    KeyState, Lease, MessageId, Notice, Progress, Query, Receipt, RefusedWait, SeededMap,
    SeededSet, SeededState, SessionId, WorkerReport,
};
use penstock_wire::{
    HELLO_LEASES, MAX_FRAME_BYTES, Versions, WireError, convert, encode_frame, proto,
};
use rustc_hash::FxHashMap;

use crate::dial::BrokerStart;
use crate::encoded::Encoded;
use crate::{DeliverySink, Done, DriverError, ErrorKind, ValueSink, WatchId};

mod consumers;
mod incoming;
mod outgoing;

use consumers::ClientConsumers;

const APPLIED: Receipt = Receipt::Applied(Applied {
    skipped: Vec::new(),
    owners: Vec::new(),
    found: None,
    operation: None,
});
/// Well within the ten minutes for which a broker remembers a disconnected session.
const SURELY_REMEMBERED: Duration = Duration::from_secs(5 * 60);
/// Maximum number of notices kept until they are taken.
const MAX_NOTICES: usize = 64;

/// Callback for the shell to run, without holding the session's lock.
pub enum SessionEvent {
    Committed(Done<Vec<Receipt>>, Result<Vec<Receipt>, DriverError>),
    Answered(Done<Answer>, Result<Answer, DriverError>),
    Probed(
        Done<Arc<Capabilities>>,
        Result<Arc<Capabilities>, DriverError>,
    ),
    Value(Arc<dyn ValueSink>, Key, KeyState),
    Reachable(Arc<dyn ValueSink>, bool),
    Failed(Arc<dyn ValueSink>, DriverError),
    TimedOut(Arc<dyn ValueSink>, Option<String>),
    Refused(Arc<dyn ValueSink>, RefusedWait),
    Deliver(Arc<dyn DeliverySink>, Vec<Delivery>),
    Cancel(Arc<dyn DeliverySink>, Vec<CancelOrder>),
    Asked(Arc<dyn DeliverySink>, Vec<Ask>),
    OutOfReach(Arc<dyn DeliverySink>),
    LeasesKept(Arc<dyn DeliverySink>, Vec<Lease>),
    ConsumerFailed(Arc<dyn DeliverySink>, DriverError),
}

impl SessionEvent {
    pub fn carry_out(self) {
        match self {
            Self::Committed(done, outcome) => done(outcome),
            Self::Answered(done, outcome) => done(outcome),
            Self::Probed(done, outcome) => done(outcome),
            Self::Value(sink, key, KeyState::Pending) => sink.pending(key),
            Self::Value(sink, key, state) => sink.value(key, state),
            Self::Reachable(sink, reachable) => sink.reachable(reachable),
            Self::Failed(sink, error) => sink.failed(error),
            Self::TimedOut(sink, trouble) => sink.timed_out(trouble),
            Self::Refused(sink, refused) => sink.refused(refused),
            Self::Deliver(sink, deliveries) => sink.deliver(deliveries),
            Self::Cancel(sink, orders) => sink.cancel(orders),
            Self::Asked(sink, asks) => sink.asked(asks),
            Self::OutOfReach(sink) => sink.out_of_reach(),
            Self::LeasesKept(sink, kept) => sink.leases_kept(&kept),
            Self::ConsumerFailed(sink, error) => sink.failed(error),
        }
    }
}

/// Reason for the end of a connection, as the broker or the protocol states it.
#[derive(Clone, Debug, PartialEq)]
pub enum LinkEnd {
    /// A retry may succeed.
    Lost(String),
    /// No retry will succeed until somebody fixes the cause.
    Hopeless(ErrorKind, String),
}

impl From<WireError> for LinkEnd {
    fn from(error: WireError) -> Self {
        Self::Lost(format!("the broker sent an invalid frame: {error}"))
    }
}

type CallId = u64;

/// Transactions of one `commit`, or one query.
struct Call {
    done: CallDone,
    deadline: Option<Instant>,
    /// Whether any part of it was given to a socket.
    sent: bool,
}

enum CallDone {
    Commit {
        done: Done<Vec<Receipt>>,
        receipts: Vec<Receipt>,
        unconfirmed: usize,
    },
    Query {
        done: Done<Answer>,
        query: Query,
    },
    Probe {
        done: Done<Arc<Capabilities>>,
    },
}

struct PendingTx {
    call: CallId,
    /// Index in the call.
    index: usize,
    /// Durability; `None` selects the one that the engine uses for settlements.
    durability: Option<Durability>,
    tx: Encoded,
    /// Whether it was confirmed out of turn, so that its call already has the receipt.
    reported: bool,
    receipt: Option<Receipt>,
}

struct Watch {
    sink: Arc<dyn ValueSink>,
    /// Whether the sink is also notified of pending keys.
    peeks: bool,
    /// Job inside which the caller waits.
    waiter: Option<MessageId>,
    deadline: Option<Instant>,
    /// Whether nobody waits for it yet.
    is_ahead: bool,
    /// Keys without a value yet. May also contain some that have one.
    keys: Vec<Key>,
    unreported: usize,
}

#[derive(Clone, PartialEq)]
enum LinkState {
    Down,
    /// The hello was sent.
    Greeting,
    /// The broker is older than this client, and was asked to stop. If it refuses, its welcome holds.
    TakingOver(Box<proto::Welcome>),
    Up,
}

pub struct SessionConfig {
    pub id: SessionId,
    pub token: Bytes,
    pub name: String,
    pub heartbeat: Duration,
    /// Name of the broker in messages: its URL.
    pub broker: String,
    /// Seed for the hashes of watched keys: an application may watch keys that its users choose.
    pub hash_seed: u64,
    pub versions: Versions,
    /// Whether to stop a broker older than this client, so that one of this version can start.
    pub takes_over: bool,
}

pub struct DriverSession {
    config: SessionConfig,
    link: LinkState,
    heartbeat: Duration,
    max_frame_bytes: usize,
    last_received: Instant,
    last_sent: Instant,
    /// Whether the broker said that it was asked to stop, and no other has run there since.
    stopped: bool,
    /// Whether this session asked the broker to stop, to start one of its own version.
    takes_over: bool,
    /// Protocol version in use with this broker.
    version: u32,
    /// Capabilities that the broker stated last.
    capabilities: Arc<Capabilities>,
    /// Capabilities as a set, to compare with each transaction.
    offered: Features,
    /// Reason why the broker closed the last connection, if nothing was confirmed since. The same refusal twice
    /// would repeat forever.
    refused: Option<String>,
    /// Time at which the connection was established.
    up_since: Instant,
    /// Reason why there is no connection, once there was one or an attempt.
    down_because: Option<String>,
    out: BytesMut,

    next_id: u64,
    calls: FxHashMap<CallId, Call>,
    deadlines: BTreeSet<(Instant, CallId)>,

    waiting: VecDeque<PendingTx>,
    window: VecDeque<PendingTx>,
    window_first_seq: u64,
    /// Time of this session's first hello.
    begun: Option<Instant>,
    /// Start of the part of the window that this connection has not been sent: (index, part).
    unwritten: (usize, usize),

    watches: FxHashMap<WatchId, Watch>,
    /// Number of watches that nobody waits for yet.
    ahead: usize,
    watchers: SeededMap<Key, Vec<WatchId>>,
    /// Keys to watch, with the jobs that wait for them.
    unsent_keys: VecDeque<(Key, Option<MessageId>)>,
    unsent_unwatched: SeededSet<Key>,
    /// Keys that are still watched, with the jobs that no longer wait for them.
    unsent_over: SeededSet<(Key, MessageId)>,

    unsent_queries: VecDeque<CallId>,
    consumers: ClientConsumers,
    report: Option<proto::Report>,
    report_changed: bool,
    /// Questions that came on this connection and have no reply yet.
    asks: BTreeSet<u64>,
    unsent_replies: VecDeque<proto::Reply>,
    unsent_progress: BTreeMap<Lease, Bytes>,
    notices: VecDeque<Notice>,
    events: VecDeque<SessionEvent>,
}

impl DriverSession {
    pub fn new(config: SessionConfig, now: Instant) -> Self {
        let hashing = SeededState::new(config.hash_seed);
        Self {
            heartbeat: config.heartbeat,
            config,
            link: LinkState::Down,
            max_frame_bytes: MAX_FRAME_BYTES,
            last_received: now,
            last_sent: now,
            stopped: false,
            takes_over: false,
            version: 0,
            capabilities: Arc::default(),
            offered: Features::NONE,
            refused: None,
            up_since: now,
            down_because: None,
            out: BytesMut::new(),
            next_id: 1,
            calls: FxHashMap::default(),
            deadlines: BTreeSet::new(),
            waiting: VecDeque::new(),
            window: VecDeque::new(),
            window_first_seq: 1,
            begun: None,
            unwritten: (0, 0),
            watches: FxHashMap::default(),
            ahead: 0,
            watchers: SeededMap::with_hasher(hashing),
            unsent_keys: VecDeque::new(),
            unsent_unwatched: SeededSet::with_hasher(hashing),
            unsent_over: SeededSet::with_hasher(hashing),
            unsent_queries: VecDeque::new(),
            consumers: ClientConsumers::default(),
            report: None,
            report_changed: false,
            asks: BTreeSet::new(),
            unsent_replies: VecDeque::new(),
            unsent_progress: BTreeMap::new(),
            notices: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    // Calls of the application.

    /// Commits transactions. `durability: None` selects the one for settlements.
    pub fn commit(
        &mut self,
        txs: Vec<Encoded>,
        durability: impl Into<Option<Durability>>,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
    ) {
        let durability = durability.into();
        if txs.is_empty() {
            self.events
                .push_back(SessionEvent::Committed(done, Ok(Vec::new())));
            return;
        }
        let call = self.add_call(
            CallDone::Commit {
                done,
                receipts: vec![APPLIED; txs.len()],
                unconfirmed: txs.len(),
            },
            deadline,
        );
        self.waiting
            .extend(txs.into_iter().enumerate().map(|(index, tx)| PendingTx {
                call,
                index,
                durability,
                tx,
                reported: false,
                receipt: None,
            }));
    }

    pub fn query(&mut self, query: Query, deadline: Instant, done: Done<Answer>) {
        let call = self.add_call(CallDone::Query { done, query }, Some(deadline));
        self.unsent_queries.push_back(call);
    }

    /// Fetches the broker's capabilities, which its welcome states.
    pub fn probe(&mut self, deadline: Instant, done: Done<Arc<Capabilities>>) {
        if self.link == LinkState::Up {
            let known = Arc::clone(&self.capabilities);
            self.events.push_back(SessionEvent::Probed(done, Ok(known)));
            return;
        }
        self.add_call(CallDone::Probe { done }, Some(deadline));
    }

    fn add_call(&mut self, done: CallDone, deadline: Option<Instant>) -> CallId {
        let id = self.next_id;
        self.next_id += 1;
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id));
        }
        let call = Call {
            done,
            deadline,
            sent: false,
        };
        self.calls.insert(id, call);
        id
    }

    /// Watches keys. `waiter` is the job inside which the caller waits.
    pub fn watch(
        &mut self,
        keys: Vec<Key>,
        peeks: bool,
        waiter: Option<MessageId>,
        deadline: Option<Instant>,
        sink: Arc<dyn ValueSink>,
    ) -> WatchId {
        let id = WatchId(self.next_id);
        self.next_id += 1;
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id.0));
        }
        for key in &keys {
            self.watchers.entry(key.clone()).or_default().push(id);
            // Within a frame, the broker handles watches before unwatches.
            self.unsent_unwatched.remove(key);
            if let Some(waiter) = waiter
                && !self.unsent_over.is_empty()
            {
                self.unsent_over.remove(&(key.clone(), waiter));
            }
        }
        // Includes keys already watched, so that the new sink learns that they are pending.
        let unsent = keys.iter().map(|key| (key.clone(), waiter));
        self.unsent_keys.extend(unsent);
        let unreported = keys.len();
        let watch = Watch {
            sink,
            peeks,
            waiter,
            deadline,
            is_ahead: false,
            keys,
            unreported,
        };
        self.watches.insert(id, watch);
        id
    }

    /// Says whether nobody waits for a watch yet.
    pub fn set_ahead(&mut self, id: WatchId, is_ahead: bool) {
        if let Some(watch) = self.watches.get_mut(&id)
            && watch.is_ahead != is_ahead
        {
            watch.is_ahead = is_ahead;
            match is_ahead {
                true => self.ahead += 1,
                false => self.ahead -= 1,
            }
        }
    }

    pub fn unwatch(&mut self, id: WatchId) {
        let Some(watch) = self.remove_watch(id) else {
            return;
        };
        for key in watch.keys {
            self.stop_watching(key, watch.waiter, |watcher| watcher == id);
        }
    }

    /// Removes some of a key's watchers. Once none are left, the broker need not report the key. `waiter` is
    /// the job inside which they waited.
    fn stop_watching(
        &mut self,
        key: Key,
        waiter: Option<MessageId>,
        leaves: impl Fn(WatchId) -> bool,
    ) {
        let Some(watchers) = self.watchers.get_mut(&key) else {
            return;
        };
        watchers.retain(|watcher| !leaves(*watcher));
        if watchers.is_empty() {
            self.watchers.remove(&key);
            if self.link == LinkState::Up {
                self.unsent_unwatched.insert(key);
            }
        } else if let Some(waiter) = waiter {
            let waits = |id: &WatchId| {
                let watch = self.watches.get(id);
                watch.is_some_and(|watch| watch.waiter == Some(waiter))
            };
            if !watchers.iter().any(waits) && self.link == LinkState::Up {
                self.unsent_over.insert((key, waiter));
            }
        }
    }

    pub fn consume(&mut self, consume: Consume, sink: Arc<dyn DeliverySink>) {
        self.consumers.consume(consume, sink);
    }

    pub fn stop_consuming(&mut self) {
        self.consumers.stop();
    }

    pub fn stop_consumer(&mut self, consumer: u32) {
        self.consumers.stop_one(consumer);
    }

    pub fn report(&mut self, report: WorkerReport) {
        let report = Some(report.into());
        self.report_changed |= self.report != report;
        self.report = report;
    }

    /// Queues the progress of a job; only the latest of each is sent.
    pub fn progress(&mut self, progress: Progress) {
        if self.link != LinkState::Up || self.capabilities.progress {
            self.unsent_progress.insert(progress.lease, progress.body);
        }
    }

    /// Replies to a question, unless its connection is gone.
    pub fn reply(&mut self, ask: u64, reply: Bytes) {
        if self.asks.remove(&ask) {
            self.unsent_replies
                .push_back(proto::Reply { id: ask, reply });
        }
    }

    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.drain(..).collect()
    }

    /// Returns the reason why there is no connection, if there is none.
    pub fn trouble(&self) -> Option<String> {
        let broker = &self.config.broker;
        match (&self.link, &self.down_because) {
            (LinkState::Up, _) => None,
            (_, Some(why)) => Some(format!("no connection to {broker}: {why}")),
            (_, None) => Some(format!("no connection to {broker}")),
        }
    }

    // Calls of the shell.

    /// Whether there is anything to do that needs a broker.
    pub fn wants_connection(&self) -> bool {
        !self.calls.is_empty() || self.awaits_values() || !self.consumers.is_empty()
    }

    /// Whether a caller waits for a key.
    fn awaits_values(&self) -> bool {
        self.watches.len() > self.ahead
    }

    /// Whether the next connection may start a broker. A stopped broker stays stopped until a caller asks for
    /// something. A worker only takes jobs and reports outcomes, so it can wait for that, unless it is about to
    /// exit.
    pub(crate) fn start(&self, closing: bool) -> BrokerStart {
        let asked = !self.deadlines.is_empty() || self.awaits_values();
        match self.consumers.is_empty() {
            _ if self.stopped && !asked && !closing => BrokerStart::No,
            false => BrokerStart::WhereItWas,
            true => BrokerStart::Anywhere,
        }
    }

    /// Whether it is connected and no caller waits for the broker.
    pub fn is_idle(&self) -> bool {
        self.link == LinkState::Up && !self.wants_connection()
    }

    /// Whether no call is open.
    pub fn is_settled(&self) -> bool {
        self.calls.is_empty()
    }

    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    pub fn delivery_sinks(&self) -> Vec<Arc<dyn DeliverySink>> {
        self.consumers.sinks()
    }

    pub fn poll_event(&mut self) -> Option<SessionEvent> {
        self.events.pop_front()
    }

    /// Starts a connection; the next bytes to write are the hello.
    pub fn connected(&mut self, now: Instant, leases: Vec<Lease>) {
        self.link = LinkState::Greeting;
        self.last_received = now;
        self.last_sent = now;
        self.max_frame_bytes = MAX_FRAME_BYTES;
        self.out.clear();
        // The broker parses little from an unknown client, so the first hello is small. Leases that don't fit
        // follow in a second one.
        let mut first: Vec<proto::Lease> = leases.into_iter().map(Into::into).collect();
        let rest = first.split_off(first.len().min(HELLO_LEASES));
        let continued = !rest.is_empty();
        let hello = proto::Hello {
            protocol_version: self.config.versions.highest,
            token: self.config.token.clone(),
            session: Bytes::copy_from_slice(&self.config.id.0),
            name: self.config.name.clone(),
            heartbeat_ms: self.config.heartbeat.as_millis() as u64,
            last_seq: if self.may_start_over(now) {
                0
            } else {
                self.last_seq()
            },
            leases: first,
            continued,
        };
        let more = proto::Hello {
            leases: rest,
            ..Default::default()
        };
        for hello in [Some(hello), continued.then_some(more)]
            .into_iter()
            .flatten()
        {
            let frame = proto::ToBroker {
                hello: Some(hello),
                ..Default::default()
            };
            encode_frame(&frame, &mut self.out);
        }
    }

    /// Whether nothing in this session was ever confirmed, and too little time has passed for a broker to
    /// forget it. A broker that does not know such a session holds no state of it: it was killed before its first
    /// sync. The session then says that it is new and sends everything again, instead of ending its calls as
    /// `Unknown`.
    fn may_start_over(&mut self, now: Instant) -> bool {
        let begun = *self.begun.get_or_insert(now);
        self.window_first_seq == 1 && now < begun + SURELY_REMEMBERED
    }

    /// Handles the loss of the connection, or a failed attempt.
    pub fn disconnected(&mut self, why: &str) {
        if self.link == LinkState::Up {
            for watch in self.watches.values() {
                self.events
                    .push_back(SessionEvent::Reachable(Arc::clone(&watch.sink), false));
            }
            let sinks = self.consumers.sinks().into_iter();
            self.events.extend(sinks.map(SessionEvent::OutOfReach));
        }
        // The broker has notified their askers, and will number new questions from the start.
        self.asks.clear();
        self.unsent_replies.clear();
        self.link = LinkState::Down;
        self.down_because = Some(why.to_owned());
        self.out.clear();
    }

    /// Ends all calls and notifies all watchers: no broker is available until somebody fixes the cause.
    pub fn fail_all(&mut self, error: &DriverError) {
        let mut ids: Vec<CallId> = self.calls.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.end_call(id, error.clone());
        }
        for watch in self.watches.values() {
            self.events
                .push_back(SessionEvent::Failed(Arc::clone(&watch.sink), error.clone()));
        }
        for sink in self.consumers.sinks() {
            self.events
                .push_back(SessionEvent::ConsumerFailed(sink, error.clone()));
        }
    }

    pub fn handle(&mut self, now: Instant, frame: proto::ToClient) -> Result<(), LinkEnd> {
        self.last_received = now;
        if let Some(close) = frame.close {
            self.stopped = close.why() == proto::close::Why::Stopping && !self.takes_over;
            return Err(self.link_end(close));
        }
        if let Some(welcome) = frame.welcome {
            self.welcomed(welcome)?;
        }
        if let LinkState::TakingOver(welcome) = &self.link {
            let welcome = (**welcome).clone();
            for answer in frame.answers {
                self.take_over_answered(&welcome, answer)?;
            }
            return Ok(());
        }
        if self.link != LinkState::Up {
            return Err(LinkEnd::Lost(
                "the broker answered before its welcome".into(),
            ));
        }
        if let Some(confirm) = frame.confirm {
            self.confirmed(confirm)?;
        }
        if !frame.deliveries.is_empty() {
            self.delivered(convert::all(frame.deliveries)?);
        }
        if !frame.cancels.is_empty() {
            self.asked_to_cancel(&convert::all(frame.cancels)?);
        }
        if !frame.asks.is_empty() {
            self.asked(frame.asks);
        }
        for value in frame.values {
            let (key, state) = value.try_into()?;
            self.value(key, state);
        }
        for refused in frame.refused_waits {
            self.wait_refused(&refused.try_into()?);
        }
        for answer in frame.answers {
            let (id, answer) = answer.try_into()?;
            self.answered(id, answer);
        }
        // A later version may add kinds of notices.
        let known = |notice: &proto::Notice| notice.notice.is_some();
        for notice in frame.notices.into_iter().filter(known) {
            if self.notices.len() == MAX_NOTICES {
                self.notices.pop_front();
            }
            self.notices.push_back(notice.try_into()?);
        }
        Ok(())
    }

    /// Ends calls past their deadline, and pings a silent broker.
    pub fn tick(&mut self, now: Instant) -> Result<(), LinkEnd> {
        while let Some((deadline, id)) = self.deadlines.first().copied()
            && deadline <= now
        {
            self.deadlines.pop_first();
            if let Some(watch) = self.watches.get(&WatchId(id)) {
                let timed_out = SessionEvent::TimedOut(Arc::clone(&watch.sink), self.trouble());
                self.events.push_back(timed_out);
                self.unwatch(WatchId(id));
            } else if self.calls.contains_key(&id) {
                let error = match self.trouble() {
                    Some(trouble) => DriverError::unavailable(trouble),
                    None => DriverError::silent(&self.config.broker),
                };
                self.end_call(id, error);
            }
        }
        if self.link == LinkState::Down {
            return Ok(());
        }
        if now >= self.last_received + self.heartbeat {
            return Err(LinkEnd::Lost(format!(
                "the broker was silent for {} s",
                self.heartbeat.as_secs_f32()
            )));
        }
        if self.link == LinkState::Up && now >= self.up_since + self.heartbeat {
            self.refused = None;
        }
        if self.link == LinkState::Up && now >= self.ping_due() {
            let ping = proto::ToBroker {
                ping: true,
                ..Default::default()
            };
            encode_frame(&ping, &mut self.out);
            self.last_sent = now;
        }
        Ok(())
    }

    fn ping_due(&self) -> Instant {
        // Silence on either side calls for a ping. Ours would end the session at the broker; the broker's
        // answer shows that it is alive.
        self.last_sent + self.heartbeat / 3
    }

    /// Returns the time at which to call `tick` next.
    pub fn next_deadline(&self) -> Option<Instant> {
        let call = self.deadlines.first().map(|(deadline, _)| *deadline);
        let link = match self.link {
            LinkState::Down => None,
            LinkState::Greeting | LinkState::TakingOver(_) => {
                Some(self.last_received + self.heartbeat)
            }
            LinkState::Up => Some(self.ping_due().min(self.last_received + self.heartbeat)),
        };
        match (call, link) {
            (Some(call), Some(link)) => Some(call.min(link)),
            (call, link) => call.or(link),
        }
    }

    /// Builds frames from the waiting calls, and returns the bytes to write. Call it again once they are
    /// written.
    pub fn next_bytes(&mut self, now: Instant) -> BytesMut {
        if self.link == LinkState::Up {
            // Progress goes before the commits, one of which may settle the job.
            self.write_progress();
            // Commits go before watches: a key may belong to a message that is published in the same frame.
            self.write_commits();
            self.write_requests();
        }
        if !self.out.is_empty() {
            self.last_sent = now;
        }
        std::mem::take(&mut self.out)
    }

    pub fn say_goodbye(&mut self) {
        if self.link == LinkState::Up {
            let goodbye = proto::ToBroker {
                goodbye: true,
                ..Default::default()
            };
            encode_frame(&goodbye, &mut self.out);
        }
    }

    // End of calls and watches.

    fn remove_call(&mut self, id: CallId) -> Option<Call> {
        let call = self.calls.remove(&id)?;
        if let Some(deadline) = call.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(call)
    }

    fn remove_watch(&mut self, id: WatchId) -> Option<Watch> {
        let watch = self.watches.remove(&id)?;
        self.ahead -= usize::from(watch.is_ahead);
        if let Some(deadline) = watch.deadline {
            self.deadlines.remove(&(deadline, id.0));
        }
        Some(watch)
    }

    /// Ends a call without an answer. Only this code knows whether it was sent.
    fn end_call(&mut self, id: CallId, mut error: DriverError) {
        let Some(call) = self.remove_call(id) else {
            return;
        };
        error.maybe_accepted = call.sent;
        self.events.push_back(match call.done {
            CallDone::Commit { done, .. } => SessionEvent::Committed(done, Err(error)),
            CallDone::Query { done, .. } => SessionEvent::Answered(done, Err(error)),
            CallDone::Probe { done } => SessionEvent::Probed(done, Err(error)),
        });
    }
}

#[cfg(test)]
mod tests;
