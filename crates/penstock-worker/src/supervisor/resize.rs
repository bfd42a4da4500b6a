//! Changes the numbers of slots while jobs run.
//!
//! | change | means |
//! | --- | --- |
//! | more processes | spare numbers become children of the pool, and are forked |
//! | fewer processes | those with the fewest jobs are closed: each ends what it has begun, and its number is spare again |
//! | other slots in each process | each process is replaced by one that has as many, as in recycle.rs |
//!
//! No running job is disturbed. While more jobs run than the new number of slots, none begins.
//!
//! The memory shared with children is laid out at the start, for twice the slots or more. A worker can't grow
//! beyond that.

use std::time::Instant;

use super::children::Life;
use super::pools::{Layout, Pool};
use super::recycle::{MAX_CHILDREN, Reason};
use super::{Phase, Supervisor, TICK};
use crate::config::{MAX_PLACES, PoolConfig, SlotKind};
use crate::question::{Reply, Sizes};

/// Minimum number of children by which a worker can grow; otherwise as many as it starts with.
const CHILDREN_TO_GROW: u32 = 64;
/// Minimum number of places for packets; a slot takes one, and each process one more.
const PLACES_TO_GROW: u32 = 1024;

/// Limits of all pools together: numbers of children, and places for their packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) children: u32,
    pub(super) places: u32,
}

impl Room {
    /// Limits of the pools, and the amount by which they may grow, next to these spare children and places.
    pub(super) fn of(layout: &[Layout], spares: (u32, u32)) -> Self {
        let taken = Self::taken_by(layout.iter().map(|pool| (pool.children(), pool.config)));
        let children = taken.children.max(CHILDREN_TO_GROW);
        let places = taken.places.max(PLACES_TO_GROW);
        Self {
            children: taken.children
                + children.min(MAX_CHILDREN.saturating_sub(taken.children + spares.0)),
            places: taken.places + places.min(MAX_PLACES.saturating_sub(taken.places + spares.1)),
        }
    }

    fn taken_by(pools: impl Iterator<Item = (u32, PoolConfig)>) -> Self {
        let none = Self {
            children: 0,
            places: 0,
        };
        pools.fold(none, |sum, (children, config)| Self {
            children: sum.children.saturating_add(children),
            places: children
                .saturating_mul(config.slots.saturating_add(1))
                .saturating_add(sum.places),
        })
    }

    fn holds(self, other: Self) -> bool {
        other.children <= self.children && other.places <= self.places
    }
}

/// Sets the given numbers. Fails for a kind of slot that the worker does not have.
fn apply(sizes: Sizes, pools: &mut [PoolConfig]) -> Result<(), &'static str> {
    let has_threads = pools
        .first()
        .is_some_and(|pool| pool.kind == SlotKind::Thread);
    let kinds = match has_threads {
        true => SlotKind::Thread,
        false => SlotKind::Process,
    };
    if !has_threads && sizes.threads.is_some() {
        return Err("it has no threads: restart it with --threads");
    }
    if !has_threads && sizes.processes.is_some() {
        return Err("without threads, -c sets the number of processes");
    }
    let processes = [
        (kinds, sizes.concurrency),
        (SlotKind::Process, sizes.processes),
        (SlotKind::Isolated, sizes.isolated),
    ];
    let slots = [
        (SlotKind::Thread, sizes.threads),
        (SlotKind::Async, sizes.async_slots),
    ];
    if processes
        .iter()
        .chain(&slots)
        .any(|(_, number)| *number == Some(0))
    {
        return Err("every kind needs at least one slot; `penstock workers pause` stops them all");
    }
    for pool in pools {
        let given = |numbers: &[(SlotKind, Option<u32>)]| {
            let of_kind = numbers.iter().filter(|(kind, _)| *kind == pool.kind);
            of_kind.filter_map(|(_, number)| *number).next()
        };
        let (processes, slots) = (given(&processes), given(&slots));
        pool.processes = processes.unwrap_or(pool.processes);
        pool.slots = slots.unwrap_or(pool.slots);
    }
    Ok(())
}

