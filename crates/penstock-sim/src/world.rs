//! One simulated run: a clock, a disk, a network, clients, and a broker that dies now and then.
//!
//! Everything is drawn from one seed and done in one thread, so a seed is a run. The broker is the
//! server's own engine: the world is its shell, and does what the shell does with sockets and threads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use penstock_broker::{BrokerOptions, ConnId, Now};
use penstock_journal::sim::{Fault, Rng, SimStorage};
use penstock_journal::{JournalOptions, OpenError, Reader, Storage, WriteError, Writer};
use penstock_message::{Durability, Key, KeyState, SessionId};
use penstock_server::{Engine, EngineOptions, Peer, ReadTask, WriterTask};

use crate::checker::{Checker, Counts, Crash};
use crate::client::{Client, Habits, QUEUES, Said, Stage};
use crate::model::{Time, Verdict};

/// When the world begins, by all clocks.
const BEGINNING_MS: u64 = 1_800_000_000_000;
/// After so long without a fault everything must have ended, but for what waits for a wall's clock that
/// was set back. A session whose client has died is forgotten later than that: its leases end before.
const PATIENCE_MS: u64 = 300_000;

/// What a seed has come to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What was wrong, and at which step.
    pub failure: Option<String>,
    /// Of everything that was said: the same seed must give the same.
    pub hash: u64,
    pub steps: u64,
    pub counts: Counts,
}

/// What a run does without.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Without {
    /// Faults, habits and [`FAULT_POINTS`], by name; so many clients less.
    pub names: BTreeSet<&'static str>,
    pub clients: usize,
    /// It goes on for so many steps.
    pub steps: Option<u64>,
}

pub const FAULT_POINTS: &str = "fault points";

/// What a run can do without.
pub const NAMES: [&str; 12] = [
    FAULT_POINTS,
    "kills",
    "power cuts",
    "disk errors",
    "lost connections",
    "deaths",
    "clock steps",
    "stalls",
    "delays",
    "groups",
    "locks",
    "purges",
];

/// Runs one seed. `trace` is shown each step, for a person.
pub fn run(seed: u64, trace: Option<&mut dyn FnMut(&str)>) -> Outcome {
    run_without(seed, &Without::default(), trace)
}

/// Runs one seed, or what is left of it.
pub fn run_without(seed: u64, without: &Without, trace: Option<&mut dyn FnMut(&str)>) -> Outcome {
    #[cfg(feature = "faults")]
    make_rare_things_frequent(seed, without.names.contains(FAULT_POINTS));
    let mut world = World::new(seed, trace);
    world.do_without(without);
    let verdict = world.live();
    // With what the model was told last.
    world.say(|| "the end".to_string());
    let failure = verdict
        .err()
        .map(|what| format!("step {}, {} ms: {what}", world.steps, world.now_ms));
    Outcome {
        failure,
        hash: world.hash,
        steps: world.steps,
        counts: world.checker.counts,
    }
}

/// Fault points inside the product: none of them, or some, seldom or often. Not drawn from what the
/// world draws from, so that a seed is nearly the same run without them.
#[cfg(feature = "faults")]
fn make_rare_things_frequent(seed: u64, never: bool) {
    let mut rng = Rng::new(!seed);
    let is_calm = rng.one_in(4) || never;
    let enabled = if is_calm { 0 } else { rng.draw() as u32 };
    let one_in = [3, 20, 100][rng.below(3) as usize];
    penstock_faults::Points::begin(rng.draw(), enabled, one_in);
}

/// How a run goes; most seeds do without most faults, so that each is met in depth.
struct Plan {
    steps: u64,
    kills: u64,
    power_cuts: u64,
    disk_errors: u64,
    disconnects: u64,
    deaths: u64,
    clock_steps: u64,
    stalls: u64,
}

struct World<'a> {
    rng: Rng,
    plan: Plan,
    trace: Option<&'a mut dyn FnMut(&str)>,
    steps: u64,
    hash: u64,
    /// True time since the beginning.
    now_ms: u64,
    wall_ahead_ms: i64,
    /// In all, back and forth.
    wall_was_set_by_ms: u64,
    storage: SimStorage,
    options: EngineOptions,
    broker: Option<Process>,
    links: BTreeMap<ConnId, Link>,
    connections: u64,
    clients: Vec<Client>,
    checker: Checker,
    /// Values that clients were told in the end.
    told: Vec<(Key, KeyState)>,
    healed: bool,
    /// When the broker last heard anything.
    heard_at_ms: u64,
}

