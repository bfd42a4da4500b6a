//! Tracks the memory of the processes: each one's own memory, the usual peaks of tasks, and deaths for lack of
//! memory.
//!
//! The *own* memory of a child is its memory beyond the zygote's at the fork, used or left behind by its jobs.
//! Pages that it shares with the zygote and then writes to are copied, but don't count: the size of the app
//! bounds them.
//!
//! The *usual peak* of a task is learnt from processes that run one job at a time, whose peak is the job's. In
//! a process with threads or an event loop, memory can't be attributed to a job.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::Supervisor;
use super::children::Life;
use super::recycle::Reason;
use crate::config::{MemoryConfig, MemoryLimit};
use crate::memory::{Figures, Host, Kills, Room, forget_peak, in_words};
use crate::zygote::{Zygote, describe_status, is_kill};

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Maximum interval between checks of a child; checks take a hundredth of the time.
const LOOK_AT_CHILD: Duration = Duration::from_micros(20);

/// Amount of own memory for which an idle child is woken.
const WORTH_TRIMMING: u64 = 16 << 20;

/// Default share of a container's memory that a worker uses.
const USUAL_PERCENT: u64 = 90;

/// Memory of a child.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChildMemory {
    /// Figures of the zygote at the fork.
    base: Figures,
    /// Own memory at the last check.
    pub(super) own: u64,
    /// Whether it was asked to return freed memory, because it has more than its limit.
    is_trimmed: bool,
}

impl ChildMemory {
    pub(super) fn note(&mut self, figures: Figures) {
        self.own = figures.anonymous.saturating_sub(self.base.anonymous);
    }
}

/// Job that runs alone in its process.
#[derive(Clone, Copy, Debug)]
struct Measured {
    child: u32,
    pid: i32,
    at_begin: Figures,
}

/// End of a process.
#[derive(Clone, Debug)]
pub(super) struct Death {
    pub(super) reason: String,
    pub(super) is_for_memory: bool,
    /// Another process had far more memory, and the kernel killed this one as well.
    pub(super) is_innocent: bool,
    /// Maximum of its own memory.
    own_peak: u64,
}

impl Death {
    pub(super) fn of(reason: &str) -> Self {
        Self {
            reason: reason.to_owned(),
            is_for_memory: false,
            is_innocent: false,
            own_peak: 0,
        }
    }
}

/// Peaks of tasks.
#[derive(Debug, Default)]
pub(super) struct Peaks {
    by_task: BTreeMap<String, Peak>,
}

#[derive(Debug, Default)]
struct Peak {
    /// Number of its jobs that could be measured.
    jobs: u64,
    last: VecDeque<u64>,
    usual: u64,
}

impl Peaks {
    /// Number of a task's first jobs that are all measured; later ones are sampled. Also the number of peaks
    /// remembered.
    const MEMORY: usize = 20;
    const EACH: u64 = 50;

    /// Notes that a job of the task has begun; returns whether to measure it.
    fn is_next(&mut self, task: &str) -> bool {
        let peak = self.of(task);
        peak.jobs += 1;
        peak.jobs <= Self::MEMORY as u64 || peak.jobs.is_multiple_of(Self::EACH)
    }

    fn of(&mut self, task: &str) -> &mut Peak {
        if !self.by_task.contains_key(task) {
            self.by_task.insert(task.to_owned(), Peak::default());
        }
        self.by_task.entry(task.to_owned()).or_default()
    }

    fn add(&mut self, task: &str, bytes: u64) {
        let peak = self.of(task);
        if peak.last.len() == Self::MEMORY {
            peak.last.pop_front();
        }
        peak.last.push_back(bytes);
        let mut sorted: Vec<u64> = peak.last.iter().copied().collect();
        sorted.sort_unstable();
        // Of twenty, all but the largest one are below.
        peak.usual = sorted[(sorted.len() * 95).div_ceil(100) - 1];
    }

    /// Returns the bytes that suffice for 19 in 20 jobs of this task. `None`: none was measured.
    pub(super) fn usual(&self, task: &str) -> Option<u64> {
        let peak = self.by_task.get(task)?;
        (!peak.last.is_empty()).then_some(peak.usual)
    }
}

