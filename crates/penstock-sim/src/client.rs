//! A client: publishes, consumes, settles, retries, resends after it has reconnected, or dies with
//! leases in its hands. It speaks the protocol as a driver does; what it does next is drawn.

use std::collections::VecDeque;

use crate::words;
use bytes::{Bytes, BytesMut};
use penstock_broker::ConnId;
use penstock_jobs::{DEAD_LETTER_QUEUE, DeliveryHead, Outcome, settle};
use penstock_journal::sim::Rng;
use penstock_message::{
    Condition, DEFAULT_PRIORITY, Delivery, Due, Durability, IdSource, JoinId, JoinPolicy, Key,
    KeyState, Lease, Message, MessageId, Op, Overflow, QueueLimits, Receipt, SessionId, Tx, Value,
    ValueStatus,
};
use penstock_wire::proto::{self, ToBroker, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, PROTOCOL_VERSION, convert, encode_frame};

pub const QUEUES: [&str; 3] = ["default", "mail", "slow"];
const TASKS: [&str; 3] = ["shop.send", "shop.count", "shop.merge"];
const LOCKS: [&str; 3] = ["lock-a", "lock-b", "lock-c"];
/// A driver has no more transactions in flight.
const IN_FLIGHT: usize = 64;

/// One frame, in the nouns of the broker.
#[derive(Clone, Debug, Default)]
pub struct Said {
    pub hello: Option<Hello>,
    /// Whole transactions, or the last part of one.
    pub commits: Vec<Commit>,
    /// Parts that come before the last; nothing counts before that.
    parts: Vec<(u64, Durability, Tx)>,
    pub consume: Option<Consume>,
    watch: Vec<Key>,
    ping: bool,
    pub goodbye: bool,
}

#[derive(Clone, Debug)]
pub struct Hello {
    pub session: SessionId,
    pub heartbeat_ms: u64,
    last_seq: u64,
    pub leases: Vec<Lease>,
}

#[derive(Clone, Debug)]
pub struct Commit {
    pub first_seq: u64,
    pub durability: Durability,
    pub txs: Vec<Tx>,
    /// It was said in parts; this is what the last one adds.
    last_part: Option<Tx>,
}

#[derive(Clone, Debug)]
pub struct Consume {
    queues: Vec<String>,
    pub credit: u32,
}

impl Said {
    pub fn ping() -> Self {
        Self {
            ping: true,
            ..Self::default()
        }
    }

    pub fn goodbye() -> Self {
        Self {
            goodbye: true,
            ..Self::default()
        }
    }

    /// For a person who reads the trace.
    pub fn in_words(&self) -> String {
        let mut words = Vec::new();
        if let Some(hello) = &self.hello {
            words.push(format!("hello, {} leases", hello.leases.len()));
        }
        words.extend(
            self.parts
                .iter()
                .map(|(seq, _, tx)| format!("a part of {seq}: {} ops", tx.ops.len())),
        );
        for commit in &self.commits {
            let (seq, durability, txs) = (commit.first_seq, commit.durability, &commit.txs);
            for (seq, tx) in (seq..).zip(txs) {
                words.push(format!("{seq} for {durability:?}: {}", words::tx(tx)));
            }
        }
        words.extend(
            self.consume
                .as_ref()
                .map(|consume| format!("take {} of {:?}", consume.credit, consume.queues)),
        );
        if !self.watch.is_empty() {
            words.push(format!("watch {} keys", self.watch.len()));
        }
        words.extend(self.ping.then(|| "ping".to_string()));
        words.extend(self.goodbye.then(|| "goodbye".to_string()));
        words.join(", ")
    }

