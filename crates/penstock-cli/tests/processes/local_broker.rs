//! Tests the background broker of a directory: which process becomes it, when it exits, and what it inherits.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use crate::strangers::commit;
use crate::support::*;
use bytes::Bytes;
use penstock_message::{MessageId, Op, Tx};
use penstock_wire::convert;
use penstock_wire::proto::{self, ToBroker};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::Signal;

#[test]
fn a_second_broker_of_a_directory_gives_way() {
    let mut first = LocalProgram::start("60");
    let second = penstock()
        .args(["server", "--local"])
        .arg(first.data())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(6), "{}", text(&second));
    assert!(
        text(&second).contains("another broker is already running for"),
        "{}",
        text(&second)
    );
    assert!(first.process.is_running());
    RawClient::unix(&first.socket()).join(1);
}

#[test]
fn it_leaves_after_its_last_client() {
    let mut broker = LocalProgram::start("2");
    let one = RawClient::unix(&broker.socket()).join(1);
    let mut two = RawClient::unix(&broker.socket()).join(2);
    drop(one);
    let early = wait_for_end(broker.process.pid(), Duration::from_millis(2_500));
    assert!(!early, "somebody is still there");
    two.send(&ping());
    assert!(two.hear().unwrap().pong);
    drop(two);
    assert!(broker.process.ended().success());
    assert!(!broker.socket().exists(), "nobody shall look for it there");
}

#[test]
fn it_leaves_when_nobody_ever_comes() {
    assert!(LocalProgram::start("0.1").process.ended().success());
}

#[test]
fn it_rests_while_it_waits_for_a_slow_client_at_the_end() {
    let mut broker = LocalProgram::start("60");
    let mut client = RawClient::unix(&broker.socket()).join(1);
    let job = Op::Publish {
        queues: vec!["jobs".to_owned()],
        message: message(MessageId([1; 16]), Bytes::from(vec![7; 4 << 20])),
        due: None,
        unless_key: None,
    };
    client.send(&commit(1, vec![Tx::from(vec![job])]));
    assert!(client.hear().unwrap().confirm.is_some());
    client.send(&ToBroker {
        consumers: vec![proto::Consumer {
            queues: vec!["jobs".to_owned()],
            add_credit: 1,
            ..proto::Consumer::default()
        }],
        ..ToBroker::default()
    });
    // The client reads the beginning of the job and nothing more, and the rest does not fit into the socket.
    client.take_bytes(64 << 10);
    let pid = broker.process.pid();
    let begun = Instant::now();
    broker.process.signal(Signal::TERM);
    // Its last sync is over by then. A second after its last look it would look after its directory again.
    assert!(!wait_for_end(pid, Duration::from_secs(1)));
    let busy_before = cpu_time(pid);
    assert!(wait_for_end(pid, PATIENCE), "it never ends");
    assert!(
        begun.elapsed() > Duration::from_millis(2_000),
        "it did not wait"
    );
    let busy = cpu_time(pid) - busy_before;
    assert!(busy <= Duration::from_millis(100), "{busy:?} for waiting");
    drop(client);
    assert!(broker.process.ended().success());
}

#[test]
fn it_leaves_when_its_directory_is_deleted() {
    let mut broker = LocalProgram::start("60");
    let mut client = RawClient::unix(&broker.socket()).join(1);
    fs::remove_dir_all(broker.data()).unwrap();
    assert_eq!(client.farewell().text, "the broker is stopping");
    broker.process.ended();
}

#[test]
fn a_broker_of_a_new_directory_is_left_alone_by_the_old_one() {
    let mut old = LocalProgram::start("60");
    fs::rename(old.data(), old.place.path().join("aside")).unwrap();
    let mut new = LocalProgram::start_in(old.place.path(), "60");
    old.process.ended();
    assert!(new.is_running());
    RawClient::unix(&old.socket()).join(1);
}

#[test]
fn stop_ends_it_and_waits_until_it_has_gone() {
    let mut broker = LocalProgram::start("60");
    let mut client = RawClient::unix(&broker.socket()).join(1);
    let data = broker.data();
    let data = data.to_str().unwrap();
    let stop = run(&["broker", "stop", data]);
    assert!(stop.status.success(), "{}", text(&stop));
    assert!(
        wait_for_end(broker.process.pid(), Duration::ZERO),
        "it is gone by now"
    );
    assert!(broker.process.ended().success());
    assert_eq!(client.farewell().text, "the broker is stopping");

    let again = run(&["broker", "stop", data]);
    assert!(again.status.success(), "nothing to stop is no error");
    assert!(
        text(&again).contains("no broker is running"),
        "{}",
        text(&again)
    );
    let by_url = run(&["broker", "stop", "--url", &format!("local:{data}")]);
    assert!(by_url.status.success());
}

#[test]
fn sigterm_ends_it_in_order() {
    let mut broker = LocalProgram::start("60");
    let mut client = RawClient::unix(&broker.socket()).join(1);
    broker.process.signal(Signal::TERM);
    assert_eq!(client.farewell().text, "the broker is stopping");
    assert!(broker.process.ended().success());
    let log = fs::read_to_string(broker.data().join("broker.log")).unwrap();
    assert!(log.contains("stopped cleanly"), "{log}");
}

