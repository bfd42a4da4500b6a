//! A simulated run: a clock, a disk, a network, clients, and a broker that dies now and then.
//!
//! Everything is drawn from one seed and done in one thread, so a seed is a run. The broker is the server's own engine.
//! The world is its shell, and does what the real shell does with sockets and threads.

use std::collections::{BTreeMap, BTreeSet};

use penstock_broker::{BrokerOptions, ConnId};
use penstock_journal::JournalOptions;
use penstock_journal::sim::{Fault, Rng, SimStorage};
use penstock_message::{Durability, SessionId};
use penstock_server::EngineOptions;

use crate::checker::{Checker, Counts, Crash};
use crate::client::Client;
use crate::model::Verdict;
use crate::network::Link;
use crate::process::Process;
use crate::wild::Wild;
use crate::work::{Habits, QUEUES, TASKS};

mod clocks;
mod ending;
mod life;
mod lines;
mod people;

use life::Life;

/// Time at which the world begins, on all clocks.
const BEGINNING_MS: u64 = 1_800_000_000_000;

/// Outcome of a seed.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Failure, and the step at which it occurred.
    pub failure: Option<String>,
    /// Hash of all frames and decisions: the same seed must give the same hash.
    pub hash: u64,
    pub steps: u64,
    pub counts: Counts,
}

/// Parts that a run omits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Without {
    /// Names of faults, habits and [`FAULT_POINTS`], and numbers of clients.
    pub names: BTreeSet<&'static str>,
    pub clients: usize,
    /// Number of steps; `None`: the number that was drawn.
    pub steps: Option<u64>,
}

pub const FAULT_POINTS: &str = "fault points";

/// Names of parts that a run can omit.
pub const NAMES: [&str; 24] = [
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
    "clock steps while down",
    "delays",
    "groups",
    "locks",
    "purges",
    "cancels",
    "cancels of many",
    "crowds",
    "trees",
    "replaced jobs",
    "few failed jobs",
    "unique keys",
    "schedules",
    "few slots",
];

/// Runs one seed. `trace` receives each step, in words for people.
pub fn run(seed: u64, trace: Option<&mut dyn FnMut(&str)>) -> Outcome {
    run_without(seed, &Without::default(), trace)
}

/// Runs one seed, without some of its parts.
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

/// Sets the fault points inside the product: none of them, or some, at a low or a high rate. Uses a separate generator,
/// so that a seed stays nearly the same run without them.
#[cfg(feature = "faults")]
fn make_rare_things_frequent(seed: u64, never: bool) {
    let mut rng = Rng::new(!seed);
    let is_calm = rng.one_in(4) || never;
    let enabled = if is_calm { 0 } else { rng.draw() as u32 };
    let one_in = [3, 20, 100][rng.below(3) as usize];
    penstock_faults::Points::begin(rng.draw(), enabled, one_in);
}

/// Draws how many failed jobs are kept, and for how long: the usual number in most runs, a few in others. Uses a
/// separate generator, so that a seed stays nearly the same run with the usual limits.
fn failed_jobs_limits(seed: u64) -> BrokerOptions {
    let mut rng = Rng::new(seed.rotate_left(32));
    let mut options = BrokerOptions::default();
    if rng.one_in(4) {
        if rng.bool() {
            options.failed_kept = rng.below(8);
        }
        if rng.bool() {
            options.failed_kept_bytes = rng.below(4_000);
        }
        if rng.bool() {
            options.failed_kept_ms = rng.below(20_000);
        }
    }
    options
}

/// Draws whether all jobs of a task or a queue are cancelled now and then, from a separate generator.
fn cancels_many(seed: u64) -> bool {
    Rng::new(seed.rotate_left(16)).one_in(4)
}

/// Draws whether somebody sets the wall clock while no broker runs, from a separate generator.
fn sets_clock_while_down(seed: u64) -> bool {
    Rng::new(seed.rotate_left(40)).one_in(4)
}

/// Draws whether clients publish trees of steps, from a separate generator.
fn builds_trees(seed: u64) -> bool {
    Rng::new(seed.rotate_left(8)).one_in(3)
}

/// Draws whether steps take the place of running jobs, from a separate generator.
fn replaces_jobs(seed: u64) -> bool {
    Rng::new(seed.rotate_left(24)).one_in(3)
}

/// Draws whether some messages are unique, from a separate generator.
fn claims_keys(seed: u64) -> bool {
    Rng::new(seed.rotate_left(40)).one_in(4)
}

/// Draws whether there are schedules, from a separate generator.
fn has_schedules(seed: u64) -> bool {
    Rng::new(seed.rotate_left(48)).one_in(4)
}

/// Draws whether most jobs wait for others in slots that can't be lent, from a separate generator.
fn is_short_of_slots(seed: u64) -> bool {
    Rng::new(seed.rotate_left(56)).one_in(12)
}

/// Plan of a run. Most seeds omit most faults, so that each is tested in depth.
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
    clock_steps_while_down: u64,
    /// Number of connections per poor one, which is half-open sooner or later, or a trickle; 0: none is poor.
    poor_lines: u64,
    /// Whether the next client that connects restarts a dead broker.
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
    /// Number of the machine's boots, and the time of the last.
    boots: u8,
    booted_ms: u64,
    wall_ahead_ms: i64,
    /// Maximum that the wall clock has ever been ahead: somebody may have named a time that was near then.
    wall_farthest_ahead_ms: i64,
    /// Sum of the steps of the wall clock, in both directions.
    wall_was_set_by_ms: u64,
    storage: SimStorage,
    options: EngineOptions,
    broker: Option<Life>,
    /// End of the last broker, until the next one runs.
    ended: Option<Crash>,
    links: BTreeMap<ConnId, Link>,
    connections: u64,
    /// Clients. The first one never dies, and asks the questions at the end.
    seats: Vec<Seat>,
    habits: Habits,
    checker: Checker,
    healed: bool,
    /// Time at which the broker last received anything.
    heard_at_ms: u64,
}