    pub fn encode(&self) -> BytesMut {
        let part = |seq: u64, durability: Durability, tx: &Tx, part: proto::Part| proto::Commit {
            first_seq: seq,
            durability: proto::Durability::from(durability).into(),
            txs: vec![tx.clone().into()],
            part: part.into(),
        };
        let parts = self
            .parts
            .iter()
            .map(|(seq, durability, tx)| part(*seq, *durability, tx, proto::Part::More));
        let commits = self.commits.iter().map(|commit| match &commit.last_part {
            Some(last) => part(commit.first_seq, commit.durability, last, proto::Part::Last),
            None => proto::Commit {
                first_seq: commit.first_seq,
                durability: proto::Durability::from(commit.durability).into(),
                txs: commit.txs.iter().cloned().map(Into::into).collect(),
                part: proto::Part::Whole.into(),
            },
        });
        let frame = ToBroker {
            hello: self.hello.as_ref().map(|hello| proto::Hello {
                protocol_version: PROTOCOL_VERSION,
                session: Bytes::copy_from_slice(&hello.session.0),
                name: "simulated".to_string(),
                heartbeat_ms: hello.heartbeat_ms,
                last_seq: hello.last_seq,
                leases: hello.leases.iter().copied().map(Into::into).collect(),
                ..proto::Hello::default()
            }),
            commits: parts.chain(commits).collect(),
            consume: self.consume.as_ref().map(|consume| proto::Consume {
                queues: consume.queues.clone(),
                add_credit: consume.credit,
                stop: false,
            }),
            watch: (!self.watch.is_empty()).then(|| proto::Watch {
                keys: self.watch.iter().cloned().map(Into::into).collect(),
                unwatch: Vec::new(),
            }),
            ping: self.ping,
            goodbye: self.goodbye,
            ..ToBroker::default()
        };
        let mut bytes = BytesMut::new();
        encode_frame(&frame, &mut bytes);
        bytes
    }
}

/// Whether it has a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Offline,
    /// It has said hello.
    Greeting,
    Open,
    /// It will never be heard of again.
    Dead,
}

pub struct Client {
    pub session: SessionId,
    pub heartbeat_ms: u64,
    pub stage: Stage,
    pub conn: Option<ConnId>,
    pub said_at_ms: u64,
    decoder: Decoder<ToClient>,
    last_seq: u64,
    unconfirmed: VecDeque<Unconfirmed>,
    /// What it works on.
    work: Vec<Delivery>,
    /// Leases that it held once, and settled or lost.
    stale: Vec<Lease>,
    /// Deliveries it has asked for that have not come.
    credit: u32,
    takes_all: bool,
    /// Results it would like to know.
    pub wanted: Vec<Key>,
    habits: Habits,
}

/// What it does, and how; drawn once.
#[derive(Clone, Debug)]
pub struct Habits {
    pub queues: Vec<String>,
    pub durabilities: Vec<Durability>,
    pub publishes: bool,
    pub consumes: bool,
    pub delays: bool,
    pub groups: bool,
    pub locks: bool,
    pub purges: bool,
}

struct Unconfirmed {
    seq: u64,
    durability: Durability,
    tx: Tx,
    /// What it settles.
    work: Vec<Delivery>,
}

impl Client {
    pub fn new(session: SessionId, heartbeat_ms: u64, habits: Habits) -> Self {
        Self {
            session,
            heartbeat_ms,
            stage: Stage::Offline,
            conn: None,
            said_at_ms: 0,
            decoder: Decoder::new(MAX_FRAME_BYTES),
            last_seq: 0,
            unconfirmed: VecDeque::new(),
            work: Vec::new(),
            stale: Vec::new(),
            credit: 0,
            takes_all: false,
            wanted: Vec::new(),
            habits,
        }
    }

    pub fn drop_habit(&mut self, name: &str) {
        match name {
            "delays" => self.habits.delays = false,
            "groups" => self.habits.groups = false,
            "locks" => self.habits.locks = false,
            "purges" => self.habits.purges = false,
            _ => {}
        }
    }

    pub fn hello(&mut self, conn: ConnId) -> Said {
        self.conn = Some(conn);
        self.stage = Stage::Greeting;
        self.decoder = Decoder::new(MAX_FRAME_BYTES);
        self.credit = 0;
        self.takes_all = false;
        let hello = Hello {
            session: self.session,
            heartbeat_ms: self.heartbeat_ms,
            last_seq: self.last_seq,
            leases: self.leases(),
        };
        Said {
            hello: Some(hello),
            ..Said::default()
        }
    }

    /// Those it works on, and those whose settlement it may have to say again.
    fn leases(&self) -> Vec<Lease> {
        let settled = self
            .unconfirmed
            .iter()
            .flat_map(|unconfirmed| &unconfirmed.work);
        self.work
            .iter()
            .chain(settled)
            .map(|delivery| delivery.lease)
            .collect()
    }

