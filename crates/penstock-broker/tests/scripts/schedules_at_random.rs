//! Each time of a schedule is decided once, according to its policies, whatever happens in whatever order.
//!
//! - A time has at most one job, and that job is not handed out again once it has ended.
//! - Unless jobs may overlap, none arrives while another has not ended, including retries and cancellations.
//! - Each time had a job, was skipped, was missed, or waits for the end of a job; times during a pause do not count.

use std::collections::BTreeSet;

use crate::script::ScriptWorld;
use penstock_broker::BrokerOptions;
use proptest::prelude::*;

const EVERY_MS: u64 = 60_000;
/// Maximum lag of the wall clock behind its latest time. Beyond a day the broker considers the later time wrong.
const MOST_BEHIND_MS: i64 = 20 * 60 * 60 * 1000;

#[derive(Clone, Debug)]
enum RandomStep {
    Wait(u64),
    /// No broker runs for this long.
    Down(u64),
    SetClock(i64),
    Kill,
    PowerCut,
    Carry,
    Ack,
    Fail,
    /// The job runs again after this long.
    Retry(u64),
    Return,
    Pause,
    Resume,
}

fn step() -> impl Strategy<Value = RandomStep> {
    prop_oneof![
        8 => (1..150_000_u64).prop_map(RandomStep::Wait),
        2 => Just(RandomStep::Wait(EVERY_MS)),
        1 => (1..5_000_000_u64).prop_map(RandomStep::Wait),
        2 => (1..5_000_000_u64).prop_map(RandomStep::Down),
        2 => (-5_000_000..5_000_000_i64).prop_map(RandomStep::SetClock),
        1 => (-90_000..90_000_i64).prop_map(RandomStep::SetClock),
        1 => Just(RandomStep::Kill),
        1 => Just(RandomStep::PowerCut),
        1 => Just(RandomStep::Carry),
        6 => Just(RandomStep::Ack),
        1 => Just(RandomStep::Fail),
        2 => (1..200_000_u64).prop_map(RandomStep::Retry),
        1 => Just(RandomStep::Return),
        1 => Just(RandomStep::Pause),
        2 => Just(RandomStep::Resume),
    ]
}

/// Schedule, and the observations of it.
struct WatchedSchedule {
    world: ScriptWorld,
    may_overlap: bool,
    cancels: bool,
    /// Times whose jobs have arrived and have not ended, and whether a worker has them.
    unfinished: Vec<(u64, bool)>,
    ended: BTreeSet<u64>,
    /// Time by which the wall clock is behind the latest time that it has shown.
    behind_ms: i64,
    is_paused: bool,
    /// First undecided time at the last look.
    next: u64,
    /// Number of times that passed during pauses.
    not_counted: u64,
}

impl WatchedSchedule {
    fn new(policies: &str) -> Self {
        let mut watched = Self {
            world: ScriptWorld::new(BrokerOptions::default()),
            may_overlap: policies.contains("allow"),
            cancels: policies.contains("cancel_previous"),
            unfinished: Vec::new(),
            ended: BTreeSet::new(),
            behind_ms: 0,
            is_paused: false,
            next: EVERY_MS,
            not_counted: 0,
        };
        watched.run("a hello");
        watched.run(&format!("a set poll every={EVERY_MS} {policies}"));
        watched.connect();
        watched
    }

    fn connect(&mut self) {
        let held = self.unfinished.iter().filter(|(_, is_held)| *is_held);
        let held: String = held.map(|(time, _)| format!(" at{time}")).collect();
        self.run("a hello");
        self.run(&format!("w hello{held}"));
        self.run("w consume default 1000000");
    }

    fn run(&mut self, line: &str) {
        for output in self.world.run(line) {
            if output.starts_with("w welcome") {
                // The leases that hold.
                for (time, is_held) in &mut self.unfinished {
                    *is_held = output.split(' ').any(|word| word == format!("at{time}"));
                }
                continue;
            }
            for word in output.split(' ') {
                let Some((time, _)) = time_of(word) else {
                    continue;
                };
                if output.starts_with("w deliver") {
                    self.comes(time);
                } else if output.starts_with("w stop") {
                    // Before the return, which brings the next job.
                    self.ends(time);
                    self.run(&format!("w return at{time}"));
                }
            }
        }
    }

    fn comes(&mut self, time: u64) {
        assert_eq!(time % EVERY_MS, 0, "a job of no time of the schedule");
        assert!(
            !self.ended.contains(&time),
            "the job of {time} has come again"
        );
        match self.unfinished.iter_mut().find(|(one, _)| *one == time) {
            Some((_, is_held)) => *is_held = true,
            None => {
                if self.cancels {
                    // A waiting job is cancelled without any output.
                    let waiting = self.unfinished.extract_if(.., |(_, is_held)| !*is_held);
                    self.ended.extend(waiting.map(|(time, _)| time));
                }
                assert!(
                    self.may_overlap || self.unfinished.is_empty(),
                    "the job of {time} has come, and {:?} have not ended",
                    self.unfinished
                );
                self.unfinished.push((time, true));
            }
        }
    }