/// Place for a client, or several in succession.
struct Seat {
    client: Box<dyn Client>,
    conn: Option<ConnId>,
}

impl<'a> World<'a> {
    fn new(seed: u64, trace: Option<&'a mut dyn FnMut(&str)>) -> Self {
        let mut rng = Rng::new(seed);
        let fault = |rng: &mut Rng, weight: u64| if rng.one_in(2) { weight } else { 0 };
        let plan = Plan {
            // Most bugs need few steps, and many runs find more than long ones.
            steps: match rng.below(128) {
                0 => 5_000 + rng.below(2_000),
                1..32 => 200 + rng.below(600),
                _ => 100 + rng.below(250),
            },
            kills: fault(&mut rng, 7),
            power_cuts: fault(&mut rng, 11),
            disk_errors: fault(&mut rng, 3),
            disconnects: fault(&mut rng, 10),
            // Only workers finish jobs in such a run, so one must be left.
            deaths: fault(&mut rng, 2) * u64::from(!is_short_of_slots(seed)),
            clock_steps: if rng.one_in(4) { 3 } else { 0 },
            clock_jumps: if rng.one_in(8) { 2 } else { 0 },
            stalls: fault(&mut rng, 3),
            clock_steps_while_down: if sets_clock_while_down(seed) { 3 } else { 0 },
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
            tasks: None,
            delays: likes(&mut rng),
            groups: likes(&mut rng),
            locks: likes(&mut rng),
            purges: rng.one_in(4),
            cancels: likes(&mut rng),
            cancels_many: cancels_many(seed),
            crowds: rng.one_in(60),
            trees: builds_trees(seed),
            replaces: replaces_jobs(seed),
            unique: claims_keys(seed),
            // Their times across a jump of years are checked against the oracle elsewhere.
            schedules: has_schedules(seed) && plan.clock_jumps == 0,
            short_of_slots: is_short_of_slots(seed),
        };
        let journal = JournalOptions {
            journal_id: [5; 16],
            segment_bytes: 4096 << (1 + rng.below(5)),
            batch_bytes: 1024 << rng.below(5),
            opening_bytes: 4096,
            spares: rng.below(3) as usize,
            ..JournalOptions::default()
        };
        let broker = BrokerOptions {
            unserved_ms: 2_000,
            // Queues and tasks are mostly forgotten as soon as they are unused.
            unused_kept_ms: [3_600_000, 10_000, 0, 0][rng.below(4) as usize],
            // Sometimes all bodies stay in memory; mostly hardly any do.
            resident_bodies_bytes: [None, Some(0), Some(0), Some(1_000)][rng.below(4) as usize],
            ..failed_jobs_limits(seed)
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
            boots: 0,
            booted_ms: 0,
            wall_ahead_ms: 0,
            wall_farthest_ahead_ms: 0,
            wall_was_set_by_ms: 0,
            storage,
            options: EngineOptions {
                broker,
                journal,
                token: None,
                max_connections: usize::MAX,
                stop_on_request: false,
                is_double: false,
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

    /// Creates the first client of this seat, or the next after a death.
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
        let is_wild = seat == 0 || rng.bool();
        // A consumer without slots would always have room for an awaited job.
        let is_short = self.habits.short_of_slots;
        let is_wild = is_wild && (seat == 0 || !is_short);
        if is_short {
            queues = QUEUES.iter().map(|queue| (*queue).to_string()).collect();
        }
        if queues.is_empty() {
            queues.push(QUEUES[0].to_string());
        }
        // A worker may not know all tasks. One seat knows them all, and in the end every client does.
        let knows_few = is_wild && seat != 1 && rng.one_in(4);
        let tasks = knows_few.then(|| {
            let known = TASKS.iter().filter(|_| rng.bool());
            known.map(|task| (*task).to_string()).collect()
        });
        let habits = Habits {
            queues,
            tasks,
            publishes: seat == 0 || rng.below(3) > 0,
            consumes: (seat == 1 || rng.below(3) > 0) && !(is_short && is_wild),
            ..self.habits.clone()
        };
        match is_wild {
            true => Box::new(Wild::new(session, heartbeat_ms, habits)),
            false => {
                let pools = 1 + rng.below(3);
                let slots: Vec<usize> = (0..pools).map(|_| 1 + rng.below(4) as usize).collect();
                Box::new(Process::new(session, heartbeat_ms, &slots, habits, time))
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
                "clock steps while down" => plan.clock_steps_while_down = 0,
                "few failed jobs" => {
                    let usual = BrokerOptions::default();
                    let options = &mut self.options.broker;
                    options.failed_kept = usual.failed_kept;
                    options.failed_kept_bytes = usual.failed_kept_bytes;
                    options.failed_kept_ms = usual.failed_kept_ms;
                }
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
        self.checker.options = self.options.broker.clone();
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
            plan.clock_steps_while_down,
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
                // Cuts the power in the middle of one of the next disk calls.
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
                let by_ms = self.clock_step_ms();
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
            Some(8) => {
                let has_died = self.die(Crash::Killed);
                let by_ms = self.clock_step_ms();
                self.set_the_wall(by_ms)?;
                match has_died {
                    true => self.start_unless_on_demand(),
                    false => Ok(()),
                }
            }
            _ => {
                // The process pauses for a while; then everything is late at once.
                self.now_ms += self.rng.below(6_000);
                self.say(|| "stall".to_string());
                self.tick()
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