/// A broker's life.
struct Process {
    engine: Engine,
    writer: Writer<SimStorage>,
    started_ms: u64,
    task: Option<WriterTask>,
    /// The writer has done it, and the loop does not know yet.
    task_is_done: bool,
    reader: Reader<SimStorage>,
    reads: Option<ReadTask>,
    /// The reader has carried them out, and the loop does not know yet.
    reads_are_done: bool,
}

/// What is on its way between a client and the broker.
struct Link {
    client: usize,
    to_broker: VecDeque<u8>,
    /// Where in the stream each frame ends, and what it says.
    said: VecDeque<(u64, Said)>,
    sent: u64,
    arrived: u64,
    to_client: Vec<u8>,
    client_has_closed: bool,
    broker_has_closed: bool,
}

impl<'a> World<'a> {
    fn new(seed: u64, trace: Option<&'a mut dyn FnMut(&str)>) -> Self {
        let mut rng = Rng::new(seed);
        let fault = |rng: &mut Rng, weight: u64| if rng.one_in(2) { weight } else { 0 };
        let plan = Plan {
            steps: 200 + rng.below(600),
            kills: fault(&mut rng, 4),
            power_cuts: fault(&mut rng, 6),
            disk_errors: fault(&mut rng, 2),
            disconnects: fault(&mut rng, 10),
            deaths: fault(&mut rng, 2),
            clock_steps: if rng.one_in(4) { 3 } else { 0 },
            stalls: fault(&mut rng, 3),
        };
        let durabilities = match rng.below(3) {
            0 => vec![Durability::Disk, Durability::Os, Durability::None],
            _ => vec![Durability::Disk],
        };
        let likes = |rng: &mut Rng| rng.bool();
        let habits = Habits {
            queues: Vec::new(),
            durabilities,
            publishes: true,
            consumes: true,
            delays: likes(&mut rng),
            groups: likes(&mut rng),
            locks: likes(&mut rng),
            purges: rng.one_in(4),
        };
        let clients = (0..2 + rng.below(5)).map(|index| {
            let mut session = [0; 16];
            session[0] = index as u8;
            session[8..].copy_from_slice(&rng.draw().to_le_bytes());
            let all = QUEUES.iter().map(|queue| (*queue).to_string());
            let mut queues: Vec<String> = all.filter(|_| rng.below(3) > 0).collect();
            if rng.one_in(3) || queues.is_empty() {
                queues.push("dead".to_string());
            }
            let habits = Habits {
                queues,
                publishes: index == 0 || rng.below(3) > 0,
                consumes: index == 1 || rng.below(3) > 0,
                ..habits.clone()
            };
            Client::new(SessionId(session), 300 + rng.below(3_000), habits)
        });
        let clients: Vec<Client> = clients.collect();
        let journal = JournalOptions {
            journal_id: [5; 16],
            segment_bytes: 4096 << (1 + rng.below(5)),
            batch_bytes: 1024 << rng.below(5),
            opening_bytes: 4096,
            spares: rng.below(3) as usize,
        };
        let broker = BrokerOptions {
            unserved_ms: 2_000,
            // From time to time all bodies are in memory; mostly hardly any.
            resident_bodies_bytes: [None, Some(0), Some(0), Some(1_000)][rng.below(4) as usize],
            ..BrokerOptions::default()
        };
        let storage = SimStorage::new();
        storage.seed_faults(Rng::new(rng.draw()));
        let is_read_along = trace.is_some();
        Self {
            rng,
            plan,
            trace,
            steps: 0,
            hash: 0xcbf2_9ce4_8422_2325,
            now_ms: 0,
            wall_ahead_ms: 0,
            wall_was_set_by_ms: 0,
            storage,
            options: EngineOptions {
                broker,
                journal,
                token: None,
                max_connections: usize::MAX,
                stop_on_request: false,
                pid: 1,
            },
            broker: None,
            links: BTreeMap::new(),
            connections: 0,
            clients,
            checker: Checker::new(is_read_along),
            told: Vec::new(),
            healed: false,
            heard_at_ms: 0,
        }
    }

