//! Starts real processes of the real program, each in its own directory, and stops them when a test ends.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use penstock_message::{Message, MessageId};
use penstock_wire::proto::{self, ToBroker, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, PROTOCOL_VERSION, encode_frame};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn penstock() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
    // Clear all settings of the person who runs the tests.
    command
        .env_remove("PENSTOCK_URL")
        .env_remove("PENSTOCK_TOKEN");
    command.stdin(Stdio::null());
    command
}

/// Message as a client publishes it, with no rare fields.
pub fn message(id: MessageId, body: Bytes) -> Message {
    Message {
        id,
        task: "shop.send".to_owned(),
        priority: 4,
        expires_at: None,
        result_ttl_ms: None,
        max_deliveries: 3,
        attempt: 0,
        crashes: 0,
        enqueued_at: 0,
        notes: Vec::new(),
        body,
        extras: None,
    }
}

pub fn run(arguments: &[&str]) -> Output {
    penstock()
        .args(arguments)
        .output()
        .expect("the program runs")
}

pub fn text(output: &Output) -> String {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    format!("{out}{err}")
}

/// Process that a test started.
pub struct RunningProgram {
    child: Child,
    said: Receiver<String>,
}

impl RunningProgram {
    pub fn start(command: &mut Command) -> Self {
        Self::start_logging_to(command, Stdio::piped())
    }