pub(super) struct Memory {
    config: MemoryConfig,
    host: Host,
    room: Option<Room>,
    kills: Kills,
    pub(super) look_at: Option<Instant>,
    /// Figures of the zygote, which change little once it has loaded the app.
    zygote: Option<(Instant, Figures)>,
    /// Memory of the supervisor and the zygote.
    pub(super) base: u64,
    pub(super) peaks: Peaks,
    /// Time at which the kernel last killed a child for memory, with that child's memory.
    killed: Option<(Instant, u64)>,
    /// Measured jobs, by place; `None`: not to be measured.
    measured: BTreeMap<usize, Option<Measured>>,
}

impl Memory {
    pub(super) fn new(config: MemoryConfig) -> Self {
        let host = Host::find();
        let room = host.room();
        Self {
            config,
            host,
            room,
            kills: Kills::default(),
            look_at: None,
            zygote: None,
            base: 0,
            peaks: Peaks::default(),
            killed: None,
            measured: BTreeMap::new(),
        }
    }

    /// Bytes that the worker may use; `None`: no limit.
    pub(super) fn limit(&self) -> Option<u64> {
        let share = |percent| self.room.map(|room| room.bytes / 100 * percent);
        match self.config.limit {
            MemoryLimit::None => None,
            MemoryLimit::Bytes(bytes) => Some(bytes),
            MemoryLimit::Percent(percent) => share(u64::from(percent)),
            MemoryLimit::Usual => self
                .room
                .filter(|room| room.is_container)
                .and_then(|_| share(USUAL_PERCENT)),
        }
    }

    fn look_at_kills(&mut self) {
        self.kills.look(self.host.kills());
    }

    /// Notes that a job begins: from now on memory must be checked.
    pub(super) fn begin(&mut self, now: Instant) {
        if self.look_at.is_none() {
            self.kills.begin(self.host.kills());
            self.look_at = Some(now + LOOK_EVERY);
        }
    }

    fn zygote_figures(&mut self, pid: i32, now: Instant) -> Figures {
        if let Some((at, figures)) = self.zygote
            && now < at + LOOK_EVERY
        {
            return figures;
        }
        let figures = Figures::of(pid).unwrap_or_default();
        self.zygote = Some((now, figures));
        figures
    }

    /// Forgets the job at this place, which did not begin.
    pub(super) fn forget_place(&mut self, place: usize) {
        self.measured.remove(&place);
    }

    /// Starts over with another zygote.
    pub(super) fn forget(&mut self) {
        self.zygote = None;
        self.measured.clear();
    }

    fn in_words(&self) -> String {
        match self.room {
            Some(room) if room.is_container => {
                format!(
                    "the kernel killed it at the container's limit of {}",
                    in_words(room.bytes)
                )
            }
            Some(room) => format!(
                "the kernel killed it, because the machine's {} were used up",
                in_words(room.bytes)
            ),
            None => "the kernel killed it".to_owned(),
        }
    }
}

impl Supervisor {
    pub(super) fn child_gets_memory(&mut self, number: u32, now: Instant) {
        if let Some(pid) = self.zygote.as_ref().and_then(Zygote::pid) {
            let base = self.memory.zygote_figures(pid.as_raw_nonzero().get(), now);
            self.children[number as usize].memory = ChildMemory {
                base,
                ..ChildMemory::default()
            };
        }
    }

    /// Checks the memory of all processes.
    pub(super) fn look_at_memory(&mut self, now: Instant) {
        self.memory.look_at_kills();
        let mut any_trims = false;
        let mut alive = 0;
        for number in 0..self.children.len() {
            let child = &mut self.children[number];
            if let Life::Alive { pid } = child.life
                && let Some(figures) = Figures::of(pid)
            {
                alive += 1;
                child.memory.note(figures);
                any_trims |= self.hold_to_its_memory(number as u32);
            }
        }
        self.look_at_base();
        self.look_at_held();
        let pause = LOOK_EVERY.max(LOOK_AT_CHILD * alive * 100);
        // Settlements that the broker has not confirmed still hold memory, which is worth returning afterwards.
        let is_settling = self.inbox.unconfirmed() > 0;
        let is_busy = !self.outstanding.is_empty() || self.is_holding() || is_settling;
        self.memory.look_at = (any_trims || is_busy).then_some(now + pause);
        if self.memory.look_at.is_none() {
            for pool in &mut self.pools {
                pool.policy.give_back_memory();
            }
            // The allocator keeps freed memory with the thread that allocated it, and only that thread can return it.
            // This one allocates nearly all: it reads the deliveries, and encodes the settlements.
            (self.config.give_back)();
        }
    }

