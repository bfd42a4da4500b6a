//! Lends the slots of jobs that wait for others. A job that waits longer than a moment is *parked*: other jobs
//! run in its slot. When its wait is over it has a slot back before any new job begins.
//!
//! ```text
//!     runs ─▶ waits ─▶ parked ─▶ wants its turn ─▶ runs
//!                └───▶ held: too many are parked, and it keeps its slot
//! ```
//!
//! | slot | who runs a job in its place |
//! | --- | --- |
//! | process | a substitute, which is forked when a job has waited a moment for a process |
//! | isolated | the next process, under a number of its own |
//! | thread | one more thread, which the child starts when there is a job to take |
//! | async | another coroutine |
//!
//! No other job runs on the stack of the waiting job: its process or thread keeps its memory and its
//! connections. Idle substitutes are closed after a while.
//!
//! policy.rs decides which job continues when. A child reports waits by frames (packet.rs) and learns of turns
//! from a word of the claim (page.rs).

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_message::{Consume, MessageId};

use super::children::Life;
use super::pools::Layout;
use super::recycle::MAX_CHILDREN;
use super::{Phase, Supervisor, TICK};
use crate::config::{MAX_PLACES, SlotKind};
use crate::memory::in_words;
use crate::packet::{Wait, WaitFrame};
use crate::policy::{PacketEnd, Turn};

/// Time that a job waits for an existing process before a substitute is forked for it.
const FORK_AFTER: Duration = Duration::from_millis(5);
/// Time after which an unneeded substitute is closed.
const KEEP_SPARE: Duration = Duration::from_secs(5);
/// Interval of log lines that slots are not lent.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Lending state of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lending {
    /// Number of jobs parked in processes that stay.
    pub(super) parked: usize,
    /// Number of jobs parked in closing processes.
    pub(super) closing: usize,
    /// Numbers of children beyond those of the pool, for substitutes.
    pub(super) substitutes: usize,
    /// Time since which a job has waited for a process.
    short_since: Option<Instant>,
    /// Minimum number of spare processes since then.
    spare_since: Option<(Instant, usize)>,
    /// Time at which a job last ended while others were parked.
    ended_at: Option<Instant>,
    /// Time until which the next job is held up.
    kept_until: Option<Instant>,
}

impl Lending {
    /// Number of parked jobs with which a process accepts no more.
    pub(super) fn close(&mut self, parked: usize) {
        self.parked -= parked;
        self.closing += parked;
    }
}

/// Job that waits for others and keeps its slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    child: u32,
    frame: WaitFrame,
}

impl Layout {
    /// Returns the maximum number of its parked jobs.
    pub(super) fn max_parked(&self, given: Option<u32>) -> u32 {
        // A process that runs its job alone has no other slots to lend.
        let kind = match self.lends_children() {
            true => SlotKind::Process,
            false => self.config.kind,
        };
        given.unwrap_or_else(|| kind.max_parked(self.config.processes))
    }
}

/// Returns the numbers of children and places to reserve, given those that are needed without lending.
pub(super) fn room(
    layout: &[Layout],
    max_parked: Option<u32>,
    (children, places): (u32, u32),
) -> (u32, u32) {
    let (mut more_children, mut more_places) = (0_u32, 0_u32);
    for pool in layout {
        let most = pool.max_parked(max_parked);
        more_places = more_places.saturating_add(most);
        if pool.lends_children() {
            more_children = more_children.saturating_add(most);
            // A packet may wait for each child, in addition to its current one.
            more_places = more_places.saturating_add(most);
        }
    }
    (
        children.saturating_add(more_children).min(MAX_CHILDREN),
        places.saturating_add(more_places).min(MAX_PLACES),
    )
}

impl Supervisor {
    /// Returns the number of parked jobs.
    pub(super) fn parked(&self) -> usize {
        self.pools.iter().map(|pool| pool.policy.parked()).sum()
    }

    /// Handles a child's report of a wait. Ignores one of a job that has ended.
    pub(super) fn hear_wait(&mut self, child: u32, frame: WaitFrame, now: Instant) {
        let Some((pool, task)) = self.outstanding.waiting(child, &frame) else {
            return;
        };
        let place = usize::from(frame.place);
        let is_parked = self.outstanding.parked_since(place).is_some();
        match frame.what {
            // The job has begun another wait before its turn.
            Wait::Begun if is_parked => self.pools[pool].policy.drop_turn(place),
            Wait::Begun => {
                // An awaited job may be behind this one.
                self.take_back(place, PacketEnd::Slow);
                if self.may_park(pool, now) && self.pools[pool].policy.park(task) {
                    self.park(pool, place, child);
                    self.held.remove(&place);
                } else {
                    self.held.insert(place, Held { child, frame });
                }
            }
            Wait::Over | Wait::OverOnLoop => {
                let turn = Turn {
                    place,
                    wait: frame.wait,
                    is_on_loop: frame.what == Wait::OverOnLoop,
                };
                match is_parked {
                    true => self.pools[pool].policy.want_turn(turn),
                    false => {
                        self.held.remove(&place);
                        self.give_turn(turn, child);
                    }
                }
            }
            Wait::BrokenOff => self.forget_wait(place),
        }
    }

