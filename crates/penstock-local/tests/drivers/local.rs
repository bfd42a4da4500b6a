//! Tests `local:PATH`: nothing to start by hand, one broker for any number of clients, and the next one at
//! once.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::*;
use penstock_driver::{DriverConfig, DriverError, ErrorKind};
use penstock_message::Durability;
use rustix::process::Signal;

#[test]
fn many_that_begin_at_once_share_one_broker() {
    let place = BrokerPlace::local();
    let pids: BTreeSet<u64> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|number| {
                let place = &place;
                scope.spawn(move || {
                    let client = place.client();
                    assert_eq!(client.commit(vec![publish(message(number))]), applied());
                    client.broker_pid()
                })
            })
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect()
    });
    assert_eq!(pids.len(), 1);
    assert_eq!(place.client().worker("work", 10).take(8).len(), 8);
}

#[test]
fn a_killed_broker_is_followed_by_the_next_within_a_second_and_leaves_no_zombie() {
    let place = BrokerPlace::local();
    let client = place.client();
    client.commit(vec![publish(message(1))]);
    let first = client.broker_pid();
    let mut took = Vec::new();
    // Other tests run at the same time, so not every attempt need be fast.
    while took.len() < 10 && took.iter().all(|took| *took >= Duration::from_secs(1)) {
        let before = client.broker_pid();
        let start = Instant::now();
        kill(before, Signal::KILL);
        // The broker may answer once more while it dies.
        while client.broker_pid() == before {}
        took.push(start.elapsed());
    }
    assert!(
        took.iter().any(|took| *took < Duration::from_secs(1)),
        "{took:?}"
    );
    // This process waits for its exit, so it does not stay a zombie for long.
    let reaped = (0..1_000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        process_state(first).is_none()
    });
    assert!(
        reaped,
        "the first broker is left as {:?}",
        process_state(first)
    );
}

/// Returns the process as ps shows it; `None` if there is none.
fn process_state(pid: u64) -> Option<String> {
    let ps = Command::new("ps")
        .args(["-o", "stat=", "-p", &pid.to_string()])
        .output()
        .unwrap();
    let state = String::from_utf8(ps.stdout).unwrap().trim().to_owned();
    (!state.is_empty()).then_some(state)
}

#[test]
fn the_broker_has_let_go_of_whoever_started_it() {
    let place = BrokerPlace::local();
    let client = place.client();
    let pid = client.broker_pid() as i32;
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let session = rustix::process::getsid(Some(pid)).unwrap();
    assert_eq!(session, pid, "it leads a session of its own");
    if cfg!(target_os = "linux") {
        let of_broker = format!("/proc/{}", pid.as_raw_nonzero());
        assert_eq!(
            fs::read_link(format!("{of_broker}/cwd")).unwrap().to_str(),
            Some("/")
        );
        for stream in 0..3 {
            let file = fs::read_link(format!("{of_broker}/fd/{stream}")).unwrap();
            assert_eq!(file.to_str(), Some("/dev/null"));
        }
    }
}

#[test]
fn a_socket_that_its_broker_has_left_behind_is_no_hindrance() {
    let place = BrokerPlace::local();
    let data = place.directory.path().join("data");
    fs::create_dir(&data).unwrap();
    drop(std::os::unix::net::UnixListener::bind(data.join("broker.sock")).unwrap());
    assert_eq!(place.client().commit(vec![publish(message(1))]), applied());
}

#[test]
fn a_path_too_long_for_a_socket_works_all_the_same() {
    let place = BrokerPlace::local();
    let long = place.directory.path().join("x".repeat(120));
    let client = client_of(DriverConfig {
        program: Some(program().to_owned()),
        ..DriverConfig::new(format!("local:{}", long.display()))
    });
    assert_eq!(client.commit(vec![publish(message(1))]), applied());
    kill(client.broker_pid(), Signal::TERM);
}

