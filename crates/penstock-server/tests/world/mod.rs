//! Engine on a simulated disk, and clients that speak the protocol with it. Time passes only when a test moves it.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use penstock_broker::{BrokerOptions, ConnId, Now};
use penstock_journal::sim::SimStorage;
use penstock_journal::{JournalOptions, JournalReader, Writer};
use penstock_message::{Delivery, Durability, Key, KeyState, Message, MessageId, Op, Receipt, Tx};
use penstock_server::{Engine, EngineOptions, Peer, WriterTask};
use penstock_wire::proto::{self, ToBroker, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, PROTOCOL_VERSION, convert, encode_frame};

pub const HEARTBEAT_MS: u64 = 3000;

pub struct EngineWorld {
    pub engine: Engine,
    pub disk: SimStorage,
    pub now: Now,
    writer: Writer<SimStorage>,
    reader: JournalReader<SimStorage>,
    inboxes: BTreeMap<u64, FrameInbox>,
    next_conn: u64,
}

#[derive(Default)]
struct FrameInbox {
    bytes: Vec<u8>,
    closed: bool,
    /// Whether the client stops receiving.
    stuffed: bool,
}

/// Client's end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct EngineClient {
    pub conn: ConnId,
}

impl EngineWorld {
    pub fn new() -> Self {
        Self::with(SimStorage::new(), |_| {})
    }

    pub fn with(disk: SimStorage, adjust: impl FnOnce(&mut EngineOptions)) -> Self {
        Self::open(disk, adjust).expect("the journal opens")
    }

    /// Opens an engine on this disk; `None`: the journal can't be opened.
    pub fn open(disk: SimStorage, adjust: impl FnOnce(&mut EngineOptions)) -> Option<Self> {
        let mut options = EngineOptions {
            broker: BrokerOptions::default(),
            journal: JournalOptions {
                journal_id: [7; 16],
                ..JournalOptions::default()
            },
            token: None,
            max_connections: usize::MAX,
            stop_on_request: false,
            is_double: false,
            pid: 42,
        };
        adjust(&mut options);
        let now = Now {
            mono_ms: 1_000,
            wall_ms: 1_700_000_000_000,
            ..Now::default()
        };
        let (engine, writer, _) = Engine::open(disk.clone(), options, || now).ok()?;
        Some(Self {
            engine,
            disk,
            now,
            reader: writer.reader(),
            writer,
            inboxes: BTreeMap::new(),
            next_conn: 1,
        })
    }

    pub fn connect(&mut self, peer: Peer) -> EngineClient {
        let conn = ConnId(self.next_conn);
        self.next_conn += 1;
        self.inboxes.insert(conn.0, FrameInbox::default());
        self.engine.opened(self.now, conn, peer);
        EngineClient { conn }
    }

    /// Connects and says hello.
    pub fn join(&mut self, session: u8) -> EngineClient {
        let client = self.connect(Peer::Trusted);
        self.send(client, &hello_frame(session));
        self.settle();
        let welcome = self.hear(client).remove(0).welcome.expect("a welcome");
        assert_eq!(welcome.protocol_version, PROTOCOL_VERSION);
        client
    }

    pub fn send(&mut self, client: EngineClient, frame: &ToBroker) {
        let mut bytes = BytesMut::new();
        encode_frame(frame, &mut bytes);
        self.send_bytes(client, &bytes);
    }

    pub fn send_bytes(&mut self, client: EngineClient, bytes: &[u8]) {
        self.engine.received(self.now, client.conn, bytes);
    }

    pub fn cut(&mut self, client: EngineClient) {
        self.engine.closed(self.now, client.conn);
        self.inboxes.remove(&client.conn.0);
    }

    /// Makes the client stop receiving, or receive everything that waits.
    pub fn stuff(&mut self, client: EngineClient, stuffed: bool) {
        self.inboxes
            .get_mut(&client.conn.0)
            .expect("it is there")
            .stuffed = stuffed;
        if !stuffed {
            self.deliver_to(client.conn);
        }
    }

    pub fn pass(&mut self, ms: u64) {
        self.now.mono_ms += ms;
        self.now.wall_ms += ms;
    }

    /// Lets time pass as a shell would, with a tick at each deadline.
    pub fn live(&mut self, ms: u64) {
        let end = self.now.mono_ms + ms;
        self.settle();
        while let Some(due) = self.engine.next_deadline_ms().filter(|due| *due <= end) {
            self.pass(due.saturating_sub(self.now.mono_ms));
            self.engine.tick(self.now);
            self.settle();
        }
        self.pass(end - self.now.mono_ms);
    }

    /// Writes, syncs and sends until nothing is left to do now.
    pub fn settle(&mut self) {
        loop {
            let task = self.take_task();
            self.transmit();
            let reads = self.engine.take_reads(self.now);
            if task.is_none() && reads.is_none() {
                break;
            }
            if let Some(task) = task {
                self.carry_out(&task);
            }
            if let Some(mut reads) = reads {
                reads.carry_out(&mut self.reader);
                self.engine.reads_done(self.now, reads);
            }
        }
    }

    pub fn take_task(&mut self) -> Option<WriterTask> {
        self.engine.take_batch(self.now)
    }

    pub fn carry_out(&mut self, task: &WriterTask) {
        let Self {
            engine,
            writer,
            now,
            ..
        } = self;
        let outcome = task.carry_out(writer, |through| engine.batch_written(*now, through));
        match outcome {
            Ok(()) => engine.batch_done(*now, task, 100),
            Err(_) => engine.disk_failed(*now),
        }
    }

