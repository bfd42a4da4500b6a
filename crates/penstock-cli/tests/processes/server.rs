//! Tests `penstock server` as a process: which clients it accepts or disconnects, and what survives kill -9.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::strangers::{HeardBytes, commit, framed, hello_of, stranger};
use crate::support::*;
use bytes::Bytes;
use penstock_driver::{DeliverySink, DriverConfig, DriverError};
use penstock_local::connect;
use penstock_message::{Consume, Delivery, Durability, Lease, MessageId, Op, Receipt, Tx};
use penstock_wire::proto::{self, ToBroker, ToClient, close::Why};
use penstock_wire::{Decoder, MAX_FRAME_BYTES};
use rustix::process::Signal;

/// Server on a free loopback port, with its address.
pub fn serve(place: &Path, more: &[&str], token: Option<&str>) -> (RunningProgram, String) {
    let mut command = penstock();
    command.args(["server", "--listen", "tcp://127.0.0.1:0", "--data"]);
    command.arg(place.join("data")).args(more);
    if let Some(token) = token {
        command.env("PENSTOCK_TOKEN", token);
    }
    let server = RunningProgram::start(&mut command);
    let line = server.said("listening on tcp://");
    let (_, address) = line.split_once("tcp://").unwrap();
    let address = address.trim().to_owned();
    (server, address)
}

#[test]
fn beyond_loopback_it_wants_a_token() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    let data = data.to_str().unwrap();
    let refused = run(&["server", "--listen", "tcp://0.0.0.0:0", "--data", data]);
    assert_eq!(refused.status.code(), Some(78));
    assert!(
        text(&refused).contains("set PENSTOCK_TOKEN"),
        "{}",
        text(&refused)
    );
    assert!(!Path::new(data).exists(), "nothing was begun");
}

#[test]
fn a_token_may_stand_in_a_file() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("token");
    fs::write(&file, "from-a-file\n").unwrap();
    let (_server, address) = serve(
        place.path(),
        &["--token-file", file.to_str().unwrap()],
        None,
    );
    let mut stranger = RawClient::tcp(&address);
    stranger.send(&hello(1, "guess"));
    assert_eq!(stranger.farewell().why(), Why::Unauthorized);
    let mut friend = RawClient::tcp(&address);
    friend.send(&hello(2, "from-a-file"));
    assert!(friend.hear().unwrap().welcome.is_some());

    let url = format!("tcp://{address}");
    let status = |token: &str| {
        let mut command = penstock();
        command
            .args(["status", "--url", &url])
            .env("PENSTOCK_TOKEN", token);
        command.output().unwrap()
    };
    assert!(status("from-a-file").status.success());
    let refused = status("guess");
    assert_eq!(refused.status.code(), Some(78));
    assert!(
        text(&refused).contains("wrong PENSTOCK_TOKEN"),
        "{}",
        text(&refused)
    );
}

#[test]
fn who_breaks_the_protocol_reads_why_and_another_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let (_server, address) = serve(place.path(), &[], None);
    let mut good = RawClient::tcp(&address).join(1);
    for bad in [&[255; 100_000][..], &[8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]] {
        let mut broken = RawClient::tcp(&address).join(2);
        broken.send_bytes(bad);
        assert_eq!(broken.farewell().why(), Why::Protocol);
        good.send(&ping());
        assert!(good.hear().unwrap().pong);
    }
}

#[test]
fn sigterm_tells_clients_and_ends_with_0() {
    let place = tempfile::tempdir().unwrap();
    let (mut server, address) = serve(place.path(), &[], None);
    let mut client = RawClient::tcp(&address).join(1);
    server.signal(Signal::TERM);
    assert_eq!(client.farewell().why(), Why::Stopping);
    assert!(server.ended().success());
    let data = place.path().join("data");
    let good = run(&["journal", "check", data.to_str().unwrap()]);
    assert!(good.status.success(), "{}", text(&good));
}

