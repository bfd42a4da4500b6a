//! One simulated run: a clock, a disk, a network, clients, and a broker that dies now and then.
//!
//! Everything is drawn from one seed and done in one thread, so a seed is a run. The broker is the
//! server's own engine: the world is its shell, and does what the shell does with sockets and threads.

use std::collections::{BTreeMap, BTreeSet};

use penstock_broker::{BrokerOptions, ConnId, Now};
use penstock_journal::sim::{Fault, Rng, SimStorage};
use penstock_journal::{JournalOptions, OpenError, Reader, Storage, WriteError, Writer};
use penstock_message::{Durability, Key, KeyState, SessionId};
use penstock_server::{Engine, EngineOptions, Peer, ReadTask, WriterTask};

use crate::checker::{Checker, Counts, Crash};
use crate::client::{Client, Stage};
use crate::model::{Time, Verdict};
use crate::network::{Line, Link};
use crate::process::Process;
use crate::said::Hearing;
use crate::wild::Wild;
use crate::words;
use crate::work::{Habits, QUEUES};

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
pub const NAMES: [&str; 14] = [
    FAULT_POINTS,
    "kills",
    "power cuts",
    "disk errors",
    "lost connections",
    "poor lines",
    "deaths",
    "clock steps",
    "clock jumps",
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
    clock_jumps: u64,
    stalls: u64,
    /// One in so many connections is poor: half-open sooner or later, or a trickle.
    poor_lines: u64,
    /// A broker that died is started by the next client that connects.
    starts_on_demand: bool,
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
    broker: Option<Life>,
    /// How the last one ended, until the next is there.
    ended: Option<Crash>,
    links: BTreeMap<ConnId, Link>,
    connections: u64,
    /// The first one never dies, and is spoken to in person at the end.
    seats: Vec<Seat>,
    habits: Habits,
    checker: Checker,
    healed: bool,
    /// When the broker last heard anything.
    heard_at_ms: u64,
}

/// A client, or one after another.
struct Seat {
    client: Box<dyn Client>,
    conn: Option<ConnId>,
}

/// A broker's life.
struct Life {
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

impl<'a> World<'a> {
    fn new(seed: u64, trace: Option<&'a mut dyn FnMut(&str)>) -> Self {
        let mut rng = Rng::new(seed);
        let fault = |rng: &mut Rng, weight: u64| if rng.one_in(2) { weight } else { 0 };
        let plan = Plan {
            // Most bugs need little to show, and there is more luck in many runs than in long ones.
            steps: match rng.below(128) {
                0 => 5_000 + rng.below(2_000),
                1..32 => 200 + rng.below(600),
                _ => 100 + rng.below(250),
            },
            kills: fault(&mut rng, 4),
            power_cuts: fault(&mut rng, 6),
            disk_errors: fault(&mut rng, 2),
            disconnects: fault(&mut rng, 10),
            deaths: fault(&mut rng, 2),
            clock_steps: if rng.one_in(4) { 3 } else { 0 },
            clock_jumps: if rng.one_in(8) { 2 } else { 0 },
            stalls: fault(&mut rng, 3),
            poor_lines: if rng.one_in(3) { 1 + rng.below(6) } else { 0 },
            starts_on_demand: rng.one_in(3),
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
        let mut world = Self {
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
            ended: None,
            links: BTreeMap::new(),
            connections: 0,
            seats: Vec::new(),
            habits,
            checker: Checker::new(is_read_along),
            healed: false,
            heard_at_ms: 0,
        };
        for index in 0..2 + world.rng.below(5) {
            let client = world.new_client(index as usize);
            world.seats.push(Seat { client, conn: None });
        }
        world
    }

    /// Whoever is first in this seat, or takes it after a death.
    fn new_client(&mut self, seat: usize) -> Box<dyn Client> {
        let time = self.time();
        let rng = &mut self.rng;
        let mut session = [0; 16];
        session[0] = seat as u8;
        session[8..].copy_from_slice(&rng.draw().to_le_bytes());
        let session = SessionId(session);
        let heartbeat_ms = 300 + rng.below(3_000);
        let all = QUEUES.iter().map(|queue| (*queue).to_string());
        let mut queues: Vec<String> = all.filter(|_| rng.below(3) > 0).collect();
        let takes_dead = rng.one_in(3);
        let is_wild = seat == 0 || rng.bool();
        if queues.is_empty() {
            queues.push(QUEUES[0].to_string());
        }
        // No worker runs dead letters; an operator's hand may.
        if takes_dead && is_wild {
            queues.push("dead".to_string());
        }
        let habits = Habits {
            queues,
            publishes: seat == 0 || rng.below(3) > 0,
            consumes: seat == 1 || rng.below(3) > 0,
            ..self.habits.clone()
        };
        match is_wild {
            true => Box::new(Wild::new(session, heartbeat_ms, habits)),
            false => {
                let slots = 1 + rng.below(4) as usize;
                Box::new(Process::new(session, heartbeat_ms, slots, habits, time))
            }
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
                "poor lines" => plan.poor_lines = 0,
                "deaths" => plan.deaths = 0,
                "clock steps" => plan.clock_steps = 0,
                "clock jumps" => plan.clock_jumps = 0,
                "stalls" => plan.stalls = 0,
                habit => {
                    self.habits.drop(habit);
                    for seat in &mut self.seats {
                        seat.client.drop_habit(habit);
                    }
                }
            }
        }
        plan.steps = without.steps.unwrap_or(plan.steps);
        let left = self.seats.len().saturating_sub(without.clients).max(2);
        self.seats.truncate(left);
    }