    fn do_without(&mut self, without: &Without) {
        let plan = &mut self.plan;
        for name in &without.names {
            match *name {
                "kills" => plan.kills = 0,
                "power cuts" => plan.power_cuts = 0,
                "disk errors" => plan.disk_errors = 0,
                "lost connections" => plan.disconnects = 0,
                "deaths" => plan.deaths = 0,
                "clock steps" => plan.clock_steps = 0,
                "stalls" => plan.stalls = 0,
                habit => self
                    .clients
                    .iter_mut()
                    .for_each(|client| client.drop_habit(habit)),
            }
        }
        plan.steps = without.steps.unwrap_or(plan.steps);
        let left = self.clients.len().saturating_sub(without.clients).max(2);
        self.clients.truncate(left);
    }

    fn live(&mut self) -> Verdict {
        self.start(None)?;
        for _ in 0..self.plan.steps {
            self.steps += 1;
            self.step()?;
        }
        self.heal()?;
        self.rot()
    }

    fn step(&mut self) -> Verdict {
        let Plan {
            kills,
            power_cuts,
            disk_errors,
            disconnects,
            deaths,
            clock_steps,
            stalls,
            ..
        } = self.plan;
        let faults = [
            kills,
            power_cuts,
            disk_errors,
            disconnects,
            deaths,
            clock_steps,
            stalls,
        ];
        let usual = 1_000;
        let mut drawn = self.rng.below(usual + faults.iter().sum::<u64>());
        if drawn < usual {
            return match drawn {
                0..350 => self.client_acts(),
                350..600 => self.bytes_reach_broker(),
                600..800 => self.bytes_reach_client(),
                800..900 => self.disk_works(),
                900..985 => {
                    let ms = 1 + self.rng.below(4);
                    self.pass(ms)
                }
                985..998 => {
                    let ms = self.rng.below(400);
                    self.pass(ms)
                }
                _ => {
                    let ms = self.rng.below(20_000);
                    self.pass(ms)
                }
            };
        }
        drawn -= usual;
        let fault = faults.iter().position(|weight| {
            let is_here = drawn < *weight;
            drawn = drawn.wrapping_sub(*weight);
            is_here
        });
        match fault {
            Some(0) => match self.rng.bool() {
                true => self.crash(Crash::Killed),
                false => {
                    let call = self.storage.calls() + self.rng.below(6);
                    self.storage.fail_at(call, Fault::Killed);
                    Ok(())
                }
            },
            Some(1) => match self.rng.bool() {
                true => self.crash(Crash::PowerCut),
                // In the midst of one of the next calls to the disk.
                false => {
                    let call = self.storage.calls() + self.rng.below(6);
                    self.storage.fail_at(call, Fault::PowerOff);
                    Ok(())
                }
            },
            Some(2) => {
                let call = self.storage.calls() + self.rng.below(10);
                let fault = if self.rng.bool() {
                    Fault::Error
                } else {
                    Fault::DiskFull
                };
                self.storage.fail_at(call, fault);
                self.say(|| format!("the disk will fail at call {call}: {fault:?}"));
                Ok(())
            }
            Some(3) => self.client_loses_connection(),
            Some(4) => self.client_dies(),
            Some(5) => self.set_the_wall(),
            _ => {
                // The process does not run for a while; then everything is late at once.
                self.now_ms += self.rng.below(6_000);
                self.say(|| "stall".to_string());
                self.tick()
            }
        }
    }

    // --- the broker's life

    fn start(&mut self, after: Option<Crash>) -> Verdict {
        let mut after = after;
        let mut attempts = 0;
        loop {
            attempts += 1;
            self.now_ms += self.rng.below(300);
            if self.plan.power_cuts > 0 && !self.healed && self.rng.one_in(4) {
                let call = self.storage.calls() + self.rng.below(12);
                self.storage.fail_at(call, Fault::PowerOff);
            }
            let now = Now {
                mono_ms: 0,
                wall_ms: self.wall_ms(),
            };
            match Engine::open(self.storage.clone(), self.options.clone(), || now) {
                Ok((engine, writer, report)) => {
                    self.say(|| format!("the broker starts: {report:?}"));
                    engine.broker().assert_consistent();
                    if let Some(crash) = after {
                        self.checker
                            .recovered(crash, engine.broker(), self.time())?;
                    }
                    let started_ms = self.now_ms;
                    let reader = writer.reader();
                    let process = Process {
                        engine,
                        writer,
                        started_ms,
                        task: None,
                        task_is_done: false,
                        reader,
                        reads: None,
                        reads_are_done: false,
                    };
                    self.broker = Some(process);
                    return self.tend();
                }
                Err(OpenError::Io { .. } | OpenError::DiskFull { .. }) if attempts < 100 => {
                    if self.storage.is_dead() {
                        self.storage = self.storage.kill();
                        continue;
                    }
                    // The fault that was planned. Once it has met one, the power may as well be off.
                    self.storage = self.storage.crash(&mut self.rng);
                    after = after.map(|_| Crash::PowerCut);
                }
                Err(error) => return Err(format!("the journal can't be opened: {error}")),
            }
        }
    }

