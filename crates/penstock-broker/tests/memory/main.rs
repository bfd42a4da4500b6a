//! Names that were used once do not stay in memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use penstock_broker::{
    Answer, Broker, BrokerOptions, ConnId, Input, Now, Output, Position, Query, Recovery,
};
use penstock_message::{
    Consume, DEFAULT_PRIORITY, Delivery, Durability, IdSource, Message, MessageId, Op, SessionId,
    StatusPage, StatusQuery, Tx,
};

/// The system's memory, counted: what is in use, and what was given out in all.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static GIVEN: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static MEMORY: Counting = Counting;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Relaxed);
        GIVEN.fetch_add(layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(block, layout) }
    }
}

const NAMES: u32 = 100_000;
const BATCH: u32 = 500;
const CLIENT: ConnId = ConnId(1);
const HOUR_MS: u64 = 3_600_000;

struct World {
    broker: Broker,
    now: Now,
    seq: u64,
    jobs: u64,
}

impl World {
    fn new() -> Self {
        let now = Now {
            wall_ms: 1_700_000_000_000,
            ..Now::default()
        };
        let mut world = Self {
            broker: Recovery::new(BrokerOptions::default()).finish(now, 1),
            now,
            seq: 0,
            jobs: 0,
        };
        world.turn(Input::Connected {
            conn: CLIENT,
            session: SessionId([1; 16]),
            name: "client".to_owned(),
            heartbeat_ms: 15_000,
            last_seq: 0,
            leases: Vec::new(),
        });
        world
    }

    /// Handles an input, syncs its records, and returns the outputs.
    fn turn(&mut self, input: Input) -> Vec<Output> {
        self.now.mono_ms += 1;
        self.broker.handle(self.now, input);
        self.poll()
    }

    fn poll(&mut self) -> Vec<Output> {
        let mut all = Vec::new();
        loop {
            let before = all.len();
            while self.broker.poll_record().is_some() {}
            let last = self.broker.next_position().0 - 1;
            self.broker.handle_durable(Position(last));
            all.extend(std::iter::from_fn(|| self.broker.poll_output()));
            if all.len() == before {
                return all;
            }
        }
    }

    fn commit(&mut self, ops: Vec<Op>) -> Vec<Output> {
        let txs: Vec<Tx> = ops.into_iter().map(|op| Tx::from(vec![op])).collect();
        let first_seq = self.seq + 1;
        self.seq += txs.len() as u64;
        let durability = Durability::Disk;
        self.turn(Input::Commit {
            conn: CLIENT,
            first_seq,
            durability,
            txs,
        })
    }

    fn job(&mut self, queue: String, task: String) -> Op {
        self.jobs += 1;
        let mut random = [0; 10];
        // Some of the first bits make way for a version.
        random[2..].copy_from_slice(&self.jobs.to_be_bytes());
        let message = Message {
            id: MessageId::new(IdSource {
                unix_ms: self.now.wall_ms,
                random,
            }),
            task,
            priority: DEFAULT_PRIORITY,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from_static(b"arguments"),
            extras: None,
        };
        Op::Publish {
            queues: vec![queue],
            message,
            due: None,
            unless_key: None,
        }
    }

    fn consume(&mut self, queues: Vec<String>) -> Vec<Delivery> {
        let consume = Consume {
            queues,
            add_credit: BATCH,
            ..Consume::default()
        };
        let outputs = self.turn(Input::Consume {
            conn: CLIENT,
            consume,
        });
        deliveries(outputs)
    }

