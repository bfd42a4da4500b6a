//! Malicious and broken clients: each is told why it is disconnected, and costs the others nothing.

use bytes::{Bytes, BytesMut};
use penstock_journal::sim::SimStorage;
use penstock_message::{Durability, Lease, MessageId, Query, StatusQuery};
use penstock_server::{Peer, Token};
use penstock_wire::proto::{self, ToBroker, close::Why};
use penstock_wire::{
    MAX_FRAME_BYTES, MAX_HELLO_BYTES, MAX_PRESENTED_LEASES, MAX_QUERIES_A_FRAME, convert,
    encode_frame,
};
use prost::Message as _;

use crate::world::*;

fn queries(count: usize, query: &Query) -> ToBroker {
    ToBroker {
        queries: (0..count as u64)
            .map(|id| (id, query.clone()).into())
            .collect(),
        ..ToBroker::default()
    }
}

fn ping() -> ToBroker {
    ToBroker {
        ping: true,
        ..ToBroker::default()
    }
}

fn lease(number: u32) -> Lease {
    let mut message = [0; 16];
    message[..4].copy_from_slice(&number.to_le_bytes());
    Lease {
        message: MessageId(message),
        epoch: 1,
        grant: 1,
    }
}

#[test]
fn one_client_too_many_is_told_so_and_there_is_room_when_another_has_left() {
    let mut world = EngineWorld::with(SimStorage::new(), |options| options.max_connections = 2);
    let first = world.join(1);
    let second = world.join(2);
    let third = world.connect(Peer::Trusted);
    let (why, text) = world.farewell(third);
    assert_eq!(why, Why::TooManyClients);
    assert_eq!(
        text,
        "this broker already has 2 connections, which is its limit"
    );
    assert!(!world.is_closed(first) && !world.is_closed(second));

    world.cut(second);
    world.join(4);
    world.send(first, &commit(1, Durability::Disk, vec![publish(1)]));
    world.settle();
    assert_eq!(world.confirmed(first).through, Some(1));
}

#[test]
fn strangers_who_keep_silent_keep_nobody_out() {
    let mut world = EngineWorld::with(SimStorage::new(), |options| options.max_connections = 4);
    let first = world.join(1);
    for round in 0..50 {
        let silent: Vec<EngineClient> = (0..5).map(|_| world.connect(Peer::Trusted)).collect();
        let client = world.join(2);
        let (why, _) = world.farewell(silent[0]);
        assert_eq!(why, Why::TooManyClients, "round {round}");
        assert!(!world.is_closed(first));
        world.cut(client);
    }
}

#[test]
fn every_kind_of_frame_is_refused_before_the_hello() {
    let key = proto::KeyRef {
        key: Some(proto::key_ref::Key::Named(Bytes::from_static(b"key"))),
    };
    let watch = proto::Watch {
        keys: vec![key],
        ..proto::Watch::default()
    };
    let frames = [
        commit(1, Durability::Disk, vec![publish(1)]),
        commit(1, Durability::None, Vec::new()),
        consume(10),
        queries(1, &Query::Status(StatusQuery::default())),
        queries(1, &Query::Stop),
        queries(1, &Query::Message(MessageId([1; 16]))),
        ToBroker {
            watch: Some(watch),
            ..ToBroker::default()
        },
        ToBroker {
            report: Some(proto::Report::default()),
            ..ToBroker::default()
        },
        ToBroker {
            ping: true,
            ..ToBroker::default()
        },
        ToBroker {
            goodbye: true,
            ..ToBroker::default()
        },
        ToBroker::default(),
    ];
    for frame in frames {
        let mut world = EngineWorld::with(SimStorage::new(), |options| {
            options.stop_on_request = true;
            options.token = Some(Token::new(b"secret").unwrap());
        });
        let client = world.connect(Peer::MustShowToken);
        world.send(client, &frame);
        let (why, text) = world.farewell(client);
        assert_eq!(
            (why, text.as_str()),
            (Why::Protocol, "the first frame is not a hello"),
            "{frame:?}"
        );
        assert_eq!(world.engine.broker().live_bytes(), 0);
        assert!(!world.engine.stop_requested());

        // Nor is it handled next to a hello with a wrong token.
        let client = world.connect(Peer::MustShowToken);
        let hello = Some(proto::Hello {
            token: Bytes::from_static(b"guess"),
            ..hello(1)
        });
        world.send(client, &ToBroker { hello, ..frame });
        assert_eq!(world.farewell(client).0, Why::Unauthorized);
        assert_eq!(world.engine.broker().live_bytes(), 0);
        assert!(!world.engine.stop_requested());
    }
}

