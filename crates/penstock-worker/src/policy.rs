//! Which jobs go to the children, how many at a time, and how many the broker may send: the decisions,
//! without IO. The supervisor tells what has happened and carries out what it is told.
//!
//! A job should be bound to a child only when a child is free to run it, and should wait in the broker
//! until then, where any worker can take it. Done to the letter, that is a round trip between two
//! jobs, which a job of 10 µs can't bear. So the distance grows with how short the jobs are:
//!
//! | jobs that take | in a packet | in the shared socket | in this process and on the way |
//! | --- | --- | --- | --- |
//! | 10 µs | 200, about 2 ms of work | a packet for each child more than it runs | some ms of work |
//! | more than 2 ms, or not known | 1 | no more than there are idle children | no more than idle children |
//!
//! How long a job takes is measured for each task. A guess may be wrong in the bad direction (a task that
//! always took 10 µs now waits for a lock), so a child that has been busy with one job for a while
//! is *stuck*: it counts for nothing, what it had not begun is taken back, and what this worker now
//! holds in excess goes back to the broker ([`Policy::surplus`]).

use std::collections::{BTreeMap, VecDeque};

use rustc_hash::FxHashMap;

use crate::packet::INLINE_PAYLOAD_BYTES;
use crate::page::MAX_PACKET_JOBS;

/// How much work a packet should hold.
const PACKET_NS: u64 = 2_000_000;
/// How much work for each child should be here or on its way from the broker.
const AHEAD_NS: u64 = 8_000_000;
/// What a job costs a child besides its own run: a pull's share, conversions, the outcome.
const OVERHEAD_NS: u64 = 5_000;
/// So many deliveries for each child are on the way at most, however short the jobs are.
const MOST_AHEAD: u64 = 1024;
/// What is held beyond so much work for each free child goes back to the broker.
const HELD_NS: u64 = 20_000_000;

/// Names a task in one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskIndex(usize);

/// Jobs of one task, to be sent as one packet.
#[derive(Debug, PartialEq, Eq)]
pub struct HandOut<J> {
    pub task: TaskIndex,
    pub jobs: Vec<J>,
}

/// How it went with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketEnd {
    /// All its jobs ran.
    Ran { jobs: usize },
    /// One took so long that those behind it were taken back.
    Slow,
    /// It was taken back, in whole or in part, for another reason.
    TakenBack,
}

/// What to tell the broker about deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credit {
    Keep,
    Add(u32),
    /// Take back what was granted: it is far more than can be used now.
    Withdraw,
}

/// How long a job takes by experience.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// 0: not known yet.
    mean_ns: u64,
}

impl Pace {
    fn observe(&mut self, cost_ns: u64) {
        let cost = cost_ns.saturating_add(OVERHEAD_NS);
        self.mean_ns = match self.mean_ns {
            0 => cost,
            mean => mean - mean / 8 + cost / 8,
        }
        .max(1);
    }

    /// A job of which nothing is known may be long.
    fn expected_ns(self) -> u64 {
        match self.mean_ns {
            0 => HELD_NS,
            mean => mean,
        }
    }

    fn is_quick(self) -> bool {
        self.mean_ns != 0 && self.mean_ns <= PACKET_NS
    }
}

struct Waiting<J> {
    job: J,
    bytes: usize,
    /// Jobs of all tasks are numbered as they come; the lowest goes first.
    arrival: i64,
}

struct Task<J> {
    name: String,
    pace: Pace,
    /// The largest packet that experience allows: doubled by each packet that went well, so that one
    /// lucky measurement does not put 256 jobs behind each other.
    largest: usize,
    waiting: VecDeque<Waiting<J>>,
}

pub struct Policy<J> {
    tasks: Vec<Task<J>>,
    by_name: FxHashMap<String, TaskIndex>,
    /// The tasks that have jobs waiting, by the arrival of their first.
    order: BTreeMap<i64, TaskIndex>,
    last_arrival: i64,
    /// Below all numbers in use: jobs that come back go before the others.
    first_arrival: i64,
    waiting: usize,
    /// The recent mix of jobs.
    pace: Pace,
    children: usize,
    stuck: usize,
    /// Packets that are sent and not done.
    out: usize,
    /// Deliveries that the broker may still send.
    granted: u64,
    closed: bool,
}