    fn live(&mut self) -> Verdict {
        self.start()?;
        for _ in 0..self.plan.steps {
            self.steps += 1;
            self.step()?;
        }
        self.heal()?;
        match self.rng.bool() {
            true => self.rot(),
            false => self.leave_nothing(),
        }
    }

    fn step(&mut self) -> Verdict {
        let plan = &self.plan;
        let faults = [
            plan.kills,
            plan.power_cuts,
            plan.disk_errors,
            plan.disconnects,
            plan.deaths,
            plan.clock_steps,
            plan.clock_jumps,
            plan.stalls,
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
            Some(5) => {
                // Smaller ones are no steps.
                let by_ms = 200
                    + match self.rng.below(3) {
                        0 => self.rng.below(2_000),
                        1 => self.rng.below(60_000),
                        _ => self.rng.below(120_000),
                    };
                self.set_the_wall(by_ms)
            }
            Some(6) => {
                const HOUR_MS: u64 = 3_600_000;
                let by_ms = match self.rng.below(3) {
                    0 => self.rng.below(12 * HOUR_MS),
                    1 => self.rng.below(60 * 24 * HOUR_MS),
                    _ => 30 * 365 * 24 * HOUR_MS,
                };
                self.set_the_wall(by_ms)
            }
            _ => {
                // The process does not run for a while; then everything is late at once.
                self.now_ms += self.rng.below(6_000);
                self.say(|| "stall".to_string());
                self.tick()
            }
        }
    }

    // --- the broker's life