#[test]
fn it_keeps_nothing_of_who_started_it() {
    let place = tempfile::tempdir().unwrap();
    let leaked = File::create(place.path().join("leaked")).unwrap();
    fcntl_setfd(&leaked, FdFlags::empty()).unwrap();
    let mut command = penstock();
    command
        .args(["server", "--local"])
        .arg(place.path().join("data"));
    command.current_dir(place.path()).process_group(0);
    let broker = RunningProgram::start(&mut command);
    broker.serves();

    let proc = format!("/proc/{}", broker.pid().as_raw_nonzero());
    assert_eq!(
        fs::read_link(format!("{proc}/cwd")).unwrap().to_str(),
        Some("/")
    );
    for entry in fs::read_dir(format!("{proc}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let target = fs::read_link(&path).unwrap();
        let number: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
        match number {
            0..=2 => assert_eq!(target.to_str(), Some("/dev/null"), "{number}"),
            _ => assert!(!target.ends_with("leaked"), "{number} was inherited"),
        }
        let info = fs::read_to_string(format!("{proc}/fdinfo/{number}")).unwrap();
        let flags = info
            .lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .unwrap()
            .trim();
        let close_on_exec = i64::from_str_radix(flags, 8).unwrap() & 0o2_000_000 != 0;
        assert!(
            number <= 2 || close_on_exec,
            "{number} would be inherited by a child"
        );
    }
    assert!(leaked.as_raw_fd() > 2);
}

#[test]
fn what_it_makes_is_for_its_user_alone() {
    let broker = LocalProgram::start("60");
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&broker.data()), 0o700);
    assert_eq!(mode(&broker.socket()), 0o600);
    assert_eq!(mode(&broker.data().join("broker.log")), 0o600);
    assert_eq!(mode(&broker.data().join("lock")), 0o600);
    assert_eq!(
        fs::read_to_string(broker.data().join(".gitignore")).unwrap(),
        "*\n"
    );
}

#[test]
fn a_path_too_long_for_a_socket_works_all_the_same() {
    let place = tempfile::tempdir().unwrap();
    let deep = place.path().join("deep/".repeat(30));
    fs::create_dir_all(&deep).unwrap();
    let mut broker = LocalProgram::start_in(&deep, "60");
    let data = deep.join("data");
    let data = data.to_str().unwrap();
    let status = run(&["status", "--url", &format!("local:{data}")]);
    assert!(status.status.success(), "{}", text(&status));
    assert!(run(&["broker", "stop", data]).status.success());
    broker.ended();
}

#[test]
fn commands_do_not_start_one() {
    let place = tempfile::tempdir().unwrap();
    let url = format!("local:{}", place.path().join("data").display());
    for command in [
        vec!["status"],
        vec!["status", "--json"],
        vec!["purge", "mail"],
    ] {
        let output = penstock()
            .args(&command)
            .env("PENSTOCK_URL", &url)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(69), "{}", text(&output));
        assert!(
            text(&output).contains("no broker is running"),
            "{}",
            text(&output)
        );
    }
    assert!(!place.path().join("data").exists());
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let broker = LocalProgram::start("60");
    let url = format!("local:{}", broker.data().display());
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = penstock();
    command.args(["status", "--url", &url]).stdout(writer);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(text(&output), "");
}

#[test]
fn a_directory_that_can_not_be_used_is_one_clear_line() {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("file"), "").unwrap();
    let data = place.path().join("file/data");
    let output = penstock()
        .args(["server", "--local"])
        .arg(&data)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.starts_with("penstock: ") && said.contains("file/data"),
        "{said}"
    );
}

#[test]
fn a_directory_that_others_can_write_is_refused_by_every_command_with_the_remedy() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::set_permissions(&data, fs::Permissions::from_mode(0o777)).unwrap();
    let precious = place.path().join("precious");
    fs::write(&precious, "precious").unwrap();
    for link in ["lock", "broker.log"] {
        std::os::unix::fs::symlink(&precious, data.join(link)).unwrap();
    }
    let path = data.to_str().unwrap();
    let url = format!("local:{path}");
    let refused = |arguments: &[&str], remedy: &str| {
        let output = run(arguments);
        // The exit code says that trying again is pointless until somebody fixes something.
        assert_eq!(output.status.code(), Some(78), "{}", text(&output));
        assert!(text(&output).contains(remedy), "{}", text(&output));
    };
    let chmod = format!("chmod go-w {path}");
    refused(&["server", "--local", path], &chmod);
    refused(&["status", "--url", &url], &chmod);
    refused(&["purge", "mail", "--url", &url], &chmod);
    refused(&["broker", "stop", path], &chmod);

    fs::set_permissions(&data, fs::Permissions::from_mode(0o755)).unwrap();
    refused(&["server", "--local", path], "data/lock is a symbolic link");
    fs::remove_file(data.join("lock")).unwrap();
    refused(
        &["server", "--local", path],
        "data/broker.log is a symbolic link",
    );
    assert_eq!(fs::read_to_string(precious).unwrap(), "precious");
    fs::remove_file(data.join("broker.log")).unwrap();
    LocalProgram::start_in(place.path(), "60");
}

