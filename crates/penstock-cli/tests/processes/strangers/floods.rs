//! Tests too many strangers: they leave nothing behind, and legitimate clients are served meanwhile.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_message::Op;
use penstock_wire::proto::{self, ToBroker, close::Why};
use rustix::process::{Resource, Rlimit, prlimit};

use super::business::{assert_not_disturbed, beside_business, compare_business, rounds};
use super::{commit, framed, hello_of, is_long_run, publish, stranger, strangers};
use crate::server::serve;
use crate::support::*;

#[test]
fn more_clients_than_a_server_takes_are_told_so() {
    let place = tempfile::tempdir().unwrap();
    let (_server, address) = serve(place.path(), &["--max-connections", "3"], None);
    let mut clients: Vec<_> = (1..=3)
        .map(|session| RawClient::tcp(&address).join(session))
        .collect();
    let said = stranger(&address, &[], false, PATIENCE);
    let close = said.close.expect("a reason");
    assert_eq!(close.why(), Why::TooManyClients);
    assert_eq!(
        close.text,
        "this broker already has 3 connections, which is its limit"
    );
    clients.pop();
    // The slot is free once the server notices.
    let until = Instant::now() + PATIENCE;
    loop {
        let mut client = RawClient::tcp(&address);
        client.send_bytes(&framed(&hello_of(4, b"")));
        let heard = client.hear().expect("an answer");
        if heard.welcome.is_some() {
            break;
        }
        assert_eq!(heard.close.expect("a reason").why(), Why::TooManyClients);
        assert!(Instant::now() < until);
    }
}

fn with_files(place: &Path, files: u32) -> (RunningProgram, String) {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_penstock"));
    command.args(["server", "--listen", "tcp://127.0.0.1:0", "--data"]);
    command.arg(place.join("data"));
    let server = RunningProgram::start(&mut command);
    let line = server.said("listening on tcp://");
    let (_, address) = line.split_once("tcp://").unwrap();
    (server, address.trim().to_owned())
}

#[test]
fn a_server_with_few_files_keeps_some_for_its_journal_and_goes_on_when_even_these_are_gone() {
    let place = tempfile::tempdir().unwrap();
    let (mut server, address) = with_files(place.path(), 256);
    let mut business = RawClient::tcp(&address).join(1);
    let idle: Vec<_> = (0..143)
        .map(|number| {
            let mut client = RawClient::tcp(&address);
            client.send_bytes(&framed(&hello_of(number, b"")));
            assert!(client.hear().unwrap().welcome.is_some());
            client
        })
        .collect();
    let said = stranger(&address, &[], false, PATIENCE);
    assert_eq!(said.close.expect("a reason").why(), Why::TooManyClients);
    business.send(&commit(1, vec![publish(1)]));
    assert_eq!(business.hear().unwrap().confirm.unwrap().through, 1);

    // No address is left, as if another client had taken them all.
    drop(idle);
    let pid = server.pid();
    let (_, files, _) = usage(pid);
    let limit = |current| Rlimit {
        current: Some(current),
        maximum: Some(256),
    };
    prlimit(Some(pid), Resource::Nofile, limit(1)).expect("it is our child");
    let waiting = TcpStream::connect(&address).expect("the system takes it");
    let (_, _, before) = usage(pid);
    let start = Instant::now();
    for seq in 2..=100 {
        business.send(&commit(seq, vec![publish(seq)]));
        assert_eq!(business.hear().unwrap().confirm.unwrap().through, seq);
        thread::sleep(Duration::from_millis(10));
    }
    let (_, _, after) = usage(pid);
    assert!(
        after - before < start.elapsed() * 4 / 5,
        "it spins: {:?}",
        after - before
    );
    prlimit(Some(pid), Resource::Nofile, limit(256)).expect("it is our child");
    let mut patient = RawClient::over(waiting);
    patient.send_bytes(&framed(&hello_of(7, b"")));
    assert!(
        patient.hear().unwrap().welcome.is_some(),
        "who waited is served"
    );
    assert!(server.is_running() && files > 0);
}

#[test]
fn idle_connections_cost_little_and_give_everything_back() {
    let place = tempfile::tempdir().unwrap();
    let (server, address) = serve(place.path(), &[], None);
    let count = strangers(1_000).min(10_000);
    let mut first = RawClient::tcp(&address);
    first.send(&hello_of(u64::MAX, b""));
    assert!(first.hear().unwrap().welcome.is_some());
    let (before, files_before, _) = usage(server.pid());
    let start = Instant::now();
    let clients: Vec<_> = (0..count as u64)
        .map(|number| {
            let mut client = RawClient::tcp(&address);
            client.send_bytes(&framed(&hello_of(number, b"")));
            assert!(client.hear().unwrap().welcome.is_some());
            client
        })
        .collect();
    let took = start.elapsed();
    let (full, ..) = usage(server.pid());
    let each = (full - before.min(full)) / count as u64;
    let (_, _, busy_before) = usage(server.pid());
    let start = Instant::now();
    first.send(&commit(1, vec![publish(1)]));
    assert_eq!(first.hear().unwrap().confirm.unwrap().through, 1);
    let confirm = start.elapsed();
    thread::sleep(Duration::from_millis(300));
    let (_, _, busy) = usage(server.pid());
    println!(
        "{count} idle connections in {took:?}: {each} bytes each, a confirm beside them {confirm:?}, {:?} of CPU in 0.3 s",
        busy - busy_before
    );
    assert!(each <= 30 << 10, "{each} bytes each");
    drop(clients);
    let until = Instant::now() + PATIENCE;
    while usage(server.pid()).1 > files_before + 2 {
        assert!(Instant::now() < until, "files leak");
        thread::sleep(Duration::from_millis(10));
    }
    let (after, ..) = usage(server.pid());
    println!("resident: {before} before, {full} with them, {after} after");
}

