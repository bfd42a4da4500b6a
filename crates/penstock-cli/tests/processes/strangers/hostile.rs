//! Tests strangers that break the protocol. They learn why they are disconnected and get nothing without the
//! token, and legitimate clients are served meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::Instant;

use bytes::Bytes;
use penstock_wire::proto::{self, ToBroker, close::Why};
use penstock_wire::{MAX_FRAME_BYTES, MAX_HELLO_BYTES};
use prost::Message as _;

use super::business::{assert_not_disturbed, beside_business, rounds};
use super::{commit, framed, hello_of, publish, stranger, strangers};
use crate::server::serve;
use crate::support::*;

/// Random generator xorshift64*, so that the same strangers come each time.
struct Random(u64);

impl Random {
    fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.draw() % limit as u64) as usize
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| (self.draw() >> 32) as u8).collect()
    }
}

/// Attack of a stranger, with the reason that it must receive, if the protocol permits one.
fn hostile_pieces(number: usize, random: &mut Random) -> (Vec<Vec<u8>>, Option<Why>) {
    let session = random.draw();
    let greeting = framed(&hello_of(session, b""));
    let valid = framed(&commit(1, vec![publish(random.draw() | 1 << 63)]));
    let before_hello = [
        commit(1, vec![publish(1)]),
        ToBroker {
            consumers: vec![proto::Consumer::default()],
            ..ToBroker::default()
        },
        ToBroker {
            watch: Some(proto::Watch::default()),
            ..ToBroker::default()
        },
        ToBroker {
            queries: vec![proto::Query {
                id: 1,
                query: Some(proto::query::Query::Stop(true)),
            }],
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
    ];
    match number % 16 {
        0 => {
            let count = 1 + random.below(200);
            (vec![random.bytes(count)], None)
        }
        1 => {
            // A correct length before noise: everything except a protobuf hello gets an answer.
            let count = random.below(300);
            let mut bytes = (count as u32).to_le_bytes().to_vec();
            bytes.extend(random.bytes(count));
            (vec![bytes], Some(Why::Protocol))
        }
        2 => {
            let cut = random.below(greeting.len());
            (vec![greeting[..cut].to_vec()], None)
        }
        3 => {
            let cut = random.below(valid.len());
            (vec![greeting, valid[..cut].to_vec()], None)
        }
        4 => {
            let length = MAX_HELLO_BYTES as u32 + 1 + random.draw() as u32 % (u32::MAX / 2);
            (vec![length.to_le_bytes().to_vec()], Some(Why::Protocol))
        }
        5 => {
            let length = MAX_FRAME_BYTES as u32 + 1 + random.draw() as u32 % (u32::MAX / 2);
            (
                vec![greeting, length.to_le_bytes().to_vec()],
                Some(Why::Protocol),
            )
        }
        6 => {
            let frame = &before_hello[random.below(before_hello.len())];
            (vec![framed(frame)], Some(Why::Protocol))
        }
        7 => (vec![greeting.clone(), greeting], Some(Why::Protocol)),
        8 => {
            let seq = 2 + random.draw() / 2;
            (
                vec![greeting, framed(&commit(seq, vec![publish(1)]))],
                Some(Why::Protocol),
            )
        }
        9 => {
            let mut frame = commit(1, vec![publish(1)]);
            frame.commits[0].durability = 3 + random.draw() as i32 % 1000;
            frame.commits[0].durability = frame.commits[0].durability.abs() + 4;
            (vec![greeting, framed(&frame)], Some(Why::Protocol))
        }
        10 => {
            let mut frame = commit(1, vec![publish(1)]);
            let no_lease = proto::op::Op::Ack(proto::Ack::default());
            let ops = vec![proto::Op { op: Some(no_lease) }];
            frame.commits[0]
                .txs
                .push(proto::Tx { ops }.encode_to_vec().into());
            (vec![greeting, framed(&frame)], Some(Why::Protocol))
        }
        11 => {
            let empty = proto::Consumer {
                queues: vec![String::new()],
                add_credit: u32::MAX,
                ..proto::Consumer::default()
            };
            let frame = ToBroker {
                consumers: vec![empty],
                ..ToBroker::default()
            };
            (vec![greeting, framed(&frame)], Some(Why::Protocol))
        }
        12 => {
            let mut hello = hello_of(session, b"");
            hello.hello.as_mut().expect("it is one").session = Bytes::from_static(b"short");
            (vec![framed(&hello)], Some(Why::Protocol))
        }
        13 => {
            let mut hello = hello_of(session, b"");
            hello.hello.as_mut().expect("it is one").protocol_version = 0;
            (vec![framed(&hello)], Some(Why::Version))
        }
        14 => {
            // A valid frame of a greeted client, with some bytes changed.
            let mut bytes = valid;
            for _ in 0..=random.below(4) {
                let at = random.below(bytes.len());
                bytes[at] = random.draw() as u8;
            }
            (vec![greeting, bytes], None)
        }
        _ => (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
                .chunks(1 + random.below(9))
                .map(<[u8]>::to_vec)
                .collect(),
            Some(Why::Protocol),
        ),
    }
}

#[test]
fn strangers_are_told_why_they_must_go_and_business_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let (mut server, address) = serve(place.path(), &[], None);
    let count = strangers(400);
    let mut reasons = BTreeMap::<String, usize>::new();
    let before = usage(server.pid());
    let start = Instant::now();
    let mut random = Random(8211);
    let (quiet, meanwhile) = beside_business(&address, b"", |round| {
        for number in (round..count).step_by(rounds()) {
            let (pieces, expected) = hostile_pieces(number, &mut random);
            // The server would wait for the rest of a short message, so the stranger closes its side.
            let said = stranger(&address, &pieces, expected.is_none(), PATIENCE);
            assert!(!said.goes_on, "{number}: {pieces:?}");
            let why = said.close.as_ref().map(proto::Close::why);
            if let Some(expected) = expected {
                assert_eq!(why, Some(expected), "{number}: {pieces:?} {said:?}");
            }
            *reasons.entry(format!("{why:?}")).or_default() += 1;
        }
    });
    let took = start.elapsed();
    let after = usage(server.pid());
    println!("{count} hostile connections in {took:?}: {reasons:?}");
    println!("a confirm's p99: {quiet:?} alone, {meanwhile:?} beside them");
    println!("resident, files, time before {before:?} and after {after:?}");
    assert!(server.is_running());
    assert!(after.1 <= before.1 + 80, "files leak: {before:?} {after:?}");
    assert_not_disturbed(quiet, meanwhile);
}

