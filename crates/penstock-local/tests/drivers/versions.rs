//! Tests a broker with an older protocol version. It is a current broker, behind a proxy that writes version 1
//! into its welcome. So its answer to a stop, and the data that it keeps, are real.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::support::*;
use bytes::BytesMut;
use penstock_driver::{DriverConfig, DriverError, ErrorKind};
use penstock_message::{Answer, Durability, KeyState, Query, StatusQuery};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, encode_frame, proto};

/// Stands in front of a broker's socket and forwards its frames.
struct Aged {
    is_old: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
    listens_at: PathBuf,
}

impl Aged {
    /// Replaces the socket.
    fn in_place_of(socket: &Path) -> Self {
        let real = socket.with_file_name("real.sock");
        fs::rename(socket, &real).unwrap();
        let aged = Self {
            is_old: Arc::default(),
            connections: Arc::default(),
            listens_at: socket.to_owned(),
        };
        let listener = UnixListener::bind(socket).unwrap();
        let (is_old, connections) = (Arc::clone(&aged.is_old), Arc::clone(&aged.connections));
        thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                // None: the broker has exited.
                let Ok(broker) = UnixStream::connect(&real) else {
                    break;
                };
                let mut kept = connections.lock().unwrap();
                kept.push(client.try_clone().unwrap());
                kept.push(broker.try_clone().unwrap());
                drop(kept);
                carry(&client, &broker, |_: &mut proto::ToBroker| {});
                let is_old = Arc::clone(&is_old);
                carry(&broker, &client, move |frame: &mut proto::ToClient| {
                    if let Some(welcome) = &mut frame.welcome
                        && is_old.load(Ordering::Relaxed)
                    {
                        welcome.protocol_version = 1;
                    }
                });
            }
        });
        aged
    }

    /// From now on the broker has version 1, and all clients must say hello again.
    fn grow_old(&self) {
        self.is_old.store(true, Ordering::Relaxed);
        for socket in self.connections.lock().unwrap().drain(..) {
            let _gone = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Aged {
    fn drop(&mut self) {
        // Ends the thread that waits for further clients.
        let _gone = UnixStream::connect(&self.listens_at);
    }
}

pub fn carry<F: penstock_wire::Heard + 'static>(
    from: &UnixStream,
    to: &UnixStream,
    change: impl Fn(&mut F) + Send + 'static,
) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    thread::spawn(move || {
        let mut decoder = Decoder::<F>::new(MAX_FRAME_BYTES);
        let mut buffer = [0; 4096];
        let mut out = BytesMut::new();
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            decoder.extend(&buffer[..length]);
            while let Some(mut frame) = decoder.next_message().unwrap() {
                change(&mut frame);
                encode_frame(&frame, &mut out);
            }
            if to.write_all(&out.split()).is_err() {
                break;
            }
        }
        let _gone = to.shutdown(Shutdown::Write);
    });
}

pub fn socket_of(place: &BrokerPlace) -> PathBuf {
    place.directory.path().join("data/broker.sock")
}

#[test]
fn a_local_broker_that_is_older_gives_way_and_the_worker_keeps_its_lease() {
    let place = BrokerPlace::local();
    let first = place.client();
    assert_eq!(first.commit(vec![publish(message(1))]), applied());
    let old_pid = first.broker_pid();
    let aged = Aged::in_place_of(&socket_of(&place));
    let worker = place.client().worker("work", 1);
    let delivery = worker.take_one();
    worker.leases_kept.recv_timeout(PATIENCE).unwrap();

    aged.grow_old();
    assert_eq!(
        worker.leases_kept.recv_timeout(PATIENCE).unwrap(),
        [delivery.lease]
    );
    assert_ne!(worker.client.broker_pid(), old_pid);
    let ops = vec![ack(&delivery), put(1, "done")];
    assert_eq!(worker.settle(&delivery, ops), applied());
    assert_eq!(
        plain(first.end_of(result(1))),
        KeyState::Present(value("done")),
        "and earlier clients find the new one"
    );
    assert_eq!(first.broker_pid(), worker.client.broker_pid());
}

/// Only a local broker belongs to its clients.
#[test]
fn a_server_that_is_older_is_left_alone_and_the_client_told_what_to_install() {
    let place = BrokerPlace::local();
    let direct = place.client();
    let pid = direct.broker_pid();
    let aged = Aged::in_place_of(&socket_of(&place));
    aged.grow_old();
    let url = format!("unix:{}", socket_of(&place).display());
    let client = client_of(DriverConfig::new(url));
    let Err(DriverError {
        kind: ErrorKind::Invalid,
        reason,
        ..
    }) = client.query(Query::Status(StatusQuery::default()))
    else {
        panic!("a broker of version 1 is spoken to");
    };
    assert!(
        reason.contains("speaks version 1 of the protocol and this client")
            && reason.contains("stop that broker"),
        "{reason}"
    );
    assert_eq!(direct.broker_pid(), pid);
    // Like `penstock broker stop`, which stops a broker of any version.
    let answer = client.query(Query::Stop).unwrap();
    assert_eq!(answer, Answer::Stopping);
}

#[test]
fn replicated_is_offered_by_no_engine_of_today() {
    for place in [BrokerPlace::memory(), BrokerPlace::local()] {
        let client = place.client();
        let outcome =
            client.try_commit(vec![publish(message(1))], Durability::Replicated, PATIENCE);
        let Err(DriverError {
            kind: ErrorKind::NotOffered(_),
            reason,
            ..
        }) = outcome
        else {
            panic!("{outcome:?}");
        };
        assert!(
            reason.starts_with("durability=\"replicated\" is not offered by"),
            "{reason}"
        );
        assert_eq!(client.status().queues.len(), 0, "nothing was sent");
    }
}
