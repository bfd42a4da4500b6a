//! Measures the server alone, without Python and the driver: one real server on a thread, and clients that speak the
//! protocol over its Unix socket.
//!
//!     cargo run --release -p penstock-server --example load [DIRECTORY]
//!
//! Shows a bare append and fdatasync next to the commit of one job at a time; then jobs per second through publish,
//! delivery and settlement, and the CPU time of each job.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use penstock_broker::BrokerOptions;
use penstock_directory::LocalPaths;
use penstock_message::{Delivery, Durability, Key, Message, MessageId, Op, Tx, Value, ValueStatus};
use penstock_server::{DirectoryLock, Home, LocalOptions, Server, ServerOptions};
use penstock_wire::proto::{self, ToBroker, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, PROTOCOL_VERSION, convert, encode_frame};

type LoadOutcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const LONE: u64 = 2_000;
const JOBS: u64 = 300_000;
const IN_FLIGHT: u64 = 1024;
const IN_A_FRAME: u64 = 128;
const CREDIT: u32 = 1024;

fn main() -> LoadOutcome<()> {
    let place = std::env::args()
        .nth(1)
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = place.join(format!("penstock-load-{}", std::process::id()));
    let paths = LocalPaths::resolve(&directory)?;
    let lock = DirectoryLock::take(paths.clone())?.ok_or("somebody uses the directory")?;
    let options = ServerOptions {
        home: Home::Directory(paths.journal.clone()),
        listen: Vec::new(),
        token: None,
        max_connections: None,
        memory_limit_bytes: None,
        broker: BrokerOptions::default(),
        local: Some(LocalOptions {
            lock,
            linger: Duration::from_secs(60),
        }),
    };
    let (started, starts) = channel();
    let serving = thread::Builder::new()
        .name("server".to_owned())
        .spawn(move || Server::run(options, move || started.send(()).map_err(io::Error::other)))?;
    starts.recv()?;

    lone_commits(&paths.socket, &directory.join("bare"))?;
    let before = cpu_us();
    jobs(&paths.socket)?;
    for (thread, us) in cpu_us() {
        let spent = us - before.get(&thread).unwrap_or(&0.0);
        println!(
            "  {:<18} {:>5.2} µs of CPU a job",
            thread,
            spent / JOBS as f64
        );
    }

    let mut last = LoadClient::connect(&paths.socket, 9)?;
    last.send(&ToBroker {
        queries: vec![(1, penstock_message::Query::Stop).into()],
        ..ToBroker::default()
    })?;
    serving.join().expect("the server does not panic")?;
    fs::remove_dir_all(directory)?;
    Ok(())
}

/// Commits one job at a time, alternating with a bare append and sync, so that both meet the same disk. Like the
/// journal, the bare one writes to a file that was filled before.
fn lone_commits(socket: &Path, bare: &Path) -> LoadOutcome<()> {
    let bare = File::options().create_new(true).write(true).open(bare)?;
    bare.write_all_at(&vec![0; LONE as usize * 512], 0)?;
    bare.sync_all()?;
    let mut client = LoadClient::connect(socket, 1)?;
    let (mut syncs, mut commits) = (Vec::new(), Vec::new());
    for seq in 1..=LONE {
        let start = Instant::now();
        bare.write_all_at(&[7; 300], (seq - 1) * 512)?;
        bare.sync_data()?;
        syncs.push(start.elapsed());

        let start = Instant::now();
        client.send(&commit(seq, vec![publish("lone", seq)]))?;
        while client.confirmed < seq {
            client.hear()?;
        }
        commits.push(start.elapsed());
    }
    println!("append + fdatasync   {}", quantiles(syncs));
    println!("commit of one job    {}", quantiles(commits));
    Ok(())
}

fn jobs(socket: &Path) -> LoadOutcome<()> {
    let start = Instant::now();
    let workplace = socket.to_path_buf();
    let worker = thread::Builder::new()
        .name("worker".to_owned())
        .spawn(move || work(&workplace))?;
    let mut client = LoadClient::connect(socket, 2)?;
    let mut sent = 0;
    while client.confirmed < JOBS {
        while sent < JOBS && sent + IN_A_FRAME <= client.confirmed + IN_FLIGHT {
            let count = IN_A_FRAME.min(JOBS - sent);
            let txs = (1..=count).map(|index| publish("jobs", LONE + sent + index));
            client.send(&commit(sent + 1, txs.collect()))?;
            sent += count;
        }
        client.hear()?;
    }
    let enqueued = start.elapsed().as_secs_f64();
    worker.join().expect("the worker does not panic")?;
    let done = start.elapsed().as_secs_f64();
    let jobs = JOBS as f64;
    println!(
        "{JOBS} jobs          enqueued at {:.0}/s, done at {:.0}/s",
        jobs / enqueued,
        jobs / done
    );
    Ok(())
}

