//! Drives the core with any commands, in any order, with any numbers.

use std::collections::{BTreeSet, VecDeque};

use arbitrary::{Result, Unstructured};
use bytes::Bytes;
use penstock_broker::{
    Broker, BrokerOptions, CarriedForward, ConnId, Input, Now, Output, Position, Query, Recovery,
    Unread,
};
use penstock_message::{
    AskQuery, Claim, Condition, Conflict, Consume, Due, Durability, HeaderPatch, Hold, JoinPolicy,
    Key, Lease, Message, MessageId, Op, ReleaseReason, Scope, SessionId, StatusQuery,
    TaskSelection, Tx, Unsealed, Until, Value, ValueStatus, WorkerReport, WorkerState,
};

const CLIENTS: usize = 3;
const IDS: u8 = 6;

/// Checks that nothing panics, that all counts stay correct, and that a broker recovered from the records
/// equals the one that wrote them.
pub fn broker(data: &[u8]) {
    let mut data = Unstructured::new(data);
    // The input can't know whether bodies are in memory.
    let resident_bodies_bytes = (!data.arbitrary().unwrap_or(false)).then_some(0);
    let mut world = BrokerWorld::new(BrokerOptions {
        resident_bodies_bytes,
        ..options()
    });
    while !data.is_empty() {
        if world.step(&mut data).is_err() {
            break;
        }
        world.broker.assert_consistent();
    }
    world.check_recovery();
}

/// Prints each step when `HOSTILE_TRACE=1` is set, to examine a finding.
fn trace(done: &dyn std::fmt::Debug) {
    static WANTED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    if *WANTED.get_or_init(|| std::env::var_os("HOSTILE_TRACE").is_some()) {
        eprintln!("{done:?}");
    }
}

struct BrokerWorld {
    options: BrokerOptions,
    broker: Broker,
    now: Now,
    /// Latest time that the wall clock has shown.
    latest_wall_ms: u64,
    /// Records by position; `None` if the segment was dropped.
    journal: Vec<Option<Vec<u8>>>,
    synced: usize,
    clients: [HostileClient; CLIENTS],
    connections: u64,
    open: BTreeSet<ConnId>,
    /// Delivered leases, the newest last.
    leases: VecDeque<Lease>,
}

#[derive(Default)]
struct HostileClient {
    conn: Option<ConnId>,
    session: u8,
    seq: u64,
}

fn options() -> BrokerOptions {
    BrokerOptions {
        results_cap_bytes: 500,
        session_memory_ms: 40_000,
        max_body_bytes: 600,
        staged_parts_cap_bytes: 4_000,
        ..BrokerOptions::default()
    }
}

impl BrokerWorld {
    fn new(options: BrokerOptions) -> Self {
        let now = Now {
            mono_ms: 1_000,
            wall_ms: 1_700_000_000_000,
            ..Now::default()
        };
        Self {
            broker: Recovery::new(options.clone()).finish(now, 1),
            options,
            now,
            latest_wall_ms: now.wall_ms,
            journal: Vec::new(),
            synced: 0,
            clients: Default::default(),
            connections: 0,
            open: BTreeSet::new(),
            leases: VecDeque::new(),
        }
    }

