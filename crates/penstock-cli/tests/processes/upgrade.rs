//! Checks the parts of an earlier program's journal that no Python API shows: claims, joins, refusals.
//! (`tests/upgrade/` has that journal, and checks its jobs.)

use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use penstock_conformance::{has_wall_clock, wall_clock};
use penstock_message::{Answer, Condition, Key, Message, MessageId, MessageState, Op, Query, Tx};
use penstock_wire::proto::{self, ToBroker, receipt::Why};
use rustix::process::Signal;

use crate::strangers::commit;
use crate::support::*;

/// Date on which `tests/upgrade/format-1` was made, plus five minutes, because sessions age.
const OPENED: &str = "@2026-01-15 12:05:00";

fn unpack_format_1(data: &Path) {
    let packed = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/upgrade/format-1/journal.tar.gz"
    );
    std::fs::create_dir(data).unwrap();
    let unpacked = Command::new("tar")
        .arg("-C")
        .arg(data)
        .args(["-xzf", packed])
        .status();
    assert!(unpacked.expect("tar runs").success());
}

/// Numbers of the messages, as in `make_format_1.rs`.
fn id(number: u8) -> MessageId {
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&1_768_478_400_000_u64.to_be_bytes()[2..]);
    (bytes[6], bytes[8], bytes[15]) = (0x70, 0x80, number);
    MessageId(bytes)
}

fn publish(queue: &str, number: u8, unless: Option<&'static str>) -> Tx {
    Tx::from(vec![Op::Publish {
        queues: vec![queue.to_owned()],
        message: Message {
            task: "shop.special".to_owned(),
            ..message(id(number), Bytes::from_static(b"body"))
        },
        due: None,
        unless_key: unless.map(|key| Key::Named(Bytes::from_static(key.as_bytes())).into()),
    }])
}

fn joined(join: u8, index: u32) -> Tx {
    Tx::from(vec![Op::Join {
        join: id(join),
        index,
        succeeded: true,
    }])
}

fn price_is(body: &'static [u8]) -> Tx {
    Tx::from(vec![Op::Guard {
        key: Key::Named(Bytes::from_static(b"price of tea")),
        condition: Condition::Is(Bytes::from_static(body)),
    }])
}

struct CallingClient(RawClient<std::net::TcpStream>);

impl CallingClient {
    /// Session of the fixture, or a new one.
    fn join(address: &str, session: &[u8; 16], last_seq: u64) -> (Self, proto::Welcome) {
        let mut client = RawClient::tcp(address);
        client.send(&ToBroker {
            hello: Some(proto::Hello {
                session: Bytes::copy_from_slice(session),
                last_seq,
                ..hello(1, "").hello.expect("it is one")
            }),
            ..ToBroker::default()
        });
        let welcome = client.hear().and_then(|frame| frame.welcome);
        (Self(client), welcome.expect("a welcome"))
    }

    /// Reason why it was not simply applied, if so.
    fn commit(&mut self, seq: u64, tx: Tx) -> Option<proto::Receipt> {
        self.0.send(&commit(seq, vec![tx]));
        self.confirm().receipts.into_iter().next()
    }

    fn confirm(&mut self) -> proto::Confirm {
        loop {
            let frame = self.0.hear().expect("a frame");
            if let Some(confirm) = frame.confirm {
                return confirm;
            }
        }
    }

    fn state(&mut self, number: u8) -> Option<MessageState> {
        self.0.send(&ToBroker {
            queries: vec![(1, Query::Message(id(number))).into()],
            ..ToBroker::default()
        });
        loop {
            let frame = self.0.hear().expect("a frame");
            if let Some(answer) = frame.answers.into_iter().next() {
                let (_, answer) = answer.try_into().expect("an answer");
                let Answer::Message(found) = answer else {
                    panic!("{answer:?}");
                };
                return found.map(|found| found.state);
            }
        }
    }
}

#[test]
fn claims_joins_values_and_refusals_of_format_1_hold() {
    if !has_wall_clock() {
        eprintln!("skipped: needs faketime (Debian: apt-get install faketime)");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    unpack_format_1(&data);
    let upgraded = run(&["journal", "upgrade", data.to_str().unwrap()]);
    assert!(upgraded.status.success(), "{}", text(&upgraded));
    let mut command = penstock();
    command.args(["server", "--listen", "tcp://127.0.0.1:0", "--data"]);
    command.arg(&data).envs(wall_clock(OPENED)).env("TZ", "UTC");
    let mut server = RunningProgram::start(&mut command);
    let line = server.said("listening on tcp://");
    let (_, address) = line.split_once("tcp://").unwrap();

    // Its session is known with all its transactions: number 6 was refused, as the welcome states.
    let (mut special, welcome) = CallingClient::join(address.trim(), b"special session ", 11);
    assert!(!welcome.forgotten);
    assert_eq!(welcome.applied_through, 5);
    let confirm = special.confirm();
    assert_eq!(confirm.through, 11);
    let refused: Vec<_> = confirm
        .receipts
        .iter()
        .map(|of| (of.seq, of.why()))
        .collect();
    assert_eq!(refused, [(6, Why::GuardFailed)]);
    let why = |receipt: Option<proto::Receipt>| receipt.map(|receipt| receipt.why());
    let again = special.commit(6, publish("reports", 4, None));
    assert_eq!(why(again), Some(Why::GuardFailed));

    let (mut other, _) = CallingClient::join(address.trim(), b"another session ", 0);
    let skipped = other.commit(1, publish("reports", 9, Some("nightly report")));
    assert_eq!(skipped.expect("the key is claimed").skipped, [0]);
    assert_eq!(other.state(9), None);
    assert_eq!(why(other.commit(2, price_is(b"4 pounds"))), None);
    let refused = other.commit(3, price_is(b"5 pounds"));
    assert_eq!(why(refused), Some(Why::GuardFailed));

    // Member 0 of the first join has ended, and is not counted twice.
    for (seq, join, index, held, state) in [
        (4, 101, 0, 2, MessageState::Held),
        (5, 101, 1, 2, MessageState::Held),
        (6, 101, 2, 2, MessageState::Ready),
        (7, 102, 0, 3, MessageState::Held),
        (8, 102, 1, 3, MessageState::Ready),
    ] {
        assert_eq!(why(other.commit(seq, joined(join, index))), None);
        assert_eq!(other.state(held), Some(state), "{join}, {index}");
    }

    let full = other.commit(9, publish("thumbnails", 10, None));
    assert_eq!(why(full), Some(Why::QueueFull));
    server.signal(Signal::TERM);
    assert!(server.ended().success());
}

#[test]
fn a_journal_in_use_is_not_upgraded_and_it_is_said_how_to_end_its_broker() {
    let local = LocalProgram::start("60");
    let data = local.data();
    for command in ["upgrade", "check"] {
        let refused = run(&["journal", command, data.to_str().unwrap()]);
        assert!(!refused.status.success());
        let said = text(&refused);
        assert!(said.contains("in use by another process"), "{said}");
        assert!(said.contains("penstock broker stop"), "{said}");
    }
}
