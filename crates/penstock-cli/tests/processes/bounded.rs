//! Tests groups that fail on a full disk, and everything that the disk holds.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_driver::{Driver, DriverConfig};
use penstock_local::connect;
use penstock_message::{
    Answer, Durability, Filter, Hold, IdSource, JoinId, JoinPolicy, Message, MessageId, Op, Query,
    Receipt, Refusal, Space, Status, StatusQuery, Target, Tx,
};

use crate::support::*;

/// Deadline of a call.
const DEADLINE: Duration = PATIENCE;
/// Time after a group's failure until new jobs are accepted again.
const AGAIN: Duration = Duration::from_secs(5);
/// Journal size beyond its reserves and 24 bytes for each value still kept.
const JOURNAL_BYTES: u64 = 10 << 20;
const KEPT_VALUE_BYTES: u64 = 24;
/// Time for a status, which waits for no disk.
const STATUS: Duration = Duration::from_secs(1);
/// Start time of the program on a machine for which the bounds above hold. A slower machine is busy, so all its
/// bounds are scaled by the ratio.
const STARTS: Duration = Duration::from_millis(20);
const LARGE_JOIN: u32 = 20_000;
const HELD_BY_A_JOIN: u32 = 1_000;

/// Small disk in memory.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None` if this machine can't mount one, which is an error in CI.
    fn mount(at: PathBuf, megabytes: u32) -> Option<Self> {
        std::fs::create_dir(&at).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={megabytes}m"), "none"]);
        let mounted = mount.arg(&at).output();
        if mounted.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Self(at));
        }
        let must = std::env::var("CI").is_ok_and(|value| value == "true");
        assert!(!must, "no disk can be mounted: {mounted:?}");
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.0).status();
        assert!(
            unmounted.is_ok_and(|status| status.success()) || thread::panicking(),
            "{:?} is still mounted",
            self.0
        );
    }
}

/// Counts the outcomes of one client's calls, made one after the other.
struct CallingClient {
    driver: Arc<dyn Driver>,
    numbers: u128,
}

impl CallingClient {
    fn of(socket: &Path) -> Self {
        let url = format!("unix:{}", socket.display());
        Self {
            driver: connect(DriverConfig::new(url)).expect("a driver"),
            numbers: 0,
        }
    }

    fn source(&mut self) -> IdSource {
        self.numbers += 1;
        IdSource {
            unix_ms: 1_700_000_000_000 + self.numbers as u64,
            random: [7; 10],
        }
    }

    fn message(&mut self, body: &Bytes) -> Message {
        Message {
            result_ttl_ms: Some(86_400_000),
            task: "shop.print".to_owned(),
            ..message(MessageId::new(self.source()), body.clone())
        }
    }

    /// Whether the call was accepted; if not, the disk was full.
    fn commit(&self, ops: Vec<Op>) -> bool {
        let (told, outcome) = channel();
        let done = Box::new(move |outcome| told.send(outcome).expect("somebody waits"));
        let deadline = Some(Instant::now() + DEADLINE);
        let txs = vec![Tx::from(ops)];
        self.driver.commit(txs, Durability::Disk, deadline, done);
        let receipts = outcome.recv_timeout(2 * DEADLINE).expect("the call ends");
        match &receipts.expect("the broker answers in time")[..] {
            [Receipt::Applied(_)] => true,
            [
                Receipt::Refused {
                    why: Refusal::DiskFull,
                    ..
                },
            ] => false,
            other => panic!("{other:?}"),
        }
    }

    fn hold(&mut self, held: u32, body: &Bytes) -> Option<JoinId> {
        let join = MessageId::new_join(self.source());
        let messages = (0..held).map(|_| ("default".to_owned(), self.message(body)));
        let hold = Op::Hold(Hold {
            join,
            count: 1,
            messages: messages.collect(),
            policy: JoinPolicy::AllSucceeded,
            ..Hold::default()
        });
        self.commit(vec![hold]).then_some(join)
    }

    fn publish(&mut self) -> bool {
        let message = self.message(&Bytes::new());
        self.commit(vec![Op::Publish {
            queues: vec!["default".to_owned()],
            message,
            due: None,
            unless_key: None,
        }])
    }