    /// Waits are possible only for lines that go to a pipe.
    pub fn start_logging_to(command: &mut Command, log: Stdio) -> Self {
        let mut child = command.stderr(log).spawn().expect("the program runs");
        let (say, said) = channel();
        if let Some(errors) = child.stderr.take() {
            thread::spawn(move || {
                for line in BufReader::new(errors).lines().map_while(Result::ok) {
                    if say.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Self { child, said }
    }

    /// Waits for a line that contains this.
    pub fn said(&self, part: &str) -> String {
        let mut before = Vec::new();
        loop {
            match self.said.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(part) => return line,
                Ok(line) => before.push(line),
                Err(_) => panic!("{part:?} was not said, but {before:?}"),
            }
        }
    }

    /// Waits until a local broker serves: it then closes its standard error.
    pub fn serves(&self) {
        match self.said.recv_timeout(PATIENCE) {
            Err(RecvTimeoutError::Disconnected) => {}
            other => panic!("it did not start: {other:?}"),
        }
    }

    /// Returns all lines not read yet, up to the end.
    pub fn everything_said(&self) -> Vec<String> {
        self.said.iter().collect()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it runs");
    }

    pub fn ended(&mut self) -> ExitStatus {
        assert!(wait_for_end(self.pid(), PATIENCE), "it runs on");
        self.child.wait().expect("it is our child")
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_none()
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        // An error means that it has already exited.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Whether the process exits within this time.
pub fn wait_for_end(pid: Pid, patience: Duration) -> bool {
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
        return true;
    };
    let mut events = [PollFd::new(&process, PollFlags::IN)];
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match poll(&mut events, Some(&left.try_into().expect("a short time"))) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Resources of a process: resident memory in bytes, open files, and CPU time.
pub fn usage(pid: Pid) -> (u64, usize, Duration) {
    let place = format!("/proc/{}", pid.as_raw_nonzero());
    let status = fs::read_to_string(format!("{place}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let resident: u64 = resident.and_then(|kb| kb.parse().ok()).expect("a number");
    let files = fs::read_dir(format!("{place}/fd"))
        .expect("it runs")
        .count();
    (resident * 1024, files, cpu_time(pid))
}

/// CPU time of a process, also of one that has ended and was not waited for.
pub fn cpu_time(pid: Pid) -> Duration {
    let stat =
        fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).expect("it is there");
    let (_, fields) = stat.rsplit_once(')').expect("a name in brackets");
    let fields: Vec<u64> = fields
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    // User and system time, in ticks of 10 ms.
    let ticks = fields[11] + fields[12];
    Duration::from_millis(ticks * 10)
}

/// Targets for a log that accept no line: a pipe whose reader has exited (`| head`), and a full disk.
pub fn broken_logs() -> [(&'static str, Stdio); 2] {
    let (_, unread) = std::io::pipe().expect("a pipe");
    let full = std::fs::File::options().write(true).open("/dev/full");
    [
        ("a closed pipe", unread.into()),
        ("a full disk", full.expect("it is there").into()),
    ]
}

/// Waits until a server accepts connections there, which only its log reports.
pub fn wait_until_it_listens(socket: &Path) {
    let until = Instant::now() + PATIENCE;
    while UnixStream::connect(socket).is_err() {
        assert!(Instant::now() < until, "nobody listens at {socket:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Broker of a directory, started as a client would start it, with everything that keeps it isolated.
pub struct LocalProgram {
    pub place: tempfile::TempDir,
    pub process: RunningProgram,
}

impl LocalProgram {
    pub fn start(linger: &str) -> Self {
        let place = tempfile::tempdir().expect("a directory");
        let process = Self::start_in(place.path(), linger);
        Self { place, process }
    }

    pub fn start_in(place: &Path, linger: &str) -> RunningProgram {
        let mut command = penstock();
        command
            .args(["server", "--linger", linger, "--local"])
            .arg(place.join("data"));
        let running = RunningProgram::start(&mut command);
        running.serves();
        running
    }

    pub fn data(&self) -> PathBuf {
        self.place.path().join("data")
    }

    pub fn socket(&self) -> PathBuf {
        self.data().join("broker.sock")
    }
}

/// Client that speaks only the protocol.
pub struct RawClient<S> {
    socket: S,
    decoder: Decoder<ToClient>,
}

impl RawClient<UnixStream> {
    pub fn unix(path: &Path) -> Self {
        let socket = UnixStream::connect(path).expect("somebody listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self::new(socket)
    }
}

impl RawClient<TcpStream> {
    pub fn tcp(address: &str) -> Self {
        Self::over(TcpStream::connect(address).expect("somebody listens"))
    }

    pub fn over(socket: TcpStream) -> Self {
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self::new(socket)
    }
}

impl<S: Read + Write> RawClient<S> {
    fn new(socket: S) -> Self {
        Self {
            socket,
            decoder: Decoder::new(MAX_FRAME_BYTES),
        }
    }

    /// Says hello and waits for the welcome.
    pub fn join(mut self, session: u8) -> Self {
        self.send(&hello(session, ""));
        let welcome = self.hear().expect("a frame").welcome;
        assert!(welcome.is_some(), "a welcome");
        self
    }

    pub fn send(&mut self, frame: &ToBroker) {
        let mut bytes = BytesMut::new();
        encode_frame(frame, &mut bytes);
        self.send_bytes(&bytes);
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("it is taken");
    }

    /// Returns the next frame; `None` at the end of the connection.
    pub fn hear(&mut self) -> Option<ToClient> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(frame) = self
                .decoder
                .next_message()
                .expect("the server speaks the protocol")
            {
                return Some(frame);
            }
            match self.socket.read(&mut buffer) {
                // A signal, such as that of an exited child.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) => return None,
                Ok(count) => self.decoder.extend(&buffer[..count]),
                Err(error) => panic!("the connection ends in order, not by {error}"),
            }
        }
    }

    /// Takes this many bytes off the socket, whatever they say. Nothing can be heard after that.
    pub fn take_bytes(&mut self, count: usize) {
        self.socket
            .read_exact(&mut vec![0; count])
            .expect("as many bytes");
    }

    /// Returns why the connection was closed, once it is.
    pub fn farewell(&mut self) -> proto::Close {
        let mut last = None;
        while let Some(frame) = self.hear() {
            last = frame.close;
        }
        last.expect("a reason")
    }
}

pub fn hello(session: u8, token: &'static str) -> ToBroker {
    ToBroker {
        hello: Some(proto::Hello {
            protocol_version: PROTOCOL_VERSION,
            session: Bytes::copy_from_slice(&[session; 16]),
            name: format!("test {session}"),
            token: Bytes::from_static(token.as_bytes()),
            ..proto::Hello::default()
        }),
        ..ToBroker::default()
    }
}

pub fn ping() -> ToBroker {
    ToBroker {
        ping: true,
        ..ToBroker::default()
    }
}
