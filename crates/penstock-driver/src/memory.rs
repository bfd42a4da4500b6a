//! `memory:NAME`: the server's engine on a thread of this process, over a disk that is memory. For tests.
//!
//! It speaks the protocol through socket pairs, so that what is tested on it is what runs elsewhere.
//! It lives as long as any client of its name does in this process.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use penstock_broker::{BrokerOptions, ConnId, Now};
use penstock_journal::sim::SimStorage;
use penstock_journal::{JournalOptions, Writer};
use penstock_server::{Engine, EngineOptions, Peer};
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::DriverError;
use crate::dial::{Dial, DialError, Start};
use crate::remote::send;
use crate::waker::Waker;

/// By the process that it was made in (for a fork copies the list) and its name.
type Brokers = HashMap<(u32, String), Weak<MemoryBroker>>;

static BROKERS: Mutex<Option<Brokers>> = Mutex::new(None);

pub(crate) struct Memory {
    broker: Arc<MemoryBroker>,
}

impl Memory {
    pub(crate) fn new(name: String) -> Result<Self, DriverError> {
        let mut brokers = BROKERS.lock().unwrap();
        let brokers = brokers.get_or_insert_default();
        let key = (std::process::id(), name);
        let broker = match brokers.get(&key).and_then(Weak::upgrade) {
            Some(broker) => broker,
            None => {
                let started = MemoryBroker::new().map_err(|error| {
                    DriverError::invalid(format!("no broker can be made in this process: {error}"))
                })?;
                brokers.insert(key, Arc::downgrade(&started));
                started
            }
        };
        Ok(Self { broker })
    }
}

impl Dial for Memory {
    fn dial(&self, _give_up_at: Instant, _: Start) -> Result<OwnedFd, DialError> {
        let connect = || -> std::io::Result<OwnedFd> {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            self.broker.accept(theirs)?;
            Ok(ours)
        };
        connect().map_err(|error| DialError::Unreachable(error.to_string()))
    }
}

/// The handle of a broker: its thread ends when the last one is dropped.
struct MemoryBroker {
    door: Arc<Door>,
}

struct Door {
    waker: Waker,
    state: Mutex<DoorState>,
}

#[derive(Default)]
struct DoorState {
    runs: bool,
    closed: bool,
    arrived: Vec<OwnedFd>,
}

impl MemoryBroker {
    fn new() -> std::io::Result<Arc<Self>> {
        let door = Door {
            waker: Waker::new()?,
            state: Mutex::default(),
        };
        Ok(Arc::new(Self {
            door: Arc::new(door),
        }))
    }

    fn accept(&self, socket: OwnedFd) -> std::io::Result<()> {
        let mut state = self.door.state.lock().unwrap();
        if !state.runs {
            let door = Arc::clone(&self.door);
            let options = engine_options()?;
            thread::Builder::new()
                .name("penstock-memory".into())
                .spawn(move || Shell::new(door, options).run())?;
            state.runs = true;
        }
        state.arrived.push(socket);
        self.door.waker.wake();
        Ok(())
    }
}

impl Drop for MemoryBroker {
    fn drop(&mut self) {
        self.door.state.lock().unwrap().closed = true;
        self.door.waker.wake();
    }
}

fn engine_options() -> std::io::Result<EngineOptions> {
    Ok(EngineOptions {
        broker: BrokerOptions {
            // Its disk is memory, too.
            resident_bodies_bytes: None,
            hash_seed: getrandom::u64().map_err(std::io::Error::other)?,
            ..BrokerOptions::default()
        },
        journal: JournalOptions {
            // All segments are alike, so that each is written over again.
            segment_bytes: 2 << 20,
            batch_bytes: 1 << 20,
            ..JournalOptions::default()
        },
        token: None,
        max_connections: usize::MAX,
        stop_on_request: false,
        is_double: true,
        pid: u64::from(std::process::id()),
    })
}

/// The loop around the engine.
struct Shell {
    door: Arc<Door>,
    engine: Engine,
    writer: Writer<SimStorage>,
    zero: Instant,
    sockets: FxHashMap<ConnId, Socket>,
    next_conn: u64,
    buffer: Box<[u8]>,
}

struct Socket {
    fd: OwnedFd,
    /// A write did not take all.
    full: bool,
}

impl Shell {
    fn new(door: Arc<Door>, options: EngineOptions) -> Self {
        let zero = Instant::now();
        let (engine, writer, _report) = Engine::open(SimStorage::new(), options, || now(zero))
            .expect("an empty disk that never fails has a journal");
        Self {
            door,
            engine,
            writer,
            zero,
            sockets: FxHashMap::default(),
            next_conn: 1,
            buffer: vec![0; 64 << 10].into_boxed_slice(),
        }
    }