/// Each start that must fail reports why, at once, in one message.
#[test]
fn a_start_that_cannot_succeed_says_what_to_do() {
    let check = |prepare: &dyn Fn(&BrokerPlace) -> DriverConfig, expected: &str| {
        let place = BrokerPlace::local();
        let client = client_of(prepare(&place));
        let start = Instant::now();
        match client.try_commit(vec![publish(message(1))], Durability::Disk, PATIENCE) {
            Err(DriverError {
                kind: ErrorKind::Invalid,
                reason,
                ..
            }) => {
                assert!(reason.contains("can't start a broker"), "{reason}");
                assert!(reason.contains(expected), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert!(start.elapsed() < PATIENCE / 2);
    };
    check(
        &|place| DriverConfig::new(&place.url),
        "the penstock executable is missing",
    );
    check(
        &|place| DriverConfig {
            program: Some("/nowhere/penstock".into()),
            ..place.config()
        },
        "/nowhere/penstock: No such file",
    );
    check(
        &|place| {
            fs::write(place.directory.path().join("data"), "a file").unwrap();
            place.config()
        },
        "data",
    );
    check(
        &|place| {
            let journal = place.directory.path().join("data/journal");
            fs::create_dir_all(journal.parent().unwrap()).unwrap();
            fs::write(journal, "a file where a directory should be").unwrap();
            place.config()
        },
        "not a directory",
    );
}

/// Writes a penstock whose broker exits at its start with this code while `hindered` says so.
struct Hindered {
    place: BrokerPlace,
    program: std::path::PathBuf,
}

impl Hindered {
    fn new(code: u8) -> Self {
        let place = BrokerPlace::local();
        let directory = place.directory.path();
        let script = directory.join("hindered-penstock");
        let lines = format!(
            "#!/bin/sh\ncd {}\nif [ -e hindered ]; then\n  echo >> tried\n  echo 'penstock: there is something in its way' >&2\n  \
             exit {code}\nfi\nexec {} \"$@\"\n",
            directory.display(),
            program().display(),
        );
        fs::write(&script, lines).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
        Self {
            place,
            program: script,
        }
    }

    fn client(&self) -> TestClient {
        client_of(DriverConfig {
            program: Some(self.program.clone()),
            ..self.place.config()
        })
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.place.directory.path().join(name)
    }

    fn tries(&self) -> usize {
        fs::read(self.file("tried")).map_or(0, |tried| tried.len())
    }
}

#[test]
fn a_start_that_fails_for_a_while_is_tried_again_until_the_deadline() {
    for code in [1, 74, 101, 134] {
        let hindered = Hindered::new(code);
        fs::write(hindered.file("hindered"), "").unwrap();
        let client = hindered.client();
        let short = Duration::from_millis(300);
        let outcome = client.try_commit(vec![publish(message(1))], Durability::Disk, short);
        let error = outcome.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unavailable, "{code}: {error}");
        assert!(error.reason.contains("something in its way"), "{error}");
        assert!(!error.maybe_accepted);

        let before = hindered.tries();
        let outcome = std::thread::scope(|scope| {
            let call = scope.spawn(|| client.commit(vec![publish(message(2))]));
            let until = Instant::now() + PATIENCE;
            while hindered.tries() == before && Instant::now() < until {
                std::thread::yield_now();
            }
            fs::remove_file(hindered.file("hindered")).unwrap();
            call.join().unwrap()
        });
        assert_eq!(outcome, applied(), "{code}");
    }
}

/// Such a call used to end with a vague configuration error, and the job ran.
#[test]
fn a_start_that_stays_hopeless_ends_calls_at_once_and_says_which_were_sent() {
    for code in [2, 65, 78] {
        let hindered = Hindered::new(code);
        let client = hindered.client();
        client.commit(vec![publish(message(1))]);
        let pid = client.broker_pid();
        suspend(pid);
        fs::write(hindered.file("hindered"), "").unwrap();
        let (ended, ends) = std::sync::mpsc::channel();
        client.driver.commit(
            vec![vec![publish(message(2))].into()],
            Durability::Disk,
            Some(Instant::now() + PATIENCE),
            Box::new(move |outcome| ended.send(outcome).unwrap()),
        );
        kill(pid, Signal::KILL);
        let error = ends.recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{code}: {error}");
        assert!(error.maybe_accepted, "it was in the socket");
        let outcome = client.try_commit(vec![publish(message(3))], Durability::Disk, PATIENCE);
        assert!(!outcome.unwrap_err().maybe_accepted);
        fs::remove_file(hindered.file("hindered")).unwrap();
    }
}

#[test]
fn a_directory_that_this_user_cannot_write_is_named() {
    where_permissions_bind(|| {
        let place = BrokerPlace::local();
        let data = place.directory.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::set_permissions(&data, fs::Permissions::from_mode(0o500)).unwrap();
        let written = fs::write(data.join("any"), "");
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        match place
            .client()
            .try_commit(vec![publish(message(1))], Durability::Disk, PATIENCE)
        {
            Err(DriverError {
                kind: ErrorKind::Invalid,
                reason,
                ..
            }) => {
                assert!(reason.contains("Permission denied"), "{reason}");
                assert!(reason.contains(data.to_str().unwrap()), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    });
}

/// Runs this in a thread that may not write where file permissions forbid it, and neither may its own threads
/// and processes. Root normally may, through a capability that this thread gives up for good.
fn where_permissions_bind(check: impl FnOnce() + Send) {
    let bound = || {
        #[cfg(target_os = "linux")]
        if rustix::process::geteuid().is_root() {
            use rustix::thread::{
                CapabilitySet, capabilities, remove_capability_from_bounding_set, set_capabilities,
            };
            remove_capability_from_bounding_set(CapabilitySet::DAC_OVERRIDE).unwrap();
            let mut sets = capabilities(None).unwrap();
            for set in [
                &mut sets.effective,
                &mut sets.permitted,
                &mut sets.inheritable,
            ] {
                set.remove(CapabilitySet::DAC_OVERRIDE);
            }
            set_capabilities(None, sets).unwrap();
        }
        check();
    };
    std::thread::scope(|scope| scope.spawn(bound).join()).unwrap();
}

/// Another user creates `.penstock` first, in a directory that anyone may write to, such as /tmp, and listens
/// there.
#[test]
fn a_directory_that_another_user_has_made_gets_no_job_and_no_broker() {
    let place = BrokerPlace::local();
    let shared = place.directory.path();
    fs::set_permissions(shared, fs::Permissions::from_mode(0o1777)).unwrap();
    let data = shared.join("data");
    fs::create_dir(&data).unwrap();
    let precious = shared.join("precious");
    fs::write(&precious, "precious").unwrap();
    std::os::unix::fs::symlink(&precious, data.join("broker.log")).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(data.join("broker.sock")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let remedy = match rustix::process::geteuid().is_root() {
        true => {
            std::os::unix::fs::chown(&data, Some(65_534), Some(65_534)).unwrap();
            "belongs to user 65534"
        }
        // Only root can give a directory away; otherwise use one that others may write to.
        false => {
            fs::set_permissions(&data, fs::Permissions::from_mode(0o777)).unwrap();
            "chmod go-w"
        }
    };
    let refused = |listens: bool| {
        let outcome =
            place
                .client()
                .try_commit(vec![publish(message(1))], Durability::Disk, PATIENCE);
        match outcome {
            Err(DriverError {
                kind: ErrorKind::Invalid,
                reason,
                ..
            }) => {
                assert!(reason.contains(remedy), "{reason}");
                assert!(reason.contains("Nothing was sent"), "{reason}");
                assert!(reason.contains(data.to_str().unwrap()), "{reason}");
            }
            other => panic!("{other:?} (somebody listens there: {listens})"),
        }
    };
    refused(true);
    let nobody = listener.accept().unwrap_err();
    assert_eq!(nobody.kind(), io::ErrorKind::WouldBlock);
    drop(listener);
    refused(false);
    assert_eq!(fs::read_to_string(precious).unwrap(), "precious");
    let kept: BTreeSet<_> = fs::read_dir(&data)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(kept, ["broker.log", "broker.sock"].map(Into::into).into());
}