impl<J> Default for Policy<J> {
    fn default() -> Self {
        Self {
            tasks: Vec::new(),
            by_name: FxHashMap::default(),
            order: BTreeMap::new(),
            last_arrival: 0,
            first_arrival: 0,
            waiting: 0,
            pace: Pace::default(),
            children: 0,
            stuck: 0,
            out: 0,
            granted: 0,
            closed: false,
        }
    }
}

impl<J> Policy<J> {
    /// How many children are alive.
    pub fn set_children(&mut self, children: usize) {
        self.children = children;
        self.stuck = self.stuck.min(children);
    }

    /// How many of them have been at one job for a while.
    pub fn set_stuck(&mut self, stuck: usize) {
        self.stuck = stuck.min(self.children);
    }

    /// From now on nothing is sent and nothing granted.
    pub fn close(&mut self) {
        self.closed = true;
        self.granted = 0;
    }

    /// A job has come from the broker. `bytes` is what it takes in a packet.
    pub fn arrive(&mut self, task: &str, job: J, bytes: usize) {
        self.granted = self.granted.saturating_sub(1);
        let index = match self.by_name.get(task) {
            Some(index) => *index,
            None => {
                let index = TaskIndex(self.tasks.len());
                self.by_name.insert(task.to_owned(), index);
                self.tasks.push(Task {
                    name: task.to_owned(),
                    pace: Pace::default(),
                    largest: 1,
                    waiting: VecDeque::new(),
                });
                index
            }
        };
        self.last_arrival += 1;
        let arrival = self.last_arrival;
        let waiting = &mut self.tasks[index.0].waiting;
        if waiting.is_empty() {
            self.order.insert(arrival, index);
        }
        waiting.push_back(Waiting {
            job,
            bytes,
            arrival,
        });
        self.waiting += 1;
    }

    /// Jobs of a packet that did not begin, each with what it takes in a packet. They go before all
    /// others, in their old order.
    pub fn put_back(&mut self, task: TaskIndex, jobs: impl DoubleEndedIterator<Item = (J, usize)>) {
        let waiting = &mut self.tasks[task.0].waiting;
        if let Some(first) = waiting.front() {
            self.order.remove(&first.arrival);
        }
        for (job, bytes) in jobs.rev() {
            self.first_arrival -= 1;
            waiting.push_front(Waiting {
                job,
                bytes,
                arrival: self.first_arrival,
            });
            self.waiting += 1;
        }
        if let Some(first) = waiting.front() {
            self.order.insert(first.arrival, task);
        }
    }

    pub fn task_name(&self, task: TaskIndex) -> &str {
        &self.tasks[task.0].name
    }

    /// The next packet to send, if one should be sent now. It counts as out from here on.
    pub fn next_packet(&mut self) -> Option<HandOut<J>> {
        if self.closed {
            return None;
        }
        let (_, index) = self.order.first_key_value()?;
        let index = *index;
        let task = &mut self.tasks[index.0];
        // The oldest job decides, and nobody overtakes it: or a long one would wait for ever for a free
        // child while short ones go by.
        let room = if task.pace.is_quick() {
            // One ahead for each child that will get to it soon.
            self.children + (self.children - self.stuck)
        } else {
            self.children
        };
        if self.out >= room {
            return None;
        }
        let fits = if task.pace.is_quick() {
            (PACKET_NS / task.pace.mean_ns) as usize
        } else {
            1
        };
        let share = if self.out >= self.children {
            usize::MAX
        } else {
            // Idle children share what there is: two packets of one beat one packet of two.
            self.waiting.div_ceil((self.children - self.out).max(1))
        };
        let most = fits
            .min(task.largest)
            .min(share)
            .clamp(1, MAX_PACKET_JOBS);
        let mut jobs = Vec::with_capacity(most.min(task.waiting.len()));
        let mut bytes = 0;
        self.order.pop_first();
        while let Some(next) = task.waiting.front()
            && jobs.len() < most
            && (jobs.is_empty() || bytes + next.bytes <= INLINE_PAYLOAD_BYTES)
        {
            bytes += next.bytes;
            if let Some(next) = task.waiting.pop_front() {
                jobs.push(next.job);
            }
        }
        if let Some(first) = task.waiting.front() {
            self.order.insert(first.arrival, index);
        }
        self.waiting -= jobs.len();
        self.out += 1;
        Some(HandOut { task: index, jobs })
    }

