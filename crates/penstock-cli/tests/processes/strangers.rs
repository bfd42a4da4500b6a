//! Defines the strangers of these tests: clients that attack a server, and what they send and receive.
//!
//! `make hostile` runs the same with many more of them (`HOSTILE_CONNECTIONS`) and prints its findings.

mod business;
mod floods;
mod hostile;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use penstock_message::{Durability, Key, MessageId, Op, Tx, Value, ValueStatus};
use penstock_wire::proto::{self, ToBroker, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, PROTOCOL_VERSION, convert, encode_frame};

use crate::support::message;

/// Number of strangers in each test; this many in `make test`.
pub fn strangers(few: usize) -> usize {
    match std::env::var("HOSTILE_CONNECTIONS") {
        Ok(many) => many.parse().expect("a number"),
        Err(_) => few,
    }
}

/// Ratios of times are judged where nothing else runs.
pub fn is_long_run() -> bool {
    std::env::var_os("HOSTILE_CONNECTIONS").is_some()
}

pub fn framed(frame: &ToBroker) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    encode_frame(frame, &mut bytes);
    bytes.to_vec()
}

pub fn hello_of(session: u64, token: &[u8]) -> ToBroker {
    let mut id = [0xcc; 16];
    id[..8].copy_from_slice(&session.to_le_bytes());
    ToBroker {
        hello: Some(proto::Hello {
            protocol_version: PROTOCOL_VERSION,
            session: Bytes::copy_from_slice(&id),
            name: format!("test {session}"),
            token: Bytes::copy_from_slice(token),
            // The longest heartbeat: no client here should be dropped for being slow.
            heartbeat_ms: 3_600_000,
            ..proto::Hello::default()
        }),
        ..ToBroker::default()
    }
}

pub fn publish(number: u64) -> Tx {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&number.to_le_bytes());
    Tx::from(vec![Op::Publish {
        queues: vec!["default".to_owned()],
        message: message(MessageId(id), Bytes::from_static(b"body")),
        due: None,
        unless_key: None,
    }])
}

pub fn commit(first_seq: u64, txs: Vec<Tx>) -> ToBroker {
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

/// Deletes all earlier directories.
pub fn note(number: u64) -> Tx {
    Tx::from(vec![Op::Put {
        key: Key::Named(Bytes::from_static(b"business")),
        value: Value::new(
            ValueStatus::Succeeded,
            Bytes::copy_from_slice(&number.to_le_bytes()),
        ),
        ttl_ms: None,
        group: "business".to_owned(),
    }])
}

/// Last message to a stranger before the connection closed.
#[derive(Debug, Default)]
pub struct HeardBytes {
    pub welcome: bool,
    pub close: Option<proto::Close>,
    /// The connection did not close in time.
    pub goes_on: bool,
    pub everything: Vec<u8>,
}

/// Sends these pieces, then reads to the end or for this long.
pub fn stranger(
    address: &str,
    pieces: &[Vec<u8>],
    then_shut: bool,
    patience: Duration,
) -> HeardBytes {
    let mut socket = TcpStream::connect(address).expect("somebody listens");
    socket.set_nodelay(true).expect("it is connected");
    for piece in pieces {
        if socket.write_all(piece).is_err() {
            break;
        }
    }
    if then_shut {
        let _left = socket.shutdown(Shutdown::Write);
    }
    socket.set_read_timeout(Some(patience)).expect("a timeout");
    let mut said = HeardBytes::default();
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => said.everything.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                said.goes_on = true;
                break;
            }
            // Unread bytes at the close cause a reset.
            Err(_) => break,
        }
    }
    let mut decoder = Decoder::<ToClient>::new(MAX_FRAME_BYTES);
    decoder.extend(&said.everything);
    while let Ok(Some(frame)) = decoder.next_message() {
        said.welcome |= frame.welcome.is_some();
        said.close = frame.close.or(said.close);
    }
    said
}
