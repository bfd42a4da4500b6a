use std::collections::HashMap;
use std::sync::Mutex;

use penstock_message::{
    MessageId, Op, Refusal, TaskSelection, Tx, Value, ValueStatus, WaitRefusal,
};
use penstock_wire::{Decoder, PROTOCOL_VERSION, native};

use super::outgoing::MAX_IN_FLIGHT;
use super::*;
use crate::encoded::{FRAME_TARGET_BYTES, Form};

mod capabilities;
mod versions;

/// Session whose peer is the test. Its frames, and the outcomes of its calls, are recorded as text.
struct SessionBench {
    session: DriverSession,
    start: Instant,
    now: Instant,
    log: Arc<Mutex<Vec<String>>>,
    keys: HashMap<&'static str, MessageId>,
}

const HEARTBEAT_MS: u64 = 15_000;

impl SessionBench {
    fn new() -> Self {
        Self::of_versions(Versions::TODAY, false)
    }

    fn of_versions(versions: Versions, takes_over: bool) -> Self {
        let now = Instant::now();
        let config = SessionConfig {
            id: SessionId([7; 16]),
            token: Bytes::from_static(b"secret"),
            name: "test".into(),
            heartbeat: Duration::from_millis(HEARTBEAT_MS),
            broker: "unix:test".into(),
            hash_seed: 0,
            versions,
            takes_over,
        };
        Self {
            session: DriverSession::new(config, now),
            start: now,
            now,
            log: Arc::default(),
            keys: HashMap::new(),
        }
    }

    fn connected() -> Self {
        let mut bench = Self::new();
        bench.connect(0);
        bench
    }

    /// Answers the hello as an engine with these capabilities.
    fn connect_to(&mut self, capabilities: &Capabilities) {
        self.session.connected(self.now, Vec::new());
        self.sent();
        self.welcome(proto::Welcome {
            capabilities: Some(capabilities.into()),
            ..Default::default()
        });
    }

    fn connect(&mut self, applied_through: u64) {
        self.session.connected(self.now, Vec::new());
        self.sent();
        self.welcome(proto::Welcome {
            applied_through,
            ..Default::default()
        });
    }

    fn welcome(&mut self, welcome: proto::Welcome) {
        self.hear(proto::ToClient {
            welcome: Some(proto::Welcome {
                protocol_version: PROTOCOL_VERSION,
                ..welcome_of(0, welcome)
            }),
            ..Default::default()
        });
    }

    /// Commits one empty transaction, with a deadline in milliseconds after the start.
    fn commit(&mut self, name: &'static str, deadline_ms: Option<u64>) {
        self.commit_txs(name, vec![Tx::default()], Durability::Disk, deadline_ms);
    }

    fn commit_txs(
        &mut self,
        name: &'static str,
        txs: Vec<Tx>,
        durability: Durability,
        deadline_ms: Option<u64>,
    ) {
        let txs = txs.into_iter().map(Encoded::new).collect();
        self.commit_encoded(name, txs, durability, deadline_ms);
    }