fn work(socket: &Path) -> LoadOutcome<()> {
    let mut client = LoadClient::connect(socket, 3)?;
    client.send(&consume(CREDIT))?;
    let mut settled = 0;
    while client.confirmed < JOBS {
        let deliveries = client.hear()?;
        if deliveries.is_empty() {
            continue;
        }
        let count = deliveries.len() as u64;
        let txs: Vec<Tx> = deliveries.iter().map(settle).collect();
        let mut frame = consume(count as u32);
        frame.commits = commit(settled + 1, txs).commits;
        client.send(&frame)?;
        settled += count;
    }
    Ok(())
}

struct LoadClient {
    socket: UnixStream,
    decoder: Decoder<ToClient>,
    confirmed: u64,
    buffer: Vec<u8>,
}

impl LoadClient {
    fn connect(socket: &Path, session: u8) -> LoadOutcome<Self> {
        let mut client = Self {
            socket: UnixStream::connect(socket)?,
            decoder: Decoder::new(MAX_FRAME_BYTES),
            confirmed: 0,
            buffer: vec![0; 256 << 10],
        };
        client.send(&ToBroker {
            hello: Some(proto::Hello {
                protocol_version: PROTOCOL_VERSION,
                session: Bytes::copy_from_slice(&[session; 16]),
                name: format!("load {session}"),
                ..proto::Hello::default()
            }),
            ..ToBroker::default()
        })?;
        Ok(client)
    }

    fn send(&mut self, frame: &ToBroker) -> LoadOutcome<()> {
        let mut bytes = BytesMut::new();
        encode_frame(frame, &mut bytes);
        Ok(self.socket.write_all(&bytes)?)
    }

    /// Reads once, and returns all complete frames.
    fn hear(&mut self) -> LoadOutcome<Vec<Delivery>> {
        let count = self.socket.read(&mut self.buffer)?;
        if count == 0 {
            return Err("the server closed the connection".into());
        }
        self.decoder.extend(&self.buffer[..count]);
        let mut deliveries = Vec::new();
        while let Some(frame) = self.decoder.next_message()? {
            if let Some(confirm) = frame.confirm {
                if !confirm.receipts.is_empty() {
                    return Err(format!("not simply applied: {:?}", confirm.receipts).into());
                }
                self.confirmed = confirm.through;
            }
            deliveries.extend(convert::all::<_, Delivery>(frame.deliveries)?);
        }
        Ok(deliveries)
    }
}

fn publish(queue: &str, number: u64) -> Tx {
    let mut id = [0x70; 16];
    id[8..].copy_from_slice(&number.to_be_bytes());
    Tx::from(vec![Op::Publish {
        queues: vec![queue.to_owned()],
        message: Message {
            id: MessageId(id),
            task: "shop.tasks.send_mail".to_owned(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: Some(86_400_000),
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from_static(&[0xc0; 40]),
            extras: None,
        },
        due: None,
        unless_key: None,
    }])
}

fn settle(delivery: &Delivery) -> Tx {
    Tx::from(vec![
        Op::Ack {
            lease: delivery.lease,
            cost_us: 5,
        },
        Op::Put {
            key: Key::Result(delivery.message.id),
            value: Value::new(ValueStatus::Succeeded, Bytes::from_static(b"\xc0")),
            ttl_ms: Some(86_400_000),
            group: delivery.message.task.clone(),
        },
    ])
}

fn commit(first_seq: u64, txs: Vec<Tx>) -> ToBroker {
    ToBroker {
        commits: vec![proto::Commit {
            first_seq,
            durability: proto::Durability::from(Durability::Disk).into(),
            txs: txs.into_iter().map(convert::encode_tx).collect(),
            part: proto::Part::Whole.into(),
        }],
        ..ToBroker::default()
    }
}

fn consume(add_credit: u32) -> ToBroker {
    ToBroker {
        consumers: vec![proto::Consumer {
            queues: vec!["jobs".to_owned()],
            add_credit,
            ..proto::Consumer::default()
        }],
        ..ToBroker::default()
    }
}

fn quantiles(mut took: Vec<Duration>) -> String {
    took.sort_unstable();
    let at = |share: f64| took[(took.len() as f64 * share) as usize].as_micros();
    let mean = took.iter().sum::<Duration>().as_micros() / took.len() as u128;
    format!(
        "mean {mean:>5} µs   p50 {:>5} µs   p99 {:>5} µs",
        at(0.5),
        at(0.99)
    )
}

/// Returns the CPU time of each live thread of this process, by name. Linux only.
fn cpu_us() -> BTreeMap<String, f64> {
    let mut spent = BTreeMap::new();
    for task in fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
    {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let ns = read("schedstat")
            .split(' ')
            .next()
            .and_then(|ns| ns.parse::<f64>().ok());
        *spent.entry(read("comm").trim().to_owned()).or_default() += ns.unwrap_or(0.0) / 1000.0;
    }
    spent
}