impl Supervisor {
    /// Sets the numbers of slots of pools, or refuses and changes nothing.
    pub(super) fn resize(&mut self, sizes: Sizes, now: Instant) -> Option<Reply> {
        if let Some(refused) = self.refuse_when_ending() {
            return Some(refused);
        }
        let lasting = self.pools.iter().filter(|pool| !pool.is_alone);
        let mut wanted: Vec<PoolConfig> = lasting.map(|pool| pool.config).collect();
        if let Err(why) = apply(sizes, &mut wanted) {
            return Some(Reply::Refused(why.to_owned()));
        }
        // Pools of jobs that run alone follow the others, and stay as they are.
        let alone = self.pools[wanted.len()..].iter().map(|pool| pool.config);
        let all: Vec<PoolConfig> = wanted.iter().copied().chain(alone).collect();
        let taken = Room::taken_by(all.iter().map(|config| (config.children(), *config)));
        if !self.room.holds(taken) {
            return Some(Reply::Refused(format!(
                "that takes {} processes with {} slots and places in total, but it was started with room for {} and \
                 {}: restart it with these numbers",
                taken.children, taken.places, self.room.children, self.room.places
            )));
        }
        for (number, config) in wanted.into_iter().enumerate() {
            self.pools[number].resize(config);
        }
        tracing::info!("resized: this worker now has {}", self.slots_in_words());
        (self.has_been_resized, self.is_unfit) = (true, true);
        self.fit(now);
        // Find jobs that are now in excess.
        self.tick_at.get_or_insert(now + TICK);
        None
    }

    /// Starts and closes children to match the numbers after a resize. Must be called after each pass.
    pub(super) fn fit(&mut self, now: Instant) {
        if self.phase != Phase::Serving || !std::mem::take(&mut self.is_unfit) {
            return;
        }
        for pool in 0..self.pools.len() {
            if !self.pools[pool].is_alone {
                self.fit_children(pool, now);
                self.replace_of_other_size(pool);
            }
        }
    }

    fn fit_children(&mut self, pool: usize, now: Instant) {
        let turn = self.turn_of(pool);
        // One of the two is about to go.
        let wanted = self.pools[pool].config.children() as usize
            + usize::from(turn.is_some())
            + self.pools[pool].lending.substitutes;
        let children = self.children.iter().enumerate();
        let lasting = children.filter(|(_, child)| {
            let is_here = !matches!(child.life, Life::Spare | Life::Gone);
            child.pool == pool && is_here && child.closing.is_none()
        });
        let lasting: Vec<usize> = lasting.map(|(number, _)| number).collect();
        for _ in lasting.len()..wanted {
            // If none is left, closing children will become free.
            let mut children = self.children.iter_mut();
            if let Some(child) = children.find(|child| matches!(child.life, Life::Spare)) {
                (child.pool, child.failures) = (pool, 0);
                child.life = Life::Wanted { from: now };
            }
        }
        let mut surplus = lasting.len().saturating_sub(wanted);
        let is_in_turn = |number: &usize| {
            turn.is_some_and(|(old, successor)| [old, successor].contains(&(*number as u32)))
        };
        let mut free: Vec<usize> = lasting.into_iter().filter(|it| !is_in_turn(it)).collect();
        free.retain(|number| {
            let child = &mut self.children[*number];
            let is_dropped = surplus > 0 && matches!(child.life, Life::Wanted { .. });
            if is_dropped {
                child.life = Life::Spare;
                surplus -= 1;
            }
            !is_dropped
        });
        if self.pools[pool].is_single_use() {
            // They exit with their jobs.
            return;
        }
        // Idle ones first.
        free.retain(|number| self.children[*number].is_alive());
        free.sort_by_key(|number| self.outstanding.places_of(Some(*number as u32)).len());
        for number in free.into_iter().take(surplus) {
            self.pools[pool].extra += 1;
            self.close(number as u32, now);
        }
    }

    /// Replaces processes with a different number of slots than configured.
    fn replace_of_other_size(&mut self, pool: usize) {
        let slots = self.pools[pool].config.slots;
        for number in 0..self.children.len() {
            let child = &self.children[number];
            let is_other = child.pool == pool && child.slots != slots;
            if is_other && child.is_alive() && child.closing.is_none() {
                self.make_due(number as u32, Reason::Size(slots));
            }
        }
    }
}

