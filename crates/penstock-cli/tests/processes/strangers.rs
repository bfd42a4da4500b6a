//! What strangers and floods can do to a server: they are told why they are sent away, they get
//! nothing without the token, and who has business there is served meanwhile.
//!
//! `make hostile` runs the same with many more of them (`HOSTILE_CONNECTIONS`) and prints what it found.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use penstock_message::{Durability, Key, Message, MessageId, Op, Tx, Value, ValueStatus};
use penstock_wire::proto::{self, ToBroker, ToClient, close::Why};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, MAX_HELLO_BYTES, PROTOCOL_VERSION, encode_frame};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::server::serve;
use crate::support::*;

/// How many strangers come in each test; so many in `make test`.
fn strangers(few: usize) -> usize {
    match std::env::var("HOSTILE_CONNECTIONS") {
        Ok(many) => many.parse().expect("a number"),
        Err(_) => few,
    }
}

/// Ratios of times are judged where nothing else runs.
fn is_long_run() -> bool {
    std::env::var_os("HOSTILE_CONNECTIONS").is_some()
}

/// xorshift64*, so that the same strangers come each time.
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

fn framed(frame: &ToBroker) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    encode_frame(frame, &mut bytes);
    bytes.to_vec()
}

fn hello_of(session: u64, token: &[u8]) -> ToBroker {
    let mut id = [0xcc; 16];
    id[..8].copy_from_slice(&session.to_le_bytes());
    ToBroker {
        hello: Some(proto::Hello {
            protocol_version: PROTOCOL_VERSION,
            session: Bytes::copy_from_slice(&id),
            name: format!("test {session}"),
            token: Bytes::copy_from_slice(token),
            // The longest that there is: nobody here is to be missed for being slow.
            heartbeat_ms: 3_600_000,
            ..proto::Hello::default()
        }),
        ..ToBroker::default()
    }
}

fn publish(number: u64) -> Tx {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&number.to_le_bytes());
    Tx::from(vec![Op::Publish {
        queues: vec!["default".to_owned()],
        message: Message {
            id: MessageId(id),
            task: "shop.send".to_owned(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from_static(b"body"),
        },
        due: None,
        unless_key: None,
    }])
}

fn commit(first_seq: u64, txs: Vec<Tx>) -> ToBroker {
    ToBroker {
        commits: vec![proto::Commit {
            first_seq,
            durability: proto::Durability::from(Durability::Disk).into(),
            txs: txs.into_iter().map(Into::into).collect(),
            part: proto::Part::Whole.into(),
        }],
        ..ToBroker::default()
    }
}

/// Leaves nothing behind but the last one.
fn note(number: u64) -> Tx {
    Tx::from(vec![Op::Put {
        key: Key::Named(Bytes::from_static(b"business")),
        value: Value {
            status: ValueStatus::Succeeded,
            body: Bytes::copy_from_slice(&number.to_le_bytes()),
        },
        ttl_ms: None,
        group: "business".to_owned(),
    }])
}

/// What was said to a stranger before the connection ended.
#[derive(Debug, Default)]
struct Said {
    welcome: bool,
    close: Option<proto::Close>,
    /// It did not end within the patience.
    goes_on: bool,
    everything: Vec<u8>,
}

/// Sends these pieces, and listens to the end, or for this long.
fn stranger(address: &str, pieces: &[Vec<u8>], then_shut: bool, patience: Duration) -> Said {
    let mut socket = TcpStream::connect(address).expect("somebody listens");
    socket.set_nodelay(true).expect("it is connected");
    for piece in pieces {
        if socket.write_all(piece).is_err() {
            break;
        }
    }
    if then_shut {
        let _left = socket.shutdown(Shutdown::Write);
    }
    socket.set_read_timeout(Some(patience)).expect("a timeout");
    let mut said = Said::default();
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => said.everything.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                said.goes_on = true;
                break;
            }
            // What it had not read when it closed makes this end a hard one.
            Err(_) => break,
        }
    }
    let mut decoder = Decoder::<ToClient>::new(MAX_FRAME_BYTES);
    decoder.extend(&said.everything);
    while let Ok(Some(frame)) = decoder.next_message() {
        said.welcome |= frame.welcome.is_some();
        said.close = frame.close.or(said.close);
    }
    said
}

