//! Puts into a server what no Python API can: claims, joins, limits, pauses, a refusal, a lease that lasts.
//! `make_format_1.py` uses it, built with the program of commit 75ba5aa, as an example of `penstock-server`.
//!
//!     special SOCKET
//!
//! Prints a line of `jobs.txt` for each job, then `ready`, and stays connected until the server ends.

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use bytes::{Bytes, BytesMut};
use penstock_message::{
    Condition, Durability, JoinPolicy, Key, Message, MessageId, Op, Overflow, QueueLimits, Tx,
    Value, ValueStatus,
};
use penstock_wire::proto::{self, ToBroker, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, PROTOCOL_VERSION, encode_frame};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const HOUR_MS: u64 = 3_600_000;

fn main() -> Outcome<()> {
    let socket = std::env::args().nth(1).ok_or("special SOCKET")?;
    let mut client = Client::connect(&socket)?;
    let all_ended = join(1);
    let all_succeeded = join(2);
    // Sequence numbers from 1; a test sends numbers 3 and 6 again.
    client.applied(vec![publish("reports", 1, Some("nightly report"))])?;
    client.applied(vec![hold(all_ended, 3, 2, JoinPolicy::AllEnded)])?;
    client.applied(vec![joined(all_ended, 0)])?;
    client.applied(vec![hold(all_succeeded, 2, 3, JoinPolicy::AllSucceeded)])?;
    client.applied(vec![Op::Put {
        key: Key::Named(Bytes::from_static(b"price of tea")),
        value: Value {
            status: ValueStatus::Succeeded,
            body: Bytes::from_static(b"4 pounds"),
        },
        ttl_ms: Some(30 * 24 * HOUR_MS),
        group: "prices".to_owned(),
    }])?;
    let refused = client.commit(vec![
        Op::Guard {
            key: Key::Named(Bytes::from_static(b"price of coffee")),
            condition: Condition::Present,
        },
        publish("reports", 4, None),
    ])?;
    if !format!("{refused:?}").contains("GuardFailed") {
        return Err(format!("not refused: {refused:?}").into());
    }
    client.applied(vec![Op::Pause {
        queue: "newsletters".to_owned(),
    }])?;
    client.applied(vec![publish("newsletters", 5, None)])?;
    client.applied(vec![Op::Limit {
        queue: "thumbnails".to_owned(),
        limits: QueueLimits {
            max_length: Some(1),
            max_bytes: Some(1_000_000),
            overflow: Overflow::Reject,
        },
    }])?;
    client.applied(vec![publish("thumbnails", 6, None)])?;
    client.applied(vec![publish("films", 7, None)])?;
    client.send(&ToBroker {
        consume: Some(proto::Consume {
            queues: vec!["films".to_owned()],
            add_credit: 1,
            stop: false,
        }),
        ..ToBroker::default()
    })?;
    while client.hear()?.deliveries.is_empty() {}

    for (number, known, what) in [
        (
            1,
            "ready - reports shop.special 0 0",
            "claims the key \"nightly report\"",
        ),
        (
            2,
            "held - followups shop.special 0 0",
            "1 of 3 members has ended",
        ),
        (
            3,
            "held - followups shop.special 0 0",
            "none of 2 members has ended",
        ),
        (4, "unknown - - - - -", "refused, for a guard did not hold"),
        (
            5,
            "ready - newsletters shop.special 0 0",
            "its queue is paused",
        ),
        (
            6,
            "ready - thumbnails shop.special 0 0",
            "its queue is full with it",
        ),
        (
            7,
            "running - films shop.special 0 0",
            "leased to a client that has an hour to come back",
        ),
    ] {
        println!("{} {known} {what}", id(number));
    }
    println!("ready");
    // A client that disconnects without a goodbye keeps its lease for a heartbeat.
    while client.hear().is_ok() {}
    Ok(())
}

fn id(number: u8) -> MessageId {
    let mut bytes = [0; 16];
    // 2026-01-15 12:00:00, in milliseconds; a UUID of version 7.
    bytes[..6].copy_from_slice(&1_768_478_400_000_u64.to_be_bytes()[2..]);
    (bytes[6], bytes[8], bytes[15]) = (0x70, 0x80, number);
    MessageId(bytes)
}

fn join(number: u8) -> MessageId {
    id(100 + number)
}

fn message(number: u8) -> Message {
    Message {
        id: id(number),
        task: "shop.special".to_owned(),
        priority: 4,
        expires_at: None,
        result_ttl_ms: Some(30 * 24 * HOUR_MS),
        max_deliveries: 3,
        attempt: 0,
        crashes: 0,
        enqueued_at: 0,
        notes: Vec::new(),
        body: Bytes::copy_from_slice(format!("body of {number}").as_bytes()),
    }
}

fn publish(queue: &str, number: u8, unless: Option<&'static str>) -> Op {
    Op::Publish {
        queues: vec![queue.to_owned()],
        message: message(number),
        due: None,
        unless_key: unless.map(|key| Key::Named(Bytes::from_static(key.as_bytes()))),
    }
}

fn hold(join: MessageId, count: u32, number: u8, policy: JoinPolicy) -> Op {
    Op::Hold {
        join,
        count,
        messages: vec![("followups".to_owned(), message(number))],
        policy,
    }
}

fn joined(join: MessageId, index: u32) -> Op {
    Op::Join {
        join,
        index,
        succeeded: true,
    }
}

struct Client {
    socket: UnixStream,
    decoder: Decoder<ToClient>,
    next_seq: u64,
}

impl Client {
    fn connect(socket: &str) -> Outcome<Self> {
        let mut client = Self {
            socket: UnixStream::connect(socket)?,
            decoder: Decoder::new(MAX_FRAME_BYTES),
            next_seq: 1,
        };
        client.send(&ToBroker {
            hello: Some(proto::Hello {
                protocol_version: PROTOCOL_VERSION,
                session: Bytes::from_static(b"special session "),
                name: "special".to_owned(),
                heartbeat_ms: HOUR_MS,
                ..proto::Hello::default()
            }),
            ..ToBroker::default()
        })?;
        client.hear()?.welcome.ok_or("no welcome")?;
        Ok(client)
    }

    fn applied(&mut self, ops: Vec<Op>) -> Outcome<()> {
        match self.commit(ops)? {
            receipts if receipts.is_empty() => Ok(()),
            receipts => Err(format!("not simply applied: {receipts:?}").into()),
        }
    }

    fn commit(&mut self, ops: Vec<Op>) -> Outcome<Vec<proto::Receipt>> {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.send(&ToBroker {
            commits: vec![proto::Commit {
                first_seq: seq,
                durability: proto::Durability::from(Durability::Disk).into(),
                txs: vec![Tx::from(ops).into()],
                part: proto::Part::Whole.into(),
            }],
            ..ToBroker::default()
        })?;
        loop {
            if let Some(confirm) = self.hear()?.confirm
                && confirm.through == seq
            {
                return Ok(confirm.receipts);
            }
        }
    }

    fn send(&mut self, frame: &ToBroker) -> Outcome<()> {
        let mut bytes = BytesMut::new();
        encode_frame(frame, &mut bytes);
        Ok(self.socket.write_all(&bytes)?)
    }

    fn hear(&mut self) -> Outcome<ToClient> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(frame) = self.decoder.next_message()? {
                return Ok(frame);
            }
            match self.socket.read(&mut buffer)? {
                0 => return Err("the server closed the connection".into()),
                count => self.decoder.extend(&buffer[..count]),
            }
        }
    }
}
