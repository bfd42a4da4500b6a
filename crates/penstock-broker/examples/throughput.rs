//! Measures the CPU time that a job costs the core: publish, deliver, ack and put, through `handle` and the polls, with
//! encoded records. Batches of 64, as a busy connection sends them.
//!
//! ```text
//!     cargo run --release -p penstock-broker --example throughput [jobs] [waiting] [idle consumers]
//! ```

use std::time::Duration;

use bytes::Bytes;
use penstock_broker::{Broker, BrokerOptions, ConnId, Input, Now, Output, Position, Recovery};
use penstock_message::{
    Consume, DEFAULT_PRIORITY, Delivery, Due, Durability, IdSource, Key, Message, MessageId, Op,
    SessionId, TaskSelection, Tx, Value, ValueStatus,
};

const BATCH: u64 = 64;
const PRODUCER: ConnId = ConnId(1);
const WORKER: ConnId = ConnId(2);
const RESULT_TTL_MS: u64 = 86_400_000;

struct Throughput {
    broker: Broker,
    now: Now,
    journal: Vec<u8>,
    position: Position,
    /// Records of the waiting jobs, to recover from; not kept once jobs run through.
    kept: Option<Vec<(Position, Vec<u8>)>>,
    seqs: [u64; 2],
    random: u64,
    spent: Duration,
}

/// Options that keep bodies in memory, since this program does not read them back.
fn options() -> BrokerOptions {
    BrokerOptions {
        resident_bodies_bytes: None,
        ..BrokerOptions::default()
    }
}

impl Throughput {
    fn new() -> Self {
        let now = Now {
            mono_ms: 0,
            wall_ms: 1_700_000_000_000,
            ..Now::default()
        };
        let mut bench = Self {
            broker: Recovery::new(options()).finish(now, 1),
            now,
            journal: Vec::new(),
            position: Position(0),
            kept: Some(Vec::new()),
            seqs: [0; 2],
            random: 1,
            spent: Duration::ZERO,
        };
        for (conn, session, name) in [(PRODUCER, 1, "producer"), (WORKER, 2, "worker")] {
            bench.turn(Input::Connected {
                conn,
                session: SessionId([session; 16]),
                name: name.to_owned(),
                heartbeat_ms: 15_000,
                last_seq: 0,
                leases: Vec::new(),
            });
        }
        bench
    }

    /// Adds a worker of a queue of its own that never has any jobs.
    fn stand_idle(&mut self, number: u64) {
        let conn = ConnId(WORKER.0 + 1 + number);
        let mut session = [9; 16];
        session[..8].copy_from_slice(&number.to_le_bytes());
        self.turn(Input::Connected {
            conn,
            session: SessionId(session),
            name: format!("idle {number}"),
            heartbeat_ms: 15_000,
            last_seq: 0,
            leases: Vec::new(),
        });
        let consume = Consume {
            queues: vec![format!("idle-{number}")],
            add_credit: 1,
            ..Consume::default()
        };
        self.turn(Input::Consume { conn, consume });
    }

    /// Handles one timed input: its records go to the journal, which syncs, and the broker's outputs are returned.
    fn turn(&mut self, input: Input) -> Vec<Output> {
        let mut outputs = Vec::with_capacity(8);
        let begin = cpu_time();
        self.broker.handle(self.now, input);
        self.journal.clear();
        while let Some(record) = self.broker.poll_record() {
            record.encode_into(&mut self.journal);
            self.position = record.position;
            if let Some(kept) = &mut self.kept {
                kept.push((record.position, record.as_bytes().to_vec()));
            }
        }
        self.broker.handle_durable(self.position);
        while let Some(output) = self.broker.poll_output() {
            outputs.push(output);
        }
        self.spent += cpu_time() - begin;
        outputs
    }

    fn commit(&mut self, conn: ConnId, txs: Vec<Tx>) -> Vec<Output> {
        let seq = &mut self.seqs[conn.0 as usize - 1];
        let first_seq = *seq + 1;
        *seq += txs.len() as u64;
        self.turn(Input::Commit {
            conn,
            first_seq,
            durability: Durability::Disk,
            txs,
        })
    }

    fn publish(&mut self, count: u64) -> Vec<Delivery> {
        let txs = (0..count).map(|_| Tx::from(vec![self.job()])).collect();
        let outputs = self.commit(PRODUCER, txs);
        deliveries(outputs)
    }