    fn status(&self) -> Status {
        let (told, answer) = channel();
        let done = Box::new(move |answer| told.send(answer).expect("somebody waits"));
        let deadline = Instant::now() + DEADLINE;
        self.driver
            .query(Query::Status(StatusQuery::default()), deadline, done);
        match answer.recv_timeout(2 * DEADLINE).expect("the call ends") {
            Ok(Answer::Status(page)) => page.status,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns how much slower than a quiet machine this one is at the moment.
fn slowness() -> f64 {
    let start = Instant::now();
    let version = penstock().arg("--version").output();
    assert!(version.expect("it starts").status.success());
    start.elapsed().div_duration_f64(STARTS).max(1.0)
}

fn is_long_run() -> bool {
    std::env::var_os("PENSTOCK_LONG").is_some()
}

/// Fills a disk with jobs that wait for groups, fails one member of each group, and checks that all of them
/// end.
fn fail_all(body: &Bytes) {
    let place = tempfile::tempdir().expect("a directory");
    let megabytes = if is_long_run() { 40 } else { 24 };
    let Some(disk) = SmallDisk::mount(place.path().join("disk"), megabytes) else {
        eprintln!("skipped: a disk can be mounted by root only");
        return;
    };
    let socket = place.path().join("socket");
    let mut command = penstock();
    command
        .args(["server", "--data"])
        .arg(disk.0.join("data"))
        .arg("--listen")
        .arg(format!("unix:{}", socket.display()));
    let mut server = RunningProgram::start(&mut command);
    server.said("listening on");

    let mut client = CallingClient::of(&socket);
    let mut joins = Vec::new();
    let mut held = 0;
    // One large group, and many small ones.
    let large = client.hold(LARGE_JOIN, body).expect("there is room");
    joins.push(large);
    held += LARGE_JOIN;
    // A call may be refused for its size, or just before reclaim finds space. The broker's status says when the
    // disk is full.
    while client.status().space == Space::Plenty {
        for each in [HELD_BY_A_JOIN, 1] {
            while let Some(join) = client.hold(each, body) {
                joins.push(join);
                held += each;
            }
        }
    }
    assert!(held > 10_000, "only {held} fitted");

    let is_over = AtomicBool::new(false);
    let (answered, again, slowest) = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let watcher = CallingClient::of(&socket);
            let mut slowest = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let start = Instant::now();
                watcher.status();
                slowest = slowest.max(start.elapsed());
            }
            watcher.driver.close(Instant::now() + DEADLINE);
            slowest
        });
        let start = Instant::now();
        let failures = joins.iter().map(|join| Op::Join {
            join: *join,
            index: 0,
            succeeded: false,
        });
        assert!(client.commit(failures.collect()), "failures are taken");
        let answered = start.elapsed();
        while !client.publish() {
            assert!(
                start.elapsed() < AGAIN.mul_f64(slowness()),
                "{:?}",
                client.status()
            );
        }
        let again = start.elapsed();
        is_over.store(true, Ordering::Relaxed);
        (answered, again, watch.join().expect("it watches"))
    });
    let status = STATUS.mul_f64(slowness());
    assert!(slowest < status, "a status took {slowest:?} of {status:?}");

    // Everything that was not dropped is kept, as failed jobs are, until a person drops it.
    let drop = Op::Cancel {
        target: Target::Filter(Filter::default()),
        reason: String::new(),
        running: penstock_message::OnRunning::Leave,
    };
    assert!(client.commit(vec![drop]), "a cancel is taken");
    let until = Instant::now() + PATIENCE;
    let end = loop {
        let status = client.status();
        let journal_bytes = status.process.journal_bytes;
        if journal_bytes <= JOURNAL_BYTES + KEPT_VALUE_BYTES * status.results
            && status.space == Space::Plenty
        {
            break status;
        }
        assert!(Instant::now() < until, "{status:?}");
    };
    println!(
        "{held} held by {} joins, bodies of {} bytes: answered after {answered:?}, takes jobs after \
         {again:?}, slowest status {slowest:?}; journal {} bytes, {} results kept",
        joins.len(),
        body.len(),
        end.process.journal_bytes,
        end.results,
    );
    assert!(server.is_running());
    client.driver.close(Instant::now() + DEADLINE);
}

#[test]
fn on_a_full_disk_failed_groups_end_and_new_jobs_are_taken_again() {
    fail_all(&Bytes::new());
    fail_all(&Bytes::from_static(&[b'x'; 300]));
}
