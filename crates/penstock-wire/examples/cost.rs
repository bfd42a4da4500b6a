//! Measures the cost of a message on the wire: nanoseconds to encode and to decode, in frames of 64.
//!
//!     cargo run --release -p penstock-wire --example cost

use std::hint::black_box;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use penstock_message::{Delivery, Key, Lease, Message, MessageId, Op, Tx, Value, ValueStatus};
use penstock_wire::{Decoder, Heard, MAX_FRAME_BYTES, convert, encode_frame, proto};

const IN_A_FRAME: usize = 64;
const FRAMES: usize = 20_000;

fn message() -> Message {
    Message {
        id: MessageId([7; 16]),
        task: "shop.tasks.send_mail".to_owned(),
        priority: 4,
        expires_at: None,
        result_ttl_ms: Some(86_400_000),
        max_deliveries: 3,
        attempt: 0,
        crashes: 0,
        enqueued_at: 1_700_000_000_000,
        notes: Vec::new(),
        body: Bytes::from_static(&[9; 120]),
        extras: None,
    }
}

fn publish() -> Tx {
    Tx::from(vec![Op::Publish {
        queues: vec!["default".to_owned()],
        message: message(),
        due: None,
        unless_key: None,
    }])
}

fn lease() -> Lease {
    Lease {
        message: MessageId([7; 16]),
        epoch: 1,
        grant: 1_000_000,
    }
}

fn settle() -> Tx {
    Tx::from(vec![
        Op::Ack {
            lease: lease(),
            cost_us: 12,
        },
        Op::Put {
            key: Key::Result(MessageId([7; 16])),
            value: Value::new(ValueStatus::Succeeded, Bytes::from_static(b"\xc0")),
            ttl_ms: Some(86_400_000),
            group: "shop.tasks.send_mail".to_owned(),
        },
    ])
}

fn delivery() -> Delivery {
    Delivery {
        consumer: 0,
        lease: lease(),
        queue: "default".to_owned(),
        redelivered: false,
        message: message(),
        inputs: bytes::Bytes::new(),
        deadline: None,
    }
}

fn main() {
    measure("publish", publish, commits, |frame: proto::ToBroker| {
        convert::decode_txs(frame.commits.into_iter().next().unwrap().txs).unwrap()
    });
    measure("settle ", settle, commits, |frame: proto::ToBroker| {
        convert::decode_txs(frame.commits.into_iter().next().unwrap().txs).unwrap()
    });
    measure("deliver", delivery, deliveries, |frame: proto::ToClient| {
        convert::all::<_, Delivery>(frame.deliveries).unwrap()
    });
}

fn commits(txs: Vec<Tx>) -> proto::ToBroker {
    proto::ToBroker {
        commits: vec![proto::Commit {
            first_seq: 1,
            txs: txs.into_iter().map(convert::encode_tx).collect(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn deliveries(deliveries: Vec<Delivery>) -> proto::ToClient {
    proto::ToClient {
        deliveries: deliveries.into_iter().map(Into::into).collect(),
        ..Default::default()
    }
}

fn measure<N: Clone, F: Heard>(
    name: &str,
    make: fn() -> N,
    to_frame: fn(Vec<N>) -> F,
    from_frame: fn(F) -> Vec<N>,
) {
    let batch = vec![make(); IN_A_FRAME];
    let mut copies = vec![batch.clone(); FRAMES / 20];
    let mut stream = BytesMut::new();
    let mut encoding = std::time::Duration::ZERO;
    let mut decoding = std::time::Duration::ZERO;
    let mut decoder = Decoder::<F>::new(MAX_FRAME_BYTES);
    for _round in 0..20 {
        for copy in std::mem::replace(&mut copies, vec![batch.clone(); FRAMES / 20]) {
            stream.clear();
            let start = Instant::now();
            encode_frame(&to_frame(copy), &mut stream);
            encoding += start.elapsed();

            let start = Instant::now();
            decoder.extend(&stream);
            black_box(from_frame(decoder.next_message().unwrap().unwrap()));
            decoding += start.elapsed();
        }
    }
    let each = |time: std::time::Duration| time.as_nanos() as usize / FRAMES / IN_A_FRAME;
    println!(
        "{name}  encode {:>4} ns  decode {:>4} ns  {} bytes",
        each(encoding),
        each(decoding),
        stream.len() / IN_A_FRAME
    );
}