    fn step(&mut self, data: &mut Unstructured<'_>) -> Result<()> {
        match data.int_in_range(0..=15)? {
            0 => self.connect(data)?,
            1 => {
                let client = data.int_in_range(0..=CLIENTS - 1)?;
                if let Some(conn) = self.clients[client].conn.take() {
                    let clean = data.arbitrary()?;
                    self.handle(Input::Disconnected { conn, clean });
                }
            }
            2 => {
                let passed_ms = u64::from(data.arbitrary::<u16>()?);
                self.now.mono_ms += passed_ms;
                self.now.wall_ms += passed_ms;
                // The wall clock may be set; a small change is not even noticed.
                if data.ratio(1, 8)? {
                    self.now.wall_ms = u64::from(data.arbitrary::<u32>()?) << 12;
                }
                self.latest_wall_ms = self.latest_wall_ms.max(self.now.wall_ms);
                trace(&self.now);
                self.broker.handle_deadline(self.now);
            }
            3 => self.settle(),
            4 => self.take_records(),
            5 => {
                let before = Position(self.journal.len() as u64 + 1);
                trace(&("carry forward", before));
                self.take_records();
                while self.broker.carry_forward(before, 100) != CarriedForward::All {
                    self.settle();
                }
                self.take_records();
                for record in &mut self.journal[..before.0 as usize - 1] {
                    *record = None;
                }
            }
            choice => {
                let client = data.int_in_range(0..=CLIENTS - 1)?;
                let Some(conn) = self.clients[client].conn else {
                    return self.connect_as(client, data);
                };
                let input = self.input(choice, client, conn, data)?;
                self.handle(input);
            }
        }
        if data.ratio(3, 4)? {
            self.settle();
        }
        Ok(())
    }

    fn handle(&mut self, input: Input) {
        trace(&input);
        if let Input::Disconnected { conn, .. } = input {
            self.open.remove(&conn);
        }
        self.broker.handle(self.now, input);
    }

    fn connect(&mut self, data: &mut Unstructured<'_>) -> Result<()> {
        let client = data.int_in_range(0..=CLIENTS - 1)?;
        self.connect_as(client, data)
    }

    fn connect_as(&mut self, client: usize, data: &mut Unstructured<'_>) -> Result<()> {
        self.connections += 1;
        let conn = ConnId(self.connections);
        self.open.insert(conn);
        let state = &mut self.clients[client];
        // An earlier connection, if there is one, is fenced or lost.
        let lost = state.conn.replace(conn);
        if data.ratio(1, 4)? {
            state.session = data.int_in_range(0..=3)?;
            state.seq = 0;
        }
        let last_seq = match data.ratio(1, 8)? {
            true => any_number(data)?,
            false => state.seq,
        };
        state.seq = last_seq;
        let session = SessionId([state.session * CLIENTS as u8 + client as u8; 16]);
        if let Some(conn) = lost
            && data.arbitrary()?
        {
            self.handle(Input::Disconnected { conn, clean: false });
        }
        let mut leases = Vec::new();
        for _ in 0..data.int_in_range(0..=3)? {
            leases.push(self.lease(data)?);
        }
        let input = Input::Connected {
            conn,
            session,
            name: any_name(data)?,
            // The engine passes on no others.
            heartbeat_ms: any_number(data)?.clamp(100, 3_600_000),
            last_seq,
            leases,
        };
        self.handle(input);
        Ok(())
    }

