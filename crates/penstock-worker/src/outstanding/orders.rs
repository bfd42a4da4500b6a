//! Orders running jobs to stop, mostly because of their limits.

use std::time::{Duration, Instant};

use penstock_faults::planted;
use penstock_message::{Delivery, Lease};

use super::Outstanding;
use crate::limits::{Limits, Ordered, Step, step};
use crate::order::{JobAt, Order};
use crate::page::steady_ns;
use crate::policy::TaskIndex;

/// Running job, as reported by its child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningAt {
    pub place: usize,
    pub child: u32,
    pub job: JobAt,
}

/// Result of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// The child must be signalled.
    Now(RunningAt),
    /// This order, or a stronger one, was given before.
    Before,
    /// The job has ended, or has not begun.
    NotRunning,
}

impl Outstanding {
    /// Returns the place of a job's packet, and the job's index in it.
    pub fn find(&self, lease: &Lease) -> Option<(usize, usize)> {
        self.used.iter().find_map(|place| {
            let jobs = &self.packets[place].as_ref()?.jobs;
            let is_it =
                |job: &Option<Delivery>| job.as_ref().is_some_and(|job| job.lease == *lease);
            Some((place, jobs.iter().position(is_it)?))
        })
    }

    /// Returns the running job of the packet at this place.
    pub fn running(&self, place: usize) -> Option<RunningAt> {
        let packet = self.packets[place].as_ref()?;
        let claim = self.pages.claim(place).read();
        let index = claim.begun.checked_sub(1)?;
        // A child can write there, so the indices are checked.
        packet.jobs.get(index)?.as_ref()?;
        Some(RunningAt {
            place,
            child: claim.owner?,
            job: JobAt {
                sequence: packet.sequence,
                index,
            },
        })
    }

    /// Gives this order to the job at an index of a packet, if it runs. A later job is never hit, because the
    /// order names its job.
    pub fn order(
        &mut self,
        place: usize,
        index: usize,
        order: Order,
        now: Instant,
        grace: Duration,
    ) -> Given {
        let running = self.running(place).filter(|it| it.job.index == index);
        let (Some(running), Some(packet)) = (running, &mut self.packets[place]) else {
            return Given::NotRunning;
        };
        match packet.ordered.as_mut().filter(|it| it.index == index) {
            Some(ordered) if ordered.order >= order && !planted!("order-outdone-by-less") => {
                return Given::Before;
            }
            Some(ordered) => ordered.raise(order, now, grace),
            None => packet.ordered = Some(Ordered::new(index, order, now, grace)),
        }
        self.pages.claim(place).order(running.job, order);
        self.alarms.by(place, now);
        Given::Now(running)
    }

    /// Allows no more time to a job that was ordered to stop.
    pub fn hasten(&mut self, place: usize, index: usize, now: Instant) {
        let ordered = self.packets[place]
            .as_mut()
            .and_then(|it| it.ordered.as_mut());
        if let Some(ordered) = ordered.filter(|it| it.index == index) {
            ordered.hasten(now);
            if !planted!("kill-when-others-are-due") {
                self.alarms.by(place, now);
            }
        }
    }

    /// Whether the order at this place allows no more time.
    pub fn is_hastened(&self, place: usize) -> bool {
        let packet = self.packets[place].as_ref();
        packet
            .and_then(|it| it.ordered.as_ref())
            .is_some_and(|it| it.is_hastened)
    }

    /// Returns the earliest time at which a limit of a running job may expire, or an order to it must be
    /// checked.
    pub fn next_alarm(&self) -> Option<Instant> {
        self.alarms.next()
    }

    /// Removes and returns a place whose alarm is due (see [`Outstanding::next_alarm`]).
    pub fn pop_alarm(&mut self, now: Instant) -> Option<usize> {
        self.alarms.pop(now)
    }

    /// Decides what to do now about the running job at a place.
    pub fn look_at_limits(&mut self, place: usize, now: Instant) -> Option<(RunningAt, Step)> {
        let running = self.running(place);
        let cell = self.pages.claim(place);
        let packet = self.packets[place].as_mut()?;
        // Each later job of the packet may begin now, and is then checked in time.
        let behind = packet.limit.map(|limit| now + limit);
        let Some(running) = running else {
            behind.into_iter().for_each(|at| self.alarms.by(place, at));
            return None;
        };
        let index = running.job.index;
        let behind = behind.filter(|_| index + 1 < packet.jobs.len());
        let delivery = packet.jobs[index].as_ref()?;
        packet.ordered.take_if(|ordered| ordered.index != index);
        // A damaged child could report that its job began before the packet was sent.
        let since_ns = match planted!("limit-from-the-hand-out") {
            true => packet.sent_ns,
            false => cell.since_ns().max(packet.sent_ns),
        };
        // The clock of a parked job is stopped.
        let now_ns = packet.parked_ns.unwrap_or_else(steady_ns);
        let age = Duration::from_nanos(now_ns.saturating_sub(since_ns));
        let heard = cell.heard(running.job);
        let ordered = packet.ordered.as_mut();
        let has_heard = ordered.as_ref().is_some_and(|it| heard >= Some(it.order));
        let limits = match packet.parked_ns {
            None => Limits::of(&delivery.message),
            Some(_) => Limits::default(),
        };
        let (step, next) = step(limits, age, ordered, has_heard, now);
        for at in next.into_iter().chain(behind) {
            if planted!("limit-not-armed-again") {
                break;
            }
            self.alarms.by(place, at);
        }
        Some((running, step))
    }

    /// Returns the order that the running job at a place did not obey in time.
    pub fn condemned(&self, place: usize) -> Option<(usize, Order)> {
        let ordered = self.packets[place].as_ref()?.ordered?;
        ordered
            .is_condemned
            .then_some((ordered.index, ordered.order))
    }

    /// Returns the pool and the task of the packet at a place.
    pub fn task(&self, place: usize) -> Option<(usize, TaskIndex)> {
        let packet = self.packets[place].as_ref()?;
        Some((packet.pool, packet.task))
    }

    /// Returns the open job at an index of a packet.
    pub fn job(&self, place: usize, index: usize) -> Option<&Delivery> {
        self.packets[place].as_ref()?.jobs.get(index)?.as_ref()
    }
}