/// Creates queues that stay: a paused queue is always remembered.
fn make_queues(broker: &LocalProgram, names: &[String]) {
    let mut client = RawClient::unix(&broker.socket()).join(1);
    for (index, names) in names.chunks(1_000).enumerate() {
        let pause = |name: &String| Op::Pause {
            queue: name.clone(),
        };
        let tx = Tx::from(names.iter().map(pause).collect::<Vec<_>>());
        let seq = index as u64 + 1;
        client.send(&ToBroker {
            commits: vec![proto::Commit {
                first_seq: seq,
                txs: vec![convert::encode_tx(tx)],
                ..proto::Commit::default()
            }],
            ..ToBroker::default()
        });
        let through = |frame: proto::ToClient| frame.confirm.map(|confirm| confirm.through);
        while client.hear().map(through) != Some(Some(seq)) {}
    }
}

#[test]
fn status_purge_limit_and_stop_work_beside_more_names_than_a_frame_holds() {
    let mut broker = LocalProgram::start("60");
    let names: Vec<String> = (0..90_000)
        .map(|number| format!("{number:z>249}"))
        .collect();
    make_queues(&broker, &names);
    let url = format!("local:{}", broker.data().display());
    let command = |arguments: &[&str]| run(&[arguments, &["--url", &url]].concat());

    let status = command(&["status", "--json"]);
    assert!(status.status.success(), "{}", text(&status));
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["queues"].as_array().unwrap().len(), names.len());
    let status = command(&["status"]);
    assert!(status.status.success());
    let status = text(&status);
    assert!(
        [&names[0], &names[89_999]]
            .iter()
            .all(|name| status.contains(*name))
    );

    let purged = command(&["purge", "--yes", &names[7]]);
    assert!(purged.status.success(), "{}", text(&purged));
    assert!(text(&purged).starts_with("dropped 0 waiting jobs of queue:zzz"));
    let unknown = command(&["purge", "--yes", "mail"]);
    assert_eq!(unknown.status.code(), Some(1));
    let said = text(&unknown);
    assert!(
        said.contains("no queue \"mail\"; its queues are zzz"),
        "{said}"
    );
    assert!(
        said.ends_with(" and more\n") && said.len() < 6_000,
        "{said}"
    );
    let limit = command(&["limit", "set", &names[8], "--max-length", "5"]);
    assert!(
        text(&limit).ends_with(": at most 5 jobs from now on\n"),
        "{}",
        text(&limit)
    );
    let limits = text(&command(&["limit", "ls"]));
    assert!(
        limits.contains(&names[8]) && limits.lines().count() == 2,
        "{limits}"
    );

    let stopped = command(&["broker", "stop"]);
    assert!(stopped.status.success(), "{}", text(&stopped));
    assert!(broker.process.ended().success());
}

#[test]
fn names_from_outside_do_not_reach_a_terminal_as_they_are() {
    let broker = LocalProgram::start("60");
    let name = "mail\u{1b}[2J\0\nforged  9".to_owned();
    let shown = "mail\\u{1b}[2J\\u{0}\\nforged  9";
    make_queues(&broker, std::slice::from_ref(&name));
    let mut worker = RawClient::unix(&broker.socket());
    let mut hello = hello(2, "");
    hello.hello.as_mut().unwrap().name = "worker\u{1b}]0;title\u{7}\nforged".to_owned();
    worker.send(&hello);
    worker.send(&ToBroker {
        consumers: vec![proto::Consumer {
            queues: vec![name.clone()],
            add_credit: 1,
            ..proto::Consumer::default()
        }],
        ping: true,
        ..ToBroker::default()
    });
    while !worker.hear().expect("it is welcome").pong {}

    let url = format!("local:{}", broker.data().display());
    let check = |arguments: &[&str], expected: &[&str]| {
        let said = text(&run(&[arguments, &["--url", &url]].concat()));
        let is_order = |letter: char| letter.is_control() && letter != '\n';
        assert!(!said.contains(is_order), "{said:?}");
        assert!(
            !said.lines().any(|line| line.starts_with("forged")),
            "{said:?}"
        );
        for part in expected {
            assert!(said.contains(part), "{part}: {said:?}");
        }
    };
    check(
        &["status"],
        &[shown, "worker\\u{1b}]0;title\\u{7}\\nforged"],
    );
    check(
        &["purge", "--yes", "a\u{1b}[1m\nforged"],
        &["a\\u{1b}[1m\\nforged", shown],
    );
    check(
        &["limit", "set", "a\u{1b}[1m\nforged", "--max-length", "1"],
        &["a\\u{1b}[1m\\nforged: at most 1 job from now on"],
    );
    // Programs read the exact name, in JSON's own escapes.
    let json = run(&["status", "--json", "--url", &url]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let queues = json["queues"].as_array().unwrap();
    assert!(queues.iter().any(|queue| queue["name"] == name), "{json}");
}