    fn job(&mut self) -> Op {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let mut random = [0; 10];
        random[..8].copy_from_slice(&self.random.to_le_bytes());
        let message = Message {
            id: MessageId::new(IdSource {
                unix_ms: self.now.wall_ms,
                random,
            }),
            task: "shop.mail.send".to_owned(),
            priority: DEFAULT_PRIORITY,
            expires_at: Some(Due::AfterMs(3_600_000)).filter(|_| self.random.is_multiple_of(4)),
            result_ttl_ms: Some(RESULT_TTL_MS),
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from(vec![7; 150]),
            extras: None,
        };
        Op::Publish {
            queues: vec!["default".to_owned()],
            message,
            due: None,
            unless_key: None,
        }
    }

    fn settle(&mut self, delivered: Vec<Delivery>) -> Vec<Delivery> {
        let count = delivered.len() as u32;
        let txs = delivered
            .into_iter()
            .map(|delivery| {
                Tx::from(vec![
                    Op::Ack {
                        lease: delivery.lease,
                        cost_us: 20,
                    },
                    Op::Put {
                        key: Key::Result(delivery.lease.message),
                        value: Value::new(ValueStatus::Succeeded, Bytes::from(vec![1; 16])),
                        ttl_ms: Some(RESULT_TTL_MS),
                        group: delivery.message.task,
                    },
                ])
            })
            .collect();
        let outputs = self.commit(WORKER, txs);
        let mut delivered = deliveries(outputs);
        delivered.extend(self.consume(count));
        delivered
    }

    fn consume(&mut self, add_credit: u32) -> Vec<Delivery> {
        let consume = Consume {
            queues: vec!["default".to_owned()],
            tasks: TaskSelection::Named(vec!["shop.mail.send".to_owned()]),
            add_credit,
            ..Consume::default()
        };
        let outputs = self.turn(Input::Consume {
            conn: WORKER,
            consume,
        });
        deliveries(outputs)
    }
}

fn deliveries(outputs: Vec<Output>) -> Vec<Delivery> {
    let mut all = Vec::new();
    for output in outputs {
        if let Output::Deliver { deliveries, .. } = output {
            all.extend(deliveries);
        }
    }
    all
}

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|argument| argument.parse::<u64>());
    let mut next = |default| {
        arguments
            .next()
            .map_or(default, |number| number.expect("a number"))
    };
    let (jobs, waiting, idle) = (next(1_000_000), next(0), next(0));
    let mut bench = Throughput::new();
    for number in 0..idle {
        bench.stand_idle(number);
    }
    for _ in 0..waiting / BATCH {
        bench.publish(BATCH);
    }
    if waiting > 0 {
        println!(
            "{:6.0} ns to publish, with {waiting} waiting in the end",
            per(bench.spent, waiting)
        );
    }
    if let Some(records) = bench.kept.take()
        && waiting > 0
    {
        let begin = cpu_time();
        let mut recovery = Recovery::new(options());
        for (position, record) in &records {
            recovery
                .replay(*position, record)
                .expect("a broker reads what it wrote");
        }
        let recovered = recovery.finish(bench.now, 2);
        println!("{:6.0} ns to recover", per(cpu_time() - begin, waiting));
        drop(recovered);
    }
    bench.spent = Duration::ZERO;
    let (mut publishing, mut settling) = (Duration::ZERO, Duration::ZERO);
    let mut delivered = bench.consume(BATCH as u32);
    let mut settled = 0;
    for turn in 0..jobs / BATCH {
        // A thousand batches a second, so that timers advance too.
        bench.now.mono_ms += 1;
        bench.now.wall_ms += 1;
        let begin = bench.spent;
        delivered.extend(bench.publish(BATCH));
        let middle = bench.spent;
        assert!(!delivered.is_empty(), "turn {turn} delivered nothing");
        settled += delivered.len() as u64;
        delivered = bench.settle(std::mem::take(&mut delivered));
        publishing += middle - begin;
        settling += bench.spent - middle;
    }
    println!("{:6.0} ns to publish and deliver", per(publishing, settled));
    println!("{:6.0} ns to settle with a result", per(settling, settled));
    println!(
        "{:6.0} ns a job, of {settled} jobs in batches of {BATCH}",
        per(publishing + settling, settled)
    );
}

/// Returns the CPU time of this thread, so that other work on the machine is not counted.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn per(spent: Duration, jobs: u64) -> f64 {
    spent.as_nanos() as f64 / jobs as f64
}
