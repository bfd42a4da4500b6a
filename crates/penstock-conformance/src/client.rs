//! Client that waits for each call, with short words for operations.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use penstock_driver::{DeliverySink, Done, Driver, DriverError, ErrorKind, Lead, ValueSink};
use penstock_message::{
    Answer, Ask, CancelOrder, Capabilities, Consume, Delivery, Durability, Key, KeyState, Lease,
    Op, Query, Receipt, Status, TaskSelection, Tx,
};

/// Time to wait for a call, long enough for a machine under tenfold load. No call that succeeds takes this
/// long.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Driver whose calls wait for their outcome.
#[derive(Clone)]
pub struct TestClient {
    pub driver: Arc<dyn Driver>,
    /// Durability of commits that name none.
    pub durability: Durability,
    pub patience: Duration,
}

impl TestClient {
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self {
            driver,
            durability: Durability::Disk,
            patience: PATIENCE,
        }
    }

    /// Commits operations. Panics with [`NotOffered`] if the engine lacks a feature that they need.
    pub fn commit(&self, ops: Vec<Op>) -> Receipt {
        self.commit_at(self.durability, ops)
    }

    pub fn commit_at(&self, durability: Durability, ops: Vec<Op>) -> Receipt {
        offered(self.try_commit(ops, durability, self.patience))
    }

    /// Commits as durably as the engine can.
    pub fn settle(&self, ops: Vec<Op>) -> Receipt {
        let receipts = self.wait_for(|done| {
            let deadline = Some(Instant::now() + self.patience);
            self.driver.settle(vec![Tx { ops }], deadline, done);
        });
        offered(receipts.map(|mut receipts| receipts.remove(0)))
    }

    pub fn ask(&self, query: Query) -> Answer {
        offered(self.query(query))
    }

    pub fn try_commit(
        &self,
        ops: Vec<Op>,
        durability: Durability,
        patience: Duration,
    ) -> Result<Receipt, DriverError> {
        let receipts = self.wait_for(|done| {
            let deadline = Some(Instant::now() + patience);
            self.driver
                .commit(vec![Tx { ops }], durability, deadline, done);
        })?;
        Ok(receipts
            .into_iter()
            .next()
            .expect("a receipt for each transaction"))
    }

    pub fn query(&self, query: Query) -> Result<Answer, DriverError> {
        self.wait_for(|done| {
            self.driver
                .query(query, Instant::now() + self.patience, done)
        })
    }

    pub fn probe(&self) -> Result<Arc<Capabilities>, DriverError> {
        self.wait_for(|done| self.driver.probe(Instant::now() + self.patience, done))
    }

    pub fn status(&self) -> Status {
        let page = |query| match self.query(Query::Status(query))? {
            Answer::Status(page) => Ok::<_, DriverError>(page),
            other => panic!("{other:?} is no status"),
        };
        Status::collect(page).unwrap()
    }

    pub fn broker_pid(&self) -> u64 {
        self.status().process.pid
    }

    /// Watches one key and returns its states, `Pending` included.
    pub fn watch(&self, key: Key) -> States {
        let (told, states) = channel();
        let sink = Arc::new(KeyReports(Mutex::new(told)));
        self.driver.watch(vec![key], None, sink);
        States {
            states,
            patience: self.patience,
        }
    }

    /// Waits for the final state of a key.
    pub fn end_of(&self, key: Key) -> KeyState {
        self.watch(key).end()
    }

    pub fn worker(&self, queue: &str, credit: u32) -> TestWorker {
        self.worker_of(TaskSelection::Same, queue, credit)
    }

    /// Starts a worker that can only run these tasks.
    pub fn worker_of(&self, tasks: TaskSelection, queue: &str, credit: u32) -> TestWorker {
        let (delivered, deliveries) = channel();
        let (kept, leases_kept) = channel();
        let (asked, cancels) = channel();
        let (questioned, asks) = channel();
        let sink = Arc::new(Hands {
            delivered: Mutex::new(delivered),
            kept: Mutex::new(kept),
            asked: Mutex::new(asked),
            questioned: Mutex::new(questioned),
            held: Mutex::default(),
            failed: Mutex::default(),
        });
        // Workers may share a client.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let worker = TestWorker {
            client: self.clone(),
            consumer: NUMBER.fetch_add(1, Ordering::Relaxed),
            queue: queue.to_owned(),
            tasks,
            sink,
            deliveries,
            leases_kept,
            cancels,
            asks,
        };
        worker.want(credit);
        worker
    }
}

