//! What the tests of drivers share: brokers to talk to, and a client that waits.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_driver::{DeliverySink, Done, Driver, DriverConfig, DriverError, Lead, ValueSink};
use penstock_local::connect;
use penstock_message::{
    Answer, Capabilities, Consume, Delivery, Due, Durability, Key, KeyState, Lease, Message,
    MessageId, Op, Query, Receipt, Status, Tx, Value, ValueStatus,
};
use tempfile::TempDir;

/// Long enough for a machine that does ten other things; nothing waits so long that goes well.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The penstock executable of this build, made if it is not there.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "penstock-cli"])
            .status()
            .expect("cargo runs");
        assert!(built.success(), "the penstock executable does not build");
        // This test is at target/PROFILE/deps/NAME.
        let test = std::env::current_exe().expect("a test knows its own path");
        let profile = test.ancestors().nth(2).expect("a target directory");
        profile.join("penstock")
    })
}

/// A broker of one kind, with a directory of its own.
pub struct Place {
    pub url: String,
    pub directory: TempDir,
    server: Option<Mutex<Child>>,
    /// The one that there can be, where each client has a broker of its own.
    only_client: Option<Client>,
    pub outlives_kills: bool,
}

impl Place {
    pub fn memory() -> Self {
        let mut place = Self {
            url: "memory:".to_owned(),
            directory: tempfile::tempdir().unwrap(),
            server: None,
            only_client: None,
            outlives_kills: false,
        };
        place.only_client = Some(place.client());
        place
    }

    pub fn local() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self {
            url: format!("local:{}", directory.path().join("data").display()),
            directory,
            server: None,
            only_client: None,
            outlives_kills: true,
        }
    }

    pub fn remote() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = start_server(directory.path());
        Self {
            url: format!("unix:{}", directory.path().join("socket").display()),
            directory,
            server: Some(Mutex::new(server)),
            only_client: None,
            outlives_kills: true,
        }
    }

    pub fn config(&self) -> DriverConfig {
        DriverConfig {
            program: Some(program().to_owned()),
            ..DriverConfig::new(&self.url)
        }
    }

    /// A client of its own, where that can be.
    pub fn client(&self) -> Client {
        let only = self.only_client.clone();
        only.unwrap_or_else(|| Client::new(self.config()))
    }

    pub fn takes_many_clients(&self) -> bool {
        self.only_client.is_none()
    }

    /// Kills the broker, as nothing could be worse for its clients, and sees to it that there is a next
    /// one. There is no next one of `memory:`, so nothing happens to it.
    pub fn kill(&self) {
        if let Some(server) = &self.server {
            let mut server = server.lock().unwrap();
            server.kill().unwrap();
            server.wait().unwrap();
            *server = start_server(self.directory.path());
        } else if self.outlives_kills {
            // The next one is started by whoever misses it. (The one that dies may answer once more.)
            let client = self.client();
            let pid = client.broker_pid();
            kill(pid, rustix::process::Signal::KILL);
            while client.broker_pid() == pid {}
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            let mut server = server.lock().unwrap();
            server.kill().unwrap();
            server.wait().unwrap();
        } else if self.outlives_kills
            // Without the program no broker is started only to be ended.
            && let Ok(driver) = connect(DriverConfig::new(&self.url))
        {
            let client = Client { driver };
            let _ = client.query(Query::Stop);
        }
    }
}

pub fn kill(pid: u64, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a broker's pid");
    rustix::process::kill_process(pid, signal).unwrap();
}