    fn crash(&mut self, crash: Crash) -> Verdict {
        self.say(|| format!("{crash:?}"));
        self.broker = None;
        self.storage = match crash {
            Crash::Killed | Crash::DiskFailed => self.storage.kill(),
            Crash::PowerCut => self.storage.crash(&mut self.rng),
        };
        for (conn, mut link) in std::mem::take(&mut self.links) {
            // What had reached the client's side is still read, or a part of it.
            let read = self.rng.below(link.to_client.len() as u64 + 1) as usize;
            link.to_client.truncate(read);
            let client = &mut self.clients[link.client];
            if client.conn == Some(conn) && client.stage != Stage::Dead {
                client.hears(&link.to_client, &mut self.told);
                client.disconnected();
            }
        }
        self.start(Some(crash))
    }

    /// What the shell does after each call: work for the disk, bytes for clients, ends of connections.
    fn tend(&mut self) -> Verdict {
        if self.broker.is_some() && self.storage.is_dead() {
            return self.crash(Crash::Killed);
        }
        loop {
            let now = self.now();
            let Some(process) = &mut self.broker else {
                return Ok(());
            };
            let mut idle = true;
            if process.task.is_none() {
                process.task = process.engine.take_batch(now);
                process.task_is_done = false;
                idle &= process.task.is_none();
            }
            if process.reads.is_none() {
                process.reads = process.engine.take_reads(now);
                process.reads_are_done = false;
                idle &= process.reads.is_none();
            }
            while let Some(conn) = process.engine.poll_transmit() {
                idle = false;
                let bytes = process.engine.outgoing(conn).to_vec();
                for byte in &bytes {
                    self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
                }
                self.checker.sent(conn, &bytes)?;
                if let Some(link) = self.links.get_mut(&conn) {
                    link.to_client.extend_from_slice(&bytes);
                }
                process.engine.transmitted(now, conn, bytes.len());
            }
            while let Some(conn) = process.engine.poll_close() {
                idle = false;
                self.checker.closed(conn)?;
                if let Some(link) = self.links.get_mut(&conn) {
                    link.broker_has_closed = true;
                }
            }
            if idle {
                break;
            }
        }
        let broker = self.broker.as_ref().map(|process| process.engine.broker());
        self.checker.end_of_call(broker)?;
        match self
            .broker
            .as_ref()
            .is_some_and(|process| process.engine.is_over())
        {
            true => self.crash(Crash::DiskFailed),
            false => Ok(()),
        }
    }

    fn disk_works(&mut self) -> Verdict {
        let now = self.now();
        let Some(process) = &mut self.broker else {
            return Ok(());
        };
        if process.reads.is_some() && (process.task.is_none() || self.rng.bool()) {
            return self.something_is_read();
        }
        let Some(task) = &process.task else {
            return Ok(());
        };
        if process.task_is_done {
            let task = process.task.take().expect("there is one");
            process.engine.batch_done(now, &task, 100);
            return self.tend();
        }
        let mut written = None;
        let done = task.carry_out(&mut process.writer, |through| written = Some(through));
        process.task_is_done = true;
        if let Some(through) = written {
            process.engine.batch_written(now, through);
        }
        match done {
            Ok(()) => {
                if self.rng.bool() {
                    self.prepare_spares();
                }
                let task = self
                    .broker
                    .as_ref()
                    .and_then(|process| process.task.as_ref());
                let words = task.map(crate::words::task);
                self.say(|| words.unwrap_or_default());
                self.tend()
            }
            Err(error @ WriteError::DiskFull { .. }) => {
                process.task_is_done = false;
                self.say(|| format!("the writer tries again later: {error}"));
                Ok(())
            }
            Err(_) if self.storage.is_dead() => self.crash(Crash::Killed),
            Err(error) if self.storage.is_off() => {
                self.say(|| format!("the power fails: {error}"));
                self.tend()?;
                self.crash(Crash::PowerCut)
            }
            Err(error) => {
                self.say(|| format!("the disk fails: {error}"));
                process_failed(&mut self.broker, now);
                self.tend()?;
                // Told or not, the process ends; sometimes with the machine.
                let crash = if self.rng.bool() {
                    Crash::DiskFailed
                } else {
                    Crash::PowerCut
                };
                self.crash(crash)
            }
        }
    }

