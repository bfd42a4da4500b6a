//! Checks what clients may rely on, with the engine alone: a simulated disk, no sockets, no clock.

#[path = "engine/outcomes.rs"]
mod outcomes;
#[path = "engine/status.rs"]
mod status;
#[path = "engine/strangers.rs"]
mod strangers;
mod world;

use bytes::{Bytes, BytesMut};
use penstock_broker::{BrokerOptions, Now};
use penstock_journal::sim::{Fault, SimStorage};
use penstock_journal::{Journal, JournalOptions, OpenError};
use penstock_message::{
    Answer, Durability, Key, Lease, MessageId, Op, Query, Receipt, Refusal, StatusQuery, Tx,
};
use penstock_server::{Engine, EngineOptions, Peer, Token};
use penstock_wire::proto::{self, ToBroker, close::Why};
use penstock_wire::{
    FRAME_HEADER_BYTES, HELLO_LEASES, MAX_HELLO_BYTES, convert, encode_frame, encoded_frame_len,
};
use prost::Message as _;
use world::*;

// Before the hello.

#[test]
fn nothing_is_heard_before_a_hello() {
    let mut world = EngineWorld::new();
    let client = world.connect(Peer::Trusted);
    world.send(client, &commit(1, Durability::Disk, vec![publish(1)]));
    let (why, text) = world.farewell(client);
    assert_eq!(
        (why, text.as_str()),
        (Why::Protocol, "the first frame is not a hello")
    );
    assert_eq!(world.engine.broker().live_bytes(), 0, "it was not applied");
}

#[test]
fn a_first_frame_over_four_kilobytes_is_refused_by_its_length() {
    let mut world = EngineWorld::new();
    let client = world.connect(Peer::Trusted);
    world.send_bytes(client, &(MAX_HELLO_BYTES as u32 + 1).to_le_bytes());
    let (why, text) = world.farewell(client);
    assert_eq!(why, Why::Protocol);
    assert_eq!(text, "a frame of 4097 bytes is over the limit of 4096");
}

#[test]
fn whoever_says_nothing_is_let_go() {
    let mut world = EngineWorld::new();
    let client = world.connect(Peer::Trusted);
    world.live(4_999);
    assert!(!world.is_closed(client));
    world.live(1);
    assert_eq!(world.farewell(client).1, "no hello arrived in time");
}

#[test]
fn only_the_right_token_opens() {
    fn check(token: &'static [u8], peer: Peer, expected: Option<&str>) {
        let mut world = EngineWorld::with(SimStorage::new(), |options| {
            options.token = Some(Token::new(b"secret").unwrap());
        });
        let client = world.connect(peer);
        let token = Bytes::from_static(token);
        world.send(client, &say_hello(proto::Hello { token, ..hello(1) }));
        world.settle();
        match expected {
            None => assert!(world.hear(client)[0].welcome.is_some()),
            Some(says) => assert_eq!(world.farewell(client), (Why::Unauthorized, says.to_owned())),
        }
    }
    let wanted =
        Some("this broker requires a token: set PENSTOCK_TOKEN to the one it was started with");
    let other = Some("wrong PENSTOCK_TOKEN: set it to the token that the broker was started with");
    check(b"secret", Peer::MustShowToken, None);
    check(b"", Peer::MustShowToken, wanted);
    check(b"secreT", Peer::MustShowToken, other);
    check(b"secret and more", Peer::MustShowToken, other);
    check(b"", Peer::Trusted, None);
}

#[test]
fn a_version_that_we_do_not_speak_is_refused_with_both_versions_and_what_to_install() {
    for protocol_version in [0, 1] {
        let mut world = EngineWorld::new();
        let client = world.connect(Peer::Trusted);
        world.send(
            client,
            &say_hello(proto::Hello {
                protocol_version,
                ..hello(1)
            }),
        );
        let (why, text) = world.farewell(client);
        assert_eq!(why, Why::Version);
        let ours = env!("CARGO_PKG_VERSION");
        assert_eq!(
            text,
            format!(
                "this client speaks version {protocol_version} of the protocol and this broker (penstock \
                 {ours}) version 2: install penstock {ours} for the client"
            )
        );
    }
}