impl TestClient {
    /// Waits as a thread of an application does: it reads from the socket itself where it may.
    fn wait_for<T: Send + 'static>(&self, call: impl FnOnce(Done<T>)) -> Result<T, DriverError> {
        let over = Arc::new(AtomicBool::new(false));
        let (done, ended) = channel();
        let lead = Lead::take(&*self.driver);
        let ends = Arc::clone(&over);
        call(Box::new(move |outcome| {
            ends.store(true, Ordering::Release);
            let _unheard = done.send(outcome);
        }));
        let until = Instant::now() + self.patience * 2;
        lead.read_until(until, || over.load(Ordering::Acquire));
        ended
            .recv_timeout(self.patience * 2)
            .expect("every call ends")
    }
}

/// Returns the outcome of a call. Panics with the refusal, which [`crate::Scenario::check`] inspects.
fn offered<T>(ended: Result<T, DriverError>) -> T {
    match ended {
        Ok(ended) => ended,
        Err(DriverError {
            kind: ErrorKind::NotOffered(lacking),
            maybe_accepted: false,
            ..
        }) => resume_unwind(lacking),
        Err(error) => panic!("{error:?}"),
    }
}

/// States of a watched key.
pub struct States {
    states: Receiver<Result<KeyState, DriverError>>,
    patience: Duration,
}

impl States {
    pub fn next(&self) -> KeyState {
        let told = self.states.recv_timeout(self.patience);
        offered(told.expect("the key is reported"))
    }

    /// Waits for the first state other than `Pending`.
    pub fn end(&self) -> KeyState {
        loop {
            match self.next() {
                KeyState::Pending => {}
                state => return state,
            }
        }
    }

    pub fn is_silent(&self) -> bool {
        self.states.try_recv().is_err()
    }
}

struct KeyReports(Mutex<Sender<Result<KeyState, DriverError>>>);

impl ValueSink for KeyReports {
    fn value(&self, _key: Key, state: KeyState) {
        let _unheard = self.0.lock().unwrap().send(Ok(state));
    }

    fn pending(&self, key: Key) {
        self.value(key, KeyState::Pending);
    }

    fn reachable(&self, _reachable: bool) {}

    fn failed(&self, error: DriverError) {
        let _unheard = self.0.lock().unwrap().send(Err(error));
    }
}

/// Accepts deliveries, and remembers their leases until they are settled.
pub struct TestWorker {
    pub client: TestClient,
    consumer: u32,
    queue: String,
    tasks: TaskSelection,
    sink: Arc<Hands>,
    pub deliveries: Receiver<Vec<Delivery>>,
    pub leases_kept: Receiver<Vec<Lease>>,
    pub cancels: Receiver<Vec<CancelOrder>>,
    pub asks: Receiver<Vec<Ask>>,
}

struct Hands {
    delivered: Mutex<Sender<Vec<Delivery>>>,
    kept: Mutex<Sender<Vec<Lease>>>,
    asked: Mutex<Sender<Vec<CancelOrder>>>,
    questioned: Mutex<Sender<Vec<Ask>>>,
    held: Mutex<Vec<Lease>>,
    failed: Mutex<Option<DriverError>>,
}

impl DeliverySink for Hands {
    fn deliver(&self, deliveries: Vec<Delivery>) {
        let leases = deliveries.iter().map(|delivery| delivery.lease);
        self.held.lock().unwrap().extend(leases);
        let _unheard = self.delivered.lock().unwrap().send(deliveries);
    }

    fn cancel(&self, orders: Vec<CancelOrder>) {
        let _unheard = self.asked.lock().unwrap().send(orders);
    }

    fn asked(&self, asks: Vec<Ask>) {
        let _unheard = self.questioned.lock().unwrap().send(asks);
    }

    fn failed(&self, error: DriverError) {
        *self.failed.lock().unwrap() = Some(error);
        // Another thread may be waiting.
        self.deliver(Vec::new());
    }

    fn held_leases(&self) -> Vec<Lease> {
        self.held.lock().unwrap().clone()
    }

