//! The pools: slots of one kind each, with what is decided and counted for them alone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use penstock_message::{Delivery, SeededState};

use super::Supervisor;
use crate::config::{PoolConfig, SlotKind};
use crate::policy::Policy;
use crate::zygote::LoadedTask;

pub(super) struct Pool {
    pub(super) config: PoolConfig,
    pub(super) policy: Policy<Delivery>,
    /// Where its children pull packets; kept for later zygotes.
    socket: OwnedFd,
    /// The tasks whose jobs run here.
    tasks: Vec<String>,
    /// These, until the broker is told.
    pub(super) unsubscribed: Option<Vec<String>>,
    alive: usize,
    /// Slots of its children that can take jobs.
    slots: usize,
    /// Children that have some.
    serving: usize,
}

/// The pool of each child, in the order of the children's numbers.
pub(super) fn of_children(pools: &[PoolConfig]) -> impl Iterator<Item = usize> {
    let pools = pools.iter().enumerate();
    pools.flat_map(|(number, pool)| (0..pool.processes).map(move |_| number))
}

impl Pool {
    pub(super) fn new(config: PoolConfig, socket: OwnedFd, hashing: SeededState) -> Self {
        Self {
            config,
            policy: Policy::new(hashing),
            socket,
            tasks: Vec::new(),
            unsubscribed: None,
            alive: 0,
            slots: 0,
            serving: 0,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether any task's jobs run here. A pool without has no processes.
    pub(super) fn is_needed(&self) -> bool {
        !self.tasks.is_empty()
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    pub(super) fn child_came(&mut self) {
        self.alive += 1;
        self.child_changed(0, self.config.slots);
    }

    /// `serving`: how many of its slots could take jobs at last.
    pub(super) fn child_went(&mut self, serving: u32) {
        self.alive -= 1;
        self.child_changed(serving, 0);
    }

    pub(super) fn child_changed(&mut self, before: u32, now: u32) {
        self.slots = self.slots - before as usize + now as usize;
        self.serving = self.serving - usize::from(before > 0) + usize::from(now > 0);
        self.policy.set_slots(self.slots, self.serving);
    }

    pub(super) fn nobody_is_left(&mut self) {
        (self.alive, self.slots, self.serving) = (0, 0, 0);
        self.policy.set_slots(0, 0);
    }
}

impl Supervisor {
    /// Each task goes to a pool, which the broker is told of with the next credit.
    pub(super) fn assign(&mut self, tasks: &[LoadedTask]) {
        let mut tasks_of = vec![Vec::new(); self.pools.len()];
        let mut elsewhere = Vec::new();
        for LoadedTask(task, wish) in tasks {
            let kind = SlotKind::from_word(wish).unwrap_or(self.config.default_slot);
            let place = self.pools.iter().position(|pool| pool.config.kind == kind);
            if place.is_none() {
                elsewhere.push((task.as_str(), kind));
            }
            tasks_of[place.unwrap_or_default()].push(task.clone());
        }
        for (task, kind) in elsewhere {
            tracing::warn!(
                "{task} asks for a slot of the kind {:?}, and this worker has none: it runs in a {} here{}",
                kind.word(),
                self.pools[0].config.kind.word(),
                match kind {
                    SlotKind::Thread => "; with --threads N it has threads",
                    SlotKind::Process | SlotKind::Async => "",
                }
            );
        }
        for (number, tasks) in tasks_of.into_iter().enumerate() {
            let pool = &mut self.pools[number];
            if pool.config.on_demand && pool.tasks.is_empty() && !tasks.is_empty() {
                tracing::info!(
                    "{} {} for a slot that is a {}: it has one; --processes N makes more",
                    tasks.join(", "),
                    match tasks.len() {
                        1 => "asks",
                        _ => "ask",
                    },
                    pool.config.kind.word()
                );
            }
            let was_known = !pool.tasks.is_empty();
            pool.tasks.clone_from(&tasks);
            if !tasks.is_empty() {
                pool.unsubscribed = Some(tasks);
            } else if was_known {
                // Another zygote has loaded other code: nothing more comes for these slots.
                self.withdraw(number);
            }
        }
    }

    pub(super) fn is_subscribed(&self) -> bool {
        self.pools.iter().all(|pool| pool.unsubscribed.is_none())
    }

    /// Whether no job waits or runs here.
    pub(super) fn has_nothing(&self) -> bool {
        self.pools.iter().all(|pool| pool.policy.is_idle())
    }

    /// How many slots have something to do.
    pub(super) fn busy(&self) -> usize {
        self.pools.iter().map(|pool| pool.policy.busy()).sum()
    }

    /// How many slots there are when all processes run.
    pub(super) fn wanted_slots(&self) -> u32 {
        let needed = self.pools.iter().filter(|pool| pool.is_needed());
        needed
            .map(|pool| pool.config.processes * pool.config.slots)
            .sum()
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