    fn input(
        &mut self,
        choice: u32,
        client: usize,
        conn: ConnId,
        data: &mut Unstructured<'_>,
    ) -> Result<Input> {
        Ok(match choice {
            6 | 7 => {
                let mut queues = Vec::new();
                for _ in 0..data.int_in_range(0..=3)? {
                    queues.push(any_name(data)?);
                }
                let mut tasks = Vec::new();
                for _ in 0..data.int_in_range(0..=3)? {
                    tasks.push(any_name(data)?);
                }
                let consume = Consume {
                    consumer: data.int_in_range(0..=2)?,
                    app: any_name(data)?,
                    queues,
                    tasks: match data.int_in_range(0..=2)? {
                        0 => TaskSelection::Same,
                        1 => TaskSelection::Any,
                        _ => TaskSelection::Named(tasks),
                    },
                    add_credit: any_number(data)? as u32,
                    held_by: match data.int_in_range(0..=3)? {
                        0 => Some(vec![any_id(data)?]),
                        1 => Some(Vec::new()),
                        _ => None,
                    },
                };
                Input::Consume { conn, consume }
            }
            8 => match data.int_in_range(0..=7)? {
                0 => Input::StopConsuming {
                    conn,
                    consumer: data.int_in_range(0..=2)?,
                },
                1 => Input::Writable {
                    conn,
                    writable: data.arbitrary()?,
                },
                2 => Input::Report {
                    conn,
                    report: WorkerReport {
                        slots: any_number(data)? as u32,
                        busy: any_number(data)? as u32,
                        state: WorkerState::Paused,
                        takes_asks: data.arbitrary()?,
                        parked: any_number(data)? as u32,
                    },
                },
                3 => Input::Query {
                    conn,
                    id: data.arbitrary()?,
                    query: match data.int_in_range(0..=2)? {
                        0 => Query::Status(StatusQuery::default()),
                        1 => Query::Message(any_id(data)?),
                        _ => Query::Ask(AskQuery {
                            worker: any_name(data)?,
                            question: Bytes::new(),
                            patience_ms: any_number(data)?,
                        }),
                    },
                },
                6 => Input::Reply {
                    conn,
                    ask: data.int_in_range(0..=4)?,
                    reply: Bytes::new(),
                },
                4 => Input::Watch {
                    conn,
                    keys: vec![any_key(data)?, any_key(data)?],
                    waiter: match data.arbitrary()? {
                        true => Some(any_id(data)?),
                        false => None,
                    },
                },
                7 => Input::WaitOver {
                    conn,
                    keys: vec![any_key(data)?],
                    waiter: any_id(data)?,
                },
                _ => Input::Unwatch {
                    conn,
                    keys: vec![any_key(data)?],
                },
            },
            9 => Input::CommitPart {
                conn,
                seq: self.next_seq(client, 1, data)?,
                durability: any_durability(data)?,
                tx: self.tx(data)?,
                last: data.arbitrary()?,
            },
            _ => {
                let mut txs = Vec::new();
                for _ in 0..data.int_in_range(0..=3)? {
                    txs.push(self.tx(data)?);
                }
                Input::Commit {
                    conn,
                    first_seq: self.next_seq(client, txs.len() as u64, data)?,
                    durability: any_durability(data)?,
                    txs,
                }
            }
        })
    }

    /// Returns the next sequence number, usually the right one.
    fn next_seq(&mut self, client: usize, count: u64, data: &mut Unstructured<'_>) -> Result<u64> {
        let seq = &mut self.clients[client].seq;
        if data.ratio(1, 16)? {
            return any_number(data);
        }
        let next = seq.wrapping_add(1);
        if !data.ratio(1, 8)? {
            *seq = seq.wrapping_add(count);
        }
        Ok(next)
    }

    fn tx(&mut self, data: &mut Unstructured<'_>) -> Result<Tx> {
        let mut ops = Vec::new();
        for _ in 0..data.int_in_range(0..=3)? {
            ops.push(self.op(data)?);
        }
        Ok(Tx { ops })
    }