#[test]
fn who_must_show_a_token_where_there_is_none_is_never_let_in() {
    let mut world = EngineWorld::new();
    for token in [&b""[..], b"guess"] {
        let client = world.connect(Peer::MustShowToken);
        let token = Bytes::from_static(token);
        world.send(client, &say_hello(proto::Hello { token, ..hello(1) }));
        assert_eq!(world.farewell(client).0, Why::Unauthorized);
    }
}

#[test]
fn a_hello_that_comes_byte_by_byte_is_heard_and_one_that_takes_too_long_is_not() {
    let mut bytes = BytesMut::new();
    encode_frame(&hello_frame(1), &mut bytes);
    let mut world = EngineWorld::new();
    let client = world.connect(Peer::Trusted);
    for byte in &bytes {
        world.send_bytes(client, &[*byte]);
        world.live(10);
    }
    assert!(world.hear(client)[0].welcome.is_some());

    let slow = world.connect(Peer::Trusted);
    for byte in bytes.iter().take(5) {
        world.send_bytes(slow, &[*byte]);
        world.live(1_000);
    }
    assert_eq!(world.farewell(slow).1, "no hello arrived in time");
}

#[test]
fn a_hello_that_is_continued_for_ever_ends_like_any_other_that_does_not_come() {
    let mut world = EngineWorld::new();
    let client = world.connect(Peer::Trusted);
    for _ in 0..49 {
        let continued = true;
        world.send(
            client,
            &say_hello(proto::Hello {
                continued,
                ..hello(1)
            }),
        );
        world.live(100);
        assert!(!world.is_closed(client));
    }
    world.live(100);
    assert_eq!(world.farewell(client).1, "no hello arrived in time");
}

#[test]
fn a_hello_cannot_bring_leases_without_end() {
    let mut world = EngineWorld::new();
    let client = world.connect(Peer::Trusted);
    let hello = |leases: Vec<proto::Lease>| {
        say_hello(proto::Hello {
            leases,
            continued: true,
            ..hello(1)
        })
    };
    world.send(client, &hello(Vec::new()));
    let half = (MAX_PRESENTED_LEASES / 2) as u32;
    let many: Vec<proto::Lease> = (0..half).map(|number| lease(number).into()).collect();
    world.send(client, &hello(many.clone()));
    world.send(client, &hello(many.clone()));
    world.settle();
    assert!(!world.is_closed(client));
    world.send(client, &hello(many));
    assert_eq!(
        world.farewell(client).1,
        "a hello with more than 262,144 leases"
    );
}

#[test]
fn a_client_that_asks_and_never_listens_is_not_heard_any_further_and_then_let_go() {
    let mut world = EngineWorld::new();
    let asker = world.join(1);
    let publisher = world.join(2);
    // Makes each answer long.
    for number in 0..200_u8 {
        let queue = format!("{number:->250}");
        let pause = penstock_message::Tx::from(vec![penstock_message::Op::Pause { queue }]);
        let seq = u64::from(number) + 1;
        world.send(publisher, &commit(seq, Durability::Disk, vec![pause]));
    }
    world.settle();
    world.stuff(asker, true);
    let mut most = 0;
    for _ in 0..10 {
        world.send(asker, &queries(50, &Query::Status(StatusQuery::default())));
        world.settle();
        most = most.max(world.engine.outgoing(asker.conn).len());
    }
    let one_frame_of_answers = 50 * 70_000;
    assert!(most < (4 << 20) + one_frame_of_answers, "{most} bytes wait");
    assert!(!world.engine.may_read(asker.conn));

    // Its frames are handled once it receives again.
    world.stuff(asker, false);
    world.settle();
    assert!(world.engine.may_read(asker.conn));
    assert_eq!(world.confirmed(asker).answers.len(), 10 * 50);

    // A client that never does is disconnected, like a silent one.
    world.stuff(asker, true);
    for _ in 0..3 {
        world.send(asker, &queries(50, &Query::Status(StatusQuery::default())));
    }
    for _ in 0..5 {
        world.live(HEARTBEAT_MS / 5);
        world.send(asker, &ping());
        world.send(publisher, &ping());
    }
    world.settle();
    world.stuff(asker, false);
    let last = world.hear(asker).pop().and_then(|frame| frame.close);
    assert!(
        last.expect("a reason")
            .text
            .starts_with("nothing was received"),
        "it was let go"
    );
    assert!(!world.is_closed(publisher));
}

