//! Cuts the power at every write, sync and rename of a small workload; each time the disk keeps another part of the
//! unsynced changes. The next start must find a beginning of the work, whole transactions in order, and in it
//! everything that was confirmed.
//!
//! `CRASH_POINTS=200000` tries that many states; the default is enough for a test.

#[allow(dead_code)] // It is shared with other tests.
mod world;

use std::collections::BTreeMap;

use bytes::Bytes;
use penstock_journal::sim::{Fault, Rng, SimStorage};
use penstock_message::{
    Answer, Condition, Due, Durability, HeaderPatch, Hold, JoinPolicy, Key, KeyState, Lease,
    MessageId, MessageState, Op, Query, Receipt, SessionId, StatusQuery, Tx, Value, ValueStatus,
};
use penstock_server::EngineOptions;
use world::{EngineClient, EngineWorld, commit, consume, hello, message, say_hello};

/// Each variant is one transaction, except the last two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkStep {
    Publish,
    /// Takes several batches and, with these sizes, several segments.
    PublishLong,
    PublishToThreeQueues,
    /// Acknowledgement, result and a following job.
    Succeed,
    Retry,
    Bury,
    OpenGroup,
    /// Ends the last member of a group, which releases the held messages.
    EndGroup,
    TakeLock,
    BeRefused,
    Purge,
    Pause,
    /// Writes so much that the oldest segment is emptied and dropped.
    Churn,
    /// Kills the process; another takes over.
    Restart,
}

use WorkStep::*;

const STEPS: [WorkStep; 14] = [
    Publish,
    PublishLong,
    PublishToThreeQueues,
    Succeed,
    Retry,
    Bury,
    OpenGroup,
    EndGroup,
    TakeLock,
    BeRefused,
    Purge,
    Pause,
    Churn,
    Restart,
];
const QUEUES: [&str; 3] = ["default", "mail", "slow"];
const WORKER: u8 = 1;
const SMALL_STATES: u64 = 5_000;
/// States tried for each power cut; and in the small default run.
const LEFTOVERS: usize = 64;
const SMALL_LEFTOVERS: usize = 32;

/// Returns all workloads of one step, then of two, then the requested number of three.
fn workloads() -> impl Iterator<Item = Vec<WorkStep>> {
    let pairs = STEPS
        .into_iter()
        .flat_map(|one| STEPS.map(|two| vec![one, two]));
    let triples = pairs
        .clone()
        .flat_map(|pair| STEPS.map(|three| [&pair[..], &[three]].concat()));
    STEPS
        .into_iter()
        .map(|step| vec![step])
        .chain(pairs)
        .chain(triples)
}

fn small(options: &mut EngineOptions) {
    options.journal.segment_bytes = 4096 + 2048;
    options.journal.batch_bytes = 1024;
    options.journal.spares = 1;
}

/// Client that works and remembers what was confirmed.
struct Person {
    world: EngineWorld,
    client: EngineClient,
    /// Number of the last transaction.
    seq: u64,
    /// Receipts of the broker, by transaction number.
    decided: BTreeMap<u64, Receipt>,
    confirmed_through: u64,
    /// Lease of the message that it works on.
    lease: Lease,
    ids: u8,
}

impl Person {
    /// Starts a broker with some history, so that there is something to settle, release and drop.
    fn new() -> Self {
        let mut world = EngineWorld::with(SimStorage::new(), small);
        let client = world.join(WORKER);
        let nobody = Lease {
            message: MessageId([0; 16]),
            epoch: 0,
            grant: 0,
        };
        let mut person = Self {
            world,
            client,
            seq: 0,
            decided: BTreeMap::new(),
            confirmed_through: 0,
            lease: nobody,
            ids: 100,
        };
        let id = person.new_id();
        person.say(vec![publish_to(&["default"], id, 40)]);
        let group = Op::Hold(Hold {
            join: MessageId([50; 16]),
            count: 1,
            messages: vec![("mail".to_owned(), message(51, Bytes::from_static(b"held")))],
            policy: JoinPolicy::AllSucceeded,
            ..Hold::default()
        });
        person.say(vec![group]);
        person.do_step(Churn);
        let taken = person.world.ask(person.client, &consume(1));
        person.lease = taken.deliveries[0].lease;
        person
    }

    fn new_id(&mut self) -> u8 {
        self.ids += 1;
        self.ids
    }