    fn op(&mut self, data: &mut Unstructured<'_>) -> Result<Op> {
        Ok(match data.int_in_range(0..=17)? {
            0..=3 => {
                let mut queues = vec![any_name(data)?];
                if data.ratio(1, 4)? {
                    queues.push(any_name(data)?);
                }
                let unless_key = match data.ratio(1, 4)? {
                    true => Some(any_claim(data)?),
                    false => None,
                };
                Op::Publish {
                    queues,
                    message: any_message(data)?,
                    due: any_due(data)?,
                    unless_key,
                }
            }
            4..=6 => Op::Ack {
                lease: self.lease(data)?,
                cost_us: any_number(data)?,
            },
            7 => Op::Release {
                lease: self.lease(data)?,
                reason: match data.int_in_range(0..=2)? {
                    0 => ReleaseReason::Returned,
                    1 => ReleaseReason::Crashed(any_name(data)?),
                    _ => ReleaseReason::Suspected(any_name(data)?),
                },
            },
            8 => Op::Move {
                lease: self.lease(data)?,
                queue: match data.arbitrary()? {
                    true => Some(any_name(data)?),
                    false => None,
                },
                due: any_due(data)?,
                patch: HeaderPatch {
                    next_attempt: data.arbitrary()?,
                    note: match data.arbitrary()? {
                        true => Some(any_body(data)?),
                        false => None,
                    },
                    expires_at: any_due(data)?,
                },
                cost_us: any_number(data)?,
            },
            9 => Op::Put {
                key: any_key(data)?,
                value: Value::new(
                    *data.choose(&[
                        ValueStatus::Succeeded,
                        ValueStatus::Failed,
                        ValueStatus::Cancelled,
                    ])?,
                    any_body(data)?,
                ),
                ttl_ms: match data.arbitrary()? {
                    true => Some(any_number(data)?),
                    false => None,
                },
                group: any_name(data)?,
            },
            10 => Op::Delete {
                key: any_key(data)?,
            },
            11 => Op::Guard {
                key: any_key(data)?,
                condition: match data.int_in_range(0..=2)? {
                    0 => Condition::Absent,
                    1 => Condition::Present,
                    _ => Condition::Is(any_body(data)?),
                },
            },
            12 => {
                let mut messages = Vec::new();
                for _ in 0..data.int_in_range(0..=2)? {
                    messages.push((any_name(data)?, any_message(data)?));
                }
                Op::Hold(Hold {
                    join: any_id(data)?,
                    count: any_number(data)? as u32,
                    messages,
                    policy: *data.choose(&[JoinPolicy::AllSucceeded, JoinPolicy::AllEnded])?,
                    unsealed: match data.arbitrary()? {
                        true => Some(Unsealed {
                            workflow: any_id(data)?,
                            creator: None,
                        }),
                        false => None,
                    },
                    ..Hold::default()
                })
            }
            13 => Op::Join {
                join: any_id(data)?,
                index: any_number(data)? as u32,
                succeeded: data.arbitrary()?,
            },
            17 => Op::Seal {
                join: any_id(data)?,
                count: any_number(data)? as u32,
            },
            14 => Op::Purge {
                queue: any_name(data)?,
            },
            15 => Op::Pause {
                queue: any_name(data)?,
            },
            _ => Op::Resume {
                queue: any_name(data)?,
            },
        })
    }

    fn lease(&mut self, data: &mut Unstructured<'_>) -> Result<Lease> {
        if !self.leases.is_empty() && data.ratio(7, 8)? {
            let back = data.int_in_range(0..=self.leases.len().min(8) - 1)?;
            return Ok(self.leases[self.leases.len() - 1 - back]);
        }
        Ok(Lease {
            message: any_id(data)?,
            epoch: any_number(data)? as u32,
            grant: any_number(data)?,
        })
    }

    fn take_records(&mut self) {
        while let Some(record) = self.broker.poll_record() {
            let expected = self.journal.len() as u64 + 1;
            assert_eq!(record.position.0, expected, "positions have no gaps");
            let mut bytes = Vec::new();
            record.encode_into(&mut bytes);
            self.journal.push(Some(bytes));
        }
    }

    fn settle(&mut self) {
        loop {
            let before = self.journal.len();
            self.take_records();
            self.synced = self.journal.len();
            self.broker.handle_durable(Position(self.synced as u64));
            let mut quiet = before == self.journal.len();
            while let Some(output) = self.broker.poll_output() {
                quiet = false;
                match output {
                    Output::Deliver { deliveries, .. } => {
                        self.leases
                            .extend(deliveries.iter().map(|delivery| delivery.lease));
                    }
                    Output::Close { conn, .. } => {
                        self.open.remove(&conn);
                        for client in &mut self.clients {
                            client.conn.take_if(|open| *open == conn);
                        }
                    }
                    _ => {}
                }
            }
            quiet &= !self.read_back();
            // Work in steps continues at once.
            let due_ms = self.broker.next_deadline();
            if quiet && due_ms.is_none_or(|due_ms| due_ms > self.now.mono_ms) {
                return;
            }
        }
    }

