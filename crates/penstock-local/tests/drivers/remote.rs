//! Tests failures between a client and a broker in another process, and how the client reports them.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::*;
use crate::versions::{carry, socket_of};
use penstock_driver::{DriverConfig, DriverError, ErrorKind, ReadSide};
use penstock_message::Durability;
use penstock_wire::{Decoder, MAX_FRAME_BYTES, proto};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;

const SHORT: Duration = Duration::from_millis(300);
/// Deadline by which an event has surely happened, on a busy machine too.
const AMPLE: Duration = Duration::from_secs(3);

fn unavailable(outcome: Result<penstock_message::Receipt, DriverError>) -> (String, bool) {
    match outcome {
        Err(error) if error.is_transient() => (error.reason, error.maybe_accepted),
        other => panic!("{other:?}"),
    }
}

#[test]
fn with_nobody_there_a_call_ends_at_its_deadline_and_says_that_it_was_not_sent() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let client = client_of(DriverConfig::new(format!("unix:{}", socket.display())));
    let start = Instant::now();
    let outcome = client.try_commit(vec![publish(message(1))], Durability::Disk, SHORT);
    let (reason, maybe_accepted) = unavailable(outcome);
    assert!(!maybe_accepted);
    assert!(reason.contains("No such file or directory"), "{reason}");
    assert!((SHORT..PATIENCE).contains(&start.elapsed()));

    // A call that was given up is not sent when a broker appears after all.
    let mut server = start_server(&format!("unix:{}", socket.display()), directory.path());
    assert_eq!(client.commit(vec![publish(message(2))]), applied());
    assert_eq!(client.worker("work", 10).take_one().message.id, id(2));
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn a_stopped_broker_ends_calls_at_their_deadlines_and_goes_on_where_it_was() {
    let place = BrokerPlace::unix();
    let client = place.client();
    client.commit(vec![publish(message(1))]);
    let pid = client.broker_pid();
    suspend(pid);
    let start = Instant::now();
    let outcome = client.try_commit(vec![publish(message(2))], Durability::Disk, AMPLE);
    assert!((AMPLE..PATIENCE).contains(&start.elapsed()));
    let (reason, maybe_accepted) = unavailable(outcome);
    assert!(maybe_accepted, "it is in the socket");
    assert!(reason.contains("did not answer"), "{reason}");

    // A new client can't even say hello.
    let stranger = place.client();
    let outcome = stranger.try_commit(vec![publish(message(3))], Durability::Disk, SHORT);
    assert!(!unavailable(outcome).1);

    kill(pid, Signal::CONT);
    assert_eq!(client.commit(vec![publish(message(4))]), applied());
    let worker = client.worker("work", 10);
    let taken: Vec<_> = worker
        .take(3)
        .iter()
        .map(|delivery| delivery.message.id)
        .collect();
    assert_eq!(taken, [id(1), id(2), id(4)]);
}

fn is_readable(side: &ReadSide, within: Duration) -> bool {
    let within = rustix::event::Timespec::try_from(within).unwrap();
    let mut fds = [PollFd::new(side, PollFlags::IN)];
    poll(&mut fds, Some(&within)) == Ok(1)
}

#[test]
fn a_thread_that_waits_for_other_things_too_can_read_for_the_driver() {
    let place = BrokerPlace::unix();
    let client = place.client();
    client.commit(vec![publish(message(1))]);
    let side = client.driver.read_elsewhere().expect("nobody else reads");
    assert!(client.driver.read_elsewhere().is_none(), "it is taken");

    // The driver's thread leaves the socket alone, until it would judge by its silence.
    let start = Instant::now();
    let outcome = client.try_commit(vec![publish(message(2))], Durability::Disk, SHORT);
    assert_eq!(outcome, Ok(applied()));
    assert!((SHORT..PATIENCE).contains(&start.elapsed()));

    let start = Instant::now();
    thread::scope(|scope| {
        let commit = scope.spawn(|| client.commit(vec![publish(message(3))]));
        while !commit.is_finished() {
            if is_readable(&side, Duration::from_millis(10)) {
                let stands = client.driver.read_arrived(&side);
                assert!(stands, "the connection is lost");
            }
        }
        assert_eq!(commit.join().unwrap(), applied());
    });
    assert!(start.elapsed() < AMPLE, "{:?}", start.elapsed());
    client.driver.leave_reading(side);
    assert_eq!(client.commit(vec![publish(message(4))]), applied());

    let side = client.driver.read_elsewhere().expect("it was left");
    place.kill();
    assert!(is_readable(&side, PATIENCE));
    assert!(!client.driver.read_arrived(&side), "the connection is lost");
    assert_eq!(client.commit(vec![publish(message(5))]), applied());
    // An outdated one changes nothing.
    assert!(!client.driver.read_arrived(&side));
    client.driver.leave_reading(side);
    let taken = client.worker("work", 10).take(5);
    let ids: Vec<_> = taken.iter().map(|delivery| delivery.message.id).collect();
    assert_eq!(ids, [1, 2, 3, 4, 5].map(id));
}

