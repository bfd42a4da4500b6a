//! Memory that the broker takes, measured by a counting allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use penstock_broker::{
    Answer, Broker, BrokerOptions, ConnId, Input, Now, Output, Position, Query, Recovery,
};
use penstock_message::{
    Consume, DEFAULT_PRIORITY, Delivery, Durability, IdSource, Message, MessageId, Op, SessionId,
    StatusPage, StatusQuery, Tx,
};

mod members;
mod names;

/// The system's allocator, which counts the memory in use and the total that was allocated.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static GIVEN: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static MEMORY: Counting = Counting;

// SAFETY: the system's allocator does all the work.
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

/// Held by one test at a time: all tests of this program count the same memory.
static COUNTS: Mutex<()> = Mutex::new(());

const BATCH: u32 = 500;
const CLIENT: ConnId = ConnId(1);

struct MeasuredBroker {
    broker: Broker,
    now: Now,
    seq: u64,
    jobs: u64,
}

impl MeasuredBroker {
    fn new(options: BrokerOptions) -> Self {
        let now = Now {
            wall_ms: 1_700_000_000_000,
            ..Now::default()
        };
        let mut world = Self {
            broker: Recovery::new(options).finish(now, 1),
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
        // The version field replaces some of the first bits.
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