#[test]
fn a_newer_client_is_answered_in_our_version() {
    for protocol_version in [2, 3, 7] {
        let mut world = EngineWorld::new();
        let client = world.connect(Peer::Trusted);
        world.send(
            client,
            &say_hello(proto::Hello {
                protocol_version,
                ..hello(1)
            }),
        );
        world.settle();
        let welcome = world.hear(client)[0].welcome.clone().expect("a welcome");
        assert_eq!(welcome.protocol_version, 2);
        assert_eq!(welcome.journal_format, penstock_journal::FORMAT_VERSION);
        assert_eq!(welcome.heartbeat_ms, HEARTBEAT_MS);
    }
}

#[test]
fn the_leases_that_a_first_hello_has_room_for_always_fit() {
    let lease = Lease {
        message: MessageId([255; 16]),
        epoch: u32::MAX,
        grant: u64::MAX,
    };
    let hello = say_hello(proto::Hello {
        token: Bytes::from_static(&[1; 64]),
        name: "worker@a-host-with-a-long-name.example.org:1234567".to_owned(),
        last_seq: u64::MAX,
        leases: vec![lease.into(); HELLO_LEASES],
        continued: true,
        ..hello(1)
    });
    assert!(encoded_frame_len(&hello) <= MAX_HELLO_BYTES);
}

#[test]
fn a_worker_with_thousands_of_leases_keeps_them_all() {
    const JOBS: u32 = 5_000;
    let mut world = EngineWorld::new();
    let worker = world.join(1);
    for part in 0..JOBS / 1000 {
        let ids = part * 1000..(part + 1) * 1000;
        let txs = ids.map(|id| {
            let mut tx = publish(0);
            let penstock_message::Op::Publish { message, .. } = &mut tx.ops[0] else {
                unreachable!("a publish");
            };
            message.id.0[..4].copy_from_slice(&id.to_be_bytes());
            tx
        });
        let first_seq = u64::from(part * 1000) + 1;
        let frame = commit(first_seq, Durability::Disk, txs.collect());
        world.ask(worker, &frame);
    }
    let held = world.ask(worker, &consume(JOBS)).deliveries;
    assert_eq!(held.len(), JOBS as usize);
    world.cut(worker);

    let mut leases: Vec<proto::Lease> = held.iter().map(|delivery| delivery.lease.into()).collect();
    let rest = leases.split_off(HELLO_LEASES);
    let last_seq = u64::from(JOBS);
    let again = world.connect(Peer::Trusted);
    world.send(
        again,
        &say_hello(proto::Hello {
            leases,
            continued: true,
            last_seq,
            ..hello(1)
        }),
    );
    world.settle();
    assert_eq!(world.hear(again), [], "it has not ended yet");
    let more = proto::Hello {
        leases: rest,
        ..proto::Hello::default()
    };
    world.send(again, &say_hello(more));
    world.settle();
    let welcome = world.confirmed(again).welcome.expect("a welcome");
    assert_eq!(welcome.leases.len(), JOBS as usize);
}

// A client that breaks the protocol does not affect others.

#[test]
fn a_client_that_breaks_the_protocol_is_told_why_and_another_goes_on() {
    fn check(says: &str, break_it: impl FnOnce(&mut EngineWorld, EngineClient)) {
        let mut world = EngineWorld::new();
        let (bad, good) = (world.join(1), world.join(2));
        break_it(&mut world, bad);
        let (why, text) = world.farewell(bad);
        assert_eq!((why, text.as_str()), (Why::Protocol, says));
        let told = world.ask(good, &commit(1, Durability::Disk, vec![publish(9)]));
        assert_eq!(told.through, Some(1));
    }
    check("a second hello", |world, bad| {
        world.send(bad, &hello_frame(1))
    });
    check(
        "a frame of 4294967295 bytes is over the limit of 17825792",
        |world, bad| {
            world.send_bytes(bad, &[255; 100]);
        },
    );
    check("an id is not 16 bytes long", |world, bad| {
        let mut frame = commit(1, Durability::Disk, vec![publish(1)]);
        let tx = &mut frame.commits[0].txs[0];
        let mut wire = proto::Tx::decode(tx.clone()).expect("a transaction");
        let Some(proto::op::Op::Publish(publish)) = &mut wire.ops[0].op else {
            unreachable!("a publish");
        };
        publish.message.as_mut().expect("a message").head.id = Bytes::from_static(b"short");
        *tx = wire.encode_to_vec().into();
        world.send(bad, &frame);
    });
    check("an unknown durability", |world, bad| {
        let mut frame = commit(1, Durability::Disk, vec![publish(1)]);
        frame.commits[0].durability = 9;
        world.send(bad, &frame);
    });
    check(
        "a part of a transaction that is not exactly one",
        |world, bad| {
            let mut frame = commit(1, Durability::Disk, vec![publish(1), publish(2)]);
            frame.commits[0].part = proto::Part::Last.into();
            world.send(bad, &frame);
        },
    );
}