    fn something_is_read(&mut self) -> Verdict {
        let now = self.now();
        let Some(process) = &mut self.broker else {
            return Ok(());
        };
        if process.reads_are_done {
            let reads = process.reads.take().expect("there are some");
            process.engine.reads_done(now, reads);
            return self.tend();
        }
        let reads = process.reads.as_mut().expect("there are some");
        reads.carry_out(&mut process.reader);
        process.reads_are_done = true;
        let words = self
            .trace
            .is_some()
            .then(|| format!("read back: {reads:?}"));
        self.say(|| words.unwrap_or_default());
        match (self.storage.is_dead(), self.storage.is_off()) {
            (true, _) => self.crash(Crash::Killed),
            (false, true) => self.crash(Crash::PowerCut),
            (false, false) => Ok(()),
        }
    }

    // --- time

    fn wall_ms(&self) -> u64 {
        (BEGINNING_MS + self.now_ms).saturating_add_signed(self.wall_ahead_ms)
    }

    fn time(&self) -> Time {
        Time {
            steady: BEGINNING_MS + self.now_ms,
            wall: self.wall_ms(),
        }
    }

    fn now(&self) -> Now {
        let started_ms = self
            .broker
            .as_ref()
            .map_or(self.now_ms, |process| process.started_ms);
        Now {
            mono_ms: self.now_ms - started_ms,
            wall_ms: self.wall_ms(),
        }
    }

    /// As a thread of its own does, at any time; until then the writer makes a segment when it needs one.
    fn prepare_spares(&mut self) {
        let now = self.now();
        if let Some(process) = &mut self.broker {
            let spares = process.writer.spares();
            let space = spares.space();
            while spares.wanted() && spares.prepare().is_ok() {}
            if spares.space() != space {
                process.engine.space_changed(now);
            }
        }
    }

    fn tick(&mut self) -> Verdict {
        self.checker.time(self.time());
        // A full disk says nothing when there is space again: it is tried every now and then.
        self.prepare_spares();
        let now = self.now();
        if let Some(process) = &mut self.broker {
            process.engine.tick(now);
        }
        self.tend()
    }

    /// Time goes by, and what is due is done when it is due. In a long while the network and the disk
    /// are calm.
    fn pass(&mut self, ms: u64) -> Verdict {
        let until_ms = self.now_ms + ms;
        let is_calm = ms > 100;
        self.say(|| format!("{ms} ms pass"));
        loop {
            if is_calm {
                self.calm_down()?;
            }
            let deadline_ms = self.broker.as_mut().and_then(|process| {
                let deadline_ms = process.engine.next_deadline_ms()?;
                Some(process.started_ms + deadline_ms)
            });
            let ping_ms = self
                .clients
                .iter()
                .filter(|client| client.stage == Stage::Open);
            let ping_ms = ping_ms
                .map(|client| client.said_at_ms + client.heartbeat_ms / 3)
                .min();
            if self.now_ms >= until_ms {
                return Ok(());
            }
            let next_ms = [deadline_ms, ping_ms]
                .into_iter()
                .flatten()
                .min()
                .unwrap_or(until_ms);
            self.now_ms = next_ms.max(self.now_ms + 1).min(until_ms);
            for index in 0..self.clients.len() {
                let client = &self.clients[index];
                if client.stage == Stage::Open
                    && self.now_ms >= client.said_at_ms + client.heartbeat_ms / 3
                {
                    self.send(index, Said::ping());
                }
            }
            if deadline_ms.is_some_and(|deadline_ms| deadline_ms <= self.now_ms) {
                self.tick()?;
            }
        }
    }