    fn read_back(&mut self) -> bool {
        let reads = self.broker.poll_reads(1_000);
        let any = !reads.is_empty();
        for read in reads {
            let index = read.position.0 as usize - 1;
            assert!(index < self.synced, "what is read is safe");
            let outcome = match &self.journal[index] {
                None => Err(Unread::Gone),
                Some(record) => {
                    let range = read.range.start as usize..read.range.end as usize;
                    Ok(Bytes::copy_from_slice(&record[range]))
                }
            };
            self.broker.handle_read(self.now, read, outcome);
        }
        any
    }

    fn check_recovery(&mut self) {
        self.settle();
        for conn in self.open.clone() {
            self.handle(Input::Disconnected { conn, clean: false });
        }
        // Suppose the wall clock is set back before a time that had come. A running broker keeps its decision,
        // while a restarted one waits again. So set the clock right again.
        self.now.wall_ms = self.latest_wall_ms;
        self.broker.handle_deadline(self.now);
        self.settle();
        let mut recovery = Recovery::new(self.options.clone());
        for (index, record) in self.journal.iter().enumerate() {
            if let Some(record) = record {
                recovery
                    .replay(Position(index as u64 + 1), record)
                    .expect("a broker reads what it wrote");
            }
        }
        let mut copy = recovery.finish(self.now, 1);
        copy.assert_consistent();
        let written = Position(self.journal.len() as u64);
        let original = describe(&mut self.broker, self.now, written);
        let recovered = describe(&mut copy, self.now, written);
        assert_eq!(original, recovered, "what is recovered is not what was");
    }
}

/// Describes everything that a client could learn from the broker.
fn describe(broker: &mut Broker, now: Now, written: Position) -> Vec<String> {
    let conn = ConnId(u64::MAX);
    broker.handle_durable(written);
    // Expired values are removed when they are looked up.
    broker.handle_deadline(now);
    while broker.poll_record().is_some() {}
    let mut said = vec![format!("{} bytes are live", broker.live_bytes())];
    let ids = || (0..IDS).map(id);
    let mut inputs = vec![
        Input::Connected {
            conn,
            session: SessionId([255; 16]),
            name: "observer".to_owned(),
            heartbeat_ms: 1,
            last_seq: 0,
            leases: Vec::new(),
        },
        Input::Watch {
            conn,
            keys: ids().map(Key::Result).chain(named_keys()).collect(),
            waiter: None,
        },
        Input::Query {
            conn,
            id: 1,
            query: Query::Status(StatusQuery::default()),
        },
    ];
    inputs.extend(ids().map(|id| Input::Query {
        conn,
        id: 1,
        query: Query::Message(id),
    }));
    for input in inputs {
        broker.handle(now, input);
        while broker.poll_record().is_some() {}
        broker.handle_durable(Position(broker.next_position().0 - 1));
        while let Some(output) = broker.poll_output() {
            match output {
                Output::Values { values, .. } => {
                    said.extend(values.iter().map(|value| format!("{value:?}")));
                }
                Output::Answer {
                    answer: penstock_broker::Answer::Status(page),
                    ..
                } => {
                    let mut status = page.status;
                    // Empty queues are not remembered, nor are workers' reports.
                    status.queues.retain(|queue| {
                        queue.ready + queue.delayed + queue.running > 0 || queue.paused
                    });
                    // Counts begin at the start, and consumers register again on their own.
                    for queue in &mut status.queues {
                        queue.consumers = 0;
                        queue.capacity_permille = None;
                        queue.tallied = Default::default();
                    }
                    let forget = |worker: &mut penstock_broker::WorkerStatus| {
                        (worker.slots, worker.busy, worker.parked) = (0, 0, 0);
                    };
                    status.workers.iter_mut().for_each(forget);
                    // Workers with the same name have no order.
                    status
                        .workers
                        .sort_by_cached_key(|worker| format!("{worker:?}"));
                    said.push(format!("{:?} {:?}", status.queues, status.workers));
                    said.push(format!("{} {}", status.results, status.results_bytes));
                }
                Output::Answer { answer, .. } => said.push(format!("{answer:?}")),
                _ => {}
            }
        }
    }
    said
}

