//! Tests the checker's verdicts on a broker whose disk reads on command.

use bytes::Bytes;
use penstock_broker::{BrokerOptions, ConnId, Now};
use penstock_journal::sim::SimStorage;
use penstock_journal::{JournalOptions, JournalReader, Writer};
use penstock_message::{
    Consume, DEFAULT_PRIORITY, Durability, IdSource, Message, MessageId, Op, SessionId, Tx,
};
use penstock_server::{Engine, EngineOptions, Peer};

use super::Checker;
use crate::model::{Time, Verdict};
use crate::said::{Commit, Hello, Said};

const BEGINNING_MS: u64 = 1_800_000_000_000;

/// Broker that keeps no body in memory, and its checker.
struct Desk {
    engine: Engine,
    writer: Writer<SimStorage>,
    reader: JournalReader<SimStorage>,
    checker: Checker,
    now_ms: u64,
}

impl Desk {
    fn new() -> Self {
        let options = EngineOptions {
            broker: BrokerOptions {
                resident_bodies_bytes: Some(0),
                ..BrokerOptions::default()
            },
            journal: JournalOptions {
                journal_id: [5; 16],
                segment_bytes: 65_536,
                batch_bytes: 4_096,
                opening_bytes: 4_096,
                spares: 1,
                ..JournalOptions::default()
            },
            token: None,
            max_connections: 10,
            stop_on_request: false,
            is_double: false,
            pid: 1,
        };
        let now = Now {
            mono_ms: 0,
            wall_ms: BEGINNING_MS,
            ..Now::default()
        };
        let (engine, writer, _) =
            Engine::open(SimStorage::new(), options, || now).expect("an empty disk");
        let reader = writer.reader();
        let mut desk = Self {
            engine,
            writer,
            reader,
            checker: Checker::default(),
            now_ms: 0,
        };
        desk.pass(0);
        desk
    }

    fn now(&self) -> Now {
        Now {
            mono_ms: self.now_ms,
            wall_ms: BEGINNING_MS + self.now_ms,
            ..Now::default()
        }
    }

    fn pass(&mut self, ms: u64) {
        self.now_ms += ms;
        let at = BEGINNING_MS + self.now_ms;
        self.checker.time(Time {
            steady: at,
            wall: at,
        });
        self.engine.tick(self.now());
    }

    fn greet(&mut self, conn: ConnId) -> Verdict {
        self.engine.opened(self.now(), conn, Peer::Trusted);
        let hello = Hello {
            session: SessionId([conn.0 as u8; 16]),
            heartbeat_ms: 60_000,
            last_seq: 0,
            leases: Vec::new(),
        };
        self.say(
            conn,
            &Said {
                hello: Some(hello),
                ..Said::default()
            },
        )
    }

    fn publish(&mut self, conn: ConnId, seq: u64, id: u8) -> Verdict {
        let message = Message {
            id: MessageId::new(IdSource {
                unix_ms: BEGINNING_MS,
                random: [id; 10],
            }),
            task: "shop.send".to_string(),
            priority: DEFAULT_PRIORITY,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from(vec![id; 100]),
            extras: None,
        };
        let publish = Op::Publish {
            queues: vec!["default".to_string()],
            message,
            due: None,
            unless_key: None,
        };
        let commit = Commit {
            first_seq: seq,
            durability: Durability::Disk,
            txs: vec![Tx::from(vec![publish])],
            last_part: None,
        };
        self.say(
            conn,
            &Said {
                commits: vec![commit],
                ..Said::default()
            },
        )
    }

    /// Hands out a second message, on the broker's behalf, while the first is ready. `meanwhile` happens between the
    /// two.
    fn pass_over(&mut self, meanwhile: impl FnOnce(&mut Self)) -> Verdict {
        let producer = ConnId(1);
        self.greet(producer)?;
        self.publish(producer, 1, 1)?;
        self.write()?;
        self.pass(1_000);
        self.write()?;
        meanwhile(self);
        self.checker.quiet(self.engine.broker())?;
        self.publish(producer, 2, 2)?;
        let later = MessageId::new(IdSource {
            unix_ms: BEGINNING_MS,
            random: [2; 10],
        });
        self.checker.in_turn(
            (SessionId([1; 16]), 0),
            later,
            "default",
            Some(self.engine.broker()),
        )
    }