    fn start(&mut self) -> Verdict {
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
                    if let Some(crash) = self.ended.take() {
                        let (broker, time) = (engine.broker(), self.time());
                        self.checker
                            .recovered(crash, broker, time, report.through)?;
                    }
                    let started_ms = self.now_ms;
                    let reader = writer.reader();
                    let life = Life {
                        engine,
                        writer,
                        started_ms,
                        task: None,
                        task_is_done: false,
                        reader,
                        reads: None,
                        reads_are_done: false,
                    };
                    self.broker = Some(life);
                    return self.tend();
                }
                Err(OpenError::Io { .. } | OpenError::DiskFull { .. }) if attempts < 100 => {
                    if self.storage.is_dead() {
                        self.storage = self.storage.kill();
                        continue;
                    }
                    // The fault that was planned. Once it has met one, the power may as well be off.
                    self.storage = self.storage.crash(&mut self.rng);
                    self.ended = self.ended.map(|_| Crash::PowerCut);
                }
                Err(error) => return Err(format!("the journal can't be opened: {error}")),
            }
        }
    }

    fn crash(&mut self, crash: Crash) -> Verdict {
        if self.broker.is_none() {
            return Ok(());
        }
        self.say(|| format!("{crash:?}"));
        self.broker = None;
        self.ended = Some(crash);
        self.storage = match crash {
            Crash::Killed | Crash::DiskFailed => self.storage.kill(),
            Crash::PowerCut => self.storage.crash(&mut self.rng),
        };
        let time = self.time();
        for (conn, mut link) in std::mem::take(&mut self.links) {
            // What had reached the client's side is still read, or a part of it.
            let read = self.rng.below(link.to_client.len() as u64 + 1) as usize;
            let bytes: Vec<u8> = link.to_client.drain(..read).collect();
            let seat = &mut self.seats[link.seat];
            if seat.conn == Some(conn) {
                if seat.client.stage() != Stage::Dead {
                    seat.client.hears(&mut self.rng, time, &bytes);
                }
                seat.client.disconnected();
                seat.conn = None;
            }
        }
        match self.plan.starts_on_demand && !self.healed {
            true => Ok(()),
            false => self.start(),
        }
    }

    /// What the shell does after each call: work for the disk, bytes for clients, ends of connections.
    fn tend(&mut self) -> Verdict {
        if self.broker.is_some() && self.storage.is_dead() {
            return self.crash(Crash::Killed);
        }
        loop {
            let now = self.now();
            let Some(life) = &mut self.broker else {
                return Ok(());
            };
            let mut idle = true;
            if life.task.is_none() {
                life.task = life.engine.take_batch(now);
                life.task_is_done = false;
                idle &= life.task.is_none();
            }
            if life.reads.is_none() {
                life.reads = life.engine.take_reads(now);
                life.reads_are_done = false;
                idle &= life.reads.is_none();
            }
            if let Some(conn) = life.engine.poll_transmit() {
                self.transmit(conn)?;
                continue;
            }
            while let Some(conn) = life.engine.poll_close() {
                idle = false;
                self.checker.closed(conn)?;
                if let Some(link) = self.links.get_mut(&conn) {
                    link.broker_has_closed = true;
                    link.to_broker.clear();
                    if link.client_has_closed {
                        self.links.remove(&conn);
                    }
                }
            }
            if idle {
                break;
            }
        }
        let broker = self.broker.as_ref().map(|life| life.engine.broker());
        self.checker.end_of_call(broker)?;
        match self
            .broker
            .as_ref()
            .is_some_and(|life| life.engine.is_over())
        {
            true => self.crash(Crash::DiskFailed),
            false => Ok(()),
        }
    }

    /// Sends what a connection has to send, as far as its socket has room.
    fn transmit(&mut self, conn: ConnId) -> Verdict {
        let now = self.now();
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        let waiting = life.engine.outgoing(conn);
        let room = self.links.get(&conn).map_or(usize::MAX, Link::room);
        let bytes = waiting[..waiting.len().min(room)].to_vec();
        for byte in &bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        if let Some(link) = self.links.get_mut(&conn) {
            link.is_full = bytes.len() < waiting.len();
            link.broker_sends(&bytes);
        }
        self.checker.sent(conn, &bytes)?;
        life.engine.transmitted(now, conn, bytes.len());
        Ok(())
    }

    fn disk_works(&mut self) -> Verdict {
        let now = self.now();
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        if life.reads.is_some() && (life.task.is_none() || self.rng.bool()) {
            return self.something_is_read();
        }
        let Some(task) = &life.task else {
            return Ok(());
        };
        if life.task_is_done {
            let task = life.task.take().expect("there is one");
            life.engine.batch_done(now, &task, 100);
            return self.tend();
        }
        let mut written = None;
        let done = task.carry_out(&mut life.writer, |through| written = Some(through));
        life.task_is_done = true;
        if let Some(through) = written {
            life.engine.batch_written(now, through);
        }
        match done {
            Ok(()) => {
                if self.rng.bool() {
                    self.prepare_spares();
                }
                if self.trace.is_some() {
                    let task = self.broker.as_ref().and_then(|life| life.task.as_ref());
                    let words = task.map(words::task);
                    self.say(|| words.unwrap_or_default());
                }
                self.tend()
            }
            Err(error @ WriteError::DiskFull { .. }) => {
                life.task_is_done = false;
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
                life.engine.disk_failed(now);
                self.say(|| format!("the disk fails: {error}"));
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
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        if life.reads_are_done {
            let reads = life.reads.take().expect("there are some");
            life.engine.reads_done(now, reads);
            return self.tend();
        }
        let reads = life.reads.as_mut().expect("there are some");
        reads.carry_out(&mut life.reader);
        life.reads_are_done = true;
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
            .map_or(self.now_ms, |life| life.started_ms);
        Now {
            mono_ms: self.now_ms - started_ms,
            wall_ms: self.wall_ms(),
        }
    }

    /// As a thread of its own does, at any time; until then the writer makes a segment when it needs one.
    fn prepare_spares(&mut self) {
        let now = self.now();
        if let Some(life) = &mut self.broker {
            let spares = life.writer.spares();
            let space = spares.space();
            while spares.wanted() && spares.prepare().is_ok() {}
            if spares.space() != space {
                life.engine.space_changed(now);
            }
        }
    }

    fn tick(&mut self) -> Verdict {
        self.checker.time(self.time());
        // A full disk says nothing when there is space again: it is tried every now and then.
        self.prepare_spares();
        let now = self.now();
        if let Some(life) = &mut self.broker {
            life.engine.tick(now);
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
            let broker_ms = self.broker.as_mut().and_then(|life| {
                let deadline_ms = life.engine.next_deadline_ms()?;
                Some(life.started_ms + deadline_ms)
            });
            if self.now_ms >= until_ms {
                return Ok(());
            }
            let clients = self
                .seats
                .iter()
                .filter_map(|seat| seat.client.next_deadline_ms());
            let client_ms = clients.min().map(|at| at.saturating_sub(BEGINNING_MS));
            let next_ms = [broker_ms, client_ms].into_iter().flatten().min();
            let next_ms = next_ms.unwrap_or(until_ms);
            self.now_ms = next_ms.max(self.now_ms + 1).min(until_ms);
            let time = self.time();
            for index in 0..self.seats.len() {
                let client = &mut self.seats[index].client;
                let is_due = client
                    .next_deadline_ms()
                    .is_some_and(|at| at <= time.steady);
                if is_due {
                    let goes_on = client.tick(&mut self.rng, time);
                    self.let_speak(index);
                    self.hang_up_unless(goes_on, index);
                }
            }
            if broker_ms.is_some_and(|broker_ms| broker_ms <= self.now_ms) {
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
                    self.deliver_to_client(conn, usize::MAX)?;
                }
            }
            if self
                .broker
                .as_ref()
                .is_some_and(|life| life.task.is_some() || life.reads.is_some())
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
        if let Some(life) = &self.broker
            && self.now_ms >= self.heard_at_ms + 300
        {
            self.checker.quiet(life.engine.broker())?;
        }
        Ok(())
    }

    fn set_the_wall(&mut self, by_ms: u64) -> Verdict {
        let by_ms = by_ms as i64;
        let by_ms = if self.rng.bool() { by_ms } else { -by_ms };
        self.wall_ahead_ms += by_ms;
        self.wall_was_set_by_ms += by_ms.unsigned_abs();
        self.checker.wall_was_set(by_ms.unsigned_abs());
        self.say(|| format!("the wall's clock is set by {by_ms} ms"));
        self.tick()
    }

    // --- the network

    /// This client connects; where nobody else does, it starts the broker.
    fn connect(&mut self, index: usize) -> Verdict {
        if self.broker.is_none() {
            self.start()?;
        }
        self.connections += 1;
        let conn = ConnId(self.connections);
        let (now, time) = (self.now(), self.time());
        let line = self.draw_line();
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        life.engine.opened(now, conn, Peer::Trusted);
        self.links.insert(conn, Link::new(index, line));
        let seat = &mut self.seats[index];
        seat.conn = Some(conn);
        seat.client.connected(time);
        self.let_speak(index);
        Ok(())
    }

    fn draw_line(&mut self) -> Line {
        if self.plan.poor_lines == 0 || self.healed || !self.rng.one_in(self.plan.poor_lines) {
            return Line::Good;
        }
        Line::Trickle
    }

    /// What a client has said is on its way.
    fn let_speak(&mut self, index: usize) {
        let time = self.time();
        let seat = &mut self.seats[index];
        let bytes = seat.client.take_out(time);
        let Some(link) = seat.conn.and_then(|conn| self.links.get_mut(&conn)) else {
            return;
        };
        if bytes.is_empty() {
            return;
        }
        link.client_sends(&bytes);
        if self.trace.is_some() {
            let mut hearing = Hearing::default();
            hearing.extend(&bytes);
            while let Ok(Some(said)) = hearing.next_said() {
                let words = said.in_words();
                if words != "ping" {
                    self.say(|| format!("client {index} says {words}"));
                }
            }
        }
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
        let (Some(life), Some(link)) = (&mut self.broker, self.links.get_mut(&conn)) else {
            return Ok(());
        };
        if !life.engine.takes_input() && !link.broker_has_closed {
            return Ok(());
        }
        let bytes = bytes.min(link.to_broker.len());
        let bytes: Vec<u8> = link.to_broker.drain(..bytes).collect();
        if !link.broker_has_closed {
            let at_once = match link.line {
                Line::Trickle => 1,
                _ => bytes.len().max(1),
            };
            for bytes in bytes.chunks(at_once) {
                life.engine.received(now, conn, bytes);
                self.checker.heard(conn, bytes, life.engine.broker())?;
            }
        }
        let has_ended = link.client_has_closed && link.reaches_broker();
        if has_ended && link.to_broker.is_empty() {
            if !link.broker_has_closed {
                life.engine.closed(now, conn);
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
        self.deliver_to_client(conn, bytes as usize)
    }

    fn deliver_to_client(&mut self, conn: ConnId, bytes: usize) -> Verdict {
        let time = self.time();
        let Some(link) = self.links.get_mut(&conn) else {
            return Ok(());
        };
        let bytes = bytes.min(link.to_client.len());
        let bytes: Vec<u8> = link.to_client.drain(..bytes).collect();
        let at_once = match link.line {
            Line::Trickle => 1,
            _ => bytes.len().max(1),
        };
        let index = link.seat;
        let has_room_again = std::mem::take(&mut link.is_full) && !link.broker_has_closed;
        let has_ended = link.broker_has_closed && link.to_client.is_empty();
        let seat = &mut self.seats[index];
        if seat.conn == Some(conn) && seat.client.stage() != Stage::Dead {
            let mut goes_on = true;
            for bytes in bytes.chunks(at_once) {
                goes_on &= seat.client.hears(&mut self.rng, time, bytes);
            }
            if has_ended {
                seat.client.disconnected();
                seat.conn = None;
            }
            self.let_speak(index);
            self.hang_up_unless(goes_on, index);
        }
        if has_ended {
            self.links.remove(&conn);
        }
        if has_room_again {
            self.transmit(conn)?;
            return self.tend();
        }
        Ok(())
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
        let index = self.rng.below(self.seats.len() as u64) as usize;
        match self.seats[index].client.stage() {
            Stage::Offline => return self.connect(index),
            Stage::Open => {
                let time = self.time();
                self.seats[index].client.act(&mut self.rng, time);
                self.let_speak(index);
            }
            // A program does not wait for its connection before it asks for something.
            Stage::Greeting => {}
            Stage::Dead => {
                if self.rng.one_in(8) {
                    self.say(|| format!("client {index} is a new one"));
                    self.seats[index].client = self.new_client(index);
                    self.seats[index].conn = None;
                }
            }
        }
        Ok(())
    }

    fn client_loses_connection(&mut self) -> Verdict {
        let index = self.rng.below(self.seats.len() as u64) as usize;
        let seat = &mut self.seats[index];
        let Some(conn) = seat.conn else {
            return Ok(());
        };
        match self.rng.below(6) {
            // In order.
            0 if seat.client.stage() == Stage::Open => {
                if let Some(wild) = seat.client.as_wild() {
                    wild.say_goodbye();
                }
                self.let_speak(index);
                self.hang_up(index, conn, false);
            }
            // The broker will learn of it much later than of the next connection.
            1 => {
                self.say(|| format!("client {index} connects again"));
                self.seats[index].client.disconnected();
                return self.connect(index);
            }
            // From now on bytes are lost, this way or that or both, and nobody is told.
            2 | 3 => {
                let (to_broker, to_client) = match self.rng.below(3) {
                    0 => (false, false),
                    1 => (true, false),
                    _ => (false, true),
                };
                self.say(|| format!("client {index}: to the broker {to_broker}, back {to_client}"));
                if let Some(link) = self.links.get_mut(&conn) {
                    link.breaks(to_broker, to_client);
                }
            }
            _ => {
                let in_flight_is_lost = self.rng.bool();
                self.hang_up(index, conn, in_flight_is_lost);
            }
        }
        Ok(())
    }

    fn hang_up_unless(&mut self, goes_on: bool, index: usize) {
        if !goes_on && let Some(conn) = self.seats[index].conn {
            self.hang_up(index, conn, false);
        }
    }

    fn hang_up(&mut self, index: usize, conn: ConnId, in_flight_is_lost: bool) {
        self.say(|| format!("client {index} hangs up"));
        self.seats[index].client.disconnected();
        self.seats[index].conn = None;
        if let Some(link) = self.links.get_mut(&conn) {
            link.client_has_closed = true;
            link.to_client.clear();
            if in_flight_is_lost {
                link.to_broker.clear();
            }
            if link.broker_has_closed {
                self.links.remove(&conn);
            }
        }
    }

    fn client_dies(&mut self) -> Verdict {
        // Somebody must be left to see the end.
        let index = 1 + self.rng.below(self.seats.len() as u64 - 1) as usize;
        self.say(|| format!("client {index} dies"));
        if let Some(conn) = self.seats[index].conn {
            // Half of the time nobody says so: the socket just stays silent.
            if self.rng.bool() {
                self.hang_up(index, conn, true);
            }
        }
        self.seats[index].client.die();
        Ok(())
    }

    // --- the end

    /// All faults end; whoever lives comes back and finishes the work. Nothing may be left.
    fn heal(&mut self) -> Verdict {
        self.say(|| "all faults end".to_string());
        self.healed = true;
        self.storage.forget_faults();
        if self.plan.clock_jumps > 0 {
            // What is due at a time of day may be due in thirty years; by then it is.
            let ahead_ms = 31 * 365 * 24 * 3_600_000;
            let by_ms = self.wall_ahead_ms.min(0).abs() + ahead_ms;
            self.wall_ahead_ms += by_ms;
            self.checker.wall_was_set(by_ms.unsigned_abs());
            self.tick()?;
        }
        let began_ms = self.now_ms;
        let mut pause_ms = 50;
        let patience_ms = PATIENCE_MS + self.wall_was_set_by_ms.min(4 * 3_600_000);
        while self.now_ms < began_ms + patience_ms {
            self.steps += 1;
            for index in 0..self.seats.len() {
                match self.seats[index].client.stage() {
                    Stage::Offline => self.connect(index)?,
                    Stage::Open => {
                        let paused = &self.checker.model.paused;
                        // A client may have resent what pauses a queue.
                        if index == 0 && !paused.is_empty() && self.seats[0].client.is_idle() {
                            let paused = paused.clone().into_iter();
                            if let Some(wild) = self.seats[0].client.as_wild() {
                                wild.resume(paused, &mut self.rng);
                            }
                        }
                        let time = self.time();
                        self.seats[index].client.finish(&mut self.rng, time);
                        self.let_speak(index);
                    }
                    Stage::Greeting | Stage::Dead => {}
                }
            }
            let before = self.checker.counts.applied;
            self.pass(101 + pause_ms)?;
            if self.is_drained() {
                // What nobody can know may still bring something to light.
                self.pass(60_000)?;
                if self.is_drained() {
                    return self.judge();
                }
            }
            // What is left waits for a time to come.
            pause_ms = match self.checker.counts.applied == before {
                true => (pause_ms * 2).min(30_000),
                false => 50,
            };
        }
        self.checker.drained()?;
        if self.checker.model.clock_is_doubtful {
            // It counts down from hours later, and whoever waits for it waits so long.
            return Ok(());
        }
        Err("somebody still waits for something in the end".to_string())
    }

    fn is_drained(&self) -> bool {
        let is_done = |seat: &Seat| seat.client.is_idle() || seat.client.stage() == Stage::Dead;
        self.seats.iter().all(is_done)
            && self.checker.model.paused.is_empty()
            && self.checker.drained().is_ok()
    }

    /// Asks for the result of everything, and then sees that nothing is left behind.
    fn judge(&mut self) -> Verdict {
        let ids: Vec<Key> = self
            .checker
            .model
            .items
            .iter()
            .map(|item| Key::Result(item.message.id))
            .collect();
        if let Some(wild) = self.seats[0].client.as_wild() {
            wild.watch(ids.clone());
        }
        self.let_speak(0);
        self.pass(1_000)?;
        let told = match self.seats[0].client.as_wild() {
            Some(wild) => std::mem::take(&mut wild.told),
            None => Vec::new(),
        };
        let told: BTreeMap<Key, KeyState> = told.into_iter().collect();
        for id in &ids {
            let state = told
                .get(id)
                .ok_or_else(|| format!("nobody was told of {id:?}"))?;
            self.checker.result_is_right(id, state)?;
        }
        Ok(())
    }

    /// Everybody goes, and every time is up: whatever the broker counts is zero again.
    fn leave_nothing(&mut self) -> Verdict {
        const TWO_DAYS_MS: u64 = 2 * 24 * 3_600_000;
        const DEAD_LETTERS_KEPT_MS: u64 = 31 * 24 * 3_600_000;
        for index in 0..self.seats.len() {
            if let Some(conn) = self.seats[index].conn {
                self.hang_up(index, conn, false);
            }
            self.seats[index].client.die();
        }
        let held = |world: &Self| {
            let held = world.checker.model.items.iter();
            held.filter(|item| matches!(item.state, crate::model::State::Held(_)))
                .count()
        };
        self.pass(TWO_DAYS_MS)?;
        self.pass(DEAD_LETTERS_KEPT_MS)?;
        let held = held(self);
        let Some(life) = &self.broker else {
            return Err("the broker has ended by itself".to_string());
        };
        life.engine.broker().assert_consistent();
        match self.checker.model.clock_is_doubtful {
            true => Ok(()),
            false => self.checker.nothing_is_left(life.engine.broker(), held),
        }
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
            Ok((engine, _, report)) => {
                let (crash, time) = (Crash::Killed, self.time());
                let through = report.through;
                self.checker
                    .recovered(crash, engine.broker(), time, through)
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
