//! Decides which jobs go to the slots of a pool, how many at a time, and how many the broker may send. Does no
//! IO: the supervisor reports events and carries out the decisions.
//!
//! A job should be bound to a slot only when that is free to run it, and should wait in the broker until then,
//! where any worker can take it. Taken literally, that costs a round trip between two jobs, which a job of 10
//! µs can't afford. So the shorter the jobs, the more are fetched ahead:
//!
//! | jobs that take | in a packet | in the shared socket | in this process and on the way |
//! | --- | --- | --- | --- |
//! | 10 µs | 200, about 2 ms of work | a packet for each process more than it runs | some ms of work for each process |
//! | more than 2 ms | 1 | idle slots, and as many more as will be idle within 1 ms | the same |
//! | not known | 1 | no more than there are idle slots | no more than idle slots |
//!
//! A process may have many slots. Jobs of microseconds need a processor, which the slots of one process share
//! in turn. So quick jobs are handed out per process, and all others per slot.
//!
//! The run time is measured for each task. A guess may be far too low: a task that always took 10 µs now waits
//! for a lock. So a slot that has been busy with one job for a while is *stuck*. It no longer counts, its jobs
//! that have not begun are taken back, and the worker's surplus goes back to the broker ([`Policy::surplus`]).
//!
//! A job that waits for others is *parked*: its slot is lent to another job ([`Policy::park`]). When its wait
//! is over it goes before all jobs that have not begun ([`Policy::next_turn`]). While jobs are parked, none is
//! fetched ahead and each goes alone. That keeps the broker's order, in which awaited jobs go first.

use std::collections::{BTreeMap, VecDeque};

use penstock_faults::planted;
use penstock_message::{SeededMap, SeededState};

use crate::packet::INLINE_PAYLOAD_BYTES;
use crate::page::MAX_PACKET_JOBS;

/// Amount of work that a packet should hold.
const PACKET_NS: u64 = 2_000_000;
/// Amount of work per process that should be here or on its way from the broker.
const AHEAD_NS: u64 = 8_000_000;
/// Time before a slot is free at which its next job may be requested: about as long as it takes to report an outcome to
/// the broker and receive the next job. Otherwise a slot with jobs that sleep for 5 ms would be idle for that time (an
/// eighth of its time on two processors). Of 40 such slots, 8 will be free that soon; of 4 such slots none will, nor of
/// 500 whose jobs sleep for a second.
const SOON_NS: u64 = 1_000_000;
/// Cost of a job to a slot besides its own run: its share of a pull, conversions, the outcome.
const OVERHEAD_NS: u64 = 5_000;
/// Maximum number of deliveries on their way per process, however short the jobs are.
const MOST_AHEAD: u64 = 1024;
/// Maximum work held for each free slot; the rest returns to the broker.
const HELD_NS: u64 = 20_000_000;

/// Maximum time that a job is held up for a parked job that may soon want its slot back.
const MOST_KEPT_NS: u64 = 20_000_000;

/// Number of passing jobs up to which they hold up no others; beyond it, the broker sends fewer.
const MOST_PASSED: usize = 1000;

/// Number of a task within one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskIndex(usize);

/// Jobs of one task, to send as one packet.
#[derive(Debug, PartialEq, Eq)]
pub struct HandOut<J> {
    pub task: TaskIndex,
    pub jobs: Vec<J>,
}

/// Outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketEnd {
    /// All its jobs ran.
    Ran { jobs: usize },
    /// A job took so long that those behind it were taken back.
    Slow,
    /// The packet was taken back, in whole or in part, for another reason.
    TakenBack,
}

/// Change of the broker's permission to send deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credit {
    Keep,
    Add(u32),
    /// Withdraw the granted credit: it is far more than can be used now.
    Withdraw,
}

/// Measured run time of a job.
#[derive(Clone, Copy, Debug, Default)]
struct TaskPace {
    /// Mean in nanoseconds; 0 if not known yet.
    mean_ns: u64,
    /// Number of jobs that it is based on, up to [`TaskPace::MEMORY`].
    jobs: u64,
}

impl TaskPace {
    /// Number of recent jobs that the mean covers.
    const MEMORY: u64 = 64;
    /// Factor of the mean up to which a single job counts ...
    const OUTLIER: u64 = 16;
    /// ... unless it took longer than a busy machine delays a process: then the job itself was slow.
    const SURELY_LONG_NS: u64 = 50_000_000;