#[test]
fn a_client_that_listens_slowly_is_kept_however_long_it_takes() {
    let mut world = EngineWorld::new();
    let asker = world.join(1);
    world.stuff(asker, true);
    let publisher = world.join(2);
    for number in 0..200_u8 {
        let queue = format!("{number:->250}");
        let pause = penstock_message::Tx::from(vec![penstock_message::Op::Pause { queue }]);
        let seq = u64::from(number) + 1;
        world.send(publisher, &commit(seq, Durability::Disk, vec![pause]));
    }
    for _ in 0..3 {
        world.send(asker, &queries(50, &Query::Status(StatusQuery::default())));
        world.settle();
    }
    assert!(!world.engine.may_read(asker.conn));
    let mut took_ms = 0;
    while !world.engine.may_read(asker.conn) {
        world.live(HEARTBEAT_MS / 2);
        took_ms += HEARTBEAT_MS / 2;
        let now = world.now;
        world.engine.transmitted(now, asker.conn, 100_000);
        assert!(!world.is_closed(asker));
    }
    assert!(took_ms > 10 * HEARTBEAT_MS);
}

#[test]
fn a_frame_asks_only_so_much() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.send(
        client,
        &queries(MAX_QUERIES_A_FRAME, &Query::Status(StatusQuery::default())),
    );
    world.settle();
    assert_eq!(world.confirmed(client).answers.len(), MAX_QUERIES_A_FRAME);
    world.send(
        client,
        &queries(
            MAX_QUERIES_A_FRAME + 1,
            &Query::Status(StatusQuery::default()),
        ),
    );
    assert_eq!(
        world.farewell(client).1,
        "more than 1,024 queries in one frame"
    );
}

#[test]
fn a_thousand_quiet_connections_are_each_told_that_we_live() {
    let mut world = EngineWorld::new();
    let clients: Vec<EngineClient> = (0..1000_u32)
        .map(|number| {
            let client = world.connect(Peer::Trusted);
            let mut session = [1; 16];
            session[..4].copy_from_slice(&number.to_le_bytes());
            let session = Bytes::copy_from_slice(&session);
            world.send(
                client,
                &say_hello(proto::Hello {
                    session,
                    ..hello(1)
                }),
            );
            world.pass(1);
            client
        })
        .collect();
    world.settle();
    for _ in 0..6 {
        world.live(HEARTBEAT_MS / 3 - 100);
        for client in &clients {
            world.send(*client, &ping());
        }
        world.settle();
    }
    for client in &clients {
        assert!(!world.is_closed(*client));
    }
    world.live(2 * HEARTBEAT_MS);
    for client in clients {
        let frames = world.hear(client);
        assert!(frames.iter().filter(|frame| frame.pong).count() >= 6 + 2);
        let last = frames.last().and_then(|frame| frame.close.clone());
        assert!(
            last.expect("a reason")
                .text
                .starts_with("nothing was received")
        );
    }
}

#[test]
fn absurd_values_end_the_connection_or_are_refused_and_nothing_else_happens() {
    // (sent bytes, the reason for closing; `None`: the connection continues)
    type Case = (ToBroker, Option<&'static str>);
    let pieces = |txs: Vec<Bytes>, first_seq, durability, part| ToBroker {
        commits: vec![proto::Commit {
            first_seq,
            durability,
            txs,
            part,
        }],
        ..ToBroker::default()
    };
    let tx = || convert::encode_tx(publish(9));
    let strange = |op| proto::Tx { ops: vec![op] }.encode_to_vec().into();
    let consuming = |queues: Vec<String>, add_credit| ToBroker {
        consumers: vec![proto::Consumer {
            queues,
            add_credit,
            ..proto::Consumer::default()
        }],
        ..ToBroker::default()
    };
    let cases: Vec<Case> = vec![
        (pieces(vec![tx()], 0, 0, 0), Some("numbered from 1")),
        (pieces(vec![tx()], 7, 0, 0), Some("arrived instead of 1")),
        (
            pieces(vec![tx()], u64::MAX, 0, 0),
            Some("arrived instead of 1"),
        ),
        (pieces(vec![tx()], 1, 99, 0), Some("an unknown durability")),
        (pieces(vec![tx()], 1, -1, 0), Some("an unknown durability")),
        (pieces(vec![tx()], 1, 0, 77), Some("an unknown part")),
        (pieces(vec![], 1, 0, 1), Some("not exactly one")),
        (pieces(vec![tx(), tx()], 1, 0, 1), Some("not exactly one")),
        (
            pieces(vec![Bytes::new()], u64::MAX, 0, 2),
            Some("arrived instead of 1"),
        ),
        (pieces(vec![], u64::MAX, 0, 0), None),
        (pieces(vec![Bytes::new(); 2000], 1, 0, 0), None),
        (
            pieces(vec![strange(proto::Op { op: None })], 1, 0, 0),
            // Refused separately, like an operation of a later version.
            None,
        ),
        (hello_frame(2), Some("a second hello")),
        (consuming(vec![String::new()], 1), Some("1 to 255 bytes")),
        (consuming(vec!["q".repeat(256)], 1), Some("1 to 255 bytes")),
        (
            consuming((0..2000).map(|n| n.to_string()).collect(), 1),
            Some(""),
        ),
        (
            ToBroker {
                report: Some(proto::Report {
                    slots: u32::MAX,
                    busy: u32::MAX,
                    ..proto::Report::default()
                }),
                ..ToBroker::default()
            },
            None,
        ),
    ];
    for (frame, expected) in cases {
        let mut world = EngineWorld::new();
        let bystander = world.join(1);
        let client = world.join(9);
        world.send(client, &frame);
        world.settle();
        match expected {
            None => assert!(!world.is_closed(client), "{frame:?}"),
            Some(says) => {
                let (why, text) = world.farewell(client);
                assert_eq!(why, Why::Protocol);
                assert!(text.contains(says), "{text:?} of {frame:?}");
            }
        }
        world.engine.broker().assert_consistent();
        world.send(bystander, &commit(1, Durability::Disk, vec![publish(1)]));
        world.settle();
        assert_eq!(world.confirmed(bystander).through, Some(1));
    }
}

#[test]
fn credit_can_be_given_without_end() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    for _ in 0..100 {
        world.send(client, &consume(u32::MAX));
    }
    world.send(client, &commit(1, Durability::Disk, vec![publish(1)]));
    world.settle();
    assert_eq!(world.confirmed(client).delivered_ids(), [1]);
    world.engine.broker().assert_consistent();
}