/// Somebody with business there: commits one thing after the other, and times each confirm.
struct Business<'a> {
    session: u64,
    stop: &'a AtomicBool,
}

impl Business<'_> {
    fn run(&self, address: &str, token: &[u8]) -> Vec<Duration> {
        let mut client = RawClient::tcp(address);
        client.send(&hello_of(self.session, token));
        let heard = client.hear().expect("a frame");
        assert!(heard.welcome.is_some(), "{heard:?}");
        let mut took = Vec::new();
        for number in 1.. {
            let start = Instant::now();
            client.send(&commit(number, vec![note(number)]));
            loop {
                let frame = client.hear().expect("the connection stands");
                assert_eq!(frame.close, None);
                if let Some(confirm) = frame.confirm {
                    assert_eq!((confirm.through, confirm.receipts), (number, vec![]));
                    break;
                }
            }
            took.push(start.elapsed());
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        took
    }
}

fn p99(times: &mut [Duration]) -> Duration {
    assert!(!times.is_empty());
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

/// Into how many rounds a disturbance is dealt out.
fn rounds() -> usize {
    if is_long_run() { 15 } else { 1 }
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Somebody has business while something is done, and while something else is. Gives the 99th percentiles
/// of both. They take turns and the median round counts, so that what else this machine does meanwhile falls on
/// both alike.
fn compare_business(
    address: &str,
    token: &[u8],
    mut one: impl FnMut(usize),
    mut other: impl FnMut(usize),
) -> (Duration, Duration) {
    let measure = |session, disturb: &mut dyn FnMut(usize), round| {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let business = Business {
                session,
                stop: &stop,
            };
            let business = scope.spawn(move || business.run(address, token));
            disturb(round);
            stop.store(true, Ordering::Relaxed);
            p99(&mut business.join().expect("it goes on undisturbed"))
        })
    };
    let (mut with_one, mut with_other) = (Vec::new(), Vec::new());
    for round in 0..rounds() {
        let session = (1 << 40) + 2 * round as u64;
        with_one.push(measure(session, &mut one, round));
        with_other.push(measure(session + 1, &mut other, round));
    }
    (median(&mut with_one), median(&mut with_other))
}

/// Does something in rounds while somebody has business; gives the 99th percentiles without and with it.
fn beside_business(
    address: &str,
    token: &[u8],
    disturb: impl FnMut(usize),
) -> (Duration, Duration) {
    let while_quiet = Duration::from_millis(if is_long_run() { 1_500 } else { 300 });
    compare_business(address, token, |_| thread::sleep(while_quiet), disturb)
}

/// The bound on what others may notice; the millisecond is a disk's whim.
fn assert_not_disturbed(alone: Duration, meanwhile: Duration) {
    if is_long_run() {
        assert!(
            meanwhile <= 2 * alone + Duration::from_millis(1),
            "{meanwhile:?} beside it, {alone:?} alone"
        );
    }
}