    pub(super) fn look_at_base(&mut self) {
        let supervisor = Figures::of_this_process();
        let zygote = self
            .zygote
            .as_ref()
            .and_then(Zygote::pid)
            .and_then(|pid| Figures::of(pid.as_raw_nonzero().get()));
        let both = supervisor.into_iter().chain(zygote);
        self.memory.base = both.map(|figures| figures.anonymous).sum();
    }

    /// Asks a child with too much own memory to return freed memory, and has it replaced if it then still has too much.
    /// Returns whether to check it again.
    fn hold_to_its_memory(&mut self, number: u32) -> bool {
        let Some(most) = self.memory.config.max_per_child else {
            return false;
        };
        let child = &mut self.children[number as usize];
        let pool = &self.pools[child.pool];
        if child.memory.own <= most || pool.is_single_use() || child.closing.is_some() {
            child.memory.is_trimmed = false;
            return false;
        }
        let own = child.memory.own;
        if !std::mem::replace(&mut child.memory.is_trimmed, true) {
            self.outstanding.pages.ask_to_trim(number);
        } else if !self.outstanding.pages.is_to_trim(number) {
            self.make_due(number, Reason::Memory { own, most });
            return false;
        }
        let is_waiting = self.outstanding.places_of(Some(number)).is_empty();
        let slots = self.pools[self.children[number as usize].pool].config.slots;
        if (is_waiting || slots > 1)
            && let Some(zygote) = &mut self.zygote
        {
            let _ = zygote.nudge_child(number);
        }
        true
    }

    /// Makes idle children return freed memory.
    pub(super) fn trim_idle(&mut self) {
        for number in 0..self.children.len() as u32 {
            let child = &self.children[number as usize];
            if child.is_alive()
                && child.memory.own > WORTH_TRIMMING
                && self.outstanding.places_of(Some(number)).is_empty()
                && let Some(zygote) = &mut self.zygote
            {
                self.outstanding.pages.ask_to_trim(number);
                let _ = zygote.nudge_child(number);
            }
        }
    }

    /// Starts to measure jobs that run alone at the moment, in a process that runs others too.
    pub(super) fn measure_begun(&mut self, pool: usize) {
        if self.pools[pool].config.slots > 1 || self.pools[pool].is_single_use() {
            return;
        }
        let lone: Vec<_> = self.outstanding.lone(pool).collect();
        for (place, task, owner) in lone {
            let Some(Life::Alive { pid }) = self.children.get(owner as usize).map(|it| &it.life)
            else {
                continue;
            };
            let pid = *pid;
            if self.memory.measured.contains_key(&place) {
                continue;
            }
            let task = self.pools[pool].policy.task_name(task);
            let measured = match self.memory.peaks.is_next(task) {
                true => {
                    forget_peak(pid);
                    Figures::of(pid).map(|mut at_begin| {
                        // It has already run for some milliseconds, and may have allocated a lot.
                        let memory = self.children[owner as usize].memory;
                        at_begin.anonymous =
                            at_begin.anonymous.min(memory.base.anonymous + memory.own);
                        Measured {
                            child: owner,
                            pid,
                            at_begin,
                        }
                    })
                }
                false => None,
            };
            self.memory.measured.insert(place, measured);
        }
    }

    /// Notes that the packet at this place has ended, and with it its last job.
    pub(super) fn measure_ended(&mut self, place: usize, task: &str) {
        let Some(Some(measured)) = self.memory.measured.remove(&place) else {
            return;
        };
        let child = &mut self.children[measured.child as usize];
        let is_here = matches!(child.life, Life::Alive { pid } if pid == measured.pid);
        if is_here && let Some(figures) = Figures::of(measured.pid) {
            child.memory.note(figures);
            let peak = figures.anonymous_peak();
            let grown = peak.saturating_sub(measured.at_begin.anonymous);
            self.memory.peaks.add(task, grown);
        }
    }