    fn do_step(&mut self, step: WorkStep) {
        let lease = self.lease;
        let ops = match step {
            Publish => vec![publish_to(&["default"], self.new_id(), 90)],
            PublishLong => vec![publish_to(&["mail"], self.new_id(), 2_600)],
            PublishToThreeQueues => vec![publish_to(&QUEUES, self.new_id(), 10)],
            Succeed => vec![
                Op::Ack { lease, cost_us: 1 },
                put(Key::Result(lease.message), ValueStatus::Succeeded),
                publish_to(&["slow"], self.new_id(), 10),
            ],
            Retry => vec![move_to(lease, None, Some(Due::AfterMs(5_000)))],
            Bury => vec![
                put(Key::Result(lease.message), ValueStatus::Failed),
                move_to(lease, Some("dead"), None),
            ],
            OpenGroup => vec![
                Op::Hold(Hold {
                    join: MessageId([self.new_id(); 16]),
                    count: 2,
                    messages: vec![("mail".to_owned(), message(self.new_id(), Bytes::new()))],
                    policy: JoinPolicy::AllEnded,
                    ..Hold::default()
                }),
                publish_to(&["default"], self.new_id(), 10),
            ],
            EndGroup => vec![Op::Join {
                join: MessageId([50; 16]),
                index: 0,
                succeeded: true,
            }],
            TakeLock => {
                let key = Key::Named(Bytes::from_static(b"lock"));
                let condition = Condition::Absent;
                let guard = Op::Guard {
                    key: key.clone(),
                    condition,
                };
                vec![guard, put(key, ValueStatus::Succeeded)]
            }
            BeRefused => {
                let key = Key::Named(Bytes::from_static(b"nothing"));
                let condition = Condition::Present;
                let guard = Op::Guard { key, condition };
                vec![publish_to(&["default"], self.new_id(), 10), guard]
            }
            Purge => vec![Op::Purge {
                queue: "default".to_owned(),
            }],
            Pause => vec![Op::Pause {
                queue: "mail".to_owned(),
            }],
            Churn => {
                for _ in 0..5 {
                    let lock = Key::Named(Bytes::from_static(b"churned"));
                    let body = Bytes::from(vec![7; 1_500]);
                    let value = Value::new(ValueStatus::Succeeded, body);
                    let group = "churn".to_owned();
                    self.say(vec![Op::Put {
                        key: lock,
                        value,
                        ttl_ms: None,
                        group,
                    }]);
                }
                return;
            }
            Restart => return self.restart(),
        };
        self.say(ops);
    }

    fn say(&mut self, ops: Vec<Op>) {
        self.seq += 1;
        let frame = commit(self.seq, Durability::Disk, vec![Tx::from(ops)]);
        self.world.send(self.client, &frame);
        self.remember_decision();
        self.world.settle();
        self.listen();
    }

    fn remember_decision(&mut self) {
        let session = SessionId([WORKER; 16]);
        if let Some(receipt) = self.world.engine.broker().decision(&session, self.seq) {
            self.decided.insert(self.seq, receipt);
        }
    }

    fn listen(&mut self) {
        for frame in self.world.hear(self.client) {
            if let Some(confirm) = frame.confirm {
                self.confirmed_through = self.confirmed_through.max(confirm.through);
            }
        }
    }

    fn restart(&mut self) {
        let disk = self.world.disk.kill();
        if disk.is_off() {
            return;
        }
        let Some(world) = EngineWorld::open(disk, small) else {
            return;
        };
        self.world = world;
        self.client = self.world.connect(penstock_server::Peer::Trusted);
        let again = penstock_wire::proto::Hello {
            last_seq: self.seq,
            leases: vec![self.lease.into()],
            ..hello(WORKER)
        };
        self.world.send(self.client, &say_hello(again));
        self.world.settle();
        self.world.hear(self.client);
    }
}

fn publish_to(queues: &[&str], id: u8, bytes: usize) -> Op {
    Op::Publish {
        queues: queues.iter().map(|queue| (*queue).to_owned()).collect(),
        message: message(id, Bytes::from(vec![id; bytes])),
        due: None,
        unless_key: None,
    }
}

fn put(key: Key, status: ValueStatus) -> Op {
    let body = Bytes::from_static(b"value");
    Op::Put {
        key,
        value: Value::new(status, body),
        ttl_ms: Some(60_000),
        group: "shop.send".to_owned(),
    }
}

fn move_to(lease: Lease, queue: Option<&str>, due: Option<Due>) -> Op {
    Op::Move {
        lease,
        queue: queue.map(str::to_owned),
        due,
        patch: HeaderPatch {
            next_attempt: true,
            note: Some(Bytes::from_static(b"a note")),
            expires_at: None,
        },
        cost_us: 1,
    }
}