    /// Lets everything arrive that is on its way, and the disk do what it has to.
    fn calm_down(&mut self) -> Verdict {
        loop {
            let conns: Vec<ConnId> = self.links.keys().copied().collect();
            let mut is_still = true;
            for conn in conns {
                if self.links.get(&conn).is_some_and(Link::has_news_for_broker) {
                    is_still = false;
                    self.deliver_to_broker(conn, usize::MAX)?;
                }
                if self.links.get(&conn).is_some_and(Link::has_news_for_client) {
                    is_still = false;
                    self.deliver_to_client(conn, usize::MAX);
                }
            }
            if self
                .broker
                .as_ref()
                .is_some_and(|process| process.task.is_some() || process.reads.is_some())
            {
                is_still = false;
                self.disk_works()?;
            }
            if is_still {
                break;
            }
            self.heard_at_ms = self.now_ms;
        }
        // By then the journal has synced what nobody waited for.
        if self.now_ms >= self.heard_at_ms + 300 {
            self.checker.quiet()?;
        }
        Ok(())
    }

    fn set_the_wall(&mut self) -> Verdict {
        // Smaller ones are no steps.
        let by_ms = 200
            + match self.rng.below(3) {
                0 => self.rng.below(2_000) as i64,
                1 => self.rng.below(60_000) as i64,
                _ => self.rng.below(120_000) as i64,
            };
        let by_ms = if self.rng.bool() { by_ms } else { -by_ms };
        self.wall_ahead_ms += by_ms;
        self.wall_was_set_by_ms += by_ms.unsigned_abs();
        self.checker.wall_was_set = true;
        self.say(|| format!("the wall's clock is set by {by_ms} ms"));
        self.tick()
    }

    // --- the network

    fn connect(&mut self, index: usize) {
        self.connections += 1;
        let conn = ConnId(self.connections);
        let now = self.now();
        let Some(process) = &mut self.broker else {
            return;
        };
        process.engine.opened(now, conn, Peer::Trusted);
        let link = Link {
            client: index,
            to_broker: VecDeque::new(),
            said: VecDeque::new(),
            sent: 0,
            arrived: 0,
            to_client: Vec::new(),
            client_has_closed: false,
            broker_has_closed: false,
        };
        self.links.insert(conn, link);
        let hello = self.clients[index].hello(conn);
        self.send(index, hello);
    }

    fn send(&mut self, index: usize, said: Said) {
        let words = self.trace.is_some().then(|| said.in_words());
        if let Some(words) = words.filter(|words| words != "ping") {
            self.say(|| format!("client {index} says {words}"));
        }
        let client = &mut self.clients[index];
        client.said_at_ms = self.now_ms;
        let Some(link) = client.conn.and_then(|conn| self.links.get_mut(&conn)) else {
            return;
        };
        let bytes = said.encode();
        link.sent += bytes.len() as u64;
        link.to_broker.extend(&bytes);
        link.said.push_back((link.sent, said));
    }

    fn bytes_reach_broker(&mut self) -> Verdict {
        let Some(conn) = self.pick(Link::has_news_for_broker) else {
            return Ok(());
        };
        let bytes = if self.rng.one_in(3) {
            1 + self.rng.below(200)
        } else {
            u64::MAX
        };
        self.deliver_to_broker(conn, bytes as usize)
    }

    fn deliver_to_broker(&mut self, conn: ConnId, bytes: usize) -> Verdict {
        self.checker.time(self.time());
        let now = self.now();
        let (Some(process), Some(link)) = (&mut self.broker, self.links.get_mut(&conn)) else {
            return Ok(());
        };
        if !process.engine.takes_input() && !link.broker_has_closed {
            return Ok(());
        }
        let bytes: Vec<u8> = link
            .to_broker
            .drain(..bytes.min(link.to_broker.len()))
            .collect();
        if !link.broker_has_closed && !bytes.is_empty() {
            link.arrived += bytes.len() as u64;
            process.engine.received(now, conn, &bytes);
            while link
                .said
                .front()
                .is_some_and(|(end, _)| *end <= link.arrived)
                && let Some((_, said)) = link.said.pop_front()
            {
                self.checker.heard(conn, &said, process.engine.broker())?;
            }
        }
        if link.client_has_closed && link.to_broker.is_empty() {
            if !link.broker_has_closed {
                process.engine.closed(now, conn);
                self.checker.closed(conn)?;
            }
            self.links.remove(&conn);
        }
        self.heard_at_ms = self.now_ms;
        self.tend()
    }

