//! Keeps the pools: slots of one kind each, with their own decisions and counts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use penstock_message::{Delivery, MessageId, SeededState};

use super::Supervisor;
use super::lending::Lending;
use crate::config::{PoolConfig, SlotKind};
use crate::policy::Policy;
use crate::zygote::LoadedTask;

/// Pool and its relation to the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) config: PoolConfig,
    /// Pool for its jobs that must not share a process.
    alone: Option<usize>,
    /// Whether it is such a pool.
    is_alone: bool,
}

/// Number of processes forked ahead of the jobs of isolated slots, so that a job need not wait for a fork. Each
/// takes its page tables and little more. With more of them a burst would wait less, but no job would run
/// sooner.
const MOST_AHEAD: u32 = 4;

impl Layout {
    /// Returns its maximum number of processes.
    pub(super) fn children(&self) -> u32 {
        self.config.children()
    }

    /// Whether its children's numbers may be lent: see [`Pool::lends_children`].
    pub(super) fn lends_children(&self) -> bool {
        let kinds = [SlotKind::Process, SlotKind::Isolated];
        self.is_alone || kinds.contains(&self.config.kind)
    }
}

impl PoolConfig {
    /// Returns the maximum number of processes in all.
    pub(super) fn children(self) -> u32 {
        let ahead = match self.kind {
            SlotKind::Isolated => self.processes.min(MOST_AHEAD),
            SlotKind::Process | SlotKind::Thread | SlotKind::Async => 0,
        };
        self.processes.saturating_add(ahead)
    }
}

/// Adds a pool for jobs that run alone to each pool whose processes can have several slots. Its slots are of
/// the same kind, so that tasks find what their hooks prepare.
pub(super) fn lay_out(pools: &[PoolConfig]) -> Vec<Layout> {
    let plain = |config| Layout {
        config,
        alone: None,
        is_alone: false,
    };
    let mut all: Vec<Layout> = pools.iter().copied().map(plain).collect();
    for number in 0..pools.len() {
        let config = pools[number];
        if matches!(config.kind, SlotKind::Thread | SlotKind::Async) {
            all[number].alone = Some(all.len());
            all.push(Layout {
                config: PoolConfig {
                    processes: 1,
                    slots: 1,
                    on_demand: true,
                    ..config
                },
                alone: None,
                is_alone: true,
            });
        }
    }
    all
}

pub(super) struct Pool {
    pub(super) config: PoolConfig,
    pub(super) alone: Option<usize>,
    pub(super) is_alone: bool,
    /// Number of the last job that was sent from here, among all that run alone; 0 if it came back unbegun.
    pub(super) turn: u64,
    pub(super) policy: Policy<Delivery>,
    /// Socket from which its children pull packets; kept for later zygotes.
    socket: OwnedFd,
    /// Whether a packet waits for room in it.
    pub(super) awaits_room: bool,
    /// Tasks whose jobs run here.
    tasks: Vec<String>,
    /// New tasks, until the broker learns of them.
    pub(super) unsubscribed: Option<Vec<String>>,
    alive: usize,
    /// Number of these that are replaced by others, or about to be.
    pub(super) extra: usize,
    /// Number of packets that closing processes have begun and not ended: each holds a slot that takes no
    /// other.
    closing: usize,
    /// Number of its children's slots that can take jobs.
    slots: usize,
    /// Number of children with such slots.
    serving: usize,
    /// Whether it may still have more slots than it should.
    pub(super) is_resizing: bool,
    pub(super) lending: Lending,
    /// Jobs that hold all its slots, as reported to the broker.
    pub(super) told_held: Vec<MessageId>,
}

/// Pool of each child, by the child's number.
pub(super) fn of_children(pools: &[Layout]) -> impl Iterator<Item = usize> {
    let pools = pools.iter().enumerate();
    pools.flat_map(|(number, pool)| (0..pool.children()).map(move |_| number))
}

impl Pool {
    pub(super) fn new(layout: Layout, socket: OwnedFd, hashing: SeededState) -> Self {
        let Layout {
            config,
            alone,
            is_alone,
        } = layout;
        let mut pool = Self {
            config,
            alone,
            is_alone,
            turn: 0,
            policy: Policy::new(hashing),
            socket,
            awaits_room: false,
            tasks: Vec::new(),
            unsubscribed: None,
            alive: 0,
            extra: 0,
            closing: 0,
            slots: 0,
            serving: 0,
            is_resizing: false,
            lending: Lending::default(),
            told_held: Vec::new(),
        };
        if pool.is_single_use() {
            pool.policy = Policy::one_by_one(hashing, config.processes as usize);
        }
        pool
    }