    /// Whether one more job of a pool may be parked; if not, logs why.
    fn may_park(&mut self, pool: usize, now: Instant) -> bool {
        let most = self.pools[pool].policy.max_parked();
        let is_process = self.pools[pool].lends_children();
        let why = if self.pools[pool].policy.parked() >= most {
            format!("{most} of its jobs already wait like this, the limit of --max-parked")
        } else if is_process && !self.has_number_for(pool) {
            "it already has the maximum number of processes".to_owned()
        } else if let Some((used, limit)) = self.lacks_memory().filter(|_| is_process) {
            format!(
                "another process would raise its memory above {} (--memory-limit), and {} are in use",
                in_words(limit),
                in_words(used)
            )
        } else {
            return true;
        };
        if self.held_logged.is_none_or(|at| at + TELL_EVERY <= now) {
            self.held_logged = Some(now);
            tracing::warn!(
                "a job that waits for other jobs keeps its slot: {why}. Nothing is lost; if all slots are kept like \
                 this, waiting jobs fail with TooManyWaiting"
            );
        }
        false
    }

    /// Whether a job of this pool can be parked while another runs in its own process.
    fn has_number_for(&self, number: usize) -> bool {
        let pool = &self.pools[number];
        pool.lending.substitutes > pool.policy.parked()
            || self
                .children
                .iter()
                .any(|child| matches!(child.life, Life::Spare))
    }

    fn park(&mut self, number: usize, place: usize, child: u32) {
        self.outstanding.park(place);
        let pool = &mut self.pools[number];
        if pool.is_single_use() {
            if pool.lending.substitutes < pool.policy.parked()
                && self.add_child(number, Instant::now()).is_some()
            {
                self.pools[number].lending.substitutes += 1;
            }
        } else {
            let child = &mut self.children[child as usize];
            if child.closing.is_some() {
                pool.lending.closing += 1;
            } else {
                pool.lending.parked += 1;
                if pool.lends_processes() {
                    pool.child_changed(std::mem::take(&mut child.serving), 0);
                }
            }
            pool.count_slots();
        }
        self.hand_back(number);
    }

    /// Hands back jobs of a pool that can't begin at once. Awaited jobs come first among those that the broker
    /// sends next.
    fn hand_back(&mut self, number: usize) {
        if self.pools[number].is_alone {
            return;
        }
        let policy = &mut self.pools[number].policy;
        let surplus = policy.surplus();
        if policy.withdraw() == crate::policy::Credit::Withdraw {
            self.withdraw(number);
        }
        self.settlements.give_back(surplus);
    }

    /// Ends the wait of the job at this place: the job has its slot again, or has ended.
    pub(super) fn forget_wait(&mut self, place: usize) {
        if !self.held.is_empty() {
            self.held.remove(&place);
        }
        let owner = self.outstanding.owner_of_parked(place);
        let Some((number, task)) = self.outstanding.unpark(place) else {
            return;
        };
        let pool = &mut self.pools[number];
        pool.policy.unpark(task, place);
        if pool.is_single_use() {
            return;
        }
        let child = owner.and_then(|owner| self.children.get_mut(owner as usize));
        if let Some(child) = child
            && child.closing.is_none()
        {
            pool.lending.parked -= 1;
            if pool.lends_processes() {
                child.serving = child.slots;
                pool.child_changed(0, child.slots);
            }
        } else {
            pool.lending.closing -= 1;
        }
        pool.count_slots();
    }

    fn give_turn(&mut self, turn: Turn, child: u32) {
        self.outstanding
            .pages
            .claim(turn.place)
            .give_turn(turn.wait);
        if turn.is_on_loop {
            self.signal(child);
        }
    }

    /// Notes that a packet of this pool has ended: a parked job may have waited for that.
    pub(super) fn keep_for_turns(&mut self, number: usize) {
        let pool = &mut self.pools[number];
        if pool.policy.parked() > 0 {
            pool.lending.ended_at = Some(Instant::now());
        }
    }