/// Returns what a client could see of a broker, except leases: grants are confirmed to nobody.
fn picture(world: &mut EngineWorld) -> Vec<String> {
    let looker = world.join(99);
    let mut queries: Vec<(u64, Query)> = vec![(0, Query::Status(StatusQuery::default()))];
    queries.extend((51..=120).map(|id| (id, Query::Message(MessageId([id as u8; 16])))));
    let mut keys: Vec<Key> = (51..=120)
        .map(|id| Key::Result(MessageId([id; 16])))
        .collect();
    keys.extend([&b"lock"[..], b"churned"].map(|name| Key::Named(Bytes::from_static(name))));
    let frame = penstock_wire::proto::ToBroker {
        queries: queries.into_iter().map(Into::into).collect(),
        watch: Some(penstock_wire::proto::Watch {
            keys: keys.into_iter().map(Into::into).collect(),
            ..penstock_wire::proto::Watch::default()
        }),
        ..Default::default()
    };
    let seen = world.ask(looker, &frame);
    let mut lines = Vec::new();
    for answer in seen.answers {
        match answer.try_into().expect("the engine speaks the protocol") {
            (_, Answer::Message(Some(mut info))) => {
                if info.state == MessageState::Running {
                    info.state = MessageState::Ready;
                }
                let (queue, state, attempt) = (&info.queue, info.state, info.attempt);
                let notes = info.notes.len();
                lines.push(format!(
                    "{} {queue} {state:?} {attempt} {notes} {:?}",
                    info.id, info.due_at
                ));
            }
            (_, Answer::Status(page)) => {
                for queue in page.status.queues {
                    let waiting = queue.ready + queue.running;
                    let (name, delayed, paused) = (queue.name, queue.delayed, queue.paused);
                    if waiting + delayed > 0 || paused {
                        lines.push(format!("{name}: {waiting} {delayed} {paused}"));
                    }
                }
            }
            _ => {}
        }
    }
    let present = |state: &KeyState| matches!(state, KeyState::Present(_));
    let values = seen.values.iter().filter(|(_, state)| present(state));
    lines.extend(values.map(|value| format!("{value:?}")));
    lines.sort_unstable();
    world.engine.broker().assert_consistent();
    lines
}

/// Returns the picture after each number of transactions, when nothing goes wrong.
fn pictures(steps: &[WorkStep]) -> BTreeMap<u64, Vec<String>> {
    let mut pictures = BTreeMap::new();
    for done in 0..=steps.len() {
        // Looking leaves a session behind, so each picture is of its own world.
        let mut person = Person::new();
        for step in &steps[..done] {
            person.do_step(*step);
        }
        pictures.insert(person.seq, picture(&mut person.world));
    }
    pictures
}

/// Returns the number of states that were tried.
fn cut_power_everywhere(steps: &[WorkStep], leftovers: usize, rng: &mut Rng) -> u64 {
    let mut pictures = pictures(steps);
    let mut states = 0;
    for cut in 0.. {
        let mut person = Person::new();
        let disk = person.world.disk.clone();
        disk.fail_at(disk.calls() + cut, Fault::PowerOff);
        for step in steps {
            person.do_step(*step);
            if disk.is_off() {
                break;
            }
        }
        for left in disk.leftovers(leftovers, rng) {
            states += 1;
            check(&person, left, steps, &mut pictures);
        }
        if !disk.is_off() {
            return states;
        }
    }
    unreachable!("the work ends")
}

fn check(
    person: &Person,
    left: SimStorage,
    steps: &[WorkStep],
    pictures: &mut BTreeMap<u64, Vec<String>>,
) {
    let mut world =
        EngineWorld::open(left, small).unwrap_or_else(|| panic!("{steps:?}: nothing is damaged"));
    let session = SessionId([WORKER; 16]);
    let found = |seq: u64| world.engine.broker().decision(&session, seq);
    let there = (1..=person.seq)
        .take_while(|seq| found(*seq).is_some())
        .count() as u64;
    assert!(
        there >= person.confirmed_through,
        "{steps:?}: {} were confirmed, and {there} are there",
        person.confirmed_through
    );
    for seq in 1..=there {
        assert_eq!(
            found(seq).as_ref(),
            person.decided.get(&seq),
            "{steps:?}: transaction {seq}"
        );
    }
    let picture = picture(&mut world);
    // Intermediate transactions of one step have pictures only when they are whole.
    if let Some(expected) = pictures.get(&there) {
        assert_eq!(picture, *expected, "{steps:?}: with {there} transactions");
    }
}

#[test]
fn whenever_the_power_is_cut_a_beginning_of_the_work_is_there_with_all_that_was_confirmed() {
    let wanted = std::env::var("CRASH_POINTS").ok();
    let (wanted, leftovers): (u64, usize) = match wanted {
        Some(states) => (states.parse().expect("a number"), LEFTOVERS),
        None => (SMALL_STATES, SMALL_LEFTOVERS),
    };
    let (mut states, mut count) = (0, 0);
    let mut rng = Rng::new(1);
    for steps in workloads() {
        if states >= wanted && count >= 50 {
            break;
        }
        states += cut_power_everywhere(&steps, leftovers, &mut rng);
        count += 1;
    }
    println!("{states} states of {count} pieces of work");
    assert!(states >= wanted, "only {states} states were tried");
}