    fn observe(&mut self, cost_ns: u64) {
        let cost = cost_ns.saturating_add(OVERHEAD_NS);
        if self.jobs == 0 {
            (self.mean_ns, self.jobs) = (cost, 1);
            return;
        }
        self.jobs = (self.jobs + 1).min(Self::MEMORY);
        let (cost, weight) = if cost_ns >= Self::SURELY_LONG_NS {
            (cost, self.jobs.min(8))
        } else {
            (
                cost.min(self.mean_ns.saturating_mul(Self::OUTLIER)),
                self.jobs,
            )
        };
        self.mean_ns = (self.mean_ns - self.mean_ns / weight + cost / weight).max(1);
    }

    /// An unknown job may be long.
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

struct QueuedJob<J> {
    job: J,
    bytes: usize,
    /// Jobs of all tasks, numbered as they arrive; the lowest goes first.
    arrival: i64,
}

struct Task<J> {
    name: String,
    pace: TaskPace,
    /// Maximum packet size so far. Each packet that went well doubles it, so that one lucky measurement does
    /// not put 256 jobs behind each other.
    largest: usize,
    waiting: VecDeque<QueuedJob<J>>,
}

pub struct Policy<J> {
    tasks: Vec<Task<J>>,
    by_name: SeededMap<String, TaskIndex>,
    /// Tasks with waiting jobs, by the arrival of their first.
    order: BTreeMap<i64, TaskIndex>,
    last_arrival: i64,
    /// Below all numbers in use: returned jobs go before the others.
    first_arrival: i64,
    waiting: usize,
    /// Recent mix of jobs.
    pace: TaskPace,
    slots: usize,
    processes: usize,
    stuck: usize,
    /// Number of packets that are sent and not done.
    out: usize,
    /// Number of these for each task that has any.
    running: BTreeMap<TaskIndex, usize>,
    /// Number of deliveries that the broker may still send.
    granted: u64,
    closed: bool,
    /// Whether jobs run one by one, whatever their measured run times.
    one_by_one: bool,
    /// Number of passing jobs that still wait.
    passed: usize,
    /// Number of these packets whose jobs are parked.
    parked: usize,
    /// Maximum number of parked packets.
    max_parked: usize,
    /// Jobs that wait for their turn, in the order in which their waits ended.
    turns: VecDeque<Turn>,
    /// Number of processes beyond those of the slots. They would start at once on jobs sent ahead.
    spare: usize,
    /// Whether jobs that wait for others hold all slots.
    is_held: bool,
}

/// Parked job whose wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Place of its packet.
    pub place: usize,
    /// Number of the wait, counted by its child.
    pub wait: u32,
    /// Whether a signal must announce the turn, too.
    pub is_on_loop: bool,
}

impl<J> Default for Policy<J> {
    fn default() -> Self {
        Self::new(SeededState::default())
    }
}

impl<J> Policy<J> {
    /// Creates a policy. `hashing` is for the names of tasks, which clients choose.
    pub fn new(hashing: SeededState) -> Self {
        Self {
            tasks: Vec::new(),
            by_name: SeededMap::with_hasher(hashing),
            order: BTreeMap::new(),
            last_arrival: 0,
            first_arrival: 0,
            waiting: 0,
            pace: TaskPace::default(),
            slots: 0,
            processes: 0,
            stuck: 0,
            out: 0,
            running: BTreeMap::new(),
            granted: 0,
            closed: false,
            one_by_one: false,
            passed: 0,
            parked: 0,
            max_parked: usize::MAX,
            turns: VecDeque::new(),
            spare: 0,
            is_held: false,
        }
    }

    /// Creates a policy for jobs that each run in their own process, this many at a time; a process is forked
    /// when its job arrives.
    pub fn one_by_one(hashing: SeededState, at_once: usize) -> Self {
        let mut policy = Self::new(hashing);
        policy.one_by_one = true;
        policy.set_slots(at_once, at_once);
        policy
    }

    /// Sets how many slots can take jobs, and in how many processes.
    pub fn set_slots(&mut self, slots: usize, processes: usize) {
        self.slots = slots;
        self.processes = processes.min(slots);
        self.stuck = self.stuck.min(slots);
    }

    /// Sets how many slots have been busy with one job for a while.
    pub fn set_stuck(&mut self, stuck: usize) {
        self.stuck = stuck.min(self.slots);
    }

    /// Stops sending and granting.
    pub fn close(&mut self) {
        self.closed = true;
        self.granted = 0;
    }

    /// Returns the number of the task with this name.
    pub fn task(&mut self, name: &str) -> TaskIndex {
        if let Some(index) = self.by_name.get(name) {
            return *index;
        }
        let index = TaskIndex(self.tasks.len());
        self.by_name.insert(name.to_owned(), index);
        self.tasks.push(Task {
            name: name.to_owned(),
            pace: TaskPace::default(),
            largest: 1,
            waiting: VecDeque::new(),
        });
        index
    }

