//! A client by hand: it publishes, consumes, settles, retries, reconnects and resends, or dies holding leases. It
//! speaks the protocol as a driver does, and sometimes as none would; its next action is drawn.

use std::collections::VecDeque;

use bytes::BytesMut;
use penstock_journal::sim::Rng;
use penstock_message::{
    Consume, Delivery, Durability, Key, KeyState, Lease, Op, Receipt, ScheduleName, SessionId,
    TaskSelection, Tx,
};
use penstock_wire::proto::{self, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, convert};

use crate::client::{Client, Stage};
use crate::model::Time;
use crate::said::{Commit, Hello, Said};
use crate::work::{Author, Habits, QUEUES, success};

/// Maximum number of transactions in flight, as in a driver.
const IN_FLIGHT: usize = 64;

pub struct Wild {
    session: SessionId,
    heartbeat_ms: u64,
    stage: Stage,
    said_at_ms: u64,
    heard_at_ms: u64,
    decoder: Decoder<ToClient>,
    last_seq: u64,
    unconfirmed: VecDeque<Unconfirmed>,
    /// Deliveries that it works on.
    work: Vec<Delivery>,
    /// Leases that it held earlier, and settled or lost.
    stale: Vec<Lease>,
    /// Number of requested deliveries that have not arrived.
    credit: u32,
    takes_all: bool,
    author: Author,
    /// Values that it has received.
    pub told: Vec<(Key, KeyState)>,
    out: BytesMut,
}

struct Unconfirmed {
    seq: u64,
    durability: Durability,
    tx: Tx,
    /// Deliveries that it settles.
    work: Vec<Delivery>,
}

impl Wild {
    pub fn new(session: SessionId, heartbeat_ms: u64, habits: Habits) -> Self {
        Self {
            session,
            heartbeat_ms,
            stage: Stage::Offline,
            said_at_ms: 0,
            heard_at_ms: 0,
            decoder: Decoder::new(MAX_FRAME_BYTES),
            last_seq: 0,
            unconfirmed: VecDeque::new(),
            work: Vec::new(),
            stale: Vec::new(),
            credit: 0,
            takes_all: false,
            author: Author::new(habits),
            told: Vec::new(),
            out: BytesMut::new(),
        }
    }

    fn say(&mut self, said: &Said) {
        self.out.extend_from_slice(&said.encode());
    }

    /// Returns the leases that it works on, and those whose settlement it may have to resend.
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

    // --- what it is told

    fn welcomed(&mut self, welcome: proto::Welcome) {
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
            // Their outcome is unknown, and sending them again could apply them twice. But a lease that still holds was
            // not settled.
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
        if !commits.is_empty() {
            self.say(&Said {
                commits,
                ..Said::default()
            });
        }
    }

    /// Handles a refusal. A settlement that was refused because of a lease other than its own changed nothing, so it
    /// must be repeated.
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

    pub fn resume(&mut self, queues: impl Iterator<Item = String>, rng: &mut Rng) {
        let mut said = Said::default();
        let ops: Vec<Op> = queues.map(|queue| Op::Resume { queue }).collect();
        let resume = vec![(ops.into(), Vec::new())];
        self.commit(&mut said, resume, Durability::Disk, rng);
        self.say_in_parts(said);
    }

    /// Removes schedules, so that they create no more jobs.
    pub fn unschedule(&mut self, names: Vec<ScheduleName>, rng: &mut Rng) {
        let mut said = Said::default();
        let ops = names
            .into_iter()
            .map(|schedule| Op::Unschedule { schedule });
        let txs = ops.map(|op| (vec![op].into(), Vec::new())).collect();
        self.commit(&mut said, txs, Durability::Disk, rng);
        self.say_in_parts(said);
    }

    pub fn watch(&mut self, keys: Vec<Key>) {
        self.told.clear();
        self.say(&Said {
            watch: keys,
            ..Said::default()
        });
    }

    pub fn say_goodbye(&mut self) {
        self.say(&Said::goodbye());
    }

    /// Sends a frame in one or two pieces.
    fn say_in_parts(&mut self, mut said: Said) -> bool {
        let parts = std::mem::take(&mut said.parts);
        if !parts.is_empty() {
            self.say(&Said {
                parts,
                ..Said::default()
            });
        }
        let says_anything =
            !said.commits.is_empty() || !said.consumers.is_empty() || !said.watch.is_empty();
        if says_anything {
            self.say(&said);
        }
        says_anything
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

    /// Returns the settlement of a job, occasionally with one lease too many in it.
    fn settlement(&mut self, delivery: &Delivery, rng: &mut Rng, wall_ms: u64) -> Tx {
        let mut tx = self.author.settlement(delivery, rng, wall_ms);
        if matches!(tx.ops[0], Op::Ack { .. }) && !self.stale.is_empty() && rng.one_in(8) {
            // The lease was lost or settled before, so none of the settlement may be applied.
            let lease = self.stale[rng.below(self.stale.len() as u64) as usize];
            tx.ops.push(Op::Ack { lease, cost_us: 1 });
        }
        self.stale.push(delivery.lease);
        tx
    }
}

impl Client for Wild {
    fn drop_habit(&mut self, name: &str) {
        self.author.habits.drop(name);
    }

    fn sees_running(&mut self, running: Vec<penstock_message::MessageId>) {
        self.author.running = running;
    }