#[test]
fn a_full_socket_ends_what_waits_behind_it_as_not_sent() {
    let place = BrokerPlace::unix();
    let client = place.client();
    let pid = client.broker_pid();
    suspend(pid);
    let body = bytes::Bytes::from(vec![0; 4 << 20]);
    let (ended, ends) = std::sync::mpsc::channel();
    for number in 0..3 {
        let ended = ended.clone();
        let large = penstock_message::Message {
            body: body.clone(),
            ..message(number)
        };
        let done = Box::new(
            move |outcome: Result<Vec<penstock_message::Receipt>, DriverError>| {
                ended
                    .send(unavailable(outcome.map(|mut receipts| receipts.remove(0))).1)
                    .unwrap();
            },
        );
        let deadline = Some(Instant::now() + AMPLE);
        client.driver.commit(
            vec![vec![publish(large)].into()],
            Durability::Disk,
            deadline,
            done,
        );
    }
    let maybe_accepted: Vec<bool> = (0..3)
        .map(|_| ends.recv_timeout(PATIENCE).unwrap())
        .collect();
    assert_eq!(maybe_accepted, [true, false, false]);
    kill(pid, Signal::CONT);
    assert_eq!(client.commit(vec![publish(message(9))]), applied());
    let last = client.worker("work", 10).take(2).remove(1);
    assert_eq!(last.message.id, id(9));
}

#[test]
fn a_wrong_token_is_a_typed_error_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut server = Command::new(program())
        .args([
            "server",
            "--listen",
            &format!("tcp://127.0.0.1:{port}"),
            "--data",
        ])
        .arg(directory.path())
        .env("PENSTOCK_TOKEN", "right")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let client = |token: &str| {
        client_of(DriverConfig {
            token: Some(token.to_owned()),
            ..DriverConfig::new(format!("tcp://127.0.0.1:{port}"))
        })
    };
    assert_eq!(client("right").commit(vec![publish(message(1))]), applied());
    match client("wrong").try_commit(vec![publish(message(2))], Durability::Disk, PATIENCE) {
        Err(error) => assert_eq!(error.kind, ErrorKind::Unauthorized),
        other => panic!("{other:?}"),
    }
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn what_is_no_broker_is_not_waited_for_longer_than_the_deadline() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = client_of(DriverConfig::new(format!(
        "tcp://{}",
        listener.local_addr().unwrap()
    )));
    let babbler = std::thread::spawn(move || {
        use std::io::Write;
        for stream in listener.incoming() {
            // A frame beyond the limit: the client must not wait for its end.
            let _ = stream
                .unwrap()
                .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let outcome = client.try_commit(vec![publish(message(1))], Durability::Disk, AMPLE);
    let (reason, maybe_accepted) = unavailable(outcome);
    assert!(reason.contains("sent an invalid frame"), "{reason}");
    assert!(!maybe_accepted);
    drop(babbler);
}

#[test]
fn a_closed_client_says_so_and_what_was_committed_before_is_there() {
    let place = BrokerPlace::unix();
    let client = place.client();
    let (ended, ends) = std::sync::mpsc::channel();
    let done = Box::new(move |outcome| ended.send(outcome).unwrap());
    client.driver.commit(
        vec![vec![publish(message(1))].into()],
        Durability::Disk,
        None,
        done,
    );
    client.driver.close(Instant::now() + PATIENCE);
    assert!(
        ends.try_recv()
            .expect("it ended before close returned")
            .is_ok()
    );
    let outcome = client.try_commit(vec![publish(message(2))], Durability::Disk, SHORT);
    assert_eq!(outcome, Err(DriverError::closed()));
    assert_eq!(
        place.client().worker("work", 1).take_one().message.id,
        id(1)
    );
}

#[test]
fn an_outcome_and_the_credit_that_follows_it_reach_the_broker_together() {
    let place = BrokerPlace::local();
    let jobs = 20;
    place
        .client()
        .commit((1..=jobs).map(|number| publish(message(number))).collect());
    let real = socket_of(&place);
    let front = real.with_file_name("front.sock");
    let listener = UnixListener::bind(&front).unwrap();
    let (saw, seen) = channel();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut broker = UnixStream::connect(&real).unwrap();
        carry(&broker, &client, |_: &mut proto::ToClient| {});
        // Does not sleep: otherwise both would arrive while it wakes up.
        client.set_nonblocking(true).unwrap();
        let mut decoder = Decoder::<proto::ToBroker>::new(MAX_FRAME_BYTES);
        let mut buffer = [0; 4096];
        loop {
            let length = match client.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Ok(length @ 1..) => length,
                _ => break,
            };
            decoder.extend(&buffer[..length]);
            let (mut settles, mut consumes) = (false, false);
            while let Some(frame) = decoder.next_message().unwrap() {
                settles |= !frame.commits.is_empty();
                consumes |= !frame.consumers.is_empty();
            }
            if settles {
                let _unheard = saw.send(consumes);
            }
            broker.write_all(&buffer[..length]).unwrap();
        }
    });

    let client = client_of(DriverConfig::new(format!("unix:{}", front.display())));
    let worker = client.worker("work", 1);
    for number in 1..jobs {
        let delivery = worker.take_one();
        assert_eq!(delivery.message.id, id(number));
        let ops = vec![ack(&delivery)];
        assert_eq!(worker.settle_and_want(&delivery, ops, 1), applied());
    }
    assert_eq!(worker.take_one().message.id, id(jobs));
    let together: Vec<bool> = seen.try_iter().collect();
    assert_eq!(together, vec![true; jobs as usize - 1]);
}