    pub fn disconnected(&mut self) {
        self.conn = None;
        if self.stage != Stage::Dead {
            self.stage = Stage::Offline;
        }
    }

    pub fn is_idle(&self) -> bool {
        self.stage == Stage::Open && self.unconfirmed.is_empty() && self.work.is_empty()
    }

    // --- what it is told

    /// Bytes have arrived; what it says at once, if anything.
    pub fn hears(&mut self, bytes: &[u8], told: &mut Vec<(Key, KeyState)>) -> Vec<Said> {
        self.decoder.extend(bytes);
        let mut answers = Vec::new();
        while let Some(frame) = self
            .decoder
            .next_message()
            .expect("the checker has read it before")
        {
            if let Some(welcome) = frame.welcome {
                answers.extend(self.welcomed(welcome));
            }
            if let Some(confirm) = frame.confirm {
                let receipts: Vec<(u64, Receipt)> =
                    convert::all(confirm.receipts).expect("it was checked");
                for (seq, receipt) in receipts {
                    self.refused(seq, &receipt);
                }
                let is_open = |unconfirmed: &Unconfirmed| {
                    unconfirmed.seq > confirm.through && !confirm.early.contains(&unconfirmed.seq)
                };
                self.unconfirmed.retain(is_open);
            }
            for delivery in frame.deliveries {
                self.credit = self.credit.saturating_sub(1);
                self.work.push(delivery.try_into().expect("it was checked"));
            }
            let values: Vec<(Key, KeyState)> = convert::all(frame.values).expect("it was checked");
            told.extend(values);
        }
        answers
    }

    fn welcomed(&mut self, welcome: proto::Welcome) -> Option<Said> {
        self.stage = Stage::Open;
        let held: Vec<Lease> = convert::all(welcome.leases).expect("it was checked");
        let (work, lost) = std::mem::take(&mut self.work)
            .into_iter()
            .partition(|delivery| held.contains(&delivery.lease));
        self.work = work;
        let lost: Vec<Delivery> = lost;
        self.stale
            .extend(lost.iter().map(|delivery| delivery.lease));
        if welcome.forgotten {
            // What became of them is unknown, and sending them again could apply them twice. But a lease
            // that holds was not settled.
            let unknown = std::mem::take(&mut self.unconfirmed);
            let unsettled = unknown.into_iter().flat_map(|unknown| unknown.work);
            self.work
                .extend(unsettled.filter(|delivery| held.contains(&delivery.lease)));
        }
        self.unconfirmed
            .retain(|unconfirmed| unconfirmed.seq > welcome.applied_through);
        let resent = self.unconfirmed.iter().map(|unconfirmed| Commit {
            first_seq: unconfirmed.seq,
            durability: unconfirmed.durability,
            txs: vec![unconfirmed.tx.clone()],
            last_part: None,
        });
        let commits: Vec<Commit> = resent.collect();
        (!commits.is_empty()).then(|| Said {
            commits,
            ..Said::default()
        })
    }

    /// A settlement that was refused for another lease than its own changed nothing: it is to be
    /// done again.
    fn refused(&mut self, seq: u64, receipt: &Receipt) {
        let Receipt::Refused { op, .. } = receipt else {
            return;
        };
        if let Some(at) = self
            .unconfirmed
            .iter()
            .position(|unconfirmed| unconfirmed.seq == seq)
            && let Some(refused) = self.unconfirmed.remove(at)
            && *op > 0
        {
            self.work.extend(refused.work);
        }
    }

    // --- what it does