/// A failed write to the log was reported on standard error, by a call that panics when that write fails too.
/// So a server whose log went to `head`, or to a full disk, aborted at its next line.
#[test]
fn a_log_that_can_not_be_written_ends_no_server_and_changes_no_exit_code() {
    for (log, stdio) in broken_logs() {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("broker.sock");
        let mut command = penstock();
        command
            .args(["server", "--verbose", "--data"])
            .arg(place.path().join("data"));
        command
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()));
        let mut server = RunningProgram::start_logging_to(&mut command, stdio);
        wait_until_it_listens(&socket);
        let mut client = RawClient::unix(&socket).join(1);
        client.send(&commit(1, vec![publish_body(1, 100)]));
        let confirmed = client.hear().expect("an answer").confirm;
        assert_eq!(confirmed.expect("a confirm").through, 1, "{log}");
        server.signal(Signal::TERM);
        assert_eq!(server.ended().code(), Some(0), "{log}");
    }
    for (log, stdio) in broken_logs() {
        let mut command = penstock();
        command.args(["journal", "check", "/nowhere"]);
        let mut fsck = RunningProgram::start_logging_to(&mut command, stdio);
        assert_eq!(fsck.ended().code(), Some(1), "{log}");
    }
}

#[test]
fn fsck_finds_what_is_rotten_and_no_server_starts_from_it() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    let data = data.to_str().unwrap();
    let (mut server, address) = serve(place.path(), &[], None);
    let busy = run(&["journal", "check", data]);
    assert_eq!(busy.status.code(), Some(6), "{}", text(&busy));
    let url = format!("tcp://{address}");
    let (told, confirmed) = channel();
    let driver = connect(DriverConfig::new(url)).unwrap();
    for number in 0..50 {
        let told = told.clone();
        let done = Box::new(move |outcome: Result<Vec<Receipt>, DriverError>| {
            told.send(outcome.is_ok()).unwrap();
        });
        driver.commit(vec![publish(number)], Durability::Disk, None, done);
        assert_eq!(confirmed.recv_timeout(PATIENCE), Ok(true));
    }
    driver.close(Instant::now() + PATIENCE);
    server.signal(Signal::TERM);
    server.ended();

    let files = fs::read_dir(Path::new(data).join("journal")).unwrap();
    let files = files.map(|entry| entry.unwrap().path());
    let is_segment = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "segment");
    let newest = files.filter(is_segment).max().unwrap();
    let mut bytes = fs::read(&newest).unwrap();
    bytes[4096 + 100] ^= 1;
    fs::write(&newest, bytes).unwrap();
    let rotten = run(&["journal", "check", data]);
    assert_eq!(rotten.status.code(), Some(65), "{}", text(&rotten));
    let name = newest.file_name().unwrap().to_str().unwrap();
    assert!(text(&rotten).contains(name), "{}", text(&rotten));
    let refused = run(&["server", "--listen", "tcp://127.0.0.1:0", "--data", data]);
    assert_eq!(refused.status.code(), Some(65), "{}", text(&refused));
    assert!(
        text(&refused).contains(name) && text(&refused).contains("journal check"),
        "{}",
        text(&refused)
    );

    let nothing = run(&["journal", "check", place.path().to_str().unwrap()]);
    assert_eq!(nothing.status.code(), Some(1), "{}", text(&nothing));
}