/// Encodes a field of bytes as protobuf does.
fn field(number: u16, held: &[u8]) -> Vec<u8> {
    let key = number << 3 | 2;
    let mut bytes = match key {
        0..=127 => vec![key as u8],
        _ => vec![key as u8 | 128, (key >> 7) as u8],
    };
    assert!(held.len() < 128, "its length takes one byte");
    bytes.push(held.len() as u8);
    bytes.extend_from_slice(held);
    bytes
}

#[test]
fn an_operation_and_a_question_that_the_broker_cannot_name_are_refused_each_for_itself() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let unnamed_op = field(1, &field(40, b"of a later version"));
    let pause = field(1, &field(11, b"default"));
    let tx = |ops: &[&[u8]]| field(3, &ops.concat());
    let first_seq = [1 << 3, 1];
    let commit_body = [
        first_seq.to_vec(),
        tx(&[&pause, &unnamed_op]),
        tx(&[&pause]),
    ];
    let question = [vec![1 << 3, 7], field(99, b"of a later version")].concat();
    let frame = [field(2, &commit_body.concat()), field(5, &question)].concat();
    world.send_bytes(client, &(frame.len() as u32).to_le_bytes());
    world.send_bytes(client, &frame);
    world.settle();
    let told = world.confirmed(client);
    assert_eq!(told.through, Some(2));
    let [(1, Receipt::Refused { op: 1, why })] = &told.receipts[..] else {
        panic!("{:?}", told.receipts);
    };
    assert!(matches!(why, Refusal::NotOffered(_)), "{why:?}");
    let answers = convert::all::<_, (u64, Answer)>(told.answers).unwrap();
    assert!(
        matches!(answers[..], [(7, Answer::Refused(_))]),
        "{answers:?}"
    );
    assert!(!world.is_closed(client));
}

#[test]
fn garbage_after_good_frames_does_not_undo_them() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let mut bytes = BytesMut::new();
    encode_frame(&commit(1, Durability::Disk, vec![publish(1)]), &mut bytes);
    bytes.extend_from_slice(&[255; 64]);
    world.send_bytes(client, &bytes);
    assert_eq!(world.farewell(client).0, Why::Protocol);
    let worker = world.join(2);
    assert_eq!(world.ask(worker, &consume(10)).delivered_ids(), [1]);
}

// Nothing is sent before it is durable.

#[test]
fn a_confirm_waits_for_as_much_as_was_asked() {
    /// Checks when a commit is confirmed: before the write, between write and sync, or after the sync.
    fn check(durability: Durability, expected: [bool; 3]) {
        let mut world = EngineWorld::new();
        let client = world.join(1);
        world.live(1_000);
        world.confirmed(client);

        world.send(client, &commit(1, durability, vec![publish(1)]));
        let task = world.take_task();
        world.transmit();
        let mut seen = vec![world.confirmed(client).through.is_some()];
        if let Some(task) = &task {
            world.engine.batch_written(world.now, task.through);
            world.transmit();
            seen.push(seen[0] || world.confirmed(client).through.is_some());
            assert_eq!(task.sync, durability == Durability::Disk);
            world.carry_out(task);
            world.transmit();
            seen.push(seen[1] || world.confirmed(client).through.is_some());
        } else {
            // No client waits for it, so it is not written at once.
            seen.extend([seen[0], seen[0]]);
        }
        assert_eq!(seen, expected, "{durability:?}");
    }
    check(Durability::None, [true, true, true]);
    check(Durability::Os, [false, true, true]);
    check(Durability::Disk, [false, false, true]);
}