#[test]
fn any_bytes_before_or_after_a_hello_end_one_connection_with_a_reason() {
    // xorshift64*, so that every run has the same bytes.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut world = EngineWorld::new();
    let bystander = world.join(1);
    let mut greeted = BytesMut::new();
    encode_frame(&hello_frame(2), &mut greeted);
    let mut valid = BytesMut::new();
    encode_frame(&commit(1, Durability::Disk, vec![publish(7)]), &mut valid);
    for round in 0..3_000 {
        let mut bytes = Vec::new();
        if round % 2 == 0 {
            bytes.extend_from_slice(&greeted);
        }
        let from = bytes.len();
        match round % 3 {
            // Frame of noise with a correct length.
            0 => {
                let length = random() as usize % 300;
                bytes.extend_from_slice(&(length as u32).to_le_bytes());
                bytes.extend((0..length).map(|_| random() as u8));
            }
            // Valid frame with some bytes changed.
            1 => {
                bytes.extend_from_slice(&valid);
                for _ in 0..=random() % 4 {
                    let at = from + random() as usize % (bytes.len() - from);
                    bytes[at] = random() as u8;
                }
            }
            _ => bytes.extend((0..random() % 64).map(|_| random() as u8)),
        }
        let client = world.connect(Peer::Trusted);
        for piece in bytes.chunks(1 + random() as usize % 40) {
            world.send_bytes(client, piece);
        }
        world.settle();
        if world.is_closed(client) {
            let last = world.hear(client).pop().and_then(|frame| frame.close);
            assert_eq!(last.expect("a reason").why(), Why::Protocol);
        } else {
            world.cut(client);
        }
    }
    world.engine.broker().assert_consistent();
    world.send(bystander, &commit(1, Durability::Disk, vec![publish(1)]));
    world.settle();
    assert_eq!(world.confirmed(bystander).through, Some(1));
}

#[test]
fn a_length_is_never_taken_for_negative_or_believed_beyond_the_limit() {
    for length in [
        MAX_HELLO_BYTES as u32 + 1,
        1 << 31,
        u32::MAX,
        u32::MAX - 3,
        i32::MAX as u32,
    ] {
        let mut world = EngineWorld::new();
        let client = world.connect(Peer::Trusted);
        world.send_bytes(client, &length.to_le_bytes());
        let (why, text) = world.farewell(client);
        assert_eq!(why, Why::Protocol);
        assert_eq!(
            text,
            format!("a frame of {length} bytes is over the limit of 4096")
        );
    }
    for length in [MAX_FRAME_BYTES as u32 + 1, u32::MAX] {
        let mut world = EngineWorld::new();
        let client = world.join(1);
        world.send_bytes(client, &length.to_le_bytes());
        assert!(world.farewell(client).1.contains("over the limit"));
    }
}