#[test]
fn a_limit_on_files_is_a_full_disk_and_what_was_confirmed_is_kept() {
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("broker.sock");
    let start = |shell: &str| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &format!("{shell} exec \"$@\""), "sh"]);
        command.arg(env!("CARGO_BIN_EXE_penstock"));
        command
            .args(["server", "--data"])
            .arg(place.path().join("data"));
        command
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()));
        let server = RunningProgram::start(&mut command);
        server.said("listening on");
        server
    };
    // No file may grow beyond 4 MiB. Beyond that a write fails, and a signal comes that would end the process.
    let mut server = start("ulimit -f 8192;");
    let mut client = RawClient::unix(&socket).join(1);
    let mut confirmed = 0;
    let refused = loop {
        client.send(&commit(
            confirmed + 1,
            vec![publish_body(confirmed, 100_000)],
        ));
        // The client also learns of it in a notice.
        let confirm = std::iter::repeat_with(|| client.hear().expect("an answer"))
            .find_map(|heard| heard.confirm);
        let mut confirm = confirm.expect("an answer to each publish");
        match confirm.receipts.pop() {
            None => confirmed = confirm.through,
            Some(receipt) => break receipt,
        }
    };
    assert_eq!(
        refused.why(),
        proto::receipt::Why::DiskFull,
        "{}",
        refused.text
    );
    assert!(confirmed > 10, "only {confirmed} fitted");
    server.said("full");
    server.signal(Signal::TERM);
    assert_eq!(server.ended().code(), Some(0));

    let _server = start("");
    let mut client = RawClient::unix(&socket).join(2);
    client.send(&consume("jobs", 1000));
    let mut kept = BTreeSet::new();
    while kept.len() < confirmed as usize {
        for delivery in client.hear().expect("an answer").deliveries {
            let id = delivery.message.expect("a message").head.id;
            kept.insert(u64::from_be_bytes(*id.last_chunk().unwrap()));
        }
    }
    assert!((0..confirmed).all(|number| kept.contains(&number)));
}

/// Reported outcome of each publish, recorded outside of the process that is killed.
#[derive(Default)]
struct KillBooks {
    confirmed: Mutex<BTreeSet<u64>>,
}

#[test]
fn a_kill_with_commits_in_flight_loses_nothing_that_was_confirmed() {
    const KILLS: u64 = 3;
    const EACH: u64 = 4_000;
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("broker.sock");
    let start = || {
        let mut command = penstock();
        command
            .args(["server", "--data"])
            .arg(place.path().join("data"));
        command
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()));
        let server = RunningProgram::start(&mut command);
        server.said("listening on");
        server
    };
    let books = Arc::new(KillBooks::default());
    let driver = connect(DriverConfig::new(format!("unix:{}", socket.display()))).unwrap();
    let (told, ended) = channel();
    let mut server = start();
    let (mut rounds, mut kills) = (0, 0);
    while kills < KILLS {
        for number in rounds * EACH..(rounds + 1) * EACH {
            let (books, told) = (Arc::clone(&books), told.clone());
            let done = Box::new(move |outcome: Result<Vec<Receipt>, DriverError>| {
                let receipts = outcome.expect("there is no deadline");
                assert_eq!(receipts.len(), 1);
                let applied = matches!(&receipts[0], Receipt::Applied { .. } | Receipt::Duplicate);
                assert!(applied, "{receipts:?}");
                books.confirmed.lock().unwrap().insert(number);
                told.send(number).unwrap();
            });
            driver.commit(vec![publish(number)], Durability::Disk, None, done);
        }
        for _ in 0..EACH / 4 {
            ended.recv_timeout(PATIENCE).expect("commits are confirmed");
        }
        server.signal(Signal::KILL);
        server.ended();
        rounds += 1;
        // A kill only counts when commits were in flight.
        let confirmed = books.confirmed.lock().unwrap().len() as u64;
        kills += u64::from(confirmed < rounds * EACH);
        assert!(
            rounds < 20 * KILLS,
            "the server confirms faster than it can be killed"
        );
        // The driver finds the next server automatically, and resends everything unconfirmed.
        server = start();
        while books.confirmed.lock().unwrap().len() < (rounds * EACH) as usize {
            ended.recv_timeout(PATIENCE).expect("the rest is confirmed");
        }
    }
    driver.close(Instant::now() + PATIENCE);
    server.signal(Signal::KILL);
    server.ended();

    let _server = start();
    let (deliver, delivered) = channel();
    let sink = Arc::new(Sink(Mutex::new(deliver)));
    let worker = connect(DriverConfig::new(format!("unix:{}", socket.display()))).unwrap();
    let consume = Consume {
        queues: vec!["jobs".to_owned()],
        add_credit: (2 * rounds * EACH) as u32,
        ..Consume::default()
    };
    worker.consume(consume, sink);
    let mut seen = BTreeSet::new();
    while seen.len() < (rounds * EACH) as usize {
        for number in next(&delivered) {
            assert!(seen.insert(number), "{number} came twice");
        }
    }
    assert_eq!(seen, *books.confirmed.lock().unwrap());
    worker.close(Instant::now() + PATIENCE);
}