    fn stage(&self) -> Stage {
        self.stage
    }

    fn connected(&mut self, time: Time) {
        self.stage = Stage::Greeting;
        self.heard_at_ms = time.steady;
        self.decoder = Decoder::new(MAX_FRAME_BYTES);
        self.credit = 0;
        self.takes_all = false;
        self.out.clear();
        let hello = Hello {
            session: self.session,
            heartbeat_ms: self.heartbeat_ms,
            last_seq: self.last_seq,
            leases: self.leases(),
        };
        self.say(&Said {
            hello: Some(hello),
            ..Said::default()
        });
    }

    fn disconnected(&mut self) {
        if self.stage != Stage::Dead {
            self.stage = Stage::Offline;
        }
        self.out.clear();
    }

    fn die(&mut self) {
        self.stage = Stage::Dead;
    }

    fn hears(&mut self, _: &mut Rng, time: Time, bytes: &[u8]) -> bool {
        self.heard_at_ms = time.steady;
        self.decoder.extend(bytes);
        while let Some(frame) = self
            .decoder
            .next_message()
            .expect("the checker has read it before")
        {
            if let Some(welcome) = frame.welcome {
                self.welcomed(welcome);
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
            self.told.extend(values);
        }
        true
    }

    fn act(&mut self, rng: &mut Rng, time: Time) {
        if self.stage != Stage::Open {
            return;
        }
        let mut said = Said::default();
        let habits = &self.author.habits;
        if habits.consumes && self.credit == 0 && self.work.len() < 8 && rng.one_in(2) {
            let credit = 1 + rng.below(6) as u32;
            self.credit += credit;
            let wish = Consume {
                queues: habits.queues.clone(),
                tasks: match &habits.tasks {
                    None => TaskSelection::Any,
                    Some(tasks) => TaskSelection::Named(tasks.clone()),
                },
                add_credit: credit,
                ..Consume::default()
            };
            said.consumers.push(wish.into());
        }
        if self.unconfirmed.len() < IN_FLIGHT {
            let mut txs = Vec::new();
            for _ in 0..=rng.below(3) {
                if !self.work.is_empty() && rng.one_in(2) {
                    let delivery = self
                        .work
                        .swap_remove(rng.below(self.work.len() as u64) as usize);
                    txs.push((self.settlement(&delivery, rng, time.wall), vec![delivery]));
                } else if self.author.habits.publishes && rng.one_in(2) {
                    txs.push((self.author.new_work(rng, time.wall), Vec::new()));
                }
            }
            if !txs.is_empty() {
                let durability = self.author.durability(rng);
                self.commit(&mut said, txs, durability, rng);
            }
        }
        let wanted = &mut self.author.wanted;
        if !wanted.is_empty() && rng.one_in(4) {
            said.watch = wanted.drain(..wanted.len().min(4)).collect();
        }
        self.say_in_parts(said);
    }

    fn tick(&mut self, _: &mut Rng, time: Time) -> bool {
        if self.stage == Stage::Open && time.steady >= self.said_at_ms + self.heartbeat_ms / 3 {
            self.say(&Said {
                ping: true,
                ..Said::default()
            });
        }
        let is_silent = time.steady >= self.heard_at_ms + self.heartbeat_ms;
        !(is_silent && matches!(self.stage, Stage::Greeting | Stage::Open))
    }

    fn next_deadline_ms(&self) -> Option<u64> {
        let is_silent_ms = self.heard_at_ms + self.heartbeat_ms;
        match self.stage {
            Stage::Open => Some(is_silent_ms.min(self.said_at_ms + self.heartbeat_ms / 3)),
            Stage::Greeting => Some(is_silent_ms),
            Stage::Offline | Stage::Dead => None,
        }
    }

    fn finish(&mut self, rng: &mut Rng, _: Time) {
        if self.stage != Stage::Open {
            return;
        }
        let mut said = Said::default();
        if !self.author.habits.short_of_slots && (self.credit == 0 || !self.takes_all) {
            self.takes_all = true;
            self.credit += 16;
            let queues = QUEUES.iter().map(|queue| (*queue).to_string()).collect();
            let wish = Consume {
                queues,
                tasks: TaskSelection::Any,
                add_credit: 16,
                ..Consume::default()
            };
            said.consumers.push(wish.into());
        }
        let room = IN_FLIGHT - self.unconfirmed.len().min(IN_FLIGHT);
        let later = self.work.split_off(self.work.len().min(room));
        let now = std::mem::replace(&mut self.work, later);
        let settled = now.into_iter().map(|delivery| {
            self.stale.push(delivery.lease);
            (success(&delivery), vec![delivery])
        });
        let txs: Vec<(Tx, Vec<Delivery>)> = settled.collect();
        if !txs.is_empty() {
            self.commit(&mut said, txs, Durability::Disk, rng);
        }
        self.say_in_parts(said);
    }

    fn is_idle(&self) -> bool {
        self.stage == Stage::Open && self.unconfirmed.is_empty() && self.work.is_empty()
    }

    fn next_bytes(&mut self, time: Time) -> BytesMut {
        if !self.out.is_empty() {
            self.said_at_ms = time.steady;
        }
        std::mem::take(&mut self.out)
    }

    fn as_wild(&mut self) -> Option<&mut Wild> {
        Some(self)
    }
}
