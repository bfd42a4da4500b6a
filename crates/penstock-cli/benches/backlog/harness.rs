//! Runs a real broker in its own process, and a client that enqueues and consumes jobs as fast as it can.
//! Measures the broker's memory meanwhile.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use penstock_driver::{DeliverySink, Driver, DriverConfig};
use penstock_local::connect;
use penstock_message::{
    Answer, Consume, Delivery, Due, Durability, IdSource, Key, Lease, Message, MessageId, Op,
    Query, Receipt, Status, StatusQuery, Tx, Value, ValueStatus,
};
use tempfile::TempDir;

/// Jobs per transaction, and number of transactions in flight.
const IN_ONE: u64 = 1_000;
const AT_ONCE: usize = 8;
/// Number of jobs that a worker of this client holds.
const CREDIT: u32 = 8_000;
const PATIENCE: Duration = Duration::from_secs(600);
const QUEUE: &str = "backlog";

/// Broker, with the directory of its journal.
pub struct BenchBroker {
    directory: TempDir,
    process: Option<Child>,
    started: Instant,
}

impl Drop for BenchBroker {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _gone = process.kill();
            let _reaped = process.wait();
        }
    }
}

impl BenchBroker {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut broker = Self {
            directory,
            process: None,
            started: Instant::now(),
        };
        broker.launch();
        broker
    }

    fn launch(&mut self) {
        self.started = Instant::now();
        let process = Command::new(
            std::env::var("PENSTOCK_BIN")
                .unwrap_or_else(|_| env!("CARGO_BIN_EXE_penstock").to_owned()),
        )
        .arg("server")
        .arg("--data")
        .arg(self.directory.path().join("data"))
        .arg("--listen")
        .arg(self.url())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
        self.process = Some(process.expect("the broker starts"));
    }

    /// Kills the broker, and returns how long the next one takes until it answers.
    pub fn restart(&mut self) -> Duration {
        let mut process = self.process.take().expect("it runs");
        process.kill().expect("it dies");
        process.wait().expect("it is dead");
        self.launch();
        self.client().status();
        self.started.elapsed()
    }

    fn url(&self) -> String {
        format!("unix:{}", self.directory.path().join("socket").display())
    }

    pub fn client(&self) -> BenchClient {
        BenchClient {
            driver: connect(DriverConfig::new(self.url())).expect("a driver"),
            ids: Ids::default(),
        }
    }

    fn pid(&self) -> u32 {
        self.process.as_ref().expect("it runs").id()
    }

    /// Returns the memory that the broker currently uses.
    pub fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.expect("VmRSS in kB") << 10
    }

    /// Returns the CPU time of all its threads.
    pub fn cpu(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs");
        let nanoseconds = tasks.flatten().filter_map(|task| {
            let spent = fs::read_to_string(task.path().join("schedstat")).ok()?;
            spent.split_whitespace().next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanoseconds.sum())
    }

    /// Waits until the broker's memory falls to this size on its own; false if it did not.
    pub fn comes_down_to(&self, bytes: u64, within: Duration) -> bool {
        let until = Instant::now() + within;
        while self.resident_bytes() > bytes {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }
}

/// Speed of an activity, and its cost to the broker.
#[derive(Clone, Copy, Debug)]
pub struct BenchPace {
    pub jobs: u64,
    pub took: Duration,
    pub cpu: Duration,
}

impl BenchPace {
    pub fn per_second(&self) -> f64 {
        self.jobs as f64 / self.took.as_secs_f64()
    }

    pub fn cpu_us(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.jobs as f64
    }
}

/// Measures the time of `work` for this many jobs.
pub fn pace(broker: &BenchBroker, jobs: u64, work: impl FnOnce()) -> BenchPace {
    let (cpu, begun) = (broker.cpu(), Instant::now());
    work();
    BenchPace {
        jobs,
        took: begun.elapsed(),
        cpu: broker.cpu() - cpu,
    }
}

pub struct BenchClient {
    driver: Arc<dyn Driver>,
    ids: Ids,
}

impl BenchClient {
    /// Enqueues jobs, numbered from 0; all are on disk when this returns.
    pub fn enqueue(
        &mut self,
        jobs: u64,
        body: impl Fn(u64) -> Bytes,
        due: impl Fn(u64) -> Option<Due>,
    ) {
        let mut job = 0;
        self.commit_all(jobs, |ids, tx| {
            let message = Message {
                id: ids.next(),
                task: "backlog.job".to_owned(),
                priority: penstock_message::DEFAULT_PRIORITY,
                expires_at: None,
                result_ttl_ms: None,
                max_deliveries: 3,
                attempt: 0,
                crashes: 0,
                enqueued_at: 0,
                notes: Vec::new(),
                body: body(job),
                extras: None,
            };
            tx.push(Op::Publish {
                queues: vec![QUEUE.to_owned()],
                message,
                due: due(job),
                unless_key: None,
            });
            job += 1;
        });
    }

    /// Stores values that expire, under separate names.
    pub fn put(&mut self, values: u64, body_bytes: usize, ttl_ms: u64) {
        let body = Bytes::from(vec![7; body_bytes]);
        let mut number = 0;
        self.commit_all(values, |_, tx| {
            tx.push(Op::Put {
                key: Key::Named(format!("lock:{number:012}").into()),
                value: Value::new(ValueStatus::Succeeded, body.clone()),
                ttl_ms: Some(ttl_ms),
                group: "locks".to_owned(),
            });
            number += 1;
        });
    }

    fn commit_all(&mut self, count: u64, mut add: impl FnMut(&mut Ids, &mut Vec<Op>)) {
        let (done, ended) = channel();
        let mut on_their_way = 0;
        let mut left = count;
        while left > 0 || on_their_way > 0 {
            if left > 0 && on_their_way < AT_ONCE {
                let ops = left.min(IN_ONE);
                left -= ops;
                let mut tx = Vec::with_capacity(ops as usize);
                (0..ops).for_each(|_| add(&mut self.ids, &mut tx));
                on_their_way += 1;
                self.commit(vec![Tx { ops: tx }], &done);
                continue;
            }
            ended.recv_timeout(PATIENCE).expect("it is confirmed");
            on_their_way -= 1;
        }
    }

    fn commit(&self, txs: Vec<Tx>, done: &Sender<usize>) {
        let (done, count) = (done.clone(), txs.len());
        let deadline = Some(Instant::now() + PATIENCE);
        let told = Box::new(move |outcome: Result<Vec<Receipt>, _>| {
            for receipt in outcome.expect("the broker is there") {
                assert!(matches!(receipt, Receipt::Applied { .. }), "{receipt:?}");
            }
            // The receiver may have given up.
            let _heard = done.send(count);
        });
        self.driver.commit(txs, Durability::Disk, deadline, told);
    }

    /// Takes this many jobs, checks each in order of arrival, and acknowledges it.
    pub fn drain(&self, jobs: u64, mut see: impl FnMut(&Message)) {
        let (deliver, delivered) = channel();
        let sink = Arc::new(Sink {
            deliver: Mutex::new(deliver),
            taken: AtomicU64::new(0),
        });
        let as_sink: Arc<dyn DeliverySink> = sink.clone();
        let consume = Consume {
            queues: vec![QUEUE.to_owned()],
            add_credit: CREDIT.min(jobs as u32),
            ..Consume::default()
        };
        self.driver.consume(consume, Arc::clone(&as_sink));
        let mut given = u64::from(CREDIT).min(jobs);
        let (done, ended) = channel();
        let mut taken = 0;
        while taken < jobs {
            let deliveries = next_of(&delivered);
            taken += deliveries.len() as u64;
            let more = (deliveries.len() as u64).min(jobs - given);
            given += more;
            let acks = deliveries.into_iter().map(|delivery: Delivery| {
                let (lease, cost_us) = (delivery.lease, 100);
                assert!(!delivery.message.body.is_empty(), "a job without a body");
                see(&delivery.message);
                Tx::from(vec![Op::Ack { lease, cost_us }])
            });
            self.commit(acks.collect(), &done);
            if more > 0 {
                let consume = Consume {
                    add_credit: more as u32,
                    ..Consume::default()
                };
                self.driver.consume(consume, Arc::clone(&as_sink));
            }
        }
        let mut settled = 0;
        while settled < jobs {
            settled += ended.recv_timeout(PATIENCE).expect("it is confirmed") as u64;
        }
        self.driver.stop_consuming();
        assert_eq!(sink.taken.load(Ordering::Relaxed), jobs, "each job once");
    }

    pub fn status(&self) -> Status {
        let (done, answered) = channel();
        let deadline = Instant::now() + PATIENCE;
        let told = Box::new(move |answer| done.send(answer).expect("somebody waits"));
        self.driver
            .query(Query::Status(StatusQuery::default()), deadline, told);
        match answered.recv_timeout(PATIENCE).expect("an answer") {
            Ok(Answer::Status(page)) => page.status,
            other => panic!("{other:?}"),
        }
    }

    pub fn waiting(&self) -> u64 {
        let status = self.status();
        let waiting = status
            .queues
            .iter()
            .map(|queue| queue.ready + queue.delayed);
        waiting.sum()
    }

    pub fn close(self) {
        self.driver.close(Instant::now() + PATIENCE);
    }
}

fn next_of(delivered: &Receiver<Vec<Delivery>>) -> Vec<Delivery> {
    delivered.recv_timeout(PATIENCE).expect("a delivery")
}

struct Sink {
    deliver: Mutex<Sender<Vec<Delivery>>>,
    taken: AtomicU64,
}

impl DeliverySink for Sink {
    fn deliver(&self, deliveries: Vec<Delivery>) {
        self.taken
            .fetch_add(deliveries.len() as u64, Ordering::Relaxed);
        let deliver = self.deliver.lock().expect("nobody panics here");
        // The receiver may have panicked.
        let _taken = deliver.send(deliveries);
    }

    fn held_leases(&self) -> Vec<Lease> {
        Vec::new()
    }

    fn leases_kept(&self, _kept: &[Lease]) {}
}

/// Returns ids as clients draw them: by time, then random.
struct Ids {
    state: u64,
}

impl Default for Ids {
    fn default() -> Self {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).expect("random numbers");
        Self {
            state: u64::from_le_bytes(seed) | 1,
        }
    }
}

impl Ids {
    fn draw(&mut self) -> u64 {
        // xorshift64* (Vigna, 2016).
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn next(&mut self) -> MessageId {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut random = [0; 10];
        random[..8].copy_from_slice(&self.draw().to_le_bytes());
        random[8..].copy_from_slice(&self.draw().to_le_bytes()[..2]);
        MessageId::new(IdSource {
            unix_ms: unix.expect("after 1970").as_millis() as u64,
            random,
        })
    }
}