#[test]
fn what_nobody_waits_for_is_written_all_the_same() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.send(client, &commit(1, Durability::None, vec![publish(1)]));
    world.live(200);
    let mut restarted = EngineWorld::with(world.disk.kill(), |_| {});
    let worker = restarted.join(2);
    assert_eq!(restarted.ask(worker, &consume(10)).delivered_ids(), [1]);
}

#[test]
fn a_batch_holds_all_that_came_while_the_last_one_was_synced() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.send(client, &commit(1, Durability::Disk, vec![publish(1)]));
    let first = world.take_task().expect("a batch");
    for id in 2..=100 {
        world.send(
            client,
            &commit(u64::from(id), Durability::Disk, vec![publish(id)]),
        );
        assert!(world.take_task().is_none(), "the writer is busy");
    }
    world.carry_out(&first);
    let second = world.take_task().expect("a batch");
    world.carry_out(&second);
    assert!(world.take_task().is_none(), "one batch held everything");
    world.transmit();
    let told = world.hear(client);
    let confirms: Vec<u64> = told
        .into_iter()
        .filter_map(|frame| frame.confirm)
        .map(|confirm| confirm.through)
        .collect();
    assert_eq!(confirms, [1, 100], "one confirm for each sync");
}

#[test]
fn a_failed_sync_confirms_nothing_and_tells_everybody() {
    let mut world = EngineWorld::new();
    let (client, bystander) = (world.join(1), world.join(2));
    world.live(1_000);
    world.confirmed(client);
    world.confirmed(bystander);
    // The write, then the sync.
    world.disk.fail_at(world.disk.calls() + 1, Fault::Error);
    world.send(client, &commit(1, Durability::Disk, vec![publish(1)]));
    world.settle();
    for client in [client, bystander] {
        assert!(world.is_closed(client));
        let told = world.hear(client);
        assert_eq!(told.len(), 1, "no confirm");
        assert_eq!(told[0].close.as_ref().expect("a reason").why(), Why::Failed);
    }
    assert!(world.engine.is_over());
    assert!(world.take_task().is_none(), "nothing is written any more");

    let late = world.connect(Peer::Trusted);
    assert_eq!(world.farewell(late).0, Why::Failed);
}

// Sessions.

#[test]
fn what_is_sent_again_after_a_cut_is_applied_once() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let frame = commit(1, Durability::Disk, vec![publish(1), publish(2)]);
    world.send(client, &frame);
    // The connection breaks before the confirm is sent.
    let task = world.take_task().expect("a batch");
    world.carry_out(&task);
    world.cut(client);

    let again = world.connect(Peer::Trusted);
    world.send(
        again,
        &say_hello(proto::Hello {
            last_seq: 2,
            ..hello(1)
        }),
    );
    world.send(again, &frame);
    world.settle();
    let told = world.confirmed(again);
    let welcome = told.welcome.expect("a welcome");
    assert!(!welcome.forgotten);
    assert_eq!(told.through.max(Some(welcome.applied_through)), Some(2));
    assert_eq!(
        told.receipts
            .iter()
            .filter(|(_, receipt)| *receipt != Receipt::Duplicate)
            .count(),
        0
    );

    let worker = world.join(2);
    assert_eq!(world.ask(worker, &consume(10)).delivered_ids(), [1, 2]);
}

#[test]
fn what_was_confirmed_is_there_after_a_kill_and_what_is_sent_again_is_not_doubled() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let frame = commit(1, Durability::Disk, vec![publish(1)]);
    assert_eq!(world.ask(client, &frame).through, Some(1));

    let mut world = EngineWorld::with(world.disk.kill(), |_| {});
    let again = world.connect(Peer::Trusted);
    world.send(
        again,
        &say_hello(proto::Hello {
            last_seq: 1,
            ..hello(1)
        }),
    );
    world.send(again, &frame);
    world.settle();
    assert!(!world.confirmed(again).welcome.expect("a welcome").forgotten);
    let worker = world.join(2);
    assert_eq!(world.ask(worker, &consume(10)).delivered_ids(), [1]);
}