struct Sink(Mutex<Sender<Vec<u64>>>);

impl DeliverySink for Sink {
    fn deliver(&self, deliveries: Vec<Delivery>) {
        let number =
            |delivery: Delivery| u64::from_be_bytes(*delivery.message.id.0.last_chunk().unwrap());
        let numbers = deliveries.into_iter().map(number).collect();
        // The test may have seen enough.
        let _unheard = self.0.lock().unwrap().send(numbers);
    }

    fn held_leases(&self) -> Vec<Lease> {
        Vec::new()
    }

    fn leases_kept(&self, _kept: &[Lease]) {}
}

fn next(delivered: &Receiver<Vec<u64>>) -> Vec<u64> {
    delivered.recv_timeout(PATIENCE).expect("all is delivered")
}

fn consume(queue: &str, add_credit: u32) -> ToBroker {
    ToBroker {
        consumers: vec![proto::Consumer {
            queues: vec![queue.to_owned()],
            add_credit,
            ..proto::Consumer::default()
        }],
        ..ToBroker::default()
    }
}

fn publish(number: u64) -> Tx {
    publish_body(number, 100)
}

fn publish_body(number: u64, bytes: usize) -> Tx {
    let mut id = [0x70; 16];
    id[8..].copy_from_slice(&number.to_be_bytes());
    Tx::from(vec![Op::Publish {
        queues: vec!["jobs".to_owned()],
        message: message(MessageId(id), Bytes::from(vec![7; bytes])),
        due: None,
        unless_key: None,
    }])
}

#[test]
fn a_panic_in_any_thread_ends_the_broker_before_it_writes() {
    use std::os::unix::process::ExitStatusExt;
    for thread in ["loop", "writer"] {
        let place = tempfile::tempdir().unwrap();
        let start = |panics: &str| {
            let mut command = penstock();
            command.args(["server", "--listen", "tcp://127.0.0.1:0", "--data"]);
            command.arg(place.path().join("data"));
            command.env("PENSTOCK_TEST_PANIC", panics);
            let server = RunningProgram::start(&mut command);
            let line = server.said("listening on tcp://");
            let (_, address) = line.split_once("tcp://").unwrap();
            (server, address.trim().to_owned())
        };
        let (mut server, address) = start(thread);
        let pieces = [
            framed(&hello_of(1, b"")),
            framed(&commit(1, vec![publish(1)])),
        ];
        let said = stranger(&address, &pieces, false, PATIENCE);
        assert!(!said.goes_on, "{thread}: it is left half alive");
        let confirmed = |said: &HeardBytes| {
            let mut decoder = Decoder::<ToClient>::new(MAX_FRAME_BYTES);
            decoder.extend(&said.everything);
            let mut confirmed = false;
            while let Ok(Some(frame)) = decoder.next_message() {
                confirmed |= frame.confirm.is_some();
            }
            confirmed
        };
        assert!(
            !confirmed(&said),
            "{thread}: it promised what it could not keep"
        );
        server.said("the broker hit a bug and aborts at once");
        let status = server.ended();
        assert_eq!(status.signal(), Some(6), "{thread}: {status:?}");

        // Nothing wrong was written, and the client's second attempt is applied once.
        let (_server, address) = start("nowhere");
        let mut client = RawClient::tcp(&address).join(1);
        client.send(&ToBroker {
            queries: vec![proto::Query {
                id: 1,
                query: Some(proto::query::Query::Status(proto::StatusQuery::default())),
            }],
            ..ToBroker::default()
        });
        let answer = client.hear().unwrap();
        let Some(proto::answer::Answer::Status(page)) = &answer.answers[0].answer else {
            panic!("{answer:?}");
        };
        let status = page.status.as_ref().expect("a page of it");
        assert!(status.queues.iter().all(|queue| queue.ready == 0));
    }
}