    /// Whether each process runs one job, and exits with it.
    pub(super) fn is_single_use(&self) -> bool {
        self.is_alone || self.config.kind == SlotKind::Isolated
    }

    /// Whether to fork another process.
    pub(super) fn wants_process(&self) -> bool {
        // Jobs may remain of a task that the code no longer has.
        let is_wanted = match self.is_single_use() {
            true => self.policy.out() > self.serving || self.forks_ahead(),
            false => self.is_needed(),
        };
        let most = self.config.children() as usize;
        is_wanted && self.alive < most + self.extra
    }

    /// Whether processes wait here for jobs. A job that must run alone gets a process forked for it, since such
    /// jobs are rare.
    fn forks_ahead(&self) -> bool {
        self.is_needed() && !self.is_alone
    }

    /// Whether half of the slots are idle, in a pool that forks ahead of jobs. While a job's outcome is on its way to the
    /// broker, and the next job on its way here, a slot is idle also under full load.
    pub(super) fn is_half_idle(&self) -> bool {
        self.forks_ahead() && 2 * self.policy.active() <= self.wanted()
    }

    pub(super) fn tasks(&self) -> &[String] {
        &self.tasks
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether any task's jobs come here from the broker. A pool without them has no processes, unless it gets
    /// jobs from another pool.
    pub(super) fn is_needed(&self) -> bool {
        !self.tasks.is_empty()
    }

    /// Returns how many packets may be claimed. Unlimited for those that wait for their own process.
    pub(super) fn slots_or_more(&self) -> usize {
        match self.is_single_use() {
            true => usize::MAX,
            false => self.capacity(),
        }
    }

    /// Returns how many jobs can run at once, including those in closing processes. A parked job does not run,
    /// and its process counts as free: another is forked for the next job.
    fn capacity(&self) -> usize {
        let slots = match self.lends_processes() {
            true => (self.slots + self.lending.parked).min(self.wanted()),
            false => self.slots,
        };
        slots + self.closing - self.lending.closing
    }

    /// Returns how many slots there should be.
    fn wanted(&self) -> usize {
        self.config.processes as usize * self.config.slots as usize
    }

    /// Whether each of its jobs has its own process, so that each parked one needs another process.
    pub(super) fn lends_children(&self) -> bool {
        self.config.kind == SlotKind::Process || self.is_single_use()
    }

    /// Whether a process whose job is parked is replaced by another.
    pub(super) fn lends_processes(&self) -> bool {
        self.config.kind == SlotKind::Process && !self.is_single_use()
    }

    /// Returns how many processes there are beyond the normal number, once parked jobs have continued.
    pub(super) fn spare(&self) -> usize {
        match self.lends_processes() {
            true => self.slots.saturating_sub(self.wanted()),
            false => 0,
        }
    }

    /// Whether packets wait for a process that only a fork provides. `coming` is the number already being
    /// forked.
    pub(super) fn is_short(&self, coming: usize) -> bool {
        let slots = self.slots + coming;
        let active = self.policy.active() + self.lending.closing;
        self.policy.parked() > 0
            && self.lends_processes()
            && slots < self.wanted()
            && active > slots + self.closing
    }

    pub(super) fn child_came(&mut self, slots: u32) {
        self.alive += 1;
        self.child_changed(0, slots);
    }

    /// Notes the end of a process. `serving` is the number of its slots that could take jobs.
    pub(super) fn child_went(&mut self, serving: u32) {
        self.alive -= 1;
        self.child_changed(serving, 0);
    }

    pub(super) fn child_changed(&mut self, before: u32, now: u32) {
        self.slots = self.slots - before as usize + now as usize;
        self.serving = self.serving - usize::from(before > 0) + usize::from(now > 0);
        self.count_slots();
    }

    pub(super) fn nobody_is_left(&mut self) {
        (self.alive, self.slots, self.serving) = (0, 0, 0);
        (self.extra, self.closing) = (0, 0);
        self.lending = Lending::default();
        self.count_slots();
    }

    pub(super) fn count_slots(&mut self) {
        // For single-use slots, count how many jobs may run at once, not how many processes wait for them.
        if self.is_single_use() {
            return;
        }
        let (slots, wanted) = (self.capacity(), self.wanted());
        self.is_resizing &= slots > wanted;
        let slots = match self.is_resizing {
            true => wanted,
            false => slots,
        };
        let processes = self.serving.min(self.config.processes as usize);
        self.policy.set_slots(slots, processes);
        self.policy.set_spare(self.spare());
    }

    /// Returns how many slots have work. After a resize these may be more than there should be.
    fn busy(&self) -> usize {
        match self.is_single_use() {
            true => self.policy.active(),
            false => self.policy.active().min(self.capacity()),
        }
    }

    /// Notes that a process takes no more jobs, and has this many packets to end.
    pub(super) fn closing_begun(&mut self, packets: usize) {
        self.closing += packets;
    }

    /// Notes that this many packets of closing processes have ended, or were lost.
    pub(super) fn closing_ended(&mut self, packets: usize) {
        self.closing -= packets;
        self.count_slots();
    }
}

impl Supervisor {
    /// Assigns each task to a pool; the broker learns of it with the next credit.
    pub(super) fn assign(&mut self, tasks: &[LoadedTask]) {
        let mut tasks_of = vec![Vec::new(); self.pools.len()];
        let mut elsewhere = Vec::new();
        for LoadedTask(task, wish) in tasks {
            let wished = SlotKind::from_word(wish);
            if wished == Some(SlotKind::Process) {
                self.advice.spare(task);
            }
            let kind = wished.unwrap_or(self.config.default_slot);
            let place = self.pools.iter().position(|pool| pool.config.kind == kind);
            if place.is_none() {
                elsewhere.push((task.as_str(), kind));
            }
            tasks_of[place.unwrap_or_default()].push(task.clone());
        }
        for (task, kind) in elsewhere {
            tracing::warn!(
                "{task} needs a slot of the kind {:?}, but this worker has none: it runs in a {} here{}",
                kind.word(),
                self.pools[0].config.kind.word(),
                match kind {
                    SlotKind::Thread => "; --threads N adds threads",
                    SlotKind::Process | SlotKind::Async | SlotKind::Isolated => "",
                }
            );
        }
        for (number, tasks) in tasks_of.into_iter().enumerate() {
            let pool = &mut self.pools[number];
            let is_known = pool.config.kind == SlotKind::Isolated || !pool.tasks.is_empty();
            if pool.config.on_demand && !is_known && !tasks.is_empty() {
                tracing::info!(
                    "{} {} a slot that is a {}: this worker has one; --processes N adds more",
                    tasks.join(", "),
                    match tasks.len() {
                        1 => "needs",
                        _ => "need",
                    },
                    pool.config.kind.word()
                );
            }
            let was_known = !pool.tasks.is_empty();
            pool.tasks.clone_from(&tasks);
            if !tasks.is_empty() {
                pool.unsubscribed = Some(tasks);
            } else if was_known {
                // Another zygote has loaded other code: no more jobs come for these slots.
                self.withdraw(number);
            }
        }
    }