#[test]
fn a_newer_connection_of_a_session_fences_the_older_one() {
    let mut world = EngineWorld::new();
    let older = world.join(1);
    let newer = world.join(1);
    assert_eq!(world.farewell(older).0, Why::Fenced);
    assert!(!world.is_closed(newer));
}

#[test]
fn sessions_do_not_see_each_others_numbers() {
    let mut world = EngineWorld::new();
    let (one, two) = (world.join(1), world.join(2));
    assert_eq!(
        world
            .ask(one, &commit(1, Durability::Disk, vec![publish(1)]))
            .through,
        Some(1)
    );
    assert_eq!(
        world
            .ask(two, &commit(1, Durability::Disk, vec![publish(2)]))
            .through,
        Some(1)
    );
    assert_eq!(world.ask(one, &consume(10)).delivered_ids(), [1, 2]);
}

#[test]
fn a_goodbye_returns_leases_at_once_and_a_cut_keeps_them_for_a_heartbeat() {
    let mut world = EngineWorld::new();
    let (polite, broken) = (world.join(1), world.join(2));
    world.ask(
        polite,
        &commit(1, Durability::Disk, vec![publish(1), publish(2)]),
    );
    assert_eq!(world.ask(polite, &consume(1)).delivered_ids(), [1]);
    assert_eq!(world.ask(broken, &consume(1)).delivered_ids(), [2]);

    world.send(
        polite,
        &ToBroker {
            goodbye: true,
            ..ToBroker::default()
        },
    );
    world.settle();
    assert!(world.is_closed(polite));
    world.cut(broken);
    let worker = world.join(3);
    assert_eq!(world.ask(worker, &consume(10)).delivered_ids(), [1]);
    world.live(HEARTBEAT_MS - 1);
    let ping = ToBroker {
        ping: true,
        ..ToBroker::default()
    };
    assert_eq!(world.ask(worker, &ping).delivered_ids(), []);
    world.live(1);
    assert_eq!(world.confirmed(worker).delivered_ids(), [2]);
}

/// Checks that a goodbye comes last, also before fields with higher numbers in the same frame.
#[test]
fn a_goodbye_is_heard_after_everything_else_in_its_frame() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let txs = vec![publish(1), publish(2)];
    world.ask(client, &commit(1, Durability::Disk, txs));
    let held = world.ask(client, &consume(2)).deliveries;
    let ack = |lease| Tx::from(vec![Op::Ack { lease, cost_us: 1 }]);
    let frame = ToBroker {
        ping: true,
        ..commit(3, Durability::Disk, vec![ack(held[0].lease), publish(3)])
    };
    let body = |frame: &ToBroker| {
        let mut bytes = BytesMut::new();
        encode_frame(frame, &mut bytes);
        bytes.split_off(FRAME_HEADER_BYTES)
    };
    // On the wire the goodbye comes first.
    let goodbye = ToBroker {
        goodbye: true,
        ..ToBroker::default()
    };
    let bytes = [body(&goodbye), body(&frame)].concat();
    world.send_bytes(client, &(bytes.len() as u32).to_le_bytes());
    world.send_bytes(client, &bytes);
    world.settle();
    assert!(world.is_closed(client));
    assert_eq!(world.confirmed(client).pongs, 1);
    let worker = world.join(2);
    assert_eq!(world.ask(worker, &consume(10)).delivered_ids(), [2, 3]);
}

// Heartbeats.

#[test]
fn a_ping_is_answered_and_a_quiet_broker_says_that_it_is_there() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let ping = ToBroker {
        ping: true,
        ..ToBroker::default()
    };
    assert_eq!(world.ask(client, &ping).pongs, 1);
    world.live(HEARTBEAT_MS / 3);
    assert_eq!(world.confirmed(client).pongs, 1);
}

