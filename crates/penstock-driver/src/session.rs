//! What a client knows and owes, through any number of connections. No socket, no thread, no clock:
//! the shell in `remote.rs` moves bytes and tells the time.
//!
//! ```text
//!     commit() ──► waiting ──► window ──► confirmed          each call ends once, by an Event
//!                  never sent  sent, has a number
//! ```
//!
//! A transaction gets its sequence number when it is first written out and keeps it until the broker
//! confirms it: after a reconnect the window is written again from its start, and the broker, which
//! remembers (session, number), applies nothing twice. A call whose deadline passes before that is
//! dropped from `waiting`. In the window its number cannot be dropped, for numbers have no gaps, but
//! should it have to be sent again it is sent empty: its caller was told that it has ended.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use penstock_message::{
    Answer, Delivery, Durability, Key, KeyState, Lease, Notice, Query, Receipt, SessionId,
};
use penstock_wire::{
    HELLO_LEASES, MAX_FRAME_BYTES, PROTOCOL_VERSION, WireError, convert, encode_frame, proto,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::dial::Start;
use crate::encoded::{Encoded, EncodedCommit, EncodedCommits, FRAME_TARGET_BYTES};
use crate::{DeliverySink, Done, DriverError, ValueSink, WatchId};

/// Transactions that are sent and not confirmed; the rest wait here, in order.
const MAX_IN_FLIGHT: usize = 1024;
/// Frames are made while less than this is waiting for the socket; the more that is made early, the
/// more of it may be out of date when it leaves.
const OUT_TARGET_BYTES: usize = 256 << 10;
/// A watch of a million keys is sent in portions.
const KEYS_A_FRAME: usize = 16 << 10;
/// Well within the ten minutes for which a broker remembers a session that has lost its connection.
const SURELY_REMEMBERED: Duration = Duration::from_secs(5 * 60);
/// Notices that nobody takes are not kept for ever.
const MAX_NOTICES: usize = 64;

/// What the shell carries out, without holding the lock that guards the session.
pub enum Event {
    Committed(Done<Vec<Receipt>>, Result<Vec<Receipt>, DriverError>),
    Answered(Done<Answer>, Result<Answer, DriverError>),
    Value(Arc<dyn ValueSink>, Key, KeyState),
    Reachable(Arc<dyn ValueSink>, bool),
    Failed(Arc<dyn ValueSink>, DriverError),
    TimedOut(Arc<dyn ValueSink>),
    Deliver(Arc<dyn DeliverySink>, Vec<Delivery>),
    OutOfReach(Arc<dyn DeliverySink>),
    LeasesKept(Arc<dyn DeliverySink>, Vec<Lease>),
    ConsumerFailed(Arc<dyn DeliverySink>, DriverError),
}

impl Event {
    pub fn carry_out(self) {
        match self {
            Self::Committed(done, outcome) => done(outcome),
            Self::Answered(done, outcome) => done(outcome),
            Self::Value(sink, key, KeyState::Pending) => sink.pending(key),
            Self::Value(sink, key, state) => sink.value(key, state),
            Self::Reachable(sink, reachable) => sink.reachable(reachable),
            Self::Failed(sink, error) => sink.failed(error),
            Self::TimedOut(sink) => sink.timed_out(),
            Self::Deliver(sink, deliveries) => sink.deliver(deliveries),
            Self::OutOfReach(sink) => sink.out_of_reach(),
            Self::LeasesKept(sink, kept) => sink.leases_kept(&kept),
            Self::ConsumerFailed(sink, error) => sink.failed(error),
        }
    }
}

/// Why a connection is over, as the broker or the protocol says.
#[derive(Clone, Debug, PartialEq)]
pub enum LinkEnd {
    /// Worth another try.
    Lost(String),
    /// No try will help until somebody mends something.
    Hopeless(HopelessEnd, String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HopelessEnd {
    Unauthorized,
    Invalid,
}

impl From<WireError> for LinkEnd {
    fn from(error: WireError) -> Self {
        Self::Lost(format!(
            "the broker sent what is no frame of this protocol: {error}"
        ))
    }
}

type CallId = u64;

/// The transactions of one `commit`, or one query.
struct Call {
    done: CallDone,
    deadline: Option<Instant>,
    /// Whether any of it was handed to a socket.
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
}

struct PendingTx {
    call: CallId,
    /// Its place in the call.
    index: usize,
    durability: Durability,
    tx: Encoded,
    /// Confirmed out of turn, so its call knows already.
    told: bool,
    receipt: Option<Receipt>,
}

struct Watch {
    sink: Arc<dyn ValueSink>,
    /// It asks how things are now, so a key that is pending has been told of.
    peeks: bool,
    deadline: Option<Instant>,
    /// Those that have not been told of yet, and some that have.
    keys: Vec<Key>,
    untold: usize,
}

struct Consumer {
    sink: Arc<dyn DeliverySink>,
    queues: Vec<String>,
    /// Deliveries that the broker may still send.
    credit: u32,
    /// The part of it that the broker was not told of.
    unsent_credit: u32,
    stopped: bool,
    changed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    Down,
    /// Hello is on its way.
    Greeting,
    Up,
}

pub struct SessionConfig {
    pub id: SessionId,
    pub token: Bytes,
    pub name: String,
    pub heartbeat: Duration,
    /// How people call the broker in messages: its URL.
    pub broker: String,
}

pub struct Session {
    config: SessionConfig,
    link: Link,
    heartbeat: Duration,
    max_frame_bytes: usize,
    last_received: Instant,
    last_sent: Instant,
    /// The broker has said that it was told to end, and none was there since.
    stopped: bool,
    /// Why there is no link, when there was one or one was tried.
    down_because: Option<String>,
    out: BytesMut,

    next_id: u64,
    calls: FxHashMap<CallId, Call>,
    deadlines: BTreeSet<(Instant, CallId)>,

    waiting: VecDeque<PendingTx>,
    window: VecDeque<PendingTx>,
    window_first_seq: u64,
    /// When this session first said hello.
    begun: Option<Instant>,
    /// What of the window was not written to this connection: (index, part).
    unwritten: (usize, usize),

    watches: FxHashMap<WatchId, Watch>,
    watchers: FxHashMap<Key, Vec<WatchId>>,
    unsent_keys: VecDeque<Key>,
    unsent_unwatched: FxHashSet<Key>,

    unsent_queries: VecDeque<CallId>,
    consumer: Option<Consumer>,
    report: Option<proto::Report>,
    report_changed: bool,
    notices: VecDeque<Notice>,
    events: VecDeque<Event>,
}

impl Session {
    pub fn new(config: SessionConfig, now: Instant) -> Self {
        Self {
            heartbeat: config.heartbeat,
            config,
            link: Link::Down,
            max_frame_bytes: MAX_FRAME_BYTES,
            last_received: now,
            last_sent: now,
            stopped: false,
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
            watchers: FxHashMap::default(),
            unsent_keys: VecDeque::new(),
            unsent_unwatched: FxHashSet::default(),
            unsent_queries: VecDeque::new(),
            consumer: None,
            report: None,
            report_changed: false,
            notices: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    // What callers ask for.

    pub fn commit(
        &mut self,
        txs: Vec<Encoded>,
        durability: Durability,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
    ) {
        if txs.is_empty() {
            self.events
                .push_back(Event::Committed(done, Ok(Vec::new())));
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
                told: false,
                receipt: None,
            }));
    }

    pub fn query(&mut self, query: Query, deadline: Instant, done: Done<Answer>) {
        let call = self.add_call(CallDone::Query { done, query }, Some(deadline));
        self.unsent_queries.push_back(call);
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

    pub fn watch(
        &mut self,
        keys: Vec<Key>,
        peeks: bool,
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
            // Within a frame keys are watched before others are given up.
            self.unsent_unwatched.remove(key);
        }
        // Also those that are watched already, so that the new sink hears that they are pending.
        self.unsent_keys.extend(keys.iter().cloned());
        let untold = keys.len();
        let watch = Watch {
            sink,
            peeks,
            deadline,
            keys,
            untold,
        };
        self.watches.insert(id, watch);
        id
    }

    pub fn unwatch(&mut self, id: WatchId) {
        let Some(watch) = self.remove_watch(id) else {
            return;
        };
        for key in watch.keys {
            self.stop_watching(key, |watcher| watcher == id);
        }
    }

    /// Takes some of a key's watchers away; without any left, the broker need not tell of it.
    fn stop_watching(&mut self, key: Key, leaves: impl Fn(WatchId) -> bool) {
        let Some(watchers) = self.watchers.get_mut(&key) else {
            return;
        };
        watchers.retain(|watcher| !leaves(*watcher));
        if watchers.is_empty() {
            self.watchers.remove(&key);
            if self.link == Link::Up {
                self.unsent_unwatched.insert(key);
            }
        }
    }

    pub fn consume(&mut self, queues: &[String], add_credit: u32, sink: Arc<dyn DeliverySink>) {
        let consumer = self.consumer.get_or_insert_with(|| Consumer {
            sink: Arc::clone(&sink),
            queues: Vec::new(),
            credit: 0,
            unsent_credit: 0,
            stopped: false,
            changed: false,
        });
        consumer.sink = sink;
        consumer.queues = queues.to_vec();
        consumer.credit += add_credit;
        consumer.unsent_credit += add_credit;
        consumer.stopped = false;
        consumer.changed = true;
    }

    pub fn stop_consuming(&mut self) {
        if let Some(consumer) = &mut self.consumer {
            consumer.credit = 0;
            consumer.unsent_credit = 0;
            consumer.changed |= !consumer.stopped;
            consumer.stopped = true;
        }
    }

    pub fn report(&mut self, slots: u32, busy: u32) {
        let report = Some(proto::Report { slots, busy });
        self.report_changed |= self.report != report;
        self.report = report;
    }

    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.drain(..).collect()
    }

    /// Why there is no connection, when there is none.
    pub fn trouble(&self) -> Option<String> {
        let broker = &self.config.broker;
        match (self.link, &self.down_because) {
            (Link::Up, _) => None,
            (_, Some(why)) => Some(format!("no connection to {broker}: {why}")),
            (_, None) => Some(format!("no connection to {broker}")),
        }
    }

    // What the shell asks and tells.

    /// Whether there is anything to do that needs a broker.
    pub fn wants_link(&self) -> bool {
        !self.calls.is_empty() || !self.watches.is_empty() || self.consumer.is_some()
    }

    /// Whether the next connection may begin with a start of the broker. One that was stopped stays so
    /// until somebody asks for something: a worker, which has only work to take and outcomes to tell, can
    /// wait for that, unless it is about to end.
    pub(crate) fn start(&self, closing: bool) -> Start {
        let asked = !self.deadlines.is_empty() || !self.watches.is_empty();
        match self.consumer {
            _ if self.stopped && !asked && !closing => Start::No,
            Some(_) => Start::WhereItWas,
            None => Start::Anywhere,
        }
    }

    /// Connected, and nobody waits for anything from the broker.
    pub fn is_idle(&self) -> bool {
        self.link == Link::Up && !self.wants_link()
    }

    /// Nothing is unconfirmed that a caller waits for.
    pub fn is_settled(&self) -> bool {
        self.calls.is_empty()
    }

    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    pub fn delivery_sink(&self) -> Option<Arc<dyn DeliverySink>> {
        self.consumer
            .as_ref()
            .map(|consumer| Arc::clone(&consumer.sink))
    }

    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// A connection stands; the next bytes out are the hello.
    pub fn connected(&mut self, now: Instant, leases: Vec<Lease>) {
        self.link = Link::Greeting;
        self.last_received = now;
        self.last_sent = now;
        self.max_frame_bytes = MAX_FRAME_BYTES;
        self.out.clear();
        // The broker parses little of a stranger, so the first hello is small; what leases it has no
        // room for follow in a second one.
        let mut first: Vec<proto::Lease> = leases.into_iter().map(Into::into).collect();
        let rest = first.split_off(first.len().min(HELLO_LEASES));
        let continued = !rest.is_empty();
        let hello = proto::Hello {
            protocol_version: PROTOCOL_VERSION,
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

    /// Nothing of this session was ever confirmed, and no broker has had the time to forget it. So one
    /// that does not know it has nothing of it: it was killed before its first sync. Such a session says
    /// that it is new, and all of it is sent again, instead of ending as `Unknown`.
    fn may_start_over(&mut self, now: Instant) -> bool {
        let begun = *self.begun.get_or_insert(now);
        self.window_first_seq == 1 && now < begun + SURELY_REMEMBERED
    }

    /// The connection is gone, or none could be made.
    pub fn disconnected(&mut self, why: &str) {
        if self.link == Link::Up {
            for watch in self.watches.values() {
                self.events
                    .push_back(Event::Reachable(Arc::clone(&watch.sink), false));
            }
            if let Some(consumer) = &self.consumer {
                self.events
                    .push_back(Event::OutOfReach(Arc::clone(&consumer.sink)));
            }
        }
        self.link = Link::Down;
        self.down_because = Some(why.to_owned());
        self.out.clear();
    }

    /// Ends all calls and tells all watchers: no broker can be had until somebody mends something.
    pub fn fail_all(&mut self, error: &DriverError) {
        let mut ids: Vec<CallId> = self.calls.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.end_call(id, error.clone());
        }
        for watch in self.watches.values() {
            self.events
                .push_back(Event::Failed(Arc::clone(&watch.sink), error.clone()));
        }
        if let Some(consumer) = &self.consumer {
            let sink = Arc::clone(&consumer.sink);
            self.events
                .push_back(Event::ConsumerFailed(sink, error.clone()));
        }
    }

    pub fn handle(&mut self, now: Instant, frame: proto::ToClient) -> Result<(), LinkEnd> {
        self.last_received = now;
        if let Some(close) = frame.close {
            self.stopped = close.why() == proto::close::Why::Stopping;
            return Err(self.link_end(close));
        }
        if let Some(welcome) = frame.welcome {
            self.welcomed(welcome)?;
        }
        if self.link != Link::Up {
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
        for value in frame.values {
            let (key, state) = value.try_into()?;
            self.value(key, state);
        }
        for answer in frame.answers {
            let (id, answer) = answer.try_into()?;
            self.answered(id, answer);
        }
        for notice in frame.notices {
            if self.notices.len() == MAX_NOTICES {
                self.notices.pop_front();
            }
            self.notices.push_back(notice.try_into()?);
        }
        Ok(())
    }

    /// Ends what has no more time, and asks for a sign of life when it has been silent.
    pub fn tick(&mut self, now: Instant) -> Result<(), LinkEnd> {
        while let Some((deadline, id)) = self.deadlines.first().copied()
            && deadline <= now
        {
            self.deadlines.pop_first();
            if let Some(watch) = self.watches.get(&WatchId(id)) {
                self.events
                    .push_back(Event::TimedOut(Arc::clone(&watch.sink)));
                self.unwatch(WatchId(id));
            } else if let Some(call) = self.calls.get(&id) {
                let maybe_accepted = call.sent;
                let reason = self.trouble().unwrap_or_else(|| {
                    format!("the broker at {} did not answer", self.config.broker)
                });
                self.end_call(
                    id,
                    DriverError::Unavailable {
                        reason,
                        maybe_accepted,
                    },
                );
            }
        }
        if self.link == Link::Down {
            return Ok(());
        }
        if now >= self.last_received + self.heartbeat {
            return Err(LinkEnd::Lost(format!(
                "the broker was silent for {} s",
                self.heartbeat.as_secs_f32()
            )));
        }
        if self.link == Link::Up && now >= self.ping_due() {
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
        // Silence of either side asks for a ping: ours would end the session at the broker, the
        // broker's is what tells us whether it lives.
        self.last_sent + self.heartbeat / 3
    }

    /// When `tick` is to be called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        let call = self.deadlines.first().map(|(deadline, _)| *deadline);
        let link = match self.link {
            Link::Down => None,
            Link::Greeting => Some(self.last_received + self.heartbeat),
            Link::Up => Some(self.ping_due().min(self.last_received + self.heartbeat)),
        };
        match (call, link) {
            (Some(call), Some(link)) => Some(call.min(link)),
            (call, link) => call.or(link),
        }
    }

    /// Makes frames of what waits, and gives what is to be written. Call again once it is written.
    pub fn take_out(&mut self, now: Instant) -> BytesMut {
        if self.link == Link::Up {
            // Commits go first: a key may belong to a message that is published in the same breath.
            self.write_commits();
            self.write_requests();
        }
        if !self.out.is_empty() {
            self.last_sent = now;
        }
        std::mem::take(&mut self.out)
    }

    pub fn say_goodbye(&mut self) {
        if self.link == Link::Up {
            let goodbye = proto::ToBroker {
                goodbye: true,
                ..Default::default()
            };
            encode_frame(&goodbye, &mut self.out);
        }
    }

    // How it works: out.

    fn last_seq(&self) -> u64 {
        self.window_first_seq + self.window.len() as u64 - 1
    }

    fn write_commits(&mut self) {
        let mut frame = EncodedCommits::default();
        let mut frame_bytes = 0;
        while self.out.len() + frame_bytes < OUT_TARGET_BYTES {
            if self.unwritten.0 == self.window.len() && !self.admit() {
                break;
            }
            let (index, part) = self.unwritten;
            let pending = &mut self.window[index];
            let first_seq = self.window_first_seq + index as u64;
            let durability = proto::Durability::from(pending.durability).into();
            let mut kind = proto::Part::Whole;
            let bytes = match self.calls.get_mut(&pending.call) {
                // Its deadline passed between two connections.
                None if part == 0 => {
                    pending.tx = Encoded::Whole(Bytes::new());
                    Bytes::new()
                }
                call => {
                    if let Some(call) = call {
                        call.sent = true;
                    }
                    match &pending.tx {
                        Encoded::Whole(bytes) => bytes.clone(),
                        Encoded::Parts(parts) => {
                            kind = match part + 1 == parts.len() {
                                true => proto::Part::Last,
                                false => proto::Part::More,
                            };
                            parts[part].clone()
                        }
                    }
                }
            };
            self.unwritten = match kind {
                proto::Part::More => (index, part + 1),
                proto::Part::Whole | proto::Part::Last => (index + 1, 0),
            };

            if kind != proto::Part::Whole || frame_bytes + bytes.len() > FRAME_TARGET_BYTES {
                self.write_commit_frame(&mut frame);
                frame_bytes = 0;
            }
            frame_bytes += bytes.len();
            match frame.commits.last_mut() {
                Some(commit) if commit.durability == durability => commit.txs.push(bytes),
                _ => frame.commits.push(EncodedCommit {
                    first_seq,
                    durability,
                    txs: vec![bytes],
                    part: kind.into(),
                }),
            }
            if kind != proto::Part::Whole {
                self.write_commit_frame(&mut frame);
                frame_bytes = 0;
            }
        }
        self.write_commit_frame(&mut frame);
    }

    fn write_commit_frame(&mut self, frame: &mut EncodedCommits) {
        if !frame.commits.is_empty() {
            encode_frame(frame, &mut self.out);
            frame.commits.clear();
        }
    }

    /// Moves the next transaction that somebody still waits for into the window, where it has a number.
    fn admit(&mut self) -> bool {
        while self.window.len() < MAX_IN_FLIGHT {
            let Some(pending) = self.waiting.pop_front() else {
                return false;
            };
            if !self.calls.contains_key(&pending.call) {
                continue;
            }
            let bytes = pending.tx.largest_part_bytes();
            if bytes + FRAME_OVERHEAD_BYTES > self.max_frame_bytes {
                let reason = format!(
                    "one operation of {bytes} bytes is over the broker's limit of {} for a frame",
                    self.max_frame_bytes
                );
                self.end_call(pending.call, DriverError::TooLarge { reason });
                continue;
            }
            self.window.push_back(pending);
            return true;
        }
        false
    }

    fn write_requests(&mut self) {
        while !self.unsent_keys.is_empty() && self.out.len() < OUT_TARGET_BYTES {
            let portion = self.unsent_keys.len().min(KEYS_A_FRAME);
            let keys: Vec<proto::KeyRef> = self
                .unsent_keys
                .drain(..portion)
                // Given up, or told, before it was asked for.
                .filter(|key| self.watchers.contains_key(key))
                .map(Into::into)
                .collect();
            if !keys.is_empty() {
                self.write_watch(proto::Watch {
                    keys,
                    unwatch: Vec::new(),
                });
            }
        }
        if self.unsent_keys.is_empty() && !self.unsent_unwatched.is_empty() {
            let unwatch = self.unsent_unwatched.drain().map(Into::into).collect();
            self.write_watch(proto::Watch {
                keys: Vec::new(),
                unwatch,
            });
        }

        let mut frame = proto::ToBroker::default();
        while let Some(id) = self.unsent_queries.pop_front() {
            if let Some(call) = self.calls.get_mut(&id)
                && let CallDone::Query { query, .. } = &call.done
            {
                call.sent = true;
                frame.queries.push((id, query.clone()).into());
            }
        }
        if let Some(consumer) = &mut self.consumer
            && consumer.changed
        {
            consumer.changed = false;
            frame.consume = Some(proto::Consume {
                queues: consumer.queues.clone(),
                add_credit: std::mem::take(&mut consumer.unsent_credit),
                stop: consumer.stopped,
            });
        }
        if std::mem::take(&mut self.report_changed) {
            frame.report = self.report;
        }
        if frame != proto::ToBroker::default() {
            encode_frame(&frame, &mut self.out);
        }
    }

    fn write_watch(&mut self, watch: proto::Watch) {
        let frame = proto::ToBroker {
            watch: Some(watch),
            ..Default::default()
        };
        encode_frame(&frame, &mut self.out);
    }

    // How it works: in.

    fn welcomed(&mut self, welcome: proto::Welcome) -> Result<(), LinkEnd> {
        if welcome.protocol_version != PROTOCOL_VERSION {
            return Err(LinkEnd::Hopeless(
                HopelessEnd::Invalid,
                format!(
                    "the broker at {} (version {}) speaks version {} of the protocol, this client version {PROTOCOL_VERSION}; install the same version of penstock on both sides",
                    self.config.broker, welcome.broker_version, welcome.protocol_version
                ),
            ));
        }
        self.link = Link::Up;
        self.stopped = false;
        self.down_because = None;
        self.heartbeat = Duration::from_millis(welcome.heartbeat_ms);
        self.max_frame_bytes = welcome.max_frame_bytes as usize;
        if welcome.forgotten {
            while !self.window.is_empty() {
                self.pop_confirmed(Receipt::Unknown);
            }
            self.window_first_seq = welcome.applied_through + 1;
        }
        // The broker names no number here whose receipt would say anything else.
        while self.window_first_seq <= welcome.applied_through && !self.window.is_empty() {
            self.pop_confirmed(APPLIED);
        }
        self.unwritten = (0, 0);

        self.unsent_keys = self.watchers.keys().cloned().collect();
        self.unsent_unwatched.clear();
        for watch in self.watches.values() {
            self.events
                .push_back(Event::Reachable(Arc::clone(&watch.sink), true));
        }
        self.unsent_queries = self
            .calls
            .iter()
            .filter(|(_, call)| matches!(call.done, CallDone::Query { .. }))
            .map(|(id, _)| *id)
            .collect();
        self.report_changed = self.report.is_some();
        if let Some(consumer) = &mut self.consumer {
            consumer.unsent_credit = consumer.credit;
            consumer.changed = true;
            let kept = convert::all(welcome.leases)?;
            self.events
                .push_back(Event::LeasesKept(Arc::clone(&consumer.sink), kept));
        }
        Ok(())
    }

    fn confirmed(&mut self, confirm: proto::Confirm) -> Result<(), LinkEnd> {
        for receipt in confirm.receipts {
            let (seq, receipt) = receipt.try_into()?;
            if let Some(pending) = self.in_window(seq) {
                pending.receipt = Some(receipt);
            }
        }
        for seq in confirm.early {
            if let Some(pending) = self.in_window(seq)
                && !pending.told
            {
                pending.told = true;
                let (call, index) = (pending.call, pending.index);
                let receipt = pending.receipt.clone().unwrap_or(APPLIED);
                self.settle(call, index, receipt);
            }
        }
        while self.window_first_seq <= confirm.through && !self.window.is_empty() {
            self.pop_confirmed(APPLIED);
        }
        Ok(())
    }

    fn in_window(&mut self, seq: u64) -> Option<&mut PendingTx> {
        let index = seq.checked_sub(self.window_first_seq)?;
        self.window.get_mut(usize::try_from(index).ok()?)
    }

    /// Takes the first of the window out, with its own receipt where it has one.
    fn pop_confirmed(&mut self, otherwise: Receipt) {
        let Some(pending) = self.window.pop_front() else {
            return;
        };
        self.window_first_seq += 1;
        self.unwritten = match self.unwritten {
            (0, _) => (0, 0),
            (index, part) => (index - 1, part),
        };
        if !pending.told {
            let receipt = pending.receipt.unwrap_or(otherwise);
            self.settle(pending.call, pending.index, receipt);
        }
    }

    fn settle(&mut self, id: CallId, index: usize, receipt: Receipt) {
        let Some(call) = self.calls.get_mut(&id) else {
            return;
        };
        let CallDone::Commit {
            receipts,
            unconfirmed,
            ..
        } = &mut call.done
        else {
            return;
        };
        receipts[index] = receipt;
        *unconfirmed -= 1;
        if *unconfirmed == 0
            && let Some(CallDone::Commit { done, receipts, .. }) = self.remove_call(id)
        {
            self.events.push_back(Event::Committed(done, Ok(receipts)));
        }
    }

    fn answered(&mut self, id: CallId, answer: Answer) {
        match self.calls.get(&id) {
            Some(Call {
                done: CallDone::Query { .. },
                ..
            }) => {}
            _ => return,
        }
        if let Some(CallDone::Query { done, .. }) = self.remove_call(id) {
            self.events.push_back(Event::Answered(done, Ok(answer)));
        }
    }

    fn delivered(&mut self, deliveries: Vec<Delivery>) {
        if let Some(consumer) = &mut self.consumer {
            consumer.credit = consumer.credit.saturating_sub(deliveries.len() as u32);
            self.events
                .push_back(Event::Deliver(Arc::clone(&consumer.sink), deliveries));
        }
    }

    fn value(&mut self, key: Key, state: KeyState) {
        let pending = state == KeyState::Pending;
        let told = match pending {
            true => self.watchers.get(&key).cloned(),
            false => self.watchers.remove(&key),
        };
        let mut peeked = Vec::new();
        for id in told.into_iter().flatten() {
            let Some(watch) = self.watches.get_mut(&id) else {
                continue;
            };
            let sink = Arc::clone(&watch.sink);
            self.events
                .push_back(Event::Value(sink, key.clone(), state.clone()));
            if pending && !watch.peeks {
                continue;
            }
            if pending {
                peeked.push(id);
            }
            watch.untold -= 1;
            if watch.untold == 0 {
                self.remove_watch(id);
            }
        }
        if !peeked.is_empty() {
            self.stop_watching(key, |watcher| peeked.contains(&watcher));
        }
    }

    // How it works: ends.

    fn remove_call(&mut self, id: CallId) -> Option<CallDone> {
        let call = self.calls.remove(&id)?;
        if let Some(deadline) = call.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(call.done)
    }

    fn remove_watch(&mut self, id: WatchId) -> Option<Watch> {
        let watch = self.watches.remove(&id)?;
        if let Some(deadline) = watch.deadline {
            self.deadlines.remove(&(deadline, id.0));
        }
        Some(watch)
    }

    fn end_call(&mut self, id: CallId, error: DriverError) {
        match self.remove_call(id) {
            Some(CallDone::Commit { done, .. }) => {
                self.events.push_back(Event::Committed(done, Err(error)));
            }
            Some(CallDone::Query { done, .. }) => {
                self.events.push_back(Event::Answered(done, Err(error)));
            }
            None => {}
        }
    }

    fn link_end(&self, close: proto::Close) -> LinkEnd {
        use proto::close::Why;
        let broker = &self.config.broker;
        let text = close.text;
        match Why::try_from(close.why) {
            Ok(Why::Unauthorized) => LinkEnd::Hopeless(
                HopelessEnd::Unauthorized,
                format!("the broker at {broker} refused this client's token: {text}"),
            ),
            Ok(Why::Version) => LinkEnd::Hopeless(
                HopelessEnd::Invalid,
                format!("the broker at {broker} speaks another version of the protocol: {text}"),
            ),
            Ok(Why::Protocol) => LinkEnd::Lost(format!("the broker refused a frame: {text}")),
            Ok(Why::Fenced) => LinkEnd::Lost("a newer connection of this session took over".into()),
            Ok(Why::Stopping) => LinkEnd::Lost("the broker was stopped".into()),
            Ok(Why::TooManyClients) => LinkEnd::Lost(text),
            Ok(Why::Failed) => LinkEnd::Lost(format!("the broker's disk failed: {text}")),
            Err(_) => LinkEnd::Lost(text),
        }
    }
}

const APPLIED: Receipt = Receipt::Applied {
    skipped: Vec::new(),
};

/// What surrounds one part in its frame.
const FRAME_OVERHEAD_BYTES: usize = 64;

#[cfg(test)]
mod tests;
