//! Tests a broker whose engine lacks a feature: a real broker, behind a proxy that removes the feature from its
//! welcome.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use penstock_driver::{DriverConfig, DriverError, ErrorKind};
use penstock_message::{Capabilities, Durability, Feature};
use penstock_wire::proto;

use crate::support::*;
use crate::versions::{carry, socket_of};

/// Listens next to a broker's socket, and forwards the frames of one client after the other.
struct Lesser {
    socket: PathBuf,
}

impl Lesser {
    fn beside(socket: &Path, lacks: Feature) -> Self {
        let real = socket.to_owned();
        let socket = socket.with_file_name("lesser.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                // None: the broker has exited.
                let Ok(broker) = UnixStream::connect(&real) else {
                    break;
                };
                carry(&client, &broker, |_: &mut proto::ToBroker| {});
                carry(&broker, &client, move |frame: &mut proto::ToClient| {
                    if let Some(welcome) = &mut frame.welcome {
                        let all = welcome.capabilities.take().unwrap();
                        let mut rest = Capabilities::from(all).without(lacks);
                        rest.engine = "Lesser 1".to_owned();
                        welcome.capabilities = Some((&rest).into());
                    }
                });
            }
        });
        Self { socket }
    }

    fn url(&self) -> String {
        format!("unix:{}", self.socket.display())
    }
}

#[test]
fn an_engine_is_asked_what_it_can_do_and_what_it_lacks_is_never_sent() {
    let place = BrokerPlace::local();
    let all = place.client();
    all.commit(vec![publish(message(1))]);
    let lesser = Lesser::beside(&socket_of(&place), Feature::DiskDurability);
    let client = client_of(DriverConfig::new(lesser.url()));
    let said = client.probe().unwrap();
    assert_eq!(
        (said.engine.as_str(), said.highest_durability),
        ("Lesser 1", Durability::Os)
    );

    let outcome = client.try_commit(vec![publish(message(2))], Durability::Disk, PATIENCE);
    let Err(DriverError {
        kind: ErrorKind::NotOffered(lacking),
        maybe_accepted: false,
        ..
    }) = outcome
    else {
        panic!("{outcome:?}");
    };
    assert_eq!(lacking.feature, "durability=\"disk\"");
    let outcome = client.try_commit(vec![publish(message(3))], Durability::Os, PATIENCE);
    assert_eq!(outcome.unwrap(), applied());
    let ids: Vec<_> = all
        .worker("work", 9)
        .take(2)
        .iter()
        .map(|one| one.message.id)
        .collect();
    assert_eq!(ids, [id(1), id(3)]);
}

#[test]
fn a_command_that_the_engine_can_not_carry_out_exits_with_75_and_the_remedy() {
    let place = BrokerPlace::local();
    place.client().commit(vec![publish(message(1))]);
    let lesser = Lesser::beside(&socket_of(&place), Feature::Pause);
    let run = |words: &[&str]| {
        let output = Command::new(program())
            .args(words)
            .args(["--url", &lesser.url()])
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    };
    let (code, said) = run(&["pause", "work"]);
    assert_eq!(code, Some(75), "{said}");
    assert!(
        said.contains("pausing a queue is not offered by Lesser 1")
            && said.contains("do without it"),
        "{said}"
    );
    let (code, said) = run(&["status"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("engine   Lesser 1; up to durability=\"disk\""),
        "{said}"
    );
}

/// An operator's order is as durable as the engine can make it: a weaker engine would otherwise refuse every
/// order.
#[test]
fn an_order_is_kept_as_durably_as_the_engine_can() {
    let place = BrokerPlace::local();
    place.client().commit(vec![publish(message(1))]);
    let lesser = Lesser::beside(&socket_of(&place), Feature::DiskDurability);
    let output = Command::new(program())
        .args(["purge", "work", "--yes", "--url", &lesser.url()])
        .output()
        .unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("dropped 1 waiting job"), "{said}");
}