    /// Whether to hold up the next job of this pool briefly, because a parked job may want its slot back.
    pub(super) fn is_kept(&mut self, number: usize, now: Instant) -> bool {
        let pool = &mut self.pools[number];
        let keep = Duration::from_nanos(pool.policy.keep_ns());
        let until = pool.lending.ended_at.map(|at| at + keep);
        pool.lending.kept_until = until.filter(|until| now < *until);
        pool.lending.kept_until.is_some()
    }

    /// Resumes jobs whose waits are over, and starts and closes substitutes. Must be called after each pass.
    pub(super) fn lend(&mut self, now: Instant) {
        for pool in 0..self.pools.len() {
            if self.pools[pool].policy.has_turns() {
                self.give_turns(pool);
            }
            let lending = &mut self.pools[pool].lending;
            lending.kept_until.take_if(|until| *until <= now);
            let was_short = lending.short_since.is_some();
            if was_short || self.pools[pool].policy.parked() > 0 {
                self.fork_substitute(pool, now);
            }
            if self.pools[pool].lending.substitutes > 0 {
                self.close_spare(pool, now);
            }
        }
        self.park_held(now);
        self.tell_held();
    }

    fn give_turns(&mut self, pool: usize) {
        loop {
            while let Some(turn) = self.pools[pool].policy.next_turn() {
                let child = self.outstanding.owner(turn.place);
                self.forget_wait(turn.place);
                if let Some(child) = child {
                    self.give_turn(turn, child);
                }
            }
            if !self.pools[pool].policy.has_turns() {
                return;
            }
            // Jobs that have not begun must give way to them.
            let unclaimed = self.outstanding.unclaimed(pool);
            if unclaimed.is_empty() {
                match self.swap(pool) {
                    true => continue,
                    false => return,
                }
            }
            let before = self.pools[pool].policy.active();
            for place in unclaimed {
                self.take_back(place, PacketEnd::TakenBack);
            }
            self.hand_back(pool);
            if self.pools[pool].policy.active() == before {
                // They were claimed just now.
                return;
            }
        }
    }

    /// Resumes a job in place of a waiting one that had to keep its slot. Returns false if there is no such pair.
    fn swap(&mut self, pool: usize) -> bool {
        let Some(turn) = self.pools[pool].policy.first_turn() else {
            return false;
        };
        let is_here = |held: &&Held| {
            let found = self.outstanding.waiting(held.child, &held.frame);
            found.is_some_and(|(number, _)| number == pool)
        };
        let (Some(held), Some(child)) = (
            self.held.values().find(is_here).copied(),
            self.outstanding.owner(turn.place),
        ) else {
            return false;
        };
        self.forget_wait(turn.place);
        self.give_turn(turn, child);
        self.hear_wait(held.child, held.frame, Instant::now());
        true
    }

    /// Reports pools to the broker whose slots are all held by waiting jobs. The broker knows whether the
    /// awaited jobs can run elsewhere, and fails one of the waits if none can.
    fn tell_held(&mut self) {
        for number in 0..self.pools.len() {
            let jobs = self.keepers(number);
            let pool = &mut self.pools[number];
            if jobs == pool.told_held {
                continue;
            }
            pool.policy.set_held(!jobs.is_empty());
            pool.told_held.clone_from(&jobs);
            if !jobs.is_empty() {
                // Jobs that it holds must not seem to be on their way to a slot.
                for place in self.outstanding.unclaimed(number) {
                    self.take_back(place, PacketEnd::TakenBack);
                }
                let waiting = self.pools[number].policy.take_all();
                self.settlements.give_back(waiting);
                self.pools[number].policy.revoke();
                self.withdraw(number);
            }
            if let Some(broker) = &self.broker {
                let consume = Consume {
                    consumer: number as u32,
                    held_by: Some(jobs),
                    ..Consume::default()
                };
                let inbox = Arc::clone(&self.inbox);
                broker.driver.consume(consume, inbox);
            }
        }
    }

    /// Returns the jobs that hold all slots of a pool while they wait for others; none if a slot is free of
    /// them.
    fn keepers(&self, number: usize) -> Vec<MessageId> {
        let pool = &self.pools[number];
        let is_serving = self.phase == Phase::Serving && !self.is_paused;
        if self.held.is_empty() || !is_serving || !pool.is_needed() || pool.policy.has_turns() {
            return Vec::new();
        }
        let job = |held: &Held| {
            let (of, _) = self.outstanding.waiting(held.child, &held.frame)?;
            let (place, index) = (held.frame.place.into(), held.frame.index.into());
            let job = self.outstanding.job(place, index)?;
            (of == number).then_some(job.message.id)
        };
        let jobs: Vec<MessageId> = self.held.values().filter_map(job).collect();
        match jobs.len() >= pool.policy.slots() {
            true => jobs,
            false => Vec::new(),
        }
    }