/// Wrong guesses at `token`.
fn wrong_tokens(token: &[u8], random: &mut Random, count: usize) -> Vec<Vec<u8>> {
    let mut guesses = vec![
        Vec::new(),
        vec![0],
        vec![0; token.len()],
        token.to_ascii_uppercase(),
        [token, token].concat(),
        [token, b"\0"].concat(),
        [b"\0", token].concat(),
        [token, b" "].concat(),
        [token, b"\n"].concat(),
        [b"Bearer ", token].concat(),
        vec![b'a'; 256],
        vec![b'a'; 257],
        vec![b'a'; 3_900],
        vec![0xff; 200],
    ];
    for length in 1..token.len() {
        guesses.push(token[..length].to_vec());
        guesses.push(token[length..].to_vec());
        let mut holed = token.to_vec();
        holed[length] = 0;
        guesses.push(holed);
    }
    for bit in 0..token.len() * 8 {
        let mut changed = token.to_vec();
        changed[bit / 8] ^= 1 << (bit % 8);
        guesses.push(changed);
    }
    while guesses.len() < count {
        let length = random.below(300);
        let mut guess = random.bytes(length);
        if random.below(2) == 0 {
            let shared = random.below(token.len());
            let shared = shared.min(guess.len());
            guess[..shared].copy_from_slice(&token[..shared]);
        }
        guesses.push(guess);
    }
    guesses.retain(|guess| guess != token);
    guesses
}