#[test]
fn a_client_that_says_nothing_for_a_heartbeat_is_lost() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.live(HEARTBEAT_MS - 1);
    world.send(
        client,
        &ToBroker {
            ping: true,
            ..ToBroker::default()
        },
    );
    world.live(HEARTBEAT_MS - 1);
    assert!(!world.is_closed(client));
    world.live(1);
    assert_eq!(
        world.farewell(client).1,
        "nothing was received from this client for 3000 ms"
    );
}

#[test]
fn a_stall_of_the_broker_is_not_a_clients_silence() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.live(1_000);
    world.engine.next_deadline_ms();
    // SIGSTOP or a suspended machine: the next tick comes an hour late, and the socket is empty.
    world.pass(3_600_000);
    world.engine.tick(world.now);
    world.settle();
    assert!(!world.is_closed(client));
    world.live(HEARTBEAT_MS);
    assert_eq!(world.farewell(client).0, Why::Protocol);
}

// Limits.

#[test]
fn a_client_that_takes_nothing_in_does_not_fill_the_memory() {
    let mut world = EngineWorld::new();
    let producer = world.join(1);
    let worker = world.join(2);
    let body = Bytes::from(vec![7; 200_000]);
    for id in 1..=100 {
        let frame = commit(
            u64::from(id),
            Durability::Disk,
            vec![publish_body(id, body.clone())],
        );
        world.ask(producer, &frame);
    }
    world.stuff(worker, true);
    world.send(worker, &consume(1000));
    world.settle();
    let waiting = world.engine.outgoing(worker.conn).len();
    assert!(
        (1 << 20..4 << 20).contains(&waiting),
        "{waiting} bytes wait"
    );
    let told = world.ask(producer, &commit(101, Durability::Disk, vec![publish(101)]));
    assert_eq!(told.through, Some(101), "nobody else is held up");

    world.stuff(worker, false);
    world.settle();
    assert_eq!(
        world.confirmed(worker).delivered_ids(),
        (1..=101).collect::<Vec<u8>>()
    );
}

#[test]
fn nothing_more_is_read_while_too_much_waits_for_the_disk() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.send(client, &commit(1, Durability::Disk, vec![publish(1)]));
    let slow = world.take_task().expect("a batch");
    let body = Bytes::from(vec![7; 8 << 20]);
    let mut seq = 1;
    while world.engine.accepts_input() {
        seq += 1;
        let frame = commit(
            seq,
            Durability::Disk,
            vec![publish_body(seq as u8, body.clone())],
        );
        world.send(client, &frame);
        assert!(world.take_task().is_none(), "the writer is busy");
    }
    assert!((8..=9).contains(&(seq - 1)), "{seq} bodies of 8 MiB wait");
    // Unread bytes are not silence.
    for _ in 0..10 {
        world.pass(HEARTBEAT_MS / 2);
        world.engine.tick(world.now);
    }
    assert!(!world.is_closed(client));
    world.carry_out(&slow);
    world.settle();
    assert!(world.engine.accepts_input());
    assert_eq!(world.confirmed(client).through, Some(seq));
}

#[test]
fn the_largest_body_goes_through_and_a_larger_one_gets_a_receipt_that_says_so() {
    const LARGEST: usize = 16 << 20;
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let body = Bytes::from(vec![7; LARGEST]);
    let told = world.ask(
        client,
        &commit(1, Durability::Disk, vec![publish_body(1, body.clone())]),
    );
    assert_eq!((told.through, told.receipts), (Some(1), vec![]));
    let delivered = world.ask(client, &consume(1)).deliveries.remove(0);
    assert_eq!(delivered.message.body, body);

    let body = Bytes::from(vec![7; LARGEST + 1]);
    let told = world.ask(
        client,
        &commit(2, Durability::Disk, vec![publish_body(2, body)]),
    );
    let Some((
        2,
        Receipt::Refused {
            op: 0,
            why: Refusal::TooLarge(text),
        },
    )) = told.receipts.first()
    else {
        panic!("{:?}", told.receipts);
    };
    assert!(
        text.contains("of 16777217 bytes is larger than the limit of 16777216 bytes (16 MiB)"),
        "{text}"
    );
    assert!(!world.is_closed(client));
}