    /// Describes the death of a process.
    pub(super) fn judge_death(&mut self, number: u32, status: i32, peak_bytes: u64) -> Death {
        let child = &self.children[number as usize];
        let own_peak = peak_bytes.saturating_sub(child.memory.base.resident);
        let is_killed = is_kill(status) && !child.is_killed;
        let explained = match is_killed {
            true => self.memory.kills.explain(self.memory.host.kills()),
            false => None,
        };
        let reason = match explained {
            Some(true) => format!(
                "out of memory: {}; this process had {} of its own",
                self.memory.in_words(),
                in_words(own_peak)
            ),
            Some(false) => {
                "killed by signal 9 (SIGKILL), but not by the kernel: there was enough memory"
                    .to_owned()
            }
            None => describe_status(status),
        };
        let is_for_memory = explained == Some(true);
        let is_innocent = is_for_memory && self.had_far_less_than_another(number, own_peak);
        if is_for_memory {
            let now = Instant::now();
            self.memory.killed = Some((now, own_peak));
        }
        Death {
            reason,
            is_for_memory,
            is_innocent,
            own_peak,
        }
    }

    /// Whether the kernel may have killed this process as well. It kills the largest process first. While that
    /// one dies, which takes longer the larger it is, another process that allocates memory can make the kernel
    /// kill one more.
    fn had_far_less_than_another(&self, number: u32, own_peak: u64) -> bool {
        let is_far_more = |own: u64| own >= own_peak.saturating_mul(2);
        let killed = self.memory.killed;
        if killed.is_some_and(|(at, own)| at.elapsed() < LOOK_EVERY && is_far_more(own)) {
            return true;
        }
        let room = self.memory.room.map_or(0, |room| room.bytes);
        let is_small = own_peak.saturating_mul(4) <= room;
        let mut others = self.children.iter().enumerate();
        others.any(|(other, child)| match child.life {
            Life::Alive { pid } if other != number as usize => match Figures::of(pid) {
                Some(figures) => {
                    let own = figures
                        .anonymous
                        .saturating_sub(child.memory.base.anonymous);
                    is_far_more(own) && own > 0
                }
                // It is dying, and its exit will report its memory.
                None => is_small,
            },
            _ => false,
        })
    }

    /// Adds to the reason of a death what is known about the single job in the process, and learns from it.
    pub(super) fn learn_from_death(&mut self, death: &Death, place: usize, task: &str) -> String {
        let measured = self.memory.measured.remove(&place).flatten();
        if !death.is_for_memory {
            return death.reason.clone();
        }
        let usual = self.memory.peaks.usual(task);
        // The peak was reset when the job began; memory that the process had before is not the job's.
        let before = measured.map_or(0, |measured| {
            let child = &self.children[measured.child as usize];
            let own = measured.at_begin.anonymous;
            own.saturating_sub(child.memory.base.anonymous)
        });
        self.memory
            .peaks
            .add(task, death.own_peak.saturating_sub(before));
        match usual {
            Some(usual) if usual > 0 => format!(
                "{}, {:.1} times the usual peak of {task} ({})",
                death.reason,
                death.own_peak as f64 / usual as f64,
                in_words(usual)
            ),
            _ => death.reason.clone(),
        }
    }

    /// Notes a single-job process that exited normally: its peak was the job's.
    pub(super) fn learn_from_end(&mut self, number: u32, death: &Death) {
        if let Some(task) = self.children[number as usize].ran.take() {
            self.memory.peaks.add(&task, death.own_peak);
        }
    }

    pub(super) fn usual_peaks<'a>(&self, tasks: impl Iterator<Item = &'a str>) -> Vec<Option<u64>> {
        tasks.map(|task| self.memory.peaks.usual(task)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_peak_is_that_of_nineteen_in_twenty() {
        let mut peaks = Peaks::default();
        assert_eq!(peaks.usual("load"), None);
        peaks.add("load", 100);
        assert_eq!(peaks.usual("load"), Some(100));
        for _ in 0..19 {
            peaks.add("load", 40);
        }
        // One in twenty may be more.
        assert_eq!(peaks.usual("load"), Some(40));
        peaks.add("load", 90);
        peaks.add("load", 80);
        assert_eq!(peaks.usual("load"), Some(80));
        assert_eq!(peaks.usual("other"), None);
    }

    #[test]
    fn the_first_jobs_of_a_task_are_measured_and_then_one_in_fifty() {
        let mut peaks = Peaks::default();
        let measured = (1..=200).filter(|_| peaks.is_next("load")).count();
        assert_eq!(measured, 20 + 4);
    }
}