    /// Something of its own accord; in one frame, or in two.
    pub fn act(&mut self, rng: &mut Rng, wall_ms: u64) -> Vec<Said> {
        if self.stage != Stage::Open {
            return Vec::new();
        }
        let mut said = Said::default();
        if self.habits.consumes && self.credit == 0 && self.work.len() < 8 && rng.one_in(2) {
            let credit = 1 + rng.below(6) as u32;
            self.credit += credit;
            said.consume = Some(Consume {
                queues: self.habits.queues.clone(),
                credit,
            });
        }
        if self.unconfirmed.len() < IN_FLIGHT {
            let mut txs = Vec::new();
            for _ in 0..=rng.below(3) {
                if !self.work.is_empty() && rng.one_in(2) {
                    let delivery = self
                        .work
                        .swap_remove(rng.below(self.work.len() as u64) as usize);
                    txs.push((self.settlement(&delivery, rng, wall_ms), vec![delivery]));
                } else if self.habits.publishes && rng.one_in(2) {
                    txs.push((self.new_work(rng, wall_ms), Vec::new()));
                }
            }
            if !txs.is_empty() {
                let durability = self.habits.durabilities
                    [rng.below(self.habits.durabilities.len() as u64) as usize];
                self.commit(&mut said, txs, durability, rng);
            }
        }
        if !self.wanted.is_empty() && rng.one_in(4) {
            said.watch = self.wanted.drain(..self.wanted.len().min(4)).collect();
        }
        let parts = Said {
            parts: std::mem::take(&mut said.parts),
            ..Said::default()
        };
        let says_anything =
            !said.commits.is_empty() || said.consume.is_some() || !said.watch.is_empty();
        let in_parts = (!parts.parts.is_empty()).then_some(parts);
        in_parts
            .into_iter()
            .chain(says_anything.then_some(said))
            .collect()
    }

    /// As when all faults are over: takes all there is and finishes it.
    pub fn finish(&mut self, rng: &mut Rng) -> Option<Said> {
        if self.stage != Stage::Open {
            return None;
        }
        let mut said = Said::default();
        if self.credit == 0 || !self.takes_all {
            self.takes_all = true;
            self.credit += 16;
            let queues = QUEUES.iter().copied().chain([DEAD_LETTER_QUEUE]);
            let queues = queues.map(str::to_string).collect();
            said.consume = Some(Consume { queues, credit: 16 });
        }
        let room = IN_FLIGHT - self.unconfirmed.len().min(IN_FLIGHT);
        let later = self.work.split_off(self.work.len().min(room));
        let now = std::mem::replace(&mut self.work, later);
        let settled = now
            .into_iter()
            .map(|delivery| (self.success(&delivery), vec![delivery]));
        let txs: Vec<(Tx, Vec<Delivery>)> = settled.collect();
        if !txs.is_empty() {
            self.commit(&mut said, txs, Durability::Disk, rng);
        }
        (!said.commits.is_empty() || said.consume.is_some()).then_some(said)
    }

    pub fn resume(&mut self, queues: impl Iterator<Item = String>, rng: &mut Rng) -> Said {
        let mut said = Said::default();
        let ops: Vec<Op> = queues.map(|queue| Op::Resume { queue }).collect();
        self.commit(
            &mut said,
            vec![(ops.into(), Vec::new())],
            Durability::Disk,
            rng,
        );
        said
    }

    pub fn watch(&self, keys: Vec<Key>) -> Said {
        Said {
            watch: keys,
            ..Said::default()
        }
    }

    fn commit(
        &mut self,
        said: &mut Said,
        settled: Vec<(Tx, Vec<Delivery>)>,
        durability: Durability,
        rng: &mut Rng,
    ) {
        let first_seq = self.last_seq + 1;
        let mut txs = Vec::new();
        for (tx, work) in settled {
            self.last_seq += 1;
            let seq = self.last_seq;
            txs.push(tx.clone());
            self.unconfirmed.push_back(Unconfirmed {
                seq,
                durability,
                tx,
                work,
            });
        }
        let mut last_part = None;
        if let [tx] = &txs[..]
            && tx.ops.len() > 1
            && rng.one_in(3)
        {
            let (first, last) = tx
                .ops
                .split_at(1 + rng.below(tx.ops.len() as u64 - 1) as usize);
            said.parts
                .push((first_seq, durability, first.to_vec().into()));
            last_part = Some(last.to_vec().into());
        }
        said.commits.push(Commit {
            first_seq,
            durability,
            txs,
            last_part,
        });
    }