pub fn start_server(directory: &Path) -> Child {
    Command::new(program())
        .args(["server", "--listen"])
        .arg(format!("unix:{}", directory.join("socket").display()))
        .arg("--data")
        .arg(directory.join("data"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A driver, with calls that wait for their end.
#[derive(Clone)]
pub struct Client {
    pub driver: Arc<dyn Driver>,
}

impl Client {
    pub fn new(config: DriverConfig) -> Self {
        let driver = connect(config).unwrap();
        Self { driver }
    }

    pub fn commit(&self, ops: Vec<Op>) -> Receipt {
        self.try_commit(ops, Durability::Disk, PATIENCE).unwrap()
    }

    pub fn try_commit(
        &self,
        ops: Vec<Op>,
        durability: Durability,
        patience: Duration,
    ) -> Result<Receipt, DriverError> {
        let receipts = wait_for(&*self.driver, |done| {
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
        wait_for(&*self.driver, |done| {
            self.driver.query(query, Instant::now() + PATIENCE, done)
        })
    }

    pub fn probe(&self) -> Result<Arc<Capabilities>, DriverError> {
        wait_for(&*self.driver, |done| {
            self.driver.probe(Instant::now() + PATIENCE, done)
        })
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

    /// Watches one key and gives what is told of it, `Pending` included.
    pub fn watch(&self, key: Key) -> Receiver<KeyState> {
        let (told, states) = channel();
        let sink = Arc::new(Told(Mutex::new(told)));
        self.driver.watch(vec![key], None, sink);
        states
    }

    /// How it ends with a key.
    pub fn end_of(&self, key: Key) -> KeyState {
        let states = self.watch(key);
        loop {
            match states.recv_timeout(PATIENCE).expect("the key is told of") {
                KeyState::Pending => {}
                state => return state,
            }
        }
    }

    pub fn worker(&self, queue: &str, credit: u32) -> Worker {
        let (delivered, deliveries) = channel();
        let (kept, leases_kept) = channel();
        let sink = Arc::new(Hands {
            delivered: Mutex::new(delivered),
            kept: Mutex::new(kept),
            held: Mutex::default(),
        });
        // Workers may share a client.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let worker = Worker {
            client: self.clone(),
            consumer: NUMBER.fetch_add(1, Ordering::Relaxed),
            queue: queue.to_owned(),
            sink,
            deliveries,
            leases_kept,
        };
        worker.want(credit);
        worker
    }
}

/// Waits as a thread of an application does: it reads what comes by itself, where it may.
fn wait_for<T: Send + 'static>(
    driver: &dyn Driver,
    call: impl FnOnce(Done<T>),
) -> Result<T, DriverError> {
    let over = Arc::new(AtomicBool::new(false));
    let (done, ended) = channel();
    let lead = Lead::take(driver);
    let ends = Arc::clone(&over);
    call(Box::new(move |outcome| {
        ends.store(true, Ordering::Release);
        let _unheard = done.send(outcome);
    }));
    let until = Instant::now() + PATIENCE * 2;
    lead.read_until(until, || over.load(Ordering::Acquire));
    ended.recv_timeout(PATIENCE * 2).expect("every call ends")
}

struct Told(Mutex<Sender<KeyState>>);

impl ValueSink for Told {
    fn value(&self, _key: Key, state: KeyState) {
        let _unheard = self.0.lock().unwrap().send(state);
    }

    fn pending(&self, key: Key) {
        self.value(key, KeyState::Pending);
    }

    fn reachable(&self, _reachable: bool) {}
}

/// Takes deliveries, and remembers its leases until they are settled.
pub struct Worker {
    pub client: Client,
    consumer: u32,
    queue: String,
    sink: Arc<Hands>,
    pub deliveries: Receiver<Vec<Delivery>>,
    pub leases_kept: Receiver<Vec<Lease>>,
}

struct Hands {
    delivered: Mutex<Sender<Vec<Delivery>>>,
    kept: Mutex<Sender<Vec<Lease>>>,
    held: Mutex<Vec<Lease>>,
}

impl DeliverySink for Hands {
    fn deliver(&self, deliveries: Vec<Delivery>) {
        let leases = deliveries.iter().map(|delivery| delivery.lease);
        self.held.lock().unwrap().extend(leases);
        let _unheard = self.delivered.lock().unwrap().send(deliveries);
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

impl Worker {
    pub fn want(&self, credit: u32) {
        let sink = Arc::clone(&self.sink) as Arc<dyn DeliverySink>;
        let consume = Consume {
            consumer: self.consumer,
            queues: vec![self.queue.clone()],
            add_credit: credit,
            ..Consume::default()
        };
        self.client.driver.consume(consume, sink);
    }

    /// The next so many deliveries.
    pub fn take(&self, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::new();
        while taken.len() < count {
            let next = self.deliveries.recv_timeout(PATIENCE);
            taken.extend(
                next.unwrap_or_else(|_| panic!("{} of {count} deliveries came", taken.len())),
            );
        }
        taken
    }

    pub fn take_one(&self) -> Delivery {
        self.take(1).remove(0)
    }

    pub fn has_nothing(&self) -> bool {
        self.deliveries.try_recv().is_err()
    }

    /// Settles a delivery, so that its lease is held no longer.
    pub fn settle(&self, delivery: &Delivery, ops: Vec<Op>) -> Receipt {
        let receipt = self.client.commit(ops);
        let lease = delivery.lease;
        self.sink.held.lock().unwrap().retain(|held| *held != lease);
        receipt
    }
}

// Short words for operations.

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

/// Without the run that a value came from.
pub fn plain(state: KeyState) -> KeyState {
    match state {
        KeyState::Present(value) => KeyState::Present(Value { run: None, ..value }),
        other => other,
    }
}

pub fn applied() -> Receipt {
    Receipt::applied()
}