#[test]
fn nobody_gets_in_without_the_token_and_it_is_never_shown() {
    const TOKEN: &str = "correct-horse-battery-staple-20";
    let place = tempfile::tempdir().unwrap();
    let (server, address) = serve(place.path(), &["--verbose"], Some(TOKEN));
    let mut random = Random(4711);
    let guesses = wrong_tokens(TOKEN.as_bytes(), &mut random, strangers(300));
    assert!(guesses.len() >= 200);
    for (number, guess) in guesses.iter().enumerate() {
        let mut hello = hello_of(number as u64, guess);
        // Frames that follow a wrong token are not processed either.
        hello.ping = true;
        hello.commits = commit(1, vec![publish(number as u64)]).commits;
        let said = stranger(&address, &[framed(&hello)], false, PATIENCE);
        assert!(!said.welcome && !said.goes_on, "{guess:?} got in");
        let why = said.close.as_ref().expect("a reason").why();
        assert!(
            matches!(why, Why::Unauthorized | Why::Protocol),
            "{guess:?}: {why:?}"
        );
        let shown = said.everything.windows(TOKEN.len());
        assert!(!shown.into_iter().any(|part| part == TOKEN.as_bytes()));
    }
    // Far beyond a hello, in one piece and slowly.
    let huge = framed(&hello_of(1, &vec![b'a'; 64 << 10]));
    let said = stranger(&address, &[huge], false, PATIENCE);
    assert_eq!(said.close.map(|close| close.why()), Some(Why::Protocol));
    let slow: Vec<Vec<u8>> = framed(&hello_of(1, b"guess"))
        .iter()
        .map(|byte| vec![*byte])
        .collect();
    let said = stranger(&address, &slow, false, PATIENCE);
    assert_eq!(said.close.map(|close| close.why()), Some(Why::Unauthorized));
    println!("{} guesses, none let in", guesses.len() + 2);

    let mut friend = RawClient::tcp(&address);
    let right: Vec<Vec<u8>> = framed(&hello_of(9, TOKEN.as_bytes()))
        .iter()
        .map(|byte| vec![*byte])
        .collect();
    right.iter().for_each(|byte| friend.send_bytes(byte));
    assert!(
        friend.hear().unwrap().welcome.is_some(),
        "the right one opens, however slowly"
    );
    friend.send(&ToBroker {
        queries: vec![proto::Query {
            id: 1,
            query: Some(proto::query::Query::Status(proto::StatusQuery::default())),
        }],
        ..ToBroker::default()
    });
    let status = friend.hear().unwrap();
    assert!(!format!("{status:?}").contains(TOKEN));
    let Some(proto::answer::Answer::Status(page)) = &status.answers[0].answer else {
        panic!("{status:?}");
    };
    let status = page.status.as_ref().expect("a page of it");
    assert!(status.queues.is_empty(), "something was enqueued");
    server.signal(rustix::process::Signal::TERM);
    for line in server.everything_said() {
        assert!(!line.contains(TOKEN), "{line}");
    }
}

#[test]
fn a_token_that_no_client_could_show_is_refused_at_the_start() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("token");
    let check = |token: &[u8], says: &str| {
        fs::write(&file, token).unwrap();
        let data = place.path().join("data");
        let refused = run(&[
            "server",
            "--listen",
            "tcp://127.0.0.1:0",
            "--data",
            data.to_str().unwrap(),
            "--token-file",
            file.to_str().unwrap(),
        ]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(text(&refused).contains(says), "{}", text(&refused));
    };
    check(b" \n", "the token is empty");
    check(&[b'a'; 257], "the token has 257 bytes; the limit is 256");
}

#[test]
fn half_a_hello_is_not_waited_for_longer_than_five_seconds() {
    let place = tempfile::tempdir().unwrap();
    let (_server, address) = serve(place.path(), &[], None);
    let half = framed(&hello_of(1, b""))[..20].to_vec();
    let strangers: Vec<_> = (0..20)
        .map(|number| {
            let (address, half) = (address.clone(), half.clone());
            thread::spawn(move || {
                // All at once, or one byte at a time.
                let pieces = match number % 2 {
                    0 => vec![half],
                    _ => half.iter().map(|byte| vec![*byte]).collect(),
                };
                let start = Instant::now();
                (
                    stranger(&address, &pieces, false, PATIENCE),
                    start.elapsed(),
                )
            })
        })
        .collect();
    for stranger in strangers {
        let (said, took) = stranger.join().expect("it ends");
        let close = said.close.expect("a reason");
        assert_eq!(
            (close.why(), close.text.as_str()),
            (Why::Protocol, "no hello arrived in time")
        );
        assert!(took.as_secs() >= 4, "{took:?}");
    }
}