    fn ends(&mut self, time: u64) {
        self.unfinished.retain(|(one, _)| *one != time);
        self.ended.insert(time);
    }

    fn held(&self) -> Option<u64> {
        let mut held = self.unfinished.iter().filter(|(_, is_held)| *is_held);
        held.next().map(|(time, _)| *time)
    }

    fn step(&mut self, step: &RandomStep) {
        match step {
            RandomStep::Wait(ms) => {
                self.behind_ms = (self.behind_ms - *ms as i64).max(0);
                self.run(&format!("wait {ms}"));
            }
            RandomStep::Down(ms) => {
                self.behind_ms = (self.behind_ms - *ms as i64).max(0);
                self.run(&format!("killed-for {ms} wall 0"));
                self.connect();
            }
            RandomStep::SetClock(by) => {
                if self.behind_ms - by <= MOST_BEHIND_MS {
                    self.behind_ms = (self.behind_ms - by).max(0);
                    self.run(&format!("wall {by}"));
                }
            }
            RandomStep::Kill => {
                self.run("kill");
                self.connect();
            }
            RandomStep::PowerCut => {
                self.run("power-cut");
                self.connect();
            }
            RandomStep::Carry => {
                self.run("mark");
                self.run("carry");
            }
            RandomStep::Pause if !self.is_paused => {
                self.run("a schedule poll pause");
                self.is_paused = true;
            }
            RandomStep::Resume if self.is_paused => {
                self.run("a schedule poll resume");
                self.is_paused = false;
                let before = self.next;
                self.look();
                self.not_counted += (self.next - before) / EVERY_MS;
                return;
            }
            RandomStep::Pause | RandomStep::Resume => {}
            RandomStep::Ack | RandomStep::Fail | RandomStep::Retry(_) | RandomStep::Return => {
                let Some(time) = self.held() else { return };
                match step {
                    RandomStep::Ack | RandomStep::Fail => {
                        // Before the cancellation: the next job may come in the same step.
                        self.ends(time);
                        let verb = if matches!(step, RandomStep::Ack) {
                            "ack"
                        } else {
                            "fail"
                        };
                        self.run(&format!("w {verb} at{time}"));
                    }
                    RandomStep::Retry(ms) => {
                        self.let_go(time);
                        self.run(&format!("w move at{time} next after={ms}"));
                    }
                    _ => {
                        self.let_go(time);
                        self.run(&format!("w return at{time}"));
                    }
                }
            }
        }
        self.account();
    }

    fn let_go(&mut self, time: u64) {
        for (one, is_held) in &mut self.unfinished {
            *is_held &= *one != time;
        }
    }

    /// Notes the first undecided time. Returns how many times are decided, and how many should be.
    fn look(&mut self) -> (u64, u64) {
        let outputs = self.world.run("a schedules");
        let line = outputs.last().expect("an answer");
        let mut counted = 0;
        for part in line.split(':') {
            if let Some(next) = part.strip_prefix("next") {
                self.next = next.parse().expect("a time");
            } else if part.contains('+') {
                let counts = part
                    .split('+')
                    .map(|count| count.parse::<u64>().expect("a count"));
                counted += counts.sum::<u64>();
            } else if part == "queued" {
                counted += 1;
            }
        }
        (counted, self.next / EVERY_MS - 1)
    }

    fn account(&mut self) {
        if self.is_paused {
            return;
        }
        let (counted, decided) = self.look();
        assert_eq!(
            counted + self.not_counted,
            decided,
            "times that had a job, were skipped, missed or wait, and those that were decided"
        );
    }
}

/// Reads a job's name, such as `at60000#1`.
fn time_of(word: &str) -> Option<(u64, &str)> {
    let name = word.strip_prefix("at")?;
    let end = name.find(|next: char| !next.is_ascii_digit());
    let (digits, rest) = name.split_at(end.unwrap_or(name.len()));
    Some((digits.parse().ok()?, rest))
}

fn policies() -> impl Strategy<Value = String> {
    let overlap = prop_oneof!["skip", "queue", "cancel_previous", "allow"];
    let catch_up = prop_oneof!["once", "skip", "all"];
    let window = prop_oneof!["60000", "600000", "3600000"];
    (overlap, catch_up, window).prop_map(|(overlap, catch_up, window)| {
        format!("overlap={overlap} catch-up={catch_up} window={window}")
    })
}

fn watch(max_shrink_iters: u32) {
    let config = ProptestConfig {
        cases: 1_000,
        max_shrink_iters,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(policies in policies(), steps in prop::collection::vec(step(), 1..60))| {
        let mut watched = WatchedSchedule::new(&policies);
        for step in &steps {
            watched.step(step);
        }
    });
}

#[test]
fn each_time_is_decided_once_whatever_happens() {
    watch(1_000);
}

#[cfg(feature = "faults")]
#[test]
fn planted_bugs_of_schedules_are_found() {
    use penstock_faults::{Finder, PLANTS, is_found_by};

    for plant in PLANTS.iter().filter(|plant| plant.finder == Finder::Both) {
        let name = plant.name;
        assert!(is_found_by(name, || watch(0)), "{name} was not found");
    }
}