#[test]
fn however_much_there_is_to_say_no_frame_is_over_the_limit() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    // A million watched keys: each takes little, all together take too much.
    let keys = (0..700_000_u32).map(|number| {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        Key::Result(MessageId(id)).into()
    });
    let watch = ToBroker {
        watch: Some(proto::Watch {
            keys: keys.collect(),
            ..proto::Watch::default()
        }),
        ..ToBroker::default()
    };
    // `ask` uses a decoder that refuses a frame over the limit.
    assert_eq!(world.ask(client, &watch).values.len(), 700_000);

    // The largest body, after almost as much as fits into a shared frame.
    let bodies = [131_060; 8].into_iter().chain([16 << 20]);
    for (index, bytes) in bodies.enumerate() {
        let body = vec![7; bytes];
        let id = index as u8 + 1;
        let frame = commit(
            u64::from(id),
            Durability::Disk,
            vec![publish_body(id, body.into())],
        );
        world.ask(client, &frame);
    }
    assert_eq!(
        world.ask(client, &consume(100)).delivered_ids(),
        (1..=9).collect::<Vec<u8>>()
    );
}

#[test]
fn a_journal_stays_small_however_much_goes_through_it() {
    const SEGMENT: u64 = 256 << 10;
    let mut world = EngineWorld::with(SimStorage::new(), |options| {
        options.journal.segment_bytes = SEGMENT;
        options.journal.batch_bytes = 64 << 10;
    });
    let client = world.join(1);
    let body = Bytes::from(vec![7; 10_000]);
    let mut seq = 1;
    // One message stays from the beginning; the segments around it must be dropped anyway.
    world.ask(
        client,
        &commit(seq, Durability::Disk, vec![publish_body(1, body.clone())]),
    );
    let kept = world.ask(client, &consume(1)).deliveries.remove(0);
    for _ in 0..1000 {
        seq += 1;
        let told = world.ask(
            client,
            &commit(seq, Durability::Disk, vec![publish_body(2, body.clone())]),
        );
        assert_eq!(told.through, Some(seq));
        let delivery = world.ask(client, &consume(1)).deliveries.remove(0);
        seq += 1;
        let settle = penstock_message::Tx::from(vec![penstock_message::Op::Ack {
            lease: delivery.lease,
            cost_us: 1,
        }]);
        world.ask(client, &commit(seq, Durability::Disk, vec![settle]));
    }
    // The last outcome waits for company.
    world.live(2);
    assert_eq!(world.confirmed(client).through, Some(seq));
    let status = world
        .ask(client, &query(1, Query::Status(StatusQuery::default())))
        .answers
        .remove(0);
    let Some(proto::answer::Answer::Status(page)) = status.answer else {
        panic!("a status");
    };
    let status = page.status.expect("a page of it");
    assert!(
        status.journal_bytes <= 5 * SEGMENT,
        "{} bytes",
        status.journal_bytes
    );
    assert_eq!(status.broker_pid, 42);
    assert!(status.sync_p50_us >= 100);

    let mut world = EngineWorld::with(world.disk.kill(), |_| {});
    let again = world.connect(Peer::Trusted);
    let lease = kept.lease.into();
    world.send(
        again,
        &say_hello(proto::Hello {
            last_seq: seq,
            leases: vec![lease],
            ..hello(1)
        }),
    );
    world.settle();
    let kept_leases = world.confirmed(again).welcome.expect("a welcome").leases;
    assert_eq!(
        kept_leases.len(),
        1,
        "the first message was carried forward"
    );
    assert_eq!(world.ask(again, &consume(10)).delivered_ids(), []);
}

// The end.