    /// One job of a packet has ended.
    pub fn observe(&mut self, task: TaskIndex, cost_ns: u64) {
        self.tasks[task.0].pace.observe(cost_ns);
        self.pace.observe(cost_ns);
    }

    /// A packet is out no more.
    pub fn packet_ended(&mut self, task: TaskIndex, end: PacketEnd) {
        self.out -= 1;
        let task = &mut self.tasks[task.0];
        match end {
            PacketEnd::Ran { jobs } => {
                task.largest = task.largest.max(2 * jobs).min(MAX_PACKET_JOBS);
            }
            PacketEnd::Slow => task.largest = 1,
            PacketEnd::TakenBack => {}
        }
    }

    /// How many slots have something to do.
    pub fn busy(&self) -> usize {
        self.out.min(self.children)
    }

    pub fn is_idle(&self) -> bool {
        self.out == 0 && self.waiting == 0
    }

    /// How many jobs should be waiting here or on their way.
    fn wanted(&self) -> u64 {
        let free = self.children.saturating_sub(self.out) as u64;
        if self.closed || !self.pace.is_quick() {
            return free;
        }
        let usable = (self.children - self.stuck) as u64;
        free.max(usable * (AHEAD_NS / self.pace.mean_ns).clamp(1, MOST_AHEAD))
    }

    /// What to tell the broker now; it counts as told. Asked after each pass.
    pub fn grant(&mut self) -> Credit {
        if self.closed {
            return Credit::Keep;
        }
        let wanted = self.wanted();
        let have = self.waiting as u64 + self.granted;
        let missing = wanted.saturating_sub(have);
        // In lumps, so that a long run of short jobs does not send a credit with each of them.
        if missing == 0 || missing < wanted / 8 {
            return Credit::Keep;
        }
        self.granted += missing;
        Credit::Add(missing as u32)
    }

    /// Asked at each tick: whether the broker was granted far more than can be used by now.
    pub fn withdraw(&mut self) -> Credit {
        if self.granted <= 2 * self.wanted() {
            return Credit::Keep;
        }
        self.granted = 0;
        Credit::Withdraw
    }

    /// Asked at each tick: waiting jobs that this worker won't get to soon, to be handed back to the
    /// broker, where others can take them.
    pub fn surplus(&mut self) -> Vec<J> {
        let most_ns = (self.children - self.stuck) as u64 * HELD_NS;
        let held_ns = self.tasks.iter().fold(0_u64, |sum, task| {
            sum.saturating_add(task.pace.expected_ns().saturating_mul(task.waiting.len() as u64))
        });
        if held_ns <= most_ns {
            return Vec::new();
        }
        let mut kept_ns = 0_u64;
        self.take_waiting(|pace| {
            let keep = kept_ns < most_ns;
            kept_ns = kept_ns.saturating_add(pace.expected_ns());
            !keep
        })
    }

    /// All jobs that wait.
    pub fn take_all(&mut self) -> Vec<J> {
        self.take_waiting(|_| true)
    }

    /// Takes out the waiting jobs that `wanted` chooses, asked in the order of their arrival.
    fn take_waiting(&mut self, mut wanted: impl FnMut(Pace) -> bool) -> Vec<J> {
        let mut taken = Vec::new();
        let mut all: Vec<(TaskIndex, Waiting<J>)> = Vec::with_capacity(self.waiting);
        for (index, task) in self.tasks.iter_mut().enumerate() {
            all.extend(task.waiting.drain(..).map(|job| (TaskIndex(index), job)));
        }
        all.sort_by_key(|(_, job)| job.arrival);
        self.order.clear();
        for (index, job) in all {
            let task = &mut self.tasks[index.0];
            if wanted(task.pace) {
                taken.push(job.job);
                continue;
            }
            if task.waiting.is_empty() {
                self.order.insert(job.arrival, index);
            }
            task.waiting.push_back(job);
        }
        self.waiting -= taken.len();
        taken
    }

    /// Drops waiting jobs whose lease is lost.
    pub fn retain(&mut self, keep: impl Fn(&J) -> bool) {
        self.order.clear();
        self.waiting = 0;
        for (index, task) in self.tasks.iter_mut().enumerate() {
            task.waiting.retain(|waiting| keep(&waiting.job));
            self.waiting += task.waiting.len();
            if let Some(first) = task.waiting.front() {
                self.order.insert(first.arrival, TaskIndex(index));
            }
        }
    }
}