    /// Publishes one job each to so many queues, or of so many tasks, and runs it.
    fn use_once(&mut self, name_of: impl Fn(u32) -> (String, String)) {
        for first in (0..NAMES).step_by(BATCH as usize) {
            let names: Vec<_> = (first..first + BATCH).map(&name_of).collect();
            let mut queues: Vec<String> = names.iter().map(|(queue, _)| queue.clone()).collect();
            queues.dedup();
            let jobs = names.into_iter();
            let jobs = jobs.map(|(queue, task)| self.job(queue, task)).collect();
            let mut delivered = deliveries(self.commit(jobs));
            delivered.extend(self.consume(queues));
            assert_eq!(delivered.len(), BATCH as usize, "all are handed out");
            let acks = delivered.into_iter().map(|delivery| Op::Ack {
                lease: delivery.lease,
                cost_us: 20,
            });
            self.commit(acks.collect());
        }
        self.consume(vec!["served".to_owned()]);
    }

    fn wait(&mut self, ms: u64) {
        self.now.mono_ms += ms;
        while self
            .broker
            .next_deadline()
            .is_some_and(|due_ms| due_ms <= self.now.mono_ms)
        {
            self.broker.handle_deadline(self.now);
            self.poll();
        }
        self.broker.assert_consistent();
    }

    fn page(&mut self, limit: u32) -> StatusPage {
        let query = Query::Status(StatusQuery {
            limit,
            ..StatusQuery::default()
        });
        let mut outputs = self.turn(Input::Query {
            conn: CLIENT,
            id: 1,
            query,
        });
        match outputs.pop() {
            Some(Output::Answer {
                answer: Answer::Status(page),
                ..
            }) => page,
            other => panic!("{other:?}"),
        }
    }
}

fn deliveries(outputs: Vec<Output>) -> Vec<Delivery> {
    let deliveries = outputs.into_iter().filter_map(|output| match output {
        Output::Deliver { deliveries, .. } => Some(deliveries),
        _ => None,
    });
    deliveries.flatten().collect()
}

fn in_use() -> usize {
    IN_USE.load(Relaxed)
}

#[test]
fn names_that_were_used_once_take_little_and_are_forgotten_but_for_their_counts() {
    let one = |what: &str| what.to_owned();
    let queues = |number| (format!("queue-{number:08}"), one("task"));
    let tasks = |number| (one("served"), format!("shop.tasks.task_{number:08}"));
    for is_of_queues in [true, false] {
        let mut world = World::new();
        world.consume(vec![one("served")]);
        let before = in_use();
        match is_of_queues {
            true => world.use_once(queues),
            false => world.use_once(tasks),
        }
        let used = in_use() - before;
        let given = GIVEN.load(Relaxed);
        let page = world.page(10);
        let asked = GIVEN.load(Relaxed) - given;
        world.wait(HOUR_MS - 60_000);
        let others = world.page(10).status.others;
        assert_eq!((others.queues, others.tasks), (0, 0), "an hour is not over");
        world.wait(120_000);
        world.wait(HOUR_MS);
        let left = in_use().saturating_sub(before);
        println!(
            "{used} bytes in use by {NAMES} names, {left} left after an hour, {asked} for a page"
        );
        assert!(used < 40_000_000, "{used} bytes in use by {NAMES} names");
        assert!(left < 10_000_000, "{left} bytes left by {NAMES} names");
        assert!(asked < 64 << 10, "{asked} bytes for a page of ten names");
        assert!(page.status.queues.len() + page.status.tasks.len() == 10);

        let after = world.page(0);
        assert_eq!(after.next, None);
        let others = after.status.others;
        let counts = match is_of_queues {
            true => {
                assert_eq!(others.queues, u64::from(NAMES));
                others.of_queues
            }
            false => {
                assert_eq!(others.tasks, u64::from(NAMES));
                others.of_tasks
            }
        };
        let expected = u64::from(NAMES);
        assert_eq!(
            (counts.enqueued, counts.started, counts.succeeded),
            (expected, expected, expected)
        );
        assert!(after.status.tasks.is_empty());
        let served: Vec<&str> = (after.status.queues.iter())
            .map(|queue| queue.name.as_str())
            .collect();
        assert_eq!(served, ["served"]);
    }
}