    /// Parks jobs that had to keep their slots, once others are no longer parked.
    fn park_held(&mut self, now: Instant) {
        let held: Vec<Held> = self.held.values().copied().collect();
        for Held { child, frame } in held {
            let pool = self
                .outstanding
                .waiting(child, &frame)
                .map(|(pool, _)| pool);
            let has_room = pool.is_some_and(|pool| {
                let policy = &self.pools[pool].policy;
                policy.parked() < policy.max_parked()
            });
            if has_room {
                self.hear_wait(child, frame, now);
            }
        }
    }

    fn fork_substitute(&mut self, number: usize, now: Instant) {
        let is_coming = |life: &Life| matches!(life, Life::Wanted { .. } | Life::Forking);
        let children = self.children.iter();
        let coming = children
            .filter(|child| child.pool == number && is_coming(&child.life))
            .count();
        let is_short = self.pools[number].is_short(coming) && self.phase == Phase::Serving;
        let lending = &mut self.pools[number].lending;
        if !is_short {
            lending.short_since = None;
            return;
        }
        let since = *lending.short_since.get_or_insert(now);
        if since + FORK_AFTER <= now {
            lending.short_since = None;
            match self.add_child(number, now) {
                Some(_) => self.pools[number].lending.substitutes += 1,
                // Closing ones will become free.
                None => self.pools[number].lending.short_since = Some(now + TICK),
            }
        }
    }

    /// Closes processes that were forked for lent slots and are no longer needed.
    fn close_spare(&mut self, number: usize, now: Instant) {
        let spare = self.pools[number].spare();
        let lending = &mut self.pools[number].lending;
        let (since, least) = match lending.spare_since {
            _ if spare == 0 => {
                lending.spare_since = None;
                return;
            }
            Some((since, least)) => (since, least.min(spare)),
            None => (now, spare),
        };
        if now < since + KEEP_SPARE {
            lending.spare_since = Some((since, least));
            return;
        }
        lending.spare_since = None;
        let turn = self.turn_of(number);
        let is_free = |(child, it): &(usize, &super::children::Child)| {
            let child = *child as u32;
            let is_in_turn = turn.is_some_and(|(old, new)| old == child || new == child);
            it.pool == number
                && it.is_alive()
                && it.closing.is_none()
                && it.serving > 0
                && !is_in_turn
        };
        let children = self.children.iter().enumerate().rev();
        let free: Vec<u32> = children
            .filter(is_free)
            .map(|(child, _)| child as u32)
            .filter(|child| self.outstanding.places_of(Some(*child)).is_empty())
            .take(least.min(self.pools[number].lending.substitutes))
            .collect();
        for child in free {
            self.pools[number].lending.substitutes -= 1;
            self.close(child, now);
        }
    }

    /// Returns when something is next due for waiting jobs.
    pub(super) fn next_lending(&self) -> Option<Instant> {
        let pools = self.pools.iter().map(|pool| &pool.lending);
        let at = |lending: &Lending| {
            let fork = lending.short_since.map(|since| since + FORK_AFTER);
            let close = lending.spare_since.map(|(since, _)| since + KEEP_SPARE);
            fork.into_iter()
                .chain(close)
                .chain(lending.kept_until)
                .min()
        };
        pools.filter_map(at).min()
    }

    /// Handles the exit of a process for single jobs. Returns whether its number was that of a substitute that is no
    /// longer needed.
    pub(super) fn is_substitute_no_more(&mut self, number: u32) -> bool {
        let child = &mut self.children[number as usize];
        let pool = &mut self.pools[child.pool];
        let is_over = pool.is_single_use() && pool.lending.substitutes > pool.policy.parked();
        if is_over {
            pool.lending.substitutes -= 1;
            pool.extra -= 1;
            child.life = Life::Spare;
        }
        is_over
    }

    /// Resets lending once all processes are gone: none is forked for jobs that were parked.
    pub(super) fn forget_substitutes(&mut self) {
        for number in 0..self.pools.len() {
            let most = self.pools[number].config.children() as usize;
            let children = self.children.iter_mut();
            let wanted = children
                .filter(|child| child.pool == number && matches!(child.life, Life::Wanted { .. }));
            wanted.skip(most).for_each(|child| child.life = Life::Spare);
        }
        self.held.clear();
    }
}