    fn run(mut self) {
        loop {
            self.send_and_store();
            let ready = self.wait();
            if self.door.state.lock().unwrap().closed {
                return;
            }
            self.let_in();
            for (conn, flags) in ready {
                if flags.contains(PollFlags::OUT)
                    && let Some(socket) = self.sockets.get_mut(&conn)
                {
                    socket.full = false;
                    self.transmit(conn);
                }
                if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                    self.receive(conn);
                }
            }
            let now = now(self.zero);
            if self
                .engine
                .next_deadline_ms()
                .is_some_and(|due| due <= now.mono_ms)
            {
                self.engine.tick(now);
            }
        }
    }

    /// Carries out all that the engine wants, until it wants nothing more.
    fn send_and_store(&mut self) {
        loop {
            while let Some(task) = self.engine.take_batch(now(self.zero)) {
                let Self { engine, writer, .. } = self;
                let at = now(self.zero);
                let written = |through| engine.batch_written(at, through);
                match task.carry_out(writer, written) {
                    Ok(()) => self.engine.batch_done(now(self.zero), &task, 0),
                    Err(_) => self.engine.disk_failed(now(self.zero)),
                }
            }
            let mut sent = false;
            let mut waiting = VecDeque::new();
            while let Some(conn) = self.engine.poll_transmit() {
                waiting.push_back(conn);
            }
            for conn in waiting {
                sent |= self.transmit(conn);
            }
            while let Some(conn) = self.engine.poll_close() {
                self.sockets.remove(&conn);
            }
            if !sent {
                return;
            }
        }
    }

    /// Gives whether anything went.
    fn transmit(&mut self, conn: ConnId) -> bool {
        let Some(socket) = self.sockets.get_mut(&conn) else {
            return false;
        };
        let mut total = 0;
        while !self.engine.outgoing(conn).is_empty() {
            match send(&socket.fd, self.engine.outgoing(conn)) {
                Ok(sent) => {
                    total += sent;
                    self.engine.transmitted(now(self.zero), conn, sent);
                }
                Err(Errno::INTR) => {}
                // One that broke is noticed when it is read.
                Err(_) => {
                    socket.full = true;
                    break;
                }
            }
        }
        total > 0
    }

    fn receive(&mut self, conn: ConnId) {
        let Some(socket) = self.sockets.get(&conn) else {
            return;
        };
        match rustix::io::read(&socket.fd, &mut self.buffer[..]) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(0) | Err(_) => {
                self.sockets.remove(&conn);
                self.engine.closed(now(self.zero), conn);
            }
            Ok(length) => self
                .engine
                .received(now(self.zero), conn, &self.buffer[..length]),
        }
    }

    fn let_in(&mut self) {
        let arrived = std::mem::take(&mut self.door.state.lock().unwrap().arrived);
        for fd in arrived {
            let conn = ConnId(self.next_conn);
            self.next_conn += 1;
            self.sockets.insert(conn, Socket { fd, full: false });
            self.engine.opened(now(self.zero), conn, Peer::Trusted);
        }
    }

    fn wait(&mut self) -> Vec<(ConnId, PollFlags)> {
        let mut conns = Vec::with_capacity(self.sockets.len());
        let mut fds = vec![PollFd::new(&self.door.waker, PollFlags::IN)];
        for (conn, socket) in &self.sockets {
            let mut interest = PollFlags::IN;
            interest.set(PollFlags::OUT, socket.full);
            conns.push(*conn);
            fds.push(PollFd::new(&socket.fd, interest));
        }
        let timeout = self.engine.next_deadline_ms().and_then(|due| {
            let left = due.saturating_sub(now(self.zero).mono_ms);
            Timespec::try_from(Duration::from_millis(left)).ok()
        });
        // An interrupted wait shows nothing ready, and the next one does.
        let _ = poll(&mut fds, timeout.as_ref());
        if !fds[0].revents().is_empty() {
            self.door.waker.clear();
        }
        let events = fds[1..].iter().map(PollFd::revents);
        conns
            .into_iter()
            .zip(events)
            .filter(|(_, flags)| !flags.is_empty())
            .collect()
    }
}

fn now(zero: Instant) -> Now {
    let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Now {
        mono_ms: zero.elapsed().as_millis() as u64,
        wall_ms: wall.map_or(0, |since| since.as_millis() as u64),
        ..Now::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_broker_in_memory_draws_the_seed_of_its_hashes() {
        let draw = || engine_options().expect("random numbers").broker.hash_seed;
        let (one, other) = (draw(), draw());
        assert_ne!(one, BrokerOptions::default().hash_seed);
        assert_ne!(one, other);
    }
}