    /// How a job ends.
    fn settlement(&mut self, delivery: &Delivery, rng: &mut Rng, wall_ms: u64) -> Tx {
        let note = Bytes::from_static(b"an error");
        let cost_us = rng.below(5_000);
        let head = DeliveryHead::from(delivery);
        let outcome = match rng.below(12) {
            0 if delivery.queue != DEAD_LETTER_QUEUE => {
                let delay_ms = if self.habits.delays {
                    rng.below(500)
                } else {
                    0
                };
                Outcome::Retry {
                    delay_ms,
                    note,
                    cost_us,
                }
            }
            1 if delivery.queue != DEAD_LETTER_QUEUE
                && delivery.message.max_deliveries < u8::MAX =>
            {
                let value = Some(Bytes::from_static(b"the last error"));
                let mut tx = settle(
                    &head,
                    Outcome::Failed {
                        value,
                        note,
                        cost_us,
                    },
                );
                tx.ops.extend(join_of(&delivery.message, false));
                self.stale.push(delivery.lease);
                return tx;
            }
            2 => Outcome::Crashed {
                reason: "killed by signal 9".to_string(),
            },
            3 => Outcome::Returned,
            _ => {
                let mut tx = self.success(delivery);
                if rng.one_in(3) {
                    tx.ops.push(self.publish(rng, wall_ms));
                }
                if rng.one_in(3) {
                    // A member that says twice that it has ended counts once.
                    tx.ops.extend(join_of(&delivery.message, true));
                }
                if !self.stale.is_empty() && rng.one_in(8) {
                    // One that it lost, or has settled before: nothing of this may happen.
                    let lease = self.stale[rng.below(self.stale.len() as u64) as usize];
                    tx.ops.push(Op::Ack { lease, cost_us });
                }
                return tx;
            }
        };
        self.stale.push(delivery.lease);
        settle(&head, outcome)
    }

    fn success(&mut self, delivery: &Delivery) -> Tx {
        let head = DeliveryHead::from(delivery);
        // What is dead has had its result.
        let is_dead = delivery.queue == DEAD_LETTER_QUEUE;
        let value = (!is_dead).then(|| Bytes::copy_from_slice(&delivery.lease.grant.to_le_bytes()));
        let mut tx = settle(
            &head,
            Outcome::Succeeded {
                value,
                cost_us: 100,
            },
        );
        if !is_dead {
            tx.ops.extend(join_of(&delivery.message, true));
        }
        self.stale.push(delivery.lease);
        tx
    }

    /// A transaction that brings new work, or plays with locks.
    fn new_work(&mut self, rng: &mut Rng, wall_ms: u64) -> Tx {
        let key =
            |rng: &mut Rng| Key::Named(Bytes::from_static(LOCKS[rng.below(3) as usize].as_bytes()));
        match rng.below(12) {
            0 if self.habits.groups => return self.group(rng, wall_ms),
            1 | 2 if self.habits.locks => {
                let condition = if rng.bool() {
                    Condition::Absent
                } else {
                    Condition::Present
                };
                let key = key(rng);
                let guard = Op::Guard {
                    key: key.clone(),
                    condition: condition.clone(),
                };
                let change = match condition {
                    Condition::Absent => {
                        let status = ValueStatus::Succeeded;
                        let value = Value {
                            status,
                            body: Bytes::from_static(b"mine"),
                        };
                        let ttl_ms = self.habits.delays.then(|| 20 + rng.below(2_000));
                        Op::Put {
                            key,
                            value,
                            ttl_ms,
                            group: "locks".to_string(),
                        }
                    }
                    _ => Op::Delete { key },
                };
                return vec![self.publish(rng, wall_ms), guard, change].into();
            }
            3 if self.habits.locks => {
                let mut op = self.publish(rng, wall_ms);
                if let Op::Publish {
                    unless_key, queues, ..
                } = &mut op
                {
                    queues.truncate(1);
                    *unless_key = Some(key(rng));
                }
                return vec![op].into();
            }
            4 if self.habits.purges => {
                let queue = QUEUES[rng.below(3) as usize].to_string();
                let op = match rng.below(5) {
                    0 => Op::Purge { queue },
                    1 => Op::Pause { queue },
                    2 => Op::Resume { queue },
                    _ => Op::Limit {
                        queue,
                        limits: limits(rng),
                    },
                };
                return vec![op].into();
            }
            _ => {}
        }
        let count = if rng.one_in(6) { 20 } else { 1 + rng.below(3) };
        let ops: Vec<Op> = (0..count).map(|_| self.publish(rng, wall_ms)).collect();
        ops.into()
    }