    fn leases_kept(&self, kept: &[Lease]) {
        self.held
            .lock()
            .unwrap()
            .retain(|lease| kept.contains(lease));
        let _unheard = self.kept.lock().unwrap().send(kept.to_vec());
    }
}

impl TestWorker {
    pub fn want(&self, credit: u32) {
        let sink = Arc::clone(&self.sink) as Arc<dyn DeliverySink>;
        self.client.driver.consume(self.consume(credit), sink);
    }

    fn consume(&self, credit: u32) -> Consume {
        Consume {
            consumer: self.consumer,
            queues: vec![self.queue.clone()],
            tasks: self.tasks.clone(),
            add_credit: credit,
            ..Consume::default()
        }
    }

    /// Waits for this many deliveries.
    pub fn take(&self, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::new();
        while taken.len() < count {
            let next = self.deliveries.recv_timeout(self.client.patience);
            if let Some(error) = self.sink.failed.lock().unwrap().take() {
                offered(Err(error))
            }
            taken.extend(
                next.unwrap_or_else(|_| panic!("{} of {count} deliveries came", taken.len())),
            );
        }
        taken
    }

    pub fn take_one(&self) -> Delivery {
        self.take(1).remove(0)
    }

    /// Waits for an order to stop a job.
    pub fn order(&self) -> CancelOrder {
        let orders = self.cancels.recv_timeout(self.client.patience);
        let [order] = &orders.expect("an order to stop comes")[..] else {
            panic!("one job is to be stopped")
        };
        order.clone()
    }

    pub fn has_nothing(&self) -> bool {
        self.deliveries.try_recv().is_err()
    }

    /// Settles a delivery, which ends its lease.
    pub fn settle(&self, delivery: &Delivery, ops: Vec<Op>) -> Receipt {
        let receipt = self.client.settle(ops);
        self.forget(delivery);
        receipt
    }

    /// Settles, and grants this credit along with it.
    pub fn settle_and_want(&self, delivery: &Delivery, ops: Vec<Op>, credit: u32) -> Receipt {
        let receipts = self.client.wait_for(|done| {
            let (txs, consumes) = (vec![Tx { ops }], vec![self.consume(credit)]);
            let sink = Arc::clone(&self.sink) as Arc<dyn DeliverySink>;
            let driver = &self.client.driver;
            driver.settle_and_consume(txs, done, consumes, sink);
        });
        self.forget(delivery);
        offered(receipts.map(|mut receipts| receipts.remove(0)))
    }

    fn forget(&self, delivery: &Delivery) {
        let lease = delivery.lease;
        self.sink.held.lock().unwrap().retain(|held| *held != lease);
    }
}

/// Short words for operations.
pub mod words {
    use bytes::Bytes;
    use penstock_message::{
        Delivery, Due, Key, KeyState, Message, MessageId, Op, Receipt, Value, ValueStatus,
    };

    pub fn id(number: u64) -> MessageId {
        let mut bytes = [0; 16];
        bytes[8..].copy_from_slice(&number.to_be_bytes());
        MessageId(bytes)
    }

    pub fn result(number: u64) -> Key {
        Key::Result(id(number))
    }

    pub fn message(number: u64) -> Message {
        Message {
            id: id(number),
            task: "task".into(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: Some(60_000),
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from(number.to_string()),
            extras: None,
        }
    }

    pub fn publish(message: Message) -> Op {
        publish_due(message, None)
    }

    pub fn publish_due(message: Message, due: Option<Due>) -> Op {
        Op::Publish {
            queues: vec!["work".into()],
            message,
            due,
            unless_key: None,
        }
    }

    pub fn ack(delivery: &Delivery) -> Op {
        Op::Ack {
            lease: delivery.lease,
            cost_us: 1,
        }
    }

    pub fn put(number: u64, body: &'static str) -> Op {
        Op::Put {
            key: result(number),
            value: value(body),
            ttl_ms: Some(60_000),
            group: "task".into(),
        }
    }

    pub fn value(body: &'static str) -> Value {
        Value::new(ValueStatus::Succeeded, Bytes::from_static(body.as_bytes()))
    }

    /// Removes the run that a value came from.
    pub fn plain(state: KeyState) -> KeyState {
        match state {
            KeyState::Present(value) => KeyState::Present(Value { run: None, ..value }),
            other => other,
        }
    }

    pub fn applied() -> Receipt {
        Receipt::applied()
    }
}