#[test]
fn a_stop_still_answers_what_was_heard_and_proves_the_journal() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.send(client, &commit(1, Durability::Disk, vec![publish(1)]));
    world.engine.stop(world.now);
    assert!(!world.engine.is_over());
    world.settle();
    let told = world.hear(client);
    assert_eq!(told[0].confirm.as_ref().expect("a confirm").through, 1);
    assert_eq!(
        told.last()
            .expect("a reason")
            .close
            .as_ref()
            .expect("a reason")
            .why(),
        Why::Stopping
    );
    assert!(world.engine.is_over());

    // A watermark covers all records, so none must be written again.
    let report = penstock_journal::fsck(&world.disk.kill())
        .expect("it can be read")
        .opening
        .expect("it opens");
    assert_eq!(report.rewritten_records, 0);
    assert_eq!(report.torn_batches, 0);
    assert!(report.was_closed);
}

#[test]
fn a_record_of_a_newer_program_is_told_from_a_damaged_one() {
    let options = EngineOptions {
        broker: BrokerOptions::default(),
        journal: JournalOptions::default(),
        token: None,
        max_connections: 1,
        stop_on_request: false,
        is_double: false,
        pid: 42,
    };
    let now = Now {
        mono_ms: 1_000,
        wall_ms: 1_700_000_000_000,
        boot: None,
    };
    for (record, is_newer) in [(&[0xff_u8, 1, 2, 3][..], true), (&[][..], false)] {
        let disk = SimStorage::new();
        let opened = Journal::open(disk.clone(), options.journal.clone(), &mut |_| Ok(()));
        let mut opened = opened.expect("an empty disk");
        opened.journal.append(1, record);
        let batch = opened.journal.take_batch().expect("there is a record");
        opened.writer.write(&batch).expect("the disk works");
        let opened = Engine::open(disk.kill(), options.clone(), || now);
        let error = opened.map(|_| ()).expect_err("it is refused");
        assert_eq!(
            matches!(error, OpenError::NewerRecord { .. }),
            is_newer,
            "{error}"
        );
        assert_eq!(
            matches!(error, OpenError::Replay { .. }),
            !is_newer,
            "{error}"
        );
    }
}

#[test]
fn a_quiet_journal_is_proven_too() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    world.ask(client, &commit(1, Durability::Disk, vec![publish(1)]));
    world.live(150);
    let as_found = world.disk.fork().kill();
    let report = penstock_journal::fsck(&as_found)
        .expect("it can be read")
        .opening
        .expect("it opens");
    assert_eq!(report.rewritten_records, 0);
    assert!(!report.was_closed);
    let calls = world.disk.calls();
    world.live(60_000 - 150);
    assert!(
        world.disk.calls() - calls <= 4,
        "an idle broker leaves the disk alone"
    );
}

#[test]
fn only_a_local_broker_is_stopped_by_a_client() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let answer = world.ask(client, &query(7, Query::Stop)).answers.remove(0);
    assert_eq!(answer.id, 7);
    assert!(matches!(
        answer.answer,
        Some(proto::answer::Answer::Refused(_))
    ));
    assert!(!world.engine.stop_requested());

    let mut world = EngineWorld::with(SimStorage::new(), |options| options.stop_on_request = true);
    let client = world.join(1);
    let answer = world.ask(client, &query(7, Query::Stop)).answers.remove(0);
    assert_eq!(answer.answer, Some(proto::answer::Answer::Stopping(true)));
    assert!(world.engine.stop_requested());
}

#[test]
fn only_the_clock_of_a_double_for_tests_is_moved_by_a_client() {
    let forward = |forward_ms| {
        let by_schedules = false;
        query(
            7,
            Query::SetClock {
                forward_ms,
                by_schedules,
            },
        )
    };
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let answer = world.ask(client, &forward(1_000)).answers.remove(0);
    assert!(matches!(
        answer.answer,
        Some(proto::answer::Answer::Refused(_))
    ));
    assert_eq!(world.engine.take_clock_move(), 0);

    let mut world = EngineWorld::with(SimStorage::new(), |options| options.is_double = true);
    let client = world.join(1);
    let before = world.now.wall_ms;
    let answer = world.ask(client, &forward(1_000)).answers.remove(0);
    assert_eq!(
        answer.answer,
        Some(proto::answer::Answer::ClockMs(before + 1_001))
    );
    assert_eq!(world.engine.take_clock_move(), 1_001);
    assert_eq!(world.engine.take_clock_move(), 0, "it is told once");
}