    fn bytes_reach_client(&mut self) -> Verdict {
        let Some(conn) = self.pick(Link::has_news_for_client) else {
            return Ok(());
        };
        let bytes = if self.rng.one_in(3) {
            1 + self.rng.below(200)
        } else {
            u64::MAX
        };
        self.deliver_to_client(conn, bytes as usize);
        Ok(())
    }

    fn deliver_to_client(&mut self, conn: ConnId, bytes: usize) {
        let Some(link) = self.links.get_mut(&conn) else {
            return;
        };
        let bytes: Vec<u8> = link
            .to_client
            .drain(..bytes.min(link.to_client.len()))
            .collect();
        let (index, has_ended) = (
            link.client,
            link.broker_has_closed && link.to_client.is_empty(),
        );
        let client = &mut self.clients[index];
        let mut answers = Vec::new();
        if client.conn == Some(conn) && client.stage != Stage::Dead {
            answers = client.hears(&bytes, &mut self.told);
            if has_ended {
                client.disconnected();
            }
        }
        if has_ended {
            self.links.remove(&conn);
        }
        for said in answers {
            self.send(index, said);
        }
    }

    fn pick(&mut self, wanted: impl Fn(&Link) -> bool) -> Option<ConnId> {
        let conns: Vec<ConnId> = self
            .links
            .iter()
            .filter(|(_, link)| wanted(link))
            .map(|(conn, _)| *conn)
            .collect();
        (!conns.is_empty()).then(|| conns[self.rng.below(conns.len() as u64) as usize])
    }

    // --- clients

    fn client_acts(&mut self) -> Verdict {
        let index = self.rng.below(self.clients.len() as u64) as usize;
        match self.clients[index].stage {
            Stage::Offline => self.connect(index),
            Stage::Open => {
                let wall_ms = self.wall_ms();
                for said in self.clients[index].act(&mut self.rng, wall_ms) {
                    self.send(index, said);
                }
            }
            Stage::Greeting | Stage::Dead => {}
        }
        Ok(())
    }

    fn client_loses_connection(&mut self) -> Verdict {
        let index = self.rng.below(self.clients.len() as u64) as usize;
        let client = &mut self.clients[index];
        let Some(conn) = client.conn else {
            return Ok(());
        };
        match self.rng.below(4) {
            // In order.
            0 if client.stage == Stage::Open => {
                self.send(index, Said::goodbye());
                self.hang_up(index, conn, false);
            }
            // The broker will learn of it much later than of the next connection.
            1 => {
                self.say(|| format!("client {index} connects again"));
                self.clients[index].disconnected();
                self.connect(index);
            }
            _ => {
                let in_flight_is_lost = self.rng.bool();
                self.hang_up(index, conn, in_flight_is_lost);
            }
        }
        Ok(())
    }

    fn hang_up(&mut self, index: usize, conn: ConnId, in_flight_is_lost: bool) {
        self.say(|| format!("client {index} hangs up"));
        self.clients[index].disconnected();
        if let Some(link) = self.links.get_mut(&conn) {
            link.client_has_closed = true;
            link.to_client.clear();
            if in_flight_is_lost {
                link.to_broker.clear();
            }
        }
    }

    fn client_dies(&mut self) -> Verdict {
        // Somebody must be left to see the end.
        let index = 1 + self.rng.below(self.clients.len() as u64 - 1) as usize;
        self.say(|| format!("client {index} dies"));
        if let Some(conn) = self.clients[index].conn {
            // Half of the time nobody says so: the socket just stays silent.
            if self.rng.bool() {
                self.hang_up(index, conn, true);
            }
        }
        self.clients[index].stage = Stage::Dead;
        Ok(())
    }

    // --- the end