    fn commit_encoded(
        &mut self,
        name: &'static str,
        txs: Vec<Encoded>,
        durability: Durability,
        deadline_ms: Option<u64>,
    ) {
        let log = Arc::clone(&self.log);
        let done = Box::new(move |outcome: Result<Vec<Receipt>, DriverError>| {
            let text = match outcome {
                Err(error) => outcome_text(&error),
                Ok(receipts) => receipts
                    .iter()
                    .map(receipt_text)
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            log.lock().unwrap().push(format!("{name}: {text}"));
        });
        let deadline = deadline_ms.map(|ms| self.start + Duration::from_millis(ms));
        self.session.commit(txs, durability, deadline, done);
    }

    fn watch(
        &mut self,
        name: &'static str,
        keys: &[&'static str],
        deadline_ms: Option<u64>,
    ) -> WatchId {
        let named: Vec<(MessageId, &'static str)> =
            keys.iter().map(|key| (self.id(key), *key)).collect();
        let keys = named.iter().map(|(id, _)| Key::Result(*id)).collect();
        let sink = Arc::new(LoggingSink {
            name,
            keys: named.into_iter().collect(),
            log: Arc::clone(&self.log),
        });
        let deadline = deadline_ms.map(|ms| self.start + Duration::from_millis(ms));
        self.session
            .watch(keys, name == "peek", None, deadline, sink)
    }

    /// Waits inside a job.
    fn wait_inside(
        &mut self,
        job: &'static str,
        name: &'static str,
        keys: &[&'static str],
    ) -> WatchId {
        let waiter = self.id(job);
        let named: Vec<(MessageId, &'static str)> =
            keys.iter().map(|key| (self.id(key), *key)).collect();
        let keys = named.iter().map(|(id, _)| Key::Result(*id)).collect();
        let sink = Arc::new(LoggingSink {
            name,
            keys: named.into_iter().collect(),
            log: Arc::clone(&self.log),
        });
        self.session.watch(keys, false, Some(waiter), None, sink)
    }

    fn refuse(&mut self, job: &'static str, key: &'static str) {
        let (waiter, key) = (self.id(job), self.id(key));
        let refused = RefusedWait {
            key: Key::Result(key),
            waiter,
            why: WaitRefusal::Cycle,
            jobs: Vec::new(),
            left_out: 0,
        };
        self.hear(proto::ToClient {
            refused_waits: vec![refused.into()],
            ..Default::default()
        });
    }

    fn id(&mut self, key: &'static str) -> MessageId {
        let mut id = [0; 16];
        id[..key.len()].copy_from_slice(key.as_bytes());
        self.keys.insert(key, MessageId(id));
        MessageId(id)
    }

    fn tell(&mut self, key: &'static str, state: KeyState) {
        let id = self.id(key);
        self.hear(proto::ToClient {
            values: vec![(Key::Result(id), state).into()],
            ..Default::default()
        });
    }

    fn confirm(&mut self, through: u64, receipts: Vec<(u64, Receipt)>, early: Vec<u64>) {
        self.hear(proto::ToClient {
            confirm: Some(proto::Confirm {
                through,
                receipts: receipts.into_iter().map(Into::into).collect(),
                early,
            }),
            ..Default::default()
        });
    }

    fn hear(&mut self, frame: proto::ToClient) {
        self.session.handle(self.now, frame).unwrap();
    }

    fn at(&mut self, ms: u64) -> Result<(), LinkEnd> {
        self.now = self.start + Duration::from_millis(ms);
        self.session.tick(self.now)
    }

    /// Returns the frames written since the last call, as text.
    fn sent(&mut self) -> String {
        let mut decoder = Decoder::<proto::ToBroker>::new(MAX_FRAME_BYTES);
        loop {
            let out = self.session.next_bytes(self.now);
            if out.is_empty() {
                break;
            }
            decoder.extend(&out);
        }
        let mut said = Vec::new();
        while let Some(frame) = decoder.next_message().unwrap() {
            said.extend(self.frame_text(frame));
        }
        said.join("; ")
    }

    fn frame_text(&self, frame: proto::ToBroker) -> Vec<String> {
        let mut said = Vec::new();
        if let Some(hello) = frame.hello {
            let more = if hello.continued { ", more" } else { "" };
            let used = match hello.last_seq {
                0 => String::new(),
                seq => format!(", used {seq}"),
            };
            said.push(format!("hello {} leases{used}{more}", hello.leases.len()));
        }
        for commit in frame.commits {
            let last = commit.first_seq + commit.txs.len() as u64 - 1;
            let txs = convert::decode_txs(commit.txs.clone()).unwrap();
            let ops: usize = txs.iter().map(|tx| tx.ops.len()).sum();
            let part = match commit.part() {
                proto::Part::Whole => "",
                proto::Part::More => " more",
                proto::Part::Last => " last",
            };
            said.push(format!(
                "commit {}-{last} {ops} ops{part}",
                commit.first_seq
            ));
        }
        let name = |key: &proto::KeyRef| {
            let key = Key::try_from(key.clone()).unwrap();
            let name = self.keys.iter().find(|(_, id)| Key::Result(**id) == key);
            name.map_or_else(|| format!("{key:?}"), |(name, _)| (*name).to_owned())
        };
        if let Some(watch) = frame.watch {
            let mut keys: Vec<String> = watch.keys.iter().map(name).collect();
            keys.sort();
            keys.extend(watch.unwatch.iter().map(|key| format!("not {}", name(key))));
            let over = watch.wait_over.iter();
            keys.extend(over.map(|key| format!("over {}", name(key))));
            let waiter = self
                .keys
                .iter()
                .find(|(_, id)| id.0[..] == watch.waiter[..]);
            keys.extend(waiter.map(|(name, _)| format!("in {name}")));
            said.push(format!("watch {}", keys.join(" ")));
        }
        said.extend(
            frame
                .queries
                .iter()
                .map(|query| format!("query {}", query.id)),
        );
        for consumer in frame.consumers {
            let number = match consumer.consumer {
                0 => String::new(),
                number => format!("/{number}"),
            };
            let tasks = consumer.tasks.map_or(String::new(), |tasks| {
                let names: Vec<String> = tasks.tasks.into_iter().map(|task| task.name).collect();
                format!(" tasks {}", names.join(","))
            });
            said.push(match consumer.stop {
                true => format!("consume{number} stop"),
                false => format!(
                    "consume{number} {}{tasks} +{}",
                    consumer.queues.join(","),
                    consumer.add_credit
                ),
            });
        }
        if let Some(report) = frame.report {
            said.push(format!("report {}/{}", report.busy, report.slots));
        }
        for progress in frame.progress {
            let text = String::from_utf8_lossy(&progress.body);
            said.push(format!("progress {text}"));
        }
        for reply in frame.replies {
            let text = String::from_utf8_lossy(&reply.reply);
            said.push(format!("reply {} {text}", reply.id));
        }
        if frame.ping {
            said.push("ping".into());
        }
        if frame.goodbye {
            said.push("goodbye".into());
        }
        said
    }

    /// Returns the outcomes since the last call.
    fn heard(&mut self) -> String {
        while let Some(event) = self.session.poll_event() {
            event.carry_out();
        }
        std::mem::take(&mut *self.log.lock().unwrap()).join("; ")
    }
}

/// Welcome of a broker that continues this version.
fn welcome_of(protocol_version: u32, welcome: proto::Welcome) -> proto::Welcome {
    proto::Welcome {
        protocol_version,
        heartbeat_ms: HEARTBEAT_MS,
        max_frame_bytes: MAX_FRAME_BYTES as u64,
        capabilities: welcome
            .capabilities
            .or_else(|| Some(native::on_disk().into())),
        ..welcome
    }
}

fn receipt_text(receipt: &Receipt) -> String {
    match receipt {
        Receipt::Applied(applied) if applied.is_plain() => "applied".into(),
        Receipt::Applied(applied) => format!("skipped {:?}", applied.skipped),
        Receipt::Refused { why, .. } => format!("{why:?}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

struct LoggingSink {
    name: &'static str,
    keys: HashMap<MessageId, &'static str>,
    log: Arc<Mutex<Vec<String>>>,
}

impl LoggingSink {
    fn log(&self, key: Key, what: &str) {
        let Key::Result(id) = key else {
            panic!("a key that nobody watches")
        };
        self.say(&format!("{} {what}", self.keys[&id]));
    }

    fn say(&self, what: &str) {
        self.log
            .lock()
            .unwrap()
            .push(format!("{}: {what}", self.name));
    }
}

impl ValueSink for LoggingSink {
    fn value(&self, key: Key, state: KeyState) {
        match state {
            KeyState::Present(value) => self.log(key, &String::from_utf8_lossy(&value.body)),
            KeyState::Gone => self.log(key, "gone"),
            KeyState::Pending => self.log(key, "pending, as a value"),
        }
    }

    fn pending(&self, key: Key) {
        self.log(key, "pending");
    }

    fn reachable(&self, reachable: bool) {
        self.say(if reachable {
            "in reach"
        } else {
            "out of reach"
        });
    }

    fn failed(&self, error: DriverError) {
        self.say(&error.to_string());
    }

    fn timed_out(&self, _trouble: Option<String>) {
        self.say("timed out");
    }

    fn refused(&self, refused: RefusedWait) {
        let Key::Result(id) = refused.key else {
            panic!("a job is waited for");
        };
        self.log(Key::Result(id), &format!("refused: {:?}", refused.why));
    }
}

impl DeliverySink for LoggingSink {
    fn asked(&self, asks: Vec<Ask>) {
        for ask in asks {
            let text = String::from_utf8_lossy(&ask.question);
            self.say(&format!("asked {} {text}", ask.id));
        }
    }

    fn deliver(&self, deliveries: Vec<Delivery>) {
        self.say(&format!("{} deliveries", deliveries.len()));
    }

    fn held_leases(&self) -> Vec<Lease> {
        Vec::new()
    }

    fn out_of_reach(&self) {
        self.say("out of reach");
    }

    fn leases_kept(&self, kept: &[Lease]) {
        self.say(&format!("{} leases kept", kept.len()));
    }

    fn failed(&self, error: DriverError) {
        self.say(&error.to_string());
    }
}

fn present(text: &'static str) -> KeyState {
    KeyState::Present(Value::new(
        ValueStatus::Succeeded,
        Bytes::from_static(text.as_bytes()),
    ))
}

fn purge(name_bytes: usize) -> Op {
    let queue = "q".repeat(name_bytes);
    Op::Purge { queue }
}

#[test]
fn transactions_are_numbered_when_they_leave_and_confirmed_cumulatively() {
    let mut bench = SessionBench::new();
    bench.commit("a", None);
    bench.commit_txs(
        "b",
        vec![Tx::default(), Tx::default()],
        Durability::Disk,
        None,
    );
    assert_eq!(
        bench.sent(),
        "",
        "nothing is sent before the broker has welcomed us"
    );
    bench.connect(0);
    assert_eq!(bench.sent(), "commit 1-3 0 ops");
    bench.confirm(2, vec![], vec![]);
    assert_eq!(bench.heard(), "a: applied", "half of b is still out");
    let refused = Receipt::Refused {
        op: 0,
        why: Refusal::DiskFull,
    };
    bench.confirm(3, vec![(3, refused)], vec![]);
    assert_eq!(bench.heard(), "b: applied, DiskFull");
}

#[test]
fn what_asks_for_less_durability_may_be_confirmed_before_its_turn_and_only_once() {
    let mut bench = SessionBench::connected();
    bench.commit("disk", None);
    bench.commit_txs("none", vec![Tx::default()], Durability::None, None);
    assert_eq!(bench.sent(), "commit 1-1 0 ops; commit 2-2 0 ops");
    bench.confirm(0, vec![], vec![2]);
    assert_eq!(bench.heard(), "none: applied");
    bench.confirm(2, vec![], vec![]);
    assert_eq!(bench.heard(), "disk: applied");
}

#[test]
fn after_a_reconnect_the_window_is_sent_again_from_what_the_broker_has() {
    let mut bench = SessionBench::connected();
    for name in ["a", "b", "c"] {
        bench.commit(name, None);
    }
    assert_eq!(bench.sent(), "commit 1-3 0 ops");
    bench.session.disconnected("test");
    bench.commit("d", None);
    bench.connect(2);
    assert_eq!(bench.heard(), "a: applied; b: applied");
    assert_eq!(bench.sent(), "commit 3-4 0 ops");
    bench.confirm(4, vec![(3, Receipt::Duplicate)], vec![]);
    assert_eq!(bench.heard(), "c: duplicate; d: applied");
}

#[test]
fn a_forgotten_session_tells_unknown_and_goes_on_with_the_next_number() {
    let mut bench = SessionBench::connected();
    bench.commit("sent", None);
    bench.sent();
    bench.session.disconnected("test");
    // So late that a broker may have forgotten the session.
    bench.now += SURELY_REMEMBERED;
    bench.commit("unsent", None);
    bench.session.connected(bench.now, Vec::new());
    bench.welcome(proto::Welcome {
        forgotten: true,
        applied_through: 1,
        ..Default::default()
    });
    assert_eq!(bench.heard(), "sent: unknown");
    assert_eq!(bench.sent(), "hello 0 leases, used 1; commit 2-2 0 ops");
}

/// A broker was killed before it synced anything of a new client. The next one did not know the session, so
/// commits that no broker had were reported as `Unknown`, though sending them again was safe.
#[test]
fn a_session_of_which_nothing_was_confirmed_starts_over() {
    let mut bench = SessionBench::connected();
    bench.commit("a", None);
    bench.commit("b", None);
    assert_eq!(bench.sent(), "commit 1-2 0 ops");
    bench.session.disconnected("killed");
    bench.session.connected(bench.now, Vec::new());
    bench.welcome(proto::Welcome::default());
    assert_eq!(bench.sent(), "hello 0 leases; commit 1-2 0 ops");
    bench.confirm(1, vec![], vec![]);
    assert_eq!(bench.heard(), "a: applied");

    // The next broker must know this session.
    bench.session.disconnected("killed");
    bench.session.connected(bench.now, Vec::new());
    assert_eq!(bench.sent(), "hello 0 leases, used 2");
}

#[test]
fn a_deadline_says_whether_it_was_sent_and_what_was_not_sent_stays_unsent() {
    let mut bench = SessionBench::connected();
    bench.commit_txs(
        "sent",
        vec![purge(1).into_tx()],
        Durability::Disk,
        Some(1_000),
    );
    assert_eq!(bench.sent(), "commit 1-1 1 ops");
    bench.session.disconnected("test");
    bench.commit_txs(
        "unsent",
        vec![purge(1).into_tx()],
        Durability::Disk,
        Some(2_000),
    );
    bench.at(999).unwrap();
    assert_eq!(bench.heard(), "");
    bench.at(2_000).unwrap();
    assert_eq!(bench.heard(), "sent: maybe; unsent: not accepted");
    // Its number is used, so it can't be left out; but its caller no longer waits.
    bench.connect(0);
    bench.commit("next", None);
    assert_eq!(bench.sent(), "commit 1-2 0 ops");
    bench.confirm(2, vec![], vec![]);
    assert_eq!(bench.heard(), "next: applied");
}

#[test]
fn so_many_are_in_flight_and_no_more() {
    let mut bench = SessionBench::connected();
    for _ in 0..MAX_IN_FLIGHT + 10 {
        bench.commit("", None);
    }
    assert_eq!(bench.sent(), format!("commit 1-{MAX_IN_FLIGHT} 0 ops"));
    bench.confirm(3, vec![], vec![]);
    assert_eq!(
        bench.sent(),
        format!("commit {}-{} 0 ops", MAX_IN_FLIGHT + 1, MAX_IN_FLIGHT + 3)
    );
}

#[test]
fn a_large_transaction_leaves_in_parts_and_again_from_the_first_after_a_reconnect() {
    let mut bench = SessionBench::connected();
    let large = Tx::from(vec![purge(FRAME_TARGET_BYTES / 2); 5]);
    bench.commit("before", None);
    bench.commit_txs("large", vec![large], Durability::Disk, None);
    bench.commit("after", None);
    let parts = "commit 2-2 1 ops more; commit 2-2 1 ops more; commit 2-2 1 ops more; \
                 commit 2-2 1 ops more; commit 2-2 1 ops last";
    assert_eq!(
        bench.sent(),
        format!("commit 1-1 0 ops; {parts}; commit 3-3 0 ops")
    );
    bench.session.disconnected("test");
    bench.connect(1);
    assert_eq!(bench.sent(), format!("{parts}; commit 3-3 0 ops"));
    bench.confirm(3, vec![], vec![]);
    assert_eq!(
        bench.heard(),
        "before: applied; large: applied; after: applied"
    );
}

#[test]
fn what_no_frame_can_hold_is_refused_here_and_the_next_goes_on() {
    let mut bench = SessionBench::connected();
    bench.commit_txs(
        "huge",
        vec![purge(MAX_FRAME_BYTES).into_tx()],
        Durability::Disk,
        None,
    );
    bench.commit("small", None);
    assert_eq!(bench.sent(), "commit 1-1 0 ops");
    assert!(bench.heard().starts_with("huge: one operation has"));
}

#[test]
fn a_watch_tells_each_key_once_through_reconnects() {
    let mut bench = SessionBench::connected();
    bench.watch("w", &["a", "b"], None);
    assert_eq!(bench.sent(), "watch a b");
    bench.tell("a", KeyState::Pending);
    bench.tell("b", present("two"));
    bench.tell("b", present("two"));
    assert_eq!(bench.heard(), "w: a pending; w: b two");
    bench.session.disconnected("test");
    bench.connect(0);
    assert_eq!(bench.sent(), "watch a");
    bench.tell("a", KeyState::Gone);
    assert_eq!(bench.heard(), "w: out of reach; w: in reach; w: a gone");
    bench.session.disconnected("test");
    bench.connect(0);
    assert_eq!(bench.sent(), "", "nothing is left to watch");
}

#[test]
fn two_may_watch_one_key_and_the_last_to_leave_takes_the_watch_along() {
    let mut bench = SessionBench::connected();
    let first = bench.watch("first", &["a"], None);
    let second = bench.watch("second", &["a"], None);
    assert_eq!(bench.sent(), "watch a a");
    bench.session.unwatch(first);
    assert_eq!(bench.sent(), "");
    bench.session.unwatch(second);
    assert_eq!(bench.sent(), "watch not a");
    bench.tell("a", present("late"));
    assert_eq!(bench.heard(), "");
    // Given up and requested again within one frame.
    let third = bench.watch("third", &["a"], None);
    bench.session.unwatch(third);
    bench.watch("fourth", &["a"], None);
    assert!(!bench.sent().contains("not a"));
    bench.tell("a", present("one"));
    assert_eq!(bench.heard(), "fourth: a one");
}

#[test]
fn a_wait_inside_a_job_names_it_and_again_after_a_reconnect() {
    let mut bench = SessionBench::connected();
    bench.watch("plain", &["a"], None);
    bench.wait_inside("j", "inside", &["a", "b"]);
    assert_eq!(bench.sent(), "watch a; watch a b in j");
    bench.session.disconnected("test");
    bench.connect(0);
    assert_eq!(bench.sent(), "watch a; watch a b in j");
    bench.tell("a", present("one"));
    bench.session.disconnected("test");
    bench.connect(0);
    assert_eq!(bench.sent(), "watch b in j", "a is known");
}

#[test]
fn a_job_that_stops_waiting_takes_nothing_from_others_that_watch_the_same() {
    let mut bench = SessionBench::connected();
    let first = bench.wait_inside("j", "first", &["a"]);
    bench.wait_inside("k", "second", &["a"]);
    let third = bench.wait_inside("j", "third", &["a"]);
    assert_eq!(bench.sent(), "watch a in j; watch a in k; watch a in j");
    bench.session.unwatch(first);
    assert_eq!(bench.sent(), "", "another wait of j goes on");
    bench.session.unwatch(third);
    assert_eq!(bench.sent(), "watch over a in j");
    // Given up and requested again within one frame.
    let fourth = bench.wait_inside("j", "fourth", &["a"]);
    assert_eq!(bench.sent(), "watch a in j");
    bench.session.unwatch(fourth);
    bench.wait_inside("j", "fifth", &["a"]);
    assert_eq!(bench.sent(), "watch a in j");
    bench.tell("a", present("one"));
    assert_eq!(bench.heard(), "second: a one; fifth: a one");
}

#[test]
fn a_refusal_ends_the_waits_of_its_job_alone() {
    let mut bench = SessionBench::connected();
    bench.wait_inside("j", "refused", &["a", "b"]);
    bench.wait_inside("k", "other", &["a"]);
    bench.sent();
    bench.refuse("j", "a");
    assert_eq!(bench.heard(), "refused: a refused: Cycle");
    assert_eq!(bench.sent(), "watch not b; watch over a in j");
    bench.refuse("j", "a");
    bench.tell("a", present("one"));
    assert_eq!(bench.heard(), "other: a one");
}

#[test]
fn what_is_watched_ahead_is_no_reason_to_connect_until_somebody_waits_for_it() {
    let mut bench = SessionBench::connected();
    let watch = bench.watch("ahead", &["a", "b", "c"], None);
    bench.session.set_ahead(watch, true);
    assert_eq!(bench.sent(), "watch a b c");
    assert!(bench.session.is_idle());
    bench.tell("a", present("one"));
    bench.session.set_ahead(watch, false);
    assert!(bench.session.wants_connection());
    bench.session.set_ahead(watch, true);
    bench.session.disconnected("test");
    assert!(!bench.session.wants_connection());
    // Another reason to connect brings these along.
    bench.watch("w", &["d"], None);
    assert!(bench.session.wants_connection());
    bench.connect(0);
    assert_eq!(bench.sent(), "watch b c d");
    bench.tell("b", present("two"));
    bench.tell("c", present("three"));
    assert_eq!(
        bench.heard(),
        "ahead: a one; ahead: out of reach; w: in reach; ahead: in reach; ahead: b two; ahead: c three"
    );
    bench.tell("d", present("four"));
    assert!(bench.session.is_idle());
    let watch = bench.watch("ahead", &["e"], None);
    bench.session.set_ahead(watch, true);
    bench.session.unwatch(watch);
    bench.watch("w", &["f"], None);
    assert!(bench.session.wants_connection(), "only what is left counts");
}

#[test]
fn a_peek_is_over_once_it_is_known_that_a_key_is_pending() {
    let mut bench = SessionBench::connected();
    bench.watch("peek", &["a", "b"], None);
    assert_eq!(bench.sent(), "watch a b");
    bench.tell("a", KeyState::Pending);
    assert_eq!(bench.sent(), "watch not a");
    bench.tell("b", present("two"));
    bench.tell("a", present("one"));
    assert_eq!(bench.heard(), "peek: a pending; peek: b two");
    assert!(!bench.session.wants_connection());
    // Peeking takes nothing from a watcher that waits to the end.
    bench.watch("w", &["a"], None);
    bench.watch("peek", &["a"], None);
    bench.tell("a", KeyState::Pending);
    bench.tell("a", present("one"));
    assert_eq!(bench.heard(), "w: a pending; peek: a pending; w: a one");
}

#[test]
fn a_watch_ends_at_its_deadline() {
    let mut bench = SessionBench::connected();
    bench.watch("w", &["a"], Some(100));
    assert_eq!(bench.sent(), "watch a");
    assert_eq!(
        bench.session.next_deadline(),
        Some(bench.start + Duration::from_millis(100))
    );
    bench.at(100).unwrap();
    assert_eq!(bench.heard(), "w: timed out");
    assert_eq!(bench.sent(), "watch not a");
}

#[test]
fn credit_adds_up_and_is_restored_without_what_has_arrived() {
    let mut bench = SessionBench::connected();
    let sink = Arc::new(LoggingSink {
        name: "worker",
        keys: HashMap::new(),
        log: Arc::clone(&bench.log),
    });
    let consume = |bench: &mut SessionBench, credit| {
        let sink = Arc::clone(&sink) as Arc<dyn DeliverySink>;
        bench.session.consume(takes("mail", credit), sink);
    };
    consume(&mut bench, 3);
    consume(&mut bench, 2);
    bench.session.report(WorkerReport {
        slots: 4,
        busy: 1,
        ..WorkerReport::default()
    });
    assert_eq!(bench.sent(), "consume mail +5; report 1/4");
    let message = penstock_message::Message {
        id: bench.id("m"),
        task: "t".into(),
        priority: 4,
        expires_at: None,
        result_ttl_ms: None,
        max_deliveries: 1,
        attempt: 0,
        crashes: 0,
        enqueued_at: 0,
        notes: vec![],
        body: Bytes::new(),
        extras: None,
    };
    let delivery = Delivery {
        consumer: 0,
        lease: Lease {
            message: message.id,
            epoch: 1,
            grant: 1,
        },
        queue: "mail".into(),
        redelivered: false,
        message,
        inputs: Bytes::new(),
        deadline: None,
    };
    bench.hear(proto::ToClient {
        deliveries: vec![delivery.clone().into(), delivery.into()],
        ..Default::default()
    });
    assert_eq!(bench.heard(), "worker: 2 deliveries");
    bench.session.disconnected("test");
    bench.connect(0);
    assert_eq!(bench.heard(), "worker: out of reach; worker: 0 leases kept");
    assert_eq!(bench.sent(), "consume mail +3; report 1/4");
    bench.session.stop_consuming();
    bench.session.stop_consuming();
    assert_eq!(bench.sent(), "consume stop");
    bench.session.disconnected("test");
    bench.connect(0);
    // The next broker need not know a consumer that is over.
    assert_eq!(bench.sent(), "report 1/4");
    consume(&mut bench, 2);
    assert_eq!(bench.sent(), "consume  +2");
    bench.session.disconnected("test");
    bench.connect(0);
    assert_eq!(bench.sent(), "consume mail +2; report 1/4");
}

/// A question's number is only valid on its own connection: on the next, another question may have it.
#[test]
fn a_question_is_answered_once_and_on_the_connection_that_it_came_on() {
    let mut bench = SessionBench::connected();
    let sink: Arc<dyn DeliverySink> = Arc::new(LoggingSink {
        name: "worker",
        keys: HashMap::new(),
        log: Arc::clone(&bench.log),
    });
    bench.session.consume(takes("mail", 1), sink);
    assert_eq!(bench.sent(), "consume mail +1");
    let ask = |bench: &mut SessionBench, id, question| {
        bench.hear(proto::ToClient {
            asks: vec![proto::Ask {
                id,
                question: Bytes::from_static(question),
            }],
            ..Default::default()
        });
    };
    let reply = |bench: &mut SessionBench, id, text| {
        bench.session.reply(id, Bytes::from_static(text));
        bench.sent()
    };
    ask(&mut bench, 3, b"which?");
    assert_eq!(bench.heard(), "worker: asked 3 which?");
    assert_eq!(reply(&mut bench, 4, b"no"), "");
    assert_eq!(reply(&mut bench, 3, b"this"), "reply 3 this");
    assert_eq!(reply(&mut bench, 3, b"that"), "");
    ask(&mut bench, 5, b"where?");
    bench.session.disconnected("test");
    assert_eq!(bench.session.asks.len(), 0, "no query is left");
    bench.connect(0);
    bench.sent();
    assert_eq!(reply(&mut bench, 5, b"here"), "");
}

#[test]
fn only_the_latest_progress_is_sent_and_before_what_settles_its_job() {
    let lease = |grant| Lease {
        message: MessageId([7; 16]),
        epoch: 1,
        grant,
    };
    let tell = |bench: &mut SessionBench, grant, text: &'static str| {
        let body = Bytes::from_static(text.as_bytes());
        bench.session.progress(Progress {
            lease: lease(grant),
            body,
        });
    };
    let mut bench = SessionBench::new();
    bench.connect(0);
    bench.sent();
    bench.commit("ack", None);
    tell(&mut bench, 1, "one");
    tell(&mut bench, 2, "other");
    tell(&mut bench, 1, "two");
    let sent = bench.sent();
    assert!(
        sent.starts_with("progress two; progress other; "),
        "{sent}: the broker drops that of a job which has ended"
    );
    assert_eq!(bench.sent(), "", "it is sent once");
    // A broker that keeps no progress is sent none.
    let mut capabilities = native::on_disk().clone();
    capabilities.progress = false;
    let mut bench = SessionBench::new();
    bench.connect_to(&capabilities);
    bench.sent();
    tell(&mut bench, 1, "one");
    assert_eq!(bench.sent(), "");
}

#[test]
fn leases_without_room_in_the_first_hello_follow_in_a_second() {
    let mut bench = SessionBench::new();
    let lease = Lease {
        message: MessageId([0xff; 16]),
        epoch: u32::MAX,
        grant: u64::MAX,
    };
    bench
        .session
        .connected(bench.now, vec![lease; HELLO_LEASES + 2]);
    let mut out = bench.session.next_bytes(bench.now);
    let first_frame = 4 + u32::from_le_bytes(*out.first_chunk().unwrap()) as usize;
    assert!(first_frame <= penstock_wire::MAX_HELLO_BYTES);
    let mut decoder = Decoder::<proto::ToBroker>::new(MAX_FRAME_BYTES);
    decoder.extend(&out.split());
    let mut said = Vec::new();
    while let Some(frame) = decoder.next_message().unwrap() {
        said.extend(bench.frame_text(frame));
    }
    assert_eq!(said, ["hello 100 leases, more", "hello 2 leases"]);
}

#[test]
fn silence_asks_for_a_sign_of_life_and_then_ends_the_connection() {
    let mut bench = SessionBench::connected();
    bench.at(4_999).unwrap();
    assert_eq!(bench.sent(), "");
    bench.at(5_000).unwrap();
    assert_eq!(bench.sent(), "ping");
    bench.hear(proto::ToClient {
        pong: true,
        ..Default::default()
    });
    bench.at(19_999).unwrap();
    assert!(matches!(bench.at(20_000), Err(LinkEnd::Lost(why)) if why.contains("silent for 15 s")));
}

#[test]
fn each_way_to_be_turned_away_says_what_to_do() {
    let check = |why: proto::close::Why, text: &str, expected: &str| {
        let mut bench = SessionBench::connected();
        let close = proto::Close {
            why: why.into(),
            text: text.into(),
        };
        let frame = proto::ToClient {
            close: Some(close),
            ..Default::default()
        };
        let end = bench.session.handle(bench.now, frame).unwrap_err();
        assert_eq!(format!("{end:?}"), expected);
    };
    use proto::close::Why;
    check(
        Why::Unauthorized,
        "wrong token",
        r#"Hopeless(Unauthorized, "the broker at unix:test refused this client: wrong token")"#,
    );
    check(
        Why::Version,
        "",
        r#"Hopeless(Invalid, "the broker at unix:test speaks an incompatible version of the protocol: ")"#,
    );
    check(Why::Stopping, "", r#"Lost("the broker was stopped")"#);
    check(
        Why::Failed,
        "EIO",
        r#"Lost("the broker's disk failed: EIO")"#,
    );
}

/// A worker with a queue name that every broker refuses used to reconnect forever, without reporting it.
#[test]
fn a_refusal_that_would_repeat_for_ever_ends_the_client() {
    let refused = |bench: &mut SessionBench, why: proto::close::Why, text: &str| {
        let close = proto::Close {
            why: why.into(),
            text: text.into(),
        };
        let frame = proto::ToClient {
            close: Some(close),
            ..Default::default()
        };
        let end = bench.session.handle(bench.now, frame).unwrap_err();
        bench.session.disconnected("refused");
        match end {
            LinkEnd::Lost(_) => "lost".to_owned(),
            LinkEnd::Hopeless(ErrorKind::Invalid, why) => why,
            other => panic!("{other:?}"),
        }
    };
    use proto::close::Why::{Fenced, Protocol};

    for (why, expected) in [
        (
            Protocol,
            "the broker at unix:test refused a frame from this client: too long",
        ),
        (Fenced, "replaced this one at unix:test"),
    ] {
        let mut bench = SessionBench::connected();
        assert_eq!(refused(&mut bench, why, "too long"), "lost");
        bench.connect(0);
        let end = refused(&mut bench, why, "too long");
        assert!(end.contains(expected), "{end}");
    }

    let mut bench = SessionBench::connected();
    assert_eq!(refused(&mut bench, Protocol, "too long"), "lost");
    bench.connect(0);
    assert_eq!(refused(&mut bench, Protocol, "too short"), "lost");
    bench.connect(0);
    bench.commit("a", None);
    bench.sent();
    bench.confirm(1, vec![], vec![]);
    let after_a_confirm = refused(&mut bench, Protocol, "too short");
    assert_eq!(after_a_confirm, "lost");
    bench.connect(1);
    bench.at(HEARTBEAT_MS / 2).unwrap();
    bench.hear(proto::ToClient {
        pong: true,
        ..Default::default()
    });
    bench.at(HEARTBEAT_MS).unwrap();
    let after_a_while = refused(&mut bench, Protocol, "too short");
    assert_eq!(after_a_while, "lost");
}

#[test]
fn a_hopeless_broker_ends_all_calls_at_once_and_tells_watchers() {
    let mut bench = SessionBench::new();
    bench.commit("a", Some(1_000));
    bench.watch("w", &["k"], Some(1_000));
    bench.session.fail_all(&DriverError::closed());
    assert_eq!(
        bench.heard(),
        "a: this client was closed; w: this client was closed"
    );
    bench.at(1_000).unwrap();
    assert_eq!(
        bench.heard(),
        "w: timed out",
        "a watch that goes on keeps its deadline"
    );
}

/// A client that was closed or refused used to report nothing about calls already in the broker's socket.
#[test]
fn every_error_that_ends_a_call_says_whether_it_was_sent() {
    for kind in [
        ErrorKind::Closed,
        ErrorKind::Unauthorized,
        ErrorKind::Invalid,
    ] {
        let mut bench = SessionBench::connected();
        bench.commit("sent", Some(1_000));
        bench.session.next_bytes(bench.now);
        bench.commit("waiting", Some(1_000));
        bench.session.fail_all(&DriverError::new(kind, "over"));
        assert_eq!(bench.heard(), "sent: over (maybe accepted); waiting: over");
    }
}

/// `penstock broker stop` used to be undone instantly by any connected worker.
#[test]
fn a_broker_that_was_stopped_is_started_for_who_asks_and_not_for_who_only_works() {
    let stopped = |bench: &mut SessionBench| {
        let close = proto::Close {
            why: proto::close::Why::Stopping.into(),
            ..Default::default()
        };
        let frame = proto::ToClient {
            close: Some(close),
            ..Default::default()
        };
        bench.session.handle(bench.now, frame).unwrap_err();
        bench.session.disconnected("stopped");
    };
    let sink = |bench: &SessionBench| {
        Arc::new(LoggingSink {
            name: "worker",
            keys: HashMap::new(),
            log: Arc::clone(&bench.log),
        })
    };

    let mut worker = SessionBench::connected();
    let hands = sink(&worker);
    worker.session.consume(takes("mail", 5), hands);
    assert_eq!(
        worker.session.start(false),
        BrokerStart::WhereItWas,
        "it may have been killed"
    );
    stopped(&mut worker);
    assert_eq!(worker.session.start(false), BrokerStart::No);
    worker.commit("outcome", None);
    assert_eq!(
        worker.session.start(false),
        BrokerStart::No,
        "an outcome can wait"
    );
    assert_eq!(
        worker.session.start(true),
        BrokerStart::WhereItWas,
        "but not for its worker's end"
    );
    worker.commit("call", Some(1_000));
    assert_eq!(worker.session.start(false), BrokerStart::WhereItWas);
    worker.at(1_000).unwrap();
    assert_eq!(worker.session.start(false), BrokerStart::No);
    worker.connect(0);
    assert_eq!(
        worker.session.start(false),
        BrokerStart::WhereItWas,
        "somebody has started it"
    );

    let mut waiting = SessionBench::connected();
    waiting.watch("result", &["k"], None);
    stopped(&mut waiting);
    assert_eq!(waiting.session.start(false), BrokerStart::Anywhere);
}

#[test]
fn a_worker_is_told_that_no_broker_can_be_had() {
    let mut bench = SessionBench::connected();
    let hands = Arc::new(LoggingSink {
        name: "worker",
        keys: HashMap::new(),
        log: Arc::clone(&bench.log),
    });
    bench.session.consume(takes("mail", 5), hands);
    bench.session.fail_all(&DriverError::closed());
    assert_eq!(bench.heard(), "worker: this client was closed");
}

/// Names the outcome from which a caller decides.
fn outcome_text(error: &DriverError) -> String {
    match (&error.kind, error.maybe_accepted) {
        (ErrorKind::Unavailable | ErrorKind::Silent, true) => "maybe".to_owned(),
        (ErrorKind::Unavailable | ErrorKind::Silent, false) => "not accepted".to_owned(),
        (_, true) => format!("{error} (maybe accepted)"),
        (_, false) => error.to_string(),
    }
}

trait IntoTx {
    fn into_tx(self) -> Tx;
}

impl IntoTx for Op {
    fn into_tx(self) -> Tx {
        Tx { ops: vec![self] }
    }
}

#[test]
fn keys_are_hashed_with_the_seed_of_the_session() {
    let config = SessionConfig {
        id: SessionId([7; 16]),
        token: Bytes::new(),
        name: "test".into(),
        heartbeat: Duration::from_millis(HEARTBEAT_MS),
        broker: "unix:test".into(),
        hash_seed: 7,
        versions: Versions::TODAY,
        takes_over: false,
    };
    let session = DriverSession::new(config, Instant::now());
    let seeded = SeededState::new(7);
    assert_eq!(*session.watchers.hasher(), seeded);
    assert_eq!(*session.unsent_unwatched.hasher(), seeded);
}

/// Each of a worker's consumers has its own tasks and credit, which must be sent again on the next connection.
#[test]
fn several_consumers_are_told_of_apart_and_again_after_a_reconnect() {
    let mut bench = SessionBench::connected();
    let hands: Arc<dyn DeliverySink> = Arc::new(LoggingSink {
        name: "worker",
        keys: HashMap::new(),
        log: Arc::clone(&bench.log),
    });
    for (consumer, task, credit) in [(0, "quick", 4), (1, "slow", 1)] {
        let consume = Consume {
            consumer,
            tasks: TaskSelection::Named(vec![task.to_owned()]),
            ..takes("mail", credit)
        };
        bench.session.consume(consume, Arc::clone(&hands));
    }
    assert_eq!(
        bench.sent(),
        "consume mail tasks quick +4; consume/1 mail tasks slow +1"
    );
    let more = Consume {
        consumer: 1,
        ..takes("mail", 2)
    };
    bench.session.consume(more, Arc::clone(&hands));
    assert_eq!(bench.sent(), "consume/1  +2");
    bench.session.disconnected("gone");
    bench.connect(0);
    assert_eq!(
        bench.sent(),
        "consume mail tasks quick +4; consume/1 mail tasks slow +3"
    );
    // One consumer is stopped, and the other keeps its credit.
    bench.session.stop_consumer(1);
    assert_eq!(bench.sent(), "consume/1 stop");
    bench.session.stop_consumer(7);
    assert_eq!(bench.sent(), "");
    bench.session.disconnected("gone");
    bench.connect(0);
    // A new broker must learn the queues and tasks of a stopped consumer, which needs them when it receives
    // credit again.
    assert_eq!(
        bench.sent(),
        "consume mail tasks quick +4; consume/1 mail tasks slow +0; consume/1 stop"
    );
    let again = Consume {
        consumer: 1,
        add_credit: 1,
        ..Consume::default()
    };
    bench.session.consume(again, Arc::clone(&hands));
    assert_eq!(bench.sent(), "consume/1  +1");
    // A change of its tasks adds no credit.
    bench.session.stop_consumer(1);
    let other = Consume {
        consumer: 1,
        tasks: TaskSelection::Named(vec!["other".to_owned()]),
        ..Consume::default()
    };
    bench.session.consume(other, hands);
    assert_eq!(
        bench.sent(),
        "consume/1 mail tasks other +0; consume/1 stop"
    );
}

fn takes(queue: &str, add_credit: u32) -> Consume {
    Consume {
        queues: vec![queue.to_owned()],
        add_credit,
        ..Consume::default()
    }
}

#[test]
fn a_call_that_no_broker_takes_is_refused_before_anything_of_it_is_sent() {
    let mut bench = SessionBench::connected();
    let mib = Bytes::from(vec![0; 1 << 20]);
    let call = |mib_count| vec![Form::Parts(vec![mib.clone(); mib_count]).into()];
    bench.commit_encoded("large", call(513), Durability::Disk, None);
    assert_eq!(bench.sent(), "");
    assert_eq!(
        bench.heard(),
        "large: TooLarge(\"this call has 537919488 bytes, more than the limit of 536870912. Nothing was \
         sent: split it into several calls\")"
    );
    assert_eq!(bench.session.window.len(), 0);
    bench.commit_encoded("just", call(512), Durability::Disk, None);
    assert!(
        !bench.session.next_bytes(bench.now).is_empty(),
        "it goes out"
    );
}