    fn take_one(&mut self, conn: ConnId) -> Verdict {
        let wish = Consume {
            queues: vec!["default".to_string()],
            add_credit: 1,
            ..Consume::default()
        };
        self.say(
            conn,
            &Said {
                consumers: vec![wish.into()],
                ..Said::default()
            },
        )
    }

    fn say(&mut self, conn: ConnId, said: &Said) -> Verdict {
        let bytes = said.encode();
        self.engine.received(self.now(), conn, &bytes);
        self.checker.heard(conn, &bytes, self.engine.broker())?;
        self.send()
    }

    fn send(&mut self) -> Verdict {
        while let Some(conn) = self.engine.poll_transmit() {
            let bytes = self.engine.outgoing(conn).to_vec();
            self.checker.sent(conn, &bytes)?;
            self.engine.transmitted(self.now(), conn, bytes.len());
        }
        while let Some(conn) = self.engine.poll_close() {
            self.checker.closed(conn)?;
        }
        self.checker.end_of_call(Some(self.engine.broker()))
    }

    fn write(&mut self) -> Verdict {
        while let Some(task) = self.engine.take_batch(self.now()) {
            let done = task.carry_out(&mut self.writer, |_| ());
            done.expect("the disk is well");
            self.engine.batch_done(self.now(), &task, 100);
            self.send()?;
        }
        Ok(())
    }

    fn read(&mut self) -> Verdict {
        while let Some(mut reads) = self.engine.take_reads(self.now()) {
            reads.carry_out(&mut self.reader);
            self.engine.reads_done(self.now(), reads);
            self.send()?;
        }
        Ok(())
    }
}

/// Seed 112577 of a soak: the first message was granted to a client that said goodbye before the body was read. It was
/// back in its place when the second, handed out earlier, left. The checker reported that as out of turn.
#[test]
fn a_delivery_whose_body_is_read_late_may_leave_after_a_goodbye_brought_an_earlier_one_back() {
    let [producer, first, second] = [1, 2, 3].map(ConnId);
    let mut desk = Desk::new();
    let run = |desk: &mut Desk| -> Verdict {
        for conn in [producer, first, second] {
            desk.greet(conn)?;
        }
        desk.publish(producer, 1, 1)?;
        desk.publish(producer, 2, 2)?;
        desk.write()?;
        desk.pass(1_000);
        desk.write()?;
        desk.checker.quiet(desk.engine.broker())?;
        desk.take_one(first)?;
        desk.take_one(second)?;
        desk.say(first, &Said::goodbye())?;
        assert_eq!(desk.checker.counts.deliveries, 0, "bodies are not read yet");
        desk.read()
    };
    assert_eq!(run(&mut desk), Ok(()));
    assert_eq!(desk.checker.counts.deliveries, 1);
}

/// A ready message that was not handed out may not be passed over.
#[test]
fn a_message_that_nobody_was_given_may_not_be_passed_over() {
    let mut desk = Desk::new();
    let verdict = desk.pass_over(|_| ());
    assert!(verdict.is_err_and(|what| what.contains("whose turn it was")));
}

/// Seed 404123 of a soak: three brokers died, each of which may have handed out the first message unseen. So it may
/// have failed and no longer be in the way. The checker reported the second as out of turn.
#[test]
fn a_message_that_may_have_failed_may_be_passed_over() {
    let mut desk = Desk::new();
    let verdict = desk.pass_over(|desk| {
        for _ in 0..3 {
            desk.checker.model.restarted(1_000);
        }
        // Until here, a client might have come back with it.
        desk.pass(1_000);
    });
    assert_eq!(verdict, Ok(()));
}