    /// All faults end; whoever lives comes back and finishes the work. Nothing may be left.
    fn heal(&mut self) -> Verdict {
        self.say(|| "all faults end".to_string());
        self.healed = true;
        self.storage.forget_faults();
        let began_ms = self.now_ms;
        let mut pause_ms = 50;
        let patience_ms = PATIENCE_MS + self.wall_was_set_by_ms;
        while self.now_ms < began_ms + patience_ms {
            self.steps += 1;
            for index in 0..self.clients.len() {
                match self.clients[index].stage {
                    Stage::Offline => self.connect(index),
                    Stage::Open => {
                        // A client may have resent what pauses a queue.
                        let paused = self.checker.model.paused.clone();
                        if !paused.is_empty() && self.clients[index].is_idle() {
                            let resume =
                                self.clients[index].resume(paused.into_iter(), &mut self.rng);
                            self.send(index, resume);
                        }
                        if let Some(said) = self.clients[index].finish(&mut self.rng) {
                            self.send(index, said);
                            pause_ms = 50;
                        }
                    }
                    Stage::Greeting | Stage::Dead => {}
                }
            }
            self.pass(101 + pause_ms)?;
            if self.is_drained() {
                // What nobody can know may still bring something to light.
                self.pass(60_000)?;
                if self.is_drained() {
                    return self.judge();
                }
            }
            // What is left waits for a time to come.
            pause_ms = (pause_ms * 2).min(30_000);
        }
        self.checker.drained()
    }

    fn is_drained(&self) -> bool {
        let is_done = |client: &Client| client.is_idle() || client.stage == Stage::Dead;
        self.clients.iter().all(is_done) && self.checker.drained().is_ok()
    }

    /// Asks for the result of everything.
    fn judge(&mut self) -> Verdict {
        let ids: Vec<Key> = self
            .checker
            .model
            .items
            .iter()
            .map(|item| Key::Result(item.message.id))
            .collect();
        self.told.clear();
        let index = self
            .clients
            .iter()
            .position(|client| client.stage == Stage::Open);
        let index = index.ok_or("nobody is connected in the end")?;
        let watch = self.clients[index].watch(ids.clone());
        self.send(index, watch);
        self.pass(1_000)?;
        for id in &ids {
            let mut states = self.told.iter().filter(|(key, _)| key == id);
            let (_, state) = states
                .next_back()
                .ok_or_else(|| format!("nobody was told of {id:?}"))?;
            self.checker.result_is_right(id, state)?;
        }
        Ok(())
    }

    /// After all that, a bit of the journal is turned over while no broker runs. The next start must
    /// refuse, or find all that was confirmed.
    fn rot(&mut self) -> Verdict {
        self.broker = None;
        self.storage = self.storage.kill();
        let files = self.storage.list().map_err(|error| error.to_string())?;
        let segments = files.iter().filter(|name| name.ends_with(".segment"));
        let segments: Vec<String> = segments.cloned().collect();
        // Most often the last one, which has no successor to prove it whole.
        let behind = self.rng.below(4).saturating_sub(2) as usize;
        let name = &segments[(segments.len() - 1).saturating_sub(behind)];
        let mut bytes = self.storage.contents(name).unwrap_or_default();
        let used: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
        let at = used[self.rng.below(used.len() as u64) as usize];
        bytes[at] ^= 1 << self.rng.below(8);
        self.storage.corrupt(name, bytes);
        self.say(|| format!("a bit rots at byte {at} of {name}"));
        let now = self.now();
        match Engine::open(self.storage.clone(), self.options.clone(), || now) {
            Ok((engine, ..)) => {
                let (crash, time) = (Crash::Killed, self.time());
                self.checker.recovered(crash, engine.broker(), time)
            }
            Err(error) => {
                self.say(|| format!("it is refused: {error}"));
                Ok(())
            }
        }
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            for words in self.checker.words.replace(Vec::new()).unwrap_or_default() {
                trace(&format!("                          {words}"));
            }
            trace(&format!(
                "{:>6} {:>9} ms  {}",
                self.steps,
                self.now_ms,
                what()
            ));
        }
    }
}

fn process_failed(broker: &mut Option<Process>, now: Now) {
    if let Some(process) = broker {
        process.engine.disk_failed(now);
    }
}

impl Link {
    fn has_news_for_broker(&self) -> bool {
        !self.to_broker.is_empty() || self.client_has_closed
    }

    fn has_news_for_client(&self) -> bool {
        !self.client_has_closed && (!self.to_client.is_empty() || self.broker_has_closed)
    }
}