impl Pool {
    fn resize(&mut self, config: PoolConfig) {
        if config == self.config {
            return;
        }
        self.config = config;
        self.is_resizing = true;
        match self.is_single_use() {
            true => {
                let at_once = config.processes as usize;
                self.policy.set_slots(at_once, at_once);
            }
            false => self.count_slots(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{MAX_PROCESSES, MAX_SLOTS};
    use crate::supervisor::pools::lay_out;
    use crate::supervisor::recycle::spares;

    fn pool(kind: SlotKind, processes: u32, slots: u32) -> PoolConfig {
        PoolConfig {
            kind,
            processes,
            slots,
            on_demand: false,
        }
    }

    #[test]
    fn numbers_are_for_the_kinds_that_the_worker_has() {
        use SlotKind::{Async, Isolated, Process, Thread};
        let plain = [
            pool(Process, 4, 1),
            pool(Async, 1, 100),
            pool(Isolated, 2, 1),
        ];
        let threaded = [
            pool(Thread, 4, 10),
            pool(Process, 1, 1),
            pool(Async, 1, 100),
            pool(Isolated, 2, 1),
        ];
        let check = |pools: &[PoolConfig], sizes: Sizes, expected: Result<&[(u32, u32)], &str>| {
            let mut pools = pools.to_vec();
            let applied = apply(sizes, &mut pools);
            let numbers: Vec<(u32, u32)> = pools
                .iter()
                .map(|pool| (pool.processes, pool.slots))
                .collect();
            match (applied, expected) {
                (Ok(()), Ok(expected)) => assert_eq!(numbers, expected, "{sizes:?}"),
                (Err(why), Err(expected)) => assert!(why.contains(expected), "{sizes:?}: {why}"),
                (applied, _) => panic!("{sizes:?}: {applied:?}"),
            }
        };
        let none = Sizes::default();
        let eight = Sizes {
            concurrency: Some(8),
            async_slots: Some(200),
            isolated: Some(3),
            ..none
        };
        check(&plain, none, Ok(&[(4, 1), (1, 100), (2, 1)]));
        check(&plain, eight, Ok(&[(8, 1), (1, 200), (3, 1)]));
        check(&threaded, eight, Ok(&[(8, 10), (1, 1), (1, 200), (3, 1)]));
        let threads = Sizes {
            threads: Some(20),
            processes: Some(2),
            ..none
        };
        check(&threaded, threads, Ok(&[(4, 20), (2, 1), (1, 100), (2, 1)]));
        check(&plain, threads, Err("--threads"));
        let processes = Sizes {
            processes: Some(2),
            ..none
        };
        check(&plain, processes, Err("-c sets"));
        let nothing = Sizes {
            async_slots: Some(0),
            ..none
        };
        check(&plain, nothing, Err("pause"));
    }

    #[test]
    fn a_worker_can_double_and_never_has_more_children_or_places_than_can_be_named() {
        use SlotKind::{Process, Thread};
        let check = |pools: &[PoolConfig], expected: (u32, u32)| {
            let layout = lay_out(pools);
            let spares = spares(&layout);
            let room = Room::of(&layout, spares);
            assert_eq!((room.children, room.places), expected, "{pools:?}");
            assert!(room.children + spares.0 <= MAX_CHILDREN);
            assert!(room.places + spares.1 <= MAX_PLACES);
        };
        check(&[pool(Process, 4, 1)], (68, 8 + 1024));
        check(&[pool(Process, 100, 1)], (200, 200 + 1024));
        check(&[pool(Process, MAX_PROCESSES, 1)], (4094, 16_000));
        // Each pool with several slots has another pool, for a job that runs alone.
        check(&[pool(Thread, 4, 10)], (69, 46 + 1024));
        check(
            &[pool(Thread, 1, MAX_SLOTS)],
            (66, MAX_PLACES - MAX_SLOTS - 1),
        );
    }
}