/// Of a process: resident memory in bytes, open files, and time used.
fn usage(pid: Pid) -> (u64, usize, Duration) {
    let place = format!("/proc/{}", pid.as_raw_nonzero());
    let status = fs::read_to_string(format!("{place}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let resident: u64 = resident.and_then(|kb| kb.parse().ok()).expect("a number");
    let files = fs::read_dir(format!("{place}/fd"))
        .expect("it runs")
        .count();
    let stat = fs::read_to_string(format!("{place}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("a name in brackets");
    let fields: Vec<u64> = fields
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    // Of user and system, in ticks of 10 ms.
    let ticks = fields[11] + fields[12];
    (resident * 1024, files, Duration::from_millis(ticks * 10))
}

/// What a stranger may come up with; the reason that it must be told, if the protocol permits one.
fn hostile_pieces(number: usize, random: &mut Random) -> (Vec<Vec<u8>>, Option<Why>) {
    let session = random.draw();
    let greeting = framed(&hello_of(session, b""));
    let valid = framed(&commit(1, vec![publish(random.draw() | 1 << 63)]));
    let before_hello = [
        commit(1, vec![publish(1)]),
        ToBroker {
            consume: Some(proto::Consume::default()),
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
            // A true length before noise; what is no protobuf, or no hello, is told.
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
            frame.commits[0].durability = frame.commits[0].durability.abs() + 3;
            (vec![greeting, framed(&frame)], Some(Why::Protocol))
        }
        10 => {
            let mut frame = commit(1, vec![publish(1)]);
            frame.commits[0].txs[0].ops.push(proto::Op { op: None });
            (vec![greeting, framed(&frame)], Some(Why::Protocol))
        }
        11 => {
            let empty = proto::Consume {
                queues: vec![String::new()],
                add_credit: u32::MAX,
                stop: false,
            };
            let frame = ToBroker {
                consume: Some(empty),
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
            // A valid frame of a greeted client, some bytes changed.
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
            // Whoever has said too little would be waited for; it says that it is done.
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

/// Guesses at `token` that are not it.
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
        // What comes along with a wrong token is not heard either.
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
            query: Some(proto::query::Query::Status(true)),
        }],
        ..ToBroker::default()
    });
    let status = friend.hear().unwrap();
    assert!(!format!("{status:?}").contains(TOKEN));
    let Some(proto::answer::Answer::Status(status)) = &status.answers[0].answer else {
        panic!("{status:?}");
    };
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
        "this broker has its 3 connections, as many as it takes"
    );
    clients.pop();
    // The place is free once the server has noticed.
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

fn with_files(place: &Path, files: u32) -> (Running, String) {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_penstock"));
    command.args(["server", "--listen", "tcp://127.0.0.1:0", "--data"]);
    command.arg(place.join("data"));
    let server = Running::start(&mut command);
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

    // None at all: as if somebody else had taken them.
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

/// Publishes so many jobs of 1 KB each to the queue, as fast as they are confirmed.
fn publish_many(address: &str, queue: &str, round: usize, count: u64) {
    // Of this queue and round alone.
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
        consume: Some(proto::Consume {
            queues: vec!["unread".to_owned()],
            add_credit: u32::MAX,
            stop: false,
        }),
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
    // The jobs themselves, as a backlog holds them, and little more for whoever does not read.
    let backlog = jobs * 200 + (jobs << 10).min(64 << 20);
    assert!(after.0 < before.0 + backlog + (24 << 20), "{after:?}");
    assert!(server.is_running());
    // It was asked for, and what there was room for has come.
    while idle.hear().expect("a frame").deliveries.is_empty() {}
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
                // All at once, or one byte a while.
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
            (Why::Protocol, "no hello came in time")
        );
        assert!(took.as_secs() >= 4, "{took:?}");
    }
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
            let server = Running::start(&mut command);
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
        let confirmed = |said: &Said| {
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
        server.said("the broker has a bug and ends at once");
        let status = server.ended();
        assert_eq!(status.signal(), Some(6), "{thread}: {status:?}");

        // Nothing wrong was written, and the client's second try is applied, once.
        let (_server, address) = start("nowhere");
        let mut client = RawClient::tcp(&address).join(1);
        client.send(&ToBroker {
            queries: vec![proto::Query {
                id: 1,
                query: Some(proto::query::Query::Status(true)),
            }],
            ..ToBroker::default()
        });
        let answer = client.hear().unwrap();
        let Some(proto::answer::Answer::Status(status)) = &answer.answers[0].answer else {
            panic!("{answer:?}");
        };
        assert!(status.queues.iter().all(|queue| queue.ready == 0));
    }
}