    /// A join of a few members, and what it holds back until they have ended.
    fn group(&mut self, rng: &mut Rng, wall_ms: u64) -> Tx {
        let join: JoinId = new_id(rng, wall_ms);
        let count = 1 + rng.below(4) as u32;
        let policy = if rng.bool() {
            JoinPolicy::AllSucceeded
        } else {
            JoinPolicy::AllEnded
        };
        let held = (0..=rng.below(2)).map(|_| {
            let queue = QUEUES[rng.below(3) as usize].to_string();
            (queue, self.message(rng, wall_ms, Bytes::new()))
        });
        let mut ops = vec![Op::Hold {
            join,
            count,
            messages: held.collect(),
            policy,
        }];
        for index in 0..count {
            let mut body = join.0.to_vec();
            body.extend_from_slice(&index.to_le_bytes());
            ops.push(Op::Publish {
                queues: vec![QUEUES[rng.below(3) as usize].to_string()],
                message: self.message(rng, wall_ms, body.into()),
                due: None,
                unless_key: None,
            });
        }
        ops.into()
    }

    fn publish(&mut self, rng: &mut Rng, wall_ms: u64) -> Op {
        let due = match rng.below(8) {
            0 if self.habits.delays => Some(Due::AfterMs(rng.below(3_000))),
            1 if self.habits.delays => Some(Due::At(wall_ms + rng.below(3_000))),
            _ => None,
        };
        let size = if rng.one_in(10) {
            rng.below(6_000)
        } else {
            rng.below(100)
        };
        let body = Bytes::from(vec![rng.draw() as u8; size as usize]);
        let mut message = self.message(rng, wall_ms, body);
        let mut queues = vec![QUEUES[rng.below(3) as usize].to_string()];
        if rng.one_in(16) {
            // Each copy is settled, and may die, by itself; so there is no one result, and nobody could
            // tell dead copies apart.
            message.max_deliveries = u8::MAX;
            message.result_ttl_ms = None;
            queues = QUEUES.iter().map(|queue| (*queue).to_string()).collect();
        }
        if message.result_ttl_ms.is_some() {
            self.wanted.push(Key::Result(message.id));
        }
        Op::Publish {
            queues,
            message,
            due,
            unless_key: None,
        }
    }

    fn message(&self, rng: &mut Rng, wall_ms: u64, body: Bytes) -> Message {
        let expires_at = match rng.below(10) {
            0 if self.habits.delays => Some(Due::AfterMs(rng.below(4_000))),
            _ => None,
        };
        Message {
            id: new_id(rng, wall_ms),
            task: TASKS[rng.below(3) as usize].to_string(),
            priority: if rng.one_in(4) {
                rng.below(10) as u8
            } else {
                DEFAULT_PRIORITY
            },
            expires_at,
            result_ttl_ms: (!rng.one_in(4)).then_some(86_400_000),
            max_deliveries: 1 + rng.below(3) as u8,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body,
        }
    }
}

/// A queue of a few messages, or one without limits.
fn limits(rng: &mut Rng) -> QueueLimits {
    QueueLimits {
        max_length: rng.one_in(2).then(|| rng.below(20)),
        max_bytes: None,
        overflow: match rng.bool() {
            true => Overflow::DropOldest,
            false => Overflow::Reject,
        },
    }
}

fn new_id(rng: &mut Rng, unix_ms: u64) -> MessageId {
    let mut random = [0; 10];
    random[..8].copy_from_slice(&rng.draw().to_le_bytes());
    MessageId::new(IdSource { unix_ms, random })
}

/// A member of a join says so in its body.
fn join_of(message: &Message, succeeded: bool) -> Option<Op> {
    let (join, index) = message.body.split_at_checked(16)?;
    let index = u32::from_le_bytes(index.try_into().ok()?);
    let join = MessageId(join.try_into().ok()?);
    Some(Op::Join {
        join,
        index,
        succeeded,
    })
}