// Small sets, so that values collide; and the numbers at which sums overflow.

fn any_number(data: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match data.int_in_range(0..=7)? {
        0 => u64::MAX - u64::from(data.arbitrary::<u8>()?),
        1 => u64::from(u32::MAX) - u64::from(data.arbitrary::<u8>()?),
        2 => 1 << data.int_in_range(0..=63)?,
        3 => u64::from(data.arbitrary::<u32>()?),
        _ => u64::from(data.arbitrary::<u8>()?),
    })
}

fn any_name(data: &mut Unstructured<'_>) -> Result<String> {
    Ok(match data.int_in_range(0..=15)? {
        0 => String::new(),
        1 => "x".repeat(256),
        2 => "dead".to_owned(),
        3..=5 => "other".to_owned(),
        _ => "default".to_owned(),
    })
}

fn id(number: u8) -> MessageId {
    MessageId([number; 16])
}

fn any_id(data: &mut Unstructured<'_>) -> Result<MessageId> {
    Ok(id(data.int_in_range(0..=IDS - 1)?))
}

fn named_keys() -> impl Iterator<Item = Key> {
    [&b"k1"[..], b"k2"]
        .into_iter()
        .map(|name| Key::Named(Bytes::from_static(name)))
}

fn any_key(data: &mut Unstructured<'_>) -> Result<Key> {
    Ok(match data.int_in_range(0..=7)? {
        0 => Key::Named(Bytes::new()),
        1 => Key::Named(Bytes::from_static(b"k1")),
        2 => Key::Named(Bytes::from_static(b"k2")),
        _ => Key::Result(any_id(data)?),
    })
}

fn any_claim(data: &mut Unstructured<'_>) -> Result<Box<Claim>> {
    let key = match data.ratio(1, 2)? {
        true => Key::Scoped(Scope::Unique, Bytes::from_static(b"k")),
        false => any_key(data)?,
    };
    Ok(Box::new(Claim {
        key,
        until: match data.int_in_range(0..=2)? {
            0 => Until::Ended,
            1 => Until::Started,
            _ => Until::ForMs(any_number(data)?),
        },
        conflict: match data.int_in_range(0..=3)? {
            0 => Conflict::Skip,
            1 => Conflict::Refuse,
            2 => Conflict::Replace { max_wait_ms: None },
            _ => Conflict::Replace {
                max_wait_ms: Some(any_number(data)?),
            },
        },
    }))
}

fn any_body(data: &mut Unstructured<'_>) -> Result<Bytes> {
    let length = match data.ratio(1, 8)? {
        true => data.int_in_range(0..=700)?,
        false => data.int_in_range(0..=8)?,
    };
    Ok(Bytes::from(vec![data.arbitrary()?; length]))
}

fn any_due(data: &mut Unstructured<'_>) -> Result<Option<Due>> {
    Ok(match data.int_in_range(0..=3)? {
        0 => Some(Due::AfterMs(any_number(data)?)),
        1 => Some(Due::At(any_number(data)?)),
        _ => None,
    })
}

fn any_durability(data: &mut Unstructured<'_>) -> Result<Durability> {
    Ok(*data.choose(&[Durability::Disk, Durability::Os, Durability::None])?)
}

fn any_message(data: &mut Unstructured<'_>) -> Result<Message> {
    let notes = data.int_in_range(0..=1)?;
    Ok(Message {
        id: any_id(data)?,
        task: any_name(data)?,
        priority: data.int_in_range(0..=10)?,
        expires_at: any_due(data)?,
        result_ttl_ms: match data.arbitrary()? {
            true => Some(any_number(data)?),
            false => None,
        },
        max_deliveries: any_number(data)? as u8,
        attempt: any_number(data)? as u32,
        crashes: any_number(data)? as u8,
        enqueued_at: any_number(data)?,
        notes: vec![any_body(data)?; notes],
        body: any_body(data)?,
        extras: None,
    })
}