    pub(super) fn is_subscribed(&self) -> bool {
        self.pools.iter().all(|pool| pool.unsubscribed.is_none())
    }

    /// Whether incoming jobs can run. Single-use processes are forked when jobs come.
    pub(super) fn is_staffed(&self) -> bool {
        let has_lasting = |pool: &Pool| pool.is_needed() && !pool.is_single_use();
        self.alive > 0 || !self.pools.iter().any(has_lasting)
    }

    /// Whether no job waits or runs here.
    pub(super) fn has_nothing(&self) -> bool {
        self.pools.iter().all(|pool| pool.policy.is_idle())
    }

    /// Returns how many slots have work.
    pub(super) fn busy(&self) -> usize {
        self.pools.iter().map(Pool::busy).sum()
    }

    /// Whether this pool may be sent a job now: of jobs that run alone, only one runs at a time.
    pub(super) fn may_send(&self, number: usize) -> bool {
        if !self.pools[number].is_alone {
            return true;
        }
        let mut others = self.pools.iter().enumerate();
        others.all(|(other, pool)| {
            let is_other = pool.is_alone && other != number;
            // If both have jobs, they take turns.
            let goes_first = pool.policy.waiting() > 0 && pool.turn < self.pools[number].turn;
            !is_other || pool.policy.active() == 0 && !goes_first
        })
    }

    /// Returns how many slots there are when all processes run.
    pub(super) fn wanted_slots(&self) -> u32 {
        let slots = |pool: &Pool| match pool.is_alone {
            true => pool.policy.out() as u32,
            false if pool.is_needed() => pool.config.processes * pool.config.slots,
            false => 0,
        };
        self.pools.iter().map(slots).sum()
    }

    pub(super) fn slots_in_words(&self) -> String {
        let slots = match self.wanted_slots() {
            1 => "1 slot".to_owned(),
            slots => format!("{slots} slots"),
        };
        let needed = self.pools.iter().filter(|pool| pool.is_needed());
        let kinds: Vec<String> = needed.filter_map(|pool| pool.config.in_words()).collect();
        match kinds.is_empty() {
            true => slots,
            false => format!("{slots} ({})", kinds.join(", ")),
        }
    }
}