    /// Adds a job from the broker. `bytes` is its size in a packet.
    pub fn arrive(&mut self, task: TaskIndex, job: J, bytes: usize) {
        self.granted = self.granted.saturating_sub(1);
        self.last_arrival += 1;
        let arrival = self.last_arrival;
        let waiting = &mut self.tasks[task.0].waiting;
        if waiting.is_empty() {
            self.order.insert(arrival, task);
        }
        waiting.push_back(QueuedJob {
            job,
            bytes,
            arrival,
        });
        self.waiting += 1;
    }

    /// Adds the jobs of a packet that did not begin, each with its size in a packet. They go before all others,
    /// in their old order.
    pub fn put_back(&mut self, task: TaskIndex, jobs: impl DoubleEndedIterator<Item = (J, usize)>) {
        let waiting = &mut self.tasks[task.0].waiting;
        if let Some(first) = waiting.front() {
            self.order.remove(&first.arrival);
        }
        for (job, bytes) in jobs.rev() {
            self.first_arrival -= 1;
            waiting.push_front(QueuedJob {
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

    /// Returns the task of the next packet, if one should be sent now.
    pub fn next_task(&self) -> Option<TaskIndex> {
        if self.closed || self.is_held {
            return None;
        }
        let taken = self.taken();
        // While a slot is idle, the order of tasks does not matter.
        let free_soon = match taken < self.slots {
            true => 0,
            false => self.free_soon(),
        };
        let (_, index) = self.order.first_key_value()?;
        let task = &self.tasks[index.0];
        // The oldest job decides, and no job overtakes it. Otherwise a long one would wait forever for a free
        // slot while short ones go by.
        let ahead = if task.pace.is_quick() {
            // One for each process that will soon be ready for it.
            self.processes.min(self.slots - self.stuck)
        } else {
            free_soon
        };
        let ahead = match self.parked {
            0 => ahead.saturating_sub(self.spare),
            _ => 0,
        };
        (taken < self.slots + ahead).then_some(*index)
    }

    /// Returns the number of slots that are in use, or that parked jobs want back. Packets that wait for a slot
    /// count too.
    fn taken(&self) -> usize {
        self.active() + self.turns.len()
    }

    /// Returns the number of packets that are sent and not done, and whose jobs are not parked.
    pub fn active(&self) -> usize {
        self.out - self.parked
    }

    pub fn parked(&self) -> usize {
        self.parked
    }

    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the maximum number of parked jobs.
    pub fn max_parked(&self) -> usize {
        self.max_parked
    }

    /// Sets the maximum number of parked jobs.
    pub fn set_max_parked(&mut self, jobs: usize) {
        self.max_parked = jobs;
    }

    /// Sets the number of waiting processes beyond the normal number.
    pub fn set_spare(&mut self, processes: usize) {
        self.spare = processes;
    }

    /// Sets whether waiting jobs hold all slots, so that none is left for another job.
    pub fn set_held(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Parks the job of a packet, which waits for others. Returns false if too many are parked, so that it keeps its
    /// slot.
    pub fn park(&mut self, task: TaskIndex) -> bool {
        if self.parked >= self.max_parked {
            return false;
        }
        self.parked += 1;
        self.ran(task);
        true
    }

    /// Notes that the wait of a parked job is over.
    pub fn want_turn(&mut self, turn: Turn) {
        if !self.turns.contains(&turn) {
            self.turns.push_back(turn);
        }
    }

    /// Notes that the wait of a job continues after all.
    pub fn drop_turn(&mut self, place: usize) {
        match self.turns.front() {
            Some(first) if first.place == place => drop(self.turns.pop_front()),
            _ => self.turns.retain(|turn| turn.place != place),
        }
    }

    /// Returns the parked job that continues next: it has its slot back once it is [unparked](Policy::unpark).
    pub fn next_turn(&self) -> Option<Turn> {
        let turn = self.turns.front().copied();
        turn.filter(|_| self.active() < self.slots || planted!("resume-beyond-the-slots"))
    }

    /// Returns the parked job whose wait ended first, even if there is no slot for it.
    pub fn first_turn(&self) -> Option<Turn> {
        self.turns.front().copied()
    }

    /// Whether parked jobs wait for slots.
    pub fn has_turns(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Notes that the job of a packet is no longer parked.
    pub fn unpark(&mut self, task: TaskIndex, place: usize) {
        self.parked -= 1;
        self.drop_turn(place);
        *self.running.entry(task).or_default() += 1;
    }

    /// Returns how long after the end of a job the next one is held up, while others are parked. A parked job
    /// may have waited for that end, and learns of it from the broker. The broker sends the next job at the
    /// same time, and the parked one would then have to wait for it.
    pub fn keep_ns(&self) -> u64 {
        let next = self.order.first_key_value();
        match next.map(|(_, task)| self.tasks[task.0].pace) {
            Some(pace) if self.parked > 0 && !pace.is_quick() => match pace.mean_ns {
                0 => MOST_KEPT_NS,
                mean => (mean / 8).min(MOST_KEPT_NS),
            },
            _ => 0,
        }
    }

    /// Returns the next packet, if one should be sent now. It counts as out from then on.
    pub fn next_packet(&mut self) -> Option<HandOut<J>> {
        let index = self.next_task()?;
        let task = &mut self.tasks[index.0];
        let fits = if task.pace.is_quick() && self.parked == 0 {
            (PACKET_NS / task.pace.mean_ns) as usize
        } else {
            1
        };
        let active = self.out - self.parked;
        let share = if active >= self.slots {
            usize::MAX
        } else {
            // Idle slots share the jobs: two packets of one are better than one packet of two. But dozens in
            // one process would only compete for its interpreter.
            let sharers = (self.slots - active).min(2 * self.processes);
            self.waiting.div_ceil(sharers.max(1))
        };
        let most = fits.min(task.largest).min(share).clamp(1, MAX_PACKET_JOBS);
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
        *self.running.entry(index).or_default() += 1;
        Some(HandOut { task: index, jobs })
    }

    /// Notes that a job of a packet has ended.
    pub fn observe(&mut self, task: TaskIndex, cost_ns: u64) {
        if self.one_by_one {
            // No job is known to be quick, so each goes alone.
            return;
        }
        self.tasks[task.0].pace.observe(cost_ns);
        self.pace.observe(cost_ns);
    }

    fn ran(&mut self, task: TaskIndex) {
        if let Some(packets) = self.running.get_mut(&task) {
            *packets -= 1;
            if *packets == 0 {
                self.running.remove(&task);
            }
        }
    }

    /// Notes that a packet is no longer out. Its job must not be parked.
    pub fn packet_ended(&mut self, task: TaskIndex, end: PacketEnd) {
        self.out -= 1;
        self.ran(task);
        let task = &mut self.tasks[task.0];
        match end {
            PacketEnd::Ran { jobs } => {
                task.largest = task.largest.max(2 * jobs).min(MAX_PACKET_JOBS);
            }
            PacketEnd::Slow => task.largest = 1,
            PacketEnd::TakenBack => {}
        }
    }

    /// Notes a job from the broker that waits elsewhere, not for one of these slots.
    pub fn pass_by(&mut self) {
        self.granted = self.granted.saturating_sub(1);
    }

    /// Sets the number of such jobs that still wait.
    pub fn set_passed(&mut self, waiting: usize) {
        self.passed = waiting;
    }

    /// Returns the number of packets that are sent and not done.
    pub fn out(&self) -> usize {
        self.out
    }

    /// Returns the number of slots that have work.
    pub fn busy(&self) -> usize {
        self.active().min(self.slots)
    }

    /// Returns the number of jobs that are in no packet.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    pub fn is_idle(&self) -> bool {
        self.out == 0 && self.waiting == 0
    }

    /// Returns how many busy slots will be free within [`SOON_NS`], judging by their jobs.
    fn free_soon(&self) -> usize {
        let busy = self.busy().saturating_sub(self.stuck) as u64;
        let out_thousandths: u64 = self
            .running
            .iter()
            .map(|(task, packets)| (self.tasks[task.0].pace, *packets as u64))
            // Quick jobs share processors; an unknown one may be long.
            .filter(|(pace, _)| pace.mean_ns > PACKET_NS)
            .map(|(pace, packets)| packets * 1000 * SOON_NS / pace.mean_ns)
            .sum();
        // Some of the packets wait for a slot.
        (out_thousandths * busy / (self.active() as u64).max(1) / 1000) as usize
    }

    /// Returns the number of jobs that should be waiting here or on their way.
    fn wanted(&self) -> u64 {
        if self.parked > 0 || self.is_held {
            return match self.closed || self.is_held {
                true => 0,
                false => self.slots.saturating_sub(self.taken()) as u64,
            };
        }
        let free = (self.slots + self.free_soon()).saturating_sub(self.out) as u64;
        // Short jobs wait long behind a job that waits for an idle slot, or that may be long.
        let held_up = self
            .order
            .values()
            .any(|task| !self.tasks[task.0].pace.is_quick());
        if self.closed || held_up || !self.pace.is_quick() {
            return free;
        }
        let usable = self.processes.min(self.slots - self.stuck) as u64;
        free.max(usable * (AHEAD_NS / self.pace.mean_ns).clamp(1, MOST_AHEAD))
    }

    /// Returns the change to send to the broker, which then counts as sent. Called after each pass.
    pub fn grant(&mut self) -> Credit {
        if self.closed {
            return Credit::Keep;
        }
        let wanted = self.wanted();
        let held_elsewhere = self.passed.saturating_sub(MOST_PASSED) as u64;
        let have = self.waiting as u64 + self.granted + held_elsewhere;
        let missing = wanted.saturating_sub(have);
        // In batches, so that a long run of short jobs does not send credit with each of them.
        if missing == 0 || missing < wanted / 8 {
            return Credit::Keep;
        }
        self.granted += missing;
        Credit::Add(missing as u32)
    }

    /// Forgets the granted credit, after the broker was asked to send nothing.
    pub fn revoke(&mut self) {
        self.granted = 0;
    }

    /// Whether the broker was granted far more than can be used by now. Called at each tick.
    pub fn withdraw(&mut self) -> Credit {
        let most = match self.parked > 0 || self.is_held {
            false => 2 * self.wanted(),
            true => self.wanted(),
        };
        if self.granted <= most {
            return Credit::Keep;
        }
        self.granted = 0;
        Credit::Withdraw
    }

    /// Returns waiting jobs that this worker won't get to soon, to hand back to the broker, where others can
    /// take them. Called at each tick.
    pub fn surplus(&mut self) -> Vec<J> {
        if self.parked > 0 {
            let mut kept = 0;
            let most = self.slots.saturating_sub(self.taken());
            return self.take_waiting(|_| {
                kept += 1;
                kept > most
            });
        }
        let most_ns = (self.slots - self.stuck) as u64 * HELD_NS;
        let held_ns = self.tasks.iter().fold(0_u64, |sum, task| {
            sum.saturating_add(
                task.pace
                    .expected_ns()
                    .saturating_mul(task.waiting.len() as u64),
            )
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

    /// Returns the waiting jobs of one task.
    pub fn take_task(&mut self, task: TaskIndex) -> Vec<J> {
        let waiting = std::mem::take(&mut self.tasks[task.0].waiting);
        if let Some(first) = waiting.front() {
            self.order.remove(&first.arrival);
        }
        self.waiting -= waiting.len();
        waiting.into_iter().map(|waiting| waiting.job).collect()
    }

    /// Returns all waiting jobs.
    pub fn take_all(&mut self) -> Vec<J> {
        self.take_waiting(|_| true)
    }

    /// Removes and returns the waiting jobs that `wanted` selects, in the order of their arrival.
    fn take_waiting(&mut self, mut wanted: impl FnMut(TaskPace) -> bool) -> Vec<J> {
        let mut taken = Vec::new();
        let mut all: Vec<(TaskIndex, QueuedJob<J>)> = Vec::with_capacity(self.waiting);
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

    /// Returns the memory of tasks without waiting jobs, which keep room for as many jobs as have ever waited at once.
    pub fn give_back_memory(&mut self) {
        for task in &mut self.tasks {
            if task.waiting.is_empty() {
                task.waiting = VecDeque::new();
            }
        }
    }

    /// Whether a matching job waits.
    pub fn any(&self, is_it: impl Fn(&J) -> bool) -> bool {
        let mut waiting = self.tasks.iter().flat_map(|task| &task.waiting);
        waiting.any(|waiting| is_it(&waiting.job))
    }

    /// Removes and returns the waiting jobs that are not to be kept: their leases are lost, or they were
    /// cancelled.
    pub fn retain(&mut self, keep: impl Fn(&J) -> bool) -> Vec<J> {
        let mut taken = Vec::new();
        self.order.clear();
        self.waiting = 0;
        for (index, task) in self.tasks.iter_mut().enumerate() {
            for waiting in std::mem::take(&mut task.waiting) {
                match keep(&waiting.job) {
                    true => task.waiting.push_back(waiting),
                    false => taken.push(waiting.job),
                }
            }
            self.waiting += task.waiting.len();
            if let Some(first) = task.waiting.front() {
                self.order.insert(first.arrival, TaskIndex(index));
            }
        }
        taken
    }
}

#[cfg(test)]
pub(crate) mod tests;