    pub fn transmit(&mut self) {
        while let Some(conn) = self.engine.poll_transmit() {
            if !self.inboxes.get(&conn.0).is_some_and(|inbox| inbox.stuffed) {
                self.deliver_to(conn);
            }
        }
        while let Some(conn) = self.engine.poll_close() {
            if let Some(inbox) = self.inboxes.get_mut(&conn.0) {
                inbox.closed = true;
            }
        }
    }

    fn deliver_to(&mut self, conn: ConnId) {
        let bytes = self.engine.outgoing(conn).to_vec();
        if let Some(inbox) = self.inboxes.get_mut(&conn.0) {
            inbox.bytes.extend_from_slice(&bytes);
        }
        self.engine.transmitted(self.now, conn, bytes.len());
    }

    /// Returns the frames that the client has received since the last call.
    pub fn hear(&mut self, client: EngineClient) -> Vec<ToClient> {
        let inbox = self.inboxes.get_mut(&client.conn.0).expect("it is there");
        let mut decoder = Decoder::<ToClient>::new(MAX_FRAME_BYTES);
        decoder.extend(&std::mem::take(&mut inbox.bytes));
        let mut heard = Vec::new();
        while let Some(frame) = decoder
            .next_message()
            .expect("the engine speaks the protocol")
        {
            heard.push(frame);
        }
        assert_eq!(decoder.pending_bytes(), 0, "frames are sent whole");
        heard
    }

    pub fn is_closed(&self, client: EngineClient) -> bool {
        self.inboxes[&client.conn.0].closed
    }

    /// Returns the reason with which the connection was closed.
    pub fn farewell(&mut self, client: EngineClient) -> (proto::close::Why, String) {
        self.settle();
        assert!(self.is_closed(client), "the connection stands");
        let last = self.hear(client).pop().and_then(|frame| frame.close);
        let close = last.expect("a reason");
        (close.why(), close.text)
    }

    pub fn confirmed(&mut self, client: EngineClient) -> Confirmed {
        let mut all = Confirmed::default();
        for frame in self.hear(client) {
            all.add(frame);
        }
        all
    }

    /// Sends, settles, and listens.
    pub fn ask(&mut self, client: EngineClient, frame: &ToBroker) -> Confirmed {
        self.send(client, frame);
        self.settle();
        self.confirmed(client)
    }
}

/// Received frames, as nouns.
#[derive(Debug, Default)]
pub struct Confirmed {
    pub through: Option<u64>,
    pub receipts: Vec<(u64, Receipt)>,
    pub deliveries: Vec<Delivery>,
    pub values: Vec<(Key, KeyState)>,
    pub welcome: Option<proto::Welcome>,
    pub answers: Vec<proto::Answer>,
    pub pongs: usize,
}

impl Confirmed {
    fn add(&mut self, frame: ToClient) {
        if let Some(confirm) = frame.confirm {
            self.through = Some(confirm.through);
            self.receipts
                .extend(convert::all::<_, (u64, Receipt)>(confirm.receipts).unwrap());
        }
        self.deliveries
            .extend(convert::all::<_, Delivery>(frame.deliveries).unwrap());
        self.values
            .extend(convert::all::<_, (Key, KeyState)>(frame.values).unwrap());
        self.welcome = frame.welcome.or(self.welcome.take());
        self.answers.extend(frame.answers);
        self.pongs += usize::from(frame.pong);
        assert_eq!(frame.close, None, "the connection was closed");
    }

    pub fn delivered_ids(&self) -> Vec<u8> {
        self.deliveries
            .iter()
            .map(|delivery| delivery.message.id.0[0])
            .collect()
    }
}

pub fn hello(session: u8) -> proto::Hello {
    proto::Hello {
        protocol_version: PROTOCOL_VERSION,
        session: Bytes::copy_from_slice(&[session; 16]),
        name: format!("client {session}"),
        heartbeat_ms: HEARTBEAT_MS,
        ..proto::Hello::default()
    }
}

pub fn say_hello(hello: proto::Hello) -> ToBroker {
    ToBroker {
        hello: Some(hello),
        ..ToBroker::default()
    }
}

pub fn hello_frame(session: u8) -> ToBroker {
    say_hello(hello(session))
}

pub fn message(id: u8, body: Bytes) -> Message {
    Message {
        id: MessageId([id; 16]),
        task: "shop.send".to_owned(),
        priority: 4,
        expires_at: None,
        result_ttl_ms: Some(60_000),
        max_deliveries: 3,
        attempt: 0,
        crashes: 0,
        enqueued_at: 0,
        notes: Vec::new(),
        body,
        extras: None,
    }
}

pub fn publish(id: u8) -> Tx {
    publish_body(id, Bytes::from_static(b"body"))
}

pub fn publish_body(id: u8, body: Bytes) -> Tx {
    Tx::from(vec![Op::Publish {
        queues: vec!["default".to_owned()],
        message: message(id, body),
        due: None,
        unless_key: None,
    }])
}

pub fn commit(first_seq: u64, durability: Durability, txs: Vec<Tx>) -> ToBroker {
    ToBroker {
        commits: vec![proto::Commit {
            first_seq,
            durability: proto::Durability::from(durability).into(),
            txs: txs.into_iter().map(convert::encode_tx).collect(),
            part: proto::Part::Whole.into(),
        }],
        ..ToBroker::default()
    }
}

pub fn consume(add_credit: u32) -> ToBroker {
    ToBroker {
        consumers: vec![proto::Consumer {
            queues: vec!["default".to_owned()],
            add_credit,
            ..proto::Consumer::default()
        }],
        ..ToBroker::default()
    }
}

pub fn query(id: u64, query: penstock_message::Query) -> ToBroker {
    ToBroker {
        queries: vec![(id, query).into()],
        ..ToBroker::default()
    }
}