#[test]
fn who_connects_again_and_again_disturbs_nobody_and_leaves_nothing_behind() {
    let place = tempfile::tempdir().unwrap();
    let (server, address) = serve(place.path(), &[], None);
    let count = strangers(500).min(20_000);
    let before = usage(server.pid());
    let start = Instant::now();
    let (quiet, meanwhile) = beside_business(&address, b"", |_| {
        let begun = Instant::now();
        for number in 0..count / rounds() {
            // 1,000 a second.
            let due = begun + Duration::from_millis(number as u64);
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let mut socket = TcpStream::connect(&address).expect("somebody listens");
            match number % 3 {
                0 => drop(socket),
                1 => drop(socket.write_all(b"\x10\0\0\0half")),
                _ => drop(socket.write_all(&framed(&ToBroker::default()))),
            }
        }
    });
    let took = start.elapsed();
    let until = Instant::now() + PATIENCE;
    while usage(server.pid()).1 > before.1 + 2 {
        assert!(Instant::now() < until, "files leak");
        thread::sleep(Duration::from_millis(10));
    }
    let after = usage(server.pid());
    println!(
        "{count} connects in {took:?}; p99 {quiet:?} alone, {meanwhile:?} beside them; {before:?} {after:?}"
    );
    assert_not_disturbed(quiet, meanwhile);
    if is_long_run() {
        assert!(after.0 < before.0 + (32 << 20), "memory leaks");
    }
}

/// Publishes this many jobs of 1 KB each to the queue, as fast as they are confirmed.
fn publish_many(address: &str, queue: &str, round: usize, count: u64) {
    // Unique to this queue and round.
    let from = ((queue.len() as u64) << 32) + ((round as u64) << 20);
    let mut client = RawClient::tcp(address);
    client.send(&hello_of(3 << 40 | from, b""));
    assert!(client.hear().expect("a frame").welcome.is_some());
    for number in (0..count).step_by(50) {
        let jobs = (number..number + 50).map(|number| {
            let mut tx = publish(from + number);
            if let Op::Publish {
                queues, message, ..
            } = &mut tx.ops[0]
            {
                *queues = vec![queue.to_owned()];
                message.body = Bytes::from(vec![7; 1 << 10]);
            }
            tx
        });
        client.send(&commit(number + 1, jobs.collect()));
        while client
            .hear()
            .expect("the connection stands")
            .confirm
            .is_none_or(|confirm| confirm.through < number + 50)
        {}
    }
}

#[test]
fn a_consumer_that_reads_nothing_of_what_it_asked_for_disturbs_nobody_and_takes_no_memory() {
    let place = tempfile::tempdir().unwrap();
    let (mut server, address) = serve(place.path(), &[], None);
    let mut idle = RawClient::tcp(&address);
    idle.send(&hello_of(1, b""));
    assert!(idle.hear().expect("a frame").welcome.is_some());
    idle.send(&ToBroker {
        consumers: vec![proto::Consumer {
            queues: vec!["unread".to_owned()],
            add_credit: u32::MAX,
            ..proto::Consumer::default()
        }],
        ..ToBroker::default()
    });
    let before = usage(server.pid());
    let count = if is_long_run() { 10_000 } else { 2_000 };
    let (alone, meanwhile) = compare_business(
        &address,
        b"",
        |round| publish_many(&address, "nobody's", round, count),
        |round| publish_many(&address, "unread", round, count),
    );
    let after = usage(server.pid());
    let jobs = 2 * count * rounds() as u64;
    println!(
        "{jobs} jobs of 1 KB, half of them for a consumer that reads nothing: p99 of others {alone:?} without \
         it, {meanwhile:?} with it; resident {} before, {} after",
        before.0, after.0
    );
    assert_not_disturbed(alone, meanwhile);
    // The jobs themselves, as in any backlog, and little more for a client that does not read.
    let backlog = jobs * 200 + (jobs << 10).min(64 << 20);
    assert!(after.0 < before.0 + backlog + (24 << 20), "{after:?}");
    assert!(server.is_running());
    // All deliveries with room in the buffers have arrived.
    while idle.hear().expect("a frame").deliveries.is_empty() {}
}
